//! Operators' changes of communicators whose ranks run collectives themselves, with a device that has pages and no GPUs.

mod fixture;

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use mccs_device::{Buffers, Counted, DeviceEvent, NUMBERS_MAX};
use mccs_exchange::protocol::{Answer, CommId, Name, Request};
use mccs_ipc::device_initiated::{Execution, P2pLaunched};
use mccs_ipc::types::{CollectiveKind, DataType, Handle, RedOp, WorkDone};
use mccs_kernels::cuda::{Stamp, SymmetricBufferCounts};
use mccs_model::link::{LinkEngines, LinksId};
use mccs_model::{Action, Scalar};
use mccs_registry::RankProgress;
use mccs_telemetry::stuck::{HostAccount, StuckClass};

use self::fixture::Fixture;
use crate::proxy::communicator::comm::Span;
use crate::proxy::*;
use crate::transport::{Activity, Network};

#[test]
fn one_rank_that_opens_no_handles_has_memory_go_by_descriptors_for_all() {
    let mut fixture = Fixture::new(Execution::Ranks, 2);
    for (id, stranger) in [(8, None), (9, Some(1)), (10, None)] {
        fixture.stranger = stranger;
        for joined in fixture.join(2, id) {
            let ProxyReply::Joined(JoinedRank { share: Some(share), .. }) = joined else { panic!("not joined") };
            assert_eq!(share.opens_handles, stranger.is_none());
        }
    }
}

#[test]
fn the_operator_changes_what_ranks_on_gpus_run_by() {
    let mut fixture = Fixture::new(Execution::Ranks, 3);
    let comm = fixture.comm();
    let page = comm.device_initiated.as_ref().expect("on GPUs").page();
    assert_eq!(fixture.seen(), (0, Some(("measured".into(), false))));
    assert!(page.announce(1, 4));
    assert_eq!(fixture.reconfigure("large_from = '4MiB'"), Ok(Reconfigured { epoch: 1, cut: 4 }));
    assert_eq!(fixture.seen(), (1, Some(("4MiB".into(), false))));
    assert_eq!([4, 5].map(|n| page.published_strategy(n).map(|terms| terms.epoch)), [Some(0), Some(1)]);
    for (refused, why) in [
        ("ll128 = true", "do not store whole lines"),
        ("channels = 2", "only large_from, ll128 and max_ctas"),
        ("transport = 'rdma'", "only large_from, ll128 and max_ctas"),
    ] {
        let reason = fixture.reconfigure(refused).expect_err(refused);
        assert!(reason.contains(why), "{reason}");
    }
    assert_eq!((fixture.seen().0, page.published()), (1, 2));
    assert_eq!(fixture.reconfigure("large_from = '0'"), Ok(Reconfigured { epoch: 2, cut: 4 }));
    assert!(page.begin_graph(2));
    assert_eq!(fixture.reconfigure("large_from = 'measured'"), Ok(Reconfigured { epoch: 3, cut: 4 }));
    assert_eq!(fixture.seen(), (3, Some(("measured".into(), false))));
    let captured = || page.captured_strategy().map(|terms| terms.epoch);
    fixture.look_at_gpus();
    assert_eq!(comm.view().graphs_keep, Some(2));
    assert_eq!((captured(), page.published_strategy(5).map(|terms| terms.epoch)), (Some(2), Some(3)));
    page.end_graph(2);
    assert_eq!(captured(), Some(2));
    fixture.look_at_gpus();
    assert_eq!(captured(), Some(3));
}

#[test]
fn the_operator_sees_a_communicators_name_and_its_ranks_last_tags() {
    let mut fixture = Fixture::new(Execution::Ranks, 2);
    fixture.name = "made by the fixture".into();
    fixture.join(2, 8);
    let named = fixture.registry.comms().into_iter().find(|comm| !comm.name.is_empty());
    let comm = named.expect("the second communicator");
    let view = || comm.view();
    let tags = || view().ranks.iter().map(|rank| rank.user_tag).collect::<Vec<_>>();
    assert_eq!((view().name.as_str(), tags()), ("made by the fixture", vec![None, None]));
    comm.device_initiated.as_ref().expect("ranks on GPUs").page().tag(1, 3, 4711);
    assert_eq!(tags(), [None, Some(4711)]);
    let told = comm.named(&"it is late".into());
    assert_eq!((&*told, comm.named(&told)), ("it is late (communicator made by the fixture)", told.clone()), "once");
    fixture.poll();
}

