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

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_config::change::{FlowChoice, StrategyChange};
use mccs_device::DirectGroup;
use mccs_exchange::protocol::{ChangeBody, CommId, Decision, Refusal, Request, Text, Whose};
use mccs_ipc::device_initiated::Cut;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::Refused;
use mccs_model::link::{EPOCH_MAX, LinkKey, LinksId};
use mccs_model::rate_limit::Pace;
use mccs_registry::Registry;
use mccs_telemetry::placed::Chosen;
use mccs_telemetry::profile::Noted;
use mccs_transport::{FlowPath, TransportError};

use super::ProxyEngine;
use super::comm::{Comm, Failure};
use super::reply_to::{OperatorAnswer, Reconfigured, ReplyTo};
use super::schedule_cache::ScheduleCache;
use crate::transport::links::{NextEpoch, PaceHere, PathAssignment};

/// Time that hosts have to prepare for a change. Shorter than the operator waits for an answer.
pub(super) const PREPARE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that hosts may need to agree, once they are prepared: as many operations as fit may start meanwhile.
const AGREEMENT_TIME: Duration = Duration::from_millis(20);
/// Smallest window that is chosen: also of a communicator that has not run anything, whose operations may be long.
const WINDOW_MIN: u32 = 2;
/// Largest window that is chosen.
const WINDOW_MAX: u32 = 4096;
/// Changes that are decided and not in force. Each holds links.
const DECIDED_MAX: usize = 8;

/// A strategy that is not in force yet.
struct Next {
    epoch: u32,
    schedules: ScheduleCache,
    assignment: Arc<PathAssignment>,
}

struct Preparing {
    next: Next,
    window: u32,
    /// Transport engines that have not made its links.
    engines_left: usize,
}

/// Strategies of a communicator besides the one in force.
pub(super) struct Changes {
    /// Of the strategy in force.
    assignment: Arc<PathAssignment>,
    /// With the first operation of each; ascending, also by number.
    decided: VecDeque<(u64, Next)>,
    preparing: Option<Preparing>,
    /// No collective from this number on may start before the change is decided.
    limit: Option<u64>,
    reply_to: Option<ReplyTo>,
    /// An operator has asked for it, not the controller.
    is_by_hand: bool,
}

impl Changes {
    /// None, after a first strategy with these paths.
    pub(super) fn new(assignment: Arc<PathAssignment>) -> Self {
        Changes {
            assignment,
            decided: VecDeque::new(),
            preparing: None,
            limit: None,
            reply_to: None,
            is_by_hand: false,
        }
    }

    /// Whether collective number `number` may start.
    pub(super) fn allow(&self, number: u64) -> bool {
        self.limit.is_none_or(|limit| number < limit)
    }

    /// The communicator has failed: whoever waits is told.
    pub(super) fn end(&mut self) {
        self.reply_to = None;
    }
}

impl Comm {
    /// What the last change that is decided, or else the strategy in force, with `change` comes to.
    fn next(&self, change: &StrategyChange, epoch: u64) -> Result<Next, Refused> {
        if change.is_of_gpus() {
            return Err("large_from, ll128 and max_ctas are for communicators whose collectives GPUs carry out".into());
        }
        let (_, schedules, assignment) = self.last_decided();
        let number = u32::try_from(epoch).ok().filter(|epoch| *epoch <= EPOCH_MAX);
        let number = number.ok_or_else(|| Refused::own(format!("a communicator has at most {EPOCH_MAX} changes")))?;
        let schedules = schedules.changed(change, epoch).map_err(|error| error.to_string())?;
        let channels = schedules.strategy().ring_orders.len();
        let assignment = Arc::new(changed_assignment(assignment, change, channels, &self.info.hosts)?);
        Ok(Next { epoch: number, schedules, assignment })
    }

    /// Whether its strategy may change now, from one that whoever wants it may expect.
    fn may_change(&self, expected: Option<u64>) -> Result<(), Refused> {
        if self.failure.is_some() {
            return Err(Refused::own("the communicator has failed"));
        }
        if self.changes.reply_to.is_some() {
            return Err(Refused::own("another change is being decided"));
        }
        match self.last_decided().0 {
            last if expected.is_some_and(|expected| expected != last) => {
                Err(Refused::own(format!("its strategy is number {last} meanwhile")))
            }
            _ => Ok(()),
        }
    }

    /// Changes what ranks on GPUs run their collectives by: who has not called an operation yet runs it under the new strategy, and all
    /// ranks agree on what that is.
    fn change_direct(&self, direct: &DirectGroup, change: &StrategyChange) -> Result<Reconfigured, Refused> {
        let Cut { epoch, from } = direct.strategies().change(change).map_err(|refused| refused.to_string())?;
        self.info.epoch.store(epoch, Ordering::Relaxed);
        Ok(Reconfigured { epoch, cut: from.saturating_sub(1) })
    }

