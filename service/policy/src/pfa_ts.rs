//! `pfa_ts`: priority flow assignment with time windows, in which jobs that share links take turns.
//!
//! Profiles say when jobs send. Jobs whose sending times can be turned against each other so that they never meet on a link get
//! windows that do (after CASSINI, NSDI 2024). If they cannot, a job of lower priority sends in the gaps of those above it (as
//! MCCS does, SIGCOMM 2024), and jobs of the same priority share the link as if there were no windows.
//!
//! Data that is not sent when a window closes waits for the next one, and the iteration takes twice as long. So windows are longer than
//! bursts, by as much as there is room for, and come a little less often than the job does by itself: who was late once is not late for
//! ever. A job that comes less often all the same loses its profile (`service/telemetry/src/profile.rs`), and with it the window. Windows
//! that the operator gave stay where they are, and others turn round them.
//!
//! Gaps are not told as windows. A job that sends in one is in the way of those above when they are late, which makes them later, while the
//! window stays where it was: on the emulated network the job above took 1.4 times as long as without the other. So it makes room for each
//! of their bursts as it is foreseen, as under `yield`, and sends nothing meanwhile.

use std::cmp::Reverse;

use super::windows::{self, Arc, Shared};
use super::yielding::{YIELDS_MAX, expected};
use super::{Decisions, Policy, View, Window, Yield, flows, shares};

/// By how much windows are longer than bursts, in percent: the first for which there is room. With less than the last jobs do not take turns.
const MARGINS_PERCENT: [u64; 5] = [100, 50, 25, 12, 6];
/// By how much of its period a window comes later than the job would.
const LATER_PERCENT: u64 = 1;

/// See the module's documentation.
pub(super) struct PfaTs;

impl Policy for PfaTs {
    fn name(&self) -> &'static str {
        "pfa_ts"
    }

    fn uses_profiles(&self) -> bool {
        true
    }

    fn uses_priorities(&self) -> bool {
        true
    }

    fn uses_reserves(&self) -> bool {
        true
    }

    fn decide(&self, view: &View<'_>) -> Decisions {
        let assigned = flows::assign(view, |job, spine| view.rules.admits(&job.tenant, spine));
        let shared = Shared::new(view, &assigned);
        let drains_ns = shared.drains_ns(view);
        let mut decisions = assigned.decisions;
        for group in shared.groups() {
            for (job, window) in turns(view, &shared, &decisions, &group) {
                decisions.0[job].window = Some(window);
            }
            for low in group {
                decisions.0[low].yields = bursts_above(view, &shared, &decisions, low, drains_ns[low]);
            }
        }
        shares::weigh(view, &mut decisions);
        decisions
    }
}

fn priority(view: &View<'_>, job: usize) -> u32 {
    view.rules.priority(&view.jobs[job].tenant)
}

/// Windows for the jobs of a group, ascending, that have profiles and rivals with profiles or windows, and no window yet: none where they cannot be turned so that
/// no two meet.
fn turns(view: &View<'_>, shared: &Shared, decisions: &Decisions, group: &[usize]) -> Vec<(usize, Window)> {
    let given = |job: &usize| decisions.0[*job].window;
    let has_times = |job: &usize| view.jobs[*job].profile.is_some() || given(job).is_some();
    let takes_turns = |job: &usize| has_times(job) && shared.rivals[*job].iter().any(has_times);
    let (fixed, mut turned): (Vec<usize>, Vec<usize>) =
        group.iter().copied().filter(takes_turns).partition(|job| given(job).is_some());
    turned.sort_by_cached_key(|job| (Reverse(priority(view, *job)), *job));
    let mut place_of: Vec<Option<usize>> = vec![None; view.jobs.len()];
    fixed.iter().chain(&turned).enumerate().for_each(|(place, job)| place_of[*job] = Some(place));
    let rivals_of = |job: &usize| {
        let mut places: Vec<usize> = shared.rivals[*job].iter().filter_map(|rival| place_of[*rival]).collect();
        places.sort_unstable();
        places
    };
    let rivals: Vec<Vec<usize>> = fixed.iter().chain(&turned).map(rivals_of).collect();
    let given: Vec<Arc> = fixed.iter().filter_map(given).map(Arc::during).collect();
    let bursts: Vec<Arc> = turned.iter().filter_map(|job| view.jobs[*job].profile).map(Arc::of).collect();
    let later =
        |arc: &Arc| Arc { period_ns: arc.period_ns.saturating_add(arc.period_ns / 100 * LATER_PERCENT), ..*arc };
    let bursts =
        windows::commensurable(&bursts.iter().map(later).collect::<Vec<_>>(), given.first().map(|arc| arc.period_ns));
    let placed = MARGINS_PERCENT.iter().find_map(|percent| {
        let longer = |arc: &Arc| {
            let busy_ns = arc.busy_ns.saturating_add(arc.busy_ns / 100 * percent + arc.busy_ns % 100 * percent / 100);
            Arc { busy_ns: busy_ns.min(arc.period_ns), ..*arc }
        };
        let arcs: Vec<Arc> = given.iter().copied().chain(bursts.iter().map(longer)).collect();
        let offsets = windows::place(&arcs, given.len(), &rivals)?;
        Some(arcs.into_iter().zip(offsets).map(|(arc, offset_ns)| Arc { offset_ns, ..arc }.window()))
    });
    turned.into_iter().zip(placed.into_iter().flatten().skip(given.len())).collect()
}

/// When a job makes room for rivals of higher priority: never where it has a window, or they would leave it no gap.
fn bursts_above(view: &View<'_>, shared: &Shared, decisions: &Decisions, low: usize, early_ns: u64) -> Vec<Yield> {
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
    let expected: Vec<Window> = windows::commensurable(&arcs, None).iter().map(Arc::window).collect();
    if windows::leave_a_gap(&expected) { bursts } else { Vec::new() }
}
