//! `topology.toml`: the cluster's network: hosts, NICs, leaf and spine switches, link rates, and
//! how flows are steered over spines.
//!
//! Two tiers: every NIC hangs on a leaf, every leaf has a link to every spine, so a flow between two leaves has one path a
//! spine. NICs of one host may hang on different leaves (rails). The words are those of the emulated fabric's file.
//!
//! Deliberately absent: addresses (`service.toml` has them), the state of links, which the service measures, and networks of
//! three tiers, which the simulator generates.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use crate::document;
use crate::error::{ConfigError, Diagnostic};
use crate::limits;
use crate::service::{Device, Ports};
use crate::units::Rate;
use crate::validate::{Problems, Validate, nearest};

/// A whole `topology.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct TopologyFile {
    /// What links carry.
    pub rates: Rates,
    /// Switches that hosts hang on; a rack each, unless hosts' NICs hang on several.
    #[serde(rename = "leaf")]
    pub leaves: Vec<Leaf>,
    /// Switches that join leaves. None: a single leaf.
    #[serde(default, rename = "spine", skip_serializing_if = "Vec::is_empty")]
    pub spines: Vec<Spine>,
    /// Links between leaves and spines whose rate is not `rates.leaf_spine`.
    #[serde(default, rename = "link", skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<LinkRate>,
    /// Queues of the switches besides the one of all packets.
    #[serde(default, rename = "class", skip_serializing_if = "Vec::is_empty")]
    pub classes: Vec<Class>,
    /// The hosts, at least one.
    #[serde(rename = "host")]
    pub hosts: Vec<Host>,
}

/// `[rates]`: bits per second of each direction of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Rates {
    /// Between a host and its leaf; each NIC of a host that lists its NICs may say otherwise.
    pub host_leaf: Rate,
    /// Between a leaf and a spine. Absent where there are no spines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaf_spine: Option<Rate>,
}

/// `[[leaf]]`: a switch that hosts hang on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Leaf {
    /// Name.
    pub name: String,
}

/// `[[spine]]`: a switch that joins leaves, and how a flow is steered over it. With neither ports nor a code point nothing
/// can be steered there, and flows reach it by the switches' hash only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Spine {
    /// Name, also of the path over it.
    pub name: String,
    /// Source ports that lead over it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_ports: Option<Ports>,
    /// Code point of the differentiated services field that leads over it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dscp: Option<u32>,
}

/// `[[link]]`: the rate of one link between a leaf and a spine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct LinkRate {
    /// Lower end.
    pub leaf: String,
    /// Upper end.
    pub spine: String,
    /// Of each direction.
    pub rate: Rate,
}

/// `[[class]]`: a queue that all switches have. They serve it before those of lower priorities, and before all other packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Class {
    /// As policies give it to tenants, from 1.
    pub priority: u32,
    /// Code point of the differentiated services field by which packets come into it.
    pub dscp: u32,
}

/// `[[host]]`: a host, by its `service.name`. Either `leaf`, for one NIC that all devices share, or a list of NICs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Name.
    pub name: String,
    /// Devices: the GPUs that its service uses, counted as that counts them; where it uses none, places among which ranks are divided.
    #[serde(default = "default_devices")]
    pub devices: u32,
    /// Leaf of its only NIC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaf: Option<String>,
    /// Its NICs, where it has several or one of another rate.
    #[serde(default, rename = "nic", skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<Nic>,
}

fn default_devices() -> u32 {
    1
}

/// `[[host.nic]]`: a NIC.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// Where it hangs.
    pub leaf: String,
    /// Of each direction. Absent: `rates.host_leaf`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<Rate>,
    /// What its host calls its network interface. Without a name flows over TCP cannot be told to leave by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<Device>,
    /// What its host calls it as an RDMA device, for flows over RDMA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma: Option<Device>,
    /// Devices that are nearest to it. Each device of a host belongs to exactly one of its NICs.
    pub devices: Vec<u32>,
}

crate::document!(TopologyFile, written);

impl TopologyFile {
    /// Whether switches have a queue for a priority; packets of priority 0 need none.
    #[must_use]
    pub fn has_class(&self, priority: u32) -> bool {
        priority == 0 || self.classes.iter().any(|class| class.priority == priority)
    }

