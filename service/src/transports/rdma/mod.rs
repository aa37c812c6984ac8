//! Flows over RDMA: messages are written straight into the peer's posted buffers by reliable queue pairs.
//!
//! ```text
//! sender                                                   receiver
//!   isend -->  message ------ RDMA writes, in parts ------> posted buffer --> test: Done
//!              credit ring <- RDMA write, with immediate -- irecv (address, key, length)
//!   isend -->  short message, without a credit -----------> inbox --copied--> posted buffer
//!   line: two TCP flows, by which the two find each other, agree on ways, and know that the other lives
//! ```
//!
//! Every write carries an immediate: of a part the message's tag, of credits their number. So nobody polls memory, no header
//! travels, and a completion says that the bytes in front of it are there. The parts of all messages go round the flow's
//! queue pairs, and the receiver takes them in the same round.
//!
//! A flow's *way* (`way.rs`) is a port and queue pairs on either side. When it breaks (link down, retries exceeded, queue
//! pair failed, address changed), the sender offers another one, on another port where one is up, or else on the same again.
//! The receiver says how many messages have come; those behind them are sent again. A flow fails when no way has carried
//! anything for its `silence_timeout`, when its line breaks, or at once where another way could not help (a key that
//! is no good).
//!
//! - `verbs/`: libibverbs, and the fake driver that stands in for it in tests.
//! - `ports.rs`, `queues.rs`, `memory.rs`: devices, completion queues, registered memory.
//! - `wire.rs`, `line.rs`: what the two sides tell each other.
//! - `aside.rs`: what waits in the kernel, on threads of its own; `connector.rs`: queue pairs that it connects.
//! - `flow.rs`, `way.rs`, `sender.rs`, `receiver.rs`: a connected flow; `flusher.rs`: what GPU memory needs besides.
//! - `setup.rs`, `failover.rs`, `events.rs`, `silence.rs`, `devices.rs`: until it is connected, and from way to way; `ending.rs`: its end.
//!
//! Deliberately absent: atomics and two-sided sends; shared receive queues and connection sharing, which save memory where
//! a host talks to thousands and cost order; protection of a receiver from its sender: who has a credit's key may write all of
//! the registered memory it is from, so flows are between services that trust each other.

mod aside;
#[cfg(test)]
mod bench;
mod connector;
#[cfg(test)]
mod copied;
mod devices;
mod ending;
mod events;
mod failover;
#[cfg(test)]
mod failover_tests;
mod flow;
mod flusher;
mod line;
mod memory;
#[cfg(test)]
mod memory_tests;
#[cfg(test)]
mod on_devices;
mod options;
mod ports;
mod queues;
mod receiver;
mod sender;
mod setup;
mod silence;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trouble;
mod verbs;
mod way;
mod wire;

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_config::service::Device;
use mccs_ipc::types::Handle;
use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use self::connector::Connector;
use self::flow::{Flow, Half, Stage};
use self::flusher::Flusher;
use self::memory::{Memory, PORTS_MAX};
pub use self::options::{DeviceChoice, RdmaOptions};
use self::ports::Port;
pub use self::ports::{NoRdma, interface_of};
use self::queues::Taken;
use self::setup::Back;
pub use self::verbs::{Driver, Unavailable, Verbs, VerbsError, fake};
pub(super) use self::verbs::{is_of_peer, status_text};
use self::way::Owners;
use super::tcp::TcpTransport;
use super::{
    DataPath, FLOWS_MAX, FlowId, FlowOptions, FlowSpec, FlowState, ListenOptions, Listener, ListenerHandle, MemoryKey,
    MemorySpan, PathNews, PortNews, RecvFlow, Request, RequestKind, SendFlow, Status, Transport, TransportError, Usage,
};
use crate::handles::HandleTable;
use crate::runtime::{Context, Progress};
use crate::telemetry::LogBudget;

/// The library's file where the operator names none.
pub const LIBRARY: &str = "libibverbs.so.1";
/// Bytes that one flow posts before others have their turn.
const TURN_BYTES: u64 = 4 << 20;
/// Times that a poll takes completions: bounds how long it takes.
const TAKES_MAX: usize = 8;
/// How long a sender of short messages that waits for a credit after all is left waiting.
const WITHHELD_FOR: Duration = Duration::from_millis(100);
/// How often it is asked whether lines or devices have something to say while completions keep the engine awake: a system call, for
/// what seldom happens.
const ASIDE_EVERY: Duration = Duration::from_millis(5);
/// How often memory whose region has gone is looked for while nothing else happens.
const MEMORY_LOOKED_AT_EVERY: Duration = Duration::from_millis(500);

