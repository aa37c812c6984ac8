//! `mccs-changes`: a rank of a job whose strategy rank 0 changes all the time, with elements
//! checked or gaps measured. Gaps between completions are measured with and without changes in
//! turn.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Parser;
use mccs::{Communicator, DataType, RedOp, Region, Stream};
use mccs_config::Bytes;
use mccs_config::change::{FlowChoice, StrategyChange};
use mccs_config::service::{AlgorithmChoice, CONTROL_SOCKET, Device, FlowPath, Ports, TransportKind};
use mccs_control::{ControlAnswer, ControlRequest, call};
use mccs_controller::messages::answer::{ControllerAnswer, ControllerRequest};
use mccs_eval::arguments::{RankArguments, unix_time_ns};
use mccs_eval::stats::Latencies;
use mccs_policy::random::Random;

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
    /// A device by which ways leave, on every host; each way of a change has one of them, or none.
    #[arg(long)]
    device: Vec<Device>,
    /// The tenant, which is given other caps, weights and windows every few changes; rank 0's host is the controller then.
    #[arg(long)]
    paced: Option<String>,
    /// Transports of flows, tcp or rdma; changes take them in turn.
    #[arg(long)]
    transport: Vec<TransportKind>,
    /// New data for every call, and every element checked. The times are of no use then.
    #[arg(long)]
    check: bool,
    /// Collectives that may start while hosts agree; chosen by the service, if not given.
    #[arg(long)]
    window: Option<u32>,
    /// With --check: so many collectives at most are called before a rank waits for them, one to that many at a time.
    #[arg(long, default_value_t = 1)]
    depth: u64,
    #[command(flatten)]
    place: RankArguments,
}

/// Changes between two changes of what the tenant may have: the controller keeps a history of these, and takes longer for one than hosts do for
/// another strategy.
const PACED_EVERY: usize = 4;
/// Largest cap, in Mbit/s: enough for hundreds of short calls a second, and little enough that they wait.
const CAPS_MBPS: std::ops::Range<usize> = 20..400;

/// Flows of a change that have a way of their own, at most.
const FLOWS_CHOSEN_MAX: usize = 3;

/// Collectives under a new strategy until what was there of the old one is gone.
const AFTER_CUT: u64 = 8;

