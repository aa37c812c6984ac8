//! Inputs of a policy: the network, the jobs, and what the operator wants (weights, priorities,
//! reserves).

use std::collections::BTreeMap;

use mccs_config::PolicyFile;
use mccs_config::policy::{Channels, PolicySection, Rings};
use mccs_config::service::{AlgorithmChoice, Reductions, TransportKind};

use super::{CommId, Flow, PathSelection};
use crate::topology::{HostId, Topology};

/// The cluster at a moment.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    /// The network as it is when it is well.
    pub topology: &'a Topology,
    /// Bits per second that every link carries now, by link; 0 for one that is down.
    pub capacities: &'a [f64],
    /// All communicators, each once.
    pub jobs: &'a [Job],
    /// The operator's rules.
    pub rules: &'a Rules,
}

/// A communicator.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Which.
    pub comm: CommId,
    /// The tenant's name.
    pub tenant: String,
    /// Places of its ranks, each rank once; every host once.
    pub hosts: Vec<Placed>,
    /// Channels wanted, at least 1.
    pub channels: u32,
    /// Order of ranks of every channel as it is in force.
    pub ring_orders: Vec<Vec<u32>>,
    /// How it uses the network, where that was measured.
    pub profile: Option<Profile>,
    /// Pinned flows, if its strategy stays as it is in force: the spine of each of its flows that is steered to one.
    pub pinned: Option<BTreeMap<HostFlow, u32>>,
}

/// A flow of a job's rings, by its channel and hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostFlow {
    /// Its channel.
    pub channel: u32,
    /// The host that sends.
    pub from: HostId,
    /// The host that receives.
    pub to: HostId,
}

/// Ranks on a host.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    /// The host.
    pub host: HostId,
    /// Which they are.
    pub ranks: Vec<PlacedRank>,
}

/// A rank on its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacedRank {
    /// The rank.
    pub rank: u32,
    /// Its device there.
    pub device: u32,
}

impl Job {
    /// Number of ranks.
    #[must_use]
    pub fn nranks(&self) -> u32 {
        self.hosts.iter().map(|placed| placed.ranks.len() as u32).sum()
    }

    /// The path of a flow whose strategy is pinned; left to the hash where it has none.
    #[must_use]
    pub(super) fn pinned_path(&self, topology: &Topology, flow: &Flow) -> PathSelection {
        let key = HostFlow { channel: flow.channel, from: flow.from.host, to: flow.to.host };
        let Some(spine) = self.pinned.as_ref().and_then(|spines| spines.get(&key).copied()) else {
            return PathSelection::Hash;
        };
        let mut paths = 0..topology.path_count(flow.from, flow.to);
        let over = paths.find(|path| topology.spine_of(flow.from, flow.to, *path) == Some(spine));
        over.map_or(PathSelection::Hash, PathSelection::Path)
    }
}

/// How a job uses the network, iteration by iteration, when nobody is in its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// From the start of an iteration to the start of the next, at least 1.
    pub period_ns: u64,
    /// How long it sends of that, in one piece.
    pub busy_ns: u64,
    /// When it last began to send, on the cluster's common clock.
    pub phase_ns: u64,
}

/// Source of ring orders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RingChoice {
    /// The policy.
    #[default]
    Local,
    /// They stay as they are in force.
    Kept,
}

/// The operator's rules.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Rules {
    /// Orders of ranks.
    pub rings: RingChoice,
    /// Transport of flows; absent: the one with which hosts begin.
    pub transport: Option<TransportKind>,
    /// Channels; absent: as many as communicators began with.
    pub channels: Option<Channels>,
    /// How collectives are carried out; absent: as communicators began.
    pub algorithm: Option<AlgorithmChoice>,
    /// How GPUs of several hosts reduce; absent: as hosts begin.
    pub reductions: Option<Reductions>,
    /// Tenants that are not as all others.
    pub tenants: Vec<TenantTerms>,
    /// If some are guaranteed shares: the rest of the hundred percent.
    pub rest_percent: Option<u32>,
}

/// Terms of a tenant.
#[derive(Debug, Clone, PartialEq)]
pub struct TenantTerms {
    /// The question's mark.
    pub name: String,
    /// Part of a contended link, against other tenants' weights; absent: that of a weight of 1 in the file. If no tenant has one, there
    /// are no shares of tenants, and each flow counts for itself.
    pub weight: Option<f64>,
    /// Whether the weight is a share that it is guaranteed, in percent.
    pub is_guaranteed: bool,
    /// Most bits per second that each of its flows sends.
    pub cap_bps: Option<f64>,
    /// Most bits per second that all its flows together send out of a host.
    pub host_cap_bps: Option<f64>,
    /// Higher goes first, where a policy has priorities.
    pub priority: u32,
    /// Spines that are for this tenant, where a policy reserves.
    pub spines: Vec<u32>,
    /// When it may send, whatever the policy.
    pub window: Option<super::Window>,
}

impl TenantTerms {
    /// A tenant like all others.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        TenantTerms {
            name: name.into(),
            weight: None,
            is_guaranteed: false,
            cap_bps: None,
            host_cap_bps: None,
            priority: 0,
            spines: Vec::new(),
            window: None,
        }
    }
}

