//! Twins: GPU memory that NICs read and write (GPUDirect) in the place of slots of host memory.
//!
//! The service makes a twin, on its set-up thread, and has each NIC try to register it. The tenant opens it by a descriptor. A twin stands for a range of
//! a region, byte by byte: what cannot send from a GPU's memory sends from the range, when the twin has been copied there.
//!
//! A twin is freed when nobody uses it any more: the session that asked, operations, and transport engines that have it registered.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mccs_cuda::{Context, DeviceAddress, DriverError, LARGE_PAGE_BYTES, OwnedStream, Shared, dma_buffer};
use mccs_ipc::types::ErrorClass;
use mccs_model::{NicAccess, NicPath, SetupError};
use mccs_runtime::Share;
use mccs_tenants::{Charge, OverQuota, Resource, Tenant};
use mccs_transport::{GpuAccess, MemoryKind};

use crate::cuda::Gpus;
use crate::cuda::memory::deferred_free::DeferredFrees;
use crate::cuda::memory::symmetric_buffer::Block;
use crate::cuda::setup::{Order, Orders};

/// NICs, on which memory is tried.
pub trait Nics: Send + Sync {
    /// Has each register memory, and forget it again. Returns the worst way of theirs.
    ///
    /// # Safety
    /// The memory is a GPU's, and stays until this returns; the dma-buf is of the same bytes.
    ///
    /// # Errors
    /// Why one of them refuses.
    unsafe fn try_memory(
        &self,
        address: DeviceAddress,
        bytes: u64,
        dma_buffer: Option<BorrowedFd<'_>>,
    ) -> Result<GpuAccess, String>;
}

/// Why memory of GPUs cannot be a twin: it goes through the host.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoTwin {
    #[error(transparent)]
    OverQuota(#[from] OverQuota),
    #[error("no memory for NICs on {gpu}: {error}")]
    Driver { gpu: String, error: DriverError },
    #[error("NICs do not reach memory of {gpu}: {reason}")]
    Refused { gpu: String, reason: String },
}

impl NoTwin {
    pub(crate) fn refusal(&self) -> SetupError {
        let class = match self {
            NoTwin::OverQuota(_) => ErrorClass::InvalidUsage,
            NoTwin::Driver { .. } | NoTwin::Refused { .. } => ErrorClass::System,
        };
        SetupError { class, message: self.to_string() }
    }
}

/// A block, and how NICs reach it.
struct Tried {
    block: Block,
    dma_buffer: Option<OwnedFd>,
    path: NicPath,
}

/// See the module's documentation.
pub struct GpuTwin {
    number: u64,
    /// `None` only while dropping.
    held: Option<(Tried, OwnedStream, [Charge; 2])>,
    bytes: u64,
    needs_flush: bool,
    frees: DeferredFrees,
}

impl GpuTwin {
    /// No other has or had the same.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Size.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.bytes
    }

    /// How NICs reach it.
    #[must_use]
    pub fn path(&self) -> Option<&NicPath> {
        self.held.as_ref().map(|(tried, ..)| &tried.path)
    }

    /// Whether what NICs have written has to be flushed before the GPU reads it.
    #[must_use]
    pub fn needs_flush(&self) -> bool {
        self.needs_flush
    }

    /// For a transport to register: first byte, as this process knows it, and the kind of memory.
    #[must_use]
    pub fn memory(&self) -> Option<(*mut u8, MemoryKind<'_>)> {
        let (tried, ..) = self.held.as_ref()?;
        let dma_buffer = tried.dma_buffer.as_ref().map(|buffer| (buffer.as_fd(), 0));
        Some((tried.block.address() as *mut u8, MemoryKind::Gpu { dma_buffer }))
    }

    /// Copies `bytes` from `offset` on to memory of the host, and waits: for what goes another way than by NICs, and seldom.
    ///
    /// # Safety
    /// `to` has room, and nobody else writes to either.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn fetch(&self, offset: u64, to: *mut u8, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's contract is passed on.
        self.copy(offset, bytes, |stream, at| unsafe { stream.copy_and_wait(to as u64, at, bytes as usize) })
    }

    /// The other way round.
    ///
    /// # Safety
    /// `from` has as many bytes, and nobody else uses either.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn store(&self, offset: u64, from: *const u8, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's contract is passed on.
        self.copy(offset, bytes, |stream, at| unsafe { stream.copy_and_wait(at, from as u64, bytes as usize) })
    }

    /// Copies a part, from where it lies or there, by a stream for it.
    fn copy(
        &self,
        offset: u64,
        bytes: u64,
        copy: impl FnOnce(&OwnedStream, DeviceAddress) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        let Some((tried, stream, _)) = self.held.as_ref().filter(|_| is_inside) else {
            return Err(DriverError::own("a copy of a twin", "bug: the part is not in it"));
        };
        if bytes == 0 { Ok(()) } else { copy(stream, tried.block.address() + offset) }
    }
}

