//! What became of a run: one line a process, the cause of a failure, the exit status. For people and as JSON.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use crate::process::{Process, shell_code, status_text};
use crate::run::Cause;
use crate::spec::{Plan, ProcessSpec, Role};

/// What became of one process.
#[derive(Debug, Serialize)]
pub struct Line {
    /// What it was for.
    pub role: Role,
    /// Its number; none if it was not started.
    pub pid: Option<i32>,
    /// `exit 3`, `SIGKILL`, `not started`.
    pub status: String,
    /// Exit status in the shell's manner.
    pub code: Option<u8>,
    /// Whether the launcher asked it to end.
    pub ended_by_launcher: bool,
    /// How long it ran.
    pub seconds: Option<f64>,
    /// Keeps its output.
    pub log: PathBuf,
}

/// What became of a run.
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
    fn new(spec: &ProcessSpec, process: Option<&Process>) -> Self {
        let ended = process.and_then(|process| process.ended);
        Line {
            role: spec.role.clone(),
            pid: process.map(|process| process.pid.as_raw()),
            status: ended.map_or_else(|| "not started".to_owned(), |ended| status_text(ended.status)),
            code: ended.map(|ended| shell_code(ended.status)),
            ended_by_launcher: process.is_some_and(|process| process.asked),
            seconds: ended.map(|ended| ended.after.as_secs_f64()),
            log: spec.log.clone(),
        }
    }
}

impl Summary {
    /// Sums up a run whose processes have all ended.
    #[must_use]
    pub fn new(plan: &Plan, processes: &[Process], cause: Option<Cause>) -> Self {
        let exit_code = cause.as_ref().map_or(0, |cause| cause.exit_code);
        let lines = plan.processes().map(|spec| Line::new(spec, processes.iter().find(|p| p.role == spec.role)));
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
        let names: Vec<String> = self.processes.iter().map(|line| line.role.to_string()).collect();
        let width = names.iter().map(String::len).max().unwrap_or(0).max(7);
        writeln!(f, "\n{:width$}  {:>8}  {:>9}  status", "process", "pid", "seconds")?;
        for (line, name) in self.processes.iter().zip(&names) {
            let pid = line.pid.map_or("-".to_owned(), |pid| pid.to_string());
            let seconds = line.seconds.map_or("-".to_owned(), |s| format!("{s:.3}"));
            let asked = if line.ended_by_launcher { " (asked to end)" } else { "" };
            writeln!(f, "{name:width$}  {pid:>8}  {seconds:>9}  {}{asked}", line.status)?;
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
