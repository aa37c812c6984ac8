//! Collectives across the hosts of an emulated fabric, and what becomes of them when links and services fail.
//!
//! Needs root, and all programs of the workspace built; `.ci/run` runs it in a lane of its own. A missing part makes it fail.

mod dead_path;
mod fixture;
mod loss;
mod steering;

use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mccs::{DataType, RedOp};
use mccs_eval::workload::Call;
use mccs_ipc::types::CollectiveKind;
use mccs_tests::hosts::{Raise, in_threads, run_until_failure, run_until_stopped};
use mccs_tests::{Rank, run_checked};

use crate::fixture::{Fixture, HOSTS, program, run};
use crate::loss::Loss;

/// Silence is found out soon.
const QUICK: (&str, &str) = (
    "[tcp]\nsilence_timeout = \"4s\"\nconnect_timeout = \"4s\"",
    "keep_alive = \"200ms\"\nlink_timeout = \"2s\"\nhost_timeout = \"4s\"",
);
/// Two ranks on each host.
const EIGHT: [usize; 8] = [0, 0, 1, 1, 2, 2, 3, 3];

/// Collectives of every kind, one after the other.
fn any_kind(count: u64, nranks: u32, seed: u64) -> Call {
    let kind = CollectiveKind::ALL[seed as usize % CollectiveKind::ALL.len()];
    let count = if kind == CollectiveKind::Barrier { 0 } else { count };
    Call { kind, dtype: DataType::I32, redop: RedOp::Sum, root: 0, count, nranks, seed }
}

fn wait_for_more(done: &AtomicU64, more: u64) {
    let goal = done.load(Ordering::Relaxed) + more;
    while done.load(Ordering::Relaxed) < goal {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Eight ranks at work, to which `trouble` happens, and which go on for a while after it.
fn bear(fixture: &Fixture, count: u64, trouble: impl FnOnce()) {
    let ranks = fixture.join(&EIGHT);
    let (stop, done) = (AtomicU64::new(0), AtomicU64::new(0));
    let run = |rank: Rank| run_until_stopped(&rank, &stop, &done, |seed| any_kind(count, 8, seed));
    std::thread::scope(|scope| {
        let stopping = Raise(&stop);
        let work = scope.spawn(move || in_threads(ranks, run));
        wait_for_more(&done, 50);
        trouble();
        wait_for_more(&done, 200);
        drop(stopping);
        let rounds = work.join().expect("ranks");
        assert!(rounds.iter().all(|round| *round == rounds[0]), "{rounds:?}");
    });
}

/// Eight ranks at work that end when `trouble` happens to the last host; returns their messages.
fn end(fixture: &mut Fixture, count: u64, trouble: impl FnOnce(&mut Fixture)) -> Vec<String> {
    let ranks = fixture.join(&EIGHT);
    let done = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let work = scope.spawn(|| in_threads(ranks, |rank| run_until_failure(&rank, count, &done)));
        wait_for_more(&done, 50);
        trouble(fixture);
        work.join().expect("ranks")
    })
}

/// A new communicator on all hosts works.
fn is_well(fixture: &Fixture, placement: &[usize]) {
    let wrong = in_threads(fixture.join(placement), |rank| {
        let nranks = rank.comm.nranks();
        let (kind, dtype, redop) = (CollectiveKind::AllReduce, DataType::F32, RedOp::Sum);
        run_checked(&rank, &Call { kind, dtype, redop, root: 0, count: 50_000, nranks, seed: 5 }, false)
    });
    assert_eq!(wrong, vec![0; placement.len()]);
}

/// The repository's job file, on a fabric of another name.
#[test]
#[ignore = "needs root"]
fn the_job_of_four_hosts_checks_every_collective() {
    let fixture = Fixture::fabric();
    let text = include_str!("../../../eval/jobs/four-hosts.toml");
    assert_eq!(text.matches("fabric = \"rack\"").count(), HOSTS);
    let text = text.replace("fabric = \"rack\"", &format!("fabric = {:?}", fixture.name));
    std::fs::write(fixture.dir.path().join("job.toml"), text).expect("the job's file");
    let job = Command::new(program("mccs-launch")).args(["run", "job.toml"]).current_dir(fixture.dir.path()).output();
    let job = job.expect("the launcher");
    let (lines, errors) = (String::from_utf8_lossy(&job.stdout), String::from_utf8_lossy(&job.stderr));
    assert!(job.status.success(), "{lines}\n{errors}");
    assert!(lines.contains("# wrong elements: 0"), "{lines}");
    for kind in CollectiveKind::ALL {
        assert!(lines.lines().any(|line| line.contains(&format!(" {} ", kind.name()))), "no {}: {lines}", kind.name());
    }
}

