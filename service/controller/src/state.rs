//! State machine of the controller: holds the cluster's view, decides, and orders what is not yet
//! as decided.
//!
//! ```text
//! Met --> Sync --> Report, Synced --+
//! Report, Gone, Lost, Link, files --+--> decide --> compare with what was decided last --> Order (compare and swap)
//! Answer: done, stale, refused -----+                                                   --> nothing, where equal
//!                                   +--> compare with what hosts were told              --> Pace, which holds at once
//! ```
//!
//! [`Controller`] routes inputs to components, each of which owns its state:
//!
//! | component | owns |
//! | --- | --- |
//! | `Hosts` | who is there, has reported, or obeys somebody else |
//! | `Inventories` | what hosts have, and what of the topology contradicts it |
//! | `ConfigStore` | the cluster's config in force, and the files that it is from |
//! | `Rollouts` | what is being put in force |
//! | `Communicators` | what hosts report, what is planned, what was refused |
//! | `Orders` | orders that are under way |
//! | `PaceTable` | what hosts were told of how flows leave them |
//! | `LinkFaults` | links that are not as the topology says |
//! | `ClusterRates` | what flows send |
//! | `ToldReductions` | what hosts were told of how GPUs reduce |
//! | `Effects` | outputs, the history, and when it is decided again |
//!
//! A strategy that an operator has chosen by hand is *pinned*: all else is planned around it, and it is not ordered
//! otherwise.
//!
//! Nothing is decided before the hosts that are there have reported, so that a controller that has just started decides as the one before
//! it. If hosts remember a later life than its own it takes one after that: hosts let a single service of a name in, so whoever is let in
//! has the role. The life of an elected controller is its term: a host that remembers a greater one ends it. Orders that belong to a
//! policy, file or link that was put in force are its rollout: when one of them is refused for what it asks for, what was in force before
//! is again.
//!
//! Without I/O and clock. Whoever calls an input then calls [`Controller::settle`], takes the outputs, and comes back at
//! [`Controller::next_deadline`].
//!
//! Deliberately absent: when a change takes effect (the hosts agree on that), and memory of former lives: everything is
//! reported again, also what operators have said of links, which hosts keep.

mod operator_requests;
mod report_handler;
mod views;

use std::sync::Arc;
use std::time::Instant;

use crate::cluster::cluster_rates::ClusterRates;
use crate::cluster::hosts::Hosts;
use crate::cluster::inventories::Inventories;
use crate::cluster::link_faults::LinkFaults;
use crate::cluster::pace_table::PaceTable;
use crate::cluster::reductions::ToldReductions;
use crate::communicators::Communicators;
use crate::communicators::orders::{Answered, Orders, besides};
use crate::communicators::plan::plan_all;
use crate::communicators::rollout::{Ended, Finish, Rollouts, Start};
use crate::config::cluster_config::ClusterConfig;
use crate::config::config_store::{ConfigStore, Texts};
use crate::effects::Effects;
use crate::history::{Cause, History, Went};
use crate::links::link_overrides::LinkOverride;
use crate::messages::answer::{Applied, ControllerAnswer};
use crate::messages::outbox::{Output, Ticket};
use crate::state::views::Cluster;
use mccs_model::Name;

/// See the module's documentation.
pub struct Controller {
    hosts: Hosts,
    inventories: Inventories,
    config: ConfigStore,
    rollouts: Rollouts,
    comms: Communicators,
    orders: Orders,
    paces: PaceTable,
    faults: LinkFaults,
    rates: ClusterRates,
    reductions: ToldReductions,
    effects: Effects,
    /// Its life is a term, which ends when there is a greater one.
    is_elected: bool,
}

/// A term that begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Term {
    /// Greater than all before.
    pub number: u64,
    /// Time of the common clock.
    pub common_ns: u64,
    /// Since when this host meets others: they are waited for from then on.
    pub since: Instant,
    /// The host that had the office before and has not said that it gives it up: it may be lost.
    pub lost: Option<Name>,
}

impl Controller {
    /// A controller that knows nothing yet, of a cluster of these hosts, of which `own` is there.
    #[must_use]
    pub fn new(life: u64, own: &Name, hosts: &[Name], now: Instant) -> Self {
        let mut controller = Self::start(Hosts::new(own, hosts, now), Effects::new(life, life, now), false);
        controller.met(own, now);
        controller
    }

