//! Staging buffers: registered memory for messages that are to be reduced, kept for later.

use mccs_transport::{MemoryKey, MemoryKind, MemorySpan, Transport, TransportError};

use super::MESSAGE_BYTES;

/// Staging buffers that an engine keeps for later; further ones are freed after use.
const STAGING_KEPT_MAX: usize = 64;

/// Memory for a message that is to be reduced.
pub struct Staging {
    words: Box<[u64]>,
    key: MemoryKey,
}

impl Staging {
    /// As the transport knows it.
    #[must_use]
    pub fn span(&self, bytes: u64) -> MemorySpan {
        MemorySpan { key: self.key, offset: 0, bytes }
    }

    /// First byte; aligned for every data type.
    #[must_use]
    pub fn ptr(&self) -> *const u8 {
        self.words.as_ptr().cast()
    }
}

/// Staging memory that no request uses.
#[derive(Default)]
pub(super) struct StagingPool(Vec<Staging>);

impl StagingPool {
    /// Memory for a message of at most [`MESSAGE_BYTES`].
    pub(super) fn take(&mut self, transport: &mut dyn Transport) -> Result<Staging, TransportError> {
        if let Some(staging) = self.0.pop() {
            return Ok(staging);
        }
        let mut words = vec![0u64; (MESSAGE_BYTES / 8) as usize].into_boxed_slice();
        // SAFETY: the words are freed in `give`, after they were deregistered, or with the transport.
        let key = unsafe { transport.register(words.as_mut_ptr().cast(), MESSAGE_BYTES, MemoryKind::Host) }?;
        Ok(Staging { words, key })
    }

    /// Takes memory back that no request uses any more.
    pub(super) fn give(&mut self, transport: &mut dyn Transport, staging: Staging) {
        if self.0.len() < STAGING_KEPT_MAX {
            self.0.push(staging);
        } else if transport.deregister(staging.key).is_err() {
            debug_assert!(false, "bug: staging memory is given back while a request uses it");
            std::mem::forget(staging);
        }
    }

    /// How many are kept.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
