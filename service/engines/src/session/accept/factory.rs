//! Makes sessions: their segment, their quota, their engine; of a connection, or of what another program hands over.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use mccs_handover::Handover;
use mccs_ipc::command::{Command, Completion};
use mccs_ipc::handshake::{PeerCredentials, Socket, SocketError};
use mccs_ipc::protocol::{Response, ResponseEnvelope, SegmentLayout};
use mccs_ipc::queue::{Consumer, Producer, ring_bytes};
use mccs_ipc::shm::Mapping;
use mccs_ipc::sync::{Doorbell, StreamWord};
use mccs_ipc::types::ErrorClass;
use mccs_registry::Registry;
use mccs_runtime::{Mailbox, RuntimeError, Runtimes};
use mccs_telemetry::LogBudget;
use mccs_tenants::regions::UnmapWorker;
use mccs_tenants::session::{Session, StreamWords};
use mccs_tenants::{AllSessions, HostMemory, SessionCharge, SessionRefused, Tenant};
use nix::sys::resource::{Resource as Limit, getrlimit};

use super::admission::Admission;
use crate::proxy::ProxyReply;
use crate::session::commands::CommandRing;
use crate::session::greeting::{Greeting, Segment};
use crate::session::outlets::{Answers, Outlets, Proxies, ProxyOutbox, ProxyQueues, Replies, TenantSocket};
use crate::session::requests::Requests;
use crate::session::tables::{Fifos, Memory, Ranks, Streams, Tables};
use crate::session::{SLOW_TO_CLOSE, SessionEngine, State};

/// Answers that may wait at a session's engine besides two for each communicator of its tenant's quota: for the leaves, joins and aborts that it
/// asks for in one poll, before which it takes all answers in. No answer may be lost, or its asker would wait for ever.
const REPLIES_BESIDES: usize = 1024;
/// Message to clients that come while the host is emptied.
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
    /// Runtimes of their engines.
    pub runtimes: Arc<Runtimes>,
    /// The runtime where they wait for the hello: who never says it does not disturb those who work.
    pub greeting_runtime: u32,
    /// The runtime of those that have been greeted.
    pub serving_runtime: u32,
    /// Sizes.
    pub limits: SessionLimits,
    /// The proxy engines.
    pub proxies: Arc<Proxies>,
    /// Registry of sessions.
    pub registry: Arc<Registry>,
    /// How many there may be of all tenants.
    pub all_sessions: Arc<AllSessions>,
    /// Memory of their regions.
    pub host_memory: Arc<HostMemory>,
    /// Unmaps what they leave.
    pub unmap_worker: UnmapWorker,
    /// Tenants cause these lines.
    pub log_budget: Mutex<LogBudget>,
    /// When all stand still, to be handed over.
    pub handover: Arc<Handover>,
}

