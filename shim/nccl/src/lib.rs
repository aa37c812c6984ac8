//! `libnccl.so.2` on mccs: NCCL programs run unchanged with `LD_PRELOAD` or the library path.
//! `MCCS_SOCKET` names the socket of the host's service, where it is not the default one.
//!
//! It has communicators of GPUs of one host or several, made by any of NCCL's calls, split, shrunk, waited for or not; every collective;
//! sends and receives; one-sided calls inside a host; pre-multiplied sums; groups; CUDA graphs; all of it by its `pnccl` names too. Every
//! function of NCCL 2.32.3 is exported. One that is refused returns `ncclInvalidUsage`, and `ncclGetLastError` says what to do instead:
//! calls for kernels of the caller's. `docs/NCCL.md` has the table.
//!
//! Calls return what NCCL's documentation says; names, numbers and signatures are those of `nccl.h`.

#![deny(missing_docs)]

mod collective_config;
mod collectives;
mod communicators;
mod config;
mod debug;
mod device_comm;
mod encryption;
mod group;
mod grow;
mod lifecycle;
mod logger;
mod memory;
mod one_sided;
mod operators;
mod p2p;
mod parameters;
mod pnccl_aliases;
mod profiler;
mod properties;
mod queries;
mod seat;
mod split;
mod suspend;
mod windows;

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use mccs::{Error, ErrorClass};

/// `ncclResult_t`.
type Status = c_int;
const SUCCESS: Status = 0;
const IN_PROGRESS: Status = 7;

/// The version of NCCL whose functions are all there. Refused parts of them are told by `ncclCommQueryProperties` and the errors (decision
/// 046).
const VERSION: c_int = 2_32_03;

thread_local! {
    static LAST_ERROR: RefCell<LastError> = RefCell::default();
}

/// A thread's last error; or, until it has one, what was the process' when it asked.
#[derive(Default)]
struct LastError {
    text: CString,
    is_own: bool,
}

/// The process' last error.
static LAST_OF_ALL: Mutex<Option<CString>> = Mutex::new(None);

fn status_of(error: &Error) -> Status {
    match error {
        Error::Cuda { .. } => 1,
        error => match error.class() {
            ErrorClass::System => 2,
            ErrorClass::Internal => 3,
            ErrorClass::InvalidArgument => 4,
            ErrorClass::InvalidUsage => 5,
            ErrorClass::Remote | ErrorClass::Timeout => 6,
        },
    }
}

fn remember(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    LAST_OF_ALL.lock().unwrap_or_else(PoisonError::into_inner).replace(text.clone());
    let told = LAST_ERROR.try_with(|last| last.replace(LastError { text: text.clone(), is_own: true }));
    // Watchdogs ask again and again.
    let is_new = !told.is_ok_and(|before| before.is_own && before.text == text);
    if is_new && debug::is_on(debug::Level::Warn, debug::ALL) {
        debug::line(debug::Level::Warn, format_args!("{}", text.to_string_lossy()));
    }
}

/// Runs a call, and turns what it gives into a status and a text.
fn guard(call: impl FnOnce() -> Result<(), Error>) -> Status {
    guard_status(|| call().map(|()| SUCCESS))
}

/// As [`guard`], for calls that may begin what goes on.
fn guard_status(call: impl FnOnce() -> Result<Status, Error>) -> Status {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(status)) => status,
        Ok(Err(error)) => {
            remember(&error.to_string());
            status_of(&error)
        }
        Err(_) => {
            remember("a bug in mccs: the call panicked");
            3
        }
    }
}

/// As [`guard_status`], for calls that a group's end fails with.
fn guard_in_group(call: impl FnOnce() -> Result<Status, Error>) -> Status {
    guard_status(|| group::noted(call()))
}

/// A rank that a caller names.
fn rank(value: c_int) -> Result<u32, Error> {
    u32::try_from(value).map_err(|_| Error::InvalidArgument(format!("rank {value} is negative")))
}

/// The error of a function that is refused, and what to do instead.
fn refused(function: &str, instead: &str) -> Error {
    Error::refused(ErrorClass::InvalidUsage, format!("{function}: {instead}"))
}

/// Writes an output argument.
///
/// # Safety
/// The pointer must be null or valid for a write.
unsafe fn put<T>(target: *mut T, value: T, what: &str) -> Result<(), Error> {
    if target.is_null() {
        return Err(Error::InvalidArgument(format!("{what} is null")));
    }
    // SAFETY: the caller's contract.
    unsafe { target.write(value) };
    Ok(())
}

/// See `nccl.h`.
///
/// # Safety
/// The pointer must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(version, VERSION, "version") })
}

/// See `nccl.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(status: Status) -> *const c_char {
    let name = match status {
        SUCCESS => c"no error",
        1 => c"unhandled CUDA error (ncclGetLastError says more, and NCCL_DEBUG=WARN prints it)",
        2 => c"system error (ncclGetLastError says more, and NCCL_DEBUG=WARN prints it)",
        3 => c"internal error (ncclGetLastError says more, and NCCL_DEBUG=WARN prints it)",
        4 => c"invalid argument (ncclGetLastError says more, and NCCL_DEBUG=WARN prints it)",
        5 => c"invalid usage (ncclGetLastError says more, and NCCL_DEBUG=WARN prints it)",
        6 => c"remote process exited, or did not come in time (ncclGetLastError says more, and NCCL_DEBUG=WARN prints it)",
        IN_PROGRESS => c"in progress",
        _ => c"unknown result code",
    };
    name.as_ptr()
}

/// Text of this thread's last error, or of the process' where this one had none; see `nccl.h`. Valid until the thread's next call.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: *mut communicators::Comm) -> *const c_char {
    let told = LAST_ERROR.try_with(|last| {
        let mut last = last.borrow_mut();
        if !last.is_own {
            let of_all = LAST_OF_ALL.lock().unwrap_or_else(PoisonError::into_inner).clone();
            last.text = of_all.unwrap_or_default();
        }
        last.text.as_ptr()
    });
    told.unwrap_or(c"".as_ptr())
}

/// See `nccl.h`: `NCCL_DEBUG` and its like are read again.
#[unsafe(no_mangle)]
pub extern "C" fn ncclResetDebugInit() {
    debug::reset();
}

/// As [`ncclResetDebugInit`], by the name that NCCL's own tools call.
#[unsafe(no_mangle)]
pub extern "C" fn ncclResetDebugInitInternal() {
    ncclResetDebugInit();
}
