//! `CUresult`, as far as it is returned here.

use std::ffi::CStr;

/// A `CUresult`.
pub(crate) type Code = u32;
/// What a call comes to.
pub(crate) type Done<T = ()> = Result<T, Code>;

macro_rules! codes {
    ($($name:ident = $code:literal, $text:literal;)+) => {
        $(pub(crate) const $name: Code = $code;)+

        /// The driver's name of a code.
        pub(crate) fn name_of(code: Code) -> Option<&'static CStr> {
            match code {
                0 => Some(c"CUDA_SUCCESS"),
                $($code => Some($text),)+
                _ => None,
            }
        }
    };
}

codes! {
    INVALID_VALUE = 1, c"CUDA_ERROR_INVALID_VALUE";
    OUT_OF_MEMORY = 2, c"CUDA_ERROR_OUT_OF_MEMORY";
    INVALID_DEVICE = 101, c"CUDA_ERROR_INVALID_DEVICE";
    INVALID_IMAGE = 200, c"CUDA_ERROR_INVALID_IMAGE";
    INVALID_CONTEXT = 201, c"CUDA_ERROR_INVALID_CONTEXT";
    OPERATING_SYSTEM = 304, c"CUDA_ERROR_OPERATING_SYSTEM";
    INVALID_HANDLE = 400, c"CUDA_ERROR_INVALID_HANDLE";
    NOT_FOUND = 500, c"CUDA_ERROR_NOT_FOUND";
    NOT_READY = 600, c"CUDA_ERROR_NOT_READY";
    ILLEGAL_ADDRESS = 700, c"CUDA_ERROR_ILLEGAL_ADDRESS";
    PEER_ACCESS_ALREADY_ENABLED = 704, c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED";
    HOST_MEMORY_ALREADY_REGISTERED = 712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED";
    HOST_MEMORY_NOT_REGISTERED = 713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED";
    NOT_PERMITTED = 800, c"CUDA_ERROR_NOT_PERMITTED";
    NOT_SUPPORTED = 801, c"CUDA_ERROR_NOT_SUPPORTED";
    CAPTURE_UNSUPPORTED = 900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    CAPTURE_INVALIDATED = 901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    CAPTURE_UNMATCHED = 903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED";
    CAPTURE_UNJOINED = 904, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED";
    CAPTURE_ISOLATION = 905, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION";
    CAPTURE_IMPLICIT = 906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
    CAPTURED_EVENT = 907, c"CUDA_ERROR_CAPTURED_EVENT";
}
