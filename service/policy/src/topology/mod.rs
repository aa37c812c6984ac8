//! Network topology as policies see it: links with rates, hosts with NICs, and the paths between
//! any two of them.
//!
//! A folded Clos of two or three tiers, held as numbers: NICs hang on leaves, every leaf has a link to every spine of its pod,
//! and where there are several pods every spine has links to cores of its own. Between two leaves of a pod there is a path a
//! spine, between pods one a spine and core. Nothing is stored for a pair of hosts: a route is computed from two ports and the
//! number of a path, so that ten thousand hosts cost no more than their links.
//!
//! Every link has two directions, which are two [`LinkId`]s: an even one up, towards the spines, and the odd one after it down.
//!
//! Deliberately absent: what is measured (views carry the capacities that links have now), and other shapes of networks.

mod build;

use mccs_config::service::{Device, FlowPath, TransportKind};

pub use build::{Clos, TopologyError};

/// A host, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct HostId(pub u32);

/// One direction of a link, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct LinkId(pub u32);

impl LinkId {
    /// As an index into what is kept by link.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// The other direction of the same link.
    #[must_use]
    pub fn reverse(self) -> LinkId {
        LinkId(self.0 ^ 1)
    }
}

/// A NIC of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct Port {
    /// The tenant's name.
    pub host: HostId,
    /// Number among the host's NICs.
    pub nic: u16,
}

/// Links that a route goes over at most: up and down at either end, and over two tiers of switches between.
const ROUTE_LINKS_MAX: usize = 6;

/// The links of one path between two ports, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    links: [LinkId; ROUTE_LINKS_MAX],
    count: u8,
}

impl Route {
    fn new(parts: &[LinkId]) -> Self {
        let mut links = [LinkId(0); ROUTE_LINKS_MAX];
        links[..parts.len()].copy_from_slice(parts);
        Route { links, count: parts.len() as u8 }
    }

    /// In order, from the sender's NIC to the receiver's.
    #[must_use]
    pub fn links(&self) -> &[LinkId] {
        &self.links[..usize::from(self.count)]
    }
}

/// The links between the leaves of two ports: those of path number n go over spine n / [`Between::paths_per_spine`].
#[derive(Debug, Clone, Copy)]
pub struct Between {
    /// For either leaf, the link up to the first spine; those to the others follow.
    leaves: [LinkId; 2],
    /// For either pod, the link from the first spine up to the first core; those of the same spine, then of the others,
    /// follow.
    cores: Option<[LinkId; 2]>,
    spines: u32,
    cores_per_spine: u32,
}

impl Between {
    /// Spines that there are paths over; none within a leaf.
    #[must_use]
    pub fn spine_count(&self) -> u32 {
        self.spines
    }

    /// Paths over each.
    #[must_use]
    pub fn paths_per_spine(&self) -> u32 {
        self.cores_per_spine
    }

    /// The first link of all paths over a spine, and the last.
    #[must_use]
    pub fn leaf_links(&self, spine: u32) -> [LinkId; 2] {
        let [up, down] = self.leaves.map(|first| LinkId(first.0 + 2 * spine));
        [up, down.reverse()]
    }

    /// The links of a path between its first and its last, in order; `None` where it has no more than those.
    #[must_use]
    pub fn core_links(&self, path: u32) -> Option<[LinkId; 2]> {
        let [up, down] = self.cores?.map(|first| LinkId(first.0 + 2 * path));
        Some([up, down.reverse()])
    }
}

#[derive(Debug, Clone)]
struct Host {
    name: String,
    rack: u32,
    pod: u32,
    /// Number of its first NIC among all NICs.
    first_nic: u32,
    /// Leaf of each NIC.
    leaves: Vec<u32>,
    nic_of_device: Vec<u16>,
    /// The host's names for each NIC, if known.
    nic_names: Vec<NicNames>,
}

