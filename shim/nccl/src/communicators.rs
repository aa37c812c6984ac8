//! Communicators.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use mccs::cuda::CudaCommunicator;
use mccs::{Client, Error, Scalar, UniqueId};
use mccs_cuda::{Context, DeviceMemory, OwnedStream, copy_from_host, copy_to_host};

use super::{Status, absent, guard, object, put, status_of};

/// `ncclUniqueId`: the communicator's name and its root's address, behind a mark.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct NcclUniqueId([u8; 128]);

/// Marks ids that are this library's: another library's name no communicator of ours.
const MARK: [u8; 8] = *b"mccs-id\0";

impl NcclUniqueId {
    fn of(name: &Name) -> Self {
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&MARK);
        bytes[8..24].copy_from_slice(&name.id.0);
        bytes[ROOT_AT..].copy_from_slice(&name.root);
        NcclUniqueId(bytes)
    }

    fn name(&self) -> Result<Name, Error> {
        if self.0[..8] != MARK {
            return Err(Error::InvalidArgument(
                "the unique id was not made by this library: does every rank use it?".into(),
            ));
        }
        let mut name = Name { id: UniqueId([0; 16]), root: [0; ROOT_BYTES] };
        name.id.0.copy_from_slice(&self.0[8..24]);
        name.root.copy_from_slice(&self.0[ROOT_AT..]);
        Ok(name)
    }
}

/// Where the root's address begins in an id.
const ROOT_AT: usize = 24;
/// Room for a root's address: the name of a host, filled up with zeros.
const ROOT_BYTES: usize = 128 - ROOT_AT;

/// What all ranks of a communicator must know of it.
#[derive(Clone, Copy)]
struct Name {
    id: UniqueId,
    root: [u8; ROOT_BYTES],
}

impl Name {
    /// The address as the service wants it.
    fn root_address(&self) -> Result<&str, Error> {
        let end = self.root.iter().position(|byte| *byte == 0).unwrap_or(ROOT_BYTES);
        std::str::from_utf8(&self.root[..end])
            .map_err(|_| Error::InvalidArgument("the unique id has no root address that is text".into()))
    }
}

/// The address of this process' service, for communicators whose rank 0 is here.
fn own_root() -> Result<[u8; ROOT_BYTES], Error> {
    let (client, mut root) = (client()?, [0; ROOT_BYTES]);
    let address = client.root_address().as_bytes();
    let too_long = || Error::InvalidArgument("the service's name is too long for a unique id".into());
    root.get_mut(..address.len()).ok_or_else(too_long)?.copy_from_slice(address);
    Ok(root)
}

/// Behind `ncclComm_t`.
pub struct Comm {
    /// `None` once it was finalized.
    comm: Mutex<Option<&'static CudaCommunicator>>,
    name: Name,
    rank: u32,
    nranks: u32,
    device: c_int,
    /// Factors of pre-multiplied sums, by number.
    scalars: Mutex<Vec<Option<Scalar>>>,
    /// Communicators split off so far.
    splits: Mutex<u64>,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This process' session, made when it is first needed.
fn client() -> Result<Client, Error> {
    static CLIENT: Mutex<Option<Client>> = Mutex::new(None);
    let mut client = locked(&CLIENT);
    if let Some(client) = &*client {
        return Ok(client.clone());
    }
    let made = Client::from_env()?;
    Ok(client.insert(made).clone())
}

impl Comm {
    fn join(name: Name, rank: c_int, nranks: c_int) -> Result<Self, Error> {
        let number = |value: c_int, what: &str| {
            u32::try_from(value).map_err(|_| Error::InvalidArgument(format!("{what} {value} is negative")))
        };
        let (rank, nranks) = (number(rank, "rank")?, number(nranks, "nranks")?);
        let comm = client()?.init_cuda_communicator_rank_at(name.id, rank, nranks, name.root_address()?)?;
        let device = Context::current().map_err(cuda_error)?.gpu().ordinal();
        // Taken back when it is finalized or destroyed; until then threads may be in calls.
        let comm = Mutex::new(Some(&*Box::leak(Box::new(comm))));
        Ok(Comm { comm, name, rank, nranks, device, scalars: Mutex::default(), splits: Mutex::new(0) })
    }

    /// The communicator.
    pub(crate) fn comm(&self) -> Result<&CudaCommunicator, Error> {
        let comm = *locked(&self.comm);
        comm.ok_or_else(|| Error::InvalidArgument("the communicator has been finalized".into()))
    }

    /// Factors of pre-multiplied sums.
    pub(crate) fn scalars(&self) -> MutexGuard<'_, Vec<Option<Scalar>>> {
        locked(&self.scalars)
    }

    /// Leaves, once.
    ///
    /// # Safety
    /// No other call on the communicator may be under way.
    unsafe fn leave(&self) -> Result<(), Error> {
        let Some(comm) = locked(&self.comm).take() else { return Ok(()) };
        // SAFETY: leaked when it was made, taken back once; nobody uses it: the caller's contract.
        let comm = unsafe { Box::from_raw(std::ptr::from_ref(comm).cast_mut()) };
        comm.destroy()
    }

