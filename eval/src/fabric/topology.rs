//! Nodes, addresses, links and paths of a fabric, from its specification. It says what is where,
//! before any of it exists.
//!
//! Addresses: device `d` of host `h` of rack `r` is `10.r.h.(d+1)`, its leaf `10.r.h.254`; the link from leaf `l` to spine
//! `s` is a pair from `172.16.0.0/12`. All are private to the fabric's namespaces, so that fabrics may be up side by side.

use std::net::Ipv4Addr;

use mccs_config::Rate;
use serde::Serialize;

use super::spec::FabricSpec;

/// Prefix of every namespace's name: nothing else is ever touched.
pub const PREFIX: &str = "mccs-";
/// Last byte of a leaf's address towards a host.
const GATEWAY: u8 = 254;
/// First address of the links between leaves and spines.
const SWITCH_LINKS: u32 = u32::from_be_bytes([172, 16, 0, 0]);
/// Length of the prefix that a host and its leaf share.
const HOST_PREFIX: u8 = 24;
/// Length of the prefix that a leaf and a spine share.
const SWITCH_PREFIX: u8 = 31;

/// The name of a node's namespace.
#[must_use]
pub fn namespace(fabric: &str, node: &str) -> String {
    format!("{PREFIX}{fabric}-{node}")
}

/// A whole fabric.
#[derive(Debug, Clone, Serialize)]
pub struct Topology {
    /// Its name.
    pub name: String,
    /// In the order of the file.
    pub hosts: Vec<Host>,
    /// By number.
    pub leaves: Vec<Switch>,
    /// By number.
    pub spines: Vec<Switch>,
    /// Ways from a rack to another, one a spine.
    pub paths: Vec<Path>,
    /// Every link, hosts' first.
    #[serde(skip)]
    pub links: Vec<Link>,
}

/// A host.
#[derive(Debug, Clone, Serialize)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Number of its leaf.
    pub leaf: usize,
    /// One a device.
    pub addresses: Vec<Ipv4Addr>,
    /// Its leaf's address.
    pub gateway: Ipv4Addr,
}

/// A leaf or a spine.
#[derive(Debug, Clone, Serialize)]
pub struct Switch {
    /// Its name.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
}

/// The way over one spine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Path {
    /// The spine's name.
    pub spine: String,
    /// First source port that leads over it.
    pub first_port: u16,
    /// Last such port.
    pub last_port: u16,
}

/// A link; either direction carries `rate`.
#[derive(Debug, Clone)]
pub struct Link {
    /// The lower end, then the upper.
    pub ends: [End; 2],
    /// Absent: unshaped.
    pub rate: Option<Rate>,
}

/// One end of a link.
#[derive(Debug, Clone)]
pub struct End {
    /// The node's namespace.
    pub namespace: String,
    /// The interface's name there, which is the other end's node; a host's is `eth0`.
    pub interface: String,
    /// Its addresses.
    pub addresses: Vec<Ipv4Addr>,
    /// Length of their prefix.
    pub prefix: u8,
}

/// The addresses of all hosts of a rack.
#[must_use]
pub fn rack_prefix(leaf: usize) -> String {
    format!("10.{leaf}.0.0/16")
}

/// Addresses of the link between a leaf and a spine: the leaf's, the spine's.
#[must_use]
pub fn switch_link(spec: &FabricSpec, leaf: usize, spine: usize) -> [Ipv4Addr; 2] {
    let index = leaf * spec.spines as usize + spine;
    let first = SWITCH_LINKS + 2 * u32::try_from(index).expect("invariant: at most 64 leaves and 64 spines");
    [Ipv4Addr::from(first), Ipv4Addr::from(first + 1)]
}

impl Topology {
    /// Lays out `spec`, which has passed its checks.
    #[must_use]
    pub fn new(spec: &FabricSpec) -> Self {
        let switch = |kind: &str, number: u32| {
            let name = format!("{kind}{number}");
            Switch { namespace: namespace(&spec.name, &name), name }
        };
        let mut topology = Topology {
            name: spec.name.clone(),
            hosts: hosts(spec),
            leaves: (0..spec.leaves).map(|number| switch("leaf", number)).collect(),
            spines: (0..spec.spines).map(|number| switch("spine", number)).collect(),
            paths: Vec::new(),
            links: Vec::new(),
        };
        topology.paths = paths(spec, &topology.spines);
        topology.links = topology.host_links(spec).chain(topology.switch_links(spec)).collect();
        topology
    }

    /// Name and namespace of every node: hosts, leaves, spines.
    pub fn nodes(&self) -> impl Iterator<Item = (&str, &str)> {
        let hosts = self.hosts.iter().map(|host| (host.name.as_str(), host.namespace.as_str()));
        hosts.chain(self.switches().map(|switch| (switch.name.as_str(), switch.namespace.as_str())))
    }

