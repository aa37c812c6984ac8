//! Options of listeners and flows: path, source ports, DSCP, socket buffers, chunk size, time-outs.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use mccs_config::service::{Device, TransportKind};

use mccs_model::path::{FlowPath, PortRange};
use mccs_runtime::Share;

use super::{CONNECTIONS_MAX, REQUESTS_MAX, TransportError};

/// Smallest [`FlowOptions::chunk_bytes`]: below, headers and system calls cost more than the bytes.
pub const CHUNK_BYTES_MIN: u32 = 4096;
/// Largest [`FlowOptions::chunk_bytes`].
pub const CHUNK_BYTES_MAX: u32 = 1 << 30;
/// Largest socket buffer that can be asked for; the kernel's own limit may be lower.
pub const SOCKET_BUFFER_BYTES_MAX: u32 = 1 << 30;
/// Code points have six bits.
const DSCP_MAX: u8 = 63;
/// Higher ones need a capability.
const PRIORITY_MAX: u32 = 6;
/// Longest of all time-outs: beyond a day it is a mistake.
const TIMEOUT_MAX: Duration = Duration::from_secs(86_400);

/// Options of a listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenOptions {
    /// Address and port of this host; port 0 lets the kernel choose, once a transport: listeners with the same address
    /// share its port. Peers get it in the handle, so it must be one that they can reach.
    pub address: SocketAddr,
}

impl ListenOptions {
    /// A listener at an address, on a port of the kernel's choice.
    #[must_use]
    pub fn new(address: IpAddr) -> Self {
        ListenOptions { address: SocketAddr::new(address, 0) }
    }

    /// Checks that peers can use the address.
    ///
    /// # Errors
    /// They cannot.
    pub fn validate(&self) -> Result<(), TransportError> {
        check("address", !self.address.ip().is_unspecified() && !self.address.ip().is_multicast(), || {
            format!("must be one that peers can connect to, not {}", self.address.ip())
        })
    }
}

impl Default for ListenOptions {
    /// Over loopback.
    fn default() -> Self {
        ListenOptions::new(Ipv4Addr::LOCALHOST.into())
    }
}

/// Which flow of a listener, and how it is to be carried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowSpec {
    /// Number at the listener, of the caller's choice.
    pub number: u64,
    /// The peer, for errors: such as `rank 3 on host-b`.
    pub peer: String,
    /// How it is carried.
    pub options: FlowOptions,
}

/// How a flow is carried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowOptions {
    /// Which of its host's transports carries it, where there are several; the first one, if none is named.
    pub transport: Option<TransportKind>,
    /// Its tenant's share: flows of tenants take turns.
    pub share: Share,
    /// Sockets (`tcp`) or queue pairs (`rdma`) of the flow, 1 to [`CONNECTIONS_MAX`].
    pub connections: u16,
    /// Device of this host that the flow leaves by: a network interface, from whose address its sockets send (`tcp`), or the port that it
    /// comes home to (`rdma`). The sender's; its peer's port over RDMA is the counterpart, unless that has a `home`.
    pub device: Option<Device>,
    /// Port that a flow without `device` comes home to (`rdma`). If `None`: a sender's by its engine's turn, a receiver's the counterpart of its sender's.
    /// No part of its path: nobody has chosen it.
    pub home: Option<Device>,
    /// Address to send from, where no device is named; the kernel chooses by its routes where there is none.
    pub source_address: Option<IpAddr>,
    /// Ports to send from: connection i takes the i-th, or the next one that is free. The kernel chooses where there are none.
    pub source_ports: Option<PortRange>,
    /// Code point of the packets' differentiated services field, 0 to 63.
    pub dscp: Option<u8>,
    /// Priority in this host's queues, 0 to 6.
    pub priority: Option<u32>,
    /// Bytes of a socket's send buffer. The kernel adapts it where this is not given.
    pub send_buffer_bytes: Option<u32>,
    /// Bytes of a socket's receive buffer. The kernel adapts it where this is not given.
    pub receive_buffer_bytes: Option<u32>,
    /// Name of the kernel's congestion control (`tcp`). Its default where there is none.
    pub congestion_control: Option<String>,
    /// With several connections, messages are cut into chunks of this many bytes, and each connection takes the next chunk
    /// when it has room. Shorter messages stay whole.
    pub chunk_bytes: u32,
    /// Requests that may be unfinished or untested, 1 to [`REQUESTS_MAX`].
    pub requests: u16,
    /// Over RDMA, whether who accepts takes short messages before there is a buffer for them, and copies them: a wait less for each.
    /// Not where buffers are a GPU's.
    pub takes_short: bool,
    /// How long it may take to reach the peer's host.
    pub connect_timeout: Duration,
    /// How long the peer may take to come to the flow, once its host is reached, or for who accepts, at all. Both count from
    /// the start. `None`: for ever, as its user may have reasons to be late, and others know when it never comes.
    pub peer_timeout: Option<Duration>,
    /// How long the peer's host may leave packets unanswered before the flow fails. Longer than a link may be down.
    pub silence_timeout: Duration,
    /// How long it may leave them unanswered before the flow goes on over another path, where the transport can do that. `None`: it
    /// stays where it is, and the transport keeps nothing for it.
    pub path_timeout: Option<Duration>,
    /// Paths that the flow may take in the place of its own, in turn; each says all that steers a flow.
    pub detours: Arc<[FlowPath]>,
}

