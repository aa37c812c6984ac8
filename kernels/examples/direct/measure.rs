//! Times against NCCL, alternating: back to back on the stream, and launch and synchronize.

use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Instant;

use mccs_ipc::types::CollectiveKind;
use mccs_kernels::cuda::{Algorithm, Launch};

use crate::Bench;
use crate::nccl::Nccl;

const SIZES: [u64; 14] = [
    8,
    8 << 10,
    32 << 10,
    64 << 10,
    128 << 10,
    256 << 10,
    512 << 10,
    1 << 20,
    2 << 20,
    4 << 20,
    8 << 20,
    16 << 20,
    32 << 20,
    128 << 20,
];

/// Times in microseconds: back to back, and launched and waited for.
type Times = (f64, f64);

pub fn all(bench: &Bench, nccl: &str, mode: Option<&str>) {
    let nccl = Nccl::open(nccl, bench.gpus.len() as i32).expect("NCCL");
    let sequence = AtomicU32::new(0);
    let kinds: &[CollectiveKind] = match mode {
        Some("all_reduce") => &[CollectiveKind::AllReduce],
        Some("main") => &[CollectiveKind::AllReduce, CollectiveKind::AllGather, CollectiveKind::ReduceScatter],
        _ => &[
            CollectiveKind::AllReduce,
            CollectiveKind::AllGather,
            CollectiveKind::ReduceScatter,
            CollectiveKind::Broadcast,
            CollectiveKind::Reduce,
            CollectiveKind::AllToAll,
        ],
    };
    let sizes: Vec<u64> = match std::env::var("SIZES") {
        Ok(text) => text.split(',').filter_map(|n| n.parse::<f64>().ok()).map(|kib| (kib * 1024.0) as u64).collect(),
        Err(_) => SIZES.to_vec(),
    };
    let grids: Vec<u32> = match std::env::var("GRIDS") {
        Ok(text) => text.split(',').filter_map(|n| n.parse().ok()).collect(),
        Err(_) => vec![8, 16, 32],
    };
    for &kind in kinds {
        println!("{kind}, {} GPUs: us back to back (us launched and waited for); busbw in GB/s", bench.nranks());
        for &size in &sizes {
            let parts = kind.payload_count(1, bench.nranks());
            let count = (size / 4 / parts).max(1);
            let bytes = kind.payload_count(count, bench.nranks()) * 4;
            let mut variants: Vec<Option<(Algorithm, u32)>> = vec![None];
            for algorithm in Algorithm::ALL {
                for &blocks in &grids {
                    let call = crate::call(kind, count, 0, bench.nranks());
                    let Some(launch) = Launch::direct(&call, &bench.layout, algorithm, blocks) else { continue };
                    let packets = matches!(algorithm, Algorithm::PacketsOneShot | Algorithm::PacketsTwoShot);
                    let sensible = if packets { size <= 4 << 20 } else { size >= 256 << 10 };
                    let smaller_too = grids.iter().any(|other| *other < blocks && *other >= launch.grid);
                    if sensible && !smaller_too {
                        variants.push(Some((algorithm, blocks)));
                    }
                }
            }
            let results = measure(bench, &nccl, kind, count, size, &variants, &sequence);
            let reference = results[0];
            let mut line = format!("{:>9} {}", bytes, show(bench, kind, bytes, reference));
            let mut ours: Vec<_> = variants.iter().zip(&results).skip(1).collect();
            ours.sort_by(|a, b| a.1.0.total_cmp(&b.1.0));
            for (variant, times) in ours.into_iter().take(4) {
                if let Some((algorithm, blocks)) = variant {
                    let _ = write!(line, " | {algorithm:?}/{blocks} {}", show(bench, kind, bytes, *times));
                }
            }
            println!("{line}");
        }
    }
}

