//! Modelled ranks of the simulated cluster: they join, call, check what they get, and leave.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_engines::proxy::{JoinRequest, JoinedRank, Operation, ProxyMessage, ProxyReply, SessionMessage};
use mccs_exchange::protocol::Name;
use mccs_ipc::command::Completion;
use mccs_ipc::handshake::PeerCredentials;
use mccs_ipc::protocol::JoinOptions;
use mccs_ipc::queue::{Consumer, Producer, ring_bytes};
use mccs_ipc::shm::Mapping;
use mccs_ipc::sync::StreamWord;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_runtime::{Mailbox, WakerSlot};
use mccs_tenants::Resource;
use mccs_tenants::session::{Session, StreamWords};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::flight::{Caller, Flight};
use super::host::SimHost;
use super::script::{Job, Phase, Trouble, Unit};

/// Units of its script that a rank has in flight at most.
const IN_FLIGHT_MAX: usize = 3;

impl Job {
    pub(super) fn ranks(&self, number: u64, seed: u64, rng: &mut StdRng) -> Vec<SimRank> {
        let mut own = StdRng::seed_from_u64(seed.wrapping_mul(1_000_003) ^ number);
        let script = self.script(&mut own);
        let nranks = self.placement.len() as u32;
        let rank = |(rank, host): (u32, &usize)| SimRank {
            script: Arc::clone(&script),
            phase: 0,
            rank,
            nranks,
            host: *host,
            root: self.placement[0],
            trouble: self.trouble,
            late: self.late.filter(|(late, _)| *late == rank).map_or(Duration::ZERO, |(_, time)| time),
            calls_from: None,
            pause: Duration::from_micros(rng.random_range(0..50_000)),
            state: State::Waiting { until: None },
            connected: None,
            tickets: vec![0; self.streams as usize],
            unsent: VecDeque::new(),
            flying: VecDeque::new(),
            ended: Vec::new(),
            next_unit: 0,
            is_stuck: false,
        };
        (0..).zip(&self.placement).map(rank).collect()
    }
}

/// How a rank's job went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RankEnd {
    /// All its calls ended well, and it has left.
    Well,
    /// It was told why it cannot go on.
    Failed(Option<ErrorClass>, String),
    /// It died, by itself or with its host.
    Dead,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Waiting {
        until: Option<Instant>,
    },
    Joining,
    Running {
        comm: Handle,
    },
    /// All calls have ended well; it leaves after a while.
    Lingering {
        comm: Handle,
        until: Instant,
    },
    /// The communicator has failed: what was called has to end in bounded time.
    Draining {
        comm: Handle,
        end: RankEnd,
    },
    /// As its communicator's failure has left it.
    Leaving(Option<RankEnd>),
    /// Its process ends.
    Closing(RankEnd),
    Ended(RankEnd),
}

/// A rank's session.
struct Connected {
    session: Arc<Session>,
    replies: Mailbox<ProxyReply>,
    completions: Consumer<Completion>,
    incarnation: u64,
}

/// A rank's view of the world.
pub(super) struct Sight<'a> {
    pub(super) hosts: &'a [Option<SimHost>],
    pub(super) now: Instant,
}

/// A rank.
pub(super) struct SimRank {
    script: Arc<[Phase]>,
    phase: usize,
    rank: u32,
    nranks: u32,
    host: usize,
    root: usize,
    trouble: Trouble,
    /// How long it does something else before its first call.
    late: Duration,
    calls_from: Option<Instant>,
    pause: Duration,
    state: State,
    /// From the first join to the end of its process.
    connected: Option<Connected>,
    /// Last ones, by stream.
    tickets: Vec<u64>,
    /// Operations that the service's mailbox had no room for.
    unsent: VecDeque<Operation>,
    /// Units in flight.
    flying: VecDeque<Vec<Flight>>,
    ended: Vec<Flight>,
    next_unit: usize,
    /// It went wrong by calling nothing more.
    is_stuck: bool,
}

impl Hash for SimRank {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (self.phase, self.next_unit, self.flying.len(), std::mem::discriminant(&self.state)).hash(hasher);
        if let State::Ended(RankEnd::Failed(_, why)) = &self.state {
            why.hash(hasher);
        }
    }
}

