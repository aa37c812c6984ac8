//! The metrics engine: HTTP server for Prometheus, with connections and their time-outs.
//!
//! ```text
//! accepted --bytes--> asking --head complete--> answering --all written--> closing --peer closes--> gone
//!     any state --its time is over--> gone
//! ```
//!
//! Nothing here waits: sockets do not block, the engine sleeps on one descriptor that watches all of them, and on the earliest
//! deadline. Whoever connects may be hostile. So there are few connections, each has little time and one request, and the text is made
//! anew at most ten times a second, however many ask: a flood costs a bounded share of the runtime.
//!
//! Deliberately absent: TLS and passwords. The address says who may read; a proxy in front can say it better.

mod families;
#[cfg(test)]
mod guide;
pub mod http;
pub mod otlp;
mod prometheus;

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use mccs_registry::Overseer;
use mccs_runtime::{Context, Engine, Progress};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use self::http::{HEAD_BYTES_MAX, Status, answer, asked};
use self::prometheus::render;

/// Scrapers at a time; one or two are usual. If there are more, one goes, see [`Connection::keeps`]: they may all
/// be hostile.
const CONNECTIONS_MAX: usize = 16;
/// Time for the head of a request to come.
const ASK_WITHIN: Duration = Duration::from_secs(5);
/// Time for an answer to be taken.
const TAKE_WITHIN: Duration = Duration::from_secs(10);
/// Time for the peer to close when it has its answer. Its other bytes are thrown away meanwhile: closing before would make
/// the kernel throw the answer away.
const CLOSE_WITHIN: Duration = Duration::from_secs(1);
/// A connection that takes nothing of its answer for so long makes room before all others.
const STALLED_AFTER: Duration = Duration::from_secs(1);
/// The text is at most so old.
const RENDER_EVERY: Duration = Duration::from_millis(100);
/// Bytes of a connection that a poll reads or writes.
const TURN_BYTES: usize = 64 << 10;
/// Pause when the process is out of descriptors or memory.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// The listener's mark among the descriptors.
const LISTENER_TOKEN: u64 = u64::MAX;
/// Readiness that is taken at a time.
const EVENTS_MAX: usize = CONNECTIONS_MAX + 1;

/// How far a connection is.
enum Stage {
    /// Its request so far.
    Asking(Vec<u8>),
    /// The rest of the answer.
    Answering { answer: Vec<u8>, written: usize },
    /// It has its answer.
    Closing,
}

struct Connection {
    socket: TcpStream,
    stage: Stage,
    until: Instant,
    /// When it last took some of its answer, or came.
    moved_at: Instant,
}

/// How good a claim to its place a connection has, from none on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Claim {
    /// Its answer is not taken.
    Stalled,
    /// It has not asked yet.
    Asks,
    /// It has its answer, which closing now might cost it.
    HasAnswer,
    /// It takes its answer.
    Takes,
}

impl Connection {
    /// If there are too many, the one with the least claim goes, and of several the one that has been still for longest: a scrape that is
    /// on its way is not ended by connections that say nothing.
    fn keeps(&self, now: Instant) -> (Claim, Instant) {
        let is_stalled = now.saturating_duration_since(self.moved_at) >= STALLED_AFTER;
        let claim = match &self.stage {
            Stage::Asking(_) => Claim::Asks,
            Stage::Answering { .. } if is_stalled => Claim::Stalled,
            Stage::Answering { .. } => Claim::Takes,
            Stage::Closing => Claim::HasAnswer,
        };
        (claim, self.moved_at)
    }
}

/// Whether a connection goes on.
#[derive(PartialEq, Eq)]
enum Served {
    Waits,
    Gone,
}

/// See the module's documentation.
pub struct MetricsEngine {
    listener: TcpListener,
    /// Watches the connections: an engine's own descriptors never change.
    epoll: Epoll,
    /// By number, so in the order of their age.
    connections: BTreeMap<u64, Connection>,
    next: u64,
    overseer: Overseer,
    /// The last text, and when it was made.
    rendered: Option<(Instant, Arc<str>)>,
    /// Until when nobody is let in, since the process is out of descriptors or memory. The listener is not watched meanwhile, or it
    /// would keep the engine awake.
    deaf_until: Option<Instant>,
}

/// Listens for scrapers.
///
/// # Errors
/// The address is taken or not this host's, or the kernel refuses a descriptor.
pub fn listen(at: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(at).with_context(|| format!("metrics.listen = \"{at}\""))
}

impl MetricsEngine {
    /// Listens.
    ///
    /// # Errors
    /// The address is taken or not this host's, or the kernel refuses a descriptor.
    pub fn new(listen: SocketAddr, overseer: Overseer) -> std::io::Result<Self> {
        Self::over(TcpListener::bind(listen)?, overseer)
    }

