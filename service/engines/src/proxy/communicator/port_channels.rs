//! Port channels of a communicator's ranks here: memories, connections, channels, and the triggers
//! that wait.
//!
//! ```text
//! triggers of a rank --> queue of their connection --front--> put --ended--> signal, flush --> next
//! ```
//!
//! A connection does one thing at a time, so that its signals come behind its puts; connections of a rank take turns. What goes to ranks of
//! other hosts, and comes from there, is in `port_channels/remote.rs`.

mod remote;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_device::Operand;
use mccs_ipc::port_channels::{CHANNELS_MAX, CONNECTIONS_MAX, ConnectionWords, ENDED, Kinds, OFFSET_MAX, Trigger};
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SetupError;
use mccs_model::handles::HandleTable;
use mccs_telemetry::stuck::SignalWait;

use crate::proxy::calls::channel_order::{ChannelMemory, OpenedSegment, PutEnds, TriggerBatch, Writer};
use crate::proxy::calls::failure::Failure;
use crate::proxy::communicator::port_lanes::{LaneMessage, PortLanes};

/// Memories of a rank that peers may put into, or that it puts from.
const MEMORIES_MAX: u32 = 4096;

/// The memories that puts of a channel are from and into.
#[derive(Debug, Clone, Copy)]
struct Ends {
    source: Handle,
    destination: Handle,
}

struct Channel {
    connection: u32,
    ends: Option<Ends>,
}

struct Queued {
    trigger: Trigger,
    /// Behind it in the FIFO that it was in.
    end: u64,
    writer: Writer,
    ends: Option<Ends>,
}

struct Connection {
    peer: u32,
    tag: u32,
    /// Whether the peer is on another host.
    is_elsewhere: bool,
    queue: VecDeque<Queued>,
    /// Whether the first in the queue runs, or to another host: whether it waits for its turn in the lane.
    runs: bool,
    /// To another host: long puts whose bytes are under way, and flushes behind these.
    sending: VecDeque<Sending>,
    /// Long puts that have begun.
    long_puts: u64,
    /// Signals that have come.
    arrived: u64,
    /// Whether the peer has left.
    has_ended: bool,
    /// Since when threads wait for the next signal, as far as was looked.
    waits: Option<(u64, Instant)>,
}

/// A rank's connection, as both ends name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct ConnectionName {
    peer: u32,
    tag: u32,
}

/// See [`Connection::sending`].
struct Sending {
    /// The number of a long put that has not ended.
    put: Option<u64>,
    /// Whose word a flush behind it raises, and to what.
    flushes: Option<(Writer, u64)>,
}

struct RankChannels {
    opened: Arc<OpenedSegment>,
    memories: HandleTable<ChannelMemory>,
    channels: Vec<Option<Channel>>,
    connections: Vec<Connection>,
    by_name: HashMap<ConnectionName, u32>,
    /// Connections with triggers of which none runs.
    ready: VecDeque<u32>,
    /// Triggers in all queues.
    queued: u64,
}

/// Where a peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PeerPlace {
    Here,
    /// It was here.
    Left,
    Elsewhere,
}

/// A put that can start.
pub(crate) struct Put {
    pub(crate) connection: u32,
    pub(crate) ends: PutEnds,
    pub(crate) bytes: u64,
    /// The GPU of the rank that puts, if its memory is there.
    pub(crate) gpu: Option<usize>,
}

