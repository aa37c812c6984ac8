//! Why a communicator is stuck: who is named, while it is stuck and when it is not.

use std::sync::atomic::{AtomicBool, Ordering};

use mccs::{DataType, RedOp};
use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_ipc::types::CollectiveKind;
use mccs_telemetry::stuck::{SignalWait, StuckClass, StuckReport};
use mccs_tests::hosts::TestHosts;
use mccs_tests::{Rank, TestService, run_checked};

use crate::call;

/// Report on the only communicator there is. A thread that is held up answers too late for a report; so asks until all
/// hosts have answered.
fn why_stuck(service: &TestService) -> StuckReport {
    std::iter::repeat_with(|| ask_why_stuck(service))
        .find(|report| report.hosts.iter().all(|(_, account)| account.is_some()))
        .expect("an endless iterator")
}

fn ask_why_stuck(service: &TestService) -> StuckReport {
    let communicator = service.service().registry.comms()[0].number;
    match ask(&service.control_socket(), &ControlRequest::WhyStuck { communicator }).expect("an answer") {
        ControlAnswer::Stuck(report) => *report,
        answer => panic!("{answer:?}"),
    }
}

#[test]
fn a_rank_that_has_not_called_is_named_from_every_host() {
    let hosts = TestHosts::start(3, "");
    let ranks = hosts.join(&[0, 1, 1, 2]);
    let all_reduce = |seed| call(CollectiveKind::AllReduce, DataType::I32, RedOp::Sum, 100_000, 4, seed);
    std::thread::scope(|scope| {
        let (go_on, told) = std::sync::mpsc::channel::<()>();
        let mut told = Some(told);
        for rank in ranks {
            let told = if rank.comm.rank() == 2 { told.take() } else { None };
            scope.spawn(move || {
                for seed in 0..5 {
                    assert_eq!(run_checked(&rank, &all_reduce(seed), false), 0);
                }
                if let Some(told) = told {
                    // Disconnected if the test has failed: goes on, too.
                    let _ = told.recv();
                }
                assert_eq!(run_checked(&rank, &all_reduce(5), false), 0);
            });
        }
        for host in 0..3 {
            // Until all others are in the call, and quiet for so long that the communicator does not count as one that runs.
            let report = loop {
                let report = why_stuck(hosts.service(host));
                let waiting = report.hosts.iter().filter_map(|(_, account)| account.as_ref());
                let waiting = waiting
                    .flat_map(|account| &account.ranks)
                    .filter(|rank| rank.called == 6 && !rank.waits_in.is_empty());
                if waiting.count() == 3 && report.class != StuckClass::Running {
                    break report;
                }
            };
            assert_eq!(report.class, StuckClass::Rank, "{report:?}");
            let culprits: Vec<_> =
                report.culprits.iter().map(|culprit| (culprit.host.as_str(), culprit.rank, culprit.pid)).collect();
            assert_eq!(culprits, [("h1", Some(2), Some(std::process::id() as i32))]);
            let what = &report.culprits[0].what;
            assert!(what.contains("nothing after collective 4, all_reduce(100000 x int32"), "{what}");
        }
        drop(go_on);
    });
    // The ranks have left: nothing is there to ask about.
    let unknown = ask(&hosts.service(0).control_socket(), &ControlRequest::WhyStuck { communicator: 999 });
    assert!(matches!(unknown, Ok(ControlAnswer::Refused(text)) if text.contains("no communicator 999")));
}

/// In nearly every collective somebody waits for somebody, whenever it is looked.
#[test]
fn nobody_of_a_healthy_job_is_accused() {
    const LOOKS: usize = 60;
    let hosts = TestHosts::start(3, "");
    let ranks = hosts.join(&[0, 1, 1, 2]);
    let stop = AtomicBool::new(false);
    let looks = std::thread::scope(|scope| {
        for rank in &ranks {
            let stop = &stop;
            scope.spawn(move || {
                // All stop after the same call: its only element says how many have been told to.
                let memory = rank.client.allocate(4).expect("memory");
                let mut told = 0;
                while told == 0 {
                    let stops = i32::from(stop.load(Ordering::Relaxed));
                    // SAFETY: nothing is in flight.
                    unsafe { memory.as_mut_slice() }.copy_from_slice(&stops.to_le_bytes());
                    let place = memory.at(0);
                    rank.comm.all_reduce(place, place, 1, DataType::I32, RedOp::Sum, &rank.stream).expect("enqueued");
                    rank.stream.synchronize().expect("completed");
                    // SAFETY: as above.
                    let sum: [u8; 4] = unsafe { memory.as_mut_slice() }.try_into().expect("four bytes");
                    told = i32::from_le_bytes(sum);
                }
            });
        }
        let looks: Vec<StuckReport> = (0..LOOKS).map(|look| ask_why_stuck(hosts.service(look % 3))).collect();
        stop.store(true, Ordering::Relaxed);
        looks
    });
    let accused: Vec<_> = looks.iter().filter(|report| !report.culprits.is_empty()).collect();
    assert!(accused.is_empty(), "{accused:?}");
    let runs = looks.iter().filter(|report| report.class == StuckClass::Running);
    let moved = |report: &&StuckReport| report.progress.is_some_and(|progress| progress.collectives > 0);
    assert!(runs.filter(moved).count() > LOOKS / 2, "{looks:?}");
}