/// A change that took place, and a stretch of time after it.
#[derive(Debug, Clone, Copy)]
struct Made {
    asked: Instant,
    answered: Instant,
    /// When [`AFTER_CUT`] collectives under it had ended.
    over: Instant,
    /// When as many more collectives had ended without a change as from `asked` to `over`: equal ones, or gaps without changes would be
    /// the longest of fewer, and who else uses the machine would count for less.
    quiet_until: Instant,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    ensure!(arguments.bytes.0 >= 8, "--bytes must be at least 8: the last element says whether to go on");
    let (client, comm) = arguments.place.join()?;
    let stream = client.create_stream()?;
    ensure!(arguments.depth == 1 || arguments.check, "gaps are of calls that are waited for: --depth is for --check");
    ensure!(arguments.depth >= 1, "--depth must be at least 1");
    let count = arguments.bytes.0 / 4;
    let bytes = 4 * count * arguments.depth;
    let (send, recv) = (client.allocate(bytes)?, client.allocate(bytes)?);
    let (stop, done) = (AtomicBool::new(arguments.place.rank != 0), AtomicU64::new(0));
    let rank = Rank { comm, stream, send, recv, count, arguments: &arguments };
    let (made, ran) = std::thread::scope(|scope| {
        let operator = scope.spawn(|| {
            let made = if arguments.place.rank == 0 { operate(&arguments, &done) } else { Ok(Vec::new()) };
            stop.store(true, Ordering::Relaxed);
            made
        });
        let ran = rank.run(&stop, &done);
        // Should a call fail, the operator sees no progress: it ends by itself.
        done.store(u64::MAX, Ordering::Relaxed);
        (operator.join(), ran)
    });
    let ends = ran?;
    let Ok(made) = made else { bail!("the operator's thread has panicked") };
    if arguments.place.rank == 0 {
        report(&arguments, &made?, &ends);
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

/// A rank's contribution: differs by rank, call and place. Small, so that sums are exact.
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
        let mut goes_on = true;
        while goes_on {
            let first = ends.len() as u64;
            // The same for all ranks, or they would not end with the same call.
            let together = 1 + u64::from(value(0, first, last)) % self.arguments.depth;
            // SAFETY: nothing is in flight.
            let (send, recv) = unsafe { (words(self.send.as_mut_slice()), words(self.recv.as_mut_slice())) };
            for (number, send) in (first..first + together).zip(send.chunks_exact_mut(self.count as usize)) {
                if self.arguments.check {
                    (0..last).zip(&mut *send).for_each(|(at, word)| *word = value(rank, number, at));
                }
                // The number of ranks whose operator goes on: that of rank 0, or nobody.
                send[last as usize] = u32::from(!stop.load(Ordering::Relaxed));
            }
            if self.arguments.check {
                recv.fill(0xdead_beef);
            }
            for place in 0..together {
                let [from, to] = [&self.send, &self.recv].map(|region| region.at(4 * self.count * place));
                self.comm.all_reduce(from, to, self.count, DataType::U32, RedOp::Sum, &self.stream)?;
            }
            self.stream.synchronize()?;
            ends.extend(std::iter::repeat_n(Instant::now(), together as usize));
            done.store(first + together, Ordering::Relaxed);
            for (number, recv) in (first..first + together).zip(recv.chunks_exact(self.count as usize)) {
                if self.arguments.check {
                    let right = |at: u64| (0..nranks).map(|rank| value(rank, number, at)).sum::<u32>();
                    let wrong = (0..last).zip(recv).filter(|(at, word)| **word != right(*at)).count();
                    ensure!(wrong == 0, "rank {rank}: {wrong} elements of all-reduce {number} are wrong");
                }
                goes_on &= recv[last as usize] != 0;
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
fn operate(arguments: &Arguments, done: &AtomicU64) -> anyhow::Result<Vec<Made>> {
    let beside = || arguments.place.socket.with_file_name(CONTROL_SOCKET);
    let control = arguments.control_socket.clone().unwrap_or_else(beside);
    let ControlAnswer::Communicators(comms) = call(&control, &ControlRequest::Communicators)? else {
        bail!("the service does not tell of its communicators")
    };
    let id = arguments.place.unique_id.to_string();
    let comm = comms.iter().find(|comm| comm.unique_id == id).context("the service does not know the communicator")?;
    let mut random = Random::new(unix_time_ns());
    let mut made = Vec::new();
    while (made.len() as u64) < arguments.changes {
        if let Some(tenant) = arguments.paced.as_ref().filter(|_| made.len().is_multiple_of(PACED_EVERY)) {
            apply(&control, policy(tenant, &mut random))?;
        }
        let turn = made.len().checked_rem(arguments.transport.len());
        let transport = turn.and_then(|turn| arguments.transport.get(turn).copied());
        let change = StrategyChange { transport, ..change(arguments, &comm.hosts, &mut random) };
        let request = ControlRequest::Reconfigure { communicator: comm.communicator, change, window: arguments.window };
        let (asked, done_before) = (Instant::now(), done.load(Ordering::Relaxed));
        let cut = match call(&control, &request)? {
            ControlAnswer::Reconfigured { cut, .. } => cut,
            ControlAnswer::Refused(reason) => bail!("a change was refused: {reason}"),
            _ => bail!("the service does not answer what was asked"),
        };
        let answered = Instant::now();
        // The next one comes when this one is in force: otherwise the last would hide those before.
        let over = wait(done, cut + if arguments.check { 1 } else { AFTER_CUT });
        let done_after = done.load(Ordering::Relaxed);
        let quiet = if arguments.check { 0 } else { done_after.saturating_sub(done_before) };
        made.push(Made { asked, answered, over, quiet_until: wait(done, done_after.saturating_add(quiet)) });
    }
    Ok(made)
}

/// Puts a policy in force.
fn apply(control: &Path, text: String) -> anyhow::Result<()> {
    let request = ControllerRequest::Apply { name: "policy.toml".into(), text };
    match call(control, &ControlRequest::Controller { request })? {
        ControlAnswer::Controller(answer) => match *answer {
            ControllerAnswer::Applied(applied) => ensure!(applied.failure().is_none(), "a policy failed: {applied:?}"),
            other => bail!("the controller does not answer what was asked: {other:?}"),
        },
        ControlAnswer::Refused(reason) => bail!("a policy was refused: {reason}"),
        _ => bail!("the service does not answer what was asked"),
    }
    Ok(())
}

/// Strategies stay as the operator has them; the tenant has a cap, a weight (its flows are allotted what their NICs carry), a window, or all it
/// can get.
fn policy(tenant: &str, random: &mut Random) -> String {
    let mbps = |random: &mut Random| CAPS_MBPS.start + random.below(CAPS_MBPS.len());
    let terms = match random.below(5) {
        0 => return "[policy]\nname = \"ecmp\"\nrings = \"kept\"\n".to_owned(),
        1 => format!("[[tenant]]\nname = {tenant:?}\ncap = \"{}Mbit/s\"\n", mbps(random)),
        2 => format!("[[tenant]]\nname = {tenant:?}\nhost_cap = \"{}Mbit/s\"\n", mbps(random)),
        3 => format!("[[tenant]]\nname = {tenant:?}\nweight = {}\n", 2 + random.below(9)),
        _ => {
            let period_ms = 2 + random.below(9);
            let (offset_ms, length_ms) = (random.below(period_ms), 1 + random.below(period_ms));
            format!(
                "[[window]]\ntenant = {tenant:?}\nperiod = \"{period_ms}ms\"\noffset = \"{offset_ms}ms\"\nlength = \"{length_ms}ms\"\n"
            )
        }
    };
    format!("[policy]\nname = \"ecmp\"\nrings = \"kept\"\n{terms}")
}

/// Waits until so many collectives have ended, and tells when that was.
fn wait(done: &AtomicU64, goal: u64) -> Instant {
    while done.load(Ordering::Relaxed) < goal {
        std::thread::sleep(Duration::from_micros(50));
    }
    Instant::now()
}

/// Another ring order for each of one to three channels, another algorithm, other ways by other devices, and some flows that go another way
/// than their channel.
fn change(arguments: &Arguments, hosts: &[String], random: &mut Random) -> StrategyChange {
    let mut ring: Vec<u32> = (0..arguments.place.nranks).collect();
    let mut rings = Vec::new();
    for _ in 0..1 + random.below(3) {
        random.shuffle(&mut ring);
        rings.push(ring.clone());
    }
    let algorithms = [
        AlgorithmChoice::Ring,
        AlgorithmChoice::HostRing,
        AlgorithmChoice::HostTree,
        AlgorithmChoice::Tree,
        AlgorithmChoice::OneShot,
    ];
    let mut ways: Vec<Option<Ports>> = arguments.path.iter().copied().map(Some).collect();
    if ways.is_empty() && !arguments.device.is_empty() {
        // One for each channel that there may be.
        ways = vec![None; 3];
    }
    let turn = random.below(ways.len().max(1));
    ways.rotate_left(turn);
    let mut device = || random.below(arguments.device.len() + 1).checked_sub(1).map(|at| arguments.device[at].clone());
    let paths: Vec<FlowPath> = ways
        .into_iter()
        .map(|source_ports| FlowPath { source_ports, device: device(), ..FlowPath::default() })
        .collect();
    let flows = if hosts.len() < 2 || paths.is_empty() { 0 } else { random.below(FLOWS_CHOSEN_MAX + 1) };
    let flow = |_| {
        let from = random.below(hosts.len());
        let to = (from + 1 + random.below(hosts.len() - 1)) % hosts.len();
        FlowChoice {
            channel: random.below(rings.len()) as u32,
            from: hosts[from].clone(),
            to: hosts[to].clone(),
            path: random.below(paths.len()) as u32,
        }
    };
    let flows: Vec<FlowChoice> = (0..flows).map(flow).collect();
    StrategyChange {
        algorithm: Some(algorithms[if arguments.check { random.below(algorithms.len()) } else { 1 }]),
        rings: Some(rings),
        flows: (!flows.is_empty()).then_some(flows),
        paths: (!paths.is_empty()).then_some(paths),
        ..StrategyChange::default()
    }
}

fn report(arguments: &Arguments, made: &[Made], ends: &[Instant]) {
    // The gaps that end with the calls of a stretch of time; the first began before it.
    let gaps = |from: Instant, to: Instant| {
        let first = ends.partition_point(|end| *end < from).max(1);
        let after = ends.partition_point(|end| *end <= to).max(first);
        (first..after).map(|n| ends[n].duration_since(ends[n - 1]))
    };
    let (mut calls, mut quiet) = (Latencies::default(), Latencies::default());
    let (mut agreed, mut changed) = (Latencies::default(), Latencies::default());
    for Made { asked, answered, over, quiet_until } in made {
        agreed.add(answered.duration_since(*asked));
        gaps(*asked, *over).max().into_iter().for_each(|gap| changed.add(gap));
        gaps(*over, *quiet_until).for_each(|gap| calls.add(gap));
        gaps(*over, *quiet_until).max().into_iter().for_each(|gap| quiet.add(gap));
    }
    let us = |latencies: &Latencies, quantile| latencies.quantile(quantile).as_nanos() as f64 / 1e3;
    let line = serde_json::json!({
        "bytes": arguments.bytes.0, "nranks": arguments.place.nranks, "checked": arguments.check,
        "changes": made.len(), "policies": arguments.paced.as_ref().map_or(0, |_| made.len().div_ceil(PACED_EVERY)), "calls": ends.len(),
        "call_p50_us": us(&calls, 0.5), "call_p99_us": us(&calls, 0.99),
        "quiet_gap_p50_us": us(&quiet, 0.5), "quiet_gap_p99_us": us(&quiet, 0.99), "quiet_gap_max_us": us(&quiet, 1.0),
        "gap_p50_us": us(&changed, 0.5), "gap_p99_us": us(&changed, 0.99), "gap_max_us": us(&changed, 1.0),
        "agreed_p50_us": us(&agreed, 0.5), "agreed_p99_us": us(&agreed, 0.99),
        "seconds": ends.last().zip(ends.first()).map_or(0.0, |(last, first)| last.duration_since(*first).as_secs_f64()),
    });
    println!("{line}");
}
