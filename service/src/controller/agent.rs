//! The agent of a host: tells the controller of communicators whose root is here, and carries out its orders.
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
//! Where a pace allots flows a rate, the controller is told what of it they want: at once when that is more than before, and when it
//! has been less for a while.
//!
//! Reports are made when there is room for them ([`Agent::next_report`]): what waits is which communicators are to be told of, each once, not
//! what they were. A queue that is full is emptied, and the controller asked to begin anew ([`Agent::fall_behind`]).
//!
//! It obeys the host alone that the configuration names, and says so to any other that asks it to report. Of that host it obeys the life
//! that has asked last, unless a newer one was there before, whatever has become of it: an old one that comes back has old policies.
//! An order for a strategy that is not the last one decided is stale, and harms nothing.
//!
//! Without I/O and clock: inputs in, outputs out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_config::change::StrategyChange;
use mccs_config::service::FlowPath;

use super::bursts::CommonBurst;
use super::clock::CommonClock;
use super::equipment::{Equipment, Interfaces};
use super::message::{AgentMessage, ControllerMessage, Order, Outcome, Report};
use super::pace::{HostPace, PERIOD_MAX};
use super::rates::RateWatch;
use super::said::SaidLinks;
use crate::engines::proxy::Refused;
use crate::engines::transport::pace::Pace;
use crate::exchange::protocol::{CommId, Name, Whose};
use crate::policy::Profile;
use crate::telemetry::LogBudget;
use crate::telemetry::flows::PathView;
use crate::telemetry::placed::{Began, Chosen, HostRanks, PaceUse};
use crate::telemetry::profile::{Burst, Measured};

/// Orders that are carried out at a time. A controller gives fewer.
const ORDERS_MAX: usize = 1024;
/// Paces that are kept. A controller tells one for each communicator that is here.
pub const PACES_MAX: usize = 1 << 16;
/// How long the pace of a communicator is kept that is not here: yet, as its hosts begin at different times, or any more.
pub const PACE_KEPT_FOR: Duration = Duration::from_secs(60);
/// Times of an earlier life of the controller are kept so long until this one says what the time is: clocks drift apart meanwhile.
const CLOCK_ANEW_WITHIN: Duration = Duration::from_secs(5);
/// Engines are told anew when their times are wrong by more than this and more than the clock's own error.
const TIME_SLACK: Duration = Duration::from_micros(20);

/// What flows want is measured over so long.
const WANTS_OVER: Duration = Duration::from_secs(1);
/// What they want is told in so many parts of what they may have, and nothing below one: whoever begins again needs some.
const WANTS_PARTS: u64 = 4;

/// A communicator whose root is here.
#[derive(Debug, Clone)]
pub struct Live {
    /// What all hosts call it.
    pub comm: CommId,
    /// Its number here.
    pub number: u64,
    /// Whose it is.
    pub tenant: String,
    /// Where its ranks are.
    pub hosts: Vec<HostRanks>,
    /// The strategy that was decided last.
    pub chosen: Arc<Chosen>,
    /// When it sends, by this host's clock.
    pub profile: Option<Measured>,
    /// Whether an operator wants its strategy to stay.
    pub is_pinned: bool,
    /// What of its first strategy comes back.
    pub began: Began,
}

