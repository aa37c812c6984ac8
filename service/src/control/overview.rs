//! Everything the operator may want to see at once: what `mccsctl watch` shows and what metrics are made of, so that both say
//! the same. Numbers only rise, but where the words say otherwise; who looks twice finds rates.
//!
//! Bounded: of very many communicators, ranks or flows the first are told, and how many were left out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::{CommView, HostView};
use crate::default_quotas::Origin;
use crate::registry::{CommInfo, Registry};
use crate::runtime::{EngineInfo, RuntimeInfo, Runtimes};
use crate::telemetry::flows::{FlowView, PathView};
use crate::telemetry::late::LateView;
use crate::telemetry::placed::Allotment;
use crate::telemetry::trace::ClockView;
use crate::telemetry::traffic::TenantKindView;
use crate::telemetry::{CommonTime, lines_suppressed};
use crate::tenants::{Resource, Tenant};

/// Communicators that are told of, at most: each is some ten series.
pub const COMMUNICATORS_TOLD_MAX: usize = 1024;
/// Ranks that are told of, at most, of all communicators together.
pub const RANKS_TOLD_MAX: usize = 4096;
/// Flows that are told of, at most.
pub const FLOWS_TOLD_MAX: usize = 4096;

/// How much of a quota is in use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaView {
    /// Of what.
    pub resource: String,
    /// In use now.
    pub used: u64,
    /// May be in use.
    pub limit: u64,
    /// What the limit follows from; absent where the operator has said it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_from: Option<String>,
}

/// A tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantView {
    /// Its name.
    pub tenant: String,
    /// What it holds.
    pub quotas: Vec<QuotaView>,
    /// Operations not ended, now.
    pub in_flight: u64,
    /// Communicators now.
    pub communicators: u64,
    /// Operations completed, of communicators that have ended, too; here and below.
    pub operations: u64,
    /// Of those, point-to-point pairs.
    pub pairs: u64,
    /// Their payload.
    pub bytes: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Collectives that the service has run, by kind.
    pub kinds: Vec<TenantKindView>,
    /// What the controller has told this host of what it may have: of all its communicators together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allotment: Option<Allotment>,
}

/// What was left out of an [`Overview`].
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
    /// What they carry, by peer and path.
    pub paths: Vec<PathView>,
    /// Hosts of the cluster.
    pub hosts: Vec<HostView>,
    /// Whether processes that have no session are refused: `mccsctl drain`.
    #[serde(default)]
    pub draining: bool,
    /// Why, where the operator has said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draining_reason: Option<String>,
    /// Until when other hosts take this one for who it is, in seconds of the Unix epoch: the end of its certificate, or of one above it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate_end: Option<u64>,
    /// By how much this host's estimate of the cluster's common clock may be wrong, where its communicators send at certain times.
    #[serde(default)]
    pub clock_error_ns: Option<u64>,
    /// What the common clock has shown when it was last needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<ClockView>,
    /// Threads.
    pub runtimes: Vec<RuntimeInfo>,
    /// What runs on them.
    pub engines: Vec<EngineInfo>,
    /// Lines that were not logged, since there were too many.
    pub lines_suppressed: u64,
    /// Connections that were refused.
    pub refused: Vec<RefusedView>,
    /// What is not told.
    pub omitted: Omitted,
}

/// Where an overview comes from.
#[derive(Clone)]
pub struct Overseer {
    /// The service's name.
    pub host: String,
    /// When it began.
    pub since: Instant,
    /// Sessions, communicators, flows.
    pub registry: Arc<Registry>,
    /// Engines and where they run.
    pub runtimes: Arc<Runtimes>,
}

impl Overseer {
    /// All engines, and for which tenants they have worked how long.
    #[must_use]
    pub fn engines(&self) -> Vec<EngineInfo> {
        let tenants = self.registry.tenants();
        let name =
            |number| tenants.iter().find(|tenant| tenant.share.tenant == number).map(|tenant| tenant.name.clone());
        let mut engines = self.runtimes.engines();
        for engine in &mut engines {
            let named = engine.work_ns.iter().filter_map(|(number, ns)| Some((name(*number)?, ns / 1_000_000)));
            engine.tenants = named.collect();
        }
        engines
    }

