//! A communicator's operations in their order, on all its ranks of this device.
//!
//! A collective starts when operation number n has arrived at every rank. One collective of a communicator runs at a
//! time, as in NCCL; sends and receives run as their pairs match.
//!
//! Small collectives are rounds of the communicator's board, where ranks play their parts themselves; here only the parts
//! of ranks that left theirs to the service are played.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use mccs_ipc::board::{BOARD_RANKS_MAX, Board, BoardCall};
use mccs_ipc::types::{ErrorClass, Handle, RedOp};
use mccs_kernels::Source;

use super::operation::{Action, Operation, ProxyReply, RoundState};
use crate::plans::ScheduleCache;
use crate::runtime::Sender;
use crate::session::Session;
use crate::telemetry::CommInfo;
use crate::tenants::Charge;

/// Most ranks that a message tells of.
const RANKS_DESCRIBED_MAX: usize = 8;

/// Why a communicator is dead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) class: ErrorClass,
    pub(super) message: Arc<str>,
}

impl Failure {
    pub(super) fn new(class: ErrorClass, message: impl Into<Arc<str>>) -> Self {
        Failure { class, message: message.into() }
    }
}

/// A collective of one rank that waits for the others.
struct Waiting {
    operation: Operation,
    arrived: bool,
}

/// One rank.
pub(super) struct Member {
    pub(super) session: Arc<Session>,
    pub(super) tenant_comm: Handle,
    /// Collectives enqueued and not started, in order.
    waiting: VecDeque<Waiting>,
    /// Number of the first of `waiting`.
    first_seq: u64,
    /// Collectives enqueued that were no rounds.
    whole_enqueued: u64,
    /// Of those, the ones that have started.
    whole_started: u64,
    pub(super) leaving: Option<(u64, Sender<ProxyReply>)>,
    pub(super) left: bool,
    _charge: Charge,
}

/// Sends and receives between two ranks that wait for each other, in order. One of the two is empty.
#[derive(Default)]
struct Pair {
    sends: VecDeque<Box<Operation>>,
    recvs: VecDeque<Box<Operation>>,
}

/// A communicator.
pub(super) struct Comm {
    pub(super) members: Vec<Member>,
    /// Ranks whose next collective has arrived, and is no round.
    ready: u32,
    /// The collective that runs, one operation a rank; empty when none does.
    pub(super) running: Vec<Operation>,
    pub(super) started_at: Option<Instant>,
    pairs: HashMap<(u32, u32), Pair>,
    pub(super) failure: Option<Failure>,
    pub(super) schedules: ScheduleCache,
    pub(super) info: Arc<CommInfo>,
    /// A rank that has left, if one has.
    departed: Option<u32>,
    /// Point-to-point jobs that run.
    pub(super) pair_jobs: u32,
    /// When something last happened here.
    active_at: Instant,
}

impl Comm {
    pub(super) fn new(members: Vec<Member>, schedules: ScheduleCache, info: Arc<CommInfo>, now: Instant) -> Self {
        Comm {
            running: Vec::with_capacity(members.len()),
            members,
            ready: 0,
            started_at: None,
            pairs: HashMap::new(),
            failure: None,
            schedules,
            info,
            departed: None,
            pair_jobs: 0,
            active_at: now,
        }
    }

    pub(super) fn nranks(&self) -> u32 {
        self.members.len() as u32
    }

    /// Takes a collective in, and returns its number.
    pub(super) fn enqueue(&mut self, operation: Operation) -> u64 {
        let rank = operation.rank as usize;
        let (member, counters) = (&mut self.members[rank], &self.info.ranks[rank]);
        counters.rounds.store(operation.rounds, Ordering::Relaxed);
        if operation.round == RoundState::None {
            member.whole_enqueued += 1;
            counters.enqueued.store(member.whole_enqueued, Ordering::Relaxed);
        }
        member.waiting.push_back(Waiting { operation, arrived: false });
        member.first_seq + member.waiting.len() as u64 - 1
    }

    /// A collective has become the head of its stream. Returns false if it is no longer waiting: the communicator died.
    pub(super) fn arrive(&mut self, rank: u32, seq: u64, now: Instant) -> bool {
        self.active_at = now;
        let member = &mut self.members[rank as usize];
        let Some(at) = seq.checked_sub(member.first_seq) else { return false };
        let Some(waiting) = member.waiting.get_mut(at as usize) else { return false };
        waiting.arrived = true;
        if at == 0 && waiting.operation.round == RoundState::None {
            self.ready += 1;
        }
        true
    }

    /// Whether a collective can start.
    pub(super) fn is_ready(&self) -> bool {
        self.ready == self.nranks() && self.running.is_empty()
    }

