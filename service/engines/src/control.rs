//! The control engine: answers operators (`mccsctl`) on the control socket. Another one answers observers on theirs, who change nothing
//! but by tokens: so many as they may be, operators find room.

mod connection;
mod controlled;
mod tenants;
#[cfg(test)]
mod tests;
mod tokens;
mod upgrades;
mod with_parts;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mccs_control::{
    Call, Caller, Chunk, ControlAnswer, ControlRequest, DrainView, GpuView, TRACE_MAX, TraceBegun, chunks,
};
use mccs_controller::history::Went;
use mccs_controller::messages::answer::ControllerRequest;
use mccs_controller::messages::message::Act;
use mccs_ipc::handshake::{Listener, Socket, SocketError};
use mccs_registry::{Overseer, session_view};
use mccs_runtime::{Context, Engine, Mailbox, NumaNodes, Progress, WakerSlot};
use mccs_telemetry::recorder::Recorders;
use mccs_tenants::FdCloser;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use self::connection::{Connection, Stage};
pub use self::controlled::Controlled;
use self::controlled::one_line;
pub use self::tenants::TenantDesk;
use self::tokens::Judged;
pub use self::tokens::Tokens;
pub use self::upgrades::{UpgradeDesk, UpgradeRequest};
use self::with_parts::{Then, WithParts};
use super::controller::ControllerInput;
use super::proxy::{
    DiagnosisRounds, OperatorAnswer, OperatorMessage, OperatorReply, OperatorRequest, OperatorResult, ReplyTo,
};

/// Operators at a time; more wait to be accepted.
const CONNECTIONS_MAX: usize = 16;
/// Questions of observers that engines here are answering at a time, also for those who have gone, besides one of each kind to all hosts,
/// and one comparison of a policy. More are refused: engines answer a limited number at a time, of which operators find the rest.
const OBSERVERS_QUESTIONS_MAX: usize = 12;
/// Pause when the process is out of descriptors or memory.
const ACCEPT_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// What the listener is called among the descriptors.
const LISTENER_TOKEN: u64 = u64::MAX;
/// Answers of other engines that may wait: each connection asks once, and some go before they are answered.
const REPLIES_MAX: usize = 1024;

/// Who may ask an engine, besides root and the service's own user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// Nobody else; and these may ask for everything.
    Operators,
    /// Users with these numbers. All may only look, and hand on what holders of tokens have signed.
    Observers(Vec<u32>),
}

impl Access {
    fn admits(&self, uid: u32) -> bool {
        let is_own = uid == 0 || uid == nix::unistd::geteuid().as_raw();
        is_own || matches!(self, Access::Observers(uids) if uids.contains(&uid))
    }

    fn allows(&self, request: &ControlRequest) -> bool {
        *self == Access::Operators || request.only_looks()
    }
}

/// Whom an observer's request asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asks {
    /// This engine alone.
    Nobody,
    /// An engine here.
    Engine,
    /// All hosts of the cluster, what they have.
    AllHosts,
    /// The same, and what is stuck: each host looks at many communicators.
    WhatIsStuck,
    /// The controller, what it would decide for all communicators.
    Comparison,
}

impl Asks {
    fn of(request: &ControlRequest) -> Self {
        match request {
            ControlRequest::Cluster { stuck: true } => Asks::WhatIsStuck,
            ControlRequest::Cluster { stuck: false } => Asks::AllHosts,
            ControlRequest::Controller { request: ControllerRequest::Diff { .. } } => Asks::Comparison,
            ControlRequest::WhyStuck { .. } | ControlRequest::Accounts { .. } | ControlRequest::Controller { .. } => {
                Asks::Engine
            }
            _ => Asks::Nobody,
        }
    }
}

/// Tells somebody that they may not ask.
fn turn_away(socket: &Socket, uid: u32) {
    let reason = "root and the service's own user may ask; at the observers' socket also users of [observers] in service.toml, which \
                  `mccsctl reload` reads";
    let refused = ControlAnswer::Refused(format!("user {uid} may not ask here: {reason}"));
    let told = chunks(&serde_json::to_vec(&refused).unwrap_or_default());
    let _ = socket.send_hello(0).and_then(|()| told.iter().try_for_each(|chunk| socket.send(chunk, &[])));
}

