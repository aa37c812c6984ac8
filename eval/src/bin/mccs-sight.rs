//! `mccs-sight`: overhead of metrics, traces and counters on a job, for `eval/sight.py`. Single
//! records and counters are timed; and a job's operations while metrics are scraped and a trace is
//! taken, against while neither is.
//!
//! The job is one process with a thread for each rank, and runs all the time; being seen goes on and off around it, many times a
//! second, there and back in each round, so that all sides meet the same machine, and what drifts drifts for all alike. The reader of
//! the trace runs here as it does in `mccsctl trace`, but for the writing of its file, which comes after the window.

use std::hint::black_box;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::{Parser, Subcommand};
use mccs::{Client, CollectiveKind, DataType, RedOp, UniqueId};
use mccs_config::Bytes;
use mccs_control::trace_window::trace;
use mccs_telemetry::bandwidth::Traffic;
use mccs_telemetry::histogram::Histogram;
use mccs_telemetry::recorder::{Record, Recorder, Recorders};
use serde_json::json;

/// Measures what it costs to be seen; prints JSON lines.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Single records and counters, in this process.
    Calls,
    /// A job's all-reduces, through services that run.
    Job(Job),
}

#[derive(clap::Args)]
struct Job {
    /// Folders of the services' sockets, comma-separated: rank r is at the r-th, and again from the first.
    #[arg(long, value_delimiter = ',')]
    services: Vec<PathBuf>,
    /// Addresses of their metrics, in the same order.
    #[arg(long, value_delimiter = ',')]
    metrics: Vec<SocketAddr>,
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    nranks: u32,
    /// Bytes of an all-reduce.
    #[arg(long, default_value = "64KiB")]
    bytes: Bytes,
    /// How often each side is measured twice.
    #[arg(long, default_value_t = 150)]
    rounds: usize,
    /// For how long at a time, of which the first and the last twenty do not count.
    #[arg(long, default_value_t = 100)]
    interval_ms: u64,
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().what {
        What::Calls => {
            calls();
            Ok(())
        }
        What::Job(job) => job.run(),
    }
}

/// The least time of a call: what else the machine does only adds to it.
fn least_ns(mut call: impl FnMut(u64)) -> f64 {
    const CALLS: u64 = 4096;
    let run = |_| {
        let begin = Instant::now();
        (0..CALLS).for_each(&mut call);
        begin.elapsed().as_nanos() as f64 / CALLS as f64
    };
    (0..500).map(run).fold(f64::INFINITY, f64::min)
}

fn calls() {
    let recorders = Arc::new(Recorders::default());
    let recorder: Recorder = recorders.recorder("here".into());
    let arrived = |at_ns, seq| Record::Arrived { at_ns, comm: 1, rank: 1, seq };
    let say = |what: &str, ns: f64| println!("{}", json!({ "call": what, "ns": ns }));
    // Recorders learn a faster clock over a tenth of a second.
    std::thread::sleep(Duration::from_millis(150));
    say("a record, while nobody traces", least_ns(|seq| black_box(&recorder).record(|at_ns| arrived(at_ns, seq))));
    recorders.begin();
    let round = Instant::now();
    say("the clock", least_ns(|_| _ = black_box(Instant::now())));
    say("a record", least_ns(|seq| black_box(&recorder).record(|at_ns| arrived(at_ns, seq))));
    let in_round = |seq| black_box(&recorder).record_in_round(round, |at_ns| arrived(at_ns, seq));
    say("a record in a round, without the clock", least_ns(in_round));
    let histogram = Histogram::default();
    say("a duration in a histogram", least_ns(|seq| black_box(&histogram).count(Duration::from_nanos(seq * 100))));
    let bus = |seq| _ = black_box(Traffic::new(CollectiveKind::AllReduce, black_box(seq * 4096), black_box(3)));
    say("bus bytes of a collective", least_ns(bus));
}

/// Number of the interval that operations count for.
#[derive(Default)]
struct Phase(AtomicUsize);

