//! `yield`: what `priority` does, by pacing on hosts, for networks with a single queue.
//!
//! Flows are assigned fairly over all paths. A job with a profile is known to send at certain times; at these, jobs of lower
//! priority that share a link with it hold their flows to what it leaves them there. At all other times nobody is held back, so
//! nothing is reserved while the first computes. Ours; the times come from profiles, as in CASSINI (NSDI 2024). If a job's bursts
//! are foreseen one by one (`service/telemetry/src/profile.rs`) they take the place of the times.

use super::windows::{Shared, Use};
use super::{Decisions, Job, Policy, Profile, View, Window, Yield, flows, shares};

/// Margin of the first beyond its profile, in percent of it: clocks and compute times vary.
const MARGIN_PERCENT: u64 = 3;

/// A flow always gets this part of a link: it must not stop where others take all.
const LEAST: f64 = 0.02;

/// Jobs that a job makes room for at most: those that leave it least. With more, there is no time at which it would not.
pub(super) const YIELDS_MAX: usize = 8;

/// See the module's documentation.
pub(super) struct Yielding;

impl Policy for Yielding {
    fn name(&self) -> &'static str {
        "yield"
    }

    fn uses_profiles(&self) -> bool {
        true
    }

    fn uses_priorities(&self) -> bool {
        true
    }

    fn decide(&self, view: &View<'_>) -> Decisions {
        let assigned = flows::assign(view, |_, _| true);
        let priorities: Vec<u32> = view.jobs.iter().map(|job| view.rules.priority(&job.tenant)).collect();
        let shared = Shared::new(view, &assigned);
        let drains_ns = shared.drains_ns(view);
        let mut decisions = assigned.decisions;
        let (mut rooms, mut rooms_of) = (Vec::new(), vec![Vec::new(); view.jobs.len()]);
        for room in
            shared.crowded().filter_map(|(link, uses)| Room::new(uses, view.capacities[link.index()], &priorities))
        {
            room.uses.iter().for_each(|used| rooms_of[used.job].push(rooms.len()));
            rooms.push(room);
        }
        // Rate that a job that makes room for another has left: by that other, on the link where it is least. One job after the other, so
        // that this is a table and nothing is looked up.
        let mut left_bps = vec![f64::INFINITY; view.jobs.len()];
        let mut firsts: Vec<usize> = Vec::new();
        for (low, decision) in decisions.0.iter_mut().enumerate() {
            for room in rooms_of[low].iter().map(|room| &rooms[*room]) {
                for class in room.classes.iter().filter(|class| class.priority > priorities[low]) {
                    for high in class.jobs.iter().copied() {
                        if left_bps[high].is_infinite() {
                            firsts.push(high);
                        }
                        left_bps[high] = left_bps[high].min(class.left_bps);
                    }
                }
            }
            let yields = |high: &usize| {
                let Job { comm, profile, .. } = &view.jobs[*high];
                let window = expected((*profile)?);
                Some(Yield { to: *comm, window, early_ns: drains_ns[low], cap_bps: left_bps[*high] })
            };
            firsts.retain(|high| view.jobs[*high].profile.is_some());
            firsts.sort_unstable_by(|a, b| left_bps[*a].total_cmp(&left_bps[*b]).then(a.cmp(b)));
            decision.yields = firsts.iter().take(YIELDS_MAX).filter_map(yields).collect();
            firsts.drain(..).for_each(|high| left_bps[high] = f64::INFINITY);
        }
        shares::weigh(view, &mut decisions);
        decisions
    }
}

/// A link that jobs of several priorities share.
struct Room<'a> {
    uses: &'a [Use],
    /// Those for whom others make room, ascending.
    classes: Vec<Class>,
}

/// Jobs of one priority on a link.
struct Class {
    priority: u32,
    jobs: Vec<usize>,
    /// Rate that they and those above leave each flow of those below.
    left_bps: f64,
}

impl<'a> Room<'a> {
    /// `None` where all are of one priority; or where nobody gets anything, and must not be held back elsewhere for it.
    fn new(uses: &'a [Use], capacity: f64, priorities: &[u32]) -> Option<Self> {
        let mut classes: Vec<u32> = uses.iter().map(|used| priorities[used.job]).collect();
        classes.sort_unstable();
        classes.dedup();
        let class = |priority: u32| {
            let (low, first): (Vec<&Use>, Vec<&Use>) = uses.iter().partition(|used| priorities[used.job] < priority);
            let taken: f64 = first.iter().map(|used| used.demand_bps).sum();
            let flows: u32 = low.iter().map(|used| used.flows).sum();
            let jobs = first.iter().map(|used| used.job).filter(|job| priorities[*job] == priority).collect();
            Class { priority, jobs, left_bps: (capacity - taken).max(LEAST * capacity) / f64::from(flows) }
        };
        let is_shared = capacity > 0.0 && classes.len() > 1;
        is_shared.then(|| Room { uses, classes: classes.into_iter().skip(1).map(class).collect() })
    }
}

/// When a job is expected to send.
pub(super) fn expected(profile: Profile) -> Window {
    let period_ns = profile.period_ns.max(1);
    let early_ns = profile.busy_ns / 100 * MARGIN_PERCENT + profile.busy_ns % 100 * MARGIN_PERCENT / 100;
    Window {
        period_ns,
        offset_ns: (profile.phase_ns % period_ns + period_ns - early_ns % period_ns) % period_ns,
        length_ns: (profile.busy_ns + 2 * early_ns).min(period_ns),
    }
}
