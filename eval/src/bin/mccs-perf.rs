//! `mccs-perf`: measures and checks collectives in host memory as nccl-tests does, one process a
//! rank. `mccs-launch` starts them, or you do by hand.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use clap::Parser;
use mccs::{Client, CollectiveKind, Communicator, DataType, RedOp, Region, Span, Stream};
use mccs_config::Bytes;
use mccs_eval::arguments::{RankArguments, exit, list, unix_time_ns};
use mccs_eval::stats::Latencies;
use mccs_eval::workload::{Call, POISON};
use mccs_telemetry::bandwidth::Traffic;
use nix::time::{ClockId, clock_gettime};

/// Runs collectives over a range of sizes, checks every element, and prints nccl-tests' columns.
#[derive(Parser)]
#[command(name = "mccs-perf", version)]
struct Arguments {
    /// Collectives, comma-separated, or "all".
    #[arg(long, default_value = "all_reduce")]
    operation: String,
    /// Smallest size, as nccl-tests counts it: all ranks' data for all_gather, reduce_scatter and the like.
    #[arg(long, default_value = "1KiB")]
    begin: Bytes,
    /// Largest size.
    #[arg(long, default_value = "1MiB")]
    end: Bytes,
    /// From one size to the next.
    #[arg(long, default_value_t = 4)]
    factor: u64,
    /// Element types, comma-separated, or "all".
    #[arg(long, default_value = "float")]
    dtypes: String,
    /// Reductions, comma-separated, or "all".
    #[arg(long, default_value = "sum")]
    redops: String,
    /// Root of rooted collectives.
    #[arg(long, default_value_t = 0)]
    root: u32,
    /// Timed calls a size.
    #[arg(long, default_value_t = 20)]
    iterations: usize,
    /// Calls before those.
    #[arg(long, default_value_t = 5)]
    warmup: usize,
    /// Calls that are enqueued before the first is waited for: each takes its share of their time.
    #[arg(long, default_value_t = 1)]
    together: u32,
    /// Check every element of one call a size, on random data.
    #[arg(long)]
    check: bool,
    /// Seed of the data; differs from run to run unless given.
    #[arg(long)]
    seed: Option<u64>,
    /// All of it again, until rank 0 finds this file.
    #[arg(long)]
    until: Option<PathBuf>,
    /// Print JSON lines instead of a table.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: RankArguments,
}

/// This rank's side of the measurement.
struct Bench {
    comm: Communicator,
    stream: Stream,
    client: Client,
    send: Region,
    recv: Region,
    arguments: Arguments,
}

/// One side of a line: out of place or in place.
struct Side {
    latencies: Latencies,
    /// CPU time of this process, warm-up included.
    cpu: Duration,
    /// Over all ranks; `None` where nothing was checked.
    wrong: Option<u64>,
}

fn main() -> ExitCode {
    exit("mccs-perf", run(Arguments::parse()))
}

fn run(arguments: Arguments) -> anyhow::Result<()> {
    ensure!(arguments.factor >= 2, "--factor {}: it must be at least 2", arguments.factor);
    ensure!(arguments.iterations > 0, "--iterations must be at least 1");
    ensure!(arguments.together > 0, "--together must be at least 1");
    let Arguments { begin, end, .. } = &arguments;
    ensure!(begin.0 > 0, "--begin must be at least 1B: sizes are multiplied from there on");
    ensure!(begin <= end, "--begin {begin} is more than --end {end}: there is no size between them");
    let kinds = list(&arguments.operation, CollectiveKind::ALL)?;
    let dtypes = list(&arguments.dtypes, DataType::ALL)?;
    let redops = list(&arguments.redops, RedOp::ALL)?;
    let (client, comm) = arguments.place.join()?;
    let stream = client.create_stream()?;
    // No buffer is larger than the size as nccl-tests counts it, rounded up to whole elements for each rank.
    let bytes = arguments.end.0.max(arguments.begin.0) + 8 * u64::from(arguments.place.nranks);
    let (send, recv) = (client.allocate(bytes)?, client.allocate(bytes)?);
    let seed = arguments.seed.unwrap_or_else(|| u64::from(std::process::id()) ^ unix_time_ns());
    let mut bench = Bench { comm, stream, client, send, recv, arguments };
    let seed = bench.agree_on(seed)?;
    bench.print_header();
    let mut wrong = 0;
    loop {
        for &kind in &kinds {
            for &dtype in if kind == CollectiveKind::Barrier { &dtypes[..1] } else { &dtypes[..] } {
                for &redop in if kind.reduces() { &redops[..] } else { &redops[..1] } {
                    wrong += bench.run_sizes(kind, dtype, redop, seed)?;
                }
            }
        }
        if bench.has_done_enough()? {
            return bench.finish(wrong);
        }
    }
}

