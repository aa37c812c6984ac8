//! The state that one program hands to the next: sessions, their memory, communicators. Read as hostile.
//!
//! Rings, words and data lie in shared memory, of which descriptors go beside the state, in its order. Nothing here is an address.

use std::collections::BTreeMap;

use mccs_config::service::AlgorithmChoice;
use mccs_ipc::command::{Command, bytes_of, from_bytes};
use mccs_ipc::protocol::{RequestEnvelope, ResponseEnvelope, SegmentLayout};
use mccs_ipc::shm_exchange::{SHM_EXCHANGE_RANKS_MAX, ShmExchangeLayout};
use mccs_ipc::types::{ErrorClass, Handle, UniqueId};
use mccs_model::limits::NRANKS_MAX;
use serde::{Deserialize, Serialize};

/// Version of the state. Programs with another refuse each other before anything is touched.
pub const STATE_VERSION: u32 = 2;

/// Why a state cannot be gone on with.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum StateError {
    /// Not in our encoding.
    #[error("the state cannot be read: {0}")]
    Malformed(String),
    /// It contradicts itself.
    #[error("the state contradicts itself: {0}")]
    Contradiction(String),
}

/// State that a service hands over.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The last number that a session or communicator has had.
    pub last_number: u64,
    /// Whether the operator empties the host, and why.
    pub draining: Option<Option<String>>,
    /// For the operator.
    pub counters: ServiceCounters,
    /// Memory that tenants have freed, and that the program before gives back as it ends: bytes, by tenant.
    pub leaving: Vec<(String, u64)>,
    /// Sessions, with their descriptors one session after the other.
    pub sessions: Vec<SessionState>,
    /// Sessions that end, with their descriptors likewise, behind those.
    pub ended: Vec<EndedSession>,
    /// Connections that have not said hello, or wait for their turn: tenants' names. A descriptor each, behind those.
    pub connections: Vec<String>,
    /// Communicators. Descriptors of their shared-memory exchanges come last.
    pub comms: Vec<CommState>,
}

/// Slots of a table with their generations, so that no handle ever names another value.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableState<T>(pub Vec<(u32, Option<T>)>);

impl<T> TableState<T> {
    /// Values in the table.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.0.iter().filter_map(|(_, value)| value.as_ref())
    }

    /// The same with handles.
    pub fn iter(&self) -> impl Iterator<Item = (Handle, &T)> {
        let handle = |(index, (generation, value)): (u32, &'_ (u32, Option<T>))| {
            value.as_ref().map(|_| Handle { index, generation: *generation })
        };
        (0..).zip(&self.0).filter_map(move |slot| Some((handle(slot)?, slot.1.1.as_ref()?)))
    }

    /// The value that a handle names.
    #[must_use]
    pub fn get(&self, handle: Handle) -> Option<&T> {
        let (generation, value) = self.0.get(handle.index as usize)?;
        value.as_ref().filter(|_| *generation == handle.generation)
    }
}

/// A session that the next program cannot go on with: it tells the tenant so. Its descriptors: socket, and memory of the service's that the
/// tenant may hold on to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedSession {
    /// Its number.
    pub id: u64,
    /// Its tenant's name.
    pub tenant: String,
    /// Why it ends.
    pub reason: String,
    /// How many descriptors of memory there are.
    pub memory: u32,
}

/// An answer for which the tenant's socket has no room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnsentAnswer {
    /// The answer.
    pub envelope: ResponseEnvelope,
    /// How many descriptors go with it.
    pub descriptors: u32,
    /// Whether these are charged to the tenant until they are sent.
    pub is_charged: bool,
    /// For how long it has waited, in milliseconds.
    pub waited_ms: u64,
}

/// A session. Its descriptors: socket, segment, doorbell, process, those of its regions in the table's order, of those that it has freed, and
/// of its unsent answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionState {
    /// Its number.
    pub id: u64,
    /// Its tenant's name.
    pub tenant: String,
    /// Its job's; empty where it has none.
    pub job: String,
    /// Whether there is a descriptor of its process.
    pub has_process: bool,
    /// Layout of the segment.
    pub layout: SegmentLayout,
    /// Commands taken off the ring.
    pub commands_consumed: u64,
    /// Failures written to the other ring.
    pub completions_produced: u64,
    /// Memory.
    pub regions: TableState<RegionState>,
    /// Memory that the tenant has freed, which pending commands name.
    pub freed: Vec<(Handle, RegionState)>,
    /// Streams.
    pub streams: TableState<StreamState>,
    /// Ranks in communicators.
    pub ranks: TableState<RankState>,
    /// Commands that were taken and have not ended, in the order of their calls.
    pub pending: Vec<PendingCommand>,
    /// Ranks that wait for others to join: their requests are served again.
    pub joining: Vec<RequestEnvelope>,
    /// Requests that wait for so many more commands to be taken first, in order: behind the pending ones.
    pub parked: Vec<(u64, RequestEnvelope)>,
    /// Answers that wait for room in the socket, in order.
    pub answers: Vec<UnsentAnswer>,
    /// Descriptors that were sent and may not have been taken, as far as they are charged.
    pub sent_descriptors: u64,
    /// For the operator.
    pub counters: SessionCountersState,
}

