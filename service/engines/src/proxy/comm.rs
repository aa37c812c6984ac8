//! A communicator's operations in their order, on all its ranks of this host.
//!
//! A collective starts when operation number n has arrived at every rank here; ranks of other hosts meet it in its messages.
//! One collective of a communicator runs at a time, as in NCCL; sends and receives run as their pairs match.
//!
//! Small collectives may be rounds of the communicator's shared-memory exchange (`rounds.rs`).

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_collective::Schedule;
use mccs_device::Collective;
use mccs_exchange::protocol::CommId;
use mccs_ipc::shm_exchange::CollectiveSignature;
use mccs_ipc::types::{DataType, ErrorClass, Handle, RedOp};
use mccs_model::Action;
use mccs_registry::CommInfo;
use mccs_runtime::{Sender, Share};
use mccs_telemetry::profile::ProfileMeter;
use mccs_telemetry::recorder::{Record, Recorder, job_number};
use mccs_telemetry::stuck::HostAccount;
use mccs_tenants::session::Session;
use mccs_tenants::{Charge, Resource};

use super::describe::{describe, difference, signature};
use super::direct_watch::DirectWatch;
use super::operation::{Calls, Operation, ProxyReply, RoundState};
use super::p2p_queues::P2pQueues;
use super::schedule_cache::ScheduleCache;
use super::strategies::Strategies;
use super::stream::Arrival;
use crate::transport::Network;
use crate::transport::links::PathAssignment;

/// Scratch memory of an operation that is the service's affair; more is the tenant's.
const SCRATCH_FREE_BYTES: u64 = 16 << 20;

/// Why a communicator is dead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub(super) class: ErrorClass,
    pub(super) message: Arc<str>,
}

impl Failure {
    pub(super) fn new(class: ErrorClass, message: impl Into<Arc<str>>) -> Self {
        Failure { class, message: message.into() }
    }
}

/// A collective of one rank that waits for the others.
pub(super) struct Waiting {
    pub(super) operation: Operation,
    /// Its place among its rank's calls, as recorders know it: the same on all ranks.
    place: u64,
    /// Since when it has been the head of its stream, or would have been if its turn had come at once.
    pub(super) arrived: Option<Instant>,
}

/// What a communicator has to do with other hosts.
pub(super) struct Span {
    /// What the exchange calls it.
    pub(super) comm: CommId,
    /// Ranks of other hosts that have left.
    pub(super) left: BTreeSet<u32>,
    pub(super) network: Network,
    /// A link has broken, and why may be on its way.
    pub(super) suspected: Option<Failure>,
    /// Whether the other hosts know, or have been told, that it has failed.
    pub(super) is_told: bool,
    /// Whether the engines have been told to close the links. Once: an engine without links may be gone.
    pub(super) is_closed: bool,
}

/// One rank of this host.
pub(super) struct Member {
    pub(super) rank: u32,
    pub(super) session: Arc<Session>,
    pub(super) tenant_comm: Handle,
    /// Where it is, as the device counts its GPUs.
    pub(super) gpu: Option<usize>,
    /// Collectives enqueued and not started, in order.
    pub(super) waiting: VecDeque<Waiting>,
    /// Number of the first of `waiting`.
    pub(super) first_seq: u64,
    /// Collectives enqueued that were no rounds.
    whole_enqueued: u64,
    /// Of those, the ones that have started.
    pub(super) whole_started: u64,
    pub(super) leaving: Option<(Option<u64>, Sender<ProxyReply>)>,
    pub(super) left: bool,
    _charge: Arc<Charge>,
}

