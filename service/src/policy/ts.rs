//! `pfa_ts`: priority flow assignment, and jobs that share links take turns in time.
//!
//! Profiles say when jobs send. Jobs whose sending times can be turned against each other so that they never meet on a link get
//! windows that do (after CASSINI, NSDI 2024). Where they cannot, a job of lower priority sends in the gaps of those above it
//! (as MCCS does, SIGCOMM 2024), and jobs of the same priority share the link as if there were no windows.

use super::windows::{self, Arc, Shared};
use super::{Decisions, Policy, View, Window, flows, shares};

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
        let mut decisions = assigned.decisions;
        for group in shared.groups() {
            for (job, window) in turns(view, &shared, &group) {
                let slot = &mut decisions.0[job].window;
                *slot = slot.or(Some(window));
            }
        }
        shares::weigh(view, &mut decisions);
        decisions
    }
}

/// Windows for the jobs of a group, ascending, in which each has another as a rival.
fn turns(view: &View<'_>, shared: &Shared, group: &[usize]) -> Vec<(usize, Window)> {
    let priority = |job: usize| view.rules.priority(&view.jobs[job].tenant);
    let mut group: Vec<usize> = group.iter().copied().filter(|job| view.jobs[*job].profile.is_some()).collect();
    group.sort_by_cached_key(|job| (std::cmp::Reverse(priority(*job)), *job));
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
    if let Some(offsets) = windows::place(&arcs, &rivals) {
        let window =
            |(arc, offset): (&Arc, u64)| Window { period_ns: arc.period_ns, offset_ns: offset, length_ns: arc.busy_ns };
        return group.iter().copied().zip(arcs.iter().zip(offsets).map(window)).collect();
    }
    let priorities: Vec<u32> = group.iter().map(|job| priority(*job)).collect();
    let mut gaps: Vec<Option<Window>> = vec![None; group.len()];
    for low in 0..group.len() {
        let above = rivals[low].iter().filter(|high| priorities[**high] > priorities[low]);
        let above: Vec<Window> = above.map(|high| gaps[*high].unwrap_or(arcs[*high].window())).collect();
        gaps[low] = windows::longest_gap(&above);
    }
    group.into_iter().zip(gaps).filter_map(|(job, gap)| Some((job, gap?))).collect()
}