/// A host's names for a NIC.
#[derive(Debug, Clone, Default)]
struct NicNames {
    /// As a network interface.
    interface: Option<Device>,
    /// As an RDMA device.
    rdma: Option<Device>,
}

impl NicNames {
    fn of(&self, transport: TransportKind) -> Option<&Device> {
        match transport {
            TransportKind::Tcp => self.interface.as_ref(),
            TransportKind::Rdma => self.rdma.as_ref(),
        }
    }
}

#[derive(Debug, Clone)]
struct Spine {
    name: String,
    steering: FlowPath,
}

/// See the module's documentation.
#[derive(Debug, Clone)]
pub struct Topology {
    hosts: Vec<Host>,
    /// Name and pod of each leaf.
    leaves: Vec<(String, u32)>,
    /// Spines of a pod; each pod has as many.
    spines: Vec<Spine>,
    /// Cores that each spine of a pod has links to.
    cores_per_spine: u32,
    /// Priority and code point of each queue of the switches.
    classes: Vec<(u32, u32)>,
    nics: u32,
    /// Bits per second by link.
    rates: Vec<f64>,
}

/// Ends of a link, in its direction: a host, with the number of its NIC if it has several, or a switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkEnds {
    /// Its beginning.
    pub from: String,
    /// Its end.
    pub to: String,
}

impl Topology {
    /// Number of hosts: ids are 0 to that.
    #[must_use]
    pub fn host_count(&self) -> usize {
        self.hosts.len()
    }

    /// Name of a host.
    #[must_use]
    pub fn host_name(&self, host: HostId) -> &str {
        &self.hosts[host.0 as usize].name
    }

    /// The host of a name. Looks at each: for a few names.
    #[must_use]
    pub fn host_named(&self, name: &str) -> Option<HostId> {
        self.hosts.iter().position(|host| host.name == name).map(|host| HostId(host as u32))
    }

    /// Devices of a host.
    #[must_use]
    pub fn device_count(&self, host: HostId) -> u32 {
        self.hosts[host.0 as usize].nic_of_device.len() as u32
    }

    /// Hosts of a rack reach each other, NIC by NIC, without a spine.
    #[must_use]
    pub fn rack(&self, host: HostId) -> u32 {
        self.hosts[host.0 as usize].rack
    }

    /// Hosts of a pod reach each other without a core.
    #[must_use]
    pub fn pod(&self, host: HostId) -> u32 {
        self.hosts[host.0 as usize].pod
    }

    /// The NIC that is nearest to a device; the first where there is no such device.
    #[must_use]
    pub fn port_of(&self, host: HostId, device: u32) -> Port {
        let nics = &self.hosts[host.0 as usize].nic_of_device;
        Port { host, nic: nics.get(device as usize).copied().unwrap_or(0) }
    }

    /// NICs of a host.
    #[must_use]
    pub fn nic_count(&self, host: HostId) -> usize {
        self.hosts[host.0 as usize].leaves.len()
    }

    /// The host's name for a NIC when it sends over a transport.
    #[must_use]
    pub fn nic_name(&self, port: Port, transport: TransportKind) -> Option<&Device> {
        self.hosts[port.host.0 as usize].nic_names.get(usize::from(port.nic))?.of(transport)
    }

    /// The NIC that a host calls so when it sends over a transport.
    #[must_use]
    pub fn port_called(&self, host: HostId, name: &Device, transport: TransportKind) -> Option<Port> {
        let names = &self.hosts[host.0 as usize].nic_names;
        let nic = names.iter().position(|names| names.of(transport) == Some(name))?;
        Some(Port { host, nic: nic as u16 })
    }

    /// Number of links, both directions counted.
    #[must_use]
    pub fn link_count(&self) -> usize {
        self.rates.len()
    }

    /// Bits per second that every link carries when it is well, by link.
    #[must_use]
    pub fn rates(&self) -> &[f64] {
        &self.rates
    }

