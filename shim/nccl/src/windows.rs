//! Windows (`ncclCommWindowRegister`): symmetric memory that programs register to reach it from
//! other ranks.
//!
//! A window has an owner's address and a length, and collectives on its buffer work as on any other. Nobody reaches it from another rank yet:
//! calls that ask for a peer's address are refused. Handles are numbers and never addresses, so that a stale one is an invalid argument.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use mccs::Error;

use super::communicators::Comm;
use super::device_comm::Team;
use super::{SUCCESS, Status, guard, guard_in_group, put, refused};

/// Every flag of `ncclCommWindowRegister` (`NCCL_WIN_*`).
const KNOWN_FLAGS: c_int = 0x0f;
/// The first handle; the others follow. No object lies at such an address.
const FIRST_HANDLE: usize = 0xacc5_0000_0000_0010;
/// The distance of two handles.
const HANDLE_STEP: usize = 0x10;

/// A buffer that is registered with a communicator.
struct Window {
    /// The communicator's handle.
    comm: usize,
    buffer: usize,
    bytes: usize,
}

/// All windows of the process, by handle.
#[derive(Default)]
struct Windows {
    registered: BTreeMap<usize, Window>,
    /// How many there have been.
    count: usize,
}

static WINDOWS: Mutex<Windows> = Mutex::new(Windows { registered: BTreeMap::new(), count: 0 });

fn windows() -> MutexGuard<'static, Windows> {
    WINDOWS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Windows {
    fn add(&mut self, window: Window) -> usize {
        let handle = FIRST_HANDLE.wrapping_add(self.count.wrapping_mul(HANDLE_STEP));
        self.count += 1;
        self.registered.insert(handle, window);
        handle
    }

    fn find(&self, window: *const c_void) -> Result<&Window, Error> {
        self.registered.get(&(window as usize)).ok_or_else(|| unknown(window))
    }

    /// The window of a communicator.
    fn of(&self, comm: *const Comm, window: *const c_void) -> Result<&Window, Error> {
        self.find(window).and_then(|found| if found.comm == comm as usize { Ok(found) } else { Err(unknown(window)) })
    }
}

fn unknown(window: *const c_void) -> Error {
    Error::InvalidArgument(format!("{window:p} is no window of the communicator; was it deregistered?"))
}

/// Forgets the windows of a communicator that is no longer.
pub(crate) fn forget_windows(comm: *const Comm) {
    windows().registered.retain(|_, window| window.comm != comm as usize);
}

/// Registers a buffer, on every rank of the communicator; see `nccl.h`. The handle is there at once, in a group too.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommWindowRegister(
    comm: *mut Comm,
    buffer: *mut c_void,
    bytes: usize,
    window: *mut *mut c_void,
    flags: c_int,
) -> Status {
    guard_in_group(|| {
        Comm::of(comm)?;
        if buffer.is_null() || bytes == 0 || window.is_null() {
            return Err(Error::InvalidArgument(format!("a window of {bytes} bytes at {buffer:p} into {window:p}")));
        }
        if flags & !KNOWN_FLAGS != 0 {
            return Err(Error::InvalidArgument(format!("ncclCommWindowRegister does not know the flags {flags:#x}")));
        }
        let handle = windows().add(Window { comm: comm as usize, buffer: buffer as usize, bytes });
        // SAFETY: the caller's contract.
        unsafe { put(window, handle as *mut c_void, "win") }.map(|()| SUCCESS)
    })
}

/// Ends a registration; see `nccl.h`. A null window is none.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommWindowDeregister(comm: *mut Comm, window: *mut c_void) -> Status {
    guard(|| {
        if window.is_null() {
            return Ok(());
        }
        let mut windows = windows();
        windows.of(comm, window)?;
        windows.registered.remove(&(window as usize));
        Ok(())
    })
}

/// The address at which the caller has registered a window; see `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclWinGetUserPtr(comm: *mut Comm, window: *mut c_void, address: *mut *mut c_void) -> Status {
    guard(|| {
        let buffer = windows().of(comm, window)?.buffer;
        // SAFETY: the caller's contract.
        unsafe { put(address, buffer as *mut c_void, "outUserPtr") }
    })
}

/// Refuses a peer's address in a window, once the window and the offset are right.
fn unreachable_peer(function: &str, window: *const c_void, offset: usize) -> Status {
    guard(|| {
        let bytes = windows().find(window)?.bytes;
        if offset > bytes {
            return Err(Error::InvalidArgument(format!("offset {offset} lies beyond a window of {bytes} bytes")));
        }
        Err(refused(
            function,
            "no peer's memory is mapped into this process; use ncclSend and ncclRecv, or a collective",
        ))
    })
}

/// Refused: see [`unreachable_peer`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLsaDevicePointer(
    window: *const c_void,
    offset: usize,
    _lsa_rank: c_int,
    _address: *mut *mut c_void,
) -> Status {
    unreachable_peer("ncclGetLsaDevicePointer", window, offset)
}

/// Refused: see [`unreachable_peer`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetPeerDevicePointer(
    window: *const c_void,
    offset: usize,
    _peer: c_int,
    _address: *mut *mut c_void,
) -> Status {
    unreachable_peer("ncclGetPeerDevicePointer", window, offset)
}

/// Refused: see [`unreachable_peer`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLsaMultimemDevicePointer(
    window: *const c_void,
    offset: usize,
    _address: *mut *mut c_void,
) -> Status {
    unreachable_peer("ncclGetLsaMultimemDevicePointer", window, offset)
}

/// `ncclMultimemHandle_t`: the address of a multicast object.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct MultimemHandle(*mut c_void);

/// Refused: see [`unreachable_peer`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetMultimemDevicePointer(
    window: *const c_void,
    offset: usize,
    _multimem: MultimemHandle,
    _address: *mut *mut c_void,
) -> Status {
    unreachable_peer("ncclGetMultimemDevicePointer", window, offset)
}

/// Refused: see [`unreachable_peer`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetMultimemDeviceLeInfo(
    window: *const c_void,
    offset: usize,
    _endpoint: *mut u32,
    _endpoint_offset: *mut usize,
) -> Status {
    unreachable_peer("ncclGetMultimemDeviceLeInfo", window, offset)
}

/// Refused: see [`unreachable_peer`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetCftDeviceLeInfo(
    window: *const c_void,
    offset: usize,
    _peer: c_int,
    _team: Team,
    _endpoint: *mut u32,
    _endpoint_offset: *mut usize,
) -> Status {
    unreachable_peer("ncclGetCftDeviceLeInfo", window, offset)
}

/// Refused: see [`unreachable_peer`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetPeerDeviceLeInfo(
    window: *const c_void,
    offset: usize,
    _peer: c_int,
    _endpoint: *mut u32,
    _endpoint_offset: *mut usize,
) -> Status {
    unreachable_peer("ncclGetPeerDeviceLeInfo", window, offset)
}
