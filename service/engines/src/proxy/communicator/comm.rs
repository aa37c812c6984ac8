//! A communicator's operations in order, on all its ranks of this host.
//!
//! A collective starts when operation number n has arrived at every rank here; ranks of other hosts meet it in its messages.
//! One collective of a communicator runs at a time, as in NCCL, but for those that overlap (`running.rs`); sends and receives run as
//! their pairs match.
//!
//! Small collectives may be rounds of the communicator's shared-memory exchange (`shm_exchange.rs`).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_exchange::protocol::CommId;
use mccs_ipc::shm_exchange::CollectiveSignature;
use mccs_registry::{CommInfo, Registry};
use mccs_runtime::Share;
use mccs_telemetry::profile::{Noted, ProfileMeter};
use mccs_telemetry::recorder::{Record, Recorder};

use crate::proxy::calls::deadline::LastProgress;
use crate::proxy::calls::describe::signature;
use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::members::{Member, Members};
use crate::proxy::calls::mismatch::check_alike;
use crate::proxy::calls::operation::{Operation, RoundState};
use crate::proxy::calls::running::Running;
use crate::proxy::communicator::p2p_queues::{P2pQueues, WaitsForDeparted};
use crate::proxy::communicator::port_channels::PortChannels;
use crate::proxy::communicator::shm_exchange::Rounds;
use crate::proxy::communicator::strategies::Strategies;
use crate::proxy::gpus::gpu_ranks::GpuRanks;
use crate::proxy::streams::stream::Arrival;
use crate::transport::Network;

/// A communicator's relation to other hosts.
pub(crate) struct Span {
    /// The exchange's name for it.
    pub(crate) comm: CommId,
    /// Ranks of other hosts that have left.
    pub(crate) left: BTreeSet<u32>,
    pub(crate) network: Network,
    /// A link has broken, and why may be on its way.
    pub(crate) suspected: Option<Failure>,
    /// Whether the other hosts know, or have been told, that it has failed.
    pub(crate) is_told: bool,
    /// Whether the engines have been told to close the links. Once: an engine without links may be gone.
    pub(crate) is_closed: bool,
}

/// A communicator.
pub(crate) struct Comm {
    /// Ranks of this host.
    pub(crate) members: Members,
    /// Its relation to other hosts, if there are any.
    pub(crate) span: Option<Box<Span>>,
    /// The collectives that run.
    pub(crate) running: Running,
    /// Sends and receives.
    pub(crate) p2p: P2pQueues,
    /// Puts and signals.
    pub(crate) port_channels: PortChannels,
    /// Operations whose links have broken; they fail with the communicator.
    pub(crate) broken: Vec<Operation>,
    pub(crate) failure: Option<Failure>,
    pub(crate) strategies: Strategies,
    pub(crate) info: Arc<CommInfo>,
    /// GPUs whose kernels run its collectives.
    pub(crate) gpus: Option<GpuRanks>,
    /// When it sends, where a controller may want to know.
    pub(crate) meter: ProfileMeter,
    /// The last collective that has started and was no round, and the rounds before it.
    last_whole: Option<(CollectiveSignature, u64)>,
    /// When something last happened here.
    progress: LastProgress,
}

impl Comm {
    pub(crate) fn new(
        members: Vec<Member>,
        strategies: Strategies,
        info: Arc<CommInfo>,
        span: Option<Span>,
        now: Instant,
    ) -> Self {
        Comm {
            running: Running::for_ranks(members.len()),
            members: Members::new(members),
            span: span.map(Box::new),
            p2p: P2pQueues::default(),
            port_channels: PortChannels::new(info.nranks),
            broken: Vec::new(),
            failure: None,
            strategies,
            gpus: GpuRanks::of(&info),
            info,
            meter: ProfileMeter::default(),
            last_whole: None,
            progress: LastProgress::at(now),
        }
    }

    /// Ranks of all hosts.
    pub(crate) fn nranks(&self) -> u32 {
        self.info.nranks
    }

    /// Its owner's share: all its ranks are one tenant's.
    pub(crate) fn share(&self) -> Share {
        self.members.first().map_or(Share::SERVICE, |member| member.session.tenant.share)
    }

    /// Whether a rank is on another host.
    pub(crate) fn is_remote(&self, rank: u32) -> bool {
        self.span.is_some() && self.members.index_of(rank).is_none()
    }

    /// Something has happened then.
    pub(crate) fn touch(&mut self, at: Instant) {
        self.progress.note(at);
    }

    /// The service has stood still for so long: what waits here is not late by that.
    pub(crate) fn put_off(&mut self, by: Duration) {
        self.progress.put_off(by);
    }

    /// When something last happened here.
    pub(crate) fn active_since(&self) -> Instant {
        self.progress.since()
    }

