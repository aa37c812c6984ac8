//! A tenant's connections at a socket: so many a second become sessions, and who comes meanwhile waits for its turn.
//!
//! ```text
//!             at once, within the rate
//! connected -------------------------------------> a session is made
//!     |                                                  ^
//!     +--> waits in the service: WAITING_MAX ---in turn--+
//!     |
//!     +--> is told to try again, once those are so many
//! ```
//!
//! Nobody waits for another tenant's. Without I/O and clock: `acceptor.rs` has both.

use std::collections::VecDeque;
use std::time::Instant;

use mccs_tenants::TokenBucket;

/// Connections of a tenant that are taken as they come, and those that follow a second. Making and ending a session takes some 200 us of the
/// service: who connects without end would keep a core from everybody else. Jobs are far below.
const CONNECTS_AT_ONCE: u32 = 256;
pub(super) const CONNECTS_PER_S: u32 = 100;
/// Connections of a tenant that wait for their turn, where those of others on the same socket pass them. More are refused: with those that are
/// taken at once they are more processes than hosts have cores.
const WAITING_MAX: usize = 256;

/// Connections of one tenant, in the order in which they came.
#[derive(Debug)]
pub(super) struct Arrivals<C> {
    rate: TokenBucket,
    waiting: VecDeque<C>,
}

impl<C> Default for Arrivals<C> {
    fn default() -> Self {
        Arrivals { rate: TokenBucket::new(CONNECTS_AT_ONCE, CONNECTS_PER_S), waiting: VecDeque::new() }
    }
}

impl<C> Arrivals<C> {
    /// A connection has come. Returns it if it is its turn at once.
    pub(super) fn arrive(&mut self, connection: C, now: Instant) -> Option<C> {
        if self.waiting.is_empty() && self.rate.take(now) {
            return Some(connection);
        }
        self.waiting.push_back(connection);
        None
    }

    /// The one that has waited longest, if its turn has come.
    pub(super) fn take(&mut self, now: Instant) -> Option<C> {
        if self.waiting.is_empty() || !self.rate.take(now) { None } else { self.waiting.pop_front() }
    }

    /// Whether one that is not to be taken may be told so now.
    pub(super) fn may_refuse(&self, now: Instant) -> bool {
        self.rate.has_token(now)
    }

    /// One has been told so.
    pub(super) fn note_refusal(&mut self, now: Instant) {
        self.rate.take(now);
    }

    /// When the turn of one that waits comes.
    pub(super) fn next_at(&self) -> Option<Instant> {
        if self.waiting.is_empty() { None } else { self.rate.next_at() }
    }

    /// Those that wait.
    pub(super) fn waiting(&self) -> impl Iterator<Item = &C> {
        self.waiting.iter()
    }

    /// Takes out those that wait and need not any more.
    pub(super) fn take_out(&mut self, is_gone: impl Fn(&C) -> bool) -> Vec<C> {
        let (gone, waiting): (Vec<_>, Vec<_>) = self.waiting.drain(..).partition(is_gone);
        self.waiting = waiting.into();
        gone
    }

    /// Whether further ones are to be refused.
    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() >= WAITING_MAX
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_waits_is_taken_in_the_order_of_arrival_and_nobody_overtakes() {
        let (mut arrivals, began) = (Arrivals::default(), Instant::now());
        // In which another connection is taken.
        let turn = Duration::from_secs(1) / CONNECTS_PER_S;
        let at_once = (0..CONNECTS_AT_ONCE).filter_map(|number| arrivals.arrive(number, began));
        assert!(at_once.eq(0..CONNECTS_AT_ONCE));
        assert_eq!(arrivals.next_at(), None, "nobody waits");
        for number in 0..WAITING_MAX {
            assert!(!arrivals.is_full(), "{number} wait");
            assert_eq!(arrivals.arrive(1000 + number as u32, began), None);
        }
        assert!(arrivals.is_full());
        assert_eq!((arrivals.take(began + turn / 2), arrivals.next_at()), (None, Some(began + turn)));
        assert_eq!(arrivals.take(began + turn), Some(1000));
        assert!(!arrivals.is_full());
        // It is time for one: the one that has waited longest.
        assert_eq!(arrivals.arrive(2000, began + 2 * turn), None);
        assert_eq!(arrivals.take(began + 2 * turn), Some(1001));
        let later = began + 1000 * turn;
        let rest = std::iter::from_fn(|| arrivals.take(later)).collect::<Vec<_>>();
        assert_eq!((rest.len(), rest[0], rest.last()), (WAITING_MAX - 1, 1002, Some(&2000)));
        assert_eq!(arrivals.arrive(3000, later), Some(3000), "nobody waits any more");
    }
}
