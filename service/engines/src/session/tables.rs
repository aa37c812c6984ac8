//! Tables of a session: handles of regions, streams, communicators.

use std::sync::Arc;

use mccs_device::Operand;
use mccs_device::cuda::{GpuRegion, GpuTwin, Segment};
use mccs_ipc::command::BufferRef;
use mccs_ipc::protocol::Role;
use mccs_ipc::types::{Handle, UniqueId};
use mccs_model::handles::HandleTable;
use mccs_registry::CommInfo;
use mccs_tenants::regions::Region;
use mccs_tenants::{Charge, Quota};

use super::Place;

/// A stream, as far as its commands are checked.
#[derive(Debug)]
pub(super) struct StreamSlot {
    pub(super) next_ticket: u64,
    /// Operations of the group that has not been closed.
    pub(super) group_length: u64,
    /// Whether its collectives run beside each other.
    pub(super) overlaps: bool,
}

/// A communicator of this session.
pub(super) enum CommSlot {
    /// Others are missing.
    Joining(Seat),
    /// Usable; `comm` is the proxy engine's name for it.
    Ready {
        comm: Handle,
        /// Which proxy engine that is.
        place: Place,
        rank: u32,
        info: Arc<CommInfo>,
        /// Rounds of the shared-memory exchange that the rank has begun.
        rounds: u64,
        seat: Seat,
    },
    /// The rank leaves when its operations have ended. Until then the tenant can only end them. `is_asked`: by the tenant, and not because the
    /// whole is left that it is a part of.
    Leaving { comm: Handle, place: Place, rank: u32, seat: Seat, is_asked: bool },
}

/// What a session's rank has joined as.
#[derive(Clone)]
pub(super) struct Seat {
    pub(super) role: Role,
    /// The communicator of this session that it is a part of.
    pub(super) whole: Option<Handle>,
    pub(super) id: UniqueId,
    pub(super) gpu: Option<usize>,
    pub(super) charge: Arc<Charge>,
    /// One for a region at most.
    pub(super) twins: Vec<SlotTwin>,
}

/// Memory of a GPU that stands for a part of a region.
#[derive(Clone)]
pub(super) struct SlotTwin {
    pub(super) memory: Arc<GpuTwin>,
    pub(super) region: Handle,
    /// Whose messages it is for; a rail's is for collectives.
    pub(super) peer: Option<u32>,
    /// Where the part begins in the region.
    pub(super) offset_bytes: u64,
}

impl Seat {
    /// The twin of a region.
    pub(super) fn twin(&self, region: Handle) -> Option<&SlotTwin> {
        self.twins.iter().find(|twin| twin.region == region)
    }
}

impl SlotTwin {
    /// An operand in the twin that was found in the region that a command names; `None` where the twin has not all of it.
    pub(super) fn place(&self, operand: Operand, buffer: &BufferRef) -> Option<Operand> {
        if operand.bytes() == 0 {
            return Some(operand);
        }
        let offset = buffer.offset_bytes.checked_sub(self.offset_bytes).filter(|_| buffer.region == self.region)?;
        operand.in_twin(&self.memory, offset)
    }
}

impl CommSlot {
    /// What its rank has joined as, to be changed.
    pub(super) fn seat_mut(&mut self) -> &mut Seat {
        match self {
            CommSlot::Joining(seat) | CommSlot::Ready { seat, .. } | CommSlot::Leaving { seat, .. } => seat,
        }
    }

    pub(super) fn seat(&self) -> &Seat {
        match self {
            CommSlot::Joining(seat) | CommSlot::Ready { seat, .. } | CommSlot::Leaving { seat, .. } => seat,
        }
    }
}

/// All handles of a session.
pub(super) struct Tables {
    pub(super) regions: HandleTable<Arc<Region>>,
    pub(super) gpu_regions: HandleTable<Arc<GpuRegion>>,
    /// Segments for the next region of a GPU's.
    pub(super) gpu_segments: Vec<Segment>,
    pub(super) streams: HandleTable<StreamSlot>,
    pub(super) comms: HandleTable<CommSlot>,
}

impl Tables {
    pub(super) fn new(quota: &Quota, streams: u32) -> Self {
        Tables {
            regions: HandleTable::new(quota.regions),
            gpu_regions: HandleTable::new(quota.regions),
            gpu_segments: Vec::new(),
            streams: HandleTable::new(streams),
            comms: HandleTable::new(u32::try_from(quota.ranks_of_session()).unwrap_or(u32::MAX)),
        }
    }
}
