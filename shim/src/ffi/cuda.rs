//! The C API's communicators of GPUs: calls on device pointers and the caller's own streams.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use mccs_ipc::types::{RedOp, UniqueId};

use super::collectives::{data_type, rank};
use super::objects::{PRE_MUL_FIRST, take};
use super::{CClient, SUCCESS, Status, guard, object, put, status_of};
use crate::cuda::CudaCommunicator;
use crate::{Error, ReduceOperator, Scalar};

/// Behind `mccsCudaComm_t`.
pub struct CCudaComm {
    comm: CudaCommunicator,
    /// Pre-multiplied sums; operator number `PRE_MUL_FIRST + index`.
    operators: Mutex<Vec<Option<ReduceOperator>>>,
}

fn operator(comm: &CCudaComm, value: i32) -> Result<ReduceOperator, Error> {
    let missing = || Error::argument(format!("reduction {value} does not exist"));
    if value >= PRE_MUL_FIRST {
        let operators = comm.operators.lock().unwrap_or_else(PoisonError::into_inner);
        return operators.get((value - PRE_MUL_FIRST) as usize).copied().flatten().ok_or_else(missing);
    }
    let op = u32::try_from(value).ok().and_then(RedOp::from_wire).filter(|op| *op != RedOp::PreMulSum);
    op.map(ReduceOperator::Standard).ok_or_else(missing)
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
        let made = Box::into_raw(Box::new(CCudaComm { comm: joined, operators: Mutex::default() }));
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
        let mut operators = comm.operators.lock().unwrap_or_else(PoisonError::into_inner);
        let index = operators.iter().position(Option::is_none).unwrap_or(operators.len());
        match operators.get_mut(index) {
            Some(slot) => *slot = Some(operator),
            None => operators.push(Some(operator)),
        }
        // SAFETY: the caller's contract.
        unsafe { put(op, PRE_MUL_FIRST + index as i32, "op") }
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaRedOpDestroy(op: i32, comm: *mut CCudaComm) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let comm = unsafe { object(comm, "comm") }?;
        let mut operators = comm.operators.lock().unwrap_or_else(PoisonError::into_inner);
        let index = op.checked_sub(PRE_MUL_FIRST).and_then(|index| usize::try_from(index).ok());
        let taken = index.and_then(|index| operators.get_mut(index)).and_then(Option::take);
        taken.map(|_| SUCCESS).ok_or_else(|| Error::argument(format!("there is no operator {op} to destroy")))
    })
}

/// Defines a collective's function: the arguments that only it has, and the call.
macro_rules! collective {
    ($name:ident($($arg:ident: $type:ty),*), |$c:ident, $send:ident, $recv:ident, $count:ident, $dtype:ident, $stream:ident| $body:expr) => {
        /// See `mccs.h`.
        ///
        /// # Safety
        /// Pointers as `mccs.h` says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            sendbuff: *const c_void,
            recvbuff: *mut c_void,
            count: usize,
            dtype: i32,
            $($arg: $type,)*
            comm: *mut CCudaComm,
            $stream: *mut c_void,
        ) -> Status {
            guard(|| {
                // SAFETY: the caller's contract.
                let $c = unsafe { object(comm, "comm")? };
                let ($send, $recv, $count, $dtype) = (sendbuff as u64, recvbuff as u64, count as u64, data_type(dtype)?);
                // SAFETY: buffers and stream are the caller's contract.
                unsafe { $body }.map(|()| SUCCESS)
            })
        }
    };
}

collective!(mccsCudaAllReduce(op: i32), |c, send, recv, count, dtype, stream| {
    c.comm.all_reduce(send, recv, count, dtype, operator(c, op)?, stream)
});
collective!(mccsCudaReduceScatter(op: i32), |c, send, recv, count, dtype, stream| {
    c.comm.reduce_scatter(send, recv, count, dtype, operator(c, op)?, stream)
});
collective!(mccsCudaReduce(op: i32, root: i32), |c, send, recv, count, dtype, stream| {
    c.comm.reduce(send, recv, count, dtype, operator(c, op)?, rank(root)?, stream)
});
collective!(mccsCudaAllGather(), |c, send, recv, count, dtype, stream| {
    c.comm.all_gather(send, recv, count, dtype, stream)
});
collective!(mccsCudaAllToAll(), |c, send, recv, count, dtype, stream| {
    c.comm.all_to_all(send, recv, count, dtype, stream)
});
collective!(mccsCudaBroadcast(root: i32), |c, send, recv, count, dtype, stream| {
    c.comm.broadcast(send, recv, count, dtype, rank(root)?, stream)
});
collective!(mccsCudaGather(root: i32), |c, send, recv, count, dtype, stream| {
    c.comm.gather(send, recv, count, dtype, rank(root)?, stream)
});
collective!(mccsCudaScatter(root: i32), |c, send, recv, count, dtype, stream| {
    c.comm.scatter(send, recv, count, dtype, rank(root)?, stream)
});

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaBarrier(comm: *mut CCudaComm, stream: *mut c_void) -> Status {
    // SAFETY: the caller's contract.
    guard(|| unsafe { object(comm, "comm")?.comm.barrier(0, 0, 0, crate::DataType::U8, stream).map(|()| SUCCESS) })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaSend(
    sendbuff: *const c_void,
    count: usize,
    dtype: i32,
    peer: i32,
    comm: *mut CCudaComm,
    stream: *mut c_void,
) -> Status {
    // SAFETY: handles, buffer and stream are the caller's contract.
    guard(|| unsafe {
        let comm = &object(comm, "comm")?.comm;
        comm.send(sendbuff as u64, count as u64, data_type(dtype)?, rank(peer)?, stream).map(|()| SUCCESS)
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsCudaRecv(
    recvbuff: *mut c_void,
    count: usize,
    dtype: i32,
    peer: i32,
    comm: *mut CCudaComm,
    stream: *mut c_void,
) -> Status {
    // SAFETY: handles, buffer and stream are the caller's contract.
    guard(|| unsafe {
        let comm = &object(comm, "comm")?.comm;
        comm.recv(recvbuff as u64, count as u64, data_type(dtype)?, rank(peer)?, stream).map(|()| SUCCESS)
    })
}
