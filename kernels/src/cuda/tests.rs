//! Launches, played by a model that moves bytes as kernels do, against the CPU's way to make the same results.

use mccs_ipc::shm_exchange::CollectiveSignature;
use mccs_ipc::strides::{Batch, Strides};
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};

use super::abi::{HEADS, KEEP, OWN, Part, ROOT_LAST};
use super::*;
use crate::reference::{Value, read, write};
use crate::{Source, Store, finish_round, reduce};

fn calls(kind: CollectiveKind, nranks: u32, root: u32, count: u64) -> Vec<CollectiveCall> {
    let (dtype, op) = (DataType::I32, RedOp::Sum);
    (0..nranks)
        .map(|rank| CollectiveCall {
            kind,
            dtype,
            op,
            count,
            root,
            scalar_bits: 0,
            is_scalar_address: false,
            rank,
            nranks,
        })
        .collect()
}

fn has(mask: u32, rank: usize) -> bool {
    mask >> rank & 1 == 1
}

/// Begin and length of a part in a buffer that is strided or sharded: symmetric_buffer.cuh's rules.
fn part(args: &DirectArgs, stride: u64, owner: usize) -> (usize, usize) {
    let owner = owner as u64;
    if args.shard_bytes == 0 {
        return ((owner * stride) as usize, args.bytes as usize);
    }
    let offset = (owner - u64::from(owner > u64::from(args.unsharded))) * args.shard_bytes;
    (offset.min(args.bytes) as usize, args.shard_bytes.min(args.bytes.saturating_sub(offset)) as usize)
}

/// All ranks' results, made as kernels make them.
fn play(launches: &[DirectArgs], reduces: bool, sends: &[Vec<u8>], recvs: &mut [Vec<u8>]) {
    let message = |from: usize, owner: usize| {
        let (at, bytes) = part(&launches[from], launches[from].send_stride, owner);
        sends[from][at..at + bytes].to_vec()
    };
    let mut results = vec![Vec::new(); launches.len()];
    for (rank, args) in launches.iter().enumerate() {
        if args.flags & OWN != 0 {
            let bytes = args.bytes as usize;
            let from = if args.shard_bytes == 0 { rank * args.send_stride as usize } else { 0 };
            let to = if args.shard_bytes == 0 { rank * args.recv_stride as usize } else { 0 };
            recvs[rank][to..to + bytes].copy_from_slice(&sends[rank][from..from + bytes]);
        }
        if args.recv_mask == 0 {
            continue;
        }
        if reduces {
            let is_last = |from: &usize| args.flags & ROOT_LAST != 0 && *from == args.unsharded as usize;
            let ranks = (0..launches.len()).filter(|from| !is_last(from));
            let parts: Vec<Vec<u8>> = ranks.map(|from| message(from, rank)).collect();
            let sources: Vec<Source> =
                parts.iter().map(|part| Source { ptr: part.as_ptr(), scalar_bits: None }).collect();
            results[rank] = vec![0; parts[0].len()];
            let (to, count) = (results[rank].as_mut_ptr(), parts[0].len() / 4);
            // SAFETY: all parts of a rank have one length.
            unsafe { reduce(DataType::I32, RedOp::Sum, &sources, &[to], count, None, Store::Cached) };
            if args.flags & KEEP != 0 {
                let (at, bytes) = part(args, args.recv_stride, rank);
                recvs[rank][at..at + bytes].copy_from_slice(&results[rank]);
            }
        } else {
            for from in (0..launches.len()).filter(|from| has(args.recv_mask, *from)) {
                results[rank] = message(from, rank);
                let (at, _) = part(args, args.recv_stride, if args.shard_bytes != 0 { rank } else { from });
                recvs[rank][at..at + results[rank].len()].copy_from_slice(&results[rank]);
            }
        }
    }
    for (rank, args) in launches.iter().enumerate() {
        for from in (0..launches.len()).filter(|from| has(args.out_mask, *from)) {
            let (at, bytes) = part(args, 0, from);
            let to = &mut recvs[rank][at..at + bytes];
            if args.flags & ROOT_LAST == 0 {
                to.copy_from_slice(&results[from]);
                continue;
            }
            let own = message(rank, from);
            let sources = [&results[from], &own].map(|part| Source { ptr: part.as_ptr(), scalar_bits: None });
            // SAFETY: all have one length.
            unsafe { reduce(DataType::I32, RedOp::Sum, &sources, &[to.as_mut_ptr()], bytes / 4, None, Store::Cached) };
        }
    }
}

