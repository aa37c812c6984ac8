//! Every algorithm, kind, data type and operator against the CPU, with poisoned outputs, guards, and odd addresses.

use std::thread;

use mccs_ipc::board::BoardCall;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};
use mccs_kernels::cuda::{Algorithm, DirectCall, Launch};
use mccs_kernels::reference::{self, Value};
use mccs_kernels::{Source, finish_round};

use crate::Bench;

const GUARD_BYTES: usize = 256;
const POISON: u8 = 0xa5;

/// One case; the same on all ranks.
#[derive(Debug, Clone, Copy)]
struct Case {
    kind: CollectiveKind,
    dtype: DataType,
    op: RedOp,
    algorithm: Algorithm,
    count: u64,
    root: u32,
    blocks: u32,
    in_place: bool,
    /// Elements that buffers are shifted by.
    shift: (usize, usize),
}

/// Elements with some of everything: small and large values, specials, all codes.
pub fn contribution(dtype: DataType, bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut data = vec![0; bytes];
    for index in 0..bytes / dtype.size_bytes() {
        let random = next();
        let small = ((random >> 8) % 4001) as f64 / 16.0 - 125.0;
        let wild = random % 16 == 0;
        match reference::from_integer(dtype, 0) {
            _ if wild => {
                let at = index * dtype.size_bytes();
                data[at..at + dtype.size_bytes()]
                    .copy_from_slice(&random.rotate_left(20).to_le_bytes()[..dtype.size_bytes()]);
            }
            Value::Single(_) => reference::write(dtype, &mut data, index, Value::Single(small as f32)),
            Value::Double(_) => reference::write(dtype, &mut data, index, Value::Double(small)),
            Value::Signed(_) => reference::write(dtype, &mut data, index, Value::Signed(random as i64)),
            Value::Unsigned(_) => reference::write(dtype, &mut data, index, Value::Unsigned(random)),
        }
    }
    data
}

/// Whether elements are the same bits, or both NaN.
pub fn same(dtype: DataType, got: &[u8], wanted: &[u8]) -> Result<(), String> {
    if got == wanted {
        return Ok(());
    }
    for index in 0..got.len() / dtype.size_bytes() {
        let (a, b) = (reference::read(dtype, got, index), reference::read(dtype, wanted, index));
        let at = index * dtype.size_bytes()..(index + 1) * dtype.size_bytes();
        #[allow(clippy::eq_op)]
        let both_nan = a != a && b != b;
        if got[at.clone()] != wanted[at] && !both_nan {
            return Err(format!("element {index} is {a:?}, not {b:?}"));
        }
    }
    Ok(())
}

fn cases(bench: &Bench) -> Vec<Case> {
    let mut cases = Vec::new();
    let nranks = bench.nranks();
    let base = Case {
        kind: CollectiveKind::AllReduce,
        dtype: DataType::F32,
        op: RedOp::Sum,
        algorithm: Algorithm::PacketsOneShot,
        count: 1000,
        root: 0,
        blocks: 32,
        in_place: false,
        shift: (0, 0),
    };
    // Shapes: all kinds, counts, alignments, roots; by bytes and by two-byte floats.
    for &kind in CollectiveKind::ALL {
        for algorithm in Algorithm::ALL {
            for (count, blocks) in [
                (0, 1),
                (1, 1),
                (3, 4),
                (257, 2),
                (1000, 32),
                (4099, 3),
                (16_384, 8),
                (40_000, 32),
                (300_001, 5),
                (1 << 20, 32),
            ] {
                for (shift, in_place) in [((0, 0), false), ((1, 3), false), ((0, 0), true), ((5, 5), true)] {
                    if in_place && kind == CollectiveKind::AllToAll {
                        continue;
                    }
                    let dtype = if count % 2 == 0 { DataType::F32 } else { DataType::Bf16 };
                    let root = (count as u32 + shift.0 as u32) % nranks;
                    cases.push(Case { kind, algorithm, count, blocks, shift, in_place, dtype, root, ..base });
                }
            }
        }
    }
    // Arithmetic: all types and operators, aligned and not.
    for &dtype in DataType::ALL {
        for &op in RedOp::ALL {
            for algorithm in Algorithm::ALL {
                for (count, shift) in [(2049, 0), (30_000, 1)] {
                    cases.push(Case { dtype, op, algorithm, count, shift: (shift, 0), ..base });
                    let kind = CollectiveKind::ReduceScatter;
                    cases.push(Case { kind, dtype, op, algorithm, count, shift: (shift, 0), ..base });
                }
            }
        }
    }
    // Many pieces in flight, straight after one another.
    for algorithm in [Algorithm::BulkOneShot, Algorithm::BulkTwoShot] {
        for (count, blocks) in [(5_000_000, 1), (9_000_001, 7), (16 << 20, 32)] {
            for kind in [CollectiveKind::AllReduce, CollectiveKind::Broadcast, CollectiveKind::Reduce] {
                cases.push(Case { kind, algorithm, count, blocks, ..base });
            }
        }
    }
    cases
}

pub fn all(bench: &Bench) {
    let cases = cases(bench);
    let start = std::time::Instant::now();
    let shared: Vec<std::sync::Mutex<Vec<u8>>> = (0..bench.nranks()).map(|_| Default::default()).collect();
    let ran = std::sync::atomic::AtomicU32::new(0);
    thread::scope(|scope| {
        for rank in 0..bench.gpus.len() {
            let (cases, shared, ran) = (&cases, &shared, &ran);
            scope.spawn(move || {
                bench.gpus[rank].make_current();
                let mut sequence = 0;
                for (index, case) in cases.iter().enumerate() {
                    if one(bench, rank, case, index as u64, &mut sequence, shared) && rank == 0 {
                        ran.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    }
                }
            });
        }
    });
    println!("{} of {} cases ran in {:?}", ran.into_inner(), cases.len(), start.elapsed());
}