/// Counters of a session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionCountersState {
    /// Operations taken from the ring, without rounds.
    pub commands: u64,
    /// Rounds of communicators that have ended.
    pub rounds: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Failures that found no room in the ring.
    pub untold: u64,
}

/// A command, as it lay in the ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingCommand(Vec<u8>);

impl From<&Command> for PendingCommand {
    fn from(command: &Command) -> Self {
        PendingCommand(bytes_of(command).to_vec())
    }
}

impl PendingCommand {
    /// The command; none where it is none. Its content is checked as any other's.
    #[must_use]
    pub fn command(&self) -> Option<Command> {
        from_bytes(&self.0)
    }
}

/// A region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionState {
    /// Usable bytes.
    pub bytes: u64,
    /// Whether its pages are the service's, or else the tenant's own.
    pub is_of_service: bool,
}

/// A stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamState {
    /// The last operation that has ended, and of which the tenant was told. Those behind it are pending, or have not been called.
    pub ended: u64,
}

/// A rank in a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankState {
    /// Number of the communicator.
    pub comm: u64,
    /// The rank.
    pub rank: u32,
    /// Rounds of the shared-memory exchange that it has begun, those of pending commands excluded.
    pub rounds: u64,
}

/// A communicator whose ranks are all here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommState {
    /// Its number.
    pub number: u64,
    /// The tenant's name for it among ranks.
    pub id: UniqueId,
    /// Its tenant's name for it.
    pub name: String,
    /// Its job.
    pub job: String,
    /// Its ranks, ascending: all.
    pub members: Vec<MemberState>,
    /// Collectives that have started, without rounds.
    pub started: u64,
    /// Number of its strategy.
    pub epoch: u32,
    /// The strategy's algorithm.
    pub algorithm: AlgorithmChoice,
    /// The strategy's order of ranks, by channel.
    pub rings: Vec<Vec<u32>>,
    /// Its shared-memory exchange, if it has one.
    pub shm_exchange: Option<ShmExchangeState>,
    /// Why it has failed, if it has.
    pub failure: Option<FailureState>,
    /// For the operator.
    pub counters: CommCounters,
}

/// A shared-memory exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShmExchangeState {
    /// Its shape.
    pub layout: ShmExchangeLayout,
}

/// A rank's place in a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberState {
    /// Its session; none where it has left for good.
    pub session: Option<u64>,
    /// The communicator, as the session names it.
    pub comm: Handle,
    /// Collectives that have completed.
    pub completed: u64,
    /// The last tag of an operation.
    pub user_tag: u64,
    /// Time by which it has come later than the first rank.
    pub late_ns: u64,
}

/// Why a communicator has failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailureState {
    /// Party at fault.
    pub class: u32,
    /// In words.
    pub message: String,
    /// Whether its ranks have been told.
    pub is_told: bool,
}

impl FailureState {
    /// The class; an internal error where there is none of that number.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        ErrorClass::from_wire(self.class).unwrap_or(ErrorClass::Internal)
    }
}

/// Counters of a communicator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommCounters {
    /// Collectives and pairs completed, and their payload.
    pub operations: u64,
    /// See `operations`.
    pub bytes: u64,
    /// Payload times the bus factor.
    pub bus_bytes: u64,
    /// Time in which a collective was running.
    pub busy_ns: u64,
    /// Pairs among `operations`.
    pub pairs: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Rounds of its shared-memory exchange that were told of, and their payload.
    pub rounds: u64,
    /// See `rounds`.
    pub round_bytes: u64,
}

/// Counters of the service, without those of what goes on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceCounters {
    /// By tenant.
    pub tenants: Vec<TenantCounters>,
    /// Connections refused: tenants', operators', other hosts', metrics'.
    pub refused: [u64; 4],
    /// Lines that were not logged.
    pub lines_suppressed: u64,
}

/// Counters of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantCounters {
    /// Its name.
    pub tenant: String,
    /// Operations, pairs among them, payload and failures of communicators that do not go on.
    pub operations: u64,
    /// See `operations`.
    pub pairs: u64,
    /// See `operations`.
    pub bytes: u64,
    /// See `operations`.
    pub failed: u64,
    /// Collectives of all its communicators, by kind.
    pub kinds: Vec<KindCounters>,
}

/// Collectives of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindCounters {
    /// Which.
    pub collective: String,
    /// Their payload.
    pub bytes: u64,
    /// How many were how long, by bucket of the histogram.
    pub buckets: Vec<u64>,
    /// How long all of them were.
    pub sum_ns: u64,
}

/// More than anything is ever counted to: a thousand million a second, for a century.
const COUNT_MAX: u64 = 1 << 62;

fn contradiction<T>(what: impl Into<String>) -> Result<T, StateError> {
    Err(StateError::Contradiction(what.into()))
}

