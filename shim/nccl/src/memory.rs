//! Memory: plain allocations; registration, which nothing here needs.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, PoisonError};

use mccs::Error;
use mccs_cuda::{DeviceMemory, while_capturing};

use super::communicators::{Comm, caller_context, cuda_error};
use super::{Status, absent, guard, put};

/// What [`ncclMemAlloc`] has given out, by address.
static ALLOCATED: Mutex<BTreeMap<usize, DeviceMemory>> = Mutex::new(BTreeMap::new());

/// What registrations are answered with: any pointer that is not null.
static REGISTERED: u8 = 0;

/// See `nccl.h`; also while a stream is captured, as NCCL's: allocators of frameworks call it then.
///
/// # Safety
/// The pointer must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclMemAlloc(ptr: *mut *mut c_void, bytes: usize) -> Status {
    guard(|| {
        mccs_cuda::driver()?;
        let context = caller_context()?;
        let memory = while_capturing(|| DeviceMemory::new(&context, bytes.max(1)))??;
        let address = memory.address() as usize;
        // SAFETY: the caller's contract.
        unsafe { put(ptr, address as *mut c_void, "ptr")? };
        ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner).insert(address, memory);
        Ok(())
    })
}

/// See `nccl.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclMemFree(ptr: *mut c_void) -> Status {
    guard(|| {
        let taken = ALLOCATED.lock().unwrap_or_else(PoisonError::into_inner).remove(&(ptr as usize));
        if taken.is_none() && !ptr.is_null() {
            return Err(Error::InvalidArgument(format!("{ptr:p} is not from ncclMemAlloc")));
        }
        taken.map_or(Ok(()), |memory| while_capturing(|| drop(memory)).map_err(cuda_error))
    })
}

/// Accepted: buffers need no registration.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(
    comm: *const Comm,
    _buffer: *mut c_void,
    _bytes: usize,
    handle: *mut *mut c_void,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe {
            Comm::of(comm)?;
            put(handle, (&raw const REGISTERED).cast_mut().cast(), "handle")
        }
    })
}

/// See [`ncclCommRegister`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDeregister(_comm: *const Comm, _handle: *mut c_void) -> Status {
    super::SUCCESS
}

/// Accepted, with no window: programs that get none go on without.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommWindowRegister(
    comm: *mut Comm,
    _buffer: *mut c_void,
    _bytes: usize,
    window: *mut *mut c_void,
    _flags: c_int,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        unsafe {
            Comm::of(comm)?;
            put(window, std::ptr::null_mut(), "window")
        }
    })
}

/// See [`ncclCommWindowRegister`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommWindowDeregister(_comm: *mut Comm, _window: *mut c_void) -> Status {
    super::SUCCESS
}

/// Not there.
#[unsafe(no_mangle)]
pub extern "C" fn ncclDevCommCreate(_comm: *mut Comm, _wanted: *const c_void, _made: *mut c_void) -> Status {
    guard(|| Err(absent("communicators for kernels of the caller's (ncclDevCommCreate)")))
}

/// Not there.
#[unsafe(no_mangle)]
pub extern "C" fn ncclDevCommDestroy(_comm: *mut Comm, _made: *const c_void) -> Status {
    guard(|| Err(absent("communicators for kernels of the caller's (ncclDevCommDestroy)")))
}
