//! `mccs-cuda-perf`: checks and measures collectives on GPUs, beside NCCL (nccl-tests); starts one
//! process a rank.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Parser;
use mccs::{CollectiveKind, DataType, RedOp, UniqueId};
use mccs_config::Bytes;
use mccs_eval::arguments::{list, unix_time_ns};
use mccs_eval::cuda::beside::{Bench, Beside};
use mccs_eval::cuda::meeting::Meeting;
use mccs_eval::cuda::p2p::Pattern;
use mccs_eval::cuda::processes::{Own, run_or_start, run_ranks};
use mccs_eval::cuda::rank::{Rank, Side};
use mccs_eval::stats::median;
use mccs_eval::workload::{Call, Place};
use mccs_telemetry::bandwidth::Traffic;
use serde::Serialize;

/// Runs collectives on GPUs over a range of sizes. With `--check` every element is checked; otherwise mccs and NCCL are
/// measured in turn.
#[derive(Parser, Clone)]
#[command(version)]
struct Arguments {
    /// Ranks, one process each.
    #[arg(long, default_value_t = 1)]
    nranks: u32,
    /// GPUs to use; ranks go round them. Default: all that the service's host shows.
    #[arg(long, default_value_t = 0)]
    gpus: usize,
    /// Collectives, comma-separated, or "all".
    #[arg(long, default_value = "all_reduce")]
    operation: String,
    /// Smallest size, as nccl-tests counts it.
    #[arg(long, default_value = "8B")]
    begin: Bytes,
    /// Largest size.
    #[arg(long, default_value = "128MiB")]
    end: Bytes,
    /// From one size to the next.
    #[arg(long, default_value_t = 4)]
    factor: u64,
    /// Check instead of measuring: every collective, element type, reduction and place in `--operation`, up to `--end`.
    #[arg(long)]
    check: bool,
    /// Element types to check, comma-separated, or "all".
    #[arg(long, default_value = "all")]
    dtypes: String,
    /// Reductions to check, comma-separated, or "all".
    #[arg(long, default_value = "all")]
    redops: String,
    /// Measure groups of sends and receives instead of collectives: patterns, comma-separated (ring, one_way, uneven).
    #[arg(long)]
    p2p: Option<String>,
    /// Measure joining and leaving communicators instead.
    #[arg(long)]
    joins: bool,
    /// NCCL's library, to compare with.
    #[arg(long)]
    nccl: Option<PathBuf>,
    /// Rounds, in each of which both sides are measured in turn.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Measure in place where a collective has such a form.
    #[arg(long)]
    in_place: bool,
    /// Measure beside a computation of each rank's own, on so many multiprocessors of its GPU; on all if it has fewer.
    #[arg(long, default_value_t = 0)]
    busy_sms: u32,
    /// Measure replays of graphs of so many collectives in the place of calls; times are a collective's.
    #[arg(long, default_value_t = 0)]
    graph: u32,
    /// Seed of the data, and of the places of buffers in checks; differs from run to run unless given.
    #[arg(long)]
    seed: Option<u64>,
    /// Write results here.
    #[arg(long)]
    json: Option<PathBuf>,
    /// The service's socket; of several services, comma-separated: each has as many ranks as the others, and the first ones.
    #[arg(long, env = "MCCS_SOCKET", value_delimiter = ',')]
    socket: Vec<PathBuf>,
    /// Variables that name a rank's host, comma-separated: h0 at the first service, h1 at the second. NCCL takes ranks for those of
    /// several hosts by NCCL_HOSTID.
    #[arg(long, value_delimiter = ',')]
    host_variables: Vec<String>,
    /// Set for the processes that this one starts: this rank.
    #[arg(long, hide = true)]
    rank: Option<u32>,
    /// As above: the communicators.
    #[arg(long, hide = true, num_args = 2)]
    ids: Vec<String>,
    /// As above: the root's address.
    #[arg(long, hide = true, default_value = "")]
    root: String,
}

/// One size, measured.
#[derive(Serialize)]
struct Line {
    operation: &'static str,
    bytes: u64,
    side: Side,
    /// Back to back, as the stream sees it; of every round.
    stream_us: Vec<f64>,
    /// From the call to the end of `synchronize`; not of graphs.
    single_us: Vec<f64>,
    /// The call alone; not of graphs.
    call_us: Vec<f64>,
    busbw_gbps: f64,
}

