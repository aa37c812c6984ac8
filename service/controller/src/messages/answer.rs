//! Operators' questions to a controller, and its answers: policy, files, rates, history.

use mccs_config::service::{AlgorithmChoice, TransportKind};
use serde::{Deserialize, Serialize};

use crate::history::{EntryKind, Went};
use crate::links::LinkState;
use crate::pace::HostPace;
use mccs_policy::Profile;

/// An operator's request to the controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ControllerRequest {
    /// The host with the role; every host answers, as far as it knows.
    Office,
    /// The configuration in force.
    Show,
    /// Acts and decisions.
    History {
        /// Only what operators did.
        acts: bool,
    },
    /// Changes that a policy would make.
    Diff {
        /// Name of the file in complaints.
        name: String,
        /// Its content.
        text: String,
    },
    /// Put a policy in force. Answered when all orders are.
    Apply {
        /// Name of the file in complaints.
        name: String,
        /// Its content.
        text: String,
    },
    /// Put the policy in force again that was before the last one. Answered as [`ControllerRequest::Apply`].
    Rollback,
    /// Say how a link is. Answered as [`ControllerRequest::Apply`].
    Link {
        /// Leaf, or host.
        lower: String,
        /// Spine, or leaf.
        upper: String,
        /// How it is.
        state: LinkState,
    },
}

/// The controller's answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "it lives from the controller to the operator")]
pub enum ControllerAnswer {
    /// To [`ControllerRequest::Office`].
    Office(OfficeView),
    /// To [`ControllerRequest::Show`].
    Show(PolicyView),
    /// To [`ControllerRequest::History`], from the oldest on.
    History(Vec<HistoryView>),
    /// To [`ControllerRequest::Diff`], of every communicator.
    Diff(PolicyDiff),
    /// To [`ControllerRequest::Apply`] and [`ControllerRequest::Link`].
    Applied(Applied),
    /// To [`ControllerRequest::Link`] while something else is being put in force: it counts from now on, and goes with that.
    Noted,
}

/// The controller, as a host knows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OfficeView {
    /// The controller that the host obeys, or obeyed last; none before anybody was elected.
    pub controller: Option<String>,
    /// The greatest term that it has heard of, where the controller is elected.
    pub term: Option<u64>,
    /// Whether this host has the role.
    pub is_here: bool,
    /// Why it decides nothing now, although it has the role.
    pub paused: Option<String>,
    /// Hosts that may be elected, in order; none where the configuration names the controller.
    pub candidates: Vec<String>,
    /// The store of the cluster, where there is one.
    pub store: Option<StoreView>,
}

/// How a host's store is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreView {
    /// `etcd` or `folder`.
    pub kind: String,
    /// Why it cannot be used now.
    pub trouble: Option<String>,
}

/// Changes that a policy would make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyDiff {
    /// Changes of every communicator.
    pub communicators: Vec<DiffView>,
    /// Parts of the file that would have no effect.
    pub not_enforced: Vec<String>,
}

/// The configuration in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyView {
    /// The controller's life.
    pub life: u64,
    /// Hosts that do not let this service in, since they have another one of its name: in their words.
    #[serde(default)]
    pub turned_away: Vec<(String, String)>,
    /// Name of the policy; none before there is one.
    pub policy: Option<String>,
    /// File of the policy.
    pub policy_file: Option<String>,
    /// File of the topology.
    pub topology_file: Option<String>,
    /// The policy file's content.
    pub policy_text: Option<String>,
    /// The operator's files on the disk, beside what is in force.
    #[serde(default)]
    pub files: Vec<FileView>,
    /// Hosts, and whether they report.
    pub hosts: Vec<(String, bool)>,
    /// Hosts that obey another host's controller, and which.
    #[serde(default)]
    pub elsewhere: Vec<(String, String)>,
    /// Contradictions between hosts and the topology in force: file, line, and why.
    #[serde(default)]
    pub contradictions: Vec<String>,
    /// Parts of the policy file without effect.
    #[serde(default)]
    pub not_enforced: Vec<String>,
    /// Links that are out of order.
    pub links: Vec<(String, String, LinkState)>,
    /// Links that hosts have found dead: lower and upper end, and why.
    #[serde(default)]
    pub dead_links: Vec<[String; 3]>,
    /// All communicators of several hosts.
    pub communicators: Vec<CommunicatorView>,
    /// Rates of the network now.
    #[serde(default)]
    pub rates: Box<RatesView>,
    /// Tenants that the policy file names and that have none of them: away now, or a name that nobody has.
    #[serde(default)]
    pub idle_tenants: Vec<String>,
    /// Messages of services that could not be read.
    pub refused_bodies: u64,
}

