//! What ranks ask of their port channels: requests and batches of triggers, with the memory that
//! they name.

use std::sync::Arc;

use mccs_device::Operand;
use mccs_ipc::port_channels::{ENDED, PortChannelSegment, Trigger};
use mccs_ipc::types::Handle;
use mccs_runtime::Sender;
use mccs_tenants::Charge;
use mccs_tenants::regions::Region;
use mccs_tenants::session::Session;

use crate::proxy::calls::operation::ProxyReply;

/// A rank asks something of its port channels.
pub struct ChannelOrder {
    /// Communicator as the proxy names it.
    pub comm: Handle,
    /// The rank.
    pub rank: u32,
    /// What is asked.
    pub kind: ChannelOrderKind,
    /// The request to answer, and where.
    pub reply: Option<(u64, Sender<ProxyReply>)>,
}

/// What a rank asks: as [`PortChannelRequest`](mccs_ipc::port_channels::PortChannelRequest), validated as far as its session can.
pub enum ChannelOrderKind {
    /// Its segment is made.
    Open(Arc<OpenedSegment>),
    /// Peers may put into a range of memory, and it from there.
    Register(ChannelMemory),
    /// It takes a memory back.
    Free { memory: Handle },
    /// Its session's region goes, and with it the memories in it.
    ForgetRegion { region: Handle },
    /// It names a connection.
    Connect { peer: u32, tag: u32 },
    /// It makes a port channel.
    OpenChannel { connection: u32, memories: Option<(Handle, Handle)> },
    /// It ends one.
    CloseChannel { channel: u32 },
}

/// Triggers of a rank, one behind the other.
pub struct TriggerBatch {
    /// Whose they are, among whose operations in flight they count.
    pub session: Arc<Session>,
    /// Communicator as the proxy names it.
    pub comm: Handle,
    /// The rank.
    pub rank: u32,
    /// Position of the first in the rank's FIFO.
    pub first: u64,
    /// As the rank has written them.
    pub triggers: Vec<Trigger>,
}

/// A rank's segment, with what its tenant is charged for it.
pub struct OpenedSegment {
    pub(crate) session: Arc<Session>,
    pub(crate) segment: PortChannelSegment,
    /// Places for frames that go to and come from other hosts, if there are such.
    pub(crate) frames: Option<Arc<Region>>,
    _charge: Charge,
}

impl OpenedSegment {
    /// Takes charge of a segment.
    #[must_use]
    pub fn new(
        session: Arc<Session>,
        segment: PortChannelSegment,
        frames: Option<Arc<Region>>,
        charge: Charge,
    ) -> Self {
        OpenedSegment { session, segment, frames, _charge: charge }
    }

    /// Says at the words of all connections that nothing comes any more.
    pub(crate) fn end_all(&self) {
        for connection in 0..self.segment.layout().connections {
            self.end_flushed(connection);
            if let Some(words) = self.segment.words(connection) {
                words.arrived().publish(ENDED | words.arrived().load());
            }
        }
    }

    /// Says at a connection's word that nothing is flushed any more.
    pub(crate) fn end_flushed(&self, connection: u32) {
        if let Some(words) = self.segment.words(connection) {
            words.flushed().publish(ENDED | words.flushed().load());
        }
    }
}

impl Drop for OpenedSegment {
    fn drop(&mut self) {
        // The rank may keep the descriptor; the charge goes.
        self.segment.give_back();
    }
}

/// A range of a rank's region that port channels put from and into.
pub struct ChannelMemory {
    /// Keeps it mapped.
    region: Arc<Region>,
    /// The region, as its session names it.
    pub(crate) name: Handle,
    offset_bytes: u64,
    pub(crate) bytes: u64,
}

impl ChannelMemory {
    /// A range, which has been found to lie in its region.
    #[must_use]
    pub fn new(region: Arc<Region>, name: Handle, offset_bytes: u64, bytes: u64) -> Self {
        ChannelMemory { region, name, offset_bytes, bytes }
    }

    /// Copies bytes to a place in it; `false` where it has not all of that.
    pub(crate) fn copy_in(&self, offset_bytes: u64, bytes: &[u8]) -> bool {
        let at = self.place(offset_bytes, bytes.len() as u64);
        at.inspect(|at| self.region.copy_in(*at, bytes)).is_some()
    }

    /// Copies bytes from a place in it; `false` where it has not all of that.
    pub(crate) fn copy_out(&self, offset_bytes: u64, bytes: &mut [u8]) -> bool {
        let at = self.place(offset_bytes, bytes.len() as u64);
        at.inspect(|at| self.region.copy_out(*at, bytes)).is_some()
    }

    /// Where a part of it is in the region; `None` where it has not all of that.
    fn place(&self, offset_bytes: u64, bytes: u64) -> Option<u64> {
        let end = offset_bytes.checked_add(bytes)?;
        self.offset_bytes.checked_add(offset_bytes).filter(|_| end <= self.bytes)
    }

    /// A part of it; `None` where it has not all of that.
    pub(crate) fn part(&self, offset_bytes: u64, bytes: u64) -> Option<Operand> {
        Operand::in_region(&self.region, self.place(offset_bytes, bytes)?, bytes)
    }
}
