//! Shape of a rank's segment.

use serde::{Deserialize, Serialize};

use super::fifo::fifo_bytes;
use super::{CONNECTIONS_MAX, FIFO_SLOTS_MAX};

/// Of the words of a connection.
pub(super) const CONNECTION_BYTES: u64 = 128;

/// Shape of a segment, as tenants learn it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortChannelLayout {
    /// Slots of the FIFO: a power of two, at most [`FIFO_SLOTS_MAX`].
    pub fifo_slots: u32,
    /// Connections that have words, at most [`CONNECTIONS_MAX`].
    pub connections: u32,
}

impl PortChannelLayout {
    /// A layout with at least so many slots, where that is allowed.
    #[must_use]
    pub fn with_slots(slots: u32) -> Self {
        let fifo_slots = slots.clamp(1, FIFO_SLOTS_MAX).next_power_of_two();
        PortChannelLayout { fifo_slots, connections: CONNECTIONS_MAX }
    }

    /// Where the words of a connection are.
    pub(super) fn words_offset(self, connection: u32) -> u64 {
        fifo_bytes(self.fifo_slots).next_multiple_of(CONNECTION_BYTES) + u64::from(connection) * CONNECTION_BYTES
    }

    /// Size of the whole segment.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.words_offset(self.connections)
    }
}
