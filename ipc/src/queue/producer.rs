//! The writing side of a command ring: push, the doorbell's need, and waiting while it is full.

#[cfg(not(loom))]
use std::sync::Arc;
use std::time::Duration;

use bytemuck::Pod;

use super::QueueError;
use super::layout::Ring;
#[cfg(not(loom))]
use crate::shm::Mapping;
use crate::sync::atomic::{Ordering, fence};

/// The result of a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a sleeping consumer has to be woken, a full ring tried again"]
pub enum Push {
    /// The ring is full; nothing was written.
    Full,
    /// Written. The caller rings the consumer's doorbell if it sleeps; each sleep is reported once.
    Pushed { consumer_sleeps: bool },
}

/// Writes values. One a ring.
pub struct Producer<T> {
    pub(super) ring: Ring<T>,
    produced: u64,
    consumed_cached: u64,
}

impl<T: Pod> Producer<T> {
    /// The writing side of the ring at `offset_bytes` of a zeroed segment.
    ///
    /// # Errors
    /// [`QueueError::BadLayout`].
    #[cfg(not(loom))]
    pub fn new(mapping: Arc<Mapping>, offset_bytes: u64, capacity: u32) -> Result<Self, QueueError> {
        Ok(Self::over(Ring::new(mapping, offset_bytes, capacity)?))
    }

    /// The same of a ring that another producer has written so far, which writes no more.
    ///
    /// # Errors
    /// As [`Producer::new`].
    #[cfg(not(loom))]
    pub fn resume(mapping: Arc<Mapping>, offset_bytes: u64, capacity: u32, produced: u64) -> Result<Self, QueueError> {
        let producer = Self::new(mapping, offset_bytes, capacity)?;
        // As full as it may be: the next push looks.
        Ok(Producer { produced, consumed_cached: produced.wrapping_sub(u64::from(capacity)), ..producer })
    }

    pub(super) fn over(ring: Ring<T>) -> Self {
        Producer { ring, produced: 0, consumed_cached: 0 }
    }

    /// Values written so far.
    #[must_use]
    pub fn produced(&self) -> u64 {
        self.produced
    }

    /// Values in the ring, as far as known here.
    fn used(&mut self, read_again: bool) -> Result<u64, QueueError> {
        if read_again {
            let theirs = self.ring.header().consumed.0.load(Ordering::Acquire);
            let capacity = self.ring.capacity;
            if self.produced.wrapping_sub(theirs) > u64::from(capacity) {
                return Err(QueueError::Corrupt { theirs, ours: self.produced, capacity });
            }
            self.consumed_cached = theirs;
        }
        Ok(self.produced.wrapping_sub(self.consumed_cached))
    }

    fn is_full(&mut self) -> Result<bool, QueueError> {
        let capacity = u64::from(self.ring.capacity);
        Ok(self.used(false)? == capacity && self.used(true)? == capacity)
    }

    /// Writes a value, if there is room.
    ///
    /// # Errors
    /// [`QueueError::Corrupt`].
    pub fn try_push(&mut self, value: &T) -> Result<Push, QueueError> {
        if self.is_full()? {
            return Ok(Push::Full);
        }
        self.ring.write(self.produced, value);
        self.produced = self.produced.wrapping_add(1);
        let header = self.ring.header();
        header.produced.0.store(self.produced, Ordering::Release);
        // Pairs with the fence in `Consumer::arm`: either this load sees the sleeper, or the sleeper sees the value.
        fence(Ordering::SeqCst);
        let sleeps = &header.consumer_sleeps.0;
        let consumer_sleeps = sleeps.load(Ordering::Relaxed) != 0 && sleeps.swap(0, Ordering::AcqRel) != 0;
        Ok(Push::Pushed { consumer_sleeps })
    }

    /// Waits, asleep, until the ring has room, for at most `timeout`, or less. Returns whether it has. For tenants: the
    /// service never waits for the other side of a ring.
    ///
    /// # Errors
    /// [`QueueError::Corrupt`].
    pub fn wait_for_space(&mut self, timeout: Duration) -> Result<bool, QueueError> {
        self.ring.header().producer_waits.0.store(1, Ordering::Relaxed);
        // Pairs with the fence in `Consumer::try_pop`.
        fence(Ordering::SeqCst);
        if self.is_full()? {
            let header = self.ring.header();
            header.space.wait(&header.consumed.0, self.consumed_cached, timeout);
        }
        self.ring.header().producer_waits.0.store(0, Ordering::Relaxed);
        Ok(!self.is_full()?)
    }
}
