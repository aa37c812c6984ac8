//! Operators who go, who wait, and who say too much.

use std::os::fd::AsFd;
use std::sync::Arc;

use mccs_control::{Caller, REQUEST_BYTES_MAX, chunks};
use mccs_ipc::handshake::{Socket, connect};
use mccs_runtime::{Mailbox, RuntimeOptions, Runtimes};
use mccs_tenants::AllSessions;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::EpollEvent;

use super::access::OBSERVERS_QUESTIONS_MAX;
use super::connection::{STEP_WITHIN, STEP_WITHIN_CROWDED};
use super::*;
use crate::proxy::ProxyMessage;
use crate::transport::TransportPool;

/// Nobody adds tenants.
struct NoDesk;

impl TenantDesk for NoDesk {
    fn add(&self, _: mccs_config::service::TenantConfig) -> ControlAnswer {
        ControlAnswer::NoTenant
    }

    fn remove(&self, _: &str) -> ControlAnswer {
        ControlAnswer::NoTenant
    }

    fn socket_of(&self, _: &str) -> Option<std::path::PathBuf> {
        None
    }
}

/// An engine whose questions to the proxy engine nobody answers.
struct Fixture {
    engine: ControlEngine,
    proxy: Mailbox<ProxyMessage>,
    directory: tempfile::TempDir,
    /// Stands still, however long a test takes: nobody is too slow.
    now: Instant,
}

impl Fixture {
    fn new() -> Self {
        Self::of(Access::Operators)
    }

    fn of(access: Access) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let (registry, proxy) = (Arc::new(Registry::default()), Mailbox::new(64));
        let runtimes =
            Runtimes::new(RuntimeOptions { spin: Duration::ZERO, spin_while_waiting: Duration::ZERO, budget: 1 });
        let transports = Arc::new(TransportPool::new(
            Arc::clone(&runtimes),
            0,
            Vec::new(),
            Box::new(|_| Ok(0)),
            Box::new(|| Ok(None)),
            Arc::clone(&registry.recorders),
        ));
        let overseer = Overseer {
            host: "h".into(),
            since: Instant::now(),
            registry,
            runtimes,
            all_sessions: AllSessions::at_most(64),
        };
        let listener = Listener::bind(&directory.path().join("c")).expect("listens");
        let controlled = Controlled {
            overseer,
            transports,
            proxy: proxy.sender(),
            gpus: None,
            controller: None,
            upgrades: None,
            tenants: Arc::new(NoDesk),
            tokens: Arc::default(),
            handover: Arc::default(),
        };
        let engine = ControlEngine::new(listener, access, controlled).expect("an engine");
        Fixture { engine, proxy, directory, now: Instant::now() }
    }

    fn path(&self) -> std::path::PathBuf {
        self.directory.path().join("c")
    }

    /// Polls until the engine has done what there is, and whether something it watches would wake it then.
    fn settle(&mut self, is_there: impl Fn(&ControlEngine) -> bool) -> bool {
        let cx = Context::new(self.now, 64);
        while !is_there(&self.engine) || self.engine.poll(&cx) == Progress::Busy {
            self.engine.poll(&cx);
        }
        let mut events = [EpollEvent::empty(); 4];
        self.engine.door.epoll.wait(&mut events, nix::sys::epoll::EpollTimeout::ZERO).expect("looks") > 0
    }
}

/// Connects on a thread of its own, as it takes the engine to be polled.
fn connected(fixture: &mut Fixture, and: impl FnOnce(&Socket) + Send) -> Socket {
    let path = fixture.path();
    let count = fixture.engine.connections.len();
    std::thread::scope(|scope| {
        let socket = scope.spawn(move || {
            let socket = connect(&path).expect("connected");
            and(&socket);
            socket
        });
        while !socket.is_finished() {
            fixture.settle(|engine| engine.connections.len() >= count);
        }
        socket.join().expect("a connection")
    })
}

fn ask(socket: &Socket, text: &[u8]) {
    for chunk in chunks(text) {
        // Refused before all of it was sent, or not taken yet.
        while let Err(SocketError::WouldBlock) = socket.send(&chunk, &[]) {
            std::thread::yield_now();
        }
    }
}