/// A communicator.
pub(super) struct Comm {
    /// Ranks of this host, ascending.
    pub(super) members: Vec<Member>,
    /// Ranks of all hosts.
    nranks: u32,
    /// Where there are other hosts.
    pub(super) span: Option<Box<Span>>,
    /// Ranks whose next collective has arrived, and is no round.
    pub(super) ready: u32,
    /// The collective that runs, one operation a rank; empty when none does.
    pub(super) running: Vec<Operation>,
    pub(super) started_at: Option<Instant>,
    /// Sends and receives that wait.
    pub(super) p2p: P2pQueues,
    /// Operations whose links have broken; they fail with the communicator.
    pub(super) broken: Vec<Operation>,
    pub(super) failure: Option<Failure>,
    pub(super) strategies: Strategies,
    /// The last collective that has started and was no round, and the rounds before it.
    last_whole: Option<(CollectiveSignature, u64)>,
    /// How long collectives run, the last ones counting most.
    pub(super) average_took: Duration,
    pub(super) info: Arc<CommInfo>,
    /// Whether a rank has left.
    any_left: bool,
    /// P2pMessage-to-point jobs that run.
    pub(super) pair_jobs: u32,
    /// When something last happened here.
    active_at: Instant,
    /// Of the page of ranks on GPUs.
    pub(super) watch: DirectWatch,
    /// When it sends, where a controller may want to know.
    pub(super) meter: ProfileMeter,
}

impl Comm {
    pub(super) fn new(
        members: Vec<Member>,
        schedules: ScheduleCache,
        assignment: Arc<PathAssignment>,
        info: Arc<CommInfo>,
        span: Option<Span>,
        now: Instant,
    ) -> Self {
        Comm {
            running: Vec::with_capacity(members.len()),
            members,
            nranks: info.nranks,
            span: span.map(Box::new),
            ready: 0,
            started_at: None,
            p2p: P2pQueues::default(),
            broken: Vec::new(),
            failure: None,
            strategies: Strategies::new(schedules, assignment),
            last_whole: None,
            average_took: Duration::ZERO,
            info,
            any_left: false,
            pair_jobs: 0,
            active_at: now,
            watch: DirectWatch::default(),
            meter: ProfileMeter::default(),
        }
    }

    pub(super) fn nranks(&self) -> u32 {
        self.nranks
    }

    /// Whose it is: all its ranks are one tenant's.
    pub(super) fn share(&self) -> Share {
        self.members.first().map_or(Share::SERVICE, |member| member.session.tenant.share)
    }

    /// Place of a rank among `members`.
    pub(super) fn index_of(&self, rank: u32) -> Option<usize> {
        match self.members.get(rank as usize) {
            Some(member) if member.rank == rank => Some(rank as usize),
            _ => self.members.binary_search_by_key(&rank, |member| member.rank).ok(),
        }
    }

    /// Whether a rank is on another host.
    pub(super) fn is_remote(&self, rank: u32) -> bool {
        self.span.is_some() && self.index_of(rank).is_none()
    }

    /// Something has happened then.
    pub(super) fn touch(&mut self, at: Instant) {
        self.active_at = self.active_at.max(at);
    }

    /// Takes a collective in, and returns its number.
    pub(super) fn enqueue(&mut self, operation: Operation, now: Instant, recorder: &Recorder) -> u64 {
        let Some(at) = self.index_of(operation.rank) else { return u64::MAX };
        let (member, counters) = (&mut self.members[at], &self.info.ranks[at]);
        let place = member.whole_enqueued.saturating_add(operation.rounds);
        counters.rounds.store(operation.rounds, Ordering::Relaxed);
        if operation.round == RoundState::None {
            member.whole_enqueued += 1;
            counters.enqueued.store(member.whole_enqueued, Ordering::Relaxed);
            if self.info.is_timed() {
                let (comm, rank) = (self.info.number, operation.rank);
                recorder.record_in_round(now, |at_ns| Record::Enqueued { at_ns, comm, rank, seq: place });
            }
        }
        if operation.user_tag != 0 {
            counters.user_tag.store(operation.user_tag, Ordering::Relaxed);
        }
        member.waiting.push_back(Waiting { operation, place, arrived: None });
        member.first_seq + member.waiting.len() as u64 - 1
    }

