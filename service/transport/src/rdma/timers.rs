//! Timers of the RDMA transport: when to look at what nobody tells of.

use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use mccs_model::handles::HandleTable;

use super::flow::Flow;

/// How often connections are looked at on which something is under way.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(1);

/// See the module's documentation. Deadlines themselves are the flows'.
#[derive(Debug, Default)]
pub(in crate::rdma) struct Timers {
    /// Time of the last call that brought it.
    now: Option<Instant>,
    /// Flows that wait for something with a deadline.
    unsettled: Vec<Handle>,
    /// Flows that their users have closed, whose last messages are under way.
    lingering: Vec<Handle>,
    /// No flow that is away from home goes there before.
    homes_due: Option<Instant>,
    /// When flows of which nothing is heard are asked after.
    keepalive_at: Option<Instant>,
}

impl Timers {
    /// A call has brought the time.
    pub(in crate::rdma) fn note(&mut self, now: Instant) {
        self.now = Some(now);
    }

    /// The time of the last call that brought it.
    pub(in crate::rdma) fn now(&self) -> Option<Instant> {
        self.now
    }

    /// A flow has to be looked at when this has passed.
    pub(in crate::rdma) fn settle_by(&mut self, handle: Handle, flow: &mut Flow, due: Option<Instant>) {
        flow.due = due;
        if due.is_some() && !self.unsettled.contains(&handle) {
            self.unsettled.push(handle);
        }
    }

    pub(in crate::rdma) fn has_unsettled(&self) -> bool {
        !self.unsettled.is_empty()
    }

    /// All flows that wait for something with a deadline, and some that did.
    pub(in crate::rdma) fn unsettled(&self) -> Vec<Handle> {
        self.unsettled.clone()
    }

    /// Flows whose deadline has passed. They are settled from here on.
    pub(in crate::rdma) fn take_due(&mut self, flows: &mut HandleTable<Flow>, now: Instant) -> Vec<Handle> {
        if self.unsettled.is_empty() {
            return Vec::new();
        }
        let is_unsettled = |flow: &Flow| flow.fault.is_none() && flow.due.is_some();
        self.unsettled.retain(|handle| flows.get(*handle).is_some_and(is_unsettled));
        let is_due = |handle: &Handle| flows.get(*handle).and_then(|flow| flow.due).is_some_and(|due| due <= now);
        let due: Vec<Handle> = self.unsettled.iter().copied().filter(is_due).collect();
        for handle in &due {
            if let Some(flow) = flows.get_mut(*handle) {
                flow.due = None;
            }
        }
        due
    }

    /// A flow lingers.
    pub(in crate::rdma) fn linger(&mut self, handle: Handle) {
        self.lingering.push(handle);
    }

    /// Number of flows that linger.
    pub(in crate::rdma) fn lingering(&self) -> usize {
        self.lingering.len()
    }

    /// Takes flows out that need not linger any more.
    pub(in crate::rdma) fn take_lingering(&mut self, mut is_over: impl FnMut(Handle) -> bool) -> Vec<Handle> {
        self.lingering.extract_if(.., |handle| is_over(*handle)).collect()
    }

    /// A flow goes home then.
    pub(in crate::rdma) fn go_home_at(&mut self, flow: &mut Flow, at: Instant) {
        flow.home_at = Some(at);
        self.homes_due = Some(self.homes_due.map_or(at, |due| due.min(at)));
    }

    /// Flows that are to go home now.
    pub(in crate::rdma) fn take_going_home(&mut self, flows: &HandleTable<Flow>, now: Instant) -> Vec<Handle> {
        if self.homes_due.is_none_or(|due| due > now) {
            return Vec::new();
        }
        let planned: Vec<_> = flows.iter().filter_map(|(handle, flow)| Some((handle, flow.home_at?))).collect();
        self.homes_due = planned.iter().map(|(_, at)| *at).filter(|at| *at > now).min();
        planned.into_iter().filter(|(_, at)| *at <= now).map(|(handle, _)| handle).collect()
    }

    /// Something has been posted: it is to arrive.
    pub(in crate::rdma) fn plan_keepalive(&mut self, now: Option<Instant>) {
        self.keepalive_at = self.keepalive_at.or(now.map(|now| now + KEEPALIVE_EVERY));
    }

    /// Whether flows are to be asked after now.
    pub(in crate::rdma) fn take_keepalive(&mut self, now: Instant) -> bool {
        self.keepalive_at.take_if(|at| *at <= now).is_some()
    }

    #[cfg(test)]
    pub(in crate::rdma) fn keepalive_at(&self) -> Option<Instant> {
        self.keepalive_at
    }

    /// The earliest of all.
    pub(in crate::rdma) fn wake_at(&self, flows: &HandleTable<Flow>) -> Option<Instant> {
        let due = self.unsettled.iter().filter_map(|handle| flows.get(*handle)?.due);
        let lingering = self.lingering.iter().filter_map(|handle| flows.get(*handle)?.lingers_until);
        due.chain(lingering).chain(self.homes_due).chain(self.keepalive_at).min()
    }
}
