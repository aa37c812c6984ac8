//! The proxy engine of a device: orders operations, matches ranks, launches plans, completes streams.
//!
//! ```text
//! Operation --> stream queue --head--> communicator --all ranks there--> device --done--> words, next heads
//! ```
//!
//! Communicators with ranks on other hosts are set up and ended with the exchange (`cluster.rs`).
//!
//! Everything a tenant can cause here is bounded by its own quotas, and touches only its own sessions and communicators.

mod asked;
mod cluster;
mod comm;
mod describe;
mod direct;
mod gates;
mod inquiry;
mod operation;
mod preparing;
mod reconfigure;
mod rounds;
mod stream;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_ipc::board::{BOARD_RANKS_MAX, Board, BoardLayout};
use mccs_ipc::types::{ErrorClass, Handle, UniqueId};

pub use self::asked::{Asked, OperatorAnswer, OperatorReply};
pub use self::cluster::Cluster;
use self::cluster::{Across, Setups};
use self::comm::{Comm, Failure, Member};
pub use self::describe::board_call;
use self::describe::describe;
use self::direct::Look;
use self::gates::Gates;
pub use self::gates::StreamGate;
use self::inquiry::Inquiries;
pub use self::operation::{Action, JoinRequest, OnGpus, Operand, Operation, ProxyMessage, ProxyReply, RoundState};
use self::preparing::{PREPARING_MAX, Preparing};
pub use self::reconfigure::Reconfigured;
use self::stream::{Entry, Stream, Task};
use crate::bootstrap::{GatheringKey, Joined, Refusal, Rendezvous};

use crate::devices::{Device, Launched, Prepared};
use crate::engines::transport::ChannelFault;
use crate::exchange::protocol::Request;
use crate::handles::HandleTable;
use crate::plans::ScheduleCache;
use crate::runtime::{Context, Engine, Mailbox, Progress};
use crate::session::SessionId;
use crate::telemetry::recorder::{Record, Recorder, job_number};
use crate::telemetry::traffic::RecentTraffic;
use crate::telemetry::{CommInfo, LogBudget, RankInfo, Registry, TenantBoard};
use crate::tenants::{Charge, Resource};

/// Messages that may wait at a proxy engine: a few bursts of every session's commands.
pub const PROXY_MAILBOX_MAX: usize = 4096;
/// Communicators of a device; quotas keep tenants far below.
const COMMS_MAX: u32 = 1 << 20;
/// Jobs of a device that run at a time.
const JOBS_MAX: u32 = 1 << 20;

/// What a running job is for.
enum Job {
    Collective {
        comm: Handle,
        /// For its scratch memory.
        _charge: Option<Charge>,
    },
    Pair {
        comm: Handle,
        send: Box<Operation>,
        recv: Box<Operation>,
    },
    /// A send or receive whose peer is on another host.
    Far {
        comm: Handle,
        operation: Box<Operation>,
    },
}

/// Gives the schedules of a communicator of so many ranks, by host; none where all are here.
pub type MakeSchedules = Box<dyn Fn(u32, &[Vec<u32>]) -> ScheduleCache + Send>;

/// Things to do that other things led to: a queue, so that a chain of completions is not a chain of calls.
enum Event {
    /// A stream may start its next operations.
    Advance { session: SessionId, stream: u32 },
    /// A communicator may have a collective to start.
    Ready { comm: Handle },
}

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
    mailbox: Mailbox<ProxyMessage>,
    registry: Arc<Registry>,
    make_schedules: MakeSchedules,
    /// Longest contribution to a round; 0 where there are to be no boards.
    board_slot_bytes: u32,
    streams: HashMap<SessionId, Vec<Option<Stream>>>,
    comms: HandleTable<Comm>,
    jobs: HandleTable<Job>,
    rendezvous: Rendezvous<JoinRequest>,
    /// Communicators whose ranks are all there, while the device prepares what they share.
    preparing: HandleTable<Preparing>,
    events: VecDeque<Event>,
    timeouts: Timeouts,
    /// When some operation may have waited for too long.
    look_for_late_at: Option<Instant>,
    /// When to look at communicators of GPUs next, while there are any.
    look_at_gpus: Option<Look>,
    /// Tenants cause these lines.
    log_budget: LogBudget,
    /// Streams that wait for GPUs.
    gates: Gates,
    /// Communicators with ranks on other hosts.
    setups: Option<Setups>,
    /// Why communicators are stuck.
    inquiries: Inquiries,
    /// Rounds that have ended, for a moment; kept for its memory.
    ended_rounds: Vec<Operation>,
    recorder: Recorder,
}