    /// Leaves, then spines.
    pub fn switches(&self) -> impl Iterator<Item = &Switch> {
        self.leaves.iter().chain(&self.spines)
    }

    fn host_links(&self, spec: &FabricSpec) -> impl Iterator<Item = Link> {
        self.hosts.iter().map(|host| Link {
            ends: [
                End {
                    namespace: host.namespace.clone(),
                    interface: "eth0".to_owned(),
                    addresses: host.addresses.clone(),
                    prefix: HOST_PREFIX,
                },
                End {
                    namespace: self.leaves[host.leaf].namespace.clone(),
                    interface: host.name.clone(),
                    addresses: vec![host.gateway],
                    prefix: HOST_PREFIX,
                },
            ],
            rate: spec.rates.host_leaf,
        })
    }

    fn switch_links(&self, spec: &FabricSpec) -> impl Iterator<Item = Link> {
        let pairs = self.leaves.iter().enumerate();
        pairs.flat_map(move |(l, leaf)| {
            self.spines.iter().enumerate().map(move |(s, spine)| {
                let end = |node: &Switch, peer: &Switch, address| End {
                    namespace: node.namespace.clone(),
                    interface: peer.name.clone(),
                    addresses: vec![address],
                    prefix: SWITCH_PREFIX,
                };
                let [lower, upper] = switch_link(spec, l, s);
                Link { ends: [end(leaf, spine, lower), end(spine, leaf, upper)], rate: spec.rates.leaf_spine }
            })
        })
    }
}

fn hosts(spec: &FabricSpec) -> Vec<Host> {
    let mut in_rack = vec![0_u8; spec.leaves as usize];
    let byte = |number: u32| u8::try_from(number).expect("invariant: a checked file's numbers fit an address");
    let host = |host: &super::spec::Host| {
        let (rack, count) = (byte(host.leaf), &mut in_rack[host.leaf as usize]);
        let number = *count;
        *count = number.wrapping_add(1);
        Host {
            name: host.name.clone(),
            namespace: namespace(&spec.name, &host.name),
            leaf: host.leaf as usize,
            addresses: (1..=host.devices).map(|device| Ipv4Addr::new(10, rack, number, byte(device))).collect(),
            gateway: Ipv4Addr::new(10, rack, number, GATEWAY),
        }
    };
    spec.hosts.iter().map(host).collect()
}

fn paths(spec: &FabricSpec, spines: &[Switch]) -> Vec<Path> {
    let starts = (spec.paths.first_port..).step_by(usize::from(spec.paths.ports));
    let path = |(spine, first_port): (&Switch, u16)| Path {
        spine: spine.name.clone(),
        first_port,
        last_port: first_port + (spec.paths.ports - 1),
    };
    spines.iter().zip(starts).map(path).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn testbed() -> Topology {
        let text = include_str!("../../fabric/testbed.toml");
        Topology::new(&FabricSpec::parse(text, "testbed.toml").unwrap())
    }

    #[test]
    fn the_testbed_has_its_nodes_and_links() {
        let topology = testbed();
        let namespaces: Vec<&str> = topology.nodes().map(|(_, namespace)| namespace).collect();
        assert_eq!(namespaces.len(), 8);
        assert!(namespaces.iter().all(|name| name.starts_with("mccs-testbed-")));
        assert_eq!(topology.links.len(), 4 + 2 * 2);
    }

    #[test]
    fn hosts_are_numbered_within_their_rack() {
        let topology = testbed();
        let addresses: Vec<String> = topology.hosts.iter().map(|host| format!("{:?}", host.addresses)).collect();
        assert_eq!(
            addresses,
            ["[10.0.0.1, 10.0.0.2]", "[10.0.1.1, 10.0.1.2]", "[10.1.0.1, 10.1.0.2]", "[10.1.1.1, 10.1.1.2]"]
        );
        assert_eq!(topology.hosts[3].gateway, Ipv4Addr::new(10, 1, 1, 254));
    }

    #[test]
    fn no_address_or_interface_is_given_twice() {
        let topology = testbed();
        let ends = || topology.links.iter().flat_map(|link| &link.ends);
        let addresses: Vec<_> = ends().flat_map(|end| &end.addresses).collect();
        assert_eq!(addresses.iter().collect::<BTreeSet<_>>().len(), addresses.len());
        let interfaces: Vec<_> = ends().map(|end| (&end.namespace, &end.interface)).collect();
        assert_eq!(interfaces.iter().collect::<BTreeSet<_>>().len(), interfaces.len());
    }

    #[test]
    fn each_spine_has_its_ports() {
        let path = |spine: &str, first_port, last_port| Path { spine: spine.to_owned(), first_port, last_port };
        assert_eq!(testbed().paths, [path("spine0", 20_000, 20_099), path("spine1", 20_100, 20_199)]);
    }
}
