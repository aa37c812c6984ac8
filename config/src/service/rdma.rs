//! `[rdma]` of `service.toml`: devices, GID index, queue pairs, traffic class, service level, MTU,
//! retries and time-outs.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::tcp::{FlowPath, Ports, Tcp};
use crate::limits;
use crate::units::Bytes;
use crate::validate::Problems;

/// First UDP port from which RoCE v2 sends.
const SOURCE_PORT_MIN: u16 = 49_152;

/// `[rdma]`: flows over RDMA. The hosts of a communicator agree, as its ranks join, on what it begins with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Rdma {
    /// Whether flows go over RDMA.
    #[serde(rename = "use")]
    pub usage: RdmaUse,
    /// Devices, the preferred one first. Empty: all whose link is up, of the kind and speed that carry most together.
    pub devices: Vec<Device>,
    /// Index of the GID on every device. Absent: RoCE v2 with this host's address, else RoCE v2 with an IPv4 address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gid_index: Option<u32>,
    /// Queue pairs of a flow.
    pub qps: u32,
    /// Messages longer than this are cut into parts of this length, which go round the queue pairs.
    pub stripe_from: Bytes,
    /// Writes of a queue pair that may be unfinished.
    pub outstanding: u32,
    /// Places of a completion queue, which flows share until it is full. No more than the device has.
    pub cq_entries: u32,
    /// Completions that are taken from a queue at a time.
    pub cq_poll: u32,
    /// Path MTU in bytes. Absent: that of the port. Both sides take the smaller one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u32>,
    /// A packet is sent again when nothing has come for 4.096 us times 2 to this power.
    pub timeout: u32,
    /// How often.
    pub retries: u32,
    /// How often a receiver that is not ready is tried again; 7 for ever.
    pub rnr_retries: u32,
    /// Service level. On Ethernet it is the priority of the packets, where the device makes it so.
    pub service_level: u32,
    /// Traffic class: on Ethernet the eight bits of which the upper six are the code point.
    pub traffic_class: u32,
    /// Index of the partition key, on InfiniBand.
    pub pkey_index: u32,
    /// File of libibverbs.
    pub library: String,
}

impl Default for Rdma {
    fn default() -> Self {
        Rdma {
            usage: RdmaUse::Auto,
            devices: Vec::new(),
            gid_index: None,
            qps: 1,
            stripe_from: Bytes::kib(256),
            outstanding: 64,
            cq_entries: 8192,
            cq_poll: 32,
            mtu: None,
            timeout: 14,
            retries: 7,
            rnr_retries: 7,
            service_level: 0,
            traffic_class: 0,
            pkey_index: 0,
            library: "libibverbs.so.1".into(),
        }
    }
}

/// What carries flows to other hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum TransportKind {
    /// Sockets.
    Tcp,
    /// Queue pairs.
    Rdma,
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TransportKind::Tcp => "tcp",
            TransportKind::Rdma => "rdma",
        })
    }
}

impl FromStr for TransportKind {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let kinds = [TransportKind::Tcp, TransportKind::Rdma];
        kinds.into_iter().find(|kind| kind.to_string() == name).ok_or("there are tcp and rdma")
    }
}

/// Whether flows go over RDMA.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RdmaUse {
    /// Those of a communicator all of whose hosts can; else over TCP.
    #[default]
    Auto,
    /// The service does not start without, nor does a communicator begin.
    Required,
    /// They begin over TCP, and go over RDMA where a strategy says so, if there is a device.
    Standby,
    /// Over TCP.
    Off,
}

/// A device, written `"mlx5_0"`, or one port of it, written `"mlx5_0:1"`. Of paths over TCP a network interface, written `"eth0"`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Device {
    /// Name.
    pub name: String,
    /// Number, from 1.
    pub port: Option<u8>,
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, port) = match text.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (text, None),
        };
        let number = port.map(str::parse::<u8>).transpose().ok().filter(|port| *port != Some(0));
        match number {
            Some(port) if is_device_name(name) => Ok(Device { name: name.into(), port }),
            _ => {
                Err(format!("{text:?} is no device; write for example \"mlx5_0\", or \"mlx5_0:1\" for its first port"))
            }
        }
    }
}