impl ProxyEngine {
    /// A proxy engine for `device`. Collectives whose contributions have at most `board_slot_bytes` are left to the ranks
    /// themselves. `cluster` where there are other hosts.
    #[must_use]
    pub fn new(
        device: Box<dyn Device>,
        mailbox: Mailbox<ProxyMessage>,
        registry: Arc<Registry>,
        make_schedules: MakeSchedules,
        board_slot_bytes: u32,
        timeouts: Timeouts,
        cluster: Option<Cluster>,
    ) -> Self {
        let terms = make_schedules(1, &[]).terms();
        let recorder = registry.recorders.recorder(name(device.as_ref()));
        ProxyEngine {
            device,
            mailbox,
            registry,
            make_schedules,
            board_slot_bytes,
            streams: HashMap::new(),
            comms: HandleTable::new(COMMS_MAX),
            jobs: HandleTable::new(JOBS_MAX),
            rendezvous: Rendezvous::new(timeouts.init),
            preparing: HandleTable::new(PREPARING_MAX),
            events: VecDeque::new(),
            timeouts,
            look_for_late_at: None,
            look_at_gpus: None,
            log_budget: LogBudget::default(),
            gates: Gates::default(),
            setups: cluster.map(|cluster| Setups::new(cluster, terms)),
            inquiries: Inquiries::default(),
            ended_rounds: Vec::new(),
            recorder,
        }
    }

    /// What the engine holds: 0 when all sessions are closed and all communicators over.
    #[must_use]
    pub fn held(&self) -> usize {
        let setups = self.setups.as_ref().map_or(0, Setups::held);
        self.streams.len() + self.comms.len() + self.jobs.len() + setups
    }

    fn handle(&mut self, message: ProxyMessage, now: Instant) {
        match message {
            ProxyMessage::Operation(operation) => self.enqueue(operation),
            ProxyMessage::Join(request) => self.join(*request, now),
            ProxyMessage::Leave { comm, rank, request, reply } => {
                if let Some(member) = self.member(comm, rank) {
                    member.leaving = Some((request, reply));
                    self.settle(comm);
                } else {
                    let _ = reply.send(ProxyReply::Left { request });
                }
            }
            ProxyMessage::Abort { comm, rank } => {
                let message = format!("rank {rank} aborted the communicator");
                self.kill(comm, Failure::new(ErrorClass::Remote, message));
            }
            ProxyMessage::Posted { comm } => self.events.push_back(Event::Ready { comm }),
            ProxyMessage::SessionClosed { session } => self.close_session(session),
            ProxyMessage::StreamGated { session, stream, gate } => {
                let index = stream.index as usize;
                let streams = self.streams.entry(session.id).or_default();
                if streams.len() <= index {
                    streams.resize_with(index + 1, || None);
                }
                streams[index] = Some(Stream::gated(session, stream, gate));
            }
            ProxyMessage::StreamClosed { session, stream } => {
                if let Some(slot) = self.streams.get_mut(&session).and_then(|s| s.get_mut(stream as usize)) {
                    *slot = None;
                }
            }
            ProxyMessage::JobDone { job, fault } => self.end_job(job, fault.as_deref(), now),
            ProxyMessage::SetTransports(transports) => self.device.set_transports(transports),
            ProxyMessage::Listening { links, engine, listener } => self.listening(links, engine, listener),
            ProxyMessage::LinksFailed { links, fault } => self.links_failed(links, &fault, now),
            ProxyMessage::Prepared { key, prepared } => self.prepared(key, prepared, now),
            ProxyMessage::DeviceFailed { comm, message } => self.kill(comm, Failure::new(ErrorClass::System, message)),
            ProxyMessage::Exchange(event) => self.exchange_event(event, now),
            ProxyMessage::SetPace { comm, pace } => self.set_pace(&comm, &pace),
            ProxyMessage::EpochPrepared { links, epoch, made } => self.epoch_prepared(links, epoch, made),
            ProxyMessage::FlowWaits { question, waits } => self.flow_waits(question, waits, now),
            ProxyMessage::WhyStuck { number, asked } => self.why_stuck(number, asked, now),
            ProxyMessage::Reconfigure { number, change, window, expected, asked } => {
                self.reconfigure(number, &change, (window, expected), asked);
            }
        }
    }

