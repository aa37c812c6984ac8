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
//! | `flow.rs`, `close.rs`, `wakeup.rs` | a flow's state, its end, and what wakes a sleeping transport |
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
mod options;
#[cfg(test)]
mod tests;
mod verbs;
mod wakeup;

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use mccs_config::service::Device;
use mccs_ipc::types::Handle;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use self::connection::Owners;
use self::connection::connector::Connector;
use self::connection::setup::Back;
use self::connection::wire;
use self::data_path::memory::{Memory, PORTS_MAX};
use self::device::ports;
use self::device::ports::Port;
pub use self::device::ports::{NoRdma, interface_of};
use self::failover::hotplug;
use self::flow::Flow;
pub use self::options::{DeviceChoice, RdmaOptions};
pub use self::verbs::{Driver, Unavailable, Verbs, VerbsError, fake};
pub(super) use self::verbs::{is_of_peer, status_text};
use self::wakeup::Watched;
use crate::tcp::TcpTransport;
use crate::{
    Abilities, DataPath, FLOWS_MAX, FlowId, FlowOptions, FlowSpec, FlowState, ListenOptions, Listener, ListenerHandle,
    LocalDevices, MemoryKey, MemoryKind, PathEvent, PathEvents, PortEvent, PortEvents, RecvFlow, SendFlow, Transport,
    TransportError, Usage,
};
use mccs_model::handles::HandleTable;
use mccs_runtime::Progress;
use mccs_telemetry::LogBudget;

/// The library's file where the operator names none.
pub const LIBRARY: &str = "libibverbs.so.1";

const NO_FLOW: TransportError = TransportError::NoSuch("flow");

/// A flow that its user has not closed.
fn open(flows: &mut HandleTable<Flow>, id: FlowId) -> Result<&mut Flow, TransportError> {
    flows.get_mut(id.0).filter(|flow| flow.lingers_until.is_none()).ok_or(NO_FLOW)
}

/// One engine's transport. See the module's documentation.
#[derive(Debug)]
pub struct RdmaTransport {
    /// Carries the control channels. In front of the flows: it knows memory of theirs.
    tcp: TcpTransport,
    flows: HandleTable<Flow>,
    driver: Arc<dyn Driver>,
    options: RdmaOptions,
    owners: Owners,
    memory: Memory,
    ports: Vec<Port>,
    by_control: HashMap<FlowId, Handle>,
    /// By this host's address, where receivers come back to senders.
    backs: HashMap<IpAddr, Back>,
    /// Flows with something to do.
    queue: VecDeque<Handle>,
    /// Flows whose credits are withheld, and until when.
    withheld: Vec<Handle>,
    /// Flows that wait for memory to be pinned.
    wait_for_memory: Vec<Handle>,
    withheld_until: Option<Instant>,
    /// Flows that wait for something with a deadline.
    unsettled: Vec<Handle>,
    /// Flows that their users have closed, whose last messages are under way.
    lingering: Vec<Handle>,
    /// No flow that is away from home goes there before.
    homes_due: Option<Instant>,
    look_for_devices_at: Option<Instant>,
    look_for_silence_at: Option<Instant>,
    connector: Connector,
    epoll: Epoll,
    is_armed: bool,
    control_said: Progress,
    look_aside_at: Option<Instant>,
    /// Of the last call that brought the time.
    now: Option<Instant>,
    random: u64,
    /// Ports that flows have taken and left.
    port_events: VecDeque<PortEvent>,
    /// Paths that flows have left since nobody answered there.
    path_events: VecDeque<PathEvent>,
    /// What breaks many flows' connections at once is not said of each.
    budget: LogBudget,
}

