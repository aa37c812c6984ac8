//! Counts of a GPU communicator's collectives and messages at the last look, from which progress is
//! seen.

use std::time::Instant;

use mccs_device::{OperationCounts, Seen};

/// Large operations, as the service itself counts them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LargeCounts {
    pub(crate) operations: OperationCounts,
    /// Whether the next waits for hardware queues; if so, whether all ranks have come to it.
    pub(crate) in_queue: Option<bool>,
}

/// How far GPUs are: operations and groups of sends and receives by rank; and large operations.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counts {
    pub(crate) seen: Seen,
    pub(crate) large: LargeCounts,
}

impl Counts {
    fn all(&self) -> impl Iterator<Item = OperationCounts> {
        self.seen.operations.iter().chain(&self.seen.groups).chain([&self.large.operations]).copied()
    }

    /// Ends: whoever only calls more is as stuck as before.
    pub(crate) fn ended(&self) -> impl Iterator<Item = u64> {
        self.all().map(|counts| counts.ended)
    }

    /// Whether something has begun and not ended, as far as was counted.
    pub(crate) fn are_open(&self) -> bool {
        self.all().any(OperationCounts::are_open)
    }
}

/// Counts of the last look. Operations in graphs were never launched here, and nobody waits for them.
#[derive(Debug, Default)]
pub(crate) struct LastCounts {
    seen: Seen,
    large: LargeWatch,
}

/// Large operations: how far they are is the service's own word, and nothing that ranks say keeps them from being late.
#[derive(Debug, Default)]
struct LargeWatch {
    last: LargeCounts,
    /// When the next could have begun, as far as looks tell.
    since: Option<Instant>,
}

impl LargeWatch {
    /// Returns since when an operation has been waiting for its ranks, if one has.
    fn look(&mut self, large: LargeCounts, now: Instant) -> Option<Instant> {
        let LargeCounts { operations, in_queue } = large;
        let is_others_fault = in_queue == Some(true);
        if operations.begun == operations.ended || operations.ended != self.last.operations.ended || is_others_fault {
            self.since = None;
        }
        self.last = large;
        (operations.are_open() && !is_others_fault).then(|| *self.since.get_or_insert(now))
    }
}

impl LastCounts {
    /// Whether large operations have ended, of which so many have now, after the last look.
    pub(crate) fn has_ended(&self, ended: u64) -> bool {
        ended != self.large.last.operations.ended
    }

    /// Looks at large operations. Returns since when one has been waiting for its ranks, if one has.
    pub(crate) fn look_at_large(&mut self, large: LargeCounts, now: Instant) -> Option<Instant> {
        self.large.look(large, now)
    }

    /// Looks at operations and groups. Returns whether there are others than at the last look.
    pub(crate) fn note_seen(&mut self, seen: Seen) -> bool {
        std::mem::replace(&mut self.seen, seen) != seen
    }

    /// All of it, as of the last look.
    pub(crate) fn last(&self) -> Counts {
        Counts { seen: self.seen, large: self.large.last }
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
        let mut look = |begun, ended, in_queue, now| {
            watch.look(LargeCounts { operations: OperationCounts { begun, ended }, in_queue }, now)
        };
        assert_eq!(look(0, 0, None, at(0)), None);
        assert_eq!(look(1, 0, None, at(1)), Some(at(1)));
        // Calls do not make it look alive, but an end does.
        assert_eq!(look(5, 0, None, at(2)), Some(at(1)));
        assert_eq!(look(5, 1, None, at(3)), Some(at(3)));
        // Others have the queues.
        assert_eq!(look(5, 1, Some(true), at(4)), None);
        assert_eq!(look(5, 1, None, at(5)), Some(at(5)), "its time begins with its turn");
        // Its ranks have not come, wherever it is.
        assert_eq!(look(5, 1, Some(false), at(6)), Some(at(5)));
        assert_eq!(look(5, 5, None, at(7)), None);
        assert_eq!(look(6, 5, None, at(8)), Some(at(8)));
    }
}
