//! Communicators of GPUs, as programs use them: each call goes to the back end that carries
//! collectives out.

use std::ffi::c_void;
use std::sync::Arc;

use mccs_cuda::{Context, DeviceAddress, RawStream};
use mccs_ipc::protocol::Response;
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};

use super::call::{Call, checked};
use super::cuda_error;
use super::device_initiated::DeviceInitiatedCommunicator;
use super::estimate;
use super::p2p::AnyP2p;
use super::service_executed::{Identity, Joined, ServiceExecutedCommunicator};
use super::surfacing::Surfacing;
use crate::client::unexpected;
use crate::port_channels::FIFO_SLOTS;
use crate::{Client, CommunicatorBuilder, Error, PortChannels, ReduceOperator, group};

/// A stream of the communicator's context, as `CUstream` or `cudaStream_t`; null is the default stream.
pub type CudaStream = *mut c_void;

/// A rank's membership in a communicator of GPUs. Operations may be called from any thread; all ranks must call the same
/// collectives in the same order.
///
/// Dropping it waits as [`CudaCommunicator::finalize`] does, which may be for ranks that never come: after an error call
/// [`CudaCommunicator::abort`] first.
pub struct CudaCommunicator {
    backend: Backend,
    surfacing: Arc<Surfacing>,
}

/// GPU memory of one rank, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GpuMemory {
    /// For the communicator alone: it goes when the communicator ends.
    pub own_bytes: u64,
    /// Its part of what communicators of the tenant share.
    pub shared_bytes: u64,
}

/// How collectives are carried out. Groups have counts of their own, to their end.
#[derive(Clone)]
pub(super) enum Backend {
    /// By kernels in the ranks' streams.
    DeviceInitiated(Arc<DeviceInitiatedCommunicator>),
    /// By the service.
    ServiceExecuted(Arc<ServiceExecutedCommunicator>),
}

/// A collective that waits for the end of its group.
pub(crate) struct CollectedCall {
    backend: Backend,
    surfacing: Arc<Surfacing>,
    call: Call,
    stream: CudaStream,
}

impl CommunicatorBuilder {
    /// Joins, with buffers on the GPU of the calling thread's current CUDA context. Returns when all ranks have joined. A process with
    /// several ranks calls it from as many threads. A context of `cuCtxCreate` must outlive the communicator; primary ones are kept.
    ///
    /// # Errors
    /// [`Error::Cuda`] where no context is current or the driver refuses. [`Error::Refused`] where the service has no such GPU, ranks
    /// contradict each other or are missing at a time-out, or the tenant is over its quota.
    pub fn join_cuda(&self) -> Result<CudaCommunicator, Error> {
        self.join_cuda_while(|| true)
    }

    /// As [`CommunicatorBuilder::join_cuda`]. Asks several times a second whether to go on waiting for the others; a rank that does not
    /// gives up, as at its time-out.
    ///
    /// # Errors
    /// As [`CommunicatorBuilder::join_cuda`]; [`Error::Refused`] where this rank gave up.
    pub fn join_cuda_while(&self, mut go_on: impl FnMut() -> bool) -> Result<CudaCommunicator, Error> {
        mccs_cuda::driver()?;
        let context = Context::current().map_err(cuda_error)?;
        let gpu = context.gpu().id.0;
        let joining = self.send(Some(gpu))?;
        let (client, rank, nranks) = (&self.client, self.rank, self.nranks);
        match client.wait_for_join(&joining, self, &mut go_on)? {
            (Response::Comm { comm, device_initiated: Some(share), .. }, fds) => {
                let made = DeviceInitiatedCommunicator::join(client, comm, rank, nranks, context, &share, &fds)?;
                Ok(CudaCommunicator::new(Backend::DeviceInitiated(Arc::new(made))))
            }
            (Response::Comm { comm, access, engines_from, hosts, rails_from, pinned_to, reduction_ring, .. }, _) => {
                let (id, options) = (self.id, self.options.clone());
                let root_address = self.root_address.clone().unwrap_or_default();
                let identity = Identity { id, rank, nranks, gpu, root_address, options, whole: comm };
                let forks = self.forks;
                let joined =
                    Joined { identity, access, engines_from, hosts, rails_from, pinned_to, reduction_ring, forks };
                let made = ServiceExecutedCommunicator::new(client, &joined, context)?;
                Ok(CudaCommunicator::new(Backend::ServiceExecuted(Arc::new(made))))
            }
            (other, _) => Err(unexpected(&other)),
        }
    }
}

