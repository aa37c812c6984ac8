//! Flows between hosts from ring orders, and their assignment to paths by load.
//!
//! A flow wants as much as its NICs give it: what the NIC carries, divided among the flows of its job there. [`Loads`] keeps
//! what has been put on every link, and finds the path on which a further flow makes the fullest link least full.

use std::collections::HashMap;

use super::decision::{Decision, Decisions, Flow, PathSelection};
use super::rings;
use super::view::{Job, PlacedRank, View};
use crate::topology::{Between, HostId, LinkId, Port, Topology};

/// A flow before it has a path.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hop {
    /// Channel of the job.
    pub channel: u32,
    /// Sender.
    pub from: Port,
    /// Receiver.
    pub to: Port,
    /// Bits per second that it could use.
    pub demand_bps: f64,
}

/// Every flow between hosts that rings of a job have, channel by channel in the order of the ring.
///
/// In a ring that visits every host once, a channel uses the NIC of the same device in and out: the one whose rank is first
/// there. Otherwise a flow leaves from the sending rank's NIC and arrives at the receiving rank's.
#[must_use]
pub fn hops(view: &View<'_>, job: &Job, orders: &[Vec<u32>]) -> Vec<Hop> {
    let topology = view.topology;
    let mut places = vec![(0_usize, 0_u32); job.nranks() as usize];
    for (number, placed) in job.hosts.iter().enumerate() {
        for PlacedRank { rank, device } in &placed.ranks {
            places[*rank as usize] = (number, *device);
        }
    }
    let mut hops = Vec::new();
    for (channel, order) in (0..).zip(orders) {
        // Ports by which a ring enters hosts: the host's number and the device of the first rank.
        let previous = order.iter().cycle().skip(order.len().saturating_sub(1));
        let pairs = previous.zip(order).map(|(from, to)| (places[*from as usize], places[*to as usize]));
        let entries: Vec<_> = pairs.filter(|((from, _), (to, _))| from != to).collect();
        let visits_once = entries.len() == job.hosts.len();
        let mut entered = vec![0; job.hosts.len()];
        entries.iter().for_each(|(_, (host, device))| entered[*host] = *device);
        for ((from, from_device), (to, to_device)) in entries {
            let out_device = if visits_once { entered[from] } else { from_device };
            hops.push(Hop {
                channel,
                from: topology.port_of(job.hosts[from].host, out_device),
                to: topology.port_of(job.hosts[to].host, to_device),
                demand_bps: 0.0,
            });
        }
    }
    let ends = |hop: &Hop| [topology.up_link(hop.from), topology.up_link(hop.to).reverse()];
    let mut used: Vec<LinkId> = hops.iter().flat_map(ends).collect();
    used.sort_unstable();
    let users = |link: LinkId| used.partition_point(|used| *used <= link) - used.partition_point(|used| *used < link);
    let terms = view.rules.of(&job.tenant);
    let cap_bps = terms.and_then(|terms| terms.cap_bps).unwrap_or(f64::INFINITY);
    let host_cap_bps = terms.and_then(|terms| terms.host_cap_bps);
    let mut leaving: HashMap<HostId, u32> = HashMap::new();
    hops.iter().for_each(|hop| *leaving.entry(hop.from.host).or_default() += 1);
    for hop in &mut hops {
        let share = |link: LinkId| view.capacities[link.index()] / users(link) as f64;
        let of_host = host_cap_bps.map_or(f64::INFINITY, |cap| cap / f64::from(leaving[&hop.from.host]));
        hop.demand_bps = ends(hop).into_iter().map(share).fold(cap_bps.min(of_host), f64::min);
    }
    hops
}

/// Loads of all links.
#[derive(Debug)]
pub struct Loads<'a> {
    topology: &'a Topology,
    capacities: &'a [f64],
    /// One over what links carry.
    inverses: Vec<f64>,
    loads_bps: Vec<f64>,
}

impl<'a> Loads<'a> {
    /// Nothing on any link.
    #[must_use]
    pub fn new(view: &View<'a>) -> Self {
        Loads {
            topology: view.topology,
            capacities: view.capacities,
            inverses: view.capacities.iter().map(|capacity| capacity.recip()).collect(),
            loads_bps: vec![0.0; view.capacities.len()],
        }
    }

    /// Load of a link.
    #[must_use]
    pub fn of(&self, link: LinkId) -> f64 {
        self.loads_bps[link.index()]
    }

    /// The best path for a flow among those that are allowed, by the number of their spine: the one whose fullest link is least
    /// full, then the one with the least on all links. Any, if none that is allowed carries anything; of paths that are alike, or all
    /// dead, the first from `first` on.
    #[must_use]
    pub fn best(&self, hop: &Hop, first: u32, allowed: impl Fn(u32) -> bool) -> u32 {
        // NICs are the same for all paths.
        let between = self.topology.between(hop.from, hop.to);
        if between.spine_count() == 0 {
            return 0;
        }
        let best = self.least(hop, &between, first, allowed).or_else(|| self.least(hop, &between, first, |_| true));
        best.unwrap_or(first % (between.spine_count() * between.paths_per_spine()))
    }

