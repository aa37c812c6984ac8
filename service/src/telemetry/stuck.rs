//! Why a communicator is stuck: what each of its hosts knows, and what follows. Pure.
//!
//! A rank that has not made the call that others are in is the culprit, if there is one. Otherwise all are in the call, and
//! what is left is a flow that does not move: one whose sender waits for nobody itself, or where they wait in a ring, the one whose
//! receiver has done least.

use serde::{Deserialize, Serialize};

use crate::engines::transport::FlowWait;

/// Ranks that a host tells of, at most: those that lag come first.
pub const RANKS_TOLD_MAX: usize = 256;
/// Flows that a host tells of, at most.
pub const FLOWS_TOLD_MAX: usize = 256;

/// A rank, as its host knows it. Numbers count collectives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankAccount {
    /// The rank.
    pub rank: u32,
    /// Its process.
    pub pid: i32,
    /// Called by the tenant.
    pub called: u64,
    /// Whether its next collective waits behind something else on its stream.
    pub is_behind: bool,
    /// What it waits in.
    pub waits_in: Vec<String>,
    /// Whether it has left.
    pub has_left: bool,
}

/// A host's part of a communicator.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostAccount {
    /// Its ranks.
    pub ranks: Vec<RankAccount>,
    /// Collectives that have started there.
    pub started: u64,
    /// The last of them, in words; empty before the first.
    pub last: String,
    /// Whether it has not ended.
    pub is_running: bool,
    /// Milliseconds since something happened there.
    pub idle_ms: u64,
    /// What channels wait for.
    pub flows: Vec<FlowWait>,
    /// Why it has failed, if it has.
    pub failure: Option<String>,
}

/// What a communicator waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StuckClass {
    /// Nobody waits for anything.
    NotStuck,
    /// Ranks that have not made a call.
    Rank,
    /// A flow that does not move.
    Flow,
    /// A host that does not answer.
    Host,
    /// Nothing any more: it has failed.
    Failed,
}

/// Who is to blame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Culprit {
    /// Its host.
    pub host: String,
    /// The rank, if it is one; of a flow the one that sends.
    pub rank: Option<u32>,
    /// Its process.
    pub pid: Option<i32>,
    /// In words.
    pub what: String,
}

/// Why a communicator is stuck.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StuckReport {
    /// Its number on the host that was asked.
    pub communicator: u64,
    /// What it waits for.
    pub class: StuckClass,
    /// Who is to blame; several if several are.
    pub culprits: Vec<Culprit>,
    /// What each host knows, by name; nothing of those that have not answered.
    pub hosts: Vec<(String, Option<HostAccount>)>,
}

/// What follows from hosts' accounts.
#[must_use]
pub fn diagnose(communicator: u64, hosts: Vec<(String, Option<HostAccount>)>) -> StuckReport {
    let (class, culprits) = blame(&hosts);
    StuckReport { communicator, class, culprits, hosts }
}

