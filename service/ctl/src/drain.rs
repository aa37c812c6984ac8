//! `mccsctl drain`: empties a host, so that its service can be stopped without harm to a job.

use std::path::Path;
use std::time::{Duration, Instant};

use clap::Args;
use mccs_control::{ControlAnswer, ControlRequest, DrainView, call};

/// How often it is looked whether the host is empty.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Empty this host: the service refuses new processes, and sessions go on until they end. Holds until
/// --undo or a restart.
#[derive(Args)]
pub struct Drain {
    /// Take new processes again.
    #[arg(long)]
    undo: bool,
    /// The reason, for refused processes, `watch` and the history.
    #[arg(long, value_name = "TEXT", conflicts_with = "undo")]
    reason: Option<String>,
    /// Return when no sessions are left, or fail after so many seconds. The host stays drained either way.
    #[arg(long, value_name = "SECONDS", conflicts_with = "undo")]
    wait: Option<f64>,
}

impl Drain {
    pub fn run(&self, socket: &Path, json: bool) -> anyhow::Result<()> {
        let wait = self.wait.map(Duration::try_from_secs_f64).transpose();
        let wait = wait.map_err(|_| anyhow::anyhow!("--wait is a number of seconds, and none below 0"))?;
        let mut view = ask(socket, Some(!self.undo), self.reason.clone())?;
        let asked_at = Instant::now();
        while wait.is_some_and(|wait| asked_at.elapsed() < wait) && view.sessions > 0 {
            std::thread::sleep(LOOK_EVERY);
            view = ask(socket, None, None)?;
            anyhow::ensure!(view.draining, "somebody else has taken it back: the host takes new processes");
        }
        if json {
            say!("{}", serde_json::to_string_pretty(&view)?);
        }
        let DrainView { sessions, communicators, draining, .. } = view;
        anyhow::ensure!(
            wait.is_none() || sessions == 0,
            "{sessions} sessions with {communicators} communicators are left"
        );
        if !json {
            let state = if draining { "no new processes" } else { "new processes are taken" };
            say!("{state}; {sessions} sessions with {communicators} communicators");
        }
        Ok(())
    }
}

fn ask(socket: &Path, drains: Option<bool>, reason: Option<String>) -> anyhow::Result<DrainView> {
    match call(socket, &ControlRequest::Drain { drains, reason })? {
        ControlAnswer::Drain(view) => Ok(view),
        ControlAnswer::Refused(reason) => anyhow::bail!("refused: {reason}"),
        _ => anyhow::bail!("the service answers something else"),
    }
}
