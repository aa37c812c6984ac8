//! `pfa_ts`: priority flow assignment, and jobs that share links take turns in time.
//!
//! Profiles say when jobs send. Jobs whose sending times can be turned against each other so that they never meet on a link get
//! windows that do (after CASSINI, NSDI 2024). Where they cannot, a job of lower priority sends in the gaps of those above it
//! (as MCCS does, SIGCOMM 2024), and jobs of the same priority share the link as if there were no windows.
//!
//! Gaps are not told as windows. Who sends in one is in the way of those above when they are late, which makes them later, while the window
//! stays where it was: on the emulated network the job above took 1.4 times as long as without the other. So it makes room for each of their bursts
//! as it is foreseen, as under `yield`, and sends nothing meanwhile.

use std::cmp::Reverse;

use super::windows::{self, Arc, Shared};
use super::yielding::{YIELDS_MAX, expected};
use super::{Decisions, Policy, View, Window, Yield, flows, shares};

/// See the module's documentation.
pub(super) struct PfaTs;

impl Policy for PfaTs {
    fn name(&self) -> &'static str {
        "pfa_ts"
    }

    fn uses_profiles(&self) -> bool {
        true
    }

    fn decide(&self, view: &View<'_>) -> Decisions {
        let assigned = flows::assign(view, |job, spine| view.rules.admits(&job.tenant, spine));
        let shared = Shared::new(view, &assigned);
        let drains_ns = shared.drains_ns(view);
        let mut decisions = assigned.decisions;
        for group in shared.groups() {
            for (job, window) in turns(view, &shared, &group) {
                let slot = &mut decisions.0[job].window;
                *slot = slot.or(Some(window));
            }
            for low in group {
                decisions.0[low].yields = bursts_above(view, &shared, &decisions, (low, drains_ns[low]));
            }
        }
        shares::weigh(view, &mut decisions);
        decisions
    }
}

fn priority(view: &View<'_>, job: usize) -> u32 {
    view.rules.priority(&view.jobs[job].tenant)
}

/// Windows for the jobs of a group, ascending, that have profiles and rivals with profiles: none where they cannot be turned so that no two meet.
fn turns(view: &View<'_>, shared: &Shared, group: &[usize]) -> Vec<(usize, Window)> {
    let has_profile = |job: &usize| view.jobs[*job].profile.is_some();
    let takes_turns = |job: &usize| has_profile(job) && shared.rivals[*job].iter().any(has_profile);
    let mut group: Vec<usize> = group.iter().copied().filter(takes_turns).collect();
    group.sort_by_cached_key(|job| (Reverse(priority(view, *job)), *job));
    let arcs: Vec<Arc> = group.iter().filter_map(|job| view.jobs[*job].profile).map(Arc::of).collect();
    let arcs = windows::commensurable(&arcs);
    let mut place_of: Vec<Option<usize>> = vec![None; view.jobs.len()];
    group.iter().enumerate().for_each(|(place, job)| place_of[*job] = Some(place));
    let rivals_of = |job: &usize| {
        let mut places: Vec<usize> = shared.rivals[*job].iter().filter_map(|rival| place_of[*rival]).collect();
        places.sort_unstable();
        places
    };
    let rivals: Vec<Vec<usize>> = group.iter().map(rivals_of).collect();
    let offsets = windows::place(&arcs, &rivals).unwrap_or_default();
    let window = |(arc, offset_ns): (&Arc, u64)| Arc { offset_ns, ..*arc }.window();
    group.into_iter().zip(arcs.iter().zip(offsets).map(window)).collect()
}

/// When a job makes room for rivals of higher priority: never where it has a window, or they would leave it no gap.
fn bursts_above(view: &View<'_>, shared: &Shared, decisions: &Decisions, (low, early_ns): (usize, u64)) -> Vec<Yield> {
    if decisions.0[low].window.is_some() {
        return Vec::new();
    }
    let rivals = shared.rivals[low].iter().copied();
    let mut above: Vec<usize> = rivals.filter(|high| priority(view, *high) > priority(view, low)).collect();
    above.sort_by_cached_key(|high| (Reverse(priority(view, *high)), *high));
    let burst = |high: usize| {
        let window = decisions.0[high].window.or_else(|| view.jobs[high].profile.map(expected))?;
        Some(Yield { to: view.jobs[high].comm, window, early_ns, cap_bps: 0.0 })
    };
    let bursts: Vec<Yield> = above.into_iter().filter_map(burst).take(YIELDS_MAX).collect();
    let arcs: Vec<Arc> = bursts.iter().map(|burst| Arc::during(burst.window)).collect();
    let expected: Vec<Window> = windows::commensurable(&arcs).iter().map(Arc::window).collect();
    if windows::leave_a_gap(&expected) { bursts } else { Vec::new() }
}
