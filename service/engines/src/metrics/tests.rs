use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;

use mccs_registry::Registry;
use mccs_runtime::{RuntimeOptions, Runtimes};
use mccs_tenants::AllSessions;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, connect, setsockopt, socket, sockopt};

use super::*;

struct Fixture {
    engine: MetricsEngine,
    address: SocketAddr,
    /// Moved on by hand: nothing here waits for a deadline.
    now: Instant,
}

impl Fixture {
    fn new() -> Self {
        let overseer = Overseer {
            host: "h".into(),
            since: Instant::now(),
            registry: Arc::new(Registry::default()),
            runtimes: Runtimes::new(RuntimeOptions {
                spin: Duration::ZERO,
                spin_while_waiting: Duration::ZERO,
                budget: 1,
            }),
            all_sessions: AllSessions::at_most(64),
        };
        let engine = MetricsEngine::new((Ipv4Addr::LOCALHOST, 0).into(), overseer).unwrap();
        let address = engine.address().unwrap();
        Fixture { engine, address, now: Instant::now() }
    }

    fn connect(&self) -> TcpStream {
        let socket = TcpStream::connect(self.address).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket
    }

    /// One for which the kernel keeps little.
    fn connect_greedy(&self) -> TcpStream {
        let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::empty(), None).unwrap();
        setsockopt(&socket, sockopt::RcvBuf, &4096).unwrap();
        let SocketAddr::V4(address) = self.address else { panic!("{}", self.address) };
        connect(socket.as_raw_fd(), &SockaddrIn::from(address)).unwrap();
        socket.into()
    }

    fn poll(&mut self) -> Progress {
        self.engine.poll(&Context::new(self.now, 64))
    }

    /// Polls until the engine has found nothing to do for a while: loopback delivers in no time, but not at once.
    fn settle(&mut self) -> Option<Instant> {
        let mut idle = 0;
        loop {
            match self.poll() {
                Progress::Idle { wake_at } if idle > 20 => return wake_at,
                Progress::Idle { .. } => {
                    idle += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
                _ => idle = 0,
            }
        }
    }

    fn claims(&self) -> Vec<Claim> {
        self.engine.connections.values().map(|connection| connection.keeps(self.now).0).collect()
    }

    fn refused(&self) -> u64 {
        self.engine.overseer.registry.refused.metrics.load(Ordering::Relaxed)
    }
}

fn taken(socket: &mut TcpStream) -> String {
    let mut text = Vec::new();
    let mut part = [0; 4096];
    loop {
        match socket.read(&mut part) {
            Ok(0) => break,
            Ok(count) => text.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error} after {} bytes", text.len()),
        }
    }
    String::from_utf8(text).unwrap()
}

const REQUEST: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n";

#[test]
fn a_request_in_parts_is_answered_when_it_is_whole() {
    let mut fixture = Fixture::new();
    let mut socket = fixture.connect();
    for byte in REQUEST.chunks(7) {
        assert_eq!(taken(&mut socket), "");
        socket.write_all(byte).unwrap();
        fixture.settle();
    }
    let answer = taken(&mut socket);
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains("\nmccs_info{host=\"h\""), "{answer}");
    // It is done with, and forgotten when the peer has closed.
    assert_eq!((fixture.engine.connections.len(), taken(&mut socket)), (1, String::new()));
    drop(socket);
    assert_eq!(fixture.settle(), None);
    assert_eq!((fixture.engine.connections.len(), fixture.refused()), (0, 0));
}

#[test]
fn of_requests_in_a_row_the_first_is_answered_and_the_rest_does_no_harm() {
    let mut fixture = Fixture::new();
    let mut socket = fixture.connect();
    socket.write_all(&REQUEST.repeat(1000)).unwrap();
    fixture.settle();
    let answer = taken(&mut socket);
    assert_eq!(answer.matches("HTTP/1.1 200 OK").count(), 1);
    fixture.now += CLOSE_WITHIN;
    fixture.settle();
    assert_eq!((fixture.engine.connections.len(), fixture.refused()), (0, 0));
}

#[test]
fn who_is_slow_is_given_up_and_nobody_waits_for_it() {
    let mut fixture = Fixture::new();
    let mut slow = fixture.connect();
    slow.write_all(b"GET /met").unwrap();
    assert_eq!(fixture.settle(), Some(fixture.now + ASK_WITHIN));
    let mut quick = fixture.connect();
    quick.write_all(REQUEST).unwrap();
    fixture.settle();
    assert!(taken(&mut quick).contains("200 OK"));
    fixture.now += ASK_WITHIN;
    assert_eq!(fixture.settle(), None);
    assert_eq!((fixture.engine.connections.len(), fixture.refused()), (0, 1));
    assert_eq!(slow.read(&mut [0]).unwrap(), 0);
}

