//! Port channels of all ranks here: signals from one to another, and memories that puts of one name
//! of another.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_device::Operand;
use mccs_ipc::port_channels::{CONNECTIONS_MAX, PutMemories, Trigger};
use mccs_model::SetupError;
use mccs_telemetry::stuck::SignalWait;

use super::connection::{ConnectionName, PeerPlace, Queued};
use super::mistakes::{NamedMemory, invalid, mistake, no_memories};
use super::rank::{Ended, RankChannels};
use crate::proxy::calls::channel_order::{ChannelMemory, OpenedSegment, PutEnds};
use crate::proxy::calls::failure::Failure;

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Ranks {
    by_rank: BTreeMap<u32, RankChannels>,
    /// Signals for connections that their rank has not made yet, by rank.
    early: BTreeMap<u32, BTreeMap<ConnectionName, u64>>,
}

fn not_opened() -> SetupError {
    invalid("the rank has opened no port channels in this communicator")
}

impl Ranks {
    pub(super) fn is_empty(&self) -> bool {
        self.by_rank.is_empty()
    }

    pub(super) fn open(&mut self, rank: u32, opened: Arc<OpenedSegment>) -> Result<(), SetupError> {
        if self.by_rank.contains_key(&rank) {
            return Err(invalid("the rank has opened its port channels before"));
        }
        self.by_rank.insert(rank, RankChannels::new(rank, opened));
        Ok(())
    }

    pub(super) fn get(&self, rank: u32) -> Option<&RankChannels> {
        self.by_rank.get(&rank)
    }

    pub(super) fn get_mut(&mut self, rank: u32) -> Option<&mut RankChannels> {
        self.by_rank.get_mut(&rank)
    }

    /// A rank that asks for something, which it may not before it has opened its FIFO.
    pub(super) fn opened(&mut self, rank: u32) -> Result<&mut RankChannels, SetupError> {
        self.get_mut(rank).ok_or_else(not_opened)
    }

    /// Makes a connection of a rank, to which signals may have come. Returns its number.
    pub(super) fn connect(&mut self, rank: u32, name: ConnectionName, place: PeerPlace) -> Result<u32, SetupError> {
        let Ranks { by_rank, early } = self;
        let own = by_rank.get_mut(&rank).ok_or_else(not_opened)?;
        own.connect(name, place, || early.get_mut(&rank).and_then(|early| early.remove(&name)).unwrap_or(0))
    }

    /// Makes a channel of a rank's connection. Returns its number.
    pub(super) fn open_channel(
        &mut self,
        rank: u32,
        connection: u32,
        memories: Option<PutMemories>,
    ) -> Result<u32, SetupError> {
        let own = self.opened(rank)?;
        let of = own.connection(connection).ok_or_else(|| invalid(format!("there is no connection {connection}")))?;
        let (peer, is_elsewhere) = (of.name().peer, of.is_elsewhere());
        if let Some(PutMemories { source, destination }) = memories {
            if own.memory(source).is_none() {
                return Err(invalid(format!("the rank has no memory {source:?}")));
            }
            // Another host's service knows its ranks' memories.
            if !is_elsewhere && self.get(peer).is_none_or(|peer| peer.memory(destination).is_none()) {
                return Err(invalid(format!("rank {peer} has no memory {destination:?}")));
            }
        }
        self.opened(rank)?.open_channel(connection, memories)
    }

    /// The first trigger of a connection has been put: signals, flushes, and takes it away.
    pub(super) fn end_front(&mut self, rank: u32, number: u32) {
        let Some(Ended { signals, flushes }) = self.get_mut(rank).map(|own| own.end_front(number)) else { return };
        if let Some(ConnectionName { peer, tag }) = signals {
            self.signal(peer, ConnectionName { peer: rank, tag });
        }
        if let (Some(position), Some(own)) = (flushes, self.get_mut(rank)) {
            own.flush(number, position);
        }
    }

