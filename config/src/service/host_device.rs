//! `[host_device]` of `service.toml`: sizes of work in host memory: shared-memory exchange, inline operations, pieces, streaming stores.

use serde::{Deserialize, Serialize};

use crate::limits;
use crate::units::Bytes;
use crate::validate::{Problems, Validate};

/// `[host_device]`: the device of host memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct HostDevice {
    /// Collectives to which a rank contributes up to this much are done by the ranks themselves, on a shared-memory exchange that the
    /// service gives them. 0: everything is done in the service.
    pub shm_exchange_limit: Bytes,
    /// Operations up to here run on the proxy engine; larger ones go to the transport engines.
    pub inline_bytes: Bytes,
    /// Unit of work of a transport engine.
    pub piece_bytes: Bytes,
    /// Results from here on are written past the cache.
    pub streaming_threshold: Bytes,
}

impl Default for HostDevice {
    fn default() -> Self {
        HostDevice {
            shm_exchange_limit: Bytes::kib(16),
            inline_bytes: Bytes::kib(256),
            piece_bytes: Bytes::kib(128),
            streaming_threshold: Bytes::mib(32),
        }
    }
}

impl Validate for HostDevice {
    fn validate(&self, problems: &mut Problems) {
        problems.within("host_device.shm_exchange_limit", &self.shm_exchange_limit, &limits::SHM_EXCHANGE_LIMIT);
        problems.within("host_device.inline_bytes", &self.inline_bytes, &limits::INLINE_BYTES);
        problems.within("host_device.piece_bytes", &self.piece_bytes, &limits::PIECE_BYTES);
        if !self.piece_bytes.0.is_multiple_of(4096) {
            problems.add(
                "host_device.piece_bytes",
                format!("must be a multiple of 4KiB so that pieces start on pages, not {}", self.piece_bytes),
            );
        }
        problems.within("host_device.streaming_threshold", &self.streaming_threshold, &limits::STREAMING_THRESHOLD);
    }
}
