//! Which chunks of a message have come. Pure.
//!
//! Sockets run at different speeds, so chunks come out of order. A receiver takes a chunk only within a window of
//! [`WINDOW`] from the first one that is missing; a socket whose next chunk lies further ahead is not read until the
//! window reaches it. That bounds what is kept per message to two words.

use super::super::wire::ChunkRange;
use crate::Fault;
use crate::request::Moved;
use crate::tcp::wire::{ChunkHeader, Grid};

/// Chunks from the first missing one that are accepted.
const WINDOW: u64 = u64::BITS as u64;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(in crate::tcp) struct Arrival {
    /// Length and tag of the message, once a chunk of it has come.
    message: Option<(u64, u32)>,
    /// All chunks before this one have come.
    frontier: u64,
    /// Bit i: chunk `frontier` + i is being read, or has come.
    claimed: u64,
    /// Bit i: chunk `frontier` + i has come.
    come: u64,
}

/// Treatment of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::tcp) enum Claim {
    /// Read it to this offset and length.
    Read { offset: u64, bytes: u64 },
    /// It is too far ahead; later.
    Later,
}

impl Arrival {
    /// A socket is about to bring a chunk of the message, for a buffer of `buffer_bytes`.
    pub(in crate::tcp) fn claim(
        &mut self,
        header: &ChunkHeader,
        grid: Grid,
        buffer_bytes: u64,
    ) -> Result<Claim, Fault> {
        let message_bytes = header.message_bytes;
        let message = (message_bytes, header.tag);
        if *self.message.get_or_insert(message) != message {
            return Err(Fault::Protocol("chunks of one message disagree about it"));
        }
        if message_bytes > buffer_bytes {
            return Err(Fault::TooLong { message_bytes, buffer_bytes });
        }
        let chunk = u64::from(header.chunk);
        let Some(ahead) = chunk.checked_sub(self.frontier) else {
            return Err(Fault::Protocol("a chunk has come twice"));
        };
        if ahead >= WINDOW {
            return Ok(Claim::Later);
        }
        if self.claimed & (1 << ahead) != 0 {
            return Err(Fault::Protocol("a chunk has come twice"));
        }
        self.claimed |= 1 << ahead;
        let ChunkRange { offset, bytes } = grid.chunk(chunk, message_bytes);
        Ok(Claim::Read { offset, bytes })
    }

    /// A claimed chunk has come. Returns what has come if it was the last.
    pub(in crate::tcp) fn finish(&mut self, chunk: u32, grid: Grid) -> Option<Moved> {
        let ahead = u64::from(chunk).checked_sub(self.frontier).filter(|ahead| *ahead < WINDOW)?;
        self.come |= 1 << ahead;
        let whole = self.come.trailing_ones();
        self.frontier += u64::from(whole);
        self.come = self.come.checked_shr(whole).unwrap_or(0);
        self.claimed = self.claimed.checked_shr(whole).unwrap_or(0);
        let (bytes, tag) = self.message.filter(|(bytes, _)| self.frontier >= grid.chunks(*bytes))?;
        Some(Moved { bytes, tag })
    }

    /// The chunk before which everything has come.
    pub(in crate::tcp) fn frontier(&self) -> u64 {
        self.frontier
    }

