//! `ncclAllReduce` and the other collectives on device pointers, with their `NCCL_DEBUG` lines.

use std::ffi::{c_int, c_void};

use mccs::CollectiveKind;

use super::collective_config::CollectiveConfig;
use super::communicators::{Comm, cuda_error};
use super::debug::{COLL, info};
use super::operators::{data_type, operator};
use super::profiler::{self, Collective, user_tag};
use super::{SUCCESS, Status, guard_in_group, rank};

/// Defines a collective's two functions, without and with a configuration of its own: the arguments that only it has, and the call.
macro_rules! collective {
    (
        $name:ident, $with_config:ident($($arg:ident: $type:ty),*) as $function:ident $kind:ident, root $root:expr,
        |$c:ident, $send:ident, $recv:ident, $count:ident, $dtype:ident, $stream:ident| $body:expr
    ) => {
        /// See `nccl.h`.
        ///
        /// # Safety
        /// Pointers as `nccl.h` says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            send: *const c_void,
            recv: *mut c_void,
            count: usize,
            dtype: c_int,
            $($arg: $type,)*
            comm: *mut Comm,
            $stream: *mut c_void,
        ) -> Status {
            guard_in_group(|| {
                let $c = Comm::of(comm)?;
                info!(
                    COLL,
                    "{}: sendbuff {send:?} recvbuff {recv:?} count {count} datatype {dtype}{} comm {comm:?} [nranks={}] stream {:?}",
                    stringify!($name).trim_start_matches("nccl"),
                    format_args!(concat!($(" ", stringify!($arg), " {}"),*), $($arg),*),
                    $c.nranks,
                    $stream
                );
                let ($send, $recv, $count, $dtype) = (send as u64, recv as u64, count as u64, data_type(dtype)?);
                let call = Collective {
                    function: &profiler::$function,
                    kind: CollectiveKind::$kind,
                    send: $send as _,
                    recv: $recv as _,
                    count,
                    root: $root,
                    dtype: $dtype,
                    stream: $stream,
                };
                // SAFETY: buffers and stream are the caller's contract.
                unsafe { profiler::collective(&$c, &call, || $body) }.map(|()| SUCCESS)
            })
        }

        /// As the function without a configuration, which a null one stands for; see `nccl.h`.
        ///
        /// # Safety
        /// Pointers as `nccl.h` says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $with_config(
            send: *const c_void,
            recv: *mut c_void,
            count: usize,
            dtype: c_int,
            $($arg: $type,)*
            comm: *mut Comm,
            stream: *mut c_void,
            config: *const c_void,
        ) -> Status {
            // SAFETY: the caller's contract.
            unsafe {
                configured(comm, stream, config, || $name(send, recv, count, dtype, $($arg,)* comm, stream))
            }
        }
    };
}

/// Makes a call under a configuration of its own.
///
/// # Safety
/// Pointers as `nccl.h` says of the functions with a configuration.
unsafe fn configured(
    comm: *mut Comm,
    stream: *mut c_void,
    config: *const c_void,
    call: impl FnOnce() -> Status,
) -> Status {
    guard_in_group(|| {
        let comm = Comm::of(comm)?;
        // SAFETY: the caller's contract.
        let config = unsafe { CollectiveConfig::read(config)? };
        let entered = comm.context.enter().map_err(cuda_error)?;
        // SAFETY: the caller's contract.
        unsafe { config.record_launch(stream)? };
        drop(entered);
        Ok(profiler::with_user_tag(config.user_tag, call))
    })
}

collective!(ncclAllReduce, ncclAllReduceConfig(op: c_int) as ALL_REDUCE AllReduce, root 0, |c, send, recv, count, dtype, stream| {
    c.comm()?.tagged(user_tag()).all_reduce(send, recv, count, dtype, operator(&c, op)?, stream)
});
collective!(ncclReduceScatter, ncclReduceScatterConfig(op: c_int) as REDUCE_SCATTER ReduceScatter, root 0, |c, send, recv, count, dtype, stream| {
    c.comm()?.tagged(user_tag()).reduce_scatter(send, recv, count, dtype, operator(&c, op)?, stream)
});
collective!(ncclReduce, ncclReduceConfig(op: c_int, root: c_int) as REDUCE Reduce, root root, |c, send, recv, count, dtype, stream| {
    c.comm()?.tagged(user_tag()).reduce(send, recv, count, dtype, operator(&c, op)?, rank(root)?, stream)
});
collective!(ncclAllGather, ncclAllGatherConfig() as ALL_GATHER AllGather, root 0, |c, send, recv, count, dtype, stream| {
    c.comm()?.tagged(user_tag()).all_gather(send, recv, count, dtype, stream)
});
collective!(ncclAlltoAll, ncclAlltoAllConfig() as ALL_TO_ALL AllToAll, root 0, |c, send, recv, count, dtype, stream| {
    c.comm()?.tagged(user_tag()).all_to_all(send, recv, count, dtype, stream)
});
collective!(ncclBroadcast, ncclBroadcastConfig(root: c_int) as BROADCAST Broadcast, root root, |c, send, recv, count, dtype, stream| {
    c.comm()?.tagged(user_tag()).broadcast(send, recv, count, dtype, rank(root)?, stream)
});
collective!(ncclGather, ncclGatherConfig(root: c_int) as GATHER Gather, root root, |c, send, recv, count, dtype, stream| {
    c.comm()?.tagged(user_tag()).gather(send, recv, count, dtype, rank(root)?, stream)
});
collective!(ncclScatter, ncclScatterConfig(root: c_int) as SCATTER Scatter, root root, |c, send, recv, count, dtype, stream| {
    c.comm()?.tagged(user_tag()).scatter(send, recv, count, dtype, rank(root)?, stream)
});

/// See `nccl.h`: a broadcast in place.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBcast(
    buffer: *mut c_void,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: *mut Comm,
    stream: *mut c_void,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe { ncclBroadcast(buffer, buffer, count, dtype, root, comm, stream) }
}
