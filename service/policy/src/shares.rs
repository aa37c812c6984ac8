//! Bandwidth shares of links: weighted max-min fairness with caps and priorities.
//!
//! All rates rise together, each as fast as its weight, until a link is full or a cap reached; who is concerned stays there, and the
//! rest rises on. Higher priorities are filled first, lower ones have what is left. The same code says what rates tenants
//! will get, and moves the simulator's flows.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use super::decision::{Decision, Decisions, Flow, PathSelection};
use super::view::View;
use crate::topology::HostId;

/// Payload of full frames of 1,500 bytes, TCP's and Ethernet's headers besides (1,448 of 1,538), less what keeps queues empty:
/// a share is kept only where its owner's congestion control has nothing to say. Caps are of payload, links carry headers as well.
pub const PAYLOAD: f64 = 0.92;

/// Part of a link that those have who would have nothing, all together: a job of low priority must not stop for as long as others send, since
/// hosts hold it to its rate whether they do or not.
const LEAST: f64 = 0.02;

/// A flow that wants a rate.
#[derive(Debug, Clone, Copy)]
pub struct Demand<'a> {
    /// Above 0.
    pub weight: f64,
    /// Most that it takes.
    pub cap: f64,
    /// Higher goes first.
    pub priority: u32,
    /// Links, each once, and what a rate of 1 takes of them.
    pub uses: &'a [(u32, f64)],
}

/// Allocates rates; keeps its memory from one time to the next.
#[derive(Debug, Default)]
pub struct Filler {
    /// By link: its place among the links of this time.
    places: Vec<u32>,
    links: Vec<Link>,
    /// Demands by place.
    users: Vec<Vec<u32>>,
    heap: BinaryHeap<Event>,
    order: Vec<u32>,
}

#[derive(Debug, Clone, Copy)]
struct Link {
    number: u32,
    left: f64,
    /// Sum of weights times use of those that rise.
    weight: f64,
    rising: u32,
}

impl Link {
    /// Rate of weight 1 at which it is full.
    fn level(&self) -> f64 {
        self.left.max(0.0) / self.weight.max(f64::MIN_POSITIVE)
    }
}

