//! C API: communicators (`mccsCommInitRank` and kin), asynchronous errors, pre-multiplied sums.

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use mccs::bindings::JoiningRank;
use mccs::cuda::CudaCommunicator;
use mccs::{Communicator, CommunicatorBuilder, Error, ReduceOperator, Scalar, UniqueId};

use super::handle::{Kind, handle_of, object, take};
use super::operators::{Operators, data_type};
use super::{CClient, PendingJoin, SUCCESS, Status, guard, guard_in_group, of_thread, put, rank, status_of, text};

/// Behind `mccsComm_t`. A thread may abort a communicator in which others wait.
pub struct CComm {
    pub(super) memory: Memory,
    /// Whether it was finalized, or is being so.
    is_finalized: AtomicBool,
    pub(super) operators: Operators,
}

/// Place of buffers (`mccsMemory_t`).
pub(super) enum Memory {
    Host(Communicator),
    Cuda(CudaCommunicator),
}

/// Numbers of `mccsMemory_t`.
const HOST: i32 = 0;
const CUDA: i32 = 1;
/// Numbers of `mccsScalarResidence_t`.
const SCALAR_DEVICE: i32 = 0;
const SCALAR_HOST: i32 = 1;

impl Kind for CComm {
    const WORD: &'static str = "communicator";
}

impl CComm {
    /// A handle of a communicator.
    pub(super) fn handle_of(memory: Memory) -> Result<*mut CComm, Error> {
        let (is_finalized, operators) = (AtomicBool::new(false), Operators::default());
        handle_of(CComm { memory, is_finalized, operators })
    }

    /// Leaves, once.
    fn finalize(&self) -> Result<(), Error> {
        if self.is_finalized.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        match &self.memory {
            Memory::Host(comm) => comm.leave(),
            Memory::Cuda(comm) => comm.finalize(),
        }
    }

    /// Fails once it was finalized.
    pub(super) fn check_open(&self) -> Result<(), Error> {
        let finalized = || Error::argument("the communicator has been finalized");
        (!self.is_finalized.load(Ordering::Acquire)).then_some(()).ok_or_else(finalized)
    }

    /// Ends what is outstanding, and leaves.
    fn abort(&self) -> Result<(), Error> {
        let aborted = match &self.memory {
            // It leaves with the last count of it, without waiting.
            Memory::Host(comm) => return comm.abort(),
            Memory::Cuda(comm) => comm.abort(),
        };
        if self.is_finalized.load(Ordering::Acquire) {
            // It has left already, or does so now that nothing is outstanding.
            return Ok(());
        }
        self.finalize().and(aborted)
    }

    fn async_error(&self) -> Option<Error> {
        match &self.memory {
            Memory::Host(comm) => comm.async_error(),
            Memory::Cuda(comm) => comm.async_error(),
        }
    }

    /// Its rank, and how many there are.
    fn place(&self) -> (u32, u32) {
        match &self.memory {
            Memory::Host(comm) => (comm.rank(), comm.nranks()),
            Memory::Cuda(comm) => (comm.rank(), comm.nranks()),
        }
    }
}

