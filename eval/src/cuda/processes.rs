//! A process a rank: this program, started again for each.

use std::ffi::OsString;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, ensure};

use crate::arguments::exit;

/// What `main` of such a program does: `run` as the rank that it was started for, or `start` all of them.
#[must_use]
pub fn run_or_start(
    program: &str,
    rank: Option<u32>,
    run: impl FnOnce(u32) -> anyhow::Result<()>,
    start: impl FnOnce() -> anyhow::Result<()>,
) -> ExitCode {
    exit(program, rank.map_or_else(start, |rank| run(rank).with_context(|| format!("rank {rank}"))))
}

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