    /// Whether an operation of a rank waits for one that has left.
    pub(super) fn waits_for_departed(&self) -> Option<(u32, u32)> {
        let departed = self.departed?;
        let waits = |member: &Member| {
            let Some(operation) = member.arrived() else { return false };
            // A rank may post to a round and leave.
            operation.round == RoundState::None || !self.has_posted(departed, operation.rounds)
        };
        let rank = self.members.iter().position(waits).map(|rank| rank as u32).or_else(|| {
            let unmatched = self.pairs.iter().find(|((src, dst), pair)| {
                let sent = !pair.sends.is_empty() && self.members[*dst as usize].left;
                sent || !pair.recvs.is_empty() && self.members[*src as usize].left
            });
            unmatched.map(|((src, dst), pair)| if pair.sends.is_empty() { *dst } else { *src })
        })?;
        Some((rank, departed))
    }

    /// Checks that all ranks called the same, and moves their operations into `running`.
    pub(super) fn start(&mut self, now: Instant) -> Result<(), Failure> {
        let first = self.members[0].waiting.front().map(|waiting| &waiting.operation);
        let Some(first) = first else { return Ok(()) };
        for member in self.members.iter().skip(1) {
            let Some(other) = member.waiting.front() else { continue };
            let difference = if first.rounds == other.operation.rounds {
                difference(first, &other.operation)
            } else {
                Some("place in the order of calls")
            };
            if let Some(difference) = difference {
                return Err(self.members[0].disagrees(first, member, &other.operation, difference));
            }
        }
        self.ready = 0;
        self.started_at = Some(now);
        for (member, counters) in self.members.iter_mut().zip(&self.info.ranks) {
            if let Some(waiting) = member.waiting.pop_front() {
                self.running.push(waiting.operation);
            }
            member.first_seq += 1;
            member.whole_started += 1;
            counters.started.store(member.whole_started, Ordering::Relaxed);
            if member.arrived().is_some_and(|operation| operation.round == RoundState::None) {
                self.ready += 1;
            }
        }
        Ok(())
    }

    /// Offers a send or receive; returns a matched pair (send, receive).
    pub(super) fn offer(
        &mut self,
        operation: Box<Operation>,
        now: Instant,
    ) -> Option<(Box<Operation>, Box<Operation>)> {
        self.active_at = now;
        match operation.action {
            Action::Send { peer } => {
                let pair = self.pairs.entry((operation.rank, peer)).or_default();
                match pair.recvs.pop_front() {
                    Some(recv) => Some((operation, recv)),
                    None => {
                        pair.sends.push_back(operation);
                        None
                    }
                }
            }
            Action::Recv { peer } => {
                let pair = self.pairs.entry((peer, operation.rank)).or_default();
                match pair.sends.pop_front() {
                    Some(send) => Some((send, operation)),
                    None => {
                        pair.recvs.push_back(operation);
                        None
                    }
                }
            }
            _ => None,
        }
    }

    fn has_posted(&self, rank: u32, round: u64) -> bool {
        self.info.board.as_ref().is_some_and(|board| board.has_posted(rank, round))
    }

    /// Plays the parts of ranks that have left theirs to the service, as far as others have posted. Operations that have
    /// ended go to `ended`.
    pub(super) fn play_rounds(&mut self, ended: &mut Vec<Operation>) -> Result<(), Failure> {
        let Some(board) = self.info.board.clone() else { return Ok(()) };
        let mut asked = false;
        loop {
            let mut progress = false;
            for rank in 0..self.nranks() {
                while self.play_round(&board, rank)? {
                    progress = true;
                    let member = &mut self.members[rank as usize];
                    ended.extend(member.waiting.pop_front().map(|waiting| waiting.operation));
                    member.first_seq += 1;
                    if member.arrived().is_some_and(|operation| operation.round == RoundState::None) {
                        self.ready += 1;
                    }
                }
            }
            if progress {
                continue;
            }
            if !self.has_round_waiting()? || asked {
                return Ok(());
            }
            // A post that came meanwhile is seen in the next turn; later ones are told.
            board.want_news();
            asked = true;
        }
    }

