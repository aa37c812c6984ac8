//! Agent of a host: tells the controller of communicators whose root is here, and carries out its
//! orders.
//!
//! ```text
//! controller: Sync(life) --> Report for each communicator, Synced --> from then on Report, Gone as things become
//!             Order      --> compare the epoch, change, --> Answer, after the Report that the change led to
//!             Pace       --> kept until the communicator is here, then told to engines; where it speaks of times they are this
//!                            host's, and told again as the estimate of the common clock changes; and without them where that is not good enough any
//!                            more, as some time after the controller has gone
//! ```
//!
//! It keeps what operators have told any controller of links, so that the next one need not be told again: the newest word about each.
//!
//! If a pace allots flows a rate, the controller is told how much of it they want: at once when that is more than before, and when
//! it has been less for a while.
//!
//! Reports are made when there is room for them ([`Agent::next_report`]): what waits is which communicators are to be told of, each once, not
//! what they were. A queue that is full is emptied, and the controller asked to begin anew ([`Agent::fall_behind`]).
//!
//! It obeys the host alone that the configuration names, and says so to any other that asks it to report. It obeys that host's life that
//! has asked last, unless a newer one was there before, whatever has become of it: an old one that comes back has old policies. With an
//! elected controller, lives are terms, and it obeys the greatest term that it has heard of or voted for, whichever candidate has it:
//! this is where a controller that was replaced and does not know it is stopped. An order for a strategy that is not the last one
//! decided is stale, and harms nothing.
//!
//! `agent/reports.rs` has what it reports, `agent/paces.rs` how engines keep to paces.
//!
//! Without I/O and clock: inputs in, outputs out.

pub mod clock;
mod paces;
mod reports;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_config::change::StrategyChange;
use mccs_config::service::FlowPath;

use self::paces::Paced;
use self::reports::Known;
use crate::agent::clock::CommonClock;
use crate::election::voter::{Vote, Voter};
use crate::inventory::{Interfaces, Inventory};
use crate::links::link_overrides::LinkOverrides;
use crate::messages::message::{Act, AgentMessage, ControllerMessage, Order, Outcome};
use crate::pace::HostPace;
use crate::rates::RateWatch;
use mccs_model::rate_limit::Pace;
use mccs_model::{CommId, Name, Reductions, Refused, Whose};
use mccs_telemetry::LogBudget;
use mccs_telemetry::flows::PathView;
use mccs_telemetry::placed::{Began, Chosen, HostRanks};
use mccs_telemetry::profile::Measured;

/// Orders that are carried out at a time. A controller gives fewer.
const ORDERS_MAX: usize = 1024;
/// Paces that are kept. A controller tells one for each communicator that is here.
pub const PACES_MAX: usize = 1 << 16;
/// How long the pace of a communicator is kept that is not here: yet, as its hosts begin at different times, or any more.
pub const PACE_KEPT_FOR: Duration = Duration::from_secs(60);
/// Acts of operators that wait for a controller; of more the last are told.
const ACTS_MAX: usize = 64;

/// A communicator whose root is here.
#[derive(Debug, Clone)]
pub struct Live {
    /// All hosts' name for it.
    pub comm: CommId,
    /// Its number here.
    pub number: u64,
    /// Its owner.
    pub tenant: String,
    /// Its ranks by host.
    pub hosts: Vec<HostRanks>,
    /// The strategy that was decided last.
    pub chosen: Arc<Chosen>,
    /// When it sends, by this host's clock.
    pub profile: Option<Measured>,
    /// Whether an operator wants its strategy to stay.
    pub is_pinned: bool,
    /// The part of its first strategy that comes back.
    pub began: Began,
}

/// Commands of the agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentOutput {
    /// Tell the controller.
    Tell(AgentMessage),
    /// Answer a host that is not obeyed, or not yet.
    Reply {
        /// Which.
        to: Name,
        /// The fault.
        message: AgentMessage,
    },
    /// Test the links to other services.
    TestLinks,
    /// Change the communicator with a number, then say [`Agent::answered`].
    Change {
        /// To be given back.
        question: u64,
        /// Which communicator.
        number: u64,
        /// The strategy that it is to replace.
        expected_epoch: u64,
        /// How.
        change: StrategyChange,
    },
    /// Have the flows of a communicator leave this host so.
    Pace {
        /// Which communicator.
        comm: CommId,
        /// How.
        pace: Pace,
    },
    /// Have GPUs of communicators that begin from now on reduce so; `None`: as the host's own configuration says.
    Reduce(Option<Reductions>),
}

/// A controller that the agent does not obey.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("host {from} orders, and the controller is {controller}")]
pub struct NotObeyed {
    /// The host that ordered.
    pub from: Name,
    /// The host that may.
    pub controller: Name,
    /// Whether it has asked for reports, and is to be told ([`AgentMessage::Obeys`]) that there will be none.
    pub has_asked: bool,
}