    /// The link from a NIC to its leaf.
    #[must_use]
    pub fn up_link(&self, port: Port) -> LinkId {
        LinkId(2 * self.nic(port))
    }

    /// Whether a link is one between a NIC and its leaf.
    #[must_use]
    pub fn is_edge(&self, link: LinkId) -> bool {
        link.0 < 2 * self.nics
    }

    /// Number of paths between two ports, at least 1; paths are 0 to that.
    #[must_use]
    pub fn path_count(&self, from: Port, to: Port) -> u32 {
        let (a, b) = (self.leaf(from), self.leaf(to));
        if a == b {
            1
        } else if self.leaves[a as usize].1 == self.leaves[b as usize].1 {
            self.spines.len() as u32
        } else {
            self.spines.len() as u32 * self.cores_per_spine
        }
    }

    /// The links of a path between two ports of different hosts. Paths beyond the last start again with the first.
    #[must_use]
    pub fn route(&self, from: Port, to: Port, path: u32) -> Route {
        let (up, down) = (self.up_link(from), self.up_link(to).reverse());
        let (a, b) = (self.leaf(from), self.leaf(to));
        if a == b {
            return Route::new(&[up, down]);
        }
        let path = path % self.path_count(from, to);
        let (pod_a, pod_b) = (self.leaves[a as usize].1, self.leaves[b as usize].1);
        if pod_a == pod_b {
            return Route::new(&[up, self.leaf_link(a, path), self.leaf_link(b, path).reverse(), down]);
        }
        let (spine, core) = (path / self.cores_per_spine, path % self.cores_per_spine);
        Route::new(&[
            up,
            self.leaf_link(a, spine),
            self.core_link(pod_a, spine, core),
            self.core_link(pod_b, spine, core).reverse(),
            self.leaf_link(b, spine).reverse(),
            down,
        ])
    }

    /// Paths between two leaves, for whoever looks at all of them.
    #[must_use]
    pub fn between(&self, from: Port, to: Port) -> Between {
        let (a, b) = (self.leaf(from), self.leaf(to));
        let (pod_a, pod_b) = (self.leaves[a as usize].1, self.leaves[b as usize].1);
        let spines = if a == b { 0 } else { self.spines.len() as u32 };
        let cores = (pod_a != pod_b).then(|| [self.core_link(pod_a, 0, 0), self.core_link(pod_b, 0, 0)]);
        Between {
            leaves: [self.leaf_link(a, 0), self.leaf_link(b, 0)],
            cores,
            spines,
            cores_per_spine: if cores.is_some() { self.cores_per_spine } else { 1 },
        }
    }

    /// The spine, by its number in its pod, that a path goes over; `None` where it goes over none.
    #[must_use]
    pub fn spine_of(&self, from: Port, to: Port, path: u32) -> Option<u32> {
        let (a, b) = (self.leaf(from), self.leaf(to));
        let crosses_pods = self.leaves[a as usize].1 != self.leaves[b as usize].1;
        let path = path % self.path_count(from, to);
        (a != b).then(|| if crosses_pods { path / self.cores_per_spine } else { path })
    }

    /// Spines of a pod.
    #[must_use]
    pub fn spine_count(&self) -> u32 {
        self.spines.len() as u32
    }

    /// The spine of a name, by its number in its pod.
    #[must_use]
    pub fn spine_named(&self, name: &str) -> Option<u32> {
        self.spines.iter().position(|spine| spine.name == name).map(|spine| spine as u32)
    }

    /// Name of a spine.
    #[must_use]
    pub fn spine_name(&self, spine: u32) -> &str {
        &self.spines[spine as usize].name
    }

    /// How a flow is steered over a spine.
    #[must_use]
    pub fn steering(&self, spine: u32) -> &FlowPath {
        &self.spines[spine as usize].steering
    }

