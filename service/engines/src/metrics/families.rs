//! What metrics there are: names, labels, values, as all ways of telling them have it. Pure: an
//! overview goes in, families of samples come out.
//!
//! Names that begin with `nccl_` are those of NCCL's Inspector plugin, with the labels of its that mean something here, and their values; `tenant`
//! is ours. It has more labels: queries that choose or join by `message_size`, `algo_proto`, `gpu`, `slurm_job_id` or `version` find nothing. Its
//! means are of what has ended between two looks, and geometric for bandwidth; ours are of the last operations. Ours begin with `mccs_`. `docs/METRICS.md` says what each means, and a test compares.
//! Series are bounded as [`mccs_control::overview`] is; those of a communicator end with it.

use std::fmt::{self, Display};

use mccs_control::overview::{Overview, TenantView};
use mccs_control::{CommView, RankView};
use mccs_runtime::work_by_tenant;
use mccs_telemetry::bandwidth::{PairSide, PairView};
use mccs_telemetry::flows::PathView;
use mccs_telemetry::histogram::HistogramView;
use mccs_telemetry::placed::Allotment;

/// What the values of a metric are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Rises, or begins again at 0 with the service.
    Counter,
    /// Rises and falls.
    Gauge,
    /// Counts by upper bound.
    Histogram,
}

/// A value of a counter or gauge.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Number {
    Whole(u64),
    Real(f64),
}

impl Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Number::Whole(number) => number.fmt(f),
            Number::Real(number) => number.fmt(f),
        }
    }
}

impl From<u64> for Number {
    fn from(number: u64) -> Self {
        Number::Whole(number)
    }
}

impl From<u32> for Number {
    fn from(number: u32) -> Self {
        Number::Whole(number.into())
    }
}

impl From<usize> for Number {
    fn from(number: usize) -> Self {
        Number::Whole(number as u64)
    }
}

/// 1 where it is so, else 0.
impl From<bool> for Number {
    fn from(is: bool) -> Self {
        Number::Whole(is.into())
    }
}

impl From<f64> for Number {
    fn from(number: f64) -> Self {
        Number::Real(number)
    }
}

/// What a sample says.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Number(Number),
    Histogram(HistogramView),
}

/// A series, and its value now.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sample {
    pub(super) labels: Vec<(String, String)>,
    pub(super) value: Value,
}

/// A metric with its samples.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Family {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) help: String,
    pub(super) samples: Vec<Sample>,
}

type Labels<'a> = [(&'a str, &'a dyn Display)];

/// The families so far.
#[derive(Default)]
pub(super) struct Metrics(Vec<Family>);

impl Metrics {
    pub(super) fn family(&mut self, name: &'static str, kind: Kind, help: &str) -> &mut Family {
        self.0.push(Family { name, kind, help: help.to_owned(), samples: Vec::new() });
        self.0.last_mut().expect("invariant: one was pushed")
    }
}

impl Family {
    pub(super) fn sample(&mut self, labels: &Labels<'_>, value: impl Into<Number>) {
        self.add(labels, Value::Number(value.into()));
    }

    fn histogram(&mut self, labels: &Labels<'_>, view: &HistogramView) {
        self.add(labels, Value::Histogram(view.clone()));
    }

    fn add(&mut self, labels: &Labels<'_>, value: Value) {
        let labels = labels.iter().map(|(label, text)| ((*label).to_owned(), text.to_string())).collect();
        self.samples.push(Sample { labels, value });
    }
}

/// All families, in one order.
#[must_use]
pub(super) fn families(overview: &Overview) -> Vec<Family> {
    let mut metrics = Metrics::default();
    inspector(&mut metrics, overview);
    service(&mut metrics, overview);
    tenants(&mut metrics, overview);
    communicators(&mut metrics, overview);
    ranks(&mut metrics, overview);
    paths(&mut metrics, overview);
    metrics.0
}

pub(super) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// As NCCL calls collectives in its logs, and the Inspector in labels.
pub(super) fn nccl_name(collective: &str) -> &str {
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
fn inspector(metrics: &mut Metrics, overview: &Overview) {
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

/// The service itself, and its cluster.
fn service(metrics: &mut Metrics, overview: &Overview) {
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
        metrics.family("mccs_omitted", Kind::Gauge, "What has no series, since there are too many of its kind.");
    let omitted = &overview.omitted;
    for (of, count) in [("communicators", omitted.communicators), ("ranks", omitted.ranks), ("flows", omitted.flows)] {
        family.sample(&[("of", &of)], count);
    }
}

/// Who is the controller, and the store that says so.
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

fn tenants(metrics: &mut Metrics, overview: &Overview) {
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

/// What the controller has told; nothing of tenants of which it has not.
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

fn of_comm(comm: &CommView) -> [(&str, &dyn Display); 4] {
    [("tenant", &comm.tenant), ("communicator", &comm.communicator), ("device", &comm.device), ("name", &comm.name)]
}

fn of_rank<'a>(comm: &'a CommView, rank: &'a RankView) -> [(&'a str, &'a dyn Display); 3] {
    [("tenant", &comm.tenant), ("communicator", &comm.communicator), ("rank", &rank.rank)]
}

fn communicators(metrics: &mut Metrics, overview: &Overview) {
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
        let family = metrics.family(name, kind, help);
        for comm in comms {
            family.sample(&of_comm(comm), value(comm));
        }
    }
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

fn ranks(metrics: &mut Metrics, overview: &Overview) {
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

fn paths(metrics: &mut Metrics, overview: &Overview) {
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
        let family = metrics.family(name, kind, help);
        for path in &overview.paths {
            let direction = if path.sends { "send" } else { "receive" };
            family.sample(&[("peer", &path.peer), ("path", &path.path), ("direction", &direction)], value(path));
        }
    }
    let family = metrics.family(
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
