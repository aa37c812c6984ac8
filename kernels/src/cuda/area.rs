//! Shape of an area: the memory through which direct kernels of a communicator's ranks speak. The mirror of
//! cuda/include/area.cuh.
//!
//! ```text
//! operations ended | heads [parity][rank] | flags, acknowledgements [phase][block][rank] | deals [parity][block][step]
//! packets [parity][peer] | lines [parity][peer] | bulk slots [parity][phase][block][peer][slot] | lanes of sends and receives (points.rs)
//! ```

use bytemuck::{Pod, Zeroable};

use super::RANKS_MAX;
use super::points::PointsLayout;

/// Where flags begin.
const FLAGS_OFFSET: u64 = 1024;
/// Phases of a bulk operation, each with flags and acknowledgements.
const PHASES: u64 = 2;
const PARITIES: u64 = 2;
/// Steps whose chunks a block can have been told of and not come to.
const DEALS: u64 = 32;
const DEAL_BYTES: u64 = 16;
/// What a warp moves at a time as lines: four of 120 bytes of data and a flag.
pub(super) const LINES_UNIT_BYTES: u64 = 480;
const LINES_UNIT_WIRE_BYTES: u64 = 512;
const PAGE_BYTES: u64 = 4096;

/// The layout of a communicator's areas: the same on all ranks, for as long as the areas live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AreaLayout {
    /// Ranks, 2 to 8.
    pub nranks: u32,
    /// Most blocks of a bulk kernel.
    pub blocks: u32,
    /// Slots in a ring from one block to its counterpart on another rank; at least 2.
    pub slots: u32,
    /// Bytes of a slot: the longest chunk. A multiple of 128.
    pub slot_bytes: u32,
    /// Most bytes that one rank sends another as packets in one operation. A multiple of 128.
    pub packet_bytes: u32,
    /// The same as lines. A multiple of 128.
    pub line_bytes: u32,
}

impl AreaLayout {
    /// The layout that measured best for that many ranks of one NVLink domain: 72 MiB for 2 ranks, 122 for 4, 140 for 8. Smaller
    /// ones work as well; long operations are slower then.
    #[must_use]
    pub fn initial(nranks: u32) -> AreaLayout {
        // What is on its way at a time is shared out among peers.
        let (slots, slot_bytes, line_bytes) = match nranks {
            ..=2 => (4, 32 << 10, 2 << 20),
            3..=4 => (3, 24 << 10, 2 << 20),
            _ => (3, 12 << 10, 1 << 20),
        };
        AreaLayout { nranks, blocks: 96, slots, slot_bytes, packet_bytes: line_bytes / 2, line_bytes }
    }

    /// Whether kernels can work with it: what comes from elsewhere is checked once.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        (2..=RANKS_MAX as u32).contains(&self.nranks)
            && (1..=128).contains(&self.blocks)
            && (2..=64).contains(&self.slots)
            && (128..=1 << 20).contains(&self.slot_bytes)
            && (128..=16 << 20).contains(&self.packet_bytes)
            && self.slot_bytes.is_multiple_of(128)
            && self.packet_bytes.is_multiple_of(128)
            && (128..=16 << 20).contains(&self.line_bytes)
            && self.line_bytes.is_multiple_of(128)
    }

    /// Where an area's kernels count: from its begin.
    pub const COUNTER_OFFSET: u64 = 0;

    /// Where kernels of sends and receives count their groups, in the same way.
    pub const POINTS_COUNTER_OFFSET: u64 = 8;

    /// How many operations have ended on an area, by the word that counts them. Its lower half is of one that has begun to end.
    #[must_use]
    pub fn ended(word: u64) -> u64 {
        word >> 32
    }

    /// What the word that counts is, at least, when an operation has ended.
    #[must_use]
    pub fn word_of(number: u64) -> u64 {
        number << 32
    }

    /// Where kernels count the messages that their rank has sent to another.
    #[must_use]
    pub fn messages_sent_offset(&self, peer: u32) -> u64 {
        self.points().first_lane_of(peer)
    }

    fn peers(&self) -> u64 {
        u64::from(self.nranks) - 1
    }

    pub(crate) fn deals_offset(&self) -> u64 {
        FLAGS_OFFSET + 2 * PHASES * u64::from(self.blocks) * RANKS_MAX as u64 * 8
    }

    /// Whether the chunks of a long operation may be dealt out: roles of different ranks are no further apart than two rings of slots and
    /// a few steps.
    pub(crate) fn may_deal(&self) -> bool {
        u64::from(self.slots) <= DEALS / 4
    }

    pub(crate) fn packets_offset(&self) -> u64 {
        (self.deals_offset() + PARITIES * u64::from(self.blocks) * DEALS * DEAL_BYTES).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes of one rank's packets in one half: half data, half flags.
    pub(crate) fn packet_slot_bytes(&self) -> u64 {
        2 * u64::from(self.packet_bytes)
    }

    pub(crate) fn lines_offset(&self) -> u64 {
        (self.packets_offset() + PARITIES * self.peers() * self.packet_slot_bytes()).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes of one rank's lines in one half: whole units for each of two shots.
    pub(crate) fn line_slot_bytes(&self) -> u64 {
        2 * u64::from(self.line_bytes / 2).div_ceil(LINES_UNIT_BYTES) * LINES_UNIT_WIRE_BYTES
    }

    pub(crate) fn bulk_offset(&self) -> u64 {
        (self.lines_offset() + PARITIES * self.peers() * self.line_slot_bytes()).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes of an area.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.points().end
    }

    /// Where sends and receives have their lanes.
    pub(crate) fn points(&self) -> PointsLayout {
        let rings = PARITIES * PHASES * u64::from(self.blocks) * self.peers();
        let begin = self.bulk_offset() + rings * u64::from(self.slots) * u64::from(self.slot_bytes);
        PointsLayout::new(begin, self.nranks)
    }
}
