//! Builds topologies: from `topology.toml`, or regular ones (Clos, testbed) by their numbers.

use std::collections::HashMap;

use mccs_config::TopologyFile;
use mccs_config::service::FlowPath;

use super::{Host, NicNames, Spine, Topology};

/// Why there is no topology.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// A name that was not checked.
    #[error("there is no {kind} {name:?}")]
    NoSuch {
        /// Leaf or spine.
        kind: &'static str,
        /// As written.
        name: String,
    },
    /// Numbers that make no network.
    #[error("{0}")]
    Contradiction(&'static str),
}

/// A regular network, in numbers. Rates are bits per second of each direction of a link.
#[derive(Debug, Clone, PartialEq)]
pub struct Clos {
    /// Parts that only cores join.
    pub pods: u32,
    /// Racks of a pod. With rails a rack has a leaf for each NIC of its hosts, otherwise one leaf.
    pub racks_per_pod: u32,
    /// Hosts of a rack.
    pub hosts_per_rack: u32,
    /// Devices of a host.
    pub devices_per_host: u32,
    /// NICs of a host; devices are spread over them evenly.
    pub nics_per_host: u32,
    /// Each NIC of a host hangs on a leaf of its own.
    pub rails: bool,
    /// Spines of a pod, each with a link to every leaf of the pod.
    pub spines_per_pod: u32,
    /// Cores that each spine has links to; a core has a link to one spine of every pod.
    pub cores_per_spine: u32,
    /// Between a NIC and its leaf.
    pub nic_bps: f64,
    /// Between a leaf and a spine.
    pub leaf_spine_bps: f64,
    /// Between a spine and a core.
    pub spine_core_bps: f64,
}

impl Clos {
    /// MCCS's testbed: 4 hosts of two devices with a NIC each, two leaves, two spines, 2:1 oversubscribed. `nic_bps` is also
    /// what a leaf's link to a spine carries.
    #[must_use]
    pub fn testbed(nic_bps: f64) -> Self {
        Clos {
            pods: 1,
            racks_per_pod: 2,
            hosts_per_rack: 2,
            devices_per_host: 2,
            nics_per_host: 2,
            rails: false,
            spines_per_pod: 2,
            cores_per_spine: 0,
            nic_bps,
            leaf_spine_bps: nic_bps,
            spine_core_bps: 0.0,
        }
    }

    fn check(&self) -> Result<(), TopologyError> {
        let racks = self.pods.checked_mul(self.racks_per_pod);
        let hosts = racks.and_then(|racks| racks.checked_mul(self.hosts_per_rack));
        let has_all = [self.devices_per_host, self.nics_per_host].iter().all(|count| (1..=64).contains(count));
        if !has_all || !hosts.is_some_and(|hosts| (1..=1 << 20).contains(&hosts)) {
            Err(TopologyError::Contradiction("there must be 1 to 2^20 hosts, with 1 to 64 devices and NICs each"))
        } else if (racks != Some(1) || self.rails) && self.spines_per_pod == 0 {
            Err(TopologyError::Contradiction("several leaves need spines between them"))
        } else if self.pods > 1 && self.cores_per_spine == 0 {
            Err(TopologyError::Contradiction("several pods need cores between them"))
        } else if self.spines_per_pod > 1024 || self.cores_per_spine > 1024 {
            Err(TopologyError::Contradiction("a switch has at most 1024 ports"))
        } else {
            Ok(())
        }
    }
}

