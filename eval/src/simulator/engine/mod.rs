//! Engine of the flow simulator: events in time, and what jobs do at each.
//!
//! ```text
//! Coming -> waiting for devices -> Computing <-> Sending -> done
//!                                      \-> Steady -/   alone on its island: skips to its end, or to the next change
//! ```
//!
//! Between two events every stream moves at its rate. An island's streams are brought up to now when something happens on it,
//! and get new rates then; other islands are not touched. A change of jobs or links asks the policy, and divides islands anew.

mod rates;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use mccs_policy::random::Random;
use mccs_policy::shares::Filler;
use mccs_policy::topology::{HostId, Topology, TopologyError};
use mccs_policy::{Decision, Flow, Job, Policy, Profile, Rules, View, by_name};

use super::cluster::{self, Coming, Free};
use super::islands::{self, Stream};
use super::scenario::{Scenario, Variant};
use super::traffic;

/// Why there is no result. The scenario is at fault.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// A rank that has no place.
    #[error("job {job}: there is no host and device {place:?}; write for example \"h0:1\"")]
    NoSuchPlace {
        /// The tenant's name.
        job: String,
        /// As written.
        place: String,
    },
    /// A path of a reservation.
    #[error("reserve: there is no path {0:?}; paths are called as spines, such as spine0")]
    NoSuchPath(String),
    /// A link of a phase.
    #[error("phase: there is no link between {0} and {1}")]
    NoSuchLink(String, String),
    /// The network.
    #[error("topology: {0}")]
    Topology(#[from] TopologyError),
    /// The policy.
    #[error("there is no policy {0:?}")]
    NoSuchPolicy(String),
    /// Somebody never ends.
    #[error("{0} jobs never end: too large for the cluster, cut off, or without a time to send")]
    Stuck(usize),
}

/// The result of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct JobResult {
    /// Name.
    pub name: String,
    /// When it came.
    pub came_ns: u64,
    /// When it had its devices.
    pub started_ns: u64,
    /// When it ended.
    pub ended_ns: u64,
    /// Collectives that it did.
    pub iterations: u64,
    /// Time in collectives.
    pub sending_ns: u64,
    /// Bytes per second, as nccl-tests count the bus bandwidth, on average over the time in collectives.
    pub busbw: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A change of links.
    Phase(usize),
    /// Time to ask the policy anew.
    Refresh,
    Arrive(usize),
    /// A job has computed.
    Computed {
        job: usize,
        version: u64,
    },
    /// Something on an island: a stream ends, or a window opens or closes.
    Island {
        island: usize,
        version: u64,
    },
    /// A steady job ends.
    Ended {
        job: usize,
        version: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    Computing {
        until_ns: u64,
    },
    Sending {
        since_ns: u64,
    },
    /// Began to send at `since_ns`; each time takes `operation_ns`.
    Steady {
        since_ns: u64,
        operation_ns: u64,
    },
}

#[derive(Debug)]
struct Running {
    number: usize,
    places: Vec<(HostId, u32)>,
    view: Job,
    decision: Option<Decision>,
    streams: Vec<Stream>,
    state: State,
    version: u64,
    island: usize,
    alone_ns: u64,
    bits: f64,
    iterations_left: u64,
    started_ns: u64,
    sending_ns: u64,
    /// When its next burst is expected, and how long it is to take: those who make room for it go by that.
    foreseen_ns: Option<(u64, u64)>,
    random: Random,
}

#[derive(Debug, Default)]
struct Island {
    jobs: Vec<usize>,
    version: u64,
    settled_ns: u64,
}

struct Simulation<'a> {
    topology: &'a Topology,
    policy: &'static dyn Policy,
    rules: Rules,
    variant: &'a Variant,
    seed: u64,
    coming: Vec<Coming>,
    /// By link, and behind them by what tenants with a cap of hosts send out of one.
    capacities: Vec<f64>,
    exits: HashMap<(String, HostId), u32>,
    free: Free,
    waiting: VecDeque<usize>,
    /// By number; `None` before and after.
    running: Vec<Option<Running>>,
    islands: Vec<Island>,
    queue: BinaryHeap<Reverse<(u64, Event)>>,
    now_ns: u64,
    versions: u64,
    /// Jobs or links have changed: the policy is to be asked.
    changed: bool,
    /// Islands whose streams need new rates.
    dirty: Vec<usize>,
    filler: Filler,
    results: Vec<JobResult>,
}

