//! The sending half of a flow: connects its sockets, then hands out the chunks of its messages to those that have room.

use std::time::Duration;

use mccs_ipc::types::Handle;
use nix::errno::Errno;

use super::super::region::{Buffer, Regions};
use super::super::request::{self, RequestRing};
use super::super::{Fault, MemoryKey, Status, TransportError};
use super::socket::{Moved, Socket};
use super::watches::Ready;
use super::wire::{ChunkHeader, Grid, HEADER_BYTES, Hello, VERDICT_BYTES, Verdict};
use super::{Pumped, peer_gone};

/// How far a message is.
#[derive(Debug)]
struct Outgoing {
    tag: u32,
    /// Next chunk to hand out.
    next_chunk: u64,
    written_chunks: u64,
}

/// How far a socket is.
#[derive(Debug)]
enum Stage {
    Connecting,
    Greeting { sent: usize },
    Waiting { bytes: [u8; VERDICT_BYTES], got: usize },
    Open,
}

/// A chunk on its way into a socket.
#[derive(Debug)]
struct Chunk {
    message: u64,
    header: [u8; HEADER_BYTES],
    header_written: usize,
    /// Offset in the message of what comes next.
    at: u64,
    left: u64,
}

#[derive(Debug)]
struct Connection {
    socket: Socket,
    watch: Handle,
    stage: Stage,
    readable: bool,
    writable: bool,
    chunk: Option<Chunk>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Sender {
    ring: RequestRing<Outgoing>,
    grid: Grid,
    hello: Hello,
    connections: Vec<Connection>,
    /// Connections that were welcomed.
    open: usize,
    /// The message whose chunks are being handed out.
    current: u64,
}

impl Sender {
    pub(super) fn new(hello: Hello, requests: u16) -> Self {
        Sender {
            ring: RequestRing::new(requests),
            grid: hello.grid(),
            hello,
            connections: Vec::with_capacity(hello.connections.into()),
            open: 0,
            current: 0,
        }
    }

    /// For how long its peer has left unanswered what it should have answered, while messages are unfinished.
    pub(super) fn silence(&self) -> Option<Duration> {
        self.ring
            .has_unfinished()
            .then(|| self.connections.iter().map(|connection| connection.socket.silence()).max().unwrap_or_default())
    }

    /// Adds a socket that has begun to connect.
    pub(super) fn add(&mut self, socket: Socket, watch: Handle) {
        let connection =
            Connection { socket, watch, stage: Stage::Connecting, readable: false, writable: false, chunk: None };
        self.connections.push(connection);
    }

    /// Its sockets, in order.
    pub(super) fn sockets(&self) -> impl Iterator<Item = &Socket> {
        self.connections.iter().map(|connection| &connection.socket)
    }

    /// Whether all its sockets are connected, though perhaps nobody has accepted them.
    pub(super) fn has_reached_peer(&self) -> bool {
        let is_there = |connection: &Connection| matches!(connection.stage, Stage::Waiting { .. } | Stage::Open);
        self.connections.iter().filter(|connection| is_there(connection)).count() == usize::from(self.hello.connections)
    }

    pub(super) fn is_connected(&self) -> bool {
        self.open == usize::from(self.hello.connections)
    }

    pub(super) fn ready(&mut self, connection: u16, ready: Ready) {
        if let Some(connection) = self.connections.get_mut(usize::from(connection)) {
            connection.readable |= ready.readable || ready.hung_up;
            connection.writable |= ready.writable || ready.hung_up;
        }
    }

    pub(super) fn post(&mut self, key: MemoryKey, buffer: Buffer, tag: u32, regions: &mut Regions) -> Option<u64> {
        self.ring.push(key, buffer, Outgoing { tag, next_chunk: 0, written_chunks: 0 }, regions)
    }

    /// How far a send is.
    pub(super) fn test(&mut self, number: u64) -> Result<Status, TransportError> {
        if let Some(done) = self.ring.test(number)? {
            return Ok(done);
        }
        let handed_out = self.ring.get(number).map_or(0, |entry| {
            let (offset, _) = self.grid.chunk(entry.progress.next_chunk, entry.buffer.bytes);
            offset
        });
        let writing = self.connections.iter().filter_map(|connection| connection.chunk.as_ref());
        let unwritten = writing.filter(|chunk| chunk.message == number).map(|chunk| chunk.at).min();
        Ok(Status::Running { bytes: unwritten.map_or(handed_out, |at| at.min(handed_out)) })
    }

    /// Does what can be done without waiting, up to about `budget_bytes`.
    pub(super) fn pump(&mut self, budget_bytes: u64, regions: &mut Regions) -> Result<Pumped, Fault> {
        let mut pumped = Pumped::default();
        if !self.is_connected() {
            for index in 0..self.connections.len() {
                pumped.moved |= self.connect(index)?;
            }
            if !self.is_connected() {
                return Ok(pumped);
            }
        }
        for connection in &mut self.connections {
            connection.check_peer()?;
        }
        let mut left = budget_bytes;
        let mut progress = true;
        while progress {
            progress = false;
            for index in 0..self.connections.len() {
                if left == 0 {
                    pumped.more = true;
                    return Ok(pumped);
                }
                let bytes = self.write(index, left, regions)?;
                progress |= bytes > 0;
                left = left.saturating_sub(bytes);
            }
            pumped.moved |= progress;
        }
        Ok(pumped)
    }

