//! Hand-over of a session to the service's next program, and from the one before.
//!
//! A session hands in once proxy engines do nothing any more. Commands that it has taken and that have not ended are done again by the next program,
//! requests that wait are served again; what the tenant writes meanwhile stays in the ring and in the socket.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use mccs_handover::{
    EndedSession, Moment, PendingCommand, Phase, SessionCountersState, SessionPart, SessionState, StreamState,
    WithDescriptors,
};
use mccs_ipc::command::{Command, Completion};
use mccs_ipc::handshake::{PeerCredentials, Socket};
use mccs_ipc::queue::{Consumer, Producer};
use mccs_ipc::shm::Mapping;
use mccs_ipc::sync::Doorbell;
use mccs_ipc::types::{Handle, UniqueId};
use mccs_runtime::{Context, Progress, Sender};
use mccs_tenants::Charge;
use mccs_tenants::session::{Session, StreamWords};

use super::accept::{Admission, SessionFactory, SessionParts, replies_of};
use super::commands::CommandRing;
use super::descriptors::{NO_DESCRIPTOR, duplicate};
use super::greeting::Segment;
use super::not_resumed::NotResumed;
use super::outlets::{Answers, TenantSocket};
use super::requests::Requests;
use super::tables::{Fifos, HandedMemory, HandedRanks, Memory, Ranks, Streams, Tables};
use super::{ANSWER_AGAIN_AFTER, SessionEngine, State};
use crate::proxy::ProxyReply;

/// Most words of a session's segment that are taken from another program.
const WORDS_MAX: u32 = 1 << 20;

impl SessionEngine {
    /// Takes nothing new. Passes on what it has taken, and hands in when proxy engines have answered all that they will.
    pub(super) fn stand_still(&mut self, cx: &Context, moment: Moment, flushed: bool) -> Progress {
        let (Moment { phase, attempt }, id) = (moment, self.outlets.session.id);
        if self.handed_in == attempt || phase == Phase::Still {
            return Progress::IDLE;
        }
        if phase == Phase::Quieting {
            if !flushed || self.requests.has_deferred() && !self.serve_deferred() || self.tables.ranks.are_resuming() {
                return self.stand_still_soon(cx);
            }
            self.handover.note_quiet(attempt, id);
            return Progress::IDLE;
        }
        while let Some(reply) = self.outlets.replies.pop() {
            self.take_reply(reply);
        }
        self.outlets.answers.send_unsent(self.still_since.unwrap_or(cx.now));
        self.fence_unanswerable();
        if matches!(self.state, State::Closing) {
            return Progress::Busy;
        }
        self.handed_in = attempt;
        match self.part(cx) {
            Ok(part) => self.handover.hand_in_session(attempt, id, part),
            Err(why) => {
                let Session { tenant, peer, .. } = &*self.outlets.session;
                let what = format!("session {id} of tenant {}, process {}: {why}", tenant.name, peer.pid);
                self.handover.object(attempt, what);
            }
        }
        Progress::IDLE
    }

    /// While the service stands still no time goes by for its tenant.
    pub(super) fn put_off(&mut self, now: Instant, moment: Moment) {
        if !moment.is_running() {
            self.still_since.get_or_insert(now);
        } else if let Some(since) = self.still_since.take() {
            let by = now.saturating_duration_since(since);
            self.outlets.answers.put_off(by);
            if let State::Greeting(greeting) = &mut self.state {
                greeting.put_off(by);
            }
        }
    }

    /// Says what keeps it from being handed over, when that is asked.
    pub(super) fn say_obstacle(&mut self, Moment { phase, attempt }: Moment) {
        if phase != Phase::Asking || self.handed_in == attempt {
            return;
        }
        self.handed_in = attempt;
        let obstacle = self.obstacle().filter(|_| self.is_open());
        self.handover.note_asked(attempt, self.outlets.session.id, obstacle.map(|why| self.ended(why, 0)));
    }

