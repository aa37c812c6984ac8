//! Metrics in Prometheus' text format 0.0.4: names, labels, values. Pure: an overview goes in, text
//! comes out.
//!
//! Names that begin with `nccl_` are those of NCCL's Inspector plugin, with the labels of its that mean something here, and their values; `tenant`
//! is ours. It has more labels: queries that choose or join by `message_size`, `algo_proto`, `gpu`, `slurm_job_id` or `version` find nothing. Its
//! means are of what has ended between two looks, and geometric for bandwidth; ours are of the last operations. Ours begin with `mccs_`. `docs/METRICS.md` says what each means, and a test compares.
//! Series are bounded as [`mccs_control::overview`] is; those of a communicator end with it.

use std::fmt::{Display, Write as _};

use mccs_control::overview::{Overview, TenantView};
use mccs_control::{CommView, RankView};
use mccs_runtime::work_by_tenant;
use mccs_telemetry::bandwidth::{PairSide, PairView};
use mccs_telemetry::flows::PathView;
use mccs_telemetry::histogram::{BUCKETS, HistogramView, bound_seconds};
use mccs_telemetry::placed::Allotment;

/// What the values of a metric are.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Rises, or begins again at 0 with the service.
    Counter,
    /// Rises and falls.
    Gauge,
    /// Counts by upper bound.
    Histogram,
}

type Labels<'a> = [(&'a str, &'a dyn Display)];

/// The text as it grows.
#[derive(Default)]
struct Text(String);

/// A label's value, with what the format gives a meaning escaped.
struct Escaped<T>(T);

impl<T: Display> Display for Escaped<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = self.0.to_string();
        text.chars().try_for_each(|c| match c {
            '\\' => f.write_str("\\\\"),
            '"' => f.write_str("\\\""),
            '\n' => f.write_str("\\n"),
            c => f.write_char(c),
        })
    }
}

/// A metric whose samples follow.
struct Family<'a> {
    text: &'a mut String,
    name: &'static str,
}

impl Text {
    fn family(&mut self, name: &'static str, kind: Kind, help: &str) -> Family<'_> {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Family { text: &mut self.0, name }
    }
}

impl Family<'_> {
    fn sample(&mut self, labels: &Labels<'_>, value: impl Display) {
        self.sample_of("", labels, value);
    }

    fn sample_of(&mut self, suffix: &str, labels: &Labels<'_>, value: impl Display) {
        // Writing into a text does not fail.
        let _ = write!(self.text, "{}{suffix}", self.name);
        for (at, (label, text)) in labels.iter().enumerate() {
            let _ = write!(self.text, "{}{label}=\"{}\"", if at == 0 { '{' } else { ',' }, Escaped(text));
        }
        let _ = writeln!(self.text, "{} {value}", if labels.is_empty() { "" } else { "}" });
    }