#[test]
fn every_collective_of_every_algorithm_is_what_the_cpu_makes() {
    for nranks in 2..=8 {
        for &kind in CollectiveKind::ALL {
            for (algorithm, count) in Algorithm::ALL.into_iter().flat_map(|a| [0, 1, 7, 1000, 4099].map(|n| (a, n))) {
                for root in [0, nranks - 1, nranks / 2] {
                    check(kind, nranks, root, count, algorithm);
                }
            }
        }
    }
}

fn check(kind: CollectiveKind, nranks: u32, root: u32, count: u64, algorithm: Algorithm) {
    let layout = SymmetricBufferLayout::initial(nranks);
    let calls = calls(kind, nranks, root, count);
    let launches: Vec<_> = calls.iter().map(|call| Launch::collective(call, &layout, algorithm, 8)).collect();
    let Some(launches) = launches.iter().copied().collect::<Option<Vec<_>>>() else {
        assert!(launches.iter().all(Option::is_none), "ranks disagree");
        return;
    };
    let what = format!("{kind} {nranks} {root} {count} {algorithm:?}");
    let shape = |launch: &Launch<DirectArgs>| (launch.function, launch.grid, launch.block, launch.args.chunk_bytes);
    assert!(launches.iter().all(|launch| shape(launch) == shape(&launches[0])), "{what}");
    let launches: Vec<DirectArgs> = launches.into_iter().map(|launch| launch.args).collect();
    for (a, from) in launches.iter().enumerate() {
        for (b, to) in launches.iter().enumerate() {
            assert!(from.shard_bytes != 0 || has(from.send_mask, b) == has(to.recv_mask, a), "{what}");
            assert_eq!(has(from.relay_mask, b), has(to.out_mask, a), "{what}");
            let full = from.flags & HEADS != 0 || a == b || (has(from.send_mask, b) && from.bytes > 0);
            assert!(full, "{what}: {a} sends {b} nothing");
        }
    }
    if !algorithm.is_simple() {
        launches.iter().enumerate().for_each(|(rank, args)| check_parts(args, rank, &what));
    }
    let elements = |n: Option<u64>| n.expect("small") as usize;
    let sends: Vec<Vec<u8>> = (0..nranks)
        .map(|rank| {
            let mut data = vec![0; 4 * elements(kind.send_count(count, nranks, rank, root))];
            for index in 0..data.len() / 4 {
                let value = i64::from(rank + 1) * 100_000 + index as i64;
                write(DataType::I32, &mut data, index, Value::Signed(value));
            }
            data
        })
        .collect();
    let empty = |rank| vec![0xa5; 4 * elements(kind.recv_count(count, nranks, rank, root))];
    let mut got: Vec<Vec<u8>> = (0..nranks).map(empty).collect();
    play(&launches, kind.reduces(), &sends, &mut got);
    let sources: Vec<Source> = sends.iter().map(|data| Source { ptr: data.as_ptr(), scalar_bits: None }).collect();
    for (rank, got) in got.iter().enumerate() {
        let mut wanted = empty(rank as u32);
        let call = CollectiveSignature { kind, dtype: DataType::I32, redop: RedOp::Sum, root, count };
        // SAFETY: contributions and results have the lengths that the kind says.
        unsafe { finish_round(&call, rank as u32, &sources, wanted.as_mut_ptr()) };
        let wrong = (0..wanted.len() / 4).find(|i| read(DataType::I32, got, *i) != read(DataType::I32, &wanted, *i));
        assert_eq!(wrong, None, "{what} on rank {rank}");
    }
}

