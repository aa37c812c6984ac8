//! Modelled jobs: ranks that join, call collectives with data that can be checked, and leave.

use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_eval::workload::{Call, POISON};
use mccs_ipc::command::Completion;
use mccs_ipc::handshake::PeerCredentials;
use mccs_ipc::queue::{Consumer, Producer, ring_bytes};
use mccs_ipc::shm::Mapping;
use mccs_ipc::sync::StreamWord;
use mccs_ipc::types::{CollectiveKind, DataType, Handle, RedOp, UniqueId};
use mccs_service::engines::proxy::{Action, JoinRequest, Operand, Operation, ProxyMessage, ProxyReply, RoundState};
use mccs_service::exchange::protocol::Name;
use mccs_service::runtime::{Mailbox, WakerSlot};
use mccs_service::session::Session;
use mccs_service::tenants::Resource;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::host::SimHost;

/// Bytes around every buffer that nobody may write.
const MARGIN_BYTES: usize = 64;
/// Operations that a rank has in flight at most.
const IN_FLIGHT_MAX: usize = 3;

/// What is to run.
#[derive(Debug, Clone)]
pub struct Job {
    /// By rank, its host.
    pub placement: Vec<usize>,
    /// Number of collectives.
    pub calls: usize,
    /// Most elements of one.
    pub count_max: u64,
    /// Whether something may go wrong while it runs: then it may fail, on all ranks.
    pub may_fail: bool,
}

impl Job {
    pub(super) fn ranks(&self, number: u64, seed: u64, rng: &mut StdRng) -> Vec<SimRank> {
        let mut own = StdRng::seed_from_u64(seed.wrapping_mul(1_000_003) ^ number);
        let nranks = self.placement.len() as u32;
        let calls: Vec<Call> = (0..self.calls).map(|_| random_call(nranks, self.count_max, &mut own)).collect();
        let id = UniqueId(own.random());
        (0..)
            .zip(&self.placement)
            .map(|(rank, host)| SimRank {
                id,
                rank,
                nranks,
                host: *host,
                root: self.placement[0],
                calls: calls.clone(),
                may_fail: self.may_fail,
                pause: Duration::from_micros(rng.random_range(0..50_000)),
                state: State::Waiting { until: None },
                flights: Vec::new(),
                next_call: 0,
                done: 0,
            })
            .collect()
    }
}

fn random_call(nranks: u32, count_max: u64, rng: &mut StdRng) -> Call {
    let kind = CollectiveKind::ALL[rng.random_range(0..CollectiveKind::ALL.len())];
    let dtype = [DataType::I32, DataType::U8, DataType::I64][rng.random_range(0..3)];
    let redop = [RedOp::Sum, RedOp::Max, RedOp::PreMulSum, RedOp::Min][rng.random_range(0..4)];
    let redop = if kind.reduces() { redop } else { RedOp::Sum };
    let root = if kind.has_root() { rng.random_range(0..nranks) } else { 0 };
    let count = match rng.random_range(0..10) {
        _ if kind == CollectiveKind::Barrier => 0,
        0 => 0,
        1 => 1,
        _ => rng.random_range(1..=count_max),
    };
    Call { kind, dtype, redop, root, count, nranks, seed: rng.random() }
}

/// How a rank's job went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RankEnd {
    /// All its calls ended well, and it has left.
    Well,
    /// It was told why it cannot go on.
    Failed(String),
    /// It died, by itself or with its host.
    Dead,
}

enum State {
    Waiting { until: Option<Instant> },
    Joining(Connected),
    Running { connected: Connected, comm: Handle },
    Leaving(Connected),
    Ended(RankEnd),
}

/// What a session is to a rank.
struct Connected {
    session: Arc<Session>,
    replies: Mailbox<ProxyReply>,
    completions: Consumer<Completion>,
    incarnation: u64,
}

/// An operation in flight: memory with margins. Kept until the rank is dropped, as what has failed may still be moving.
struct Flight {
    memory: Vec<u64>,
    send_at: usize,
    recv_at: usize,
    call: Call,
    ticket: u64,
    is_checked: bool,
}

/// What a rank sees of the world.
pub(super) struct Sight<'a> {
    pub(super) hosts: &'a [Option<SimHost>],
    pub(super) now: Instant,
}

/// A rank.
pub(super) struct SimRank {
    id: UniqueId,
    rank: u32,
    nranks: u32,
    host: usize,
    root: usize,
    calls: Vec<Call>,
    pub(super) may_fail: bool,
    pause: Duration,
    state: State,
    flights: Vec<Flight>,
    next_call: usize,
    done: usize,
}

impl Hash for SimRank {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (self.next_call, self.done, std::mem::discriminant(&self.state)).hash(hasher);
    }
}

