//! Links that are down or slower than the topology says, and the capacities that are left.

mod link_name;
pub mod link_overrides;
pub(crate) mod link_state;

use std::collections::{BTreeMap, BTreeSet};

use mccs_config::Rate;
use mccs_config::service::{Device, TransportKind};

pub use crate::links::link_name::LinkName;
use crate::links::link_overrides::{LinkOverride, LinkOverrides};
pub use crate::links::link_state::LinkState;
use mccs_policy::topology::{HostId, Port, Topology};

/// A link that hosts have found dead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadLink {
    /// The link.
    pub link: LinkName,
    /// Why they say so.
    pub why: String,
}

/// Hosts' news of links.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FoundNews {
    /// Links that were not dead before.
    pub dead: Vec<DeadLink>,
    /// Links that are well again.
    pub well: Vec<DeadLink>,
}

/// See the module's documentation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Links {
    said: LinkOverrides,
    /// How many words were heard.
    words: u64,
    /// Those that hosts have found dead, and why.
    found: BTreeMap<LinkName, String>,
    /// Network interfaces that carry nothing, by their host, which says so.
    down: BTreeMap<String, BTreeSet<Device>>,
}

impl Links {
    /// The link between two switches, or a host and a switch, whichever is named first: its lower end, then its upper one.
    #[must_use]
    pub fn ends<'a>(topology: &Topology, one: &'a str, other: &'a str) -> (&'a str, &'a str) {
        let is_reversed =
            topology.links_between(one, other).is_empty() && !topology.links_between(other, one).is_empty();
        if is_reversed { (other, one) } else { (one, other) }
    }

    /// Notes how a link is, as an operator says in a life of the controller. Returns what hosts are to keep, where it is news.
    ///
    /// # Errors
    /// There is no such link, it never carries so much, or too many are out of order.
    pub fn set(
        &mut self,
        topology: &Topology,
        lower: &str,
        upper: &str,
        state: LinkState,
        life: u64,
    ) -> Result<Option<LinkOverride>, String> {
        let links = topology.links_between(lower, upper);
        let rates = links.iter().map(|link| topology.rates()[link.index()]);
        let Some(most) = rates.max_by(f64::total_cmp) else {
            return Err(format!(
                "there is no link between {lower:?} and {upper:?}; name a leaf and a spine, or a host and a leaf, in either order"
            ));
        };
        if let LinkState::Rate(rate) = state
            && rate.0 as f64 > most
        {
            let most = Rate(most as u64);
            return Err(format!(
                "the link between {lower:?} and {upper:?} carries {most}, says the topology, not {rate}"
            ));
        }
        let news = self.said.say(lower, upper, state, life)?;
        self.words += u64::from(news.is_some());
        Ok(news)
    }

    /// A host has kept what an operator has said of a link. Returns whether that is news.
    pub fn merge(&mut self, link: LinkOverride) -> bool {
        let is_news = self.said.merge(link);
        self.words += u64::from(is_news);
        is_news
    }

    /// Grows with every word that is news.
    #[must_use]
    pub fn words(&self) -> u64 {
        self.words
    }

    /// All that hosts are to keep, in parts that fit a message.
    pub fn to_keep(&self) -> impl Iterator<Item = Vec<LinkOverride>> {
        self.said.messages()
    }

    /// These are all that hosts have found dead. Returns those that are new, and those that are well again.
    pub fn set_found(&mut self, found: BTreeMap<LinkName, String>) -> FoundNews {
        let before = std::mem::replace(&mut self.found, found);
        let besides = |some: &BTreeMap<LinkName, String>, others: &BTreeMap<LinkName, String>| {
            let only = some.iter().filter(|(link, _)| !others.contains_key(link));
            only.map(|(link, why)| DeadLink { link: link.clone(), why: why.clone() }).collect()
        };
        FoundNews { dead: besides(&self.found, &before), well: besides(&before, &self.found) }
    }

    /// All that hosts have found dead, and why.
    pub fn found(&self) -> impl Iterator<Item = (&LinkName, &str)> {
        self.found.iter().map(|(link, why)| (link, why.as_str()))
    }

    /// Network interfaces of a host carry nothing, as it says: these are all. Returns those that are new, and those that are well again.
    pub fn set_down(&mut self, host: &str, down: BTreeSet<Device>) -> [Vec<Device>; 2] {
        let before = self.down.insert(host.to_owned(), down.clone()).unwrap_or_default();
        if down.is_empty() {
            self.down.remove(host);
        }
        [&down - &before, &before - &down].map(|devices| devices.into_iter().collect())
    }

    /// NICs of the topology that carry nothing, as their hosts say, and what these call them.
    pub fn nics_down<'a>(&'a self, topology: &'a Topology) -> impl Iterator<Item = (Port, &'a Device)> {
        let named = self.down.iter().filter_map(|(host, down)| Some((topology.host_named(host)?, down)));
        let of_host = move |(host, down): (HostId, &'a BTreeSet<Device>)| {
            down.iter()
                .filter_map(move |device| Some((topology.port_called(host, device, TransportKind::Tcp)?, device)))
        };
        named.flat_map(of_host)
    }

    /// Bits per second that every link carries now, by link. Names that a topology does not have say nothing.
    #[must_use]
    pub fn capacities(&self, topology: &Topology) -> Vec<f64> {
        let mut capacities = topology.rates().to_vec();
        let found = self.found().map(|(link, _)| (link, LinkState::Down));
        for (LinkName { lower, upper }, state) in self.iter().chain(found) {
            for link in topology.links_between(lower, upper).into_iter().flat_map(|link| [link, link.reverse()]) {
                capacities[link.index()] = match state {
                    LinkState::Up => capacities[link.index()],
                    LinkState::Down => 0.0,
                    // It was said of another topology, perhaps.
                    LinkState::Rate(rate) => capacities[link.index()].min(rate.0 as f64),
                };
            }
        }
        for link in self.nics_down(topology).map(|(port, _)| topology.up_link(port)) {
            (capacities[link.index()], capacities[link.reverse().index()]) = (0.0, 0.0);
        }
        capacities
    }

    /// All of which somebody has said that they are out of order.
    pub fn iter(&self) -> impl Iterator<Item = (&LinkName, LinkState)> {
        self.said.out_of_order()
    }
}

#[cfg(test)]
mod tests {
    use mccs_config::TopologyFile;

    use super::*;

    #[test]
    fn what_was_said_of_a_link_gives_it_no_more_than_the_topology() {
        let text = include_str!("../../../config/examples/topology.toml");
        let topology = |rate: &str| {
            let text = text.replace("leaf_spine = \"50Gbit/s\"", &format!("leaf_spine = {rate:?}"));
            Topology::from_file(&TopologyFile::parse(&text, "topology.toml").unwrap()).unwrap()
        };
        let mut links = Links::default();
        links.set(&topology("50Gbit/s"), "leaf0", "spine0", LinkState::Rate(Rate(40_000_000_000)), 1).unwrap();
        for (rate, expected) in [("50Gbit/s", 40e9), ("25Gbit/s", 25e9)] {
            let topology = topology(rate);
            let link = topology.links_between("leaf0", "spine0")[0];
            assert_eq!(links.capacities(&topology)[link.index()], expected);
        }
    }
}
