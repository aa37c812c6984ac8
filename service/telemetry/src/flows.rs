//! Byte counters of flows to and from other hosts, by peer and path. The engine that owns a flow
//! writes its counter. Counts of flows that have ended are kept by peer and path.
//!
//! The table's lock is taken when a flow begins or ends, and by whoever looks.

mod names;
#[cfg(test)]
mod tests;
mod views;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::lock;
use mccs_model::link::RankFlow;
use mccs_model::path::WireStats;

pub use self::names::{path_called, path_name};
pub use self::views::{FlowBytes, FlowName, FlowView, PathView, WireView};

/// Pairs of peer and path, by direction, that are counted apart after their flows have ended. Peers are the configuration's; an
/// operator who invents ever new paths gets them counted as [`OTHER_PATHS`].
const PATHS_MAX: usize = 4096;
/// See [`PATHS_MAX`].
const OTHER_PATHS: &str = "other";
#[derive(Debug, Default)]
struct Counters {
    bytes: AtomicU64,
    messages: AtomicU64,
    segments: AtomicU64,
    retransmits: AtomicU64,
    round_trip_us: AtomicU64,
    /// The kernel's last counts: for connections that are made anew it counts from the start.
    said: [AtomicU64; 2],
    /// See [`FlowMeter::allot`]; [`FREE`] for none.
    allotted_bps: AtomicU64,
}

/// Nobody holds a flow to a rate.
const FREE: u64 = 0;

impl Counters {
    fn totals(&self) -> Totals {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Totals {
            bytes: load(&self.bytes),
            messages: load(&self.messages),
            segments: load(&self.segments),
            retransmits: load(&self.retransmits),
            paths_left: 0,
        }
    }

    fn wire(&self, totals: Totals) -> WireView {
        let round_trip_us = Some(self.round_trip_us.load(Ordering::Relaxed)).filter(|us| *us > 0);
        WireView { segments: totals.segments, retransmits: totals.retransmits, round_trip_us }
    }
}

/// A flow's counters, as the engine has them that owns it. The flow has ended when this is dropped.
#[derive(Debug)]
pub struct FlowMeter {
    counters: Arc<Counters>,
    number: u64,
    table: Arc<FlowTable>,
}

impl FlowMeter {
    /// The flow goes on over another path. Its bytes so far were carried by the one before.
    pub fn moved(&self, path: &str) {
        self.table.moved(self.number, path);
    }

    /// The flow goes by this port of its host, or has left the one before and looks for another.
    pub fn goes_by(&self, port: Option<String>) {
        self.table.goes_by(self.number, port);
    }

    /// From now on it may send so much: payload in bits per second; as it likes, if `None`.
    pub fn allot(&self, bps: Option<u64>) {
        self.counters.allotted_bps.store(bps.map_or(FREE, |bps| bps.max(1)), Ordering::Relaxed);
    }

    /// Notes statistics of its packets so far. Nobody else counts, so nothing is lost.
    pub fn note_wire(&self, stats: WireStats) {
        let Counters { segments, retransmits, round_trip_us, said, .. } = &*self.counters;
        for (all, said, now) in [(segments, &said[0], stats.segments), (retransmits, &said[1], stats.retransmits)] {
            let before = said.swap(now, Ordering::Relaxed);
            let since = if now >= before { now - before } else { now };
            all.store(all.load(Ordering::Relaxed) + since, Ordering::Relaxed);
        }
        round_trip_us.store(stats.round_trip.as_micros() as u64, Ordering::Relaxed);
    }

    /// A message has been posted, or has come. Nobody else counts, so nothing is lost.
    pub fn count(&self, bytes: u64) {
        let Counters { bytes: all_bytes, messages, .. } = &*self.counters;
        all_bytes.store(all_bytes.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
        messages.store(messages.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }
}

impl Drop for FlowMeter {
    fn drop(&mut self) {
        self.table.end(self.number);
    }
}

/// Counts of a flow, or of all of a path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Totals {
    bytes: u64,
    messages: u64,
    segments: u64,
    retransmits: u64,
    paths_left: u64,
}

impl Totals {
    fn plus(self, other: Totals) -> Self {
        Totals {
            bytes: self.bytes + other.bytes,
            messages: self.messages + other.messages,
            segments: self.segments + other.segments,
            retransmits: self.retransmits + other.retransmits,
            paths_left: self.paths_left + other.paths_left,
        }
    }

    fn since(self, before: Totals) -> Self {
        Totals {
            bytes: self.bytes.saturating_sub(before.bytes),
            messages: self.messages.saturating_sub(before.messages),
            segments: self.segments.saturating_sub(before.segments),
            retransmits: self.retransmits.saturating_sub(before.retransmits),
            paths_left: self.paths_left,
        }
    }
}

/// Peer, path, and whether this host sends.
type PathKey = (String, String, bool);

#[derive(Debug)]
struct Live {
    name: FlowName,
    /// As what it is counted: decided when it begins on a path, so that what was counted there stays there.
    key: PathKey,
    counters: Arc<Counters>,
    /// Counts of other paths.
    before: Totals,
    /// See [`FlowView::port`].
    port: Option<String>,
    paths_left: u64,
}

impl Live {
    /// Counts of its path.
    fn totals(&self) -> Totals {
        Totals { paths_left: self.paths_left, ..self.counters.totals().since(self.before) }
    }

