//! Why a communicator is stuck: what each of its hosts knows, and what follows. Pure.
//!
//! A rank that has not made a call for which others wait is the culprit, if there is one that waits for nobody itself. Otherwise a
//! flow does not move: one whose sender waits for nobody itself, or where they wait in a ring, the one whose receiver has done
//! least. If no flow can be blamed either, GPUs do not end what they were given, or ranks wait for each other.

pub mod looks;
mod part;

use std::collections::{BTreeMap, BTreeSet};

use self::looks::Progress;
pub use self::part::StuckPart;
use serde::{Deserialize, Serialize};

use crate::flows::{FlowBytes, FlowName, FlowView};
use mccs_model::link::{FlowWait, LinkKey};

/// Ranks that a host tells of, at most: those that lag come first.
pub const RANKS_TOLD_MAX: usize = 256;
/// Flows that a host tells of, at most.
pub const FLOWS_TOLD_MAX: usize = 256;
/// Calls in which a rank waits, and peers, of which its account tells, at most.
pub const CALLS_TOLD_MAX: usize = 8;

/// A rank's sends and receives with another one, since the communicator began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairAccount {
    /// The other rank.
    pub peer: u32,
    /// Sends to it to which the rank's streams have come.
    pub sends: u64,
    /// Of those, not ended.
    pub open_sends: u64,
    /// Receives from it to which the rank's streams have come.
    pub recvs: u64,
    /// Of those, not ended.
    pub open_recvs: u64,
}

/// A rank, as its host knows it. Numbers count collectives, from 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankAccount {
    /// The rank.
    pub rank: u32,
    /// Its process; 0 if it is not known.
    pub pid: i32,
    /// Its GPU, by its number at its host.
    #[serde(default)]
    pub gpu: Option<u32>,
    /// Called by the tenant.
    pub called: u64,
    /// Begun on all ranks of its host.
    #[serde(default)]
    pub started: u64,
    /// Ended, as far as the rank is concerned.
    #[serde(default)]
    pub completed: u64,
    /// Time by which it has come later to these than the first rank of its host.
    #[serde(default)]
    pub late_ns: u64,
    /// The last of them that has begun, in words; empty if it is not known.
    #[serde(default)]
    pub last: String,
    /// Whether its next collective waits behind something else on its stream.
    pub is_behind: bool,
    /// Number of that collective.
    #[serde(default)]
    pub behind_seq: Option<u64>,
    /// What it has not come to and others wait for, in words, where that is no collective's number.
    #[serde(default)]
    pub holds_up: Option<String>,
    /// What it waits in, the first of them.
    pub waits_in: Vec<String>,
    /// Milliseconds since it made the first of these calls, also where that had to wait for its turn in the service.
    #[serde(default)]
    pub waits_ms: Option<u64>,
    /// Its sends and receives, those that wait first.
    #[serde(default)]
    pub pairs: Vec<PairAccount>,
    /// Whether `pairs` has all of them. Hosts of earlier versions tell of none.
    #[serde(default)]
    pub has_all_pairs: bool,
    /// Whether it has left.
    pub has_left: bool,
}

/// How a flow leaves the host that sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowWay {
    /// The channel, as [`FlowWait::channel`].
    pub channel: u16,
    /// Rank whose data it is.
    pub from: u32,
    /// Rank that is to get it.
    pub to: u32,
    /// In words: `tcp, ports 20000-20499`, `rdma mlx5_0:1, dscp 26`.
    pub way: String,
}

impl FlowWay {
    /// Of a flow that this host sends.
    #[must_use]
    pub fn of(flow: &FlowView) -> Self {
        let FlowName { channel, from, to, .. } = flow.name;
        FlowWay { channel, from, to, way: flow.way() }
    }
}