fn connect(host: &SimHost, number: u64, words: u32) -> Connected {
    let completions_capacity = 16u32;
    let words_offset = ring_bytes::<Completion>(completions_capacity);
    let segment_bytes = words_offset + (u64::from(words) + 1) * size_of::<StreamWord>() as u64;
    let (_, segment) = Mapping::create("mccs-sim", segment_bytes).expect("memory");
    let segment = Arc::new(segment);
    let producer = Producer::new(Arc::clone(&segment), 0, completions_capacity).expect("a ring");
    let consumer = Consumer::new(Arc::clone(&segment), 0, completions_capacity).expect("a ring");
    let peer = PeerCredentials { pid: number as i32, uid: 0, gid: 0 };
    let id = host.registry.next_number();
    let tenant = Arc::clone(&host.tenant);
    let words = StreamWords { offset: words_offset, count: words };
    let session = Session::new(id, tenant, peer, segment, words, producer, WakerSlot::default());
    Connected {
        session: Arc::new(session),
        replies: Mailbox::new(4),
        completions: consumer,
        incarnation: host.incarnation,
    }
}

impl SimRank {
    pub(super) fn end(&self) -> Option<&RankEnd> {
        match &self.state {
            State::Ended(end) => Some(end),
            _ => None,
        }
    }

    pub(super) fn describe(&self) -> String {
        let unit = self.script.get(self.phase).and_then(|phase| phase.units.get(self.next_unit));
        format!(
            "{:?} on host {} in communicator {}, {} units in flight, next {unit:?}",
            self.state,
            self.host,
            self.phase,
            self.flying.len()
        )
    }

    /// The damage to memory that nobody should have touched.
    pub(super) fn check_memory(&self) -> Result<(), String> {
        self.ended.iter().try_for_each(Flight::check_ended)?;
        self.flying.iter().flatten().try_for_each(Flight::check_margins)
    }

    pub(super) fn host_crashed(&mut self, host: usize) {
        if self.host == host && self.connected.take().is_some() {
            self.unsent.clear();
            self.state = State::Ended(RankEnd::Dead);
        }
    }

    /// Its process dies.
    pub(super) fn kill(&mut self) {
        if self.connected.is_some() {
            self.unsent.clear();
            self.state = State::Closing(RankEnd::Dead);
        }
    }

    /// As the tenant names the communicator of now.
    fn tenant_comm(&self) -> Handle {
        Handle { index: self.phase as u32, generation: 1 }
    }

    /// Does what it can do now. Returns when it wants to be asked again, if not because of news.
    pub(super) fn live(&mut self, sight: &Sight<'_>, rng: &mut StdRng) -> Result<Option<Instant>, String> {
        let now = sight.now;
        match &mut self.state {
            State::Ended(_) => return Ok(None),
            State::Waiting { until: until @ None } => {
                *until = Some(now + self.pause);
                return Ok(*until);
            }
            State::Waiting { until: Some(until) } | State::Lingering { until, .. } if *until > now => {
                return Ok(Some(*until));
            }
            _ => {}
        }
        let Some(host) = &sight.hosts[self.host] else {
            // Its host is down: the launcher would not start it.
            self.state = State::Ended(RankEnd::Dead);
            return Ok(None);
        };
        if let Some(connected) = &self.connected {
            assert_eq!(connected.incarnation, host.incarnation, "a rank outlives its service");
        }
        while let Some(operation) = self.unsent.pop_front() {
            if let Err(ProxyMessage::Session(SessionMessage::Operation(operation))) =
                host.proxy.send(SessionMessage::Operation(operation).into())
            {
                self.unsent.push_front(operation);
                return Ok(Some(now));
            }
        }
        match self.state.clone() {
            State::Waiting { .. } => Ok(self.join(host, now)),
            State::Joining => self.joining(),
            State::Running { comm } => self.run(comm, host, now, rng),
            State::Lingering { comm, .. } => Ok(self.leave(comm, None, host, now)),
            State::Draining { comm, end } => self.drain(comm, end, host, now),
            State::Leaving(end) => self.leaving(end, now, rng),
            State::Closing(end) => Ok(self.close(end, host, now)),
            State::Ended(_) => Ok(None),
        }
    }