#[test]
fn who_has_no_strategy_says_so() {
    let mut of_the_service = Fixture::new(Execution::Service, 2);
    assert!(of_the_service.reconfigure("large_from = '4MiB'").expect_err("refused").contains("the service's engines"));
    assert_eq!(of_the_service.seen(), (0, None));
    let mut alone = Fixture::new(Execution::Ranks, 1);
    assert!(alone.reconfigure("ll128 = false").expect_err("refused").contains("single rank"));
}

#[test]
fn who_has_not_called_is_named() {
    let mut fixture = Fixture::new(Execution::Ranks, 3);
    let comm = fixture.comm();
    let page = comm.device_initiated.as_ref().expect("on GPUs").page();
    [(0, 5), (1, 4), (2, 5)].into_iter().for_each(|(rank, called)| page.launch(rank, called));
    fixture.tell(&[(4, 0); 3]);
    let report = fixture.why_stuck(|_| ());
    let named: Vec<_> = report.culprits.iter().map(|culprit| (culprit.rank, culprit.seq, &*culprit.what)).collect();
    assert_eq!(named, [(Some(1), Some(4), "has called nothing after collective 3")]);
    assert_eq!(report.class, StuckClass::Rank);
}

#[test]
fn gpus_that_do_not_end_what_all_have_called_are_told_of() {
    let mut fixture = Fixture::new(Execution::Ranks, 3);
    let comm = fixture.comm();
    let page = comm.device_initiated.as_ref().expect("on GPUs").page();
    (0..3).for_each(|rank| page.launch(rank, 5));
    fixture.tell(&[(4, 0), (5, 0), (4, 0)]);
    let report = fixture.why_stuck(|_| ());
    assert_eq!(report.class, StuckClass::Gpu, "{report:?}");
    assert!(report.culprits[0].what.contains("all ranks have called operation 5, and it does not end"), "{report:?}");
    let account = report.hosts[0].1.as_ref().expect("this host's");
    let waiting: Vec<_> = account.ranks.iter().filter(|rank| !rank.waits_in.is_empty()).map(|rank| rank.rank).collect();
    assert_eq!(waiting, [0, 2]);
    // An operation that goes on is not stuck; nor is one that has ended.
    let mut ended = 4;
    let report = fixture.why_stuck(|fixture| {
        ended += 1;
        (0..3).for_each(|rank| page.launch(rank, ended + 1));
        fixture.tell(&[(ended, 0); 3]);
    });
    assert_eq!((report.class, report.culprits.len()), (StuckClass::Running, 0), "{report:?}");
    assert!(report.progress.is_some_and(|progress| progress.collectives > 0), "{report:?}");
    let report = fixture.why_stuck(|fixture| fixture.tell(&[(ended + 1, 0); 3]));
    assert_eq!(report.class, StuckClass::NotStuck, "{report:?}");
    *fixture.told.lock().expect("no test panics with it") = None;
    let report = fixture.why_stuck(|_| ());
    assert_eq!(report.class, StuckClass::Gpu);
    assert_eq!(report.culprits[0].what, "GPUs do not say how far they are");
}

#[test]
fn an_operator_for_whose_question_there_is_no_room_is_told_so_at_once() {
    let mut fixture = Fixture::new(Execution::Ranks, 3);
    let number = fixture.comm().number;
    for question in 0..65 {
        let reply_to = ReplyTo::new(question, fixture.answers.sender());
        assert!(
            fixture
                .proxy
                .send(OperatorMessage::WhyStuck { number, rounds: DiagnosisRounds::UntilCertain, reply_to }.into())
                .is_ok()
        );
        fixture.poll();
    }
    // All others wait for the second look at GPUs.
    let Some((64, Err(refused))) = fixture.answers.pop() else { panic!("the last one is refused") };
    assert!(refused.reason.starts_with("64 such questions"), "{}", refused.reason);
    assert!(fixture.answers.pop().is_none());
}

