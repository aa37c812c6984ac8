//! A stream of the service's that goes on when a GPU's stream has come to a word, with the memory that both reach.

use std::sync::Arc;

use bytemuck::Zeroable;
use mccs_cuda::{Context, DeviceAddress, HostRegistration, RawStream};
use mccs_ipc::gate::{Gate, GateAccess};
use mccs_kernels::cuda::StageArgs;

use crate::cuda::cuda_error;
use crate::cuda::resources::StageKernel;
use crate::{Client, Error, Region, Span, Stream};

/// Room for the gate before the slots, which begin on a page of their own.
const HEAD_BYTES: u64 = 4096;

/// How streams of a GPU tell and wait.
#[derive(Clone)]
pub(super) struct Access {
    pub(super) way: GateAccess,
    /// Unless `way` has no use for it.
    pub(super) kernel: Option<Arc<StageKernel>>,
}

impl Access {
    /// As the operator wants it, as far as the driver can.
    pub(super) fn new(context: &Context, wanted: GateAccess) -> Result<Self, Error> {
        let has_words = context.gpu().has_stream_words;
        let way = if has_words { wanted } else { GateAccess::Kernels };
        let kernel = if way == GateAccess::Words { None } else { StageKernel::of(context)? };
        if kernel.is_none() && way == GateAccess::Kernels {
            let what =
                if has_words { "the operator wants kernels" } else { "the driver has no stream memory operations" };
            return Err(Error::Cuda(format!("{what}, and this library was built without")));
        }
        Ok(Access { way, kernel })
    }

    /// The kernel that does what words do elsewhere, where there are none.
    fn gate_kernel(&self) -> Option<&StageKernel> {
        self.kernel.as_deref().filter(|_| self.way == GateAccess::Kernels)
    }
}

/// See the module's documentation. Its unsafe methods enqueue: the GPU's stream must live, and `self` until it has come to
/// what they enqueue.
pub(super) struct Gated {
    /// At the service.
    pub(super) stream: Stream,
    /// Before the region, whose memory it names.
    registration: HostRegistration,
    region: Arc<Region>,
    pub(super) access: Access,
}

impl Gated {
    /// With room for slots of so many bytes together.
    pub(super) fn new(client: &Client, context: &Context, access: Access, bytes: u64) -> Result<Self, Error> {
        let region = Arc::new(client.allocate(HEAD_BYTES + bytes)?);
        let stream = client.register_gated_stream(&region, 0)?;
        // SAFETY: the region is mapped longer than it is registered: fields are dropped in order.
        let registration = unsafe { HostRegistration::register(context, region.as_ptr(), region.len_bytes()) };
        Ok(Gated { stream, registration: registration.map_err(cuda_error)?, region, access })
    }

    /// Lets everything through, on both sides.
    pub(super) fn release(&self) {
        // SAFETY: the region begins with room for a gate, and stays mapped as long as `self` lives.
        let gate = unsafe { Gate::at(self.region.as_ptr()) };
        gate.into_iter().for_each(Gate::release);
    }

    /// Where the service sees what lies at an offset in the slots.
    pub(super) fn span(&self, offset: u64) -> Span {
        self.region.at(HEAD_BYTES + offset)
    }

    /// Where the GPU sees the same.
    pub(super) fn address(&self, offset: u64) -> DeviceAddress {
        self.registration.address() + HEAD_BYTES + offset
    }

    /// The word that says how far the GPU is.
    pub(super) fn ready(&self) -> DeviceAddress {
        self.registration.address() + Gate::READY_OFFSET
    }

    /// The word that says how far the service is.
    pub(super) fn done(&self) -> DeviceAddress {
        self.registration.address() + Gate::DONE_OFFSET
    }

    /// What a kernel writes and waits for, without copies.
    pub(super) fn words(&self, ready: Option<u64>, done: Option<u64>) -> StageArgs {
        StageArgs {
            ready_word: self.ready(),
            ready_value: ready.unwrap_or(0),
            done_word: self.done(),
            done_value: done.unwrap_or(0),
            ..StageArgs::zeroed()
        }
    }

    /// Has a stream tell that it has come to an operation.
    ///
    /// # Safety
    /// As the type says.
    pub(super) unsafe fn tell(&self, stream: RawStream, ticket: u64) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        let told = unsafe {
            match self.access.gate_kernel() {
                Some(kernel) => kernel.function.launch(stream, 1, 1, &self.words(Some(ticket), None)),
                None => stream.write_word(self.ready(), ticket),
            }
        };
        told.map_err(cuda_error)
    }

    /// Has a stream wait until the service has done an operation.
    ///
    /// # Safety
    /// As the type says.
    pub(super) unsafe fn wait(&self, stream: RawStream, ticket: u64) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        let waits = unsafe {
            match self.access.gate_kernel() {
                Some(kernel) => kernel.function.launch(stream, 1, 1, &self.words(None, Some(ticket))),
                None => stream.wait_word(self.done(), ticket),
            }
        };
        waits.map_err(cuda_error)
    }
}
