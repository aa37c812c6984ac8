//! Flows over TCP: several sockets a flow, from source ports of the operator's choice.
//!
//! One epoll descriptor watches all sockets of a transport, edge-triggered: a poll takes its events, marks sockets as
//! readable or writable, and works on the flows that have something to do, each a bounded amount a turn. Sockets that
//! nobody can use now (no buffer posted, nothing to send) stay marked and cost nothing.
//!
//! - `wire.rs`, `arrival.rs`: what travels, and which parts of a message have come; pure.
//! - `socket.rs`, `watches.rs`: system calls.
//! - `acceptor.rs`, `port.rs`, `listener.rs`, `setup.rs`: until a flow is connected.
//! - `queues.rs`, `reading.rs`, `keepalive.rs`: which flow is next, which sockets are read, and when it is looked whether peers answer.
//! - `sender.rs`, `receiver.rs`: the two halves of a flow.
//! - `connection.rs`, `log.rs`, `resume.rs`: how a flow goes on over another path when its own is dead.
//!
//! The receiver's posted buffers do not travel as credits: the kernel's receive window holds a sender back that is ahead,
//! so the first bytes of a message may leave before its buffer is posted, which saves a packet a message.
//!
//! Deliberately absent: `MSG_ZEROCOPY`. The kernel would read a buffer after its flow is closed.

mod abilities;
mod acceptor;
mod arrival;
mod connection;
#[cfg(test)]
mod dead_paths;
mod device;
mod keepalive;
mod listener;
mod log;
mod port;
mod probe;
mod queues;
mod reading;
mod receiver;
#[cfg(test)]
mod restless;
mod resume;
mod sender;
mod setup;
mod socket;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod unauthenticated_peers;
mod watches;
mod wire;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use nix::errno::Errno;

use self::acceptor::{Acceptor, Incoming};
pub use self::device::interfaces;
use self::keepalive::Keepalive;
pub use self::probe::Probe;
use self::queues::FlowQueues;
use self::reading::Reading;
use self::receiver::Receiver;
use self::sender::Sender;
use self::setup::{Connecting, Waiting};
use self::watches::{Ready, Watched, Watches};
use super::region::Regions;
use super::{
    DataPath, FLOWS_MAX, Fault, FlowId, FlowOptions, FlowSpec, FlowState, ListenOptions, Listener, ListenerHandle,
    MemoryKey, MemoryKind, MemorySpan, PathEvent, RecvFlow, Request, RequestKind, SendFlow, Status, Transport,
    TransportError, Usage,
};
use mccs_model::handles::HandleTable;
use mccs_runtime::{Context, Progress};

/// Bytes that one flow moves before others have their turn: enough to make the turn's own cost vanish.
const TURN_BYTES: u64 = 1 << 20;
/// What a turn of a flow came to.
#[derive(Debug, Clone, Copy, Default)]
struct Pumped {
    /// Something moved.
    moved: bool,
    /// The turn ended before there was nothing more to do.
    more: bool,
    /// Messages wait for acknowledgements.
    is_unsettled: bool,
    /// A path is dead: it is to be looked at.
    is_cut: bool,
}

/// Whether the kernel takes what `options` say of packets of flows from `address`: the name of a congestion control, for one.
///
/// # Errors
/// Names the socket option that it refuses, and why.
pub fn try_out(address: IpAddr, options: &FlowOptions) -> Result<(), Fault> {
    socket::try_out(&address, options)
}

/// What an error of a connected socket means.
fn peer_gone(errno: Errno) -> Fault {
    match errno {
        Errno::ECONNRESET | Errno::EPIPE | Errno::ENOTCONN => Fault::Closed,
        Errno::EFAULT | Errno::EBADF | Errno::EINVAL => Fault::Os { call: "moving bytes", reason: errno },
        errno => Fault::Lost(errno),
    }
}

#[derive(Debug)]
enum Half {
    Send(Sender),
    Recv(Receiver),
}

#[derive(Debug)]
struct Flow {
    peer: String,
    number: u64,
    half: Half,
    fault: Option<Fault>,
    silence_timeout: Duration,
    /// Is in the queue of flows with something to do.
    queued: bool,
    /// Is among the receivers that may wait for a message.
    waits: bool,
    /// Is in the queue of news.
    is_news: bool,
    /// Is among those whose messages wait for acknowledgements.
    is_unsettled: bool,
    /// Its user has closed it.
    lingers: bool,
    /// Until it is connected.
    waiting: Option<Waiting>,
    /// Of an accepted flow, once it is connected: further sockets of it may come.
    accepted_with: Option<FlowOptions>,
}

