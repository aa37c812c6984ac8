//! Fuzz target: frames and messages of another host's service, malformed or at the wrong time.
//!
//! The input is a script: connect, break, raw bytes, messages with the right number and any content, what the proxy engine asks,
//! time that passes. Nothing panics, time does not stand still, and when all links are gone for good nothing is left.

#![no_main]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use mccs_ipc::types::{ErrorClass, UniqueId};
use mccs_runtime::Share;
use mccs_exchange::protocol::{
    AccountBody, AgreementMessage, Answer, ChangeBody, ChangeRequest, CommId, CommKey, ControlBody, Decision, Event, Exchange, Failure, Frame,
    Hello, Join, Life, LinkId, LinkTimes, Message, Name, Options, Output, Part, Payload, Refusal, Request, RingHost,
};

const INCARNATION: u64 = 1 << 40;
/// Incarnations of the other hosts; each greeting is a new one.
const PEER_INCARNATIONS: u64 = 1000;
const HOSTS: [&str; 3] = ["a", "b", "c"];

/// The script.
struct Script<'a>(&'a [u8]);

impl<'a> Script<'a> {
    fn number(&mut self) -> u64 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        u64::from(*first)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.number() % end
    }

    fn bytes(&mut self) -> &'a [u8] {
        let count = (self.number() as usize).min(self.0.len());
        let (bytes, rest) = self.0.split_at(count);
        self.0 = rest;
        bytes
    }

    fn host(&mut self) -> Name {
        name(HOSTS[self.below(3) as usize])
    }

    fn key(&mut self) -> CommKey {
        CommKey { tenant: name("t"), id: UniqueId([self.below(2) as u8; 16]) }
    }

    fn comm(&mut self) -> CommId {
        CommId { root: self.host(), incarnation: INCARNATION, number: self.below(3) }
    }

    fn attempt(&mut self) -> u64 {
        INCARNATION + self.below(4)
    }

    fn ring_host(&mut self) -> RingHost {
        let (name, attempt) = (self.host(), self.attempt());
        let incarnation = if name.as_str() == HOSTS[0] { INCARNATION } else { PEER_INCARNATIONS + self.below(8) };
        RingHost { name, incarnation, attempt }
    }

    fn ranks(&mut self) -> Vec<u32> {
        (0..=self.below(4)).map(|_| self.below(6) as u32).collect()
    }

    fn change(&mut self) -> ChangeBody {
        ChangeBody::new(self.bytes()).expect("short")
    }

    fn change_request(&mut self) -> ChangeRequest {
        ChangeRequest { comm: self.comm(), question: self.number(), body: self.change() }
    }

    fn answer(&mut self) -> Answer {
        Answer { comm: self.comm(), question: self.number(), body: self.account() }
    }

    fn account(&mut self) -> AccountBody {
        AccountBody::new(self.bytes()).expect("short")
    }

    fn payload(&mut self) -> Payload {
        Payload::new(self.bytes()).expect("short")
    }

    fn failure(&mut self) -> Failure {
        Failure::new(ErrorClass::Remote, "it was so").by_host(&self.host())
    }

    fn message(&mut self) -> Message {
        match self.below(18) {
            0 => {
                let (key, attempt, earlier) = (self.key(), self.attempt(), self.below(3) as u32);
                Message::Report { key, attempt, nranks: 1 + self.below(6) as u32, earlier, ranks: self.ranks() }
            }
            1 => Message::Withdraw { key: self.key(), attempt: self.attempt(), failure: self.failure() },
            2 => {
                let (key, attempt, comm) = (self.key(), self.attempt(), self.comm());
                let hosts = (0..=self.below(3)).map(|_| self.ring_host());
                Message::Ring { key, attempt, comm, hosts: hosts.collect() }
            }
            3 => Message::Refused { key: self.key(), attempt: self.attempt(), failure: self.failure() },
            4 => {
                let (key, attempt, origin, index) = (self.key(), self.attempt(), self.below(4) as u16, self.below(2));
                let ranks = self.ranks().into_iter().map(|rank| (rank, self.payload())).collect();
                let part = Part { origin, index: index as u32, last: self.below(2) == 1, ranks };
                Message::Block { key, attempt, part }
            }
            5 => Message::Ready { comm: self.comm() },
            6 => Message::Begin { comm: self.comm() },
            7 => Message::Failed { comm: self.comm(), failure: self.failure() },
            8 => Message::Left { comm: self.comm(), ranks: self.ranks() },
            9 => Message::Inquiry { comm: self.comm(), question: self.number() },
            10 => Message::Account(self.answer()),
            16 => Message::OperatorRequest(self.change_request()),
            17 => Message::OperatorResponse(self.answer()),
            15 => Message::Control { body: ControlBody::new(self.bytes()).expect("short") },
            kind => {
                let (comm, change) = (self.comm(), self.below(3));
                let message = match kind {
                    11 => AgreementMessage::Propose { change, window: 1 + self.below(8) as u32, body: self.change() },
                    12 => AgreementMessage::Prepared { change, launched: self.number() },
                    13 => AgreementMessage::Refuse { change, refusal: Refusal::own("no") },
                    _ => AgreementMessage::Decide { change, decision: Decision::Commit { cut: self.number() } },
                };
                Message::Agreement { comm, message }
            }
        }
    }

    fn request(&mut self) -> Request {
        match self.below(14) {
            0 | 1 => {
                let (key, root) = (self.key(), self.host());
                let (rank, nranks) = (self.below(6) as u32, 1 + self.below(6) as u32);
                Request::Join(Box::new(Join { share: Share::SERVICE, key, root, rank, nranks, payload: self.payload() }))
            }
            2 => Request::Withdraw { share: Share::SERVICE, key: self.key(), failure: self.failure() },
            3 => Request::Ready { comm: self.comm() },
            4 => Request::Fail { comm: self.comm(), failure: self.failure() },
            5 => Request::Leave { comm: self.comm(), ranks: self.ranks() },
            6 => Request::Close { comm: self.comm() },
            7 => {
                let (comm, timeout) = (self.comm(), Duration::from_secs(1));
                Request::Propose { comm, window: self.number() as u32, body: self.change(), timeout }
            }
            8 => Request::Inquire { comm: self.comm(), question: self.number() },
            9 => Request::Account { to: self.host(), answer: self.answer() },
            10 => Request::Tell { to: self.host(), body: ControlBody::new(self.bytes()).expect("short") },
            11 => Request::OperatorRequest(self.change_request()),
            12 => Request::OperatorResponse { to: self.host(), answer: self.answer() },
            _ => Request::Prepared { comm: self.comm(), change: self.below(3), launched: self.number() },
        }
    }
}