    /// As [`TopologyFile::parse`], and against the cluster whose network it is.
    ///
    /// # Errors
    /// As [`TopologyFile::load`]; also what [`TopologyFile::contradictions`] finds.
    pub fn parse_for(text: &str, file_name: &str, cluster: &[ActualHost<'_>]) -> Result<Self, ConfigError> {
        let file: TopologyFile = document::parse(text, file_name)?;
        let found = file.contradictions(text, file_name, cluster);
        if found.is_empty() { Ok(file) } else { Err(ConfigError::Invalid(found)) }
    }

    /// What contradicts the hosts that there are, of a file with this text: hosts that only one of both has, numbers of devices that are
    /// not those of the hosts' GPUs, and names of NICs by which their hosts know none. In the order of the file.
    #[must_use]
    pub fn contradictions(&self, text: &str, file_name: &str, cluster: &[ActualHost<'_>]) -> Vec<Diagnostic> {
        document::check(&Against { file: self, cluster }, text, file_name)
    }
}

/// A host of the cluster, as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActualHost<'a> {
    /// As the list of hosts in `service.toml` has it.
    pub name: &'a str,
    /// GPUs that its service uses. `None` where it has none, or has not said: host memory has as many devices as the topology says.
    pub gpus: Option<u32>,
    /// Its network interfaces. `None` where it has not said.
    pub interfaces: Option<&'a [String]>,
    /// Ports of RDMA devices that its service uses. `None` where it uses none, or has not said.
    pub rdma_ports: Option<&'a [Device]>,
}

/// Names that a complaint lists; of more it names the nearest.
const NAMES_LISTED_MAX: usize = 8;

impl<'a> ActualHost<'a> {
    /// One that has said nothing of itself.
    #[must_use]
    pub fn named(name: &'a str) -> Self {
        ActualHost { name, gpus: None, interfaces: None, rdma_ports: None }
    }

    /// Reports what a NIC, whose key is `key`, is called that the host has not.
    fn compare(&self, nic: &Nic, key: &str, problems: &mut Problems) {
        let name = self.name;
        if let (Some(interface), Some(known)) = (nic.interface.as_ref().map(Device::to_string), self.interfaces)
            && !known.contains(&interface)
        {
            let others = others(&interface, known.iter().map(String::as_str));
            let message = format!("host {name:?} has no network interface {interface:?}; it has {others}");
            problems.add(format!("{key}.interface"), message);
        }
        if let (Some(rdma), Some(known)) = (&nic.rdma, self.rdma_ports)
            && !known.iter().any(|port| rdma.meets(port))
        {
            let names: Vec<String> = known.iter().map(Device::to_string).collect();
            let others = others(&rdma.to_string(), names.iter().map(String::as_str));
            let message = format!("the service of {name:?} uses no RDMA device \"{rdma}\"; it uses {others}");
            problems.add(format!("{key}.rdma"), message);
        }
    }
}

/// What there is in the place of a name.
fn others<'a>(wrong: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    match (known.clone().count(), nearest(wrong, known.clone())) {
        (0, _) => "none".to_owned(),
        (1..=NAMES_LISTED_MAX, _) => known.collect::<Vec<_>>().join(", "),
        (count, Some(near)) => format!("{near:?}, and {} others", count - 1),
        (count, None) => format!("{count} others"),
    }
}

/// A topology beside the hosts that there are.
struct Against<'a> {
    file: &'a TopologyFile,
    cluster: &'a [ActualHost<'a>],
}

impl Validate for Against<'_> {
    fn validate(&self, problems: &mut Problems) {
        let known: HashSet<&str> = self.file.hosts.iter().map(|host| host.name.as_str()).collect();
        let actual: HashMap<&str, &ActualHost<'_>> = self.cluster.iter().map(|host| (host.name, host)).collect();
        // Who is called otherwise by one of both is missing in each.
        let missing: Vec<&str> = actual.keys().copied().filter(|name| !known.contains(name)).collect();
        let unknown: Vec<&str> = known.iter().copied().filter(|name| !actual.contains_key(name)).collect();
        let hint = |name: &str, others: &[&str]| {
            let near = nearest(name, others.iter().copied()).map(|near| format!("; it has {near:?}"));
            near.unwrap_or_default()
        };
        for name in self.cluster.iter().map(|host| host.name).filter(|name| !known.contains(name)) {
            let hint = hint(name, &unknown);
            problems.add("host", format!("host {name:?} is in the cluster and not in the topology{hint}"));
        }
        for (i, host) in self.file.hosts.iter().enumerate() {
            let Some(actual) = actual.get(host.name.as_str()) else {
                let message = format!("the cluster, which service.toml lists, has no host {:?}", host.name);
                problems.add(format!("host[{i}].name"), message + &hint(&host.name, &missing));
                continue;
            };
            if let Some(gpus) = actual.gpus.filter(|gpus| *gpus != host.devices) {
                let message = format!("must be {gpus}: the service of {:?} uses so many GPUs", host.name);
                problems.add(format!("host[{i}].devices"), format!("{message}, not {}", host.devices));
            }
            for (j, nic) in host.nics.iter().enumerate() {
                actual.compare(nic, &format!("host[{i}].nic[{j}]"), problems);
            }
        }
    }
}

