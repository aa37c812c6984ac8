//! Engines that stand still for a hand-over, and the parts of the state that engines have handed in.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mccs_ipc::command::{Command, FLAG_GROUP_CONTINUES, FLAG_ROUND, Opcode};
use mccs_ipc::types::ErrorClass;
use mccs_model::SessionId;
use mccs_runtime::WakerSlot;

use crate::state::{CommState, EndedSession, FailureState, PendingCommand, SessionState, State};

/// How often it is looked which sessions are left: those that end tell nobody.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Phases of a hand-over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// All that they are for.
    Running,
    /// The same, and sessions say what keeps them from being handed over.
    Asking,
    /// Nobody is let in. Sessions take nothing new, and pass on what they have taken.
    Quieting,
    /// Proxy engines start nothing, end what runs, and hand in their part. From then on nothing moves.
    Still,
    /// Sessions answer what proxy engines have answered, and hand in theirs.
    Closing,
}

/// A phase of one attempt: a part is handed in once for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// Phases of a hand-over.
    pub phase: Phase,
    /// Which attempt it is.
    pub attempt: u64,
}

impl Moment {
    /// Whether all engines do what they are for.
    #[must_use]
    pub fn is_running(self) -> bool {
        matches!(self.phase, Phase::Running | Phase::Asking)
    }

    /// Whether proxy engines start nothing.
    #[must_use]
    pub fn is_still(self) -> bool {
        matches!(self.phase, Phase::Still | Phase::Closing)
    }
}

/// A part of the state, with its descriptors.
#[derive(Debug)]
pub struct WithDescriptors<T> {
    /// The part.
    pub state: T,
    /// In its order.
    pub descriptors: Vec<OwnedFd>,
}

/// A session's part.
#[derive(Debug)]
pub enum SessionPart {
    /// It has not said hello: a tenant's connection.
    Connection(String, OwnedFd),
    /// It has a segment.
    Session(Box<WithDescriptors<SessionState>>),
    /// The next program cannot go on with it.
    Ends(WithDescriptors<EndedSession>),
}

/// Sessions that the next program cannot go on with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Obstacles(pub Vec<EndedSession>);

/// Sessions of a tenant that are named; the rest is counted.
const NAMED_MAX: usize = 4;

impl std::fmt::Display for Obstacles {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut by_tenant: BTreeMap<&str, Vec<&EndedSession>> = BTreeMap::new();
        for session in &self.0 {
            by_tenant.entry(&session.tenant).or_default().push(session);
        }
        for (number, (tenant, sessions)) in by_tenant.iter().enumerate() {
            let separator = if number == 0 { "" } else { "; " };
            write!(f, "{separator}tenant {tenant}: ")?;
            for (number, EndedSession { id, reason, .. }) in sessions.iter().take(NAMED_MAX).enumerate() {
                let separator = if number == 0 { "" } else { ", " };
                write!(f, "{separator}session {id} {reason}")?;
            }
            let more = sessions.len().saturating_sub(NAMED_MAX);
            if more > 0 {
                write!(f, ", and {more} more")?;
            }
        }
        Ok(())
    }
}

/// An operation that has ended, of a group that has not: its tenant was not told yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct EndedOperation {
    /// The session.
    pub session: SessionId,
    /// Index of its stream.
    pub stream: u32,
    /// Number in the stream.
    pub ticket: u64,
}

/// Parts that were handed in.
#[derive(Debug, Default)]
pub struct Parts {
    acceptors: usize,
    /// Tenants' connections that wait for their turn.
    connections: Vec<(String, OwnedFd)>,
    /// Sessions that take nothing new, and have passed on all.
    quiet: BTreeSet<SessionId>,
    sessions: BTreeMap<SessionId, SessionPart>,
    /// Sessions' answers when they were asked: why they cannot be handed over, if so.
    asked: BTreeMap<SessionId, Option<EndedSession>>,
    proxies: usize,
    comms: Vec<(CommState, Option<OwnedFd>)>,
    ended: BTreeSet<EndedOperation>,
    /// The part that cannot be handed over.
    obstacles: BTreeSet<String>,
}

/// Why a service cannot be handed over now. It goes on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotStill {
    /// Something of the service cannot be, now.
    #[error("this cannot be handed over: {0}")]
    Obstacle(String),
    /// Sessions cannot be.
    #[error("these sessions cannot be handed over: {0}")]
    Sessions(Obstacles),
    /// It has taken too long.
    #[error("{what} did not come to rest within {within:?}")]
    Late { what: String, within: Duration },
}

