//! Operations that ranks on GPUs run among themselves: seen from their page, since nothing of them passes through here.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use mccs_device::cuda::CopyEngines;
use mccs_device::{NUMBERS_MAX, Seen};
use mccs_ipc::device_initiated::ControlPage;
use mccs_ipc::large::LargeWord;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_kernels::cuda::contradiction;

use super::ProxyEngine;
use super::comm::{Comm, Failure, Member};
use super::gpu_watch::Look;

impl ProxyEngine {
    /// Looks at communicators of GPUs from now on.
    pub(super) fn watch_gpus(&mut self, now: Instant) {
        let launched = self.launched_while_learning();
        self.gpu_watch.ask_soon(launched, now);
    }

    /// Operations that ranks have launched of communicators that [learn](mccs_device::cuda::Strategies::learns); none if none does.
    fn launched_while_learning(&self) -> Option<u64> {
        let launched = |(_, live): (Handle, &Comm)| {
            let direct = live.info.direct.as_ref().filter(|direct| direct.strategies().learns())?;
            live.failure.is_none().then(|| (0..live.nranks()).map(|rank| direct.page().launched(rank)).sum::<u64>())
        };
        self.comms.iter().filter_map(launched).reduce(u64::wrapping_add)
    }

    /// A GPU is lost: so is every communicator that has a rank there.
    pub(super) fn end_on_gpu(&mut self, gpu: usize, reason: &Arc<str>) {
        for comm in self.comms.on_gpu(gpu) {
            self.abort(comm, Failure::new(ErrorClass::System, Arc::clone(reason)));
        }
    }

    /// Ends communicators of GPUs that do not say how far they are, or in which operations have waited for too long. Nothing tells when such operations
    /// begin, so they are looked at several times in the time that they have.
    pub(super) fn end_late_direct(&mut self, now: Instant) {
        let Some(look) = self.gpu_watch.due(now) else { return };
        let of_gpus = |(comm, live): (Handle, &Comm)| live.info.direct.is_some().then_some(comm);
        let comms: Vec<_> = self.comms.iter().filter_map(of_gpus).collect();
        if let Look::Ask(_) = look {
            let asks_all = self.gpu_watch.asked(!comms.is_empty(), now);
            let live = comms.iter().filter_map(|comm| self.comms.get(*comm)).filter(|live| live.failure.is_none());
            for live in live {
                live.info.direct.iter().for_each(|direct| direct.strategies().renew_captured());
                if asks_all || live.may_run_on_gpus() {
                    live.info.ask();
                }
            }
            return;
        }
        let timeout = self.gpu_watch.timeout();
        for comm in comms {
            let Some(live) = self.comms.get_mut(comm) else { continue };
            if let Some(epoch) = live.info.direct.as_ref().and_then(|direct| direct.adapt(now)) {
                live.info.epoch.store(epoch, Ordering::Relaxed);
            }
            let fault = live.info.direct.as_ref().and_then(|direct| direct.fault().map(str::to_owned));
            if let Some(failure) = live.contradiction().filter(|_| live.failure.is_none()) {
                self.abort(comm, failure);
            } else if let Some(fault) = fault {
                self.abort(
                    comm,
                    Failure::new(ErrorClass::System, format!("a GPU does not say how far it is: {fault}")),
                );
            } else if let Some(failure) = live.out_of_numbers().filter(|_| live.failure.is_none()) {
                self.abort(comm, failure);
            } else if let Some(since) = live.direct_waits_since(now) {
                if let Some(failure) = live.ending_rank() {
                    self.abort(comm, failure);
                } else if let Some(timeout) = timeout.filter(|timeout| since + *timeout <= now) {
                    let message = format!("nothing has happened for {timeout:?}: {}", live.describe_direct_wait());
                    self.abort(comm, Failure::new(ErrorClass::Timeout, message));
                }
            }
        }
        // After what was chosen: a communicator that learns from now on is looked at soon.
        let launched = self.launched_while_learning();
        self.gpu_watch.judged(launched, now);
    }
}

