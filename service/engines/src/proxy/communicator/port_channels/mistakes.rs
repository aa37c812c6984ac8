//! Mistakes of ranks with port channels, in words.

use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SetupError;

use crate::proxy::calls::failure::Failure;

/// A request is refused.
pub(super) fn invalid(message: impl Into<String>) -> SetupError {
    SetupError { class: ErrorClass::InvalidArgument, message: message.into() }
}

/// A trigger fails the communicator.
pub(super) fn mistake(rank: u32, what: impl std::fmt::Display) -> Failure {
    Failure::new(ErrorClass::InvalidArgument, format!("rank {rank} made an invalid call: {what}"))
}

pub(super) fn no_memories(rank: u32, channel: u32) -> Failure {
    mistake(rank, format!("port channel {channel} has no memories to put"))
}

/// A memory, as a put of a rank's channel names it.
#[derive(Debug, Clone, Copy)]
pub(super) struct NamedMemory {
    /// The rank that puts.
    pub(super) rank: u32,
    pub(super) channel: u32,
    /// The rank whose memory it is.
    pub(super) of: u32,
    pub(super) memory: Handle,
}

impl NamedMemory {
    pub(super) fn past_end(&self, offset: u64, bytes: u64, has: u64) -> Failure {
        let NamedMemory { rank, channel, of, memory } = self;
        let what = format!(
            "a put of port channel {channel} takes {bytes} bytes at offset {offset} of memory {memory:?} of rank {of}, which has {has}"
        );
        mistake(*rank, what)
    }

    pub(super) fn freed(&self) -> Failure {
        let NamedMemory { rank, channel, of, memory } = self;
        let what = format!("a put of port channel {channel} names memory {memory:?} of rank {of}, which was freed");
        mistake(*rank, what)
    }
}
