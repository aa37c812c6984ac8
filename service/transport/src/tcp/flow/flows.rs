//! Table of TCP flows: whose turn it is, and the memory that they send from and receive into.
//!
//! Sockets are watched by [`Watches`], and flows only name their watches: what ends a socket returns its watch, for the transport to
//! forget.

use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use mccs_model::handles::HandleTable;

use super::queues::FlowQueues;
use super::sender::{Sender, Settled};
use super::{Flow, Half, Pumped};
use crate::region::Regions;
use crate::tcp::accept::port::{refuse, welcome};
use crate::tcp::socket::Socket;
use crate::tcp::watches::{Watched, Watches};
use crate::tcp::wire::{Hello, Verdict};
use crate::{FLOWS_MAX, Fault, FlowId, MemorySpan, RecvFlow, Request, RequestKind, SendFlow, Status, TransportError};

/// Bytes that one flow moves before others have their turn: enough to make the turn's own cost vanish.
const TURN_BYTES: u64 = 1 << 20;
/// Flows that are asked for their acknowledgements in a poll.
const SETTLED_MAX: usize = 32;

/// Remains of a flow that has ended.
#[derive(Debug, Default)]
pub(in crate::tcp) struct Left {
    /// Watches of its sockets.
    pub(in crate::tcp) watches: Vec<Handle>,
    /// The listener that accepted it, and its number there.
    pub(in crate::tcp) accepted: Option<(Handle, u64)>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::tcp) struct Flows {
    table: HandleTable<Flow>,
    queues: FlowQueues,
    regions: Regions,
    /// Flows that were closed, and live until all is acknowledged.
    lingering: usize,
}

impl Flows {
    /// No flows yet.
    pub(in crate::tcp) fn new() -> Self {
        let (table, regions) = (HandleTable::new(FLOWS_MAX), Regions::new());
        Flows { table, queues: FlowQueues::default(), regions, lingering: 0 }
    }

    /// The memory that is registered.
    pub(in crate::tcp) fn regions(&self) -> &Regions {
        &self.regions
    }

    pub(in crate::tcp) fn regions_mut(&mut self) -> &mut Regions {
        &mut self.regions
    }

    pub(in crate::tcp) fn get(&self, handle: Handle) -> Option<&Flow> {
        self.table.get(handle)
    }

    pub(in crate::tcp) fn get_mut(&mut self, handle: Handle) -> Option<&mut Flow> {
        self.table.get_mut(handle)
    }

    /// The flow's sender, unless it has failed or is another half.
    pub(in crate::tcp) fn sender_mut(&mut self, handle: Handle) -> Option<&mut Sender> {
        match self.table.get_mut(handle)? {
            Flow { half: Half::Send(sender), fault: None, .. } => Some(sender),
            _ => None,
        }
    }

    /// Shows all senders that have not failed, each with how long its peer may be silent.
    pub(in crate::tcp) fn each_sender(&mut self, mut each: impl FnMut(Handle, Duration, &mut Sender, &mut Regions)) {
        for (handle, flow) in self.table.iter_mut().filter(|(_, flow)| flow.fault.is_none()) {
            if let Half::Send(sender) = &mut flow.half {
                each(handle, flow.silence_timeout, sender, &mut self.regions);
            }
        }
    }

    /// Number of flows, those that linger among them.
    pub(in crate::tcp) fn len(&self) -> usize {
        self.table.len()
    }

    /// Number of flows that linger.
    pub(in crate::tcp) fn lingering(&self) -> usize {
        self.lingering
    }

    /// Adds a flow. `None`: there are too many.
    pub(in crate::tcp) fn add(&mut self, flow: Flow) -> Option<Handle> {
        let share = flow.share;
        let handle = self.table.insert(flow).ok()?;
        // A flow is in the queue at most once (and closed ones until their turn), so that the data path does not allocate.
        self.queues.reserve(share, self.table.len());
        Some(handle)
    }

    pub(in crate::tcp) fn remove(&mut self, handle: Handle) {
        self.table.remove(handle);
    }

    /// From here on it keeps news.
    pub(in crate::tcp) fn keep_news(&mut self) {
        self.queues.keep_news();
    }

