//! Receiving half of a TCP flow: reads chunks from its sockets straight into the posted buffers.
//!
//! A socket is read into the rest of its chunk and, behind that, into a small *stash*, which so gets the next header and
//! the first bytes after it in the same system call. Small messages go through the stash whole; of a larger chunk only its
//! first bytes do.
//!
//! A connection goes on over another socket, its *successor*, when all is taken that its old socket has brought: what the kernel has
//! acknowledged nobody sends again. While more is there than the stash may hold, the successor waits for its answer, and so does
//! the sender: a flow whose paths die again and again does not bring its kernel's buffers into this service's memory.

use mccs_ipc::types::Handle;

use super::Pumped;
use crate::region::{Buffer, Regions};
use crate::request::RequestRing;
use crate::tcp::accept::listener::Arrived;
use crate::tcp::flow::reorder_window::{Arrival, Claim};
use crate::tcp::socket::peer_gone;
use crate::tcp::socket::{Moved, Socket};
use crate::tcp::watches::Ready;
use crate::tcp::wire::{ChunkHeader, Grid, HEADER_BYTES, Hello};
use crate::{Fault, MemoryKey, Status, TransportError};

/// Room of a stash: messages of a page, with their header, need one system call and a copy that costs less than a second
/// call.
const STASH_BYTES: usize = 4096 + 2 * HEADER_BYTES;
/// Room of a stash that takes what an old socket has left. If buffers are posted, more is soon gone; if none are, nobody waits.
const LEFT_BYTES_MAX: usize = 32 << 10;

#[derive(Debug)]
struct Stash {
    /// [`STASH_BYTES`]; [`LEFT_BYTES_MAX`] where the connection has gone on over another socket, until that is used up.
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

/// Bytes that a socket still had.
struct Drained {
    bytes: u64,
    /// Whether it has no more.
    is_all: bool,
}

impl Stash {
    fn new() -> Self {
        Stash { bytes: vec![0; STASH_BYTES], start: 0, end: 0 }
    }

    /// Takes what a socket still has, as far as there is room.
    fn drain(&mut self, socket: &Socket) -> Drained {
        let mut bytes = 0;
        loop {
            if self.room().is_empty() {
                if self.bytes.len() >= LEFT_BYTES_MAX {
                    return Drained { bytes, is_all: false };
                }
                self.bytes.resize(LEFT_BYTES_MAX, 0);
            }
            let end = self.end;
            // Whatever ends it: what comes after is sent again.
            let Ok(Moved::Bytes(count)) = socket.read_slice(&mut self.bytes[end..]) else {
                return Drained { bytes, is_all: true };
            };
            self.end += count;
            bytes += count as u64;
        }
    }

    fn len(&self) -> usize {
        self.end - self.start
    }

    fn content(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    fn consume(&mut self, bytes: usize) {
        self.start += bytes;
    }

    /// Room behind the content, which moves to the front.
    fn room(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            if self.bytes.len() > STASH_BYTES && self.end < STASH_BYTES {
                self.bytes.truncate(STASH_BYTES);
                self.bytes.shrink_to_fit();
            }
        }
        &mut self.bytes[self.end..]
    }

    fn header(&mut self) -> Option<[u8; HEADER_BYTES]> {
        let header = self.content().first_chunk::<HEADER_BYTES>().copied()?;
        self.consume(HEADER_BYTES);
        Some(header)
    }
}

/// A chunk on its way out of a socket.
#[derive(Debug)]
struct Chunk {
    message: u64,
    chunk: u32,
    /// Offset in the message of what comes next.
    at: u64,
    left: u64,
}

/// Socket with which a connection goes on when its old one has no more.
#[derive(Debug)]
struct Successor {
    socket: Socket,
    watch: Handle,
    resumption: u32,
    hung_up: bool,
}

#[derive(Debug)]
struct Connection {
    socket: Socket,
    watch: Handle,
    /// How many sockets it had before.
    resumption: u32,
    /// Bytes of its stream that were read, from all its sockets.
    received: u64,
    readable: bool,
    /// The end has been signalled: it comes behind what is still to be read.
    hung_up: bool,
    ended: bool,
    stash: Stash,
    /// Read, and not claimed yet: its buffer is not posted, or it is too far ahead.
    header: Option<ChunkHeader>,
    chunk: Option<Chunk>,
    successor: Option<Successor>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::tcp) struct Receiver {
    ring: RequestRing<Arrival>,
    grid: Grid,
    /// Hello of one of its connections.
    hello: Option<Hello>,
    connections: Vec<Connection>,
    /// Watches of sockets that were closed.
    closed: Vec<Handle>,
}

impl Receiver {
    /// A flow that has no sockets yet.
    pub(in crate::tcp) fn new(requests: u16) -> Self {
        let (grid, connections, closed) = (Grid::new(1, 0), Vec::new(), Vec::new());
        Receiver { ring: RequestRing::new(requests), grid, hello: None, connections, closed }
    }

