//! A rank's port channels: its memories, its connections in turns, and the words that its threads
//! and kernels wait at.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_ipc::port_channels::{CHANNELS_MAX, CONNECTIONS_MAX, Kinds, OFFSET_MAX, PutMemories, Trigger};
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SetupError;
use mccs_model::handles::HandleTable;
use mccs_telemetry::stuck::SignalWait;
use mccs_tenants::regions::Region;

use super::connection::{Connection, ConnectionName, FifoPosition, PeerPlace, Queued};
use super::mistakes::{invalid, mistake};
use crate::proxy::calls::channel_order::{ChannelMemory, OpenedSegment};
use crate::proxy::calls::failure::Failure;

/// Memories of a rank that peers may put into, or that it puts from.
const MEMORIES_MAX: u32 = 4096;

struct Channel {
    connection: u32,
    memories: Option<PutMemories>,
}

/// State behind the first trigger of a connection when it has ended.
#[derive(Debug, Default)]
pub(super) struct Ended {
    /// The connection whose peer, of this host, gets a signal.
    pub(super) signals: Option<ConnectionName>,
    /// Then comes a flush.
    pub(super) flushes: Option<FifoPosition>,
}

/// See the module's documentation.
pub(super) struct RankChannels {
    rank: u32,
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

fn full(what: &str, most: u32) -> SetupError {
    let message = format!("the rank has {most} {what} in this communicator, the most it can have");
    SetupError { class: ErrorClass::InvalidUsage, message }
}

impl RankChannels {
    pub(super) fn new(rank: u32, opened: Arc<OpenedSegment>) -> Self {
        RankChannels {
            rank,
            opened,
            memories: HandleTable::new(MEMORIES_MAX),
            channels: Vec::new(),
            connections: Vec::new(),
            by_name: HashMap::new(),
            ready: VecDeque::new(),
            queued: 0,
        }
    }

    /// GPU of its memory, as the device counts GPUs; none for memory of the host.
    pub(super) fn gpu(&self) -> Option<usize> {
        self.opened.gpu
    }

    /// Places for frames that go to and come from other hosts, if there are such.
    pub(super) fn frames(&self) -> Option<&Arc<Region>> {
        self.opened.frames.as_ref()
    }

    pub(super) fn register(&mut self, memory: ChannelMemory) -> Result<Handle, SetupError> {
        if memory.bytes > OFFSET_MAX {
            return Err(invalid(format!("{} bytes: a memory has at most {OFFSET_MAX}", memory.bytes)));
        }
        self.memories.insert(memory).map_err(|_| full("memories", MEMORIES_MAX))
    }

    pub(super) fn free(&mut self, memory: Handle) -> Result<(), SetupError> {
        let freed = self.memories.remove(memory);
        freed.map(drop).ok_or_else(|| invalid(format!("there is no memory {memory:?}")))
    }

    pub(super) fn forget_region(&mut self, region: Handle) {
        let gone = self.memories.iter().filter(|(_, memory)| memory.name == region).map(|(handle, _)| handle);
        let gone: Vec<_> = gone.collect();
        gone.into_iter().for_each(|handle| drop(self.memories.remove(handle)));
    }

    pub(super) fn memory(&self, memory: Handle) -> Option<&ChannelMemory> {
        self.memories.get(memory)
    }

    /// The number of a connection that there is.
    pub(super) fn number(&self, name: ConnectionName) -> Option<u32> {
        self.by_name.get(&name).copied()
    }

    pub(super) fn connection(&self, number: u32) -> Option<&Connection> {
        self.connections.get(number as usize)
    }

    /// Makes a connection, for which `arrived` takes the signals that have come. Returns its number.
    pub(super) fn connect(
        &mut self,
        name: ConnectionName,
        place: PeerPlace,
        arrived: impl FnOnce() -> u64,
    ) -> Result<u32, SetupError> {
        let number = self.connections.len() as u32;
        if number >= CONNECTIONS_MAX.min(self.opened.segment.layout().connections) {
            return Err(full("connections", CONNECTIONS_MAX));
        }
        self.by_name.insert(name, number);
        self.connections.push(Connection::new(name, place, arrived()));
        self.tell_arrived(number);
        Ok(number)
    }

    /// Makes a channel of a connection that there is. Returns its number.
    pub(super) fn open_channel(&mut self, connection: u32, memories: Option<PutMemories>) -> Result<u32, SetupError> {
        let channel = Some(Channel { connection, memories });
        if let Some(number) = self.channels.iter().position(Option::is_none) {
            self.channels[number] = channel;
            return Ok(number as u32);
        }
        if self.channels.len() >= CHANNELS_MAX as usize {
            return Err(full("port channels", CHANNELS_MAX));
        }
        self.channels.push(channel);
        Ok(self.channels.len() as u32 - 1)
    }

    /// Triggers that came before keep what they name.
    pub(super) fn close_channel(&mut self, channel: u32) -> Result<(), SetupError> {
        let closed = self.channels.get_mut(channel as usize).and_then(Option::take);
        closed.map(drop).ok_or_else(|| invalid(format!("there is no port channel {channel}")))
    }

    /// Takes a trigger in.
    pub(super) fn enqueue(&mut self, trigger: &Trigger, position: FifoPosition) -> Result<(), Failure> {
        let Some(Some(channel)) = self.channels.get(trigger.channel as usize) else {
            return Err(mistake(self.rank, format!("port channel {} is not open", trigger.channel)));
        };
        if trigger.kinds.is_none() {
            return Err(mistake(self.rank, format!("a trigger of port channel {} asks for nothing", trigger.channel)));
        }
        let number = channel.connection;
        if let Some(connection) = self.connections.get_mut(number as usize) {
            if connection.push(Queued { trigger: *trigger, memories: channel.memories, position }) {
                self.ready.push_back(number);
            }
            self.queued += 1;
        }
        Ok(())
    }

