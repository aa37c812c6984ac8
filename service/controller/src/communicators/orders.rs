//! Orders to hosts: a change of strategy told to the host that can make it, its answer, and its
//! time-out.
//!
//! An order names the strategy that it replaces. `communicator.rs` says when one that was refused is given again.
//!
//! Invariant: at most one order of a communicator is under way.

use std::collections::BTreeMap;
use std::time::Instant;

use mccs_config::change::StrategyChange;

use crate::communicators::Communicators;
use crate::communicators::communicator::{Communicator, ORDER_TIME, Refused};
use crate::communicators::plan::Plan;
use crate::effects::Effects;
use crate::history::{History, Went};
use crate::messages::message::{ControllerMessage, Order, Outcome};
use mccs_model::limits::CHANGE_BYTES_MAX;
use mccs_model::{CommId, Name, Whose};

/// Orders that are under way at a time: bounds what waits in mailboxes on the way.
pub const ORDERS_MAX: usize = 64;

struct Pending {
    comm: CommId,
    plan: Plan,
    expected_epoch: u64,
    /// In the history.
    entry: u64,
    until: Instant,
}

/// An order that was carried out, or refused.
pub(crate) struct Answered {
    pub(crate) order: u64,
    pub(crate) comm: CommId,
    /// The ordered plan.
    pub(crate) plan: Plan,
    /// Its host did not answer in time.
    pub(crate) is_late: bool,
    /// The reason for its refusal, and whose fault it is.
    pub(crate) refused: Option<(Whose, String)>,
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Orders {
    pending: BTreeMap<u64, Pending>,
    last: u64,
}

impl Orders {
    /// The last one that was given.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// When the first of them has taken too long.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.pending.values().map(|pending| pending.until).min()
    }

    /// A communicator has ended: nothing comes of its order.
    pub(crate) fn end(&mut self, communicator: &Communicator, history: &mut History) {
        if let Some(pending) = communicator.order().and_then(|order| self.pending.remove(&order)) {
            history.went(pending.entry, Went::Failed("the communicator has ended".into()));
        }
    }

    /// Nothing is heard any more of orders for communicators with their root on a host, and why.
    pub(crate) fn forget_root(&mut self, host: &Name, why: &str, history: &mut History) {
        for (_, pending) in self.pending.extract_if(.., |_, pending| pending.comm.root == *host) {
            history.went(pending.entry, Went::Failed(why.to_owned()));
        }
    }

    /// A host says what became of an order. Returns the order, where it was one, for the strategy that was in force.
    pub(crate) fn answered(
        &mut self,
        from: &Name,
        order: u64,
        outcome: Outcome,
        comms: &mut Communicators,
        effects: &mut Effects,
        now: Instant,
    ) -> Option<Answered> {
        let pending = self.pending.get(&order).filter(|pending| pending.comm.root == *from)?;
        let is_late = pending.until <= now;
        let Pending { comm, plan, expected_epoch: epoch, entry, .. } = self.pending.remove(&order)?;
        effects.decisions.order();
        let communicator = comms.get_mut(&comm)?;
        let (reason, whose) = match outcome {
            Outcome::Done { .. } => {
                communicator.done();
                effects.history.went(entry, Went::Done);
                return Some(Answered { order, comm, plan, is_late, refused: None });
            }
            Outcome::Stale { epoch } => (format!("its strategy was number {epoch} meanwhile"), None),
            Outcome::Refused { whose, reason } => (reason, Some(whose)),
        };
        effects.history.went(entry, Went::Failed(reason.clone()));
        communicator.refused(&Refused { plan: &plan, epoch, entry, reason: &reason, whose }, now);
        Some(Answered { order, comm, plan, is_late, refused: Some((whose?, reason)) })
    }

    /// Orders what is not as decided. Returns those that no host can be told, which are refused at once.
    pub(crate) fn place(&mut self, comms: &mut Communicators, effects: &mut Effects, now: Instant) -> Vec<Answered> {
        let mut too_long = Vec::new();
        for (comm, communicator) in comms.iter_mut() {
            let Some((plan, entry)) = communicator.wanted(now) else { continue };
            if self.pending.len() >= ORDERS_MAX {
                // Whoever answers makes room.
                break;
            }
            self.last += 1;
            let (order, plan) = (self.last, plan.clone());
            let report = communicator.report();
            let expected_epoch = report.chosen.epoch;
            // A host that refuses again and again does not fill the history.
            let entry = entry.unwrap_or_else(|| {
                let (rings, flows) = (plan.rings.len(), plan.flows.len());
                let what = format!(
                    "order {order}: communicator {comm} of tenant {}: {rings} rings, {flows} flows, after strategy {expected_epoch}{}",
                    report.tenant,
                    besides(&plan.not_enforced)
                );
                effects.history.note_of_comm(what, effects.decisions.last_cause(), Went::Pending, now)
            });
            communicator.ordered(order);
            let change = plan.change();
            let is_too_long = !fits(&change);
            let until = now + ORDER_TIME;
            self.pending.insert(order, Pending { comm: comm.clone(), plan, expected_epoch, entry, until });
            if is_too_long {
                too_long.push((order, comm.root.clone()));
                continue;
            }
            let message = Order { life: effects.outbox.life(), order, comm: comm.clone(), expected_epoch, change };
            effects.outbox.tell(comm.root.clone(), ControllerMessage::Order(Box::new(message)));
        }
        let reason = format!("its strategy would have more than the {CHANGE_BYTES_MAX} bytes that a change has");
        self.give_up(too_long, |_| reason.clone(), comms, effects, now)
    }

    /// Gives up what has taken too long.
    pub(crate) fn expire(&mut self, comms: &mut Communicators, effects: &mut Effects, now: Instant) -> Vec<Answered> {
        let late = self.pending.iter().filter(|(_, pending)| pending.until <= now);
        let late = late.map(|(order, pending)| (*order, pending.comm.root.clone())).collect();
        let reason = |host: &Name| format!("host {host} did not answer within {ORDER_TIME:?}");
        self.give_up(late, reason, comms, effects, now)
    }

    /// Orders are refused for a reason that the controller has.
    fn give_up(
        &mut self,
        orders: Vec<(u64, Name)>,
        reason: impl Fn(&Name) -> String,
        comms: &mut Communicators,
        effects: &mut Effects,
        now: Instant,
    ) -> Vec<Answered> {
        let refuse = |(order, host): (u64, Name)| {
            let outcome = Outcome::Refused { whose: Whose::Communicator, reason: reason(&host) };
            self.answered(&host, order, outcome, comms, effects, now)
        };
        orders.into_iter().filter_map(refuse).collect()
    }
}

/// Whether hosts can be told of a change.
fn fits(change: &StrategyChange) -> bool {
    serde_json::to_vec(change).is_ok_and(|json| json.len() <= CHANGE_BYTES_MAX)
}

/// Text behind a line of the history, of parts that are not carried out.
pub(crate) fn besides(not_enforced: &[String]) -> String {
    if not_enforced.is_empty() {
        return String::new();
    }
    format!("; decided, not enforced: {}", not_enforced.join(", "))
}