impl Topology {
    /// A regular network. Hosts are called `h0` and so on, rack by rack, leaves `leaf0`, spines of each pod `spine0`.
    ///
    /// # Errors
    /// Numbers that make no network.
    pub fn clos(spec: &Clos) -> Result<Self, TopologyError> {
        spec.check()?;
        let leaves_per_rack = if spec.rails { spec.nics_per_host } else { 1 };
        let racks = spec.pods * spec.racks_per_pod;
        let leaves: Vec<_> = (0..racks * leaves_per_rack)
            .map(|leaf| (format!("leaf{leaf}"), leaf / (leaves_per_rack * spec.racks_per_pod)))
            .collect();
        let nic_of_device = |device: u32| (device * spec.nics_per_host / spec.devices_per_host) as u16;
        let host = |number: u32| {
            let rack = number / spec.hosts_per_rack;
            let leaf = |nic: u32| rack * leaves_per_rack + if spec.rails { nic } else { 0 };
            Host {
                name: format!("h{number}"),
                rack,
                pod: rack / spec.racks_per_pod,
                first_nic: number * spec.nics_per_host,
                leaves: (0..spec.nics_per_host).map(leaf).collect(),
                nic_of_device: (0..spec.devices_per_host).map(nic_of_device).collect(),
                nic_names: Vec::new(),
            }
        };
        let hosts: Vec<Host> = (0..racks * spec.hosts_per_rack).map(host).collect();
        let spine = |number: u32| Spine { name: format!("spine{number}"), steering: FlowPath::default() };
        let nics = hosts.len() as u32 * spec.nics_per_host;
        let leaf_links = leaves.len() as u32 * spec.spines_per_pod;
        let core_links = if spec.pods > 1 { spec.pods * spec.spines_per_pod * spec.cores_per_spine } else { 0 };
        let mut rates = vec![spec.nic_bps; 2 * nics as usize];
        rates.resize(rates.len() + 2 * leaf_links as usize, spec.leaf_spine_bps);
        rates.resize(rates.len() + 2 * core_links as usize, spec.spine_core_bps);
        Ok(Topology {
            hosts,
            leaves,
            spines: (0..spec.spines_per_pod).map(spine).collect(),
            cores_per_spine: spec.cores_per_spine,
            classes: Vec::new(),
            nics,
            rates,
        })
    }

    /// The topology of an operator's file. Hosts whose NICs hang on the same leaves are a rack.
    ///
    /// # Errors
    /// Names that do not exist, in a file that was not checked.
    pub fn from_file(file: &TopologyFile) -> Result<Self, TopologyError> {
        let leaf_of: HashMap<&str, u32> = (0..).zip(&file.leaves).map(|(i, leaf)| (leaf.name.as_str(), i)).collect();
        let find = |name: &str| {
            let no_such = || TopologyError::NoSuch { kind: "leaf", name: name.to_owned() };
            leaf_of.get(name).copied().ok_or_else(no_such)
        };
        let (mut racks, mut rates, mut hosts) = (HashMap::new(), Vec::new(), Vec::with_capacity(file.hosts.len()));
        for host in &file.hosts {
            let first_nic = rates.len() as u32 / 2;
            let mut nic_of_device = vec![0; host.devices as usize];
            let (mut leaves, mut nic_names) = (Vec::new(), Vec::new());
            if let Some(leaf) = &host.leaf {
                leaves.push(find(leaf)?);
                rates.extend([file.rates.host_leaf.0 as f64; 2]);
            }
            for (number, nic) in (0u16..).zip(&host.nics) {
                leaves.push(find(&nic.leaf)?);
                nic_names.push(NicNames { interface: nic.interface.clone(), rdma: nic.rdma.clone() });
                rates.extend([nic.rate.unwrap_or(file.rates.host_leaf).0 as f64; 2]);
                for device in &nic.devices {
                    if let Some(slot) = nic_of_device.get_mut(*device as usize) {
                        *slot = number;
                    }
                }
            }
            let mut set = leaves.clone();
            set.sort_unstable();
            set.dedup();
            let next = racks.len() as u32;
            let rack = *racks.entry(set).or_insert(next);
            hosts.push(Host { name: host.name.clone(), rack, pod: 0, first_nic, leaves, nic_of_device, nic_names });
        }
        let nics = rates.len() as u32 / 2;
        let leaf_spine = file.rates.leaf_spine.unwrap_or_default().0 as f64;
        rates.resize(rates.len() + 2 * file.leaves.len() * file.spines.len(), leaf_spine);
        let steering = |spine: &mccs_config::topology::Spine| FlowPath {
            source_ports: spine.source_ports,
            dscp: spine.dscp,
            ..FlowPath::default()
        };
        let spines = file.spines.iter().map(|spine| Spine { name: spine.name.clone(), steering: steering(spine) });
        let mut topology = Topology {
            hosts,
            leaves: file.leaves.iter().map(|leaf| (leaf.name.clone(), 0)).collect(),
            spines: spines.collect(),
            cores_per_spine: 0,
            classes: file.classes.iter().map(|class| (class.priority, class.dscp)).collect(),
            nics,
            rates,
        };
        for link in &file.links {
            let no_such = || TopologyError::NoSuch { kind: "spine", name: link.spine.clone() };
            let spine = topology.spine_named(&link.spine).ok_or_else(no_such)?;
            let up = topology.leaf_link(find(&link.leaf)?, spine);
            for direction in [up, up.reverse()] {
                topology.rates[direction.index()] = link.rate.0 as f64;
            }
        }
        Ok(topology)
    }
}
