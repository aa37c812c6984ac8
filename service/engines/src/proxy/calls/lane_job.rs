//! A message of port channels under way to or from another host: which lane has it, and for which
//! put.

use mccs_ipc::types::Handle;

/// A lane: a rank of this host, one of another, and the direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LaneKey {
    pub(crate) rank: u32,
    pub(crate) peer: u32,
    /// Whether the rank here sends.
    pub(crate) is_send: bool,
}

/// A put whose bytes follow its frame.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LongPut {
    /// Number of the rank's connection.
    pub(crate) connection: u32,
    /// Number among the connection's long puts.
    pub(crate) number: u64,
    pub(crate) bytes: u64,
}

/// A message of port channels with a rank of another host.
#[derive(Clone, Copy)]
pub(crate) struct LaneJob {
    pub(crate) comm: Handle,
    pub(crate) lane: LaneKey,
    /// Whether it waits for whatever a peer may send.
    pub(crate) listens: bool,
    /// The put whose bytes it sends.
    pub(crate) put: Option<LongPut>,
}
