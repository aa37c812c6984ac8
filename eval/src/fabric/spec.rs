//! `fabric.toml`: hosts, leaves, spines, rates, buffers and paths of an emulated network. Hosts,
//! leaves, spines, and what their links can carry.

use mccs_config::limits::Limit;
use mccs_config::validate::{Problems, Validate};
use mccs_config::{Bytes, DurationText, Rate};
use serde::{Deserialize, Serialize};

/// Leaves of a fabric.
const LEAVES: Limit<u32> = Limit { min: 1, max: 64, reason: "a rack has the second byte of its hosts' addresses" };
/// Spines of a fabric.
const SPINES: Limit<u32> = Limit { min: 0, max: 64, reason: "every leaf has two rules and a routing table a spine" };
/// Hosts of a fabric.
const HOSTS: Limit<u32> =
    Limit { min: 1, max: 256, reason: "a host has the third byte of its addresses, and a namespace of this kernel" };
/// Devices of a host.
const DEVICES: Limit<u32> = Limit { min: 1, max: 253, reason: "a device has the last byte of its address" };
/// Bytes of a packet.
const MTU: Limit<u32> = Limit { min: 576, max: 65_535, reason: "what IPv4 requires, and what a veth link allows" };
/// Rates of links.
const RATE: Limit<Rate> =
    Limit { min: Rate::mbit(1), max: Rate::gbit(100), reason: "beyond it the kernel's own speed is the limit" };
/// Buffer of a port in time.
const DEPTH: Limit<DurationText> = Limit {
    min: DurationText::micros(1),
    max: DurationText::secs(1),
    reason: "a port holds some packets, not seconds",
};
/// Buffer of a port in bytes.
const LEAST: Limit<Bytes> =
    Limit { min: Bytes::kib(64), max: Bytes::mib(64), reason: "the kernel hands over packets of up to 64KiB" };
/// Queues besides the one of all packets.
const FIRST: Limit<u32> = Limit { min: 0, max: 7, reason: "the shaper has eight priorities" };
/// Queues of a device's flows to a host.
const FLOWS: Limit<u32> =
    Limit { min: 2, max: 256, reason: "the kernel's filters look queues up in tables of up to 256" };
/// Queues of a port, all together.
const QUEUES_MAX: u64 = 4_096;
/// Code points.
const DSCP: Limit<u8> = Limit { min: 1, max: 63, reason: "the field has six bits, and 0 is that of all other packets" };
/// Source ports that lead over one spine.
const PORTS: Limit<u16> = Limit { min: 1, max: 8_192, reason: "all ranges together lie below the ephemeral ports" };
/// First of the ports that the kernel gives out by itself: flows that do not choose a path use these.
const FIRST_EPHEMERAL_PORT: u32 = 32_768;
/// Ports below these need a privilege.
const FIRST_FREE_PORT: u16 = 1_024;
/// Longest name of an interface; a leaf's interface has its host's name.
const INTERFACE_NAME_BYTES_MAX: usize = 15;
/// Longest name of a fabric.
const NAME_BYTES_MAX: usize = 32;

/// A whole `fabric.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FabricSpec {
    /// Name, part of every namespace's name.
    pub name: String,
    /// Leaves, called `leaf0` and so on.
    #[serde(default = "default_leaves")]
    pub leaves: u32,
    /// Spines, called `spine0` and so on; each has a link to every leaf.
    #[serde(default)]
    pub spines: u32,
    /// Bytes of the largest packet.
    #[serde(default = "default_mtu")]
    pub mtu: u32,
    /// Rates of links.
    #[serde(default)]
    pub rates: Rates,
    /// Buffer of a port whose link is shaped.
    #[serde(default)]
    pub buffer: Buffer,
    /// How flows choose a spine.
    #[serde(default)]
    pub paths: Paths,
    /// The hosts, at least one.
    #[serde(rename = "host")]
    pub hosts: Vec<Host>,
}

fn default_leaves() -> u32 {
    1
}

fn default_mtu() -> u32 {
    9_000
}

/// `[rates]`: bits per second of each direction of a link. Absent: as fast as the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rates {
    /// Between a host and its leaf, for all devices of the host together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_leaf: Option<Rate>,
    /// Between a leaf and a spine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leaf_spine: Option<Rate>,
}

/// `[buffer]`: the queue of a shaped port, the larger of the two.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Buffer {
    /// Time that the last byte of a full queue waits.
    pub depth: DurationText,
    /// Bytes that every queue holds.
    pub least: Bytes,
    /// DSCP code points that have a queue of their own at every shaped port, served before all others: the last of them first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub first: Vec<u8>,
    /// So many queues for each device that sends and host that receives, a power of two, at every shaped port, which have equal parts of the link: flows are
    /// spread over them by their source ports' lowest bits. Absent: one for all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flows: Option<u32>,
}

impl Default for Buffer {
    fn default() -> Self {
        Buffer { depth: DurationText::millis(5), least: Bytes::kib(256), first: Vec::new(), flows: None }
    }
}

