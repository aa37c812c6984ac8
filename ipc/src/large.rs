//! Large collectives by the service's copy engines: words, slots and shards that the ranks' streams
//! share with them. Copy engines push between the ranks' own buffers, and the ranks' streams do
//! what is left.
//!
//! A call is a command, like one on the host, and a few entries in the caller's stream: *ready* is written, the rank does its
//! own part, and the stream waits until words say of all ranks that their copies have ended. Words lie on the communicator's
//! page ([`crate::device_initiated`]), and grow; numbers are those of the communicator's large operations, from 1.
//!
//! If the service carries everything out ([`crate::device_initiated::Execution`]) a second stream of its own does that part as well, and
//! the caller's stream only says that it is there, and waits.
//!
//! There the caller's stream may say and wait by events instead of words ([`RankEvents`]), which only drivers can do to each other: when the
//! stream has come to a call, the service finds the event of that number recorded, and writes *ready* itself. A wait for an event is for what
//! was recorded last when the wait is enqueued, so a call waits on the processor until the service has *promised*: recorded it behind
//! what ends the operation, which it does when all ranks have called.
//!
//! If elements are combined, each rank owns a *shard* of them; of a short all-reduce, all of them. Its peers' parts come, piece by piece,
//! into a *slot* on the rank's GPU; a kernel in the rank's own stream combines each when words tell that it is there.
//!
//! ```text
//! block of slots: header: counter | slot 0 | slot 1
//! ```
//!
//! A communicator has a small block of its own, and longer operations share a large one with the tenant's other communicators on that GPU ([`SlotKind`]).
//! The service makes both at first use.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use crate::device_initiated::{ControlPage, DEVICE_INITIATED_RANKS_MAX};
use crate::sync::atomic::AtomicU64;
use crate::types::{CollectiveKind, RedOp};

/// The value that releases everybody who waits for a word: streams compare by difference, so it is no larger than this.
pub const RELEASED: u64 = 1 << 62;
/// Pieces of an operation that its words can count.
const PIECES_MAX: u64 = 1 << 20;
/// Shards of at least this size come in more than one piece, so that reducing and copying overlap.
const SPLIT_FROM_BYTES: u64 = 4 << 20;
/// An all-reduce of at most so many bytes is combined by all ranks: what goes over links more often takes less time than bringing
/// results back.
const WHOLE_BYTES_MAX: u64 = 1 << 20;
const HEADER_BYTES: u64 = 4096;
/// Pieces begin at such places, which all element types divide.
const PIECE_ALIGN: u64 = 4096;
/// Slots of a rank.
const SLOTS: u64 = 2;

/// A word of a rank's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LargeWord {
    /// The rank's stream has come to an operation. Written by that stream; where it tells so by an event, by the service.
    Ready,
    /// The rank's copy engine has come to a round of an operation: [`stage`]. Written by the service's stream there.
    Round,
    /// The rank's parts of a piece have come to those who combine them: [`stage`]. Written by the service's stream there.
    Pushed,
    /// A piece of an operation has come from this rank to the next, which passes it on: [`stage`]. Written by the service's stream
    /// there.
    Relayed,
    /// A piece of the rank's shard is combined: [`stage`]. Written by the kernel that combines, the rank's or the service's.
    Reduced,
    /// Data that this rank had to send in an operation has arrived, and its own buffers are not needed any more. Written
    /// by the service's stream there.
    Arrived,
    /// The part that stays with this rank in an operation is in its place. Written by the service's second stream there, if the
    /// service carries everything out.
    Kept,
    /// The rank's stream is past an operation. Written by that stream.
    Finished,
    /// The event that the rank's stream is to wait for stands for this operation now. Written by the service, if streams wait for
    /// events.
    Promised,
}

/// Large operations that a rank may have called and its stream not come to, where streams tell by events.
pub const CALLED_EVENTS: usize = 16;

/// Events of a rank, made by the service, as handles of 64 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankEvents {
    /// The rank's stream has come to an operation: [`CALLED_EVENTS`], used in turn. Recorded by the rank.
    pub called: Vec<Vec<u8>>,
    /// The operation that was promised last has ended. Recorded by the service.
    pub done: Vec<u8>,
}

