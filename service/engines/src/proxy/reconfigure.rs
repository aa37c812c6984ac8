//! A communicator's strategy changes while its operations go on: make before break.
//!
//! ```text
//! operator:  Reconfigure --> Propose, where the root is --> exchange
//! exchange:  Prepare     --> transport engines make the links of the next strategy; operations go on under the old one
//!            all there   --> Prepared(launched): from launched + window on nothing starts
//!            Decided     --> Commit(cut): operations from number `cut` on run under it; the old one's links go with the first
//!                            Abort: its links go, and all is as it was
//! ```
//!
//! Several changes may be decided before the first of their operations comes. One whose cut is not below that of a later change
//! is never in force: on all hosts alike, since all hear the same decisions in the same order.
//!
//! A communicator of one host has nobody to agree with: its next collective runs under the new strategy. Where GPUs carry collectives out
//! the ranks' page has it ([`mccs_ipc::device_initiated`]): from the first on that no rank has called.
//!
//! Sends and receives belong to no strategy, and are not numbered with collectives: their flows take the ways of the one that was decided last, each when
//! its host hears of it.
//!
//! Deliberately absent: rounds on a shared-memory exchange, which have one way only.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_config::change::StrategyChange;
use mccs_device::DirectGroup;
use mccs_exchange::protocol::{ChangeBody, CommId, Decision, Refusal, Request, Text, Whose};
use mccs_ipc::device_initiated::Cut;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::Refused;
use mccs_model::link::{LinkKey, LinksId};
use mccs_model::rate_limit::Pace;
use mccs_registry::Registry;
use mccs_telemetry::profile::Noted;
use mccs_transport::TransportError;

use super::ProxyEngine;
use super::comm::{Comm, Failure};
use super::reply_to::{OperatorAnswer, Reconfigured, ReplyTo};
use super::strategies::{Decided, Next, Proposal};
use crate::transport::links::{NextEpoch, PaceHere};

/// Time that hosts have to prepare for a change. Shorter than the operator waits for an answer.
pub(super) const PREPARE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that hosts may need to agree, once they are prepared: as many operations as fit may start meanwhile.
const AGREEMENT_TIME: Duration = Duration::from_millis(20);
/// Smallest window that is chosen: also of a communicator that has not run anything, whose operations may be long.
const WINDOW_MIN: u32 = 2;
/// Largest window that is chosen.
const WINDOW_MAX: u32 = 4096;

impl Comm {
    /// Whether its strategy may change now, from one that whoever wants it may expect.
    fn may_change(&self, expected: Option<u64>) -> Result<(), Refused> {
        if self.failure.is_some() {
            return Err(Refused::own("the communicator has failed"));
        }
        self.strategies.may_change(self.info.epoch.load(Ordering::Relaxed), expected)
    }

    /// Changes what ranks on GPUs run their collectives by: who has not called an operation yet runs it under the new strategy, and all
    /// ranks agree on what that is.
    fn change_direct(&self, direct: &DirectGroup, change: &StrategyChange) -> Result<Reconfigured, Refused> {
        let Cut { epoch, from } = direct.strategies().change(change).map_err(|refused| refused.to_string())?;
        self.info.epoch.store(epoch, Ordering::Relaxed);
        Ok(Reconfigured { epoch, cut: from.saturating_sub(1) })
    }

    /// Tells who watches what was decided last.
    pub(super) fn tell_chosen(&self) {
        if let Some(placed) = &self.info.placed {
            let in_force = self.info.epoch.load(Ordering::Relaxed);
            placed.set_chosen(Some(self.strategies.chosen(in_force, &self.info.hosts)));
        }
    }

    /// Links of a strategy between this host and others, as one of the network's engines has them.
    fn links_of(&self, next: &Next, engine: usize, engines: usize, links: &[LinkKey]) -> NextEpoch {
        let is_here = |rank: u32| self.index_of(rank).is_some();
        let own = |key: &&LinkKey| key.engine(engines) == engine;
        let of = |sends: bool| {
            let wanted = |key: &&LinkKey| is_here(key.src) == sends && is_here(key.dst) != sends;
            links.iter().filter(own).filter(wanted).copied().collect()
        };
        NextEpoch { epoch: next.epoch(), assignment: Arc::clone(next.assignment()), sends: of(true), recvs: of(false) }
    }