/// Mailbox for proxy engines' answers to a session.
pub(in crate::session) fn replies_of(tenant: &Tenant) -> Mailbox<ProxyReply> {
    // A communicator may be aborted while a rank leaves it. Few sessions ever have so many.
    Mailbox::growing(2 * tenant.quota.ranks_of_session() as usize + REPLIES_BESIDES)
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
    /// One whose engines have a runtime of their own.
    #[cfg(test)]
    pub(crate) fn for_tests(queues: &mccs_runtime::TenantQueues<crate::proxy::SessionMessage>) -> Self {
        let proxies = Proxies {
            host: queues.opener(),
            gpus: Err("none".into()),
            execution: mccs_ipc::device_initiated::Execution::Ranks,
            engines_from: None,
            rails_from: u64::MAX,
            pinned_to: 0,
            access: mccs_ipc::timeline_semaphore::SemaphoreAccess::Auto,
            root_address: "".into(),
        };
        let (spin, spin_while_waiting) = (Duration::ZERO, Duration::ZERO);
        let runtimes = Runtimes::new(mccs_runtime::RuntimeOptions { spin, spin_while_waiting, budget: 1 });
        let runtime = runtimes.start_runtime("sessions").expect("a thread");
        SessionFactory {
            runtimes,
            greeting_runtime: runtime,
            serving_runtime: runtime,
            limits: SessionLimits { command_ring: 16, completion_ring: 16, spin },
            proxies: Arc::new(proxies),
            registry: Arc::default(),
            all_sessions: AllSessions::at_most(64),
            host_memory: HostMemory::new(0),
            unmap_worker: UnmapWorker::start().expect("a thread"),
            log_budget: Mutex::default(),
            handover: Arc::default(),
        }
    }

    /// Whether a process has one. A process at work may need another, for its graphs.
    fn has_session(&self, peer: PeerCredentials) -> bool {
        self.registry.sessions().iter().any(|session| (session.peer.pid, session.peer.uid) == (peer.pid, peer.uid))
    }

    /// A connection of the program before, which has not said hello, becomes a session; or it is told why not.
    ///
    /// # Errors
    /// The descriptor is none of a connection.
    pub fn connect(&self, socket: OwnedFd, admission: &Admission) -> Result<(), SocketError> {
        let (peer, socket) = (PeerCredentials::of(&socket)?, Socket::from_fd(socket));
        match admission.check(peer) {
            Ok(()) => self.admit(socket, peer, admission, Instant::now()),
            Err(reason) => {
                self.registry.refused.tenants.fetch_add(1, Ordering::Relaxed);
                refuse(&socket, ErrorClass::InvalidUsage, &reason);
                admission.tenant.closer.close_connection(socket);
            }
        }
        Ok(())
    }

    /// Lets a connection in, or tells it why not.
    pub(super) fn admit(&self, socket: Socket, peer: PeerCredentials, admission: &Admission, now: Instant) {
        let tenant = &admission.tenant;
        let refused = if tenant.closer.is_stuck(now) {
            Some((ErrorClass::InvalidUsage, SLOW_TO_CLOSE.to_owned()))
        } else if self.registry.is_draining() && !self.has_session(peer) {
            self.registry.refused.tenants.fetch_add(1, Ordering::Relaxed);
            let reason = self.registry.draining_reason().map_or_else(String::new, |reason| format!(": {reason}"));
            Some((ErrorClass::System, format!("{DRAINING}{reason}")))
        } else {
            None
        };
        match refused {
            Some((class, message)) => {
                refuse(&socket, class, &message);
                tenant.closer.close_connection(socket);
            }
            None => self.start(socket, peer, admission),
        }
    }

    /// Makes a session of a connection; or tells it why there is none.
    fn start(&self, socket: Socket, peer: PeerCredentials, admission: &Admission) {
        let tenant = Arc::clone(&admission.tenant);
        let socket = TenantSocket::new(socket, Arc::clone(&tenant));
        let charge = match self.all_sessions.charge(&tenant) {
            Ok(charge) => charge,
            Err(SessionRefused::OfTenant(error)) => {
                self.registry.refused.tenants.fetch_add(1, Ordering::Relaxed);
                return refuse(&socket, ErrorClass::InvalidUsage, &error.to_string());
            }
            Err(error @ SessionRefused::OfAll { .. }) => {
                self.cannot(&error.to_string(), peer);
                return refuse(&socket, ErrorClass::System, &error.to_string());
            }
        };
        let layout = layout(&self.limits, tenant.quota.streams);
        let parts = match SegmentParts::make(&layout) {
            Ok(parts) => parts,
            Err(error) => {
                let message = format!("the service cannot make a session: {error}; {}", descriptor_limit());
                self.cannot(&message, peer);
                return refuse(&socket, ErrorClass::System, &message);
            }
        };
        let SegmentParts { fd, segment, commands, completions, doorbell } = parts;
        let replies = replies_of(&tenant);
        let quota = tenant.quota;
        let words = StreamWords { offset: layout.words_offset, count: layout.words };
        let (id, waker) = (self.registry.next_number(), replies.waker().clone());
        let tables = Tables {
            memory: Memory::new(&quota, Arc::clone(&self.host_memory), self.unmap_worker.clone()),
            streams: Streams::new(layout.words),
            ranks: Ranks::new(&quota, Arc::clone(&self.registry)),
            fifos: Fifos::default(),
        };
        let engine = self.engine(SessionParts {
            state: State::Greeting(Greeting::new(self.limits.spin)),
            segment: Segment { fd, layout, doorbell },
            session: Session::new(id, tenant, peer, segment, words, completions, waker),
            answers: Answers::new(socket),
            queues: admission.queues.clone(),
            replies,
            ring: CommandRing::new(commands),
            requests: Requests::default(),
            tables,
            charge,
        });
        let started = self.run(engine, self.greeting_runtime);
        started.err().into_iter().for_each(|error| self.cannot(&format!("no engine for a session: {error}"), peer));
    }

    /// The engine of a session, which does nothing yet.
    pub(in crate::session) fn engine(&self, parts: SessionParts) -> SessionEngine {
        let SessionParts { state, segment, session, answers, queues, replies, ring, requests, tables, charge } = parts;
        let outlets = Outlets {
            session: Arc::new(session),
            answers,
            proxies: Arc::clone(&self.proxies),
            outbox: ProxyOutbox::new(queues),
            replies: Replies::new(replies),
        };
        SessionEngine {
            state,
            segment,
            outlets,
            ring,
            requests,
            tables,
            registry: Arc::clone(&self.registry),
            serving_runtime: self.serving_runtime,
            handover: Arc::clone(&self.handover),
            handed_in: 0,
            still_since: None,
            _charge: charge,
        }
    }

    /// Lists a session, and starts its engine.
    ///
    /// # Errors
    /// There are too many engines. The session has ended, and its tenant has been told why.
    pub(in crate::session) fn run(&self, engine: SessionEngine, runtime: u32) -> Result<(), RuntimeError> {
        let session = Arc::clone(&engine.outlets.session);
        self.registry.add_session(Arc::clone(&session));
        // Without an engine it has not moved: the closure is not called.
        let mut waiting = Some(engine);
        let started = self.runtimes.start_engine(runtime, |own| {
            session.waker.set(own);
            Box::new(waiting.take().expect("invariant: the closure is called once"))
        });
        if let (Err(error), Some(mut engine)) = (&started, waiting) {
            engine.refuse(&format!("the service cannot take this session: {error}; try again once others have ended"));
        }
        started.map(drop)
    }

    /// Tells the operator that somebody was refused for want of something.
    pub(super) fn cannot(&self, message: &str, peer: PeerCredentials) {
        self.registry.refused.tenants.fetch_add(1, Ordering::Relaxed);
        let mut budget = self.log_budget.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(suppressed) = budget.take(Instant::now()) {
            tracing::warn!(pid = peer.pid, uid = peer.uid, suppressed, "{message}");
        }
    }
}