/// A flush's number is its read's, and above it the port's.
const FLUSH_PORT_SHIFT: u32 = 56;

const NO_FLOW: TransportError = TransportError::NoSuch("flow");

/// What a sleeping transport waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Watched {
    Lines,
    /// Of this port's queues.
    Completions(usize),
    /// Of this port's device.
    Events(usize),
    /// What is done aside.
    Aside,
}

/// Lines, what connects and what pins, and two things of each port.
const WATCHED_MAX: usize = 3 + 2 * PORTS_MAX;

impl Watched {
    /// As epoll gives it back.
    fn token(self) -> u64 {
        match self {
            Watched::Lines => u64::MAX,
            Watched::Aside => u64::MAX - 1,
            Watched::Completions(port) => 2 * port as u64,
            Watched::Events(port) => 2 * port as u64 + 1,
        }
    }

    fn of(token: u64) -> Self {
        match token {
            u64::MAX => Watched::Lines,
            token if token == Watched::Aside.token() => Watched::Aside,
            token if token % 2 == 0 => Watched::Completions((token / 2) as usize),
            token => Watched::Events((token / 2) as usize),
        }
    }
}

/// What there is, besides completions.
#[derive(Debug, Clone, Copy, Default)]
struct Woken {
    by_lines: bool,
    by_events: bool,
}

/// A flow that its user has not closed.
fn open(flows: &mut HandleTable<Flow>, id: FlowId) -> Result<&mut Flow, TransportError> {
    flows.get_mut(id.0).filter(|flow| flow.lingers_until.is_none()).ok_or(NO_FLOW)
}

