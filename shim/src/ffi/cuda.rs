//! The C API's communicators of GPUs: calls on device pointers and the caller's own streams.

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mccs_ipc::types::{DataType, UniqueId};

use super::collectives::rank;
use super::operators::{Operators, data_type};
use super::shapes::{collectives, points};
use super::{CClient, SUCCESS, Status, guard, object, put, status_of, text};
use crate::cuda::{CudaCommunicator, CudaStream};
use crate::{Error, ReduceOperator, Scalar};

/// Behind `mccsCudaComm_t`, which is a count of it: calls under way have counts of their own, so that a thread may abort a communicator in
/// which others wait.
pub struct CCudaComm {
    comm: CudaCommunicator,
    /// Whether it was finalized, or is being so.
    is_finalized: AtomicBool,
    operators: Operators,
}

impl CCudaComm {
    /// Leaves, once.
    fn finalize(&self) -> Result<(), Error> {
        if self.is_finalized.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.comm.finalize()
    }

    /// Fails once it was finalized.
    fn check_open(&self) -> Result<(), Error> {
        let finalized = || Error::argument("the communicator has been finalized");
        (!self.is_finalized.load(Ordering::Acquire)).then_some(()).ok_or_else(finalized)
    }

    /// Ends what is outstanding, and leaves.
    fn abort(&self) -> Result<(), Error> {
        let aborted = self.comm.abort();
        if self.is_finalized.load(Ordering::Acquire) {
            // It has left already, or does so now that nothing is outstanding.
            return Ok(());
        }
        self.finalize().and(aborted)
    }
}

/// The communicator behind a handle, for the time of a call.
///
/// # Safety
/// The handle must be null, or come from this library and not have been destroyed.
unsafe fn shared(handle: *mut CCudaComm) -> Result<Arc<CCudaComm>, Error> {
    // SAFETY: the caller's contract.
    unsafe {
        object(handle, "comm")?;
        Arc::increment_strong_count(handle);
        Ok(Arc::from_raw(handle))
    }
}

/// Takes a handle back.
///
/// # Safety
/// As for [`shared`]; the handle is of no use afterwards.
unsafe fn taken(handle: *mut CCudaComm) -> Result<Arc<CCudaComm>, Error> {
    // SAFETY: made by `Arc::into_raw` in this library, and taken once: the caller's contract.
    unsafe { object(handle, "comm").map(|_| Arc::from_raw(handle)) }
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaCommInitRank(
    comm: *mut *mut CCudaComm,
    client: *mut CClient,
    nranks: i32,
    id: *const UniqueId,
    rank: i32,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe { mccsCudaCommInitRankAt(comm, client, nranks, id, rank, std::ptr::null()) }
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaCommInitRankAt(
    comm: *mut *mut CCudaComm,
    client: *mut CClient,
    nranks: i32,
    id: *const UniqueId,
    rank: i32,
    root_address: *const c_char,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (client, id, root) =
            unsafe { (object(client, "client")?, id.as_ref(), text(root_address, "root address")?) };
        let id = id.ok_or_else(|| Error::argument("id is null"))?;
        if comm.is_null() {
            return Err(Error::argument("comm is null"));
        }
        let nranks = u32::try_from(nranks).map_err(|_| Error::argument(format!("nranks {nranks} is negative")))?;
        let (rank, root) = (super::collectives::rank(rank)?, root.unwrap_or_default());
        let joined = client.client.init_cuda_communicator_rank_at(*id, rank, nranks, root)?;
        let (is_finalized, operators) = (AtomicBool::new(false), Operators::default());
        let made = Arc::into_raw(Arc::new(CCudaComm { comm: joined, is_finalized, operators })).cast_mut();
        // SAFETY: the caller's contract.
        unsafe { put(comm, made, "comm") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaCommFinalize(comm: *mut CCudaComm) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { shared(comm) }?.finalize().map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaCommDestroy(comm: *mut CCudaComm) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { taken(comm) }?.finalize().map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaCommAbort(comm: *mut CCudaComm) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { taken(comm) }?.abort().map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaCommIsServed(comm: *mut CCudaComm, is_served: *mut i32) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(is_served, i32::from(shared(comm)?.comm.is_served()), "is_served") })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaCommGetAsyncError(comm: *mut CCudaComm, error: *mut Status) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let failure = unsafe { shared(comm) }?.comm.async_error();
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
pub unsafe extern "C" fn mccsCudaCommCount(comm: *mut CCudaComm, count: *mut i32) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(count, shared(comm)?.comm.nranks() as i32, "count") })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaCommUserRank(comm: *mut CCudaComm, rank: *mut i32) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(rank, shared(comm)?.comm.rank() as i32, "rank") })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaRedOpCreatePreMulSum(
    op: *mut i32,
    scalar: *const c_void,
    dtype: i32,
    is_on_device: i32,
    comm: *mut CCudaComm,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (comm, dtype) = (unsafe { shared(comm) }?, data_type(dtype)?);
        if scalar.is_null() || op.is_null() {
            return Err(Error::argument("scalar or op is null"));
        }
        let operator = match is_on_device {
            // SAFETY: the caller's contract: `scalar` leads to one element of `dtype`.
            0 => ReduceOperator::PreMulSum(unsafe { Scalar::read(scalar, dtype) }),
            _ => ReduceOperator::PreMulSumAt(scalar as u64),
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
pub unsafe extern "C" fn mccsCudaRedOpDestroy(op: i32, comm: *mut CCudaComm) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { shared(comm) }?.operators.remove(op).map(|()| SUCCESS))
}

