//! What flows to and from other hosts carry: a counter a flow, written by the engine that owns it, and what flows that have ended
//! have left behind, by peer and path.
//!
//! The table's lock is taken when a flow begins or ends, and by whoever looks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use mccs_config::service::TransportKind;
use serde::{Deserialize, Serialize};

use super::lock;
use mccs_model::path::{FlowPath, PortRange, WireStats};

/// Pairs of peer and path, by direction, that are counted apart after their flows have ended. Peers are the configuration's; an
/// operator who invents ever new paths gets them counted as [`OTHER_PATHS`].
const PATHS_MAX: usize = 4096;
/// See [`PATHS_MAX`].
const OTHER_PATHS: &str = "other";
/// Name of the path of flows for which nobody has chosen one; also of those that come in, whose path the sender chooses.
const NO_PATH: &str = "-";

/// What an operator calls a path: what steers flows to it.
#[must_use]
pub fn path_name(path: Option<&FlowPath>) -> String {
    let Some(path) = path else { return NO_PATH.into() };
    let ports = path.source_ports.map(|ports| format!("ports {}-{}", ports.first, ports.last));
    let dscp = path.dscp.map(|dscp| format!("dscp {dscp}"));
    let priority = path.priority.map(|priority| format!("priority {priority}"));
    let device = path.device.as_ref().map(|device| format!("device {device}"));
    let parts: Vec<_> = [device, ports, dscp, priority].into_iter().flatten().collect();
    if parts.is_empty() { NO_PATH.into() } else { parts.join(" ") }
}

/// The path that is called so; `None` where the name is that of several.
#[must_use]
pub fn path_called(name: &str) -> Option<FlowPath> {
    let mut path = FlowPath::default();
    let mut words = name.split(' ').filter(|_| name != NO_PATH);
    while let Some(kind) = words.next() {
        let value = words.next()?;
        match kind {
            "device" => path.device = Some(value.parse().ok()?),
            "ports" => {
                let (first, last) = value.split_once('-')?;
                path.source_ports = Some(PortRange { first: first.parse().ok()?, last: last.parse().ok()? });
            }
            "dscp" => path.dscp = Some(value.parse().ok()?),
            "priority" => path.priority = Some(value.parse().ok()?),
            _ => return None,
        }
    }
    Some(path)
}

/// What a flow has carried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowBytes {
    /// The channel, as [`LinkKey::channel`](mccs_model::link::LinkKey).
    pub channel: u16,
    /// Rank whose data it is.
    pub from: u32,
    /// Rank that is to get it.
    pub to: u32,
    /// Payload since it began.
    pub bytes: u64,
}

/// Which flow it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowName {
    /// The communicator's links on this host.
    pub links: u64,
    /// Number of the strategy; none of point-to-point operations.
    pub epoch: Option<u32>,
    /// Channel of the schedule.
    pub channel: u16,
    /// First rank of the program that sends.
    pub from: u32,
    /// First rank of the program that receives.
    pub to: u32,
    /// Whether this host sends.
    pub sends: bool,
    /// The other host.
    pub peer: String,
    /// What carries it, where the host has a choice.
    pub transport: Option<TransportKind>,
    /// See [`path_name`]. The one that it takes now.
    pub path: String,
}

#[derive(Debug, Default)]
struct Counters {
    bytes: AtomicU64,
    messages: AtomicU64,
    segments: AtomicU64,
    retransmits: AtomicU64,
    round_trip_us: AtomicU64,
    /// What the kernel said last: of connections that are made anew it counts from the start.
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
    /// The flow goes on over another path. What it has carried so far was carried by the one before.
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

    /// What became of its packets so far. Nobody else counts, so nothing is lost.
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

/// What became of packets. Nothing of flows that come in, and of those whose packets nobody here counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireView {
    /// Packets with payload that were sent, repetitions included.
    #[serde(default)]
    pub segments: u64,
    /// Packets that were sent again.
    #[serde(default)]
    pub retransmits: u64,
    /// From a packet to its answer now, in microseconds; of a path that of its slowest flow.
    #[serde(default)]
    pub round_trip_us: Option<u64>,
}

