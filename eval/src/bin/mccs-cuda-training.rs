//! `mccs-cuda-training`: measures training steps on GPUs, without a framework, on services and
//! NCCLs in turn. Starts one process a rank.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Parser;
use mccs::{Client, UniqueId};
use mccs_config::Bytes;
use mccs_cuda::{Context, gpus};
use mccs_eval::arguments::{list, unix_time_ns};
use mccs_eval::cuda::meeting::Meeting;
use mccs_eval::cuda::nccl::{Nccl, NcclId};
use mccs_eval::cuda::processes::{run_or_start, run_ranks};
use mccs_eval::cuda::training::{Communicator, Plan, Shape, TILE, Trainer, Workload};
use mccs_eval::stats::median;
use serde::Serialize;

/// Measures steps of training: matrix products, and beside them the collectives of DDP, FSDP2 and experts (MoE). All sides take turns in
/// each round, in the same processes and the same memory. Every side's results are checked.
#[derive(Parser, Clone)]
#[command(version)]
struct Arguments {
    /// Ranks, one process each, on as many GPUs.
    #[arg(long)]
    nranks: u32,
    /// A side: a name and the socket of a service, as "8 MiB=/run/mccs/mccs.sock". May be repeated; ranks meet at the first.
    #[arg(long, required = true)]
    side: Vec<Named>,
    /// A side: a name and the path of NCCL's library. May be repeated.
    #[arg(long)]
    nccl: Vec<Named>,
    /// Workloads, comma-separated: ddp, fsdp, moe, or "all".
    #[arg(long, default_value = "all")]
    workload: String,
    /// Layers of the model.
    #[arg(long, default_value_t = 24)]
    layers: u32,
    /// Elements of a token, a multiple of 128. A layer has 12 times its square of parameters, in bfloat16.
    #[arg(long, default_value_t = 1792)]
    width: u32,
    /// Tokens of a rank, a multiple of 128. 0: as many as `--compute-ms` takes.
    #[arg(long, default_value_t = 0)]
    tokens: u32,
    /// Time of a step's products alone, in ms.
    #[arg(long, default_value_t = 50.0)]
    compute_ms: f64,
    /// Most bytes of a bucket of gradients.
    #[arg(long, default_value = "25MiB")]
    bucket: Bytes,
    /// The same of the first.
    #[arg(long, default_value = "1MiB")]
    first_bucket: Bytes,
    /// Priority of the streams of collectives: negative ones start first.
    #[arg(long, default_value_t = 0, allow_hyphen_values = true)]
    priority: i32,
    /// Steps of a side in a round.
    #[arg(long, default_value_t = 10)]
    steps: u32,
    /// Steps before them, which are not timed.
    #[arg(long, default_value_t = 3)]
    warmup: u32,
    /// Rounds, in each of which all sides take turns.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seed of the data; differs from run to run unless given.
    #[arg(long)]
    seed: Option<u64>,
    /// Write results here.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Set for the processes that this one starts: this rank.
    #[arg(long, hide = true)]
    rank: Option<u32>,
    /// As above: communicators, of the meeting and of each service.
    #[arg(long, hide = true, num_args = 1..)]
    ids: Vec<String>,
}

/// `NAME=PATH`.
#[derive(Debug, Clone)]
struct Named {
    name: String,
    path: PathBuf,
}

impl FromStr for Named {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok(Named { name: name.to_owned(), path: path.into() })
            }
            _ => Err(format!("{text:?} is not NAME=PATH")),
        }
    }
}

/// A side of a workload, measured.
#[derive(Serialize)]
struct Line {
    workload: &'static str,
    side: String,
    /// Each step's time on the slowest rank, for each round.
    rounds_ms: Vec<Vec<f64>>,
}

#[derive(Serialize)]
struct Results {
    gpu: String,
    nranks: u32,
    shape: Shape,
    nccl: Vec<String>,
    version: &'static str,
    command: Vec<String>,
    lines: Vec<Line>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    run_or_start("mccs-cuda-training", arguments.rank, |rank| run_rank(&arguments, rank), || start_ranks(&arguments))
}