impl Validate for TopologyFile {
    fn validate(&self, problems: &mut Problems) {
        problems.within("rates.host_leaf", &self.rates.host_leaf, &limits::LINK_RATE);
        if let Some(rate) = &self.rates.leaf_spine {
            problems.within("rates.leaf_spine", rate, &limits::LINK_RATE);
        }
        let counted = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        problems.within("leaf", &counted(self.leaves.len()), &limits::LEAVES);
        problems.within("spine", &counted(self.spines.len()), &limits::SPINES);
        problems.within("host", &counted(self.hosts.len()), &limits::TOPOLOGY_HOSTS);
        match (self.leaves.len(), self.spines.is_empty(), self.rates.leaf_spine) {
            (2.., true, _) => problems.add("leaf", "more than one leaf needs spines between them; add [[spine]]"),
            (_, true, Some(_)) => {
                problems.add("rates.leaf_spine", "has no use where there are no spines; leave it out")
            }
            (_, false, None) => problems.add("rates", "leaf_spine must be said where there are spines"),
            _ => {}
        }
        let leaves = names("leaf", self.leaves.iter().map(|leaf| leaf.name.as_str()), problems);
        let spines = names("spine", self.spines.iter().map(|spine| spine.name.as_str()), problems);
        names("host", self.hosts.iter().map(|host| host.name.as_str()), problems);
        self.validate_steering(problems);
        self.validate_links(&leaves, &spines, problems);
        self.validate_classes(problems);
        for (i, host) in self.hosts.iter().enumerate() {
            host.validate_at(&format!("host[{i}]"), &leaves, problems);
        }
    }
}

/// Checks names of one kind and returns them.
fn names<'a>(kind: &str, all: impl Iterator<Item = &'a str>, problems: &mut Problems) -> HashSet<&'a str> {
    let mut seen = HashMap::new();
    for (i, name) in all.enumerate() {
        problems.name(format!("{kind}[{i}].name"), name);
        if let Some(j) = seen.insert(name, i) {
            problems.add(format!("{kind}[{i}].name"), format!("{kind}[{j}] is already called {name:?}"));
        }
    }
    seen.into_keys().collect()
}

/// Reports a switch that does not exist.
fn exists(key: String, kind: &str, name: &str, known: &HashSet<&str>, problems: &mut Problems) {
    if !known.contains(name) {
        let hint = nearest(name, known.iter().copied()).map(|near| format!("; did you mean {near:?}?"));
        problems.add(key, format!("there is no {kind} {name:?}{}", hint.unwrap_or_default()));
    }
}

impl TopologyFile {
    fn validate_steering(&self, problems: &mut Problems) {
        for (i, spine) in self.spines.iter().enumerate() {
            if let Some(dscp) = &spine.dscp {
                problems.within(format!("spine[{i}].dscp"), dscp, &limits::DSCP);
            }
            let same_dscp = |other: &Spine| spine.dscp.is_some() && other.dscp == spine.dscp;
            let same_ports = |other: &Spine| match (spine.source_ports, other.source_ports) {
                (Some(a), Some(b)) => a.first <= b.last && b.first <= a.last,
                (None, None) => true,
                _ => false,
            };
            for (j, other) in self.spines.iter().enumerate().take(i) {
                if spine.source_ports.is_some() && other.source_ports.is_some() && same_ports(other) {
                    let key = format!("spine[{i}].source_ports");
                    problems.add(key, format!("spine[{j}] has some of these ports; a port leads over one spine"));
                } else if same_dscp(other) && same_ports(other) {
                    let key = format!("spine[{i}].dscp");
                    problems.add(key, format!("spine[{j}] has the same; nothing tells their flows apart"));
                }
            }
        }
    }