    /// Bytes from the start that have come, without the chunk at the frontier.
    pub(in crate::tcp) fn whole_bytes(&self, grid: Grid) -> u64 {
        self.message.map_or(0, |(bytes, _)| grid.chunk(self.frontier, bytes).offset)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CHUNK: u64 = 4096;

    fn header(chunk: u32, message_bytes: u64) -> ChunkHeader {
        ChunkHeader { message: 0, chunk, message_bytes, tag: 5 }
    }

    #[test]
    fn an_empty_message_is_one_chunk() {
        let (mut arrival, grid) = (Arrival::default(), Grid::new(2, 4096));
        assert_eq!(arrival.claim(&header(0, 0), grid, 0), Ok(Claim::Read { offset: 0, bytes: 0 }));
        assert_eq!(arrival.finish(0, grid), Some(Moved { bytes: 0, tag: 5 }));
    }

    #[test]
    fn lies_about_chunks_are_faults() {
        let (mut arrival, grid) = (Arrival::default(), Grid::new(2, 4096));
        assert!(matches!(arrival.claim(&header(0, 3 * CHUNK), grid, CHUNK), Err(Fault::TooLong { .. })));
        let mut arrival_of_three = |chunk, bytes| arrival.claim(&header(chunk, bytes), grid, 3 * CHUNK);
        assert!(matches!(arrival_of_three(0, 3 * CHUNK), Ok(Claim::Read { .. })));
        assert!(matches!(arrival_of_three(0, 3 * CHUNK), Err(Fault::Protocol(_))), "claimed");
        assert!(matches!(arrival_of_three(1, 2 * CHUNK), Err(Fault::Protocol(_))), "another length");
        let other_tag = ChunkHeader { tag: 6, ..header(1, 3 * CHUNK) };
        assert!(matches!(arrival.claim(&other_tag, grid, 3 * CHUNK), Err(Fault::Protocol(_))), "another tag");
        arrival.finish(0, grid);
        assert!(matches!(arrival.claim(&header(0, 3 * CHUNK), grid, 3 * CHUNK), Err(Fault::Protocol(_))), "come");
    }

    #[test]
    fn what_lies_beyond_the_window_waits() {
        let (mut arrival, grid) = (Arrival::default(), Grid::new(2, 4096));
        let bytes = 200 * CHUNK;
        for chunk in 1..WINDOW as u32 {
            assert!(matches!(arrival.claim(&header(chunk, bytes), grid, bytes), Ok(Claim::Read { .. })));
            assert_eq!(arrival.finish(chunk, grid), None);
        }
        assert_eq!(arrival.claim(&header(WINDOW as u32, bytes), grid, bytes), Ok(Claim::Later));
        assert_eq!(arrival.whole_bytes(grid), 0);
        assert!(matches!(arrival.claim(&header(0, bytes), grid, bytes), Ok(Claim::Read { .. })));
        assert_eq!(arrival.finish(0, grid), None);
        assert_eq!(arrival.whole_bytes(grid), WINDOW * CHUNK);
        assert!(matches!(arrival.claim(&header(WINDOW as u32, bytes), grid, bytes), Ok(Claim::Read { .. })));
    }

    proptest! {
        /// Chunks in any order that the window allows: the message is complete when, and only when, all have come.
        #[test]
        fn any_order_completes(bytes in 0u64..500_000, picks in proptest::collection::vec(0usize..64, 0..300)) {
            let (mut arrival, grid) = (Arrival::default(), Grid::new(2, 4096));
            let mut left: Vec<u32> = (0..grid.chunks(bytes) as u32).collect();
            let mut picks = picks.into_iter().chain(std::iter::repeat(0));
            while !left.is_empty() {
                let at = picks.next().unwrap_or(0) % left.len().min(40);
                let chunk = left.remove(at);
                let claim = arrival.claim(&header(chunk, bytes), grid, bytes);
                let ChunkRange { offset, bytes: length } = grid.chunk(chunk.into(), bytes);
                if claim == Ok(Claim::Later) {
                    left.insert(at, chunk);
                    continue;
                }
                prop_assert_eq!(claim, Ok(Claim::Read { offset, bytes: length }));
                let complete = arrival.finish(chunk, grid);
                prop_assert_eq!(complete, left.is_empty().then_some(Moved { bytes, tag: 5 }));
                let first_missing = left.first().map_or(bytes, |chunk| u64::from(*chunk) * CHUNK);
                prop_assert_eq!(arrival.whole_bytes(grid), first_missing);
            }
        }
    }
}
