//! Processes and services that end while others count on them: who is left is told, and goes on with what is left.

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use mccs::{DataType, RedOp};
use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_ipc::types::CollectiveKind;
use mccs_tenants::Resource;
use mccs_tests::hosts::{Raise, TestHosts, in_threads, run_until_failure, run_until_stopped};
use mccs_tests::{Rank, run_checked};

use crate::call;

/// Silence is found out soon; nothing else depends on time.
const QUICK: &str = "[tcp]\nsilence_timeout = \"2s\"\n[exchange]\nkeep_alive = \"200ms\"\nlink_timeout = \"1s\"\nhost_timeout = \"4s\"\n";

/// Checked collectives until every rank sees that `stop` is raised; returns how many there were.
fn go_on(rank: &Rank, stop: &AtomicU64) -> u64 {
    let all_reduce =
        |seed| call(CollectiveKind::AllReduce, DataType::I32, RedOp::Sum, 30_000, rank.comm.nranks(), seed);
    run_until_stopped(rank, stop, &AtomicU64::new(0), all_reduce)
}

fn wait_for(counter: &AtomicU64, least: u64) {
    while counter.load(Ordering::Relaxed) < least {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

fn victim(hosts: &TestHosts, host: usize, id: &mccs::UniqueId, rank: u32, nranks: u32, count: u64) -> Child {
    Command::new(env!("CARGO_BIN_EXE_victim"))
        .arg(hosts.service(host).socket(0))
        .args([id.to_string(), rank.to_string(), nranks.to_string(), count.to_string(), "h0".into()])
        .stderr(Stdio::null())
        .spawn()
        .expect("a victim")
}

#[test]
fn a_killed_process_is_named_on_every_host_and_others_go_on() {
    for count in [100, 1 << 20] {
        let hosts = TestHosts::start(3, QUICK);
        let (id, placement) = (mccs::unique_id().expect("an id"), [0, 1, 2, 2]);
        let mut victim = victim(&hosts, 2, &id, 3, 4, count);
        let ranks = hosts.join_some(0, id, &placement, &[0, 1, 2]);
        let others = hosts.join(&[1, 0, 2]);
        let (done, stop) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let stopping = Raise(&stop);
            let messages = scope.spawn(|| in_threads(ranks, |rank| run_until_failure(&rank, count, &done)));
            let others = scope.spawn(|| in_threads(others, |rank| go_on(&rank, &stop)));
            wait_for(&done, 10);
            victim.kill().expect("killed");
            for message in messages.join().expect("ranks") {
                let text = format!("rank 3 (process {}) has gone", victim.id());
                assert!(message.contains(&text), "{text:?} is missing in {message:?}");
            }
            drop(stopping);
            let rounds = others.join().expect("the other communicator");
            assert!(rounds.iter().all(|round| *round == rounds[0]), "{rounds:?}");
        });
        victim.wait().expect("a child");
    }
}

#[test]
fn a_process_that_dies_while_others_join_is_named() {
    let hosts = TestHosts::start(2, "");
    let id = mccs::unique_id().expect("an id");
    let mut victim = victim(&hosts, 1, &id, 1, 3, 10);
    let client = hosts.service(0).connect(0);
    std::thread::scope(|scope| {
        let joined =
            scope.spawn(|| client.communicator(id, 0, 3).root_address("h0").join().expect_err("rank 2 never comes"));
        // A rank has joined once its host counts it; its session alone does not say so.
        let has_joined = |host: usize| {
            let sessions = hosts.service(host).service().registry.sessions();
            sessions.iter().any(|session| session.tenant.used(Resource::Communicators) > 0)
        };
        while !(0..2).all(has_joined) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // Messages that go the same ways behind them: the root has heard of both.
        drop(hosts.join(&[0, 1]));
        victim.kill().expect("killed");
        let error = joined.join().expect("a thread").to_string();
        assert!(error.contains(&format!("rank 1 (process {}) left while joining", victim.id())), "{error}");
    });
    victim.wait().expect("a child");
}

#[test]
fn a_rank_that_leaves_or_aborts_releases_ranks_of_other_hosts() {
    for abort in [false, true] {
        let hosts = TestHosts::start(2, QUICK);
        let messages = hosts.ranks(&[0, 0, 1], |rank| {
            if rank.comm.rank() == 2 {
                if abort { rank.comm.abort() } else { rank.comm.destroy() }.expect("left");
                return None;
            }
            rank.comm.barrier(&rank.stream).expect("enqueued");
            Some(rank.stream.synchronize().expect_err("rank 2 never comes").to_string())
        });
        for message in messages.into_iter().flatten() {
            assert!(message.contains("rank 2"), "{message}");
        }
    }
}

