//! `mccs-floor`: the least time in which all cores together can touch the bytes of a collective.
//! This is the memory floor.
//!
//! Buffers are distinct for each rank, as mccs-perf has them: of memfds, mapped as the service maps them, and for
//! comparison of anonymous memory in huge pages. Sizes are as nccl-tests counts them. Every way of touching the memory
//! that `mccs_eval::touch` knows runs a few times; the best few run as often as asked for, and the best of them counts.

use std::ptr::NonNull;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::{Parser, ValueEnum};
use mccs_config::Bytes;
use mccs_eval::pinning;
use mccs_eval::stats::Latencies;
use mccs_eval::touch::{self, Line, Move, Variant};
use mccs_eval::workload::Call;
use mccs_ipc::shm::Mapping;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};
use mccs_telemetry::bandwidth::Traffic;

const HUGE_PAGE_BYTES: usize = 2 << 20;
const LINE_BYTES: u64 = size_of::<Line>() as u64;
/// Runs of each variant that decide which are measured.
const HEATS: usize = 2;
/// Variants that are measured.
const FINALISTS: usize = 3;

/// Measures how fast this host's memory can be touched in the way of collectives; prints JSON lines.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Collectives, comma-separated; with "_in_place" at the end for that form.
    #[arg(long, value_delimiter = ',', default_value = "all_reduce,all_reduce_in_place")]
    operation: Vec<String>,
    /// Numbers of ranks, comma-separated.
    #[arg(long, value_delimiter = ',', default_value = "2,4")]
    nranks: Vec<u32>,
    /// Smallest size, as nccl-tests counts it.
    #[arg(long, default_value = "1MiB")]
    begin: Bytes,
    /// Largest size.
    #[arg(long, default_value = "64MiB")]
    end: Bytes,
    /// From one size to the next.
    #[arg(long, default_value_t = 4)]
    factor: u64,
    /// Timed runs a size.
    #[arg(long, default_value_t = 10)]
    iterations: usize,
    /// Kinds of memory, comma-separated.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "memfd,huge")]
    memory: Vec<Kind>,
    /// Threads, on the first cores. Absent: one for each core.
    #[arg(long)]
    threads: Option<usize>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Shared mappings of memfds, as tenants and the service have them.
    Memfd,
    /// Anonymous memory that asks for huge pages.
    Huge,
}

/// Memory of one buffer, all of its pages there.
enum Memory {
    Memfd(Mapping),
    Huge { ptr: NonNull<u8>, layout: std::alloc::Layout },
}

impl Memory {
    fn new(kind: Kind, bytes: u64) -> anyhow::Result<Self> {
        let bytes = usize::try_from(bytes)?.next_multiple_of(HUGE_PAGE_BYTES);
        let memory = match kind {
            Kind::Memfd => Memory::Memfd(Mapping::create("floor", bytes as u64)?.1),
            Kind::Huge => {
                let layout = std::alloc::Layout::from_size_align(bytes, HUGE_PAGE_BYTES)?;
                // SAFETY: the layout is not empty.
                let ptr = NonNull::new(unsafe { std::alloc::alloc(layout) }).context("out of memory")?;
                let advice = nix::sys::mman::MmapAdvise::MADV_HUGEPAGE;
                // SAFETY: the range was just allocated; the advice changes no contents. Best effort.
                let _ = unsafe { nix::sys::mman::madvise(ptr.cast(), bytes, advice) };
                Memory::Huge { ptr, layout }
            }
        };
        for index in 0..bytes / size_of::<Line>() {
            // SAFETY: the memory has so many lines, and nobody else knows it.
            unsafe { memory.line(index).write(Line::ONES) };
        }
        Ok(memory)
    }

    fn line(&self, index: usize) -> *mut Line {
        let start = match self {
            Memory::Memfd(mapping) => mapping.as_ptr(),
            Memory::Huge { ptr, .. } => ptr.as_ptr(),
        };
        start.cast::<Line>().wrapping_add(index)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Memory::Huge { ptr, layout } = self {
            // SAFETY: allocated with this layout, and used by nobody any more.
            unsafe { std::alloc::dealloc(ptr.as_ptr(), *layout) };
        }
    }
}

/// A rank's buffers.
struct Rank {
    send: Memory,
    recv: Memory,
}

/// Moves of a call. `lines` is one `count`, rounded up to whole lines; blocks are so far apart.
fn moves(call: &Call, in_place: bool, ranks: &[Rank], lines: usize) -> anyhow::Result<Vec<Move>> {
    let blocks = |elements: u64| elements.checked_div(call.count).unwrap_or(0) as usize * lines;
    let place = |rank: u32| {
        let Rank { send, recv } = &ranks[rank as usize];
        match call.in_place_elements(rank).filter(|_| in_place) {
            Some((input, output)) => (recv.line(blocks(input)), recv.line(blocks(output))),
            None => (send.line(0), recv.line(0)),
        }
    };
    let (input, output) = (|rank| place(rank).0.cast_const(), |rank| place(rank).1);
    let all = || 0..call.nranks;
    let at = |rank: u32| rank as usize * lines;
    let mut moves: Vec<_> = match call.kind {
        CollectiveKind::AllReduce => {
            vec![Move { srcs: all().map(input).collect(), dsts: all().map(output).collect(), lines }]
        }
        CollectiveKind::Broadcast => {
            vec![Move { srcs: vec![input(call.root)], dsts: all().map(output).collect(), lines }]
        }
        CollectiveKind::AllGather => {
            let to_all = |src| all().map(|dst| output(dst).wrapping_add(at(src))).collect();
            all().map(|src| Move { srcs: vec![input(src)], dsts: to_all(src), lines }).collect()
        }
        CollectiveKind::ReduceScatter => {
            let from_all = |dst| all().map(|src| input(src).wrapping_add(at(dst))).collect();
            all().map(|dst| Move { srcs: from_all(dst), dsts: vec![output(dst)], lines }).collect()
        }
        other => bail!("{}: only all_reduce, all_gather, reduce_scatter and broadcast have a floor here", other.name()),
    };
    // A copy needs no copy to itself.
    for step in moves.iter_mut().filter(|step| step.srcs.len() == 1) {
        let src = step.srcs[0];
        step.dsts.retain(|dst| !std::ptr::eq(dst.cast_const(), src));
    }
    Ok(moves)
}