/// Blocks of four bytes an element, so far apart, with a pattern between.
fn spread(blocks: &[u8], count: usize, stride: usize) -> Vec<u8> {
    if blocks.len() <= 4 * count {
        return blocks.to_vec();
    }
    let spread = |block: &[u8]| [block, &vec![0xa5; 4 * (stride - count)][..]].concat();
    blocks.chunks(4 * count).flat_map(spread).collect()
}

#[test]
fn blocks_may_lie_apart() {
    use CollectiveKind as Kind;
    const COUNT: usize = 1001;
    for kind in [Kind::ReduceScatter, Kind::AllGather, Kind::AllToAll, Kind::Gather, Kind::Scatter] {
        for (algorithm, strides) in Algorithm::ALL.into_iter().flat_map(|a| [(a, (1001, 1300)), (a, (2000, 1004))]) {
            let (nranks, root, count) = (4, 2, COUNT as u64);
            let (layout, calls) = (SymmetricBufferLayout::initial(nranks), calls(kind, nranks, root, count));
            let launch = |(send, recv): (usize, usize)| -> Option<Vec<DirectArgs>> {
                let strides = Strides { send: send as u64, recv: recv as u64, batch: Batch::ONE };
                let of =
                    |call| Launch::collective_apart(call, strides, &layout, algorithm, 8).map(|launch| launch.args);
                calls.iter().map(of).collect()
            };
            let (Some(close), Some(apart)) = (launch((COUNT, COUNT)), launch(strides)) else { continue };
            let bytes = |count: Option<u64>| 4 * count.expect("small") as usize;
            let input = |rank: u32| -> Vec<u8> {
                let bytes = bytes(kind.send_count(count, nranks, rank, root));
                (0..bytes).map(|at| (at as u32 * (7 + rank) % 251) as u8).collect()
            };
            let sends: Vec<_> = (0..nranks).map(input).collect();
            let empty = |rank| vec![0xa5; bytes(kind.recv_count(count, nranks, rank, root))];
            let mut wanted: Vec<Vec<u8>> = (0..nranks).map(empty).collect();
            let mut got: Vec<Vec<u8>> = wanted.iter().map(|recv| spread(recv, COUNT, strides.1)).collect();
            play(&close, kind.reduces(), &sends, &mut wanted);
            let sends: Vec<_> = sends.iter().map(|send| spread(send, COUNT, strides.0)).collect();
            play(&apart, kind.reduces(), &sends, &mut got);
            let wanted: Vec<Vec<u8>> = wanted.iter().map(|recv| spread(recv, COUNT, strides.1)).collect();
            assert!(got == wanted, "{kind} {algorithm:?} {strides:?}");
            if !algorithm.is_simple() {
                apart.iter().enumerate().for_each(|(rank, args)| check_parts(args, rank, "apart"));
            }
        }
    }
}

