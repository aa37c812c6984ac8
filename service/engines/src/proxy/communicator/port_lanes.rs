//! Lanes of port channels: messages between a rank here and one of another host, in order.
//!
//! ```text
//! sender:    frame of what waits --> bytes of a long put, if it ends with one --> next frame
//! receiver:  listens: frame --> checks, copies, signals --> bytes of a long put --> listens
//! ```
//!
//! The sender has some messages under way, so that none waits for the acknowledgement of the one before. The receiver waits for one at a time.
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
    /// The long put whose bytes it sends.
    pub(crate) put: Option<LongPut>,
}

/// A put whose bytes follow its frame.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LongPut {
    /// Of the rank, by number.
    pub(crate) connection: u32,
    /// Of the connection's long puts, by number.
    pub(crate) number: u64,
    pub(crate) bytes: u64,
}

/// What has come by a lane.
pub(crate) enum Received {
    Frame(Box<[u8; PutFrame::BYTES]>),
    /// The bytes of the long put before.
    Data(PutHeader),
}

/// Frames of a lane under way, each in a place of its own. More are of little use: a frame is sent when it has been copied.
const FRAMES_MAX: u32 = 2;
/// Long puts of a lane under way: as many as hide the time until one is acknowledged.
const LONG_PUTS_MAX: u32 = 8;
/// Places for frames of a pair of ranks: one to receive, behind those to send.
const PLACES: u64 = FRAMES_MAX as u64 + 1;

struct Lane {
    /// The rank's places for frames.
    frames: Arc<Region>,
    /// Connections that wait for the lane.
    waiting: VecDeque<u32>,
    /// Frames that have been sent, those under way among them.
    frames_begun: u64,
    frames_ended: u64,
    long_puts: u32,
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
    PLACES * u64::from(nranks) * PutFrame::BYTES as u64
}

impl Lane {
    /// Where its next frame is.
    fn frame_offset(&self, lane: LaneKey) -> u64 {
        let place = if lane.is_send { self.frames_begun % u64::from(FRAMES_MAX) } else { PLACES - 1 };
        (PLACES * u64::from(lane.peer) + place) * PutFrame::BYTES as u64
    }

    fn frame(&self, lane: LaneKey, inline_puts: Vec<u64>) -> Option<LaneMessage> {
        let operand = Operand::in_region(&self.frames, self.frame_offset(lane), PutFrame::BYTES as u64)?;
        Some(LaneMessage { lane, operand, is_frame: true, inline_puts, put: None })
    }

    fn is_free(&self) -> bool {
        self.frames_begun - self.frames_ended < u64::from(FRAMES_MAX) && self.long_puts < LONG_PUTS_MAX
    }
}

fn data_message(lane: LaneKey, operand: Operand, put: Option<LongPut>) -> LaneMessage {
    LaneMessage { lane, operand, is_frame: false, inline_puts: Vec::new(), put }
}

impl PortLanes {
    fn lane(&mut self, key: LaneKey, frames: &Arc<Region>) -> &mut Lane {
        self.lanes.entry(key).or_insert_with(|| Lane {
            frames: Arc::clone(frames),
            waiting: VecDeque::new(),
            frames_begun: 0,
            frames_ended: 0,
            long_puts: 0,
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
        lane.is_free()
    }

    /// Whether another frame may be sent, and a connection waits for it.
    pub(crate) fn may_send(&self, key: LaneKey) -> bool {
        self.lanes.get(&key).is_some_and(|lane| lane.is_free() && !lane.waiting.is_empty())
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

    /// Sends a frame by a free lane, and then the bytes of its last put, if that is long. Returns the messages.
    pub(crate) fn send(
        &mut self,
        key: LaneKey,
        frame: &PutFrame,
        inline_puts: Vec<u64>,
        then: Option<(LongPut, Operand)>,
    ) -> Vec<LaneMessage> {
        let Some(lane) = self.lanes.get_mut(&key) else { return Vec::new() };
        lane.frames.copy_in(lane.frame_offset(key), frame.as_bytes());
        let Some(message) = lane.frame(key, inline_puts) else { return Vec::new() };
        lane.frames_begun += 1;
        lane.long_puts += u32::from(then.is_some());
        std::iter::once(message).chain(then.map(|(put, data)| data_message(key, data, Some(put)))).collect()
    }

    /// A message has been sent: a frame, or the bytes of a long put.
    pub(crate) fn sent(&mut self, key: LaneKey, is_frame: bool) {
        let Some(lane) = self.lanes.get_mut(&key) else { return };
        match is_frame {
            true => lane.frames_ended += 1,
            false => lane.long_puts = lane.long_puts.saturating_sub(1),
        }
    }

    /// A message has come.
    pub(crate) fn received(&mut self, key: LaneKey) -> Option<Received> {
        let lane = self.lanes.get_mut(&key)?;
        if let Some(header) = lane.receives.take() {
            return Some(Received::Data(header));
        }
        let mut frame = Box::new([0; PutFrame::BYTES]);
        lane.frames.copy_out(lane.frame_offset(key), &mut *frame);
        Some(Received::Frame(frame))
    }

    /// Where the next message goes: the bytes of a long put, or else another frame.
    pub(crate) fn receive(&mut self, key: LaneKey, data: Option<(PutHeader, Operand)>) -> Option<LaneMessage> {
        let lane = self.lanes.get_mut(&key)?;
        match data {
            Some((header, operand)) => {
                lane.receives = Some(header);
                Some(data_message(key, operand, None))
            }
            None => lane.frame(key, Vec::new()),
        }
    }

    /// Gives up what waits. Lanes stay until what runs has ended.
    pub(crate) fn clear(&mut self) {
        for lane in self.lanes.values_mut() {
            (lane.waiting, lane.receives) = (VecDeque::new(), None);
        }
    }
}
