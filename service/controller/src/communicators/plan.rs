//! Plan: hosts' reports become the policy's jobs, and its decisions become changes of strategy.
//!
//! A flow of a ring goes the way that its spine's `source_ports` or `dscp` say, and leaves by its NIC, where hosts have names for NICs. Flows that the policy leaves to the switches' hash, or
//! that stay below their leaf, have a way of their own that steers nothing: they must not go round the others. Flows that no ring has
//! (trees; sends and receives over TCP) go round the ways in use.
//!
//! Deliberately absent: what services cannot carry out. It is named in [`Plan::not_enforced`].

use std::collections::{BTreeMap, BTreeSet, HashMap};

use mccs_config::change::{FlowChoice, StrategyChange};
use mccs_config::limits;
use mccs_config::policy::Channels;
use mccs_config::service::{AlgorithmChoice, Device, FlowPath, TransportKind};

use crate::config::cluster_config::{ClusterConfig, Network};
use crate::links::Links;
use crate::messages::message::{Report, whole_change};
use crate::pace::{HostPace, host_paces, leave_what_cannot_be_told};
use mccs_model::{CommId, Name};
use mccs_policy::shares::PAYLOAD;
use mccs_policy::topology::{HostId, Topology};
use mccs_policy::{Decision, Flow, HostFlow, Job, PathSelection, Placed, PlacedRank, View, shares};
use mccs_telemetry::placed::Chosen;

/// Highest priority that a socket can have without a capability.
const PRIORITY_MAX: u32 = 6;

/// A communicator's rings, paths, flows and paces.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// Order of ranks of each channel's ring.
    pub rings: Vec<Vec<u32>>,
    /// How collectives are carried out.
    pub algorithm: AlgorithmChoice,
    /// Transport of its flows, if hosts have a choice.
    pub transport: Option<TransportKind>,
    /// Ways through the network, in the order of spines, then of NICs' names; one that steers nothing is the last.
    pub paths: Vec<FlowPath>,
    /// The path of every flow that a ring has between hosts; by channel and hosts.
    pub flows: Vec<FlowChoice>,
    /// How fast and when flows leave each host that has some.
    pub paces: Vec<(String, HostPace)>,
    /// Parts of the decision that are not carried out.
    pub not_enforced: Vec<String>,
}

impl Plan {
    /// Whether a strategy is as planned.
    #[must_use]
    pub fn is_met_by(&self, chosen: &Chosen) -> bool {
        let has = (&chosen.rings, chosen.algorithm, chosen.transport, &chosen.paths, &chosen.flows);
        (&self.rings, self.algorithm, self.transport, &self.paths, &self.flows) == has
    }

    /// Whether another plan is of the same strategy.
    #[must_use]
    pub fn is_same_strategy(&self, other: &Plan) -> bool {
        let theirs = (&other.rings, other.algorithm, other.transport, &other.paths, &other.flows);
        (&self.rings, self.algorithm, self.transport, &self.paths, &self.flows) == theirs
    }

    /// Others make room for the communicator's bursts: its root tells of them.
    fn watch(&mut self, comm: &CommId) {
        let root = comm.root.as_str();
        match self.paces.iter_mut().find(|(host, _)| host == root) {
            Some((_, pace)) => pace.is_watched = true,
            None => self.paces.push((root.to_owned(), HostPace { is_watched: true, ..HostPace::default() })),
        }
    }

    /// As a change of any strategy.
    #[must_use]
    pub fn change(&self) -> StrategyChange {
        whole_change(self.rings.clone(), self.algorithm, self.transport, self.paths.clone(), self.flows.clone())
    }
}

/// Flows' wants of their allotments, by communicator and the host that they leave: bits of payload per second together, or `None`
/// for all there is.
pub type Wants = BTreeMap<CommId, BTreeMap<Name, Option<u64>>>;