    /// The spine to which a path steers, if it does to one. A path may also carry the code point of a class, where the spine does not
    /// ask for another.
    #[must_use]
    pub fn spine_steered_to(&self, path: &FlowPath) -> Option<u32> {
        let is_same = |spine: &u32| {
            let FlowPath { source_ports, dscp, .. } = self.steering(*spine);
            let is_same_dscp =
                *dscp == path.dscp || (dscp.is_none() && path.dscp.is_some_and(|dscp| self.is_class(dscp)));
            (source_ports.is_some() || dscp.is_some()) && *source_ports == path.source_ports && is_same_dscp
        };
        (0..self.spine_count()).find(is_same)
    }

    /// Whether switches know a priority by a code point.
    #[must_use]
    pub fn is_class(&self, dscp: u32) -> bool {
        self.classes.iter().any(|class| class.1 == dscp)
    }

    /// Code point by which switches know a priority.
    #[must_use]
    pub fn class_dscp(&self, priority: u32) -> Option<u32> {
        self.classes.iter().find(|class| class.0 == priority).map(|class| class.1)
    }

    /// Name of a NIC's leaf.
    #[must_use]
    pub fn leaf_name(&self, port: Port) -> &str {
        &self.leaves[self.leaf(port) as usize].0
    }

    /// Links between two neighbours by name, upwards: a host's NICs and a leaf, or a leaf and a spine.
    #[must_use]
    pub fn links_between(&self, lower: &str, upper: &str) -> Vec<LinkId> {
        let leaf_named = |name: &str| self.leaves.iter().position(|(leaf, _)| leaf == name).map(|leaf| leaf as u32);
        if let (Some(leaf), Some(spine)) = (leaf_named(lower), self.spine_named(upper)) {
            return vec![self.leaf_link(leaf, spine)];
        }
        let (Some(host), Some(leaf)) = (self.host_named(lower), leaf_named(upper)) else { return Vec::new() };
        let nics = 0..self.hosts[host.0 as usize].leaves.len() as u16;
        let ports = nics.map(|nic| Port { host, nic }).filter(|port| self.leaf(*port) == leaf);
        ports.map(|port| self.up_link(port)).collect()
    }

    /// Names of what a link leads from and to. `None` of links to cores, which have no names.
    #[must_use]
    pub fn link_ends(&self, link: LinkId) -> Option<LinkEnds> {
        let number = link.0 / 2;
        let (lower, upper) = match number.checked_sub(self.nics) {
            None => {
                let host = self.hosts.partition_point(|host| host.first_nic <= number).checked_sub(1)?;
                let host = &self.hosts[host];
                let nic = number - host.first_nic;
                let leaf = *host.leaves.get(nic as usize)?;
                let name = if host.leaves.len() > 1 { format!("{} NIC {nic}", host.name) } else { host.name.clone() };
                (name, &self.leaves[leaf as usize].0)
            }
            Some(number) => {
                let leaf = number.checked_div(self.spine_count())?;
                let spine = number % self.spine_count();
                (self.leaves.get(leaf as usize)?.0.clone(), &self.spines[spine as usize].name)
            }
        };
        let is_up = link.0.is_multiple_of(2);
        let upper = upper.clone();
        Some(if is_up { LinkEnds { from: lower, to: upper } } else { LinkEnds { from: upper, to: lower } })
    }

    fn nic(&self, port: Port) -> u32 {
        self.hosts[port.host.0 as usize].first_nic + u32::from(port.nic)
    }

    fn leaf(&self, port: Port) -> u32 {
        self.hosts[port.host.0 as usize].leaves[usize::from(port.nic)]
    }

    fn leaf_link(&self, leaf: u32, spine: u32) -> LinkId {
        LinkId(2 * (self.nics + leaf * self.spines.len() as u32 + spine))
    }

    fn core_link(&self, pod: u32, spine: u32, core: u32) -> LinkId {
        let spines = self.spines.len() as u32;
        let first = self.nics + self.leaves.len() as u32 * spines;
        LinkId(2 * (first + (pod * spines + spine) * self.cores_per_spine + core))
    }
}

#[cfg(test)]
mod tests;
