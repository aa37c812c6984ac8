//! A state that is read is a stranger's: it may be cut, changed, or made up.

use std::collections::BTreeSet;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use mccs_config::service::AlgorithmChoice;
use mccs_ipc::command::{Command, FLAG_GROUP_CONTINUES, FLAG_ROUND, Opcode};
use mccs_ipc::protocol::{Response, ResponseEnvelope, SegmentLayout};
use mccs_ipc::shm_exchange::ShmExchangeLayout;
use mccs_ipc::types::{Handle, UniqueId};

use super::*;

const FIRST: Handle = Handle { index: 0, generation: 1 };

fn session(id: u64, rank: u32) -> SessionState {
    SessionState {
        id,
        tenant: "t".into(),
        job: String::new(),
        has_process: id == 2,
        layout: SegmentLayout {
            segment_bytes: 4096,
            commands_offset: 0,
            commands_capacity: 16,
            completions_offset: 0,
            completions_capacity: 16,
            words_offset: 0,
            words: 1,
        },
        commands_consumed: 7,
        completions_produced: 0,
        regions: TableState(vec![(3, None), (1, Some(RegionState { bytes: 4096, is_of_service: true }))]),
        freed: Vec::new(),
        streams: TableState(vec![(1, Some(StreamState { ended: 0 }))]),
        ranks: TableState(vec![(1, Some(RankState { comm: 3, rank, rounds: 9 }))]),
        pending: Vec::new(),
        joining: Vec::new(),
        parked: Vec::new(),
        answers: (1..id).map(|id| unsent(id, 2)).collect(),
        sent_descriptors: 3,
        counters: SessionCountersState::default(),
    }
}

fn unsent(id: u64, descriptors: u32) -> UnsentAnswer {
    let envelope = ResponseEnvelope { id, response: Response::Done };
    UnsentAnswer { envelope, descriptors, is_charged: true, waited_ms: 7 }
}

fn ended(id: u64, tenant: &str) -> EndedSession {
    EndedSession { id, tenant: tenant.into(), reason: "has a hat".into(), memory: 2 }
}

fn member(session: u64) -> MemberState {
    MemberState { session: Some(session), comm: FIRST, completed: 0, user_tag: 0, late_ns: 0 }
}

/// Two sessions with a rank each, one that ends, and a connection.
fn state() -> State {
    let comm = CommState {
        number: 3,
        id: UniqueId([1; 16]),
        name: String::new(),
        job: String::new(),
        members: vec![member(1), member(2)],
        started: 5,
        epoch: 0,
        algorithm: AlgorithmChoice::Auto,
        rings: vec![vec![0, 1]],
        shm_exchange: Some(ShmExchangeState { layout: ShmExchangeLayout { nranks: 2, slot_bytes: 1024 } }),
        failure: None,
        counters: CommCounters::default(),
    };
    State {
        last_number: 3,
        draining: None,
        counters: ServiceCounters {
            tenants: vec![TenantCounters {
                tenant: "t".into(),
                operations: 1,
                pairs: 2,
                bytes: 3,
                failed: 4,
                kinds: vec![KindCounters { collective: "AllReduce".into(), bytes: 5, buckets: vec![6, 7], sum_ns: 8 }],
            }],
            refused: [1, 2, 3, 4],
            lines_suppressed: 5,
        },
        leaving: vec![("t".into(), 4096)],
        sessions: vec![session(1, 0), session(2, 1)],
        ended: vec![ended(3, "t")],
        connections: vec!["t".into()],
        comms: vec![comm],
    }
}

/// Descriptors of the first session, of the second with its process and its answer, of the one that ends, of the connection, of
/// the exchange.
const DESCRIPTORS: usize = 4 + (4 + 1 + 2) + 3 + 1 + 1;

fn read(state: &State) -> Result<State, StateError> {
    State::decode(&state.encode().expect("encodes"), state.descriptors())
}

#[test]
fn what_was_written_is_read() {
    assert_eq!(state().descriptors(), DESCRIPTORS);
    assert_eq!(read(&state()), Ok(state()));
    assert_eq!(read(&State::default()), Ok(State::default()));
}