#[test]
#[ignore = "needs root"]
fn a_link_that_is_down_for_a_second_delays_and_fails_nothing() {
    // As by default, a dead host is told from a pause by seconds.
    let fixture = Fixture::start("", "");
    bear(&fixture, 20_000, || {
        fixture.set_link(2, false);
        std::thread::sleep(Duration::from_secs(1));
        fixture.set_link(2, true);
    });
}

#[test]
#[ignore = "needs root"]
fn a_link_that_is_down_for_good_is_an_error_that_names_the_host() {
    let mut fixture = Fixture::start(QUICK.0, QUICK.1);
    for count in [100, 1 << 18] {
        let messages = end(&mut fixture, count, |fixture| fixture.set_link(3, false));
        for (message, host) in messages.iter().zip(EIGHT) {
            // A host that is cut off cannot know that it is not all the others.
            let names_other = (0..HOSTS).any(|other| other != host && message.contains(&format!("h{other}")));
            assert!(if host == 3 { names_other } else { message.contains("h3") }, "h{host}: {message}");
        }
        // Others were not disturbed, and the host comes back.
        is_well(&fixture, &[1, 0, 2, 2]);
        fixture.set_link(3, true);
        is_well(&fixture, &EIGHT);
    }
}

#[test]
#[ignore = "needs root"]
fn a_link_that_becomes_slow_and_fast_again_changes_no_data() {
    let fixture = Fixture::start("", "");
    bear(&fixture, 20_000, || {
        for rate in ["50mbit", "2gbit", "20mbit", "1gbit"] {
            fixture.set_rate(1, rate);
            std::thread::sleep(Duration::from_millis(300));
        }
    });
}

#[test]
#[ignore = "needs root"]
fn a_service_that_stands_still_for_a_second_is_no_dead_path() {
    let fixture = Fixture::start("", "");
    bear(&fixture, 20_000, || fixture.stop_for(1, Duration::from_millis(1500)));
    assert!(!fixture.logs().contains("no answer over a path"), "{}", fixture.logs());
}

#[test]
#[ignore = "needs root"]
fn one_lost_packet_in_a_hundred_changes_no_data() {
    let fixture = Fixture::start("", "");
    let before = fixture.segments_sent_again();
    let losses = (0..HOSTS).flat_map(|host| {
        let at = [(format!("h{host}"), "eth0".to_owned()), ("leaf0".to_owned(), format!("h{host}"))];
        at.map(|(node, interface)| Loss::start(&fixture.namespace(&node), &interface, 100))
    });
    let losses: Vec<Loss> = losses.collect();
    bear(&fixture, 20_000, || {});
    assert!(fixture.segments_sent_again() > before, "nothing was lost");
    drop(losses);
    is_well(&fixture, &EIGHT);
    // Nor is a path that loses some packets a dead one.
    assert!(!fixture.logs().contains("no answer over a path"), "{}", fixture.logs());
}

#[test]
#[ignore = "needs root"]
fn a_service_that_is_killed_is_named_and_comes_back() {
    let mut fixture = Fixture::start(QUICK.0, QUICK.1);
    for count in [100, 1 << 18] {
        let others = fixture.join(&[1, 0, 2]);
        let (stop, done) = (AtomicU64::new(0), AtomicU64::new(0));
        let run = |rank: Rank| run_until_stopped(&rank, &stop, &done, |seed| any_kind(5000, 3, seed));
        std::thread::scope(|scope| {
            let stopping = Raise(&stop);
            let work = scope.spawn(move || in_threads(others, run));
            let messages = end(&mut fixture, count, |fixture| fixture.kill(3));
            for (message, host) in messages.iter().zip(EIGHT) {
                let expected = if host == 3 { "service has gone" } else { "h3" };
                assert!(message.contains(expected), "h{host}: {message}");
            }
            fixture.restart(3);
            is_well(&fixture, &EIGHT);
            drop(stopping);
            let rounds = work.join().expect("the other communicator");
            assert!(rounds.iter().all(|round| *round == rounds[0]), "{rounds:?}");
        });
    }
}

#[test]
#[ignore = "needs root"]
fn a_port_that_is_in_use_is_named_and_refuses_the_service() {
    let mut fixture = Fixture::start(QUICK.0, QUICK.1);
    fixture.kill(1);
    let namespace = fixture.namespace("h1");
    let listener = loss::inside_namespace(&namespace, || std::net::TcpListener::bind("10.0.1.1:7400").expect("a port"));
    let refused = fixture.service_command(1).output().expect("a service");
    assert!(!refused.status.success());
    let log = fixture.log(1);
    assert!(log.contains("another process has 10.0.1.1:7400"), "{log}");
    drop(listener);
    fixture.restart(1);
    is_well(&fixture, &EIGHT);
    assert!(run(&["ip", "netns", "pids", &namespace]).lines().count() <= 1, "the refused one has ended");
}