    fn view(&self) -> FlowView {
        let totals = self.totals();
        let (bytes, messages, wire) = (totals.bytes, totals.messages, self.counters.wire(totals));
        let allotted_bps = Some(self.counters.allotted_bps.load(Ordering::Relaxed)).filter(|bps| *bps != FREE);
        let (port, paths_left) = (self.port.clone(), self.paths_left);
        FlowView { name: self.name.clone(), bytes, messages, wire, allotted_bps, port, paths_left }
    }
}

#[derive(Debug, Default)]
struct Flows {
    next: u64,
    live: BTreeMap<u64, Live>,
    /// Counts of flows that have ended, or gone elsewhere; nothing yet if there are only others.
    ended: BTreeMap<PathKey, Totals>,
}

impl Flows {
    /// As what a flow on its path is counted, from now on and for ever.
    fn key_of(&mut self, name: &FlowName) -> PathKey {
        let mut key = (name.peer.clone(), name.path.clone(), name.sends);
        if !self.ended.contains_key(&key) && self.ended.len() >= PATHS_MAX {
            key.1 = OTHER_PATHS.into();
        }
        self.ended.entry(key.clone()).or_default();
        key
    }

    /// A flow has left a path on which it has carried so much.
    fn left(&mut self, key: PathKey, totals: Totals) {
        let ended = self.ended.entry(key).or_default();
        *ended = ended.plus(totals);
    }
}

/// All flows of a service.
#[derive(Debug, Default)]
pub struct FlowTable {
    flows: Mutex<Flows>,
}

impl FlowTable {
    /// A flow begins.
    #[must_use]
    pub fn begin(self: &Arc<Self>, name: FlowName) -> FlowMeter {
        let counters = Arc::<Counters>::default();
        let mut flows = lock(&self.flows);
        let number = flows.next;
        flows.next += 1;
        let key = flows.key_of(&name);
        let live =
            Live { name, key, counters: Arc::clone(&counters), before: Totals::default(), port: None, paths_left: 0 };
        flows.live.insert(number, live);
        FlowMeter { counters, number, table: Arc::clone(self) }
    }

    fn end(&self, number: u64) {
        let mut flows = lock(&self.flows);
        if let Some(live) = flows.live.remove(&number) {
            let totals = live.totals();
            flows.left(live.key, totals);
        }
    }

    fn goes_by(&self, number: u64, port: Option<String>) {
        if let Some(live) = lock(&self.flows).live.get_mut(&number) {
            let before = std::mem::replace(&mut live.port, port);
            live.paths_left += u64::from(before.is_some());
        }
    }

    fn moved(&self, number: u64, path: &str) {
        let mut flows = lock(&self.flows);
        let flows = &mut *flows;
        let Some(live) = flows.live.get(&number).filter(|live| live.name.path != path) else { return };
        let name = FlowName { path: path.to_owned(), ..live.name.clone() };
        let to = flows.key_of(&name);
        let Some(live) = flows.live.get_mut(&number) else { return };
        let totals = live.totals();
        live.paths_left = 0;
        (live.name, live.before) = (name, live.counters.totals());
        let from = std::mem::replace(&mut live.key, to);
        flows.left(from, totals);
    }

    /// The first `most` flows, and how many more there are.
    #[must_use]
    pub fn flows(&self, most: usize) -> (Vec<FlowView>, u64) {
        let flows = lock(&self.flows);
        (flows.live.values().take(most).map(Live::view).collect(), flows.live.len().saturating_sub(most) as u64)
    }

    /// Flows by which these links send: the first `most`.
    #[must_use]
    pub fn sent_by(&self, links: u64, most: usize) -> Vec<FlowView> {
        let flows = lock(&self.flows);
        let sent = flows.live.values().filter(|live| live.name.links == links && live.name.sends);
        sent.take(most).map(Live::view).collect()
    }

    /// Bytes of flows of these links since they began, in both directions, by channel and ranks: `most` of them.
    #[must_use]
    pub fn carried_by(&self, links: u64, most: usize) -> Vec<FlowBytes> {
        let mut carried: BTreeMap<RankFlow, u64> = BTreeMap::new();
        for live in lock(&self.flows).live.values().filter(|live| live.name.links == links) {
            let FlowName { channel, from, to, .. } = live.name;
            *carried.entry(RankFlow { channel, from, to }).or_default() += live.counters.totals().bytes;
        }
        let view = |(RankFlow { channel, from, to }, bytes)| FlowBytes { channel, from, to, bytes };
        carried.into_iter().take(most).map(view).collect()
    }

    /// Counts of peers and paths.
    #[must_use]
    pub fn paths(&self) -> Vec<PathView> {
        let flows = lock(&self.flows);
        let mut paths: BTreeMap<PathKey, (u64, Totals, Option<u64>)> = BTreeMap::new();
        for (key, ended) in &flows.ended {
            paths.insert(key.clone(), (0, *ended, None));
        }
        for live in flows.live.values() {
            let (count, all, round_trip_us) = paths.entry(live.key.clone()).or_default();
            *count += 1;
            *all = all.plus(live.totals());
            *round_trip_us = (*round_trip_us).max(live.counters.wire(*all).round_trip_us);
        }
        let view = |((peer, path, sends), (flows, totals, round_trip_us))| {
            let Totals { bytes, messages, segments, retransmits, paths_left } = totals;
            let wire = WireView { segments, retransmits, round_trip_us };
            PathView { peer, path, sends, flows, bytes, messages, paths_left, wire }
        };
        paths.into_iter().map(view).collect()
    }
}
