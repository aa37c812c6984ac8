//! World of the exchange simulation: hosts, a network between them, jobs on them, and misfortune.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, Instant};

use mccs_exchange::protocol::{Counters, Exchange, Failure, Held, Join, LinkTimes, Name, Options, Output, Request};
use mccs_runtime::Share;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use super::ledger::{Job, Ledger, State};
use super::network::{HostIndex, Network, Time};
use super::proxy::Manners;
use super::talks::Talks;

/// Times of all simulated hosts.
pub const TIMES: LinkTimes = LinkTimes {
    keep_alive: Duration::from_secs(2),
    link_timeout: Duration::from_secs(5),
    host_timeout: Duration::from_secs(10),
};
/// Time that ranks have to join.
pub const INIT_TIMEOUT: Duration = Duration::from_secs(20);
/// After this everything has ended that can: both phases of a set-up, and the news of a host that was lost in the end.
pub const ALL_OVER: Duration = Duration::from_secs(2 * 20 + 2 * 10);

/// More than this at one instant is a host that never has done what is due.
const AT_ONCE_MAX: u32 = 1 << 18;

/// Something that goes wrong.
#[derive(Debug, Clone, Copy)]
pub enum Misfortune {
    /// A connection breaks; its ends are told, or find out.
    Drop {
        /// Whether they are told.
        told: bool,
    },
    /// Two hosts cannot reach each other.
    Cut(HostIndex, HostIndex),
    /// All cuts end.
    Heal,
    /// A host's service ends without a word.
    Crash(HostIndex),
    /// It starts again.
    Restart(HostIndex),
    /// Two hosts connect although they are connected.
    Duplicate(HostIndex, HostIndex),
    /// A host does nothing for a while, then goes on.
    Pause(HostIndex, Duration),
    /// Something that is no frame arrives on a connection.
    Garbage,
}

pub(super) enum Happening {
    Accept { connection: usize, end: usize },
    Arrive { connection: usize, end: usize },
    Broken { connection: usize, end: usize },
    Connect { low: HostIndex, high: HostIndex },
    Tick { host: HostIndex },
    Join { job: usize, rank: u32, nranks: u32 },
    Ask { host: HostIndex, life: u64, request: Request },
    Misfortune(Misfortune),
}

struct Host {
    exchange: Option<Exchange>,
    life: u64,
    tick_at: Option<Time>,
    paused_until: Time,
}

/// See the module's documentation.
pub struct World {
    /// Now.
    pub now: Time,
    epoch: Instant,
    pub(super) rng: StdRng,
    pub(super) names: Vec<Name>,
    hosts: Vec<Host>,
    pub(super) network: Network,
    happenings: BTreeMap<(Time, u64), Happening>,
    next_happening: u64,
    /// The jobs.
    pub jobs: Vec<Job>,
    pub(super) ledger: Ledger,
    pub(super) manners: Manners,
    pub(super) talks: Talks,
    trace: DefaultHasher,
    /// A host was given up or has crashed.
    has_lost: bool,
    /// Only what is to be borne happens.
    pub nobody_may_be_lost: bool,
    /// Happenings since time went on.
    happened_at_once: u32,
    /// Says all that happens to hosts and is told by them.
    pub is_verbose: bool,
    /// When the first host was told that each job is complete, and the last.
    pub completed: BTreeMap<usize, (Time, Time)>,
}

impl World {
    /// `hosts` services that have just started.
    #[must_use]
    pub fn new(seed: u64, hosts: usize, delay: (Duration, Duration), manners: Manners) -> Self {
        let names: Vec<_> = (0..hosts).filter_map(|i| Name::new(&format!("h{i:03}"))).collect();
        let mut world = World {
            now: Time::ZERO,
            epoch: Instant::now(),
            rng: StdRng::seed_from_u64(seed),
            names,
            hosts: Vec::new(),
            network: Network::new(delay),
            happenings: BTreeMap::new(),
            next_happening: 0,
            jobs: Vec::new(),
            ledger: Ledger::default(),
            manners,
            talks: Talks::default(),
            trace: DefaultHasher::new(),
            has_lost: false,
            nobody_may_be_lost: false,
            happened_at_once: 0,
            is_verbose: false,
            completed: BTreeMap::new(),
        };
        for host in 0..hosts {
            world.hosts.push(Host { exchange: None, life: 0, tick_at: None, paused_until: Time::ZERO });
            world.restart(host);
        }
        world
    }

