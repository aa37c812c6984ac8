//! Data path of connected RDMA flows: post messages and buffers, flush, test, and poll completions.
//!
//! A poll takes completions first, since all else waits for them; then it lets flows post in turn (`send_scheduler.rs`), and looks at what seldom
//! happens when that is due (`wakeup.rs`).

pub(in crate::rdma) mod carrier;
pub(in crate::rdma) mod flusher;
pub(in crate::rdma) mod memory_registration;
pub(in crate::rdma) mod receiver;
pub(in crate::rdma) mod send_scheduler;
pub(in crate::rdma) mod sender;

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::rdma::RdmaTransport;
use crate::rdma::flow::Half;
use crate::rdma::wakeup::Woken;
use crate::{DataPath, FlowId, MemorySpan, RecvFlow, Request, RequestKind, SendFlow, Status, TransportError};
use mccs_runtime::{Context, Progress};

/// Times that a poll takes completions: bounds how long it takes.
const TAKES_MAX: usize = 8;
/// How often memory whose region has gone is looked for while nothing else happens.
const MEMORY_LOOKED_AT_EVERY: Duration = Duration::from_millis(500);

impl DataPath for RdmaTransport {
    fn isend(&mut self, flow: SendFlow, message: MemorySpan, tag: u32) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let flow = self.flows.open_mut(id)?;
        flow.check()?;
        let regions = &mut self.carrier.memory.regions;
        let buffer = regions.resolve(message)?;
        let Half::Send(sender) = &mut flow.half else { return Err(TransportError::NO_FLOW) };
        let number = sender.post(message.key, buffer, tag, regions);
        // At once, not at the next poll: that is what a small message's latency consists of.
        if number.is_some() {
            self.pump(id.0);
        }
        Ok(number.map(|number| Request::message(id, number)))
    }

    fn irecv(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let flow = self.flows.open_mut(id)?;
        flow.check()?;
        let memory = &mut self.carrier.memory;
        let target = memory.regions.resolve(buffer)?;
        let Half::Recv(receiver) = &mut flow.half else { return Err(TransportError::NO_FLOW) };
        if receiver.takes_short() && memory.is_gpu(buffer.key) {
            let problem = "must be off where memory of a GPU is posted".into();
            return Err(TransportError::Option { option: "takes_short", problem });
        }
        let number = receiver.post(buffer.key, target, &mut memory.regions);
        // At the next poll: credits of all that is posted until then go together.
        self.flows.enqueue(id.0);
        Ok(number.map(|number| Request::message(id, number)))
    }

    fn flush(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        // Also once the peer has closed it: what it has sent before is here.
        let flow = self.flows.open(id)?;
        self.carrier.flush(id, flow, buffer)
    }

    fn test(&mut self, request: Request) -> Result<Status, TransportError> {
        let flow = self.flows.open_mut(request.flow)?;
        if request.kind == RequestKind::Flush {
            return self.carrier.test_flush(flow, request.number);
        }
        let status = match &mut flow.half {
            Half::Send(sender) => sender.test(request.number)?,
            Half::Recv(receiver) => receiver.test(request.number)?,
        };
        match (status, flow.fault) {
            (Status::Running { .. }, Some(fault)) => Err(flow.error(fault)),
            (status, _) => Ok(status),
        }
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        self.flows.timers_mut().note(cx.now);
        let mut busy = self.take_completions(TAKES_MAX);
        // A sleep that completions have ended, or somebody who has work, says nothing of control channels and devices.
        let by_others = self.wakeup.take_slept() && cx.is_readable && !busy;
        let is_due = self.wakeup.is_due(cx.now);
        let woken = if by_others || is_due { self.look_at_descriptors(cx.now) } else { Woken::default() };
        self.flows.give_withheld(cx.now);
        if self.carrier.memory.take_pinned() {
            busy = true;
            self.flows.memory_is_pinned();
        }
        for _ in 0..self.flows.queued().min(cx.budget.max(1)) {
            if let Some(handle) = self.flows.next() {
                busy |= self.pump(handle);
            }
        }
        if woken.by_events {
            busy |= self.take_events();
        }
        self.carrier.memory.forget_gone();
        self.carrier.devices.take_ended();
        busy |= self.take_connected(cx.now);
        if woken.by_control || self.flows.timers().has_unsettled() || self.flows.channels().is_due(cx.now) {
            busy |= self.poll_control_channels(cx);
        }
        busy |= self.look_for_devices(cx.now) | self.look_at_unsettled(cx.now);
        busy |= self.failover.return_home(cx.now, &mut self.flows, &mut self.carrier);
        busy |= self.keep_alive(cx.now) | self.flows.let_go(cx.now, &mut self.carrier);
        self.carrier.devices.plan_look(cx.now);
        if busy || self.flows.queued() > 0 || self.flows.channels().is_busy() {
            return Progress::Busy;
        }
        let memory = self.carrier.memory.keeps().then(|| cx.now + MEMORY_LOOKED_AT_EVERY);
        let due = [self.flows.wake_at(), memory, self.carrier.devices.look_at()];
        Progress::Idle { wake_at: due.into_iter().flatten().min() }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        if self.flows.queued() > 0 || !self.flows.channels_mut().prepare_to_sleep() {
            return false;
        }
        for port in 0..self.carrier.devices.len() {
            let Some(queues) = self.carrier.devices.queues(port) else { continue };
            queues.take_events_of_taken();
            let refused = queues.arm().is_err();
            if refused {
                self.lose_port(port);
                return false;
            }
        }
        // Completions before it was armed make no event.
        if self.take_completions(1) {
            return false;
        }
        self.wakeup.sleep();
        true
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wakeup.descriptor())
    }
}
