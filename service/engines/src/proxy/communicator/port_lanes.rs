//! Lanes of port channels: messages between a rank here and one of another host, one at a time in
//! each direction.
//!
//! ```text
//! sender:    header --> data, if there are any --> next connection's header
//! receiver:  listens: header --> checks --> data --> signal --> listens
//! ```
//!
//! The receiver's service alone knows its memories, so it is the one that checks where a put goes.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use mccs_device::Operand;
use mccs_model::PutHeader;
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
    /// Whether it is a header.
    pub(crate) is_header: bool,
}

/// What a connection sends.
pub(crate) struct Sending {
    pub(crate) connection: u32,
    pub(crate) header: PutHeader,
    /// Of the put, if there is one.
    pub(crate) data: Option<Operand>,
}

/// What has come by a lane.
pub(crate) enum Received {
    /// A header: of a put whose data follow, or of a signal alone.
    Header(PutHeader),
    /// The data of the header before.
    Data(PutHeader),
}

struct Lane {
    /// The rank's place for headers.
    headers: Arc<Region>,
    /// Connections that wait for the lane.
    waiting: VecDeque<Sending>,
    /// Connection that sends, with what follows its header.
    sends: Option<(u32, Option<Operand>)>,
    /// Header whose data are awaited.
    receives: Option<PutHeader>,
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct PortLanes {
    lanes: BTreeMap<LaneKey, Lane>,
}

/// Bytes of the places for headers of a rank, of which there is one for each lane with one of so many ranks.
pub(crate) fn headers_bytes(nranks: u32) -> u64 {
    2 * u64::from(nranks) * PutHeader::BYTES as u64
}

/// Where the header of a lane is.
fn header_offset(lane: LaneKey) -> u64 {
    (2 * u64::from(lane.peer) + u64::from(lane.is_send)) * PutHeader::BYTES as u64
}

impl Lane {
    fn header(&self, lane: LaneKey) -> Option<LaneMessage> {
        let operand = Operand::in_region(&self.headers, header_offset(lane), PutHeader::BYTES as u64)?;
        Some(LaneMessage { lane, operand, is_header: true })
    }

    /// Begins with a connection's message, whose header is written.
    fn begin(&mut self, lane: LaneKey, sending: Sending) -> Option<LaneMessage> {
        self.headers.copy_in(header_offset(lane), &sending.header.encode());
        self.sends = Some((sending.connection, sending.data));
        self.header(lane)
    }
}

impl PortLanes {
    fn lane(&mut self, key: LaneKey, headers: &Arc<Region>) -> &mut Lane {
        self.lanes.entry(key).or_insert_with(|| Lane {
            headers: Arc::clone(headers),
            waiting: VecDeque::new(),
            sends: None,
            receives: None,
        })
    }

    /// A rank waits for what a peer sends from now on: returns where the first header goes, unless it waits already.
    pub(crate) fn listen(&mut self, rank: u32, peer: u32, headers: &Arc<Region>) -> Option<LaneMessage> {
        let key = LaneKey { rank, peer, is_send: false };
        if self.lanes.contains_key(&key) {
            return None;
        }
        self.lane(key, headers).header(key)
    }

    /// Has a connection of a rank send. Returns the first message, if the lane is free; otherwise it follows what is under way.
    pub(crate) fn send(
        &mut self,
        rank: u32,
        peer: u32,
        headers: &Arc<Region>,
        sending: Sending,
    ) -> Option<LaneMessage> {
        let key = LaneKey { rank, peer, is_send: true };
        let lane = self.lane(key, headers);
        if lane.sends.is_some() {
            lane.waiting.push_back(sending);
            return None;
        }
        lane.begin(key, sending)
    }

    /// A message has been sent. Returns the next one, and the connection whose turn has ended.
    pub(crate) fn sent(&mut self, key: LaneKey) -> (Option<LaneMessage>, Option<u32>) {
        let Some(lane) = self.lanes.get_mut(&key) else { return (None, None) };
        let Some((connection, data)) = &mut lane.sends else { return (None, None) };
        if let Some(operand) = data.take() {
            return (Some(LaneMessage { lane: key, operand, is_header: false }), None);
        }
        let ended = *connection;
        lane.sends = None;
        let next = lane.waiting.pop_front();
        (next.and_then(|sending| lane.begin(key, sending)), Some(ended))
    }

    /// A message has come.
    pub(crate) fn received(&mut self, key: LaneKey) -> Option<Received> {
        let lane = self.lanes.get_mut(&key)?;
        if let Some(header) = lane.receives.take() {
            return Some(Received::Data(header));
        }
        let mut bytes = [0; PutHeader::BYTES];
        lane.headers.copy_out(header_offset(key), &mut bytes);
        Some(Received::Header(PutHeader::decode(&bytes)))
    }

    /// Where the next message goes: the data of a header, or else another header.
    pub(crate) fn receive(&mut self, key: LaneKey, data: Option<(PutHeader, Operand)>) -> Option<LaneMessage> {
        let lane = self.lanes.get_mut(&key)?;
        match data {
            Some((header, operand)) => {
                lane.receives = Some(header);
                Some(LaneMessage { lane: key, operand, is_header: false })
            }
            None => lane.header(key),
        }
    }

    /// Gives up what waits. Lanes stay until what runs has ended.
    pub(crate) fn clear(&mut self) {
        for lane in self.lanes.values_mut() {
            (lane.waiting, lane.sends, lane.receives) = (VecDeque::new(), None, None);
        }
    }
}
