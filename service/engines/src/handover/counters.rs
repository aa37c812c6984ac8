//! Counters of the whole service, which another program goes on with: they never fall.

use std::sync::atomic::Ordering;

use mccs_handover::{KindCounters, ServiceCounters, TenantCounters};
use mccs_registry::{Registry, TenantTotals};
use mccs_telemetry::bandwidth::TenantKindView;
use mccs_telemetry::histogram::HistogramView;
use mccs_telemetry::{lines_suppressed, resume_lines_suppressed};

/// Counts, without those of communicators that go on.
pub fn hand_over(registry: &Registry, goes_on: impl Fn(u64) -> bool) -> ServiceCounters {
    let totals = registry.totals_besides(goes_on);
    let kind = |TenantKindView { collective, bytes, durations }: TenantKindView| {
        let HistogramView { buckets, sum_ns } = durations;
        KindCounters { collective, bytes, buckets, sum_ns }
    };
    let of_tenant = |tenant: &std::sync::Arc<mccs_tenants::Tenant>| {
        let TenantTotals { operations, pairs, bytes, failed } = totals.get(&tenant.name).copied().unwrap_or_default();
        let kinds = tenant.traffic.view().into_iter().map(kind).collect();
        TenantCounters { tenant: tenant.name.clone(), operations, pairs, bytes, failed, kinds }
    };
    ServiceCounters {
        tenants: registry.tenants().iter().map(of_tenant).collect(),
        refused: registry.refused.counters().map(|counter| counter.load(Ordering::Relaxed)),
        lines_suppressed: lines_suppressed(),
    }
}

/// Goes on counting from there. Tenants that are none any more are left out.
pub(super) fn resume(registry: &Registry, counters: ServiceCounters) {
    let ServiceCounters { tenants, refused, lines_suppressed } = counters;
    for TenantCounters { tenant, operations, pairs, bytes, failed, kinds } in tenants {
        let Some(known) = registry.tenants().into_iter().find(|known| known.name == tenant) else { continue };
        registry.resume_totals(&tenant, TenantTotals { operations, pairs, bytes, failed });
        let kind = |KindCounters { collective, bytes, buckets, sum_ns }| TenantKindView {
            collective,
            bytes,
            durations: HistogramView { buckets, sum_ns },
        };
        known.traffic.resume(&kinds.into_iter().map(kind).collect::<Vec<_>>());
    }
    for (counter, count) in registry.refused.counters().into_iter().zip(refused) {
        counter.fetch_add(count, Ordering::Relaxed);
    }
    resume_lines_suppressed(lines_suppressed);
}
