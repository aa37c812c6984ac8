//! Entry points of the emulated driver, which `mccs-cuda` looks up.
//!
//! A caller's pointer leads to something: that is the contract of every one of them, as of the driver's.

#![allow(non_snake_case, reason = "names of the driver's")]

use std::ffi::{c_char, c_int, c_uint};

use crate::code::{Code, Done, INVALID_CONTEXT, INVALID_VALUE, name_of};
use crate::device::{self, Device};
use crate::handle::Handle;
use crate::stream;

macro_rules! entries {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $body:block)+) => {
        $(
            /// # Safety
            /// As the driver's documentation says.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> $crate::code::Code {
                $crate::counts::count(stringify!($name));
                if $crate::stream::is_in_function() {
                    return $crate::code::NOT_PERMITTED;
                }
                let run = || -> $crate::code::Done { $body };
                $crate::entries::returned(run())
            }
        )+
    };
}

mod graphs;
mod memory;
mod modules;
mod streams;

#[cfg(test)]
pub use self::graphs::*;
#[cfg(test)]
pub use self::memory::*;
#[cfg(test)]
pub use self::modules::*;
#[cfg(test)]
pub use self::streams::*;

/// CUDA 13.0.
const VERSION: c_int = 13_000;

/// A pointer to something that is written.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    #[cfg(test)]
    pub(crate) fn to(pointer: *mut T) -> Self {
        Out(pointer)
    }

    fn set(&self, value: T) -> Done {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the callers' contract.
        unsafe { self.0.write(value) };
        Ok(())
    }

    /// Writes it unless it is left out.
    fn set_if_wanted(&self, value: T) {
        let _ = self.set(value);
    }
}

impl<T: Copy> Out<T> {
    fn get(&self) -> Done<T> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the callers' contract.
        Ok(unsafe { self.0.read() })
    }
}

/// A pointer to something that is read.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    #[cfg(test)]
    pub(crate) fn to(pointer: *const T) -> Self {
        In(pointer)
    }

    fn all(&self, count: usize) -> Done<Vec<T>> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the callers' contract.
        Ok((0..count).map(|index| unsafe { self.0.add(index).read() }).collect())
    }

    fn get(&self) -> Done<T> {
        self.all(1)?.pop().ok_or(INVALID_VALUE)
    }
}

/// Text of at most so many bytes, the end included.
fn write_text(to: *mut c_char, len: c_int, text: &str) -> Done {
    let room = usize::try_from(len).map_err(|_| INVALID_VALUE)?;
    if to.is_null() || room <= text.len() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the callers' contract: there is that much room, and the text and its end take no more.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to.cast(), text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

fn returned(done: Done) -> Code {
    done.err().unwrap_or(0)
}

entries! {
    fn cuInit(flags: c_uint) {
        device::all();
        if flags == 0 { Ok(()) } else { Err(INVALID_VALUE) }
    }
    fn cuDriverGetVersion(version: Out<c_int>) { version.set(VERSION) }
    fn cuGetErrorName(error: Code, name: Out<*const c_char>) {
        name.set(name_of(error).ok_or(INVALID_VALUE)?.as_ptr())
    }
    fn cuDeviceGetCount(count: Out<c_int>) { count.set(device::all().len() as c_int) }
    fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) {
        device::by_ordinal(ordinal)?;
        device.set(ordinal)
    }
    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) { uuid.set(device::by_ordinal(device)?.uuid()) }
    fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) {
        device::by_ordinal(device)?;
        write_text(name, len, "Emulated GPU")
    }
    fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int) {
        write_text(id, len, &device::by_ordinal(device)?.bus_id())
    }
    fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_uint, device: c_int) {
        device::by_ordinal(device)?;
        value.set(Device::attribute(attribute)?)
    }
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) {
        device::by_ordinal(device)?;
        bytes.set(device::MEMORY_BYTES as usize)
    }
    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) {
        let (device, peer) = (device::by_ordinal(device)?, device::by_ordinal(peer)?);
        can.set(c_int::from(device::claims_access(device.number, peer.number)))
    }
    fn cuDeviceGetP2PAttribute(value: Out<c_int>, attribute: c_uint, device: c_int, peer: c_int) {
        const ATTRIBUTES: std::ops::RangeInclusive<c_uint> = 1..=4;
        let is_pair = device::by_ordinal(device)?.number != device::by_ordinal(peer)?.number;
        if !is_pair || !ATTRIBUTES.contains(&attribute) { Err(INVALID_VALUE) } else { value.set(1) }
    }

    fn cuDevicePrimaryCtxRetain(context: Out<usize>, device: c_int) {
        let device = device::by_ordinal(device)?;
        device.check()?;
        device.retain();
        context.set(device.context())
    }
    fn cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, is_active: Out<c_int>) {
        let is_retained = device::by_ordinal(device)?.is_retained();
        flags.set_if_wanted(0);
        is_active.set(c_int::from(is_retained))
    }
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) { device::by_ordinal(device)?.release() }
    fn cuCtxPushCurrent_v2(context: usize) { device::push(context) }
    fn cuCtxSetCurrent(context: usize) {
        device::by_context(context)?;
        let _ = device::pop();
        device::push(context)
    }
    fn cuCtxPopCurrent_v2(context: Out<usize>) {
        context.set_if_wanted(device::pop()?);
        Ok(())
    }
    fn cuCtxGetCurrent(context: Out<usize>) { context.set(device::current_if_any().map_or(0, Device::context)) }
    fn cuCtxGetDevice(device: Out<c_int>) {
        device.set(device::current_if_any().ok_or(INVALID_CONTEXT)?.number as c_int)
    }
    fn cuCtxSynchronize() { stream::synchronize_context(device::current()?) }
    fn cuCtxEnablePeerAccess(peer: usize, flags: c_uint) {
        let (device, peer) = (device::current()?, device::by_context(peer)?);
        if flags == 0 { device.enable(peer) } else { Err(INVALID_VALUE) }
    }
}

/// `CUipcMemHandle` and `CUipcEventHandle`, which are passed by value.
#[repr(C)]
pub struct IpcHandle(Handle);

#[cfg(test)]
impl IpcHandle {
    pub(crate) fn of(handle: Handle) -> Self {
        IpcHandle(handle)
    }
}
