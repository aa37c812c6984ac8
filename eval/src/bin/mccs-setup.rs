//! `mccs-setup`: times the bootstrap of communicators of many ranks. This process plays one host's,
//! each in a thread and session of its own.
//!
//! All ranks of all hosts meet on a communicator of their own first. Then, again and again: they meet there, join a new
//! communicator, use it once, and leave it. Time is that of the slowest rank. `eval/setup_time.py` starts a process a host.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Parser;
use mccs::{Client, Communicator, DataType, RedOp, Region, Stream, UniqueId};

/// Makes communicators, and prints a JSON line for each on the host of rank 0.
#[derive(Parser, Clone)]
#[command(version)]
struct Arguments {
    #[arg(long, env = "MCCS_SOCKET")]
    socket: PathBuf,
    /// First rank of this process.
    #[arg(long)]
    first: u32,
    /// Number of its ranks.
    #[arg(long)]
    ranks: u32,
    /// Ranks of all hosts.
    #[arg(long)]
    nranks: u32,
    /// Id of the communicator on which they meet; further ones count up from there.
    #[arg(long)]
    unique_id: String,
    /// Name of the host of rank 0.
    #[arg(long, env = "MCCS_ROOT_ADDRESS", default_value = "")]
    root_address: String,
    /// Communicators to make.
    #[arg(long, default_value_t = 10)]
    iterations: u64,
}

/// A rank's session.
struct Rank {
    arguments: Arguments,
    rank: u32,
    client: Client,
    stream: Stream,
    memory: Region,
}

impl Rank {
    fn new(arguments: &Arguments, rank: u32) -> anyhow::Result<Self> {
        let client = Client::connect(&arguments.socket).context("cannot connect")?;
        let (stream, memory) = (client.create_stream()?, client.allocate(8)?);
        Ok(Rank { arguments: arguments.clone(), rank, client, stream, memory })
    }

    /// Communicator `number` of the run.
    fn join(&self, number: u64) -> anyhow::Result<Communicator> {
        let UniqueId(mut id) = self.arguments.unique_id.parse().map_err(anyhow::Error::msg)?;
        id.iter_mut().zip(number.to_le_bytes()).for_each(|(byte, number)| *byte ^= number);
        let Arguments { nranks, root_address, .. } = &self.arguments;
        Ok(self
            .client
            .communicator(UniqueId(id), self.rank, *nranks)
            .root_address_or_empty(root_address.as_str())
            .join()?)
    }

    /// Combines a number of all ranks.
    fn all_reduce(&self, comm: &Communicator, number: u64, op: RedOp) -> anyhow::Result<u64> {
        // SAFETY: nothing is in flight: every operation is waited for.
        unsafe { self.memory.as_mut_slice() }.copy_from_slice(&number.to_le_bytes());
        comm.all_reduce(self.memory.at(0), self.memory.at(0), 1, DataType::U64, op, &self.stream)?;
        self.stream.synchronize()?;
        // SAFETY: the operation has ended.
        Ok(u64::from_le_bytes(unsafe { self.memory.as_slice() }.try_into()?))
    }

    fn run(&self) -> anyhow::Result<()> {
        let meeting = self.join(0)?;
        let slowest = |time: Duration| -> anyhow::Result<f64> {
            Ok(self.all_reduce(&meeting, time.as_nanos() as u64, RedOp::Max)? as f64 / 1e6)
        };
        slowest(Duration::ZERO)?;
        for number in 1..=self.arguments.iterations {
            slowest(Duration::ZERO)?;
            let start = Instant::now();
            let comm = self.join(number)?;
            let joined = start.elapsed();
            let sum = self.all_reduce(&comm, 1, RedOp::Sum)?;
            let used = start.elapsed();
            ensure!(sum == u64::from(self.arguments.nranks), "{sum} of {} ranks", self.arguments.nranks);
            comm.destroy()?;
            let (joined_ms, used_ms) = (slowest(joined)?, slowest(used)?);
            if self.rank == 0 {
                println!("{}", serde_json::json!({ "joined_ms": joined_ms, "used_ms": used_ms }));
            }
        }
        meeting.destroy()?;
        Ok(())
    }
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    std::thread::scope(|scope| {
        let start = |rank| {
            let arguments = &arguments;
            scope.spawn(move || Rank::new(arguments, rank)?.run().with_context(|| format!("rank {rank}")))
        };
        let threads: Vec<_> = (arguments.first..arguments.first + arguments.ranks).map(start).collect();
        for thread in threads {
            let Ok(ended) = thread.join() else { bail!("a rank panicked") };
            ended?;
        }
        Ok(())
    })
}
