//! Cost model (alpha-beta) of schedules on a cluster: picks the algorithm (ring, tree, one-shot) by
//! size. It runs schedules on virtual clocks.
//!
//! A rank's programs advance as their messages arrive; memory and hosts' links have a bandwidth that those who use them
//! share, steps and messages a latency. The figures are parameters, calibrated by measurement (see `eval/results`); the
//! model ranks algorithms, it does not predict a run. Deliberately absent: paths between hosts and other jobs' traffic,
//! which are the policy's.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap, VecDeque};

use super::schedule::{Channel, Move, Problem, Program, Schedule, Shape, Step};
use super::{Algorithm, ScheduleError, Strategy, build};

/// A cluster as far as costs depend on it.
#[derive(Debug, Clone, PartialEq)]
pub struct CostModel {
    /// Host of each rank; empty where all share one.
    pub hosts: Vec<u32>,
    /// Bytes that a host's memory moves in a nanosecond, over all engines.
    pub memory_bytes_per_ns: f64,
    /// Bytes that a host sends to other hosts in a nanosecond, and receives from them at the same time.
    pub link_bytes_per_ns: f64,
    /// Cost of any step.
    pub step_ns: f64,
    /// Cost of a message between hosts for either of them, whatever its length.
    pub message_ns: f64,
    /// How long a message between hosts is on its way.
    pub link_latency_ns: f64,
}

impl CostModel {
    /// One host: figures of a 2-core virtual machine with 10 GB/s of copying a core.
    #[must_use]
    pub fn one_host() -> Self {
        CostModel {
            hosts: Vec::new(),
            memory_bytes_per_ns: 20.0,
            link_bytes_per_ns: 1.0,
            step_ns: 200.0,
            message_ns: 4_000.0,
            link_latency_ns: 20_000.0,
        }
    }

    /// Hosts with these ranks: figures of such machines in one rack, joined by TCP. None: one host.
    #[must_use]
    pub fn for_hosts(hosts: &[Vec<u32>]) -> Self {
        let nranks = hosts.iter().map(Vec::len).sum();
        let mut host_of = vec![0; if hosts.len() > 1 { nranks } else { 0 }];
        for (host, ranks) in (0..).zip(hosts) {
            for rank in ranks {
                if let Some(slot) = host_of.get_mut(*rank as usize) {
                    *slot = host;
                }
            }
        }
        CostModel { hosts: host_of, ..CostModel::one_host() }
    }

    /// The same hosts where ranks are GPUs that combine by themselves, and a channel is one's own NIC: figures of NICs of 400 Gbit/s behind three
    /// tiers of switches, which read and write memory of GPUs.
    #[must_use]
    pub fn of_rail(&self) -> Self {
        CostModel {
            hosts: self.hosts.clone(),
            // Nothing is copied.
            memory_bytes_per_ns: f64::INFINITY,
            link_bytes_per_ns: 49.0,
            step_ns: 200.0,
            message_ns: 600.0,
            link_latency_ns: 11_000.0,
        }
    }

    fn host(&self, rank: u32) -> u32 {
        self.hosts.get(rank as usize).copied().unwrap_or(0)
    }

    /// Whether all of `nranks` ranks share a host, so that one service maps all their buffers.
    #[must_use]
    pub fn shares_host(&self, nranks: u32) -> bool {
        (1..nranks).all(|rank| self.host(rank) == self.host(0))
    }

    /// Time of a schedule, in nanoseconds. Infinite where it cannot run: moves between hosts, or programs that wait for
    /// ever.
    #[must_use]
    pub fn estimate_ns(&self, schedule: &Schedule, element_bytes: usize) -> f64 {
        let element_bytes = element_bytes as f64;
        match &schedule.shape {
            Shape::SinglePass(moves) => self.single_pass_ns(moves, element_bytes),
            Shape::Message(channels) => {
                // Channels share memory and links: each gets its part of the bandwidth.
                let share = 1.0 / channels.len().max(1) as f64;
                let times = channels.iter().map(|channel| Clocks::new(self, channel, element_bytes, share).run());
                times.fold(0.0, f64::max)
            }
        }
    }

    /// The host of a program.
    fn host_of(&self, program: &Program) -> u32 {
        program.ranks.first().map_or(0, |rank| self.host(*rank))
    }

