//! What can go wrong.

use crate::api;

/// A call that the driver refused or that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name} ({code})")]
pub struct DriverError {
    /// Entry point.
    pub call: &'static str,
    /// `CUresult`.
    pub code: u32,
    /// Its name, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
}

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: u32 = 600;
/// Code of errors that are this crate's own.
const OWN: u32 = u32::MAX;

impl DriverError {
    pub(crate) fn new(call: &'static str, code: u32) -> Self {
        DriverError { call, code, name: api::error_name(code) }
    }

    /// An error that no driver call returned.
    pub(crate) fn own(call: &'static str, message: impl Into<String>) -> Self {
        DriverError { call, code: OWN, name: message.into() }
    }

    /// Whether a device's memory is full.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.code == OUT_OF_MEMORY
    }

    /// Whether what was asked for has not happened yet.
    pub(crate) fn is_not_ready(&self) -> bool {
        self.code == NOT_READY
    }
}

/// Why there is no CUDA here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// No library.
    #[error("no CUDA driver: libcuda.so.1 is not on this machine")]
    NoDriver,
    /// Too old.
    #[error("the CUDA driver supports CUDA {major}.{minor}; 12.4 or newer is needed")]
    TooOld {
        /// Of the version it has.
        major: u32,
        /// Of the version it has.
        minor: u32,
    },
    /// An entry point is missing.
    #[error("the CUDA driver lacks {0}: it is too old, or no driver")]
    NoSymbol(&'static str),
    /// It does not start.
    #[error("the CUDA driver does not start: {0}")]
    Broken(DriverError),
}

impl From<&Unavailable> for DriverError {
    fn from(unavailable: &Unavailable) -> Self {
        DriverError::own("cuInit", unavailable.to_string())
    }
}
