//! Elections among simulated hosts, under a seed: messages are late or lost, hosts are cut off, die, start anew and stand still, and
//! clocks run apart. `MCCS_SEED=n` runs that seed alone, `MCCS_SEEDS=n` so many.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use mccs_model::Name;
use rand::rngs::StdRng;
use rand::{RngCore as _, SeedableRng as _};

use super::candidate::{Candidate, Claim};
use super::voter::{Vote, Voter};

const LEASE: Duration = Duration::from_secs(5);
const HOST_TIMEOUT: Duration = Duration::from_secs(10);
const STORM: Duration = Duration::from_secs(120);
const CALM: Duration = Duration::from_secs(90);
/// 2020, about.
const UNIX_NS: u64 = 1_600_000_000_000_000_000;

enum Event {
    /// A host looks whether something is due.
    Wake(usize),
    Claim {
        from: usize,
        to: usize,
        term: u64,
        question: u64,
    },
    Vote {
        from: usize,
        to: usize,
        term: u64,
        question: u64,
        vote: Vote,
    },
    /// A host finds out that another one is there, or not.
    Sees {
        host: usize,
        other: usize,
        is_there: bool,
    },
    /// Something befalls the network or a host.
    Misfortune,
}

struct Host {
    name: Name,
    /// Its clock runs so much faster.
    rate: f64,
    voter: Voter,
    candidate: Option<Candidate>,
    /// Number of its process: messages to an earlier one are lost.
    is_alive: bool,
    /// It stands still until then.
    still_until: Duration,
    /// The office as it knows it, and what was noted of it.
    noted: Option<(u64, Instant)>,
}

struct World {
    rng: StdRng,
    base: Instant,
    now: Duration,
    events: BTreeMap<(Duration, u64), Event>,
    sequence: u64,
    hosts: Vec<Host>,
    ncandidates: usize,
    /// Pairs that do not reach each other.
    cut: BTreeSet<(usize, usize)>,
    /// Hosts that act, in which term, from when to when, by the true clock.
    held: Vec<(usize, u64, Duration, Duration)>,
}

impl World {
    fn random(&mut self, below: u64) -> u64 {
        self.rng.next_u64() % below
    }

    fn at(&mut self, delay: Duration, event: Event) {
        self.sequence += 1;
        self.events.insert((self.now + delay, self.sequence), event);
    }

    /// Time of a host's clock.
    fn clock(&self, host: usize) -> Instant {
        self.base + self.now.mul_f64(self.hosts[host].rate)
    }

    fn is_cut(&self, one: usize, other: usize) -> bool {
        self.cut.contains(&(one.min(other), one.max(other))) || !self.hosts[one].is_alive || !self.hosts[other].is_alive
    }

    fn make(&mut self, host: usize) -> (Voter, Option<Candidate>) {
        let now = self.clock(host);
        let names: Vec<Name> = self.hosts[..self.ncandidates].iter().map(|host| host.name.clone()).collect();
        let own = &self.hosts[host].name;
        let candidate =
            (host < self.ncandidates).then(|| Candidate::new(own, &names, self.hosts.len(), LEASE, HOST_TIMEOUT, now));
        let mut voter = Voter::new(LEASE);
        voter.start(now);
        (voter, candidate)
    }

    /// A message's way: a few milliseconds, sometimes seconds, and sometimes it has none.
    fn send(&mut self, from: usize, to: usize, event: Event) {
        let is_storm = self.now < STORM;
        if self.is_cut(from, to) || is_storm && self.random(50) == 0 {
            return;
        }
        let below = if is_storm && self.random(20) == 0 { 4_000 } else { 20 };
        let delay = if from == to { 0 } else { 1 + self.random(below) };
        self.at(Duration::from_millis(delay), event);
    }

    fn note(&mut self, host: usize) {
        let now = self.clock(host);
        let Some(candidate) = &self.hosts[host].candidate else { return };
        let Some(office) = candidate.office(now) else { return };
        if self.hosts[host].noted.replace((office.term, office.until)) == Some((office.term, office.until)) {
            return;
        }
        let until = office.until.saturating_duration_since(self.base).div_f64(self.hosts[host].rate);
        self.held.push((host, office.term, self.now, until));
    }

    fn poll(&mut self, host: usize) {
        let now = self.clock(host);
        let unix_ns = UNIX_NS + self.now.as_nanos() as u64;
        let claim = self.hosts[host].candidate.as_mut().and_then(|candidate| candidate.poll(unix_ns, now));
        if let Some(Claim { hosts, term, question }) = claim {
            for name in hosts {
                let to = self.hosts.iter().position(|host| host.name == name).expect("a host");
                self.send(host, to, Event::Claim { from: host, to, term, question });
            }
        }
    }

