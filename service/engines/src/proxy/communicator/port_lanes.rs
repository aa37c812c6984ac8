//! Lanes of port channels: messages between a rank here and one of another host, one at a time in
//! each direction.
//!
//! ```text
//! sender:    frame of what waits --> bytes of a long put, if it ends with one --> next frame
//! receiver:  listens: frame --> checks, copies, signals --> bytes of a long put --> listens
//! ```
//!
//! The receiver's service alone knows its memories, so it is the one that checks where a put goes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use mccs_device::Operand;
use mccs_model::{PutFrame, PutHeader};
use mccs_tenants::regions::Region;

/// A lane: a rank of this host, one of another, and the direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LaneKey {
    pub(crate) rank: u32,
    pub(crate) peer: u32,
    /// Whether the rank here sends.
    pub(crate) is_send: bool,
}

/// The next message of a lane.
pub(crate) struct LaneMessage {
    pub(crate) lane: LaneKey,
    /// What is sent, or where it goes.
    pub(crate) operand: Operand,
    /// Whether it is a frame.
    pub(crate) is_frame: bool,
    /// Bytes of each put that a frame carries.
    pub(crate) inline_puts: Vec<u64>,
}

/// A put whose bytes follow its frame.
pub(crate) struct LongPut {
    pub(crate) connection: u32,
    pub(crate) data: Operand,
}

/// What follows a message that has been sent.
pub(crate) enum Sent {
    /// Another one.
    Next(LaneMessage),
    /// The lane is free. A connection's put has ended, if it was one.
    Free { ended: Option<u32> },
}

/// What has come by a lane.
pub(crate) enum Received {
    Frame(Box<[u8; PutFrame::BYTES]>),
    /// The bytes of the long put before.
    Data(PutHeader),
}

/// What a lane sends now.
enum Sends {
    Nothing,
    Frame { then: Option<LongPut> },
    Data { connection: u32 },
}

struct Lane {
    /// The rank's places for frames.
    frames: Arc<Region>,
    /// Connections that wait for the lane.
    waiting: VecDeque<u32>,
    sends: Sends,
    /// Long put whose bytes are awaited.
    receives: Option<PutHeader>,
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct PortLanes {
    lanes: BTreeMap<LaneKey, Lane>,
}

/// Bytes of the places for frames of a rank, of which there is one for each lane with one of so many ranks.
pub(crate) fn frames_bytes(nranks: u32) -> u64 {
    2 * u64::from(nranks) * PutFrame::BYTES as u64
}

/// Where the frame of a lane is.
fn frame_offset(lane: LaneKey) -> u64 {
    (2 * u64::from(lane.peer) + u64::from(lane.is_send)) * PutFrame::BYTES as u64
}

impl Lane {
    fn frame(&self, lane: LaneKey, inline_puts: Vec<u64>) -> Option<LaneMessage> {
        let operand = Operand::in_region(&self.frames, frame_offset(lane), PutFrame::BYTES as u64)?;
        Some(LaneMessage { lane, operand, is_frame: true, inline_puts })
    }
}

fn data_message(lane: LaneKey, operand: Operand) -> LaneMessage {
    LaneMessage { lane, operand, is_frame: false, inline_puts: Vec::new() }
}

impl PortLanes {
    fn lane(&mut self, key: LaneKey, frames: &Arc<Region>) -> &mut Lane {
        self.lanes.entry(key).or_insert_with(|| Lane {
            frames: Arc::clone(frames),
            waiting: VecDeque::new(),
            sends: Sends::Nothing,
            receives: None,
        })
    }

    /// A rank waits for what a peer sends from now on: returns where the first frame goes, unless it waits already.
    pub(crate) fn listen(&mut self, rank: u32, peer: u32, frames: &Arc<Region>) -> Option<LaneMessage> {
        let key = LaneKey { rank, peer, is_send: false };
        if self.lanes.contains_key(&key) {
            return None;
        }
        self.lane(key, frames).frame(key, Vec::new())
    }

    /// A connection waits for its turn in a lane. Returns whether the lane is free.
    pub(crate) fn wait(&mut self, key: LaneKey, frames: &Arc<Region>, connection: u32) -> bool {
        let lane = self.lane(key, frames);
        lane.waiting.push_back(connection);
        matches!(lane.sends, Sends::Nothing)
    }

    /// Takes the connection whose turn it is.
    pub(crate) fn pop_waiting(&mut self, key: LaneKey) -> Option<u32> {
        self.lanes.get_mut(&key)?.waiting.pop_front()
    }

    /// A connection has more than its frame has room for: the next one begins with the others that wait.
    pub(crate) fn wait_again(&mut self, key: LaneKey, connection: u32) {
        if let Some(lane) = self.lanes.get_mut(&key) {
            lane.waiting.push_back(connection);
        }
    }

    /// Sends a frame by a free lane, and then the bytes of its last put, if that is long.
    pub(crate) fn send(
        &mut self,
        key: LaneKey,
        frame: &PutFrame,
        inline_puts: Vec<u64>,
        then: Option<LongPut>,
    ) -> Option<LaneMessage> {
        let lane = self.lanes.get_mut(&key)?;
        lane.frames.copy_in(frame_offset(key), frame.as_bytes());
        lane.sends = Sends::Frame { then };
        lane.frame(key, inline_puts)
    }

    /// A message has been sent.
    pub(crate) fn sent(&mut self, key: LaneKey) -> Sent {
        let Some(lane) = self.lanes.get_mut(&key) else { return Sent::Free { ended: None } };
        match std::mem::replace(&mut lane.sends, Sends::Nothing) {
            Sends::Frame { then: Some(LongPut { connection, data }) } => {
                lane.sends = Sends::Data { connection };
                Sent::Next(data_message(key, data))
            }
            Sends::Data { connection } => Sent::Free { ended: Some(connection) },
            Sends::Frame { then: None } | Sends::Nothing => Sent::Free { ended: None },
        }
    }

    /// A message has come.
    pub(crate) fn received(&mut self, key: LaneKey) -> Option<Received> {
        let lane = self.lanes.get_mut(&key)?;
        if let Some(header) = lane.receives.take() {
            return Some(Received::Data(header));
        }
        let mut frame = Box::new([0; PutFrame::BYTES]);
        lane.frames.copy_out(frame_offset(key), &mut *frame);
        Some(Received::Frame(frame))
    }

    /// Where the next message goes: the bytes of a long put, or else another frame.
    pub(crate) fn receive(&mut self, key: LaneKey, data: Option<(PutHeader, Operand)>) -> Option<LaneMessage> {
        let lane = self.lanes.get_mut(&key)?;
        match data {
            Some((header, operand)) => {
                lane.receives = Some(header);
                Some(data_message(key, operand))
            }
            None => lane.frame(key, Vec::new()),
        }
    }

    /// Gives up what waits. Lanes stay until what runs has ended.
    pub(crate) fn clear(&mut self) {
        for lane in self.lanes.values_mut() {
            (lane.waiting, lane.sends, lane.receives) = (VecDeque::new(), Sends::Nothing, None);
        }
    }
}
