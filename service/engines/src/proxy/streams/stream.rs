//! A stream: operations start in the order in which the tenant enqueued them.
//!
//! ```text
//! queue:  [ head group: started together | later operations, not started ]
//!           active entries, `pending` of them unfinished
//! ```
//!
//! An operation on its own is a group of one. The stream's word rises when the whole head group has ended. Operations of a
//! semaphore-ordered stream start when their GPU has come to them, too (`semaphores.rs`).
//!
//! Operations that *overlap* are groups of one that start though those of the same communicator before them have not ended: their GPU
//! raises the semaphore when their buffers are ready. The word rises in their order, whichever ends first.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use mccs_ipc::types::Handle;
use mccs_tenants::session::Session;

use crate::proxy::calls::operation::Operation;
use crate::proxy::calls::running::OVERLAPPING_MAX;
use crate::proxy::streams::semaphores::StreamSemaphore;

/// One operation in its stream.
pub(crate) struct Entry {
    pub(crate) ticket: u64,
    pub(crate) called_at: Instant,
    pub(crate) group_continues: bool,
    /// Communicator of an operation that overlaps with others.
    pub(crate) overlaps: Option<Handle>,
    pub(crate) task: Task,
}

/// The start of an entry.
pub(crate) enum Task {
    /// The rank's operation number `seq` of `comm` has arrived; the communicator holds the operation itself.
    Collective { comm: Handle, rank: u32, seq: u64 },
    /// Anything else, with the operation.
    Own(Box<Operation>),
    /// Started: nothing left to do but wait.
    Started,
    /// Ended, while another of its group, or one that it overlaps with, has not.
    Ended,
}

/// When an operation came to the head of its stream.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    /// When it could have, with nobody else's work before it: deadlines count from then.
    pub(crate) due: Instant,
    /// When its turn came.
    pub(crate) at: Instant,
}

/// An operation that starts.
pub(crate) struct Head {
    pub(crate) ticket: u64,
    pub(crate) task: Task,
    pub(crate) arrival: Arrival,
}

/// A stream of a session.
pub(crate) struct Stream {
    pub(crate) session: Arc<Session>,
    pub(crate) handle: Handle,
    queue: VecDeque<Entry>,
    active: usize,
    pending: usize,
    group_closed: bool,
    /// When its last group ended.
    ended_at: Option<Instant>,
    /// The last communicator whose end this stream was told of, after its rank had left it.
    told: Handle,
    /// Semaphore by which a GPU tells its progress.
    semaphore: Option<StreamSemaphore>,
    /// Whether the semaphore is being looked at.
    is_watched: bool,
}

