//! The state machines that runtimes poll.

pub mod control;
pub mod controller;
pub mod daemon;
pub mod exchange;
pub mod metrics;
pub mod proxy;
pub mod sockets;
pub mod transport;
