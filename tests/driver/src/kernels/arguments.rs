//! Kernel arguments in the emulated driver: the mirror of `kernels/cuda/include/abi.cuh` and
//! `p2p.cuh`. `kernels/src/cuda` describes each field.

use bytemuck::{Pod, Zeroable};
use mccs_kernels::cuda::RANKS_MAX;

/// Flags of [`DirectArgs`].
pub(super) const HEADS: u32 = 1;
pub(super) const OWN: u32 = 2;
pub(super) const KEEP: u32 = 4;
pub(super) const SCALED: u32 = 8;
pub(super) const SCALAR_AT: u32 = 16;
pub(super) const ROOT_LAST: u32 = 64;

/// Arguments of the examples' kernel.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Fill {
    pub(super) data: u64,
    pub(super) count: u32,
    pub(super) rank: u32,
}

/// Arguments of the training benchmark's kernel.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(super) struct Product {
    pub(super) left: u64,
    pub(super) right: u64,
    pub(super) result: u64,
    pub(super) rows: u32,
    pub(super) columns: u32,
    pub(super) depth: u32,
    pub(super) tiles_down: u32,
}

/// Arguments of collectives between ranks.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[allow(dead_code, reason = "some say how warps share the work")]
#[repr(C)]
pub(super) struct DirectArgs {
    pub(super) send: u64,
    pub(super) recv: u64,
    pub(super) symmetric: [u64; RANKS_MAX],
    pub(super) abort_word: u64,
    pub(super) scalar_bits: u64,
    pub(super) bytes: u64,
    pub(super) shard_bytes: u64,
    pub(super) send_stride: u64,
    pub(super) recv_stride: u64,
    pub(super) send_batch_stride: u64,
    pub(super) recv_batch_stride: u64,
    pub(super) ll_offset: u64,
    pub(super) ll_slot_bytes: u64,
    pub(super) simple_offset: u64,
    pub(super) deals_offset: u64,
    pub(super) ll128_offset: u64,
    pub(super) ll128_slot_bytes: u64,
    pub(super) call: u64,
    pub(super) sequence: u32,
    pub(super) rank: u32,
    pub(super) nranks: u32,
    pub(super) flags: u32,
    pub(super) unsharded: u32,
    pub(super) divisor: u32,
    pub(super) send_mask: u32,
    pub(super) recv_mask: u32,
    pub(super) relay_mask: u32,
    pub(super) out_mask: u32,
    pub(super) buffer_blocks: u32,
    pub(super) slots: u32,
    pub(super) slot_bytes: u32,
    pub(super) chunk_bytes: u32,
    pub(super) slice_bytes: u32,
    pub(super) push_warps: u32,
    pub(super) middle_warps: u32,
    pub(super) out_warps: u32,
    pub(super) op: u32,
    pub(super) scalar_dtype: u32,
    pub(super) dealer: u32,
    pub(super) chunks: u32,
    pub(super) batch: u32,
    pub(super) batch_skip: u32,
    pub(super) batch_share: u32,
    reserved: u32,
    parts: [[[u32; 2]; RANKS_MAX]; 3],
    own: [u32; 2],
    result: [u32; 2],
}

/// Arguments of local reductions.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[allow(dead_code, reason = "some say how warps share the work")]
#[repr(C)]
pub(super) struct Reduce {
    pub(super) sources: [u64; RANKS_MAX],
    pub(super) destinations: [u64; RANKS_MAX],
    pub(super) scalars: [u64; RANKS_MAX],
    pub(super) flags: [u64; RANKS_MAX],
    pub(super) flag_value: u64,
    pub(super) flag_step: u64,
    pub(super) flag_stride: u64,
    pub(super) done_word: u64,
    pub(super) done_value: u64,
    pub(super) done_step: u64,
    pub(super) done_stride: u64,
    pub(super) counters: u64,
    pub(super) abort_word: u64,
    pub(super) bytes: u64,
    pub(super) piece_bytes: u64,
    pub(super) pieces: u32,
    pub(super) source_count: u32,
    pub(super) destination_count: u32,
    pub(super) divisor: u32,
    pub(super) scaled: u32,
    pub(super) op: u32,
}

/// Arguments of combinations.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Combine {
    pub(super) first: u64,
    pub(super) stride: u64,
    pub(super) own: u64,
    pub(super) to: u64,
    pub(super) bytes: u64,
    pub(super) parts: u32,
    pub(super) own_place: u32,
    pub(super) divisor: u32,
    pub(super) op: u32,
}

/// Arguments of sends and receives, before the list.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[allow(dead_code, reason = "some say how warps share the work")]
#[repr(C)]
pub(super) struct P2pHead {
    pub(super) symmetric: [u64; RANKS_MAX],
    pub(super) abort_word: u64,
    pub(super) fault: u64,
    pub(super) lanes_offset: u64,
    pub(super) ll_offset: u64,
    pub(super) simple_offset: u64,
    pub(super) sent_bytes: u64,
    pub(super) rank: u32,
    pub(super) nranks: u32,
    pub(super) lanes: u32,
    pub(super) slots: u32,
    pub(super) slot_bytes: u32,
    pub(super) part_bytes: u32,
    pub(super) spread_bytes: u32,
    pub(super) reserved: u32,
    pub(super) first: [u32; 2 * RANKS_MAX + 2],
    pub(super) blocks: [u32; RANKS_MAX],
}

/// Entries of the list.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[allow(dead_code, reason = "some say how warps share the work")]
#[repr(C)]
pub(super) struct Message {
    pub(super) buffer: u64,
    pub(super) header: u64,
}

impl From<mccs_kernels::cuda::ReduceArgs> for Reduce {
    fn from(args: mccs_kernels::cuda::ReduceArgs) -> Self {
        bytemuck::cast(args)
    }
}

const _: () = assert!(size_of::<DirectArgs>() == size_of::<mccs_kernels::cuda::DirectArgs>());
const _: () = {
    assert!(
        std::mem::offset_of!(DirectArgs, sequence) == std::mem::offset_of!(mccs_kernels::cuda::DirectArgs, sequence)
    );
};
const _: () = assert!(size_of::<Combine>() == size_of::<mccs_kernels::cuda::CombineArgs>());
const _: () = assert!(size_of::<P2pHead>() == size_of::<mccs_kernels::cuda::P2pHead>());
