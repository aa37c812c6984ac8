//! A rank of a job whose communicator's strategy is changed all the time, by rank 0: every element of every result is checked,
//! or the gaps between completions are measured, with and without changes in turn.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Parser;
use mccs::{Communicator, DataType, RedOp, Region, Stream};
use mccs_config::Bytes;
use mccs_config::change::StrategyChange;
use mccs_config::service::{Algorithm, CONTROL_SOCKET, FlowPath, Ports, TransportKind};
use mccs_eval::arguments::{RankArguments, unix_time_ns};
use mccs_eval::stats::Latencies;
use mccs_service::control::{ControlAnswer, ControlRequest, call};

/// All-reduces while rank 0 changes the strategy; rank 0 prints a line of JSON.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Control socket of the service of rank 0; the one beside the tenant's, if not given.
    #[arg(long, env = "MCCS_CONTROL_SOCKET")]
    control_socket: Option<PathBuf>,
    /// Changes to make.
    #[arg(long, default_value_t = 1000)]
    changes: u64,
    /// Bytes of each all-reduce.
    #[arg(long, default_value = "64KiB")]
    bytes: Bytes,
    /// Source ports of a way through the network; changes take them in turn.
    #[arg(long)]
    path: Vec<Ports>,
    /// What carries flows, tcp or rdma; changes take them in turn.
    #[arg(long)]
    transport: Vec<TransportKind>,
    /// New data for every call, and every element checked. The times are of no use then.
    #[arg(long)]
    check: bool,
    /// Changes in a row, then as long without: so are times with and without compared.
    #[arg(long, default_value_t = 20)]
    row: u64,
    /// Collectives that may start while hosts agree; chosen by the service, if not given.
    #[arg(long)]
    window: Option<u32>,
    #[command(flatten)]
    place: RankArguments,
}

/// A change that took place.
#[derive(Debug, Clone, Copy)]
struct Made {
    asked: Instant,
    answered: Instant,
    /// First collective under it.
    cut: u64,
}

/// What rank 0's operator thread tells.
#[derive(Default)]
struct Operated {
    made: Vec<Made>,
    /// Time without changes.
    quiet: Vec<(Instant, Instant)>,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    ensure!(arguments.bytes.0 >= 8, "--bytes must be at least 8: the last element says whether to go on");
    let (client, comm) = arguments.place.join()?;
    let stream = client.register_stream()?;
    let count = arguments.bytes.0 / 4;
    let (send, recv) = (client.allocate(4 * count)?, client.allocate(4 * count)?);
    let (stop, done) = (AtomicBool::new(arguments.place.rank != 0), AtomicU64::new(0));
    let rank = Rank { comm, stream, send, recv, count, arguments: &arguments };
    let (operated, ran) = std::thread::scope(|scope| {
        let operator = scope.spawn(|| {
            let operated = if arguments.place.rank == 0 { operate(&arguments, &done) } else { Ok(Operated::default()) };
            stop.store(true, Ordering::Relaxed);
            operated
        });
        let ran = rank.run(&stop, &done);
        // Should a call fail, the operator sees no progress: it ends by itself.
        done.store(u64::MAX, Ordering::Relaxed);
        (operator.join(), ran)
    });
    let ends = ran?;
    let Ok(operated) = operated else { bail!("the operator's thread has panicked") };
    if arguments.place.rank == 0 {
        report(&arguments, &operated?, &ends);
    }
    Ok(())
}

struct Rank<'a> {
    comm: Communicator,
    stream: Stream,
    send: Region,
    recv: Region,
    count: u64,
    arguments: &'a Arguments,
}

/// What a rank contributes: differs by rank, call and place. Small, so that sums are exact.
fn value(rank: u32, number: u64, at: u64) -> u32 {
    let mixed =
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at.wrapping_mul(0xff51_afd7_ed55_8ccd)).wrapping_add(rank.into());
    (mixed.wrapping_mul(0xc4ce_b9fe_1a85_ec53) >> 44) as u32
}

impl Rank<'_> {
    /// All-reduces until rank 0 is told to stop. Returns when each has ended.
    fn run(&self, stop: &AtomicBool, done: &AtomicU64) -> anyhow::Result<Vec<Instant>> {
        let (rank, nranks, last) = (self.arguments.place.rank, self.arguments.place.nranks, self.count - 1);
        let mut ends = Vec::new();
        for number in 0.. {
            // SAFETY: nothing is in flight.
            let (send, recv) = unsafe { (words(self.send.as_mut_slice()), words(self.recv.as_mut_slice())) };
            if self.arguments.check {
                (0..last).zip(&mut *send).for_each(|(at, word)| *word = value(rank, number, at));
                recv.fill(0xdead_beef);
            }
            // The number of ranks whose operator goes on: that of rank 0, or nobody.
            send[last as usize] = u32::from(!stop.load(Ordering::Relaxed));
            let (from, to) = (self.send.at(0), self.recv.at(0));
            self.comm.all_reduce(from, to, self.count, DataType::U32, RedOp::Sum, &self.stream)?;
            self.stream.synchronize()?;
            ends.push(Instant::now());
            done.store(number + 1, Ordering::Relaxed);
            if self.arguments.check {
                let right = |at: u64| (0..nranks).map(|rank| value(rank, number, at)).sum::<u32>();
                let wrong = (0..last).zip(&*recv).filter(|(at, word)| **word != right(*at)).count();
                ensure!(wrong == 0, "rank {rank}: {wrong} elements of all-reduce {number} are wrong");
            }
            if recv[last as usize] == 0 {
                break;
            }
        }
        Ok(ends)
    }
}

