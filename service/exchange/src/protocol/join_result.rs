//! Refused set-ups (ranks contradict each other): kept, so that a rank that comes later is told the
//! same.
//!
//! Without it a late rank would begin a set-up of its own, and wait in it until its time is over for ranks that have been refused and
//! do not come again. A rank that was refused and does come again begins anew, and with that the result is forgotten.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use mccs_model::{CommKey, Failure};

/// Results that are kept; the oldest goes first. Ranks of one job come within seconds of each other.
const RESULTS_MAX: usize = 1024;

struct JoinResult {
    failure: Failure,
    /// Ranks that have heard it, or will.
    notified: BTreeSet<u32>,
    until: Instant,
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct JoinResults {
    by_key: BTreeMap<CommKey, JoinResult>,
    /// In the order in which they came; some are gone.
    order: VecDeque<CommKey>,
}

impl JoinResults {
    /// A set-up was refused, of which these ranks have come.
    pub(super) fn keep(&mut self, key: &CommKey, failure: Failure, notified: BTreeSet<u32>, until: Instant) {
        if self.order.len() >= RESULTS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_key.remove(&oldest);
        }
        self.order.retain(|known| known != key);
        self.order.push_back(key.clone());
        self.by_key.insert(key.clone(), JoinResult { failure, notified, until });
    }

    /// Message to ranks that join, if they are late for a set-up that was refused.
    pub(super) fn on(&mut self, key: &CommKey, ranks: &[u32], now: Instant) -> Option<Failure> {
        let result = self.by_key.get_mut(key)?;
        if result.until <= now || ranks.iter().any(|rank| result.notified.contains(rank)) {
            self.by_key.remove(key);
            return None;
        }
        result.notified.extend(ranks);
        Some(result.failure.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mccs_ipc::types::{ErrorClass, UniqueId};

    use super::*;
    use mccs_model::Name;

    #[test]
    fn they_are_few_and_do_not_last() {
        let (mut results, now) = (JoinResults::default(), Instant::now());
        let key = |number: u32| {
            let mut id = [0; 16];
            id[..4].copy_from_slice(&number.to_le_bytes());
            CommKey { tenant: Name::new("t").unwrap(), id: UniqueId(id) }
        };
        let failure = Failure::new(ErrorClass::InvalidArgument, "they disagree");
        let until = now + Duration::from_secs(1);
        for number in 0..=RESULTS_MAX as u32 {
            results.keep(&key(number), failure.clone(), BTreeSet::from([1]), until);
        }
        assert_eq!((results.by_key.len(), results.order.len()), (RESULTS_MAX, RESULTS_MAX));
        assert_eq!(results.on(&key(0), &[0], now), None, "the oldest");
        assert_eq!(results.on(&key(1), &[0, 2], now), Some(failure.clone()));
        assert_eq!(results.on(&key(1), &[2], now), None, "it has heard it, and comes again");
        assert_eq!(results.on(&key(1), &[3], now), None, "and that is a new beginning for all");
        assert_eq!(results.on(&key(2), &[0], until), None, "too long ago");
        results.keep(&key(3), failure, BTreeSet::new(), until);
        assert!(results.order.len() <= RESULTS_MAX);
    }
}
