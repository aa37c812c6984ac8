//! The control engine: answers operators (`mccsctl`) on the control socket. Another one answers observers on theirs, who change nothing
//! but by tokens: so many as they may be, operators find room.

mod access;
mod connection;
mod controlled;
mod door;
mod questions;
mod tenants;
#[cfg(test)]
mod tests;
mod tokens;
mod upgrades;
mod with_parts;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use mccs_control::{
    Call, Chunk, ControlAnswer, ControlRequest, DrainView, GpuView, SessionView, TRACE_MAX, TraceBegun,
};
use mccs_controller::history::Went;
use mccs_controller::messages::message::Act;
use mccs_ipc::handshake::{Listener, SocketError};
use mccs_registry::{Overseer, Registry, session_view};
use mccs_runtime::{Context, Engine, NumaNodes, Progress, WakerSlot};
use mccs_telemetry::recorder::Recorders;
use mccs_tenants::FdCloser;

pub use self::access::Access;
use self::access::{Admission, Admitted, By, turn_away};
use self::connection::{Connection, Stage};
pub use self::controlled::Controlled;
use self::controlled::one_line;
use self::door::Door;
use self::questions::Questions;
pub use self::tenants::TenantDesk;
pub use self::tokens::Tokens;
pub use self::upgrades::{UpgradeDesk, UpgradeRequest};
use super::controller::ControllerInput;
use super::proxy::{DiagnosisRounds, OperatorRequest};

