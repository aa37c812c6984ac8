//! Verbs of the emulated NICs: protection domains and memory registration (dma-buf too).

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::Ordering;

use super::{fail, nic};
use crate::abi::{Context, Mr, Pd};
use crate::gpu;
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
    // SAFETY: a protection domain that lives, of an open context.
    let port = unsafe { nic((*pd).context) }.port.words();
    let gpu = if length == 0 { None } else { gpu::owner(addr as u64, length as u64) };
    let is_refused = gpu.is_some() && port.refuses_peer_memory.load(Ordering::Relaxed) != 0;
    if length == 0 || is_refused {
        // The kernel finds no pages there.
        return fail(if length == 0 { libc::EINVAL } else { libc::EFAULT });
    }
    if gpu.is_none() && !may_lock(length) {
        return fail(libc::ENOMEM);
    }
    // SAFETY: as above.
    unsafe { add(pd, addr, Region { iova, base: addr as u64, bytes: length as u64, access, gpu }) }
}

/// # Safety
/// A protection domain that lives, of an open context.
unsafe fn add(pd: *mut Pd, addr: *mut c_void, region: Region) -> *mut Mr {
    // SAFETY: the caller's promise.
    let context = unsafe { (*pd).context };
    // SAFETY: the same.
    let nic = unsafe { nic(context) };
    if let Some(gpu) = region.gpu {
        nic.copies().prepare(gpu);
        nic.queue_pairs().values().for_each(|served| served.lock().pin(gpu));
        nic.bell.ring();
    }
    let key = nic.regions().add(region);
    Box::into_raw(Box::new(Mr { context, pd, addr, length: region.bytes as usize, handle: key, lkey: key, rkey: key }))
}

/// A buffer of another device's. Its descriptor leads this process to no address: `iova` is where the GPU has the bytes, as programs that
/// register memory of GPUs say it.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_reg_dmabuf_mr(
    pd: *mut Pd,
    _offset: u64,
    length: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut Mr {
    // SAFETY: a protection domain that lives, of an open context.
    let port = unsafe { nic((*pd).context) }.port.words();
    if port.refuses_dma_buf.load(Ordering::Relaxed) != 0 {
        return fail(libc::EOPNOTSUPP);
    }
    // Programs ask with a descriptor that is none whether buffers are taken at all.
    if !gpu::is_descriptor(fd) {
        return fail(libc::EBADF);
    }
    let Some(gpu) = gpu::owner(iova, length as u64).filter(|_| length > 0) else { return fail(libc::EINVAL) };
    let region = Region { iova, base: iova, bytes: length as u64, access: access as u32, gpu: Some(gpu) };
    // SAFETY: as above.
    unsafe { add(pd, null_mut(), region) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ibv_dereg_mr(mr: *mut Mr) -> c_int {
    // SAFETY: made by a registration, ended once.
    let mr = unsafe { Box::from_raw(mr) };
    // SAFETY: its context is open.
    let nic = unsafe { nic(mr.context) };
    nic.regions().remove(mr.lkey);
    // From here on nothing touches it.
    nic.queue_pairs().values().for_each(|served| served.lock().wait_for_copies());
    0
}
