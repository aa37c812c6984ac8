//! Layout of a symmetric buffer, through which ranks' kernels speak: flags, LL, LL128 and Simple
//! slots. The mirror of cuda/include/symmetric_buffer.cuh.
//!
//! ```text
//! operations and groups ended, their payload | heads [parity][rank] | stamps [number % 512] | flags, acknowledgements [phase][block][rank] | deals [parity][block][step]
//! packets [parity][peer] | lines [parity][peer] | slots of Simple [parity][phase][block][peer][slot] | lanes of sends and receives (p2p.rs)
//! ```
//!
//! LL128, slots of Simple and lanes each begin at a large page: memory comes there at first use ([`SymmetricBufferLayout::part`]).

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use mccs_ipc::device_initiated::SymmetricBufferPart;
use mccs_ipc::types::{CollectiveKind, WorkDone};

use super::RANKS_MAX;
use super::p2p::{LANES_MAX, P2pLayout};

/// Offset of stamps, and their number: those of the last operations.
const STAMPS_OFFSET: usize = 1024;
const STAMPS: usize = 512;
const STAMP_BYTES: usize = 32;
/// Offset of flags.
const FLAGS_OFFSET: u64 = SymmetricBufferLayout::COUNTED_BYTES as u64;
/// Phases of a Simple operation, each with flags and acknowledgements.
const PHASES: u64 = 2;
const PARITIES: u64 = 2;
/// Steps whose chunks a block can have been told of and not come to.
const DEALS: u64 = 32;
const DEAL_BYTES: u64 = 8;
/// Bytes that a warp moves at a time as lines: four of 120 bytes of data and a flag.
pub(super) const LL128_UNIT_BYTES: u64 = 480;
pub(super) const LL128_UNIT_WIRE_BYTES: u64 = 512;
const PAGE_BYTES: u64 = 4096;
/// Parts of a symmetric buffer are whole large pages: what the driver maps.
const PART_BYTES: u64 = 2 << 20;
/// LL packets where no strategy sends more than 32 KiB at a time so.
const LL_BYTES_OF_FEW: u32 = 64 << 10;

/// The layout of a communicator's symmetric buffers: the same on all ranks, for as long as the symmetric buffers live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct SymmetricBufferLayout {
    /// Ranks, 2 to 8.
    pub nranks: u32,
    /// Most blocks of a Simple kernel.
    pub blocks: u32,
    /// Slots in a ring from one block to its counterpart on another rank; at least 2. Some operations cut the same bytes in four or six (`launch.rs`).
    pub slots: u32,
    /// Bytes of a slot: the longest chunk. A multiple of 128.
    pub slot_bytes: u32,
    /// Most bytes that one rank sends another as packets in one operation. A multiple of 128.
    pub ll_bytes: u32,
    /// The same as lines. A multiple of 128.
    pub ll128_bytes: u32,
    /// Lanes of a pair of ranks for sends and receives ([`SymmetricBufferLayout::for_multiprocessors`]).
    pub lanes: u32,
}

impl SymmetricBufferLayout {
    /// The layout that measured best for that many ranks of one NVLink domain, on H100s and H200s. Smaller ones work as well; long operations are slower
    /// then.
    #[must_use]
    pub fn initial(nranks: u32) -> SymmetricBufferLayout {
        // Peers share the bytes that are on their way at a time.
        let (slots, slot_bytes, ll_bytes, ll128_bytes) = match nranks {
            ..=2 => (4, 32 << 10, 1 << 20, 8 << 20),
            3..=4 => (3, 24 << 10, 1 << 20, 4 << 20),
            _ => (3, 12 << 10, 512 << 10, 1 << 20),
        };
        let layout = SymmetricBufferLayout { nranks, blocks: 96, slots, slot_bytes, ll_bytes, ll128_bytes, lanes: 0 };
        layout.for_multiprocessors(132)
    }

    /// The same with as many lanes as GPUs with so many multiprocessors have room for: a long message takes a block for each, which has a multiprocessor for
    /// itself. Some are left: were all taken, ranks that begin groups of two communicators in different order would wait for each other.
    #[must_use]
    pub fn for_multiprocessors(self, multiprocessors: u32) -> SymmetricBufferLayout {
        let lanes = multiprocessors.saturating_sub(2) / (self.nranks.max(2) - 1);
        SymmetricBufferLayout { lanes: lanes.clamp(8, LANES_MAX), ..self }
    }

