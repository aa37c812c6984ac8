//! Agent's part in pacing: hands rate limits to engines, and reports what flows make of what they
//! are allotted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::reports::{Known, profile_of};
use super::{Agent, AgentOutput, PACE_KEPT_FOR};
use crate::messages::message::AgentMessage;
use crate::pace::HostPace;
use crate::pace::bursts::CommonBurst;
use mccs_model::CommId;
use mccs_telemetry::placed::{PaceTotals, PaceUse};
use mccs_telemetry::profile::Burst;

/// Times of an earlier life of the controller are kept so long until this one says what the time is: clocks drift apart meanwhile.
const CLOCK_ANEW_WITHIN: Duration = Duration::from_secs(5);
/// Engines are told anew when their times are wrong by more than this and more than the clock's own error.
const TIME_SLACK: Duration = Duration::from_micros(20);

/// Time over which flows' wants are measured.
const WANTS_OVER: Duration = Duration::from_secs(1);
/// Wants are told in so many parts of the allotment, and nothing below one: whoever begins again needs some.
const WANTS_PARTS: u64 = 4;

/// A pace that was told.
pub(super) struct Paced {
    pub(super) pace: HostPace,
    /// When its communicator was last here, or the pace was told.
    pub(super) seen: Instant,
    /// The last bursts of those for whom it makes room.
    pub(super) bursts: BTreeMap<CommId, CommonBurst>,
    /// When engines were told last, and what the common clock showed by what was known then.
    pub(super) told: Option<(Instant, u64)>,
    /// Engines were told all but its times: what the time is is not known, or not well enough.
    pub(super) is_told_without_times: bool,
    pub(super) wants: Option<PaceWatch>,
}

/// Flows' use of their allotments.
pub(super) struct PaceWatch {
    at: Instant,
    bits: u64,
    held: u64,
    /// As the controller was told, if it was: `None` for all there is.
    pub(super) told: Option<Option<u64>>,
    /// It was less at the last look.
    is_falling: bool,
}

impl PaceWatch {
    /// Looks again. Returns what to tell, if it is news.
    fn look(&mut self, bits: u64, held: u64, allotted_bps: u64, now: Instant) -> Option<Option<u64>> {
        let took = now.saturating_duration_since(self.at);
        let rate_bps = (bits.saturating_sub(self.bits) as f64 / took.as_secs_f64()) as u64;
        let parts = (rate_bps.saturating_mul(WANTS_PARTS)).div_ceil(allotted_bps.max(1)).max(1);
        let is_less = held == self.held && parts < WANTS_PARTS;
        let wants = is_less.then_some(allotted_bps / WANTS_PARTS * parts);
        (self.at, self.bits, self.held) = (now, bits, held);
        let most = |wants: Option<u64>| wants.unwrap_or(u64::MAX);
        let falls = self.told.is_some_and(|told| most(wants) < most(told));
        let is_news = self.told != Some(wants) && (!falls || self.is_falling);
        self.is_falling = falls && !is_news;
        is_news.then(|| *self.told.insert(wants))
    }
}

/// On the common clock, which shows `common_ns` now.
fn common_burst(burst: Burst, now: Instant, common_ns: u64) -> CommonBurst {
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let (ahead, ago) = (burst.begins.saturating_duration_since(now), now.saturating_duration_since(burst.begins));
    let begins_ns = common_ns.saturating_add(ns(ahead)).saturating_sub(ns(ago));
    CommonBurst { begins_ns, lasts_ns: ns(burst.lasts).max(1) }
}

