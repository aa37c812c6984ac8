//! Views and changes of the operator, while work runs; quotas; sockets that are taken.

use std::sync::atomic::{AtomicBool, Ordering};

use mccs::Client;
use mccs_config::ServiceConfig;
use mccs_config::change::StrategyChange;
use mccs_control::{ControlAnswer, ControlRequest, call};
use mccs_eval::workload::Call;
use mccs_ipc::types::{CollectiveKind, DataType, ErrorClass, RedOp};
use mccs_runtime::EngineId;
use mccs_service::service::{Service, Settings};
use mccs_tests::{TestService, run_checked};

fn ask(service: &TestService, request: &ControlRequest) -> ControlAnswer {
    call(&service.control_socket(), request).expect("an answer")
}

fn engines(service: &TestService) -> (u32, Vec<(EngineId, String)>) {
    let ControlAnswer::Engines { runtimes, engines } = ask(service, &ControlRequest::Engines) else {
        panic!("no engines")
    };
    (runtimes.len() as u32, engines.into_iter().map(|engine| (engine.id, engine.name)).collect())
}

#[test]
fn engines_move_and_the_pool_changes_while_collectives_run() {
    let service = TestService::start(
        "[runtime]\ntransport_engines = 2\n[host_device]\ninline_bytes = \"4KiB\"\npiece_bytes = \"4KiB\"\n",
    );
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let tenant = scope.spawn(|| {
            service.ranks(0, 2, |rank| {
                for seed in 0..150 {
                    let count = if seed % 3 == 0 { 10 } else { 50_000 };
                    let (kind, dtype, redop) = (CollectiveKind::AllReduce, DataType::F32, RedOp::Sum);
                    let call = Call { kind, dtype, redop, root: 0, count, nranks: 2, seed };
                    assert_eq!(run_checked(&rank, &call, seed % 2 == 0), 0);
                }
            });
            done.store(true, Ordering::Release);
        });
        let mut changes = 0u32;
        while !done.load(Ordering::Acquire) && !tenant.is_finished() {
            let count = 1 + (changes % 4) as usize;
            assert_eq!(ask(&service, &ControlRequest::ScaleTransports { count }), ControlAnswer::Done);
            let (runtimes, engines) = engines(&service);
            for (engine, name) in engines {
                changes += 1;
                // An engine may have ended since it was listed; everything else must move.
                let answer = ask(&service, &ControlRequest::MoveEngine { engine, runtime: changes % runtimes });
                let may_have_ended = name.contains("session") || name.contains("transport");
                assert!(answer == ControlAnswer::Done || may_have_ended, "{name}: {answer:?}");
            }
        }
        assert!(changes > 0);
    });
}

#[test]
fn the_strategy_of_one_host_changes_with_the_next_collective() {
    // No rounds: all collectives are the service's.
    let service = TestService::start("[host_device]\nshm_exchange_limit = \"0\"\n");
    let reconfigure = |change: &str| {
        let communicator = service.service().registry.comms()[0].number;
        let change = StrategyChange::parse(change, "a change").expect("well-formed");
        ask(&service, &ControlRequest::Reconfigure { communicator, change, window: None })
    };
    let barrier = std::sync::Barrier::new(3);
    service.ranks(0, 3, |rank| {
        for (epoch, algorithm) in (1..).zip(["ring", "tree", "single_pass", "auto"]) {
            if rank.comm.rank() == 0 {
                let answer = reconfigure(&format!("algorithm = {algorithm:?}\nrings = [[2, 0, 1], [0, 1, 2]]"));
                let cut = (epoch - 1) * 7;
                assert_eq!(answer, ControlAnswer::Reconfigured { epoch, cut });
                assert!(matches!(reconfigure("rings = [[0, 1, 3]]"), ControlAnswer::Refused(text) if text.contains("rank 3")));
                assert!(matches!(reconfigure("[[path]]\ndscp = 3"), ControlAnswer::Refused(text) if text.contains("no flows")));
                assert!(matches!(reconfigure("ll128 = true"), ControlAnswer::Refused(text) if text.contains("GPUs")));
            }
            barrier.wait();
            for (seed, kind) in (0..7).zip(CollectiveKind::ALL) {
                let redop = RedOp::Sum;
                let call = Call { kind: *kind, dtype: DataType::I32, redop, root: 1, count: 5000, nranks: 3, seed };
                let root = if kind.has_root() { 1 } else { 0 };
                let count = if *kind == CollectiveKind::Barrier { 0 } else { 5000 };
                assert_eq!(run_checked(&rank, &Call { root, count, ..call }, false), 0, "{algorithm} {kind:?}");
            }
            barrier.wait();
        }
    });
}

