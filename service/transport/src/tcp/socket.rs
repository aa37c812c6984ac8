//! TCP sockets: source address, source port, options (DSCP, priority, keepalive, buffers,
//! congestion control), reads and writes.

use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockProtocol, SockType, SockaddrLike, SockaddrStorage, accept4, bind, connect,
    getsockname, getsockopt, listen, setsockopt, socket, sockopt,
};

use crate::tcp::device;
use crate::{Fault, FlowOptions, TransportError};
use mccs_net::tcp_info::{self, TcpInfo};

/// Connections that the kernel keeps for a listener until they are taken.
const BACKLOG: i32 = 4096;
/// Keepalive probes before a silent peer is given up.
const PROBES: u32 = 3;

/// Meaning of an error of a connected socket.
pub(super) fn peer_gone(errno: Errno) -> Fault {
    match errno {
        Errno::ECONNRESET | Errno::EPIPE | Errno::ENOTCONN => Fault::Closed,
        Errno::EFAULT | Errno::EBADF | Errno::EINVAL => Fault::Os { call: "moving bytes", reason: errno },
        errno => Fault::Lost(errno),
    }
}

/// Bytes that nobody can guess.
pub(super) fn random<const N: usize>() -> Result<[u8; N], TransportError> {
    let mut bytes = [0; N];
    // SAFETY: the call writes at most `N` bytes into an array of as many.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) };
    // Up to 256 bytes come whole.
    if usize::try_from(got) == Ok(N) {
        Ok(bytes)
    } else {
        Err(TransportError::Os { call: "getrandom", reason: Errno::last() })
    }
}

/// A connected, or connecting, TCP socket.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

/// The result of a read or write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moved {
    /// So many bytes.
    Bytes(usize),
    /// None now.
    WouldBlock,
    /// The peer will send no more.
    End,
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn family(address: &IpAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 }
}

fn open(address: &IpAddr) -> Result<OwnedFd, Errno> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    socket(family(address), SockType::Stream, flags, SockProtocol::Tcp)
}

/// A listening socket and the address it got.
pub(super) fn open_listener(address: SocketAddr) -> Result<(OwnedFd, SocketAddr), TransportError> {
    let refused = |reason| TransportError::Listen { address: address.to_string(), reason };
    let fd = open(&address.ip()).map_err(refused)?;
    setsockopt(&fd, sockopt::ReuseAddr, &true).map_err(refused)?;
    bind(fd.as_raw_fd(), &SockaddrStorage::from(address)).map_err(refused)?;
    listen(&fd, Backlog::new(BACKLOG).unwrap_or(Backlog::MAXCONN)).map_err(refused)?;
    let bound: SockaddrStorage = getsockname(fd.as_raw_fd()).map_err(refused)?;
    let port = match (bound.as_sockaddr_in(), bound.as_sockaddr_in6()) {
        (Some(v4), _) => v4.port(),
        (_, Some(v6)) => v6.port(),
        (None, None) => address.port(),
    };
    Ok((fd, SocketAddr::new(address.ip(), port)))
}

