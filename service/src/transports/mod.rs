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
//! What every transport promises, and the suite in `conformance/` checks:
//! - requests of a flow complete in the order in which they were posted;
//! - a buffer is not touched after its request is done or failed, after its flow is closed, or after the transport is dropped;
//! - a completed receive holds the whole message; a message longer than its buffer fails the flow instead;
//! - a completed send means that its buffer may be written again, not that the peer has the message. Whether a send
//!   completes before the peer has posted a buffer differs between transports;
//! - when the peer dies, closes, or says what it should not, all unfinished requests fail. A receiver that has posted nothing
//!   may not know before it does.
//!
//! A host that has several transports has them as one ([`several`]): a flow's options say which carries it.
//!
//! Deliberately absent: who the peer is and whether it may connect (bootstrap exchanges handles over authenticated
//! links), time-outs of operations (engines close flows), retries, pacing, encryption.

#[cfg(test)]
pub(crate) mod conformance;
mod error;
pub mod faulty;
pub mod memory;
mod options;
pub mod rdma;
mod region;
mod request;
pub mod several;
pub mod tcp;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;

pub use self::error::{Fault, TransportError};
pub use self::options::{FlowOptions, FlowPath, FlowSpec, ListenOptions, PortRange};
use crate::runtime::{Context, Progress};

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

/// Registered memory. Means nothing to another transport, and nothing after [`Transport::deregister`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemoryKey(pub(crate) Handle);

/// Part of registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemorySpan {
    /// Of [`Transport::register`].
    pub key: MemoryKey,
    /// Bytes from the start of what was registered.
    pub offset: u64,
    /// Length in bytes; may be 0.
    pub bytes: u64,
}

/// A flow, either direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FlowId(pub(crate) Handle);

/// A flow at its sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SendFlow(pub(crate) FlowId);

/// A flow at its receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RecvFlow(pub(crate) FlowId);

impl From<SendFlow> for FlowId {
    fn from(flow: SendFlow) -> Self {
        flow.0
    }
}

impl From<RecvFlow> for FlowId {
    fn from(flow: RecvFlow) -> Self {
        flow.0
    }
}

/// Where flows are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Listener(pub(crate) Handle);

/// What a peer needs to connect to a listener. Opaque; whoever has it may connect, so it travels only over links that are
/// authenticated and encrypted.
#[derive(Clone, PartialEq, Eq)]
pub struct ListenerHandle(Vec<u8>);

impl ListenerHandle {
    /// A handle as it came from a peer. It is checked where it is used.
    ///
    /// # Errors
    /// It is longer than [`HANDLE_BYTES_MAX`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TransportError> {
        if bytes.len() > HANDLE_BYTES_MAX {
            return Err(TransportError::BadHandle("it is longer than any handle"));
        }
        Ok(ListenerHandle(bytes.to_vec()))
    }

    /// The bytes to send to a peer.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Debug for ListenerHandle {
    /// Says nothing of its content, which is a secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ListenerHandle({} bytes)", self.0.len())
    }
}

/// A posted send, receive or flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Request {
    pub(crate) flow: FlowId,
    pub(crate) kind: RequestKind,
    pub(crate) number: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RequestKind {
    Message,
    Flush,
}

/// How far a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Not done yet.
    Running {
        /// Of a receive: bytes from the start of the buffer that have arrived and stay as they are, so that a reducer can
        /// begin. Of a send: bytes from the start of the message that the transport will not read again. Never falls; a
        /// transport may say less than is true.
        bytes: u64,
    },
    /// Done. The request is forgotten.
    Done {
        /// Length of the message; of a flush 0.
        bytes: u64,
        /// Of a receive: what the sender gave with the message. Otherwise 0.
        tag: u32,
    },
}

/// Whether a flow carries messages yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowState {
    /// The peer has not connected or answered yet. Requests can be posted.
    Connecting,
    /// Both sides are there.
    Connected,
}

/// What a flow's sender has found out about a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathNews {
    /// The flow.
    pub flow: SendFlow,
    /// What steers packets over the path.
    pub path: FlowPath,
    /// Whether the peer's host answers over it again, and the flow goes there now. Otherwise it has left packets unanswered there for
    /// [`FlowOptions::path_timeout`].
    pub answers: bool,
}

/// By which of its host's ports a flow goes, for transports whose flows change them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortNews {
    /// The flow, either direction.
    pub flow: FlowId,
    /// Name of the device and number of its port, such as `mlx5_0:1`. `None`: the flow has left the one before, and looks for another.
    pub port: Option<String>,
}

/// What became of a flow's packets since its connections began, as whoever sends them knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WireStats {
    /// Packets with payload that were sent, repetitions included.
    pub segments: u64,
    /// Packets that were sent again.
    pub retransmits: u64,
    /// Time from a packet to its answer, smoothed: of the slowest of the flow's connections.
    pub round_trip: Duration,
}

/// What users of a transport hold, and have to give back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Open listeners.
    pub listeners: usize,
    /// Flows that were not closed, failed ones included.
    pub flows: usize,
    /// Registered memory.
    pub registrations: usize,
    /// Flows that were closed, and whose last messages the transport still carries: they end by themselves, while it is polled.
    pub lingering: usize,
}

/// Posting and finishing requests, and driving the transport.
pub trait DataPath: Send {
    /// Sends a message, and `tag` with it, which means nothing to the transport. `None`: as many requests as [`FlowOptions::requests`] are unfinished or untested; try later.
    /// The bytes must not change until the request is done or the flow closed.
    ///
    /// # Errors
    /// The flow has failed, the flow or the memory is not there, or the span leaves it.
    fn isend(&mut self, flow: SendFlow, message: MemorySpan, tag: u32) -> Result<Option<Request>, TransportError>;