fn start_ranks(arguments: &Arguments) -> anyhow::Result<()> {
    ensure!(
        arguments.nranks > 0 && arguments.steps > 0 && arguments.rounds > 0,
        "there must be ranks, steps and rounds"
    );
    let ids = (0..=arguments.side.len()).map(|_| Ok(mccs::unique_id()?.to_string()));
    let ids = ids.collect::<anyhow::Result<Vec<_>>>()?;
    let seed = arguments.seed.unwrap_or_else(unix_time_ns);
    run_ranks(arguments.nranks, |rank| {
        let mut more = vec!["--rank".into(), rank.to_string().into()];
        if arguments.seed.is_none() {
            more.extend(["--seed".into(), seed.to_string().into()]);
        }
        more.push("--ids".into());
        more.extend(ids.iter().map(Into::into));
        more
    })
}

/// A rank, and all sides that it takes part in.
struct Job<'a> {
    arguments: &'a Arguments,
    rank: u32,
    seed: u64,
    meeting: Meeting,
    /// They keep their communicators' sessions.
    _clients: Vec<Client>,
    sides: Vec<(String, Communicator)>,
    context: Context,
}

impl<'a> Job<'a> {
    fn join(arguments: &'a Arguments, rank: u32) -> anyhow::Result<Self> {
        let ids = arguments.ids.iter().map(|id| id.parse().map_err(anyhow::Error::msg));
        let ids: Vec<UniqueId> = ids.collect::<anyhow::Result<_>>()?;
        let nranks = arguments.nranks;
        mccs_cuda::driver()?;
        let all = gpus()?;
        let gpu = all.get(rank as usize).with_context(|| format!("{nranks} ranks, {} GPUs", all.len()))?;
        let context = Context::primary(gpu)?;
        let entered = context.enter()?;
        let (first, of_meeting) = (arguments.side.first().context("no side")?, *ids.first().context("no id")?);
        let meeting = Meeting::join(&first.path, "", of_meeting, rank, nranks)?;
        let (mut sides, mut clients) = (Vec::new(), Vec::new());
        for (side, id) in arguments.side.iter().zip(&ids[1..]) {
            let client = Client::connect(&side.path)?;
            let comm = client.communicator(*id, rank, nranks).join_cuda()?;
            sides.push((side.name.clone(), Communicator::Mccs(comm)));
            clients.push(client);
        }
        for Named { name, path } in &arguments.nccl {
            sides.push((name.clone(), Communicator::Nccl(join_nccl(&meeting, path, rank, nranks)?)));
        }
        drop(entered);
        let seed = arguments.seed.unwrap_or(0);
        Ok(Job { arguments, rank, seed, meeting, _clients: clients, sides, context })
    }

    fn trainer(&self, shape: Shape, plan: &Plan) -> anyhow::Result<Trainer> {
        let (nranks, priority) = (self.arguments.nranks, self.arguments.priority);
        Trainer::new(&self.context, self.rank, nranks, shape, &plan.layout, self.seed, priority)
    }

    /// Each step's time on the slowest rank, in ms.
    fn slowest_ms(&self, times: &[Duration]) -> anyhow::Result<Vec<f64>> {
        times.iter().map(|time| self.meeting.largest(time.as_secs_f64() * 1e3)).collect()
    }

    /// The model, with as many tokens as the products of a step are to take time for.
    fn shape(&self) -> anyhow::Result<Shape> {
        const TRIAL_TOKENS: u32 = 1024;
        let arguments = self.arguments;
        let of = |tokens| Shape {
            layers: arguments.layers,
            width: arguments.width,
            tokens,
            bucket_bytes: arguments.bucket.0,
            first_bucket_bytes: arguments.first_bucket.0,
        };
        let fault =
            |shape: Shape| shape.fault(arguments.nranks).map_or(Ok(shape), |fault| Err(anyhow::anyhow!("{fault}")));
        if arguments.tokens != 0 {
            return fault(of(arguments.tokens));
        }
        let trial = fault(of(TRIAL_TOKENS))?;
        let plan = Plan::new(Workload::Ddp, &trial, arguments.nranks).without_collectives();
        let mut trainer = self.trainer(trial, &plan)?;
        let times = trainer.time_steps(&plan, &self.sides[0].1, 2, 3)?;
        let ms = median(&self.slowest_ms(&times)?);
        let tiles = (f64::from(TRIAL_TOKENS) / f64::from(TILE) * arguments.compute_ms / ms).round();
        fault(of((tiles as u32).max(1) * TILE))
    }