impl WireView {
    /// Part of the packets that had to be sent again, in percent.
    #[must_use]
    pub fn loss_percent(&self) -> Option<f64> {
        (self.segments > 0).then(|| self.retransmits as f64 / self.segments as f64 * 100.0)
    }
}

/// A flow as the operator sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowView {
    /// Which.
    #[serde(flatten)]
    pub name: FlowName,
    /// Payload, over this path.
    pub bytes: u64,
    /// Messages, over this path.
    pub messages: u64,
    /// What became of its packets, over this path.
    #[serde(flatten)]
    pub wire: WireView,
    /// What it may send, where a policy holds it to a cap or its tenant's share: payload in bits per second.
    pub allotted_bps: Option<u64>,
    /// Port of this host that it goes by, over RDMA: `mlx5_0:1`. None while it has left one and looks for another.
    #[serde(default)]
    pub port: Option<String>,
    /// Times that it has left a way, port and queue pairs, for another: it carried nothing any more, or a better one was back.
    #[serde(default)]
    pub paths_left: u64,
}

impl FlowView {
    /// What carries it, and over RDMA the port that it goes by: `rdma mlx5_0:1`. None where the host has no choice.
    #[must_use]
    pub fn carrier(&self) -> Option<String> {
        let kind = self.name.transport?;
        Some(self.port.as_ref().map_or_else(|| kind.to_string(), |port| format!("{kind} {port}")))
    }

    /// How it leaves its host, in words: what carries it, and its path. Empty where nobody has chosen anything.
    #[must_use]
    pub fn way(&self) -> String {
        let path = Some(self.name.path.clone()).filter(|path| path != NO_PATH);
        self.carrier().into_iter().chain(path).collect::<Vec<_>>().join(", ")
    }
}

/// All flows of a path to or from a peer, those that have ended included.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathView {
    /// The other host.
    pub peer: String,
    /// See [`path_name`].
    pub path: String,
    /// Whether this host sends.
    pub sends: bool,
    /// Flows now.
    pub flows: u64,
    /// Payload.
    pub bytes: u64,
    /// Messages.
    pub messages: u64,
    /// Times that flows over RDMA have left their ways for others.
    #[serde(default)]
    pub paths_left: u64,
    /// What became of packets.
    #[serde(flatten)]
    pub wire: WireView,
}

/// What a flow has carried, or all of a path.
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
    /// What other paths have carried.
    before: Totals,
    /// See [`FlowView::port`].
    port: Option<String>,
    paths_left: u64,
}

impl Live {
    /// What its path has carried.
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
    /// Of flows that have ended, or gone elsewhere; nothing yet where there are only others.
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

    /// What these links send: the first `most` flows.
    #[must_use]
    pub fn sent_by(&self, links: u64, most: usize) -> Vec<FlowView> {
        let flows = lock(&self.flows);
        let sent = flows.live.values().filter(|live| live.name.links == links && live.name.sends);
        sent.take(most).map(Live::view).collect()
    }

    /// What flows of these links have carried since they began, in both directions, by channel and ranks: `most` of them.
    #[must_use]
    pub fn carried_by(&self, links: u64, most: usize) -> Vec<FlowBytes> {
        let mut carried: BTreeMap<(u16, u32, u32), u64> = BTreeMap::new();
        for live in lock(&self.flows).live.values().filter(|live| live.name.links == links) {
            let FlowName { channel, from, to, .. } = live.name;
            *carried.entry((channel, from, to)).or_default() += live.counters.totals().bytes;
        }
        let view = |((channel, from, to), bytes)| FlowBytes { channel, from, to, bytes };
        carried.into_iter().take(most).map(view).collect()
    }