impl std::fmt::Debug for GpuTwin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GpuTwin({}, {} bytes)", self.number, self.bytes)
    }
}

impl Drop for GpuTwin {
    fn drop(&mut self) {
        if let Some(held) = self.held.take() {
            let share = held.2[0].tenant().share;
            self.frees.free(share, held);
        }
    }
}

/// A twin that is wanted.
pub struct TwinOrder {
    /// On which GPU, as the device counts them.
    pub gpu: usize,
    /// Its size.
    pub bytes: u64,
    /// Tenant whose quota it counts for.
    pub tenant: Arc<Tenant>,
    /// Callback for the answer.
    pub reply: Box<dyn FnOnce(Result<MadeTwin, SetupError>) + Send>,
}

/// A twin that was made.
pub struct MadeTwin {
    /// The memory.
    pub memory: GpuTwin,
    /// By which the tenant opens it.
    pub descriptor: OwnedFd,
    /// Charge of the descriptor, until it is sent.
    pub charge: Charge,
    /// Bytes of that: whole pages.
    pub room: u64,
}

/// Makes twins.
#[derive(Clone)]
pub struct TwinMaker {
    gpus: Arc<Gpus>,
    orders: Arc<Orders>,
    frees: DeferredFrees,
    nics: Result<Arc<dyn Nics>, Arc<str>>,
}

/// Needs of the set-up thread for a twin.
pub(crate) struct TwinWork {
    order: TwinOrder,
    frees: DeferredFrees,
    nics: Result<Arc<dyn Nics>, Arc<str>>,
}

impl TwinMaker {
    pub(crate) fn new(gpus: Arc<Gpus>, orders: Arc<Orders>, frees: DeferredFrees) -> Self {
        TwinMaker { gpus, orders, frees, nics: Err("there are no other hosts".into()) }
    }

    /// One whose twins these NICs are to reach; or why none do.
    #[must_use]
    pub fn with_nics(self, nics: Result<Arc<dyn Nics>, Arc<str>>) -> Self {
        TwinMaker { nics, ..self }
    }

    /// Whether any can be made.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), Arc<str>> {
        self.nics.as_ref().map(drop).map_err(Arc::clone)
    }

    /// Has one made, by the set-up thread.
    pub fn make(&self, order: TwinOrder) {
        let share = order.tenant.share;
        let work = TwinWork { order, frees: self.frees.clone(), nics: self.nics.clone() };
        if let Err(std::sync::mpsc::SendError(Order::MakeTwin(work))) = self.orders.send(share, Order::MakeTwin(work)) {
            let message = "the thread that sets up GPUs has ended".into();
            (work.order.reply)(Err(SetupError { class: ErrorClass::System, message }));
        }
    }

    /// How NICs reach memory of each GPU, as far as a little of it shows.
    #[must_use]
    pub fn try_gpus(&self) -> Vec<NicPath> {
        let try_one = |gpu| match &self.nics {
            Err(reason) => NicPath::bounce(reason.to_string()),
            Ok(nics) => match try_block(&self.gpus, gpu, LARGE_PAGE_BYTES as u64, &**nics, &self.frees) {
                Ok(tried) => tried.path,
                Err(error) => NicPath::bounce(error.to_string()),
            },
        };
        (0..self.gpus.gpus.len()).map(try_one).collect()
    }
}

impl TwinWork {
    /// Makes it, and answers. Returns what the driver has refused, and for which GPU.
    pub(crate) fn run(self, gpus: &Gpus) -> Option<(usize, DriverError)> {
        let TwinWork { order: TwinOrder { gpu, bytes, tenant, reply }, frees, nics } = self;
        let made = make(gpus, gpu, bytes, &tenant, &frees, nics);
        let refusal = made.as_ref().err().map(NoTwin::refusal);
        let (answer, failed) = match (made, refusal) {
            (Ok(made), _) => (Ok(made), None),
            (Err(NoTwin::Driver { error, .. }), Some(refusal)) => (Err(refusal), Some((gpu, error))),
            (Err(other), _) => (Err(other.refusal()), None),
        };
        reply(answer);
        failed
    }
}

