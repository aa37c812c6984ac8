//! Device-initiated operations as the proxy sees them: read from the control page, mismatches and
//! waits included. Nothing of them passes through here.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_config::change::StrategyChange;
use mccs_device::cuda::CopyEngines;
use mccs_device::{DeviceInitiatedGroup, NUMBERS_MAX, OperationCounts};
use mccs_ipc::device_initiated::{ControlPage, Cut};
use mccs_ipc::large::LargeWord;
use mccs_ipc::types::ErrorClass;
use mccs_kernels::cuda::contradiction;
use mccs_model::Refused;
use mccs_registry::CommInfo;

use crate::proxy::calls::deadline::LastProgress;
use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::members::{Member, Members};
use crate::proxy::gpus::gpu_counts::{Counts, LargeCounts, LastCounts};

/// See the module's documentation. All ranks are on this host.
pub(crate) struct GpuRanks {
    info: Arc<CommInfo>,
    group: Arc<DeviceInitiatedGroup>,
    watch: LastCounts,
}

impl GpuRanks {
    /// Those of a communicator, if they run its collectives themselves.
    pub(crate) fn of(info: &Arc<CommInfo>) -> Option<Self> {
        let group = Arc::clone(info.device_initiated.as_ref()?);
        Some(GpuRanks { info: Arc::clone(info), group, watch: LastCounts::default() })
    }

    /// Asks GPUs how far they are.
    pub(crate) fn ask(&self) {
        self.info.ask();
    }

    pub(crate) fn page(&self) -> &ControlPage {
        self.group.page()
    }

    /// Ranks of the communicator.
    pub(crate) fn nranks(&self) -> u32 {
        self.info.nranks
    }

    /// Why a GPU does not say how far it is, if one does not.
    pub(crate) fn fault(&self) -> Option<&str> {
        self.group.fault()
    }

    /// Changes what ranks run their collectives by. Returns from which operation on, that no rank has called.
    pub(crate) fn change(&self, change: &StrategyChange) -> Result<Cut, Refused> {
        Ok(self.group.strategies().change(change).map_err(|refused| refused.to_string())?)
    }

    /// Takes what was learned into the strategy. Returns the number of a new one.
    pub(crate) fn adapt(&self, now: Instant) -> Option<u64> {
        self.group.adapt(now)
    }

    /// How far GPUs are, if they have answered.
    pub(crate) fn answered(&self) -> Option<Counts> {
        self.group.is_answered().then(|| self.counts())
    }

    /// How far GPUs are, as they last said.
    fn counts(&self) -> Counts {
        Counts { seen: self.group.seen(self.info.nranks), large: self.large() }
    }

    /// How far large operations are.
    fn large(&self) -> LargeCounts {
        let of = |large: &Arc<CopyEngines>| {
            let (operations, in_queue) = (large.operations(), large.waits_for_queues());
            LargeCounts { operations, in_queue }
        };
        self.group.large().map(of).unwrap_or_default()
    }

    /// Whether something may be under way, as far as is known. Operations in graphs are counted by GPUs alone.
    pub(crate) fn may_run(&self) -> bool {
        self.counts().are_open() || (0..self.info.nranks).any(|rank| self.page().has_graphs(rank))
    }

    /// Looks at what GPUs have answered. Returns why the communicator ends, if it does: a GPU has told of a contradiction or does not tell, numbers
    /// run out, a rank's process ends, or nothing has happened for `timeout` although something waits.
    pub(crate) fn judge(
        &mut self,
        members: &Members,
        progress: &mut LastProgress,
        timeout: Option<Duration>,
        now: Instant,
    ) -> Option<Failure> {
        let fault = |fault| Failure::new(ErrorClass::System, format!("a GPU does not say how far it is: {fault}"));
        let failure = self.contradiction().or_else(|| self.fault().map(fault)).or_else(|| self.out_of_numbers());
        if failure.is_some() {
            return failure;
        }
        let since = self.waits_since(progress, now)?;
        ending_rank(members).or_else(|| {
            let timeout = timeout.filter(|timeout| since + *timeout <= now)?;
            let wait = self.describe_wait(members, &self.watch.last());
            Some(Failure::new(ErrorClass::Timeout, format!("nothing has happened for {timeout:?}: {wait}")))
        })
    }

