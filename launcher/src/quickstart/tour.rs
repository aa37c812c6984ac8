//! The tour of `mccs-launch quickstart`: each step is a sentence, a command of `mccsctl`, and its output.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use serde_json::Value;

/// In the run's folder: its being there ends the ranks.
pub const ENOUGH: &str = "enough";
/// In the run's folder: what each rank has measured, with its number behind.
pub const SAID: &str = "measured";
/// How long the ranks may take to begin: a loaded machine is slow.
const BEGIN_WITHIN: Duration = Duration::from_secs(60);
/// Between two looks whether they have.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// For people to read a step.
const READ_FOR: Duration = Duration::from_secs(3);
/// Lines of the ranks' table, and a word of its head.
const LINES: usize = 8;
const COLUMN: &str = "redop";

/// A step: a sentence, and the command; `COMM` is the communicator's number.
type Step = (&'static str, &'static [&'static str]);

const WHILE_IT_RUNS: [Step; 5] = [
    (
        "Both ranks are processes that the service knows: each has a session, and memory that it shares with it.",
        &["sessions"],
    ),
    ("Together they have a communicator; the service runs its collectives and counts them.", &["communicators"]),
    ("Rates of one second: `mccsctl watch` shows them live, with tenants, links and hosts.", &["watch", "--once"]),
    (
        "A job that hangs has a culprit: this names the rank, link or host that a communicator waits for.",
        &["why-stuck", "COMM"],
    ),
    (
        "Tenants are owners of jobs, with quotas and weights; here there is the one that the launcher has made.",
        &["tenants"],
    ),
];
const AFTERWARDS: [Step; 1] =
    [("The ranks have ended: the service holds nothing of theirs any more.", &["communicators"])];

/// Shows a run's service step by step.
#[derive(Args)]
pub struct Tour {
    /// The operator's tool.
    #[arg(long)]
    ctl: PathBuf,
    /// The service's control socket.
    #[arg(long)]
    socket: PathBuf,
    /// The run's folder.
    #[arg(long)]
    folder: PathBuf,
    /// The ranks have ended.
    #[arg(long)]
    after: bool,
    /// With time to read.
    #[arg(long)]
    slowly: bool,
}

impl Tour {
    /// Shows all steps.
    ///
    /// # Errors
    /// `mccsctl` fails, or the ranks do not begin.
    pub fn run(&self) -> Result<()> {
        if self.after {
            let path = self.folder.join(format!("{SAID}.0"));
            let said = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            println!("\n# Rank 0 has measured meanwhile, and found no wrong element; bandwidth is in GB/s:");
            measured(&said).for_each(|line| println!("{line}"));
            return AFTERWARDS.iter().try_for_each(|step| self.show(step, ""));
        }
        let communicator = self.await_communicator()?.to_string();
        WHILE_IT_RUNS.iter().try_for_each(|step| self.show(step, &communicator))?;
        let enough = self.folder.join(ENOUGH);
        std::fs::write(&enough, "").with_context(|| format!("cannot write {}", enough.display()))
    }

    fn show(&self, (sentence, words): &Step, communicator: &str) -> Result<()> {
        let words: Vec<&str> = words.iter().map(|word| if *word == "COMM" { communicator } else { word }).collect();
        println!("\n# {sentence}\n$ mccsctl {}", words.join(" "));
        print!("{}", self.ask(&words)?);
        if self.slowly {
            std::thread::sleep(READ_FOR);
        }
        Ok(())
    }

    fn ask(&self, words: &[&str]) -> Result<String> {
        let output = Command::new(&self.ctl).arg("--socket").arg(&self.socket).args(words).output();
        let output = output.with_context(|| format!("{} cannot be started", self.ctl.display()))?;
        let complaint = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "mccsctl {} fails: {}", words.join(" "), complaint.trim());
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Number of the ranks' communicator, once it has done something.
    fn await_communicator(&self) -> Result<u64> {
        let began = Instant::now();
        while began.elapsed() < BEGIN_WITHIN {
            if let Some(number) = busy(&self.ask(&["--json", "communicators"])?) {
                return Ok(number);
            }
            std::thread::sleep(LOOK_EVERY);
        }
        anyhow::bail!("the ranks did nothing for {} s", BEGIN_WITHIN.as_secs())
    }
}

/// The head of the ranks' table, and its last lines.
fn measured(said: &str) -> impl Iterator<Item = &str> {
    let lines: Vec<&str> = said.lines().collect();
    let last = lines.len().saturating_sub(LINES);
    let is_shown = move |(at, line): &(usize, &str)| *at >= last || line.contains(COLUMN);
    lines.into_iter().enumerate().filter(is_shown).map(|(_, line)| line)
}

/// Number of the first communicator that has done operations.
fn busy(document: &str) -> Option<u64> {
    let document: Value = serde_json::from_str(document).ok()?;
    let communicators = document["communicators"].as_array()?;
    let first = communicators.iter().find(|one| one["operations"].as_u64().is_some_and(|done| done > 0))?;
    first["communicator"].as_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_what_a_rank_has_measured_the_head_and_the_end_are_shown() {
        let rows: Vec<String> = (0..20).map(|row| format!("row {row}")).collect();
        let said = format!("# tenant\noperation redop busbw\n{}\n", rows.join("\n"));
        let shown: Vec<&str> = measured(&said).collect();
        assert_eq!(
            (shown.len(), shown[0], shown[1], shown[LINES]),
            (LINES + 1, "operation redop busbw", "row 12", "row 19")
        );
        assert_eq!(measured("redop\nrow").collect::<Vec<_>>(), ["redop", "row"]);
    }

    #[test]
    fn a_communicator_is_shown_once_it_moves() {
        let document =
            |operations: u64| format!("{{\"communicators\":[{{\"communicator\":4,\"operations\":{operations}}}]}}");
        assert_eq!((busy(&document(0)), busy(&document(1))), (None, Some(4)));
        assert_eq!((busy("{\"communicators\":[]}"), busy("no JSON")), (None, None));
    }
}
