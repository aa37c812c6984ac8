//! Limits how often the library looks for freed buffers when callers make calls in loops.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Lets one caller through in each interval. Any thread may ask.
pub(super) struct RateLimit {
    began: Instant,
    interval: Duration,
    /// When the next caller is let through, since `began`.
    next_ns: AtomicU64,
}

impl RateLimit {
    /// The first caller is let through at once.
    pub(super) fn new(interval: Duration) -> Self {
        RateLimit { began: Instant::now(), interval, next_ns: AtomicU64::new(0) }
    }

    /// Whether the caller is let through.
    pub(super) fn admits(&self) -> bool {
        self.admits_at(self.began.elapsed())
    }

    fn admits_at(&self, now: Duration) -> bool {
        let (now_ns, next_ns) = (now.as_nanos() as u64, self.next_ns.load(Ordering::Relaxed));
        let then_ns = now_ns.saturating_add(self.interval.as_nanos() as u64);
        now_ns >= next_ns
            && self.next_ns.compare_exchange(next_ns, then_ns, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_caller_an_interval_is_let_through() {
        let limit = RateLimit::new(Duration::from_millis(1));
        let admitted =
            [0, 1, 999, 1000, 1001, 1999, 5000, 5999, 6000].map(|us| limit.admits_at(Duration::from_micros(us)));
        assert_eq!(admitted, [true, false, false, true, false, false, true, false, true]);
    }
}
