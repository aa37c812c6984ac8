//! Calls in words: what messages to tenants and operators say of them.

use mccs_ipc::shm_exchange::CollectiveSignature;
use mccs_ipc::types::ErrorClass;
use mccs_model::Action;
use mccs_registry::RankInfo;

use super::comm::{Comm, Failure, Member};
use super::operation::{Operation, RoundState};

/// Most ranks that a message tells of.
const RANKS_DESCRIBED_MAX: usize = 8;
/// What is said of an operation that all ranks here have called.
const AWAITS_HOSTS: &str = " for ranks of other hosts";

impl Comm {
    /// Who waits for what, and who has not called anything, in words. `far` are operations whose peers are on other hosts.
    /// First those who called nothing, as messages are cut where they get too long.
    pub(super) fn describe_wait(&self, far: &[&Operation]) -> String {
        let mut ranks = self.silent(far);
        let of = |member: &Member| {
            let calls = self.calls(member, far);
            let calls: Vec<_> = calls.into_iter().map(|(call, more)| format!("{}{more}", describe(call))).collect();
            (!calls.is_empty()).then(|| format!("rank {} waits in {}", member.rank, calls.join(", ")))
        };
        ranks.extend(self.members.iter().filter_map(of));
        let more = ranks.len().saturating_sub(RANKS_DESCRIBED_MAX);
        ranks.truncate(RANKS_DESCRIBED_MAX);
        let more = if more > 0 { format!("; and {more} more ranks") } else { String::new() };
        let hosts = &self.info.hosts;
        let hosts = if hosts.is_empty() { String::new() } else { format!(" (ranks are on {})", hosts.join(", ")) };
        format!("{}{more}{hosts}", ranks.join("; "))
    }

    /// Ranks of this host that have come to nothing, in words: they have called nothing, or are behind other work.
    pub(super) fn silent(&self, far: &[&Operation]) -> Vec<String> {
        let of = |(member, info): (&Member, &RankInfo)| {
            let place = member.whole_started.saturating_add(self.info.rounds(info));
            let (rank, pid) = (member.rank, member.session.peer.pid);
            let is_silent = !member.left && self.calls(member, far).is_empty();
            is_silent.then(|| match member.waiting.front() {
                Some(waiting) => {
                    let call = describe(&waiting.operation);
                    format!("rank {rank} (process {pid}) has called {call}, and its stream has not come to it")
                }
                None => format!("rank {rank} (process {pid}) has called nothing after operation {place}"),
            })
        };
        self.members.iter().zip(&self.info.ranks).filter_map(of).collect()
    }

    /// What a rank waits in: what others have not called, and what runs with ranks of other hosts. With what to say of it.
    pub(super) fn calls<'a>(&'a self, member: &'a Member, far: &[&'a Operation]) -> Vec<(&'a Operation, &'static str)> {
        let begun = self
            .running
            .iter()
            .chain(&self.broken)
            .chain(far.iter().copied())
            .map(|operation| (operation, AWAITS_HOSTS));
        let waiting = member.arrived().into_iter().chain(self.p2p.remote_waiting()).chain(self.p2p.unmatched());
        let all = begun.chain(waiting.map(|operation| (operation, "")));
        all.filter(|(operation, _)| operation.rank == member.rank).collect()
    }
}

impl Member {
    /// Number of the next collective among all of this rank, from 0.
    pub(super) fn place(&self, operation: &Operation) -> u64 {
        let rounds_before = operation.rounds - u64::from(operation.round != RoundState::None);
        // As many as a hostile rank says.
        self.whole_started.saturating_add(rounds_before)
    }

    /// A failure that names both sides.
    pub(super) fn disagrees(&self, own: &Operation, other: &Member, theirs: &Operation, difference: &str) -> Failure {
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

/// The call as a shared-memory exchange knows it.
#[must_use]
pub fn signature(operation: &Operation) -> Option<CollectiveSignature> {
    let Action::Collective { kind, redop, root, .. } = operation.action else { return None };
    Some(CollectiveSignature::new(kind, operation.dtype, redop, root, operation.count))
}

/// What two ranks' calls differ in, if they do. Scalars of a pre-multiplied sum may differ.
pub(super) fn difference(a: &Operation, b: &Operation) -> Option<&'static str> {
    match (signature(a), signature(b)) {
        (Some(a), Some(b)) => call_difference(&a, &b),
        _ => Some("kind of operation"),
    }
}

pub(super) fn call_difference(a: &CollectiveSignature, b: &CollectiveSignature) -> Option<&'static str> {
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

pub(super) fn describe_call(call: &CollectiveSignature) -> String {
    let CollectiveSignature { kind, dtype, redop, root, count } = call;
    let redop = if kind.reduces() { format!(", {redop}") } else { String::new() };
    let root = if kind.has_root() { format!(", root {root}") } else { String::new() };
    format!("{kind}({count} x {dtype}{redop}{root})")
}

/// A call in words, as in an error message.
pub(super) fn describe(operation: &Operation) -> String {
    let (count, dtype) = (operation.count, operation.dtype);
    match &operation.action {
        Action::Collective { .. } => signature(operation).map_or_else(String::new, |call| describe_call(&call)),
        Action::Send { peer } => format!("send({count} x {dtype}, to {peer})"),
        Action::Recv { peer } => format!("recv({count} x {dtype}, from {peer})"),
        Action::Nop => "nop".into(),
        Action::Invalid { .. } => "an invalid operation".into(),
    }
}
