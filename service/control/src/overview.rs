//! Overview of a service: what `mccsctl watch` shows and what metrics are made of, so that both say
//! the same. Numbers only rise, but where the words say otherwise; who looks twice finds rates.
//!
//! Bounded: of very many communicators, ranks or flows the first are told, and how many were left out.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::OfficeView;
use crate::views::{CommView, GpuView, HostView};
use mccs_runtime::{EngineInfo, RuntimeInfo};
use mccs_telemetry::bandwidth::TenantKindView;
use mccs_telemetry::flows::{FlowView, PathView};
use mccs_telemetry::missing_ranks::LateView;
use mccs_telemetry::placed::Allotment;
use mccs_telemetry::trace::ClockView;

/// Communicators that are told of, at most: each is some ten series.
pub const COMMUNICATORS_TOLD_MAX: usize = 1024;
/// Ranks that are told of, at most, of all communicators together.
pub const RANKS_TOLD_MAX: usize = 4096;
/// Flows that are told of, at most.
pub const FLOWS_TOLD_MAX: usize = 4096;

/// How much of a quota is in use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaView {
    /// The resource.
    pub resource: String,
    /// In use now.
    pub used: u64,
    /// May be in use.
    pub limit: u64,
    /// Source of the limit; absent if the operator has said it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_from: Option<String>,
}

/// A tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantView {
    /// Its name.
    pub tenant: String,
    /// The tenant of `policy.toml` whose rules hold for it.
    #[serde(default)]
    pub rules: String,
    /// Labels for operators beside its name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Its quotas.
    pub quotas: Vec<QuotaView>,
    /// Operations not ended, now.
    pub in_flight: u64,
    /// Communicators now.
    pub communicators: u64,
    /// Operations completed, of communicators that have ended, too; here and below.
    pub operations: u64,
    /// Point-to-point pairs among them.
    pub pairs: u64,
    /// Their payload.
    pub bytes: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Collectives that the service has run, by kind.
    pub kinds: Vec<TenantKindView>,
    /// The controller's allotment for all its communicators on this host together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allotment: Option<Allotment>,
}

/// Objects that were left out of an [`Overview`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Omitted {
    /// Communicators.
    pub communicators: u64,
    /// Ranks of communicators that were not.
    pub ranks: u64,
    /// Flows.
    pub flows: u64,
}

/// Connections refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RefusedView {
    /// By whom.
    pub endpoint: String,
    /// How many.
    pub connections: u64,
}

/// Pushes of metrics to a collector.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushesView {
    /// The collector has taken all of them.
    pub accepted: u64,
    /// It was not reached, has refused, or has rejected a part.
    pub failed: u64,
    /// Why the last one has failed, if it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trouble: Option<String>,
}

/// The most host memory that a service can come to hold, beside what it may.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryView {
    /// Sum of its tenants' quotas.
    pub quotas_bytes: u64,
    /// Its own part: a constant of its own, and a part for each session.
    pub own_bytes: u64,
    /// The limit of its memory, where the kernel says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_bytes: Option<u64>,
    /// The cgroup whose `memory.max` that is; absent where it is the host's memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<PathBuf>,
}

impl MemoryView {
    /// The way out where it is too much.
    pub const ADVICE: &str = "jobs are refused memory, or ended, before all have what they may: set [[tenant]] max_memory, or raise MemoryMax=";

    /// All that it can come to hold.
    #[must_use]
    pub fn most_bytes(&self) -> u64 {
        self.quotas_bytes.saturating_add(self.own_bytes)
    }

    /// Whether that is more than it may take.
    #[must_use]
    pub fn is_too_much(&self) -> bool {
        self.allowed_bytes.is_some_and(|allowed| allowed < self.most_bytes())
    }
}

impl std::fmt::Display for MemoryView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        let (most, quotas, own) = (mib(self.most_bytes()), mib(self.quotas_bytes), mib(self.own_bytes));
        write!(
            f,
            "the service holds at most {most} MiB: {quotas} of its tenants' quotas (max_memory), and {own} of its own"
        )?;
        match (self.allowed_bytes.map(mib), &self.cgroup) {
            (Some(allowed), Some(cgroup)) => {
                write!(f, "; it may take {allowed} MiB (memory.max of {}, MemoryMax= of its unit)", cgroup.display())
            }
            (Some(allowed), None) => write!(f, "; the host has {allowed} MiB"),
            (None, _) => Ok(()),
        }
    }
}

/// A service at a moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Overview {
    /// Its name.
    pub host: String,
    /// Its version.
    pub version: String,
    /// When, since it began.
    pub at_ns: u64,
    /// Tenants, by name.
    pub tenants: Vec<TenantView>,
    /// Communicators, by number.
    pub communicators: Vec<CommView>,
    /// Communicators that have waited for ranks for long.
    #[serde(default)]
    pub joining: Vec<LateView>,
    /// Flows to and from other hosts.
    pub flows: Vec<FlowView>,
    /// Traffic by peer and path.
    pub paths: Vec<PathView>,
    /// Hosts of the cluster.
    pub hosts: Vec<HostView>,
    /// The service's GPUs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<GpuView>,
    /// The most host memory that it can come to hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryView>,
    /// Whether processes that have no session are refused: `mccsctl drain`.
    #[serde(default)]
    pub draining: bool,
    /// Why, where the operator has said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining_reason: Option<String>,
    /// Until when other hosts take this one for who it is, in seconds of the Unix epoch: the end of its certificate, or of one above it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_end: Option<u64>,
    /// The controller's office, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub office: Option<OfficeView>,
    /// By how much this host's estimate of the cluster's common clock may be wrong, where its communicators send at certain times.
    #[serde(default)]
    pub clock_error_ns: Option<u64>,
    /// The common clock's time when it was last needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<ClockView>,
    /// Results of pushes to the collector, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pushes: Option<PushesView>,
    /// Threads.
    pub runtimes: Vec<RuntimeInfo>,
    /// Engines on them.
    pub engines: Vec<EngineInfo>,
    /// Lines that were not logged, since there were too many.
    pub lines_suppressed: u64,
    /// Connections that were refused.
    pub refused: Vec<RefusedView>,
    /// Objects that are not told.
    pub omitted: Omitted,
}
