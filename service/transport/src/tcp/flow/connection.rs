//! A sender's TCP connection: the socket in use, a redial over another path, and what is sent
//! again. The line is the socket that carries its stream. Another is dialled at first, or because
//! the one before has found a dead path.
//!
//! ```text
//!            dial: connecting --> greeting --> waiting for an answer --> the connection's line
//! line:  open ------ (its peer's kernel answers nothing) --^ cut: nothing is written to it, or learnt from it, any more
//!              <---- (it answers again before)
//! ```
//!
//! A dead path is told from a lossy one by *questions*: further connections over the line's own path, begun while the line is silent.
//! If one is answered the path lives, and the answered connection becomes the line: what was lost is sent again at once. If none is,
//! the path is dead, and another one is dialled. A line that has replaced another on its path so and brings nothing either
//! asks no more: whatever is wrong with the path, it is left. A first dial that is not answered, or whose hello is not, asks in the same way.
//! One whose hello was heard, and whose flow nobody has accepted yet, owes nothing: it asks from time to time, the less often the longer it waits.
//!
//! The receiver closes the old socket when it has heard the hello on the new one, takes what had come on it, and answers how much that
//! is; the stream goes on from there. A side that says a hello cannot know whether it was heard. So sockets that said one and got no
//! answer stay open until a later one has, or the flow ends: the receiver takes the end of a socket for the flow's.
//!
//! `connection/dial.rs` has what is dialled, `connection/liveness.rs` what is found where nothing is answered, and the questions.
//!
//! Deliberately absent: which path comes next, and when to look (the sender and the transport know).

mod dial;
mod liveness;

use mccs_ipc::types::Handle;

use self::dial::Dial;
use self::liveness::Stall;
pub(in crate::tcp) use self::liveness::{LOOKS, Look};
use crate::Fault;
use crate::tcp::flow::retransmission::Log;
use crate::tcp::probe::Probe;
use crate::tcp::socket::peer_gone;
use crate::tcp::socket::{Moved, Socket};
use crate::tcp::watches::Ready;

/// The socket in use.
#[derive(Debug)]
pub(in crate::tcp) struct Line {
    pub(in crate::tcp) socket: Socket,
    pub(in crate::tcp) watch: Handle,
    pub(in crate::tcp) readable: bool,
    pub(in crate::tcp) writable: bool,
    /// Nothing more will be written.
    pub(in crate::tcp) ended: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::tcp) struct Connection {
    number: u16,
    pub(in crate::tcp) line: Option<Line>,
    dial: Option<Dial>,
    /// Dialled, and given up after they had said hello.
    given_up: Vec<(Socket, Handle)>,
    /// Over the line's path, in its silence.
    questions: Vec<Probe>,
    /// One of them that was answered, to be dialled.
    answered: Option<Socket>,
    /// The line, or what is dialled first, has taken the place of one on the same path, and has brought nothing yet.
    is_second: bool,
    is_cut: bool,
    /// A hello has left over one of its sockets.
    has_reached_peer: bool,
    /// Sockets that were dialled.
    dials: u32,
    /// Paths that were tried since the last one that worked.
    tries: usize,
    /// Sockets that have become its line.
    openings: u32,
    /// Bytes that were sent, or are to be.
    pub(in crate::tcp) log: Log,
    /// The line was given everything before this place in the stream.
    pub(in crate::tcp) position: u64,
    /// Path of the line, as the sender counts paths.
    pub(in crate::tcp) path: usize,
    stall: Stall,
}

impl Connection {
    /// A connection that is not dialled yet.
    pub(in crate::tcp) fn new(number: u16) -> Self {
        Connection {
            number,
            line: None,
            dial: None,
            given_up: Vec::new(),
            questions: Vec::new(),
            answered: None,
            is_second: false,
            is_cut: false,
            has_reached_peer: false,
            dials: 0,
            tries: 0,
            openings: 0,
            log: Log::new(),
            position: 0,
            path: 0,
            stall: Stall::default(),
        }
    }

    /// The path, of `count`, to dial over: those after the one that worked last, in turn, and that one again.
    pub(in crate::tcp) fn next_path(&mut self, count: usize) -> usize {
        let path = (self.path + self.tries) % count.max(1);
        self.tries += 1;
        self.is_second = false;
        path
    }

    /// The line, if bytes may be written to it and its acknowledgements mean something.
    pub(in crate::tcp) fn live(&mut self) -> Option<&mut Line> {
        self.line.as_mut().filter(|_| !self.is_cut)
    }

    /// How many sockets have been its line.
    pub(in crate::tcp) fn openings(&self) -> u32 {
        self.openings
    }

    pub(in crate::tcp) fn is_open(&self) -> bool {
        self.line.is_some()
    }

    /// Whether its peer's host was reached, also if it dials anew since.
    pub(in crate::tcp) fn has_reached_peer(&self) -> bool {
        self.has_reached_peer
    }

    /// The socket in use, or to be.
    pub(in crate::tcp) fn socket(&self) -> Option<&Socket> {
        self.line.as_ref().map(|line| &line.socket).or(self.dial.as_ref().map(|dial| &dial.socket))
    }