    /// The strategy that was decided last, and its paths.
    fn last_decided(&self) -> (u64, &ScheduleCache, &PathAssignment) {
        match self.changes.decided.back() {
            Some((_, next)) => (next.epoch.into(), &next.schedules, &next.assignment),
            None => (self.info.epoch.load(Ordering::Relaxed), &self.schedules, &self.changes.assignment),
        }
    }

    /// Tells who watches what was decided last.
    pub(super) fn tell_chosen(&self) {
        let Some(placed) = &self.info.placed else { return };
        let (epoch, schedules, assignment) = self.last_decided();
        let host = |place: u16| self.info.hosts.get(usize::from(place)).cloned().unwrap_or_default();
        let flow = |((channel, from, to), path): (&(u16, u16, u16), &u16)| FlowChoice {
            channel: (*channel).into(),
            from: host(*from),
            to: host(*to),
            path: (*path).into(),
        };
        let mut flows: Vec<FlowChoice> = assignment.chosen.iter().map(flow).collect();
        flows.sort_by(|a, b| (a.channel, &a.from, &a.to).cmp(&(b.channel, &b.from, &b.to)));
        let (rings, algorithm) = (schedules.strategy().ring_orders.clone(), schedules.strategy().choice.into());
        let paths = assignment.paths.iter().map(mccs_config::service::FlowPath::from).collect();
        placed.set_chosen(Some(Chosen { epoch, rings, algorithm, transport: assignment.transport, paths, flows }));
    }

    /// Links of a strategy between this host and others, as one of the network's engines has them.
    fn links_of(&self, next: &Next, engine: usize, engines: usize, links: &[LinkKey]) -> NextEpoch {
        let is_here = |rank: u32| self.index_of(rank).is_some();
        let own = |key: &&LinkKey| key.engine(engines) == engine;
        let of = |sends: bool| {
            let wanted = |key: &&LinkKey| is_here(key.src) == sends && is_here(key.dst) != sends;
            links.iter().filter(own).filter(wanted).copied().collect()
        };
        NextEpoch { epoch: next.epoch, assignment: Arc::clone(&next.assignment), sends: of(true), recvs: of(false) }
    }

    /// Takes the strategy of the next collective. Returns the numbers of those that are over.
    fn take_next(&mut self) -> Vec<u32> {
        let (number, mut over) = (self.next_number(), Vec::new());
        while let Some((_, next)) = self.changes.decided.pop_front_if(|(cut, _)| *cut <= number) {
            self.put_in_force(next, &mut over);
        }
        over
    }

    fn put_in_force(&mut self, next: Next, over: &mut Vec<u32>) {
        self.info.epoch.store(next.epoch.into(), Ordering::Relaxed);
        (self.schedules, self.changes.assignment) = (next.schedules, next.assignment);
        if let Some(span) = &mut self.span {
            over.push(std::mem::replace(&mut span.network.epoch, next.epoch));
        }
    }

    /// As many operations as may start while hosts agree.
    fn window(&self) -> u32 {
        let fits = AGREEMENT_TIME.as_nanos().checked_div(self.average_took.as_nanos());
        fits.map_or(WINDOW_MIN, |fits| u32::try_from(fits).unwrap_or(WINDOW_MAX).clamp(WINDOW_MIN, WINDOW_MAX))
    }
}

