//! Kernel launches: which function, how many blocks and threads, and which arguments an operation
//! takes.

use std::ops::RangeInclusive;

use bytemuck::Zeroable;
use mccs_ipc::large::{ShardPiece, Shards};
use mccs_ipc::strides::Strides;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};

use super::abi::{HEADS, RELEASED, ROOT_LAST, SCALAR_AT, SCALED};
use super::algorithm::{Algorithm, CollectiveCall};
use super::messages::{by_rank, chain, one_shot, two_shots};
use super::strategy::COMBINE_BLOCKS;
use super::symmetric_buffer::{LL128_UNIT_BYTES, LL128_UNIT_WIRE_BYTES};
use super::{CombineArgs, DirectArgs, RANKS_MAX, ReduceArgs, SymmetricBufferLayout};

/// A kernel launch, but for addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch<A> {
    /// Name of the function in the image.
    pub function: &'static str,
    /// Blocks.
    pub grid: u32,
    /// Threads a block.
    pub block: u32,
    /// The one parameter.
    pub args: A,
}

/// Addresses of a rank's part in a large operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LargeBuffers {
    /// Address of its send buffer.
    pub send: u64,
    /// Address of its receive buffer.
    pub recv: u64,
    /// Its block of slots.
    pub slots: u64,
}

const LL_WARPS_MAX: u64 = 16;
/// Bytes that a warp moves at a time by LL.
const LL_UNIT_BYTES: u64 = 512;
/// Warps of a block while there are blocks left to spread over. A warp of two ranks has one peer.
fn ll_warps_wanted(nranks: u32) -> u64 {
    if nranks == 2 { 8 } else { 4 }
}
/// Ranks of pipelines of lines, as in cuda/include/ll.cuh. Two have all in one shot; how more than four do is not known.
const PIPELINE_RANKS: RangeInclusive<u32> = 3..=4;
/// Warps that move bytes in a chain's block: as in cuda/include/chain.cuh.
const CHAIN_WARPS: u32 = 12;
/// Units that a warp of a pipeline has places for.
const UNITS_A_LAP: u64 = 4;
/// Bytes of a shard from which a pipeline is faster than two shots one after the other (docs/decisions/043).
const PIPELINE_FROM: u64 = 1 << 20;
const REDUCE_THREADS: u32 = 512;
const WARP: u32 = 32;
/// Warps that move bytes in a Simple kernel's block.
const WORKER_WARPS: u32 = 18;
/// Less is not worth a block.
const SLICE_BYTES_MIN: u64 = 4096;
/// With more chunks a block they are dealt out.
const CHUNKS_UNDEALT: u64 = 2;
/// Their numbers have 31 bits, also those behind the last, which blocks are dealt at the end.
const CHUNKS_DEALT_MAX: u64 = 1 << 30;

/// Bytes of a block's part of a message: offsets have 32 bits.
const SLICE_BYTES_MAX: u32 = 1 << 31;

macro_rules! per_dtype {
    ($dtype:expr, $family:literal) => {
        match $dtype {
            DataType::I8 => concat!("mccs_", $family, "_int8"),
            DataType::U8 => concat!("mccs_", $family, "_uint8"),
            DataType::I32 => concat!("mccs_", $family, "_int32"),
            DataType::U32 => concat!("mccs_", $family, "_uint32"),
            DataType::I64 => concat!("mccs_", $family, "_int64"),
            DataType::U64 => concat!("mccs_", $family, "_uint64"),
            DataType::F16 => concat!("mccs_", $family, "_half"),
            DataType::F32 => concat!("mccs_", $family, "_float"),
            DataType::F64 => concat!("mccs_", $family, "_double"),
            DataType::Bf16 => concat!("mccs_", $family, "_bfloat16"),
            DataType::F8E4M3 => concat!("mccs_", $family, "_f8e4m3"),
            DataType::F8E5M2 => concat!("mccs_", $family, "_f8e5m2"),
        }
    };
}

