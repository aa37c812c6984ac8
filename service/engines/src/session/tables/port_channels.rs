//! Port channels of a session's ranks: their FIFOs, read as the command ring is, and requests about
//! them, which the proxy engine answers.
//!
//! Kernels ring no doorbell. So the FIFOs that they write are looked at again and again: without pause for a while after each trigger of theirs,
//! then with pauses that grow, up to a millisecond, and to ten where it is quiet. Whoever launches kernels may ring before ([`TriggerProducer::expect`]).
//!
//! [`TriggerProducer::expect`]: mccs_ipc::port_channels::TriggerProducer::expect

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_device::OpenMemory;
use mccs_ipc::port_channels::{PortChannelLayout, PortChannelRequest, PortChannelSegment, Trigger, TriggerConsumer};
use mccs_ipc::protocol::{Request, Response};
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_model::SetupError;
use mccs_tenants::{OverQuota, Resource};

use super::memory::Memory;
use super::ranks::{Ranks, ReadyRank};
use crate::proxy::{
    ChannelMemory, ChannelOrder, ChannelOrderKind, ChannelRegion, OpenedSegment, OpeningMemory, ProxyReply,
    SessionMessage, TriggerBatch, Writer, frames_bytes,
};
use crate::session::outlets::{Outlets, Place};

/// Triggers that are handed to the proxy engine at a time.
const BATCH: usize = 64;
/// How long FIFOs of kernels are looked at without pause after a trigger. After that pauses are an eighth of the time that none has come.
const SPIN_FOR: Duration = Duration::from_micros(200);
/// Longest pause, which takes half a percent of a processor by estimate; and the longest where none has come for a while.
const LOOK_AFTER_MAX: Duration = Duration::from_millis(1);
const QUIET_AFTER: Duration = Duration::from_secs(10);
const LOOK_AFTER_QUIET: Duration = Duration::from_millis(10);

/// A FIFO of a rank.
struct RankFifo {
    owner: Asker,
    writer: Writer,
    triggers: TriggerConsumer,
    /// For kernels: how often their process had said that they are about to write, when that was looked at.
    expected: u64,
    /// Last: its memory goes when nobody writes there any more.
    _opened: Arc<OpenedSegment>,
}

impl RankFifo {
    /// Whether kernels are about to write, as their process has said since.
    fn is_expected(&self) -> bool {
        self.writer == Writer::Kernels && self.triggers.expected() != self.expected
    }
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
    writer: Writer,
    until: u64,
}

/// FIFOs of a session.
#[derive(Default)]
pub(crate) struct Fifos {
    fifos: Vec<RankFifo>,
    /// When a kernel last wrote one of them, or its process said that it is about to.
    kernels_wrote_at: Option<Instant>,
}

