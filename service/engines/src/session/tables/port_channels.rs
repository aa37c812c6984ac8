//! Port channels of a session's ranks: their FIFOs, read as the command ring is, and requests about
//! them, which the proxy engine answers.

use std::os::fd::AsFd;
use std::sync::Arc;

use mccs_ipc::port_channels::{PortChannelLayout, PortChannelRequest, PortChannelSegment, Trigger, TriggerConsumer};
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SetupError;
use mccs_tenants::{OverQuota, Resource};

use super::memory::Memory;
use super::ranks::{Ranks, ReadyRank};
use crate::proxy::{
    ChannelMemory, ChannelOrder, ChannelOrderKind, OpenedSegment, SessionMessage, TriggerBatch, frames_bytes,
};
use crate::session::outlets::{Outlets, Place};

/// Triggers that are handed to the proxy engine at a time.
const BATCH: usize = 64;

/// The FIFO of a rank.
struct RankFifo {
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
pub(crate) struct TriggersBefore {
    tenant_comm: Handle,
    until: u64,
}

/// FIFOs of a session.
#[derive(Default)]
pub(crate) struct Fifos {
    fifos: Vec<RankFifo>,
}

impl Fifos {
    /// Serves a request about port channels, whose tenant calls the communicator `comm`.
    pub(crate) fn serve(
        &mut self,
        ranks: &Ranks,
        memory: &Memory,
        out: &mut Outlets,
        id: u64,
        comm: Handle,
        request: PortChannelRequest,
    ) {
        use ChannelOrderKind as Kind;
        let served = Asker::find(ranks, comm).and_then(|asker| match request {
            PortChannelRequest::Open { fifo_slots } => self.open(memory, out, id, &asker, fifo_slots),
            PortChannelRequest::Register { region, offset_bytes, bytes } => {
                let part = channel_memory(memory, region, offset_bytes, bytes)?;
                order(out, id, &asker, Kind::Register(part))
            }
            PortChannelRequest::Free { memory } => order(out, id, &asker, Kind::Free { memory }),
            PortChannelRequest::Connect { peer, tag } => order(out, id, &asker, Kind::Connect { peer, tag }),
            PortChannelRequest::OpenChannel { connection, memories } => {
                order(out, id, &asker, Kind::OpenChannel { connection, memories })
            }
            PortChannelRequest::CloseChannel { channel } => order(out, id, &asker, Kind::CloseChannel { channel }),
        });
        if let Err(why) = served {
            out.answers.refuse_for(id, why);
        }
    }

    fn open(
        &mut self,
        memory: &Memory,
        out: &mut Outlets,
        id: u64,
        asker: &Asker,
        fifo_slots: u32,
    ) -> Result<(), SetupError> {
        let Asker { tenant_comm, comm, rank, ranks_across } = *asker;
        if self.fifos.iter().any(|fifo| fifo.tenant_comm == tenant_comm) {
            let message = "the rank has opened its port channels before".into();
            return Err(SetupError { class: ErrorClass::InvalidUsage, message });
        }
        let layout = PortChannelLayout::with_slots(fifo_slots);
        let tenant = &out.session.tenant;
        let frames = match frames_bytes(ranks_across) {
            0 => None,
            bytes => Some(Arc::new(memory.make_hidden(tenant, "mccs-put-frames", bytes)?)),
        };
        let over = |error: OverQuota| SetupError { class: ErrorClass::InvalidUsage, message: error.to_string() };
        let charge = tenant.charge(Resource::MemoryBytes, layout.bytes()).map_err(over)?;
        let system = |message: String| SetupError { class: ErrorClass::System, message };
        let (fd, segment) = PortChannelSegment::create(layout).map_err(|error| system(error.to_string()))?;
        let triggers = segment.consumer().ok_or_else(|| system("a FIFO does not fit its segment".into()))?;
        let opened = Arc::new(OpenedSegment::new(Arc::clone(&out.session), segment, frames, charge));
        self.fifos.push(RankFifo { tenant_comm, comm, rank, triggers, _opened: Arc::clone(&opened) });
        let kind = ChannelOrderKind::Open(opened);
        let order = ChannelOrder { comm, rank, kind, reply: None };
        out.outbox.send(Place::Host, SessionMessage::PortChannel(Box::new(order)));
        out.answers.answer(id, Response::PortChannels { layout }, &[fd.as_fd()]);
        Ok(())
    }