/// Plans of all communicators, in their order; or why one has no place in the network.
#[must_use]
pub fn plan_all<'a>(
    config: &ClusterConfig,
    links: &Links,
    reports: &[&'a Report],
    wants: &Wants,
) -> Vec<(&'a Report, Result<Plan, String>)> {
    let capacities = links.capacities(&config.network.topology);
    let jobs: Vec<_> = (0..).zip(reports).map(|(number, report)| job_of(config, &capacities, number, report)).collect();
    let placed: Vec<Job> = jobs.iter().filter_map(|job| job.as_ref().ok().cloned()).collect();
    let view =
        View { topology: &config.network.topology, capacities: &capacities, jobs: &placed, rules: &config.rules };
    let decisions = config.policy.decide(&view);
    // If tenants have shares, each flow is held to its allotment: the network itself would divide by flows.
    let has_shares = config.rules.has_shares();
    let weights = config.rules.weights(&placed);
    let mut rates = if has_shares { shares::rates(&view, &decisions) } else { Vec::new() };
    if !rates.is_empty() && !wants.is_empty() {
        let of = |(decision, rates): (&Decision, &Vec<f64>)| {
            let report = reports.get(usize::try_from(decision.comm).ok()?)?;
            wanted_part(&config.network.topology, decision, rates, wants.get(&report.comm)?)
        };
        let parts: Vec<Option<f64>> = decisions.0.iter().zip(&rates).map(of).collect();
        rates = shares::with_what_is_left(&view, &decisions, &rates, &parts);
    }
    // Jobs are numbered by their place among the reports.
    let comm_of = |number: u64| Some(reports.get(usize::try_from(number).ok()?)?.comm.clone());
    let watched: BTreeSet<u64> = decisions.0.iter().flat_map(|one| one.yields.iter().map(|yields| yields.to)).collect();
    let places: HashMap<u64, usize> = decisions.0.iter().map(|decision| decision.comm).zip(0..).collect();
    let plan = |job: &Job| {
        let place = *places.get(&job.comm).ok_or("the policy has not decided")?;
        let decision = &decisions.0[place];
        let report = usize::try_from(job.comm).ok().and_then(|number| reports.get(number));
        let report = report.ok_or("the policy has decided for nobody")?;
        let transport = config.rules.transport.or(report.began.transport);
        let rates = rates.get(place).map(Vec::as_slice);
        let mut plan = plan(&config.network.topology, decision, transport, rates, comm_of);
        plan.algorithm = config.rules.algorithm.unwrap_or(report.began.algorithm);
        if has_shares {
            let weight_milli = Some((weights.of(&job.tenant) * 1000.0).round() as u64);
            plan.paces.iter_mut().for_each(|(_, pace)| pace.weight_milli = weight_milli);
        }
        if watched.contains(&job.comm) {
            plan.watch(&report.comm);
        }
        if job.pinned.is_some() {
            plan.not_enforced.extend(pinned_to_broken(&view, decision));
            plan.not_enforced.extend(pinned_to_down(view.topology, links, report));
        }
        Ok(plan)
    };
    reports.iter().copied().zip(jobs.iter().map(|job| plan(job.as_ref().map_err(Clone::clone)?))).collect()
}

/// The part of their rates that a communicator's flows want: as much as those of the host that wants most of its. `None` where one
/// wants all, or has not said.
fn wanted_part(
    topology: &Topology,
    decision: &Decision,
    rates: &[f64],
    wants: &BTreeMap<Name, Option<u64>>,
) -> Option<f64> {
    let mut allotted: BTreeMap<&str, f64> = BTreeMap::new();
    for (flow, rate) in decision.flows.iter().zip(rates).filter(|(_, rate)| rate.is_finite()) {
        *allotted.entry(topology.host_name(flow.from.host)).or_default() += rate * PAYLOAD;
    }
    let part = |(host, allotted_bps): (&str, f64)| {
        let (_, bps) = wants.iter().find(|(name, _)| name.as_str() == host)?;
        Some((*bps)? as f64 / allotted_bps.max(1.0))
    };
    allotted.into_iter().map(part).try_fold(0.0, |most: f64, part| Some(most.max(part?))).filter(|part| *part > 0.0)
}

