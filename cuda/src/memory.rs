//! GPU memory (`cuMemAlloc`), CUDA IPC handles, dma-buf descriptors, pinned host memory, and kinds
//! of pointers.

use std::ffi::c_void;
use std::os::fd::{FromRawFd, OwnedFd};

use cudarc::driver::sys;

use crate::api;
use crate::context::Context;
use crate::error::DriverError;
use crate::stream::OwnedStream;

/// An address in a GPU's address space.
pub type DeviceAddress = u64;

/// Names an allocation or an event to other processes (`CUipcMemHandle`, `CUipcEventHandle`).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct IpcHandle(pub [u8; 64]);

impl std::fmt::Debug for IpcHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Whoever has all of it can open what it names.
        write!(f, "IpcHandle({:02x}{:02x}..)", self.0[0], self.0[1])
    }
}

/// A dma-buf of a GPU's memory, by which devices of other kinds reach it. The range has whole pages of the host's, of one allocation,
/// which the descriptor does not keep.
///
/// # Errors
/// [`DriverError`]: not of whole pages, or the driver or the kernel has no dma-bufs.
pub fn dma_buffer(context: &Context, address: DeviceAddress, bytes: usize) -> Result<OwnedFd, DriverError> {
    const DMA_BUF_FD: u32 = 1;
    let _entered = context.enter()?;
    let mut fd: std::ffi::c_int = -1;
    // SAFETY: a descriptor is what is written for this kind of handle.
    unsafe { api::cuMemGetHandleForAddressRange((&raw mut fd).cast(), address, bytes, DMA_BUF_FD, 0)? };
    // SAFETY: the driver has opened it for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Allocations of so many bytes, or of a multiple, are the fastest for other GPUs to reach.
pub const LARGE_PAGE_BYTES: usize = 2 << 20;

/// Memory of a GPU, allocated here. Freed on drop.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Context,
    address: DeviceAddress,
    bytes: usize,
}

impl DeviceMemory {
    /// Allocates memory, in whole large pages where it needs more than one: between others, copies from GPU to GPU were measured to
    /// take 1.6 times as long (decision 012). Its content is not defined.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(context: &Context, bytes: usize) -> Result<Self, DriverError> {
        let _entered = context.enter()?;
        let mut address = 0;
        let room = if bytes > LARGE_PAGE_BYTES { bytes.next_multiple_of(LARGE_PAGE_BYTES) } else { bytes };
        // SAFETY: `address` is an integer to write to.
        unsafe { api::cuMemAlloc_v2(&mut address, room)? };
        Ok(DeviceMemory { context: context.clone(), address, bytes })
    }

    /// As [`DeviceMemory::new`], full of zeros. Waits for the default stream.
    ///
    /// # Errors
    /// As there.
    pub fn zeroed(context: &Context, bytes: usize) -> Result<Self, DriverError> {
        let memory = Self::new(context, bytes)?;
        let _entered = context.enter()?;
        // SAFETY: the memory was allocated above, with that size. The driver only enqueues it, on the default stream: on a GPU
        // that others use, zeros could come after what is written first.
        unsafe {
            api::cuMemsetD8_v2(memory.address, 0, bytes)?;
            api::cuStreamSynchronize(std::ptr::null_mut())?;
        }
        Ok(memory)
    }

    /// Fills it with zeros, in a stream of its context's, when all before that there has ended; and waits for it.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn zero(&self, stream: &OwnedStream) -> Result<(), DriverError> {
        // SAFETY: the memory is allocated as long as `self` lives, with that size.
        unsafe { zero(&self.context, self.address, self.bytes, stream) }
    }

    /// First byte.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Size.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    /// Its name for other processes.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn export(&self) -> Result<IpcHandle, DriverError> {
        let _entered = self.context.enter()?;
        export(self.address)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: allocated here, freed once; whoever uses it keeps it. The driver waits for work that does.
            let _ = unsafe { api::cuMemFree_v2(self.address) };
        }
    }
}

/// Fills memory with zeros, in a stream of the context's, when all before that there has ended; and waits for it.
///
/// # Safety
/// So many bytes must be there, in the context, until it returns.
pub(crate) unsafe fn zero(
    context: &Context,
    address: DeviceAddress,
    bytes: usize,
    stream: &OwnedStream,
) -> Result<(), DriverError> {
    let _entered = context.enter()?;
    // SAFETY: the caller's contract; the stream lives.
    unsafe {
        api::cuMemsetD8Async(address, 0, bytes, stream.raw().0)?;
        stream.raw().synchronize()
    }
}

