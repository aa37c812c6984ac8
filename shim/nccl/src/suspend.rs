//! Suspending a communicator: its GPU memory is given back, and taken again.

use std::ffi::c_int;

use super::communicators::Comm;
use super::{Status, guard_in_group, refused};

/// Refused; see `nccl.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommSuspend(comm: *mut Comm, _flags: c_int) -> Status {
    guard_in_group(|| {
        Comm::of(comm)?;
        Err(refused("ncclCommSuspend", "destroy the communicator, and make it again when it is needed"))
    })
}

/// Refused; see `nccl.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommResume(comm: *mut Comm) -> Status {
    guard_in_group(|| {
        Comm::of(comm)?;
        Err(refused("ncclCommResume", "the communicator is not suspended"))
    })
}

/// Refused; see `nccl.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommMemStats(comm: *mut Comm, _stat: c_int, _value: *mut u64) -> Status {
    guard_in_group(|| {
        Comm::of(comm)?;
        Err(refused("ncclCommMemStats", "ask the operator: `mccsctl tenants` shows GPU memory"))
    })
}
