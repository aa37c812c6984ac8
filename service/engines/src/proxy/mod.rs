//! The proxy engine of a device: orders operations, matches ranks, launches plans, completes streams.
//!
//! ```text
//! Operation --> stream queue --head--> communicator --all ranks there--> device --done--> words, next heads
//! ```
//!
//! Whose turn it is says `turns.rs`. What starts and ends is in `execute.rs`; communicators are made in `joining.rs`, those with ranks on other hosts in `cluster.rs` and `setups.rs`,
//! and `remote_p2p.rs` is work with those hosts.
//!
//! Everything a tenant can cause here is bounded by its own quotas, and touches only its own sessions and communicators.

mod across;
#[cfg(test)]
mod at_once;
mod cluster;
mod comm;
mod communicators;
mod deadline;
mod describe;
mod diagnostics;
mod direct;
#[cfg(test)]
mod direct_tests;
mod direct_watch;
mod execute;
mod family;
mod forwarded_requests;
mod gpu_progress;
mod gpu_watch;
mod inflight;
mod joining;
mod message;
mod offer;
mod operation;
mod other_proxy;
mod p2p_queues;
mod preparing;
mod reconfigure;
mod remote_p2p;
mod rendezvous;
mod reply_to;
mod rounds;
mod schedule_cache;
mod semaphores;
mod setups;
mod sites;
mod strategies;
mod stream;
mod streams;
mod transports;
mod turns;
mod waits;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_device::{Buffers, Device, DeviceEvent, DeviceEvents};
use mccs_exchange::protocol::Request;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::handles::HandleTable;
use mccs_model::{Action, SessionId};
use mccs_registry::Registry;
use mccs_registry::late::LateTold;
use mccs_runtime::{Account, Context, Engine, Lanes, Mailbox, Progress, Sender};
use mccs_telemetry::LogBudget;
use mccs_telemetry::recorder::Recorder;

use self::comm::{Failure, Member};
use self::communicators::Communicators;
use self::deadline::OperationDeadline;
pub use self::describe::signature;
use self::diagnostics::Diagnostics;
use self::forwarded_requests::ForwardedRequests;
use self::gpu_watch::GpuWatch;
use self::inflight::InflightOperations;
use self::joining::refuse_all;
pub use self::message::{ControllerOrder, OperatorMessage, ProxyMessage, SessionMessage};
pub use self::offer::{Agreed, Nics, Offer};
pub use self::operation::{JoinRequest, Operation, ProxyReply, RoundState};
use self::other_proxy::OtherProxy;
use self::preparing::{PREPARING_MAX, Preparing};
use self::rendezvous::Rendezvous;
pub use self::reply_to::{
    ForwardedRequest, Looks, OperatorAnswer, OperatorReply, OperatorRequest, OperatorResult, Reconfigured, ReplyTo,
};
pub use self::schedule_cache::ScheduleCache;
pub use self::semaphores::StreamSemaphore;
pub use self::setups::Cluster;
use self::setups::Setups;
use self::stream::{Arrival, Entry, Head, Task};
use self::streams::Streams;
use self::transports::Transports;
use self::turns::{ITEM_NS, WorkQueues};
use crate::transport::TransportEvent;

/// Messages that may wait at a proxy engine from devices, transports, other hosts and operators.
pub const PROXY_MAILBOX_MAX: usize = 4096;
/// Messages that may wait at a proxy engine from each tenant: a few bursts of its sessions' commands.
pub const PROXY_LANE_MAX: usize = 512;

/// Gives the schedules of a communicator of so many ranks, by host; none where all are here.
pub type MakeSchedules = Box<dyn Fn(u32, &[Vec<u32>]) -> ScheduleCache + Send>;

/// How long ranks wait for each other.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// When they join a communicator.
    pub init: Duration,
    /// In an operation; for ever, if `None`.
    pub operation: Option<Duration>,
}

