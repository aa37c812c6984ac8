//! Emulated completion queues (CQ) and completion channels.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use crate::abi::{CompChannel, Cq, Wc};
use crate::served::Served;

/// Events in order, and a pipe that wakes whoever waits for them. An event whose object is destroyed is forgotten.
#[derive(Debug)]
pub(crate) struct Events<T> {
    queue: Mutex<VecDeque<T>>,
    reader: PipeReader,
    writer: PipeWriter,
}

impl<T> Events<T> {
    pub(crate) fn new() -> io::Result<Self> {
        let (reader, writer) = io::pipe()?;
        // Whoever tells never waits: a full pipe wakes its reader as well.
        // SAFETY: a descriptor of ours.
        unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        Ok(Events { queue: Mutex::default(), reader, writer })
    }

    /// Descriptor that programs wait at, and may have not block.
    pub(crate) fn fd(&self) -> c_int {
        self.reader.as_raw_fd()
    }

    fn queue(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn tell(&self, event: T) {
        self.queue().push_back(event);
        let _ = (&self.writer).write(&[1]);
    }

    /// The next event; waits for it, unless the descriptor does not block.
    pub(crate) fn next(&self) -> io::Result<T> {
        loop {
            (&self.reader).read_exact(&mut [0])?;
            if let Some(event) = self.queue().pop_front() {
                return Ok(event);
            }
        }
    }

    pub(crate) fn forget(&self, mut is_gone: impl FnMut(&T) -> bool) {
        self.queue().retain(|event| !is_gone(event));
    }
}

/// A completion channel, which programs see as its first field.
#[repr(C)]
pub(crate) struct Channel {
    pub abi: CompChannel,
    pub events: Events<Told>,
}

/// A queue that has completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Told(pub *mut Cq);
// SAFETY: forgotten before the queue is destroyed.
unsafe impl Send for Told {}

/// A completion queue, which programs see as its first field.
#[repr(C)]
pub(crate) struct CompletionQueue {
    pub abi: Cq,
    /// In the bell's page.
    pub place: u32,
    queue_pairs: RwLock<Vec<Arc<Served>>>,
    state: Mutex<Entries>,
    /// Outlives it; null: none.
    channel: *const Channel,
}

#[derive(Debug, Default)]
struct Entries {
    entries: VecDeque<Wc>,
    room: usize,
    is_armed: bool,
    has_overrun: bool,
}

impl CompletionQueue {
    pub(crate) fn new(abi: Cq, place: u32, room: usize, channel: *const Channel) -> Self {
        let queue_pairs = RwLock::default();
        CompletionQueue { abi, place, queue_pairs, state: Mutex::new(Entries { room, ..Entries::default() }), channel }
    }

    fn channel(&self) -> Option<&Channel> {
        // SAFETY: null, or a channel, which outlives its queues.
        unsafe { self.channel.as_ref() }
    }

    fn entries(&self) -> std::sync::MutexGuard<'_, Entries> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn push(&self, wc: Wc) {
        let mut state = self.entries();
        if state.entries.len() >= state.room {
            state.has_overrun = true;
            return;
        }
        state.entries.push_back(wc);
        if std::mem::take(&mut state.is_armed) {
            self.tell();
        }
    }

    fn tell(&self) {
        if let Some(channel) = self.channel() {
            channel.events.tell(Told((&raw const self.abi).cast_mut()));
        }
    }

    /// Has its channel forget it.
    pub(crate) fn leave_channel(&self) {
        let own = Told((&raw const self.abi).cast_mut());
        if let Some(channel) = self.channel() {
            channel.events.forget(|told| *told == own);
        }
    }

    /// Queue pairs that have their completions here.
    pub(crate) fn queue_pairs(&self) -> RwLockReadGuard<'_, Vec<Arc<Served>>> {
        self.queue_pairs.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has whoever looks here serve a queue pair.
    pub(crate) fn attach(&self, served: &Arc<Served>) {
        let mut queue_pairs = self.queue_pairs.write().unwrap_or_else(PoisonError::into_inner);
        if !queue_pairs.iter().any(|known| known.number == served.number) {
            queue_pairs.push(Arc::clone(served));
        }
    }

    /// Tells the channel of the next completion, once.
    pub(crate) fn arm(&self) {
        self.entries().is_armed = !self.channel.is_null();
    }

    /// Whether the program will sleep until it is told.
    pub(crate) fn is_armed(&self) -> bool {
        self.entries().is_armed
    }

    /// Takes completions. `None`: some had no room, and the queue is of no use.
    pub(crate) fn take(&self, mut into: impl FnMut(Wc), most: c_int) -> Option<c_int> {
        let mut state = self.entries();
        if state.has_overrun {
            return None;
        }
        let count = state.entries.len().min(usize::try_from(most).unwrap_or(0));
        state.entries.drain(..count).for_each(&mut into);
        Some(count as c_int)
    }

    /// Forgets a queue pair, and what it has left here.
    pub(crate) fn detach(&self, qp_num: u32) {
        self.queue_pairs.write().unwrap_or_else(PoisonError::into_inner).retain(|served| served.number != qp_num);
        self.entries().entries.retain(|wc| wc.qp_num != qp_num);
    }
}
