//! Requests about port channels, over the session's socket, and their answers.

use serde::{Deserialize, Serialize};

use crate::types::Handle;

/// A rank's request about its port channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PortChannelRequest {
    /// Opens the rank's segment, with at least so many slots in its FIFO, or as many as there may be: first of all, and once. A rank on a GPU gets a
    /// FIFO of so many slots for its kernels, too. Answered by [`Response::PortChannels`](crate::protocol::Response::PortChannels).
    Open { fifo_slots: u32 },
    /// Lets peers put into a range of a region, and the rank from it: of GPU memory for a rank on a GPU, which has it opened. Answered by [`PortChannelAnswer::Memory`].
    Register { region: Handle, offset_bytes: u64, bytes: u64 },
    /// Takes such a memory back, behind all triggers written before. A later put into it fails the communicator.
    Free { memory: Handle },
    /// Gives the connection with a peer and a tag a number, the same each time. Answered by [`PortChannelAnswer::Connection`].
    Connect { peer: u32, tag: u32 },
    /// Makes a port channel of a connection, with a memory of the rank's that puts are from and one of the peer's that they are into, or for signals
    /// alone. Answered by [`PortChannelAnswer::Channel`].
    OpenChannel { connection: u32, memories: Option<PutMemories> },
    /// Ends a port channel, behind all triggers written before. A later trigger of it fails the communicator.
    CloseChannel { channel: u32 },
}

/// The memories that puts of a port channel are from and into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutMemories {
    /// Memory of the rank.
    pub source: Handle,
    /// Memory of the peer.
    pub destination: Handle,
}

/// An answer to a [`PortChannelRequest`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PortChannelAnswer {
    /// A memory, as peers name it.
    Memory(Handle),
    /// The number of a connection: its words have this place in the segment.
    Connection(u32),
    /// The number of a port channel, as triggers have it.
    Channel(u32),
    /// Done, nothing to return.
    Done,
}
