//! Collectives on raw addresses.

use std::ffi::c_void;

use mccs_ipc::types::DataType;

use super::operators::data_type;
use super::shapes::{collectives, points};
use super::{CComm, CStream, SUCCESS, Status, guard, object, span};
use crate::{Communicator, Error, Span, Stream};

pub(super) fn rank(value: i32) -> Result<u32, Error> {
    u32::try_from(value).map_err(|_| Error::argument(format!("rank {value} is negative")))
}

/// What every call has.
struct Call<'a> {
    handle: &'a CComm,
    comm: &'a Communicator,
    stream: &'a Stream,
    send: Span,
    recv: Span,
    count: u64,
    dtype: DataType,
}

/// # Safety
/// Handles must be null, or come from this library and not have been destroyed.
unsafe fn prepare<'a>(
    (comm, stream): (*mut CComm, *mut CStream),
    (send, recv): (u64, u64),
    count: u64,
    dtype: i32,
) -> Result<Call<'a>, Error> {
    // SAFETY: the caller's contract.
    let (handle, stream) = unsafe { (object(comm, "comm")?, &object(stream, "stream")?.0) };
    let comm = &handle.comm;
    let (send, recv) = (span(comm.client(), send as usize), span(comm.client(), recv as usize));
    Ok(Call { handle, comm, stream, send, recv, count, dtype: data_type(dtype)? })
}

collectives! {
    prepare, CComm, CStream;
    mccsAllReduce(op: i32) => |c| {
        c.comm.all_reduce(c.send, c.recv, c.count, c.dtype, c.handle.operators.get(op)?, c.stream)
    };
    mccsReduceScatter(op: i32) => |c| {
        c.comm.reduce_scatter(c.send, c.recv, c.count, c.dtype, c.handle.operators.get(op)?, c.stream)
    };
    mccsReduce(op: i32, root: i32) => |c| {
        c.comm.reduce(c.send, c.recv, c.count, c.dtype, c.handle.operators.get(op)?, rank(root)?, c.stream)
    };
    mccsAllGather() => |c| c.comm.all_gather(c.send, c.recv, c.count, c.dtype, c.stream);
    mccsAllToAll() => |c| c.comm.all_to_all(c.send, c.recv, c.count, c.dtype, c.stream);
    mccsBroadcast(root: i32) => |c| c.comm.broadcast(c.send, c.recv, c.count, c.dtype, rank(root)?, c.stream);
    mccsGather(root: i32) => |c| c.comm.gather(c.send, c.recv, c.count, c.dtype, rank(root)?, c.stream);
    mccsScatter(root: i32) => |c| c.comm.scatter(c.send, c.recv, c.count, c.dtype, rank(root)?, c.stream);
}

points! {
    prepare, CComm, CStream;
    mccsSend(*const c_void) => |c, peer| c.comm.send(c.send, c.count, c.dtype, peer, c.stream);
    mccsRecv(*mut c_void) => |c, peer| c.comm.recv(c.recv, c.count, c.dtype, peer, c.stream);
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
