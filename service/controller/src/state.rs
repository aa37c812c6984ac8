//! The controller: holds the cluster's view, decides, and orders what is not yet as decided.
//!
//! ```text
//! Met --> Sync --> Report, Synced --+
//! Report, Gone, Lost, Link, files --+--> decide --> compare with what was decided last --> Order (compare and swap)
//! Answer: done, stale, refused -----+                                                   --> nothing, where equal
//!                                   +--> compare with what hosts were told              --> Pace, which holds at once
//! ```
//!
//! What an operator has chosen by hand is *pinned*: all else is planned around it, and it is not ordered otherwise.
//!
//! Nothing is decided before the hosts that are there have reported, so that a controller that has just started decides as the one
//! before it. Where hosts remember a later life than its own it takes one after that: hosts let a single service of a name in, so
//! whoever is let in has the role. Orders that belong to a policy, file or link that was put in force are its rollout: when one of
//! them is refused for what it asks for, what was in force before is again.
//!
//! Without I/O and clock. Whoever calls an input then calls [`Controller::settle`], takes the outputs, and comes back at
//! [`Controller::next_deadline`].
//!
//! Here is what it holds. `hosts.rs` has who is there, `report_handler.rs` what agents say, `decision_scheduler.rs` when it decides; `rollout.rs`,
//! `operator.rs` and `orders.rs` are what files and operators want, and what hosts are asked for.
//!
//! Deliberately absent: when a change takes effect (the hosts agree on that), and memory of former lives: everything is
//! reported again, also what operators have said of links, which hosts keep.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::answer::ControllerAnswer;
use super::bursts::Yielders;
use super::cluster_config::{ClusterConfig, Text};
use super::dead_paths::DeadPaths;
use super::disk::Disk;
use super::history::History;
use super::hosts::HostState;
use super::inventory::Inventory;
use super::link_overrides::LinkOverride;
use super::links::Links;
use super::message::{ControllerMessage, Report};
use super::orders::{Pending, Refusal};
use super::pace::HostPace;
use super::plan::{Plan, Wants};
use super::rates::ClusterRates;
use super::rollout::Rollout;
use mccs_model::{CommId, Name};

/// Communicators of the cluster that are looked after; those beyond keep what they have.
pub const COMMS_MAX: usize = 1 << 16;
/// How long hosts that are not there are waited for at the start.
pub const GRACE: Duration = Duration::from_secs(3);
/// How long a host that was met may take to report, be it once or several times within a minute: whoever has to be asked
/// again and again does not keep the others waiting.
pub const SYNC_TIME: Duration = Duration::from_secs(10);

/// Rates are allotted anew at most so often when tenants want more or less of them.
pub const ALLOT_EVERY: Duration = Duration::from_millis(500);

/// Who asked, to be given back with the answer.
pub type Ticket = u64;

/// An operator's question: who is to be answered, and who asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Given back with the answer.
    pub ticket: Ticket,
    /// User and command.
    pub by: String,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// Tell an agent.
    Tell {
        /// Its host.
        to: Name,
        /// What.
        message: ControllerMessage,
    },
    /// Answer an operator.
    Answer {
        /// Who.
        ticket: Ticket,
        /// What.
        answer: Result<Box<ControllerAnswer>, String>,
    },
}

/// A communicator.
pub(super) struct Held {
    pub(super) report: Report,
    /// Or why it has none; `None` before there was a decision.
    pub(super) plan: Option<Result<Plan, String>>,
    pub(super) order: Option<u64>,
    pub(super) refusal: Option<Refusal>,
    /// What hosts were told of how flows leave them; those that were told nothing are free.
    pub(super) paced: BTreeMap<Name, HostPace>,
}

impl Held {
    /// Whether nothing more is to be asked of it at once: it is as decided, not to be changed, or has refused.
    pub(super) fn is_settled(&self) -> bool {
        match &self.plan {
            _ if self.order.is_some() => false,
            None => false,
            Some(Err(_)) => true,
            Some(Ok(plan)) => {
                let epoch = self.report.chosen.epoch;
                // Where its strategy is another one meanwhile its host says which.
                let refuses = |refusal: &Refusal| refusal.is_of(plan, epoch) && refusal.reports_until.is_none();
                self.report.is_pinned
                    || plan.is_met_by(&self.report.chosen)
                    || self.refusal.as_ref().is_some_and(refuses)
            }
        }
    }

    /// What hosts were told, where that is something.
    pub(super) fn paces(&self) -> Vec<(String, HostPace)> {
        let paced = self.paced.iter().filter(|(_, pace)| !pace.is_free());
        paced.map(|(host, pace)| (host.to_string(), pace.clone())).collect()
    }
}

