//! `mccs-neighbours`: noisy neighbours, a tenant's calls beside another tenant's flood. The same is
//! measured beside processes that only compute.
//!
//! It starts services with two tenants. Its own two threads are the victim: all-reduces, each waited for and timed, and checked now
//! and then. The neighbour is a process of its own: `mccs-neighbours --attack NAME --socket PATH`, or `--attack hogs`. The sides
//! alternate, round by round, and each is written to a file at once: the same command goes on where another was cut off.

use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use clap::Parser;
use mccs_eval::neighbours::attack::{self, Attack, FLOODS, Neighbour};
use mccs_eval::neighbours::children;
use mccs_eval::neighbours::samples::{Measured, Samples};
use mccs_eval::neighbours::services::Services;
use mccs_eval::neighbours::victim::{self, Rank};

/// A side that has not ended so long after its time is told as one of which no call ends.
const STALLED_AFTER: Duration = Duration::from_secs(30);

/// Measures a victim beside each flood and beside hogs; keeps a line of JSON for each side, and prints a table last.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Floods to measure; all, if none is named.
    #[arg(long, value_enum)]
    flood: Vec<Attack>,
    /// Rounds of each.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Milliseconds of each side in a round.
    #[arg(long, default_value_t = 1000)]
    millis: u64,
    /// Processes that compute, on the other side; as many as there are cores, if it is left out.
    #[arg(long)]
    hogs: Option<usize>,
    /// Payloads of the victim's calls, in bytes.
    #[arg(long, value_delimiter = ',', default_values_t = [65_536, 8])]
    bytes: Vec<u64>,
    /// Hosts of the victim's two ranks: 1, or 2, whose services are both on this machine. The flood is at the first.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    hosts: u8,
    /// The file of what was measured.
    #[arg(long, default_value = "neighbours.jsonl")]
    save: PathBuf,
    /// Be a neighbour instead, until standard input ends.
    #[arg(long, value_enum, requires = "socket")]
    attack: Option<Attack>,
    /// Socket of the tenant that attacks.
    #[arg(long)]
    socket: Option<PathBuf>,
}

/// Ranks of a service of their own, and the neighbour's socket.
struct Scene {
    services: Services,
    ranks: Vec<Rank>,
    hostile: PathBuf,
}

impl Scene {
    fn start(hosts: usize) -> anyhow::Result<Self> {
        let services = Services::start(hosts)?;
        let [first, second] = [0, hosts - 1].map(|host| services.socket(host, "victim"));
        let ranks = victim::join([&first, &second], (hosts > 1).then_some("h0"))?;
        let hostile = services.socket(0, "hostile");
        Ok(Scene { services, ranks, hostile })
    }
}

/// Ends this process if a side does not end: its threads wait for a service. Measurements are in the file, and `stalled` as well.
fn watch(time: Duration, folder: PathBuf, save: PathBuf, stalled: Measured) -> mpsc::Sender<()> {
    let (ended, end) = mpsc::channel();
    std::thread::spawn(move || {
        if end.recv_timeout(time + STALLED_AFTER) == Err(mpsc::RecvTimeoutError::Timeout) {
            let kept = Samples::open(&save).and_then(|mut samples| samples.add(stalled));
            eprintln!(
                "mccs-neighbours: no call has ended for {STALLED_AFTER:?} ({kept:?}); the same command goes on behind it"
            );
            children::kill_all();
            let _ = std::fs::remove_dir_all(folder);
            std::process::exit(3);
        }
    });
    ended
}

fn measure(
    scene: &Scene,
    beside: Attack,
    hogs: usize,
    one: Measured,
    arguments: &Arguments,
) -> anyhow::Result<Measured> {
    let time = Duration::from_millis(arguments.millis);
    let _watched = watch(time, scene.services.folder().to_owned(), arguments.save.clone(), one.clone());
    let _neighbour = Neighbour::start(beside, &scene.hostile, hogs)?;
    let sample = victim::measure(&scene.ranks, one.bytes, time)?;
    Ok(Measured { mean_us: Some(sample.mean_us), p99_us: Some(sample.p99_us), calls: sample.calls, ..one })
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let hogs = arguments.hogs.unwrap_or(cores);
    if let (Some(kind), Some(socket)) = (arguments.attack, &arguments.socket) {
        return attack::run(kind, socket, hogs);
    }
    let floods = if arguments.flood.is_empty() { FLOODS.to_vec() } else { arguments.flood.clone() };
    let hosts = usize::from(arguments.hosts);
    let mut samples = Samples::open(&arguments.save)?;
    let mut scene = None;
    for round in 0..arguments.rounds {
        for flood in &floods {
            for bytes in &arguments.bytes {
                // Another side begins each round.
                for beside_hogs in [round % 2 == 0, round % 2 == 1] {
                    let (flood_name, bytes) = (flood.name(), *bytes);
                    let one = Measured {
                        flood: flood_name,
                        bytes,
                        hosts,
                        round,
                        beside_hogs,
                        mean_us: None,
                        p99_us: None,
                        calls: 0,
                    };
                    if samples.has(&one) {
                        continue;
                    }
                    let scene = match &mut scene {
                        Some(scene) => scene,
                        none => none.insert(Scene::start(hosts)?),
                    };
                    let beside = if beside_hogs { Attack::Hogs } else { *flood };
                    let measured = measure(scene, beside, hogs, one, &arguments)?;
                    println!("{}", serde_json::to_string(&measured)?);
                    samples.add(measured)?;
                }
            }
        }
    }
    print!("{}", samples.table());
    Ok(())
}
