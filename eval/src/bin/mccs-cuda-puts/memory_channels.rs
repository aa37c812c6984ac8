//! Memory channels of a rank: kernels copy by themselves.

use std::cell::Cell;

use mccs::Bootstrap;
use mccs::cuda::{CudaCommunicator, DeviceMemoryChannel, MemoryChannels, MemoryChannelsPart};
use mccs_cuda::{Context, DeviceMemory, copy_from_host};
use mccs_kernels::cuda::{MEMORY_PARTS, MemoryChannelsArgs};

/// Most blocks of a kernel: each has channels of its own.
const BLOCKS_MAX: u32 = 64;
/// Bytes that a block is worth.
const BLOCK_BYTES: u64 = 32 << 10;

/// A rank with its channels: to the other one, or to itself.
pub struct MemorySide {
    me: u32,
    memory: DeviceMemory,
    part_bytes: u64,
    /// The channels of each block, as kernels look them up.
    table: DeviceMemory,
    /// Flag of the next packets, in step with the other rank's.
    flag: Cell<u64>,
    _channels: MemoryChannels,
}

impl MemorySide {
    /// With room for puts of so many bytes.
    pub fn new(
        context: &Context,
        comm: &CudaCommunicator,
        bootstrap: &mut Bootstrap,
        most_bytes: u64,
    ) -> anyhow::Result<Self> {
        let (me, nranks, part_bytes) = (comm.rank(), comm.nranks(), most_bytes.next_multiple_of(16));
        let bytes = MEMORY_PARTS * part_bytes;
        let memory = DeviceMemory::zeroed(context, bytes as usize + 16)?;
        let own = comm.prepare_memory_channels(memory.address(), bytes, BLOCKS_MAX)?;
        let told = bootstrap.all_gather(&own.part().to_bytes())?;
        let parts: Result<Vec<_>, _> = told.iter().map(|part| part.as_slice().try_into()).collect();
        let parts: Vec<_> = parts?.iter().map(MemoryChannelsPart::from_bytes).collect();
        let channels = comm.open_memory_channels(own, &parts)?;
        let peer = nranks - 1 - me;
        // Alone, what the first block sends the second waits for.
        let heard = |block| if nranks == 1 { block ^ 1 } else { block };
        let pairs =
            (0..BLOCKS_MAX).map(|block| Ok([channels.channel(peer, block)?, channels.channel(peer, heard(block))?]));
        let pairs: Vec<[DeviceMemoryChannel; 2]> = pairs.collect::<Result<_, mccs::Error>>()?;
        let pairs: &[u8] = bytemuck::cast_slice(pairs.as_flattened());
        let table = DeviceMemory::zeroed(context, pairs.len())?;
        // SAFETY: the table is as long.
        unsafe { copy_from_host(table.address(), pairs) }?;
        Ok(MemorySide { me, memory, part_bytes, table, flag: Cell::new(1), _channels: channels })
    }

    /// Arguments of a kernel.
    pub fn args(&self, bytes: u64, rounds: u64, packets: bool) -> MemoryChannelsArgs {
        let flag = self.flag.replace(self.flag.get() + rounds);
        MemoryChannelsArgs {
            channels: self.table.address(),
            memory: self.memory.address(),
            bytes,
            part_bytes: self.part_bytes,
            rounds,
            own_seed: flag,
            peer_seed: flag,
            result: self.memory.address() + MEMORY_PARTS * self.part_bytes,
            packets: u64::from(packets),
            begins: u64::from(self.me == 0),
        }
    }
}

/// Blocks for puts of so many bytes.
pub fn blocks_for(bytes: u64) -> u32 {
    bytes.div_ceil(BLOCK_BYTES).clamp(1, u64::from(BLOCKS_MAX)) as u32
}
