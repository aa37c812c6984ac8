//! RDMA transport: messages are written straight into the peer's posted buffers by reliable queue
//! pairs.
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
//! | `mod.rs`, `events.rs`, `records.rs` | [`RdmaTransport`], which routes what happens to its components |
//! | `flow.rs`, `flows.rs` | a flow's state; `Flows`: all of them, their turns and deadlines, and how they end |
//! | `verbs/` | libibverbs, and the fake driver that stands in for it in tests |
//! | `device/` | ports, completion queues, and a worker thread for calls of the kernel that take long |
//! | `connection/` | queue pairs of a flow, and how the two sides agree on them over the control channel |
//! | `data_path/` | sender, receiver, registered memory, and who posts when; `Carrier`: devices and memory, which carry flows |
//! | `failover/` | `Handshakes`: how two sides agree on a connection; `Failover`: what follows when it breaks, or a device goes |
//! | `timers.rs`, `wakeup.rs`, `flow_events.rs` | what is due, what wakes a sleeping transport, what its user is told |
//!
//! Deliberately absent: atomics and two-sided sends; shared receive queues and connection sharing, which save memory where
//! a host talks to thousands and cost order; protection of a receiver from its sender: who has a credit's key may write all of
//! the registered memory it is from, so flows are between services that trust each other.

mod connection;
mod data_path;
mod device;
mod events;
mod failover;
mod flow;
mod flow_events;
mod flows;
mod options;
mod records;
#[cfg(test)]
mod tests;
mod timers;
mod verbs;
mod wakeup;

use std::sync::Arc;
use std::time::Instant;

use mccs_config::service::Device;
use nix::errno::Errno;

use self::data_path::carrier::Carrier;
use self::data_path::memory_registration::Memory;
use self::data_path::receiver::Receiver;
use self::data_path::sender::Sender;
use self::device::Devices;
use self::device::ports::Port;
pub use self::device::ports::{NoRdma, interface_of};
use self::device::queues::Taken;
pub use self::device::trial::GpuTrial;
use self::failover::Failover;
use self::failover::handshake::Handshakes;
use self::flow::{Flow, Half, Stage};
use self::flows::Flows;
use self::options::SOURCE_PORT_MIN;
pub use self::options::{DeviceChoice, RdmaOptions};
use self::verbs::LinkLayer;
pub use self::verbs::{Driver, Unavailable, Verbs, VerbsError, fake};
use self::wakeup::{Wakeup, Watched};
use crate::options::CHUNK_BYTES_MIN;
use crate::{
    Abilities, CONNECTIONS_MAX, FlowId, FlowOptions, FlowSpec, FlowState, GpuAccess, GpuMemory, ListenOptions,
    Listener, ListenerHandle, LocalDevices, MemoryKey, MemoryKind, PathEvent, PathEvents, PortEvent, PortEvents,
    RecvFlow, SendFlow, Transport, TransportError, Usage,
};

/// The library's file where the operator names none.
pub const LIBRARY: &str = "libibverbs.so.1";

/// A port's link, and its speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortSpeed {
    /// InfiniBand, which reaches no port of Ethernet.
    pub is_infiniband: bool,
    /// Its speed.
    pub gbit_per_s: u32,
}

/// One engine's transport: components that own their state. See the module's documentation.
#[derive(Debug)]
pub struct RdmaTransport {
    /// In front of what carries them.
    flows: Flows,
    carrier: Carrier,
    handshakes: Handshakes,
    failover: Failover,
    wakeup: Wakeup,
    /// While completions are not being taken.
    taken: Taken,
}

impl RdmaTransport {
    /// A transport without listeners and flows, on the ports that the options choose.
    ///
    /// # Errors
    /// No port can be used, or the kernel refuses a descriptor.
    pub fn new(driver: &Arc<dyn Driver>, options: RdmaOptions) -> Result<Self, NoRdma> {
        let (turn, taken) = (options.turn, Taken::with_room(options.cq_poll));
        let devices = Devices::find(driver, options)?;
        let flows = Flows::new().map_err(|error| match error {
            TransportError::Os { call, reason } => VerbsError { call, errno: reason },
            _ => VerbsError { call: "epoll_create1", errno: Errno::EIO },
        })?;
        let (handshakes, memory) = (Handshakes::new()?, Memory::new(turn)?);
        let wakeup = Wakeup::new()?;
        if let Some(fd) = flows.channels().descriptor() {
            wakeup.watch(fd, Watched::Control)?;
        }
        for worker in [handshakes.connector().descriptor(), memory.pinner.descriptor()] {
            wakeup.watch(worker, Watched::Workers)?;
        }
        for (place, port) in devices.ports().iter().enumerate() {
            wakeup.watch_port(place, port)?;
        }
        let carrier = Carrier { devices, memory };
        Ok(RdmaTransport { flows, carrier, handshakes, failover: Failover::default(), wakeup, taken })
    }

    /// The ports that it uses, for the operator, the preferred one first.
    #[must_use]
    pub fn describe(&self) -> String {
        let used = self.carrier.devices.ports().iter().map(Port::describe).collect::<Vec<_>>().join("; ");
        let left = self.carrier.devices.left().join("; ");
        if left.is_empty() { used } else { format!("{used}; not used, slower or of another kind: {left}") }
    }

    /// Whether its devices take memory of this process.
    ///
    /// # Errors
    /// Why one refuses.
    pub fn try_memory(&self) -> Result<(), TransportError> {
        self.carrier.devices.ports().iter().try_for_each(device::trial::try_memory)
    }

