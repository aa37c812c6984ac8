//! Path probe by a TCP connection: whether a host answers over a path.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::tcp::device;
use crate::tcp::socket::Socket;
use crate::{FlowOptions, FlowPath};

/// A connection that has begun.
#[derive(Debug)]
pub struct Probe {
    socket: Socket,
    /// Something on the way says that the host cannot be reached.
    has_failed: bool,
}

impl Probe {
    /// Begins to connect to a host over a path, from an address of this one where one is given. `turn` makes probes take different
    /// ports of the path. `None` if that cannot be had now, as where the path's device is down: that says nothing of what is behind it.
    #[must_use]
    pub fn start(to: SocketAddr, from: Option<IpAddr>, path: &FlowPath, turn: u16) -> Option<Self> {
        if let Some(device) = &path.device
            && !device::source(device, to.is_ipv4(), from).is_ok_and(|source| source.is_up)
        {
            return None;
        }
        let options = FlowOptions { source_address: from, ..FlowOptions::default() };
        Socket::connect(to, &options.on_path_alone(path), turn).ok().map(Probe::of)
    }

    /// The probe of a socket that has begun to connect.
    pub(super) fn of(socket: Socket) -> Self {
        Probe { socket, has_failed: false }
    }

    /// Whether the host has answered by now: that nobody listens is an answer, too.
    #[must_use]
    pub fn has_answered(&mut self) -> bool {
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLOUT)];
        if self.has_failed || !poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0) {
            return false;
        }
        self.has_failed = matches!(self.socket.connected(), Err(crate::Fault::Lost(_)));
        !self.has_failed
    }

    /// The socket, to be used for more.
    pub(super) fn into_socket(self) -> Socket {
        self.socket
    }

    /// Ends it at once: its port is free.
    pub fn end(self) {
        self.socket.close(false);
    }
}
