//! The server of an emulated queue pair: the program that posts or polls, or the device's thread.
//!
//! Whether there is something to do is known without the lock. A server that finds the lock taken waits for nobody, and looks
//! again soon.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use crate::files::Ring;
use crate::queue_pair::QueuePair;

#[derive(Debug)]
pub(crate) struct Served {
    pub number: u32,
    ring: Arc<Ring>,
    /// The ring's `rung` as it was before the last step.
    seen: AtomicU64,
    /// When it is to be served, whatever comes.
    next_ns: AtomicU64,
    /// Packets that have moved.
    moved: AtomicU64,
    queue_pair: Mutex<QueuePair>,
}

impl Served {
    pub(crate) fn new(ring: Arc<Ring>, queue_pair: QueuePair) -> Self {
        Served {
            number: queue_pair.number,
            ring,
            seen: AtomicU64::new(0),
            next_ns: AtomicU64::new(u64::MAX),
            moved: AtomicU64::new(0),
            queue_pair: Mutex::new(queue_pair),
        }
    }

    /// Whether something is to be done.
    pub(crate) fn is_due(&self, now_ns: u64) -> bool {
        self.is_rung() || self.next_ns() <= now_ns
    }

    /// Whether the peer has left something.
    pub(crate) fn is_rung(&self) -> bool {
        self.ring.words().rung.load(Ordering::SeqCst) != self.seen.load(Ordering::Relaxed)
    }

    /// Whether the peer's slots may have a twin that is not mapped; asked once.
    pub(crate) fn maps(&self) -> bool {
        let maps = &self.ring.words().maps;
        maps.load(Ordering::Relaxed) != 0 && maps.swap(0, Ordering::AcqRel) != 0
    }

    /// Packets until now are seen by the step that follows.
    pub(crate) fn note_seen(&self) {
        self.seen.store(self.ring.words().rung.load(Ordering::SeqCst), Ordering::Relaxed);
    }

    pub(crate) fn next_ns(&self) -> u64 {
        self.next_ns.load(Ordering::Relaxed)
    }

    /// Notes the result of a step.
    pub(crate) fn note(&self, next_ns: u64, moved: u64) {
        self.next_ns.store(next_ns, Ordering::Relaxed);
        self.moved.store(moved, Ordering::Relaxed);
    }

    pub(crate) fn moved(&self) -> u64 {
        self.moved.load(Ordering::Relaxed)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, QueuePair> {
        self.queue_pair.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None`: somebody serves it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, QueuePair>> {
        match self.queue_pair.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Places of its completion queues in the bell's page.
    pub(crate) fn places(&self) -> &[std::sync::atomic::AtomicU32; 2] {
        &self.ring.words().places
    }
}
