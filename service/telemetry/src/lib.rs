//! Counters that engines raise, the flight recorder, and what is made of them: traces, profiles,
//! diagnoses.
//!
//! Imports plain types (`mccs-model`, `mccs-config`, `mccs-ipc`) and knows no engine, device or transport: they hand it numbers. The data path
//! only touches atomics of the communicator at hand.
//!
//! The most important: [`recorder::Recorder`], what an engine did last; [`flows::FlowTable`], what goes to and from other hosts;
//! [`stuck::StuckReport`], why a communicator does not go on.

pub mod bandwidth;
pub mod counter_sanity;
pub mod failed;
pub mod flows;
pub mod histogram;
mod host;
mod log_budget;
pub mod missing_ranks;
pub mod placed;
pub mod profile;
pub mod recorder;
pub mod straggler;
pub mod stuck;
pub mod ticks;
pub mod trace;

use std::sync::{Mutex, PoisonError};

pub use self::host::{CommonTime, GpuInfo, HostInfo};
pub use self::log_budget::{LogBudget, lines_suppressed, resume_lines_suppressed};

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
