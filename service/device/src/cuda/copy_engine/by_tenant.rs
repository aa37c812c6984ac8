//! Fair polling by tenant: each has a bounded number of looks in a round, whatever it has here.

use std::collections::VecDeque;

/// Results of a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Looked {
    /// Something has gone on.
    pub(super) has_moved: bool,
    /// There is nothing to look at any more.
    pub(super) is_over: bool,
}

/// See the module's documentation.
pub(super) struct ByTenant<T> {
    /// A tenant that has none left goes. The first of a queue is looked at next.
    queues: Vec<(u32, VecDeque<T>)>,
}

impl<T> Default for ByTenant<T> {
    fn default() -> Self {
        ByTenant { queues: Vec::new() }
    }
}

impl<T> ByTenant<T> {
    pub(super) fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.queues.iter().flat_map(|(_, queue)| queue)
    }

    /// The tenant's one that `is_it`, which is made if there is none.
    pub(super) fn entry(&mut self, tenant: u32, is_it: impl Fn(&T) -> bool, make: impl FnOnce() -> T) -> &mut T {
        let at = self.queues.iter().position(|(of, _)| *of == tenant).unwrap_or_else(|| {
            self.queues.push((tenant, VecDeque::new()));
            self.queues.len() - 1
        });
        let queue = &mut self.queues[at].1;
        let at = queue.iter().position(is_it).unwrap_or_else(|| {
            queue.push_back(make());
            queue.len() - 1
        });
        &mut queue[at]
    }

    /// Looks at so many of each tenant's at most, those that have waited longest first. Returns whether any has moved, or some are
    /// left to look at.
    pub(super) fn look(&mut self, at_a_time: usize, mut look: impl FnMut(&mut T) -> Looked) -> bool {
        let mut moved = false;
        for (_, queue) in &mut self.queues {
            moved |= queue.len() > at_a_time;
            for _ in 0..queue.len().min(at_a_time) {
                let Some(mut one) = queue.pop_front() else { break };
                let Looked { has_moved, is_over } = look(&mut one);
                moved |= has_moved;
                if !is_over {
                    queue.push_back(one);
                }
            }
        }
        self.queues.retain(|(_, queue)| !queue.is_empty());
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_with_many_has_as_many_looks_as_one_with_few_and_none_is_left_out() {
        let mut all = ByTenant::default();
        for number in 0..100 {
            all.entry(1, |one: &(u32, u32)| one.0 == number, || (number, 0));
        }
        all.entry(2, |one| one.0 == 1000, || (1000, 0));
        let mut round = || {
            let mut seen = Vec::new();
            let moved = all.look(4, |(number, looks)| {
                seen.push(*number);
                *looks += 1;
                Looked { has_moved: false, is_over: *number == 1000 && *looks == 25 || *number < 1000 && *looks == 2 }
            });
            (seen, moved)
        };
        for at in 0..25 {
            assert_eq!(round(), ((4 * at..4 * at + 4).chain([1000]).collect(), true), "some are left");
        }
        assert_eq!(round(), ((0..4).collect(), true), "who is over is looked at no more");
        (0..23).for_each(|_| drop(round()));
        assert_eq!(round(), ((96..100).collect(), false));
        assert!(all.is_empty() && all.iter().next().is_none());
    }

    #[test]
    fn what_is_there_is_not_made_again() {
        let mut all = ByTenant::default();
        for tenant in [1, 2, 1] {
            *all.entry(tenant, |_| true, || 0) += 1;
        }
        assert_eq!(all.iter().copied().collect::<Vec<_>>(), [2, 1]);
    }
}
