//! Change of a communicator's strategy while its operations go on: make before break, by epochs.
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
//! A communicator of one host has nobody to agree with: its next collective runs under the new strategy. If GPUs carry collectives out
//! the ranks' page has it ([`mccs_ipc::device_initiated`]): from the first on that no rank has called.
//!
//! Sends and receives belong to no strategy, and are not numbered with collectives: their flows take the ways of the one that was decided last, each when
//! its host hears of it.
//!
//! Deliberately absent: rounds on a shared-memory exchange, which have one way only.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use mccs_config::change::StrategyChange;
use mccs_exchange::protocol::{ChangeBody, CommId, Decision, Refusal, Request, Text, Whose};
use mccs_ipc::device_initiated::Cut;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::Refused;
use mccs_model::link::{LinkKey, LinksId};
use mccs_model::rate_limit::Pace;
use mccs_transport::TransportError;

use crate::proxy::calls::failure::Failure;
use crate::proxy::calls::members::Members;
use crate::proxy::communicator::strategies::{Decided, Next, Proposal};
use crate::proxy::mail::reply_to::{OperatorAnswer, Reconfigured, ReplyTo};
use crate::proxy::state::State;
use crate::transport::links::{NextEpoch, PaceHere};

/// Time that hosts have to prepare for a change. Shorter than the operator waits for an answer.
pub(crate) const PREPARE_TIMEOUT: Duration = Duration::from_secs(5);

/// Terms of a change besides itself.
#[derive(Default)]
pub(crate) struct ChangeTerms {
    /// How many more collectives may start while hosts agree; chosen here if absent.
    pub(crate) window: Option<u32>,
    /// Number of the strategy that it is a change of: a controller's. Without it the choice is an operator's, and pinned.
    pub(crate) expected: Option<u64>,
}

/// The strategy of the communicator with a number is to change: because the controller orders it, or an operator.
pub(crate) fn reconfigure(
    state: &mut State,
    number: u64,
    change: &StrategyChange,
    terms: ChangeTerms,
    reply_to: ReplyTo,
) {
    let ChangeTerms { window, expected } = terms;
    let comm = state.comms.numbered(number);
    let Some(live) = comm.and_then(|comm| state.comms.get_mut(comm)) else {
        return reply_to.answer(Err(Refused::own(format!("there is no communicator {number} here"))));
    };
    let in_force = live.info.epoch.load(Ordering::Relaxed);
    let may_change = match live.failure {
        Some(_) => Err(Refused::own("the communicator has failed")),
        None => live.strategies.may_change(in_force, expected),
    };
    if let Some(gpus) = &live.gpus {
        // A rank that has not called an operation yet runs it under the new strategy, and all ranks agree on which
        // that is.
        let changed = may_change.and_then(|()| gpus.change(change)).map(|Cut { epoch, from }| {
            live.info.epoch.store(epoch, Ordering::Relaxed);
            OperatorAnswer::Reconfigured(Reconfigured { epoch, cut: from.saturating_sub(1) })
        });
        return reply_to.answer(changed);
    }
    let next = may_change.and_then(|()| live.strategies.next(change, in_force + 1, &live.info.hosts));
    let (next, body) = match (next, serde_json::to_vec(change).ok().and_then(|json| ChangeBody::new(&json))) {
        (Ok(next), Some(body)) => (next, body),
        (Err(reason), _) => return reply_to.answer(Err(reason)),
        (_, None) => return reply_to.answer(Err(Refused::own("the change is too long to be told to other hosts"))),
    };
    match &live.span {
        Some(span) => {
            let (comm, window) = (span.comm.clone(), window.unwrap_or_else(|| live.running.window()));
            live.strategies.propose(Proposal { reply_to, is_by_hand: expected.is_none() });
            state.out.exchange.ask(Request::Propose { comm, window, body, timeout: PREPARE_TIMEOUT });
        }
        None => {
            let epoch = live.strategies.put_in_force(next);
            live.begin_epoch(epoch);
            let epoch = epoch.into();
            reply_to.answer(Ok(OperatorAnswer::Reconfigured(Reconfigured { epoch, cut: live.next_number() })));
        }
    }
}

/// The exchange would not propose a change.
pub(crate) fn proposal_refused(state: &mut State, comm: &CommId, reason: &Text) {
    let live = state.comms.called(comm).and_then(|comm| state.comms.get_mut(comm));
    if let Some(proposal) = live.and_then(|live| live.strategies.take_proposal()) {
        // It looks at the communicator alone.
        proposal.reply_to.answer(Err(Refused::own(reason.as_str())));
    }
}

/// A change is proposed: its links are to be made.
pub(crate) fn prepare_change(state: &mut State, id: &CommId, change: u64, window: u32, body: &ChangeBody) {
    if let Err(Refused { whose, reason }) = begin_to_prepare(state, id, change, window, body) {
        let (comm, refusal) = (id.clone(), Refusal { whose, reason: Text::new(reason) });
        state.out.exchange.ask(Request::Refuse { comm, change, refusal });
    }
}