fn connect(host: &SimHost, number: u64) -> Connected {
    let (completions_capacity, words) = (16u32, 1u32);
    let words_offset = ring_bytes::<Completion>(completions_capacity);
    let segment_bytes = words_offset + (u64::from(words) + 1) * size_of::<StreamWord>() as u64;
    let (_, segment) = Mapping::create("mccs-sim", segment_bytes).expect("memory");
    let segment = Arc::new(segment);
    let producer = Producer::new(Arc::clone(&segment), 0, completions_capacity).expect("a ring");
    let consumer = Consumer::new(Arc::clone(&segment), 0, completions_capacity).expect("a ring");
    let peer = PeerCredentials { pid: number as i32, uid: 0, gid: 0 };
    let id = host.registry.next_number();
    let tenant = Arc::clone(&host.tenant);
    let session = Session::new(id, tenant, peer, segment, (words_offset, words), producer, WakerSlot::default());
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

    pub(super) fn host(&self) -> usize {
        self.host
    }

    pub(super) fn describe(&self) -> String {
        let state = match &self.state {
            State::Waiting { .. } => "waits to begin",
            State::Joining(_) => "joins",
            State::Running { .. } => "runs",
            State::Leaving(_) => "leaves",
            State::Ended(_) => "has ended",
        };
        format!("{state} on host {}, {} of {} calls done, next {:?}", self.host, self.done, self.calls.len(), {
            self.calls.get(self.done)
        })
    }

    pub(super) fn host_crashed(&mut self, host: usize) {
        if self.host == host && !matches!(self.state, State::Waiting { .. } | State::Ended(_)) {
            self.state = State::Ended(RankEnd::Dead);
        }
    }

    /// Its process dies.
    pub(super) fn kill(&mut self, hosts: &[Option<SimHost>]) {
        if let State::Joining(connected) | State::Running { connected, .. } | State::Leaving(connected) = &self.state {
            let message = ProxyMessage::SessionClosed { session: connected.session.id };
            let told = hosts[self.host].as_ref().is_none_or(|host| host.proxy.send(message).is_ok());
            if told {
                self.state = State::Ended(RankEnd::Dead);
            }
        }
    }

    /// Does what it can do now. Returns when it wants to be asked again, if not because of news.
    pub(super) fn live(&mut self, sight: &Sight<'_>, rng: &mut StdRng) -> Result<Option<Instant>, String> {
        let now = sight.now;
        match &mut self.state {
            State::Ended(_) => return Ok(None),
            State::Waiting { until: None } => {
                self.state = State::Waiting { until: Some(now + self.pause) };
                return Ok(Some(now + self.pause));
            }
            State::Waiting { until: Some(until) } if *until > now => return Ok(Some(*until)),
            _ => {}
        }
        let Some(host) = &sight.hosts[self.host] else {
            // Its host is down: the launcher would not start it.
            self.state = State::Ended(RankEnd::Dead);
            return Ok(None);
        };
        match std::mem::replace(&mut self.state, State::Ended(RankEnd::Dead)) {
            State::Waiting { .. } => self.join(host, now),
            State::Joining(connected) => self.joining(connected),
            State::Running { connected, comm } => return self.run(connected, comm, host, now, rng),
            State::Leaving(connected) => self.leaving(connected),
            State::Ended(end) => self.state = State::Ended(end),
        }
        Ok(None)
    }

    fn join(&mut self, host: &SimHost, now: Instant) {
        let connected = connect(host, u64::from(self.rank));
        let Ok(charge) = connected.session.tenant.charge(Resource::Communicators, 1) else {
            self.state = State::Ended(RankEnd::Failed("no quota".into()));
            return;
        };
        let request = JoinRequest {
            session: Arc::clone(&connected.session),
            request: 1,
            tenant_comm: Handle { index: 0, generation: 1 },
            id: self.id,
            rank: self.rank,
            nranks: self.nranks,
            root: Name::new(&format!("h{}", self.root)),
            charge,
            reply: connected.replies.sender(),
        };
        match host.proxy.send(ProxyMessage::Join(Box::new(request))) {
            Ok(()) => self.state = State::Joining(connected),
            // The mailbox is full; another session next time.
            Err(_) => self.state = State::Waiting { until: Some(now) },
        }
    }

    fn joining(&mut self, connected: Connected) {
        self.state = match connected.replies.pop() {
            None => State::Joining(connected),
            Some(ProxyReply::Joined { comm, .. }) => State::Running { connected, comm },
            Some(ProxyReply::JoinFailed { message, .. }) => State::Ended(RankEnd::Failed(message)),
            Some(ProxyReply::Left { .. }) => State::Ended(RankEnd::Failed("left before it had joined".into())),
        };
    }

    fn leaving(&mut self, connected: Connected) {
        self.state = match connected.replies.pop() {
            None => State::Leaving(connected),
            Some(_) => State::Ended(RankEnd::Well),
        };
    }

    fn run(
        &mut self,
        mut connected: Connected,
        comm: Handle,
        host: &SimHost,
        now: Instant,
        rng: &mut StdRng,
    ) -> Result<Option<Instant>, String> {
        assert_eq!(connected.incarnation, host.incarnation, "a rank outlives its service");
        if let Some(failure) = connected.completions.try_pop().expect("a sound ring") {
            let why = failure.message().to_owned();
            // As the shim does: it lets go of what has failed.
            let message = ProxyMessage::SessionClosed { session: connected.session.id };
            if host.proxy.send(message).is_err() {
                return Err("a mailbox is full; make it larger".into());
            }
            self.state = State::Ended(RankEnd::Failed(why));
            return Ok(None);
        }
        let ended = connected.session.last_ended(0);
        while let Some(flight) = self.flights.iter_mut().find(|flight| flight.ticket <= ended && !flight.is_checked) {
            flight.is_checked = true;
            flight.check(self.rank)?;
            self.done += 1;
        }
        if self.done == self.calls.len() {
            let reply = connected.replies.sender();
            let message = ProxyMessage::Leave { comm, rank: self.rank, request: 2, reply };
            self.state = match host.proxy.send(message) {
                Ok(()) => State::Leaving(connected),
                Err(_) => State::Running { connected, comm },
            };
            return Ok(Some(now));
        }
        let mut again = None;
        if self.next_call < self.calls.len() && self.next_call - self.done < IN_FLIGHT_MAX {
            again = Some(now + Duration::from_micros(rng.random_range(0..100)));
            let in_place = rng.random_bool(0.3);
            let flight = Flight::new(self.calls[self.next_call], self.rank, self.next_call as u64 + 1, in_place);
            let operation = flight.operation(&connected.session, comm, self.rank);
            connected.session.begin_operation();
            if host.proxy.send(ProxyMessage::Operation(operation)).is_ok() {
                self.flights.push(flight);
                self.next_call += 1;
            }
        }
        self.state = State::Running { connected, comm };
        Ok(again)
    }
}

