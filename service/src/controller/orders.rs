//! Orders: what is not as decided, told to the host that can change it, and what becomes of it there.
//!
//! An order names the strategy that it replaces. One that is refused is not given again before something else has changed and a pause
//! is over. Paces are told in the same way, and hold at once.
//!
//! Invariant: at most one order of a communicator is under way.

use std::time::{Duration, Instant};

use super::bursts::Yielders;
use super::history::Went;
use super::message::{ControllerMessage, Order, Outcome};
use super::plan::Plan;
use super::state::{Controller, HostState, Output};
use crate::exchange::protocol::{CommId, Name};

/// Orders that are under way at a time: bounds what waits in mailboxes on the way.
pub const ORDERS_MAX: usize = 64;
/// Longer than hosts may take to agree.
pub const ORDER_TIME: Duration = Duration::from_secs(30);
/// Pause after a first refusal; it doubles with each that follows.
pub const PAUSE: Duration = Duration::from_secs(1);
/// Longest pause.
pub const PAUSE_MAX: Duration = Duration::from_secs(60);

/// An order that was not carried out.
pub(super) struct Refusal {
    plan: Plan,
    epoch: u64,
    pub(super) reason: String,
    pause: Duration,
    pub(super) until: Instant,
    /// Something has changed since.
    pub(super) may_retry: bool,
}

pub(super) struct Pending {
    pub(super) comm: CommId,
    plan: Plan,
    expected_epoch: u64,
    /// In the history.
    pub(super) entry: u64,
    pub(super) until: Instant,
}

impl Controller {
    pub(super) fn answered(&mut self, from: &Name, order: u64, outcome: Outcome, now: Instant) {
        if self.orders.get(&order).is_none_or(|pending| pending.comm.root != *from) {
            return;
        }
        let Some(pending) = self.orders.remove(&order) else { return };
        self.is_to_order = true;
        let Some(held) = self.comms.get_mut(&pending.comm) else { return };
        held.order = None;
        let (reason, is_fault) = match outcome {
            Outcome::Done { .. } => {
                held.refusal = None;
                self.history.went(pending.entry, Went::Done);
                if let Some(application) = &mut self.application {
                    application.changed.push(pending.comm);
                }
                return;
            }
            Outcome::Stale { epoch } => (format!("its strategy was number {epoch} meanwhile"), false),
            Outcome::Refused { reason } => (reason, true),
        };
        self.history.went(pending.entry, Went::Failed(reason.clone()));
        let before = held.refusal.take().filter(|refusal| refusal.plan.is_same_strategy(&pending.plan));
        let pause = before.map_or(PAUSE, |refusal| (refusal.pause * 2).min(PAUSE_MAX));
        held.refusal = Some(Refusal {
            plan: pending.plan,
            epoch: pending.expected_epoch,
            reason: reason.clone(),
            pause,
            until: now + pause,
            may_retry: false,
        });
        if let Some(application) = self.application.as_mut().filter(|_| is_fault) {
            application.failed.push((pending.comm, reason));
        }
    }

    /// Tells hosts how flows are to leave them, where that is not what they were told last.
    pub(super) fn tell_paces(&mut self) {
        for (comm, held) in &mut self.comms {
            let Some(plan) = &held.plan else { continue };
            let paces = plan.as_ref().map_or(&[][..], |plan| &plan.paces);
            for host in held.report.hosts.iter().filter_map(|host| Name::new(&host.host)) {
                if self.hosts.get(&host) != Some(&HostState::Synced) {
                    continue;
                }
                let pace = paces.iter().find(|(of, _)| of == host.as_str()).map(|(_, pace)| pace.clone());
                let pace = pace.unwrap_or_default();
                let is_news = match held.paced.get(&host) {
                    Some(told) => *told != pace,
                    None => !pace.is_free() || self.unsure.contains(&host),
                };
                if is_news {
                    if pace.allotted_bps() == 0 {
                        self.wants.get_mut(comm).map(|by_host| by_host.remove(&host));
                    }
                    held.paced.insert(host.clone(), pace.clone());
                    let message = ControllerMessage::Pace { life: self.life, comm: comm.clone(), pace };
                    self.outputs.push_back(Output::Tell { to: host, message });
                }
            }
        }
        self.yielders = Yielders::of(self.comms.values().flat_map(|held| &held.paced));
    }

    pub(super) fn place_orders(&mut self, now: Instant) {
        for (comm, held) in &mut self.comms {
            let Some(Ok(plan)) = &held.plan else { continue };
            if held.order.is_some() {
                continue;
            }
            if held.report.is_pinned || plan.is_met_by(&held.report.chosen) {
                held.refusal = None;
                continue;
            }
            let expected_epoch = held.report.chosen.epoch;
            let is_refused = |refusal: &Refusal| {
                refusal.plan.is_same_strategy(plan)
                    && refusal.epoch == expected_epoch
                    && !(refusal.may_retry && refusal.until <= now)
            };
            if held.refusal.as_ref().is_some_and(is_refused) {
                continue;
            }
            if self.orders.len() >= ORDERS_MAX {
                // Whoever answers makes room.
                break;
            }
            self.next_order += 1;
            let order = self.next_order;
            let flows = plan.flows.len();
            let what = format!(
                "order {order}: communicator {comm} of tenant {}: {} rings, {flows} flows, after strategy {expected_epoch}{}",
                held.report.tenant,
                plan.rings.len(),
                besides(&plan.not_enforced)
            );
            let entry = self.history.note(what, self.last_cause.clone(), Went::Pending, now);
            held.order = Some(order);
            let (plan, until) = (plan.clone(), now + ORDER_TIME);
            let message = Order { life: self.life, order, comm: comm.clone(), expected_epoch, change: plan.change() };
            self.orders.insert(order, Pending { comm: comm.clone(), plan, expected_epoch, entry, until });
            let message = ControllerMessage::Order(Box::new(message));
            self.outputs.push_back(Output::Tell { to: comm.root.clone(), message });
        }
    }

    /// Gives up what has taken too long, and looks again at what was refused.
    pub(super) fn expire(&mut self, now: Instant) {
        let late: Vec<_> = self.orders.iter().filter(|(_, pending)| pending.until <= now).collect();
        let late: Vec<_> = late.into_iter().map(|(order, pending)| (*order, pending.comm.root.clone())).collect();
        for (order, host) in late {
            let reason = format!("host {host} did not answer within {ORDER_TIME:?}");
            self.answered(&host, order, Outcome::Refused { reason }, now);
        }
        let is_due = |refusal: &Refusal| refusal.may_retry && refusal.until <= now;
        self.is_to_order |= self.comms.values().any(|held| held.refusal.as_ref().is_some_and(is_due));
    }
}

/// What a line of the history adds about what is not carried out.
pub(super) fn besides(not_enforced: &[String]) -> String {
    if not_enforced.is_empty() {
        return String::new();
    }
    format!("; decided, not enforced: {}", not_enforced.join(", "))
}
