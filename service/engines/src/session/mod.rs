//! The session engine: the boundary between a tenant's process and the service.
//!
//! ```text
//!           hello, version agrees                  socket closed, or fenced
//! Greeting -----------------------> Serving ------------------------------------> Closing --told--> (done)
//!     |        no hello in time        | requests (socket) and commands (ring)        ^
//!     +--------------------------------+----------------------------------------------+
//! ```
//!
//! Everything that crosses here is copied once and checked (`commands/validate.rs`) before anything else sees it. Requests come by the
//! socket (`serve`), commands by the ring (`commands/ring.rs`).
//!
//! The engine routes both to components, which own what they decide by and take `Outlets` as an argument.

mod accept;
mod commands;
mod descriptors;
mod greeting;
mod handover;
mod not_resumed;
mod outlets;
mod requests;
mod tables;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_device::OpenedPart;
use mccs_handover::Handover;
use mccs_ipc::handshake::SocketError;
use mccs_ipc::loan;
use mccs_ipc::protocol::{Request, RequestEnvelope, Response};
use mccs_ipc::types::ErrorClass;
use mccs_registry::Registry;
use mccs_runtime::{Context, Engine, Progress, Share};
use mccs_tenants::SessionCharge;

pub use self::accept::{Acceptor, Admission, SessionFactory, SessionLimits};
use self::commands::{CommandRing, Fence};
use self::greeting::{Greeted, Greeting, Segment};
pub use self::handover::ResumedSession;
pub use self::not_resumed::NotResumed;
use self::outlets::Outlets;
use self::outlets::Place;
pub use self::outlets::{GpuProxy, Proxies, ProxyQueues};
use self::requests::{Due, Requests};
use self::tables::{JoinCall, Tables, port_channels, twins};
use crate::proxy::{ProxyReply, TwinPart};

/// Message to a tenant from whom the service can take no more descriptors.
const SLOW_TO_CLOSE: &str = "descriptors that this tenant has sent take too long to close";
/// Message to a tenant when the service ends.
const STOPPING: &str = "the service is stopping; connect again once it is there";
/// How often a full socket is tried again.
const ANSWER_AGAIN_AFTER: Duration = Duration::from_millis(1);
/// How often the socket of a tenant of whom no request is read is looked at, for the end of its process.
const GONE_WITHIN: Duration = Duration::from_millis(100);
/// A request takes about as long as so many commands: it is received, answered, and often maps memory.
const REQUEST_ITEMS: usize = 16;

enum State {
    Greeting(Greeting),
    Serving,
    /// The tenant has closed its end. Its earlier requests are done first: it may have left in an orderly way. Its later
    /// writes to the ring are not looked at, or it could go on for ever, and without its quota.
    Finishing {
        /// Commands that the ring had brought by then.
        until: u64,
    },
    Closing,
}

/// The engine of one session. See the module's documentation.
pub struct SessionEngine {
    state: State,
    segment: Segment,
    outlets: Outlets,
    ring: CommandRing,
    requests: Requests,
    tables: Tables,
    registry: Arc<Registry>,
    /// Runtime of the engine once it has greeted.
    serving_runtime: u32,
    handover: Arc<Handover>,
    /// The last attempt to hand the service over in which it has stood still, or was asked.
    handed_in: u64,
    /// Since when it does.
    still_since: Option<Instant>,
    _charge: SessionCharge,
}

impl SessionEngine {
    /// Ends the session with a reason that the tenant is told.
    fn fence(&mut self, reason: &str) {
        let session = &self.outlets.session;
        tracing::debug!(session = session.id, tenant = %session.tenant.name, pid = session.peer.pid, reason, "session fenced");
        self.send_last(ErrorClass::InvalidUsage, format!("the service ended this session: {reason}"));
        self.close();
    }

    /// Tells the tenant why its session ends, behind a hello where it has had none.
    fn send_last(&mut self, class: ErrorClass, message: String) {
        let answers = &mut self.outlets.answers;
        if matches!(self.state, State::Greeting(_)) {
            let _ = answers.socket().send_hello(class.to_wire());
        }
        answers.send_last(class, message);
    }