    /// Looks at page and answers. Returns since when ranks have been waiting for others with nothing happening, as far as
    /// looks tell; `None` where none waits, or GPUs have not answered.
    fn waits_since(&mut self, progress: &mut LastProgress, now: Instant) -> Option<Instant> {
        let (is_answered, large) = (self.group.is_answered(), self.large());
        if self.watch.has_ended(large.operations.ended) {
            progress.note(now);
        }
        let large = self.watch.look_at_large(large, now);
        let others = if is_answered { self.others_wait_since(progress, now) } else { None };
        large.into_iter().chain(others).min()
    }

    /// The same of what is not large.
    fn others_wait_since(&mut self, progress: &mut LastProgress, now: Instant) -> Option<Instant> {
        let seen = self.group.seen(self.info.nranks);
        if self.watch.note_seen(seen) {
            progress.note(now);
        }
        let waits = seen.operations.iter().chain(&seen.groups).any(|counts| counts.are_open());
        waits.then(|| progress.since())
    }

    /// Two ends of a message that do not mean the same, if a GPU has told of such.
    pub(crate) fn contradiction(&self) -> Option<Failure> {
        let fault = self.page().fault()?;
        let name_of = |rank| self.info.name_of(rank);
        let message = contradiction(name_of(fault.sender), fault.came, name_of(fault.receiver), fault.expected);
        Some(Failure::new(ErrorClass::InvalidUsage, message))
    }

    /// Why it ends, if a rank's kernels are about to run out of numbers. Ranks count what they call themselves; what graphs replay only GPUs do.
    fn out_of_numbers(&self) -> Option<Failure> {
        let group = &self.group;
        let of_rank = |rank| {
            let counts = [
                (group.ended(rank), "operations"),
                (group.groups_ended(rank), "groups of sends and receives"),
                (group.messages_sent(rank), "messages to another rank"),
            ];
            counts.into_iter().find(|(count, _)| *count > NUMBERS_MAX).map(|(count, what)| (rank, count, what))
        };
        let (rank, count, what) = (0..self.info.nranks).find_map(of_rank)?;
        let message = format!(
            "rank {rank} has done {count} {what}, replays of graphs included, and a communicator of GPUs has numbers for 2^32: make another before"
        );
        Some(Failure::new(ErrorClass::InvalidUsage, message))
    }

    /// Ranks whose streams have not come to the large operation after so many.
    pub(crate) fn late_for_large<'a>(&self, members: &'a Members, ended: u64) -> Vec<&'a Member> {
        let is_late = |rank| !self.page().has_come(rank, LargeWord::Ready, ended + 1);
        members.iter().filter(|member| is_late(member.rank)).collect()
    }

    /// Waiting ranks and their peers, in words.
    pub(crate) fn describe_wait(&self, members: &Members, counts: &Counts) -> String {
        let Counts { seen, large: LargeCounts { operations: large, in_queue } } = counts;
        if large.are_open() && *in_queue != Some(true) {
            let late: Vec<_> = self.late_for_large(members, large.ended).into_iter().map(named).collect();
            let late = if late.is_empty() { "none".to_owned() } else { late.join(", ") };
            let what = if in_queue.is_some() { "waits for hardware queues" } else { "does not end" };
            let number = large.ended + 1;
            return format!("large operation {number} {what}; ranks whose streams have not come to it: {late}");
        }
        let are_open = |ranks: &[OperationCounts]| ranks.iter().any(|counts| counts.are_open());
        if are_open(&seen.groups) && !are_open(&seen.operations) {
            let named = |rank: u32| members.get(rank).map_or_else(|| format!("rank {rank}"), named);
            return describe_p2p_wait(self.page(), &seen.groups[..self.info.nranks as usize], named);
        }
        describe_operation_wait(members, &seen.operations)
    }
}

fn named(member: &Member) -> String {
    format!("rank {} (process {})", member.rank, member.session.peer.pid)
}

