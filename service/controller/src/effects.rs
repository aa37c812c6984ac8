//! Effects of a component of the controller: outputs, history entries, and another decision.

pub(crate) mod decision_scheduler;

use std::time::Instant;

use crate::effects::decision_scheduler::DecisionScheduler;
use crate::history::{History, Went};
use crate::messages::outbox::Outbox;

/// See the module's documentation.
pub(super) struct Effects {
    pub(super) outbox: Outbox,
    pub(super) history: History,
    pub(super) decisions: DecisionScheduler,
}

impl Effects {
    pub(super) fn new(life: u64, common_ns: u64, now: Instant) -> Self {
        let (outbox, decisions) = (Outbox::new(life, common_ns, now), DecisionScheduler::new(now));
        Effects { outbox, history: History::default(), decisions }
    }

    /// Notes that something has happened in the cluster, for which all is decided again.
    pub(super) fn decide_for(&mut self, what: String, why: &str, now: Instant) {
        self.history.note(&*what, why, Went::Done, now);
        self.decisions.because(what);
    }
}
