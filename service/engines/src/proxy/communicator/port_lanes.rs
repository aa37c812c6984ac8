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

use crate::proxy::calls::lane_job::{LaneKey, LongPut};

/// The next message of a lane.
pub(crate) struct LaneMessage {
    pub(crate) lane: LaneKey,
    /// The operand that is sent, or received into.
    pub(crate) operand: Operand,
    /// Whether it is a frame.
    pub(crate) is_frame: bool,
    /// Bytes of each put that a frame carries.
    pub(crate) inline_puts: Vec<u64>,
    /// The long put whose bytes it sends.
    pub(crate) put: Option<LongPut>,
}

/// A message that has come by a lane.
pub(crate) enum Received {
    Frame(FramePlace),
    /// The bytes of the long put before.
    Data(PutHeader),
}

/// A place for a frame that no message uses.
pub(crate) struct FramePlace {
    frames: Arc<Region>,
    offset: u64,
    bytes: u64,
}

impl FramePlace {
    /// All its bytes, of which a frame may be shorter.
    pub(crate) fn room(&mut self) -> Option<&mut [u8]> {
        // SAFETY: no process has memory for frames. A lane gives a place while no message uses it, and begins one with it when this has gone.
        unsafe { self.frames.bytes_mut(self.offset, self.bytes) }
    }
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
    /// Bytes of the longest frame.
    frame_bytes: u64,
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
pub(crate) struct PortLanes {
    lanes: BTreeMap<LaneKey, Lane>,
    /// Bytes of the longest frame.
    frame_bytes: u64,
}

/// Bytes of the places for frames of a rank, of which there is one for each lane with one of so many ranks.
pub(crate) fn frames_bytes(nranks: u32) -> u64 {
    if nranks == 0 { 0 } else { PLACES * u64::from(nranks) * PutFrame::longest(nranks) }
}

impl Lane {
    /// Offset of its next frame.
    fn frame_offset(&self, lane: LaneKey) -> u64 {
        let place = if lane.is_send { self.frames_begun % u64::from(FRAMES_MAX) } else { PLACES - 1 };
        (PLACES * u64::from(lane.peer) + place) * self.frame_bytes
    }

    fn place(&self, lane: LaneKey) -> FramePlace {
        FramePlace { frames: Arc::clone(&self.frames), offset: self.frame_offset(lane), bytes: self.frame_bytes }
    }

    /// A frame of so many bytes, or for one of so many at most.
    fn frame(&self, lane: LaneKey, bytes: u64, inline_puts: Vec<u64>) -> Option<LaneMessage> {
        let operand = Operand::in_region(&self.frames, self.frame_offset(lane), bytes)?;
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
    /// Lanes of a communicator of so many ranks, none yet.
    pub(crate) fn new(nranks: u32) -> Self {
        PortLanes { lanes: BTreeMap::new(), frame_bytes: PutFrame::longest(nranks) }
    }

    /// Whether a put's bytes travel in a frame.
    pub(crate) fn is_inline(&self, put_bytes: u64) -> bool {
        PutFrame::has_put(self.frame_bytes, put_bytes)
    }

    fn lane(&mut self, key: LaneKey, frames: &Arc<Region>) -> &mut Lane {
        self.lanes.entry(key).or_insert_with(|| Lane {
            frames: Arc::clone(frames),
            frame_bytes: self.frame_bytes,
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
        let bytes = self.frame_bytes;
        self.lane(key, frames).frame(key, bytes, Vec::new())
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

    /// Place of the next frame of a free lane.
    pub(crate) fn place(&self, key: LaneKey) -> Option<FramePlace> {
        Some(self.lanes.get(&key)?.place(key))
    }

    /// Sends a frame by a free lane, of so many bytes in its place, and then the bytes of its last put, if that is long. Returns the messages.
    pub(crate) fn send(
        &mut self,
        key: LaneKey,
        frame_bytes: u64,
        inline_puts: Vec<u64>,
        then: Option<(LongPut, Operand)>,
    ) -> Vec<LaneMessage> {
        let Some(lane) = self.lanes.get_mut(&key) else { return Vec::new() };
        let Some(message) = lane.frame(key, frame_bytes, inline_puts) else { return Vec::new() };
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
        Some(Received::Frame(lane.place(key)))
    }

    /// Place of the next message: the bytes of a long put, or else another frame.
    pub(crate) fn receive(&mut self, key: LaneKey, data: Option<(PutHeader, Operand)>) -> Option<LaneMessage> {
        let lane = self.lanes.get_mut(&key)?;
        match data {
            Some((header, operand)) => {
                lane.receives = Some(header);
                Some(data_message(key, operand, None))
            }
            None => lane.frame(key, lane.frame_bytes, Vec::new()),
        }
    }

    /// Gives up what waits. Lanes stay until what runs has ended.
    pub(crate) fn clear(&mut self) {
        for lane in self.lanes.values_mut() {
            (lane.waiting, lane.receives) = (VecDeque::new(), None);
        }
    }
}
