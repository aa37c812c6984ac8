//! Upgrades that no job notices, programs that cannot take over, and sessions that cannot go on.

mod bad_tenants;
mod elsewhere;
mod fixture;
mod operators;
#[allow(dead_code, reason = "the other tests of programs need more of it")]
#[path = "../programs/mod.rs"]
mod programs;

use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::Output;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use mccs::DataType;
use mccs_handover::{Link, STATE_VERSION, ToPrevious};
use mccs_ipc::protocol::VERSION;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use self::fixture::{COUNT_MAX, Host, Load, Rank, seed, serves};

#[test]
fn a_service_without_sessions_is_upgraded_and_ends_as_any_other() {
    let mut host = Host::start("");
    for _ in 0..3 {
        let told = host.upgrade();
        assert_eq!((&told["sessions"], &told["communicators"]), (&0.into(), &0.into()));
    }
    assert!(host.first.wait().expect("a child").success());
    drop(host.connect());
    kill(Pid::from_raw(host.pid as i32), Signal::SIGTERM).expect("a process");
    while host.at("run/mccs.sock").exists() || host.at("run/mccs-control.sock").exists() {
        std::thread::yield_now();
    }
}

#[test]
fn idle_sessions_go_on_with_their_memory_streams_and_handles() {
    let (mut host, seed) = (Host::start(""), seed());
    let client = host.connect();
    let gone = client.allocate(4096).expect("memory");
    let kept = client.allocate(3 << 20).expect("memory");
    drop(gone);
    // SAFETY: nothing is in flight.
    unsafe { kept.as_mut_slice() }.fill(7);
    // Freed memory is charged until it has been given back.
    let before = loop {
        let asked = host.asks(&["sessions"]);
        if asked["sessions"][0]["tenant_memory_bytes"] == 3 << 20 {
            break asked;
        }
        std::thread::yield_now();
    };
    assert_eq!(host.upgrade()["sessions"], 1);
    assert!(client.is_alive());
    assert_eq!(host.asks(&["sessions"]), before);
    // SAFETY: as above.
    assert!(unsafe { kept.as_slice() }.iter().all(|byte| *byte == 7));
    let rank = Rank::join(client, mccs::unique_id().expect("an id"), 0, 1);
    rank.all_reduce(seed, 0, COUNT_MAX);
    assert_eq!(host.upgrade()["communicators"], 1);
    rank.all_reduce(seed, 1, COUNT_MAX);
    drop((rank, kept));
    while !host.asks(&["sessions"])["sessions"].as_array().expect("rows").is_empty() {
        std::thread::yield_now();
    }
}

#[test]
fn no_call_fails_while_services_are_upgraded_under_load() {
    let (mut host, seed) = (Host::start(""), seed());
    let upgrades: u64 = std::env::var("MCCS_TEST_UPGRADES").map_or(12, |count| count.parse().expect("a number"));
    let (stop, calls) = (AtomicBool::new(false), AtomicU64::new(0));
    let groups = [4, 2].map(|nranks| Rank::join_all(&host, nranks));
    std::thread::scope(|scope| {
        (0..).zip(&groups).for_each(|(group, ranks)| Load::start(scope, seed ^ group, ranks, &calls, &stop));
        let load = Load { stop: &stop, calls: &calls };
        let mut gaps_us = Vec::new();
        for _ in 0..upgrades {
            let told = host.upgrade();
            assert_eq!((&told["sessions"], &told["communicators"]), (&6.into(), &2.into()));
            gaps_us.push(told["gap_us"].as_u64().expect("a time"));
            load.goes_on(12);
        }
        gaps_us.sort_unstable();
        println!("gaps in us: {gaps_us:?}");
    });
}

#[test]
fn an_operation_that_waits_for_another_rank_is_done_by_the_next_program() {
    let (mut host, seed) = (Host::start(""), seed());
    let ranks = Rank::join_all(&host, 2);
    for (call, count) in (0..).zip([1, 1000, COUNT_MAX]) {
        // Long enough for a round to be handed to the service.
        ranks[0].call(seed, call, count);
        assert!(!ranks[0].stream.synchronize_for(Duration::from_millis(50)).expect("no failure"));
        host.upgrade();
        ranks[1].all_reduce(seed, call, count);
        ranks[0].check(seed, call, count);
    }
    let completed = |host: &Host| host.asks(&["communicators"])["communicators"][0]["operations"].as_u64();
    assert_eq!(completed(&host), Some(3), "counters go on");
}

#[test]
fn memory_that_is_freed_while_an_operation_waits_is_read_by_the_next_program() {
    let (mut host, seed) = (Host::start(""), seed());
    let mut ranks = Rank::join_all(&host, 2);
    let second = ranks.pop().expect("two ranks");
    for call in 0..3 {
        let first = &mut ranks[0];
        first.call(seed, call, COUNT_MAX);
        // The service says so at once: it keeps what operations use.
        let (send, recv) = [(); 2].map(|()| first.client.allocate(4 * COUNT_MAX as u64).expect("memory")).into();
        (first.send, first.recv) = (send, recv);
        host.upgrade();
        host.upgrade();
        second.all_reduce(seed, call, COUNT_MAX);
        first.stream.synchronize().expect("completed");
    }
}

