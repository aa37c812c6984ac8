//! Account of a communicator from one host: its ranks, their calls, and flows.

use serde::{Deserialize, Serialize};

use crate::flows::{FlowBytes, FlowName, FlowView};
use mccs_model::link::FlowWait;

/// Ranks that a host tells of, at most: those that lag come first.
pub const RANKS_TOLD_MAX: usize = 256;
/// Flows that a host tells of, at most.
pub const FLOWS_TOLD_MAX: usize = 256;
/// Calls in which a rank waits, and peers, of which its account tells, at most.
pub const CALLS_TOLD_MAX: usize = 8;

/// A rank's sends and receives with another one, since the communicator began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairAccount {
    /// The other rank.
    pub peer: u32,
    /// Sends to it to which the rank's streams have come.
    pub sends: u64,
    /// Sends among them that have not ended.
    pub open_sends: u64,
    /// Receives from it to which the rank's streams have come.
    pub recvs: u64,
    /// Sends among them that have not ended.
    pub open_recvs: u64,
}

/// A signal of a port channel for which a rank waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignalWait {
    /// The rank that is to signal.
    pub peer: u32,
    /// Under which tag.
    pub tag: u32,
    /// The first that has not come, from 1.
    pub number: u64,
}

impl std::fmt::Display for SignalWait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let SignalWait { peer, tag, number } = self;
        write!(f, "signal {number} of ({peer}, tag {tag})")
    }
}

/// A rank, as its host knows it. Numbers count collectives, from 0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankAccount {
    /// The rank.
    pub rank: u32,
    /// Its process; 0 if it is not known.
    pub pid: i32,
    /// Its GPU, by its number at its host.
    #[serde(default)]
    pub gpu: Option<u32>,
    /// Called by the tenant.
    pub called: u64,
    /// Begun on all ranks of its host.
    #[serde(default)]
    pub started: u64,
    /// Ended, as far as the rank is concerned.
    #[serde(default)]
    pub completed: u64,
    /// Time by which it has come later to these than the first rank of its host.
    #[serde(default)]
    pub late_ns: u64,
    /// The last of them that has begun, in words; empty if it is not known.
    #[serde(default)]
    pub last: String,
    /// Whether its next collective waits behind something else on its stream.
    pub is_behind: bool,
    /// Number of that collective.
    #[serde(default)]
    pub behind_seq: Option<u64>,
    /// Operation that it has not come to and others wait for, in words, if that is no collective's number.
    #[serde(default)]
    pub holds_up: Option<String>,
    /// Operations that it waits in, the first of them.
    pub waits_in: Vec<String>,
    /// Signals for which its threads wait, the first of them.
    #[serde(default)]
    pub signals: Vec<SignalWait>,
    /// Milliseconds since it made the first of these calls, also where that had to wait for its turn in the service.
    #[serde(default)]
    pub waits_ms: Option<u64>,
    /// Its sends and receives, those that wait first.
    #[serde(default)]
    pub pairs: Vec<PairAccount>,
    /// Whether `pairs` has all of them. Hosts of earlier versions tell of none.
    #[serde(default)]
    pub has_all_pairs: bool,
    /// Whether it has left.
    pub has_left: bool,
}

impl RankAccount {
    /// All that it waits in, in words.
    #[must_use]
    pub fn waits(&self) -> Vec<String> {
        self.waits_in.iter().cloned().chain(self.signals.iter().map(SignalWait::to_string)).collect()
    }
}

/// How a flow leaves the host that sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowRoute {
    /// The channel, as [`FlowWait::channel`].
    pub channel: u16,
    /// Rank whose data it is.
    pub from: u32,
    /// Rank that is to get it.
    pub to: u32,
    /// In words: `tcp, ports 50000-50499`, `rdma mlx5_0:1, dscp 26`.
    pub route: String,
}

impl FlowRoute {
    /// The account of a flow that this host sends.
    #[must_use]
    pub fn of(flow: &FlowView) -> Self {
        let FlowName { channel, from, to, .. } = flow.name;
        FlowRoute { channel, from, to, route: flow.route() }
    }
}

/// A host's part of a communicator.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostAccount {
    /// Its ranks.
    pub ranks: Vec<RankAccount>,
    /// Collectives that have started there.
    pub started: u64,
    /// Those that have ended there and end nowhere before all ranks have come, and how long they took together, from when the last rank of
    /// the host had come.
    #[serde(default)]
    pub joint: Total,
    /// The last of them, in words; empty before the first, or where it is not known.
    pub last: String,
    /// Whether it has not ended.
    pub is_running: bool,
    /// Milliseconds since something happened there.
    pub idle_ms: u64,
    /// Requests of its tenant to the service that wait for the tenant's turn, calls among them.
    #[serde(default)]
    pub queued: u64,
    /// Flows that channels wait for.
    pub flows: Vec<FlowWait>,
    /// How its flows leave it, where that is known.
    #[serde(default)]
    pub routes: Vec<FlowRoute>,
    /// Bytes of its flows, in both directions, those first that it waits for.
    #[serde(default)]
    pub carried: Vec<FlowBytes>,
    /// Operations that its GPUs do not end, in words.
    #[serde(default)]
    pub gpus_wait: Option<String>,
    /// Why it has failed, if it has.
    pub failure: Option<String>,
    /// It had no room for the question, and nothing else is told.
    #[serde(default)]
    pub is_busy: bool,
}

/// Number and sum of times.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(u64, u64)", into = "(u64, u64)")]
pub struct Total {
    /// How often.
    pub count: u64,
    /// How long.
    pub sum_ns: u64,
}

impl From<(u64, u64)> for Total {
    fn from((count, sum_ns): (u64, u64)) -> Self {
        Total { count, sum_ns }
    }
}

impl From<Total> for (u64, u64) {
    fn from(Total { count, sum_ns }: Total) -> Self {
        (count, sum_ns)
    }
}

impl Total {
    /// Seconds, on average, of what came since a look before.
    pub(crate) fn average_since(self, then: Total) -> Option<f64> {
        let count = self.count.saturating_sub(then.count);
        (count > 0).then(|| self.sum_ns.saturating_sub(then.sum_ns) as f64 / count as f64 / 1e9)
    }
}

impl HostAccount {
    /// The account of a host whose ranks have all left: it keeps nothing of the communicator, and need not be asked.
    #[must_use]
    pub fn of_departed(ranks: &[u32]) -> Self {
        let left = |rank: &u32| RankAccount { rank: *rank, has_left: true, ..RankAccount::default() };
        HostAccount { ranks: ranks.iter().map(left).collect(), ..HostAccount::default() }
    }

    /// The account of a host that has no room for the question.
    #[must_use]
    pub fn of_busy() -> Self {
        HostAccount { is_busy: true, ..HostAccount::default() }
    }
}
