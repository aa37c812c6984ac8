//! Rate limit of log lines that tenants and strangers cause.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Lines that no [`LogBudget`] of this process had room for.
static LINES_SUPPRESSED: AtomicU64 = AtomicU64::new(0);

/// How many lines were not written, of all that tenants and strangers have caused in this process.
#[must_use]
pub fn lines_suppressed() -> u64 {
    LINES_SUPPRESSED.load(Ordering::Relaxed)
}

/// So many were not written by the process before.
pub fn resume_lines_suppressed(lines: u64) {
    LINES_SUPPRESSED.fetch_add(lines, Ordering::Relaxed);
}

/// Bounds how many lines something that tenants cause can write.
#[derive(Debug)]
pub struct LogBudget {
    lines: u32,
    filled_at: Option<Instant>,
    suppressed: u64,
}

/// Lines of a [`LogBudget`] in a burst, and in each [`LOG_PERIOD`] after it.
const LOG_LINES: u32 = 20;
/// See [`LOG_LINES`].
const LOG_PERIOD: Duration = Duration::from_secs(10);

impl Default for LogBudget {
    fn default() -> Self {
        Self::new()
    }
}

impl LogBudget {
    /// A whole budget.
    #[must_use]
    pub const fn new() -> Self {
        LogBudget { lines: LOG_LINES, filled_at: None, suppressed: 0 }
    }

    /// Takes a line, if one is left. Returns how many were not written since the last one.
    pub fn take(&mut self, now: Instant) -> Option<u64> {
        if self.filled_at.is_none_or(|at| now.duration_since(at) >= LOG_PERIOD) {
            (self.lines, self.filled_at) = (LOG_LINES, Some(now));
        }
        match self.lines.checked_sub(1) {
            Some(left) => {
                self.lines = left;
                Some(std::mem::take(&mut self.suppressed))
            }
            None => {
                self.suppressed += 1;
                LINES_SUPPRESSED.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_lines_is_cut_and_counted() {
        let (mut budget, start) = (LogBudget::default(), Instant::now());
        let written = (0..100).filter(|_| budget.take(start).is_some()).count();
        assert_eq!(written, LOG_LINES as usize);
        assert_eq!(budget.take(start + LOG_PERIOD), Some(100 - u64::from(LOG_LINES)));
        assert_eq!(budget.take(start + LOG_PERIOD), Some(0));
    }
}
