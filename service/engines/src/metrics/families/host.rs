//! Metrics of the service as a whole: its host, GPUs, other hosts, and the controller.

use mccs_control::overview::Overview;

use super::{Kind, Metrics, seconds};

/// Appends metrics of the service, its GPUs, the other hosts and the controller.
pub(super) fn host(metrics: &mut Metrics, overview: &Overview) {
    metrics
        .family("mccs_info", Kind::Gauge, "The service that answers; always 1.")
        .sample(&[("host", &overview.host), ("version", &overview.version)], 1u64);
    metrics
        .family("mccs_uptime_seconds", Kind::Gauge, "Time since the service began.")
        .sample(&[], seconds(overview.at_ns));
    let family = metrics.family("mccs_host_up", Kind::Gauge, "Whether a host's service can be reached: 1, or 0.");
    for host in &overview.hosts {
        family.sample(&[("peer", &host.host)], host.up);
    }
    gpus(metrics, overview);
    metrics
        .family(
            "mccs_draining",
            Kind::Gauge,
            "Whether the operator empties the host, so that it refuses sessions: 1, or 0.",
        )
        .sample(&[], overview.draining);
    let family = metrics.family(
        "mccs_certificate_end_timestamp_seconds",
        Kind::Gauge,
        "When this host's certificate, or one above it, ends, in seconds of the Unix epoch.",
    );
    if let Some(unix_s) = overview.certificate_end {
        family.sample(&[], unix_s);
    }
    office(metrics, overview);
    let family = metrics.family(
        "mccs_clock_error_seconds",
        Kind::Gauge,
        "By how much the estimate of the cluster's common clock may be wrong, where communicators send at certain times.",
    );
    if let Some(error_ns) = overview.clock_error_ns {
        family.sample(&[], seconds(error_ns));
    }
}

/// Appends the state of each GPU.
fn gpus(metrics: &mut Metrics, overview: &Overview) {
    let family = metrics.family(
        "mccs_gpu_nic_access",
        Kind::Gauge,
        "1, by how NICs reach a GPU's memory, and why they do not in a better way.",
    );
    for gpu in &overview.gpus {
        let Some(access) = &gpu.nic_access else { continue };
        let reason = gpu.nic_access_reason.as_deref().unwrap_or_default();
        family.sample(&[("uuid", &gpu.gpu), ("access", access), ("reason", &reason)], 1u64);
    }
    let family = metrics.family(
        "mccs_gpu_lost",
        Kind::Gauge,
        "Whether the service cannot use a GPU any more, by the error that did it: 1, or 0.",
    );
    for gpu in &overview.gpus {
        let reason = gpu.lost.as_deref().unwrap_or_default();
        family.sample(&[("uuid", &gpu.gpu), ("reason", &reason)], gpu.lost.is_some());
    }
}

/// Appends this host's part in the controller's election, and the state of the store.
fn office(metrics: &mut Metrics, overview: &Overview) {
    let Some(office) = &overview.office else { return };
    let help = "Whether this host is the controller and may act: 1, or 0.";
    let acts = office.is_here && office.paused.is_none();
    metrics.family("mccs_controller_acts", Kind::Gauge, help).sample(&[], acts);
    let help = "The greatest term of an elected controller that the host has heard of.";
    let family = metrics.family("mccs_controller_term", Kind::Gauge, help);
    if let Some(term) = office.term {
        family.sample(&[], term);
    }
    let help = "Whether the cluster's store can be used: 1, or 0.";
    let family = metrics.family("mccs_store_usable", Kind::Gauge, help);
    if let Some(store) = &office.store {
        family.sample(&[("kind", &store.kind)], store.trouble.is_none());
    }
}
