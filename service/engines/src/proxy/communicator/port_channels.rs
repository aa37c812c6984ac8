//! Port channels of a communicator's ranks here: memories, connections, channels, and the triggers
//! that wait.
//!
//! ```text
//! triggers of a rank --> queue of their connection --front--> put --ended--> signal, flush --> next
//! ```
//!
//! A connection does one thing at a time, so that its signals come behind its puts; connections of a rank take turns.
//!
//! | file | type | what it owns |
//! | --- | --- | --- |
//! | `port_channels.rs` | `PortChannels` | puts that run; the rest it hands on |
//! | `ranks.rs` | `Ranks` | all ranks here, and signals that come before a rank has named their connection |
//! | `rank.rs` | `RankChannels` | a rank's memories, channels, and connections in turns |
//! | `connection.rs` | `Connection` | triggers of a connection, and how many signals have come |
//! | `remote.rs` | `RemotePuts` | what goes to ranks of other hosts, and comes from there |

mod connection;
mod mistakes;
mod rank;
mod ranks;
mod remote;

use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_ipc::port_channels::{Kinds, PutMemories};
use mccs_ipc::types::Handle;
use mccs_model::SetupError;
use mccs_telemetry::stuck::SignalWait;

pub(crate) use self::connection::PeerPlace;
use self::connection::{ConnectionName, FifoPosition};
use self::ranks::Ranks;
use self::remote::RemotePuts;
pub(crate) use self::remote::TakenFrame;
use crate::proxy::calls::channel_order::{ChannelMemory, OpenedSegment, PutEnds, TriggerBatch};
use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::lane_job::{LaneKey, LongPut};
use crate::proxy::communicator::port_lanes::LaneMessage;

/// A put that can start.
pub(crate) struct Put {
    pub(crate) connection: u32,
    pub(crate) ends: PutEnds,
    pub(crate) bytes: u64,
    /// The GPU of the rank that puts, if its memory is there.
    pub(crate) gpu: Option<usize>,
}

/// The result of [`PortChannels::next`].
pub(crate) enum Next {
    /// This is to be copied; [`PortChannels::end_put`] goes on.
    Put(Put),
    /// These are to be sent, in order; [`PortChannels::end_send`] goes on.
    Send(Vec<LaneMessage>),
    /// It has done as much as it was to.
    More,
    /// Nothing waits that could go on.
    Nothing,
}

/// How far a rank's connections have gone on.
pub(crate) struct Progress {
    /// An error, where a trigger asks for what cannot be.
    pub(crate) next: Result<Next, Failure>,
    /// Triggers that it took.
    pub(crate) steps: u64,
}

/// A connection that a rank has named.
pub(crate) struct Connected {
    pub(crate) number: u32,
    /// Place of the peer's first frame, if that is on another host and nothing was to come from it before.
    pub(crate) listens: Option<LaneMessage>,
}

/// How much of a batch of triggers was taken in.
#[derive(Default)]
pub(crate) struct TakenIn {
    pub(crate) triggers: u64,
    /// Why it is no more.
    pub(crate) failure: Option<Failure>,
}

/// See the module's documentation.
pub(crate) struct PortChannels {
    ranks: Ranks,
    /// Between ranks here.
    puts: u32,
    remote: RemotePuts,
}

impl PortChannels {
    /// Those of a communicator of so many ranks, none yet.
    pub(crate) fn new(nranks: u32) -> Self {
        PortChannels { ranks: Ranks::default(), puts: 0, remote: RemotePuts::new(nranks) }
    }

    /// Whether no rank has any.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// A rank opens its FIFO.
    pub(crate) fn open(&mut self, rank: u32, opened: Arc<OpenedSegment>) -> Result<(), SetupError> {
        self.ranks.open(rank, opened)
    }

    /// Peers of a rank may name a memory from now on.
    pub(crate) fn register(&mut self, rank: u32, memory: ChannelMemory) -> Result<Handle, SetupError> {
        self.ranks.opened(rank)?.register(memory)
    }

    /// A rank takes a memory back. Operations that run in it end.
    pub(crate) fn free(&mut self, rank: u32, memory: Handle) -> Result<(), SetupError> {
        self.ranks.opened(rank)?.free(memory)
    }

    /// A rank's region goes, and with it the memories in it.
    pub(crate) fn forget_region(&mut self, rank: u32, region: Handle) {
        if let Some(own) = self.ranks.get_mut(rank) {
            own.forget_region(region);
        }
    }

    /// A rank names a connection, which is made if there is none of that name.
    pub(crate) fn connect(
        &mut self,
        rank: u32,
        peer: u32,
        place: PeerPlace,
        tag: u32,
    ) -> Result<Connected, SetupError> {
        let name = ConnectionName { peer, tag };
        if let Some(number) = self.ranks.opened(rank)?.number(name) {
            return Ok(Connected { number, listens: None });
        }
        let number = self.ranks.connect(rank, name, place)?;
        let is_elsewhere = place == PeerPlace::Elsewhere;
        let listens = if is_elsewhere { self.remote.listen(&self.ranks, rank, peer) } else { None };
        Ok(Connected { number, listens })
    }

    /// The number of a new channel, with the memories that its puts are from and into, if it has such.
    pub(crate) fn open_channel(
        &mut self,
        rank: u32,
        connection: u32,
        memories: Option<PutMemories>,
    ) -> Result<u32, SetupError> {
        self.ranks.open_channel(rank, connection, memories)
    }