    /// How things are.
    #[must_use]
    pub fn look(&self) -> Overview {
        let (registry, now) = (&self.registry, Instant::now());
        let (totals, comms) = registry.totals();
        let more_comms = comms.len().saturating_sub(COMMUNICATORS_TOLD_MAX) as u64;
        let mut omitted = Omitted { communicators: more_comms, ..Omitted::default() };
        let mut ranks_left = RANKS_TOLD_MAX;
        let view = |comm: &Arc<_>| {
            let mut view = CommView::of(comm);
            omitted.ranks += view.ranks.len().saturating_sub(ranks_left) as u64;
            view.ranks.truncate(ranks_left);
            ranks_left -= view.ranks.len();
            view
        };
        let communicators = comms.iter().take(COMMUNICATORS_TOLD_MAX).map(view).collect();
        let (flows, more_flows) = registry.flows.flows(FLOWS_TOLD_MAX);
        omitted.flows = more_flows;
        let mut in_flight: BTreeMap<String, u64> = BTreeMap::new();
        for session in registry.sessions() {
            *in_flight.entry(session.tenant.name.clone()).or_default() += session.in_flight();
        }
        let tenant = |tenant: &Arc<Tenant>| {
            let totals = totals.get(&tenant.name).copied().unwrap_or_default();
            TenantView {
                tenant: tenant.name.clone(),
                quotas: quotas(tenant),
                in_flight: in_flight.get(&tenant.name).copied().unwrap_or(0),
                communicators: comms.iter().filter(|comm| comm.tenant == tenant.name).count() as u64,
                operations: totals.operations,
                pairs: totals.pairs,
                bytes: totals.bytes,
                failed: totals.failed,
                kinds: tenant.traffic.view(),
                allotment: allotment(comms.iter().filter(|comm| comm.tenant == tenant.name)),
            }
        };
        Overview {
            host: self.host.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            at_ns: now.saturating_duration_since(self.since).as_nanos() as u64,
            tenants: registry.tenants().iter().map(tenant).collect(),
            communicators,
            joining: registry.late_views(now),
            flows,
            paths: registry.flows.paths(),
            hosts: registry.hosts().iter().map(|host| HostView::of(host, now)).collect(),
            draining: registry.is_draining(),
            draining_reason: registry.draining_reason(),
            certificate_end: registry.certificate_end(),
            clock_error_ns: registry.clock_error_ns(),
            clock: registry.clock().map(|(at, CommonTime { common_ns, error_ns })| ClockView {
                at_ns: registry.recorders.ns_at(at),
                common_ns,
                error_ns,
            }),
            runtimes: self.runtimes.runtimes(),
            engines: self.engines(),
            lines_suppressed: lines_suppressed(),
            refused: refused(registry),
            omitted,
        }
    }
}

/// Of all of a tenant's communicators. Weight and caps are the tenant's, so any of them says them.
fn allotment<'a>(comms: impl Iterator<Item = &'a Arc<CommInfo>>) -> Option<Allotment> {
    let told = comms.filter_map(|comm| comm.placed.as_ref()?.pace_use.allotment());
    told.reduce(|all, one| Allotment {
        weight_milli: all.weight_milli.or(one.weight_milli),
        flow_cap_bps: all.flow_cap_bps.or(one.flow_cap_bps),
        host_cap_bps: all.host_cap_bps.or(one.host_cap_bps),
        allotted_bps: match (all.allotted_bps, one.allotted_bps) {
            (Some(all), Some(one)) => Some(all.saturating_add(one)),
            (all, one) => all.or(one),
        },
    })
}

fn quotas(tenant: &Tenant) -> Vec<QuotaView> {
    let quota = &tenant.quota;
    let view = |resource: &str, which, limit, from: Option<Origin>| QuotaView {
        resource: resource.into(),
        used: tenant.used(which),
        limit,
        limit_from: from.map(|from| from.to_string()),
    };
    let origins = &quota.origins;
    vec![
        view("memory_bytes", Resource::MemoryBytes, quota.memory_bytes, origins.memory),
        view("gpu_memory_bytes", Resource::GpuMemoryBytes, quota.gpu_memory_bytes, origins.gpu_memory),
        view("sessions", Resource::Sessions, quota.sessions, origins.sessions),
        view("communicators", Resource::Communicators, quota.communicators, origins.communicators),
        view("communicator_ranks", Resource::Ranks, quota.ranks(), None),
    ]
}

fn refused(registry: &Registry) -> Vec<RefusedView> {
    let refused = &registry.refused;
    let endpoints = [
        ("tenants", &refused.tenants),
        ("control", &refused.control),
        ("exchange", &refused.exchange),
        ("metrics", &refused.metrics),
    ];
    let view = |(endpoint, count): (&str, &std::sync::atomic::AtomicU64)| RefusedView {
        endpoint: endpoint.into(),
        connections: count.load(Ordering::Relaxed),
    };
    endpoints.into_iter().map(view).collect()
}
