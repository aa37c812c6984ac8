//! C API: memory channels of kernels (`mccsMemoryChannelsCreate` and kin).

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use mccs::Error;
use mccs::cuda::{CudaCommunicator, DeviceMemoryChannel, MemoryChannels, MemoryChannelsPart, OwnMemoryChannels};

use super::communicators::{CComm, Memory};
use super::handle::{Kind, handle_of, object, take};
use super::{SUCCESS, Status, guard, put, rank};

/// Behind `mccsMemoryChannels_t`: first this rank's part alone.
pub struct CMemoryChannels(Mutex<State>);

enum State {
    Own(OwnMemoryChannels),
    Open(MemoryChannels),
    /// Opening has failed.
    Failed,
}

impl Kind for CMemoryChannels {
    const WORD: &'static str = "set of memory channels";
}

/// `mccsMemoryChannelsPart_t`.
pub type CMemoryChannelsPart = [u8; MemoryChannelsPart::BYTES];

/// Calls a method of a communicator's handle, if it is one of GPUs.
fn of_gpus<T>(comm: *mut CComm, method: impl FnOnce(&CudaCommunicator) -> Result<T, Error>) -> Result<T, Error> {
    let comm = object(comm, "comm")?;
    comm.check_open()?;
    match &comm.memory {
        Memory::Cuda(comm) => method(comm),
        Memory::Host(_) => {
            Err(Error::argument("memory channels are for communicators of GPUs; there are port channels"))
        }
    }
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsMemoryChannelsCreate(
    channels: *mut *mut CMemoryChannels,
    comm: *mut CComm,
    ptr: *mut c_void,
    bytes: usize,
    tags: u32,
    part: *mut CMemoryChannelsPart,
) -> Status {
    guard(|| {
        if channels.is_null() {
            return Err(Error::argument("channels is null"));
        }
        let own = of_gpus(comm, |comm| comm.prepare_memory_channels(ptr as u64, bytes as u64, tags))?;
        // SAFETY: the caller's contract.
        unsafe {
            put(part, own.part().to_bytes(), "part")?;
            put(channels, handle_of(CMemoryChannels(Mutex::new(State::Own(own))))?, "channels")
        }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsMemoryChannelsOpen(
    channels: *mut CMemoryChannels,
    comm: *mut CComm,
    parts: *const CMemoryChannelsPart,
) -> Status {
    guard(|| {
        let channels = object(channels, "channels")?;
        if parts.is_null() {
            return Err(Error::argument("parts is null"));
        }
        of_gpus(comm, |comm| {
            // SAFETY: the caller's contract: one for each rank.
            let parts = unsafe { std::slice::from_raw_parts(parts, comm.nranks() as usize) };
            let parts: Vec<_> = parts.iter().map(MemoryChannelsPart::from_bytes).collect();
            let mut state = channels.0.lock().unwrap_or_else(PoisonError::into_inner);
            let own = match std::mem::replace(&mut *state, State::Failed) {
                State::Own(own) => own,
                before => {
                    *state = before;
                    return Err(Error::argument("the channels were opened before"));
                }
            };
            *state = State::Open(comm.open_memory_channels(own, &parts)?);
            Ok(SUCCESS)
        })
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsMemoryChannelDevice(
    channels: *mut CMemoryChannels,
    peer: i32,
    tag: u32,
    device: *mut DeviceMemoryChannel,
) -> Status {
    guard(|| {
        let channels = object(channels, "channels")?;
        let state = channels.0.lock().unwrap_or_else(PoisonError::into_inner);
        let State::Open(open) = &*state else {
            return Err(Error::argument("the channels are not open: mccsMemoryChannelsOpen comes first, on each rank"));
        };
        // SAFETY: the caller's contract.
        unsafe { put(device, open.channel(rank(peer)?, tag)?, "device") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsMemoryChannelsDestroy(channels: *mut CMemoryChannels) -> Status {
    guard(|| take(channels, "channels").map(|_| SUCCESS))
}
