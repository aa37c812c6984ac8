//! The proxy engine of a device: orders operations, matches ranks, starts schedules, completes
//! streams.
//!
//! ```text
//! Operation --> stream queue --head--> communicator --all ranks there--> device --done--> words, next heads
//! ```
//!
//! [`ProxyEngine`] routes messages to components. Each owns what it decides by, and takes `State`, which all of them share:
//!
//! | component | what |
//! | --- | --- |
//! | `State` (`state`) | communicators, streams, what runs, whom to tell; how communicators end |
//! | `Execution` (`execution`) | operations start, run and end |
//! | `Joining` (`joining`) | ranks join, here and across hosts |
//! | `GpuWatch` (`gpu_watch.rs`) | when GPUs are asked how far they are |
//! | `Diagnostics`, `ForwardedRequests` (`operators`) | why a communicator is stuck; operators on other hosts |
//!
//! | parts of them | what |
//! | --- | --- |
//! | `communicator`, `gpus` | operations in order, strategies and schedules; what GPUs do among themselves |
//! | `streams` | the tenant's order, and when GPUs have come to it |
//! | `mail` | messages, their fair turns, outputs to other engines |
//! | `calls` | operations as ranks make them, mismatches, failures, time-outs |
//!
//! A change of a strategy has its state in the communicator (`communicator/strategies.rs`), and its steps in `operators/reconfigure.rs`.
//!
//! Everything a tenant can cause here is bounded by its own quotas, and touches only its own sessions and communicators.

mod calls;
mod communicator;
mod execution;
mod gpu_watch;
mod gpus;
mod handover;
mod joining;
mod mail;
mod operators;
mod state;
mod streams;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_device::{Device, DeviceEvent, DeviceEvents};
use mccs_exchange::protocol::{ChangeRequest, Event};
use mccs_handover::Handover;
use mccs_ipc::types::ErrorClass;
use mccs_model::SessionId;
use mccs_registry::Registry;
use mccs_runtime::{Account, Context, Engine, Mailbox, Progress, Sender, TenantQueues};
use mccs_telemetry::LogBudget;

pub use self::calls::channel_order::{
    ChannelMemory, ChannelOrder, ChannelOrderKind, ChannelRegion, OpenedSegment, TriggerBatch, Writer,
};
pub use self::calls::describe::signature;
use self::calls::failure::Failure;
use self::calls::members::Leaving;
pub use self::calls::operation::{JoinRequest, JoinedRank, OpeningMemory, Operation, ProxyReply, RoundState, TwinPart};
pub use self::calls::resumed::{ResumedComm, ResumedMember};
pub(crate) use self::communicator::port_lanes::frames_bytes;
pub use self::communicator::schedule_cache::ScheduleCache;
use self::execution::Execution;
use self::gpu_watch::GpuWatch;
use self::handover::StandsStill;
use self::joining::Joining;
use self::joining::new_comm::NewComm;
pub use self::joining::setups::Cluster;
pub use self::joining::transport_offer::{Agreed, Nics, Offer};
use self::mail::exchange_mail::ExchangeMail;
pub use self::mail::message::{ControllerOrder, OperatorMessage, ProxyMessage, SessionMessage};
use self::mail::other_proxy::OtherProxy;
use self::mail::outlets::Outlets;
pub use self::mail::reply_to::{
    DiagnosisRounds, ForwardedRequest, OperatorAnswer, OperatorReply, OperatorRequest, OperatorResult, Reconfigured,
    ReplyTo,
};
use self::mail::transports::Transports;
use self::mail::turns::{Event as WorkEvent, Item, POLL_NS, WorkQueues};
use self::operators::diagnostics::Diagnostics;
use self::operators::forwarded_requests::ForwardedRequests;
use self::operators::reconfigure::ChangeTerms;
use self::operators::{forwarded_requests, reconfigure};
use self::state::State;
pub use self::streams::semaphores::StreamSemaphore;
use crate::transport::TransportEvent;

