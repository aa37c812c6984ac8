//! Summary of a run: one line a process, the cause of a failure, the exit status. For people and as
//! JSON.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use crate::run::{Cause, Outcome, Process};
use crate::spec::{Plan, ProcessSpec, Role};

/// The result of one process.
#[derive(Debug, Serialize)]
pub struct Line {
    /// Its purpose.
    pub role: Role,
    /// Its name for people.
    #[serde(skip)]
    pub label: String,
    /// Name of its host.
    pub host: String,
    /// Its number there; none if it was not started.
    pub pid: Option<i32>,
    /// `exit 3`, `SIGKILL`, `lost`, `not started`.
    pub status: Outcome,
    /// Exit status in the shell's manner; none where nobody knows.
    pub code: Option<u8>,
    /// Whether the launcher asked it to end.
    pub ended_by_launcher: bool,
    /// How long it ran.
    pub seconds: Option<f64>,
    /// Keeps its output.
    pub log: PathBuf,
}

/// The result of a run.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// The launcher's exit status; 0 only where every process ended well.
    pub exit_code: u8,
    /// The first failure.
    pub cause: Option<String>,
    /// Folder of the logs; none where it was removed.
    pub output_dir: Option<PathBuf>,
    /// Every process of the plan.
    pub processes: Vec<Line>,
}

impl Line {
    fn new(plan: &Plan, spec: &ProcessSpec, process: Option<&Process<'_>>) -> Self {
        let status = process.and_then(|process| process.outcome).unwrap_or(Outcome::NotStarted);
        Line {
            role: spec.role.clone(),
            label: spec.label.clone(),
            host: plan.hosts[spec.host].name.clone(),
            pid: process.and_then(|process| process.pid),
            status,
            code: status.code(),
            ended_by_launcher: process.is_some_and(|process| process.asked),
            seconds: process.and_then(|process| process.after).map(|after| after.as_secs_f64()),
            log: spec.log.clone(),
        }
    }
}

impl Summary {
    /// Sums up a run whose processes have all ended.
    #[must_use]
    pub fn new(plan: &Plan, processes: &[Process<'_>], cause: Option<Cause>) -> Self {
        let exit_code = cause.as_ref().map_or(0, |cause| cause.exit_code);
        let of = |spec: &ProcessSpec| processes.iter().find(|process| process.spec.id == spec.id);
        let lines = plan.processes().map(|spec| Line::new(plan, spec, of(spec)));
        Summary {
            exit_code,
            cause: cause.map(|cause| cause.text),
            output_dir: (exit_code != 0 || plan.keep_output).then(|| plan.output_dir.clone()),
            processes: lines.collect(),
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.processes.iter().map(|line| line.label.len()).max().unwrap_or(0).max(7);
        writeln!(f, "\n{:width$}  {:>8}  {:>9}  status", "process", "pid", "seconds")?;
        for line in &self.processes {
            let pid = line.pid.map_or("-".to_owned(), |pid| pid.to_string());
            let seconds = line.seconds.map_or("-".to_owned(), |s| format!("{s:.3}"));
            let asked = if line.ended_by_launcher { " (asked to end)" } else { "" };
            writeln!(f, "{:width$}  {pid:>8}  {seconds:>9}  {}{asked}", line.label, line.status.text())?;
        }
        if let Some(dir) = &self.output_dir {
            writeln!(f, "output in {}", dir.display())?;
        }
        match &self.cause {
            None => f.write_str("all processes ended well"),
            Some(cause) => write!(f, "failed: {cause}"),
        }
    }
}