    /// A region goes, and with it the memories in it.
    pub(crate) fn forget_region(&self, out: &mut Outlets, region: Handle) {
        for fifo in &self.fifos {
            let kind = ChannelOrderKind::ForgetRegion { region };
            let order = ChannelOrder { comm: fifo.comm, rank: fifo.rank, kind, reply: None };
            out.outbox.send(Place::Host, SessionMessage::PortChannel(Box::new(order)));
        }
    }

    /// A rank has left.
    pub(crate) fn close(&mut self, tenant_comm: Handle) {
        self.fifos.retain(|fifo| fifo.tenant_comm != tenant_comm);
    }

    /// Takes triggers off the FIFOs. Returns whether there was one.
    pub(crate) fn take_triggers(&mut self, out: &mut Outlets, budget: usize) -> bool {
        let (mut any, mut left) = (false, budget);
        for at in 0..self.fifos.len() {
            loop {
                let limit = out.session.tenant.quota.operations_in_flight;
                let room = limit.saturating_sub(out.session.in_flight()).min(BATCH.min(left) as u64) as usize;
                if room == 0 || !out.outbox.is_empty() {
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
                out.session.begin_triggers(count as u64);
                let session = Arc::clone(&out.session);
                out.outbox
                    .send(Place::Host, SessionMessage::Triggers(TriggerBatch { session, comm, rank, first, triggers }));
            }
        }
        any
    }

    /// Announces at all FIFOs that the engine is about to sleep. Returns false, and announces nothing, if a trigger is there.
    pub(crate) fn arm(&mut self) -> bool {
        let armed = self.fifos.iter_mut().all(|fifo| fifo.triggers.arm());
        if !armed {
            self.fifos.iter_mut().for_each(|fifo| fifo.triggers.disarm());
        }
        armed
    }

    /// Triggers that are there, and that a request is to come behind.
    pub(crate) fn triggers_before(&self, request: &Request) -> Vec<TriggersBefore> {
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
    pub(crate) fn are_taken(&self, before: &[TriggersBefore]) -> bool {
        let waits = |before: &TriggersBefore| {
            let fifo = self.fifos.iter().find(|fifo| fifo.tenant_comm == before.tenant_comm);
            fifo.is_some_and(|fifo| fifo.triggers.position() < before.until && !fifo.triggers.is_empty())
        };
        !before.iter().any(waits)
    }
}

/// The rank that asks for something.
struct Asker {
    tenant_comm: Handle,
    comm: Handle,
    rank: u32,
    /// Ranks of its communicator, where they are on several hosts; else 0.
    ranks_across: u32,
}

impl Asker {
    fn find(ranks: &Ranks, tenant_comm: Handle) -> Result<Self, SetupError> {
        let ReadyRank { comm, place, rank, info, .. } = ranks.ready(tenant_comm)?;
        if *place != Place::Host {
            let message = "port channels are for communicators of host memory: those of GPUs have none yet".into();
            return Err(SetupError { class: ErrorClass::InvalidUsage, message });
        }
        let ranks_across = if info.hosts.len() > 1 { info.nranks } else { 0 };
        Ok(Asker { tenant_comm, comm: *comm, rank: *rank, ranks_across })
    }
}

/// Asks the proxy engine, which replies.
fn order(out: &mut Outlets, id: u64, asker: &Asker, kind: ChannelOrderKind) -> Result<(), SetupError> {
    out.replies.check_room()?;
    let reply = Some((id, out.replies.open()));
    let order = ChannelOrder { comm: asker.comm, rank: asker.rank, kind, reply };
    out.outbox.send(Place::Host, SessionMessage::PortChannel(Box::new(order)));
    Ok(())
}

/// A part of a region, as a memory that channels name.
fn channel_memory(memory: &Memory, name: Handle, offset_bytes: u64, bytes: u64) -> Result<ChannelMemory, SetupError> {
    let invalid = |message| SetupError { class: ErrorClass::InvalidArgument, message };
    let region = memory.region(name).ok_or_else(|| invalid(format!("there is no region {name:?}")))?;
    if bytes == 0 || region.range(offset_bytes, bytes).is_none() {
        let size = region.len_bytes();
        let message = format!("{bytes} bytes at offset {offset_bytes} are no part of a region of {size} bytes");
        return Err(invalid(message));
    }
    Ok(ChannelMemory::new(Arc::clone(region), name, offset_bytes, bytes))
}