    /// What peers and paths have carried.
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn name(peer: &str, path: &str, to: u32) -> FlowName {
        let (peer, path) = (peer.into(), path.into());
        FlowName { links: 1, epoch: Some(0), channel: 0, from: 0, to, sends: true, peer, transport: None, path }
    }

    #[test]
    fn what_flows_have_carried_stays_when_they_end() {
        let table = Arc::new(FlowTable::default());
        let meters: Vec<_> = (0..4).map(|to| table.begin(name("b", if to < 2 { "x" } else { "y" }, to))).collect();
        for (bytes, meter) in (1..).zip(&meters) {
            (0..10).for_each(|_| meter.count(bytes));
        }
        let carried = || table.paths().iter().map(|path| (path.bytes, path.messages)).collect::<Vec<_>>();
        assert_eq!(carried(), [(30, 20), (70, 20)]);
        assert_eq!(table.paths().iter().map(|path| path.flows).collect::<Vec<_>>(), [2, 2]);
        let (flows, more) = table.flows(3);
        assert_eq!((flows.len(), more, flows[1].bytes, flows[1].name.to), (3, 1, 20, 1));
        drop(meters);
        assert_eq!(carried(), [(30, 20), (70, 20)]);
        assert!(table.paths().iter().all(|path| path.flows == 0));
        assert_eq!(table.flows(10), (Vec::new(), 0));
    }

    #[test]
    fn a_flow_that_goes_elsewhere_leaves_what_it_has_carried() {
        let table = Arc::new(FlowTable::default());
        let meter = table.begin(name("b", "x", 1));
        meter.count(5);
        meter.moved("x");
        meter.count(2);
        meter.moved("y");
        meter.count(30);
        let carried = || {
            let paths = table.paths().into_iter();
            paths.map(|path| (path.path, path.flows, path.bytes, path.messages)).collect::<Vec<_>>()
        };
        assert_eq!(carried(), [("x".into(), 0, 7, 2), ("y".into(), 1, 30, 1)]);
        let (flows, _) = table.flows(1);
        assert_eq!((&*flows[0].name.path, flows[0].bytes, flows[0].messages), ("y", 30, 1));
        meter.moved("x");
        meter.count(1);
        drop(meter);
        assert_eq!(carried(), [("x".into(), 0, 8, 3), ("y".into(), 0, 30, 1)]);
    }

    #[test]
    fn packets_are_counted_on_the_path_that_lost_them_also_when_connections_are_made_anew() {
        let table = Arc::new(FlowTable::default());
        let meter = table.begin(name("b", "x", 1));
        let stats = |segments, retransmits| WireStats { segments, retransmits, round_trip: Duration::from_micros(70) };
        meter.note_wire(stats(100, 5));
        meter.note_wire(stats(150, 5));
        let view = table.flows(1).0[0].wire;
        assert_eq!(view, WireView { segments: 150, retransmits: 5, round_trip_us: Some(70) });
        assert!(view.loss_percent().is_some_and(|percent| (percent - 10.0 / 3.0).abs() < 1e-9));
        meter.moved("y");
        // Another connection.
        meter.note_wire(stats(20, 1));
        let wires = || table.paths().into_iter().map(|path| (path.path, path.wire)).collect::<Vec<_>>();
        let wire = |segments, retransmits, round_trip_us| WireView { segments, retransmits, round_trip_us };
        assert_eq!(wires(), [("x".into(), wire(150, 5, None)), ("y".into(), wire(20, 1, Some(70)))]);
        drop(meter);
        assert_eq!(wires()[1].1, wire(20, 1, None));
        assert_eq!(wire(0, 0, None).loss_percent(), None);
    }

