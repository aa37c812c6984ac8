//! `mccs-ring-bench`: round trips through the command ring between two busy processes, beside a
//! bare cache line. They run on different cores. Commands have 128 bytes, and go through two rings;
//! no ring can beat the cache line. Commands a second one way are measured as well.
//!
//! The program starts itself again as the peer, with the shared memory as its standard input. Both sides only poll.

use std::os::fd::AsFd;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::{Parser, ValueEnum};
use mccs_eval::pinning::pin;
use mccs_eval::stats::Latencies;
use mccs_ipc::command::{BufferRef, Command};
use mccs_ipc::queue::{Consumer, Producer, Push, ring_bytes};
use mccs_ipc::shm::Mapping;
use mccs_ipc::types::Handle;

const CAPACITY: u32 = 1024;
/// Round trips that are timed together.
const BATCH: usize = 100;
/// A peer that has not answered for so long is gone.
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures the command ring and a bare cache line between two processes.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Sides to measure, comma-separated.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "ring,line")]
    sides: Vec<Side>,
    /// Round trips that are timed one by one, and again as many that are timed a hundred together.
    #[arg(long, default_value_t = 200_000)]
    round_trips: u64,
    /// Round trips before those.
    #[arg(long, default_value_t = 20_000)]
    warmup: u64,
    /// Commands one way.
    #[arg(long, default_value_t = 10_000_000)]
    commands: u64,
    /// How often to measure everything.
    #[arg(long, default_value_t = 1)]
    rounds: u32,
    /// Cores of the two processes.
    #[arg(long, value_delimiter = ',', default_value = "0,1")]
    cores: Vec<usize>,
    /// Print JSON lines instead of text.
    #[arg(long)]
    json: bool,
    /// Be the peer.
    #[arg(long, hide = true)]
    peer: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Side {
    /// Two rings of commands.
    Ring,
    /// A cache line each way.
    Line,
}

/// One number, alone: adjacent lines are fetched in pairs.
#[repr(align(128))]
struct Line(AtomicU64);

/// The shared memory: a ring each way, then a line each way.
struct Segment(Arc<Mapping>);

impl Segment {
    fn bytes() -> u64 {
        Self::line_offset(2)
    }

    fn line_offset(index: usize) -> u64 {
        2 * ring_bytes::<Command>(CAPACITY) + (index * size_of::<Line>()) as u64
    }

    /// `from` and `to` are 0 and 1, the other way round at the peer.
    fn rings(&self, from: u64, to: u64) -> anyhow::Result<(Producer<Command>, Consumer<Command>)> {
        let bytes = ring_bytes::<Command>(CAPACITY);
        let producer = Producer::new(Arc::clone(&self.0), to * bytes, CAPACITY)?;
        Ok((producer, Consumer::new(Arc::clone(&self.0), from * bytes, CAPACITY)?))
    }

    fn line(&self, index: usize) -> anyhow::Result<&AtomicU64> {
        let line = self.0.at::<Line>(Self::line_offset(index), 1).context("bug: a line outside the segment")?;
        // SAFETY: `at` checked range and alignment, the mapping lives as long as `self`, any bits are an integer, and
        // both processes access it as an atomic only.
        Ok(unsafe { &(*line).0 })
    }
}

/// Polls until there is something.
fn poll<T>(mut attempt: impl FnMut() -> anyhow::Result<Option<T>>) -> anyhow::Result<T> {
    const POLLS_BETWEEN_CLOCKS: u32 = 1 << 20;
    let start = Instant::now();
    loop {
        for _ in 0..POLLS_BETWEEN_CLOCKS {
            if let Some(value) = attempt()? {
                return Ok(value);
            }
            std::hint::spin_loop();
        }
        ensure!(start.elapsed() < PATIENCE, "the peer process has not answered for {PATIENCE:?}");
    }
}

fn command(ticket: u64) -> Command {
    Command {
        opcode: 1,
        flags: 0,
        comm: Handle::NONE,
        stream: Handle::NONE,
        ticket,
        kind: 0,
        dtype: 0,
        redop: 0,
        root: 0,
        count: 0,
        send: BufferRef::NONE,
        recv: BufferRef::NONE,
        scalar_bits: 0,
        rounds: 0,
        user_tag: 0,
    }
}

fn push(producer: &mut Producer<Command>, command: &Command) -> anyhow::Result<()> {
    poll(|| Ok((producer.try_push(command)? != Push::Full).then_some(())))
}

fn pop(consumer: &mut Consumer<Command>, command: &mut Command) -> anyhow::Result<()> {
    poll(|| Ok(consumer.try_pop_into(command)?.then_some(())))
}

fn wait_for(line: &AtomicU64, value: u64) -> anyhow::Result<()> {
    poll(|| Ok((line.load(Ordering::Acquire) == value).then_some(())))
}

/// Times of round trips, in nanoseconds.
struct RoundTrips {
    p50_ns: u64,
    p99_ns: u64,
    /// Median of as many that were timed [`BATCH`] together: without the clock, which each of the others includes.
    batched_ns: f64,
}

impl Arguments {
    /// Round trips of each side, all phases.
    fn all_round_trips(&self) -> u64 {
        self.warmup + 2 * self.round_trips
    }