/// Names of all functions of the image.
pub fn functions() -> impl Iterator<Item = &'static str> {
    let of_dtype = |dtype: &DataType| {
        let dtype = *dtype;
        [
            per_dtype!(dtype, "ll"),
            per_dtype!(dtype, "ll128"),
            per_dtype!(dtype, "ll128_batch"),
            per_dtype!(dtype, "pipeline"),
            per_dtype!(dtype, "simple"),
            per_dtype!(dtype, "simple_batch"),
            per_dtype!(dtype, "chain"),
            per_dtype!(dtype, "reduce"),
            per_dtype!(dtype, "combine"),
        ]
    };
    DataType::ALL
        .iter()
        .flat_map(of_dtype)
        .chain([
            "mccs_ll_copy",
            "mccs_ll128_copy",
            "mccs_ll128_batch_copy",
            "mccs_simple_copy",
            "mccs_simple_batch_copy",
        ])
        .chain(super::p2p::FUNCTIONS)
}

/// Names of the functions of [`Launch::reduce`].
pub fn reduce_functions() -> impl Iterator<Item = &'static str> {
    DataType::ALL.iter().map(|dtype| per_dtype!(*dtype, "reduce"))
}

/// The operator as kernels know it.
fn op_code(op: RedOp) -> u32 {
    match op {
        RedOp::Sum | RedOp::Avg | RedOp::PreMulSum => 0,
        RedOp::Prod => 1,
        RedOp::Max => 2,
        RedOp::Min => 3,
    }
}

impl Launch<DirectArgs> {
    /// One that nobody launches: for what is made ready before there is a collective.
    #[must_use]
    pub fn placeholder() -> Self {
        Launch { function: "mccs_simple_copy", grid: 1, block: 1, args: DirectArgs::zeroed() }
    }

    /// Stored data is there once the symmetric buffer has counted it: for a communicator whose operations go to several streams, of which
    /// one may go on by the count to what another has received. Without this it is there when the kernel has ended, which comes a moment
    /// later, and counting takes less.
    pub fn release(&mut self) {
        self.args.flags |= RELEASED;
    }

    /// The launch of `call.rank`. `blocks` is the most it may take. `None` where the algorithm has no such collective, or
    /// the operation does not fit the layout; all ranks get the same answer.
    #[must_use]
    pub fn collective(
        call: &CollectiveCall,
        layout: &SymmetricBufferLayout,
        algorithm: Algorithm,
        blocks: u32,
    ) -> Option<Launch<DirectArgs>> {
        Self::collective_apart(call, Strides::close(call.count), layout, algorithm, blocks)
    }

    /// The same for a call whose blocks lie apart: a part of a larger collective takes a part of every block, or of those of several hosts at
    /// once. Strides are the same on all ranks, but for those of a batch.
    #[must_use]
    pub fn collective_apart(
        call: &CollectiveCall,
        strides: Strides,
        layout: &SymmetricBufferLayout,
        algorithm: Algorithm,
        blocks: u32,
    ) -> Option<Launch<DirectArgs>> {
        let valid = layout.is_valid() && call.nranks == layout.nranks && call.rank < call.nranks;
        if !valid || call.root >= call.nranks || blocks == 0 {
            return None;
        }
        // The longest buffer of any rank must be addressable.
        let Strides { send, recv, batch } = strides;
        let longest = call.count.max(send).max(recv);
        let blocks_bytes = call.kind.payload_count(longest, call.nranks).checked_mul(8)?;
        let apart_bytes = batch.send.max(batch.recv).checked_mul(batch.places())?.checked_mul(8)?;
        blocks_bytes.checked_add(apart_bytes).filter(|bytes| *bytes < 1 << 56)?;
        let mut args = DirectArgs {
            scalar_bits: call.scalar_bits,
            ll_offset: layout.ll_offset(),
            ll_slot_bytes: layout.ll_slot_bytes(),
            simple_offset: layout.simple_offset(),
            deals_offset: layout.deals_offset(),
            ll128_offset: layout.ll128_offset(),
            ll128_slot_bytes: layout.ll128_slot_bytes(),
            rank: call.rank,
            nranks: call.nranks,
            unsharded: RANKS_MAX as u32,
            dealer: RANKS_MAX as u32,
            divisor: if call.op == RedOp::Avg { call.nranks } else { 0 },
            batch: batch.times.max(1),
            batch_skip: batch.skip,
            send_batch_stride: batch.send * call.dtype.size_bytes() as u64,
            recv_batch_stride: batch.recv * call.dtype.size_bytes() as u64,
            buffer_blocks: layout.blocks,
            slots: layout.slots,
            slot_bytes: layout.slot_bytes,
            op: op_code(call.op),
            ..DirectArgs::zeroed()
        };
        if call.kind.reduces() && call.op == RedOp::PreMulSum {
            args.flags |= SCALED | HEADS | if call.is_scalar_address { SCALAR_AT } else { 0 };
            args.scalar_dtype = call.dtype as u32;
        }
        if call.kind != CollectiveKind::Barrier {
            args.bytes = call.count * call.dtype.size_bytes() as u64;
        }
        if args.batch > 1 && !algorithm.has_batches() {
            return None;
        }
        match algorithm {
            Algorithm::SimpleChain => chain(call, &mut args)?,
            _ if algorithm.is_two_shot() => two_shots(call, algorithm, &mut args)?,
            _ => one_shot(call, strides, &mut args),
        }
        match algorithm.is_simple() {
            true => simple(call, layout, algorithm, blocks, args),
            false => ll(call, layout, algorithm, blocks, args),
        }
    }
}

