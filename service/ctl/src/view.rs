//! Text of `mccsctl watch`, from two overviews.

mod layout;
#[cfg(test)]
mod tests;
mod units;

use std::fmt::Write as _;

use mccs_control::overview::{Overview, TenantView};
use mccs_control::{CommView, RankView};
use mccs_telemetry::flows::{FlowView, PathView};
use mccs_telemetry::histogram::HistogramView;
use mccs_telemetry::missing_ranks::LateView;
use mccs_telemetry::straggler::straggler;

use self::layout::{Section, fit, share, table};
use self::units::{bits, bytes, direction, lost_since, rate, time};
use crate::cluster::of_job;
use crate::watch::Snapshot;

pub use self::layout::Size;
pub use self::units::{lost, round_trip};

/// Flows that are shown, the fastest first.
const FLOWS_SHOWN: usize = 12;

/// How things are, and what has happened since `before`.
pub fn view(looked_before: &Snapshot, looked: &Snapshot, size: Size) -> String {
    let (before, now) = (&looked_before.overview, &looked.overview);
    let seconds = now.at_ns.saturating_sub(before.at_ns).max(1) as f64 / 1e9;
    let mut text = String::new();
    head(&mut text, now);
    let sections = [
        tenants(before, now, seconds),
        communicators(looked_before, looked, seconds),
        joining(now),
        paths(before, now, seconds),
        flows(before, now, seconds),
        engines(before, now, seconds),
    ];
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let room = size.lines.saturating_sub(lines.len());
    lines.extend(share(sections.into_iter().flatten().collect(), room));
    fit(&lines, size)
}

fn head(text: &mut String, now: &Overview) {
    let others = now.hosts.iter().filter(|host| !host.own);
    let (up, all) = (others.clone().filter(|host| host.up).count(), others.count());
    let hosts = if all == 0 { String::from("a single host") } else { format!("{up} of {all} peers up") };
    let uptime = now.at_ns / 1_000_000_000;
    let (hours, minutes, seconds) = (uptime / 3600, uptime / 60 % 60, uptime % 60);
    let _ =
        writeln!(text, "mccs-service {} on {}, up {hours}:{minutes:02}:{seconds:02}, {hosts}", now.version, now.host);
    for host in now.hosts.iter().filter(|host| !host.own && !host.up) {
        let reason = host.last_error.as_deref().unwrap_or("not reached yet");
        let _ = writeln!(text, "  {} is down since {} s: {reason}", host.host, host.since_seconds);
    }
    if now.draining {
        let reason = now.draining_reason.as_ref().map_or_else(String::new, |reason| format!(", as {reason}"));
        let _ = writeln!(text, "  it is being emptied (drain){reason}: no new processes");
    }
    if let Some(error_ns) = now.clock_error_ns {
        let _ = writeln!(text, "  the cluster's clock is known to {} us", error_ns.div_ceil(1_000));
    }
    let refused: u64 = now.refused.iter().map(|refused| refused.connections).sum();
    if refused + now.lines_suppressed > 0 {
        let _ = writeln!(text, "  {refused} connections refused, {} lines not logged", now.lines_suppressed);
    }
}

fn tenants(before: &Overview, now: &Overview, seconds: f64) -> Option<Section> {
    let row = |tenant: &TenantView| {
        let then = before.tenants.iter().find(|then| then.tenant == tenant.tenant);
        let held = |resource: &str| tenant.quotas.iter().find(|quota| quota.resource == resource);
        let used = |resource: &str| held(resource).map_or(0, |quota| quota.used);
        let of_quota = held("memory_bytes").map_or(0.0, |quota| 100.0 * quota.used as f64 / quota.limit.max(1) as f64);
        let took = durations(tenant, then);
        let allotment = tenant.allotment.unwrap_or_default();
        vec![
            tenant.tenant.clone(),
            used("sessions").to_string(),
            tenant.communicators.to_string(),
            format!("{} ({of_quota:.0}%)", bytes(used("memory_bytes") as f64)),
            tenant.in_flight.to_string(),
            format!("{:.0}", rate(tenant.operations, then.map(|then| then.operations), seconds)),
            bytes(rate(tenant.bytes, then.map(|then| then.bytes), seconds)),
            allotment.weight_milli.map_or_else(|| "-".into(), |weight| (weight as f64 / 1e3).to_string()),
            bits(allotment.flow_cap_bps),
            bits(allotment.host_cap_bps),
            bits(allotment.allotted_bps),
            time(took.quantile_seconds(0.5)),
            time(took.quantile_seconds(0.99)),
            tenant.failed.to_string(),
        ]
    };
    let rows: Vec<_> = now.tenants.iter().map(row).collect();
    let heads = [
        "tenant",
        "sessions",
        "comms",
        "memory",
        "in flight",
        "ops/s",
        "B/s",
        "weight",
        "flow cap B/s",
        "host cap B/s",
        "may send B/s",
        "p50 <=",
        "p99 <=",
        "failed",
    ];
    table(1, &heads, &rows, 0, "")
}

