//! Virtual memory management (`cuMemCreate`, `cuMemMap`): allocations shared by file descriptor,
//! mapped address ranges, and memory of pools. An allocation lives until nobody has it mapped, and
//! nobody a handle of it, in any process.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use cudarc::driver::sys;

use crate::api;
use crate::context::Context;
use crate::error::DriverError;
use crate::memory::{DeviceAddress, zero};
use crate::stream::OwnedStream;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: u32 = 1;

/// Processes that may be given an allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shared {
    /// Other processes, by file descriptors.
    ByDescriptor,
    /// The same, and NICs where the GPU has memory for them.
    WithNics,
    /// Nobody.
    No,
}

/// A handle of physical memory, which keeps it. Equal ones name the same memory.
#[derive(Debug, PartialEq, Eq)]
pub struct Allocation(u64);

impl Allocation {
    /// Allocates at least so many bytes on the GPU of a context. Returns how many there are: whole pages.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(context: &Context, bytes: usize, shared: Shared) -> Result<(Self, usize), DriverError> {
        let for_nics = shared == Shared::WithNics && context.gpu().makes_nic_memory;
        Self::create(context, bytes, shared, for_nics, location(context))
    }

    /// The same of the host's memory, of its first node, to be shared by descriptors: what GPUs reach and is none's.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn of_host(context: &Context, bytes: usize) -> Result<(Self, usize), DriverError> {
        let node = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, id: 0 };
        Self::create(context, bytes, Shared::ByDescriptor, false, node)
    }

    fn create(
        context: &Context,
        bytes: usize,
        shared: Shared,
        for_nics: bool,
        location: sys::CUmemLocation,
    ) -> Result<(Self, usize), DriverError> {
        const GRANULARITY_RECOMMENDED: u32 = 1;
        let _entered = context.enter()?;
        let kinds = match shared {
            Shared::ByDescriptor | Shared::WithNics => {
                sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            }
            Shared::No => sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_NONE,
        };
        let properties = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: kinds,
            location,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: u8::from(for_nics),
                usage: 0,
                reserved: [0; 4],
            },
        };
        let (mut page, mut handle) = (0, 0);
        // SAFETY: outputs are integers to write to, and the properties live.
        unsafe {
            api::cuMemGetAllocationGranularity(&mut page, &properties, GRANULARITY_RECOMMENDED)?;
            let bytes = bytes.max(1).next_multiple_of(page.max(1));
            api::cuMemCreate(&mut handle, bytes, &properties, 0)?;
            Ok((Allocation(handle), bytes))
        }
    }

    /// A mapping at an address.
    ///
    /// # Errors
    /// [`DriverError`] for an address where no such memory is mapped.
    pub fn at(address: DeviceAddress) -> Result<Self, DriverError> {
        let mut handle = 0;
        // SAFETY: `handle` is an integer to write to; the address is looked up, and not followed.
        unsafe { api::cuMemRetainAllocationHandle(&mut handle, address as *mut c_void)? };
        Ok(Allocation(handle))
    }

    /// A descriptor for another process.
    ///
    /// # Errors
    /// [`DriverError`], also for memory that was not made for that.
    pub fn export(&self) -> Result<OwnedFd, DriverError> {
        let mut fd: c_int = -1;
        // SAFETY: the driver writes a descriptor to `fd`: that is what this kind of handle is.
        unsafe { api::cuMemExportToShareableHandle((&raw mut fd).cast(), self.0, DESCRIPTOR, 0)? };
        if fd < 0 {
            return Err(DriverError::own("cuMemExportToShareableHandle", "no descriptor"));
        }
        // SAFETY: the driver has made it, for the caller to close.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The memory's owner: a GPU, by its ordinal in this process; none for any other, as the host's, or that of a GPU which this process
    /// does not see.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn gpu(&self) -> Result<Option<i32>, DriverError> {
        const PINNED: u32 = 1;
        const ON_DEVICE: u32 = 1;
        // `CUmemAllocationProp`, as numbers: drivers that come later know of more kinds.
        let mut properties = [0_u64; 4];
        const _: () = assert!(size_of::<sys::CUmemAllocationProp>() == size_of::<[u64; 4]>());
        // SAFETY: there is as much room as the driver writes.
        unsafe { api::cuMemGetAllocationPropertiesFromHandle(&mut properties, self.0)? };
        let [kind, place, ..] = properties;
        let is_of_a_gpu = (kind as u32, place as u32) == (PINNED, ON_DEVICE);
        // Negative where the process does not see the GPU.
        Ok(Some((place >> 32) as i32).filter(|ordinal| is_of_a_gpu && *ordinal >= 0))
    }

    /// Memory of another process, by its descriptor, which may be closed afterwards. [`Allocation::gpu`] tells the kind.
    ///
    /// # Errors
    /// [`DriverError`], also for a descriptor of something else.
    pub fn import(fd: BorrowedFd<'_>) -> Result<Self, DriverError> {
        let mut handle = 0;
        // SAFETY: `handle` is an integer to write to. A descriptor is passed as the pointer itself; the driver checks it.
        unsafe {
            api::cuMemImportFromShareableHandle(&mut handle, fd.as_raw_fd() as usize as *mut c_void, DESCRIPTOR)?
        };
        Ok(Allocation(handle))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: every value has one reference, which goes here. Mapped memory stays mapped.
        let _ = unsafe { api::cuMemRelease(self.0) };
    }
}

