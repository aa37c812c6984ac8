//! Seat of a session's rank, with the GPU memory that stands for its regions.

use std::sync::Arc;

use mccs_device::Operand;
use mccs_device::cuda::GpuTwin;
use mccs_ipc::command::BufferRef;
use mccs_ipc::protocol::Role;
use mccs_ipc::types::{ErrorClass, Handle, UniqueId};
use mccs_model::SetupError;
use mccs_tenants::Charge;

/// Seat of a session's rank.
#[derive(Clone)]
pub(crate) struct Seat {
    pub(crate) role: Role,
    /// The communicator of this session that it is a part of.
    pub(crate) whole: Option<Handle>,
    pub(crate) id: UniqueId,
    pub(crate) gpu: Option<usize>,
    pub(crate) charge: Arc<Charge>,
    /// One for a region at most.
    pub(crate) twins: Vec<SlotTwin>,
}

/// Memory of a GPU that stands for a part of a region.
#[derive(Clone)]
pub(crate) struct SlotTwin {
    pub(crate) memory: Arc<GpuTwin>,
    pub(crate) region: Handle,
    /// Peer whose messages it is for; a rail's is for collectives.
    pub(crate) peer: Option<u32>,
    /// Offset of the part in the region.
    pub(crate) offset_bytes: u64,
}

impl Seat {
    /// The twin of a region.
    pub(crate) fn twin(&self, region: Handle) -> Option<&SlotTwin> {
        self.twins.iter().find(|twin| twin.region == region)
    }

    /// Whether it takes a twin of a region: a rail has one, messages have one for each region.
    pub(crate) fn check_has_room(&self, peer: Option<u32>, region: Handle) -> Result<(), SetupError> {
        let is_taken = match peer {
            None => !self.twins.is_empty(),
            Some(_) => self.twin(region).is_some(),
        };
        let taken = || SetupError { class: ErrorClass::InvalidUsage, message: "there is a twin already".into() };
        if is_taken { Err(taken()) } else { Ok(()) }
    }
}

impl SlotTwin {
    /// An operand in the twin that was found in the region that a command names; `None` where the twin has not all of it.
    pub(crate) fn place(&self, operand: Operand, buffer: &BufferRef) -> Option<Operand> {
        if operand.bytes() == 0 {
            return Some(operand);
        }
        let offset = buffer.offset_bytes.checked_sub(self.offset_bytes).filter(|_| buffer.region == self.region)?;
        operand.in_twin(&self.memory, offset)
    }
}