    /// Tells the tenant that it has no session, and why. Without a trace of it.
    fn refuse(&mut self, message: &str) {
        self.send_last(ErrorClass::System, message.to_owned());
        self.close();
    }

    /// Ends once proxy engines have all that they are sent, and the tenant knows why.
    fn poll_closing(&mut self, now: Instant, flushed: bool) -> Progress {
        // The service's next program knows nothing of it.
        if self.handover.is_running() && !self.outlets.answers.are_all_told(now) {
            let again = Progress::Idle { wake_at: Some(now + ANSWER_AGAIN_AFTER) };
            return if flushed { again } else { Progress::Busy };
        }
        if flushed { Progress::Done } else { Progress::Busy }
    }

    /// Ends the session if its tenant cannot be answered.
    fn fence_unanswerable(&mut self) {
        if let Some(reason) = self.outlets.answers.take_failure() {
            self.fence(&reason);
        }
    }

    fn close(&mut self) {
        if !matches!(self.state, State::Closing) {
            self.state = State::Closing;
            self.outlets.session.give_back_segment();
            self.outlets.outbox.close(self.outlets.session.id);
        }
    }

    /// Whether what a tenant asks for is still done.
    fn is_open(&self) -> bool {
        matches!(self.state, State::Serving | State::Finishing { .. })
    }

    fn greet(&mut self, now: Instant) -> Progress {
        let State::Greeting(greeting) = &self.state else { return Progress::Busy };
        let deadline = greeting.deadline();
        let greeted = greeting.poll(&mut self.outlets, &self.segment);
        match greeted {
            Greeted::NotYet | Greeted::NoRoomYet => {
                if self.outlets.answers.socket().is_orphaned() {
                    self.close();
                } else if now >= deadline {
                    self.fence(Greeting::too_late(&greeted));
                } else {
                    let waits_for_room = matches!(greeted, Greeted::NoRoomYet);
                    let again = if waits_for_room { now + ANSWER_AGAIN_AFTER } else { deadline };
                    return Progress::Idle { wake_at: Some(again.min(deadline)) };
                }
            }
            Greeted::Welcomed => {
                self.state = State::Serving;
                self.outlets.session.waker.move_to(self.serving_runtime);
            }
            Greeted::Unwelcomed(error) => {
                // It has had its hello.
                self.state = State::Serving;
                self.fence(&format!("it could not be welcomed: {error}"));
            }
            Greeted::Gone => self.close(),
            Greeted::Broken(error) => self.fence(&error.to_string()),
        }
        Progress::Busy
    }

    /// The tenant has closed its end of the socket, or has ended.
    fn begin_finishing(&mut self) {
        match self.ring.popped_of_all() {
            Ok(until) => self.state = State::Finishing { until },
            Err(Fence(reason)) => self.fence(&reason),
        }
    }

    /// Takes what a tenant that has gone left in the ring, whatever its quota of operations (a ring is short), and then what it
    /// asked for last.
    fn finish(&mut self, now: Instant, budget: usize) {
        let any = self.serve_ring(now, budget) | self.serve_parked();
        if !any && self.outlets.outbox.is_empty() {
            self.close();
        }
    }

    /// Takes commands off the ring. Returns whether there was one.
    fn serve_ring(&mut self, now: Instant, budget: usize) -> bool {
        let until = if let State::Finishing { until } = self.state { Some(until) } else { None };
        match self.ring.take(&mut self.tables, &mut self.outlets, until, now, budget) {
            Ok(any) => any,
            Err(Fence(reason)) => {
                self.fence(&reason);
                true
            }
        }
    }

