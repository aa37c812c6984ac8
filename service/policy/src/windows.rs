//! Places time windows on a period: which jobs meet on which link, and when each may send.
//!
//! A job that sends for `busy` of every `period` is an arc on a circle of one period. On a circle of the common multiple of several
//! periods it is several arcs, which turn together. Two arcs are apart for ever if, and only if, they are apart on the circle of
//! the common divisor of their periods; so all is decided pair by pair.

use super::decision::Window;
use super::flows::Assigned;
use super::view::{Profile, View};
use crate::topology::LinkId;

/// Periods that differ by less than this part of them are made the same.
const ALIKE_PERCENT: u64 = 3;
/// Other periods are rounded up to multiples of this part of the shortest, so that they have a common divisor.
const GRID: u64 = 16;
/// Positions that are tried before a search is given up.
const TRIES_MAX: usize = 20_000;
/// Larger groups are not searched: with so many in each other's way there is no time that is free of all.
const GROUP_MAX: usize = 8;
/// Periods of a circle on which gaps are looked for.
const TURNS_MAX: u64 = 64;
/// Times that windows open on such a circle, all together; where one opens as often there is no gap that is worth a search.
const OPENINGS_MAX: u64 = 1 << 16;
/// Bytes that a flow that makes room for others is reckoned to have under way: a message (`engines/transport/links`), of the two that it
/// may have (`service/model/src/rate_limit.rs`).
const UNDER_WAY_BITS: f64 = 8.0 * 262_144.0;
/// A gap that is less than this part of its circle is no way to get work done.
const GAP_LEAST: u64 = 20;

/// A job's part of the circle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arc {
    /// Circle; at least 1.
    pub period_ns: u64,
    /// Arc, at most the circle.
    pub busy_ns: u64,
    /// Its begin now.
    pub offset_ns: u64,
}

impl Arc {
    /// The arc of a profile.
    #[must_use]
    pub fn of(profile: Profile) -> Self {
        let period_ns = profile.period_ns.max(1);
        Arc { period_ns, busy_ns: profile.busy_ns.min(period_ns), offset_ns: profile.phase_ns % period_ns }
    }

    /// That a window is open during.
    #[must_use]
    pub fn during(window: Window) -> Self {
        let Window { period_ns, offset_ns, length_ns } = window;
        Arc { period_ns, busy_ns: length_ns, offset_ns }
    }

    /// The window that is open during the arc.
    #[must_use]
    pub fn window(&self) -> Window {
        Window { period_ns: self.period_ns, offset_ns: self.offset_ns, length_ns: self.busy_ns }
    }
}

/// Arcs with periods that have a common divisor worth the name, with each other and with a period that is `given`: nearly equal ones become equal,
/// others are rounded up.
#[must_use]
pub fn commensurable(arcs: &[Arc], given: Option<u64>) -> Vec<Arc> {
    let alike = |a: u64, b: u64| b - a <= a / 100 * ALIKE_PERCENT;
    let (base, grid) = match given {
        Some(period) => (
            period,
            (1..=GRID).rev().find_map(|parts| (period % parts == 0).then_some(period / parts)).unwrap_or(period),
        ),
        None => {
            let mut sorted: Vec<u64> = arcs.iter().map(|arc| arc.period_ns).collect();
            sorted.sort_unstable();
            let shortest = sorted.first().copied().unwrap_or(1);
            let base = sorted.iter().copied().take_while(|period| alike(shortest, *period)).last().unwrap_or(shortest);
            let grid = base.div_ceil(GRID);
            (grid.saturating_mul(GRID), grid)
        }
    };
    let grid = grid.max(1);
    let is_base = |period: u64| period <= base && (given.is_none() || alike(period, base));
    let period_ns = |period: u64| if is_base(period) { base } else { period.div_ceil(grid).saturating_mul(grid) };
    arcs.iter().map(|arc| Arc { period_ns: period_ns(arc.period_ns), ..*arc }).collect()
}

/// Whether two windows are ever open at once.
#[must_use]
pub fn meet(a: &Window, b: &Window) -> bool {
    let common = gcd(a.period_ns, b.period_ns).max(1);
    let lag = (b.offset_ns % common + common - a.offset_ns % common) % common;
    a.length_ns > 0 && b.length_ns > 0 && (lag < a.length_ns || lag + b.length_ns > common)
}

/// Offsets at which no two rivals ever meet, if there are any and the search finds them: groups of up to four are searched
/// completely, those beyond eight not at all. The first `fixed` arcs, or else the first one, stay where they are, be it that they meet; earlier ones are placed first.
#[must_use]
pub fn place(arcs: &[Arc], fixed: usize, rivals: &[Vec<usize>]) -> Option<Vec<u64>> {
    if arcs.len() > GROUP_MAX {
        return None;
    }
    let stays = |(place, arc): (usize, &Arc)| (place < fixed).then_some(arc.offset_ns % arc.period_ns);
    let placed = arcs.iter().enumerate().map(stays).collect();
    let mut search = Search { arcs, rivals, placed, tries: 0 };
    search.run().then(|| search.placed.into_iter().flatten().collect())
}

