//! Windows: memory of each rank's GPU that the other ranks of a communicator reach, for copies and
//! for kernels of their own.

use std::sync::{Arc, LazyLock};

use bytemuck::{Pod, Zeroable};
use mccs_cuda::{Context, DeviceAddress, ImportedMemory, IpcHandle, PointerKind, RawStream};
use mccs_cuda::{allocation_of, export, gpus, pointer_kind};
use mccs_ipc::device_initiated::{DEVICE_INITIATED_RANKS_MAX, Signal};

use super::communicator::{Backend, CudaCommunicator, CudaStream};
use super::cuda_error;
use super::device_initiated::{DeviceInitiatedCommunicator, Put, SignalWait};
use super::resources::import_of_peer;
use crate::{Error, UniqueId, unique_id};

/// Tells this process from others.
fn this_process() -> Result<[u8; 16], Error> {
    static TOKEN: LazyLock<Result<UniqueId, Error>> = LazyLock::new(unique_id);
    TOKEN.clone().map(|token| token.0)
}

/// A rank's part of a window, for the other ranks: a plain value, which they tell each other.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct WindowPart {
    process: [u8; 16],
    gpu: [u8; 16],
    /// In the rank's own context.
    address: DeviceAddress,
    bytes: u64,
    /// Offset of the address in its allocation.
    offset: u64,
    /// Handle of the allocation; zeros if other processes cannot open it.
    handle: [u8; 64],
}

impl WindowPart {
    /// Length of one in bytes.
    pub const BYTES: usize = size_of::<WindowPart>();
    /// The part of a rank that has none.
    pub const NONE: WindowPart =
        WindowPart { process: [0; 16], gpu: [0; 16], address: 0, bytes: 0, offset: 0, handle: [0; 64] };

    /// In bytes, for peers.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        bytemuck::cast(*self)
    }

    /// From a peer's bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        bytemuck::cast(*bytes)
    }
}

/// Memory of each rank of a communicator that this one reaches. Ranks agree on nothing but the number of parts: they may be of different lengths.
/// Memory of the others stays mapped as long as this lives, and their owners do not free it before.
#[derive(Debug)]
pub struct Window {
    parts: Vec<Part>,
}

/// A rank's memory, in this rank's context.
#[derive(Debug)]
struct Part {
    bytes: u64,
    /// Or why it is not reached.
    address: Result<DeviceAddress, Error>,
    _mapped: Option<Arc<ImportedMemory>>,
}

impl Part {
    fn open(context: &Context, part: &WindowPart) -> Self {
        let &WindowPart { process, bytes, address, offset, handle, .. } = part;
        let at = |address, mapped| Part { bytes, address, _mapped: mapped };
        if this_process().is_ok_and(|own| own == process) {
            return at(reach(context, part).map(|()| address), None);
        }
        if handle == [0; 64] {
            let message = "it has none, or of memory that other processes cannot open: use cudaMalloc or ncclMemAlloc";
            return at(Err(Error::argument(message)), None);
        }
        match import_of_peer(context, IpcHandle(handle)) {
            Ok(mapped) => {
                let is_inside =
                    || offset.checked_add(bytes).zip(mapped.len_bytes().ok()).is_some_and(|(end, all)| end <= all);
                let found = if is_inside() {
                    Ok(mapped.address() + offset)
                } else {
                    Err(Error::argument("its part lies outside of its memory"))
                };
                at(found, Some(mapped))
            }
            Err(error) => at(Err(error), None),
        }
    }
}

/// Lets `context` reach memory of this process on another GPU.
fn reach(context: &Context, part: &WindowPart) -> Result<(), Error> {
    if context.gpu().id.0 == part.gpu {
        return Ok(());
    }
    let all = gpus().map_err(cuda_error)?;
    let gpu = all.iter().find(|gpu| gpu.id.0 == part.gpu);
    let gpu = gpu.ok_or_else(|| Error::no_cuda("the GPU of a rank of this process is not visible any more"))?;
    context.enable_peer(&Context::primary(gpu).map_err(cuda_error)?).map_err(cuda_error)
}

impl Window {
    /// Size of a rank's part in bytes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a rank that there is not.
    pub fn len_bytes(&self, rank: u32) -> Result<u64, Error> {
        self.part(rank).map(|part| part.bytes)
    }

    /// Address of `bytes` at an offset of a rank's part in the context of the communicator, for the caller's own kernels and
    /// copies.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for what lies outside, and for memory that this rank does not reach, with the reason.
    pub fn address(&self, rank: u32, offset: u64, bytes: u64) -> Result<DeviceAddress, Error> {
        let part = self.part(rank)?;
        if offset.checked_add(bytes).is_none_or(|end| end > part.bytes) {
            let all = part.bytes;
            return Err(Error::argument(format!(
                "{bytes} bytes at offset {offset} of rank {rank}'s window of {all} bytes"
            )));
        }
        let unreached = |error: &Error| Error::argument(format!("rank {rank}'s window is not reached: {error}"));
        part.address.as_ref().map(|address| address + offset).map_err(unreached)
    }

    fn part(&self, rank: u32) -> Result<&Part, Error> {
        let all = self.parts.len();
        self.parts.get(rank as usize).ok_or_else(|| Error::argument(format!("rank {rank} of a window of {all}")))
    }
}

