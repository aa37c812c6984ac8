//! Twins of rails' slots: GPU memory that NICs read and write in their place (GPUDirect).
//!
//! If NICs reach memory of the GPU the service makes it (`host_staged/twin.rs`): then rails move what is there. Otherwise it is this
//! library's own, and copy engines bring it to the slots and back (`moving.rs`).

use mccs_cuda::{Context, DeviceAddress, DeviceMemory, MappedMemory};

use crate::cuda::cuda_error;
use crate::cuda::host_staged::ordered_stream::OrderedStream;
use crate::cuda::host_staged::twin::{self, Owner};
use crate::log::{LogLevel, log};
use crate::{Communicator, Error};

/// See the module's documentation.
pub(super) enum Twin {
    /// NICs reach it.
    Direct(MappedMemory),
    Bounced(DeviceMemory),
}

impl Twin {
    /// Makes the twin of the rail with this number, whose slots have so many bytes together.
    pub(super) fn new(
        rail: &Communicator,
        context: &Context,
        number: u32,
        ordered: &OrderedStream,
        bytes: u64,
    ) -> Result<Self, Error> {
        let of = Owner { comm: rail.handle(), peer: None };
        match twin::ask(rail.client(), context, of, ordered, bytes)? {
            Ok(memory) => Ok(Twin::Direct(memory)),
            Err(reason) => {
                log(LogLevel::Info, || format!("rail {number} goes through memory of the host: {reason}"));
                DeviceMemory::new(context, bytes as usize).map(Twin::Bounced).map_err(cuda_error)
            }
        }
    }

    /// Whether NICs reach it.
    pub(super) fn is_direct(&self) -> bool {
        matches!(self, Twin::Direct(_))
    }

    /// First byte.
    pub(super) fn address(&self) -> DeviceAddress {
        match self {
            Twin::Direct(memory) => memory.address(),
            Twin::Bounced(memory) => memory.address(),
        }
    }
}