fn location(context: &Context) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.gpu().ordinal() }
}

/// Allocations that are mapped behind each other, for one GPU to read and write, or several. Unmapped on drop.
///
/// Several GPUs may each take a value of another process' memory: then copies go as if the GPU that copies had opened the memory
/// itself.
#[derive(Debug)]
pub struct MappedMemory {
    context: Context,
    address: DeviceAddress,
    /// As reserved.
    bytes: usize,
    /// Beginning and bytes of each allocation that is mapped.
    parts: Vec<(usize, usize)>,
}

impl MappedMemory {
    /// Reserves addresses. Nothing is there until it is mapped.
    ///
    /// # Errors
    /// [`DriverError`], also for bytes that are no whole pages.
    pub fn reserve(context: &Context, bytes: usize) -> Result<Self, DriverError> {
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: `address` is an integer to write to.
        unsafe { api::cuMemAddressReserve(&mut address, bytes, 0, 0, 0)? };
        Ok(MappedMemory { context: context.clone(), address, bytes, parts: Vec::new() })
    }

    /// Maps the first `bytes` of an allocation behind what is mapped already.
    ///
    /// # Errors
    /// [`DriverError`], where the allocation has fewer, these are no whole pages, or the addresses do not suffice.
    pub fn map(&mut self, allocation: &Allocation, bytes: usize) -> Result<(), DriverError> {
        let end = self.parts.iter().map(|(begin, bytes)| begin + bytes).max().unwrap_or(0);
        self.map_at(end, allocation, bytes)
    }

    /// Maps the first `bytes` of an allocation at an offset, where nothing is mapped.
    ///
    /// # Errors
    /// As [`MappedMemory::map`].
    pub fn map_at(&mut self, offset: usize, allocation: &Allocation, bytes: usize) -> Result<(), DriverError> {
        let _entered = self.context.enter()?;
        let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        let is_free = self.parts.iter().all(|(begin, mapped)| offset >= begin + mapped || offset + bytes <= *begin);
        if !is_inside || !is_free {
            return Err(DriverError::own("cuMemMap", "the addresses that were reserved do not suffice"));
        }
        // SAFETY: the range was reserved here, and nothing is mapped in it.
        unsafe { api::cuMemMap(self.address + offset as u64, bytes, 0, allocation.0, 0)? };
        self.parts.push((offset, bytes));
        Ok(())
    }

