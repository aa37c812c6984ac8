//! Sending half of a TCP flow: stripes the chunks of messages over connections that have room.
//!
//! A flow that can go on over other paths keeps what the peer's kernel has not acknowledged (`retransmission.rs`). So a short message is
//! copied when it is written, and done; a longer one is done when it was acknowledged, or when that takes long enough for a copy of what is
//! left to be cheap. A caller that has nothing else to do settles that: see [`Sender::settle`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::wire::ChunkRange;
use mccs_ipc::types::Handle;

use super::Pumped;
use crate::region::{Buffer, Regions};
use crate::request::{self, RequestRing};
use crate::tcp::flow::connection::{Connection, LOOKS, Look};
use crate::tcp::flow::retransmission::{COPIED_MAX, Log, Piece};
use crate::tcp::socket::peer_gone;
use crate::tcp::socket::{Moved, Socket};
use crate::tcp::watches::Ready;
use crate::tcp::wire::{Address, ChunkHeader, Grid, HEADER_BYTES, Hello};
use crate::{Fault, FlowOptions, FlowPath, MemoryKey, Status, TransportError};

/// Chunks of which no more is unacknowledged are copied at once: that costs less than to ask for them.
const COPIED_AT_ONCE: usize = 8 << 10;
/// When so much is copied the kernel is asked what of it was acknowledged.
const TRIMMED_FROM: usize = 32 << 10;
/// Looking more often says no more: the kernel's own times are coarser.
const LOOKED_AT_EVERY_MIN: Duration = Duration::from_millis(5);
/// An acknowledgement that has not come after so long, since whoever receives it is busy or waits for more, is not waited for
/// where a copy will do. If nothing follows that could be sent meanwhile, it is waited for no longer than a copy takes.
const SETTLED_AFTER: Duration = Duration::from_micros(200);
/// Rate of a copy.
const COPIED_PER_NS: u64 = 8;

/// How far a message is.
#[derive(Debug)]
struct Outgoing {
    tag: u32,
    /// Next chunk to hand out.
    next_chunk: u64,
    /// Chunks whose bytes in the buffer are not read again.
    settled_chunks: u64,
}

/// The result of asking what was acknowledged.
pub(in crate::tcp) struct Settled {
    /// Whether a message, or a part of one, was settled.
    pub(in crate::tcp) has_moved: bool,
    pub(in crate::tcp) is_left: bool,
}

/// A flow's path, and its detours.
#[derive(Debug)]
pub(in crate::tcp) struct Route {
    to: Address,
    options: FlowOptions,
    /// Its own first. One that stays where it is has no others.
    paths: Vec<FlowPath>,
}

impl Route {
    pub(in crate::tcp) fn new(to: Address, options: &FlowOptions) -> Self {
        let own = options.path();
        let others = options.detours.iter().filter(|_| options.path_timeout.is_some()).filter(|path| **path != own);
        Route { to, options: options.clone(), paths: std::iter::once(own.clone()).chain(others.cloned()).collect() }
    }

    /// Begins to connect over one of the paths.
    fn connect(&self, path: usize, connection: u16) -> Result<Socket, Fault> {
        let path = self.paths.get(path).cloned().unwrap_or_else(|| self.options.path());
        Socket::connect(self.to.address, &self.options.on_path_alone(&path), connection)
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::tcp) struct Sender {
    ring: RequestRing<Outgoing>,
    grid: Grid,
    hello: Hello,
    route: Box<Route>,
    connections: Vec<Connection>,
    /// The message whose chunks are being handed out.
    current: u64,
    /// Since when something is written and not settled.
    unsettled_since: Option<Instant>,
    /// Copies that make the kernel be asked.
    trim_from: usize,
    /// Its user has closed it: it lives until all is acknowledged.
    lingers: bool,
    /// Watches of sockets that were closed.
    closed: Vec<Handle>,
    /// Paths that bring no answer, and those that do again.
    path_news: Vec<(FlowPath, bool)>,
}

/// Results of a look at a flow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::tcp) struct Looked {
    /// Something is owed, so it is to be looked at again.
    pub(in crate::tcp) is_owed: bool,
    /// When else it is to be looked at again.
    pub(in crate::tcp) look_at: Option<Instant>,
    /// A request has ended.
    pub(in crate::tcp) moved: bool,
    /// It was closed, and all is acknowledged.
    pub(in crate::tcp) is_over: bool,
}