impl Comm {
    /// Whether something may be under way on its GPUs, as far as is known. What is in graphs only GPUs count.
    fn may_run_on_gpus(&self) -> bool {
        let Some(direct) = self.info.direct.as_ref() else { return false };
        let (seen, groups) = direct.seen(self.nranks());
        let large = direct.large().map_or((0, 0), |large| large.begun_and_ended());
        let runs = seen.iter().chain(&groups).chain([&large]).any(|(begun, ended)| begun > ended);
        runs || (0..self.nranks()).any(|rank| direct.page().has_graphs(rank))
    }

    /// Looks at page and answers. Returns since when ranks have been waiting for others with nothing happening, as far as
    /// looks tell; `None` where none waits, or GPUs have not answered.
    fn direct_waits_since(&mut self, now: Instant) -> Option<Instant> {
        let direct = self.info.direct.as_ref()?;
        let of = |large: &Arc<CopyEngines>| (large.begun_and_ended(), large.waits_for_queues());
        let (is_answered, (large, in_queue)) = (direct.is_answered(), direct.large().map_or(((0, 0), None), of));
        if self.watch.has_ended(large.1) {
            self.touch(now);
        }
        let large = self.watch.look_at_large(large, in_queue, now);
        let others = if is_answered { self.others_wait_since(now) } else { None };
        let since = large.into_iter().chain(others).min();
        since.filter(|_| self.failure.is_none())
    }

    /// Why it ends, if a rank's process has begun to end: the others would wait until that has dumped its core.
    fn ending_rank(&self) -> Option<Failure> {
        let is_ending = |pid| crate::process_state::is_ending(pid);
        let ending = self.members.iter().find(|member| !member.left && is_ending(member.session.peer.pid))?;
        let (rank, pid) = (ending.rank, ending.session.peer.pid);
        let message = format!("the process of rank {rank} ({pid}) is ending: it exits, or dumps its core");
        Some(Failure::new(ErrorClass::Remote, message))
    }

    /// The same of what is not large.
    fn others_wait_since(&mut self, now: Instant) -> Option<Instant> {
        let (seen, groups) = self.info.direct.as_ref()?.seen(self.nranks());
        if self.watch.note_seen(seen, groups) {
            self.touch(now);
        }
        let waits = seen.iter().chain(&groups).any(|(launched, done)| launched > done);
        waits.then(|| self.active_since())
    }

    /// Two ends of a message that do not mean the same, if a GPU has told of such.
    pub(super) fn contradiction(&self) -> Option<Failure> {
        let fault = self.info.direct.as_ref()?.page().fault()?;
        let name_of = |rank| self.info.name_of(rank);
        let message = contradiction(name_of(fault.sender), fault.came, name_of(fault.receiver), fault.expected);
        Some(Failure::new(ErrorClass::InvalidUsage, message))
    }

    /// Why it ends, if a rank's kernels are about to run out of numbers. Ranks count what they call themselves; what graphs replay only GPUs do.
    fn out_of_numbers(&self) -> Option<Failure> {
        let direct = self.info.direct.as_ref()?;
        let of_rank = |rank| {
            let counts = [
                (direct.ended(rank), "operations"),
                (direct.groups_ended(rank), "groups of sends and receives"),
                (direct.messages_sent(rank), "messages to another rank"),
            ];
            counts.into_iter().find(|(count, _)| *count > NUMBERS_MAX).map(|(count, what)| (rank, count, what))
        };
        let (rank, count, what) = (0..self.nranks()).find_map(of_rank)?;
        let message = format!(
            "rank {rank} has done {count} {what}, replays of graphs included, and a communicator of GPUs has numbers for 2^32: make another before"
        );
        Some(Failure::new(ErrorClass::InvalidUsage, message))
    }