    /// The same with less room for packets: for ranks whose kernels store lines, or that only do what is short. Without lines, operations that do not fit
    /// there go in chunks.
    #[must_use]
    pub fn with_few_packets(self) -> SymmetricBufferLayout {
        SymmetricBufferLayout { ll_bytes: self.ll_bytes.min(LL_BYTES_OF_FEW), ..self }
    }

    /// The same with chunks of other lengths, of long operations and of messages. Each operation cuts a ring of slots in as many as it has
    /// measured best with.
    #[must_use]
    pub fn with_chunk(self, bytes: u32) -> SymmetricBufferLayout {
        // Three slots are cut in four or six.
        SymmetricBufferLayout { slot_bytes: (bytes - bytes % 512).clamp(512, 1 << 20), ..self }
    }

    /// Range of a part: whole large pages, without gaps between parts.
    #[must_use]
    pub fn part(&self, part: SymmetricBufferPart) -> Range<u64> {
        let (ll128, simple, p2p) = (self.ll128_offset(), self.simple_offset(), self.p2p().lanes_offset);
        match part {
            SymmetricBufferPart::Head => 0..ll128,
            SymmetricBufferPart::Ll128 => ll128..simple,
            SymmetricBufferPart::Simple => simple..p2p,
            SymmetricBufferPart::P2p => p2p..self.bytes(),
        }
    }

    /// Whether kernels can work with it: what comes from elsewhere is checked once.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        (2..=RANKS_MAX as u32).contains(&self.nranks)
            && (1..=128).contains(&self.blocks)
            && (2..=64).contains(&self.slots)
            && (128..=1 << 20).contains(&self.slot_bytes)
            && (128..=16 << 20).contains(&self.ll_bytes)
            && self.slot_bytes.is_multiple_of(128)
            && self.ll_bytes.is_multiple_of(128)
            && (128..=16 << 20).contains(&self.ll128_bytes)
            && self.ll128_bytes.is_multiple_of(128)
            && (1..=LANES_MAX).contains(&self.lanes)
    }

    /// Offset of the count of a symmetric buffer's kernels, from its begin.
    pub const COUNTER_OFFSET: u64 = 0;

    /// Offset of the count of groups of sends and receives, in the same way.
    pub const P2P_COUNTER_OFFSET: u64 = 8;

    /// Offset of the payload of operations that have stamps.
    const PAYLOAD_OFFSET: usize = 24;

    /// Offset of the count of messages that a rank has sent, and of their bytes.
    const SENT_OFFSET: usize = 32;

    /// Bytes at a symmetric buffer's begin with all that kernels tell of what they have done.
    pub const COUNTED_BYTES: usize = STAMPS_OFFSET + STAMPS * STAMP_BYTES;

    /// How many operations have ended on a symmetric buffer, by the word that counts them. Its lower half is of one that has begun to end.
    #[must_use]
    pub fn ended(word: u64) -> u64 {
        word >> 32
    }

    /// Least value of the word that counts, when an operation has ended.
    #[must_use]
    pub fn word_of(number: u64) -> u64 {
        number << 32
    }

    /// Offset of the count of messages that a rank has sent to another.
    #[must_use]
    pub fn messages_sent_offset(&self, peer: u32) -> u64 {
        self.p2p().first_lane_of(peer)
    }

    fn peers(&self) -> u64 {
        u64::from(self.nranks) - 1
    }

    pub(crate) fn deals_offset(&self) -> u64 {
        FLAGS_OFFSET + 2 * PHASES * u64::from(self.blocks) * RANKS_MAX as u64 * 8
    }

    /// Whether the chunks of a long operation may be dealt out: roles of different ranks are no further apart than two rings of slots, the operation's
    /// or these, and a few steps.
    pub(crate) fn may_deal(&self) -> bool {
        u64::from(self.slots) <= DEALS / 4
    }

    pub(crate) fn ll_offset(&self) -> u64 {
        (self.deals_offset() + PARITIES * u64::from(self.blocks) * DEALS * DEAL_BYTES).next_multiple_of(PAGE_BYTES)
    }

    /// Bytes of one rank's packets in one half: half data, half flags.
    pub(crate) fn ll_slot_bytes(&self) -> u64 {
        2 * u64::from(self.ll_bytes)
    }

    pub(crate) fn ll128_offset(&self) -> u64 {
        (self.ll_offset() + PARITIES * self.peers() * self.ll_slot_bytes()).next_multiple_of(PART_BYTES)
    }

    /// Bytes of one rank's lines in one half: whole units for each of two shots.
    pub(crate) fn ll128_slot_bytes(&self) -> u64 {
        2 * u64::from(self.ll128_bytes / 2).div_ceil(LL128_UNIT_BYTES) * LL128_UNIT_WIRE_BYTES
    }

    pub(crate) fn simple_offset(&self) -> u64 {
        (self.ll128_offset() + PARITIES * self.peers() * self.ll128_slot_bytes()).next_multiple_of(PART_BYTES)
    }

    /// Bytes of a symmetric buffer.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.p2p().end.next_multiple_of(PART_BYTES)
    }

    /// Layout of the lanes of sends and receives.
    pub(crate) fn p2p(&self) -> P2pLayout {
        let rings = PARITIES * PHASES * u64::from(self.blocks) * self.peers();
        let begin = self.simple_offset() + rings * u64::from(self.slots) * u64::from(self.slot_bytes);
        P2pLayout::new(begin.next_multiple_of(PART_BYTES), self.nranks, self.lanes, self.slot_bytes)
    }
}