#[test]
fn an_answer_that_is_not_taken_is_given_up() {
    let mut fixture = Fixture::new();
    // Longer than what the kernel keeps for a peer that does not read.
    fixture.engine.rendered = Some((fixture.now, "x".repeat(32 << 20).into()));
    let mut socket = fixture.connect();
    socket.write_all(REQUEST).unwrap();
    assert_eq!(fixture.settle(), Some(fixture.now + TAKE_WITHIN));
    // Reading on wakes the engine again.
    let some = taken(&mut socket).len();
    fixture.settle();
    assert!(some > 0 && !taken(&mut socket).is_empty());
    fixture.now += TAKE_WITHIN;
    assert_eq!(fixture.settle(), None);
    assert_eq!((fixture.engine.connections.len(), fixture.refused()), (0, 1));
}

#[test]
fn a_crowd_is_served_in_bounds() {
    let mut fixture = Fixture::new();
    let crowd: Vec<_> = (0..3 * CONNECTIONS_MAX).map(|_| fixture.connect()).collect();
    fixture.settle();
    assert_eq!(fixture.engine.connections.len(), CONNECTIONS_MAX);
    assert_eq!(fixture.refused(), 2 * CONNECTIONS_MAX as u64);
    // One that wants something gets it all the same.
    let mut socket = fixture.connect();
    socket.write_all(REQUEST).unwrap();
    fixture.settle();
    assert!(taken(&mut socket).contains("200 OK"));
    drop(crowd);
}

#[test]
fn a_scrape_on_its_way_is_not_ended_by_a_crowd() {
    let mut fixture = Fixture::new();
    let length = 32 << 20;
    fixture.engine.rendered = Some((fixture.now, "x".repeat(length).into()));
    let mut scraper = fixture.connect();
    scraper.write_all(REQUEST).unwrap();
    fixture.settle();
    let mut got = taken(&mut scraper);
    let crowd: Vec<_> = (0..3 * CONNECTIONS_MAX).map(|_| fixture.connect()).collect();
    while got.len() < length {
        fixture.settle();
        let more = taken(&mut scraper);
        let goes_on = !more.is_empty() || fixture.claims().contains(&Claim::Takes);
        assert!(goes_on, "ended after {} bytes", got.len());
        got.push_str(&more);
    }
    assert!(got.starts_with("HTTP/1.1 200 OK"));
    drop(crowd);
}

#[test]
fn who_does_not_take_its_answer_makes_room_for_who_asks() {
    let mut fixture = Fixture::new();
    fixture.engine.rendered = Some((fixture.now, "x".repeat(32 << 20).into()));
    let greedy: Vec<_> = std::iter::repeat_with(|| fixture.connect_greedy()).take(CONNECTIONS_MAX).collect();
    greedy.iter().for_each(|mut socket| socket.write_all(REQUEST).unwrap());
    while fixture.claims() != [Claim::Takes; CONNECTIONS_MAX] {
        fixture.settle();
    }
    while fixture.claims() != [Claim::Stalled; CONNECTIONS_MAX] {
        fixture.now += STALLED_AFTER;
        fixture.settle();
    }
    // It has said nothing yet when others come.
    let mut scraper = fixture.connect();
    fixture.settle();
    // Fewer than have stalled: now and then the kernel takes some more of an answer, much later.
    let others: Vec<_> = (0..CONNECTIONS_MAX / 2).map(|_| fixture.connect()).collect();
    fixture.settle();
    scraper.write_all(REQUEST).unwrap();
    fixture.settle();
    assert!(taken(&mut scraper).starts_with("HTTP/1.1 200 OK"));
    assert_eq!(fixture.refused(), 1 + others.len() as u64);
    drop((greedy, others));
}

#[test]
fn the_text_is_made_once_for_all_that_ask_at_a_time() {
    let mut fixture = Fixture::new();
    let made = fixture.engine.text(fixture.now);
    assert!(Arc::ptr_eq(&made, &fixture.engine.text(fixture.now + RENDER_EVERY / 2)));
    assert!(!Arc::ptr_eq(&made, &fixture.engine.text(fixture.now + RENDER_EVERY)));
}

#[test]
fn other_things_are_refused_with_a_status() {
    let mut fixture = Fixture::new();
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        ("POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", "405 Method Not Allowed"),
        ("\x16\x03\x01 hello", "400 Bad Request"),
    ] {
        let mut socket = fixture.connect();
        socket.write_all(request.as_bytes()).unwrap();
        fixture.settle();
        let answer = taken(&mut socket);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{request:?} gets {answer:?}");
    }
    assert_eq!(fixture.refused(), 1);
}