#[test]
fn a_host_that_does_not_answer_is_named_and_nobody_is_where_nothing_waits() {
    let mut hosts = TestHosts::start(2, "");
    let ranks = hosts.join(&[0, 1]);
    let report = why_stuck(hosts.service(0));
    assert_eq!((report.class, report.culprits.len()), (StuckClass::NotStuck, 0), "{report:?}");
    // Its communicator stays for host_timeout, which is longer than the question takes.
    hosts.stop(1);
    let report = ask_why_stuck(hosts.service(0));
    assert!(matches!(report.class, StuckClass::Host | StuckClass::Failed), "{report:?}");
    assert_eq!(report.culprits.iter().filter(|culprit| culprit.host == "h1" || culprit.what.contains("h1")).count(), 1);
    drop(ranks);
}

/// Asks until some rank waits.
fn why_stuck_once_it_waits(service: &TestService) -> StuckReport {
    loop {
        let report = why_stuck(service);
        let mut ranks = report.hosts.iter().filter_map(|(_, account)| account.as_ref()).flat_map(|host| &host.ranks);
        if ranks.any(|rank| !rank.waits_in.is_empty()) {
            return report;
        }
    }
}

/// A culprit: host, rank, which of its calls, and for whom.
type Blamed<'a> = (&'a str, Option<u32>, Option<u64>, Option<u32>);

fn culprits(report: &StuckReport) -> Vec<Blamed<'_>> {
    report.culprits.iter().map(|who| (who.host.as_str(), who.rank, who.seq, who.peer)).collect()
}

#[test]
fn the_missing_half_of_a_message_is_named_from_both_hosts_and_no_flow_is() {
    // A message that buffers hold is sent, whoever receives it; and the kernel's own grow.
    let hosts = TestHosts::start(2, "[tcp]\nsocket_buffer = \"64KiB\"\n");
    let ranks = hosts.join(&[0, 1]);
    let bytes = 4 << 20;
    let call = |rank: &Rank, sends: bool| {
        let memory = rank.client.allocate(bytes).expect("memory");
        let peer = 1 - rank.comm.rank();
        let called = if sends {
            rank.comm.send(memory.at(0), bytes, DataType::U8, peer, &rank.stream)
        } else {
            rank.comm.recv(memory.at(0), bytes, DataType::U8, peer, &rank.stream)
        };
        called.expect("enqueued");
        memory
    };
    for number in 0..2 {
        // Both come late, to either half: the one to what the other was late for comes second.
        for (early, early_sends) in [(0, false), (0, true), (1, false), (1, true)] {
            let late = 1 - early;
            let _early_memory = call(&ranks[early], early_sends);
            for host in 0..2 {
                let report = why_stuck_once_it_waits(hosts.service(host));
                assert_eq!(report.class, StuckClass::Rank, "{report:?}");
                let seq = 2 * number + u64::from(early == 1);
                let name = if late == 0 { "h0" } else { "h1" };
                assert_eq!(culprits(&report), [(name, Some(late as u32), Some(seq), Some(early as u32))], "{report:?}");
            }
            let _late_memory = call(&ranks[late], !early_sends);
            ranks.iter().for_each(|rank| rank.stream.synchronize().expect("completed"));
        }
    }
}