    /// Takes requests off the socket. Returns whether there was one.
    fn serve_socket(&mut self, now: Instant, budget: usize) -> bool {
        for served in 0..(budget / REQUEST_ITEMS).max(1) {
            if !matches!(self.state, State::Serving) || !self.outlets.outbox.is_empty() {
                return true;
            }
            let tenant = Arc::clone(&self.outlets.session.tenant);
            let is_held = self.requests.are_crowded() || self.requests.has_deferred();
            if is_held || self.requests.pauses(&tenant, &self.registry, now) {
                return served > 0;
            }
            if tenant.closer.is_full() {
                // Later messages wait in the socket.
                if tenant.closer.is_stuck(now) {
                    self.fence(SLOW_TO_CLOSE);
                }
                return true;
            }
            let mut fds = Vec::new();
            let received = self.outlets.answers.socket().recv_keeping::<RequestEnvelope>(&mut fds);
            let has_fds = !fds.is_empty();
            match received {
                Ok(None) => return served > 0,
                Ok(Some(envelope)) => {
                    tenant.note_request(now);
                    self.park_or_serve(envelope, &mut fds);
                }
                Err(SocketError::Closed) => self.begin_finishing(),
                Err(error) => self.fence(&error.to_string()),
            }
            fds.into_iter().for_each(|fd| tenant.closer.close_later(fd));
            if has_fds && tenant.closer.is_stuck(now) {
                self.fence(SLOW_TO_CLOSE);
            }
        }
        true
    }

    /// Serves a request, or keeps it until its turn comes. The caller closes descriptors that are left.
    fn park_or_serve(&mut self, envelope: RequestEnvelope, fds: &mut Vec<OwnedFd>) {
        if !Requests::must_park(&envelope.request) {
            return self.serve(envelope, fds);
        }
        // The tenant wrote the commands before it sent the request. A ring that lies is fenced by the next take.
        let commands = self.ring.popped_of_all().unwrap_or(self.ring.popped());
        self.requests.park(envelope, commands, &self.tables.fifos);
        self.serve_parked();
    }

    /// Serves requests whose turn has come. Returns whether there was one.
    fn serve_parked(&mut self) -> bool {
        let mut any = false;
        while self.is_open() && self.outlets.outbox.is_empty() {
            match self.requests.take_parked(self.ring.popped(), &self.tables.fifos, &self.outlets.session) {
                Due::Now(envelope) => self.serve(envelope, &mut Vec::new()),
                Due::InAMoment => return true,
                Due::Later => break,
            }
            any = true;
        }
        any
    }

    /// Asks again what was deferred. Returns whether it was answered.
    fn serve_deferred(&mut self) -> bool {
        let Some(deferred) = self.requests.take_deferred() else { return false };
        let mut fds = deferred.fds;
        self.serve(deferred.envelope, &mut fds);
        fds.into_iter().for_each(|fd| self.outlets.session.tenant.closer.close_later(fd));
        !self.requests.has_deferred()
    }