impl Fifos {
    /// Whether a rank has port channels.
    pub(crate) fn are_open(&self) -> bool {
        !self.fifos.is_empty()
    }

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
            PortChannelRequest::Register { region, offset_bytes, bytes } if asker.place == Place::Gpus => {
                let part = OpeningPart { name: region, offset_bytes, bytes };
                open_on_gpus(ranks, memory, out, id, &asker, part)
            }
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
        let Asker { tenant_comm, comm, place, rank, gpu, ranks_across } = *asker;
        if self.fifos.iter().any(|fifo| fifo.owner.tenant_comm == tenant_comm) {
            let message = "the rank has opened its port channels before".into();
            return Err(SetupError { class: ErrorClass::InvalidUsage, message });
        }
        let layout = PortChannelLayout::with_slots(fifo_slots);
        let layout = if gpu.is_some() { layout.with_kernels(fifo_slots) } else { layout };
        let tenant = &out.session.tenant;
        let frames = match frames_bytes(ranks_across) {
            0 => None,
            bytes => Some(Arc::new(memory.make_hidden(tenant, "mccs-put-frames", bytes)?)),
        };
        let over = |error: OverQuota| SetupError { class: ErrorClass::InvalidUsage, message: error.to_string() };
        let charge = tenant.charge(Resource::MemoryBytes, layout.bytes()).map_err(over)?;
        let system = |message: String| SetupError { class: ErrorClass::System, message };
        let (fd, segment) = PortChannelSegment::create(layout).map_err(|error| system(error.to_string()))?;
        let threads = segment.consumer().ok_or_else(|| system("a FIFO does not fit its segment".into()))?;
        let kernels = segment.kernel_consumer();
        let opened = Arc::new(OpenedSegment::new(Arc::clone(&out.session), segment, gpu, frames, charge));
        for (writer, triggers) in [(Writer::Threads, Some(threads)), (Writer::Kernels, kernels)] {
            let owner = *asker;
            let fifo = |triggers| RankFifo { owner, writer, triggers, expected: 0, _opened: Arc::clone(&opened) };
            self.fifos.extend(triggers.map(fifo));
        }
        let kind = ChannelOrderKind::Open(opened);
        let order = ChannelOrder { comm, rank, kind, reply: None };
        out.outbox.send(place, SessionMessage::PortChannel(Box::new(order)));
        out.answers.answer(id, Response::PortChannels { layout }, &[fd.as_fd()]);
        Ok(())
    }

    /// A region goes, of the host or of GPUs, and with it the memories in it.
    pub(crate) fn forget_region(&self, out: &mut Outlets, of: Place, region: Handle) {
        let owners = self.fifos.iter().filter(|fifo| fifo.writer == Writer::Threads).map(|fifo| fifo.owner);
        for Asker { comm, place, rank, .. } in owners.filter(|owner| owner.place == of) {
            let kind = ChannelOrderKind::ForgetRegion { region };
            let order = ChannelOrder { comm, rank, kind, reply: None };
            out.outbox.send(place, SessionMessage::PortChannel(Box::new(order)));
        }
    }

    /// A rank has left.
    pub(crate) fn close(&mut self, tenant_comm: Handle) {
        self.fifos.retain(|fifo| fifo.owner.tenant_comm != tenant_comm);
    }

    /// Takes triggers off the FIFOs. Returns whether there was one.
    pub(crate) fn take_triggers(&mut self, out: &mut Outlets, now: Instant, budget: usize) -> bool {
        let (mut any, mut left) = (false, budget);
        for at in 0..self.fifos.len() {
            if self.fifos[at].is_expected() {
                self.fifos[at].expected = self.fifos[at].triggers.expected();
                self.kernels_wrote_at = Some(now);
            }
            loop {
                let limit = out.session.tenant.quota.operations_in_flight;
                let room = limit.saturating_sub(out.session.in_flight()).min(BATCH.min(left) as u64) as usize;
                if room == 0 || !out.outbox.is_empty() {
                    self.fifos[at].triggers.release();
                    break;
                }
                let fifo = &mut self.fifos[at];
                let (Asker { comm, place, rank, .. }, writer) = (fifo.owner, fifo.writer);
                let first = fifo.triggers.position();
                let triggers: Vec<Trigger> = std::iter::from_fn(|| fifo.triggers.try_pop()).take(room).collect();
                let count = triggers.len();
                if count == 0 {
                    break;
                }
                any = true;
                left -= count;
                if writer == Writer::Kernels {
                    self.kernels_wrote_at = Some(now);
                }
                out.session.begin_triggers(count as u64);
                let session = Arc::clone(&out.session);
                let batch = TriggerBatch { session, comm, rank, writer, first, triggers };
                out.outbox.send(place, SessionMessage::Triggers(batch));
            }
        }
        any
    }

    /// When FIFOs of kernels are to be looked at again, which may be now; none where there are no such.
    pub(crate) fn look_for_kernels_at(&self, now: Instant) -> Option<Instant> {
        let has_kernels = self.fifos.iter().any(|fifo| fifo.writer == Writer::Kernels);
        has_kernels.then(|| {
            let waited = self.kernels_wrote_at.map_or(QUIET_AFTER, |at| now.saturating_duration_since(at));
            let most = if waited < QUIET_AFTER { LOOK_AFTER_MAX } else { LOOK_AFTER_QUIET };
            if waited < SPIN_FOR { now } else { now + (waited / 8).min(most) }
        })
    }

    /// Announces at all FIFOs that the engine is about to sleep. Returns false, and announces nothing, if a trigger is there or expected.
    pub(crate) fn arm(&mut self) -> bool {
        let armed = self.fifos.iter_mut().all(|fifo| fifo.triggers.arm() && !fifo.is_expected());
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
        let concerned = self.fifos.iter().filter(|fifo| named.is_none_or(|comm| comm == fifo.owner.tenant_comm));
        let before = |fifo: &RankFifo| {
            let RankFifo { owner: Asker { tenant_comm, .. }, writer, triggers, .. } = fifo;
            TriggersBefore { tenant_comm: *tenant_comm, writer: *writer, until: triggers.end_position() }
        };
        concerned.map(before).collect()
    }

    /// Whether such triggers have been taken.
    pub(crate) fn are_taken(&self, before: &[TriggersBefore]) -> bool {
        let waits = |before: &TriggersBefore| {
            let is_it = |fifo: &&RankFifo| (fifo.owner.tenant_comm, fifo.writer) == (before.tenant_comm, before.writer);
            let fifo = self.fifos.iter().find(is_it);
            fifo.is_some_and(|fifo| fifo.triggers.position() < before.until && !fifo.triggers.is_empty())
        };
        !before.iter().any(waits)
    }
}

