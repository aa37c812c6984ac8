//! `[tcp]` of `service.toml`: source address, connections, source ports, DSCP, socket buffers,
//! congestion control, time-outs and paths of flows.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::rdma::Device;
use crate::limits;
use crate::units::{Bytes, DurationText};
use crate::validate::Problems;

/// `[tcp]`: flows of the TCP transport.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Tcp {
    /// This host's address for flows, also the one they are sent from. Absent: that of `exchange.listen`, or where that is
    /// any, of this host's `[[host]]`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// Sockets of a flow.
    pub connections: u32,
    /// Ports to send from. The kernel chooses where there are none. With ECMP in the network they decide a flow's path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_ports: Option<Ports>,
    /// Code point of the packets' differentiated services field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dscp: Option<u32>,
    /// Priority in this host's queues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// Socket buffers, each way. The kernel adapts them where this is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_buffer: Option<Bytes>,
    /// Name of the congestion control of its flows, such as `dctcp`, which the kernel has to have. The kernel's own where this
    /// is absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub congestion_control: Option<String>,
    /// How long connecting to a host may take.
    pub connect_timeout: DurationText,
    /// How long a host may leave a flow's packets unanswered before the flow goes on over another path. Zero: it stays where it is.
    pub path_timeout: DurationText,
    /// How long a host may leave packets unanswered on every path before its flows fail: longer than a link may be down.
    pub silence_timeout: DurationText,
}

impl Default for Tcp {
    fn default() -> Self {
        Tcp {
            address: None,
            connections: 1,
            source_ports: None,
            dscp: None,
            priority: None,
            socket_buffer: None,
            congestion_control: None,
            connect_timeout: DurationText::secs(10),
            path_timeout: DurationText::millis(300),
            silence_timeout: DurationText::secs(30),
        }
    }
}

/// Ports from one to another, both included, written `"20000-20999"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ports {
    /// At least 1.
    pub first: u16,
    /// At least `first`.
    pub last: u16,
}

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let range = text.split_once('-').and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
        let right = match range {
            Some((first, last)) if 0 < first && first <= last => return Ok(Ports { first, last }),
            Some((0, _)) => "ports are from 1 to 65535".to_owned(),
            Some((first, last)) => format!("the smaller one first: \"{last}-{first}\""),
            None => match text.parse::<u16>() {
                Ok(port) => format!("of one port write \"{port}-{port}\""),
                Err(_) => "write for example \"20000-20999\", with ports from 1 to 65535".to_owned(),
            },
        };
        Err(format!("{text:?} is no range of ports: {right}"))
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

impl Serialize for Ports {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Ports {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// `[[strategy.path]]`: a way through the network. What is absent is as `[tcp]` says. All of it is the sender's.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct FlowPath {
    /// Device that flows leave the sending host by. Over TCP the name of a network interface, from whose address they are sent; over RDMA
    /// a device, or a port of it, to which they come home.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<Device>,
    /// Ports to send from. With explicit rules or ECMP in the network they decide the path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_ports: Option<Ports>,
    /// Code point of the packets' differentiated services field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dscp: Option<u32>,
    /// Priority in this host's queues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
}

impl FlowPath {
    /// Of the paths of a list: `key[0]` is the first. Two whose ports overlap, and that nothing else tells apart, are one path in part.
    pub(crate) fn validate_all(paths: &[FlowPath], key: &str, problems: &mut Problems) {
        for (index, path) in paths.iter().enumerate() {
            path.validate(&format!("{key}[{index}]"), problems);
        }
        let with_ports = paths.iter().enumerate().filter_map(|(index, path)| Some((path.source_ports?, index, path)));
        let mut sorted: Vec<_> = with_ports.collect();
        let apart = |path: &FlowPath| (path.device.as_ref().map(Device::to_string), path.dscp);
        sorted.sort_by_cached_key(|(ports, index, path)| (apart(path), ports.first, ports.last, *index));
        // Whoever reaches furthest of those before.
        let mut widest: Option<(Ports, usize, &FlowPath)> = None;
        for (ports, index, path) in sorted {
            if let Some((wide, other, before)) = widest.filter(|(.., before)| apart(before) == apart(path)) {
                // The same path may stand for several channels.
                if wide != ports && ports.first <= wide.last {
                    let (later, earlier) = (index.max(other), index.min(other));
                    let key = format!("{key}[{later}].source_ports");
                    problems.add(key, format!("path {earlier} has some of these ports ({wide} and {ports}): flows of both may take one path"));
                }
                if ports.last <= wide.last {
                    widest = Some((wide, other, before));
                    continue;
                }
            }
            widest = Some((ports, index, path));
        }
    }

    /// Of the path at `key`.
    fn validate(&self, key: &str, problems: &mut Problems) {
        if let Some(dscp) = self.dscp {
            problems.within(format!("{key}.dscp"), &dscp, &limits::DSCP);
        }
        if let Some(priority) = self.priority {
            problems.within(format!("{key}.priority"), &priority, &limits::PRIORITY);
        }
    }
}

/// Whether it can be a name of the kernel's.
fn is_congestion_control(name: &str) -> bool {
    (1..=limits::CONGESTION_CONTROL_NAME_MAX).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_' || byte == b'-')
}

impl Tcp {
    pub(super) fn validate(&self, problems: &mut Problems) {
        if let Some(address) = self.address.filter(IpAddr::is_unspecified) {
            problems.add("tcp.address", format!("other hosts connect to it, and cannot to {address}"));
        }
        problems.within("tcp.connections", &self.connections, &limits::FLOW_CONNECTIONS);
        if let Some(dscp) = self.dscp {
            problems.within("tcp.dscp", &dscp, &limits::DSCP);
        }
        if let Some(priority) = self.priority {
            problems.within("tcp.priority", &priority, &limits::PRIORITY);
        }
        if let Some(bytes) = self.socket_buffer {
            problems.within("tcp.socket_buffer", &bytes, &limits::SOCKET_BUFFER);
        }
        if let Some(name) = &self.congestion_control
            && !is_congestion_control(name)
        {
            problems.add("tcp.congestion_control", format!("{name:?} is no name of one; write for example \"dctcp\""));
        }
        problems.within("tcp.connect_timeout", &self.connect_timeout, &limits::FLOW_TIMEOUT);
        problems.within("tcp.path_timeout", &self.path_timeout, &limits::PATH_TIMEOUT);
        problems.within("tcp.silence_timeout", &self.silence_timeout, &limits::FLOW_TIMEOUT);
        if self.path_timeout.0 >= self.silence_timeout.0 {
            let (path, silence) = (&self.path_timeout, &self.silence_timeout);
            let why = format!("must be less than tcp.silence_timeout, {silence}, after which a flow fails, not {path}");
            problems.add("tcp.path_timeout", why);
        }
    }
}
