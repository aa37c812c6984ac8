//! `mccsctl show`: tables of hosts, GPUs, sessions, communicators, engines.

use crate::cluster::of_job;
use mccs_config::service::TransportKind;
use mccs_control::{CommView, GpuView, HostView, SessionView};
use mccs_model::GpuStrategy;
use mccs_runtime::{EngineInfo, RuntimeInfo, work_by_tenant};
use mccs_telemetry::failed::FailedView;
use mccs_telemetry::missing_ranks::LateView;

/// Hosts, and whether they can be reached.
pub fn hosts(hosts: &[HostView]) {
    if hosts.is_empty() {
        say!("a single host: service.toml has no [exchange]\n");
        return;
    }
    say!("{:<24} {:<24} {:<5} {:>10}  last error", "host", "address", "state", "since");
    for h in hosts {
        let state = if h.own {
            "own"
        } else if h.up {
            "up"
        } else {
            "down"
        };
        let since = format!("{} s", h.since_seconds);
        say!(
            "{:<24} {:<24} {state:<5} {since:>10}  {}",
            h.host,
            h.address.to_string(),
            h.last_error.as_deref().unwrap_or("-")
        );
    }
    for own in hosts.iter().filter(|host| host.own) {
        own.rdma.iter().for_each(|ports| say!("RDMA by {ports}"));
        own.no_rdma.iter().for_each(|reason| say!("no RDMA: {reason}"));
    }
    say!();
}

/// GPUs of the service, lost ones included.
pub fn gpus(gpus: &[GpuView]) {
    if gpus.is_empty() {
        say!("no GPUs: the service's log says why\n");
        return;
    }
    say!("{:<40} {:<24} {:<16} {:<16} state", "gpu", "name", "bus id", "nics");
    for g in gpus {
        let state = g.lost.as_ref().map_or_else(|| "in use".to_owned(), |error| format!("lost: {error}"));
        let nics = if g.nics.is_empty() { "-".to_owned() } else { g.nics.join(",") };
        say!("{:<40} {:<24} {:<16} {nics:<16} {state}", g.gpu, g.name, g.pci_bus_id);
    }
    gpus.iter().flat_map(|gpu| &gpu.unreached).for_each(|unreached| say!("{unreached}"));
    for g in gpus {
        let Some(access) = &g.nic_access else { continue };
        let reason = g.nic_access_reason.as_ref().map_or_else(String::new, |reason| format!(": {reason}"));
        say!("{} to NICs by {access}{reason}", g.gpu);
    }
    say!();
}

/// Connected processes.
pub fn sessions(sessions: &[SessionView]) {
    say!(
        "{:>8} {:<16} {:>8} {:>6} {:>11} {:>10} {:>7} {:>7}  job",
        "session",
        "tenant",
        "pid",
        "uid",
        "operations",
        "in flight",
        "failed",
        "copied"
    );
    for s in sessions {
        say!(
            "{:>8} {:<16} {:>8} {:>6} {:>11} {:>10} {:>7} {:>7}  {}",
            s.session,
            s.tenant,
            s.pid,
            s.uid,
            s.operations,
            s.in_flight,
            s.failed,
            s.copied,
            s.job
        );
    }
    say!();
}

/// Communicators and their counters.
pub fn comms(comms: &[CommView]) {
    say!(
        "{:>6} {:<12} {:<8} {:>6} {:>11} {:>12} {:>9} {:>5} {:>7} {:>6}  last enqueued/started/completed by rank",
        "comm",
        "tenant",
        "device",
        "ranks",
        "operations",
        "MiB",
        "busbw",
        "SMs",
        "failed",
        "epoch"
    );
    // Parts under their whole.
    let mut comms: Vec<_> = comms.iter().collect();
    comms.sort_by_key(|c| (c.part_of.unwrap_or(c.communicator), c.part_of.is_some(), c.communicator));
    for c in comms {
        let mut progress: Vec<_> =
            c.ranks.iter().map(|rank| format!("{}/{}/{}", rank.enqueued, rank.started, rank.completed)).collect();
        progress.extend(c.on_gpus.map(|GpuStrategy { large_from, ll128, max_ctas }| {
            let most = max_ctas.map(|most| format!(", max_ctas {most}")).unwrap_or_default();
            let training = if c.is_for_training { " for training" } else { "" };
            format!("(large_from {large_from}{training}, ll128 {}{most})", if ll128 { "on" } else { "off" })
        }));
        progress.extend(c.graphs_keep.map(|epoch| format!("(graphs keep {epoch})")));
        progress.extend(c.traffic_class.map(|class| format!("(traffic class {class})")));
        let tag = c.ranks.iter().find_map(|rank| rank.user_tag);
        progress.extend(tag.map(|tag| format!("(last tag {tag})")));
        progress
            .extend(c.part_of.zip(c.part.as_ref()).map(|(whole, part)| format!("({part} of communicator {whole})")));
        progress.extend(c.transport.map(|transport| format!("(over {})", over(transport, c))));
        let ring = c.reduction_ring.iter().map(ToString::to_string).collect::<Vec<_>>();
        progress.extend((!ring.is_empty()).then(|| format!("(reductions round hosts of ranks {})", ring.join(", "))));
        progress.extend((!c.name.is_empty()).then(|| format!("({})", c.name)));
        progress.extend((!c.job.is_empty()).then(|| format!("(job {})", c.job)));
        say!(
            "{:>6} {:<12} {:<8} {:>6} {:>11} {:>12.1} {:>9.2} {:>5.0} {:>7} {:>6}  {}",
            c.communicator,
            c.tenant,
            c.device,
            c.ranks.len(),
            c.operations,
            c.bytes as f64 / (1 << 20) as f64,
            c.busbw_gbps,
            c.multiprocessors(),
            c.failed,
            c.epoch,
            progress.join(" ")
        );
    }
    say!();
}

