//! Completion queues and their channels.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::RawFd;
use std::sync::Mutex;

use crate::abi::{Cq, Wc};

/// A completion queue, which programs see as its first field.
#[repr(C)]
pub(crate) struct CompletionQueue {
    pub abi: Cq,
    state: Mutex<Entries>,
    /// Where its channel is told; -1: nowhere.
    pub told_at: RawFd,
}

#[derive(Debug, Default)]
struct Entries {
    entries: VecDeque<Wc>,
    room: usize,
    is_armed: bool,
    has_overrun: bool,
}

impl CompletionQueue {
    pub(crate) fn new(abi: Cq, room: usize, told_at: RawFd) -> Self {
        CompletionQueue { abi, state: Mutex::new(Entries { room, ..Entries::default() }), told_at }
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
        let own = (&raw const self.abi) as u64;
        // SAFETY: a pipe of ours, eight bytes; a full pipe wakes its reader as well.
        unsafe { libc::write(self.told_at, own.to_ne_bytes().as_ptr().cast(), 8) };
    }

    /// Tells the channel of the next completion, once.
    pub(crate) fn arm(&self) {
        self.entries().is_armed = self.told_at >= 0;
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

    /// Forgets what a queue pair has left here.
    pub(crate) fn forget(&self, qp_num: u32) {
        self.entries().entries.retain(|wc| wc.qp_num != qp_num);
    }
}