    /// A flow that has connected, moved or failed since it was told last.
    pub(in crate::tcp) fn take_news(&mut self) -> Option<FlowId> {
        let handle = self.queues.next_news()?;
        if let Some(flow) = self.table.get_mut(handle) {
            flow.is_news = false;
        }
        Some(FlowId(handle))
    }

    /// Something has happened to a flow.
    pub(in crate::tcp) fn tell(&mut self, handle: Handle) {
        if let Some(flow) = self.table.get_mut(handle) {
            self.queues.tell(handle, flow);
        }
    }

    /// A flow has something to do.
    pub(in crate::tcp) fn enqueue(&mut self, handle: Handle) {
        if let Some(flow) = self.table.get_mut(handle) {
            self.queues.enqueue(handle, flow);
        }
    }

    /// Number of flows with something to do.
    pub(in crate::tcp) fn queued(&self) -> usize {
        self.queues.len()
    }

    /// The flow whose turn it is; `None` also for one that was closed meanwhile.
    pub(in crate::tcp) fn next(&mut self) -> Option<Handle> {
        let handle = self.queues.next()?;
        self.table.get_mut(handle)?.queued = false;
        Some(handle)
    }

    /// Posts a send. `None`: as many are unfinished as may be.
    pub(in crate::tcp) fn post_send(
        &mut self,
        flow: SendFlow,
        message: MemorySpan,
        tag: u32,
    ) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let flow = self.table.get_mut(id.0).ok_or(TransportError::NO_FLOW)?;
        flow.check()?;
        let buffer = self.regions.resolve(message)?;
        let Half::Send(sender) = &mut flow.half else { return Err(TransportError::NO_FLOW) };
        let number = sender.post(message.key, buffer, tag, &mut self.regions);
        Ok(number.map(|number| Request::message(id, number)))
    }

    /// Posts a receive. `None`: as many are unfinished as may be.
    pub(in crate::tcp) fn post_receive(
        &mut self,
        flow: RecvFlow,
        buffer: MemorySpan,
    ) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let flow = self.table.get_mut(id.0).ok_or(TransportError::NO_FLOW)?;
        flow.check()?;
        let target = self.regions.resolve(buffer)?;
        let Half::Recv(receiver) = &mut flow.half else { return Err(TransportError::NO_FLOW) };
        let number = receiver.post(buffer.key, target, &mut self.regions);
        // Bytes that have come wait for this buffer.
        self.queues.enqueue(id.0, flow);
        Ok(number.map(|number| Request::message(id, number)))
    }

    /// How far a request is.
    pub(in crate::tcp) fn test(&mut self, request: Request) -> Result<Status, TransportError> {
        let flow = self.table.get_mut(request.flow.0).ok_or(TransportError::NO_FLOW)?;
        if request.kind == RequestKind::Flush {
            return Ok(Status::FLUSHED);
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

    /// Lets a flow work. `None`: it has failed, or is not there.
    pub(in crate::tcp) fn pump(&mut self, handle: Handle) -> Option<Result<Pumped, Fault>> {
        let flow = self.table.get_mut(handle).filter(|flow| flow.fault.is_none())?;
        let pumped = match &mut flow.half {
            Half::Send(sender) => sender.pump(TURN_BYTES, &mut self.regions),
            Half::Recv(receiver) => receiver.pump(TURN_BYTES, &mut self.regions),
        };
        let mut pumped = match pumped {
            Ok(pumped) => pumped,
            Err(fault) => return Some(Err(fault)),
        };
        let goes_on = take_successors(flow);
        pumped.moved |= goes_on;
        // Bytes on the new sockets may have come before anybody watched for them.
        if pumped.more || goes_on {
            self.queues.enqueue(handle, flow);
        }
        if pumped.is_unsettled {
            self.queues.await_settling(handle, flow);
        }
        if pumped.moved {
            self.queues.tell(handle, flow);
        }
        Some(Ok(pumped))
    }

    /// Number of senders whose messages wait for acknowledgements.
    pub(in crate::tcp) fn unsettled(&self) -> usize {
        self.queues.unsettled()
    }

    /// Ends messages that were acknowledged, or need to wait no longer; without a time, all that can be ended. Returns whether it did.
    pub(in crate::tcp) fn settle(&mut self, now: Option<Instant>) -> bool {
        let mut any = false;
        for _ in 0..self.queues.unsettled().min(SETTLED_MAX) {
            let Some(handle) = self.queues.next_unsettled() else { break };
            let Some(flow) = self.table.get_mut(handle) else { continue };
            let Half::Send(sender) = &mut flow.half else { continue };
            let Settled { has_moved, is_left } = sender.settle(now, &mut self.regions);
            flow.is_unsettled = is_left;
            if is_left {
                self.queues.still_unsettled(handle);
            }
            if has_moved {
                any = true;
                self.queues.tell(handle, flow);
            }
        }
        any
    }

    /// A connection goes on with a flow that is connected, as soon as that has room for what its old one has brought. Returns whether it
    /// is wanted; one that is not was refused.
    pub(in crate::tcp) fn resume(&mut self, handle: Handle, hello: &Hello, socket: Socket, watch: Handle) -> bool {
        match self.table.get_mut(handle) {
            Some(Flow { half: Half::Recv(receiver), fault: None, accepted_with: Some(_), .. }) => {
                receiver.go_on_with(hello, socket, watch)
            }
            _ => {
                refuse(&socket, Verdict::Taken);
                false
            }
        }
    }

    /// A flow has failed: it stays in the table and says why. The transport ends its sockets.
    pub(in crate::tcp) fn fail(&mut self, handle: Handle, fault: Fault) {
        let Some(flow) = self.table.get_mut(handle) else { return };
        if let (Half::Send(sender), None) = (&mut flow.half, flow.fault) {
            sender.finish_written(&mut self.regions);
        }
        flow.fault.get_or_insert(fault);
        self.queues.tell(handle, flow);
    }

    /// Ends a flow's sockets and lets its buffers go.
    pub(in crate::tcp) fn end(&mut self, handle: Handle) -> Left {
        let Some(flow) = self.table.get_mut(handle) else { return Left::default() };
        flow.waiting = None;
        let accepted = flow.listener.take().map(|listener| (listener, flow.number));
        let watches = match &mut flow.half {
            Half::Send(sender) => sender.end(&mut self.regions),
            Half::Recv(receiver) => receiver.end(&mut self.regions),
        };
        Left { watches, accepted }
    }

    /// A flow's user closes it. Returns whether it lives on, under a name that nobody knows, until what its completed sends have handed
    /// over is acknowledged: it might have to be sent again.
    pub(in crate::tcp) fn linger(&mut self, handle: Handle, watches: &mut Watches) -> bool {
        let Some(flow) = self.table.get_mut(handle).filter(|flow| flow.fault.is_none()) else { return false };
        let Half::Send(sender) = &mut flow.half else { return false };
        if !sender.begin_to_linger(&mut self.regions) {
            return false;
        }
        let Some(mut flow) = self.table.remove(handle) else { return false };
        (flow.queued, flow.is_news, flow.is_unsettled, flow.lingers) = (false, false, false, true);
        let Ok(new) = self.table.insert(flow) else { return true };
        self.lingering += 1;
        if let Some(Flow { half: Half::Send(sender), .. }) = self.table.get(new) {
            for (connection, watch) in sender.watches() {
                watches.change(watch, Watched::Connection { flow: new, connection });
            }
        }
        true
    }

    /// A flow has ended: nothing is kept of one that lingered.
    pub(in crate::tcp) fn forget_lingering(&mut self, handle: Handle) {
        if self.table.get(handle).is_some_and(|flow| flow.lingers) {
            self.table.remove(handle);
            self.lingering = self.lingering.saturating_sub(1);
        }
    }

    /// Handles of all flows.
    #[cfg(test)]
    pub(in crate::tcp) fn handles(&self) -> impl Iterator<Item = Handle> {
        self.table.iter().map(|(handle, _)| handle)
    }
}

/// Takes the sockets that a receiver is to go on with, where it has room. Returns whether it did.
fn take_successors(flow: &mut Flow) -> bool {
    let Flow { half: Half::Recv(receiver), accepted_with: Some(options), .. } = flow else { return false };
    receiver.take_successors(|socket, received| welcome(socket, options, Some(received)))
}