/// Number of operations that count for none.
const BETWEEN: usize = 0;

/// Until engines record, or have noticed that the window is over.
const MARGIN: Duration = Duration::from_millis(20);
/// Metrics are scraped so often, while they are: fifteen times as often as is usual.
const SCRAPE_EVERY: Duration = Duration::from_secs(1);

impl Job {
    fn run(&self) -> anyhow::Result<()> {
        ensure!(!self.services.is_empty() && self.services.len() == self.metrics.len(), "one address for each service");
        let id = mccs::unique_id()?;
        let (phase, is_over) = (Phase::default(), AtomicBool::new(false));
        let (times, told) = std::thread::scope(|scope| {
            let (phase, is_over) = (&phase, &is_over);
            let run = |rank| scope.spawn(move || self.rank(id, rank, phase, is_over));
            let ranks: Vec<_> = (0..self.nranks).map(run).collect();
            let told = self.phases(phase);
            is_over.store(true, Ordering::Relaxed);
            let times = ranks.into_iter().map(|rank| rank.join().map_err(|_| anyhow::anyhow!("a rank panicked"))?);
            anyhow::Ok((times.collect::<anyhow::Result<Vec<_>>>()?, told?))
        })?;
        let times = times.into_iter().next().context("no ranks")?;
        for (times, (round, side, told)) in times.into_iter().skip(1).zip(told) {
            let mut us: Vec<f64> = times.into_iter().map(|ns| f64::from(ns) / 1e3).collect();
            if us.is_empty() {
                // Somebody else had the cores: whoever reads this finds a round that is not whole.
                continue;
            }
            us.sort_unstable_by(f64::total_cmp);
            // Without those from which something else took the core.
            let most = &us[..(us.len() * 9).div_ceil(10)];
            let mean_us = most.iter().sum::<f64>() / most.len() as f64;
            let (p10_us, p50_us, operations) = (us[us.len() / 10], us[us.len() / 2], us.len());
            let Told { scrapes, records, lost } = told;
            println!(
                "{}",
                json!({ "round": round, "side": side.name(), "operations": operations, "p10_us": p10_us,
                        "p50_us": p50_us, "mean_us": mean_us, "records": records, "lost": lost, "scrapes": scrapes })
            );
        }
        Ok(())
    }

    /// One rank, until all is over. Returns its operations' times in ns, by phase.
    fn rank(&self, id: UniqueId, rank: u32, phase: &Phase, is_over: &AtomicBool) -> anyhow::Result<Vec<Vec<u32>>> {
        const BLOCK: usize = 200;
        let connect = |at: usize| Client::connect(self.services[at % self.services.len()].join("mccs.sock"));
        let client = connect(rank as usize)?;
        let root = if self.services.len() > 1 {
            connect(0)?.root_address().unwrap_or_default().to_owned()
        } else {
            String::new()
        };
        let comm = client.communicator(id, rank, self.nranks).root_address_or_empty(&root).join()?;
        let (stream, memory, end) = (client.create_stream()?, client.allocate(self.bytes.0)?, client.allocate(8)?);
        let mut times = vec![Vec::new(); 1 + self.rounds * 2 * Side::ALL.len()];
        loop {
            // Rank 0 says when to end, so that all do after the same operation.
            let ends = rank == 0 && is_over.load(Ordering::Relaxed);
            // SAFETY: no operation on this region is in flight, here and below.
            unsafe { end.as_mut_slice() }.copy_from_slice(&u64::from(ends).to_le_bytes());
            comm.all_reduce(end.at(0), end.at(0), 1, DataType::U64, RedOp::Sum, &stream)?;
            stream.synchronize()?;
            // SAFETY: as above.
            if unsafe { end.as_slice() }.iter().any(|byte| *byte != 0) {
                return Ok(times);
            }
            for _ in 0..BLOCK {
                let (begin, before) = (Instant::now(), phase.0.load(Ordering::Relaxed));
                comm.all_reduce(memory.at(0), memory.at(0), self.bytes.0 / 4, DataType::F32, RedOp::Sum, &stream)?;
                stream.synchronize()?;
                let took = begin.elapsed();
                if rank == 0 && phase.0.load(Ordering::Relaxed) == before {
                    times[before].push(u32::try_from(took.as_nanos()).unwrap_or(u32::MAX));
                }
            }
        }
    }