/// What was told of a communicator.
struct Known {
    report: Report,
    profile: Option<Measured>,
    /// The profile in the report.
    told: Option<Measured>,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentOutput {
    /// Tell the controller.
    Tell(AgentMessage),
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
}

/// A pace that was told.
struct Paced {
    pace: HostPace,
    /// When its communicator was last here, or the pace was told.
    seen: Instant,
    /// The last bursts of those for whom it makes room.
    bursts: BTreeMap<CommId, CommonBurst>,
    /// When engines were told last, and what the common clock showed by what was known then.
    told: Option<(Instant, u64)>,
    /// Engines were told all but its times: what the time is is not known, or not well enough.
    is_told_without_times: bool,
    wants: Option<PaceWatch>,
}

/// What flows were seen to make of what they are allotted.
struct PaceWatch {
    at: Instant,
    bits: u64,
    held: u64,
    /// As the controller was told, if it was: `None` for all there is.
    told: Option<Option<u64>>,
    /// It was less at the last look.
    is_falling: bool,
}

impl PaceWatch {
    /// Looks again. Returns what to tell, if it is news.
    fn look(&mut self, (bits, held): (u64, u64), allotted_bps: u64, now: Instant) -> Option<Option<u64>> {
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

/// Whom the agent does not obey.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("host {from} orders, and the controller is {controller}")]
pub struct NotObeyed {
    /// Who ordered.
    pub from: Name,
    /// Who may.
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

/// See the module's documentation.
pub struct Agent {
    controller: Name,
    /// What this host has.
    equipment: Equipment,
    life: Option<u64>,
    /// The newest life that was obeyed.
    newest_life: u64,
    with_profiles: bool,
    known: BTreeMap<CommId, Known>,
    /// Communicators of which there is news for the controller; those that are not known have ended.
    untold: BTreeSet<CommId>,
    /// To be told when there is no more: everything was reported.
    synced: Option<AgentMessage>,
    carried: BTreeMap<u64, Carried>,
    next_question: u64,
    paces: BTreeMap<CommId, Paced>,
    clock: CommonClock,
    /// Whether somebody who records wants to know it.
    is_time_wanted: bool,
    /// When the clock of an earlier life was forgotten, until this one has told the time.
    forgot_clock_at: Option<Instant>,
    /// Paths that are dead, with the host to which they lead.
    dead_paths: Vec<(String, FlowPath)>,
    said: SaidLinks,
    rates: RateWatch,
    budget: LogBudget,
}

/// On the common clock, which shows `common_ns` now; `None` where it sends so seldom that nobody could take turns with it.
fn profile_of(measured: Measured, now: Instant, common_ns: u64) -> Option<Profile> {
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let period_ns = ns(measured.period).max(1);
    (measured.period <= PERIOD_MAX).then_some(Profile {
        period_ns,
        busy_ns: ns(measured.busy).min(period_ns),
        phase_ns: common_ns.saturating_sub(ns(now.saturating_duration_since(measured.began))),
    })
}

/// On the common clock, which shows `common_ns` now.
fn common_burst(burst: Burst, now: Instant, common_ns: u64) -> CommonBurst {
    let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let (ahead, ago) = (burst.begins.saturating_duration_since(now), now.saturating_duration_since(burst.begins));
    let begins_ns = common_ns.saturating_add(ns(ahead)).saturating_sub(ns(ago));
    CommonBurst { begins_ns, lasts_ns: ns(burst.lasts).max(1) }
}

impl Agent {
    /// Of a host that obeys `controller`.
    #[must_use]
    pub fn new(controller: Name) -> Self {
        Agent {
            controller,
            equipment: Equipment::default(),
            life: None,
            newest_life: 0,
            with_profiles: false,
            known: BTreeMap::new(),
            untold: BTreeSet::new(),
            synced: None,
            carried: BTreeMap::new(),
            next_question: 0,
            paces: BTreeMap::new(),
            clock: CommonClock::default(),
            is_time_wanted: false,
            forgot_clock_at: None,
            dead_paths: Vec::new(),
            said: SaidLinks::default(),
            rates: RateWatch::default(),
            budget: LogBudget::default(),
        }
    }

    /// The same, of a host that has this.
    #[must_use]
    pub fn with_equipment(self, equipment: Equipment) -> Self {
        Agent { equipment, ..self }
    }

    /// Which network interfaces the host has now, and which of them carry nothing. The controller is told where they are others.
    pub fn has_interfaces(&mut self, interfaces: Option<Interfaces>) -> Option<AgentOutput> {
        if self.equipment.interfaces == interfaces {
            return None;
        }
        self.equipment.interfaces = interfaces;
        self.life.map(|_| AgentOutput::Tell(self.has()))
    }

    fn has(&self) -> AgentMessage {
        AgentMessage::Has(Box::new(self.equipment.clone()))
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

    /// Whom it obeys.
    #[must_use]
    pub fn controller(&self) -> &Name {
        &self.controller
    }

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

    fn report_on(&self, comm: CommId) -> AgentMessage {
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
        if *from != self.controller {
            let has_asked = matches!(message, ControllerMessage::Sync { .. });
            return Err(NotObeyed { from: from.clone(), controller: self.controller.clone(), has_asked });
        }
        let tell = |message| vec![AgentOutput::Tell(message)];
        Ok(match message {
            ControllerMessage::Sync { life, .. } if life < self.newest_life => {
                tell(AgentMessage::Superseded { by: self.newest_life })
            }
            ControllerMessage::Sync { life, with_profiles } => self.begin_reports(life, with_profiles, now),
            ControllerMessage::Order(order) if self.life != Some(order.life) => match self.life {
                Some(by) => tell(AgentMessage::Superseded { by }),
                // It has not asked to be told: it has not heard yet that this host has forgotten it.
                None => Vec::new(),
            },
            ControllerMessage::Order(order) => vec![self.carry_out(*order)],
            ControllerMessage::TestLinks => vec![AgentOutput::TestLinks],
            ControllerMessage::Pace { life, comm, pace } if self.life == Some(life) => {
                if self.paces.len() >= PACES_MAX && !self.paces.contains_key(&comm) {
                    if let Some(suppressed) = self.budget.take(now) {
                        tracing::warn!(%comm, limit = PACES_MAX, suppressed, "no room for another pace: the communicator's flows keep to none");
                    }
                } else {
                    let before = self.paces.remove(&comm).map(|before| (before.wants, before.bursts));
                    let (wants, mut bursts) = before.unwrap_or_default();
                    let wants = wants.filter(|_| pace.allotted_bps() > 0);
                    bursts.retain(|comm, _| pace.yields.iter().any(|yields| yields.to == *comm));
                    self.paces.insert(
                        comm,
                        Paced { pace, seen: now, bursts, told: None, is_told_without_times: false, wants },
                    );
                }
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
            ControllerMessage::Pace { .. }
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

    /// All is reported to a life of the controller, from the start.
    fn begin_reports(&mut self, life: u64, with_profiles: bool, now: Instant) -> Vec<AgentOutput> {
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
        // What has ended and was not told yet is told besides: the same life may not have forgotten it.
        self.untold.extend(self.known.keys().cloned());
        self.synced = Some(AgentMessage::Synced { life, is_paced: !self.paces.is_empty() });
        let dead = self.dead_paths.iter().cloned();
        let dead = dead.map(|(peer, path)| AgentMessage::Path { peer, path, answers: false });
        let kept = self.said.messages().map(|links| AgentMessage::Kept { links });
        [self.has()].into_iter().chain(dead).chain(kept).map(AgentOutput::Tell).collect()
    }

    fn carry_out(&mut self, order: Order) -> AgentOutput {
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
    pub fn answered(&mut self, question: u64, made: Result<(u64, u64), Refused>) -> Vec<AgentOutput> {
        let Some(Carried { life, order, comm, expected_epoch }) = self.carried.remove(&question) else {
            return Vec::new();
        };
        let epoch = self.known.get(&comm).map_or(0, |known| known.report.chosen.epoch);
        let outcome = match made {
            Ok((epoch, cut)) => Outcome::Done { epoch, cut },
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
            // Who was wrong by too much begins anew where it is clearly better.
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
                    let (bits, held) = pace_use.totals();
                    paced.wants = Some(PaceWatch { at: now, bits, held, told: None, is_falling: false });
                }
                Some(wants) if now.saturating_duration_since(wants.at) >= WANTS_OVER => {
                    let news = wants.look(pace_use.totals(), paced.pace.allotted_bps(), now);
                    let news = news.map(|bps| AgentMessage::Wants { comm: comm.clone(), bps });
                    outputs.extend(news.map(AgentOutput::Tell));
                }
                Some(_) => {}
            }
        }
        outputs
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

    /// What the common clock shows, and by how much that may be wrong, where this host needs it and knows it.
    #[must_use]
    pub fn common_time(&self, now: Instant) -> Option<(u64, Duration)> {
        self.clock.now(now).filter(|_| self.needs_time())
    }

    /// A host is lost. A controller that comes back asks anew.
    pub fn lost(&mut self, host: &Name) {
        if *host == self.controller {
            self.life = None;
        }
    }
}