    /// Numbers round trips from 0.
    fn time(&self, mut round_trip: impl FnMut(u64) -> anyhow::Result<()>) -> anyhow::Result<RoundTrips> {
        (0..self.warmup).try_for_each(&mut round_trip)?;
        let (one_by_one, all) = (self.warmup + self.round_trips, self.all_round_trips());
        let mut latencies = Latencies::default();
        for number in self.warmup..one_by_one {
            let start = Instant::now();
            round_trip(number)?;
            latencies.add(start.elapsed());
        }
        let mut batches = Latencies::default();
        for first in (one_by_one..all).step_by(BATCH) {
            let start = Instant::now();
            (first..first + BATCH as u64).try_for_each(&mut round_trip)?;
            batches.add(start.elapsed());
        }
        let batched_ns = batches.quantile(0.5).as_nanos() as f64 / BATCH as f64;
        let [p50_ns, p99_ns] = [0.5, 0.99].map(|quantile| latencies.quantile(quantile).as_nanos() as u64);
        Ok(RoundTrips { p50_ns, p99_ns, batched_ns })
    }

    /// Round trips, and commands a second one way.
    fn measure_rings(&self, segment: &Segment) -> anyhow::Result<(RoundTrips, f64)> {
        let (mut to, mut from) = segment.rings(1, 0)?;
        let mut answer = command(0);
        let trips = self.time(|number| {
            push(&mut to, &command(number))?;
            pop(&mut from, &mut answer)?;
            ensure!(answer.ticket == number, "commands out of order");
            Ok(())
        })?;
        let start = Instant::now();
        (0..self.commands).try_for_each(|number| push(&mut to, &command(number)))?;
        pop(&mut from, &mut answer)?;
        Ok((trips, self.commands as f64 / start.elapsed().as_secs_f64()))
    }

    fn answer_rings(&self, segment: &Segment) -> anyhow::Result<()> {
        let (mut to, mut from) = segment.rings(0, 1)?;
        let mut taken = command(0);
        for _ in 0..self.all_round_trips() {
            pop(&mut from, &mut taken)?;
            push(&mut to, &taken)?;
        }
        for number in 0..self.commands {
            pop(&mut from, &mut taken)?;
            ensure!(taken.ticket == number, "commands out of order");
        }
        push(&mut to, &command(0))
    }

    fn measure_lines(&self, segment: &Segment) -> anyhow::Result<RoundTrips> {
        let (to, from) = (segment.line(0)?, segment.line(1)?);
        self.time(|number| {
            to.store(number + 1, Ordering::Release);
            wait_for(from, number + 1)
        })
    }

    fn answer_lines(&self, segment: &Segment) -> anyhow::Result<()> {
        let (from, to) = (segment.line(0)?, segment.line(1)?);
        for number in 1..=self.all_round_trips() {
            wait_for(from, number)?;
            to.store(number, Ordering::Release);
        }
        Ok(())
    }

    fn measure(&self, side: Side, segment: &Segment) -> anyhow::Result<()> {
        let (name, (trips, rate)) = match side {
            Side::Ring => ("ring", self.measure_rings(segment).map(|(trips, rate)| (trips, Some(rate)))?),
            Side::Line => ("line", (self.measure_lines(segment)?, None)),
        };
        let RoundTrips { p50_ns, p99_ns, batched_ns } = trips;
        if self.json {
            let record = serde_json::json!({
                "side": name, "round_trips": self.round_trips, "p50_ns": p50_ns, "p99_ns": p99_ns,
                "batched_ns": batched_ns, "commands_per_s": rate,
            });
            println!("{record}");
        } else {
            let rate = rate.map_or(String::new(), |rate| format!(", {:.1} million commands/s", rate / 1e6));
            println!("{name}: round trip p50 {p50_ns} ns, p99 {p99_ns} ns, in batches {batched_ns:.0} ns{rate}");
        }
        Ok(())
    }
}

/// Starts the peer and shares memory with it.
fn start_peer(side: Side, arguments: &Arguments) -> anyhow::Result<(Segment, Child)> {
    let (fd, mapping) = Mapping::create("bench", Segment::bytes())?;
    let side = side.to_possible_value().context("bug: a side without a name")?;
    let peer = std::process::Command::new(std::env::current_exe()?)
        .args(["--peer", "--sides", side.get_name()])
        .args(["--round-trips", &arguments.round_trips.to_string(), "--warmup", &arguments.warmup.to_string()])
        .args(["--commands", &arguments.commands.to_string(), "--cores"])
        .arg(arguments.cores.iter().map(usize::to_string).collect::<Vec<_>>().join(","))
        .stdin(Stdio::from(fd))
        .spawn()
        .context("cannot start the peer process")?;
    Ok((Segment(Arc::new(mapping)), peer))
}

fn be_peer(side: Side, arguments: &Arguments) -> anyhow::Result<()> {
    nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL)?;
    pin(arguments.cores[1])?;
    let segment = Segment(Arc::new(Mapping::map(std::io::stdin().as_fd(), Segment::bytes())?));
    match side {
        Side::Ring => arguments.answer_rings(&segment),
        Side::Line => arguments.answer_lines(&segment),
    }
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let whole_batches = arguments.round_trips > 0 && arguments.round_trips.is_multiple_of(BATCH as u64);
    ensure!(whole_batches, "--round-trips must be a multiple of {BATCH}");
    ensure!(arguments.cores.len() == 2, "--cores takes two, as in 0,1");
    if arguments.peer {
        return be_peer(arguments.sides[0], &arguments);
    }
    pin(arguments.cores[0])?;
    for _ in 0..arguments.rounds {
        for &side in &arguments.sides {
            let (segment, mut peer) = start_peer(side, &arguments)?;
            arguments.measure(side, &segment)?;
            ensure!(peer.wait()?.success(), "the peer process failed");
        }
    }
    Ok(())
}
