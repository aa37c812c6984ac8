//! Rate limits of a communicator's flows on each host: caps and time windows on the common clock.
//!
//! A pace holds at once and needs no agreement: whatever it says, results are the same. It is told whole, and again where
//! a host was away. Rates are of payload, as they are in [`Pace`]; links are shared by what they carry, headers included, so
//! that shares are told as [`PAYLOAD`] of what the policy allots. Caps are of payload everywhere.

pub mod bursts;

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::pace::bursts::CommonBurst;
use mccs_model::limits::CONTROL_BYTES_MAX;
use mccs_model::rate_limit::{CappedFlow, LocalWindow, Pace};
use mccs_model::{CommId, Name};
use mccs_policy::shares::PAYLOAD;
use mccs_policy::topology::Topology;
use mccs_policy::{Decision, Window, Yield};
use mccs_telemetry::placed::Allotment;

/// Less than this stalls a job as well as nothing.
const CAP_MIN_BPS: u64 = 1_000_000;
/// Flows that leave a host, and times to yield: more than any policy decides.
const PARTS_MAX: usize = 4096;
const YIELDS_MAX: usize = 64;
/// Bytes of a message around a pace: a communicator's name, numbers, and a weight.
const AROUND_BYTES_MAX: usize = 1024;
/// So many flows fit a message, whatever else is in it: they need not be measured at every decision.
const FLOWS_FIT: usize = 256;
/// Longer periods would stall jobs for longer than operations may take.
pub(super) const PERIOD_MAX: Duration = Duration::from_secs(3600);

/// See the module's documentation. Nothing: as it likes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HostPace {
    /// Payload in bits per second of each flow that has no cap of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cap_bps: Option<u64>,
    /// Payload in bits per second that its tenant sends out of this host, all its communicators together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_cap_bps: Option<u64>,
    /// Flows with a cap of their own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub flows: Vec<FlowCap>,
    /// When they may send.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<Window>,
    /// When they send less.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub yields: Vec<YieldCap>,
    /// The weight by which its tenant shares contended links with others, in thousandths; where tenants share by weight. For people alone:
    /// [`HostPace::flows`] are what comes of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight_milli: Option<u64>,
    /// Whether others make room for its bursts: the host of its root tells of each.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_watched: bool,
}

/// The cap of a flow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlowCap {
    /// Its channel.
    pub channel: u16,
    /// The host it goes to.
    pub to: String,
    /// Payload in bits per second.
    pub cap_bps: u64,
}

/// A time at which each flow sends less.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct YieldCap {
    /// For whom.
    pub to: CommId,
    /// When, until the first of its bursts is told.
    pub window: Window,
    /// How much earlier than a burst that is told.
    pub early_ns: u64,
    /// Payload in bits per second.
    pub cap_bps: u64,
}

impl fmt::Display for HostPace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mbps = |bps: u64| bps as f64 / 1e6;
        let ms = |ns: u64| ns as f64 / 1e6;
        let mut parts = Vec::new();
        parts.extend(self.cap_bps.map(|cap| format!("{:.1} Mbit/s a flow", mbps(cap))));
        parts.extend(self.host_cap_bps.map(|cap| format!("{:.1} Mbit/s all that its tenant sends", mbps(cap))));
        let own = self.flows.iter();
        parts.extend(
            own.map(|flow| format!("channel {} to {} {:.1} Mbit/s", flow.channel, flow.to, mbps(flow.cap_bps))),
        );
        let when = |window: &Window| {
            let Window { period_ns, offset_ns, length_ns } = *window;
            format!("{:.2} ms of each {:.2}, from {:.2} on", ms(length_ns), ms(period_ns), ms(offset_ns))
        };
        parts.extend(self.window.as_ref().map(when));
        let yields = self.yields.iter();
        let to_whom =
            |part: &YieldCap| format!("{:.1} Mbit/s for {} in {}", mbps(part.cap_bps), part.to, when(&part.window));
        parts.extend(yields.map(to_whom));
        parts.extend(self.weight_milli.map(|weight| format!("weight {}", weight as f64 / 1e3)));
        parts.extend(self.is_watched.then(|| "others make room for its bursts".to_owned()));
        f.write_str(&parts.join("; "))
    }
}

fn payload_bps(allotted_bps: f64) -> u64 {
    ((allotted_bps * PAYLOAD).round() as u64).max(CAP_MIN_BPS)
}

