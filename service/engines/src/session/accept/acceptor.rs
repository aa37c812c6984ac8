//! Accepts tenants' connections: users, limits of sessions, drain, turns of who connects without end; makes a session of each.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use mccs_ipc::command::{Command, Completion};
use mccs_ipc::handshake::{Listener, PeerCredentials, Socket, SocketError};
use mccs_ipc::protocol::{Response, ResponseEnvelope, SegmentLayout};
use mccs_ipc::queue::{Consumer, Producer, ring_bytes};
use mccs_ipc::shm::Mapping;
use mccs_ipc::sync::{Doorbell, StreamWord};
use mccs_ipc::types::ErrorClass;
use mccs_registry::Registry;
use mccs_runtime::{Context, Engine, Mailbox, Progress, Runtimes, WakerSlot};
use mccs_telemetry::LogBudget;
use mccs_tenants::regions::UnmapWorker;
use mccs_tenants::session::{Session, StreamWords};
use mccs_tenants::{Charge, FdCloser, HostMemory, Resource, Tenant};
use nix::sys::resource::{Resource as Limit, getrlimit};

use super::arrivals::{Arrivals, CONNECTS_PER_S};
use crate::session::commands::CommandRing;
use crate::session::greeting::Greeting;
use crate::session::outlets::{Answers, Outlets, Proxies, ProxyOutbox, ProxyQueues, Replies, TenantSocket};
use crate::session::requests::Requests;
use crate::session::tables::{Fifos, Memory, Ranks, Streams, Tables};
use crate::session::{SLOW_TO_CLOSE, SessionEngine, State};

/// Answers that may wait at a session's engine besides two for each communicator of its tenant's quota: for the leaves, joins and aborts that it
/// asks for in one poll, before which it takes all answers in. No answer may be lost, or its asker would wait for ever.
const REPLIES_BESIDES: usize = 1024;
/// How long to wait when the process is out of descriptors or memory.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);
const DRAINING: &str = "the operator is emptying this host (mccsctl drain): it takes no new processes";

/// Sizes of a session's segment.
#[derive(Debug, Clone, Copy)]
pub struct SessionLimits {
    /// Slots of the command ring, a power of two.
    pub command_ring: u32,
    /// Slots of the completion ring, a power of two.
    pub completion_ring: u32,
    /// How long a tenant's waits poll before they sleep.
    pub spin: Duration,
}

/// Makes sessions. Shared by all acceptors.
pub struct SessionFactory {
    /// Where their engines run.
    pub runtimes: Arc<Runtimes>,
    /// The runtime where they wait for the hello: who never says it does not disturb those who work.
    pub greeting_runtime: u32,
    /// The runtime of those that have been greeted.
    pub serving_runtime: u32,
    /// Sizes.
    pub limits: SessionLimits,
    /// The proxy engines.
    pub proxies: Arc<Proxies>,
    /// Where sessions are listed.
    pub registry: Arc<Registry>,
    /// Where their regions are made.
    pub host_memory: Arc<HostMemory>,
    /// Unmaps what they leave.
    pub unmap_worker: UnmapWorker,
    /// Tenants cause these lines.
    pub log_budget: Mutex<LogBudget>,
}

fn layout(limits: &SessionLimits, words: u32) -> SegmentLayout {
    let align = |bytes: u64| bytes.next_multiple_of(128);
    let completions_offset = align(ring_bytes::<Command>(limits.command_ring));
    let words_offset = completions_offset + align(ring_bytes::<Completion>(limits.completion_ring));
    SegmentLayout {
        segment_bytes: words_offset + (u64::from(words) + 1) * size_of::<StreamWord>() as u64,
        commands_offset: 0,
        commands_capacity: limits.command_ring,
        completions_offset,
        completions_capacity: limits.completion_ring,
        words_offset,
        words,
    }
}

impl SessionFactory {
    /// Whether a process has one. Who is at work may need another, for its graphs.
    fn has_session(&self, peer: PeerCredentials) -> bool {
        self.registry.sessions().iter().any(|session| (session.peer.pid, session.peer.uid) == (peer.pid, peer.uid))
    }

