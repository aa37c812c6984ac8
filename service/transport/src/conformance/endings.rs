//! Conformance of flows that end early: closed, dead, or breaking a rule. Buffers that nobody may
//! touch after are watched.

use mccs_ipc::types::ErrorClass;

use super::Fixture;
use super::harness::{Ends, Memory, Pair, assert_filled};
use crate::{DataPath, Fault, FlowId, Request, Status, Transport, TransportError};

/// Far more than a flow of [`Pair::shallow`] buffers between its sides.
const BYTES: usize = 3_000_000;

/// How far a flow is when it ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stage {
    Connecting,
    Connected,
    ReceivePosted,
    SendPosted,
    /// So many bytes have come.
    MidMessage(u64),
    /// A message is complete, and the next ones have not been sent.
    Between,
}

const STAGES: [Stage; 8] = [
    Stage::Connecting,
    Stage::Connected,
    Stage::ReceivePosted,
    Stage::SendPosted,
    Stage::MidMessage(1),
    Stage::MidMessage(BYTES as u64 / 3),
    Stage::MidMessage(BYTES as u64 / 3 * 2),
    Stage::Between,
];

/// A flow at a stage, with what is posted there.
struct Staged {
    ends: Ends,
    source: Memory,
    target: Memory,
    sends: Vec<Request>,
    recvs: Vec<Request>,
}

/// Under bad luck a message may be complete before its progress is told: then another flow is tried.
fn bring_to<F: Fixture>(pair: &mut Pair<F>, stage: Stage) -> Staged {
    pair.shallow();
    for _ in 0..100 {
        if let Some(staged) = try_to_bring_to(pair, stage) {
            return staged;
        }
    }
    panic!("no message was seen at {stage:?}");
}

fn try_to_bring_to<F: Fixture>(pair: &mut Pair<F>, stage: Stage) -> Option<Staged> {
    let ends = pair.begin_flow(0);
    let source = pair.filled(0, BYTES, 7);
    let target = pair.memory(1, BYTES);
    let mut staged = Staged { ends, source, target, sends: Vec::new(), recvs: Vec::new() };
    if stage == Stage::Connecting {
        return Some(staged);
    }
    pair.until_connected(ends);
    if stage != Stage::Connected && stage != Stage::SendPosted {
        staged.recvs.push(pair.recv(ends, staged.target.whole()));
    }
    if matches!(stage, Stage::SendPosted | Stage::MidMessage(_) | Stage::Between) {
        staged.sends.push(pair.send(ends, staged.source.whole()));
    }
    match stage {
        Stage::MidMessage(least) => {
            let recv = staged.recvs[0];
            let mut missed = false;
            pair.until("mid message", |pair| match pair.host(1).test(recv).expect("lives") {
                Status::Running { bytes } => bytes >= least,
                Status::Done { .. } => {
                    missed = true;
                    true
                }
            });
            if missed {
                pair.host(0).close(ends.send.into());
                pair.host(1).close(ends.recv.into());
                pair.forget(0, staged.source);
                pair.forget(1, staged.target);
                return None;
            }
        }
        Stage::Between => {
            assert_eq!(pair.finish(1, staged.recvs.remove(0)), BYTES as u64);
            pair.finish(0, staged.sends.remove(0));
            assert_filled(staged.target.bytes(), 7);
            staged.target.poison();
            staged.recvs.push(pair.recv(ends, staged.target.whole()));
        }
        _ => {}
    }
    Some(staged)
}

fn assert_names_the_flow(error: &TransportError) {
    let text = error.to_string();
    assert!(text.contains("rank 5 on host-b") && text.contains("flow 0 "), "{text}");
    assert!(matches!(error.class(), ErrorClass::Remote), "{text}");
}

