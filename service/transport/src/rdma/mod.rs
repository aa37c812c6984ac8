//! Flows over RDMA: messages are written straight into the peer's posted buffers by reliable queue pairs.
//!
//! ```text
//! sender                                                   receiver
//!   isend -->  message ------ RDMA writes, in parts ------> posted buffer --> test: Done
//!              credit ring <- RDMA write, with immediate -- irecv (address, key, length)
//!   isend -->  short message, without a credit -----------> inbox --copied--> posted buffer
//!   control channel: two TCP flows, by which the two find each other, agree on connections, and know that the other lives
//! ```
//!
//! Every write carries an immediate: of a part the message's tag, of credits their number. So nobody polls memory, no header
//! travels, and a completion says that the bytes in front of it are there. The parts of all messages go round the flow's
//! queue pairs, and the receiver takes them in the same round.
//!
//! A flow's *connection* is a port and queue pairs on either side. When it breaks (link down, retries exceeded, queue pair failed,
//! address changed), the sender offers another one, on another port where one is up, or else on the same again. The receiver says how
//! many messages have come; those behind them are sent again. A flow fails when no connection has carried anything for its
//! `silence_timeout`, when its control channel breaks, or at once where another connection could not help (a key that is no good).
//!
//! | folder, file | what |
//! | --- | --- |
//! | `verbs/` | libibverbs, and the fake driver that stands in for it in tests |
//! | `device/` | ports, completion queues, and a worker thread for calls of the kernel that take long |
//! | `connection/` | queue pairs of a flow, and how the two sides agree on them over the control channel |
//! | `data_path/` | sender, receiver, registered memory, and who posts when |
//! | `failover/` | from connection to connection; ports and devices that go and come back |
//! | `flow.rs`, `close.rs` | a flow's state, and its end |
//! | `timers.rs`, `wakeup.rs`, `flow_events.rs` | what is due, what wakes a sleeping transport, what its user is told |
//!
//! Deliberately absent: atomics and two-sided sends; shared receive queues and connection sharing, which save memory where
//! a host talks to thousands and cost order; protection of a receiver from its sender: who has a credit's key may write all of
//! the registered memory it is from, so flows are between services that trust each other.

mod close;
mod connection;
mod data_path;
mod device;
mod failover;
mod flow;
mod flow_events;
mod options;
#[cfg(test)]
mod tests;
mod timers;
mod verbs;
mod wakeup;

use std::sync::Arc;
use std::time::Instant;

use mccs_config::service::Device;
use mccs_model::handles::HandleTable;
use nix::errno::Errno;

use self::connection::connector::Connector;
use self::connection::control_channels::ControlChannels;
use self::data_path::memory::Memory;
use self::data_path::send_scheduler::SendScheduler;
use self::device::Devices;
use self::device::ports::Port;
pub use self::device::ports::{NoRdma, interface_of};
use self::flow::Flow;
use self::flow_events::FlowEvents;
pub use self::options::{DeviceChoice, RdmaOptions};
use self::timers::Timers;
use self::verbs::LinkLayer;
pub use self::verbs::{Driver, Unavailable, Verbs, VerbsError, fake};
pub(super) use self::verbs::{is_of_peer, status_text};
use self::wakeup::{Wakeup, Watched};
use crate::{
    Abilities, FLOWS_MAX, FlowId, FlowOptions, FlowSpec, FlowState, GpuAccess, GpuMemory, ListenOptions, Listener,
    ListenerHandle, LocalDevices, MemoryKey, MemoryKind, PathEvent, PathEvents, PortEvent, PortEvents, RecvFlow,
    SendFlow, Transport, TransportError, Usage,
};

/// The library's file where the operator names none.
pub const LIBRARY: &str = "libibverbs.so.1";

/// What a port is attached to, and how fast it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortSpeed {
    /// InfiniBand, which reaches no port of Ethernet.
    pub is_infiniband: bool,
    /// Its speed.
    pub gbit_per_s: u32,
}

/// A flow that its user has not closed.
fn open(flows: &mut HandleTable<Flow>, id: FlowId) -> Result<&mut Flow, TransportError> {
    flows.get_mut(id.0).filter(|flow| flow.lingers_until.is_none()).ok_or(TransportError::NO_FLOW)
}

/// One engine's transport: components that own their state, and the flows between them. See the module's documentation.
#[derive(Debug)]
pub struct RdmaTransport {
    /// In front of the flows: it knows memory of theirs.
    channels: ControlChannels,
    flows: HandleTable<Flow>,
    devices: Devices,
    memory: Memory,
    connector: Connector,
    scheduler: SendScheduler,
    timers: Timers,
    events: FlowEvents,
    wakeup: Wakeup,
    /// Of the last call that brought the time.
    now: Option<Instant>,
}

impl RdmaTransport {
    /// A transport without listeners and flows, on the ports that the options choose.
    ///
    /// # Errors
    /// No port can be used, or the kernel refuses a descriptor.
    pub fn new(driver: &Arc<dyn Driver>, options: RdmaOptions) -> Result<Self, NoRdma> {
        let turn = options.turn;
        let devices = Devices::find(driver, options)?;
        let channels = ControlChannels::new().map_err(|error| match error {
            TransportError::Os { call, reason } => VerbsError { call, errno: reason },
            _ => VerbsError { call: "epoll_create1", errno: Errno::EIO },
        })?;
        let (connector, memory) = (Connector::new()?, Memory::new(turn)?);
        let wakeup = Wakeup::new()?;
        if let Some(fd) = channels.descriptor() {
            wakeup.watch(fd, Watched::Control)?;
        }
        for worker in [connector.descriptor(), memory.pinner.descriptor()] {
            wakeup.watch(worker, Watched::Workers)?;
        }
        for (place, port) in devices.ports().iter().enumerate() {
            wakeup.watch_port(place, port)?;
        }
        Ok(RdmaTransport {
            channels,
            flows: HandleTable::new(FLOWS_MAX),
            devices,
            memory,
            connector,
            scheduler: SendScheduler::default(),
            timers: Timers::default(),
            events: FlowEvents::default(),
            wakeup,
            now: None,
        })
    }

