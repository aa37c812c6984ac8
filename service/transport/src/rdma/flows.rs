//! Table of RDMA flows: control channels, turns, deadlines, and how flows end.
//!
//! A sender that is closed may have messages under way that are done for its user. It *lingers*: unknown to its user, it keeps its
//! control channel and its connection, or finds another one, until the peer has those messages. Then it says how many there are, and hangs up. It lingers no
//! longer than a flow may be silent.
//!
//! A receiver that is closed says how many messages have come, and hangs up. That may be heard before a device tells the sender that the last
//! ones have arrived, which then no device does any more.

use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use mccs_model::handles::HandleTable;

use crate::rdma::connection::control_channels::ControlChannels;
use crate::rdma::connection::wire::Record;
use crate::rdma::data_path::carrier::Carrier;
use crate::rdma::data_path::send_scheduler::SendScheduler;
use crate::rdma::data_path::sender::Pumped;
use crate::rdma::flow::{Flow, Half, Stage};
use crate::rdma::timers::Timers;
use crate::{FLOWS_MAX, Fault, FlowId, FlowSpec, ListenerHandle, TransportError};

/// How long messages that have gone may take to come when their sender has closed.
const LAST_MESSAGES: Duration = Duration::from_secs(1);

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct Flows {
    /// In front of the flows: it knows memory of theirs.
    channels: ControlChannels,
    table: HandleTable<Flow>,
    scheduler: SendScheduler,
    timers: Timers,
}

impl Flows {
    /// No flows yet.
    ///
    /// # Errors
    /// The kernel refuses a descriptor.
    pub(in crate::rdma) fn new() -> Result<Self, TransportError> {
        let (channels, table) = (ControlChannels::new()?, HandleTable::new(FLOWS_MAX));
        Ok(Flows { channels, table, scheduler: SendScheduler::default(), timers: Timers::default() })
    }

    pub(in crate::rdma) fn channels(&self) -> &ControlChannels {
        &self.channels
    }

    pub(in crate::rdma) fn channels_mut(&mut self) -> &mut ControlChannels {
        &mut self.channels
    }

    pub(in crate::rdma) fn timers(&self) -> &Timers {
        &self.timers
    }

    pub(in crate::rdma) fn timers_mut(&mut self) -> &mut Timers {
        &mut self.timers
    }

    pub(in crate::rdma) fn get(&self, handle: Handle) -> Option<&Flow> {
        self.table.get(handle)
    }

    pub(in crate::rdma) fn get_mut(&mut self, handle: Handle) -> Option<&mut Flow> {
        self.table.get_mut(handle)
    }

    /// A flow that its user has not closed.
    pub(in crate::rdma) fn open(&self, id: FlowId) -> Result<&Flow, TransportError> {
        self.table.get(id.0).filter(|flow| flow.lingers_until.is_none()).ok_or(TransportError::NO_FLOW)
    }

    /// The same, to be changed.
    pub(in crate::rdma) fn open_mut(&mut self, id: FlowId) -> Result<&mut Flow, TransportError> {
        self.table.get_mut(id.0).filter(|flow| flow.lingers_until.is_none()).ok_or(TransportError::NO_FLOW)
    }

    pub(in crate::rdma) fn iter(&self) -> impl Iterator<Item = (Handle, &Flow)> {
        self.table.iter()
    }

    pub(in crate::rdma) fn iter_mut(&mut self) -> impl Iterator<Item = (Handle, &mut Flow)> {
        self.table.iter_mut()
    }

    /// Flows that their users have not closed.
    pub(in crate::rdma) fn len(&self) -> usize {
        self.table.len() - self.timers.lingering()
    }

    /// Adds a flow.
    ///
    /// # Errors
    /// There are too many.
    pub(in crate::rdma) fn add(&mut self, flow: Flow) -> Result<Handle, TransportError> {
        match self.table.insert(flow) {
            Ok(handle) => {
                if let Some(flow) = self.table.get(handle) {
                    self.channels.own(&flow.control, handle);
                    self.scheduler.reserve(flow.spec.options.share, self.table.len());
                }
                Ok(handle)
            }
            Err(mut flow) => {
                self.channels.end(&mut flow.control);
                Err(TransportError::TOO_MANY_FLOWS)
            }
        }
    }

    /// A flow has something to do.
    pub(in crate::rdma) fn enqueue(&mut self, handle: Handle) {
        if let Some(flow) = self.table.get_mut(handle) {
            self.scheduler.enqueue(handle, flow);
        }
    }

    /// Number of flows whose turn comes in a poll; those that come meanwhile have theirs in the next one.
    pub(in crate::rdma) fn queued(&self) -> usize {
        self.scheduler.len()
    }

    /// The flow whose turn it is; `None` also for one that is no more.
    pub(in crate::rdma) fn next(&mut self) -> Option<Handle> {
        let handle = self.scheduler.next()?;
        self.table.get_mut(handle)?.is_queued = false;
        Some(handle)
    }

