//! Paths that die silently, and what must not be taken for it. A filter on a socket drops what arrives there, as a broken link does:
//! the kernel does not acknowledge it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use crate::PortRange;
use crate::conformance::Random;
use crate::tcp::flow::receiver::Receiver;
use crate::tcp::flow::sender::Sender;
use crate::tcp::socket::Socket;
use crate::tcp::tests::{connected, until_connected};
use crate::tcp::*;
use crate::{FlowPath, PathControl, PathEvents};
use mccs_net::lossy::{lose, lose_from};

/// Between two sides of a flow, which may be hosts apart.
struct Fixture {
    a: TcpTransport,
    b: TcpTransport,
    send: SendFlow,
    recv: RecvFlow,
    sent: Vec<u8>,
    received: Vec<u8>,
    from: MemoryKey,
    to: MemoryKey,
}

fn options() -> FlowOptions {
    FlowOptions { path_timeout: Some(Duration::from_millis(60)), ..FlowOptions::default() }
}

impl Fixture {
    fn new(options: FlowOptions, bytes: usize) -> Self {
        let (mut a, mut b, send, recv) = connected(options);
        let (mut sent, mut received) = (vec![0u8; bytes], vec![0u8; bytes]);
        let mut random = Random(9);
        sent.iter_mut().for_each(|byte| *byte = random.next() as u8);
        // SAFETY: both outlive the transports, whose fields come first.
        let (from, to) = unsafe {
            let bytes = bytes as u64;
            let from = a.register(sent.as_mut_ptr(), bytes, MemoryKind::Host).expect("room");
            (from, b.register(received.as_mut_ptr(), bytes, MemoryKind::Host).expect("room"))
        };
        Fixture { a, b, send, recv, sent, received, from, to }
    }