/// See the module's documentation.
pub struct ProxyEngine {
    device: Box<dyn Device>,
    transports: Transports,
    /// What found no room in `mailbox`, where the device keeps it.
    device_events: Option<Arc<DeviceEvents>>,
    /// From devices, transports, other hosts and operators.
    mailbox: Mailbox<ProxyMessage>,
    /// What tenants have left here, and whose turn it is.
    work: WorkQueues,
    /// When the poll began.
    now: Instant,
    registry: Arc<Registry>,
    make_schedules: MakeSchedules,
    /// Whether ranks of several processes are refused on one GPU.
    refuses_duplicate_gpus: bool,
    streams: Streams,
    comms: Communicators,
    inflight: InflightOperations,
    rendezvous: Rendezvous<JoinRequest>,
    late: LateTold,
    /// Communicators whose ranks are all there, while the device prepares what they share.
    preparing: HandleTable<Preparing>,
    /// When operations have waited for too long.
    deadline: OperationDeadline,
    /// When communicators of GPUs are looked at.
    gpu_watch: GpuWatch,
    /// Tenants cause these lines.
    log_budget: LogBudget,
    /// Communicators with ranks on other hosts.
    setups: Option<Setups>,
    /// Of the service's other device.
    other: OtherProxy,
    /// Why communicators are stuck.
    diagnostics: Diagnostics,
    forwarded: ForwardedRequests,
    /// Rounds that have ended, for a moment; kept for its memory.
    ended_rounds: Vec<Operation>,
    recorder: Recorder,
}

impl ProxyEngine {
    /// A proxy engine for `device`. `cluster` where there are other hosts.
    #[must_use]
    pub fn new(
        device: Box<dyn Device>,
        mailbox: Mailbox<ProxyMessage>,
        registry: Arc<Registry>,
        make_schedules: MakeSchedules,
        timeouts: Timeouts,
        cluster: Option<Cluster>,
    ) -> Self {
        let terms = make_schedules(1, &[]).terms();
        let name = name(device.as_ref());
        let recorder = registry.recorders.recorder(name.clone());
        ProxyEngine {
            work: WorkQueues::new(Lanes::new(0, mailbox.waker().clone())),
            now: Instant::now(),
            device,
            transports: Transports::new(ProxyMessage::transport_events(mailbox.sender())),
            device_events: None,
            mailbox,
            registry,
            make_schedules,
            refuses_duplicate_gpus: false,
            streams: Streams::default(),
            comms: Communicators::new(),
            inflight: InflightOperations::new(recorder.clone()),
            rendezvous: Rendezvous::new(timeouts.init),
            late: LateTold::new(name),
            preparing: HandleTable::new(PREPARING_MAX),
            deadline: OperationDeadline::new(timeouts.operation),
            gpu_watch: GpuWatch::new(timeouts.operation),
            log_budget: LogBudget::default(),
            setups: cluster.map(|cluster| Setups::new(cluster, terms)),
            other: OtherProxy::default(),
            diagnostics: Diagnostics::default(),
            forwarded: ForwardedRequests::default(),
            ended_rounds: Vec::new(),
            recorder,
        }
    }

    /// The same, where the operator says whether ranks of several processes are refused on one GPU.
    #[must_use]
    pub fn refusing_duplicate_gpus(mut self, refuses_duplicate_gpus: bool) -> Self {
        self.refuses_duplicate_gpus = refuses_duplicate_gpus;
        self
    }

    /// Tells the proxy engine of the other device what of a caller's communicator fails here; and, where that `takes_ranks`, hands it ranks whose
    /// GPUs reach each other.
    #[must_use]
    pub fn with_other(self, other: Option<Sender<ProxyMessage>>, takes_ranks: bool) -> Self {
        ProxyEngine { other: OtherProxy::new(other, takes_ranks), ..self }
    }

    /// Has what the device tells come in, though the mailbox is full now and then.
    #[must_use]
    pub fn with_device_events(self, events: Arc<DeviceEvents>) -> Self {
        ProxyEngine { device_events: Some(events), ..self }
    }

    /// Reads these lanes, too. They are to wake whom the mailbox wakes.
    #[must_use]
    pub fn with_lanes(self, lanes: Lanes<SessionMessage>) -> Self {
        ProxyEngine { work: WorkQueues::new(lanes), ..self }
    }

    /// What the engine holds: 0 when all sessions are closed and all communicators over.
    #[must_use]
    pub fn held(&self) -> usize {
        let setups = self.setups.as_ref().map_or(0, Setups::held);
        self.streams.len() + self.comms.held() + self.inflight.len() + setups + self.other.held()
    }

