//! Pins threads to cores of their own, so that what is measured does not depend on the scheduler.

use anyhow::Context as _;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// Cores that this process may use.
///
/// # Errors
/// The kernel's refusal.
pub fn cores() -> anyhow::Result<Vec<usize>> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).context("cannot ask for the cores of this process")?;
    Ok((0..CpuSet::count()).filter(|core| allowed.is_set(*core).unwrap_or(false)).collect())
}

/// Keeps the calling thread on one core.
///
/// # Errors
/// There is no such core, or this process may not use it.
pub fn pin(core: usize) -> anyhow::Result<()> {
    let mut only = CpuSet::new();
    only.set(core)?;
    sched_setaffinity(Pid::from_raw(0), &only).with_context(|| format!("cannot run on core {core}"))
}