impl CudaCommunicator {
    /// Whether there are windows and one-sided operations: ranks are on one host, on GPUs that reach each other and whose streams write and wait for
    /// words; they open each other's handles; and the operator leaves their collectives to them.
    #[must_use]
    pub fn has_windows(&self) -> bool {
        let has = |comm: &DeviceInitiatedCommunicator| comm.opens_handles() && comm.context().gpu().has_stream_words;
        matches!(self.backend(), Backend::DeviceInitiated(comm) if has(comm))
    }

    /// This rank's part of a window: `bytes` of its GPU's memory, from `cudaMalloc` or of this process. Peers that cannot open it hear so where they
    /// use it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an address that is no GPU's memory, and for more bytes than are there.
    pub fn window_part(&self, address: DeviceAddress, bytes: u64) -> Result<WindowPart, Error> {
        let comm = self.peers()?;
        let context = comm.context();
        let _entered = context.enter().map_err(cuda_error)?;
        let kind = pointer_kind(address).map_err(cuda_error)?;
        let (base, all) = allocation_of(address).map_err(cuda_error)?;
        let offset = address - base;
        if offset.checked_add(bytes).is_none_or(|end| end > all) && kind == PointerKind::Ipc {
            return Err(Error::argument(format!(
                "a window of {bytes} bytes at offset {offset} of {all} bytes of memory"
            )));
        }
        let handle = match kind {
            PointerKind::Ipc => export(base).map_err(cuda_error)?.0,
            _ => [0; 64],
        };
        Ok(WindowPart { process: this_process()?, gpu: context.gpu().id.0, address, bytes, offset, handle })
    }

    /// Opens a window whose parts ranks have told each other, in their order.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for another number of parts than ranks. Parts that this rank does not reach are errors where they are used.
    pub fn open_window(&self, parts: &[WindowPart]) -> Result<Window, Error> {
        let comm = self.peers()?;
        if parts.len() != self.nranks() as usize {
            return Err(Error::argument(format!("{} parts of a window of {} ranks", parts.len(), self.nranks())));
        }
        let context = comm.context();
        let _entered = context.enter().map_err(cuda_error)?;
        Ok(Window { parts: parts.iter().map(|part| Part::open(context, part)).collect() })
    }

    /// Copies bytes into a peer's part of a window, and counts one of its signals when they are there, in the caller's stream.
    ///
    /// # Safety
    /// Source and stream are of the communicator's context, and stay, as the window does, until the copy has ended. Nobody else uses either range
    /// meanwhile.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`], and nothing is enqueued: for ranges outside of the window, a stream that is captured, memory that is not reached.
    /// [`Error::Failed`] once the communicator has failed.
    #[allow(clippy::too_many_arguments, reason = "NCCL's signature")]
    pub unsafe fn put_signal(
        &self,
        source: DeviceAddress,
        bytes: u64,
        window: &Window,
        peer: u32,
        offset: u64,
        signal: Signal,
        stream: CudaStream,
    ) -> Result<(), Error> {
        let target = window.address(peer, offset, bytes)?;
        if bytes > 0 && source == 0 {
            return Err(Error::argument(format!("{bytes} bytes from a null address")));
        }
        let put = (bytes > 0).then_some(Put { source, target, bytes });
        // SAFETY: the caller's contract.
        unsafe { self.send_signal(put, peer, signal, stream) }
    }

    /// Counts a peer's signal when all before it in the caller's stream has ended.
    ///
    /// # Safety
    /// The stream is of the communicator's context, and lives.
    ///
    /// # Errors
    /// As [`CudaCommunicator::put_signal`].
    pub unsafe fn signal(&self, peer: u32, signal: Signal, stream: CudaStream) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe { self.send_signal(None, peer, signal, stream) }
    }

    unsafe fn send_signal(&self, put: Option<Put>, peer: u32, signal: Signal, stream: CudaStream) -> Result<(), Error> {
        let (comm, stream) = (self.peers()?, RawStream::from_ptr(stream));
        // SAFETY: the caller's contract.
        unsafe { self.surfacing().of_call(comm.send(peer, put, signal, stream), &[stream]) }
    }

    /// Has the caller's stream wait until signals have come, beyond those that were waited for before. No multiprocessor waits.
    ///
    /// # Safety
    /// The stream is of the communicator's context, and lives.
    ///
    /// # Errors
    /// As [`CudaCommunicator::put_signal`].
    pub unsafe fn wait_signals(&self, waits: &[SignalWait], stream: CudaStream) -> Result<(), Error> {
        let (comm, stream) = (self.peers()?, RawStream::from_ptr(stream));
        // SAFETY: the caller's contract.
        unsafe { self.surfacing().of_call(comm.wait_signals(waits, stream), &[stream]) }
    }

    pub(super) fn peers(&self) -> Result<&DeviceInitiatedCommunicator, Error> {
        match self.backend() {
            Backend::DeviceInitiated(comm) => Ok(comm),
            Backend::ServiceExecuted(_) => Err(Error::argument(format!(
                "one-sided operations are for at most {DEVICE_INITIATED_RANKS_MAX} ranks of one host whose GPUs reach each other, where the operator \
                 leaves collectives to them"
            ))),
        }
    }
}