impl Default for FlowOptions {
    fn default() -> Self {
        FlowOptions {
            transport: None,
            share: Share::SERVICE,
            connections: 1,
            device: None,
            home: None,
            source_address: None,
            source_ports: None,
            dscp: None,
            priority: None,
            send_buffer_bytes: None,
            receive_buffer_bytes: None,
            congestion_control: None,
            chunk_bytes: 256 << 10,
            requests: 64,
            takes_short: true,
            connect_timeout: Duration::from_secs(10),
            peer_timeout: Some(Duration::from_secs(10)),
            silence_timeout: Duration::from_secs(30),
            path_timeout: None,
            detours: Arc::default(),
        }
    }
}

impl FlowOptions {
    /// These options for a flow on `path`.
    #[must_use]
    pub fn on(&self, path: &FlowPath) -> FlowOptions {
        FlowOptions {
            device: path.device.clone().or_else(|| self.device.clone()),
            source_ports: path.source_ports.or(self.source_ports),
            dscp: path.dscp.or(self.dscp),
            priority: path.priority.or(self.priority),
            ..self.clone()
        }
    }

    /// Steering of a flow with these options.
    #[must_use]
    pub fn path(&self) -> FlowPath {
        let FlowOptions { device, source_ports, dscp, priority, .. } = self;
        FlowPath { device: device.clone(), source_ports: *source_ports, dscp: *dscp, priority: *priority }
    }

    /// These options on `path` alone: what the path does not say is as for a flow that nothing steers.
    pub(crate) fn on_path_alone(&self, path: &FlowPath) -> FlowOptions {
        let FlowPath { device, source_ports, dscp, priority } = path.clone();
        FlowOptions { device, source_ports, dscp, priority, ..self.clone() }
    }

    /// Checks ranges.
    ///
    /// # Errors
    /// Names the option and its range.
    pub fn validate(&self) -> Result<(), TransportError> {
        check("connections", (1..=CONNECTIONS_MAX).contains(&self.connections), || {
            format!("must be 1 to {CONNECTIONS_MAX}, not {}", self.connections)
        })?;
        check("chunk_bytes", (CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&self.chunk_bytes), || {
            format!("must be {CHUNK_BYTES_MIN} to {CHUNK_BYTES_MAX}, not {}", self.chunk_bytes)
        })?;
        check("requests", (1..=REQUESTS_MAX).contains(&self.requests), || {
            format!("must be 1 to {REQUESTS_MAX}, not {}", self.requests)
        })?;
        if let Some(range) = self.source_ports {
            check("source_ports", 0 < range.first && range.first <= range.last, || {
                format!("must be two ports above 0, the smaller first, not {range}")
            })?;
        }
        check("dscp", self.dscp.is_none_or(|dscp| dscp <= DSCP_MAX), || {
            format!("must be 0 to {DSCP_MAX}, not {}", self.dscp.unwrap_or_default())
        })?;
        check("priority", self.priority.is_none_or(|priority| priority <= PRIORITY_MAX), || {
            format!("must be 0 to {PRIORITY_MAX}, not {}", self.priority.unwrap_or_default())
        })?;
        for (option, bytes) in
            [("send_buffer_bytes", self.send_buffer_bytes), ("receive_buffer_bytes", self.receive_buffer_bytes)]
        {
            check(option, bytes.is_none_or(|bytes| bytes <= SOCKET_BUFFER_BYTES_MAX), || {
                format!("must be at most {SOCKET_BUFFER_BYTES_MAX}, not {}", bytes.unwrap_or_default())
            })?;
        }
        check_timeout("connect_timeout", self.connect_timeout)?;
        self.peer_timeout.map_or(Ok(()), |timeout| check_timeout("peer_timeout", timeout))?;
        self.path_timeout.map_or(Ok(()), |timeout| check_timeout("path_timeout", timeout))?;
        check_timeout("silence_timeout", self.silence_timeout)
    }
}

fn check(option: &'static str, right: bool, problem: impl FnOnce() -> String) -> Result<(), TransportError> {
    if right { Ok(()) } else { Err(TransportError::Option { option, problem: problem() }) }
}

fn check_timeout(option: &'static str, timeout: Duration) -> Result<(), TransportError> {
    let right = timeout >= Duration::from_millis(1) && timeout <= TIMEOUT_MAX;
    check(option, right, || format!("must be 1 ms to a day, not {timeout:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut FlowOptions)) -> &'static str {
        let mut options = FlowOptions::default();
        change(&mut options);
        match options.validate() {
            Err(TransportError::Option { option, .. }) => option,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn options_out_of_range_are_named() {
        FlowOptions::default().validate().expect("defaults are right");
        assert_eq!(refused(|o| o.connections = 0), "connections");
        assert_eq!(refused(|o| o.connections = CONNECTIONS_MAX + 1), "connections");
        assert_eq!(refused(|o| o.chunk_bytes = 1), "chunk_bytes");
        assert_eq!(refused(|o| o.requests = 0), "requests");
        assert_eq!(refused(|o| o.source_ports = Some(PortRange { first: 5, last: 4 })), "source_ports");
        assert_eq!(refused(|o| o.source_ports = Some(PortRange { first: 0, last: 4 })), "source_ports");
        assert_eq!(refused(|o| o.dscp = Some(64)), "dscp");
        assert_eq!(refused(|o| o.priority = Some(7)), "priority");
        assert_eq!(refused(|o| o.receive_buffer_bytes = Some(u32::MAX)), "receive_buffer_bytes");
        assert_eq!(refused(|o| o.connect_timeout = Duration::ZERO), "connect_timeout");
        assert_eq!(refused(|o| o.peer_timeout = Some(Duration::ZERO)), "peer_timeout");
        assert_eq!(refused(|o| o.silence_timeout = Duration::MAX), "silence_timeout");
        assert_eq!(refused(|o| o.path_timeout = Some(Duration::ZERO)), "path_timeout");
    }
}