/// What [`PortChannels::next`] comes to.
pub(crate) enum Next {
    /// This is to be copied; [`PortChannels::end_put`] goes on.
    Put(Put),
    /// These are to be sent, in order; [`PortChannels::end_lane`] goes on.
    Send(Vec<LaneMessage>),
    /// It has done as much as it was to.
    More,
    /// Nothing waits that could go on.
    Nothing,
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct PortChannels {
    ranks: BTreeMap<u32, RankChannels>,
    /// Signals for connections that their rank has not made yet, by rank.
    early: BTreeMap<u32, BTreeMap<ConnectionName, u64>>,
    /// Puts and sends that run.
    jobs: u32,
    /// Messages with other hosts.
    lanes: PortLanes,
}

fn invalid(message: impl Into<String>) -> SetupError {
    SetupError { class: ErrorClass::InvalidArgument, message: message.into() }
}

fn full(what: &str, most: u32) -> SetupError {
    let message = format!("the rank has {most} {what} in this communicator, the most it can have");
    SetupError { class: ErrorClass::InvalidUsage, message }
}

fn no_memories(rank: u32, channel: u32) -> Failure {
    mistake(rank, format!("port channel {channel} has no memories to put"))
}

fn mistake(rank: u32, what: impl std::fmt::Display) -> Failure {
    Failure::new(ErrorClass::InvalidArgument, format!("rank {rank} made an invalid call: {what}"))
}

/// A memory, as a put of a rank's channel names it.
struct NamedMemory {
    rank: u32,
    channel: u32,
    of: u32,
    memory: Handle,
}

impl NamedMemory {
    fn past_end(&self, offset: u64, bytes: u64, has: u64) -> Failure {
        let NamedMemory { rank, channel, of, memory } = self;
        let what = format!(
            "a put of port channel {channel} takes {bytes} bytes at offset {offset} of memory {memory:?} of rank {of}, which has {has}"
        );
        mistake(*rank, what)
    }
}

impl PortChannels {
    /// Whether no rank has any.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    fn rank(&mut self, rank: u32) -> Result<&mut RankChannels, SetupError> {
        self.ranks.get_mut(&rank).ok_or_else(|| invalid("the rank has opened no port channels in this communicator"))
    }

    /// A rank opens its FIFO.
    pub(crate) fn open(&mut self, rank: u32, opened: Arc<OpenedSegment>) -> Result<(), SetupError> {
        if self.ranks.contains_key(&rank) {
            return Err(invalid("the rank has opened its port channels before"));
        }
        let new = RankChannels {
            opened,
            memories: HandleTable::new(MEMORIES_MAX),
            channels: Vec::new(),
            connections: Vec::new(),
            by_name: HashMap::new(),
            ready: VecDeque::new(),
            queued: 0,
        };
        self.ranks.insert(rank, new);
        Ok(())
    }

    /// Peers of a rank may name a memory from now on.
    pub(crate) fn register(&mut self, rank: u32, memory: ChannelMemory) -> Result<Handle, SetupError> {
        if memory.bytes > OFFSET_MAX {
            return Err(invalid(format!("{} bytes: a memory has at most {OFFSET_MAX}", memory.bytes)));
        }
        self.rank(rank)?.memories.insert(memory).map_err(|_| full("memories", MEMORIES_MAX))
    }

    /// A rank takes a memory back. What runs in it ends.
    pub(crate) fn free(&mut self, rank: u32, memory: Handle) -> Result<(), SetupError> {
        let freed = self.rank(rank)?.memories.remove(memory);
        freed.map(drop).ok_or_else(|| invalid(format!("there is no memory {memory:?}")))
    }

    /// A rank's region goes, and with it the memories in it.
    pub(crate) fn forget_region(&mut self, rank: u32, region: Handle) {
        let Some(own) = self.ranks.get_mut(&rank) else { return };
        let gone = own.memories.iter().filter(|(_, memory)| memory.name == region).map(|(handle, _)| handle);
        let gone: Vec<_> = gone.collect();
        gone.into_iter().for_each(|handle| drop(own.memories.remove(handle)));
    }

    /// The number of a rank's connection, which is made if there is none of that name; and where the peer's first frame goes, if that is on another
    /// host and nothing was to come from it before.
    pub(crate) fn connect(
        &mut self,
        rank: u32,
        peer: u32,
        place: PeerPlace,
        tag: u32,
    ) -> Result<(u32, Option<LaneMessage>), SetupError> {
        let own = self.rank(rank)?;
        let name = ConnectionName { peer, tag };
        if let Some(known) = own.by_name.get(&name) {
            return Ok((*known, None));
        }
        let number = own.connections.len() as u32;
        if number >= CONNECTIONS_MAX.min(own.opened.segment.layout().connections) {
            return Err(full("connections", CONNECTIONS_MAX));
        }
        let arrived = self.early.get_mut(&rank).and_then(|early| early.remove(&name)).unwrap_or(0);
        let own = self.rank(rank)?;
        own.by_name.insert(name, number);
        let (queue, sending, runs, waits, long_puts) = (VecDeque::new(), VecDeque::new(), false, None, 0);
        let (is_elsewhere, has_ended) = (place == PeerPlace::Elsewhere, place == PeerPlace::Left);
        own.connections.push(Connection {
            peer,
            tag,
            is_elsewhere,
            queue,
            runs,
            sending,
            long_puts,
            arrived,
            has_ended,
            waits,
        });
        own.tell_arrived(number);
        let frames = own.opened.frames.as_ref().filter(|_| is_elsewhere).map(Arc::clone);
        Ok((number, frames.and_then(|frames| self.lanes.listen(rank, peer, &frames))))
    }