/// A host's part of a communicator.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostAccount {
    /// Its ranks.
    pub ranks: Vec<RankAccount>,
    /// Collectives that have started there.
    pub started: u64,
    /// Those that have ended there and end nowhere before all ranks have come, and how long they took together, from when the last rank of
    /// the host had come.
    #[serde(default)]
    pub joint: (u64, u64),
    /// The last of them, in words; empty before the first, or where it is not known.
    pub last: String,
    /// Whether it has not ended.
    pub is_running: bool,
    /// Milliseconds since something happened there.
    pub idle_ms: u64,
    /// What its tenant has asked of the service and waits for the tenant's turn, calls among it.
    #[serde(default)]
    pub queued: u64,
    /// What channels wait for.
    pub flows: Vec<FlowWait>,
    /// How its flows leave it, where that is known.
    #[serde(default)]
    pub ways: Vec<FlowWay>,
    /// What its flows have carried, in both directions, those first that it waits for.
    #[serde(default)]
    pub carried: Vec<FlowBytes>,
    /// What its GPUs do not end, in words.
    #[serde(default)]
    pub gpus_wait: Option<String>,
    /// Why it has failed, if it has.
    pub failure: Option<String>,
    /// It had no room for the question, and nothing else is told.
    #[serde(default)]
    pub is_busy: bool,
}

impl HostAccount {
    /// Of a host whose ranks have all left: it keeps nothing of the communicator, and need not be asked.
    #[must_use]
    pub fn of_departed(ranks: &[u32]) -> Self {
        let left = |rank: &u32| RankAccount { rank: *rank, has_left: true, ..RankAccount::default() };
        HostAccount { ranks: ranks.iter().map(left).collect(), ..HostAccount::default() }
    }

    /// Of a host that has no room for the question.
    #[must_use]
    pub fn of_busy() -> Self {
        HostAccount { is_busy: true, ..HostAccount::default() }
    }
}

/// What a communicator waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StuckClass {
    /// Nobody waits for anything.
    NotStuck,
    /// It goes on: something ended, or data came, between two looks.
    Running,
    /// Ranks that have not made a call.
    Rank,
    /// A flow that does not move.
    Flow,
    /// GPUs that do not end what they were given.
    Gpu,
    /// A host that does not answer.
    Host,
    /// It cannot be said: a host had no room for the question.
    Busy,
    /// Nothing any more: it has failed.
    Failed,
}

/// Who is to blame.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Culprit {
    /// Its host.
    pub host: String,
    /// The rank, if it is one; of a flow the one that sends.
    pub rank: Option<u32>,
    /// Its process.
    pub pid: Option<i32>,
    /// Its GPU, by its number at its host.
    #[serde(default)]
    pub gpu: Option<u32>,
    /// Number of the collective that it has not called, or of its send or receive with `peer`, from 0.
    pub seq: Option<u64>,
    /// The rank at the other end of a send, a receive or a flow.
    pub peer: Option<u32>,
    /// In words.
    pub what: String,
}

/// Why a communicator is stuck.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StuckReport {
    /// Its number on the host that was asked.
    pub communicator: u64,
    /// Of which it is a part, if it is one: ranks have the whole's numbers.
    #[serde(default)]
    pub part: Option<StuckPart>,
    /// What it waits for.
    pub class: StuckClass,
    /// Who is to blame; several if several are.
    pub culprits: Vec<Culprit>,
    /// What each host knows, by name; nothing of those that have not answered.
    pub hosts: Vec<(String, Option<HostAccount>)>,
    /// What moved between the first and the last look; none where one look was enough.
    #[serde(default)]
    pub progress: Option<Progress>,
}

/// What follows from one look at hosts' accounts.
#[must_use]
pub fn diagnose(communicator: u64, hosts: Vec<(String, Option<HostAccount>)>) -> StuckReport {
    let (class, culprits) = blame(&hosts);
    StuckReport { communicator, part: None, class, culprits, hosts, progress: None }
}

