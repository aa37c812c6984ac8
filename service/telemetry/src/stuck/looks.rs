//! Compares two looks at a communicator: what moved, and who holds up what did not. Pure.
//!
//! One look cannot tell a job that runs from one that is stuck: in nearly every collective somebody waits for somebody at any moment. A rank
//! that has ended or begun something between the looks is no culprit and waits for nobody; nor is a flow one that has carried something.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{HostAccount, PairAccount, RankAccount, SignalWait, StuckClass, StuckReport, blame};
use mccs_model::link::{FlowWait, LinkKey, RankFlow};

/// Accounts of hosts at a look, by name; none of those that have not answered.
pub type Accounts = Vec<(String, Option<HostAccount>)>;

/// Nothing of it has moved for so long, or nobody is accused.
pub const QUIET_TIME: Duration = Duration::from_secs(1);
/// When it is looked again, counted from the first look. Most jobs that run are known by the first of these.
pub const LOOKS_AFTER: [Duration; 3] = [Duration::from_millis(100), Duration::from_millis(300), QUIET_TIME];

/// Movement between two looks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Time between the looks, in milliseconds.
    pub ms: u64,
    /// Collectives that ended: those of the rank that ended most.
    pub collectives: u64,
    /// Sends and receives that ended, of all ranks that hosts tell of.
    pub messages: u64,
    /// Payload that flows between hosts carried, of those that hosts tell of.
    pub bytes: u64,
}

/// The verdict on two looks.
#[must_use]
pub fn diagnose_twice(communicator: u64, first: &Accounts, last: Accounts, apart: Duration) -> StuckReport {
    let (mut progress, moved) = compare(first, &last);
    progress.ms = apart.as_millis() as u64;
    let (class, culprits) = blame(&without_what_moved(first, &last, &moved));
    let is_moving = !moved.ranks.is_empty() || !moved.flows.is_empty();
    let class = if class == StuckClass::NotStuck && is_moving { StuckClass::Running } else { class };
    StuckReport { communicator, part: None, class, culprits, hosts: last, progress: Some(progress) }
}

/// Ranks and flows that are no culprits.
#[derive(Default)]
struct Moved {
    ranks: BTreeSet<u32>,
    flows: BTreeSet<RankFlow>,
}

/// Sends and receives of a pair that have ended.
fn ended(pair: &PairAccount) -> u64 {
    pair.sends.saturating_sub(pair.open_sends) + pair.recvs.saturating_sub(pair.open_recvs)
}

fn compare(first: &Accounts, last: &Accounts) -> (Progress, Moved) {
    let (mut progress, mut moved) = (Progress::default(), Moved::default());
    for (host, account) in last {
        let before = first.iter().find(|(name, _)| name == host).and_then(|(_, before)| before.as_ref());
        if let (Some(before), Some(account)) = (before, account) {
            compare_ranks(before, account, &mut progress, &mut moved);
            compare_flows(before, account, &mut progress, &mut moved);
        }
    }
    (progress, moved)
}

fn compare_ranks(before: &HostAccount, account: &HostAccount, progress: &mut Progress, moved: &mut Moved) {
    for rank in &account.ranks {
        let Some(then) = before.ranks.iter().find(|then| then.rank == rank.rank) else { continue };
        let collectives = rank.completed.saturating_sub(then.completed);
        progress.collectives = progress.collectives.max(collectives);
        let mut messages = 0;
        for pair in &rank.pairs {
            // One that was not told of before may have been left out.
            let then = then.pairs.iter().find(|then| then.peer == pair.peer);
            messages += then.map_or(0, |then| ended(pair).saturating_sub(ended(then)));
        }
        progress.messages += messages;
        if collectives > 0 || messages > 0 || rank.started > then.started {
            moved.ranks.insert(rank.rank);
        }
    }
}

