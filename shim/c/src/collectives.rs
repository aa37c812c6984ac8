//! C API: collectives, sends and receives on raw addresses of host memory and GPUs.

use std::ffi::c_void;

use mccs::bindings::{Call, span_at};
use mccs::cuda::CudaStream;
use mccs::{CollectiveKind, Communicator, Error, RedOp};

use super::communicators::{CComm, Memory};
use super::handle::{Use, object};
use super::operators::data_type;
use super::{CStream, Status, guard_in_group, rank};

/// Arguments of a collective; roots and operators that it has not are 0.
struct Arguments {
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: i32,
    op: i32,
    root: i32,
}

/// A stream of [`mccsStreamCreate`](super::objects::mccsStreamCreate).
fn host_stream(stream: CudaStream) -> Result<Use<CStream>, Error> {
    object(stream.cast::<CStream>(), "stream")
}

/// A stream of CUDA's, whose handles are addresses or small numbers.
fn cuda_stream(stream: CudaStream) -> Result<CudaStream, Error> {
    if object(stream.cast::<CStream>(), "stream").is_ok() {
        return Err(Error::argument("the stream is one of mccsStreamCreate; a communicator of GPUs takes CUDA's"));
    }
    Ok(stream)
}

/// Enqueues a collective.
///
/// # Safety
/// Handles, buffers and stream as `mccs.h` says.
unsafe fn collective(kind: CollectiveKind, at: &Arguments, comm: *mut CComm, stream: CudaStream) -> Status {
    guard_in_group(|| {
        let comm = object(comm, "comm")?;
        comm.check_open()?;
        let (dtype, root, count) = (data_type(at.dtype)?, rank(at.root)?, at.count as u64);
        let op = if kind.reduces() { comm.operators.get(at.op)? } else { RedOp::Sum.into() };
        match &comm.memory {
            Memory::Host(host) => {
                let stream = host_stream(stream)?;
                let (send, recv) = (span_at(host.client(), at.send as usize), span_at(host.client(), at.recv as usize));
                Call { kind, send, recv, count, dtype, op, root }.enqueue(host, &stream.0)?;
            }
            Memory::Cuda(cuda) => {
                let (send, recv) = (at.send as u64, at.recv as u64);
                let (call, stream) = (Call { kind, send, recv, count, dtype, op, root }, cuda_stream(stream)?);
                // SAFETY: the caller's contract.
                unsafe { call.enqueue_cuda(cuda, stream) }?;
            }
        }
        Ok(super::SUCCESS)
    })
}

/// Enqueues a send or a receive.
///
/// # Safety
/// Handles, buffer and stream as `mccs.h` says.
unsafe fn point_to_point(
    is_send: bool,
    buffer: *const c_void,
    count: usize,
    dtype: i32,
    peer: i32,
    comm: *mut CComm,
    stream: CudaStream,
) -> Status {
    guard_in_group(|| {
        let comm = object(comm, "comm")?;
        comm.check_open()?;
        let (dtype, peer, count) = (data_type(dtype)?, rank(peer)?, count as u64);
        match &comm.memory {
            Memory::Host(host) => {
                let stream = host_stream(stream)?;
                let span = span_at(host.client(), buffer as usize);
                let call = if is_send { Communicator::send } else { Communicator::recv };
                call(host, span, count, dtype, peer, &stream.0)?;
            }
            Memory::Cuda(cuda) => {
                let (address, stream) = (buffer as u64, cuda_stream(stream)?);
                // SAFETY: the caller's contract.
                unsafe {
                    match is_send {
                        true => cuda.send(address, count, dtype, peer, stream),
                        false => cuda.recv(address, count, dtype, peer, stream),
                    }?;
                }
            }
        }
        Ok(super::SUCCESS)
    })
}

/// Defines the functions on a send and a receive buffer: which collective each is, and the arguments that only some have.
macro_rules! collectives {
    ($($name:ident($($arg:ident),*) => $kind:ident;)+) => {
        $(
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
                $($arg: i32,)*
                comm: *mut CComm,
                stream: *mut c_void,
            ) -> Status {
                #[allow(unused_mut, reason = "some have neither operator nor root")]
                let mut at = Arguments { send: sendbuff, recv: recvbuff, count, dtype, op: 0, root: 0 };
                $(at.$arg = $arg;)*
                // SAFETY: the caller's contract.
                unsafe { collective(CollectiveKind::$kind, &at, comm, stream) }
            }
        )+
    };
}

collectives! {
    mccsAllReduce(op) => AllReduce;
    mccsReduceScatter(op) => ReduceScatter;
    mccsReduce(op, root) => Reduce;
    mccsAllGather() => AllGather;
    mccsAllToAll() => AllToAll;
    mccsBroadcast(root) => Broadcast;
    mccsGather(root) => Gather;
    mccsScatter(root) => Scatter;
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsSend(
    buffer: *const c_void,
    count: usize,
    dtype: i32,
    peer: i32,
    comm: *mut CComm,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe { point_to_point(true, buffer, count, dtype, peer, comm, stream) }
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsRecv(
    buffer: *mut c_void,
    count: usize,
    dtype: i32,
    peer: i32,
    comm: *mut CComm,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe { point_to_point(false, buffer, count, dtype, peer, comm, stream) }
}

/// See `mccs.h`.
///
/// # Safety
/// Pointers as `mccs.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mccsBarrier(comm: *mut CComm, stream: *mut c_void) -> Status {
    let at = Arguments { send: std::ptr::null(), recv: std::ptr::null_mut(), count: 0, dtype: 1, op: 0, root: 0 };
    // SAFETY: the caller's contract.
    unsafe { collective(CollectiveKind::Barrier, &at, comm, stream) }
}
