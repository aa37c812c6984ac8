//! GPU memory of the service that ranks open.

use std::os::fd::OwnedFd;

use mccs_cuda::{Allocation, Context, DeviceAddress, DeviceMemory, DriverError, MappedMemory, OwnedStream, Shared};
use mccs_ipc::direct::AreaHandle;

use super::frees::Frees;

/// GPU memory for other processes, by how they open it.
pub(super) enum Area {
    ByHandle(DeviceMemory),
    ByDescriptor(MappedMemory, Allocation),
}

impl Area {
    /// One that ranks open by a descriptor, in a GPU's context; all of `contexts` reach it. What is in it is not defined. What is there when something
    /// fails goes to the thread that frees.
    pub(super) fn by_descriptor(
        context: &Context,
        bytes: u64,
        contexts: &[&Context],
        frees: &Frees,
    ) -> Result<Self, DriverError> {
        let (allocation, bytes) = Allocation::new(context, bytes as usize, Shared::ByDescriptor)?;
        let mut memory = match MappedMemory::reserve(context, bytes) {
            Ok(memory) => memory,
            Err(error) => {
                frees.free(allocation);
                return Err(error);
            }
        };
        if let Err(error) = memory.map(&allocation, bytes).and_then(|()| memory.open_to(contexts)) {
            frees.free((memory, allocation));
            return Err(error);
        }
        Ok(Area::ByDescriptor(memory, allocation))
    }

    pub(super) fn address(&self) -> DeviceAddress {
        match self {
            Area::ByHandle(memory) => memory.address(),
            Area::ByDescriptor(memory, _) => memory.address(),
        }
    }

    pub(super) fn zero(&self, stream: &OwnedStream) -> Result<(), DriverError> {
        match self {
            Area::ByHandle(memory) => memory.zero(stream),
            Area::ByDescriptor(memory, _) => memory.zero(stream),
        }
    }

    /// How others open it; with the descriptor that goes with that, where there is one.
    pub(super) fn name(&self) -> Result<(AreaHandle, Option<OwnedFd>), DriverError> {
        Ok(match self {
            Area::ByHandle(memory) => (AreaHandle::Ipc(memory.export()?.0.to_vec()), None),
            Area::ByDescriptor(memory, allocation) => {
                (AreaHandle::Descriptor(memory.len_bytes() as u64), Some(allocation.export()?))
            }
        })
    }
}
