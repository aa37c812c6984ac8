//! One-sided operations (`ncclPutSignal`, `ncclSignal`, `ncclWaitSignal`): refused. Windows have no
//! peers yet (`windows.rs`).

use std::ffi::{c_int, c_uint, c_void};

use super::communicators::Comm;
use super::{Status, guard_in_group, refused};

/// Refuses a one-sided operation on a communicator.
fn refuse(function: &str, comm: *const Comm) -> Status {
    guard_in_group(|| {
        Comm::of(comm)?;
        Err(refused(function, "one-sided operations are not supported; use ncclSend and ncclRecv in a group"))
    })
}

/// Refused; see `nccl.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclPutSignal(
    _local: *const c_void,
    _count: usize,
    _dtype: c_int,
    _peer: c_int,
    _window: *mut c_void,
    _offset: usize,
    _signal: c_int,
    _context: c_int,
    _flags: c_uint,
    comm: *mut Comm,
    _stream: *mut c_void,
) -> Status {
    refuse("ncclPutSignal", comm)
}

/// Refused; see `nccl.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclSignal(
    _peer: c_int,
    _signal: c_int,
    _context: c_int,
    _flags: c_uint,
    comm: *mut Comm,
    _stream: *mut c_void,
) -> Status {
    refuse("ncclSignal", comm)
}

/// Refused; see `nccl.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclWaitSignal(
    _descriptors: c_int,
    _signals: *mut c_void,
    comm: *mut Comm,
    _stream: *mut c_void,
) -> Status {
    refuse("ncclWaitSignal", comm)
}
