//! Rings of a connection: where pieces of messages lie, and what stands before each of them.
//!
//! ```text
//! ring:  | header, payload | header, payload |   room   |     piece after piece, at the same offsets on both sides
//! ```
//!
//! The sender's ring mirrors the receiver's. Both count the same pieces in the same order, so none tells the other where one lies. A piece
//! is contiguous: a message that reaches the end of the ring goes on in another piece at its beginning.
//!
//! The receiver gives places back by the batch: so short messages cost one signal each, not two. Both sides close a batch behind the same piece.

use std::collections::VecDeque;

/// Bytes of a ring: a few of NCCL's slices.
pub(crate) const RING_BYTES: u64 = 4 << 20;
/// Longest payload of a piece: while one travels, the next is copied.
const PAYLOAD_BYTES: u64 = 256 << 10;
/// A batch is closed behind the piece with which it has so many, or takes so much of the ring.
const BATCH_PIECES: u64 = 32;
const BATCH_BYTES: u64 = RING_BYTES / 8;
/// Closed batches on their way, at most: their pieces are fewer than calls that a port channel holds, so that none waits for room there.
const BATCHES_MAX: usize = 8;
/// Each piece begins at a cache line.
const ALIGNMENT: u64 = 64;

const _: () = assert!(RING_BYTES.is_multiple_of(ALIGNMENT) && HEADER_BYTES < ALIGNMENT);

/// Length of a [`Header`].
pub(crate) const HEADER_BYTES: u64 = 16;

/// Header of a piece's payload. A header is as the peer wrote it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    /// Bytes of the whole message.
    pub(crate) message_bytes: u64,
    pub(crate) payload_bytes: u32,
    /// NCCL's tag.
    pub(crate) tag: i32,
}

impl Header {
    pub(crate) fn to_bytes(self) -> [u8; HEADER_BYTES as usize] {
        let mut bytes = [0; HEADER_BYTES as usize];
        bytes[..8].copy_from_slice(&self.message_bytes.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[12..].copy_from_slice(&self.tag.to_le_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: [u8; HEADER_BYTES as usize]) -> Self {
        let [a, b, c, d, e, f, g, h, rest @ ..] = bytes;
        let [i, j, k, l, m, n, o, p] = rest;
        Header {
            message_bytes: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
            payload_bytes: u32::from_le_bytes([i, j, k, l]),
            tag: i32::from_le_bytes([m, n, o, p]),
        }
    }
}

/// A place for a piece, or with one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// Offset of the header, in the ring.
    pub(crate) offset: u64,
    pub(crate) payload_bytes: u64,
}

impl Place {
    /// Header and payload.
    pub(crate) fn bytes(&self) -> u64 {
        HEADER_BYTES + self.payload_bytes
    }

    /// Bytes that it takes of the ring.
    fn taken(&self) -> u64 {
        self.bytes().next_multiple_of(ALIGNMENT)
    }
}

/// Pieces behind the last closed batch.
#[derive(Default)]
struct Batch {
    pieces: u64,
    taken: u64,
}

impl Batch {
    /// Adds a piece. Returns what the batch takes of the ring, if that closes it.
    fn add(&mut self, place: Place) -> Option<u64> {
        self.pieces += 1;
        self.taken += place.taken();
        let is_closed = self.pieces == BATCH_PIECES || self.taken >= BATCH_BYTES;
        is_closed.then(|| std::mem::take(self).taken)
    }
}

/// The sender's side of a ring.
#[derive(Default)]
pub(crate) struct Outgoing {
    /// Offset of the next piece.
    next: u64,
    open: Batch,
    /// Bytes of closed batches that have not been given back, in their order.
    closed: VecDeque<u64>,
    in_use: u64,
}

impl Outgoing {
    /// A place for the next piece of a message of which so many bytes are left; none while the ring is full.
    pub(crate) fn place(&self, left: u64) -> Option<Place> {
        let contiguous = (RING_BYTES - self.next).min(RING_BYTES - self.in_use);
        if contiguous == 0 || self.closed.len() == BATCHES_MAX {
            return None;
        }
        Some(Place { offset: self.next, payload_bytes: left.min(PAYLOAD_BYTES).min(contiguous - HEADER_BYTES) })
    }

