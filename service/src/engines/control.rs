//! The control engine: answers the operator.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mccs_ipc::handshake::{Listener, Socket, SocketError};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use super::controller::ControllerInput;
use super::proxy::{Asked, OperatorAnswer, OperatorReply, ProxyMessage, Wish};
use super::transport::TransportPool;
use crate::control::overview::Overseer;
use crate::control::{
    Chunk, CommView, ControlAnswer, ControlRequest, GpuView, HostView, SessionView, TRACE_MAX, TraceBegun, chunks,
};
use crate::runtime::{Context, Engine, Mailbox, Progress, Sender, WakerSlot};
use crate::telemetry::recorder::Recorders;

/// Operators at a time; more wait to be accepted.
const CONNECTIONS_MAX: usize = 16;
/// Answers of other engines that may wait: each connection asks once, and some go before they are answered.
const REPLIES_MAX: usize = 1024;

struct Connection {
    socket: Socket,
    greeted: bool,
    request: Vec<u8>,
    answer: VecDeque<Chunk>,
    /// Goes with the first part of the answer.
    memory: Option<OwnedFd>,
    stage: Stage,
}

/// How far a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It is being read.
    Asking,
    /// A proxy engine will answer.
    Waiting,
    /// The answer is being written.
    Answered,
}

impl Connection {
    fn set_answer(&mut self, answer: &ControlAnswer) {
        self.answer = chunks(&serde_json::to_vec(answer).unwrap_or_default()).into();
        self.stage = Stage::Answered;
    }
}

/// What the operator may see and change.
pub struct Controlled {
    /// Sessions and communicators, engines and where they run.
    pub overseer: Overseer,
    /// Transport engines.
    pub transports: Arc<TransportPool>,
    /// Who has the communicators of the host device.
    pub proxy: Sender<ProxyMessage>,
    /// Who has those of GPUs that reach each other, where there are GPUs.
    pub gpus: Option<Sender<ProxyMessage>>,
    /// Who has, or knows, the controller role; where there is one.
    pub controller: Option<Sender<ControllerInput>>,
}

impl Controlled {
    /// Who has the communicator with a number, if there is one.
    fn proxy_of(&self, number: u64) -> &Sender<ProxyMessage> {
        let comm = self.overseer.registry.comms().into_iter().find(|comm| comm.number == number);
        let of_gpus = comm.filter(|comm| comm.direct.is_some()).and(self.gpus.as_ref());
        of_gpus.unwrap_or(&self.proxy)
    }
}

/// See the module's documentation.
pub struct ControlEngine {
    listener: Listener,
    /// Watches the connections: an engine's own descriptors never change.
    epoll: Epoll,
    connections: BTreeMap<u64, Connection>,
    next: u64,
    controlled: Controlled,
    /// Answers of proxy engines, by connection.
    replies: Mailbox<OperatorReply>,
    /// Until when engines record: whoever asked for it may be gone.
    tracing_until: Option<Instant>,
}

