//! Flows post in turn: what has completed is taken, and each flow that has something to do posts some of it before the others do.
//!
//! A flow is in the queue once, however much it has to do. Those that wait for memory to be pinned, or whose credits are withheld, come back
//! to it when that is over.

use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;

use crate::rdma::RdmaTransport;
use crate::rdma::connection::wire;
use crate::rdma::data_path::sender;
use crate::rdma::device::ports::Port;
use crate::rdma::device::queues::Taken;
use crate::rdma::flow::{Half, Stage};

/// Bytes that one flow posts before others have their turn.
const TURN_BYTES: u64 = 4 << 20;
/// How long a sender of short messages that waits for a credit after all is left waiting.
const WITHHELD_FOR: Duration = Duration::from_millis(100);

impl RdmaTransport {
    pub(in crate::rdma) fn enqueue(&mut self, handle: Handle) {
        if let Some(flow) = self.flows.get_mut(handle)
            && !std::mem::replace(&mut flow.is_queued, true)
        {
            self.queue.push_back(handle);
        }
    }

    /// Takes completions of all ports, some or, to drain them, all. Returns whether there were any.
    pub(in crate::rdma) fn take_completions(&mut self, takes_max: usize) -> bool {
        let (mut taken, mut any) = (Taken::NONE, false);
        for port in 0..self.ports.len() {
            for _ in 0..takes_max {
                let Some(queues) = self.ports.get_mut(port).and_then(Port::queues) else { break };
                if queues.take(&mut taken).is_err() {
                    self.lose_port(port);
                    break;
                }
                if taken.get().is_empty() {
                    break;
                }
                any = true;
                taken.get().iter().for_each(|completion| self.completed(completion));
            }
        }
        any
    }

    /// Lets a flow post what it can. Returns whether something moved.
    pub(in crate::rdma) fn pump(&mut self, handle: Handle) -> bool {
        let Some(flow) = self.flows.get_mut(handle).filter(|flow| flow.fault.is_none()) else { return false };
        let is_watched = flow.is_watched();
        let open = flow.connection.as_mut().filter(|_| flow.stage == Stage::Open);
        let pumped = match (&mut flow.half, open) {
            (Half::Send(sender), Some(connection)) => {
                sender.pump(connection, &mut self.memory, &self.ports, TURN_BYTES, is_watched)
            }
            (Half::Recv(receiver), Some(connection)) => receiver.pump(connection, &mut self.memory, &self.ports),
            (_, None) => Ok(sender::Pumped::default()),
        };
        match pumped {
            Ok(pumped) => {
                if let Some((message, bytes)) = pumped.too_long {
                    self.say(handle, wire::Record::TooLong { message, bytes });
                }
                if pumped.more {
                    self.enqueue(handle);
                }
                if pumped.moved {
                    self.plan_look_for_silence();
                }
                if pumped.withheld {
                    self.withhold(handle);
                }
                if pumped.waits_for_memory
                    && let Some(flow) = self.flows.get_mut(handle)
                    && !std::mem::replace(&mut flow.waits_for_memory, true)
                {
                    self.wait_for_memory.push(handle);
                }
                self.check_end(handle);
                pumped.moved
            }
            Err(fault) => {
                self.stumble(handle, fault);
                true
            }
        }
    }

    /// A flow's credits are withheld, for a while.
    fn withhold(&mut self, handle: Handle) {
        let (Some(flow), Some(now)) = (self.flows.get_mut(handle), self.now) else { return };
        if !std::mem::replace(&mut flow.is_withheld, true) {
            self.withheld.push(handle);
            self.withheld_until.get_or_insert(now + WITHHELD_FOR);
        }
    }

    /// Has credits written that have been withheld for long enough.
    pub(in crate::rdma) fn give_withheld(&mut self, now: Instant) {
        if self.withheld_until.is_none_or(|until| until > now) {
            return;
        }
        self.withheld_until = None;
        while let Some(handle) = self.withheld.pop() {
            let Some(flow) = self.flows.get_mut(handle) else { continue };
            flow.is_withheld = false;
            if let Half::Recv(receiver) = &mut flow.half {
                receiver.give();
            }
            self.enqueue(handle);
        }
    }

    /// Takes what has been pinned, for the flows that wait for it. Returns whether there was anything.
    pub(in crate::rdma) fn take_pinned(&mut self) -> bool {
        let any = self.memory.take_pinned();
        if any {
            for handle in std::mem::take(&mut self.wait_for_memory) {
                let Some(flow) = self.flows.get_mut(handle) else { continue };
                flow.waits_for_memory = false;
                self.enqueue(handle);
            }
        }
        any
    }
}