/// Who asks, for history: the user, and the same with its command.
struct By {
    user: String,
    line: String,
}

/// A request that may be made.
struct Admitted {
    request: ControlRequest,
    by: By,
    asks: Asks,
}

/// See the module's documentation.
pub struct ControlEngine {
    access: Access,
    listener: Listener,
    /// Watches the connections: an engine's own descriptors never change.
    epoll: Epoll,
    connections: BTreeMap<u64, Connection>,
    next: u64,
    controlled: Controlled,
    /// Whether the listener is watched: not while nobody can be let in, or it would keep the engine awake.
    is_listening: bool,
    /// Until when nobody is let in, since the process is out of descriptors or memory.
    deaf_until: Option<Instant>,
    /// Answers of proxy engines, by connection.
    replies: Mailbox<OperatorReply>,
    /// What operators do that other engines answer, by connection; also of those who have gone.
    acts: BTreeMap<u64, Act>,
    /// Requests of callers' communicators that go on to their rails, by connection.
    with_parts: BTreeMap<u64, WithParts>,
    /// Whom connections have asked that has not answered; also for those who have gone.
    owed: BTreeMap<u64, Asks>,
    /// Closes connections of those who are not let in, who may have left in them what does not close.
    strangers: FdCloser<()>,
    /// Closes connections that have ended, and descriptors that came uncalled for.
    ended: FdCloser<()>,
}