    /// Plays a rank's part of the round that is its next operation. Returns whether that has ended.
    fn play_round(&mut self, board: &Board, rank: u32) -> Result<bool, Failure> {
        let Some(operation) = self.members[rank as usize].arrived_mut() else { return Ok(false) };
        let Some(call) = board_call(operation) else { return Ok(false) };
        let round = operation.rounds;
        match operation.round {
            RoundState::None => return Ok(false),
            RoundState::ToPost => {
                let Action::Collective { scalar_bits, .. } = operation.action else { return Ok(false) };
                let (src, bytes) = (operation.send.ptr, operation.send.bytes as usize);
                // SAFETY: the operand was validated and is kept mapped. The service needs no telling: it looks again.
                let _ = unsafe { board.post(rank, round, &call, scalar_bits, src, bytes) };
                operation.round = RoundState::Posted;
            }
            RoundState::Posted => {}
        }
        let recv = operation.recv.ptr;
        let mut first_call = None;
        let mut sources = [Source { ptr: std::ptr::null(), scalar_bits: None }; BOARD_RANKS_MAX as usize];
        for (peer, source) in (0..board.layout().nranks).zip(&mut sources) {
            let count = call.kind.send_count(call.count, board.layout().nranks, peer, call.root).unwrap_or(0);
            let Some(posted) = board.contribution(peer, round, count as usize * call.dtype.size_bytes()) else {
                return Ok(false);
            };
            let first = *first_call.get_or_insert(posted.call);
            if posted.call != first {
                return Err(self.rounds_differ(round, first, peer, posted.call));
            }
            let scalar_bits = (call.redop == RedOp::PreMulSum).then_some(posted.scalar_bits);
            *source = Source { ptr: posted.data, scalar_bits };
        }
        let sources = &sources[..board.layout().nranks as usize];
        // SAFETY: contributions are as long as the board was asked for; the operand was validated for this call and is
        // kept mapped.
        unsafe { mccs_kernels::finish_round(&call, rank, sources, recv) };
        board.complete(rank, round, call.payload_bytes(board.layout().nranks));
        Ok(true)
    }

    /// Rank 0 and another posted different calls.
    fn rounds_differ(&self, round: u64, first: u64, peer: u32, theirs: u64) -> Failure {
        let place = self.members[0].whole_started + round - 1;
        let message = match (BoardCall::from_wire(first), BoardCall::from_wire(theirs)) {
            (Some(first), Some(theirs)) => format!(
                "ranks disagree on operation {place}: rank 0 called {}, rank {peer} called {} (different {})",
                describe_call(&first),
                describe_call(&theirs),
                call_difference(&first, &theirs).unwrap_or("call")
            ),
            _ => format!("rank 0 or rank {peer} posted what is no call as operation {place}"),
        };
        Failure::new(ErrorClass::InvalidUsage, message)
    }

    /// Whether a rank's round waits for others. An error if one of those has called something else instead.
    fn has_round_waiting(&self) -> Result<bool, Failure> {
        let mut any = false;
        for (rank, member) in self.members.iter().enumerate() {
            let Some(operation) = member.arrived().filter(|operation| operation.round != RoundState::None) else {
                continue;
            };
            any = true;
            for (peer, other) in self.members.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                if !self.has_posted(peer as u32, operation.rounds)
                    && let Some(theirs) = other.arrived()
                {
                    return Err(member.disagrees(operation, other, theirs, "operation"));
                }
            }
        }
        Ok(any)
    }

    /// Ends everything that waits. Returns the operations that had arrived, which now fail; those that had not fail when
    /// they become the head of their stream.
    pub(super) fn die(&mut self, failure: Failure) -> Vec<Operation> {
        self.failure.get_or_insert(failure);
        self.ready = 0;
        if let Some(board) = &self.info.board {
            board.allow(0);
        }
        let mut failed = Vec::new();
        for member in &mut self.members {
            member.first_seq += member.waiting.len() as u64;
            failed.extend(member.waiting.drain(..).filter(|waiting| waiting.arrived).map(|waiting| waiting.operation));
        }
        for (_, pair) in self.pairs.drain() {
            failed.extend(pair.sends.into_iter().chain(pair.recvs).map(|operation| *operation));
        }
        failed
    }

    /// Since when operations have been waiting for other ranks with nothing happening; `None` where none waits.
    pub(super) fn waits_since(&self) -> Option<Instant> {
        let waits = self.members.iter().any(|member| member.arrived().is_some()) || !self.unmatched().is_empty();
        (waits && self.running.is_empty() && self.pair_jobs == 0).then_some(self.active_at)
    }

    fn unmatched(&self) -> Vec<&Operation> {
        let all = self.pairs.values().flat_map(|pair| pair.sends.iter().chain(&pair.recvs));
        all.map(Box::as_ref).collect()
    }

    /// Who waits for what, and who has not called anything, in words.
    pub(super) fn describe_wait(&self) -> String {
        let unmatched = self.unmatched();
        let of = |(rank, member): (usize, &Member)| {
            let pairs = unmatched.iter().filter(|operation| operation.rank as usize == rank);
            let waiting = member.arrived().into_iter().chain(pairs.copied()).map(describe).collect::<Vec<_>>();
            let place = member.whole_started + self.info.rounds(rank as u32);
            match waiting.as_slice() {
                [] => format!(
                    "rank {rank} (process {}) has called nothing after operation {place}",
                    member.session.peer.pid
                ),
                calls => format!("rank {rank} waits in {}", calls.join(", ")),
            }
        };
        let ranks: Vec<_> = self.members.iter().enumerate().take(RANKS_DESCRIBED_MAX).map(of).collect();
        let more = self.members.len().saturating_sub(RANKS_DESCRIBED_MAX);
        let more = if more > 0 { format!("; and {more} more ranks") } else { String::new() };
        format!("{}{more}", ranks.join("; "))
    }

    /// Whether a rank has nothing waiting and nothing running.
    pub(super) fn is_quiet(&self, rank: u32) -> bool {
        let unmatched = |pair: &Pair| pair.sends.iter().chain(&pair.recvs).any(|operation| operation.rank == rank);
        self.members[rank as usize].waiting.is_empty()
            && self.running.is_empty()
            && self.pair_jobs == 0
            && !self.pairs.values().any(unmatched)
    }

    /// A rank has left for good.
    pub(super) fn depart(&mut self, rank: u32) {
        let member = &mut self.members[rank as usize];
        member.left = true;
        self.departed = Some(rank);
    }

    /// Whether nobody is left and nothing runs.
    pub(super) fn is_over(&self) -> bool {
        self.members.iter().all(|member| member.left) && self.running.is_empty() && self.pair_jobs == 0
    }
}

