//! Sizes that decide how a call goes by rails. All are estimates by what was measured of the parts; a sweep on GPUs, of 8 B to 64 MiB on
//! two and four hosts, is to set them. Payloads below `[cuda] rails_from` do not come here.
//!
//! All ranks must have the same, but for [`BOUNCE_BYTES_MIN`], [`DIRECT_BYTES_MIN`], [`KERNEL_BYTES_MAX`] and [`COMBINE_BLOCKS`], which are a rank's own.

use super::model::Rates;

/// Up to so much of a host's goes whole by every rail that needs it: fewer kernels, more bytes. A kernel takes some 5 us, in which a rail
/// of 400 Gbit/s moves 250 KB, and one over TCP 10 KB.
pub(super) const UNDIVIDED_BYTES: u64 = 16 << 10;
/// A rail moves at least so much in a slice of a long call; [`RATES`] say how much.
pub(super) const SLICE_BYTES_MIN: u64 = 64 << 10;
/// What slices of a long call go by. Of a slice of 4 MiB kernels took some 80 us on H200s, and an emulated NIC of 400 Gbit/s 93. A write
/// takes such a NIC 20 us: a credit's, the last message's and the flush's are a move's latency.
pub(super) const RATES: Rates =
    Rates { launch_ns: 10_000, kernel_bytes_per_us: 140_000, wire_bytes_per_us: 45_000, latency_ns: 60_000 };
/// What a rail of more than two hosts moves at least where hosts exchange parts of it: twice the moves, for fewer bytes.
pub(super) const EXCHANGE_BYTES_MIN: u64 = 64 << 10;
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