#[test]
fn what_the_operator_sees_is_what_happened() {
    let busbw_gbps = what_the_operator_sees("[host_device]\nshm_exchange_limit = \"0\"", 6);
    assert!(busbw_gbps > 0.0, "{busbw_gbps}");
}

/// The same where the ranks do all this among themselves, but for the time it takes. A rank that has its result does not
/// know whether another has fetched its own.
#[test]
fn what_the_operator_sees_of_rounds() {
    what_the_operator_sees("", 5);
}

/// At least so many of six operations have completed on all ranks when one is through. Returns the bus bandwidth shown.
fn what_the_operator_sees(settings: &str, completed: u64) -> f64 {
    let service = TestService::start(settings);
    let shown = service.ranks(0, 3, |rank| {
        let (kind, dtype, redop) = (CollectiveKind::AllReduce, DataType::F32, RedOp::Sum);
        for seed in 0..5 {
            let call = Call { kind, dtype, redop, root: 0, count: 1000, nranks: 3, seed };
            assert_eq!(run_checked(&rank, &call, false), 0);
        }
        rank.comm.barrier(&rank.stream).expect("enqueued");
        rank.stream.synchronize().expect("completed");
        let ControlAnswer::Communicators(comms) = ask(&service, &ControlRequest::Communicators) else { panic!() };
        assert_eq!((comms.len(), comms[0].bytes, comms[0].failed), (1, 5 * 4000, 0));
        assert!((completed..=6).contains(&comms[0].operations), "{comms:?}");
        // Others may be on their way to the last barrier.
        let ranks = &comms[0].ranks;
        assert!(ranks.iter().all(|r| (6..=7).contains(&r.enqueued) && r.started == 6), "{comms:?}");
        assert!(ranks.iter().all(|r| (completed..=6).contains(&r.completed)), "{comms:?}");
        let ControlAnswer::Sessions(sessions) = ask(&service, &ControlRequest::Sessions) else { panic!() };
        assert!(
            sessions.iter().all(|s| (6..=7).contains(&s.operations) && s.pid == std::process::id() as i32),
            "{sessions:?}"
        );
        // Nobody leaves before all have looked.
        rank.comm.barrier(&rank.stream).expect("enqueued");
        rank.stream.synchronize().expect("completed");
        comms[0].busbw_gbps
    });
    shown[0]
}

#[test]
fn what_the_operator_mistypes_is_refused_with_the_reason() {
    let service = TestService::start("");
    let refused = |request| match ask(&service, &request) {
        ControlAnswer::Refused(reason) => reason,
        answer => panic!("{answer:?}"),
    };
    assert!(refused(ControlRequest::ScaleTransports { count: 0 }).contains("1 to 64"));
    assert!(refused(ControlRequest::ScaleTransports { count: 65 }).contains("1 to 64"));
    assert!(
        refused(ControlRequest::MoveEngine { engine: EngineId(999), runtime: 0 }).contains("no engine has number 999")
    );
    assert!(
        refused(ControlRequest::MoveEngine { engine: EngineId(0), runtime: 99 }).contains("no runtime has number 99")
    );
}

#[test]
fn a_taken_socket_is_refused_with_what_to_do() {
    let service = TestService::start("");
    let directory = service.control_socket().parent().expect("a directory").to_owned();
    let config = ServiceConfig::parse(&format!("[service]\nruntime_dir = {directory:?}\n"), "test").expect("valid");
    let error = Service::start(&Settings::from_config(&config)).err().expect("the socket is taken");
    assert!(error.to_string().contains("another service listens on"), "{error:#}");
    // The first service is unharmed.
    service.ranks(0, 2, |rank| {
        rank.comm.barrier(&rank.stream).expect("enqueued");
        rank.stream.synchronize().expect("completed");
    });
}

#[test]
fn a_user_is_the_tenant_of_a_socket_that_admits_it() {
    let own = nix::unistd::getuid().as_raw();
    let (ours, others) = (format!("uids = [{own}]\n"), format!("uids = [{}]\n", own + 1));
    let service = TestService::start(&format!(
        "[[tenant]]\nname = \"others\"\n{others}[[tenant]]\nname = \"ours\"\n{ours}[[tenant]]\nname = \"alone\"\nsocket = \"alone.sock\"\n{others}"
    ));
    assert_eq!(service.connect(0).tenant(), "ours");
    let error = Client::connect(service.socket(2)).expect_err("a refusal").to_string();
    assert!(error.contains(&format!("user {own} is no tenant of this socket")), "{error}");
}