/// The name, for other processes, of an allocation that begins at `base`; its context must be current.
///
/// # Errors
/// [`DriverError`], also for memory of a kind that cannot be named so.
pub fn export(base: DeviceAddress) -> Result<IpcHandle, DriverError> {
    let mut handle = [0; 64];
    // SAFETY: `handle` has the driver's size of a handle; an address that is none is refused.
    unsafe { api::cuIpcGetMemHandle(&mut handle, base)? };
    Ok(IpcHandle(handle))
}

/// The allocation that an address lies in, as base and size; a context must be current.
///
/// # Errors
/// [`DriverError`] for an address that no allocation has.
pub fn allocation_of(address: DeviceAddress) -> Result<(DeviceAddress, u64), DriverError> {
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: both are integers to write to; an address that is none is refused.
    unsafe { api::cuMemGetAddressRange_v2(&mut base, &mut bytes, address)? };
    Ok((base, bytes as u64))
}

/// How an address's memory can be handed to another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PointerKind {
    /// By an [`IpcHandle`] of its allocation.
    Ipc,
    /// By file descriptors (`cuMemCreate`).
    Descriptors,
    /// Not at all.
    Private,
}

/// Kind of memory of an address; a context must be current.
///
/// # Errors
/// [`DriverError`] for an address that the driver does not know.
pub fn pointer_kind(address: DeviceAddress) -> Result<PointerKind, DriverError> {
    const IS_LEGACY_IPC_CAPABLE: u32 = 10;
    const ALLOWED_HANDLE_TYPES: u32 = 14;
    const POSIX_FD: u64 = 1;
    let (mut is_ipc, mut types) = (0_u32, 0_u64);
    // SAFETY: the outputs have the attributes' sizes, a bool in a wider integer and a mask of 64 bits.
    unsafe {
        api::cuPointerGetAttribute((&raw mut is_ipc).cast(), IS_LEGACY_IPC_CAPABLE, address)?;
        api::cuPointerGetAttribute((&raw mut types).cast(), ALLOWED_HANDLE_TYPES, address)?;
    }
    Ok(match (is_ipc & 0xff != 0, types & POSIX_FD != 0) {
        (true, _) => PointerKind::Ipc,
        (false, true) => PointerKind::Descriptors,
        (false, false) => PointerKind::Private,
    })
}

/// Number, among the driver's GPUs, of the one that an address's memory is of; a context must be current.
///
/// # Errors
/// [`DriverError`] for an address that the driver does not know.
pub fn ordinal_of(address: DeviceAddress) -> Result<i32, DriverError> {
    const DEVICE_ORDINAL: u32 = 9;
    let mut ordinal = 0_i32;
    // SAFETY: the output has the attribute's size.
    unsafe { api::cuPointerGetAttribute((&raw mut ordinal).cast(), DEVICE_ORDINAL, address)? };
    Ok(ordinal)
}

/// A number that no other allocation of this process has or had: addresses come again.
///
/// # Errors
/// [`DriverError`] for an address that the driver does not know.
pub fn buffer_id(address: DeviceAddress) -> Result<u64, DriverError> {
    const BUFFER_ID: u32 = 7;
    let mut id = 0_u64;
    // SAFETY: the output has the attribute's size.
    unsafe { api::cuPointerGetAttribute((&raw mut id).cast(), BUFFER_ID, address)? };
    Ok(id)
}

/// Another process' allocation, mapped in one context. Unmapped on drop. A context can open a handle once at a time.
#[derive(Debug)]
pub struct ImportedMemory {
    context: Context,
    address: DeviceAddress,
}

impl ImportedMemory {
    /// Opens a handle in `context`, which may be of another GPU than the memory.
    ///
    /// # Errors
    /// [`DriverError`], for a handle that is stale or forged, or of a GPU that cannot be reached.
    pub fn open(context: &Context, handle: &IpcHandle) -> Result<Self, DriverError> {
        const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
        let _entered = context.enter()?;
        let mut address = 0;
        let raw = sys::CUipcMemHandle { reserved: handle.0.map(|byte| byte as std::ffi::c_char) };
        // SAFETY: `address` is an integer to write to; the driver checks the handle.
        unsafe { api::cuIpcOpenMemHandle_v2(&mut address, raw, LAZY_ENABLE_PEER_ACCESS)? };
        Ok(ImportedMemory { context: context.clone(), address })
    }

    /// First byte of the allocation, in this context.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.address
    }

    /// Bytes that are mapped.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn len_bytes(&self) -> Result<u64, DriverError> {
        let _entered = self.context.enter()?;
        let (base, bytes) = allocation_of(self.address)?;
        Ok((base + bytes).saturating_sub(self.address))
    }
}