/// The other side's requests and flow fail, and say who and why; its memory is free.
fn assert_fails<F: Fixture>(pair: &mut Pair<F>, host: usize, flow: FlowId, requests: &[Request], memory: Memory) {
    // A flow that nobody has connected yet cannot know that its peer has gone, until it has waited long enough.
    let timeout = pair.options.connect_timeout;
    let connecting = pair.host(host).state(flow).is_ok_and(|state| state == crate::FlowState::Connecting);
    if connecting {
        pair.settle();
        pair.fixture.skip(timeout * 2);
    }
    for request in requests {
        let error = pair.end_of(host, *request).expect_err("the peer is gone");
        assert_names_the_flow(&error);
    }
    let error = pair.failure_of(host, flow);
    if !connecting {
        assert_names_the_flow(&error);
    }
    pair.forget(host, memory);
    pair.host(host).close(flow);
}

pub(crate) fn sender_closes_at_every_stage<F: Fixture>(pair: &mut Pair<F>) {
    for stage in STAGES {
        let mut staged = bring_to(pair, stage);
        pair.host(0).close(staged.ends.send.into());
        // Free at once: what is written from here on reaches nobody.
        pair.host(0).deregister(staged.source.key).unwrap_or_else(|error| panic!("{stage:?}: {error}"));
        staged.source.poison();
        for send in &staged.sends {
            assert!(matches!(pair.host(0).test(*send), Err(TransportError::NoSuch(_))));
        }
        if stage == Stage::SendPosted {
            let recv = pair.recv_or_failed(staged.ends, staged.target.whole());
            staged.recvs.extend(recv);
        }
        assert_fails(pair, 1, staged.ends.recv.into(), &staged.recvs, staged.target);
    }
}

pub(crate) fn receiver_closes_at_every_stage<F: Fixture>(pair: &mut Pair<F>) {
    for stage in STAGES {
        let mut staged = bring_to(pair, stage);
        pair.host(1).close(staged.ends.recv.into());
        pair.host(1).deregister(staged.target.key).unwrap_or_else(|error| panic!("{stage:?}: {error}"));
        staged.target.poison();
        for recv in &staged.recvs {
            assert!(matches!(pair.host(1).test(*recv), Err(TransportError::NoSuch(_))));
        }
        pair.settle();
        staged.target.assert_poisoned_from(0);
        assert_fails(pair, 0, staged.ends.send.into(), &staged.sends, staged.source);
    }
}

/// A host's process ends. Its death leaves a closed connection.
pub(crate) fn peer_dies_at_every_stage<F: Fixture>(pair: &mut Pair<F>) {
    for dies in [0, 1] {
        for stage in STAGES {
            *pair = Pair::new();
            let mut staged = bring_to(pair, stage);
            pair.kill(dies);
            if dies == 0 {
                if stage == Stage::SendPosted {
                    // The end lies behind what was sent: only who receives comes to it.
                    let recv = pair.recv_or_failed(staged.ends, staged.target.whole());
                    staged.recvs.extend(recv);
                }
                assert_fails(pair, 1, staged.ends.recv.into(), &staged.recvs, staged.target);
            } else {
                assert_fails(pair, 0, staged.ends.send.into(), &staged.sends, staged.source);
            }
        }
    }
}

/// A done send is on its way: closing the flow after does not take it back.
pub(crate) fn completed_messages_survive_the_senders_close<F: Fixture>(pair: &mut Pair<F>) {
    for bytes in [1, 3000, 100_000] {
        let ends = pair.flow(0);
        let source = pair.filled(0, 3 * bytes, 8);
        let target = pair.memory(1, 4 * bytes);
        let span = |memory: &Memory, i: usize| memory.span((i * bytes) as u64, bytes as u64);
        let recvs: Vec<_> = (0..4).map(|i| pair.recv(ends, span(&target, i))).collect();
        let sends: Vec<_> = (0..3).map(|i| pair.send(ends, span(&source, i))).collect();
        for send in sends {
            pair.finish(0, send);
        }
        pair.host(0).close(ends.send.into());
        for recv in &recvs[..3] {
            assert_eq!(pair.finish(1, *recv), bytes as u64);
        }
        assert_filled(&target.bytes()[..3 * bytes], 8);
        let error = pair.end_of(1, recvs[3]).expect_err("there is no fourth");
        assert_eq!(error.fault(), Some(Fault::Closed));
        target.assert_poisoned_from(3 * bytes);
        pair.forget(0, source);
        pair.forget(1, target);
    }
}