    /// The peer has connected.
    pub(in crate::tcp) fn start(&mut self, hello: Hello, sockets: impl Iterator<Item = Arrived>) {
        self.grid = hello.grid();
        self.hello = Some(hello);
        self.connections = sockets.map(Connection::new).collect();
    }

    /// The peer goes on with a connection over another socket, which is taken when there is room for what the old one still has.
    /// Returns whether it will be: not if this is not the flow that is meant, or a later socket was there before.
    pub(in crate::tcp) fn go_on_with(&mut self, hello: &Hello, socket: Socket, watch: Handle) -> bool {
        let is_ours = self.hello.is_some_and(|ours| ours.is_of_same_flow(hello));
        let connection = self.connections.get_mut(usize::from(hello.connection)).filter(|_| is_ours);
        let Some(connection) = connection else { return false };
        let last = connection.successor.as_ref().map_or(connection.resumption, |successor| successor.resumption);
        if last >= hello.resumption {
            return false;
        }
        let successor = Successor { socket, watch, resumption: hello.resumption, hung_up: false };
        if let Some(earlier) = connection.successor.replace(successor) {
            earlier.socket.close(false);
            self.closed.push(earlier.watch);
        }
        true
    }

    /// Takes successors of sockets that have no more, or whose rest there is room for; `answer` says on them how many bytes of the
    /// connection's stream have come. Returns whether there were any.
    pub(in crate::tcp) fn take_successors(&mut self, answer: impl Fn(&Socket, u64) -> Result<(), Fault>) -> bool {
        let mut took = false;
        for connection in self.connections.iter_mut().filter(|connection| connection.successor.is_some()) {
            let Drained { bytes, is_all } = connection.stash.drain(&connection.socket);
            connection.received += bytes;
            let Some(Successor { socket, watch, resumption, hung_up }) = connection.successor.take_if(|_| is_all)
            else {
                continue;
            };
            took = true;
            if answer(&socket, connection.received).is_err() {
                // Whoever said the hello has gone on otherwise.
                self.closed.push(watch);
                continue;
            }
            std::mem::replace(&mut connection.socket, socket).close(false);
            self.closed.push(std::mem::replace(&mut connection.watch, watch));
            connection.resumption = resumption;
            (connection.readable, connection.hung_up, connection.ended) = (true, hung_up, false);
        }
        took
    }

    /// Watches of sockets that were closed since.
    pub(in crate::tcp) fn take_closed(&mut self) -> impl Iterator<Item = Handle> {
        self.closed.drain(..)
    }

    /// Hello of its sender.
    #[cfg(test)]
    pub(in crate::tcp) fn hello(&self) -> Option<Hello> {
        self.hello
    }

    /// Its sockets, in order, with how many each one's connection had before.
    pub(in crate::tcp) fn sockets(&self) -> impl Iterator<Item = (&Socket, Handle, u32)> {
        self.connections.iter().map(|connection| (&connection.socket, connection.watch, connection.resumption))
    }

    pub(in crate::tcp) fn is_connected(&self) -> bool {
        !self.connections.is_empty()
    }

    /// Whether a message is on its way into a posted buffer, or yet to come, over a single socket.
    pub(in crate::tcp) fn awaits_message(&self) -> bool {
        self.connections.len() == 1 && self.ring.has_unfinished()
    }

    /// A guess, which costs a call if it is wrong.
    pub(in crate::tcp) fn suppose_readable(&mut self) {
        self.connections.iter_mut().for_each(|connection| connection.readable = true);
    }

