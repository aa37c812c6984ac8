//! When the controller decides again: at once after hosts, operators or files, after a pause where
//! tenants are the cause.
//!
//! ```text
//! because, because_of_tenants, want_allotment --> take_due: decide --> take_to_order: tell paces, place orders
//! ```
//!
//! The scheduler knows causes and times. Deciding is the controller's ([`crate::state`]).

use std::time::{Duration, Instant};

/// For so many communicators all are decided for at once whenever one of them begins, ends or sends otherwise. For each one more, a pause:
/// several times as long as the decision takes, so that tenants who make and end things all the time do not keep the controller from all else.
const DECIDED_AT_ONCE: usize = 64;
const PAUSE_FOR_EACH: Duration = Duration::from_millis(1);

/// Rates are allotted anew at most so often when tenants want more or less of them.
const ALLOT_EVERY: Duration = Duration::from_millis(500);

/// See the module's documentation.
pub(crate) struct DecisionScheduler {
    /// Why everything is to be decided again.
    cause: Option<String>,
    /// It is of tenants alone, for whom a pause is made ([`PAUSE_FOR_EACH`]).
    is_of_tenants: bool,
    /// When it was decided last, and why.
    decided_at: Option<Instant>,
    last_cause: String,
    /// When rates are allotted anew for what flows want, and when they were last.
    allot_at: Option<Instant>,
    allotted_at: Instant,
    is_to_order: bool,
    /// Hosts may not have been told how flows are to leave them.
    is_to_pace: bool,
}

impl DecisionScheduler {
    pub(crate) fn new(now: Instant) -> Self {
        DecisionScheduler {
            cause: None,
            is_of_tenants: false,
            decided_at: None,
            last_cause: String::new(),
            allot_at: None,
            allotted_at: now,
            is_to_order: false,
            is_to_pace: false,
        }
    }

    /// All is to be decided again, at once.
    pub(crate) fn because(&mut self, cause: String) {
        self.add_cause(cause);
        self.is_of_tenants = false;
    }

    /// All is to be decided again, when it may: tenants have done something.
    pub(crate) fn because_of_tenants(&mut self, cause: String) {
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

    /// Flows want other parts of what they are allotted.
    pub(crate) fn want_allotment(&mut self, communicators: usize, now: Instant) {
        let next = self.allotted_at + ALLOT_EVERY.max(pause(communicators));
        self.allot_at.get_or_insert(now.max(next));
    }

    /// Rates are allotted anew, if that is due.
    pub(crate) fn allot_if_due(&mut self, now: Instant) {
        if self.allot_at.is_some_and(|at| at <= now) {
            self.because("tenants want other parts of their shares".to_owned());
        }
    }

    /// Orders may be due.
    pub(crate) fn order(&mut self) {
        self.is_to_order = true;
    }

    /// Orders may be due, and paces that hosts have not been told.
    pub(crate) fn order_and_pace(&mut self) {
        (self.is_to_order, self.is_to_pace) = (true, true);
    }

    /// Whether all is to be decided now; whoever asks then does.
    pub(crate) fn take_due(&mut self, communicators: usize, now: Instant) -> bool {
        let is_due = self.decides_at(communicators).is_none_or(|at| at <= now);
        let Some(cause) = self.cause.take_if(|_| is_due) else { return false };
        self.last_cause = cause;
        (self.allot_at, self.allotted_at, self.decided_at) = (None, now, Some(now));
        true
    }

    /// Whether orders may be due; whoever asks then looks.
    pub(crate) fn take_to_order(&mut self) -> bool {
        std::mem::take(&mut self.is_to_order)
    }

    /// Whether paces may be due; whoever asks then looks.
    pub(crate) fn take_to_pace(&mut self) -> bool {
        std::mem::take(&mut self.is_to_pace)
    }

    /// Why it was decided last.
    pub(crate) fn last_cause(&self) -> &str {
        &self.last_cause
    }

    /// Whether something waits for hosts to report.
    pub(crate) fn has_work(&self) -> bool {
        self.cause.is_some() || self.is_to_order
    }

    /// When what tenants have done is decided for; `None` where something else, or nothing, is to be.
    fn decides_at(&self, communicators: usize) -> Option<Instant> {
        let at = self.decided_at.filter(|_| self.cause.is_some() && self.is_of_tenants);
        at.map(|at| at + pause(communicators))
    }

    /// When time alone makes a decision due.
    pub(crate) fn next_deadline(&self, communicators: usize) -> Option<Instant> {
        [self.allot_at, self.decides_at(communicators)].into_iter().flatten().min()
    }
}

/// How long decisions are apart that tenants make necessary.
fn pause(communicators: usize) -> Duration {
    PAUSE_FOR_EACH * communicators.saturating_sub(DECIDED_AT_ONCE) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_wait_for_a_pause_and_operators_do_not() {
        let now = Instant::now();
        let mut decisions = DecisionScheduler::new(now);
        let many = DECIDED_AT_ONCE + 10;
        decisions.because_of_tenants("a communicator began".into());
        assert!(decisions.take_due(many, now), "nothing was decided before");
        decisions.because_of_tenants("another began".into());
        assert!(!decisions.take_due(many, now) && decisions.has_work());
        let pause = 10 * PAUSE_FOR_EACH;
        assert_eq!(decisions.next_deadline(many), Some(now + pause));
        assert!(decisions.take_due(many, now + pause));
        decisions.because_of_tenants("a third began".into());
        decisions.because("a file has changed".into());
        assert!(decisions.take_due(many, now + pause), "an operator waits for nothing");
        assert_eq!(decisions.last_cause(), "a third began, and more");
        assert!(!decisions.take_due(many, now + pause) && !decisions.has_work());
    }

    #[test]
    fn rates_are_allotted_anew_once_for_all_that_want_it() {
        let now = Instant::now();
        let mut decisions = DecisionScheduler::new(now);
        decisions.want_allotment(1, now);
        decisions.want_allotment(1, now + ALLOT_EVERY / 2);
        assert_eq!(decisions.next_deadline(1), Some(now + ALLOT_EVERY));
        decisions.allot_if_due(now + ALLOT_EVERY / 2);
        assert!(!decisions.take_due(1, now + ALLOT_EVERY / 2), "not yet");
        decisions.allot_if_due(now + ALLOT_EVERY);
        assert!(decisions.take_due(1, now + ALLOT_EVERY));
        assert_eq!(decisions.next_deadline(1), None);
    }
}
