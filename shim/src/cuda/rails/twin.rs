//! Twins of rails' slots: GPU memory that NICs read and write in their place (GPUDirect).
//!
//! Where NICs reach memory of the GPU the service makes it (`host_staged/twin.rs`): then rails move what is there. Otherwise it is this library's own,
//! and copy engines bring it to the slots and back (`moving.rs`).

use mccs_cuda::{Context, DeviceAddress, DeviceMemory, MappedMemory};
use mccs_ipc::types::Handle;

use crate::cuda::cuda_error;
use crate::cuda::host_staged::ordered_stream::OrderedStream;
use crate::cuda::host_staged::twin;
use crate::log::{LogLevel, log};
use crate::{Client, Error};

/// See the module's documentation.
pub(super) enum Twin {
    /// NICs reach it.
    Direct(MappedMemory),
    Bounced(DeviceMemory),
}

impl Twin {
    /// Of a rail whose slots have so many bytes together.
    pub(super) fn new(
        client: &Client,
        context: &Context,
        (rail, number): (Handle, u32),
        ordered: &OrderedStream,
        bytes: u64,
    ) -> Result<Self, Error> {
        match twin::ask(client, context, (rail, None), ordered, bytes)? {
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