    /// Why the next program cannot go on with the session, if so.
    fn obstacle(&self) -> Option<&'static str> {
        let Tables { memory, streams, ranks, fifos } = &self.tables;
        let of_channels = || fifos.are_open().then_some("has port channels");
        let of_streams = || streams.await_gpus().then_some("has streams that wait for GPUs");
        let of_requests =
            || self.outlets.replies.are_awaited().then_some("waits for memory of GPUs, or for port channels");
        memory.obstacle().or_else(|| ranks.obstacle()).or_else(of_channels).or_else(of_streams).or_else(of_requests)
    }

    /// How the session is known when it ends, with so many descriptors of memory.
    fn ended(&self, why: &str, memory: usize) -> EndedSession {
        let Session { id, tenant, .. } = &*self.outlets.session;
        EndedSession { id: *id, tenant: tenant.name.clone(), reason: why.to_owned(), memory: memory as u32 }
    }

    fn stand_still_soon(&self, cx: &Context) -> Progress {
        Progress::Idle { wake_at: Some(cx.now + ANSWER_AGAIN_AFTER) }
    }

    fn part(&self, cx: &Context) -> Result<SessionPart, String> {
        let (session, tables, socket) = (&self.outlets.session, &self.tables, self.outlets.answers.socket());
        let own = [duplicate(&**socket), duplicate(&self.segment.fd), duplicate(&self.segment.doorbell)];
        let [own_socket, segment, doorbell] = own.map(|fd| fd.map_err(|_| NO_DESCRIPTOR));
        let (own_socket, segment, doorbell) = (own_socket?, segment?, doorbell?);
        if matches!(self.state, State::Greeting(_)) {
            return Ok(SessionPart::Connection(session.tenant.name.clone(), own_socket));
        }
        if let Some(why) = self.obstacle() {
            let memory: Vec<_> = std::iter::once(segment).chain(tables.memory.service_descriptors()).collect();
            let state = self.ended(why, memory.len());
            let descriptors = std::iter::once(own_socket).chain(memory).collect();
            return Ok(SessionPart::Ends(WithDescriptors { state, descriptors }));
        }
        let process = socket.process().map(duplicate).transpose().map_err(|_| NO_DESCRIPTOR)?;
        let HandedMemory { regions, freed, descriptors: of_regions } = tables.memory.hand_over()?;
        let (answers, of_answers) = self.outlets.answers.hand_over(self.still_since.unwrap_or(cx.now))?;
        let (pending, commands_consumed) = self.ring.hand_over();
        let HandedRanks { ranks, joining, leaving } = tables.ranks.hand_over();
        let leaving = leaving.into_iter().map(|envelope| (0, envelope));
        let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let counters = &session.counters;
        let state = SessionState {
            id: session.id,
            tenant: session.tenant.name.clone(),
            job: session.job().to_owned(),
            has_process: process.is_some(),
            layout: self.segment.layout,
            commands_consumed,
            completions_produced: session.completions_produced(),
            regions,
            freed,
            streams: tables.streams.hand_over(),
            ranks,
            joining,
            pending: pending.iter().map(PendingCommand::from).collect(),
            parked: leaving.chain(self.requests.hand_over(self.ring.taken())).collect(),
            answers,
            sent_descriptors: socket.sent_descriptors(),
            counters: SessionCountersState {
                commands: load(&counters.commands),
                rounds: load(&counters.rounds),
                failed: load(&counters.failed),
                untold: load(&counters.untold),
            },
        };
        let own = [own_socket, segment, doorbell].into_iter().chain(process);
        let descriptors = own.chain(of_regions).chain(of_answers).collect();
        Ok(SessionPart::Session(Box::new(WithDescriptors { state, descriptors })))
    }
}

/// A session of the program before, which does nothing yet.
pub struct ResumedSession(SessionEngine);

impl ResumedSession {
    /// The session, as the proxy engine knows it.
    #[must_use]
    pub fn session(&self) -> &Arc<Session> {
        &self.0.outlets.session
    }

    /// Sender for the proxy engine's answers.
    #[must_use]
    pub fn reply(&self) -> Sender<ProxyReply> {
        self.0.outlets.replies.sender()
    }

    /// The tenant's quota for a rank of it.
    #[must_use]
    pub fn charge_of(&self, comm: Handle) -> Option<Arc<Charge>> {
        self.0.tables.ranks.charge_of(comm)
    }
}

/// The rings of a session, where the program before has left them: its end of the commands, and of the completions.
fn resume_rings(
    segment: &Arc<Mapping>,
    state: &SessionState,
) -> Result<(Consumer<Command>, Producer<Completion>), NotResumed> {
    let layout = state.layout;
    let (offset, capacity) = (layout.commands_offset, layout.commands_capacity);
    let commands = Consumer::resume(Arc::clone(segment), offset, capacity, state.commands_consumed);
    let (offset, capacity) = (layout.completions_offset, layout.completions_capacity);
    let completions = Producer::resume(Arc::clone(segment), offset, capacity, state.completions_produced);
    Ok((commands.map_err(NotResumed::session)?, completions.map_err(NotResumed::session)?))
}

