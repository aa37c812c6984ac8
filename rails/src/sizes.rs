//! Sizes of hierarchical collectives: slots, least slice, short calls that stay whole, rates of the
//! parts. All are estimates by what was measured of the parts; a sweep on GPUs, of 8 B to 64 MiB on
//! two and four hosts, is to set them. All ranks must have the same.

use mccs_ipc::device_initiated::MULTIPROCESSORS_KEPT_FREE;

use crate::cost::{Forked, Rates};

/// Bytes of a rank's slots, of all its rails together.
pub const SLOTS_BYTES: u64 = 32 << 20;
/// Slices under way: one that the team combines, two that travel, one that is taken out.
pub(crate) const SLOTS: u64 = 4;
/// The same of slices that travel twice, as those of all-reduces of more than two hosts. Six have too short slices, as simulated.
const SLOTS_OF_TWO_MOVES: u64 = 5;
/// Most slots.
pub const SLOTS_MAX: u64 = SLOTS_OF_TWO_MOVES;
/// Slots begin at whole pages.
const SLOT_ALIGN: u64 = 4096;
/// Up to so much of a host's goes whole by every rail that needs it: fewer kernels, more bytes. A kernel takes some 5 us, in which a rail
/// of 400 Gbit/s moves 250 KB, and one over TCP 10 KB.
const UNDIVIDED_BYTES: u64 = 16 << 10;
/// A rail moves at least so much in a slice of a long call; [`RATES`] say how much.
pub(crate) const SLICE_BYTES_MIN: u64 = 64 << 10;
/// Rates by which slices and streams of a long call are chosen. For a slice of 4 MiB, kernels of two GPUs took some 80 us on H200s, and an
/// emulated NIC of 400 Gbit/s 93. Collectives of 64 MiB and more send 300 GB/s from each of two and of eight H200s, whose NVLink has 372. A
/// write takes such a NIC 20 us: a credit's, the last message's and the flush's are a move's latency.
pub(crate) const RATES: Rates = Rates {
    team_ns: 10_000,
    team_bytes_per_us: 300_000,
    own_ns: 5_000,
    own_bytes_per_us: 340_000,
    link_bytes_per_us: 372_000,
    wire_bytes_per_us: 45_000,
    latency_ns: 60_000,
    copied_bytes_per_us: None,
    // All-gathers and reduce-scatters of 64 MiB take 1.06 and 1.09 times as long with 48 blocks as with 96, and 1.38 and 1.44 times with
    // 32.
    forked: Forked { call_ns: 10_000, segment_ns: 3_000, team_percent: 117, gain_percent_min: 5 },
};
/// The same where a rank's data are copied to memory of the host and back, by copy engines over PCIe.
pub(crate) const BOUNCED: Rates = Rates { copied_bytes_per_us: Some(40_000), ..RATES };
/// Blocks of a team's kernel of a forked call: no more gain anything beside another such kernel, and fewer do not keep links busy.
const FORKED_BLOCKS: std::ops::RangeInclusive<u32> = 32..=42;

/// Most blocks of a team's kernel of a call whose segments have streams of their own, on GPUs of which each has so many multiprocessors; none
/// where no call may be forked.
///
/// Such a call has two kernels at a time whose blocks wait for those of other ranks. Ranks may come to two such calls, of two communicators, in
/// different orders. Any three of the four kernels leave room for blocks of the fourth ([`MULTIPROCESSORS_KEPT_FREE`]). So on all ranks blocks of
/// each run, and end.
#[must_use]
pub fn forked_blocks(multiprocessors: u32) -> Option<u32> {
    let blocks = multiprocessors.saturating_sub(MULTIPROCESSORS_KEPT_FREE) / 3;
    (blocks >= *FORKED_BLOCKS.start()).then(|| blocks.min(*FORKED_BLOCKS.end()))
}

/// Slices under way of calls of so many segments, which do not go round a ring: the same on all ranks.
pub(crate) fn slots(segments: usize) -> u64 {
    if segments == 3 { SLOTS_OF_TWO_MOVES } else { SLOTS }
}

/// Bytes from one slot to the next, where the slots of a rail have so many bytes together.
#[must_use]
pub fn slot_bytes(slots_bytes: u64, slots: u64) -> u64 {
    slots_bytes / slots / SLOT_ALIGN * SLOT_ALIGN
}

/// Least move of a rail of more than two hosts, if hosts exchange parts of it: twice the moves, for fewer bytes.
const EXCHANGE_BYTES_MIN: u64 = 64 << 10;

/// Sizes, in elements: the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Slices under way, each in a slot.
    pub slots: u64,
    /// A slot of a rail of the rank that has most rails.
    pub slot: u64,
    /// Up to so much of a host's is not divided among rails, which takes fewer stages.
    pub undivided: u64,
    /// Move of a rail in a slice, if its slots have room and the call has as much.
    pub slice: u64,
    /// From here on rails of more than two hosts exchange parts of what they combine, instead of all of it.
    pub exchange_from: u64,
    /// Whether segments have streams of their own.
    pub is_forked: bool,
    /// Whether any rank's data are copied between slots and memory of its GPU.
    pub is_bounced: bool,
}

impl Sizes {
    /// For slots of so many bytes together, and elements of so many; in the shortest slices and one stream, until
    /// [`Plan::in_best_cut`](crate::Plan::in_best_cut).
    #[must_use]
    pub fn new(slots_bytes: u64, element_bytes: u64) -> Self {
        Sizes {
            slots: SLOTS,
            slot: slot_bytes(slots_bytes, SLOTS) / element_bytes,
            undivided: UNDIVIDED_BYTES / element_bytes,
            slice: SLICE_BYTES_MIN / element_bytes,
            exchange_from: EXCHANGE_BYTES_MIN / element_bytes,
            is_forked: false,
            is_bounced: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_forked_calls_leave_room_for_each_other() {
        assert_eq!(
            [16, 99, 100, 108, 132, 148].map(forked_blocks),
            [None, None, Some(32), Some(34), Some(42), Some(42)]
        );
        for multiprocessors in 0..300 {
            assert!(
                forked_blocks(multiprocessors)
                    .is_none_or(|blocks| 3 * blocks + MULTIPROCESSORS_KEPT_FREE <= multiprocessors)
            );
        }
    }
}