/// One engine's transport. See the module's documentation.
#[derive(Debug)]
pub struct RdmaTransport {
    /// Carries the lines. In front of the flows: it knows memory of theirs.
    tcp: TcpTransport,
    flows: HandleTable<Flow>,
    driver: Arc<dyn Driver>,
    options: RdmaOptions,
    owners: Owners,
    memory: Memory,
    ports: Vec<Port>,
    by_line: HashMap<FlowId, Handle>,
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
    lines_said: Progress,
    look_aside_at: Option<Instant>,
    /// Of the last call that brought the time.
    now: Option<Instant>,
    random: u64,
    /// Ports that flows have taken and left.
    port_news: VecDeque<PortNews>,
    /// Paths that flows have left since nobody answered there.
    path_news: VecDeque<PathNews>,
    /// What breaks many flows' ways at once is not said of each.
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
            let lines = EpollEvent::new(EpollFlags::EPOLLIN, Watched::Lines.token());
            epoll.add(fd, lines).map_err(refused("epoll_ctl"))?;
        }
        let connector = Connector::new()?;
        let memory = Memory::new(options.turn)?;
        for aside in [connector.descriptor(), memory.pinner.descriptor()] {
            let done = EpollEvent::new(EpollFlags::EPOLLIN, Watched::Aside.token());
            epoll.add(aside, done).map_err(refused("epoll_ctl"))?;
        }
        for (index, port) in ports.iter().enumerate() {
            devices::watch(&epoll, index, port)?;
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
            by_line: HashMap::new(),
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
            lines_said: Progress::Busy,
            look_aside_at: None,
            now: None,
            random: u64::from_le_bytes(seed),
            port_news: VecDeque::new(),
            path_news: VecDeque::new(),
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

    /// Makes a GPU's memory known, for messages like other memory: by a dma-buf (descriptor, and offset of the memory in it) if
    /// there is one and the kernel takes it, else by its address, where a module of the GPU's driver speaks for it.
    /// [`DataPath::flush`] is what makes received bytes visible to the GPU.
    ///
    /// # Safety
    /// As of [`Transport::register`], with the address as the GPU and this process know it; the dma-buf names the same bytes.
    ///
    /// # Errors
    /// The device cannot reach it: stage through host memory.
    pub unsafe fn register_gpu(
        &mut self,
        address: u64,
        bytes: u64,
        dma_buffer: Option<(OwnedFd, u64)>,
    ) -> Result<MemoryKey, TransportError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.memory.register_gpu(address, bytes, dma_buffer, &self.ports) }
    }

    fn enqueue(&mut self, handle: Handle) {
        if let Some(flow) = self.flows.get_mut(handle)
            && !std::mem::replace(&mut flow.is_queued, true)
        {
            self.queue.push_back(handle);
        }
    }

    /// Asks what there is, once for all, so that nothing else is asked in vain.
    fn look_aside(&mut self, now: Instant) -> Woken {
        let mut woken = Woken::default();
        let mut events = [EpollEvent::empty(); WATCHED_MAX];
        // One that fails is as good as one that finds nothing: what is there wakes again.
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in events.iter().take(count) {
            match Watched::of(event.data()) {
                Watched::Lines => woken.by_lines = true,
                Watched::Events(_) => woken.by_events = true,
                Watched::Aside => {
                    self.connector.hear();
                    self.memory.pinner.hear();
                }
                Watched::Completions(port) => {
                    if let Some(queues) = self.ports.get_mut(port).and_then(Port::queues) {
                        queues.take_events();
                    }
                }
            }
        }
        self.look_aside_at = Some(now + ASIDE_EVERY);
        woken
    }

    /// Takes completions of all ports, some or, to drain them, all. Returns whether there were any.
    fn take_completions(&mut self, takes_max: usize) -> bool {
        let (mut taken, mut any) = (Taken::NONE, false);
        for port in 0..self.ports.len() {
            for _ in 0..takes_max {
                let Some(queues) = self.ports.get_mut(port).and_then(Port::queues) else { break };
                if queues.take(&mut taken).is_err() {
                    self.lose_port(port);
                    break;
                }
                if taken.get().is_empty() {
                    break;
                }
                any = true;
                taken.get().iter().for_each(|completion| self.completed(completion));
            }
        }
        any
    }

    /// Lets a flow post what it can. Returns whether something moved.
    fn pump(&mut self, handle: Handle) -> bool {
        let Some(flow) = self.flows.get_mut(handle).filter(|flow| flow.fault.is_none()) else { return false };
        let is_watched = flow.is_watched();
        let open = flow.way.as_mut().filter(|_| flow.stage == Stage::Open);
        let pumped = match (&mut flow.half, open) {
            (Half::Send(sender), Some(way)) => sender.pump(way, &mut self.memory, &self.ports, TURN_BYTES, is_watched),
            (Half::Recv(receiver), Some(way)) => receiver.pump(way, &mut self.memory, &self.ports),
            (_, None) => Ok(sender::Pumped::default()),
        };
        match pumped {
            Ok(pumped) => {
                if let Some((message, bytes)) = pumped.too_long {
                    self.say(handle, wire::Record::TooLong { message, bytes });
                }
                if pumped.more {
                    self.enqueue(handle);
                }
                if pumped.moved {
                    self.plan_look_for_silence();
                }
                if pumped.withheld {
                    self.withhold(handle);
                }
                if pumped.waits_for_memory
                    && let Some(flow) = self.flows.get_mut(handle)
                    && !std::mem::replace(&mut flow.waits_for_memory, true)
                {
                    self.wait_for_memory.push(handle);
                }
                self.check_end(handle);
                pumped.moved
            }
            Err(fault) => {
                self.stumble(handle, fault);
                true
            }
        }
    }

    /// A flow's credits are withheld, for a while.
    fn withhold(&mut self, handle: Handle) {
        let (Some(flow), Some(now)) = (self.flows.get_mut(handle), self.now) else { return };
        if !std::mem::replace(&mut flow.is_withheld, true) {
            self.withheld.push(handle);
            self.withheld_until.get_or_insert(now + WITHHELD_FOR);
        }
    }

    /// Has credits written that have been withheld for long enough.
    fn give_withheld(&mut self, now: Instant) {
        if self.withheld_until.is_none_or(|until| until > now) {
            return;
        }
        self.withheld_until = None;
        while let Some(handle) = self.withheld.pop() {
            let Some(flow) = self.flows.get_mut(handle) else { continue };
            flow.is_withheld = false;
            if let Half::Recv(receiver) = &mut flow.half {
                receiver.give();
            }
            self.enqueue(handle);
        }
    }

    /// Takes what has been pinned, for the flows that wait for it. Returns whether there was anything.
    fn take_pinned(&mut self) -> bool {
        let any = self.memory.take_pinned();
        if any {
            for handle in std::mem::take(&mut self.wait_for_memory) {
                let Some(flow) = self.flows.get_mut(handle) else { continue };
                flow.waits_for_memory = false;
                self.enqueue(handle);
            }
        }
        any
    }

    /// Looks at the lines. Returns whether there was anything.
    fn look_at_lines(&mut self, cx: &Context) -> bool {
        // What the runtime has seen may have been seen in a poll that did not come here.
        self.lines_said = self.tcp.poll(&Context { is_readable: true, ..*cx });
        let mut any = self.lines_said == Progress::Busy;
        while let Some(line) = self.tcp.take_news() {
            any = true;
            // What is said and asked for in answer is for the next look: epoll need not tell of what has come already.
            self.lines_said = Progress::Busy;
            if let Some(handle) = self.by_line.get(&line).copied() {
                self.heard(handle, cx.now);
            }
        }
        any
    }

    fn waits_until(&self, now: Instant) -> Option<Instant> {
        let lines = if let Progress::Idle { wake_at } = self.lines_said { wake_at } else { None };
        let flows = self.unsettled.iter().filter_map(|handle| self.flows.get(*handle)?.due);
        let lingering = self.lingering.iter().filter_map(|handle| self.flows.get(*handle)?.lingers_until);
        let memory = self.memory.keeps().then(|| now + MEMORY_LOOKED_AT_EVERY);
        flows
            .chain(lingering)
            .chain(lines)
            .chain(memory)
            .chain(self.homes_due)
            .chain(self.withheld_until)
            .chain(self.look_for_devices_at)
            .chain(self.look_for_silence_at)
            .min()
    }
}

