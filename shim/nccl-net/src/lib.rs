//! `libnccl-net-mccs.so`: NCCL's network interface, of versions 6 to 12, on mccs. NCCL keeps its kernels, and its
//! bytes between hosts go by the service.
//!
//! ```text
//! NCCL's proxy: isend --copy--> ring in a region --put and signal--> the peer's ring --copy--> irecv
//!                               room again       <-------- signal --- copied
//! ```
//!
//! A connection of NCCL's is a communicator of two ranks with a port channel: rank 0 listens and receives, rank 1 connects and sends. It is set
//! up on a thread of its own, so that no call of NCCL's waits. `tables` has what NCCL loads, `calls` its functions; [`side`], [`sender`],
//! [`receiver`] and [`ring`] move data. Memory of NCCL's cannot be shared with the service, so each side copies once.

#![deny(missing_docs)]

mod calls;
mod handle;
mod link;
mod logger;
mod properties;
mod receiver;
mod ring;
mod sender;
mod session;
mod setup;
mod side;
mod tables;
mod transfers;

use std::sync::{Mutex, MutexGuard, PoisonError};

use mccs::Error;

fn invalid_argument(message: impl Into<String>) -> Error {
    Error::InvalidArgument(message.into())
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
