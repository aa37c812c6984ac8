//! Retransmission: the log of what a connection was given to send, enough to send it again over
//! another socket. The peer's kernel may not have it.
//!
//! ```text
//!  stream:   acknowledged | copied           | in messages' buffers | not assigned yet
//!                         ^ start            ^ first chunk's        ^ end
//! ```
//!
//! A connection's stream is all the chunks that it was given, each behind its header, counted from the first byte on, whatever socket
//! carries it. Chunks whose message is unfinished are read from its buffer; for a message to end before its bytes are acknowledged they
//! are copied here.
//!
//! Deliberately absent: what is acknowledged (the socket knows), and when to copy (the sender does).

use std::collections::VecDeque;

use crate::region::Buffer;
use crate::tcp::wire::HEADER_BYTES;

/// Most bytes that are copied: as much as a fast network has under way. Bytes beyond this wait to be acknowledged.
pub(in crate::tcp) const COPIED_MAX: usize = 256 << 10;
/// Room for copies that a connection keeps while it has nothing to send.
const COPIED_KEPT: usize = 1 << 10;
/// So many chunks of which none is acknowledged are a socket's buffer full: a guess, beyond which memory is allocated.
const CHUNKS_LIKELY: usize = 8;

/// A chunk in its message's buffer.
#[derive(Debug, Clone, Copy)]
pub(in crate::tcp) struct Chunk {
    /// Number of its message.
    pub(in crate::tcp) message: u64,
    pub(in crate::tcp) header: [u8; HEADER_BYTES],
    /// Offset in the message.
    pub(in crate::tcp) at: u64,
    /// Length.
    pub(in crate::tcp) bytes: u64,
    /// Place of its header in the stream.
    from: u64,
}

impl Chunk {
    fn end(&self) -> u64 {
        self.from + HEADER_BYTES as u64 + self.bytes
    }

    /// Bytes of the header before a place in the stream, and of the payload.
    fn before(&self, place: u64) -> (usize, u64) {
        let passed = place.saturating_sub(self.from);
        (passed.min(HEADER_BYTES as u64) as usize, passed.saturating_sub(HEADER_BYTES as u64).min(self.bytes))
    }
}

/// Piece of the stream at a place.
#[derive(Debug)]
pub(in crate::tcp) enum Piece<'a> {
    /// These bytes.
    Copied(&'a [u8]),
    /// The rest of a header, then of a message's buffer.
    Chunk {
        message: u64,
        header: &'a [u8],
        /// Offset in the message.
        at: u64,
        left: u64,
    },
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::tcp) struct Log {
    copied: Vec<u8>,
    /// Bytes of `copied` that are acknowledged.
    passed: usize,
    /// Everything before was acknowledged.
    start: u64,
    chunks: VecDeque<Chunk>,
    end: u64,
}

impl Log {
    pub(in crate::tcp) fn new() -> Self {
        Log { copied: Vec::new(), passed: 0, start: 0, chunks: VecDeque::with_capacity(CHUNKS_LIKELY), end: 0 }
    }

    /// Everything before this place in the stream was acknowledged.
    pub(in crate::tcp) fn start(&self) -> u64 {
        self.start
    }

    /// Begin of the next chunk.
    pub(in crate::tcp) fn end(&self) -> u64 {
        self.end
    }

    /// Whether nothing would have to be sent again.
    pub(in crate::tcp) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Bytes that are copied.
    pub(in crate::tcp) fn copied_bytes(&self) -> usize {
        self.copied.len() - self.passed
    }

    /// Whether chunks are in messages' buffers; how many.
    pub(in crate::tcp) fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// Adds a chunk.
    pub(in crate::tcp) fn push(&mut self, message: u64, header: [u8; HEADER_BYTES], at: u64, bytes: u64) {
        let chunk = Chunk { message, header, at, bytes, from: self.end };
        self.end = chunk.end();
        self.chunks.push_back(chunk);
    }