    fn restart(&mut self, host: HostIndex) {
        let incarnation = self.rng.random();
        let (own, hosts) = (self.names[host].clone(), self.names.clone());
        let options = Options { own, hosts, incarnation, times: TIMES, init_timeout: INIT_TIMEOUT };
        let exchange = Exchange::new(&options, self.epoch + self.now);
        let life = self.hosts[host].life + 1;
        self.hosts[host] = Host { exchange: Some(exchange), life, tick_at: None, paused_until: Time::ZERO };
        for other in (0..self.hosts.len()).filter(|other| *other != host) {
            self.connect_soon(host, other);
        }
    }

    /// The host's exchange.
    ///
    /// # Panics
    /// If it has crashed.
    #[must_use]
    pub fn exchange(&self, host: HostIndex) -> &Exchange {
        self.hosts[host].exchange.as_ref().expect("a host that lives")
    }

    /// Whether one host can reach another.
    #[must_use]
    pub fn have_met(&self, host: HostIndex, other: HostIndex) -> bool {
        self.exchange(host).is_up(&self.names[other])
    }

    /// Counters of all hosts.
    #[must_use]
    pub fn counters(&self) -> Vec<Counters> {
        self.hosts.iter().filter_map(|host| host.exchange.as_ref().map(Exchange::counters)).collect()
    }

