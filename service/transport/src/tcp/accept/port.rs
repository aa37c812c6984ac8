//! Listening sockets that all listeners of an address share, and half-open connections.
//!
//! Anybody can connect here. The cost of a stranger is bounded: [`HALF_OPEN_MAX`] connections a port, each for at
//! most [`HANDSHAKE_TIMEOUT`], and less when others need its place.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;

use crate::tcp::socket::{self, Moved, Socket};
use crate::tcp::wire::{BadHello, HELLO_BYTES, Hello, VERSION, Verdict, encode_resumed};
use crate::{Fault, FlowOptions};

/// Addresses that a transport listens on: a host has few, one a network interface.
pub(in crate::tcp) const PORTS_MAX: u32 = 64;
/// How long a connection may take to say what it is for.
pub(in crate::tcp) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections of a port that have not said it. An honest one takes a round trip, and its service's next poll.
const HALF_OPEN_MAX: usize = 1024;
/// When there are as many, the oldest makes room if it had so long.
const HALF_OPEN_LEAST: Duration = Duration::from_millis(500);

/// A listening socket.
#[derive(Debug)]
pub(in crate::tcp) struct Port {
    pub(in crate::tcp) socket: OwnedFd,
    /// As it was asked for.
    pub(in crate::tcp) asked: SocketAddr,
    /// As it was got.
    pub(in crate::tcp) address: SocketAddr,
    /// Connections that have not said what they are for, oldest first. Those that have since are still there until they
    /// come to the front.
    half_open: VecDeque<(Handle, Instant)>,
    /// Is in the queue of ports with connections in the kernel.
    pub(in crate::tcp) queued: bool,
    /// No connection can be taken now; not before then.
    pub(in crate::tcp) retry_at: Option<Instant>,
}

/// Whether another connection can be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::tcp) enum Room {
    Yes,
    /// If this one is closed.
    InsteadOf(Handle),
    /// Not before.
    At(Instant),
}

impl Port {
    pub(in crate::tcp) fn new(socket: OwnedFd, asked: SocketAddr, address: SocketAddr) -> Self {
        Port { socket, asked, address, half_open: VecDeque::new(), queued: false, retry_at: None }
    }

    /// Whether there is room for a connection; `lives` tells of one whether it is half open still.
    pub(in crate::tcp) fn room(&mut self, now: Instant, lives: impl Fn(Handle) -> bool) -> Room {
        if self.half_open.len() >= HALF_OPEN_MAX {
            self.half_open.retain(|(handle, _)| lives(*handle));
        }
        match self.half_open.front() {
            Some((oldest, came_at)) if self.half_open.len() >= HALF_OPEN_MAX => {
                let at = *came_at + HALF_OPEN_LEAST;
                if at <= now { Room::InsteadOf(*oldest) } else { Room::At(at) }
            }
            _ => Room::Yes,
        }
    }

    pub(in crate::tcp) fn add_half_open(&mut self, connection: Handle, now: Instant) {
        self.half_open.push_back((connection, now));
    }
}

/// A connection that has not said yet what it is for.
#[derive(Debug)]
pub(in crate::tcp) struct HalfOpen {
    pub(in crate::tcp) socket: Socket,
    pub(in crate::tcp) watch: Option<Handle>,
    pub(in crate::tcp) deadline: Instant,
    bytes: [u8; HELLO_BYTES],
    got: usize,
}

/// A half-open connection, once it is known what it is.
#[derive(Debug)]
pub(in crate::tcp) enum Heard {
    /// Not all of its hello has come.
    Waiting,
    Hello(Hello),
    /// It has ended without a word: somebody asked whether the path to here lives, or has given up dialling over it.
    Nothing,
    /// It is to be closed; the reason is for the log.
    Bad(&'static str),
}

impl HalfOpen {
    pub(in crate::tcp) fn new(socket: Socket, now: Instant) -> Self {
        HalfOpen { socket, watch: None, deadline: now + HANDSHAKE_TIMEOUT, bytes: [0; HELLO_BYTES], got: 0 }
    }

    /// Reads its hello; nothing that comes after.
    pub(in crate::tcp) fn hear(&mut self) -> Heard {
        while self.got < HELLO_BYTES {
            match self.socket.read_slice(&mut self.bytes[self.got..]) {
                Ok(Moved::Bytes(count)) => self.got += count,
                Ok(Moved::WouldBlock) => return Heard::Waiting,
                Ok(Moved::End) | Err(_) if self.got == 0 => return Heard::Nothing,
                Ok(Moved::End) | Err(_) => return Heard::Bad("it ends before its hello does"),
            }
            // A shorter hello of another version would never be whole.
            if let Some(prefix) = self.bytes[..self.got].first_chunk()
                && let Err(bad) = Hello::check_prefix(prefix)
            {
                return self.bad(bad);
            }
        }
        match Hello::decode(&self.bytes) {
            Ok(hello) => Heard::Hello(hello),
            Err(bad) => self.bad(bad),
        }
    }

    fn bad(&self, bad: BadHello) -> Heard {
        match bad {
            BadHello::Garbage => Heard::Bad("its hello is no hello"),
            BadHello::Version(theirs) => {
                tracing::debug!(theirs, ours = VERSION, "a connection of another version");
                refuse(&self.socket, Verdict::OtherVersion);
                Heard::Bad("it speaks another version")
            }
        }
    }
}

/// Says why a connection is not wanted. It fits an empty socket buffer; if not, the peer sees the end without a reason.
pub(in crate::tcp) fn refuse(socket: &Socket, verdict: Verdict) {
    let _ = socket.write_slice(&verdict.encode());
}

/// Tells a connection that it is part of a flow, and how much of it has come where it goes on.
pub(in crate::tcp) fn welcome(socket: &Socket, options: &FlowOptions, received: Option<u64>) -> Result<(), Fault> {
    socket::apply(socket, socket.is_ipv4(), options)?;
    if options.path_timeout.is_some() {
        socket.outlast()?;
    }
    let (resumed, welcome);
    let answer = match received {
        Some(received) => {
            resumed = encode_resumed(received);
            &resumed[..]
        }
        None => {
            welcome = Verdict::Welcome.encode();
            &welcome[..]
        }
    };
    match socket.write_slice(answer) {
        Ok(Moved::Bytes(bytes)) if bytes == answer.len() => Ok(()),
        // Nothing was written to this socket before: only one that has ended takes less.
        Ok(_) => Err(Fault::Closed),
        Err(errno) => Err(socket::peer_gone(errno)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_connections_make_room_when_they_had_their_time() {
        let address = "127.0.0.1:0".parse().expect("address");
        let (socket, got) = crate::tcp::socket::open_listener(address).expect("listens");
        let mut port = Port::new(socket, address, got);
        let start = Instant::now();
        let handle = |index| Handle { index, generation: 1 };
        for index in 0..HALF_OPEN_MAX as u32 {
            assert_eq!(port.room(start, |_| true), Room::Yes);
            port.add_half_open(handle(index), start);
        }
        assert_eq!(port.room(start, |_| true), Room::At(start + HALF_OPEN_LEAST));
        assert_eq!(port.room(start + HALF_OPEN_LEAST, |_| true), Room::InsteadOf(handle(0)));
        assert_eq!(port.room(start, |handle| handle.index != 7), Room::Yes, "one has said what it is for");
    }
}