/// The same on both back ends.
macro_rules! on_backend {
    ($backend:expr, $comm:ident => $body:expr) => {
        match &$backend {
            Backend::DeviceInitiated($comm) => $body,
            Backend::ServiceExecuted($comm) => $body,
        }
    };
}

impl std::fmt::Debug for CudaCommunicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rank, nranks) = (self.rank(), self.nranks());
        f.debug_struct("CudaCommunicator").field("rank", &rank).field("nranks", &nranks).finish_non_exhaustive()
    }
}

impl CudaCommunicator {
    fn new(backend: Backend) -> Self {
        CudaCommunicator { backend, surfacing: Arc::default() }
    }

    /// From now on failures of other ranks surface as in NCCL. Calls succeed, and nothing comes of them, until [`CudaCommunicator::async_error`]
    /// has told of the failure, or two seconds after the first such call. A stream that is captured gets the error at once. Without this, calls
    /// fail from the failure on.
    #[doc(hidden)]
    pub fn surface_failures_by_async_error(&self) {
        self.surfacing.by_asynchronous_error();
    }

    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        on_backend!(self.backend, comm => comm.rank())
    }

    /// Number of ranks.
    #[must_use]
    pub fn nranks(&self) -> u32 {
        on_backend!(self.backend, comm => comm.nranks())
    }

    /// The session it belongs to.
    #[must_use]
    pub fn client(&self) -> &Client {
        on_backend!(self.backend, comm => comm.client())
    }

    /// Whether the service carries collectives out: ranks are on several hosts, or the operator wants it so.
    #[doc(hidden)]
    #[must_use]
    pub fn is_service_executed(&self) -> bool {
        matches!(self.backend, Backend::ServiceExecuted(_))
    }

    /// Payload in bytes from which GPUs of several hosts combine what they call, and the service only moves it; none where it carries
    /// everything out, or nothing.
    #[doc(hidden)]
    #[must_use]
    pub fn rails_from(&self) -> Option<u64> {
        match &self.backend {
            Backend::DeviceInitiated(_) => None,
            Backend::ServiceExecuted(comm) => comm.rails_from(),
        }
    }

    /// Payload in bytes up to which kernels of GPUs that do not reach each other meet in pinned memory of the host; none where they do not.
    #[doc(hidden)]
    #[must_use]
    pub fn pinned_to(&self) -> Option<u64> {
        match &self.backend {
            Backend::DeviceInitiated(_) => None,
            Backend::ServiceExecuted(comm) => comm.pinned_to(),
        }
    }

    /// Whether NICs read and write this rank's GPU's memory for what goes by rails ([`CudaCommunicator::rails_from`]). Otherwise it goes through pinned
    /// memory of the host.
    #[must_use]
    pub fn uses_gpudirect(&self) -> bool {
        match &self.backend {
            Backend::DeviceInitiated(_) => false,
            Backend::ServiceExecuted(comm) => comm.uses_gpudirect(),
        }
    }

    /// Calls collectives that the operator's recorders show under a tag of the caller's; 0 is none.
    #[must_use]
    pub fn tagged(&self, user_tag: u64) -> TaggedCommunicator<'_> {
        TaggedCommunicator { comm: self, user_tag }
    }

    /// GPU memory that the service holds for the communicator on this rank's GPU.
    ///
    /// # Errors
    /// [`Error::ServiceGone`]; [`Error::Refused`] once the rank has left.
    pub fn gpu_memory(&self) -> Result<GpuMemory, Error> {
        on_backend!(self.backend, comm => comm.gpu_memory())
    }

    /// Whether this rank has CUDA graphs that were captured with the communicator's collectives and read its GPU memory.
    #[doc(hidden)]
    #[must_use]
    pub fn has_graphs(&self) -> bool {
        on_backend!(self.backend, comm => comm.has_graphs())
    }

    /// The error that ended the communicator, if one did: on any rank. To be asked for after a stream was synchronized:
    /// operations of a communicator that has failed end at once, whatever is in their buffers.
    #[must_use]
    pub fn async_error(&self) -> Option<Error> {
        on_backend!(self.backend, comm => comm.async_error()).inspect(|_| self.surfacing.told())
    }

    /// Ends the communicator on all ranks: operations outstanding end without a result.
    ///
    /// # Errors
    /// [`Error::ServiceGone`].
    pub fn abort(&self) -> Result<(), Error> {
        self.surfacing.told();
        on_backend!(self.backend, comm => comm.abort())
    }

    /// Leaves the communicator when this rank's operations have ended, and waits for that; [`CudaCommunicator::abort`] from another thread
    /// ends the wait. Nothing may be called on it afterwards. Once it has left it does nothing. Programs whose threads do not abort each
    /// other use [`CudaCommunicator::destroy`].
    ///
    /// # Errors
    /// [`Error::Cuda`] where the GPU has failed, [`Error::ServiceGone`].
    pub fn finalize(&self) -> Result<(), Error> {
        on_backend!(self.backend, comm => comm.leave())
    }

    /// As [`CudaCommunicator::finalize`].
    ///
    /// # Errors
    /// As there.
    pub fn destroy(self) -> Result<(), Error> {
        self.finalize()
    }

    /// This rank's port channels, which the first call opens, for its kernels (`mccs/device.cuh`) and its threads: of ranks on GPUs of one host that
    /// reach each other.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for other ranks. [`Error::Refused`] over the tenant's quota of memory, and where the communicator has failed.
    pub fn port_channels(&self) -> Result<PortChannels, Error> {
        self.port_channels_with(FIFO_SLOTS)
    }

    /// As [`CudaCommunicator::port_channels`], with room for at least `fifo_slots` calls of kernels, and as many of threads, that the service has
    /// not taken yet, at most 4096: more of them wait. If the port channels are open already, they stay as they are.
    ///
    /// # Errors
    /// As [`CudaCommunicator::port_channels`].
    pub fn port_channels_with(&self, fifo_slots: u32) -> Result<PortChannels, Error> {
        match &self.backend {
            Backend::DeviceInitiated(comm) => comm.port_channels(fifo_slots),
            Backend::ServiceExecuted(_) => Err(Error::argument(
                "port channels of GPUs are for ranks of one host whose GPUs reach each other: there are none between hosts yet",
            )),
        }
    }

    /// How collectives are carried out.
    pub(super) fn backend(&self) -> &Backend {
        &self.backend
    }

    /// How failures of others surface.
    pub(super) fn surfacing(&self) -> &Arc<Surfacing> {
        &self.surfacing
    }

    /// Parts that sends and receives need.
    pub(super) fn p2p(&self) -> AnyP2p {
        match &self.backend {
            Backend::DeviceInitiated(comm) => AnyP2p::DeviceInitiated(Arc::clone(comm.p2p())),
            Backend::ServiceExecuted(comm) => comm.p2p(),
        }
    }

    /// Enqueues a collective, or keeps it for the end of the group.
    ///
    /// # Safety
    /// As for [`CudaCommunicator::all_reduce`].
    pub(crate) unsafe fn collective(&self, call: &Call, stream: CudaStream) -> Result<(), Error> {
        if group::is_open() {
            checked(call, self.rank(), self.nranks())?;
            let (backend, surfacing) = (self.backend.clone(), Arc::clone(&self.surfacing));
            group::collect_call(CollectedCall { backend, surfacing, call: *call, stream });
            return Ok(());
        }
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let result = on_backend!(self.backend, comm => comm.collective(call, stream));
            self.surfacing.of_call(result, &[RawStream::from_ptr(stream)])
        }
    }
}