/// Ranks are at their GPUs, where hosts say which; in host memory, which has no devices of its own, at the host's devices in their order,
/// round and round. Those whose NIC carries nothing are taken for being at the others of their host, if one of these does.
fn job_of(config: &ClusterConfig, capacities: &[f64], number: u64, report: &Report) -> Result<Job, String> {
    let mut hosts = Vec::with_capacity(report.hosts.len());
    for place in &report.hosts {
        let host = *config
            .network
            .hosts
            .get(&place.host)
            .ok_or_else(|| format!("host {} is not in the topology", place.host))?;
        let devices = config.network.topology.device_count(host).max(1);
        let up_link = |device: u32| config.network.topology.up_link(config.network.topology.port_of(host, device));
        let is_well = |device: &u32| {
            let up = up_link(*device);
            capacities[up.index()] > 0.0 && capacities[up.reverse().index()] > 0.0
        };
        let well: Vec<u32> = (0..devices).filter(is_well).collect();
        let stays = |device: u32| well.is_empty() || is_well(&device);
        let at = |device: u32| if stays(device) { device } else { well[device as usize % well.len()] };
        let in_turn = (0..devices).cycle();
        let devices = place.devices.iter().copied().chain(in_turn).map(at);
        let ranks =
            place.ranks.iter().copied().zip(devices).map(|(rank, device)| PlacedRank { rank, device }).collect();
        hosts.push(Placed { host, ranks });
    }
    let channels = match config.rules.channels {
        Some(Channels::Count(count)) => count,
        Some(Channels::Nics) => nics_of(&config.network.topology, &hosts),
        None => report.began.channels,
    };
    Ok(Job {
        comm: number,
        tenant: report.tenant.clone(),
        hosts,
        channels,
        ring_orders: report.chosen.rings.clone(),
        profile: report.profile,
        pinned: report.is_pinned.then(|| spines_in_force(config, report)),
    })
}

/// NICs that ranks are nearest to, on the host where these are most.
fn nics_of(topology: &Topology, hosts: &[Placed]) -> u32 {
    let nics = |placed: &Placed| {
        let nics = placed.ranks.iter().map(|at| topology.port_of(placed.host, at.device).nic);
        nics.collect::<BTreeSet<u16>>().len() as u32
    };
    hosts.iter().map(nics).max().unwrap_or(1).clamp(limits::CHANNELS.min, limits::CHANNELS.max)
}

/// A flow that rings have between hosts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FlowOf<'a> {
    pub(crate) channel: u32,
    pub(crate) from: &'a str,
    pub(crate) to: &'a str,
    /// If it has one.
    pub(crate) path: Option<&'a FlowPath>,
}

/// Flows of a communicator's rings, with their paths: a flow's own, or else its channel's turn.
pub(crate) fn flows_of<'a>(
    report: &'a Report,
    rings: &'a [Vec<u32>],
    paths: &'a [FlowPath],
    flows: &'a [FlowChoice],
) -> impl Iterator<Item = FlowOf<'a>> {
    let mut host_of = vec![""; report.nranks() as usize];
    for host in &report.hosts {
        host.ranks.iter().for_each(|rank| host_of[*rank as usize] = &host.host);
    }
    let own = flows.iter().map(|choice| ((choice.channel, &*choice.from, &*choice.to), choice.path as usize));
    let own: HashMap<(u32, &str, &str), usize> = own.collect();
    let hops = (0_u32..).zip(rings).flat_map(|(channel, ring)| {
        ring.iter().zip(ring.iter().cycle().skip(1)).map(move |(from, to)| (channel, *from, *to))
    });
    hops.filter_map(move |(channel, from, to)| {
        let (from, to) = (host_of[from as usize], host_of[to as usize]);
        let turn = (channel as usize).checked_rem(paths.len());
        let path = own.get(&(channel, from, to)).copied().or(turn).and_then(|path| paths.get(path));
        (from != to).then_some(FlowOf { channel, from, to, path })
    })
}

fn flows_in_force(report: &Report) -> impl Iterator<Item = FlowOf<'_>> {
    let Chosen { rings, paths, flows, .. } = &report.chosen;
    flows_of(report, rings, paths, flows)
}

/// The spine of each flow between hosts that is steered to one.
fn spines_in_force(config: &ClusterConfig, report: &Report) -> BTreeMap<HostFlow, u32> {
    let Network { topology, hosts, .. } = &*config.network;
    let spine = |FlowOf { channel, from, to, path }: FlowOf<'_>| {
        let flow = HostFlow { channel, from: *hosts.get(from)?, to: *hosts.get(to)? };
        Some((flow, topology.spine_steered_to(path?)?))
    };
    flows_in_force(report).filter_map(spine).collect()
}