/// CPU time that this process has used.
fn cpu_time() -> anyhow::Result<Duration> {
    Ok(Duration::from(clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID)?))
}

impl Bench {
    fn is_first(&self) -> bool {
        self.arguments.place.rank == 0
    }

    /// Rank 0's number, on all ranks.
    fn agree_on(&mut self, number: u64) -> anyhow::Result<u64> {
        self.exchange(number, RedOp::Sum, self.is_first())
    }

    /// Combines a number of all ranks; `contributes` false counts as 0.
    fn exchange(&self, number: u64, op: RedOp, contributes: bool) -> anyhow::Result<u64> {
        let memory = self.client.allocate(8)?;
        let number = if contributes { number } else { 0 };
        // SAFETY: nothing in flight uses this new region.
        unsafe { memory.as_mut_slice() }.copy_from_slice(&number.to_le_bytes());
        self.comm.all_reduce(memory.at(0), memory.at(0), 1, DataType::U64, op, &self.stream)?;
        self.stream.synchronize()?;
        // SAFETY: the operation has ended.
        let bytes = unsafe { memory.as_slice() };
        Ok(u64::from_le_bytes(bytes.try_into()?))
    }

    /// Whether rank 0 sees what is waited for, on all ranks.
    fn has_done_enough(&self) -> anyhow::Result<bool> {
        let Some(until) = &self.arguments.until else { return Ok(true) };
        let is_there = self.is_first() && until.exists();
        Ok(self.exchange(u64::from(is_there), RedOp::Sum, self.is_first())? > 0)
    }

    fn print_header(&self) {
        if self.is_first() && !self.arguments.json {
            println!("# tenant {}, {} ranks, host device", self.client.tenant(), self.arguments.place.nranks);
            println!("# size and count as in nccl-tests; time is p50 of whole calls, slowest rank; busbw in GB/s");
            println!(
                "{:>14} {:>10} {:>10} {:>9} {:>9} {:>4}  {:>9} {:>7} {:>7} {:>6}  {:>9} {:>7} {:>7} {:>6}",
                "operation",
                "size",
                "count",
                "type",
                "redop",
                "root",
                "time us",
                "algbw",
                "busbw",
                "#wrong",
                "in place",
                "algbw",
                "busbw",
                "#wrong"
            );
        }
    }

