//! Errors of transports: what went wrong, who is at fault, and what to do.

use mccs_config::service::{Device, TransportKind};
use mccs_ipc::types::ErrorClass;
use nix::errno::Errno;

use super::completion_status::{is_of_peer, status_text};
use super::{FLOWS_MAX, LISTENERS_MAX, PortRange};

/// Why a call of a transport failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransportError {
    /// A flow could not be connected, or failed.
    #[error("flow {number} {direction} {peer}: {fault}")]
    Flow {
        /// The peer, in the caller's words.
        peer: String,
        /// `to` or `from`.
        direction: &'static str,
        /// Number at its listener.
        number: u64,
        /// The fault.
        fault: Fault,
    },
    /// No listener on this address.
    #[error("cannot listen on {address}: {reason}; choose an address of this host and a free port, or port 0")]
    Listen {
        /// As asked for.
        address: String,
        /// The kernel's reason.
        reason: Errno,
    },
    /// An option is out of its range.
    #[error("the flow option `{option}` {problem}")]
    Option {
        /// Which.
        option: &'static str,
        /// The remedy.
        problem: String,
    },
    /// A peer's handle is not one of this transport's.
    #[error("a listener's handle is refused: {0}; are both services of one version, with the same transport?")]
    BadHandle(&'static str),
    /// A host has not what is to carry a flow.
    #[error(
        "{host} has no flows over {kind}: see rdma.use in its service.toml, and what its service's log says of devices"
    )]
    NoTransport {
        /// Which, in words.
        host: String,
        /// The transport that it lacks.
        kind: TransportKind,
    },
    /// A path's device is not one that this host can send by.
    #[error("flows cannot leave this host by device {device}: {problem}")]
    Device {
        /// As the path names it.
        device: Device,
        /// Why not.
        problem: String,
    },
    /// A flow, request, listener or registration that is not there (any more).
    #[error("bug: there is no such {0}, or not any more")]
    NoSuch(&'static str),
    /// A span that leaves its memory.
    #[error("bug: {bytes} bytes at offset {offset} leave the registered {registered}")]
    OutsideMemory {
        /// Offset of the span.
        offset: u64,
        /// Offset of the span.
        bytes: u64,
        /// Bytes of the memory.
        registered: u64,
    },
    /// Deregistered while in use.
    #[error("bug: memory with {0} unfinished requests cannot be deregistered; close their flows first")]
    MemoryInUse(u32),
    /// A table is full.
    #[error("{limit} {what} are the most that one transport engine has; spread them over more engines")]
    TooMany {
        /// The resource.
        what: &'static str,
        /// How many there may be.
        limit: u32,
    },
    /// A device cannot pin memory, since the process may not lock so much.
    #[error(
        "registering {bytes} bytes with the RDMA device failed: the limit on locked memory (RLIMIT_MEMLOCK) is {limit_bytes} \
         bytes; raise it with LimitMEMLOCK=infinity in the service's unit, or `ulimit -l unlimited`"
    )]
    LockedMemory {
        /// Bytes of the registration.
        bytes: u64,
        /// The limit in force.
        limit_bytes: u64,
    },
    /// A device cannot reach a GPU's memory.
    #[error(
        "registering {bytes} bytes of a GPU's memory with the RDMA device failed, by dma-buf ({}) and by its address ({}); load \
         nvidia_peermem, or stage through host memory",
        by_buffer.map_or("there is none", Errno::desc), by_address.desc()
    )]
    GpuMemory {
        /// Bytes of the registration.
        bytes: u64,
        /// Why not by its dma-buf; `None` where there is none.
        by_buffer: Option<Errno>,
        /// Why not by its address.
        by_address: Errno,
    },
    /// Flows over this transport have no way to a GPU's memory.
    #[error(
        "{bytes} bytes of a GPU's memory cannot be registered: flows over {carrier} carry host memory only; stage through it"
    )]
    HostMemoryOnly {
        /// The transport of the flows.
        carrier: &'static str,
        /// Bytes of the registration.
        bytes: u64,
    },
    /// The kernel refused something that concerns no flow.
    #[error("{call} failed: {reason}")]
    Os {
        /// Which call.
        call: &'static str,
        /// Why.
        reason: Errno,
    },
}

