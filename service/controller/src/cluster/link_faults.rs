//! Faulty links: what operators have said of them, and what hosts have found out.
//!
//! Hosts find two things: paths on which nothing is answered, from which dead links follow (`dead_paths.rs`), and NICs that are down.
//! Operators' words and hosts' findings are kept apart (`links.rs`).

use std::time::{Duration, Instant};

use mccs_config::service::{Device, FlowPath, TransportKind};

use crate::cluster::dead_paths::DeadPaths;
use crate::cluster::hosts::Hosts;
use crate::config::cluster_config::ClusterConfig;
use crate::effects::Effects;
use crate::inventory::{Interfaces, Inventory};
use crate::links::link_overrides::LinkOverride;
use crate::links::{DeadLink, FoundNews, LinkName, LinkState, Links};
use crate::messages::message::ControllerMessage;
use crate::messages::outbox::Outbox;
use mccs_model::Name;
use mccs_policy::topology::Port;

/// Hosts test their links at most so often, however many suspect a path.
const LINKS_TESTED_EVERY: Duration = Duration::from_millis(500);

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct LinkFaults {
    links: Links,
    dead_paths: DeadPaths,
    tested_at: Option<Instant>,
}

impl LinkFaults {
    /// How links are, for plans.
    pub(crate) fn links(&self) -> &Links {
        &self.links
    }

    /// Keeps operators' overrides of an earlier life.
    pub(crate) fn remember(&mut self, links: Vec<LinkOverride>) {
        for link in links {
            self.links.merge(link);
        }
    }

    /// A host has kept what operators have said of links. All hosts are to keep what is news.
    pub(crate) fn kept(&mut self, from: &Name, links: Vec<LinkOverride>, hosts: &Hosts, effects: &mut Effects) {
        for link in links.into_iter().filter(|link| self.links.merge(link.clone())).collect::<Vec<_>>() {
            let LinkOverride { lower, upper, state, .. } = &link;
            effects.decisions.because(format!("link {lower} {upper} {state}, as host {from} has kept it"));
            effects.outbox.have_kept(hosts.synced(), vec![link]);
        }
    }

    /// Has a host keep all that operators have said.
    pub(crate) fn have_all_kept(&self, host: &Name, outbox: &mut Outbox) {
        self.links.to_keep().for_each(|links| outbox.have_kept(std::iter::once(host), links));
    }

    /// An operator says how a link is. Returns what hosts are to keep, where that is news.
    ///
    /// # Errors
    /// As [`Links::set`].
    pub(crate) fn set(
        &mut self,
        config: &ClusterConfig,
        lower: &str,
        upper: &str,
        state: LinkState,
        life: u64,
    ) -> Result<Option<LinkOverride>, String> {
        self.links.set(&config.network.topology, lower, upper, state, life)
    }

    /// Has all hosts look at their links to each other: what is about to be ordered needs them.
    pub(crate) fn test(&mut self, hosts: &Hosts, outbox: &mut Outbox, now: Instant) {
        if self.tested_at.is_some_and(|at| now.saturating_duration_since(at) < LINKS_TESTED_EVERY) {
            return;
        }
        self.tested_at = Some(now);
        outbox.tell_all(hosts.there(), &ControllerMessage::TestLinks);
    }

    /// A host says whether another answers it over a path. Returns whether that is news.
    pub(crate) fn hear_path(&mut self, from: &Name, peer: &str, path: &FlowPath, answers: bool) -> bool {
        self.dead_paths.hear(from, peer, path, answers)
    }

    /// Forgets what a host has said of paths. Returns whether there was anything.
    pub(crate) fn forget(&mut self, host: &Name) -> bool {
        self.dead_paths.forget(host)
    }

    /// Concludes anew which links are dead, before a decision: the topology may be another one.
    pub(crate) fn update_found(&mut self, config: &ClusterConfig) {
        let _ = self.links.set_found(self.dead_paths.links(config));
    }

    /// Concludes from what hosts say of paths which links are dead; `why_not` is why one is taken for dead no more.
    pub(crate) fn find_dead(
        &mut self,
        config: Option<&ClusterConfig>,
        why_not: &str,
        effects: &mut Effects,
        now: Instant,
    ) {
        let Some(config) = config else { return };
        let FoundNews { dead, well } = self.links.set_found(self.dead_paths.links(config));
        for DeadLink { link: LinkName { lower, upper }, why } in dead {
            tracing::warn!(lower, upper, why, "link found dead");
            effects.decide_for(format!("link {lower} {upper} found dead"), &why, now);
        }
        for DeadLink { link: LinkName { lower, upper }, .. } in well {
            tracing::info!(lower, upper, why = why_not, "link not taken for dead any more");
            effects.decide_for(format!("link {lower} {upper} taken for dead no more"), why_not, now);
        }
    }

    /// A host says which of its network interfaces carry nothing. Those that the topology names are links to its leaves.
    pub(crate) fn hear_interfaces(
        &mut self,
        host: &Name,
        inventory: &Inventory,
        config: Option<&ClusterConfig>,
        effects: &mut Effects,
        now: Instant,
    ) {
        let down = inventory.interfaces.iter().flat_map(Interfaces::names_down);
        let down = down.filter_map(|name| name.parse().ok()).collect();
        let news = self.links.set_down(host.as_str(), down);
        let Some(config) = config else { return };
        let Some(id) = config.network.hosts.get(host.as_str()) else { return };
        for (devices, is) in news.into_iter().zip(["down", "up again"]) {
            let named =
                |device: &Device| config.network.topology.port_called(*id, device, TransportKind::Tcp).is_some();
            for device in devices.into_iter().filter(named) {
                tracing::warn!(%host, %device, "a NIC is {is}");
                effects.decide_for(format!("NIC {device} of host {host} is {is}"), "as the host says", now);
            }
        }
    }

    /// Links that hosts have found dead, or whose NIC is down: their ends, and why.
    pub(crate) fn dead_links(&self, config: Option<&ClusterConfig>) -> Vec<[String; 3]> {
        let found = self.links.found().map(|(link, why)| [&link.lower, &link.upper, why].map(str::to_owned));
        let nics = config.into_iter().flat_map(|config| {
            let topology = &config.network.topology;
            let link = |(port, device): (Port, &Device)| {
                let (host, leaf) = (topology.host_name(port.host), topology.leaf_name(port));
                [format!("{host} {device}"), leaf.to_owned(), format!("host {host} says that its NIC is down")]
            };
            self.links.nics_down(topology).map(link)
        });
        found.chain(nics).collect()
    }
}