#[test]
fn a_host_that_asks_when_there_is_no_room_is_told_so_at_once() {
    let name = |name: &str| Name::new(name).expect("a name");
    let mut fixture = Fixture::new(Execution::Ranks, 3);
    let exchange = Mailbox::new(16);
    // It has ranks on other hosts, too, and its engines have not said yet what they wait for.
    let (handle, _) = fixture.engine.state.comms.iter().next().expect("a communicator");
    let comm = CommId { root: name("a"), incarnation: 1, number: 1 };
    let (engines, placed, activity) = (Vec::new(), LinkEngines::round(1), Activity::new(Instant::now()));
    let network = Network { links: LinksId(1), epoch: 0, engines, placed, activity };
    let (left, suspected, is_told, is_closed) = (BTreeSet::new(), None, false, false);
    fixture
        .engine
        .state
        .comms
        .set_span(handle, Span { comm: comm.clone(), left, network, suspected, is_told, is_closed });
    fixture.engine.state.out.exchange = ExchangeMail::new(name("a"), exchange.sender());
    let inquired = |fixture: &mut Fixture, host: &str, question| {
        let ProxyEngine { state, diagnostics, .. } = &mut fixture.engine;
        diagnostics.inquired(state, &comm, &name(host), question);
    };
    (0..64).for_each(|question| inquired(&mut fixture, "b", question));
    assert!(exchange.pop().is_none());
    inquired(&mut fixture, "c", 64);
    let Some(Request::Account { to, answer: Answer { question: 64, body, .. } }) = exchange.pop() else {
        panic!("no answer")
    };
    let account: HostAccount = serde_json::from_slice(body.bytes()).expect("an account");
    assert_eq!((to, account), (name("c"), HostAccount::of_busy()));
    // An operator's question has room all the same.
    let (number, reply_to) = (fixture.comm().number, ReplyTo::new(4, fixture.answers.sender()));
    let ProxyEngine { state, diagnostics, .. } = &mut fixture.engine;
    diagnostics.why_stuck(state, number, DiagnosisRounds::UntilCertain, reply_to);
    assert!(matches!(exchange.pop(), Some(Request::Inquire { .. })) && fixture.answers.pop().is_none());
}

#[test]
fn of_a_message_between_gpus_the_side_that_is_missing_is_named() {
    let mut fixture = Fixture::new(Execution::Ranks, 3);
    let comm = fixture.comm();
    let page = comm.device_initiated.as_ref().expect("on GPUs").page();
    let launched = |groups, sent: [u64; 3], received: [u64; 3]| {
        let wide = |counts: [u64; 3]| std::array::from_fn(|peer| counts.get(peer).copied().unwrap_or(0));
        P2pLaunched { groups, sent: wide(sent), received: wide(received) }
    };
    page.launch_p2p(0, &launched(3, [0, 0, 0], [0, 3, 0]));
    page.launch_p2p(1, &launched(2, [2, 0, 0], [0, 0, 0]));
    fixture.tell(&[(0, 2), (0, 2), (0, 0)]);
    let report = fixture.why_stuck(|_| ());
    let named: Vec<_> = report.culprits.iter().map(|culprit| (culprit.rank, culprit.seq, culprit.peer)).collect();
    assert_eq!((report.class, named), (StuckClass::Rank, vec![(Some(1), Some(2), Some(0))]), "{report:?}");
}

#[test]
fn what_gpus_are_handed_is_counted_and_not_timed() {
    let mut fixture = Fixture::new(Execution::Ranks, 2);
    let (comm, sessions) = {
        let (comm, live) = fixture.engine.state.comms.iter().next().expect("a communicator");
        (comm, live.members.iter().map(|member| Arc::clone(&member.session)).collect::<Vec<_>>())
    };
    fixture.registry.recorders.begin();
    for (rank, session) in (0..).zip(sessions) {
        let action =
            Action::Collective { kind: CollectiveKind::AllReduce, redop: RedOp::Sum, scalar: Scalar::Bits(0), root: 0 };
        let stream = Handle { index: 0, generation: 1 };
        let operation = Operation {
            session,
            stream,
            ticket: 1,
            called_at: Instant::now(),
            comm,
            tenant_comm: Handle::NONE,
            rank,
            action,
            track: 0,
            dtype: DataType::F32,
            count: 1 << 20,
            buffers: Buffers::NONE,
            group_continues: false,
            overlaps: false,
            one_hop: false,
            rounds: 0,
            round: RoundState::None,
            user_tag: 4711,
        };
        assert!(fixture.proxy.send(SessionMessage::Operation(operation).into()).is_ok());
    }
    fixture.poll();
    let info = fixture.comm();
    assert_eq!(info.totals(), WorkDone { operations: 1, bytes: 4 << 20 });
    assert_eq!(info.progress(&info.ranks[1]), RankProgress { enqueued: 1, started: 1, completed: 1 });
    let timed = (info.busy_ns.load(Ordering::Relaxed), info.bus_bytes.load(Ordering::Relaxed));
    assert_eq!((timed, info.traffic.view().len()), ((0, 0), 0));
    let rings = fixture.registry.recorders.rings();
    assert_eq!(rings.iter().map(|ring| ring.next).collect::<Vec<_>>(), [0], "nothing is recorded");
}