struct Search<'a> {
    arcs: &'a [Arc],
    rivals: &'a [Vec<usize>],
    placed: Vec<Option<u64>>,
    tries: usize,
}

impl Search<'_> {
    /// In any solution arcs can be turned back until each touches another, so only such positions are tried: after or before
    /// a rival that has its place. Which arc comes next is part of the search.
    fn run(&mut self) -> bool {
        if self.placed.iter().all(Option::is_some) {
            return true;
        }
        let free: Vec<usize> = (0..self.arcs.len()).filter(|arc| self.placed[*arc].is_none()).collect();
        let touching: Vec<usize> = free
            .iter()
            .copied()
            .filter(|arc| self.rivals[*arc].iter().any(|rival| self.placed[*rival].is_some()))
            .collect();
        if touching.is_empty() {
            // A part of the group that nothing placed so far concerns: its first stays where it is.
            self.placed[free[0]] = Some(self.arcs[free[0]].offset_ns % self.arcs[free[0]].period_ns);
            let found = self.run();
            if !found {
                self.placed[free[0]] = None;
            }
            return found;
        }
        for arc in touching {
            for offset in self.positions(arc) {
                self.tries += 1;
                if self.tries > TRIES_MAX {
                    return false;
                }
                if self.fits(arc, offset) {
                    self.placed[arc] = Some(offset);
                    if self.run() {
                        return true;
                    }
                    self.placed[arc] = None;
                }
            }
        }
        false
    }

    /// One after the other: where periods have little in common they are too many to be kept, or to be tried.
    fn positions(&self, arc: usize) -> impl Iterator<Item = u64> + use<> {
        let this = self.arcs[arc];
        let mut starts = Vec::new();
        for rival in &self.rivals[arc] {
            let (Some(offset), other) = (self.placed[*rival], &self.arcs[*rival]) else { continue };
            let common = gcd(this.period_ns, other.period_ns).max(1);
            let after = (offset % common + other.busy_ns % common) % common;
            let before = (offset % common + common - this.busy_ns % common) % common;
            starts.extend([after, before].map(|first| (first, common)));
        }
        let turns = move |(first, common): (u64, u64)| {
            (0..this.period_ns / common).map(move |turn| first.saturating_add(turn * common))
        };
        starts.into_iter().flat_map(turns)
    }

    fn fits(&self, arc: usize, offset_ns: u64) -> bool {
        let this = Arc { offset_ns, ..self.arcs[arc] }.window();
        self.rivals[arc].iter().all(|rival| {
            let placed = self.placed[*rival].map(|offset_ns| Arc { offset_ns, ..self.arcs[*rival] }.window());
            placed.is_none_or(|other| !meet(&this, &other))
        })
    }
}

/// Whether there is a time at which none of some windows is open, on the circle of their common multiple, that is long enough to be worth it.
/// Not where there are no windows, where the circle would be too long, or windows open too often on it.
#[must_use]
pub fn leave_a_gap(windows: &[Window]) -> bool {
    let mut circle = 1_u64;
    let longest = windows.iter().map(|window| window.period_ns).max().unwrap_or(0);
    for window in windows {
        let Some(common) = (circle / gcd(circle, window.period_ns)).checked_mul(window.period_ns) else { return false };
        circle = common;
        if circle / longest > TURNS_MAX {
            return false;
        }
    }
    let openings = windows.iter().map(|window| circle / window.period_ns);
    if openings.fold(0, u64::saturating_add) > OPENINGS_MAX {
        return false;
    }
    let openings = windows.iter().flat_map(|window| {
        (0..circle / window.period_ns).map(|turn| Opening {
            offset_ns: window.offset_ns % window.period_ns + turn * window.period_ns,
            length_ns: window.length_ns,
        })
    });
    let mut openings: Vec<Opening> = openings.collect();
    openings.sort_unstable();
    let Some(first) = openings.first().copied() else { return false };
    let mut best = 0;
    // The latest end so far, which may be that of an arc that lasts beyond the turn of the circle.
    let mut end = openings.iter().map(Opening::end_ns).max().unwrap_or(0).saturating_sub(circle);
    let again = Opening { offset_ns: first.offset_ns + circle, length_ns: 0 };
    for opening in openings.iter().copied().chain([again]) {
        best = best.max(opening.offset_ns.saturating_sub(end));
        end = end.max(opening.end_ns());
    }
    best > 0 && best >= circle / GAP_LEAST
}

/// When a window is open, on the circle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Opening {
    offset_ns: u64,
    length_ns: u64,
}

