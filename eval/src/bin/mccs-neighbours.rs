//! Measures what a tenant's calls take beside a flood of another tenant, against the same beside processes that only compute.
//!
//! It starts a service with two tenants. Its own two threads are the victim: all-reduces, each waited for and timed, and checked now
//! and then. The neighbour is a process of its own: `mccs-neighbours --attack NAME --socket PATH`, or `--attack hogs`. The sides
//! alternate, round by round.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::{Parser, ValueEnum};
use mccs::{Client, Communicator, CommunicatorBuilder, DataType, RedOp, Region, Stream};
use mccs_eval::stats::{Latencies, median};

/// Measures a victim beside each flood and beside hogs; prints a JSON line for each, and a table last.
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
    /// Be a neighbour instead, until standard input ends.
    #[arg(long, value_enum, requires = "socket")]
    attack: Option<Attack>,
    /// Of the tenant that attacks.
    #[arg(long)]
    socket: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Attack {
    /// 32 sessions of one-rank all-reduces of 120 KB, which run on the proxy engine's thread.
    Operations,
    /// Connections that are made and closed.
    Churn,
    /// Streams that are made and destroyed.
    Streams,
    /// Memory that is allocated and freed.
    Memory,
    /// Sixty streams of one-rank all-reduces of 16 MiB.
    Large,
    /// 62 communicators that wait for ranks, and connections that come and go.
    Joins,
    /// No mccs at all: threads that compute.
    Hogs,
}

const FLOODS: [Attack; 6] =
    [Attack::Operations, Attack::Churn, Attack::Streams, Attack::Memory, Attack::Large, Attack::Joins];

impl Attack {
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// Set once standard input has ended.
static STOP: AtomicBool = AtomicBool::new(false);

fn goes_on() -> bool {
    !STOP.load(Ordering::Relaxed)
}

/// A communicator of one rank, with memory.
struct Alone {
    _client: Client,
    comm: Communicator,
    streams: Vec<Stream>,
    memory: Region,
}

impl Alone {
    fn new(socket: &Path, bytes: u64, streams: usize) -> anyhow::Result<Self> {
        let client = Client::connect(socket)?;
        let comm = client.communicator(mccs::unique_id()?, 0, 1).join()?;
        let streams = (0..streams).map(|_| client.create_stream()).collect::<Result<_, _>>()?;
        let memory = client.allocate(2 * bytes)?;
        Ok(Alone { _client: client, comm, streams, memory })
    }

    /// Enqueues many, and waits for them, again and again.
    fn flood(&self, bytes: u64, each: usize) -> anyhow::Result<()> {
        let (send, recv) = (self.memory.at(0), self.memory.at(bytes));
        while goes_on() {
            for stream in &self.streams {
                for _ in 0..each {
                    self.comm.all_reduce(send, recv, bytes / 4, DataType::F32, RedOp::Sum, stream)?;
                }
            }
            self.streams.iter().try_for_each(Stream::synchronize)?;
        }
        Ok(())
    }
}

fn churn(socket: &Path) {
    while goes_on() {
        // Refusals are part of it.
        drop(Client::connect(socket));
    }
}

/// Runs `body` on so many threads, says that it is ready, and returns when all have ended.
fn on_threads(threads: usize, body: impl Fn(usize) -> anyhow::Result<()> + Sync) -> anyhow::Result<()> {
    std::thread::scope(|scope| {
        let body = &body;
        let all: Vec<_> = (0..threads).map(|thread| scope.spawn(move || body(thread))).collect();
        println!("ready");
        let _ = std::io::stdout().flush();
        all.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
    })
}

fn attack(attack: Attack, socket: &Path, hogs: usize) -> anyhow::Result<()> {
    std::thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        STOP.store(true, Ordering::Relaxed);
    });
    match attack {
        Attack::Operations => {
            const BYTES: u64 = 120_000;
            let sessions = (0..32).map(|_| Alone::new(socket, BYTES, 1)).collect::<anyhow::Result<Vec<_>>>()?;
            on_threads(sessions.len(), |thread| sessions[thread].flood(BYTES, 64))
        }
        Attack::Large => {
            const BYTES: u64 = 16 << 20;
            let alone = Alone::new(socket, BYTES, 60)?;
            on_threads(1, |_| alone.flood(BYTES, 1))
        }
        Attack::Churn => on_threads(2, |_| {
            churn(socket);
            Ok(())
        }),
        Attack::Streams => {
            let clients = (0..4).map(|_| Client::connect(socket)).collect::<Result<Vec<_>, _>>()?;
            on_threads(clients.len(), |thread| {
                while goes_on() {
                    drop(clients[thread].create_stream()?);
                }
                Ok(())
            })
        }
        Attack::Memory => {
            let clients = (0..4).map(|_| Client::connect(socket)).collect::<Result<Vec<_>, _>>()?;
            on_threads(clients.len(), |thread| {
                while goes_on() {
                    drop(clients[thread].allocate(1 << 20)?);
                }
                Ok(())
            })
        }
        Attack::Joins => {
            let client = Client::connect(socket)?;
            on_threads(2, |thread| {
                if thread > 0 {
                    churn(socket);
                    return Ok(());
                }
                let ids = (0..62).map(|_| mccs::unique_id()).collect::<Result<Vec<_>, _>>()?;
                let rank = |id: &mccs::UniqueId| client.communicator(*id, 0, 4096);
                // Nobody else ever joins; the process is ended.
                let _ = CommunicatorBuilder::join_all(&ids.iter().map(rank).collect::<Vec<_>>());
                Ok(())
            })
        }
        Attack::Hogs => on_threads(hogs, |_| {
            let mut number = 1u64;
            while goes_on() {
                (0..10_000)
                    .for_each(|_| number = std::hint::black_box(number.wrapping_mul(6_364_136_223_846_793_005) + 1));
            }
            Ok(())
        }),
    }
}

