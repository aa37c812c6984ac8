//! Texts of two looks.

use std::collections::BTreeMap;

use mccs_control::overview::QuotaView;
use mccs_control::testing;
use mccs_telemetry::bandwidth::TenantKindView;
use mccs_telemetry::flows::{FlowName, WireView};
use mccs_telemetry::placed::Allotment;
use mccs_telemetry::stuck::{HostAccount, RankAccount, Total};

use super::*;

/// A service after so many seconds, in each of which the same has happened.
fn looked(seconds: u64) -> Snapshot {
    Snapshot { overview: overview(seconds), accounts: BTreeMap::new() }
}

fn overview(seconds: u64) -> Overview {
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
        at_ns: seconds * 1_000_000_000,
        tenants: vec![tenant(seconds)],
        communicators: vec![communicator(seconds)],
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
            flows: 1,
            bytes: 3_000_000 * seconds,
            messages: 12 * seconds,
            wire: WireView { segments: 1000 * seconds, retransmits: 50 * seconds, round_trip_us: Some(80) },
            ..testing::path()
        }],
        hosts: Vec::new(),
        gpus: Vec::new(),
        runtimes: Vec::new(),
        // Lines of the head that other overviews have.
        lines_suppressed: 0,
        refused: Vec::new(),
        ..testing::overview()
    }
}

fn tenant(seconds: u64) -> TenantView {
    let mut buckets = vec![0; 27];
    (buckets[4], buckets[10]) = (9 * seconds, seconds);
    let durations = HistogramView { buckets, sum_ns: 1 };
    TenantView {
        tenant: "blue".into(),
        quotas: vec![QuotaView { resource: "memory_bytes".into(), used: 1 << 20, limit: 1 << 21, limit_from: None }],
        in_flight: 3,
        operations: 10 * seconds,
        bytes: 5_000_000 * seconds,
        failed: 1,
        kinds: vec![TenantKindView { collective: "all_reduce".into(), bytes: 1, durations }],
        allotment: None,
        ..testing::tenant()
    }
}

fn communicator(seconds: u64) -> CommView {
    let rank = |rank: u32, late_us: u64| RankView {
        enqueued: 10 * seconds,
        started: 10 * seconds,
        completed: 10 * seconds,
        late_ns: late_us * 1000 * 10 * seconds,
        ..testing::rank(rank)
    };
    CommView {
        communicator: 42,
        name: String::new(),
        job: String::new(),
        tenant: "blue".into(),
        operations: 10 * seconds,
        bytes: 5_000_000 * seconds,
        bus_bytes: 1_000_000_000 * seconds,
        busy_ns: 500_000_000 * seconds,
        busbw_gbps: 2.0,
        failed: 0,
        links: Some(7),
        part_of: None,
        part: None,
        ranks: vec![rank(0, 0), rank(1, 250)],
        ..testing::communicator()
    }
}

fn words(text: &str, of: &str) -> Vec<String> {
    let line = text.lines().find(|line| line.trim_start().starts_with(of)).unwrap_or_else(|| panic!("{of} in {text}"));
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
        ranks: ranks.iter().map(|rank| RankAccount { rank: *rank, started: seconds, ..Default::default() }).collect(),
        joint: Total { count: seconds, sum_ns: seconds * took_us * 1000 },
        ..HostAccount::default()
    };
    let with = |seconds, other: Option<HostAccount>| {
        let accounts = vec![("h0".into(), Some(account(300, &[0, 1], seconds))), ("h1".into(), other)];
        Snapshot { accounts: BTreeMap::from([(42, accounts.into())]), ..looked(seconds) }
    };
    let ends = |now: &Snapshot, end: &str| {
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
        Snapshot { overview: now, accounts: BTreeMap::new() }
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