impl Sender {
    pub(in crate::tcp) fn new(hello: Hello, route: Box<Route>) -> Self {
        Sender {
            ring: RequestRing::new(route.options.requests),
            grid: hello.grid(),
            hello,
            route,
            connections: (0..hello.connections).map(Connection::new).collect(),
            current: 0,
            unsettled_since: None,
            trim_from: TRIMMED_FROM,
            lingers: false,
            closed: Vec::new(),
            path_news: Vec::new(),
        }
    }

    /// Whether it goes on over another path when its own is dead.
    pub(in crate::tcp) fn can_resume(&self) -> bool {
        self.route.options.path_timeout.is_some()
    }

    /// How often it is to be looked at while something is owed.
    pub(in crate::tcp) fn looked_at_every(&self) -> Option<Duration> {
        self.route.options.path_timeout.map(|timeout| (timeout / LOOKS).max(LOOKED_AT_EVERY_MIN))
    }

    /// For how long its peer has left unanswered what it should have answered, while messages are unfinished.
    pub(in crate::tcp) fn silence(&self) -> Option<Duration> {
        let of_sockets = || self.sockets().map(Socket::silence).max().unwrap_or_default();
        self.ring.has_unfinished().then(of_sockets)
    }

    /// Begins to connect a connection's next socket. It is to be watched, and given to [`Sender::dialled`] with the path.
    pub(in crate::tcp) fn dial(&mut self, connection: u16) -> Result<(Socket, usize), Fault> {
        let own = self.connections.get_mut(usize::from(connection));
        let paths = self.route.paths.len();
        let path = match own {
            Some(own) => match own.take_answered() {
                Some(answered) => return Ok(answered),
                None => own.next_path(paths),
            },
            None => 0,
        };
        Ok((self.route.connect(path, connection)?, path))
    }

    /// A socket of [`Sender::dial`] is watched.
    pub(in crate::tcp) fn dialled(&mut self, connection: u16, socket: Socket, watch: Handle, path: usize) {
        if let Some(connection) = self.connections.get_mut(usize::from(connection)) {
            self.closed.extend(connection.dial(socket, watch, path));
        }
    }

    /// Watches of sockets that were closed since.
    pub(in crate::tcp) fn take_closed(&mut self) -> impl Iterator<Item = Handle> {
        self.closed.drain(..)
    }

    /// News of paths since the last call.
    pub(in crate::tcp) fn take_path_events(&mut self) -> impl Iterator<Item = (FlowPath, bool)> {
        self.path_news.drain(..)
    }

    /// Its sockets, in order.
    pub(in crate::tcp) fn sockets(&self) -> impl Iterator<Item = &Socket> {
        self.connections.iter().filter_map(Connection::socket)
    }

    /// Whether all its sockets are connected, though perhaps nobody has accepted them.
    pub(in crate::tcp) fn has_reached_peer(&self) -> bool {
        self.connections.iter().all(Connection::has_reached_peer)
    }

    pub(in crate::tcp) fn is_connected(&self) -> bool {
        !self.connections.is_empty() && self.connections.iter().all(Connection::is_open)
    }

    pub(in crate::tcp) fn ready(&mut self, connection: u16, watch: Handle, ready: Ready) {
        if let Some(connection) = self.connections.get_mut(usize::from(connection)) {
            connection.ready(watch, ready);
        }
    }

