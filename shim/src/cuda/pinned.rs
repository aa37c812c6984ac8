//! Short collectives of one host's GPUs without peer access: their kernels meet in pinned host
//! memory.
//!
//! The LL protocol needs no more of its memory than that halves of its packets come whole, and that their receiver sees them. Both hold over
//! PCIe. So the kernels are those of GPUs that reach each other, in symmetric buffers which each process pins for its GPU.

use mccs_cuda::Context;
use mccs_ipc::protocol::{Request, Response, Role};
use mccs_ipc::types::UniqueId;

use super::CudaStream;
use super::call::Call;
use super::device_initiated::DeviceInitiatedCommunicator;
use super::service_executed::Identity;
use crate::client::unexpected;
use crate::{Client, Error};

/// Mask that tells its id from those that callers have made, which are random, and from those of other parts.
const ID_MASK: u8 = 0x96;

/// See the module's documentation.
pub(super) struct Pinned {
    comm: DeviceInitiatedCommunicator,
    to_bytes: u64,
}

impl Pinned {
    /// Joins the part of a whole's ranks that carries out payloads up to `to_bytes`; none where that is 0, as for all ranks.
    pub(super) fn join(
        client: &Client,
        identity: &Identity,
        context: &Context,
        to_bytes: u64,
    ) -> Result<Option<Self>, Error> {
        if to_bytes == 0 {
            return Ok(None);
        }
        let Identity { rank, nranks, gpu, whole, .. } = *identity;
        let id = UniqueId(identity.id.0.map(|byte| byte ^ ID_MASK));
        let (role, options) = (Role::Pinned { whole }, identity.options.clone());
        let request =
            Request::InitRank { id, rank, nranks, gpu: Some(gpu), root_address: String::new(), role, options };
        match client.0.requests.call(request, &[])? {
            (Response::Comm { comm, device_initiated: Some(share), .. }, fds) => {
                let context = context.clone();
                let comm = DeviceInitiatedCommunicator::join(client, comm, rank, nranks, context, &share, &fds)?;
                Ok(Some(Pinned { comm, to_bytes }))
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// The longest payload that goes here, in bytes.
    pub(super) fn payload_max(&self) -> u64 {
        self.to_bytes
    }

    /// Whether a collective goes here: the same on all ranks.
    pub(super) fn take(&self, call: &Call) -> bool {
        let payload = call.kind.payload_count(call.count, self.comm.nranks());
        payload.saturating_mul(call.dtype.size_bytes() as u64) <= self.to_bytes
    }

    /// Enqueues a collective.
    ///
    /// # Safety
    /// As for [`super::CudaCommunicator::all_reduce`].
    pub(super) unsafe fn collective(&self, call: &Call, stream: CudaStream) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe { self.comm.collective(call, stream) }
    }

    pub(super) fn has_graphs(&self) -> bool {
        self.comm.has_graphs()
    }

    pub(super) fn async_error(&self) -> Option<Error> {
        self.comm.async_error()
    }

    pub(super) fn abort(&self) -> Result<(), Error> {
        self.comm.abort()
    }

    /// Leaves when this rank's operations have ended.
    pub(super) fn leave(&self) -> Result<(), Error> {
        self.comm.leave()
    }
}