    /// Gives the sender a buffer for its next message, which may be shorter. `None` as for [`DataPath::isend`].
    ///
    /// # Errors
    /// As for [`DataPath::isend`].
    fn irecv(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError>;

    /// Asks that what done receives have put into `buffer` be visible to whoever reads it, where the device needs that
    /// (GPU memory written by a NIC). `None` as for [`DataPath::isend`].
    ///
    /// # Errors
    /// As for [`DataPath::isend`].
    fn flush(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError>;

    /// How far a request is. After `Done` its place is free and it must not be tested again.
    ///
    /// # Errors
    /// The flow failed before the request was done, or there is no such request.
    fn test(&mut self, request: Request) -> Result<Status, TransportError>;

    /// Moves bytes, a bounded amount. Requests make progress here, and may in `isend` and `irecv`.
    fn poll(&mut self, cx: &Context) -> Progress;

    /// Called when polls have been idle and the engine wants to sleep on [`DataPath::descriptor`]: arms it. Returns false
    /// if there is work to poll for.
    fn prepare_to_sleep(&mut self) -> bool;

    /// The descriptor, the same for the transport's whole life, that is readable when there is work to poll for. `None`:
    /// poll on.
    fn descriptor(&self) -> Option<BorrowedFd<'_>>;
}

/// Memory, listeners and flows. Control path: may allocate. Engines hold a `Box<dyn Transport>`.
pub trait Transport: DataPath {
    /// Makes memory known. The same memory may be registered more than once.
    ///
    /// # Safety
    /// The `bytes` bytes at `ptr` stay readable and writable until [`Transport::deregister`] has returned `Ok` or the
    /// transport is dropped. Others may write them meanwhile; whoever does decides what is sent.
    ///
    /// # Errors
    /// The table is full, or the operating system refuses.
    unsafe fn register(&mut self, ptr: *mut u8, bytes: u64) -> Result<MemoryKey, TransportError>;

    /// Forgets memory.
    ///
    /// # Errors
    /// Unfinished requests use it (close their flows first), or there is no such memory.
    fn deregister(&mut self, key: MemoryKey) -> Result<(), TransportError>;

    /// Opens a listener, and says what peers need to connect to it. Cheap: listeners share what they listen with.
    ///
    /// # Errors
    /// The options contradict themselves, or the operating system refuses the address.
    fn listen(&mut self, options: &ListenOptions) -> Result<(Listener, ListenerHandle), TransportError>;

    /// Closes a listener. Flows that are connected stay; those still waiting fail.
    fn close_listener(&mut self, listener: Listener);

    /// Flow numbers below `number` are over: those still waiting fail, none is accepted or can be connected any more, and the
    /// listener keeps nothing of them. So one that lives for long, and counts upwards, stays small.
    fn end_numbers(&mut self, listener: Listener, below: u64);

    /// Whether the device that `options` name carries packets, as far as this host knows; also where they name none.
    ///
    /// # Errors
    /// This host has no such device, or the device has no address that flows could have.
    fn has_device_up(&self, options: &FlowOptions) -> Result<bool, TransportError>;

    /// Begins to connect flow number `spec.number` of a listener.
    ///
    /// # Errors
    /// The handle, the device or the options are refused, there are too many flows, or no source port is free.
    fn connect(&mut self, listener: &ListenerHandle, spec: &FlowSpec, now: Instant)
    -> Result<SendFlow, TransportError>;

    /// Begins to wait for flow number `spec.number`; a listener accepts each number once while it lives. How many connections it has and how
    /// messages are cut is the sender's choice; of the options only those that concern this side count.
    ///
    /// # Errors
    /// The options are refused, there are too many flows, or the number was accepted before.
    fn accept(&mut self, listener: Listener, spec: &FlowSpec, now: Instant) -> Result<RecvFlow, TransportError>;

    /// Whether a flow is connected.
    ///
    /// # Errors
    /// Why it failed. A flow whose peer has closed it in good order has failed, too.
    fn state(&self, flow: FlowId) -> Result<FlowState, TransportError>;

    /// Ends a flow at once, whatever it is doing. Requests are forgotten and their buffers free when this returns; what
    /// completed sends have handed over still arrives, unless the peer closes too, or the transport is dropped while flows are
    /// [`Usage::lingering`]. Unknown flows are ignored.
    fn close(&mut self, flow: FlowId);

    /// From now on a flow goes over this path, and over `detours` where that one dies: what it has sent and has not arrived is sent there again. Where
    /// the path cannot be had it stays where it is, as do all flows of transports that cannot leave a path.
    fn steer(&mut self, _flow: SendFlow, _path: &FlowPath, _detours: &Arc<[FlowPath]>) {}

    /// What has become of a flow's path since it was asked last; for transports whose flows go on over others.
    fn take_path_news(&mut self) -> Option<PathNews> {
        None
    }

    /// What has become of a flow's port since it was asked last; for transports that know their ports.
    fn take_port_news(&mut self) -> Option<PortNews> {
        None
    }

    /// What became of a flow's packets; for transports whose packets the kernel counts. Costs a call of the kernel for each connection.
    fn wire_stats(&self, _flow: SendFlow) -> Option<WireStats> {
        None
    }

    /// What users hold now.
    fn usage(&self) -> Usage;
}