#[derive(Serialize)]
struct Results {
    gpu: String,
    nranks: u32,
    nccl: Option<String>,
    version: &'static str,
    command: Vec<String>,
    lines: Vec<Line>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    run_or_start("mccs-cuda-perf", arguments.rank, |rank| run_rank(&arguments, rank), || start_ranks(&arguments))
}

/// Starts a process for each rank, and waits for all.
fn start_ranks(arguments: &Arguments) -> anyhow::Result<()> {
    ensure!(arguments.nranks > 0, "--nranks must be at least 1");
    ensure!(arguments.factor >= 2, "--factor must be at least 2");
    let ids = [mccs::unique_id()?.to_string(), mccs::unique_id()?.to_string()];
    let seed = arguments.seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 ^ unix_time_ns());
    let root = match &arguments.socket[..] {
        [] => anyhow::bail!("--socket names no service"),
        [_] => String::new(),
        [first, ..] => mccs::Client::connect(first)?.root_address().unwrap_or_default().to_owned(),
    };
    run_ranks(arguments.nranks, |rank| {
        let mut more =
            vec!["--rank".into(), rank.to_string().into(), "--root".into(), root.clone().into(), "--ids".into()];
        more.extend(ids.iter().map(Into::into));
        if arguments.seed.is_none() {
            more.extend(["--seed".into(), seed.to_string().into()]);
        }
        let host = format!("h{}", service_of(arguments, rank));
        let environment = arguments.host_variables.iter().map(|variable| (variable.clone(), host.clone())).collect();
        Own { arguments: more, environment }
    })
}

/// Which of the services a rank is at.
fn service_of(arguments: &Arguments, rank: u32) -> usize {
    rank as usize * arguments.socket.len() / arguments.nranks as usize
}

fn run_rank(arguments: &Arguments, rank: u32) -> anyhow::Result<()> {
    let id = |index: usize| -> anyhow::Result<UniqueId> {
        arguments.ids.get(index).context("an id is missing")?.parse().map_err(anyhow::Error::msg)
    };
    mccs_cuda::driver()?;
    let gpus = match arguments.gpus {
        0 => mccs_cuda::gpus()?.len(),
        gpus => gpus,
    };
    ensure!(gpus > 0, "there is no GPU");
    let nranks = arguments.nranks;
    let bytes = arguments.end.0 + 128 * u64::from(nranks);
    let (socket, root) = (&arguments.socket[service_of(arguments, rank)], arguments.root.as_str());
    let meeting = Meeting::join(socket, root, id(0)?, rank, nranks)?;
    let mut own = Rank::join(meeting, root, rank as usize % gpus, id(1)?, bytes, arguments.nccl.as_deref())?;
    if arguments.in_place {
        own.time_in_place();
    }
    if let Some(patterns) = &arguments.p2p {
        let patterns = list(patterns, &Pattern::ALL)?;
        let (begin, end) = (arguments.begin.0, arguments.end.0);
        let lines = own.measure_p2p(&patterns, begin, end, arguments.factor, arguments.rounds)?;
        return write_lines(arguments, &own, &lines);
    }
    if arguments.joins {
        let lines = own.measure_joins(arguments.nccl.as_deref(), &arguments.root, arguments.rounds)?;
        return write_lines(arguments, &own, &lines);
    }
    match (arguments.check, arguments.busy_sms) {
        (true, _) => check(arguments, &own),
        (false, 0) => measure(arguments, &own),
        (false, sms) => measure_beside(arguments, &own, sms),
    }
}

/// Results, where they are asked for.
fn write_lines(arguments: &Arguments, own: &Rank, lines: &[impl Serialize]) -> anyhow::Result<()> {
    if let (Some(path), 0) = (&arguments.json, own.rank()) {
        let results = serde_json::json!({
            "gpu": own.gpu_name(), "nranks": own.nranks(), "nccl": own.nccl_version(),
            "version": env!("CARGO_PKG_VERSION"), "command": std::env::args().collect::<Vec<_>>(), "lines": lines,
        });
        std::fs::write(path, serde_json::to_string_pretty(&results)?)?;
    }
    Ok(())
}

