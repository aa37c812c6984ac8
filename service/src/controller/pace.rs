//! How fast and when a communicator's flows leave a host, as the controller tells it: on the common clock, by host.
//!
//! A pace holds at once and needs no agreement: whatever it says, results are the same. It is told whole, and again where
//! a host was away. Rates are of payload, as they are in [`Pace`]; links are shared by what they carry, headers included, so
//! that shares are told as [`PAYLOAD`] of what the policy allots.

use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::engines::transport::pace::{LocalWindow, Pace};
use crate::exchange::protocol::Name;
use crate::policy::{Decision, Window};
use crate::topology::Topology;

/// Payload of full frames of 1,500 bytes, TCP's and Ethernet's headers besides (1,448 of 1,538), less what keeps queues empty:
/// a share is kept only where its owner's congestion control has nothing to say.
pub const PAYLOAD: f64 = 0.92;
/// Less than this stalls a job as well as nothing.
const CAP_MIN_BPS: u64 = 1_000_000;
/// Flows that leave a host, and times to yield: more than any policy decides.
const PARTS_MAX: usize = 4096;
const YIELDS_MAX: usize = 64;
/// Longer periods would stall jobs for longer than operations may take.
const PERIOD_MAX: Duration = Duration::from_secs(3600);

/// See the module's documentation. Nothing: as it likes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HostPace {
    /// Payload in bits per second of each flow that has no cap of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cap_bps: Option<u64>,
    /// Flows with a cap of their own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub flows: Vec<FlowCap>,
    /// When they may send.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window: Option<Window>,
    /// When they send less.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub yields: Vec<YieldCap>,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct YieldCap {
    /// When.
    pub window: Window,
    /// Payload in bits per second.
    pub cap_bps: u64,
}

impl fmt::Display for HostPace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mbps = |bps: u64| bps as f64 / 1e6;
        let ms = |ns: u64| ns as f64 / 1e6;
        let mut parts = Vec::new();
        parts.extend(self.cap_bps.map(|cap| format!("{:.1} Mbit/s a flow", mbps(cap))));
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
        parts.extend(yields.map(|part| format!("{:.1} Mbit/s in {}", mbps(part.cap_bps), when(&part.window))));
        f.write_str(&parts.join("; "))
    }
}

fn payload_bps(allotted_bps: f64) -> u64 {
    ((allotted_bps * PAYLOAD) as u64).max(CAP_MIN_BPS)
}

/// What every host of a decision is told, by host; `rates` are what its flows are allotted, where tenants have shares.
#[must_use]
pub fn host_paces(topology: &Topology, decision: &Decision, rates: Option<&[f64]>) -> Vec<(String, HostPace)> {
    let mut paces: Vec<(String, HostPace)> = Vec::new();
    let cap_bps = decision.cap_bps.map(|cap| (cap as u64).max(CAP_MIN_BPS));
    let yields: Vec<YieldCap> = decision
        .yields
        .iter()
        .take(YIELDS_MAX)
        .map(|yields| YieldCap { window: yields.window, cap_bps: payload_bps(yields.cap_bps) })
        .collect();
    for (place, flow) in decision.flows.iter().enumerate() {
        let from = topology.host_name(flow.from.host);
        let at = paces.iter().position(|(host, _)| host == from).unwrap_or_else(|| {
            let pace = HostPace { cap_bps, flows: Vec::new(), window: decision.window, yields: yields.clone() };
            paces.push((from.to_owned(), pace));
            paces.len() - 1
        });
        // A flow over a link that is down is allotted nothing, and is to go elsewhere: a cap would only make that harder.
        let Some(allotted) = rates.and_then(|rates| rates.get(place)).filter(|rate| rate.is_finite() && **rate > 0.0)
        else {
            continue;
        };
        let to = topology.host_name(flow.to.host).to_owned();
        let flows = &mut paces[at].1.flows;
        let channel = flow.channel as u16;
        // A ring that comes by twice has one flow there: what both are allotted.
        let own_bps = payload_bps(*allotted);
        if let Some(flow) = flows.iter_mut().find(|flow| flow.channel == channel && flow.to == to) {
            flow.cap_bps += own_bps;
        } else if flows.len() < PARTS_MAX {
            flows.push(FlowCap { channel, to, cap_bps: own_bps });
        }
    }
    paces
}

