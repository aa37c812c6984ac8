//! The operator's view of a service while a job runs, and whether the numbers add up: metrics over loopback, and traces.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mccs::{DataType, RedOp};
use mccs_control::trace_window::{trace, trace_up_to};
use mccs_control::{ControlAnswer, ControlRequest, call};
use mccs_eval::workload::Call;
use mccs_ipc::types::CollectiveKind;
use mccs_telemetry::recorder::Record;
use mccs_telemetry::straggler::{Accounts, straggler};
use mccs_telemetry::trace::merge::merge;
use mccs_telemetry::trace::{Window, write};
use mccs_tests::hosts::{TestHosts, run_until_stopped};
use mccs_tests::{Rank, TestService};

const METRICS: &str = "[metrics]\nlisten = \"127.0.0.1:0\"\n";

/// Metrics of a service, by series.
fn scrape(address: SocketAddr) -> BTreeMap<String, f64> {
    // The text may be a tenth of a second old.
    std::thread::sleep(Duration::from_millis(250));
    let mut socket = TcpStream::connect(address).expect("a connection");
    socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").expect("asked");
    let mut text = String::new();
    socket.read_to_string(&mut text).expect("answered");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
    let samples = body.lines().filter(|line| !line.starts_with('#'));
    let sample = |line: &str| {
        let (series, value) = line.rsplit_once(' ').expect("a value");
        (series.to_owned(), value.parse().expect("a number"))
    };
    samples.map(sample).collect()
}

fn address(service: &TestService) -> SocketAddr {
    service.service().metrics.expect("an address")
}

/// Sum of all series whose name and labels have these parts.
fn sum(series: &BTreeMap<String, f64>, parts: &[&str]) -> f64 {
    let wanted = |name: &str| {
        parts
            .iter()
            .enumerate()
            .all(|(at, part)| if at == 0 { name.split('{').next() == Some(part) } else { name.contains(part) })
    };
    series.iter().filter(|(name, _)| wanted(name)).map(|(_, value)| value).sum()
}

/// So many all-reduces of so many elements.
fn all_reduce(rank: &Rank, times: u64, count: u64) {
    let memory = rank.client.allocate(4 * count).expect("memory");
    for _ in 0..times {
        let place = memory.at(0);
        rank.comm.all_reduce(place, place, count, DataType::F32, RedOp::Sum, &rank.stream).expect("enqueued");
    }
    rank.stream.synchronize().expect("completed");
}

