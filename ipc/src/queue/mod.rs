//! Single-producer single-consumer rings of fixed-size plain data in shared memory.
//!
//! ```text
//! header: | producer index | consumer index | consumer sleeps | producer waits |   each on lines of its own
//! slots:  | T | T | T | ... |                                                      a power of two of them
//! ```
//!
//! Indices run freely and are taken modulo the capacity. Each side keeps its own index privately and publishes it; of
//! the other side's it keeps a cached copy, so that a side touches the other's line only when the ring looks full or
//! empty. There is no system call while both sides are busy.
//!
//! The other side may be hostile: its index is checked on every read, slots are copied out once, word by word, and
//! nothing is read twice. A lie is [`QueueError`], never a read outside the ring.

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
    /// The other side wrote an impossible index.
    #[error("the other side's index {theirs} contradicts ours, {ours}, in a ring of {capacity} slots")]
    Corrupt { theirs: u64, ours: u64, capacity: u32 },
}

#[cfg(all(test, not(loom)))]
mod tests;

#[cfg(all(test, loom))]
mod loom_tests;
