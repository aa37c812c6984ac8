//! The session engine: the boundary between a tenant's process and the service.
//!
//! ```text
//!           hello, version agrees                  socket closed, or fenced
//! Greeting -----------------------> Serving ------------------------------------> Closing --told--> (done)
//!     |        no hello in time        | requests (socket) and commands (ring)        ^
//!     +--------------------------------+----------------------------------------------+
//! ```
//!
//! Everything that crosses here is copied once and checked (`validate.rs`) before anything else sees it. Requests come by the
//! socket (`requests.rs`), commands by the ring.

mod acceptor;
mod answers;
mod arrivals;
mod on_gpus;
mod port_channels;
mod proxies;
mod ranks;
mod regions;
mod requests;
mod tables;
mod twins;
mod validate;

use std::collections::{HashMap, VecDeque};
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_ipc::command::{Command, Opcode};
use mccs_ipc::handshake::{Socket, SocketError, has_ended, process};
use mccs_ipc::protocol::{MAGIC, RequestEnvelope, Response, ResponseEnvelope, SegmentLayout, VERSION};
use mccs_ipc::queue::Consumer;
use mccs_ipc::sync::Doorbell;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_registry::Registry;
use mccs_runtime::{Context, Engine, Mailbox, Progress, Share};
use mccs_tenants::regions::UnmapWorker;
use mccs_tenants::session::Session;
use mccs_tenants::{Charge, HostMemory, Resource, Tenant};

pub use self::acceptor::{Acceptor, Admission, SessionFactory, SessionLimits};
use self::answers::Unsent;
use self::port_channels::{RankFifo, TriggersBefore};
use self::proxies::Place;
pub use self::proxies::{GpuProxy, Proxies, ProxyQueues};
use self::tables::Tables;
use self::validate::{Fence, posted, validate};
use crate::proxy::{ProxyReply, RoundState, SessionMessage};

/// How long a new connection has to say hello.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// What a tenant is told of whom the service can take no more descriptors.
const SLOW_TO_CLOSE: &str = "descriptors that this tenant has sent take too long to close";
/// Descriptors of a welcome: the segment's, the doorbell's, and the service's process.
const WELCOME_FDS: usize = 3;
const NO_HELLO: &str = "no hello has come within 5 s";
const NO_ROOM_TO_WELCOME: &str =
    "processes of this tenant have been sent as many descriptors as it may have on their way, and do not take them";
/// What a tenant is told when the service ends.
const STOPPING: &str = "the service is stopping";
/// How soon it is looked whether descriptors that were sent have been taken.
const TAKEN_AFTER: Duration = Duration::from_millis(10);
/// How often a full socket is tried again.
const ANSWER_AGAIN_AFTER: Duration = Duration::from_millis(1);
/// How often the socket of a tenant of whom no request is read is looked at, for the end of its process.
const GONE_WITHIN: Duration = Duration::from_millis(100);

/// A request that waits for what the tenant has written before it.
struct Parked {
    /// Commands to be taken first.
    commands: u64,
    triggers: Vec<TriggersBefore>,
    envelope: RequestEnvelope,
}

enum State {
    Greeting {
        deadline: Instant,
    },
    Serving,
    /// The tenant has closed its end. What it had asked for before is done first: it may have left in an orderly way. What it
    /// writes to the ring from then on is not looked at, or it could go on for ever, and without its quota.
    Finishing {
        /// Commands that the ring had brought by then.
        until: u64,
    },
    Closing,
}

/// The engine of one session. See the module's documentation.
pub struct SessionEngine {
    state: State,
    session: Arc<Session>,
    socket: TenantSocket,
    doorbell: Doorbell,
    /// Sent with the welcome, then dropped.
    segment_fd: Option<OwnedFd>,
    layout: SegmentLayout,
    /// How long the tenant is to poll.
    spin: Duration,
    commands: Consumer<Command>,
    tables: Tables,
    proxies: Arc<Proxies>,
    queues: ProxyQueues,
    /// Whether a proxy engine has heard of this session, by place: if not, it need not hear of its end.
    has_sent: [bool; 2],
    /// Where the engine goes once it has greeted.
    serving_runtime: u32,
    replies: Mailbox<ProxyReply>,
    /// Messages that the tenant's queue had no room for yet. While there are any, nothing new is taken in.
    outbox: VecDeque<(Place, SessionMessage)>,
    registry: Arc<Registry>,
    host_memory: Arc<HostMemory>,
    unmap_worker: UnmapWorker,
    /// A request for memory that waits for what the tenant has freed to be gone, with its descriptor.
    deferred: Option<(RequestEnvelope, Vec<OwnedFd>)>,
    /// Until when no request is read, because the tenant makes too many.
    paused_until: Option<Instant>,
    /// Answers for which the socket had no room. While there are any, no request is read: so they are no more than what the tenant had asked for
    /// before: its joins, aborts, parts and twins in progress, and what was parked. Their descriptors are its communicators', or charged.
    unsent: VecDeque<Unsent>,
    /// Whether nobody is there to answer any more; what was asked before that is still to be read.
    is_deaf: bool,
    /// FIFOs of port channels.
    fifos: Vec<RankFifo>,
    /// Commands taken from the ring.
    popped: u64,
    /// Commands that wait in the ring because the queue is full: when that was seen, and the number of the last of them.
    held: Option<(Instant, u64)>,
    /// Requests that end something which commands still in the ring may name, in order, each with the number of commands
    /// and the triggers to be taken first. The socket would overtake these otherwise.
    parked: VecDeque<Parked>,
    /// Requests to abort a communicator that are not answered, by the tenant's handle.
    aborting: HashMap<Handle, Vec<u64>>,
    /// Requests for memory of communicators that are not answered yet.
    opening: usize,
    _charge: Charge,
}