    /// The number of a new channel, with the memories that its puts are from and into, if it has such.
    pub(crate) fn open_channel(
        &mut self,
        rank: u32,
        connection: u32,
        memories: Option<(Handle, Handle)>,
    ) -> Result<u32, SetupError> {
        let own = self.rank(rank)?;
        let connection_of = own.connections.get(connection as usize);
        let of = connection_of.ok_or_else(|| invalid(format!("there is no connection {connection}")))?;
        let (peer, is_elsewhere) = (of.peer, of.is_elsewhere);
        if let Some((source, destination)) = memories {
            let is_known = |of: &RankChannels, memory| of.memories.get(memory).is_some();
            if !is_known(own, source) {
                return Err(invalid(format!("the rank has no memory {source:?}")));
            }
            // Of another host's ranks their own service knows the memories.
            if !is_elsewhere && !self.ranks.get(&peer).is_some_and(|peer| is_known(peer, destination)) {
                return Err(invalid(format!("rank {peer} has no memory {destination:?}")));
            }
        }
        let own = self.rank(rank)?;
        let ends = memories.map(|(source, destination)| Ends { source, destination });
        let channel = Some(Channel { connection, ends });
        if let Some(number) = own.channels.iter().position(Option::is_none) {
            own.channels[number] = channel;
            return Ok(number as u32);
        }
        if own.channels.len() >= CHANNELS_MAX as usize {
            return Err(full("port channels", CHANNELS_MAX));
        }
        own.channels.push(channel);
        Ok(own.channels.len() as u32 - 1)
    }

    /// A channel goes. Triggers that came before keep what they name.
    pub(crate) fn close_channel(&mut self, rank: u32, channel: u32) -> Result<(), SetupError> {
        let slot = self.rank(rank)?.channels.get_mut(channel as usize);
        let closed = slot.and_then(Option::take);
        closed.map(drop).ok_or_else(|| invalid(format!("there is no port channel {channel}")))
    }

    /// Takes triggers in: none, if their rank has left. Returns how many, and why it is no more.
    pub(crate) fn enqueue(&mut self, batch: &TriggerBatch) -> (u64, Option<Failure>) {
        let TriggerBatch { rank, writer, first, triggers, .. } = batch;
        let Some(own) = self.ranks.get_mut(rank) else { return (0, None) };
        for (taken, trigger) in (0..).zip(triggers) {
            if let Err(failure) = own.enqueue(*rank, trigger, first + taken + 1, *writer) {
                return (taken, Some(failure));
            }
        }
        (triggers.len() as u64, None)
    }

    /// Goes on with a rank's connections to the next put, at most `steps_max` triggers. With how many there were.
    ///
    /// # Errors
    /// A trigger asks for what cannot be.
    pub(crate) fn next(&mut self, rank: u32, steps_max: u64) -> (Result<Next, Failure>, u64) {
        for step in 1..=steps_max {
            let ready = self.ranks.get_mut(&rank).and_then(|own| own.ready.pop_front());
            let Some(number) = ready else { return (Ok(Next::Nothing), step) };
            let connection = self.ranks.get(&rank).and_then(|own| own.connections.get(number as usize));
            let Some((connection, front)) = connection.and_then(|of| Some((of, of.queue.front()?))) else { continue };
            if connection.is_elsewhere {
                match self.send(rank, number) {
                    Ok(messages) if messages.is_empty() => continue,
                    Ok(messages) => return (Ok(Next::Send(messages)), step),
                    Err(failure) => return (Err(failure), step),
                }
            }
            if front.trigger.kinds.has(Kinds::PUT) && front.trigger.bytes > 0 {
                let gpu = self.ranks.get(&rank).and_then(|own| own.opened.gpu);
                let (found, bytes) = (self.put_ends(rank, connection.peer, front), front.trigger.bytes);
                let put = found.map(|ends| Next::Put(Put { connection: number, ends, bytes, gpu }));
                if let Some(connection) = self.connection_mut(rank, number).filter(|_| put.is_ok()) {
                    connection.runs = true;
                    self.jobs += 1;
                }
                return (put, step);
            }
            self.end_front(rank, number);
        }
        (Ok(Next::More), steps_max)
    }

