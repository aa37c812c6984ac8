//! Memory of kinds that no other process can open (`cuMemCreate`, `cudaMallocAsync`): what large operations read and write there
//! goes through memory of the communicator's own, at the price of a local copy, so that any buffer will do for any call.

use mccs_cuda::{Context, DeviceAddress, DeviceMemory, PointerKind, pointer_kind};

use crate::Error;
use crate::cuda::cuda_error;

/// As much as the largest call needed. Operations of a communicator follow each other, and may share it.
#[derive(Default)]
pub(super) struct Staging(Option<DeviceMemory>);

impl Staging {
    /// Where the service reaches `bytes` that are meant for `address`: there, if it can. The context must be current.
    pub(super) fn place(
        &mut self,
        context: &Context,
        address: DeviceAddress,
        bytes: u64,
    ) -> Result<DeviceAddress, Error> {
        if bytes == 0 || pointer_kind(address).map_err(cuda_error)? == PointerKind::Ipc {
            return Ok(address);
        }
        match &self.0 {
            Some(memory) if memory.len_bytes() as u64 >= bytes => Ok(memory.address()),
            _ => {
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                let memory = DeviceMemory::zeroed(context, bytes).map_err(cuda_error)?;
                Ok(self.0.insert(memory).address())
            }
        }
    }
}
