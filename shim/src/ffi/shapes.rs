//! The shapes that most functions of `mccs.h` have, on buffers of the host and of GPUs alike. What the arguments become is
//! said where a shape is used: `$prepare` makes `$call` of the handles, and of addresses as numbers.

/// Defines functions on a send and a receive buffer: the arguments that only one has, and its call.
macro_rules! collectives {
    (
        $prepare:path, $comm:ty, $stream:ty;
        $($name:ident($($arg:ident: $type:ty),*) => |$call:ident| $body:expr;)+
    ) => {
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
                $($arg: $type,)*
                comm: *mut $comm,
                stream: *mut $stream,
            ) -> Status {
                guard(|| {
                    let buffers = (sendbuff as u64, recvbuff as u64);
                    // SAFETY: the caller's contract.
                    let $call = unsafe { $prepare((comm, stream), buffers, count as u64, dtype) }?;
                    #[allow(unused_unsafe, reason = "the calls on the host's memory are safe")]
                    // SAFETY: buffers and stream are the caller's contract.
                    unsafe { $body }.map(|()| SUCCESS)
                })
            }
        )+
    };
}

/// Defines functions on one buffer and a peer.
macro_rules! points {
    (
        $prepare:path, $comm:ty, $stream:ty;
        $($name:ident($buffer:ty) => |$call:ident, $peer:ident| $body:expr;)+
    ) => {
        $(
            /// See `mccs.h`.
            ///
            /// # Safety
            /// Pointers as `mccs.h` says.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(
                buffer: $buffer,
                count: usize,
                dtype: i32,
                peer: i32,
                comm: *mut $comm,
                stream: *mut $stream,
            ) -> Status {
                guard(|| {
                    let buffers = (buffer as u64, buffer as u64);
                    // SAFETY: the caller's contract.
                    let $call = unsafe { $prepare((comm, stream), buffers, count as u64, dtype) }?;
                    let $peer = rank(peer)?;
                    #[allow(unused_unsafe, reason = "the calls on the host's memory are safe")]
                    // SAFETY: buffer and stream are the caller's contract.
                    unsafe { $body }.map(|()| SUCCESS)
                })
            }
        )+
    };
}

pub(super) use {collectives, points};