fn begin_to_prepare(
    state: &mut State,
    id: &CommId,
    change: u64,
    window: u32,
    body: &ChangeBody,
) -> Result<(), Refused> {
    let has_ended = || Refused::own("the communicator has ended here");
    let comm = state.comms.called(id).ok_or_else(has_ended)?;
    let live = state.comms.get_mut(comm).ok_or_else(has_ended)?;
    live.strategies.check_room()?;
    let body = serde_json::from_slice(body.bytes()).map_err(|error| format!("it cannot be read: {error}"))?;
    let next = live.strategies.next(&body, change, &live.info.hosts)?;
    let links = next.links().map_err(|error| error.to_string())?;
    let span = live.span.as_ref().ok_or_else(|| Refused::own("the communicator has no other hosts"))?;
    let (engines, placed) = (span.network.engines.len(), span.network.placed);
    state.out.transports.prepare_epoch(&span.network, |place| {
        let own = links.iter().filter(|link| placed.of(**link) == place);
        links_of(&live.members, &next, own)
    });
    live.strategies.prepare(next, window, engines);
    Ok(())
}

/// A transport engine has made the links of a strategy, or cannot.
pub(crate) fn epoch_prepared(state: &mut State, links: LinksId, epoch: u32, made: Result<(), TransportError>) {
    let comm = state.comms.with_links(links);
    let Some(live) = comm.and_then(|comm| state.comms.get_mut(comm)) else { return };
    let (Some(span), launched) = (&live.span, live.next_number()) else { return };
    let (id, change) = (span.comm.clone(), u64::from(epoch));
    if !live.strategies.prepares(epoch) {
        return;
    }
    let request = match made {
        Ok(()) if live.strategies.engine_prepared(launched) => Request::Prepared { comm: id, change, launched },
        Ok(()) => return,
        Err(error) => {
            // Links that were made stay until all know why they are not to be: a host that found them closed would say so, and be
            // heard first.
            let whose = if error.is_of_way() { Whose::Change } else { Whose::Communicator };
            let refusal = Refusal { whose, reason: Text::new(error.to_string()) };
            Request::Refuse { comm: id, change, refusal }
        }
    };
    state.out.exchange.ask(request);
}

/// A change is decided on all hosts.
pub(crate) fn change_decided(state: &mut State, id: &CommId, change: u64, decision: Decision) {
    let Some(comm) = state.comms.called(id) else { return };
    let Some(live) = state.comms.sound_mut(comm) else { return };
    let Some(network) = live.span.as_ref().map(|span| span.network.clone()) else { return };
    let started = live.next_number();
    let Decided { chosen, over, proposal } = match live.strategies.decide(change, &decision, started) {
        Ok(decided) => decided,
        Err(message) => return state.abort(comm, Failure::new(ErrorClass::Internal, message)),
    };
    if let Some(assignment) = &chosen {
        state.out.transports.set_pair_paths(&network, assignment);
        if let (Some(placed), Some(proposal)) = (&live.info.placed, &proposal) {
            placed.pin(proposal.is_by_hand);
        }
        live.tell_chosen();
        state.out.registry.note_comms();
    }
    if let Some(proposal) = proposal {
        proposal.reply_to.answer(match decision {
            Decision::Commit { cut } => Ok(OperatorAnswer::Reconfigured(Reconfigured { epoch: change, cut })),
            Decision::Abort { refusal } => Err(Refused::from(&refusal)),
        });
    }
    state.out.transports.end_epochs(&network, &over);
    state.may_start(comm);
}

/// The next collective is about to start: under which strategy.
pub(crate) fn choose_strategy(state: &mut State, comm: Handle) {
    let Some(live) = state.comms.get_mut(comm) else { return };
    let over = live.take_next();
    if let Some(network) = live.span.as_ref().filter(|_| !over.is_empty()).map(|span| span.network.clone()) {
        state.out.transports.end_epochs(&network, &over);
    }
}

/// From now on a communicator's flows leave this host so. Nothing is agreed on: results are the same whatever it is.
pub(crate) fn set_pace(state: &mut State, id: &CommId, pace: &Arc<Pace>) {
    let Some(live) = state.comms.called(id).and_then(|comm| state.comms.get_mut(comm)) else { return };
    live.meter.set_window(pace.window.as_ref().map(|window| window.period));
    let (Some(span), Some(placed)) = (&live.span, &live.info.placed) else { return };
    let owner = live.members.first().map(|member| &member.session.tenant);
    let tenant = owner.zip(pace.host_cap_bps).map(|(tenant, cap_bps)| tenant.capped(cap_bps));
    let here = PaceHere { pace: Arc::clone(pace), pace_use: Arc::clone(&placed.pace_use), tenant };
    state.out.transports.set_pace(&span.network, &here);
}

/// Links of a strategy between this host and others, of those that one of the network's engines has.
fn links_of<'a>(members: &Members, next: &Next, own: impl Iterator<Item = &'a LinkKey> + Clone) -> NextEpoch {
    let is_here = |rank: u32| members.index_of(rank).is_some();
    let wanted = |sends: bool| {
        let is_wanted = |key: &&LinkKey| is_here(key.src) == sends && is_here(key.dst) != sends;
        own.clone().filter(is_wanted).copied().collect()
    };
    NextEpoch {
        epoch: next.epoch(),
        assignment: Arc::clone(next.assignment()),
        sends: wanted(true),
        recvs: wanted(false),
    }
}