    /// Goes through all rounds. Returns what was done in each phase, in their order.
    fn phases(&self, phase: &Phase) -> anyhow::Result<Vec<(usize, Side, Told)>> {
        let (mut done, interval) = (Vec::new(), Duration::from_millis(self.interval_ms));
        ensure!(interval > 2 * MARGIN, "an interval of which nothing counts: make it longer");
        // Until memory, flows and rings are there.
        std::thread::sleep(Duration::from_millis(500));
        let mut scrape_at = Instant::now();
        self.look(Side::All, interval, phase, BETWEEN, &mut scrape_at)?;
        for round in 0..self.rounds {
            let there = Side::ALL.into_iter();
            let there: Vec<Side> = if round % 2 == 0 { there.collect() } else { there.rev().collect() };
            for side in there.iter().chain(there.iter().rev()) {
                let told = self.look(*side, interval, phase, done.len() + 1, &mut scrape_at)?;
                done.push((round, *side, told));
            }
        }
        Ok(done)
    }

    /// Looks at the job for an interval, in which its operations count for phase `number`.
    fn look(
        &self,
        side: Side,
        interval: Duration,
        phase: &Phase,
        number: usize,
        scrape_at: &mut Instant,
    ) -> anyhow::Result<Told> {
        // Engines record until the service has noticed that the window before is over.
        std::thread::sleep(MARGIN);
        let told = std::thread::scope(|scope| {
            let trace_of = |folder: &PathBuf| trace(&folder.join("mccs-control.sock"), interval, None, &|| false);
            let traced = if side == Side::All { &self.services[..] } else { &[] };
            let traces: Vec<_> = traced.iter().map(|folder| scope.spawn(move || trace_of(folder))).collect();
            // Until engines record.
            std::thread::sleep(MARGIN);
            phase.0.store(number, Ordering::Relaxed);
            let scrapes = side != Side::Off && *scrape_at <= Instant::now();
            let scraped = if scrapes { self.metrics.iter().map(scrape).sum() } else { Ok(0) };
            if scrapes {
                *scrape_at = Instant::now() + SCRAPE_EVERY;
            }
            std::thread::sleep(interval - 2 * MARGIN);
            phase.0.store(BETWEEN, Ordering::Relaxed);
            let mut told = Told { scrapes: scraped?, ..Told::default() };
            for trace in traces {
                let window = trace.join().map_err(|_| anyhow::anyhow!("a reader panicked"))??;
                told.records += window.engines.iter().map(|(_, records)| records.len()).sum::<usize>();
                told.lost += window.lost;
            }
            anyhow::Ok(told)
        })?;
        Ok(told)
    }
}

/// Asks for all metrics once.
fn scrape(address: &SocketAddr) -> anyhow::Result<u64> {
    let mut socket = TcpStream::connect(address)?;
    socket.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")?;
    let mut text = String::new();
    socket.read_to_string(&mut text)?;
    ensure!(text.contains("mccs_tenant_operations_total"), "no metrics at {address}");
    Ok(1)
}

/// Treatment of the job.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Off,
    Metrics,
    All,
}

impl Side {
    const ALL: [Side; 3] = [Side::Off, Side::Metrics, Side::All];

    fn name(self) -> &'static str {
        match self {
            Side::Off => "off",
            Side::Metrics => "metrics",
            Side::All => "metrics and trace",
        }
    }
}

/// Results of a look.
#[derive(Default)]
struct Told {
    scrapes: u64,
    records: usize,
    lost: u64,
}