/// Runs a variant of a scenario; results in the order in which jobs end.
///
/// # Errors
/// A scenario that contradicts itself, or does not end.
pub fn simulate(scenario: &Scenario, variant: &Variant, seed: u64) -> Result<Vec<JobResult>, SimulationError> {
    let topology = cluster::topology(scenario)?;
    let policy = by_name(&variant.policy).ok_or_else(|| SimulationError::NoSuchPolicy(variant.policy.clone()))?;
    let coming = cluster::coming(scenario, &topology, seed)?;
    let mut simulation = Simulation {
        topology: &topology,
        policy,
        rules: cluster::rules(scenario, variant, &topology),
        variant,
        seed,
        capacities: topology.rates().to_vec(),
        exits: HashMap::new(),
        free: Free::all(&topology, seed),
        waiting: VecDeque::new(),
        running: coming.iter().map(|_| None).collect(),
        queue: coming.iter().enumerate().map(|(number, job)| Reverse((job.start_ns, Event::Arrive(number)))).collect(),
        coming,
        islands: Vec::new(),
        now_ns: 0,
        versions: 0,
        changed: false,
        dirty: Vec::new(),
        filler: Filler::default(),
        results: Vec::new(),
    };
    for (number, phase) in scenario.phases.iter().enumerate() {
        let [lower, upper] = &phase.link;
        if topology.links_between(lower, upper).is_empty() {
            return Err(SimulationError::NoSuchLink(lower.clone(), upper.clone()));
        }
        let at_ns = u64::try_from(phase.at.0.as_nanos()).unwrap_or(u64::MAX);
        simulation.queue.push(Reverse((at_ns, Event::Phase(number))));
    }
    if scenario.refresh.is_some() {
        simulation.queue.push(Reverse((0, Event::Refresh)));
    }
    simulation.run(scenario);
    match simulation.coming.len() - simulation.results.len() {
        0 => Ok(simulation.results),
        left => Err(SimulationError::Stuck(left)),
    }
}