    /// All ranks' bytes, of which each has as many, by rank.
    fn gather(&self, own: &[u8]) -> Result<Vec<u8>, Error> {
        let context = Context::current().map_err(cuda_error)?;
        let (stream, bytes) = (OwnedStream::new(&context).map_err(cuda_error)?, own.len() * self.nranks as usize);
        let memory = DeviceMemory::zeroed(&context, own.len() + bytes).map_err(cuda_error)?;
        let (send, recv) = (memory.address() + bytes as u64, memory.address());
        let mut all = vec![0; bytes];
        // SAFETY: the ranges lie in memory of this function's, which is used by nobody else and outlives the operation.
        unsafe {
            copy_from_host(send, own).map_err(cuda_error)?;
            self.comm()?.all_gather(send, recv, own.len() as u64, mccs::DataType::U8, stream.raw().as_ptr())?;
            stream.raw().synchronize().map_err(cuda_error)?;
            copy_to_host(&mut all, recv).map_err(cuda_error)?;
        }
        if let Some(error) = self.comm()?.async_error() {
            return Err(error);
        }
        Ok(all)
    }

    /// What every rank says when the communicator is split, by rank.
    fn gather_shares(&self, color: c_int, key: c_int) -> Result<Vec<Share>, Error> {
        let mut own = [0; SHARE_BYTES];
        own[..4].copy_from_slice(&color.to_le_bytes());
        own[4..8].copy_from_slice(&key.to_le_bytes());
        own[8..].copy_from_slice(&own_root()?);
        let number = |bytes: &[u8]| c_int::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        let share = |bytes: &[u8]| {
            let mut root = [0; ROOT_BYTES];
            root.copy_from_slice(&bytes[8..]);
            Share { color: number(bytes), key: number(&bytes[4..]), root }
        };
        Ok(self.gather(&own)?.chunks_exact(SHARE_BYTES).map(share).collect())
    }
}

/// What a rank says when its communicator is split.
struct Share {
    color: c_int,
    key: c_int,
    /// Of a communicator of which it becomes rank 0.
    root: [u8; ROOT_BYTES],
}

/// A share, as it is sent.
const SHARE_BYTES: usize = 8 + ROOT_BYTES;

fn cuda_error(error: mccs_cuda::DriverError) -> Error {
    Error::Cuda(error.to_string())
}

/// A communicator to be made at the end of a group.
struct Pending {
    name: Name,
    rank: c_int,
    nranks: c_int,
    context: Context,
    target: *mut *mut Comm,
}

#[derive(Default)]
struct Group {
    depth: u32,
    pending: Vec<Pending>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

pub(crate) fn group_start() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Makes what was begun: each on a thread, since ranks of one process wait for each other.
pub(crate) fn group_end() -> Result<(), Error> {
    let pending = GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.saturating_sub(1);
        if group.depth == 0 { std::mem::take(&mut group.pending) } else { Vec::new() }
    });
    let join = |pending: &Pending| {
        let (name, rank, nranks, context) = (pending.name, pending.rank, pending.nranks, pending.context.clone());
        std::thread::spawn(move || {
            let _entered = context.enter().map_err(cuda_error)?;
            Comm::join(name, rank, nranks)
        })
    };
    let threads: Vec<_> = pending.iter().map(join).collect();
    let mut result = Ok(());
    for (thread, Pending { target, .. }) in threads.into_iter().zip(&pending) {
        let joined = thread.join().unwrap_or_else(|_| Err(Error::System("a thread of this library panicked".into())));
        // SAFETY: who begins a communicator in a group keeps its place to the group's end.
        let placed = joined.and_then(|comm| unsafe { put(*target, Box::into_raw(Box::new(comm)), "comm") });
        result = result.and(placed);
    }
    result
}

/// # Safety
/// The pointer must be null or valid for a write, to the end of a group if there is one.
unsafe fn begin(target: *mut *mut Comm, name: Name, rank: c_int, nranks: c_int) -> Result<(), Error> {
    if target.is_null() {
        return Err(Error::InvalidArgument("comm is null".into()));
    }
    if GROUP.with_borrow(|group| group.depth > 0) {
        mccs_cuda::driver().map_err(|reason| Error::Cuda(reason.to_string()))?;
        let context = Context::current().map_err(cuda_error)?;
        GROUP.with_borrow_mut(|group| group.pending.push(Pending { name, rank, nranks, context, target }));
        return Ok(());
    }
    let comm = Comm::join(name, rank, nranks)?;
    // SAFETY: the caller's contract.
    unsafe { put(target, Box::into_raw(Box::new(comm)), "comm") }
}

/// See `nccl.h`.
///
/// # Safety
/// The pointer must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut NcclUniqueId) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(id, NcclUniqueId::of(&Name { id: mccs::unique_id()?, root: own_root()? }), "id") })
}

/// See `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(
    comm: *mut *mut Comm,
    nranks: c_int,
    id: NcclUniqueId,
    rank: c_int,
) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { begin(comm, id.name()?, rank, nranks) })
}

