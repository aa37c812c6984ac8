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

    fn is_empty(&mut self) -> Result<bool, QueueError> {
        if self.produced_cached != self.consumed {
            return Ok(false);
        }
        let theirs = self.ring.header().produced.0.load(Ordering::Acquire);
        let capacity = self.ring.capacity;
        if theirs.wrapping_sub(self.consumed) > u64::from(capacity) {
            return Err(QueueError::Corrupt { theirs, ours: self.consumed, capacity });
        }
        self.produced_cached = theirs;
        Ok(theirs == self.consumed)
    }

    /// Copies the next value out, once.
    ///
    /// # Errors
    /// [`QueueError::Corrupt`].
    pub fn try_pop(&mut self) -> Result<Option<T>, QueueError> {
        if self.is_empty()? {
            return Ok(None);
        }
        let value = self.ring.read(self.consumed);
        self.consumed = self.consumed.wrapping_add(1);
        let header = self.ring.header();
        header.consumed.0.store(self.consumed, Ordering::Release);
        self.wake_producer();
        Ok(Some(value))
    }

    #[cfg(not(loom))]
    fn wake_producer(&self) {
        let header = self.ring.header();
        // Pairs with the fence in `Producer::wait_for_space`.
        fence(Ordering::SeqCst);
        if header.producer_waits.0.load(Ordering::Relaxed) != 0 {
            let low_half = if cfg!(target_endian = "little") { 0 } else { 1 };
            crate::sync::futex_wake_all(header.consumed.0.as_ptr().cast::<u32>().wrapping_add(low_half));
        }
    }

    #[cfg(loom)]
    fn wake_producer(&self) {}

    /// Announces that this side is about to sleep. Returns false, and announces nothing, if a value is there.
    ///
    /// # Errors
    /// [`QueueError::Corrupt`].
    pub fn arm(&mut self) -> Result<bool, QueueError> {
        self.ring.header().consumer_sleeps.0.store(1, Ordering::Relaxed);
        // Pairs with the fence in `Producer::try_push`.
        fence(Ordering::SeqCst);
        let empty = self.is_empty()?;
        if !empty {
            self.ring.header().consumer_sleeps.0.store(0, Ordering::Relaxed);
        }
        Ok(empty)
    }
}