    fn run_sizes(&self, kind: CollectiveKind, dtype: DataType, redop: RedOp, seed: u64) -> anyhow::Result<u64> {
        let nranks = u64::from(self.arguments.place.nranks);
        let (mut size, mut all_wrong) = (self.arguments.begin.0, 0);
        while size <= self.arguments.end.0 {
            let per_count = Traffic::new(kind, 1, nranks).payload_bytes;
            let count = size.checked_div(per_count).unwrap_or(0).div_ceil(dtype.size_bytes() as u64);
            let call = Call {
                kind,
                dtype,
                redop,
                root: self.arguments.root,
                count,
                nranks: self.arguments.place.nranks,
                seed: seed ^ size,
            };
            let out_of_place = self.measure(&call, false)?;
            // A rooted collective is in place where the root is; without any such form the column stays empty.
            let has_in_place = (0..self.arguments.place.nranks).any(|rank| call.in_place_elements(rank).is_some());
            let in_place = if has_in_place { Some(self.measure(&call, true)?) } else { None };
            let sides = [Some(&out_of_place), in_place.as_ref()];
            all_wrong += sides.iter().flatten().filter_map(|side| side.wrong).sum::<u64>();
            self.print_line(&call, sides)?;
            if kind == CollectiveKind::Barrier {
                break;
            }
            size = size.saturating_mul(self.arguments.factor);
        }
        Ok(all_wrong)
    }

    fn spans(&self, call: &Call, in_place: bool) -> (Span, Span) {
        let size = call.dtype.size_bytes() as u64;
        match call.in_place_elements(self.arguments.place.rank).filter(|_| in_place) {
            Some((send, recv)) => (self.recv.at(send * size), self.recv.at(recv * size)),
            None => (self.send.at(0), self.recv.at(0)),
        }
    }

    /// Place of a span's bytes in this process.
    fn bytes(&self, call: &Call, in_place: bool, output: bool) -> (*mut u8, usize) {
        let (rank, size) = (self.arguments.place.rank, call.dtype.size_bytes());
        let count = if output { call.recv_count(rank) } else { call.send_count(rank) };
        let ptr = match call.in_place_elements(rank).filter(|_| in_place) {
            Some((send, recv)) => self.recv.as_ptr().wrapping_add(if output { recv } else { send } as usize * size),
            None => {
                if output {
                    self.recv.as_ptr()
                } else {
                    self.send.as_ptr()
                }
            }
        };
        (ptr, count * size)
    }

    fn measure(&self, call: &Call, in_place: bool) -> anyhow::Result<Side> {
        let wrong = if self.arguments.check { Some(self.check(call, in_place)?) } else { None };
        self.fill(call, in_place);
        let mut latencies = Latencies::default();
        let cpu_before = cpu_time()?;
        for iteration in 0..self.arguments.warmup + self.arguments.iterations {
            let start = Instant::now();
            for _ in 0..self.arguments.together {
                self.enqueue(call, in_place)?;
            }
            self.stream.synchronize()?;
            if iteration >= self.arguments.warmup {
                latencies.add(start.elapsed() / self.arguments.together);
            }
        }
        let cpu = cpu_time()?.saturating_sub(cpu_before);
        Ok(Side { latencies, cpu, wrong })
    }

    /// Puts data into output and input, for calls that are not checked: there are processors on which it costs less to
    /// write zeros over zeros.
    fn fill(&self, call: &Call, in_place: bool) {
        let few = Call { kind: CollectiveKind::AllReduce, count: 1 << 12, ..*call }.input(self.arguments.place.rank);
        for output in [true, false] {
            let (ptr, bytes) = self.bytes(call, in_place, output);
            for offset in (0..bytes).step_by(few.len()) {
                let length = few.len().min(bytes - offset);
                // SAFETY: the range lies in this process' regions, and nothing is in flight.
                unsafe { std::ptr::copy_nonoverlapping(few.as_ptr(), ptr.add(offset), length) };
            }
        }
    }

    /// One call on fresh random data; returns wrong elements of all ranks.
    fn check(&self, call: &Call, in_place: bool) -> anyhow::Result<u64> {
        let (output, output_bytes) = self.bytes(call, in_place, true);
        let (input, input_bytes) = self.bytes(call, in_place, false);
        let data = call.input(self.arguments.place.rank);
        ensure!(data.len() == input_bytes, "bug: an input of {} bytes in {input_bytes}", data.len());
        // SAFETY: both ranges lie in this process' regions, and nothing is in flight.
        unsafe {
            output.write_bytes(POISON, output_bytes);
            std::ptr::copy_nonoverlapping(data.as_ptr(), input, input_bytes);
        }
        self.enqueue(call, in_place)?;
        self.stream.synchronize()?;
        // SAFETY: as above; the operation has ended.
        let result = unsafe { std::slice::from_raw_parts(output, output_bytes) };
        self.exchange(call.wrong_elements(self.arguments.place.rank, result), RedOp::Sum, true)
    }

