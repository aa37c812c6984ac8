//! Views of flows and paths for operators: rates, losses, round-trip times (RTT).

use mccs_config::service::TransportKind;
use mccs_model::link::RankFlow;
use serde::{Deserialize, Serialize};

use super::names::NO_PATH;

/// Bytes of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowBytes {
    /// The channel, as [`LinkKey::channel`](mccs_model::link::LinkKey).
    pub channel: u16,
    /// Rank whose data it is.
    pub from: u32,
    /// Rank that is to get it.
    pub to: u32,
    /// Payload since it began.
    pub bytes: u64,
}

impl FlowBytes {
    /// Which flow it is.
    #[must_use]
    pub fn flow(&self) -> RankFlow {
        RankFlow { channel: self.channel, from: self.from, to: self.to }
    }
}

/// Which flow it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowName {
    /// The communicator's links on this host.
    pub links: u64,
    /// Number of the strategy; none of point-to-point operations.
    pub epoch: Option<u32>,
    /// Channel of the schedule.
    pub channel: u16,
    /// First rank of the program that sends.
    pub from: u32,
    /// First rank of the program that receives.
    pub to: u32,
    /// Whether this host sends.
    pub sends: bool,
    /// The other host.
    pub peer: String,
    /// Its transport, if the host has a choice.
    pub transport: Option<TransportKind>,
    /// See [`path_name`](super::path_name). The one that it takes now.
    pub path: String,
}

/// Statistics of packets. Nothing of flows that come in, and of those whose packets nobody here counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WireView {
    /// Packets with payload that were sent, repetitions included.
    #[serde(default)]
    pub segments: u64,
    /// Packets that were sent again.
    #[serde(default)]
    pub retransmits: u64,
    /// From a packet to its answer now, in microseconds; of a path that of its slowest flow.
    #[serde(default)]
    pub round_trip_us: Option<u64>,
}

impl WireView {
    /// Part of the packets that had to be sent again, in percent.
    #[must_use]
    pub fn loss_percent(&self) -> Option<f64> {
        (self.segments > 0).then(|| self.retransmits as f64 / self.segments as f64 * 100.0)
    }
}

/// A flow as the operator sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowView {
    /// Which.
    #[serde(flatten)]
    pub name: FlowName,
    /// Payload, over this path.
    pub bytes: u64,
    /// Messages, over this path.
    pub messages: u64,
    /// Statistics of its packets, over this path.
    #[serde(flatten)]
    pub wire: WireView,
    /// Rate that it may send, if a policy holds it to a cap or its tenant's share: payload in bits per second.
    pub allotted_bps: Option<u64>,
    /// Port of this host that it goes by, over RDMA: `mlx5_0:1`. None while it has left one and looks for another.
    #[serde(default)]
    pub port: Option<String>,
    /// Times that it has left a path, port and queue pairs, for another: it carried nothing any more, or a better one was back.
    #[serde(default)]
    pub paths_left: u64,
}

impl FlowView {
    /// Its transport, and over RDMA the port that it goes by: `rdma mlx5_0:1`. None where the host has no choice.
    #[must_use]
    pub fn carrier(&self) -> Option<String> {
        let kind = self.name.transport?;
        Some(self.port.as_ref().map_or_else(|| kind.to_string(), |port| format!("{kind} {port}")))
    }

    /// How it leaves its host, in words: what carries it, and its path. Empty where nobody has chosen anything.
    #[must_use]
    pub fn route(&self) -> String {
        let path = Some(self.name.path.clone()).filter(|path| path != NO_PATH);
        self.carrier().into_iter().chain(path).collect::<Vec<_>>().join(", ")
    }
}

/// All flows of a path to or from a peer, those that have ended included.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathView {
    /// The other host.
    pub peer: String,
    /// See [`path_name`](super::path_name).
    pub path: String,
    /// Whether this host sends.
    pub sends: bool,
    /// Flows now.
    pub flows: u64,
    /// Payload.
    pub bytes: u64,
    /// Messages.
    pub messages: u64,
    /// Times that flows over RDMA have left their paths for others.
    #[serde(default)]
    pub paths_left: u64,
    /// Statistics of packets.
    #[serde(flatten)]
    pub wire: WireView,
}
