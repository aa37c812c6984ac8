//! Posts to shared-memory exchanges that are none.

use mccs_ipc::command::{Command, FLAG_POSTED, FLAG_ROUND, Opcode};
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::shm_exchange::CollectiveSignature;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};

use crate::raw::Raw;
use crate::victim::{attack, session_ends};

/// A rank without the shim, whose peer, with it, makes one call of four floats; what the peer gets. `post` says what to
/// post and to send.
fn peer_of(hostile: impl FnOnce(&mut Raw, &CollectiveSignature) + Send) -> Result<f32, mccs::Error> {
    let mut result = Ok(0.0);
    attack(|service| {
        let id = mccs::unique_id().expect("an id");
        std::thread::scope(|scope| {
            let raw = scope.spawn(move || {
                let mut raw = Raw::join(service, id, 1, 2);
                hostile(
                    &mut raw,
                    &CollectiveSignature::new(CollectiveKind::AllReduce, DataType::F32, RedOp::Sum, 0, 4),
                );
                raw
            });
            let client = service.connect(0);
            let comm = client.communicator(id, 0, 2).join().expect("a communicator");
            let stream = client.create_stream().expect("a stream");
            let memory = client.allocate(16).expect("memory");
            // SAFETY: nothing is in flight.
            unsafe { memory.as_mut_slice() }.copy_from_slice(&1f32.to_le_bytes().repeat(4));
            let place = memory.at(0);
            comm.all_reduce(place, place, 4, DataType::F32, RedOp::Sum, &stream).expect("enqueued");
            result = stream.synchronize().map(|()| {
                // SAFETY: all work has ended.
                f32::from_le_bytes(unsafe { memory.as_slice() }[..4].try_into().expect("four bytes"))
            });
            drop(raw.join().expect("the hostile rank"));
        });
    });
    result
}

/// A post, with bytes that the slot has room for. The service is told if it wants to know, as the shim would.
fn post(raw: &mut Raw, round: u64, call: &CollectiveSignature) {
    let data = [2f32; 4];
    let shm_exchange = raw.shm_exchange.as_ref().expect("a shared-memory exchange");
    // SAFETY: 16 bytes are readable.
    if unsafe { shm_exchange.post(1, round, call, 0, data.as_ptr().cast(), 16) } {
        raw.push(&Command { opcode: Opcode::Posted as u32, ..raw.command() });
    }
}

#[test]
fn a_shm_exchange_is_believed_only_as_far_as_its_communicator_goes() {
    // An honest post, for a start.
    assert_eq!(peer_of(|raw, call| post(raw, 1, call)).expect("completed"), 3.0);
    // Posted by command: the service plays the rank's part.
    let by_command = |raw: &mut Raw, flags, rounds| {
        let command = Command { flags, rounds, ..raw.command() };
        raw.push(&command);
    };
    peer_of(|raw, _| by_command(raw, FLAG_ROUND, 1)).expect("completed");
    // Another call than the peer's, on the shared-memory exchange only, and both ways at once.
    let other = CollectiveSignature::new(CollectiveKind::AllReduce, DataType::F32, RedOp::Max, 0, 4);
    let error = peer_of(|raw, _| post(raw, 1, &other)).expect_err("ranks disagree").to_string();
    assert!(error.contains("operation 0") && error.contains("max") && error.contains("reduction"), "{error}");
    // Rounds that nobody else is at, and one that was never begun.
    for (flags, rounds) in [(FLAG_ROUND, 9), (FLAG_ROUND | FLAG_POSTED, u64::MAX)] {
        let error = peer_of(|raw, _| by_command(raw, flags, rounds)).expect_err("ranks disagree").to_string();
        assert!(error.contains("ranks disagree"), "{error}");
    }
    // News that are none, as many as the ring takes; then the rank leaves.
    let error = peer_of(|raw, _| {
        let news = Command { opcode: Opcode::Posted as u32, ..raw.command() };
        for _ in 0..100 {
            raw.push(&news);
        }
        let Response::Done = raw.ask(Request::DestroyComm { comm: raw.comm }, &[]) else { panic!("not left") };
    });
    assert!(error.expect_err("the peer has left").to_string().contains("rank 1"));
}

#[test]
fn rounds_that_cannot_be_end_the_session() {
    let id = || mccs::unique_id().expect("an id");
    // A communicator of one has no shared-memory exchange.
    assert!(session_ends(|c| c.flags = FLAG_ROUND).contains("round"));
    assert!(session_ends(|c| c.flags = FLAG_POSTED).contains("round"));
    let fenced = |push: fn(&mut Raw)| {
        let mut message = String::new();
        attack(|service| {
            let id = id();
            std::thread::scope(|scope| {
                let peer = scope.spawn(move || Raw::join(service, id, 0, 2));
                let mut raw = Raw::join(service, id, 1, 2);
                push(&mut raw);
                message = raw.fenced();
                drop(peer.join().expect("the peer"));
            });
        });
        message
    };
    let no_round = fenced(|raw| _ = raw.push(&Command { flags: 0, ..raw.command() }));
    assert!(no_round.contains("round"), "short enough for a round, and not called one");
    let none_before = fenced(|raw| _ = raw.push(&Command { flags: FLAG_ROUND, rounds: 0, ..raw.command() }));
    assert!(none_before.contains("0 rounds before it"));
    // After the last number there is there is no next.
    let message = fenced(|raw| {
        let command = Command { flags: FLAG_ROUND, rounds: u64::MAX, ..raw.command() };
        raw.push(&command);
        raw.push(&Command { ticket: 2, ..command });
    });
    assert!(message.contains(&u64::MAX.to_string()), "{message}");
}
