//! `ncclSend` and `ncclRecv` on device pointers.

use std::ffi::{c_int, c_void};

use super::communicators::Comm;
use super::operators::data_type;
use super::profiler::{self, PointToPoint};
use super::{SUCCESS, Status, guard_in_group, rank};

/// Defines a function on one buffer and a peer.
macro_rules! point {
    ($name:ident, $buffer:ty, $call:ident, $function:ident) => {
        /// See `nccl.h`.
        ///
        /// # Safety
        /// Pointers as `nccl.h` says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            buffer: $buffer,
            count: usize,
            dtype: c_int,
            peer: c_int,
            comm: *mut Comm,
            stream: *mut c_void,
        ) -> Status {
            guard_in_group(|| {
                let (comm, dtype) = (Comm::of(comm)?, data_type(dtype)?);
                let buffer = buffer as *mut c_void;
                let point = PointToPoint { function: &profiler::$function, buffer, count, peer, dtype, stream };
                // SAFETY: buffers and stream are the caller's contract.
                unsafe {
                    profiler::p2p(&comm, &point, || {
                        comm.comm()?.$call(buffer as u64, count as u64, dtype, rank(peer)?, stream)
                    })
                }
                .map(|()| SUCCESS)
            })
        }
    };
}

point!(ncclSend, *const c_void, send, SEND);
point!(ncclRecv, *mut c_void, recv, RECV);