/// Something gets full.
#[derive(Debug, Clone, Copy)]
struct Event {
    /// Rate of weight 1 at which it happens.
    level: f64,
    what: Full,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Full {
    Demand(u32),
    Link(u32),
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    /// The heap's greatest is the lowest level.
    fn cmp(&self, other: &Self) -> Ordering {
        other.level.total_cmp(&self.level).then_with(|| other.what.cmp(&self.what))
    }
}

const NOWHERE: u32 = u32::MAX;

impl Filler {
    /// Rates of `demands`, in their order, on links of these capacities. A demand that uses no link gets its cap.
    pub fn fill(&mut self, capacities: &[f64], demands: &[Demand<'_>], rates: &mut Vec<f64>) {
        rates.clear();
        rates.resize(demands.len(), f64::NAN);
        self.places.resize(capacities.len().max(self.places.len()), NOWHERE);
        self.order.clear();
        self.order.extend(0..demands.len() as u32);
        self.order.sort_by_key(|number| std::cmp::Reverse(demands[*number as usize].priority));
        let order = std::mem::take(&mut self.order);
        for class in order.chunk_by(|a, b| demands[*a as usize].priority == demands[*b as usize].priority) {
            self.begin(capacities, demands, class);
            self.rise(demands, rates, class.len());
        }
        self.order = order;
        for link in self.links.drain(..) {
            self.places[link.number as usize] = NOWHERE;
        }
    }

    /// Lets the demands of a priority rise from nothing.
    fn begin(&mut self, capacities: &[f64], demands: &[Demand<'_>], class: &[u32]) {
        for number in class {
            let demand = &demands[*number as usize];
            for (link, part) in demand.uses {
                let place = &mut self.places[*link as usize];
                if *place == NOWHERE {
                    *place = self.links.len() as u32;
                    let left = capacities[*link as usize];
                    self.links.push(Link { number: *link, left, weight: 0.0, rising: 0 });
                }
                let place = *place as usize;
                if self.users.len() <= place {
                    self.users.resize_with(place + 1, Vec::new);
                }
                self.users[place].push(*number);
                let link = &mut self.links[place];
                // The rest of the weights of the class before is rounding.
                link.weight = if link.rising == 0 { 0.0 } else { link.weight } + demand.weight * part;
                link.rising += 1;
            }
            if demand.cap.is_finite() || demand.uses.is_empty() {
                self.heap.push(Event { level: demand.cap / demand.weight, what: Full::Demand(*number) });
            }
        }
        let links = (0..).zip(&self.links).filter(|(_, link)| link.rising > 0);
        self.heap.extend(links.map(|(place, link)| Event { level: link.level(), what: Full::Link(place) }));
    }

    /// A link's level only rises while demands stop elsewhere, so what the heap says of it is a lower bound: looked at when it
    /// comes up, and put back where it has risen.
    fn rise(&mut self, demands: &[Demand<'_>], rates: &mut [f64], mut rising: usize) {
        while rising > 0
            && let Some(Event { level, what }) = self.heap.pop()
        {
            match what {
                Full::Demand(number) => rising -= self.stop(demands, rates, number, level),
                Full::Link(place) => {
                    let link = self.links[place as usize];
                    if link.rising == 0 {
                        continue;
                    }
                    if link.level() > level * (1.0 + 1e-12) {
                        self.heap.push(Event { level: link.level(), what });
                        continue;
                    }
                    let users = std::mem::take(&mut self.users[place as usize]);
                    for number in &users {
                        rising -= self.stop(demands, rates, *number, level);
                    }
                    self.users[place as usize] = users;
                }
            }
        }
        self.heap.clear();
        self.users.iter_mut().take(self.links.len()).for_each(Vec::clear);
    }

    /// A demand that rises stays where it is: returns how many that were.
    fn stop(&mut self, demands: &[Demand<'_>], rates: &mut [f64], number: u32, level: f64) -> usize {
        let (demand, rate) = (&demands[number as usize], &mut rates[number as usize]);
        if !rate.is_nan() {
            return 0;
        }
        *rate = (level * demand.weight).min(demand.cap);
        for (link, part) in demand.uses {
            let link = &mut self.links[self.places[*link as usize] as usize];
            link.left -= *rate * part;
            link.weight -= demand.weight * part;
            link.rising -= 1;
        }
        1
    }
}

/// Gives communicators the weights that make tenants' shares right: on each link that tenants share, a tenant's weight is divided
/// among its flows there. If a communicator's flows meet different numbers of their tenant's, the most crowded link counts.
pub fn weigh(view: &View<'_>, decisions: &mut Decisions) {
    if !view.rules.has_shares() {
        return;
    }
    let mut numbers: HashMap<&str, u32> = HashMap::new();
    let tenants: Vec<u32> = view
        .jobs
        .iter()
        .map(|job| {
            let next = numbers.len() as u32;
            *numbers.entry(&job.tenant).or_insert(next)
        })
        .collect();
    // By link: tenants and how many flows they have there.
    let mut users: Vec<Vec<(u32, u32)>> = vec![Vec::new(); view.topology.link_count()];
    for (tenant, decision) in tenants.iter().zip(&decisions.0) {
        for link in decision.flows.iter().flat_map(|flow| known_links(view, flow)) {
            let users = &mut users[link as usize];
            match users.iter_mut().find(|(user, _)| user == tenant) {
                Some((_, flows)) => *flows += 1,
                None => users.push((*tenant, 1)),
            }
        }
    }
    let weights = view.rules.weights(view.jobs);
    for ((job, tenant), decision) in view.jobs.iter().zip(&tenants).zip(&mut decisions.0) {
        let links = decision.flows.iter().flat_map(|flow| known_links(view, flow));
        let shared = links.map(|link| &users[link as usize]).filter(|users| users.len() > 1);
        let own = |users: &Vec<(u32, u32)>| users.iter().find(|(user, _)| user == tenant).map(|(_, flows)| *flows);
        let most = shared.filter_map(own).max().unwrap_or(1);
        decision.weight = weights.of(&job.tenant) / f64::from(most);
    }
}

/// The links that a flow goes over, as far as is known: a hashed one may go anywhere between its leaves, and so may one whose way has a link
/// that carries nothing.
fn known_links<'a>(view: &View<'a>, flow: &Flow) -> impl Iterator<Item = u32> + use<'a> {
    let topology = view.topology;
    let (path, is_decided) = if let PathSelection::Path(path) = flow.path { (path, true) } else { (0, false) };
    let route = topology.route(flow.from, flow.to, path);
    let is_whole = route.links().iter().all(|link| view.capacities[link.index()] > 0.0);
    let links = (0..route.links().len()).map(move |place| route.links()[place]);
    links.filter(move |link| (is_decided && is_whole) || topology.is_edge(*link)).map(|link| link.0)
}

/// Rate of a decision's cap on links: headers besides.
fn carried_cap(decision: &Decision) -> f64 {
    decision.cap_bps.map_or(f64::INFINITY, |cap_bps| cap_bps / PAYLOAD)
}

/// The network as flows share it: its links, and behind these as many more as tenants with a cap of hosts have hosts, each of what such a tenant
/// sends out of one.
struct Shared<'a> {
    view: &'a View<'a>,
    /// By link.
    capacities: Vec<f64>,
    exits: HashMap<(&'a str, HostId), u32>,
}

impl<'a> Shared<'a> {
    fn new(view: &'a View<'a>, decisions: &Decisions) -> Self {
        let mut shared = Shared { view, capacities: view.capacities.to_vec(), exits: HashMap::new() };
        for (job, decision) in view.jobs.iter().zip(&decisions.0) {
            let Some(host_cap_bps) = decision.host_cap_bps else { continue };
            for flow in &decision.flows {
                let next = shared.capacities.len() as u32;
                if *shared.exits.entry((&job.tenant, flow.from.host)).or_insert(next) == next {
                    shared.capacities.push(host_cap_bps / PAYLOAD);
                }
            }
        }
        shared
    }

    /// The links of a flow of a decision, by its place.
    fn links(&self, decision: usize, flow: &Flow) -> impl Iterator<Item = u32> + use<'a> {
        let tenant = self.view.jobs.get(decision).filter(|_| !self.exits.is_empty()).map(|job| &*job.tenant);
        let exit = tenant.and_then(|tenant| self.exits.get(&(tenant, flow.from.host)).copied());
        known_links(self.view, flow).chain(exit)
    }
}

/// Rates of every flow when all send at once, in bits per second that links carry, by decision and flow. Hashed flows count for the links
/// of their NICs only. To whom higher priorities leave nothing still has its part of `LEAST`.
#[must_use]
pub fn rates(view: &View<'_>, decisions: &Decisions) -> Vec<Vec<f64>> {
    let shared = Shared::new(view, decisions);
    let mut rates = fill(&shared, decisions, &shared.capacities, |_, _| f64::INFINITY);
    let mut users = vec![0_u32; shared.capacities.len()];
    for (number, decision) in decisions.0.iter().enumerate() {
        let links = decision.flows.iter().flat_map(|flow| shared.links(number, flow));
        links.for_each(|link| users[link as usize] += 1);
    }
    let least = |link: u32| LEAST * shared.capacities[link as usize] / f64::from(users[link as usize].max(1));
    for (number, (decision, rates)) in decisions.0.iter().zip(&mut rates).enumerate() {
        for (flow, rate) in decision.flows.iter().zip(rates) {
            let least = shared.links(number, flow).map(least).fold(carried_cap(decision), f64::min);
            *rate = rate.max(least);
        }
    }
    rates
}

/// Wants of every flow if some want less than their `rates`: by decision, the part of them that it wants, or `None` for all there
/// is. Leftovers of some go to the others by their weights; and nobody has less than at `rates`, so that a flow that begins again
/// need not wait.
#[must_use]
pub fn with_what_is_left(
    view: &View<'_>,
    decisions: &Decisions,
    rates: &[Vec<f64>],
    wanted_parts: &[Option<f64>],
) -> Vec<Vec<f64>> {
    let shared = Shared::new(view, decisions);
    let wanted = fill(&shared, decisions, &shared.capacities, |decision, flow| {
        wanted_parts[decision].map_or(f64::INFINITY, |part| part * rates[decision][flow])
    });
    let mut left = shared.capacities.clone();
    for (number, (decision, wanted)) in decisions.0.iter().zip(&wanted).enumerate() {
        for (flow, rate) in decision.flows.iter().zip(wanted) {
            shared.links(number, flow).for_each(|link| left[link as usize] = (left[link as usize] - rate).max(0.0));
        }
    }
    // A flow that wants less than it gets may want more next.
    let more = fill(&shared, decisions, &left, |decision, flow| {
        (carried_cap(&decisions.0[decision]) - wanted[decision][flow]).max(0.0)
    });
    let sum = |decision: usize, flow: usize| (wanted[decision][flow] + more[decision][flow]).max(rates[decision][flow]);
    let of = |decision: usize| (0..rates[decision].len()).map(|flow| sum(decision, flow)).collect();
    (0..rates.len()).map(of).collect()
}

/// Rates of all flows on links of these capacities, of which each takes no more than `most` says of its decision and place.
fn fill(
    shared: &Shared<'_>,
    decisions: &Decisions,
    capacities: &[f64],
    most: impl Fn(usize, usize) -> f64,
) -> Vec<Vec<f64>> {
    let numbered = || decisions.0.iter().enumerate();
    let flows = || {
        numbered()
            .flat_map(|(number, decision)| decision.flows.iter().enumerate().map(move |flow| (number, decision, flow)))
    };
    let uses: Vec<Vec<(u32, f64)>> =
        flows().map(|(number, _, (_, flow))| shared.links(number, flow).map(|link| (link, 1.0)).collect()).collect();
    let demands: Vec<Demand<'_>> = flows()
        .zip(&uses)
        .map(|((number, decision, (place, _)), uses)| Demand {
            weight: decision.weight,
            cap: carried_cap(decision).min(most(number, place)),
            priority: decision.priority,
            uses,
        })
        .collect();
    let mut all = Vec::new();
    Filler::default().fill(capacities, &demands, &mut all);
    let mut all = all.into_iter();
    decisions.0.iter().map(|decision| all.by_ref().take(decision.flows.len()).collect()).collect()
}
