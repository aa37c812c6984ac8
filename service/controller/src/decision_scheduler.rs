//! When all is decided again, and why: at once where a host, an operator or a file is the cause, after a pause where tenants are.
//!
//! [`Controller::settle`] does whatever inputs and time have made due, [`Controller::next_deadline`] says when time alone will have.

use std::time::{Duration, Instant};

use super::plan::plan_all;
use super::state::{Controller, Held};

/// For so many communicators all are decided for at once whenever one of them begins, ends or sends otherwise. For each one more, a pause:
/// several times as long as the decision takes, so that tenants who make and end things all the time do not keep the controller from all else.
const DECIDED_AT_ONCE: usize = 64;
const PAUSE_FOR_EACH: Duration = Duration::from_millis(1);

impl Controller {
    /// All is to be decided again, at once.
    pub(super) fn because(&mut self, cause: String) {
        self.add_cause(cause);
        self.is_of_tenants = false;
    }

    /// All is to be decided again, when it may: tenants have done something.
    pub(super) fn because_of_tenants(&mut self, cause: String) {
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
    pub(super) fn pause(&self) -> Duration {
        PAUSE_FOR_EACH * self.comms.len().saturating_sub(DECIDED_AT_ONCE) as u32
    }

    /// When what tenants have done is decided for; `None` where something else, or nothing, is to be.
    fn decides_at(&self) -> Option<Instant> {
        let at = self.decided_at.filter(|_| self.cause.is_some() && self.is_of_tenants);
        at.map(|at| at + self.pause())
    }

    /// Does what inputs and time have made due.
    pub fn settle(&mut self, now: Instant) {
        self.expire(now);
        if std::mem::take(&mut self.is_to_compare) {
            self.compare_hosts(now);
        }
        if self.rollout.is_none() && std::mem::take(&mut self.is_to_try_again) {
            self.try_files_again(now);
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
            if !self.finish_rollout(now) {
                break;
            }
        }
    }

    fn decide(&mut self) {
        let Some(config) = self.config.clone() else { return };
        // It may be another topology.
        let _ = self.links.set_found(self.dead_paths.links(&config));
        self.number_admissions();
        let plans = plan_all(&config, &self.links, &self.reports(), &self.wants);
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
        let has_work = self.cause.is_some() || self.is_to_order || self.rollout.is_some();
        let waits = self.waits_until(now).filter(|_| has_work);
        let orders = self.orders.values().map(|pending| pending.until);
        let decides = [self.allot_at, self.decides_at()].into_iter().flatten();
        let decides = decides.map(|at| self.waits_until(now).map_or(at, |until| until.max(at)));
        orders.chain(retries.filter(|at| *at > now)).chain(reports).chain(waits).chain(decides).min()
    }
}
