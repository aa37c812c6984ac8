//! Conformance of messages on connected flows: sizes, order, back-pressure, flush.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::Fixture;
use super::harness::{Ends, Memory, Pair, TAG, assert_filled};
use crate::{DataPath, Request, Status, Transport};
use mccs_runtime::{Context, Progress};

/// Every length that is an edge somewhere, with poison around the buffer and behind a shorter message.
pub(crate) fn sizes_and_what_lies_around<F: Fixture>(pair: &mut Pair<F>) {
    let ends = pair.flow(0);
    let sizes = [0, 1, 2, 15, 16, 17, 4079, 4080, 4081, 4095, 4096, 4097, 65_535, 65_537, 262_143, 262_145, 1 << 20];
    for (seed, bytes) in sizes.into_iter().chain([3_333_333, 0]).enumerate() {
        pair.transfer(ends, bytes / pair.fixture.thrift() as usize, seed as u64);
        // A buffer longer than its message.
        let source = pair.filled(0, bytes / 7, seed as u64 + 100);
        let mut target = pair.memory(1, bytes + 1);
        target.poison();
        let send = pair.send(ends, source.whole());
        let recv = pair.recv(ends, target.whole());
        assert_eq!(pair.finish(1, recv), source.bytes().len() as u64);
        assert_filled(&target.bytes()[..source.bytes().len()], seed as u64 + 100);
        target.assert_poisoned_from(source.bytes().len());
        pair.finish(0, send);
        pair.forget(0, source);
        pair.forget(1, target);
    }
}

/// A side of a flow with as many requests as it may have, which checks that they complete in order.
struct Stream {
    host: usize,
    /// Posted and not done.
    requests: std::collections::VecDeque<Request>,
    posted: usize,
    done: usize,
}

impl Stream {
    fn new(host: usize) -> Self {
        Stream { host, requests: std::collections::VecDeque::new(), posted: 0, done: 0 }
    }

    /// Tests all requests, from a random one on: none may be done before those in front of it.
    fn test<F: Fixture>(&mut self, pair: &mut Pair<F>, mut done: impl FnMut(&mut Pair<F>, usize, u64)) {
        if self.requests.is_empty() {
            return;
        }
        let last = pair.random.below(self.requests.len() as u64) as usize;
        let statuses: Vec<Status> =
            (0..=last).rev().map(|i| pair.host(self.host).test(self.requests[i]).expect("flow lives")).collect();
        let mut unfinished = false;
        let mut lengths = Vec::new();
        for status in statuses.iter().rev() {
            match status {
                Status::Done { bytes, .. } => {
                    assert!(!unfinished, "a request is done before one that was posted earlier");
                    lengths.push(*bytes);
                }
                Status::Running { .. } => unfinished = true,
            }
        }
        for bytes in lengths {
            self.requests.pop_front();
            done(pair, self.done, bytes);
            self.done += 1;
        }
    }
}

