//! Sanity check of counters that tenants write in shared memory: only what can be true is summed.
//! Ranks say it of operations that they do among themselves.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use mccs_ipc::types::WorkDone;

use super::lock;

/// No collective among ranks takes less. The fastest that was measured takes some three times as long.
pub const COLLECTIVE_TIME_MIN: Duration = Duration::from_nanos(100);

/// Nor do a message's share of a group of sends and receives, and those of other ranks at the same time.
pub const MESSAGE_TIME_MIN: Duration = Duration::from_nanos(1);

/// The last counts.
#[derive(Debug)]
struct Told {
    at: Instant,
    operations: u64,
    bytes: u64,
}

/// Operations and their payload as a tenant says: they never fall, and rise no faster than is possible.
#[derive(Debug)]
pub struct CounterSanity {
    told: Mutex<Told>,
    time_min: Duration,
}

impl CounterSanity {
    /// None until `now`, and then none in less than `time_min`.
    #[must_use]
    pub fn since(now: Instant, time_min: Duration) -> Self {
        CounterSanity { told: Mutex::new(Told { at: now, operations: 0, bytes: 0 }), time_min }
    }

    /// The same, where so much was told before.
    #[must_use]
    pub fn resume(self, WorkDone { operations, bytes }: WorkDone) -> Self {
        let CounterSanity { told, time_min } = self;
        let at = lock(&told).at;
        CounterSanity { told: Mutex::new(Told { at, operations, bytes }), time_min }
    }

    /// Counts to tell at `now`, of operations that are said to be done, of at most `bytes_max` each.
    pub fn told(&self, now: Instant, said: WorkDone, bytes_max: u64) -> WorkDone {
        let WorkDone { operations, bytes } = said;
        let mut told = lock(&self.told);
        let time = now.saturating_duration_since(told.at);
        let possible = (time.as_nanos() / self.time_min.as_nanos()).try_into().unwrap_or(u64::MAX);
        // The rest of the time counts at the next look.
        told.at = told.at.max(now);
        told.operations = operations.clamp(told.operations, told.operations.saturating_add(possible));
        // A rank adds the bytes of an operation before it says that it has ended.
        let bytes_most = told.operations.saturating_add(1).saturating_mul(bytes_max).max(told.bytes);
        told.bytes = bytes.clamp(told.bytes, bytes_most);
        WorkDone { operations: told.operations, bytes: told.bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(operations: u64, bytes: u64) -> WorkDone {
        WorkDone { operations, bytes }
    }

    #[test]
    fn what_was_told_before_is_told_again_at_once() {
        let now = Instant::now();
        let sanity = CounterSanity::since(now, COLLECTIVE_TIME_MIN).resume(done(1000, 8000));
        assert_eq!(sanity.told(now, done(2000, 16_000), 8), done(1000, 8 * 1001));
    }

    #[test]
    fn what_is_said_is_told_as_far_as_it_can_be_true() {
        let begin = Instant::now();
        let (sanity, at) = (CounterSanity::since(begin, COLLECTIVE_TIME_MIN), |ms| begin + Duration::from_millis(ms));
        assert_eq!(sanity.told(at(1), done(1000, 8000), 8), done(1000, 8000));
        // One that ends everything at once: ten operations a microsecond, of at most so many bytes.
        assert_eq!(sanity.told(at(2), done(u64::MAX, u64::MAX), 8), done(11_000, 8 * 11_001));
        // Nothing falls, and who has told the truth again is believed as soon as it is more.
        assert_eq!(sanity.told(at(3), done(0, 0), 8), done(11_000, 8 * 11_001));
        assert_eq!(sanity.told(at(4), done(12_000, 96_000), 8), done(12_000, 96_000));
        assert_eq!(sanity.told(at(4), done(u64::MAX, 96_000), 8), done(12_000, 96_000), "no time, no operations");
    }
}