/// See `nccl.h`. The operator's strategy decides what the configuration would.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut *mut Comm,
    nranks: c_int,
    id: NcclUniqueId,
    rank: c_int,
    _config: *mut c_void,
) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { begin(comm, id.name()?, rank, nranks) })
}

/// See `nccl.h`: the first of the ids does.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankScalable(
    comm: *mut *mut Comm,
    nranks: c_int,
    rank: c_int,
    ids: c_int,
    id: *mut NcclUniqueId,
    _config: *mut c_void,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let id = unsafe { id.as_ref() }.filter(|_| ids > 0);
        let id = id.ok_or_else(|| Error::InvalidArgument("there is no unique id".into()))?;
        // SAFETY: the caller's contract.
        unsafe { begin(comm, id.name()?, rank, nranks) }
    })
}

/// Not there.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommInitAll(_comms: *mut *mut Comm, _devices: c_int, _list: *const c_int) -> Status {
    guard(|| Err(absent("ncclCommInitAll: begin each rank with ncclCommInitRank in a group")))
}

/// See `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    comm: *mut Comm,
    color: c_int,
    key: c_int,
    new: *mut *mut Comm,
    _config: *mut c_void,
) -> Status {
    const NO_COLOR: c_int = -1;
    guard(|| {
        // SAFETY: the caller's contract.
        let parent = unsafe { object(comm, "comm")? };
        let number = {
            let mut splits = locked(&parent.splits);
            *splits += 1;
            *splits
        };
        let all = parent.gather_shares(color, key)?;
        if color == NO_COLOR {
            // SAFETY: the caller's contract.
            return unsafe { put(new, std::ptr::null_mut(), "newcomm") };
        }
        let mut members: Vec<_> = all.iter().enumerate().filter(|(_, share)| share.color == color).collect();
        members.sort_by_key(|(rank, share)| (share.key, *rank));
        let own = members.iter().position(|(rank, _)| *rank == parent.rank as usize).unwrap_or(0);
        let root = members.first().map_or(parent.name.root, |(_, share)| share.root);
        let name = Name { id: split_id(parent.name.id, number, color), root };
        // SAFETY: the caller's contract.
        unsafe { begin(new, name, own as c_int, members.len() as c_int) }
    })
}

/// The name of what is split off: the same on all its ranks, and no other communicator's. 128 bits of FNV-1a.
fn split_id(parent: UniqueId, number: u64, color: c_int) -> UniqueId {
    const BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let bytes = parent.0.into_iter().chain(number.to_le_bytes()).chain(color.to_le_bytes());
    UniqueId(bytes.fold(BASIS, |hash, byte| (hash ^ u128::from(byte)).wrapping_mul(PRIME)).to_le_bytes())
}

/// Not there.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommShrink(
    _comm: *mut Comm,
    _without: *mut c_int,
    _count: c_int,
    _new: *mut *mut Comm,
    _config: *mut c_void,
    _flags: c_int,
) -> Status {
    guard(|| Err(absent("ncclCommShrink")))
}

/// See `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(comm: *mut Comm) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { object(comm, "comm")?.leave() })
}

/// See `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says; the handle is of no use afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: *mut Comm) -> Status {
    guard(|| {
        if comm.is_null() {
            return Ok(());
        }
        // SAFETY: made by `Box::into_raw` in this library, and taken once: the caller's contract.
        unsafe { Box::from_raw(comm).leave() }
    })
}

/// See `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says; the handle is of no use afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: *mut Comm) -> Status {
    guard(|| {
        if comm.is_null() {
            return Ok(());
        }
        // SAFETY: made by `Box::into_raw` in this library, and taken once: the caller's contract.
        let comm = unsafe { Box::from_raw(comm) };
        let aborted = comm.comm().and_then(CudaCommunicator::abort);
        // SAFETY: the caller's contract.
        unsafe { comm.leave() }.and(aborted)
    })
}

/// See `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: *mut Comm, error: *mut Status) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let comm = unsafe { object(comm, "comm")? };
        let failure = locked(&comm.comm).and_then(CudaCommunicator::async_error);
        if let Some(failure) = &failure {
            super::remember(&failure.to_string());
        }
        // SAFETY: the caller's contract.
        unsafe { put(error, failure.as_ref().map_or(super::SUCCESS, status_of), "asyncError") }
    })
}

/// Defines a question about a communicator.
macro_rules! question {
    ($name:ident, |$comm:ident| $answer:expr) => {
        /// See `nccl.h`.
        ///
        /// # Safety
        /// Pointers as `nccl.h` says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(comm: *const Comm, answer: *mut c_int) -> Status {
            guard(|| {
                // SAFETY: the caller's contract.
                let $comm = unsafe { object(comm.cast_mut(), "comm")? };
                // SAFETY: the caller's contract.
                unsafe { put(answer, $answer, "the answer") }
            })
        }
    };
}

question!(ncclCommCount, |comm| comm.nranks as c_int);
question!(ncclCommUserRank, |comm| comm.rank as c_int);
question!(ncclCommCuDevice, |comm| comm.device);