/// A call of a size as nccl-tests counts it.
fn call_of(kind: CollectiveKind, dtype: DataType, redop: RedOp, size: u64, nranks: u32, seed: u64) -> Call {
    let per_count = Traffic::new(kind, 1, u64::from(nranks)).payload_bytes;
    let count = size.checked_div(per_count).unwrap_or(0) / dtype.size_bytes() as u64;
    Call { kind, dtype, redop, root: (seed % u64::from(nranks)) as u32, count, nranks, seed }
}

/// The checks of a collective: all types, reductions and sizes, at places that chance chooses, but every size at every place before any
/// comes again.
fn checks_of(arguments: &Arguments, kind: CollectiveKind, nranks: u32) -> anyhow::Result<Vec<(Call, Place)>> {
    let (dtypes, all_redops) = (list(&arguments.dtypes, DataType::ALL)?, list(&arguments.redops, RedOp::ALL)?);
    let redops = if kind.reduces() { &all_redops[..] } else { &RedOp::ALL[..1] };
    let seed = arguments.seed.unwrap_or(0).wrapping_add((kind as u64) << 32);
    let mut checks = Vec::new();
    for (turn, (&dtype, &redop)) in dtypes.iter().flat_map(|dtype| redops.iter().map(move |op| (dtype, op))).enumerate()
    {
        let (mut size, mut index) = (arguments.begin.0.max(1), 0);
        while size <= arguments.end.0 {
            let mut call = call_of(kind, dtype, redop, size, nranks, seed.wrapping_add(checks.len() as u64));
            // Odd counts at every second size, and the next time at the others; roots go round apart from both.
            call.count = call.count.max(1) + (turn as u64 + index) % 2;
            call.root = ((turn as u64 / 2 + index) % u64::from(nranks)) as u32;
            let most = arguments.end.0 / dtype.size_bytes() as u64 / u64::from(nranks);
            call.count = if kind == CollectiveKind::Barrier { 0 } else { call.count.min(most.max(1)) };
            checks.push((call, Place::drawn(seed.wrapping_add(index << 48), turn)));
            size = size.saturating_mul(arguments.factor);
            index += 1;
        }
    }
    Ok(checks)
}

fn check(arguments: &Arguments, own: &Rank) -> anyhow::Result<()> {
    let (mut checked, mut wrong) = (0, 0.0);
    for kind in list(&arguments.operation, CollectiveKind::ALL)? {
        let mut of_kind = 0.0;
        for (call, place) in checks_of(arguments, kind, own.nranks())? {
            let wrong_here = own.sum(own.check(Side::Mccs, &call, place)? as f64)?;
            if wrong_here > 0.0 && own.rank() == 0 {
                println!("WRONG: {wrong_here} elements of {call:?}, {place:?}");
            }
            of_kind += wrong_here;
            checked += 1;
        }
        if own.rank() == 0 {
            println!("{kind:>15}: {of_kind} wrong elements");
        }
        wrong += of_kind;
    }
    if own.rank() == 0 {
        let (nranks, gpu, seed) = (own.nranks(), own.gpu_name(), arguments.seed.unwrap_or(0));
        println!("checked {checked} calls on {nranks} ranks on {gpu}, seed {seed}: {wrong} wrong elements");
    }
    ensure!(wrong == 0.0, "{wrong} wrong elements");
    Ok(())
}

/// One size beside a computation, measured: of every round.
#[derive(Serialize)]
struct BesideLine {
    operation: &'static str,
    bytes: u64,
    side: Side,
    is_in_place: bool,
    busy_sms: u32,
    /// Collectives of a measurement, on all sides.
    calls: u32,
    rounds: Vec<Beside>,
}

