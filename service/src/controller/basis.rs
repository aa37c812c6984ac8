//! What decisions rest on: the network and the operator's policy, checked as a whole and against each other.
//!
//! A basis never changes: another file makes another basis, and whoever rolls back takes the one before.

use std::collections::HashMap;

use mccs_config::topology::ActualHost;
use mccs_config::{PolicyFile, TopologyFile};

use crate::policy::{self, Policy, Rules};
use crate::topology::{HostId, Topology};

/// A file's text, and what complaints call it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text {
    /// Name.
    pub name: String,
    /// Content.
    pub text: String,
}

/// See the module's documentation.
pub struct Basis {
    /// As it was read.
    pub topology_text: Text,
    /// As it was read.
    pub policy_text: Text,
    /// What the text of the topology says.
    topology_file: TopologyFile,
    /// The network.
    pub topology: Topology,
    /// Its hosts.
    pub hosts: HashMap<String, HostId>,
    /// What tenants may have.
    pub rules: Rules,
    /// Who decides.
    pub policy: &'static dyn Policy,
    /// See [`not_enforced`].
    pub not_enforced: Vec<String>,
}

impl Basis {
    /// Reads and checks both files, for a cluster of these hosts.
    ///
    /// # Errors
    /// What is wrong, in the operator's words: file, line, key and what would be right.
    pub fn new(topology_text: Text, policy_text: Text, cluster: &[ActualHost<'_>]) -> Result<Self, String> {
        let file = TopologyFile::parse_for(&topology_text.text, &topology_text.name, cluster);
        let file = file.map_err(|error| error.to_string())?;
        let policy_file = PolicyFile::parse_for(&policy_text.text, &policy_text.name, &file, &policy::names())
            .map_err(|error| error.to_string())?;
        let topology = Topology::from_file(&file).map_err(|error| format!("{}: {error}", topology_text.name))?;
        let policy = policy::by_name(&policy_file.policy.name)
            .ok_or_else(|| format!("{}: there is no policy {:?}", policy_text.name, policy_file.policy.name))?;
        let (rules, not_enforced) =
            (Rules::from_file(&policy_file, &topology), not_enforced(&policy_file, Some(&file)));
        let hosts = (0..topology.host_count() as u32).map(HostId);
        let hosts = hosts.map(|host| (topology.host_name(host).to_owned(), host)).collect();
        let topology_file = file;
        Ok(Basis { topology_text, policy_text, topology_file, topology, hosts, rules, policy, not_enforced })
    }

    /// What of the topology contradicts hosts, by what they have said since: file, line, key and what would be right.
    #[must_use]
    pub fn contradictions(&self, cluster: &[ActualHost<'_>]) -> Vec<String> {
        let Text { name, text } = &self.topology_text;
        self.topology_file.contradictions(text, name, cluster).iter().map(ToString::to_string).collect()
    }
}

/// What of a policy file services do not carry out: it is decided, and shown, and has no effect. Without a topology nothing is known of
/// switches' queues.
#[must_use]
pub fn not_enforced(file: &PolicyFile, topology: Option<&TopologyFile>) -> Vec<String> {
    let has_class = |priority: u32| topology.is_some_and(|topology| topology.has_class(priority));
    let is_left = file.policy.name == "priority" && !file.tenants.iter().all(|tenant| has_class(tenant.priority));
    let what =
        "priorities in switches: only the hosts' own queues follow them, where topology.toml has no class for them";
    let has_shares = file.tenants.iter().any(|tenant| tenant.share_percent.is_some() || tenant.weight != 1);
    let besides_rings = "shares of what no ring carries (sends, all-to-all, trees), at receivers and between switches: its senders hold all \
                         together to what their rings' flows are allotted";
    let parts = [(is_left, what), (has_shares, besides_rings)];
    parts.into_iter().filter(|(applies, _)| *applies).map(|(_, what)| what.to_owned()).collect()
}
