//! The C API's communicators of GPUs: calls on device pointers and the caller's own streams.

use std::ffi::c_void;

use mccs_ipc::types::{DataType, UniqueId};

use super::collectives::rank;
use super::objects::take;
use super::operators::{Operators, data_type};
use super::shapes::{collectives, points};
use super::{CClient, SUCCESS, Status, guard, object, put, status_of};
use crate::cuda::{CudaCommunicator, CudaStream};
use crate::{Error, ReduceOperator, Scalar};

/// Behind `mccsCudaComm_t`.
pub struct CCudaComm {
    comm: CudaCommunicator,
    operators: Operators,
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
    guard(|| {
        // SAFETY: the caller's contract.
        let (client, id) = unsafe { (object(client, "client")?, id.as_ref()) };
        let id = id.ok_or_else(|| Error::argument("id is null"))?;
        if comm.is_null() {
            return Err(Error::argument("comm is null"));
        }
        let nranks = u32::try_from(nranks).map_err(|_| Error::argument(format!("nranks {nranks} is negative")))?;
        let joined = client.client.init_cuda_communicator_rank(*id, super::collectives::rank(rank)?, nranks)?;
        let made = Box::into_raw(Box::new(CCudaComm { comm: joined, operators: Operators::default() }));
        // SAFETY: the caller's contract.
        unsafe { put(comm, made, "comm") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaCommDestroy(comm: *mut CCudaComm) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { take(comm, "comm") }?.comm.destroy().map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaCommAbort(comm: *mut CCudaComm) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { take(comm, "comm") }?.comm.abort().map(|()| SUCCESS))
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaCommGetAsyncError(comm: *mut CCudaComm, error: *mut Status) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let failure = unsafe { object(comm, "comm") }?.comm.async_error();
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
    guard(|| unsafe { put(count, object(comm, "comm")?.comm.nranks() as i32, "count") })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaCommUserRank(comm: *mut CCudaComm, rank: *mut i32) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { put(rank, object(comm, "comm")?.comm.rank() as i32, "rank") })
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
        let (comm, dtype) = (unsafe { object(comm, "comm") }?, data_type(dtype)?);
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
    guard(|| unsafe { object(comm, "comm") }?.operators.remove(op).map(|()| SUCCESS))
}

/// What every call has.
struct Call<'a> {
    handle: &'a CCudaComm,
    comm: &'a CudaCommunicator,
    stream: CudaStream,
    send: u64,
    recv: u64,
    count: u64,
    dtype: DataType,
}

/// # Safety
/// The communicator must be null, or come from this library and not have been destroyed.
unsafe fn prepare<'a>(
    (comm, stream): (*mut CCudaComm, CudaStream),
    (send, recv): (u64, u64),
    count: u64,
    dtype: i32,
) -> Result<Call<'a>, Error> {
    // SAFETY: the caller's contract.
    let handle = unsafe { object(comm, "comm")? };
    Ok(Call { handle, comm: &handle.comm, stream, send, recv, count, dtype: data_type(dtype)? })
}

collectives! {
    prepare, CCudaComm, c_void;
    mccsCudaAllReduce(op: i32) => |c| {
        c.comm.all_reduce(c.send, c.recv, c.count, c.dtype, c.handle.operators.get(op)?, c.stream)
    };
    mccsCudaReduceScatter(op: i32) => |c| {
        c.comm.reduce_scatter(c.send, c.recv, c.count, c.dtype, c.handle.operators.get(op)?, c.stream)
    };
    mccsCudaReduce(op: i32, root: i32) => |c| {
        c.comm.reduce(c.send, c.recv, c.count, c.dtype, c.handle.operators.get(op)?, rank(root)?, c.stream)
    };
    mccsCudaAllGather() => |c| c.comm.all_gather(c.send, c.recv, c.count, c.dtype, c.stream);
    mccsCudaAllToAll() => |c| c.comm.all_to_all(c.send, c.recv, c.count, c.dtype, c.stream);
    mccsCudaBroadcast(root: i32) => |c| c.comm.broadcast(c.send, c.recv, c.count, c.dtype, rank(root)?, c.stream);
    mccsCudaGather(root: i32) => |c| c.comm.gather(c.send, c.recv, c.count, c.dtype, rank(root)?, c.stream);
    mccsCudaScatter(root: i32) => |c| c.comm.scatter(c.send, c.recv, c.count, c.dtype, rank(root)?, c.stream);
}

points! {
    prepare, CCudaComm, c_void;
    mccsCudaSend(*const c_void) => |c, peer| c.comm.send(c.send, c.count, c.dtype, peer, c.stream);
    mccsCudaRecv(*mut c_void) => |c, peer| c.comm.recv(c.recv, c.count, c.dtype, peer, c.stream);
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaBarrier(comm: *mut CCudaComm, stream: CudaStream) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { object(comm, "comm")?.comm.barrier(0, 0, 0, DataType::U8, stream).map(|()| SUCCESS) })
}