    fn handle(&mut self, message: ProxyMessage, now: Instant) {
        match message {
            ProxyMessage::Session(message) => self.session_message(message, now),
            ProxyMessage::Device(event) => self.device_event(event, now),
            ProxyMessage::Transport(event) => self.transport_event(event, now),
            ProxyMessage::Exchange(event) => self.exchange_event(event, now),
            ProxyMessage::Controller(order) => self.controller_order(order),
            ProxyMessage::Operator(message) => self.operator_message(message, now),
            ProxyMessage::FamilyFailed { whole, failure } => self.abort_family(whole, &failure),
        }
    }

    fn session_message(&mut self, message: SessionMessage, now: Instant) {
        match message {
            SessionMessage::Operation(operation) => self.enqueue(operation, now),
            SessionMessage::Join(request) => self.join(*request, now),
            SessionMessage::Leave { comm, rank, request, tenant_comm, reply } => {
                if let Some(member) = self.comms.member_mut(comm, rank) {
                    member.leaving = Some((request, reply));
                    self.reap(comm);
                } else {
                    let _ = reply.send(ProxyReply::Left { request, tenant_comm });
                }
            }
            SessionMessage::Abort { comm, rank, cuda_error, reply } => {
                let message = match cuda_error {
                    Some(code) => format!("rank {rank}: {}", mccs_cuda::name_of(code)),
                    None => format!("rank {rank} aborted the communicator"),
                };
                self.abort(comm, Failure::new(ErrorClass::Remote, message));
                if let Some((tenant_comm, reply)) = reply {
                    let _ = reply.send(ProxyReply::Aborted { tenant_comm });
                }
            }
            SessionMessage::Posted { comm } => self.may_start(comm),
            SessionMessage::Closed { session } => self.close_session(session),
            SessionMessage::StreamOrdered { session, stream, semaphore } => {
                self.streams.open_ordered(session, stream, semaphore);
            }
            SessionMessage::StreamClosed { session, stream } => self.streams.close(session, stream),
        }
    }

    fn controller_order(&mut self, order: ControllerOrder) {
        match order {
            ControllerOrder::SetPace { comm, pace } => self.set_pace(&comm, &pace),
            ControllerOrder::Reconfigure { number, change, window, expected, reply_to } => {
                self.reconfigure(number, &change, (window, Some(expected)), reply_to);
            }
        }
    }

    fn operator_message(&mut self, message: OperatorMessage, now: Instant) {
        match message {
            OperatorMessage::Request { number, request, reply_to } => {
                self.operator_request(number, &request, reply_to, now);
            }
            OperatorMessage::ForwardedResponse { request, answer } => {
                if let Some(grant) = forwarded_requests::response(request, answer) {
                    self.ask_exchange(grant);
                }
            }
            OperatorMessage::WhyStuck { number, looks, reply_to } => self.why_stuck(number, looks, reply_to, now),
        }
    }

    /// Asks the exchange, where there are other hosts.
    fn ask_exchange(&mut self, request: Request) {
        if let Some(setups) = &mut self.setups {
            setups.ask(request);
        }
    }

    fn device_event(&mut self, event: DeviceEvent, now: Instant) {
        match event {
            DeviceEvent::JobDone { job } => self.end_job(job, None, now),
            DeviceEvent::Prepared { key, prepared } => self.prepared(key, prepared.map(|prepared| *prepared), now),
            DeviceEvent::CommFailed { comm, message } => self.abort(comm, Failure::new(ErrorClass::System, message)),
            DeviceEvent::GpuLost { gpu, reason } => self.end_on_gpu(gpu, &reason),
        }
    }

    fn transport_event(&mut self, event: TransportEvent, now: Instant) {
        match event {
            TransportEvent::JobDone { job, fault } => self.end_job(job, fault.as_deref(), now),
            TransportEvent::Listening { links, engine, listener } => self.listening(links, engine, listener),
            TransportEvent::LinksFailed { links, fault } => self.links_failed(links, &fault, now),
            TransportEvent::EpochPrepared { links, epoch, made } => self.epoch_prepared(links, epoch, made),
            TransportEvent::FlowWaits { question, waits } => self.flow_waits(question, waits, now),
            TransportEvent::PoolChanged(engines) => self.transports.set_engines(engines),
        }
    }