/// What every call has.
struct Call {
    handle: Arc<CCudaComm>,
    stream: CudaStream,
    send: u64,
    recv: u64,
    count: u64,
    dtype: DataType,
}

/// # Safety
/// The communicator must be null, or come from this library and not have been destroyed.
unsafe fn prepare(
    (comm, stream): (*mut CCudaComm, CudaStream),
    (send, recv): (u64, u64),
    count: u64,
    dtype: i32,
) -> Result<Call, Error> {
    // SAFETY: the caller's contract.
    let handle = unsafe { shared(comm)? };
    handle.check_open()?;
    Ok(Call { handle, stream, send, recv, count, dtype: data_type(dtype)? })
}

collectives! {
    prepare, CCudaComm, c_void;
    mccsCudaAllReduce(op: i32) => |c| {
        c.handle.comm.all_reduce(c.send, c.recv, c.count, c.dtype, c.handle.operators.get(op)?, c.stream)
    };
    mccsCudaReduceScatter(op: i32) => |c| {
        c.handle.comm.reduce_scatter(c.send, c.recv, c.count, c.dtype, c.handle.operators.get(op)?, c.stream)
    };
    mccsCudaReduce(op: i32, root: i32) => |c| {
        c.handle.comm.reduce(c.send, c.recv, c.count, c.dtype, c.handle.operators.get(op)?, rank(root)?, c.stream)
    };
    mccsCudaAllGather() => |c| c.handle.comm.all_gather(c.send, c.recv, c.count, c.dtype, c.stream);
    mccsCudaAllToAll() => |c| c.handle.comm.all_to_all(c.send, c.recv, c.count, c.dtype, c.stream);
    mccsCudaBroadcast(root: i32) => |c| c.handle.comm.broadcast(c.send, c.recv, c.count, c.dtype, rank(root)?, c.stream);
    mccsCudaGather(root: i32) => |c| c.handle.comm.gather(c.send, c.recv, c.count, c.dtype, rank(root)?, c.stream);
    mccsCudaScatter(root: i32) => |c| c.handle.comm.scatter(c.send, c.recv, c.count, c.dtype, rank(root)?, c.stream);
}

points! {
    prepare, CCudaComm, c_void;
    mccsCudaSend(*const c_void) => |c, peer| c.handle.comm.send(c.send, c.count, c.dtype, peer, c.stream);
    mccsCudaRecv(*mut c_void) => |c, peer| c.handle.comm.recv(c.recv, c.count, c.dtype, peer, c.stream);
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaBarrier(comm: *mut CCudaComm, stream: CudaStream) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        let comm = shared(comm)?;
        comm.check_open()?;
        comm.comm.barrier(0, 0, 0, DataType::U8, stream).map(|()| SUCCESS)
    })
}