impl Simulation<'_> {
    fn run(&mut self, scenario: &Scenario) {
        while let Some(Reverse((at_ns, event))) = self.queue.pop() {
            self.now_ns = at_ns;
            self.handle(event, scenario);
            // All that happens at one time is one change.
            let is_last = self.queue.peek().is_none_or(|Reverse((next_ns, _))| *next_ns > at_ns);
            if !is_last {
                continue;
            }
            while std::mem::take(&mut self.changed) {
                self.admit();
                self.decide();
            }
            let mut dirty = std::mem::take(&mut self.dirty);
            dirty.sort_unstable();
            dirty.dedup();
            dirty.into_iter().for_each(|island| self.refill(island));
        }
    }

    fn handle(&mut self, event: Event, scenario: &Scenario) {
        match event {
            Event::Arrive(number) => {
                self.waiting.push_back(number);
                self.changed = true;
            }
            Event::Phase(number) => {
                let phase = &scenario.phases[number];
                for link in self.topology.links_between(&phase.link[0], &phase.link[1]) {
                    for direction in [link, link.reverse()] {
                        self.capacities[direction.index()] = phase.rate.0 as f64;
                    }
                }
                self.changed = true;
            }
            Event::Refresh => {
                self.changed = true;
                // Whoever has ended needs no more decisions; whoever never ends must not keep the clock going.
                if let Some(refresh) = scenario.refresh.filter(|_| !self.queue.is_empty()) {
                    self.push(self.now_ns + refresh.0.as_nanos() as u64, Event::Refresh);
                }
            }
            Event::Computed { job, version } => {
                if self.running[job].as_ref().is_some_and(|running| running.version == version) {
                    self.send(job);
                }
            }
            Event::Island { island, version } => {
                if self.islands.get(island).is_some_and(|island| island.version == version) {
                    self.settle(island);
                    self.complete(island);
                    self.dirty.push(island);
                }
            }
            Event::Ended { job, version } => {
                let current = self.running[job].as_mut().filter(|running| running.version == version);
                if let Some(running) = current
                    && let State::Steady { operation_ns, .. } = running.state
                {
                    running.sending_ns += operation_ns * running.iterations_left;
                    self.end(job);
                }
            }
        }
    }

    fn version(&mut self) -> u64 {
        self.versions += 1;
        self.versions
    }

    fn push(&mut self, at_ns: u64, event: Event) {
        self.queue.push(Reverse((at_ns, event)));
    }

    /// Gives devices to those who wait, first come, first served.
    fn admit(&mut self) {
        while let Some(number) = self.waiting.front().copied() {
            let coming = &self.coming[number];
            let Some(places) = self.free.take(&coming.wants) else { return };
            self.waiting.pop_front();
            let view =
                cluster::communicator(number as u64, coming, &places, self.variant.rings, self.seed, self.topology);
            let bits = traffic::bits_per_flow(&coming.work, view.nranks(), view.hosts.len() as u32);
            let (iterations_left, version) = (coming.work.iterations, self.version());
            let mut running = Running {
                number,
                places,
                view,
                decision: None,
                streams: Vec::new(),
                state: State::Computing { until_ns: self.now_ns },
                version,
                island: 0,
                alone_ns: 0,
                bits,
                iterations_left,
                started_ns: self.now_ns,
                sending_ns: 0,
                foreseen_ns: None,
                random: Random::new(self.seed ^ number as u64),
            };
            running.alone_ns = self.alone_ns(&running);
            self.running[number] = Some(running);
            self.compute(number);
        }
    }

    /// How long a collective takes with nobody in the way, flows well assigned and all links well.
    fn alone_ns(&mut self, running: &Running) -> u64 {
        let (jobs, rules) =
            (std::slice::from_ref(&running.view), Rules { rings: self.rules.rings, ..Rules::default() });
        let view = View { topology: self.topology, capacities: self.topology.rates(), jobs, rules: &rules };
        let decisions = by_name("ffa").unwrap_or(self.policy).decide(&view);
        let mut streams = self.streams(&running.view, &decisions.0[0], running.bits);
        islands::divide(&mut [&mut streams], self.topology.rates());
        self.operation_ns(streams)
    }

    fn streams(&mut self, job: &Job, decision: &Decision, left_bits: f64) -> Vec<Stream> {
        for flow in decision.host_cap_bps.iter().flat_map(|_| &decision.flows) {
            let next = self.capacities.len() as u32;
            if *self.exits.entry((job.tenant.clone(), flow.from.host)).or_insert(next) == next {
                self.capacities.extend(decision.host_cap_bps);
            }
        }
        let exit = |flow: &Flow| {
            decision.host_cap_bps.and_then(|_| self.exits.get(&(job.tenant.clone(), flow.from.host)).copied())
        };
        let channels = decision.flows.chunk_by(|a, b| a.channel == b.channel);
        let cap_bps = decision.cap_bps.unwrap_or(f64::INFINITY);
        let coming = usize::try_from(job.comm).ok().and_then(|number| self.coming.get(number));
        let hashed = coming.map_or(&[][..], |coming| &coming.hashed);
        let stream = |flows: &[Flow]| {
            let links = flows.iter().flat_map(|flow| {
                let path = traffic::path(self.topology, job.comm, flow, hashed, self.seed);
                let route = self.topology.route(flow.from, flow.to, path);
                route.links().iter().map(|link| link.0).chain(exit(flow)).collect::<Vec<_>>()
            });
            Stream { left_bits, ..Stream::new(links, &self.capacities, cap_bps) }
        };
        channels.map(stream).collect()
    }

    /// A job begins to compute.
    fn compute(&mut self, job: usize) {
        let version = self.version();
        let Some(running) = &mut self.running[job] else { return };
        let work = &self.coming[job].work;
        let spread = work.jitter_percent / 100.0;
        let factor = if spread > 0.0 { 1.0 + spread * (2.0 * running.random.unit() - 1.0) } else { 1.0 };
        let until_ns = self.now_ns + (work.compute.0.as_nanos() as f64 * factor) as u64;
        (running.state, running.version) = (State::Computing { until_ns }, version);
        self.push(until_ns, Event::Computed { job, version });
    }

    /// A job begins a collective.
    fn send(&mut self, job: usize) {
        let version = self.version();
        let Some(running) = &mut self.running[job] else { return };
        let (island, work) = (running.island, &self.coming[job].work);
        running.version = version;
        let timed =
            running.decision.as_ref().is_none_or(|decision| decision.window.is_some() || !decision.yields.is_empty());
        let bits = running.bits;
        running.streams.iter_mut().for_each(|stream| stream.left_bits = bits);
        if self.islands[island].jobs.len() == 1 && !timed && work.jitter_percent == 0.0 {
            let (left, streams) = (running.iterations_left, running.streams.clone());
            let compute_ns = work.compute.0.as_nanos() as u64;
            let operation_ns = self.operation_ns(streams);
            if operation_ns < u64::MAX {
                let ends_ns = self.now_ns + operation_ns + (left - 1) * (operation_ns + compute_ns);
                if let Some(running) = &mut self.running[job] {
                    running.state = State::Steady { since_ns: self.now_ns, operation_ns };
                }
                self.push(ends_ns, Event::Ended { job, version });
            }
            return;
        }
        self.settle(island);
        if let Some(running) = &mut self.running[job] {
            running.state = State::Sending { since_ns: self.now_ns };
        }
        self.dirty.push(island);
    }

    fn end(&mut self, job: usize) {
        let Some(running) = self.running[job].take() else { return };
        let coming = &self.coming[job];
        self.free.give_back(&coming.wants, &running.places);
        let seconds = running.sending_ns as f64 / 1e9 / coming.work.iterations as f64;
        self.results.push(JobResult {
            name: coming.name.clone(),
            came_ns: coming.start_ns,
            started_ns: running.started_ns,
            ended_ns: self.now_ns,
            iterations: coming.work.iterations,
            sending_ns: running.sending_ns,
            busbw: traffic::bus_bandwidth(&coming.work, running.view.nranks(), seconds),
        });
        self.changed = true;
    }

    /// A steady job is where it would be if it had been simulated all along.
    fn materialize(&mut self, job: usize) {
        let version = self.version();
        let Some(running) = &mut self.running[job] else { return };
        let State::Steady { since_ns, operation_ns } = running.state else { return };
        let compute_ns = self.coming[job].work.compute.0.as_nanos() as u64;
        let (elapsed_ns, period_ns) = (self.now_ns - since_ns, (operation_ns + compute_ns).max(1));
        let (whole, position_ns) = (elapsed_ns / period_ns, elapsed_ns % period_ns);
        let began_ns = since_ns + whole * period_ns;
        let done = whole + u64::from(position_ns >= operation_ns);
        running.sending_ns += done * operation_ns;
        running.iterations_left -= done;
        running.version = version;
        if position_ns < operation_ns {
            let left = 1.0 - position_ns as f64 / operation_ns as f64;
            running.streams.iter_mut().for_each(|stream| stream.left_bits = running.bits * left);
            running.state = State::Sending { since_ns: began_ns };
        } else {
            let until_ns = began_ns + period_ns;
            running.state = State::Computing { until_ns };
            self.push(until_ns, Event::Computed { job, version });
        }
    }

    /// Asks the policy, and starts again from what it says.
    fn decide(&mut self) {
        for island in 0..self.islands.len() {
            self.settle(island);
        }
        let numbers: Vec<usize> = self.running.iter().flatten().map(|running| running.number).collect();
        for number in &numbers {
            self.materialize(*number);
        }
        let mut jobs = Vec::with_capacity(numbers.len());
        for running in self.running.iter_mut().flatten() {
            let phase_ns = match running.state {
                State::Computing { until_ns } => until_ns,
                State::Sending { since_ns } | State::Steady { since_ns, .. } => since_ns,
            };
            let compute_ns = self.coming[running.number].work.compute.0.as_nanos() as u64;
            let period_ns = running.alone_ns.saturating_add(compute_ns).max(1);
            running.view.profile = Some(Profile { period_ns, busy_ns: running.alone_ns, phase_ns });
            jobs.push(running.view.clone());
        }
        let capacities = &self.capacities[..self.topology.link_count()];
        let view = View { topology: self.topology, capacities, jobs: &jobs, rules: &self.rules };
        for ((number, job), decision) in numbers.iter().zip(&jobs).zip(self.policy.decide(&view).0) {
            let mut streams = self.streams(job, &decision, 0.0);
            if let Some(running) = &mut self.running[*number] {
                streams.iter_mut().zip(&running.streams).for_each(|(new, old)| new.left_bits = old.left_bits);
                running.streams = streams;
                running.decision = Some(decision);
            }
        }
        let mut all: Vec<&mut Vec<Stream>> =
            self.running.iter_mut().flatten().map(|running| &mut running.streams).collect();
        let islands = islands::divide(&mut all, &self.capacities);
        self.islands.clear();
        for (island, places) in islands.into_iter().enumerate() {
            let jobs: Vec<usize> = places.into_iter().map(|place| numbers[place]).collect();
            for job in &jobs {
                if let Some(running) = &mut self.running[*job] {
                    running.island = island;
                }
            }
            self.islands.push(Island { jobs, version: 0, settled_ns: self.now_ns });
        }
        self.dirty.clear();
        for island in 0..self.islands.len() {
            self.complete(island);
            self.dirty.push(island);
        }
    }
}
