//! Frames of port channels: what ranks of two hosts send each other at a time, as headers of puts and
//! signals, with the bytes of short puts.
//!
//! ```text
//! length | number of headers | header | bytes | header | header | bytes | ...
//! ```
//!
//! Frames are as long as what they carry. The receiver waits for one with room for the longest, [`PutFrame::longest`].

use crate::PutHeader;

/// A frame that is being written, into the caller's memory.
pub struct PutFrame<'a> {
    room: &'a mut [u8],
    headers: u32,
    used: usize,
}

/// Bytes of the length and of the number of headers.
const BEGIN_BYTES: usize = 8;

impl<'a> PutFrame<'a> {
    /// Room for the longest frame at least, however many ranks there are.
    const ROOM_MIN: u64 = 4096;
    /// And at most: a put of 64 KiB, and a header of the caller's own with it. A copy of so much takes less than another message.
    const ROOM_MAX: u64 = 68 << 10;
    /// Room for the longest frames of all of a communicator's ranks together, where that is enough for the least.
    const ROOM_OF_ALL: u64 = 136 << 10;

    /// Length of the longest frame between ranks of a communicator of so many: a rank has room for some from each.
    #[must_use]
    pub fn longest(nranks: u32) -> u64 {
        (Self::ROOM_OF_ALL / u64::from(nranks.max(1))).clamp(Self::ROOM_MIN, Self::ROOM_MAX)
    }

    /// One without headers, which may become as long as `room`.
    #[must_use]
    pub fn new(room: &'a mut [u8]) -> Self {
        PutFrame { room, headers: 0, used: BEGIN_BYTES }
    }

    /// Whether a put's bytes travel in a frame of such a length.
    #[must_use]
    pub fn has_put(longest: u64, put_bytes: u64) -> bool {
        put_bytes <= longest.saturating_sub((BEGIN_BYTES + PutHeader::BYTES) as u64)
    }

    /// Whether nothing has been added.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.headers == 0
    }

    /// Whether there is room for a header with so many bytes behind it.
    #[must_use]
    pub fn has_room(&self, bytes: usize) -> bool {
        (self.room.len() - self.used).checked_sub(PutHeader::BYTES).is_some_and(|left| bytes <= left)
    }

    /// Adds a header. If it says that its bytes are here, returns the place for these. Nothing where there is no room.
    pub fn add(&mut self, header: &PutHeader) -> Option<&mut [u8]> {
        let bytes = if header.is_inline { usize::try_from(header.bytes).ok()? } else { 0 };
        if !self.has_room(bytes) {
            return None;
        }
        self.headers += 1;
        let (start, end) = (self.used + PutHeader::BYTES, self.used + PutHeader::BYTES + bytes);
        self.room[self.used..start].copy_from_slice(&header.encode());
        self.used = end;
        Some(&mut self.room[start..end])
    }

    /// Ends it. Returns its length.
    #[must_use]
    pub fn end(self) -> u64 {
        let [length, headers] = [self.used as u32, self.headers].map(u32::to_le_bytes);
        self.room[..4].copy_from_slice(&length);
        self.room[4..BEGIN_BYTES].copy_from_slice(&headers);
        self.used as u64
    }

    /// The headers of a frame with the bytes that are here, as another host's service wrote them; ends with nothing where one does not fit. Behind the
    /// frame `room` may have anything.
    pub fn read(room: &[u8]) -> impl Iterator<Item = Option<(PutHeader, &[u8])>> {
        let (mut left, mut rest) = begin(room).unwrap_or((1, &[]));
        std::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let next = take_header(rest);
            match next {
                Some((header, bytes, behind)) => {
                    rest = behind;
                    Some(Some((header, bytes)))
                }
                None => {
                    left = 0;
                    Some(None)
                }
            }
        })
    }
}

