//! Example policy of `docs/guides/policy.md`, for tests alone.

use super::{Decisions, PathSelection, Policy, View, flows, shares};

/// `in_turn`: channel i takes the i-th path that carries anything, counted round.
pub struct InTurn;

impl Policy for InTurn {
    fn name(&self) -> &'static str {
        "in_turn"
    }

    fn decide(&self, view: &View<'_>) -> Decisions {
        let mut decisions = flows::leave_to_hash(view);
        for (job, decision) in view.jobs.iter().zip(&mut decisions.0) {
            if job.pinned.is_some() {
                continue; // The operator has chosen its paths.
            }
            for flow in &mut decision.flows {
                let carries = |path: &u32| {
                    let route = view.topology.route(flow.from, flow.to, *path);
                    route.links().iter().all(|link| view.capacities[link.index()] > 0.0)
                };
                let paths: Vec<u32> = (0..view.topology.path_count(flow.from, flow.to)).filter(carries).collect();
                let turn = (flow.channel as usize).checked_rem(paths.len());
                flow.path = turn.map_or(PathSelection::Hash, |turn| PathSelection::Path(paths[turn]));
            }
        }
        shares::weigh(view, &mut decisions);
        decisions
    }
}