    /// Answers who connects to a socket.
    ///
    /// # Errors
    /// The kernel refuses a descriptor.
    pub fn over(listener: TcpListener, overseer: Overseer) -> std::io::Result<Self> {
        listener.set_nonblocking(true)?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER_TOKEN))?;
        let connections = BTreeMap::new();
        Ok(MetricsEngine { listener, epoll, connections, next: 0, overseer, rendered: None, deaf_until: None })
    }

    /// The path that it listens on.
    ///
    /// # Errors
    /// The kernel's reason.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    fn count_refused(&self) {
        self.overseer.registry.refused.metrics.fetch_add(1, Ordering::Relaxed);
    }

    /// Watches the listener again when that makes sense.
    fn listen_again(&mut self, now: Instant) {
        if self.deaf_until.is_some_and(|until| until <= now) {
            let watched = self.epoll.add(&self.listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER_TOKEN));
            self.deaf_until = watched.err().map(|_| now + ACCEPT_AGAIN_AFTER);
        }
    }

    /// Takes connections in.
    fn accept(&mut self, now: Instant) {
        for _ in 0..CONNECTIONS_MAX {
            let socket = match self.listener.accept() {
                Ok((socket, _)) => socket,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                // One that has gone again is no reason to wait; the next look finds the others.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                Err(_) => {
                    let _ = self.epoll.delete(&self.listener);
                    self.deaf_until = Some(now + ACCEPT_AGAIN_AFTER);
                    return;
                }
            };
            if self.connections.len() >= CONNECTIONS_MAX {
                self.make_room(now);
            }
            let event = EpollEvent::new(EpollFlags::EPOLLIN, self.next);
            if socket.set_nonblocking(true).is_ok() && self.epoll.add(&socket, event).is_ok() {
                let (stage, until) = (Stage::Asking(Vec::new()), now + ASK_WITHIN);
                self.connections.insert(self.next, Connection { socket, stage, until, moved_at: now });
                self.next += 1;
                // Its request is often there already, and then it need not fear those that come behind it.
                self.serve(self.next - 1, now);
            }
        }
    }

    /// Ends a connection for another.
    fn make_room(&mut self, now: Instant) {
        let least = self.connections.iter().min_by_key(|(number, connection)| (connection.keeps(now), **number));
        if let Some(gone) = least.map(|(number, _)| *number).and_then(|number| self.connections.remove(&number)) {
            self.count_refused();
            let _ = self.epoll.delete(&gone.socket);
        }
    }

    fn text(&mut self, now: Instant) -> Arc<str> {
        match &self.rendered {
            Some((at, text)) if now.saturating_duration_since(*at) < RENDER_EVERY => Arc::clone(text),
            _ => {
                let text: Arc<str> = render(&self.overseer.look()).into();
                self.rendered = Some((now, Arc::clone(&text)));
                text
            }
        }
    }

    fn serve(&mut self, number: u64, now: Instant) {
        let Some(mut connection) = self.connections.remove(&number) else { return };
        let served = self.serve_one(number, &mut connection, now).unwrap_or(Served::Gone);
        if served == Served::Gone {
            let _ = self.epoll.delete(&connection.socket);
        } else {
            self.connections.insert(number, connection);
        }
    }

    /// Goes on with a connection as far as it goes without waiting.
    fn serve_one(&mut self, number: u64, connection: &mut Connection, now: Instant) -> std::io::Result<Served> {
        if let Stage::Asking(head) = &mut connection.stage {
            let mut more = [0; HEAD_BYTES_MAX];
            let room = HEAD_BYTES_MAX - head.len().min(HEAD_BYTES_MAX);
            let count = match connection.socket.read(&mut more[..room]) {
                Ok(0) => return Ok(Served::Gone),
                Ok(count) => count,
                Err(error) => return waits(error),
            };
            head.extend_from_slice(&more[..count]);
            let Some(status) = asked(head) else { return Ok(Served::Waits) };
            if !matches!(status, Status::Ok | Status::NotFound | Status::MethodNotAllowed) {
                self.count_refused();
            }
            let text = if status == Status::Ok { self.text(now) } else { "".into() };
            connection.stage = Stage::Answering { answer: answer(status, &text), written: 0 };
            (connection.until, connection.moved_at) = (now + TAKE_WITHIN, now);
            let mut event = EpollEvent::new(EpollFlags::EPOLLOUT, number);
            self.epoll.modify(&connection.socket, &mut event)?;
        }
        if let Stage::Answering { answer, written } = &mut connection.stage {
            let end = answer.len().min(*written + TURN_BYTES);
            match connection.socket.write(&answer[*written..end]) {
                Ok(count) => (*written, connection.moved_at) = (*written + count, now),
                Err(error) => return waits(error),
            }
            if *written < answer.len() {
                return Ok(Served::Waits);
            }
            connection.socket.shutdown(Shutdown::Write)?;
            (connection.stage, connection.until) = (Stage::Closing, now + CLOSE_WITHIN);
            let mut event = EpollEvent::new(EpollFlags::EPOLLIN, number);
            self.epoll.modify(&connection.socket, &mut event)?;
        }
        let mut ignored = [0; HEAD_BYTES_MAX];
        match connection.socket.read(&mut ignored) {
            Ok(0) => Ok(Served::Gone),
            Ok(_) => Ok(Served::Waits),
            Err(error) => waits(error),
        }
    }

    /// Ends connections that have had their time. Only those that were not done with it have been refused something.
    fn end_late(&mut self, now: Instant) {
        for (_, late) in self.connections.extract_if(.., |_, connection| connection.until <= now).collect::<Vec<_>>() {
            if !matches!(late.stage, Stage::Closing) {
                self.count_refused();
            }
            let _ = self.epoll.delete(&late.socket);
        }
    }
}

fn waits(error: std::io::Error) -> std::io::Result<Served> {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::Interrupted => Ok(Served::Waits),
        _ => Err(error),
    }
}

impl Engine for MetricsEngine {
    fn name(&self) -> String {
        "metrics".into()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.epoll.0.as_fd()]
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        self.listen_again(cx.now);
        let mut events = [EpollEvent::empty(); EVENTS_MAX];
        // An interrupted look is as good as an empty one: the descriptor stays readable.
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in events.iter().take(count) {
            match event.data() {
                LISTENER_TOKEN => self.accept(cx.now),
                number => self.serve(number, cx.now),
            }
        }
        self.end_late(cx.now);
        if count > 0 {
            return Progress::Busy;
        }
        let deadlines = self.connections.values().map(|connection| connection.until);
        Progress::Idle { wake_at: deadlines.chain(self.deaf_until).min() }
    }
}

#[cfg(test)]
mod tests;
