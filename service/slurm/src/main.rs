//! `mccs-slurm`: what Slurm calls before and after a job on a host, and before each task. Asks the service for a tenant of the job's own,
//! and takes it away.
//!
//! ```text
//! prolog (root) ------ tenant slurm-ID: user, weight, quotas, labels -----> service
//! task prolog (user) - MCCS_SOCKET of that tenant, LD_PRELOAD ------------> task; or why it has none
//! epilog (root) ------ takes it away with all that it holds --------------> service
//!                      why the service ended any of it ------------------> Slurm's accounting
//! ```
//!
//! Each may be called twice, or be killed at any point: the epilog alone undoes all that a prolog does.

mod hooks;
mod job;
mod record;
mod strangers;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use mccs_config::SlurmFile;
use mccs_config::error::in_words;
use mccs_config::slurm::SlurmJob;

/// Prolog and epilog of Slurm: a tenant of mccs for each job.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Which tenant a job is, by account and QOS.
    #[arg(long, global = true, value_name = "FILE", default_value = "/etc/mccs/slurm.toml")]
    config: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Have a tenant for the job of the environment. As root, by `Prolog` of slurm.conf.
    Prolog,
    /// Take the tenant of the job away, with all that it holds. As root, by `Epilog`.
    Epilog,
    /// Print what Slurm adds to the environment of a task. As the job's user, by `TaskProlog`.
    TaskProlog,
    /// Check the file, and print the tenant that a job of an account and a QOS is.
    Check {
        /// The job's account.
        #[arg(long)]
        account: Option<String>,
        /// The job's QOS.
        #[arg(long)]
        qos: Option<String>,
        /// The policy.toml whose tenants the file's are compared with. Default: the policy in force, as the service says.
        #[arg(long, value_name = "FILE")]
        policy: Option<PathBuf>,
    },
}

fn main() -> ExitCode {
    let Arguments { config, command } = Arguments::parse();
    match run(&config, &command) {
        Ok(code) => code,
        Err(error) => {
            // Into the log of slurmd.
            eprintln!("mccs-slurm: {}", in_words(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn run(config: &Path, command: &Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Prolog => match SlurmFile::load(config) {
            Ok(file) => hooks::prolog(&file, &job::of_environment(&file.squeue, file.timeout.0)?)?,
            // No fault of the host's, nor of jobs that run.
            Err(error) => hooks::refuse(&places(config), job::id_of_environment()?, &in_words(&error))?,
        },
        Command::Epilog => {
            let file = SlurmFile::load(config).unwrap_or_else(|error| {
                eprintln!("mccs-slurm: {}", in_words(&error));
                places(config)
            });
            hooks::epilog(&file, job::id_of_environment()?)?;
        }
        Command::TaskProlog => return task_prolog(config, job::id_of_environment()?),
        Command::Check { account, qos, policy } => {
            let file = SlurmFile::load(config)?;
            println!("{}: no mistakes found", config.display());
            strangers::warn(&file, policy.as_deref())?;
            let job = SlurmJob { id: 1, account: account.clone(), qos: qos.clone(), ..SlurmJob::default() };
            match file.tenant(&job) {
                Ok(tenant) => print!("\n{}", tenant.to_toml()),
                Err(reason) => println!("\nsuch a job is refused: {reason}"),
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The places in a file with mistakes.
fn places(config: &Path) -> SlurmFile {
    places_of(&std::fs::read_to_string(config).unwrap_or_default())
}

/// The end of a job needs this of a text with mistakes, or of half of one: where the service is and how long it may take, and where notes
/// are. A value that no line says rightly has its default.
fn places_of(text: &str) -> SlurmFile {
    let (mut file, default) = (SlurmFile::default(), SlurmFile::default());
    for line in text.lines().take_while(|line| !line.trim_start().starts_with('[')) {
        let alone = format!("{line}\n[default]\ntenant = \"none\"\n");
        let Ok(one) = SlurmFile::parse(&alone, "a line") else { continue };
        if one.runtime_dir != default.runtime_dir {
            file.runtime_dir = one.runtime_dir;
        }
        if one.state_dir != default.state_dir {
            file.state_dir = one.state_dir;
        }
        if one.timeout != default.timeout {
            file.timeout = one.timeout;
        }
    }
    file
}

/// A job that is refused hears why, whatever has become of the file since; without a file, none begins as if it had no tenant.
fn task_prolog(config: &Path, id: u64) -> anyhow::Result<ExitCode> {
    let loaded = SlurmFile::load(config);
    if let Some(refused) = hooks::task_is_refused(loaded.as_ref().unwrap_or(&places(config)), id)? {
        return Ok(refused);
    }
    Ok(hooks::task_prolog(&loaded?, id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_the_service_is_follows_from_a_text_with_mistakes() {
        let text =
            "runtime_dir = \"/a\"\nprelaod = \"/x\"\nstate_dir = \"b\"\ntimeout = \"3s\" # short\npreload = \"/usr/li";
        let wanted =
            SlurmFile { runtime_dir: "/a".into(), timeout: "3s".parse().expect("a time"), ..SlurmFile::default() };
        assert_eq!(places_of(text), wanted);
        assert_eq!(places_of("[account.a]\nruntime_dir = \"/a\"\n"), SlurmFile::default());
        assert_eq!(places_of("timeout = \"900s\"\n"), SlurmFile::default(), "more than it may be");
    }
}
