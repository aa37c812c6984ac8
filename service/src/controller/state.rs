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
//! before it. Until then it may take a later life than it was born with; one that has decided and meets a later life orders nothing more. Orders that belong to a policy, file or link that was put in force are its application: when one of
//! them is refused for what it asks for, what was in force before is again.
//!
//! Without I/O and clock. Whoever calls an input then calls [`Controller::settle`], takes the outputs, and comes back at
//! [`Controller::next_deadline`].
//!
//! Deliberately absent: when a change takes effect (the hosts agree on that), and memory of former lives: everything is
//! reported again, also what operators have said of links, which hosts keep.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_config::topology::ActualHost;

use super::answer::ControllerAnswer;
use super::application::Application;
use super::basis::{Basis, Text};
use super::bursts::Yielders;
use super::dead_paths::DeadPaths;
use super::equipment::{Equipment, Interfaces};
use super::history::{History, Went};
use super::links::Links;
use super::message::{AgentMessage, ControllerMessage, Report};
use super::orders::{Pending, Refusal};
use super::pace::HostPace;
use super::plan::{Plan, Wants, plan_all};
use super::rates::ClusterRates;
use super::said::SaidLink;
use crate::exchange::protocol::{CommId, Name};

/// Communicators of the cluster that are looked after; those beyond keep what they have.
pub const COMMS_MAX: usize = 1 << 16;
/// How long hosts that are not there are waited for at the start.
pub const GRACE: Duration = Duration::from_secs(3);
/// How long a host that was met may take to report, be it once or several times within a minute: whoever has to be asked
/// again and again does not keep the others waiting.
pub const SYNC_TIME: Duration = Duration::from_secs(10);
/// See [`SYNC_TIME`].
const SYNC_TIME_IS_FOR: Duration = Duration::from_secs(60);

/// Rates are allotted anew at most so often when tenants want more or less of them.
pub const ALLOT_EVERY: Duration = Duration::from_millis(500);

/// For so many communicators all are decided for at once whenever one of them begins, ends or sends otherwise. For each one more, a pause:
/// several times as long as the decision takes, so that tenants who make and end things all the time do not keep the controller from all else.
const DECIDED_AT_ONCE: usize = 64;
const PAUSE_FOR_EACH: Duration = Duration::from_millis(1);

/// Hosts test their links at most so often, however many suspect a path.
const LINKS_TESTED_EVERY: Duration = Duration::from_millis(500);