/// A session's socket. What waits in it is closed with it, so that is left to the tenant's closer.
struct TenantSocket {
    /// `None` only while dropping.
    socket: Option<Socket>,
    /// The process that has connected, where the kernel can tell of its end: a child of it may have the socket, too.
    process: Option<OwnedFd>,
    tenant: Arc<Tenant>,
    /// Descriptors that were sent, and may not have been taken.
    sent: Vec<Charge>,
    /// When to look whether they have been.
    look_at: Option<Instant>,
}

impl TenantSocket {
    fn new(socket: Socket, tenant: Arc<Tenant>) -> Self {
        TenantSocket { process: socket.peer_process(), socket: Some(socket), tenant, sent: Vec::new(), look_at: None }
    }

    /// Takes descriptors that are to be sent out of the tenant's share of those on their way.
    fn charge_sent(&mut self, count: usize) -> Result<Charge, SocketError> {
        if !self.sent.is_empty() && self.is_taken() {
            self.sent.clear();
        }
        let charge = self.tenant.charge(Resource::SentDescriptors, count as u64);
        charge.map_err(|_| SocketError::TooManyDescriptors)
    }

    fn note_sent(&mut self, charge: Charge) {
        self.sent.push(charge);
    }

    /// Gives the tenant's share back once what was sent has been taken. Returns when to look again.
    fn look_whether_taken(&mut self, now: Instant) -> Option<Instant> {
        if self.sent.is_empty() {
            return None;
        }
        if *self.look_at.get_or_insert(now + TAKEN_AFTER) <= now {
            self.look_at = None;
            if self.is_taken() {
                self.sent.clear();
                return None;
            }
        }
        Some(self.look_at.unwrap_or(now + TAKEN_AFTER))
    }

    /// Whether the tenant's process has ended.
    fn is_orphaned(&self) -> bool {
        self.process.as_ref().is_some_and(|process| has_ended(process.as_fd()))
    }
}

impl Deref for TenantSocket {
    type Target = Socket;

    fn deref(&self) -> &Socket {
        self.socket.as_ref().expect("invariant: it is taken by drop alone")
    }
}

impl Drop for TenantSocket {
    fn drop(&mut self) {
        let sent = std::mem::take(&mut self.sent);
        if let Some(socket) = self.socket.take() {
            self.tenant.closer.close_when_taken(socket, sent);
        }
    }
}

impl SessionEngine {
    fn send(&mut self, place: Place, message: SessionMessage) {
        self.has_sent[place as usize] = true;
        if self.outbox.is_empty() {
            if let Err(message) = self.queues.send(place, message) {
                self.outbox.push_back((place, message));
            }
        } else {
            self.outbox.push_back((place, message));
        }
    }

    /// Returns whether the outbox is empty.
    fn flush(&mut self) -> bool {
        while let Some((place, message)) = self.outbox.pop_front() {
            if let Err(message) = self.queues.send(place, message) {
                self.outbox.push_front((place, message));
                return false;
            }
        }
        true
    }

    /// Ends the session with a reason that the tenant is told.
    fn fence(&mut self, reason: &str) {
        tracing::debug!(session = self.session.id, tenant = %self.session.tenant.name, pid = self.session.peer.pid, reason, "session fenced");
        let message = format!("the service ended this session: {reason}");
        if matches!(self.state, State::Greeting { .. }) {
            let _ = self.socket.send_hello(ErrorClass::InvalidUsage.to_wire());
        }
        let response = Response::Error { class: ErrorClass::InvalidUsage, message };
        let _ = self.socket.send(&ResponseEnvelope { id: 0, response }, &[]);
        self.close();
    }

