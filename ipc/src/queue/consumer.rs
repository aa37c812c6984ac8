//! The reading side of a ring.

#[cfg(not(loom))]
use std::sync::Arc;

use bytemuck::Pod;

use super::QueueError;
use super::layout::Ring;
#[cfg(not(loom))]
use crate::shm::Mapping;
use crate::sync::atomic::{Ordering, fence};

/// Reads values. One a ring.
pub struct Consumer<T> {
    pub(super) ring: Ring<T>,
    consumed: u64,
    produced_cached: u64,
}

impl<T: Pod> Consumer<T> {
    /// The reading side of the ring at `offset_bytes` of a zeroed segment.
    ///
    /// # Errors
    /// [`QueueError::BadLayout`].
    #[cfg(not(loom))]
    pub fn new(mapping: Arc<Mapping>, offset_bytes: u64, capacity: u32) -> Result<Self, QueueError> {
        Ok(Self::over(Ring::new(mapping, offset_bytes, capacity)?))
    }

    pub(super) fn over(ring: Ring<T>) -> Self {
        Consumer { ring, consumed: 0, produced_cached: 0 }
    }

    /// Whether no value waits; looks at the other side's index only where the cached one says so.
    fn refresh(&mut self) -> Result<bool, QueueError> {
        if self.produced_cached != self.consumed {
            return Ok(false);
        }
        let theirs = self.ring.header().produced.0.load(Ordering::Acquire);
        let length = self.checked_length(theirs)?;
        self.produced_cached = theirs;
        Ok(length == 0)
    }

    /// Copies the next value out, once.
    ///
    /// # Errors
    /// [`QueueError::Corrupt`].
    pub fn try_pop(&mut self) -> Result<Option<T>, QueueError> {
        if self.refresh()? {
            return Ok(None);
        }
        let value = self.ring.read(self.consumed);
        self.consumed = self.consumed.wrapping_add(1);
        let header = self.ring.header();
        header.consumed.0.store(self.consumed, Ordering::Release);
        self.wake_producer();
        Ok(Some(value))
    }

    fn wake_producer(&self) {
        let header = self.ring.header();
        // Pairs with the fence in `Producer::wait_for_space`: either this load sees the waiter, or the waiter sees the
        // room. The flag is left to the producer: taken here, it could be that of the producer's next wait, which would
        // begin after this wake-up and hear of no other.
        fence(Ordering::SeqCst);
        if header.producer_waits.0.load(Ordering::Relaxed) != 0 {
            header.space.wake_all(&header.consumed.0);
        }
    }

    /// Values that wait, as far as the other side's index can be believed; never more than the ring holds.
    ///
    /// # Errors
    /// [`QueueError::Corrupt`].
    pub fn len(&self) -> Result<u64, QueueError> {
        let theirs = self.ring.header().produced.0.load(Ordering::Acquire);
        self.checked_length(theirs)
    }

    /// Whether no value waits.
    ///
    /// # Errors
    /// [`QueueError::Corrupt`].
    pub fn is_empty(&self) -> Result<bool, QueueError> {
        Ok(self.len()? == 0)
    }

    fn checked_length(&self, theirs: u64) -> Result<u64, QueueError> {
        let (length, capacity) = (theirs.wrapping_sub(self.consumed), self.ring.capacity);
        if length > u64::from(capacity) {
            return Err(QueueError::Corrupt { theirs, ours: self.consumed, capacity });
        }
        Ok(length)
    }

    /// Announces that this side is about to sleep. Returns false, and announces nothing, if a value is there.
    ///
    /// # Errors
    /// [`QueueError::Corrupt`].
    pub fn arm(&mut self) -> Result<bool, QueueError> {
        self.ring.header().consumer_sleeps.0.store(1, Ordering::Relaxed);
        // Pairs with the fence in `Producer::try_push`.
        fence(Ordering::SeqCst);
        let empty = self.refresh()?;
        if !empty {
            self.ring.header().consumer_sleeps.0.store(0, Ordering::Relaxed);
        }
        Ok(empty)
    }

    /// Takes the announcement back after a sleep that something else ended, so that no bell is rung for nothing.
    pub fn disarm(&mut self) {
        self.ring.header().consumer_sleeps.0.store(0, Ordering::Relaxed);
    }
}
