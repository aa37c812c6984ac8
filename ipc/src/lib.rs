//! The contract between a tenant's process and the service: wire types, shared-memory queues, and
//! the handshake that passes them.
//!
//! Knows nothing of how collectives are executed.

pub mod command;
pub mod contention;
pub mod device_initiated;
#[cfg(not(loom))]
pub mod handshake;
pub mod hex;
pub mod large;
pub mod layout;
pub mod library_mark;
pub mod loan;
pub mod port_channels;
pub mod protocol;
pub mod queue;
pub mod records;
pub mod shm;
pub mod shm_exchange;
#[cfg(not(loom))]
mod socket;
pub mod strides;
pub mod sync;
pub mod tickets;
pub mod time_slice;
pub mod timeline_semaphore;
pub mod types;
