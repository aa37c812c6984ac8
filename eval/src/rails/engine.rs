//! Runs the rails simulator: what lanes do, and what is on the network, event by event.

use std::collections::VecDeque;

use super::agenda::{Agenda, Event};
use super::machine::Machine;
use super::network::Network;
use super::tasks::{LANES, Script, Task, Work};
use super::{Design, SimulationError};

/// How long a run took, and for how long of it parts of the first host were busy.
pub(super) struct Ran {
    pub(super) ns: f64,
    pub(super) nic_ns: f64,
    pub(super) nvlink_ns: f64,
    pub(super) stream_ns: f64,
}

/// A host's streams and its GPU.
struct Host {
    /// By lane: numbers of tasks, in order.
    lanes: [VecDeque<usize>; LANES],
    is_busy: [bool; LANES],
    tasks: Vec<Task>,
    is_done: Vec<bool>,
    /// By move.
    is_told: Vec<bool>,
    nvlink_free_ns: f64,
    nvlink_ns: f64,
    kernels_ns: [f64; LANES],
}

/// Carries out what all hosts' scripts say.
pub(super) fn run(
    machine: &Machine,
    design: &Design,
    scripts: Vec<Script>,
    element_bytes: u64,
) -> Result<Ran, SimulationError> {
    let moves = scripts.iter().map(|script| script.moves.clone()).collect::<Vec<_>>();
    let mut network = Network::new(machine, design, moves, element_bytes)?;
    let mut hosts: Vec<_> = scripts.into_iter().map(Host::new).collect();
    let mut agenda = Agenda::default();
    for (number, host) in hosts.iter_mut().enumerate() {
        host.advance(number, machine, &mut agenda, &mut network);
    }
    while let Some(event) = agenda.next() {
        match event {
            Event::TaskEnds { host: number, lane } => {
                let host = &mut hosts[number];
                host.end(lane);
                host.advance(number, machine, &mut agenda, &mut network);
            }
            Event::MoveTold { host: number, number: of } => {
                let host = &mut hosts[number];
                host.is_told[of] = true;
                host.advance(number, machine, &mut agenda, &mut network);
            }
            Event::Network(event) => network.handle(event, &mut agenda),
        }
    }
    if hosts.iter().any(|host| !host.has_ended()) {
        return Err(SimulationError::Stuck);
    }
    let Some(first) = hosts.first() else { return Err(SimulationError::Stuck) };
    Ok(Ran {
        ns: agenda.now_ns(),
        nic_ns: network.egress_ns(),
        nvlink_ns: first.nvlink_ns,
        stream_ns: first.kernels_ns.iter().copied().fold(0.0, f64::max),
    })
}

impl Host {
    fn new(script: Script) -> Self {
        let mut lanes: [VecDeque<usize>; LANES] = Default::default();
        for (number, task) in script.tasks.iter().enumerate() {
            lanes[task.lane].push_back(number);
        }
        Host {
            lanes,
            is_busy: [false; LANES],
            is_done: vec![false; script.tasks.len()],
            tasks: script.tasks,
            is_told: vec![false; script.moves.len()],
            nvlink_free_ns: 0.0,
            nvlink_ns: 0.0,
            kernels_ns: [0.0; LANES],
        }
    }

    fn has_ended(&self) -> bool {
        self.lanes.iter().all(VecDeque::is_empty)
    }

    fn end(&mut self, lane: usize) {
        self.is_busy[lane] = false;
        if let Some(number) = self.lanes[lane].pop_front() {
            self.is_done[number] = true;
        }
    }

    /// Starts whatever can start.
    fn advance(&mut self, own: usize, machine: &Machine, agenda: &mut Agenda, network: &mut Network) {
        let now_ns = agenda.now_ns();
        for lane in 0..LANES {
            let Some(number) = self.lanes[lane].front().copied().filter(|_| !self.is_busy[lane]) else { continue };
            if !self.tasks[number].after.iter().all(|earlier| self.is_done[*earlier]) {
                continue;
            }
            let end_ns = match self.tasks[number].work {
                Work::Kernel { ns, link_bytes } => {
                    let link_ns = link_bytes / machine.nvlink_bytes_per_ns;
                    self.nvlink_free_ns = self.nvlink_free_ns.max(now_ns) + link_ns;
                    self.nvlink_ns += link_ns;
                    let end_ns = if link_bytes > 0.0 { self.nvlink_free_ns } else { now_ns };
                    let end_ns = end_ns.max(now_ns + ns);
                    self.kernels_ns[lane] += end_ns - now_ns;
                    end_ns
                }
                Work::Alone { ns } => now_ns + ns,
                Work::Tell { number } => {
                    network.tell(own, number, now_ns + machine.word_ns, agenda);
                    now_ns + machine.word_ns
                }
                Work::Await { number } if self.is_told[number] => now_ns + machine.word_ns,
                Work::Await { .. } => continue,
            };
            self.is_busy[lane] = true;
            agenda.at(end_ns, Event::TaskEnds { host: own, lane });
        }
    }
}