/// Paces of every host of a decision, by host; `rates` are allotments of its flows, if tenants have shares, and `comm_of` is hosts' name
/// for a communicator of the policy's.
#[must_use]
pub fn host_paces(
    topology: &Topology,
    decision: &Decision,
    rates: Option<&[f64]>,
    comm_of: impl Fn(mccs_policy::CommId) -> Option<CommId>,
) -> Vec<(String, HostPace)> {
    let mut paces: Vec<(String, HostPace)> = Vec::new();
    let as_told = |cap: f64| (cap as u64).max(CAP_MIN_BPS);
    let (cap_bps, host_cap_bps) = (decision.cap_bps.map(as_told), decision.host_cap_bps.map(as_told));
    let yields: Vec<YieldCap> = decision
        .yields
        .iter()
        .take(YIELDS_MAX)
        .filter_map(|Yield { to, window, early_ns, cap_bps }| {
            let cap_bps = payload_bps(*cap_bps);
            Some(YieldCap { to: comm_of(*to)?, window: *window, early_ns: *early_ns, cap_bps })
        })
        .collect();
    for (place, flow) in decision.flows.iter().enumerate() {
        let from = topology.host_name(flow.from.host);
        let at = paces.iter().position(|(host, _)| host == from).unwrap_or_else(|| {
            let (window, yields) = (decision.window, yields.clone());
            let pace = HostPace { cap_bps, host_cap_bps, window, yields, ..HostPace::default() };
            paces.push((from.to_owned(), pace));
            paces.len() - 1
        });
        // A flow whose NIC's link is down is allotted nothing, and goes nowhere: a cap would only make it harder to end.
        let Some(allotted) = rates.and_then(|rates| rates.get(place)).filter(|rate| rate.is_finite() && **rate > 0.0)
        else {
            continue;
        };
        let to = topology.host_name(flow.to.host).to_owned();
        let flows = &mut paces[at].1.flows;
        let channel = flow.channel as u16;
        // A ring that comes by twice has one flow there: what both are allotted, and no more than one flow may have.
        let most_bps = cap_bps.unwrap_or(u64::MAX);
        let own_bps = payload_bps(*allotted).min(most_bps);
        if let Some(flow) = flows.iter_mut().find(|flow| flow.channel == channel && flow.to == to) {
            flow.cap_bps = flow.cap_bps.saturating_add(own_bps).min(most_bps);
        } else if flows.len() < PARTS_MAX {
            flows.push(FlowCap { channel, to, cap_bps: own_bps });
        }
    }
    paces
}

/// Takes from paces what hosts would refuse, or could not be told. Returns what that is, in words, if anything.
pub(super) fn leave_what_cannot_be_told(paces: &mut [(String, HostPace)]) -> Vec<String> {
    let mut left = Vec::new();
    for (host, pace) in paces {
        if pace.is_timed()
            && let Err(reason) = pace.check()
        {
            (pace.window, pace.yields) = (None, Vec::new());
            left.push(format!("times at which flows of {host} may send: {reason}"));
        }
        if !pace.fits() {
            let flows = std::mem::take(&mut pace.flows).len();
            left.push(format!("shares of {flows} flows of {host}: they do not fit a message"));
        }
    }
    left
}

impl HostPace {
    /// Whether it fits a message.
    fn fits(&self) -> bool {
        self.flows.len() <= FLOWS_FIT
            || serde_json::to_vec(self).is_ok_and(|json| json.len() + AROUND_BYTES_MAX <= CONTROL_BYTES_MAX)
    }

    /// Whether flows are as they would be without.
    #[must_use]
    pub fn is_free(&self) -> bool {
        *self == HostPace::default()
    }

    /// Allotment of its flows together, in bits of payload per second; 0 if they have none.
    #[must_use]
    pub fn allotted_bps(&self) -> u64 {
        self.flows.iter().fold(0, |sum, flow| sum.saturating_add(flow.cap_bps))
    }

    /// The tenant's allotment, if there is one.
    #[must_use]
    pub fn allotment(&self) -> Option<Allotment> {
        let Self { cap_bps: flow_cap_bps, host_cap_bps, weight_milli, .. } = *self;
        let allotted_bps = Some(self.allotted_bps()).filter(|bps| *bps > 0);
        let allotment = Allotment { weight_milli, flow_cap_bps, host_cap_bps, allotted_bps };
        (allotment != Allotment::default()).then_some(allotment)
    }

    /// Whether it says anything of times.
    #[must_use]
    pub fn is_timed(&self) -> bool {
        self.window.is_some() || !self.yields.is_empty()
    }

    /// By how much the clock may be wrong for its times to be of use: an eighth of the shortest time in which a window is open, or shut. `None`: by
    /// anything.
    #[must_use]
    pub fn clock_error_max(&self) -> Option<Duration> {
        let windows = self.yields.iter().map(|yields| yields.window).chain(self.window);
        let shortest = windows.map(|window| match window.period_ns.saturating_sub(window.length_ns) {
            0 => u64::MAX,
            shut_ns => shut_ns.min(window.length_ns),
        });
        shortest.min().filter(|ns| *ns < u64::MAX).map(|ns| Duration::from_nanos(ns / 8))
    }