#[test]
fn what_ranks_do_on_gpus_has_times_of_a_sample_which_stands_for_all() {
    let fixture = Fixture::new(Execution::Ranks, 2);
    let (kind, payload_bytes) = (CollectiveKind::AllGather, 64);
    *fixture.stamped.lock().expect("no test panics with it") = [5000, 3000]
        .map(|ran_ns| {
            let mut counts = SymmetricBufferCounts::default();
            counts.set_operations(1000);
            (601..=1000).for_each(|number| {
                counts.set_stamp(Stamp { number, kind, payload_bytes, began_ns: 10, ended_ns: 10 + ran_ns });
            });
            counts
        })
        .into();
    fixture.tell(&[(1000, 0); 2]);
    let info = fixture.comm();
    info.ask();
    assert_eq!(info.traffic.view().len(), 0, "the answer is looked at when somebody asks again");
    info.ask();
    let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    assert_eq!((load(&info.busy_ns), load(&info.bus_bytes)), (3_000_000, 32_000));
    assert_eq!(info.joint.each_ref().map(load), [1000, 3_000_000]);
    assert_eq!(info.ranks.iter().map(|rank| load(&rank.late_ns)).collect::<Vec<_>>(), [0, 2_000_000]);
    let [kinds] = &info.traffic.view()[..] else { panic!("one kind") };
    assert_eq!((kinds.bytes, kinds.durations.total(), kinds.durations.sum_ns), (64_000, 1000, 3_000_000));
    assert_eq!(info.recent.view().iter().map(|recent| recent.exec_us).collect::<Vec<_>>(), [3.0]);
    assert_eq!(info.totals(), WorkDone { operations: 1000, bytes: 8000 }, "counted, not estimated");
    info.ask();
    assert_eq!(load(&info.busy_ns), 3_000_000, "once");
}

#[test]
fn what_gpus_counted_last_is_known_when_a_communicator_has_ended() {
    let mut fixture = Fixture::new(Execution::Ranks, 2);
    let comm = Arc::downgrade(&fixture.comm());
    let did = |fixture: &Fixture| {
        let all = fixture.registry.totals().0;
        all.values().map(|did| (did.operations, did.pairs, did.bytes)).collect::<Vec<_>>()
    };
    let tell = |fixture: &Fixture, operations: u64| {
        let sent = WorkDone { operations: 2 * operations, bytes: 10 * operations };
        let counted = Counted { operations, groups: 1, payload_bytes: 8 * operations, sent, messages: 0 };
        *fixture.told.lock().expect("no test panics with it") = Some(Ok(vec![counted; 2]));
    };
    tell(&fixture, 3);
    fixture.comm().ask();
    // Sends are of both ranks.
    assert_eq!(did(&fixture), [(3 + 12, 12, 24 + 60)]);
    tell(&fixture, 5);
    fixture.leave(2);
    assert_eq!((fixture.registry.comms().len(), did(&fixture)), (0, vec![(5 + 20, 20, 40 + 100)]));
    let then = std::mem::take(&mut *fixture.at_last.lock().expect("no test panics with it"));
    assert_eq!((then.len(), comm.upgrade().is_some()), (1, true));
    then.into_iter().for_each(|then| then());
    assert_eq!(
        (did(&fixture), comm.upgrade().is_some()),
        (vec![(5 + 20, 20, 40 + 100)], false),
        "once, and it is let go"
    );
}

#[test]
fn one_that_has_failed_is_left_alone() {
    let mut fixture = Fixture::new(Execution::Ranks, 2);
    let comm = fixture.engine.state.comms.iter().map(|(comm, _)| comm).next().expect("a communicator");
    assert!(fixture.proxy.send(SessionMessage::Abort { comm, rank: 1, cuda_error: None, reply: None }.into()).is_ok());
    fixture.poll();
    assert_eq!(fixture.reconfigure("ll128 = false"), Err("the communicator has failed".into()));
    let group = fixture.comm();
    let page = group.device_initiated.as_ref().expect("on GPUs").page();
    assert!(!page.announce(0, 1) && page.is_aborted());
}