    /// The ports that it uses, for the operator, the preferred one first.
    #[must_use]
    pub fn describe(&self) -> String {
        let used = self.devices.ports().iter().map(Port::describe).collect::<Vec<_>>().join("; ");
        let left = self.devices.left().join("; ");
        if left.is_empty() { used } else { format!("{used}; not used, slower or of another kind: {left}") }
    }

    /// Whether its devices take memory of this process.
    ///
    /// # Errors
    /// Why one refuses.
    pub fn try_memory(&self) -> Result<(), TransportError> {
        self.devices.ports().iter().try_for_each(device::trial::try_memory)
    }

    /// What its ports are attached to, and how fast each is.
    #[must_use]
    pub fn ports(&self) -> Vec<PortSpeed> {
        let speed = |port: &Port| PortSpeed {
            is_infiniband: port.attributes.link_layer == LinkLayer::InfiniBand,
            gbit_per_s: port.attributes.gbit_per_s,
        };
        self.devices.ports().iter().map(speed).collect()
    }

    /// The same ports as paths name them.
    #[must_use]
    pub fn devices(&self) -> Vec<Device> {
        self.devices.ports().iter().map(|port| Device { name: port.device.clone(), port: Some(port.number) }).collect()
    }
}

impl Abilities for RdmaTransport {
    fn path_events(&mut self) -> Option<&mut dyn PathEvents> {
        Some(self)
    }

    fn port_events(&mut self) -> Option<&mut dyn PortEvents> {
        Some(self)
    }

    fn gpu_memory(&self) -> Option<&dyn GpuMemory> {
        Some(self)
    }

    fn local_devices(&self) -> Option<&dyn LocalDevices> {
        Some(self)
    }
}

impl GpuMemory for RdmaTransport {
    fn gpu_access(&self, memory: MemoryKey) -> Option<GpuAccess> {
        self.memory.gpu_access(memory)
    }
}

impl PathEvents for RdmaTransport {
    fn take_path_event(&mut self) -> Option<PathEvent> {
        self.events.take_path()
    }
}

impl PortEvents for RdmaTransport {
    fn take_port_event(&mut self) -> Option<PortEvent> {
        self.events.take_port()
    }
}

impl LocalDevices for RdmaTransport {
    fn is_device_up(&self, options: &FlowOptions) -> Result<bool, TransportError> {
        let Some(device) = &options.device else { return Ok(true) };
        self.devices.named(device)?;
        Ok(self.devices.ports().iter().any(|port| port.is_up && port.is_of(device)))
    }
}

impl Transport for RdmaTransport {
    unsafe fn register(&mut self, ptr: *mut u8, bytes: u64, kind: MemoryKind<'_>) -> Result<MemoryKey, TransportError> {
        match kind {
            // SAFETY: the caller's promise, passed on.
            MemoryKind::Host => unsafe { self.memory.register(ptr, bytes, self.devices.ports()) },
            MemoryKind::Gpu { dma_buffer } => {
                // SAFETY: as above.
                unsafe { self.memory.register_gpu(ptr as u64, bytes, dma_buffer, self.devices.ports()) }
            }
        }
    }

    fn deregister(&mut self, key: MemoryKey) -> Result<(), TransportError> {
        self.memory.deregister(key)
    }

    fn listen(&mut self, options: &ListenOptions) -> Result<(Listener, ListenerHandle), TransportError> {
        self.channels.listen(options)
    }

    fn close_listener(&mut self, listener: Listener) {
        self.channels.close_listener(listener);
    }

    fn end_numbers(&mut self, listener: Listener, below: u64) {
        self.channels.end_numbers(listener, below);
    }

    fn connect(
        &mut self,
        listener: &ListenerHandle,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<SendFlow, TransportError> {
        self.open_sender(listener, spec, now).map(|handle| SendFlow(FlowId(handle)))
    }

    fn accept(&mut self, listener: Listener, spec: &FlowSpec, now: Instant) -> Result<RecvFlow, TransportError> {
        self.open_receiver(listener, spec, now).map(|handle| RecvFlow(FlowId(handle)))
    }

    fn state(&self, flow: FlowId) -> Result<FlowState, TransportError> {
        let flow = self.flows.get(flow.0).filter(|flow| flow.lingers_until.is_none()).ok_or(TransportError::NO_FLOW)?;
        flow.check()?;
        Ok(if flow.is_connected { FlowState::Connected } else { FlowState::Connecting })
    }

    fn close(&mut self, flow: FlowId) {
        if open(&mut self.flows, flow).is_ok() && !self.linger(flow.0) {
            self.forget(flow.0);
        }
    }

    fn usage(&self) -> Usage {
        Usage {
            listeners: self.channels.listeners(),
            flows: self.flows.len() - self.timers.lingering(),
            registrations: self.memory.regions.len(),
            lingering: self.timers.lingering(),
        }
    }
}