    fn close(&mut self) {
        if !matches!(self.state, State::Closing) {
            self.state = State::Closing;
            self.session.give_back_segment();
            let session = self.session.id;
            let has_sent = self.has_sent;
            let told = [Place::Host, Place::Gpus].into_iter().filter(|place| has_sent[*place as usize]);
            self.outbox.extend(told.map(|place| (place, SessionMessage::Closed { session })));
        }
    }

    /// Hears the hello, and welcomes the tenant. Returns whether it has to wait for room for the welcome's descriptors.
    fn greet(&mut self) -> bool {
        let Ok(charge) = self.socket.charge_sent(WELCOME_FDS) else { return true };
        let mut fds = Vec::new();
        let hello = self.socket.recv_hello_keeping(&mut fds);
        fds.into_iter().for_each(|fd| self.session.tenant.closer.close_later(fd));
        match hello {
            Ok(None) => {}
            Ok(Some(hello)) if hello.magic == MAGIC && hello.version == VERSION => {
                self.socket.note_sent(charge);
                self.welcome();
            }
            Ok(Some(hello)) => {
                // The other side compares versions itself, and says what to do.
                tracing::debug!(session = self.session.id, version = hello.version, "another version");
                let _ = self.socket.send_hello(ErrorClass::InvalidUsage.to_wire());
                self.close();
            }
            Err(SocketError::Closed) => self.close(),
            Err(error) => self.fence(&error.to_string()),
        }
        false
    }

    fn welcome(&mut self) {
        let (session, tenant) = (self.session.id, self.session.tenant.name.clone());
        let operations_in_flight_max = self.session.tenant.quota.operations_in_flight;
        let (layout, spin, root_address) = (self.layout, self.spin, self.proxies.root_address.to_string());
        let welcome = Response::Welcome { session, tenant, layout, spin, operations_in_flight_max, root_address };
        let sent = self.socket.send_hello(0).and_then(|()| match &self.segment_fd {
            Some(segment) => {
                let own = process(std::process::id());
                let fds = [segment.as_fd(), self.doorbell.as_fd()].into_iter().chain(own.as_ref().map(AsFd::as_fd));
                self.socket.send(&ResponseEnvelope { id: 0, response: welcome }, &fds.collect::<Vec<_>>())
            }
            None => Ok(()),
        });
        self.segment_fd = None;
        match sent {
            Ok(()) => {
                self.state = State::Serving;
                self.session.waker.move_to(self.serving_runtime);
            }
            Err(error) => {
                // It has had its hello.
                self.state = State::Serving;
                self.fence(&format!("it could not be welcomed: {error}"));
            }
        }
    }

    /// Whether the next command may be taken off the ring.
    fn takes_next(&self) -> bool {
        let is_due = match self.state {
            State::Finishing { until } => self.popped < until,
            _ => self.session.in_flight() < self.session.tenant.quota.operations_in_flight,
        };
        is_due && self.outbox.is_empty()
    }

    /// Takes commands off the ring. Returns whether there was one.
    fn take_commands(&mut self, now: Instant, budget: usize) -> Result<bool, Fence> {
        let mut any = false;
        for _ in 0..budget {
            if !self.takes_next() {
                break;
            }
            let Some(command) = self.commands.try_pop().map_err(|error| Fence(error.to_string()))? else { break };
            any = true;
            self.popped += 1;
            if command.opcode == Opcode::Posted as u32 {
                let comm = posted(&self.tables, &command)?;
                self.send(Place::Host, SessionMessage::Posted { comm });
                continue;
            }
            self.session.begin_operation();
            let called_at = self.called_at(now);
            let (place, operation) = validate(&self.session, &mut self.tables, &command, called_at)?;
            if operation.round == RoundState::None {
                self.session.counters.commands.fetch_add(1, Ordering::Relaxed);
            }
            self.send(place, SessionMessage::Operation(operation));
        }
        // Also where commands are left in the ring for now.
        self.commands.release();
        if !self.outbox.is_empty() && self.held.is_none() {
            // Of an index that lies nothing follows.
            let waiting = self.commands.waiting().unwrap_or(0);
            self.held = (waiting > 0).then_some((now, self.popped + waiting));
        }
        Ok(any)
    }

    /// When the command that was taken off the ring just now was called, as far as the service has seen.
    fn called_at(&mut self, now: Instant) -> Instant {
        match self.held {
            Some((since, until)) if self.popped <= until => since,
            _ => {
                self.held = None;
                now
            }
        }
    }

    /// The tenant has closed its end of the socket, or has ended.
    fn begin_finishing(&mut self) {
        match self.commands.waiting() {
            Ok(waiting) => self.state = State::Finishing { until: self.popped + waiting },
            Err(error) => self.fence(&error.to_string()),
        }
    }