fn measure_beside(arguments: &Arguments, own: &Rank, sms: u32) -> anyhow::Result<()> {
    let kinds = list(&arguments.operation, CollectiveKind::ALL)?;
    let sides: &[Side] = if arguments.nccl.is_some() { &[Side::Mccs, Side::Nccl] } else { &[Side::Mccs] };
    own.fill(arguments.seed.unwrap_or(0))?;
    let bench = Bench::new(own, sms)?;
    let sms = bench.sms();
    let mut lines = Vec::new();
    for kind in kinds.into_iter().filter(|kind| *kind != CollectiveKind::Barrier) {
        let mut size = arguments.begin.0;
        while size <= arguments.end.0 {
            let call = call_of(kind, DataType::F32, RedOp::Sum, size, own.nranks(), 0);
            let calls = bench.calls(sides[0], &call)?;
            let mut rounds = vec![Vec::new(); sides.len()];
            for _ in 0..arguments.rounds {
                for (rounds, side) in rounds.iter_mut().zip(sides) {
                    rounds.push(bench.measure(*side, &call, calls)?);
                }
            }
            for (rounds, side) in rounds.into_iter().zip(sides) {
                let of = |which: fn(&Beside) -> f64| median(&rounds.iter().map(which).collect::<Vec<_>>());
                let (alone, beside) = (of(|of| of.alone_us), of(|of| of.beside_us));
                let (load_alone, load_beside) = (of(|of| of.load_alone_us), of(|of| of.load_beside_us));
                if own.rank() == 0 {
                    println!(
                        "{kind:>15} {size:>10} {side:?}: alone {alone:.1} us, beside {sms} busy SMs {beside:.1} us ({:.3}); \
                         computation {load_alone:.0} us, beside collectives {load_beside:.0} us ({:.3}); both {:.0} us; \
                         a collective took {:.0} SM us",
                        beside / alone,
                        load_beside / load_alone,
                        of(|of| of.both_us),
                        of(|of| of.multiprocessor_us),
                    );
                }
                lines.push(BesideLine {
                    operation: kind.name(),
                    bytes: size,
                    side: *side,
                    is_in_place: arguments.in_place,
                    busy_sms: sms,
                    calls,
                    rounds,
                });
            }
            size = size.saturating_mul(arguments.factor);
        }
    }
    if let (Some(path), 0) = (&arguments.json, own.rank()) {
        std::fs::write(path, serde_json::to_string_pretty(&lines)?)?;
    }
    Ok(())
}

/// Prints the settings, and the heads of columns.
fn print_head(arguments: &Arguments, own: &Rank, results: &Results) {
    println!(
        "# {} ranks on {}; NCCL {:?}; float sum, {}; us and GB/s, median of {} rounds",
        own.nranks(),
        results.gpu,
        results.nccl,
        if arguments.in_place { "in place" } else { "out of place" },
        arguments.rounds
    );
    println!(
        "{:>15} {:>10} | {:>9} {:>9} {:>6} | {:>8} {:>8} {:>6} | {:>8} {:>8} | {:>6} {:>6}",
        "operation", "bytes", "mccs us", "nccl us", "ratio", "busbw", "nccl", "ratio", "single", "nccl", "call", "nccl"
    );
}

/// Times of each side's rounds in microseconds: in the stream, of a single call, and of the caller.
type Times = [Vec<f64>; 3];

/// Times a call on each side, the sides in turn.
fn time_sides(arguments: &Arguments, own: &Rank, sides: &[Side], call: &Call) -> anyhow::Result<Vec<Times>> {
    let mut times = vec![[const { Vec::new() }; 3]; sides.len()];
    let estimate = own.time_back_to_back(sides[0], call, 5)?;
    let fitting = Duration::from_millis(20).as_secs_f64() / estimate.as_secs_f64().max(1e-6);
    let iterations = (fitting as u32).clamp(5, 200);
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let captured = sides.iter().filter(|_| arguments.graph > 0).map(|side| {
        // Both connect when they are first used.
        own.time_back_to_back(*side, call, 1)?;
        own.capture(*side, call, arguments.graph)
    });
    let mut captured = captured.collect::<anyhow::Result<Vec<_>>>()?;
    for _ in 0..arguments.rounds {
        for (times, graph) in times.iter_mut().zip(&mut captured) {
            let launches = (iterations / arguments.graph).max(3);
            times[0].push(us(own.time_launches(graph, launches)?) / f64::from(arguments.graph));
        }
        for (times, side) in times.iter_mut().zip(sides).filter(|_| arguments.graph == 0) {
            times[0].push(us(own.time_back_to_back(*side, call, iterations)?));
            let (single, alone) = own.time_single(*side, call, iterations.min(50))?;
            times[1].push(us(single));
            times[2].push(us(alone));
        }
    }
    Ok(times)
}

