//! Messages between the controller and agents: JSON in bodies that the exchange carries without
//! reading them.
//!
//! Bodies come from services of the cluster, which may be of another mind, or broken: every one is checked as a whole before
//! anything is done with it.

use mccs_config::change::{FlowChoice, StrategyChange};
use mccs_config::service::{AlgorithmChoice, FlowPath, TransportKind};
use mccs_config::validate::{Problems, Validate};
use serde::{Deserialize, Serialize};

use crate::election::voter::Vote;
use crate::history::Went;
use crate::inventory::Inventory;
use crate::links::link_overrides::{self, LinkOverride};
use crate::pace::bursts::CommonBurst;
use crate::pace::{HostPace, PERIOD_MAX};
use crate::rates::HostRates;
use mccs_collective::CHANNELS_MAX;
use mccs_model::limits::NRANKS_MAX;
use mccs_model::{CommId, ControlBody, Name, Reductions, Whose};
use mccs_policy::Profile;
use mccs_telemetry::placed::{Began, Chosen, HostRanks};

/// A communicator whose root is on the host that tells of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// All hosts' name for it.
    pub comm: CommId,
    /// Its number on the root's host, for the operator.
    pub number: u64,
    /// Its owner.
    pub tenant: String,
    /// Its ranks by host.
    pub hosts: Vec<HostRanks>,
    /// When it was first seen, in milliseconds of the Unix epoch, by its host's clock; orders those that no controller has seen arrive, nothing else.
    pub began_ms: u64,
    /// Its place in the order of arrivals, as a controller has told it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arrival: Option<u64>,
    /// The strategy that was decided last.
    pub chosen: Chosen,
    /// When it sends, on the common clock; where that is known, and was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
    /// Whether an operator has chosen the strategy by hand, and has not said since that it need not stay.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_pinned: bool,
    /// The part of its first strategy that comes back if the policy does not say.
    pub began: Began,
}

/// From an agent to its controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum AgentMessage {
    /// The host's equipment, as far as the topology says it too; the first that it reports, and told again when that
    /// changes.
    Has(Box<Inventory>),
    /// A communicator began, or has another strategy.
    Report(Box<Report>),
    /// A communicator has ended or failed.
    Gone {
        /// Which.
        comm: CommId,
    },
    /// Operators' overrides of links, to any life of the controller; before [`AgentMessage::Synced`].
    Kept {
        /// At most [`link_overrides::LINKS_PER_MESSAGE`] of them.
        links: Vec<LinkOverride>,
    },
    /// An operator did something on this host.
    Acted(Box<Act>),
    /// All communicators of the host were reported to this life of the controller.
    Synced {
        /// Which life.
        life: u64,
        /// Whether an earlier life has told it paces: they hold until this one says otherwise.
        is_paced: bool,
    },
    /// The result of an order.
    Answer {
        /// Its number.
        order: u64,
        /// How it went.
        outcome: Outcome,
    },
    /// Some path of this host's flows may be dead.
    Suspects,
    /// Whether another host answers this one over a path: it did not, to flows nor to a probe, or does again.
    Path {
        /// The other host.
        peer: String,
        /// Steering of packets there.
        path: FlowPath,
        /// Whether it does.
        answers: bool,
    },
    /// Rate that a communicator's flows from this host would send together, at most, in bits of payload per second, if that is less
    /// than they may; `None`: as much as they may.
    Wants {
        /// Which.
        comm: CommId,
        /// So much.
        bps: Option<u64>,
    },
    /// Rates of the host's flows, if they are much otherwise than was told last.
    Rates {
        /// Over each path.
        rates: HostRates,
    },
    /// A communicator is about to send, for which others make room.
    Burst {
        /// Which.
        comm: CommId,
        /// When, and for how long.
        burst: CommonBurst,
    },
    /// A question for the time; answered by [`ControllerMessage::Time`].
    AskTime {
        /// To be given back.
        question: u64,
    },
    /// Something that was to be told is lost: the host is to be asked to report anew.
    Behind,
    /// Another host's controller is obeyed, and this one is told nothing.
    Obeys {
        /// That host.
        controller: String,
    },
    /// A controller of another life is obeyed.
    Superseded {
        /// That life.
        by: u64,
    },
    /// A host's answer to a candidate's [`ControllerMessage::Claim`].
    Vote {
        /// The question.
        question: u64,
        /// The term that was claimed.
        term: u64,
        /// The answer.
        vote: Vote,
    },
}

/// An operator's act on a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Act {
    /// The fault.
    pub what: String,
    /// User and command.
    pub by: String,
    /// How it went.
    pub went: Went,
}

