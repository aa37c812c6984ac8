//! Times of kernels on GPUs, whose clocks differ.

mod clock_sync;
pub(crate) mod trace;
