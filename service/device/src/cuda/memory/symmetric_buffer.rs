//! Symmetric buffers: GPU memory of the service that ranks open, made at first use, and blocks of
//! slots.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use mccs_cuda::{Allocation, Context, DeviceAddress, DeviceMemory, DriverError, MappedMemory, OwnedStream, Shared};
use mccs_ipc::device_initiated::{SymmetricBufferHandle, SymmetricBufferPart};
use mccs_ipc::shm::{Mapping, ShmError};
use mccs_kernels::cuda::SymmetricBufferLayout;
use mccs_runtime::Share;

use crate::cuda::memory::deferred_free::DeferredFrees;

/// Memory of one GPU for other processes, by how they open it.
pub(crate) enum Block {
    ByHandle(DeviceMemory),
    ByDescriptor(MappedMemory, Allocation),
}

impl Block {
    /// One that ranks open by a descriptor, in a GPU's context; all of `contexts` reach it. Its content is not defined. Slots that are
    /// there when something fails go to the thread that frees.
    pub(crate) fn by_descriptor(
        context: &Context,
        bytes: u64,
        shared: Shared,
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

/// A rank's symmetric buffer. Ranks open its parts by descriptors.
pub(crate) enum RankBuffer {
    /// On its GPU.
    Gpu(GpuBuffer),
    /// In pinned memory of the host, of which there is the head alone.
    Host(HostBuffer),
}

/// Addresses for all of a symmetric buffer, and the parts that are made.
pub(crate) struct GpuBuffer {
    layout: SymmetricBufferLayout,
    memory: MappedMemory,
    /// Kept to be exported.
    parts: [Option<Allocation>; SymmetricBufferPart::ALL.len()],
    /// Allocations that could not be mapped: dropped with the rest.
    unmapped: Vec<Allocation>,
}

/// The head of a symmetric buffer, which each rank pins for its own GPU.
pub(crate) struct HostBuffer {
    fd: OwnedFd,
    mapping: Mapping,
}

impl RankBuffer {
    /// Addresses for a symmetric buffer on a context's GPU. Nothing is there yet.
    pub(crate) fn reserve(context: &Context, layout: SymmetricBufferLayout) -> Result<Self, DriverError> {
        let memory = MappedMemory::reserve(context, layout.bytes() as usize)?;
        let parts = [const { None }; SymmetricBufferPart::ALL.len()];
        Ok(RankBuffer::Gpu(GpuBuffer { layout, memory, parts, unmapped: Vec::new() }))
    }

    /// The head of a symmetric buffer in memory of the host, full of zeros.
    pub(crate) fn on_host(layout: SymmetricBufferLayout) -> Result<Self, ShmError> {
        let (fd, mapping) = Mapping::create("mccs-pinned", bytes_of(&layout.part(SymmetricBufferPart::Head)))?;
        Ok(RankBuffer::Host(HostBuffer { fd, mapping }))
    }

    /// Whether a part is there.
    pub(crate) fn has(&self, part: SymmetricBufferPart) -> bool {
        match self {
            RankBuffer::Gpu(buffer) => buffer.has(part),
            RankBuffer::Host(_) => part == SymmetricBufferPart::Head,
        }
    }

    /// Bytes of a GPU's memory that it has.
    pub(crate) fn held_bytes(&self) -> u64 {
        match self {
            RankBuffer::Gpu(buffer) => buffer.held_bytes(),
            RankBuffer::Host(_) => 0,
        }
    }

    /// Makes a part, full of zeros, which the GPUs of contexts reach. The stream is the symmetric buffer's GPU's.
    pub(crate) fn make(
        &mut self,
        part: SymmetricBufferPart,
        contexts: &[&Context],
        stream: &OwnedStream,
    ) -> Result<(), DriverError> {
        match self {
            RankBuffer::Gpu(buffer) => buffer.make(part, contexts, stream),
            RankBuffer::Host(_) => {
                Err(DriverError::own("cuMemCreate", "memory of the host has the head of a symmetric buffer alone"))
            }
        }
    }

    /// How ranks open a part that is there.
    pub(crate) fn name(&self, part: SymmetricBufferPart) -> Result<(SymmetricBufferHandle, OwnedFd), DriverError> {
        match self {
            RankBuffer::Gpu(buffer) => buffer.name(part),
            RankBuffer::Host(buffer) => {
                let fd = buffer.fd.try_clone();
                let fd = fd.map_err(|_| DriverError::own("dup", "no descriptor for memory of the host"))?;
                Ok((SymmetricBufferHandle::Host(buffer.mapping.len_bytes() as u64), fd))
            }
        }
    }

    /// Fills all parts that are there with zeros.
    pub(crate) fn zero(&self, stream: &OwnedStream) -> Result<(), DriverError> {
        match self {
            RankBuffer::Gpu(buffer) => buffer.memory.zero_mapped(stream),
            RankBuffer::Host(buffer) => {
                buffer.words().for_each(|word| word.store(0, Ordering::Relaxed));
                Ok(())
            }
        }
    }

    /// Reads whole words from an offset on, by a stream of the symmetric buffer's GPU where they are there.
    pub(crate) fn read(&self, stream: &OwnedStream, offset: u64, bytes: &mut [u8]) -> Result<(), DriverError> {
        match self {
            // SAFETY: the symmetric buffer is mapped while it is held, in its GPU's context, which is the stream's.
            RankBuffer::Gpu(buffer) => unsafe { stream.read(bytes, buffer.memory.address() + offset) },
            RankBuffer::Host(buffer) => {
                let from = buffer.words().skip(offset as usize / size_of::<u64>());
                let words = bytes.chunks_exact_mut(size_of::<u64>());
                words
                    .zip(from)
                    .for_each(|(word, from)| word.copy_from_slice(&from.load(Ordering::Relaxed).to_ne_bytes()));
                Ok(())
            }
        }
    }
}

impl HostBuffer {
    fn words(&self) -> impl Iterator<Item = &AtomicU64> {
        let words = self.mapping.as_ptr().cast::<u64>();
        // SAFETY: words are inside of the mapping, which is aligned to pages and lives as long as `self`; all others use words there as kernels do.
        (0..self.mapping.len_bytes() / size_of::<u64>()).map(move |at| unsafe { AtomicU64::from_ptr(words.add(at)) })
    }
}

impl GpuBuffer {
    fn has(&self, part: SymmetricBufferPart) -> bool {
        self.parts[part as usize].is_some()
    }

    fn held_bytes(&self) -> u64 {
        SymmetricBufferPart::ALL
            .into_iter()
            .filter(|part| self.has(*part))
            .map(|part| bytes_of(&self.layout.part(part)))
            .sum()
    }

    fn make(
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

    fn name(&self, part: SymmetricBufferPart) -> Result<(SymmetricBufferHandle, OwnedFd), DriverError> {
        let allocation = self.parts[part as usize].as_ref();
        let allocation = allocation.ok_or(DriverError::own("cuMemExportToShareableHandle", "there is no such part"))?;
        Ok((SymmetricBufferHandle::Descriptor(bytes_of(&self.layout.part(part))), allocation.export()?))
    }
}

fn bytes_of(range: &Range<u64>) -> u64 {
    range.end - range.start
}
