//! Keepalive timer: when to look whether peers answer, while something is owed.

use std::time::{Duration, Instant};

/// How often flows that send and stay where they are are looked at for silent peers: a system call for each socket.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(500);

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Keepalive {
    /// When to look, while something is owed.
    at: Option<Instant>,
    /// Something may be owed since the last poll, which knows the time.
    is_wanted: bool,
    /// The shortest time in which a flow wants to be looked at.
    every: Duration,
}

impl Default for Keepalive {
    fn default() -> Self {
        Keepalive { at: None, is_wanted: false, every: LOOK_EVERY }
    }
}

impl Keepalive {
    /// Something may be owed.
    pub(super) fn want(&mut self) {
        self.is_wanted = true;
    }

    /// The same, if it is so.
    pub(super) fn want_if(&mut self, is_owed: bool) {
        self.is_wanted |= is_owed;
    }

    /// A flow wants to be looked at as often as this.
    pub(super) fn at_least_every(&mut self, every: Duration) {
        self.every = self.every.min(every);
    }

    /// A flow wants to be looked at then.
    pub(super) fn no_later_than(&mut self, at: Option<Instant>) {
        self.at = self.at.into_iter().chain(at).min();
    }

    /// Plans a look, if one is wanted.
    pub(super) fn plan(&mut self, now: Instant) {
        if std::mem::take(&mut self.is_wanted) {
            self.no_later_than(Some(now + self.every));
        }
    }

    /// Whether it is time to look. All flows say anew how often they want it.
    pub(super) fn take_due(&mut self, now: Instant) -> bool {
        let is_due = self.at.take_if(|at| *at <= now).is_some();
        if is_due {
            self.every = LOOK_EVERY;
        }
        is_due
    }

    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.at
    }
}