    /// Makes a session of a connection; or tells it why there is none.
    fn start(&self, socket: Socket, peer: PeerCredentials, admission: &Admission) {
        let tenant = Arc::clone(&admission.tenant);
        let socket = TenantSocket::new(socket, Arc::clone(&tenant));
        let charge = match tenant.charge(Resource::Sessions, 1) {
            Ok(charge) => charge,
            Err(error) => {
                self.registry.refused.tenants.fetch_add(1, Ordering::Relaxed);
                refuse(&socket, ErrorClass::InvalidUsage, &error.to_string());
                return;
            }
        };
        let layout = layout(&self.limits, tenant.quota.streams);
        let parts = match Parts::make(&layout) {
            Ok(parts) => parts,
            Err(error) => {
                let message = format!("the service cannot make a session: {error}; {}", descriptor_limit());
                self.cannot(&message, peer);
                return refuse(&socket, ErrorClass::System, &message);
            }
        };
        let Parts { segment_fd, segment, commands, completions, doorbell } = parts;
        // A communicator may be aborted while a rank leaves it. Few sessions ever have so many.
        let replies = Mailbox::growing(2 * tenant.quota.ranks_of_session() as usize + REPLIES_BESIDES);
        let waker: WakerSlot = replies.waker().clone();
        let id = self.registry.next_number();
        let quota = tenant.quota;
        let words = StreamWords { offset: layout.words_offset, count: layout.words };
        let session = Arc::new(Session::new(id, tenant, peer, segment, words, completions, waker.clone()));
        self.registry.add_session(Arc::clone(&session));
        let outlets = Outlets {
            session,
            answers: Answers::new(socket),
            proxies: Arc::clone(&self.proxies),
            outbox: ProxyOutbox::new(admission.queues.clone()),
            replies: Replies::new(replies),
        };
        let tables = Tables {
            memory: Memory::new(&quota, Arc::clone(&self.host_memory), self.unmap_worker.clone()),
            streams: Streams::new(layout.words),
            ranks: Ranks::new(&quota, Arc::clone(&self.registry)),
            fifos: Fifos::default(),
        };
        let engine = SessionEngine {
            state: State::Greeting(Greeting::new(segment_fd, layout, self.limits.spin)),
            doorbell,
            outlets,
            ring: CommandRing::new(commands),
            requests: Requests::default(),
            tables,
            registry: Arc::clone(&self.registry),
            serving_runtime: self.serving_runtime,
            _charge: charge,
        };
        let started = self.runtimes.start_engine(self.greeting_runtime, |own| {
            waker.set(own);
            Box::new(engine)
        });
        // The engine was dropped, and its socket has told that the service is stopping.
        started.err().into_iter().for_each(|error| self.cannot(&format!("no engine for a session: {error}"), peer));
    }

    /// Tells the operator that somebody was refused for want of something.
    fn cannot(&self, message: &str, peer: PeerCredentials) {
        self.registry.refused.tenants.fetch_add(1, Ordering::Relaxed);
        let mut budget = self.log_budget.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(suppressed) = budget.take(Instant::now()) {
            tracing::warn!(pid = peer.pid, uid = peer.uid, suppressed, "{message}");
        }
    }
}

/// What a session is made of, and the kernel may refuse.
struct Parts {
    segment_fd: OwnedFd,
    segment: Arc<Mapping>,
    commands: Consumer<Command>,
    completions: Producer<Completion>,
    doorbell: Doorbell,
}

impl Parts {
    fn make(layout: &SegmentLayout) -> anyhow::Result<Self> {
        let (segment_fd, segment) = Mapping::create("mccs-session", layout.segment_bytes)?;
        let segment = Arc::new(segment);
        let commands = Consumer::new(Arc::clone(&segment), layout.commands_offset, layout.commands_capacity)?;
        let completions = Producer::new(Arc::clone(&segment), layout.completions_offset, layout.completions_capacity)?;
        Ok(Parts { segment_fd, segment, commands, completions, doorbell: Doorbell::new()? })
    }
}

/// How many descriptors the service may have, and where that is said.
fn descriptor_limit() -> String {
    let (soft, hard) = getrlimit(Limit::RLIMIT_NOFILE).unwrap_or((0, 0));
    format!("it may have {soft} descriptors (RLIMIT_NOFILE; at most {hard} without LimitNOFILE= in its unit)")
}

/// Tells a connection that there is no session for it.
fn refuse(socket: &Socket, class: ErrorClass, message: &str) {
    let response = Response::Error { class, message: message.to_owned() };
    let _ = socket.send_hello(class.to_wire()).and_then(|()| socket.send(&ResponseEnvelope { id: 0, response }, &[]));
}

/// A tenant that may connect.
pub struct Admission {
    /// Who.
    pub tenant: Arc<Tenant>,
    /// The users that are it; all, if `None`.
    pub uids: Option<Vec<u32>>,
    /// Where its commands go.
    pub queues: ProxyQueues,
}