struct Carried {
    life: u64,
    order: u64,
    comm: CommId,
    expected_epoch: u64,
}

/// Controllers that an agent may obey.
pub enum Obedience {
    /// This host, in whatever life.
    Host(Name),
    /// The candidate with the greatest term.
    Elected {
        /// Those that may be elected, in order. At least one.
        candidates: Vec<Name>,
        /// This host's vote, if hosts vote.
        voter: Option<Voter>,
    },
}

/// See the module's documentation.
pub struct Agent {
    obedience: Obedience,
    /// The controller that it obeys, or obeyed last.
    controller: Option<Name>,
    /// This host's equipment.
    inventory: Inventory,
    life: Option<u64>,
    /// The newest life that was obeyed, or voted for.
    newest_life: u64,
    /// The host with that life, if the controller is elected.
    newest_of: Option<Name>,
    with_profiles: bool,
    known: BTreeMap<CommId, Known>,
    /// Communicators of which there is news for the controller; those that are not known have ended.
    untold: BTreeSet<CommId>,
    /// To be told when there is no more: everything was reported.
    synced: Option<AgentMessage>,
    carried: BTreeMap<u64, Carried>,
    next_question: u64,
    paces: BTreeMap<CommId, Paced>,
    /// As the controller has said.
    reductions: Option<Reductions>,
    clock: CommonClock,
    /// Whether somebody who records wants to know it.
    is_time_wanted: bool,
    /// When the clock of an earlier life was forgotten, until this one has told the time.
    forgot_clock_at: Option<Instant>,
    /// Paths that are dead, with the host to which they lead.
    dead_paths: Vec<(String, FlowPath)>,
    said: LinkOverrides,
    rates: RateWatch,
    /// Operators' acts here of which no controller was told yet.
    acts: VecDeque<Act>,
    budget: LogBudget,
}

/// A change that was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    /// Number of the strategy.
    pub epoch: u64,
    /// First operation under it.
    pub cut: u64,
}

impl Agent {
    /// The agent of a host that obeys `controller`.
    #[must_use]
    pub fn new(controller: Name) -> Self {
        let obeyed = Some(controller.clone());
        Agent { controller: obeyed, ..Self::obeying(Obedience::Host(controller)) }
    }

    /// The agent of a host with this obedience.
    #[must_use]
    pub fn obeying(obedience: Obedience) -> Self {
        Agent {
            obedience,
            controller: None,
            inventory: Inventory::default(),
            life: None,
            newest_life: 0,
            newest_of: None,
            with_profiles: false,
            known: BTreeMap::new(),
            untold: BTreeSet::new(),
            synced: None,
            carried: BTreeMap::new(),
            next_question: 0,
            paces: BTreeMap::new(),
            reductions: None,
            clock: CommonClock::default(),
            is_time_wanted: false,
            forgot_clock_at: None,
            dead_paths: Vec::new(),
            said: LinkOverrides::default(),
            rates: RateWatch::default(),
            acts: VecDeque::new(),
            budget: LogBudget::default(),
        }
    }

    /// The same, of a host that has this.
    #[must_use]
    pub fn with_inventory(self, inventory: Inventory) -> Self {
        Agent { inventory, ..self }
    }

    /// Which network interfaces the host has now, and which of them carry nothing. The controller is told where they are others.
    pub fn has_interfaces(&mut self, interfaces: Option<Interfaces>) -> Option<AgentOutput> {
        if self.inventory.interfaces == interfaces {
            return None;
        }
        self.inventory.interfaces = interfaces;
        self.life.map(|_| AgentOutput::Tell(self.has()))
    }

    fn has(&self) -> AgentMessage {
        AgentMessage::Has(Box::new(self.inventory.clone()))
    }

    /// An operator did something here. The controller is told, now or when there is one.
    pub fn acted(&mut self, act: Act) -> Option<AgentOutput> {
        if self.life.is_some() {
            return Some(AgentOutput::Tell(AgentMessage::Acted(Box::new(act))));
        }
        if self.acts.len() >= ACTS_MAX {
            self.acts.pop_front();
        }
        self.acts.push_back(act);
        None
    }

    /// Some path of this host's flows may be dead.
    pub fn suspects(&self) -> Option<AgentOutput> {
        self.life.map(|_| AgentOutput::Tell(AgentMessage::Suspects))
    }

    /// Another host answers this one over a path, or does not.
    pub fn path(&mut self, peer: &Name, path: FlowPath, answers: bool) -> Option<AgentOutput> {
        let peer = peer.to_string();
        self.dead_paths.retain(|(other, dead)| (other, dead) != (&peer, &path));
        if !answers {
            self.dead_paths.push((peer.clone(), path.clone()));
        }
        self.life.map(|_| AgentOutput::Tell(AgentMessage::Path { peer, path, answers }))
    }

