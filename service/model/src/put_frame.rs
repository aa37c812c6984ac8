//! Frames of port channels: what ranks of two hosts send each other at a time, as headers of puts and
//! signals, with the bytes of short puts.
//!
//! ```text
//! number of headers | header | bytes | header | header | bytes | ... | nothing
//! ```
//!
//! A frame has always as many bytes, so that the receiver can wait for one without knowing what comes.

use crate::PutHeader;

/// See the module's documentation.
pub struct PutFrame {
    bytes: Box<[u8]>,
    headers: u32,
    used: usize,
}

/// Bytes of the number of headers.
const COUNT_BYTES: usize = 4;

impl PutFrame {
    /// Length of a frame: a page, of which a signal alone wastes little time of a network.
    pub const BYTES: usize = 4096;
    /// Longest put whose bytes travel in a frame.
    pub const PUT_BYTES_MAX: usize = Self::BYTES - COUNT_BYTES - PutHeader::BYTES;

    /// One without headers.
    #[must_use]
    pub fn new() -> Self {
        PutFrame { bytes: vec![0; Self::BYTES].into_boxed_slice(), headers: 0, used: COUNT_BYTES }
    }

    /// Whether nothing has been added.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.headers == 0
    }

    /// Whether there is room for a header with so many bytes behind it.
    #[must_use]
    pub fn has_room(&self, bytes: usize) -> bool {
        Self::BYTES - self.used >= PutHeader::BYTES + bytes
    }

    /// Adds a header. Where it says that its bytes are here, returns the place for these. Nothing where there is no room.
    pub fn add(&mut self, header: &PutHeader) -> Option<&mut [u8]> {
        let bytes = if header.is_inline { usize::try_from(header.bytes).ok()? } else { 0 };
        if bytes > Self::PUT_BYTES_MAX || !self.has_room(bytes) {
            return None;
        }
        self.headers += 1;
        self.bytes[..COUNT_BYTES].copy_from_slice(&self.headers.to_le_bytes());
        let (start, end) = (self.used + PutHeader::BYTES, self.used + PutHeader::BYTES + bytes);
        self.bytes[self.used..start].copy_from_slice(&header.encode());
        self.used = end;
        Some(&mut self.bytes[start..end])
    }

    /// All bytes, as they are sent.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The headers of a frame with the bytes that are here, as another host's service wrote them; ends with nothing where one does not fit.
    pub fn read(frame: &[u8; Self::BYTES]) -> impl Iterator<Item = Option<(PutHeader, &[u8])>> {
        let (count, mut rest) = frame.split_at(COUNT_BYTES);
        let mut left = u32::from_le_bytes([count[0], count[1], count[2], count[3]]);
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

impl Default for PutFrame {
    fn default() -> Self {
        Self::new()
    }
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

    fn whole(frame: &PutFrame) -> &[u8; PutFrame::BYTES] {
        frame.as_bytes().try_into().expect("a frame")
    }

    #[test]
    fn headers_and_bytes_come_back_in_order_until_the_frame_is_full() {
        let mut frame = PutFrame::new();
        assert!(frame.is_empty() && PutFrame::read(whole(&frame)).next().is_none());
        let mut added = Vec::new();
        for number in 0.. {
            let (bytes, is_inline) = if number % 3 == 0 { (u64::from(number) * 5, true) } else { (1 << 40, false) };
            let header = header(number, bytes, is_inline);
            let Some(place) = frame.add(&header) else { break };
            place.fill(number as u8);
            added.push((header, vec![number as u8; place.len()]));
        }
        assert!(added.len() > 40 && !frame.is_empty());
        let read: Vec<_> = PutFrame::read(whole(&frame)).map(|one| one.expect("a header")).collect();
        assert_eq!(read.len(), added.len());
        assert!(read.iter().zip(&added).all(|((header, bytes), (wrote, what))| header == wrote && *bytes == &what[..]));
    }

    #[test]
    fn the_longest_put_fits_alone_and_a_longer_one_never() {
        let longest = PutFrame::PUT_BYTES_MAX as u64;
        let mut frame = PutFrame::new();
        assert!(frame.add(&header(1, longest + 1, true)).is_none() && frame.add(&header(1, u64::MAX, true)).is_none());
        assert_eq!(frame.add(&header(1, longest, true)).map(|place| place.len()), Some(PutFrame::PUT_BYTES_MAX));
        assert!(!frame.has_room(0) && frame.add(&header(2, 0, false)).is_none());
    }

    #[test]
    fn frames_of_garbage_end_without_a_panic() {
        let mut state = 1u32;
        for length in 0..PutFrame::BYTES {
            let mut frame = [0xff; PutFrame::BYTES];
            for byte in &mut frame[..length] {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                *byte = (state >> 24) as u8;
            }
            let headers = PutFrame::read(&frame).count();
            assert!(headers <= PutFrame::BYTES / PutHeader::BYTES + 1, "{headers}");
        }
    }
}
