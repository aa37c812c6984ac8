//! Devices and registered memory together, as flows use them to connect and to carry bytes.
//!
//! Both of a flow's connections and of its bytes need the two at once. Faults are returned, for `failover/` to judge.

use mccs_ipc::types::Handle;

use super::memory_registration::Memory;
use super::sender::Pumped;
use crate::rdma::connection::{Connection, Owner, Shape};
use crate::rdma::device::Devices;
use crate::rdma::flow::{Flow, Half, Stage};
use crate::rdma::verbs::{Completion, FLUSHED, WcStatus};
use crate::{Fault, FlowId, MemorySpan, Request, RequestKind, Status, TransportError};

/// Bytes that one flow posts before others have their turn.
const TURN_BYTES: u64 = 4 << 20;
/// A flush's number is its read's, and above it the port's.
const FLUSH_PORT_SHIFT: u32 = 56;

/// See the module's documentation. Each of the two owns its state.
#[derive(Debug)]
pub(in crate::rdma) struct Carrier {
    pub(in crate::rdma) devices: Devices,
    pub(in crate::rdma) memory: Memory,
}

impl Carrier {
    /// New queue pairs for a flow, on the port whose turn it is.
    pub(in crate::rdma) fn make_connection(
        &mut self,
        handle: Handle,
        flow: &mut Flow,
        qps: u16,
    ) -> Result<Connection, Fault> {
        let (port, _) = self.devices.port_of_turn(flow.home, flow.turn);
        let limits = self.devices.port(port).ok_or(Fault::NoPort)?.limits;
        let limit = limits.queue_wrs.max(1);
        let slots = match &flow.half {
            Half::Send(sender) => sender.slots().into(),
            Half::Recv(receiver) => receiver.slots(),
        };
        // All of a flow's completions lie in one queue: twice as many as writes under way, and those of its credits.
        let of_qp = limits.cq_entries.saturating_sub(2 * slots) / u32::from(qps.max(1));
        let outstanding = self.devices.options().outstanding.min(of_qp.saturating_sub(1) / 2).clamp(1, limit);
        let (sends, receives, unmarked, (ring_address, ring_bytes)) = match &mut flow.half {
            Half::Send(sender) => {
                // Each message needs a credit; as many may lie in the ring as are taken from it.
                let receives = [(2 * slots).min(limit), 1];
                // The first half of as many copies as there is room for is always known to arrive, or not to.
                ([outstanding; 2], receives, slots / (2 * u32::from(qps.max(1))), sender.shared())
            }
            // Twice what a sender has under way: half of them are posted anew when the other half is used up.
            Half::Recv(receiver) => {
                ([slots.min(limit), 1], [(2 * outstanding).min(limit); 2], u32::MAX, receiver.shared())
            }
        };
        let shape = Shape { qps, sends, receives, unmarked };
        // SAFETY: the ring belongs to the flow's half, which lives longer than its connection.
        unsafe { self.devices.make_connection(handle, port, shape, ring_address, ring_bytes) }
    }

    /// Destroys a flow's queue pairs: after it nothing reads or writes for them.
    pub(in crate::rdma) fn end_connection(&mut self, flow: &mut Flow) {
        if let Some(connection) = flow.connection.take() {
            self.devices.end_connection(connection);
        }
    }

    /// Ends a flow's queue pairs, and lets its buffers go.
    pub(in crate::rdma) fn release(&mut self, flow: &mut Flow) {
        self.end_connection(flow);
        match &mut flow.half {
            Half::Send(sender) => sender.abandon(&mut self.memory.regions),
            Half::Recv(receiver) => receiver.abandon(&mut self.memory.regions),
        }
    }

