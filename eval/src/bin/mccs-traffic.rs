//! `mccs-traffic`: a rank of a job that computes, then does one collective, and again, for
//! scenarios. Computing is sleeping: what counts is when the job sends.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{bail, ensure};
use clap::Parser;
use mccs::{CollectiveKind, Communicator, DataType, RedOp, Region, Stream};
use mccs_config::{Bytes, DurationText};
use mccs_eval::arguments::RankArguments;
use mccs_eval::stats::Latencies;
use mccs_telemetry::bandwidth::Traffic;

/// Computes and communicates in turn; rank 0 prints a line of JSON.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// all_reduce, all_gather or reduce_scatter.
    #[arg(long, default_value = "all_reduce")]
    collective: CollectiveKind,
    /// Length of the longest buffer, as in nccl-tests.
    #[arg(long)]
    bytes: Bytes,
    /// Between two collectives.
    #[arg(long, default_value = "0ms")]
    compute: DurationText,
    /// How often.
    #[arg(long)]
    iterations: u64,
    /// From the first collective, which makes the flows, to the first that counts: time for a controller to give this job and
    /// those that begin with it their strategies.
    #[arg(long, default_value = "0ms")]
    settle: DurationText,
    /// Also says when each collective that counts has ended.
    #[arg(long)]
    each: bool,
    /// While this file is there no collective is called: a rank that holds up its job.
    #[arg(long)]
    hold: Option<PathBuf>,
    #[command(flatten)]
    place: RankArguments,
}

/// Collectives after `settle` that do not count.
const SETTLED_AFTER: u32 = 3;

/// Between two looks at the file of `--hold`.
const HELD_FOR: Duration = Duration::from_millis(10);

/// One collective, again and again.
struct Job {
    comm: Communicator,
    stream: Stream,
    send: Region,
    recv: Region,
    kind: CollectiveKind,
    /// Elements of each rank's part, or of the whole in an all-reduce.
    count: u64,
}

impl Job {
    fn run_once(&self) -> anyhow::Result<Duration> {
        let (send, recv, float, began) = (self.send.at(0), self.recv.at(0), DataType::F32, Instant::now());
        match self.kind {
            CollectiveKind::AllReduce => {
                self.comm.all_reduce(send, recv, self.count, float, RedOp::Sum, &self.stream)?
            }
            CollectiveKind::AllGather => self.comm.all_gather(send, recv, self.count, float, &self.stream)?,
            CollectiveKind::ReduceScatter => {
                self.comm.reduce_scatter(send, recv, self.count, float, RedOp::Sum, &self.stream)?;
            }
            kind => bail!("scenarios have no {kind:?}"),
        }
        self.stream.synchronize()?;
        Ok(began.elapsed())
    }
}

fn main() -> anyhow::Result<()> {
    let Arguments { collective: kind, bytes, compute, iterations, settle, each, hold, place } = Arguments::parse();
    let nranks = u64::from(place.nranks);
    let parts = if kind == CollectiveKind::AllReduce { 1 } else { nranks };
    let count = bytes.0 / 4 / parts;
    ensure!(count > 0, "--bytes must hold an element for each rank");
    let (client, comm) = place.join()?;
    let (send, recv) = match kind {
        CollectiveKind::AllGather => (count, count * parts),
        _ => (count * parts, count),
    };
    let (send, recv) = (client.allocate(4 * send)?, client.allocate(4 * recv)?);
    let job = Job { comm, stream: client.create_stream()?, send, recv, kind, count };
    job.run_once()?;
    std::thread::sleep(settle.0);
    // A strategy that was decided meanwhile is in force after so many; and all ranks begin together.
    for _ in 0..SETTLED_AFTER {
        job.run_once()?;
    }
    let began_unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let (began, mut latencies, mut ended) = (Instant::now(), Latencies::default(), Vec::new());
    for _ in 0..iterations {
        std::thread::sleep(compute.0);
        while hold.as_ref().is_some_and(|file| file.exists()) {
            std::thread::sleep(HELD_FOR);
        }
        latencies.add(job.run_once()?);
        ended.extend(each.then(|| began.elapsed().as_secs_f64()));
    }
    if place.rank == 0 {
        let bus_bytes = Traffic::new(kind, count * 4, nranks).bus_bytes;
        let sending = latencies.total().as_secs_f64();
        let line = serde_json::json!({
            "seconds": began.elapsed().as_secs_f64(),
            "iterations": iterations,
            "bytes": bytes.0,
            "p50_us": latencies.quantile(0.5).as_secs_f64() * 1e6,
            "p99_us": latencies.quantile(0.99).as_secs_f64() * 1e6,
            "began_unix_s": began_unix.as_secs_f64(),
            "ended_s": ended,
            "busbw_gbps": (bus_bytes * iterations) as f64 / sending / 1e9,
        });
        println!("{line}");
    }
    Ok(())
}
