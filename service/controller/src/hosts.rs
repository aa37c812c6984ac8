//! The hosts of the cluster: which of them are there, which have reported and for how long the others are waited for, which obey somebody
//! else, and whether what they have contradicts the topology.
//!
//! ```text
//! Away --met: Sync--> Asked --Synced--> Synced        lost: Away again, and what was known by its reports is forgotten
//!                       |
//!                       +-----Obeys---> Elsewhere     until it is met again
//! ```

use std::time::{Duration, Instant};

use mccs_config::topology::ActualHost;

use super::history::Went;
use super::message::ControllerMessage;
use super::orders::Pending;
use super::state::{Controller, Output, SYNC_TIME};
use mccs_model::Name;

/// See [`SYNC_TIME`].
const SYNC_TIME_IS_FOR: Duration = Duration::from_secs(60);

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

impl Controller {
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
        self.turned_away.remove(host);
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
    pub(super) fn count_patience(&mut self, host: &Name, now: Instant) {
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
        self.elsewhere.remove(host);
        self.rates.forget(host);
        if std::mem::replace(state, HostState::Away) != HostState::Away {
            self.history.note(format!("host {host} lost"), "", Went::Done, now);
        }
        // Its NICs that are down are so until it says something else.
        if self.inventory.remove(host).is_some() {
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
    pub(super) fn forget(&mut self, host: &Name, why: &str) -> bool {
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

    /// A host has another service of this one's name, and does not let this one in. It is tried again until it does.
    pub fn turned_away(&mut self, host: &Name, reason: &str, now: Instant) {
        if self.turned_away.insert(host.clone(), reason.to_owned()).is_none() {
            tracing::error!(%host, reason, "turned away: this service orders nothing there");
            self.history.note(format!("turned away by host {host}"), reason, Went::Done, now);
        }
    }

    /// Whoever is let in comes after all lives that hosts remember, also if the clock was set back.
    pub(super) fn outlive(&mut self, life: u64, now: Instant) {
        if life < self.life {
            return;
        }
        (self.life, self.born) = (life.saturating_add(1), now);
        self.history.note(format!("begins anew as life {}, after life {life}", self.life), "", Went::Done, now);
        let there = self.hosts.iter().filter(|(_, state)| **state != HostState::Away);
        let there: Vec<Name> = there.map(|(host, _)| host.clone()).collect();
        there.iter().for_each(|host| self.met(host, now));
    }

    /// Until when hosts are waited for.
    pub(super) fn waits_until(&self, now: Instant) -> Option<Instant> {
        let until = |state: &HostState| match state {
            HostState::Away => Some(self.grace_until),
            HostState::Asked { until } => Some(*until),
            HostState::Synced | HostState::Elsewhere => None,
        };
        self.hosts.values().filter_map(until).filter(|until| *until > now).max()
    }

    /// The hosts of the cluster, and what they have said of themselves.
    pub(super) fn actual_hosts(&self) -> Vec<ActualHost<'_>> {
        let names = self.hosts.keys().map(|host| (host.as_str(), self.inventory.get(host)));
        names.map(|(name, inventory)| inventory.map_or(ActualHost::named(name), |has| has.of(name))).collect()
    }

    pub(super) fn hosts_have_changed(&mut self) {
        (self.is_to_compare, self.is_to_try_again) = (true, self.is_refused);
    }

    /// Compares the topology in force with what hosts have said since. What contradicts it is told; it stays in force, as all that was decided
    /// by it does.
    pub(super) fn compare_hosts(&mut self, now: Instant) {
        let Some(config) = &self.config else { return };
        let found = config.contradictions(&self.actual_hosts());
        for contradiction in found.iter().filter(|found| !self.contradictions.contains(found)) {
            tracing::warn!(contradiction, "the topology in force contradicts a host");
            self.history.note("topology contradicted by a host", contradiction.as_str(), Went::Done, now);
        }
        self.contradictions = found;
    }
}
