//! Shape of a rank's segment.

use serde::{Deserialize, Serialize};

use super::fifo::{SLOTS_OFFSET, TAIL_OFFSET, fifo_bytes};
use super::{CONNECTIONS_MAX, FIFO_SLOTS_MAX};

/// Bytes of the words of a connection.
pub(super) const CONNECTION_BYTES: u64 = 128;
/// Bytes of words that kernels use besides, behind these.
pub(super) const KERNEL_WORDS_BYTES: u64 = 128;

/// Shape of a segment, as tenants learn it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortChannelLayout {
    /// Slots of the FIFO: a power of two, at most [`FIFO_SLOTS_MAX`].
    pub fifo_slots: u32,
    /// The same of a second FIFO, which kernels of the rank write; 0 where there is none.
    pub kernel_slots: u32,
    /// Connections that have words, at most [`CONNECTIONS_MAX`].
    pub connections: u32,
}

impl PortChannelLayout {
    /// A layout with at least so many slots, where that is allowed, for threads alone.
    #[must_use]
    pub fn with_slots(slots: u32) -> Self {
        PortChannelLayout { fifo_slots: slots_of(slots), kernel_slots: 0, connections: CONNECTIONS_MAX }
    }

    /// The same with a FIFO of at least so many slots for kernels, too.
    #[must_use]
    pub fn with_kernels(self, slots: u32) -> Self {
        PortChannelLayout { kernel_slots: slots_of(slots), ..self }
    }

    /// Offset of the FIFO of kernels, if there is one.
    pub(super) fn kernel_fifo_offset(self) -> Option<u64> {
        (self.kernel_slots > 0).then(|| fifo_bytes(self.fifo_slots).next_multiple_of(CONNECTION_BYTES))
    }

    /// Kernels' parts of the segment, by their places there.
    #[must_use]
    pub fn kernel_places(self, connection: u32) -> Option<KernelPlaces> {
        let (fifo, words) = (self.kernel_fifo_offset()?, self.words_offset(connection));
        let kernel_words = words + CONNECTION_BYTES;
        Some(KernelPlaces {
            slots: fifo + SLOTS_OFFSET,
            tail: fifo + TAIL_OFFSET,
            arrived: words,
            flushed: kernel_words,
            awaited: kernel_words + KERNEL_WORDS_BYTES / 2,
        })
    }

    /// Offset of the words of a connection.
    pub(super) fn words_offset(self, connection: u32) -> u64 {
        let (fifos, each) = match self.kernel_fifo_offset() {
            None => (fifo_bytes(self.fifo_slots), CONNECTION_BYTES),
            Some(offset) => (offset + fifo_bytes(self.kernel_slots), CONNECTION_BYTES + KERNEL_WORDS_BYTES),
        };
        fifos.next_multiple_of(CONNECTION_BYTES) + u64::from(connection) * each
    }

    /// Size of the whole segment.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.words_offset(self.connections)
    }
}

fn slots_of(slots: u32) -> u32 {
    slots.clamp(1, FIFO_SLOTS_MAX).next_power_of_two()
}

/// Offsets in a segment of what kernels use for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelPlaces {
    /// Slots of the kernels' FIFO, of 16 bytes each.
    pub slots: u64,
    /// How many of them have been read.
    pub tail: u64,
    /// Signals that have arrived.
    pub arrived: u64,
    /// Position behind the last trigger of a kernel with a flush that has ended.
    pub flushed: u64,
    /// The signal that a kernel waits for, by its number from 1 on. Written by kernels.
    pub awaited: u64,
}