#[test]
fn a_stopped_service_is_named_others_go_on_and_it_comes_back() {
    for count in [100, 1 << 20] {
        let mut hosts = TestHosts::start(3, QUICK);
        let (doomed, others) = (hosts.join(&[0, 1, 1, 2]), hosts.join(&[1, 0]));
        let (done, stop) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let stopping = Raise(&stop);
            let messages = scope.spawn(|| in_threads(doomed, |rank| run_until_failure(&rank, count, &done)));
            let others = scope.spawn(|| in_threads(others, |rank| go_on(&rank, &stop)));
            wait_for(&done, 10);
            hosts.stop(2);
            let messages = messages.join().expect("ranks");
            for message in &messages[..3] {
                assert!(message.contains("h2"), "{message}");
            }
            assert!(messages[3].contains("service has gone"), "{}", messages[3]);
            hosts.restart(2);
            let check = call(CollectiveKind::AllReduce, DataType::F32, RedOp::Sum, count, 4, 7);
            assert_eq!(hosts.ranks(&[2, 0, 1, 2], |rank| run_checked(&rank, &check, false)), [0; 4]);
            drop(stopping);
            others.join().expect("the other communicator");
        });
    }
}

/// With nothing to do for its ranks: only the links between services tell.
#[test]
fn a_service_that_stops_while_its_ranks_are_idle_is_named() {
    let mut hosts = TestHosts::start(2, QUICK);
    let ranks = hosts.join(&[0, 1]);
    hosts.stop(1);
    while ranks[0].comm.async_error().is_none() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let error = ranks[0].comm.async_error().expect("an error").to_string();
    assert!(error.contains("h1"), "{error}");
    assert!(ranks[1].comm.async_error().is_some(), "its service has gone");
}

/// Those who join while a host is down are told which one is missing; those who join when it is back are not.
#[test]
fn a_host_that_is_down_fails_set_up_and_its_return_heals_it() {
    let mut hosts = TestHosts::start(2, &format!("[limits]\ninit_timeout = \"5s\"\n{QUICK}"));
    hosts.stop(1);
    let id = mccs::unique_id().expect("an id");
    let error = hosts.service(0).connect(0).communicator(id, 0, 2).root_address("h0").join().expect_err("h1 is down");
    assert!(error.to_string().contains("missing rank 1 of 2"), "{error}");
    hosts.restart(1);
    let check = call(CollectiveKind::AllGather, DataType::F32, RedOp::Sum, 1000, 2, 3);
    assert_eq!(hosts.ranks(&[0, 1], |rank| run_checked(&rank, &check, false)), [0; 2]);
}

/// Whoever starts while another host is away says that it is, and needs no help when that comes.
#[test]
fn a_service_that_starts_while_another_is_away_says_so_and_joins_it_later() {
    let mut hosts = TestHosts::start(2, QUICK);
    hosts.stop(0);
    hosts.stop(1);
    hosts.restart(0);
    let peers = |hosts: &TestHosts, host: usize| {
        let answer = ask(&hosts.service(host).control_socket(), &ControlRequest::Hosts).expect("an answer");
        let ControlAnswer::Hosts(all) = answer else { panic!("{answer:?}") };
        all.into_iter().map(|host| (host.host, host.own, host.up, host.last_error)).collect::<Vec<_>>()
    };
    // Until it has tried.
    let seen =
        std::iter::repeat_with(|| peers(&hosts, 0)).find(|seen| seen[1].3.is_some()).expect("an endless iterator");
    assert_eq!((seen[1].0.as_str(), seen[1].1, seen[1].2), ("h1", false, false), "{seen:?}");
    hosts.restart(1);
    let check = call(CollectiveKind::AllGather, DataType::F32, RedOp::Sum, 1000, 2, 3);
    assert_eq!(hosts.ranks(&[0, 1], |rank| run_checked(&rank, &check, false)), [0; 2]);
    // A link that has just been given up, where the machine was held up, comes back.
    while !(0..2).all(|host| peers(&hosts, host).iter().all(|(.., up, _)| *up)) {}
}
