//! TCP test flows between hosts of a fabric: source port, number of bytes or time, rate.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use mccs_config::Rate;
use nix::errno::Errno;
use nix::libc::linger;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, setsockopt, socket, sockopt};
use nix::sys::time::TimeVal;

use crate::fabric::error::{FabricError, Result};
use crate::fabric::netns;
use crate::fabric::topology::Host;

/// Bytes that are written and read at once.
const BLOCK_BYTES: usize = 256 << 10;
/// Nothing that works takes longer.
const PATIENCE: Duration = Duration::from_secs(3);

/// An address that flows can be made to.
pub struct Port {
    /// Number of the host.
    pub host: usize,
    listener: TcpListener,
    address: SocketAddrV4,
}

impl Port {
    /// Listens on every address of every host.
    ///
    /// # Errors
    /// An address is not there.
    pub fn listen(hosts: &[Host]) -> Result<Vec<Port>> {
        let mut ports = Vec::new();
        for (number, host) in hosts.iter().enumerate() {
            let listen = |address: &Ipv4Addr| {
                let failed = |source| FabricError::Namespace { namespace: host.namespace.clone(), source };
                // A port that the kernel chooses is in no path's range.
                let listener = TcpListener::bind((*address, 0)).map_err(failed)?;
                let port = listener.local_addr().map_err(failed)?.port();
                Ok(Port { host: number, listener, address: SocketAddrV4::new(*address, port) })
            };
            let at_host: Vec<Port> =
                netns::within(&host.namespace, || host.addresses.iter().map(listen).collect::<Result<_>>())?;
            ports.extend(at_host);
        }
        Ok(ports)
    }

    /// The address.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        *self.address.ip()
    }
}

/// A flow that is connected.
pub struct Flow {
    sender: TcpStream,
    receiver: TcpStream,
    names: [String; 2],
}

impl Flow {
    /// Connects `from`, with `source_port` or one that the kernel chooses (0), to `to`. Must be called inside `from`'s
    /// namespace.
    ///
    /// # Errors
    /// No connection within the patience, or another's arrives.
    pub fn connect(from: Ipv4Addr, source_port: u16, to: &Port) -> Result<Flow> {
        let source = SocketAddrV4::new(from, source_port);
        let from = if source_port == 0 { from.to_string() } else { source.to_string() };
        let names = [from, to.address().to_string()];
        let failed = |error| stopped(&names, error);
        let sender = connected(source, to.address).map_err(failed)?;
        let (receiver, peer) = to.listener.accept().map_err(failed)?;
        if sender.local_addr().map_err(failed)? != peer {
            return Err(failed(io::Error::other(format!("it arrives as {peer}"))));
        }
        receiver.set_read_timeout(Some(PATIENCE)).map_err(failed)?;
        Ok(Flow { sender, receiver, names })
    }

    /// Sends `bytes` and waits until all have arrived.
    ///
    /// # Errors
    /// They do not.
    pub fn transfer(&mut self, bytes: u64) -> Result<()> {
        let Flow { sender, receiver, names } = self;
        let arrived = std::thread::scope(|scope| {
            // Bytes that it could not send do not arrive.
            scope.spawn(|| io::copy(&mut io::repeat(0).take(bytes), sender));
            io::copy(&mut receiver.take(bytes), &mut io::sink())
        });
        match arrived {
            Ok(arrived) if arrived == bytes => Ok(()),
            Ok(_) => Err(stopped(names, ErrorKind::UnexpectedEof.into())),
            Err(error) => Err(stopped(names, error)),
        }
    }

    /// Sends for `warmup` and then `time`, and says at which rate payload arrived during `time`.
    ///
    /// # Errors
    /// The flow stops.
    pub fn rate(self, warmup: Duration, time: Duration) -> Result<Rate> {
        let Flow { mut sender, mut receiver, names } = self;
        let rate = std::thread::scope(|scope| {
            scope.spawn(move || {
                let block = vec![0; BLOCK_BYTES];
                // Ends when the receiver does.
                while sender.write_all(&block).is_ok() {}
            });
            let received = measure(&mut receiver, warmup, time);
            drop(receiver);
            received
        });
        rate.map_err(|error| stopped(&names, error))
    }
}

fn stopped([from, to]: &[String; 2], source: io::Error) -> FabricError {
    FabricError::Flow { from: from.clone(), to: to.clone(), source }
}

fn measure(receiver: &mut TcpStream, warmup: Duration, time: Duration) -> io::Result<Rate> {
    count(receiver, Instant::now() + warmup)?;
    let start = Instant::now();
    let bytes = count(receiver, start + time)?;
    Ok(Rate((bytes as f64 * 8.0 / start.elapsed().as_secs_f64()) as u64))
}

/// Bytes that arrive until `end`.
fn count(receiver: &mut TcpStream, end: Instant) -> io::Result<u64> {
    let mut block = vec![0; BLOCK_BYTES];
    let mut bytes = 0;
    while Instant::now() < end {
        match receiver.read(&mut block)? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            more => bytes += more as u64,
        }
    }
    Ok(bytes)
}

/// The standard library connects from no chosen port.
fn connected(from: SocketAddrV4, to: SocketAddrV4) -> io::Result<TcpStream> {
    let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let patience = TimeVal::new(PATIENCE.as_secs().cast_signed(), 0);
    setsockopt(&socket, sockopt::ReuseAddr, &true)?;
    setsockopt(&socket, sockopt::SendTimeout, &patience)?;
    // Closed by a reset: the port is free at once for the next flow.
    setsockopt(&socket, sockopt::Linger, &linger { l_onoff: 1, l_linger: 0 })?;
    bind(socket.as_raw_fd(), &SockaddrIn::from(from))?;
    connect(socket.as_raw_fd(), &SockaddrIn::from(to)).map_err(|errno| match errno {
        Errno::EINPROGRESS => io::Error::from(ErrorKind::TimedOut),
        errno => errno.into(),
    })?;
    Ok(TcpStream::from(socket))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loopback() -> Port {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port());
        Port { host: 0, listener, address }
    }

    #[test]
    fn all_bytes_arrive() {
        let mut flow = Flow::connect(Ipv4Addr::LOCALHOST, 0, &loopback()).unwrap();
        flow.transfer(3 << 20).unwrap();
        flow.transfer(1).unwrap();
    }

    #[test]
    fn a_rate_is_measured_and_the_sender_ends() {
        let flow = Flow::connect(Ipv4Addr::LOCALHOST, 0, &loopback()).unwrap();
        let rate = flow.rate(Duration::from_millis(1), Duration::from_millis(20)).unwrap();
        assert!(rate > Rate::mbit(1), "{rate}");
    }

    #[test]
    fn a_port_where_nobody_listens_is_told() {
        let Port { address, .. } = loopback();
        let gone = Port { host: 0, address, listener: TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap() };
        let error = Flow::connect(Ipv4Addr::LOCALHOST, 0, &gone).err().unwrap().to_string();
        assert!(error.starts_with("from 127.0.0.1 to 127.0.0.1: "), "{error}");
    }
}