/// A rank that is about to join, as C names it.
///
/// # Safety
/// Pointers as `mccs.h` says.
pub(super) unsafe fn builder(
    client: *mut CClient,
    own_rank: i32,
    nranks: i32,
    id: *const UniqueId,
    root_address: *const c_char,
) -> Result<CommunicatorBuilder, Error> {
    // SAFETY: the caller's contract.
    let (id, root) = unsafe { (id.as_ref(), text(root_address, "root address")?) };
    let client = object(client, "client")?;
    let id = id.ok_or_else(|| Error::argument("id is null"))?;
    let nranks = u32::try_from(nranks).map_err(|_| Error::argument(format!("nranks {nranks} is negative")))?;
    let builder = client.client.communicator(*id, rank(own_rank)?, nranks).root_address(root);
    Ok(match client.init_timeout() {
        Some(timeout) => builder.timeout(timeout),
        None => builder,
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCommInitRank(
    comm: *mut *mut CComm,
    client: *mut CClient,
    nranks: i32,
    id: *const UniqueId,
    own_rank: i32,
    memory: i32,
    root_address: *const c_char,
) -> Status {
    guard_in_group(|| {
        if comm.is_null() {
            return Err(Error::argument("comm is null"));
        }
        // SAFETY: the caller's contract.
        let builder = unsafe { builder(client, own_rank, nranks, id, root_address) }?;
        let made = match memory {
            HOST => {
                let join = PendingJoin { rank: JoiningRank::announce(builder)?, target: comm };
                if of_thread(|thread| thread.group_depth > 0)? {
                    // SAFETY: the caller's contract, which `null` has been excluded from above. It stays so where the join fails.
                    unsafe { comm.write(std::ptr::null_mut()) };
                    return of_thread(|thread| thread.joins.push(join)).map(|()| SUCCESS);
                }
                Memory::Host(join.rank.finish()?)
            }
            CUDA => Memory::Cuda(builder.join_cuda()?),
            other => return Err(Error::argument(format!("memory {other} is neither the host's nor a GPU's"))),
        };
        // SAFETY: the caller's contract.
        unsafe { put(comm, CComm::handle_of(made)?, "comm") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCommFinalize(comm: *mut CComm) -> Status {
    guard(|| object(comm, "comm")?.finalize().map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCommDestroy(comm: *mut CComm) -> Status {
    guard(|| take(comm, "comm")?.finalize().map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCommAbort(comm: *mut CComm) -> Status {
    guard(|| take(comm, "comm")?.abort().map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCommIsServiceExecuted(comm: *mut CComm, is_service_executed: *mut i32) -> Status {
    guard(|| {
        let is = match &object(comm, "comm")?.memory {
            Memory::Host(_) => true,
            Memory::Cuda(comm) => comm.is_service_executed(),
        };
        // SAFETY: the caller's contract.
        unsafe { put(is_service_executed, i32::from(is), "is_service_executed") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCommGetAsyncError(comm: *mut CComm, error: *mut Status) -> Status {
    guard(|| {
        let failure = object(comm, "comm")?.async_error();
        if let Some(failure) = &failure {
            super::remember(&failure.to_string());
        }
        // SAFETY: the caller's contract.
        unsafe { put(error, failure.as_ref().map_or(SUCCESS, status_of), "error") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCommCount(comm: *mut CComm, count: *mut i32) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(count, object(comm, "comm")?.place().1 as i32, "count") })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCommUserRank(comm: *mut CComm, rank: *mut i32) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(rank, object(comm, "comm")?.place().0 as i32, "rank") })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsRedOpCreatePreMulSum(
    op: *mut i32,
    scalar: *const c_void,
    dtype: i32,
    residence: i32,
    comm: *mut CComm,
) -> Status {
    guard(|| {
        let (comm, dtype) = (object(comm, "comm")?, data_type(dtype)?);
        if scalar.is_null() || op.is_null() {
            return Err(Error::argument("scalar or op is null"));
        }
        let operator = match (residence, &comm.memory) {
            // SAFETY: the caller's contract: `scalar` leads to one element of `dtype`.
            (SCALAR_HOST, _) => ReduceOperator::PreMulSum(unsafe { Scalar::read(scalar, dtype) }),
            (SCALAR_DEVICE, Memory::Cuda(_)) => ReduceOperator::PreMulSumAt(scalar as u64),
            (SCALAR_DEVICE, Memory::Host(_)) => {
                return Err(Error::argument("a scalar in a GPU's memory is for communicators of GPUs"));
            }
            (other, _) => return Err(Error::argument(format!("residence {other} of a scalar does not exist"))),
        };
        // SAFETY: the caller's contract.
        unsafe { put(op, comm.operators.add(operator), "op") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsRedOpDestroy(op: i32, comm: *mut CComm) -> Status {
    guard(|| object(comm, "comm")?.operators.remove(op).map(|()| SUCCESS))
}
