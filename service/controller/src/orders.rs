//! Orders: what is not as decided, told to the host that can change it, and what becomes of it there.
//!
//! An order names the strategy that it replaces. One that is refused for what it asks for is not given again before something else has
//! changed and a pause is over; one that is refused for something of the communicator's own, when the pause is over. Paces are told in the same way, and hold at once.
//!
//! Invariant: at most one order of a communicator is under way.

use std::time::{Duration, Instant};

use mccs_config::change::StrategyChange;

use super::bursts::Yielders;
use super::history::Went;
use super::hosts::HostState;
use super::message::{ControllerMessage, Order, Outcome};
use super::pace::HostPace;
use super::plan::Plan;
use super::state::{Controller, Output};
use mccs_model::limits::CHANGE_BYTES_MAX;
use mccs_model::{CommId, Name, Whose};

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
    /// In the history; those that follow for the same have no other.
    entry: u64,
    pub(super) reason: String,
    pause: Duration,
    pub(super) until: Instant,
    /// It was for a strategy that is not in force any more: until when its host may take to report the one that is.
    pub(super) reports_until: Option<Instant>,
    /// It may be otherwise by then.
    pub(super) may_retry: bool,
}

impl Refusal {
    /// Whether it is of this plan, for a strategy with this number.
    pub(super) fn is_of(&self, plan: &Plan, epoch: u64) -> bool {
        self.plan.is_same_strategy(plan) && self.epoch == epoch
    }
}

pub(super) struct Pending {
    pub(super) comm: CommId,
    pub(super) plan: Plan,
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
        let (reason, whose) = match outcome {
            Outcome::Done { .. } => {
                held.refusal = None;
                self.history.went(pending.entry, Went::Done);
                return self.note_answered(order, &pending, None, now);
            }
            Outcome::Stale { epoch } => (format!("its strategy was number {epoch} meanwhile"), None),
            Outcome::Refused { whose, reason } => (reason, Some(whose)),
        };
        self.history.went(pending.entry, Went::Failed(reason.clone()));
        let before = held.refusal.take().filter(|refusal| refusal.plan.is_same_strategy(&pending.plan));
        let pause = before.map_or(PAUSE, |refusal| (refusal.pause * 2).min(PAUSE_MAX));
        held.refusal = Some(Refusal {
            plan: pending.plan.clone(),
            epoch: pending.expected_epoch,
            entry: pending.entry,
            reason: reason.clone(),
            pause,
            until: now + pause,
            reports_until: whose.is_none().then(|| now + ORDER_TIME),
            may_retry: whose == Some(Whose::Communicator),
        });
        if let Some(whose) = whose {
            self.note_answered(order, &pending, Some((whose, &reason)), now);
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
                    if held.paced.get(&host).unwrap_or(&HostPace::default()) != &pace
                        && let Some(rollout) = &mut self.rollout
                    {
                        rollout.paced.insert(comm.clone());
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
        let mut too_long = Vec::new();
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
            let refusal = held.refusal.as_ref().filter(|refusal| refusal.is_of(plan, expected_epoch));
            if refusal.is_some_and(|refusal| !refusal.may_retry || refusal.until > now) {
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
            // Who refuses again and again does not fill the history.
            let entry = match refusal {
                Some(refusal) => refusal.entry,
                None => self.history.note_of_comm(what, self.last_cause.clone(), Went::Pending, now),
            };
            held.order = Some(order);
            let (plan, until) = (plan.clone(), now + ORDER_TIME);
            let change = plan.change();
            let is_too_long = !fits(&change);
            let message = Order { life: self.life, order, comm: comm.clone(), expected_epoch, change };
            self.orders.insert(order, Pending { comm: comm.clone(), plan, expected_epoch, entry, until });
            if is_too_long {
                too_long.push((order, comm.root.clone()));
                continue;
            }
            let message = ControllerMessage::Order(Box::new(message));
            self.outputs.push_back(Output::Tell { to: comm.root.clone(), message });
        }
        for (order, host) in too_long {
            let reason = format!("its strategy would have more than the {CHANGE_BYTES_MAX} bytes that a change has");
            self.answered(&host, order, Outcome::Refused { whose: Whose::Communicator, reason }, now);
        }
    }

    /// Gives up what has taken too long, and looks again at what was refused.
    pub(super) fn expire(&mut self, now: Instant) {
        let late: Vec<_> = self.orders.iter().filter(|(_, pending)| pending.until <= now).collect();
        let late: Vec<_> = late.into_iter().map(|(order, pending)| (*order, pending.comm.root.clone())).collect();
        for (order, host) in late {
            let reason = format!("host {host} did not answer within {ORDER_TIME:?}");
            self.answered(&host, order, Outcome::Refused { whose: Whose::Communicator, reason }, now);
        }
        let mut unreported = Vec::new();
        for (comm, held) in &mut self.comms {
            let late = held.refusal.as_mut().filter(|refusal| refusal.reports_until.is_some_and(|until| until <= now));
            if let Some(refusal) = late {
                refusal.reports_until = None;
                unreported.push((comm.clone(), format!("{}, which its host has not reported", refusal.reason)));
            }
        }
        unreported.into_iter().for_each(|(comm, reason)| self.note_kept(comm, reason));
        let is_due = |refusal: &Refusal| refusal.may_retry && refusal.until <= now;
        self.is_to_order |= self.comms.values().any(|held| held.refusal.as_ref().is_some_and(is_due));
    }
}

/// Whether hosts can be told of a change.
fn fits(change: &StrategyChange) -> bool {
    serde_json::to_vec(change).is_ok_and(|json| json.len() <= CHANGE_BYTES_MAX)
}

/// What a line of the history adds about what is not carried out.
pub(super) fn besides(not_enforced: &[String]) -> String {
    if not_enforced.is_empty() {
        return String::new();
    }
    format!("; decided, not enforced: {}", not_enforced.join(", "))
}