/// The rank that asks for something.
#[derive(Clone, Copy)]
struct Asker {
    tenant_comm: Handle,
    comm: Handle,
    place: Place,
    rank: u32,
    /// Its GPU, as the device counts them, if its memory is there.
    gpu: Option<usize>,
    /// Ranks of its communicator, where they are on several hosts; else 0.
    ranks_across: u32,
}

impl Asker {
    fn find(ranks: &Ranks, tenant_comm: Handle) -> Result<Self, SetupError> {
        let ReadyRank { comm, place, rank, info, seat, .. } = ranks.ready(tenant_comm)?;
        let (gpu, ranks_across) = match place {
            Place::Host => (None, if info.hosts.len() > 1 { info.nranks } else { 0 }),
            Place::Gpus => (seat.gpu, 0),
        };
        Ok(Asker { tenant_comm, comm: *comm, place: *place, rank: *rank, gpu, ranks_across })
    }
}

/// Asks the proxy engine, which replies.
fn order(out: &mut Outlets, id: u64, asker: &Asker, kind: ChannelOrderKind) -> Result<(), SetupError> {
    out.replies.check_room()?;
    let reply = Some((id, out.replies.open()));
    let order = ChannelOrder { comm: asker.comm, rank: asker.rank, kind, reply };
    out.outbox.send(asker.place, SessionMessage::PortChannel(Box::new(order)));
    Ok(())
}

/// A part of a region of GPUs.
struct OpeningPart {
    name: Handle,
    offset_bytes: u64,
    bytes: u64,
}

/// Has memory of GPUs opened where its communicator's ranks copy from it and to it: [`register_opened`] goes on.
fn open_on_gpus(
    ranks: &Ranks,
    memory: &Memory,
    out: &mut Outlets,
    id: u64,
    asker: &Asker,
    part: OpeningPart,
) -> Result<(), SetupError> {
    let invalid = |message| SetupError { class: ErrorClass::InvalidArgument, message };
    let (OpeningPart { name, offset_bytes, bytes }, tenant_comm) = (part, asker.tenant_comm);
    let region = memory.gpu_region(name).ok_or_else(|| invalid(format!("there is no GPU region {name:?}")))?;
    if bytes == 0 || !region.contains(offset_bytes, bytes) {
        return Err(invalid(no_part(offset_bytes, bytes, region.len_bytes())));
    }
    let group = ranks.ready(tenant_comm)?.info.device_initiated.as_ref();
    let group = group.ok_or_else(|| invalid("the communicator is none of GPUs".into()))?;
    out.replies.check_room()?;
    let (replies, region) = (out.replies.open(), Arc::clone(region));
    let opening = OpeningMemory { tenant_comm, region: Arc::clone(&region), name, offset_bytes, bytes };
    let memory = Box::new(opening);
    let reply = Box::new(move |opened| drop(replies.send(ProxyReply::MemoryOpened { request: id, memory, opened })));
    group.open_memory(OpenMemory { region, reply });
    Ok(())
}

