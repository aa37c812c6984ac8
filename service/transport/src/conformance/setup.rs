//! Conformance of set-up: listening and connecting, time-outs, refused and stale handles.

use std::time::Duration;

use mccs_ipc::types::ErrorClass;

use super::Fixture;
use super::harness::{Ends, Pair, TAG};
use crate::{DataPath, Fault, FlowState, ListenOptions, ListenerHandle, Transport, TransportError};

/// The peer connects, and posts, long before the flow is accepted.
pub(crate) fn late_accepts<F: Fixture>(pair: &mut Pair<F>) {
    take_time(pair);
    let (listener, handle) = pair.listen(1);
    for number in [u64::MAX, 0, 1 << 40] {
        let send = pair.connect(0, &handle, number);
        let source = pair.filled(0, 50_000, number);
        // A transport under bad luck may have no room before it is connected.
        let early = pair.host(0).isend(send, source.whole(), TAG).expect("lives");
        pair.settle();
        assert_eq!(pair.host(0).state(send.into()), Ok(FlowState::Connecting));
        let recv = pair.accept(1, listener, number);
        let ends = Ends { from: 0, send, recv };
        let target = pair.memory(1, 50_000);
        let request = pair.recv(ends, target.whole());
        let early = early.unwrap_or_else(|| pair.send(ends, source.whole()));
        assert_eq!(pair.finish(1, request), 50_000);
        pair.finish(0, early);
        super::harness::assert_filled(target.bytes(), number);
        pair.until_connected(ends);
    }
}

/// Time-outs so long that a machine with other work does not use them up while nothing happens: time is skipped.
fn take_time<F: Fixture>(pair: &mut Pair<F>) {
    let long = Duration::from_secs(3600);
    pair.options.connect_timeout = long;
    pair.options.peer_timeout = pair.options.peer_timeout.map(|_| long);
}

fn assert_timed_out(error: &TransportError, number: u64) {
    let text = error.to_string();
    assert!(matches!(error.fault(), Some(Fault::ConnectTimeout { .. })), "{text}");
    assert_eq!(error.class(), ErrorClass::Timeout);
    assert!(text.contains("rank 5 on host-b") && text.contains(&format!("flow {number} ")), "{text}");
}

pub(crate) fn nobody_accepts<F: Fixture>(pair: &mut Pair<F>) {
    take_time(pair);
    let (listener, handle) = pair.listen(1);
    let send = pair.connect(0, &handle, 7);
    let source = pair.filled(0, 10, 0);
    let request = pair.host(0).isend(send, source.whole(), TAG).expect("lives");
    pair.settle();
    let timeout = pair.options.connect_timeout;
    pair.fixture.skip(timeout / 2);
    pair.settle();
    assert_eq!(pair.host(0).state(send.into()), Ok(FlowState::Connecting));
    pair.fixture.skip(timeout);
    let error = pair.failure_of(0, send.into());
    assert_timed_out(&error, 7);
    if let Some(request) = request {
        assert_eq!(pair.host(0).test(request), Err(error.clone()));
    }
    assert_eq!(pair.host(0).isend(send, source.whole(), TAG), Err(error));
    pair.forget(0, source);
    pair.host(0).close(send.into());
    pair.host(1).close_listener(listener);
}

pub(crate) fn nobody_connects<F: Fixture>(pair: &mut Pair<F>) {
    take_time(pair);
    let (listener, handle) = pair.listen(1);
    let recv = pair.accept(1, listener, 3);
    let target = pair.memory(1, 10);
    pair.poll();
    let _ = pair.host(1).irecv(recv, target.whole()).expect("lives");
    let timeout = pair.options.connect_timeout;
    pair.fixture.skip(timeout / 2);
    pair.settle();
    assert_eq!(pair.host(1).state(recv.into()), Ok(FlowState::Connecting));
    pair.fixture.skip(timeout * 2);
    let error = pair.failure_of(1, recv.into());
    assert_timed_out(&error, 3);
    pair.forget(1, target);
    // A sender that comes now is too late, and hears so.
    let send = pair.connect(0, &handle, 3);
    let error = pair.failure_of(0, send.into());
    assert_eq!(error.class(), ErrorClass::Remote, "{error}");
}

