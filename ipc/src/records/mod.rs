//! Flight-recorder rings in shared memory: one engine writes records, `mccsctl trace` copies them.
//! Neither waits for the other, and to be read costs the writer nothing.
//!
//! ```text
//! header: | magic, version, capacity | records so far |   on lines of their own
//! slots:  | turn, 56 bytes | turn, 56 bytes | ... |       a cache line each, a power of two of them
//! ```
//!
//! A record is written over the oldest one. Its slot carries the record's number before and after its words, so that a reader
//! whom the writer laps knows that it has read nothing. The meaning of a record's words is its writer's affair, who changes
//! [`VERSION`] when that changes: a reader of another version refuses the ring.
//!
//! Readers are operators and observers. The service makes a ring by [`Mapping::create_for_readers`], so that the kernel refuses
//! readers every write: an observer cannot change what another one reads. Still the writer takes nothing from the memory that it
//! shares, and a reader bounds all that it finds there. Deliberately absent: any word from reader to writer.

mod memory;

#[cfg(not(loom))]
use std::os::fd::BorrowedFd;

pub use self::memory::records_bytes;
use self::memory::{Memory, Slot};
#[cfg(not(loom))]
use crate::shm::{Mapping, ShmError};
use crate::sync::atomic::{AtomicU64, Ordering, fence};

/// Changes whenever a ring or its records look different.
pub const VERSION: u64 = 2;
/// Words of a record; few under the model checker, to which each is a step.
pub const RECORD_WORDS: usize = if cfg!(loom) { 2 } else { 7 };
/// Most records of a ring: 64 MiB.
pub const CAPACITY_MAX: u64 = 1 << 20;

/// So many records ahead of the one that is written a slot is fetched.
const AHEAD: u64 = 8;

/// A record.
pub type RecordWords = [u64; RECORD_WORDS];

/// The ring cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordsError {
    /// Not the memory of a ring.
    #[cfg(not(loom))]
    #[error(transparent)]
    Shm(#[from] ShmError),
    /// Something else.
    #[error("it is no ring of records")]
    NotRecords,
    /// From a service that writes others.
    #[error("records are of version {theirs}, this program reads version {VERSION}: use one of the service's version")]
    Version {
        /// The service's.
        theirs: u64,
    },
    /// Longer than its memory, or than any ring.
    #[error("a ring of {0} records does not fit its memory, or is not a power of two")]
    BadCapacity(u64),
}

/// The end that writes. One thread at a time: breaking that would garble records, not memory.
#[derive(Debug)]
pub struct RecordWriter {
    memory: Memory,
    /// Records so far. The header is for readers.
    next: AtomicU64,
}

impl RecordWriter {
    /// Makes a ring in fresh memory of [`records_bytes`], of [`Mapping::create_for_readers`] if it is handed out.
    ///
    /// # Errors
    /// [`RecordsError::BadCapacity`].
    #[cfg(not(loom))]
    pub fn new(mapping: Mapping, capacity: u64) -> Result<Self, RecordsError> {
        Ok(Self::over(Memory::create(mapping, capacity)?))
    }

    fn over(memory: Memory) -> Self {
        RecordWriter { memory, next: AtomicU64::new(0) }
    }

    /// Writes over the oldest record.
    pub fn push(&self, words: &RecordWords) {
        let number = self.next.load(Ordering::Relaxed);
        let slot = self.memory.slot(number);
        slot.turn.store(being_written(number), Ordering::Relaxed);
        // A reader that sees any of the words sees that the slot is being written, too: pairs with its second look.
        fence(Ordering::Release);
        for (to, word) in slot.words.iter().zip(words) {
            to.store(*word, Ordering::Relaxed);
        }
        slot.turn.store(whole(number), Ordering::Release);
        self.next.store(number + 1, Ordering::Relaxed);
        self.memory.header().next.store(number + 1, Ordering::Release);
        // A reader has the line now, or memory: by the time it is written again this core should own it. Stores wait for each other, so that
        // otherwise whatever a later one announces would come later.
        self.memory.prefetch(number + AHEAD);
    }

    /// Number of the next record.
    pub fn next(&self) -> u64 {
        self.next.load(Ordering::Relaxed)
    }
}

/// The result of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Read {
    /// From where to go on.
    pub next: u64,
    /// Records that had been written over before they were read.
    pub lost: u64,
}

/// An end that reads.
#[derive(Debug)]
pub struct RecordReader {
    memory: Memory,
}

impl RecordReader {
    /// Maps a ring that a service has handed out.
    ///
    /// # Errors
    /// [`RecordsError`].
    #[cfg(not(loom))]
    pub fn map(fd: BorrowedFd<'_>) -> Result<Self, RecordsError> {
        Ok(RecordReader { memory: Memory::map(fd)? })
    }

    /// Records that it holds.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.memory.capacity()
    }

    /// Number of the next record.
    #[must_use]
    pub fn next(&self) -> u64 {
        self.memory.header().next.load(Ordering::Acquire)
    }

    /// Copies the records from number `from` on behind those in `to`, in order.
    pub fn read(&self, from: u64, to: &mut Vec<RecordWords>) -> Read {
        let next = self.next();
        let first = from.max(next.saturating_sub(self.capacity())).min(next);
        let mut read = Read { next, lost: first.saturating_sub(from) };
        for number in first..next {
            match copy(self.memory.slot(number), number) {
                Some(words) => to.push(words),
                None => read.lost += 1,
            }
        }
        read
    }
}

/// The turn of a slot into which record `number` is being written. No turn of one record is one of another.
fn being_written(number: u64) -> u64 {
    number.wrapping_mul(2).wrapping_add(1)
}

/// The turn of a slot in which record `number` is.
fn whole(number: u64) -> u64 {
    number.wrapping_mul(2).wrapping_add(2)
}

/// A record, unless it has been written over.
fn copy(slot: &Slot, number: u64) -> Option<RecordWords> {
    if slot.turn.load(Ordering::Acquire) != whole(number) {
        return None;
    }
    let words = std::array::from_fn(|at| slot.words[at].load(Ordering::Relaxed));
    fence(Ordering::Acquire);
    (slot.turn.load(Ordering::Relaxed) == whole(number)).then_some(words)
}

#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod loom_tests;
