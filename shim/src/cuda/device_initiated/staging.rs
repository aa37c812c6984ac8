//! Staging for GPU memory without handles (`cudaMallocAsync`, `cuMemCreate` without descriptors):
//! large operations copy through the communicator's own memory. So any buffer will do for any call,
//! at the price of a local copy.

use mccs_cuda::{Context, DeviceAddress, DeviceMemory, MappedMemory, Shared};

use crate::Error;
use crate::cuda::cuda_error;

/// As much as the largest call needed. Operations of a communicator follow each other, and may share it.
#[derive(Default)]
pub(super) struct Staging {
    /// The last is in use. Those before it were too small, and stay: to free one waits for streams, which may wait for calls that this thread
    /// has yet to make.
    blocks: Vec<Block>,
}

/// Freed by its owner, the one lives until the service has closed it; of the other nobody promises that.
enum Block {
    Mapped(MappedMemory),
    Allocated(DeviceMemory),
}

impl Block {
    fn new(context: &Context, bytes: usize) -> Result<Self, Error> {
        let mapped = MappedMemory::new(context, &[bytes], Shared::ByDescriptor).map(Block::Mapped);
        mapped.or_else(|_| DeviceMemory::new(context, bytes).map(Block::Allocated)).map_err(cuda_error)
    }

    fn place(&self) -> (DeviceAddress, usize) {
        match self {
            Block::Mapped(memory) => (memory.address(), memory.len_bytes()),
            Block::Allocated(memory) => (memory.address(), memory.len_bytes()),
        }
    }
}

impl Staging {
    /// Room for `bytes` that the service reaches.
    pub(super) fn room(&mut self, context: &Context, bytes: u64) -> Result<DeviceAddress, Error> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let (address, has) = self.blocks.last().map_or((0, 0), Block::place);
        if has >= bytes {
            return Ok(address);
        }
        // At least twice as large as the one before, so that all of these together are no larger than it.
        let block = Block::new(context, bytes.max(has.saturating_mul(2))).or_else(|_| Block::new(context, bytes))?;
        let (address, _) = block.place();
        self.blocks.push(block);
        Ok(address)
    }
}