#[test]
fn what_has_ended_of_a_group_is_not_done_again() {
    let mut host = Host::start("");
    let ranks = Rank::join_all(&host, 3);
    let values: [Vec<i32>; 2] = [1, 2].map(|peer| Rank::contribution(seed(), 0, peer, 1000));
    ranks[0].write(&values.concat());
    let group = mccs::Group::begin();
    for peer in [1, 2] {
        let span = ranks[0].send.at(4000 * (u64::from(peer) - 1));
        ranks[0].comm.send(span, 1000, DataType::I32, peer, &ranks[0].stream).expect("enqueued");
    }
    group.end().expect("enqueued");
    let receive = |rank: &Rank, values: &[i32]| {
        rank.comm.recv(rank.recv.at(0), 1000, DataType::I32, 0, &rank.stream).expect("enqueued");
        rank.stream.synchronize().expect("completed");
        assert!(rank.read(1000) == values);
    };
    receive(&ranks[1], &values[0]);
    host.upgrade();
    assert!(!ranks[0].stream.query().expect("no failure"), "it waits for the third rank");
    host.upgrade();
    receive(&ranks[2], &values[1]);
    ranks[0].stream.synchronize().expect("completed");
}

#[test]
fn ranks_join_and_leave_over_an_upgrade() {
    let (mut host, seed) = (Host::start(""), seed());
    let id = mccs::unique_id().expect("an id");
    let (first, second) = (host.connect(), host.connect());
    let ranks = std::thread::scope(|scope| {
        let waits = scope.spawn(move || Rank::join(first, id, 0, 2));
        // By then it has asked; it joins as well if it has not.
        std::thread::sleep(Duration::from_millis(100));
        host.upgrade();
        let second = Rank::join(second, id, 1, 2);
        [waits.join().expect("a rank"), second]
    });
    let [first, second] = ranks;
    first.call(seed, 0, COUNT_MAX);
    let Rank { comm, stream, send, recv, client } = first;
    std::thread::scope(|scope| {
        let leaves = scope.spawn(move || comm.destroy());
        host.upgrade();
        second.all_reduce(seed, 0, COUNT_MAX);
        leaves.join().expect("a thread").expect("left");
    });
    stream.synchronize().expect("completed");
    host.upgrade();
    // One has left for good, and the other hears so.
    second.call(seed, 1, COUNT_MAX);
    let failed = second.stream.synchronize().expect_err("nobody is there").to_string();
    assert!(failed.contains("rank 0 has left"), "{failed}");
    drop((send, recv, client));
}

#[test]
fn failures_are_told_once_and_by_whichever_program() {
    let mut host = Host::start("");
    let (fails, sound) = (Rank::join_all(&host, 2), Rank::join_all(&host, 2));
    let disagree = |ranks: &[Rank]| {
        for (rank, count) in ranks.iter().zip([40_000, 41_000]) {
            rank.call(0, 0, count);
        }
        for rank in ranks {
            let failed = rank.stream.synchronize().expect_err("they disagree").to_string();
            assert!(failed.contains("disagree"), "{failed}");
        }
    };
    host.upgrade();
    disagree(&fails);
    host.upgrade();
    for rank in &fails {
        rank.call(0, 1, 40_000);
        assert!(rank.stream.synchronize().is_err() && rank.comm.async_error().is_some());
    }
    disagree(&sound);
}

#[test]
fn a_program_that_cannot_take_over_harms_nobody() {
    let (mut host, seed) = (Host::start(""), seed());
    let ranks = Rank::join_all(&host, 2);
    let pid = host.pid;
    let own = std::env::current_exe().expect("this program").display().to_string();
    let speaks = format!("exec {own} --ignored --exact a_program_of_another_state >/dev/null");
    let scripts = [("exit 3", "has ended"), ("exec sleep 600", "nothing for 10s"), (&*speaks, "state of version")];
    for (script, reason) in scripts {
        let told = host.refuses(&["upgrade", &host.script(script)]);
        assert!(told.contains(reason), "{script}: {told}");
        serves(&ranks, seed);
    }
    let told = host.refuses(&["upgrade", "service.toml"]);
    assert!(told.contains("cannot be started"), "{told}");
    let refused = |host: &Host, config: &str, reason: &str| {
        host.write_config(config);
        let told = host.refuses(&["reload"]);
        assert!(told.contains(reason), "{config}: {told}");
        serves(&ranks, seed);
    };
    refused(&host, "[limits]\noperation_timeout = \"soon\"\n", "operation_timeout");
    let other = "[[tenant]]\nname = \"other\"\nsocket = \"other.sock\"\n";
    refused(&host, other, "names no tenant default");
    assert!(!host.at("run/other.sock").exists(), "its own sockets go with it");
    let another_user = "[[tenant]]\nname = \"default\"\nuids = [4294967294]\n";
    refused(&host, another_user, "is not tenant default any more");
    refused(&host, "[[tenant]]\nname = \"default\"\nmax_memory = \"1MiB\"\n", "max_memory");
    host.write_config("");
    assert_eq!(host.pid, pid);
    assert!(host.first.try_wait().expect("a child").is_none());
    host.upgrade();
    serves(&ranks, seed);
}