/// Why it ends, if a rank's process has begun to end: the others would wait until that has dumped its core.
fn ending_rank(members: &Members) -> Option<Failure> {
    let is_ending = |pid| crate::process_state::is_ending(pid);
    let ending = members.iter().find(|member| !member.has_left() && is_ending(member.session.peer.pid))?;
    let (rank, pid) = (ending.rank, ending.session.peer.pid);
    let message = format!("the process of rank {rank} ({pid}) is ending: it exits, or dumps its core");
    Some(Failure::new(ErrorClass::Remote, message))
}

fn describe_operation_wait(members: &Members, operations: &[OperationCounts]) -> String {
    let ranks = || members.iter().zip(operations);
    let next = ranks().map(|(_, counts)| counts.ended).min().unwrap_or(0) + 1;
    let of = |is_there: bool| {
        let ranks = ranks().filter(|(_, counts)| (counts.begun >= next) == is_there);
        ranks.map(|(member, _)| named(member)).collect::<Vec<_>>().join(", ")
    };
    let (there, missing) = (of(true), of(false));
    if missing.is_empty() {
        format!(
            "all ranks have called operation {next}, and it does not end: what is before it in a stream does not, or the calls differ"
        )
    } else {
        format!("{there} called operation {next}, {missing} did not")
    }
}

/// Which ranks whose groups do not end wait for whom.
fn describe_p2p_wait(page: &ControlPage, groups: &[OperationCounts], named: impl Fn(u32) -> String) -> String {
    let all: Vec<_> = (0..groups.len() as u32).map(|rank| page.p2p_launched(rank)).collect();
    let mut waits = Vec::new();
    for (rank, own) in all.iter().enumerate().filter(|(rank, _)| groups[*rank].are_open()) {
        for (peer, theirs) in all.iter().enumerate() {
            let named = || (named(rank as u32), named(peer as u32));
            if own.received[peer] > theirs.sent[rank] {
                let ((waiter, missing), (number, sent)) =
                    (named(), (theirs.sent[rank].saturating_add(1), theirs.sent[rank]));
                waits.push(format!("{waiter} waits for message {number} from {missing}, which has sent {sent}"));
            }
            if own.sent[peer] > theirs.received[rank] {
                let ((waiter, missing), received) = (named(), theirs.received[rank]);
                waits.push(format!(
                    "{waiter} sends message {} to {missing}, which has received {received}",
                    received.saturating_add(1)
                ));
            }
        }
    }
    if waits.is_empty() {
        return "all sends have their receives, and do not end: what is before them in a stream does not".into();
    }
    waits.join("; ")
}

#[cfg(test)]
mod tests {
    use mccs_ipc::device_initiated::P2pLaunched;

    use super::*;

    #[test]
    fn a_message_that_does_not_come_is_named_with_both_ends() {
        let (_fd, page) = ControlPage::create().expect("a page");
        let launched = |groups, sent: [u64; 2], received: [u64; 2]| {
            let wide = |counts: [u64; 2]| std::array::from_fn(|peer| counts.get(peer).copied().unwrap_or(0));
            P2pLaunched { groups, sent: wide(sent), received: wide(received) }
        };
        let said = |groups: [(u64, u64); 2]| {
            let groups = groups.map(|(begun, ended)| OperationCounts { begun, ended });
            describe_p2p_wait(&page, &groups, |rank| format!("rank {rank}"))
        };
        page.launch_p2p(0, &launched(3, [0, 2], [0, 5]));
        page.launch_p2p(1, &launched(2, [4, 0], [2, 0]));
        assert_eq!(said([(3, 2), (2, 2)]), "rank 0 waits for message 5 from rank 1, which has sent 4");
        page.launch_p2p(0, &launched(3, [0, 4], [0, 4]));
        assert_eq!(said([(3, 2), (2, 2)]), "rank 0 sends message 3 to rank 1, which has received 2");
        // Short messages may have been sent without anybody waiting.
        assert!(said([(3, 3), (2, 1)]).starts_with("all sends have their receives"));
    }
}