/// Random lengths and turns, as many requests as there may be; each message has its own data and place.
fn stream_messages<F: Fixture>(pair: &mut Pair<F>, flows: &[Ends], count: usize) {
    let lengths: Vec<Vec<usize>> = flows
        .iter()
        .map(|_| (0..count).map(|_| (pair.random.below(200_000) >> pair.random.below(17)) as usize).collect())
        .collect();
    let offset = |flow: usize, message: usize| lengths[flow][..message].iter().sum::<usize>();
    let seed = |flow: usize, message: usize| (flow * 1_000_000 + message) as u64;
    let mut memories: Vec<(Memory, Memory)> = Vec::new();
    for (flow, ends) in flows.iter().enumerate() {
        let mut source = pair.memory(ends.from, offset(flow, count));
        for message in 0..count {
            let range = offset(flow, message)..offset(flow, message + 1);
            super::harness::fill(&mut source.bytes_mut()[range], seed(flow, message));
        }
        let target = pair.memory(ends.to(), offset(flow, count));
        memories.push((source, target));
    }
    let mut streams: Vec<(Stream, Stream)> =
        flows.iter().map(|ends| (Stream::new(ends.from), Stream::new(ends.to()))).collect();
    pair.until("all messages moved", |pair| {
        for (flow, ((send, recv), ends)) in streams.iter_mut().zip(flows).enumerate() {
            let (source, target) = &memories[flow];
            let span = |message: usize| (offset(flow, message) as u64, lengths[flow][message] as u64);
            for _ in 0..pair.random.below(20) {
                if send.posted < count && pair.random.below(2) == 0 {
                    let (at, bytes) = span(send.posted);
                    let request = pair.host(ends.from).isend(ends.send, source.span(at, bytes), TAG).expect("lives");
                    send.posted += usize::from(request.is_some());
                    send.requests.extend(request);
                }
                if recv.posted < count && pair.random.below(2) == 0 {
                    let (at, bytes) = span(recv.posted);
                    let request = pair.host(ends.to()).irecv(ends.recv, target.span(at, bytes)).expect("lives");
                    recv.posted += usize::from(request.is_some());
                    recv.requests.extend(request);
                }
            }
            send.test(pair, |_, message, bytes| assert_eq!(bytes, lengths[flow][message] as u64));
            recv.test(pair, |_, message, bytes| {
                assert_eq!(bytes, lengths[flow][message] as u64);
                let range = offset(flow, message)..offset(flow, message + 1);
                assert_filled(&target.bytes()[range], seed(flow, message));
            });
        }
        streams.iter().all(|(send, recv)| send.done == count && recv.done == count)
    });
    for (ends, (source, target)) in flows.iter().zip(memories) {
        target.assert_poisoned_from(target.bytes().len());
        pair.forget(ends.from, source);
        pair.forget(ends.to(), target);
    }
}

pub(crate) fn many_requests_in_order<F: Fixture>(pair: &mut Pair<F>) {
    let ends = pair.flow(0);
    let count = 1000 / pair.fixture.thrift() as usize;
    stream_messages(pair, &[ends], count);
}

pub(crate) fn both_directions_at_once<F: Fixture>(pair: &mut Pair<F>) {
    let flows = [pair.flow(0), pair.flow(1), pair.flow(0), pair.flow(1)];
    let count = 200 / pair.fixture.thrift() as usize;
    stream_messages(pair, &flows, count);
}

/// The receiver posts nothing for long: the sender gets `None`, and what it has posted comes in order later.
pub(crate) fn sender_ahead_is_held_back<F: Fixture>(pair: &mut Pair<F>) {
    pair.shallow();
    let ends = pair.flow(0);
    let room = usize::from(pair.options.requests);
    // Sockets that nobody reads keep twice what was asked for each buffer, given time: less than half of this.
    let asked = [pair.options.send_buffer_bytes, pair.options.receive_buffer_bytes].into_iter().flatten().sum::<u32>();
    let kept = 2 * usize::from(pair.options.connections) * asked as usize;
    let bytes = 300_000.max(2 * kept / room);
    let source = pair.filled(0, room * bytes, 1);
    let mut requests = Vec::new();
    let mut message = 0;
    while let Some(request) =
        pair.host(0).isend(ends.send, source.span((message * bytes) as u64, bytes as u64), TAG).expect("lives")
    {
        requests.push(request);
        message += 1;
        pair.poll();
        assert!(message <= room, "more requests than the flow has room for");
        if message == room {
            assert_eq!(pair.host(0).isend(ends.send, source.span(0, 1), TAG).expect("lives"), None);
            break;
        }
    }
    pair.settle();
    assert_eq!(message, room);
    let undone = requests.iter().any(|r| matches!(pair.host(0).test(*r), Ok(Status::Running { .. })));
    assert!(undone, "{room} messages of {bytes} bytes were buffered somewhere");
    let target = pair.memory(1, room * bytes);
    for message in 0..room {
        let recv = pair.recv(ends, target.span((message * bytes) as u64, bytes as u64));
        assert_eq!(pair.finish(1, recv), bytes as u64);
    }
    assert_filled(target.bytes(), 1);
}

