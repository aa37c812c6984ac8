//! The note of a job's end in Slurm's accounting, for its owner: why the service ended calls or sessions of the job on this host.
//!
//! slurmd drops what an epilog prints, and slurmctld takes no comment for a job that has ended. slurmdbd does, by `sacctmgr`. It is
//! asked only where there is something to say, and about a communicator by one of its hosts.

use std::process::Command;
use std::time::{Duration, SystemTime};

use mccs_config::SlurmFile;
use mccs_config::error::in_words;
use mccs_control::{ControlAnswer, ControlRequest, call};

use crate::job::output;

/// Characters of a note.
const NOTE_CHARS_MAX: usize = 1000;
const SOMETHING_ELSE: &str = "the service answers something else";

/// Why calls of a job have failed here and sessions of it end, as the service says that still has its tenant. Nothing, where nobody notes it.
pub fn reasons(file: &SlurmFile, id: u64) -> Vec<String> {
    if file.sacctmgr.is_none() {
        return Vec::new();
    }
    let known = failures(file, id).and_then(|failed| Ok(failed.into_iter().chain(outliving(file, id)?).collect()));
    // Without a service, whoever takes the tenant away says so.
    known.unwrap_or_else(|error| {
        eprintln!("mccs-slurm: of job {id} it is not known why its calls failed: {}", in_words(error.as_ref()));
        Vec::new()
    })
}

/// The service's answer, unless it refuses.
fn ask(file: &SlurmFile, request: &ControlRequest) -> anyhow::Result<ControlAnswer> {
    match call(&file.control_socket(), request)? {
        ControlAnswer::Refused(reason) => anyhow::bail!(reason),
        answer => Ok(answer),
    }
}

/// The first failure of the job's communicators, of those that this host notes.
fn failures(file: &SlurmFile, id: u64) -> anyhow::Result<Option<String>> {
    let tenant = SlurmFile::tenant_name(id);
    let ControlAnswer::Hosts(hosts) = ask(file, &ControlRequest::Hosts)? else { anyhow::bail!(SOMETHING_ELSE) };
    let own = hosts.iter().find(|host| host.own).map(|host| host.host.as_str());
    let ControlAnswer::Failed(failed) = ask(file, &ControlRequest::Failed)? else { anyhow::bail!(SOMETHING_ELSE) };
    // A job that is queued again has the number of the one before, whose failures are older than the tenant.
    let age = age_of_tenant(file, id);
    let is_noted_here = |hosts: &[String]| hosts.first().is_none_or(|first| Some(first.as_str()) == own);
    let of_job = failed.iter().filter(|failed| failed.tenant == tenant && failed.age_seconds <= age.as_secs());
    let noted: Vec<_> = of_job.filter(|failed| is_noted_here(&failed.hosts)).collect();
    Ok(noted.last().map(|first| match noted.len() {
        1 => format!("a communicator failed: {}", first.reason),
        count => format!("{count} communicators failed, the first so: {}", first.reason),
    }))
}

/// How long the job has had its tenant here. The service makes the folder when it adds the tenant, and a socket when it starts anew.
fn age_of_tenant(file: &SlurmFile, id: u64) -> Duration {
    let made = file.tenant_folder(id).metadata().and_then(|folder| folder.modified());
    made.ok().and_then(|made| SystemTime::now().duration_since(made).ok()).unwrap_or_default()
}

/// Processes with a session that live while Slurm has ended all of the job's.
fn outliving(file: &SlurmFile, id: u64) -> anyhow::Result<Option<String>> {
    let tenant = SlurmFile::tenant_name(id);
    let ControlAnswer::Sessions(sessions) = ask(file, &ControlRequest::Sessions)? else {
        anyhow::bail!(SOMETHING_ELSE)
    };
    let living = sessions.iter().filter(|session| session.tenant == tenant && lives(session.pid));
    let living: Vec<String> = living.map(|session| session.pid.to_string()).collect();
    Ok((!living.is_empty())
        .then(|| format!("processes outlive the job, and lose their sessions: {}", living.join(", "))))
}

/// Whether there is a process that has not ended. The service hears of an end a moment later.
fn lives(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
}

/// Notes the reasons, if there are any. The job is over either way: who cannot note says so in slurmd's log.
pub fn note(file: &SlurmFile, id: u64, reasons: &[String]) {
    let Some(program) = file.sacctmgr.as_ref().filter(|_| !reasons.is_empty()) else { return };
    let mut sacctmgr = Command::new(program);
    sacctmgr.args(["--immediate", "modify", "job", "where", &format!("jobid={id}"), "set"]);
    sacctmgr.arg(format!("admincomment={}", text(std::env::var("SLURMD_NODENAME").ok().as_deref(), reasons)));
    if let Err(error) = output(sacctmgr, file.timeout.0) {
        eprintln!("mccs-slurm: the end of job {id} is not noted: {error:#}");
    }
}

/// The note, in one line of Slurm's characters.
fn text(host: Option<&str>, reasons: &[String]) -> String {
    let host = host.map(|host| format!(" on {host}")).unwrap_or_default();
    let all = format!("mccs{host}: {}", reasons.join("; "));
    let plain = all.chars().map(|c| match c {
        '"' | '\'' => '`',
        ' '..='~' if c != '\\' => c,
        _ => ' ',
    });
    plain.take(NOTE_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_one_line_without_characters_of_slurms_own() {
        let reasons = ["rank 1's \"x\"\nhas\\gone".to_owned(), "è".repeat(2 * NOTE_CHARS_MAX)];
        let noted = text(Some("node"), &reasons);
        assert!(noted.starts_with("mccs on node: rank 1`s `x` has gone;  "), "{noted}");
        assert_eq!(noted.len(), NOTE_CHARS_MAX);
        assert_eq!(text(None, &["a".into(), "b".into()]), "mccs: a; b");
    }

    #[test]
    fn a_process_lives_until_it_has_ended() {
        let mut child = Command::new("sleep").arg("1000").spawn().expect("a process");
        let pid = child.id().cast_signed();
        assert!(lives(pid));
        child.kill().expect("killed");
        // It is a zombie until it is waited for.
        while lives(pid) {
            std::thread::yield_now();
        }
        child.wait().expect("it has ended");
        assert!(!lives(pid));
    }
}