fn blame(hosts: &[(String, Option<HostAccount>)]) -> (StuckClass, Vec<Culprit>) {
    let answered = || hosts.iter().filter_map(|(name, account)| Some((name, account.as_ref()?)));
    let of_host = |host: &String, what: String| Culprit { host: host.clone(), rank: None, pid: None, what };
    let failed: Vec<_> =
        answered().filter_map(|(host, account)| Some(of_host(host, account.failure.clone()?))).collect();
    if !failed.is_empty() {
        return (StuckClass::Failed, failed);
    }
    let silent: Vec<_> = hosts.iter().filter(|(_, account)| account.is_none()).collect();
    if !silent.is_empty() {
        let silent = silent.into_iter().map(|(host, _)| of_host(host, "its service does not answer".into()));
        return (StuckClass::Host, silent.collect());
    }
    let ranks = || answered().flat_map(|(host, account)| account.ranks.iter().map(move |rank| (host, account, rank)));
    let waits = ranks().any(|(_, _, rank)| !rank.waits_in.is_empty());
    let furthest = ranks().filter(|(_, _, rank)| !rank.has_left).map(|(_, _, rank)| rank.called).max().unwrap_or(0);
    let late = |(host, account, rank): (&String, &HostAccount, &RankAccount)| {
        let is_late = !rank.has_left && rank.waits_in.is_empty() && (rank.called < furthest || rank.is_behind);
        is_late.then(|| {
            let what = if rank.is_behind {
                format!("has called collective {}, behind something else on its stream", rank.called.saturating_sub(1))
            } else if rank.called == 0 {
                "has called nothing yet".into()
            } else if account.last.is_empty() {
                format!("has called nothing after collective {}", rank.called - 1)
            } else {
                format!("has called nothing after collective {}, {}", rank.called - 1, account.last)
            };
            Culprit { host: host.clone(), rank: Some(rank.rank), pid: Some(rank.pid), what }
        })
    };
    let culprits: Vec<_> = ranks().filter_map(late).collect();
    if waits && !culprits.is_empty() {
        return (StuckClass::Rank, culprits);
    }
    // All are in the call: whoever sends to one that waits, and waits for nothing itself, does not get through.
    let waiting: Vec<FlowWait> =
        answered().flat_map(|(_, account)| account.flows.iter().copied()).filter(|flow| flow.is_receive).collect();
    let waits_itself =
        |flow: &&FlowWait| waiting.iter().any(|other| (other.channel, other.to) == (flow.channel, flow.from));
    let mut stalled: Vec<_> = waiting.iter().filter(|flow| !waits_itself(flow)).collect();
    if stalled.is_empty() {
        let least = waiting.iter().map(|flow| flow.step).min();
        stalled = waiting.iter().filter(|flow| Some(flow.step) == least).collect();
    }
    let host_of =
        |of: u32| ranks().find(|(_, _, rank)| rank.rank == of).map(|(host, _, rank)| (host.clone(), rank.pid));
    let stalled = stalled.into_iter().map(|flow| {
        let (host, pid) = host_of(flow.from).unzip();
        let to = host_of(flow.to).map_or_else(String::new, |(host, _)| format!(" on {host}"));
        let what = format!("its data for rank {}{to} does not get through (channel {})", flow.to, flow.channel);
        Culprit { host: host.unwrap_or_default(), rank: Some(flow.from), pid, what }
    });
    let stalled: Vec<_> = stalled.collect();
    if stalled.is_empty() { (StuckClass::NotStuck, stalled) } else { (StuckClass::Flow, stalled) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: u32, called: u64, waits: bool) -> RankAccount {
        let waits_in = if waits { vec!["all_reduce".into()] } else { Vec::new() };
        RankAccount { rank, pid: 100 + rank as i32, called, is_behind: false, waits_in, has_left: false }
    }

    fn host(name: &str, ranks: Vec<RankAccount>, flows: Vec<FlowWait>) -> (String, Option<HostAccount>) {
        (name.into(), Some(HostAccount { ranks, flows, last: "barrier".into(), ..HostAccount::default() }))
    }

    fn receive(from: u32, to: u32) -> FlowWait {
        FlowWait { channel: 0, from, to, is_receive: true, step: 3 }
    }

    fn of(hosts: Vec<(String, Option<HostAccount>)>) -> (StuckClass, Vec<Option<u32>>, String) {
        let report = diagnose(1, hosts);
        let what = report.culprits.iter().map(|culprit| format!("{} {}; ", culprit.host, culprit.what)).collect();
        (report.class, report.culprits.iter().map(|culprit| culprit.rank).collect(), what)
    }

    #[test]
    fn ranks_that_have_not_called_are_named() {
        let hosts = vec![
            host("a", vec![rank(0, 5, true), rank(1, 4, false)], Vec::new()),
            host("b", vec![rank(2, 5, true)], vec![receive(0, 2)]),
        ];
        let (class, ranks, what) = of(hosts);
        assert_eq!((class, ranks), (StuckClass::Rank, vec![Some(1)]));
        assert!(what.contains("a has called nothing after collective 3, barrier"), "{what}");
        let first = vec![host("a", vec![rank(0, 1, true)], Vec::new()), host("b", vec![rank(1, 0, false)], Vec::new())];
        assert!(of(first).2.contains("nothing yet"));
        let behind = RankAccount { is_behind: true, ..rank(1, 2, false) };
        let hosts = vec![host("a", vec![rank(0, 2, true), behind], Vec::new())];
        assert!(of(hosts).2.contains("has called collective 1, behind something else"));
    }

    #[test]
    fn the_first_flow_of_a_chain_of_waits_is_named() {
        // 0 to 1 does not get through; 1 cannot pass on to 2.
        let hosts = vec![
            host("a", vec![rank(0, 3, true)], vec![FlowWait { is_receive: false, ..receive(0, 1) }]),
            host("b", vec![rank(1, 3, true)], vec![receive(0, 1)]),
            host("c", vec![rank(2, 3, true)], vec![receive(1, 2)]),
        ];
        let (class, ranks, what) = of(hosts);
        assert_eq!((class, ranks), (StuckClass::Flow, vec![Some(0)]));
        assert!(what.contains("a its data for rank 1 on b"), "{what}");
    }

    #[test]
    fn in_a_ring_whoever_has_done_least_waits_for_the_culprit() {
        let least = FlowWait { step: 2, ..receive(1, 2) };
        let hosts = vec![
            host("a", vec![rank(0, 3, true)], vec![receive(2, 0)]),
            host("b", vec![rank(1, 3, true)], vec![receive(0, 1)]),
            host("c", vec![rank(2, 3, true)], vec![least]),
        ];
        let (class, ranks, _) = of(hosts);
        assert_eq!((class, ranks), (StuckClass::Flow, vec![Some(1)]));
    }

    #[test]
    fn failures_and_silent_hosts_come_first() {
        let well = || host("a", vec![rank(0, 3, true)], Vec::new());
        assert_eq!(of(vec![well(), ("b".into(), None)]).0, StuckClass::Host);
        let failed = HostAccount { failure: Some("a link broke".into()), ..HostAccount::default() };
        let (class, _, what) = of(vec![well(), ("b".into(), Some(failed)), ("c".into(), None)]);
        assert_eq!(class, StuckClass::Failed);
        assert!(what.contains("b a link broke"), "{what}");
    }

    #[test]
    fn who_waits_for_nobody_is_not_stuck() {
        let idle = vec![host("a", vec![rank(0, 3, false)], Vec::new()), host("b", vec![rank(1, 3, false)], Vec::new())];
        assert_eq!(of(idle).0, StuckClass::NotStuck);
        // One is ahead in time, as always: nothing waits yet.
        let ahead = vec![host("a", vec![rank(0, 3, false), rank(1, 2, false)], Vec::new())];
        assert_eq!(of(ahead).0, StuckClass::NotStuck);
        let gone = RankAccount { has_left: true, ..rank(1, 2, false) };
        assert_eq!(of(vec![host("a", vec![rank(0, 3, false), gone], Vec::new())]).0, StuckClass::NotStuck);
    }
}