/// The result of an order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Outcome {
    /// All hosts have agreed.
    Done {
        /// Number of the new strategy.
        epoch: u64,
        /// First collective under it.
        cut: u64,
    },
    /// The strategy is another than the one the order was for.
    Stale {
        /// Number of the last strategy, or 0 if there is no such communicator.
        epoch: u64,
    },
    /// The hosts would not, or could not.
    Refused {
        /// Its reason.
        whose: Whose,
        /// Why.
        reason: String,
    },
}

/// A change that a controller wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Order {
    /// The controller's life.
    pub life: u64,
    /// Its number, in that life.
    pub order: u64,
    /// The communicator.
    pub comm: CommId,
    /// The strategy that it is to replace: compare and swap.
    pub expected_epoch: u64,
    /// The change.
    pub change: StrategyChange,
}

/// From a controller to an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ControllerMessage {
    /// A host that may be elected wants to be the controller, in that term; without a store. Answered by [`AgentMessage::Vote`].
    Claim {
        /// Given back with the answer.
        question: u64,
        /// Greater than all that it has heard of.
        term: u64,
    },
    /// Report everything from now on to this life; of an elected controller it is its term.
    Sync {
        /// Which.
        life: u64,
        /// Whether reports are to say when communicators send.
        with_profiles: bool,
    },
    /// Change a communicator.
    Order(Box<Order>),
    /// Operators' overrides of links: to be kept, and told whoever has the role next.
    Keep {
        /// The controller's life.
        life: u64,
        /// At most [`link_overrides::LINKS_PER_MESSAGE`] of them.
        links: Vec<LinkOverride>,
    },
    /// A communicator's place in the order of arrivals: to be kept, and told whoever has the role next.
    Arrived {
        /// The controller's life.
        life: u64,
        /// Which.
        comm: CommId,
        /// Its place.
        arrival: u64,
    },
    /// Some path in the network may be dead: links to other services may go the same way, and are to find out now, not when they are
    /// needed.
    TestLinks,
    /// How a communicator's flows are to leave the host that is told, from now on.
    Pace {
        /// The controller's life.
        life: u64,
        /// Which communicator.
        comm: CommId,
        /// How.
        pace: HostPace,
    },
    /// How GPUs of communicators that begin from now on are to reduce; absent: as the host's own configuration says.
    Reductions {
        /// The controller's life.
        life: u64,
        /// How.
        reductions: Option<Reductions>,
    },
    /// A communicator is about to send, for which this host makes room.
    Burst {
        /// The controller's life.
        life: u64,
        /// Which.
        comm: CommId,
        /// When, and for how long.
        burst: CommonBurst,
    },
    /// The time.
    Time {
        /// The question.
        question: u64,
        /// Time of the common clock.
        common_ns: u64,
    },
}

/// The mistake in a body.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    /// Not ours.
    #[error("it cannot be read: {0}")]
    Unreadable(String),
    /// Says what cannot be.
    #[error("{0}")]
    Impossible(&'static str),
    /// Does not fit a message.
    #[error("it has {0} bytes, more than a message carries")]
    TooLong(usize),
}

fn encode(value: &impl Serialize) -> Result<ControlBody, BodyError> {
    let json = serde_json::to_vec(value).map_err(|error| BodyError::Unreadable(error.to_string()))?;
    ControlBody::new(&json).ok_or(BodyError::TooLong(json.len()))
}

impl AgentMessage {
    /// The message's bytes.
    ///
    /// # Errors
    /// [`BodyError::TooLong`].
    pub fn encode(&self) -> Result<ControlBody, BodyError> {
        encode(self)
    }

    /// Reads what `from` has told.
    ///
    /// # Errors
    /// [`BodyError`], for whatever bytes.
    pub fn decode(body: &ControlBody, from: &Name) -> Result<Self, BodyError> {
        let message: AgentMessage =
            serde_json::from_slice(body.bytes()).map_err(|error| BodyError::Unreadable(error.to_string()))?;
        let comm = match &message {
            AgentMessage::Report(report) => {
                report.check()?;
                Some(&report.comm)
            }
            AgentMessage::Has(inventory) => {
                inventory.check().map_err(BodyError::Impossible)?;
                None
            }
            AgentMessage::Gone { comm } => Some(comm),
            AgentMessage::Burst { comm, burst } => {
                burst.check().map_err(BodyError::Impossible)?;
                Some(comm)
            }
            AgentMessage::Rates { rates } => {
                rates.check().map_err(BodyError::Impossible)?;
                None
            }
            AgentMessage::Kept { links } => {
                link_overrides::check(links).map_err(BodyError::Impossible)?;
                None
            }
            AgentMessage::Path { peer: host, .. }
            | AgentMessage::Obeys { controller: host }
            | AgentMessage::Vote { vote: Vote::Held { by: host }, .. }
                if Name::new(host).is_none() =>
            {
                return Err(BodyError::Impossible("it tells of a host that has no name"));
            }
            _ => None,
        };
        if comm.is_some_and(|comm| comm.root != *from) {
            return Err(BodyError::Impossible("it tells of a communicator whose root is on another host"));
        }
        Ok(message)
    }
}