#[test]
fn a_state_that_contradicts_itself_is_refused() {
    type Change = fn(&mut State);
    let changes: [(Change, &str); 18] = [
        (|state| state.sessions[1].id = 1, "session 1 is there twice"),
        (|state| state.last_number = u64::MAX, "more sessions and communicators"),
        (|state| state.comms[0].started = u64::MAX, "communicator 3 has counted further"),
        (|state| state.sessions[0].commands_consumed = u64::MAX, "session 1 has counted further"),
        (|state| state.sessions[1].streams.0[0].1 = Some(StreamState { ended: u64::MAX }), "session 2 has counted"),
        (|state| state.last_number = 1, "is there twice, or is none"),
        (|state| state.ended[0].id = 2, "session 2 ends and goes on"),
        (|state| state.ended[0].id = 4, "session 4 ends and goes on, or is none"),
        (|state| state.comms.push(state.comms[0].clone()), "communicator 3 is there twice"),
        (|state| state.comms.clear(), "session 1 is not rank 0"),
        (|state| state.comms[0].members.clear(), "has 0 ranks"),
        (|state| state.comms[0].members[1].session = Some(9), "session 9 does not know"),
        (|state| state.comms[0].members[1].comm.generation = 2, "session 2 does not know"),
        (|state| state.comms[0].members.swap(0, 1), "does not know"),
        (|state| state.comms[0].members.iter_mut().for_each(|member| member.session = None), "nobody is left"),
        (|state| state.sessions[0].ranks.0.push((1, Some(RankState { comm: 3, rank: 0, rounds: 0 }))), "is not rank 0"),
        (|state| state.sessions[1].ranks.0[0].1 = Some(RankState { comm: 3, rank: 7, rounds: 0 }), "does not know"),
        (
            |state| {
                state.comms[0].shm_exchange =
                    Some(ShmExchangeState { layout: ShmExchangeLayout { nranks: 16, slot_bytes: 1 } });
            },
            "another's shared-memory exchange",
        ),
    ];
    for (change, reason) in changes {
        let mut state = state();
        change(&mut state);
        let refused = read(&state).expect_err(reason).to_string();
        assert!(refused.contains(reason), "{refused}, not {reason}");
    }
    let bytes = state().encode().expect("encodes");
    for count in [0, DESCRIPTORS - 1, DESCRIPTORS + 1] {
        assert!(State::decode(&bytes, count).is_err(), "{count} descriptors");
    }
}

/// Every beginning, and every byte changed: an error, or another state that fits itself.
#[test]
fn any_bytes_are_read_without_harm() {
    let bytes = state().encode().expect("encodes");
    for length in 0..bytes.len() {
        assert!(State::decode(&bytes[..length], DESCRIPTORS).is_err(), "the first {length}");
    }
    for at in 0..bytes.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut changed = bytes.clone();
            changed[at] = value;
            if let Ok(state) = State::decode(&changed, DESCRIPTORS) {
                assert_eq!(read(&state), Ok(state));
            }
        }
    }
}

fn descriptor() -> OwnedFd {
    std::fs::File::open("/dev/null").expect("a device").into()
}

#[test]
fn descriptors_of_a_message_come_in_its_order_however_many_they_are() {
    let (own, other) = Link::pair().expect("a pair");
    let other = Link::over(other);
    let within = Duration::from_secs(600);
    for count in [0, 1, 17, 300] {
        let files: Vec<_> = (0..count).map(|_| tempfile::tempfile().expect("a file")).collect();
        let inode = |fd: &OwnedFd| nix::sys::stat::fstat(fd).expect("known").st_ino;
        let files: Vec<OwnedFd> = files.into_iter().map(OwnedFd::from).collect();
        let (sent, received) = std::thread::scope(|scope| {
            let sends = scope.spawn(|| own.send_state(b"a state", &files, count == 17, within));
            (other.receive::<ToNext>(Some(within)), sends.join().expect("a thread"))
        });
        let ((ToNext::Take { bytes, ends_sessions }, mut fds), ()) = (sent.expect("came"), received.expect("sent"))
        else {
            panic!("another message")
        };
        assert_eq!(ends_sessions, count == 17);
        assert_eq!(Link::read_state(&fds.remove(0), bytes).expect("reads"), b"a state");
        assert!(fds.iter().map(inode).eq(files.iter().map(inode)), "{count}");
    }
    assert!(Link::read_state(&descriptor(), 7).is_err(), "no memory");
    drop(own);
    assert!(matches!(other.receive::<ToNext>(None), Err(LinkError::Socket(_))), "its end is heard");
}