pub(crate) fn too_long_a_message_fails_the_flow<F: Fixture>(pair: &mut Pair<F>) {
    for (message, buffer) in [(1, 0), (101, 100), (500_000, 499_999)] {
        let ends = pair.flow(0);
        let (source, target) = (pair.filled(0, message, 1), pair.memory(1, buffer + 1000));
        let recv = pair.recv(ends, target.span(0, buffer as u64));
        let send = pair.send(ends, source.whole());
        let error = pair.end_of(1, recv).expect_err("too long");
        let (message_bytes, buffer_bytes) = (message as u64, buffer as u64);
        assert_eq!(error.fault(), Some(Fault::TooLong { message_bytes, buffer_bytes }), "{error}");
        target.assert_poisoned_from(0);
        // The sender may have handed the message over; its flow is over all the same.
        let _ = pair.end_of(0, send);
        assert_names_the_flow(&pair.failure_of(0, ends.send.into()));
        pair.forget(0, source);
        pair.forget(1, target);
    }
}

/// Flows that come and go leave nothing behind that fills up.
pub(crate) fn tables_have_room_again<F: Fixture>(pair: &mut Pair<F>) {
    let (source, target) = (pair.filled(0, 100, 2), pair.memory(1, 100));
    for round in 0..300 {
        let (listener, handle) = pair.listen(1);
        let ends = Ends { from: 0, send: pair.connect(0, &handle, 0), recv: pair.accept(1, listener, 0) };
        if round % 3 > 0 {
            let recv = pair.recv(ends, target.whole());
            pair.send(ends, source.whole());
            if round % 3 == 2 {
                pair.finish(1, recv);
            }
        }
        pair.host(1).close_listener(listener);
        pair.host(round % 2).close(if round % 2 == 0 { ends.send.into() } else { ends.recv.into() });
        pair.host(0).close(ends.send.into());
        pair.host(1).close(ends.recv.into());
    }
    pair.forget(0, source);
    pair.forget(1, target);
}

/// Flows die by themselves: requests come right or fail, in order, and nothing hangs.
pub(crate) fn flows_die_at_random_bytes<F: Fixture>(pair: &mut Pair<F>) {
    assert!(pair.fixture.is_deadly());
    let (mut whole, mut failed) = (0, 0);
    for round in 0..150 {
        let bytes = 1 + pair.random.below(400_000) as usize;
        let ends = pair.begin_flow(round % 2);
        let source = pair.filled(ends.from, 4 * bytes, round as u64);
        let target = pair.memory(ends.to(), 4 * bytes);
        let span = |memory: &Memory, i: usize| memory.span((i * bytes) as u64, bytes as u64);
        let mut requests = Vec::new();
        for i in 0..4 {
            let recv = pair.recv_or_failed(ends, span(&target, i));
            let send = pair.send_or_failed(ends, span(&source, i));
            requests.push((recv, send));
        }
        let mut lived = true;
        for (i, (recv, send)) in requests.into_iter().enumerate() {
            let received = recv.is_some_and(|recv| pair.end_of(ends.to(), recv).is_ok());
            let sent = send.is_some_and(|send| pair.end_of(ends.from, send).is_ok());
            assert!(lived || !received, "a message came behind one that failed");
            lived &= received;
            if received {
                let range = i * bytes..(i + 1) * bytes;
                assert_eq!(target.bytes()[range.clone()], source.bytes()[range]);
                whole += 1;
            }
            failed += usize::from(!sent || !received);
        }
        pair.host(ends.from).close(ends.send.into());
        pair.host(ends.to()).close(ends.recv.into());
        target.assert_poisoned_from(4 * bytes);
        pair.forget(ends.from, source);
        pair.forget(ends.to(), target);
    }
    assert!(whole > 20 && failed > 20, "{whole} came, {failed} failed: the luck is not mixed");
}