/// The number of headers, and all that is behind it.
fn begin(room: &[u8]) -> Option<(u32, &[u8])> {
    let (length, rest) = room.split_first_chunk()?;
    let (headers, _) = rest.split_first_chunk()?;
    let frame = room.get(BEGIN_BYTES..u32::from_le_bytes(*length) as usize)?;
    Some((u32::from_le_bytes(*headers), frame))
}

/// The first header, its bytes, and what is behind.
fn take_header(frame: &[u8]) -> Option<(PutHeader, &[u8], &[u8])> {
    let (header, rest) = frame.split_first_chunk()?;
    let header = PutHeader::decode(header);
    let bytes = if header.is_inline { usize::try_from(header.bytes).ok()? } else { 0 };
    let (bytes, rest) = rest.split_at_checked(bytes)?;
    Some((header, bytes, rest))
}

#[cfg(test)]
mod tests {
    use mccs_ipc::types::Handle;

    use super::*;

    fn header(number: u32, bytes: u64, is_inline: bool) -> PutHeader {
        let memory = Handle { index: number, generation: 1 };
        PutHeader { tag: number, signals: number % 2 == 1, channel: 3, memory, offset: 7, bytes, is_inline }
    }

    #[test]
    fn headers_and_bytes_come_back_in_order_until_the_frame_is_full() {
        // Earlier bytes are no part of a frame.
        let mut room = [0xff; 4096];
        assert_eq!(PutFrame::new(&mut room).end(), BEGIN_BYTES as u64);
        assert!(PutFrame::read(&room).next().is_none());
        let mut frame = PutFrame::new(&mut room);
        assert!(frame.is_empty());
        let mut added = Vec::new();
        for number in 0.. {
            let (bytes, is_inline) = if number % 3 == 0 { (u64::from(number) * 5, true) } else { (1 << 40, false) };
            let header = header(number, bytes, is_inline);
            let Some(place) = frame.add(&header) else { break };
            place.fill(number as u8);
            added.push((header, vec![number as u8; place.len()]));
        }
        assert!(added.len() > 40 && !frame.is_empty());
        let length = frame.end() as usize;
        for frame in [&room[..length], &room[..]] {
            let read: Vec<_> = PutFrame::read(frame).map(|one| one.expect("a header")).collect();
            assert_eq!(read.len(), added.len());
            let mut pairs = read.iter().zip(&added);
            assert!(pairs.all(|((header, bytes), (wrote, what))| header == wrote && *bytes == &what[..]));
        }
        // One that was cut is known as such.
        assert!(PutFrame::read(&room[..length - 1]).any(|one| one.is_none()));
    }

    #[test]
    fn the_longest_put_fits_alone_and_a_longer_one_never() {
        for nranks in [0, 1, 2, 3, 8, 1000, u32::MAX] {
            let length = PutFrame::longest(nranks);
            let longest = (0..=length).rev().find(|bytes| PutFrame::has_put(length, *bytes)).expect("some");
            let mut room = vec![0; length as usize];
            let mut frame = PutFrame::new(&mut room);
            assert!(frame.add(&header(1, longest + 1, true)).is_none());
            assert!(frame.add(&header(1, u64::MAX, true)).is_none());
            assert_eq!(frame.add(&header(1, longest, true)).map(|place| place.len() as u64), Some(longest));
            assert!(!frame.has_room(0) && frame.add(&header(2, 0, false)).is_none());
            assert_eq!(frame.end(), length);
        }
        assert!(!PutFrame::has_put(0, 1));
    }

    #[test]
    fn frames_of_garbage_end_without_a_panic() {
        let mut state = 1u32;
        for length in 0..4096 {
            let mut frame = [0xff; 4096];
            for byte in &mut frame[..length] {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *byte = (state >> 24) as u8;
            }
            for frame in [&frame[..], &frame[..length]] {
                let headers = PutFrame::read(frame).count();
                assert!(headers <= 4096 / PutHeader::BYTES + 1, "{headers}");
            }
        }
    }
}