    /// The best of all paths over spines that are allowed, if one of them carries anything: [`Loads::best`].
    ///
    /// This is most of what it takes to decide for a large cluster, so that what paths over a spine have in common is looked at once.
    fn least(&self, hop: &Hop, between: &Between, first: u32, allowed: impl Fn(u32) -> bool) -> Option<u32> {
        let filled = |link: LinkId| (self.of(link) + hop.demand_bps) * self.inverses[link.index()];
        let (spines, per_spine) = (between.spine_count(), between.paths_per_spine());
        let first = first % (spines * per_spine);
        let (first_spine, first_of_spine) = (first / per_spine, first % per_spine);
        let mut best: Option<(u32, (f64, f64))> = None;
        // Once round, from the first path on; so the first spine may come twice, with the paths before the first one at the end.
        for turn in 0..=spines {
            let spine = (first_spine + turn) % spines;
            let paths = match turn {
                0 => first_of_spine..per_spine,
                _ if turn == spines => 0..first_of_spine,
                _ => 0..per_spine,
            };
            if paths.is_empty() || !allowed(spine) {
                continue;
            }
            let [up, down] = between.leaf_links(spine).map(filled);
            for path in paths.map(|path| spine * per_spine + path) {
                let cost = match between.core_links(path).map(|links| links.map(filled)) {
                    Some([over, back]) => (0.0_f64.max(up).max(over).max(back).max(down), up + over + back + down),
                    None => (0.0_f64.max(up).max(down), up + down),
                };
                if best.is_none_or(|(_, least)| is_less(cost, least)) {
                    best = Some((path, cost));
                }
            }
        }
        best.filter(|(_, cost)| cost.0.is_finite()).map(|(path, _)| path)
    }

    /// Whether no link between switches on a flow's path has more than it carries.
    fn fits(&self, hop: &Hop, path: u32) -> bool {
        let route = self.topology.route(hop.from, hop.to, path);
        let mut between = route.links().iter().filter(|link| !self.topology.is_edge(**link));
        between.all(|link| self.of(*link) <= self.capacities[link.index()] * (1.0 + 1e-9))
    }

    /// Puts a flow on a path, or with a factor of -1 takes it off.
    pub fn put(&mut self, hop: &Hop, path: u32, factor: f64) {
        for link in self.topology.route(hop.from, hop.to, path).links() {
            self.loads_bps[link.index()] += factor * hop.demand_bps;
        }
    }
}

/// Compares costs; sums of loads in another order differ in their last bits, which must not decide.
pub(super) fn is_less(a: (f64, f64), b: (f64, f64)) -> bool {
    const NEAR: f64 = 1e-9;
    if a.0.is_finite() != b.0.is_finite() || (a.0 - b.0).abs() > NEAR {
        return a.0 < b.0;
    }
    a.1 + NEAR < b.1
}

/// Flows on paths.
#[derive(Debug)]
pub struct Assigned {
    /// Every flow has a path, unless it is pinned; otherwise as [`leave_to_hash`].
    pub decisions: Decisions,
    /// Every flow of the decisions, in their order.
    pub hops: Vec<Vec<Hop>>,
}

/// Fair flow assignment: flows in descending order of demand, each to the path with the least excess, then once more those that
/// are on a link with too much. `allowed` says which spines a job may use. Pinned jobs are there before, and stay.
#[must_use]
pub fn assign(view: &View<'_>, allowed: impl Fn(&Job, u32) -> bool) -> Assigned {
    let mut assigned = derive(view);
    let mut loads = Loads::new(view);
    let mut order: Vec<(usize, usize)> = Vec::new();
    for (number, hops) in assigned.hops.iter().enumerate() {
        if view.jobs[number].pinned.is_none() {
            order.extend((0..hops.len()).map(|flow| (number, flow)));
            continue;
        }
        for (hop, flow) in hops.iter().zip(&assigned.decisions.0[number].flows) {
            if let PathSelection::Path(path) = flow.path {
                loads.put(hop, path, 1.0);
            }
        }
    }
    // Owners of spines are a matter of names: looked up once, not for every flow.
    let spines = view.topology.spine_count();
    let admitted: Vec<Vec<bool>> =
        view.jobs.iter().map(|job| (0..spines).map(|spine| allowed(job, spine)).collect()).collect();
    let demand_bps = |(number, flow): &(usize, usize)| assigned.hops[*number][*flow].demand_bps;
    order.sort_by(|a, b| demand_bps(b).total_cmp(&demand_bps(a)));
    for second in [false, true] {
        for (number, flow) in &order {
            let hop = &assigned.hops[*number][*flow];
            let slot = &mut assigned.decisions.0[*number].flows[*flow];
            let first = match slot.path {
                PathSelection::Path(path) => path,
                PathSelection::Hash => hop.channel,
            };
            if second {
                if loads.fits(hop, first) {
                    continue;
                }
                loads.put(hop, first, -1.0);
            }
            let path = loads.best(hop, first, |spine| admitted[*number][spine as usize]);
            loads.put(hop, path, 1.0);
            slot.path = PathSelection::Path(path);
        }
    }
    assigned
}

/// Rings and flows as wanted, every flow left to the hash but those that are pinned, and what the rules say of cap and window.
#[must_use]
pub fn leave_to_hash(view: &View<'_>) -> Decisions {
    derive(view).decisions
}

fn derive(view: &View<'_>) -> Assigned {
    let mut assigned = Assigned { decisions: Decisions::default(), hops: Vec::with_capacity(view.jobs.len()) };
    for job in view.jobs {
        let ring_orders = rings::orders(view, job);
        let hops = hops(view, job, &ring_orders);
        let flow = |hop: &Hop| {
            let flow = Flow { channel: hop.channel, from: hop.from, to: hop.to, path: PathSelection::Hash };
            Flow { path: job.pinned_path(view.topology, &flow), ..flow }
        };
        let terms = view.rules.of(&job.tenant);
        assigned.decisions.0.push(Decision {
            comm: job.comm,
            ring_orders,
            flows: hops.iter().map(flow).collect(),
            weight: 1.0,
            cap_bps: terms.and_then(|terms| terms.cap_bps),
            host_cap_bps: terms.and_then(|terms| terms.host_cap_bps),
            priority: 0,
            window: terms.and_then(|terms| terms.window),
            yields: Vec::new(),
        });
        assigned.hops.push(hops);
    }
    assigned
}