/// Messages that may wait at a proxy engine from devices, transports, other hosts and operators.
pub const PROXY_MAILBOX_MAX: usize = 4096;
/// Messages that may wait at a proxy engine from each tenant: a few bursts of its sessions' commands.
pub const PROXY_QUEUE_MAX: usize = 512;
/// How often an engine that is busy looks for what is late.
const LATE_LOOK_EVERY: Duration = Duration::from_millis(1);

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
    /// From devices, transports, other hosts and operators.
    mailbox: Mailbox<ProxyMessage>,
    /// Events that found no room in `mailbox`, if the device keeps them.
    device_events: Option<Arc<DeviceEvents>>,
    state: State,
    execution: Execution,
    joining: Joining,
    /// When communicators of GPUs are looked at.
    gpu_watch: GpuWatch,
    /// Why communicators are stuck.
    diagnostics: Diagnostics,
    forwarded: ForwardedRequests,
    /// When all stand still, to be handed over.
    stands_still: StandsStill,
    /// When to look for what is late, as the last look found, if nothing has happened since. Engines that wait look often.
    rests_until: Option<Option<Instant>>,
    /// When the last look for what is late was.
    late_looked_at: Instant,
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
        let name = name(device.as_ref());
        let exchange = cluster.as_ref().map(|cluster| ExchangeMail::new(cluster.own.clone(), cluster.exchange.clone()));
        let out = Outlets {
            device,
            transports: Transports::new(ProxyMessage::transport_events(mailbox.sender())),
            exchange: exchange.unwrap_or_default(),
            other: OtherProxy::default(),
            recorder: registry.recorders.recorder(name.clone()),
            registry,
            log_budget: LogBudget::default(),
        };
        ProxyEngine {
            state: State::new(WorkQueues::new(TenantQueues::new(0, mailbox.waker().clone())), out),
            mailbox,
            device_events: None,
            execution: Execution::new(timeouts.operation),
            joining: Joining::new(name, timeouts.init, make_schedules, cluster),
            gpu_watch: GpuWatch::new(timeouts.operation),
            diagnostics: Diagnostics::default(),
            forwarded: ForwardedRequests::default(),
            stands_still: StandsStill::default(),
            rests_until: None,
            late_looked_at: Instant::now(),
        }
    }

    /// The same, which stands still when all do.
    #[must_use]
    pub fn with_handover(self, handover: Arc<Handover>) -> Self {
        handover.register_proxy(self.mailbox.waker().clone());
        ProxyEngine { stands_still: StandsStill::with(handover), ..self }
    }

    /// The same, where the operator says whether ranks of several processes are refused on one GPU.
    #[must_use]
    pub fn refusing_duplicate_gpus(mut self, refuses_duplicate_gpus: bool) -> Self {
        self.joining.refuse_duplicate_gpus(refuses_duplicate_gpus);
        self
    }

    /// Tells the proxy engine of the other device what of a caller's communicator fails here; and, where that `takes_ranks`, hands it ranks whose
    /// GPUs reach each other.
    #[must_use]
    pub fn with_other(mut self, other: Option<Sender<ProxyMessage>>, takes_ranks: bool) -> Self {
        self.state.out.other = OtherProxy::new(other, takes_ranks);
        self
    }

    /// Has what the device tells come in, though the mailbox is full now and then.
    #[must_use]
    pub fn with_device_events(self, events: Arc<DeviceEvents>) -> Self {
        ProxyEngine { device_events: Some(events), ..self }
    }

    /// Reads these queues, too. They are to wake whom the mailbox wakes.
    #[must_use]
    pub fn with_tenant_queues(mut self, queues: TenantQueues<SessionMessage>) -> Self {
        self.state.work = WorkQueues::new(queues);
        self
    }

    /// Number of held entries: 0 when all sessions are closed and all communicators over.
    #[must_use]
    pub fn held(&self) -> usize {
        self.state.held() + self.joining.held() + self.execution.held()
    }

    /// Does a bounded amount of work: first what devices, transports and other hosts tell, which is as much as runs; then tenants
    /// in turns. Returns how many things were done.
    fn take_turns(&mut self, cx: &Context) -> usize {
        let (mut handled, mut spent_ns) = (0, 0);
        while handled < cx.budget && spent_ns < POLL_NS {
            if let Some(message) = self.mailbox.pop() {
                self.handle(message);
                // Not the next tenant's.
                self.state.work.forgive();
            } else if let Some(item) = self.state.work.next() {
                self.do_item(item);
                spent_ns += self.state.work.pay();
            } else {
                break;
            }
            self.end_wholes();
            handled += 1;
        }
        handled
    }

    fn handle(&mut self, message: ProxyMessage) {
        match message {
            ProxyMessage::Session(SessionMessage::Closed { session }) => self.close_behind(session),
            ProxyMessage::Session(message) => self.session_message(message),
            ProxyMessage::Device(event) => self.device_event(event),
            ProxyMessage::Transport(event) => self.transport_event(event),
            ProxyMessage::Exchange(event) => self.exchange_event(event),
            ProxyMessage::Controller(order) => self.controller_order(order),
            ProxyMessage::Operator(message) => self.operator_message(message),
            ProxyMessage::FamilyFailed { whole, failure } => self.state.abort_whole(whole, &failure),
            ProxyMessage::Resume(comms) => {
                for comm in comms {
                    self.joining.resume(&mut self.state, comm);
                }
                self.stands_still.note_resumed();
            }
        }
    }

    fn do_item(&mut self, item: Item) {
        let item = if self.stands_still.is_still() {
            let Some(item) = self.stands_still.hold(&self.state, item) else { return };
            item
        } else {
            item
        };
        let ProxyEngine { execution, state, .. } = self;
        match item {
            Item::Event(WorkEvent::Advance { session, stream }) => execution.advance(state, session, stream),
            Item::Event(WorkEvent::Ready { comm }) => execution.start_collective(state, comm),
            Item::Event(WorkEvent::PortChannels { comm, rank }) => execution.advance_port_channels(state, comm, rank),
            Item::Event(WorkEvent::Lane(ended)) => execution.advance_lane(state, ended),
            Item::Event(WorkEvent::Close { session }) => self.close_session(session),
            Item::Message(message) => self.session_message(message),
        }
    }

    /// A session has sent an operation. It starts at once if it can: its tenant has the turn, and nothing else to do first.
    fn operation(&mut self, operation: Operation) {
        let ProxyEngine { execution, state, .. } = self;
        let (share, session, stream) = (operation.session.tenant.share, operation.session.id, operation.stream.index);
        execution.enqueue(state, operation);
        if self.stands_still.is_still() {
            state.work.advance(share, session, stream);
        } else {
            execution.advance(state, session, stream);
        }
    }

    fn session_message(&mut self, message: SessionMessage) {
        let state = &mut self.state;
        match message {
            SessionMessage::Operation(operation) => self.operation(operation),
            SessionMessage::Join(request) => {
                let now = state.now();
                let complete = self.joining.join(&mut state.out, *request, now);
                self.begin(complete);
            }
            SessionMessage::Leave { comm, rank, request, tenant_comm, reply } => {
                if let Some(member) = state.comms.member_mut(comm, rank) {
                    member.leaving = Some(Leaving::Asked { request, reply });
                    state.reap(comm);
                } else {
                    let _ = reply.send(ProxyReply::Left { request, tenant_comm });
                }
            }
            SessionMessage::Abort { comm, rank, cuda_error, reply } => {
                let message = match cuda_error {
                    Some(code) => format!("rank {rank}: {}", mccs_cuda::name_of(code)),
                    None => format!("rank {rank} aborted the communicator"),
                };
                state.abort(comm, Failure::new(ErrorClass::Remote, message));
                if let Some((tenant_comm, reply)) = reply {
                    let _ = reply.send(ProxyReply::Aborted { tenant_comm });
                }
            }
            SessionMessage::Posted { comm } => state.may_start(comm),
            SessionMessage::Closed { session } => self.close_session(session),
            SessionMessage::StreamOrdered { session, stream, semaphore } => {
                state.streams.open_ordered(session, stream, semaphore);
            }
            SessionMessage::PortChannel(order) => self.execution.port_channel_order(state, *order),
            SessionMessage::Triggers(batch) => self.execution.take_triggers(state, &batch),
            SessionMessage::StreamClosed { session, stream } => state.streams.close(session, stream),
        }
    }

    fn controller_order(&mut self, order: ControllerOrder) {
        let state = &mut self.state;
        match order {
            ControllerOrder::SetPace { comm, pace } => reconfigure::set_pace(state, &comm, &pace),
            ControllerOrder::Reconfigure { number, change, window, expected, reply_to } => {
                let terms = ChangeTerms { window, expected: Some(expected) };
                reconfigure::reconfigure(state, number, &change, terms, reply_to);
            }
        }
    }

    fn operator_message(&mut self, message: OperatorMessage) {
        let state = &mut self.state;
        match message {
            OperatorMessage::Request { number, request, reply_to } => {
                self.forwarded.operator_request(state, number, &request, reply_to);
            }
            OperatorMessage::ForwardedResponse { request, answer } => {
                if let Some(response) = forwarded_requests::response(request, answer) {
                    state.out.exchange.ask(response);
                }
            }
            OperatorMessage::WhyStuck { number, rounds, reply_to } => {
                self.diagnostics.why_stuck(state, number, rounds, reply_to);
            }
        }
    }

    fn device_event(&mut self, event: DeviceEvent) {
        match event {
            DeviceEvent::JobDone { job } => self.execution.end_job(&mut self.state, job, None),
            DeviceEvent::Prepared { key, prepared } => {
                let complete = self.joining.prepared(key, prepared.map(|prepared| *prepared));
                self.begin(complete);
            }
            DeviceEvent::CommFailed { comm, message } => {
                self.state.abort(comm, Failure::new(ErrorClass::System, message));
            }
            DeviceEvent::GpuLost { gpu, reason } => self.state.end_on_gpu(gpu, &reason),
        }
    }

    fn transport_event(&mut self, event: TransportEvent) {
        let ProxyEngine { execution, state, .. } = self;
        match event {
            TransportEvent::JobDone { job, fault } => execution.end_job(state, job, fault.as_deref()),
            TransportEvent::Listening { links, engine, listener } => {
                if let Some(setups) = self.joining.setups() {
                    setups.listening(&mut state.out, links, engine, listener);
                }
            }
            TransportEvent::LinksFailed { links, fault } => execution.links_failed(state, links, &fault),
            TransportEvent::EpochPrepared { links, epoch, made } => {
                reconfigure::epoch_prepared(state, links, epoch, made);
            }
            TransportEvent::FlowWaits { question, waits } => self.diagnostics.flow_waits(state, question, waits),
            TransportEvent::PoolChanged(engines) => state.out.transports.set_engines(engines),
        }
    }

    /// News from the exchange: of communicators that are being set up, of those that live, and from operators of other hosts.
    fn exchange_event(&mut self, event: Event) {
        let ProxyEngine { state, joining, .. } = self;
        let now = state.now();
        match event {
            Event::JoinRefused { .. } | Event::SetupFailed { .. } | Event::Gathered { .. } => {
                joining.setup_event(&mut state.out, event);
            }
            Event::Complete { key, comm } => {
                let complete = joining.complete(&mut state.out, &key, comm, now);
                self.begin(complete);
            }
            Event::Failed { comm, failure } => state.failed_elsewhere(&comm, &failure),
            Event::Left { comm, ranks } => state.left_elsewhere(&comm, ranks),
            Event::Linked { host, is_up } => state.out.exchange.linked(&host, is_up),
            // The controller's business.
            Event::Met { .. } | Event::Lost { .. } | Event::TurnedAway { .. } | Event::Told { .. } => {}
            Event::Prepare { comm, change, window, body } => {
                reconfigure::prepare_change(state, &comm, change, window, &body);
            }
            Event::Decided { comm, change, decision } => reconfigure::change_decided(state, &comm, change, decision),
            Event::ProposalRefused { comm, reason } => reconfigure::proposal_refused(state, &comm, &reason),
            Event::Inquiry { comm, from, question } => self.diagnostics.inquired(state, &comm, &from, question),
            Event::Account { from, answer } => self.diagnostics.accounted(state, &from, &answer),
            Event::OperatorRequest { from, request: ChangeRequest { comm, question, body } } => {
                let asked = ForwardedRequest { comm, from, question };
                forwarded_requests::forwarded_request(state, asked, &body, self.mailbox.sender());
            }
            Event::OperatorResponse(answer) => self.forwarded.answer(&answer),
        }
    }

    /// A communicator is complete, if one is.
    fn begin(&mut self, complete: Option<NewComm>) {
        if complete.is_some_and(|new| self.joining.begin(&mut self.state, new)) {
            self.gpu_watch.watch(&self.state);
        }
    }

    /// Wholes have failed: ranks that are joining parts of them are refused.
    fn end_wholes(&mut self) {
        let Some(failed) = self.state.take_failed_wholes() else { return };
        for (whole, failure) in failed {
            self.joining.end_whole(&mut self.state.out, whole, &failure);
        }
    }

    /// Another proxy engine tells of a session's end: that comes behind what the session has sent here itself.
    fn close_behind(&mut self, session: SessionId) {
        match self.state.session(session).map(|session| session.tenant.share) {
            Some(share) => self.state.work.push_behind(share, WorkEvent::Close { session }),
            None => self.close_session(session),
        }
    }

    fn close_session(&mut self, session: SessionId) {
        self.joining.close_session(&mut self.state.out, session);
        self.state.close_session(session);
        let other = &mut self.state.out.other;
        if other.takes_ranks() {
            // By this way too, so that it comes behind the session's ranks.
            other.send(SessionMessage::Closed { session });
        }
    }

    /// Ends what has taken too long.
    fn end_late(&mut self) {
        let ProxyEngine { state, .. } = self;
        let now = state.now();
        self.execution.end_suspected(state);
        self.joining.expire(&state.out.registry, now);
        self.execution.end_late(state);
        self.gpu_watch.end_late(state);
        self.diagnostics.end_late(state);
        self.end_wholes();
        self.forwarded.end_late(&self.state.comms, now);
    }

    /// When to be polled again, though nobody tells anything.
    fn wake_at(&self) -> Option<Instant> {
        let deadlines = [
            self.joining.next_deadline(),
            self.execution.look_at(),
            self.gpu_watch.look_at(),
            self.diagnostics.deadline(),
            self.forwarded.deadline(),
            self.state.streams.look_at(self.state.now()),
        ];
        deadlines.into_iter().flatten().min()
    }
}