    /// Lets the GPUs of contexts read and write `bytes` at an offset, which are mapped.
    ///
    /// # Errors
    /// As [`MappedMemory::open`].
    pub fn open_at(&self, offset: usize, bytes: usize, contexts: &[&Context]) -> Result<(), DriverError> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.bytes) {
            return Err(DriverError::own("cuMemSetAccess", "these addresses were not reserved"));
        }
        let _entered = self.context.enter()?;
        let access = |context: &&Context| sys::CUmemAccessDesc {
            location: location(context),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let access: Vec<_> = contexts.iter().map(access).collect();
        // SAFETY: the range was reserved here, and `access` lives, which is that long.
        unsafe { api::cuMemSetAccess(self.address + offset as u64, bytes, access.as_ptr(), access.len()) }
    }

    /// Fills what is mapped with zeros, in a stream of the context's, when all before that there has ended; and waits for it.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn zero_mapped(&self, stream: &OwnedStream) -> Result<(), DriverError> {
        self.parts.iter().try_for_each(|&(begin, bytes)| {
            // SAFETY: it is mapped as long as `self` lives, with that size.
            unsafe { zero(&self.context, self.address + begin as u64, bytes, stream) }
        })
    }

    /// Fills `bytes` at an offset with zeros, as [`MappedMemory::zero_mapped`] does.
    ///
    /// # Errors
    /// [`DriverError`], also where that is not what was mapped there by one call.
    pub fn zero_at(&self, offset: usize, bytes: usize, stream: &OwnedStream) -> Result<(), DriverError> {
        if !self.parts.contains(&(offset, bytes)) {
            return Err(DriverError::own("cuMemsetD8Async", "this is not mapped"));
        }
        // SAFETY: as above.
        unsafe { zero(&self.context, self.address + offset as u64, bytes, stream) }
    }

    /// Lets the context's GPU read and write all of it, once everything is mapped.
    ///
    /// # Errors
    /// [`DriverError`], for a GPU that cannot reach the memory.
    pub fn open(&self) -> Result<(), DriverError> {
        self.open_to(&[&self.context])
    }

    /// Lets the GPUs of contexts read and write all of it, once everything is mapped.
    ///
    /// # Errors
    /// As [`MappedMemory::open`].
    pub fn open_to(&self, contexts: &[&Context]) -> Result<(), DriverError> {
        self.open_at(0, self.bytes, contexts)
    }

    /// Fills it with zeros, as [`crate::DeviceMemory::zero`] does.
    ///
    /// # Errors
    /// [`DriverError`], also where not all of it is mapped.
    pub fn zero(&self, stream: &OwnedStream) -> Result<(), DriverError> {
        if self.parts.iter().map(|(_, bytes)| bytes).sum::<usize>() < self.bytes {
            return Err(DriverError::own("cuMemsetD8Async", "not all of the reserved addresses are mapped"));
        }
        // SAFETY: its parts are apart, so all of it is mapped, as long as `self` lives.
        unsafe { zero(&self.context, self.address, self.bytes, stream) }
    }

    /// Memory of its own, in allocations of so many bytes each. Its content is not defined. Waits for nothing, as far as the driver says.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(context: &Context, parts: &[usize], shared: Shared) -> Result<Self, DriverError> {
        let parts =
            parts.iter().map(|bytes| Allocation::new(context, *bytes, shared)).collect::<Result<Vec<_>, _>>()?;
        let mut memory = MappedMemory::reserve(context, parts.iter().map(|(_, bytes)| bytes).sum())?;
        parts.iter().try_for_each(|(allocation, bytes)| memory.map(allocation, *bytes))?;
        memory.open()?;
        Ok(memory)
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
}

impl Drop for MappedMemory {
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        for (begin, bytes) in &self.parts {
            // SAFETY: mapped here, unmapped once, whole; whoever uses it keeps it.
            let _ = unsafe { api::cuMemUnmap(self.address + *begin as u64, *bytes) };
        }
        // SAFETY: reserved here, given back once.
        let _ = unsafe { api::cuMemAddressFree(self.address, self.bytes) };
    }
}

/// Memory of the driver's pool (`cudaMallocAsync`), which no other process can open. Given back on drop, in its stream.
#[derive(Debug)]
pub struct PooledMemory<'a> {
    stream: &'a OwnedStream,
    address: DeviceAddress,
}

impl<'a> PooledMemory<'a> {
    /// Allocates in a stream: what comes there afterwards may use it.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(stream: &'a OwnedStream, bytes: usize) -> Result<Self, DriverError> {
        let _entered = stream.context().enter()?;
        let mut address = 0;
        // SAFETY: `address` is an integer to write to, and the stream lives.
        unsafe { api::cuMemAllocAsync(&mut address, bytes, stream.raw().as_ptr().cast())? };
        Ok(PooledMemory { stream, address })
    }

    /// First byte.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.address
    }
}

impl Drop for PooledMemory<'_> {
    fn drop(&mut self) {
        if let Ok(_entered) = self.stream.context().enter() {
            // SAFETY: allocated in this stream, freed once; whoever uses it keeps it.
            let _ = unsafe { api::cuMemFreeAsync(self.address, self.stream.raw().as_ptr().cast()) };
        }
    }
}
