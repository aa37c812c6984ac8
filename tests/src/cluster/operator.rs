//! Modelled operator and controller of the simulated cluster: changes strategies and rate limits at
//! any time.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_config::change::{FlowChoice, StrategyChange};
use mccs_config::service::{AlgorithmChoice, FlowPath};
use mccs_engines::proxy::{ControllerOrder, OperatorMessage, OperatorReply, OperatorRequest, ReplyTo};
use mccs_exchange::protocol::Name;
use mccs_model::rate_limit::{CappedFlow, LocalWindow, Pace};
use mccs_registry::CommInfo;
use mccs_runtime::Mailbox;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use super::host::{SimHost, TRANSPORTS};

/// See the module's documentation.
pub(super) struct Operator {
    asked: u64,
    answers: Mailbox<OperatorReply>,
}

impl Default for Operator {
    fn default() -> Self {
        Operator { asked: 0, answers: Mailbox::new(4096) }
    }
}

impl Operator {
    /// Changes a communicator of the host, if there is one.
    pub(super) fn change(&mut self, host: &SimHost, rng: &mut StdRng) {
        let comms = host.registry.comms();
        if comms.is_empty() {
            return;
        }
        let comm = &comms[rng.random_range(0..comms.len())];
        let change = Box::new(change_of(comm, rng));
        let window = rng.random_bool(0.7).then(|| rng.random_range(1..4));
        let reply_to = ReplyTo::new(self.asked, self.answers.sender());
        self.asked += 1;
        // A full mailbox drops the question, and so answers it.
        let request = OperatorRequest::Change { change, window };
        let _ = host.proxy.send(OperatorMessage::Request { number: comm.number, request, reply_to }.into());
    }

    /// At the end: whether a question was not answered, or more than once.
    pub(super) fn unanswered(&mut self) -> Option<String> {
        let mut counts = vec![0; self.asked as usize];
        while let Some((question, _)) = self.answers.pop() {
            counts[question as usize] += 1;
        }
        let wrong = counts.iter().position(|count| *count != 1)?;
        Some(format!("change {wrong} of {} was answered {} times", counts.len(), counts[wrong]))
    }
}

/// Mostly one that can be.
fn change_of(comm: &CommInfo, rng: &mut StdRng) -> StrategyChange {
    const ALGORITHMS: [AlgorithmChoice; 6] = [
        AlgorithmChoice::Auto,
        AlgorithmChoice::Ring,
        AlgorithmChoice::Tree,
        AlgorithmChoice::HostRing,
        AlgorithmChoice::HostTree,
        AlgorithmChoice::OneShot,
    ];
    let mut change = StrategyChange::default();
    if rng.random_bool(0.5) {
        change.algorithm = Some(ALGORITHMS[rng.random_range(0..ALGORITHMS.len())]);
    }
    if rng.random_bool(0.5) {
        let mut ring: Vec<u32> = (0..comm.nranks).collect();
        let rings = (0..rng.random_range(1..=3)).map(|_| {
            ring.shuffle(rng);
            ring.clone()
        });
        change.rings = Some(rings.collect());
    } else if rng.random_bool(0.3) {
        change.channels = Some(rng.random_range(1..=3));
    }
    if rng.random_bool(0.3) {
        change.transport = Some(TRANSPORTS[rng.random_range(0..TRANSPORTS.len())]);
    }
    if rng.random_bool(0.3) {
        change.paths = Some(vec![FlowPath::default(); rng.random_range(1..3)]);
    }
    if let [from, to, ..] = &comm.hosts[..]
        && rng.random_bool(0.2)
    {
        let (from, to, path) = (from.clone(), to.clone(), rng.random_range(0..2));
        change.flows = Some(vec![FlowChoice { channel: 0, from, to, path }]);
    }
    // One that cannot be, now and then.
    if rng.random_bool(0.05) {
        change.rings = Some(vec![vec![comm.epoch.load(Ordering::Relaxed) as u32; 3]]);
    }
    change
}

/// Gives a communicator of the host another pace, if there is one that has flows. Returns whether the host has heard.
pub(super) fn repace(host: &SimHost, now: Instant, rng: &mut StdRng) -> bool {
    let comms = host.registry.comms();
    let placed: Vec<_> = comms.iter().filter(|comm| comm.placed.is_some()).collect();
    if placed.is_empty() {
        return true;
    }
    let comm = placed[rng.random_range(0..placed.len())];
    let pace = pace_of(comm, now, rng);
    tell_pace(host, comm, pace)
}

/// Lets flows of all communicators of the host go as they like. Returns whether the host has heard.
pub(super) fn free(host: &SimHost) -> bool {
    host.registry.comms().iter().all(|comm| tell_pace(host, comm, Pace::default()))
}

fn tell_pace(host: &SimHost, comm: &CommInfo, pace: Pace) -> bool {
    let Some(placed) = &comm.placed else { return true };
    host.proxy.send(ControllerOrder::SetPace { comm: placed.comm.clone(), pace: Arc::new(pace) }.into()).is_ok()
}

/// Any mixture of what there is, or nothing.
fn pace_of(comm: &CommInfo, now: Instant, rng: &mut StdRng) -> Pace {
    let mut pace = Pace::default();
    if rng.random_bool(0.2) {
        return pace;
    }
    // From far less than what flows want here to more than that.
    let bps = |rng: &mut StdRng| 1_000_000_u64 << rng.random_range(0..8_u32);
    pace.cap_bps = rng.random_bool(0.4).then(|| bps(rng));
    pace.host_cap_bps = rng.random_bool(0.3).then(|| bps(rng));
    for host in comm.hosts.iter().filter_map(|host| Name::new(host)) {
        for channel in 0..3 {
            if rng.random_bool(0.15) {
                pace.flows.push(CappedFlow { channel, to: host.clone(), cap_bps: bps(rng) });
            }
        }
    }
    pace.window = rng.random_bool(0.3).then(|| window_of(now, rng));
    for _ in 0..rng.random_range(0..3) {
        let mut window = window_of(now, rng);
        if rng.random_bool(0.5) {
            window.is_once = true;
            window.opened = now + Duration::from_micros(rng.random_range(0..20_000));
        }
        pace.yields.push((window, bps(rng)));
    }
    pace
}

/// One that comes again every few milliseconds.
fn window_of(now: Instant, rng: &mut StdRng) -> LocalWindow {
    let period_us = rng.random_range(100..20_000);
    let (length_us, ago_us) = (rng.random_range(1..=period_us), rng.random_range(0..period_us));
    let [period, length, ago] = [period_us, length_us, ago_us].map(Duration::from_micros);
    LocalWindow { opened: now - ago, period, length, is_once: false }
}