impl DataPath for RdmaTransport {
    fn isend(&mut self, flow: SendFlow, message: MemorySpan, tag: u32) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let flow = open(&mut self.flows, id)?;
        flow.check()?;
        let buffer = self.memory.regions.resolve(message)?;
        let Half::Send(sender) = &mut flow.half else { return Err(NO_FLOW) };
        let number = sender.post(message.key, buffer, tag, &mut self.memory.regions);
        // At once, not at the next poll: that is what a small message's latency consists of.
        if number.is_some() {
            self.pump(id.0);
        }
        Ok(number.map(|number| Request { flow: id, kind: RequestKind::Message, number }))
    }

    fn irecv(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let flow = open(&mut self.flows, id)?;
        flow.check()?;
        let target = self.memory.regions.resolve(buffer)?;
        let Half::Recv(receiver) = &mut flow.half else { return Err(NO_FLOW) };
        if receiver.takes_short() && self.memory.is_gpu(buffer.key) {
            let problem = "must be off where memory of a GPU is posted".into();
            return Err(TransportError::Option { option: "takes_short", problem });
        }
        let number = receiver.post(buffer.key, target, &mut self.memory.regions);
        // At the next poll: credits of all that is posted until then go together.
        self.enqueue(id.0);
        Ok(number.map(|number| Request { flow: id, kind: RequestKind::Message, number }))
    }

    /// Done at once for host memory: what a device writes there is visible when its completion is. A GPU's is read.
    fn flush(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let flow = open(&mut self.flows, id)?;
        flow.check()?;
        let target = self.memory.regions.resolve(buffer)?;
        let port = flow.way.as_ref().map_or(0, |way| way.port);
        let done = Some(Request { flow: id, kind: RequestKind::Flush, number: 0 });
        if target.bytes == 0 || !self.memory.is_gpu(buffer.key) {
            return Ok(done);
        }
        let Some(keys) = self.memory.keys(buffer.key, port, &self.ports)? else { return Ok(None) };
        let at = self.ports.get_mut(port).ok_or_else(|| flow.error(super::Fault::NoPort))?;
        if at.opened.as_ref().is_some_and(|opened| opened.flusher.is_none()) {
            let made = Flusher::new(port, at, &mut self.owners, &self.options).map_err(|fault| flow.error(fault))?;
            if let Some(opened) = &mut at.opened {
                opened.flusher = Some(made);
            }
        }
        let flusher = at.opened.as_mut().and_then(|opened| opened.flusher.as_mut());
        let flusher = flusher.ok_or_else(|| flow.error(super::Fault::NoPort))?;
        let (address, _) = target.part(0, 1);
        let read = flusher.read(address as u64, keys.rkey).map_err(|fault| flow.error(fault))?;
        at.flushes = at.flushes.max(read.unwrap_or(0));
        let number = |read| (port as u64) << FLUSH_PORT_SHIFT | read;
        Ok(read.map(|read| Request { flow: id, kind: RequestKind::Flush, number: number(read) }))
    }

    fn test(&mut self, request: Request) -> Result<Status, TransportError> {
        let flow = open(&mut self.flows, request.flow)?;
        if request.kind == RequestKind::Flush {
            let port = self.ports.get((request.number >> FLUSH_PORT_SHIFT) as usize);
            let read = request.number & ((1 << FLUSH_PORT_SHIFT) - 1);
            return match port.and_then(|port| port.opened.as_ref()?.flusher.as_ref()?.is_done(read)) {
                _ if read == 0 => Ok(Status::Done { bytes: 0, tag: 0 }),
                Some(true) => Ok(Status::Done { bytes: 0, tag: 0 }),
                Some(false) => flow.check().map(|()| Status::Running { bytes: 0 }),
                None => Err(flow.error(super::Fault::NoPort)),
            };
        }
        let status = match &mut flow.half {
            Half::Send(sender) => sender.test(request.number)?,
            Half::Recv(receiver) => receiver.test(request.number)?,
        };
        match (status, flow.fault) {
            (Status::Running { .. }, Some(fault)) => Err(flow.error(fault)),
            (status, _) => Ok(status),
        }
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        self.now = Some(cx.now);
        let mut busy = self.take_completions(TAKES_MAX);
        // A sleep that completions have ended, or somebody who has work, says nothing of lines and devices.
        let by_others = std::mem::take(&mut self.is_armed) && cx.is_readable && !busy;
        let is_due = self.look_aside_at.is_none_or(|at| at <= cx.now);
        let woken = if by_others || is_due { self.look_aside(cx.now) } else { Woken::default() };
        self.give_withheld(cx.now);
        busy |= self.take_pinned();
        for _ in 0..self.queue.len().min(cx.budget.max(1)) {
            let Some(handle) = self.queue.pop_front() else { break };
            if let Some(flow) = self.flows.get_mut(handle) {
                flow.is_queued = false;
                busy |= self.pump(handle);
            }
        }
        if woken.by_events {
            busy |= self.take_events();
        }
        self.memory.forget_gone();
        busy |= self.take_connected(cx.now);
        if woken.by_lines
            || !self.unsettled.is_empty()
            || matches!(self.lines_said, Progress::Busy)
            || matches!(self.lines_said, Progress::Idle { wake_at: Some(at) } if at <= cx.now)
        {
            busy |= self.look_at_lines(cx);
        }
        busy |= self.look_for_devices(cx.now) | self.look_at_unsettled(cx.now) | self.return_home(cx.now);
        busy |= self.look_for_silence(cx.now) | self.let_go(cx.now);
        self.plan_look_for_devices(cx.now);
        if busy || !self.queue.is_empty() || self.lines_said == Progress::Busy {
            Progress::Busy
        } else {
            Progress::Idle { wake_at: self.waits_until(cx.now) }
        }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        if !self.queue.is_empty() || !self.tcp.prepare_to_sleep() {
            return false;
        }
        for port in 0..self.ports.len() {
            let Some(queues) = self.ports.get_mut(port).and_then(Port::queues) else { continue };
            queues.take_events_of_taken();
            let refused = queues.arm().is_err();
            if refused {
                self.lose_port(port);
                return false;
            }
        }
        // What came before it was armed makes no event.
        if self.take_completions(1) {
            return false;
        }
        self.is_armed = true;
        true
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.epoll.0.as_fd())
    }
}