impl State {
    /// The bytes of a state.
    ///
    /// # Errors
    /// It cannot be encoded: a bug.
    pub fn encode(&self) -> Result<Vec<u8>, StateError> {
        postcard::to_stdvec(self).map_err(|error| StateError::Malformed(error.to_string()))
    }

    /// Reads and checks a state that comes with so many descriptors.
    ///
    /// # Errors
    /// [`StateError`].
    pub fn decode(bytes: &[u8], descriptors: usize) -> Result<Self, StateError> {
        let state: State = match postcard::take_from_bytes(bytes) {
            Ok((state, [])) => state,
            Ok((_, rest)) => return Err(StateError::Malformed(format!("{} bytes too many", rest.len()))),
            Err(error) => return Err(StateError::Malformed(error.to_string())),
        };
        let needed = state.descriptors();
        if needed != descriptors {
            return contradiction(format!("it needs {needed} descriptors, and {descriptors} came"));
        }
        state.check()?;
        Ok(state)
    }

    /// Descriptors that come with it.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        let of_sessions: usize = self.sessions.iter().map(SessionState::descriptors).sum();
        let of_ended: usize = self.ended.iter().map(EndedSession::descriptors).sum();
        let exchanges = self.comms.iter().filter(|comm| comm.shm_exchange.is_some()).count();
        of_sessions + of_ended + self.connections.len() + exchanges
    }

    /// Whether its parts fit each other. Quotas, layouts of rings and commands are checked by who takes them in.
    fn check(&self) -> Result<(), StateError> {
        let (mut sessions, mut comms) = (BTreeMap::new(), BTreeMap::new());
        if self.last_number > COUNT_MAX {
            return contradiction("more sessions and communicators than there can ever have been");
        }
        for session in &self.sessions {
            session.check_counts()?;
            if session.id > self.last_number || sessions.insert(session.id, session).is_some() {
                return contradiction(format!("session {} is there twice, or is none", session.id));
            }
        }
        for EndedSession { id, .. } in &self.ended {
            if *id > self.last_number || sessions.contains_key(id) {
                return contradiction(format!("session {id} ends and goes on, or is none"));
            }
        }
        for comm in &self.comms {
            if comm.number > self.last_number || comms.insert(comm.number, comm).is_some() {
                return contradiction(format!("communicator {} is there twice, or is none", comm.number));
            }
            comm.check(&sessions)?;
        }
        for session in &self.sessions {
            for (handle, RankState { comm, rank, .. }) in session.ranks.iter() {
                let member = comms.get(comm).and_then(|comm| comm.members.get(*rank as usize));
                if member.is_none_or(|member| (member.session, member.comm) != (Some(session.id), handle)) {
                    let id = session.id;
                    return contradiction(format!("session {id} is not rank {rank} of communicator {comm}"));
                }
            }
        }
        Ok(())
    }
}

impl SessionState {
    /// Socket, segment and doorbell.
    const OWN_DESCRIPTORS: usize = 3;

    /// Positions and counts go on from here, and must not run over.
    fn check_counts(&self) -> Result<(), StateError> {
        let own = [self.commands_consumed, self.completions_produced];
        let streams = self.streams.values().map(|stream| stream.ended);
        let parked = self.parked.iter().map(|(commands, _)| *commands);
        if own.into_iter().chain(streams).chain(parked).any(|count| count > COUNT_MAX) {
            return contradiction(format!("session {} has counted further than anything can", self.id));
        }
        Ok(())
    }

    /// Descriptors that come with it.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        let of_answers: usize = self.answers.iter().map(|answer| answer.descriptors as usize).sum();
        let of_memory = self.regions.values().count() + self.freed.len();
        Self::OWN_DESCRIPTORS + usize::from(self.has_process) + of_memory + of_answers
    }
}

impl EndedSession {
    /// Descriptors that come with it.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        1 + self.memory as usize
    }
}

impl CommState {
    fn check(&self, sessions: &BTreeMap<u64, &SessionState>) -> Result<(), StateError> {
        let number = self.number;
        let nranks = self.members.len();
        if nranks == 0 || nranks > NRANKS_MAX as usize {
            return contradiction(format!("communicator {number} has {nranks} ranks"));
        }
        if self.started > COUNT_MAX {
            return contradiction(format!("communicator {number} has counted further than anything can"));
        }
        if self.members.iter().all(|member| member.session.is_none()) {
            return contradiction(format!("nobody is left in communicator {number}"));
        }
        for (rank, member) in (0..).zip(&self.members) {
            let Some(id) = member.session else { continue };
            let known = sessions.get(&id).and_then(|session| session.ranks.get(member.comm));
            if known.is_none_or(|known| (known.comm, known.rank) != (number, rank)) {
                return contradiction(format!("session {id} does not know that it is rank {rank} of {number}"));
            }
        }
        let fits = |layout: ShmExchangeLayout| {
            layout.nranks as usize == nranks && (2..=SHM_EXCHANGE_RANKS_MAX).contains(&layout.nranks)
        };
        if self.shm_exchange.is_some_and(|exchange| !fits(exchange.layout)) {
            return contradiction(format!("communicator {number} has another's shared-memory exchange"));
        }
        Ok(())
    }
}