    fn member(&mut self, comm: Handle, rank: u32) -> Option<&mut Member> {
        let live = self.comms.get_mut(comm)?;
        let at = live.index_of(rank)?;
        live.members.get_mut(at)
    }

    fn stream(&mut self, session: SessionId, stream: u32) -> Option<&mut Stream> {
        self.streams.get_mut(&session)?.get_mut(stream as usize)?.as_mut()
    }

    fn enqueue(&mut self, operation: Operation) {
        let (session, handle) = (Arc::clone(&operation.session), operation.stream);
        let (ticket, group_continues) = (operation.ticket, operation.group_continues);
        let (comm, rank) = (operation.comm, operation.rank);
        let task = match (&operation.action, self.comms.get_mut(comm)) {
            (Action::Collective { .. }, Some(live)) if live.failure.is_none() => {
                Task::Collective { comm, rank, seq: live.enqueue(operation, &self.recorder) }
            }
            _ => Task::Own(Box::new(operation)),
        };
        let streams = self.streams.entry(session.id).or_default();
        let index = handle.index as usize;
        if streams.len() <= index {
            streams.resize_with(index + 1, || None);
        }
        let stream = streams[index].get_or_insert_with(|| Stream::new(Arc::clone(&session), handle));
        stream.handle = handle;
        stream.push(Entry { ticket, group_continues, task });
        self.events.push_back(Event::Advance { session: session.id, stream: handle.index });
    }

    /// Starts what a stream may start.
    fn advance(&mut self, session: SessionId, index: u32, now: Instant) {
        while let Some((ticket, task)) = self.stream(session, index).and_then(Stream::start_next) {
            match task {
                Task::Collective { comm, rank, seq } => self.arrive(session, index, ticket, (comm, rank, seq), now),
                Task::Own(operation) => self.start_own(operation, now),
                Task::Started => {}
            }
        }
        self.watch_gate(session, index, now);
    }

    fn arrive(&mut self, session: SessionId, index: u32, ticket: u64, whose: (Handle, u32, u64), now: Instant) {
        let (comm, rank, seq) = whose;
        self.expect_progress(now);
        if self.comms.get_mut(comm).is_some_and(|live| live.arrive(rank, seq, now, &self.recorder)) {
            self.events.push_back(Event::Ready { comm });
            return;
        }
        self.count_failed(session, index, ticket, (comm, rank));
        self.finish_one(session, index);
    }

    fn failure_of(&self, comm: Handle) -> Failure {
        let failure = self.comms.get(comm).and_then(|comm| comm.failure.clone());
        failure.unwrap_or_else(|| Failure::new(ErrorClass::InvalidUsage, "the communicator has been destroyed"))
    }

    fn start_own(&mut self, operation: Box<Operation>, now: Instant) {
        let comm = operation.comm;
        match &operation.action {
            Action::Nop => self.finish_one(operation.session.id, operation.stream.index),
            Action::Invalid { class, message } => {
                let text = format!("rank {} made an invalid call: {message}", operation.rank);
                let failure = Failure::new(*class, text);
                self.kill(comm, failure);
                self.fail(&operation);
            }
            _ if self.comms.get(comm).is_none_or(|live| live.failure.is_some()) => {
                self.fail(&operation);
            }
            Action::Send { peer } | Action::Recv { peer }
                if self.comms.get(comm).is_some_and(|live| live.is_far(*peer)) =>
            {
                self.expect_progress(now);
                let starts = self.comms.get_mut(comm).and_then(|live| live.offer_far(operation, now));
                if let Some(operation) = starts {
                    self.start_far(comm, operation);
                }
            }
            _ => {
                let Some(live) = self.comms.get_mut(comm) else { return };
                let pair = live.offer(operation, now);
                self.expect_progress(now);
                if let Some((send, recv)) = pair {
                    self.start_pair(comm, send, recv, now);
                } else {
                    self.events.push_back(Event::Ready { comm });
                }
            }
        }
    }

