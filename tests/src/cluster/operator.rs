//! An operator who changes strategies at any time, and waits for an answer to each.

use std::sync::atomic::Ordering;

use mccs_config::change::{FlowChoice, StrategyChange};
use mccs_config::service::{Algorithm, FlowPath};
use mccs_service::engines::proxy::{Asked, OperatorReply, ProxyMessage, Wish};
use mccs_service::runtime::Mailbox;
use mccs_service::telemetry::CommInfo;
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
        let asked = Asked::new(self.asked, self.answers.sender());
        self.asked += 1;
        // A full mailbox drops the question, and so answers it.
        let wish = Wish::Change { change, window };
        let _ = host.proxy.send(ProxyMessage::Wish { number: comm.number, wish, asked });
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
    const ALGORITHMS: [Algorithm; 6] = [
        Algorithm::Auto,
        Algorithm::Ring,
        Algorithm::Tree,
        Algorithm::HostRing,
        Algorithm::HostTree,
        Algorithm::OneShot,
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