/// The receiver may post ahead, as much as it has room for, and loses nothing by it.
pub(crate) fn receiver_ahead_waits<F: Fixture>(pair: &mut Pair<F>) {
    let ends = pair.flow(0);
    let room = usize::from(pair.options.requests);
    let target = pair.memory(1, room * 100);
    let source = pair.filled(0, room * 100, 9);
    let recvs: Vec<_> = (0..room).map(|i| pair.recv(ends, target.span(i as u64 * 100, 100))).collect();
    pair.settle();
    assert_eq!(pair.host(1).irecv(ends.recv, target.span(0, 1)).expect("lives"), None);
    target.assert_poisoned_from(0);
    for (i, recv) in recvs.into_iter().enumerate() {
        let send = pair.send(ends, source.span(i as u64 * 100, 100));
        assert_eq!(pair.finish(1, recv), 100);
        assert_eq!(pair.finish(0, send), 100);
    }
    assert_filled(target.bytes(), 9);
}

/// Bytes that are said to have come have come, before the message is complete.
pub(crate) fn progress_is_true_and_never_falls<F: Fixture>(pair: &mut Pair<F>) {
    let bytes = 20_000_000 / pair.fixture.thrift() as usize;
    let ends = pair.flow(0);
    let source = pair.filled(0, bytes, 3);
    let target = pair.memory(1, bytes);
    let recv = pair.recv(ends, target.whole());
    let send = pair.send(ends, source.whole());
    let (mut before, mut steps) = (0, 0);
    pair.until("complete", |pair| {
        let (now, done) = match pair.host(1).test(recv).expect("lives") {
            Status::Running { bytes } => (bytes as usize, false),
            Status::Done { bytes, .. } => (bytes as usize, true),
        };
        assert!(now >= before && now <= bytes, "progress went from {before} to {now} of {bytes}");
        assert_eq!(target.bytes()[before..now], source.bytes()[before..now]);
        steps += usize::from(now > before);
        before = now;
        done
    });
    assert_eq!(before, bytes);
    assert!(steps > 1, "a message of {bytes} bytes came in one step");
    assert_eq!(pair.finish(0, send), bytes as u64);
    assert_filled(target.bytes(), 3);
}

pub(crate) fn posted_before_connected<F: Fixture>(pair: &mut Pair<F>) {
    let ends = pair.begin_flow(0);
    pair.transfer(ends, 100_000, 4);
    pair.until_connected(ends);
}

/// Each message has its own.
pub(crate) fn tags_come_with_messages<F: Fixture>(pair: &mut Pair<F>) {
    let ends = pair.flow(0);
    let source = pair.filled(0, 100_000, 1);
    let target = pair.memory(1, 100_000);
    for (tag, bytes) in [(0, 0), (u32::MAX, 1), (7, 100_000), (0, 5)] {
        let recv = pair.recv(ends, target.span(0, bytes));
        let send = pair.host(0).isend(ends.send, source.span(0, bytes), tag).expect("lives").expect("room");
        for (host, request, expected) in [(1, recv, tag), (0, send, 0)] {
            let mut done = None;
            pair.until("done", |pair| {
                done = Some(pair.host(host).test(request).expect("lives"));
                matches!(done, Some(Status::Done { .. }))
            });
            assert_eq!(done, Some(Status::Done { bytes, tag: expected }));
        }
    }
    pair.forget(0, source);
    pair.forget(1, target);
}