    fn enqueue(&mut self, operation: Operation, now: Instant) {
        let (session, handle) = (Arc::clone(&operation.session), operation.stream);
        let (ticket, called_at, group_continues) = (operation.ticket, operation.called_at, operation.group_continues);
        let (comm, rank) = (operation.comm, operation.rank);
        let task = match (&operation.action, self.comms.get_mut(comm)) {
            (Action::Collective { .. }, Some(live)) if live.failure.is_none() => {
                if let Buffers::Gpu(own) = &operation.buffers {
                    own.copy_engines.called(comm, rank);
                }
                Task::Collective { comm, rank, seq: live.enqueue(operation, now, &self.recorder) }
            }
            _ => Task::Own(Box::new(operation)),
        };
        self.streams.enqueue(&session, handle, Entry { ticket, called_at, group_continues, task });
        self.work.advance(session.tenant.share, session.id, handle.index);
    }

    /// Starts what a stream may start.
    fn advance(&mut self, session: SessionId, index: u32, now: Instant) {
        while let Some(head) = self.streams.start_next(session, index, now) {
            let Head { ticket, task, arrival } = head;
            self.work.charge(ITEM_NS);
            match task {
                Task::Collective { comm, rank, seq } => self.arrive(session, index, ticket, (comm, rank, seq), arrival),
                Task::Own(operation) => self.start_own(operation, arrival),
                Task::Started => {}
            }
        }
    }

    fn arrive(&mut self, session: SessionId, index: u32, ticket: u64, whose: (Handle, u32, u64), arrival: Arrival) {
        let (comm, rank, seq) = whose;
        self.deadline.expect_progress(arrival.due);
        if self.comms.get_mut(comm).is_some_and(|live| live.arrive(rank, seq, arrival, &self.recorder)) {
            self.may_start(comm);
            return;
        }
        self.count_failed(session, index, ticket, (comm, rank));
        self.finish_one(session, index);
    }

    /// Ends a communicator with an error on every rank. What already runs ends by itself.
    fn abort(&mut self, comm: Handle, failure: Failure) {
        let Some(live) = self.comms.sound_mut(comm) else { return };
        let failure = live.contradiction().unwrap_or(failure);
        let failure = Failure::new(failure.class, live.info.named(&failure.message));
        self.registry.failed.note(live.info.failed_view(&failure.message), Instant::now());
        if let Some(suppressed) = self.log_budget.take(Instant::now()) {
            let (comm, tenant) = (live.info.number, &live.info.tenant);
            tracing::warn!(comm, %tenant, reason = %failure.message, suppressed, "communicator failed");
        }
        if let Some(placed) = &live.info.placed {
            placed.set_chosen(None);
            self.registry.note_comms();
        }
        let failed = live.die(failure.clone());
        // Ranks with nothing waiting learn it too.
        for member in live.members.iter().filter(|member| !member.left) {
            let first = failed.iter().find(|operation| operation.rank == member.rank);
            let (stream, ticket) = first.map_or((Handle::NONE, 0), |operation| (operation.stream, operation.ticket));
            member.session.report(member.tenant_comm, stream, ticket, failure.class, &failure.message);
        }
        // Who sees that it is aborted finds the reason.
        if let Some(direct) = &live.info.direct {
            direct.abort();
        }
        self.fail_elsewhere(comm, &failure);
        failed.iter().for_each(|operation| self.fail(operation));
        let info = self.comms.get(comm).map(|live| Arc::clone(&live.info));
        self.reap(comm);
        info.iter().for_each(|info| self.fail_family(info, &failure));
    }