    /// The mistake in it, if there is one.
    ///
    /// # Errors
    /// In words.
    pub fn check(&self) -> Result<(), &'static str> {
        let caps = self.flows.iter().map(|flow| flow.cap_bps).chain(self.cap_bps).chain(self.host_cap_bps);
        let mut caps = caps.chain(self.yields.iter().map(|yields| yields.cap_bps));
        let mut windows = self.yields.iter().map(|yields| yields.window).chain(self.window);
        let is_window = |window: Window| {
            window.period_ns >= 1
                && window.period_ns <= PERIOD_MAX.as_nanos() as u64
                && window.offset_ns < window.period_ns
                && window.length_ns >= 1
        };
        if self.flows.len() > PARTS_MAX || self.yields.len() > YIELDS_MAX {
            Err("it has too many parts")
        } else if caps.any(|cap_bps| cap_bps < CAP_MIN_BPS) {
            Err("it would stall a flow")
        } else if !windows.all(is_window) || self.yields.iter().any(|part| part.early_ns > PERIOD_MAX.as_nanos() as u64)
        {
            Err("it has a window that cannot be, or is never open")
        } else if self.flows.iter().any(|flow| Name::new(&flow.to).is_none()) {
            Err("it names a host that cannot be")
        } else {
            Ok(())
        }
    }

    /// For this host's engines, when the common clock shows `common_ns` now, and these are the last bursts that were told.
    #[must_use]
    pub fn here(&self, now: Instant, common_ns: u64, bursts: &BTreeMap<CommId, CommonBurst>) -> Pace {
        let local = |window: Window| {
            let since_ns = (common_ns % window.period_ns + window.period_ns - window.offset_ns) % window.period_ns;
            // A process that is younger than a period has no such instant; a later opening does as well, less one round.
            let opened = now.checked_sub(Duration::from_nanos(since_ns)).unwrap_or(now);
            LocalWindow {
                opened,
                period: Duration::from_nanos(window.period_ns),
                length: Duration::from_nanos(window.length_ns),
                is_once: false,
            }
        };
        let yields = |YieldCap { to, window, early_ns, cap_bps }: &YieldCap| match bursts.get(to) {
            Some(burst) => (local_once(burst.with_margin().earlier(*early_ns), now, common_ns), *cap_bps),
            None => (local(*window), *cap_bps),
        };
        let flow = |flow: &FlowCap| {
            Some(CappedFlow { channel: flow.channel, to: Name::new(&flow.to)?, cap_bps: flow.cap_bps })
        };
        Pace {
            cap_bps: self.cap_bps,
            host_cap_bps: self.host_cap_bps,
            flows: self.flows.iter().filter_map(flow).collect(),
            window: self.window.map(local),
            yields: self.yields.iter().map(yields).collect(),
        }
    }
}

/// A window that opens once, by this process's clock.
fn local_once(burst: CommonBurst, now: Instant, common_ns: u64) -> LocalWindow {
    let begins = Duration::from_nanos(burst.begins_ns.saturating_sub(common_ns));
    let since = Duration::from_nanos(common_ns.saturating_sub(burst.begins_ns));
    let length = Duration::from_nanos(burst.lasts_ns);
    // One that began before this process is over.
    let (opened, length) = match now.checked_sub(since) {
        Some(opened) => (opened + begins, length),
        None => (now, Duration::ZERO),
    };
    LocalWindow { opened, period: length, length, is_once: true }
}

#[cfg(test)]
mod tests {
    use mccs_model::rate_limit::WindowState;

    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn windows_are_where_the_common_clock_says() {
        let now = Instant::now();
        let window = Window { period_ns: 100 * MS, offset_ns: 30 * MS, length_ns: 20 * MS };
        let pace = HostPace { window: Some(window), ..HostPace::default() };
        // By the common clock it is 35 ms into a period: the window has been open for 5.
        let local = pace.here(now, 7_000 * MS + 35 * MS, &BTreeMap::new()).window.unwrap();
        assert_eq!(local.at(now), WindowState { is_open: true, until: Some(now + Duration::from_millis(15)) });
        let local = pace.here(now, 7_000 * MS + 29 * MS, &BTreeMap::new()).window.unwrap();
        assert_eq!(local.at(now), WindowState { is_open: false, until: Some(now + Duration::from_millis(1)) });
    }