impl Flow {
    fn error(&self, fault: Fault) -> TransportError {
        let direction = if matches!(self.half, Half::Send(_)) { "to" } else { "from" };
        TransportError::of_flow(&self.peer, direction, self.number, fault)
    }

    fn check(&self) -> Result<(), TransportError> {
        self.fault.map_or(Ok(()), |fault| Err(self.error(fault)))
    }

    fn is_connected(&self) -> bool {
        match &self.half {
            Half::Send(sender) => sender.is_connected(),
            Half::Recv(receiver) => receiver.is_connected(),
        }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct TcpTransport {
    watches: Watches,
    regions: Regions,
    acceptor: Acceptor,
    flows: HandleTable<Flow>,
    queues: FlowQueues,
    reading: Reading,
    connecting: Connecting,
    keepalive: Keepalive,
    /// Flows that were closed, and live until all is acknowledged.
    lingering: usize,
    /// What flows have found out about paths.
    path_events: VecDeque<PathEvent>,
    #[cfg(test)]
    restless: Option<super::conformance::Random>,
    /// Makes attempts to connect differ.
    attempts: u64,
}

impl TcpTransport {
    /// A transport without listeners and flows.
    ///
    /// # Errors
    /// The kernel refuses a descriptor.
    pub fn new() -> Result<Self, TransportError> {
        let watches = Watches::new().map_err(|reason| TransportError::Os { call: "epoll_create1", reason })?;
        Ok(TcpTransport {
            watches,
            regions: Regions::new(),
            acceptor: Acceptor::new(),
            flows: HandleTable::new(FLOWS_MAX),
            queues: FlowQueues::default(),
            reading: Reading::default(),
            connecting: Connecting::default(),
            keepalive: Keepalive::default(),
            lingering: 0,
            path_events: VecDeque::new(),
            #[cfg(test)]
            restless: None,
            attempts: u64::from_le_bytes(setup::random()?),
        })
    }

    /// From here on it keeps what [`TcpTransport::take_news`] gives: for who has many flows and little to do on them.
    pub(super) fn with_news(mut self) -> Self {
        self.queues.keep_news();
        self
    }

    /// A flow that has connected, moved or failed since it was told last.
    pub(super) fn take_news(&mut self) -> Option<FlowId> {
        let handle = self.queues.next_news()?;
        if let Some(flow) = self.flows.get_mut(handle) {
            flow.is_news = false;
        }
        Some(FlowId(handle))
    }

    /// Address of this host that a flow is sent from.
    pub(super) fn source_address(&self, flow: SendFlow) -> Option<std::net::IpAddr> {
        match &self.flows.get(FlowId::from(flow).0)?.half {
            Half::Send(sender) => sender.sockets().next()?.source_address(),
            Half::Recv(_) => None,
        }
    }

    fn tell(&mut self, handle: Handle) {
        if let Some(flow) = self.flows.get_mut(handle) {
            self.queues.tell(handle, flow);
        }
    }

    /// Connections that were refused so far: strangers, latecomers, other versions.
    #[must_use]
    pub fn refused_connections(&self) -> u64 {
        self.acceptor.refused()
    }

    fn enqueue(&mut self, handle: Handle) {
        if let Some(flow) = self.flows.get_mut(handle) {
            self.queues.enqueue(handle, flow);
        }
    }

    /// Reads receivers that wait, if they are few. Returns whether it did, and whether something came.
    fn read_directly(&mut self) -> (bool, bool) {
        let receivers = self.reading.check(&mut self.flows);
        let mut came = false;
        for index in 0..receivers {
            let Some(handle) = self.reading.receiver(index) else { break };
            if let Some(Flow { half: Half::Recv(receiver), .. }) = self.flows.get_mut(handle) {
                receiver.suppose_readable();
                came |= self.pump(handle);
            }
        }
        (receivers > 0, came)
    }

    /// Something has come for a flow.
    fn take_incoming(&mut self, incoming: Incoming, now: Instant) {
        match incoming {
            Incoming::Complete(flow, arrivals) => self.complete(flow, arrivals),
            Incoming::Resume { flow, hello, socket, watch } => self.resume(flow, &hello, socket, watch, now),
        }
    }

    /// Takes connections that wait at ports. Returns whether there were any.
    fn take_connections(&mut self, budget: usize, now: Instant) -> bool {
        let (mut any, mut incoming) = (false, Vec::new());
        for _ in 0..self.acceptor.queued() {
            let Some(port) = self.acceptor.next_port() else { break };
            any |= self.acceptor.take_connections(port, budget, now, &mut self.watches, &mut incoming);
            incoming.drain(..).for_each(|incoming| self.take_incoming(incoming, now));
        }
        any
    }

    /// Fails flows that have not been connected in time.
    fn fail_late(&mut self, now: Instant) {
        for (handle, timeout) in self.connecting.take_late(&self.flows, now) {
            self.fail(handle, Fault::ConnectTimeout { after_ms: timeout.as_millis() as u64 });
        }
    }

    /// Asks epoll, and notes what it says. Returns whether there is news but of connected flows, which their turns tell.
    fn take_events(&mut self, now: Instant) -> bool {
        let mut told = false;
        let mut events = Watches::no_events();
        let count = self.watches.take(&mut events);
        for event in events.iter().take(count) {
            if let Some((watched, watch, ready)) = self.watches.resolve(event) {
                told |= !matches!(watched, Watched::Connection { .. });
                self.dispatch(watched, watch, ready, now);
            }
        }
        told
    }

    /// Whether flows, or connections that have come, wait for the next poll.
    fn has_work(&self) -> bool {
        self.queues.len() > 0 || self.acceptor.queued() > 0
    }

    /// Lets a flow work. Returns whether something moved.
    fn pump(&mut self, handle: Handle) -> bool {
        let Some(flow) = self.flows.get_mut(handle).filter(|flow| flow.fault.is_none()) else { return false };
        let pumped = match &mut flow.half {
            Half::Send(sender) => sender.pump(TURN_BYTES, &mut self.regions),
            Half::Recv(receiver) => receiver.pump(TURN_BYTES, &mut self.regions),
        };
        match pumped {
            Ok(mut pumped) => {
                pumped.moved |= self.take_successors(handle);
                self.forget_closed(handle);
                self.keepalive.want_if(pumped.is_cut);
                if pumped.more {
                    self.enqueue(handle);
                }
                if pumped.is_unsettled {
                    self.await_settling(handle);
                }
                if pumped.moved {
                    self.tell(handle);
                }
                pumped.moved
            }
            Err(fault) => {
                self.fail(handle, fault);
                true
            }
        }
    }

    /// Ends a flow's sockets and lets its buffers go; it stays in the table and says why.
    fn fail(&mut self, handle: Handle, fault: Fault) {
        if let Some(flow) = self.flows.get_mut(handle) {
            if let (Half::Send(sender), None) = (&mut flow.half, flow.fault) {
                sender.finish_written(&mut self.regions);
            }
            flow.fault.get_or_insert(fault);
        }
        self.tell(handle);
        self.end(handle);
        self.forget_lingering(handle);
    }

    fn end(&mut self, handle: Handle) {
        let Some(flow) = self.flows.get_mut(handle) else { return };
        let number = flow.number;
        let listener = flow.waiting.take().and_then(|waiting| waiting.listener);
        let watches = match &mut flow.half {
            Half::Send(sender) => sender.end(&mut self.regions),
            Half::Recv(receiver) => receiver.end(&mut self.regions),
        };
        self.watches.forget(watches);
        if let Some(listener) = listener {
            self.acceptor.give_up(listener, number, &mut self.watches);
        }
    }

    fn dispatch(&mut self, watched: Watched, watch: Handle, ready: Ready, now: Instant) {
        match watched {
            Watched::Port(port) => self.acceptor.queue_port(port),
            Watched::HalfOpen(handle) => {
                if let Some(incoming) = self.acceptor.hear(handle, now, &mut self.watches) {
                    self.take_incoming(incoming, now);
                }
            }
            Watched::Arrived { listener, number } => {
                if ready.hung_up {
                    self.acceptor.lost_arrival(listener, number, &mut self.watches);
                }
            }
            Watched::Connection { flow: handle, connection } => {
                let Some(flow) = self.flows.get_mut(handle) else { return self.watches.forget([watch]) };
                match &mut flow.half {
                    Half::Send(sender) => sender.ready(connection, watch, ready),
                    Half::Recv(receiver) => receiver.ready(connection, watch, ready),
                }
                self.enqueue(handle);
            }
        }
    }
}

impl DataPath for TcpTransport {
    fn isend(&mut self, flow: SendFlow, message: MemorySpan, tag: u32) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let flow = self.flows.get_mut(id.0).ok_or(TransportError::NO_FLOW)?;
        flow.check()?;
        let buffer = self.regions.resolve(message)?;
        let Half::Send(sender) = &mut flow.half else { return Err(TransportError::NO_FLOW) };
        let number = sender.post(message.key, buffer, tag, &mut self.regions);
        self.keepalive.want();
        // At once, not at the next poll: that is what a small message's latency consists of.
        self.pump(id.0);
        Ok(number.map(|number| Request::message(id, number)))
    }

    fn irecv(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let flow = self.flows.get_mut(id.0).ok_or(TransportError::NO_FLOW)?;
        flow.check()?;
        let target = self.regions.resolve(buffer)?;
        let Half::Recv(receiver) = &mut flow.half else { return Err(TransportError::NO_FLOW) };
        let number = receiver.post(buffer.key, target, &mut self.regions);
        // What has come waits for this buffer.
        self.enqueue(id.0);
        if let Some(flow) = self.flows.get_mut(id.0) {
            self.reading.await_message(id.0, flow);
        }
        Ok(number.map(|number| Request::message(id, number)))
    }

    /// Done at once: the processor wrote the bytes.
    fn flush(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        self.flows.get(id.0).ok_or(TransportError::NO_FLOW)?.check()?;
        self.regions.resolve(buffer)?;
        Ok(Some(Request::flushed(id)))
    }

    fn test(&mut self, request: Request) -> Result<Status, TransportError> {
        let flow = self.flows.get_mut(request.flow.0).ok_or(TransportError::NO_FLOW)?;
        if request.kind == RequestKind::Flush {
            return Ok(Status::FLUSHED);
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
        #[cfg(test)]
        self.shake();
        self.keepalive.plan(cx.now);
        // Somebody who has work has ended the sleep: sockets would have made epoll readable.
        let is_silent = self.reading.take_slept() && !cx.is_readable;
        let (mut busy, mut asks, mut told) = (false, false, false);
        if is_silent {
            self.reading.skip();
        } else {
            let (is_direct, came) = self.read_directly();
            busy = came;
            asks = self.reading.asks(is_direct);
        }
        if asks {
            told = self.take_events(cx.now);
        }
        if self.acceptor.queued() > 0 {
            busy |= self.take_connections(cx.budget.max(1), cx.now);
        }
        // Those that come into the queue meanwhile have their turn in the next poll.
        for _ in 0..self.queues.len().min(cx.budget.max(1)) {
            let Some(handle) = self.queues.next() else { break };
            if let Some(flow) = self.flows.get_mut(handle) {
                flow.queued = false;
                told |= self.pump(handle);
            }
        }
        if asks {
            self.reading.asked(told);
        }
        busy |= told | self.settle(Some(cx.now));
        self.acceptor.expire(cx.now, &mut self.watches);
        self.fail_late(cx.now);
        self.look(cx.now);
        if busy || self.has_work() {
            return Progress::Busy;
        }
        let unsettled = (self.queues.unsettled() > 0).then(|| cx.now + resume::SETTLED_EVERY);
        let due = [self.acceptor.wake_at(), self.connecting.wake_at(), self.keepalive.wake_at(), unsettled];
        Progress::Idle { wake_at: due.into_iter().flatten().min() }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        let has_work = self.settle(None) || self.has_work();
        self.reading.sleep(has_work)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.watches.as_fd())
    }
}

impl Transport for TcpTransport {
    unsafe fn register(&mut self, ptr: *mut u8, bytes: u64, kind: MemoryKind<'_>) -> Result<MemoryKey, TransportError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.regions.register_host((ptr, bytes), kind, "TCP") }
    }