    /// Lets ranks go that wanted to leave, and removes a communicator that nobody is in.
    fn reap(&mut self, comm: Handle) {
        let Some(live) = self.comms.get_mut(comm) else { return };
        let mut departed = Vec::new();
        for at in 0..live.members.len() {
            let rank = live.members[at].rank;
            if live.members[at].leaving.is_some() && live.is_quiet(rank) {
                live.depart(rank);
                departed.push(rank);
                if let Some((request, reply)) = live.members[at].leaving.take() {
                    // A full or gone mailbox means that the session is ending: nobody waits for the answer.
                    let tenant_comm = live.members[at].tenant_comm;
                    let _ = reply.send(ProxyReply::Left { request, tenant_comm });
                }
            }
        }
        if live.is_over() {
            if let Some(direct) = live.info.direct.as_ref().filter(|_| live.failure.is_none()) {
                direct.left();
            }
            for (member, info) in live.members.iter().zip(&live.info.ranks) {
                member.session.counters.rounds.fetch_add(live.info.rounds(info), Ordering::Relaxed);
            }
            self.registry.remove_comm(live.info.number);
            if let Some(span) = self.comms.remove(comm).and_then(|live| live.span) {
                self.leave_cluster(*span);
            }
        } else {
            if let (Some(span), Some(setups)) = (&live.span, &mut self.setups)
                && !departed.is_empty()
            {
                setups.ask(Request::Leave { comm: span.comm.clone(), ranks: departed });
            }
            self.may_start(comm);
        }
    }

    fn close_session(&mut self, session: SessionId) {
        for (refusal, members) in self.rendezvous.leave(session) {
            refuse_all(&refusal, members);
        }
        self.withdraw(session);
        self.stop_preparing(session);
        let mut touched = Vec::new();
        for (handle, comm) in self.comms.iter() {
            // A rank that has asked to leave, and whose own work has ended, stays for others' sake alone, until that has ended.
            let is_leaving = |member: &Member| member.leaving.is_some() && !comm.has_waiting(member.rank);
            let is_live = |member: &&Member| member.session.id == session && !member.left && !is_leaving(member);
            if let Some(member) = comm.members.iter().find(is_live) {
                touched.push((handle, member.rank, member.session.peer.pid));
            }
        }
        for (handle, rank, pid) in touched {
            let Some(live) = self.comms.get_mut(handle) else { continue };
            for at in 0..live.members.len() {
                if live.members[at].session.id == session {
                    live.depart(live.members[at].rank);
                    live.members[at].leaving = None;
                }
            }
            let message = format!("rank {rank} (process {pid}) has gone");
            self.abort(handle, Failure::new(ErrorClass::Remote, message));
            self.reap(handle);
        }
        self.streams.close_all(session);
        if self.other.takes_ranks() {
            // By this way too, so that it comes behind the session's ranks.
            self.other.send(SessionMessage::Closed { session });
        }
    }
}

fn name(device: &dyn Device) -> String {
    format!("proxy {}", device.name())
}

impl Engine for ProxyEngine {
    fn name(&self) -> String {
        name(self.device.as_ref())
    }

    fn account(&self) -> Option<Arc<Account>> {
        Some(self.work.account())
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        self.now = cx.now;
        let ProxyEngine { streams, work, .. } = self;
        streams.look(cx.now, |share, session, stream| work.advance(share, session, stream));
        let handled = self.take_turns(cx);
        let backlog = self.transports.push_backlog()
            | self.device_events.as_ref().is_some_and(|events| events.push_backlog())
            | self.setups.as_mut().is_some_and(Setups::push_backlog)
            | self.other.push_backlog();
        self.end_suspected(cx.now);
        for (refusal, members) in self.rendezvous.expire(cx.now) {
            refuse_all(&refusal, members);
        }
        self.late.tell(&self.registry, self.rendezvous.late_changes(), || self.rendezvous.late(), cx.now);
        self.end_late(cx.now);
        self.end_late_direct(cx.now);
        self.end_late_diagnostics(cx.now);
        self.forwarded.end_late(&self.comms, cx.now);
        if handled > 0 || backlog || !self.work.is_empty() {
            Progress::Busy
        } else {
            let suspected_until = self.setups.as_ref().and_then(Setups::suspected_until);
            let looks = [self.deadline.look_at(), self.gpu_watch.look_at()];
            let deadlines = [
                self.rendezvous.next_deadline(),
                suspected_until,
                self.diagnostics.deadline(),
                self.forwarded.deadline(),
            ];
            let deadlines = deadlines.into_iter().chain(looks).chain([self.streams.look_at(cx.now)]);
            Progress::Idle { wake_at: deadlines.flatten().min() }
        }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        self.mailbox.is_empty() && self.work.has_no_mail()
    }

    /// GPUs are to come to operations, or transports and other hosts to end them.
    fn awaits_others(&self) -> bool {
        self.streams.await_gpus() || !self.inflight.is_empty()
    }
}