impl ControllerMessage {
    /// The message's bytes.
    ///
    /// # Errors
    /// [`BodyError::TooLong`].
    pub fn encode(&self) -> Result<ControlBody, BodyError> {
        encode(self)
    }

    /// Reads what a controller has told.
    ///
    /// # Errors
    /// [`BodyError`], for whatever bytes.
    pub fn decode(body: &ControlBody) -> Result<Self, BodyError> {
        let message: ControllerMessage =
            serde_json::from_slice(body.bytes()).map_err(|error| BodyError::Unreadable(error.to_string()))?;
        match &message {
            ControllerMessage::Order(order) => {
                let mut problems = Problems::default();
                order.change.validate(&mut problems);
                if problems.count() > 0 {
                    return Err(BodyError::Impossible("it orders a change that cannot be"));
                }
            }
            ControllerMessage::Burst { burst, .. } => burst.check().map_err(BodyError::Impossible)?,
            ControllerMessage::Pace { pace, .. } => pace.check().map_err(BodyError::Impossible)?,
            ControllerMessage::Keep { links, .. } => link_overrides::check(links).map_err(BodyError::Impossible)?,
            ControllerMessage::Claim { .. }
            | ControllerMessage::Sync { .. }
            | ControllerMessage::Arrived { .. }
            | ControllerMessage::Reductions { .. }
            | ControllerMessage::Time { .. }
            | ControllerMessage::TestLinks => {}
        }
        Ok(message)
    }
}

impl Report {
    /// Number of ranks.
    #[must_use]
    pub fn nranks(&self) -> u32 {
        self.hosts.iter().map(|host| host.ranks.len() as u32).sum()
    }

    fn check(&self) -> Result<(), BodyError> {
        let total: usize = self.hosts.iter().map(|host| host.ranks.len()).sum();
        if !(1..=NRANKS_MAX as usize).contains(&total) {
            return Err(BodyError::Impossible("a communicator has ranks, and not too many"));
        }
        let is_permutation = |ranks: &mut dyn Iterator<Item = u32>| {
            let mut seen = vec![false; total];
            let fresh = |rank: u32| seen.get_mut(rank as usize).is_some_and(|seen| !std::mem::replace(seen, true));
            ranks.map(fresh).filter(|fresh| *fresh).count() == total
        };
        if !is_permutation(&mut self.hosts.iter().flat_map(|host| host.ranks.iter().copied())) {
            return Err(BodyError::Impossible("every rank is on one host"));
        }
        let twice =
            |(place, host): (usize, &HostRanks)| self.hosts[..place].iter().any(|other| other.host == host.host);
        if self.hosts.iter().enumerate().any(twice) {
            return Err(BodyError::Impossible("it names a host twice"));
        }
        if self.hosts.iter().any(|host| !host.devices.is_empty() && host.devices.len() != host.ranks.len()) {
            return Err(BodyError::Impossible("each rank has a device, or none has"));
        }
        if self.profile.is_some_and(|profile| profile.period_ns == 0 || profile.busy_ns > profile.period_ns) {
            return Err(BodyError::Impossible("it sends for longer than there is time"));
        }
        if self.profile.is_some_and(|profile| profile.period_ns > PERIOD_MAX.as_nanos() as u64) {
            return Err(BodyError::Impossible("it sends more seldom than anybody could wait for"));
        }
        let Chosen { rings, paths, flows, .. } = &self.chosen;
        let is_ring = |ring: &Vec<u32>| ring.len() == total && is_permutation(&mut ring.iter().copied());
        if !(1..=CHANNELS_MAX).contains(&(self.began.channels as usize)) {
            return Err(BodyError::Impossible("a communicator began with a channel, and not too many"));
        }
        if rings.len() > CHANNELS_MAX || !rings.iter().all(is_ring) {
            return Err(BodyError::Impossible("a ring names every rank once"));
        }
        if flows.iter().any(|flow: &FlowChoice| flow.path as usize >= paths.len()) {
            return Err(BodyError::Impossible("a flow goes a way that there is not"));
        }
        Ok(())
    }
}

/// A change to what is wanted, whole: nothing of the strategy before stays but what carries flows, where that is not said.
#[must_use]
pub fn whole_change(
    rings: Vec<Vec<u32>>,
    algorithm: AlgorithmChoice,
    transport: Option<TransportKind>,
    paths: Vec<FlowPath>,
    flows: Vec<FlowChoice>,
) -> StrategyChange {
    let (rings, paths, flows) = (Some(rings), Some(paths), Some(flows));
    StrategyChange { rings, algorithm: Some(algorithm), transport, paths, flows, ..StrategyChange::default() }
}

#[cfg(test)]
mod tests;
