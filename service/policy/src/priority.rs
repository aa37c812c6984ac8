//! `priority`: every path is everybody's, and the higher priority goes first, by traffic classes
//! (DSCP, queues).
//!
//! Flows are assigned fairly over all paths, and carry their tenant's priority as a traffic class, by which NICs and switches
//! serve them. The first one's leftovers, also for as long as it computes, go to the others at once: nothing is reserved.
//! Ours; it needs a network with a queue a class.

use super::{Decisions, Policy, View, flows, shares};

/// See the module's documentation.
pub(super) struct Priority;

impl Policy for Priority {
    fn name(&self) -> &'static str {
        "priority"
    }

    fn uses_priorities(&self) -> bool {
        true
    }

    fn decide(&self, view: &View<'_>) -> Decisions {
        let mut decisions = flows::assign(view, |_, _| true).decisions;
        for (job, decision) in view.jobs.iter().zip(&mut decisions.0) {
            decision.priority = view.rules.priority(&job.tenant);
        }
        shares::weigh(view, &mut decisions);
        decisions
    }
}