#[test]
fn metrics_say_what_the_job_did() {
    let service = TestService::start(&format!("{METRICS}[host_device]\nshm_exchange_limit = \"0\"\n"));
    let barrier = std::sync::Barrier::new(3);
    service.ranks(0, 3, |rank| {
        all_reduce(&rank, 20, 10_000);
        let memory = rank.client.allocate(3 * 4000).expect("memory");
        for _ in 0..10 {
            let send = rank.client.allocate(4000).expect("memory");
            rank.comm.all_gather(send.at(0), memory.at(0), 1000, DataType::F32, &rank.stream).expect("enqueued");
            rank.stream.synchronize().expect("completed");
        }
        match rank.comm.rank() {
            0 => (0..5)
                .for_each(|_| rank.comm.send(memory.at(0), 3000, DataType::U8, 2, &rank.stream).expect("enqueued")),
            2 => (0..5)
                .for_each(|_| rank.comm.recv(memory.at(0), 3000, DataType::U8, 0, &rank.stream).expect("enqueued")),
            _ => {}
        }
        rank.stream.synchronize().expect("completed");
        barrier.wait();
        if rank.comm.rank() == 0 {
            // Operations end for their callers first.
            let series = std::iter::repeat_with(|| scrape(address(&service)))
                .find(|series| sum(series, &["mccs_tenant_in_flight"]) == 0.0)
                .expect("an end");
            let sum = |parts: &[&str]| sum(&series, parts);
            assert_eq!(sum(&["mccs_tenant_operations_total", "tenant=\"default\""]), 35.0);
            assert_eq!(sum(&["nccl_collectives_total"]), 30.0);
            assert_eq!(sum(&["nccl_p2p_total"]), 5.0);
            let (reduced, gathered) = (20.0 * 40_000.0, 10.0 * 12_000.0);
            assert_eq!(sum(&["mccs_tenant_bytes_total"]), reduced + gathered + 15_000.0);
            assert_eq!(sum(&["mccs_communicator_bytes_total"]), reduced + gathered + 15_000.0);
            assert_eq!(sum(&["mccs_collective_bytes_total", "all_reduce"]), reduced);
            assert_eq!(sum(&["mccs_collective_bytes_total", "all_gather"]), gathered);
            // Whole bytes of each operation.
            let bus_bytes = reduced * 4.0 / 3.0 + gathered * 2.0 / 3.0;
            assert!((sum(&["mccs_communicator_bus_bytes_total"]) - bus_bytes).abs() < 100.0);
            let durations = |part: &str| sum(&["mccs_collective_duration_seconds_count", part]);
            assert_eq!((durations("all_reduce"), durations("all_gather")), (20.0, 10.0));
            assert_eq!(sum(&["mccs_collective_duration_seconds_bucket", "all_reduce", "+Inf"]), 20.0);
            let busy = sum(&["mccs_communicator_busy_seconds_total"]);
            let took = sum(&["mccs_collective_duration_seconds_sum"]);
            assert!(busy > 0.0 && (busy - took).abs() < 1e-6, "{busy} {took}");
            for progress in ["enqueued", "started", "completed"] {
                assert_eq!(sum(&[&format!("mccs_rank_{progress}_total")]), 90.0, "{progress}");
            }
            assert!(sum(&["nccl_bus_bandwidth_gbs", "AllReduce"]) > 0.0);
            assert!(sum(&["nccl_collective_exec_time_microseconds", "AllGather"]) > 0.0);
            assert_eq!(sum(&["mccs_tenant_failed_total"]), 0.0);
            assert_eq!(sum(&["mccs_tenant_used", "resource=\"sessions\""]), 3.0);
            assert_eq!(sum(&["mccs_tenant_used", "resource=\"communicator_ranks\""]), 3.0);
            assert!(sum(&["mccs_tenant_used", "memory_bytes"]) >= 3.0 * 12_000.0);
            assert!(sum(&["mccs_engines"]) >= 5.0);
        }
        barrier.wait();
    });
    // Its communicator's series end with it, its tenant's stay.
    let series = std::iter::repeat_with(|| scrape(address(&service)))
        .find(|series| sum(series, &["mccs_tenant_communicators"]) == 0.0)
        .expect("an end");
    assert!(!series.keys().any(|name| name.starts_with("mccs_communicator") || name.starts_with("mccs_rank")));
    assert_eq!(sum(&series, &["mccs_tenant_operations_total"]), 35.0);
    assert_eq!(sum(&series, &["mccs_collective_duration_seconds_count"]), 30.0);
}

#[test]
fn a_rank_that_comes_late_is_named() {
    let service = TestService::start(&format!("{METRICS}[host_device]\nshm_exchange_limit = \"0\"\n"));
    let barrier = std::sync::Barrier::new(2);
    service.ranks(0, 2, |rank| {
        for number in 0..5 {
            let comm = &service.service().registry.comms()[0];
            // Rank 0 is there, and waits.
            while rank.comm.rank() == 1 && comm.ranks[0].enqueued.load(Ordering::Relaxed) <= number {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(if rank.comm.rank() == 1 { 50 } else { 0 }));
            all_reduce(&rank, 1, 100);
        }
        barrier.wait();
        if rank.comm.rank() == 0 {
            let series = scrape(address(&service));
            let late = |rank| sum(&series, &["mccs_rank_late_seconds_total", rank]);
            // Times are those of the beginning of a runtime's round.
            assert!(late("rank=\"1\"") > 0.025, "{series:?}");
            assert_eq!(late("rank=\"0\""), 0.0);
        }
        barrier.wait();
    });
}