/// Which of [`RankEvents::called`] is an operation's.
#[must_use]
pub fn called_event(operation: u64) -> usize {
    (operation % CALLED_EVENTS as u64) as usize
}

const WORDS: u64 = 9;
/// A line each: words are polled over the bus.
const LINE_BYTES: u64 = 128;
/// All words of a page.
pub(crate) const LARGE_WORDS_BYTES: u64 = DEVICE_INITIATED_RANKS_MAX as u64 * WORDS * LINE_BYTES;

impl LargeWord {
    /// Every word.
    pub const ALL: [LargeWord; WORDS as usize] = [
        LargeWord::Ready,
        LargeWord::Round,
        LargeWord::Pushed,
        LargeWord::Relayed,
        LargeWord::Reduced,
        LargeWord::Arrived,
        LargeWord::Kept,
        LargeWord::Finished,
        LargeWord::Promised,
    ];
}

impl ControlPage {
    /// Offset of a rank's word.
    ///
    /// # Panics
    /// If a page has no such rank.
    #[must_use]
    pub fn large_offset(rank: u32, word: LargeWord) -> u64 {
        assert!(rank < DEVICE_INITIATED_RANKS_MAX, "rank {rank} on a page for {DEVICE_INITIATED_RANKS_MAX}");
        Self::LARGE_OFFSET + (u64::from(rank) * WORDS + word as u64) * LINE_BYTES
    }

    fn large(&self, rank: u32, word: LargeWord) -> &AtomicU64 {
        self.at(Self::large_offset(rank, word))
    }

    /// Meaning of a rank's word.
    ///
    /// # Panics
    /// If a page has no such rank.
    #[must_use]
    pub fn large_word(&self, rank: u32, word: LargeWord) -> u64 {
        self.large(rank, word).load(Ordering::Acquire)
    }

    /// Whether a rank's word has come to a value.
    ///
    /// # Panics
    /// If a page has no such rank.
    #[must_use]
    pub fn has_come(&self, rank: u32, word: LargeWord, value: u64) -> bool {
        has_come(self.large_word(rank, word), value)
    }

    /// Says what a stream would. Called by the service, for words that are not its streams'.
    ///
    /// # Panics
    /// If a page has no such rank.
    pub fn tell_large(&self, rank: u32, word: LargeWord, value: u64) {
        self.large(rank, word).store(value, Ordering::Release);
    }

    /// Lets everybody go on who waits for a word of any rank's. Called by the service, and where it has gone.
    pub fn release_all(&self) {
        for rank in 0..DEVICE_INITIATED_RANKS_MAX {
            LargeWord::ALL.iter().for_each(|word| self.release(rank, *word));
        }
    }

    /// Lets everybody go on who waits for a rank's word. Called by the service.
    ///
    /// # Panics
    /// If a page has no such rank.
    pub fn release(&self, rank: u32, word: LargeWord) {
        self.tell_large(rank, word, RELEASED);
    }
}

/// The value of a word that counts pieces, when `piece` of an operation is done.
#[must_use]
pub fn stage(operation: u64, piece: u64) -> u64 {
    operation * PIECES_MAX + piece + 1
}

/// Whether a word has come to a value, as streams see it: by their difference.
pub(crate) fn has_come(word: u64, value: u64) -> bool {
    word.wrapping_sub(value).cast_signed() >= 0
}

/// Whether there is a large form of a collective.
#[must_use]
pub fn has_large(kind: CollectiveKind, op: RedOp) -> bool {
    match kind {
        CollectiveKind::AllReduce | CollectiveKind::ReduceScatter => op != RedOp::PreMulSum,
        CollectiveKind::Reduce | CollectiveKind::Barrier => false,
        _ => true,
    }
}

/// By collective ([`CollectiveKind`]), the payload in bytes from which the service's engines carry it out; `u64::MAX`: they never do.
pub type EnginesFrom = [u64; CollectiveKind::ALL.len()];

/// The part that stays with a rank, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OwnPart {
    /// Offset in the send buffer.
    pub send_offset: u64,
    /// Offset in the receive buffer.
    pub recv_offset: u64,
    /// Its length.
    pub count: u64,
}