/// `[paths]`: the ports by which a flow chooses its spine. All others are spread by a hash.
///
/// Spine `s` has the `ports` ports from `first_port + s * ports`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Paths {
    /// First port of the first spine.
    pub first_port: u16,
    /// Ports of each spine.
    pub ports: u16,
    /// Seed of the hash, for collisions that repeat (Linux 6.11 and later). Absent: the kernel's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash_seed: Option<u32>,
}

impl Default for Paths {
    fn default() -> Self {
        Paths { first_port: 20_000, ports: 100, hash_seed: None }
    }
}

/// `[[host]]`: one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Name, also of the leaf's interface towards it.
    pub name: String,
    /// Number of the leaf that it hangs on, from 0.
    #[serde(default)]
    pub leaf: u32,
    /// Devices, each with its own address.
    #[serde(default = "default_devices")]
    pub devices: u32,
}

fn default_devices() -> u32 {
    1
}

mccs_config::document!(FabricSpec, written);

impl Validate for FabricSpec {
    fn validate(&self, problems: &mut Problems) {
        if !is_name(&self.name) {
            let name = &self.name;
            problems.add("name", format!("has 1 to {NAME_BYTES_MAX} letters, digits or '_', not {name:?}"));
        }
        problems.within("leaves", &self.leaves, &LEAVES);
        problems.within("spines", &self.spines, &SPINES);
        match (self.leaves, self.spines) {
            (2.., 0) => problems.add("leaves", "more than one leaf needs spines between them; set spines"),
            (1, 1..) => problems.add("spines", "lead nowhere where there is one leaf; leave them out"),
            _ => {}
        }
        problems.within("mtu", &self.mtu, &MTU);
        if let Some(rate) = &self.rates.host_leaf {
            problems.within("rates.host_leaf", rate, &RATE);
        }
        if let Some(rate) = &self.rates.leaf_spine {
            problems.within("rates.leaf_spine", rate, &RATE);
            if self.spines == 0 {
                problems.add("rates.leaf_spine", "has no use where there are no spines; leave it out");
            }
        }
        problems.within("buffer.depth", &self.buffer.depth, &DEPTH);
        problems.within("buffer.least", &self.buffer.least, &LEAST);
        problems.within("buffer.first", &u32::try_from(self.buffer.first.len()).unwrap_or(u32::MAX), &FIRST);
        for (i, dscp) in self.buffer.first.iter().enumerate() {
            problems.within(format!("buffer.first[{i}]"), dscp, &DSCP);
            if self.buffer.first[..i].contains(dscp) {
                problems.add(format!("buffer.first[{i}]"), format!("{dscp} has a queue already"));
            }
        }
        if let Some(flows) = &self.buffer.flows {
            problems.within("buffer.flows", flows, &FLOWS);
            if !flows.is_power_of_two() {
                problems.add("buffer.flows", format!("must be a power of two, not {flows}"));
            }
            let devices: u64 = self.hosts.iter().map(|host| u64::from(host.devices)).sum();
            let pairs = devices * self.hosts.len() as u64;
            if pairs * u64::from(*flows) > QUEUES_MAX {
                let queues = format!("{flows} queues for each of {pairs} pairs of a device and a host");
                problems.add("buffer.flows", format!("{queues} are more than {QUEUES_MAX}"));
            }
            if !self.buffer.first.is_empty() {
                problems.add("buffer.flows", "queues are by flow or by code point: leave out this or `first`");
            }
        }
        self.paths.validate_for(self.spines, problems);
        problems.within("host", &u32::try_from(self.hosts.len()).unwrap_or(u32::MAX), &HOSTS);
        for (i, host) in self.hosts.iter().enumerate() {
            host.validate_at(&format!("host[{i}]"), self.leaves, problems);
            if let Some(j) = self.hosts[..i].iter().position(|other| other.name == host.name) {
                problems.add(format!("host[{i}].name"), format!("host[{j}] is already called {:?}", host.name));
            }
        }
    }
}

/// Whether a fabric may be called `name`. There is no dash: `mccs-NAME-NODE` then says whose a namespace is.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_';
    !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.chars().all(allowed)
}

impl Paths {
    fn validate_for(&self, spines: u32, problems: &mut Problems) {
        problems.within("paths.ports", &self.ports, &PORTS);
        if self.first_port < FIRST_FREE_PORT {
            problems.add("paths.first_port", format!("must be from {FIRST_FREE_PORT}: ports below need a privilege"));
        }
        let end = u32::from(self.first_port) + u32::from(self.ports) * spines;
        if end > FIRST_EPHEMERAL_PORT {
            problems.add(
                "paths.first_port",
                format!(
                    "{spines} ranges of {} ports from {} end at {end}, beyond {FIRST_EPHEMERAL_PORT}, where the kernel's \
                     own choice of ports begins: flows that chose no path would get one",
                    self.ports, self.first_port
                ),
            );
        }
    }
}

