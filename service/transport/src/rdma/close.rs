//! How flows end: closed here, or there, or failed.
//!
//! A sender that is closed may have messages under way that are done for its user. It *lingers*: unknown to its user, it keeps its
//! control channel and its connection, or finds another one, until the peer has those messages. Then it says how many there are, and hangs up. It lingers no
//! longer than a flow may be silent.
//!
//! A receiver that is closed says how many messages have come, and hangs up. That may be heard before a device tells the sender that the last
//! ones have arrived, which then no device does any more.

use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;

use crate::Fault;
use crate::rdma::RdmaTransport;
use crate::rdma::connection::wire::Record;
use crate::rdma::flow::{Half, Stage};

/// How long messages that have gone may take to come when their sender has closed.
const LAST_MESSAGES: Duration = Duration::from_secs(1);

impl RdmaTransport {
    /// Closes a flow whose messages are to arrive. Its buffers are free when this returns. Returns whether there are such messages.
    pub(in crate::rdma) fn linger(&mut self, handle: Handle) -> bool {
        let (Some(flow), Some(now)) = (self.flows.get_mut(handle), self.now) else { return false };
        let Half::Send(sender) = &mut flow.half else { return false };
        if flow.fault.is_some() || !flow.is_connected {
            return false;
        }
        let reads_buffers = sender.close(&mut self.memory.regions);
        if !sender.has_unfinished() {
            return false;
        }
        flow.lingers_until = Some(now + flow.spec.options.silence_timeout);
        self.timers.linger(handle);
        if reads_buffers && flow.stage == Stage::Open {
            // On the next connection they are not written.
            flow.stage = Stage::Broken;
            self.end_connection(handle);
            self.settle_by(handle, Some(now));
        }
        self.enqueue(handle);
        true
    }

    /// Lets flows go that have lingered until all has arrived, or for long enough. Returns whether there were any.
    pub(in crate::rdma) fn let_go(&mut self, now: Instant) -> bool {
        let flows = &self.flows;
        let over = self.timers.take_lingering(|handle| {
            flows.get(handle).is_none_or(|flow| {
                let waits = matches!(&flow.half, Half::Send(sender) if sender.has_unfinished());
                !waits || flow.fault.is_some() || flow.lingers_until.is_none_or(|until| until <= now)
            })
        });
        over.iter().for_each(|handle| self.forget(*handle));
        !over.is_empty()
    }

    /// Ends a flow, and says so to the peer.
    pub(in crate::rdma) fn forget(&mut self, handle: Handle) {
        self.say_bye(handle);
        self.end(handle);
        self.flows.remove(handle);
    }

    /// The control channel has ended. What the peer's device has written counts, and so does what it said was to come, or had come.
    pub(in crate::rdma) fn hung_up(&mut self, handle: Handle, fault: Fault, now: Instant) {
        while self.take_completions(usize::MAX) {}
        let Some(flow) = self.flows.get_mut(handle) else { return };
        match (&mut flow.half, flow.bye) {
            (Half::Send(sender), Some(come)) => {
                sender.have_come(come, &mut self.memory.regions);
                self.fail(handle, fault);
            }
            (Half::Recv(receiver), Some(sent))
                if fault == Fault::Closed && (receiver.received() < sent || receiver.has_stash()) =>
            {
                let due = (receiver.received() < sent).then(|| now + LAST_MESSAGES);
                flow.is_hung_up = true;
                self.settle_by(handle, due);
            }
            _ => self.fail(handle, fault),
        }
    }

    fn say_bye(&mut self, handle: Handle) {
        let Some(flow) = self.flows.get(handle).filter(|flow| flow.fault.is_none() && flow.is_connected) else {
            return;
        };
        let messages = match &flow.half {
            Half::Send(sender) => sender.done(),
            Half::Recv(receiver) => receiver.received(),
        };
        self.say(handle, Record::Bye { messages });
    }

    /// Whether a receiver has come to its end: a message that it cannot take, or the last one that its sender had.
    pub(in crate::rdma) fn check_end(&mut self, handle: Handle) {
        let Some(flow) = self.flows.get(handle) else { return };
        let Half::Recv(receiver) = &flow.half else { return };
        if let Some(fault) = receiver.refused() {
            self.fail(handle, fault);
        } else if flow.is_hung_up && flow.bye.is_some_and(|sent| receiver.received() >= sent) && !receiver.has_stash() {
            self.fail(handle, Fault::Closed);
        }
    }

    /// Ends a flow's queue pairs and lets its buffers go; it stays in the table and says why.
    pub(in crate::rdma) fn fail(&mut self, handle: Handle, fault: Fault) {
        if let Some(flow) = self.flows.get_mut(handle).filter(|flow| flow.fault.is_none()) {
            flow.fault = Some(fault);
            let (peer, number, connection) = (&flow.spec.peer, flow.spec.number, flow.connection_number);
            // Peers are told no more than that it has ended: this is where it is said why.
            if matches!(fault, Fault::QueuePair { .. } | Fault::PeerQueuePair { .. } | Fault::Protocol(_)) {
                tracing::warn!(peer, flow = number, connection, %fault, "a flow has failed");
            }
        }
        self.end(handle);
    }

    fn end(&mut self, handle: Handle) {
        self.end_connection(handle);
        let Some(flow) = self.flows.get_mut(handle) else { return };
        (flow.due, flow.home_at) = (None, None);
        match &mut flow.half {
            Half::Send(sender) => sender.abandon(&mut self.memory.regions),
            Half::Recv(receiver) => receiver.abandon(&mut self.memory.regions),
        }
        self.channels.end(&mut flow.control);
    }
}
