//! `[strategy]` of `service.toml`: algorithm, channels, reductions and paths that a communicator starts with.

use serde::{Deserialize, Serialize};

use super::tcp::FlowPath;

/// `[strategy]`: what a communicator starts with, until the operator decides otherwise. Hosts that share communicators need the
/// same: set-up fails, and names the host, where they differ.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Strategy {
    /// The algorithm of collectives, or the choice left to the service.
    pub algorithm: AlgorithmChoice,
    /// Channels of a communicator. Absent: one for each NIC of the host with most, over RDMA; at least [`CHANNELS_MIN`] where processors
    /// may combine what comes, and over TCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channels: Option<u32>,
    /// How GPUs of more than two hosts reduce long data. A communicator keeps what it began with.
    pub reductions: Reductions,
    /// Ways through the network: channels go round them. None: all flows are as `[tcp]` says.
    #[serde(rename = "path", skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<FlowPath>,
}

/// Channels of a communicator that one NIC, or sockets, need: one is reduced while the other's messages are under way.
pub const CHANNELS_MIN: u32 = 2;

impl Default for Strategy {
    fn default() -> Self {
        Strategy {
            algorithm: AlgorithmChoice::Auto,
            channels: None,
            reductions: Reductions::default(),
            paths: Vec::new(),
        }
    }
}

/// The operator's algorithm of collectives, or the choice left to the service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum AlgorithmChoice {
    /// What the cost model picks for the size.
    #[default]
    Auto,
    /// One pass over memory, for ranks of one host. Across hosts: as `auto`.
    SinglePass,
    /// Ring of ranks.
    Ring,
    /// Tree of ranks. Like the other forms but the rings, only for some collectives: the rest goes round the ring.
    Tree,
    /// Ring of hosts, each of which acts for all its ranks.
    HostRing,
    /// Tree of hosts.
    HostTree,
    /// Every host to every other at once, for short data.
    OneShot,
}

impl AlgorithmChoice {
    /// As the operator writes it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            AlgorithmChoice::Auto => "auto",
            AlgorithmChoice::SinglePass => "single_pass",
            AlgorithmChoice::Ring => "ring",
            AlgorithmChoice::Tree => "tree",
            AlgorithmChoice::HostRing => "host_ring",
            AlgorithmChoice::HostTree => "host_tree",
            AlgorithmChoice::OneShot => "one_shot",
        }
    }
}

/// How GPUs of several hosts reduce.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Reductions {
    /// Each host exchanges with every other.
    #[default]
    AllToAll,
    /// Each host adds its own to what the one before it in a ring passes on.
    Ring,
}