    /// A flow has had its turn: sees to what it waits for now.
    pub(in crate::rdma) fn pumped(&mut self, handle: Handle, pumped: &Pumped) {
        let now = self.timers.now();
        if pumped.moved {
            self.timers.plan_keepalive(now);
        }
        let Some(flow) = self.table.get_mut(handle) else { return };
        if let Some((message, bytes)) = pumped.too_long {
            self.channels.say(&mut flow.control, Record::TooLong { message, bytes });
        }
        if pumped.more {
            self.scheduler.enqueue(handle, flow);
        }
        if pumped.withheld
            && let Some(now) = now
        {
            self.scheduler.withhold(handle, flow, now);
        }
        if pumped.waits_for_memory {
            self.scheduler.wait_for_memory(handle, flow);
        }
    }

    /// Has credits written that have been withheld for long enough.
    pub(in crate::rdma) fn give_withheld(&mut self, now: Instant) {
        if !self.scheduler.is_withheld_enough(now) {
            return;
        }
        while let Some(handle) = self.scheduler.next_withheld() {
            let Some(flow) = self.table.get_mut(handle) else { continue };
            flow.is_withheld = false;
            if let Half::Recv(receiver) = &mut flow.half {
                receiver.give();
            }
            self.scheduler.enqueue(handle, flow);
        }
    }

    /// Memory has been pinned: flows that may have waited for it go on.
    pub(in crate::rdma) fn memory_is_pinned(&mut self) {
        for handle in self.scheduler.take_waiting() {
            let Some(flow) = self.table.get_mut(handle) else { continue };
            flow.waits_for_memory = false;
            self.scheduler.enqueue(handle, flow);
        }
    }

    /// A flow has to be looked at when this has passed.
    pub(in crate::rdma) fn settle_by(&mut self, handle: Handle, due: Option<Instant>) {
        if let Some(flow) = self.table.get_mut(handle) {
            self.timers.settle_by(handle, flow, due);
        }
    }

    /// Flows whose deadline has passed. They are settled from here on.
    pub(in crate::rdma) fn take_due(&mut self, now: Instant) -> Vec<Handle> {
        self.timers.take_due(&mut self.table, now)
    }

    /// A flow goes home then.
    pub(in crate::rdma) fn go_home_at(&mut self, handle: Handle, at: Instant) {
        if let Some(flow) = self.table.get_mut(handle) {
            self.timers.go_home_at(flow, at);
        }
    }

    /// Flows that are to go home now.
    pub(in crate::rdma) fn take_going_home(&mut self, now: Instant) -> Vec<Handle> {
        self.timers.take_going_home(&self.table, now)
    }

    /// When the next of all flows is to be looked at.
    pub(in crate::rdma) fn wake_at(&self) -> Option<Instant> {
        let due = [self.timers.wake_at(&self.table), self.scheduler.withheld_until(), self.channels.wake_at()];
        due.into_iter().flatten().min()
    }

    /// Says something to the peer; a control channel that has ended is heard of elsewhere.
    pub(in crate::rdma) fn say(&mut self, handle: Handle, record: Record) {
        if let Some(flow) = self.table.get_mut(handle) {
            self.channels.say(&mut flow.control, record);
        }
    }

    /// Takes a record that a flow's peer has said; `None` also for a flow that has ended.
    ///
    /// # Errors
    /// The control channel has ended.
    pub(in crate::rdma) fn hear(&mut self, handle: Handle) -> Result<Option<Record>, TransportError> {
        match self.table.get_mut(handle).filter(|flow| flow.fault.is_none() && !flow.is_hung_up) {
            Some(flow) => self.channels.hear(&mut flow.control),
            None => Ok(None),
        }
    }

    /// Address to which the receiver comes back; after the first time that means nothing.
    pub(in crate::rdma) fn await_return(
        &mut self,
        handle: Handle,
        now: Instant,
    ) -> Result<(Vec<u8>, u64), TransportError> {
        let flow = self.table.get_mut(handle).ok_or(TransportError::NO_FLOW)?;
        if flow.connection_number > 1 {
            return Ok((Vec::new(), 0));
        }
        self.channels.await_return(&mut flow.control, handle, &flow.spec, now)
    }

    /// A receiver comes back to its sender's listener.
    pub(in crate::rdma) fn call_back(
        &mut self,
        handle: Handle,
        listener: &ListenerHandle,
        number: u64,
        now: Instant,
    ) -> Result<(), TransportError> {
        let flow = self.table.get_mut(handle).ok_or(TransportError::NO_FLOW)?;
        let spec = FlowSpec { number, ..flow.spec.clone() };
        self.channels.call_back(&mut flow.control, handle, listener, &spec, now)
    }

