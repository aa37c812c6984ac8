//! `ncclMemAlloc`, `ncclMemFree`, `ncclCommRegister`: plain allocations, and registration, which
//! nothing here needs.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use mccs::Error;
use mccs_cuda::{DeviceMemory, while_capturing};

use super::communicators::{Comm, caller_context, cuda_error};
use super::{Status, guard, put};

/// Memory that [`ncclMemAlloc`] has given out, by address.
static ALLOCATED: Mutex<BTreeMap<usize, DeviceMemory>> = Mutex::new(BTreeMap::new());

/// Answer to registrations: any pointer that is not null.
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
        Comm::of(comm)?;
        // SAFETY: the caller's contract.
        unsafe { put(handle, (&raw const REGISTERED).cast_mut().cast(), "handle") }
    })
}

/// See [`ncclCommRegister`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDeregister(comm: *const Comm, _handle: *mut c_void) -> Status {
    guard(|| Comm::behind(comm).map(drop))
}
