//! Calls that devices are given to run: collectives and messages, with their buffers.

use std::sync::Arc;

use mccs_collective::Schedule;
use mccs_ipc::types::{DataType, Handle, RedOp};
use mccs_runtime::Share;
use mccs_tenants::regions::Region;

use super::cuda::{CopyEngines, GpuOperand, GpuTwin};

/// A validated range of a tenant's memory, or none. It keeps the range mapped.
#[derive(Clone)]
pub struct Operand {
    /// First byte; dangling where `bytes` is 0.
    ptr: *mut u8,
    bytes: u64,
    /// Keeps the range mapped; `None` where whoever made the operand does.
    region: Option<Arc<Region>>,
    /// Place of the data, if it is in a GPU's memory.
    twin: Option<TwinPlace>,
}

/// A place in memory that stands for a range of a region.
#[derive(Debug, Clone)]
pub struct TwinPlace {
    /// The memory, which this keeps.
    pub twin: Arc<GpuTwin>,
    /// First byte.
    pub offset: u64,
}

// SAFETY: `ptr` points into `region`, which the operand keeps mapped, on whichever thread it is used, or to memory that the
// caller of `from_raw` vouches for. It may be shared with the tenant's process, and is only ever accessed through raw pointers.
unsafe impl Send for Operand {}
// SAFETY: as above; a shared operand hands out the same raw pointer.
unsafe impl Sync for Operand {}

impl Operand {
    /// No buffer.
    pub const NONE: Operand = Operand { ptr: std::ptr::dangling_mut(), bytes: 0, region: None, twin: None };

    /// A range of a region, or `None` where it leaves the region.
    #[must_use]
    pub fn in_region(region: &Arc<Region>, offset_bytes: u64, bytes: u64) -> Option<Self> {
        let ptr = region.range(offset_bytes, bytes)?;
        Some(Operand { ptr, bytes, region: Some(Arc::clone(region)), twin: None })
    }

    /// The same range in the twin of its region, or `None` where that has not all of it.
    #[must_use]
    pub fn in_twin(self, twin: &Arc<GpuTwin>, offset: u64) -> Option<Self> {
        let is_inside = offset.checked_add(self.bytes)? <= twin.len_bytes();
        is_inside.then(|| Operand { twin: Some(TwinPlace { twin: Arc::clone(twin), offset }), ..self })
    }

    /// Place of its data, if that is a GPU's memory. The range of the region is then there to copy it to.
    #[must_use]
    pub fn twin(&self) -> Option<&TwinPlace> {
        self.twin.as_ref()
    }

    /// A range in no region: of a test.
    ///
    /// # Safety
    /// `bytes` from `ptr` on are mapped, and may be read and written, until all that the operand was given to has ended.
    #[must_use]
    pub unsafe fn from_raw(ptr: *mut u8, bytes: u64) -> Self {
        Operand { ptr, bytes, region: None, twin: None }
    }

    /// First byte; dangling where there are none.
    #[must_use]
    pub fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Length.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The region that it is in.
    #[must_use]
    pub fn region(&self) -> Option<&Arc<Region>> {
        self.region.as_ref()
    }
}

/// A rank's buffers, by where they are.
pub enum Buffers {
    /// Host memory, which the service maps.
    Host {
        /// Source.
        send: Operand,
        /// Destination.
        recv: Operand,
    },
    /// Memory of the rank's GPU.
    Gpu(Box<GpuBuffers>),
}

/// Buffers of a rank on a GPU. The service takes operations on these only with the copy engines that are to carry them out.
pub struct GpuBuffers {
    /// The communicator's.
    pub copy_engines: Arc<CopyEngines>,
    /// Source.
    pub send: Option<GpuOperand>,
    /// Destination.
    pub recv: Option<GpuOperand>,
}

impl Buffers {
    /// No buffers.
    pub const NONE: Buffers = Buffers::Host { send: Operand::NONE, recv: Operand::NONE };

    /// Bytes of host memory: what the service's processors touch.
    #[must_use]
    pub fn host_bytes(&self) -> u64 {
        let on_host = |operand: &Operand| if operand.twin.is_some() { 0 } else { operand.bytes };
        match self {
            Buffers::Host { send, recv } => on_host(send).saturating_add(on_host(recv)),
            Buffers::Gpu(_) => 0,
        }
    }
}

/// One rank's part of a collective.
#[derive(Clone, Copy)]
pub struct RankCall<'a> {
    /// The rank.
    pub rank: u32,
    /// Its buffers, as long as the collective's rule says.
    pub buffers: &'a Buffers,
    /// The scalar of a pre-multiplied sum, as it is now.
    pub scalar_bits: u64,
}

/// The parts of this host's ranks in a collective, ascending: whoever holds the operations need not copy them together.
pub trait RankCalls {
    /// How many there are.
    fn count(&self) -> usize;

    /// One of them; `index` is below [`RankCalls::count`].
    fn call(&self, index: usize) -> RankCall<'_>;
}

impl<'a> dyn RankCalls + 'a {
    /// All of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = RankCall<'_>> {
        (0..self.count()).map(|index| self.call(index))
    }
}

/// A collective, or this host's part of it, that all ranks have called alike.
pub struct Collective<'a> {
    /// Its communicator, for failures.
    pub comm: Handle,
    /// Its steps.
    pub schedule: &'a Arc<Schedule>,
    /// Element type.
    pub dtype: DataType,
    /// How elements are combined; a sum where none are.
    pub redop: RedOp,
    /// Its owner.
    pub share: Share,
    /// The ranks of this host.
    pub ranks: &'a dyn RankCalls,
    /// Whether there are ranks of other hosts.
    pub spans_hosts: bool,
}

impl Collective<'_> {
    /// Buffers in host memory, of each rank that has them there.
    pub(crate) fn host_operands(&self) -> impl Iterator<Item = [&Operand; 2]> {
        self.ranks.iter().filter_map(|call| match call.buffers {
            Buffers::Host { send, recv } => Some([send, recv]),
            Buffers::Gpu(_) => None,
        })
    }
}

/// A send or receive whose peer is on another host.
pub struct RemoteMessage<'a> {
    /// The rank that sends.
    pub src: u32,
    /// The rank that receives.
    pub dst: u32,
    /// Among the messages between these.
    pub track: u32,
    /// This host's: one of the two.
    pub rank: u32,
    /// The operand that is sent, or received into.
    pub operand: &'a Operand,
}