fn make(
    gpus: &Gpus,
    gpu: usize,
    bytes: u64,
    tenant: &Arc<Tenant>,
    frees: &DeferredFrees,
    nics: Result<Arc<dyn Nics>, Arc<str>>,
) -> Result<MadeTwin, NoTwin> {
    static NUMBERS: AtomicU64 = AtomicU64::new(0);
    let (own, context) = &gpus.gpus[gpu];
    let nics = nics.map_err(|reason| NoTwin::Refused { gpu: own.id.to_string(), reason: reason.to_string() })?;
    // Short ones take a whole page, too, and each has a dma-buf.
    let room = bytes.checked_next_multiple_of(LARGE_PAGE_BYTES as u64).unwrap_or(u64::MAX);
    let charges = [tenant.charge(Resource::GpuMemoryBytes, room)?, tenant.charge(Resource::Descriptors, 1)?];
    let charge = tenant.charge(Resource::Descriptors, 1)?;
    let failed = |error| NoTwin::Driver { gpu: own.id.to_string(), error };
    let stream = OwnedStream::new(context).map_err(failed)?;
    let tried = try_block(gpus, gpu, bytes, &*nics, frees)?;
    let (number, needs_flush) = (NUMBERS.fetch_add(1, Ordering::Relaxed), !own.sees_nic_writes);
    let twin = GpuTwin { number, held: Some((tried, stream, charges)), bytes, needs_flush, frees: frees.clone() };
    let Some((Tried { block, .. }, stream, _)) = &twin.held else { unreachable!("invariant: made above") };
    // Bytes that others have left there are nobody's to read.
    block.zero(stream).map_err(failed)?;
    let _entered = context.enter().map_err(failed)?;
    let (descriptor, room) = block.descriptor().map_err(failed)?;
    Ok(MadeTwin { memory: twin, descriptor, charge, room })
}

/// Makes a block that NICs take.
fn try_block(gpus: &Gpus, gpu: usize, bytes: u64, nics: &dyn Nics, frees: &DeferredFrees) -> Result<Tried, NoTwin> {
    let (own, context) = &gpus.gpus[gpu];
    let failed = |error| NoTwin::Driver { gpu: own.id.to_string(), error };
    let block = Block::by_descriptor(context, bytes, Shared::WithNics, &[context], frees).map_err(failed)?;
    let path = path_of(context, block.address(), bytes, nics);
    match path {
        Ok((path, dma_buffer)) => Ok(Tried { block, dma_buffer, path }),
        Err(reason) => {
            frees.free(Share::SERVICE, block);
            Err(NoTwin::Refused { gpu: own.id.to_string(), reason })
        }
    }
}

/// How NICs reach memory, with its dma-buf if that is how; or why they do not.
fn path_of(
    context: &Context,
    address: DeviceAddress,
    bytes: u64,
    nics: &dyn Nics,
) -> Result<(NicPath, Option<OwnedFd>), String> {
    const HOST_PAGE_BYTES: u64 = 4096;
    let made = dma_buffer(context, address, bytes.next_multiple_of(HOST_PAGE_BYTES) as usize);
    let buffer = made.as_ref().ok();
    // SAFETY: the block is held by the caller, and the dma-buf is of its first bytes.
    let tried = context
        .enter()
        .map_err(|error| error.to_string())
        .and_then(|_entered| unsafe { nics.try_memory(address, bytes, buffer.map(AsFd::as_fd)) });
    match (tried, made) {
        (Ok(GpuAccess::DmaBuffer), Ok(buffer)) => {
            Ok((NicPath { access: NicAccess::DmaBuf, reason: None }, Some(buffer)))
        }
        (Ok(GpuAccess::PeerMemory { by_buffer }), made) => {
            let reason = match (&made, by_buffer) {
                (Err(error), _) => format!("the driver makes no dma-buf: {error}"),
                (Ok(_), Some(errno)) => format!("a NIC does not take its dma-buf: {}", errno.desc()),
                (Ok(_), None) => "a NIC takes no dma-buf".into(),
            };
            Ok((NicPath { access: NicAccess::PeerMemory, reason: Some(reason) }, made.ok()))
        }
        (Ok(GpuAccess::DmaBuffer), Err(error)) => Err(format!("bug: a dma-buf that was not made: {error}")),
        (Err(reason), Err(error)) => Err(format!("{reason}; the driver makes no dma-buf: {error}")),
        (Err(reason), Ok(_)) => Err(reason),
    }
}
