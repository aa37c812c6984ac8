//! Messages between ranks' kernels: who sends which part of a buffer to whom, by algorithm.
//!
//! All collectives are exchanges of *messages* between pairs of ranks. In one shot, every message is what the sender's
//! buffer holds for the receiver, who combines or copies it. In two shots, the buffer is cut into shards: messages
//! of the first phase bring each shard to its owner, who combines (or copies) it and sends it on in the second phase to
//! whoever wants it. Masks, strides and the shards' owners, and parts by rank where they are small, say it all; kernels know no collectives.

use std::ops::RangeInclusive;

use bytemuck::Zeroable;
use mccs_ipc::strides::Strides;
use mccs_ipc::types::{CollectiveKind, RedOp};

use super::DirectArgs;
use super::abi::{HEADS, KEEP, OWN, Part};
use super::algorithm::{Algorithm, CollectiveCall};

/// Ranks of chains: as far apart as the first and the last may be for chunks to be dealt out ([`SymmetricBufferLayout::may_deal`](super::SymmetricBufferLayout::may_deal)). How more than four do is not known.
const CHAIN_RANKS: RangeInclusive<u32> = 3..=4;

/// All ranks' bits but one's.
fn all_but(nranks: u32, rank: u32) -> u32 {
    ((1 << nranks) - 1) & !(1 << rank)
}

/// Every message from its origin to its end.
pub(super) fn one_shot(call: &CollectiveCall, strides: Strides, args: &mut DirectArgs) {
    use CollectiveKind as Kind;
    let &CollectiveCall { kind, rank, root, nranks, .. } = call;
    let (others, root_bit, is_root) = (all_but(nranks, rank), 1 << root, rank == root);
    let to_root = if is_root { (0, others) } else { (root_bit, 0) };
    let from_root = if is_root { (others, 0) } else { (0, root_bit) };
    (args.send_mask, args.recv_mask) = match kind {
        Kind::AllReduce | Kind::AllGather | Kind::ReduceScatter | Kind::AllToAll => (others, others),
        Kind::Broadcast | Kind::Scatter => from_root,
        Kind::Reduce | Kind::Gather => to_root,
        Kind::Barrier => (0, 0),
    };
    if matches!(kind, Kind::ReduceScatter | Kind::AllToAll | Kind::Scatter) {
        args.send_stride = strides.send * call.dtype.size_bytes() as u64;
    }
    if matches!(kind, Kind::AllGather | Kind::AllToAll | Kind::Gather) {
        args.recv_stride = strides.recv * call.dtype.size_bytes() as u64;
    }
    let keeps = match kind {
        Kind::AllReduce | Kind::ReduceScatter => KEEP,
        Kind::Reduce if is_root => KEEP,
        Kind::AllGather | Kind::AllToAll => OWN,
        Kind::Broadcast | Kind::Scatter | Kind::Gather if is_root => OWN,
        _ => 0,
    };
    args.flags |= keeps;
    // A message from every rank to every other is the full exchange that symmetric buffers need.
    if call.kind.has_root() || args.bytes == 0 || args.send_mask == 0 {
        args.flags |= HEADS;
    }
}

/// By way of the shards' owners. `None` where the algorithm has no such collective.
pub(super) fn two_shots(call: &CollectiveCall, algorithm: Algorithm, args: &mut DirectArgs) -> Option<()> {
    use CollectiveKind as Kind;
    let &CollectiveCall { kind, rank, root, nranks, .. } = call;
    let (others, is_root) = (all_but(nranks, rank), rank == root);
    // The root of a rooted collective owns no shard: its link is busy with the whole buffer already.
    let owners = if kind.has_root() { nranks - 1 } else { nranks };
    let unit = if algorithm.is_simple() { 128 } else { 16 };
    args.shard_bytes = args.bytes.div_ceil(u64::from(owners)).next_multiple_of(unit).max(unit);
    args.flags |= HEADS;
    match kind {
        Kind::AllReduce => {
            (args.send_mask, args.recv_mask, args.relay_mask, args.out_mask) = (others, others, others, others);
            args.flags |= KEEP;
        }
        Kind::Broadcast if nranks > 2 => {
            args.unsharded = root;
            if is_root {
                args.send_mask = others;
                args.flags |= OWN;
            } else {
                args.recv_mask = 1 << root;
                args.relay_mask = others & !(1 << root);
                args.out_mask = args.relay_mask;
                args.flags |= KEEP;
            }
        }
        Kind::Reduce if nranks > 2 => {
            args.unsharded = root;
            args.send_mask = others & !(1 << root);
            if is_root {
                args.out_mask = others;
            } else {
                args.recv_mask = others;
                args.relay_mask = 1 << root;
            }
        }
        _ => return None,
    }
    Some(())
}

/// A reduce from rank to rank, the root last. Factors are for a reduction of all ranks' data at a time.
pub(super) fn chain(call: &CollectiveCall, args: &mut DirectArgs) -> Option<()> {
    let &CollectiveCall { kind, op, rank, root, nranks, .. } = call;
    if kind != CollectiveKind::Reduce || op == RedOp::PreMulSum || !CHAIN_RANKS.contains(&nranks) {
        return None;
    }
    let (before, next) = ((rank + nranks - 1) % nranks, (rank + 1) % nranks);
    if rank == root {
        args.flags |= KEEP;
    } else {
        args.send_mask = 1 << next;
        // The root divides the whole sum.
        args.divisor = 0;
    }
    if before != root {
        args.recv_mask = 1 << before;
    }
    Some(())
}

/// Parts by rank, of an operation by LL or LL128: `None` where it is too long for offsets of 32 bits.
pub(super) fn by_rank(args: &mut DirectArgs) -> Option<()> {
    let DirectArgs { bytes, shard_bytes, rank, unsharded, .. } = *args;
    let strides = args.send_stride.max(args.recv_stride).checked_mul(u64::from(args.nranks))?;
    u32::try_from(bytes.max(shard_bytes).max(strides)).ok().filter(|bytes| *bytes < 1 << 31)?;
    let part = |owner: u32, stride: u64| match shard_bytes {
        0 => Part { at: (u64::from(owner) * stride) as u32, bytes: bytes as u32 },
        _ => {
            let at = (u64::from(owner - u32::from(owner > unsharded)) * shard_bytes).min(bytes);
            Part { at: at as u32, bytes: shard_bytes.min(bytes - at) as u32 }
        }
    };
    let of = |mask: u32, message: &dyn Fn(u32) -> Part| {
        std::array::from_fn(|peer| if mask >> peer & 1 == 1 { message(peer as u32) } else { Part::zeroed() })
    };
    args.own = part(rank, args.send_stride);
    args.result = part(rank, args.recv_stride);
    args.sends = of(args.send_mask, &|peer| part(peer, args.send_stride));
    // A shard has a part for this rank.
    args.recvs = of(args.recv_mask, &|peer| if shard_bytes == 0 { part(peer, args.recv_stride) } else { args.result });
    args.outs = of(args.out_mask, &|peer| part(peer, args.recv_stride));
    Some(())
}