    /// Connects, says hello, and reads the verdict. Returns whether it got further.
    fn connect(&mut self, index: usize) -> Result<bool, Fault> {
        let Some(connection) = self.connections.get_mut(index) else { return Ok(false) };
        let mut further = false;
        loop {
            match &mut connection.stage {
                Stage::Connecting if connection.writable => {
                    connection.socket.connected()?;
                    connection.stage = Stage::Greeting { sent: 0 };
                }
                Stage::Greeting { sent } => {
                    let hello = Hello { connection: index as u16, ..self.hello }.encode();
                    match connection.socket.write_slice(&hello[*sent..]).map_err(unanswered)? {
                        Moved::Bytes(bytes) => *sent += bytes,
                        Moved::WouldBlock | Moved::End => return Ok(further),
                    }
                    if *sent == hello.len() {
                        connection.stage = Stage::Waiting { bytes: [0; VERDICT_BYTES], got: 0 };
                    }
                }
                Stage::Waiting { bytes, got } if connection.readable => {
                    match connection.socket.read_slice(&mut bytes[*got..]).map_err(unanswered)? {
                        Moved::Bytes(count) => *got += count,
                        Moved::WouldBlock => connection.readable = false,
                        Moved::End => return Err(NO_ANSWER),
                    }
                    if *got == VERDICT_BYTES {
                        Verdict::check(bytes)?;
                        connection.stage = Stage::Open;
                        self.open += 1;
                    }
                }
                Stage::Connecting | Stage::Waiting { .. } | Stage::Open => return Ok(further),
            }
            further = true;
        }
    }

    /// Gives a connection the next chunk, if there is one.
    fn assign(&mut self, index: usize) {
        let Some(entry) = self.ring.get_mut(self.current) else { return };
        let message_bytes = entry.buffer.bytes;
        let chunk = entry.progress.next_chunk;
        let (at, left) = self.grid.chunk(chunk, message_bytes);
        let header =
            ChunkHeader { message: self.current as u32, chunk: chunk as u32, message_bytes, tag: entry.progress.tag };
        entry.progress.next_chunk += 1;
        let message = self.current;
        if entry.progress.next_chunk == self.grid.chunks(message_bytes) {
            self.current += 1;
        }
        if let Some(connection) = self.connections.get_mut(index) {
            connection.chunk = Some(Chunk { message, header: header.encode(), header_written: 0, at, left });
        }
    }

    /// Writes once. Returns the number of bytes.
    fn write(&mut self, index: usize, budget_bytes: u64, regions: &mut Regions) -> Result<u64, Fault> {
        match self.connections.get(index) {
            Some(connection) if !connection.writable => return Ok(0),
            Some(connection) if connection.chunk.is_none() => self.assign(index),
            _ => {}
        }
        let Some(connection) = self.connections.get_mut(index) else { return Ok(0) };
        let Some(chunk) = &mut connection.chunk else { return Ok(0) };
        let Some(entry) = self.ring.get_mut(chunk.message) else {
            return Err(Fault::Protocol("bug: a chunk outlives its message"));
        };
        let (payload, bytes) = entry.buffer.part(chunk.at, chunk.left.min(budget_bytes));
        let header = &chunk.header[chunk.header_written..];
        // SAFETY: the part lies inside memory that the unfinished request holds, which `register`'s caller keeps readable.
        let written = unsafe { connection.socket.write(header, payload, bytes) };
        match written.map_err(peer_gone)? {
            Moved::Bytes(count) => {
                let of_header = count.min(header.len());
                chunk.header_written += of_header;
                let of_payload = (count - of_header) as u64;
                chunk.at += of_payload;
                chunk.left = chunk.left.saturating_sub(of_payload);
                if chunk.left == 0 && chunk.header_written == HEADER_BYTES {
                    let message = chunk.message;
                    connection.chunk = None;
                    entry.progress.written_chunks += 1;
                    let message_bytes = entry.buffer.bytes;
                    if entry.progress.written_chunks == self.grid.chunks(message_bytes) {
                        self.ring.finish(message, request::Moved { bytes: message_bytes, tag: 0 }, regions);
                    }
                }
                Ok(count as u64)
            }
            Moved::WouldBlock | Moved::End => {
                connection.writable = false;
                Ok(0)
            }
        }
    }

    /// Ends all sockets; buffers are free after. Returns their watches.
    pub(super) fn end(&mut self, regions: &mut Regions) -> Vec<Handle> {
        // A flow that is closed while it sends is cancelled: the peer is not to get what the kernel still has.
        let rest_is_wanted = !self.ring.has_unfinished();
        self.ring.abandon(regions);
        let end = |connection: Connection| {
            connection.socket.close(rest_is_wanted);
            connection.watch
        };
        std::mem::take(&mut self.connections).into_iter().map(end).collect()
    }
}

impl Connection {
    /// The receiver has nothing to say: what is readable is its end, or wrong.
    fn check_peer(&mut self) -> Result<(), Fault> {
        if !self.readable {
            return Ok(());
        }
        match self.socket.read_slice(&mut [0; 1]).map_err(peer_gone)? {
            Moved::Bytes(_) => Err(Fault::Protocol("a receiver sends bytes")),
            Moved::End => Err(Fault::Closed),
            Moved::WouldBlock => {
                self.readable = false;
                Ok(())
            }
        }
    }
}

const NO_ANSWER: Fault = Fault::Refused("it closes the connection without an answer");

fn unanswered(errno: Errno) -> Fault {
    match peer_gone(errno) {
        Fault::Closed => NO_ANSWER,
        fault => fault,
    }
}