fn compare_flows(before: &HostAccount, account: &HostAccount, progress: &mut Progress, moved: &mut Moved) {
    for flow in &account.carried {
        let then = before.carried.iter().find(|then| then.flow() == flow.flow());
        let bytes = flow.bytes.saturating_sub(then.map_or(flow.bytes, |then| then.bytes));
        if bytes == 0 {
            continue;
        }
        progress.bytes += bytes;
        moved.flows.insert(flow.flow());
        // In a collective, whoever has data for others is moving with all ranks of its host.
        match flow.channel {
            LinkKey::PAIRS => moved.ranks.extend([flow.from, flow.to]),
            _ => moved.ranks.extend(account.ranks.iter().map(|rank| rank.rank)),
        }
    }
    let step = |wait: &FlowWait| (wait.flow(), wait.is_receive);
    for flow in &account.flows {
        let then = before.flows.iter().find(|then| step(then) == step(flow));
        if then.is_some_and(|then| flow.step > then.step) {
            moved.flows.insert(flow.flow());
        }
    }
}

/// The accounts of the last look, without waits of what moved. A host that answered once is alive, and too busy to say more.
fn without_what_moved(first: &Accounts, last: &Accounts, moved: &Moved) -> Accounts {
    let ranks = last.iter().filter_map(|(_, account)| account.as_ref()).flat_map(|account| &account.ranks);
    let furthest = ranks.filter(|rank| !rank.has_left).map(|rank| rank.called).max().unwrap_or(0);
    let of_host = |(host, account): &(String, Option<HostAccount>)| {
        let has_answered = first.iter().any(|(name, before)| name == host && before.is_some());
        let before = || first.iter().filter(|(name, _)| name == host).filter_map(|(_, before)| before.as_ref());
        let account = match account {
            None => has_answered.then(HostAccount::of_busy),
            Some(account) => {
                let mut account = still_waiting(account, moved, furthest);
                let waited = |rank: u32, signal: &SignalWait| {
                    let mut ranks = before().flat_map(|before| &before.ranks);
                    ranks.any(|then| then.rank == rank && then.signals.contains(signal))
                };
                account.ranks.iter_mut().for_each(|of| of.signals.retain(|signal| waited(of.rank, signal)));
                Some(account)
            }
        };
        (host.clone(), account)
    };
    last.iter().map(of_host).collect()
}