impl ControlEngine {
    /// Listens on `listener`, for whom `access` lets in.
    ///
    /// # Errors
    /// The kernel's refusal of a descriptor.
    pub fn new(listener: Listener, access: Access, controlled: Controlled) -> std::io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, LISTENER_TOKEN))?;
        Ok(ControlEngine {
            access,
            listener,
            epoll,
            connections: BTreeMap::new(),
            next: 0,
            controlled,
            is_listening: true,
            deaf_until: None,
            replies: Mailbox::new(REPLIES_MAX),
            acts: BTreeMap::new(),
            with_parts: BTreeMap::new(),
            owed: BTreeMap::new(),
            strangers: FdCloser::default(),
            ended: FdCloser::default(),
        })
    }

    /// To be set before the engine is polled: answers of other engines wake it.
    #[must_use]
    pub fn waker(&self) -> &WakerSlot {
        self.replies.waker()
    }

    /// Whether somebody who comes can be let in: not while the service is handed over.
    fn may_accept(&self) -> bool {
        let has_room = self.connections.len() < CONNECTIONS_MAX;
        self.deaf_until.is_none() && has_room && self.controlled.handover.may_be_seen()
    }

    fn accept(&mut self, now: Instant) -> bool {
        self.deaf_until = self.deaf_until.filter(|until| now < *until);
        if !self.may_accept() {
            return false;
        }
        let (socket, peer) = match self.listener.accept() {
            Ok(Some(accepted)) => accepted,
            Ok(None) => return false,
            Err(_) => {
                self.deaf_until = Some(now + ACCEPT_AGAIN_AFTER);
                return false;
            }
        };
        if !self.access.admits(peer.uid) {
            tracing::debug!(peer.uid, "control connection refused");
            self.controlled.overseer.registry.refused.control.fetch_add(1, Ordering::Relaxed);
            turn_away(&socket, peer.uid);
            self.strangers.close_connection(socket);
        } else if self.epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, self.next)).is_ok() {
            let connection = Connection::new(socket, peer.uid, now);
            self.connections.insert(self.next, connection);
            self.next += 1;
        } else {
            self.ended.close_connection(socket);
        }
        true
    }

    /// Watches the listener if somebody who comes can be let in.
    fn listen(&mut self) {
        let wanted = self.may_accept();
        if wanted && !self.is_listening {
            let event = EpollEvent::new(EpollFlags::EPOLLIN, LISTENER_TOKEN);
            self.is_listening = self.epoll.add(&self.listener, event).is_ok();
        } else if !wanted && self.is_listening {
            let _ = self.epoll.delete(&self.listener);
            self.is_listening = false;
        }
    }

    /// The answer; `None` if another engine will give it to connection `number`. What changes something is logged, and told the controller.
    fn answer(&mut self, number: u64, connection: &mut Connection) -> Option<ControlAnswer> {
        let Call { request, by } = match serde_json::from_slice(&connection.request) {
            Ok(call) => call,
            Err(error) => return Some(ControlAnswer::Refused(format!("the request cannot be read: {error}"))),
        };
        let Admitted { request, by, asks } = match self.admit(request, &by, connection.uid) {
            Ok(admitted) => admitted,
            Err(answer) => return Some(answer),
        };
        let act = self.controlled.act_of(&request);
        let answer = self.answer_to(request, &by, number, connection);
        if answer.is_none() {
            self.owed.insert(number, asks);
        }
        if let Some(what) = act {
            let act = Act { what, by: by.line, went: Went::Pending };
            match &answer {
                Some(answer) => self.note_act(act, answer),
                None => drop(self.acts.insert(number, act)),
            }
        }
        answer
    }

    /// Whether a request may be made here, and by whom it counts as made.
    fn admit(&self, request: ControlRequest, by: &Caller, uid: u32) -> Result<Admitted, ControlAnswer> {
        if let ControlRequest::Act { act } = &request {
            // An operator's from here on, at whichever socket it came.
            return match self.controlled.tokens.judge(act, Instant::now()) {
                Ok(Judged::Request { request, by }) => {
                    Ok(Admitted { request, by: By { user: by.clone(), line: by }, asks: Asks::Nobody })
                }
                Ok(Judged::View(view)) => Err(ControlAnswer::Tokens(vec![view])),
                Err(refusal) => Err(ControlAnswer::ActRefused(refusal)),
            };
        }
        if !self.access.allows(&request) {
            let reason = "observers change nothing: ask at service.control_socket, as root or the service's user";
            return Err(ControlAnswer::Refused(reason.into()));
        }
        let asks = Asks::of(&request);
        if self.are_crowded(asks) {
            let reason = "as many questions of observers as may are being answered; try again in some seconds";
            return Err(ControlAnswer::Refused(reason.into()));
        }
        Ok(Admitted { request, by: By { user: by.user(uid), line: by.of_user(uid) }, asks })
    }

    /// Whether observers have asked as much as may: they are to leave operators room at other engines.
    fn are_crowded(&self, asks: Asks) -> bool {
        let asked = |whom: Asks| self.owed.values().filter(|owed| **owed == whom).count();
        self.access != Access::Operators
            && match asks {
                Asks::Nobody => false,
                Asks::Engine => asked(asks) >= OBSERVERS_QUESTIONS_MAX,
                Asks::AllHosts | Asks::WhatIsStuck | Asks::Comparison => asked(asks) > 0,
            }
    }

    /// What an operator did is known by how it was answered.
    fn note_act(&self, act: Act, answer: &ControlAnswer) {
        let went = match answer {
            ControlAnswer::Refused(reason) | ControlAnswer::TryAgain(reason) => Went::Failed(reason.clone()),
            // Who takes away what is gone has changed nothing.
            ControlAnswer::NoTenant => return,
            _ => Went::Done,
        };
        tracing::info!(what = act.what, by = act.by, ?went, "an operator reply_to");
        if let Some(controller) = &self.controlled.controller {
            // One that is too busy has it in the log alone.
            let _ = controller.send(ControllerInput::Acted(Act { went, ..act }));
        }
    }

    fn answer_to(
        &mut self,
        request: ControlRequest,
        by: &By,
        number: u64,
        connection: &mut Connection,
    ) -> Option<ControlAnswer> {
        let Controlled { overseer, transports, controller, .. } = &self.controlled;
        let Overseer { registry, runtimes, .. } = overseer;
        let done = |result: Result<(), String>| result.map_or_else(ControlAnswer::Refused, |()| ControlAnswer::Done);
        Some(match request {
            ControlRequest::Sessions => {
                let comms = registry.comms();
                let view = |session: &Arc<_>| session_view(session, &comms);
                ControlAnswer::Sessions(registry.sessions().iter().map(view).collect())
            }
            ControlRequest::Communicators => {
                ControlAnswer::Communicators(registry.comms().iter().map(|comm| comm.view()).collect())
            }
            ControlRequest::Failed => ControlAnswer::Failed(registry.failed.view(Instant::now())),
            ControlRequest::Engines => {
                ControlAnswer::Engines { runtimes: runtimes.runtimes(), engines: overseer.engines() }
            }
            ControlRequest::Hosts => {
                let now = Instant::now();
                ControlAnswer::Hosts(registry.host_views(now))
            }
            ControlRequest::Joining => ControlAnswer::Joining(registry.late_views(Instant::now())),
            ControlRequest::Gpus => ControlAnswer::Gpus(registry.gpus().iter().map(GpuView::of).collect()),
            ControlRequest::Overview => ControlAnswer::Overview(Box::new(overseer.look())),
            ControlRequest::Drain { drains, reason } => {
                if let Some(drains) = drains {
                    registry.set_draining(drains, reason.as_deref().map(one_line));
                }
                ControlAnswer::Drain(DrainView {
                    draining: registry.is_draining(),
                    reason: registry.draining_reason(),
                    sessions: registry.sessions().len(),
                    communicators: registry.comms().len(),
                })
            }
            ControlRequest::Trace { duration_ms } => {
                let recorders = Arc::clone(&registry.recorders);
                return Some(self.begin_trace(&recorders, Duration::from_millis(duration_ms)));
            }
            ControlRequest::TraceRings => ControlAnswer::Tracing(trace_begun(&registry.recorders)),
            ControlRequest::TraceRing { ring } => {
                connection.memory = registry.recorders.memory(ring);
                ControlAnswer::TraceRing
            }
            ControlRequest::ScaleTransports { count } => {
                done(transports.resize(count).map_err(|error| error.to_string()))
            }
            ControlRequest::MoveEngine { engine, runtime } => {
                done(runtimes.move_engine(engine, runtime).map_err(|error| error.to_string()))
            }
            ControlRequest::BindRuntime { runtime, to } => {
                let bound = runtimes.bind(runtime, &to, &NumaNodes::of_this_process());
                done(bound.map_err(|error| error.to_string()))
            }
            ControlRequest::Reconfigure { communicator, change, window } => {
                let request = OperatorRequest::Change { change: Box::new(change), window };
                return self.ask_with_parts(communicator, number, request);
            }
            ControlRequest::Unpin { communicator } => {
                return self.ask_with_parts(communicator, number, OperatorRequest::Unpin);
            }
            ControlRequest::WhyStuck { communicator } => {
                return self.ask_why_stuck(communicator, number, DiagnosisRounds::UntilCertain);
            }
            ControlRequest::Accounts { communicator } => {
                return self.ask_why_stuck(communicator, number, DiagnosisRounds::One);
            }
            ControlRequest::Cluster { stuck } => {
                let Some(controller) = controller else { return Some(ControlAnswer::NoController) };
                let reply_to = ReplyTo::new(number, self.replies.sender());
                match controller.send(ControllerInput::Cluster { stuck, reply_to }) {
                    Ok(()) => return None,
                    Err(_) => ControlAnswer::Refused("the controller's agent is too busy; try again".into()),
                }
            }
            ControlRequest::Tenants => ControlAnswer::Tenants(tenants::rows(registry, &*self.controlled.tenants)),
            ControlRequest::AddTenant { tenant } => self.controlled.tenants.add(*tenant),
            ControlRequest::RemoveTenant { name } => self.controlled.tenants.remove(&name),
            ControlRequest::AddToken { token } => {
                let made = self.controlled.tokens.add(token, by.user.clone(), Instant::now());
                made.map_or_else(ControlAnswer::Refused, ControlAnswer::Token)
            }
            ControlRequest::Tokens => ControlAnswer::Tokens(self.controlled.tokens.views(Instant::now())),
            ControlRequest::RemoveToken { id } => match self.controlled.tokens.remove(&id, Instant::now()) {
                Some(_) => ControlAnswer::Done,
                None => ControlAnswer::Refused("there is no such token: mccsctl token list has their ids".into()),
            },
            // It was admitted as the request that it is.
            ControlRequest::Act { .. } => ControlAnswer::Refused("an act within an act".into()),
            ControlRequest::Upgrade { binary, force } => {
                let none = || "the service is part of another program, which alone can replace it".to_owned();
                let desk = self.controlled.upgrades.as_ref().ok_or_else(none);
                match desk.and_then(|desk| desk.ask(binary, force, &by.line, &connection.socket)) {
                    Ok(()) => return None,
                    Err(reason) => ControlAnswer::Refused(reason),
                }
            }
            ControlRequest::Controller { request } => {
                let none = "service.toml names no [controller]: nobody decides for the cluster";
                let Some(controller) = controller else { return Some(ControlAnswer::Refused(none.into())) };
                let reply_to = ReplyTo::new(number, self.replies.sender());
                match controller.send(ControllerInput::Request { request, by: by.line.clone(), reply_to }) {
                    Ok(()) => return None,
                    Err(_) => ControlAnswer::Refused("the controller is too busy; try again".into()),
                }
            }
        })
    }

    /// Asks who has a communicator, for a connection. Returns an answer if that cannot be.
    fn ask(
        &self,
        communicator: u64,
        connection: u64,
        message: impl FnOnce(u64, ReplyTo) -> OperatorMessage,
    ) -> Option<ControlAnswer> {
        let reply_to = ReplyTo::new(connection, self.replies.sender());
        let sent = self.controlled.proxy_of(communicator).send(message(communicator, reply_to).into());
        let busy = "the proxy engine is too busy; try again";
        sent.is_err().then(|| ControlAnswer::Refused(busy.into()))
    }

    /// The same, of a communicator and its rails.
    fn ask_with_parts(
        &mut self,
        communicator: u64,
        connection: u64,
        request: OperatorRequest,
    ) -> Option<ControlAnswer> {
        let comms = self.controlled.overseer.registry.comms();
        let parts = WithParts::of(&comms, communicator, &request);
        let refused = self.ask_for(communicator, connection, request);
        if let (None, Some(parts)) = (&refused, parts) {
            self.with_parts.insert(connection, parts);
        }
        refused
    }

    fn ask_for(&self, communicator: u64, connection: u64, request: OperatorRequest) -> Option<ControlAnswer> {
        let message = |number, reply_to| OperatorMessage::Request { number, request, reply_to };
        self.ask(communicator, connection, message)
    }

    /// An engine has answered connection `number`: what the operator is told, unless others are asked first.
    fn told(&mut self, number: u64, answer: OperatorResult) -> Option<ControlAnswer> {
        let answer = match self.with_parts.remove(&number) {
            None => answer,
            Some(mut parts) => match parts.answered(answer) {
                Then::Tell(answer) => answer,
                Then::Ask(part, request) => {
                    let refused = self.ask_for(part, number, request);
                    if refused.is_none() {
                        self.with_parts.insert(number, parts);
                    }
                    return refused;
                }
            },
        };
        Some(match answer {
            Ok(OperatorAnswer::Reconfigured(made)) => ControlAnswer::Reconfigured { epoch: made.epoch, cut: made.cut },
            Ok(OperatorAnswer::Stuck(report)) => ControlAnswer::Stuck(report),
            Ok(OperatorAnswer::Cluster(view)) => ControlAnswer::Cluster(view),
            Ok(OperatorAnswer::Controller(answer)) => ControlAnswer::Controller(answer),
            Ok(OperatorAnswer::Done) => ControlAnswer::Done,
            Err(refused) => ControlAnswer::Refused(refused.reason),
        })
    }

    fn ask_why_stuck(&self, communicator: u64, connection: u64, rounds: DiagnosisRounds) -> Option<ControlAnswer> {
        self.ask(communicator, connection, |number, reply_to| OperatorMessage::WhyStuck { number, rounds, reply_to })
    }

    /// Has engines record for so long, or for as long as somebody else wants, if that is longer.
    fn begin_trace(&mut self, recorders: &Recorders, duration: Duration) -> ControlAnswer {
        if duration.is_zero() || duration > TRACE_MAX {
            return ControlAnswer::Refused(format!("a trace takes up to {TRACE_MAX:?}, and more than nothing"));
        }
        recorders.begin_until(Instant::now() + duration);
        // What GPUs do is read from now on.
        self.controlled.overseer.registry.comms().iter().for_each(|comm| comm.ask());
        // The controller's agent learns the common clock meanwhile.
        self.controlled.overseer.registry.note_comms();
        ControlAnswer::Tracing(trace_begun(recorders))
    }

    /// Serves one connection a little. Returns whether it is to be kept: not with descriptors, which nobody asks for.
    fn serve(&mut self, number: u64, connection: &mut Connection) -> bool {
        if self.ended.is_full() {
            return false;
        }
        let mut fds = Vec::new();
        let served = self.serve_keeping(number, connection, &mut fds);
        let brings_none = fds.is_empty();
        fds.into_iter().for_each(|fd| self.ended.close_later(fd));
        served.is_ok() && brings_none
    }

    /// As [`ControlEngine::serve`]; descriptors that came are appended to `fds`.
    fn serve_keeping(
        &mut self,
        number: u64,
        connection: &mut Connection,
        fds: &mut Vec<OwnedFd>,
    ) -> Result<(), SocketError> {
        if !connection.greeted {
            if connection.socket.recv_hello_keeping(fds)?.is_none() {
                return Ok(());
            }
            connection.socket.send_hello(0)?;
            connection.greeted = true;
        }
        if connection.stage == Stage::Asking && connection.read(fds)? {
            match self.answer(number, connection) {
                Some(answer) => connection.set_answer(&answer),
                None => connection.stage = Stage::Waiting,
            }
        }
        if connection.stage == Stage::Asking {
            return Ok(());
        }
        if connection.stage == Stage::Waiting {
            // Each connection asks once: what comes now is its end, as good as.
            return connection.socket.recv_keeping::<Chunk>(fds)?.map_or(Ok(()), |_| Err(SocketError::Closed));
        }
        connection.write()
    }
}

