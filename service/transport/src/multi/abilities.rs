//! Abilities of several transports as one: a call goes to the transport of its flow, if that has
//! the ability.

use std::sync::Arc;

use super::super::{
    Abilities, FlowId, FlowOptions, FlowPath, GpuAccess, GpuMemory, LocalDevices, MemoryKey, PathControl, PathEvent,
    PathEvents, PortEvent, PortEvents, SendFlow, TransportError, WireStatistics, WireStats, is_device_up,
};
use super::{Member, MultiTransport, outside};
use mccs_runtime::Progress;

/// Abilities of at least one of the transports; asked once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Can {
    control_paths: bool,
    tell_of_paths: bool,
    tell_of_ports: bool,
    count_packets: bool,
    reach_gpus: bool,
}

impl Can {
    pub(super) fn of(members: &mut [Member]) -> Self {
        Can {
            control_paths: members.iter_mut().any(|member| member.transport.path_control().is_some()),
            tell_of_paths: members.iter_mut().any(|member| member.transport.path_events().is_some()),
            tell_of_ports: members.iter_mut().any(|member| member.transport.port_events().is_some()),
            count_packets: members.iter().any(|member| member.transport.wire_statistics().is_some()),
            reach_gpus: members.iter().any(|member| member.transport.gpu_memory().is_some()),
        }
    }
}

impl Abilities for MultiTransport {
    fn path_control(&mut self) -> Option<&mut dyn PathControl> {
        if self.can.control_paths { Some(self) } else { None }
    }

    fn path_events(&mut self) -> Option<&mut dyn PathEvents> {
        if self.can.tell_of_paths { Some(self) } else { None }
    }

    fn port_events(&mut self) -> Option<&mut dyn PortEvents> {
        if self.can.tell_of_ports { Some(self) } else { None }
    }

    fn wire_statistics(&self) -> Option<&dyn WireStatistics> {
        if self.can.count_packets { Some(self) } else { None }
    }

    fn gpu_memory(&self) -> Option<&dyn GpuMemory> {
        if self.can.reach_gpus { Some(self) } else { None }
    }

    fn local_devices(&self) -> Option<&dyn LocalDevices> {
        Some(self)
    }
}

impl GpuMemory for MultiTransport {
    fn gpu_access(&self, memory: MemoryKey) -> Option<GpuAccess> {
        let memory = self.memory.get(memory.0)?;
        let of = |(place, member): (usize, &Member)| member.transport.gpu_memory()?.gpu_access(memory.key(place)?);
        self.members.iter().enumerate().filter_map(of).reduce(GpuAccess::worse)
    }

    fn reaches_gpus(&self, flow: FlowId) -> bool {
        let of = |(member, flow): (&Member, FlowId)| Some(member.transport.gpu_memory()?.reaches_gpus(flow));
        self.of_flow(flow).ok().and_then(of).unwrap_or(false)
    }
}

impl PathControl for MultiTransport {
    fn set_path(&mut self, flow: SendFlow, path: &FlowPath, detours: &Arc<[FlowPath]>) {
        let Ok((member, flow)) = self.of_flow_mut(flow.into()) else { return };
        if let Some(paths) = member.transport.path_control() {
            paths.set_path(SendFlow(flow), path, detours);
            member.said = Progress::Busy;
        }
    }
}

impl PathEvents for MultiTransport {
    fn take_path_event(&mut self) -> Option<PathEvent> {
        self.members.iter_mut().enumerate().find_map(|(place, member)| {
            let event = member.transport.path_events()?.take_path_event()?;
            Some(PathEvent { flow: SendFlow(outside(place, event.flow.into())), ..event })
        })
    }
}

impl PortEvents for MultiTransport {
    fn take_port_event(&mut self) -> Option<PortEvent> {
        self.members.iter_mut().enumerate().find_map(|(place, member)| {
            let event = member.transport.port_events()?.take_port_event()?;
            Some(PortEvent { flow: outside(place, event.flow), ..event })
        })
    }
}

impl WireStatistics for MultiTransport {
    fn wire_stats(&self, flow: SendFlow) -> Option<WireStats> {
        let (member, flow) = self.of_flow(flow.into()).ok()?;
        member.transport.wire_statistics()?.wire_stats(SendFlow(flow))
    }
}

impl LocalDevices for MultiTransport {
    fn is_device_up(&self, options: &FlowOptions) -> Result<bool, TransportError> {
        let member = self.members.get(self.place_of(options)?).ok_or(TransportError::NO_FLOW)?;
        is_device_up(member.transport.local_devices(), options)
    }
}
