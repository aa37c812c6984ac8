//! Time slice that a runtime's thread asks the kernel's scheduler for (`sched_setattr`).
//!
//! ```text
//!       works for 250 us on end
//! short ------------------------> long
//!   ^                               |
//!   +----- finds nothing to do -----+   back at once if it goes on shortly after
//! ```
//!
//! A thread that wakes takes the core from one with a longer slice. A runtime that works on end moves bulk: with a long slice it lets
//! everybody by who wakes, such as a tenant that calls or waits. Its part of the core stays the same. A runtime that finds nothing to
//! do is one that others wait for, and has the slice back that it began with.
//!
//! Linux knows slices of a thread's own from 6.12 on. Earlier kernels take the request, and do nothing.

use std::time::{Duration, Instant};

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
    is_long: bool,
    /// None where the kernel does not say, or somebody has given the thread another policy: it stays as it is.
    own: Option<libc::sched_attr>,
}

impl TimeSlice {
    /// Of this thread.
    pub(super) fn of_this_thread() -> Self {
        let own = attributes().filter(|own| own.sched_policy == libc::SCHED_OTHER as u32);
        TimeSlice { streak: Streak::default(), is_long: false, own }
    }

    /// After a round that was busy.
    pub(super) fn busy(&mut self, now: Instant) {
        if self.streak.busy(now) && !self.is_long {
            self.set(true);
        }
    }

    /// After a round that found nothing, before the thread yields or sleeps: who yields pays with the rest of its slice.
    pub(super) fn idle(&mut self, now: Instant) {
        self.streak.idle(now);
        if self.is_long {
            self.set(false);
        }
    }

    fn set(&mut self, is_long: bool) {
        self.is_long = is_long;
        let Some(own) = self.own else { return };
        let sched_runtime = if is_long { BULK_SLICE.as_nanos() as u64 } else { own.sched_runtime };
        if !set_attributes(&libc::sched_attr { sched_runtime, ..own }) {
            // Where the operator's sandbox refuses it, once is enough.
            self.own = None;
        }
    }
}

/// Bytes that every kernel knows of the structure; what came later is about utilisation.
const ATTRIBUTES_BYTES: u32 = 48;

fn attributes() -> Option<libc::sched_attr> {
    let mut own = libc::sched_attr {
        size: ATTRIBUTES_BYTES,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the kernel writes at most as many bytes as it is told, which the structure has.
    let refused = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut own, ATTRIBUTES_BYTES, 0) };
    (refused == 0).then_some(own)
}

fn set_attributes(attributes: &libc::sched_attr) -> bool {
    // SAFETY: the kernel reads as many bytes as the structure says of itself, which `attributes` has had from the kernel.
    (unsafe { libc::syscall(libc::SYS_sched_setattr, 0, std::ptr::from_ref(attributes), 0) }) == 0
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

    #[test]
    fn a_thread_has_its_own_attributes_back_and_never_loses_its_policy() {
        let before = attributes().expect("the kernel says");
        let (mut slice, began) = (TimeSlice::of_this_thread(), Instant::now());
        slice.busy(began);
        slice.busy(began + BULK_AFTER);
        let long = attributes().expect("the kernel says");
        assert_eq!((long.sched_policy, long.sched_nice), (before.sched_policy, before.sched_nice));
        // Kernels before 6.12 have none to say.
        assert!([0, BULK_SLICE.as_nanos() as u64].contains(&long.sched_runtime), "{}", long.sched_runtime);
        assert!(slice.is_long && slice.own.is_some());
        slice.idle(began + 2 * BULK_AFTER);
        let after = attributes().expect("the kernel says");
        assert_eq!((after.sched_policy, after.sched_runtime), (before.sched_policy, before.sched_runtime));
    }
}
