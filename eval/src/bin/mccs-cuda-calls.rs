//! `mccs-cuda-calls`: what calls of an NCCL library cost, with and without a profiler plugin. Calls
//! have no elements, or a few; the plugin hears of them or does not.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Parser;
use libloading::{Library, Symbol};
use mccs_cuda::{Context, DeviceMemory, Event, OwnedStream};
use mccs_eval::cuda::nccl::{AllReduces, Nccl, NcclId};
use mccs_eval::cuda::processes::{context_of, run_ranks_within};
use mccs_eval::stats::median;
use serde::Serialize;

/// Bytes that a buffer has room for.
const ROOM: u64 = 2048;

/// Measures calls of an NCCL library, with a process a rank. Rank 0's times count.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The library: this project's libnccl.so.2, or NCCL's.
    #[arg(long)]
    library: PathBuf,
    /// Ranks, a process and a GPU each.
    #[arg(long, default_value_t = 2)]
    nranks: u32,
    /// The plugin (libcounting_profiler.so), which NCCL_PROFILER_PLUGIN has to name, too.
    #[arg(long)]
    plugin: Option<PathBuf>,
    /// Rounds, in each of which everything is measured once.
    #[arg(long, default_value_t = 51)]
    rounds: usize,
    /// Calls of a measurement.
    #[arg(long, default_value_t = 400)]
    calls: u32,
    /// Bytes of calls, comma-separated: multiples of 4, 2048 at most.
    #[arg(long, value_delimiter = ',', default_values_t = [0, 8])]
    bytes: Vec<u64>,
    /// Seconds after which it gives up: ranks wait for each other.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Write results here.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Set for the processes that this one starts: this rank.
    #[arg(long, hide = true)]
    rank: Option<u32>,
    /// As above: the communicator.
    #[arg(long, hide = true, default_value = "")]
    id: String,
}

/// The plugin's state meanwhile.
#[derive(Clone, Copy, Serialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Plugin {
    /// It is not loaded.
    Absent,
    /// It is loaded, and wants no events.
    Silent,
    /// It counts events.
    Listening,
}

/// Times of every round.
#[derive(Serialize)]
struct Line {
    bytes: u64,
    plugin: Plugin,
    /// Time of a call for the caller, back to back.
    call_us: Vec<f64>,
    /// Time of a call for the stream, back to back.
    stream_us: Vec<f64>,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    match arguments.rank {
        Some(rank) => run_rank(&arguments, rank).with_context(|| format!("rank {rank}")),
        None => {
            let counts = [arguments.nranks as usize, arguments.calls as usize, arguments.rounds];
            ensure!(!counts.contains(&0), "--nranks, --calls and --rounds must be at least 1");
            ensure!(
                arguments.bytes.iter().all(|bytes| bytes % 4 == 0 && *bytes <= ROOM),
                "--bytes: multiples of 4, {ROOM} at most"
            );
            mccs_cuda::driver()?;
            // The library's first calls are made in a context.
            let context = context_of(0)?;
            let _entered = context.enter()?;
            let id = Nccl::unique_id(&arguments.library)?.to_hex();
            run_ranks_within(arguments.nranks, Some(Duration::from_secs(arguments.seconds)), |rank| {
                ["--rank", &rank.to_string(), "--id", &id].into_iter().map(Into::into).collect::<Vec<_>>()
            })
        }
    }
}

fn run_rank(arguments: &Arguments, rank: u32) -> anyhow::Result<()> {
    mccs_cuda::driver()?;
    let context = context_of(rank)?;
    let _entered = context.enter()?;
    let bench = Bench::join(arguments, &context, rank)?;
    let calls = bench.nccl.all_reduces()?;
    let listen = arguments.plugin.as_deref().map(Listen::of).transpose()?;
    let plugins: &[Plugin] = if listen.is_some() { &[Plugin::Silent, Plugin::Listening] } else { &[Plugin::Absent] };
    let sides = arguments.bytes.iter().flat_map(|&bytes| plugins.iter().map(move |&plugin| (bytes, plugin)));
    let mut lines: Vec<_> =
        sides.map(|(bytes, plugin)| Line { bytes, plugin, call_us: Vec::new(), stream_us: Vec::new() }).collect();
    for round in 0..=arguments.rounds {
        // Another side begins each round, so that none always follows the same one.
        let first = round % lines.len();
        for index in (first..lines.len()).chain(0..first) {
            let line = &mut lines[index];
            let before = listen.as_ref().map_or(0, |listen| listen.set(line.plugin == Plugin::Listening));
            let (call_us, stream_us) = bench.measure(&calls, line.bytes, arguments.calls)?;
            let heard = listen.as_ref().map_or(0, |listen| listen.set(false)) - before;
            // Events of kernels may come later, so a silent plugin may hear of some.
            let listened = line.plugin == Plugin::Listening;
            ensure!(!listened || heard >= u64::from(arguments.calls), "the plugin has heard of {heard} events");
            // The first round is for what is only done once.
            if round > 0 {
                line.call_us.push(call_us);
                line.stream_us.push(stream_us);
            }
        }
    }
    if rank == 0 {
        report(arguments, &context, &bench.nccl.version()?, &lines)?;
    }
    // No rank leaves while others measure.
    bench.meet(&calls)
}