    /// Piece at a place between `start` and `end`.
    pub(in crate::tcp) fn piece(&self, place: u64) -> Option<Piece<'_>> {
        // If nothing is sent again it is the last chunk.
        let chunk = match self.chunks.back() {
            Some(last) if last.from <= place => last,
            _ => {
                let later = self.chunks.partition_point(|chunk| chunk.from <= place);
                match later.checked_sub(1).and_then(|index| self.chunks.get(index)) {
                    Some(chunk) => chunk,
                    None => {
                        let skipped = usize::try_from(place.checked_sub(self.start)?).ok()?;
                        let copied = self.copied.get(self.passed + skipped..)?;
                        return (!copied.is_empty()).then_some(Piece::Copied(copied));
                    }
                }
            }
        };
        let (of_header, of_payload) = chunk.before(place);
        let (header, at) = (chunk.header.get(of_header..)?, chunk.at + of_payload);
        (place < chunk.end()).then_some(Piece::Chunk {
            message: chunk.message,
            header,
            at,
            left: chunk.bytes - of_payload,
        })
    }

    /// Everything before `place` is acknowledged. Chunks that it ends are taken with [`Log::take_acknowledged`].
    pub(in crate::tcp) fn acknowledge(&mut self, place: u64) {
        let bytes = place.min(self.end).saturating_sub(self.start);
        self.start += bytes;
        self.passed = self.copied.len().min(self.passed + bytes as usize);
        if self.passed == self.copied.len() {
            self.copied.clear();
            self.passed = 0;
        }
    }

    /// The oldest chunk, if all of it was acknowledged.
    pub(in crate::tcp) fn take_acknowledged(&mut self) -> Option<Chunk> {
        let acknowledged = self.start;
        self.chunks.pop_front_if(|chunk| chunk.end() <= acknowledged)
    }

    /// The oldest chunk, if all of it is before `place`, acknowledged or not.
    pub(in crate::tcp) fn take_written(&mut self, place: u64) -> Option<Chunk> {
        self.chunks.pop_front_if(|chunk| chunk.end() <= place)
    }

    /// The last chunk, if it ends before `place`; for who keeps nothing.
    pub(in crate::tcp) fn forget_last(&mut self, place: u64) -> Option<Chunk> {
        let chunk = self.chunks.pop_back_if(|chunk| chunk.end() <= place)?;
        self.start = chunk.end();
        Some(chunk)
    }

    /// Bytes that copying the oldest chunk would take, if it ends before `place`.
    pub(in crate::tcp) fn oldest_bytes(&self, place: u64) -> Option<usize> {
        let chunk = self.chunks.front().filter(|chunk| chunk.end() <= place)?;
        usize::try_from(chunk.end().saturating_sub(chunk.from.max(self.start))).ok()
    }

    /// The message of the oldest chunk.
    pub(in crate::tcp) fn oldest_message(&self) -> Option<u64> {
        self.chunks.front().map(|chunk| chunk.message)
    }

    /// Copies what is not acknowledged of the oldest chunk, whose message is in `buffer`, and takes it.
    pub(in crate::tcp) fn copy_oldest(&mut self, buffer: Buffer) -> Option<Chunk> {
        let chunk = self.chunks.pop_front()?;
        let (of_header, of_payload) = chunk.before(self.start);
        if self.passed > 0 {
            self.copied.copy_within(self.passed.., 0);
            self.copied.truncate(self.copied.len() - self.passed);
            self.passed = 0;
        }
        self.copied.extend_from_slice(chunk.header.get(of_header..).unwrap_or_default());
        buffer.append_to(&mut self.copied, chunk.at + of_payload, chunk.bytes - of_payload);
        Some(chunk)
    }

    /// From where on a message's bytes may be read again; `None` where no chunk of it is here.
    pub(in crate::tcp) fn unsettled(&self, message: u64) -> Option<u64> {
        let chunk = self.chunks.iter().find(|chunk| chunk.message == message)?;
        Some(chunk.at + chunk.before(self.start).1)
    }

    /// Gives back what it does not need while nothing is sent.
    pub(in crate::tcp) fn rest(&mut self) {
        if self.copied.is_empty() && self.copied.capacity() > COPIED_KEPT {
            self.copied = Vec::new();
        }
    }
}
