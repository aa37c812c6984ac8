//! TCP sockets of links: listen and connect without blocking.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, socket};

/// Listens for other hosts.
///
/// # Errors
/// The kernel's, such as [`io::ErrorKind::AddrInUse`].
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Begins to connect, from `source` where one is given: it is writable when that has ended, well or not.
pub(super) fn start_connect(address: SocketAddr, source: Option<IpAddr>) -> io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    let descriptor: OwnedFd = socket(family, SockType::Stream, flags, None)?;
    if let Some(source) = source.filter(|source| source.is_ipv4() == address.is_ipv4()) {
        bind(descriptor.as_raw_fd(), &SockaddrStorage::from(SocketAddr::new(source, 0)))?;
    }
    match connect(descriptor.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) | Err(Errno::EINPROGRESS) => Ok(TcpStream::from(descriptor)),
        Err(error) => Err(error.into()),
    }
}

/// Whether a connection has come about.
pub(super) fn connected(stream: &TcpStream) -> io::Result<bool> {
    if let Some(error) = stream.take_error()? {
        return Err(error);
    }
    match stream.peer_addr() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(error),
    }
}
