//! Thresholds of a rank's stages by rails: kernel or copy engine, bounce or direct (GPUDirect).
//! They are its own, while those of `mccs_rails` are the same on all ranks. All are estimates.
//! Payloads below `[cuda] rails_from` do not come here.

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