    /// Where a put is from and into.
    fn put_ends(&self, rank: u32, peer: u32, of: &Queued) -> Result<PutEnds, Failure> {
        let Trigger { channel, bytes, source_offset, destination_offset, .. } = of.trigger;
        let ends = of.ends.ok_or_else(|| no_memories(rank, channel))?;
        let named = |of, memory| NamedMemory { rank, channel, of, memory };
        let (own, from) = self.place(&named(rank, ends.source), source_offset, bytes)?;
        let (theirs, to) = self.place(&named(peer, ends.destination), destination_offset, bytes)?;
        let other_kind =
            || mistake(rank, format!("memories of port channel {channel} are not both of GPUs, or of the host"));
        let ends = own.put_into(from, theirs, to, bytes).ok_or_else(other_kind)?;
        if ends.overlap(bytes) {
            return Err(mistake(rank, format!("source and destination of a put of port channel {channel} overlap")));
        }
        Ok(ends)
    }

    /// A memory of a rank of this host, and where a part of it is in its region.
    fn place(&self, named: &NamedMemory, offset: u64, bytes: u64) -> Result<(&ChannelMemory, u64), Failure> {
        let known = self.memory(named)?;
        let place = known.place(offset, bytes).ok_or_else(|| named.past_end(offset, bytes, known.bytes))?;
        Ok((known, place))
    }

    /// A part of a memory of a rank of this host.
    fn part(&self, named: &NamedMemory, offset: u64, bytes: u64) -> Result<Operand, Failure> {
        let known = self.memory(named)?;
        known.part(offset, bytes).ok_or_else(|| named.past_end(offset, bytes, known.bytes))
    }

    /// A memory of a rank of this host.
    fn memory(&self, named: &NamedMemory) -> Result<&ChannelMemory, Failure> {
        let NamedMemory { rank, channel, of, memory } = *named;
        let known = self.ranks.get(&of).and_then(|rank| rank.memories.get(memory));
        known.ok_or_else(|| {
            mistake(
                rank,
                format!("a put of port channel {channel} names memory {memory:?} of rank {of}, which was freed"),
            )
        })
    }

    /// A put has ended: its signal and flush follow.
    pub(crate) fn end_put(&mut self, rank: u32, connection: u32) {
        self.jobs = self.jobs.saturating_sub(1);
        self.end_turn(rank, connection);
    }

    /// What a connection has run has ended.
    fn end_turn(&mut self, rank: u32, connection: u32) {
        if self.connection_mut(rank, connection).is_some_and(|connection| std::mem::take(&mut connection.runs)) {
            self.end_front(rank, connection);
        }
    }

    fn connection_mut(&mut self, rank: u32, connection: u32) -> Option<&mut Connection> {
        self.ranks.get_mut(&rank)?.connections.get_mut(connection as usize)
    }

    /// The first trigger of a connection has been put: signals, flushes, and takes it away.
    fn end_front(&mut self, rank: u32, number: u32) {
        let Some(own) = self.ranks.get_mut(&rank) else { return };
        let Some(connection) = own.connections.get_mut(number as usize) else { return };
        let (peer, tag, is_elsewhere) = (connection.peer, connection.tag, connection.is_elsewhere);
        let Some(Queued { trigger, end, writer, .. }) = connection.queue.pop_front() else { return };
        if !connection.queue.is_empty() && !connection.runs {
            own.ready.push_back(number);
        }
        own.queued -= 1;
        own.opened.session.end_triggers(1);
        if trigger.kinds.has(Kinds::SIGNAL) && !is_elsewhere {
            self.signal(peer, rank, tag);
        }
        if trigger.kinds.has(Kinds::FLUSH) {
            self.flush(rank, number, Sending { put: None, flushes: Some((writer, end)) });
        }
    }

