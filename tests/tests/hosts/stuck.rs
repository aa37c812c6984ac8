//! Why a communicator is stuck: who is named, while it is stuck and when it is not.

use mccs::{DataType, RedOp};
use mccs_ipc::types::CollectiveKind;
use mccs_service::control::{ControlAnswer, ControlRequest, call as ask};
use mccs_service::telemetry::stuck::{StuckClass, StuckReport};
use mccs_tests::hosts::TestHosts;
use mccs_tests::{TestService, run_checked};

use crate::call;

/// Of the only communicator there is.
fn why_stuck(service: &TestService) -> StuckReport {
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
            // Until all others are in the call.
            let report = loop {
                let report = why_stuck(hosts.service(host));
                let waiting = report.hosts.iter().filter_map(|(_, account)| account.as_ref());
                let waiting = waiting
                    .flat_map(|account| &account.ranks)
                    .filter(|rank| rank.called == 6 && !rank.waits_in.is_empty());
                if waiting.count() == 3 {
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

#[test]
fn a_host_that_does_not_answer_is_named_and_nobody_is_where_nothing_waits() {
    let mut hosts = TestHosts::start(2, "");
    let ranks = hosts.join(&[0, 1]);
    let report = why_stuck(hosts.service(0));
    assert_eq!((report.class, report.culprits.len()), (StuckClass::NotStuck, 0), "{report:?}");
    assert!(report.hosts.iter().all(|(_, account)| account.is_some()), "{report:?}");
    // Its communicator stays for host_timeout, which is longer than the question takes.
    hosts.stop(1);
    let report = why_stuck(hosts.service(0));
    assert!(matches!(report.class, StuckClass::Host | StuckClass::Failed), "{report:?}");
    assert_eq!(report.culprits.iter().filter(|culprit| culprit.host == "h1" || culprit.what.contains("h1")).count(), 1);
    drop(ranks);
}