/// See the module's documentation.
pub struct Controller {
    pub(super) own: Name,
    pub(super) life: u64,
    /// When the common clock showed `life`.
    pub(super) born: Instant,
    pub(super) hosts: BTreeMap<Name, HostState>,
    /// What hosts have, as they have said.
    pub(super) inventory: BTreeMap<Name, Inventory>,
    pub(super) rates: ClusterRates,
    /// The topology in force is to be compared with the hosts.
    pub(super) is_to_compare: bool,
    /// What contradicts them of it.
    pub(super) contradictions: Vec<String>,
    pub(super) grace_until: Instant,
    /// How long hosts may still be waited for, and since when that is counted.
    pub(super) patience: BTreeMap<Name, (Instant, Duration)>,
    pub(super) config: Option<Arc<ClusterConfig>>,
    pub(super) with_profiles: bool,
    /// What was last read, whatever was thought of it; where that was taken back, what is in force again.
    pub(super) texts: (Option<Text>, Option<Text>),
    /// What was last read, where that was taken back.
    pub(super) taken_back: (Option<Text>, Option<Text>),
    /// The policy that was in force before this one.
    pub(super) policy_before: Option<Text>,
    /// The files as they are on the disk.
    pub(super) disk: Disk,
    /// That was refused, and may have been for what hosts had then.
    pub(super) is_refused: bool,
    pub(super) is_to_try_again: bool,
    pub(super) links: Links,
    pub(super) dead_paths: DeadPaths,
    pub(super) links_tested_at: Option<Instant>,
    pub(super) comms: BTreeMap<CommId, Held>,
    /// What flows want of what they are allotted.
    pub(super) wants: Wants,
    pub(super) yielders: Yielders,
    /// When rates are allotted anew for it, and when they were last.
    pub(super) allot_at: Option<Instant>,
    pub(super) allotted_at: Instant,
    /// Hosts that keep to paces which an earlier life has told.
    pub(super) unsure: BTreeSet<Name>,
    pub(super) orders: BTreeMap<u64, Pending>,
    pub(super) next_order: u64,
    /// Why everything is to be decided again.
    pub(super) cause: Option<String>,
    /// It is of tenants alone, for whom a pause is made ([`PAUSE_FOR_EACH`]).
    pub(super) is_of_tenants: bool,
    /// When it was decided last.
    pub(super) decided_at: Option<Instant>,
    /// Why it was decided last.
    pub(super) last_cause: String,
    pub(super) is_to_order: bool,
    /// Hosts may not have been told how flows are to leave them.
    pub(super) is_to_pace: bool,
    pub(super) rollout: Option<Rollout>,
    /// Hosts that do not let this service in, since they have another one of its name: in their words.
    pub(super) turned_away: BTreeMap<Name, String>,
    /// Hosts that obey another host, and which.
    pub(super) elsewhere: BTreeMap<Name, String>,
    pub(super) history: History,
    pub(super) outputs: VecDeque<Output>,
}

impl Controller {
    /// A controller that knows nothing yet, of a cluster of these hosts, of which `own` is there.
    #[must_use]
    pub fn new(life: u64, own: &Name, hosts: &[Name], now: Instant) -> Self {
        let mut controller = Controller {
            own: own.clone(),
            life,
            born: now,
            hosts: hosts.iter().map(|host| (host.clone(), HostState::Away)).collect(),
            inventory: BTreeMap::new(),
            rates: ClusterRates::default(),
            is_to_compare: false,
            contradictions: Vec::new(),
            grace_until: now + GRACE,
            patience: BTreeMap::new(),
            config: None,
            with_profiles: false,
            texts: (None, None),
            taken_back: (None, None),
            policy_before: None,
            disk: Disk::default(),
            is_refused: false,
            is_to_try_again: false,
            links: Links::default(),
            dead_paths: DeadPaths::default(),
            links_tested_at: None,
            comms: BTreeMap::new(),
            wants: Wants::new(),
            yielders: Yielders::default(),
            allot_at: None,
            allotted_at: now,
            unsure: BTreeSet::new(),
            orders: BTreeMap::new(),
            next_order: 0,
            cause: None,
            is_of_tenants: false,
            decided_at: None,
            last_cause: String::new(),
            is_to_order: false,
            is_to_pace: false,
            rollout: None,
            turned_away: BTreeMap::new(),
            elsewhere: BTreeMap::new(),
            history: History::default(),
            outputs: VecDeque::new(),
        };
        controller.met(own, now);
        controller
    }

    /// The next thing to be done.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// What operators have said of links, from an earlier life; before anything else is heard.
    pub fn remember(&mut self, links: Vec<LinkOverride>) {
        for link in links {
            self.links.merge(link);
        }
    }

    /// What it did, why, and how it went.
    pub fn history(&mut self) -> &mut History {
        &mut self.history
    }

    /// How many words about links were heard, and all that is known by them.
    pub fn said(&self) -> (u64, impl FnOnce() -> Vec<LinkOverride>) {
        (self.links.words(), || self.links.to_keep().flatten().collect())
    }

    /// All hosts that hear are to keep what was said of a link.
    pub(super) fn have_kept(&mut self, link: LinkOverride) {
        let there = self.hosts.iter().filter(|(_, state)| **state == HostState::Synced);
        let message = ControllerMessage::Keep { life: self.life, links: vec![link] };
        self.outputs.extend(there.map(|(host, _)| Output::Tell { to: host.clone(), message: message.clone() }));
    }

    /// Orders that were refused may be given again at once: the operator wants something anew.
    pub(super) fn forgive(&mut self) {
        self.comms.values_mut().for_each(|held| held.refusal = None);
    }
}
