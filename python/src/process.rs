//! State of one process. A session's socket and memory are shared with children that are forked: these must not use them, nor end
//! them.

use std::mem::ManuallyDrop;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use mccs::ErrorClass;
use pyo3::prelude::*;

use crate::errors::{self, Caller};

const FORKED: &str = "this process was forked from the one whose session with the service this is, and cannot use it: connect anew, or \
                      start processes by \"spawn\"";

/// How often this process' line was forked: asking for the process' number is a system call each time.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn count_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

fn forks() -> u32 {
    static COUNT: Once = Once::new();
    COUNT.call_once(|| {
        // SAFETY: a function that only adds to a number. It fails without memory, which ends the process soon enough.
        let _ = unsafe { libc::pthread_atfork(None, None, Some(count_fork)) };
    });
    FORKS.load(Ordering::Relaxed)
}

/// A value that a forked child neither uses nor drops.
pub(crate) struct OfProcess<T> {
    forks: u32,
    value: ManuallyDrop<T>,
}

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        OfProcess { forks: forks(), value: ManuallyDrop::new(value) }
    }

    /// `None` in a child that was forked after it was made.
    pub(crate) fn here(&self) -> Option<&T> {
        (self.forks == forks()).then_some(&*self.value)
    }

    /// # Errors
    /// In a child that was forked after it was made.
    pub(crate) fn get(&self) -> PyResult<&T> {
        self.here().ok_or_else(|| errors::new(ErrorClass::InvalidUsage, FORKED.into()))
    }

    /// As [`OfProcess::get`], for a rank's call.
    pub(crate) fn get_for(&self, py: Python<'_>, caller: Caller, call: &str) -> PyResult<&T> {
        self.here().ok_or_else(|| caller.error(py, call, ErrorClass::InvalidUsage, FORKED))
    }
}

impl<T: Clone> Clone for OfProcess<T> {
    fn clone(&self) -> Self {
        OfProcess { forks: self.forks, value: self.value.clone() }
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.forks == forks() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}