impl Admission {
    /// Whether a user may be this tenant.
    fn admits(&self, peer: PeerCredentials) -> bool {
        self.uids.as_ref().is_none_or(|uids| uids.contains(&peer.uid))
    }
}

/// See the module's documentation.
pub struct Acceptor {
    listener: Listener,
    name: String,
    /// Who may use this socket, and their connections: the first that admits a user is its tenant.
    tenants: Vec<(Admission, Arrivals<(Socket, PeerCredentials)>)>,
    factory: Arc<SessionFactory>,
    /// Closes sockets of those who are no tenants.
    strangers: FdCloser<Charge>,
    /// Whether nobody is let in for now, for want of descriptors: who comes waits outside. Nobody's own doing stops others.
    is_paused: bool,
    /// Given up for a moment when the process is out of descriptors, to tell who comes so.
    spare: Option<OwnedFd>,
}

fn spare() -> Option<OwnedFd> {
    std::fs::File::open("/dev/null").ok().map(OwnedFd::from)
}

impl Acceptor {
    /// Accepts for these tenants.
    #[must_use]
    pub fn new(listener: Listener, name: String, admissions: Vec<Admission>, factory: Arc<SessionFactory>) -> Self {
        let tenants = admissions.into_iter().map(|admission| (admission, Arrivals::default())).collect();
        Acceptor { listener, name, tenants, factory, strangers: FdCloser::default(), is_paused: false, spare: spare() }
    }

    /// Takes a connection, or has it wait for its turn.
    fn arrive(&mut self, socket: Socket, peer: PeerCredentials, now: Instant) {
        let Some((admission, arrivals)) = self.tenants.iter_mut().find(|(admission, _)| admission.admits(peer)) else {
            self.factory.registry.refused.tenants.fetch_add(1, Ordering::Relaxed);
            let reason = "is no tenant of this socket; the operator's service.toml lists who is";
            refuse(&socket, ErrorClass::InvalidUsage, &format!("user {} {reason}", peer.uid));
            self.strangers.close_connection(socket);
            return;
        };
        let closer = &admission.tenant.closer;
        if arrivals.is_full() {
            let gone = arrivals.take_out(|(socket, _)| socket.is_closed());
            gone.into_iter().for_each(|(socket, _)| closer.close_connection(socket));
        }
        if arrivals.is_full() {
            let reason = format!("this tenant connects more than {CONNECTS_PER_S} times a second: try again");
            self.factory.cannot(&reason, peer);
            refuse(&socket, ErrorClass::InvalidUsage, &reason);
            closer.close_connection(socket);
        } else if let Some(connection) = arrivals.arrive((socket, peer), now) {
            Self::admit(&self.factory, admission, connection, now);
        }
    }

    /// Takes those whose turn has come. Returns whether there was one.
    fn take_waiting(&mut self, now: Instant) -> bool {
        let mut any = false;
        for (admission, arrivals) in &mut self.tenants {
            if let Some(connection) = arrivals.take(now) {
                Self::admit(&self.factory, admission, connection, now);
                any = true;
            }
        }
        any
    }

    /// When the turn of one that waits comes.
    fn next_turn(&self) -> Option<Instant> {
        self.tenants.iter().filter_map(|(_, arrivals)| arrivals.next_at()).min()
    }

    fn admit(factory: &SessionFactory, admission: &Admission, (socket, peer): (Socket, PeerCredentials), now: Instant) {
        let tenant = &admission.tenant;
        if tenant.closer.is_stuck(now) {
            refuse(&socket, ErrorClass::InvalidUsage, SLOW_TO_CLOSE);
            tenant.closer.close_connection(socket);
            return;
        }
        if factory.registry.is_draining() && !factory.has_session(peer) {
            factory.registry.refused.tenants.fetch_add(1, Ordering::Relaxed);
            let reason = factory.registry.draining_reason().map_or_else(String::new, |reason| format!(": {reason}"));
            refuse(&socket, ErrorClass::System, &format!("{DRAINING}{reason}"));
            tenant.closer.close_connection(socket);
            return;
        }
        factory.start(socket, peer, admission);
    }
}

impl Acceptor {
    /// Tells whoever waits that the process has no descriptor for it, with one that was kept for this. The next poll looks for another.
    fn turn_away(&mut self, error: &SocketError) {
        drop(self.spare.take());
        if let Ok(Some((socket, peer))) = self.listener.accept() {
            let message = format!("the service cannot accept a connection: {error}; {}", descriptor_limit());
            self.factory.cannot(&message, peer);
            refuse(&socket, ErrorClass::System, &message);
            match self.tenants.iter().find(|(admission, _)| admission.admits(peer)) {
                Some((admission, _)) => admission.tenant.closer.close_connection(socket),
                None => self.strangers.close_connection(socket),
            }
        }
    }
}

