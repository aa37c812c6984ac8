//! The mccs service: one daemon a host that executes collectives for the jobs there.
//!
//! This crate is the composition root: it makes engines from settings, connects their mailboxes, and places them on threads. It imports
//! every layer below, and only programs and tests import it.
//!
//! The most important: [`service::Service`], a running service; [`service::Settings`], all that it is told. `docs/ARCHITECTURE.md` has the
//! life of an operation through the crates.

mod added_tenants;
mod bus;
pub mod service;
mod settings;
mod sockets;
mod thread_placement;
mod transport_factory;
pub mod upgrade;
