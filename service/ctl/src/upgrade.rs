//! `mccsctl upgrade`: another program goes on as the service, with all its sessions.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use mccs_control::{ControlAnswer, ControlRequest, UpgradeView, call_within};

/// Longer than all steps of a hand-over may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(90);

/// Replace the service's program while jobs run. The new program reads service.toml, and goes on with all
/// sessions. If it cannot, the old one goes on, and says why.
#[derive(Args, Default)]
pub struct Upgrade {
    /// The new mccs-service, where service.binary of service.toml is a folder: a program in it. Default: the
    /// program that service.binary names, or else the file that the running one was started from.
    binary: Option<PathBuf>,
    /// End sessions that cannot go on: in communicators of several hosts, on GPUs, with port channels, or by
    /// service.toml not any more. Without it they are listed, and nothing is done.
    #[arg(long)]
    force: bool,
}

impl Upgrade {
    pub fn run(&self, socket: &Path, json: bool) -> anyhow::Result<()> {
        let (binary, force) = (self.binary.clone(), self.force);
        match call_within(socket, &ControlRequest::Upgrade { binary, force }, ANSWER_WITHIN)? {
            ControlAnswer::Upgraded(view) if json => say!("{}", serde_json::to_string_pretty(&view)?),
            ControlAnswer::Upgraded(UpgradeView { pid, version, sessions, ended, communicators, gap_us }) => {
                say!(
                    "process {pid}, version {version}, goes on with {sessions} sessions and {communicators} communicators; \
                     none was served for {:.1} ms",
                    gap_us as f64 / 1000.0
                );
                if ended > 0 {
                    say!("{ended} sessions have ended: the service's log says why");
                }
            }
            ControlAnswer::Refused(reason) => anyhow::bail!("refused, and the service goes on as before: {reason}"),
            _ => anyhow::bail!("the service answers something else"),
        }
        Ok(())
    }
}
