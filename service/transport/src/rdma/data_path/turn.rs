//! A flow's turn: what has completed is taken, and the flow posts some of what it has to do.

use mccs_ipc::types::Handle;

use super::sender::Pumped;
use crate::rdma::RdmaTransport;
use crate::rdma::connection::wire;
use crate::rdma::device::queues::Taken;
use crate::rdma::flow::{Half, Stage};
use std::time::Instant;

/// Bytes that one flow posts before others have their turn.
const TURN_BYTES: u64 = 4 << 20;

impl RdmaTransport {
    pub(in crate::rdma) fn enqueue(&mut self, handle: Handle) {
        if let Some(flow) = self.flows.get_mut(handle) {
            self.scheduler.enqueue(handle, flow);
        }
    }

    /// Takes completions of all ports, some or, to drain them, all. Returns whether there were any.
    pub(in crate::rdma) fn take_completions(&mut self, takes_max: usize) -> bool {
        let (mut taken, mut any) = (Taken::NONE, false);
        for port in 0..self.devices.len() {
            for _ in 0..takes_max {
                let Some(queues) = self.devices.queues(port) else { break };
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
                sender.pump(connection, &mut self.memory, self.devices.ports(), TURN_BYTES, is_watched)
            }
            (Half::Recv(receiver), Some(connection)) => {
                receiver.pump(connection, &mut self.memory, self.devices.ports())
            }
            (_, None) => Ok(Pumped::default()),
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
                    self.timers.plan_keepalive(self.now);
                }
                if pumped.withheld {
                    self.withhold(handle);
                }
                if pumped.waits_for_memory
                    && let Some(flow) = self.flows.get_mut(handle)
                {
                    self.scheduler.wait_for_memory(handle, flow);
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
        self.scheduler.withhold(handle, flow, now);
    }

    /// Has credits written that have been withheld for long enough.
    pub(in crate::rdma) fn give_withheld(&mut self, now: Instant) {
        if !self.scheduler.is_withheld_enough(now) {
            return;
        }
        while let Some(handle) = self.scheduler.next_withheld() {
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
            for handle in self.scheduler.take_waiting() {
                let Some(flow) = self.flows.get_mut(handle) else { continue };
                flow.waits_for_memory = false;
                self.enqueue(handle);
            }
        }
        any
    }
}