/// Differences between sessions: those that begin, and those that another program has served so far.
pub(in crate::session) struct SessionParts {
    pub(in crate::session) state: State,
    pub(in crate::session) segment: Segment,
    pub(in crate::session) session: Session,
    pub(in crate::session) answers: Answers,
    pub(in crate::session) queues: ProxyQueues,
    pub(in crate::session) replies: Mailbox<ProxyReply>,
    pub(in crate::session) ring: CommandRing,
    pub(in crate::session) requests: Requests,
    pub(in crate::session) tables: Tables,
    pub(in crate::session) charge: SessionCharge,
}

/// Parts that the kernel may refuse a session.
struct SegmentParts {
    fd: OwnedFd,
    segment: Arc<Mapping>,
    commands: Consumer<Command>,
    completions: Producer<Completion>,
    doorbell: Doorbell,
}

impl SegmentParts {
    fn make(layout: &SegmentLayout) -> anyhow::Result<Self> {
        let (fd, segment) = Mapping::create("mccs-session", layout.segment_bytes)?;
        let segment = Arc::new(segment);
        let commands = Consumer::new(Arc::clone(&segment), layout.commands_offset, layout.commands_capacity)?;
        let completions = Producer::new(Arc::clone(&segment), layout.completions_offset, layout.completions_capacity)?;
        Ok(SegmentParts { fd, segment, commands, completions, doorbell: Doorbell::new()? })
    }
}

/// How many descriptors the service may have, and where that is said.
pub(super) fn descriptor_limit() -> String {
    let (soft, hard) = getrlimit(Limit::RLIMIT_NOFILE).unwrap_or((0, 0));
    format!("it may have {soft} descriptors (RLIMIT_NOFILE; at most {hard} without LimitNOFILE= in its unit)")
}

/// Tells a connection that there is no session for it.
pub(super) fn refuse(socket: &Socket, class: ErrorClass, message: &str) {
    let response = Response::Error { class, message: message.to_owned() };
    let _ = socket.send_hello(class.to_wire()).and_then(|()| socket.send(&ResponseEnvelope { id: 0, response }, &[]));
}

#[cfg(test)]
mod tests {
    use mccs_ipc::handshake::Listener;
    use mccs_runtime::{Context, Engine, Progress, TenantQueues, WakerSlot};
    use mccs_tenants::Quota;
    use mccs_tenants::testing::connect;

    use super::*;

    /// Sleeps for ever.
    struct Asleep;

    impl Engine for Asleep {
        fn name(&self) -> String {
            "asleep".into()
        }

        fn poll(&mut self, _: &Context) -> Progress {
            Progress::IDLE
        }
    }

    #[test]
    fn who_finds_no_engine_left_is_told_so() {
        let directory = tempfile::tempdir().expect("a directory");
        let listener = Listener::bind(&directory.path().join("s")).expect("bound");
        let tenant = Tenant::new("a".into(), Quota::least());
        let queues = TenantQueues::new(1, WakerSlot::default());
        let factory = SessionFactory::for_tests(&queues);
        let queues = factory.proxies.open_queues(tenant.share);
        let admission = Admission { tenant, uids: None, cgroup: None, queues };
        while factory.runtimes.start_engine(factory.serving_runtime, |_| Box::new(Asleep)).is_ok() {}
        let socket = Socket::from_fd(connect(listener.path()));
        let (accepted, peer) = listener.accept().expect("accepts").expect("a connection");
        factory.admit(accepted, peer, &admission, Instant::now());
        let hello = socket.recv_hello().expect("not closed").expect("a hello");
        assert_eq!(hello.status, ErrorClass::System.to_wire());
        let (envelope, _) = socket.recv::<ResponseEnvelope>().expect("not closed").expect("a refusal");
        let Response::Error { class: ErrorClass::System, message } = envelope.response else { panic!("{envelope:?}") };
        assert!(message.contains("engines, the most it can have") && message.contains("try again"), "{message}");
        factory.runtimes.stop();
    }
}