    /// Takes what a tenant that has gone left in the ring, whatever its quota of operations (a ring is short), and then what it
    /// asked for last.
    fn finish(&mut self, now: Instant, budget: usize) {
        let any = self.serve_ring(now, budget) | self.serve_parked();
        if !any && self.outbox.is_empty() {
            self.close();
        }
    }

    fn serve_ring(&mut self, now: Instant, budget: usize) -> bool {
        match self.take_commands(now, budget) {
            Ok(any) => any,
            Err(Fence(reason)) => {
                self.fence(&reason);
                true
            }
        }
    }
}

impl Engine for SessionEngine {
    fn name(&self) -> String {
        format!("daemon session {}", self.session.id)
    }

    fn share(&self) -> Option<Share> {
        Some(self.session.tenant.share)
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        std::iter::once(self.socket.as_fd()).chain(self.socket.process.as_ref().map(AsFd::as_fd)).collect()
    }

    fn doorbells(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.doorbell.as_fd()]
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        let flushed = self.flush();
        let mut busy = !flushed;
        match self.state {
            State::Closing => return if flushed { Progress::Done } else { Progress::Busy },
            State::Greeting { deadline } => {
                let waits_for_room = self.greet();
                if matches!(self.state, State::Greeting { .. }) {
                    if self.socket.is_orphaned() {
                        self.close();
                    } else if cx.now >= deadline {
                        self.fence(if waits_for_room { NO_ROOM_TO_WELCOME } else { NO_HELLO });
                    } else {
                        let again = if waits_for_room { cx.now + ANSWER_AGAIN_AFTER } else { deadline };
                        return Progress::Idle { wake_at: Some(again.min(deadline)) };
                    }
                }
                return Progress::Busy;
            }
            State::Finishing { .. } => {
                if flushed {
                    self.finish(cx.now, cx.budget);
                }
                return Progress::Busy;
            }
            State::Serving => {}
        }
        while let Some(reply) = self.replies.pop() {
            self.take_reply(reply);
            busy = true;
        }
        let answered = self.send_unsent(cx.now);
        self.paused_until.take_if(|until| *until <= cx.now);
        let look_at = self.socket.look_whether_taken(cx.now);
        if flushed {
            busy |= self.serve_ring(cx.now, cx.budget);
            busy |= self.take_triggers(cx.budget);
            busy |= answered && self.serve_parked();
            busy |= answered && self.serve_deferred();
            if answered && self.deferred.is_none() && cx.is_readable && matches!(self.state, State::Serving) {
                // What it sent before its end comes first.
                let is_orphaned = self.socket.is_orphaned();
                let any = self.serve_socket(cx.now, cx.budget);
                if is_orphaned && !any && self.paused_until.is_none() && matches!(self.state, State::Serving) {
                    self.begin_finishing();
                }
                busy |= any;
            }
        }
        if !busy && self.is_crowded() && (self.socket.is_closed() || self.socket.is_orphaned()) {
            self.begin_finishing();
        }
        if busy || !matches!(self.state, State::Serving) {
            Progress::Busy
        } else if !answered || self.deferred.is_some() {
            Progress::Idle { wake_at: Some(cx.now + ANSWER_AGAIN_AFTER) }
        } else if self.is_crowded() {
            Progress::Idle { wake_at: Some(cx.now + GONE_WITHIN) }
        } else {
            let due = [look_at, self.paused_until].into_iter().flatten().min();
            Progress::Idle { wake_at: due }
        }
    }

    fn ignores_descriptors(&self) -> bool {
        self.is_crowded() || !self.unsent.is_empty() || self.deferred.is_some() || self.paused_until.is_some()
    }

    fn prepare_to_sleep(&mut self) -> bool {
        if !self.outbox.is_empty()
            || !self.replies.is_empty()
            || matches!(self.state, State::Finishing { .. } | State::Closing)
        {
            return false;
        }
        let limit = self.session.tenant.quota.operations_in_flight;
        if self.session.in_flight() >= limit {
            // Commands stay in the ring until an operation ends.
            self.session.throttle(limit)
        } else {
            // A corrupt ring is found again, and fenced, by the next poll.
            self.commands.arm().unwrap_or(false) && self.arm_fifos()
        }
    }
}

impl Drop for SessionEngine {
    fn drop(&mut self) {
        if matches!(self.state, State::Serving) {
            let response = Response::Error { class: ErrorClass::System, message: STOPPING.to_owned() };
            let _ = self.socket.send(&ResponseEnvelope { id: 0, response }, &[]);
        }
        self.registry.remove_session(self.session.id);
    }
}
