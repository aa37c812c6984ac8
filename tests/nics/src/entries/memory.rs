//! Protection domains and registrations.

use std::ffi::{c_int, c_uint, c_void};

use super::{fail, nic};
use crate::abi::{Context, Mr, Pd};
use crate::memory::Region;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_alloc_pd(context: *mut Context) -> *mut Pd {
    Box::into_raw(Box::new(Pd { context, handle: 0 }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dealloc_pd(pd: *mut Pd) -> c_int {
    // SAFETY: made by `ibv_alloc_pd`, ended once.
    drop(unsafe { Box::from_raw(pd) });
    0
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_mr(pd: *mut Pd, addr: *mut c_void, length: usize, access: c_int) -> *mut Mr {
    // SAFETY: the caller's promises are those of the other call.
    unsafe { ibv_reg_mr_iova2(pd, addr, length, addr as u64, access as c_uint) }
}

/// Whether this process may lock so much memory at once: devices of the kernel lock what is registered.
fn may_lock(bytes: usize) -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: room for the limit.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    bytes as u64 <= limit.rlim_cur || is_privileged()
}

/// Whether this process has the capability to lock what it likes (14).
fn is_privileged() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> 14 & 1 != 0)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut Mr {
    if length == 0 {
        return fail(libc::EINVAL);
    }
    // SAFETY: a protection domain that lives.
    let context = unsafe { (*pd).context };
    if !may_lock(length) {
        return fail(libc::ENOMEM);
    }
    let region = Region { iova, base: addr as u64, bytes: length as u64, access };
    // SAFETY: its context is open.
    let key = unsafe { nic(context) }.lock().regions.add(region);
    Box::into_raw(Box::new(Mr { context, pd, addr, length, handle: key, lkey: key, rkey: key }))
}

/// Buffers of other devices cannot be had: the driver of this one is no kernel's.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn ibv_reg_dmabuf_mr(
    _pd: *mut Pd,
    _offset: u64,
    _length: usize,
    _iova: u64,
    _fd: c_int,
    _access: c_int,
) -> *mut Mr {
    fail(libc::EOPNOTSUPP)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dereg_mr(mr: *mut Mr) -> c_int {
    // SAFETY: made by a registration, ended once.
    let mr = unsafe { Box::from_raw(mr) };
    // SAFETY: its context is open.
    unsafe { nic(mr.context) }.lock().regions.remove(mr.lkey);
    0
}
