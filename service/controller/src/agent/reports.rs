//! Reports of an agent: communicators whose root is here, as they are when there is room to tell
//! it.

use std::time::{Duration, Instant};

use super::{Agent, AgentOutput, Live};
use crate::messages::message::{AgentMessage, Report};
use crate::pace::PERIOD_MAX;
use mccs_model::CommId;
use mccs_policy::Profile;
use mccs_telemetry::placed::Chosen;
use mccs_telemetry::profile::Measured;

/// Last report of a communicator.
pub(super) struct Known {
    pub(super) report: Report,
    pub(super) profile: Option<Measured>,
    /// The profile in the report.
    pub(super) told: Option<Measured>,
}

/// On the common clock, which shows `common_ns` now; `None` where it sends so seldom that nobody could take turns with it.
pub(super) fn profile_of(measured: Measured, now: Instant, common_ns: u64) -> Option<Profile> {
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let period_ns = ns(measured.period).max(1);
    (measured.period <= PERIOD_MAX).then_some(Profile {
        period_ns,
        busy_ns: ns(measured.busy).min(period_ns),
        phase_ns: common_ns.saturating_sub(ns(now.saturating_duration_since(measured.began))),
    })
}

impl Agent {
    /// The next thing to report; asked for when there is room to tell it.
    pub fn next_report(&mut self) -> Option<AgentMessage> {
        self.life?;
        match self.untold.pop_first() {
            Some(comm) => Some(self.report_on(comm)),
            None => self.synced.take(),
        }
    }

    /// Whether there is something to report.
    #[must_use]
    pub fn has_reports(&self) -> bool {
        self.life.is_some() && (!self.untold.is_empty() || self.synced.is_some())
    }

    pub(super) fn report_on(&self, comm: CommId) -> AgentMessage {
        match self.known.get(&comm) {
            Some(known) => AgentMessage::Report(Box::new(known.report.clone())),
            None => AgentMessage::Gone { comm },
        }
    }

    /// Something that was to be told is lost: there was no room. All is to be told anew, when the controller asks.
    pub fn fall_behind(&mut self) -> Option<AgentMessage> {
        self.life.take().map(|_| AgentMessage::Behind)
    }

    /// These are all communicators whose root is here now.
    pub fn look(&mut self, live: impl IntoIterator<Item = Live>, unix_ms: u64) {
        let mut gone = std::mem::take(&mut self.known);
        for Live { comm, number, tenant, hosts, chosen, profile, is_pinned, began } in live {
            let before = gone.remove(&comm);
            let is_same = |report: &Report| (report.chosen.epoch, report.is_pinned) == (chosen.epoch, is_pinned);
            let is_news = !before.as_ref().is_some_and(|before| is_same(&before.report));
            let known = match before {
                Some(before) if !is_news => Known { profile, ..before },
                Some(Known { report, told, .. }) => {
                    Known { report: Report { chosen: Chosen::clone(&chosen), is_pinned, ..report }, profile, told }
                }
                None => {
                    let (comm, chosen, began_ms) = (comm.clone(), Chosen::clone(&chosen), unix_ms);
                    let report = Report {
                        comm,
                        number,
                        tenant,
                        hosts,
                        began_ms,
                        arrival: None,
                        chosen,
                        profile: None,
                        is_pinned,
                        began,
                    };
                    Known { report, profile, told: None }
                }
            };
            if is_news && self.life.is_some() {
                self.untold.insert(comm.clone());
            }
            self.known.insert(comm, known);
        }
        if self.life.is_some() {
            self.untold.extend(gone.into_keys());
        }
    }

    /// All is reported to a life of the controller, from the start.
    pub(super) fn begin_reports(&mut self, life: u64, with_profiles: bool, now: Instant) -> Vec<AgentOutput> {
        if self.life != Some(life) {
            self.clock.forget();
            self.forgot_clock_at.get_or_insert(now);
        }
        (self.life, self.newest_life) = (Some(life), life);
        self.paces.values_mut().flat_map(|paced| &mut paced.wants).for_each(|wants| wants.told = None);
        self.rates.forget();
        self.with_profiles = with_profiles;
        // They are of another clock, or not wanted.
        self.known.values_mut().for_each(|known| (known.report.profile, known.told) = (None, None));
        // Communicators that have ended and were not told yet are told besides: the same life may not
        // have forgotten them.
        self.untold.extend(self.known.keys().cloned());
        self.synced = Some(AgentMessage::Synced { life, is_paced: !self.paces.is_empty() });
        let dead = self.dead_paths.iter().cloned();
        let dead = dead.map(|(peer, path)| AgentMessage::Path { peer, path, answers: false });
        let kept = self.said.messages().map(|links| AgentMessage::Kept { links });
        let acts = std::mem::take(&mut self.acts).into_iter().map(|act| AgentMessage::Acted(Box::new(act)));
        [self.has()].into_iter().chain(dead).chain(kept).chain(acts).map(AgentOutput::Tell).collect()
    }
}