    #[test]
    fn ports_of_flows_are_told_and_how_often_ways_were_left() {
        let table = Arc::new(FlowTable::default());
        let meter = table.begin(name("b", "x", 1));
        let told = || table.flows(1).0.pop().map(|flow| (flow.port, flow.paths_left));
        assert_eq!(told(), Some((None, 0)));
        for (port, paths_left) in [(Some("a:1"), 0), (None, 1), (None, 1), (Some("b:1"), 1), (Some("a:1"), 2)] {
            let port = port.map(str::to_owned);
            meter.goes_by(port.clone());
            assert_eq!(told(), Some((port, paths_left)));
        }
        let left = || table.paths().iter().map(|path| path.paths_left).collect::<Vec<_>>();
        assert_eq!(left(), [2]);
        drop(meter);
        assert_eq!((told(), left()), (None, vec![2]));
    }

    #[test]
    fn what_a_flow_may_send_is_told_while_it_is_held_to_it() {
        let table = Arc::new(FlowTable::default());
        let meter = table.begin(name("b", "x", 1));
        let allotted = || table.flows(1).0[0].allotted_bps;
        assert_eq!(allotted(), None);
        meter.allot(Some(7));
        assert_eq!(allotted(), Some(7));
        meter.allot(Some(0));
        assert_eq!(allotted(), Some(1), "next to nothing is not what it likes");
        meter.allot(None);
        assert_eq!(allotted(), None);
    }

    #[test]
    fn ever_new_paths_do_not_fill_the_table() {
        let table = Arc::new(FlowTable::default());
        for path in 0..PATHS_MAX + 10 {
            table.begin(name("b", &path.to_string(), 1)).count(1);
        }
        let paths = table.paths();
        assert_eq!(paths.len(), PATHS_MAX + 1);
        assert_eq!(paths.iter().map(|path| path.bytes).sum::<u64>(), PATHS_MAX as u64 + 10);
        assert!(paths.iter().any(|path| path.path == OTHER_PATHS && path.messages == 10));
    }

    #[test]
    fn what_a_path_has_carried_never_grows_less() {
        let table = Arc::new(FlowTable::default());
        let meters = ["x", "y", "z"].map(|path| table.begin(name("b", path, 1)));
        meters[0].count(5);
        meters[1].count(3);
        for path in 0..PATHS_MAX {
            drop(table.begin(name("b", &path.to_string(), 1)));
        }
        let carried = |path: &str| table.paths().into_iter().find(|view| view.path == path).map(|view| view.bytes);
        // There is no room for more by the time that they end or move.
        meters[1].moved("late");
        meters[1].count(4);
        let [x, y, z] = meters;
        drop((x, z));
        assert_eq!([carried("x"), carried("y"), carried("z"), carried("late")], [Some(5), Some(3), Some(0), None]);
        let before = carried(OTHER_PATHS);
        assert_eq!(table.flows(1).0[0].name.path, "late");
        drop(y);
        assert_eq!((carried(OTHER_PATHS), before), (Some(4), Some(4)));
    }

    #[test]
    fn paths_are_called_by_what_steers_to_them() {
        assert_eq!(path_name(None), "-");
        assert_eq!(path_name(Some(&FlowPath::default())), "-");
        let ports = Some(PortRange { first: 20, last: 30 });
        let path = FlowPath { source_ports: ports, dscp: Some(10), ..FlowPath::default() };
        assert_eq!(path_name(Some(&path)), "ports 20-30 dscp 10");
        let device = Some("mlx5_1:2".parse().expect("a device"));
        let by_device = FlowPath { device, ..path.clone() };
        assert_eq!(path_name(Some(&by_device)), "device mlx5_1:2 ports 20-30 dscp 10");
        // And by their names they are known.
        let preferred = FlowPath { priority: Some(2), ..FlowPath::default() };
        for path in [FlowPath::default(), path, by_device, preferred] {
            assert_eq!(path_called(&path_name(Some(&path))), Some(path));
        }
        for name in [OTHER_PATHS, "", "ports", "ports 1", "dscp x", "way 1"] {
            assert_eq!(path_called(name), None, "{name:?}");
        }
    }
}
