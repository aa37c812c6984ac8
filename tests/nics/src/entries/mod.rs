//! Symbols of libibverbs in the emulated NICs, each as rdma-core's manual page says.

pub(crate) mod completions;
pub(crate) mod devices;
pub(crate) mod memory;
pub(crate) mod queue_pairs;
mod work_requests;

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;

use self::devices::Opened;
use crate::abi::{Context, DeviceAttr, PortAttr, QpAttr};
use crate::context::Nic;

const MAX_WRS: u32 = 1 << 14;
const MAX_CQE: c_int = 1 << 20;
const MAX_INLINE_BYTES: u32 = 256;
const MAX_SGE: c_int = 16;
const MAX_MESSAGE_BYTES: u32 = 1 << 30;

fn fail<T>(errno: c_int) -> *mut T {
    // SAFETY: this thread's errno.
    unsafe { *libc::__errno_location() = errno };
    null_mut()
}

fn errno_of(error: &std::io::Error) -> c_int {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// Structures of which all zero is a value.
///
/// # Safety
/// Integers, pointers and locks at rest alone.
unsafe trait Zero: Sized {
    fn zero() -> Self {
        // SAFETY: the trait's promise.
        unsafe { std::mem::zeroed() }
    }
}

// SAFETY: integers and pointers.
unsafe impl Zero for libc::Dl_info {}
// SAFETY: a lock at rest.
unsafe impl Zero for libc::pthread_mutex_t {}
// SAFETY: the same.
unsafe impl Zero for libc::pthread_cond_t {}
// SAFETY: integers.
unsafe impl Zero for DeviceAttr {}
// SAFETY: integers.
unsafe impl Zero for PortAttr {}
// SAFETY: integers.
unsafe impl Zero for QpAttr {}

/// Server of an open device.
///
/// # Safety
/// A context that is open.
unsafe fn nic<'a>(context: *mut Context) -> &'a Arc<Nic> {
    // SAFETY: the caller's promise: made by `ibv_open_device`.
    unsafe { &(*context.cast::<Opened>()).nic }
}

/// The calls for tests, which name a device by its folder.
#[cfg(test)]
pub(crate) mod tested {
    use std::path::Path;

    use super::devices::{entry, ibv_open_device};
    use super::*;
    use crate::files::Listed;

    /// Server of an open device.
    ///
    /// # Safety
    /// A context that is open.
    pub(crate) unsafe fn nic_of<'a>(context: *mut Context) -> &'a Nic {
        // SAFETY: the caller's promise.
        unsafe { nic(context) }
    }

    pub(crate) fn open_listed(folder: &Path, listed: &Listed) -> *mut Context {
        let device = Box::into_raw(Box::new(entry(folder.to_owned(), listed.clone())));
        // SAFETY: just made; an open context has a copy.
        unsafe {
            let context = ibv_open_device(device.cast());
            drop(Box::from_raw(device));
            context
        }
    }
}