    /// A channel goes. Triggers that came before keep what they name.
    pub(crate) fn close_channel(&mut self, rank: u32, channel: u32) -> Result<(), SetupError> {
        self.ranks.opened(rank)?.close_channel(channel)
    }

    /// Takes triggers in: none, if their rank has left.
    pub(crate) fn enqueue(&mut self, batch: &TriggerBatch) -> TakenIn {
        let TriggerBatch { rank, writer, first, triggers, .. } = batch;
        let Some(own) = self.ranks.get_mut(*rank) else { return TakenIn::default() };
        for (taken, trigger) in (0..).zip(triggers) {
            let position = FifoPosition { writer: *writer, end: first + taken + 1 };
            if let Err(failure) = own.enqueue(trigger, position) {
                return TakenIn { triggers: taken, failure: Some(failure) };
            }
        }
        TakenIn { triggers: triggers.len() as u64, failure: None }
    }

    /// Goes on with a rank's connections to the next put, at most `steps_max` triggers.
    pub(crate) fn next(&mut self, rank: u32, steps_max: u64) -> Progress {
        for steps in 1..=steps_max {
            match self.step(rank) {
                Ok(Next::More) => {}
                next => return Progress { next, steps },
            }
        }
        Progress { next: Ok(Next::More), steps: steps_max }
    }

    /// Goes on with the first trigger of the connection whose turn it is.
    fn step(&mut self, rank: u32) -> Result<Next, Failure> {
        let Some(own) = self.ranks.get_mut(rank) else { return Ok(Next::Nothing) };
        let Some(number) = own.pop_ready() else { return Ok(Next::Nothing) };
        let gpu = own.gpu();
        let Some(connection) = self.ranks.get(rank).and_then(|own| own.connection(number)) else {
            return Ok(Next::More);
        };
        let Some(front) = connection.front() else { return Ok(Next::More) };
        if connection.is_elsewhere() {
            let messages = self.remote.send(&mut self.ranks, rank, number)?;
            return Ok(if messages.is_empty() { Next::More } else { Next::Send(messages) });
        }
        let bytes = front.trigger.bytes;
        if !front.trigger.kinds.has(Kinds::PUT) || bytes == 0 {
            self.ranks.end_front(rank, number);
            return Ok(Next::More);
        }
        let ends = self.ranks.put_ends(rank, connection.name().peer, front)?;
        if self.ranks.get_mut(rank).is_some_and(|own| own.begin_turn(number)) {
            self.puts += 1;
        }
        Ok(Next::Put(Put { connection: number, ends, bytes, gpu }))
    }

    /// A put has ended: its signal and flush follow.
    pub(crate) fn end_put(&mut self, rank: u32, connection: u32) {
        self.puts = self.puts.saturating_sub(1);
        if self.ranks.get_mut(rank).is_some_and(|own| own.end_turn(connection)) {
            self.ranks.end_front(rank, connection);
        }
    }

    /// A message of a lane has been sent, with the bytes of a long put or not. Returns the next ones.
    ///
    /// # Errors
    /// A trigger that waited asks for what cannot be.
    pub(crate) fn end_send(&mut self, key: LaneKey, put: Option<LongPut>) -> Result<Vec<LaneMessage>, Failure> {
        self.remote.end_send(&mut self.ranks, key, put)
    }

    /// A message of a lane has come: carries out what it says.
    ///
    /// # Errors
    /// The peer puts where it must not.
    pub(crate) fn end_receive(&mut self, key: LaneKey) -> Result<TakenFrame, Failure> {
        self.remote.end_receive(&mut self.ranks, key)
    }

    /// A message of a lane has ended, and not as it should.
    pub(crate) fn break_lane(&mut self, key: LaneKey) {
        self.remote.break_lane(key);
    }

    /// A peer on another host has ended its lane to a rank: it has left, or fails. If no thread waits for its signals now, none comes any more.
    /// Returns false if one does, which is to hear why.
    pub(crate) fn end_peer(&mut self, LaneKey { rank, peer, .. }: LaneKey) -> bool {
        let Some(own) = self.ranks.get_mut(rank) else { return true };
        if own.awaits(peer) {
            return false;
        }
        own.end_peer(peer);
        true
    }

    /// Whether a rank has triggers that can go on.
    pub(crate) fn is_ready(&self, rank: u32) -> bool {
        self.ranks.get(rank).is_some_and(|own| own.is_ready())
    }

    /// Whether triggers of a rank wait or run.
    pub(crate) fn has_waiting(&self, rank: u32) -> bool {
        self.ranks.get(rank).is_some_and(|own| own.has_queued())
    }

    /// Whether a put runs.
    pub(crate) fn runs(&self) -> bool {
        self.puts > 0 || self.remote.runs()
    }

    /// A rank has left: what it had goes, and its peers wait for it in vain.
    pub(crate) fn depart(&mut self, rank: u32) {
        self.ranks.depart(rank);
    }

    /// The communicator has failed: all that waits is given up, and whoever waits released.
    pub(crate) fn end(&mut self) {
        self.ranks.end();
        self.remote.clear();
    }

    /// Signals for which threads of a rank wait.
    pub(crate) fn awaited(&self, rank: u32) -> impl Iterator<Item = SignalWait> {
        self.ranks.awaited(rank)
    }

    /// Looks for threads that have waited for a signal for too long, and says what for. `moved` is when something last happened in the
    /// communicator.
    pub(crate) fn late(&mut self, timeout: Duration, moved: Instant, now: Instant) -> Option<String> {
        let late = self.ranks.late(timeout, moved, now);
        (!late.is_empty()).then(|| late.join("; "))
    }
}
