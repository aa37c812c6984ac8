//! Hand-over of communicators to the service's next program: those of this host alone, in its memory.
//!
//! Nothing runs when they are handed in. Operations that ranks have called and that wait for others are called
//! again by their sessions.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mccs_handover::{CommCounters, CommState, FailureState, Handover, MemberState, Moment, Phase, ShmExchangeState};
use mccs_ipc::types::WorkDone;
use mccs_registry::RankInfo;
use mccs_runtime::Share;

use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::members::Member;
use crate::proxy::calls::resumed::counters;
use crate::proxy::communicator::comm::Comm;
use crate::proxy::mail::turns::{Event, Item};
use crate::proxy::state::State;

impl State {
    /// Whether nothing runs or is on its way.
    pub(super) fn is_at_rest(&self) -> bool {
        let stays_behind = |comm| self.comms.get(comm).is_some_and(Comm::stays_behind);
        self.work.is_empty() && self.work.has_no_mail() && self.inflight.have_ended_but_for(stays_behind)
    }

    /// The service has stood still for so long: no operation is late by that.
    pub(super) fn put_off(&mut self, by: Duration) {
        self.comms.put_off(by);
    }

    /// All communicators, as the next program goes on with them. Those of sessions that do not go on fail there.
    ///
    /// # Errors
    /// The part that cannot be handed over.
    pub(super) fn hand_over(&self) -> Result<Vec<(CommState, Option<OwnedFd>)>, String> {
        let comms = self.comms.iter().filter(|(_, live)| !live.stays_behind()).map(|(_, live)| {
            let number = live.info.number;
            live.hand_over().map_err(|why| format!("communicator {number} of tenant {}: {why}", live.info.tenant))
        });
        comms.collect()
    }
}

impl Comm {
    /// Whether no other program can go on with it: its ranks are on other hosts, too, or on GPUs. Nor does it with their sessions.
    fn stays_behind(&self) -> bool {
        let info = &self.info;
        let is_on_gpus = self.gpus.is_some() || info.part.is_some() || info.family.has_parts() || info.is_staged();
        self.span.is_some() || is_on_gpus
    }

    /// How its rounds have gone is counted here for the last time.
    fn hand_over(&self) -> Result<(CommState, Option<OwnedFd>), String> {
        let info = &self.info;
        let strategy = self.strategies.at_rest().ok_or("its strategy is being changed")?;
        let exchange = info.shm_exchange.as_ref();
        let descriptor = exchange.map(|exchange| exchange.descriptor().and_then(|fd| fd.try_clone().ok()));
        let descriptor = match descriptor {
            Some(None) => return Err("the service has no descriptors left".into()),
            descriptor => descriptor.flatten(),
        };
        info.ask();
        let WorkDone { operations: rounds, bytes: round_bytes } = info.told_rounds();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let member = |(member, rank): (&Member, &RankInfo)| MemberState {
            session: (!member.has_left()).then_some(member.session.id),
            comm: member.tenant_comm,
            completed: load(&rank.completed),
            user_tag: load(&rank.user_tag),
            late_ns: load(&rank.late_ns),
        };
        let [operations, bytes, bus_bytes, busy_ns, pairs, failed] = counters(info).map(load);
        let failure = |failure: &Failure| FailureState {
            class: failure.class.to_wire(),
            message: failure.message.to_string(),
            is_told: true,
        };
        let state = CommState {
            number: info.number,
            id: info.id,
            name: info.name.clone(),
            job: info.job.clone(),
            members: self.members.iter().zip(&info.ranks).map(member).collect(),
            started: self.next_number(),
            epoch: u32::try_from(load(&info.epoch)).unwrap_or(u32::MAX),
            algorithm: strategy.choice,
            rings: strategy.ring_orders.clone(),
            shm_exchange: exchange.map(|exchange| ShmExchangeState { layout: exchange.layout() }),
            failure: self.failure.as_ref().map(failure),
            counters: CommCounters { operations, bytes, bus_bytes, busy_ns, pairs, failed, rounds, round_bytes },
        };
        Ok((state, descriptor))
    }
}

/// A proxy engine's part in a hand-over.
#[derive(Default)]
pub(super) struct StandsStill {
    handover: Option<Arc<Handover>>,
    /// The last attempt in which it has handed in.
    handed_in: u64,
    /// Events that would have started operations meanwhile.
    held: Vec<(Share, Event)>,
    /// Since when sessions send nothing.
    since: Option<Instant>,
}

impl StandsStill {
    /// In the hand-overs of a service.
    pub(super) fn with(handover: Arc<Handover>) -> Self {
        StandsStill { handover: Some(handover), ..StandsStill::default() }
    }

    /// Communicators of the program before are there.
    pub(super) fn note_resumed(&self) {
        self.handover.iter().for_each(|handover| handover.note_resumed());
    }

    /// For how long the service has stood still, where it goes on now.
    pub(super) fn stood_still(&mut self, now: Instant) -> Option<Duration> {
        if !self.moment().is_running() {
            self.since.get_or_insert(now);
            return None;
        }
        self.since.take().map(|since| now.saturating_duration_since(since))
    }

    fn moment(&self) -> Moment {
        self.handover.as_ref().map_or(Moment { phase: Phase::Running, attempt: 0 }, |handover| handover.moment())
    }

    /// Whether no operation may start now.
    pub(super) fn is_still(&self) -> bool {
        self.moment().is_still()
    }

    /// Keeps what would start an operation, which none may now.
    pub(super) fn hold(&mut self, state: &State, item: Item) -> Option<Item> {
        let starts = match &item {
            Item::Event(Event::Advance { session, .. }) => state.session(*session).map(|of| of.tenant.share),
            Item::Event(Event::Ready { comm }) => state.comms.get(*comm).map(Comm::share),
            _ => None,
        };
        match (starts, item) {
            (Some(share), Item::Event(event)) => {
                self.held.push((share, event));
                None
            }
            (_, item) => Some(item),
        }
    }

    /// Whether the engine is to do nothing at all now. It has handed in what it has, once nothing ran any more.
    pub(super) fn is_due(&mut self, state: &mut State, has_mail: bool) -> bool {
        let moment @ Moment { attempt, .. } = self.moment();
        if !moment.is_still() {
            self.held.drain(..).for_each(|(share, event)| state.work.push(share, event));
            return false;
        }
        if self.handed_in == attempt {
            return true;
        }
        let Some(handover) = self.handover.as_ref().filter(|_| state.is_at_rest() && !has_mail) else { return false };
        self.handed_in = attempt;
        match state.hand_over() {
            Ok(comms) => handover.hand_in_comms(attempt, comms, state.streams.untold()),
            Err(what) => handover.object(attempt, what),
        }
        true
    }
}