pub(crate) fn numbers_are_used_once<F: Fixture>(pair: &mut Pair<F>) {
    let (listener, handle) = pair.listen(1);
    let first = Ends { from: 0, send: pair.connect(0, &handle, 0), recv: pair.accept(1, listener, 0) };
    pair.until_connected(first);
    let again = pair.connect(0, &handle, 0);
    let refusal = pair.failure_of(0, again.into());
    assert!(matches!(refusal.fault(), Some(Fault::Refused(_) | Fault::Closed)), "{refusal}");
    let (spec, now) = (pair.spec(0), pair.fixture.now());
    // Under bad luck accepts are late, and so are their refusals.
    let refusal = match pair.host(1).accept(listener, &spec, now) {
        Ok(late) => {
            pair.fixture.skip(Duration::from_secs(1));
            pair.failure_of(1, late.into())
        }
        Err(refusal) => refusal,
    };
    assert!(matches!(refusal, TransportError::Option { option: "number", .. }), "{refusal}");
    // Nobody else has noticed, and numbers are of one listener.
    pair.transfer(first, 1000, 1);
    let second = Ends { from: 0, send: pair.connect(0, &handle, 1), recv: pair.accept(1, listener, 1) };
    pair.transfer(second, 1000, 2);
    let (other, handle) = pair.listen(1);
    let third = Ends { from: 0, send: pair.connect(0, &handle, 0), recv: pair.accept(1, other, 0) };
    pair.transfer(third, 1000, 3);
}

/// A connected flow stays; a waiting one fails; a later one is refused; higher numbers are as ever.
pub(crate) fn numbers_end<F: Fixture>(pair: &mut Pair<F>) {
    let (listener, handle) = pair.listen(1);
    let connected = Ends { from: 0, send: pair.connect(0, &handle, 3), recv: pair.accept(1, listener, 3) };
    pair.until_connected(connected);
    let (early, late) = (pair.connect(0, &handle, 4), pair.accept(1, listener, 5));
    let higher = Ends { from: 0, send: pair.connect(0, &handle, 9), recv: pair.accept(1, listener, 9) };
    pair.until_connected(higher);
    // So that a late accept is no longer late.
    pair.fixture.skip(Duration::from_secs(1));
    pair.settle();
    pair.host(1).end_numbers(listener, 9);
    for (host, flow) in [(0, early.into()), (1, late.into())] {
        let refusal = pair.failure_of(host, flow);
        assert!(
            matches!(refusal.fault(), Some(Fault::Refused(_) | Fault::Closed | Fault::ListenerClosed)),
            "{refusal}"
        );
    }
    for over in [3, 6] {
        let send = pair.connect(0, &handle, over);
        let refusal = pair.failure_of(0, send.into());
        assert!(matches!(refusal.fault(), Some(Fault::Refused(_) | Fault::Closed)), "{refusal}");
    }
    pair.transfer(connected, 1000, 1);
    pair.transfer(higher, 1000, 2);
    let next = Ends { from: 0, send: pair.connect(0, &handle, 10), recv: pair.accept(1, listener, 10) };
    pair.transfer(next, 1000, 3);
}

/// One a communicator: each takes its own flows, whatever the others do.
pub(crate) fn thousands_of_listeners<F: Fixture>(pair: &mut Pair<F>) {
    let listeners: Vec<_> = (0..2000).map(|_| pair.listen(1)).collect();
    for (i, (listener, handle)) in listeners.iter().enumerate().step_by(400) {
        let ends = Ends { from: 0, send: pair.connect(0, handle, 9), recv: pair.accept(1, *listener, 9) };
        pair.transfer(ends, 100, i as u64);
        pair.host(1).close_listener(listeners[i + 1].0);
    }
    let (_, closed) = &listeners[1];
    let send = pair.connect(0, closed, 9);
    let refusal = pair.failure_of(0, send.into());
    assert!(matches!(refusal.fault(), Some(Fault::Refused(_))), "{refusal}");
}

pub(crate) fn refused_handles<F: Fixture>(pair: &mut Pair<F>) {
    let (_, handle) = pair.listen(1);
    let good = handle.as_bytes();
    let (spec, now) = (pair.spec(0), pair.fixture.now());
    for bad in [&[][..], &good[..good.len() - 1], &[good, &[0]].concat(), &vec![0; good.len()]] {
        let bad = ListenerHandle::from_bytes(bad).expect("short");
        let refusal = pair.host(0).connect(&bad, &spec, now).expect_err("garbage");
        assert!(matches!(refusal, TransportError::BadHandle(_)), "{refusal}");
    }
    // The last byte is part of the secret: whoever guesses it is not let in.
    let mut guessed = good.to_vec();
    *guessed.last_mut().expect("bytes") ^= 1;
    let guessed = ListenerHandle::from_bytes(&guessed).expect("short");
    let send = pair.connect(0, &guessed, 0);
    let refusal = pair.failure_of(0, send.into());
    assert!(matches!(refusal.fault(), Some(Fault::Refused(_))), "{refusal}");
    assert_eq!(format!("{handle:?}"), format!("ListenerHandle({} bytes)", good.len()), "the secret is printed");
}

