//! Handles of transports: memory, flows, listeners and requests, checked wherever they are used.

use std::os::fd::BorrowedFd;

use mccs_ipc::types::Handle;

use super::{HANDLE_BYTES_MAX, TransportError};

/// Registered memory. Means nothing to another transport, and nothing after [`super::Transport::deregister`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MemoryKey(pub(crate) Handle);

/// Place of memory to be registered.
#[derive(Debug, Clone, Copy)]
pub enum MemoryKind<'a> {
    /// In the host's memory, mapped in this process.
    Host,
    /// In a GPU's memory, at the address by which the GPU and this process know it. [`super::DataPath::flush`] makes received bytes
    /// visible to the GPU.
    Gpu {
        /// A dma-buf of the same bytes, and their offset in it. Devices that do not take it try the address.
        dma_buffer: Option<(BorrowedFd<'a>, u64)>,
    },
}

/// Part of registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemorySpan {
    /// Key of [`super::Transport::register`].
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

/// Options of listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Listener(pub(crate) Handle);

/// A peer's means to connect to a listener. Opaque; whoever has it may connect, so it travels only over links that are
/// authenticated and encrypted.
#[derive(Clone, PartialEq, Eq)]
pub struct ListenerHandle(pub(super) Vec<u8>);

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

impl Request {
    /// A message of a flow, or a buffer for one.
    pub(crate) fn message(flow: FlowId, number: u64) -> Self {
        Request { flow, kind: RequestKind::Message, number }
    }

    /// A flush that is done when it is posted.
    pub(crate) fn flushed(flow: FlowId) -> Self {
        Request { flow, kind: RequestKind::Flush, number: 0 }
    }
}

/// How far a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Not done yet.
    Running {
        /// For a receive: bytes from the start of the buffer that have arrived and stay as they are, so that a reducer
        /// can begin. For a send: bytes from the start of the message that the transport will not read again. Never
        /// falls; a transport may say less than is true.
        bytes: u64,
    },
    /// Done. The request is forgotten.
    Done {
        /// Length of the message; of a flush 0.
        bytes: u64,
        /// For a receive: the sender's tag of the message. Otherwise 0.
        tag: u32,
    },
}

impl Status {
    /// Status of a flush.
    pub(crate) const FLUSHED: Status = Status::Done { bytes: 0, tag: 0 };
}

/// Whether a flow carries messages yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowState {
    /// The peer has not connected or answered yet. Requests can be posted.
    Connecting,
    /// Both sides are there.
    Connected,
}

/// Holdings of a transport's users, which they have to give back.
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