    /// The first trigger of a connection is a long put to another host, whose bytes are sent now. Returns its number.
    fn begin_long_put(&mut self, rank: u32, number: u32) -> u64 {
        let Some(connection) = self.connection_mut(rank, number) else { return 0 };
        connection.long_puts += 1;
        let put = connection.long_puts;
        if let Some(Queued { trigger, end, writer, .. }) = connection.queue.pop_front() {
            let flushes = trigger.kinds.has(Kinds::FLUSH).then_some((writer, end));
            connection.sending.push_back(Sending { put: Some(put), flushes });
        }
        put
    }

    /// The bytes of a long put to another host have been sent.
    fn end_long_put(&mut self, rank: u32, number: u32, put: u64) {
        let Some(own) = self.ranks.get_mut(&rank) else { return };
        let Some(connection) = own.connections.get_mut(number as usize) else { return };
        let Some(sent) = connection.sending.iter_mut().find(|sending| sending.put == Some(put)) else { return };
        sent.put = None;
        own.queued -= 1;
        own.opened.session.end_triggers(1);
        self.tell_flushed(rank, number);
    }

    /// A flush has come to its turn: it waits for long puts under way.
    fn flush(&mut self, rank: u32, number: u32, flush: Sending) {
        if let Some(connection) = self.connection_mut(rank, number) {
            connection.sending.push_back(flush);
            self.tell_flushed(rank, number);
        }
    }

    /// Raises words of a connection, for flushes with nothing under way before them.
    fn tell_flushed(&mut self, rank: u32, number: u32) {
        let Some(own) = self.ranks.get_mut(&rank) else { return };
        let Some(connection) = own.connections.get_mut(number as usize) else { return };
        while let Some(ended) = connection.sending.pop_front_if(|sending| sending.put.is_none()) {
            if let Some((writer, end)) = ended.flushes
                && let Some(flushed) = own.opened.flushed(number, writer)
            {
                flushed.publish(end);
            }
        }
    }

    /// A signal has come for a rank of this host.
    fn signal(&mut self, to: u32, from: u32, tag: u32) {
        let name = ConnectionName { peer: from, tag };
        let known = self.ranks.get_mut(&to).and_then(|rank| Some((*rank.by_name.get(&name)?, rank)));
        match known {
            Some((number, rank)) => {
                rank.connections[number as usize].arrived += 1;
                rank.tell_arrived(number);
            }
            None => *self.early.entry(to).or_default().entry(name).or_default() += 1,
        }
    }

    /// Whether a rank has triggers that can go on.
    pub(crate) fn is_ready(&self, rank: u32) -> bool {
        self.ranks.get(&rank).is_some_and(|rank| !rank.ready.is_empty())
    }

    /// Whether triggers of a rank wait or run.
    pub(crate) fn has_waiting(&self, rank: u32) -> bool {
        self.ranks.get(&rank).is_some_and(|rank| rank.queued > 0)
    }

    /// Whether a put runs.
    pub(crate) fn runs(&self) -> bool {
        self.jobs > 0
    }

    /// A rank has left: what it had goes, and its peers wait for it in vain.
    pub(crate) fn depart(&mut self, rank: u32) {
        if let Some(mut own) = self.ranks.remove(&rank) {
            own.end();
        }
        self.early.remove(&rank);
        for other in self.ranks.values_mut() {
            other.end_connections(|connection| connection.peer == rank);
        }
    }

    /// The communicator has failed: all that waits is given up, and whoever waits released.
    pub(crate) fn end(&mut self) {
        self.ranks.values_mut().for_each(RankChannels::end);
        self.early.clear();
        self.lanes.clear();
    }