/// Whether it can be a name of the kernel's, for a device or a network interface.
fn is_device_name(name: &str) -> bool {
    (1..=limits::DEVICE_NAME_MAX).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/')
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

impl Serialize for Device {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Device {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

impl Device {
    /// Whether both mean the same port.
    pub(crate) fn meets(&self, other: &Device) -> bool {
        self.name == other.name && (self.port.is_none() || other.port.is_none() || self.port == other.port)
    }
}

impl Rdma {
    /// How long a queue pair tries before it says that nobody answers.
    fn time_to_find_out(&self) -> Duration {
        let attempts = self.retries.min(limits::RDMA_RETRIES.max) + 1;
        Duration::from_nanos(4096 << self.timeout.min(limits::RDMA_TIMEOUT.max)) * attempts
    }

    fn timeout_problem(&self, tcp: &Tcp) -> Option<String> {
        let (timeout, retries, silence) = (self.timeout, self.retries, &tcp.silence_timeout);
        (self.time_to_find_out() >= silence.0).then(|| {
            format!(
                "{timeout} with rdma.retries = {retries} finds out that nobody answers after {:.1?}, when flows are to have gone on \
                 elsewhere or to have failed: tcp.silence_timeout is {silence}",
                self.time_to_find_out()
            )
        })
    }

    /// The reason why RDMA cannot be used with this configuration, if there is one. A service that requires RDMA is refused with it.
    #[must_use]
    pub fn obstacle(&self, paths: &[FlowPath], tcp: &Tcp) -> Option<String> {
        let of_path = |(index, path): (usize, &FlowPath)| {
            path.rdma_problem().map(|problem| format!("strategy.path[{index}].source_ports: {problem}"))
        };
        let of_timeout = self.timeout_problem(tcp).map(|problem| format!("rdma.timeout: {problem}"));
        of_timeout.or_else(|| paths.iter().enumerate().find_map(of_path))
    }

    pub(super) fn validate(&self, paths: &[FlowPath], tcp: &Tcp, problems: &mut Problems) {
        for (index, device) in self.devices.iter().enumerate() {
            if let Some(before) = self.devices[..index].iter().find(|before| before.meets(device)) {
                problems.add("rdma.devices", format!("names ports of {} twice: {before}, {device}", device.name));
            }
        }
        if self.devices.len() > limits::RDMA_PORTS_MAX {
            let (most, count) = (limits::RDMA_PORTS_MAX, self.devices.len());
            problems.add(
                "rdma.devices",
                format!("names {count} devices, and each engine of a service has at most {most} ports"),
            );
        }
        problems.within("rdma.qps", &self.qps, &limits::FLOW_CONNECTIONS);
        problems.within("rdma.stripe_from", &self.stripe_from, &limits::RDMA_PART);
        problems.within("rdma.outstanding", &self.outstanding, &limits::RDMA_OUTSTANDING);
        problems.within("rdma.cq_entries", &self.cq_entries, &limits::RDMA_CQ_ENTRIES);
        problems.within("rdma.cq_poll", &self.cq_poll, &limits::RDMA_CQ_POLL);
        if let Some(index) = self.gid_index {
            problems.within("rdma.gid_index", &index, &limits::GID_INDEX);
        }
        if let Some(mtu) = self.mtu.filter(|mtu| ![256, 512, 1024, 2048, 4096].contains(mtu)) {
            problems.add("rdma.mtu", format!("must be 256, 512, 1024, 2048 or 4096, as devices have it, not {mtu}"));
        }
        problems.within("rdma.timeout", &self.timeout, &limits::RDMA_TIMEOUT);
        problems.within("rdma.retries", &self.retries, &limits::RDMA_RETRIES);
        problems.within("rdma.rnr_retries", &self.rnr_retries, &limits::RDMA_RETRIES);
        problems.within("rdma.service_level", &self.service_level, &limits::SERVICE_LEVEL);
        problems.within("rdma.traffic_class", &self.traffic_class, &limits::TRAFFIC_CLASS);
        problems.within("rdma.pkey_index", &self.pkey_index, &limits::PKEY_INDEX);
        if self.library.is_empty() {
            problems.add("rdma.library", "must name the file of libibverbs, such as \"libibverbs.so.1\"");
        }
        if let (RdmaUse::Required | RdmaUse::Standby, Some(problem)) = (self.usage, self.timeout_problem(tcp)) {
            problems.add("rdma.timeout", problem);
        }
        // Otherwise the first strategy's paths may be those of sockets; a service says so itself where its devices cannot have them.
        if self.usage != RdmaUse::Required {
            return;
        }
        for (index, path) in paths.iter().enumerate() {
            if let Some(problem) = path.rdma_problem() {
                problems.add(format!("strategy.path[{index}].source_ports"), problem);
            }
        }
    }
}

impl Ports {
    /// Why flows over RDMA cannot send from them, on any device.
    #[must_use]
    pub fn rdma_problem(self) -> Option<String> {
        let of_rdma = format!("RoCE v2 sends from ports {SOURCE_PORT_MIN}-65535");
        (self.first < SOURCE_PORT_MIN).then(|| format!("{of_rdma}, so over RDMA it cannot from {self}"))
    }
}

impl FlowPath {
    fn rdma_problem(&self) -> Option<String> {
        self.source_ports.and_then(Ports::rdma_problem)
    }
}