impl SessionFactory {
    /// Makes a session of what the program before has handed over. `ids` are communicators by number.
    ///
    /// # Errors
    /// Why it cannot go on: what was handed over contradicts itself, this service's configuration, or the kernel refuses.
    pub fn resume(
        &self,
        state: SessionState,
        descriptors: Vec<OwnedFd>,
        admission: &Admission,
        ids: &BTreeMap<u64, UniqueId>,
    ) -> Result<ResumedSession, NotResumed> {
        let tenant = Arc::clone(&admission.tenant);
        let mut descriptors = descriptors.into_iter();
        let own = [descriptors.next(), descriptors.next(), descriptors.next()];
        let [Some(socket), Some(segment_fd), Some(doorbell)] = own else {
            return Err(NotResumed::session("descriptors are missing"));
        };
        let process = descriptors.by_ref().take(usize::from(state.has_process)).next();
        let peer = PeerCredentials::of(&socket).map_err(NotResumed::session)?;
        admission.check(peer).map_err(NotResumed::Configuration)?;
        let charge = self.all_sessions.charge(&tenant).map_err(NotResumed::configuration)?;
        let layout = state.layout;
        if layout.words > WORDS_MAX {
            return Err(NotResumed::session(format!("{} streams", layout.words)));
        }
        let segment = Mapping::map(segment_fd.as_fd(), layout.segment_bytes).map_err(NotResumed::session)?;
        let segment = Arc::new(segment);
        let (commands, completions) = resume_rings(&segment, &state)?;
        let again: Option<VecDeque<_>> = state.pending.iter().map(PendingCommand::command).collect();
        let again = again.ok_or_else(|| NotResumed::session("a command is none"))?;
        let replies = replies_of(&tenant);
        let words = StreamWords { offset: layout.words_offset, count: layout.words };
        let ended = |(_, stream): &(u32, Option<StreamState>)| stream.map_or(0, |stream| stream.ended);
        let ended: Vec<u64> = state.streams.0.iter().map(ended).collect();
        let SessionCountersState { commands: taken, rounds, failed, untold } = state.counters;
        let waker = replies.waker().clone();
        let session = Session::new(state.id, Arc::clone(&tenant), peer, segment, words, completions, waker).resumed(
            &ended,
            [taken, rounds, failed, untold],
            &state.job,
        );
        let (host_memory, unmap_worker) = (Arc::clone(&self.host_memory), self.unmap_worker.clone());
        let tables = Tables {
            memory: Memory::resumed(
                &tenant,
                &state.regions,
                &state.freed,
                &mut descriptors,
                host_memory,
                unmap_worker,
            )?,
            streams: Streams::resumed(layout.words, &state.streams)
                .ok_or_else(|| NotResumed::session("it has more streams than words"))?,
            ranks: Ranks::resumed(&tenant, Arc::clone(&self.registry), &state.ranks, ids)?,
            fifos: Fifos::default(),
        };
        let behind = again.len() as u64;
        let parked = state.parked.into_iter();
        let parked = parked.map(|(commands, request)| (commands.saturating_add(behind), request));
        let socket =
            TenantSocket::resumed(Socket::from_fd(socket), process, state.sent_descriptors, Arc::clone(&tenant));
        Ok(ResumedSession(self.engine(SessionParts {
            state: State::Serving,
            segment: Segment { fd: segment_fd, layout, doorbell: Doorbell::from_fd(doorbell) },
            session,
            answers: Answers::resumed(socket, &tenant, state.answers, descriptors),
            queues: admission.queues.clone(),
            replies,
            ring: CommandRing::resumed(commands, again),
            requests: Requests::resumed(state.joining.into_iter().map(|request| (0, request)).chain(parked)),
            tables,
            charge,
        })))
    }

    /// A session goes on. Behind its communicators.
    pub fn go_on(&self, ResumedSession(mut engine): ResumedSession) {
        engine.outlets.outbox.note_heard_of();
        let id = engine.outlets.session.id;
        if let Err(error) = self.run(engine, self.serving_runtime) {
            tracing::error!(session = id, %error, "a session of the program before has no engine, and ends");
        }
    }
}
