//! Simulated cluster in one thread, under a seed: production engines on a simulated network and
//! clock. Proxy engines, transport engines, devices, exchange protocols and in-memory transports
//! are those of production. Ranks are modelled: they join, call collectives, check what they get,
//! leave or die. A seed decides everything.

mod epochs;
mod flight;
mod host;
mod job;
mod operator;
mod script;
mod verdict;
mod wires;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_config::service::AlgorithmChoice;
use mccs_engines::proxy::{ControllerOrder, DiagnosisRounds, OperatorAnswer, OperatorMessage, ReplyTo};
use mccs_exchange::protocol::{CommId, LinkTimes, Name};
use mccs_model::rate_limit::Pace;
use mccs_runtime::Mailbox;
use mccs_telemetry::stuck::StuckReport;
use mccs_transport::faulty::Faults;
use mccs_transport::memory::{HostId, MemoryNetwork, MemoryNetworkOptions};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

use self::epochs::Epochs;
pub use self::host::SimHost;
pub use self::job::RankEnd;
use self::job::{Sight, SimRank};
use self::operator::Operator;
pub use self::script::{Job, Trouble};
use self::wires::Wires;

/// Times of all simulated hosts.
pub const TIMES: LinkTimes = LinkTimes {
    keep_alive: Duration::from_millis(500),
    link_timeout: Duration::from_secs(2),
    host_timeout: Duration::from_secs(4),
};
/// Time that ranks have to join, and operations to end.
pub const TIMEOUT: Duration = Duration::from_secs(20);
/// Cuts of this length harm no job.
const CUT_BORNE: Duration = Duration::from_secs(1);
/// When a host is told something again for which its proxy engine had no room.
const TOLD_AGAIN: Duration = Duration::from_micros(500);
/// After this everything has ended that can.
pub const ALL_OVER: Duration = Duration::from_secs(90);

/// Parameters of a cluster.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Decides everything else.
    pub seed: u64,
    /// Number of hosts.
    pub hosts: usize,
    /// Transport engines of each.
    pub engines: usize,
    /// One way, of frames and of messages.
    pub latency: Duration,
    /// Bytes that a flow moves a poll.
    pub step_bytes: u64,
    /// Choice of algorithms.
    pub choice: AlgorithmChoice,
    /// Channels of a communicator.
    pub channels: u32,
    /// Bad luck of transports; the seed in it counts for nothing. If flows die of it, no job has to end well.
    pub faults: Faults,
}

/// Something that goes wrong.
#[derive(Debug, Clone, Copy)]
pub enum Misfortune {
    /// A host loses power.
    Crash(usize),
    /// Its service starts again.
    Restart(usize),
    /// Two hosts cannot reach each other, until [`Misfortune::Heal`].
    Cut(usize, usize),
    /// All can reach each other again.
    Heal,
    /// Connections between two services break, and are made again.
    BreakLink(usize, usize),
    /// Frames on their way between two services are lost with their connection, of which only the first is told.
    HalfOpen(usize, usize),
    /// A host polls its engines only so often.
    Slow(usize, Duration),
    /// The clock of all leaps ahead.
    Leap(Duration),
    /// A host gets another number of transport engines.
    Resize(usize, usize),
    /// A second connection is made between two services.
    DuplicateLink(usize, usize),
    /// A rank of a job dies.
    Kill {
        /// Which job.
        job: usize,
        /// Which rank.
        rank: usize,
    },
    /// The operator of a host changes the strategy of a communicator that it has, if any. Nobody may notice.
    Change(usize),
    /// The agent of a host is told another pace of a communicator that it has, if any: caps, windows, times to yield. Nobody may notice
    /// but by the time.
    Pace(usize),
    /// The agent of a host is told that flows of all its communicators are free.
    Free(usize),
}

enum Happening {
    Start(Job),
    Misfortune(Misfortune),
}

struct RunningJob {
    job: Job,
    ranks: Vec<SimRank>,
    /// Whether one of its ranks was killed.
    is_struck: bool,
}