    fn histogram(&mut self, labels: &Labels<'_>, view: &HistogramView) {
        let mut so_far = 0;
        for (bucket, count) in view.buckets.iter().enumerate().take(BUCKETS) {
            so_far += count;
            let bound = bound_seconds(bucket);
            self.sample_of("_bucket", &[labels, &[("le", &bound)]].concat(), so_far);
        }
        let total = view.total();
        self.sample_of("_bucket", &[labels, &[("le", &"+Inf")]].concat(), total);
        self.sample_of("_sum", labels, seconds(view.sum_ns));
        self.sample_of("_count", labels, total);
    }
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// The whole text.
#[must_use]
pub fn render(overview: &Overview) -> String {
    let mut text = Text::default();
    inspector(&mut text, overview);
    service(&mut text, overview);
    tenants(&mut text, overview);
    communicators(&mut text, overview);
    ranks(&mut text, overview);
    paths(&mut text, overview);
    text.0
}

/// As NCCL calls collectives in its logs, and the Inspector in labels.
fn nccl_name(collective: &str) -> &str {
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

/// What NCCL's Inspector tells, where it is known here.
fn inspector(text: &mut Text, overview: &Overview) {
    let node = &overview.host;
    let kinds = || overview.communicators.iter().flat_map(|comm| comm.kinds.iter().map(move |kind| (comm, kind)));
    let mut family = text.family(
        "nccl_bus_bandwidth_gbs",
        Kind::Gauge,
        "Bus bandwidth of a communicator's last collectives of a kind, in GB/s.",
    );
    for (comm, kind) in kinds() {
        let n_nodes = comm.hosts.len().max(1);
        family.sample(&by_kind(node, comm, &n_nodes, "collective", &nccl_name(&kind.collective)), kind.busbw_gbps);
    }
    let mut family = text.family(
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
        let mut family = text.family(name, Kind::Gauge, help);
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
    let mut family = text.family(
        "nccl_collectives_total",
        Kind::Counter,
        "Collectives that a tenant's communicators have completed.",
    );
    for tenant in &overview.tenants {
        family.sample(&[("tenant", &tenant.tenant), ("node", node)], tenant.operations.saturating_sub(tenant.pairs));
    }
    let mut family = text.family(
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

/// The service itself, and its cluster.
fn service(text: &mut Text, overview: &Overview) {
    text.family("mccs_info", Kind::Gauge, "The service that answers; always 1.")
        .sample(&[("host", &overview.host), ("version", &overview.version)], 1);
    text.family("mccs_uptime_seconds", Kind::Gauge, "Time since the service began.")
        .sample(&[], seconds(overview.at_ns));
    let mut family = text.family("mccs_host_up", Kind::Gauge, "Whether a host's service can be reached: 1, or 0.");
    for host in &overview.hosts {
        family.sample(&[("peer", &host.host)], u8::from(host.up));
    }
    let mut family = text.family(
        "mccs_gpu_nic_access",
        Kind::Gauge,
        "1, by how NICs reach a GPU's memory, and why they do not in a better way.",
    );
    for gpu in &overview.gpus {
        let Some(access) = &gpu.nic_access else { continue };
        let reason = gpu.nic_access_reason.as_deref().unwrap_or_default();
        family.sample(&[("uuid", &gpu.gpu), ("access", access), ("reason", &reason)], 1);
    }
    let mut family = text.family(
        "mccs_gpu_lost",
        Kind::Gauge,
        "Whether the service cannot use a GPU any more, by the error that did it: 1, or 0.",
    );
    for gpu in &overview.gpus {
        let reason = gpu.lost.as_deref().unwrap_or_default();
        family.sample(&[("uuid", &gpu.gpu), ("reason", &reason)], u8::from(gpu.lost.is_some()));
    }
    text.family(
        "mccs_draining",
        Kind::Gauge,
        "Whether the operator empties the host, so that it refuses sessions: 1, or 0.",
    )
    .sample(&[], u8::from(overview.draining));
    let mut family = text.family(
        "mccs_certificate_end_timestamp_seconds",
        Kind::Gauge,
        "When this host's certificate, or one above it, ends, in seconds of the Unix epoch.",
    );
    if let Some(unix_s) = overview.certificate_end {
        family.sample(&[], unix_s);
    }
    let mut family = text.family(
        "mccs_clock_error_seconds",
        Kind::Gauge,
        "By how much the estimate of the cluster's common clock may be wrong, where communicators send at certain times.",
    );
    if let Some(error_ns) = overview.clock_error_ns {
        family.sample(&[], seconds(error_ns));
    }
    let mut family = text.family("mccs_runtime_rounds_total", Kind::Counter, "Rounds of polling of a runtime.");
    for runtime in &overview.runtimes {
        family.sample(&[("runtime", &runtime.name)], runtime.rounds);
    }
    let mut family = text.family("mccs_runtime_parks_total", Kind::Counter, "Times that a runtime went to sleep.");
    for runtime in &overview.runtimes {
        family.sample(&[("runtime", &runtime.name)], runtime.parks);
    }
    let mut family = text.family("mccs_engines", Kind::Gauge, "Engines on a runtime.");
    for runtime in &overview.runtimes {
        let here = overview.engines.iter().filter(|engine| engine.runtime == runtime.index);
        family.sample(&[("runtime", &runtime.name)], here.count());
    }
    let mut family = text.family(
        "mccs_engine_work_seconds_total",
        Kind::Counter,
        "Work that engines have done for each tenant, about; its sessions' engines together are one.",
    );
    for ((engine, tenant), ms) in work_by_tenant(&overview.engines) {
        family.sample(&[("engine", &engine), ("tenant", &tenant)], seconds(ms * 1_000_000));
    }
    text.family(
        "mccs_log_lines_suppressed_total",
        Kind::Counter,
        "Lines not logged, since tenants or strangers caused too many.",
    )
    .sample(&[], overview.lines_suppressed);
    let mut family = text.family(
        "mccs_connections_refused_total",
        Kind::Counter,
        "Connections refused, by who would have served them.",
    );
    for refused in &overview.refused {
        family.sample(&[("endpoint", &refused.endpoint)], refused.connections);
    }
    let mut family =
        text.family("mccs_omitted", Kind::Gauge, "What has no series, since there are too many of its kind.");
    let omitted = &overview.omitted;
    for (of, count) in [("communicators", omitted.communicators), ("ranks", omitted.ranks), ("flows", omitted.flows)] {
        family.sample(&[("of", &of)], count);
    }
}

fn tenants(text: &mut Text, overview: &Overview) {
    let tenants = &overview.tenants;
    let quotas = || tenants.iter().flat_map(|tenant| tenant.quotas.iter().map(move |quota| (tenant, quota)));
    let mut family = text.family("mccs_tenant_used", Kind::Gauge, "How much of a quota a tenant holds now.");
    for (tenant, quota) in quotas() {
        family.sample(&[("tenant", &tenant.tenant), ("resource", &quota.resource)], quota.used);
    }
    let mut family = text.family("mccs_tenant_quota", Kind::Gauge, "How much a tenant may hold.");
    for (tenant, quota) in quotas() {
        family.sample(&[("tenant", &tenant.tenant), ("resource", &quota.resource)], quota.limit);
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
        let mut family = text.family(name, kind, help);
        for tenant in tenants {
            family.sample(&[("tenant", &tenant.tenant)], value(tenant));
        }
    }
    let mut family = text.family(
        "mccs_tenant_joining",
        Kind::Gauge,
        "Communicators of a tenant that have waited for ranks for ten seconds.",
    );
    for TenantView { tenant, .. } in tenants {
        family.sample(&[("tenant", tenant)], overview.joining.iter().filter(|late| late.tenant == *tenant).count());
    }
    allotments(text, tenants);
    let kinds = || tenants.iter().flat_map(|tenant| tenant.kinds.iter().map(move |kind| (tenant, kind)));
    let mut family = text.family(
        "mccs_collective_duration_seconds",
        Kind::Histogram,
        "How long collectives run, from the last rank's arrival on this host. Without those that ranks do among themselves.",
    );
    for (tenant, kind) in kinds() {
        family.histogram(&[("tenant", &tenant.tenant), ("collective", &kind.collective)], &kind.durations);
    }
    let mut family = text.family("mccs_collective_bytes_total", Kind::Counter, "Payload of the same collectives.");
    for (tenant, kind) in kinds() {
        family.sample(&[("tenant", &tenant.tenant), ("collective", &kind.collective)], kind.bytes);
    }
}

/// What the controller has told; nothing of tenants of which it has not.
fn allotments(text: &mut Text, tenants: &[TenantView]) {
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
        let mut family = text.family(name, Kind::Gauge, help);
        for tenant in tenants {
            if let Some(value) = tenant.allotment.as_ref().and_then(value) {
                family.sample(&[("tenant", &tenant.tenant)], value);
            }
        }
    }
}

fn of_comm(comm: &CommView) -> [(&str, &dyn Display); 4] {
    [("tenant", &comm.tenant), ("communicator", &comm.communicator), ("device", &comm.device), ("name", &comm.name)]
}

fn of_rank<'a>(comm: &'a CommView, rank: &'a RankView) -> [(&'a str, &'a dyn Display); 3] {
    [("tenant", &comm.tenant), ("communicator", &comm.communicator), ("rank", &rank.rank)]
}

fn communicators(text: &mut Text, overview: &Overview) {
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
            "What an ideal ring would have moved over each link for the collectives that the service has run.",
            |c| c.bus_bytes,
        ),
    ];
    for (name, kind, help, value) in values {
        let mut family = text.family(name, kind, help);
        for comm in comms {
            family.sample(&of_comm(comm), value(comm));
        }
    }
    let mut family = text.family(
        "mccs_communicator_job",
        Kind::Gauge,
        "1, by the job that a communicator is part of, where that is known.",
    );
    for comm in comms.iter().filter(|comm| !comm.job.is_empty()) {
        family.sample(&[("tenant", &comm.tenant), ("communicator", &comm.communicator), ("job", &comm.job)], 1u64);
    }
    let mut family = text.family(
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
    let mut family = text.family(
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
    let mut family = text.family(
        "mccs_communicator_busy_seconds_total",
        Kind::Counter,
        "Time in which such a collective was running.",
    );
    for comm in comms {
        family.sample(&of_comm(comm), seconds(comm.busy_ns));
    }
    let mut family = text.family(
        "mccs_communicator_multiprocessor_seconds_total",
        Kind::Counter,
        "Time that GPUs' kernels held multiprocessors for collectives, of all ranks and multiprocessors together.",
    );
    for comm in comms {
        family.sample(&of_comm(comm), seconds(comm.multiprocessor_ns));
    }
    let mut family = text.family(
        "mccs_communicator_gpu_memory_bytes",
        Kind::Gauge,
        "GPU memory of a rank's part of a communicator, its share of shared slots included.",
    );
    for comm in comms.iter().filter(|comm| comm.gpu_memory_bytes > 0) {
        family.sample(&of_comm(comm), comm.gpu_memory_bytes);
    }
}

fn ranks(text: &mut Text, overview: &Overview) {
    type Value = fn(&RankView) -> u64;
    let ranks = || overview.communicators.iter().flat_map(|comm| comm.ranks.iter().map(move |rank| (comm, rank)));
    let values: [(&'static str, &str, Value); 3] = [
        ("mccs_rank_enqueued_total", "Collectives that a rank has called.", |r| r.enqueued),
        ("mccs_rank_started_total", "Collectives that have begun on all ranks of this host.", |r| r.started),
        ("mccs_rank_completed_total", "Collectives of a rank that have ended.", |r| r.completed),
    ];
    for (name, help, value) in values {
        let mut family = text.family(name, Kind::Counter, help);
        for (comm, rank) in ranks() {
            family.sample(&of_rank(comm, rank), value(rank));
        }
    }
    let mut family = text.family(
        "mccs_rank_late_seconds_total",
        Kind::Counter,
        "Time by which a rank has come later to collectives than the first of its host.",
    );
    for (comm, rank) in ranks() {
        family.sample(&of_rank(comm, rank), seconds(rank.late_ns));
    }
    let mut family = text.family(
        "mccs_rank_user_tag",
        Kind::Gauge,
        "The last tag that a rank has given a collective (userProfilerTag of NCCL's per-collective configuration).",
    );
    for (comm, rank) in ranks() {
        rank.user_tag.into_iter().for_each(|tag| family.sample(&of_rank(comm, rank), tag));
    }
}

fn paths(text: &mut Text, overview: &Overview) {
    type Value = fn(&PathView) -> u64;
    let values: [(&'static str, Kind, &str, Value); 6] = [
        ("mccs_path_flows", Kind::Gauge, "Flows to or from a host on a path.", |p| p.flows),
        ("mccs_path_bytes_total", Kind::Counter, "What flows to or from a host on a path have carried.", |p| p.bytes),
        ("mccs_path_messages_total", Kind::Counter, "Messages of the same flows.", |p| p.messages),
        (
            "mccs_path_segments_total",
            Kind::Counter,
            "Packets with payload that flows over TCP have sent, repetitions included.",
            |p| p.wire.segments,
        ),
        ("mccs_path_retransmits_total", Kind::Counter, "Packets that flows over TCP have sent again.", |p| {
            p.wire.retransmits
        }),
        ("mccs_paths_left_total", Kind::Counter, "Times that flows over RDMA have left a way.", |p| p.paths_left),
    ];
    for (name, kind, help, value) in values {
        let mut family = text.family(name, kind, help);
        for path in &overview.paths {
            let direction = if path.sends { "send" } else { "receive" };
            family.sample(&[("peer", &path.peer), ("path", &path.path), ("direction", &direction)], value(path));
        }
    }
    let mut family = text.family(
        "mccs_path_round_trip_seconds",
        Kind::Gauge,
        "From a packet to its answer now, of the slowest flow over TCP that sends to a host on a path.",
    );
    for path in &overview.paths {
        if let Some(us) = path.wire.round_trip_us {
            family.sample(&[("peer", &path.peer), ("path", &path.path), ("direction", &"send")], seconds(us * 1_000));
        }
    }
}

#[cfg(test)]
mod tests;