/// Memory of GPUs is open, or cannot be.
pub(crate) fn register_opened(
    ranks: &Ranks,
    memory: &Memory,
    out: &mut Outlets,
    id: u64,
    opening: OpeningMemory,
    opened: Result<(), SetupError>,
) {
    let OpeningMemory { tenant_comm, region, name, offset_bytes, bytes } = opening;
    let is_there = memory.gpu_region(name).is_some_and(|now| Arc::ptr_eq(now, &region));
    let gone = || SetupError {
        class: ErrorClass::InvalidArgument,
        message: format!("GPU region {name:?} was freed while it was being opened"),
    };
    let opened = opened.and_then(|()| is_there.then_some(()).ok_or_else(gone));
    let ordered = opened.and_then(|()| Asker::find(ranks, tenant_comm)).and_then(|asker| {
        let part = ChannelMemory::new(ChannelRegion::Gpu(region), name, offset_bytes, bytes);
        order(out, id, &asker, ChannelOrderKind::Register(part))
    });
    if let Err(why) = ordered {
        out.answers.refuse_for(id, why);
    }
}

fn no_part(offset_bytes: u64, bytes: u64, size: u64) -> String {
    format!("{bytes} bytes at offset {offset_bytes} are no part of a region of {size} bytes")
}

/// A part of a region, as a memory that channels name.
fn channel_memory(memory: &Memory, name: Handle, offset_bytes: u64, bytes: u64) -> Result<ChannelMemory, SetupError> {
    let invalid = |message| SetupError { class: ErrorClass::InvalidArgument, message };
    let region = memory.region(name).ok_or_else(|| invalid(format!("there is no region {name:?}")))?;
    if bytes == 0 || region.range(offset_bytes, bytes).is_none() {
        let size = region.len_bytes();
        return Err(invalid(no_part(offset_bytes, bytes, size)));
    }
    Ok(ChannelMemory::new(ChannelRegion::Host(Arc::clone(region)), name, offset_bytes, bytes))
}

#[cfg(test)]
mod tests {
    use mccs_tenants::{Quota, Tenant, testing};

    use super::*;

    /// A rank on a GPU, and the side of its process.
    fn opened() -> (Fifos, PortChannelSegment) {
        let layout = PortChannelLayout::with_slots(4).with_kernels(4);
        let tenant = Tenant::new("a".into(), Quota::least());
        let session = testing::session(1, &tenant);
        let (fd, segment) = PortChannelSegment::create(layout).expect("a segment");
        let process = PortChannelSegment::map(fd.as_fd(), layout).expect("mapped");
        let triggers = segment.kernel_consumer().expect("a FIFO");
        let charge = tenant.charge(Resource::MemoryBytes, 1).expect("room");
        let opened = Arc::new(OpenedSegment::new(session, segment, Some(0), None, charge));
        let (tenant_comm, comm) = (Handle::NONE, Handle::NONE);
        let owner = Asker { tenant_comm, comm, place: Place::Gpus, rank: 0, gpu: Some(0), ranks_across: 0 };
        let fifo = RankFifo { owner, writer: Writer::Kernels, triggers, expected: 0, _opened: opened };
        (Fifos { fifos: vec![fifo], kernels_wrote_at: None }, process)
    }

    #[test]
    fn kernels_are_looked_for_without_pause_at_first_and_with_pauses_that_grow() {
        let (mut fifos, now) = (opened().0, Instant::now());
        let pause = |fifos: &Fifos, at: Instant| fifos.look_for_kernels_at(at).expect("kernels") - at;
        assert_eq!(pause(&fifos, now), LOOK_AFTER_QUIET, "none has written yet");
        fifos.kernels_wrote_at = Some(now);
        let after = |waited: Duration| pause(&fifos, now + waited);
        assert_eq!((after(Duration::ZERO), after(SPIN_FOR / 2)), (Duration::ZERO, Duration::ZERO));
        assert_eq!(after(Duration::from_millis(4)), Duration::from_micros(500));
        assert_eq!((after(Duration::from_secs(1)), after(QUIET_AFTER)), (LOOK_AFTER_MAX, LOOK_AFTER_QUIET));
        assert_eq!(Fifos::default().look_for_kernels_at(now), None);
    }

    #[test]
    fn who_expects_kernels_to_write_is_heard_before_a_sleep_and_in_it() {
        let (mut fifos, process) = opened();
        let kernels = process.kernel_producer().expect("a FIFO");
        assert!(fifos.arm() && kernels.expect(), "the doorbell is to be rung");
        assert!(fifos.fifos[0].is_expected() && !fifos.arm(), "it is not to sleep");
        assert!(!kernels.expect(), "nobody sleeps");
        fifos.fifos[0].expected = fifos.fifos[0].triggers.expected();
        assert!(fifos.arm());
    }
}