/// A NIC that is down, and that a flow of a pinned strategy would leave if it might.
fn pinned_to_down(topology: &Topology, links: &Links, report: &Report) -> Option<String> {
    let down = links.nics_down(topology).map(|(port, device)| (topology.host_name(port.host), device));
    let down: Vec<(&str, &Device)> = down.collect();
    let is_down = |of: &FlowOf<'_>| {
        of.path.and_then(|path| path.device.as_ref()).is_some_and(|nic| down.contains(&(of.from, nic)))
    };
    let FlowOf { channel, from, to, path } = flows_in_force(report).find(is_down)?;
    let nic = path?.device.as_ref()?;
    Some(format!("another NIC than {nic} for channel {channel} from {from} to {to}, which is down: it is pinned"))
}

/// Links that carry nothing, and that flows of a pinned strategy would leave if they might.
fn pinned_to_broken(view: &View<'_>, decision: &Decision) -> Option<String> {
    let topology = view.topology;
    let is_broken = |flow: &&Flow| match flow.path {
        PathSelection::Path(path) => {
            let route = topology.route(flow.from, flow.to, path);
            route.links().iter().any(|link| !topology.is_edge(*link) && view.capacities[link.index()] <= 0.0)
        }
        PathSelection::Hash => false,
    };
    let flow = decision.flows.iter().find(is_broken)?;
    let (from, to) = (topology.host_name(flow.from.host), topology.host_name(flow.to.host));
    let spine = spine_of(topology, flow).map_or("its spine", |spine| topology.spine_name(spine));
    Some(format!(
        "another path than {spine} for channel {} from {from} to {to}, where a link carries nothing: it is pinned",
        flow.channel
    ))
}

/// A flow's steering: over a spine, and by a NIC of its sender.
type Steered<'a> = (Option<u32>, Option<&'a Device>);

/// The order of paths: those that steer to no spine come last.
fn in_order<'a>((spine, nic): &Steered<'a>) -> (bool, Option<u32>, Option<&'a Device>) {
    (spine.is_none(), *spine, *nic)
}

/// A flow: its channel, and the hosts that it leads from and to.
type FlowKey<'a> = (u32, &'a str, &'a str);

/// Steering of each flow of a decision. Paths to which nothing steers are noted in `not_enforced`.
fn steer<'a>(
    topology: &'a Topology,
    decision: &Decision,
    carried_by: TransportKind,
    has_names: bool,
    not_enforced: &mut Vec<String>,
) -> BTreeMap<FlowKey<'a>, Steered<'a>> {
    let mut by_flow: BTreeMap<FlowKey<'a>, Steered<'a>> = BTreeMap::new();
    for flow in &decision.flows {
        let spine = spine_of(topology, flow);
        let steered = spine.filter(|spine| is_steerable(topology.steering(*spine)));
        if let (Some(spine), None) = (spine, steered) {
            let note = format!("path {}: nothing steers a flow there", topology.spine_name(spine));
            if !not_enforced.contains(&note) {
                not_enforced.push(note);
            }
        }
        // A ring that comes by twice has one flow there: the first counts.
        let key = (flow.channel, topology.host_name(flow.from.host), topology.host_name(flow.to.host));
        let nic = topology.nic_name(flow.from, carried_by).filter(|_| has_names);
        by_flow.entry(key).or_insert((steered, nic));
    }
    by_flow
}