    fn start_pair(&mut self, comm: Handle, send: Box<Operation>, recv: Box<Operation>, now: Instant) {
        if send.send.bytes != recv.recv.bytes || send.dtype != recv.dtype {
            let failure = Failure::new(
                ErrorClass::InvalidUsage,
                format!(
                    "a send and its receive disagree: rank {} called {}, rank {} called {}",
                    send.rank,
                    describe(&send),
                    recv.rank,
                    describe(&recv)
                ),
            );
            self.kill(comm, failure);
            self.fail(&send);
            self.fail(&recv);
            return;
        }
        let (from, to) = (send.send.clone(), recv.recv.clone());
        let ranks = (send.rank, recv.rank);
        let job = match self.jobs.insert(Job::Pair { comm, send, recv }) {
            Ok(job) => job,
            Err(Job::Pair { send, recv, .. }) => {
                let failure = too_many_jobs();
                self.kill(comm, failure);
                self.fail(&send);
                self.fail(&recv);
                return;
            }
            Err(_) => return,
        };
        if let Some(live) = self.comms.get_mut(comm) {
            live.pair_jobs += 1;
            let (comm, job) = (live.info.number, job_number(job));
            let pair = |at_ns| Record::PairStarted { at_ns, comm, job, from: ranks.0, to: ranks.1, bytes: from.bytes };
            self.recorder.record(pair);
        }
        if self.device.copy(&from, &to, job) == Launched::Finished {
            self.finish_job(job, now);
        }
    }

    /// Something has begun to wait: looks at the time in time.
    fn expect_progress(&mut self, now: Instant) {
        if self.look_for_late_at.is_none() {
            self.look_for_late_at = self.timeouts.operation.map(|timeout| now + timeout);
        }
    }

    /// Operations that run, and whose peers are on other hosts.
    fn far_jobs(&self, of: Handle) -> Vec<&Operation> {
        let jobs = self.jobs.iter().map(|(_, job)| job);
        jobs.filter_map(|job| match job {
            Job::Far { comm, operation } if *comm == of => Some(operation.as_ref()),
            _ => None,
        })
        .collect()
    }

    /// Ends communicators in which operations have waited for too long.
    fn end_late(&mut self, now: Instant) {
        let Some(timeout) = self.timeouts.operation.filter(|_| self.look_for_late_at.is_some_and(|at| at <= now))
        else {
            return;
        };
        let waiting: Vec<_> = self.comms.iter().filter_map(|(comm, live)| Some((comm, live.waits_since()?))).collect();
        self.look_for_late_at = waiting.iter().map(|(_, since)| *since + timeout).filter(|at| *at > now).min();
        for (comm, _) in waiting.into_iter().filter(|(_, since)| *since + timeout <= now) {
            let Some(live) = self.comms.get(comm) else { continue };
            let message = format!("nothing has happened for {timeout:?}: {}", live.describe_wait(&self.far_jobs(comm)));
            self.kill(comm, Failure::new(ErrorClass::Timeout, message));
        }
    }

    /// Plays the service's part in a communicator's rounds.
    fn play_rounds(&mut self, comm: Handle) {
        let Some(live) = self.comms.get_mut(comm) else { return };
        let mut ended = std::mem::take(&mut self.ended_rounds);
        let played = live.play_rounds(&mut ended);
        let any = !ended.is_empty();
        for operation in ended.drain(..) {
            self.finish_one(operation.session.id, operation.stream.index);
        }
        self.ended_rounds = ended;
        if let Err(failure) = played {
            self.kill(comm, failure);
        } else if any {
            self.settle(comm);
        }
    }

    fn start_collective(&mut self, comm: Handle, now: Instant) {
        self.play_rounds(comm);
        let Some(live) = self.comms.get_mut(comm) else { return };
        if live.failure.is_none()
            && let Some((rank, departed)) = live.waits_for_departed()
        {
            let message = format!("rank {departed} has left the communicator, and rank {rank} waits for it");
            self.kill(comm, Failure::new(ErrorClass::Remote, message));
            return;
        }
        if !live.is_ready() {
            return;
        }
        self.choose_strategy(comm);
        let Some(live) = self.comms.get_mut(comm) else { return };
        let prepared = live.start(now).and_then(|()| {
            let schedule = live.schedules.schedule_for(&live.running).map_err(|error| {
                Failure::new(ErrorClass::Internal, format!("no schedule for this collective: {error}"))
            })?;
            let _charge = live.charge_scratch(&schedule)?;
            let job = self.jobs.insert(Job::Collective { comm, _charge }).map_err(|_| too_many_jobs())?;
            Ok((schedule, job))
        });
        match prepared {
            Ok((schedule, job)) => {
                live.record_start(job, &self.recorder);
                let network = live.span.as_ref().map(|span| (&span.network, live.tag()));
                if self.device.launch(&schedule, &live.running, network, job) == Launched::Finished {
                    self.finish_job(job, now);
                }
            }
            Err(failure) => {
                // Empty unless the operations had already been taken off their queues.
                let stranded = std::mem::take(&mut live.running);
                self.kill(comm, failure);
                stranded.iter().for_each(|operation| self.fail(operation));
            }
        }
    }