fn name(device: &dyn Device) -> String {
    format!("proxy {}", device.name())
}

impl Engine for ProxyEngine {
    fn name(&self) -> String {
        name(self.state.out.device.as_ref())
    }

    fn account(&self) -> Option<Arc<Account>> {
        Some(self.state.work.account())
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        if let Some(stood_still) = self.stands_still.stood_still(cx.now) {
            self.state.put_off(stood_still);
            self.joining.put_off(stood_still);
            self.rests_until = None;
        }
        if self.stands_still.is_due(&mut self.state, !self.mailbox.is_empty()) {
            return Progress::IDLE;
        }
        self.state.begin_poll(cx.now);
        let handled = self.take_turns(cx);
        let backlog =
            self.state.out.push_backlog() | self.device_events.as_ref().is_some_and(|events| events.push_backlog());
        let has_rested = handled == 0 && !backlog && self.state.work.is_empty() && !self.state.streams.await_gpus();
        if let Some(wake_at) = self.rests_until.filter(|until| has_rested && until.is_none_or(|at| cx.now < at)) {
            return Progress::Idle { wake_at };
        }
        let is_busy = handled > 0 || backlog || !self.state.work.is_empty();
        if !is_busy || cx.now >= self.late_looked_at + LATE_LOOK_EVERY {
            self.late_looked_at = cx.now;
            self.end_late();
        }
        if is_busy {
            self.rests_until = None;
            return Progress::Busy;
        }
        let wake_at = self.wake_at();
        self.rests_until = Some(wake_at);
        Progress::Idle { wake_at }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        self.mailbox.is_empty() && self.state.work.has_no_mail()
    }

    /// GPUs are to come to operations, or transports and other hosts to end them.
    fn awaits_others(&self) -> bool {
        self.state.streams.await_gpus() || !self.state.inflight.is_empty()
    }
}
