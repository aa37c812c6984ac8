//! The job that Slurm calls for: from the environment, and from Slurm itself where that does not say its account or QOS.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use mccs_config::slurm::SlurmJob;

/// How often it is looked whether Slurm has answered.
const LOOK: Duration = Duration::from_millis(10);

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().and_then(|value| said(&value))
}

/// Slurm's value; it has words for nothing.
fn said(value: &str) -> Option<String> {
    let value = value.trim();
    (!value.is_empty() && value != "(null)" && value != "N/A").then(|| value.to_owned())
}

/// The number of the job.
pub fn id_of_environment() -> anyhow::Result<u64> {
    let text = variable("SLURM_JOB_ID").context("SLURM_JOB_ID is not set: Slurm calls this program")?;
    text.parse().with_context(|| format!("SLURM_JOB_ID is no number: {text:?}"))
}

/// The job. Slurm has `within` to tell of it.
///
/// # Errors
/// The environment is not Slurm's, or Slurm does not know the job, or does not answer.
pub fn of_environment(squeue: &Path, within: Duration) -> anyhow::Result<SlurmJob> {
    let id = id_of_environment()?;
    let uid = variable("SLURM_JOB_UID").context("SLURM_JOB_UID is not set: Slurm calls this program")?;
    let uid = uid.parse().with_context(|| format!("SLURM_JOB_UID is no number: {uid:?}"))?;
    let (user, account, qos) = (variable("SLURM_JOB_USER"), variable("SLURM_JOB_ACCOUNT"), variable("SLURM_JOB_QOS"));
    let job = SlurmJob { id, uid, user, account, qos };
    // Not all versions tell a prolog; those that do tell both.
    if job.account.is_some() && job.qos.is_some() {
        return Ok(job);
    }
    let mut asked = Command::new(squeue);
    asked.args(["--noheader", "--states=all", FORMAT, "--jobs", &id.to_string()]);
    completed(job, &output(asked, within)?)
}

/// Columns of operators' making alone: a user may give a job any name, or comment, but no account or QOS that Slurm does not have. Each
/// element of an array has a number of its own.
const FORMAT: &str = "--format=%A|%T|%q|%a";

/// Output of a program of Slurm's, which has `within` to end.
///
/// # Errors
/// It cannot be run, fails, or takes longer.
pub fn output(mut program: Command, within: Duration) -> anyhow::Result<String> {
    let shown = program.get_program().display().to_string();
    program.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = program.spawn().with_context(|| format!("{shown} cannot be run"))?;
    let began = Instant::now();
    // It prints less than a pipe holds.
    while child.try_wait()?.is_none() {
        if began.elapsed() >= within {
            child.kill()?;
            child.wait()?;
            anyhow::bail!("{shown} did not answer within {within:?}");
        }
        std::thread::sleep(LOOK);
    }
    let output = child.wait_with_output()?;
    let why = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{shown} fails: {}", why.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A job with what [`FORMAT`] says of it besides.
fn completed(job: SlurmJob, text: &str) -> anyhow::Result<SlurmJob> {
    let id = job.id.to_string();
    let rows = text.lines().filter_map(|line| {
        // The rest of an array that waits has the number of one element.
        let [number, state, qos, account] = line.trim().splitn(4, '|').collect::<Vec<_>>().try_into().ok()?;
        (number == id && state != "PENDING").then_some([account, qos])
    });
    let rows: Vec<_> = rows.collect();
    let [[account, qos]] = rows[..] else {
        anyhow::bail!("Slurm tells of {} running jobs of number {id}, not of one", rows.len());
    };
    Ok(SlurmJob { account: job.account.or_else(|| said(account)), qos: job.qos.or_else(|| said(qos)), ..job })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(account: Option<&str>, qos: Option<&str>) -> SlurmJob {
        SlurmJob { id: 7, account: account.map(str::to_owned), qos: qos.map(str::to_owned), ..SlurmJob::default() }
    }

    #[test]
    fn account_and_qos_are_what_slurm_says() {
        let shown = |job, text| completed(job, text).expect("it tells of the job");
        let told = "8|RUNNING|urgent|biology\n7|PENDING|urgent|biology\n7|RUNNING|(null)|physics\n";
        assert_eq!(shown(job(None, None), told), job(Some("physics"), None));
        assert_eq!(shown(job(Some("biology"), None), told), job(Some("biology"), None), "what is known stays");
        assert_eq!(shown(job(None, Some("urgent")), "7|CONFIGURING|N/A|(null)"), job(None, Some("urgent")));
        for text in ["", "8|RUNNING|a|b\n", "7|RUNNING|a|b\n7|RUNNING|c|d\n", "7 RUNNING a b\n"] {
            assert!(completed(job(None, None), text).is_err(), "{text}");
        }
    }

    /// A `squeue` that prints each column as Slurm does: `%j` is the name that a user has chosen.
    #[test]
    fn a_name_that_is_made_to_mislead_is_not_asked_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let squeue = folder.path().join("squeue");
        let script = "for a; do case $a in --format=*) f=${a#--format=};; esac; done
            name='x Account=root QOS=urgent
7|RUNNING|urgent|root'
            case $f in *%j*|*%k*|*%o*|*%all*) printf '%s\\n' \"$name\";; esac
            printf '%s\\n' \"$f\" | sed 's/%A/7/; s/%T/RUNNING/; s/%q/normal/; s/%a/physics/'\n";
        std::fs::write(&squeue, script).expect("a file");
        let mut asked = Command::new("sh");
        asked.arg(&squeue).args(["--noheader", FORMAT]);
        let text = output(asked, Duration::from_secs(60)).expect("an answer");
        assert_eq!(completed(job(None, None), &text).expect("one"), job(Some("physics"), Some("normal")));
    }

    #[test]
    fn who_does_not_answer_is_not_waited_for_and_who_fails_says_why() {
        let sh = |script: &str| {
            let mut sh = Command::new("sh");
            sh.args(["-c", script]);
            sh
        };
        let late = output(sh("exec sleep 1000"), Duration::from_millis(50)).expect_err("it sleeps").to_string();
        assert!(late.contains("did not answer within 50ms"), "{late}");
        let why =
            output(sh("echo Invalid job id >&2; exit 1"), Duration::from_secs(60)).expect_err("no job").to_string();
        assert!(why.contains("Invalid job id"), "{why}");
        assert!(output(Command::new("/nowhere/squeue"), Duration::from_secs(60)).is_err());
    }
}
