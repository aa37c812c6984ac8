//! Puts and signals between ranks of several hosts: triggers that wait go out in frames, and frames
//! that come in are carried out.
//!
//! A short put has ended, for its rank, when its bytes are in a frame. A long one ends its frame, and ends when its bytes have been sent.

use std::sync::Arc;

use mccs_device::Operand;
use mccs_ipc::port_channels::{Kinds, Trigger};
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::{PutFrame, PutHeader};

use super::connection::{ConnectionName, Queued};
use super::mistakes::{NamedMemory, no_memories};
use super::ranks::Ranks;
use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::lane_job::{LaneKey, LongPut};
use crate::proxy::communicator::port_lanes::{LaneMessage, PortLanes, Received};

/// The result of the first trigger of a connection.
enum Added {
    /// It has ended, with so many bytes put.
    Ended(u64),
    /// Its bytes follow the frame.
    Long(Operand),
    /// It waits for the next frame.
    NoRoom,
    /// There is none.
    Nothing,
}

/// The result of a message that has come.
#[derive(Default)]
pub(crate) struct TakenFrame {
    /// Place of the next one.
    pub(crate) next: Vec<LaneMessage>,
    /// Bytes that were copied.
    pub(crate) copied: u64,
    /// Triggers that it was made of.
    pub(crate) triggers: u64,
}

/// Work of a frame.
#[derive(Default)]
struct CarriedOut {
    /// The long put whose bytes follow, with their place.
    long_put: Option<(PutHeader, Operand)>,
    copied: u64,
    triggers: u64,
}

/// See the module's documentation.
pub(super) struct RemotePuts {
    lanes: PortLanes,
    /// Messages that are being sent.
    sends: u32,
}

impl RemotePuts {
    /// None yet, in a communicator of so many ranks.
    pub(super) fn new(nranks: u32) -> Self {
        RemotePuts { lanes: PortLanes::new(nranks), sends: 0 }
    }

    /// Whether a message is being sent.
    pub(super) fn runs(&self) -> bool {
        self.sends > 0
    }

    /// A rank waits for what a peer sends from now on: returns where the first frame goes, unless it waits already.
    pub(super) fn listen(&mut self, ranks: &Ranks, rank: u32, peer: u32) -> Option<LaneMessage> {
        let frames = ranks.get(rank)?.frames()?;
        self.lanes.listen(rank, peer, frames)
    }

    /// A connection to another host has triggers that wait. Returns the messages with them, if the lane is free.
    pub(super) fn send(&mut self, ranks: &mut Ranks, rank: u32, number: u32) -> Result<Vec<LaneMessage>, Failure> {
        let Some(own) = ranks.get_mut(rank) else { return Ok(Vec::new()) };
        let Some(frames) = own.frames().map(Arc::clone) else { return Ok(Vec::new()) };
        let peer = own.connection(number).map(|connection| connection.name().peer);
        let Some(peer) = peer.filter(|_| own.begin_turn(number)) else { return Ok(Vec::new()) };
        let key = LaneKey { rank, peer, is_send: true };
        if self.lanes.wait(key, &frames, number) { self.fill(ranks, key) } else { Ok(Vec::new()) }
    }

    /// Sends what connections have that wait, as far as the lane has room.
    fn fill(&mut self, ranks: &mut Ranks, key: LaneKey) -> Result<Vec<LaneMessage>, Failure> {
        let mut messages = Vec::new();
        while self.lanes.may_send(key) {
            messages.extend(self.fill_frame(ranks, key)?);
        }
        Ok(messages)
    }

