//! Metrics by communicator and by rank.

use std::fmt::Display;

use mccs_control::overview::Overview;
use mccs_control::{CommView, RankView};

use super::{Kind, Labels, Metrics, seconds};

fn of_comm(comm: &CommView) -> [(&str, &dyn Display); 4] {
    [("tenant", &comm.tenant), ("communicator", &comm.communicator), ("device", &comm.device), ("name", &comm.name)]
}

fn of_rank<'a>(comm: &'a CommView, rank: &'a RankView) -> [(&'a str, &'a dyn Display); 3] {
    [("tenant", &comm.tenant), ("communicator", &comm.communicator), ("rank", &rank.rank)]
}

/// Appends metrics of each communicator.
pub(super) fn communicators(metrics: &mut Metrics, overview: &Overview) {
    type Value = fn(&CommView) -> u64;
    let comms = &overview.communicators;
    let values: [(&'static str, Kind, &str, Value); 5] = [
        ("mccs_communicator_operations_total", Kind::Counter, "Operations that a communicator has completed.", |c| {
            c.operations
        }),
        ("mccs_communicator_bytes_total", Kind::Counter, "Their payload, counted as nccl-tests does.", |c| c.bytes),
        ("mccs_communicator_failed_total", Kind::Counter, "Operations of a communicator that failed.", |c| c.failed),
        ("mccs_communicator_epoch", Kind::Gauge, "Number of the strategy in force.", |c| c.epoch),
        (
            "mccs_communicator_bus_bytes_total",
            Kind::Counter,
            "Bytes that an ideal ring would have moved over each link for the collectives that the service has run.",
            |c| c.bus_bytes,
        ),
    ];
    for (name, kind, help, value) in values {
        let family = metrics.family(name, kind, help);
        for comm in comms {
            family.sample(&of_comm(comm), value(comm));
        }
    }
    properties(metrics, comms);
    let times: [(&'static str, &str, Value); 2] = [
        ("mccs_communicator_busy_seconds_total", "Time in which such a collective was running.", |c| c.busy_ns),
        (
            "mccs_communicator_multiprocessor_seconds_total",
            "Time that GPUs' kernels held multiprocessors for collectives, of all ranks and multiprocessors together.",
            |c| c.multiprocessor_ns,
        ),
    ];
    for (name, help, value) in times {
        let family = metrics.family(name, Kind::Counter, help);
        for comm in comms {
            family.sample(&of_comm(comm), seconds(value(comm)));
        }
    }
    let family = metrics.family(
        "mccs_communicator_gpu_memory_bytes",
        Kind::Gauge,
        "GPU memory of a rank's part of a communicator, its share of shared slots included.",
    );
    for comm in comms.iter().filter(|comm| comm.gpu_memory_bytes > 0) {
        family.sample(&of_comm(comm), comm.gpu_memory_bytes);
    }
}

/// Appends the job, the whole and the transport of each communicator, as labels.
fn properties(metrics: &mut Metrics, comms: &[CommView]) {
    let family = metrics.family(
        "mccs_communicator_job",
        Kind::Gauge,
        "1, by the job that a communicator is part of, where that is known.",
    );
    for comm in comms.iter().filter(|comm| !comm.job.is_empty()) {
        family.sample(&[("tenant", &comm.tenant), ("communicator", &comm.communicator), ("job", &comm.job)], 1u64);
    }
    let family = metrics.family(
        "mccs_communicator_part",
        Kind::Gauge,
        "1, by the communicator that one is a part of, which its caller sees alone, and which part it is.",
    );
    for comm in comms {
        let (Some(whole), Some(part)) = (&comm.part_of, &comm.part) else { continue };
        let labels: &Labels<'_> =
            &[("tenant", &comm.tenant), ("communicator", &comm.communicator), ("whole", whole), ("part", part)];
        family.sample(labels, 1u64);
    }
    let family = metrics.family(
        "mccs_communicator_transport",
        Kind::Gauge,
        "1, by what carries a communicator's flows to other hosts, and why that is not RDMA.",
    );
    for comm in comms {
        let Some(transport) = comm.transport else { continue };
        let reason = comm.transport_reason.as_deref().unwrap_or_default();
        let [tenant, number] = [&comm.tenant as &dyn Display, &comm.communicator];
        let labels: &Labels<'_> =
            &[("tenant", tenant), ("communicator", number), ("transport", &transport), ("reason", &reason)];
        family.sample(labels, 1u64);
    }
}

/// Appends metrics of each rank of this host.
pub(super) fn ranks(metrics: &mut Metrics, overview: &Overview) {
    type Value = fn(&RankView) -> u64;
    let ranks = || overview.communicators.iter().flat_map(|comm| comm.ranks.iter().map(move |rank| (comm, rank)));
    let values: [(&'static str, &str, Value); 3] = [
        ("mccs_rank_enqueued_total", "Collectives that a rank has called.", |r| r.enqueued),
        ("mccs_rank_started_total", "Collectives that have begun on all ranks of this host.", |r| r.started),
        ("mccs_rank_completed_total", "Collectives of a rank that have ended.", |r| r.completed),
    ];
    for (name, help, value) in values {
        let family = metrics.family(name, Kind::Counter, help);
        for (comm, rank) in ranks() {
            family.sample(&of_rank(comm, rank), value(rank));
        }
    }
    let family = metrics.family(
        "mccs_rank_late_seconds_total",
        Kind::Counter,
        "Time by which a rank has come later to collectives than the first of its host.",
    );
    for (comm, rank) in ranks() {
        family.sample(&of_rank(comm, rank), seconds(rank.late_ns));
    }
    let family = metrics.family(
        "mccs_rank_user_tag",
        Kind::Gauge,
        "The last tag that a rank has given a collective (userProfilerTag of NCCL's per-collective configuration).",
    );
    for (comm, rank) in ranks() {
        rank.user_tag.into_iter().for_each(|tag| family.sample(&of_rank(comm, rank), tag));
    }
}