    /// All sides in turn, and before them the products without collectives.
    fn measure(&self, workload: Workload, shape: Shape) -> anyhow::Result<Vec<Line>> {
        let name = workload.name();
        let Arguments { nranks, warmup, steps, rounds, .. } = *self.arguments;
        let plan = Plan::new(workload, &shape, nranks);
        let mut trainer = self.trainer(shape, &plan)?;
        trainer.check_product()?;
        for (side, comm) in &self.sides {
            let wrong = self.meeting.sum(trainer.check(&plan, comm)? as f64)?;
            ensure!(wrong == 0.0, "{name}, {side}: {wrong} wrong elements");
        }
        let alone = plan.without_collectives();
        let line = |side: &str| Line { workload: name, side: side.to_owned(), rounds_ms: Vec::new() };
        let mut lines: Vec<_> =
            ["without collectives"].into_iter().chain(self.sides.iter().map(|side| &side.0[..])).map(line).collect();
        for round in 0..rounds {
            for turn in 0..lines.len() {
                // Another one begins each round.
                let at = (turn + round) % lines.len();
                let (plan, comm) = match at.checked_sub(1) {
                    Some(side) => (&plan, &self.sides[side].1),
                    None => (&alone, &self.sides[0].1),
                };
                self.meeting.largest(0.0)?;
                let times = trainer.time_steps(plan, comm, warmup, steps)?;
                lines[at].rounds_ms.push(self.slowest_ms(&times)?);
            }
        }
        for (side, comm) in &self.sides {
            let wrong = self.meeting.sum(trainer.check(&plan, comm)? as f64)?;
            ensure!(wrong == 0.0, "{name}, {side}, after all rounds: {wrong} wrong elements");
        }
        Ok(lines)
    }
}

fn join_nccl(meeting: &Meeting, path: &Path, rank: u32, nranks: u32) -> anyhow::Result<Nccl> {
    let id = if rank == 0 { Nccl::unique_id(path)?.0 } else { [0; 128] };
    let id = meeting.broadcast(&id)?.try_into().map_err(|_| anyhow::anyhow!("128 bytes"))?;
    Nccl::join(path, NcclId(id), rank, nranks)
}

fn run_rank(arguments: &Arguments, rank: u32) -> anyhow::Result<()> {
    let workloads = list(&arguments.workload, &Workload::ALL)?;
    let job = Job::join(arguments, rank)?;
    let shape = job.shape()?;
    let versions = job.sides.iter().filter_map(|(_, side)| match side {
        Communicator::Nccl(nccl) => Some(nccl.version()),
        Communicator::Mccs(_) => None,
    });
    let mut results = Results {
        gpu: job.context.gpu().name.clone(),
        nranks: arguments.nranks,
        shape,
        nccl: versions.collect::<anyhow::Result<_>>()?,
        version: env!("CARGO_PKG_VERSION"),
        command: std::env::args().collect(),
        lines: Vec::new(),
    };
    if rank == 0 {
        println!(
            "# {} ranks on {}, {} tokens each; step times in ms, the slowest rank's",
            arguments.nranks, results.gpu, shape.tokens
        );
    }
    for workload in workloads {
        let lines = job.measure(workload, shape)?;
        for Line { side, rounds_ms, .. } in lines.iter().filter(|_| rank == 0) {
            let medians: Vec<_> = rounds_ms.iter().map(|round| median(round)).collect();
            let [least, most] = [f64::min, f64::max]
                .map(|pick: fn(f64, f64) -> f64| medians.iter().copied().reduce(pick).unwrap_or(f64::NAN));
            let (name, median) = (workload.name(), median(&rounds_ms.concat()));
            println!("{name:>5} {side:>24} {median:>9.2} ({least:.2} to {most:.2})");
        }
        results.lines.extend(lines);
    }
    if let (Some(path), 0) = (&arguments.json, rank) {
        std::fs::write(path, serde_json::to_string_pretty(&results)?)?;
    }
    Ok(())
}
