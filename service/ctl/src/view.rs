//! What `mccsctl watch` shows: two overviews go in, text comes out.

use std::fmt::Write as _;

use mccs_control::overview::{Overview, TenantView};
use mccs_control::{CommView, RankView};
use mccs_telemetry::flows::{FlowView, PathView, WireView};
use mccs_telemetry::histogram::HistogramView;
use mccs_telemetry::late::LateView;
use mccs_telemetry::straggler::straggler;

use crate::watch::Look;

/// How much room there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Characters of a line.
    pub columns: usize,
    /// Lines.
    pub lines: usize,
}

/// Flows that are shown, the fastest first.
const FLOWS_SHOWN: usize = 12;

/// Lines of a section, at least: an empty one, its heads, a row, and how many more there are.
const SECTION_LINES_MIN: usize = 4;

/// A table, with what is left out of it.
struct Section {
    /// An empty line, heads, rows.
    lines: Vec<String>,
    more: usize,
    /// What those are called.
    of: &'static str,
}

impl Section {
    fn len(&self) -> usize {
        self.lines.len() + usize::from(self.more > 0)
    }

    /// Its first lines, and how many there are more.
    fn into_lines(mut self, room: usize) -> Vec<String> {
        if self.len() > room {
            let kept = room.saturating_sub(1).min(self.lines.len());
            self.more += self.lines.len() - kept;
            self.lines.truncate(kept);
        }
        if self.more > 0 {
            self.lines.push(format!("and {} more{}", self.more, self.of));
        }
        self.lines
    }
}

