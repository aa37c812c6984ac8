//! Twins of host-staged slots: GPU memory that the service has made and NICs reach in their place
//! (GPUDirect).

use std::os::fd::{AsFd, BorrowedFd};

use mccs_cuda::{Allocation, Context, DriverError, MappedMemory};
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::types::Handle;

use super::ordered_stream::OrderedStream;
use crate::client::unexpected;
use crate::{Client, Error};

/// Owner of slots that have a twin.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Owner {
    /// A rail, or the communicator of messages.
    pub(in crate::cuda) comm: Handle,
    /// With whom messages are.
    pub(in crate::cuda) peer: Option<u32>,
}

/// Asks for the twin of slots, which have so many bytes together. `Err(_)` inside: why data goes through
/// memory of the host.
///
/// # Errors
/// The service has gone.
pub(in crate::cuda) fn ask(
    client: &Client,
    context: &Context,
    Owner { comm, peer }: Owner,
    slots: &OrderedStream,
    bytes: u64,
) -> Result<Result<MappedMemory, String>, Error> {
    let (region, offset_bytes) = slots.slots();
    let request = Request::MakeTwin { comm, region, offset_bytes, bytes, peer };
    match client.0.requests.call(request, &[]) {
        Ok((Response::Twin { bytes: room }, fds)) => {
            let Some(fd) = fds.first().filter(|_| room >= bytes) else {
                return Err(Error::ServiceGone("it sent a twin without memory".into()));
            };
            // If it cannot be opened the service's is left unused.
            Ok(open(context, fd.as_fd(), room).map_err(|error| error.to_string()))
        }
        Ok((other, _)) => Err(unexpected(&other)),
        Err(Error::Refused { message, .. }) => Ok(Err(message)),
        Err(error) => Err(error),
    }
}

fn open(context: &Context, fd: BorrowedFd<'_>, bytes: u64) -> Result<MappedMemory, DriverError> {
    let allocation = Allocation::import(fd)?;
    let mut memory = MappedMemory::reserve(context, bytes as usize)?;
    memory.map(&allocation, bytes as usize)?;
    memory.open()?;
    Ok(memory)
}