    fn validate_classes(&self, problems: &mut Problems) {
        for (i, class) in self.classes.iter().enumerate() {
            problems.within(format!("class[{i}].priority"), &class.priority, &limits::PRIORITY);
            if class.priority == 0 {
                problems.add(format!("class[{i}].priority"), "must be at least 1: 0 is that of all other packets");
            }
            problems.within(format!("class[{i}].dscp"), &class.dscp, &limits::DSCP);
            if let Some(j) = self.classes[..i].iter().position(|other| other.priority == class.priority) {
                problems.add(format!("class[{i}].priority"), format!("class[{j}] is already that of this priority"));
            }
            if let Some(j) = self.classes[..i].iter().position(|other| other.dscp == class.dscp) {
                problems.add(format!("class[{i}].dscp"), format!("class[{j}] has the same; nothing tells them apart"));
            }
            if let Some(j) = self.spines.iter().position(|spine| spine.dscp == Some(class.dscp)) {
                problems
                    .add(format!("class[{i}].dscp"), format!("leads over spine[{j}]; a class needs one of its own"));
            }
        }
    }

    fn validate_links(&self, leaves: &HashSet<&str>, spines: &HashSet<&str>, problems: &mut Problems) {
        let mut seen = HashMap::new();
        for (i, link) in self.links.iter().enumerate() {
            problems.within(format!("link[{i}].rate"), &link.rate, &limits::LINK_RATE);
            exists(format!("link[{i}].leaf"), "leaf", &link.leaf, leaves, problems);
            exists(format!("link[{i}].spine"), "spine", &link.spine, spines, problems);
            if let Some(j) = seen.insert((&link.leaf, &link.spine), i) {
                problems.add(format!("link[{i}]"), format!("link[{j}] already says the rate of this link"));
            }
        }
    }
}

impl Host {
    fn validate_at(&self, key: &str, leaves: &HashSet<&str>, problems: &mut Problems) {
        problems.within(format!("{key}.devices"), &self.devices, &limits::DEVICES);
        match (&self.leaf, self.nics.is_empty()) {
            (Some(leaf), true) => exists(format!("{key}.leaf"), "leaf", leaf, leaves, problems),
            (Some(_), false) => problems.add(format!("{key}.leaf"), "each NIC of the list has its own; leave it out"),
            (None, true) => problems.add(key, "hangs on no leaf: say leaf = \"...\" or list its NICs"),
            (None, false) => self.validate_nics(key, leaves, problems),
        }
    }

    fn validate_nics(&self, key: &str, leaves: &HashSet<&str>, problems: &mut Problems) {
        let mut nic_of = HashMap::new();
        for (i, nic) in self.nics.iter().enumerate() {
            exists(format!("{key}.nic[{i}].leaf"), "leaf", &nic.leaf, leaves, problems);
            if let Some(rate) = &nic.rate {
                problems.within(format!("{key}.nic[{i}].rate"), rate, &limits::LINK_RATE);
            }
            let before = &self.nics[..i];
            let is_taken = |named: fn(&Nic) -> Option<&Device>| {
                let j = before.iter().position(|other| named(nic).is_some() && named(other) == named(nic))?;
                Some(format!("nic[{j}] is already called so"))
            };
            let names =
                [("interface", is_taken(|nic| nic.interface.as_ref())), ("rdma", is_taken(|nic| nic.rdma.as_ref()))];
            for (member, problem) in names.into_iter().filter_map(|(member, problem)| Some((member, problem?))) {
                problems.add(format!("{key}.nic[{i}].{member}"), problem);
            }
            for device in &nic.devices {
                let at = format!("{key}.nic[{i}].devices");
                if *device >= self.devices {
                    problems
                        .add(at, format!("names device {device}, the host has {}: they count from 0", self.devices));
                } else if let Some(j) = nic_of.insert(*device, i) {
                    problems.add(at, format!("device {device} already belongs to nic[{j}]"));
                }
            }
        }
        let missing = (0..self.devices.min(limits::DEVICES.max)).find(|device| !nic_of.contains_key(device));
        if let Some(device) = missing {
            problems.add(format!("{key}.nic"), format!("device {device} belongs to none of the host's NICs"));
        }
    }
}

#[cfg(test)]
mod tests;