#[test]
fn what_one_host_sends_the_other_receives() {
    let settings =
        format!("{METRICS}[strategy]\nalgorithm = \"host_ring\"\n[[strategy.path]]\nsource_ports = \"21000-21999\"\n");
    let hosts = TestHosts::start(2, &settings);
    let barrier = std::sync::Barrier::new(2);
    let series = hosts.ranks(&[0, 1], |rank| {
        all_reduce(&rank, 8, 1 << 18);
        barrier.wait();
        let own = hosts.service(rank.comm.rank() as usize);
        let series = scrape(address(own));
        // Nobody leaves before both have looked.
        barrier.wait();
        series
    });
    for (own, peer) in [(0, "peer=\"h1\""), (1, "peer=\"h0\"")] {
        let of = |what: &str, direction: &str| sum(&series[own], &[what, peer, &format!("direction=\"{direction}\"")]);
        // Round a ring of two hosts each link carries what there is to reduce, once.
        assert_eq!(of("mccs_path_bytes_total", "send"), 8.0 * 4.0 * f64::from(1 << 18));
        assert_eq!(of("mccs_path_bytes_total", "send"), of("mccs_path_bytes_total", "receive"));
        assert!(of("mccs_path_flows", "send") >= 1.0 && of("mccs_path_messages_total", "send") >= 32.0);
        assert_eq!(
            sum(&series[own], &["mccs_path_bytes_total", "ports 21000-21999"]),
            of("mccs_path_bytes_total", "send")
        );
        assert_eq!(sum(&series[own], &["mccs_host_up"]), 2.0);
        assert_eq!(sum(&series[own], &["nccl_collectives_total"]), 8.0);
        assert!(sum(&series[own], &["nccl_bus_bandwidth_gbs", "n_nodes=\"2\"", "nranks=\"2\""]) > 0.0);
    }
}

#[test]
fn a_trace_has_all_that_the_job_did_in_its_window() {
    let hosts = TestHosts::start(2, "[strategy]\nalgorithm = \"host_ring\"\n");
    let ranks = hosts.join(&[0, 0, 1]);
    let (socket, done, barrier) = (hosts.service(0).control_socket(), AtomicU64::new(0), std::sync::Barrier::new(3));
    let window = std::thread::scope(|scope| {
        let raise = mccs_tests::hosts::Raise(&done);
        let is_done = || done.load(Ordering::Relaxed) != 0;
        let traced = scope.spawn(move || trace(&socket, Duration::from_secs(250), None, &is_done).expect("a trace"));
        // The window has begun when engines record; operations before it are not in it.
        let recorders = &hosts.service(0).service().registry.recorders;
        while !recorders.is_on() {
            std::thread::yield_now();
        }
        mccs_tests::hosts::in_threads(ranks, |rank| {
            all_reduce(&rank, 6, 1 << 17);
            let memory = rank.client.allocate(64).expect("memory");
            match rank.comm.rank() {
                0 => rank.comm.send(memory.at(0), 64, DataType::U8, 2, &rank.stream),
                2 => rank.comm.recv(memory.at(0), 64, DataType::U8, 0, &rank.stream),
                _ => Ok(()),
            }
            .expect("enqueued");
            rank.stream.synchronize().expect("completed");
            // A rank that goes takes its communicator with it.
            barrier.wait();
        });
        drop(raise);
        traced.join().expect("a trace")
    });
    assert_eq!((window.host.as_str(), window.lost), ("h0", 0));
    let records: Vec<Record> = window.engines.iter().flat_map(|(_, records)| records.iter().copied()).collect();
    let count = |is: &dyn Fn(&Record) -> bool| records.iter().filter(|record| is(record)).count();
    assert_eq!(count(&|record| matches!(record, Record::Enqueued { .. })), 12);
    assert_eq!(count(&|record| matches!(record, Record::Arrived { .. })), 12);
    assert_eq!(count(&|record| matches!(record, Record::Started { bytes: 524_288, .. })), 6);
    assert_eq!(count(&|record| matches!(record, Record::PairStarted { from: 0, to: 2, bytes: 64, .. })), 1);
    assert_eq!(count(&|record| matches!(record, Record::Ended { is_failed: false, .. })), 7);
    let sent = |record: &Record| match *record {
        Record::Chunk { sends: true, bytes, since_ns, at_ns, .. } => {
            assert!(window.from_ns <= since_ns && since_ns <= at_ns, "{record:?}");
            bytes
        }
        _ => 0,
    };
    assert_eq!(records.iter().map(sent).sum::<u64>(), 6 * 524_288 + 64);
    let mut text = Vec::new();
    mccs_telemetry::trace::write(&window, &mut text).expect("written");
    check_trace(&String::from_utf8(text).expect("text"));
}

