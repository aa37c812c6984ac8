//! Metrics of NCCL's Inspector plugin, by its names and with its labels.

use std::fmt::Display;

use mccs_control::CommView;
use mccs_control::overview::Overview;
use mccs_telemetry::bandwidth::{PairSide, PairView};

use super::{Kind, Metrics};

/// A collective's name in NCCL's logs, and in the Inspector's labels.
pub(crate) fn nccl_name(collective: &str) -> &str {
    match collective {
        "all_reduce" => "AllReduce",
        "all_gather" => "AllGather",
        "reduce_scatter" => "ReduceScatter",
        "broadcast" => "Broadcast",
        "reduce" => "Reduce",
        "all_to_all" => "AlltoAll",
        "gather" => "Gather",
        "scatter" => "Scatter",
        // NCCL has none.
        "barrier" => "Barrier",
        other => other,
    }
}

/// Appends the metrics of NCCL's Inspector that are known here.
pub(super) fn inspector(metrics: &mut Metrics, overview: &Overview) {
    let node = &overview.host;
    let kinds = || overview.communicators.iter().flat_map(|comm| comm.kinds.iter().map(move |kind| (comm, kind)));
    let family = metrics.family(
        "nccl_bus_bandwidth_gbs",
        Kind::Gauge,
        "Bus bandwidth of a communicator's last collectives of a kind, in GB/s.",
    );
    for (comm, kind) in kinds() {
        let n_nodes = comm.hosts.len().max(1);
        family.sample(&by_kind(node, comm, &n_nodes, "collective", &nccl_name(&kind.collective)), kind.busbw_gbps);
    }
    let family = metrics.family(
        "nccl_collective_exec_time_microseconds",
        Kind::Gauge,
        "How long a communicator's last collectives of a kind took.",
    );
    for (comm, kind) in kinds() {
        let n_nodes = comm.hosts.len().max(1);
        family.sample(&by_kind(node, comm, &n_nodes, "collective", &nccl_name(&kind.collective)), kind.exec_us);
    }
    type Value = fn(&PairView) -> f64;
    let values: [(&'static str, &str, Value); 2] = [
        ("nccl_p2p_bus_bandwidth_gbs", "Payload by time of a communicator's last sends, or receives, in GB/s.", |p| {
            p.busbw_gbps
        }),
        ("nccl_p2p_exec_time_microseconds", "How long a communicator's last sends, or receives, took.", |p| p.exec_us),
    ];
    for (name, help, value) in values {
        let family = metrics.family(name, Kind::Gauge, help);
        for (comm, pair) in
            overview.communicators.iter().flat_map(|comm| comm.pair_sides.iter().map(move |pair| (comm, pair)))
        {
            let n_nodes = comm.hosts.len().max(1);
            let side = match pair.side {
                PairSide::Send => "Send",
                PairSide::Recv => "Recv",
            };
            family.sample(&by_kind(node, comm, &n_nodes, "p2p_operation", &side), value(pair));
        }
    }
    let family = metrics.family(
        "nccl_collectives_total",
        Kind::Counter,
        "Collectives that a tenant's communicators have completed.",
    );
    for tenant in &overview.tenants {
        family.sample(&[("tenant", &tenant.tenant), ("node", node)], tenant.operations.saturating_sub(tenant.pairs));
    }
    let family = metrics.family(
        "nccl_p2p_total",
        Kind::Counter,
        "Sends with their receives that a tenant's communicators have completed; between two hosts the sender's counts.",
    );
    for tenant in &overview.tenants {
        family.sample(&[("tenant", &tenant.tenant), ("node", node)], tenant.pairs);
    }
}

fn by_kind<'a>(
    node: &'a dyn Display,
    comm: &'a CommView,
    n_nodes: &'a usize,
    name: &'a str,
    value: &'a dyn Display,
) -> [(&'a str, &'a dyn Display); 6] {
    [
        ("tenant", &comm.tenant),
        ("node", node),
        ("comm_name", &comm.communicator),
        ("n_nodes", n_nodes),
        ("nranks", &comm.nranks),
        (name, value),
    ]
}
