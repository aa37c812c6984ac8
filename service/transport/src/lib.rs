//! Transports: how bytes get from one host to another.
//!
//! A *flow* carries messages one way, in order, from the side that connected it to the side that accepted it. The receiver
//! posts buffers; a message goes straight into the next posted one, whose address, key and length are what the sender may
//! use (its *credit*): a queue pair writes into it and signals, a socket is read into it. Nothing is copied in between.
//!
//! ```text
//! receiver   listen --> handle ~~bootstrap~~>        accept --> RecvFlow   irecv, test ... flush ... close
//! sender                         handle --> connect --------> SendFlow    isend, test ...           close
//!
//! flow:      connecting --> connected --> failed          close at any moment: the flow is gone, its buffers are free
//!                 \-- time-out, refusal ----^
//! ```
//!
//! One value of a transport belongs to one engine, which owns its flows and drives it by [`DataPath::poll`]. All calls
//! return at once; none sleeps, starts a thread or reads the clock. After set-up nothing allocates until something fails.
//!
//! Promises of every transport, which the suite in `conformance/` checks:
//! - requests of a flow complete in the order in which they were posted;
//! - a buffer is not touched after its request is done or failed, after its flow is closed, or after the transport is dropped;
//! - a completed receive holds the whole message; a message longer than its buffer fails the flow instead;
//! - a completed send means that its buffer may be written again, not that the peer has the message. Whether a send
//!   completes before the peer has posted a buffer differs between transports;
//! - when the peer dies, closes, or says what it should not, all unfinished requests fail. A receiver that has posted nothing
//!   may not know before it does.
//!
//! A host that has several transports has them as one ([`multi`]): a flow's options say which carries it.
//!
//! Imports `mccs-model`, `mccs-net` and `mccs-runtime`. Its most important types: [`Transport`], [`FlowSpec`] and [`MultiTransport`](multi::MultiTransport).
//!
//! Deliberately absent: who the peer is and whether it may connect (bootstrap exchanges handles over authenticated
//! links), time-outs of operations (engines close flows), retries, pacing, encryption.

mod abilities;
mod completion_status;
#[cfg(test)]
mod conformance;
mod error;
#[cfg(any(test, feature = "testing"))]
pub mod faulty;
pub mod host_regions;
pub mod memory;
pub mod multi;
mod options;
pub mod rdma;
mod region;
mod request;
pub mod tcp;
mod traits;
mod types;

pub use self::abilities::{
    Abilities, GpuAccess, GpuMemory, LocalDevices, PathControl, PathEvent, PathEvents, PortEvent, PortEvents,
    WireStatistics, is_device_up,
};
pub use self::error::{Fault, TransportError};
pub use self::options::{FlowOptions, FlowSpec, ListenOptions};
pub use self::traits::{DataPath, Transport};
pub(crate) use self::types::RequestKind;
pub use self::types::{
    FlowId, FlowState, Listener, ListenerHandle, MemoryKey, MemoryKind, MemorySpan, RecvFlow, Request, SendFlow,
    Status, Usage,
};
pub use mccs_model::path::{FlowPath, PortRange, WireStats};

/// Most flows of one transport: as many as an engine can look after, far above what a host needs.
pub const FLOWS_MAX: u32 = 65_536;
/// Most listeners of one transport: one a communicator costs a table entry, no descriptor.
pub const LISTENERS_MAX: u32 = 65_536;
/// Most flow numbers that one listener takes until they are over; each costs a few words for so long.
pub const FLOWS_PER_LISTENER_MAX: usize = 1 << 20;
/// Most registrations of one transport.
pub const REGIONS_MAX: u32 = 65_536;
/// Most connections (sockets, queue pairs) of one flow: beyond this a flow only costs.
pub const CONNECTIONS_MAX: u16 = 16;
/// Most requests of a flow that may be unfinished or untested; bounds what a flow costs.
pub const REQUESTS_MAX: u16 = 1024;
/// Longest message.
pub const MESSAGE_BYTES_MAX: u64 = 1 << 40;
/// Longest handle: travels in bootstrap messages.
pub const HANDLE_BYTES_MAX: usize = 128;

/// The guide's first message is compiled and sent.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guides/transport.md")]
pub struct TransportGuide;