/// Windows of two hosts, in which something is done. The value that it returns lives until they have ended.
fn windows_of_both<T>(hosts: &TestHosts, during: impl FnOnce() -> T) -> Vec<Window> {
    let done = AtomicU64::new(0);
    let is_done = || done.load(Ordering::Relaxed) != 0;
    std::thread::scope(|scope| {
        let raise = mccs_tests::hosts::Raise(&done);
        let trace_of =
            |host: usize| trace(&hosts.service(host).control_socket(), Duration::from_secs(250), None, &is_done);
        let traced: Vec<_> = (0..2).map(|host| scope.spawn(move || trace_of(host).expect("a trace"))).collect();
        while !(0..2).all(|host| hosts.service(host).service().registry.recorders.is_on()) {
            std::thread::yield_now();
        }
        let _left = during();
        drop(raise);
        traced.into_iter().map(|traced| traced.join().expect("a trace")).collect()
    })
}

#[test]
fn windows_of_two_hosts_tell_of_the_same_operations() {
    let hosts = TestHosts::start(2, "[strategy]\nalgorithm = \"host_ring\"\n");
    let (ranks, barrier) = (hosts.join(&[0, 1]), std::sync::Barrier::new(2));
    let windows = windows_of_both(&hosts, || {
        mccs_tests::hosts::in_threads(ranks, |rank| {
            all_reduce(&rank, 6, 1 << 17);
            // A rank that goes takes its communicator with it.
            barrier.wait();
        })
    });
    let told = windows.iter().map(|window| {
        let (mut began, mut moved) = (Vec::new(), BTreeMap::new());
        for record in window.engines.iter().flat_map(|(_, records)| records) {
            match *record {
                Record::Started { seq, epoch, kind, bytes, .. } => began.push((seq, epoch, kind, bytes)),
                Record::Chunk { from, to, sends, bytes, .. } => *moved.entry((from, to, sends)).or_insert(0) += bytes,
                _ => {}
            }
        }
        (began, moved)
    });
    let told: Vec<_> = told.collect();
    assert_eq!(told[0].0.iter().map(|(seq, ..)| *seq).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    assert_eq!(told[0].0, told[1].0);
    // One side sends what the other receives.
    for (from, to) in [(0, 1), (1, 0)] {
        let (own, other) = (from as usize, to as usize);
        assert_eq!(told[own].1[&(from, to, true)], 6 * 524_288);
        assert_eq!(told[own].1[&(from, to, true)], told[other].1[&(from, to, false)]);
    }
}

#[test]
fn engines_that_begin_within_a_window_are_in_it() {
    let service = TestService::start("[runtime]\ntransport_engines = 1\n[host_device]\nshm_exchange_limit = \"0\"\n");
    let (socket, done) = (service.control_socket(), AtomicU64::new(0));
    let is_done = || done.load(Ordering::Relaxed) != 0;
    let window = std::thread::scope(|scope| {
        let raise = mccs_tests::hosts::Raise(&done);
        let traced = scope.spawn(|| trace(&socket, Duration::from_secs(250), None, &is_done).expect("a trace"));
        while !service.service().registry.recorders.is_on() {
            std::thread::yield_now();
        }
        let request = ControlRequest::ScaleTransports { count: 4 };
        assert_eq!(call(&socket, &request).expect("an answer"), ControlAnswer::Done);
        service.ranks(0, 2, |rank| all_reduce(&rank, 4, 1 << 22));
        drop(raise);
        traced.join().expect("a trace")
    });
    let worked: Vec<&str> =
        window.engines.iter().filter(|(_, records)| !records.is_empty()).map(|(engine, _)| engine.as_str()).collect();
    assert!(worked.iter().filter(|engine| engine.starts_with("transport")).count() > 1, "{worked:?}");
    assert!(!window.is_cut && window.lost == 0);
}

#[test]
fn a_trace_of_too_many_records_says_that_it_is_cut() {
    let service = TestService::start("[host_device]\nshm_exchange_limit = \"0\"\n");
    let (socket, done) = (service.control_socket(), AtomicU64::new(0));
    let window = std::thread::scope(|scope| {
        let raise = mccs_tests::hosts::Raise(&done);
        let never = || false;
        let traced = scope.spawn(move || {
            // Raised also when it fails: the ranks end.
            let _raise = raise;
            trace_up_to(100, &socket, Duration::from_secs(250), None, &never).expect("a trace")
        });
        let (kind, dtype, redop) = (CollectiveKind::AllReduce, DataType::I32, RedOp::Sum);
        let call = |seed| Call { kind, dtype, redop, root: 0, count: 10, nranks: 2, seed };
        service.ranks(0, 2, |rank| run_until_stopped(&rank, &done, &AtomicU64::new(0), call));
        traced.join().expect("a trace")
    });
    assert!(window.is_cut && window.until_ns - window.from_ns < 250_000_000_000);
    let mut text = Vec::new();
    mccs_telemetry::trace::write(&window, &mut text).expect("written");
    let trace: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    assert_eq!(trace["otherData"]["complete"], false);
}

#[test]
fn a_tenant_that_lies_about_its_rounds_spoils_no_sums() {
    let begin = std::time::Instant::now();
    let service = TestService::start("");
    let registry = &service.service().registry;
    service.ranks(0, 2, |rank| {
        all_reduce(&rank, 20, 10);
        let comm = registry.comms().pop().expect("a communicator");
        comm.shm_exchange.as_ref().expect("a shared-memory exchange").complete(
            rank.comm.rank(),
            u64::MAX,
            u64::MAX / 2,
        );
    });
    let totals = std::iter::repeat_with(|| registry.totals()).find(|(_, comms)| comms.is_empty());
    let told = totals.expect("an end").0["default"];
    // Ten in a microsecond, at most.
    let possible = begin.elapsed().as_nanos() as u64 / 100;
    assert!((20..=possible).contains(&told.operations), "{told:?}");
    assert!(told.bytes < u64::MAX / 2, "{told:?}");
}

/// That slices of a track do not overlap, lie in the window, and that every rank has its collectives.
fn check_trace(text: &str) {
    let trace: serde_json::Value = serde_json::from_str(text).expect("JSON");
    let events = trace["traceEvents"].as_array().expect("events");
    let mut ends: BTreeMap<String, f64> = BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let (ts, dur) = (event["ts"].as_f64().expect("a time"), event["dur"].as_f64().expect("a time"));
        assert!(ts >= 0.0 && dur >= 0.0, "{event}");
        let place = format!("{} {}", event["pid"], event["tid"]);
        // Times are thousandths of what is written.
        assert!(ends.insert(place, ts + dur).is_none_or(|end| end <= ts + 0.002), "{event}");
    }
    let tid = |name: &str| {
        let is_name =
            |event: &&serde_json::Value| event["args"]["name"].as_str().is_some_and(|own| own.ends_with(name));
        events.iter().find(is_name).unwrap_or_else(|| panic!("no {name}"))["tid"].clone()
    };
    for rank in ["rank 0", "rank 1"] {
        let tid = tid(rank);
        let runs = events.iter().filter(|event| event["tid"] == tid && event["name"] == "all_reduce");
        let mut seqs: Vec<_> = runs.map(|event| event["args"]["seq"].as_u64().expect("a number")).collect();
        seqs.sort_unstable();
        assert_eq!(seqs, [0, 1, 2, 3, 4, 5], "{rank}");
    }
    for track in ["channel 0", "sends 0 -> 2", "receives 2 -> 0", "send/recv 0 -> 2"] {
        tid(track);
    }
}

