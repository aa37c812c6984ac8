//! Choices of operators: which program, what ends; and their view of an upgrade.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64};

use crate::fixture::{COUNT_MAX, Host, Keys, Load, Rank, count_of, seed, serves};
use crate::programs::address;

#[test]
fn sessions_that_cannot_go_on_end_by_force_and_others_go_on() {
    let (mut host, seed) = (Host::start(""), seed());
    let (ranks, broken) = (Rank::join_all(&host, 2), Rank::join_all(&host, 2));
    let [ordered, peer] = <[Rank; 2]>::try_from(broken).ok().expect("two ranks");
    let words = ordered.client.allocate(4096).expect("memory");
    let _stream = ordered.client.create_ordered_stream(&words, 0).expect("a stream");
    // SAFETY: nothing is in flight.
    unsafe { words.as_mut_slice() }.fill(7);
    let (stop, calls) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        Load::start(scope, seed, &ranks, &calls, &stop);
        let load = Load { stop: &stop, calls: &calls };
        let told = host.refuses(&["upgrade"]);
        assert!(told.contains("tenant default: session") && told.contains("--force"), "{told}");
        load.goes_on(4);
        assert!(ordered.client.is_alive());
        let told = host.upgrade_by_force();
        assert_eq!((&told["sessions"], &told["ended"], &told["communicators"]), (&3.into(), &1.into(), &2.into()));
        load.goes_on(4);
    });
    let failed = ordered.client.allocate(4096).expect_err("the session has ended").to_string();
    assert!(failed.contains("streams that wait for GPUs"), "{failed}");
    // SAFETY: as above.
    assert!(unsafe { words.as_slice() }.iter().all(|byte| *byte == 0), "its pages are given back");
    peer.call(seed, 0, COUNT_MAX);
    let failed = peer.stream.synchronize().expect_err("nobody is there").to_string();
    assert!(failed.contains("has gone while the service was handed over"), "{failed}");
    serves(&ranks, seed);
}

#[test]
fn who_is_no_tenant_any_more_ends_by_force_alone() {
    let (mut host, seed) =
        (Host::start("[[tenant]]\nname = \"default\"\n[[tenant]]\nname = \"other\"\nsocket = \"o.sock\"\n"), seed());
    let ranks = Rank::join_all(&host, 2);
    let other = mccs::Client::connect(host.at("run/o.sock")).expect("a session");
    host.write_config("[[tenant]]\nname = \"default\"\n");
    let told = host.refuses(&["reload"]);
    assert!(told.contains("names no tenant other"), "{told}");
    serves(&ranks, seed);
    let told = host.upgrade_by_force();
    assert_eq!((&told["sessions"], &told["ended"]), (&2.into(), &1.into()));
    assert!(other.allocate(4096).is_err(), "its session has ended");
    // The operator is told by the program before.
    while host.at("run/o.sock").exists() {
        std::thread::yield_now();
    }
    serves(&ranks, seed);
}

#[test]
fn programs_are_named_by_the_operators_file_alone() {
    let mut host = Host::start("");
    let outside = env!("CARGO_BIN_EXE_mccs-service");
    let told = host.refuses(&["upgrade", outside]);
    assert!(told.contains("is not in") && told.contains("service.binary"), "{told}");
    let (run, file) = (host.at("run"), host.at("service.toml"));
    let write = |binary: &str| {
        let text = format!("[service]\nruntime_dir = {run:?}\n{binary}[cuda]\nuse = \"off\"\n");
        std::fs::write(&file, text).expect("a file");
    };
    write("");
    let told = host.refuses(&["upgrade", outside]);
    assert!(told.contains("permits no program"), "{told}");
    write(&format!("binary = {outside:?}\n"));
    assert!(host.refuses(&["upgrade", "/bin/false"]).contains("permits"));
    host.asks(&["upgrade", outside]);
    host.pid = host.asks(&["upgrade"])["pid"].as_u64().expect("a process") as u32;
    write("binary = \"/bin/false\"\n");
    assert!(host.refuses(&["upgrade"]).contains("/bin/false"), "the file is read anew");
}

#[test]
fn what_the_next_program_lacks_is_found_before_it_has_the_sessions() {
    let users = tempfile::NamedTempFile::new().expect("a file");
    let path = users.path().display().to_string();
    let lock = nix::fcntl::Flock::lock(users.reopen().expect("opened"), nix::fcntl::FlockArg::LockShared);
    let (host, seed) =
        (Host::start_with(Keys { arguments: vec!["--users".into(), path], ..Keys::default() }, ""), seed());
    let ranks = Rank::join_all(&host, 2);
    drop(users);
    let told = host.refuses(&["upgrade"]);
    assert!(told.contains("the users' file"), "{told}");
    serves(&ranks, seed);
    drop(lock);
}

/// All counters that a service tells, by series.
fn counters(at: SocketAddr) -> BTreeMap<String, f64> {
    let mut socket = TcpStream::connect(at).expect("somebody listens");
    socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n").expect("sent");
    let mut text = String::new();
    socket.read_to_string(&mut text).expect("read");
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let counts: Vec<&str> =
        types.filter_map(|line| line.split_once(' ')).filter(|(_, of)| *of != "gauge").map(|(name, _)| name).collect();
    let series = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.rsplit_once(' '));
    let counted = series.filter(|(series, _)| counts.iter().any(|name| series.starts_with(name)));
    counted.map(|(series, value)| (series.to_owned(), value.parse().expect("a number"))).collect()
}

/// Metrics of the process itself, as `docs/METRICS.md` says.
const BEGIN_ANEW: [&str; 3] =
    ["mccs_runtime_rounds_total", "mccs_runtime_parks_total", "mccs_engine_work_seconds_total"];

#[test]
fn counters_never_fall() {
    let at = SocketAddr::from((address(), 9400));
    drop(TcpListener::bind(at).expect("free"));
    let (mut host, seed) = (Host::start(&format!("[metrics]\nlisten = \"{at}\"\n")), seed());
    let gone = Rank::join_all(&host, 2);
    serves(&gone, seed);
    drop(gone);
    while !host.asks(&["communicators"])["communicators"].as_array().expect("rows").is_empty() {
        std::thread::yield_now();
    }
    let ranks = Rank::join_all(&host, 3);
    for upgrade in 0..4 {
        std::thread::scope(|scope| {
            let all = |rank| {
                scope.spawn(move || (0..40).for_each(|call| Rank::all_reduce(rank, seed, call, count_of(seed, call))))
            };
            ranks.iter().for_each(|rank| drop(all(rank)));
        });
        let before = counters(at);
        host.upgrade();
        let after = counters(at);
        assert!(before.len() > 20, "{before:?}");
        for (series, value) in before {
            if BEGIN_ANEW.iter().any(|name| series.starts_with(name)) {
                continue;
            }
            let now = after.get(&series).copied().unwrap_or(f64::NAN);
            assert!(now >= value, "upgrade {upgrade}: {series} was {value} and is {now}");
            // Nothing has been called in between: nothing counts twice.
            let is_of_calls = series.contains("operations_total") || series.contains("bytes_total");
            assert!(!is_of_calls || now == value, "upgrade {upgrade}: {series} was {value} and is {now}");
        }
    }
}
