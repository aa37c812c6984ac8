//! `mccs-scale`: memory that a service takes for communicators, and for operations that wait.
//!
//! One session plays both ranks of everything. The service should have nothing else to do, and quotas that allow it.
//! Prints a JSON line with the service's memory at every step; `eval/scale.py` starts the service and concludes.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::{Parser, Subcommand};
use mccs::{Client, Communicator, CommunicatorBuilder, DataType, RedOp, Region, Stream, unique_id};
use mccs_control::{ControlAnswer, ControlRequest, call};
use mccs_eval::workload::{Call, POISON};
use mccs_ipc::types::CollectiveKind;

const NRANKS: u32 = 2;
/// Elements of each operation: the smaller, the more is seen of what is not data.
const COUNT: u64 = 64;
/// Bytes of a rank's input, and of its output.
const BUFFER_BYTES: u64 = COUNT * 4;
/// How often everything is done again, after it was given back: it must take no more memory than before.
const AGAIN: usize = 4;
/// How long the service may take to see what was enqueued.
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures a service's memory as communicators, or operations, become many.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[arg(long, env = "MCCS_SOCKET")]
    socket: PathBuf,
    /// The operator's socket.
    #[arg(long)]
    control_socket: PathBuf,
    /// The service's process.
    #[arg(long)]
    service_pid: u32,
    /// Points to measure at, besides the beginning.
    #[arg(long, default_value_t = 4)]
    steps: u32,
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Makes communicators of two ranks, uses all, checks the data, and destroys them.
    Communicators {
        #[arg(long, default_value_t = 1000)]
        count: u32,
    },
    /// Enqueues operations that wait for the other rank; then it comes.
    Operations {
        #[arg(long, default_value_t = 40_000)]
        count: u32,
    },
}

/// A session with a stream for each rank, and memory for so many pairs of buffers of both.
struct Session {
    streams: [Stream; NRANKS as usize],
    memory: Region,
    client: Client,
}

impl Session {
    fn new(arguments: &Arguments, buffers: u32) -> anyhow::Result<Self> {
        let client = Client::connect(&arguments.socket).context("cannot connect")?;
        let streams = [client.create_stream()?, client.create_stream()?];
        let memory = client.allocate(u64::from(buffers * NRANKS) * 2 * BUFFER_BYTES)?;
        Ok(Session { streams, memory, client })
    }

    /// Both ranks of a new communicator.
    fn join(&self) -> anyhow::Result<Vec<Communicator>> {
        let id = unique_id()?;
        let spec = |rank| self.client.communicator(id, rank, NRANKS);
        Ok(CommunicatorBuilder::join_all(&[spec(0), spec(1)])?)
    }

    /// Offset of a rank's input; its output follows.
    fn input_offset(buffer: u32, rank: u32) -> u64 {
        u64::from(buffer * NRANKS + rank) * 2 * BUFFER_BYTES
    }

    fn all_reduce(&self, comm: &Communicator, buffer: u32) -> anyhow::Result<()> {
        let input = Self::input_offset(buffer, comm.rank());
        let (send, recv) = (self.memory.at(input), self.memory.at(input + BUFFER_BYTES));
        comm.all_reduce(send, recv, COUNT, DataType::U32, RedOp::Sum, &self.streams[comm.rank() as usize])?;
        Ok(())
    }

    fn synchronize(&self) -> anyhow::Result<()> {
        self.streams.iter().try_for_each(|stream| stream.synchronize())?;
        Ok(())
    }

    /// Input and output, as slices of this process' memory.
    ///
    /// # Safety
    /// No operation that uses the buffer may be in flight, and the slices of one buffer must not live twice at a time.
    #[expect(clippy::mut_from_ref, reason = "shared memory: exclusivity is the caller's contract")]
    unsafe fn data(&self, buffer: u32, rank: u32) -> (&mut [u8], &mut [u8]) {
        let input = Self::input_offset(buffer, rank) as usize;
        let bytes = BUFFER_BYTES as usize;
        // SAFETY: inside the region, which has two buffers for each rank; the rest is the caller's contract.
        let slice = |offset| unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr().add(offset), bytes) };
        (slice(input), slice(input + bytes))
    }
}

/// The data of a communicator's one operation.
fn call_of(communicator: u32) -> Call {
    let kind = CollectiveKind::AllReduce;
    let seed = u64::from(std::process::id()) << 32 | u64::from(communicator);
    Call { kind, dtype: DataType::U32, redop: RedOp::Sum, root: 0, count: COUNT, nranks: NRANKS, seed }
}

