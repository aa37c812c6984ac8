//! Port channels: what a rank and the service share so that the rank's threads put data into peers'
//! memory, signal, and wait. The service's proxy carries it.
//!
//! ```text
//! rank's segment:   FIFO of triggers | words of connection 0 | words of connection 1 | ...
//!
//! threads of the rank                    service
//!   claim a slot, write the trigger  -->   pops, copies once, validates, moves the data
//!   (full: wait for the tail)        <--   tail
//!   wait for a signal                <--   arrived: signals of the connection that have come
//!   wait for a flush                 <--   flushed: triggers of the rank up to which all has ended
//! ```
//!
//! The kernels of a rank on a GPU write a FIFO of their own, in the same segment, and have words of their own for flushes. They count the positions
//! that they claim, and the signals that they take, in memory of their GPU (`mccs/device.cuh`).
//!
//! A *connection* joins two ranks of a communicator, and is named by the peer and a tag. A *port channel* is a connection with a memory of
//! the rank to put from and one of the peer to put into. A trigger names a port channel by its number: nothing in it is an address.
//!
//! A rank that lies in its words harms its own communicator.

mod fifo;
mod layout;
#[cfg(all(test, loom))]
mod loom_tests;
mod request;
#[cfg(not(loom))]
mod segment;
mod trigger;

pub use self::fifo::{TriggerConsumer, TriggerProducer};
pub use self::layout::{KernelPlaces, PortChannelLayout};
pub use self::request::{PortChannelAnswer, PortChannelRequest, PutMemories};
#[cfg(not(loom))]
pub use self::segment::{ConnectionWords, KernelWords, PortChannelSegment, Waited, wait_for};
pub use self::trigger::{CHANNELS_MAX, Kinds, OFFSET_MAX, PUT_BYTES_MAX, Trigger};

/// Most slots of a FIFO: what the service may have to take at once when a rank leaves.
pub const FIFO_SLOTS_MAX: u32 = 4096;
/// Connections of a rank in a communicator.
pub const CONNECTIONS_MAX: u32 = 1024;

/// Set in a word that the service raises no more: the communicator has failed, or the peer has left. Its count stands below.
pub const ENDED: u64 = 1 << 62;

/// A word's count, ended or not.
#[must_use]
pub fn counted(word: u64) -> u64 {
    word & (ENDED - 1)
}

/// Whether a word is raised no more.
#[must_use]
pub fn has_ended(word: u64) -> bool {
    word & ENDED != 0
}
