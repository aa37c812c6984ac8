//! Hosts of the cluster at the controller: there, reported, waited for (grace), or obeying another
//! controller.
//!
//! ```text
//! Away --met: Sync--> Syncing --Synced--> Synced        lost: Away again
//!                       |
//!                       +-----Obeys---> Elsewhere     until it is met again
//! ```

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::effects::Effects;
use crate::history::Went;
use crate::messages::message::ControllerMessage;
use crate::messages::outbox::Outbox;
use mccs_model::Name;

/// How long hosts that are not there are waited for at the start.
pub const GRACE: Duration = Duration::from_secs(3);
/// How long a host that was met may take to report, be it once or several times within a minute: whoever has to be asked
/// again and again does not keep the others waiting.
pub const SYNC_TIME: Duration = Duration::from_secs(10);
/// How long a host is waited for whose controller was lost: the kernel may not have closed its links yet.
pub const DOUBT: Duration = Duration::from_millis(500);
/// See [`SYNC_TIME`].
const SYNC_TIME_IS_FOR: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HostState {
    /// Not there, or no longer.
    Away,
    /// Asked to report.
    Syncing { until: Instant },
    /// Has reported.
    Synced,
    /// Obeys another host's controller.
    Elsewhere,
}

/// See the module's documentation.
pub(crate) struct Hosts {
    own: Name,
    states: BTreeMap<Name, HostState>,
    grace_until: Instant,
    /// How long hosts may still be waited for, and since when that is counted.
    patience: BTreeMap<Name, (Instant, Duration)>,
    /// Whether hosts report when communicators send.
    with_profiles: bool,
    /// Hosts that do not let this service in, since they have another one of its name: in their words.
    turned_away: BTreeMap<Name, String>,
    /// Hosts that obey another host, and which.
    elsewhere: BTreeMap<Name, String>,
    /// A host that may be lost, as its controller was: it is not waited for as long as others.
    doubted: Option<Name>,
}

impl Hosts {
    /// A cluster of these hosts, of which none has been met.
    pub(crate) fn new(own: &Name, hosts: &[Name], now: Instant) -> Self {
        Hosts {
            own: own.clone(),
            states: hosts.iter().map(|host| (host.clone(), HostState::Away)).collect(),
            grace_until: now + GRACE,
            patience: BTreeMap::new(),
            with_profiles: false,
            turned_away: BTreeMap::new(),
            elsewhere: BTreeMap::new(),
            doubted: None,
        }
    }

    /// The same, where a host may be lost.
    pub(crate) fn doubting(self, doubted: Option<Name>) -> Self {
        Hosts { doubted, ..self }
    }

