//! A communicator at the controller: its report, its plan, the order under way, refusals and
//! back-off.
//!
//! ```text
//! reported --plan--> wanted --order--> ordered --done-------> as decided
//!                      ^                  |
//!                      +---- a pause -----+ refused
//! ```
//!
//! An order that is refused for what it asks for is not given again before something else has changed and a pause is over. One that is
//! refused for something of the communicator's own is given again when the pause is over.

use std::time::{Duration, Instant};

use crate::communicators::plan::Plan;
use crate::effects::decision_scheduler::DecisionScheduler;
use crate::messages::answer::Standing;
use crate::messages::message::Report;
use mccs_model::Whose;

/// Longer than hosts may take to agree.
pub const ORDER_TIME: Duration = Duration::from_secs(30);
/// Pause after a first refusal; it doubles with each that follows.
pub const PAUSE: Duration = Duration::from_secs(1);
/// Longest pause.
pub const PAUSE_MAX: Duration = Duration::from_secs(60);

/// An order that was not carried out.
struct Refusal {
    plan: Plan,
    epoch: u64,
    /// In the history; those that follow for the same have no other.
    entry: u64,
    reason: String,
    pause: Duration,
    until: Instant,
    /// It was for a strategy that is not in force any more: until when its host may take to report the one that is.
    reports_until: Option<Instant>,
    /// It may be otherwise by then.
    may_retry: bool,
}

impl Refusal {
    /// Whether it is of this plan, for a strategy with this number.
    fn is_of(&self, plan: &Plan, epoch: u64) -> bool {
        self.plan.is_same_strategy(plan) && self.epoch == epoch
    }
}

/// Why an order was not carried out.
pub(crate) struct Refused<'a> {
    pub(crate) plan: &'a Plan,
    /// The strategy that it would have replaced.
    pub(crate) epoch: u64,
    /// In the history.
    pub(crate) entry: u64,
    pub(crate) reason: &'a str,
    /// `None`: another strategy was in force meanwhile.
    pub(crate) whose: Option<Whose>,
}

/// See the module's documentation.
pub(crate) struct Communicator {
    report: Report,
    /// Or why it has none; `None` before there was a decision.
    plan: Option<Result<Plan, String>>,
    /// The order that is under way.
    order: Option<u64>,
    refusal: Option<Refusal>,
}

impl Communicator {
    pub(crate) fn new(report: Report) -> Self {
        Communicator { report, plan: None, order: None, refusal: None }
    }

    pub(crate) fn report(&self) -> &Report {
        &self.report
    }

    pub(crate) fn report_mut(&mut self) -> &mut Report {
        &mut self.report
    }

