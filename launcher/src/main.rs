//! `mccs-launch`: runs one TOML file's services and jobs on its hosts, and ends what it started.
//!
//! ```text
//! job.toml -> spec (plan) -> run (hosts, services, ready, ranks, operator's views, end) -> summary
//!                             |
//!                           link ==(wire: a pipe, `ip netns exec`, ssh)== agent -> process    one agent a host
//!                                                                           `----> guard
//! ```
//!
//! Exit status: 0 only if every process ended well; else the first failing rank's (128 + n for signal n), 124 on a
//! time-out, 130 on Ctrl-C (143 on SIGTERM, 129 on SIGHUP), 1 where a service failed or a host was lost, 2 where nothing
//! could be started.
//!
//! Deliberately absent: restarts of what failed, and copies of files to hosts other than a service's configuration.

mod agent;
mod cargo;
mod guard;
mod host;
mod link;
mod logs;
mod outbox;
mod process;
mod quickstart;
mod reach;
mod run;
mod signals;
mod spec;
mod summary;
mod wire;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory as _, Parser, Subcommand};
use clap_complete::Shell;
use mccs_config::JobFile;
use mccs_config::job::Host;

use crate::quickstart::tour::Tour;
use crate::spec::Plan;

/// Nothing was started: the file, the command line or the host is at fault.
const EXIT_REFUSED: u8 = 2;

/// Starts services and the processes of jobs on the hosts of one TOML file, and ends what it started.
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
    /// Only show what a job file would start, as `run --dry-run`.
    Plan {
        /// The job file.
        file: PathBuf,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Check a job file.
    Check {
        /// The job file.
        file: PathBuf,
    },
    /// Start a service and a job of two ranks on this machine, show what the operator sees of them, and end all.
    Quickstart {
        /// Under `cargo run`, do not build the workspace's other executables first.
        #[arg(long)]
        no_build: bool,
    },
    /// Print completions for a shell.
    Completions {
        /// Which shell.
        shell: Shell,
    },
    /// Internal: starts processes on a host for the launcher that its standard input and output lead to.
    #[command(hide = true)]
    Agent,
    /// Internal: what `quickstart` shows while its job runs.
    #[command(hide = true)]
    Tour(Tour),
    /// Internal: ends an agent's processes when the agent is gone.
    #[command(hide = true)]
    Guard {
        /// Folder to remove with them.
        runtime_dir: PathBuf,
    },
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Run { file, dry_run: true, json, .. } | Command::Plan { file, json } => show(&file, json).map(|()| 0),
        Command::Run { file, json, no_build, .. } => start(&file, json, no_build),
        Command::Check { file } => check(&file).map(|()| 0),
        Command::Quickstart { no_build } => quickstart::run(no_build),
        Command::Tour(tour) => tour.run().map(|()| 0),
        Command::Completions { shell } => completions(shell).map(|()| 0),
        Command::Agent => agent::serve(),
        Command::Guard { runtime_dir } => guard::watch(&runtime_dir).map(|()| 0),
    };
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("mccs-launch: {}", mccs_config::error::in_words(error.as_ref()));
            ExitCode::from(EXIT_REFUSED)
        }
    }
}

fn completions(shell: Shell) -> Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Arguments::command(), "mccs-launch", &mut text);
    Ok(std::io::stdout().write_all(&text)?)
}

fn check(path: &Path) -> Result<()> {
    let file = JobFile::load(path)?;
    let hosts = file.hosts();
    // A fabric tells its addresses only while it is up.
    let is_told = |host: &Host| host.fabric.is_none() || host.address.is_some();
    if hosts.iter().all(is_told) {
        Plan::new(path, &file, "XXXXXXXX")?;
    }
    for (index, host) in hosts.iter().enumerate().filter(|(_, host)| is_told(host)) {
        spec::service_config(&file, index, host, Path::new("/run/mccs-launch"))?;
    }
    let ranks: usize = file.jobs.iter().filter_map(|job| job.places(&hosts).ok()).map(|places| places.len()).sum();
    let hosts = if file.hosts.is_empty() { String::new() } else { format!("{} hosts, ", hosts.len()) };
    println!("{}: {hosts}{} jobs, {ranks} ranks, no mistakes", path.display(), file.jobs.len());
    Ok(())
}

fn show(path: &Path, json: bool) -> Result<()> {
    let file = JobFile::load(path)?;
    let plan = Plan::new(path, &file, "XXXXXXXX")?;
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
    let plan = Plan::new(path, &file, &format!("{:08x}", rand::random::<u32>()))?;
    plan.require_programs()?;
    let summary = run::run(&plan, signals, json)?;
    if json {
        println!("{}", serde_json::to_string_pretty(&summary)?);
    } else {
        println!("{summary}");
    }
    Ok(summary.exit_code)
}