    /// All hosts, and whether they report.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Name, bool)> {
        self.states.iter().map(|(host, state)| (host, *state == HostState::Synced))
    }

    /// Those that have reported: they hear what is told.
    pub(crate) fn synced(&self) -> impl Iterator<Item = &Name> {
        self.iter().filter(|(_, reports)| *reports).map(|(host, _)| host)
    }

    /// Those that are there.
    pub(crate) fn there(&self) -> impl Iterator<Item = &Name> {
        self.states.iter().filter(|(_, state)| **state != HostState::Away).map(|(host, _)| host)
    }

    pub(crate) fn is_synced(&self, host: &Name) -> bool {
        self.states.get(host) == Some(&HostState::Synced)
    }

    /// Whether a host is of the cluster, and was met.
    pub(crate) fn is_there(&self, host: &Name) -> bool {
        self.states.get(host).is_some_and(|state| *state != HostState::Away)
    }

    /// A host is there, and is asked to report.
    pub(crate) fn met(&mut self, host: &Name, outbox: &mut Outbox, now: Instant) {
        self.turned_away.remove(host);
        self.elsewhere.remove(host);
        self.count_patience(host, now);
        if let Some(state) = self.states.get_mut(host) {
            let (since, left) = self.patience.entry(host.clone()).or_insert((now, SYNC_TIME));
            if now.saturating_duration_since(*since) >= SYNC_TIME_IS_FOR {
                (*since, *left) = (now, SYNC_TIME);
            }
            let is_doubted = self.doubted.as_ref() == Some(host);
            *state = HostState::Syncing { until: now + if is_doubted { DOUBT.min(*left) } else { *left } };
            self.ask_for_reports(host.clone(), outbox);
        }
    }

    /// A host is not waited for any longer: what of its time is left.
    fn count_patience(&mut self, host: &Name, now: Instant) {
        if let (Some(HostState::Syncing { until }), Some((_, left))) =
            (self.states.get(host), self.patience.get_mut(host))
        {
            *left = until.saturating_duration_since(now);
        }
    }

    fn ask_for_reports(&self, host: Name, outbox: &mut Outbox) {
        let message = ControllerMessage::Sync { life: outbox.life(), with_profiles: self.with_profiles };
        outbox.tell(host, message);
    }

    /// A host has reported all.
    pub(crate) fn have_reported(&mut self, host: &Name, now: Instant) {
        self.count_patience(host, now);
        self.states.insert(host.clone(), HostState::Synced);
    }

    /// A policy is put in force: hosts that are there report anew where it wants to know more than the one before, or less.
    pub(crate) fn use_profiles(&mut self, with_profiles: bool, outbox: &mut Outbox) {
        if std::mem::replace(&mut self.with_profiles, with_profiles) != with_profiles {
            self.there().for_each(|host| self.ask_for_reports(host.clone(), outbox));
        }
    }

    /// A host is no longer there. Returns whether it is of the cluster.
    pub(crate) fn lost(&mut self, host: &Name, effects: &mut Effects, now: Instant) -> bool {
        self.count_patience(host, now);
        let Some(state) = self.states.get_mut(host) else { return false };
        self.elsewhere.remove(host);
        if std::mem::replace(state, HostState::Away) != HostState::Away {
            effects.history.note(format!("host {host} lost"), "", Went::Done, now);
        }
        true
    }

    /// A host has another service of this one's name, and does not let this one in. It is tried again until it does.
    pub(crate) fn turned_away(&mut self, host: &Name, reason: &str, effects: &mut Effects, now: Instant) {
        if self.turned_away.insert(host.clone(), reason.to_owned()).is_none() {
            tracing::error!(%host, reason, "turned away: this service orders nothing there");
            effects.history.note(format!("turned away by host {host}"), reason, Went::Done, now);
        }
    }

    /// A host obeys another host's controller.
    pub(crate) fn obeys(&mut self, host: &Name, controller: String, effects: &mut Effects, now: Instant) {
        self.states.insert(host.clone(), HostState::Elsewhere);
        let what = format!("not obeyed by host {host}: the controller of its service.toml is {controller}");
        if self.elsewhere.insert(host.clone(), controller.clone()) != Some(controller) {
            tracing::warn!(from = %host, what, "two hosts have the controller's role");
            effects.history.note(what, "", Went::Done, now);
        }
    }

    /// Hosts that do not let this service in, and why.
    pub(crate) fn turned_away_by(&self) -> impl Iterator<Item = (String, String)> {
        self.turned_away.iter().map(|(host, why)| (host.to_string(), why.clone()))
    }

    /// Hosts that obey another host, and which.
    pub(crate) fn elsewhere(&self) -> impl Iterator<Item = (String, String)> {
        self.elsewhere.iter().map(|(host, other)| (host.to_string(), other.clone()))
    }

    /// Whether hosts obey another one, and none but its own this one.
    fn is_obeyed_by_none(&self) -> bool {
        let may_obey = |state: &HostState| matches!(state, HostState::Syncing { .. } | HostState::Synced);
        let mut others = self.states.iter().filter(|(host, _)| **host != self.own);
        !self.elsewhere.is_empty() && !others.any(|(_, state)| may_obey(state))
    }

    /// # Errors
    /// Nobody would obey what an operator wants, and what is to be done about it.
    pub(crate) fn check_obedience(&self) -> Result<(), String> {
        if let Some((host, reason)) = self.turned_away.first_key_value() {
            return Err(format!("host {host} turns this service away: {reason}"));
        }
        if self.is_obeyed_by_none() {
            let others = self.elsewhere.iter().map(|(host, controller)| format!("{host} obeys {controller}"));
            let others: Vec<_> = others.collect();
            let mend = "one host is the controller, the same in the service.toml of all";
            return Err(format!("no other host obeys this one: {}; {mend}", others.join(", ")));
        }
        Ok(())
    }

    /// Until when hosts are waited for.
    pub(crate) fn waits_until(&self, now: Instant) -> Option<Instant> {
        let until = |state: &HostState| match state {
            HostState::Away => Some(self.grace_until),
            HostState::Syncing { until } => Some(*until),
            HostState::Synced | HostState::Elsewhere => None,
        };
        self.states.values().filter_map(until).filter(|until| *until > now).max()
    }
}