    /// Transport engines have ended a job.
    fn end_job(&mut self, job: Handle, fault: Option<&ChannelFault>, now: Instant) {
        match fault {
            None => self.finish_job(job, now),
            Some(fault) => self.break_job(job, fault, now),
        }
    }

    fn finish_job(&mut self, job: Handle, now: Instant) {
        let ended = |at_ns| Record::Ended { at_ns, job: job_number(job), is_failed: false };
        self.recorder.record(ended);
        match self.jobs.remove(job) {
            Some(Job::Far { comm, operation }) => self.finish_far(comm, &operation, now),
            Some(Job::Collective { comm, .. }) => self.finish_collective(comm, now),
            Some(Job::Pair { comm, send, recv }) => {
                if let Some(live) = self.comms.get_mut(comm) {
                    live.touch(now);
                    live.pair_jobs -= 1;
                    live.info.count_pair(send.send.bytes);
                }
                self.finish_one(send.session.id, send.stream.index);
                self.finish_one(recv.session.id, recv.stream.index);
                self.expect_progress(now);
                self.settle(comm);
            }
            None => {}
        }
    }

    fn finish_collective(&mut self, comm: Handle, now: Instant) {
        let Some(live) = self.comms.get_mut(comm) else { return };
        live.touch(now);
        let mut running = std::mem::take(&mut live.running);
        let began = live.started_at.take().unwrap_or(now);
        // To the poll, and no finer: how far a change lets operations go on must be the same in every run of a simulation.
        live.average_took = (live.average_took * 7 + now.saturating_duration_since(began)) / 8;
        let took = began.elapsed();
        if let Some(Operation { action: Action::Collective { kind, .. }, count, dtype, .. }) = running.first() {
            live.info.count_collective(*kind, *count, dtype.size_bytes(), took);
        }
        if live.note_burst(now.checked_sub(took).unwrap_or(now), now) {
            self.registry.note_comms();
        }
        for operation in &running {
            self.finish_one(operation.session.id, operation.stream.index);
        }
        running.clear();
        if let Some(live) = self.comms.get_mut(comm) {
            live.running = running;
        }
        // What waits behind it was not late while it ran.
        self.expect_progress(now);
        self.settle(comm);
        self.start_collective(comm, now);
    }

    /// One operation of a stream has ended.
    fn finish_one(&mut self, session: SessionId, index: u32) {
        if self.stream(session, index).is_some_and(Stream::finish_one) {
            self.events.push_back(Event::Advance { session, stream: index });
        }
    }

    fn fail(&mut self, operation: &Operation) {
        if let Some(live) = self.comms.get(operation.comm) {
            live.info.failed.fetch_add(1, Ordering::Relaxed);
        }
        let (session, index) = (operation.session.id, operation.stream.index);
        self.count_failed(session, index, operation.ticket, (operation.comm, operation.rank));
        self.finish_one(session, index);
    }

    /// An operation fails. Its tenant knows why from the failure of the communicator, unless it has left that one.
    fn count_failed(&mut self, session: SessionId, index: u32, ticket: u64, (comm, rank): (Handle, u32)) {
        let is_told = self.member(comm, rank).is_some_and(|member| !member.left);
        let failure = self.failure_of(comm);
        let Some(stream) = self.stream(session, index) else { return };
        stream.session.count_failed();
        if !is_told && stream.is_news(comm) {
            stream.session.report(Handle::NONE, stream.handle, ticket, failure.class, &failure.message);
        }
    }

    /// Ends a communicator with an error on every rank. What already runs ends by itself.
    fn kill(&mut self, comm: Handle, failure: Failure) {
        let Some(live) = self.comms.get_mut(comm) else { return };
        if live.failure.is_some() {
            return;
        }
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
        self.fail_elsewhere(comm, &failure);
        failed.iter().for_each(|operation| self.fail(operation));
        self.settle(comm);
    }

