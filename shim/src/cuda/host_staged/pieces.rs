//! Pieces of a host-staged collective: how one on GPU buffers is cut into collectives on slots of
//! host memory. Pure.
//!
//! A collective's buffers are *blocks* of `count` elements: one, or one for each rank. A piece takes the same part of every block, and is a
//! collective of its own, of that many elements: so results are those of the whole. If a collective has a place for in-place calls, a piece
//! uses it, and the slot holds the longer of its buffers. An all-to-all has none, and gets half a slot for each.

use mccs_ipc::types::CollectiveKind;

/// Bytes of a slot: large enough that what a piece costs besides its bytes is little, small enough that copies in, the service,
/// and copies out overlap from a few slots on.
pub(super) const SLOT_BYTES: u64 = 8 << 20;
/// Most ranks: an all-to-all of the longest elements has one for each in a slot, twice.
pub(super) const RANKS_MAX: u32 = 1 << 16;
/// Pieces but for the last one have whole multiples of so many elements.
const ALIGN_COUNT: u64 = 64;

/// A call, as far as its shape goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) kind: CollectiveKind,
    pub(super) count: u64,
    pub(super) element_bytes: u64,
    pub(super) rank: u32,
    pub(super) nranks: u32,
    pub(super) root: u32,
    /// Bytes of a slot: [`SLOT_BYTES`], but for tests.
    pub(super) slot_bytes: u64,
}

/// A part of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    /// First of its elements in every block.
    first: u64,
    /// Elements, by the collective's rule.
    pub(super) count: u64,
}

/// Begins of buffers in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Places {
    pub(super) send: u64,
    pub(super) recv: u64,
}

/// Bytes between a caller's buffer and a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Copy {
    /// Offset in the caller's buffer.
    pub(super) buffer: u64,
    /// Offset in the slot.
    pub(super) slot: u64,
    pub(super) bytes: u64,
}

/// Blocks of a buffer, as a rank has it in a collective.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Blocks {
    None,
    One,
    All,
}

impl Shape {
    /// The pieces, in order: at least one, so that ranks whose calls differ find out.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Piece> + use<> {
        let (count, most) = (self.count, self.count_max());
        let first = (0..count.div_ceil(most).max(1)).map(move |index| index * most);
        first.map(move |first| Piece { first, count: most.min(count - first) })
    }

    /// Most elements of a piece.
    fn count_max(&self) -> u64 {
        use CollectiveKind as K;
        // The same on all ranks, whatever their part.
        let blocks = match self.kind {
            K::AllReduce | K::Reduce | K::Broadcast | K::Barrier => 1,
            K::AllGather | K::Gather | K::ReduceScatter | K::Scatter => u64::from(self.nranks),
            K::AllToAll => 2 * u64::from(self.nranks),
        };
        let most = self.slot_bytes / (blocks * self.element_bytes);
        if most >= ALIGN_COUNT { most / ALIGN_COUNT * ALIGN_COUNT } else { most.max(1) }
    }

    fn send_blocks(&self) -> Blocks {
        use CollectiveKind as K;
        match self.kind {
            K::AllReduce | K::AllGather | K::Reduce | K::Gather => Blocks::One,
            K::Broadcast if self.rank == self.root => Blocks::One,
            K::ReduceScatter | K::AllToAll => Blocks::All,
            K::Scatter if self.rank == self.root => Blocks::All,
            K::Broadcast | K::Scatter | K::Barrier => Blocks::None,
        }
    }

    fn recv_blocks(&self) -> Blocks {
        use CollectiveKind as K;
        match self.kind {
            K::AllReduce | K::ReduceScatter | K::Broadcast | K::Scatter => Blocks::One,
            K::Reduce if self.rank == self.root => Blocks::One,
            K::AllGather | K::AllToAll => Blocks::All,
            K::Gather if self.rank == self.root => Blocks::All,
            K::Reduce | K::Gather | K::Barrier => Blocks::None,
        }
    }

    /// Begins of a piece's buffers in its slot.
    pub(super) fn places(&self, piece: Piece) -> Places {
        let own = u64::from(self.rank) * piece.count * self.element_bytes;
        let (send, recv) = match (self.send_blocks(), self.recv_blocks()) {
            (Blocks::All, Blocks::All) => (0, self.slot_bytes / 2),
            (Blocks::One, Blocks::All) => (own, 0),
            (Blocks::All, Blocks::One) => (0, own),
            _ => (0, 0),
        };
        Places { send, recv }
    }

    fn copies(&self, piece: Piece, blocks: Blocks, place: u64) -> impl Iterator<Item = Copy> + use<> {
        let size = self.element_bytes;
        let (stride, bytes, first) = (self.count * size, piece.count * size, piece.first * size);
        let count = match blocks {
            Blocks::None => 0,
            Blocks::One => 1,
            Blocks::All => u64::from(self.nranks),
        };
        // A whole call's blocks follow each other in the slot as they do in the buffer.
        let (count, bytes) = if stride == bytes { (count.min(1), count * bytes) } else { (count, bytes) };
        let copy = move |block| Copy { buffer: block * stride + first, slot: place + block * bytes, bytes };
        (0..count).map(copy).filter(|copy| copy.bytes > 0)
    }

    /// Copies from the send buffer to the slot.
    pub(super) fn copies_in(&self, piece: Piece) -> impl Iterator<Item = Copy> + use<> {
        self.copies(piece, self.send_blocks(), self.places(piece).send)
    }

    /// Copies from the slot to the receive buffer.
    pub(super) fn copies_out(&self, piece: Piece) -> impl Iterator<Item = Copy> + use<> {
        self.copies(piece, self.recv_blocks(), self.places(piece).recv)
    }
}