/// The plan of a decision, over a transport; `rates` are allotments of its flows, if tenants have shares, and `comm_of` is hosts'
/// name for a communicator of the policy's.
#[must_use]
pub fn plan(
    topology: &Topology,
    decision: &Decision,
    transport: Option<TransportKind>,
    rates: Option<&[f64]>,
    comm_of: impl Fn(mccs_policy::CommId) -> Option<CommId>,
) -> Plan {
    let mut not_enforced = Vec::new();
    let carried_by = transport.unwrap_or(TransportKind::Tcp);
    let has_names = match unnamed_nic(topology, decision, carried_by) {
        Some(note) => {
            not_enforced.push(note);
            false
        }
        None => true,
    };
    let by_flow = steer(topology, decision, carried_by, has_names, &mut not_enforced);
    let mut steered: Vec<Steered<'_>> = by_flow.values().copied().filter(|steered| *steered != (None, None)).collect();
    steered.sort_unstable_by_key(in_order);
    steered.dedup();
    let priority = Some(decision.priority.min(PRIORITY_MAX)).filter(|priority| *priority > 0);
    let class_dscp = topology.class_dscp(decision.priority);
    let marked = |steering: &FlowPath| FlowPath { priority, dscp: steering.dscp.or(class_dscp), ..steering.clone() };
    let nowhere = FlowPath::default();
    let path = |(spine, nic): &Steered<'_>| FlowPath {
        device: nic.cloned(),
        ..marked(spine.map_or(&nowhere, |spine| topology.steering(spine)))
    };
    let mut paths: Vec<FlowPath> = steered.iter().map(path).collect();
    if priority.is_some() || (!steered.is_empty() && by_flow.values().any(|steered| *steered == (None, None))) {
        paths.push(marked(&nowhere));
    }
    let place = |steered_to: &Steered<'_>| {
        let found = steered.binary_search_by_key(&in_order(steered_to), in_order);
        found.unwrap_or(steered.len()) as u32
    };
    let flow = |((channel, from, to), steered_to): (&FlowKey<'_>, &Steered<'_>)| FlowChoice {
        channel: *channel,
        from: (*from).to_owned(),
        to: (*to).to_owned(),
        path: place(steered_to),
    };
    let flows = if paths.is_empty() { Vec::new() } else { by_flow.iter().map(flow).collect() };
    // A spine that has a code point of its own leaves no room for that of a class.
    if decision.priority > 0 && (class_dscp.is_none() || paths.iter().any(|path| path.dscp != class_dscp)) {
        not_enforced.push(format!("priority {} in switches", decision.priority));
    }
    let crosses =
        |flow: &Flow| topology.route(flow.from, flow.to, 0).links().iter().any(|link| !topology.is_edge(*link));
    if rates.is_some() && decision.flows.iter().any(|flow| flow.path == PathSelection::Hash && crosses(flow)) {
        not_enforced.push("shares of links that the switches' hash chooses: NICs' are".to_owned());
    }
    let mut paces = host_paces(topology, decision, rates, comm_of);
    not_enforced.extend(leave_what_cannot_be_told(&mut paces));
    let (rings, algorithm) = (decision.ring_orders.clone(), AlgorithmChoice::default());
    Plan { rings, algorithm, transport, paths, flows, paces, not_enforced }
}

/// Why flows cannot be told to leave by their NICs, if they cannot: one has no name, or not on all hosts, whose flows that no ring has go
/// round all ways.
fn unnamed_nic(topology: &Topology, decision: &Decision, transport: TransportKind) -> Option<String> {
    let mut hosts: Vec<HostId> = decision.flows.iter().map(|flow| flow.from.host).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let mut named: BTreeMap<&Device, HostId> = BTreeMap::new();
    for flow in &decision.flows {
        match topology.nic_name(flow.from, transport) {
            Some(name) => _ = named.entry(name).or_insert(flow.from.host),
            None if topology.nic_count(flow.from.host) > 1 => {
                let (host, nic) = (topology.host_name(flow.from.host), flow.from.nic);
                return Some(format!(
                    "NICs: that of {host} with the number {nic} has no name for {transport} in the topology"
                ));
            }
            None => {}
        }
    }
    let lacking = |(name, of): (&Device, HostId)| {
        let host = *hosts.iter().find(|host| topology.port_called(**host, name, transport).is_none())?;
        let (host, of) = (topology.host_name(host), topology.host_name(of));
        Some(format!("NICs: {of} has {name} in the topology, and {host} none that is called so"))
    };
    named.into_iter().find_map(lacking)
}

fn spine_of(topology: &Topology, flow: &Flow) -> Option<u32> {
    match flow.path {
        PathSelection::Hash => None,
        PathSelection::Path(path) => topology.spine_of(flow.from, flow.to, path),
    }
}

fn is_steerable(path: &FlowPath) -> bool {
    path.source_ports.is_some() || path.dscp.is_some()
}
