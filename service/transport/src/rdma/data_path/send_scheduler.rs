//! Send scheduler: tenants' RDMA flows post in turn, some of each before more of any. Completed
//! requests are taken first.
//!
//! A flow is in the queue once, however much it has to do. Those that wait for memory to be pinned, or whose credits are withheld, come back
//! to it when that is over.

use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use mccs_runtime::{Share, TurnQueue};

use crate::rdma::flow::Flow;

/// How long a sender of short messages that waits for a credit after all is left waiting.
const WITHHELD_FOR: Duration = Duration::from_millis(100);

/// Which flows post next, and which wait for something before.
#[derive(Debug, Default)]
pub(in crate::rdma) struct SendScheduler {
    /// Flows with something to do.
    queue: TurnQueue<Handle>,
    /// Flows whose credits are withheld, and until when.
    withheld: Vec<Handle>,
    withheld_until: Option<Instant>,
    /// Flows that wait for memory to be pinned.
    wait_for_memory: Vec<Handle>,
}

impl SendScheduler {
    /// Room for so many flows, all of a tenant: each is in the queue at most once, so that the data path does not allocate.
    pub(in crate::rdma) fn reserve(&mut self, share: Share, flows: usize) {
        self.queue.reserve(share, flows);
        self.withheld.reserve(flows);
    }

    /// A flow has something to do.
    pub(in crate::rdma) fn enqueue(&mut self, handle: Handle, flow: &mut Flow) {
        if !std::mem::replace(&mut flow.is_queued, true) {
            self.queue.push(flow.spec.options.share, handle);
        }
    }

    /// Number of flows whose turn comes in a poll; those that come meanwhile have theirs in the next one.
    pub(in crate::rdma) fn len(&self) -> usize {
        self.queue.len()
    }

    /// The flow whose turn it is.
    pub(in crate::rdma) fn next(&mut self) -> Option<Handle> {
        self.queue.pop()
    }

    /// A flow's credits are withheld, for a while.
    pub(in crate::rdma) fn withhold(&mut self, handle: Handle, flow: &mut Flow, now: Instant) {
        if !std::mem::replace(&mut flow.is_withheld, true) {
            self.withheld.push(handle);
            self.withheld_until.get_or_insert(now + WITHHELD_FOR);
        }
    }

    pub(in crate::rdma) fn withheld_until(&self) -> Option<Instant> {
        self.withheld_until
    }

    /// Whether credits have been withheld for long enough. Then [`SendScheduler::next_withheld`] gives their flows.
    pub(in crate::rdma) fn is_withheld_enough(&mut self, now: Instant) -> bool {
        self.withheld_until.take_if(|until| *until <= now).is_some()
    }

    pub(in crate::rdma) fn next_withheld(&mut self) -> Option<Handle> {
        self.withheld.pop()
    }

    /// Memory of a flow's next message is being pinned.
    pub(in crate::rdma) fn wait_for_memory(&mut self, handle: Handle, flow: &mut Flow) {
        if !std::mem::replace(&mut flow.waits_for_memory, true) {
            self.wait_for_memory.push(handle);
        }
    }

    /// Memory has been pinned: flows that may have waited for it.
    pub(in crate::rdma) fn take_waiting(&mut self) -> Vec<Handle> {
        std::mem::take(&mut self.wait_for_memory)
    }
}