    fn deregister(&mut self, key: MemoryKey) -> Result<(), TransportError> {
        self.regions.deregister(key)
    }

    fn listen(&mut self, options: &ListenOptions) -> Result<(Listener, ListenerHandle), TransportError> {
        self.acceptor.open_listener(options, &mut self.watches)
    }

    fn close_listener(&mut self, listener: Listener) {
        let flows = self.acceptor.close_listener(listener.0, &mut self.watches);
        flows.into_iter().for_each(|flow| self.fail(flow.0, Fault::ListenerClosed));
    }

    fn end_numbers(&mut self, listener: Listener, below: u64) {
        let flows = self.acceptor.end_numbers(listener.0, below, &mut self.watches);
        flows.into_iter().for_each(|flow| self.fail(flow.0, Fault::ListenerClosed));
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
        self.open_receiver(listener.0, spec, now).map(|handle| RecvFlow(FlowId(handle)))
    }

    fn state(&self, flow: FlowId) -> Result<FlowState, TransportError> {
        let flow = self.flows.get(flow.0).ok_or(TransportError::NO_FLOW)?;
        flow.check()?;
        Ok(if flow.is_connected() { FlowState::Connected } else { FlowState::Connecting })
    }

    fn close(&mut self, flow: FlowId) {
        if !self.linger(flow.0) {
            self.end(flow.0);
            self.flows.remove(flow.0);
        }
    }

    fn usage(&self) -> Usage {
        let flows = self.flows.len().saturating_sub(self.lingering);
        Usage { listeners: self.acceptor.len(), flows, registrations: self.regions.len(), lingering: 0 }
    }
}