/// The fault of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Nobody listens, or the listener does not want this flow.
    #[error("the peer refuses it: {0}; is its service up, and was this handle made by it since it started?")]
    Refused(&'static str),
    /// The other side did not come or answer in time.
    #[error(
        "not connected after {after_ms} ms; is the other service up, and does the network let the two reach each other?"
    )]
    ConnectTimeout {
        /// The option's value.
        after_ms: u64,
    },
    /// The listener was closed while the flow waited.
    #[error("its listener was closed before the peer had connected")]
    ListenerClosed,
    /// The peer closed the flow while requests were unfinished, or was there no longer when one was posted.
    #[error("the peer has closed it; its service's log says why")]
    Closed,
    /// The connection broke.
    #[error("the connection is lost: {0}; is the other host up?")]
    Lost(Errno),
    /// The peer broke the protocol.
    #[error("the peer broke the protocol: {0}; are both services of one version?")]
    Protocol(&'static str),
    /// The peer speaks another version.
    #[error("the peer speaks version {theirs} of the protocol, this service {ours}; upgrade the older one")]
    Version {
        /// The peer's.
        theirs: u32,
        /// This side's.
        ours: u32,
    },
    /// The message is longer than the buffer that waits for it.
    #[error("a message of {message_bytes} bytes for a buffer of {buffer_bytes}")]
    TooLong {
        /// Bytes of the message.
        message_bytes: u64,
        /// Bytes of the buffer.
        buffer_bytes: u64,
    },
    /// Every source port of the range is taken.
    #[error(
        "no source port in {range} is free towards it ({reason}); widen the range, or use fewer flows or connections"
    )]
    SourcePorts {
        /// The option's value.
        range: PortRange,
        /// Why the last one was refused.
        reason: Errno,
    },
    /// The source address is none of this host's.
    #[error("its source address cannot be used: {0}; name an address of this host that reaches the peer")]
    SourceAddress(Errno),
    /// The path's device is none of this host's, or has no address, any more.
    #[error("the network interface that its path names is not there any more, or has lost its address")]
    NoDevice,
    /// A queue pair failed, for good.
    #[error("its queue pair {qp:#x} failed: {}", status_text(*.status))]
    QueuePair {
        /// Number of this side's.
        qp: u32,
        /// Code of the completion.
        status: u32,
    },
    /// The peer's queue pair failed.
    #[error("the peer's queue pair failed: {}", status_text(*.status))]
    PeerQueuePair {
        /// Code of its completion.
        status: u32,
    },
    /// The peer has no port to send from.
    #[error("no port of the peer's RDMA devices carries it; its service's log says why")]
    NoPeerPort,
    /// No port to send from.
    #[error("no port of this host's RDMA devices is up; look at the links, `ibv_devinfo` shows them")]
    NoPort,
    /// A device cannot pin its memory, since the process may not lock so much.
    #[error("{}", TransportError::LockedMemory { bytes: *.bytes, limit_bytes: *.limit_bytes })]
    LockedMemory {
        /// Bytes of the memory.
        bytes: u64,
        /// The limit in force.
        limit_bytes: u64,
    },
    /// The device does not take its memory.
    #[error("the RDMA device does not take its memory: {0}")]
    Unregistered(Errno),
    /// The kernel refused something.
    #[error("{call} failed: {reason}")]
    Os {
        /// Which call.
        call: &'static str,
        /// Why.
        reason: Errno,
    },
}

impl TransportError {
    pub(crate) const NO_FLOW: TransportError = TransportError::NoSuch("flow");
    pub(crate) const TOO_MANY_FLOWS: TransportError = TransportError::TooMany { what: "flows", limit: FLOWS_MAX };
    pub(crate) const TOO_MANY_LISTENERS: TransportError =
        TransportError::TooMany { what: "listeners", limit: LISTENERS_MAX };

    /// The fault of the flow of this number, to or from a peer.
    pub(crate) fn of_flow(peer: &str, direction: &'static str, number: u64, fault: Fault) -> Self {
        TransportError::Flow { peer: peer.to_owned(), direction, number, fault }
    }

    /// Party at fault.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            TransportError::Flow { fault, .. } => fault.class(),
            TransportError::Listen { .. } | TransportError::Option { .. } | TransportError::Os { .. } => {
                ErrorClass::System
            }
            TransportError::TooMany { .. }
            | TransportError::LockedMemory { .. }
            | TransportError::GpuMemory { .. }
            | TransportError::HostMemoryOnly { .. }
            | TransportError::NoTransport { .. }
            | TransportError::Device { .. } => ErrorClass::System,
            TransportError::BadHandle(_) => ErrorClass::Remote,
            TransportError::NoSuch(_) | TransportError::OutsideMemory { .. } | TransportError::MemoryInUse(_) => {
                ErrorClass::Internal
            }
        }
    }

    /// Whether it says that the way which a flow is to take is not there: no such device, port, address or transport. Whatever
    /// else goes wrong is its communicator's or its peers' own, and says nothing of others' flows that are to go the same way; so do source
    /// ports that are in use, which any program of the host may have taken.
    #[must_use]
    pub fn is_of_way(&self) -> bool {
        match self {
            TransportError::Option { .. } | TransportError::NoTransport { .. } | TransportError::Device { .. } => true,
            TransportError::Flow { fault, .. } => matches!(
                fault,
                Fault::SourcePorts { reason: Errno::EACCES, .. }
                    | Fault::SourceAddress(_)
                    | Fault::NoDevice
                    | Fault::NoPort
                    | Fault::NoPeerPort
            ),
            _ => false,
        }
    }

    /// The fault of the flow, if the error concerns one.
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        if let TransportError::Flow { fault, .. } = self { Some(*fault) } else { None }
    }
}

impl Fault {
    /// Whether this host knows that the cause is its own: no peer has a better reason to tell.
    #[must_use]
    pub fn is_own(self) -> bool {
        matches!(self, Fault::NoDevice | Fault::NoPort | Fault::LockedMemory { .. } | Fault::Unregistered(_))
    }

    /// Party at fault.
    #[must_use]
    pub fn class(self) -> ErrorClass {
        match self {
            Fault::Refused(_) | Fault::Closed | Fault::Lost(_) | Fault::Protocol(_) | Fault::Version { .. } => {
                ErrorClass::Remote
            }
            Fault::ConnectTimeout { .. } => ErrorClass::Timeout,
            Fault::ListenerClosed | Fault::TooLong { .. } => ErrorClass::Internal,
            Fault::SourcePorts { .. } | Fault::SourceAddress(_) | Fault::Os { .. } => ErrorClass::System,
            Fault::PeerQueuePair { .. } | Fault::NoPeerPort => ErrorClass::Remote,
            Fault::NoDevice | Fault::NoPort | Fault::LockedMemory { .. } | Fault::Unregistered(_) => ErrorClass::System,
            Fault::QueuePair { status, .. } if is_of_peer(status) => ErrorClass::Remote,
            Fault::QueuePair { .. } => ErrorClass::System,
        }
    }
}
