//! One TLS connection over TCP that carries frames: a length (u32, little-endian) and as many
//! bytes.
//!
//! ```text
//! connecting ------> handshaking ------> open
//! ```
//!
//! Says whether the kernel must be waited for; waits for nothing itself. Memory is bounded by a frame in each direction's
//! TLS buffer, one unfinished frame, and [`LINK_BUFFER_BYTES_MAX`] that wait to be written.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use rustls::Connection as Session;

use super::socket;
use crate::limits::{FRAME_BYTES_MAX, HELLO_BYTES_MAX, LINK_BUFFER_BYTES_MAX};
use crate::tls::PeerError;

/// Plain text that TLS holds encrypted: enough to fill a socket's buffer at once.
const TLS_BUFFER_BYTES: usize = 128 << 10;
/// Bytes taken from TLS at a time.
const READ_BYTES: usize = 16 << 10;
/// Bytes of a frame's length.
const LENGTH_BYTES: usize = 4;

/// Why a connection is of no use any more.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    #[error("cannot connect: {0}")]
    Connect(io::Error),
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    #[error("it hung up")]
    Closed,
    #[error("it hung up before it proved who it is")]
    ClosedEarly,
    #[error("it did not prove who it is within {0:?}")]
    Late(std::time::Duration),
    #[error("TLS: {0}")]
    Tls(#[from] rustls::Error),
    #[error(transparent)]
    Peer(#[from] PeerError),
    #[error("it sent a frame of {bytes} bytes, and {max} are the most")]
    Frame { bytes: usize, max: usize },
    #[error("nothing is answered: its host, or the path to it, is dead")]
    Unanswered,
    #[error("it does not read: more than {LINK_BUFFER_BYTES_MAX} bytes wait to be sent to it")]
    Slow,
    #[error("too many connections from there have not proved who they are")]
    Crowd,
    #[error("it is host {0}, which is to be connected to and not to connect")]
    Role(crate::protocol::Name),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Connecting,
    Handshaking,
    Open,
}

/// See the module's documentation.
pub(super) struct Connection {
    stream: TcpStream,
    session: Session,
    phase: Phase,
    /// As the kernel last said, until it says that it would block.
    readable: bool,
    writable: bool,
    /// A frame that has not come whole.
    input: Vec<u8>,
    /// Frames, of which what comes before `written` is TLS's.
    output: Vec<u8>,
    written: usize,
    had_frame: bool,
    had_bytes: bool,
}

fn would_block(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

impl Connection {
    /// `connecting`: it is not known yet whether the peer accepts.
    pub(super) fn new(stream: TcpStream, mut session: Session, connecting: bool) -> Self {
        session.set_buffer_limit(Some(TLS_BUFFER_BYTES));
        Connection {
            stream,
            session,
            phase: if connecting { Phase::Connecting } else { Phase::Handshaking },
            readable: false,
            writable: false,
            input: Vec::new(),
            output: Vec::new(),
            written: 0,
            had_frame: false,
            had_bytes: false,
        }
    }

    pub(super) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub(super) fn session(&self) -> &Session {
        &self.session
    }

    /// Whether it is not known yet whether the peer accepts.
    pub(super) fn is_connecting(&self) -> bool {
        self.phase == Phase::Connecting
    }

    /// Whether frames can go and come.
    pub(super) fn is_open(&self) -> bool {
        self.phase == Phase::Open
    }

    /// Whether the peer has said anything that a host would say.
    pub(super) fn had_frame(&self) -> bool {
        self.had_frame
    }

    /// Whether the peer has said anything at all.
    pub(super) fn had_bytes(&self) -> bool {
        self.had_bytes
    }

    /// The kernel's reason.
    pub(super) fn wake(&mut self, readable: bool, writable: bool) {
        self.readable |= readable;
        self.writable |= writable;
    }

    /// Goes a step: reads a little, and writes what there is. Returns whether there may be more to read.
    pub(super) fn advance(&mut self) -> Result<bool, Broken> {
        if self.phase == Phase::Connecting {
            if !self.writable || !socket::connected(&self.stream).map_err(Broken::Connect)? {
                return Ok(false);
            }
            self.stream.set_nodelay(true).map_err(Broken::Connect)?;
            self.phase = Phase::Handshaking;
        }
        let read = if self.readable { self.read() } else { Ok(()) };
        // Also after an error: the peer is told why.
        let wrote = self.write();
        read.and(wrote)?;
        if self.phase == Phase::Handshaking && !self.session.is_handshaking() {
            self.phase = Phase::Open;
            self.write()?;
        }
        Ok(self.readable)
    }

    fn read(&mut self) -> Result<(), Broken> {
        let ended = match self.session.read_tls(&mut &self.stream) {
            Ok(0) => true,
            Ok(_) => {
                self.had_bytes = true;
                false
            }
            Err(error) if would_block(&error) => {
                self.readable = false;
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        };
        self.session.process_new_packets()?;
        let mut bytes = [0; READ_BYTES];
        loop {
            match self.session.reader().read(&mut bytes) {
                Ok(0) => return Err(self.closed()),
                Ok(count) => self.input.extend_from_slice(bytes.get(..count).unwrap_or_default()),
                Err(error) if would_block(&error) => break,
                // The end without TLS's goodbye: a service that was killed.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(self.closed()),
                Err(error) => return Err(error.into()),
            }
        }
        if ended { Err(self.closed()) } else { Ok(()) }
    }

    fn closed(&self) -> Broken {
        if self.phase == Phase::Open { Broken::Closed } else { Broken::ClosedEarly }
    }

    /// A frame that has come whole.
    pub(super) fn take_frame(&mut self) -> Result<Option<Vec<u8>>, Broken> {
        let Some((length, rest)) = self.input.split_first_chunk::<LENGTH_BYTES>() else { return Ok(None) };
        let bytes = u32::from_le_bytes(*length) as usize;
        let max = if self.had_frame { FRAME_BYTES_MAX } else { HELLO_BYTES_MAX };
        if bytes > max {
            return Err(Broken::Frame { bytes, max });
        }
        let Some(frame) = rest.get(..bytes) else { return Ok(None) };
        let frame = frame.to_vec();
        self.input.drain(..LENGTH_BYTES + bytes);
        self.had_frame = true;
        Ok(Some(frame))
    }

    /// Takes a frame, to be written by [`Connection::write`].
    pub(super) fn push(&mut self, frame: &[u8]) -> Result<(), Broken> {
        debug_assert!(frame.len() <= FRAME_BYTES_MAX);
        if self.output.len() - self.written + LENGTH_BYTES + frame.len() > LINK_BUFFER_BYTES_MAX {
            return Err(Broken::Slow);
        }
        self.output.extend_from_slice(&(frame.len() as u32).to_le_bytes());
        self.output.extend_from_slice(frame);
        Ok(())
    }

    /// Writes what the kernel takes.
    pub(super) fn write(&mut self) -> Result<(), Broken> {
        if self.phase == Phase::Connecting {
            return Ok(());
        }
        loop {
            while self.writable && self.session.wants_write() {
                match self.session.write_tls(&mut &self.stream) {
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) if would_block(&error) => self.writable = false,
                    Err(error) => return Err(error.into()),
                }
            }
            let waiting = self.output.get(self.written..).unwrap_or_default();
            if self.phase != Phase::Open || waiting.is_empty() || self.session.wants_write() {
                break;
            }
            self.written += self.session.writer().write(waiting)?;
        }
        // Moved only when half of it is of no use, so that each byte is moved once on average.
        if self.written > self.output.len() / 2 {
            self.output.drain(..self.written);
            self.written = 0;
        }
        Ok(())
    }

    /// Says goodbye, if the kernel takes it at once: frames that wait are void.
    pub(super) fn hang_up(mut self) {
        self.session.send_close_notify();
        while self.session.wants_write() && self.phase != Phase::Connecting {
            if self.session.write_tls(&mut &self.stream).is_err() {
                break;
            }
        }
    }
}
