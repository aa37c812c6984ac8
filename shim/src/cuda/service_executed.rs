//! Communicators of GPUs whose collectives the service executes: short ones in host memory, long
//! ones by its copy engines and kernels. The latter where all ranks are on one host.
//!
//! To the service these are two communicators of one id. If ranks are on several hosts, there are others for what the GPUs combine
//! (`rails`). If GPUs of one host do not reach each other, there is one for what their kernels do in pinned memory (`pinned`). Which of
//! them a collective goes to follows from its payload, so that all ranks choose the same. They share nothing but the caller's streams.

use std::sync::Arc;

use mccs_cuda::{Context, RawStream};
use mccs_ipc::device_initiated::GpuUuid;
use mccs_ipc::large::{EnginesFrom, has_large};
use mccs_ipc::protocol::{HostRun, JoinOptions, Request, Response, Role};
use mccs_ipc::timeline_semaphore::SemaphoreAccess;
use mccs_ipc::types::{Handle, RedOp, UniqueId};
use mccs_rails::Forks;

use super::call::Call;
use super::device_initiated::DeviceInitiatedCommunicator;
use super::host_staged::HostStagedCommunicator;
use super::p2p::AnyP2p;
use super::pinned::Pinned;
use super::rails::Rails;
use super::{CudaStream, GpuMemory, cuda_error};
use crate::client::unexpected;
use crate::{Client, Error};

/// See the module's documentation.
pub(super) struct ServiceExecutedCommunicator {
    staged: HostStagedCommunicator,
    engines: Option<Engines>,
    rails: Option<Rails>,
    pinned: Option<Pinned>,
}

/// The service's engines, and the payload from which collectives go by them.
struct Engines {
    comm: DeviceInitiatedCommunicator,
    from: EnginesFrom,
}

/// As whom a rank joins: once for each communicator of the service's that is behind one of the caller's.
#[derive(Debug, Clone)]
pub(super) struct Identity {
    pub(super) id: UniqueId,
    pub(super) rank: u32,
    pub(super) nranks: u32,
    pub(super) gpu: GpuUuid,
    pub(super) root_address: String,
    pub(super) options: JoinOptions,
    /// The communicator that the others are parts of.
    pub(super) whole: Handle,
}

/// A rank that has joined, as the service named it.
pub(super) struct Joined {
    pub(super) identity: Identity,
    pub(super) access: SemaphoreAccess,
    pub(super) engines_from: Option<EnginesFrom>,
    pub(super) hosts: Vec<HostRun>,
    pub(super) rails_from: u64,
    pub(super) pinned_to: u64,
    pub(super) reduction_ring: Vec<u32>,
    /// Which calls by rails have several streams.
    pub(super) forks: Forks,
}

impl ServiceExecutedCommunicator {
    /// Makes what a rank needs that has joined.
    pub(super) fn new(client: &Client, joined: &Joined, context: Context) -> Result<Self, Error> {
        let Joined { identity, access, .. } = joined;
        let staged = HostStagedCommunicator::new(client.clone(), identity.clone(), context.clone(), *access)?;
        let rails = Rails::join(client, joined, &context, &staged);
        let pinned = || Pinned::join(client, identity, &context, joined.pinned_to);
        let engines = || joined.engines_from.map(|from| Engines::join(client, identity, context.clone(), from));
        match rails.and_then(|rails| Ok((rails, pinned()?, engines().transpose()?))) {
            Ok((rails, pinned, engines)) => {
                Ok(ServiceExecutedCommunicator { staged, engines: engines.flatten(), rails, pinned })
            }
            Err(error) => {
                // The others may have joined all.
                let _ = staged.abort();
                Err(error)
            }
        }
    }

    pub(super) fn rank(&self) -> u32 {
        self.staged.rank()
    }

    pub(super) fn nranks(&self) -> u32 {
        self.staged.nranks()
    }

    /// Those inside a host of several are its team's; others are the whole's.
    pub(super) fn p2p(&self) -> AnyP2p {
        match self.rails.as_ref().and_then(Rails::p2p) {
            Some(p2p) => AnyP2p::Rails(Arc::clone(p2p)),
            None => AnyP2p::HostStaged(Arc::clone(self.staged.p2p())),
        }
    }

    pub(super) fn client(&self) -> &Client {
        self.staged.client()
    }