    /// Closes a flow whose messages are to arrive. Its buffers are free when this returns. Returns whether there are such messages.
    pub(in crate::rdma) fn linger(&mut self, handle: Handle, carrier: &mut Carrier) -> bool {
        let (Some(flow), Some(now)) = (self.table.get_mut(handle), self.timers.now()) else { return false };
        let Half::Send(sender) = &mut flow.half else { return false };
        if flow.fault.is_some() || !flow.is_connected {
            return false;
        }
        let reads_buffers = sender.close(&mut carrier.memory.regions);
        if !sender.has_unfinished() {
            return false;
        }
        flow.lingers_until = Some(now + flow.spec.options.silence_timeout);
        self.timers.linger(handle);
        if reads_buffers && flow.stage == Stage::Open {
            // On the next connection they are not written.
            flow.stage = Stage::Broken;
            carrier.end_connection(flow);
            self.timers.settle_by(handle, flow, Some(now));
        }
        self.scheduler.enqueue(handle, flow);
        true
    }

    /// Lets flows go that have lingered until all has arrived, or for long enough. Returns whether there were any.
    pub(in crate::rdma) fn let_go(&mut self, now: Instant, carrier: &mut Carrier) -> bool {
        let flows = &self.table;
        let over = self.timers.take_lingering(|handle| {
            flows.get(handle).is_none_or(|flow| {
                let waits = matches!(&flow.half, Half::Send(sender) if sender.has_unfinished());
                !waits || flow.fault.is_some() || flow.lingers_until.is_none_or(|until| until <= now)
            })
        });
        over.iter().for_each(|handle| self.forget(*handle, carrier));
        !over.is_empty()
    }

    /// Ends a flow, and says so to the peer.
    pub(in crate::rdma) fn forget(&mut self, handle: Handle, carrier: &mut Carrier) {
        if let Some(flow) = self.table.get_mut(handle).filter(|flow| flow.fault.is_none() && flow.is_connected) {
            let messages = match &flow.half {
                Half::Send(sender) => sender.done(),
                Half::Recv(receiver) => receiver.received(),
            };
            self.channels.say(&mut flow.control, Record::Bye { messages });
        }
        let idle = self.table.get_mut(handle).filter(|flow| flow.is_idle());
        let connection = idle.and_then(|flow| flow.connection.take());
        self.end(handle, carrier);
        if let (Some(flow), Some(connection)) = (self.table.remove(handle), connection) {
            carrier.devices.end_connection_aside(flow.spec.options.share, connection, flow.half);
        }
    }

    /// A flow's control channel has ended. The peer's word that something was to come, or had come, counts. Fails it, unless that is
    /// still to come.
    pub(in crate::rdma) fn hung_up(&mut self, handle: Handle, fault: Fault, now: Instant, carrier: &mut Carrier) {
        let Some(flow) = self.table.get_mut(handle) else { return };
        match (&mut flow.half, flow.bye) {
            (Half::Send(sender), Some(come)) => {
                sender.have_come(come, &mut carrier.memory.regions);
                self.fail(handle, fault, carrier);
            }
            (Half::Recv(receiver), Some(sent))
                if fault == Fault::Closed && (receiver.received() < sent || receiver.has_stash()) =>
            {
                let due = (receiver.received() < sent).then(|| now + LAST_MESSAGES);
                flow.is_hung_up = true;
                self.timers.settle_by(handle, flow, due);
            }
            _ => self.fail(handle, fault, carrier),
        }
    }

    /// Ends a receiver that has come to its end: a message that it cannot take, or the last one that its sender had.
    pub(in crate::rdma) fn check_end(&mut self, handle: Handle, carrier: &mut Carrier) {
        let Some(flow) = self.table.get(handle) else { return };
        let Half::Recv(receiver) = &flow.half else { return };
        if let Some(fault) = receiver.refused() {
            self.fail(handle, fault, carrier);
        } else if flow.is_hung_up && flow.bye.is_some_and(|sent| receiver.received() >= sent) && !receiver.has_stash() {
            self.fail(handle, Fault::Closed, carrier);
        }
    }

    /// Ends a flow's queue pairs and lets its buffers go; it stays in the table and says why.
    pub(in crate::rdma) fn fail(&mut self, handle: Handle, fault: Fault, carrier: &mut Carrier) {
        if let Some(flow) = self.table.get_mut(handle).filter(|flow| flow.fault.is_none()) {
            flow.fault = Some(fault);
            let (peer, number, connection) = (&flow.spec.peer, flow.spec.number, flow.connection_number);
            // Peers are told no more than that it has ended: this is where it is said why.
            if matches!(fault, Fault::QueuePair { .. } | Fault::PeerQueuePair { .. } | Fault::Protocol(_)) {
                tracing::warn!(peer, flow = number, connection, %fault, "a flow has failed");
            }
        }
        self.end(handle, carrier);
    }

    fn end(&mut self, handle: Handle, carrier: &mut Carrier) {
        let Some(flow) = self.table.get_mut(handle) else { return };
        (flow.due, flow.home_at) = (None, None);
        carrier.release(flow);
        self.channels.end(&mut flow.control);
    }
}