    pub(in crate::tcp) fn post(
        &mut self,
        key: MemoryKey,
        buffer: Buffer,
        tag: u32,
        regions: &mut Regions,
    ) -> Option<u64> {
        self.ring.push(key, buffer, Outgoing { tag, next_chunk: 0, settled_chunks: 0 }, regions)
    }

    /// How far a send is.
    pub(in crate::tcp) fn test(&mut self, number: u64) -> Result<Status, TransportError> {
        if let Some(done) = self.ring.test(number)? {
            return Ok(done);
        }
        let handed_out = self
            .ring
            .get(number)
            .map_or(0, |entry| self.grid.chunk(entry.progress.next_chunk, entry.buffer.bytes).offset);
        let unsettled = self.connections.iter().filter_map(|connection| connection.log.unsettled(number)).min();
        Ok(Status::Running { bytes: unsettled.map_or(handed_out, |at| at.min(handed_out)) })
    }

    /// Does what can be done without waiting, up to about `budget_bytes`.
    pub(in crate::tcp) fn pump(&mut self, budget_bytes: u64, regions: &mut Regions) -> Result<Pumped, Fault> {
        let mut pumped = Pumped::default();
        for index in 0..self.connections.len() {
            pumped.moved |= self.go_on(index)?;
        }
        if !self.is_connected() {
            // Its dial was lost, perhaps long after it was heard.
            pumped.is_cut = self.connections.iter().any(Connection::is_lost);
            return Ok(pumped);
        }
        let can_resume = self.can_resume();
        for connection in &mut self.connections {
            match connection.check_peer() {
                // Its own path may be dead where others live; how long that may last is seen when it is looked at.
                Err(Fault::Lost(_)) if can_resume => connection.cut(),
                checked => checked?,
            }
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
        pumped.is_unsettled = self.is_unsettled();
        pumped.is_cut = self.connections.iter().any(Connection::is_cut);
        Ok(pumped)
    }

    /// Goes on with a socket that is being dialled. Returns whether it got further.
    fn go_on(&mut self, index: usize) -> Result<bool, Fault> {
        let can_resume = self.can_resume();
        let Some(connection) = self.connections.get_mut(index) else { return Ok(false) };
        let opened = connection.openings();
        let further = connection.go_on(&self.hello, &mut self.closed);
        if connection.openings() > opened.max(1) {
            self.path_news.extend(self.route.paths.get(connection.path).map(|path| (path.clone(), true)));
        }
        match further {
            // Another path is tried when it is looked at next.
            Err(Fault::Lost(_)) if can_resume => {
                self.closed.extend(connection.give_dial_up());
                Ok(true)
            }
            further => further,
        }
    }

    /// Gives a connection the next chunk, if there is one.
    fn assign(&mut self, index: usize) {
        let Some(entry) = self.ring.get_mut(self.current) else { return };
        let message_bytes = entry.buffer.bytes;
        let chunk = entry.progress.next_chunk;
        let ChunkRange { offset: at, bytes } = self.grid.chunk(chunk, message_bytes);
        let header =
            ChunkHeader { message: self.current as u32, chunk: chunk as u32, message_bytes, tag: entry.progress.tag };
        entry.progress.next_chunk += 1;
        let message = self.current;
        if entry.progress.next_chunk == self.grid.chunks(message_bytes) {
            self.current += 1;
        }
        if let Some(connection) = self.connections.get_mut(index) {
            connection.log.push(message, header.encode(), at, bytes);
        }
    }

    /// Writes once. Returns the number of bytes.
    fn write(&mut self, index: usize, budget_bytes: u64, regions: &mut Regions) -> Result<u64, Fault> {
        let Some(connection) = self.connections.get_mut(index) else { return Ok(0) };
        let has_sent_all = connection.position == connection.log.end();
        let lingers = self.lingers;
        let Some(line) = connection.live().filter(|line| line.writable) else { return Ok(0) };
        if lingers && has_sent_all && !std::mem::replace(&mut line.ended, true) {
            line.socket.end_writing();
        }
        if has_sent_all {
            self.assign(index);
        }
        let Some(Connection { line: Some(line), log, position, .. }) = self.connections.get_mut(index) else {
            return Ok(0);
        };
        let Some(piece) = log.piece(*position) else { return Ok(0) };
        let written = match piece {
            Piece::Copied(bytes) => line.socket.write_slice(bytes),
            Piece::Chunk { message, header, at, left } => {
                let Some(entry) = self.ring.get(message) else {
                    return Err(Fault::Protocol("bug: a chunk outlives its message"));
                };
                let (payload, bytes) = entry.buffer.part(at, left.min(budget_bytes));
                // SAFETY: the part lies inside memory that the unfinished request holds, which `register`'s caller keeps readable.
                unsafe { line.socket.write(header, payload, bytes) }
            }
        };
        let count = match written {
            Ok(Moved::Bytes(count)) => count as u64,
            Ok(Moved::WouldBlock | Moved::End) => {
                line.writable = false;
                return Ok(0);
            }
            Err(errno) => match peer_gone(errno) {
                Fault::Lost(_) if self.can_resume() => {
                    self.connections.iter_mut().skip(index).take(1).for_each(Connection::cut);
                    return Ok(0);
                }
                fault => return Err(fault),
            },
        };
        *position += count;
        self.written(index, regions);
        Ok(count)
    }

    /// A connection was given more: what costs little is settled at once.
    fn written(&mut self, index: usize, regions: &mut Regions) {
        let can_resume = self.can_resume();
        let Some(connection) = self.connections.get_mut(index) else { return };
        let position = connection.position;
        if !can_resume {
            if let Some(chunk) = connection.log.forget_last(position) {
                self.settled(chunk.message, regions);
            }
            return;
        }
        if connection.log.chunk_count() == 1
            && connection.log.oldest_bytes(position).is_some_and(|bytes| bytes <= COPIED_AT_ONCE)
        {
            if connection.log.copied_bytes() >= self.trim_from {
                if let Some(acknowledged) = connection.acknowledged() {
                    connection.log.acknowledge(acknowledged);
                }
                self.trim_from = TRIMMED_FROM.max(2 * connection.log.copied_bytes());
            }
            self.copy_oldest(index, COPIED_AT_ONCE, regions);
        }
    }

    /// Copies the oldest chunk of a connection, if that takes no more than `bytes_max` and there is room. Returns whether it did.
    fn copy_oldest(&mut self, index: usize, bytes_max: usize, regions: &mut Regions) -> bool {
        let Some(Connection { log, position, .. }) = self.connections.get_mut(index) else { return false };
        let Some(bytes) = log.oldest_bytes(*position) else { return false };
        if bytes > bytes_max || log.copied_bytes() + bytes > COPIED_MAX {
            return false;
        }
        let Some(buffer) = log.oldest_message().and_then(|message| self.ring.get(message)).map(|entry| entry.buffer)
        else {
            return false;
        };
        let Some(chunk) = log.copy_oldest(buffer) else { return false };
        self.settled(chunk.message, regions);
        true
    }

    /// The bytes of one of a message's chunks are not read from its buffer again.
    fn settled(&mut self, message: u64, regions: &mut Regions) {
        let Some(entry) = self.ring.get_mut(message) else { return };
        entry.progress.settled_chunks += 1;
        let message_bytes = entry.buffer.bytes;
        if entry.progress.settled_chunks == self.grid.chunks(message_bytes) {
            self.ring.finish(message, request::Moved { bytes: message_bytes, tag: 0 }, regions);
        }
    }

    /// Whether something is written and its message waits for acknowledgements.
    fn is_unsettled(&self) -> bool {
        self.can_resume()
            && self.connections.iter().any(|connection| connection.log.oldest_bytes(connection.position).is_some())
    }

    /// Asks what was acknowledged, and ends messages. The rest is copied if it is little, has waited for long, or `at_once`.
    pub(in crate::tcp) fn settle(&mut self, now: Option<Instant>, regions: &mut Regions) -> Settled {
        let since = now.map(|now| *self.unsettled_since.get_or_insert(now));
        let patience = self.tail_bytes().map(|bytes| Duration::from_nanos(bytes / COPIED_PER_NS));
        let patience = patience.map_or(SETTLED_AFTER, |patience| patience.min(SETTLED_AFTER));
        let is_late = now.zip(since).is_none_or(|(now, since)| now.saturating_duration_since(since) >= patience);
        let (bytes_max, mut has_moved) = (if is_late { COPIED_MAX } else { COPIED_AT_ONCE }, false);
        for index in 0..self.connections.len() {
            has_moved |= self.take_acknowledged(index, regions);
            while self.copy_oldest(index, bytes_max, regions) {
                has_moved = true;
            }
        }
        let is_left = self.is_unsettled();
        if has_moved || !is_left {
            self.unsettled_since = None;
        }
        Settled { has_moved, is_left }
    }

    /// Bytes of a copy of all that is neither acknowledged nor copied; `None` while more is to be sent.
    fn tail_bytes(&self) -> Option<u64> {
        let has_sent_all = |connection: &Connection| connection.position == connection.log.end();
        let is_tail = self.current == self.ring.next() && self.connections.iter().all(has_sent_all);
        let left = |log: &Log| (log.end() - log.start()).saturating_sub(log.copied_bytes() as u64);
        is_tail.then(|| self.connections.iter().map(|connection| left(&connection.log)).sum())
    }

    /// Ends chunks of a connection that were acknowledged. Returns whether there were any.
    fn take_acknowledged(&mut self, index: usize, regions: &mut Regions) -> bool {
        let Some(connection) = self.connections.get_mut(index) else { return false };
        if let Some(acknowledged) = connection.acknowledged() {
            connection.log.acknowledge(acknowledged);
        }
        let mut any = false;
        while let Some(chunk) =
            self.connections.get_mut(index).and_then(|connection| connection.log.take_acknowledged())
        {
            self.settled(chunk.message, regions);
            any = true;
        }
        any
    }

    /// Looks whether the peer's kernel answers, as often as [`Sender::looked_at_every`] says. Connections that are to be dialled go to
    /// `to_dial`; no more than `questions_left` of them ask whether their paths live.
    pub(in crate::tcp) fn look(
        &mut self,
        now: Instant,
        regions: &mut Regions,
        to_dial: &mut Vec<u16>,
        questions_left: &mut usize,
    ) -> Result<Looked, Fault> {
        let mut looked = Looked::default();
        let (paths, silence_timeout) = (self.route.paths.len(), self.route.options.silence_timeout);
        for index in 0..self.connections.len() {
            looked.moved |= self.take_acknowledged(index, regions);
            let Some(connection) = self.connections.get_mut(index) else { continue };
            match connection.look(now, paths, silence_timeout) {
                Look::Settled => connection.log.rest(),
                Look::Owed => looked.is_owed = true,
                Look::Waits(until) => looked.look_at = Some(looked.look_at.map_or(until, |at| at.min(until))),
                Look::Ask => {
                    looked.is_owed = true;
                    if *questions_left > 0
                        && let Ok(question) = self.route.connect(connection.failing_path(), index as u16)
                    {
                        *questions_left -= 1;
                        connection.ask(question, now);
                    }
                }
                Look::Again => {
                    looked.is_owed = true;
                    to_dial.push(index as u16);
                }
                Look::Dial { is_dead } => {
                    looked.is_owed = true;
                    let failing = self.route.paths.get(connection.failing_path()).filter(|_| is_dead);
                    self.path_news.extend(failing.map(|path| (path.clone(), false)));
                    to_dial.push(index as u16);
                }
                Look::Gone => return Err(Fault::Lost(nix::errno::Errno::ETIMEDOUT)),
            }
            self.closed.extend(connection.forget_refused());
            if connection.is_dial_idle() {
                self.closed.extend(connection.give_dial_up());
                self.path_news.extend(self.route.paths.get(connection.path).map(|path| (path.clone(), true)));
            }
        }
        looked.is_over = self.lingers && self.connections.iter().all(|connection| connection.log.is_empty());
        Ok(looked)
    }

    /// Its user closes it. Returns whether it has to live on, since what completed sends have handed over might have to be sent again.
    pub(in crate::tcp) fn begin_to_linger(&mut self, regions: &mut Regions) -> bool {
        if !self.can_resume() || !self.is_connected() || self.ring.has_unfinished() {
            return false;
        }
        for index in 0..self.connections.len() {
            self.take_acknowledged(index, regions);
        }
        self.lingers = self.connections.iter().any(|connection| !connection.log.is_empty());
        if self.lingers {
            for connection in &mut self.connections {
                let has_sent_all = connection.position == connection.log.end();
                if let Some(line) = connection.live().filter(|_| has_sent_all) {
                    line.socket.end_writing();
                    line.ended = true;
                }
            }
        }
        self.lingers
    }

    /// From now on it goes over this path, and over the others where that one dies. Returns the connections that are to be dialled, and
    /// [`Sender::force`]d: those that are elsewhere, or on their way.
    pub(in crate::tcp) fn set_path(&mut self, path: &FlowPath, detours: &Arc<[FlowPath]>) -> Vec<u16> {
        if !self.can_resume() {
            return Vec::new();
        }
        let options = FlowOptions { detours: Arc::clone(detours), ..self.route.options.on_path_alone(path) };
        let route = Route::new(self.route.to, &options);
        let before = std::mem::replace(&mut *self.route, route).paths;
        let count = self.route.paths.len();
        let place = |path: usize| {
            let path = before.get(path)?;
            self.route.paths.iter().position(|other| other == path)
        };
        let leaves = self.connections.iter_mut().zip(0..);
        leaves.filter_map(|(own, number)| own.recount(count, place).then_some(number)).collect()
    }

    /// See [`Connection::force`].
    pub(in crate::tcp) fn force(&mut self, connection: u16) {
        self.connections.iter_mut().skip(connection.into()).take(1).for_each(Connection::force);
    }

    /// Watches of its sockets, with the number of each one's connection.
    pub(in crate::tcp) fn watches(&self) -> impl Iterator<Item = (u16, Handle)> {
        (0..)
            .zip(&self.connections)
            .flat_map(|(number, connection)| connection.watches().map(move |watch| (number, watch)))
    }

    /// The peer has ended the flow: what was handed over to the kernel is done, as it may have come. (A peer that has all it wants
    /// closes at once; its acknowledgement of the last bytes may never be seen.)
    pub(in crate::tcp) fn finish_written(&mut self, regions: &mut Regions) {
        for index in 0..self.connections.len() {
            while let Some(chunk) =
                self.connections.get_mut(index).and_then(|connection| connection.log.take_written(connection.position))
            {
                self.settled(chunk.message, regions);
            }
        }
    }

    /// Ends all sockets; buffers are free after. Returns their watches.
    pub(in crate::tcp) fn end(&mut self, regions: &mut Regions) -> Vec<Handle> {
        // A flow that is closed while it sends is cancelled: the peer is not to get what the kernel still has.
        let rest_is_wanted = !self.ring.has_unfinished();
        self.ring.abandon(regions);
        let connections = std::mem::take(&mut self.connections);
        let ended = connections.into_iter().flat_map(|connection| connection.end(rest_is_wanted));
        ended.chain(self.closed.drain(..)).collect()
    }
}

const _: () = assert!(COPIED_AT_ONCE + HEADER_BYTES <= COPIED_MAX);