    /// Takes a collective in, and returns its number.
    pub(crate) fn enqueue(&mut self, operation: Operation, now: Instant, recorder: &Recorder) -> u64 {
        let Some(at) = self.members.index_of(operation.rank) else { return u64::MAX };
        let counters = &self.info.ranks[at];
        counters.rounds.store(operation.rounds, Ordering::Relaxed);
        if operation.user_tag != 0 {
            counters.user_tag.store(operation.user_tag, Ordering::Relaxed);
        }
        let (rank, is_round) = (operation.rank, operation.round != RoundState::None);
        let enqueued = self.members.enqueue(at, operation);
        if !is_round {
            counters.enqueued.store(enqueued.whole, Ordering::Relaxed);
            if self.info.is_timed() {
                let (comm, seq) = (self.info.number, enqueued.place);
                recorder.record_in_round(now, |at_ns| Record::Enqueued { at_ns, comm, rank, seq });
            }
        }
        enqueued.seq
    }

    /// A collective has become the head of its stream. Returns false if it is no longer waiting: the communicator died.
    pub(crate) fn arrive(&mut self, rank: u32, seq: u64, arrival: Arrival, recorder: &Recorder) -> bool {
        self.progress.note(arrival.due);
        let Some(waiting) = self.members.arrive(rank, seq, arrival.due) else { return false };
        if waiting.operation.round == RoundState::None && self.info.is_timed() {
            let (comm, seq) = (self.info.number, waiting.place);
            recorder.record_in_round(arrival.at, |at_ns| Record::Arrived { at_ns, comm, rank, seq });
        }
        true
    }

    /// Number of the next collective that is no round: how many have started.
    pub(crate) fn next_number(&self) -> u64 {
        self.members.first().map_or(0, Member::whole_started)
    }

