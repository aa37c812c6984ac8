//! Thresholds of a rank's stages by rails: kernel or copy engine, bounce or direct (GPUDirect).
//! They are its own, while those of `mccs_rails` are the same on all ranks. All are estimates.
//! Payloads below `[cuda] rails_from` do not come here.

use std::sync::atomic::{AtomicBool, Ordering};

use mccs_rails::Forks;

/// Whether all calls of several slices are to be forked.
static FORKS_ALL: AtomicBool = AtomicBool::new(false);

/// For tests, whose teams are too small for calls to be forked: has each call that can be forked, of communicators that are made from now on.
/// All ranks' processes have to ask for it.
pub fn fork_all_calls() {
    FORKS_ALL.store(true, Ordering::Relaxed);
}

/// Which calls of a communicator that is made now are forked.
pub(super) fn forks() -> Forks {
    if FORKS_ALL.load(Ordering::Relaxed) { Forks::Always } else { Forks::WhereItPays }
}

/// A rail's part of a call from which copy engines bring slices to slots and back: they take longer to begin than kernels, which hold
/// multiprocessors.
pub(super) const BOUNCE_BYTES_MIN: u64 = 256 << 10;
/// A rail's part of a call from which it is in memory of the GPU that NICs reach. On emulated NICs all-gathers of 256 KiB took 370 us there,
/// and 68 us by the slots; of 2 MiB 196 and 243.
pub(super) const DIRECT_BYTES_MIN: u64 = 256 << 10;
/// Longest copy into a slot or out of it that the kernel does which tells and waits: from there on copy engines are as fast.
pub(super) const KERNEL_BYTES_MAX: u64 = 64 << 10;
/// Blocks that combine: they read over a bus, which a few keep busy.
pub(super) const COMBINE_BLOCKS: u32 = 32;