impl Opening {
    fn end_ns(&self) -> u64 {
        self.offset_ns + self.length_ns
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A job's load on a link.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Use {
    /// The job, by its place in the view.
    pub job: usize,
    /// Its flows there.
    pub flows: u32,
    /// Demand of all of them together.
    pub demand_bps: f64,
}

/// Links that jobs share and that cannot carry them all, as far as paths are decided.
#[derive(Debug)]
pub struct Shared {
    /// Ascending.
    crowded: Vec<(LinkId, Vec<Use>)>,
    /// By job: those with which it shares a link that cannot carry both, ascending.
    pub rivals: Vec<Vec<usize>>,
}

impl Shared {
    /// From flows on paths.
    #[must_use]
    pub fn new(view: &View<'_>, assigned: &Assigned) -> Self {
        let mut by_link: Vec<Vec<Use>> = vec![Vec::new(); view.topology.link_count()];
        for (job, (decision, hops)) in assigned.decisions.0.iter().zip(&assigned.hops).enumerate() {
            for (hop, flow) in hops.iter().zip(&decision.flows) {
                let super::PathSelection::Path(path) = flow.path else { continue };
                for link in view.topology.route(flow.from, flow.to, path).links() {
                    let uses = &mut by_link[link.index()];
                    match uses.last_mut().filter(|last| last.job == job) {
                        Some(last) => {
                            last.flows += 1;
                            last.demand_bps += hop.demand_bps;
                        }
                        None => uses.push(Use { job, flows: 1, demand_bps: hop.demand_bps }),
                    }
                }
            }
        }
        // A little less than too much is no contention.
        let capacity = |link: LinkId| view.capacities[link.index()] * 1.001;
        let mut crowded: Vec<(LinkId, Vec<Use>)> = (0..).map(LinkId).zip(by_link).collect();
        crowded.retain(|(link, uses)| uses.iter().map(|used| used.demand_bps).sum::<f64>() > capacity(*link));
        let mut shared = Shared { crowded, rivals: vec![Vec::new(); view.jobs.len()] };
        shared.find_rivals(capacity);
        shared
    }

    /// Job by job, so that whoever meets another on many links is found once, and no long lists are sorted.
    fn find_rivals(&mut self, capacity: impl Fn(LinkId) -> f64) {
        let jobs = self.rivals.len();
        let mut places: Vec<Vec<(usize, f64)>> = vec![Vec::new(); jobs];
        for (place, (_, uses)) in self.crowded.iter().enumerate() {
            uses.iter().for_each(|used| places[used.job].push((place, used.demand_bps)));
        }
        let mut found_by = vec![usize::MAX; jobs];
        for (job, rivals) in self.rivals.iter_mut().enumerate() {
            for (place, demand_bps) in &places[job] {
                let (link, uses) = &self.crowded[*place];
                let capacity = capacity(*link);
                for other in uses.iter().filter(|other| demand_bps + other.demand_bps > capacity) {
                    if other.job != job && std::mem::replace(&mut found_by[other.job], job) != job {
                        rivals.push(other.job);
                    }
                }
            }
            rivals.sort_unstable();
        }
    }

    /// Links that cannot carry all who use them, and who that is.
    pub fn crowded(&self) -> impl Iterator<Item = (LinkId, &[Use])> {
        self.crowded.iter().map(|(link, uses)| (*link, uses.as_slice()))
    }

    /// By job: how long a link that it shares takes at most to carry what its flows there have under way.
    #[must_use]
    pub fn drains_ns(&self, view: &View<'_>) -> Vec<u64> {
        let mut drains_ns = vec![0; self.rivals.len()];
        for (link, uses) in self.crowded().filter(|(link, _)| view.capacities[link.index()] > 0.0) {
            for used in uses {
                let drain_ns = f64::from(used.flows) * UNDER_WAY_BITS / view.capacities[link.index()] * 1e9;
                drains_ns[used.job] = drains_ns[used.job].max(drain_ns as u64);
            }
        }
        drains_ns
    }

    /// Jobs that are rivals of each other, directly or over others; each group ascending.
    #[must_use]
    pub fn groups(&self) -> Vec<Vec<usize>> {
        let mut seen = vec![false; self.rivals.len()];
        let mut groups = Vec::new();
        for first in 0..seen.len() {
            if seen[first] || self.rivals[first].is_empty() {
                continue;
            }
            seen[first] = true;
            let mut group = vec![first];
            let mut next = 0;
            while let Some(job) = group.get(next).copied() {
                next += 1;
                for rival in self.rivals[job].iter().copied() {
                    if !std::mem::replace(&mut seen[rival], true) {
                        group.push(rival);
                    }
                }
            }
            group.sort_unstable();
            groups.push(group);
        }
        groups
    }
}
