//! Single-producer single-consumer rings of fixed-size plain data in shared memory.
//!
//! ```text
//! header: | producer index | consumer index | consumer sleeps | producer waits |   each on lines of its own
//! slots:  | slot | slot | slot | ... |                                             a power of two of them
//! slot:   | number, 56 bytes | number, 56 bytes | ... |                            a cache line each
//! ```
//!
//! Values are numbered from 1 on. Each line of a slot carries the number of the value whose part it holds, written last:
//! so a consumer that polls the next slot fetches the value itself, all its lines at once, and no index. The producer
//! keeps a cached copy of the consumer's index, and looks again only when the ring seems full; the consumer gives slots
//! back by parts of the ring. There is no system call while both sides are busy.
//!
//! The other side may be hostile: numbers and indices are checked on every read, slots are copied out once, word by word,
//! and nothing is read twice. A lie is [`QueueError`], never a read outside the ring.

mod consumer;
mod layout;
mod producer;

pub use consumer::Consumer;
pub use layout::{CAPACITY_MAX, ring_bytes};
pub use producer::{Producer, Push};

/// The ring cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum QueueError {
    /// Not a ring.
    #[error("a ring of {capacity} slots at offset {offset_bytes} does not fit its segment, or is not a power of two")]
    BadLayout { offset_bytes: u64, capacity: u32 },
    /// The other side wrote an impossible number.
    #[error("the other side's number {theirs} contradicts ours, {ours}, in a ring of {capacity} slots")]
    Corrupt { theirs: u64, ours: u64, capacity: u32 },
}

#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod loom_tests;