    /// A collective has become the head of its stream. Returns false if it is no longer waiting: the communicator died.
    pub(super) fn arrive(&mut self, rank: u32, seq: u64, arrival: Arrival, recorder: &Recorder) -> bool {
        self.touch(arrival.due);
        let Some(member) = self.index_of(rank).map(|at| &mut self.members[at]) else { return false };
        let Some(place) = seq.checked_sub(member.first_seq) else { return false };
        let Some(waiting) = member.waiting.get_mut(place as usize) else { return false };
        waiting.arrived = Some(arrival.due);
        if waiting.operation.round == RoundState::None && self.info.is_timed() {
            let (comm, seq) = (self.info.number, waiting.place);
            recorder.record_in_round(arrival.at, |at_ns| Record::Arrived { at_ns, comm, rank, seq });
        }
        if place == 0 && waiting.operation.round == RoundState::None {
            self.ready += 1;
        }
        true
    }

    pub(super) fn active_since(&self) -> Instant {
        self.active_at
    }

    /// Number of the next collective that is no round: how many have started.
    pub(super) fn next_number(&self) -> u64 {
        self.members.first().map_or(0, |member| member.whole_started)
    }

    /// The last collective of a rank that has begun, where it is known: rounds are what the rank says.
    pub(super) fn last_call(&self, rank: u32) -> Option<CollectiveSignature> {
        if self.info.direct.as_ref().is_some_and(|direct| direct.page().launched(rank) > 0) {
            return None;
        }
        let rounds_before = self.last_whole.map_or(0, |(_, rounds)| rounds);
        let shm_exchange = self.info.shm_exchange.as_ref();
        let Some((shm_exchange, round)) = shm_exchange
            .map(|shm_exchange| (shm_exchange, shm_exchange.posted(rank)))
            .filter(|(_, n)| *n > rounds_before)
        else {
            return self.last_whole.map(|(call, _)| call);
        };
        shm_exchange.contribution(rank, round, 0).and_then(|posted| CollectiveSignature::from_wire(posted.call))
    }

    /// Whether a collective can start.
    pub(super) fn is_ready(&self) -> bool {
        let is_whole = self.span.as_ref().is_none_or(|span| span.suspected.is_none());
        self.ready as usize == self.members.len()
            && self.running.is_empty()
            && is_whole
            && self.strategies.allow(self.next_number())
    }

    /// A rank whose operation waits for one that has left, and that one.
    pub(super) fn waits_for_departed(&self) -> Option<(u32, u32)> {
        if !self.any_left {
            return None;
        }
        // One of another host may have done its part of what a rank here still waits for: broken links tell if not.
        let has_left = |rank: u32| self.index_of(rank).is_some_and(|at| self.members[at].left);
        let in_collective = |member: &Member| {
            let operation = member.arrived()?;
            // A rank may post to a round and leave.
            let keeps_waiting =
                |gone: &u32| operation.round == RoundState::None || !self.has_posted(*gone, operation.rounds);
            let gone =
                self.members.iter().map(|member| member.rank).filter(|rank| has_left(*rank)).find(keeps_waiting)?;
            Some((member.rank, gone))
        };
        self.members.iter().find_map(in_collective).or_else(|| self.p2p.waits_for_left(has_left))
    }

    /// Checks that all ranks called the same, and moves their operations into `running`.
    pub(super) fn start(&mut self, now: Instant) -> Result<(), Failure> {
        let first = self.members[0].waiting.front().map(|waiting| &waiting.operation);
        let Some(first) = first else { return Ok(()) };
        for member in self.members.iter().skip(1) {
            let Some(other) = member.waiting.front() else { continue };
            let difference = if first.rounds == other.operation.rounds {
                difference(first, &other.operation)
            } else {
                Some("place in the order of calls")
            };
            if let Some(difference) = difference {
                return Err(self.members[0].disagrees(first, member, &other.operation, difference));
            }
        }
        self.last_whole = signature(first).map(|call| (call, first.rounds));
        self.ready = 0;
        self.started_at = Some(now);
        self.note_late();
        for (member, counters) in self.members.iter_mut().zip(&self.info.ranks) {
            if let Some(waiting) = member.waiting.pop_front() {
                self.running.push(waiting.operation);
            }
            member.first_seq += 1;
            member.whole_started += 1;
            counters.started.store(member.whole_started, Ordering::Relaxed);
            if member.arrived().is_some_and(|operation| operation.round == RoundState::None) {
                self.ready += 1;
            }
        }
        Ok(())
    }

