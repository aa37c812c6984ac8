//! Sends and receives on device pointers.

use std::ffi::{c_int, c_void};

use super::collectives::rank;
use super::communicators::Comm;
use super::operators::data_type;
use super::{SUCCESS, Status, guard_in_group};

/// Defines a function on one buffer and a peer.
macro_rules! point {
    ($name:ident, $buffer:ty, $call:ident) => {
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
            // SAFETY: handles, buffers and stream are the caller's contract.
            guard_in_group(|| unsafe {
                let comm = Comm::of(comm)?;
                comm.comm()?
                    .$call(buffer as u64, count as u64, data_type(dtype)?, rank(peer)?, stream)
                    .map(|()| SUCCESS)
            })
        }
    };
}

point!(ncclSend, *const c_void, send);
point!(ncclRecv, *mut c_void, recv);
