//! Measured rates of flows by path: hosts look once a second and tell the controller what is news.
//!
//! ```text
//! flows' counters --> RateWatch (every host) --Rates, where much is otherwise--> ClusterRates (controller, `cluster/cluster_rates.rs`) --> operator: by path, by link
//! ```
//!
//! Deliberately absent: decisions. A policy sees demand and profiles (`service/policy/src/lib.rs`): one that followed rates would move flows, which change rates.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use mccs_config::service::FlowPath;
use serde::{Deserialize, Serialize};

use mccs_model::Name;
use mccs_telemetry::flows::{PathView, path_called, path_name};

/// Hosts look so often, and tell at most as often.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Paths that a host tells of apart, those that carry most: with the longest names they fit a message.
pub const PATHS_MAX: usize = 256;
/// A flow below this rate sends nothing.
const RATE_MIN_BPS: u64 = 1_000_000;
/// A rate that differs from what was told by more than this part of it is news.
const NEWS_PART: u64 = 8;

/// Rate of a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PathRate {
    /// The host that it leads to.
    pub to: String,
    /// Steering of packets there; without the priority, which all paths of a network have.
    pub path: FlowPath,
    /// Payload in bits per second.
    pub bps: u64,
}

/// Rates of all flows of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostRates {
    /// At most [`PATHS_MAX`], those that carry most.
    pub paths: Vec<PathRate>,
    /// Over all other paths, in bits of payload per second.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub others_bps: u64,
}

fn is_nothing(bps: &u64) -> bool {
    *bps == 0
}

impl HostRates {
    /// Checks what a host has told.
    ///
    /// # Errors
    /// The mistake in it, in words.
    pub fn check(&self) -> Result<(), &'static str> {
        if self.paths.len() > PATHS_MAX {
            Err("it tells of too many paths")
        } else if !self.paths.iter().all(|path| Name::new(&path.to).is_some()) {
            Err("it tells of a path to a host that cannot be")
        } else {
            Ok(())
        }
    }

    /// Whether much of it is not as another says.
    fn is_news_after(&self, told: &HostRates) -> bool {
        let differs = |now: u64, then: u64| now.abs_diff(then) > then / NEWS_PART;
        let known = |path: &PathRate| {
            let is_same = |other: &&PathRate| (&other.to, &other.path) == (&path.to, &path.path);
            told.paths.iter().find(is_same).is_some_and(|other| !differs(path.bps, other.bps))
        };
        self.paths.len() != told.paths.len()
            || !self.paths.iter().all(known)
            || differs(self.others_bps, told.others_bps)
    }
}

/// Key of flows that are counted together: the host that they lead to, and their path's name.
type Key = (String, String);

/// A host's eye on its flows.
#[derive(Debug, Default)]
pub struct RateWatch {
    /// When it looked last, and what every path had carried.
    last: Option<(Instant, BTreeMap<Key, u64>)>,
    told: HostRates,
}

impl RateWatch {
    /// Whoever is told now knows nothing.
    pub fn forget(&mut self) {
        *self = RateWatch::default();
    }

    /// When it is to look again: at once where there are communicators and it has not looked yet; never where there is nothing to see.
    #[must_use]
    pub fn next_look(&self, has_comms: bool, now: Instant) -> Option<Instant> {
        match &self.last {
            Some((at, _)) => Some(*at + LOOK_EVERY),
            None => has_comms.then_some(now),
        }
    }

    /// Looks. Returns what to tell, if it is news.
    pub fn look(&mut self, views: &[PathView], has_comms: bool, now: Instant) -> Option<HostRates> {
        let mut bytes: BTreeMap<Key, u64> = BTreeMap::new();
        let mut paths: BTreeMap<Key, Option<FlowPath>> = BTreeMap::new();
        for view in views.iter().filter(|view| view.sends) {
            let path = path_called(&view.path).map(|path| mccs_model::path::FlowPath { priority: None, ..path });
            let name = path.as_ref().map_or_else(|| view.path.clone(), |path| path_name(Some(path)));
            let key = (view.peer.clone(), name);
            *bytes.entry(key.clone()).or_default() += view.bytes;
            paths.entry(key).or_insert_with(|| path.as_ref().map(Into::into));
        }
        let before = self.last.take();
        let rates = before.map(|(at, before)| {
            let took = now.saturating_duration_since(at).as_secs_f64();
            let rate = |(key, all): (&Key, &u64)| {
                let sent = all.saturating_sub(before.get(key).copied().unwrap_or(0));
                (key.clone(), (sent as f64 * 8.0 / took.max(1e-9)) as u64)
            };
            rates_of(bytes.iter().map(rate), &paths)
        });
        let news = rates.filter(|rates| rates.is_news_after(&self.told));
        if let Some(news) = &news {
            self.told = news.clone();
        }
        // It looks on for as long as somebody may send, or something else was told last.
        let goes_on = has_comms || self.told != HostRates::default();
        self.last = goes_on.then_some((now, bytes));
        news
    }
}

/// The paths that carry most apart, all others together.
fn rates_of(all: impl Iterator<Item = (Key, u64)>, paths: &BTreeMap<Key, Option<FlowPath>>) -> HostRates {
    let mut rates = HostRates::default();
    for (key, bps) in all {
        match paths.get(&key) {
            Some(Some(path)) if bps >= RATE_MIN_BPS => {
                rates.paths.push(PathRate { to: key.0, path: path.clone(), bps });
            }
            _ => rates.others_bps = rates.others_bps.saturating_add(bps),
        }
    }
    rates.paths.sort_by_key(|path| std::cmp::Reverse(path.bps));
    rates.others_bps += rates.paths.drain(PATHS_MAX.min(rates.paths.len())..).map(|path| path.bps).sum::<u64>();
    if rates.others_bps < RATE_MIN_BPS {
        rates.others_bps = 0;
    }
    rates
}

#[cfg(test)]
mod tests;