/// The part that stays with a rank, from its send to its receive buffer.
#[must_use]
pub fn own_part(kind: CollectiveKind, rank: u32, root: u32, count: u64) -> Option<OwnPart> {
    let own = u64::from(rank) * count;
    let (send_offset, recv_offset) = match kind {
        CollectiveKind::AllGather => (0, own),
        CollectiveKind::AllToAll => (own, own),
        CollectiveKind::Broadcast if rank == root => (0, 0),
        CollectiveKind::Gather if rank == root => (0, own),
        CollectiveKind::Scatter if rank == root => (own, 0),
        _ => return None,
    };
    Some(OwnPart { send_offset, recv_offset, count })
}

/// The owner of slots into which an operation's parts come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SlotKind {
    /// The communicator's own.
    Own,
    /// Those that a tenant's communicators on a GPU share, one operation at a time.
    Shared,
}

/// How blocks of slots are divided: the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LargeLayout {
    /// Bytes of a shared slot: the pieces of all peers.
    pub slot_bytes: u64,
    /// The same of a communicator's own.
    pub own_slot_bytes: u64,
}

impl LargeLayout {
    /// Smallest slot: a piece for every peer that there can be.
    pub const SLOT_BYTES_MIN: u64 = PIECE_ALIGN * DEVICE_INITIATED_RANKS_MAX as u64;
    /// Own slots are an eighth of shared ones: of 192 MiB, they have room for all-reduces of 64 MiB on four GPUs in as few pieces.
    const OWN_PART: u64 = 8;

    /// A layout with shared slots of at least so many bytes.
    #[must_use]
    pub fn new(slot_bytes: u64) -> Self {
        let whole = |bytes: u64| bytes.max(Self::SLOT_BYTES_MIN).next_multiple_of(PIECE_ALIGN);
        LargeLayout { slot_bytes: whole(slot_bytes), own_slot_bytes: whole(slot_bytes / Self::OWN_PART) }
    }

    fn slot_bytes_of(&self, kind: SlotKind) -> u64 {
        match kind {
            SlotKind::Own => self.own_slot_bytes,
            SlotKind::Shared => self.slot_bytes,
        }
    }

    /// Bytes of a block on each GPU.
    #[must_use]
    pub fn block_bytes(&self, kind: SlotKind) -> u64 {
        HEADER_BYTES + SLOTS * self.slot_bytes_of(kind)
    }
}

/// How a collective that combines is cut: the same on all ranks, and in the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shards {
    slots: SlotKind,
    slot_bytes: u64,
    kind: CollectiveKind,
    nranks: u32,
    /// Bytes of all shards together.
    total_bytes: u64,
    shard_bytes: u64,
    piece_bytes: u64,
    /// Whether every shard is the whole.
    is_whole: bool,
}

/// A part of a large operation's whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardPiece {
    /// Its first byte.
    pub offset: u64,
    /// Its length.
    pub bytes: u64,
}

impl Shards {
    /// The shards of a collective whose ranks pass a `count` of so many bytes: in the communicator's own slots where these take no more pieces.
    #[must_use]
    pub fn new(layout: LargeLayout, kind: CollectiveKind, nranks: u32, bytes: u64) -> Self {
        let [own, shared] =
            [SlotKind::Own, SlotKind::Shared].map(|slots| Self::in_slots(layout, slots, kind, nranks, bytes));
        if own.pieces() > shared.pieces() { shared } else { own }
    }

