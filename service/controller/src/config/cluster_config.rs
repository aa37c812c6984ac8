//! Network and policy that decisions rest on: topology and policy checked as a whole and against
//! each other.
//!
//! A cluster config never changes: another file makes another one, and whoever rolls back takes the one before.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use mccs_config::service::{self, AlgorithmChoice, TransportKind};
use mccs_config::topology::{ActualHost, Spine};
use mccs_config::validate::nearest;
use mccs_config::{ConfigError, Diagnostic, PolicyFile, TopologyFile};
use mccs_policy::rings::RingPlace;

use mccs_model::Reductions;
use mccs_policy::topology::{HostId, Topology};
use mccs_policy::{Policy, Rules, rings};

/// A file's text, and what complaints call it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// Name.
    pub name: String,
    /// Content.
    pub text: String,
}

/// The network of a topology's text.
pub struct Network {
    /// As it was read.
    pub text: Text,
    file: TopologyFile,
    /// Hosts, leaves, spines, and how they are joined.
    pub topology: Topology,
    /// The hosts, by name.
    pub hosts: HashMap<String, HostId>,
}

impl Network {
    /// Reads and checks the text, for a cluster of these hosts.
    fn new(text: Text, cluster: &[ActualHost<'_>]) -> Result<Self, String> {
        let file = TopologyFile::parse_for(&text.text, &text.name, cluster).map_err(|error| error.to_string())?;
        let topology = Topology::from_file(&file).map_err(|error| format!("{}: {error}", text.name))?;
        let hosts = (0..topology.host_count() as u32).map(HostId);
        let hosts = hosts.map(|host| (topology.host_name(host).to_owned(), host)).collect();
        Ok(Network { text, file, topology, hosts })
    }

    /// Contradictions between it and hosts, by what they have said since: file, line, key and what would be right.
    fn contradictions(&self, cluster: &[ActualHost<'_>]) -> Vec<Diagnostic> {
        self.file.contradictions(&self.text.text, &self.text.name, cluster)
    }
}

/// See the module's documentation.
pub struct ClusterConfig {
    /// Which large clusters take a third of a second to read: whoever only has another policy keeps it.
    pub network: Arc<Network>,
    /// As it was read.
    pub policy_text: Text,
    /// Rules of tenants.
    pub rules: Rules,
    /// The policy.
    pub policy: &'static dyn Policy,
    /// See [`not_enforced`].
    pub not_enforced: Vec<String>,
    /// How GPUs of each host are to reduce with those of others, where the policy says.
    reductions: HashMap<String, Reductions>,
}

impl ClusterConfig {
    /// Reads and checks both files, for a cluster of these hosts. The topology is not read anew where it is that of `before`.
    ///
    /// # Errors
    /// The mistake, in the operator's words: file, line, key and what would be right.
    pub fn new(
        topology: Text,
        policy_text: Text,
        cluster: &[ActualHost<'_>],
        before: Option<&ClusterConfig>,
    ) -> Result<Self, String> {
        let network = match before {
            Some(before) if before.network.text == topology => {
                let found = before.network.contradictions(cluster);
                if !found.is_empty() {
                    return Err(ConfigError::Invalid(found).to_string());
                }
                before.network.clone()
            }
            _ => Arc::new(Network::new(topology, cluster)?),
        };
        let policy_file =
            PolicyFile::parse_for(&policy_text.text, &policy_text.name, &network.file, &mccs_policy::names())
                .map_err(|error| error.to_string())?;
        let policy = mccs_policy::by_name(&policy_file.policy.name)
            .ok_or_else(|| format!("{}: there is no policy {:?}", policy_text.name, policy_file.policy.name))?;
        let rules = Rules::from_file(&policy_file, &network.topology);
        let not_enforced = not_enforced(&policy_file, Some(&network.file));
        let reductions = reductions(&network, &rules);
        Ok(ClusterConfig { network, policy_text, rules, policy, not_enforced, reductions })
    }

    /// How GPUs of a host are to reduce with those of others; `None` where the policy does not say.
    #[must_use]
    pub fn reductions(&self, host: &str) -> Option<Reductions> {
        self.reductions.get(host).copied()
    }

    /// Contradictions between the topology and hosts, by what they have said since: file, line, key and what would be
    /// right.
    #[must_use]
    pub fn contradictions(&self, cluster: &[ActualHost<'_>]) -> Vec<String> {
        self.network.contradictions(cluster).iter().map(ToString::to_string).collect()
    }
}

fn reductions(network: &Network, rules: &Rules) -> HashMap<String, Reductions> {
    let Some(wanted) = rules.reductions else { return HashMap::new() };
    let places = rings::reduction_places(&network.topology, rules.rings);
    let of_host = |(name, host): (&String, &HostId)| {
        let RingPlace { leaf, place } = places[host.0 as usize];
        let reductions = match wanted {
            service::Reductions::AllToAll => Reductions::AllToAll,
            service::Reductions::Ring => Reductions::AcrossLeaves { leaf, place },
        };
        (name.clone(), reductions)
    };
    network.hosts.iter().map(of_host).collect()
}

/// Parts of a policy file without effect: the policy does not look at them, or services do not carry them out, though they are decided and
/// shown. Without a topology nothing is known of switches' queues.
#[must_use]
pub fn not_enforced(file: &PolicyFile, topology: Option<&TopologyFile>) -> Vec<String> {
    let has_class = |priority: u32| topology.is_some_and(|topology| topology.has_class(priority));
    let is_left = file.policy.name == "priority" && !file.tenants.iter().all(|tenant| has_class(tenant.priority));
    let what =
        "priorities in switches: only the hosts' own queues follow them, where topology.toml has no class for them";
    let has_shares = file.tenants.iter().any(|tenant| tenant.share_percent.is_some() || tenant.weight != 1);
    let besides_rings = "shares of what no ring carries (sends, all-to-all, trees), at receivers and between switches: its senders hold all \
                         together to what their rings' flows are allotted";
    let single_pass = "algorithm single_pass: it is for ranks of one host; between hosts the cost model picks";
    let is_single_pass = file.policy.algorithm == Some(AlgorithmChoice::SinglePass);
    let parts = [(is_left, what), (has_shares, besides_rings), (is_single_pass, single_pass)];
    let parts = parts.into_iter().filter(|(applies, _)| *applies).map(|(_, what)| what.to_owned());
    unused(file).into_iter().chain(parts).chain(topology.and_then(|topology| not_over_rdma(file, topology))).collect()
}

/// Spines that flows over RDMA cannot be steered to, unless the policy has all flows use TCP.
fn not_over_rdma(file: &PolicyFile, topology: &TopologyFile) -> Option<String> {
    let is_off = |spine: &&Spine| spine.source_ports.is_some_and(|ports| ports.rdma_problem().is_some());
    let spines: Vec<&str> = topology.spines.iter().filter(is_off).map(|spine| &*spine.name).collect();
    let applies = !spines.is_empty() && file.policy.transport != Some(TransportKind::Tcp);
    applies.then(|| {
        let spines = spines.join(", ");
        format!(
            "paths over {spines} for flows over RDMA, whose hosts refuse them: source ports are below those of RoCE v2 (49152-65535); \
             transport = \"tcp\" says that there are none"
        )
    })
}

/// Tenants that are named one by one; of more it is said how many.
const NOT_THERE_TOLD_MAX: usize = 32;

/// Tenants that rules are for, and that are none of those that `there` are: mistyped, or to come later.
#[must_use]
pub fn not_there<'a>(named: impl IntoIterator<Item = &'a str>, there: &BTreeSet<&str>) -> Vec<String> {
    let mut missing: Vec<&str> = named.into_iter().filter(|tenant| !there.contains(tenant)).collect();
    missing.sort_unstable();
    missing.dedup();
    let say = |tenant: &str| {
        let hint = nearest(tenant, there.iter().copied()).map(|near| format!("; did you mean {near:?}?"));
        format!("rules for tenant {tenant:?}: nobody is called so now{}", hint.unwrap_or_default())
    };
    let untold = missing.split_off(missing.len().min(NOT_THERE_TOLD_MAX)).len();
    let untold = (untold > 0).then(|| format!("rules for {untold} more tenants: nobody is called so now"));
    missing.into_iter().map(say).chain(untold).collect()
}

/// Rules that the policy does not look at, and which policies do.
fn unused(file: &PolicyFile) -> Vec<String> {
    let name = &file.policy.name;
    let Some(policy) = mccs_policy::by_name(name) else { return Vec::new() };
    let of_those = |uses: fn(&dyn Policy) -> bool| {
        let those = mccs_policy::ALL.iter().filter(|policy| uses(**policy)).map(|policy| policy.name());
        those.collect::<Vec<_>>().join(", ")
    };
    let mut unused = Vec::new();
    let tenants = file.tenants.iter().filter(|tenant| tenant.priority > 0).map(|tenant| &*tenant.name);
    let tenants: Vec<&str> = tenants.collect();
    if !tenants.is_empty() && !policy.uses_priorities() {
        let (tenants, others) = (tenants.join(", "), of_those(|policy| policy.uses_priorities()));
        unused.push(format!("priorities (of {tenants}): policy {name} has none; these have: {others}"));
    }
    if !file.reserves.is_empty() && !policy.uses_reserves() {
        let others = of_those(|policy| policy.uses_reserves());
        unused.push(format!("reserved paths: policy {name} reserves none; these do: {others}"));
    }
    unused
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_very_many_tenants_that_nobody_is_it_is_said_how_many() {
        let names: Vec<String> = (0..1_000).map(|number| format!("t{number:04}")).collect();
        let said = |count: usize| not_there(names[..count].iter().map(String::as_str), &BTreeSet::from(["t0000"]));
        assert_eq!((said(33).len(), said(1_000).len()), (32, 33));
        assert!(said(33)[31].contains("\"t0032\"") && said(1_000)[32].contains("967 more"), "{:?}", said(1_000));
    }

    #[test]
    fn spines_that_flows_over_rdma_cannot_be_steered_to_are_named() {
        let example = include_str!("../../../../config/examples/topology.toml");
        let not_enforced_with = |topology: &str, policy: &str| {
            let topology = TopologyFile::parse(topology, "topology.toml").unwrap();
            let policy = PolicyFile::parse(&format!("[policy]\nname = \"ffa\"\n{policy}"), "policy.toml").unwrap();
            not_enforced(&policy, Some(&topology))
        };
        assert_eq!(not_enforced_with(example, ""), [""; 0]);
        let low = example.replace("50500-50999", "49151-49500");
        assert!(not_enforced_with(&low, "")[0].starts_with("paths over spine1 for flows over RDMA"));
        assert!(not_enforced_with(&low, "transport = \"rdma\"")[0].contains("49152"));
        assert_eq!(not_enforced_with(&low, "transport = \"tcp\""), [""; 0]);
    }

    #[test]
    fn rules_that_a_policy_does_not_look_at_are_named() {
        let rules = "[[tenant]]\nname = \"t\"\npriority = 2\n[[reserve]]\ntenant = \"t\"\npaths = [\"spine0\"]\n";
        let unused_by = |policy: &str, rules: &str| {
            let text = format!("[policy]\nname = \"{policy}\"\n{rules}");
            unused(&PolicyFile::parse(&text, "policy.toml").unwrap())
        };
        for policy in mccs_policy::ALL {
            assert_eq!(unused_by(policy.name(), ""), [""; 0]);
            let named = unused_by(policy.name(), rules);
            let names = |what: &str| named.iter().any(|line| line.starts_with(what));
            assert_eq!(names("priorities (of t)"), !policy.uses_priorities(), "{named:?}");
            assert_eq!(names("reserved paths"), !policy.uses_reserves(), "{named:?}");
        }
        assert_eq!(
            unused_by("ffa", rules),
            [
                "priorities (of t): policy ffa has none; these have: pfa_ts, priority, yield",
                "reserved paths: policy ffa reserves none; these do: pfa, pfa_ts"
            ]
        );
        let single_pass =
            PolicyFile::parse("[policy]\nname = \"ffa\"\nalgorithm = \"single_pass\"", "policy.toml").unwrap();
        assert!(not_enforced(&single_pass, None)[0].starts_with("algorithm single_pass"));
    }

    /// A policy's description of itself is true: whether it decides otherwise for other priorities, and other paths that are
    /// reserved.
    #[test]
    fn policies_use_what_they_say() {
        use mccs_policy::{Job, Placed, PlacedRank, Profile, TenantTerms, View};
        let topology = Topology::clos(&mccs_policy::topology::Clos::testbed(50e9)).unwrap();
        let job = |comm: u64| Job {
            comm,
            tenant: format!("t{comm}"),
            hosts: (0..4)
                .map(|host| Placed { host: HostId(host), ranks: vec![PlacedRank { rank: host, device: 0 }] })
                .collect(),
            channels: 2,
            ring_orders: Vec::new(),
            // Too long for turns.
            profile: Some(Profile { period_ns: 100_000_000, busy_ns: 60_000_000, phase_ns: 0 }),
            pinned: None,
        };
        let jobs = [job(0), job(1)];
        let decided = |policy: &dyn Policy, terms: TenantTerms| {
            let rules = Rules { tenants: vec![terms], ..Rules::default() };
            policy.decide(&View { topology: &topology, capacities: topology.rates(), jobs: &jobs, rules: &rules })
        };
        for policy in mccs_policy::ALL {
            let with = |priority: u32, spines: &[u32]| {
                decided(*policy, TenantTerms { priority, spines: spines.to_vec(), ..TenantTerms::new("t0") })
            };
            assert_eq!(with(0, &[]) != with(1, &[]), policy.uses_priorities(), "{}", policy.name());
            let other_paths = [with(0, &[0]), with(0, &[1])].into_iter().any(|decided| decided != with(0, &[]));
            assert_eq!(other_paths, policy.uses_reserves(), "{}", policy.name());
        }
    }
}
