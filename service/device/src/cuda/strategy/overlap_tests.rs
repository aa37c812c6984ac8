//! Steps of training as their host enqueues them and a GPU runs them, and what is made of their stamps.

use mccs_ipc::types::CollectiveKind;
use mccs_kernels::cuda::Stamp;

use super::*;

const US: u64 = 1_000;
const MIB: u64 = 1 << 20;
const RANKS: usize = 4;
/// From a launch until the GPU begins, if it has nothing else to do.
const LAUNCH: u64 = 6 * US;

/// A part of a step. Collectives have a stream of their own.
#[derive(Clone, Copy)]
enum Part {
    /// Computation that takes the GPU so long, and waits for the last collective or does not.
    Compute { takes: u64, waits: bool },
    /// A collective behind all computation before it.
    Collective { kind: CollectiveKind, bytes: u64, takes: u64 },
}

use CollectiveKind::{AllGather, AllReduce, AllToAll, ReduceScatter};
use Part::{Collective, Compute};

/// State that a rank's GPU and host leave behind.
#[derive(Default)]
struct Rank {
    counts: SymmetricBufferCounts,
    called: Vec<u64>,
}

/// Ranks that run steps of `parts`, of which each takes the host so long. `ahead` is by how much the host may be ahead of the GPU.
fn run(steps: u32, parts: &[Part], host: u64, ahead: u64) -> Vec<Rank> {
    (0..RANKS).map(|rank| rank_of(rank as u64, steps, parts, host, ahead)).collect()
}

fn rank_of(rank: u64, steps: u32, parts: &[Part], host: u64, ahead: u64) -> Rank {
    // Clocks of GPUs are apart, and tell another time than hosts'.
    let gpu_clock = |at: u64| at.wrapping_mul(10_001) / 10_000 + rank * 1_000_000_007 + 77;
    let mut made = Rank { called: vec![0], ..Rank::default() };
    let (mut now, mut compute, mut collectives, mut number) = (1_000 * US, 0_u64, 0, 0);
    for part in (0..steps).flat_map(|_| parts) {
        now += host + rank * US;
        now = now.max(compute.max(collectives).saturating_sub(ahead));
        match *part {
            Compute { takes, waits } => {
                let begin = compute.max(now + LAUNCH).max(if waits { collectives } else { 0 });
                compute = begin + takes;
            }
            Collective { kind, bytes, takes } => {
                // Ranks end together: who comes early waits.
                let begin = collectives.max(compute).max(now + LAUNCH);
                collectives = begin + takes + (RANKS as u64 - rank) * US;
                number += 1;
                made.called.push(now);
                made.counts.set_operations(number);
                let (began_ns, ended_ns) = (gpu_clock(begin), gpu_clock(collectives));
                made.counts.set_stamp(Stamp { number, kind, payload_bytes: bytes, began_ns, ended_ns });
            }
        }
    }
    made
}

fn verdict(ranks: Vec<Rank>) -> Option<Pattern> {
    let mut meter = PauseMeter::default();
    let (counts, called): (Vec<_>, Vec<_>) = ranks.into_iter().map(|rank| (rank.counts, rank.called)).unzip();
    meter.read(&counts, |rank, number| called[rank as usize].get(number as usize).copied());
    meter.verdict()
}

/// A layer's part of the backward pass of 0.9 billion parameters in 24 layers: 37 million of bfloat16, in 3 buckets of 25 MiB.
fn ddp(layer: u64) -> Vec<Part> {
    let bucket =
        [Compute { takes: layer / 3, waits: false }, Collective { kind: AllReduce, bytes: 25 * MIB, takes: 130 * US }];
    bucket.repeat(3 * 24)
}

/// Gathers of a layer ahead and scatters of gradients, of 72 MiB, beside computation that waits for gathers.
fn fsdp(layer: u64) -> Vec<Part> {
    let gather = Collective { kind: AllGather, bytes: 72 * MIB, takes: 170 * US };
    let scatter = Collective { kind: ReduceScatter, bytes: 72 * MIB, takes: 175 * US };
    let forward = [gather, Compute { takes: layer, waits: true }].repeat(24);
    let backward = [gather, Compute { takes: 2 * layer, waits: true }, scatter].repeat(24);
    [forward, backward].concat()
}

/// All-to-alls of 16 MiB that computation waits for, and buckets in the backward pass.
fn moe(layer: u64) -> Vec<Part> {
    let to_experts = Collective { kind: AllToAll, bytes: 16 * MIB, takes: 54 * US };
    let experts =
        [to_experts, Compute { takes: layer, waits: true }, to_experts, Compute { takes: layer, waits: true }];
    [experts.repeat(12), [ddp(layer), experts.to_vec()].concat()].concat()
}

#[test]
fn training_that_runs_ahead_of_the_gpu_overlaps() {
    // The host takes 30 us for each part, and is as far ahead as the driver lets it.
    for ahead in [5_000 * US, 60_000 * US] {
        for (name, parts) in [("ddp", ddp(900 * US)), ("fsdp", fsdp(900 * US)), ("moe", moe(900 * US))] {
            assert_eq!(verdict(run(3, &parts, 30 * US, ahead)), Some(Pattern::Overlapped), "{name}, {ahead} ns");
        }
    }
}

