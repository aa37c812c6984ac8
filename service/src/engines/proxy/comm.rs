//! A communicator's operations in their order, on all its ranks of this device.
//!
//! A collective starts when operation number n has arrived at every rank. One collective of a communicator runs at a
//! time, as in NCCL; sends and receives run as their pairs match.
//!
//! Small collectives may be rounds of the communicator's board (`rounds.rs`).

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use mccs_ipc::types::{ErrorClass, Handle};

use super::describe::difference;
use super::operation::{Action, Operation, ProxyReply, RoundState};
use crate::plans::ScheduleCache;
use crate::runtime::Sender;
use crate::session::Session;
use crate::telemetry::CommInfo;
use crate::tenants::Charge;

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
pub(super) struct Waiting {
    pub(super) operation: Operation,
    pub(super) arrived: bool,
}

/// One rank.
pub(super) struct Member {
    pub(super) session: Arc<Session>,
    pub(super) tenant_comm: Handle,
    /// Collectives enqueued and not started, in order.
    pub(super) waiting: VecDeque<Waiting>,
    /// Number of the first of `waiting`.
    pub(super) first_seq: u64,
    /// Collectives enqueued that were no rounds.
    whole_enqueued: u64,
    /// Of those, the ones that have started.
    pub(super) whole_started: u64,
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
    pub(super) ready: u32,
    /// The collective that runs, one operation a rank; empty when none does.
    pub(super) running: Vec<Operation>,
    pub(super) started_at: Option<Instant>,
    pairs: HashMap<(u32, u32), Pair>,
    pub(super) failure: Option<Failure>,
    pub(super) schedules: ScheduleCache,
    pub(super) info: Arc<CommInfo>,
    /// Whether a rank has left.
    any_left: bool,
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
            any_left: false,
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

    /// A rank whose operation waits for one that has left, and that one.
    pub(super) fn waits_for_departed(&self) -> Option<(u32, u32)> {
        if !self.any_left {
            return None;
        }
        let has_left = |rank: u32| self.members[rank as usize].left;
        let in_collective = |(member, rank): (&Member, u32)| {
            let operation = member.arrived()?;
            // A rank may post to a round and leave.
            let keeps_waiting =
                |gone: &u32| operation.round == RoundState::None || !self.has_posted(*gone, operation.rounds);
            let gone = (0..self.nranks()).filter(|rank| has_left(*rank)).find(keeps_waiting)?;
            Some((rank, gone))
        };
        let in_pair = |((src, dst), pair): (&(u32, u32), &Pair)| {
            if !pair.sends.is_empty() && has_left(*dst) {
                Some((*src, *dst))
            } else if !pair.recvs.is_empty() && has_left(*src) {
                Some((*dst, *src))
            } else {
                None
            }
        };
        self.members.iter().zip(0..).find_map(in_collective).or_else(|| self.pairs.iter().find_map(in_pair))
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

    pub(super) fn unmatched(&self) -> Vec<&Operation> {
        let all = self.pairs.values().flat_map(|pair| pair.sends.iter().chain(&pair.recvs));
        all.map(Box::as_ref).collect()
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
        self.any_left = true;
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

    /// The next collective, if it is the head of its stream.
    pub(super) fn arrived(&self) -> Option<&Operation> {
        self.waiting.front().filter(|waiting| waiting.arrived).map(|waiting| &waiting.operation)
    }

    pub(super) fn arrived_mut(&mut self) -> Option<&mut Operation> {
        self.waiting.front_mut().filter(|waiting| waiting.arrived).map(|waiting| &mut waiting.operation)
    }
}