/// A neighbour that is at work. Ended with the value.
struct Neighbour(Child);

impl Neighbour {
    fn start(attack: Attack, socket: &Path, hogs: usize) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--attack", &attack.name(), "--hogs", &hogs.to_string(), "--socket"]).arg(socket);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let said = child.stdout.take().and_then(|stdout| BufReader::new(stdout).lines().next());
        let neighbour = Neighbour(child);
        ensure!(said.is_some_and(|line| line.is_ok_and(|line| line == "ready")), "{} does not start", attack.name());
        Ok(neighbour)
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // Some wait for what never comes.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a side took.
#[derive(Clone, Copy)]
struct Sample {
    mean_us: f64,
    p99_us: f64,
}

/// One of the victim's two ranks.
struct Rank {
    comm: Communicator,
    stream: Stream,
    memory: Region,
}

impl Rank {
    fn call(&self, bytes: u64) -> anyhow::Result<()> {
        let (send, recv) = (self.memory.at(0), self.memory.at(bytes.next_multiple_of(64)));
        self.comm.all_reduce(send, recv, bytes / 4, DataType::U32, RedOp::Sum, &self.stream)?;
        Ok(self.stream.synchronize()?)
    }

    /// Fills what is sent by rank, call and element, calls, and looks at every element of the result.
    fn checked_call(&self, bytes: u64, seed: u32) -> anyhow::Result<()> {
        let at = bytes.next_multiple_of(64) as usize;
        let sent = |rank: u32, element: u32| seed.wrapping_mul(31).wrapping_add(element).wrapping_mul(rank + 1);
        // SAFETY: every call is waited for.
        let memory = unsafe { self.memory.as_mut_slice() };
        let (send, recv) = memory.split_at_mut(at);
        for (element, word) in (0..).zip(send[..bytes as usize].chunks_exact_mut(4)) {
            word.copy_from_slice(&sent(self.comm.rank(), element).to_le_bytes());
        }
        recv.fill(0xa5);
        self.call(bytes)?;
        // SAFETY: as above.
        let result = unsafe { self.memory.as_slice() }[at..at + bytes as usize].chunks_exact(4);
        let is_right =
            |(element, word): (u32, &[u8])| word == sent(0, element).wrapping_add(sent(1, element)).to_le_bytes();
        ensure!((0..).zip(result).all(is_right), "a wrong element");
        Ok(())
    }

