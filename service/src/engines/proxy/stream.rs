//! Streams: operations start in the order in which the tenant enqueued them.
//!
//! ```text
//! queue:  [ head group: started together | later operations, not started ]
//!           active entries, `pending` of them unfinished
//! ```
//!
//! An operation on its own is a group of one. The stream's word rises when the whole head group has ended.

use std::collections::VecDeque;
use std::sync::Arc;

use mccs_ipc::types::Handle;

use super::operation::Operation;
use crate::session::Session;

/// One operation in its stream.
pub(super) struct Entry {
    pub(super) ticket: u64,
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

/// A stream of a session.
pub(super) struct Stream {
    pub(super) session: Arc<Session>,
    pub(super) handle: Handle,
    queue: VecDeque<Entry>,
    active: usize,
    pending: usize,
    group_closed: bool,
    /// The last communicator whose end this stream was told of, after its rank had left it.
    told: Handle,
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
            told: Handle::NONE,
        }
    }

    pub(super) fn push(&mut self, entry: Entry) {
        self.queue.push_back(entry);
    }

    /// Whether the stream has not been told yet that `comm` is gone: one message for all operations that fail with it.
    pub(super) fn is_news(&mut self, comm: Handle) -> bool {
        std::mem::replace(&mut self.told, comm) != comm
    }

    /// The next operation to start, if the head group lets one start now.
    pub(super) fn start_next(&mut self) -> Option<(u64, Task)> {
        if self.group_closed {
            return None;
        }
        let entry = self.queue.get_mut(self.active)?;
        self.active += 1;
        self.pending += 1;
        self.group_closed = !entry.group_continues;
        Some((entry.ticket, std::mem::replace(&mut entry.task, Task::Started)))
    }

    /// One started operation has ended. Returns whether the stream may go on to its next group.
    pub(super) fn finish_one(&mut self) -> bool {
        debug_assert!(self.pending > 0, "more operations ended than started");
        self.pending -= 1;
        if self.pending > 0 || !self.group_closed {
            return false;
        }
        let count = self.active;
        let last = self.queue.drain(..count).next_back().map_or(0, |entry| entry.ticket);
        self.active = 0;
        self.group_closed = false;
        self.session.end_operations(self.handle.index, last, count as u64);
        true
    }
}
