//! Engines: the state machines that runtimes poll.
//!
//! They import every layer below, and know no settings and no program. An engine's neighbours are mailboxes and sinks that whoever makes it
//! hands over.
//!
//! The most important: [`session::SessionFactory`], which begins what reads a process' commands; [`proxy::ProxyEngine`], which orders
//! operations; [`transport::TransportEngine`], which moves bytes.

pub mod control;
pub mod controller;
pub mod exchange;
pub mod handover;
pub mod metrics;
mod process_state;
pub mod proxy;
pub mod session;
pub mod sockets;
pub mod transport;
