//! Starts one process a rank: this program again, with what each is told.

use std::ffi::OsString;
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::arguments::exit;

/// How long the other ranks have to say what they fail with, once one has failed.
const FAIL_TOGETHER: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The `main` of such a program: `run` as the rank that it was started for, or `start` all of them.
#[must_use]
pub fn run_or_start(
    program: &str,
    rank: Option<u32>,
    run: impl FnOnce(u32) -> anyhow::Result<()>,
    start: impl FnOnce() -> anyhow::Result<()>,
) -> ExitCode {
    exit(program, rank.map_or_else(start, |rank| run(rank).with_context(|| format!("rank {rank}"))))
}

/// Environment and arguments of one rank's process, beside those of all.
#[derive(Debug, Default)]
pub struct Own {
    /// Arguments, behind the others.
    pub arguments: Vec<OsString>,
    /// Variables of its environment.
    pub environment: Vec<(String, String)>,
}

impl From<Vec<OsString>> for Own {
    fn from(arguments: Vec<OsString>) -> Self {
        Own { arguments, ..Own::default() }
    }
}

/// The primary context of a rank's GPU, of those in their order.
///
/// # Errors
/// There is no such GPU, or the driver's refusal.
pub fn context_of(gpu: u32) -> anyhow::Result<mccs_cuda::Context> {
    let gpus = mccs_cuda::gpus()?;
    let found = gpus.get(gpu as usize).with_context(|| format!("GPU {gpu} of {}", gpus.len()))?;
    Ok(mccs_cuda::Context::primary(found)?)
}

/// Starts this program once a rank, with the same arguments and what `own` gives for it, and waits for all.
///
/// # Errors
/// A process could not be started, or failed: which ones, with their status.
pub fn run_ranks<O: Into<Own>>(nranks: u32, own: impl Fn(u32) -> O) -> anyhow::Result<()> {
    run_ranks_within(nranks, None, own)
}

/// As [`run_ranks`], for so long at most. Ranks that wait for one that has failed are ended soon.
///
/// # Errors
/// As [`run_ranks`]; and that the time is over.
pub fn run_ranks_within<O: Into<Own>>(
    nranks: u32,
    most: Option<Duration>,
    own: impl Fn(u32) -> O,
) -> anyhow::Result<()> {
    let program = std::env::current_exe()?;
    let start = |rank: u32| {
        let Own { arguments, environment } = own(rank).into();
        Command::new(&program).args(std::env::args_os().skip(1)).args(arguments).envs(environment).spawn()
    };
    let mut ranks = Ranks((0..nranks).map(start).collect::<Result<Vec<_>, _>>()?);
    let mut until = most.map(|most| Instant::now() + most);
    loop {
        let ends = ranks.0.iter_mut().map(Child::try_wait).collect::<Result<Vec<_>, _>>()?;
        let failed = (0..).zip(&ends).filter_map(|(rank, end)| Some((rank, end.filter(|end| !end.success())?)));
        let failed: Vec<_> = failed.map(|(rank, status): (u32, _)| format!("rank {rank}: {status}")).collect();
        let is_over = until.is_some_and(|until| until <= Instant::now());
        if ends.iter().all(Option::is_some) || is_over {
            ensure!(failed.is_empty(), "{}", failed.join("; "));
            ensure!(
                !is_over,
                "ranks take longer than {:?}: a GPU or the service does not go on",
                most.unwrap_or_default()
            );
            return Ok(());
        }
        if !failed.is_empty() {
            let soon = Instant::now() + FAIL_TOGETHER;
            until = Some(until.map_or(soon, |until| until.min(soon)));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Processes that end when nobody waits for them any more.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            // It may have ended.
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}