    /// Lets ranks go that wanted to leave, and removes a communicator that nobody is in.
    fn settle(&mut self, comm: Handle) {
        let Some(live) = self.comms.get_mut(comm) else { return };
        let mut departed = Vec::new();
        for at in 0..live.members.len() {
            let rank = live.members[at].rank;
            if live.members[at].leaving.is_some() && live.is_quiet(rank) {
                live.depart(rank);
                departed.push(rank);
                if let Some((request, reply)) = live.members[at].leaving.take() {
                    // A full or gone mailbox means that the session is ending: nobody waits for the answer.
                    let _ = reply.send(ProxyReply::Left { request });
                }
            }
        }
        if live.is_over() {
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
            self.events.push_back(Event::Ready { comm });
        }
    }

    fn close_session(&mut self, session: SessionId) {
        for (refusal, members) in self.rendezvous.leave(|request| request.session.id == session) {
            refuse_all(&refusal, members);
        }
        self.withdraw(session);
        self.stop_preparing(session);
        let mut touched = Vec::new();
        for (handle, comm) in self.comms.iter() {
            let is_live = |member: &&Member| member.session.id == session && !member.left;
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
            self.kill(handle, Failure::new(ErrorClass::Remote, message));
            self.settle(handle);
        }
        self.streams.remove(&session);
        self.forward(ProxyMessage::SessionClosed { session });
    }

    fn join(&mut self, request: JoinRequest, now: Instant) {
        if request.root.is_some() {
            return self.join_across(request, now);
        }
        let key = GatheringKey { tenant: request.session.tenant.name.clone(), id: request.id };
        let (rank, nranks, id) = (request.rank, request.nranks, request.id);
        match self.rendezvous.join(key, rank, nranks, request, now) {
            Joined::Waiting => {}
            Joined::Refused(refusal, members) => refuse_all(&refusal, members),
            Joined::Complete(requests) => self.prepare(id, requests, now),
        }
    }

    /// A board for a new communicator, where the operator lets small collectives go without the service, and the tenant
    /// has memory left. Without one everything works the same, slower.
    fn make_board(&self, requests: &[JoinRequest]) -> Option<(OwnedFd, Arc<TenantBoard>)> {
        let nranks = requests.len() as u32;
        let layout = BoardLayout { nranks, slot_bytes: self.board_slot_bytes };
        if self.board_slot_bytes == 0 || !(2..=BOARD_RANKS_MAX).contains(&nranks) {
            return None;
        }
        let charge = requests[0].session.tenant.charge(Resource::MemoryBytes, layout.bytes()).ok()?;
        let made = Board::create(layout);
        let (fd, board) =
            made.inspect_err(|error| tracing::debug!(%error, "a communicator goes without a board")).ok()?;
        Some((fd, Arc::new(TenantBoard::new(board, charge))))
    }