/// When an operation ran on a rank, and what it was. All of it is as good as the rank's process, which may write to its symmetric buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Its number on the symmetric buffer.
    pub number: u32,
    /// Its kind.
    pub kind: CollectiveKind,
    /// Payload, as [`CollectiveKind::payload_count`] counts it.
    pub payload_bytes: u64,
    /// When its kernel began, by the GPU's clock, in nanoseconds.
    pub began_ns: u64,
    /// When it had done everything.
    pub ended_ns: u64,
}

const KIND_SHIFT: u32 = 56;

impl Stamp {
    /// The description of a call for a kernel ([`DirectArgs::call`](super::DirectArgs::call)).
    #[must_use]
    pub fn call(kind: CollectiveKind, payload_bytes: u64) -> u64 {
        // Never 0, which stands for none.
        u64::from(kind.to_wire() + 1) << KIND_SHIFT | payload_bytes & ((1 << KIND_SHIFT) - 1)
    }

    fn from_words(call: u64, began_ns: u64, number: u64, ended_ns: u64) -> Option<Stamp> {
        let kind = CollectiveKind::from_wire(((call >> KIND_SHIFT) as u32).checked_sub(1)?)?;
        // A kernel that runs has written the first half over that of an earlier one.
        let is_whole = began_ns <= ended_ns;
        let payload_bytes = call & ((1 << KIND_SHIFT) - 1);
        let number = u32::try_from(number).ok()?;
        is_whole.then_some(Stamp { number, kind, payload_bytes, began_ns, ended_ns })
    }
}

/// Counts of kernels at a symmetric buffer's begin.
#[derive(Debug)]
pub struct SymmetricBufferCounts(Box<[u64; SymmetricBufferLayout::COUNTED_BYTES / 8]>);

impl Default for SymmetricBufferCounts {
    fn default() -> Self {
        SymmetricBufferCounts(Box::new([0; SymmetricBufferLayout::COUNTED_BYTES / 8]))
    }
}

/// The first word of an operation's stamp.
fn stamp_at(number: u32) -> usize {
    (STAMPS_OFFSET + number as usize % STAMPS * STAMP_BYTES) / 8
}