#[test]
fn a_gpu_that_does_not_answer_ends_what_is_under_way_there_with_its_error() {
    let mut fixture = Fixture::new(Execution::Ranks, 2);
    let error = "cuStreamSynchronize: CUDA_ERROR_ECC_UNCORRECTABLE (214)";
    *fixture.told.lock().expect("no test panics with it") = Some(Err(error.into()));
    // Nothing is under way: nobody asks.
    fixture.look_at_gpus();
    assert_eq!(fixture.failure(), None);
    let comm = fixture.comm();
    let page = comm.device_initiated.as_ref().expect("on GPUs").page();
    page.launch(1, 1);
    fixture.look_at_gpus();
    assert!(fixture.failure().is_some_and(|failure| failure.contains(error)), "{:?}", fixture.failure());
    assert!(page.is_aborted());
}

#[test]
fn gpus_are_looked_at_within_seconds_also_where_operations_may_wait_for_ever() {
    let mut fixture = Fixture::new(Execution::Ranks, 2);
    let comm = fixture.comm();
    let page = comm.device_initiated.as_ref().expect("on GPUs").page();
    assert_eq!(fixture.engine.gpu_watch.timeout(), None);
    let direct = comm.device_initiated.as_ref().expect("on GPUs");
    page.launch(0, 1);
    fixture.tell(&[(0, 0); 2]);
    fixture.look_at_gpus();
    fixture.tell(&[(1, 0), (0, 0)]);
    fixture.look_at_gpus();
    assert_eq!((direct.ended(0), fixture.failure()), (1, None), "it waits for the other, and may");
    // Operations in graphs are counted by nobody.
    fixture.tell(&[(9, 0), (0, 0)]);
    fixture.look_at_gpus();
    assert_eq!(direct.ended(0), 1, "nothing is under way");
    page.begin_graph(1);
    fixture.look_at_gpus();
    assert_eq!(direct.ended(0), 9);
}

/// Replays are counted by GPUs alone, and go on when all numbers have been used: then packets of 2^32 operations ago are taken for new ones.
#[test]
fn a_communicator_ends_before_its_numbers_do() {
    let counts: [fn(u64) -> Counted; 3] = [
        |operations| Counted { operations, ..Counted::default() },
        |groups| Counted { groups, ..Counted::default() },
        |messages| Counted { messages, ..Counted::default() },
    ];
    for (counted, what) in counts.into_iter().zip(["operations", "groups of sends", "messages to another rank"]) {
        let mut fixture = Fixture::new(Execution::Ranks, 2);
        let says = |fixture: &Fixture, count| {
            *fixture.told.lock().expect("no test panics with it") = Some(Ok(vec![Counted::default(), counted(count)]));
        };
        // Nothing was called, and no graph is known of: they are asked all the same, now and then.
        says(&fixture, NUMBERS_MAX);
        fixture.look_until_all_are_asked();
        assert_eq!(fixture.failure(), None);
        says(&fixture, NUMBERS_MAX + 1);
        fixture.look_until_all_are_asked();
        let failure = fixture.failure().expect("it has ended");
        assert!(failure.starts_with(&format!("rank 1 has done {} {what}", NUMBERS_MAX + 1)), "{failure}");
        assert!(fixture.comm().device_initiated.as_ref().expect("on GPUs").page().is_aborted());
    }
    // While there is a graph at the next look.
    let mut fixture = Fixture::new(Execution::Ranks, 2);
    let comm = fixture.comm();
    assert!(comm.device_initiated.as_ref().expect("on GPUs").page().begin_graph(1));
    fixture.tell(&[(NUMBERS_MAX + 1, 0); 2]);
    fixture.look_at_gpus();
    assert!(fixture.failure().is_some());
}

#[test]
fn a_gpu_that_is_lost_ends_the_communicators_on_it_and_no_others() {
    let mut fixture = Fixture::new(Execution::Ranks, 2);
    let lost = |gpu| {
        ProxyMessage::Device(DeviceEvent::GpuLost {
            gpu,
            reason: "GPU 1 is lost: CUDA_ERROR_LAUNCH_FAILED (719)".into(),
        })
    };
    assert!(fixture.proxy.send(lost(2)).is_ok());
    fixture.poll();
    assert_eq!(fixture.failure(), None);
    assert!(fixture.proxy.send(lost(1)).is_ok());
    fixture.poll();
    assert_eq!(fixture.failure().as_deref(), Some("GPU 1 is lost: CUDA_ERROR_LAUNCH_FAILED (719)"));
}