    /// The controller that it obeys, or obeyed last; none before anybody was elected.
    #[must_use]
    pub fn controller(&self) -> Option<&Name> {
        self.controller.as_ref()
    }

    /// The greatest life, or term, that it has heard of.
    #[must_use]
    pub fn newest_life(&self) -> u64 {
        self.newest_life
    }

    /// The host takes part from now on: no other process of it does any more.
    pub fn start_voting(&mut self, now: Instant) {
        if let Obedience::Elected { voter: Some(voter), .. } = &mut self.obedience {
            voter.start(now);
        }
    }

    /// Somebody was elected: no lesser term is obeyed any more.
    pub fn heard_of(&mut self, term: u64, holder: &Name) {
        if term > self.newest_life {
            (self.newest_life, self.newest_of) = (term, Some(holder.clone()));
            self.life = None;
        }
    }

    /// Whether what a host orders is heard at all.
    fn check(&self, from: &Name, message: &ControllerMessage) -> Result<(), NotObeyed> {
        let has_asked = matches!(message, ControllerMessage::Sync { .. });
        let may_ask = has_asked || matches!(message, ControllerMessage::Claim { .. });
        let (may_speak, named) = match &self.obedience {
            Obedience::Host(host) => (from == host, Some(host)),
            // A host with the office asks first.
            Obedience::Elected { candidates, .. } => {
                let is_obeyed = self.controller.as_ref() == Some(from);
                (candidates.contains(from) && (may_ask || is_obeyed), candidates.first())
            }
        };
        match self.controller.as_ref().or(named) {
            Some(controller) if !may_speak => {
                Err(NotObeyed { from: from.clone(), controller: controller.clone(), has_asked })
            }
            _ => Ok(()),
        }
    }

    /// A candidate wants this host's vote.
    fn vote(&mut self, from: &Name, question: u64, term: u64, now: Instant) -> Vec<AgentOutput> {
        let Obedience::Elected { voter: Some(voter), .. } = &mut self.obedience else { return Vec::new() };
        let vote = voter.claim(from, term, self.newest_life, now);
        if vote == Vote::Granted {
            self.heard_of(term, from);
        }
        vec![AgentOutput::Reply { to: from.clone(), message: AgentMessage::Vote { question, term, vote } }]
    }

    /// Whether a life may not be obeyed, since a newer one was, or another host has that term.
    fn is_superseded(&self, from: &Name, life: u64) -> bool {
        let is_of_other = || self.newest_of.as_ref().is_some_and(|of| of != from);
        life < self.newest_life || life == self.newest_life && is_of_other()
    }

    /// A controller speaks.
    ///
    /// # Errors
    /// [`NotObeyed`].
    pub fn hear(
        &mut self,
        from: &Name,
        message: ControllerMessage,
        now: Instant,
    ) -> Result<Vec<AgentOutput>, NotObeyed> {
        self.check(from, &message)?;
        let reply = |message| vec![AgentOutput::Reply { to: from.clone(), message }];
        Ok(match message {
            ControllerMessage::Claim { question, term } => self.vote(from, question, term, now),
            ControllerMessage::Sync { life, .. } if self.is_superseded(from, life) => {
                reply(AgentMessage::Superseded { by: self.newest_life })
            }
            ControllerMessage::Sync { life, with_profiles } => {
                if let Obedience::Elected { .. } = &self.obedience {
                    (self.controller, self.newest_of) = (Some(from.clone()), Some(from.clone()));
                }
                let forgets = self.life != Some(life) && self.reductions.take().is_some();
                let mut outputs = self.begin_reports(life, with_profiles, now);
                outputs.extend(forgets.then_some(AgentOutput::Reduce(None)));
                outputs
            }
            ControllerMessage::Order(order) if self.life != Some(order.life) => match self.life {
                Some(by) => reply(AgentMessage::Superseded { by }),
                // It has not asked to be told: it has not heard yet that this host has forgotten it.
                None => Vec::new(),
            },
            ControllerMessage::Order(order) => vec![self.execute(*order)],
            ControllerMessage::TestLinks => vec![AgentOutput::TestLinks],
            ControllerMessage::Pace { life, comm, pace } if self.life == Some(life) => {
                self.keep_pace(comm, pace, now);
                Vec::new()
            }
            ControllerMessage::Keep { life, links } if self.life == Some(life) => {
                for link in links {
                    self.said.merge(link);
                }
                Vec::new()
            }
            ControllerMessage::Arrived { life, comm, arrival } if self.life == Some(life) => {
                self.known.get_mut(&comm).into_iter().for_each(|known| known.report.arrival = Some(arrival));
                Vec::new()
            }
            ControllerMessage::Burst { life, comm, burst } if self.life == Some(life) => {
                let yields = |paced: &&mut Paced| paced.pace.yields.iter().any(|yields| yields.to == comm);
                for paced in self.paces.values_mut().filter(yields) {
                    paced.bursts.insert(comm.clone(), burst);
                    paced.told = None;
                }
                Vec::new()
            }
            ControllerMessage::Reductions { life, reductions } if self.life == Some(life) => {
                self.reductions = reductions;
                vec![AgentOutput::Reduce(reductions)]
            }
            ControllerMessage::Pace { .. }
            | ControllerMessage::Reductions { .. }
            | ControllerMessage::Keep { .. }
            | ControllerMessage::Arrived { .. }
            | ControllerMessage::Burst { .. } => Vec::new(),
            ControllerMessage::Time { question, common_ns } => {
                self.clock.answered(question, common_ns, now);
                self.forgot_clock_at = self.forgot_clock_at.filter(|_| self.clock.now(now).is_none());
                Vec::new()
            }
        })
    }

