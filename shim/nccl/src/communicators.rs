//! Communicators.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use mccs::cuda::CudaCommunicator;
use mccs::{Client, Error, ReduceOperator, UniqueId};
use mccs_cuda::Context;

use super::group::{begin, joining};
use super::{Status, guard, object, put, status_of};

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
pub(crate) const ROOT_BYTES: usize = 128 - ROOT_AT;

/// What all ranks of a communicator must know of it.
#[derive(Clone, Copy)]
pub(crate) struct Name {
    pub(crate) id: UniqueId,
    pub(crate) root: Root,
}

/// The address of a service, filled up with zeros.
pub(crate) type Root = [u8; ROOT_BYTES];

impl Name {
    /// Of a communicator that is new, with rank 0 in this process.
    pub(crate) fn new() -> Result<Self, Error> {
        Ok(Name { id: mccs::unique_id()?, root: own_root()? })
    }

    /// The address as the service wants it.
    fn root_address(&self) -> Result<&str, Error> {
        let end = self.root.iter().position(|byte| *byte == 0).unwrap_or(ROOT_BYTES);
        std::str::from_utf8(&self.root[..end])
            .map_err(|_| Error::InvalidArgument("the unique id has no root address that is text".into()))
    }
}

/// The address of this process' service, for communicators whose rank 0 is here.
pub(crate) fn own_root() -> Result<Root, Error> {
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
    pub(crate) name: Name,
    pub(crate) rank: u32,
    pub(crate) nranks: u32,
    device: c_int,
    /// Pre-multiplied sums, by number.
    operators: Mutex<Vec<Option<ReduceOperator>>>,
    /// Communicators made of it so far.
    pub(crate) derived: Mutex<u64>,
    /// Kept until it is destroyed, where nobody else may have it.
    _context: Option<Context>,
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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
    pub(crate) fn join(name: Name, rank: c_int, nranks: c_int) -> Result<Self, Error> {
        let number = |value: c_int, what: &str| {
            u32::try_from(value).map_err(|_| Error::InvalidArgument(format!("{what} {value} is negative")))
        };
        let (rank, nranks) = (number(rank, "rank")?, number(nranks, "nranks")?);
        let comm = client()?.init_cuda_communicator_rank_at(name.id, rank, nranks, name.root_address()?)?;
        let device = Context::current().map_err(cuda_error)?.gpu().ordinal();
        // Taken back when it is finalized or destroyed; until then threads may be in calls.
        let comm = Mutex::new(Some(&*Box::leak(Box::new(comm))));
        Ok(Comm {
            comm,
            name,
            rank,
            nranks,
            device,
            operators: Mutex::default(),
            derived: Mutex::new(0),
            _context: None,
        })
    }

    /// With its context, which this library has made current by itself.
    pub(crate) fn keeping(self, context: Context) -> Self {
        Comm { _context: Some(context), ..self }
    }

    /// The communicator.
    pub(crate) fn comm(&self) -> Result<&CudaCommunicator, Error> {
        let comm = *locked(&self.comm);
        comm.ok_or_else(|| Error::InvalidArgument("the communicator has been finalized".into()))
    }

    /// Pre-multiplied sums.
    pub(crate) fn operators(&self) -> MutexGuard<'_, Vec<Option<ReduceOperator>>> {
        locked(&self.operators)
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
}

pub(crate) fn cuda_error(error: mccs_cuda::DriverError) -> Error {
    Error::Cuda(error.to_string())
}

/// See `nccl.h`.
///
/// # Safety
/// The pointer must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut NcclUniqueId) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(id, NcclUniqueId::of(&Name::new()?), "id") })
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
    guard(|| unsafe { begin(comm, joining(id.name()?, rank, nranks)) })
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
    guard(|| unsafe { begin(comm, joining(id.name()?, rank, nranks)) })
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
        unsafe { begin(comm, joining(id.name()?, rank, nranks)) }
    })
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

/// See `nccl.h`: ends what is outstanding, on all ranks. The communicator is to be destroyed, or others to be made of it.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRevoke(comm: *mut Comm, _flags: c_int) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { object(comm, "comm")? }.comm()?.abort())
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