    /// Signals for which threads of a rank wait.
    pub(crate) fn awaited(&self, rank: u32) -> impl Iterator<Item = SignalWait> {
        self.ranks.get(&rank).into_iter().flat_map(|own| {
            let of = |(number, connection): (u32, &Connection)| {
                let Connection { peer, tag, arrived, .. } = *connection;
                let waits = own.opened.is_awaited(number, arrived);
                (waits && !connection.has_ended).then_some(SignalWait { peer, tag, number: arrived + 1 })
            };
            (0..).zip(&own.connections).filter_map(of)
        })
    }

    /// Looks for threads that have waited for a signal for too long, and says what for. `moved` is when something last happened in the
    /// communicator.
    pub(crate) fn late(&mut self, timeout: Duration, moved: Instant, now: Instant) -> Option<String> {
        let late: Vec<String> =
            self.ranks.iter_mut().flat_map(|(rank, own)| own.late(*rank, timeout, moved, now)).collect();
        (!late.is_empty()).then(|| late.join("; "))
    }
}

impl RankChannels {
    /// Takes a trigger in, which ends at a position of a FIFO.
    fn enqueue(&mut self, rank: u32, trigger: &Trigger, end: u64, writer: Writer) -> Result<(), Failure> {
        let Some(Some(channel)) = self.channels.get(trigger.channel as usize) else {
            return Err(mistake(rank, format!("port channel {} is not open", trigger.channel)));
        };
        if trigger.kinds.is_none() {
            return Err(mistake(rank, format!("a trigger of port channel {} asks for nothing", trigger.channel)));
        }
        let number = channel.connection;
        if let Some(connection) = self.connections.get_mut(number as usize) {
            if connection.queue.is_empty() {
                self.ready.push_back(number);
            }
            connection.queue.push_back(Queued { trigger: *trigger, end, writer, ends: channel.ends });
            self.queued += 1;
        }
        Ok(())
    }

    fn words(&self, connection: u32) -> Option<&ConnectionWords> {
        self.opened.segment.words(connection)
    }

    /// Nothing comes by these connections any more.
    fn end_connections(&mut self, are: impl Fn(&Connection) -> bool) {
        for number in 0..self.connections.len() {
            let connection = &mut self.connections[number];
            if are(connection) {
                connection.has_ended = true;
                self.tell_arrived(number as u32);
            }
        }
    }

    /// Whether a thread waits for a signal of a peer.
    fn awaits(&self, peer: u32) -> bool {
        let awaits = |(number, connection): (u32, &Connection)| {
            connection.peer == peer && self.opened.is_awaited(number, connection.arrived)
        };
        (0..).zip(&self.connections).any(awaits)
    }

    fn tell_arrived(&self, number: u32) {
        let Some(connection) = self.connections.get(number as usize) else { return };
        if let Some(words) = self.words(number) {
            let ended = if connection.has_ended { ENDED } else { 0 };
            words.arrived().publish(ended | connection.arrived);
        }
    }

    fn end(&mut self) {
        for number in 0..self.connections.len() {
            let connection = &mut self.connections[number];
            (connection.has_ended, connection.runs) = (true, false);
            connection.queue.clear();
            connection.sending.clear();
            self.tell_arrived(number as u32);
            self.opened.end_flushed(number as u32);
        }
        self.ready.clear();
        self.opened.session.end_triggers(std::mem::take(&mut self.queued));
        self.memories = HandleTable::new(MEMORIES_MAX);
    }

    fn late(&mut self, rank: u32, timeout: Duration, moved: Instant, now: Instant) -> Vec<String> {
        let mut late = Vec::new();
        for number in 0..self.connections.len() {
            let connection = &mut self.connections[number];
            let is_awaited = self.opened.is_awaited(number as u32, connection.arrived);
            if !is_awaited || connection.has_ended {
                connection.waits = None;
                continue;
            }
            let since = match connection.waits {
                Some((arrived, since)) if arrived == connection.arrived => since,
                _ => now,
            };
            connection.waits = Some((connection.arrived, since));
            if since.max(moved) + timeout <= now {
                let Connection { peer, tag, arrived, .. } = connection;
                let signal = SignalWait { peer: *peer, tag: *tag, number: *arrived + 1 };
                late.push(format!("rank {rank} waits for {signal}"));
            }
        }
        late
    }
}