impl SymmetricBufferCounts {
    /// Memory for a copy of [`SymmetricBufferLayout::COUNTED_BYTES`] of a symmetric buffer.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.0[..])
    }

    fn word(&self, offset_bytes: usize) -> u64 {
        self.0[offset_bytes / 8]
    }

    /// Operations that have ended.
    #[must_use]
    pub fn operations(&self) -> u64 {
        SymmetricBufferLayout::ended(self.word(SymmetricBufferLayout::COUNTER_OFFSET as usize))
    }

    /// Groups of sends and receives that have ended.
    #[must_use]
    pub fn groups(&self) -> u64 {
        SymmetricBufferLayout::ended(self.word(SymmetricBufferLayout::P2P_COUNTER_OFFSET as usize))
    }

    /// Payload of the operations that have stamps.
    #[must_use]
    pub fn payload_bytes(&self) -> u64 {
        self.word(SymmetricBufferLayout::PAYLOAD_OFFSET)
    }

    /// Messages that were sent by groups that have ended, and their bytes.
    #[must_use]
    pub fn sent(&self) -> WorkDone {
        let at = SymmetricBufferLayout::SENT_OFFSET;
        WorkDone { operations: self.word(at), bytes: self.word(at + 8) }
    }

    /// The stamp of an operation, if it has ended, and is among the last ones.
    #[must_use]
    pub fn stamp(&self, number: u32) -> Option<Stamp> {
        let at = stamp_at(number);
        let [call, began, ended_number, ended] = self.0[at..at + 4] else { return None };
        Stamp::from_words(call, began, ended_number, ended).filter(|stamp| stamp.number == number)
    }

    /// As kernels count operations.
    pub fn set_operations(&mut self, operations: u32) {
        self.0[SymmetricBufferLayout::COUNTER_OFFSET as usize / 8] = SymmetricBufferLayout::word_of(operations.into());
    }

    /// As kernels leave a stamp.
    pub fn set_stamp(&mut self, stamp: Stamp) {
        let at = stamp_at(stamp.number);
        let call = Stamp::call(stamp.kind, stamp.payload_bytes);
        self.0[at..at + 4].copy_from_slice(&[call, stamp.began_ns, stamp.number.into(), stamp.ended_ns]);
    }

    /// Numbers whose stamps may be there, when so many operations have ended.
    #[must_use]
    pub fn last(operations: u64) -> std::ops::RangeInclusive<u64> {
        operations.saturating_sub(STAMPS as u64 - 1).max(1)..=operations
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(counts: &mut SymmetricBufferCounts, number: u32, words: [u64; 4]) {
        let at = stamp_at(number);
        counts.0[at..at + 4].copy_from_slice(&words);
    }

    #[test]
    fn stamps_are_read_as_kernels_write_them() {
        let mut counts = SymmetricBufferCounts::default();
        assert_eq!(counts.stamp(0), None, "zeros are none");
        let call = Stamp::call(CollectiveKind::AllReduce, 1 << 40 | 5);
        write(&mut counts, 600, [call, 1000, 600, 1250]);
        let stamp = Stamp {
            number: 600,
            kind: CollectiveKind::AllReduce,
            payload_bytes: 1 << 40 | 5,
            began_ns: 1000,
            ended_ns: 1250,
        };
        assert_eq!((counts.stamp(600), counts.stamp(88)), (Some(stamp), None), "who came later has the place");
        // The next one there runs: its beginning is over the end of this one.
        write(&mut counts, 600, [Stamp::call(CollectiveKind::Barrier, 0), 9000, 600, 1250]);
        assert_eq!(counts.stamp(600), None);
        for hostile in [[u64::MAX; 4], [0, 1, 600, 2], [99 << KIND_SHIFT, 1, 600, 2]] {
            write(&mut counts, 600, hostile);
            assert_eq!(counts.stamp(600), None);
        }
        for kind in CollectiveKind::ALL {
            write(&mut counts, 1, [Stamp::call(*kind, 7), 1, 1, 1]);
            assert_eq!(counts.stamp(1).map(|stamp| (stamp.kind, stamp.payload_bytes)), Some((*kind, 7)));
        }
    }

    #[test]
    fn parts_are_whole_large_pages_and_cover_the_buffer() {
        for nranks in 2..=8 {
            for layout in
                [SymmetricBufferLayout::initial(nranks), SymmetricBufferLayout::initial(nranks).with_few_packets()]
            {
                let parts = SymmetricBufferPart::ALL.map(|part| layout.part(part));
                assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start), "{parts:?}");
                assert_eq!((parts[0].start, parts[3].end), (0, layout.bytes()));
                let are_whole = parts.iter().all(|part| part.start < part.end && part.end.is_multiple_of(PART_BYTES));
                assert!(are_whole, "{parts:?}");
            }
        }
        let mib = |nranks| {
            let layout = SymmetricBufferLayout::initial(nranks).with_few_packets();
            SymmetricBufferPart::ALL.map(|part| (layout.part(part).end - layout.part(part).start) >> 20)
        };
        // As decision 050 has them.
        assert_eq!([2, 4, 8].map(mib), [[2, 18, 48, 18], [2, 26, 82, 34], [2, 16, 96, 32]]);
    }

    #[test]
    fn what_may_be_there_is_no_more_than_there_are_places() {
        assert_eq!(SymmetricBufferCounts::last(0).count(), 0);
        assert_eq!(SymmetricBufferCounts::last(3), 1..=3);
        assert_eq!(SymmetricBufferCounts::last(512), 1..=512);
        assert_eq!(SymmetricBufferCounts::last(513), 2..=513);
    }
}