/// What a change makes of a strategy's paths through the network. `hosts` are the communicator's.
fn changed_assignment(
    assignment: &PathAssignment,
    change: &StrategyChange,
    channels: usize,
    hosts: &[String],
) -> Result<PathAssignment, String> {
    let paths = change.paths.as_ref().map(|paths| paths.iter().map(FlowPath::from).collect());
    let keeps_chosen = change.flows.is_none() && paths.is_none();
    let mut changed = PathAssignment {
        transport: change.transport.or(assignment.transport),
        paths: paths.unwrap_or_else(|| assignment.paths.clone()),
        chosen: assignment.chosen.clone(),
        nics: Arc::clone(&assignment.nics),
    };
    if !keeps_chosen {
        changed.chosen.clear();
    }
    if hosts.is_empty() && (change.paths.is_some() || change.flows.is_some() || change.transport.is_some()) {
        return Err("all ranks of the communicator are on this host: it has no flows".into());
    }
    let place = |host: &String| {
        let at = hosts.iter().position(|known| known == host);
        at.ok_or_else(|| format!("the communicator has no ranks on host {host}; its hosts are {}", hosts.join(", ")))
    };
    for flow in change.flows.iter().flatten() {
        let (from, to) = (place(&flow.from)?, place(&flow.to)?);
        if from == to {
            return Err(format!("host {} needs no flow to itself", flow.from));
        }
        if flow.channel as usize >= channels {
            return Err(format!("there is no channel {}: the strategy has {channels}", flow.channel));
        }
        if flow.path as usize >= changed.paths.len() {
            return Err(format!("there is no path {}: the strategy has {}", flow.path, changed.paths.len()));
        }
        let (channel, path) = (flow.channel as u16, flow.path as u16);
        changed.chosen.insert((channel, from as u16, to as u16), path);
    }
    Ok(changed)
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
        let next = may_change.and_then(|()| live.next(change, live.info.epoch.load(Ordering::Relaxed) + 1));
        let (next, body) = match (next, serde_json::to_vec(change).ok().and_then(|json| ChangeBody::new(&json))) {
            (Ok(next), Some(body)) => (next, body),
            (Err(reason), _) => return reply_to.answer(Err(reason)),
            (_, None) => return reply_to.answer(Err(Refused::own("the change is too long to be told to other hosts"))),
        };
        match (&live.span, &mut self.setups) {
            (Some(span), Some(setups)) => {
                let (comm, window) = (span.comm.clone(), window.unwrap_or_else(|| live.window()));
                (live.changes.reply_to, live.changes.is_by_hand) = (Some(reply_to), expected.is_none());
                setups.ask(Request::Propose { comm, window, body, timeout: PREPARE_TIMEOUT });
            }
            _ => {
                let epoch = next.epoch.into();
                live.put_in_force(next, &mut Vec::new());
                reply_to.answer(Ok(OperatorAnswer::Reconfigured(Reconfigured { epoch, cut: live.next_number() })));
            }
        }
    }

    /// The exchange would not propose a change.
    pub(super) fn proposal_refused(&mut self, comm: &CommId, reason: &Text) {
        let live = self.comms.called(comm).and_then(|comm| self.comms.get_mut(comm));
        if let Some(reply_to) = live.and_then(|live| live.changes.reply_to.take()) {
            // It looks at the communicator alone.
            reply_to.answer(Err(Refused::own(reason.as_str())));
        }
    }

    /// A change is proposed: its links are to be made.
    pub(super) fn prepare_change(&mut self, id: &CommId, change: u64, window: u32, body: &ChangeBody) {
        if let Err(Refused { whose, reason }) = self.begin_to_prepare(id, change, window, body) {
            let (comm, refusal) = (id.clone(), Refusal { whose, reason: Text::new(reason) });
            self.setups.iter_mut().for_each(|setups| {
                setups.ask(Request::Refuse { comm: comm.clone(), change, refusal: refusal.clone() });
            });
        }
    }

    fn begin_to_prepare(&mut self, id: &CommId, change: u64, window: u32, body: &ChangeBody) -> Result<(), Refused> {
        let has_ended = || Refused::own("the communicator has ended here");
        let comm = self.comms.called(id).ok_or_else(has_ended)?;
        let live = self.comms.get_mut(comm).ok_or_else(has_ended)?;
        if live.changes.decided.len() >= DECIDED_MAX {
            return Err(Refused::own(format!("{DECIDED_MAX} changes wait for their first operation already")));
        }
        let body = serde_json::from_slice(body.bytes()).map_err(|error| format!("it cannot be read: {error}"))?;
        let next = live.next(&body, change)?;
        let links = next.schedules.links().map_err(|error| error.to_string())?;
        let key = |(channel, src, dst)| LinkKey { epoch: next.epoch, channel, src, dst };
        let links: Vec<_> = links.into_iter().map(key).collect();
        let span = live.span.as_ref().ok_or_else(|| Refused::own("the communicator has no other hosts"))?;
        let engines = span.network.engines.len();
        self.transports.prepare_epoch(&span.network, |engine| live.links_of(&next, engine, engines, &links));
        live.changes.preparing = Some(Preparing { next, window, engines_left: engines });
        Ok(())
    }

    /// A transport engine has made the links of a strategy, or cannot.
    pub(super) fn epoch_prepared(&mut self, links: LinksId, epoch: u32, made: Result<(), TransportError>) {
        let comm = self.comms.with_links(links);
        let Some(live) = comm.and_then(|comm| self.comms.get_mut(comm)) else { return };
        let (Some(span), launched) = (&live.span, live.next_number()) else { return };
        let (id, change) = (span.comm.clone(), u64::from(epoch));
        let Some(preparing) = live.changes.preparing.as_mut().filter(|preparing| preparing.next.epoch == epoch) else {
            return;
        };
        let request = match made {
            Ok(()) => {
                preparing.engines_left = preparing.engines_left.saturating_sub(1);
                if preparing.engines_left > 0 {
                    return;
                }
                live.changes.limit = Some(launched.saturating_add(preparing.window.into()));
                Request::Prepared { comm: id, change, launched }
            }
            Err(error) => {
                // What was made stays until all know why it is not to be: a host that found it closed would say so, and be heard first.
                let whose = if error.is_of_way() { Whose::Change } else { Whose::Communicator };
                let refusal = Refusal { whose, reason: Text::new(error.to_string()) };
                Request::Refuse { comm: id, change, refusal }
            }
        };
        self.setups.iter_mut().for_each(|setups| setups.ask(request.clone()));
    }

    /// A change is decided on all hosts.
    pub(super) fn change_decided(&mut self, id: &CommId, change: u64, decision: Decision) {
        let Some(comm) = self.comms.called(id) else { return };
        let Some(live) = self.comms.sound_mut(comm) else { return };
        let Some(network) = live.span.as_ref().map(|span| span.network.clone()) else { return };
        let started = live.next_number();
        let (changes, mut over) = (&mut live.changes, Vec::new());
        changes.limit = None;
        let preparing = changes.preparing.take();
        let answer = match decision {
            Decision::Commit { cut } => {
                let prepared = preparing.filter(|p| u64::from(p.next.epoch) == change && started <= cut);
                let Some(Preparing { next, .. }) = prepared else {
                    let message = format!("change {change} holds from {cut} on, for which this host is not prepared");
                    return self.abort(comm, Failure::new(ErrorClass::Internal, message));
                };
                while let Some((_, never)) = changes.decided.pop_back_if(|(earlier, _)| *earlier >= cut) {
                    over.push(never.epoch);
                }
                self.transports.set_pair_paths(&network, &next.assignment);
                changes.decided.push_back((cut, next));
                if let Some(placed) = live.info.placed.as_ref().filter(|_| changes.reply_to.is_some()) {
                    placed.pin(changes.is_by_hand);
                }
                live.tell_chosen();
                self.registry.note_comms();
                Ok(OperatorAnswer::Reconfigured(Reconfigured { epoch: change, cut }))
            }
            Decision::Abort { refusal } => {
                over.extend(preparing.map(|preparing| preparing.next.epoch));
                Err(Refused::from(&refusal))
            }
        };
        let reply_to = self.comms.get_mut(comm).and_then(|live| live.changes.reply_to.take());
        if let Some(reply_to) = reply_to {
            reply_to.answer(answer);
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

#[cfg(test)]
mod tests {
    use mccs_config::service::TransportKind;

    use super::*;

    fn change(toml: &str) -> StrategyChange {
        StrategyChange::parse(toml, "change.toml").unwrap()
    }

    #[test]
    fn ways_are_kept_replaced_or_refused() {
        let hosts = ["a".to_owned(), "b".to_owned()];
        let first =
            change("[[path]]\ndscp = 1\n[[path]]\ndscp = 2\n[[flow]]\nchannel = 0\nfrom = 'a'\nto = 'b'\npath = 1");
        let made = changed_assignment(&PathAssignment::default(), &first, 2, &hosts).unwrap();
        assert_eq!((made.paths.len(), made.chosen.get(&(0, 0, 1))), (2, Some(&1)));
        assert_eq!(changed_assignment(&made, &change("algorithm = 'ring'"), 2, &hosts).unwrap(), made);
        assert!(changed_assignment(&made, &change("[[path]]\ndscp = 3"), 2, &hosts).unwrap().chosen.is_empty());
        let flow = |from: &str, to: &str, channel: u32, path: u32| {
            let text = format!("[[flow]]\nchannel = {channel}\nfrom = {from:?}\nto = {to:?}\npath = {path}");
            changed_assignment(&made, &change(&text), 2, &hosts)
        };
        assert_eq!(flow("b", "a", 1, 0).unwrap().chosen.into_iter().collect::<Vec<_>>(), [((1, 1, 0), 0)]);
        assert!(flow("c", "a", 0, 0).unwrap_err().contains("its hosts are a, b"));
        assert!(flow("a", "a", 0, 0).unwrap_err().contains("itself"));
        assert!(flow("a", "b", 2, 0).unwrap_err().contains("channel 2"));
        assert!(flow("a", "b", 0, 2).unwrap_err().contains("path 2"));
        assert!(changed_assignment(&made, &first, 2, &[]).unwrap_err().contains("no flows"));
        let rdma = changed_assignment(&made, &change("transport = 'rdma'"), 2, &hosts).unwrap();
        assert_eq!(rdma, PathAssignment { transport: Some(TransportKind::Rdma), ..made.clone() });
        assert_eq!(
            changed_assignment(&rdma, &change("channels = 2"), 2, &hosts).unwrap(),
            rdma,
            "what is absent stays"
        );
        assert!(changed_assignment(&made, &change("transport = 'tcp'"), 2, &[]).unwrap_err().contains("no flows"));
    }
}