impl Drop for ImportedMemory {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: opened here, closed once.
            let _ = unsafe { api::cuIpcCloseMemHandle(self.address) };
        }
    }
}

/// A range of host memory that GPUs may read and write while this lives.
#[derive(Debug)]
pub struct HostRegistration {
    context: Context,
    ptr: *mut c_void,
    address: DeviceAddress,
}

// SAFETY: the range belongs to whoever registered it; this value only undoes the registration.
unsafe impl Send for HostRegistration {}
// SAFETY: as above.
unsafe impl Sync for HostRegistration {}

impl HostRegistration {
    /// Registers whole pages for all contexts of this process.
    ///
    /// # Safety
    /// The range must be mapped while the value lives.
    ///
    /// # Errors
    /// [`DriverError`].
    pub unsafe fn register(context: &Context, ptr: *mut u8, bytes: usize) -> Result<Self, DriverError> {
        const PORTABLE_AND_MAPPED: u32 = 1 | 2;
        let _entered = context.enter()?;
        let ptr = ptr.cast();
        let mut address = 0;
        // SAFETY: the caller keeps the range mapped.
        unsafe { api::cuMemHostRegister_v2(ptr, bytes, PORTABLE_AND_MAPPED)? };
        let mut registration = HostRegistration { context: context.clone(), ptr, address };
        // SAFETY: registered above, as mapped.
        unsafe { api::cuMemHostGetDevicePointer_v2(&mut address, ptr, 0)? };
        registration.address = address;
        Ok(registration)
    }

    /// First byte, as a GPU sees it.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.address
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: registered here, once.
            let _ = unsafe { api::cuMemHostUnregister(self.ptr) };
        }
    }
}

/// Host memory of this process that a GPU copies to by itself: who enqueues such a copy does not wait for it.
#[derive(Debug)]
pub struct PinnedMemory {
    /// Before the pages, which it names.
    _registration: HostRegistration,
    pages: Pages,
    bytes: usize,
}

/// Whole pages, as registrations are of. A GPU writes there, so nobody has a reference to them.
#[derive(Debug)]
struct Pages(*mut [Page]);

#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; 4096]);

// SAFETY: bytes, of whoever has the value.
unsafe impl Send for Pages {}
// SAFETY: they are read only where nobody writes, as `PinnedMemory::bytes` asks for.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: from a box, and given back once.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

impl PinnedMemory {
    /// Makes it, full of zeros.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(context: &Context, bytes: usize) -> Result<Self, DriverError> {
        let pages = vec![Page([0; 4096]); bytes.div_ceil(size_of::<Page>()).max(1)];
        let pages = Pages(Box::into_raw(pages.into_boxed_slice()));
        // SAFETY: the pages are there longer than they are registered: fields are dropped in order.
        let registration =
            unsafe { HostRegistration::register(context, pages.0.cast::<u8>(), pages.0.len() * size_of::<Page>())? };
        Ok(PinnedMemory { _registration: registration, pages, bytes })
    }

    /// First byte, for copies.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.pages.0.cast::<u8>() as DeviceAddress
    }

    /// The content.
    ///
    /// # Safety
    /// All copies to it must have ended, and none begin while the slice is used.
    #[must_use]
    pub unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: so many bytes are there; the rest is the caller's contract.
        unsafe { std::slice::from_raw_parts(self.pages.0.cast::<u8>(), self.bytes) }
    }
}

/// Copies from a GPU, and waits. A context must be current.
///
/// # Safety
/// `src` must have as many bytes, and nobody may write there meanwhile.
///
/// # Errors
/// [`DriverError`].
pub unsafe fn copy_to_host(dst: &mut [u8], src: DeviceAddress) -> Result<(), DriverError> {
    // SAFETY: the slice has that length; the rest is the caller's contract.
    unsafe { api::cuMemcpyDtoH_v2(dst.as_mut_ptr().cast(), src, dst.len()) }
}

/// Copies to a GPU, and waits. A context must be current.
///
/// # Safety
/// `dst` must have room, and nobody may use it meanwhile.
///
/// # Errors
/// [`DriverError`].
pub unsafe fn copy_from_host(dst: DeviceAddress, src: &[u8]) -> Result<(), DriverError> {
    // SAFETY: the slice has that length; the rest is the caller's contract. The driver returns when it has read the slice: what
    // it has not written by then is on the default stream.
    unsafe {
        api::cuMemcpyHtoD_v2(dst, src.as_ptr().cast(), src.len())?;
        api::cuStreamSynchronize(std::ptr::null_mut())
    }
}