/// Runs a case three times, so that both halves of areas and what follows are used; checks the last.
fn one(
    bench: &Bench,
    rank: usize,
    case: &Case,
    seed: u64,
    sequence: &mut u32,
    shared: &[std::sync::Mutex<Vec<u8>>],
) -> bool {
    let Case { kind, dtype, op, count, root, .. } = *case;
    let (nranks, gpu, element) = (bench.nranks(), &bench.gpus[rank], dtype.size_bytes());
    let scalar_bits = if op == RedOp::PreMulSum { reference::scalar_bits(dtype, rank as i64 + 2) } else { 0 };
    let call = DirectCall { kind, dtype, op, count, root, scalar_bits, rank: rank as u32, nranks };
    let Some(launch) = Launch::direct(&call, &bench.layout, case.algorithm, case.blocks) else { return false };
    let sends = kind.send_count(count, nranks, rank as u32, root).map_or(0, |n| n as usize * element);
    let receives = kind.recv_count(count, nranks, rank as u32, root).map_or(0, |n| n as usize * element);
    let data = contribution(dtype, sends, seed * 64 + rank as u64);

    let recv = bench.recv[rank] + GUARD_BYTES as u64 + (case.shift.1 * element) as u64;
    let block = (rank * sends.min(receives)) as u64;
    let in_place =
        case.in_place && sends > 0 && receives > 0 && (!kind.has_root() || rank as u32 == root || sends == receives);
    let (send, recv) = match kind {
        _ if !in_place => (bench.send[rank] + (GUARD_BYTES + case.shift.0 * element) as u64, recv),
        CollectiveKind::AllGather | CollectiveKind::Gather => (recv + block, recv),
        CollectiveKind::ReduceScatter | CollectiveKind::Scatter => (recv, recv + block),
        _ => (recv, recv),
    };
    for round in 0..3 {
        gpu.set(bench.recv[rank], POISON, 2 * GUARD_BYTES + receives.max(sends) + 64 + block as usize);
        gpu.write(send, &data);
        bench.barrier.wait();
        *sequence += 1;
        let mut launch = launch;
        launch.args.done_word = bench.done_word(rank) as u64;
        // Ranks come late in turn.
        if round == 2 && seed as usize % nranks as usize == rank {
            thread::sleep(std::time::Duration::from_micros(100));
        }
        bench.launch(
            rank,
            &mut launch,
            *sequence,
            if sends > 0 { send } else { 0 },
            if receives > 0 { recv } else { 0 },
        );
        if round != 1 {
            bench.wait(rank, &|| format!("{case:?}"));
        } else {
            gpu.synchronize();
        }
    }
    // SAFETY: a live word.
    if unsafe { bench.done_word(rank).read_volatile() } != u64::from(*sequence) {
        bench.fail(format!("{case:?} on rank {rank}: done word"));
    }
    *shared[rank].lock().expect("no panic") = data.clone();
    bench.barrier.wait();
    let contributions: Vec<Vec<u8>> = shared.iter().map(|data| data.lock().expect("no panic").clone()).collect();
    let scalars = |from: usize| (op == RedOp::PreMulSum).then(|| reference::scalar_bits(dtype, from as i64 + 2));
    let sources: Vec<Source> = contributions
        .iter()
        .enumerate()
        .map(|(from, data)| Source { ptr: data.as_ptr(), scalar_bits: scalars(from) })
        .collect();
    let mut wanted = vec![0; receives];
    let board = BoardCall { kind, dtype, redop: op, root, count };
    // SAFETY: contributions and the result have the lengths that the kind says.
    unsafe { finish_round(&board, rank as u32, &sources, wanted.as_mut_ptr()) };
    let got = gpu.read(recv, receives);
    if let Err(error) = same(dtype, &got, &wanted) {
        bench.fail(format!("{case:?} on rank {rank}: {error}"));
    }
    // Nothing around the result is touched.
    let outside_send = |address: u64| !in_place || address + 64 <= send || address >= send + sends as u64;
    for guard in [recv - 64, recv + receives as u64] {
        if outside_send(guard) && gpu.read(guard, 64).iter().any(|byte| *byte != POISON) {
            bench.fail(format!("{case:?} on rank {rank}: wrote around its result"));
        }
    }
    bench.barrier.wait();
    true
}

/// A rank that waits for others that never come ends when it is told to.
pub fn abort(bench: &Bench) {
    bench.gpus[0].make_current();
    for algorithm in [Algorithm::PacketsOneShot, Algorithm::BulkTwoShot] {
        let call = crate::call(CollectiveKind::AllReduce, 20_000, 0, bench.nranks());
        let Some(mut launch) = Launch::direct(&call, &bench.layout, algorithm, 8) else { continue };
        bench.launch(0, &mut launch, u32::MAX - 1, bench.send[0], bench.recv[0]);
        thread::sleep(std::time::Duration::from_millis(50));
        if bench.gpus[0].is_idle() {
            bench.fail(format!("{algorithm:?} ended without its peers"));
        }
        // SAFETY: a live word.
        unsafe { bench.abort_word().write_volatile(1) };
        let start = std::time::Instant::now();
        bench.gpus[0].synchronize();
        println!("{algorithm:?} aborted in {:?}", start.elapsed());
        // SAFETY: a live word.
        unsafe { bench.abort_word().write_volatile(0) };
    }
}