/// One of the operator's files, as it is on the disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileView {
    /// Its path.
    pub file: String,
    /// How it stands to what is in force.
    pub standing: FileStanding,
}

/// How a file on the disk stands to what is in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileStanding {
    /// It says what is in force.
    InForce,
    /// It is refused; what was in force before stays.
    Refused {
        /// Why.
        reason: String,
        /// Since when.
        age_ms: u64,
    },
    /// It is gone, or cannot be read; what was in force before stays.
    Unreadable {
        /// Why.
        reason: String,
        /// Since when.
        age_ms: u64,
    },
    /// A communicator refused it, and what was in force before is again.
    RolledBack,
    /// An operator has put something else in force.
    Differs {
        /// The first line that differs, from 1.
        line: usize,
        /// That line of the file; none behind its end.
        on_disk: Option<String>,
        /// That line of what is in force; none behind its end.
        in_force: Option<String>,
    },
    /// Nothing is in force yet.
    NotYet,
}

/// Rates of the network, as hosts have told last: payload in bits per second. Those first that carry most; what carries nothing is left
/// out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RatesView {
    /// By path between two hosts.
    pub paths: Vec<PathRateView>,
    /// By link, as far as it is known what crosses it.
    pub links: Vec<LinkRateView>,
    /// Paths that are left out.
    pub more_paths: u64,
    /// Links that are left out.
    pub more_links: u64,
    /// Rate of hosts besides the paths that they have told of.
    pub others_bps: u64,
}

/// Rate of a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathRateView {
    /// Host that sends.
    pub from: String,
    /// Host that receives.
    pub to: String,
    /// As [`FlowView::path`].
    pub path: String,
    /// Payload in bits per second.
    pub bps: u64,
    /// Capacity of the narrowest of its links that are known; none if none is.
    pub capacity_bps: Option<u64>,
}

/// Rate of a link, in one direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkRateView {
    /// Its beginning: a host, with the number of its NIC if that has several, or a switch.
    pub from: String,
    /// Its end.
    pub to: String,
    /// Payload in bits per second.
    pub bps: u64,
    /// Capacity of the link now.
    pub capacity_bps: u64,
}

/// A communicator as the controller sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommunicatorView {
    /// Its name in the cluster.
    pub name: String,
    /// Its number on the root's host, which [`CommunicatorView::name`] begins with.
    pub number: u64,
    /// Its owner.
    pub tenant: String,
    /// The strategy that was decided last.
    pub epoch: u64,
    /// How it stands to what the policy wants.
    pub state: Standing,
    /// The strategy.
    pub strategy: StrategyView,
    /// When it sends, where the policy wants to know and hosts have found out.
    pub profile: Option<Profile>,
    /// How fast and when flows leave its hosts, as they were told.
    pub paces: Vec<(String, HostPace)>,
    /// Parts of the decision that are not carried out.
    pub not_enforced: Vec<String>,
}

