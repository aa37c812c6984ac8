//! Streams: operations start in the order in which the tenant enqueued them.
//!
//! ```text
//! queue:  [ head group: started together | later operations, not started ]
//!           active entries, `pending` of them unfinished
//! ```
//!
//! An operation on its own is a group of one. The stream's word rises when the whole head group has ended. Operations of a
//! semaphore-ordered stream start when their GPU has come to them, too (`semaphores.rs`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use mccs_ipc::types::Handle;
use mccs_tenants::session::Session;

use super::operation::Operation;
use super::semaphores::StreamSemaphore;

/// One operation in its stream.
pub(super) struct Entry {
    pub(super) ticket: u64,
    pub(super) called_at: Instant,
    pub(super) group_continues: bool,
    pub(super) task: Task,
}

/// What starting an entry means.
pub(super) enum Task {
    /// The rank's operation number `seq` of `comm` has arrived; the communicator holds the operation itself.
    Collective { comm: Handle, rank: u32, seq: u64 },
    /// Anything else, with the operation.
    Own(Box<Operation>),
    /// Started: nothing left to do but wait.
    Started,
}

/// When an operation came to the head of its stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrival {
    /// When it could have, with nobody else's work before it: deadlines count from then.
    pub(super) due: Instant,
    /// When its turn came.
    pub(super) at: Instant,
}

/// An operation that starts.
pub(super) struct Head {
    pub(super) ticket: u64,
    pub(super) task: Task,
    pub(super) arrival: Arrival,
}

/// A stream of a session.
pub(super) struct Stream {
    pub(super) session: Arc<Session>,
    pub(super) handle: Handle,
    queue: VecDeque<Entry>,
    active: usize,
    pending: usize,
    group_closed: bool,
    /// When its last group ended.
    ended_at: Option<Instant>,
    /// The last communicator whose end this stream was told of, after its rank had left it.
    told: Handle,
    /// Where a GPU says how far it has come.
    semaphore: Option<StreamSemaphore>,
    /// Whether the semaphore is being looked at.
    is_watched: bool,
}

impl Stream {
    pub(super) fn new(session: Arc<Session>, handle: Handle) -> Self {
        Stream {
            session,
            handle,
            queue: VecDeque::new(),
            active: 0,
            pending: 0,
            group_closed: false,
            ended_at: None,
            told: Handle::NONE,
            semaphore: None,
            is_watched: false,
        }
    }

    /// A stream whose operations wait for a GPU.
    pub(super) fn ordered(session: Arc<Session>, handle: Handle, semaphore: StreamSemaphore) -> Self {
        Stream { semaphore: Some(semaphore), ..Stream::new(session, handle) }
    }

    pub(super) fn push(&mut self, entry: Entry) {
        self.queue.push_back(entry);
    }

    /// Whether the stream has not been told yet that `comm` is gone: one message for all operations that fail with it.
    pub(super) fn is_news(&mut self, comm: Handle) -> bool {
        std::mem::replace(&mut self.told, comm) != comm
    }

    /// The next operation to start, if the head group lets one start now.
    pub(super) fn start_next(&mut self, now: Instant) -> Option<Head> {
        if self.group_closed {
            return None;
        }
        let entry = self.queue.get_mut(self.active)?;
        if self.semaphore.as_ref().is_some_and(|semaphore| !semaphore.is_raised(entry.ticket)) {
            return None;
        }
        self.active += 1;
        self.pending += 1;
        self.group_closed = !entry.group_continues;
        // When its semaphore was raised nobody knows.
        let due = if self.semaphore.is_some() {
            now
        } else {
            self.ended_at.map_or(entry.called_at, |at| at.max(entry.called_at))
        };
        let task = std::mem::replace(&mut entry.task, Task::Started);
        Some(Head { ticket: entry.ticket, task, arrival: Arrival { due, at: now } })
    }

    /// Whether the next operation waits for its GPU, and for nothing else.
    pub(super) fn is_held_back(&self) -> bool {
        let next = self.queue.get(self.active).filter(|_| !self.group_closed);
        next.zip(self.semaphore.as_ref()).is_some_and(|(entry, semaphore)| !semaphore.is_raised(entry.ticket))
    }

    /// Whether there is a next operation for which the semaphore has to be looked at. That it was low a moment ago does not count:
    /// it may have been raised since, and nobody would tell.
    pub(super) fn may_be_held_back(&self) -> bool {
        self.semaphore.is_some() && !self.group_closed && self.active < self.queue.len()
    }

    /// Notes whether the semaphore is being looked at. Returns whether that is news.
    pub(super) fn note_watched(&mut self, is_watched: bool) -> bool {
        std::mem::replace(&mut self.is_watched, is_watched) != is_watched
    }

    /// One started operation has ended. Returns whether the stream may go on to its next group.
    pub(super) fn finish_one(&mut self, now: Instant) -> bool {
        debug_assert!(self.pending > 0, "more operations ended than started");
        self.pending -= 1;
        if self.pending > 0 || !self.group_closed {
            return false;
        }
        let count = self.active;
        let last = self.queue.drain(..count).next_back().map_or(0, |entry| entry.ticket);
        self.active = 0;
        self.group_closed = false;
        self.ended_at = Some(now);
        let raise = || self.semaphore.iter().for_each(|semaphore| semaphore.end(last));
        self.session.end_operations(self.handle.index, last, count as u64, raise);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mccs_tenants::{Quota, Tenant};

    use super::*;

    #[test]
    fn an_operation_is_due_when_it_was_called_and_the_one_before_it_has_ended() {
        let session = Session::for_tests(1, &Tenant::new("a".into(), Quota::least()));
        let mut stream = Stream::new(session, Handle { index: 0, generation: 1 });
        let t = Instant::now();
        let after = |seconds| t + Duration::from_secs(seconds);
        for (ticket, called) in [(1, 0), (2, 1), (3, 90)] {
            let (called_at, group_continues) = (after(called), false);
            stream.push(Entry { ticket, called_at, group_continues, task: Task::Started });
        }
        let mut due = |turn, ended| {
            let head = stream.start_next(after(turn)).expect("nothing runs before it");
            assert!(stream.finish_one(after(ended)));
            head.arrival.due.duration_since(t).as_secs()
        };
        assert_eq!([due(5, 50), due(60, 61), due(99, 100)], [0, 50, 90]);
    }
}