pub(crate) fn flush_completes<F: Fixture>(pair: &mut Pair<F>) {
    let ends = pair.flow(0);
    let target = pair.memory(1, 1000);
    let source = pair.filled(0, 1000, 5);
    let recv = pair.recv(ends, target.whole());
    pair.send(ends, source.whole());
    pair.finish(1, recv);
    let flush = pair.host(1).flush(ends.recv, target.whole()).expect("lives").expect("room");
    assert_eq!(pair.finish(1, flush), 0);
    assert_filled(target.bytes(), 5);
    assert!(pair.host(1).flush(ends.recv, target.span(1, 1000)).is_err(), "outside the memory");
}

/// Whoever polls only when told to, and sleeps otherwise, misses nothing.
pub(crate) fn sleeping_on_the_descriptor<F: Fixture>(pair: &mut Pair<F>) {
    const LIMIT: Duration = Duration::from_secs(60);
    let ends = pair.flow(0);
    for round in 0..50 {
        let bytes = [1, 5000, 700_000][round % 3];
        let source = pair.filled(0, bytes, round as u64);
        let target = pair.memory(1, bytes);
        let recv = pair.recv(ends, target.whole());
        let send = pair.send(ends, source.whole());
        let mut open = [Some((1, recv)), Some((0, send))];
        while open.iter().any(Option::is_some) {
            for slot in &mut open {
                slot.take_if(|(host, request)| {
                    matches!(pair.host(*host).test(*request).expect("lives"), Status::Done { .. })
                });
            }
            let now = pair.fixture.now();
            let cx = Context::new(now, 64);
            let progress = [0, 1].map(|host| pair.host(host).poll(&cx));
            let mut wake = now + LIMIT;
            let mut may_sleep = open.iter().any(Option::is_some);
            for (host, progress) in progress.into_iter().enumerate() {
                match progress {
                    Progress::Idle { wake_at } => wake = wake_at.map_or(wake, |at| at.min(wake)),
                    Progress::Busy | Progress::Done => may_sleep = false,
                }
                may_sleep &= pair.host(host).prepare_to_sleep();
            }
            if !may_sleep {
                continue;
            }
            let raw = [0, 1].map(|host| pair.host(host).descriptor().map(|fd| fd.as_raw_fd()));
            let [Some(a), Some(b)] = raw else { continue };
            // SAFETY: descriptors of the transports, which live on.
            let fds = [a, b].map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
            let mut fds = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            let until = PollTimeout::try_from(wake.saturating_duration_since(now) + Duration::from_millis(1));
            let ready = poll(&mut fds, until.expect("short")).expect("polls");
            assert!(ready > 0 || wake < now + LIMIT, "asleep with requests unfinished");
        }
        assert_filled(target.bytes(), round as u64);
        pair.forget(0, source);
        pair.forget(1, target);
    }
}

/// As many flows as there can be, all at work at once.
pub(crate) fn thousands_of_flows<F: Fixture>(pair: &mut Pair<F>) {
    const BYTES: u64 = 999;
    let count = pair.fixture.flows();
    pair.options.connections = 1;
    pair.options.requests = 2;
    let (listener, handle) = pair.listen(1);
    let flows: Vec<Ends> = (0..count)
        .map(|number| Ends {
            from: 0,
            send: pair.connect(0, &handle, number),
            recv: {
                pair.poll();
                pair.accept(1, listener, number)
            },
        })
        .collect();
    let source = pair.filled(0, count as usize * BYTES as usize, 6);
    let target = pair.memory(1, count as usize * BYTES as usize);
    let mut requests = Vec::new();
    for (i, ends) in flows.iter().enumerate() {
        let recv = pair.recv(*ends, target.span(i as u64 * BYTES, BYTES));
        let send = pair.send(*ends, source.span(i as u64 * BYTES, BYTES));
        requests.push((recv, send));
    }
    for (recv, send) in requests {
        assert_eq!(pair.finish(1, recv), BYTES);
        assert_eq!(pair.finish(0, send), BYTES);
    }
    assert_filled(target.bytes(), 6);
    for ends in flows {
        pair.host(0).close(ends.send.into());
        pair.host(1).close(ends.recv.into());
    }
    pair.forget(0, source);
    pair.forget(1, target);
}
