//! `mccs-one-sided`: puts with signals between two GPUs by an NCCL library's one-sided calls: to and fro, and both ways at once.
//! Every byte is checked.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::Parser;
use mccs_cuda::{Context, Event, OwnedStream, copy_from_host, copy_to_host};
use mccs_eval::cuda::nccl::{Nccl, NcclId, NcclWindow};
use mccs_eval::cuda::processes::{context_of, run_ranks_within};
use mccs_eval::stats::median;
use serde::Serialize;

/// Measures one-sided calls of an NCCL library, with a process for each of two ranks. Rank 0's times count.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The library: this project's libnccl.so.2, or NCCL's.
    #[arg(long)]
    library: PathBuf,
    /// Rounds, in each of which everything is measured once.
    #[arg(long, default_value_t = 11)]
    rounds: usize,
    /// Puts of a measurement, at most.
    #[arg(long, default_value_t = 200)]
    iterations: u32,
    /// Bytes of puts.
    #[arg(long, value_delimiter = ',', default_values_t = [8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 128 << 20])]
    sizes: Vec<usize>,
    /// Bytes that a measurement puts in all, about.
    #[arg(long, default_value_t = 1 << 30)]
    total: usize,
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

#[derive(Clone, Copy, Serialize, PartialEq)]
#[serde(rename_all = "snake_case")]
enum Pattern {
    /// One rank puts when the other's has come.
    ToAndFro,
    /// Both put, and then wait for the other's.
    BothWays,
}

/// Times of every round.
#[derive(Serialize)]
struct Line {
    pattern: Pattern,
    bytes: usize,
    /// A round trip, or a put each way, by the GPU's clock.
    us: Vec<f64>,
    /// Time of a put and a wait for the caller.
    call_us: Vec<f64>,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    match arguments.rank {
        Some(rank) => run_rank(&arguments, rank).with_context(|| format!("rank {rank}")),
        None => {
            ensure!(arguments.iterations > 0 && arguments.rounds > 0, "--iterations and --rounds must be at least 1");
            ensure!(!arguments.sizes.contains(&0), "--sizes must be at least 1");
            mccs_cuda::driver()?;
            // The library's first calls are made in a context.
            let context = context_of(0)?;
            let _entered = context.enter()?;
            let id = Nccl::unique_id(&arguments.library)?.to_hex();
            run_ranks_within(2, Some(Duration::from_secs(arguments.seconds)), |rank| {
                ["--rank", &rank.to_string(), "--id", &id].into_iter().map(Into::into).collect::<Vec<_>>()
            })
        }
    }
}

/// A rank's half of a measurement: it puts from the first half of its window into the second half of the peer's.
struct Side<'a> {
    nccl: &'a Nccl,
    window: NcclWindow<'a>,
    half: usize,
    peer: u32,
    stream: OwnedStream,
    events: [Event; 2],
}

fn run_rank(arguments: &Arguments, rank: u32) -> anyhow::Result<()> {
    mccs_cuda::driver()?;
    let context = context_of(rank)?;
    let _entered = context.enter()?;
    let nccl = Nccl::join(&arguments.library, NcclId::from_hex(&arguments.id)?, rank, 2)?;
    let half = arguments.sizes.iter().copied().max().unwrap_or(1).next_multiple_of(4096);
    let (stream, events) = (OwnedStream::new(&context)?, [Event::new(&context, true)?, Event::new(&context, true)?]);
    let side = Side { nccl: &nccl, window: nccl.window(2 * half)?, half, peer: 1 - rank, stream, events };
    let patterns = [Pattern::ToAndFro, Pattern::BothWays];
    let all = patterns.iter().flat_map(|&pattern| arguments.sizes.iter().map(move |&bytes| (pattern, bytes)));
    let mut lines: Vec<_> =
        all.map(|(pattern, bytes)| Line { pattern, bytes, us: Vec::new(), call_us: Vec::new() }).collect();
    for round in 0..=arguments.rounds {
        for line in &mut lines {
            side.refill(line.bytes, rank, round)?;
            let iterations = arguments.iterations.min((arguments.total / line.bytes) as u32).max(2);
            let (us, call_us) = side.measure(line.pattern, line.bytes, iterations, rank)?;
            side.check(line.bytes, 1 - rank, round)?;
            // The first round is for what is only done once.
            if round > 0 {
                line.us.push(us);
                line.call_us.push(call_us);
            }
        }
    }
    if rank == 0 {
        report(arguments, &context, &nccl.version()?, &lines)?;
    }
    // No rank leaves while others measure.
    side.meet()
}

