//! Floods of a hostile tenant, and processes that only compute.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::ensure;
use clap::ValueEnum;
use mccs::{Client, Communicator, CommunicatorBuilder, DataType, RedOp, Region, Stream};

use super::children::Process;

/// A neighbour's behaviour.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Attack {
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

/// All that are measured against hogs.
pub const FLOODS: [Attack; 6] =
    [Attack::Operations, Attack::Churn, Attack::Streams, Attack::Memory, Attack::Large, Attack::Joins];

impl Attack {
    /// As arguments and results call it.
    #[must_use]
    pub fn name(self) -> String {
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

/// Attacks the service with this socket until standard input ends.
///
/// # Errors
/// The service refuses what the attack begins with.
pub fn run(attack: Attack, socket: &Path, hogs: usize) -> anyhow::Result<()> {
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
pub struct Neighbour(#[expect(dead_code, reason = "it ends with the value")] Process);

impl Neighbour {
    /// Starts this program anew as a neighbour, and waits until it is at work.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(attack: Attack, socket: &Path, hogs: usize) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--attack", &attack.name(), "--hogs", &hogs.to_string(), "--socket"]).arg(socket);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = Process::start(command)?;
        let said = process.0.stdout.take().and_then(|stdout| BufReader::new(stdout).lines().next());
        let neighbour = Neighbour(process);
        ensure!(said.is_some_and(|line| line.is_ok_and(|line| line == "ready")), "{} does not start", attack.name());
        Ok(neighbour)
    }
}
