//! Memory that port channels put from and into, and what stands for it at peers.

use std::any::Any;
use std::sync::Arc;

use mccs_ipc::port_channels::PortChannelRequest;
use mccs_ipc::types::Handle;

use super::Shared;
use crate::Error;

/// A part of a rank's region, or of its GPU memory, that port channels put from, and peers into. See [`PortChannels::register`](super::PortChannels::register). Taken
/// back on drop, behind all that was called before.
pub struct RegisteredMemory {
    pub(super) shared: Arc<Shared>,
    pub(super) handle: Handle,
    bytes: u64,
    /// Keeps the service's region, if it is the library's own.
    _kept: Option<Box<dyn Any + Send + Sync>>,
}

impl std::fmt::Debug for RegisteredMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RegisteredMemory")
            .field("handle", &self.handle)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl RegisteredMemory {
    pub(super) fn new(
        shared: Arc<Shared>,
        handle: Handle,
        bytes: u64,
        kept: Option<Box<dyn Any + Send + Sync>>,
    ) -> Self {
        RegisteredMemory { shared, handle, bytes, _kept: kept }
    }

    /// Size.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.bytes
    }

    /// Its name at peers.
    #[must_use]
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory { rank: self.shared.comm.rank(), handle: self.handle, bytes: self.bytes }
    }
}

impl Drop for RegisteredMemory {
    fn drop(&mut self) {
        self.shared.tell(PortChannelRequest::Free { memory: self.handle });
    }
}

/// Stands for a [`RegisteredMemory`] of another rank of the communicator: a plain value, which ranks tell each other. The service checks it where
/// it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteMemory {
    rank: u32,
    pub(super) handle: Handle,
    bytes: u64,
}

impl RemoteMemory {
    /// Length of one in bytes.
    pub const BYTES: usize = 24;

    /// The rank whose memory it is.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Size of the memory.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.bytes
    }

    /// In bytes, for peers.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.rank.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.handle.index.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.handle.generation.to_le_bytes());
        bytes[16..].copy_from_slice(&self.bytes.to_le_bytes());
        bytes
    }

    /// From a peer's bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another number of bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let length = bytes.len();
        let wrong = || Error::argument(format!("a remote memory is {} bytes, not {length}", Self::BYTES));
        let bytes: &[u8; Self::BYTES] = bytes.try_into().map_err(|_| wrong())?;
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let handle = Handle { index: number(4), generation: number(8) };
        let length = u64::from(number(20)) << 32 | u64::from(number(16));
        Ok(RemoteMemory { rank: number(0), handle, bytes: length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remote_memory_comes_back_from_its_bytes() {
        let handle = Handle { index: 0x0102_0304, generation: u32::MAX };
        let memory = RemoteMemory { rank: 77, handle, bytes: 0x1234_5678_9abc };
        assert_eq!(RemoteMemory::from_bytes(&memory.to_bytes()).expect("as many bytes"), memory);
        let refused = RemoteMemory::from_bytes(&[0; 23]).expect_err("too few").to_string();
        assert!(refused.contains("24 bytes, not 23"), "{refused}");
    }
}