    /// Begins a communicator. `requests` are those of this host's ranks, ascending; `across` where there are other hosts.
    fn create_comm(
        &mut self,
        id: UniqueId,
        nranks: u32,
        requests: Vec<JoinRequest>,
        across: Option<Across>,
        prepared: Option<Prepared>,
        now: Instant,
    ) {
        let rank_info = |request: &JoinRequest| RankInfo {
            rank: request.rank,
            session: request.session.id,
            pid: request.session.peer.pid,
            rounds: 0.into(),
            enqueued: 0.into(),
            started: 0.into(),
            completed: 0.into(),
            late_ns: 0.into(),
        };
        // A GPU's ranks cannot play rounds when they call: their data is not there yet.
        let is_staged = prepared.is_none() && requests.iter().any(|request| request.gpu.is_some());
        let may_have_board = across.is_none() && prepared.is_none() && !is_staged;
        let (board_fd, board) = if may_have_board { self.make_board(&requests).unzip() } else { (None, None) };
        let (share, page_fd, direct) = match prepared {
            Some(Prepared { share, page, group }) => (Some(Arc::new(share)), Some(page), Some(Arc::new(group))),
            None => (None, None, None),
        };
        let info = Arc::new(CommInfo {
            number: self.registry.next_number(),
            id,
            tenant: requests.first().map_or_else(String::new, |request| request.session.tenant.name.clone()),
            device: if is_staged { "staged".into() } else { self.device.name() },
            nranks,
            hosts: across.iter().flat_map(|across| across.hosts.iter().map(ToString::to_string)).collect(),
            ranks: requests.iter().map(rank_info).collect(),
            operations: 0.into(),
            bytes: 0.into(),
            bus_bytes: 0.into(),
            busy_ns: 0.into(),
            pairs: 0.into(),
            recent: RecentTraffic::default(),
            traffic: requests.first().map(|request| Arc::clone(&request.session.tenant.traffic)).unwrap_or_default(),
            links: across.as_ref().map(|across| across.span.network.links.0),
            failed: 0.into(),
            epoch: 0.into(),
            board,
            direct,
            placed: across.as_ref().map(Across::placed),
        });
        let memory = board_fd.or(page_fd).map(Arc::new);
        let ranks_by_host = across.as_ref().map_or(&[][..], |across| &across.ranks_by_host);
        let schedules = (self.make_schedules)(nranks, ranks_by_host);
        let mut answers = Vec::with_capacity(requests.len());
        let mut members = Vec::with_capacity(requests.len());
        for request in requests {
            let JoinRequest { session, request, rank, tenant_comm, charge, reply, .. } = request;
            members.push(Member::new(rank, session, tenant_comm, charge));
            answers.push((rank, request, tenant_comm, reply));
        }
        let span = across.map(|across| across.span);
        let ways = self.setups.as_ref().map(Setups::first_ways).unwrap_or_default();
        let comm = match self.comms.insert(Comm::new(members, schedules, ways, Arc::clone(&info), span, now)) {
            Ok(comm) => comm,
            Err(refused) => {
                let message = format!("the service has {COMMS_MAX} communicators, the most it can have");
                let class = ErrorClass::System;
                for (_, request, tenant_comm, reply) in answers {
                    let _ =
                        reply.send(ProxyReply::JoinFailed { request, tenant_comm, class, message: message.clone() });
                }
                if let Some(span) = refused.span {
                    self.never_begun(*span, &Failure::new(class, message));
                }
                return;
            }
        };
        self.comms.get(comm).into_iter().for_each(Comm::tell_chosen);
        self.registry.add_comm(Arc::clone(&info));
        if info.direct.is_some() {
            self.watch_gpus(now);
        }
        self.note_links(comm);
        for (rank, request, tenant_comm, reply) in answers {
            let (info, memory, share) = (Arc::clone(&info), memory.clone(), share.clone());
            let _ = reply.send(ProxyReply::Joined { request, tenant_comm, comm, rank, info, memory, share });
        }
    }
}

fn name(device: &dyn Device) -> String {
    format!("proxy {}", device.name())
}

fn too_many_jobs() -> Failure {
    Failure::new(ErrorClass::System, format!("{JOBS_MAX} operations run on this device, the most it can"))
}

fn refuse_all(refusal: &Refusal, members: Vec<JoinRequest>) {
    for member in members {
        let JoinRequest { request, tenant_comm, reply, .. } = member;
        let (class, message) = (refusal.class, refusal.message.clone());
        let _ = reply.send(ProxyReply::JoinFailed { request, tenant_comm, class, message });
    }
}

impl Engine for ProxyEngine {
    fn name(&self) -> String {
        name(self.device.as_ref())
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        let mut handled = 0;
        self.look_at_gates(cx.now);
        while handled < cx.budget {
            if let Some(event) = self.events.pop_front() {
                match event {
                    Event::Advance { session, stream } => self.advance(session, stream, cx.now),
                    Event::Ready { comm } => self.start_collective(comm, cx.now),
                }
            } else if let Some(message) = self.mailbox.pop() {
                self.handle(message, cx.now);
            } else {
                break;
            }
            handled += 1;
        }
        let backlog = self.device.push_backlog() | self.setups.as_mut().is_some_and(Setups::push_backlog);
        self.end_suspected(cx.now);
        for (refusal, members) in self.rendezvous.expire(cx.now) {
            refuse_all(&refusal, members);
        }
        self.end_late(cx.now);
        self.end_late_direct(cx.now);
        self.end_late_inquiries(cx.now);
        if handled > 0 || backlog || !self.events.is_empty() {
            Progress::Busy
        } else {
            let suspected_until = self.setups.as_ref().and_then(Setups::suspected_until);
            let looks = [self.look_for_late_at, self.look_at_gpus.map(Look::at)];
            let deadlines = [self.rendezvous.next_deadline(), suspected_until, self.inquiries.deadline()];
            let deadlines = deadlines.into_iter().chain(looks).chain([self.gates.look_at(cx.now)]);
            Progress::Idle { wake_at: deadlines.flatten().min() }
        }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        self.mailbox.is_empty()
    }
}