    /// Routes a request to the table that it is about. A few lines of it are for requests that concern several tables.
    fn serve(&mut self, RequestEnvelope { id, request }: RequestEnvelope, fds: &mut Vec<OwnedFd>) {
        let Tables { memory, streams, ranks, fifos } = &mut self.tables;
        let out = &mut self.outlets;
        match request {
            Request::AllocMemory { bytes } => {
                memory.add_region(out, id, bytes, None).into_iter().for_each(|later| self.requests.defer(later));
            }
            Request::RegisterMemory { bytes } => match fds.last() {
                Some(fd) => {
                    let deferred = memory.add_region(out, id, bytes, Some(fd.as_fd()));
                    deferred.into_iter().for_each(|later| self.requests.defer(later));
                }
                None => out.answers.refuse(id, ErrorClass::InvalidArgument, "RegisterMemory comes with a memfd"),
            },
            Request::FreeMemory { region } => {
                let freed = memory.free(region);
                if freed.is_ok() {
                    ranks.drop_twins_of(out, region);
                    fifos.forget_region(out, Place::Host, region);
                }
                out.answers.answer_done(id, freed);
            }
            Request::RegisterGpuMemory { gpu, ipc_handle, bytes } => {
                memory.add_gpu_region_by_handle(out, id, &gpu, &ipc_handle, bytes);
            }
            Request::NameGpuSegments { begins, bytes } => memory.name_gpu_segments(out, id, begins, &bytes, fds),
            Request::RegisterGpuSegments { gpu } => memory.add_gpu_region_by_segments(out, id, &gpu),
            Request::FreeGpuMemory { region } => {
                let freed = memory.free_on_gpu(region);
                if freed.is_ok() {
                    fifos.forget_region(out, Place::Gpus, region);
                }
                out.answers.answer_done(id, freed);
            }
            Request::CreateStream => streams.create(out, id),
            Request::CreateOrderedStream { region, offset_bytes, overlaps } => {
                match memory.semaphore(region, offset_bytes) {
                    Ok(semaphore) => streams.create_ordered(out, id, semaphore, overlaps),
                    Err(why) => out.answers.refuse_for(id, why),
                }
            }
            Request::DestroyStream { stream } => streams.destroy(out, id, stream),
            Request::CommMemory { comm } => ranks.tell_memory(out, id, comm),
            Request::InitRank { id: unique_id, rank, nranks, gpu, root_address, role, options } => {
                let call = JoinCall { id: unique_id, rank, nranks, gpu, root_address, role, options };
                ranks.join(out, id, call);
            }
            Request::DestroyComm { comm } => ranks.destroy(out, id, comm),
            Request::AbortComm { comm, cuda_error } => ranks.abort(out, id, comm, cuda_error),
            Request::PortChannel { comm, request } => fifos.serve(ranks, memory, out, id, comm, request),
            Request::OpenPart { comm, part } => ranks.open_part(out, id, comm, part),
            Request::MakeTwin { comm, region, offset_bytes, bytes, peer } => {
                twins::make(ranks, memory, out, id, TwinPart { comm, peer, region, offset_bytes }, bytes);
            }
        }
        self.fence_unanswerable();
    }

    /// Takes what a proxy engine, or a device's thread, has to say, and answers the request.
    fn take_reply(&mut self, reply: ProxyReply) {
        let Tables { memory, ranks, fifos, .. } = &mut self.tables;
        let out = &mut self.outlets;
        match reply {
            ProxyReply::Joined(joined) => ranks.joined(out, joined),
            ProxyReply::JoinFailed { request, tenant_comm, class, message } => {
                if ranks.remove(tenant_comm) {
                    // Its tenant has asked for nothing that this could be the answer to.
                    return self
                        .fence(&format!("a communicator of the service's program before cannot go on: {message}"));
                }
                out.answers.refuse(request, class, message);
            }
            ProxyReply::PortChannel { request, answer } => match answer {
                Ok(answer) => out.answers.answer(request, Response::PortChannel { answer }, &[]),
                Err(why) => out.answers.refuse_for(request, why),
            },
            ProxyReply::MemoryOpened { request, memory: opening, opened } => {
                port_channels::register_opened(ranks, memory, out, request, *opening, opened);
            }
            ProxyReply::Left { request, tenant_comm } => {
                ranks.remove(tenant_comm);
                fifos.close(tenant_comm);
                request.into_iter().for_each(|request| out.answers.answer(request, Response::Done, &[]));
            }
            ProxyReply::Opened { request, opened, charge } => match opened {
                Ok(OpenedPart { handles, fds }) => {
                    out.answers.answer_with(request, Response::Part { handles }, &fds.into(), Some(charge));
                }
                Err(why) => out.answers.refuse_for(request, why),
            },
            ProxyReply::TwinMade { request, part, made } => twins::add(ranks, memory, out, request, part, made),
            ProxyReply::Aborted { tenant_comm } => ranks.aborted(out, tenant_comm),
        }
        self.fence_unanswerable();
    }