    fn enqueue(&self, call: &Call, in_place: bool) -> Result<(), mccs::Error> {
        let (send, recv) = self.spans(call, in_place);
        call.enqueue(&self.comm, send, recv, &self.stream)
    }

    /// Quantiles over calls, of the slowest rank.
    fn slowest(&self, side: &Side, quantile: f64) -> anyhow::Result<Duration> {
        let own = side.latencies.quantile(quantile).as_nanos() as u64;
        Ok(Duration::from_nanos(self.exchange(own, RedOp::Max, true)?))
    }

    fn print_line(&self, call: &Call, sides: [Option<&Side>; 2]) -> anyhow::Result<()> {
        let nranks = u64::from(call.nranks);
        let Traffic { payload_bytes: bytes, bus_bytes } =
            Traffic::new(call.kind, call.count * call.dtype.size_bytes() as u64, nranks);
        let root = if call.kind.has_root() { call.root.to_string() } else { "-1".into() };
        let redop = if call.kind.reduces() { call.redop.name() } else { "none" };
        let mut line = format!(
            "{:>14} {bytes:>10} {:>10} {:>9} {redop:>9} {root:>4}",
            call.kind.name(),
            call.count,
            call.dtype.name()
        );
        for (in_place, side) in sides.into_iter().enumerate() {
            let Some(side) = side else {
                line += &format!("  {:>9} {:>7} {:>7} {:>6}", "-", "-", "-", "-");
                continue;
            };
            let [p50, p99, least] = [0.5, 0.99, 0.0].map(|quantile| self.slowest(side, quantile));
            let (p50, p99, least) = (p50?, p99?, least?);
            let cpu_ns = self.exchange(side.cpu.as_nanos() as u64, RedOp::Sum, true)?;
            let calls = (self.arguments.warmup + self.arguments.iterations) * self.arguments.together as usize;
            let bandwidth = |bytes: u64| bytes as f64 / p50.as_nanos().max(1) as f64;
            let us = |time: Duration| time.as_nanos() as f64 / 1000.0;
            if self.is_first() && self.arguments.json {
                let record = serde_json::json!({
                    "op": call.kind.name(), "bytes": bytes, "count": call.count, "dtype": call.dtype.name(),
                    "redop": redop, "nranks": nranks, "in_place": in_place == 1, "iters": self.arguments.iterations,
                    "median_us": us(p50), "p50_us": us(p50), "p99_us": us(p99), "min_us": us(least),
                    "ranks_cpu_s_per_call": cpu_ns as f64 / 1e9 / calls as f64, "algbw_gbps": bandwidth(bytes), "busbw_gbps": bandwidth(bus_bytes), "wrong": side.wrong,
                });
                println!("{record}");
            }
            let wrong = side.wrong.map_or("-".into(), |wrong| wrong.to_string());
            line += &format!("  {:>9.2} {:>7.2} {:>7.2} {wrong:>6}", us(p50), bandwidth(bytes), bandwidth(bus_bytes));
        }
        if self.is_first() && !self.arguments.json {
            println!("{line}");
        }
        Ok(())
    }

    fn finish(self, wrong: u64) -> anyhow::Result<()> {
        if self.is_first() && !self.arguments.json && self.arguments.check {
            println!("# wrong elements: {wrong}");
        }
        if self.arguments.check && wrong > 0 {
            bail!("{wrong} wrong elements");
        }
        self.comm.destroy()?;
        Ok(())
    }
}
