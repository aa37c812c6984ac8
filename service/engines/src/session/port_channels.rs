//! Port channels of a session's ranks: their FIFOs, read as the command ring is, and requests about
//! them, which the proxy engine answers.

use std::os::fd::AsFd;
use std::sync::Arc;

use mccs_ipc::port_channels::{PortChannelLayout, PortChannelRequest, PortChannelSegment, Trigger, TriggerConsumer};
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::shm::Mapping;
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SetupError;
use mccs_tenants::regions::Region;
use mccs_tenants::{OverQuota, Pages, Resource};

use super::proxies::Place;
use super::requests::OPENING_MAX;
use super::tables::CommSlot;
use super::{SessionEngine, Tables};
use crate::proxy::{
    ChannelMemory, ChannelOrder, ChannelOrderKind, OpenedSegment, SessionMessage, TriggerBatch, frames_bytes,
};

/// Triggers that are handed to the proxy engine at a time.
const BATCH: usize = 64;

/// The FIFO of a rank.
pub(super) struct RankFifo {
    tenant_comm: Handle,
    comm: Handle,
    rank: u32,
    triggers: TriggerConsumer,
    /// Last: its memory goes when nobody writes there any more.
    _opened: Arc<OpenedSegment>,
}

impl Drop for RankFifo {
    fn drop(&mut self) {
        // Threads of a rank that leaves meanwhile are not to wait for room.
        self.triggers.end();
    }
}

/// Triggers of a FIFO that were there when a request came: it waits until they have been taken.
#[derive(Clone, Copy)]
pub(super) struct TriggersBefore {
    tenant_comm: Handle,
    until: u64,
}

impl SessionEngine {
    /// Serves a request about port channels.
    pub(super) fn port_channel(&mut self, id: u64, tenant_comm: Handle, request: PortChannelRequest) {
        let (comm, rank, elsewhere) = match self.tables.comms.get(tenant_comm) {
            Some(CommSlot::Ready { comm, place: Place::Host, rank, info, .. }) => {
                (*comm, *rank, if info.hosts.len() > 1 { info.nranks } else { 0 })
            }
            Some(CommSlot::Ready { .. }) => {
                let message = "port channels are for communicators of host memory: those of GPUs have none yet";
                return self.refuse(id, ErrorClass::InvalidUsage, message);
            }
            _ => {
                let message = format!("there is no communicator {tenant_comm:?}");
                return self.refuse(id, ErrorClass::InvalidArgument, message);
            }
        };
        if let PortChannelRequest::Open { fifo_slots } = request {
            return match self.open_port_channels(id, tenant_comm, comm, rank, fifo_slots, elsewhere) {
                Ok(()) => {}
                Err(SetupError { class, message }) => self.refuse(id, class, message),
            };
        }
        let kind = match order_of(&self.tables, request) {
            Ok(kind) => kind,
            Err(SetupError { class, message }) => return self.refuse(id, class, message),
        };
        if self.opening >= OPENING_MAX {
            return self.refuse(id, ErrorClass::InvalidUsage, "the session asks for too much at a time");
        }
        self.opening += 1;
        // The mailbox has room for so many.
        let reply = Some((id, self.replies.sender()));
        self.send(Place::Host, SessionMessage::PortChannel(Box::new(ChannelOrder { comm, rank, kind, reply })));
    }

    fn open_port_channels(
        &mut self,
        id: u64,
        tenant_comm: Handle,
        comm: Handle,
        rank: u32,
        fifo_slots: u32,
        elsewhere: u32,
    ) -> Result<(), SetupError> {
        if self.fifos.iter().any(|fifo| fifo.tenant_comm == tenant_comm) {
            let message = "the rank has opened its port channels before".into();
            return Err(SetupError { class: ErrorClass::InvalidUsage, message });
        }
        let layout = PortChannelLayout::with_slots(fifo_slots);
        let over = |error: OverQuota| SetupError { class: ErrorClass::InvalidUsage, message: error.to_string() };
        let charge = |resource, amount| self.session.tenant.charge(resource, amount).map_err(over);
        let system = |message: String| SetupError { class: ErrorClass::System, message };
        let frames = match frames_bytes(elsewhere) {
            0 => None,
            bytes => {
                let charges =
                    [charge(Resource::MemoryBytes, bytes)?, charge(Resource::Mappings, Mapping::count(bytes))?];
                let reserved = self.host_memory.reserve(bytes, Pages::Service);
                let reservation = reserved.map_err(|error| system(error.to_string()))?;
                let mapped = Mapping::create("mccs-put-frames", bytes).map_err(|error| system(error.to_string()));
                let (mapping, unmap_worker) = (mapped?.1, self.unmap_worker.clone());
                Some(Arc::new(Region::new(mapping, reservation, charges, unmap_worker)))
            }
        };
        let charge = charge(Resource::MemoryBytes, layout.bytes())?;
        let (fd, segment) = PortChannelSegment::create(layout).map_err(|error| system(error.to_string()))?;
        let triggers = segment.consumer().ok_or_else(|| system("a FIFO does not fit its segment".into()))?;
        let opened = Arc::new(OpenedSegment::new(Arc::clone(&self.session), segment, frames, charge));
        self.fifos.push(RankFifo { tenant_comm, comm, rank, triggers, _opened: Arc::clone(&opened) });
        let kind = ChannelOrderKind::Open(opened);
        self.send(Place::Host, SessionMessage::PortChannel(Box::new(ChannelOrder { comm, rank, kind, reply: None })));
        self.answer(id, Response::PortChannels { layout }, &[fd.as_fd()]);
        Ok(())
    }

