//! C API: port channels and their memory (`mccsPortChannelPut` and kin).

use std::ffi::c_void;
use std::time::Duration;

use mccs::bindings::span_at;
use mccs::{DevicePortChannel, Error, PortChannel, PortChannels, RegisteredMemory, RemoteMemory};

use super::communicators::{CComm, Memory};
use super::handle::{Kind, handle_of, object, take};
use super::{IN_PROGRESS, SUCCESS, Status, guard, put, rank};

/// Behind `mccsChannelMemory_t`.
pub struct CChannelMemory(RegisteredMemory);

impl Kind for CChannelMemory {
    const WORD: &'static str = "memory of channels";
}

/// Behind `mccsPortChannel_t`.
pub struct CPortChannel(PortChannel);

impl Kind for CPortChannel {
    const WORD: &'static str = "port channel";
}

/// `mccsRemoteMemory_t`.
pub type CRemoteMemory = [u8; RemoteMemory::BYTES];

/// Port channels of a communicator's handle.
fn channels(comm: *mut CComm) -> Result<PortChannels, Error> {
    let comm = object(comm, "comm")?;
    comm.check_open()?;
    match &comm.memory {
        Memory::Host(comm) => comm.port_channels(),
        Memory::Cuda(comm) => comm.port_channels(),
    }
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsChannelMemoryRegister(
    memory: *mut *mut CChannelMemory,
    comm: *mut CComm,
    ptr: *mut c_void,
    bytes: usize,
) -> Status {
    guard(|| {
        if memory.is_null() {
            return Err(Error::argument("memory is null"));
        }
        let (channels, comm) = (channels(comm)?, object(comm, "comm")?);
        let made = match &comm.memory {
            Memory::Host(comm) => channels.register(span_at(comm.client(), ptr as usize), bytes as u64)?,
            // SAFETY: the caller's contract, as `mccs.h` has it.
            Memory::Cuda(_) => unsafe { channels.register_gpu(ptr as u64, bytes as u64)? },
        };
        // SAFETY: the caller's contract.
        unsafe { put(memory, handle_of(CChannelMemory(made))?, "memory") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsChannelMemoryRemote(memory: *mut CChannelMemory, remote: *mut CRemoteMemory) -> Status {
    guard(|| {
        let told = object(memory, "memory")?.0.remote().to_bytes();
        // SAFETY: the caller's contract.
        unsafe { put(remote, told, "remote") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsChannelMemoryFree(memory: *mut CChannelMemory) -> Status {
    guard(|| take(memory, "memory").map(|_| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsPortChannelCreate(
    channel: *mut *mut CPortChannel,
    comm: *mut CComm,
    peer: i32,
    tag: u32,
    from: *mut CChannelMemory,
    into: *const CRemoteMemory,
) -> Status {
    guard(|| {
        if channel.is_null() {
            return Err(Error::argument("channel is null"));
        }
        // SAFETY: the caller's contract.
        let into = unsafe { into.as_ref() };
        let channels = channels(comm)?;
        let made = match (from.is_null(), into) {
            (true, None) => channels.signal_channel(rank(peer)?, tag)?,
            (false, Some(into)) => {
                channels.channel(rank(peer)?, tag, &object(from, "from")?.0, &RemoteMemory::from_bytes(into)?)?
            }
            _ => return Err(Error::argument("a channel has both memories, or neither: one of from and into is null")),
        };
        // SAFETY: the caller's contract.
        unsafe { put(channel, handle_of(CPortChannel(made))?, "channel") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsPortChannelDestroy(channel: *mut CPortChannel) -> Status {
    guard(|| take(channel, "channel").map(|_| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsPortChannelDevice(channel: *mut CPortChannel, device: *mut DevicePortChannel) -> Status {
    guard(|| {
        let made = object(channel, "channel")?.0.device();
        let of_host = || Error::argument("the channel is of a communicator of host memory, which kernels do not use");
        // SAFETY: the caller's contract.
        unsafe { put(device, made.ok_or_else(of_host)?, "device") }
    })
}

/// See `mccs.h`.
#[unsafe(no_mangle)]
pub extern "C" fn mccsPortChannelsWake(comm: *mut CComm) -> Status {
    guard(|| {
        channels(comm)?.wake();
        Ok(SUCCESS)
    })
}

/// Calls a method of the channel behind a handle.
fn call(channel: *mut CPortChannel, method: impl FnOnce(&PortChannel) -> Result<(), Error>) -> Status {
    guard(|| method(&object(channel, "channel")?.0).map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsPortChannelPut(
    channel: *mut CPortChannel,
    from_offset: u64,
    into_offset: u64,
    bytes: u64,
) -> Status {
    call(channel, |channel| channel.put(from_offset, into_offset, bytes))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsPortChannelSignal(channel: *mut CPortChannel) -> Status {
    call(channel, PortChannel::signal)
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsPortChannelPutWithSignal(
    channel: *mut CPortChannel,
    from_offset: u64,
    into_offset: u64,
    bytes: u64,
) -> Status {
    call(channel, |channel| channel.put_with_signal(from_offset, into_offset, bytes))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsPortChannelPutWithSignalAndFlush(
    channel: *mut CPortChannel,
    from_offset: u64,
    into_offset: u64,
    bytes: u64,
) -> Status {
    call(channel, |channel| channel.put_with_signal_and_flush(from_offset, into_offset, bytes))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsPortChannelFlush(channel: *mut CPortChannel) -> Status {
    call(channel, PortChannel::flush)
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsPortChannelWait(channel: *mut CPortChannel) -> Status {
    call(channel, PortChannel::wait)
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsPortChannelWaitFor(channel: *mut CPortChannel, timeout_ms: u64) -> Status {
    guard(|| {
        let has_come = object(channel, "channel")?.0.wait_for(Duration::from_millis(timeout_ms))?;
        Ok(if has_come { SUCCESS } else { IN_PROGRESS })
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsPortChannelPoll(channel: *mut CPortChannel, has_come: *mut i32) -> Status {
    guard(|| {
        let has = object(channel, "channel")?.0.poll()?;
        // SAFETY: the caller's contract.
        unsafe { put(has_come, i32::from(has), "has_come") }
    })
}