    /// Its devices, for memory of GPUs to be tried on.
    #[must_use]
    pub fn gpu_trial(&self) -> GpuTrial {
        GpuTrial::of(self.carrier.devices.ports())
    }

    /// Links of its ports, and their speeds.
    #[must_use]
    pub fn ports(&self) -> Vec<PortSpeed> {
        let speed = |port: &Port| PortSpeed {
            is_infiniband: port.attributes.link_layer == LinkLayer::InfiniBand,
            gbit_per_s: port.attributes.gbit_per_s,
        };
        self.carrier.devices.ports().iter().map(speed).collect()
    }

    /// The same ports as paths name them.
    #[must_use]
    pub fn devices(&self) -> Vec<Device> {
        self.carrier
            .devices
            .ports()
            .iter()
            .map(|port| Device { name: port.device.clone(), port: Some(port.number) })
            .collect()
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
        self.carrier.memory.gpu_access(memory)
    }

    fn reaches_gpus(&self, flow: FlowId) -> bool {
        self.flows.get(flow.0).is_some()
    }
}

impl PathEvents for RdmaTransport {
    fn take_path_event(&mut self) -> Option<PathEvent> {
        self.failover.events().take_path()
    }
}

impl PortEvents for RdmaTransport {
    fn take_port_event(&mut self) -> Option<PortEvent> {
        self.failover.events().take_port()
    }
}

impl LocalDevices for RdmaTransport {
    fn is_device_up(&self, options: &FlowOptions) -> Result<bool, TransportError> {
        let Some(device) = &options.device else { return Ok(true) };
        self.carrier.devices.named(device)?;
        Ok(self.carrier.devices.ports().iter().any(|port| port.is_up && port.is_of(device)))
    }
}

impl Transport for RdmaTransport {
    unsafe fn register(&mut self, ptr: *mut u8, bytes: u64, kind: MemoryKind<'_>) -> Result<MemoryKey, TransportError> {
        match kind {
            // SAFETY: the caller's promise, passed on.
            MemoryKind::Host => unsafe { self.carrier.memory.register(ptr, bytes, self.carrier.devices.ports()) },
            MemoryKind::Gpu { dma_buffer } => {
                // SAFETY: as above.
                unsafe { self.carrier.memory.register_gpu(ptr as u64, bytes, dma_buffer, self.carrier.devices.ports()) }
            }
        }
    }

    fn deregister(&mut self, key: MemoryKey) -> Result<(), TransportError> {
        self.carrier.memory.deregister(key)
    }

    fn listen(&mut self, options: &ListenOptions) -> Result<(Listener, ListenerHandle), TransportError> {
        self.flows.channels_mut().listen(options)
    }

    fn close_listener(&mut self, listener: Listener) {
        self.flows.channels_mut().close_listener(listener);
    }

    fn end_numbers(&mut self, listener: Listener, below: u64) {
        self.flows.channels_mut().end_numbers(listener, below);
    }

    fn connect(
        &mut self,
        listener: &ListenerHandle,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<SendFlow, TransportError> {
        self.flows.timers_mut().note(now);
        let options = &spec.options;
        options.validate()?;
        if let Some(range) = options.source_ports.filter(|range| range.first < SOURCE_PORT_MIN) {
            let problem = format!("must be within {SOURCE_PORT_MIN}-65535, where RoCE v2 sends from, not {range}");
            return Err(TransportError::Option { option: "source_ports", problem });
        }
        let devices = &self.carrier.devices;
        let home = devices.home_of(options)?;
        let part_bytes = options.chunk_bytes.min(devices.message_bytes().max(CHUNK_BYTES_MIN));
        let half = Half::Send(Sender::new(options.requests, part_bytes, options.connections.min(CONNECTIONS_MAX)));
        let control = self.flows.channels_mut().call(listener, spec, now)?;
        let flow = Flow { home, ..Flow::new(spec, half, control, Stage::Calling) };
        self.flows.add(flow).map(|handle| SendFlow(FlowId(handle)))
    }

    fn accept(&mut self, listener: Listener, spec: &FlowSpec, now: Instant) -> Result<RecvFlow, TransportError> {
        self.flows.timers_mut().note(now);
        spec.options.validate()?;
        spec.options.home.as_ref().map_or(Ok(0), |home| self.carrier.devices.named(home))?;
        let half = Half::Recv(Receiver::new(spec.options.requests, spec.options.takes_short));
        let control = self.flows.channels_mut().answer(listener, spec, now)?;
        self.flows.add(Flow::new(spec, half, control, Stage::Waiting)).map(|handle| RecvFlow(FlowId(handle)))
    }

    fn state(&self, flow: FlowId) -> Result<FlowState, TransportError> {
        let flow = self.flows.open(flow)?;
        flow.check()?;
        Ok(if flow.is_connected { FlowState::Connected } else { FlowState::Connecting })
    }

    fn close(&mut self, flow: FlowId) {
        if self.flows.open(flow).is_ok() && !self.flows.linger(flow.0, &mut self.carrier) {
            self.flows.forget(flow.0, &mut self.carrier);
        }
    }

    fn usage(&self) -> Usage {
        Usage {
            listeners: self.flows.channels().listeners(),
            flows: self.flows.len(),
            registrations: self.carrier.memory.regions.len(),
            lingering: self.flows.timers().lingering(),
        }
    }
}
