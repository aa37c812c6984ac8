//! Links that are not as the topology says: an operator, or a monitor, has said so.

use std::collections::BTreeMap;

use mccs_config::Rate;
use serde::{Deserialize, Serialize};

use crate::topology::Topology;

/// Links that are out of order at a time; a network with more is not described by its topology any more.
const LINKS_MAX: usize = 4096;

/// How a link is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkState {
    /// As the topology says.
    Up,
    /// It carries nothing.
    Down,
    /// Each of its directions carries so much.
    Rate(Rate),
}

impl std::fmt::Display for LinkState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LinkState::Up => f.write_str("up"),
            LinkState::Down => f.write_str("down"),
            LinkState::Rate(rate) => rate.fmt(f),
        }
    }
}

/// See the module's documentation. By lower and upper end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Links(BTreeMap<(String, String), LinkState>);

impl Links {
    /// Notes how a link is. Returns whether that is news.
    ///
    /// # Errors
    /// There is no such link, or too many are out of order.
    pub fn set(&mut self, topology: &Topology, lower: &str, upper: &str, state: LinkState) -> Result<bool, String> {
        if topology.links_between(lower, upper).is_empty() {
            return Err(format!(
                "there is no link between {lower:?} and {upper:?}; name a leaf and a spine, or a host and a leaf"
            ));
        }
        let key = (lower.to_owned(), upper.to_owned());
        if state == LinkState::Up {
            return Ok(self.0.remove(&key).is_some());
        }
        if self.0.len() >= LINKS_MAX && !self.0.contains_key(&key) {
            return Err(format!("{LINKS_MAX} links are out of order already"));
        }
        Ok(self.0.insert(key, state) != Some(state))
    }

    /// Bits per second that every link carries now, by link. Names that a topology does not have say nothing.
    #[must_use]
    pub fn capacities(&self, topology: &Topology) -> Vec<f64> {
        let mut capacities = topology.rates().to_vec();
        for ((lower, upper), state) in &self.0 {
            for link in topology.links_between(lower, upper).into_iter().flat_map(|link| [link, link.reverse()]) {
                capacities[link.index()] = match state {
                    LinkState::Up => capacities[link.index()],
                    LinkState::Down => 0.0,
                    LinkState::Rate(rate) => rate.0 as f64,
                };
            }
        }
        capacities
    }

    /// All that are out of order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str, LinkState)> {
        self.0.iter().map(|((lower, upper), state)| (lower.as_str(), upper.as_str(), *state))
    }
}