impl Host {
    fn validate_at(&self, key: &str, leaves: u32, problems: &mut Problems) {
        problems.name(format!("{key}.name"), &self.name);
        let is_switch = ["leaf", "spine"]
            .iter()
            .any(|kind| self.name.strip_prefix(kind).is_some_and(|number| number.chars().all(|c| c.is_ascii_digit())));
        if self.name.len() > INTERFACE_NAME_BYTES_MAX {
            problems.add(
                format!("{key}.name"),
                format!("has at most {INTERFACE_NAME_BYTES_MAX} letters, as an interface's name: {:?}", self.name),
            );
        } else if is_switch || ["lo", "all", "default"].contains(&self.name.as_str()) {
            problems.add(format!("{key}.name"), format!("{:?} is the name of something else in the fabric", self.name));
        }
        if self.leaf >= leaves {
            problems.add(format!("{key}.leaf"), format!("must be below leaves = {leaves}, not {}", self.leaf));
        }
        problems.within(format!("{key}.devices"), &self.devices, &DEVICES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str =
        "name = \"x\"\nleaves = 2\nspines = 2\n[[host]]\nname = \"h0\"\n[[host]]\nname = \"h1\"\nleaf = 1\n";

    fn only(text: &str, line: usize, key: &str, part: &str) {
        let error = FabricSpec::parse(text, "fabric.toml").expect_err("the file is wrong");
        let all = error.diagnostics();
        assert_eq!(all.len(), 1, "{all:?}");
        assert_eq!((all[0].line, all[0].key.as_str()), (line, key), "{}", all[0]);
        assert!(all[0].message.contains(part), "{}", all[0]);
    }

    #[test]
    fn the_examples_are_read_and_round_trip() {
        for text in [
            include_str!("../../fabric/testbed.toml"),
            include_str!("../../fabric/rack.toml"),
            include_str!("../../fabric/small.toml"),
            include_str!("../../fabric/nics.toml"),
            include_str!("../../fabric/testbed-slow.toml"),
            include_str!("../../fabric/testbed-fair.toml"),
            SMALL,
        ] {
            let spec = FabricSpec::parse(text, "fabric.toml").unwrap();
            assert_eq!(FabricSpec::parse(&spec.to_toml(), "printed").unwrap(), spec, "{}", spec.to_toml());
        }
    }

    #[test]
    fn the_testbed_is_two_to_one_oversubscribed() {
        let spec = FabricSpec::parse(include_str!("../../fabric/testbed.toml"), "testbed.toml").unwrap();
        let hosts_on_leaf0 = spec.hosts.iter().filter(|host| host.leaf == 0).count() as u64;
        let (down, up) = (spec.rates.host_leaf.unwrap().0, spec.rates.leaf_spine.unwrap().0);
        assert_eq!(hosts_on_leaf0 * down, 2 * u64::from(spec.spines) * up);
        assert!(spec.hosts.iter().all(|host| host.devices == 2));
    }

    #[test]
    fn mistakes_get_their_line() {
        only(&SMALL.replace("\"x\"", "\"a-b\""), 1, "name", "letters, digits or '_'");
        only(&SMALL.replace("spines = 2", "spines = 0"), 2, "leaves", "set spines");
        only(&SMALL.replace("spines", "spine"), 3, "spine", "did you mean `spines`?");
        only(&SMALL.replace("leaf = 1", "leaf = 2"), 8, "host[1].leaf", "below leaves = 2");
        only(&SMALL.replace("\"h1\"", "\"h0\""), 7, "host[1].name", "host[0]");
        only(&SMALL.replace("\"h1\"", "\"spine0\""), 7, "host[1].name", "something else");
        only(&SMALL.replace("\"h1\"", "\"a-very-long-hostname\""), 7, "host[1].name", "at most 15");
        only(&format!("{SMALL}devices = 254\n"), 9, "host[1].devices", "from 1 to 253");
        only(&format!("{SMALL}[rates]\nhost_leaf = \"1GB/s\"\n"), 10, "rates.host_leaf", "Gbit/s");
        only(&format!("{SMALL}[rates]\nhost_leaf = \"1kbit/s\"\n"), 10, "rates.host_leaf", "from 1Mbit/s");
        only(&format!("{SMALL}[buffer]\nflows = 48\n"), 10, "buffer.flows", "power of two");
        only(&format!("{SMALL}[buffer]\nflows = 512\n"), 10, "buffer.flows", "from 2 to 256");
        let many = SMALL.replace("leaf = 1", "leaf = 1\ndevices = 250");
        only(&format!("{many}[buffer]\nflows = 64\n"), 11, "buffer.flows", "more than 4096");
        only(&format!("{SMALL}[buffer]\nfirst = [8]\nflows = 64\n"), 11, "buffer.flows", "leave out");
        only(&format!("{SMALL}[paths]\nfirst_port = 32600\n"), 10, "paths.first_port", "32768");
        only(&format!("{SMALL}[paths]\nfirst_port = 80\n"), 10, "paths.first_port", "privilege");
        only("name = \"x\"\nspines = 1\n[[host]]\nname = \"h\"\n", 2, "spines", "one leaf");
        only("name = \"x\"\nhost = []\n", 2, "host", "from 1");
    }
}
