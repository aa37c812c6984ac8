//! Puts and signals between ranks of several hosts: triggers that wait go out in frames, and frames
//! that come in are carried out.
//!
//! A short put has ended, for its rank, when its bytes are in a frame. A long one ends its frame, and ends when its bytes have been sent.

use std::sync::Arc;

use mccs_device::Operand;
use mccs_ipc::port_channels::{Kinds, Trigger};
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::{PutFrame, PutHeader};

use super::{NamedMemory, PortChannels, Queued, no_memories};
use crate::proxy::calls::failure::Failure;
use crate::proxy::communicator::port_lanes::{LaneKey, LaneMessage, LongPut, Received};

/// What becomes of the first trigger of a connection.
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

impl PortChannels {
    /// A connection to another host has triggers that wait. Returns the messages with them, if the lane is free.
    pub(super) fn send(&mut self, rank: u32, number: u32) -> Result<Vec<LaneMessage>, Failure> {
        let Some(own) = self.ranks.get_mut(&rank) else { return Ok(Vec::new()) };
        let Some(connection) = own.connections.get_mut(number as usize).filter(|of| !of.runs) else {
            return Ok(Vec::new());
        };
        let Some(frames) = &own.opened.frames else { return Ok(Vec::new()) };
        connection.runs = true;
        let key = LaneKey { rank, peer: connection.peer, is_send: true };
        let is_free = self.lanes.wait(key, &Arc::clone(frames), number);
        if is_free { self.fill(key) } else { Ok(Vec::new()) }
    }

    /// Sends what connections have that wait, as far as the lane has room.
    fn fill(&mut self, key: LaneKey) -> Result<Vec<LaneMessage>, Failure> {
        let mut messages = Vec::new();
        while self.lanes.may_send(key) {
            messages.extend(self.fill_frame(key)?);
        }
        Ok(messages)
    }

    /// Sends a frame with what connections have that wait, and the long put behind it; nothing, if they have nothing to send.
    fn fill_frame(&mut self, key: LaneKey) -> Result<Vec<LaneMessage>, Failure> {
        let (mut frame, mut inline_puts, mut then) = (PutFrame::new(), Vec::new(), None);
        'frame: while let Some(number) = self.lanes.pop_waiting(key) {
            loop {
                match self.add(key.rank, number, &mut frame)? {
                    Added::Ended(bytes) => {
                        inline_puts.extend((bytes > 0).then_some(bytes));
                        self.end_front(key.rank, number);
                    }
                    Added::Long(data) => {
                        let put = self.begin_long_put(key.rank, number);
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
                        if let Some(connection) = self.connection_mut(key.rank, number) {
                            connection.runs = false;
                        }
                        break;
                    }
                }
            }
        }
        if frame.is_empty() {
            return Ok(Vec::new());
        }
        let messages = self.lanes.send(key, &frame, inline_puts, then);
        self.jobs += messages.len() as u32;
        Ok(messages)
    }

    /// Adds the first trigger of a connection to a frame.
    fn add(&self, rank: u32, number: u32, frame: &mut PutFrame) -> Result<Added, Failure> {
        let connection = self.ranks.get(&rank).and_then(|own| own.connections.get(number as usize));
        let Some((connection, front)) = connection.and_then(|of| Some((of, of.queue.front()?))) else {
            return Ok(Added::Nothing);
        };
        let Queued { trigger, ends, .. } = front;
        let Trigger { kinds, channel, bytes, source_offset, destination_offset: offset } = *trigger;
        let (signals, bytes) = (kinds.has(Kinds::SIGNAL), if kinds.has(Kinds::PUT) { bytes } else { 0 });
        if bytes == 0 && !signals {
            return Ok(Added::Ended(0));
        }
        let is_inline = bytes <= PutFrame::PUT_BYTES_MAX as u64;
        let header = |memory| PutHeader { tag: connection.tag, signals, channel, memory, offset, bytes, is_inline };
        if bytes == 0 {
            return Ok(frame.add(&header(Handle::NONE)).map_or(Added::NoRoom, |_| Added::Ended(0)));
        }
        let ends = ends.ok_or_else(|| no_memories(rank, channel))?;
        let named = NamedMemory { rank, channel, of: rank, memory: ends.source };
        let source = self.memory(&named)?;
        let past_end = || named.past_end(source_offset, bytes, source.bytes);
        let data = source.part(source_offset, bytes).ok_or_else(past_end)?;
        match frame.add(&header(ends.destination)) {
            None => Ok(Added::NoRoom),
            Some(_) if !is_inline => Ok(Added::Long(data)),
            Some(place) => source.copy_out(source_offset, place).then_some(Added::Ended(bytes)).ok_or_else(past_end),
        }
    }

    /// A message of a lane has ended, with the bytes of a long put or not. Returns the next ones of it.
    ///
    /// # Errors
    /// The peer puts where it must not.
    pub(crate) fn end_lane(&mut self, key: LaneKey, put: Option<LongPut>) -> Result<Vec<LaneMessage>, Failure> {
        let LaneKey { rank, peer, is_send } = key;
        if is_send {
            self.jobs = self.jobs.saturating_sub(1);
            self.lanes.sent(key, put.is_none());
            if let Some(LongPut { connection, number, .. }) = put {
                self.end_long_put(rank, connection, number);
            }
            return self.fill(key);
        }
        let data = match self.lanes.received(key) {
            Some(Received::Frame(frame)) => self.carry_out(key, &frame)?,
            Some(Received::Data(header)) => {
                if header.signals {
                    self.signal(rank, peer, header.tag);
                }
                None
            }
            None => return Ok(Vec::new()),
        };
        Ok(self.lanes.receive(key, data).into_iter().collect())
    }

    /// Puts and signals as a peer's frame says. Returns the long put whose bytes follow, with their place.
    fn carry_out(
        &mut self,
        LaneKey { rank, peer, .. }: LaneKey,
        frame: &[u8; PutFrame::BYTES],
    ) -> Result<Option<(PutHeader, Operand)>, Failure> {
        for one in PutFrame::read(frame) {
            let malformed = || Failure::new(ErrorClass::Internal, format!("rank {peer}'s host sent a malformed frame"));
            let (header, bytes) = one.ok_or_else(malformed)?;
            let PutHeader { channel, memory, offset, .. } = header;
            let named = NamedMemory { rank: peer, channel, of: rank, memory };
            if header.bytes > 0 && !header.is_inline {
                // The last one: its bytes come next.
                return Ok(Some((header, self.part(&named, offset, header.bytes)?)));
            }
            if header.bytes > 0 {
                let known = self.memory(&named)?;
                if !known.copy_in(offset, bytes) {
                    return Err(named.past_end(offset, header.bytes, known.bytes));
                }
            }
            if header.signals {
                self.signal(rank, peer, header.tag);
            }
        }
        Ok(None)
    }

    /// A message of a lane has ended, and not as it should.
    pub(crate) fn break_lane(&mut self, key: LaneKey) {
        self.jobs -= u32::from(key.is_send).min(self.jobs);
    }

    /// A peer on another host has ended its lane to a rank: it has left, or fails. If no thread waits for its signals now, none comes any more.
    /// Returns false if one does, which is to hear why.
    pub(crate) fn end_peer(&mut self, LaneKey { rank, peer, .. }: LaneKey) -> bool {
        let Some(own) = self.ranks.get_mut(&rank) else { return true };
        if own.awaits(peer) {
            return false;
        }
        own.end_connections(|connection| connection.peer == peer);
        true
    }
}
