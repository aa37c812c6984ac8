//! Windows (`ncclCommWindowRegister`): memory that programs register to reach it from other ranks.
//!
//! Ranks tell each other where their parts are when they register, and map those of the others: for copies of `ncclPutSignal`, and for kernels of the
//! caller's (`ncclGetPeerDevicePointer`). Ranks that cannot reach each other have windows as well: collectives on the
//! buffer work as on any other, and whoever asks for a peer's address hears why there is none. Handles are numbers and never
//! addresses, so that a stale one is an invalid argument.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use mccs::Error;
use mccs::cuda::WindowPart;

use super::communicators::{Comm, Made};
use super::device_comm::Team;
use super::group::begin_made;
use super::{SUCCESS, Status, guard, guard_in_group, put, rank, refused};

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
    peers: Arc<Peers>,
}

/// Parts of a window that a rank reaches; nothing until all ranks have told, and where ranks reach nobody.
pub(crate) type Peers = OnceLock<mccs::cuda::Window>;

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

/// The windows of a communicator that is no longer, to be dropped once it has ended: that unmaps what its streams may still write.
#[must_use]
pub(crate) fn take_windows(comm: *const Comm) -> Windowed {
    let of_it = |_: &usize, window: &mut Window| window.comm == comm as usize;
    Windowed(windows().registered.extract_if(.., of_it).map(|(_, window)| window).collect())
}

/// Windows that nobody finds any more. Dropped without the lock: unmapping may wait for the GPU.
pub(crate) struct Windowed(#[allow(dead_code, reason = "kept until it is dropped")] Vec<Window>);

/// Registers a buffer, on every rank of the communicator; see `nccl.h`. The handle is there at once, in a group too; in one the others are told at
/// its end.
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
        let member = Comm::of(comm)?;
        if buffer.is_null() || bytes == 0 || window.is_null() {
            return Err(Error::InvalidArgument(format!("a window of {bytes} bytes at {buffer:p} into {window:p}")));
        }
        if flags & !KNOWN_FLAGS != 0 {
            return Err(Error::InvalidArgument(format!("ncclCommWindowRegister does not know the flags {flags:#x}")));
        }
        let reaches_peers = member.comm()?.has_windows();
        // A rank without one meets the others all the same, who wait for it.
        let part = reaches_peers.then(|| member.comm()?.window_part(buffer as u64, bytes as u64));
        let peers = Arc::<Peers>::default();
        let known = Window { comm: comm as usize, buffer: buffer as usize, bytes, peers: Arc::clone(&peers) };
        let handle = windows().add(known);
        // SAFETY: the caller's contract.
        unsafe { put(window, handle as *mut c_void, "win") }?;
        let Some(part) = part else { return Ok(SUCCESS) };
        let own = member.clone();
        let meet = move |_| {
            let (told, fault) = part.map_or_else(|error| (WindowPart::NONE, Err(error)), |part| (part, Ok(())));
            let met = own.meet(&told).and_then(|window| fault.map(|()| drop(peers.set(window))));
            met.inspect_err(|_| drop(windows().registered.remove(&handle)))?;
            Ok(None)
        };
        begin_made(true, None, Some(member), Box::new(meet)).inspect_err(|_| {
            // SAFETY: the caller's contract; it was written above.
            unsafe { window.write(std::ptr::null_mut()) }
        })
    })
}

