//! A loan: what this process holds is still another's, so that nothing of it is given back or removed.
//!
//! A service that takes over from another one has sockets and memory of living jobs before it is in charge. If it fails then, they are
//! the other's: its values are dropped without a trace.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

static IS_ON: AtomicBool = AtomicBool::new(false);
static ENDING: Mutex<()> = Mutex::new(());
static ENDED: Condvar = Condvar::new();

/// Descriptors that the process receives from now on are another's. Before anything is received.
pub fn begin() {
    IS_ON.store(true, Ordering::Release);
}

/// Descriptors that the process holds are its own from now on.
pub fn end() {
    let ending = ENDING.lock().unwrap_or_else(PoisonError::into_inner);
    IS_ON.store(false, Ordering::Release);
    drop(ending);
    ENDED.notify_all();
}

/// Whether what the process holds is another's.
#[must_use]
pub fn is_on() -> bool {
    IS_ON.load(Ordering::Acquire)
}

/// Returns when what the process holds is its own.
pub fn wait_for_end() {
    if !is_on() {
        return;
    }
    let mut ending = ENDING.lock().unwrap_or_else(PoisonError::into_inner);
    while is_on() {
        ending = ENDED.wait(ending).unwrap_or_else(PoisonError::into_inner);
    }
}