fn report(arguments: &Arguments, context: &Context, version: &str, lines: &[Line]) -> anyhow::Result<()> {
    println!("# {}, {version}; us: round trip or put each way, caller", context.gpu().name);
    for line in lines {
        let pattern = serde_json::to_string(&line.pattern)?;
        println!("{pattern:>12} {:>10} B {:>10.2} {:>8.2}", line.bytes, median(&line.us), median(&line.call_us));
    }
    if let Some(path) = &arguments.json {
        let results = serde_json::json!({ "gpu": context.gpu().name, "version": version, "lines": lines });
        std::fs::write(path, serde_json::to_string_pretty(&results)?)?;
    }
    Ok(())
}

/// A rank's bytes in a round.
fn content(bytes: usize, rank: u32, round: usize) -> Vec<u8> {
    let mut state = (round as u64) << 32 | u64::from(rank + 1);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as u8
    };
    (0..bytes).map(|_| next()).collect()
}

impl Side<'_> {
    /// Both ranks come here.
    fn meet(&self) -> anyhow::Result<()> {
        let stream = self.stream.raw();
        self.window.put_signal(0, 0, self.peer, 0, stream.as_ptr())?;
        self.nccl.wait_signal(self.peer, stream.as_ptr())?;
        // SAFETY: the stream lives.
        unsafe { stream.synchronize()? };
        Ok(())
    }

    /// Has data of this round to send, and none that has come.
    fn refill(&self, bytes: usize, rank: u32, round: usize) -> anyhow::Result<()> {
        let (own, poison) = (content(bytes, rank, round), vec![0xa5; bytes]);
        // SAFETY: the window has room for both, and nothing uses it now.
        unsafe {
            copy_from_host(self.window.address(), &own)?;
            copy_from_host(self.window.address() + self.half as u64, &poison)?;
        }
        self.meet()
    }

    fn check(&self, bytes: usize, peer: u32, round: usize) -> anyhow::Result<()> {
        let mut came = vec![0; bytes];
        // SAFETY: the window has as much, and nothing writes it now.
        unsafe { copy_to_host(&mut came, self.window.address() + self.half as u64)? };
        ensure!(came == content(bytes, peer, round), "wrong bytes have come of {bytes}");
        Ok(())
    }

    /// Time of one by the GPU's clock, and of its calls.
    fn measure(&self, pattern: Pattern, bytes: usize, iterations: u32, rank: u32) -> anyhow::Result<(f64, f64)> {
        let stream = self.stream.raw();
        let put = || self.window.put_signal(0, bytes, self.peer, self.half, stream.as_ptr());
        let wait = || self.nccl.wait_signal(self.peer, stream.as_ptr());
        self.meet()?;
        // SAFETY: stream and events live, and are of one context.
        unsafe { self.events[0].record(stream)? };
        let begin = Instant::now();
        for _ in 0..iterations {
            if pattern == Pattern::ToAndFro && rank == 1 {
                wait()?;
                put()?;
            } else {
                put()?;
                wait()?;
            }
        }
        let call_us = begin.elapsed().as_secs_f64() * 1e6 / f64::from(iterations);
        // SAFETY: as above.
        unsafe {
            self.events[1].record(stream)?;
            stream.synchronize()?;
        }
        let elapsed = self.events[1].elapsed_since(&self.events[0])?;
        Ok((elapsed.as_secs_f64() * 1e6 / f64::from(iterations), call_us))
    }
}