/// Prints medians of a call, ours and NCCL's.
fn print_line(kind: CollectiveKind, bytes: u64, times: &[Times], busbw: impl Fn(&Times) -> f64) {
    let of = |side: usize, which: usize| times.get(side).map_or(f64::NAN, |times| median(&times[which]));
    let bandwidth = |side: usize| times.get(side).map_or(f64::NAN, &busbw);
    println!(
        "{kind:>15} {bytes:>10} | {:>9.2} {:>9.2} {:>6.2} | {:>8.1} {:>8.1} {:>6.2} | {:>8.2} {:>8.2} | {:>6.2} {:>6.2}",
        of(0, 0),
        of(1, 0),
        of(1, 0) / of(0, 0),
        bandwidth(0),
        bandwidth(1),
        bandwidth(0) / bandwidth(1),
        of(0, 1),
        of(1, 1),
        of(0, 2),
        of(1, 2)
    );
}

fn measure(arguments: &Arguments, own: &Rank) -> anyhow::Result<()> {
    let kinds = list(&arguments.operation, CollectiveKind::ALL)?;
    let sides: &[Side] = if arguments.nccl.is_some() { &[Side::Mccs, Side::Nccl] } else { &[Side::Mccs] };
    own.fill(arguments.seed.unwrap_or(0))?;
    let mut results = Results {
        gpu: own.gpu_name(),
        nranks: own.nranks(),
        nccl: own.nccl_version(),
        version: env!("CARGO_PKG_VERSION"),
        command: std::env::args().collect(),
        lines: Vec::new(),
    };
    if own.rank() == 0 {
        print_head(arguments, own, &results);
    }
    for kind in kinds.into_iter().filter(|kind| *kind != CollectiveKind::Barrier) {
        let mut size = arguments.begin.0;
        while size <= arguments.end.0 {
            let mut call = call_of(kind, DataType::F32, RedOp::Sum, size, own.nranks(), 0);
            call.count = call.count.max(1);
            let times = time_sides(arguments, own, sides, &call)?;
            let payload = call.count * call.dtype.size_bytes() as u64;
            let Traffic { payload_bytes: bytes, bus_bytes } = Traffic::new(kind, payload, u64::from(own.nranks()));
            let busbw = |times: &Times| bus_bytes as f64 / 1e3 / median(&times[0]);
            if own.rank() == 0 {
                print_line(kind, bytes, &times, busbw);
            }
            for (times, side) in times.into_iter().zip(sides) {
                let busbw_gbps = busbw(&times);
                let [stream_us, single_us, call_us] = times;
                let operation = kind.name();
                results.lines.push(Line { operation, bytes, side: *side, stream_us, single_us, call_us, busbw_gbps });
            }
            size = size.saturating_mul(arguments.factor);
        }
    }
    if let (Some(path), 0) = (&arguments.json, own.rank()) {
        std::fs::write(path, serde_json::to_string_pretty(&results)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// As tests/gpu.sh checks every type and reduction.
    #[test]
    fn every_size_of_every_collective_is_checked_at_every_place() {
        for seed in 0..20_u64 {
            let seed = seed.to_string();
            let words = ["", "--check", "--begin", "1B", "--end", "48KiB", "--factor", "37", "--seed", &seed];
            let arguments = Arguments::parse_from(words);
            for &kind in CollectiveKind::ALL.iter().filter(|kind| **kind != CollectiveKind::Barrier) {
                let checks = checks_of(&arguments, kind, 2).expect("well-formed");
                let sizes = 3;
                for index in 0..sizes {
                    let places: HashSet<_> = checks.iter().skip(index).step_by(sizes).map(|check| check.1).collect();
                    assert_eq!(places.len(), Place::COUNT, "{kind}, size {index}, seed {seed}");
                }
                let seeds: HashSet<_> = checks.iter().map(|check| check.0.seed).collect();
                assert_eq!(seeds.len(), checks.len());
            }
        }
    }
}