/// Part of this process' memory that is in huge pages.
fn huge_share() -> Option<f64> {
    let smaps = std::fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    let kib = |name: &str| -> Option<f64> {
        smaps.lines().find_map(|line| line.strip_prefix(name)?.strip_suffix("kB")?.trim().parse().ok())
    };
    Some((kib("AnonHugePages:")? + kib("ShmemPmdMapped:")?) / kib("Rss:")?)
}

struct Floor {
    variant: Variant,
    latencies: Latencies,
}

impl Floor {
    /// The best of all variants.
    fn measure(moves: &[Move], cores: &[usize], iterations: usize) -> anyhow::Result<Self> {
        let run = |variant, repeats| {
            // SAFETY: `moves` lead into the ranks' memory, which nobody else uses, and copy nothing to itself.
            unsafe { touch::time(moves, variant, cores, repeats) }
        };
        let mut heats: Vec<(Duration, Variant)> = Vec::new();
        for variant in Variant::all() {
            heats.push((run(variant, HEATS)?.into_iter().min().unwrap_or_default(), variant));
        }
        heats.sort_by_key(|(least, _)| *least);
        let mut best: Option<Floor> = None;
        for (_, variant) in heats.into_iter().take(FINALISTS) {
            let mut latencies = Latencies::default();
            run(variant, 1 + iterations)?.into_iter().skip(1).for_each(|time| latencies.add(time));
            if best.as_ref().is_none_or(|best| latencies.quantile(0.5) < best.latencies.quantile(0.5)) {
                best = Some(Floor { variant, latencies });
            }
        }
        best.context("bug: no variants")
    }
}

impl Arguments {
    fn run_sizes(&self, operation: &str, nranks: u32, ranks: &[Rank], memory: Kind) -> anyhow::Result<()> {
        let in_place = operation.ends_with("_in_place");
        let kind: CollectiveKind = operation.trim_end_matches("_in_place").parse().map_err(anyhow::Error::msg)?;
        let mut cores = pinning::cores()?;
        cores.truncate(self.threads.unwrap_or(usize::MAX));
        let memory = memory.to_possible_value().context("bug: memory without a name")?;
        let mut size = self.begin.0;
        while size <= self.end.0 {
            let dtype = DataType::F32;
            let per_count = Traffic::new(kind, 1, u64::from(nranks)).payload_bytes;
            let count = size.checked_div(per_count).unwrap_or(0).div_ceil(dtype.size_bytes() as u64);
            let call = Call { kind, dtype, redop: RedOp::Sum, root: 0, count, nranks, seed: 0 };
            let count_bytes = count * dtype.size_bytes() as u64;
            let moves = moves(&call, in_place, ranks, count_bytes.div_ceil(LINE_BYTES) as usize)?;
            let touched: usize = moves.iter().map(|step| step.lines * (step.srcs.len() + step.dsts.len())).sum();
            let Floor { variant, latencies } = Floor::measure(&moves, &cores, self.iterations)?;
            let [p50, p99, least] = [0.5, 0.99, 0.0].map(|part| latencies.quantile(part).as_nanos() as f64 / 1000.0);
            let touched = touched as u64 * LINE_BYTES;
            let record = serde_json::json!({
                "op": kind.name(), "in_place": in_place, "bytes": Traffic::new(kind, count_bytes, u64::from(nranks)).payload_bytes,
                "nranks": nranks, "memory": memory.get_name(), "huge_share": huge_share(), "iters": self.iterations,
                "median_us": p50, "p50_us": p50, "p99_us": p99, "min_us": least, "touched_bytes": touched,
                "touched_gbps": touched as f64 / (p50 * 1000.0), "variant": variant.to_string(), "threads": cores.len(),
            });
            println!("{record}");
            size *= self.factor;
        }
        Ok(())
    }
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    ensure!(arguments.factor >= 2, "--factor {}: it must be at least 2", arguments.factor);
    ensure!(arguments.iterations > 0 && arguments.begin.0 > 0, "--iterations and --begin must be at least 1");
    ensure!(arguments.threads != Some(0), "--threads must be at least 1");
    for &memory in &arguments.memory {
        for &nranks in &arguments.nranks {
            // No buffer is larger than the size, each rank's part rounded up to whole lines.
            let bytes = arguments.end.0.max(arguments.begin.0) + LINE_BYTES * u64::from(nranks);
            let rank = |_| Ok(Rank { send: Memory::new(memory, bytes)?, recv: Memory::new(memory, bytes)? });
            let ranks = (0..nranks).map(rank).collect::<anyhow::Result<Vec<_>>>()?;
            for operation in &arguments.operation {
                arguments.run_sizes(operation, nranks, &ranks, memory)?;
            }
        }
    }
    Ok(())
}