#[test]
fn a_host_whose_ranks_have_left_is_not_accused() {
    let hosts = TestHosts::start(3, "");
    let mut ranks = hosts.join(&[0, 1, 2]);
    let Rank { comm, .. } = ranks.pop().expect("three ranks");
    comm.destroy().expect("left");
    let memory = ranks[0].client.allocate(1000).expect("memory");
    ranks[0].comm.recv(memory.at(0), 1000, DataType::U8, 1, &ranks[0].stream).expect("enqueued");
    let has_left = |report: &StuckReport| {
        let there = report.hosts.iter().find(|(host, _)| host == "h2").and_then(|(_, account)| account.as_ref());
        there.is_some_and(|account| account.ranks.iter().all(|rank| rank.has_left))
    };
    // It is told by one host to each of the others.
    for host in 0..2 {
        let report = std::iter::repeat_with(|| why_stuck_once_it_waits(hosts.service(host)))
            .find(has_left)
            .expect("an endless iterator");
        assert_eq!(culprits(&report), [("h1", Some(1), Some(0), Some(0))], "{report:?}");
    }
    ranks[1]
        .comm
        .send(ranks[1].client.allocate(1000).expect("memory").at(0), 1000, DataType::U8, 0, &ranks[1].stream)
        .expect("enqueued");
    ranks[0].stream.synchronize().expect("completed");
}

#[test]
fn small_collectives_count_and_the_last_of_them_is_told() {
    let hosts = TestHosts::start(1, "");
    let small = |seed| call(CollectiveKind::AllReduce, DataType::I32, RedOp::Sum, 10, 2, seed);
    let large = call(CollectiveKind::AllReduce, DataType::F32, RedOp::Max, 100_000, 2, 9);
    std::thread::scope(|scope| {
        let (go_on, told) = std::sync::mpsc::channel::<()>();
        let mut told = Some(told);
        for rank in hosts.join(&[0, 0]) {
            let told = if rank.comm.rank() == 1 { told.take() } else { None };
            scope.spawn(move || {
                assert_eq!(run_checked(&rank, &large, false), 0);
                (0..3).for_each(|seed| assert_eq!(run_checked(&rank, &small(seed), false), 0));
                if let Some(told) = told {
                    // Disconnected if the test has failed: goes on, too.
                    let _ = told.recv();
                }
                assert_eq!(run_checked(&rank, &large, false), 0);
            });
        }
        let report = std::iter::repeat_with(|| why_stuck_once_it_waits(hosts.service(0)))
            .find(|report| report.culprits.iter().any(|culprit| culprit.seq == Some(4)));
        let report = report.expect("an endless iterator");
        assert_eq!(culprits(&report), [("this host", Some(1), Some(4), None)], "{report:?}");
        let what = &report.culprits[0].what;
        assert!(what.contains("nothing after collective 3, all_reduce(10 x int32"), "{what}");
        drop(go_on);
    });
}

#[test]
fn a_rank_that_has_not_signalled_is_named_with_the_signal() {
    let hosts = TestHosts::start(2, "");
    let ranks = hosts.join(&[0, 1]);
    std::thread::scope(|scope| {
        let (go_on, told) = std::sync::mpsc::channel::<()>();
        let mut told = Some(told);
        for rank in ranks {
            let told = if rank.comm.rank() == 1 { told.take() } else { None };
            scope.spawn(move || {
                let channels = rank.comm.port_channels().expect("opened");
                let channel = channels.signal_channel(1 - rank.comm.rank(), 7).expect("a channel");
                for number in 1..=3 {
                    if let Some(told) = told.as_ref().filter(|_| number == 3) {
                        // Disconnected if the test has failed: goes on, too.
                        let _ = told.recv();
                    }
                    channel.signal().expect("signalled");
                    channel.wait().expect("signalled");
                }
                rank.comm.barrier(&rank.stream).and_then(|()| rank.stream.synchronize()).expect("completed");
            });
        }
        let signal = SignalWait { peer: 1, tag: 7, number: 3 };
        for host in 0..2 {
            let report = loop {
                let report = why_stuck(hosts.service(host));
                let mut known = report.hosts.iter().filter_map(|(_, account)| account.as_ref());
                if report.class == StuckClass::Rank
                    && known.any(|of| of.ranks.iter().any(|rank| rank.signals == [signal]))
                {
                    break report;
                }
            };
            let [culprit] = &report.culprits[..] else { panic!("{report:?}") };
            assert_eq!((culprit.host.as_str(), culprit.rank, culprit.peer), ("h1", Some(1), Some(0)));
            assert!(culprit.what.contains("signal 3 of tag 7") && culprit.what.contains("rank 0 waits"), "{culprit:?}");
        }
        drop(go_on);
    });
}
