//! The cost model: how long a schedule takes on a cluster, by running it on virtual clocks.
//!
//! A rank's programs advance as their messages arrive; memory and links have a bandwidth, steps and links a latency. The
//! figures are parameters, calibrated by measurement (see `eval/results`); the model ranks algorithms, it does not
//! predict a run.

use std::collections::{HashMap, VecDeque};

use super::schedule::{Channel, Problem, Schedule, Shape, Step};
use super::{Algorithm, Choice, Strategy, build};

/// A cluster as far as costs depend on it.
#[derive(Debug, Clone, PartialEq)]
pub struct CostModel {
    /// Host of each rank; empty where all share one.
    pub hosts: Vec<u32>,
    /// Bytes that a host's memory moves in a nanosecond, over all engines.
    pub memory_bytes_per_ns: f64,
    /// Bytes that a link between hosts moves in a nanosecond.
    pub link_bytes_per_ns: f64,
    /// What any step costs.
    pub step_ns: f64,
    /// What a message between hosts costs.
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
            link_latency_ns: 20_000.0,
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

    /// Time of a schedule, in nanoseconds.
    #[must_use]
    pub fn estimate_ns(&self, schedule: &Schedule, element_bytes: usize) -> f64 {
        match &schedule.shape {
            Shape::Direct(moves) => {
                let spans = moves.iter().flat_map(|step| step.srcs.iter().chain(&step.dsts));
                let bytes = spans.map(|remote| remote.span.count).sum::<u64>() as f64 * element_bytes as f64;
                self.step_ns * moves.len().max(1) as f64 + bytes / self.memory_bytes_per_ns
            }
            Shape::Message(channels) => {
                // Channels share memory and links: each gets its part of the bandwidth.
                let share = 1.0 / channels.len().max(1) as f64;
                let times = channels.iter().map(|channel| self.channel_ns(channel, element_bytes, share));
                times.fold(0.0, f64::max)
            }
        }
    }

    fn channel_ns(&self, channel: &Channel, element_bytes: usize, share: f64) -> f64 {
        let nranks = channel.programs.len();
        let neighbours = |rank: u32| (0..nranks as u32).filter(|other| self.host(*other) == self.host(rank)).count();
        let memory_ns = |rank: u32, bytes: f64| bytes * neighbours(rank) as f64 / (self.memory_bytes_per_ns * share);
        let mut clocks = vec![0.0f64; nranks];
        let mut counters = vec![0; nranks];
        let mut link_free = HashMap::<(u32, u32), f64>::new();
        let mut arrivals = HashMap::<(u32, u32), VecDeque<f64>>::new();
        loop {
            let mut moved = false;
            for rank in 0..nranks as u32 {
                let at = rank as usize;
                while let Some(step) = channel.programs[at].get(counters[at]) {
                    let (peer, span, touched) = match step {
                        Step::Send { peer, src } => (*peer, src, 0.0),
                        Step::Recv { peer, dst } => (*peer, dst, 2.0),
                        Step::RecvReduce { peer, dst, .. } => (*peer, dst, 3.0),
                        Step::Copy { dst, .. } => (rank, dst, 2.0),
                    };
                    let bytes = span.count as f64 * element_bytes as f64;
                    match step {
                        Step::Send { .. } => {
                            clocks[at] += self.step_ns;
                            let mut arrival = clocks[at];
                            if self.host(rank) != self.host(peer) {
                                let free = link_free.entry((rank, peer)).or_default();
                                *free = free.max(arrival) + bytes / (self.link_bytes_per_ns * share);
                                arrival = *free + self.link_latency_ns;
                            }
                            arrivals.entry((rank, peer)).or_default().push_back(arrival);
                        }
                        Step::Copy { .. } => clocks[at] += self.step_ns + memory_ns(rank, touched * bytes),
                        Step::Recv { .. } | Step::RecvReduce { .. } => {
                            let Some(arrival) = arrivals.get_mut(&(peer, rank)).and_then(VecDeque::pop_front) else {
                                break;
                            };
                            clocks[at] = clocks[at].max(arrival) + self.step_ns + memory_ns(rank, touched * bytes);
                        }
                    }
                    counters[at] += 1;
                    moved = true;
                }
            }
            if !moved {
                return clocks.into_iter().fold(0.0, f64::max);
            }
        }
    }

    /// The algorithm for a problem: the operator's, or the one with the least estimated time. Direct is only for ranks
    /// of one host.
    #[must_use]
    pub fn choose(&self, problem: &Problem, element_bytes: usize, strategy: &Strategy) -> Algorithm {
        let mapped = self.shares_host(problem.nranks);
        match strategy.choice {
            Choice::Pinned(algorithm) if mapped || algorithm != Algorithm::Direct => return algorithm,
            _ => {}
        }
        let usable = Algorithm::ALL.into_iter().filter(|algorithm| {
            (mapped || *algorithm != Algorithm::Direct)
                && (algorithm.covers(problem.kind) || *algorithm == Algorithm::Ring)
        });
        let timed = usable.map(|a| (a, self.estimate_ns(&build(problem, a, strategy), element_bytes)));
        timed.min_by(|a, b| a.1.total_cmp(&b.1)).map_or(Algorithm::Ring, |(algorithm, _)| algorithm)
    }
}