/// Durations of all a tenant's collectives since then.
fn durations(tenant: &TenantView, then: Option<&TenantView>) -> HistogramView {
    let mut all = HistogramView::default();
    for kind in &tenant.kinds {
        let before = then.and_then(|then| then.kinds.iter().find(|old| old.collective == kind.collective));
        let since = before.map_or_else(|| kind.durations.clone(), |before| kind.durations.since(&before.durations));
        all.buckets.resize(all.buckets.len().max(since.buckets.len()), 0);
        all.buckets.iter_mut().zip(&since.buckets).for_each(|(sum, count)| *sum += count);
        all.sum_ns += since.sum_ns;
    }
    all
}

/// The rank of this host that came last, by how much on average, of collectives since then.
fn straggler_here(comm: &CommView, then: Option<&CommView>) -> Option<(u32, f64)> {
    let late = |rank: &RankView| {
        let before = then.and_then(|then| then.ranks.iter().find(|old| old.rank == rank.rank));
        let started = rank.started.saturating_sub(before.map_or(0, |before| before.started));
        let late_ns = rank.late_ns.saturating_sub(before.map_or(0, |before| before.late_ns));
        (started > 0 && late_ns > 0).then(|| (rank.rank, late_ns as f64 / started as f64 / 1e9))
    };
    comm.ranks.iter().filter_map(late).max_by(|a, b| a.1.total_cmp(&b.1))
}

/// The rank that came last on any of a communicator's hosts, or else on this one, and by how much.
fn comes_last(comm: &CommView, then: Option<&CommView>, before: &Snapshot, now: &Snapshot) -> Option<String> {
    let accounts = before.accounts.get(&comm.communicator).zip(now.accounts.get(&comm.communicator));
    if let Some(of_all) = accounts.and_then(|(before, now)| straggler(before, now)) {
        return Some(format!("rank {} on {} +{}", of_all.rank, of_all.host, time(Some(of_all.late_seconds))));
    }
    straggler_here(comm, then).map(|(rank, late)| format!("rank {rank} +{}", time(Some(late))))
}

/// A communicator's number, name and job.
fn told(comm: &CommView) -> String {
    let parts = [comm.communicator.to_string(), comm.name.clone(), of_job(&comm.job).trim_start().to_owned()];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
}

fn communicators(looked_before: &Snapshot, looked: &Snapshot, seconds: f64) -> Option<Section> {
    let (before, now) = (&looked_before.overview, &looked.overview);
    let row = |comm: &CommView| {
        let then = before.communicators.iter().find(|then| then.communicator == comm.communicator);
        let busy_ns = comm.busy_ns.saturating_sub(then.map_or(0, |then| then.busy_ns));
        let bus_bytes = comm.bus_bytes.saturating_sub(then.map_or(0, |then| then.bus_bytes));
        let busbw = if busy_ns == 0 { "-".into() } else { bytes(bus_bytes as f64 / busy_ns as f64 * 1e9) };
        vec![
            told(comm),
            comm.tenant.clone(),
            if comm.hosts.is_empty() { comm.device.clone() } else { format!("{} hosts", comm.hosts.len()) },
            format!("{}/{}", comm.ranks.len(), comm.nranks),
            format!("{:.0}", rate(comm.operations, then.map(|then| then.operations), seconds)),
            bytes(rate(comm.bytes, then.map(|then| then.bytes), seconds)),
            busbw,
            format!("{:.0}%", (busy_ns as f64 / seconds / 1e7).min(100.0)),
            comm.epoch.to_string(),
            comm.failed.to_string(),
            comes_last(comm, then, looked_before, looked).unwrap_or_else(|| "-".into()),
        ]
    };
    let rows: Vec<_> = now.communicators.iter().map(row).collect();
    let heads = ["comm", "tenant", "on", "ranks", "ops/s", "B/s", "busbw B/s", "busy", "epoch", "failed", "comes last"];
    table(3, &heads, &rows, now.omitted.communicators as usize, "")
}

