//! The control engine: answers the operator.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use mccs_ipc::handshake::{Listener, Socket, SocketError};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use super::transport::TransportPool;
use crate::control::{Chunk, CommView, ControlAnswer, ControlRequest, HostView, SessionView, chunks};
use crate::runtime::{Context, Engine, Progress, Runtimes};
use crate::telemetry::Registry;

/// Operators at a time; more wait to be accepted.
const CONNECTIONS_MAX: usize = 16;

struct Connection {
    socket: Socket,
    greeted: bool,
    request: Vec<u8>,
    answer: VecDeque<Chunk>,
    answered: bool,
}

/// What the operator may see and change.
pub struct Controlled {
    /// Sessions and communicators.
    pub registry: Arc<Registry>,
    /// Engines and where they run.
    pub runtimes: Arc<Runtimes>,
    /// Transport engines.
    pub transports: Arc<TransportPool>,
}

/// See the module's documentation.
pub struct ControlEngine {
    listener: Listener,
    /// Watches the connections: an engine's own descriptors never change.
    epoll: Epoll,
    connections: BTreeMap<u64, Connection>,
    next: u64,
    controlled: Controlled,
}

impl ControlEngine {
    /// Listens on `listener`.
    ///
    /// # Errors
    /// The kernel's refusal of a descriptor.
    pub fn new(listener: Listener, controlled: Controlled) -> std::io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, u64::MAX))?;
        Ok(ControlEngine { listener, epoll, connections: BTreeMap::new(), next: 0, controlled })
    }

    fn accept(&mut self) -> bool {
        if self.connections.len() >= CONNECTIONS_MAX {
            return false;
        }
        let Ok(Some((socket, peer))) = self.listener.accept() else { return false };
        let own = nix::unistd::geteuid().as_raw();
        if peer.uid != 0 && peer.uid != own {
            tracing::debug!(peer.uid, "control connection refused");
            return true;
        }
        if self.epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, self.next)).is_ok() {
            let connection =
                Connection { socket, greeted: false, request: Vec::new(), answer: VecDeque::new(), answered: false };
            self.connections.insert(self.next, connection);
            self.next += 1;
        }
        true
    }

    fn answer(&self, request: &[u8]) -> ControlAnswer {
        let Controlled { registry, runtimes, transports } = &self.controlled;
        let done = |result: Result<(), String>| result.map_or_else(ControlAnswer::Refused, |()| ControlAnswer::Done);
        match serde_json::from_slice(request) {
            Ok(ControlRequest::Sessions) => {
                let comms = registry.comms();
                let view = |session: &Arc<_>| SessionView::of(session, &comms);
                ControlAnswer::Sessions(registry.sessions().iter().map(view).collect())
            }
            Ok(ControlRequest::Communicators) => {
                ControlAnswer::Communicators(registry.comms().iter().map(|comm| CommView::of(comm)).collect())
            }
            Ok(ControlRequest::Engines) => {
                ControlAnswer::Engines { runtimes: runtimes.runtimes(), engines: runtimes.engines() }
            }
            Ok(ControlRequest::Hosts) => {
                let now = Instant::now();
                ControlAnswer::Hosts(registry.hosts().iter().map(|host| HostView::of(host, now)).collect())
            }
            Ok(ControlRequest::ScaleTransports { count }) => {
                done(transports.resize(count).map_err(|error| error.to_string()))
            }
            Ok(ControlRequest::MoveEngine { engine, runtime }) => {
                done(runtimes.move_engine(engine, runtime).map_err(|error| error.to_string()))
            }
            Err(error) => ControlAnswer::Refused(format!("the request cannot be read: {error}")),
        }
    }

    /// Serves one connection a little. Returns whether it is to be kept.
    fn serve(&self, connection: &mut Connection) -> Result<(), SocketError> {
        if !connection.greeted {
            if connection.socket.recv_hello()?.is_none() {
                return Ok(());
            }
            connection.socket.send_hello(0)?;
            connection.greeted = true;
        }
        if !connection.answered {
            let Some((Chunk { more, bytes }, _)) = connection.socket.recv::<Chunk>()? else { return Ok(()) };
            connection.request.extend(bytes);
            if more && connection.request.len() < crate::control::CHUNK_BYTES {
                return Ok(());
            }
            let answer = self.answer(&connection.request);
            let text = serde_json::to_vec(&answer).unwrap_or_default();
            connection.answer = chunks(&text).into();
            connection.answered = true;
        }
        while let Some(chunk) = connection.answer.front() {
            match connection.socket.send(chunk, &[]) {
                Ok(()) => drop(connection.answer.pop_front()),
                Err(SocketError::WouldBlock) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Err(SocketError::Closed)
    }
}

impl Engine for ControlEngine {
    fn name(&self) -> String {
        "control".into()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.epoll.0.as_fd()]
    }

    fn poll(&mut self, _: &Context) -> Progress {
        let mut busy = self.accept();
        for (number, mut connection) in std::mem::take(&mut self.connections) {
            let before = (connection.greeted, connection.request.len(), connection.answer.len());
            if self.serve(&mut connection).is_ok() {
                // A reader that is slower than its answer keeps the engine awake: at most the few that may connect.
                busy |= before != (connection.greeted, connection.request.len(), connection.answer.len())
                    || !connection.answer.is_empty();
                self.connections.insert(number, connection);
            } else {
                let _ = self.epoll.delete(&connection.socket);
                busy = true;
            }
        }
        if busy { Progress::Busy } else { Progress::IDLE }
    }
}