    /// Takes the strategy of the next collective. Returns the numbers of those that are over.
    fn take_next(&mut self) -> Vec<u32> {
        let (number, mut over) = (self.next_number(), Vec::new());
        while let Some(epoch) = self.strategies.take_next(number) {
            over.extend(self.begin_epoch(epoch));
        }
        over
    }

    /// The strategy with this number is in force. Returns that of the one before, whose links go.
    fn begin_epoch(&mut self, epoch: u32) -> Option<u32> {
        self.info.epoch.store(epoch.into(), Ordering::Relaxed);
        self.span.as_mut().map(|span| std::mem::replace(&mut span.network.epoch, epoch))
    }

    /// As many operations as may start while hosts agree.
    fn window(&self) -> u32 {
        let fits = AGREEMENT_TIME.as_nanos().checked_div(self.average_took.as_nanos());
        fits.map_or(WINDOW_MIN, |fits| u32::try_from(fits).unwrap_or(WINDOW_MAX).clamp(WINDOW_MIN, WINDOW_MAX))
    }
}

impl ProxyEngine {
    /// The strategy of the communicator with a number is to change, with the terms of [`ControllerOrder::Reconfigure`](super::ControllerOrder::Reconfigure): because the
    /// controller orders it, which expects a certain strategy, or an operator, whose choice is pinned.
    pub(super) fn reconfigure(
        &mut self,
        number: u64,
        change: &StrategyChange,
        (window, expected): (Option<u32>, Option<u64>),
        reply_to: ReplyTo,
    ) {
        let comm = self.comms.numbered(number);
        let Some(live) = comm.and_then(|comm| self.comms.get_mut(comm)) else {
            return reply_to.answer(Err(Refused::own(format!("there is no communicator {number} here"))));
        };
        let may_change = live.may_change(expected);
        if let Some(direct) = &live.info.direct {
            let changed = may_change.and_then(|()| live.change_direct(direct, change));
            return reply_to.answer(changed.map(OperatorAnswer::Reconfigured));
        }
        let epoch = live.info.epoch.load(Ordering::Relaxed) + 1;
        let next = may_change.and_then(|()| live.strategies.next(change, epoch, &live.info.hosts));
        let (next, body) = match (next, serde_json::to_vec(change).ok().and_then(|json| ChangeBody::new(&json))) {
            (Ok(next), Some(body)) => (next, body),
            (Err(reason), _) => return reply_to.answer(Err(reason)),
            (_, None) => return reply_to.answer(Err(Refused::own("the change is too long to be told to other hosts"))),
        };
        match (&live.span, &mut self.setups) {
            (Some(span), Some(setups)) => {
                let (comm, window) = (span.comm.clone(), window.unwrap_or_else(|| live.window()));
                live.strategies.propose(Proposal { reply_to, is_by_hand: expected.is_none() });
                setups.ask(Request::Propose { comm, window, body, timeout: PREPARE_TIMEOUT });
            }
            _ => {
                let epoch = live.strategies.put_in_force(next);
                live.begin_epoch(epoch);
                let epoch = epoch.into();
                reply_to.answer(Ok(OperatorAnswer::Reconfigured(Reconfigured { epoch, cut: live.next_number() })));
            }
        }
    }

    /// The exchange would not propose a change.
    pub(super) fn proposal_refused(&mut self, comm: &CommId, reason: &Text) {
        let live = self.comms.called(comm).and_then(|comm| self.comms.get_mut(comm));
        if let Some(proposal) = live.and_then(|live| live.strategies.take_proposal()) {
            // It looks at the communicator alone.
            proposal.reply_to.answer(Err(Refused::own(reason.as_str())));
        }
    }

    /// A change is proposed: its links are to be made.
    pub(super) fn prepare_change(&mut self, id: &CommId, change: u64, window: u32, body: &ChangeBody) {
        if let Err(Refused { whose, reason }) = self.begin_to_prepare(id, change, window, body) {
            let (comm, refusal) = (id.clone(), Refusal { whose, reason: Text::new(reason) });
            self.ask_exchange(Request::Refuse { comm, change, refusal });
        }
    }

