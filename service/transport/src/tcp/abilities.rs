//! Abilities of the TCP transport: setting paths, telling of dead ones, counting packets, leaving
//! by a named interface.

use std::sync::Arc;

use crate::tcp::{Half, TcpTransport, device};
use crate::{
    Abilities, FlowId, FlowOptions, FlowPath, LocalDevices, PathControl, PathEvent, PathEvents, SendFlow,
    TransportError, WireStatistics, WireStats,
};
use mccs_net::tcp_info::wire_stats;

impl Abilities for TcpTransport {
    fn path_control(&mut self) -> Option<&mut dyn PathControl> {
        Some(self)
    }

    fn path_events(&mut self) -> Option<&mut dyn PathEvents> {
        Some(self)
    }

    fn wire_statistics(&self) -> Option<&dyn WireStatistics> {
        Some(self)
    }

    fn local_devices(&self) -> Option<&dyn LocalDevices> {
        Some(self)
    }
}

impl PathControl for TcpTransport {
    fn set_path(&mut self, flow: SendFlow, path: &FlowPath, detours: &Arc<[FlowPath]>) {
        self.paths.go_over(FlowId::from(flow).0, path, detours, &mut self.flows, &mut self.watches);
    }
}

impl PathEvents for TcpTransport {
    fn take_path_event(&mut self) -> Option<PathEvent> {
        self.paths.take_event()
    }
}

impl WireStatistics for TcpTransport {
    fn wire_stats(&self, flow: SendFlow) -> Option<WireStats> {
        let Half::Send(sender) = &self.flows.get(FlowId::from(flow).0)?.half else { return None };
        sender.sockets().filter_map(wire_stats).reduce(|all, one| WireStats {
            segments: all.segments + one.segments,
            retransmits: all.retransmits + one.retransmits,
            round_trip: all.round_trip.max(one.round_trip),
        })
    }
}

impl LocalDevices for TcpTransport {
    fn is_device_up(&self, options: &FlowOptions) -> Result<bool, TransportError> {
        let Some(device) = &options.device else { return Ok(true) };
        let is_ipv4 = options.source_address.is_none_or(|address| address.is_ipv4());
        device::source(device, is_ipv4, options.source_address).map(|source| source.is_up)
    }
}