    /// A piece is on its way.
    pub(crate) fn begin(&mut self, place: Place) {
        self.closed.extend(self.open.add(place));
        self.in_use += place.taken();
        self.next = (self.next + place.taken()) % RING_BYTES;
    }

    /// The receiver has given the oldest batch back. Returns whether there was one.
    pub(crate) fn end_batch(&mut self) -> bool {
        let Some(taken) = self.closed.pop_front() else { return false };
        self.in_use -= taken;
        true
    }

    /// Whether closed batches are on their way: those alone are given back.
    pub(crate) fn awaits_room(&self) -> bool {
        !self.closed.is_empty()
    }

    /// Whether the peer may not have copied all.
    pub(crate) fn is_busy(&self) -> bool {
        self.in_use > 0
    }
}

/// The receiver's side of a ring.
#[derive(Default)]
pub(crate) struct Incoming {
    next: u64,
    open: Batch,
}

impl Incoming {
    /// Offset of the next piece's header.
    pub(crate) fn offset(&self) -> u64 {
        self.next
    }

    /// The place of the next piece, of which the header says how long it is; none if it would leave the ring.
    pub(crate) fn place(&self, header: Header) -> Option<Place> {
        let place = Place { offset: self.next, payload_bytes: u64::from(header.payload_bytes) };
        (place.offset + place.bytes() <= RING_BYTES).then_some(place)
    }

    /// It has been copied. Returns whether a batch is to be given back.
    pub(crate) fn end(&mut self, place: Place) -> bool {
        self.next = (self.next + place.taken()) % RING_BYTES;
        self.open.add(place).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_comes_back_from_its_bytes() {
        let header = Header { message_bytes: 0x0102_0304_0506_0708, payload_bytes: 0x1122_3344, tag: -2 };
        assert_eq!(Header::from_bytes(header.to_bytes()), header);
    }

    #[test]
    fn both_sides_find_the_same_places_and_none_overlaps_one_on_its_way() {
        let (mut out, mut incoming) = (Outgoing::default(), Incoming::default());
        let mut on_their_way: VecDeque<Place> = VecDeque::new();
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        let (mut laps, mut copied) = (0, Vec::new());
        while laps < 20 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let left = (random >> 33) % (1 << (random >> 59).min(22));
            match out.place(left) {
                Some(place) if random >> 20 & 3 > 0 => {
                    assert!(
                        place.payload_bytes <= left && (place.payload_bytes > 0 || left == 0),
                        "{place:?} of {left}"
                    );
                    assert!(place.offset + place.bytes() <= RING_BYTES);
                    let overlaps = |other: &Place| {
                        place.offset < other.offset + other.bytes() && other.offset < place.offset + place.bytes()
                    };
                    assert!(
                        !on_their_way.iter().chain(&copied).any(overlaps),
                        "{place:?} in {on_their_way:?}, {copied:?}"
                    );
                    laps += u32::from(place.offset == 0);
                    out.begin(place);
                    on_their_way.push_back(place);
                }
                _ => {
                    let Some(sent) = on_their_way.pop_front() else { continue };
                    let header = Header { message_bytes: left, payload_bytes: sent.payload_bytes as u32, tag: 0 };
                    assert_eq!(incoming.place(header), Some(sent));
                    copied.push(sent);
                    if incoming.end(sent) {
                        assert!(out.end_batch());
                        copied.clear();
                    }
                }
            }
        }
        for sent in on_their_way {
            if incoming.end(sent) {
                assert!(out.end_batch());
            }
        }
        assert!(!out.awaits_room() && out.in_use == out.open.taken && out.open.taken == incoming.open.taken);
    }

    #[test]
    fn a_full_ring_has_no_place_and_a_header_cannot_lead_out_of_it() {
        let (mut out, mut bytes) = (Outgoing::default(), 0);
        while let Some(place) = out.place(u64::MAX) {
            out.begin(place);
            bytes += place.taken();
        }
        assert_eq!(bytes, RING_BYTES);
        assert!(out.end_batch() && out.place(1).is_some());
        let mut short = Outgoing::default();
        let pieces = std::iter::from_fn(|| short.place(0).inspect(|place| short.begin(*place))).count();
        assert_eq!(pieces as u64, BATCH_PIECES * BATCHES_MAX as u64);
        let header = Header { message_bytes: 0, payload_bytes: u32::MAX, tag: 0 };
        assert_eq!(Incoming::default().place(header), None);
    }
}
