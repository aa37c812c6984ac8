//! `mccs-upgrades`: a job whose service is upgraded all the time, with every element checked, or with the
//! gaps between its calls measured, around an upgrade and without one in turn.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Parser;
use mccs::{Client, DataType, RedOp};
use mccs_config::Bytes;
use mccs_control::{ControlAnswer, ControlRequest, UpgradeView, call_within};
use mccs_eval::stats::Latencies;

/// All-reduces of ranks in sessions of their own while the service is upgraded; prints a line of JSON.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The service's socket.
    #[arg(long, env = "MCCS_SOCKET")]
    socket: PathBuf,
    /// Its control socket.
    #[arg(long, env = "MCCS_CONTROL_SOCKET")]
    control_socket: PathBuf,
    /// Ranks.
    #[arg(long, default_value_t = 2)]
    ranks: u32,
    /// Upgrades.
    #[arg(long, default_value_t = 100)]
    upgrades: usize,
    /// Bytes of each all-reduce.
    #[arg(long, default_value = "64KiB")]
    bytes: Bytes,
    /// New data for every call, and every element checked. The gaps are of no use then.
    #[arg(long)]
    check: bool,
    /// Ranks pause so long between calls, as jobs do that compute.
    #[arg(long, default_value_t = 0)]
    pause_us: u64,
}

/// An upgrade, and as much time after it without one.
struct Made {
    asked: Instant,
    over: Instant,
    quiet_until: Instant,
    gap: Duration,
}

/// How long an upgrade may take.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
/// Calls between two upgrades, at least.
const CALLS_BETWEEN: u64 = 8;

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    ensure!(arguments.bytes.0 >= 8 && arguments.ranks > 0, "--bytes is at least 8, and --ranks at least 1");
    let id = mccs::unique_id()?;
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let (made, ends) = std::thread::scope(|scope| {
        let run = |rank| {
            scope.spawn({
                let (arguments, stop, done) = (&arguments, &stop, &done);
                move || run(arguments, id, rank, stop, done).inspect_err(|_| done.store(u64::MAX, Ordering::Relaxed))
            })
        };
        let ranks: Vec<_> = (0..arguments.ranks).map(run).collect();
        let made = upgrade(&arguments, &done);
        stop.store(true, Ordering::Relaxed);
        let mut ends = Vec::new();
        for rank in ranks {
            let Ok(ran) = rank.join() else { bail!("a rank has panicked") };
            let ran = ran?;
            if ends.is_empty() {
                ends = ran;
            }
        }
        anyhow::Ok((made?, ends))
    })?;
    report(&arguments, &made, &ends);
    Ok(())
}

/// A rank's contribution: differs by rank, call and place. Small, so that sums are exact.
fn value(rank: u32, number: u64, at: u64) -> u32 {
    let mixed =
        (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at.wrapping_mul(0xff51_afd7_ed55_8ccd)).wrapping_add(rank.into());
    (mixed.wrapping_mul(0xc4ce_b9fe_1a85_ec53) >> 44) as u32
}

fn words(bytes: &mut [u8]) -> &mut [u32] {
    // SAFETY: regions begin at a page, so nothing is cut off; every bit pattern is an element.
    unsafe { bytes.align_to_mut::<u32>() }.1
}