impl Arguments {
    /// Prints the service's memory.
    fn measure(&self, stage: &str, count: u32) -> anyhow::Result<()> {
        let file = |name: &str| std::fs::read_to_string(format!("/proc/{}/{name}", self.service_pid));
        let (rollup, status) = (file("smaps_rollup")?, file("status")?);
        let bytes = |text: &str, name: &str| -> anyhow::Result<u64> {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_suffix("kB"));
            Ok(value.with_context(|| format!("no {name}"))?.trim().parse::<u64>()? * 1024)
        };
        let record = serde_json::json!({
            "stage": stage, "count": count, "pss_bytes": bytes(&rollup, "Pss:")?,
            "rss_anon_bytes": bytes(&status, "RssAnon:")?, "rss_shmem_bytes": bytes(&status, "RssShmem:")?,
        });
        println!("{record}");
        Ok(())
    }

    fn communicators(&self, count: u32) -> anyhow::Result<()> {
        let session = Session::new(self, count)?;
        let mut comms = Vec::new();
        self.measure("made", 0)?;
        for step in 1..=self.steps {
            while comms.len() < (count * step / self.steps) as usize {
                comms.push(session.join()?);
            }
            self.measure("made", comms.len() as u32)?;
        }
        for buffer in 0..count {
            for rank in 0..NRANKS {
                // SAFETY: nothing is in flight, and the slices are gone before the next ones.
                let (input, output) = unsafe { session.data(buffer, rank) };
                input.copy_from_slice(&call_of(buffer).input(rank));
                output.fill(POISON);
            }
        }
        for (buffer, ranks) in (0..).zip(&comms) {
            ranks.iter().try_for_each(|comm| session.all_reduce(comm, buffer))?;
        }
        session.synchronize()?;
        let wrong = |(buffer, rank)| {
            // SAFETY: all operations have ended, and the slices are gone before the next ones.
            let (_, output) = unsafe { session.data(buffer, rank) };
            call_of(buffer).wrong_elements(rank, output)
        };
        let pairs = (0..count).flat_map(|buffer| (0..NRANKS).map(move |rank| (buffer, rank)));
        let wrong: u64 = pairs.map(wrong).sum();
        ensure!(wrong == 0, "{wrong} wrong elements");
        self.measure("used", count)?;
        comms.into_iter().flatten().try_for_each(Communicator::destroy)?;
        self.measure("destroyed", 0)?;
        for _ in 0..AGAIN {
            let again = (0..count).map(|_| session.join()).collect::<anyhow::Result<Vec<_>>>()?;
            for (buffer, ranks) in (0..).zip(&again) {
                ranks.iter().try_for_each(|comm| session.all_reduce(comm, buffer))?;
            }
            session.synchronize()?;
            self.measure("made and used again", count)?;
            again.into_iter().flatten().try_for_each(Communicator::destroy)?;
        }
        Ok(())
    }

    fn operations(&self, count: u32) -> anyhow::Result<()> {
        let session = Session::new(self, 1)?;
        let ranks = session.join()?;
        // The first operation of a communicator leaves things behind that are not counted.
        ranks.iter().try_for_each(|comm| session.all_reduce(comm, 0))?;
        session.synchronize()?;
        self.measure("waiting", 0)?;
        let mut enqueued = 0;
        for step in 1..=self.steps {
            while enqueued < count * step / self.steps {
                session.all_reduce(&ranks[0], 0)?;
                enqueued += 1;
            }
            self.wait_until_in_flight(session.client.session(), u64::from(enqueued))?;
            self.measure("waiting", enqueued)?;
        }
        let rank_comes = || -> anyhow::Result<()> {
            (0..count).try_for_each(|_| session.all_reduce(&ranks[1], 0))?;
            session.synchronize()
        };
        rank_comes()?;
        self.measure("ended", 0)?;
        for _ in 0..AGAIN {
            (0..count).try_for_each(|_| session.all_reduce(&ranks[0], 0))?;
            self.wait_until_in_flight(session.client.session(), u64::from(count))?;
            self.measure("waiting again", count)?;
            rank_comes()?;
        }
        Ok(())
    }

    /// Until the service has taken everything out of the ring.
    fn wait_until_in_flight(&self, session: u64, wanted: u64) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            let answer = call(&self.control_socket, &ControlRequest::Sessions)?;
            let ControlAnswer::Sessions(sessions) = answer else {
                anyhow::bail!("the service refused to list sessions")
            };
            let in_flight = sessions.iter().find(|view| view.session == session).map(|view| view.in_flight);
            if in_flight == Some(wanted) {
                return Ok(());
            }
            ensure!(start.elapsed() < PATIENCE, "{in_flight:?} operations in flight instead of {wanted}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    ensure!(arguments.steps > 0, "--steps must be at least 1");
    match arguments.what {
        What::Communicators { count } => arguments.communicators(count),
        What::Operations { count } => arguments.operations(count),
    }
}
