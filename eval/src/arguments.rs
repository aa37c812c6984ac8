//! Command-line arguments that benchmarks share.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use mccs::{Client, Communicator, UniqueId};

/// Which rank of which communicator a process is, as the launcher tells it.
#[derive(Debug, Clone, clap::Args)]
pub struct RankArguments {
    /// The tenant's socket.
    #[arg(long, env = "MCCS_SOCKET")]
    pub socket: PathBuf,
    #[arg(long, env = "MCCS_RANK")]
    pub rank: u32,
    #[arg(long, env = "MCCS_NRANKS")]
    pub nranks: u32,
    #[arg(long, env = "MCCS_UNIQUE_ID")]
    pub unique_id: UniqueId,
    /// Name of the host of rank 0, where ranks are on several hosts.
    #[arg(long, env = "MCCS_ROOT_ADDRESS", default_value = "")]
    pub root_address: String,
}

impl RankArguments {
    /// Connects, and makes the communicator with the other ranks.
    ///
    /// # Errors
    /// There is no service, or it refuses.
    pub fn join(&self) -> anyhow::Result<(Client, Communicator)> {
        let client = Client::connect(&self.socket).context("cannot connect")?;
        let comm = client
            .communicator(self.unique_id, self.rank, self.nranks)
            .root_address_or_empty(&self.root_address)
            .join()?;
        Ok((client, comm))
    }
}

/// How a program ends, with a line that says why where it failed.
#[must_use]
pub fn exit(program: &str, outcome: anyhow::Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{program}: {}", mccs_config::error::in_words(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// A comma-separated list, or everything.
///
/// # Errors
/// A name that is none of `T`'s; the text says which there are.
pub fn list<T: std::str::FromStr<Err: std::fmt::Display> + Copy>(text: &str, all: &[T]) -> anyhow::Result<Vec<T>> {
    if text == "all" {
        return Ok(all.to_vec());
    }
    text.split(',').map(|name| name.parse().map_err(|error| anyhow::anyhow!("{error}"))).collect()
}

/// Makes seeds differ from run to run.
#[must_use]
pub fn unix_time_ns() -> u64 {
    std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos() as u64)
}