    /// A region goes, and with it the memories in it.
    pub(super) fn drop_channel_memories_of(&mut self, region: Handle) {
        let ranks: Vec<_> = self.fifos.iter().map(|fifo| (fifo.comm, fifo.rank)).collect();
        for (comm, rank) in ranks {
            let kind = ChannelOrderKind::ForgetRegion { region };
            let order = ChannelOrder { comm, rank, kind, reply: None };
            self.send(Place::Host, SessionMessage::PortChannel(Box::new(order)));
        }
    }

    /// A rank has left.
    pub(super) fn drop_fifo(&mut self, tenant_comm: Handle) {
        self.fifos.retain(|fifo| fifo.tenant_comm != tenant_comm);
    }

    /// Takes triggers off the FIFOs. Returns whether there was one.
    pub(super) fn take_triggers(&mut self, budget: usize) -> bool {
        let (mut any, mut left) = (false, budget);
        for at in 0..self.fifos.len() {
            loop {
                let limit = self.session.tenant.quota.operations_in_flight;
                let room = limit.saturating_sub(self.session.in_flight()).min(BATCH.min(left) as u64) as usize;
                if room == 0 || !self.outbox.is_empty() {
                    self.fifos[at].triggers.release();
                    break;
                }
                let fifo = &mut self.fifos[at];
                let (comm, rank, first) = (fifo.comm, fifo.rank, fifo.triggers.position());
                let triggers: Vec<Trigger> = std::iter::from_fn(|| fifo.triggers.try_pop()).take(room).collect();
                let count = triggers.len();
                if count == 0 {
                    break;
                }
                any = true;
                left -= count;
                self.session.begin_triggers(count as u64);
                let session = Arc::clone(&self.session);
                self.send(Place::Host, SessionMessage::Triggers(TriggerBatch { session, comm, rank, first, triggers }));
            }
        }
        any
    }

    /// Announces at all FIFOs that the engine is about to sleep. Returns false, and announces nothing, if a trigger is there.
    pub(super) fn arm_fifos(&mut self) -> bool {
        let armed = self.fifos.iter_mut().all(|fifo| fifo.triggers.arm());
        if !armed {
            self.fifos.iter_mut().for_each(|fifo| fifo.triggers.disarm());
        }
        armed
    }

    /// Triggers that are there, and that a request is to come behind.
    pub(super) fn triggers_before(&self, request: &Request) -> Vec<TriggersBefore> {
        let named = match request {
            Request::DestroyComm { comm } | Request::PortChannel { comm, .. } => Some(*comm),
            _ => None,
        };
        let concerned = self.fifos.iter().filter(|fifo| named.is_none_or(|comm| comm == fifo.tenant_comm));
        let before =
            |fifo: &RankFifo| TriggersBefore { tenant_comm: fifo.tenant_comm, until: fifo.triggers.end_position() };
        concerned.map(before).collect()
    }

    /// Whether such triggers have been taken.
    pub(super) fn are_taken(&self, before: &[TriggersBefore]) -> bool {
        let waits = |before: &TriggersBefore| {
            let fifo = self.fifos.iter().find(|fifo| fifo.tenant_comm == before.tenant_comm);
            fifo.is_some_and(|fifo| fifo.triggers.position() < before.until && !fifo.triggers.is_empty())
        };
        !before.iter().any(waits)
    }
}

/// A request as the proxy engine takes it, with the memory that it names.
fn order_of(tables: &Tables, request: PortChannelRequest) -> Result<ChannelOrderKind, SetupError> {
    Ok(match request {
        PortChannelRequest::Register { region: name, offset_bytes, bytes } => {
            let invalid = |message| SetupError { class: ErrorClass::InvalidArgument, message };
            let region = tables.regions.get(name).ok_or_else(|| invalid(format!("there is no region {name:?}")))?;
            if bytes == 0 || region.range(offset_bytes, bytes).is_none() {
                let size = region.len_bytes();
                let message = format!("{bytes} bytes at offset {offset_bytes} are no part of a region of {size} bytes");
                return Err(invalid(message));
            }
            ChannelOrderKind::Register(ChannelMemory::new(Arc::clone(region), name, offset_bytes, bytes))
        }
        PortChannelRequest::Free { memory } => ChannelOrderKind::Free { memory },
        PortChannelRequest::Connect { peer, tag } => ChannelOrderKind::Connect { peer, tag },
        PortChannelRequest::OpenChannel { connection, memories } => {
            ChannelOrderKind::OpenChannel { connection, memories }
        }
        PortChannelRequest::CloseChannel { channel } => ChannelOrderKind::CloseChannel { channel },
        // Served before.
        PortChannelRequest::Open { .. } => ChannelOrderKind::Connect { peer: u32::MAX, tag: 0 },
    })
}
