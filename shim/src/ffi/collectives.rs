//! Collectives on raw addresses.

use std::ffi::c_void;
use std::sync::PoisonError;

use mccs_ipc::types::{DataType, RedOp};

use super::objects::PRE_MUL_FIRST;
use super::{CComm, CStream, SUCCESS, Status, guard, object, span};
use crate::{Communicator, Error, ReduceOperator, Span, Stream};

pub(super) fn data_type(value: i32) -> Result<DataType, Error> {
    let dtype = u32::try_from(value).ok().and_then(DataType::from_wire);
    dtype.ok_or_else(|| Error::argument(format!("data type {value} does not exist")))
}

fn operator(comm: &CComm, value: i32) -> Result<ReduceOperator, Error> {
    let missing = || Error::argument(format!("reduction {value} does not exist"));
    if value >= PRE_MUL_FIRST {
        let scalars = comm.scalars.lock().unwrap_or_else(PoisonError::into_inner);
        let scalar = scalars.get((value - PRE_MUL_FIRST) as usize).copied().flatten();
        return scalar.map(ReduceOperator::PreMulSum).ok_or_else(missing);
    }
    let op = u32::try_from(value).ok().and_then(RedOp::from_wire).filter(|op| *op != RedOp::PreMulSum);
    op.map(ReduceOperator::Standard).ok_or_else(missing)
}

pub(super) fn rank(value: i32) -> Result<u32, Error> {
    u32::try_from(value).map_err(|_| Error::argument(format!("rank {value} is negative")))
}

/// What every call has.
struct Call<'a> {
    comm: &'a Communicator,
    stream: &'a Stream,
    send: Span,
    recv: Span,
}

/// Defines a collective's function: the arguments that only it has, and the call.
macro_rules! collective {
    ($name:ident($($arg:ident: $type:ty),*), count: $count:ident, |$handle:ident, $call:ident, $dtype:ident| $body:expr) => {
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
            comm: *mut CComm,
            stream: *mut CStream,
        ) -> Status {
            guard(|| {
                // SAFETY: the caller's contract.
                let ($handle, stream) = unsafe { (object(comm, "comm")?, object(stream, "stream")?) };
                let client = $handle.comm.client();
                let (send, recv) = (span(client, sendbuff as usize)?, span(client, recvbuff as usize)?);
                let $call = Call { comm: &$handle.comm, stream: &stream.0, send, recv };
                let ($dtype, $count) = (data_type(dtype)?, count as u64);
                $body?;
                Ok(SUCCESS)
            })
        }
    };
}

collective!(mccsAllReduce(op: i32), count: n, |handle, c, dtype| {
    c.comm.all_reduce(c.send, c.recv, n, dtype, operator(handle, op)?, c.stream)
});
collective!(mccsReduceScatter(op: i32), count: n, |handle, c, dtype| {
    c.comm.reduce_scatter(c.send, c.recv, n, dtype, operator(handle, op)?, c.stream)
});
collective!(mccsReduce(op: i32, root: i32), count: n, |handle, c, dtype| {
    c.comm.reduce(c.send, c.recv, n, dtype, operator(handle, op)?, rank(root)?, c.stream)
});
collective!(mccsAllGather(), count: n, |handle, c, dtype| c.comm.all_gather(c.send, c.recv, n, dtype, c.stream));
collective!(mccsAllToAll(), count: n, |handle, c, dtype| c.comm.all_to_all(c.send, c.recv, n, dtype, c.stream));
collective!(mccsBroadcast(root: i32), count: n, |handle, c, dtype| {
    c.comm.broadcast(c.send, c.recv, n, dtype, rank(root)?, c.stream)
});
collective!(mccsGather(root: i32), count: n, |handle, c, dtype| {
    c.comm.gather(c.send, c.recv, n, dtype, rank(root)?, c.stream)
});
collective!(mccsScatter(root: i32), count: n, |handle, c, dtype| {
    c.comm.scatter(c.send, c.recv, n, dtype, rank(root)?, c.stream)
});

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsSend(
    sendbuff: *const c_void,
    count: usize,
    dtype: i32,
    peer: i32,
    comm: *mut CComm,
    stream: *mut CStream,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (handle, stream) = unsafe { (object(comm, "comm")?, object(stream, "stream")?) };
        let send = span(handle.comm.client(), sendbuff as usize)?;
        handle.comm.send(send, count as u64, data_type(dtype)?, rank(peer)?, &stream.0).map(|()| SUCCESS)
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsRecv(
    recvbuff: *mut c_void,
    count: usize,
    dtype: i32,
    peer: i32,
    comm: *mut CComm,
    stream: *mut CStream,
) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (handle, stream) = unsafe { (object(comm, "comm")?, object(stream, "stream")?) };
        let recv = span(handle.comm.client(), recvbuff as usize)?;
        handle.comm.recv(recv, count as u64, data_type(dtype)?, rank(peer)?, &stream.0).map(|()| SUCCESS)
    })
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsBarrier(comm: *mut CComm, stream: *mut CStream) -> Status {
    guard(|| {
        // SAFETY: the caller's contract.
        let (handle, stream) = unsafe { (object(comm, "comm")?, object(stream, "stream")?) };
        handle.comm.barrier(&stream.0).map(|()| SUCCESS)
    })
}