    /// One turn of a session that has been greeted. `flushed`: proxy engines have all that they are sent.
    fn serve_turn(&mut self, cx: &Context, flushed: bool) -> Progress {
        let mut busy = !flushed;
        while let Some(reply) = self.outlets.replies.pop() {
            self.take_reply(reply);
            busy = true;
        }
        let answered = self.outlets.answers.send_unsent(cx.now);
        self.fence_unanswerable();
        self.requests.look_at_clock(cx.now);
        let look_at = self.outlets.answers.socket_mut().look_whether_taken(cx.now);
        if self.tables.ranks.are_resuming() {
            return if busy { Progress::Busy } else { Progress::IDLE };
        }
        if flushed {
            busy |= self.serve_ring(cx.now, cx.budget);
            busy |= self.tables.fifos.take_triggers(&mut self.outlets, cx.now, cx.budget);
            busy |= answered && self.serve_parked();
            busy |= answered && self.serve_deferred();
            if answered && !self.requests.has_deferred() && cx.is_readable && matches!(self.state, State::Serving) {
                // Its messages before its end come first.
                let is_orphaned = self.outlets.answers.socket().is_orphaned();
                let any = self.serve_socket(cx.now, cx.budget);
                let is_paused = self.requests.paused_until().is_some();
                if is_orphaned && !any && !is_paused && matches!(self.state, State::Serving) {
                    self.begin_finishing();
                }
                busy |= any;
            }
        }
        let socket = self.outlets.answers.socket();
        if !busy && self.requests.are_crowded() && (socket.is_closed() || socket.is_orphaned()) {
            self.begin_finishing();
        }
        let look_for_kernels_at = self.tables.fifos.look_for_kernels_at(cx.now);
        busy |= look_for_kernels_at == Some(cx.now);
        if busy || !matches!(self.state, State::Serving) {
            Progress::Busy
        } else if !answered || self.requests.has_deferred() {
            Progress::Idle { wake_at: Some(cx.now + ANSWER_AGAIN_AFTER) }
        } else if self.requests.are_crowded() {
            Progress::Idle { wake_at: Some(cx.now + GONE_WITHIN) }
        } else {
            let due = [look_at, self.requests.paused_until(), look_for_kernels_at];
            Progress::Idle { wake_at: due.into_iter().flatten().min() }
        }
    }
}

impl Engine for SessionEngine {
    fn name(&self) -> String {
        format!("daemon session {}", self.outlets.session.id)
    }

    fn share(&self) -> Option<Share> {
        Some(self.outlets.session.tenant.share)
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        self.outlets.answers.socket().descriptors()
    }

    fn doorbells(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.segment.doorbell.as_fd()]
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        let flushed = self.outlets.outbox.flush();
        let moment = self.handover.moment();
        self.say_obstacle(moment);
        self.put_off(cx.now, moment);
        match self.state {
            State::Greeting(_) | State::Serving if !moment.is_running() => self.stand_still(cx, moment, flushed),
            State::Greeting(_) | State::Serving if self.outlets.session.tenant.is_removed() => {
                self.fence(&self.outlets.session.tenant.removal());
                Progress::Busy
            }
            State::Greeting(_) => self.greet(cx.now),
            State::Serving => self.serve_turn(cx, flushed),
            State::Finishing { .. } => {
                if flushed {
                    self.finish(cx.now, cx.budget);
                }
                Progress::Busy
            }
            State::Closing => self.poll_closing(cx.now, flushed),
        }
    }

    fn ignores_descriptors(&self) -> bool {
        !self.handover.is_running() || self.requests.hold_others() || self.outlets.answers.are_waiting()
    }

    fn prepare_to_sleep(&mut self) -> bool {
        let Outlets { session, outbox, replies, .. } = &self.outlets;
        if matches!(self.state, State::Closing) {
            return outbox.is_empty() && self.outlets.answers.are_waiting();
        }
        if !outbox.is_empty() || !replies.is_empty() || matches!(self.state, State::Finishing { .. }) {
            return false;
        }
        if !self.handover.is_running() {
            return true;
        }
        let limit = session.tenant.quota.operations_in_flight;
        if session.in_flight() >= limit {
            // Commands stay in the ring until an operation ends.
            session.throttle(limit)
        } else {
            self.ring.arm() && self.tables.fifos.arm()
        }
    }
}

impl Drop for SessionEngine {
    fn drop(&mut self) {
        if matches!(self.state, State::Greeting(_) | State::Serving) && !loan::is_on() {
            self.send_last(ErrorClass::System, STOPPING.to_owned());
        }
        self.registry.remove_session(self.outlets.session.id);
    }
}