/// See the module's documentation.
pub struct Cluster {
    /// Now.
    pub now: Instant,
    began: Instant,
    rng: StdRng,
    network: MemoryNetwork,
    options: Options,
    names: Vec<Name>,
    hosts: Vec<Option<SimHost>>,
    wires: Wires,
    jobs: Vec<RunningJob>,
    /// Hosts whose jobs may fail.
    struck: BTreeSet<usize>,
    happenings: BTreeMap<(Instant, u64), Happening>,
    happening_count: u64,
    operator: Operator,
    epochs: Epochs,
    trace: DefaultHasher,
    /// Faults that were found.
    pub faults: Vec<String>,
}

impl Cluster {
    /// Hosts whose services have just started.
    #[must_use]
    pub fn new(options: Options) -> Self {
        let mut rng = StdRng::seed_from_u64(options.seed);
        let network =
            MemoryNetworkOptions { latency: options.latency, step_bytes: options.step_bytes, seed: rng.random() };
        let began = Instant::now();
        let mut cluster = Cluster {
            now: began,
            began,
            network: MemoryNetwork::new(network),
            options,
            names: (0..options.hosts).filter_map(|i| Name::new(&format!("h{i}"))).collect(),
            hosts: (0..options.hosts).map(|_| None).collect(),
            wires: Wires::new(options.latency),
            jobs: Vec::new(),
            struck: BTreeSet::new(),
            happenings: BTreeMap::new(),
            happening_count: 0,
            operator: Operator::default(),
            epochs: Epochs::default(),
            trace: DefaultHasher::new(),
            faults: Vec::new(),
            rng,
        };
        (0..options.hosts).for_each(|host| cluster.restart(host));
        cluster
    }