    /// Calls for so long; rank 0 decides when it is over, by a call that says so.
    fn run(&self, bytes: u64, time: Duration) -> anyhow::Result<Latencies> {
        const BATCH: u32 = 32;
        let (mut latencies, began) = (Latencies::default(), Instant::now());
        for batch in 0.. {
            self.checked_call(bytes, batch)?;
            for _ in 0..BATCH {
                let call_began = Instant::now();
                self.call(bytes)?;
                latencies.add(call_began.elapsed());
            }
            let is_over = u32::from(self.comm.rank() == 0 && began.elapsed() >= time);
            // SAFETY: every call is waited for.
            let memory = unsafe { self.memory.as_mut_slice() };
            memory[..8].copy_from_slice(&[is_over.to_le_bytes(), [0; 4]].concat());
            self.call(8)?;
            // SAFETY: as above.
            if unsafe { self.memory.as_slice() }[64] != 0 {
                break;
            }
        }
        Ok(latencies)
    }
}

/// The victim's side, for so long.
fn measure(ranks: &[Rank], bytes: u64, time: Duration) -> anyhow::Result<Sample> {
    let latencies = std::thread::scope(|scope| {
        let others: Vec<_> = ranks[1..].iter().map(|rank| scope.spawn(move || rank.run(bytes, time))).collect();
        let own = ranks[0].run(bytes, time)?;
        for other in others {
            other.join().map_err(|_| anyhow::anyhow!("a rank panicked"))??;
        }
        anyhow::Ok(own)
    })?;
    let quantile_us = |quantile| latencies.quantile(quantile).as_secs_f64() * 1e6;
    ensure!(quantile_us(1.0) > 0.0, "no call ended");
    let calls = latencies.count() as f64;
    Ok(Sample { mean_us: latencies.total().as_secs_f64() * 1e6 / calls, p99_us: quantile_us(0.99) })
}

/// A service with two tenants, ended with the value.
struct Service {
    process: Child,
    folder: PathBuf,
}

impl Service {
    fn start() -> anyhow::Result<Self> {
        let folder = std::env::temp_dir().join(format!("mccs-neighbours-{}", std::process::id()));
        std::fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let config = folder.join("service.toml");
        let tenants = "[[tenant]]\nname = \"victim\"\nsocket = \"victim\"\n[[tenant]]\nname = \"hostile\"\nsocket = \"hostile\"\n";
        std::fs::write(&config, format!("[service]\nruntime_dir = {folder:?}\n[cuda]\nuse = \"off\"\n{tenants}"))?;
        let program = std::env::current_exe()?.with_file_name("mccs-service");
        let mut command = Command::new(&program);
        command.arg("--config").arg(&config).env("RUST_LOG", "error").stdout(Stdio::piped());
        let mut process = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let said = process.stdout.take().and_then(|stdout| BufReader::new(stdout).lines().next());
        let service = Service { process, folder };
        ensure!(said.is_some_and(|line| line.is_ok_and(|line| line.contains("ready"))), "the service does not start");
        Ok(service)
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn join(socket: &Path) -> anyhow::Result<Vec<Rank>> {
    const MEMORY_BYTES: u64 = 4 << 20;
    let id = mccs::unique_id()?;
    std::thread::scope(|scope| {
        let rank = |rank| {
            scope.spawn(move || -> anyhow::Result<Rank> {
                let client = Client::connect(socket)?;
                let comm = client.communicator(id, rank, 2).join()?;
                Ok(Rank { comm, stream: client.create_stream()?, memory: client.allocate(MEMORY_BYTES)? })
            })
        };
        let threads = [0, 1].map(rank);
        threads.into_iter().map(|thread| thread.join().map_err(|_| anyhow::anyhow!("a rank panicked"))?).collect()
    })
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let hogs = arguments.hogs.unwrap_or(cores);
    if let (Some(kind), Some(socket)) = (arguments.attack, &arguments.socket) {
        return attack(kind, socket, hogs);
    }
    let floods = if arguments.flood.is_empty() { FLOODS.to_vec() } else { arguments.flood };
    let time = Duration::from_millis(arguments.millis);
    let service = Service::start()?;
    let ranks = join(&service.folder.join("victim"))?;
    let hostile = service.folder.join("hostile");
    let mut table = Vec::new();
    for flood in floods {
        for bytes in &arguments.bytes {
            let mut samples = [(Attack::Hogs, Vec::new()), (flood, Vec::new())];
            for round in 0..arguments.rounds {
                // Another side begins each round.
                for side in [round % 2, 1 - round % 2] {
                    let (kind, taken) = &mut samples[side];
                    let _neighbour = Neighbour::start(*kind, &hostile, hogs)?;
                    taken.push(measure(&ranks, *bytes, time)?);
                }
            }
            let middle = |of: &[Sample], what: fn(&Sample) -> f64| median(&of.iter().map(what).collect::<Vec<_>>());
            let [hogs, flooded] =
                samples.map(|(_, taken)| [middle(&taken, |s| s.mean_us), middle(&taken, |s| s.p99_us)]);
            let line = serde_json::json!({
                "flood": flood.name(), "bytes": bytes, "rounds": arguments.rounds,
                "hogs_mean_us": hogs[0], "hogs_p99_us": hogs[1], "mean_us": flooded[0], "p99_us": flooded[1],
                "mean_ratio": flooded[0] / hogs[0], "p99_ratio": flooded[1] / hogs[1],
            });
            println!("{line}");
            table.push((flood.name(), *bytes, hogs, flooded));
        }
    }
    println!(
        "{:<12} {:>8} {:>10} {:>10} {:>10} {:>10} {:>7} {:>7}",
        "flood", "bytes", "hogs us", "mean us", "hogs p99", "p99", "mean x", "p99 x"
    );
    for (flood, bytes, hogs, flooded) in table {
        println!(
            "{flood:<12} {bytes:>8} {:>10.1} {:>10.1} {:>10.1} {:>10.1} {:>7.2} {:>7.2}",
            hogs[0],
            flooded[0],
            hogs[1],
            flooded[1],
            flooded[0] / hogs[0],
            flooded[1] / hogs[1]
        );
    }
    Ok(())
}
