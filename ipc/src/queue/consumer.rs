//! The reading side of a command ring: pop, and waiting for the next entry.

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
    /// Read slots that have been given back.
    released: u64,
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

    /// The same of a ring that another consumer has read so far, which reads no more.
    ///
    /// # Errors
    /// As [`Consumer::new`].
    #[cfg(not(loom))]
    pub fn resume(mapping: Arc<Mapping>, offset_bytes: u64, capacity: u32, consumed: u64) -> Result<Self, QueueError> {
        let consumer = Self::new(mapping, offset_bytes, capacity)?;
        Ok(Consumer { consumed, released: consumed, ..consumer })
    }

    pub(super) fn over(ring: Ring<T>) -> Self {
        Consumer { ring, consumed: 0, released: 0 }
    }

    /// Values taken so far.
    #[must_use]
    pub fn consumed(&self) -> u64 {
        self.consumed
    }

    /// Copies the next value out, once. Slots are given back to the producer a part of the ring at a time, and when the
    /// ring is found empty; who stops before that calls [`Consumer::release`].
    ///
    /// # Errors
    /// [`QueueError::Corrupt`].
    pub fn try_pop(&mut self) -> Result<Option<T>, QueueError> {
        let mut value = T::zeroed();
        Ok(self.try_pop_into(&mut value)?.then_some(value))
    }

    /// As [`Consumer::try_pop`], to a place of the caller's: for those who wait for nanoseconds. Returns whether there was
    /// one.
    ///
    /// # Errors
    /// [`QueueError::Corrupt`].
    #[inline]
    pub fn try_pop_into(&mut self, value: &mut T) -> Result<bool, QueueError> {
        match self.ring.is_there(self.consumed) {
            Ok(true) => {
                self.ring.read(self.consumed, value);
                self.consumed = self.consumed.wrapping_add(1);
                if self.consumed.wrapping_sub(self.released) >= u64::from(self.ring.capacity).div_ceil(4) {
                    self.release();
                }
                Ok(true)
            }
            Ok(false) => {
                self.release();
                Ok(false)
            }
            Err(theirs) => Err(self.corrupt(theirs)),
        }
    }

    fn corrupt(&self, theirs: u64) -> QueueError {
        QueueError::Corrupt { theirs, ours: self.consumed, capacity: self.ring.capacity }
    }

    /// Gives the slots of all values taken so far back to the producer.
    pub fn release(&mut self) {
        if self.released == self.consumed {
            return;
        }
        self.released = self.consumed;
        let header = self.ring.header();
        header.consumed.0.store(self.consumed, Ordering::Release);
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
    pub fn waiting(&self) -> Result<u64, QueueError> {
        let theirs = self.ring.header().produced.0.load(Ordering::Acquire);
        self.checked_length(theirs)
    }

    fn checked_length(&self, theirs: u64) -> Result<u64, QueueError> {
        let (length, capacity) = (theirs.wrapping_sub(self.consumed), self.ring.capacity);
        if length > u64::from(capacity) {
            return Err(self.corrupt(theirs));
        }
        Ok(length)
    }

    /// Announces that this side is about to sleep. Returns false, and announces nothing, if a value is there.
    ///
    /// # Errors
    /// [`QueueError::Corrupt`].
    pub fn arm(&mut self) -> Result<bool, QueueError> {
        self.release();
        self.ring.header().consumer_sleeps.0.store(1, Ordering::Relaxed);
        // Pairs with the fence in `Producer::try_push`.
        fence(Ordering::SeqCst);
        let is_there = self.ring.is_there(self.consumed);
        if is_there != Ok(false) {
            self.ring.header().consumer_sleeps.0.store(0, Ordering::Relaxed);
        }
        is_there.map(|there| !there).map_err(|theirs| self.corrupt(theirs))
    }

    /// Takes the announcement back after a sleep that something else ended, so that no bell is rung for nothing.
    pub fn disarm(&mut self) {
        self.ring.header().consumer_sleeps.0.store(0, Ordering::Relaxed);
    }
}