    /// The last collective of a rank that has begun, where it is known: rounds are what the rank says.
    pub(crate) fn last_call(&self, rank: u32) -> Option<CollectiveSignature> {
        if self.info.device_initiated.as_ref().is_some_and(|group| group.page().launched(rank) > 0) {
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
    pub(crate) fn is_ready(&self) -> bool {
        let is_whole = self.span.as_ref().is_none_or(|span| span.suspected.is_none());
        let number = self.next_number();
        // Links of a strategy go with the first collective of the next one.
        let may_overlap = || self.span.is_some() && !self.strategies.changes_at(number);
        let has_room = || self.running.is_none() || (may_overlap() && self.running.has_room_for(&self.members));
        self.members.are_ready() && has_room() && is_whole && self.strategies.allow(number)
    }

    /// Whether a collective can start, a round go on, or a wait for one that has left end.
    pub(crate) fn has_to_do(&self) -> bool {
        self.is_ready() || self.members.any_left() || self.members.have_rounds()
    }

    /// A rank whose operation waits for one that has left.
    pub(crate) fn waits_for_departed(&self) -> Option<WaitsForDeparted> {
        if !self.members.any_left() {
            return None;
        }
        let exchange = self.info.shm_exchange.as_ref();
        let has_posted = |rank, round| exchange.is_some_and(|exchange| exchange.has_posted(rank, round));
        // One of another host may have done its part of what a rank here still waits for: broken links tell if not.
        let in_collective = |member: &Member| {
            let operation = member.arrived()?;
            // A rank may post to a round and leave.
            let keeps_waiting =
                |gone: &u32| operation.round == RoundState::None || !has_posted(*gone, operation.rounds);
            let departed = self.members.iter().filter(|member| member.has_left()).map(|member| member.rank);
            let departed = departed.into_iter().find(keeps_waiting)?;
            Some(WaitsForDeparted { rank: member.rank, departed })
        };
        let in_collective = self.members.iter().find_map(in_collective);
        in_collective.or_else(|| self.p2p.waits_for_left(|rank| self.members.has_left(rank)))
    }

    /// Checks that all ranks called the same, and has it run.
    pub(crate) fn start(&mut self, now: Instant) -> Result<(), Failure> {
        check_alike(&self.members)?;
        let Some(first) = self.members.first().and_then(Member::next) else { return Ok(()) };
        self.last_whole = signature(first).map(|call| (call, first.rounds));
        // When a rank on a GPU calls is not when its stream comes to the call.
        if self.info.is_timed() {
            self.members.note_late(&self.info);
        }
        self.running.begin(&mut self.members, &self.info, now);
        Ok(())
    }

    /// Plays the service's part in rounds of the shared-memory exchange. Operations that have ended go to `ended`.
    pub(crate) fn play_rounds(&mut self, ended: &mut Vec<Operation>) -> Result<(), Failure> {
        let Some(exchange) = &self.info.shm_exchange else { return Ok(()) };
        Rounds::new(&mut self.members, exchange).play(ended)
    }

    /// Looks at what GPUs have answered. Returns why it ends, if it does.
    pub(crate) fn judge_gpus(&mut self, timeout: Option<Duration>, now: Instant) -> Option<Failure> {
        let gpus = self.gpus.as_mut()?;
        if let Some(epoch) = gpus.adapt(now) {
            self.info.epoch.store(epoch, Ordering::Relaxed);
        }
        if self.failure.is_some() {
            return None;
        }
        gpus.judge(&self.members, &mut self.progress, timeout, now)
    }

    /// Ends everything that waits. Returns the operations that had arrived, which now fail; those that had not fail when
    /// they become the head of their stream.
    pub(crate) fn die(&mut self, failure: Failure) -> Vec<Operation> {
        self.failure.get_or_insert(failure);
        self.strategies.end();
        if let Some(shm_exchange) = &self.info.shm_exchange {
            shm_exchange.allow(0);
        }
        let mut failed = self.members.drain();
        failed.extend(self.p2p.drain());
        failed.append(&mut self.broken);
        failed
    }

    /// Since when operations have been waiting for other ranks with nothing happening; `None` where none waits. An
    /// operation that runs with ranks of other hosts may be waiting for them, unless it moves.
    pub(crate) fn waits_since(&self) -> Option<Instant> {
        let waits =
            self.members.iter().any(|member| member.arrived().is_some()) || self.p2p.unmatched().next().is_some();
        let may_wait = if self.span.is_some() { waits || self.runs() } else { waits && !self.runs() };
        let moved_at = self.span.as_ref().map(|span| span.network.activity.last());
        may_wait.then(|| moved_at.map_or(self.active_since(), |at| at.max(self.active_since())))
    }

    /// Whether a collective, a send or receive, or a put, runs.
    fn runs(&self) -> bool {
        !self.running.is_none() || self.p2p.runs() || self.port_channels.runs()
    }

    /// Whether a rank has nothing waiting, and nothing runs.
    pub(crate) fn is_quiet(&self, rank: u32) -> bool {
        !self.has_waiting(rank) && !self.runs()
    }

    /// Whether an operation of a rank waits for other ranks, or for its turn.
    pub(crate) fn has_waiting(&self, rank: u32) -> bool {
        self.members.get(rank).is_some_and(|member| member.next().is_some())
            || self.p2p.has_waiting(rank)
            || self.port_channels.has_waiting(rank)
            || self.broken.iter().any(|operation| operation.rank == rank)
    }

    /// Whether others may end what they have called although a rank's process has ended: it has no call under way, and all that they need of it is
    /// in the service's hands. Ranks on GPUs and those of port channels write to each other by themselves; other hosts, and parts, are told at once.
    pub(crate) fn can_spare(&self, rank: u32) -> bool {
        let passes_here_alone = self.gpus.is_none() && self.span.is_none() && self.port_channels.is_empty();
        let is_alone = self.info.part.is_none() && !self.info.family.has_parts();
        self.failure.is_none() && passes_here_alone && is_alone && !self.has_waiting(rank)
    }

    /// Whether nobody is left and nothing runs.
    pub(crate) fn is_over(&self) -> bool {
        self.members.are_gone() && !self.runs()
    }

    /// Tells who watches what was decided last.
    pub(crate) fn tell_chosen(&self) {
        if let Some(placed) = &self.info.placed {
            let in_force = self.info.epoch.load(Ordering::Relaxed);
            placed.set_chosen(Some(self.strategies.chosen(in_force, &self.info.hosts)));
        }
    }

    /// Takes the strategy of the next collective. Returns the numbers of those that are over.
    pub(crate) fn take_next(&mut self) -> Vec<u32> {
        let (number, mut over) = (self.next_number(), Vec::new());
        while let Some(epoch) = self.strategies.take_next(number) {
            over.extend(self.begin_epoch(epoch));
        }
        over
    }

    /// The strategy with this number is in force. Returns that of the one before, whose links go.
    pub(crate) fn begin_epoch(&mut self, epoch: u32) -> Option<u32> {
        self.info.epoch.store(epoch.into(), Ordering::Relaxed);
        self.span.as_mut().map(|span| std::mem::replace(&mut span.network.epoch, epoch))
    }

    /// A collective has ended: what that makes known of when it sends is told.
    pub(crate) fn note_burst(&mut self, began: Instant, ended: Instant, registry: &Registry) {
        let Some(placed) = &self.info.placed else { return };
        let Noted { profile, burst } = self.meter.note(began, ended);
        if let Some(profile) = profile {
            placed.set_profile(profile);
            registry.note_comms();
        }
        if let Some(burst) = burst.filter(|_| placed.pace_use.is_watched()) {
            placed.pace_use.foresee(burst);
            registry.note_burst();
        }
    }
}