/// Shared memory as elements.
fn words(bytes: &mut [u8]) -> &mut [u32] {
    // SAFETY: regions begin at a page, so nothing is cut off; every bit pattern is an element.
    unsafe { bytes.align_to_mut::<u32>() }.1
}

/// Changes the strategy, as often as was asked for.
fn operate(arguments: &Arguments, done: &AtomicU64) -> anyhow::Result<Operated> {
    let beside = || arguments.place.socket.with_file_name(CONTROL_SOCKET);
    let control = arguments.control_socket.clone().unwrap_or_else(beside);
    let ControlAnswer::Communicators(comms) = call(&control, &ControlRequest::Communicators)? else {
        bail!("the service does not tell of its communicators")
    };
    let id = arguments.place.unique_id.to_string();
    let comm = comms.iter().find(|comm| comm.unique_id == id).context("the service does not know the communicator")?;
    let mut random = unix_time_ns() | 1;
    let mut operated = Operated::default();
    while (operated.made.len() as u64) < arguments.changes {
        let turn = operated.made.len().checked_rem(arguments.transport.len());
        let transport = turn.and_then(|turn| arguments.transport.get(turn).copied());
        let change = StrategyChange { transport, ..change(arguments, &mut random) };
        let request = ControlRequest::Reconfigure { communicator: comm.communicator, change, window: arguments.window };
        let asked = Instant::now();
        match call(&control, &request)? {
            ControlAnswer::Reconfigured { cut, .. } => {
                operated.made.push(Made { asked, answered: Instant::now(), cut });
                // The next one comes when this one is in force: otherwise the last would hide those before.
                wait(done, cut + 1);
            }
            ControlAnswer::Refused(reason) => bail!("a change was refused: {reason}"),
            _ => bail!("the service does not answer what was asked"),
        }
        if !arguments.check && (operated.made.len() as u64).is_multiple_of(arguments.row) {
            let from = Instant::now();
            wait(done, done.load(Ordering::Relaxed).saturating_add(5 * arguments.row));
            operated.quiet.push((from, Instant::now()));
        }
    }
    Ok(operated)
}

fn wait(done: &AtomicU64, goal: u64) {
    while done.load(Ordering::Relaxed) < goal {
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Another ring order for each of one to three channels, another algorithm, other ways.
fn change(arguments: &Arguments, random: &mut u64) -> StrategyChange {
    let mut below = |limit: u64| {
        // Xorshift (Marsaglia, 2003).
        *random ^= *random << 13;
        *random ^= *random >> 7;
        *random ^= *random << 17;
        (*random >> 11) % limit
    };
    let mut ring: Vec<u32> = (0..arguments.place.nranks).collect();
    let mut rings = Vec::new();
    for _ in 0..1 + below(3) {
        (1..ring.len()).for_each(|at| ring.swap(at, below(at as u64 + 1) as usize));
        rings.push(ring.clone());
    }
    let algorithms = [Algorithm::Ring, Algorithm::HostRing, Algorithm::HostTree, Algorithm::Tree];
    let turn = below(arguments.path.len().max(1) as u64) as usize;
    let mut ways = arguments.path.clone();
    ways.rotate_left(turn);
    let path = |ports| FlowPath { source_ports: Some(ports), ..FlowPath::default() };
    StrategyChange {
        algorithm: Some(algorithms[if arguments.check { below(4) as usize } else { 1 }]),
        rings: Some(rings),
        paths: (!ways.is_empty()).then(|| ways.into_iter().map(path).collect()),
        ..StrategyChange::default()
    }
}

fn report(arguments: &Arguments, operated: &Operated, ends: &[Instant]) {
    // The gap that ends with call n.
    let gap = |n: usize| ends[n].duration_since(ends[n - 1]);
    let (mut quiet, mut agreed, mut longest) = (Latencies::default(), Latencies::default(), Latencies::default());
    for (from, to) in &operated.quiet {
        (1..ends.len()).filter(|n| ends[n - 1] >= *from && ends[*n] <= *to).for_each(|n| quiet.add(gap(n)));
    }
    for Made { asked, answered, cut } in &operated.made {
        agreed.add(answered.duration_since(*asked));
        let first = ends.partition_point(|end| end < asked).max(1);
        let last = (*cut as usize + 1).min(ends.len().saturating_sub(1));
        longest.add((first..=last).map(gap).max().unwrap_or_default());
    }
    let us = |latencies: &Latencies, quantile| latencies.quantile(quantile).as_nanos() as f64 / 1e3;
    let line = serde_json::json!({
        "bytes": arguments.bytes.0, "nranks": arguments.place.nranks, "checked": arguments.check,
        "changes": operated.made.len(), "calls": ends.len(),
        "quiet_p50_us": us(&quiet, 0.5), "quiet_p99_us": us(&quiet, 0.99), "quiet_max_us": us(&quiet, 1.0),
        "longest_gap_p50_us": us(&longest, 0.5), "longest_gap_p99_us": us(&longest, 0.99), "longest_gap_max_us": us(&longest, 1.0),
        "agreed_p50_us": us(&agreed, 0.5), "agreed_p99_us": us(&agreed, 0.99),
        "seconds": ends.last().zip(ends.first()).map_or(0.0, |(last, first)| last.duration_since(*first).as_secs_f64()),
    });
    println!("{line}");
}