fn blame(hosts: &[(String, Option<HostAccount>)]) -> (StuckClass, Vec<Culprit>) {
    let answered = || hosts.iter().filter_map(|(name, account)| Some((name, account.as_ref()?)));
    let of_host = |host: &String, what: String| Culprit { host: host.clone(), what, ..Culprit::default() };
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
    let ranks = answered().flat_map(|(host, account)| account.ranks.iter().map(move |rank| (rank.rank, (host, rank))));
    let ranks = Ranks(ranks.collect());
    let lacking = ranks.lacking();
    let is_free = |culprit: &&Culprit| culprit.rank.is_some_and(|rank| ranks.waits_for_nobody(rank));
    let free: Vec<_> = lacking.iter().filter(is_free).cloned().collect();
    if !free.is_empty() {
        return (StuckClass::Rank, told_of_queues(hosts, free));
    }
    // Whatever else waits may do so for ranks of that host.
    if answered().any(|(_, account)| account.is_busy) {
        return (StuckClass::Busy, Vec::new());
    }
    let waiting = answered().flat_map(|(_, account)| account.flows.iter().map(|flow| (account.started, *flow)));
    let waiting: Vec<_> = waiting.filter(|(_, flow)| flow.is_receive).collect();
    // Who is in a later collective waits for those that have not come to it, which is no flow's fault.
    let of_rings = waiting.iter().filter(|(_, flow)| flow.channel != LinkKey::PAIRS);
    let first = of_rings.map(|(started, _)| *started).min();
    let is_first = |(started, flow): &(u64, FlowWait)| flow.channel == LinkKey::PAIRS || Some(*started) == first;
    let waiting = waiting.into_iter().filter(is_first).map(|(_, flow)| flow).collect();
    let ways: Vec<_> = answered().flat_map(|(_, account)| &account.ways).collect();
    let stalled = ranks.stalled(waiting, &lacking, &ways);
    if !stalled.is_empty() {
        return (StuckClass::Flow, stalled);
    }
    let gpus: Vec<_> =
        answered().filter_map(|(host, account)| Some(of_host(host, account.gpus_wait.clone()?))).collect();
    if !gpus.is_empty() {
        return (StuckClass::Gpu, gpus);
    }
    if lacking.is_empty() {
        return (StuckClass::NotStuck, lacking);
    }
    // Each of them waits in a call of its own: for each other, as nothing else can be blamed.
    let itself = |culprit: Culprit| {
        let waits_in = culprit.rank.and_then(|rank| ranks.0.get(&rank)).and_then(|(_, rank)| rank.waits_in.first());
        let waits_in = waits_in.map_or("another call", String::as_str);
        Culprit { what: format!("{}; it waits in {waits_in} itself", culprit.what), ..culprit }
    };
    (StuckClass::Rank, told_of_queues(hosts, lacking.into_iter().map(itself).collect()))
}

/// A rank may have made the call, and the service may not have come to it.
fn told_of_queues(hosts: &[(String, Option<HostAccount>)], mut culprits: Vec<Culprit>) -> Vec<Culprit> {
    for culprit in &mut culprits {
        let account = hosts.iter().find(|(host, _)| *host == culprit.host).and_then(|(_, account)| account.as_ref());
        if let Some(queued) = account.map(|account| account.queued).filter(|queued| *queued > 0) {
            culprit.what.push_str(&format!("; {queued} calls of its tenant wait for their turn in the service there"));
        }
    }
    culprits
}

/// All ranks that hosts have told of, with their hosts.
struct Ranks<'a>(BTreeMap<u32, (&'a String, &'a RankAccount)>);