impl Drop for CudaCommunicator {
    fn drop(&mut self) {
        let _ = self.finalize();
    }
}

impl CollectedCall {
    /// Its communicator, by any number that no other has meanwhile, and how long it would take there, in microseconds. Nothing where
    /// the service carries it out.
    pub(crate) fn estimate_us(&self) -> Option<(usize, f64)> {
        let Backend::DeviceInitiated(comm) = &self.backend else { return None };
        let Call { kind, count, dtype, .. } = self.call;
        let bytes = kind.payload_count(count, comm.nranks()).saturating_mul(dtype.size_bytes() as u64);
        Some((Arc::as_ptr(comm) as usize, estimate::collective_us(kind, bytes, comm.nranks())))
    }

    /// Enqueues it.
    pub(crate) fn enqueue(&self) -> Result<(), Error> {
        // SAFETY: buffers and stream are as the caller of [`CudaCommunicator::all_reduce`] has promised.
        unsafe {
            let result = on_backend!(self.backend, comm => comm.collective(&self.call, self.stream));
            self.surfacing.of_call(result, &[RawStream::from_ptr(self.stream)])
        }
    }
}

/// A communicator whose collectives are called under a tag; see [`CudaCommunicator::tagged`].
#[derive(Clone, Copy)]
pub struct TaggedCommunicator<'a> {
    comm: &'a CudaCommunicator,
    user_tag: u64,
}

