//! Operation time-outs (watchdog): how long operations may wait, and when to look whether one has
//! waited for longer.

use std::time::{Duration, Instant};

/// See the module's documentation.
pub(crate) struct OperationDeadline {
    /// For ever, if there is none.
    timeout: Option<Duration>,
    look_at: Option<Instant>,
}

impl OperationDeadline {
    pub(crate) fn new(timeout: Option<Duration>) -> Self {
        OperationDeadline { timeout, look_at: None }
    }

    /// When to look next.
    pub(crate) fn look_at(&self) -> Option<Instant> {
        self.look_at
    }

    /// Something has begun to wait then.
    pub(crate) fn expect_progress(&mut self, since: Instant) {
        if let Some(timeout) = self.timeout {
            let late = since + timeout;
            self.look_at = Some(self.look_at.map_or(late, |at| at.min(late)));
        }
    }

    /// The time that operations have, if it is time to look.
    pub(crate) fn due(&self, now: Instant) -> Option<Duration> {
        self.timeout.filter(|_| self.look_at.is_some_and(|at| at <= now))
    }

    /// These have been waiting since then: the next look is when the first of them that is not late now will be.
    pub(crate) fn looked(&mut self, waiting_since: impl Iterator<Item = Instant>, now: Instant) {
        let timeout = self.timeout.unwrap_or_default();
        self.look_at = waiting_since.map(|since| since + timeout).filter(|at| *at > now).min();
    }
}

/// When something last happened in a communicator.
pub(crate) struct LastProgress(Instant);

impl LastProgress {
    pub(crate) fn at(at: Instant) -> Self {
        LastProgress(at)
    }

    /// Something has happened then.
    pub(crate) fn note(&mut self, at: Instant) {
        self.0 = self.0.max(at);
    }

    /// Nothing could happen for so long.
    pub(crate) fn put_off(&mut self, by: Duration) {
        self.0 += by;
    }

    /// Since then nothing has.
    pub(crate) fn since(&self) -> Instant {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_look_is_when_the_first_will_have_waited_for_too_long() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut deadline = OperationDeadline::new(Some(Duration::from_secs(10)));
        assert_eq!((deadline.look_at(), deadline.due(at(100))), (None, None));
        deadline.expect_progress(at(5));
        deadline.expect_progress(at(3));
        assert_eq!(deadline.look_at(), Some(at(13)));
        assert_eq!((deadline.due(at(12)), deadline.due(at(13))), (None, Some(Duration::from_secs(10))));
        deadline.looked([at(3), at(5), at(9)].into_iter(), at(13));
        assert_eq!(deadline.look_at(), Some(at(15)));
        let mut never = OperationDeadline::new(None);
        never.expect_progress(at(0));
        assert_eq!((never.look_at(), never.due(at(1 << 30))), (None, None));
    }
}