#[cfg(test)]
mod tests {
    use mccs_ipc::types::BufferRange;

    use super::*;

    /// Bytes of the slots that whole calls are run through.
    const SLOT: u64 = 4096;

    /// Effect of a collective on the ranks' buffers, of which an element is a byte: sums if it reduces.
    fn run(kind: CollectiveKind, count: usize, root: usize, send: &[Vec<u8>]) -> Vec<Vec<u8>> {
        use CollectiveKind as K;
        let sum = |from: usize| -> Vec<u8> {
            (from..from + count).map(|at| send.iter().fold(0, |sum: u8, of| sum.wrapping_add(of[at]))).collect()
        };
        let part = |of: usize, block: usize| send[of][block * count..(block + 1) * count].to_vec();
        let all = |block: usize| (0..send.len()).flat_map(|of| part(of, block)).collect();
        let result = |rank: usize| match kind {
            K::AllReduce => sum(0),
            K::ReduceScatter => sum(rank * count),
            K::Broadcast => part(root, 0),
            K::Scatter => part(root, rank),
            K::AllGather => all(0),
            K::AllToAll => all(rank),
            K::Reduce if rank == root => sum(0),
            K::Gather if rank == root => all(0),
            K::Reduce | K::Gather | K::Barrier => Vec::new(),
        };
        (0..send.len()).map(result).collect()
    }

    fn bytes(seed: usize, count: u64) -> Vec<u8> {
        (0..count as usize).map(|at| (at * 31 + seed * 17 + at / 251) as u8).collect()
    }