/// Transport of a communicator's flows, and why it is no faster.
pub fn over(transport: TransportKind, comm: &CommView) -> String {
    let reason = comm.transport_reason.as_ref();
    reason.map_or_else(|| transport.to_string(), |reason| format!("{transport}: {reason}"))
}

/// Communicators that wait for ranks.
pub fn joining(joining: &[LateView]) {
    if joining.is_empty() {
        say!("no communicator has waited for ranks for long\n");
        return;
    }
    say!("{:<32} {:<12} {:>6} {:>10}  waits for", "communicator to be", "tenant", "ranks", "since");
    for LateView { unique_id, tenant, joined, nranks, waits_for, since_seconds } in joining {
        let (ranks, since) = (format!("{joined}/{nranks}"), format!("{since_seconds} s"));
        say!("{unique_id:<32} {tenant:<12} {ranks:>6} {since:>10}  {waits_for}");
    }
    say!();
}

/// Communicators that are no more.
pub fn failed(failed: &[FailedView]) {
    if failed.is_empty() {
        say!("no communicator has failed within the last hour\n");
        return;
    }
    say!("{:>6} {:<12} {:>6} {:>11} {:>10}  failed since", "comm", "tenant", "ranks", "operations", "ago");
    for FailedView { communicator, tenant, job, nranks, operations, reason, age_seconds, .. } in failed {
        let (ago, job) = (format!("{age_seconds} s"), of_job(job));
        say!("{communicator:>6} {tenant:<12} {nranks:>6} {operations:>11} {ago:>10}  {reason}{job}");
    }
    say!();
}

/// Runtimes, and engines on them.
pub fn engines(runtimes: &[RuntimeInfo], engines: &[EngineInfo]) {
    say!("{:>8} {:<14} {:>8} {:>14} {:>10}  {:<20} engines", "runtime", "thread", "tid", "rounds", "sleeps", "cpus");
    for runtime in runtimes {
        let here = engines.iter().filter(|engine| engine.runtime == runtime.index);
        let names: Vec<_> = here.map(|engine| format!("{}: {}", engine.id, engine.name)).collect();
        say!(
            "{:>8} {:<14} {:>8} {:>14} {:>10}  {:<20} {}",
            runtime.index,
            runtime.name,
            runtime.tid,
            runtime.rounds,
            runtime.parks,
            cpus(runtime),
            names.join(", ")
        );
    }
    say!();
    engine_work(engines);
}

/// CPUs of a runtime's thread: the node that it is bound to, and its CPUs.
fn cpus(runtime: &RuntimeInfo) -> String {
    match runtime.bound_to.strip_prefix("node") {
        Some(node) => format!("node{node}: {}", runtime.cpus),
        None => runtime.cpus.clone(),
    }
}

/// Which tenants have had how much of each engine.
fn engine_work(engines: &[EngineInfo]) {
    let work = work_by_tenant(engines);
    if work.is_empty() {
        return;
    }
    say!("{:<20} {:<16} {:>12} {:>7}", "engine", "tenant", "work s", "part");
    for ((engine, tenant), ms) in &work {
        let all: u64 = work.iter().filter(|((of, _), _)| of == engine).map(|(_, ms)| ms).sum();
        let part = format!("{:.0}%", 100.0 * *ms as f64 / all.max(1) as f64);
        say!("{engine:<20} {tenant:<16} {:>12.3} {part:>7}", *ms as f64 / 1e3);
    }
    say!();
}
