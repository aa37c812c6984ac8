//! Traceroute of a flow: the routers that it would pass, found by hop limits with its source port
//! and DSCP. A router on the way drops connections that may make so few hops. It says so, and by
//! that which one it is.
//!
//! Probes are what flows send, the first packet of a TCP connection: switches that choose by ports take it the same way. Nothing here
//! needs a right of its own.

use std::io::IoSliceMut;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect,
    recvmsg, setsockopt, socket, sockopt,
};

/// Hops that are looked for: a network of hosts has fewer.
pub const HOPS_MAX: u8 = 8;
/// Times that a hop is asked for. Routers answer about once a second, each host apart.
const TRIES: u32 = 3;
/// How long an answer may take, and the pause between two tries.
const PATIENCE: Duration = Duration::from_secs(1);
/// A router's word that a packet has made all the hops that it may.
const TIME_EXCEEDED_V4: u8 = 11;
const TIME_EXCEEDED_V6: u8 = 3;

/// Steering by which switches choose a packet's way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Steering {
    /// The address that it comes from, if it is to be another than the kernel's choice.
    pub address: Option<IpAddr>,
    /// The source port.
    pub port: Option<u16>,
    /// The code point.
    pub dscp: Option<u8>,
}

/// The way of a packet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hops {
    /// Routers in their order; none where one says nothing.
    pub routers: Vec<Option<IpAddr>>,
    /// Whether the host has answered, also by refusing.
    pub is_reached: bool,
}

/// Sender of an answer.
enum Reply {
    Router(IpAddr),
    Host,
    Nobody,
}

/// Asks for the way to a host, hop by hop. Takes seconds where routers are silent.
///
/// # Errors
/// The kernel refuses a socket, an address or a port of this host.
pub fn hops(to: SocketAddr, steering: Steering) -> Result<Hops, Errno> {
    let mut found = Hops::default();
    for hop in 1..=HOPS_MAX {
        match ask(to, steering, hop)? {
            Reply::Router(router) => found.routers.push(Some(router)),
            Reply::Nobody => found.routers.push(None),
            Reply::Host => {
                found.is_reached = true;
                return Ok(found);
            }
        }
    }
    // Hops behind the last one that said something are unknown.
    while found.routers.last().is_some_and(Option::is_none) {
        found.routers.pop();
    }
    Ok(found)
}

fn ask(to: SocketAddr, steering: Steering, hop: u8) -> Result<Reply, Errno> {
    for _ in 0..TRIES {
        match ask_once(to, steering, hop)? {
            Reply::Nobody => {}
            reply => return Ok(reply),
        }
    }
    Ok(Reply::Nobody)
}

fn ask_once(to: SocketAddr, steering: Steering, hop: u8) -> Result<Reply, Errno> {
    let began = Instant::now();
    let fd = open(to, steering, hop)?;
    match connect(fd.as_raw_fd(), &SockaddrStorage::from(to)) {
        Ok(()) => return Ok(Reply::Host),
        Err(Errno::EINPROGRESS) => {}
        Err(errno) => return reply_of(&fd, errno),
    }
    let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLOUT)];
    while began.elapsed() < PATIENCE {
        let left = PATIENCE.saturating_sub(began.elapsed());
        let timeout = PollTimeout::try_from(left.as_millis() as i32 + 1).unwrap_or(PollTimeout::ZERO);
        match poll(&mut fds, timeout) {
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => {
                let errno = nix::sys::socket::getsockopt(&fd, sockopt::SocketError)?;
                let reply = if errno == 0 { Reply::Host } else { reply_of(&fd, Errno::from_raw(errno))? };
                if matches!(reply, Reply::Nobody) {
                    // Somebody refuses to carry it: it may be for a moment.
                    std::thread::sleep(PATIENCE.saturating_sub(began.elapsed()));
                }
                return Ok(reply);
            }
            Err(errno) => return Err(errno),
        }
    }
    Ok(Reply::Nobody)
}

/// A socket that is to connect, and to end without a trace: its port is wanted again at once.
fn open(to: SocketAddr, steering: Steering, hop: u8) -> Result<OwnedFd, Errno> {
    let family = if to.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let fd = socket(family, SockType::Stream, SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC, SockProtocol::Tcp)?;
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    setsockopt(&fd, sockopt::Linger, &libc::linger { l_onoff: 1, l_linger: 0 })?;
    let field = steering.dscp.map(|dscp| i32::from(dscp) << 2);
    if to.is_ipv4() {
        setsockopt(&fd, sockopt::Ipv4RecvErr, &true)?;
        setsockopt(&fd, sockopt::Ipv4Ttl, &i32::from(hop))?;
        field.map_or(Ok(()), |field| setsockopt(&fd, sockopt::Ipv4Tos, &field))?;
    } else {
        setsockopt(&fd, sockopt::Ipv6RecvErr, &true)?;
        setsockopt(&fd, sockopt::Ipv6Ttl, &i32::from(hop))?;
        field.map_or(Ok(()), |field| setsockopt(&fd, sockopt::Ipv6TClass, &field))?;
    }
    let any: IpAddr = if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let from = SocketAddr::new(steering.address.unwrap_or(any), steering.port.unwrap_or(0));
    bind(fd.as_raw_fd(), &SockaddrStorage::from(from))?;
    Ok(fd)
}

/// Result of the end of an attempt: the host refuses, or a router has said why it goes no further.
fn reply_of(fd: &OwnedFd, errno: Errno) -> Result<Reply, Errno> {
    match errno {
        Errno::ECONNREFUSED | Errno::ECONNRESET => Ok(Reply::Host),
        Errno::EADDRNOTAVAIL | Errno::EADDRINUSE | Errno::EACCES => Err(errno),
        _ => Ok(router_of(fd).map_or(Reply::Nobody, Reply::Router)),
    }
}

/// The router whose word about this socket's packet waits in the kernel.
fn router_of(fd: &OwnedFd) -> Option<IpAddr> {
    let (mut bytes, mut control) = ([0u8; 256], nix::cmsg_space!([u8; 512]));
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<SockaddrStorage>(fd.as_raw_fd(), &mut parts, Some(&mut control), flags).ok()?;
    message.cmsgs().ok()?.find_map(|part| match part {
        ControlMessageOwned::Ipv4RecvErr(error, Some(router)) if error.ee_type == TIME_EXCEEDED_V4 => {
            Some(Ipv4Addr::from(u32::from_be(router.sin_addr.s_addr)).into())
        }
        ControlMessageOwned::Ipv6RecvErr(error, Some(router)) if error.ee_type == TIME_EXCEEDED_V6 => {
            Some(Ipv6Addr::from(router.sin6_addr.s6_addr).into())
        }
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_host_without_routers_before_it_is_reached_whether_it_listens_or_not() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
        let to = listener.local_addr().expect("its address");
        let near = Hops { routers: Vec::new(), is_reached: true };
        let steering = Steering { address: Some(to.ip()), port: None, dscp: Some(10) };
        assert_eq!(hops(to, steering), Ok(near.clone()));
        drop(listener);
        assert_eq!(hops(to, steering), Ok(near));
    }

    #[test]
    fn an_address_of_another_host_is_refused() {
        let steering = Steering { address: Some([192, 0, 2, 1].into()), ..Steering::default() };
        assert_eq!(hops(([127, 0, 0, 1], 1).into(), steering), Err(Errno::EADDRNOTAVAIL));
    }
}