impl Engine for Acceptor {
    fn name(&self) -> String {
        format!("acceptor {}", self.name)
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.listener.as_fd()]
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        self.is_paused = false;
        self.spare = self.spare.take().or_else(spare);
        if self.take_waiting(cx.now) {
            return Progress::Busy;
        }
        match self.listener.accept() {
            Ok(Some((socket, peer))) => {
                self.arrive(socket, peer, cx.now);
                Progress::Busy
            }
            Ok(None) => Progress::Idle { wake_at: self.next_turn() },
            Err(error) => {
                self.turn_away(&error);
                self.is_paused = true;
                Progress::Idle { wake_at: Some(cx.now + ACCEPT_AGAIN_AFTER) }
            }
        }
    }

    fn ignores_descriptors(&self) -> bool {
        self.is_paused
    }
}

#[cfg(test)]
mod tests {
    use mccs_ipc::device_initiated::Execution;
    use mccs_ipc::timeline_semaphore::SemaphoreAccess;
    use mccs_runtime::{RuntimeOptions, TenantQueues};
    use mccs_tenants::Quota;
    use mccs_tenants::testing::{connect, held_back, shut_gate, unused};
    use nix::unistd::getuid;

    use super::*;

    fn factory(queues: &TenantQueues<crate::proxy::SessionMessage>) -> SessionFactory {
        let proxies = Proxies {
            host: queues.opener(),
            gpus: Err("none".into()),
            execution: Execution::Ranks,
            engines_from: None,
            rails_from: u64::MAX,
            pinned_to: 0,
            access: SemaphoreAccess::Auto,
            root_address: "".into(),
        };
        let no_spin = RuntimeOptions { spin: Duration::ZERO, spin_while_waiting: Duration::ZERO, budget: 1 };
        SessionFactory {
            runtimes: Runtimes::new(no_spin),
            greeting_runtime: 0,
            serving_runtime: 0,
            limits: SessionLimits { command_ring: 16, completion_ring: 16, spin: Duration::ZERO },
            proxies: Arc::new(proxies),
            registry: Arc::default(),
            host_memory: HostMemory::new(0),
            unmap_worker: UnmapWorker::start().expect("a thread"),
            log_budget: Mutex::default(),
        }
    }

    /// Whom the acceptor has no descriptor for is told so, and its own party's closer closes the socket: the acceptor waits for nothing.
    #[test]
    fn who_is_turned_away_is_closed_by_its_own_closer() {
        for is_tenant in [true, false] {
            let gate = shut_gate();
            let directory = tempfile::tempdir().expect("a directory");
            let path = directory.path().join("s");
            let listener = Listener::bind(&path).expect("bound");
            let (own, other) = (held_back(), unused());
            let (of_tenant, of_strangers) = if is_tenant { (own, other) } else { (other, own) };
            let mut tenant = Tenant::new("a".into(), Quota::least());
            Arc::get_mut(&mut tenant).expect("nobody else has it").closer = of_tenant;
            let queues = TenantQueues::new(1, WakerSlot::default());
            let factory = factory(&queues);
            let uid = getuid().as_raw();
            let admission = Admission {
                queues: factory.proxies.open_queues(tenant.share),
                uids: Some(vec![if is_tenant { uid } else { uid + 1 }]),
                tenant,
            };
            let mut acceptor = Acceptor::new(listener, "s".into(), vec![admission], Arc::new(factory));
            acceptor.strangers = of_strangers;
            let socket = Socket::from_fd(connect(&path));
            acceptor.turn_away(&SocketError::TooManyDescriptors);
            socket.recv_hello().expect("not closed").expect("a hello");
            let (envelope, _) = socket.recv::<ResponseEnvelope>().expect("not closed").expect("a refusal");
            let Response::Error { class, message } = envelope.response else { panic!("{envelope:?}") };
            assert!(class == ErrorClass::System && message.contains("RLIMIT_NOFILE"), "{class:?}: {message}");
            socket.set_nonblocking(true).expect("set");
            assert!(!socket.is_closed(), "it was not closed on the acceptor's own thread");
            drop(gate);
            socket.set_nonblocking(false).expect("set");
            assert!(matches!(socket.recv::<ResponseEnvelope>(), Err(SocketError::Closed)), "closed behind the gate");
        }
    }
}
