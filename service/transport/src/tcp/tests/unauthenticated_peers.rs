//! Powers of somebody who can reach a port over a transport: little, and counted.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;

use crate::FlowOptions;
use crate::tcp::accept::port::HANDSHAKE_TIMEOUT;
use crate::tcp::wire::{Address, ChunkHeader, Hello};
use crate::tcp::*;
use mccs_net::testing::raise_descriptor_limit;

/// A transport that listens, and its time.
struct Victim {
    tcp: TcpTransport,
    listener: Listener,
    address: Address,
    skipped: Duration,
}

impl Victim {
    fn new() -> Self {
        let mut tcp = TcpTransport::new().expect("descriptor");
        let (listener, handle) = tcp.listen(&ListenOptions::default()).expect("listens");
        Victim { tcp, listener, address: Address::from_handle(&handle).expect("handle"), skipped: Duration::ZERO }
    }

    fn at(&self) -> SocketAddr {
        self.address.address
    }

    fn stranger(&self, says: &[u8]) -> TcpStream {
        let mut stranger = TcpStream::connect(self.at()).expect("connects");
        stranger.write_all(says).expect("writes");
        stranger
    }

    fn now(&self) -> Instant {
        Instant::now() + self.skipped
    }

    fn hello(&self, flow: u64) -> Hello {
        let Address { listener, cookie, .. } = self.address;
        let (connection, connections, chunk_bytes) = (0, 1, 1 << 16);
        Hello { listener, cookie, flow, connection, connections, chunk_bytes, attempt: 1, resumption: 0 }
    }

    fn accept(&mut self, number: u64) -> RecvFlow {
        let spec = FlowSpec { number, peer: "rank 1".into(), options: FlowOptions::default() };
        let now = self.now();
        self.tcp.accept(self.listener, &spec, now).expect("accepts")
    }

    fn poll(&mut self) -> Progress {
        let cx = Context::new(self.now(), 64);
        self.tcp.poll(&cx)
    }

    fn until(&mut self, what: &str, mut holds: impl FnMut(&mut TcpTransport) -> bool) {
        let start = Instant::now();
        while !holds(&mut self.tcp) {
            self.poll();
            assert!(start.elapsed() < Duration::from_secs(60), "still not: {what}");
        }
    }

    fn until_refused(&mut self, count: u64) {
        self.until("refused", |tcp| tcp.refused_connections() >= count);
        assert_eq!(self.tcp.refused_connections(), count);
    }

    /// A flow of somebody who may connect.
    fn assert_works(&mut self, number: u64) {
        let mut peer = TcpTransport::new().expect("descriptor");
        let spec = FlowSpec { number, peer: "rank 0".into(), options: FlowOptions::default() };
        let send = peer.connect(&self.address.to_handle(), &spec, Instant::now()).expect("connects");
        let recv = self.accept(number);
        self.until("connected", |tcp| {
            peer.poll(&Context::new(Instant::now(), 64));
            let (theirs, ours) = (peer.state(send.into()), tcp.state(recv.into()));
            theirs.expect("lives") == FlowState::Connected && ours.expect("lives") == FlowState::Connected
        });
    }
}

/// Whether the other side has closed it.
fn is_closed(stranger: &mut TcpStream) -> bool {
    stranger.set_nonblocking(true).expect("socket");
    match stranger.read(&mut [0; 64]) {
        Ok(0) => true,
        Ok(_) => panic!("a stranger is told something"),
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    }
}

#[test]
fn strangers_are_refused_and_counted() {
    let mut victim = Victim::new();
    let hello = victim.hello(1);
    let forged = [
        Hello { cookie: [0; 16], ..hello },
        Hello { listener: Handle { index: 9999, ..hello.listener }, ..hello },
        Hello { listener: Handle { generation: 0, ..hello.listener }, ..hello },
    ];
    let mut strangers =
        vec![victim.stranger(b"GET / HTTP/1.1\r\nHost: somewhere.example\r\nAccept: everything, please\r\n\r\n")];
    strangers.extend(forged.map(|hello| victim.stranger(&hello.encode())));
    drop(victim.stranger(&hello.encode()[..20]));
    // A silent stranger has not asked whether it is answered.
    drop(victim.stranger(b""));
    victim.until_refused(5);
    victim.until("closed", |_| strangers.iter_mut().all(is_closed));
    victim.assert_works(1);
}

#[test]
fn another_version_is_told() {
    let mut victim = Victim::new();
    let mut hello = victim.hello(1).encode();
    hello[8] = 99;
    let mut newer = victim.stranger(&hello);
    victim.until_refused(1);
    let mut answer = [0; wire::VERDICT_BYTES];
    newer.read_exact(&mut answer).expect("an answer");
    assert!(wire::Verdict::check(&answer).is_err());
    assert_eq!(answer[8..12], wire::VERSION.to_le_bytes());
}

#[test]
fn silent_connections_time_out_and_cost_nothing_until_then() {
    let mut victim = Victim::new();
    let mut silent = [victim.stranger(b""), victim.stranger(b"mccs-tcp")];
    victim.until("taken", |tcp| tcp.acceptor.half_open() == 2);
    while victim.poll() == Progress::Busy {}
    let Progress::Idle { wake_at: Some(wake_at) } = victim.poll() else { panic!("busy with silence") };
    assert!(wake_at > victim.now() && wake_at <= victim.now() + HANDSHAKE_TIMEOUT);
    assert!(victim.tcp.prepare_to_sleep());
    let mut events = Watches::no_events();
    assert_eq!(victim.tcp.watches.take(&mut events), 0, "its descriptor would wake it for nothing");
    assert_eq!(victim.tcp.refused_connections(), 0);
    victim.skipped += HANDSHAKE_TIMEOUT;
    victim.until_refused(2);
    victim.until("closed", |_| silent.iter_mut().all(is_closed));
}