    fn join(&mut self, host: &SimHost, now: Instant) -> Option<Instant> {
        let words = self.tickets.len() as u32;
        let connected = self.connected.get_or_insert_with(|| connect(host, u64::from(self.rank), words));
        let Ok(charge) = connected.session.tenant.charge(Resource::Communicators, 1) else {
            self.state = State::Closing(RankEnd::Failed(None, "no quota".into()));
            return Some(now);
        };
        let request = JoinRequest {
            session: Arc::clone(&connected.session),
            request: 1,
            tenant_comm: Handle { index: self.phase as u32, generation: 1 },
            id: self.script[self.phase].id,
            rank: self.rank,
            nranks: self.nranks,
            gpu: None,
            gpu_group: None,
            role: mccs_ipc::protocol::Role::Whole,
            root: Name::new(&format!("h{}", self.root)),
            options: JoinOptions::default(),
            charge: Arc::new(charge),
            part: None,
            reply: connected.replies.sender(),
        };
        if host.proxy.send(SessionMessage::Join(Box::new(request)).into()).is_err() {
            return Some(now);
        }
        self.state = State::Joining;
        None
    }

    fn joining(&mut self) -> Result<Option<Instant>, String> {
        self.state = match self.connected.as_ref().and_then(|connected| connected.replies.pop()) {
            None => return Ok(None),
            Some(ProxyReply::Joined(JoinedRank { comm, .. })) => State::Running { comm },
            Some(ProxyReply::JoinFailed { class, message, .. }) => {
                State::Closing(RankEnd::Failed(Some(class), message))
            }
            Some(ProxyReply::Left { .. }) => return Err(format!("rank {} left before it had joined", self.rank)),
            Some(
                ProxyReply::Aborted { .. }
                | ProxyReply::Opened { .. }
                | ProxyReply::TwinMade { .. }
                | ProxyReply::MemoryOpened { .. }
                | ProxyReply::PortChannel { .. },
            ) => {
                return Err(format!("rank {} did not ask to be told", self.rank));
            }
        };
        Ok(None)
    }

    /// The service's news of the present communicator; of earlier ones the rank has left nothing counts.
    fn told(&mut self) -> Result<Option<RankEnd>, String> {
        let own = self.tenant_comm();
        let Some(connected) = &mut self.connected else { return Ok(None) };
        while let Some(completion) = connected.completions.try_pop().expect("a sound ring") {
            if completion.comm == own {
                return Ok(Some(RankEnd::Failed(ErrorClass::from_wire(completion.class), completion.message())));
            }
            if completion.comm == Handle::NONE || completion.comm.index > own.index {
                return Err(format!("rank {} was told of {:?}: {}", self.rank, completion.comm, completion.message()));
            }
        }
        Ok(None)
    }

    /// Takes note of units that have ended.
    fn land(&mut self, is_checked: bool) -> Result<(), String> {
        let Some(connected) = &self.connected else { return Ok(()) };
        let session = &connected.session;
        let has_ended =
            |unit: &Vec<Flight>| unit.iter().all(|flight| flight.ticket <= session.last_ended(flight.stream));
        if !self.flying.iter().any(has_ended) {
            return Ok(());
        }
        let (ended, flying): (Vec<_>, Vec<_>) = std::mem::take(&mut self.flying).into_iter().partition(has_ended);
        self.flying = flying.into();
        for mut flight in ended.into_iter().flatten() {
            if is_checked {
                flight.check()?;
            } else {
                flight.check_margins()?;
            }
            flight.end();
            self.ended.push(flight);
        }
        Ok(())
    }

