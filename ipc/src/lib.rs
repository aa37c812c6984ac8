//! What a tenant's process and the service share: wire types, shared-memory queues, and the handshake that passes them.
//!
//! Knows nothing of how collectives are executed.

pub mod command;
pub mod protocol;
pub mod types;
