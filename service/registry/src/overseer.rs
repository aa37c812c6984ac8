//! Collects the overview of the whole service, for `mccsctl watch` and metrics.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use mccs_control::GpuView;
use mccs_control::overview::{
    COMMUNICATORS_TOLD_MAX, FLOWS_TOLD_MAX, MemoryView, Omitted, Overview, QuotaView, RANKS_TOLD_MAX, RefusedView,
    TenantView,
};
use mccs_runtime::{EngineInfo, Runtimes};
use mccs_telemetry::placed::Allotment;
use mccs_telemetry::trace::ClockView;
use mccs_telemetry::{CommonTime, lines_suppressed};
use mccs_tenants::default_quotas::Origin;
use mccs_tenants::memory_bound::{MemoryAllowed, MemoryBound};
use mccs_tenants::{AllSessions, Resource, Tenant};

use super::{CommInfo, Registry};

/// Source of an overview.
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
    /// How many sessions there may be of all tenants.
    pub all_sessions: Arc<AllSessions>,
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

    /// The most host memory that the service can come to hold with the tenants that there are.
    #[must_use]
    pub fn memory(&self) -> MemoryView {
        let MemoryBound { quotas_bytes, own_bytes } =
            MemoryBound::of(&self.registry.tenants(), self.all_sessions.most());
        let allowed = MemoryAllowed::here();
        let allowed_bytes = allowed.as_ref().map(|allowed| allowed.bytes);
        MemoryView { quotas_bytes, own_bytes, allowed_bytes, cgroup: allowed.and_then(|allowed| allowed.cgroup) }
    }

    /// How things are.
    #[must_use]
    pub fn look(&self) -> Overview {
        let (registry, now) = (&self.registry, Instant::now());
        let (totals, comms) = registry.totals();
        let more_comms = comms.len().saturating_sub(COMMUNICATORS_TOLD_MAX) as u64;
        let mut omitted = Omitted { communicators: more_comms, ..Omitted::default() };
        let mut ranks_left = RANKS_TOLD_MAX;
        let view = |comm: &Arc<CommInfo>| {
            let mut view = comm.view();
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
                rules: tenant.rules.clone(),
                labels: tenant.labels.clone(),
                quotas: quotas(tenant),
                in_flight: in_flight.get(&tenant.name).copied().unwrap_or(0),
                communicators: comms.iter().filter(|comm| comm.tenant == tenant.name && comm.part.is_none()).count()
                    as u64,
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
            hosts: registry.host_views(now),
            gpus: registry.gpus().iter().map(GpuView::of).collect(),
            memory: Some(self.memory()),
            draining: registry.is_draining(),
            draining_reason: registry.draining_reason(),
            certificate_end: registry.certificate_end(),
            office: registry.office(),
            clock_error_ns: registry.clock_error_ns(),
            clock: registry.clock().map(|(at, CommonTime { common_ns, error_ns })| ClockView {
                at_ns: registry.recorders.ns_at(at),
                common_ns,
                error_ns,
            }),
            pushes: registry.pushes(),
            runtimes: self.runtimes.runtimes(),
            engines: self.engines(),
            lines_suppressed: lines_suppressed(),
            refused: refused(registry),
            omitted,
        }
    }
}

/// Allotment of all of a tenant's communicators. Weight and caps are the tenant's, so any of them says them.
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
