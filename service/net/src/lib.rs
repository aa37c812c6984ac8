//! What both transports and the exchange need to know of sockets.
//!
//! Imports `mccs-model` alone. [`tcp_info`] says whether a connection's peer answers, and what became of its packets. With the
//! feature `testing` there is `lossy`, sockets that lose packets.

#[cfg(feature = "testing")]
pub mod lossy;
pub mod tcp_info;
#[cfg(feature = "testing")]
pub mod testing;