/// All-reduces until rank 0 is to stop. Returns when each has ended.
fn run(
    arguments: &Arguments,
    id: mccs::UniqueId,
    rank: u32,
    stop: &AtomicBool,
    done: &AtomicU64,
) -> anyhow::Result<Vec<Instant>> {
    let client = Client::connect(&arguments.socket)?;
    let comm = client.communicator(id, rank, arguments.ranks).join()?;
    let stream = client.create_stream()?;
    let count = arguments.bytes.0 / 4;
    let (send, recv) = (client.allocate(4 * count)?, client.allocate(4 * count)?);
    let (mut ends, last) = (Vec::new(), count - 1);
    loop {
        let number = ends.len() as u64;
        // SAFETY: nothing is in flight.
        let (from, to) = unsafe { (words(send.as_mut_slice()), words(recv.as_mut_slice())) };
        if arguments.check {
            (0..last).zip(&mut *from).for_each(|(at, word)| *word = value(rank, number, at));
            to.fill(0xdead_beef);
        }
        // Whether rank 0 goes on.
        from[last as usize] = u32::from(rank == 0 && !stop.load(Ordering::Relaxed));
        comm.all_reduce(send.at(0), recv.at(0), count, DataType::U32, RedOp::Sum, &stream)?;
        stream.synchronize()?;
        ends.push(Instant::now());
        if rank == 0 {
            done.fetch_max(number + 1, Ordering::Relaxed);
        }
        if arguments.check {
            let right = |at: u64| (0..arguments.ranks).map(|rank| value(rank, number, at)).sum::<u32>();
            let wrong = (0..last).zip(&*to).filter(|(at, word)| **word != right(*at)).count();
            ensure!(wrong == 0, "rank {rank}: {wrong} elements of all-reduce {number} are wrong");
        }
        if to[last as usize] == 0 {
            return Ok(ends);
        }
        if arguments.pause_us > 0 {
            std::thread::sleep(Duration::from_micros(arguments.pause_us));
        }
    }
}

/// Waits until so many collectives have ended, and tells when that was.
fn wait(done: &AtomicU64, goal: u64) -> Instant {
    while done.load(Ordering::Relaxed) < goal {
        std::thread::sleep(Duration::from_micros(50));
    }
    Instant::now()
}

fn upgrade(arguments: &Arguments, done: &AtomicU64) -> anyhow::Result<Vec<Made>> {
    wait(done, CALLS_BETWEEN);
    let mut made = Vec::new();
    while made.len() < arguments.upgrades {
        let asked = Instant::now();
        let request = ControlRequest::Upgrade { binary: None, force: false };
        let told = call_within(&arguments.control_socket, &request, ANSWERS_WITHIN).context("an upgrade")?;
        let UpgradeView { gap_us, .. } = match told {
            ControlAnswer::Upgraded(view) => view,
            ControlAnswer::Refused(reason) => bail!("an upgrade was refused: {reason}"),
            _ => bail!("the service does not answer what was asked"),
        };
        let over = wait(done, done.load(Ordering::Relaxed).saturating_add(CALLS_BETWEEN));
        // As long without one, and no other upgrade's programs starting.
        std::thread::sleep(over.duration_since(asked));
        made.push(Made { asked, over, quiet_until: Instant::now(), gap: Duration::from_micros(gap_us) });
    }
    Ok(made)
}

fn report(arguments: &Arguments, made: &[Made], ends: &[Instant]) {
    // The longest gap that ends in a stretch of time; the first began before it.
    let longest = |from: Instant, to: Instant| {
        let first = ends.partition_point(|end| *end < from).max(1);
        let after = ends.partition_point(|end| *end <= to).max(first);
        (first..after).map(|n| ends[n].duration_since(ends[n - 1])).max()
    };
    let (mut gaps, mut upgraded, mut quiet) = (Latencies::default(), Latencies::default(), Latencies::default());
    for Made { asked, over, quiet_until, gap } in made {
        gaps.add(*gap);
        longest(*asked, *over).into_iter().for_each(|gap| upgraded.add(gap));
        longest(*over, *quiet_until).into_iter().for_each(|gap| quiet.add(gap));
    }
    let us = |latencies: &Latencies, quantile| latencies.quantile(quantile).as_nanos() as f64 / 1e3;
    let line = serde_json::json!({
        "bytes": arguments.bytes.0, "nranks": arguments.ranks, "checked": arguments.check, "pause_us": arguments.pause_us,
        "upgrades": made.len(), "calls": ends.len(),
        "gap_p50_us": us(&gaps, 0.5), "gap_p99_us": us(&gaps, 0.99), "gap_max_us": us(&gaps, 1.0),
        "longest_p50_us": us(&upgraded, 0.5), "longest_p99_us": us(&upgraded, 0.99), "longest_max_us": us(&upgraded, 1.0),
        "quiet_p50_us": us(&quiet, 0.5), "quiet_p99_us": us(&quiet, 0.99), "quiet_max_us": us(&quiet, 1.0),
        "seconds": ends.last().zip(ends.first()).map_or(0.0, |(last, first)| last.duration_since(*first).as_secs_f64()),
    });
    println!("{line}");
}