    fn poll(&mut self) {
        let cx = Context::new(Instant::now(), 64);
        let busy = [self.a.poll(&cx), self.b.poll(&cx)].contains(&Progress::Busy);
        if !busy {
            self.a.prepare_to_sleep();
            self.b.prepare_to_sleep();
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn sender(&self) -> &Sender {
        match &self.a.flows.get(FlowId::from(self.send).0).expect("lives").half {
            Half::Send(sender) => sender,
            Half::Recv(_) => panic!("another half"),
        }
    }

    fn receiver(&self) -> &Receiver {
        match &self.b.flows.get(FlowId::from(self.recv).0).expect("lives").half {
            Half::Recv(receiver) => receiver,
            Half::Send(_) => panic!("another half"),
        }
    }

    /// The path that the flow has now is dead, both ways.
    fn kill_path(&self) {
        self.sender().sockets().for_each(|socket| lose(socket, 1));
        self.receiver().sockets().for_each(|(socket, ..)| lose(socket, 1));
    }

    /// Source ports lead nowhere: nothing that comes from there arrives, of connections that are there or to come.
    fn kill_ports(&self, ports: PortRange) {
        self.kill_path();
        self.b.acceptor.sockets().for_each(|socket| lose_from(socket, ports.first, ports.last));
    }

    /// The sender's news of paths since the last call.
    fn path_news(&mut self) -> Vec<(FlowPath, bool)> {
        std::iter::from_fn(|| self.a.take_path_event()).map(|event| (event.path, event.answers)).collect()
    }

    /// Sockets that the flow's connections had so far.
    fn resumptions(&self) -> u32 {
        self.receiver().sockets().map(|(.., resumption)| resumption).max().unwrap_or(0)
    }

    /// Moves messages of these lengths, in order; `at` is called before each is sent, with how many have come.
    fn carry(&mut self, lengths: &[usize], mut at: impl FnMut(&mut Self, usize)) {
        let start = Instant::now();
        let (mut sends, mut recvs) = (VecDeque::new(), VecDeque::new());
        let (mut posted, mut asked, mut done, mut sent) = ((0, 0), (0, 0), (0, 0), 0);
        self.received.fill(0);
        while done.0 < lengths.len() || sent < lengths.len() {
            if posted.0 < lengths.len() {
                at(self, done.0);
                let span = MemorySpan { key: self.from, offset: posted.1 as u64, bytes: lengths[posted.0] as u64 };
                if let Some(request) = self.a.isend(self.send, span, posted.0 as u32).expect("lives") {
                    sends.push_back((request, posted.1, lengths[posted.0]));
                    posted = (posted.0 + 1, posted.1 + lengths[posted.0]);
                }
            }
            if asked.0 < lengths.len() {
                let span = MemorySpan { key: self.to, offset: asked.1 as u64, bytes: lengths[asked.0] as u64 };
                if let Some(request) = self.b.irecv(self.recv, span).expect("lives") {
                    recvs.push_back(request);
                    asked = (asked.0 + 1, asked.1 + lengths[asked.0]);
                }
            }
            self.poll();
            while let Some((request, offset, bytes)) = sends.front().copied() {
                let Status::Done { .. } = self.a.test(request).expect("lives") else { break };
                // Its buffer may be written again.
                self.sent[offset..offset + bytes].iter_mut().for_each(|byte| *byte = !*byte);
                sends.pop_front();
                sent += 1;
            }
            while let Some(request) = recvs.front().copied() {
                let Status::Done { bytes, tag } = self.b.test(request).expect("lives") else { break };
                assert_eq!((bytes, tag), (lengths[done.0] as u64, done.0 as u32));
                recvs.pop_front();
                done = (done.0 + 1, done.1 + lengths[done.0]);
            }
            assert!(start.elapsed() < Duration::from_secs(100), "{done:?} of {posted:?} came");
        }
        let wrong = self.sent.iter().zip(&self.received).take(done.1).position(|(sent, received)| !sent != *received);
        assert_eq!(wrong, None, "of {} bytes", done.1);
        self.sent.iter_mut().take(done.1).for_each(|byte| *byte = !*byte);
    }
}

fn lengths(seed: u64, count: usize) -> Vec<usize> {
    let mut random = Random(seed);
    (0..count).map(|_| (random.below(200_000) >> random.below(17)) as usize).collect()
}

/// Messages of all lengths are under way, more than fit a socket and none, when the path dies: every byte comes once, in order, also of
/// messages that were done before and have been written over.
#[test]
fn flows_go_on_where_paths_die() {
    for connections in [1, 3] {
        let mut fixture = Fixture::new(FlowOptions { connections, chunk_bytes: 20_000, ..options() }, 40 << 20);
        for round in 1..=4 {
            let lengths = lengths(round, 300);
            let mut has_died = false;
            let before = fixture.resumptions();
            fixture.carry(&lengths, |fixture, done| {
                if done >= 50 * round as usize && !std::mem::replace(&mut has_died, true) {
                    fixture.kill_path();
                }
            });
            assert!(fixture.resumptions() > before, "it has not gone on");
        }
    }
}

/// The last message is done before anybody has it, and the flow is closed.
#[test]
fn the_end_of_what_is_sent_waits_no_longer_than_a_copy_takes() {
    const BYTES: usize = 12_000;
    let mut fixture = Fixture::new(options(), BYTES);
    // Nothing is acknowledged.
    fixture.kill_path();
    let span = MemorySpan { key: fixture.from, offset: 0, bytes: BYTES as u64 };
    let send = fixture.a.isend(fixture.send, span, 0).expect("lives").expect("room");
    let start = Instant::now();
    for (after_us, is_done) in [(0, false), (0, false), (10, true)] {
        fixture.a.poll(&Context::new(start + Duration::from_micros(after_us), 64));
        let status = fixture.a.test(send).expect("lives");
        assert_eq!(matches!(status, Status::Done { .. }), is_done, "{status:?} after {after_us} us");
    }
}

#[test]
fn what_was_done_comes_though_its_path_and_then_its_flow_end() {
    for bytes in [8, 100_000] {
        let mut fixture = Fixture::new(options(), 1 << 20);
        fixture.kill_path();
        let span = |key| MemorySpan { key, offset: 0, bytes };
        let recv = fixture.b.irecv(fixture.recv, span(fixture.to)).expect("lives").expect("room");
        let send = fixture.a.isend(fixture.send, span(fixture.from), 0).expect("lives").expect("room");
        while !matches!(fixture.a.test(send).expect("lives"), Status::Done { .. }) {
            fixture.poll();
        }
        fixture.a.close(fixture.send.into());
        assert_eq!(fixture.a.usage().flows, 0);
        assert_eq!(fixture.a.test(send), Err(TransportError::NO_FLOW));
        fixture.sent.reverse();
        let start = Instant::now();
        while !matches!(fixture.b.test(recv).expect("lives"), Status::Done { .. }) {
            fixture.poll();
            assert!(start.elapsed() < Duration::from_secs(100), "nothing comes");
        }
        fixture.sent.reverse();
        assert_eq!(fixture.sent[..bytes as usize], fixture.received[..bytes as usize]);
        let recv = fixture.b.irecv(fixture.recv, span(fixture.to)).expect("lives").expect("room");
        while fixture.b.state(fixture.recv.into()).is_ok() {
            fixture.poll();
            assert!(start.elapsed() < Duration::from_secs(100), "the end does not come");
        }
        assert_eq!(fixture.b.test(recv).expect_err("there is no more").fault(), Some(Fault::Closed));
        while fixture.a.flows.lingering() > 0 {
            fixture.poll();
            assert!(start.elapsed() < Duration::from_secs(100), "it stays");
        }
        assert_eq!(fixture.a.flows.len(), 0);
    }
}

/// A flow's steering leads nowhere, or is the way of a broken socket alone: only the first is a dead path.
#[test]
fn a_dead_path_is_told_from_one_that_answers() {
    let [own, other] = [21_000, 21_020].map(|first| PortRange { first, last: first + 19 });
    let path = |ports| FlowPath { source_ports: Some(ports), ..FlowPath::default() };
    let options = FlowOptions { source_ports: Some(own), detours: [path(other)].into(), connections: 2, ..options() };
    let mut fixture = Fixture::new(options, 40 << 20);
    let mut has_died = false;
    fixture.carry(&lengths(1, 300), |fixture, done| {
        if done >= 50 && !std::mem::replace(&mut has_died, true) {
            fixture.kill_path();
        }
    });
    assert!(fixture.resumptions() > 0, "it has not gone on");
    let news = fixture.path_news();
    assert!(!news.is_empty() && news.iter().all(|news| *news == (path(own), true)), "{news:?}");
    has_died = false;
    fixture.carry(&lengths(2, 300), |fixture, done| {
        if done >= 50 && !std::mem::replace(&mut has_died, true) {
            fixture.kill_ports(own);
        }
    });
    let news = fixture.path_news();
    assert!(news.contains(&(path(own), false)) && news.contains(&(path(other), true)), "{news:?}");
    assert!(!news.contains(&(path(other), false)), "{news:?}");
}

/// A receiver without room for long, and then one that loses packets: neither is a dead path.
#[test]
fn who_is_late_or_loses_some_packets_keeps_its_path() {
    let small = FlowOptions { send_buffer_bytes: Some(50_000), receive_buffer_bytes: Some(50_000), ..options() };
    let mut fixture = Fixture::new(small, 8 << 20);
    let span = |key| MemorySpan { key, offset: 0, bytes: 4 << 20 };
    let send = fixture.a.isend(fixture.send, span(fixture.from), 0).expect("lives").expect("room");
    // A machine that holds this thread up in the midst of a poll makes answers late, and who goes on over another socket then is right to.
    let (start, mut last, mut held_up) = (Instant::now(), Instant::now(), Duration::ZERO);
    while start.elapsed() < Duration::from_millis(1800) {
        fixture.poll();
        held_up = held_up.max(last.elapsed());
        last = Instant::now();
    }
    assert!(matches!(fixture.a.test(send), Ok(Status::Running { .. })), "it waits for room");
    // Nor is a service that is stopped, and looks again after a second.
    std::thread::sleep(Duration::from_secs(1));
    fixture.poll();
    let recv = fixture.b.irecv(fixture.recv, span(fixture.to)).expect("lives").expect("room");
    while !matches!(fixture.b.test(recv).expect("lives"), Status::Done { .. }) {
        fixture.poll();
        assert!(start.elapsed() < Duration::from_secs(60), "nothing comes");
    }
    while !matches!(fixture.a.test(send).expect("lives"), Status::Done { .. }) {
        fixture.poll();
    }
    fixture.sender().sockets().for_each(|socket| lose(socket, 100));
    fixture.receiver().sockets().for_each(|(socket, ..)| lose(socket, 100));
    let short = vec![1000; 2000];
    assert!(
        fixture.resumptions() == 0 || held_up > Duration::from_millis(50),
        "{} after {held_up:?}",
        fixture.resumptions()
    );
    fixture.carry(&short, |_, _| {});
    // If it has lost all of some packet it may have gone on over another socket, of the same path.
    let news = fixture.path_news();
    assert!(news.iter().all(|(_, answers)| *answers), "{news:?}");
}

/// The peer's process ends while the path is dead: the flow fails, and soon.
#[test]
fn a_peer_that_is_gone_is_found_gone_over_another_path() {
    let mut fixture = Fixture::new(options(), 1 << 20);
    fixture.kill_path();
    let span = MemorySpan { key: fixture.from, offset: 0, bytes: 1 << 20 };
    fixture.a.isend(fixture.send, span, 0).expect("lives").expect("room");
    fixture.b = TcpTransport::new().expect("descriptor");
    let start = Instant::now();
    let failure = loop {
        fixture.poll();
        if let Err(failure) = fixture.a.state(fixture.send.into()) {
            break failure;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "it lives");
    };
    assert_eq!(failure.fault(), Some(Fault::Closed));
}

/// A flow whose first dial is lost in some way that `lose` makes; what it finds out about paths.
fn connect_despite(options: FlowOptions, lose: impl Fn(&TcpTransport, &Socket)) -> Vec<(FlowPath, bool)> {
    let [mut a, mut b] = [0, 1].map(|_| TcpTransport::new().expect("descriptor"));
    let (listener, handle) = b.listen(&ListenOptions::default()).expect("listens");
    let spec = FlowSpec { number: 0, peer: "rank 1".into(), options };
    let send = a.connect(&handle, &spec, Instant::now()).expect("connects");
    let Half::Send(sender) = &a.flows.get(FlowId::from(send).0).expect("lives").half else { panic!("another half") };
    // Over loopback it is connected already; its hello is not said yet.
    sender.sockets().for_each(|socket| lose(&b, socket));
    let recv = b.accept(listener, &spec, Instant::now()).expect("accepts");
    let start = Instant::now();
    until_connected((&mut a, &mut b), (send, recv));
    assert!(start.elapsed() > Duration::from_millis(50));
    std::iter::from_fn(|| a.take_path_event()).map(|event| (event.path, event.answers)).collect()
}

/// A path is dead from the start: another one connects the flow.
#[test]
fn a_flow_connects_over_another_path_when_the_first_is_dead() {
    let [own, other] = [21_040, 21_060].map(|first| PortRange { first, last: first + 19 });
    let path = |ports| FlowPath { source_ports: Some(ports), ..FlowPath::default() };
    let options = FlowOptions { source_ports: Some(own), detours: [path(other)].into(), ..options() };
    let news = connect_despite(options, |b, socket| {
        lose(socket, 1);
        b.acceptor.sockets().for_each(|socket| lose_from(socket, own.first, own.last));
    });
    assert_eq!(news.first(), Some(&(path(own), false)), "{news:?}");
}

/// A hello, and what repeats it, are lost on a path that lives.
#[test]
fn a_hello_that_is_lost_is_no_dead_path() {
    let news = connect_despite(options(), |_, socket| lose(socket, 1));
    assert!(news.iter().all(|(_, answers)| *answers), "{news:?}");
}

/// A flow that was heard waits to be accepted, on a clock of the test's: that is no dead path; and then it is one.
#[test]
fn a_path_that_dies_before_its_flow_is_accepted_is_found_dead() {
    let [own, other] = [21_140, 21_160].map(|first| PortRange { first, last: first + 19 });
    let path = |ports| FlowPath { source_ports: Some(ports), ..FlowPath::default() };
    let options =
        FlowOptions { source_ports: Some(own), detours: [path(other)].into(), peer_timeout: None, ..options() };
    let [mut a, mut b] = [0, 1].map(|_| TcpTransport::new().expect("descriptor"));
    let (listener, handle) = b.listen(&ListenOptions::default()).expect("listens");
    let spec = FlowSpec { number: 0, peer: "rank 1".into(), options };
    let mut now = Instant::now();
    let send = a.connect(&handle, &spec, now).expect("connects");
    // By a hundredth of a second at a time; whoever connects over loopback is connected at once.
    let mut wait = |a: &mut TcpTransport, b: &mut TcpTransport, seconds: u32| {
        for _ in 0..100 * seconds {
            now += Duration::from_millis(10);
            let cx = Context::new(now, 64);
            a.poll(&cx);
            b.poll(&cx);
        }
        std::iter::from_fn(|| a.take_path_event()).map(|event| (event.path, event.answers)).collect::<Vec<_>>()
    };
    assert_eq!(wait(&mut a, &mut b, 60), []);
    let Half::Send(sender) = &a.flows.get(FlowId::from(send).0).expect("lives").half else { panic!("another half") };
    sender.sockets().for_each(|socket| lose(socket, 1));
    b.acceptor.sockets().for_each(|socket| lose_from(socket, own.first, own.last));
    assert_eq!(wait(&mut a, &mut b, 4), [(path(own), false)]);
    let recv = b.accept(listener, &spec, Instant::now()).expect("accepts");
    until_connected((&mut a, &mut b), (send, recv));
}

/// Its user wants it elsewhere while it carries; and it dies there.
#[test]
fn a_flow_is_steered_over_another_path() {
    let [own, other, third] = [21_080, 21_100, 21_120].map(|first| PortRange { first, last: first + 19 });
    let path = |ports| FlowPath { source_ports: Some(ports), ..FlowPath::default() };
    let options = FlowOptions { source_ports: Some(own), detours: [path(other)].into(), connections: 2, ..options() };
    let mut fixture = Fixture::new(options, 40 << 20);
    let goes_by = |fixture: &Fixture, ports: PortRange| {
        let port = |socket: &Socket| {
            let name = nix::sys::socket::getsockname::<nix::sys::socket::SockaddrIn>(socket.as_fd().as_raw_fd());
            name.expect("a name").port()
        };
        fixture.sender().sockets().all(|socket| (ports.first..=ports.last).contains(&port(socket)))
    };
    assert!(goes_by(&fixture, own));
    // The path that it takes already; another, of which it knew; one that it did not know of.
    for (seed, to, resumptions) in [(1, own, 0), (2, other, 1), (3, third, 2)] {
        let mut is_steered = false;
        fixture.carry(&lengths(seed, 300), |fixture, done| {
            if done >= 50 && !std::mem::replace(&mut is_steered, true) {
                fixture.a.set_path(fixture.send, &path(to), &[path(own)].into());
            }
        });
        while !goes_by(&fixture, to) {
            fixture.poll();
        }
        assert_eq!(fixture.resumptions(), resumptions);
        assert!(fixture.path_news().iter().all(|news| *news == (path(to), true)));
    }
    let mut has_died = false;
    fixture.carry(&lengths(4, 300), |fixture, done| {
        if done >= 50 && !std::mem::replace(&mut has_died, true) {
            fixture.kill_ports(third);
        }
    });
    let news = fixture.path_news();
    assert!(news.contains(&(path(third), false)) && news.contains(&(path(own), true)), "{news:?}");
}

/// Nothing is sent when the path dies, and nothing for long after. Neither side gives the flow up.
#[test]
fn an_idle_flow_goes_on_when_its_path_has_died() {
    let mut fixture = Fixture::new(FlowOptions { silence_timeout: Duration::from_secs(4), ..options() }, 1 << 20);
    fixture.carry(&[1000], |_, _| {});
    fixture.kill_path();
    let start = Instant::now();
    while fixture.resumptions() == 0 {
        fixture.poll();
        fixture.a.state(fixture.send.into()).expect("lives");
        fixture.b.state(fixture.recv.into()).expect("lives");
        assert!(start.elapsed() < Duration::from_secs(100), "nobody minds");
    }
    fixture.carry(&[1000, 50_000], |_, _| {});
}

/// Its listener keeps nothing of it, or is gone.
#[test]
fn a_flow_goes_on_over_another_socket_when_its_listener_has_closed() {
    for closes in [false, true] {
        let mut fixture = Fixture::new(options(), 1 << 20);
        let wire::Hello { listener, .. } = fixture.receiver().hello().expect("connected");
        match closes {
            true => fixture.b.close_listener(Listener(listener)),
            false => fixture.b.end_numbers(Listener(listener), 1),
        }
        fixture.carry(&[1000], |_, _| {});
        fixture.kill_path();
        fixture.carry(&[1000, 50_000], |_, _| {});
        assert!(fixture.resumptions() > 0, "it has not gone on");
        fixture.b.close(fixture.recv.into());
        assert_eq!(fixture.b.acceptor.connected(), 0, "it is forgotten");
    }
}

/// A peer with the listener's secret that is not the flow's sender cannot go on with it.
#[test]
fn strangers_cannot_go_on_with_a_flow() {
    use std::io::Write;
    let [mut a, mut b] = [0, 1].map(|_| TcpTransport::new().expect("descriptor"));
    let (listener, handle) = b.listen(&ListenOptions::default()).expect("listens");
    let spec = FlowSpec { number: 0, peer: "rank 1".into(), options: options() };
    let send = a.connect(&handle, &spec, Instant::now()).expect("connects");
    let recv = b.accept(listener, &spec, Instant::now()).expect("accepts");
    let poll = |a: &mut TcpTransport, b: &mut TcpTransport| {
        let cx = Context::new(Instant::now(), 64);
        a.poll(&cx);
        b.poll(&cx);
    };
    while b.state(recv.into()).expect("lives") == FlowState::Connecting {
        poll(&mut a, &mut b);
    }
    let Half::Recv(receiver) = &b.flows.get(FlowId::from(recv).0).expect("lives").half else { panic!("another half") };
    let right = receiver.hello().expect("connected");
    let forged = [
        wire::Hello { resumption: 1, cookie: [0; 16], ..right },
        wire::Hello { resumption: 1, attempt: right.attempt ^ 1, ..right },
        wire::Hello { resumption: 1, connections: 2, ..right },
        wire::Hello { resumption: 0, ..right },
        wire::Hello { resumption: 1, flow: 7, attempt: right.attempt ^ 1, connections: 2, connection: 1, ..right },
    ];
    let address = wire::Address::from_handle(&handle).expect("handle").address;
    let _strangers: Vec<_> = forged
        .map(|hello| {
            let mut stranger = std::net::TcpStream::connect(address).expect("connects");
            stranger.write_all(&hello.encode()).expect("writes");
            stranger
        })
        .into();
    let start = Instant::now();
    // The last is of a flow that nobody has accepted yet, as far as the listener knows.
    while b.refused_connections() < 4 {
        poll(&mut a, &mut b);
        assert!(start.elapsed() < Duration::from_secs(60), "still not refused");
    }
    let mut memory = [7u8; 100];
    // SAFETY: nothing polls after the test.
    let from = unsafe { a.register(memory.as_mut_ptr(), 100, MemoryKind::Host) }.expect("room");
    // SAFETY: as above.
    let to = unsafe { b.register(memory.as_mut_ptr(), 100, MemoryKind::Host) }.expect("room");
    a.isend(send, MemorySpan { key: from, offset: 0, bytes: 50 }, 3).expect("lives").expect("room");
    let request = b.irecv(recv, MemorySpan { key: to, offset: 50, bytes: 50 }).expect("lives").expect("room");
    while b.test(request) != Ok(Status::Done { bytes: 50, tag: 3 }) {
        poll(&mut a, &mut b);
        assert!(start.elapsed() < Duration::from_secs(60), "nothing comes");
    }
}
