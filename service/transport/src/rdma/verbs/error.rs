//! Errors of verbs calls.

use nix::errno::Errno;

/// Why there are no verbs on this host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// The library is not there.
    #[error("{library} cannot be opened ({reason}); install libibverbs, or name its file with `rdma.library`")]
    NoLibrary {
        /// As asked for.
        library: String,
        /// The loader's reason.
        reason: String,
    },
    /// The library is too old, or another one.
    #[error("{library} lacks {symbol}; rdma-core 17 or later is needed")]
    NoSymbol {
        /// As asked for.
        library: String,
        /// The transport that it lacks.
        symbol: &'static str,
    },
}

/// A call that the driver refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {errno}")]
pub struct VerbsError {
    /// Which call.
    pub call: &'static str,
    /// Why.
    pub errno: Errno,
}

impl VerbsError {
    pub(crate) fn new(call: &'static str, errno: Errno) -> Self {
        VerbsError { call, errno }
    }
}

/// Why a device cannot reach a GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuRefusal {
    /// By its dma-buf; `None` where there is none.
    pub by_buffer: Option<Errno>,
    /// By its address.
    pub by_address: Errno,
}