fn trace_begun(recorders: &Recorders) -> TraceBegun {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    TraceBegun { from_ns: recorders.now_ns(), wall_ns: wall.as_nanos() as u64, rings: recorders.rings() }
}

impl Engine for ControlEngine {
    fn name(&self) -> String {
        match self.access {
            Access::Operators => "control".into(),
            Access::Observers(_) => "observers".into(),
        }
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.epoll.0.as_fd()]
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        let mut busy = self.accept(cx.now);
        // Whoever asked for records may be gone.
        let tracing_until = self.controlled.overseer.registry.recorders.end_if_over(cx.now);
        while let Some((number, answer)) = self.replies.pop() {
            busy = true;
            let Some(answer) = self.told(number, answer) else { continue };
            self.owed.remove(&number);
            if let Some(act) = self.acts.remove(&number) {
                self.note_act(act, &answer);
            }
            // An operator who has gone has no connection any more.
            if let Some(connection) = self.connections.get_mut(&number) {
                connection.set_answer(&answer);
                connection.since = cx.now;
            }
        }
        let is_crowded = self.connections.len() >= CONNECTIONS_MAX;
        for (number, mut connection) in std::mem::take(&mut self.connections) {
            let before = connection.progress();
            let is_kept = self.serve(number, &mut connection);
            if before != connection.progress() {
                connection.since = cx.now;
            }
            // Who says nothing keeps nobody else out.
            if is_kept && connection.deadline(is_crowded).is_none_or(|deadline| cx.now < deadline) {
                // A reader that is slower than its answer keeps the engine awake: at most the few that may connect.
                busy |= before != connection.progress() || !connection.answer.is_empty();
                self.connections.insert(number, connection);
            } else {
                let _ = self.epoll.delete(&connection.socket);
                self.ended.close_connection(connection.socket);
                busy = true;
            }
        }
        self.listen();
        let is_crowded = self.connections.len() >= CONNECTIONS_MAX;
        let deadlines = self.connections.values().map(|connection| connection.deadline(is_crowded));
        let wake_at = deadlines.chain([tracing_until, self.deaf_until]).flatten().min();
        if busy { Progress::Busy } else { Progress::Idle { wake_at } }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        self.replies.is_empty()
    }
}