/// Who asked, to be given back with the answer.
pub type Ticket = u64;

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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostState {
    /// Not there, or no longer.
    Away,
    /// Asked to report.
    Asked { until: Instant },
    /// Has reported.
    Synced,
    /// Obeys another host's controller.
    Elsewhere,
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
    own: Name,
    pub(super) life: u64,
    /// When the common clock showed `life`.
    born: Instant,
    pub(super) hosts: BTreeMap<Name, HostState>,
    /// What hosts have, as they have said.
    pub(super) equipment: BTreeMap<Name, Equipment>,
    pub(super) rates: ClusterRates,
    /// The topology in force is to be compared with the hosts.
    pub(super) is_to_compare: bool,
    /// What contradicts them of it.
    pub(super) contradictions: Vec<String>,
    grace_until: Instant,
    /// How long hosts may still be waited for, and since when that is counted.
    patience: BTreeMap<Name, (Instant, Duration)>,
    pub(super) basis: Option<Arc<Basis>>,
    with_profiles: bool,
    /// What was last read, whatever was thought of it; where that was taken back, what is in force again.
    pub(super) texts: (Option<Text>, Option<Text>),
    /// What was last read, where that was taken back.
    pub(super) taken_back: (Option<Text>, Option<Text>),
    /// That was refused, and may have been for what hosts had then.
    pub(super) is_refused: bool,
    is_to_try_again: bool,
    pub(super) links: Links,
    pub(super) dead_paths: DeadPaths,
    links_tested_at: Option<Instant>,
    pub(super) comms: BTreeMap<CommId, Held>,
    /// What flows want of what they are allotted.
    pub(super) wants: Wants,
    pub(super) yielders: Yielders,
    /// When rates are allotted anew for it, and when they were last.
    allot_at: Option<Instant>,
    allotted_at: Instant,
    /// Hosts that keep to paces which an earlier life has told.
    pub(super) unsure: BTreeSet<Name>,
    pub(super) orders: BTreeMap<u64, Pending>,
    pub(super) next_order: u64,
    /// Why everything is to be decided again.
    cause: Option<String>,
    /// It is of tenants alone, for whom a pause is made ([`PAUSE_FOR_EACH`]).
    is_of_tenants: bool,
    /// When it was decided last.
    decided_at: Option<Instant>,
    /// Why it was decided last.
    pub(super) last_cause: String,
    pub(super) is_to_order: bool,
    /// Hosts may not have been told how flows are to leave them.
    is_to_pace: bool,
    pub(super) application: Option<Application>,
    has_decided: bool,
    /// Hosts that obey another life, and which.
    superseded: BTreeMap<Name, u64>,
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
            equipment: BTreeMap::new(),
            rates: ClusterRates::default(),
            is_to_compare: false,
            contradictions: Vec::new(),
            grace_until: now + GRACE,
            patience: BTreeMap::new(),
            basis: None,
            with_profiles: false,
            texts: (None, None),
            taken_back: (None, None),
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
            application: None,
            has_decided: false,
            superseded: BTreeMap::new(),
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

    /// A life of the controller that hosts obey in the place of this one.
    #[must_use]
    pub fn superseded_by(&self) -> Option<u64> {
        self.superseded.values().copied().max()
    }

    /// Hosts of the cluster, and whether they report.
    pub fn hosts(&self) -> impl Iterator<Item = (&Name, bool)> {
        self.hosts.iter().map(|(host, state)| (host, *state == HostState::Synced))
    }

    /// Whether hosts obey another one, and none but its own this one.
    pub(super) fn is_obeyed_by_none(&self) -> bool {
        let may_obey = |state: &HostState| matches!(state, HostState::Asked { .. } | HostState::Synced);
        let mut others = self.hosts.iter().filter(|(host, _)| **host != self.own);
        !self.elsewhere.is_empty() && !others.any(|(_, state)| may_obey(state))
    }

    /// A host is there, and has heard nothing yet.
    pub fn met(&mut self, host: &Name, now: Instant) {
        self.forget(host, &format!("host {host} reports anew"));
        self.rates.forget(host);
        if self.dead_paths.forget(host) {
            self.find_dead_links(&format!("host {host}, which said that it is dead, reports anew"), now);
        }
        self.superseded.remove(host);
        self.elsewhere.remove(host);
        self.comms.values_mut().for_each(|held| drop(held.paced.remove(host)));
        self.unsure.remove(host);
        self.count_patience(host, now);
        if let Some(state) = self.hosts.get_mut(host) {
            let (since, left) = self.patience.entry(host.clone()).or_insert((now, SYNC_TIME));
            if now.saturating_duration_since(*since) >= SYNC_TIME_IS_FOR {
                (*since, *left) = (now, SYNC_TIME);
            }
            *state = HostState::Asked { until: now + *left };
            self.ask_for_reports(host.clone());
        }
    }

    /// A host is not waited for any longer: what of its time is left.
    fn count_patience(&mut self, host: &Name, now: Instant) {
        if let (Some(HostState::Asked { until }), Some((_, left))) = (self.hosts.get(host), self.patience.get_mut(host))
        {
            *left = until.saturating_duration_since(now);
        }
    }

    fn ask_for_reports(&mut self, host: Name) {
        let message = ControllerMessage::Sync { life: self.life, with_profiles: self.with_profiles };
        self.outputs.push_back(Output::Tell { to: host, message });
    }

    /// Another policy is in force: it may want to know more, or less.
    pub(super) fn uses_profiles(&mut self, with_profiles: bool) {
        if std::mem::replace(&mut self.with_profiles, with_profiles) != with_profiles {
            let there = self.hosts.iter().filter(|(_, state)| **state != HostState::Away);
            let there: Vec<Name> = there.map(|(host, _)| host.clone()).collect();
            there.into_iter().for_each(|host| self.ask_for_reports(host));
        }
    }

    /// A host is no longer there. Communicators with their root there have failed, or are out of reach.
    pub fn lost(&mut self, host: &Name, now: Instant) {
        self.count_patience(host, now);
        let Some(state) = self.hosts.get_mut(host) else { return };
        // Who has been replaced stays so, also when its successor takes its links from it.
        self.elsewhere.remove(host);
        self.rates.forget(host);
        if std::mem::replace(state, HostState::Away) != HostState::Away {
            self.history.note(format!("host {host} lost"), "", Went::Done, now);
        }
        // Its NICs that are down are so until it says something else.
        if self.equipment.remove(host).is_some() {
            self.hosts_have_changed();
        }
        let cause = format!("host {host} was lost");
        if self.forget(host, &cause) {
            self.because(cause);
        }
        if self.dead_paths.forget(host) {
            self.find_dead_links(&format!("host {host}, which said that it is dead, was lost"), now);
        }
    }

    /// Forgets communicators with their root on a host, and says why of orders that are under way. Returns whether there were any.
    fn forget(&mut self, host: &Name, why: &str) -> bool {
        let before = self.comms.len();
        for (_, held) in self.comms.extract_if(.., |comm, _| comm.root == *host) {
            // It may come back, and then has what its other hosts were told.
            self.unsure.extend(held.paced.into_keys());
        }
        let comms = &self.comms;
        self.wants.retain(|comm, by_host| {
            by_host.remove(host);
            comms.contains_key(comm) && !by_host.is_empty()
        });
        for (_, Pending { entry, .. }) in self.orders.extract_if(.., |_, pending| pending.comm.root == *host) {
            self.history.went(entry, Went::Failed(why.to_owned()));
        }
        before != self.comms.len()
    }

    /// An agent speaks, whose message was checked for it.
    pub fn hear(&mut self, from: &Name, message: AgentMessage, now: Instant) {
        match message {
            // A host that is away, or was forgotten, begins with a report for a Sync.
            _ if self.hosts.get(from).is_none_or(|state| *state == HostState::Away) => {}
            AgentMessage::Has(equipment) => {
                if self.equipment.get(from) != Some(&*equipment) {
                    self.are_down(from, equipment.interfaces.iter().flat_map(Interfaces::names_down), now);
                    self.equipment.insert(from.clone(), *equipment);
                    self.hosts_have_changed();
                }
            }
            AgentMessage::Report(report) => self.report(*report, now),
            AgentMessage::Rates { rates } => self.rates.hear(from, rates),
            AgentMessage::Burst { comm, burst } => self.foreseen(&comm, burst),
            AgentMessage::Wants { comm, bps } => self.wants(from, comm, bps, now),
            AgentMessage::Gone { comm } => {
                self.wants.remove(&comm);
                if let Some(held) = self.comms.remove(&comm) {
                    let pending = held.order.and_then(|order| self.orders.remove(&order));
                    if let Some(Pending { entry, .. }) = pending {
                        self.history.went(entry, Went::Failed("the communicator has ended".into()));
                    }
                    self.because_of_tenants(format!("communicator {comm} ended"));
                }
            }
            AgentMessage::Kept { links } => self.kept(from, links),
            AgentMessage::Synced { life, is_paced } if life == self.life => {
                if is_paced {
                    self.unsure.insert(from.clone());
                }
                let parts = self.links.to_keep().map(|links| ControllerMessage::Keep { life, links });
                self.outputs.extend(parts.map(|message| Output::Tell { to: from.clone(), message }));
                self.count_patience(from, now);
                self.hosts.insert(from.clone(), HostState::Synced);
                self.superseded.remove(from);
                (self.is_to_order, self.is_to_pace) = (true, true);
            }
            AgentMessage::AskTime { question } => {
                let since_ns = now.saturating_duration_since(self.born).as_nanos() as u64;
                let message = ControllerMessage::Time { question, common_ns: self.life.saturating_add(since_ns) };
                self.outputs.push_back(Output::Tell { to: from.clone(), message });
            }
            AgentMessage::Synced { .. } => {}
            AgentMessage::Behind => {
                self.met(from, now);
                self.because(format!("host {from} reports anew"));
            }
            AgentMessage::Suspects => self.test_links(now),
            AgentMessage::Path { peer, path, answers } => {
                if self.dead_paths.hear(from, &peer, &path, answers) {
                    let why = if answers { "paths over it are answered" } else { "by what hosts say of other paths" };
                    self.find_dead_links(why, now);
                }
            }
            AgentMessage::Answer { order, outcome } => self.answered(from, order, outcome, now),
            AgentMessage::Obeys { controller } => {
                self.hosts.insert(from.clone(), HostState::Elsewhere);
                let what = format!("not obeyed by host {from}: the controller of its service.toml is {controller}");
                if self.elsewhere.insert(from.clone(), controller.clone()) != Some(controller) {
                    tracing::warn!(%from, what, "two hosts have the controller's role");
                    self.history.note(what, "", Went::Done, now);
                }
                self.is_to_order = true;
            }
            AgentMessage::Superseded { by } if !self.has_decided => self.outlive(by, now),
            AgentMessage::Superseded { by } => {
                if self.superseded.insert(from.clone(), by) != Some(by) {
                    let what = format!("replaced by the controller's life {by}, as host {from} says");
                    self.history.note(what, "", Went::Done, now);
                }
            }
        }
    }

    /// Whoever starts comes after all lives that hosts remember, also if the clock was set back.
    fn outlive(&mut self, life: u64, now: Instant) {
        if life < self.life {
            return;
        }
        (self.life, self.born) = (life.saturating_add(1), now);
        self.history.note(format!("begins anew as life {}, after life {life}", self.life), "", Went::Done, now);
        let there = self.hosts.iter().filter(|(_, state)| **state != HostState::Away);
        let there: Vec<Name> = there.map(|(host, _)| host.clone()).collect();
        there.iter().for_each(|host| self.met(host, now));
    }

    /// A host has kept what operators have said of links.
    fn kept(&mut self, from: &Name, links: Vec<SaidLink>) {
        for link in links.into_iter().filter(|link| self.links.merge(link.clone())).collect::<Vec<_>>() {
            let SaidLink { lower, upper, state, .. } = &link;
            self.because(format!("link {lower} {upper} {state}, as host {from} has kept it"));
            self.have_kept(link);
        }
    }

    /// What operators have said of links, from an earlier life; before anything else is heard.
    pub fn remember(&mut self, links: Vec<SaidLink>) {
        for link in links {
            self.links.merge(link);
        }
    }

    /// What it did, why, and how it went.
    pub fn history(&mut self) -> &mut History {
        &mut self.history
    }

    /// How many words about links were heard, and all that is known by them.
    pub fn said(&self) -> (u64, impl FnOnce() -> Vec<SaidLink>) {
        (self.links.words(), || self.links.to_keep().flatten().collect())
    }

    /// All hosts that hear are to keep what was said of a link.
    pub(super) fn have_kept(&mut self, link: SaidLink) {
        let there = self.hosts.iter().filter(|(_, state)| **state == HostState::Synced);
        let message = ControllerMessage::Keep { life: self.life, links: vec![link] };
        self.outputs.extend(there.map(|(host, _)| Output::Tell { to: host.clone(), message: message.clone() }));
    }

    /// What a communicator's flows from a host want of what they are allotted.
    fn wants(&mut self, from: &Name, comm: CommId, bps: Option<u64>, now: Instant) {
        let Some(held) = self.comms.get(&comm).filter(|held| held.paced.contains_key(from)) else { return };
        let is_allotted = held.paced.get(from).is_some_and(|pace| pace.allotted_bps() > 0);
        if is_allotted && self.wants.entry(comm).or_default().insert(from.clone(), bps) != Some(bps) {
            self.allot_at.get_or_insert(now.max(self.allotted_at + ALLOT_EVERY.max(self.pause())));
        }
    }

    /// Has all hosts look at their links to each other: what is about to be ordered needs them.
    fn test_links(&mut self, now: Instant) {
        if self.links_tested_at.is_some_and(|at| now.saturating_duration_since(at) < LINKS_TESTED_EVERY) {
            return;
        }
        self.links_tested_at = Some(now);
        let there = self.hosts.iter().filter(|(_, state)| **state != HostState::Away);
        let tell = |(host, _): (&Name, _)| Output::Tell { to: host.clone(), message: ControllerMessage::TestLinks };
        self.outputs.extend(there.map(tell));
    }

    fn report(&mut self, report: Report, now: Instant) {
        self.is_to_order = true;
        let is_full = self.comms.len() >= COMMS_MAX;
        match self.comms.get_mut(&report.comm) {
            Some(held) => {
                let is_as_planned = match &held.plan {
                    Some(Ok(plan)) => plan.rings == report.chosen.rings,
                    _ => false,
                };
                // Who chose other rings by hand may have done so before it was pinned; others make room for what is pinned, wherever it goes.
                let has_other_rings = held.report.chosen.rings != report.chosen.rings && !is_as_planned;
                let is_by_hand = has_other_rings || (report.is_pinned && held.report.chosen != report.chosen);
                let sends_otherwise = held.report.profile != report.profile;
                let comm = report.comm.clone();
                let is_unpinned = held.report.is_pinned && !report.is_pinned;
                // It may not have heard yet of its place.
                held.report = Report { arrival: report.arrival.or(held.report.arrival), ..report };
                if is_unpinned {
                    self.because(format!("communicator {comm} was unpinned"));
                } else if is_by_hand {
                    self.because(format!("communicator {comm} was changed by hand"));
                } else if sends_otherwise {
                    self.because_of_tenants(format!("communicator {comm} sends at other times"));
                }
            }
            None if is_full => {
                let what = format!("communicator {} left as it is", report.comm);
                self.history.note_of_comm(what, "", Went::Failed(format!("there are {COMMS_MAX} communicators")), now);
            }
            None => {
                self.because_of_tenants(format!("communicator {} of tenant {} began", report.comm, report.tenant));
                let comm = report.comm.clone();
                self.comms
                    .insert(comm, Held { report, plan: None, order: None, refusal: None, paced: BTreeMap::new() });
            }
        }
    }

    /// All is to be decided again, at once.
    pub(super) fn because(&mut self, cause: String) {
        self.add_cause(cause);
        self.is_of_tenants = false;
    }

    /// All is to be decided again, when it may: tenants have done something.
    fn because_of_tenants(&mut self, cause: String) {
        self.is_of_tenants |= self.cause.is_none();
        self.add_cause(cause);
    }

    fn add_cause(&mut self, cause: String) {
        self.cause = Some(match self.cause.take() {
            // The first says enough.
            Some(first) if first.contains(", and more") => first,
            Some(first) => format!("{first}, and more"),
            None => cause,
        });
    }

    /// How long decisions are apart that tenants make necessary.
    fn pause(&self) -> Duration {
        PAUSE_FOR_EACH * self.comms.len().saturating_sub(DECIDED_AT_ONCE) as u32
    }

    /// When what tenants have done is decided for; `None` where something else, or nothing, is to be.
    fn decides_at(&self) -> Option<Instant> {
        let at = self.decided_at.filter(|_| self.cause.is_some() && self.is_of_tenants);
        at.map(|at| at + self.pause())
    }

    /// Orders that were refused may be given again at once: the operator wants something anew.
    pub(super) fn forgive(&mut self) {
        self.comms.values_mut().for_each(|held| held.refusal = None);
    }

    /// Until when hosts are waited for.
    fn waits_until(&self, now: Instant) -> Option<Instant> {
        let until = |state: &HostState| match state {
            HostState::Away => Some(self.grace_until),
            HostState::Asked { until } => Some(*until),
            HostState::Synced | HostState::Elsewhere => None,
        };
        self.hosts.values().filter_map(until).filter(|until| *until > now).max()
    }

    /// The hosts of the cluster, and what they have said of themselves.
    pub(super) fn actual_hosts(&self) -> Vec<ActualHost<'_>> {
        let names = self.hosts.keys().map(|host| (host.as_str(), self.equipment.get(host)));
        names.map(|(name, equipment)| equipment.map_or(ActualHost::named(name), |has| has.of(name))).collect()
    }

    fn hosts_have_changed(&mut self) {
        (self.is_to_compare, self.is_to_try_again) = (true, self.is_refused);
    }

    /// Compares the topology in force with what hosts have said since. What contradicts it is told; it stays in force, as all that was decided
    /// by it does.
    fn compare_hosts(&mut self, now: Instant) {
        let Some(basis) = &self.basis else { return };
        let found = basis.contradictions(&self.actual_hosts());
        for contradiction in found.iter().filter(|found| !self.contradictions.contains(found)) {
            tracing::warn!(contradiction, "the topology in force contradicts a host");
            self.history.note("topology contradicted by a host", contradiction.as_str(), Went::Done, now);
        }
        self.contradictions = found;
    }

    /// Does what inputs and time have made due.
    pub fn settle(&mut self, now: Instant) {
        self.expire(now);
        if std::mem::take(&mut self.is_to_compare) {
            self.compare_hosts(now);
        }
        if self.application.is_none() && std::mem::take(&mut self.is_to_try_again) {
            self.try_files_again(now);
        }
        if self.superseded_by().is_some() {
            return self.give_up_application("another life of the controller has replaced this one");
        }
        if self.waits_until(now).is_some() {
            return;
        }
        if self.allot_at.is_some_and(|at| at <= now) {
            self.because("tenants want other parts of their shares".to_owned());
        }
        loop {
            let is_due = self.decides_at().is_none_or(|at| at <= now);
            if let Some(cause) = self.cause.take_if(|_| is_due) {
                self.last_cause = cause;
                (self.allot_at, self.allotted_at, self.decided_at) = (None, now, Some(now));
                self.decide();
                self.note_decided();
            }
            while std::mem::take(&mut self.is_to_order) {
                // Whoever answers an order changes nothing of them, and there may be many.
                if std::mem::take(&mut self.is_to_pace) {
                    self.tell_paces();
                }
                self.place_orders(now);
            }
            if !self.finish_application(now) {
                break;
            }
        }
    }

    fn decide(&mut self) {
        let Some(basis) = self.basis.clone() else { return };
        self.has_decided = true;
        // It may be another topology.
        let _ = self.links.set_found(self.dead_paths.links(&basis));
        self.number_arrivals();
        let plans = plan_all(&basis, &self.links, &self.reports(), &self.wants);
        let plans: Vec<_> = plans.into_iter().map(|(report, plan)| (report.comm.clone(), plan)).collect();
        for (comm, plan) in plans {
            if let Some(held) = self.comms.get_mut(&comm) {
                held.plan = Some(plan);
                held.refusal.iter_mut().for_each(|refusal| refusal.may_retry = true);
            }
        }
        (self.is_to_order, self.is_to_pace) = (true, true);
    }

    /// What a single decision may have to tell: an order and a place for each communicator, and a pace for each of its hosts.
    #[must_use]
    pub fn tells_at_most(&self) -> usize {
        self.comms.values().map(|held| 2 + held.report.hosts.len()).sum()
    }

    /// When [`Controller::settle`] is next due, if time alone makes it.
    #[must_use]
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let retry =
            |held: &Held| held.refusal.as_ref().filter(|refusal| refusal.may_retry).map(|refusal| refusal.until);
        let retries = self.comms.values().filter_map(retry);
        let reports = self.comms.values().filter_map(|held| held.refusal.as_ref()?.reports_until);
        let has_work = self.cause.is_some() || self.is_to_order || self.application.is_some();
        let waits = self.waits_until(now).filter(|_| has_work && self.superseded_by().is_none());
        let orders = self.orders.values().map(|pending| pending.until);
        let decides = [self.allot_at, self.decides_at()].into_iter().flatten();
        let decides = decides.map(|at| self.waits_until(now).map_or(at, |until| until.max(at)));
        let decides = decides.filter(|_| self.superseded_by().is_none());
        orders.chain(retries.filter(|at| *at > now)).chain(reports).chain(waits).chain(decides).min()
    }
}