/// Bytes that a block's warps have to move: of a shard, or of the whole.
fn part_bytes(args: &DirectArgs) -> u64 {
    if args.shard_bytes != 0 { args.shard_bytes.min(args.bytes) } else { args.bytes }
}

/// By LL or LL128. `None` where messages are longer than slots.
fn ll(
    call: &CollectiveCall,
    layout: &SymmetricBufferLayout,
    algorithm: Algorithm,
    blocks: u32,
    mut args: DirectArgs,
) -> Option<Launch<DirectArgs>> {
    let (part, reduces) = (part_bytes(&args), call.kind.reduces());
    let in_ll128 = algorithm.is_ll128();
    let (most, unit) = match in_ll128 {
        true => (layout.ll128_bytes, LL128_UNIT_BYTES),
        false => (layout.ll_bytes, LL_UNIT_BYTES),
    };
    let most = u64::from(most) / if algorithm.is_two_shot() { 2 } else { 1 };
    by_rank(&mut args)?;
    if algorithm == Algorithm::Ll128TwoShot
        && reduces
        && PIPELINE_RANKS.contains(&call.nranks)
        && (part > most || part >= PIPELINE_FROM)
    {
        return pipeline(call, layout, blocks, args);
    }
    let (batch, units) = (u64::from(args.batch), part.div_ceil(unit).max(1));
    // Messages of a batch lie in a slot one behind the other, in whole units.
    if part > most || batch > 1 && units.checked_mul(batch)?.checked_mul(unit)? > most {
        return None;
    }
    // A warp a unit; spread over blocks before blocks grow. Each warp has units of one message of a batch.
    let share = units.min(u64::from(blocks) * LL_WARPS_MAX / batch);
    if share == 0 {
        return None;
    }
    args.batch_share = share as u32;
    let warps = share * batch;
    let wanted = ll_warps_wanted(call.nranks).min(warps);
    let each = warps.div_ceil(u64::from(blocks)).clamp(wanted, LL_WARPS_MAX);
    let grid = warps.div_ceil(each).min(u64::from(blocks)) as u32;
    let block = WARP * each as u32;
    let function = match (reduces, in_ll128) {
        (true, true) if batch > 1 => per_dtype!(call.dtype, "ll128_batch"),
        (false, true) if batch > 1 => "mccs_ll128_batch_copy",
        (true, true) => per_dtype!(call.dtype, "ll128"),
        (true, false) => per_dtype!(call.dtype, "ll"),
        (false, true) => "mccs_ll128_copy",
        (false, false) => "mccs_ll_copy",
    };
    Some(Launch { function, grid, block, args })
}