    /// Its plan, if it has a place in the network.
    pub(crate) fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()?.as_ref().ok()
    }

    /// Whether it was decided for.
    pub(crate) fn is_decided(&self) -> bool {
        self.plan.is_some()
    }

    pub(crate) fn order(&self) -> Option<u64> {
        self.order
    }

    /// Whether an order for it was refused, and nothing has come of it yet.
    pub(crate) fn is_refused(&self) -> bool {
        self.refusal.is_some()
    }

    /// Its host reports it again: all is decided anew where others are to make room for it, or it for them.
    pub(crate) fn reported(&mut self, report: Report, decisions: &mut DecisionScheduler) {
        let before = &self.report;
        let is_as_planned = self.plan().is_some_and(|plan| plan.rings == report.chosen.rings);
        // An operator who chose other rings by hand may have done so before it was pinned; others make room for pinned ones, wherever
        // they go.
        let has_other_rings = before.chosen.rings != report.chosen.rings && !is_as_planned;
        let is_by_hand = has_other_rings || (report.is_pinned && before.chosen != report.chosen);
        let sends_otherwise = before.profile != report.profile;
        let is_unpinned = before.is_pinned && !report.is_pinned;
        let comm = &report.comm;
        if is_unpinned {
            decisions.because(format!("communicator {comm} was unpinned"));
        } else if is_by_hand {
            decisions.because(format!("communicator {comm} was changed by hand"));
        } else if sends_otherwise {
            decisions.because_of_tenants(format!("communicator {comm} sends at other times"));
        }
        // It may not have heard yet of its place.
        self.report = Report { arrival: report.arrival.or(before.arrival), ..report };
    }

    /// It was decided for anew.
    pub(crate) fn decided(&mut self, plan: Result<Plan, String>) {
        self.plan = Some(plan);
        self.refusal.iter_mut().for_each(|refusal| refusal.may_retry = true);
    }

    /// It may be asked again at once.
    pub(crate) fn forgive(&mut self) {
        self.refusal = None;
    }

    /// Whether nothing more is to be asked of it at once: it is as decided, not to be changed, or has refused.
    pub(crate) fn is_settled(&self) -> bool {
        match &self.plan {
            _ if self.order.is_some() => false,
            None => false,
            Some(Err(_)) => true,
            Some(Ok(plan)) => {
                let epoch = self.report.chosen.epoch;
                // If its strategy is another one meanwhile, its host says which.
                let refuses = |refusal: &Refusal| refusal.is_of(plan, epoch) && refusal.reports_until.is_none();
                self.report.is_pinned
                    || plan.is_met_by(&self.report.chosen)
                    || self.refusal.as_ref().is_some_and(refuses)
            }
        }
    }

    /// The order that it wants now; and the entry of the history, if that was refused before.
    pub(crate) fn wanted(&mut self, now: Instant) -> Option<(&Plan, Option<u64>)> {
        let Some(Ok(plan)) = &self.plan else { return None };
        if self.order.is_some() {
            return None;
        }
        if self.report.is_pinned || plan.is_met_by(&self.report.chosen) {
            self.refusal = None;
            return None;
        }
        let refusal = self.refusal.as_ref().filter(|refusal| refusal.is_of(plan, self.report.chosen.epoch));
        if refusal.is_some_and(|refusal| !refusal.may_retry || refusal.until > now) {
            return None;
        }
        Some((plan, refusal.map(|refusal| refusal.entry)))
    }

    /// An order is under way.
    pub(crate) fn ordered(&mut self, order: u64) {
        self.order = Some(order);
    }

    /// Its order was carried out.
    pub(crate) fn done(&mut self) {
        (self.order, self.refusal) = (None, None);
    }

    /// Its order was not carried out.
    pub(crate) fn refused(&mut self, refused: &Refused<'_>, now: Instant) {
        self.order = None;
        let before = self.refusal.take().filter(|refusal| refusal.plan.is_same_strategy(refused.plan));
        let pause = before.map_or(PAUSE, |refusal| (refusal.pause * 2).min(PAUSE_MAX));
        self.refusal = Some(Refusal {
            plan: refused.plan.clone(),
            epoch: refused.epoch,
            entry: refused.entry,
            reason: refused.reason.to_owned(),
            pause,
            until: now + pause,
            reports_until: refused.whose.is_none().then(|| now + ORDER_TIME),
            may_retry: refused.whose == Some(Whose::Communicator),
        });
    }

    /// Why its order was refused, where its host has not reported in time the strategy that is in force instead.
    pub(crate) fn take_unreported(&mut self, now: Instant) -> Option<&str> {
        let refusal = self.refusal.as_mut()?;
        refusal.reports_until.take_if(|until| *until <= now)?;
        Some(&refusal.reason)
    }

    /// Whether the pause after a refusal is over.
    pub(crate) fn is_retry_due(&self, now: Instant) -> bool {
        self.refusal.as_ref().is_some_and(|refusal| refusal.may_retry && refusal.until <= now)
    }

    /// When time alone makes something of it due.
    pub(crate) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let refusal = self.refusal.as_ref()?;
        let retry = Some(refusal.until).filter(|until| refusal.may_retry && *until > now);
        retry.into_iter().chain(refusal.reports_until).min()
    }

    /// As an operator is shown it.
    pub(crate) fn standing(&self) -> Standing {
        match (&self.plan, &self.refusal) {
            _ if self.order.is_some() => Standing::Ordered,
            (None, _) => Standing::Undecided,
            (Some(Err(reason)), _) => Standing::Outside(reason.clone()),
            _ if self.report.is_pinned => Standing::Pinned,
            (Some(Ok(plan)), _) if plan.is_met_by(&self.report.chosen) => Standing::AsDecided,
            (_, Some(refusal)) => Standing::Refused(refusal.reason.clone()),
            (Some(Ok(_)), None) => Standing::Ordered,
        }
    }
}