fn name(text: &str) -> Name {
    Name::new(text).expect("a name")
}

/// State of the other side of a link.
#[derive(Default)]
struct Peer {
    said: u64,
    heard: u64,
}

struct Harness {
    exchange: Exchange,
    links: BTreeMap<LinkId, Peer>,
    next_link: u64,
    now: Instant,
    begun: Vec<CommId>,
}

impl Harness {
    fn new() -> Self {
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let times = LinkTimes { keep_alive: second, link_timeout: 3 * second, host_timeout: 5 * second };
        let options = Options {
            own: name("a"),
            hosts: HOSTS.map(name).to_vec(),
            incarnation: INCARNATION,
            times,
            init_timeout: 10 * second,
        };
        let exchange = Exchange::new(&options, now);
        Harness { exchange, links: BTreeMap::new(), next_link: 0, now, begun: Vec::new() }
    }

    fn drain(&mut self) {
        while let Some(output) = self.exchange.poll_output() {
            match output {
                Output::Send { link, frame } => {
                    if let (Ok(Frame::Data { seq, body, .. }), Some(peer)) =
                        (Frame::decode(&frame), self.links.get_mut(&link))
                    {
                        assert!(Message::decode(body).is_ok(), "it says what it would not hear");
                        peer.heard = seq;
                    }
                }
                Output::Close { link, .. } => drop(self.links.remove(&link)),
                Output::Event(Event::Complete { comm, .. }) => self.begun.push(comm),
                Output::Event(_) | Output::Greeted { .. } | Output::GaveUp { .. } => {}
            }
        }
    }

    fn connect(&mut self, script: &mut Script<'_>) {
        let (host, link) = (name(HOSTS[1 + script.below(2) as usize]), LinkId(self.next_link));
        self.next_link += 1;
        self.links.insert(link, Peer::default());
        self.exchange.link_up(&host, link, self.now);
        self.drain();
        // Every connection is of a new life: what was said before is void, and the numbers are known.
        let life = Life { incarnation: PEER_INCARNATIONS + self.next_link, generation: 0 };
        self.exchange.receive(link, &Hello { name: host, life, known: None }.encode(), self.now);
    }

    fn say(&mut self, link: LinkId, body: &[u8]) {
        let Some(peer) = self.links.get_mut(&link) else { return };
        peer.said += 1;
        let mut frame = vec![b'D'];
        frame.extend_from_slice(&peer.said.to_le_bytes());
        frame.extend_from_slice(&peer.heard.to_le_bytes());
        frame.extend_from_slice(body);
        self.exchange.receive(link, &frame, self.now);
    }

    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        let mut steps = 0;
        while let Some(at) = self.exchange.next_deadline().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.exchange.tick(self.now);
            self.drain();
            steps += 1;
            assert!(steps < 10_000, "time stands still");
        }
        self.now = end;
    }
}

fuzz_target!(|data: &[u8]| {
    if let Ok(message) = Message::decode(data) {
        assert_eq!(Message::decode(&message.encode()), Ok(message));
    }
    let (mut script, mut harness) = (Script(data), Harness::new());
    while !script.0.is_empty() {
        let links: Vec<_> = harness.links.keys().copied().collect();
        let link = links.get(script.below(links.len().max(1) as u64) as usize).copied();
        match (script.below(16), link) {
            (0 | 1, _) | (_, None) => harness.connect(&mut script),
            (2, Some(link)) => {
                harness.links.remove(&link);
                harness.exchange.link_down(link, harness.now);
            }
            (3, Some(link)) => harness.exchange.receive(link, script.bytes(), harness.now),
            (4, Some(link)) => harness.say(link, script.bytes()),
            (5, _) => harness.pass(Duration::from_millis(100 * script.number())),
            (6..=9, _) => harness.exchange.request(script.request(), harness.now),
            (_, Some(link)) => harness.say(link, &script.message().encode()),
        }
        harness.drain();
    }
    for link in std::mem::take(&mut harness.links).into_keys() {
        harness.exchange.link_down(link, harness.now);
    }
    for comm in std::mem::take(&mut harness.begun) {
        harness.exchange.request(Request::Close { comm }, harness.now);
    }
    // Set-ups of which a root here waits for a host's proxy end twice: joining, and getting ready.
    harness.pass(Duration::from_secs(60));
    let held = harness.exchange.held();
    assert_eq!((held.members, held.roots, held.comms, held.backlog), (0, 0, 0, 0), "{held:?}");
});
