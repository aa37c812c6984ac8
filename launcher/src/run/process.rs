//! State of a process as its host's agent told it: exit status, last words, success or failure.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde::{Serialize, Serializer};

use crate::logs::Tail;
use crate::spec::ProcessSpec;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// As its host tells.
    Status(ExitStatus),
    /// Its host's agent was lost, and ended it without a word.
    Lost,
    /// It never ran.
    NotStarted,
}

impl Outcome {
    /// Whether it went well.
    #[must_use]
    pub fn is_success(self) -> bool {
        self.code() == Some(0)
    }

    /// In the shell's manner: its exit code, or 128 and the signal's number; none where nobody knows.
    #[must_use]
    pub fn code(self) -> Option<u8> {
        let Outcome::Status(status) = self else { return None };
        let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
        Some(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
    }

    /// In words: `exit 3`, `SIGKILL`, `lost`.
    #[must_use]
    pub fn text(self) -> String {
        let status = match self {
            Outcome::Status(status) => status,
            Outcome::Lost => return "lost".to_owned(),
            Outcome::NotStarted => return "not started".to_owned(),
        };
        match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit {code}"),
            (None, Some(number)) => Signal::try_from(number)
                .map_or_else(|_| format!("signal {number}"), |signal| signal.as_str().to_owned()),
            (None, None) => "unknown".to_owned(),
        }
    }
}

impl Serialize for Outcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.text())
    }
}

/// A process of which the launcher has told an agent.
pub struct Process<'a> {
    /// Its kind.
    pub spec: &'a ProcessSpec,
    /// Its number on its host, once it runs.
    pub pid: Option<i32>,
    /// How it ended, once it has.
    pub outcome: Option<Outcome>,
    /// From its start to its end.
    pub after: Option<Duration>,
    /// Whether the launcher asked it to end.
    pub asked: bool,
    /// Whether all its output has come.
    pub is_drained: bool,
    /// Its last lines.
    pub tail: Tail,
}

impl<'a> Process<'a> {
    /// One that is about to start.
    #[must_use]
    pub fn new(spec: &'a ProcessSpec, tail: Tail) -> Self {
        Process { spec, pid: None, outcome: None, after: None, asked: false, is_drained: false, tail }
    }

    /// Whether it has not ended.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.outcome.is_none()
    }

    /// Takes note of its end; no output comes after one that its agent did not see.
    pub fn end(&mut self, outcome: Outcome, after: Option<Duration>) {
        self.is_drained |= !matches!(outcome, Outcome::Status(_));
        self.outcome = Some(outcome);
        self.after = after;
    }

    /// Its last lines, for an explanation.
    #[must_use]
    pub fn last_words(&self) -> String {
        let lines = self.tail.lines();
        if lines.is_empty() {
            "; it wrote nothing".to_owned()
        } else {
            format!("; its last lines:{}", indented(&lines))
        }
    }
}

/// Lines below each other, under what they explain.
#[must_use]
pub fn indented(lines: &[String]) -> String {
    lines.iter().map(|line| format!("\n    {line}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses_are_the_shells() {
        let from = |raw| Outcome::Status(ExitStatus::from_raw(raw));
        assert_eq!((from(3 << 8).code(), from(3 << 8).text()), (Some(3), "exit 3".to_owned()));
        assert_eq!((from(9).code(), from(9).text()), (Some(137), "SIGKILL".to_owned()));
        assert!(from(0).is_success() && !from(9).is_success() && !Outcome::Lost.is_success());
        assert_eq!(from(40).text(), "signal 40");
        assert_eq!(Outcome::Lost.code(), None);
    }
}
