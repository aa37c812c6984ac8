//! Requests of ranks to their port channels, and batches of triggers, with the memory that they
//! name.

use std::sync::Arc;

use mccs_device::Operand;
use mccs_device::cuda::{GpuOperand, GpuRegion};
use mccs_ipc::port_channels::{ConnectionWords, ENDED, KernelWords, PortChannelSegment, PutMemories, Trigger};
use mccs_ipc::sync::StreamWord;
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
    /// The request.
    pub kind: ChannelOrderKind,
    /// The request to answer, and where.
    pub reply: Option<(u64, Sender<ProxyReply>)>,
}

/// A rank's request: as [`PortChannelRequest`](mccs_ipc::port_channels::PortChannelRequest), validated as far as its session can.
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
    OpenChannel { connection: u32, memories: Option<PutMemories> },
    /// It ends one.
    CloseChannel { channel: u32 },
}

/// Writers of a rank's FIFO.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// Threads of its process.
    Threads,
    /// Kernels on its GPU.
    Kernels,
}

/// Triggers of a rank, one behind the other.
pub struct TriggerBatch {
    /// Session whose operations in flight they count among.
    pub session: Arc<Session>,
    /// Communicator as the proxy names it.
    pub comm: Handle,
    /// The rank.
    pub rank: u32,
    /// Their writer.
    pub writer: Writer,
    /// Position of the first in that FIFO of the rank's.
    pub first: u64,
    /// As the rank has written them.
    pub triggers: Vec<Trigger>,
}

/// A rank's segment, with what its tenant is charged for it.
pub struct OpenedSegment {
    pub(crate) session: Arc<Session>,
    pub(crate) segment: PortChannelSegment,
    /// GPU of its memory, as the device counts GPUs; none for memory of the host.
    pub(crate) gpu: Option<usize>,
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
        gpu: Option<usize>,
        frames: Option<Arc<Region>>,
        charge: Charge,
    ) -> Self {
        OpenedSegment { session, segment, gpu, frames, _charge: charge }
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

    /// Says at a connection's words that nothing is flushed any more.
    pub(crate) fn end_flushed(&self, connection: u32) {
        for writer in [Writer::Threads, Writer::Kernels] {
            if let Some(word) = self.flushed(connection, writer) {
                word.publish(ENDED | word.load());
            }
        }
    }

    /// The word in which flushes of a connection are told to those who write a FIFO.
    pub(crate) fn flushed(&self, connection: u32, writer: Writer) -> Option<&StreamWord> {
        match writer {
            Writer::Threads => self.segment.words(connection).map(ConnectionWords::flushed),
            Writer::Kernels => self.segment.kernel_words(connection).map(KernelWords::flushed),
        }
    }

    /// Whether somebody waits for a connection's next signal, which comes behind `arrived` others.
    pub(crate) fn is_awaited(&self, connection: u32, arrived: u64) -> bool {
        let by_threads = self.segment.words(connection).is_some_and(|words| words.arrived().has_waiters());
        by_threads || self.segment.kernel_words(connection).is_some_and(|words| words.awaited() > arrived)
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
    region: ChannelRegion,
    /// The region, as its session names it.
    pub(crate) name: Handle,
    offset_bytes: u64,
    pub(crate) bytes: u64,
}

/// Region that keeps a memory mapped.
pub enum ChannelRegion {
    /// Memory of the host.
    Host(Arc<Region>),
    /// Memory of GPUs, which is open in the contexts of all ranks that may copy.
    Gpu(Arc<GpuRegion>),
}

/// Source and destination of a put.
pub(crate) enum PutEnds {
    Host { from: Operand, to: Operand },
    Gpu { from: GpuOperand, to: GpuOperand },
}

impl ChannelMemory {
    /// A range, which has been found to lie in its region.
    #[must_use]
    pub fn new(region: ChannelRegion, name: Handle, offset_bytes: u64, bytes: u64) -> Self {
        ChannelMemory { region, name, offset_bytes, bytes }
    }

    /// Copies bytes to a place in it; `false` where it has not all of that, or is no memory of the host.
    pub(crate) fn copy_in(&self, offset_bytes: u64, bytes: &[u8]) -> bool {
        let (ChannelRegion::Host(region), Some(at)) = (&self.region, self.place(offset_bytes, bytes.len() as u64))
        else {
            return false;
        };
        region.copy_in(at, bytes);
        true
    }

    /// Copies bytes from a place in it; `false` where it has not all of that, or is no memory of the host.
    pub(crate) fn copy_out(&self, offset_bytes: u64, bytes: &mut [u8]) -> bool {
        let (ChannelRegion::Host(region), Some(at)) = (&self.region, self.place(offset_bytes, bytes.len() as u64))
        else {
            return false;
        };
        region.copy_out(at, bytes);
        true
    }

    /// Place of a part of it in the region; `None` if it has not all of that.
    pub(crate) fn place(&self, offset_bytes: u64, bytes: u64) -> Option<u64> {
        let end = offset_bytes.checked_add(bytes)?;
        self.offset_bytes.checked_add(offset_bytes).filter(|_| end <= self.bytes)
    }

    /// A part of it, in memory of the host; `None` where it has not all of that.
    pub(crate) fn part(&self, offset_bytes: u64, bytes: u64) -> Option<Operand> {
        let ChannelRegion::Host(region) = &self.region else { return None };
        Operand::in_region(region, self.place(offset_bytes, bytes)?, bytes)
    }

    /// The ends of a put of so many bytes from here, at places in the regions.
    pub(crate) fn put_into(&self, from: u64, into: &ChannelMemory, to: u64, bytes: u64) -> Option<PutEnds> {
        match (&self.region, &into.region) {
            (ChannelRegion::Host(own), ChannelRegion::Host(theirs)) => Some(PutEnds::Host {
                from: Operand::in_region(own, from, bytes)?,
                to: Operand::in_region(theirs, to, bytes)?,
            }),
            (ChannelRegion::Gpu(own), ChannelRegion::Gpu(theirs)) => {
                let operand = |region: &Arc<GpuRegion>, offset_bytes| {
                    let is_inside = region.contains(offset_bytes, bytes);
                    is_inside.then(|| GpuOperand { region: Arc::clone(region), offset_bytes })
                };
                Some(PutEnds::Gpu { from: operand(own, from)?, to: operand(theirs, to)? })
            }
            _ => None,
        }
    }
}

impl PutEnds {
    /// Whether a put of so many bytes writes over what it reads, as far as that can be told.
    pub(crate) fn overlap(&self, bytes: u64) -> bool {
        match self {
            PutEnds::Host { from, to } => (from.ptr() as u64).abs_diff(to.ptr() as u64) < bytes,
            PutEnds::Gpu { from, to } => {
                Arc::ptr_eq(&from.region, &to.region) && from.offset_bytes.abs_diff(to.offset_bytes) < bytes
            }
        }
    }
}
