//! `mccsctl watch`: a live view in the terminal, like top.

use std::collections::BTreeMap;
use std::io::{IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Args;
use mccs_control::documents::overview;
use mccs_control::overview::Overview;
use mccs_control::{ControlAnswer, ControlRequest, call};
use mccs_telemetry::straggler::Accounts;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use crate::view::{Size, view};

/// Shown where the output is no terminal that says how large it is: whoever reads it later wants all of it.
const SIZE: Size = Size { columns: usize::MAX, lines: usize::MAX };
/// Clears the screen and what has scrolled off it, and begins at the top; the cursor would only flicker.
const BEGIN: &str = "\x1b[?25l\x1b[2J\x1b[H";
/// Gives the cursor back.
const END: &str = "\x1b[?25h\n";

/// Communicators of several hosts whose other hosts are asked at a look, the first: each asks all of them.
const ASKED_MAX: usize = 16;

/// A service's answers at one time.
#[derive(serde::Serialize)]
pub struct Snapshot {
    /// The service's overview.
    #[serde(flatten)]
    pub overview: Overview,
    /// Accounts of all hosts of a communicator, by its number.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub accounts: BTreeMap<u64, Box<Accounts>>,
}

/// Watch tenants, communicators, late ranks and paths until interrupted.
#[derive(Args)]
pub struct Watch {
    /// Seconds between two looks. Rates are of that time.
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS")]
    interval: f64,
    /// Look twice, show once, and end.
    #[arg(long)]
    once: bool,
}

/// Set by the handler of SIGINT and SIGTERM.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn interrupt(_: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

impl Watch {
    /// Looks and shows until it is interrupted. JSON: a line a look.
    pub fn run(&self, socket: &Path, json: bool) -> anyhow::Result<()> {
        anyhow::ensure!((0.05..=3600.0).contains(&self.interval), "--interval is from 0.05 to 3600 seconds");
        let interval = Duration::from_secs_f64(self.interval);
        let on_screen = std::io::stdout().is_terminal() && !self.once && !json;
        if on_screen {
            let action = SigAction::new(SigHandler::Handler(interrupt), SaFlags::empty(), SigSet::empty());
            for signal in [Signal::SIGINT, Signal::SIGTERM] {
                // SAFETY: the handler only stores to an atomic.
                unsafe { sigaction(signal, &action) }?;
            }
        }
        let watched = self.look_on(socket, json, on_screen, interval);
        if on_screen {
            // An earlier error is the one that counts.
            let mut out = std::io::stdout().lock();
            let ended = write!(out, "{END}").and_then(|()| out.flush());
            watched?;
            ended?;
            return Ok(());
        }
        watched
    }

    fn look_on(&self, socket: &Path, json: bool, on_screen: bool, interval: Duration) -> anyhow::Result<()> {
        let mut before = snapshot(socket)?;
        if json && !self.once {
            say!("{}", serde_json::to_string(&before)?);
        }
        loop {
            // A signal ends the sleep: `std::thread::sleep` would go on.
            let _ = nix::poll::poll(
                &mut [],
                nix::poll::PollTimeout::try_from(interval).unwrap_or(nix::poll::PollTimeout::MAX),
            );
            if INTERRUPTED.load(Ordering::Relaxed) {
                return Ok(());
            }
            let now = snapshot(socket)?;
            let text = if json {
                serde_json::to_string(&now)?
            } else if on_screen {
                format!("{BEGIN}{}", view(&before, &now, size_of_terminal()))
            } else {
                view(&before, &now, SIZE)
            };
            say!("{text}");
            if self.once {
                return Ok(());
            }
            before = now;
        }
    }
}

fn snapshot(socket: &Path) -> anyhow::Result<Snapshot> {
    let overview = overview(socket)?;
    let across = overview.communicators.iter().filter(|comm| comm.hosts.len() > 1 && comm.operations > 0);
    let asked: Vec<u64> = across.map(|comm| comm.communicator).take(ASKED_MAX).collect();
    let ask = |communicator: u64| match call(socket, &ControlRequest::Accounts { communicator })? {
        ControlAnswer::Stuck(report) => anyhow::Ok(Some((communicator, report.hosts.into()))),
        // It has ended meanwhile.
        _ => Ok(None),
    };
    // At a time: a host that does not answer is waited for once, not for each of them.
    let answers: anyhow::Result<Vec<_>> = std::thread::scope(|scope| {
        let threads: Vec<_> = asked.iter().map(|communicator| scope.spawn(move || ask(*communicator))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread that does not panic")).collect()
    });
    let accounts = answers?.into_iter().flatten().collect();
    Ok(Snapshot { overview, accounts })
}

fn size_of_terminal() -> Size {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the request writes a `winsize`, which lives until the call has returned.
    let asked = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    if asked != 0 || size.ws_col == 0 || size.ws_row < 2 {
        return SIZE;
    }
    // The last line stays free, or the first would scroll off.
    Size { columns: size.ws_col.into(), lines: usize::from(size.ws_row) - 1 }
}