    /// Sends a frame with what connections have that wait, and the long put behind it; nothing, if they have nothing to send.
    fn fill_frame(&mut self, ranks: &mut Ranks, key: LaneKey) -> Result<Vec<LaneMessage>, Failure> {
        let Some(mut place) = self.lanes.place(key) else { return Ok(Vec::new()) };
        let Some(room) = place.room() else { return Ok(Vec::new()) };
        let (mut frame, mut inline_puts, mut then) = (PutFrame::new(room), Vec::new(), None);
        'frame: while let Some(number) = self.lanes.pop_waiting(key) {
            loop {
                match add(ranks, key.rank, number, &mut frame, &self.lanes)? {
                    Added::Ended(bytes) => {
                        inline_puts.extend((bytes > 0).then_some(bytes));
                        ranks.end_front(key.rank, number);
                    }
                    Added::Long(data) => {
                        let put = ranks.get_mut(key.rank).map_or(0, |own| own.begin_long_put(number));
                        then = Some((LongPut { connection: number, number: put, bytes: data.bytes() }, data));
                        // Behind others that wait.
                        self.lanes.wait_again(key, number);
                        break 'frame;
                    }
                    Added::NoRoom => {
                        self.lanes.wait_again(key, number);
                        break 'frame;
                    }
                    Added::Nothing => {
                        if let Some(own) = ranks.get_mut(key.rank) {
                            own.end_turn(number);
                        }
                        break;
                    }
                }
            }
        }
        if frame.is_empty() {
            return Ok(Vec::new());
        }
        let messages = self.lanes.send(key, frame.end(), inline_puts, then);
        self.sends += messages.len() as u32;
        Ok(messages)
    }

    /// A message of a lane has been sent, with the bytes of a long put or not. Returns the next ones.
    ///
    /// # Errors
    /// A trigger that waited asks for what cannot be.
    pub(super) fn end_send(
        &mut self,
        ranks: &mut Ranks,
        key: LaneKey,
        put: Option<LongPut>,
    ) -> Result<Vec<LaneMessage>, Failure> {
        self.sends = self.sends.saturating_sub(1);
        self.lanes.sent(key, put.is_none());
        if let (Some(LongPut { connection, number, .. }), Some(own)) = (put, ranks.get_mut(key.rank)) {
            own.end_long_put(connection, number);
        }
        self.fill(ranks, key)
    }

    /// A message of a lane has come: carries out what it says.
    ///
    /// # Errors
    /// The peer puts where it must not.
    pub(super) fn end_receive(&mut self, ranks: &mut Ranks, key: LaneKey) -> Result<TakenFrame, Failure> {
        let CarriedOut { long_put, copied, triggers } = match self.lanes.received(key) {
            Some(Received::Frame(mut place)) => carry_out(ranks, key, place.room().unwrap_or_default())?,
            Some(Received::Data(header)) => {
                if header.signals {
                    ranks.signal_from_afar(key.rank, ConnectionName { peer: key.peer, tag: header.tag })?;
                }
                CarriedOut::default()
            }
            None => return Ok(TakenFrame::default()),
        };
        Ok(TakenFrame { next: self.lanes.receive(key, long_put).into_iter().collect(), copied, triggers })
    }

    /// A message of a lane has ended, and not as it should.
    pub(super) fn break_lane(&mut self, key: LaneKey) {
        self.sends = self.sends.saturating_sub(u32::from(key.is_send));
    }

    /// Gives up what waits.
    pub(super) fn clear(&mut self) {
        self.lanes.clear();
    }
}

/// Adds the first trigger of a connection to a frame.
fn add(ranks: &Ranks, rank: u32, number: u32, frame: &mut PutFrame<'_>, lanes: &PortLanes) -> Result<Added, Failure> {
    let connection = ranks.get(rank).and_then(|own| own.connection(number));
    let Some((connection, front)) = connection.and_then(|of| Some((of, of.front()?))) else {
        return Ok(Added::Nothing);
    };
    let Queued { trigger, memories, .. } = front;
    let Trigger { kinds, channel, bytes, source_offset, destination_offset: offset } = *trigger;
    let (signals, bytes) = (kinds.has(Kinds::SIGNAL), if kinds.has(Kinds::PUT) { bytes } else { 0 });
    if bytes == 0 && !signals {
        return Ok(Added::Ended(0));
    }
    let (tag, is_inline) = (connection.name().tag, lanes.is_inline(bytes));
    let header = |memory| PutHeader { tag, signals, channel, memory, offset, bytes, is_inline };
    if bytes == 0 {
        return Ok(frame.add(&header(Handle::NONE)).map_or(Added::NoRoom, |_| Added::Ended(0)));
    }
    let memories = memories.ok_or_else(|| no_memories(rank, channel))?;
    let named = NamedMemory { rank, channel, of: rank, memory: memories.source };
    let source = ranks.memory(&named)?;
    let past_end = || named.past_end(source_offset, bytes, source.bytes);
    let data = source.part(source_offset, bytes).ok_or_else(past_end)?;
    match frame.add(&header(memories.destination)) {
        None => Ok(Added::NoRoom),
        Some(_) if !is_inline => Ok(Added::Long(data)),
        Some(place) => source.copy_out(source_offset, place).then_some(Added::Ended(bytes)).ok_or_else(past_end),
    }
}

/// Puts and signals as a peer's frame says.
fn carry_out(ranks: &mut Ranks, LaneKey { rank, peer, .. }: LaneKey, frame: &[u8]) -> Result<CarriedOut, Failure> {
    let mut done = CarriedOut::default();
    for one in PutFrame::read(frame) {
        let malformed = || Failure::new(ErrorClass::Internal, format!("rank {peer}'s host sent a malformed frame"));
        let (header, bytes) = one.ok_or_else(malformed)?;
        done.triggers += 1;
        let PutHeader { channel, memory, offset, .. } = header;
        let named = NamedMemory { rank: peer, channel, of: rank, memory };
        if header.bytes > 0 && !header.is_inline {
            // The last one: its bytes come next.
            done.long_put = Some((header, ranks.part(&named, offset, header.bytes)?));
            return Ok(done);
        }
        if header.bytes > 0 {
            let known = ranks.memory(&named)?;
            if !known.copy_in(offset, bytes) {
                return Err(named.past_end(offset, header.bytes, known.bytes));
            }
            done.copied += header.bytes;
        }
        if header.signals {
            ranks.signal_from_afar(rank, ConnectionName { peer, tag: header.tag })?;
        }
    }
    Ok(done)
}
