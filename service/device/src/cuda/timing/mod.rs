//! When kernels ran, on clocks that differ.

mod clock_sync;
pub(crate) mod trace;