impl Made {
    /// Tells the other ranks of a part of a window, and hears of theirs.
    fn meet(&self, own: &WindowPart) -> Result<mccs::cuda::Window, Error> {
        let parts: Vec<_> = self.gather_bytes(&own.to_bytes())?.iter().map(WindowPart::from_bytes).collect();
        self.comm()?.open_window(&parts)
    }
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
        let mut known = windows();
        known.of(comm, window)?;
        let ended = known.registered.remove(&(window as usize));
        // Unmapping may wait for the GPU, and others for the lock.
        drop(known);
        drop(ended);
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

/// Address of an offset of a rank's part of a window, in the caller's context.
fn peer_address(window: *const c_void, offset: usize, peer: c_int) -> Result<u64, Error> {
    let peers = Arc::clone(&windows().find(window)?.peers);
    peers.get().ok_or_else(unmet)?.address(rank(peer)?, offset as u64, 0)
}

/// Parts of a communicator's window that a rank reaches.
pub(crate) fn peers_of(comm: *const Comm, window: *const c_void) -> Result<Arc<Peers>, Error> {
    windows().of(comm, window).map(|window| Arc::clone(&window.peers))
}

/// Why a window has no peers.
pub(crate) fn unmet() -> Error {
    refused(
        "windows",
        "ranks reach nobody's memory: they are on several hosts, their GPUs do not reach each other, their streams wait for no words, the operator has \
         the service carry collectives out or name memory by descriptors alone, or the group in which the window is registered has not ended; use \
         ncclSend and ncclRecv, or a collective",
    )
}

/// See `nccl_device/host.h`. All ranks that reach each other are one team.
///
/// # Safety
/// Pointers as there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLsaDevicePointer(
    window: *const c_void,
    offset: usize,
    lsa_rank: c_int,
    address: *mut *mut c_void,
) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(address, peer_address(window, offset, lsa_rank)? as *mut c_void, "outPtr") })
}

/// See `nccl_device/host.h`.
///
/// # Safety
/// Pointers as there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetPeerDevicePointer(
    window: *const c_void,
    offset: usize,
    peer: c_int,
    address: *mut *mut c_void,
) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(address, peer_address(window, offset, peer)? as *mut c_void, "outPtr") })
}

/// Refuses what only multicast and the network's endpoints have, once the window and the offset are right.
fn no_endpoint(function: &str, window: *const c_void, offset: usize) -> Status {
    guard(|| {
        let bytes = windows().find(window)?.bytes;
        if offset > bytes {
            return Err(Error::InvalidArgument(format!("offset {offset} lies beyond a window of {bytes} bytes")));
        }
        Err(refused(
            function,
            "there is neither multicast nor an endpoint; use ncclGetPeerDevicePointer, or a collective",
        ))
    })
}

/// Refused: see [`no_endpoint`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLsaMultimemDevicePointer(
    window: *const c_void,
    offset: usize,
    _address: *mut *mut c_void,
) -> Status {
    no_endpoint("ncclGetLsaMultimemDevicePointer", window, offset)
}

/// `ncclMultimemHandle_t`: the address of a multicast object.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct MultimemHandle(*mut c_void);

/// Refused: see [`no_endpoint`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetMultimemDevicePointer(
    window: *const c_void,
    offset: usize,
    _multimem: MultimemHandle,
    _address: *mut *mut c_void,
) -> Status {
    no_endpoint("ncclGetMultimemDevicePointer", window, offset)
}

/// Refused: see [`no_endpoint`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetMultimemDeviceLeInfo(
    window: *const c_void,
    offset: usize,
    _endpoint: *mut u32,
    _endpoint_offset: *mut usize,
) -> Status {
    no_endpoint("ncclGetMultimemDeviceLeInfo", window, offset)
}

/// Refused: see [`no_endpoint`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetCftDeviceLeInfo(
    window: *const c_void,
    offset: usize,
    _peer: c_int,
    _team: Team,
    _endpoint: *mut u32,
    _endpoint_offset: *mut usize,
) -> Status {
    no_endpoint("ncclGetCftDeviceLeInfo", window, offset)
}

/// Refused: see [`no_endpoint`].
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetPeerDeviceLeInfo(
    window: *const c_void,
    offset: usize,
    _peer: c_int,
    _endpoint: *mut u32,
    _endpoint_offset: *mut usize,
) -> Status {
    no_endpoint("ncclGetPeerDeviceLeInfo", window, offset)
}
