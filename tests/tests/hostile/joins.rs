//! Joins, leaves and aborts that do not fit together.

use std::sync::Arc;
use std::time::Duration;

use mccs_ipc::command::{BufferRef, Command, Opcode};
use mccs_ipc::handshake::SocketError;
use mccs_ipc::protocol::{JoinOptions, Request, RequestEnvelope, Response, Role};
use mccs_ipc::types::{ErrorClass, UniqueId};
use mccs_tenants::Resource;
use mccs_tests::TestService;

use crate::raw::{Raw, receive};
use crate::victim::{SETTINGS, attack};

#[test]
fn a_name_that_is_too_long_or_has_lines_is_refused() {
    let service = TestService::start("");
    let raw = Raw::connect(&service);
    let wrong = ["x".repeat(65), "two\nlines".into()];
    let names = wrong.iter().map(|name| (name.clone(), String::new()));
    let jobs = wrong.iter().map(|job| (String::new(), job.clone()));
    for (number, (name, job)) in (7..).zip(names.chain(jobs)) {
        let id = mccs::unique_id().expect("an id");
        let (root_address, options) = (String::new(), JoinOptions { name, job, traffic_class: None });
        let request = Request::InitRank { id, rank: 0, nranks: 1, gpu: None, root_address, role: Role::Whole, options };
        raw.socket.send(&RequestEnvelope { id: number, request }, &[]).expect("sent");
        let (answer, _) = receive(&raw.socket).expect("an answer");
        let Response::Error { class, message } = answer.response else { panic!("{answer:?}") };
        assert!(class == ErrorClass::InvalidArgument && message.contains("64 bytes"), "{message}");
    }
}

/// Refusals of all that one session waits for, at one moment: none is lost.
#[test]
fn a_peer_that_goes_leaves_nobody_waiting_for_one_of_many_joins() {
    const COMMS: usize = 1500;
    let service = TestService::start("[[tenant]]\nname = \"t\"\nmax_communicators = 4000\n");
    let ids: Vec<_> = (0..COMMS).map(|_| mccs::unique_id().expect("an id")).collect();
    let raw = Raw::connect(&service);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| {
            let client = service.connect(0);
            let rank = |id: &UniqueId| client.communicator(*id, 0, 3);
            mccs::CommunicatorBuilder::join_all(&ids.iter().map(rank).collect::<Vec<_>>()).map(drop)
        });
        for (number, id) in ids.iter().enumerate() {
            let root_address = String::new();
            let request = Request::InitRank {
                id: *id,
                rank: 1,
                nranks: 3,
                gpu: None,
                root_address,
                role: Role::Whole,
                options: JoinOptions::default(),
            };
            let envelope = RequestEnvelope { id: 100 + number as u64, request };
            while let Err(error) = raw.socket.send(&envelope, &[]) {
                assert!(matches!(error, SocketError::WouldBlock), "{error}");
                std::thread::yield_now();
            }
        }
        let tenant = Arc::clone(&service.service().registry.sessions()[0].tenant);
        // Its own communicator, and all of both.
        while tenant.used(Resource::Ranks) < 1 + 2 * COMMS as u64 {
            std::thread::yield_now();
        }
        drop(raw);
        let error = waits.join().expect("the other rank").expect_err("its peer has gone").to_string();
        assert!(error.contains("rank 1"), "{error}");
    });
}

/// Joins that are never complete take memory of the service, which is their tenant's until they end.
#[test]
fn joins_that_wait_for_others_count_against_their_tenants_memory() {
    const QUOTA_BYTES: u64 = 1 << 20;
    let settings = "[[tenant]]\nname = \"t\"\nmax_memory = \"1MiB\"\nmax_communicators = 4000\n";
    let service = TestService::start(settings);
    let raw = Raw::connect(&service);
    let tenant = Arc::clone(&service.service().registry.sessions()[0].tenant);
    let held = || tenant.used(Resource::MemoryBytes);
    let before = held();
    let join = |number: u64| {
        let bytes = [number.to_le_bytes(), [9; 8]].concat();
        let (id, root_address) = (UniqueId(bytes.try_into().expect("16 bytes")), String::new());
        let (role, options) = (Role::Whole, JoinOptions::default());
        Request::InitRank { id, rank: 7, nranks: 4096, gpu: None, root_address, role, options }
    };
    for number in 0.. {
        let envelope = RequestEnvelope { id: 100 + number, request: join(number) };
        while let Err(error) = raw.socket.send(&envelope, &[]) {
            assert!(matches!(error, SocketError::WouldBlock), "{error}");
            std::thread::yield_now();
        }
        // A rank that waits for others gets no answer.
        if raw.socket.wait_readable(Duration::ZERO) {
            break;
        }
    }
    let (answer, _) = receive(&raw.socket).expect("an answer");
    let Response::Error { class, message } = answer.response else { panic!("{answer:?}") };
    assert!(class == ErrorClass::InvalidUsage && message.contains("raise [[tenant]] max_memory"), "{message}");
    assert!(held() - before > QUOTA_BYTES / 2 && held() <= QUOTA_BYTES, "{} bytes, {before} without joins", held());
    drop(raw);
    while held() > 0 {
        std::thread::yield_now();
    }
}

/// A rank that has asked to leave, and waits for a message to be taken that nobody takes, can still end that; and once it has left,
/// nothing.
#[test]
fn a_rank_that_waits_to_leave_can_end_what_it_waits_for() {
    let service = TestService::start(SETTINGS);
    let id = mccs::unique_id().expect("an id");
    let [mut raw, _other] = std::thread::scope(|scope| {
        let service = &service;
        let ranks = [0, 1].map(|rank| scope.spawn(move || Raw::join(service, id, rank, 2)));
        ranks.map(|rank| rank.join().expect("a rank"))
    });
    let message = Command { opcode: Opcode::Send as u32, root: 1, recv: BufferRef::NONE, ..raw.command() };
    assert!(raw.push(&message));
    let comm = raw.comm;
    let request = Request::DestroyComm { comm };
    raw.socket.send(&RequestEnvelope { id: 1000, request: request.clone() }, &[]).expect("sent");
    // Those that end something are served in their order: the first has been.
    assert!(matches!(raw.ask(request, &[]), Response::Error { .. }));
    let abort = || Request::AbortComm { comm, cuda_error: None };
    raw.socket.send(&RequestEnvelope { id: 1001, request: abort() }, &[]).expect("sent");
    let mut answers = [0; 2].map(|_| {
        let (answer, _) = receive(&raw.socket).expect("an answer");
        assert!(matches!(answer.response, Response::Done), "{answer:?}");
        answer.id
    });
    answers.sort_unstable();
    assert_eq!(answers, [1000, 1001]);
    assert!(matches!(raw.ask(abort(), &[]), Response::Error { .. }));
    assert!(raw.failed().contains("rank 0 aborted"));
}

/// Every request gets one answer.
#[test]
fn aborts_of_one_communicator_are_all_answered() {
    const ABORTS: u64 = 3000;
    attack(|service| {
        let raw = Raw::connect(service);
        let request = Request::AbortComm { comm: raw.comm, cuda_error: None };
        let mut answered = Vec::new();
        for id in 10_000..10_000 + ABORTS {
            while raw.socket.send(&RequestEnvelope { id, request: request.clone() }, &[]).is_err() {
                answered.push(receive(&raw.socket).expect("an answer").0.id);
            }
        }
        while answered.len() < ABORTS as usize {
            answered.push(receive(&raw.socket).expect("an answer").0.id);
        }
        answered.sort_unstable();
        assert!(answered.into_iter().eq(10_000..10_000 + ABORTS));
    });
}
