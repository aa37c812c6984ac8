//! Rates of all hosts' flows, as hosts told them: what an operator sees by path and by link.
//!
//! Rates are of payload, so that a link that is full shows a little less than it carries. A flow whose path the switches' hash chooses is
//! known to cross the links of its NICs, and no others.

use std::collections::{BTreeMap, HashMap};

use mccs_config::service::{FlowPath, TransportKind};
use mccs_model::Name;
use mccs_policy::topology::{HostId, LinkEnds, LinkId, Port, Topology};

use crate::messages::answer::{LinkRateView, PathRateView, RatesView};
use crate::rates::{HostRates, PathRate};

/// Paths and links that the operator is shown, those that carry most: more than anybody reads.
const SHOWN_MAX: usize = 1024;

/// Last reports of all hosts.
#[derive(Debug, Default)]
pub struct ClusterRates(BTreeMap<Name, HostRates>);

impl ClusterRates {
    /// A host tells what its flows send.
    pub fn hear(&mut self, from: &Name, rates: HostRates) {
        self.0.insert(from.clone(), rates);
    }

    /// Forgets what a host has told.
    pub fn forget(&mut self, from: &Name) {
        self.0.remove(from);
    }

    /// For the operator: paths and links that carry something, those first that carry most; `capacities` are what links carry now.
    #[must_use]
    pub fn view(&self, topology: &Topology, hosts: &HashMap<String, HostId>, capacities: &[f64]) -> RatesView {
        let mut links: HashMap<LinkId, u64> = HashMap::new();
        let (mut paths, mut others_bps) = (Vec::new(), 0_u64);
        for (from, rates) in &self.0 {
            others_bps = others_bps.saturating_add(rates.others_bps);
            for PathRate { to, path, bps } in &rates.paths {
                let ends = hosts.get(from.as_str()).copied().zip(hosts.get(to).copied());
                let crossed = ends.map(|(a, b)| links_of(topology, a, b, path)).unwrap_or_default();
                for link in &crossed {
                    let sum = links.entry(*link).or_default();
                    *sum = sum.saturating_add(*bps);
                }
                let least = crossed.iter().map(|link| capacities[link.index()]).min_by(f64::total_cmp);
                paths.push(PathRateView {
                    from: from.to_string(),
                    to: to.clone(),
                    path: path_label(path, topology),
                    bps: *bps,
                    capacity_bps: least.map(|bps| bps as u64),
                });
            }
        }
        let link = |(link, bps): (LinkId, u64)| {
            let LinkEnds { from, to } = topology.link_ends(link)?;
            Some(LinkRateView { from, to, bps, capacity_bps: capacities[link.index()] as u64 })
        };
        let mut links: Vec<LinkRateView> = links.into_iter().filter_map(link).collect();
        paths.sort_by(|a, b| (b.bps, &a.from, &a.to, &a.path).cmp(&(a.bps, &b.from, &b.to, &b.path)));
        links.sort_by(|a, b| (b.bps, &a.from, &a.to).cmp(&(a.bps, &b.from, &b.to)));
        let [more_paths, more_links] = [paths.len(), links.len()].map(|len| len.saturating_sub(SHOWN_MAX) as u64);
        paths.truncate(SHOWN_MAX);
        links.truncate(SHOWN_MAX);
        RatesView { paths, links, more_paths, more_links, others_bps }
    }
}

/// Operators' name for a path: its spine, or what steers to it; and its NIC.
pub(crate) fn path_label(path: &FlowPath, topology: &Topology) -> String {
    let spine = topology.spine_steered_to(path);
    let label = match (path.source_ports, path.dscp, spine) {
        (None, None, _) => "hash".to_owned(),
        (None, Some(dscp), None) if topology.is_class(dscp) => "hash".to_owned(),
        (_, _, Some(spine)) => topology.spine_name(spine).to_owned(),
        (Some(ports), _, None) => format!("source ports {ports}"),
        (None, Some(dscp), None) => format!("code point {dscp}"),
    };
    path.device.as_ref().map_or(label.clone(), |device| format!("{label} by {device}"))
}

/// The links that a path between two hosts is known to cross.
fn links_of(topology: &Topology, from: HostId, to: HostId, path: &FlowPath) -> Vec<LinkId> {
    let only = |host: HostId| (topology.nic_count(host) == 1).then(|| topology.port_of(host, 0));
    let called = |kind| path.device.as_ref().and_then(|device| topology.port_called(from, device, kind));
    let by_rdma = called(TransportKind::Rdma);
    let leaves = called(TransportKind::Tcp).or(by_rdma).or_else(|| only(from));
    // Over RDMA flows come in by the counterpart of the sender's NIC; over TCP by what the receiver's address is of, which nobody tells.
    let counterpart = by_rdma.filter(|port| usize::from(port.nic) < topology.nic_count(to));
    let enters = only(to).or(counterpart.map(|port| Port { host: to, nic: port.nic }));
    match (leaves, enters) {
        (Some(a), Some(b)) if a.host != b.host => {
            let spine = topology.spine_steered_to(path);
            let is_known = spine.is_some() || topology.path_count(a, b) == 1;
            let route = topology.route(a, b, spine.unwrap_or(0));
            route.links().iter().copied().filter(|link| is_known || topology.is_edge(*link)).collect()
        }
        _ => {
            let up = leaves.map(|port| topology.up_link(port));
            up.into_iter().chain(enters.map(|port| topology.up_link(port).reverse())).collect()
        }
    }
}

#[cfg(test)]
mod tests;
