//! `mccs-launch`: runs one TOML file's service and jobs, and ends what it started.
//!
//! ```text
//! job.toml -> spec (plan) -> host (executables) -> run (service, ready, ranks, operator's views, end) -> summary
//! ```
//!
//! Exit status: 0 only if every process ended well; else the first failing rank's (128 + n for signal n), 124 on a
//! time-out, 130 on Ctrl-C (143 on SIGTERM, 129 on SIGHUP), 1 where the service failed, 2 where nothing could be started.
//!
//! Deliberately absent: other hosts than this one, and restarts of what failed.

mod cargo;
mod guard;
mod host;
mod logs;
mod process;
mod run;
mod signals;
mod spec;
mod summary;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use mccs_config::JobFile;

use crate::spec::Plan;

/// Nothing was started: the file, the command line or the host is at fault.
const EXIT_REFUSED: u8 = 2;

/// Starts a service and the processes of one or more jobs from one TOML file, and ends what it started.
#[derive(Parser)]
#[command(name = "mccs-launch", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a job file.
    Run {
        /// The job file.
        file: PathBuf,
        /// Only show what would be started.
        #[arg(long)]
        dry_run: bool,
        /// Write the summary (or the plan) as JSON to standard output; the processes' lines go to standard error.
        #[arg(long)]
        json: bool,
        /// Under `cargo run`, do not build the workspace's other executables first.
        #[arg(long)]
        no_build: bool,
    },
    /// Check a job file.
    Check {
        /// The job file.
        file: PathBuf,
    },
    /// Internal: ends the launcher's processes when the launcher is gone.
    #[command(hide = true)]
    Guard {
        /// Folder to remove with them.
        runtime_dir: PathBuf,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Run { file, dry_run: true, json, .. } => show(&file, json).map(|()| 0),
        Command::Run { file, json, no_build, .. } => start(&file, json, no_build),
        Command::Check { file } => check(&file).map(|()| 0),
        Command::Guard { runtime_dir } => guard::watch(&runtime_dir).map(|()| 0),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("mccs-launch: {error:#}");
            ExitCode::from(EXIT_REFUSED)
        }
    }
}

fn check(path: &Path) -> Result<()> {
    let file = JobFile::load(path)?;
    spec::service_config(&file, Path::new("/run/mccs-launch"))?;
    let ranks: u32 = file.jobs.iter().map(|job| job.ranks).sum();
    println!("{}: {} jobs, {ranks} ranks, no mistakes", path.display(), file.jobs.len());
    Ok(())
}

fn show(path: &Path, json: bool) -> Result<()> {
    let file = JobFile::load(path)?;
    let plan = Plan::new(path, &file, &host::private_parent().join("mccs-XXXXXX"))?;
    if json {
        println!("{}", serde_json::to_string_pretty(&plan)?);
    } else {
        print!("{plan}");
    }
    Ok(())
}

fn start(path: &Path, json: bool, no_build: bool) -> Result<u8> {
    let file = JobFile::load(path)?;
    if !no_build {
        cargo::build_executables()?;
    }
    // Before any thread exists, so that no thread receives what the run waits for.
    let signals = signals::Signals::block()?;
    let runtime_dir = host::private_dir()?;
    let plan = Plan::new(path, &file, runtime_dir.path())?;
    plan.require_programs()?;
    let summary = run::run(&plan, signals, json)?;
    runtime_dir.close().context("the run's private folder cannot be removed")?;
    if json {
        println!("{}", serde_json::to_string_pretty(&summary)?);
    } else {
        println!("{summary}");
    }
    Ok(summary.exit_code)
}