    /// Lets a flow post what it can.
    ///
    /// # Errors
    /// Something was not posted.
    pub(in crate::rdma) fn pump(&mut self, flow: &mut Flow) -> Result<Pumped, Fault> {
        let is_watched = flow.is_watched();
        let open = flow.connection.as_mut().filter(|_| flow.stage == Stage::Open);
        match (&mut flow.half, open) {
            (Half::Send(sender), Some(connection)) => {
                sender.pump(connection, &mut self.memory, self.devices.ports(), TURN_BYTES, is_watched)
            }
            (Half::Recv(receiver), Some(connection)) => {
                receiver.pump(connection, &mut self.memory, self.devices.ports())
            }
            (_, None) => Ok(Pumped::default()),
        }
    }

    /// A work request of a flow's queue pair has ended. Returns whether that says something: not if its connection is no more.
    ///
    /// # Errors
    /// It has failed, or says what it should not.
    pub(in crate::rdma) fn completed(
        &mut self,
        flow: &mut Flow,
        owner: Owner,
        completion: &Completion,
        is_receive: bool,
    ) -> Result<bool, Fault> {
        let Some(qp) = flow.connection.as_mut().and_then(|connection| connection.qps.get_mut(usize::from(owner.qp)))
        else {
            return Ok(false);
        };
        match completion.status {
            WcStatus::Success => {}
            WcStatus::Flushed => return Err(Fault::QueuePair { qp: qp.pair().number, status: FLUSHED }),
            WcStatus::Failed(status) => return Err(Fault::QueuePair { qp: qp.pair().number, status }),
        }
        let regions = &mut self.memory.regions;
        let done = match (&mut flow.half, is_receive) {
            (Half::Send(sender), true) => qp.received().and_then(|()| sender.credit(completion.imm)),
            (Half::Send(sender), false) => {
                sender.arrived(owner.qp, qp.sent(), regions);
                Ok(())
            }
            (Half::Recv(receiver), true) => {
                qp.received().and_then(|()| receiver.part(owner.qp, completion.bytes, completion.imm, regions))
            }
            (Half::Recv(_), false) => {
                qp.sent();
                Ok(())
            }
        };
        flow.note_progress();
        done.map(|()| true)
    }

    /// Begins to make what devices have written into a buffer visible. Host memory's is when its completion is; a GPU's is read. `None`:
    /// too many reads are under way, or the memory is being pinned.
    pub(in crate::rdma) fn flush(
        &mut self,
        id: FlowId,
        flow: &Flow,
        buffer: MemorySpan,
    ) -> Result<Option<Request>, TransportError> {
        let target = self.memory.regions.resolve(buffer)?;
        if target.bytes == 0 || !self.memory.is_gpu(buffer.key) {
            return Ok(Some(Request::flushed(id)));
        }
        // By the port that has written it, or by another if that is down meanwhile.
        let is_up = |place: &usize| self.devices.port(*place).is_some_and(|port| port.is_up);
        let port = std::iter::once(flow.came_by).chain(0..self.devices.len()).find(is_up);
        let port = port.ok_or_else(|| flow.error(Fault::NoPort))?;
        let Some(keys) = self.memory.keys(buffer.key, port, self.devices.ports())? else { return Ok(None) };
        let (address, _) = target.part(0, 1);
        let read = self.devices.flush(port, address as u64, keys.rkey).map_err(|fault| flow.error(fault))?;
        let number = |read| (port as u64) << FLUSH_PORT_SHIFT | read;
        Ok(read.map(|read| Request { flow: id, kind: RequestKind::Flush, number: number(read) }))
    }

    /// How far the flush of this number is.
    pub(in crate::rdma) fn test_flush(&self, flow: &Flow, number: u64) -> Result<Status, TransportError> {
        let port = (number >> FLUSH_PORT_SHIFT) as usize;
        let read = number & ((1 << FLUSH_PORT_SHIFT) - 1);
        match self.devices.is_flushed(port, read) {
            _ if read == 0 => Ok(Status::FLUSHED),
            Some(true) => Ok(Status::FLUSHED),
            Some(false) => Ok(Status::Running { bytes: 0 }),
            None => Err(flow.error(Fault::NoPort)),
        }
    }
}