    fn single_pass_ns(&self, moves: &[Move], element_bytes: f64) -> f64 {
        let mut ns = self.step_ns * moves.len().max(1) as f64;
        for Move { srcs, dsts } in moves {
            let mut remotes = srcs.iter().chain(dsts);
            let Some(first) = remotes.next() else {
                continue;
            };
            let bytes = (srcs.len() + dsts.len()) as f64 * first.span.count as f64 * element_bytes;
            let is_local = remotes.all(|remote| self.host(remote.rank) == self.host(first.rank));
            ns += if is_local { bytes / self.memory_bytes_per_ns } else { f64::INFINITY };
        }
        ns
    }

    /// The algorithm for a problem: the operator's, or the one with the least estimated time. Direct is only for ranks
    /// of one host: pinned elsewhere, it gives way to the cost model's choice. All hosts come to the same one.
    ///
    /// Between hosts those forms are compared whose cost grows with the number of hosts, not of ranks: what goes from rank to
    /// rank only sends more.
    ///
    /// # Errors
    /// As [`build`].
    pub fn choose(
        &self,
        problem: &Problem,
        element_bytes: usize,
        strategy: &Strategy,
    ) -> Result<Algorithm, ScheduleError> {
        let is_mapped = self.shares_host(problem.nranks);
        let is_possible = |pinned: &Algorithm| is_mapped || *pinned != Algorithm::SinglePass;
        if let Some(pinned) = Algorithm::pinned(strategy.choice).filter(is_possible) {
            return Ok(pinned);
        }
        // A fallback to the ring is the ring. If nothing has a form, the ring stands for all.
        let one_a_host = strategy.hosts.iter().all(|ranks| ranks.len() == 1);
        let is_candidate = |algorithm: &Algorithm| match algorithm {
            Algorithm::SinglePass => is_mapped,
            Algorithm::Ring => is_mapped || one_a_host,
            Algorithm::Tree => is_mapped && algorithm.covers(problem.kind),
            Algorithm::HostRing => !is_mapped && !one_a_host,
            Algorithm::HostTree | Algorithm::OneShot => !is_mapped && algorithm.covers(problem.kind),
        };
        let candidates: Vec<_> = Algorithm::ALL.into_iter().filter(is_candidate).collect();
        if let [only] = candidates.as_slice() {
            return Ok(*only);
        }
        let mut best = (f64::INFINITY, Algorithm::Ring);
        for algorithm in candidates {
            let ns = self.estimate_ns(&build(problem, algorithm, strategy)?, element_bytes);
            if ns < best.0 {
                best = (ns, algorithm);
            }
        }
        Ok(best.1)
    }
}

/// When a program's next step starts. Ordered by time, then by program.
#[derive(Debug, Clone, Copy)]
struct Start {
    at_ns: f64,
    program: usize,
}

impl Ord for Start {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at_ns.total_cmp(&other.at_ns).then(self.program.cmp(&other.program))
    }
}

impl PartialOrd for Start {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Start {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Start {}

/// Runs one channel, always the step that can start first.
struct Clocks<'a> {
    model: &'a CostModel,
    channel: &'a Channel,
    element_bytes: f64,
    /// The channel's part of all bandwidths.
    share: f64,
    /// By program: how many compete for the engine and the memory of its host.
    sharers: Vec<f64>,
    now_ns: Vec<f64>,
    counters: Vec<usize>,
    /// By host: when its link can send the next message.
    egress_free_ns: HashMap<u32, f64>,
    /// By host: when its link can receive the next message.
    ingress_free_ns: HashMap<u32, f64>,
    /// By (sender, receiver): when messages arrive.
    arrivals_ns: HashMap<(u32, u32), VecDeque<f64>>,
}

impl<'a> Clocks<'a> {
    fn new(model: &'a CostModel, channel: &'a Channel, element_bytes: f64, share: f64) -> Self {
        let programs = channel.programs.len();
        let hosts: Vec<u32> = channel.programs.iter().map(|program| model.host_of(program)).collect();
        let sharers = hosts.iter().map(|host| hosts.iter().filter(|other| *other == host).count() as f64).collect();
        Clocks {
            model,
            channel,
            element_bytes,
            share,
            sharers,
            now_ns: vec![0.0; programs],
            counters: vec![0; programs],
            egress_free_ns: HashMap::new(),
            ingress_free_ns: HashMap::new(),
            arrivals_ns: HashMap::new(),
        }
    }

