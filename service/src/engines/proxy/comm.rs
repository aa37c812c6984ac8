//! A communicator's operations in their order, on all its ranks of this device.
//!
//! A collective starts when operation number n has arrived at every rank. One collective of a communicator runs at a
//! time, as in NCCL; sends and receives run as their pairs match.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use mccs_ipc::types::{ErrorClass, Handle};

use super::operation::{Action, Operation, ProxyReply};
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
    /// Ranks whose next collective has arrived.
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
}

impl Comm {
    pub(super) fn new(members: Vec<Member>, schedules: ScheduleCache, info: Arc<CommInfo>) -> Self {
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
        }
    }

    pub(super) fn nranks(&self) -> u32 {
        self.members.len() as u32
    }

    /// Takes a collective in, and returns its number.
    pub(super) fn enqueue(&mut self, operation: Operation) -> u64 {
        let rank = operation.rank as usize;
        let member = &mut self.members[rank];
        member.waiting.push_back(Waiting { operation, arrived: false });
        let seq = member.first_seq + member.waiting.len() as u64 - 1;
        self.info.ranks[rank].enqueued.store(seq + 1, Ordering::Relaxed);
        seq
    }

    /// A collective has become the head of its stream. Returns false if it is no longer waiting: the communicator died.
    pub(super) fn arrive(&mut self, rank: u32, seq: u64) -> bool {
        let member = &mut self.members[rank as usize];
        let Some(at) = seq.checked_sub(member.first_seq) else { return false };
        let Some(waiting) = member.waiting.get_mut(at as usize) else { return false };
        waiting.arrived = true;
        if at == 0 {
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
        let waits = |member: &Member| member.waiting.front().is_some_and(|waiting| waiting.arrived);
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
        for (rank, member) in self.members.iter().enumerate().skip(1) {
            let Some(other) = member.waiting.front() else { continue };
            if let Some(difference) = difference(first, &other.operation) {
                let seq = member.first_seq;
                return Err(Failure::new(
                    ErrorClass::InvalidUsage,
                    format!(
                        "ranks disagree on operation {seq}: rank 0 called {}, rank {rank} called {} (different {difference})",
                        describe(first),
                        describe(&other.operation)
                    ),
                ));
            }
        }
        self.ready = 0;
        self.started_at = Some(now);
        for (member, counters) in self.members.iter_mut().zip(&self.info.ranks) {
            if let Some(waiting) = member.waiting.pop_front() {
                self.running.push(waiting.operation);
            }
            member.first_seq += 1;
            counters.started.store(member.first_seq, Ordering::Relaxed);
            if member.waiting.front().is_some_and(|waiting| waiting.arrived) {
                self.ready += 1;
            }
        }
        Ok(())
    }

    /// Offers a send or receive; returns a matched pair (send, receive).
    pub(super) fn offer(&mut self, operation: Box<Operation>) -> Option<(Box<Operation>, Box<Operation>)> {
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
            leaving: None,
            left: false,
            _charge: charge,
        }
    }
}

/// What two ranks' calls differ in, if they do. Scalars of a pre-multiplied sum may differ.
fn difference(a: &Operation, b: &Operation) -> Option<&'static str> {
    let (
        Action::Collective { kind, redop, root, .. },
        Action::Collective { kind: kind_b, redop: redop_b, root: root_b, .. },
    ) = (&a.action, &b.action)
    else {
        return Some("kind of operation");
    };
    if kind != kind_b {
        Some("collective")
    } else if a.count != b.count {
        Some("count")
    } else if a.dtype != b.dtype {
        Some("data type")
    } else if kind.reduces() && redop != redop_b {
        Some("reduction")
    } else if kind.has_root() && root != root_b {
        Some("root")
    } else {
        None
    }
}

/// A call in words, as in an error message.
pub(super) fn describe(operation: &Operation) -> String {
    let (count, dtype) = (operation.count, operation.dtype);
    match &operation.action {
        Action::Collective { kind, redop, root, .. } => {
            let redop = if kind.reduces() { format!(", {redop}") } else { String::new() };
            let root = if kind.has_root() { format!(", root {root}") } else { String::new() };
            format!("{kind}({count} x {dtype}{redop}{root})")
        }
        Action::Send { peer } => format!("send({count} x {dtype}, to {peer})"),
        Action::Recv { peer } => format!("recv({count} x {dtype}, from {peer})"),
        Action::Nop => "nop".into(),
        Action::Invalid { .. } => "an invalid operation".into(),
    }
}