    /// Runs a call piece by piece through slots, and compares with the whole.
    fn check(kind: CollectiveKind, nranks: u32, root: u32, count: u64, in_place: bool) {
        let shape = |rank| Shape { kind, count, element_bytes: 1, rank, nranks, root, slot_bytes: SLOT };
        let send_count = |count, rank| kind.send_count(count, nranks, rank, root).expect("fits");
        let recv_count = |count, rank| kind.recv_count(count, nranks, rank, root).expect("fits");
        let send: Vec<_> = (0..nranks).map(|rank| bytes(rank as usize, send_count(count, rank))).collect();
        let whole = run(kind, count as usize, root as usize, &send);
        let mut recv: Vec<_> = (0..nranks).map(|rank| vec![0xee; recv_count(count, rank) as usize]).collect();
        let mut sources = send.clone();
        for piece in shape(0).pieces() {
            let mut slots: Vec<_> = (0..nranks).map(|_| vec![0xdd; SLOT as usize]).collect();
            let range = |at: u64, bytes: u64| at as usize..(at + bytes) as usize;
            let mut piece_send = Vec::new();
            for (rank, slot) in (0..nranks).zip(&mut slots) {
                for copy in shape(rank).copies_in(piece) {
                    let from = &sources[rank as usize][range(copy.buffer, copy.bytes)];
                    slot[range(copy.slot, copy.bytes)].copy_from_slice(from);
                }
                let Places { send, recv } = shape(rank).places(piece);
                let send = BufferRange { start: send, bytes: send_count(piece.count, rank) };
                let recv = BufferRange { start: recv, bytes: recv_count(piece.count, rank) };
                // As the service checks what a tenant names.
                assert!(kind.accepts_buffers(rank, root, send, recv), "{kind}");
                piece_send.push(slot[range(send.start, send.bytes)].to_vec());
            }
            let results = run(kind, piece.count as usize, root as usize, &piece_send);
            for ((rank, slot), result) in (0..nranks).zip(&mut slots).zip(results) {
                let at = shape(rank).places(piece).recv;
                slot[range(at, result.len() as u64)].copy_from_slice(&result);
                for copy in shape(rank).copies_out(piece) {
                    let to = range(copy.buffer, copy.bytes);
                    let result = &slot[range(copy.slot, copy.bytes)];
                    recv[rank as usize][to.clone()].copy_from_slice(result);
                    // Written over what it was made of, before later pieces are read.
                    let own = rank as usize * count as usize;
                    match kind {
                        CollectiveKind::AllReduce if in_place => sources[rank as usize][to].copy_from_slice(result),
                        CollectiveKind::ReduceScatter if in_place => {
                            sources[rank as usize][own + to.start..own + to.end].copy_from_slice(result);
                        }
                        _ => {}
                    }
                }
            }
        }
        assert!(recv == whole, "{kind} of {count} on {nranks}, root {root}, in place: {in_place}");
    }

    #[test]
    fn pieces_of_every_collective_make_up_the_whole() {
        for kind in CollectiveKind::ALL.iter().copied() {
            for nranks in [1, 2, 3, 5] {
                let shape = Shape { kind, count: 1, element_bytes: 1, rank: 0, nranks, root: 0, slot_bytes: SLOT };
                let most = shape.count_max();
                for count in [0, 1, 63, most, most + 1, 2 * most + 77] {
                    check(kind, nranks, nranks - 1, count, count % 2 == 1);
                }
            }
        }
    }

    #[test]
    fn pieces_fit_their_slots_whatever_the_elements() {
        for kind in CollectiveKind::ALL.iter().copied() {
            for (nranks, element_bytes) in [(1, 8), (2, 1), (3, 4), (1000, 8), (70_000, 2)] {
                let (rank, root) = (nranks - 1, nranks - 1);
                let shape = Shape { kind, count: 1 << 34, element_bytes, rank, nranks, root, slot_bytes: SLOT_BYTES };
                let piece = shape.pieces().next().expect("a piece");
                assert!(piece.count > 0);
                let copies = shape.copies_in(piece).chain(shape.copies_out(piece));
                assert!(copies.map(|copy| copy.slot + copy.bytes).max().unwrap_or(0) <= SLOT_BYTES, "{shape:?}");
            }
        }
    }

    #[test]
    fn a_short_call_is_one_copy_each_way() {
        for kind in CollectiveKind::ALL.iter().copied().filter(|kind| *kind != CollectiveKind::Barrier) {
            let (rank, nranks, root) = (2, 4, 2);
            let shape = Shape { kind, count: 1000, element_bytes: 4, rank, nranks, root, slot_bytes: SLOT_BYTES };
            let pieces: Vec<_> = shape.pieces().collect();
            assert_eq!(pieces.len(), 1);
            assert_eq!((shape.copies_in(pieces[0]).count(), shape.copies_out(pieces[0]).count()), (1, 1), "{kind}");
        }
    }
}