/// The program is given up after longer than operations may wait.
#[test]
fn what_waits_is_not_late_by_a_hand_over_that_is_refused() {
    let (host, seed) = (Host::start("[limits]\noperation_timeout = \"4s\"\n"), seed());
    let ranks = Rank::join_all(&host, 2);
    let own = std::env::current_exe().expect("this program").display().to_string();
    let hangs = host.script(&format!("exec {own} --ignored --exact a_program_that_never_takes >/dev/null"));
    ranks[0].call(seed, 0, COUNT_MAX);
    let told = host.refuses(&["upgrade", &hangs]);
    assert!(told.contains("nothing for 5s"), "{told}");
    ranks[1].all_reduce(seed, 0, COUNT_MAX);
    ranks[0].check(seed, 0, COUNT_MAX);
}

/// The program of the script above: it starts, and does nothing with the state.
#[test]
#[ignore = "a program that another test starts"]
fn a_program_that_never_takes() {
    let link = Link::over(std::io::stdin().as_fd().try_clone_to_owned().expect("a descriptor"));
    let within = Duration::from_secs(600);
    let (state_version, session_version) = (STATE_VERSION, VERSION);
    let ready = ToPrevious::Ready { state_version, session_version, version: "another".into() };
    link.send(&ready, &[], within).expect("sent");
    let begun = link.receive::<mccs_handover::ToNext>(Some(within)).expect("came");
    link.send(&ToPrevious::Started, &[], within).expect("sent");
    let state = link.receive::<mccs_handover::ToNext>(Some(within)).expect("came");
    let _ = link.receive::<mccs_handover::ToNext>(None);
    drop((begun, state));
}

/// The program of a script above: it takes over state of another version.
#[test]
#[ignore = "a program that another test starts"]
fn a_program_of_another_state() {
    let link = Link::over(std::io::stdin().as_fd().try_clone_to_owned().expect("a descriptor"));
    let ready = ToPrevious::Ready { state_version: STATE_VERSION + 1, session_version: 0, version: "another".into() };
    link.send(&ready, &[], Duration::from_secs(10)).expect("sent");
    let _ = link.receive::<mccs_handover::ToNext>(None);
}

#[test]
fn what_cannot_be_handed_over_goes_on_with_the_program_before_under_load() {
    let (host, seed) = (Host::start(""), seed());
    let ranks = Rank::join_all(&host, 2);
    let obstacle = host.connect();
    let words = obstacle.allocate(4096).expect("memory");
    let stream = obstacle.create_ordered_stream(&words, 0).expect("a stream");
    let (stop, calls) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        Load::start(scope, seed, &ranks, &calls, &stop);
        let load = Load { stop: &stop, calls: &calls };
        for _ in 0..5 {
            let told = host.refuses(&["upgrade"]);
            assert!(told.contains("tenant default: session") && told.contains("streams that wait for GPUs"), "{told}");
            load.goes_on(4);
        }
        // Refused by the next program, when this one stands still.
        host.write_config("[[tenant]]\nname = \"other\"\n");
        drop(stream);
        for _ in 0..5 {
            let told = host.refuses(&["reload"]);
            assert!(told.contains("no tenant default"), "{told}");
            load.goes_on(4);
        }
    });
}

#[test]
fn of_two_upgrades_at_once_one_comes_after_the_other_or_not_at_all() {
    let (mut host, seed) = (Host::start(""), seed());
    let ranks = Rank::join_all(&host, 2);
    let outputs = std::thread::scope(|scope| {
        let runs = [(); 4].map(|()| scope.spawn(|| host.run(&["upgrade"])));
        runs.map(|run| run.join().expect("a thread"))
    });
    let done: Vec<_> = outputs.iter().filter(|output| output.status.success()).collect();
    assert!(!done.is_empty(), "{outputs:?}");
    let pid = |output: &&Output| {
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        told["pid"].as_u64().expect("a process") as u32
    };
    // The last of them is the service.
    host.pid = done.iter().map(pid).find(|pid| is_service(*pid)).expect("one of them");
    serves(&ranks, seed);
    host.upgrade();
    serves(&ranks, seed);
}

/// Whether a process runs the service's program, and has not ended.
fn is_service(pid: u32) -> bool {
    std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == Path::new(env!("CARGO_BIN_EXE_mccs-service")))
}