    /// What has just become `running`, whose operations `calls` has, as devices take it. `comm` is the communicator's own handle.
    pub(super) fn collective<'a>(
        &self,
        comm: Handle,
        schedule: &'a Arc<Schedule>,
        calls: &'a Calls<'a>,
    ) -> Collective<'a> {
        let first = self.running.first();
        Collective {
            comm,
            schedule,
            dtype: first.map_or(DataType::U8, |operation| operation.dtype),
            redop: first.map_or(RedOp::Sum, |operation| operation.action.redop()),
            share: self.share(),
            ranks: calls,
            spans_hosts: self.span.is_some(),
        }
    }

    /// Records that what has just become `running` begins, as a job.
    pub(super) fn record_start(&self, job: Handle, recorder: &Recorder) {
        if !self.info.is_timed() {
            return;
        }
        let (Some(first), Some(member)) = (self.running.first(), self.members.first()) else { return };
        let Action::Collective { kind, .. } = first.action else { return };
        let (comm, seq) = (self.info.number, member.whole_started.saturating_sub(1).saturating_add(first.rounds));
        if first.user_tag != 0 {
            recorder.record(|at_ns| Record::Tagged { at_ns, comm, seq, tag: first.user_tag });
        }
        recorder.record(|at_ns| Record::Started {
            at_ns,
            comm,
            seq,
            epoch: self.info.epoch.load(Ordering::Relaxed),
            job: job_number(job),
            kind,
            bytes: kind.payload_count(first.count, self.nranks).saturating_mul(first.dtype.size_bytes() as u64),
        });
    }

    /// Counts by how much ranks have come later to the next collective than the first of them.
    fn note_late(&self) {
        // When a rank on a GPU calls is not when its stream comes to the call.
        if !self.info.is_timed() {
            return;
        }
        let arrival = |member: &Member| member.waiting.front().and_then(|waiting| waiting.arrived);
        let Some(first) = self.members.iter().filter_map(arrival).min() else { return };
        for (member, counters) in self.members.iter().zip(&self.info.ranks) {
            let late = arrival(member).map_or(Duration::ZERO, |at| at.saturating_duration_since(first));
            counters.late_ns.fetch_add(late.as_nanos() as u64, Ordering::Relaxed);
        }
    }

    /// Takes what the running collective needs of scratch memory out of the tenant's quota.
    pub(super) fn charge_scratch(&self, schedule: &Schedule) -> Result<Option<Charge>, Failure> {
        let Some(first) = self.running.first().filter(|_| schedule.scratch_count > 0) else { return Ok(None) };
        let counts = self.members.iter().map(|member| schedule.scratch_count_of(member.rank));
        let bytes = counts.fold(0, u64::saturating_add).saturating_mul(first.dtype.size_bytes() as u64);
        if bytes <= SCRATCH_FREE_BYTES {
            return Ok(None);
        }
        let charge = first.session.tenant.charge(Resource::MemoryBytes, bytes).map_err(|refusal| {
            let message = format!(
                "rank {} called {}, for which the service needs {bytes} bytes of its own: {refusal}",
                first.rank,
                describe(first)
            );
            Failure::new(ErrorClass::System, message)
        })?;
        Ok(Some(charge))
    }

    /// Ends everything that waits. Returns the operations that had arrived, which now fail; those that had not fail when
    /// they become the head of their stream.
    pub(super) fn die(&mut self, failure: Failure) -> Vec<Operation> {
        self.failure.get_or_insert(failure);
        self.strategies.end();
        self.ready = 0;
        if let Some(shm_exchange) = &self.info.shm_exchange {
            shm_exchange.allow(0);
        }
        let mut failed = Vec::new();
        for member in &mut self.members {
            member.first_seq += member.waiting.len() as u64;
            failed.extend(
                member.waiting.drain(..).filter(|waiting| waiting.arrived.is_some()).map(|waiting| waiting.operation),
            );
        }
        failed.extend(self.p2p.drain());
        failed.append(&mut self.broken);
        failed
    }

    /// Since when operations have been waiting for other ranks with nothing happening; `None` where none waits. What runs
    /// with ranks of other hosts may be waiting for them, unless it moves.
    pub(super) fn waits_since(&self) -> Option<Instant> {
        let waits =
            self.members.iter().any(|member| member.arrived().is_some()) || self.p2p.unmatched().next().is_some();
        let runs = !self.running.is_empty() || self.pair_jobs > 0;
        let may_wait = if self.span.is_some() { waits || runs } else { waits && !runs };
        let moved_at = self.span.as_ref().map(|span| span.network.activity.last());
        may_wait.then(|| moved_at.map_or(self.active_at, |at| at.max(self.active_at)))
    }

    /// A host of which all ranks have left: nobody there knows the communicator any more.
    pub(super) fn departed(&self, host: &str) -> Option<HostAccount> {
        let (placed, left) = (self.info.placed.as_ref()?, &self.span.as_ref()?.left);
        let there = placed.hosts.iter().find(|there| there.host == host)?;
        there.ranks.iter().all(|rank| left.contains(rank)).then(|| HostAccount::of_departed(&there.ranks))
    }

    /// Whether a rank has nothing waiting, and nothing runs.
    pub(super) fn is_quiet(&self, rank: u32) -> bool {
        !self.has_waiting(rank) && self.running.is_empty() && self.pair_jobs == 0
    }

    /// Whether an operation of a rank waits for other ranks, or for its turn.
    pub(super) fn has_waiting(&self, rank: u32) -> bool {
        self.index_of(rank).is_some_and(|at| !self.members[at].waiting.is_empty())
            || self.p2p.has_waiting(rank)
            || self.broken.iter().any(|operation| operation.rank == rank)
    }

    /// A rank has left for good.
    pub(super) fn depart(&mut self, rank: u32) {
        if let Some(at) = self.index_of(rank) {
            self.members[at].left = true;
            self.any_left = true;
        }
    }

    /// Whether nobody is left and nothing runs.
    pub(super) fn is_over(&self) -> bool {
        self.members.iter().all(|member| member.left) && self.running.is_empty() && self.pair_jobs == 0
    }
}