#[test]
fn who_goes_before_the_answer_comes_is_forgotten() {
    let mut fixture = Fixture::new();
    let text =
        serde_json::to_vec(&Call { request: ControlRequest::WhyStuck { communicator: 1 }, by: Caller::default() });
    let text = text.expect("a request");
    let socket = connected(&mut fixture, |socket| ask(socket, &text));
    let waits = |engine: &ControlEngine| engine.connections.values().any(|one| one.stage == Stage::Waiting);
    assert!(!fixture.settle(waits), "nothing is left to be done for it");
    drop(socket);
    assert!(!fixture.settle(|engine| engine.connections.is_empty()));
}

#[test]
fn observers_who_go_before_they_are_answered_take_no_more_of_other_engines() {
    let mut fixture = Fixture::of(Access::Observers(Vec::new()));
    let text =
        serde_json::to_vec(&Call { request: ControlRequest::WhyStuck { communicator: 1 }, by: Caller::default() });
    let text = text.expect("a request");
    let waits = |engine: &ControlEngine| engine.connections.values().any(|one| one.stage == Stage::Waiting);
    for _ in 0..OBSERVERS_QUESTIONS_MAX {
        let socket = connected(&mut fixture, |socket| ask(socket, &text));
        fixture.settle(waits);
        drop(socket);
        fixture.settle(|engine| engine.connections.is_empty());
    }
    let socket = connected(&mut fixture, |socket| ask(socket, &text));
    fixture.settle(|engine| engine.connections.is_empty());
    let (chunk, _) = socket.recv::<Chunk>().expect("received").expect("an answer");
    let answer: ControlAnswer = serde_json::from_slice(&chunk.bytes).expect("readable");
    assert!(matches!(&answer, ControlAnswer::Refused(why) if why.contains("of observers")), "{answer:?}");
    // A question that is dropped is answered.
    drop(fixture.proxy.pop().expect("a question"));
    let _socket = connected(&mut fixture, |socket| ask(socket, &text));
    fixture.settle(waits);
}

#[test]
fn who_finds_no_room_keeps_nobody_awake() {
    let mut fixture = Fixture::new();
    let mut sockets: Vec<_> = (0..CONNECTIONS_MAX).map(|_| connected(&mut fixture, |_| ())).collect();
    let path = fixture.path();
    let late = std::thread::spawn(move || connect(&path).expect("in the end"));
    let mut comes = [PollFd::new(fixture.engine.door.listener.as_fd(), PollFlags::POLLIN)];
    poll(&mut comes, PollTimeout::NONE).expect("somebody comes");
    assert!(!fixture.settle(|_| true), "who waits outside");
    sockets.pop();
    while !late.is_finished() {
        fixture.settle(|_| true);
    }
    late.join().expect("let in");
}

#[test]
fn who_says_nothing_keeps_nobody_out() {
    let mut fixture = Fixture::new();
    let silent: Vec<_> = (0..CONNECTIONS_MAX).map(|_| connected(&mut fixture, |_| ())).collect();
    let now = fixture.now;
    fixture.engine.poll(&Context::new(now, 64));
    assert_eq!(fixture.engine.connections.len(), CONNECTIONS_MAX, "they have only just come");
    let later = now + 2 * STEP_WITHIN_CROWDED;
    fixture.engine.poll(&Context::new(later, 64));
    assert!(fixture.engine.connections.is_empty());
    drop(silent);
    // One alone has longer.
    let one = connected(&mut fixture, |_| ());
    fixture.engine.poll(&Context::new(now + 2 * STEP_WITHIN_CROWDED, 64));
    assert_eq!(fixture.engine.connections.len(), 1);
    fixture.engine.poll(&Context::new(now + 2 * STEP_WITHIN, 64));
    assert!(fixture.engine.connections.is_empty());
    drop(one);
}

#[test]
fn a_request_that_is_too_long_is_refused_with_the_reason() {
    let mut fixture = Fixture::new();
    let socket = connected(&mut fixture, |socket| ask(socket, &vec![b' '; REQUEST_BYTES_MAX + 1]));
    fixture.settle(|engine| engine.connections.is_empty());
    assert!(socket.wait_readable(Duration::from_secs(600)));
    let (chunk, _) = socket.recv::<Chunk>().expect("received").expect("an answer");
    let answer: ControlAnswer = serde_json::from_slice(&chunk.bytes).expect("readable");
    let ControlAnswer::Refused(reason) = answer else { panic!("{answer:?}") };
    assert!(reason.contains("262144 bytes"), "{reason}");
}