impl HostPace {
    /// Whether flows are as they would be without.
    #[must_use]
    pub fn is_free(&self) -> bool {
        *self == HostPace::default()
    }

    /// What its flows are allotted together, in bits of payload per second; 0 where they are not.
    #[must_use]
    pub fn allotted_bps(&self) -> u64 {
        self.flows.iter().map(|flow| flow.cap_bps).sum()
    }

    /// Whether it says anything of times.
    #[must_use]
    pub fn is_timed(&self) -> bool {
        self.window.is_some() || !self.yields.is_empty()
    }

    /// What is wrong with it, if anything.
    ///
    /// # Errors
    /// In words.
    pub fn check(&self) -> Result<(), &'static str> {
        let caps = self.flows.iter().map(|flow| flow.cap_bps).chain(self.cap_bps);
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
        } else if !windows.all(is_window) {
            Err("it has a window that cannot be, or is never open")
        } else if self.flows.iter().any(|flow| Name::new(&flow.to).is_none()) {
            Err("it names a host that cannot be")
        } else {
            Ok(())
        }
    }

    /// For this host's engines, when the common clock shows `common_ns` now.
    #[must_use]
    pub fn here(&self, now: Instant, common_ns: u64) -> Pace {
        let local = |window: Window| {
            let since_ns = (common_ns % window.period_ns + window.period_ns - window.offset_ns) % window.period_ns;
            // A process that is younger than a period has no such instant; a later opening does as well, less one round.
            let opened = now.checked_sub(Duration::from_nanos(since_ns)).unwrap_or(now);
            LocalWindow {
                opened,
                period: Duration::from_nanos(window.period_ns),
                length: Duration::from_nanos(window.length_ns),
            }
        };
        let flow = |flow: &FlowCap| Some((flow.channel, Name::new(&flow.to)?, flow.cap_bps));
        Pace {
            cap_bps: self.cap_bps,
            flows: self.flows.iter().filter_map(flow).collect(),
            window: self.window.map(local),
            yields: self.yields.iter().map(|yields| (local(yields.window), yields.cap_bps)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn windows_are_where_the_common_clock_says() {
        let now = Instant::now();
        let window = Window { period_ns: 100 * MS, offset_ns: 30 * MS, length_ns: 20 * MS };
        let pace = HostPace { window: Some(window), ..HostPace::default() };
        // By the common clock it is 35 ms into a period: the window has been open for 5.
        let local = pace.here(now, 7_000 * MS + 35 * MS).window.unwrap();
        assert_eq!(local.at(now), (true, Some(now + Duration::from_millis(15))));
        let local = pace.here(now, 7_000 * MS + 29 * MS).window.unwrap();
        assert_eq!(local.at(now), (false, Some(now + Duration::from_millis(1))));
    }

    #[test]
    fn what_would_stall_is_refused() {
        let window = Window { period_ns: 100, offset_ns: 0, length_ns: 10 };
        let flow = FlowCap { channel: 0, to: "b".into(), cap_bps: CAP_MIN_BPS };
        let good =
            HostPace { cap_bps: Some(CAP_MIN_BPS), flows: vec![flow.clone()], window: Some(window), yields: vec![] };
        assert_eq!(good.check(), Ok(()));
        let spoilt: [HostPace; 6] = [
            HostPace { cap_bps: Some(0), ..good.clone() },
            HostPace { flows: vec![FlowCap { cap_bps: 3, ..flow.clone() }], ..good.clone() },
            HostPace { flows: vec![FlowCap { to: "no host!".into(), ..flow.clone() }], ..good.clone() },
            HostPace { flows: vec![flow; PARTS_MAX + 1], ..good.clone() },
            HostPace { window: Some(Window { length_ns: 0, ..window }), ..good.clone() },
            HostPace { yields: vec![YieldCap { window: Window { period_ns: 0, ..window }, cap_bps: 1 << 30 }], ..good },
        ];
        for pace in spoilt {
            assert!(pace.check().is_err(), "{pace:?}");
        }
    }
}