fn show(bench: &Bench, kind: CollectiveKind, bytes: u64, (stream, waited): Times) -> String {
    let n = f64::from(bench.nranks());
    let factor = match kind {
        CollectiveKind::AllReduce => 2.0 * (n - 1.0) / n,
        CollectiveKind::Broadcast | CollectiveKind::Reduce => 1.0,
        _ => (n - 1.0) / n,
    };
    let busbw = bytes as f64 / stream / 1e3 * factor;
    if bytes >= 1 << 20 {
        format!("{stream:.1} ({waited:.1}) {busbw:.0}")
    } else {
        format!("{stream:.2} ({waited:.1})")
    }
}

fn measure(
    bench: &Bench,
    nccl: &Nccl,
    kind: CollectiveKind,
    count: u64,
    size: u64,
    variants: &[Option<(Algorithm, u32)>],
    sequence: &AtomicU32,
) -> Vec<Times> {
    const ROUNDS: usize = 3;
    let repeat = match size {
        0..=0x10_0000 => 200,
        0..=0x100_0000 => 40,
        _ => 10,
    };
    let first = sequence.load(Ordering::Relaxed);
    let slowest: Mutex<Vec<Vec<Times>>> = Mutex::new(vec![vec![(0.0, 0.0); ROUNDS]; variants.len()]);
    thread::scope(|scope| {
        for rank in 0..bench.gpus.len() {
            let slowest = &slowest;
            scope.spawn(move || {
                bench.gpus[rank].make_current();
                let mut number = first;
                for round in 0..ROUNDS {
                    for (index, variant) in variants.iter().enumerate() {
                        let mut issue = issuer(bench, nccl, kind, count, rank, *variant, &mut number);
                        (0..3).for_each(|_| issue());
                        bench.wait(rank, &|| format!("{kind} {count} {variant:?}"));
                        bench.barrier.wait();
                        let start = Instant::now();
                        (0..repeat).for_each(|_| issue());
                        bench.gpus[rank].synchronize();
                        let stream = start.elapsed().as_secs_f64() * 1e6 / f64::from(repeat);
                        let mut waited: Vec<f64> = (0..repeat.min(40))
                            .map(|_| {
                                bench.barrier.wait();
                                let start = Instant::now();
                                issue();
                                bench.gpus[rank].synchronize();
                                start.elapsed().as_secs_f64() * 1e6
                            })
                            .collect();
                        waited.sort_by(f64::total_cmp);
                        let mut slowest = slowest.lock().expect("no panic");
                        let cell = &mut slowest[index][round];
                        *cell = (cell.0.max(stream), cell.1.max(waited[waited.len() / 2]));
                    }
                }
            });
        }
    });
    let ours = variants.iter().flatten().count() as u32;
    sequence.fetch_add(ours * ROUNDS as u32 * (3 + repeat + repeat.min(40)), Ordering::Relaxed);
    let median = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    let slowest = slowest.into_inner().expect("no panic");
    let pick = |rounds: &Vec<Times>| {
        (median(rounds.iter().map(|times| times.0).collect()), median(rounds.iter().map(|times| times.1).collect()))
    };
    slowest.iter().map(pick).collect()
}

fn issuer<'b>(
    bench: &'b Bench,
    nccl: &'b Nccl,
    kind: CollectiveKind,
    count: u64,
    rank: usize,
    variant: Option<(Algorithm, u32)>,
    number: &'b mut u32,
) -> Box<dyn FnMut() + 'b> {
    let (send, recv) = (bench.send[rank], bench.recv[rank]);
    match variant {
        None => Box::new(move || {
            nccl.run(kind, rank, send, recv, count as usize, bench.gpus[rank].stream);
        }),
        Some((algorithm, blocks)) => {
            let call = crate::call(kind, count, rank, bench.nranks());
            let mut launch = Launch::direct(&call, &bench.layout, algorithm, blocks).expect("fits");
            Box::new(move || {
                *number += 1;
                bench.launch(rank, &mut launch, *number, send, recv);
            })
        }
    }
}