/// The next waiting connection.
pub(super) fn accept(listener: &OwnedFd) -> Result<Option<Socket>, Errno> {
    match accept4(listener.as_raw_fd(), SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC) {
        // SAFETY: the kernel has just made this descriptor; nobody else owns it.
        Ok(fd) => Ok(Some(Socket(unsafe { OwnedFd::from_raw_fd(fd) }))),
        Err(Errno::EAGAIN) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Whether the kernel takes what `options` say of packets, before there is a flow.
pub(super) fn try_out(address: &IpAddr, options: &FlowOptions) -> Result<(), Fault> {
    let socket = open(address).map_err(|reason| Fault::Os { call: "socket", reason })?;
    apply(&socket, address.is_ipv4(), options)
}

/// Sets what concerns packets of an open flow.
pub(super) fn apply(socket: &impl AsFd, ipv4: bool, options: &FlowOptions) -> Result<(), Fault> {
    let os = |call| move |reason| Fault::Os { call, reason };
    setsockopt(socket, sockopt::TcpNoDelay, &true).map_err(os("TCP_NODELAY"))?;
    if let Some(dscp) = options.dscp {
        let field = i32::from(dscp) << 2;
        if ipv4 {
            setsockopt(socket, sockopt::Ipv4Tos, &field).map_err(os("IP_TOS"))?;
        } else {
            setsockopt(socket, sockopt::Ipv6TClass, &field).map_err(os("IPV6_TCLASS"))?;
        }
    }
    // After the field above, which sets the priority as well.
    if let Some(priority) = options.priority {
        setsockopt(socket, sockopt::Priority, &(priority as i32)).map_err(os("SO_PRIORITY"))?;
    }
    if let Some(name) = &options.congestion_control {
        setsockopt(socket, sockopt::TcpCongestion, &OsString::from(name)).map_err(os("TCP_CONGESTION"))?;
    }
    if let Some(bytes) = options.send_buffer_bytes {
        setsockopt(socket, sockopt::SndBuf, &(bytes as usize)).map_err(os("SO_SNDBUF"))?;
    }
    if let Some(bytes) = options.receive_buffer_bytes {
        setsockopt(socket, sockopt::RcvBuf, &(bytes as usize)).map_err(os("SO_RCVBUF"))?;
    }
    // An idle connection is probed within the silence time-out. TCP_USER_TIMEOUT is not what one that sends wants: it also
    // ends connections whose peer answers that it has no room. See `Socket::silence`.
    let silence_ms = u32::try_from(options.silence_timeout.as_millis()).unwrap_or(u32::MAX);
    let interval_s = (silence_ms / 1000 / (PROBES + 1)).clamp(1, 3600);
    setsockopt(socket, sockopt::KeepAlive, &true).map_err(os("SO_KEEPALIVE"))?;
    setsockopt(socket, sockopt::TcpKeepIdle, &interval_s).map_err(os("TCP_KEEPIDLE"))?;
    setsockopt(socket, sockopt::TcpKeepInterval, &interval_s).map_err(os("TCP_KEEPINTVL"))?;
    setsockopt(socket, sockopt::TcpKeepCount, &PROBES).map_err(os("TCP_KEEPCNT"))
}

impl Socket {
    /// The kernel's knowledge of the connection's other end; `None` if it says nothing.
    pub(super) fn tcp_info(&self) -> Option<TcpInfo> {
        tcp_info::tcp_info(self)
    }

    /// For how long the peer's kernel has left unanswered what it should have answered. Zero where it owes nothing: it has
    /// acknowledged all bytes, or said that it has no room for more.
    pub(super) fn silence(&self) -> Duration {
        self.tcp_info().filter(|info| info.is_owed).map_or(Duration::ZERO, |info| info.last_answer)
    }

    /// Bytes that were written and that the peer's kernel has not acknowledged.
    pub(super) fn unacknowledged(&self) -> Option<u64> {
        tcp_info::unacknowledged(self)
    }

    /// Says that nothing more will be written, behind what was.
    pub(super) fn end_writing(&self) {
        // It fails where the connection has ended, which is as good.
        let _ = nix::sys::socket::shutdown(self.0.as_raw_fd(), nix::sys::socket::Shutdown::Write);
    }

    /// Bears twice the silence on an idle connection: its peer, which bears it once, is to go on over another path meanwhile.
    pub(super) fn outlast(&self) -> Result<(), Fault> {
        let os = |reason| Fault::Os { call: "TCP_KEEPCNT", reason };
        setsockopt(self, sockopt::TcpKeepCount, &(2 * PROBES + 1)).map_err(os)
    }

    /// Begins to connect the flow's connection number `connection`.
    pub(super) fn connect(to: SocketAddr, options: &FlowOptions, connection: u16) -> Result<Self, Fault> {
        let source = match &options.device {
            None => options.source_address,
            Some(device) => match device::source(device, to.is_ipv4(), options.source_address) {
                Ok(source) => Some(source.address),
                Err(_) => return Err(Fault::NoDevice),
            },
        };
        let Some(range) = options.source_ports else {
            return Self::connect_from(to, options, source, 0).map_err(|refusal| match refusal {
                FromPort::Taken(reason) => Fault::Os { call: "connect", reason },
                FromPort::Fault(fault) => fault,
            });
        };
        let mut last = Errno::EADDRINUSE;
        for port in range.starting_at(u32::from(connection)) {
            match Self::connect_from(to, options, source, port) {
                Ok(socket) => return Ok(socket),
                Err(FromPort::Taken(reason)) => last = reason,
                Err(FromPort::Fault(fault)) => return Err(fault),
            }
        }
        Err(Fault::SourcePorts { range, reason: last })
    }

    fn connect_from(
        to: SocketAddr,
        options: &FlowOptions,
        source: Option<IpAddr>,
        port: u16,
    ) -> Result<Self, FromPort> {
        let os = |call| move |reason| FromPort::Fault(Fault::Os { call, reason });
        let fd = open(&to.ip()).map_err(os("socket"))?;
        apply(&fd, to.is_ipv4(), options).map_err(FromPort::Fault)?;
        if port != 0 || source.is_some() {
            let any = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
            let source = source.unwrap_or(any);
            if port == 0 {
                // The port is chosen when connecting, when one that is in use towards other peers will do.
                setsockopt(&fd, sockopt::IpBindAddressNoPort, &true).map_err(os("IP_BIND_ADDRESS_NO_PORT"))?;
            } else {
                // Flows to different listeners may have one source port.
                setsockopt(&fd, sockopt::ReuseAddr, &true).map_err(os("SO_REUSEADDR"))?;
            }
            let source = SockaddrStorage::from(SocketAddr::new(source, port));
            bind(fd.as_raw_fd(), &source).map_err(|reason| match reason {
                Errno::EADDRINUSE | Errno::EACCES => FromPort::Taken(reason),
                reason => FromPort::Fault(Fault::SourceAddress(reason)),
            })?;
        }
        match connect(fd.as_raw_fd(), &SockaddrStorage::from(to)) {
            Ok(()) | Err(Errno::EINPROGRESS) => Ok(Socket(fd)),
            Err(reason @ (Errno::EADDRNOTAVAIL | Errno::EADDRINUSE)) => Err(FromPort::Taken(reason)),
            Err(Errno::ECONNREFUSED) => Err(FromPort::Fault(Fault::Refused("nobody listens there"))),
            Err(reason) => Err(FromPort::Fault(Fault::Os { call: "connect", reason })),
        }
    }

    /// The result of a connection that was begun, when the socket is writable or has an error.
    pub(super) fn connected(&self) -> Result<(), Fault> {
        match getsockopt(&self.0, sockopt::SocketError).map(Errno::from_raw) {
            Ok(Errno::UnknownErrno) => Ok(()),
            Ok(Errno::ECONNREFUSED) => Err(Fault::Refused("nobody listens there")),
            Ok(errno) | Err(errno) => Err(Fault::Lost(errno)),
        }
    }

    /// This side's address.
    pub(super) fn source_address(&self) -> Option<IpAddr> {
        let address: SockaddrStorage = getsockname(self.0.as_raw_fd()).ok()?;
        match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(v4), _) => Some(v4.ip().into()),
            (_, Some(v6)) => Some(v6.ip().into()),
            (None, None) => None,
        }
    }

    /// Whether the socket is one of IPv4.
    pub(super) fn is_ipv4(&self) -> bool {
        getsockname::<SockaddrStorage>(self.0.as_raw_fd())
            .is_ok_and(|address| address.family() == Some(AddressFamily::Inet))
    }

    /// Writes `header`, then `bytes` bytes at `payload`, as much of them as there is room for.
    ///
    /// # Safety
    /// The bytes at `payload` are readable.
    pub(super) unsafe fn write(&self, header: &[u8], payload: *const u8, bytes: usize) -> Result<Moved, Errno> {
        let mut parts = [
            libc::iovec { iov_base: header.as_ptr().cast_mut().cast(), iov_len: header.len() },
            libc::iovec { iov_base: payload.cast_mut().cast(), iov_len: bytes },
        ];
        // SAFETY: all-zero is a message header without address, buffers or control data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len() as _;
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: the header names two buffers: ours, and one that the caller promises to be readable.
        let written = moved(|| unsafe { libc::sendmsg(self.0.as_raw_fd(), &message, flags) })?;
        Ok(written.unwrap_or(Moved::Bytes(0)))
    }

    /// Reads into the `bytes` bytes at `payload`, and what goes beyond into `rest`.
    ///
    /// # Safety
    /// The bytes at `payload` are writable.
    pub(super) unsafe fn read(&self, payload: *mut u8, bytes: usize, rest: &mut [u8]) -> Result<Moved, Errno> {
        let parts = [
            libc::iovec { iov_base: payload.cast(), iov_len: bytes },
            libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() },
        ];
        // SAFETY: two buffers: ours, and one that the caller promises to be writable.
        let read = moved(|| unsafe { libc::readv(self.0.as_raw_fd(), parts.as_ptr(), parts.len() as i32) })?;
        Ok(read.unwrap_or(Moved::End))
    }

    /// Reads into memory of ours.
    pub(super) fn read_slice(&self, buffer: &mut [u8]) -> Result<Moved, Errno> {
        let flags = libc::MSG_DONTWAIT;
        // SAFETY: the buffer is ours, and as long as it says.
        let read =
            moved(|| unsafe { libc::recv(self.0.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), flags) })?;
        Ok(read.unwrap_or(Moved::End))
    }

    /// Writes memory of ours.
    pub(super) fn write_slice(&self, bytes: &[u8]) -> Result<Moved, Errno> {
        // SAFETY: no bytes at a dangling address.
        unsafe { self.write(bytes, std::ptr::dangling(), 0) }
    }

    /// Closes so that the port is free at once, if nothing is lost by it: the peer has acknowledged everything, or is not
    /// to get the rest. Otherwise the kernel sends what is left, and keeps the port for a minute after, which a narrow
    /// range of source ports would soon be out of.
    pub(super) fn close(self, rest_is_wanted: bool) {
        if !rest_is_wanted || self.unacknowledged() == Some(0) {
            let linger = libc::linger { l_onoff: 1, l_linger: 0 };
            // Fails only on what is no socket; then the port is kept, which is no harm.
            let _ = setsockopt(&self.0, sockopt::Linger, &linger);
        }
    }
}

/// Why a connection could not be begun.
enum FromPort {
    /// Another port may do.
    Taken(Errno),
    /// No port will.
    Fault(Fault),
}

/// Makes a call until no signal interrupts it. `None`: zero bytes.
fn moved(mut call: impl FnMut() -> isize) -> Result<Option<Moved>, Errno> {
    loop {
        match usize::try_from(call()) {
            Ok(0) => return Ok(None),
            Ok(count) => return Ok(Some(Moved::Bytes(count))),
            Err(_) => match Errno::last() {
                Errno::EINTR => {}
                Errno::EAGAIN => return Ok(Some(Moved::WouldBlock)),
                errno => return Err(errno),
            },
        }
    }
}