    pub(super) fn is_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    pub(super) fn has_queued(&self) -> bool {
        self.queued > 0
    }

    /// Takes the connection whose turn it is.
    pub(super) fn pop_ready(&mut self) -> Option<u32> {
        self.ready.pop_front()
    }

    /// The first trigger of a connection runs from now on. Returns false if there is no such connection, or one runs already.
    pub(super) fn begin_turn(&mut self, number: u32) -> bool {
        self.connection_mut(number).is_some_and(Connection::begin_turn)
    }

    /// Nothing of a connection runs any more. Returns whether something did.
    pub(super) fn end_turn(&mut self, number: u32) -> bool {
        self.connection_mut(number).is_some_and(Connection::end_turn)
    }

    fn connection_mut(&mut self, number: u32) -> Option<&mut Connection> {
        self.connections.get_mut(number as usize)
    }

    /// The first trigger of a connection has been put: takes it away. Returns what follows.
    pub(super) fn end_front(&mut self, number: u32) -> Ended {
        let Some(connection) = self.connections.get_mut(number as usize) else { return Ended::default() };
        let Some(Queued { trigger, position, .. }) = connection.pop() else { return Ended::default() };
        let signals = trigger.kinds.has(Kinds::SIGNAL) && !connection.is_elsewhere();
        let ended = Ended {
            signals: signals.then(|| connection.name()),
            flushes: trigger.kinds.has(Kinds::FLUSH).then_some(position),
        };
        if connection.is_ready() {
            self.ready.push_back(number);
        }
        self.end_queued(1);
        ended
    }

    /// A flush of a connection has come to its turn: it waits for long puts under way.
    pub(super) fn flush(&mut self, number: u32, position: FifoPosition) {
        if let Some(connection) = self.connection_mut(number) {
            connection.flush(position);
            self.tell_flushed(number);
        }
    }

    /// The first trigger of a connection is a long put to another host, whose bytes are sent now. Returns its number.
    pub(super) fn begin_long_put(&mut self, number: u32) -> u64 {
        self.connection_mut(number).map_or(0, Connection::begin_long_put)
    }

    /// The bytes of a long put to another host have been sent.
    pub(super) fn end_long_put(&mut self, number: u32, put: u64) {
        if self.connection_mut(number).is_some_and(|connection| connection.end_long_put(put)) {
            self.end_queued(1);
            self.tell_flushed(number);
        }
    }

    fn end_queued(&mut self, triggers: u64) {
        self.queued -= triggers;
        self.opened.session.end_triggers(triggers);
    }

    /// A signal has come by a connection.
    pub(super) fn signal(&mut self, number: u32) {
        if let Some(connection) = self.connection_mut(number) {
            connection.signal();
            self.tell_arrived(number);
        }
    }

    /// Raises words of a connection, for flushes with nothing under way before them.
    fn tell_flushed(&mut self, number: u32) {
        let Some(connection) = self.connections.get_mut(number as usize) else { return };
        for FifoPosition { writer, end } in connection.pop_flushed() {
            if let Some(flushed) = self.opened.flushed(number, writer) {
                flushed.publish(end);
            }
        }
    }

    fn tell_arrived(&self, number: u32) {
        if let (Some(connection), Some(words)) = (self.connection(number), self.opened.segment.words(number)) {
            words.arrived().publish(connection.arrived_word());
        }
    }

    /// Nothing comes from a peer any more.
    pub(super) fn end_peer(&mut self, peer: u32) {
        for number in 0..self.connections.len() {
            let connection = &mut self.connections[number];
            if connection.name().peer == peer {
                connection.end_signals();
                self.tell_arrived(number as u32);
            }
        }
    }

    /// All that waits is given up, and whoever waits released.
    pub(super) fn end(&mut self) {
        for number in 0..self.connections.len() {
            self.connections[number].end();
            self.tell_arrived(number as u32);
            self.opened.end_flushed(number as u32);
        }
        self.ready.clear();
        self.end_queued(self.queued);
        self.memories = HandleTable::new(MEMORIES_MAX);
    }

    /// Connections for whose next signal somebody waits.
    fn awaited(&self) -> impl Iterator<Item = &Connection> {
        let numbered = (0..).zip(&self.connections);
        let awaited = numbered.filter(|(number, connection)| self.opened.is_awaited(*number, connection.arrived()));
        awaited.map(|(_, connection)| connection)
    }

    /// Signals for which threads wait.
    pub(super) fn awaited_signals(&self) -> impl Iterator<Item = SignalWait> {
        self.awaited().filter_map(Connection::next_signal)
    }

    /// Whether somebody waits for a signal of a peer.
    pub(super) fn awaits(&self, peer: u32) -> bool {
        self.awaited().any(|connection| connection.name().peer == peer)
    }

    /// Waits that last too long, in words.
    pub(super) fn late(&mut self, timeout: Duration, moved: Instant, now: Instant) -> Vec<String> {
        let mut late = Vec::new();
        for (number, connection) in (0..).zip(&mut self.connections) {
            let is_awaited = self.opened.is_awaited(number, connection.arrived());
            let since = connection.awaited_since(is_awaited, now);
            if since.is_some_and(|since| since.max(moved) + timeout <= now)
                && let Some(signal) = connection.next_signal()
            {
                late.push(format!("rank {} waits for {signal}", self.rank));
            }
        }
        late
    }
}