fn joining(now: &Overview) -> Option<Section> {
    let row = |late: &LateView| {
        let (ranks, since) = (format!("{}/{}", late.joined, late.nranks), format!("{} s", late.since_seconds));
        vec![late.unique_id.clone(), late.tenant.clone(), ranks, since, late.waits_for.clone()]
    };
    let rows: Vec<_> = now.joining.iter().map(row).collect();
    table(2, &["joining", "tenant", "ranks", "since", "waits for"], &rows, 0, "")
}

fn paths(before: &Overview, now: &Overview, seconds: f64) -> Option<Section> {
    let row = |path: &PathView| {
        let same = |old: &&PathView| (&old.peer, &old.path, old.sends) == (&path.peer, &path.path, path.sends);
        let then = before.paths.iter().find(same);
        vec![
            direction(path.sends),
            path.peer.clone(),
            path.path.clone(),
            path.flows.to_string(),
            bytes(rate(path.bytes, then.map(|then| then.bytes), seconds)),
            format!("{:.0}", rate(path.messages, then.map(|then| then.messages), seconds)),
            bytes(path.bytes as f64),
            round_trip(&path.wire),
            lost_since(&path.wire, then.map(|then| &then.wire)),
        ]
    };
    let rows: Vec<_> = now.paths.iter().map(row).collect();
    let heads = ["", "peer", "path", "flows", "B/s", "messages/s", "bytes", "round trip", "sent again"];
    table(3, &heads, &rows, 0, "")
}

/// The transport of a flow; over RDMA also the port that it goes by, if it has one now.
fn flows(before: &Overview, now: &Overview, seconds: f64) -> Option<Section> {
    let mut flows: Vec<(f64, &FlowView)> = now
        .flows
        .iter()
        .map(|flow| {
            let then = before.flows.iter().find(|old| old.name == flow.name);
            (rate(flow.bytes, then.map(|then| then.bytes), seconds), flow)
        })
        .filter(|(rate, _)| *rate > 0.0)
        .collect();
    flows.sort_by(|a, b| b.0.total_cmp(&a.0));
    let row = |(rate, flow): &(f64, &FlowView)| {
        let name = &flow.name;
        let comm = now.communicators.iter().find(|comm| comm.links == Some(name.links));
        vec![
            comm.map_or_else(|| "-".into(), |comm| comm.communicator.to_string()),
            name.epoch.map_or_else(|| "send/recv".into(), |_| name.channel.to_string()),
            format!("{} -> {}", name.from, name.to),
            format!("{} {}", direction(name.sends), name.peer),
            flow.carrier().unwrap_or_else(|| "-".into()),
            name.path.clone(),
            bytes(*rate),
            bits(flow.allotted_bps),
        ]
    };
    let rows: Vec<_> = flows.iter().take(FLOWS_SHOWN).map(row).collect();
    let heads = ["comm", "channel", "ranks", "flow", "over", "path", "B/s", "may B/s"];
    table(6, &heads, &rows, flows.len().saturating_sub(FLOWS_SHOWN), " flows, all slower")
}

fn engines(before: &Overview, now: &Overview, seconds: f64) -> Option<Section> {
    let rows: Vec<_> = (now.runtimes.iter())
        .map(|runtime| {
            let then = before.runtimes.iter().find(|then| then.index == runtime.index);
            let here: Vec<_> = now.engines.iter().filter(|engine| engine.runtime == runtime.index).collect();
            let names: Vec<&str> = here.iter().map(|engine| engine.name.as_str()).take(4).collect();
            let more = if here.len() > 4 { format!(" and {} more", here.len() - 4) } else { String::new() };
            vec![
                runtime.name.clone(),
                format!("{}{more}", names.join(", ")),
                format!("{:.0}", rate(runtime.rounds, then.map(|then| then.rounds), seconds)),
                format!("{:.0}", rate(runtime.parks, then.map(|then| then.parks), seconds)),
            ]
        })
        .collect();
    table(2, &["runtime", "engines", "rounds/s", "sleeps/s"], &rows, 0, "")
}