    /// Enqueues a collective.
    ///
    /// # Safety
    /// As for [`super::CudaCommunicator::all_reduce`].
    pub(super) unsafe fn collective(&self, call: &Call, stream: CudaStream) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            // Copy engines are told once: graphs go another way.
            let is_captured = || RawStream::from_ptr(stream).is_capturing().map_err(cuda_error);
            match (&self.engines, &self.rails) {
                (Some(engines), _) if engines.take(call) && !is_captured()? => engines.comm.collective(call, stream),
                (_, Some(rails)) if rails.take(call) => {
                    let capture = if is_captured()? { RawStream::from_ptr(stream).capture() } else { Ok(None) };
                    if let Some(capture) = capture.map_err(cuda_error)? {
                        // Its parts' errors are asked for by the driver, which a capture may forbid.
                        return match self.staged.async_error() {
                            Some(error) => Err(error),
                            None => rails.capture(call, RawStream::from_ptr(stream), capture),
                        };
                    }
                    if let Some(error) = self.async_error() {
                        return Err(error);
                    }
                    rails.collective(call, RawStream::from_ptr(stream), |error| self.give_up(error))
                }
                _ => match &self.pinned {
                    // A failure of the whole, or of a part, is this part's too, and known without the driver, which a capture may forbid.
                    Some(pinned) if pinned.take(call) => match self.staged.async_error() {
                        Some(error) => Err(error),
                        None => pinned.collective(call, stream),
                    },
                    _ => self.staged.collective(call, stream),
                },
            }
        }
    }

    /// The communicator ends on all ranks, and streams go on: in this order, or others would take for a contribution what was never copied.
    fn give_up(&self, error: &Error) {
        self.staged.give_up(error);
        self.rails.iter().for_each(|rails| rails.give_up(error));
    }

    /// See [`super::CudaCommunicator::pinned_to`].
    pub(super) fn pinned_to(&self) -> Option<u64> {
        self.pinned.as_ref().map(Pinned::payload_max)
    }

    /// See [`super::CudaCommunicator::uses_gpudirect`].
    pub(super) fn uses_gpudirect(&self) -> bool {
        self.rails.as_ref().is_some_and(Rails::are_direct)
    }

    /// See [`super::CudaCommunicator::rails_from`].
    pub(super) fn rails_from(&self) -> Option<u64> {
        self.rails.as_ref().map(Rails::payload_min)
    }

    /// See [`super::CudaCommunicator::async_error`].
    pub(super) fn async_error(&self) -> Option<Error> {
        // Both are asked: the one gives memory back that was freed.
        let of_engines = self.engines.as_ref().and_then(|engines| engines.comm.async_error());
        let of_rails = self.rails.as_ref().and_then(Rails::async_error);
        let of_pinned = self.pinned.as_ref().and_then(Pinned::async_error);
        self.staged.async_error().or(of_engines).or(of_rails).or(of_pinned)
    }

    /// See [`super::CudaCommunicator::gpu_memory`].
    pub(super) fn gpu_memory(&self) -> Result<GpuMemory, Error> {
        self.engines.as_ref().map_or(Ok(GpuMemory::default()), |engines| engines.comm.gpu_memory())
    }

    /// Whether this rank has graphs with the communicator's collectives, as far as those know whose kernels graphs have.
    pub(super) fn has_graphs(&self) -> bool {
        let of_engines = self.engines.as_ref().is_some_and(|engines| engines.comm.has_graphs());
        of_engines || self.pinned.as_ref().is_some_and(Pinned::has_graphs)
    }

    /// See [`super::CudaCommunicator::abort`].
    pub(super) fn abort(&self) -> Result<(), Error> {
        let engines = self.engines.as_ref().map_or(Ok(()), |engines| engines.comm.abort());
        let rails = self.rails.as_ref().map_or(Ok(()), Rails::abort);
        let pinned = self.pinned.as_ref().map_or(Ok(()), Pinned::abort);
        self.staged.abort().and(engines).and(rails).and(pinned)
    }

    /// Leaves when this rank's operations have ended.
    pub(super) fn leave(&self) -> Result<(), Error> {
        let engines = self.engines.as_ref().map_or(Ok(()), |engines| engines.comm.leave());
        let rails = self.rails.as_ref().map_or(Ok(()), Rails::leave);
        let pinned = self.pinned.as_ref().map_or(Ok(()), Pinned::leave);
        rails.and(pinned).and(self.staged.leave()).and(engines)
    }
}

impl Engines {
    /// Joins the communicator of the engines; none where there are no engines between the ranks' GPUs, which all ranks learn alike.
    fn join(client: &Client, identity: &Identity, context: Context, from: EnginesFrom) -> Result<Option<Self>, Error> {
        let Identity { id, rank, nranks, gpu, .. } = *identity;
        let (options, role) = (identity.options.clone(), Role::CopyEngines { whole: identity.whole });
        let (gpu, root_address) = (Some(gpu), String::new());
        let request = Request::InitRank { id, rank, nranks, gpu, root_address, role, options };
        match client.0.requests.call(request, &[])? {
            (Response::Comm { comm, device_initiated: Some(share), .. }, fds) => {
                let made = DeviceInitiatedCommunicator::join(client, comm, rank, nranks, context, &share, &fds)?;
                Ok(Some(Engines { comm: made, from }).filter(|_| share.large.is_some()))
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Whether a collective is theirs.
    fn take(&self, call: &Call) -> bool {
        let op = if call.kind.reduces() { call.op.redop() } else { RedOp::Sum };
        let payload =
            call.kind.payload_count(call.count, self.comm.nranks()).saturating_mul(call.dtype.size_bytes() as u64);
        has_large(call.kind, op) && payload >= self.from[call.kind as usize]
    }
}
