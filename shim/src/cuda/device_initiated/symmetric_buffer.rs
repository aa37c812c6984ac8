//! Symmetric buffers of ranks, opened and mapped into this process.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use mccs_cuda::{Allocation, Context, DeviceAddress, HostRegistration, MappedMemory};
use mccs_ipc::device_initiated::{SymmetricBufferHandle, SymmetricBufferPart};
use mccs_ipc::shm::Mapping;
use mccs_kernels::cuda::SymmetricBufferLayout;

use crate::Error;
use crate::cuda::cuda_error;

/// See the module's documentation.
pub(super) enum SymmetricBuffer {
    /// Memory of a GPU, of which parts are mapped as they are named.
    Gpu(MappedMemory),
    /// Memory of the host, which has the head alone. Pinned memory goes before mapped memory.
    Host { pinned: HostRegistration, _mapped: Mapping },
}

impl SymmetricBuffer {
    /// Opens what the service names: the head, for a context.
    pub(super) fn open(
        context: &Context,
        layout: &SymmetricBufferLayout,
        handle: &SymmetricBufferHandle,
        fd: Option<&OwnedFd>,
    ) -> Result<Self, Error> {
        let head = layout.part(SymmetricBufferPart::Head);
        if let SymmetricBufferHandle::Host(named) = handle {
            let fd = fd.ok_or_else(|| malformed("without descriptors"))?;
            if *named != head.end {
                return Err(malformed("of another layout"));
            }
            let mapped = Mapping::map(fd.as_fd(), head.end)
                .map_err(|error| Error::below("cannot map a symmetric buffer", &error, error.errno()))?;
            // SAFETY: it is mapped longer than it is registered: fields are dropped in order.
            let pinned = unsafe { HostRegistration::register(context, mapped.as_ptr(), head.end as usize) };
            return Ok(SymmetricBuffer::Host { pinned: pinned.map_err(cuda_error)?, _mapped: mapped });
        }
        let mut buffer =
            SymmetricBuffer::Gpu(MappedMemory::reserve(context, layout.bytes() as usize).map_err(cuda_error)?);
        buffer.map_part(context, head, handle, fd)?;
        Ok(buffer)
    }

    /// First byte, as the context sees it.
    pub(super) fn address(&self) -> DeviceAddress {
        match self {
            SymmetricBuffer::Gpu(memory) => memory.address(),
            SymmetricBuffer::Host { pinned, .. } => pinned.address(),
        }
    }

    /// Maps a part that the service has named.
    pub(super) fn map_part(
        &mut self,
        context: &Context,
        range: Range<u64>,
        handle: &SymmetricBufferHandle,
        fd: Option<&OwnedFd>,
    ) -> Result<(), Error> {
        let (offset, bytes) = (range.start as usize, (range.end - range.start) as usize);
        let (SymmetricBuffer::Gpu(memory), SymmetricBufferHandle::Descriptor(named), Some(fd)) = (self, handle, fd)
        else {
            return Err(malformed("without descriptors"));
        };
        if *named != bytes as u64 {
            return Err(malformed("of another layout"));
        }
        let allocation = Allocation::import(fd.as_fd()).map_err(cuda_error)?;
        memory.map_at(offset, &allocation, bytes).map_err(cuda_error)?;
        memory.open_at(offset, bytes, &[context]).map_err(cuda_error)
    }
}

fn malformed(what: &str) -> Error {
    Error::ServiceGone(format!("it sent symmetric buffers {what}"))
}
