//! A process a rank: this program, started again for each.

use std::ffi::OsString;
use std::process::Command;

use anyhow::ensure;

/// Starts this program once a rank, with the same arguments and those that `more` gives for it, and waits for all.
///
/// # Errors
/// A process could not be started, or failed: which ones, with their status.
pub fn run_ranks(nranks: u32, more: impl Fn(u32) -> Vec<OsString>) -> anyhow::Result<()> {
    let own = std::env::current_exe()?;
    let start = |rank: u32| Command::new(&own).args(std::env::args_os().skip(1)).args(more(rank)).spawn();
    let mut ranks = (0..nranks).map(start).collect::<Result<Vec<_>, _>>()?;
    let mut failed = Vec::new();
    for (rank, process) in ranks.iter_mut().enumerate() {
        let status = process.wait()?;
        if !status.success() {
            failed.push(format!("rank {rank}: {status}"));
        }
    }
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}
