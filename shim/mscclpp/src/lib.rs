//! `libmscclpp.so` on mccs: programs of MSCCL++ v0.1's C API (`include/mscclpp.h`) run on the service,
//! in host memory. `MCCS_SOCKET` names the socket of the host's service.
//!
//! A thin layer over port channels: a connection is a port channel to a peer under a tag, with a buffer of each of the two. A call that
//! needs a GPU is refused, and the log handler is told what to do instead.

#![deny(missing_docs)]

mod communicators;
mod connections;
mod host_memory;
mod log;
mod registered_buffers;
mod root;
mod session;
mod unique_id;

use std::ffi::{c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};

use mccs::{Error, ErrorClass};

/// `mscclppResult_t`.
type Status = c_int;
const SUCCESS: Status = 0;
const INTERNAL_ERROR: Status = 3;

fn status_of(error: &Error) -> Status {
    match error.class() {
        ErrorClass::System => 2,
        ErrorClass::Internal => INTERNAL_ERROR,
        ErrorClass::InvalidArgument => 4,
        ErrorClass::InvalidUsage => 5,
        ErrorClass::Remote | ErrorClass::Timeout => 6,
    }
}

/// Runs a call, turns what it gives into a status, and tells the log handler why it has failed.
fn guard(function: &str, call: impl FnOnce() -> Result<(), Error>) -> Status {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(error)) => {
            log::tell(&format!("{function}: {error}"));
            status_of(&error)
        }
        Err(_) => {
            log::tell(&format!("{function}: a bug in mccs: the call panicked"));
            INTERNAL_ERROR
        }
    }
}

fn invalid_argument(message: impl Into<String>) -> Error {
    Error::InvalidArgument(message.into())
}

fn invalid_usage(message: impl Into<String>) -> Error {
    Error::refused(ErrorClass::InvalidUsage, message)
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes an output argument.
///
/// # Safety
/// The pointer must be null or valid for a write.
unsafe fn put<T>(target: *mut T, value: T, what: &str) -> Result<(), Error> {
    if target.is_null() {
        return Err(invalid_argument(format!("{what} is null")));
    }
    // SAFETY: the caller's contract.
    unsafe { target.write(value) };
    Ok(())
}

/// See `mscclpp.h`.
#[unsafe(no_mangle)]
pub extern "C" fn mscclppGetErrorString(status: Status) -> *const c_char {
    let name = match status {
        SUCCESS => c"no error",
        1 => c"unhandled CUDA error",
        2 => c"system error",
        INTERNAL_ERROR => c"internal error",
        4 => c"invalid argument",
        5 => c"invalid usage",
        6 => c"remote process exited, or did not come in time",
        7 => c"in progress",
        _ => c"unknown result code",
    };
    name.as_ptr()
}