/// How a communicator stands to what the policy wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// As it is to be.
    AsDecided,
    /// As an operator has chosen by hand; it stays, whatever the policy wants, until the operator unpins it.
    Pinned,
    /// A change is being agreed on.
    Ordered,
    /// Nothing is decided yet.
    Undecided,
    /// It could not be changed, and why.
    Refused(String),
    /// The policy cannot see it, and why.
    Outside(String),
}

/// Rings and ways.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StrategyView {
    /// Order of ranks of each channel.
    pub rings: Vec<Vec<u32>>,
    /// How collectives are carried out.
    pub algorithm: AlgorithmChoice,
    /// Transport of flows, if hosts have a choice.
    pub transport: Option<TransportKind>,
    /// Flows of the rings between hosts.
    pub flows: Vec<FlowView>,
}

/// A flow of a ring.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlowView {
    /// Its channel.
    pub channel: u32,
    /// Host that sends.
    pub from: String,
    /// Host that receives.
    pub to: String,
    /// A spine, ports, a code point, or the switches' hash.
    pub path: String,
    /// Its priority in its host's own queues, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<u32>,
    /// Code point by which switches put its packets into the queue of a class, where they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class_dscp: Option<u32>,
}

/// Changes of a communicator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiffView {
    /// Its name in the cluster.
    pub name: String,
    /// Its owner.
    pub tenant: String,
    /// As it is.
    pub before: StrategyView,
    /// As it would be; or why nothing can be said.
    pub after: Result<StrategyView, String>,
    /// How fast and when flows leave its hosts, as they were told; hosts that were told nothing are left out.
    #[serde(default)]
    pub paces_before: Vec<(String, HostPace)>,
    /// The same, as they would be told: what comes of caps, shares, weights, windows and times to yield.
    #[serde(default)]
    pub paces_after: Vec<(String, HostPace)>,
    /// Whether anything would change.
    pub changes: bool,
    /// Whether its strategy would, which its hosts have to agree on. Paces hold at once.
    #[serde(default)]
    pub changes_strategy: bool,
    /// Whether it stays because an operator has chosen it by hand.
    #[serde(default)]
    pub is_pinned: bool,
    /// Further decisions that would not be carried out.
    pub not_enforced: Vec<String>,
}

/// The result of an apply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Applied {
    /// Communicators that have changed.
    pub changed: Vec<String>,
    /// Communicators whose hosts were told other caps, shares, windows or times to yield.
    #[serde(default)]
    pub paced: Vec<String>,
    /// Communicators that could not, and why.
    pub failed: Vec<(String, String)>,
    /// Communicators that keep the strategy that they had for a reason of their own, and which.
    #[serde(default)]
    pub kept: Vec<(String, String)>,
    /// Whether what was in force before is again, because of them.
    pub rolled_back: bool,
    /// Further words of the policy in force that services do not carry out.
    pub not_enforced: Vec<String>,
    /// Hosts that are not there; their communicators get it when they are.
    #[serde(default)]
    pub away: Vec<String>,
}

impl Applied {
    /// Why it is a failure, if it is one.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        let (comm, reason) = self.failed.first()?;
        let kind = if self.rolled_back { "rolled back" } else { "not everywhere in force" };
        Some(format!("{kind}: communicator {comm}: {reason}"))
    }

    /// Exceptions: parts of it that are not in force, though the rest is.
    #[must_use]
    pub fn exceptions(&self) -> Option<String> {
        let (comm, reason) = self.kept.first()?;
        let more = match self.kept.len() - 1 {
            0 => String::new(),
            more => format!(", and {more} more: `mccsctl policy show`"),
        };
        Some(format!("communicator {comm} keeps its strategy: {reason}{more}"))
    }
}

/// Something the controller did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryView {
    /// Its number.
    pub number: u64,
    /// How long ago.
    pub age_ms: u64,
    /// The fault.
    pub what: String,
    /// Why.
    pub why: String,
    /// How it went.
    pub went: Went,
    /// Its author.
    #[serde(default)]
    pub kind: EntryKind,
    /// The operator, where one did it: user and command, or file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
}