fn still_waiting(account: &HostAccount, moved: &Moved, furthest: u64) -> HostAccount {
    let has_moved = |rank: u32| moved.ranks.contains(&rank);
    let of_rank = |rank: &RankAccount| {
        if !has_moved(rank.rank) {
            return rank.clone();
        }
        // It is late for nothing, and waits for nobody.
        let called = rank.called.max(furthest);
        let (waits_in, holds_up, is_behind) = (Vec::new(), None, false);
        RankAccount { called, waits_in, holds_up, is_behind, ..rank.clone() }
    };
    let is_stalled = |flow: &&FlowWait| {
        let is_of_collective = flow.channel != LinkKey::PAIRS;
        let has_moved = moved.flows.contains(&flow.flow()) || (is_of_collective && has_moved(flow.to));
        !has_moved
    };
    let some_moved = account.ranks.iter().any(|rank| has_moved(rank.rank));
    HostAccount {
        ranks: account.ranks.iter().map(of_rank).collect(),
        flows: account.flows.iter().filter(is_stalled).copied().collect(),
        gpus_wait: account.gpus_wait.clone().filter(|_| !some_moved),
        ..account.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flows::FlowBytes;

    fn rank(rank: u32, called: u64, completed: u64) -> RankAccount {
        let waits_in = if called > completed { vec!["all_reduce".to_owned()] } else { Vec::new() };
        RankAccount {
            rank,
            called,
            started: completed,
            completed,
            waits_in,
            has_all_pairs: true,
            ..RankAccount::default()
        }
    }

    fn host(name: &str, ranks: Vec<RankAccount>) -> (String, Option<HostAccount>) {
        (name.to_owned(), Some(HostAccount { ranks, ..HostAccount::default() }))
    }

    fn told(first: &Accounts, last: Accounts) -> (StuckClass, Vec<Option<u32>>, Progress) {
        let report = diagnose_twice(1, first, last, Duration::from_millis(100));
        let ranks = report.culprits.iter().map(|culprit| culprit.rank).collect();
        (report.class, ranks, report.progress.expect("there were two looks"))
    }

    #[test]
    fn a_job_that_ends_collectives_runs_whoever_waits_at_either_look() {
        let first = vec![host("a", vec![rank(0, 5, 4), rank(1, 4, 4)]), host("b", vec![rank(2, 4, 4)])];
        let last = vec![host("a", vec![rank(0, 16, 16), rank(1, 17, 16)]), host("b", vec![rank(2, 17, 16)])];
        let (class, ranks, progress) = told(&first, last);
        assert_eq!((class, ranks), (StuckClass::Running, vec![]));
        assert_eq!((progress.collectives, progress.ms), (12, 100));
        // Nobody waits, and nobody has done anything.
        let idle = vec![host("a", vec![rank(0, 4, 4)]), host("b", vec![rank(2, 4, 4)])];
        assert_eq!(told(&idle, idle.clone()).0, StuckClass::NotStuck);
    }

    #[test]
    fn who_has_not_moved_and_is_waited_for_is_named() {
        let stuck = vec![host("a", vec![rank(0, 5, 4), rank(1, 4, 4)]), host("b", vec![rank(2, 5, 4)])];
        assert_eq!(told(&stuck, stuck.clone()).1, [Some(1)]);
        // Others call more and more, which brings nothing about.
        let more = vec![host("a", vec![rank(0, 9, 4), rank(1, 4, 4)]), host("b", vec![rank(2, 7, 4)])];
        let (class, ranks, _) = told(&stuck, more);
        assert_eq!((class, ranks.contains(&Some(1))), (StuckClass::Rank, true));
    }

    #[test]
    fn a_flow_that_carries_something_is_not_accused() {
        let with = |bytes: u64, step: u64| {
            let wait = FlowWait { channel: 0, from: 0, to: 1, is_receive: true, step };
            let carried = vec![FlowBytes { channel: 0, from: 0, to: 1, bytes }];
            let (ranks, flows) = (vec![rank(1, 5, 4)], vec![wait]);
            let receives = HostAccount { ranks, flows, carried, ..HostAccount::default() };
            vec![host("a", vec![rank(0, 5, 4)]), ("b".to_owned(), Some(receives))]
        };
        assert_eq!(told(&with(100, 1), with(100, 1)).0, StuckClass::Flow);
        let (class, _, progress) = told(&with(100, 1), with(900, 1));
        assert_eq!((class, progress.bytes), (StuckClass::Running, 800));
        assert_eq!(told(&with(100, 1), with(100, 2)).0, StuckClass::Running);
    }

    #[test]
    fn a_pair_that_is_stuck_is_named_while_others_go_on() {
        let pair =
            |peer: u32, recvs: u64, open_recvs: u64| PairAccount { peer, recvs, open_recvs, ..PairAccount::default() };
        let at = |done: u64| {
            let waits_in = vec!["recv(1 x u8, from 2)".to_owned()];
            let first = RankAccount { waits_in, pairs: vec![pair(2, 1, 1), pair(1, done, 0)], ..rank(0, 0, 0) };
            vec![host("a", vec![first, rank(1, 0, 0), rank(2, 0, 0)])]
        };
        let (class, ranks, progress) = told(&at(3), at(8));
        assert_eq!((class, ranks, progress.messages), (StuckClass::Rank, vec![Some(2)], 5));
    }

    #[test]
    fn a_host_is_accused_where_it_answered_neither_time() {
        let (well, silent) = (|| host("a", vec![rank(0, 5, 4)]), || ("b".to_owned(), None));
        assert_eq!(told(&vec![well(), silent()], vec![well(), silent()]).0, StuckClass::Host);
        let other = || host("b", vec![rank(1, 4, 4)]);
        assert_eq!(told(&vec![well(), other()], vec![well(), silent()]).0, StuckClass::Busy);
        assert_eq!(told(&vec![well(), silent()], vec![well(), other()]).1, [Some(1)]);
    }
}