impl Flight {
    fn new(call: Call, rank: u32, ticket: u64, in_place: bool) -> Self {
        let size = call.dtype.size_bytes();
        let (send_bytes, recv_bytes) = (call.send_count(rank) * size, call.recv_count(rank) * size);
        let elements = if in_place { call.in_place_elements(rank) } else { None };
        let (send_at, recv_at, bytes) = match elements {
            Some((send, recv)) => (send as usize * size, recv as usize * size, send_bytes.max(recv_bytes)),
            None => (0, send_bytes.next_multiple_of(64) + MARGIN_BYTES, {
                send_bytes.next_multiple_of(64) + MARGIN_BYTES + recv_bytes
            }),
        };
        let words = (bytes + 2 * MARGIN_BYTES).div_ceil(8);
        let mut flight = Flight {
            memory: vec![u64::from_ne_bytes([POISON; 8]); words],
            send_at: MARGIN_BYTES + send_at,
            recv_at: MARGIN_BYTES + recv_at,
            call,
            ticket,
            is_checked: false,
        };
        let send_at = flight.send_at;
        flight.bytes_mut()[send_at..send_at + send_bytes].copy_from_slice(&call.input(rank));
        flight
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.memory)
    }

    fn operation(&self, session: &Arc<Session>, comm: Handle, rank: u32) -> Operation {
        let Call { kind, dtype, redop, root, count, .. } = self.call;
        let size = dtype.size_bytes();
        let operand = |at: usize, elements: usize| Operand {
            ptr: self.memory.as_ptr().cast_mut().cast::<u8>().wrapping_add(at),
            bytes: (elements * size) as u64,
            region: None,
        };
        Operation {
            session: Arc::clone(session),
            stream: Handle { index: 0, generation: 1 },
            ticket: self.ticket,
            comm,
            tenant_comm: Handle { index: 0, generation: 1 },
            rank,
            action: Action::Collective { kind, redop, scalar_bits: self.scalar_bits(rank), root },
            dtype,
            count,
            send: operand(self.send_at, self.call.send_count(rank)),
            recv: operand(self.recv_at, self.call.recv_count(rank)),
            group_continues: false,
            rounds: 0,
            round: RoundState::None,
        }
    }

    /// Bits of the scalar in the call's type, as the shim writes them.
    fn scalar_bits(&self, rank: u32) -> u64 {
        self.call.scalar(rank) as u64
    }

    fn check(&mut self, rank: u32) -> Result<(), String> {
        let call = self.call;
        let size = call.dtype.size_bytes();
        let (send_at, recv_at) = (self.send_at, self.recv_at);
        let (send_bytes, recv_bytes) = (call.send_count(rank) * size, call.recv_count(rank) * size);
        let bytes = self.bytes_mut();
        let wrong = call.wrong_elements(rank, &bytes[recv_at..recv_at + recv_bytes]);
        if wrong > 0 {
            return Err(format!("rank {rank} of {call:?} has {wrong} wrong elements"));
        }
        let is_outside = |at: usize| {
            !(send_at..send_at + send_bytes).contains(&at) && !(recv_at..recv_at + recv_bytes).contains(&at)
        };
        match bytes.iter().enumerate().find(|(at, byte)| is_outside(*at) && **byte != POISON) {
            Some((at, _)) => Err(format!("rank {rank} of {call:?}: byte {at} outside its buffers was written")),
            None => Ok(()),
        }
    }
}
