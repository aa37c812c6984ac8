//! Ranks of a communicator on this host, and the collectives that each has called and that have not
//! started.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use mccs_model::SessionId;
use mccs_registry::CommInfo;
use mccs_runtime::Sender;
use mccs_tenants::Charge;
use mccs_tenants::session::Session;

use crate::proxy::calls::operation::{Operation, ProxyReply, RoundState};

/// A collective of one rank that waits for the others.
pub(crate) struct Waiting {
    pub(crate) operation: Operation,
    /// Its place among its rank's calls, as recorders know it: the same on all ranks.
    pub(crate) place: u64,
    /// Since when it has been the head of its stream, or would have been if its turn had come at once.
    arrived: Option<Instant>,
}

/// How a rank leaves.
pub(crate) enum Leaving {
    /// Its program asked for it.
    Asked {
        /// That of its session, unless its whole is left.
        request: Option<u64>,
        reply: Sender<ProxyReply>,
    },
    /// Its process has ended with no call under way.
    Ended,
}

/// Whether a rank is there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Presence {
    Here,
    Left,
    /// Its process has ended, and it had not left.
    Ended,
}

/// One rank of this host.
pub(crate) struct Member {
    pub(crate) rank: u32,
    pub(crate) session: Arc<Session>,
    pub(crate) tenant_comm: Handle,
    /// Its GPU, as the device counts its GPUs.
    pub(crate) gpu: Option<usize>,
    pub(crate) leaving: Option<Leaving>,
    presence: Presence,
    /// Collectives enqueued and not started, in order.
    waiting: VecDeque<Waiting>,
    /// Number of the first of `waiting`.
    first_seq: u64,
    /// Collectives enqueued that were no rounds.
    whole_enqueued: u64,
    /// Those among them that have started.
    whole_started: u64,
    /// None where it has left in another program.
    _charge: Option<Arc<Charge>>,
}

/// Numbers of a rank's new collective.
pub(crate) struct Enqueued {
    /// Its number among the rank's collectives here.
    pub(crate) seq: u64,
    /// Its place among the rank's calls, as recorders know it.
    pub(crate) place: u64,
    /// Collectives that the rank has enqueued and that were no rounds.
    pub(crate) whole: u64,
}

impl Member {
    pub(crate) fn new(
        rank: u32,
        gpu: Option<usize>,
        session: Arc<Session>,
        tenant_comm: Handle,
        charge: Arc<Charge>,
    ) -> Self {
        Member {
            rank,
            session,
            tenant_comm,
            gpu,
            leaving: None,
            presence: Presence::Here,
            waiting: VecDeque::new(),
            first_seq: 0,
            whole_enqueued: 0,
            whole_started: 0,
            _charge: Some(charge),
        }
    }

    /// One that has left for good in another program. In its place stands any session.
    pub(crate) fn departed(rank: u32, session: Arc<Session>) -> Self {
        Member {
            rank,
            session,
            tenant_comm: Handle::NONE,
            gpu: None,
            leaving: None,
            presence: Presence::Left,
            waiting: VecDeque::new(),
            first_seq: 0,
            whole_enqueued: 0,
            whole_started: 0,
            _charge: None,
        }
    }

    /// So many collectives have started in another program.
    pub(crate) fn resume(&mut self, started: u64) {
        (self.whole_enqueued, self.whole_started) = (started, started);
    }

    /// Whether it has left for good, or its process has ended.
    pub(crate) fn has_left(&self) -> bool {
        self.presence != Presence::Here
    }

    /// How it leaves or has left, in words.
    pub(crate) fn describe_departure(&self) -> String {
        if self.presence == Presence::Ended || matches!(self.leaving, Some(Leaving::Ended)) {
            format!("rank {} (process {}) has gone", self.rank, self.session.peer.pid)
        } else {
            format!("rank {} has left the communicator", self.rank)
        }
    }

    /// Collectives that have started and were no rounds.
    pub(crate) fn whole_started(&self) -> u64 {
        self.whole_started
    }

    /// Number of the next collective among all of this rank, from 0.
    pub(crate) fn place(&self, operation: &Operation) -> u64 {
        let rounds_before = operation.rounds - u64::from(operation.round != RoundState::None);
        // As many as a hostile rank says.
        self.whole_started.saturating_add(rounds_before)
    }

    /// The next collective, whether its stream has come to it or not.
    pub(crate) fn next(&self) -> Option<&Operation> {
        self.waiting.front().map(|waiting| &waiting.operation)
    }

    /// The next collective, if it is the head of its stream.
    pub(crate) fn arrived(&self) -> Option<&Operation> {
        self.waiting.front().filter(|waiting| waiting.arrived.is_some()).map(|waiting| &waiting.operation)
    }

    pub(crate) fn arrived_mut(&mut self) -> Option<&mut Operation> {
        self.waiting.front_mut().filter(|waiting| waiting.arrived.is_some()).map(|waiting| &mut waiting.operation)
    }

    /// Whether the next collective is the head of its stream, and no round.
    fn is_ready(&self) -> bool {
        self.arrived().is_some_and(|operation| operation.round == RoundState::None)
    }

    fn enqueue(&mut self, operation: Operation) -> Enqueued {
        let place = self.whole_enqueued.saturating_add(operation.rounds);
        self.whole_enqueued += u64::from(operation.round == RoundState::None);
        self.waiting.push_back(Waiting { operation, place, arrived: None });
        Enqueued { seq: self.first_seq + self.waiting.len() as u64 - 1, place, whole: self.whole_enqueued }
    }
}

/// All of them, ascending.
pub(crate) struct Members {
    ranks: Vec<Member>,
    /// Those whose next collective is the head of its stream, and is no round.
    ready: u32,
    any_left: bool,
}