    /// The same, where it was elected.
    #[must_use]
    pub fn elected(term: Term, own: &Name, hosts: &[Name], now: Instant) -> Self {
        let Term { number, common_ns, since, lost } = term;
        let hosts = Hosts::new(own, hosts, since).doubting(lost.filter(|lost| lost != own));
        let mut controller = Self::start(hosts, Effects::new(number, common_ns, now), true);
        controller.met(own, now);
        controller
    }

    fn start(hosts: Hosts, effects: Effects, is_elected: bool) -> Self {
        Controller {
            hosts,
            inventories: Inventories::default(),
            config: ConfigStore::default(),
            rollouts: Rollouts::default(),
            comms: Communicators::default(),
            orders: Orders::default(),
            paces: PaceTable::default(),
            faults: LinkFaults::default(),
            rates: ClusterRates::default(),
            reductions: ToldReductions::default(),
            effects,
            is_elected,
        }
    }

    /// The next thing to be done.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.effects.outbox.pop()
    }

    /// Keeps operators' overrides of links from an earlier life; before anything else is heard.
    pub fn remember(&mut self, links: Vec<LinkOverride>) {
        self.faults.remember(links);
    }

    /// Acts, with their reasons and results.
    pub fn history(&mut self) -> &mut History {
        &mut self.effects.history
    }

    /// How many words about links were heard, and all that is known by them.
    pub fn said(&self) -> (u64, impl FnOnce() -> Vec<LinkOverride>) {
        let links = self.faults.links();
        (links.words(), || links.to_keep().flatten().collect())
    }

    /// Topology and policy in force, unless something is being put in force, which may be taken back.
    pub fn config_in_force(&self) -> Option<&Arc<ClusterConfig>> {
        self.config.shared().filter(|_| !self.rollouts.is_under_way())
    }

    /// A host is there, and has heard nothing yet.
    pub fn met(&mut self, host: &Name, now: Instant) {
        self.forget_root(host, &format!("host {host} reports anew"));
        self.rates.forget(host);
        if self.faults.forget(host) {
            self.find_dead_links(&format!("host {host}, which said that it is dead, reports anew"), now);
        }
        self.paces.forget_told(host);
        self.reductions.forget(host);
        self.hosts.met(host, &mut self.effects.outbox, now);
    }

    /// A host is no longer there. Communicators with their root there have failed, or are out of reach.
    pub fn lost(&mut self, host: &Name, now: Instant) {
        if !self.hosts.lost(host, &mut self.effects, now) {
            return;
        }
        self.rates.forget(host);
        // Its NICs that are down are so until it says something else.
        if self.inventories.lost(host) {
            self.config.hosts_have_changed();
        }
        let cause = format!("host {host} was lost");
        if self.forget_root(host, &cause) {
            self.effects.decisions.because(cause);
        }
        if self.faults.forget(host) {
            self.find_dead_links(&format!("host {host}, which said that it is dead, was lost"), now);
        }
    }

    /// A host has another service of this one's name, and does not let this one in. It is tried again until it does.
    pub fn turned_away(&mut self, host: &Name, reason: &str, now: Instant) {
        self.hosts.turned_away(host, reason, &mut self.effects, now);
    }

    /// Forgets communicators with their root on a host, and says why of orders that are under way. Returns whether there were any.
    fn forget_root(&mut self, host: &Name, why: &str) -> bool {
        let were_some = self.comms.forget_root(host);
        self.paces.forget_root(host);
        self.orders.forget_root(host, why, &mut self.effects.history);
        were_some
    }

    fn find_dead_links(&mut self, why_not: &str, now: Instant) {
        self.faults.find_dead(self.config.in_force(), why_not, &mut self.effects, now);
    }

    /// Does what inputs and time have made due.
    pub fn settle(&mut self, now: Instant) {
        self.expire(now);
        let config = self.config.in_force();
        self.inventories.compare(config, &self.hosts, &mut self.effects.history, now);
        if !self.rollouts.is_under_way()
            && self.config.take_try_again()
            && let Some(config) = self.config.try_again(&self.inventories.actual_hosts(&self.hosts))
        {
            // A file that they contradicted then is right now.
            self.begin(config, &Cause::of_cluster("hosts have what its topology names"), None, now);
        }
        if self.hosts.waits_until(now).is_some() {
            return;
        }
        self.effects.decisions.allot_if_due(now);
        loop {
            if self.effects.decisions.take_due(self.comms.len(), now) {
                self.decide();
                self.rollouts.decided(&self.comms);
            }
            while self.effects.decisions.take_to_order() {
                // Whoever answers an order changes nothing of them, and there may be many.
                if self.effects.decisions.take_to_pace() {
                    self.rollouts.paced(self.paces.tell(&self.comms, &self.hosts, &mut self.effects.outbox));
                }
                let refused = self.orders.place(&mut self.comms, &mut self.effects, now);
                self.have_answered(refused);
            }
            if !self.finish_rollout(now) {
                break;
            }
        }
        self.reductions.tell(self.config.in_force(), &self.hosts, &mut self.effects.outbox);
    }

    /// Gives up what has taken too long, and looks again at what was refused.
    fn expire(&mut self, now: Instant) {
        let late = self.orders.expire(&mut self.comms, &mut self.effects, now);
        self.have_answered(late);
        for (comm, reason) in self.comms.take_unreported(now) {
            self.rollouts.kept(comm, reason);
        }
        if self.comms.values().any(|communicator| communicator.is_retry_due(now)) {
            self.effects.decisions.order();
        }
    }

    fn have_answered(&mut self, answered: impl IntoIterator<Item = Answered>) {
        answered.into_iter().for_each(|answered| self.rollouts.answered(answered, &self.comms));
    }

    fn decide(&mut self) {
        let Some(config) = self.config.in_force() else { return };
        self.faults.update_found(config);
        self.comms.number(&mut self.effects.outbox);
        let plans = plan_all(config, self.faults.links(), &self.comms.reports(), self.paces.wants());
        let plans = plans.into_iter().map(|(report, plan)| (report.comm.clone(), plan)).collect();
        self.comms.decided(plans);
        self.effects.decisions.order_and_pace();
    }

    /// Files of the operator have changed. A refused file changes nothing.
    fn change_files(&mut self, files: Texts, now: Instant) {
        self.config.note_changed(&files);
        let Err(files) = self.rollouts.defer(files) else { return };
        let what = files.names();
        let cause = Cause::of_operator("a file has changed", &format!("file {what}"));
        let chosen = self.config.choose(&files, &self.inventories.actual_hosts(&self.hosts), now);
        let refused = match chosen {
            Ok(chosen) => {
                if let Some(config) = chosen.config {
                    self.begin(config, &cause, None, now);
                }
                chosen.refused.map(|reason| {
                    let other = "in force with what was in force before of the other file, which is refused";
                    tracing::warn!(files = what, reason, "{other}");
                    Went::DoneBut(format!("the other file is still refused: {reason}"))
                })
            }
            Err(reason) => {
                tracing::warn!(files = what, reason, "files refused; what was in force stays");
                Some(Went::Failed(reason))
            }
        };
        if let Some(went) = refused {
            self.effects.history.note_caused(format!("{what} read"), &cause, went, now);
        }
    }

    /// Puts a config in force, for an operator who waits for an answer, or for a file.
    fn begin(&mut self, config: ClusterConfig, cause: &Cause, ticket: Option<Ticket>, now: Instant) {
        let (policy, file) = (config.policy.name(), &config.policy_text.name);
        let besides = besides(&config.not_enforced);
        let what = format!("policy {policy} of {file}, topology of {}{besides}", config.network.text.name);
        tracing::info!(policy, %file, why = cause.why, by = cause.by, "policy put in force");
        self.hosts.use_profiles(config.policy.uses_profiles(), &mut self.effects.outbox);
        let before = self.config.put_in_force(Arc::new(config));
        self.inventories.compare_again();
        self.start_rollout(what, cause, Start { before, ticket, is_said: ticket.is_some() }, now);
    }

    /// Begins a rollout of what was changed already.
    fn start_rollout(&mut self, what: String, cause: &Cause, start: Start, now: Instant) {
        let entry = self.effects.history.note_caused(&*what, cause, Went::Pending, now);
        self.rollouts.start(start, entry, self.orders.last(), now);
        self.comms.forgive();
        self.effects.decisions.because(what);
    }

    /// Ends a rollout whose communicators are all answered for. Returns whether there is more to do.
    fn finish_rollout(&mut self, now: Instant) -> bool {
        match self.rollouts.finish(&self.comms, self.orders.last(), now) {
            Finish::Waits => false,
            Finish::RollBack { before, why } => {
                tracing::warn!(reason = why, "policy taken back");
                let what = format!("policy {} of {}", before.policy.name(), before.policy_text.name);
                self.effects.history.note(what, &*why, Went::Done, now);
                self.hosts.use_profiles(before.policy.uses_profiles(), &mut self.effects.outbox);
                self.config.take_back(before);
                self.inventories.compare_again();
                self.comms.forgive();
                self.effects.decisions.because(why);
                true
            }
            Finish::Ended(ended) => {
                self.end_rollout(*ended, now);
                self.rollouts.is_under_way()
            }
        }
    }

    fn end_rollout(&mut self, mut ended: Ended, now: Instant) {
        let is_said = ended.start.is_said && !ended.applied.rolled_back;
        self.config.keep(ended.start.before.as_deref(), is_said);
        self.note_paced(&ended.applied.paced, now);
        let not_enforced = self.config.in_force().map(|config| self.cluster().without_effect(config));
        let away = self.hosts.iter().filter(|(_, reports)| !reports).map(|(host, _)| host.to_string()).collect();
        ended.applied = Applied { not_enforced: not_enforced.unwrap_or_default(), away, ..ended.applied };
        self.effects.history.went(ended.entry, ended.went());
        if let Some(ticket) = ended.start.ticket {
            self.effects.outbox.answer(ticket, Ok(ControllerAnswer::Applied(ended.applied)));
        }
        if let Some(files) = ended.next {
            self.change_files(files, now);
        }
    }

    /// Hosts were told other paces, for which there are no orders that the history would tell of.
    fn note_paced(&mut self, comms: &[String], now: Instant) {
        let Some(first) = comms.first() else { return };
        let more = match comms.len() - 1 {
            0 => String::new(),
            more => format!(", and of {more} more"),
        };
        let what = format!("caps, shares, windows and times to yield of communicator {first}{more} told to hosts");
        let Effects { history, decisions, .. } = &mut self.effects;
        history.note(what, decisions.last_cause(), Went::Done, now);
    }

    /// The operators' view.
    fn cluster(&self) -> Cluster<'_> {
        Cluster {
            life: self.effects.outbox.life(),
            hosts: &self.hosts,
            inventories: &self.inventories,
            config: &self.config,
            faults: &self.faults,
            comms: &self.comms,
            paces: &self.paces,
            rates: &self.rates,
        }
    }

    /// Most messages of a single decision: an order and a place for each communicator, and a pace for each of its hosts.
    #[must_use]
    pub fn tells_at_most(&self) -> usize {
        self.comms.values().map(|communicator| 2 + communicator.report().hosts.len()).sum()
    }

    /// When [`Controller::settle`] is next due, if time alone makes it.
    #[must_use]
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let waits = self.hosts.waits_until(now);
        let has_work = self.effects.decisions.has_work() || self.rollouts.is_under_way();
        let decides = self.effects.decisions.next_deadline(self.comms.len());
        let decides = decides.map(|at| waits.map_or(at, |until| until.max(at)));
        let refused = self.comms.values().filter_map(|communicator| communicator.next_deadline(now));
        let others = [self.orders.next_deadline(), waits.filter(|_| has_work), decides];
        refused.chain(others.into_iter().flatten()).min()
    }
}

#[cfg(test)]
impl Controller {
    /// The text of the topology in force.
    pub(crate) fn topology_text(&self) -> Option<&str> {
        self.config.in_force().map(|config| &*config.network.text.text)
    }

    /// Hosts' reports, in the order in which communicators arrived.
    pub(crate) fn reports(&self) -> Vec<&crate::messages::message::Report> {
        self.comms.reports()
    }
}