/// Settings by which the first of two hosts is the controller, which leaves strategies as they are.
fn controlled(folder: &std::path::Path) -> String {
    let topology = "[rates]\nhost_leaf = \"1Gbit/s\"\n[[leaf]]\nname = \"leaf\"\n[[host]]\nname = \"h0\"\nleaf = \"leaf\"\n\
                    [[host]]\nname = \"h1\"\nleaf = \"leaf\"\n";
    let file = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).expect("a file");
        path
    };
    let topology = file("topology.toml", topology);
    let policy = file("policy.toml", "[policy]\nname = \"ecmp\"\nrings = \"kept\"\n");
    format!("[cuda]\nuse = \"off\"\n[controller]\nhost = \"h0\"\ntopology = {topology:?}\npolicy = {policy:?}\n")
}

/// Hosts know how far their windows begin from each other as well as they say. In truth both have one clock here.
#[test]
fn traces_of_two_hosts_are_joined_on_the_common_clock() {
    let folder = tempfile::tempdir().expect("a folder");
    let hosts = TestHosts::start(2, &controlled(folder.path()));
    let ranks = hosts.join(&[0, 1]);
    let registry = |host: usize| &hosts.service(host).service().registry;
    let windows = windows_of_both(&hosts, || {
        let left = mccs_tests::hosts::in_threads(ranks, |rank| {
            all_reduce(&rank, 6, 1 << 17);
            rank
        });
        // A window has the clock of its own time alone.
        let begun = Instant::now();
        let is_known = |host: usize| registry(host).clock().is_some_and(|(at, _)| at >= begun);
        while !(0..2).all(is_known) {
            std::thread::yield_now();
        }
        left
    });
    let written = |window: &Window| {
        let mut text = Vec::new();
        write(window, &mut text).expect("written");
        (window.host.clone(), text)
    };
    let traces: Vec<_> = windows.iter().map(written).collect();
    let mut joined = Vec::new();
    merge(traces.iter().map(|(host, text)| (host.clone(), text.as_slice())).collect(), &mut joined).expect("joined");
    let about = serde_json::from_slice::<serde_json::Value>(&joined).expect("JSON")["otherData"].clone();
    let begin_ns = |host: usize| about["hosts"][host]["clock"]["begin_ns"].as_u64().expect("a time");
    let now = Instant::now();
    let ago_ns = |host: usize| registry(host).recorders.ns_at(now) - windows[host].from_ns;
    let (told_ns, true_ns) = (begin_ns(1) as i64 - begin_ns(0) as i64, ago_ns(0) as i64 - ago_ns(1) as i64);
    let error_ns = about["times_differ_by_ns_at_most"].as_u64().expect("a time");
    assert!(told_ns.abs_diff(true_ns) <= error_ns + 1_000, "{told_ns} is {true_ns}, within {error_ns}");
}