    /// A number that any difference between two runs would change.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.trace.finish()
    }

    pub(super) fn at(&mut self, time: Time, happening: Happening) {
        self.happenings.insert((time, self.next_happening), happening);
        self.next_happening += 1;
    }

    pub(super) fn soon(&mut self, most: Duration) -> Time {
        let most = most.as_micros() as u64;
        self.now + Duration::from_micros(if most == 0 { 0 } else { self.rng.random_range(0..most) })
    }

    pub(super) fn ask_at(&mut self, at: Time, host: HostIndex, request: Request) {
        let life = self.hosts[host].life;
        self.at(at, Happening::Ask { host, life, request });
    }

    fn connect_soon(&mut self, a: HostIndex, b: HostIndex) {
        let at = self.soon(Duration::from_millis(300));
        self.at(at, Happening::Connect { low: a.min(b), high: a.max(b) });
    }

    /// A job whose ranks join within a time.
    pub fn start(&mut self, job: Job, within: Duration) {
        self.jobs.push(job);
        self.start_again(self.jobs.len() - 1, within);
    }

    /// All ranks of a job that was started before join.
    pub fn start_again(&mut self, number: usize, within: Duration) {
        let nranks = self.jobs[number].placement.len() as u32;
        for rank in 0..nranks {
            let at = self.soon(within);
            self.at(at, Happening::Join { job: number, rank, nranks });
        }
    }

    /// A job of which one rank never joins.
    pub fn start_missing(&mut self, job: Job, missing: u32, within: Duration) {
        let (number, nranks) = (self.jobs.len(), job.placement.len() as u32);
        self.jobs.push(job);
        for rank in (0..nranks).filter(|rank| *rank != missing) {
            let at = self.soon(within);
            self.at(at, Happening::Join { job: number, rank, nranks });
        }
    }

    /// A job of which only one rank joins.
    pub fn start_only(&mut self, job: Job, rank: u32, within: Duration) {
        let (number, nranks, at) = (self.jobs.len(), job.placement.len() as u32, self.soon(within));
        self.jobs.push(job);
        self.at(at, Happening::Join { job: number, rank, nranks });
    }

    /// A job of which some rank never joins, joins twice, or has another idea of how many there are.
    pub fn start_wrong(&mut self, job: Job, within: Duration) {
        let (number, nranks) = (self.jobs.len(), job.placement.len() as u32);
        let (wrong, how) = (self.rng.random_range(0..nranks), self.rng.random_range(0..3));
        for rank in (0..nranks).filter(|rank| how != 0 || *rank != wrong) {
            let at = self.soon(within);
            let nranks = if how == 1 && rank == wrong { nranks + 1 } else { nranks };
            self.at(at, Happening::Join { job: number, rank, nranks });
        }
        if how == 2 {
            let at = self.soon(within);
            self.at(at, Happening::Join { job: number, rank: wrong, nranks });
        }
        self.jobs.push(job);
    }

    /// Misfortune at a time.
    pub fn strike(&mut self, at: Time, misfortune: Misfortune) {
        self.at(at, Happening::Misfortune(misfortune));
    }

    /// Runs until `end`, or until nothing happens any more.
    pub fn run_until(&mut self, end: Time) {
        while let Some(entry) = self.happenings.first_entry() {
            if entry.key().0 > end {
                break;
            }
            let ((at, _), happening) = entry.remove_entry();
            self.happened_at_once = if at > self.now { 0 } else { self.happened_at_once + 1 };
            if self.happened_at_once > AT_ONCE_MAX {
                self.ledger
                    .complain(format!("time stands still at {at:?}: a host has something to do that does not end"));
                self.happenings.clear();
                break;
            }
            self.now = at;
            self.happen(happening);
        }
        self.now = end;
    }

    /// Host that is concerned, if that is one.
    fn host_of(&self, happening: &Happening) -> Option<HostIndex> {
        match happening {
            Happening::Accept { connection, end }
            | Happening::Arrive { connection, end }
            | Happening::Broken { connection, end } => Some(self.network.connection(*connection).ends[*end].0),
            Happening::Tick { host } | Happening::Ask { host, .. } => Some(*host),
            Happening::Join { job, rank, .. } => Some(self.jobs[*job].placement[*rank as usize]),
            Happening::Connect { .. } | Happening::Misfortune(_) => None,
        }
    }

    fn happen(&mut self, happening: Happening) {
        if let Some(until) = self.host_of(&happening).map(|host| self.hosts[host].paused_until)
            && until > self.now
        {
            return self.at(until, happening);
        }
        match happening {
            Happening::Accept { connection, end } => {
                let ends = self.network.connection(connection).ends;
                let ((host, life), (peer, _)) = (ends[end], ends[1 - end]);
                if self.hosts[host].life == life && self.network.accept(connection, end) {
                    let (link, name) = (self.network.connection(connection).links[end], self.names[peer].clone());
                    self.input(host, |exchange, now| exchange.link_up(&name, link, now));
                }
            }
            Happening::Arrive { connection, end } => self.arrive(connection, end),
            Happening::Broken { connection, end } => {
                let (host, life) = self.network.connection(connection).ends[end];
                let link = self.network.connection(connection).links[end];
                if self.hosts[host].life == life {
                    self.input(host, |exchange, now| exchange.link_down(link, now));
                }
            }
            Happening::Connect { low, high } => self.connect(low, high, false),
            Happening::Tick { host } => {
                if self.hosts[host].tick_at.is_some_and(|at| at <= self.now) {
                    self.hosts[host].tick_at = None;
                    self.input(host, Exchange::tick);
                }
            }
            Happening::Join { job, rank, nranks } => self.join(job, rank, nranks),
            Happening::Ask { host, life, request } => {
                if self.hosts[host].life == life {
                    self.say(format_args!("host {host} asks {request:?}"));
                    self.note_request(host, &request);
                    self.input(host, |exchange, now| exchange.request(request, now));
                }
            }
            Happening::Misfortune(misfortune) => self.befall(misfortune),
        }
    }

    fn arrive(&mut self, connection: usize, end: usize) {
        let (host, life) = self.network.connection(connection).ends[end];
        let link = self.network.connection(connection).links[end];
        if !self.network.connection(connection).up[end] {
            // Nobody reads yet; or never will.
            if self.network.open().contains(&connection) {
                self.at(self.now + Duration::from_millis(1), Happening::Arrive { connection, end });
            }
            return;
        }
        if let Some(frame) = self.network.arrive(connection, end)
            && self.hosts[host].life == life
        {
            (self.now, host, &frame).hash(&mut self.trace);
            self.input(host, |exchange, now| exchange.receive(link, &frame, now));
        }
    }

    fn connect(&mut self, low: HostIndex, high: HostIndex, even_twice: bool) {
        if self.network.are_connected(low, high) && !even_twice {
            return;
        }
        let alive = |host: HostIndex| self.hosts[host].exchange.is_some();
        if self.network.is_cut(low, high) || !alive(low) || !alive(high) {
            // A living host tries again; a restart tries anyway.
            if alive(low) && alive(high) {
                self.connect_soon(low, high);
            }
            return;
        }
        let ends = [(low, self.hosts[low].life), (high, self.hosts[high].life)];
        let known_at = [0, 1].map(|_| self.now + self.network.some_delay(&mut self.rng));
        let connection = self.network.connect(ends, known_at);
        for (end, at) in known_at.into_iter().enumerate() {
            self.at(at, Happening::Accept { connection, end });
        }
    }

    fn join(&mut self, number: usize, rank: u32, nranks: u32) {
        let job = self.jobs[number].clone();
        let host = job.placement[rank as usize];
        if self.hosts[host].exchange.is_none() {
            return;
        }
        self.ledger.join(number, host, rank);
        let root = self.names[job.placement[0]].clone();
        let share = Share { tenant: number as u32, weight: 1 };
        let join = Join { share, key: job.key.clone(), root, rank, nranks, payload: job.payload(rank) };
        self.input(host, |exchange, now| exchange.request(Request::Join(Box::new(join)), now));
    }

    fn say(&self, what: std::fmt::Arguments<'_>) {
        if self.is_verbose {
            println!("{:>12.6} {what}", self.now.as_secs_f64());
        }
    }

    fn befall(&mut self, misfortune: Misfortune) {
        self.say(format_args!("{misfortune:?}"));
        match misfortune {
            Misfortune::Drop { told } => {
                let open = self.network.open();
                let Some(connection) = open.choose(&mut self.rng).copied() else { return };
                self.network.close(connection);
                for end in [0, 1].into_iter().filter(|_| told) {
                    let at = self.soon(Duration::from_millis(50));
                    self.at(at, Happening::Broken { connection, end });
                }
                let [(a, _), (b, _)] = self.network.connection(connection).ends;
                self.connect_soon(a, b);
            }
            Misfortune::Cut(a, b) => {
                self.network.cut(a, b);
                self.connect_soon(a, b);
            }
            Misfortune::Heal => self.network.heal(),
            Misfortune::Crash(host) => {
                self.hosts[host].exchange = None;
                self.hosts[host].life += 1;
                self.ledger.crash(host);
                self.has_lost = true;
                for connection in self.network.open() {
                    let end = self.network.connection(connection).ends.iter().position(|(other, _)| *other == host);
                    let Some(end) = end else { continue };
                    self.network.close(connection);
                    if self.rng.random_bool(0.5) {
                        let at = self.soon(Duration::from_millis(50));
                        self.at(at, Happening::Broken { connection, end: 1 - end });
                    }
                }
            }
            Misfortune::Restart(host) => {
                if self.hosts[host].exchange.is_none() {
                    self.restart(host);
                }
            }
            Misfortune::Duplicate(a, b) => self.connect(a.min(b), a.max(b), true),
            Misfortune::Pause(host, time) => self.hosts[host].paused_until = self.now + time,
            Misfortune::Garbage => {
                let (open, end) = (self.network.open(), self.rng.random_range(0..2));
                let bytes = (0..self.rng.random_range(0..40)).map(|_| self.rng.random()).collect();
                if let Some(connection) = open.choose(&mut self.rng).copied()
                    && let Some(at) = self.network.send(connection, end, bytes, self.now, &mut self.rng)
                {
                    self.at(at, Happening::Arrive { connection, end });
                }
            }
        }
    }

    /// Gives a host an input and does what it says.
    fn input(&mut self, host: HostIndex, input: impl FnOnce(&mut Exchange, Instant)) {
        let now = self.epoch + self.now;
        let Some(mut exchange) = self.hosts[host].exchange.take() else { return };
        input(&mut exchange, now);
        while let Some(output) = exchange.poll_output() {
            match output {
                Output::Send { link, frame } => {
                    let (connection, end) = self.network.by_link(link);
                    if let Some(at) = self.network.send(connection, 1 - end, frame, self.now, &mut self.rng) {
                        self.at(at, Happening::Arrive { connection, end: 1 - end });
                    }
                }
                Output::Close { link, .. } => {
                    let (connection, end) = self.network.by_link(link);
                    self.network.close(connection);
                    let at = self.soon(Duration::from_millis(50));
                    self.at(at, Happening::Broken { connection, end: 1 - end });
                    let [(a, _), (b, _)] = self.network.connection(connection).ends;
                    self.connect_soon(a, b);
                }
                Output::Event(event) => {
                    let text = format!("{event:?}");
                    self.say(format_args!("host {host} is told {text}"));
                    (self.now, host, text).hash(&mut self.trace);
                    self.hear(host, event);
                }
                Output::GaveUp { host: peer, lost } => {
                    self.say(format_args!("host {host} loses {peer}: {lost}"));
                    self.has_lost = true;
                }
                Output::Greeted { host: peer } => self.say(format_args!("host {host} meets {peer}")),
            }
        }
        if let Some(at) = exchange.next_deadline().map(|at| at.saturating_duration_since(self.epoch).max(self.now))
            && self.hosts[host].tick_at.is_none_or(|tick| at < tick)
        {
            self.hosts[host].tick_at = Some(at);
            self.at(at, Happening::Tick { host });
        }
        self.hosts[host].exchange = Some(exchange);
    }

    /// Whether a communicator of a job goes on on a host.
    #[must_use]
    pub fn has_begun(&self, job: usize, host: HostIndex) -> bool {
        !self.ledger.in_state(job, host, State::Begun).is_empty()
    }

    /// The failure that a host was told about a job.
    #[must_use]
    pub fn failure(&self, job: usize, host: HostIndex) -> Option<&Failure> {
        self.ledger.failure(job, host)
    }

    /// Waits until all is over, ends what goes on, and says what is wrong.
    #[must_use]
    pub fn finish(mut self) -> Vec<String> {
        self.network.heal();
        self.manners.retries = 0;
        self.run_until(self.now + ALL_OVER);
        let still = self.ledger.begun();
        let mut problems = self.ledger.judge(&self.jobs);
        for (host, comm) in still {
            self.input(host, |exchange, now| exchange.request(Request::Close { comm }, now));
        }
        self.run_until(self.now + Duration::from_secs(5));
        for (host, state) in self.hosts.iter().enumerate() {
            let held = state.exchange.as_ref().map(Exchange::held);
            if held.is_some_and(|held| held != Held { members: 0, roots: 0, comms: 0, backlog: 0 }) {
                problems.push(format!("host {host} holds {held:?} after all is over"));
            }
        }
        // Every message is heard once, unless somebody forgot or died.
        let (said, heard) = self.counters().iter().fold((0, 0), |(s, h), c| (s + c.messages, h + c.received));
        if !self.has_lost && said != heard {
            problems.push(format!("{said} messages were sent and {heard} received"));
        }
        if self.nobody_may_be_lost && self.has_lost {
            problems.push("a host was given up, and nothing that happened is a reason".to_owned());
        }
        problems
    }
}
