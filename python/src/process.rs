//! What belongs to one process. A session's socket and memory are shared with children that are forked: these must not use them, nor
//! end them.

use std::mem::ManuallyDrop;

use mccs::ErrorClass;
use pyo3::prelude::*;

use crate::errors;

/// A value that a forked child neither uses nor drops.
pub(crate) struct OfProcess<T> {
    process: u32,
    value: ManuallyDrop<T>,
}

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        OfProcess { process: std::process::id(), value: ManuallyDrop::new(value) }
    }

    /// # Errors
    /// In a child that was forked after it was made.
    pub(crate) fn get(&self) -> PyResult<&T> {
        if self.process == std::process::id() {
            return Ok(&self.value);
        }
        let message = format!(
            "this process was forked from process {}, whose session with the service it cannot use: connect anew, or start \
             processes by \"spawn\"",
            self.process
        );
        Err(errors::new(ErrorClass::InvalidUsage, message))
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}