impl RdmaTransport {
    /// A transport without listeners and flows, on the ports that the options choose.
    ///
    /// # Errors
    /// No port can be used, or the kernel refuses a descriptor.
    pub fn new(driver: &Arc<dyn Driver>, options: RdmaOptions) -> Result<Self, NoRdma> {
        let mut ports = ports::find(driver, &options)?;
        ports.truncate(PORTS_MAX);
        let refused = |call| move |errno| VerbsError { call, errno };
        let tcp = TcpTransport::new().map_err(|error| match error {
            TransportError::Os { call, reason } => VerbsError { call, errno: reason },
            _ => VerbsError { call: "epoll_create1", errno: Errno::EIO },
        })?;
        let tcp = tcp.with_news();
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(refused("epoll_create1"))?;
        if let Some(fd) = tcp.descriptor() {
            let channels = EpollEvent::new(EpollFlags::EPOLLIN, Watched::Control.token());
            epoll.add(fd, channels).map_err(refused("epoll_ctl"))?;
        }
        let connector = Connector::new()?;
        let memory = Memory::new(options.turn)?;
        for aside in [connector.descriptor(), memory.pinner.descriptor()] {
            let done = EpollEvent::new(EpollFlags::EPOLLIN, Watched::Aside.token());
            epoll.add(aside, done).map_err(refused("epoll_ctl"))?;
        }
        for (index, port) in ports.iter().enumerate() {
            hotplug::watch(&epoll, index, port)?;
        }
        let mut seed = [0; 8];
        nix::fcntl::open("/dev/urandom", nix::fcntl::OFlag::O_CLOEXEC, nix::sys::stat::Mode::empty())
            .and_then(|file| nix::unistd::read(&file, &mut seed))
            .map_err(refused("/dev/urandom"))?;
        Ok(RdmaTransport {
            tcp,
            flows: HandleTable::new(FLOWS_MAX),
            driver: Arc::clone(driver),
            options,
            owners: Owners::new(u32::MAX >> 1),
            memory,
            ports,
            by_control: HashMap::new(),
            backs: HashMap::new(),
            queue: VecDeque::new(),
            withheld: Vec::new(),
            wait_for_memory: Vec::new(),
            withheld_until: None,
            unsettled: Vec::new(),
            lingering: Vec::new(),
            homes_due: None,
            look_for_devices_at: None,
            look_for_silence_at: None,
            connector,
            epoll,
            is_armed: false,
            control_said: Progress::Busy,
            look_aside_at: None,
            now: None,
            random: u64::from_le_bytes(seed),
            port_events: VecDeque::new(),
            path_events: VecDeque::new(),
            budget: LogBudget::default(),
        })
    }

    /// The ports that it uses, for the operator, the preferred one first.
    #[must_use]
    pub fn describe(&self) -> String {
        self.ports.iter().map(Port::describe).collect::<Vec<_>>().join("; ")
    }

    /// The same ports as paths name them.
    #[must_use]
    pub fn devices(&self) -> Vec<Device> {
        self.ports.iter().map(|port| Device { name: port.device.clone(), port: Some(port.number) }).collect()
    }
}

impl Abilities for RdmaTransport {
    fn path_events(&mut self) -> Option<&mut dyn PathEvents> {
        Some(self)
    }

    fn port_events(&mut self) -> Option<&mut dyn PortEvents> {
        Some(self)
    }

    fn local_devices(&self) -> Option<&dyn LocalDevices> {
        Some(self)
    }
}

impl PathEvents for RdmaTransport {
    fn take_path_event(&mut self) -> Option<PathEvent> {
        self.path_events.pop_front()
    }
}

impl PortEvents for RdmaTransport {
    fn take_port_event(&mut self) -> Option<PortEvent> {
        self.port_events.pop_front()
    }
}

impl LocalDevices for RdmaTransport {
    fn is_device_up(&self, options: &FlowOptions) -> Result<bool, TransportError> {
        let Some(device) = &options.device else { return Ok(true) };
        ports::named(&self.ports, device)?;
        Ok(self.ports.iter().any(|port| port.is_up && port.is_of(device)))
    }
}

impl Transport for RdmaTransport {
    unsafe fn register(&mut self, ptr: *mut u8, bytes: u64, kind: MemoryKind<'_>) -> Result<MemoryKey, TransportError> {
        match kind {
            // SAFETY: the caller's promise, passed on.
            MemoryKind::Host => unsafe { self.memory.register(ptr, bytes, &self.ports) },
            MemoryKind::Gpu { dma_buffer } => {
                // SAFETY: as above.
                unsafe { self.memory.register_gpu(ptr as u64, bytes, dma_buffer, &self.ports) }
            }
        }
    }

    fn deregister(&mut self, key: MemoryKey) -> Result<(), TransportError> {
        self.memory.deregister(key)
    }

    fn listen(&mut self, options: &ListenOptions) -> Result<(Listener, ListenerHandle), TransportError> {
        self.tcp.listen(options).map(|(listener, handle)| (listener, wire::to_handle(&handle)))
    }

    fn close_listener(&mut self, listener: Listener) {
        self.tcp.close_listener(listener);
        self.control_said = Progress::Busy;
    }

    fn end_numbers(&mut self, listener: Listener, below: u64) {
        self.tcp.end_numbers(listener, below);
        self.control_said = Progress::Busy;
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
        let flow = self.flows.get(flow.0).filter(|flow| flow.lingers_until.is_none()).ok_or(NO_FLOW)?;
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
            listeners: self.tcp.usage().listeners.saturating_sub(self.backs.len()),
            flows: self.flows.len() - self.lingering.len(),
            registrations: self.memory.regions.len(),
            lingering: self.lingering.len(),
        }
    }
}