    pub(in crate::tcp) fn ready(&mut self, connection: u16, watch: Handle, ready: Ready) {
        let Some(connection) = self.connections.get_mut(usize::from(connection)) else { return };
        if connection.watch == watch {
            connection.readable |= ready.readable || ready.hung_up;
            connection.hung_up |= ready.hung_up;
        } else if let Some(successor) = connection.successor.as_mut().filter(|successor| successor.watch == watch) {
            successor.hung_up |= ready.hung_up;
        }
    }

    pub(in crate::tcp) fn post(&mut self, key: MemoryKey, buffer: Buffer, regions: &mut Regions) -> Option<u64> {
        self.ring.push(key, buffer, Arrival::default(), regions)
    }

    /// How far a receive is.
    pub(in crate::tcp) fn test(&mut self, number: u64) -> Result<Status, TransportError> {
        if let Some(done) = self.ring.test(number)? {
            return Ok(done);
        }
        let Some(arrival) = self.ring.get(number).map(|entry| &entry.progress) else {
            return Ok(Status::Running { bytes: 0 });
        };
        let frontier = arrival.frontier();
        let reading = self.connections.iter().filter_map(|connection| connection.chunk.as_ref());
        let mut at_frontier = reading.filter(|chunk| chunk.message == number && u64::from(chunk.chunk) == frontier);
        let whole = arrival.whole_bytes(self.grid);
        Ok(Status::Running { bytes: at_frontier.next().map_or(whole, |chunk| chunk.at) })
    }

    /// Does what can be done without waiting, up to about `budget_bytes`.
    pub(in crate::tcp) fn pump(&mut self, budget_bytes: u64, regions: &mut Regions) -> Result<Pumped, Fault> {
        let mut pumped = Pumped::default();
        let mut left = budget_bytes;
        // Again while something moved: one socket's chunk may have opened the window for another.
        let mut progress = true;
        while progress {
            progress = false;
            for index in 0..self.connections.len() {
                while self.step(index, &mut left, regions)? {
                    progress = true;
                    if left == 0 {
                        return Ok(Pumped { moved: true, more: true, ..Pumped::default() });
                    }
                }
            }
            pumped.moved |= progress;
        }
        let over =
            |connection: &Connection| connection.ended && connection.header.is_none() && connection.successor.is_none();
        if self.is_connected() && self.connections.iter().all(over) {
            return Err(Fault::Closed);
        }
        Ok(pumped)
    }

    /// One step of a connection; false if it cannot go on now.
    fn step(&mut self, index: usize, left: &mut u64, regions: &mut Regions) -> Result<bool, Fault> {
        let Some(connection) = self.connections.get_mut(index) else { return Ok(false) };
        if let Some(chunk) = &mut connection.chunk {
            if chunk.left > 0 {
                let Some(entry) = self.ring.get(chunk.message) else {
                    return Err(Fault::Protocol("bug: a chunk outlives its message"));
                };
                return connection.fill(entry.buffer, left);
            }
            let (message, chunk) = (chunk.message, chunk.chunk);
            connection.chunk = None;
            let complete = self.ring.get_mut(message).and_then(|entry| entry.progress.finish(chunk, self.grid));
            if let Some(moved) = complete {
                self.ring.finish(message, moved, regions);
            }
            return Ok(true);
        }
        let Some(header) = connection.header else {
            return connection.next_header(self.grid, self.ring.has_unfinished());
        };
        // Numbers on the wire wrap; chunks of messages before the oldest unfinished one come out far ahead.
        let running = self.ring.running();
        let ahead = header.message.wrapping_sub(running as u32);
        if ahead > u32::MAX / 2 {
            return Err(Fault::Protocol("a chunk of a message that was complete"));
        }
        let message = running + u64::from(ahead);
        if message >= self.ring.next() {
            return Ok(false);
        }
        let Some(entry) = self.ring.get_mut(message) else {
            return Err(Fault::Protocol("a chunk of a message that was complete"));
        };
        match entry.progress.claim(&header, self.grid, entry.buffer.bytes)? {
            Claim::Later => Ok(false),
            Claim::Read { offset, bytes } => {
                connection.header = None;
                connection.chunk = Some(Chunk { message, chunk: header.chunk, at: offset, left: bytes });
                Ok(true)
            }
        }
    }