impl Stream {
    pub(crate) fn new(session: Arc<Session>, handle: Handle) -> Self {
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
    pub(crate) fn ordered(session: Arc<Session>, handle: Handle, semaphore: StreamSemaphore) -> Self {
        Stream { semaphore: Some(semaphore), ..Stream::new(session, handle) }
    }

    pub(crate) fn push(&mut self, entry: Entry) {
        self.queue.push_back(entry);
    }

    /// Whether the stream has not been told yet that `comm` is gone: one message for all operations that fail with it.
    pub(crate) fn is_news(&mut self, comm: Handle) -> bool {
        std::mem::replace(&mut self.told, comm) != comm
    }

    /// The next operation to start, if the head group lets one start now.
    pub(crate) fn start_next(&mut self, now: Instant) -> Option<Head> {
        self.next()?;
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

    /// Whether operations have not started.
    pub(crate) fn has_next(&self) -> bool {
        self.queue.len() > self.active
    }

    /// The next operation, where no other has to end before.
    fn next(&self) -> Option<&Entry> {
        let next = self.queue.get(self.active)?;
        let first = self.queue.front().filter(|_| self.group_closed);
        let overlaps = |first: &Entry| first.overlaps.is_some() && first.overlaps == next.overlaps;
        let is_free = first.is_none_or(|first| overlaps(first) && self.active < OVERLAPPING_MAX);
        is_free.then_some(next)
    }

    /// Whether the next operation waits for its GPU, and for nothing else.
    pub(crate) fn is_held_back(&self) -> bool {
        let next = self.next();
        next.zip(self.semaphore.as_ref()).is_some_and(|(entry, semaphore)| !semaphore.is_raised(entry.ticket))
    }

    /// Whether there is a next operation for which the semaphore has to be looked at. That it was low a moment ago does not count:
    /// it may have been raised since, and nobody would tell.
    pub(crate) fn may_be_held_back(&self) -> bool {
        self.semaphore.is_some() && self.next().is_some()
    }

    /// Lets a GPU through that waits for an operation of a session that has ended.
    pub(crate) fn release(&self) {
        self.semaphore.iter().for_each(StreamSemaphore::release);
    }

    /// Notes whether the semaphore is being looked at. Returns whether that is news.
    pub(crate) fn note_watched(&mut self, is_watched: bool) -> bool {
        std::mem::replace(&mut self.is_watched, is_watched) != is_watched
    }

    /// An operation that has started.
    fn started_mut(&mut self, ticket: u64) -> Option<&mut Entry> {
        let first = self.queue.front()?.ticket;
        // Numbers have no gaps, unless another engine has some of the stream's operations.
        let guess = usize::try_from(ticket.checked_sub(first)?).ok()?;
        let is_it = |at: &usize| self.queue.get(*at).is_some_and(|entry| entry.ticket == ticket);
        let at = Some(guess).filter(is_it).or_else(|| self.queue.iter().position(|entry| entry.ticket == ticket))?;
        self.queue.get_mut(at).filter(|_| at < self.active)
    }

    /// Operations that have ended, of which the tenant was not told.
    pub(crate) fn untold(&self) -> impl Iterator<Item = u64> {
        let ended = |entry: &&Entry| matches!(entry.task, Task::Ended);
        self.queue.iter().take(self.active).filter(ended).map(|entry| entry.ticket)
    }

    /// A started operation has ended. Returns whether the stream may go on to its next group.
    pub(crate) fn finish_one(&mut self, ticket: u64, now: Instant) -> bool {
        debug_assert!(self.pending > 0, "more operations ended than started");
        self.pending -= 1;
        if let Some(entry) = self.started_mut(ticket) {
            entry.task = Task::Ended;
        }
        let count = if self.queue.front().is_some_and(|first| first.overlaps.is_some()) {
            self.queue.iter().take_while(|entry| matches!(entry.task, Task::Ended)).count()
        } else if self.group_closed && self.pending == 0 {
            self.active
        } else {
            0
        };
        if count == 0 {
            return false;
        }
        let last = self.queue.drain(..count).next_back().map_or(0, |entry| entry.ticket);
        self.active -= count;
        self.group_closed = self.active > 0;
        self.ended_at = Some(now);
        let raise = || self.semaphore.iter().for_each(|semaphore| semaphore.end(last));
        self.session.end_operations(self.handle.index, last, count as u64, raise);
        true
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mccs_tenants::{Quota, Tenant, testing};

    use super::*;

    #[test]
    fn an_operation_is_due_when_it_was_called_and_the_one_before_it_has_ended() {
        let session = testing::session(1, &Tenant::new("a".into(), Quota::least()));
        let mut stream = Stream::new(session, Handle { index: 0, generation: 1 });
        let t = Instant::now();
        let after = |seconds| t + Duration::from_secs(seconds);
        for (ticket, called) in [(1, 0), (2, 1), (3, 90)] {
            let (called_at, group_continues) = (after(called), false);
            stream.push(Entry { ticket, called_at, group_continues, overlaps: None, task: Task::Started });
        }
        let mut due = |turn, ended| {
            let head = stream.start_next(after(turn)).expect("nothing runs before it");
            assert!(stream.finish_one(head.ticket, after(ended)));
            head.arrival.due.duration_since(t).as_secs()
        };
        assert_eq!([due(5, 50), due(60, 61), due(99, 100)], [0, 50, 90]);
    }

    #[test]
    fn what_overlaps_starts_beside_its_like_and_ends_are_told_in_order() {
        let session = testing::session(1, &Tenant::new("a".into(), Quota::least()));
        let mut stream = Stream::new(Arc::clone(&session), Handle { index: 0, generation: 1 });
        let (now, comm) = (Instant::now(), |index| Some(Handle { index, generation: 1 }));
        // Two communicators, and one that does not overlap.
        for (ticket, overlaps) in (1..).zip([comm(1), comm(1), comm(1), comm(2), None, comm(1)]) {
            let (called_at, group_continues, task) = (now, false, Task::Started);
            stream.push(Entry { ticket, called_at, group_continues, overlaps, task });
        }
        let start = |stream: &mut Stream| -> Vec<u64> {
            std::iter::from_fn(|| stream.start_next(now)).map(|head| head.ticket).collect()
        };
        assert_eq!(start(&mut stream), [1, 2, 3]);
        assert!(!stream.finish_one(3, now) && !stream.finish_one(2, now));
        assert_eq!((start(&mut stream), session.last_ended(0)), (vec![], 0));
        assert!(stream.finish_one(1, now));
        assert_eq!((start(&mut stream), session.last_ended(0)), (vec![4], 3));
        assert!(stream.finish_one(4, now));
        assert_eq!(start(&mut stream), [5], "what does not overlap has nothing beside it");
        assert!(stream.finish_one(5, now));
        assert_eq!((start(&mut stream), session.last_ended(0)), (vec![6], 5));
        assert!(stream.finish_one(6, now));
        assert_eq!(session.last_ended(0), 6);
    }

    #[test]
    fn no_more_overlap_than_may() {
        let session = testing::session(1, &Tenant::new("a".into(), Quota::least()));
        let mut stream = Stream::new(Arc::clone(&session), Handle { index: 0, generation: 1 });
        let (now, overlaps) = (Instant::now(), Some(Handle { index: 1, generation: 1 }));
        let count = 2 * OVERLAPPING_MAX as u64;
        (1..=count).for_each(|ticket| {
            stream.push(Entry { ticket, called_at: now, group_continues: false, overlaps, task: Task::Started });
        });
        let started = |stream: &mut Stream| std::iter::from_fn(|| stream.start_next(now)).count();
        assert_eq!(started(&mut stream), OVERLAPPING_MAX);
        assert!(stream.finish_one(1, now));
        assert_eq!(started(&mut stream), 1);
        assert!(!stream.finish_one(5, now));
        assert_eq!(started(&mut stream), 0);
    }
}