    fn misfortune(&mut self) {
        if self.now >= STORM {
            return;
        }
        let nhosts = self.hosts.len() as u64;
        let (one, other) = (self.random(nhosts) as usize, self.random(nhosts) as usize);
        match self.random(8) {
            // A part of the hosts is cut off from the others.
            0 | 1 => {
                let part = self.rng.next_u64();
                for (a, b) in (0..self.hosts.len()).flat_map(|a| (0..a).map(move |b| (b, a))) {
                    if (part >> a) & 1 != (part >> b) & 1 {
                        self.cut(a, b);
                    }
                }
            }
            2 if one != other => self.cut(one, other),
            3 | 4 => self.mend(),
            5 => self.hosts[one].still_until = self.now + Duration::from_millis(self.random(12_000)),
            6 if self.hosts[one].is_alive => {
                self.hosts[one].is_alive = false;
                for other in 0..self.hosts.len() {
                    self.tell(one, other, false);
                }
            }
            7 => self.start(one),
            _ => {}
        }
        let pause = Duration::from_millis(self.random(8_000));
        self.at(pause, Event::Misfortune);
    }

    fn start(&mut self, host: usize) {
        if !self.hosts[host].is_alive {
            self.hosts[host].is_alive = true;
            (self.hosts[host].voter, self.hosts[host].candidate) = self.make(host);
            self.hosts[host].noted = None;
            for other in 0..self.hosts.len() {
                self.tell(host, other, true);
            }
        }
    }

    fn cut(&mut self, one: usize, other: usize) {
        self.cut.insert((one.min(other), one.max(other)));
        self.tell(one, other, false);
    }

    fn mend(&mut self) {
        for (one, other) in std::mem::take(&mut self.cut) {
            self.tell(one, other, true);
        }
    }

    /// Both find out, each in its time.
    fn tell(&mut self, one: usize, other: usize, is_there: bool) {
        for (host, other) in [(one, other), (other, one)].into_iter().filter(|(host, other)| host != other) {
            let delay = if is_there { Duration::from_millis(self.random(1000)) } else { HOST_TIMEOUT };
            self.at(delay, Event::Sees { host, other, is_there });
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Wake(host) => {
                if self.now >= self.hosts[host].still_until && self.hosts[host].is_alive {
                    self.poll(host);
                    self.note(host);
                }
                let pause = Duration::from_millis(50 + self.random(20));
                self.at(pause, Event::Wake(host));
            }
            Event::Claim { to: host, .. } | Event::Vote { to: host, .. } if self.now < self.hosts[host].still_until => {
                let until = self.hosts[host].still_until - self.now;
                self.at(until, event);
            }
            Event::Claim { from, to, term, question } if self.hosts[to].is_alive => {
                let (now, name) = (self.clock(to), self.hosts[from].name.clone());
                let vote = self.hosts[to].voter.claim(&name, term, 0, now);
                self.send(to, from, Event::Vote { from: to, to: from, term, question, vote });
            }
            Event::Vote { from, to, term, question, vote } if self.hosts[to].is_alive => {
                let (now, name) = (self.clock(to), self.hosts[from].name.clone());
                let candidate = self.hosts[to].candidate.iter_mut();
                candidate.for_each(|candidate| candidate.voted(&name, question, term, &vote, now));
                self.note(to);
            }
            Event::Claim { .. } | Event::Vote { .. } => {}
            Event::Sees { host, other, is_there } => {
                // Later changes are told by another event.
                if is_there != self.is_cut(host, other) && self.hosts[host].is_alive {
                    let (now, name) = (self.clock(host), self.hosts[other].name.clone());
                    if let Some(candidate) = &mut self.hosts[host].candidate {
                        if is_there { candidate.met(&name) } else { candidate.lost(&name, now) }
                    }
                }
            }
            Event::Misfortune => self.misfortune(),
        }
    }
}

