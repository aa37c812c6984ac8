//! Steps before and after a job on a host, and before each of its tasks.

use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use mccs_config::SlurmFile;
use mccs_config::slurm::{SlurmJob, WithoutService};
use mccs_control::tenants::{self, Removed, TenantError};
use mccs_ipc::handshake::{self, HandshakeError};

use crate::record;

/// Has a tenant for a job. A job that is refused has a note of why, which its tasks are told: a prolog that fails drains the host, and a
/// mistyped account is no fault of the host's.
///
/// # Errors
/// The host is not as the job needs it.
pub fn prolog(file: &SlurmFile, job: &SlurmJob) -> anyhow::Result<()> {
    let tenant = match file.tenant(job) {
        Ok(tenant) => tenant,
        Err(reason) => return refuse(file, job.id, &reason),
    };
    // One of another job of the same number, or of the same job before it was requeued with other terms.
    forget_refusal(file, job.id)?;
    let (control, timeout) = (file.control_socket(), file.timeout.0);
    let added = match tenants::add(&control, &tenant, timeout) {
        Err(TenantError::Refused(_)) => {
            tenants::remove(&control, &tenant.name, timeout)?;
            tenants::add(&control, &tenant, timeout)
        }
        added => added,
    };
    match added {
        Ok(_) => Ok(()),
        Err(error) if error.is_nobody_there() => match file.without_service {
            WithoutService::Refuse => Err(error).context("without_service is \"refuse\""),
            WithoutService::Run => {
                eprintln!("mccs-slurm: job {} runs without mccs: {error}", job.id);
                Ok(())
            }
        },
        Err(error) => Err(error).with_context(|| format!("job {} has no tenant", job.id)),
    }
}

/// Takes the tenant of a job away. Memory that some GPU has not given back yet goes by itself. Its owner is told why the service ended any
/// of it, if the operator wants that.
///
/// # Errors
/// A service that runs does not answer.
pub fn epilog(file: &SlurmFile, id: u64) -> anyhow::Result<()> {
    forget_refusal(file, id)?;
    let mut reasons = record::reasons(file, id);
    let done = take_away(file, id, &mut reasons);
    record::note(file, id, &reasons);
    done
}

fn take_away(file: &SlurmFile, id: u64, reasons: &mut Vec<String>) -> anyhow::Result<()> {
    match tenants::remove(&file.control_socket(), &SlurmFile::tenant_name(id), file.timeout.0) {
        Ok(Removed::Gone | Removed::Unknown) => Ok(()),
        Ok(Removed::Leaving(row)) => {
            let (sessions, communicators, bytes) = (row.sessions, row.communicators, row.memory_bytes);
            eprintln!(
                "mccs-slurm: of job {id} {sessions} sessions, {communicators} communicators and {bytes} bytes are still ending"
            );
            Ok(())
        }
        Err(error) if error.is_nobody_there() => {
            // A service that starts later is not to have the tenant again.
            let folder = file.tenant_folder(id);
            if folder.exists() {
                let why = format!("ends without a service, so that its calls have failed: {error}");
                eprintln!("mccs-slurm: job {id} {why}");
                reasons.push(format!("the job {why}"));
            }
            unless_gone(std::fs::remove_dir_all(&folder)).with_context(|| format!("cannot remove {}", folder.display()))
        }
        Err(error) => Err(error).with_context(|| format!("the tenant of job {id} is still there")),
    }
}

/// Tells a task that its job is refused, if it is.
///
/// # Errors
/// The note of a refusal cannot be read.
pub fn task_is_refused(file: &SlurmFile, id: u64) -> anyhow::Result<Option<ExitCode>> {
    let note = file.refusal(id);
    match std::fs::read_to_string(&note) {
        Ok(reason) => {
            println!("print mccs: this job is refused: {}", reason.trim());
            Ok(Some(ExitCode::FAILURE))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", note.display())),
    }
}

/// How often it is looked whether a service that restarts is back.
const LOOK: Duration = Duration::from_millis(50);

/// A host's service, as a job's task finds it.
enum Found {
    Serves,
    /// The job has a tenant here, whom nobody serves.
    Lost(HandshakeError),
    /// The job has none here.
    NoTenant,
}

/// Looks for the service of a job that has a tenant here. A service that restarts has its time for that.
fn find(file: &SlurmFile, id: u64) -> Found {
    let began = Instant::now();
    loop {
        match handshake::find(&file.tenant_socket(id)) {
            Err(_) if !file.tenant_folder(id).exists() => return Found::NoTenant,
            Err(error @ HandshakeError::NobodyThere { .. }) if began.elapsed() >= file.timeout.0 => {
                return Found::Lost(error);
            }
            Err(HandshakeError::NobodyThere { .. }) => std::thread::sleep(LOOK),
            // Others than nobody tell the task themselves.
            Ok(_) | Err(_) => return Found::Serves,
        }
    }
}

/// Prints what Slurm adds to a task's environment. A task without a service is told why: it fails, unless the job may run without.
pub fn task_prolog(file: &SlurmFile, id: u64) -> ExitCode {
    let why = match find(file, id) {
        Found::Serves => {
            print_environment(file, id);
            return ExitCode::SUCCESS;
        }
        Found::Lost(error) => format!("the service of this host has gone while the job runs: {error}"),
        Found::NoTenant => "this job has no tenant on this host".to_owned(),
    };
    let why = why.replace(char::is_control, " ");
    if file.without_service == WithoutService::Refuse {
        println!("print mccs: {why}");
        return ExitCode::FAILURE;
    }
    // Once a host.
    if std::env::var("SLURM_LOCALID").is_ok_and(|local| local == "0") {
        println!("print mccs: {why}; its tasks here run without mccs");
    }
    // The socket of another job, from which this one was submitted.
    println!("unset MCCS_SOCKET");
    ExitCode::SUCCESS
}

fn print_environment(file: &SlurmFile, id: u64) {
    println!("export MCCS_SOCKET={}", file.tenant_socket(id).display());
    if let Some(library) = &file.preload {
        let others = std::env::var("LD_PRELOAD").unwrap_or_default();
        let own = library.display().to_string();
        let others = others.split([':', ' ']).filter(|other| !other.is_empty() && *other != own);
        let all: Vec<&str> = std::iter::once(own.as_str()).chain(others).collect();
        println!("export LD_PRELOAD={}", all.join(":"));
    }
}

/// Notes for the tasks of a job why it is refused.
///
/// # Errors
/// The note cannot be written.
pub fn refuse(file: &SlurmFile, id: u64, reason: &str) -> anyhow::Result<()> {
    // In one line: Slurm takes each line of a task prolog for an order of its own.
    let reason = &reason.replace(char::is_control, " ");
    let (note, folder) = (file.refusal(id), &file.state_dir);
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    write_whole(&note, reason).with_context(|| format!("cannot write {}", note.display()))?;
    eprintln!("mccs-slurm: job {id} is refused: {reason}");
    Ok(())
}

/// A task that looks meanwhile sees all of it, or nothing.
fn write_whole(path: &Path, text: &str) -> std::io::Result<()> {
    let next = path.with_extension("next");
    std::fs::write(&next, text)?;
    std::fs::rename(next, path)
}

fn forget_refusal(file: &SlurmFile, id: u64) -> anyhow::Result<()> {
    let note = file.refusal(id);
    for path in [note.with_extension("next"), note] {
        unless_gone(std::fs::remove_file(&path)).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}

/// A missing file is no mistake.
fn unless_gone(done: std::io::Result<()>) -> std::io::Result<()> {
    match done {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        done => done,
    }
}