impl Ranks<'_> {
    fn waits_for_nobody(&self, rank: u32) -> bool {
        self.0.get(&rank).is_some_and(|(_, rank)| rank.waits_in.is_empty())
    }

    /// A rank that has not made a call.
    fn culprit(&self, rank: u32, (seq, peer): (Option<u64>, Option<u32>), what: String) -> Option<Culprit> {
        let (host, account) = self.0.get(&rank)?;
        let (pid, gpu) = ((account.pid != 0).then_some(account.pid), account.gpu);
        Some(Culprit { host: (*host).clone(), rank: Some(rank), pid, gpu, seq, peer, what })
    }

    /// Ranks without whose calls others wait in theirs.
    fn lacking(&self) -> Vec<Culprit> {
        let mut lacking = self.late();
        for (peer, (_, account)) in &self.0 {
            lacking.extend(account.pairs.iter().flat_map(|pair| self.lacks_pair(*peer, pair)));
        }
        lacking
    }

    /// Ranks that have not called a collective that others are in.
    fn late(&self) -> Vec<Culprit> {
        let ranks = || self.0.values().map(|(_, rank)| *rank);
        if !ranks().any(|rank| !rank.waits_in.is_empty()) {
            return Vec::new();
        }
        let furthest = ranks().filter(|rank| !rank.has_left).map(|rank| rank.called).max().unwrap_or(0);
        let of = |rank: &RankAccount| {
            let (seq, what) = if let Some(what) = &rank.holds_up {
                (None, what.clone())
            } else if rank.is_behind {
                let seq = rank.behind_seq.unwrap_or(rank.called.saturating_sub(1));
                (Some(seq), format!("has called collective {seq}, behind something else on its stream"))
            } else if rank.called >= furthest {
                return None;
            } else if rank.called == 0 {
                (Some(0), "has called nothing yet".into())
            } else {
                let last = if rank.last.is_empty() { String::new() } else { format!(", {}", rank.last) };
                (Some(rank.called), format!("has called nothing after collective {}{last}", rank.called - 1))
            };
            self.culprit(rank.rank, (seq, None), what)
        };
        // Who waits in a send or a receive is late for a reason, which is found there.
        ranks().filter(|rank| !rank.has_left).filter_map(of).collect()
    }

    /// What the other side of a rank's sends and receives lacks, if they wait for it.
    fn lacks_pair(&self, waits: u32, pair: &PairAccount) -> Vec<Culprit> {
        let Some((_, other)) = self.0.get(&pair.peer) else { return Vec::new() };
        let own = other.pairs.iter().find(|own| own.peer == waits).copied();
        let own = own.or_else(|| other.has_all_pairs.then(PairAccount::default));
        let lacks = |open: u64, called: u64, theirs: Option<u64>, call: &str, of: &str| {
            let (first_open, theirs) = (called.saturating_sub(open), theirs.filter(|_| !other.has_left));
            let what = match theirs {
                _ if open == 0 => return None,
                // It has made the call for which is waited: what it sends is on its way.
                Some(theirs) if theirs > first_open => return None,
                Some(0) => format!("has not come to any {call} rank {waits}, which waits in {of} it"),
                Some(theirs) => {
                    format!("has come to no {call} rank {waits} after number {}, which waits in {of} it", theirs - 1)
                }
                None if other.has_left => format!("has left, and rank {waits} waits in {of} it"),
                // Not known how many it has called: it is not accused where it waits for something itself.
                None if !other.waits_in.is_empty() => return None,
                None => format!("waits for nobody, and rank {waits} waits in {of} it"),
            };
            self.culprit(pair.peer, (theirs.is_some().then_some(first_open), Some(waits)), what)
        };
        let sends = lacks(pair.open_recvs, pair.recvs, own.map(|own| own.sends), "send to", "a receive from");
        let recvs = lacks(pair.open_sends, pair.sends, own.map(|own| own.recvs), "receive from", "a send to");
        sends.into_iter().chain(recvs).collect()
    }

    /// Flows that do not get through, of those whose receivers wait.
    fn stalled(&self, mut waiting: Vec<FlowWait>, lacking: &[Culprit], ways: &[&FlowWay]) -> Vec<Culprit> {
        // Nothing is on its way of what has not been sent.
        let is_sent = |flow: &FlowWait| {
            flow.channel != LinkKey::PAIRS
                || !lacking.iter().any(|of| (of.rank, of.peer) == (Some(flow.from), Some(flow.to)))
        };
        waiting.retain(is_sent);
        // Whoever sends to one that waits, and waits for nothing itself, does not get through.
        let waits_itself =
            |flow: &&FlowWait| waiting.iter().any(|other| (other.channel, other.to) == (flow.channel, flow.from));
        let mut stalled: Vec<_> = waiting.iter().filter(|flow| !waits_itself(flow)).collect();
        if stalled.is_empty() {
            let least = waiting.iter().map(|flow| flow.step).min();
            stalled = waiting.iter().filter(|flow| Some(flow.step) == least).collect();
        }
        let of = |flow: &FlowWait| {
            let to = self.0.get(&flow.to).map_or_else(String::new, |(host, _)| format!(" on {host}"));
            let by = match flow.channel {
                LinkKey::PAIRS => "send and receive".into(),
                channel => format!("channel {channel}"),
            };
            // Several while a strategy gives way to another one.
            let is_its = |way: &&&FlowWay| (way.channel, way.from, way.to) == (flow.channel, flow.from, flow.to);
            let ways: BTreeSet<&str> = ways.iter().filter(is_its).map(|way| way.way.as_str()).collect();
            let over: String = ways.into_iter().map(|way| format!(", over {way}")).collect();
            let what = format!("its data for rank {}{to} does not get through ({by}{over})", flow.to);
            let unknown = Culprit { rank: Some(flow.from), peer: Some(flow.to), what, ..Culprit::default() };
            self.culprit(flow.from, (None, Some(flow.to)), unknown.what.clone()).unwrap_or(unknown)
        };
        stalled.into_iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rank(rank: u32, called: u64, waits: bool) -> RankAccount {
        let waits_in = if waits { vec!["all_reduce".into()] } else { Vec::new() };
        let (pid, last) = (100 + rank as i32, if called > 0 { "barrier".into() } else { String::new() });
        RankAccount { rank, pid, called, last, waits_in, has_all_pairs: true, ..RankAccount::default() }
    }

    fn host(name: &str, ranks: Vec<RankAccount>, flows: Vec<FlowWait>) -> (String, Option<HostAccount>) {
        (name.into(), Some(HostAccount { ranks, flows, ..HostAccount::default() }))
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
        // It has called more, behind that one.
        let behind = RankAccount { is_behind: true, behind_seq: Some(1), ..rank(1, 4, false) };
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
        assert!(what.contains("a its data for rank 1 on b does not get through (channel 0)"), "{what}");
    }

    #[test]
    fn how_the_flow_leaves_its_host_is_told() {
        let way = |to, way: &str| FlowWay { channel: 0, from: 0, to, way: way.into() };
        let named = |ways: Vec<FlowWay>| {
            let (_, sender) = host("a", vec![rank(0, 3, true)], Vec::new());
            let sender = ("a".into(), sender.map(|account| HostAccount { ways, ..account }));
            of(vec![sender, host("b", vec![rank(1, 3, true)], vec![receive(0, 1)])]).2
        };
        let what = named(vec![way(1, "rdma mlx5_0:1, dscp 26"), way(2, "tcp")]);
        assert!(what.contains("get through (channel 0, over rdma mlx5_0:1, dscp 26); "), "{what}");
        // Of two strategies, the same and another.
        let what = named(vec![way(1, "tcp, ports 1-2"), way(1, "tcp, ports 1-2"), way(1, "tcp")]);
        assert!(what.contains("(channel 0, over tcp, over tcp, ports 1-2)"), "{what}");
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
    fn who_is_in_a_later_collective_waits_for_the_same_culprit() {
        // 0 to 1 does not get through on channel 0, and 1 has ended channel 1. 2 and 0 have all of that collective, and are in the next one.
        let on = |channel, from, to, step| FlowWait { channel, step, ..receive(from, to) };
        let mut hosts = vec![
            host("a", vec![rank(0, 3, true)], vec![on(0, 2, 0, 1), on(1, 2, 0, 1)]),
            host("b", vec![rank(1, 3, true)], vec![on(0, 0, 1, 9)]),
            host("c", vec![rank(2, 3, true)], vec![on(0, 1, 2, 1), on(1, 1, 2, 1)]),
        ];
        for ((_, account), started) in hosts.iter_mut().zip([3, 2, 3]) {
            account.as_mut().expect("told").started = started;
        }
        let (class, ranks, what) = of(hosts);
        assert_eq!((class, ranks), (StuckClass::Flow, vec![Some(0)]), "{what}");
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

    fn with_pair(rank: RankAccount, pair: PairAccount) -> RankAccount {
        let waits_in = match (pair.open_sends, pair.open_recvs) {
            (0, 0) => rank.waits_in,
            (0, _) => vec![format!("recv(1 x u8, from {})", pair.peer)],
            _ => vec![format!("send(1 x u8, to {})", pair.peer)],
        };
        RankAccount { pairs: vec![pair], waits_in, ..rank }
    }

    #[test]
    fn who_has_not_called_the_other_half_of_a_message_is_named_and_no_flow_is() {
        let receives = PairAccount { peer: 1, recvs: 6, open_recvs: 1, ..PairAccount::default() };
        let sends = PairAccount { peer: 1, sends: 3, open_sends: 2, ..PairAccount::default() };
        let of_pair = FlowWait { channel: LinkKey::PAIRS, ..receive(1, 0) };
        let sent = |sends, recvs| PairAccount { peer: 0, sends, recvs, ..PairAccount::default() };
        let asked = |own: PairAccount, theirs: RankAccount| {
            diagnose(
                1,
                vec![
                    host("a", vec![with_pair(rank(0, 3, false), own)], vec![of_pair]),
                    host("b", vec![theirs], Vec::new()),
                ],
            )
        };
        let report = asked(receives, with_pair(rank(1, 3, false), sent(5, 0)));
        assert_eq!(report.class, StuckClass::Rank, "{report:?}");
        let culprit = &report.culprits[0];
        assert_eq!((culprit.rank, culprit.pid, culprit.seq, culprit.peer), (Some(1), Some(101), Some(5), Some(0)));
        assert_eq!(culprit.what, "has come to no send to rank 0 after number 4, which waits in a receive from it");
        // Its sends are all that it has called, and none is this one's.
        let report = asked(receives, rank(1, 3, false));
        assert!(report.culprits[0].what.starts_with("has not come to any send to rank 0"), "{report:?}");
        let report = asked(sends, with_pair(rank(1, 3, false), sent(0, 1)));
        assert_eq!((report.class, report.culprits[0].seq), (StuckClass::Rank, Some(1)), "{report:?}");
        assert!(report.culprits[0].what.contains("no receive from rank 0 after number 0"), "{report:?}");
        // What it has sent is on its way.
        let report = asked(receives, with_pair(rank(1, 3, false), sent(6, 0)));
        assert_eq!((report.class, report.culprits.len()), (StuckClass::Flow, 1), "{report:?}");
        // A host of an earlier version does not say what it has sent: that nothing holds it up is all that is known.
        let report = asked(receives, RankAccount { has_all_pairs: false, ..rank(1, 3, false) });
        assert_eq!(report.class, StuckClass::Rank);
        assert!(report.culprits[0].what.starts_with("waits for nobody"), "{report:?}");
        let report = asked(receives, RankAccount { has_left: true, has_all_pairs: false, ..rank(1, 0, false) });
        assert!(report.culprits[0].what.starts_with("has left"), "{report:?}");
    }

    #[test]
    fn of_a_chain_of_receives_the_one_that_waits_for_nobody_is_named() {
        // 0 waits for 1, which waits for 2, which has called nothing; 3 is in a collective with all of them.
        let waits_for = |peer| PairAccount { peer, recvs: 1, open_recvs: 1, ..PairAccount::default() };
        let ranks = |last: RankAccount| {
            let first = [with_pair(rank(0, 3, false), waits_for(1)), with_pair(rank(1, 3, false), waits_for(2))];
            vec![host("a", first.into_iter().chain([last, rank(3, 4, true)]).collect(), Vec::new())]
        };
        let (class, named, _) = of(ranks(rank(2, 3, false)));
        assert_eq!((class, named), (StuckClass::Rank, vec![Some(2), Some(2)]));
        // They wait in a ring.
        let (class, named, what) = of(ranks(with_pair(rank(2, 3, false), waits_for(0))));
        assert_eq!(class, StuckClass::Rank);
        assert!([0, 1, 2].iter().all(|rank| named.contains(&Some(*rank))), "{what}");
        assert!(what.contains("waits in recv(1 x u8, from 1) itself"), "{what}");
    }

    #[test]
    fn gpus_are_told_of_where_no_rank_can_be_blamed() {
        let account = |late: Option<&str>| {
            let last = RankAccount { holds_up: late.map(Into::into), ..rank(1, 3, late.is_none()) };
            let ranks = vec![rank(0, 3, true), last];
            let gpus_wait = Some("operation 3 does not end".into());
            vec![("a".into(), Some(HostAccount { ranks, gpus_wait, ..HostAccount::default() }))]
        };
        let (class, named, what) = of(account(None));
        assert_eq!((class, named, what.as_str()), (StuckClass::Gpu, vec![None], "a operation 3 does not end; "));
        assert_eq!(of(account(Some("its stream has not come"))).1, [Some(1)]);
    }

    #[test]
    fn hosts_whose_ranks_have_left_are_not_accused() {
        let left = (String::from("b"), Some(HostAccount::of_departed(&[1, 2])));
        assert_eq!(of(vec![host("a", vec![rank(0, 3, false)], Vec::new()), left.clone()]).0, StuckClass::NotStuck);
        let hosts = vec![host("a", vec![rank(0, 3, true), rank(3, 2, false)], Vec::new()), left];
        assert_eq!(of(hosts).1, [Some(3)]);
    }

    #[test]
    fn hosts_that_are_too_busy_to_say_are_not_accused_nor_are_those_who_may_wait_for_them() {
        let with_busy = |ranks, flows| of(vec![host("a", ranks, flows), ("b".into(), Some(HostAccount::of_busy()))]);
        assert_eq!(
            with_busy(vec![rank(0, 5, true)], vec![receive(2, 0)]),
            (StuckClass::Busy, Vec::new(), String::new())
        );
        assert_eq!(with_busy(vec![rank(0, 5, false)], Vec::new()).0, StuckClass::Busy);
        // What is known without it is said.
        let late = with_busy(vec![rank(0, 5, true), rank(1, 4, false)], Vec::new());
        assert_eq!((late.0, late.1), (StuckClass::Rank, vec![Some(1)]));
        let silent = vec![("b".into(), Some(HostAccount::of_busy())), ("c".into(), None)];
        assert_eq!(of(silent), (StuckClass::Host, vec![None], "c its service does not answer; ".into()));
    }

    #[test]
    fn accounts_of_earlier_versions_are_understood() {
        let told = r#"{"ranks":[{"rank":0,"pid":1,"called":2,"is_behind":false,"waits_in":[],"has_left":false}],"started":2,
            "last":"","is_running":false,"idle_ms":1,"flows":[],"failure":null}"#;
        let account: HostAccount = serde_json::from_str(told).expect("understood");
        assert!(!account.ranks[0].has_all_pairs && account.gpus_wait.is_none() && !account.is_busy);
    }
}