    fn run(&mut self, comm: Handle, host: &SimHost, now: Instant, rng: &mut StdRng) -> Result<Option<Instant>, String> {
        if let Some(end) = self.told()? {
            // Some programs end at once, others tidy up.
            self.state = if rng.random_bool(0.3) { State::Closing(end) } else { State::Draining { comm, end } };
            return Ok(Some(now));
        }
        self.land(true)?;
        let script = Arc::clone(&self.script);
        let units = &script[self.phase].units;
        if self.flying.is_empty() && self.next_unit == units.len() {
            let until = now + Duration::from_micros(rng.random_range(0..20_000));
            self.state = State::Lingering { comm, until };
            return Ok(Some(until));
        }
        if self.is_stuck || self.next_unit == units.len() || self.flying.len() >= IN_FLIGHT_MAX {
            return Ok(None);
        }
        let calls_from = *self.calls_from.get_or_insert(now + self.late);
        if calls_from > now {
            return Ok(Some(calls_from));
        }
        self.call(&units[self.next_unit], comm, host, now, rng);
        Ok(Some(now + Duration::from_micros(rng.random_range(0..100))))
    }

    fn call(&mut self, unit: &Unit, comm: Handle, host: &SimHost, now: Instant, rng: &mut StdRng) {
        let (rank, tenant_comm) = (self.rank, self.tenant_comm());
        let Some(connected) = &self.connected else { return };
        let Some(mut flights) = unit.flights(rank, self.nranks, self.trouble, rng) else {
            self.is_stuck = match self.trouble {
                Trouble::Abort(_) => {
                    host.proxy.send(SessionMessage::Abort { comm, rank, cuda_error: None, reply: None }.into()).is_ok()
                }
                _ => true,
            };
            return;
        };
        let stream = match unit {
            Unit::Single(_) | Unit::Group(_) => 0,
            _ => rng.random_range(0..self.tickets.len() as u32),
        };
        let caller = Caller { session: &connected.session, comm, tenant_comm, rank, stream, now };
        let last_ticket = &mut self.tickets[stream as usize];
        let operations = flights.iter_mut().flat_map(|flight| flight.operations(&caller, last_ticket));
        self.unsent.extend(operations);
        if let Unit::Group(_) = unit {
            let others = self.unsent.len().saturating_sub(1);
            self.unsent.iter_mut().take(others).for_each(|operation| operation.group_continues = true);
        }
        // Operations that start together end together.
        flights.iter_mut().for_each(|flight| flight.ticket = *last_ticket);
        self.unsent.iter().for_each(|_| connected.session.begin_operation());
        if !flights.is_empty() {
            self.flying.push_back(flights);
        }
        self.next_unit += 1;
    }

    fn leave(&mut self, comm: Handle, end: Option<RankEnd>, host: &SimHost, now: Instant) -> Option<Instant> {
        let Some(connected) = &self.connected else { return None };
        let (rank, tenant_comm, reply) = (self.rank, Handle::NONE, connected.replies.sender());
        let message = SessionMessage::Leave { comm, rank, request: Some(2), tenant_comm, reply }.into();
        if host.proxy.send(message).is_ok() {
            self.state = State::Leaving(end);
        }
        Some(now)
    }

    fn drain(&mut self, comm: Handle, end: RankEnd, host: &SimHost, now: Instant) -> Result<Option<Instant>, String> {
        self.land(false)?;
        if !self.flying.is_empty() {
            return Ok(None);
        }
        Ok(self.leave(comm, Some(end), host, now))
    }

    fn leaving(&mut self, end: Option<RankEnd>, now: Instant, rng: &mut StdRng) -> Result<Option<Instant>, String> {
        let reply = self.connected.as_ref().and_then(|connected| connected.replies.pop());
        let Some(reply) = reply else { return Ok(None) };
        if !matches!(reply, ProxyReply::Left { request: Some(2), .. }) {
            return Err(format!("rank {} wanted to leave and was told something else", self.rank));
        }
        (self.phase, self.next_unit) = (self.phase + 1, 0);
        self.state = match end {
            Some(end) => State::Closing(end),
            None if self.phase == self.script.len() => State::Closing(RankEnd::Well),
            None => State::Waiting { until: Some(now + Duration::from_micros(rng.random_range(0..5000))) },
        };
        Ok(Some(now))
    }

    fn close(&mut self, end: RankEnd, host: &SimHost, now: Instant) -> Option<Instant> {
        let Some(connected) = &self.connected else { return None };
        if host.proxy.send(SessionMessage::Closed { session: connected.session.id }.into()).is_err() {
            return Some(now);
        }
        self.connected = None;
        self.state = State::Ended(end);
        None
    }
}