impl ControlEngine {
    /// Listens on `listener`.
    ///
    /// # Errors
    /// The kernel's refusal of a descriptor.
    pub fn new(listener: Listener, controlled: Controlled) -> std::io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, u64::MAX))?;
        let replies = Mailbox::new(REPLIES_MAX);
        let (connections, tracing_until) = (BTreeMap::new(), None);
        Ok(ControlEngine { listener, epoll, connections, next: 0, controlled, replies, tracing_until })
    }

    /// To be set before the engine is polled: answers of other engines wake it.
    #[must_use]
    pub fn waker(&self) -> &WakerSlot {
        self.replies.waker()
    }

    fn accept(&mut self) -> bool {
        if self.connections.len() >= CONNECTIONS_MAX {
            return false;
        }
        let Ok(Some((socket, peer))) = self.listener.accept() else { return false };
        let own = nix::unistd::geteuid().as_raw();
        if peer.uid != 0 && peer.uid != own {
            tracing::debug!(peer.uid, "control connection refused");
            self.controlled.overseer.registry.refused.control.fetch_add(1, Ordering::Relaxed);
            return true;
        }
        if self.epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, self.next)).is_ok() {
            let (request, answer, stage) = (Vec::new(), VecDeque::new(), Stage::Asking);
            let connection = Connection { socket, greeted: false, request, answer, memory: None, stage };
            self.connections.insert(self.next, connection);
            self.next += 1;
        }
        true
    }

    /// The answer; `None` if another engine will give it to connection `number`.
    fn answer(&mut self, number: u64, connection: &mut Connection) -> Option<ControlAnswer> {
        let Controlled { overseer, transports, controller, .. } = &self.controlled;
        let Overseer { registry, runtimes, .. } = overseer;
        let done = |result: Result<(), String>| result.map_or_else(ControlAnswer::Refused, |()| ControlAnswer::Done);
        Some(match serde_json::from_slice(&connection.request) {
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
            Ok(ControlRequest::Gpus) => ControlAnswer::Gpus(registry.gpus().iter().map(GpuView::of).collect()),
            Ok(ControlRequest::Overview) => ControlAnswer::Overview(Box::new(overseer.look())),
            Ok(ControlRequest::Trace { duration_ms }) => {
                let recorders = Arc::clone(&registry.recorders);
                return Some(self.begin_trace(&recorders, Duration::from_millis(duration_ms)));
            }
            Ok(ControlRequest::TraceRings) => ControlAnswer::Tracing(trace_begun(&registry.recorders)),
            Ok(ControlRequest::TraceRing { ring }) => {
                connection.memory = registry.recorders.memory(ring);
                ControlAnswer::TraceRing
            }
            Ok(ControlRequest::ScaleTransports { count }) => {
                done(transports.resize(count).map_err(|error| error.to_string()))
            }
            Ok(ControlRequest::MoveEngine { engine, runtime }) => {
                done(runtimes.move_engine(engine, runtime).map_err(|error| error.to_string()))
            }
            Ok(ControlRequest::Reconfigure { communicator, change, window }) => {
                let wish = Wish::Change { change: Box::new(change), window };
                return self.ask(communicator, number, |number, asked| ProxyMessage::Wish { number, wish, asked });
            }
            Ok(ControlRequest::Unpin { communicator }) => {
                let wish = Wish::Unpin;
                return self.ask(communicator, number, |number, asked| ProxyMessage::Wish { number, wish, asked });
            }
            Ok(ControlRequest::WhyStuck { communicator }) => {
                return self.ask(communicator, number, |number, asked| ProxyMessage::WhyStuck { number, asked });
            }
            Ok(ControlRequest::Controller { request }) => {
                let none = "service.toml names no [controller]: nobody decides for the cluster";
                let Some(controller) = controller else { return Some(ControlAnswer::Refused(none.into())) };
                let asked = Asked::new(number, self.replies.sender());
                match controller.send(ControllerInput::Asked { request, asked }) {
                    Ok(()) => return None,
                    Err(_) => ControlAnswer::Refused("the controller is too busy; try again".into()),
                }
            }
            Err(error) => ControlAnswer::Refused(format!("the request cannot be read: {error}")),
        })
    }

    /// Asks who has a communicator, for a connection. Returns an answer if that cannot be.
    fn ask(
        &self,
        communicator: u64,
        connection: u64,
        message: impl FnOnce(u64, Asked) -> ProxyMessage,
    ) -> Option<ControlAnswer> {
        let asked = Asked::new(connection, self.replies.sender());
        let sent = self.controlled.proxy_of(communicator).send(message(communicator, asked));
        let busy = "the proxy engine is too busy; try again";
        sent.is_err().then(|| ControlAnswer::Refused(busy.into()))
    }

    /// Has engines record for so long, or for as long as somebody else wants, if that is longer.
    fn begin_trace(&mut self, recorders: &Recorders, duration: Duration) -> ControlAnswer {
        if duration.is_zero() || duration > TRACE_MAX {
            return ControlAnswer::Refused(format!("a trace takes up to {TRACE_MAX:?}, and more than nothing"));
        }
        let until = Instant::now() + duration;
        self.tracing_until = Some(self.tracing_until.map_or(until, |other| other.max(until)));
        recorders.begin();
        ControlAnswer::Tracing(trace_begun(recorders))
    }

    /// Serves one connection a little. Returns whether it is to be kept.
    fn serve(&mut self, number: u64, connection: &mut Connection) -> Result<(), SocketError> {
        if !connection.greeted {
            if connection.socket.recv_hello()?.is_none() {
                return Ok(());
            }
            connection.socket.send_hello(0)?;
            connection.greeted = true;
        }
        if connection.stage == Stage::Asking {
            let Some((Chunk { more, bytes }, _)) = connection.socket.recv::<Chunk>()? else { return Ok(()) };
            connection.request.extend(bytes);
            if more && connection.request.len() < crate::control::REQUEST_BYTES_MAX {
                return Ok(());
            }
            match self.answer(number, connection) {
                Some(answer) => connection.set_answer(&answer),
                None => connection.stage = Stage::Waiting,
            }
        }
        if connection.stage == Stage::Waiting {
            return Ok(());
        }
        while let Some(chunk) = connection.answer.front() {
            let memory: Vec<_> = connection.memory.iter().map(AsFd::as_fd).collect();
            match connection.socket.send(chunk, &memory) {
                Ok(()) => {
                    connection.answer.pop_front();
                    connection.memory = None;
                }
                Err(SocketError::WouldBlock) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Err(SocketError::Closed)
    }
}

fn trace_begun(recorders: &Recorders) -> TraceBegun {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    TraceBegun { from_ns: recorders.now_ns(), wall_ns: wall.as_nanos() as u64, rings: recorders.rings() }
}

impl Engine for ControlEngine {
    fn name(&self) -> String {
        "control".into()
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.epoll.0.as_fd()]
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        let mut busy = self.accept();
        if self.tracing_until.is_some_and(|until| until <= cx.now) {
            self.tracing_until = None;
            self.controlled.overseer.registry.recorders.end();
        }
        while let Some((number, answer)) = self.replies.pop() {
            busy = true;
            // An operator who has gone has no connection any more.
            if let Some(connection) = self.connections.get_mut(&number) {
                connection.set_answer(&match answer {
                    Ok(OperatorAnswer::Reconfigured(made)) => {
                        ControlAnswer::Reconfigured { epoch: made.epoch, cut: made.cut }
                    }
                    Ok(OperatorAnswer::Stuck(report)) => ControlAnswer::Stuck(report),
                    Ok(OperatorAnswer::Controller(answer)) => ControlAnswer::Controller(answer),
                    Ok(OperatorAnswer::Done) => ControlAnswer::Done,
                    Err(refused) => ControlAnswer::Refused(refused.reason),
                });
            }
        }
        for (number, mut connection) in std::mem::take(&mut self.connections) {
            let before = (connection.greeted, connection.request.len(), connection.answer.len());
            if self.serve(number, &mut connection).is_ok() {
                // A reader that is slower than its answer keeps the engine awake: at most the few that may connect.
                busy |= before != (connection.greeted, connection.request.len(), connection.answer.len())
                    || !connection.answer.is_empty();
                self.connections.insert(number, connection);
            } else {
                let _ = self.epoll.delete(&connection.socket);
                busy = true;
            }
        }
        if busy { Progress::Busy } else { Progress::Idle { wake_at: self.tracing_until } }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        self.replies.is_empty()
    }
}