/// How things are, and what has happened since `before`.
pub fn view(looked_before: &Look, looked: &Look, size: Size) -> String {
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

/// Cuts sections so that all are seen, if there is room for some of each: those that are short leave theirs to the others. Last ones go where
/// there is not.
fn share(mut sections: Vec<Section>, mut room: usize) -> Vec<String> {
    let is_all = sections.iter().map(Section::len).sum::<usize>() <= room;
    let mut gone = 0;
    while !is_all
        && sections.len() > 1
        && room.saturating_sub(usize::from(gone > 0)) < sections.len() * SECTION_LINES_MIN
    {
        gone += sections.pop().map_or(0, |section| section.len());
    }
    room = room.saturating_sub(usize::from(gone > 0));
    let mut lengths: Vec<usize> = sections.iter().map(Section::len).collect();
    lengths.sort_unstable();
    // What each may have: more than an equal share, as far as short ones do not need theirs.
    let (mut left, mut each) = (room, usize::MAX);
    for (at, length) in lengths.iter().enumerate() {
        each = left / (lengths.len() - at);
        if *length > each {
            break;
        }
        (left, each) = (left - length, usize::MAX);
    }
    let mut lines: Vec<String> = sections.into_iter().flat_map(|section| section.into_lines(each)).collect();
    if gone > 0 {
        lines.push(format!("({gone} more lines)"));
    }
    lines
}

/// Cuts lines, and leaves those out for which there is no room, saying so.
fn fit(lines: &[String], size: Size) -> String {
    let shown = if lines.len() > size.lines { size.lines.saturating_sub(1) } else { lines.len() };
    let cut = |line: &str| line.chars().take(size.columns).collect::<String>().trim_end().to_owned();
    let mut fitting: Vec<String> = lines[..shown].iter().map(|line| cut(line)).collect();
    if shown < lines.len() {
        fitting.push(cut(&format!("({} more lines)", lines.len() - shown)));
    }
    fitting.join("\n")
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

/// Lines of a table under their heads, which are as wide as the widest entry. The first `left` columns are words. `more` rows are not among
/// them. Nothing, where there are no rows.
fn table(left: usize, heads: &[&str], rows: &[Vec<String>], (more, of): (usize, &'static str)) -> Option<Section> {
    if rows.is_empty() {
        return None;
    }
    let width = |at: usize| {
        let cells = rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count());
        cells.chain([heads[at].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..heads.len()).map(width).collect();
    let heads: Vec<String> = heads.iter().map(ToString::to_string).collect();
    let mut lines = vec![String::new()];
    for row in [&heads].into_iter().chain(rows) {
        let mut line = String::new();
        for (at, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let gap = if at == 0 { "" } else { "  " };
            let _ = if at < left { write!(line, "{gap}{cell:<width$}") } else { write!(line, "{gap}{cell:>width$}") };
        }
        lines.push(line);
    }
    Some(Section { lines, more, of })
}

/// Number of bytes, or of bytes a second, in few characters.
fn bytes(bytes: f64) -> String {
    match bytes {
        _ if bytes >= 1e12 => format!("{:.2} T", bytes / 1e12),
        _ if bytes >= 1e9 => format!("{:.2} G", bytes / 1e9),
        _ if bytes >= 1e6 => format!("{:.1} M", bytes / 1e6),
        _ if bytes >= 1e3 => format!("{:.1} k", bytes / 1e3),
        _ => format!("{bytes:.0}"),
    }
}

/// A rate in bits a second as bytes a second; nothing, if there is none.
fn bits(bps: Option<u64>) -> String {
    bps.map_or_else(|| "-".into(), |bps| bytes(bps as f64 / 8.0))
}

/// A time in few characters; nothing, if there is none.
fn time(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".into(),
        Some(seconds) if seconds >= 1.0 => format!("{seconds:.1} s"),
        Some(seconds) if seconds >= 1e-3 => format!("{:.1} ms", seconds * 1e3),
        Some(seconds) => format!("{:.0} us", seconds * 1e6),
    }
}

fn rate(now: u64, before: Option<u64>, seconds: f64) -> f64 {
    now.saturating_sub(before.unwrap_or(0)) as f64 / seconds
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
    table(1, &heads, &rows, (0, ""))
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

/// Who came last on any of a communicator's hosts, or else on this one, and by how much.
fn comes_last(comm: &CommView, then: Option<&CommView>, before: &Look, now: &Look) -> Option<String> {
    let accounts = before.accounts.get(&comm.communicator).zip(now.accounts.get(&comm.communicator));
    if let Some(of_all) = accounts.and_then(|(before, now)| straggler(before, now)) {
        return Some(format!("rank {} on {} +{}", of_all.rank, of_all.host, time(Some(of_all.late_seconds))));
    }
    straggler_here(comm, then).map(|(rank, late)| format!("rank {rank} +{}", time(Some(late))))
}

fn communicators(looked_before: &Look, looked: &Look, seconds: f64) -> Option<Section> {
    let (before, now) = (&looked_before.overview, &looked.overview);
    let row = |comm: &CommView| {
        let then = before.communicators.iter().find(|then| then.communicator == comm.communicator);
        let busy_ns = comm.busy_ns.saturating_sub(then.map_or(0, |then| then.busy_ns));
        let bus_bytes = comm.bus_bytes.saturating_sub(then.map_or(0, |then| then.bus_bytes));
        let busbw = if busy_ns == 0 { "-".into() } else { bytes(bus_bytes as f64 / busy_ns as f64 * 1e9) };
        vec![
            if comm.name.is_empty() {
                comm.communicator.to_string()
            } else {
                format!("{} {}", comm.communicator, comm.name)
            },
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
    table(3, &heads, &rows, (now.omitted.communicators as usize, ""))
}

fn joining(now: &Overview) -> Option<Section> {
    let row = |late: &LateView| {
        let (ranks, since) = (format!("{}/{}", late.joined, late.nranks), format!("{} s", late.since_seconds));
        vec![late.unique_id.clone(), late.tenant.clone(), ranks, since, late.waits_for.clone()]
    };
    let rows: Vec<_> = now.joining.iter().map(row).collect();
    table(2, &["joining", "tenant", "ranks", "since", "waits for"], &rows, (0, ""))
}

fn direction(sends: bool) -> String {
    String::from(if sends { "to" } else { "from" })
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
    table(3, &heads, &rows, (0, ""))
}

/// The round trip of packets now.
pub fn round_trip(wire: &WireView) -> String {
    wire.round_trip_us.map_or_else(|| "-".into(), |us| time(Some(us as f64 / 1e6)))
}

/// Part of the packets since then that were sent again.
fn lost_since(wire: &WireView, then: Option<&WireView>) -> String {
    let before = then.copied().unwrap_or_default();
    let since = WireView {
        segments: wire.segments.saturating_sub(before.segments),
        retransmits: wire.retransmits.saturating_sub(before.retransmits),
        round_trip_us: None,
    };
    lost(&since)
}

/// Part of all packets that were sent again.
pub fn lost(wire: &WireView) -> String {
    wire.loss_percent().map_or_else(|| "-".into(), |percent| format!("{percent:.2}%"))
}

/// What carries a flow; over RDMA also the port that it goes by, if it has one now.
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
    table(6, &heads, &rows, (flows.len().saturating_sub(FLOWS_SHOWN), " flows, all slower"))
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
    table(2, &["runtime", "engines", "rounds/s", "sleeps/s"], &rows, (0, ""))
}

#[cfg(test)]
mod tests {
    use mccs_control::overview::{Omitted, QuotaView};
    use mccs_telemetry::flows::FlowName;
    use mccs_telemetry::placed::Allotment;
    use mccs_telemetry::traffic::TenantKindView;

    use std::collections::BTreeMap;

    use mccs_telemetry::stuck::{HostAccount, RankAccount};

    use super::*;

    /// A service after so many seconds, in each of which the same has happened.
    fn looked(seconds: u64) -> Look {
        Look { overview: overview(seconds), accounts: BTreeMap::new() }
    }

    fn overview(seconds: u64) -> Overview {
        let rank = |rank: u32, late_us: u64| RankView {
            rank,
            session: 1,
            pid: 1,
            enqueued: 10 * seconds,
            started: 10 * seconds,
            completed: 10 * seconds,
            late_ns: late_us * 1000 * 10 * seconds,
            user_tag: None,
        };
        let mut buckets = vec![0; 27];
        (buckets[4], buckets[10]) = (9 * seconds, seconds);
        let durations = HistogramView { buckets, sum_ns: 1 };
        let name = FlowName {
            links: 7,
            epoch: Some(0),
            channel: 1,
            from: 0,
            to: 2,
            sends: true,
            peer: "h1".into(),
            transport: Some(mccs_config::service::TransportKind::Tcp),
            path: "ports 1-2".into(),
        };
        Overview {
            host: "h0".into(),
            version: "1".into(),
            at_ns: seconds * 1_000_000_000,
            tenants: vec![TenantView {
                tenant: "blue".into(),
                quotas: vec![QuotaView {
                    resource: "memory_bytes".into(),
                    used: 1 << 20,
                    limit: 1 << 21,
                    limit_from: None,
                }],
                in_flight: 3,
                communicators: 1,
                operations: 10 * seconds,
                pairs: 0,
                bytes: 5_000_000 * seconds,
                failed: 1,
                kinds: vec![TenantKindView { collective: "all_reduce".into(), bytes: 1, durations }],
                allotment: None,
            }],
            communicators: vec![CommView {
                communicator: 42,
                unique_id: "u".into(),
                name: String::new(),
                job: String::new(),
                traffic_class: None,
                tenant: "blue".into(),
                device: "host".into(),
                operations: 10 * seconds,
                pairs: 0,
                bytes: 5_000_000 * seconds,
                bus_bytes: 1_000_000_000 * seconds,
                busy_ns: 500_000_000 * seconds,
                multiprocessor_ns: 0,
                gpu_memory_bytes: 0,
                kinds: Vec::new(),
                pair_sides: Vec::new(),
                busbw_gbps: 2.0,
                failed: 0,
                epoch: 3,
                on_gpus: None,
                is_for_training: false,
                graphs_keep: None,
                nranks: 4,
                hosts: vec!["h0".into(), "h1".into()],
                links: Some(7),
                part_of: None,
                part: None,
                transport: Some(mccs_config::service::TransportKind::Tcp),
                transport_reason: Some("host h1: no RDMA".into()),
                ranks: vec![rank(0, 0), rank(1, 250)],
            }],
            joining: vec![LateView {
                unique_id: "of-another".into(),
                tenant: "blue".into(),
                joined: 3,
                nranks: 4,
                waits_for: "rank 2 of 4".into(),
                since_seconds: 11,
            }],
            flows: vec![FlowView {
                name: name.clone(),
                bytes: 3_000_000 * seconds,
                messages: seconds,
                allotted_bps: Some(32_000_000),
                port: None,
                paths_left: 0,
                wire: WireView { segments: 1000, retransmits: 50, round_trip_us: Some(80) },
            }],
            paths: vec![PathView {
                peer: name.peer,
                path: name.path,
                sends: true,
                flows: 1,
                bytes: 3_000_000 * seconds,
                messages: 12 * seconds,
                paths_left: 0,
                wire: WireView { segments: 1000 * seconds, retransmits: 50 * seconds, round_trip_us: Some(80) },
            }],
            hosts: Vec::new(),
            draining: true,
            draining_reason: None,
            certificate_end: None,
            clock_error_ns: Some(250_000),
            clock: None,
            runtimes: Vec::new(),
            engines: Vec::new(),
            lines_suppressed: 0,
            refused: Vec::new(),
            omitted: Omitted::default(),
        }
    }

    fn words(text: &str, of: &str) -> Vec<String> {
        let line =
            text.lines().find(|line| line.trim_start().starts_with(of)).unwrap_or_else(|| panic!("{of} in {text}"));
        line.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn rates_are_of_the_time_between_two_looks() {
        for looks in [(2, 4), (100, 101)] {
            let text = view(&looked(looks.0), &looked(looks.1), Size { columns: 200, lines: 100 });
            let tenant = "blue 0 1 1.0 M (50%) 3 10 5.0 M - - - - 16 us 1.0 ms 1";
            assert_eq!(words(&text, "blue").join(" "), tenant, "{text}");
            let comm = "42 blue 2 hosts 2/4 10 5.0 M 2.00 G 50% 3 0 rank 1 +250 us";
            assert_eq!(words(&text, "42 ").join(" "), comm, "{text}");
            assert_eq!(words(&text, "of-another").join(" "), "of-another blue 3/4 11 s rank 2 of 4", "{text}");
            assert!(words(&text, "to ").join(" ").starts_with("to h1 ports 1-2 1 3.0 M 12 "), "{text}");
            assert!(text.lines().any(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")
                == "42 1 0 -> 2 to h1 tcp ports 1-2 3.0 M 4.0 M"));
        }
    }

    #[test]
    fn who_comes_last_on_any_host_is_named_where_all_have_answered() {
        let account = |took_us: u64, ranks: &[u32], seconds: u64| HostAccount {
            ranks: ranks
                .iter()
                .map(|rank| RankAccount { rank: *rank, started: seconds, ..Default::default() })
                .collect(),
            joint: (seconds, seconds * took_us * 1000),
            ..HostAccount::default()
        };
        let with = |seconds, other: Option<HostAccount>| {
            let accounts = vec![("h0".into(), Some(account(300, &[0, 1], seconds))), ("h1".into(), other)];
            Look { accounts: BTreeMap::from([(42, accounts.into())]), ..looked(seconds) }
        };
        let ends = |now: &Look, end: &str| {
            let text = view(&with(2, Some(account(20, &[2, 3], 2))), now, Size { columns: 200, lines: 100 });
            assert!(words(&text, "42 ").join(" ").ends_with(end), "{text}");
        };
        ends(&with(4, Some(account(20, &[2, 3], 4))), "0 rank 3 on h1 +280 us");
        ends(&with(4, None), "0 rank 1 +250 us");
    }

    #[test]
    fn weights_caps_and_shares_are_shown_where_the_controller_has_told_any() {
        let allotted = |allotment: Allotment| {
            let mut now = looked(2);
            now.overview.tenants[0].allotment = Some(allotment);
            let text = view(&looked(1), &now, Size { columns: 200, lines: 100 });
            words(&text, "blue").join(" ")
        };
        let (flow_cap_bps, allotted_bps) = (Some(40_000_000), Some(2_000_000_000));
        let host_cap_bps = Some(80_000_000);
        let all = Allotment { weight_milli: Some(2500), flow_cap_bps, host_cap_bps, allotted_bps };
        assert_eq!(allotted(all), "blue 0 1 1.0 M (50%) 3 10 5.0 M 2.5 5.0 M 10.0 M 250.0 M 16 us 1.0 ms 1");
        let capped = Allotment { flow_cap_bps, ..Allotment::default() };
        assert_eq!(allotted(capped), "blue 0 1 1.0 M (50%) 3 10 5.0 M - 5.0 M - - 16 us 1.0 ms 1");
    }

    #[test]
    fn what_stands_still_has_no_rate_and_nobody_is_late() {
        let text = view(&looked(5), &looked(5), Size { columns: 200, lines: 100 });
        assert_eq!(words(&text, "42 ").join(" "), "42 blue 2 hosts 2/4 0 0 - 0% 3 0 -", "{text}");
        assert!(!text.contains("0 -> 2"), "{text}");
    }

    #[test]
    fn it_fits_the_terminal() {
        let size = Size { columns: 30, lines: 6 };
        let text = view(&looked(1), &looked(2), size);
        assert!(text.lines().count() <= 6);
        assert!(text.lines().all(|line| line.chars().count() <= 30), "{text}");
        assert!(text.ends_with("more lines)"), "{text}");
    }

    #[test]
    fn many_tenants_leave_room_for_the_network() {
        let crowded = |seconds| {
            let mut now = overview(seconds);
            let tenant = now.tenants[0].clone();
            let named = |number: usize| TenantView { tenant: format!("tenant{number}"), ..tenant.clone() };
            now.tenants = (0..100).map(named).collect();
            Look { overview: now, accounts: BTreeMap::new() }
        };
        for lines in [23, 40, 103] {
            let text = view(&crowded(1), &crowded(2), Size { columns: 200, lines });
            assert!(text.lines().count() <= lines, "{text}");
            let shown = text.lines().filter(|line| line.starts_with("tenant") && !line.starts_with("tenant ")).count();
            assert!(shown > 0 && text.contains(&format!("and {} more", 100 - shown)), "{lines}: {text}");
            // Short sections are whole: the one communicator, path and flow are all there.
            assert_eq!(words(&text, "of-another").join(" "), "of-another blue 3/4 11 s rank 2 of 4", "{text}");
            assert!(words(&text, "to ").join(" ").starts_with("to h1 ports 1-2"), "{text}");
            assert!(text.contains("0 -> 2") && !words(&text, "42 ").is_empty(), "{text}");
        }
        let text = view(&crowded(1), &crowded(2), Size { columns: 200, lines: 120 });
        assert!(!text.contains(" more"), "{text}");
    }
}