/// By Simple, in two shots, one, or a chain.
fn simple(
    call: &CollectiveCall,
    layout: &SymmetricBufferLayout,
    algorithm: Algorithm,
    blocks: u32,
    mut args: DirectArgs,
) -> Option<Launch<DirectArgs>> {
    let (part, reduces) = (part_bytes(&args), call.kind.reduces());
    args.flags |= HEADS | RELEASED;
    let batch = u64::from(args.batch);
    let all = part.checked_mul(batch)?;
    let grid = u64::from(blocks.min(layout.blocks)).min(all.div_ceil(SLICE_BYTES_MIN).max(1));
    // Also of no bytes: kernels divide by what a chunk has.
    let slice = part.div_ceil(grid).next_multiple_of(128).max(128);
    args.slice_bytes = u32::try_from(slice).ok().filter(|bytes| *bytes <= SLICE_BYTES_MAX)?;
    // As few chunks as slots allow: each costs flags, and what overlaps gains less.
    let Slots { number, bytes } = slots(call, batch, algorithm, layout);
    (args.slots, args.slot_bytes) = (number, bytes);
    let slot = u64::from(args.slot_bytes);
    // Chunks of a batch are dealt out however few they are: as many for each message, and some for each block.
    let chunk = if batch > 1 { even_chunk(part, all.div_ceil(grid).min(slot)) } else { slot };
    let share = part.div_ceil(chunk);
    let chunks = share.checked_mul(batch)?;
    let least = if batch > 1 { 0 } else { CHUNKS_UNDEALT * grid + 1 };
    if layout.may_deal() && (least..CHUNKS_DEALT_MAX).contains(&chunks) {
        args.chunk_bytes = chunk as u32;
        args.chunks = u32::try_from(chunks).ok()?;
        args.batch_share = u32::try_from(share.max(1)).ok()?;
        // One whose pushes wait for all others: they are never far behind.
        let only_receives =
            !algorithm.is_two_shot() && matches!(call.kind, CollectiveKind::Reduce | CollectiveKind::Gather);
        args.dealer = if only_receives { (call.root + 1) % call.nranks } else { call.root };
    } else if batch > 1 {
        return None;
    } else {
        args.chunk_bytes = even_chunk(slice, slot) as u32;
    }
    if algorithm == Algorithm::SimpleChain {
        args.push_warps = CHAIN_WARPS;
        let block = WARP * (CHAIN_WARPS + 2);
        return Some(Launch { function: per_dtype!(call.dtype, "chain"), grid: grid as u32, block, args });
    }
    // Two warps of control a role. Pushing and taking out go side by side for all peers: the same number of warps for each.
    let peers = call.nranks - 1;
    let fair = |most: u32| peers * (most / peers).max(1);
    let third = fair(WORKER_WARPS / 3);
    (args.push_warps, args.out_warps) = match (call.kind, algorithm.is_two_shot()) {
        // The root combines nothing, and takes out what all others combine, who take nothing out.
        (CollectiveKind::Reduce, true) if call.rank == call.root => (WORKER_WARPS / 2, WORKER_WARPS / 2),
        (CollectiveKind::Reduce, true) => (third, 0),
        (_, true) => (third, third),
        (_, false) if reduces || args.send_stride == 0 => (third, 0),
        (_, false) => (fair(WORKER_WARPS / 2), 0),
    };
    args.middle_warps = WORKER_WARPS - args.push_warps - args.out_warps;
    let block = WARP * (args.push_warps + args.middle_warps + args.out_warps + 6);
    let function = match (reduces, batch > 1) {
        (true, true) => per_dtype!(call.dtype, "simple_batch"),
        (true, false) => per_dtype!(call.dtype, "simple"),
        (false, true) => "mccs_simple_batch_copy",
        (false, false) => "mccs_simple_copy",
    };
    Some(Launch { function, grid: grid as u32, block, args })
}

/// Bytes of chunks, at most so many, that are all about as long.
fn even_chunk(bytes: u64, most: u64) -> u64 {
    bytes.div_ceil(bytes.div_ceil(most.max(1)).max(1)).next_multiple_of(128).max(128)
}

/// Slots that a block has for a peer.
struct Slots {
    number: u32,
    /// Bytes of each.
    bytes: u32,
}

/// Slots of a call: those of the symmetric buffer, cut smaller if a chunk is waited for on its way through several hands, or several ranks'
/// at a time. By sizes of 4 to 512 MiB on four H200s (`eval/results/README.md`); how more than four differ is not known.
fn slots(call: &CollectiveCall, batch: u64, algorithm: Algorithm, layout: &SymmetricBufferLayout) -> Slots {
    let payload_bytes = call.kind.payload_count(call.count, call.nranks) * call.dtype.size_bytes() as u64 * batch;
    let wanted = match (call.kind, algorithm.is_two_shot()) {
        _ if call.nranks == 2 => layout.slots,
        _ if algorithm == Algorithm::SimpleChain => 4,
        (CollectiveKind::AllReduce, true) if payload_bytes <= 16 << 20 => 6,
        (CollectiveKind::AllReduce, true) => 4,
        (CollectiveKind::Reduce, true) | (CollectiveKind::Gather, false) if payload_bytes <= 64 << 20 => 6,
        (CollectiveKind::Reduce, true) | (CollectiveKind::Gather, false) => 4,
        _ => layout.slots,
    };
    // All of them, so that those of other operations lie in the same bytes.
    let bytes = layout.slots * layout.slot_bytes;
    match bytes.is_multiple_of(128 * wanted) {
        true => Slots { number: wanted, bytes: bytes / wanted },
        false => Slots { number: layout.slots, bytes: layout.slot_bytes },
    }
}

