//! Sockets, as both transports and the exchange use them: does the peer answer, hops, losses for
//! tests.
//!
//! Imports `mccs-model` alone. [`tcp_info`] says whether a connection's peer answers, and what became of its packets.
//! [`hops`] finds the routers by which a flow would go. With the feature `testing` there is `lossy`, sockets that lose packets.

pub mod hops;
#[cfg(feature = "testing")]
pub mod lossy;
pub mod tcp_info;
#[cfg(feature = "testing")]
pub mod testing;
