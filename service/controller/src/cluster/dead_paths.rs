//! Infers dead links from dead paths that hosts report.
//!
//! A host that gets no answer from another over a spine knows that one of two links is dead: that of its own leaf to the spine, or that
//! of the other's. If one link is on all paths over a spine that are said to be dead it is that one; if none is, all of them are left,
//! until hosts say that their paths answer. A host that is answered over no spine at all asks one that is dead itself, or whose leaf is
//! cut off: that says nothing of any link, and no flow would be better off on another.
//!
//! Deliberately absent: paths that nothing steers to, and those between pods, of which this says nothing; and probing, which is the
//! agents' (`service/engines/src/controller/probes.rs`).

use std::collections::{BTreeMap, BTreeSet};

use crate::links::LinkName;
use mccs_config::service::{Device, FlowPath, TransportKind};

use crate::config::cluster_config::ClusterConfig;
use mccs_model::Name;

/// Paths that are kept; a cluster with more dead ones at a time has no network.
const PATHS_MAX: usize = 1 << 16;

/// A path between two hosts, by what steers to it.
type PathKey = (Name, String, (Option<Device>, Option<(u16, u16)>, Option<u32>));

/// See the module's documentation.
#[derive(Debug, Clone, Default)]
pub struct DeadPaths(BTreeMap<PathKey, FlowPath>);

impl DeadPaths {
    /// A host says whether another answers it over a path. Returns whether that is news.
    pub fn hear(&mut self, from: &Name, peer: &str, path: &FlowPath, answers: bool) -> bool {
        let ports = path.source_ports.map(|ports| (ports.first, ports.last));
        let steering = (path.device.clone(), ports, path.dscp);
        let key = (from.clone(), peer.to_owned(), steering);
        if answers {
            return self.0.remove(&key).is_some();
        }
        (self.0.len() < PATHS_MAX || self.0.contains_key(&key)) && self.0.insert(key, path.clone()).is_none()
    }

    /// Forgets what a host has said. Returns whether there was anything.
    pub fn forget(&mut self, from: &Name) -> bool {
        let before = self.0.len();
        self.0.retain(|(by, ..), _| by != from);
        self.0.len() < before
    }

    /// Links that are dead, and who says so.
    #[must_use]
    pub fn links(&self, config: &ClusterConfig) -> BTreeMap<LinkName, String> {
        let topology = &config.network.topology;
        let steered: Vec<_> =
            self.0.iter().filter_map(|(key, path)| Some((key, path, topology.spine_steered_to(path)?))).collect();
        // Spines over which one host is not answered by another; by a device of its own, where it has several.
        let mut silent: BTreeMap<(&Name, &str, Option<&Device>), BTreeSet<u32>> = BTreeMap::new();
        for (key, _, spine) in &steered {
            let (from, peer, (device, ..)) = *key;
            silent.entry((from, peer.as_str(), device.as_ref())).or_default().insert(*spine);
        }
        let all = (0..topology.spine_count())
            .filter(|spine| topology.spine_steered_to(topology.steering(*spine)).is_some())
            .count();
        // By spine: leaves at either end of each dead path, and who says it.
        let mut by_spine: BTreeMap<u32, Vec<([&str; 2], String)>> = BTreeMap::new();
        for ((from, peer, (device, ..)), path, spine) in steered {
            let (Some(a), Some(b)) = (config.network.hosts.get(from.as_str()), config.network.hosts.get(peer)) else {
                continue;
            };
            if silent.get(&(from, peer.as_str(), device.as_ref())).is_some_and(|spines| spines.len() >= all) {
                continue;
            }
            // The other host's port does not depend on the path.
            let called = |transport| topology.port_called(*a, path.device.as_ref()?, transport);
            let device = called(TransportKind::Tcp).or_else(|| called(TransportKind::Rdma));
            let from_port = device.unwrap_or_else(|| topology.port_of(*a, 0));
            let leaves = [from_port, topology.port_of(*b, 0)].map(|port| topology.leaf_name(port));
            if leaves[0] != leaves[1] && topology.pod(*a) == topology.pod(*b) {
                by_spine.entry(spine).or_default().push((leaves, format!("host {from} gets no answer from {peer}")));
            }
        }
        let mut links = BTreeMap::new();
        for (spine, paths) in by_spine {
            let all: BTreeSet<&str> = paths.iter().flat_map(|(leaves, _)| *leaves).collect();
            let is_on_all = |leaf: &&str| paths.iter().all(|(leaves, _)| leaves.contains(leaf));
            let shared: BTreeSet<&str> = all.iter().copied().filter(is_on_all).collect();
            for leaf in if shared.is_empty() { all } else { shared } {
                let why = paths.iter().find(|(leaves, _)| leaves.contains(&leaf)).map(|(_, why)| why.clone());
                let link = LinkName { lower: leaf.to_owned(), upper: topology.spine_name(spine).to_owned() };
                links.insert(link, why.unwrap_or_default());
            }
        }
        links
    }
}
