//! Time slice of a runtime's thread ([`mccs_ipc::time_slice`]).
//!
//! ```text
//!           works for 250 us on end
//! own, short -------------------------> long
//!      ^                                 |
//!      +------- finds nothing to do -----+   back at once if it goes on shortly after
//! ```
//!
//! A runtime that works on end moves bulk: with a long slice it lets everybody by who wakes, such as a tenant that calls or waits. Its part
//! of the core stays the same. A runtime that finds nothing to do is one that others wait for. It has a short slice where cores are
//! contended, and otherwise that which it began with.

use std::time::{Duration, Instant};

use mccs_ipc::contention;
use mccs_ipc::time_slice::{SHORT, ThreadSlice};

/// Work on end from which a runtime moves bulk, and the pause after which it does so no more.
const BULK_AFTER: Duration = Duration::from_micros(250);
const PAUSE: Duration = Duration::from_millis(2);
/// Longer than the kernel's own slices, which are 3 ms at most. While others compute, too, a thread waits about so long for its next turn.
const BULK_SLICE: Duration = Duration::from_millis(10);

/// When a runtime moves bulk.
#[derive(Default)]
struct Streak {
    began: Option<Instant>,
    /// The end of the last one, if that was long.
    bulk_ended: Option<Instant>,
}

impl Streak {
    /// A round that was busy. Returns whether it is one of many.
    fn busy(&mut self, now: Instant) -> bool {
        let began = *self.began.get_or_insert(now);
        let is_long = now.saturating_duration_since(began) >= BULK_AFTER;
        is_long || self.bulk_ended.is_some_and(|ended| now.saturating_duration_since(ended) < PAUSE)
    }

    /// A round that found nothing.
    fn idle(&mut self, now: Instant) {
        if let Some(began) = self.began.take() {
            self.bulk_ended = (now.saturating_duration_since(began) >= BULK_AFTER).then_some(now);
        }
    }
}

/// The slice of the thread that made it.
pub(super) struct TimeSlice {
    streak: Streak,
    slice: ThreadSlice,
    /// None for the thread's own.
    asked: Option<Duration>,
}

impl TimeSlice {
    /// The slice of this thread.
    pub(super) fn of_this_thread() -> Self {
        TimeSlice { streak: Streak::default(), slice: ThreadSlice::of_this_thread(), asked: None }
    }

    /// After a round that was busy.
    pub(super) fn busy(&mut self, now: Instant) {
        if self.streak.busy(now) {
            self.ask(Some(BULK_SLICE));
        }
    }

    /// After a round that found nothing, before the thread yields or sleeps: who yields pays with the rest of its slice.
    pub(super) fn idle(&mut self, now: Instant) {
        self.streak.idle(now);
        self.ask(contention::is_contended(now).then_some(SHORT));
    }

    /// The thread was away for so long while it yielded, `own` being how many threads work with each other.
    pub(super) fn was_away(&self, away: Duration, own: impl FnOnce() -> u32) {
        contention::note_lost_core(away, self.asked == Some(SHORT), own);
    }

    fn ask(&mut self, slice: Option<Duration>) {
        if self.asked != slice {
            self.asked = slice;
            self.slice.ask(slice);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_works_on_end_moves_bulk_and_a_short_pause_does_not_change_that() {
        let (began, mut streak) = (Instant::now(), Streak::default());
        let at = |us| began + Duration::from_micros(us);
        assert!(!streak.busy(at(0)) && !streak.busy(at(240)));
        streak.idle(at(245));
        assert!(!streak.busy(at(250)) && !streak.busy(at(490)), "two short ones are no long one");
        assert!(streak.busy(at(500)));
        streak.idle(at(3_000));
        streak.idle(at(3_010));
        assert!(streak.busy(at(4_990)), "it goes on");
        streak.idle(at(5_100));
        assert!(!streak.busy(at(5_110)), "that was short");
        assert!(streak.busy(at(5_400)));
        streak.idle(at(6_000));
        assert!(!streak.busy(at(8_000)), "the pause was long");
    }
}
