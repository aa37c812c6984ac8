//! Inventories of all hosts, compared with the topology in force.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use mccs_config::topology::ActualHost;

use crate::cluster::hosts::Hosts;
use crate::config::cluster_config::ClusterConfig;
use crate::history::{History, Went};
use crate::inventory::Inventory;
use mccs_model::Name;

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Inventories {
    by_host: BTreeMap<Name, Inventory>,
    /// The topology in force is to be compared with the hosts.
    is_to_compare: bool,
    /// Contradictions between them and it.
    contradictions: Vec<String>,
}

impl Inventories {
    pub(crate) fn get(&self, host: &Name) -> Option<&Inventory> {
        self.by_host.get(host)
    }

    /// A host has other devices than it had.
    pub(crate) fn insert(&mut self, host: &Name, inventory: Inventory) {
        self.by_host.insert(host.clone(), inventory);
        self.is_to_compare = true;
    }

    /// A host is no longer there. Returns whether it had said what it has.
    pub(crate) fn lost(&mut self, host: &Name) -> bool {
        let had = self.by_host.remove(host).is_some();
        self.is_to_compare |= had;
        had
    }

    /// Another topology may be in force.
    pub(crate) fn compare_again(&mut self) {
        self.is_to_compare = true;
    }

    /// The hosts of the cluster, and what they have said of themselves.
    pub(crate) fn actual_hosts<'a>(&'a self, hosts: &'a Hosts) -> Vec<ActualHost<'a>> {
        let names = hosts.iter().map(|(host, _)| (host.as_str(), self.by_host.get(host)));
        names.map(|(name, inventory)| inventory.map_or(ActualHost::named(name), |has| has.of(name))).collect()
    }

    /// Tenants that hosts are configured with; `None` where one of those hosts has not said whom it serves, or none has said anything.
    pub(crate) fn tenants(&self) -> Option<BTreeSet<&str>> {
        let mut tenants = BTreeSet::new();
        for inventory in self.by_host.values() {
            tenants.extend(inventory.tenants.as_ref()?.iter().map(String::as_str));
        }
        (!self.by_host.is_empty()).then_some(tenants)
    }

    /// Contradictions between the topology in force and hosts.
    pub(crate) fn contradictions(&self) -> &[String] {
        &self.contradictions
    }

    /// Compares the topology in force with what hosts have said since, where either is another one. A contradiction is told. The topology
    /// stays in force, as all that was decided by it does.
    pub(crate) fn compare(
        &mut self,
        config: Option<&ClusterConfig>,
        hosts: &Hosts,
        history: &mut History,
        now: Instant,
    ) {
        if !std::mem::take(&mut self.is_to_compare) {
            return;
        }
        let Some(config) = config else { return };
        let found = config.contradictions(&self.actual_hosts(hosts));
        for contradiction in found.iter().filter(|found| !self.contradictions.contains(found)) {
            tracing::warn!(contradiction, "the topology in force contradicts a host");
            history.note("topology contradicted by a host", contradiction.as_str(), Went::Done, now);
        }
        self.contradictions = found;
    }
}