    /// Has the flows of a communicator keep to a pace.
    fn keep_pace(&mut self, comm: CommId, pace: HostPace, now: Instant) {
        if self.paces.len() >= PACES_MAX && !self.paces.contains_key(&comm) {
            if let Some(suppressed) = self.budget.take(now) {
                tracing::warn!(%comm, limit = PACES_MAX, suppressed, "no room for another pace: the communicator's flows keep to none");
            }
            return;
        }
        let before = self.paces.remove(&comm).map(|before| (before.wants, before.bursts));
        let (wants, mut bursts) = before.unwrap_or_default();
        let wants = wants.filter(|_| pace.allotted_bps() > 0);
        bursts.retain(|comm, _| pace.yields.iter().any(|yields| yields.to == *comm));
        self.paces.insert(comm, Paced { pace, seen: now, bursts, told: None, is_told_without_times: false, wants });
    }

    fn execute(&mut self, order: Order) -> AgentOutput {
        let Order { life, order, comm, expected_epoch, change } = order;
        let known = self.known.get(&comm);
        let epoch = known.map_or(0, |known| known.report.chosen.epoch);
        let outcome = match known {
            Some(_) if self.carried.len() >= ORDERS_MAX => {
                let reason = format!("{ORDERS_MAX} orders are being carried out");
                Outcome::Refused { whose: Whose::Communicator, reason }
            }
            Some(Known { report, .. }) if epoch == expected_epoch => {
                self.next_question += 1;
                let question = self.next_question;
                self.carried.insert(question, Carried { life, order, comm, expected_epoch });
                return AgentOutput::Change { question, number: report.number, expected_epoch, change };
            }
            _ => Outcome::Stale { epoch },
        };
        AgentOutput::Tell(AgentMessage::Answer { order, outcome })
    }

    /// A change was made, or could not be. Whatever has become of communicators meanwhile was looked at before, and is told first.
    pub fn answered(&mut self, question: u64, made: Result<Made, Refused>) -> Vec<AgentOutput> {
        let Some(Carried { life, order, comm, expected_epoch }) = self.carried.remove(&question) else {
            return Vec::new();
        };
        let epoch = self.known.get(&comm).map_or(0, |known| known.report.chosen.epoch);
        let outcome = match made {
            Ok(Made { epoch, cut }) => Outcome::Done { epoch, cut },
            Err(_) if epoch != expected_epoch => Outcome::Stale { epoch },
            Err(Refused { whose, reason }) => Outcome::Refused { whose, reason },
        };
        if self.life != Some(life) {
            // Another life does not know the order.
            return Vec::new();
        }
        let report = self.untold.take(&comm).map(|comm| self.report_on(comm));
        report.into_iter().chain([AgentMessage::Answer { order, outcome }]).map(AgentOutput::Tell).collect()
    }

    /// When [`Agent::look_at_rates`] is next due; `has_comms` says whether communicators of several hosts have ranks here.
    #[must_use]
    pub fn next_look(&self, has_comms: bool, now: Instant) -> Option<Instant> {
        self.life.and_then(|_| self.rates.next_look(has_comms, now))
    }

    /// Looks at what flows have carried, and tells the controller what they send, where that is news.
    pub fn look_at_rates(&mut self, paths: &[PathView], has_comms: bool, now: Instant) -> Option<AgentOutput> {
        let rates = self.rates.look(paths, has_comms, now)?;
        Some(AgentOutput::Tell(AgentMessage::Rates { rates }))
    }

    /// A host is lost. A controller that comes back asks anew.
    pub fn lost(&mut self, host: &Name) {
        if self.controller.as_ref() == Some(host) {
            self.life = None;
        }
    }
}