    /// Ends all sockets; buffers are free after. Returns their watches.
    pub(in crate::tcp) fn end(&mut self, regions: &mut Regions) -> Vec<Handle> {
        self.ring.abandon(regions);
        let mut closed = std::mem::take(&mut self.closed);
        for Connection { socket, watch, successor, .. } in std::mem::take(&mut self.connections) {
            let successor = successor.map(|successor| (successor.socket, successor.watch));
            for (socket, watch) in successor.into_iter().chain([(socket, watch)]) {
                socket.close(false);
                closed.push(watch);
            }
        }
        closed
    }
}

impl Connection {
    fn new((socket, watch, resumption): Arrived) -> Self {
        Connection {
            socket,
            watch,
            resumption,
            received: 0,
            // Something may have come before anybody watched for it.
            readable: true,
            hung_up: false,
            ended: false,
            stash: Stash::new(),
            header: None,
            chunk: None,
            successor: None,
        }
    }

    /// Its socket brings no more. If it has a successor that is no end.
    fn over(&mut self, fault: Fault) -> Result<bool, Fault> {
        if self.successor.is_none() {
            return Err(fault);
        }
        self.readable = false;
        Ok(false)
    }

    /// Moves bytes of the chunk into its message's buffer: from the stash, else from the socket.
    fn fill(&mut self, buffer: Buffer, left: &mut u64) -> Result<bool, Fault> {
        let Some(chunk) = &mut self.chunk else { return Ok(false) };
        let mut bytes = 0;
        if self.stash.len() > 0 {
            let there = self.stash.len().min(usize::try_from(chunk.left).unwrap_or(usize::MAX));
            bytes = buffer.write(chunk.at, &self.stash.content()[..there]);
            self.stash.consume(bytes);
        } else if self.ended {
            return Err(Fault::Closed);
        } else if self.readable {
            let (payload, room) = buffer.part(chunk.at, chunk.left.min(*left));
            // Only what follows the chunk may go to the stash.
            let rest = if room as u64 == chunk.left { self.stash.room() } else { &mut [] };
            let asked = room + rest.len();
            // SAFETY: the part lies inside memory that the unfinished request holds, which `register`'s caller keeps
            // writable.
            match unsafe { self.socket.read(payload, room, rest) } {
                Ok(Moved::Bytes(count)) => {
                    bytes = count.min(room);
                    self.stash.end += count - bytes;
                    self.took(count, asked);
                }
                Ok(Moved::WouldBlock) => self.readable = false,
                Ok(Moved::End) => return self.over(Fault::Closed),
                Err(errno) => return self.over(peer_gone(errno)),
            }
        }
        if let Some(chunk) = &mut self.chunk {
            chunk.at += bytes as u64;
            chunk.left = chunk.left.saturating_sub(bytes as u64);
        }
        *left = left.saturating_sub(bytes as u64);
        Ok(bytes > 0)
    }

    /// Gets the next header. While nothing is posted the socket is only read to find its end.
    fn next_header(&mut self, grid: Grid, is_posted: bool) -> Result<bool, Fault> {
        if let Some(header) = self.stash.header() {
            self.header = Some(ChunkHeader::decode(&header, grid)?);
            return Ok(true);
        }
        if self.ended || !self.readable || !(is_posted || self.hung_up) {
            return Ok(false);
        }
        let room = self.stash.room();
        let asked = room.len();
        match self.socket.read_slice(room).map_err(peer_gone) {
            Ok(Moved::Bytes(count)) => {
                self.stash.end += count;
                self.took(count, asked);
            }
            Ok(Moved::WouldBlock) => self.readable = false,
            _ if self.successor.is_some() => self.readable = false,
            // Between two chunks a reset is an end like any other; whether anybody minds is seen when all have ended.
            Ok(Moved::End) | Err(Fault::Closed) if self.stash.len() > 0 => {
                return Err(Fault::Protocol("half a header"));
            }
            Ok(Moved::End) | Err(Fault::Closed) => {
                self.ended = true;
                return Ok(true);
            }
            Err(fault) => return Err(fault),
        }
        Ok(self.readable || self.stash.len() >= HEADER_BYTES)
    }

    /// A socket that gave less than was asked for has no more, and says when it has again. Not so at its end.
    fn took(&mut self, count: usize, asked: usize) {
        self.received += count as u64;
        if count < asked && !self.hung_up {
            self.readable = false;
        }
    }
}