#[test]
fn thousands_of_sockets_are_named() {
    let (own, other) = Link::pair().expect("a pair");
    let (other, within) = (Link::over(other), Duration::from_secs(600));
    let paths: Vec<PathBuf> = (0..3000).map(|number| format!("/run/mccs/tenant-{number}.sock").into()).collect();
    let named: Vec<_> = paths.iter().map(PathBuf::as_path).collect();
    let received = std::thread::scope(|scope| {
        let file = descriptor();
        let sockets = vec![file.as_fd(); 2 * paths.len() + 1];
        let receives = scope.spawn(|| other.receive::<ToNext>(Some(within)));
        own.send_begin(&named, &sockets, [true, false], within).expect("sent");
        receives.join().expect("a thread").expect("came")
    });
    let (ToNext::Begin { bytes, has_metrics: true, has_exchange: false }, mut fds) = received else {
        panic!("another message")
    };
    assert_eq!(Link::read_paths(&fds.remove(0), bytes).expect("read"), paths);
    assert_eq!(fds.len(), 2 * paths.len() + 1);
    assert!(Link::read_paths(&descriptor(), bytes).is_err(), "no memory");
}

fn command(opcode: Opcode, flags: u32, ticket: u64, rounds: u64) -> Command {
    let mut command: Command = mccs_ipc::command::from_bytes(&[0; size_of::<Command>()]).expect("a command");
    (command.opcode, command.flags, command.ticket, command.rounds) = (opcode as u32, flags, ticket, rounds);
    (command.comm, command.stream) = (FIRST, FIRST);
    command
}

/// State of a session and its communicator after these commands when the stream's first operation has ended, and the third, whose group has
/// not.
#[test]
fn what_has_ended_is_not_handed_over_and_what_has_not_counts_its_rounds_again() {
    let handover = Handover::default();
    let mut session = session(1, 0);
    let commands = [
        command(Opcode::Collective, 0, 1, 5),
        command(Opcode::Send, FLAG_GROUP_CONTINUES, 2, 5),
        command(Opcode::Recv, FLAG_GROUP_CONTINUES, 3, 5),
        command(Opcode::Collective, FLAG_ROUND, 4, 6),
        Command { stream: Handle { index: 0, generation: 9 }, ..command(Opcode::Collective, 0, 5, 6) },
    ];
    session.pending = commands.iter().map(PendingCommand::from).collect();
    let ended = [EndedOperation { session: 1, stream: 0, ticket: 3 }];
    let part = SessionPart::Session(Box::new(WithDescriptors { state: session, descriptors: Vec::new() }));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // An attempt that never was.
            handover.object(7, "nothing".into());
            while handover.moment().phase == Phase::Running {
                std::thread::yield_now();
            }
            handover.note_quiet(1, 1);
            handover.hand_in_comms(1, Vec::new(), ended);
            handover.hand_in_session(1, 1, part);
        });
        handover.register_proxy(mccs_runtime::WakerSlot::default());
        let parts =
            handover.stand_still(&|| vec![1], &|| {}, Duration::from_secs(600), false).expect("all stand still");
        let WithDescriptors { state, .. } = parts.into_state(&|_, _| 1);
        let session = &state.sessions[0];
        let pending: Vec<_> = session.pending.iter().filter_map(PendingCommand::command).collect();
        let nop = Command { opcode: Opcode::Nop as u32, flags: FLAG_GROUP_CONTINUES, ..commands[2] };
        assert_eq!(pending, [commands[1], nop, commands[3]]);
        assert_eq!(session.streams.get(FIRST), Some(&StreamState { ended: 1 }));
        assert_eq!(session.ranks.get(FIRST).map(|rank| rank.rounds), Some(5), "before the first that is done again");
    });
    assert_eq!(handover.moment(), Moment { phase: Phase::Closing, attempt: 1 });
    handover.go_on(&|| {});
    assert!(handover.is_running());
}

