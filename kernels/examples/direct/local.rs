//! Local reductions: pieces that arrive one after another.

use mccs_ipc::types::{DataType, RedOp};
use mccs_kernels::cuda::Launch;
use mccs_kernels::{Source, Store, reduce};

use crate::Bench;
use crate::check::{contribution, same};

pub fn check(bench: &Bench) {
    let gpu = &bench.gpus[0];
    gpu.make_current();
    for &dtype in DataType::ALL {
        for &op in RedOp::ALL {
            for (count, shift, sources, pieces) in [(1003, 0, 3, 1), (50_000, 1, 2, 3), (20_000, 0, 8, 4)] {
                one(bench, dtype, op, count, shift * dtype.size_bytes(), sources, pieces);
            }
        }
    }
}

fn one(bench: &Bench, dtype: DataType, op: RedOp, count: usize, shift: usize, sources: usize, pieces: u32) {
    let (gpu, bytes) = (&bench.gpus[0], count * dtype.size_bytes());
    let what = || format!("local {dtype} {op} {count} {shift} {sources} {pieces}");
    let room = (bytes + 4096).next_multiple_of(4096);
    let at = |index: usize| bench.send[0] + (4096 + index * room + shift) as u64;
    // Flags and counters lie before the data.
    let (flags, counters) = (bench.send[0], bench.send[0] + 1024);
    gpu.set(flags, 0, 4096);
    let data: Vec<Vec<u8>> = (0..sources).map(|source| contribution(dtype, bytes, (source + count) as u64)).collect();
    data.iter().enumerate().for_each(|(index, data)| gpu.write(at(index), data));
    let to = [bench.recv[0] + 64, bench.recv[0] + (room + 64 + shift) as u64];
    gpu.set(bench.recv[0], 0xa5, 2 * room + 4096);
    let scalars: Vec<u64> =
        (0..sources).map(|source| mccs_kernels::reference::scalar_bits(dtype, source as i64 + 2)).collect();
    let divisor = (op == RedOp::Avg).then_some(sources as u32);
    let mut launch = Launch::reduce(dtype, op, divisor, op == RedOp::PreMulSum, 16);
    for source in 0..sources {
        launch.args.sources[source] = at(source);
        launch.args.scalars[source] = scalars[source];
        // The first source is this rank's own.
        launch.args.flags[source] = if source == 0 { 0 } else { flags + 8 * source as u64 };
    }
    launch.args.destinations[..2].copy_from_slice(&to);
    (launch.args.source_count, launch.args.destination_count) = (sources as u32, 2);
    (launch.args.flag_value, launch.args.flag_step) = (1, 1);
    (launch.args.done_value, launch.args.done_step, launch.args.done_stride) = (10, 1, 8);
    launch.args.done_word = bench.done_word(8) as u64;
    launch.args.counters = counters;
    launch.args.abort_word = bench.abort_word() as u64;
    launch.args.bytes = bytes as u64;
    launch.args.piece_bytes = (bytes as u64).div_ceil(u64::from(pieces)).next_multiple_of(16);
    launch.args.pieces = pieces;
    bench.launch_local(0, &launch);
    for piece in 0..pieces {
        (1..sources).for_each(|source| gpu.write_word_beside(flags + 8 * source as u64, &u64::from(piece + 1)));
    }
    bench.wait(0, &what);
    let sources: Vec<Source> = data
        .iter()
        .zip(&scalars)
        .map(|(data, scalar)| Source { ptr: data.as_ptr(), scalar_bits: (op == RedOp::PreMulSum).then_some(*scalar) })
        .collect();
    let mut wanted = vec![0; bytes];
    // SAFETY: all are of that many elements.
    unsafe { reduce(dtype, op, &sources, &[wanted.as_mut_ptr()], count, divisor, Store::Cached) };
    for to in to {
        if let Err(error) = same(dtype, &gpu.read(to, bytes), &wanted) {
            bench.fail(format!("{}: {error}", what()));
        }
        if gpu.read(to + bytes as u64, 32).iter().any(|byte| *byte != 0xa5) {
            bench.fail(format!("{}: wrote behind its result", what()));
        }
    }
    for piece in 0..pieces as usize {
        // SAFETY: live words.
        if unsafe { bench.done_word(8).add(piece).read_volatile() } != 10 + piece as u64 {
            bench.fail(format!("{}: done word {piece}", what()));
        }
    }
    if gpu.read(counters, 4 * pieces as usize).iter().any(|byte| *byte != 0) {
        bench.fail(format!("{}: counters", what()));
    }
}
