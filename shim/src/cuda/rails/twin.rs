//! Memory of the GPU that stands for the slots of a rail, byte by byte: its *twin*.
//!
//! The service makes it where NICs reach memory of the GPU (GPUDirect): then rails move what is there. Otherwise it is this library's own, and copy
//! engines bring it to the slots and back (`bounce.rs`).

use std::os::fd::AsFd;

use mccs_cuda::{Allocation, Context, DeviceAddress, DeviceMemory, DriverError, MappedMemory};
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::types::Handle;

use crate::client::unexpected;
use crate::cuda::cuda_error;
use crate::cuda::host_staged::ordered_stream::OrderedStream;
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
        let (region, offset_bytes) = ordered.slots();
        let request = Request::MakeTwin { comm: rail, region, offset_bytes, bytes };
        let by_host = |reason: &dyn std::fmt::Display| {
            log(LogLevel::Info, || format!("rail {number} goes through memory of the host: {reason}"));
            DeviceMemory::new(context, bytes as usize).map(Twin::Bounced).map_err(cuda_error)
        };
        match client.0.requests.call(request, &[]) {
            Ok((Response::Twin { bytes: room }, fds)) => {
                let Some(fd) = fds.first().filter(|_| room >= bytes) else {
                    return Err(Error::ServiceGone("it sent a twin without memory".into()));
                };
                // The service's is left unused.
                open(context, fd.as_fd(), room).map_or_else(|error| by_host(&error), |memory| Ok(Twin::Direct(memory)))
            }
            Ok((other, _)) => Err(unexpected(&other)),
            Err(Error::Refused { message, .. }) => by_host(&message),
            Err(error) => Err(error),
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

fn open(context: &Context, fd: std::os::fd::BorrowedFd<'_>, bytes: u64) -> Result<MappedMemory, DriverError> {
    let allocation = Allocation::import(fd)?;
    let mut memory = MappedMemory::reserve(context, bytes as usize)?;
    memory.map(&allocation, bytes as usize)?;
    memory.open()?;
    Ok(memory)
}