    /// A signal has come for a rank of this host, from a rank of it.
    pub(super) fn signal(&mut self, to: u32, name: ConnectionName) {
        let known = self.by_rank.get_mut(&to).and_then(|rank| Some((rank.number(name)?, rank)));
        match known {
            Some((number, rank)) => rank.signal(number),
            None => *self.early.entry(to).or_default().entry(name).or_default() += 1,
        }
    }

    /// As [`Ranks::signal`], from a rank of another host, whose service has not said which connections it has.
    ///
    /// # Errors
    /// More connections wait to be made than a rank can have.
    pub(super) fn signal_from_afar(&mut self, to: u32, name: ConnectionName) -> Result<(), Failure> {
        self.signal(to, name);
        let waiting = self.early.get(&to).map_or(0, BTreeMap::len);
        let too_many = || mistake(name.peer, format!("it signals more connections than rank {to} can have"));
        (waiting <= CONNECTIONS_MAX as usize).then_some(()).ok_or_else(too_many)
    }

    /// Source and destination of a put.
    pub(super) fn put_ends(&self, rank: u32, peer: u32, of: &Queued) -> Result<PutEnds, Failure> {
        let Trigger { channel, bytes, source_offset, destination_offset, .. } = of.trigger;
        let memories = of.memories.ok_or_else(|| no_memories(rank, channel))?;
        let named = |of, memory| NamedMemory { rank, channel, of, memory };
        let (own, from) = self.place(&named(rank, memories.source), source_offset, bytes)?;
        let (theirs, to) = self.place(&named(peer, memories.destination), destination_offset, bytes)?;
        let other_kind =
            || mistake(rank, format!("memories of port channel {channel} are not both of GPUs, or of the host"));
        let ends = own.put_into(from, theirs, to, bytes).ok_or_else(other_kind)?;
        if ends.overlap(bytes) {
            return Err(mistake(rank, format!("source and destination of a put of port channel {channel} overlap")));
        }
        Ok(ends)
    }

    /// A memory, and where a part of it is in its region.
    fn place(&self, named: &NamedMemory, offset: u64, bytes: u64) -> Result<(&ChannelMemory, u64), Failure> {
        let known = self.memory(named)?;
        let place = known.place(offset, bytes).ok_or_else(|| named.past_end(offset, bytes, known.bytes))?;
        Ok((known, place))
    }

    /// A part of a memory.
    pub(super) fn part(&self, named: &NamedMemory, offset: u64, bytes: u64) -> Result<Operand, Failure> {
        let known = self.memory(named)?;
        known.part(offset, bytes).ok_or_else(|| named.past_end(offset, bytes, known.bytes))
    }

    /// A memory of a rank here.
    pub(super) fn memory(&self, named: &NamedMemory) -> Result<&ChannelMemory, Failure> {
        self.get(named.of).and_then(|rank| rank.memory(named.memory)).ok_or_else(|| named.freed())
    }

    /// A rank has left: what it had goes, and its peers wait for it in vain.
    pub(super) fn depart(&mut self, rank: u32) {
        if let Some(mut own) = self.by_rank.remove(&rank) {
            own.end();
        }
        self.early.remove(&rank);
        self.by_rank.values_mut().for_each(|other| other.end_peer(rank));
    }

    /// The communicator has failed.
    pub(super) fn end(&mut self) {
        self.by_rank.values_mut().for_each(RankChannels::end);
        self.early.clear();
    }

    /// Signals for which threads of a rank wait.
    pub(super) fn awaited(&self, rank: u32) -> impl Iterator<Item = SignalWait> {
        self.get(rank).into_iter().flat_map(RankChannels::awaited_signals)
    }

    /// Waits that last too long, in words.
    pub(super) fn late(&mut self, timeout: Duration, moved: Instant, now: Instant) -> Vec<String> {
        self.by_rank.values_mut().flat_map(|own| own.late(timeout, moved, now)).collect()
    }
}