/// More than there is place for: those who may connect get in all the same.
#[test]
fn a_crowd_of_silent_connections_does_not_lock_others_out() {
    raise_descriptor_limit();
    let mut victim = Victim::new();
    let mut crowd = Vec::new();
    for _ in 0..1100 {
        crowd.push(victim.stranger(b""));
        victim.poll();
    }
    victim.until("full", |tcp| tcp.acceptor.half_open() == 1024);
    victim.skipped += Duration::from_secs(1);
    victim.assert_works(1);
    assert!(victim.tcp.acceptor.half_open() <= 1024);
    assert!(victim.tcp.refused_connections() >= 76);
}

/// Peers that are let in, and then break the protocol, end their flow and nothing else.
#[test]
fn garbage_after_a_good_hello_fails_that_flow() {
    let mut victim = Victim::new();
    let mut memory = [0u8; 64];
    // SAFETY: `memory` lives until the end of the test, when nothing polls any more.
    let key = unsafe { victim.tcp.register(memory.as_mut_ptr(), 64, MemoryKind::Host) }.expect("registers");
    let huge = ChunkHeader { message: 0, chunk: 0, message_bytes: u64::MAX, tag: 0 }.encode();
    let long = ChunkHeader { message: 0, chunk: 0, message_bytes: 65, tag: 0 }.encode();
    let beyond = ChunkHeader { message: 0, chunk: 1, message_bytes: 8, tag: 0 }.encode();
    let old = ChunkHeader { message: u32::MAX, chunk: 0, message_bytes: 8, tag: 0 }.encode();
    let cases: [&[u8]; 6] = [&[0xff; 100], &huge, &long, &beyond, &old, &huge[..7]];
    for (number, case) in cases.into_iter().enumerate() {
        let mut peer = victim.stranger(&victim.hello(number as u64).encode());
        peer.write_all(case).expect("writes");
        // The last one ends in the middle of a header.
        peer.shutdown(std::net::Shutdown::Write).expect("socket");
        let flow = victim.accept(number as u64);
        let span = MemorySpan { key, offset: 0, bytes: 64 };
        let _ = victim.tcp.irecv(flow, span).expect("lives");
        let mut failure = None;
        victim.until("failed", |tcp| {
            failure = tcp.state(flow.into()).err();
            failure.is_some()
        });
        let fault = failure.expect("failed").fault();
        assert!(matches!(fault, Some(Fault::Protocol(_) | Fault::TooLong { .. })), "{number}: {fault:?}");
        victim.tcp.close(flow.into());
    }
    assert_eq!(memory, [0; 64]);
    victim.tcp.deregister(key).expect("unused");
    victim.assert_works(100);
}

/// A sender whose receiver says something fails its flow.
#[test]
fn a_receiver_that_talks_is_refused() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("listens");
    let address = listener.local_addr().expect("address");
    let handle = Address { address, listener: Handle { index: 0, generation: 1 }, cookie: [1; 16] }.to_handle();
    for says in [&[0xff; 16][..], &[&wire::Verdict::Welcome.encode()[..], &[1]].concat()] {
        let mut tcp = TcpTransport::new().expect("descriptor");
        let spec = FlowSpec { number: 0, peer: "rank 1".into(), options: FlowOptions::default() };
        let send = tcp.connect(&handle, &spec, Instant::now()).expect("connects");
        let (mut peer, _) = listener.accept().expect("comes");
        peer.write_all(says).expect("writes");
        let start = Instant::now();
        let failure = loop {
            tcp.poll(&Context::new(Instant::now(), 64));
            if let Err(failure) = tcp.state(send.into()) {
                break failure;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "it still lives");
        };
        assert!(matches!(failure.fault(), Some(Fault::Protocol(_))), "{failure}");
    }
}

const CHILD: &str = "MCCS_TEST_FEW_DESCRIPTORS";

/// In a process of its own, whose limit is its own.
#[test]
fn out_of_descriptors_those_who_wait_get_in_later() {
    if std::env::var_os(CHILD).is_none() {
        let module = module_path!().split_once("::").expect("a crate's module").1;
        let name = format!("{module}::out_of_descriptors_those_who_wait_get_in_later");
        let mut child = Command::new(std::env::current_exe().expect("path"));
        let output = child.args(["--exact", &name]).env(CHILD, "1").output().expect("runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let mut victim = Victim::new();
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).expect("limit");
    setrlimit(Resource::RLIMIT_NOFILE, 64, hard).expect("limit");
    let mut hoard = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        hoard.push(file);
    }
    drop(hoard.pop());
    let peer = victim.stranger(&victim.hello(5).encode());
    let recv = victim.accept(5);
    for _ in 0..1000 {
        victim.poll();
    }
    assert_eq!(victim.tcp.state(recv.into()), Ok(FlowState::Connecting));
    let Progress::Idle { wake_at: Some(_) } = victim.poll() else { panic!("busy without descriptors") };
    hoard.clear();
    victim.skipped += Duration::from_secs(1);
    victim.until("connected", |tcp| tcp.state(recv.into()).expect("lives") == FlowState::Connected);
    drop(peer);
}
