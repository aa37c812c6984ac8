//! Counts of a GPU communicator's collectives and messages at the last look, from which progress is
//! seen.

use std::time::Instant;

use mccs_device::Seen;

/// How far GPUs are: calls and what has ended, of operations and of groups of sends and receives, by rank; and of large operations.
#[derive(Debug, Clone, Default)]
pub(super) struct Counts {
    pub(super) operations: Seen,
    pub(super) groups: Seen,
    pub(super) large: (u64, u64),
    /// Whether the next large one waits for hardware queues; if so, whether all ranks have come to it.
    pub(super) in_queue: Option<bool>,
}

impl Counts {
    /// What has ended: whoever only calls more is as stuck as before.
    pub(super) fn ended(&self) -> impl Iterator<Item = u64> {
        self.operations.iter().chain(&self.groups).chain([&self.large]).map(|(_, ended)| *ended)
    }

    /// Whether something has begun and not ended, as far as was counted.
    pub(super) fn are_open(&self) -> bool {
        self.operations.iter().chain(&self.groups).chain([&self.large]).any(|(begun, ended)| begun > ended)
    }
}

/// What was known at the last look: operations launched and ended, by rank, and groups of sends and receives. Those in graphs were never launched here, and
/// nobody waits for them.
#[derive(Debug, Default)]
pub(super) struct LastCounts {
    seen: Seen,
    seen_groups: Seen,
    large: LargeWatch,
}

/// Large operations: how far they are is the service's own word, and nothing that ranks say keeps them from being late.
#[derive(Debug, Default)]
struct LargeWatch {
    begun: u64,
    ended: u64,
    /// Whether the next waits for hardware queues; if so, whether all ranks have come to it.
    in_queue: Option<bool>,
    /// When the next could have begun, as far as looks tell.
    since: Option<Instant>,
}

impl LargeWatch {
    /// Returns since when an operation has been waiting for its ranks, if one has.
    fn look(&mut self, begun: u64, ended: u64, in_queue: Option<bool>, now: Instant) -> Option<Instant> {
        let is_others_fault = in_queue == Some(true);
        if begun == ended || ended != self.ended || is_others_fault {
            self.since = None;
        }
        (self.begun, self.ended, self.in_queue) = (begun, ended, in_queue);
        (begun > ended && !is_others_fault).then(|| *self.since.get_or_insert(now))
    }
}

impl LastCounts {
    /// Whether large operations have ended, of which so many have now, after the last look.
    pub(super) fn has_ended(&self, ended: u64) -> bool {
        ended != self.large.ended
    }

    /// Looks at large operations: how many have begun and ended, and whether the next waits for hardware queues. Returns since when one has been
    /// waiting for its ranks, if one has.
    pub(super) fn look_at_large(
        &mut self,
        begun: u64,
        ended: u64,
        in_queue: Option<bool>,
        now: Instant,
    ) -> Option<Instant> {
        self.large.look(begun, ended, in_queue, now)
    }

    /// Looks at operations and groups. Returns whether there are others than at the last look.
    pub(super) fn note_seen(&mut self, seen: Seen, groups: Seen) -> bool {
        let is_news = (seen, groups) != (self.seen, self.seen_groups);
        (self.seen, self.seen_groups) = (seen, groups);
        is_news
    }

    /// All of it, as of the last look.
    pub(super) fn last(&self) -> Counts {
        let LargeWatch { begun, ended, in_queue, .. } = self.large;
        Counts { operations: self.seen, groups: self.seen_groups, large: (begun, ended), in_queue }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn large_operations_are_late_by_what_has_ended_and_not_while_they_wait_for_queues() {
        let (mut watch, begin) = (LargeWatch::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(watch.look(0, 0, None, at(0)), None);
        assert_eq!(watch.look(1, 0, None, at(1)), Some(at(1)));
        // Calls do not make it look alive, but an end does.
        assert_eq!(watch.look(5, 0, None, at(2)), Some(at(1)));
        assert_eq!(watch.look(5, 1, None, at(3)), Some(at(3)));
        // Others have the queues.
        assert_eq!(watch.look(5, 1, Some(true), at(4)), None);
        assert_eq!(watch.look(5, 1, None, at(5)), Some(at(5)), "its time begins with its turn");
        // Its ranks have not come, wherever it is.
        assert_eq!(watch.look(5, 1, Some(false), at(6)), Some(at(5)));
        assert_eq!(watch.look(5, 5, None, at(7)), None);
        assert_eq!(watch.look(6, 5, None, at(8)), Some(at(8)));
    }
}