    #[test]
    fn who_makes_room_does_so_for_the_burst_that_was_told_last_and_once() {
        let now = Instant::now();
        let to = CommId { root: Name::new("a").unwrap(), incarnation: 1, number: 1 };
        let window = Window { period_ns: 100 * MS, offset_ns: 30 * MS, length_ns: 20 * MS };
        let yields = vec![YieldCap { to: to.clone(), window, early_ns: 4 * MS, cap_bps: CAP_MIN_BPS }];
        let pace = HostPace { yields, ..HostPace::default() };
        let burst = CommonBurst { begins_ns: 7_050 * MS, lasts_ns: 100 * MS };
        let at = |ms: i64| {
            if ms < 0 { now - Duration::from_millis(-ms as u64) } else { now + Duration::from_millis(ms as u64) }
        };
        for (common_ms, begins) in [(7_000, 50), (7_060, -10)] {
            let Pace { yields, .. } = pace.here(now, common_ms * MS, &BTreeMap::from([(to.clone(), burst)]));
            let (local, _) = yields[0];
            // With 3% before and behind, and so much earlier as it was told.
            assert_eq!(local.at(at(begins - 7)), WindowState { is_open: true, until: Some(at(begins + 103)) });
            assert!([-8, 103, 150].iter().all(|ms| !local.at(at(begins + ms)).is_open));
        }
        let Pace { yields, .. } = pace.here(now, 7_035 * MS, &BTreeMap::new());
        assert!(
            yields[0].0.at(now).is_open && yields[0].0.at(at(100)).is_open,
            "as the profile says, until one is told"
        );
    }

    #[test]
    fn what_would_stall_is_refused() {
        let window = Window { period_ns: 100, offset_ns: 0, length_ns: 10 };
        let flow = FlowCap { channel: 0, to: "b".into(), cap_bps: CAP_MIN_BPS };
        let good = HostPace {
            cap_bps: Some(CAP_MIN_BPS),
            flows: vec![flow.clone()],
            window: Some(window),
            ..HostPace::default()
        };
        let to = CommId { root: Name::new("a").unwrap(), incarnation: 1, number: 1 };
        assert_eq!(good.check(), Ok(()));
        let spoilt: [HostPace; 7] = [
            HostPace { cap_bps: Some(0), ..good.clone() },
            HostPace { host_cap_bps: Some(CAP_MIN_BPS - 1), ..good.clone() },
            HostPace { flows: vec![FlowCap { cap_bps: 3, ..flow.clone() }], ..good.clone() },
            HostPace { flows: vec![FlowCap { to: "no host!".into(), ..flow.clone() }], ..good.clone() },
            HostPace { flows: vec![flow; PARTS_MAX + 1], ..good.clone() },
            HostPace { window: Some(Window { length_ns: 0, ..window }), ..good.clone() },
            HostPace {
                yields: vec![YieldCap { to, window: Window { period_ns: 0, ..window }, early_ns: 0, cap_bps: 1 << 30 }],
                ..good
            },
        ];
        for pace in spoilt {
            assert!(pace.check().is_err(), "{pace:?}");
        }
    }

    #[test]
    fn what_hosts_are_told_is_no_more_than_a_cap_and_no_less() {
        use mccs_config::TopologyFile;

        use mccs_policy::topology::{HostId, Port};
        use mccs_policy::{Flow, PathSelection};

        let file = TopologyFile::parse(include_str!("../../../config/examples/topology.toml"), "t").unwrap();
        let topology = Topology::from_file(&file).unwrap();
        let port = |host: u32| Port { host: HostId(host), nic: 0 };
        let flow = |to: u32| Flow { channel: 0, from: port(0), to: port(to), path: PathSelection::Hash };
        // A ring that comes by twice, and another flow.
        let decision = |cap_bps: Option<u64>| Decision {
            comm: 1,
            ring_orders: Vec::new(),
            flows: vec![flow(1), flow(2), flow(1)],
            weight: 1.0,
            cap_bps: cap_bps.map(|cap_bps| cap_bps as f64),
            host_cap_bps: None,
            priority: 0,
            window: None,
            yields: Vec::new(),
        };
        for cap_bps in (0..10_000).map(|step| 30_000_000_000 + step * 1_000_003) {
            let on_links = cap_bps as f64 / PAYLOAD;
            let told = |cap_bps| {
                let mut paces = host_paces(&topology, &decision(cap_bps), Some(&[on_links; 3]), |_| None);
                paces.remove(0).1
            };
            let pace = told(Some(cap_bps));
            assert_eq!(pace.flows.iter().map(|flow| flow.cap_bps).collect::<Vec<_>>(), [cap_bps; 2]);
            assert_eq!(told(None).allotted_bps(), 3 * cap_bps);
        }
        let huge = FlowCap { channel: 0, to: "b".into(), cap_bps: u64::MAX };
        assert_eq!(HostPace { flows: vec![huge; 2], ..HostPace::default() }.allotted_bps(), u64::MAX);
    }
}