/// Messages of a batch lie in slots one behind the other, and blocks have as many chunks each, or fewer. Only one shot has batches.
#[test]
fn batches_fit_slots_and_fill_blocks() {
    use CollectiveKind as Kind;
    let (mut of_warps, mut of_chunks) = (0, 0);
    for (nranks, kind) in (2..=8).flat_map(|n| [Kind::AllGather, Kind::ReduceScatter, Kind::Gather].map(|k| (n, k))) {
        let layout = SymmetricBufferLayout::initial(nranks);
        for (count, times, blocks) in (0..20)
            .flat_map(|power| [2, 3, 8, 63, 64, 255].map(|times| ((1u64 << power) + 3, times)))
            .flat_map(|(count, times)| [42, 128].map(|blocks| (count, times, blocks)))
        {
            let batch = Batch { times, skip: times / 2, send: count, recv: 8 * count };
            let strides = Strides { batch, ..Strides::close(count) };
            let of = |algorithm, layout| {
                let of = |call| Launch::collective_apart(call, strides, layout, algorithm, blocks);
                calls(kind, nranks, 1, count).iter().map(of).collect::<Option<Vec<_>>>()
            };
            for algorithm in Algorithm::ALL {
                let what = format!("{kind} of {count}, {times} times, {nranks} ranks, {blocks} blocks, {algorithm:?}");
                let Some(launches) = of(algorithm, &layout) else {
                    assert_ne!(algorithm, Algorithm::SimpleOneShot, "{what}: any batch goes in chunks");
                    continue;
                };
                let Launch { grid, block, args, .. } = launches[0];
                let shape = |launch: &Launch<DirectArgs>| (launch.grid, launch.block, launch.args.batch_share);
                assert!(launches.iter().all(|launch| shape(launch) == shape(&launches[0])), "{what}");
                let (share, messages) = (u64::from(args.batch_share), u64::from(times));
                assert!(
                    share > 0
                        && grid <= blocks
                        && (args.send_batch_stride, args.recv_batch_stride) == (4 * count, 32 * count)
                );
                let (unit, wire, slot) = match algorithm {
                    Algorithm::Ll128OneShot => (480, 512, args.ll128_slot_bytes),
                    Algorithm::SimpleOneShot => {
                        let chunk = u64::from(args.chunk_bytes);
                        assert!(args.chunk_bytes <= args.slot_bytes && u64::from(args.chunks) == share * messages);
                        assert!(share * chunk >= args.bytes && (share - 1) * chunk < args.bytes, "{what}");
                        assert!(u64::from(args.chunks) * 2 > u64::from(grid), "{what}: {args:?}");
                        of_chunks += 1;
                        continue;
                    }
                    _ => panic!("{what}"),
                };
                let warps = u64::from(grid * block / 32);
                assert!(block <= 512 && share * messages <= warps && share <= args.bytes.div_ceil(unit), "{what}");
                assert!(messages * args.bytes.div_ceil(unit) * wire <= slot, "{what}");
                of_warps += 1;
            }
            let restless = SymmetricBufferLayout { slots: 16, ..layout };
            assert_eq!(of(Algorithm::SimpleOneShot, &restless), None, "further apart than deals reach");
        }
    }
    assert!(of_warps > 1000 && of_chunks > 1000, "{of_warps}, {of_chunks}");
}

#[test]
fn batches_go_by_the_next_rule_that_has_them() {
    let of = |strategy: DeviceInitiatedStrategy, bytes| strategy.batch_kernel(CollectiveKind::AllGather, bytes);
    let lines = DeviceInitiatedStrategy::with_ll128(8);
    assert_eq!(of(lines, 100), Some((Algorithm::Ll128OneShot, 128)));
    assert_eq!(of(lines, 6 << 20), Some((Algorithm::SimpleOneShot, 64)));
    // A GPU that does not store lines whole gets none.
    let packets = DeviceInitiatedStrategy::initial(8);
    assert_eq!(of(packets, 100), Some((Algorithm::SimpleOneShot, 64)));
    // The operator's pinned strategy is not for batches: whoever launches takes chunks instead.
    let mut pinned = DeviceInitiatedStrategy::initial(8);
    pinned.rules[CollectiveKind::AllGather as usize] = [Rule::new(u64::MAX, Algorithm::LlOneShot, 7); 6];
    assert_eq!(of(pinned, 100), Some((Algorithm::LlOneShot, 7)));
}