impl Member {
    pub(super) fn new(
        (rank, gpu): (u32, Option<usize>),
        session: Arc<Session>,
        tenant_comm: Handle,
        charge: Arc<Charge>,
    ) -> Self {
        Member {
            rank,
            session,
            tenant_comm,
            gpu,
            waiting: VecDeque::new(),
            first_seq: 0,
            whole_enqueued: 0,
            whole_started: 0,
            leaving: None,
            left: false,
            _charge: charge,
        }
    }

    /// Number of the next collective among all of this rank, from 0.
    pub(super) fn place(&self, operation: &Operation) -> u64 {
        let rounds_before = operation.rounds - u64::from(operation.round != RoundState::None);
        // As many as a hostile rank says.
        self.whole_started.saturating_add(rounds_before)
    }

    /// A failure that names both sides.
    pub(super) fn disagrees(&self, own: &Operation, other: &Member, theirs: &Operation, difference: &str) -> Failure {
        let (place, other_place) = (self.place(own), other.place(theirs));
        let message = format!(
            "ranks disagree on operation {place}: rank {} called {}, rank {} called {}{} (different {difference})",
            own.rank,
            describe(own),
            theirs.rank,
            describe(theirs),
            if place == other_place { String::new() } else { format!(" as its operation {other_place}") }
        );
        Failure::new(ErrorClass::InvalidUsage, message)
    }

    /// The next collective, if it is the head of its stream.
    pub(super) fn arrived(&self) -> Option<&Operation> {
        self.waiting.front().filter(|waiting| waiting.arrived.is_some()).map(|waiting| &waiting.operation)
    }

    pub(super) fn arrived_mut(&mut self) -> Option<&mut Operation> {
        self.waiting.front_mut().filter(|waiting| waiting.arrived.is_some()).map(|waiting| &mut waiting.operation)
    }
}