    fn in_slots(layout: LargeLayout, slots: SlotKind, kind: CollectiveKind, nranks: u32, bytes: u64) -> Self {
        let slot_bytes = layout.slot_bytes_of(slots);
        let ranks = u64::from(nranks.max(1));
        let peers = ranks.saturating_sub(1).max(1);
        let most = (slot_bytes / peers / PIECE_ALIGN * PIECE_ALIGN).max(PIECE_ALIGN);
        let is_whole = kind == CollectiveKind::AllReduce && bytes <= most.min(WHOLE_BYTES_MAX);
        let (total_bytes, shard_bytes) = match kind {
            CollectiveKind::ReduceScatter => (bytes * ranks, bytes),
            _ if is_whole => (bytes, bytes),
            _ => (bytes, bytes.div_ceil(ranks).next_multiple_of(LINE_BYTES)),
        };
        let fewest = match kind {
            _ if shard_bytes < SPLIT_FROM_BYTES => 1,
            // Nothing goes out while the last piece is combined: it had better be short.
            CollectiveKind::ReduceScatter => 3,
            _ => 2,
        };
        let pieces = shard_bytes.div_ceil(most).max(fewest);
        let piece_bytes = shard_bytes.div_ceil(pieces).next_multiple_of(PIECE_ALIGN).clamp(PIECE_ALIGN, most);
        Shards { slots, slot_bytes, kind, nranks, total_bytes, shard_bytes, piece_bytes, is_whole }
    }

    /// Pieces of every shard. Some may be empty.
    #[must_use]
    pub fn pieces(&self) -> u64 {
        self.shard_bytes.div_ceil(self.piece_bytes).max(1)
    }

    /// The slots into which its parts come.
    #[must_use]
    pub fn slots(&self) -> SlotKind {
        self.slots
    }

    /// Whether every rank owns all elements, so that nobody has results for others.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Ranks whose parts `owner` waits for before it combines: the others, and itself where it sends what it is going to write over.
    pub fn awaited(&self, owner: u32) -> impl Iterator<Item = u32> {
        let is_whole = self.is_whole;
        (0..self.nranks).filter(move |rank| is_whole || *rank != owner)
    }

    /// A piece of `owner`'s shard in the whole.
    #[must_use]
    pub fn piece(&self, owner: u32, piece: u64) -> ShardPiece {
        let shard = if self.is_whole { 0 } else { u64::from(owner) * self.shard_bytes };
        let shard_end = (shard + self.shard_bytes).min(self.total_bytes);
        let begin = (shard + piece * self.piece_bytes).min(shard_end);
        ShardPiece { offset: begin, bytes: (begin + self.piece_bytes).min(shard_end) - begin }
    }

    /// Offset of a piece of `owner`'s shard in the data that that rank receives.
    #[must_use]
    pub fn result_offset(&self, owner: u32, piece: u64) -> u64 {
        let offset = self.piece(owner, piece).offset;
        // The result of a reduce-scatter has the shard's place for itself.
        if self.kind == CollectiveKind::ReduceScatter { offset - self.piece(owner, 0).offset } else { offset }
    }

    /// Offset of the word in which the rank's kernels count blocks, in its block.
    #[must_use]
    pub fn counter_offset(&self) -> u64 {
        0
    }

    /// Offset of a piece of `source` in the block of `owner`.
    #[must_use]
    pub fn slot_offset(&self, owner: u32, source: u32, piece: u64) -> u64 {
        let place = source - u32::from(source > owner);
        let slot = HEADER_BYTES + piece % SLOTS * self.slot_bytes;
        slot + u64::from(place) * self.piece_bytes
    }

    /// The piece that must have been combined before one of this number may come: it lies in the same slot.
    #[must_use]
    pub fn before(&self, piece: u64) -> Option<u64> {
        piece.checked_sub(SLOTS)
    }