    fn run(mut self) -> f64 {
        let channel = self.channel;
        let first = |program| self.next_step(program).map(Reverse);
        // Each program that does not wait is in it once.
        let mut ready: BinaryHeap<_> = (0..channel.programs.len()).filter_map(first).collect();
        while let Some(Reverse(Start { program, at_ns })) = ready.pop() {
            let step = &channel.programs[program].steps[self.counters[program]];
            let woken = match step {
                Step::Send { peer, .. } if self.next_step(*peer as usize).is_none() => Some(*peer as usize),
                _ => None,
            };
            self.step(program, at_ns, step);
            self.counters[program] += 1;
            ready.extend(
                [Some(program), woken].into_iter().flatten().filter_map(|next| self.next_step(next)).map(Reverse),
            );
        }
        let ended = channel.programs.iter().zip(&self.counters).all(|(program, at)| *at == program.steps.len());
        if ended { self.now_ns.into_iter().fold(0.0, f64::max) } else { f64::INFINITY }
    }

    /// When a program's next step can start; `None` while it waits for what nobody has sent.
    fn next_step(&self, program: usize) -> Option<Start> {
        let at_ns = match self.channel.programs.get(program)?.steps.get(self.counters[program])? {
            Step::Recv { peer, .. } | Step::RecvReduce { peer, .. } => {
                self.arrivals_ns.get(&(*peer, program as u32))?.front()?.max(self.now_ns[program])
            }
            Step::Send { .. } | Step::Copy { .. } | Step::Reduce { .. } => self.now_ns[program],
        };
        Some(Start { at_ns, program })
    }

    fn step(&mut self, program: usize, start_ns: f64, step: &Step) {
        let bytes = step.count() as f64 * self.element_bytes;
        let memory_ns = bytes * self.sharers[program] / (self.model.memory_bytes_per_ns * self.share);
        // One engine takes the steps of all programs of a host.
        let message_ns = if self.leaves_host(program, step) { self.model.message_ns } else { 0.0 };
        let started_ns = start_ns + (self.model.step_ns + message_ns) * self.sharers[program];
        // Spans that are read and written. An offer is read where it lies, or where it was received.
        let spans = match step {
            Step::Send { peer, .. } => {
                let arrival_ns = self.transfer(program as u32, *peer, started_ns, bytes);
                self.arrivals_ns.entry((program as u32, *peer)).or_default().push_back(arrival_ns);
                0
            }
            Step::Copy { dsts, .. } => 1 + dsts.len(),
            Step::Reduce { srcs, dsts, .. } => srcs.len() + dsts.len(),
            Step::Recv { peer, dsts } => {
                self.arrivals_ns.get_mut(&(*peer, program as u32)).and_then(VecDeque::pop_front);
                1 + dsts.len()
            }
            Step::RecvReduce { peer, srcs, dsts, .. } => {
                self.arrivals_ns.get_mut(&(*peer, program as u32)).and_then(VecDeque::pop_front);
                1 + srcs.len() + dsts.len()
            }
        };
        self.now_ns[program] = started_ns + spans as f64 * memory_ns;
    }

    fn host(&self, program: u32) -> u32 {
        self.channel.programs.get(program as usize).map_or(0, |program| self.model.host_of(program))
    }

    /// Whether a step's message goes to or comes from another host.
    fn leaves_host(&self, program: usize, step: &Step) -> bool {
        match step {
            Step::Send { peer, .. } | Step::Recv { peer, .. } | Step::RecvReduce { peer, .. } => {
                self.host(*peer) != self.host(program as u32)
            }
            Step::Copy { .. } | Step::Reduce { .. } => false,
        }
    }

    /// When a message arrives. On one host nothing moves before the receiver reads it.
    fn transfer(&mut self, program: u32, peer: u32, sent_ns: f64, bytes: f64) -> f64 {
        let (src, dst) = (self.host(program), self.host(peer));
        if src == dst {
            return sent_ns;
        }
        let egress_ns = self.egress_free_ns.entry(src).or_default();
        let ingress_ns = self.ingress_free_ns.entry(dst).or_default();
        let start_ns = sent_ns.max(*egress_ns).max(*ingress_ns);
        let end_ns = start_ns + bytes / (self.model.link_bytes_per_ns * self.share);
        (*egress_ns, *ingress_ns) = (end_ns, end_ns);
        end_ns + self.model.link_latency_ns
    }
}
