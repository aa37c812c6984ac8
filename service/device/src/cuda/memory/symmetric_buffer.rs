//! GPU memory of the service that ranks open: symmetric buffers, whose parts are made at first use, and blocks of slots.

use std::ops::Range;
use std::os::fd::OwnedFd;

use mccs_cuda::{Allocation, Context, DeviceAddress, DeviceMemory, DriverError, MappedMemory, OwnedStream, Shared};
use mccs_ipc::device_initiated::{SymmetricBufferHandle, SymmetricBufferPart};
use mccs_kernels::cuda::SymmetricBufferLayout;
use mccs_runtime::Share;

use crate::cuda::memory::deferred_free::DeferredFrees;

/// Memory of one GPU for other processes, by how they open it.
pub(crate) enum Block {
    ByHandle(DeviceMemory),
    ByDescriptor(MappedMemory, Allocation),
}

impl Block {
    /// One that ranks open by a descriptor, in a GPU's context; all of `contexts` reach it. What is in it is not defined. What is there when something
    /// fails goes to the thread that frees.
    pub(crate) fn by_descriptor(
        context: &Context,
        (bytes, shared): (u64, Shared),
        contexts: &[&Context],
        frees: &DeferredFrees,
    ) -> Result<Self, DriverError> {
        let (allocation, bytes) = Allocation::new(context, bytes as usize, shared)?;
        let mut memory = match MappedMemory::reserve(context, bytes) {
            Ok(memory) => memory,
            Err(error) => {
                frees.free(Share::SERVICE, allocation);
                return Err(error);
            }
        };
        if let Err(error) = memory.map(&allocation, bytes).and_then(|()| memory.open_to(contexts)) {
            frees.free(Share::SERVICE, (memory, allocation));
            return Err(error);
        }
        Ok(Block::ByDescriptor(memory, allocation))
    }

    pub(crate) fn address(&self) -> DeviceAddress {
        match self {
            Block::ByHandle(memory) => memory.address(),
            Block::ByDescriptor(memory, _) => memory.address(),
        }
    }

    /// A descriptor by which others open it, and its bytes. Not of memory that has none.
    pub(crate) fn descriptor(&self) -> Result<(OwnedFd, u64), DriverError> {
        match self {
            Block::ByHandle(_) => Err(DriverError::own("cuMemExportToShareableHandle", "memory without descriptors")),
            Block::ByDescriptor(memory, allocation) => Ok((allocation.export()?, memory.len_bytes() as u64)),
        }
    }

    pub(crate) fn zero(&self, stream: &OwnedStream) -> Result<(), DriverError> {
        match self {
            Block::ByHandle(memory) => memory.zero(stream),
            Block::ByDescriptor(memory, _) => memory.zero(stream),
        }
    }

    /// How others open it; with the descriptor that goes with that, where there is one.
    pub(crate) fn name(&self) -> Result<(SymmetricBufferHandle, Option<OwnedFd>), DriverError> {
        Ok(match self {
            Block::ByHandle(memory) => (SymmetricBufferHandle::Ipc(memory.export()?.0.to_vec()), None),
            Block::ByDescriptor(memory, allocation) => {
                (SymmetricBufferHandle::Descriptor(memory.len_bytes() as u64), Some(allocation.export()?))
            }
        })
    }
}

/// A rank's symmetric buffer: addresses for all of it, and the parts that are made. Ranks open them by descriptors.
pub(crate) struct RankBuffer {
    layout: SymmetricBufferLayout,
    memory: MappedMemory,
    /// Kept to be exported.
    parts: [Option<Allocation>; SymmetricBufferPart::ALL.len()],
    /// What could not be mapped: dropped where the rest is.
    unmapped: Vec<Allocation>,
}

impl RankBuffer {
    /// Addresses for a symmetric buffer on a context's GPU. Nothing is there yet.
    pub(crate) fn reserve(context: &Context, layout: SymmetricBufferLayout) -> Result<Self, DriverError> {
        let memory = MappedMemory::reserve(context, layout.bytes() as usize)?;
        Ok(RankBuffer { layout, memory, parts: [const { None }; SymmetricBufferPart::ALL.len()], unmapped: Vec::new() })
    }

    /// First byte, as this process sees it.
    pub(crate) fn address(&self) -> DeviceAddress {
        self.memory.address()
    }

    /// Whether a part is there.
    pub(crate) fn has(&self, part: SymmetricBufferPart) -> bool {
        self.parts[part as usize].is_some()
    }

    /// Bytes of the parts that are there.
    pub(crate) fn held_bytes(&self) -> u64 {
        SymmetricBufferPart::ALL
            .into_iter()
            .filter(|part| self.has(*part))
            .map(|part| bytes_of(&self.layout.part(part)))
            .sum()
    }

    /// Makes a part, full of zeros, which the GPUs of contexts reach. The stream is the symmetric buffer's GPU's.
    pub(crate) fn make(
        &mut self,
        part: SymmetricBufferPart,
        contexts: &[&Context],
        stream: &OwnedStream,
    ) -> Result<(), DriverError> {
        let range = self.layout.part(part);
        let (offset, bytes) = (range.start as usize, bytes_of(&range) as usize);
        let (allocation, _) = Allocation::new(stream.context(), bytes, Shared::ByDescriptor)?;
        let mapped = self.memory.map_at(offset, &allocation, bytes);
        let made = mapped.and_then(|()| self.memory.open_at(offset, bytes, contexts));
        if let Err(error) = made.and_then(|()| self.memory.zero_at(offset, bytes, stream)) {
            self.unmapped.push(allocation);
            return Err(error);
        }
        self.parts[part as usize] = Some(allocation);
        Ok(())
    }

    /// How ranks open a part that is there.
    pub(crate) fn name(&self, part: SymmetricBufferPart) -> Result<(SymmetricBufferHandle, OwnedFd), DriverError> {
        let allocation = self.parts[part as usize].as_ref();
        let allocation = allocation.ok_or(DriverError::own("cuMemExportToShareableHandle", "there is no such part"))?;
        Ok((SymmetricBufferHandle::Descriptor(bytes_of(&self.layout.part(part))), allocation.export()?))
    }

    /// Fills all parts that are there with zeros.
    pub(crate) fn zero(&self, stream: &OwnedStream) -> Result<(), DriverError> {
        self.memory.zero_mapped(stream)
    }
}

fn bytes_of(range: &Range<u64>) -> u64 {
    range.end - range.start
}