    /// A number that any difference between two runs would change.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.trace.finish()
    }

    /// How far the simulated clock has gone.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.now - self.began
    }

    fn restart(&mut self, host: usize) {
        if self.hosts[host].is_none() {
            let incarnation = self.rng.random();
            let (own, hosts) = (&self.names[host], &self.names[..]);
            self.hosts[host] = Some(SimHost::start(own, hosts, incarnation, &self.network, &self.options, self.now));
            for other in (0..self.hosts.len()).filter(|other| *other != host) {
                self.connect_soon(host, other);
            }
            self.cut_engines();
        }
    }

    fn connect_soon(&mut self, a: usize, b: usize) {
        let delay = Duration::from_micros(self.rng.random_range(0..20_000));
        self.wires.connect_at(self.now + delay, a.min(b), a.max(b));
    }

    fn all_ranks(&mut self) -> impl Iterator<Item = &mut SimRank> {
        self.jobs.iter_mut().flat_map(|job| &mut job.ranks)
    }

    fn at(&mut self, after: Duration, happening: Happening) {
        self.happening_count += 1;
        self.happenings.insert((self.now + after, self.happening_count), happening);
    }

    /// Starts a job after some time.
    pub fn start(&mut self, job: Job, after: Duration) {
        self.at(after, Happening::Start(job));
    }

    /// Lets something go wrong after some time.
    pub fn strike(&mut self, misfortune: Misfortune, after: Duration) {
        self.at(after, Happening::Misfortune(misfortune));
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Start(job) => {
                let number = self.jobs.len() as u64;
                let ranks = job.ranks(number, self.options.seed, &mut self.rng);
                self.jobs.push(RunningJob { job, ranks, is_struck: false });
            }
            Happening::Misfortune(Misfortune::Crash(host)) => {
                self.struck.insert(host);
                if let Some(dead) = self.hosts[host].take() {
                    dead.memory_hosts.iter().for_each(|engine| self.network.kill(*engine));
                    self.wires.crash(host);
                    self.all_ranks().for_each(|rank| rank.host_crashed(host));
                }
            }
            Happening::Misfortune(Misfortune::Restart(host)) => self.restart(host),
            Happening::Misfortune(Misfortune::Cut(a, b)) => {
                self.wires.cut(a, b, self.now);
                self.cut_engines();
            }
            Happening::Misfortune(Misfortune::Heal) => {
                self.heal();
            }
            Happening::Misfortune(Misfortune::BreakLink(a, b)) => self.break_wire(a, b, true),
            Happening::Misfortune(Misfortune::HalfOpen(a, b)) => self.break_wire(a, b, false),
            Happening::Misfortune(Misfortune::DuplicateLink(a, b)) => self.connect_soon(a, b),
            Happening::Misfortune(Misfortune::Kill { job, rank }) => {
                if let Some(job) = self.jobs.get_mut(job)
                    && let Some(rank) = job.ranks.get_mut(rank)
                {
                    rank.kill();
                    job.is_struck = true;
                }
            }
            Happening::Misfortune(Misfortune::Slow(host, poll_every)) => {
                if let Some(host) = &mut self.hosts[host] {
                    host.poll_every = poll_every;
                }
            }
            Happening::Misfortune(Misfortune::Leap(time)) => {
                // Longer than what peers bear to hear nothing.
                if time >= TIMES.keep_alive + TIMES.keep_alive / 2 {
                    self.struck.extend(0..self.hosts.len());
                }
                self.now += time;
            }
            Happening::Misfortune(Misfortune::Change(host)) => {
                if let Some(host) = &self.hosts[host] {
                    self.operator.change(host, &mut self.rng);
                }
            }
            Happening::Misfortune(misfortune @ (Misfortune::Pace(host) | Misfortune::Free(host))) => {
                let is_told = match (&self.hosts[host], misfortune) {
                    (Some(host), Misfortune::Free(_)) => operator::free(host),
                    (Some(host), _) => operator::repace(host, self.now, &mut self.rng),
                    (None, _) => true,
                };
                if !is_told {
                    self.strike(misfortune, TOLD_AGAIN);
                }
            }
            Happening::Misfortune(Misfortune::Resize(host, count)) => {
                if let Some(host) = &mut self.hosts[host] {
                    host.resize(count);
                    self.cut_engines();
                }
            }
        }
    }

    fn for_engine_pairs(&self, a: usize, b: usize, run: impl Fn(&MemoryNetwork, HostId, HostId)) {
        let of = |host: usize| self.hosts[host].as_ref().map_or(&[][..], |host| &host.memory_hosts);
        for a in of(a) {
            of(b).iter().for_each(|b| run(&self.network, *a, *b));
        }
    }

    /// Also between engines that are new.
    fn cut_engines(&self) {
        for (a, b) in self.wires.cuts() {
            self.for_engine_pairs(a, b, MemoryNetwork::cut);
        }
    }

    fn heal(&mut self) {
        for ((a, b), since) in self.wires.heal() {
            if self.now - since >= CUT_BORNE {
                self.struck.extend([a, b]);
            }
            self.for_engine_pairs(a, b, MemoryNetwork::heal);
            self.connect_soon(a, b);
        }
    }

    fn break_wire(&mut self, a: usize, b: usize, also_tell_b: bool) {
        for (host, link) in self.wires.break_between(a, b) {
            if let Some(end) = self.hosts[host].as_mut().filter(|_| host == a || also_tell_b) {
                end.exchange.link_down(link, self.now);
            }
        }
        self.connect_soon(a, b);
    }

    /// Does one round: all that is due, and every engine once, in an order that the seed decides. Returns when there is next
    /// something to do.
    fn round(&mut self) -> Option<Instant> {
        while let Some(entry) = self.happenings.first_entry().filter(|entry| entry.key().0 <= self.now) {
            let happening = entry.remove();
            self.happen(happening);
        }
        self.wires.deliver(self.now, &mut self.hosts, &self.names, &mut self.trace);
        let mut order: Vec<usize> = (0..self.hosts.len()).collect();
        order.shuffle(&mut self.rng);
        let mut next = self.wires.next_at().into_iter().chain(self.happenings.keys().next().map(|(at, _)| *at)).min();
        for index in order {
            let Some(host) = &mut self.hosts[index] else { continue };
            let wake = host.poll(self.now, &mut self.rng);
            next = next.into_iter().chain(wake).min();
            let noted = host.begun().into_iter().map(|begun| self.epochs.note(index, begun));
            self.faults.extend(noted.filter_map(Result::err));
            for broken in self.wires.send_all(index, host, self.now, &mut self.rng) {
                self.connect_soon(broken.0, broken.1);
            }
        }
        for rank in self.jobs.iter_mut().flat_map(|job| &mut job.ranks) {
            let sight = Sight { hosts: &self.hosts, now: self.now };
            match rank.live(&sight, &mut self.rng) {
                Ok(wake) => next = next.into_iter().chain(wake).min(),
                Err(fault) => self.faults.push(fault),
            }
            rank.hash(&mut self.trace);
        }
        next
    }

    /// Runs until some time has passed, or something is wrong.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end && self.faults.is_empty() {
            let step = Duration::from_micros(self.rng.random_range(1..20));
            let next = self.round().map_or(end, |next| next.max(self.now + step));
            self.now = next.min(end);
            (self.now - self.began).hash(&mut self.trace);
        }
    }

    /// From now on the flows of all communicators leave their hosts like this, as hosts' agents tell it.
    ///
    /// # Panics
    /// If a host is too busy to be told.
    pub fn set_pace(&mut self, pace: &Pace) {
        self.set_paces(|_, _| pace.clone());
    }

    /// As [`Cluster::set_pace`], by host and communicator.
    ///
    /// # Panics
    /// If a host is too busy to be told.
    pub fn set_paces(&mut self, pace_of: impl Fn(usize, &CommId) -> Pace) {
        for (number, host) in self.hosts.iter().enumerate().filter_map(|(number, host)| Some((number, host.as_ref()?)))
        {
            for comm in host.registry.comms() {
                let Some(placed) = &comm.placed else { continue };
                let pace = Arc::new(pace_of(number, &placed.comm));
                let message = ControllerOrder::SetPace { comm: placed.comm.clone(), pace }.into();
                assert!(host.proxy.send(message).is_ok(), "the proxy engine has no room");
            }
        }
    }

    fn ask_why_stuck(&self, host: usize, reply_to: ReplyTo) {
        let of = self.hosts[host].as_ref().expect("a host that lives");
        let number = of.registry.comms().first().expect("a communicator").number;
        let message = OperatorMessage::WhyStuck { number, rounds: DiagnosisRounds::UntilCertain, reply_to };
        assert!(of.proxy.send(message.into()).is_ok(), "the proxy engine has no room");
    }

    /// Why a host's only communicator is stuck, as its operator is told, and how long that took.
    ///
    /// # Panics
    /// If the host has no communicator, or something is wrong.
    pub fn why_stuck(&mut self, host: usize) -> (StuckReport, Duration) {
        let (answers, asked_at) = (Mailbox::new(1), self.now);
        self.ask_why_stuck(host, ReplyTo::new(0, answers.sender()));
        loop {
            self.run_for(Duration::from_millis(1));
            assert!(self.faults.is_empty(), "{:?}", self.faults);
            match answers.pop() {
                Some((0, Ok(OperatorAnswer::Stuck(report)))) => return (*report, self.now - asked_at),
                Some(answer) => panic!("{answer:?}"),
                None => {}
            }
        }
    }

    /// The same, asked so often, a millisecond apart.
    ///
    /// # Panics
    /// As [`Cluster::why_stuck`].
    pub fn why_stuck_often(&mut self, host: usize, often: usize) -> Vec<Result<StuckReport, String>> {
        let answers = Mailbox::new(often);
        for _ in 0..often {
            self.ask_why_stuck(host, ReplyTo::new(0, answers.sender()));
            self.run_for(Duration::from_millis(1));
        }
        let mut told = Vec::new();
        while told.len() < often {
            self.run_for(Duration::from_millis(1));
            assert!(self.faults.is_empty(), "{:?}", self.faults);
            told.extend(std::iter::from_fn(|| answers.pop()).map(|(_, answer)| match answer {
                Ok(OperatorAnswer::Stuck(report)) => Ok(*report),
                Err(refused) => Err(refused.reason),
                Ok(other) => panic!("{other:?}"),
            }));
        }
        told
    }

    /// Bytes that flows of rings have sent so far, by their host and name.
    #[must_use]
    pub fn sent_bytes(&self) -> BTreeMap<(usize, String), u64> {
        let flows_of = |(number, host): (usize, &SimHost)| {
            let (flows, _) = host.registry.flows.flows(usize::MAX);
            let of_rings = flows.into_iter().filter(|flow| flow.name.sends && flow.name.epoch.is_some());
            of_rings.map(move |flow| ((number, format!("{:?}", flow.name)), flow.bytes))
        };
        let hosts = self.hosts.iter().enumerate().filter_map(|(number, host)| Some((number, host.as_ref()?)));
        hosts.flat_map(flows_of).collect()
    }

    /// The same, by host and communicator.
    #[must_use]
    pub fn sent_bytes_by_comm(&self) -> BTreeMap<(usize, CommId), u64> {
        let mut sums = BTreeMap::new();
        for (number, host) in self.hosts.iter().enumerate().filter_map(|(number, host)| Some((number, host.as_ref()?)))
        {
            for comm in host.registry.comms() {
                let (Some(placed), Some(links)) = (&comm.placed, comm.links) else { continue };
                let flows = host.registry.flows.sent_by(links, usize::MAX);
                let of_rings = flows.iter().filter(|flow| flow.name.epoch.is_some());
                sums.insert((number, placed.comm.clone()), of_rings.map(|flow| flow.bytes).sum());
            }
        }
        sums
    }

    /// Whether every rank of every job has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.happenings.is_empty() && self.jobs.iter().flat_map(|job| &job.ranks).all(|rank| rank.end().is_some())
    }

    /// Runs until all have ended, and everything that can time out has; then looks for what is left.
    ///
    /// # Errors
    /// All that is wrong.
    pub fn finish(mut self) -> Result<u64, String> {
        for _ in 0..ALL_OVER.as_secs() {
            if self.is_over() || !self.faults.is_empty() {
                break;
            }
            self.run_for(Duration::from_secs(1));
        }
        // Whatever is told after the end.
        self.run_for(2 * TIMES.host_timeout);
        self.heal();
        self.faults.extend(self.operator.unanswered());
        let flows_die = self.options.faults.death_bytes.is_some() || self.options.faults.refusals_percent > 0;
        for (number, RunningJob { job, ranks, is_struck }) in self.jobs.iter().enumerate() {
            let is_struck = *is_struck || job.placement.iter().any(|host| self.struck.contains(host));
            let is_excused = flows_die || (job.may_fail && is_struck);
            let ends: Vec<_> = ranks.iter().filter_map(|rank| rank.end().cloned()).collect();
            for (rank, state) in ranks.iter().enumerate() {
                if state.end().is_none() {
                    self.faults.push(format!("job {number} rank {rank} has not ended: {}", state.describe()));
                }
                self.faults.extend(state.check_memory().err().map(|fault| format!("job {number}: {fault}")));
            }
            if ends.len() == ranks.len() && !is_excused {
                self.faults.extend(verdict::judge(job, &ends).err().map(|fault| format!("job {number}: {fault}")));
            }
        }
        for (index, host) in self.hosts.iter().enumerate() {
            self.faults.extend(host.iter().flat_map(SimHost::leaks).map(|leak| format!("host {index}: {leak}")));
        }
        if self.faults.is_empty() { Ok(self.trace.finish()) } else { Err(self.faults.join("\n")) }
    }
}