#[test]
fn a_service_that_does_not_come_to_rest_is_named_and_goes_on() {
    let handover = Handover::default();
    let within = Duration::from_millis(20);
    let late = handover.stand_still(&|| vec![4], &|| {}, within, true).expect_err("session 4 is loud");
    assert_eq!(late, NotStill::Late { what: "session 4".into(), within });
    handover.go_on(&|| {});
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while handover.moment().attempt < 2 {
                std::thread::yield_now();
            }
            handover.object(2, "session 4: it has a hat".into());
        });
        let refused = handover.stand_still(&|| vec![4], &|| {}, Duration::from_secs(600), true).expect_err("a hat");
        assert_eq!(refused, NotStill::Obstacle("session 4: it has a hat".into()));
    });
}

#[test]
fn ranks_whose_session_has_ended_at_the_last_moment_fail_their_communicator() {
    let handover = Handover::default();
    let comms = state().comms.into_iter().map(|comm| (comm, Some(descriptor()))).collect::<Vec<_>>();
    let part = SessionPart::Session(Box::new(WithDescriptors { state: session(2, 1), descriptors: Vec::new() }));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while handover.moment().phase == Phase::Running {
                std::thread::yield_now();
            }
            handover.note_quiet(1, 2);
            handover.hand_in_comms(1, comms, BTreeSet::new());
            handover.hand_in_session(1, 2, part);
        });
        handover.register_proxy(mccs_runtime::WakerSlot::default());
        let parts =
            handover.stand_still(&|| vec![2], &|| {}, Duration::from_secs(600), false).expect("all stand still");
        let WithDescriptors { state, .. } = parts.into_state(&|_, _| 0);
        let comm = &state.comms[0];
        assert_eq!(comm.members[0].session, None);
        let failure = comm.failure.as_ref().expect("a failure");
        assert!(failure.message.contains("rank 0 has gone") && !failure.is_told, "{failure:?}");
    });
}

#[test]
fn sessions_that_cannot_be_handed_over_are_named_by_tenant_and_end_if_the_operator_wants_it() {
    let handover = Handover::default();
    let (live, within) = (|| vec![1, 2], Duration::from_secs(600));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while handover.moment().phase == Phase::Running {
                std::thread::yield_now();
            }
            assert!(handover.is_running(), "nobody stands still to be asked");
            handover.note_asked(1, 1, Some(ended(1, "b")));
            handover.note_asked(1, 2, None);
        });
        let obstacles = handover.ask(&live, &|| {}, within).expect("all answer");
        assert_eq!(obstacles, Obstacles(vec![ended(1, "b")]));
    });
    assert!(matches!(handover.ask(&live, &|| {}, Duration::from_millis(1)), Err(NotStill::Late { .. })));
    for ends_sessions in [false, true] {
        let attempt = handover.moment().attempt + 1;
        let part = SessionPart::Ends(WithDescriptors {
            state: ended(1, "b"),
            descriptors: [(); 3].map(|()| descriptor()).into(),
        });
        let other = SessionPart::Session(Box::new(WithDescriptors { state: session(2, 1), descriptors: Vec::new() }));
        let still = std::thread::scope(|scope| {
            scope.spawn(|| {
                while handover.moment().attempt < attempt {
                    std::thread::yield_now();
                }
                [1, 2].into_iter().for_each(|session| handover.note_quiet(attempt, session));
                handover.hand_in_comms(attempt, vec![(state().comms.remove(0), None)], BTreeSet::new());
                handover.hand_in_session(attempt, 1, part);
                handover.hand_in_session(attempt, 2, other);
            });
            if !ends_sessions {
                handover.register_proxy(mccs_runtime::WakerSlot::default());
            }
            handover.stand_still(&live, &|| {}, within, ends_sessions)
        });
        match still {
            Err(error) => assert!(!ends_sessions && error == NotStill::Sessions(Obstacles(vec![ended(1, "b")]))),
            Ok(parts) => {
                assert!(ends_sessions);
                let WithDescriptors { state, descriptors } = parts.into_state(&|_, _| 0);
                assert_eq!((state.ended, descriptors.len()), (vec![ended(1, "b")], 3));
                assert_eq!(state.comms[0].members[0].session, None, "its rank has gone");
            }
        }
        handover.go_on(&|| {});
    }
    let many = [1, 2, 3, 4, 5, 6].map(|id| ended(id, "b")).into_iter().chain([ended(7, "a")]);
    let text = Obstacles(many.collect()).to_string();
    assert!(text.starts_with("tenant a: session 7 has a hat; tenant b: session 1 has a hat, session 2"), "{text}");
    assert!(text.ends_with("and 2 more"), "{text}");
}
