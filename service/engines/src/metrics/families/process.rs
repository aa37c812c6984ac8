//! Metrics of the service's process: threads, engines, suppressed log lines, refused connections,
//! pushes.

use mccs_control::overview::Overview;
use mccs_runtime::work_by_tenant;

use super::{Kind, Metrics, seconds};

/// Appends metrics of the service's process.
pub(super) fn process(metrics: &mut Metrics, overview: &Overview) {
    let family = metrics.family("mccs_runtime_rounds_total", Kind::Counter, "Rounds of polling of a runtime.");
    for runtime in &overview.runtimes {
        family.sample(&[("runtime", &runtime.name)], runtime.rounds);
    }
    let family = metrics.family("mccs_runtime_parks_total", Kind::Counter, "Times that a runtime went to sleep.");
    for runtime in &overview.runtimes {
        family.sample(&[("runtime", &runtime.name)], runtime.parks);
    }
    let family = metrics.family("mccs_engines", Kind::Gauge, "Engines on a runtime.");
    for runtime in &overview.runtimes {
        let here = overview.engines.iter().filter(|engine| engine.runtime == runtime.index);
        family.sample(&[("runtime", &runtime.name)], here.count());
    }
    let family = metrics.family(
        "mccs_engine_work_seconds_total",
        Kind::Counter,
        "Work that engines have done for each tenant, about; its sessions' engines together are one.",
    );
    for ((engine, tenant), ms) in work_by_tenant(&overview.engines) {
        family.sample(&[("engine", &engine), ("tenant", &tenant)], seconds(ms * 1_000_000));
    }
    metrics
        .family(
            "mccs_log_lines_suppressed_total",
            Kind::Counter,
            "Lines not logged, since tenants or strangers caused too many.",
        )
        .sample(&[], overview.lines_suppressed);
    let family = metrics.family(
        "mccs_connections_refused_total",
        Kind::Counter,
        "Connections refused, by who would have served them.",
    );
    for refused in &overview.refused {
        family.sample(&[("endpoint", &refused.endpoint)], refused.connections);
    }
    if let Some(pushes) = &overview.pushes {
        let family = metrics.family(
            "mccs_otlp_pushes_total",
            Kind::Counter,
            "Pushes of metrics to the collector, by what became of them.",
        );
        for (result, count) in [("accepted", pushes.accepted), ("failed", pushes.failed)] {
            family.sample(&[("result", &result)], count);
        }
    }
    let family =
        metrics.family("mccs_omitted", Kind::Gauge, "Objects without series, since there are too many of their kind.");
    let omitted = &overview.omitted;
    for (of, count) in [("communicators", omitted.communicators), ("ranks", omitted.ranks), ("flows", omitted.flows)] {
        family.sample(&[("of", &of)], count);
    }
}
