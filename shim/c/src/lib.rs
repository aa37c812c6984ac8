//! The C API (`include/mccs.h`): the Rust calls with NCCL's names and result codes, on raw
//! addresses.
//!
//! Every function catches panics, checks handles and null pointers, and leaves a text for [`mccsGetLastError`]. Addresses are
//! looked up in the client's table of regions.

#![deny(missing_docs)]
#![allow(non_snake_case, reason = "names of a C API")]

mod bootstrap;
mod collectives;
mod communicators;
mod handle;
mod memory_channels;
mod objects;
mod operators;
mod port_channels;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mccs::{Client, Error, ErrorClass, Region, Stream, bindings};

use self::communicators::{CComm, Memory};
use self::handle::Kind;

/// `mccsResult_t`.
type Status = i32;
const SUCCESS: Status = 0;
const IN_PROGRESS: Status = 7;

/// Behind `mccsClient_t`.
pub struct CClient {
    client: Client,
    root_address: Option<CString>,
    /// Regions that C owns, by address.
    regions: Mutex<BTreeMap<usize, Region>>,
    /// How long ranks wait for others when they join; 0 for as long as the operator says.
    init_timeout_ms: AtomicU64,
}

impl Kind for CClient {
    const WORD: &'static str = "client";
}

impl CClient {
    fn init_timeout(&self) -> Option<Duration> {
        Some(self.init_timeout_ms.load(Ordering::Relaxed)).filter(|ms| *ms > 0).map(Duration::from_millis)
    }
}

/// Behind `mccsStream_t`.
pub struct CStream(Stream);

impl Kind for CStream {
    const WORD: &'static str = "stream of mccsStreamCreate";
}

/// A `mccsCommInitRank` that waits for the end of its group.
struct PendingJoin {
    rank: bindings::JoiningRank,
    target: *mut *mut CComm,
}

#[derive(Default)]
struct ThreadState {
    last_error: CString,
    group_depth: u32,
    joins: Vec<PendingJoin>,
}

thread_local! {
    static THREAD: RefCell<ThreadState> = RefCell::default();
}

fn status_of(error: &Error) -> Status {
    if matches!(error, Error::Cuda { .. }) {
        return 1;
    }
    match error.class() {
        ErrorClass::System => 2,
        ErrorClass::Internal => 3,
        ErrorClass::InvalidArgument => 4,
        ErrorClass::InvalidUsage => 5,
        ErrorClass::Remote => 6,
        ErrorClass::Timeout => 8,
    }
}

/// Runs a call, and turns what it gives into a status and a text.
fn guard(call: impl FnOnce() -> Result<Status, Error>) -> Status {
    let result = catch_unwind(AssertUnwindSafe(call));
    let (status, text) = match result {
        Ok(Ok(status)) => return status,
        Ok(Err(error)) => (status_of(&error), error.to_string()),
        Err(_) => (3, "a bug in mccs: the call panicked".into()),
    };
    remember(&text);
    status
}

/// As [`guard`], for a call that a group collects: where it fails, the group enqueues nothing, and its end returns the same.
fn guard_in_group(call: impl FnOnce() -> Result<Status, Error>) -> Status {
    guard(|| call().inspect_err(|error| bindings::group_refuse(error.clone())))
}

/// Acts on the calling thread's state. One that ends has nothing any more.
fn of_thread<R>(act: impl FnOnce(&mut ThreadState) -> R) -> Result<R, Error> {
    let ended = |_| Error::system("the calling thread ends");
    THREAD.try_with(|thread| act(&mut thread.borrow_mut())).map_err(ended)
}

/// Keeps a text for [`mccsGetLastError`].
fn remember(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that ends has none any more: who calls from there learns the status alone.
    let _ = of_thread(|thread| thread.last_error = text);
}

/// Writes an output argument.
///
/// # Safety
/// The pointer must be null or valid for a write.
unsafe fn put<T>(target: *mut T, value: T, what: &str) -> Result<Status, Error> {
    if target.is_null() {
        return Err(Error::argument(format!("{what} is null")));
    }
    // SAFETY: the caller's contract.
    unsafe { target.write(value) };
    Ok(SUCCESS)
}

/// A text argument; `None` for null.
///
/// # Safety
/// The pointer must be null or lead to a zero-terminated string.
unsafe fn text<'a>(ptr: *const c_char, what: &str) -> Result<Option<&'a str>, Error> {
    if ptr.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's contract.
    let text = unsafe { std::ffi::CStr::from_ptr(ptr) };
    text.to_str().map(Some).map_err(|_| Error::argument(format!("{what} is no UTF-8")))
}

/// A rank's number.
fn rank(value: i32) -> Result<u32, Error> {
    u32::try_from(value).map_err(|_| Error::argument(format!("rank {value} is negative")))
}

/// Opens a group; see `mccs.h`.
#[unsafe(no_mangle)]
pub extern "C" fn mccsGroupStart() -> Status {
    guard(|| {
        bindings::group_start();
        of_thread(|thread| thread.group_depth += 1)?;
        Ok(SUCCESS)
    })
}

/// Closes a group; see `mccs.h`.
#[unsafe(no_mangle)]
pub extern "C" fn mccsGroupEnd() -> Status {
    guard(|| {
        let enqueued = bindings::group_end();
        let joins = of_thread(|thread| {
            thread.group_depth = thread.group_depth.saturating_sub(1);
            if thread.group_depth == 0 { std::mem::take(&mut thread.joins) } else { Vec::new() }
        })?;
        // All are finished, so that no answer is left over when one is an error.
        let finish = |join: PendingJoin| {
            let comm = join.rank.finish()?;
            // SAFETY: the caller of mccsCommInitRank keeps its output argument valid to the end of the group.
            unsafe { put(join.target, CComm::handle_of(Memory::Host(comm))?, "comm") }
        };
        let finished: Vec<_> = joins.into_iter().map(finish).collect();
        finished.into_iter().collect::<Result<Vec<_>, _>>()?;
        enqueued.map(|()| SUCCESS)
    })
}

/// Text of this thread's last error; see `mccs.h`.
#[unsafe(no_mangle)]
pub extern "C" fn mccsGetLastError() -> *const c_char {
    of_thread(|thread| thread.last_error.as_ptr()).unwrap_or(c"".as_ptr())
}

/// Name of a result; see `mccs.h`.
#[unsafe(no_mangle)]
pub extern "C" fn mccsGetErrorString(status: Status) -> *const c_char {
    let name = match status {
        SUCCESS => c"no error",
        1 => c"unhandled CUDA error",
        2 => c"system error",
        3 => c"internal error",
        4 => c"invalid argument",
        5 => c"invalid usage",
        6 => c"remote error",
        IN_PROGRESS => c"in progress",
        8 => c"timeout",
        _ => c"unknown result code",
    };
    name.as_ptr()
}
