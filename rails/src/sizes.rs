//! Sizes that decide how a call is cut. All are estimates by what was measured of the parts; a sweep on GPUs, of 8 B to 64 MiB on two and
//! four hosts, is to set them. All ranks must have the same.

use crate::model::Rates;

/// Slices under way: one that the team combines, two that travel, one that is taken out.
pub const SLOTS: u64 = 4;
/// Bytes of a slot, of all rails of a rank together.
pub const SLOT_BYTES: u64 = 8 << 20;
/// Up to so much of a host's goes whole by every rail that needs it: fewer kernels, more bytes. A kernel takes some 5 us, in which a rail
/// of 400 Gbit/s moves 250 KB, and one over TCP 10 KB.
const UNDIVIDED_BYTES: u64 = 16 << 10;
/// A rail moves at least so much in a slice of a long call; [`RATES`] say how much.
pub(crate) const SLICE_BYTES_MIN: u64 = 64 << 10;
/// What slices of a long call go by. Of a slice of 4 MiB kernels took some 80 us on H200s, and an emulated NIC of 400 Gbit/s 93. A write
/// takes such a NIC 20 us: a credit's, the last message's and the flush's are a move's latency.
pub(crate) const RATES: Rates =
    Rates { launch_ns: 10_000, kernel_bytes_per_us: 140_000, wire_bytes_per_us: 45_000, latency_ns: 60_000 };
/// What a rail of more than two hosts moves at least where hosts exchange parts of it: twice the moves, for fewer bytes.
const EXCHANGE_BYTES_MIN: u64 = 64 << 10;

/// Sizes, in elements: the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// A slot of a rail of the rank that has most rails.
    pub slot: u64,
    /// Up to so much of a host's is not divided among rails, which takes fewer stages.
    pub undivided: u64,
    /// What a rail moves in a slice, if its slots have room and the call has as much.
    pub slice: u64,
    /// From here on rails of more than two hosts exchange parts of what they combine, instead of all of it.
    pub exchange_from: u64,
}

impl Sizes {
    /// For slots of so many bytes, and elements of so many; in the shortest slices, until [`Plan::in_best_slices`](crate::Plan::in_best_slices).
    #[must_use]
    pub fn new(slot_bytes: u64, element_bytes: u64) -> Self {
        Sizes {
            slot: slot_bytes / element_bytes,
            undivided: UNDIVIDED_BYTES / element_bytes,
            slice: SLICE_BYTES_MIN / element_bytes,
            exchange_from: EXCHANGE_BYTES_MIN / element_bytes,
        }
    }
}
