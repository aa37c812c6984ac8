//! Driver errors (`CUresult`): names, and which of them are sticky, so that a context is lost.

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

/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: u32 = 600;
/// Code of errors that are this crate's own.
const OWN: u32 = u32::MAX;

/// After one of these a context is of no use: whatever is called in it says the same again, until its process ends. The GPU may work for others.
const STICKY: [(u32, &str); 18] = [
    (46, "CUDA_ERROR_DEVICE_UNAVAILABLE"),
    (214, "CUDA_ERROR_ECC_UNCORRECTABLE"),
    (220, "CUDA_ERROR_NVLINK_UNCORRECTABLE"),
    (226, "CUDA_ERROR_CONTAINED"),
    (700, "CUDA_ERROR_ILLEGAL_ADDRESS"),
    (702, "CUDA_ERROR_LAUNCH_TIMEOUT"),
    (709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"),
    (710, "CUDA_ERROR_ASSERT"),
    (714, "CUDA_ERROR_HARDWARE_STACK_ERROR"),
    (715, "CUDA_ERROR_ILLEGAL_INSTRUCTION"),
    (716, "CUDA_ERROR_MISALIGNED_ADDRESS"),
    (717, "CUDA_ERROR_INVALID_ADDRESS_SPACE"),
    (718, "CUDA_ERROR_INVALID_PC"),
    (719, "CUDA_ERROR_LAUNCH_FAILED"),
    (721, "CUDA_ERROR_TENSOR_MEMORY_LEAK"),
    (806, "CUDA_ERROR_MPS_RPC_FAILURE"),
    (810, "CUDA_ERROR_MPS_CLIENT_TERMINATED"),
    (909, "CUDA_ERROR_EXTERNAL_DEVICE"),
];

/// Whether a context is of no use any more once a call in it has returned this `CUresult`.
#[must_use]
pub fn is_sticky(code: u32) -> bool {
    STICKY.iter().any(|(sticky, _)| *sticky == code)
}

/// The name of a `CUresult`, whoever it comes from, with the number: `CUDA_ERROR_ILLEGAL_ADDRESS (700)`.
#[must_use]
pub fn name_of(code: u32) -> String {
    let known = STICKY.iter().find(|(sticky, _)| *sticky == code);
    format!("{} ({code})", known.map_or_else(|| api::error_name(code), |(_, name)| (*name).to_owned()))
}

impl DriverError {
    pub(crate) fn new(call: &'static str, code: u32) -> Self {
        DriverError { call, code, name: api::error_name(code) }
    }

    /// An error that no driver call returned.
    #[must_use]
    pub fn own(call: &'static str, message: impl Into<String>) -> Self {
        DriverError { call, code: OWN, name: message.into() }
    }

    /// The driver's code; none if it was not asked.
    #[must_use]
    pub fn driver_code(&self) -> Option<u32> {
        Some(self.code).filter(|code| *code != OWN)
    }

    /// Whether the context that returned it is of no use any more.
    #[must_use]
    pub fn is_sticky(&self) -> bool {
        is_sticky(self.code)
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
        /// Major number of the version.
        major: u32,
        /// Major number of the version.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_stay_are_told_from_those_of_a_call_and_named_without_a_driver() {
        assert!(is_sticky(700) && is_sticky(214) && is_sticky(719));
        // Success, an argument, memory, a capture, what has not happened yet, and this crate's own.
        assert!([0, 1, 2, 600, 901, OWN].into_iter().all(|code| !is_sticky(code)));
        assert_eq!(name_of(220), "CUDA_ERROR_NVLINK_UNCORRECTABLE (220)");
        assert!(name_of(123_456).ends_with("(123456)"));
        assert!(STICKY.windows(2).all(|pair| pair[0].0 < pair[1].0));
    }
}