#[test]
fn what_the_driver_said_to_a_rank_the_others_hear() {
    let mut fixture = Fixture::new(Execution::Ranks, 2);
    let comm = fixture.engine.state.comms.iter().map(|(comm, _)| comm).next().expect("a communicator");
    assert!(
        fixture.proxy.send(SessionMessage::Abort { comm, rank: 1, cuda_error: Some(700), reply: None }.into()).is_ok()
    );
    fixture.poll();
    assert_eq!(fixture.failure().as_deref(), Some("rank 1: CUDA_ERROR_ILLEGAL_ADDRESS (700)"));
}

#[test]
fn two_ranks_of_a_process_on_one_gpu_are_refused() {
    let mut fixture = Fixture::new(Execution::Ranks, 2);
    for told in fixture.join_on(&[1, 0, 1], 8) {
        let ProxyReply::JoinFailed { class, message, .. } = told else { panic!("it joined") };
        assert_eq!(class, ErrorClass::InvalidUsage);
        let process = fixture::OTHERS_PID;
        assert!(message.contains(&format!("ranks 0 and 2 of process {process} are on one GPU")), "{message}");
    }
    assert!(fixture.join_on(&[1, 0], 8).iter().all(|told| matches!(told, ProxyReply::Joined { .. })));
}

#[test]
fn ranks_of_several_processes_share_a_gpu_unless_the_operator_refuses() {
    let mut fixture = Fixture::new(Execution::Ranks, 2);
    fixture.stranger = Some(0);
    assert!(fixture.join_on(&[1, 1], 8).iter().all(|told| matches!(told, ProxyReply::Joined { .. })));
    fixture.engine.joining.refuse_duplicate_gpus(true);
    for told in fixture.join_on(&[1, 0, 1], 9) {
        let ProxyReply::JoinFailed { class, message, .. } = told else { panic!("it joined") };
        assert_eq!(class, ErrorClass::InvalidUsage);
        assert!(message.starts_with("Duplicate GPU detected : "), "{message}");
    }
    assert!(fixture.join_on(&[1, 0], 10).iter().all(|told| matches!(told, ProxyReply::Joined { .. })));
}

/// As while it dumps its core, when its socket is still open.
#[test]
fn a_process_that_has_begun_to_end_is_not_waited_for() {
    let mut child = std::process::Command::new("cat");
    let mut child = child.stdin(std::process::Stdio::piped()).spawn().expect("a process");
    let (mut fixture, pid) = (Fixture::new(Execution::Ranks, 2), child.id() as i32);
    fixture.leave(2);
    fixture.with_process = Some((1, pid));
    assert!(fixture.join(2, 9).iter().all(|told| matches!(told, ProxyReply::Joined { .. })));
    let comm = fixture.comm();
    comm.device_initiated.as_ref().expect("on GPUs").page().launch(0, 1);
    fixture.tell(&[(0, 0); 2]);
    fixture.look_at_gpus();
    assert_eq!(fixture.failure(), None, "it lives, and may take its time");
    drop(child.stdin.take());
    while !crate::process_state::is_ending(pid) {
        std::thread::yield_now();
    }
    fixture.look_at_gpus();
    let told = format!("the process of rank 1 ({pid}) is ending: it exits, or dumps its core");
    assert_eq!(fixture.failure(), Some(told));
    child.wait().expect("its end");
}

#[test]
fn memory_that_is_full_costs_the_communicator_that_needs_more() {
    let mut fixture = Fixture::new(Execution::Ranks, 2);
    let reason = "no symmetric buffer for rank 1 on GPU-1: cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2)";
    *fixture.refuses.lock().expect("no test panics with it") = Some(reason.into());
    for told in fixture.join(2, 8) {
        let ProxyReply::JoinFailed { class, message, .. } = told else { panic!("it joined") };
        assert_eq!((class, message.as_str()), (ErrorClass::System, reason));
    }
    assert_eq!((fixture.registry.comms().len(), fixture.failure()), (1, None), "the other is as it was");
    assert!(fixture.join(2, 9).iter().all(|told| matches!(told, ProxyReply::Joined { .. })), "there is room again");
}