#[test]
fn training_whose_host_is_slower_than_the_gpu_is_bound_by_it() {
    for (name, parts) in [("ddp", ddp(300 * US)), ("fsdp", fsdp(600 * US)), ("moe", moe(300 * US))] {
        assert_eq!(verdict(run(3, &parts, 1_500 * US, 60_000 * US)), Some(Pattern::HostBound), "{name}");
    }
}

#[test]
fn benchmarks_come_back_to_back() {
    for (takes, bytes) in [(51 * US, 16 * MIB), (130 * US, 25 * MIB), (610 * US, 128 * MIB)] {
        let one = [Collective { kind: AllReduce, bytes, takes }];
        assert_eq!(verdict(run(100, &one, 3 * US, 60_000 * US)), Some(Pattern::BackToBack));
        // Each with its synchronize.
        assert_eq!(verdict(run(100, &one, 3 * US, 0)), Some(Pattern::BackToBack));
    }
}

#[test]
fn short_ones_and_few_tell_nothing() {
    let of = |bytes| [Compute { takes: 600 * US, waits: true }, Collective { kind: AllReduce, bytes, takes: 130 * US }];
    assert_eq!(verdict(run(100, &of(MIB), 30 * US, 5_000 * US)), None);
    assert_eq!(verdict(run(SAMPLE, &of(25 * MIB), 30 * US, 5_000 * US)), None, "the first has none before it");
    assert_eq!(verdict(run(SAMPLE + 1, &of(25 * MIB), 30 * US, 5_000 * US)), Some(Pattern::Overlapped));
    assert_eq!(verdict(Vec::new()), None);
}

#[test]
fn who_does_not_tell_when_it_calls_is_as_one_that_runs_ahead() {
    let mut meter = PauseMeter::default();
    let counts = |ranks: Vec<Rank>| ranks.into_iter().map(|rank| rank.counts).collect::<Vec<_>>();
    meter.read(&counts(run(3, &fsdp(600 * US), 1_500 * US, 60_000 * US)), |_, _| None);
    assert_eq!(meter.verdict(), Some(Pattern::Overlapped));
    // Nonsense is harmless.
    let mut meter = PauseMeter::default();
    meter.read(&counts(run(3, &ddp(900 * US), 30 * US, 5_000 * US)), |rank, number| {
        Some([0, u64::MAX, number << 62, 1][rank as usize])
    });
    assert!(meter.verdict().is_some());
}

#[test]
fn clocks_that_drift_are_followed() {
    let mut least = Least::default();
    // 50 us a second, for a minute, and a GPU that is never waited for.
    for second in 1..=60_u64 {
        let called_ns = second * 1_000_000 * US;
        let coming = Coming { called_ns, began_ns: called_ns + second * 50 * US + 20 * US };
        least.learn(coming);
        assert!(least.is_at_once(coming), "after {second} s");
        assert!(!least.is_at_once(Coming { began_ns: coming.began_ns + 5_000 * US, ..coming }));
    }
}

#[test]
fn each_collective_counts_once() {
    let mut meter = PauseMeter::default();
    let parts =
        [Compute { takes: 600 * US, waits: true }, Collective { kind: AllReduce, bytes: 25 * MIB, takes: 130 * US }];
    let ranks: Vec<_> = run(1 + SAMPLE, &parts, 30 * US, 5_000 * US).into_iter().map(|rank| rank.counts).collect();
    (0..2).for_each(|_| meter.read(&ranks, |_, _| None));
    assert_eq!([meter.verdict(), meter.verdict()], [Some(Pattern::Overlapped), None]);
    meter.read(&ranks, |_, _| None);
    assert_eq!(meter.verdict(), None);
}

#[test]
fn copy_engines_are_chosen_for_who_computes_and_kernels_are_tried_now_and_then() {
    let begin = Instant::now();
    let after = |seconds| begin + Duration::from_secs(seconds);
    let mut choice = Choice::default();
    let mut step = |verdict, seconds| {
        choice = choice.next(verdict, after(seconds));
        choice
    };
    let (apart, together, by_host) = (Some(Pattern::Overlapped), Some(Pattern::BackToBack), Some(Pattern::HostBound));
    assert_eq!(step(None, 1), Choice::Kernels);
    assert_eq!(step(together, 2), Choice::Kernels);
    assert_eq!(step(by_host, 2), Choice::Kernels);
    assert_eq!(step(apart, 3), Choice::CopyEngines(after(3)));
    assert_eq!(step(None, 62), Choice::CopyEngines(after(3)));
    assert_eq!(step(None, 63), Choice::Probing);
    assert_eq!(step(None, 64), Choice::Probing);
    assert_eq!(step(apart, 65), Choice::CopyEngines(after(65)));
    assert_eq!(step(None, 125), Choice::Probing);
    assert_eq!(step(by_host, 126), Choice::Kernels);
    assert_eq!(step(apart, 127), Choice::CopyEngines(after(127)));
    assert_eq!(step(None, 187), Choice::Probing);
    assert_eq!(step(together, 188), Choice::Kernels);
}