#[test]
fn quotas_refuse_and_are_given_back() {
    let service = TestService::start(
        "[[tenant]]\nname = \"small\"\nmax_memory = \"1MiB\"\nmax_sessions = 2\nmax_communicators = 2\nmax_streams = 2\nmax_regions = 3\n",
    );
    for _ in 0..3 {
        let (client, second) = (service.connect(0), service.connect(0));
        let refused = mccs::Client::connect(service.socket(0)).expect_err("a third session");
        assert!(refused.to_string().contains("2 of 2"), "{refused}");
        let half = client.allocate(512 << 10).expect("within quota");
        let over = second.allocate(768 << 10).expect_err("over quota").to_string();
        assert!(over.contains("small") && over.contains("524288 of 1048576"), "{over}");
        drop(half);
        let regions: Vec<_> = (0..3).map(|_| client.allocate(4096).expect("a region")).collect();
        assert!(client.allocate(4096).expect_err("a fourth").to_string().contains("at most 3 regions"));
        drop(regions);
        let streams = [client.create_stream(), client.create_stream()];
        assert!(client.create_stream().expect_err("a third").to_string().contains("at most 2 streams"));
        streams.into_iter().for_each(|stream| stream.and_then(mccs::Stream::destroy).expect("a stream"));
        client.create_stream().expect("a slot is free again");
        let id = || mccs::unique_id().expect("an id");
        let join = || client.communicator(id(), 0, 1).join();
        let comms = [join().expect("one"), join().expect("two")];
        assert!(join().expect_err("a third").to_string().contains("2 of 2"));
        comms.into_iter().for_each(|comm| comm.destroy().expect("destroyed"));
        join().expect("free again");
        drop((client, second));
        while !service.service().registry.sessions().is_empty() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

#[test]
fn memory_that_the_host_does_not_have_is_refused_before_anybody_writes_to_it() {
    let quota = "[[tenant]]\nname = \"a\"\nmax_memory = \"1048576GiB\"\n";
    let service = TestService::start(quota);
    let client = service.connect(0);
    let refused = client.allocate(1 << 46).expect_err("no host has 64 TiB");
    assert_eq!(refused.class(), ErrorClass::System, "{refused}");
    assert!(refused.to_string().contains("more than this host has left"), "{refused}");
    drop(client.allocate(4096).expect("there is memory"));
    let service = TestService::start(&format!("[limits]\nmin_free_memory = \"16384GiB\"\n{quota}"));
    let refused = service.connect(0).allocate(4096).expect_err("none of it may be used").to_string();
    assert!(refused.contains("limits.min_free_memory"), "{refused}");
}

#[test]
fn who_waits_for_ranks_is_shown_until_they_come() {
    let service = TestService::start("[limits]\ninit_timeout = \"20s\"\n");
    let id = mccs::unique_id().expect("an id");
    let join = |rank| service.connect(0).communicator(id, rank, 3).join().expect("joined");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| join(1));
        let late = service.waits_for_ranks();
        assert_eq!((late.unique_id, late.joined, late.nranks), (id.to_string(), 1, 3));
        assert_eq!(late.waits_for, "rank 0, 2 of 3");
        assert!(late.since_seconds >= 2);
        let others = [0, 2].map(|rank| scope.spawn(move || join(rank)));
        let _all = [first].into_iter().chain(others).map(|rank| rank.join().expect("a rank")).collect::<Vec<_>>();
        service.wait_until_ranks_are_there();
    });
}

#[test]
fn the_job_that_a_launcher_names_is_shown_beside_sessions_and_communicators() {
    let service = TestService::start("");
    let client = service.connect(0);
    let join =
        |job: &str| client.communicator(mccs::unique_id().expect("an id"), 0, 1).job(job).join().expect("joined");
    let comms = ["4711 train", "4712 other"].map(join);
    let ControlAnswer::Communicators(shown) = ask(&service, &ControlRequest::Communicators) else { panic!("none") };
    assert_eq!(shown.iter().map(|comm| comm.job.as_str()).collect::<Vec<_>>(), ["4711 train", "4712 other"]);
    let ControlAnswer::Sessions(sessions) = ask(&service, &ControlRequest::Sessions) else { panic!("none") };
    assert_eq!(sessions[0].job, "4711 train", "a session's first communicator says it");
    drop(comms);
}