/// Operators at a time; more wait to be accepted.
const CONNECTIONS_MAX: usize = 16;
/// See the module's documentation.
pub struct ControlEngine {
    admission: Admission,
    door: Door,
    connections: BTreeMap<u64, Connection>,
    next: u64,
    controlled: Controlled,
    questions: Questions,
    /// Operators' acts that other engines answer, by connection; also of those who have gone.
    acts: BTreeMap<u64, Act>,
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
        Ok(ControlEngine {
            admission: Admission::new(access),
            door: Door::new(listener)?,
            connections: BTreeMap::new(),
            next: 0,
            questions: Questions::new(controlled.clone()),
            controlled,
            acts: BTreeMap::new(),
            strangers: FdCloser::default(),
            ended: FdCloser::default(),
        })
    }

    /// To be set before the engine is polled: answers of other engines wake it.
    #[must_use]
    pub fn waker(&self) -> &WakerSlot {
        self.questions.waker()
    }

    /// Whether there is room for somebody who comes: not while the service is handed over.
    fn has_room(&self) -> bool {
        self.connections.len() < CONNECTIONS_MAX && self.controlled.handover.may_be_seen()
    }

    fn accept(&mut self, now: Instant) -> bool {
        if !self.door.is_open(now) || !self.has_room() {
            return false;
        }
        let Some((socket, peer)) = self.door.accept(now) else { return false };
        if !self.admission.access().admits(peer.uid) {
            tracing::debug!(peer.uid, "control connection refused");
            self.controlled.overseer.registry.refused.control.fetch_add(1, Ordering::Relaxed);
            turn_away(&socket, peer.uid);
            self.strangers.close_connection(socket);
        } else if self.door.watch(&socket, self.next) {
            let connection = Connection::new(socket, peer.uid, now);
            self.connections.insert(self.next, connection);
            self.next += 1;
        } else {
            self.ended.close_connection(socket);
        }
        true
    }

    /// The answer; `None` if another engine will give it to connection `number`. A change is logged, and told the controller.
    fn answer(&mut self, number: u64, connection: &mut Connection) -> Option<ControlAnswer> {
        let Call { request, by } = match serde_json::from_slice(&connection.request) {
            Ok(call) => call,
            Err(error) => return Some(ControlAnswer::Refused(format!("the request cannot be read: {error}"))),
        };
        let admitted = self.admission.admit(request, &by, connection.uid, &self.controlled.tokens);
        let Admitted { request, by, asks } = match admitted {
            Ok(admitted) => admitted,
            Err(answer) => return Some(answer),
        };
        let act = self.controlled.act_of(&request);
        let answer = self.answer_to(request, &by, number, connection);
        if answer.is_none() {
            self.admission.asked(number, asks);
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

    /// The answer tells what became of an operator's act.
    fn note_act(&self, act: Act, answer: &ControlAnswer) {
        let went = match answer {
            ControlAnswer::Refused(reason) | ControlAnswer::TryAgain(reason) => Went::Failed(reason.clone()),
            // A request that takes away what is gone has changed nothing.
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
        let Controlled { overseer, transports, tenants, tokens, .. } = &self.controlled;
        let Overseer { registry, runtimes, .. } = overseer;
        let now = Instant::now();
        Some(match request {
            ControlRequest::Sessions => ControlAnswer::Sessions(sessions(registry)),
            ControlRequest::Communicators => {
                ControlAnswer::Communicators(registry.comms().iter().map(|comm| comm.view()).collect())
            }
            ControlRequest::Failed => ControlAnswer::Failed(registry.failed.view(now)),
            ControlRequest::Engines => {
                ControlAnswer::Engines { runtimes: runtimes.runtimes(), engines: overseer.engines() }
            }
            ControlRequest::Hosts => ControlAnswer::Hosts(registry.host_views(now)),
            ControlRequest::Joining => ControlAnswer::Joining(registry.late_views(now)),
            ControlRequest::Gpus => ControlAnswer::Gpus(registry.gpus().iter().map(GpuView::of).collect()),
            ControlRequest::Overview => ControlAnswer::Overview(Box::new(overseer.look())),
            ControlRequest::Drain { drains, reason } => ControlAnswer::Drain(drain(registry, drains, reason)),
            ControlRequest::Trace { duration_ms } => begin_trace(registry, Duration::from_millis(duration_ms)),
            ControlRequest::TraceRings => ControlAnswer::Tracing(trace_begun(&registry.recorders)),
            ControlRequest::TraceRing { ring } => {
                connection.memory = registry.recorders.memory(ring);
                ControlAnswer::TraceRing
            }
            ControlRequest::ScaleTransports { count } => done(transports.resize(count)),
            ControlRequest::MoveEngine { engine, runtime } => done(runtimes.move_engine(engine, runtime)),
            ControlRequest::BindRuntime { runtime, to } => {
                done(runtimes.bind(runtime, &to, &NumaNodes::of_this_process()))
            }
            ControlRequest::Reconfigure { communicator, change, window } => {
                let request = OperatorRequest::Change { change: Box::new(change), window };
                return self.questions.change(communicator, number, request);
            }
            ControlRequest::Unpin { communicator } => {
                return self.questions.change(communicator, number, OperatorRequest::Unpin);
            }
            ControlRequest::WhyStuck { communicator } => {
                return self.questions.why_stuck(communicator, number, DiagnosisRounds::UntilCertain);
            }
            ControlRequest::Accounts { communicator } => {
                return self.questions.why_stuck(communicator, number, DiagnosisRounds::One);
            }
            ControlRequest::Cluster { stuck } => return self.questions.all_hosts(stuck, number),
            ControlRequest::Controller { request } => return self.questions.controller(request, &by.line, number),
            ControlRequest::Tenants => ControlAnswer::Tenants(tenants::rows(registry, &**tenants)),
            ControlRequest::AddTenant { tenant } => tenants.add(*tenant),
            ControlRequest::RemoveTenant { name } => tenants.remove(&name),
            ControlRequest::AddToken { token } => {
                tokens.add(token, by.user.clone(), now).map_or_else(ControlAnswer::Refused, ControlAnswer::Token)
            }
            ControlRequest::Tokens => ControlAnswer::Tokens(tokens.views(now)),
            ControlRequest::RemoveToken { id } => match tokens.remove(&id, now) {
                Some(_) => ControlAnswer::Done,
                None => ControlAnswer::Refused("there is no such token: mccsctl token list has their ids".into()),
            },
            // It was admitted as the request that it is.
            ControlRequest::Act { .. } => ControlAnswer::Refused("an act within an act".into()),
            ControlRequest::Upgrade { binary, force } => return self.upgrade(binary, force, by, connection),
        })
    }

    /// Leaves a request for another program at the desk, which answers the connection itself.
    fn upgrade(&self, binary: Option<PathBuf>, force: bool, by: &By, connection: &Connection) -> Option<ControlAnswer> {
        let none = || "the service is part of another program, which alone can replace it".to_owned();
        let desk = self.controlled.upgrades.as_ref().ok_or_else(none);
        let asked = desk.and_then(|desk| desk.ask(binary, force, &by.line, &connection.socket));
        asked.err().map(ControlAnswer::Refused)
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

fn done<E: Display>(result: Result<(), E>) -> ControlAnswer {
    result.map_or_else(|error| ControlAnswer::Refused(error.to_string()), |()| ControlAnswer::Done)
}

fn sessions(registry: &Registry) -> Vec<SessionView> {
    let comms = registry.comms();
    registry.sessions().iter().map(|session| session_view(session, &comms)).collect()
}

/// Refuses new sessions or lets them in, if that is asked, and says how things are.
fn drain(registry: &Registry, drains: Option<bool>, reason: Option<String>) -> DrainView {
    if let Some(drains) = drains {
        registry.set_draining(drains, reason.as_deref().map(one_line));
    }
    DrainView {
        draining: registry.is_draining(),
        reason: registry.draining_reason(),
        sessions: registry.sessions().len(),
        communicators: registry.comms().len(),
    }
}

/// Has engines record for so long, or for as long as somebody else wants, if that is longer.
fn begin_trace(registry: &Registry, duration: Duration) -> ControlAnswer {
    if duration.is_zero() || duration > TRACE_MAX {
        return ControlAnswer::Refused(format!("a trace takes up to {TRACE_MAX:?}, and more than nothing"));
    }
    registry.recorders.begin_until(Instant::now() + duration);
    // Times of GPUs are read from now on.
    registry.comms().iter().for_each(|comm| comm.ask());
    // The controller's agent learns the common clock meanwhile.
    registry.note_comms();
    ControlAnswer::Tracing(trace_begun(&registry.recorders))
}

fn trace_begun(recorders: &Recorders) -> TraceBegun {
    let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    TraceBegun { from_ns: recorders.now_ns(), wall_ns: wall.as_nanos() as u64, rings: recorders.rings() }
}

impl Engine for ControlEngine {
    fn name(&self) -> String {
        match self.admission.access() {
            Access::Operators => "control".into(),
            Access::Observers(_) => "observers".into(),
        }
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.door.descriptor()]
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        let mut busy = self.accept(cx.now);
        // Whoever asked for records may be gone.
        let tracing_until = self.controlled.overseer.registry.recorders.end_if_over(cx.now);
        while let Some((number, answer)) = self.questions.next_reply() {
            busy = true;
            let Some(answer) = self.questions.answered(number, answer) else { continue };
            self.admission.answered(number);
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
            // A silent connection keeps nobody else out.
            if is_kept && connection.deadline(is_crowded).is_none_or(|deadline| cx.now < deadline) {
                // A reader that is slower than its answer keeps the engine awake: at most the few that may connect.
                busy |= before != connection.progress() || !connection.answer.is_empty();
                self.connections.insert(number, connection);
            } else {
                self.door.forget(&connection.socket);
                self.ended.close_connection(connection.socket);
                busy = true;
            }
        }
        self.door.listen(self.has_room());
        let is_crowded = self.connections.len() >= CONNECTIONS_MAX;
        let deadlines = self.connections.values().map(|connection| connection.deadline(is_crowded));
        let wake_at = deadlines.chain([tracing_until, self.door.next_deadline()]).flatten().min();
        if busy { Progress::Busy } else { Progress::Idle { wake_at } }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        self.questions.is_empty()
    }
}
