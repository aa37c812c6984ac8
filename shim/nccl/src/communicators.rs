//! Communicators.

use std::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use mccs::cuda::CudaCommunicator;
use mccs::{Client, Error, ReduceOperator, UniqueId};
use mccs_cuda::Context;

use super::group::{begin, joining};
use super::{Status, guard, object, put, status_of};

/// `ncclUniqueId`: the communicator's name, in the first of its bytes.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct NcclUniqueId([u8; 128]);

/// Marks ids that are this library's: another library's name no communicator of ours.
const MARK: [u8; 8] = *b"mccs-id\0";

impl NcclUniqueId {
    fn of(id: UniqueId) -> Self {
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&MARK);
        bytes[8..24].copy_from_slice(&id.0);
        NcclUniqueId(bytes)
    }

    fn id(&self) -> Result<UniqueId, Error> {
        if self.0[..8] != MARK {
            return Err(Error::InvalidArgument(
                "the unique id was not made by this library: does every rank use it?".into(),
            ));
        }
        let mut id = [0; 16];
        id.copy_from_slice(&self.0[8..24]);
        Ok(UniqueId(id))
    }
}

/// Behind `ncclComm_t`.
pub struct Comm {
    /// `None` once it was finalized.
    comm: Mutex<Option<&'static CudaCommunicator>>,
    pub(crate) id: UniqueId,
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
    pub(crate) fn join(id: UniqueId, rank: c_int, nranks: c_int) -> Result<Self, Error> {
        let number = |value: c_int, what: &str| {
            u32::try_from(value).map_err(|_| Error::InvalidArgument(format!("{what} {value} is negative")))
        };
        let (rank, nranks) = (number(rank, "rank")?, number(nranks, "nranks")?);
        let comm = client()?.init_cuda_communicator_rank(id, rank, nranks)?;
        let device = Context::current().map_err(cuda_error)?.gpu().ordinal();
        // Taken back when it is finalized or destroyed; until then threads may be in calls.
        let comm = Mutex::new(Some(&*Box::leak(Box::new(comm))));
        Ok(Comm { comm, id, rank, nranks, device, operators: Mutex::default(), derived: Mutex::new(0), _context: None })
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
    guard(|| unsafe { put(id, NcclUniqueId::of(mccs::unique_id()?), "id") })
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
    guard(|| unsafe { begin(comm, joining(id.id()?, rank, nranks)) })
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
    guard(|| unsafe { begin(comm, joining(id.id()?, rank, nranks)) })
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
        unsafe { begin(comm, joining(id.id()?, rank, nranks)) }
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
