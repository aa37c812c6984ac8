//! What engines do with connected flows: they post messages and buffers, flush what GPUs are to see, test, and poll.
//!
//! A poll takes completions first, since all else waits for them; then it lets flows post in turn (`send_scheduler.rs`), and looks at what seldom
//! happens when that is due (`wakeup.rs`).

pub(in crate::rdma) mod flusher;
pub(in crate::rdma) mod memory;
pub(in crate::rdma) mod receiver;
pub(in crate::rdma) mod send_scheduler;
pub(in crate::rdma) mod sender;
mod turn;

use std::os::fd::BorrowedFd;

use crate::rdma::flow::Half;
use crate::rdma::wakeup::Woken;
use crate::rdma::{RdmaTransport, open};
use crate::{DataPath, Fault, FlowId, MemorySpan, RecvFlow, Request, RequestKind, SendFlow, Status, TransportError};
use mccs_runtime::{Context, Progress};

/// Times that a poll takes completions: bounds how long it takes.
const TAKES_MAX: usize = 8;
/// A flush's number is its read's, and above it the port's.
const FLUSH_PORT_SHIFT: u32 = 56;

impl DataPath for RdmaTransport {
    fn isend(&mut self, flow: SendFlow, message: MemorySpan, tag: u32) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let flow = open(&mut self.flows, id)?;
        flow.check()?;
        let buffer = self.memory.regions.resolve(message)?;
        let Half::Send(sender) = &mut flow.half else { return Err(TransportError::NO_FLOW) };
        let number = sender.post(message.key, buffer, tag, &mut self.memory.regions);
        // At once, not at the next poll: that is what a small message's latency consists of.
        if number.is_some() {
            self.pump(id.0);
        }
        Ok(number.map(|number| Request::message(id, number)))
    }

    fn irecv(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let flow = open(&mut self.flows, id)?;
        flow.check()?;
        let target = self.memory.regions.resolve(buffer)?;
        let Half::Recv(receiver) = &mut flow.half else { return Err(TransportError::NO_FLOW) };
        if receiver.takes_short() && self.memory.is_gpu(buffer.key) {
            let problem = "must be off where memory of a GPU is posted".into();
            return Err(TransportError::Option { option: "takes_short", problem });
        }
        let number = receiver.post(buffer.key, target, &mut self.memory.regions);
        // At the next poll: credits of all that is posted until then go together.
        self.enqueue(id.0);
        Ok(number.map(|number| Request::message(id, number)))
    }

    /// Done at once for host memory: what a device writes there is visible when its completion is. A GPU's is read.
    fn flush(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let flow = open(&mut self.flows, id)?;
        flow.check()?;
        let target = self.memory.regions.resolve(buffer)?;
        let port = flow.connection.as_ref().map_or(0, |connection| connection.port);
        let done = Some(Request::flushed(id));
        if target.bytes == 0 || !self.memory.is_gpu(buffer.key) {
            return Ok(done);
        }
        let Some(keys) = self.memory.keys(buffer.key, port, self.devices.ports())? else { return Ok(None) };
        let (address, _) = target.part(0, 1);
        let read = self.devices.flush(port, address as u64, keys.rkey).map_err(|fault| flow.error(fault))?;
        let number = |read| (port as u64) << FLUSH_PORT_SHIFT | read;
        Ok(read.map(|read| Request { flow: id, kind: RequestKind::Flush, number: number(read) }))
    }

    fn test(&mut self, request: Request) -> Result<Status, TransportError> {
        let flow = open(&mut self.flows, request.flow)?;
        if request.kind == RequestKind::Flush {
            let port = (request.number >> FLUSH_PORT_SHIFT) as usize;
            let read = request.number & ((1 << FLUSH_PORT_SHIFT) - 1);
            return match self.devices.is_flushed(port, read) {
                _ if read == 0 => Ok(Status::FLUSHED),
                Some(true) => Ok(Status::FLUSHED),
                Some(false) => flow.check().map(|()| Status::Running { bytes: 0 }),
                None => Err(flow.error(Fault::NoPort)),
            };
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
        self.now = Some(cx.now);
        let mut busy = self.take_completions(TAKES_MAX);
        // A sleep that completions have ended, or somebody who has work, says nothing of control channels and devices.
        let by_others = self.wakeup.take_slept() && cx.is_readable && !busy;
        let is_due = self.wakeup.is_due(cx.now);
        let woken = if by_others || is_due { self.look_at_descriptors(cx.now) } else { Woken::default() };
        self.give_withheld(cx.now);
        busy |= self.take_pinned();
        for _ in 0..self.scheduler.len().min(cx.budget.max(1)) {
            let Some(handle) = self.scheduler.next() else { break };
            if let Some(flow) = self.flows.get_mut(handle) {
                flow.is_queued = false;
                busy |= self.pump(handle);
            }
        }
        if woken.by_events {
            busy |= self.take_events();
        }
        self.memory.forget_gone();
        busy |= self.take_connected(cx.now);
        if woken.by_control || self.timers.has_unsettled() || self.channels.is_due(cx.now) {
            busy |= self.poll_control_channels(cx);
        }
        busy |= self.look_for_devices(cx.now) | self.look_at_unsettled(cx.now) | self.return_home(cx.now);
        busy |= self.keep_alive(cx.now) | self.let_go(cx.now);
        self.devices.plan_look(cx.now);
        if busy || !self.scheduler.is_empty() || self.channels.is_busy() {
            Progress::Busy
        } else {
            Progress::Idle { wake_at: self.waits_until(cx.now) }
        }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        if !self.scheduler.is_empty() || !self.channels.prepare_to_sleep() {
            return false;
        }
        for port in 0..self.devices.len() {
            let Some(queues) = self.devices.queues(port) else { continue };
            queues.take_events_of_taken();
            let refused = queues.arm().is_err();
            if refused {
                self.lose_port(port);
                return false;
            }
        }
        // What came before it was armed makes no event.
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