impl Members {
    pub(crate) fn new(ranks: Vec<Member>) -> Self {
        let any_left = ranks.iter().any(Member::has_left);
        Members { ranks, ready: 0, any_left }
    }

    pub(crate) fn len(&self) -> usize {
        self.ranks.len()
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, Member> {
        self.ranks.iter()
    }

    pub(crate) fn first(&self) -> Option<&Member> {
        self.ranks.first()
    }

    /// Place of a rank among those of this host.
    pub(crate) fn index_of(&self, rank: u32) -> Option<usize> {
        match self.ranks.get(rank as usize) {
            Some(member) if member.rank == rank => Some(rank as usize),
            _ => self.ranks.binary_search_by_key(&rank, |member| member.rank).ok(),
        }
    }

    pub(crate) fn get(&self, rank: u32) -> Option<&Member> {
        self.ranks.get(self.index_of(rank)?)
    }

    pub(crate) fn get_mut(&mut self, rank: u32) -> Option<&mut Member> {
        let at = self.index_of(rank)?;
        self.ranks.get_mut(at)
    }

    /// Takes a collective of the rank at a place.
    pub(crate) fn enqueue(&mut self, at: usize, operation: Operation) -> Enqueued {
        self.ranks[at].enqueue(operation)
    }

    /// A collective has become the head of its stream, and was due then. Returns it; nothing if it no longer waits.
    pub(crate) fn arrive(&mut self, rank: u32, seq: u64, due: Instant) -> Option<&Waiting> {
        let at = self.index_of(rank)?;
        let member = &mut self.ranks[at];
        let place = seq.checked_sub(member.first_seq)?;
        let waiting = member.waiting.get_mut(place as usize)?;
        waiting.arrived = Some(due);
        if place == 0 && waiting.operation.round == RoundState::None {
            self.ready += 1;
        }
        Some(waiting)
    }

    /// Whether all have a collective that can start.
    pub(crate) fn are_ready(&self) -> bool {
        self.ready as usize == self.ranks.len()
    }

    /// Whether the next collective of one is the head of its stream, and a round.
    pub(crate) fn have_rounds(&self) -> bool {
        let is_round = |operation: &Operation| operation.round != RoundState::None;
        self.ranks.iter().any(|member| member.arrived().is_some_and(is_round))
    }

    /// Whether the next collectives of all may run beside others.
    pub(crate) fn overlap(&self) -> bool {
        self.ranks.iter().all(|member| member.next().is_some_and(|operation| operation.overlaps))
    }

    /// Takes the next collective of all, which starts, into `running`.
    pub(crate) fn start(&mut self, info: &CommInfo, running: &mut Vec<Operation>) {
        self.ready = 0;
        for (member, counters) in self.ranks.iter_mut().zip(&info.ranks) {
            running.extend(member.waiting.pop_front().map(|waiting| waiting.operation));
            member.first_seq += 1;
            member.whole_started += 1;
            counters.started.store(member.whole_started, Ordering::Relaxed);
            self.ready += u32::from(member.is_ready());
        }
    }

    /// Takes the next collective of a rank, a round that has ended.
    pub(crate) fn end_round(&mut self, rank: u32) -> Option<Operation> {
        let member = self.get_mut(rank)?;
        let ended = member.waiting.pop_front().map(|waiting| waiting.operation);
        member.first_seq += 1;
        let is_ready = member.is_ready();
        self.ready += u32::from(is_ready);
        ended
    }

    /// Counts by how much ranks have come later to the next collective than the first of them.
    pub(crate) fn note_late(&self, info: &CommInfo) {
        let arrival = |member: &Member| member.waiting.front().and_then(|waiting| waiting.arrived);
        let Some(first) = self.ranks.iter().filter_map(arrival).min() else { return };
        for (member, counters) in self.ranks.iter().zip(&info.ranks) {
            let late = arrival(member).map_or(Duration::ZERO, |at| at.saturating_duration_since(first));
            counters.late_ns.fetch_add(late.as_nanos() as u64, Ordering::Relaxed);
        }
    }

    /// Takes all that waits. Returns what had arrived; what had not fails when it becomes the head of its stream.
    pub(crate) fn drain(&mut self) -> Vec<Operation> {
        self.ready = 0;
        let mut arrived = Vec::new();
        for member in &mut self.ranks {
            member.first_seq += member.waiting.len() as u64;
            let waiting = member.waiting.drain(..).filter(|waiting| waiting.arrived.is_some());
            arrived.extend(waiting.map(|waiting| waiting.operation));
        }
        arrived
    }

    /// A rank that wanted to leave has left for good. Returns how.
    pub(crate) fn depart(&mut self, rank: u32) -> Option<Leaving> {
        let member = self.get_mut(rank)?;
        let leaving = member.leaving.take()?;
        member.presence = match leaving {
            Leaving::Asked { .. } => Presence::Left,
            Leaving::Ended => Presence::Ended,
        };
        self.any_left = true;
        Some(leaving)
    }

    /// The process of all ranks of a session has ended: they are gone for good, and none waits to leave.
    pub(crate) fn end_all(&mut self, session: SessionId) {
        for member in self.ranks.iter_mut().filter(|member| member.session.id == session) {
            (member.presence, member.leaving) = (Presence::Ended, None);
            self.any_left = true;
        }
    }

    pub(crate) fn any_left(&self) -> bool {
        self.any_left
    }

    pub(crate) fn has_left(&self, rank: u32) -> bool {
        self.get(rank).is_some_and(Member::has_left)
    }

    /// Whether nobody is left.
    pub(crate) fn are_gone(&self) -> bool {
        self.ranks.iter().all(Member::has_left)
    }
}