    pub(in crate::tcp) fn ready(&mut self, watch: Handle, ready: Ready) {
        if let Some(line) = self.line.as_mut().filter(|line| line.watch == watch) {
            line.readable |= ready.readable || ready.hung_up;
            line.writable |= ready.writable || ready.hung_up;
        }
        if let Some(dial) = self.dial.as_mut().filter(|dial| dial.watch == watch) {
            dial.readable |= ready.readable || ready.hung_up;
            dial.writable |= ready.writable || ready.hung_up;
        }
    }

    /// There are `count` other paths from here on; `place` is where one of those before is now. Returns whether the first of them is to be dialled:
    /// not where the line goes there already.
    pub(in crate::tcp) fn recount(&mut self, count: usize, place: impl Fn(usize) -> Option<usize>) -> bool {
        let path = place(self.path);
        if path == Some(0) && self.dial.is_none() {
            (self.path, self.tries) = (0, 1);
            return false;
        }
        self.end_questions();
        self.path = path.unwrap_or(0);
        // The next one is the first.
        self.tries = (count - self.path) % count.max(1);
        true
    }

    /// The path that brings no answer, as the sender counts them: what is dialled goes there, or else the line.
    pub(in crate::tcp) fn failing_path(&self) -> usize {
        self.dial.as_ref().map_or(self.path, |dial| dial.path)
    }

    /// A dialled socket becomes the line; `received` bytes of the stream have come.
    fn open(&mut self, received: u64, closed: &mut Vec<Handle>) -> Result<(), Fault> {
        if received < self.log.start() || received > self.position {
            return Err(Fault::Protocol("it says that bytes have come which were not sent, or has lost some"));
        }
        let Some(dial) = self.dial.take() else { return Ok(()) };
        let line = Line { socket: dial.socket, watch: dial.watch, readable: true, writable: true, ended: false };
        if let Some(old) = self.line.replace(line) {
            old.socket.close(false);
            closed.push(old.watch);
        }
        for (socket, watch) in self.given_up.drain(..) {
            socket.close(false);
            closed.push(watch);
        }
        self.log.acknowledge(received);
        self.end_questions();
        self.is_second = self.openings > 0 && dial.path == self.path;
        // Bytes acknowledged from here on came over the line.
        self.stall = Stall { acknowledged: received, looked_at: self.stall.looked_at, ..Stall::default() };
        (self.position, self.path, self.is_cut) = (received, dial.path, false);
        (self.tries, self.openings) = (1, self.openings + 1);
        Ok(())
    }

    /// Bytes of the stream that the peer's kernel has acknowledged, where the socket can tell.
    pub(in crate::tcp) fn acknowledged(&self) -> Option<u64> {
        let line = self.line.as_ref().filter(|_| !self.is_cut)?;
        // The end of the stream counts as a byte.
        let unacknowledged = line.socket.unacknowledged()?.saturating_sub(u64::from(line.ended));
        Some(self.position.saturating_sub(unacknowledged))
    }

    /// The line's path is taken for dead, whatever it will bring.
    pub(in crate::tcp) fn cut(&mut self) {
        self.is_cut = true;
    }

    pub(in crate::tcp) fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Forgets sockets that were given up and that the peer has closed: it has not taken them for the line. Returns their watches.
    pub(in crate::tcp) fn forget_refused(&mut self) -> impl Iterator<Item = Handle> {
        let closed = self.given_up.extract_if(.., |(socket, _)| is_closed(socket));
        closed.map(|(socket, watch)| {
            socket.close(false);
            watch
        })
    }

    /// Whether it has no socket at all: another is dialled when it is looked at.
    pub(in crate::tcp) fn is_lost(&self) -> bool {
        self.line.is_none() && self.dial.is_none()
    }

    /// The receiver has nothing to say: what is readable is its end, or wrong.
    pub(in crate::tcp) fn check_peer(&mut self) -> Result<(), Fault> {
        let Some(line) = self.line.as_mut().filter(|line| line.readable && !self.is_cut) else { return Ok(()) };
        match line.socket.read_slice(&mut [0; 1]).map_err(peer_gone)? {
            Moved::Bytes(_) => Err(Fault::Protocol("a receiver sends bytes")),
            Moved::End => Err(Fault::Closed),
            Moved::WouldBlock => {
                line.readable = false;
                Ok(())
            }
        }
    }

    /// Watches of its sockets.
    pub(in crate::tcp) fn watches(&self) -> impl Iterator<Item = Handle> {
        let line = self.line.as_ref().map(|line| line.watch);
        let dial = self.dial.as_ref().map(|dial| dial.watch);
        line.into_iter().chain(dial).chain(self.given_up.iter().map(|(_, watch)| *watch))
    }

    /// Ends its sockets. Returns their watches.
    pub(in crate::tcp) fn end(self, rest_is_wanted: bool) -> impl Iterator<Item = Handle> {
        let line = self.line.map(|line| (line.socket, line.watch));
        let dial = self.dial.map(|dial| (dial.socket, dial.watch));
        self.questions.into_iter().map(Probe::into_socket).chain(self.answered).for_each(|socket| socket.close(false));
        line.into_iter().chain(dial).chain(self.given_up).map(move |(socket, watch)| {
            socket.close(rest_is_wanted);
            watch
        })
    }
}

/// Whether the peer has ended a socket on which it has nothing to say yet.
fn is_closed(socket: &Socket) -> bool {
    !matches!(socket.read_slice(&mut [0; 1]), Ok(Moved::Bytes(_) | Moved::WouldBlock))
}