impl Agent {
    /// Tells engines the paces of communicators that are `here` and do not know them yet, or know the time no more, and the controller
    /// when communicators send, and what they want; asks what the time is where that matters. Called when something was heard, communicators have changed, or
    /// [`Agent::next_deadline`] is over.
    pub fn pace(&mut self, here: &BTreeMap<CommId, Arc<PaceUse>>, now: Instant) -> Vec<AgentOutput> {
        for paced in self.paces.iter_mut().filter_map(|(comm, paced)| here.contains_key(comm).then_some(paced)) {
            paced.seen = now;
        }
        // Those that engines were told of have ended; the others may come yet.
        let is_late = |paced: &Paced| now.saturating_duration_since(paced.seen) >= PACE_KEPT_FOR;
        self.paces.retain(|comm, paced| here.contains_key(comm) || (paced.told.is_none() && !is_late(paced)));
        let mut outputs = self.look_at_wants(here, now);
        if self.life.is_some() && self.needs_time() {
            let asked = self.clock.ask(now).map(|question| AgentOutput::Tell(AgentMessage::AskTime { question }));
            outputs.extend(asked);
        }
        let time = self.clock.now(now);
        let is_forgotten =
            self.forgot_clock_at.is_some_and(|at| now.saturating_duration_since(at) >= CLOCK_ANEW_WITHIN);
        if let Some((common_ns, _)) = time.filter(|_| self.life.is_some() && self.with_profiles) {
            for (comm, known) in self.known.iter_mut().filter(|(_, known)| known.told != known.profile) {
                known.told = known.profile;
                known.report.profile = known.profile.and_then(|profile| profile_of(profile, now, common_ns));
                self.untold.insert(comm.clone());
            }
        }
        let watched = self.paces.iter().filter(|(_, paced)| paced.pace.is_watched);
        for (comm, pace_use) in watched.filter_map(|(comm, _)| Some((comm, here.get(comm)?))) {
            let burst =
                time.zip(pace_use.take_burst()).map(|((common_ns, _), burst)| common_burst(burst, now, common_ns));
            let message = burst.map(|burst| AgentMessage::Burst { comm: comm.clone(), burst });
            outputs.extend(message.filter(|_| self.life.is_some()).map(AgentOutput::Tell));
        }
        for (comm, paced) in self.paces.iter_mut().filter(|(comm, _)| here.contains_key(comm)) {
            here[comm].watch(paced.pace.is_watched);
            here[comm].allot(paced.pace.allotment());
            // An estimate that was wrong by too much begins anew when it is clearly better.
            let margin = if paced.is_told_without_times { 2 } else { 1 };
            let is_wrong = |error: Duration| paced.pace.clock_error_max().is_some_and(|most| error * margin > most);
            let due = match (paced.told, time) {
                (Some(_), _) if !paced.pace.is_timed() => None,
                (None, _) if !paced.pace.is_timed() => Some(0),
                (Some(_), None) if !is_forgotten => None,
                (_, time) if time.is_none_or(|(_, error)| is_wrong(error)) => {
                    // Caps and shares need no clock.
                    if !std::mem::replace(&mut paced.is_told_without_times, true) {
                        let pace = HostPace { window: None, yields: Vec::new(), ..paced.pace.clone() };
                        outputs.push(AgentOutput::Pace { comm: comm.clone(), pace: pace.here(now, 0, &paced.bursts) });
                    }
                    paced.told = None;
                    None
                }
                (None, Some((common_ns, _))) => Some(common_ns),
                (Some((at, told_ns)), Some((common_ns, error))) => {
                    let thought_ns = told_ns.saturating_add(now.saturating_duration_since(at).as_nanos() as u64);
                    let wrong = Duration::from_nanos(thought_ns.abs_diff(common_ns));
                    (wrong > error.max(TIME_SLACK)).then_some(common_ns)
                }
                (_, None) => unreachable!("taken above"),
            };
            if let Some(common_ns) = due {
                (paced.told, paced.is_told_without_times) = (Some((now, common_ns)), false);
                let pace = paced.pace.here(now, common_ns, &paced.bursts);
                outputs.push(AgentOutput::Pace { comm: comm.clone(), pace });
            }
        }
        outputs
    }

    fn look_at_wants(&mut self, here: &BTreeMap<CommId, Arc<PaceUse>>, now: Instant) -> Vec<AgentOutput> {
        if self.life.is_none() {
            return Vec::new();
        }
        let mut outputs = Vec::new();
        for (comm, paced) in &mut self.paces {
            let Some(pace_use) = here.get(comm).filter(|_| paced.pace.allotted_bps() > 0) else {
                paced.wants = None;
                continue;
            };
            match &mut paced.wants {
                None => {
                    let PaceTotals { bits, held } = pace_use.totals();
                    paced.wants = Some(PaceWatch { at: now, bits, held, told: None, is_falling: false });
                }
                Some(wants) if now.saturating_duration_since(wants.at) >= WANTS_OVER => {
                    let PaceTotals { bits, held } = pace_use.totals();
                    let news = wants.look(bits, held, paced.pace.allotted_bps(), now);
                    let news = news.map(|bps| AgentMessage::Wants { comm: comm.clone(), bps });
                    outputs.extend(news.map(AgentOutput::Tell));
                }
                Some(_) => {}
            }
        }
        outputs
    }

    /// Whether somebody records, and wants to know the time for that.
    pub fn want_time(&mut self, is_wanted: bool) {
        self.is_time_wanted = is_wanted;
    }

    fn needs_time(&self) -> bool {
        let has_news = |known: &Known| known.told != known.profile;
        self.is_time_wanted
            || self.paces.values().any(|paced| paced.pace.is_timed() || paced.pace.is_watched)
            || (self.with_profiles && self.known.values().any(has_news))
    }

    /// When [`Agent::pace`] is next due, if time alone makes it.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let question = self.clock.next_question().filter(|_| self.needs_time());
        let wants = self.paces.values().filter_map(|paced| Some(paced.wants.as_ref()?.at + WANTS_OVER));
        let with_times = self.paces.values().filter(|paced| paced.told.is_some());
        // A hair later, when it is wrong.
        let wrong_at = |paced: &Paced| Some(self.clock.holds_until(paced.pace.clock_error_max()?)? + TIME_SLACK);
        let is_timed = self.paces.values().any(|paced| paced.told.is_some() && paced.pace.is_timed());
        let forgotten = self.forgot_clock_at.filter(|_| is_timed).map(|at| at + CLOCK_ANEW_WITHIN);
        let while_obeyed = wants.chain(question).filter(|_| self.life.is_some());
        while_obeyed.chain(with_times.filter_map(wrong_at)).chain(forgotten).min()
    }

    /// Time of the common clock, and its possible error, if this host needs it and knows it.
    #[must_use]
    pub fn common_time(&self, now: Instant) -> Option<(u64, Duration)> {
        self.clock.now(now).filter(|_| self.needs_time())
    }
}