    fn begin_to_prepare(&mut self, id: &CommId, change: u64, window: u32, body: &ChangeBody) -> Result<(), Refused> {
        let has_ended = || Refused::own("the communicator has ended here");
        let comm = self.comms.called(id).ok_or_else(has_ended)?;
        let live = self.comms.get_mut(comm).ok_or_else(has_ended)?;
        live.strategies.check_room()?;
        let body = serde_json::from_slice(body.bytes()).map_err(|error| format!("it cannot be read: {error}"))?;
        let next = live.strategies.next(&body, change, &live.info.hosts)?;
        let links = next.links().map_err(|error| error.to_string())?;
        let span = live.span.as_ref().ok_or_else(|| Refused::own("the communicator has no other hosts"))?;
        let engines = span.network.engines.len();
        self.transports.prepare_epoch(&span.network, |engine| live.links_of(&next, engine, engines, &links));
        live.strategies.prepare(next, window, engines);
        Ok(())
    }

    /// A transport engine has made the links of a strategy, or cannot.
    pub(super) fn epoch_prepared(&mut self, links: LinksId, epoch: u32, made: Result<(), TransportError>) {
        let comm = self.comms.with_links(links);
        let Some(live) = comm.and_then(|comm| self.comms.get_mut(comm)) else { return };
        let (Some(span), launched) = (&live.span, live.next_number()) else { return };
        let (id, change) = (span.comm.clone(), u64::from(epoch));
        if !live.strategies.prepares(epoch) {
            return;
        }
        let request = match made {
            Ok(()) if live.strategies.engine_prepared(launched) => Request::Prepared { comm: id, change, launched },
            Ok(()) => return,
            Err(error) => {
                // What was made stays until all know why it is not to be: a host that found it closed would say so, and be heard first.
                let whose = if error.is_of_way() { Whose::Change } else { Whose::Communicator };
                let refusal = Refusal { whose, reason: Text::new(error.to_string()) };
                Request::Refuse { comm: id, change, refusal }
            }
        };
        self.ask_exchange(request);
    }

    /// A change is decided on all hosts.
    pub(super) fn change_decided(&mut self, id: &CommId, change: u64, decision: Decision) {
        let Some(comm) = self.comms.called(id) else { return };
        let Some(live) = self.comms.sound_mut(comm) else { return };
        let Some(network) = live.span.as_ref().map(|span| span.network.clone()) else { return };
        let started = live.next_number();
        let Decided { chosen, over, proposal } = match live.strategies.decide(change, &decision, started) {
            Ok(decided) => decided,
            Err(message) => return self.abort(comm, Failure::new(ErrorClass::Internal, message)),
        };
        if let Some(assignment) = &chosen {
            self.transports.set_pair_paths(&network, assignment);
            if let (Some(placed), Some(proposal)) = (&live.info.placed, &proposal) {
                placed.pin(proposal.is_by_hand);
            }
            live.tell_chosen();
            self.registry.note_comms();
        }
        if let Some(proposal) = proposal {
            proposal.reply_to.answer(match decision {
                Decision::Commit { cut } => Ok(OperatorAnswer::Reconfigured(Reconfigured { epoch: change, cut })),
                Decision::Abort { refusal } => Err(Refused::from(&refusal)),
            });
        }
        self.transports.end_epochs(&network, &over);
        self.may_start(comm);
    }

    /// The next collective is about to start: under which strategy.
    pub(super) fn choose_strategy(&mut self, comm: Handle) {
        let Some(live) = self.comms.get_mut(comm) else { return };
        let over = live.take_next();
        if let Some(network) = live.span.as_ref().filter(|_| !over.is_empty()).map(|span| span.network.clone()) {
            self.transports.end_epochs(&network, &over);
        }
    }

    /// From now on a communicator's flows leave this host so. Nothing is agreed on: results are the same whatever it is.
    pub(super) fn set_pace(&mut self, id: &CommId, pace: &Arc<Pace>) {
        let Some(live) = self.comms.called(id).and_then(|comm| self.comms.get_mut(comm)) else { return };
        live.meter.set_window(pace.window.as_ref().map(|window| window.period));
        let (Some(span), Some(placed)) = (&live.span, &live.info.placed) else { return };
        let owner = live.members.first().map(|member| &member.session.tenant);
        let tenant = owner.zip(pace.host_cap_bps).map(|(tenant, cap_bps)| tenant.capped(cap_bps));
        let here = PaceHere { pace: Arc::clone(pace), pace_use: Arc::clone(&placed.pace_use), tenant };
        self.transports.set_pace(&span.network, &here);
    }
}

impl Comm {
    /// A collective has ended: what that makes known of when it sends is told.
    pub(super) fn note_burst(&mut self, began: Instant, ended: Instant, registry: &Registry) {
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