pub(crate) fn closed_listeners<F: Fixture>(pair: &mut Pair<F>) {
    let (listener, handle) = pair.listen(1);
    let connected = Ends { from: 0, send: pair.connect(0, &handle, 0), recv: pair.accept(1, listener, 0) };
    pair.until_connected(connected);
    let unanswered = pair.connect(0, &handle, 1);
    let alone = pair.accept(1, listener, 2);
    // So that a late accept is no longer late.
    pair.fixture.skip(Duration::from_secs(1));
    pair.settle();
    pair.host(1).close_listener(listener);
    let error = pair.failure_of(1, alone.into());
    assert_eq!(error.fault(), Some(Fault::ListenerClosed), "{error}");
    let error = pair.failure_of(0, unanswered.into());
    assert_eq!(error.class(), ErrorClass::Remote, "{error}");
    // Refused at once or a little later.
    let (spec, now) = (pair.spec(3), pair.fixture.now());
    let refusal = match pair.host(0).connect(&handle, &spec, now) {
        Ok(late) => pair.failure_of(0, late.into()),
        Err(refusal) => refusal,
    };
    assert!(matches!(refusal.fault(), Some(Fault::Refused(_))), "{refusal}");
    pair.transfer(connected, 1000, 1);
    pair.host(1).close_listener(listener);
}

pub(crate) fn options_are_checked<F: Fixture>(pair: &mut Pair<F>) {
    let (listener, handle) = pair.listen(1);
    let mut spec = pair.spec(0);
    spec.options.connections = 0;
    let now = pair.fixture.now();
    let refused = |error| assert!(matches!(error, TransportError::Option { option: "connections", .. }), "{error}");
    refused(pair.host(0).connect(&handle, &spec, now).expect_err("refused"));
    let nowhere = ListenOptions::new(std::net::Ipv4Addr::UNSPECIFIED.into());
    let refusal = pair.host(1).listen(&nowhere).expect_err("refused");
    assert!(matches!(refusal, TransportError::Option { option: "address", .. }), "{refusal}");
    // The listener is none the worse.
    let ends = Ends { from: 0, send: pair.connect(0, &handle, 0), recv: pair.accept(1, listener, 0) };
    pair.transfer(ends, 10, 0);
}

pub(crate) fn stale_names_find_nothing<F: Fixture>(pair: &mut Pair<F>) {
    let ends = pair.flow(0);
    let (source, target) = (pair.filled(0, 10, 0), pair.memory(1, 10));
    let recv = pair.recv(ends, target.whole());
    let send = pair.send(ends, source.whole());
    pair.finish(1, recv);
    pair.finish(0, send);
    let no_such = |result: Result<_, TransportError>| assert!(matches!(result, Err(TransportError::NoSuch(_))));
    no_such(pair.host(1).test(recv).map(drop));
    no_such(pair.host(0).test(send).map(drop));
    for (offset, bytes) in [(0, 11), (10, 1), (u64::MAX, 1), (1, u64::MAX)] {
        let outside = pair.host(0).isend(ends.send, source.span(offset, bytes), TAG).expect_err("outside");
        assert!(matches!(outside, TransportError::OutsideMemory { .. }), "{outside}");
        let outside = pair.host(1).irecv(ends.recv, target.span(offset, bytes)).expect_err("outside");
        assert!(matches!(outside, TransportError::OutsideMemory { .. }), "{outside}");
    }
    let (source_span, target_span) = (source.whole(), target.whole());
    let source_key = source.key;
    pair.forget(0, source);
    no_such(pair.host(0).isend(ends.send, source_span, TAG).map(drop));
    no_such(pair.host(0).deregister(source_key));
    pair.host(0).close(ends.send.into());
    pair.host(1).close(ends.recv.into());
    pair.host(0).close(ends.send.into());
    no_such(pair.host(0).isend(ends.send, source_span, TAG).map(drop));
    no_such(pair.host(1).irecv(ends.recv, target_span).map(drop));
    no_such(pair.host(1).state(ends.recv.into()).map(drop));
    no_such(pair.host(1).test(recv).map(drop));
    // Another flow in the same place is another flow.
    let new = pair.flow(0);
    no_such(pair.host(0).state(ends.send.into()).map(drop));
    pair.transfer(new, 10, 1);
}

pub(crate) fn memory_in_use_stays<F: Fixture>(pair: &mut Pair<F>) {
    let ends = pair.flow(0);
    let target = pair.memory(1, 10);
    let recv = pair.recv(ends, target.whole());
    assert_eq!(pair.host(1).deregister(target.key), Err(TransportError::MemoryInUse(1)));
    let source = pair.filled(0, 10, 0);
    pair.send(ends, source.whole());
    pair.finish(1, recv);
    pair.forget(1, target);
}
