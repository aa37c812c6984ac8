//! `why-stuck`: the culprit of a stuck communicator, from what each of its hosts knows. Pure.
//!
//! A rank that has not made a call for which others wait is the culprit, if there is one that waits for nobody itself. Otherwise a
//! flow does not move: one whose sender waits for nobody itself, or where they wait in a ring, the one whose receiver has done
//! least. If no flow can be blamed either, GPUs do not end what they were given, or ranks wait for each other.

mod account;
pub mod looks;
mod part;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use self::looks::Progress;
pub use self::part::StuckPart;
use serde::{Deserialize, Serialize};

use mccs_model::link::{FlowWait, LinkKey};

pub use self::account::{
    CALLS_TOLD_MAX, FLOWS_TOLD_MAX, FlowRoute, HostAccount, PairAccount, RANKS_TOLD_MAX, RankAccount, SignalWait, Total,
};

/// A communicator's wait.
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

/// The ranks to blame.
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
    /// The part that it is, if it is one: ranks have the whole's numbers.
    #[serde(default)]
    pub part: Option<StuckPart>,
    /// The kind of its wait.
    pub class: StuckClass,
    /// The rank to blame; several if several are.
    pub culprits: Vec<Culprit>,
    /// Accounts of hosts, by name; none of those that have not answered.
    pub hosts: Vec<(String, Option<HostAccount>)>,
    /// Movement between the first and the last look; none if one look was enough.
    #[serde(default)]
    pub progress: Option<Progress>,
}

/// The verdict on one look at hosts' accounts.
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
    // A rank in a later collective waits for those that have not come to it, which is no flow's fault.
    let of_rings = waiting.iter().filter(|(_, flow)| flow.channel != LinkKey::PAIRS);
    let first = of_rings.map(|(started, _)| *started).min();
    let is_first = |(started, flow): &(u64, FlowWait)| flow.channel == LinkKey::PAIRS || Some(*started) == first;
    let waiting = waiting.into_iter().filter(is_first).map(|(_, flow)| flow).collect();
    let routes: Vec<_> = answered().flat_map(|(_, account)| &account.routes).collect();
    let stalled = ranks.stalled(waiting, &lacking, &routes);
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
        let waits = culprit.rank.and_then(|rank| ranks.0.get(&rank)).map(|(_, rank)| rank.waits()).unwrap_or_default();
        let waits_in = waits.first().map_or("another call", String::as_str);
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
        self.0.get(&rank).is_some_and(|(_, rank)| rank.waits_in.is_empty() && rank.signals.is_empty())
    }

    /// A rank that has not made a call.
    fn culprit(&self, rank: u32, seq: Option<u64>, peer: Option<u32>, what: String) -> Option<Culprit> {
        let (host, account) = self.0.get(&rank)?;
        let (pid, gpu) = ((account.pid != 0).then_some(account.pid), account.gpu);
        Some(Culprit { host: (*host).clone(), rank: Some(rank), pid, gpu, seq, peer, what })
    }

    /// Ranks without whose calls others wait in theirs.
    fn lacking(&self) -> Vec<Culprit> {
        let mut lacking = self.late();
        for (peer, (_, account)) in &self.0 {
            lacking.extend(account.pairs.iter().flat_map(|pair| self.lacks_pair(*peer, pair)));
            lacking.extend(account.signals.iter().filter_map(|signal| self.lacks_signal(*peer, signal)));
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
            self.culprit(rank.rank, seq, None, what)
        };
        // A rank that waits in a send or a receive is late for a reason, which is found there.
        ranks().filter(|rank| !rank.has_left).filter_map(of).collect()
    }

    /// Ranks that have not signalled a rank that waits for it.
    fn lacks_signal(&self, waits: u32, signal: &SignalWait) -> Option<Culprit> {
        let SignalWait { peer, tag, number } = signal;
        let what = format!("signal {number} of tag {tag} has not come from it, and rank {waits} waits for it");
        self.culprit(*peer, None, Some(waits), what)
    }

    /// Ranks that lack their side of a rank's sends and receives, if those wait for it.
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
            self.culprit(pair.peer, theirs.is_some().then_some(first_open), Some(waits), what)
        };
        let sends = lacks(pair.open_recvs, pair.recvs, own.map(|own| own.sends), "send to", "a receive from");
        let recvs = lacks(pair.open_sends, pair.sends, own.map(|own| own.recvs), "receive from", "a send to");
        sends.into_iter().chain(recvs).collect()
    }

    /// Flows that do not get through, of those whose receivers wait.
    fn stalled(&self, mut waiting: Vec<FlowWait>, lacking: &[Culprit], routes: &[&FlowRoute]) -> Vec<Culprit> {
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
            let is_its =
                |route: &&&FlowRoute| (route.channel, route.from, route.to) == (flow.channel, flow.from, flow.to);
            let routes: BTreeSet<&str> = routes.iter().filter(is_its).map(|route| route.route.as_str()).collect();
            let over: String = routes.into_iter().map(|route| format!(", over {route}")).collect();
            let what = format!("its data for rank {}{to} does not get through ({by}{over})", flow.to);
            let unknown = Culprit { rank: Some(flow.from), peer: Some(flow.to), what, ..Culprit::default() };
            self.culprit(flow.from, None, Some(flow.to), unknown.what.clone()).unwrap_or(unknown)
        };
        stalled.into_iter().map(of).collect()
    }
}