impl Member {
    pub(super) fn new(session: Arc<Session>, tenant_comm: Handle, charge: Charge) -> Self {
        Member {
            session,
            tenant_comm,
            waiting: VecDeque::new(),
            first_seq: 0,
            whole_enqueued: 0,
            whole_started: 0,
            leaving: None,
            left: false,
            _charge: charge,
        }
    }
}

impl Member {
    /// The next collective, if it is the head of its stream.
    fn arrived(&self) -> Option<&Operation> {
        self.waiting.front().filter(|waiting| waiting.arrived).map(|waiting| &waiting.operation)
    }

    fn arrived_mut(&mut self) -> Option<&mut Operation> {
        self.waiting.front_mut().filter(|waiting| waiting.arrived).map(|waiting| &mut waiting.operation)
    }

    /// Number of the next collective among all of this rank, from 0.
    fn place(&self, operation: &Operation) -> u64 {
        let rounds_before = operation.rounds - u64::from(operation.round != RoundState::None);
        self.whole_started + rounds_before
    }

    fn disagrees(&self, own: &Operation, other: &Member, theirs: &Operation, difference: &str) -> Failure {
        let (place, other_place) = (self.place(own), other.place(theirs));
        let message = format!(
            "ranks disagree on operation {place}: rank {} called {}, rank {} called {}{} (different {difference})",
            own.rank,
            describe(own),
            theirs.rank,
            describe(theirs),
            if place == other_place { String::new() } else { format!(" as its operation {other_place}") }
        );
        Failure::new(ErrorClass::InvalidUsage, message)
    }
}

/// The call as a board knows it.
#[must_use]
pub fn board_call(operation: &Operation) -> Option<BoardCall> {
    let Action::Collective { kind, redop, root, .. } = operation.action else { return None };
    Some(BoardCall::new(kind, operation.dtype, redop, root, operation.count))
}

/// What two ranks' calls differ in, if they do. Scalars of a pre-multiplied sum may differ.
fn difference(a: &Operation, b: &Operation) -> Option<&'static str> {
    match (board_call(a), board_call(b)) {
        (Some(a), Some(b)) => call_difference(&a, &b),
        _ => Some("kind of operation"),
    }
}

fn call_difference(a: &BoardCall, b: &BoardCall) -> Option<&'static str> {
    if a.kind != b.kind {
        Some("collective")
    } else if a.count != b.count {
        Some("count")
    } else if a.dtype != b.dtype {
        Some("data type")
    } else if a.redop != b.redop {
        Some("reduction")
    } else if a.root != b.root {
        Some("root")
    } else {
        None
    }
}

fn describe_call(call: &BoardCall) -> String {
    let BoardCall { kind, dtype, redop, root, count } = call;
    let redop = if kind.reduces() { format!(", {redop}") } else { String::new() };
    let root = if kind.has_root() { format!(", root {root}") } else { String::new() };
    format!("{kind}({count} x {dtype}{redop}{root})")
}

/// A call in words, as in an error message.
pub(super) fn describe(operation: &Operation) -> String {
    let (count, dtype) = (operation.count, operation.dtype);
    match &operation.action {
        Action::Collective { .. } => board_call(operation).map_or_else(String::new, |call| describe_call(&call)),
        Action::Send { peer } => format!("send({count} x {dtype}, to {peer})"),
        Action::Recv { peer } => format!("recv({count} x {dtype}, from {peer})"),
        Action::Nop => "nop".into(),
        Action::Invalid { .. } => "an invalid operation".into(),
    }
}