/// Runs an election. Returns how many terms there were.
fn run(seed: u64) -> usize {
    let mut rng = StdRng::seed_from_u64(seed);
    let nhosts = [1, 2, 3, 3, 4, 5, 5, 7][rng.next_u64() as usize % 8];
    let ncandidates = 1 + rng.next_u64() as usize % nhosts;
    let base = Instant::now();
    let hosts = (0..nhosts).map(|number| Host {
        name: Name::new(&format!("host-{number}")).expect("a name"),
        rate: 1.0 + (rng.next_u64() % 90) as f64 / 1000.0 - 0.045,
        voter: Voter::new(LEASE),
        candidate: None,
        is_alive: true,
        still_until: Duration::ZERO,
        noted: None,
    });
    let hosts = hosts.collect();
    let (now, events) = (Duration::from_secs(1), BTreeMap::new());
    let (cut, held) = (BTreeSet::new(), Vec::new());
    let mut world = World { rng, base, now, events, sequence: 0, hosts, ncandidates, cut, held };
    for host in 0..nhosts {
        (world.hosts[host].voter, world.hosts[host].candidate) = world.make(host);
        world.at(Duration::ZERO, Event::Wake(host));
        (0..host).for_each(|other| world.tell(host, other, true));
    }
    let first = Duration::from_secs(world.random(40));
    world.at(first, Event::Misfortune);
    let mut is_calm = false;
    while let Some(((at, _), event)) = world.events.pop_first() {
        world.now = at;
        if at >= STORM && !std::mem::replace(&mut is_calm, at >= STORM) {
            (0..nhosts).for_each(|host| world.hosts[host].still_until = Duration::ZERO);
            (0..nhosts).for_each(|host| world.start(host));
            world.mend();
        }
        if at >= STORM + CALM {
            break;
        }
        world.handle(event);
    }
    let held = &world.held;
    for (place, (host, term, from, until)) in held.iter().enumerate() {
        for (other, other_term, other_from, other_until) in &held[..place] {
            assert!(host == other || term != other_term, "seed {seed}: a term has one holder: {held:?}");
            let is_apart = until <= other_from || other_until <= from;
            assert!(host == other || is_apart, "seed {seed}: {host} and {other} act at once");
            assert!(host == other || term > other_term, "seed {seed}: terms ascend: {other_term} {term}");
        }
    }
    let last = held.iter().map(|(.., until)| *until).max().unwrap_or_default();
    assert!(last >= STORM + CALM, "seed {seed}: once all is calm somebody is in office to the end, not to {last:?}");
    held.iter().map(|(_, term, ..)| term).collect::<BTreeSet<_>>().len()
}

#[test]
fn no_two_act_at_once_and_somebody_does_once_most_hosts_are_there() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let terms: usize = match number("MCCS_SEED") {
        Some(seed) => run(seed),
        None => (0..number("MCCS_SEEDS").unwrap_or(300)).map(run).sum(),
    };
    assert!(terms > 0);
}

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

#[test]
fn a_voter_holds_to_one_candidate_for_a_lease_and_to_no_lesser_term() {
    let start = Instant::now();
    let mut voter = Voter::new(LEASE);
    let (a, b) = (name("a"), name("b"));
    assert_eq!(voter.claim(&a, 5, 0, start + LEASE), Vote::Started, "it was not started");
    voter.start(start);
    assert_eq!(voter.claim(&a, 5, 0, start), Vote::Started);
    let now = start + LEASE;
    assert_eq!(voter.claim(&a, 5, 9, now), Vote::Later { term: 9 }, "it obeys a greater one");
    assert_eq!(voter.claim(&a, 10, 9, now), Vote::Granted);
    assert_eq!(voter.claim(&b, 11, 9, now + LEASE / 2), Vote::Held { by: "a".into() });
    assert_eq!(voter.claim(&a, 10, 10, now + LEASE / 2), Vote::Granted, "again");
    assert_eq!(voter.claim(&b, 10, 10, now + LEASE * 2), Vote::Later { term: 10 }, "a term is one candidate's");
    assert_eq!(voter.claim(&b, 11, 10, now + LEASE * 2), Vote::Granted);
    assert_eq!(voter.claim(&a, 12, 11, now + LEASE * 2), Vote::Held { by: "b".into() });
}

#[test]
fn of_two_hosts_one_alone_is_never_elected_and_says_nothing_of_a_vote_of_its_own() {
    let (own, start) = (name("a"), Instant::now());
    let mut candidate = Candidate::new(&own, &[name("a"), name("b")], 2, LEASE, HOST_TIMEOUT, start);
    let claim = candidate.poll(UNIX_NS, start).expect("it is the first");
    assert_eq!((claim.hosts, claim.term), (vec![own.clone()], UNIX_NS));
    candidate.voted(&own, claim.question, claim.term, &Vote::Granted, start);
    assert_eq!((candidate.office(start), candidate.term()), (None, None));
    candidate.voted(&name("b"), claim.question, claim.term, &Vote::Granted, start);
    assert_eq!(candidate.office(start).map(|office| office.term), Some(UNIX_NS));
    // A vote for a question that was never asked, or for another term, is none.
    let mut other = Candidate::new(&own, &[name("a")], 1, LEASE, HOST_TIMEOUT, start);
    let claim = other.poll(UNIX_NS, start).expect("it is the first");
    other.voted(&own, claim.question + 1, claim.term, &Vote::Granted, start);
    other.voted(&own, claim.question, claim.term + 1, &Vote::Granted, start);
    assert_eq!(other.office(start), None);
}
