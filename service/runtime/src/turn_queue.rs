//! Queue in turns of tenants on one thread: a tenant's first item waits for no more than a turn of each other one, however many
//! those have left.
//!
//! An item is a turn of a tenant of weight 1. For items that are bounded where they are worked on: flows, set-ups, requests.

use std::collections::VecDeque;
use std::fmt;

use super::turns::{QUANTUM_NS, Share, Turns};

/// See the module's documentation.
pub struct TurnQueue<T> {
    turns: Turns<VecDeque<T>>,
    len: usize,
}

impl<T> Default for TurnQueue<T> {
    fn default() -> Self {
        TurnQueue { turns: Turns::default(), len: 0 }
    }
}

impl<T> fmt::Debug for TurnQueue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TurnQueue").field("len", &self.len).finish_non_exhaustive()
    }
}

impl<T> TurnQueue<T> {
    /// Room for so many items of a tenant: pushing them allocates nothing.
    pub fn reserve(&mut self, share: Share, items: usize) {
        let queue = self.turns.open(share);
        queue.reserve(items.saturating_sub(queue.len()));
    }

    /// Leaves an item, behind the others of its tenant.
    pub fn push(&mut self, share: Share, item: T) {
        self.turns.enter(share).push_back(item);
        self.len += 1;
    }

    /// The next item, of the tenant whose turn it is.
    pub fn pop(&mut self) -> Option<T> {
        let (_, queue) = self.turns.turn()?;
        let item = queue.pop_front()?;
        self.len -= 1;
        self.turns.spend(QUANTUM_NS as u64);
        if self.turns.has_ended_turn() {
            self.turns.leave();
        }
        Some(item)
    }

    /// Items of all tenants.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes all away.
    pub fn clear(&mut self) {
        while self.pop().is_some() {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(tenant: u32, weight: u32) -> Share {
        Share { tenant, weight }
    }

    #[test]
    fn a_first_item_waits_for_one_turn_of_each_other_tenant_and_not_for_all_that_they_have_left() {
        let mut queue = TurnQueue::default();
        for item in 0..1000 {
            queue.push(share(1, 1), (1, item));
            queue.push(share(2, 1), (2, item));
        }
        (0..100).for_each(|_| assert!(queue.pop().is_some()));
        queue.push(share(3, 1), (3, 0));
        let before = std::iter::from_fn(|| queue.pop()).take_while(|(tenant, _)| *tenant != 3).count();
        assert!(before <= 2, "{before} items of two others came before");
        assert_eq!(queue.len(), 2000 - 100 - before);
    }

    #[test]
    fn items_of_a_tenant_stay_in_order_and_weights_are_kept() {
        let mut queue = TurnQueue::default();
        for item in 0..300 {
            queue.push(share(7, 3), (7, item));
            queue.push(share(5, 1), (5, item));
        }
        let taken: Vec<(u32, i32)> = (0..200).filter_map(|_| queue.pop()).collect();
        let of = |tenant| taken.iter().filter(|(of, _)| *of == tenant).map(|(_, item)| *item).collect::<Vec<_>>();
        assert!(of(7).is_sorted() && of(5).is_sorted());
        assert!(of(7).len().abs_diff(150) <= 3, "{} of 200 where 3 of 4 are its", of(7).len());
    }

    #[test]
    fn it_is_empty_when_all_was_taken_and_goes_on_then() {
        let mut queue = TurnQueue::default();
        queue.reserve(share(1, 1), 8);
        assert!(queue.is_empty() && queue.pop().is_none());
        queue.push(share(1, 1), 'a');
        assert_eq!((queue.pop(), queue.pop(), queue.len()), (Some('a'), None, 0));
        queue.push(share(1, 1), 'b');
        queue.push(share(2, 1), 'c');
        queue.clear();
        assert!(queue.is_empty() && queue.pop().is_none());
        queue.push(share(2, 1), 'd');
        assert_eq!(queue.pop(), Some('d'));
    }
}