fn report(arguments: &Arguments, context: &Context, version: &str, lines: &[Line]) -> anyhow::Result<()> {
    println!("# {}, {} ranks, {version}; us: caller, stream", context.gpu().name, arguments.nranks);
    for line in lines {
        let plugin = serde_json::to_string(&line.plugin)?;
        println!(
            "{:>3} B, plugin {plugin:<11} {:>8.3} {:>8.3}",
            line.bytes,
            median(&line.call_us),
            median(&line.stream_us)
        );
    }
    if let Some(path) = &arguments.json {
        let gpu = &context.gpu().name;
        let results = serde_json::json!({ "gpu": gpu, "nranks": arguments.nranks, "version": version, "lines": lines });
        std::fs::write(path, serde_json::to_string_pretty(&results)?)?;
    }
    Ok(())
}

/// The plugin's switch.
struct Listen(Library);

impl Listen {
    fn of(path: &Path) -> anyhow::Result<Self> {
        // SAFETY: the user names the plugin, which has nothing to do when it is loaded.
        Ok(Listen(unsafe { Library::new(path) }.with_context(|| format!("cannot open {}", path.display()))?))
    }

    /// Has it hear of everything or of nothing. Returns how many events it has heard of.
    fn set(&self, is_listening: bool) -> u64 {
        type Switch = unsafe extern "C" fn(bool) -> u64;
        // SAFETY: the signature is that of examples/counting_profiler.rs.
        let switch: Result<Symbol<'_, Switch>, _> = unsafe { self.0.get(b"counting_profiler_listen") };
        // SAFETY: as above.
        switch.map_or(0, |switch| unsafe { switch(is_listening) })
    }
}

/// A rank's communicator, and what it calls with.
struct Bench {
    nccl: Nccl,
    stream: OwnedStream,
    events: [Event; 2],
    memory: DeviceMemory,
}

impl Bench {
    fn join(arguments: &Arguments, context: &Context, rank: u32) -> anyhow::Result<Self> {
        Ok(Bench {
            nccl: Nccl::join(&arguments.library, NcclId::from_hex(&arguments.id)?, rank, arguments.nranks)?,
            stream: OwnedStream::new(context)?,
            events: [Event::new(context, true)?, Event::new(context, true)?],
            memory: DeviceMemory::zeroed(context, 2 * ROOM as usize)?,
        })
    }

    fn enqueue(&self, calls: &AllReduces<'_>, bytes: u64) -> anyhow::Result<()> {
        let (send, recv) = (self.memory.address(), self.memory.address() + ROOM);
        // SAFETY: the halves of the memory have room for more than that, and live as long as the stream, which is synchronized.
        unsafe { calls.enqueue(send, recv, bytes as usize / size_of::<f32>(), self.stream.raw().as_ptr()) }
    }

    /// All ranks come here.
    fn meet(&self, calls: &AllReduces<'_>) -> anyhow::Result<()> {
        self.enqueue(calls, 4)?;
        // SAFETY: the stream lives.
        unsafe { self.stream.raw().synchronize()? };
        Ok(())
    }

    /// Times of a call for the caller and the stream.
    fn measure(&self, all_reduces: &AllReduces<'_>, bytes: u64, calls: u32) -> anyhow::Result<(f64, f64)> {
        let stream = self.stream.raw();
        self.meet(all_reduces)?;
        // SAFETY: stream and events live, and are of one context.
        unsafe { self.events[0].record(stream)? };
        let begin = Instant::now();
        (0..calls).try_for_each(|_| self.enqueue(all_reduces, bytes))?;
        let call_us = begin.elapsed().as_secs_f64() * 1e6 / f64::from(calls);
        // SAFETY: as above.
        unsafe {
            self.events[1].record(stream)?;
            stream.synchronize()?;
        }
        let stream_time = self.events[1].elapsed_since(&self.events[0])?;
        Ok((call_us, stream_time.as_secs_f64() * 1e6 / f64::from(calls)))
    }
}