impl Transport for RdmaTransport {
    unsafe fn register(&mut self, ptr: *mut u8, bytes: u64) -> Result<MemoryKey, TransportError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.memory.register(ptr, bytes, &self.ports) }
    }

    fn deregister(&mut self, key: MemoryKey) -> Result<(), TransportError> {
        self.memory.deregister(key)
    }

    fn listen(&mut self, options: &ListenOptions) -> Result<(Listener, ListenerHandle), TransportError> {
        self.tcp.listen(options).map(|(listener, handle)| (listener, wire::to_handle(&handle)))
    }

    fn close_listener(&mut self, listener: Listener) {
        self.tcp.close_listener(listener);
        self.lines_said = Progress::Busy;
    }

    fn end_numbers(&mut self, listener: Listener, below: u64) {
        self.tcp.end_numbers(listener, below);
        self.lines_said = Progress::Busy;
    }

    fn has_device_up(&self, options: &FlowOptions) -> Result<bool, TransportError> {
        let Some(device) = &options.device else { return Ok(true) };
        ports::named(&self.ports, device)?;
        Ok(self.ports.iter().any(|port| port.is_up && port.is_of(device)))
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

    fn take_path_news(&mut self) -> Option<PathNews> {
        self.path_news.pop_front()
    }

    fn take_port_news(&mut self) -> Option<PortNews> {
        self.port_news.pop_front()
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