/// Two shots of lines at once, through places in slots that are used again.
fn pipeline(
    call: &CollectiveCall,
    layout: &SymmetricBufferLayout,
    blocks: u32,
    mut args: DirectArgs,
) -> Option<Launch<DirectArgs>> {
    if call.kind == CollectiveKind::Reduce {
        args.flags |= ROOT_LAST;
    }
    let places = layout.ll128_slot_bytes() / 2 / LL128_UNIT_WIRE_BYTES;
    let warps = args.shard_bytes.div_ceil(LL128_UNIT_BYTES).min(places / UNITS_A_LAP);
    let each = warps.div_ceil(u64::from(blocks)).clamp(1, LL_WARPS_MAX);
    let grid = (warps / each).min(u64::from(blocks)) as u32;
    (grid > 0).then_some(Launch { function: per_dtype!(call.dtype, "pipeline"), grid, block: WARP * each as u32, args })
}

impl Launch<CombineArgs> {
    /// A combination of any number of parts by `blocks` blocks. The caller fills in the public fields; `divisor` divides sums at the end.
    #[must_use]
    pub fn combine_parts(dtype: DataType, op: RedOp, divisor: Option<u32>, blocks: u32) -> Launch<CombineArgs> {
        let args = CombineArgs { divisor: divisor.unwrap_or(0), op: op_code(op), ..CombineArgs::zeroed() };
        Launch { function: per_dtype!(dtype, "combine"), grid: blocks, block: REDUCE_THREADS, args }
    }
}

impl Launch<ReduceArgs> {
    /// For a single source: its factor lies at this address, as an element.
    pub fn scaled_from(&mut self, address: u64) {
        self.args.scaled = 2;
        self.args.scalars[0] = address;
    }

    /// A local reduction by `blocks` blocks. The caller fills in addresses, sizes and words; `scaled` multiplies each source by
    /// its scalar first, `divisor` divides sums at the end ([`RedOp::Avg`] sums, and takes its number of ranks from there).
    #[must_use]
    pub fn reduce(dtype: DataType, op: RedOp, divisor: Option<u32>, scaled: bool, blocks: u32) -> Launch<ReduceArgs> {
        let args = ReduceArgs {
            divisor: divisor.unwrap_or(0),
            scaled: u32::from(scaled),
            op: op_code(op),
            ..ReduceArgs::zeroed()
        };
        Launch { function: per_dtype!(dtype, "reduce"), grid: blocks, block: REDUCE_THREADS, args }
    }

    /// The kernel that combines a piece of `rank`'s shard in a large operation ([`mccs_ipc::large`]): its own part, and those in its
    /// slots. The caller adds whom to tell.
    #[must_use]
    pub fn combine(dtype: DataType, op: RedOp, shards: &Shards, rank: u32, piece: u64, at: &LargeBuffers) -> Self {
        let nranks = shards.nranks();
        let divisor = (op == RedOp::Avg).then_some(nranks);
        let mut launch = Launch::reduce(dtype, op, divisor, false, COMBINE_BLOCKS);
        let ShardPiece { offset, bytes } = shards.piece(rank, piece);
        let args = &mut launch.args;
        (args.source_count, args.destination_count, args.pieces) = (nranks, 1, 1);
        for peer in 0..nranks {
            let slot = at.slots + shards.slot_offset(rank, peer, piece);
            args.sources[peer as usize] = if peer == rank { at.send + offset } else { slot };
        }
        args.destinations[0] = at.recv + shards.result_offset(rank, piece);
        args.counters = at.slots + shards.counter_offset();
        (args.bytes, args.piece_bytes) = (bytes, bytes.next_multiple_of(16).max(16));
        launch
    }
}