/// Accounts of all hosts of the only communicator there.
fn accounts(service: &TestService) -> Box<Accounts> {
    let communicator = service.service().registry.comms()[0].number;
    loop {
        match call(&service.control_socket(), &ControlRequest::Accounts { communicator }).expect("an answer") {
            ControlAnswer::Stuck(report) if report.hosts.iter().all(|(_, account)| account.is_some()) => {
                return report.hosts.into();
            }
            ControlAnswer::Stuck(_) => {}
            answer => panic!("{answer:?}"),
        }
    }
}

#[test]
fn the_rank_that_comes_last_on_another_host_is_named() {
    const LATE: Duration = Duration::from_millis(20);
    let hosts = TestHosts::start(2, "");
    let ranks = hosts.join(&[0, 0, 1, 1]);
    let reduce = |ranks, times| {
        mccs_tests::hosts::in_threads(ranks, |rank: Rank| {
            for _ in 0..times {
                if rank.comm.rank() == 3 {
                    std::thread::sleep(LATE);
                }
                all_reduce(&rank, 1, 1 << 17);
            }
            rank
        })
    };
    let ranks = reduce(ranks, 1);
    let before = accounts(hosts.service(0));
    let _ranks = reduce(ranks, 10);
    let found = straggler(&before, &accounts(hosts.service(0))).expect("somebody");
    assert_eq!((found.host.as_str(), found.rank), ("h1", 3));
    assert!(found.late_seconds >= LATE.as_secs_f64() / 2.0, "{found:?}");
}