    /// Number of ranks.
    #[must_use]
    pub fn nranks(&self) -> u32 {
        self.nranks
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_whole_once_and_slots_do_not_overlap() {
        for nranks in 2..=8_u32 {
            for bytes in [8, 1000, 4096, 100_008, (9 << 20) + 8, (64 << 20) + 16] {
                let layout = LargeLayout::new(1 << 20);
                for kind in [CollectiveKind::AllReduce, CollectiveKind::ReduceScatter] {
                    let shards = Shards::new(layout, kind, nranks, bytes);
                    let mut at = 0;
                    for owner in 0..nranks {
                        for piece in 0..shards.pieces() {
                            let ShardPiece { offset: begin, bytes: len } = shards.piece(owner, piece);
                            let expected = if shards.is_whole() { 0 } else { at };
                            assert!(len == 0 || begin == expected, "{nranks} ranks, {bytes} bytes: {begin} after {at}");
                            at += len;
                        }
                    }
                    let total = if kind == CollectiveKind::ReduceScatter { bytes * u64::from(nranks) } else { bytes };
                    assert_eq!(at, if shards.is_whole() { total * u64::from(nranks) } else { total });
                    for owner in 0..nranks {
                        let mut ends = Vec::new();
                        for source in (0..nranks).filter(|source| *source != owner) {
                            for piece in 0..2 {
                                let begin = shards.slot_offset(owner, source, piece);
                                ends.push((begin, begin + shards.piece_bytes));
                            }
                        }
                        ends.sort_unstable();
                        assert!(ends.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ends:?}");
                        assert!(ends[ends.len() - 1].1 <= layout.block_bytes(shards.slots()));
                    }
                }
            }
        }
    }

    #[test]
    fn own_slots_take_what_they_hold_in_as_few_pieces() {
        const MIB: u64 = 1 << 20;
        let layout = LargeLayout::new(192 * MIB);
        assert_eq!((layout.own_slot_bytes, layout.block_bytes(SlotKind::Own)), (24 * MIB, 48 * MIB + 4096));
        let slots = |kind, nranks, mib| Shards::new(layout, kind, nranks, mib * MIB).slots();
        use CollectiveKind::{AllReduce, ReduceScatter};
        assert_eq!([1, 8, 64, 65, 512].map(|mib| slots(AllReduce, 4, mib)), {
            use SlotKind::{Own, Shared};
            [Own, Own, Own, Shared, Shared]
        });
        assert_eq!([24, 25].map(|mib| slots(ReduceScatter, 4, mib)), [SlotKind::Own, SlotKind::Shared]);
        assert_eq!([96, 97].map(|mib| slots(AllReduce, 2, mib)), [SlotKind::Own, SlotKind::Shared]);
        let least = LargeLayout::new(0);
        assert_eq!(least.slot_bytes, least.own_slot_bytes);
        assert_eq!(Shards::new(least, AllReduce, 4, 512 * MIB).slots(), SlotKind::Own, "there is no larger one");
    }

    #[test]
    fn what_a_rank_keeps_goes_where_the_collective_says() {
        let of = |kind, rank| own_part(kind, rank, 1, 10).map(|part| (part.send_offset, part.recv_offset, part.count));
        assert_eq!(of(CollectiveKind::AllGather, 3), Some((0, 30, 10)));
        assert_eq!(of(CollectiveKind::AllToAll, 2), Some((20, 20, 10)));
        assert_eq!([of(CollectiveKind::Broadcast, 1), of(CollectiveKind::Broadcast, 0)], [Some((0, 0, 10)), None]);
        assert_eq!([of(CollectiveKind::Gather, 1), of(CollectiveKind::Gather, 2)], [Some((0, 10, 10)), None]);
        assert_eq!([of(CollectiveKind::Scatter, 1), of(CollectiveKind::Scatter, 2)], [Some((10, 0, 10)), None]);
        assert_eq!(of(CollectiveKind::AllReduce, 1), None);
    }

    #[test]
    fn stages_grow_and_stay_below_what_releases() {
        assert!(stage(1, 0) > 0 && stage(1, 7) < stage(2, 0));
        assert!(stage(1 << 40, 0) < RELEASED);
        assert!(has_come(RELEASED, stage(1 << 40, 5)) && has_come(7, 7) && !has_come(6, 7));
        // A word with this value lets no stream go on.
        assert!(!has_come(u64::MAX, 1));
    }

    #[test]
    fn every_word_of_a_page_has_a_place_of_its_own() {
        let mut places: Vec<_> = (0..DEVICE_INITIATED_RANKS_MAX)
            .flat_map(|rank| LargeWord::ALL.map(|word| ControlPage::large_offset(rank, word)))
            .collect();
        places.dedup();
        assert_eq!(places.len(), DEVICE_INITIATED_RANKS_MAX as usize * LargeWord::ALL.len());
        let (_fd, page) = ControlPage::create().expect("a page");
        page.release(7, LargeWord::Finished);
        assert_eq!(page.large_word(7, LargeWord::Finished), RELEASED);
        assert_eq!(page.large_word(7, LargeWord::Reduced), 0);
    }
}