#[derive(Default)]
struct Registered {
    wakers: Vec<WakerSlot>,
    acceptors: usize,
    proxies: usize,
}

/// See the module's documentation. Shared by all engines of a service.
pub struct Handover {
    /// Attempt times eight, and the phase.
    moment: AtomicU64,
    /// Whether communicators of the program before have still to begin.
    resumes: AtomicBool,
    /// Whether the program before may not have ended yet.
    has_other: AtomicBool,
    registered: Mutex<Registered>,
    parts: Mutex<Parts>,
    changed: Condvar,
}

impl Default for Handover {
    fn default() -> Self {
        Self::beginning_with(Phase::Running)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Handover {
    fn beginning_with(phase: Phase) -> Self {
        Handover {
            moment: AtomicU64::new(phase as u64),
            resumes: AtomicBool::new(false),
            has_other: AtomicBool::new(false),
            registered: Mutex::default(),
            parts: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Hand-over of a service that stands still until it [goes on](Handover::go_on).
    #[must_use]
    pub fn standing_still() -> Self {
        let [resumes, has_other] = [(); 2].map(|()| AtomicBool::new(true));
        Handover { resumes, has_other, ..Self::beginning_with(Phase::Still) }
    }

    /// Communicators of the program before have begun.
    pub fn note_resumed(&self) {
        self.resumes.store(false, Ordering::Release);
        self.wake();
    }

    /// The program before has ended.
    pub fn note_alone(&self) {
        self.has_other.store(false, Ordering::Release);
        self.wake();
    }

    /// Whether other hosts may take this program for the service: they know no other any more.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.may_be_seen() && !self.has_other.load(Ordering::Acquire)
    }

    /// Whether operators may look: all runs, and what the program before had is there.
    #[must_use]
    pub fn may_be_seen(&self) -> bool {
        self.is_running() && !self.resumes.load(Ordering::Acquire)
    }

    /// The engines' phase.
    #[must_use]
    pub fn moment(&self) -> Moment {
        let moment = self.moment.load(Ordering::Acquire);
        let phase = match moment & 7 {
            0 => Phase::Running,
            1 => Phase::Asking,
            2 => Phase::Quieting,
            3 => Phase::Still,
            _ => Phase::Closing,
        };
        Moment { phase, attempt: moment >> 3 }
    }

    /// Whether all engines do what they are for.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.moment().is_running()
    }

    fn set(&self, phase: Phase, attempt: u64) {
        self.moment.store(attempt << 3 | phase as u64, Ordering::Release);
    }

    /// An engine is to be woken when the phase changes.
    pub fn register(&self, waker: WakerSlot) {
        lock(&self.registered).wakers.push(waker);
    }

    /// The same for an acceptor, which hands in a part.
    pub fn register_acceptor(&self, waker: WakerSlot) {
        self.register(waker);
        lock(&self.registered).acceptors += 1;
    }

    /// An acceptor that was registered ends.
    pub fn forget_acceptor(&self, waker: &WakerSlot) {
        let mut registered = lock(&self.registered);
        let before = registered.wakers.len();
        registered.wakers.retain(|own| !own.is_same(waker));
        registered.acceptors -= before - registered.wakers.len();
    }

    /// The same for a proxy engine.
    pub fn register_proxy(&self, waker: WakerSlot) {
        self.register(waker);
        lock(&self.registered).proxies += 1;
    }

    fn hand_in(&self, attempt: u64, add: impl FnOnce(&mut Parts)) {
        let mut parts = lock(&self.parts);
        // An attempt that is over wants nothing, also before the next one begins.
        let moment = self.moment();
        if moment.attempt == attempt && moment.phase != Phase::Running {
            add(&mut parts);
            self.changed.notify_all();
        }
    }

    /// An acceptor lets nobody in any more; these connections wait for their turn.
    pub fn hand_in_connections(&self, attempt: u64, connections: Vec<(String, OwnedFd)>) {
        self.hand_in(attempt, |parts| {
            parts.acceptors += 1;
            parts.connections.extend(connections);
        });
    }

    /// A session says why the next program cannot go on with it, if so.
    pub fn note_asked(&self, attempt: u64, session: SessionId, obstacle: Option<EndedSession>) {
        self.hand_in(attempt, |parts| drop(parts.asked.insert(session, obstacle)));
    }

    /// A session takes nothing new, and has passed on all that it has taken.
    pub fn note_quiet(&self, attempt: u64, session: SessionId) {
        self.hand_in(attempt, |parts| parts.quiet.extend([session]));
    }

    /// A session does nothing any more.
    pub fn hand_in_session(&self, attempt: u64, session: SessionId, part: SessionPart) {
        self.hand_in(attempt, |parts| drop(parts.sessions.insert(session, part)));
    }

    /// A proxy engine runs nothing, and will not.
    pub fn hand_in_comms(
        &self,
        attempt: u64,
        comms: Vec<(CommState, Option<OwnedFd>)>,
        ended: impl IntoIterator<Item = EndedOperation>,
    ) {
        self.hand_in(attempt, |parts| {
            parts.proxies += 1;
            parts.comms.extend(comms);
            parts.ended.extend(ended);
        });
    }

    /// Something cannot be handed over.
    pub fn object(&self, attempt: u64, what: String) {
        self.hand_in(attempt, |parts| parts.obstacles.extend([what]));
    }

    fn wake(&self) {
        lock(&self.registered).wakers.iter().for_each(WakerSlot::wake);
    }

    /// Asks which sessions the next program could not go on with. Nobody stands still for it.
    ///
    /// `live` are all sessions; `wake_sessions` wakes them.
    ///
    /// # Errors
    /// [`NotStill::Late`]: one does not answer.
    pub fn ask(
        &self,
        live: &dyn Fn() -> Vec<SessionId>,
        wake_sessions: &dyn Fn(),
        within: Duration,
    ) -> Result<Obstacles, NotStill> {
        let (until, attempt) = (Instant::now() + within, self.moment().attempt + 1);
        *lock(&self.parts) = Parts::default();
        self.set(Phase::Asking, attempt);
        wake_sessions();
        let silent = |parts: &Parts| live().into_iter().find(|session| !parts.asked.contains_key(session));
        let late = |parts: &Parts| NotStill::Late { what: named(silent(parts)), within };
        let asked = self.wait(until, |parts| silent(parts).is_none(), late);
        self.set(Phase::Running, attempt);
        let parts = std::mem::take(&mut *lock(&self.parts));
        asked.map(|()| Obstacles(parts.asked.into_values().flatten().collect()))
    }

    /// Has engines stand still, and returns what they have handed in. On an error they are to [go on](Handover::go_on).
    ///
    /// `live` are all sessions; `wake_sessions` wakes them. `ends_sessions`: those that cannot be handed over end.
    ///
    /// # Errors
    /// [`NotStill`].
    pub fn stand_still(
        &self,
        live: &dyn Fn() -> Vec<SessionId>,
        wake_sessions: &dyn Fn(),
        within: Duration,
        ends_sessions: bool,
    ) -> Result<Parts, NotStill> {
        let (until, attempt) = (Instant::now() + within, self.moment().attempt + 1);
        let late = |what: String| NotStill::Late { what, within };
        let (acceptors, proxies) = {
            let registered = lock(&self.registered);
            (registered.acceptors, registered.proxies)
        };
        *lock(&self.parts) = Parts::default();
        self.set(Phase::Quieting, attempt);
        self.wake();
        self.wait(until, |parts| parts.acceptors == acceptors, |_| late("a listening socket".into()))?;
        wake_sessions();
        let slow = |missing: Option<SessionId>| late(named(missing));
        let loud = |parts: &Parts| live().into_iter().find(|session| !parts.quiet.contains(session));
        self.wait(until, |parts| loud(parts).is_none(), |parts| slow(loud(parts)))?;
        self.set(Phase::Still, attempt);
        self.wake();
        self.wait(until, |parts| parts.proxies == proxies, |_| late("an operation that runs".into()))?;
        self.set(Phase::Closing, attempt);
        wake_sessions();
        let missing = |parts: &Parts| live().into_iter().find(|session| !parts.sessions.contains_key(session));
        self.wait(until, |parts| missing(parts).is_none(), |parts| slow(missing(parts)))?;
        let parts = std::mem::take(&mut *lock(&self.parts));
        let ends = |part: &SessionPart| match part {
            SessionPart::Ends(ended) => Some(ended.state.clone()),
            SessionPart::Connection(..) | SessionPart::Session(_) => None,
        };
        let obstacles: Vec<_> = parts.sessions.values().filter_map(ends).collect();
        if obstacles.is_empty() || ends_sessions { Ok(parts) } else { Err(NotStill::Sessions(Obstacles(obstacles))) }
    }

    /// Waits for a condition of what was handed in.
    fn wait(
        &self,
        until: Instant,
        is_so: impl Fn(&Parts) -> bool,
        late: impl Fn(&Parts) -> NotStill,
    ) -> Result<(), NotStill> {
        let mut parts = lock(&self.parts);
        loop {
            if !parts.obstacles.is_empty() {
                let obstacles: Vec<_> = parts.obstacles.iter().map(String::as_str).collect();
                return Err(NotStill::Obstacle(obstacles.join("; ")));
            }
            if is_so(&parts) {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(late(&parts));
            }
            parts = self.changed.wait_timeout(parts, LOOK_EVERY).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// All engines do again what they are for. `wake_sessions` as before.
    pub fn go_on(&self, wake_sessions: &dyn Fn()) {
        self.set(Phase::Running, self.moment().attempt);
        *lock(&self.parts) = Parts::default();
        self.wake();
        wake_sessions();
    }
}

fn named(session: Option<SessionId>) -> String {
    session.map_or("a session".into(), |id| format!("session {id}"))
}

impl Parts {
    /// The whole, with its descriptors. `last_ended` is the last operation that has ended on a stream of a session, by the stream's index.
    #[must_use]
    pub fn into_state(self, last_ended: &dyn Fn(SessionId, u32) -> u64) -> WithDescriptors<State> {
        let Parts { connections, sessions, comms, ended, .. } = self;
        let (mut state, mut descriptors, mut of_ended) = (State::default(), Vec::new(), Vec::new());
        let mut strangers = connections;
        for (id, part) in sessions {
            match part {
                SessionPart::Connection(tenant, socket) => strangers.push((tenant, socket)),
                SessionPart::Session(part) => {
                    let WithDescriptors { state: mut session, descriptors: own } = *part;
                    session.forget_ended(|stream| last_ended(id, stream), &ended);
                    state.sessions.push(session);
                    descriptors.extend(own);
                }
                SessionPart::Ends(WithDescriptors { state: session, descriptors: own }) => {
                    state.ended.push(session);
                    of_ended.extend(own);
                }
            }
        }
        descriptors.extend(of_ended);
        for (tenant, socket) in strangers {
            state.connections.push(tenant);
            descriptors.push(socket);
        }
        let ids: BTreeSet<_> = state.sessions.iter().map(|session| session.id).collect();
        for (mut comm, exchange) in comms {
            if comm.lose(|session| ids.contains(&session)) {
                state.comms.push(comm);
                descriptors.extend(exchange);
            }
        }
        WithDescriptors { state, descriptors }
    }
}

impl CommState {
    /// Ranks whose sessions do not go on have gone, and the communicator fails. Returns whether somebody is left.
    pub fn lose(&mut self, live: impl Fn(SessionId) -> bool) -> bool {
        for (rank, member) in self.members.iter_mut().enumerate() {
            if member.session.is_some_and(|session| !live(session)) {
                member.session = None;
                self.failure.get_or_insert_with(|| FailureState {
                    class: ErrorClass::Remote.to_wire(),
                    message: format!("rank {rank} has gone while the service was handed over"),
                    is_told: false,
                });
            }
        }
        self.members.iter().any(|member| member.session.is_some())
    }
}

impl SessionState {
    /// Leaves commands out that have ended; of a group that has not, one that has ended does nothing when the group is done again.
    fn forget_ended(&mut self, last_ended: impl Fn(u32) -> u64, ended: &BTreeSet<EndedOperation>) {
        for (index, (_, stream)) in (0..).zip(&mut self.streams.0) {
            stream.iter_mut().for_each(|stream| stream.ended = last_ended(index));
        }
        let streams = &self.streams;
        let is_pending =
            |command: &Command| streams.get(command.stream).is_some_and(|stream| command.ticket > stream.ended);
        let commands = self.pending.iter().filter_map(PendingCommand::command).filter(is_pending);
        let mut pending: Vec<Command> = commands.collect();
        for (index, (generation, rank)) in (0..).zip(&mut self.ranks.0) {
            let Some(rank) = rank else { continue };
            let first = pending.iter().find(|command| {
                (command.comm.index, command.comm.generation) == (index, *generation)
                    && command.opcode != Opcode::Nop as u32
            });
            if let Some(first) = first {
                rank.rounds = first.rounds.saturating_sub(u64::from(first.flags & FLAG_ROUND != 0));
            }
        }
        for command in &mut pending {
            let operation = EndedOperation { session: self.id, stream: command.stream.index, ticket: command.ticket };
            if ended.contains(&operation) {
                (command.opcode, command.flags) = (Opcode::Nop as u32, command.flags & FLAG_GROUP_CONTINUES);
            }
        }
        self.pending = pending.iter().map(PendingCommand::from).collect();
    }
}
