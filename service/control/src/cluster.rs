//! Cluster views on the wire: hosts, their communicators, and who is stuck.

use mccs_telemetry::failed::FailedView;
use mccs_telemetry::missing_ranks::LateView;
use mccs_telemetry::stuck::{Culprit, StuckClass, StuckPart};
use serde::{Deserialize, Serialize};

/// A communicator, as the host of its first rank tells of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommSummary {
    /// Its number there.
    pub communicator: u64,
    /// The tenant's name for it, the same on all its hosts.
    pub unique_id: String,
    /// Its owner.
    pub tenant: String,
    /// The job that it is part of, as its launcher calls it; absent where that is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub job: String,
    /// Its ranks on all hosts.
    pub nranks: u32,
    /// How many hosts it has.
    pub hosts: u64,
    /// Collectives and point-to-point pairs completed on that host.
    pub operations: u64,
}

/// A communicator that is stuck.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StuckSummary {
    /// Its number on the host that tells.
    pub communicator: u64,
    /// The part that it is, if it is one: ranks have the whole's numbers.
    #[serde(default)]
    pub part: Option<StuckPart>,
    /// Its owner.
    pub tenant: String,
    /// The job that it is part of, as its launcher calls it; absent where that is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub job: String,
    /// The kind of its wait.
    pub class: StuckClass,
    /// The ranks to blame.
    pub culprits: Vec<Culprit>,
}

/// Summary of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostSummary {
    /// Its service's version.
    pub version: String,
    /// Whether it is being emptied.
    pub draining: bool,
    /// Why, where its operator has said.
    #[serde(default)]
    pub draining_reason: Option<String>,
    /// End of its certificate, in seconds of the Unix epoch.
    #[serde(default)]
    pub certificate_end: Option<u64>,
    /// Connected processes.
    pub sessions: u64,
    /// GPUs that its service has.
    pub gpus: u64,
    /// Those of them that it cannot use any more, and why.
    pub gpus_lost: Vec<String>,
    /// Hosts that it cannot reach.
    pub unreachable: Vec<String>,
    /// Communicators whose first rank is there.
    pub communicators: Vec<CommSummary>,
    /// More of them.
    pub more_communicators: u64,
    /// Set-ups that have waited for long.
    pub joining: Vec<LateView>,
    /// Communicators that failed within the last hour.
    pub failed: Vec<FailedView>,
    /// Communicators that are stuck, where that was asked.
    pub stuck: Vec<StuckSummary>,
    /// Communicators that were looked at for that, and those for which there was no room or time.
    pub looked_at: u64,
    /// See [`HostSummary::looked_at`].
    pub not_looked_at: u64,
}

/// A host of the cluster, as it was told of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterHost {
    /// Its name.
    pub host: String,
    /// Its summary; none if it did not answer.
    pub summary: Option<HostSummary>,
    /// Why there is no answer, where there is none.
    #[serde(default)]
    pub trouble: Option<String>,
}

/// The cluster, as a host was told of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterView {
    /// The host that was asked.
    pub asked: String,
    /// All hosts, by name.
    pub hosts: Vec<ClusterHost>,
}