/// Parts of a small operation's messages as they are written down, and as strides and shards say.
fn check_parts(args: &DirectArgs, rank: usize, what: &str) {
    let told = |part: Part| (part.at as usize, part.bytes as usize);
    assert_eq!(
        (told(args.own), told(args.result)),
        (part(args, args.send_stride, rank), part(args, args.recv_stride, rank))
    );
    for peer in 0..RANKS_MAX {
        let of = |mask, stride, owner| if has(mask, peer) { part(args, stride, owner) } else { (0, 0) };
        let receiver = if args.shard_bytes == 0 { peer } else { rank };
        assert_eq!(told(args.sends[peer]), of(args.send_mask, args.send_stride, peer), "{what}");
        assert_eq!(told(args.recvs[peer]), of(args.recv_mask, args.recv_stride, receiver), "{what}");
        assert_eq!(told(args.outs[peer]), of(args.out_mask, 0, peer), "{what}");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let layout = SymmetricBufferLayout::initial(4);
    let launch =
        |kind, count, algorithm, blocks| Launch::collective(&calls(kind, 4, 0, count)[1], &layout, algorithm, blocks);
    let fits = u64::from(layout.ll_bytes) / 4;
    let one_shot = Algorithm::LlOneShot;
    assert!(launch(CollectiveKind::AllReduce, fits, one_shot, 8).is_some());
    assert!(launch(CollectiveKind::AllReduce, fits + 1, one_shot, 8).is_none());
    assert!(launch(CollectiveKind::AllReduce, 2 * fits, Algorithm::LlTwoShot, 8).is_some());
    assert!(launch(CollectiveKind::AllReduce, 2 * fits + 1, Algorithm::LlTwoShot, 8).is_none());
    assert!(launch(CollectiveKind::AllGather, 100, Algorithm::LlTwoShot, 8).is_none());
    assert!(launch(CollectiveKind::AllReduce, 100, one_shot, 0).is_none());
    assert!(launch(CollectiveKind::AllReduce, u64::MAX / 4, Algorithm::SimpleTwoShot, 8).is_none());
    // A block's offsets have 32 bits.
    assert!(launch(CollectiveKind::AllReduce, 1 << 32, Algorithm::SimpleOneShot, 1).is_none());
    assert!(launch(CollectiveKind::AllReduce, 1 << 32, Algorithm::SimpleOneShot, 64).is_some());
    let foreign = CollectiveCall { nranks: 3, ..calls(CollectiveKind::AllReduce, 4, 0, 8)[1] };
    assert!(Launch::collective(&foreign, &layout, one_shot, 8).is_none());
}

#[test]
fn packets_of_two_shots_stay_in_their_halves_and_chunks_in_their_slots() {
    let (mut dealt, mut pipelines, mut chains) = (0, 0, 0);
    for nranks in 2..=8 {
        let layout = SymmetricBufferLayout::initial(nranks);
        for &kind in CollectiveKind::ALL {
            for count in (0..24).map(|power| (1u64 << power) + 3) {
                let of = |rank: usize| Algorithm::ALL.map(|a| (a, calls(kind, nranks, 0, count)[rank]));
                for (algorithm, call) in of(0).into_iter().chain(of(1)) {
                    let Some(launch) = Launch::collective(&call, &layout, algorithm, 64) else { continue };
                    let args = launch.args;
                    assert!(launch.block <= 768 && launch.grid <= 64);
                    let (part, shots) = match args.shard_bytes {
                        0 => (args.bytes, 1),
                        shard => (shard.min(args.bytes), 2),
                    };
                    match algorithm {
                        Algorithm::LlOneShot | Algorithm::LlTwoShot => {
                            assert!(part.next_multiple_of(16) * 2 <= args.ll_slot_bytes / shots, "{call:?}");
                        }
                        Algorithm::Ll128TwoShot if launch.function.starts_with("mccs_pipeline") => {
                            let warps = u64::from(launch.grid * launch.block / 32);
                            assert!(warps * 4 * 512 <= args.ll128_slot_bytes / 2, "{call:?}");
                            pipelines += 1;
                        }
                        Algorithm::Ll128OneShot | Algorithm::Ll128TwoShot => {
                            assert!(part.div_ceil(480) * 512 <= args.ll128_slot_bytes / shots, "{call:?}");
                        }
                        _ => {
                            assert!(args.chunk_bytes <= args.slot_bytes && args.chunk_bytes.is_multiple_of(16));
                            assert_eq!(args.slots * args.slot_bytes, layout.slots * layout.slot_bytes);
                            assert!((2..=8).contains(&args.slots) && args.slot_bytes.is_multiple_of(128));
                            assert!(u64::from(args.slice_bytes) * u64::from(launch.grid) >= part.min(args.bytes));
                            dealt += u32::from(is_dealt_well(&call, &layout, algorithm, &args));
                            if algorithm == Algorithm::SimpleChain {
                                assert_eq!((args.push_warps + 2, args.middle_warps), (launch.block / 32, 0));
                                chains += 1;
                                continue;
                            }
                            let warps = args.push_warps + args.middle_warps + args.out_warps;
                            for (mask, warps) in [
                                (args.send_mask, args.push_warps),
                                (args.recv_mask, args.middle_warps),
                                (args.out_mask, args.out_warps),
                            ] {
                                assert!(warps < 32 && (mask == 0 || warps > 0), "{args:?}");
                            }
                            assert_eq!(warps + 6, launch.block / 32);
                        }
                    }
                }
            }
        }
    }
    assert!(dealt > 100, "{dealt} operations whose chunks are dealt out");
    assert!(pipelines > 10 && chains > 10, "{pipelines} pipelines, {chains} chains");
}

/// Whether chunks are dealt out; if so, they are the whole message, and whoever deals waits for all that take chunks.
fn is_dealt_well(
    call: &CollectiveCall,
    layout: &SymmetricBufferLayout,
    algorithm: Algorithm,
    args: &DirectArgs,
) -> bool {
    let part = if args.shard_bytes != 0 { args.shard_bytes.min(args.bytes) } else { args.bytes };
    if args.dealer == RANKS_MAX as u32 {
        return false;
    }
    assert_eq!(u64::from(args.chunks), part.div_ceil(u64::from(args.chunk_bytes)), "{call:?}");
    let of = |rank| {
        Launch::collective(&CollectiveCall { rank, ..*call }, layout, algorithm, 64).expect("as for the first").args
    };
    let dealers = of(args.dealer);
    for rank in (0..call.nranks).filter(|rank| *rank != args.dealer) {
        let args = of(rank);
        assert_eq!((args.dealer, args.chunks), (dealers.dealer, dealers.chunks), "{call:?}");
        if algorithm == Algorithm::SimpleChain {
            // The first, which the others follow by a ring of slots each: places for deals are used again every 32 steps.
            assert!(dealers.recv_mask == 0 && args.recv_mask != 0 && args.slots * (call.nranks - 1) + 3 < 32);
            continue;
        }
        // One that only sends is held back by who takes it, as the dealer is.
        let sends_alike = args.recv_mask == 0 && args.out_mask == 0 && args.send_mask & dealers.send_mask != 0;
        assert!(has(dealers.send_mask, rank as usize) || sends_alike, "{call:?}");
    }
    let restless = SymmetricBufferLayout { slots: 16, ..*layout };
    let args = Launch::collective(call, &restless, algorithm, 64).expect("larger buffers").args;
    assert_eq!(args.dealer, RANKS_MAX as u32, "further apart than deals reach");
    true
}

#[test]
fn symmetric_buffers_hold_all_that_lies_in_them() {
    let layout = SymmetricBufferLayout {
        nranks: 3,
        blocks: 5,
        slots: 2,
        slot_bytes: 256,
        ll_bytes: 384,
        ll128_bytes: 1024,
        lanes: 8,
    };
    assert!(layout.is_valid());
    // Heads and four sets of words, then two halves of two peers' packets, then slots, each part in whole large pages.
    assert!(layout.ll_offset() >= 1024 + 4 * 5 * 8 * 8);
    assert_eq!(layout.ll128_offset(), (layout.ll_offset() + 2 * 2 * 768).next_multiple_of(2 << 20));
    // In a shot, 512 bytes are two units.
    assert_eq!(layout.simple_offset(), (layout.ll128_offset() + 2 * 2 * 2 * 1024).next_multiple_of(2 << 20));
    assert_eq!(layout.p2p().lanes_offset, (layout.simple_offset() + 2 * 2 * 5 * 2 * 2 * 256).next_multiple_of(2 << 20));
    assert!(!SymmetricBufferLayout { nranks: 9, ..layout }.is_valid());
    assert!(!SymmetricBufferLayout { slots: 1, ..layout }.is_valid());
    assert!(!SymmetricBufferLayout { slot_bytes: 200, ..layout }.is_valid());
}

#[test]
fn strategies_choose_by_size_and_never_trust_a_number() {
    for (nranks, strategy) in (2..=8)
        .flat_map(|n| [DeviceInitiatedStrategy::initial, DeviceInitiatedStrategy::with_ll128].map(|of| (n, of(n))))
    {
        let layout = SymmetricBufferLayout::initial(nranks);
        for &kind in CollectiveKind::ALL {
            for count in (0..23).map(|power| 1u64 << power) {
                let call = calls(kind, nranks, 0, count)[0];
                let payload = kind.payload_count(count, nranks) * 4;
                if let Some((algorithm, blocks)) = strategy.choose(kind, payload) {
                    assert!(Launch::collective(&call, &layout, algorithm, blocks).is_some(), "{call:?} {algorithm:?}");
                }
            }
        }
        assert!(strategy.choose(CollectiveKind::AllReduce, 8).is_some());
        assert_eq!(strategy.choose(CollectiveKind::AllReduce, u64::MAX), None);
        let mut forged = strategy;
        forged.rules[0][0].algorithm = 77;
        assert_eq!(forged.choose(CollectiveKind::AllReduce, 8), None);
    }
}

#[test]
fn a_limit_of_blocks_holds_for_every_kernel_and_none_is_without_blocks() {
    for most in [0, 1, 16, 1000] {
        let limited = DeviceInitiatedStrategy::with_ll128(4).with_max_blocks(most);
        let (mut greatest, limit) = (0, most.max(1));
        for &kind in CollectiveKind::ALL.iter().filter(|kind| **kind != CollectiveKind::Barrier) {
            for bytes in (0..40).map(|power| 1u64 << power) {
                let of = |strategy: &DeviceInitiatedStrategy| strategy.kernel(kind, bytes).expect("a kernel");
                let ((algorithm, blocks), (as_measured, more)) =
                    (of(&limited), of(&DeviceInitiatedStrategy::with_ll128(4)));
                assert_eq!((algorithm, blocks), (as_measured, more.min(limit)), "{kind} {bytes}");
                greatest = greatest.max(blocks);
            }
        }
        assert_eq!((greatest, limited.combine_blocks), (limit.min(128), limit.min(128)));
    }
}

#[test]
fn kernels_have_a_way_also_where_copy_engines_begin() {
    let mut strategy = DeviceInitiatedStrategy::with_ll128(4);
    strategy.large_from[CollectiveKind::AllReduce as usize] = 8 << 20;
    let choose = |bytes| strategy.choose(CollectiveKind::AllReduce, bytes);
    assert!(choose((8 << 20) - 1).is_some() && choose(8 << 20).is_none() && choose(1 << 40).is_none());
    assert!(strategy.kernel(CollectiveKind::AllReduce, 1 << 40).is_some());
    assert!(strategy.choose(CollectiveKind::AllGather, 1 << 40).is_some());
}

#[test]
fn the_image_has_what_launches_name() {
    let Some(image) = IMAGE else { return };
    assert!(image.len() > 100_000 && image.as_ptr().addr().is_multiple_of(64));
}