    /// Ranks whose streams have not come to the large operation after so many.
    pub(super) fn late_for_large(&self, ended: u64) -> Vec<&Member> {
        let page = self.info.direct.as_ref().map(|direct| direct.page());
        let is_late = |rank| page.is_some_and(|page| !page.has_come(rank, LargeWord::Ready, ended + 1));
        self.members.iter().filter(|member| is_late(member.rank)).collect()
    }

    /// Who waits for whom, in words; as of the last look.
    fn describe_direct_wait(&self) -> String {
        let (seen, seen_groups) = self.watch.seen();
        self.describe_gpu_wait(seen, seen_groups, self.watch.large())
    }

    /// Who waits for whom, in words. Of operations, groups and large operations it is known how many were launched and have ended.
    pub(super) fn describe_gpu_wait(
        &self,
        seen: &Seen,
        seen_groups: &Seen,
        ((begun, ended), in_queue): ((u64, u64), Option<bool>),
    ) -> String {
        if begun > ended && in_queue != Some(true) {
            let late = self.late_for_large(ended).into_iter();
            let late: Vec<_> =
                late.map(|member| format!("rank {} (process {})", member.rank, member.session.peer.pid)).collect();
            let late = if late.is_empty() { "none".to_owned() } else { late.join(", ") };
            let what = if in_queue.is_some() { "waits for hardware queues" } else { "does not end" };
            return format!("large operation {} {what}; ranks whose streams have not come to it: {late}", ended + 1);
        }
        let waits = |seen: &Seen| seen.iter().any(|(launched, done)| launched > done);
        match &self.info.direct {
            Some(direct) if waits(seen_groups) && !waits(seen) => {
                let named = |rank: u32| {
                    let member = self.members.iter().find(|member| member.rank == rank);
                    member.map_or_else(
                        || format!("rank {rank}"),
                        |m| format!("rank {rank} (process {})", m.session.peer.pid),
                    )
                };
                describe_p2p_wait(direct.page(), &seen_groups[..self.nranks() as usize], named)
            }
            _ => self.describe_operation_wait(seen),
        }
    }

    fn describe_operation_wait(&self, seen: &Seen) -> String {
        let ranks = || self.members.iter().zip(*seen);
        let next = ranks().map(|(_, (_, done))| done).min().unwrap_or(0) + 1;
        let of = |is_there: bool| {
            let ranks = ranks().filter(|(_, (launched, _))| (*launched >= next) == is_there);
            let named = ranks.map(|(member, _)| format!("rank {} (process {})", member.rank, member.session.peer.pid));
            named.collect::<Vec<_>>().join(", ")
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
}

/// Which ranks whose groups do not end wait for whom. `seen` has the groups that each rank has launched and ended.
fn describe_p2p_wait(page: &ControlPage, seen: &[(u64, u64)], named: impl Fn(u32) -> String) -> String {
    let all: Vec<_> = (0..seen.len() as u32).map(|rank| page.p2p_launched(rank)).collect();
    let mut waits = Vec::new();
    for (rank, own) in all.iter().enumerate().filter(|(rank, _)| seen[*rank].0 > seen[*rank].1) {
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
        let said = |seen: [(u64, u64); 2]| describe_p2p_wait(&page, &seen, |rank| format!("rank {rank}"));
        page.launch_p2p(0, &launched(3, [0, 2], [0, 5]));
        page.launch_p2p(1, &launched(2, [4, 0], [2, 0]));
        assert_eq!(said([(3, 2), (2, 2)]), "rank 0 waits for message 5 from rank 1, which has sent 4");
        page.launch_p2p(0, &launched(3, [0, 4], [0, 4]));
        assert_eq!(said([(3, 2), (2, 2)]), "rank 0 sends message 3 to rank 1, which has received 2");
        // Short messages may have been sent without anybody waiting.
        assert!(said([(3, 3), (2, 1)]).starts_with("all sends have their receives"));
    }
}