/// By which tenants share contended links.
#[derive(Debug, Clone, Copy)]
pub struct Weights<'a> {
    rules: &'a Rules,
    /// The share of a weight of 1 in the file.
    of_one: f64,
}

impl Weights<'_> {
    /// That of a tenant.
    #[must_use]
    pub fn of(&self, tenant: &str) -> f64 {
        match self.rules.of(tenant) {
            Some(TenantTerms { weight: Some(share), is_guaranteed: true, .. }) => *share,
            terms => terms.and_then(|terms| terms.weight).unwrap_or(1.0) * self.of_one,
        }
    }
}

impl Rules {
    /// Shares of a file that was checked against this topology.
    ///
    /// Tenants with a guaranteed share have it as their weight, in percent; what is left of the hundred is for all others, by weight
    /// ([`Rules::weights`]). Without any share, weights are as written, and none where all are 1.
    #[must_use]
    pub fn from_file(file: &PolicyFile, topology: &Topology) -> Self {
        let rings = match file.policy.rings {
            Rings::Local => RingChoice::Local,
            Rings::Kept => RingChoice::Kept,
        };
        let shares: u32 = file.tenants.iter().filter_map(|tenant| tenant.share_percent).sum();
        let has_shares = shares > 0 || file.tenants.iter().any(|tenant| tenant.weight != 1);
        let rest_percent = (shares > 0).then_some(100_u32.saturating_sub(shares));
        let PolicySection { transport, channels, algorithm, reductions, .. } = file.policy;
        let mut rules = Rules { rings, transport, channels, algorithm, reductions, tenants: Vec::new(), rest_percent };
        for tenant in &file.tenants {
            let weight = f64::from(tenant.share_percent.unwrap_or(tenant.weight));
            let terms = rules.entry(&tenant.name);
            terms.weight = has_shares.then_some(weight);
            terms.is_guaranteed = tenant.share_percent.is_some();
            terms.cap_bps = tenant.cap.map(|cap| cap.0 as f64);
            terms.host_cap_bps = tenant.host_cap.map(|host_cap| host_cap.0 as f64);
            terms.priority = tenant.priority;
        }
        for reserve in &file.reserves {
            let spines = reserve.paths.iter().filter_map(|path| topology.spine_named(path));
            rules.entry(&reserve.tenant).spines.extend(spines);
        }
        for window in &file.windows {
            let ns = |text: mccs_config::DurationText| u64::try_from(text.0.as_nanos()).unwrap_or(u64::MAX);
            rules.entry(&window.tenant).window = Some(super::Window {
                period_ns: ns(window.period),
                offset_ns: ns(window.offset),
                length_ns: ns(window.length),
            });
        }
        rules
    }

    /// By which the tenants of these jobs share contended links, where tenants do. The rest of guaranteed shares is divided by weight
    /// among the others that are listed, and those that have jobs and are not, of weight 1 each: a tenant that comes takes nothing of a
    /// share. If nothing is left the latter have one part in a hundred and one together, so that they do not stop.
    #[must_use]
    pub fn weights(&self, jobs: &[Job]) -> Weights<'_> {
        let mut unlisted: Vec<&str> = jobs.iter().map(|job| &*job.tenant).collect();
        unlisted.sort_unstable();
        unlisted.dedup();
        unlisted.retain(|tenant| self.of(tenant).is_none_or(|terms| terms.weight.is_none()));
        let listed = self.tenants.iter().filter(|terms| !terms.is_guaranteed).filter_map(|terms| terms.weight);
        let all = listed.sum::<f64>() + unlisted.len() as f64;
        Weights { rules: self, of_one: self.rest_percent.map_or(1.0, |rest| f64::from(rest.max(1)) / all.max(1.0)) }
    }

    /// Whether tenants share contended links by weight.
    #[must_use]
    pub fn has_shares(&self) -> bool {
        self.tenants.iter().any(|terms| terms.weight.is_some())
    }

    /// The terms of a tenant; `None` for one like all others.
    #[must_use]
    pub fn of(&self, tenant: &str) -> Option<&TenantTerms> {
        self.tenants.iter().find(|terms| terms.name == tenant)
    }

    /// Priority of a tenant.
    #[must_use]
    pub fn priority(&self, tenant: &str) -> u32 {
        self.of(tenant).map_or(0, |terms| terms.priority)
    }

    /// Whether a tenant may use a spine, where spines are reserved: its own if it has any, otherwise those that nobody has.
    #[must_use]
    pub fn admits(&self, tenant: &str, spine: u32) -> bool {
        match self.of(tenant) {
            Some(terms) if !terms.spines.is_empty() => terms.spines.contains(&spine),
            _ => self.tenants.iter().all(|terms| !terms.spines.contains(&spine)),
        }
    }

    fn entry(&mut self, name: &str) -> &mut TenantTerms {
        let position = self.tenants.iter().position(|terms| terms.name == name).unwrap_or_else(|| {
            self.tenants.push(TenantTerms::new(name));
            self.tenants.len() - 1
        });
        &mut self.tenants[position]
    }
}
