//! `yield`: what `priority` does, for networks with a single queue: hosts pace.
//!
//! Flows are assigned fairly over all paths. A job with a profile is known to send at certain times; at these, jobs of lower
//! priority that share a link with it hold their flows to what it leaves them there. At all other times nobody is held back, so
//! nothing is reserved while the first computes. Ours; the times come from profiles, as in CASSINI (NSDI 2024).

use std::collections::HashMap;

use super::windows::{Shared, Use};
use super::{Decisions, Policy, Profile, View, Window, Yield, flows, shares};

/// What the first is expected to take longer than its profile says, in percent of it: clocks and compute times vary.
const MARGIN_PERCENT: u64 = 3;

/// A flow always gets this part of a link: it must not stop where others take all.
const LEAST: f64 = 0.02;

/// Jobs that a job makes room for at most: those that leave it least. With more, there is no time at which it would not.
const YIELDS_MAX: usize = 8;

/// See the module's documentation.
pub(super) struct Yielding;

impl Policy for Yielding {
    fn name(&self) -> &'static str {
        "yield"
    }

    fn uses_profiles(&self) -> bool {
        true
    }

    fn decide(&self, view: &View<'_>) -> Decisions {
        let assigned = flows::assign(view, |_, _| true);
        let priorities: Vec<u32> = view.jobs.iter().map(|job| view.rules.priority(&job.tenant)).collect();
        let shared = Shared::new(view, &assigned);
        let mut decisions = assigned.decisions;
        // What a job that makes room for another has left: by both, on the link where it is least.
        let mut left_bps: Vec<HashMap<usize, f64>> = vec![HashMap::new(); view.jobs.len()];
        for (link, uses) in shared.crowded() {
            let capacity = view.capacities[link.index()];
            if capacity <= 0.0 {
                continue; // Nobody gets anything there, and must not be held back elsewhere for it.
            }
            let mut classes: Vec<u32> = uses.iter().map(|used| priorities[used.job]).collect();
            classes.sort_unstable();
            classes.dedup();
            for class in classes.into_iter().skip(1) {
                let (low, first): (Vec<&Use>, Vec<&Use>) = uses.iter().partition(|used| priorities[used.job] < class);
                let taken: f64 = first.iter().map(|used| used.demand_bps).sum();
                let flows: u32 = low.iter().map(|used| used.flows).sum();
                let cap_bps = (capacity - taken).max(LEAST * capacity) / f64::from(flows);
                for high in first.iter().filter(|high| priorities[high.job] == class) {
                    for low in low.iter().filter(|_| view.jobs[high.job].profile.is_some()) {
                        let least = left_bps[low.job].entry(high.job).or_insert(f64::INFINITY);
                        *least = least.min(cap_bps);
                    }
                }
            }
        }
        for (decision, left_bps) in decisions.0.iter_mut().zip(left_bps) {
            let mut left_bps: Vec<(usize, f64)> = left_bps.into_iter().collect();
            left_bps.sort_unstable_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
            left_bps.truncate(YIELDS_MAX);
            decision.yields = left_bps
                .into_iter()
                .filter_map(|(high, cap_bps)| Some(Yield { window: expected(view.jobs[high].profile?), cap_bps }))
                .collect();
        }
        shares::weigh(view, &mut decisions);
        decisions
    }
}

/// When a job is expected to send.
fn expected(profile: Profile) -> Window {
    let period_ns = profile.period_ns.max(1);
    let early_ns = profile.busy_ns / 100 * MARGIN_PERCENT + profile.busy_ns % 100 * MARGIN_PERCENT / 100;
    Window {
        period_ns,
        offset_ns: (profile.phase_ns % period_ns + period_ns - early_ns % period_ns) % period_ns,
        length_ns: (profile.busy_ns + 2 * early_ns).min(period_ns),
    }
}