/// Defines the collectives.
macro_rules! collectives {
    ($($(#[$meta:meta])* $name:ident($($arg:ident: $type:ty),*) => $kind:ident, $op:expr, $root:expr;)+) => {
        impl CudaCommunicator {
            $(
                $(#[$meta])*
                ///
                /// # Safety
                /// Buffers must be of the communicator's context, or of memory that it reaches, as long as
                /// [`CollectiveKind`] says, and stay so until the operation has ended; nobody else may use them meanwhile.
                /// The stream must be of that context, and live until then. In a group the operation begins no sooner than at
                /// the group's end.
                ///
                /// # Errors
                /// [`Error::InvalidArgument`], and nothing is enqueued; [`Error::Failed`] once the communicator has failed;
                /// [`Error::Cuda`] where the driver refuses the launch. Failures of the operation itself:
                /// [`CudaCommunicator::async_error`].
                #[allow(clippy::too_many_arguments, reason = "the field's signature, as in NCCL")]
                pub unsafe fn $name(
                    &self,
                    send: DeviceAddress,
                    recv: DeviceAddress,
                    count: u64,
                    dtype: DataType,
                    $($arg: $type,)*
                    stream: CudaStream,
                ) -> Result<(), Error> {
                    // SAFETY: the caller's contract is passed on.
                    unsafe { self.tagged(0).$name(send, recv, count, dtype, $($arg,)* stream) }
                }
            )+
        }

        impl TaggedCommunicator<'_> {
            $(
                /// As the function of [`CudaCommunicator`].
                ///
                /// # Safety
                /// As there.
                ///
                /// # Errors
                /// As there.
                #[allow(clippy::too_many_arguments, reason = "the field's signature, as in NCCL")]
                pub unsafe fn $name(
                    &self,
                    send: DeviceAddress,
                    recv: DeviceAddress,
                    count: u64,
                    dtype: DataType,
                    $($arg: $type,)*
                    stream: CudaStream,
                ) -> Result<(), Error> {
                    let (op, root, user_tag) = ($op, $root, self.user_tag);
                    let call = Call { kind: CollectiveKind::$kind, send, recv, count, dtype, op, root, user_tag };
                    // SAFETY: the caller's contract is passed on.
                    unsafe { self.comm.collective(&call, stream) }
                }
            )+
        }
    };
}

collectives! {
    /// Combines `count` elements of all ranks; every rank gets the result. In place: the same address twice.
    all_reduce(op: impl Into<ReduceOperator>) => AllReduce, op.into(), 0;
    /// Combines `nranks * count` elements of all ranks; rank r gets elements `r * count ..` of the result. In place: `recv`
    /// at `send + rank * count`.
    reduce_scatter(op: impl Into<ReduceOperator>) => ReduceScatter, op.into(), 0;
    /// Combines `count` elements of all ranks; `root` gets the result. In place: the same address twice, at the root.
    reduce(op: impl Into<ReduceOperator>, root: u32) => Reduce, op.into(), root;
    /// Every rank gets all ranks' `count` elements, in rank order. In place: `send` at `recv + rank * count`.
    all_gather() => AllGather, RedOp::Sum.into(), 0;
    /// Every rank gets `root`'s `count` elements. In place: the same address twice, at the root.
    broadcast(root: u32) => Broadcast, RedOp::Sum.into(), root;
    /// Rank r's elements `s * count ..` go to rank s, at `r * count`. Never in place: with the same address twice, what comes is not defined.
    all_to_all() => AllToAll, RedOp::Sum.into(), 0;
    /// `root` gets all ranks' `count` elements, in rank order. In place: the root's `send` at `recv + root * count`.
    gather(root: u32) => Gather, RedOp::Sum.into(), root;
    /// Rank r gets `root`'s elements `r * count ..`. In place: the root's `recv` at `send + root * count`.
    scatter(root: u32) => Scatter, RedOp::Sum.into(), root;
    /// Ends when all ranks have come to it. Buffers and count do not matter.
    barrier() => Barrier, RedOp::Sum.into(), 0;
}
