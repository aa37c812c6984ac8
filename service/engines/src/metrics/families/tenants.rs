//! Metrics by tenant: quotas, operations, durations, and the controller's allotments.

use std::fmt::Display;

use mccs_control::overview::{Overview, TenantView};
use mccs_telemetry::placed::Allotment;

use super::{Kind, Metrics};

/// Appends metrics of each tenant.
pub(super) fn tenants(metrics: &mut Metrics, overview: &Overview) {
    let tenants = &overview.tenants;
    let quotas = || tenants.iter().flat_map(|tenant| tenant.quotas.iter().map(move |quota| (tenant, quota)));
    let family = metrics.family("mccs_tenant_used", Kind::Gauge, "How much of a quota a tenant holds now.");
    for (tenant, quota) in quotas() {
        family.sample(&[("tenant", &tenant.tenant), ("resource", &quota.resource)], quota.used);
    }
    let family = metrics.family("mccs_tenant_quota", Kind::Gauge, "How much a tenant may hold.");
    for (tenant, quota) in quotas() {
        family.sample(&[("tenant", &tenant.tenant), ("resource", &quota.resource)], quota.limit);
    }
    let family = metrics.family(
        "mccs_tenant_info",
        Kind::Gauge,
        "1, by the tenant of policy.toml whose rules hold for a tenant, and its labels.",
    );
    for tenant in tenants {
        let own: [(&str, &dyn Display); 2] = [("tenant", &tenant.tenant), ("rules", &tenant.rules)];
        let labels = tenant.labels.iter().map(|(label, value)| (label.as_str(), value as &dyn Display));
        family.sample(&own.into_iter().chain(labels).collect::<Vec<_>>(), 1u64);
    }
    type Value = fn(&TenantView) -> u64;
    let values: [(&'static str, Kind, &str, Value); 5] = [
        ("mccs_tenant_in_flight", Kind::Gauge, "Operations of a tenant that have not ended.", |t| t.in_flight),
        ("mccs_tenant_communicators", Kind::Gauge, "Communicators of a tenant.", |t| t.communicators),
        (
            "mccs_tenant_operations_total",
            Kind::Counter,
            "Operations that a tenant's communicators have completed.",
            |t| t.operations,
        ),
        ("mccs_tenant_bytes_total", Kind::Counter, "Their payload, counted as nccl-tests does.", |t| t.bytes),
        ("mccs_tenant_failed_total", Kind::Counter, "Operations of a tenant's communicators that failed.", |t| {
            t.failed
        }),
    ];
    for (name, kind, help, value) in values {
        let family = metrics.family(name, kind, help);
        for tenant in tenants {
            family.sample(&[("tenant", &tenant.tenant)], value(tenant));
        }
    }
    let family = metrics.family(
        "mccs_tenant_joining",
        Kind::Gauge,
        "Communicators of a tenant that have waited for ranks for ten seconds.",
    );
    for TenantView { tenant, .. } in tenants {
        family.sample(&[("tenant", tenant)], overview.joining.iter().filter(|late| late.tenant == *tenant).count());
    }
    allotments(metrics, tenants);
    let kinds = || tenants.iter().flat_map(|tenant| tenant.kinds.iter().map(move |kind| (tenant, kind)));
    let family = metrics.family(
        "mccs_collective_duration_seconds",
        Kind::Histogram,
        "How long collectives run, from the last rank's arrival on this host. Without those that ranks do among themselves.",
    );
    for (tenant, kind) in kinds() {
        family.histogram(&[("tenant", &tenant.tenant), ("collective", &kind.collective)], &kind.durations);
    }
    let family = metrics.family("mccs_collective_bytes_total", Kind::Counter, "Payload of the same collectives.");
    for (tenant, kind) in kinds() {
        family.sample(&[("tenant", &tenant.tenant), ("collective", &kind.collective)], kind.bytes);
    }
}

/// Appends weights, caps and rates of tenants of which the controller has told.
fn allotments(metrics: &mut Metrics, tenants: &[TenantView]) {
    type Value = fn(&Allotment) -> Option<f64>;
    let values: [(&'static str, &str, Value); 4] = [
        ("mccs_tenant_weight", "By which a tenant shares contended links with others.", |told| {
            told.weight_milli.map(|weight| weight as f64 / 1e3)
        }),
        ("mccs_tenant_flow_cap_bytes_per_second", "Most payload that each of a tenant's flows sends.", |told| {
            told.flow_cap_bps.map(|bps| bps as f64 / 8.0)
        }),
        (
            "mccs_tenant_host_cap_bytes_per_second",
            "Most payload that a tenant's flows from this host send together.",
            |told| told.host_cap_bps.map(|bps| bps as f64 / 8.0),
        ),
        (
            "mccs_tenant_allotted_bytes_per_second",
            "Payload that a tenant's flows from this host may send together, where links are shared.",
            |told| told.allotted_bps.map(|bps| bps as f64 / 8.0),
        ),
    ];
    for (name, help, value) in values {
        let family = metrics.family(name, Kind::Gauge, help);
        for tenant in tenants {
            if let Some(value) = tenant.allotment.as_ref().and_then(value) {
                family.sample(&[("tenant", &tenant.tenant)], value);
            }
        }
    }
}
