//! Tenants' requests over the socket: memory, streams, communicators; checked, answered or parked.
//!
//! A request that ends something waits for the commands that were in the ring before it. Joins and leaves are answered when
//! the proxy engine has.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use mccs_device::cuda::{GpuRegion, Importer, RegionRefused, Segment, SegmentRefused};
use mccs_device::{OpenPart, OpenedPart};
use mccs_exchange::protocol::Name;
use mccs_ipc::device_initiated::{CommPart, Execution, GpuUuid};
use mccs_ipc::handshake::SocketError;
use mccs_ipc::protocol::{
    COMM_NAME_BYTES_MAX, GPU_SEGMENTS_MAX, JoinOptions, Request, RequestEnvelope, Response, Role,
};
use mccs_ipc::shm::{Mapping, ShmError, is_whole};
use mccs_ipc::types::{ErrorClass, Handle, UniqueId};
use mccs_registry::{CommInfo, Joining, PartOf};
use mccs_tenants::memory::{Pages, Region};
use mccs_tenants::{Charge, Resource, SessionResource};

use super::proxies::{GpuProxy, Place};
use super::tables::{CommSlot, Seat, StreamSlot};
use super::{SLOW_TO_CLOSE, SessionEngine, State};
use crate::proxy::{JoinRequest, ProxyReply, SessionMessage, StreamSemaphore, TwinPart};

/// Most requests that wait for commands before them; the rest waits in the socket. Covers a tenant that lets go of all it
/// has at once.
const PARKED_MAX: usize = 4096;
/// Requests of a session for memory of communicators that wait for their answers: a process has no more threads that make first calls at a time.
pub(super) const OPENING_MAX: usize = 512;
/// Requests to abort one communicator that wait for the same answer.
const ABORTS_WAITING_MAX: usize = 64;

/// A request takes about as long as so many commands: it is received, answered, and often maps memory.
const REQUEST_ITEMS: usize = 16;

impl SessionEngine {
    /// Takes requests off the socket. Returns whether there was one.
    pub(super) fn serve_socket(&mut self, now: Instant, budget: usize) -> bool {
        for served in 0..(budget / REQUEST_ITEMS).max(1) {
            if !matches!(self.state, State::Serving) || !self.outbox.is_empty() {
                return true;
            }
            if self.is_crowded() || self.deferred.is_some() {
                return served > 0;
            }
            let closer = &self.session.tenant.closer;
            if closer.is_full() {
                // What is sent meanwhile waits in the socket.
                if closer.is_stuck(now) {
                    self.fence(SLOW_TO_CLOSE);
                }
                return true;
            }
            let mut fds = Vec::new();
            let received = self.socket.recv_keeping::<RequestEnvelope>(&mut fds);
            let has_fds = !fds.is_empty();
            match received {
                Ok(None) => return served > 0,
                Ok(Some(envelope)) => self.park_or_serve(envelope, &mut fds),
                Err(SocketError::Closed) => self.begin_finishing(),
                Err(error) => self.fence(&error.to_string()),
            }
            let closer = &self.session.tenant.closer;
            fds.into_iter().for_each(|fd| closer.close_later(fd));
            if has_fds && closer.is_stuck(now) {
                self.fence(SLOW_TO_CLOSE);
            }
        }
        true
    }

    /// Whether so many requests wait for commands before them that no more are read.
    pub(super) fn is_crowded(&self) -> bool {
        self.parked.len() >= PARKED_MAX
    }

    /// Serves a request, or keeps it until its turn comes: then it needs no descriptors. The caller closes those that are left.
    fn park_or_serve(&mut self, envelope: RequestEnvelope, fds: &mut Vec<OwnedFd>) {
        let ends_something = matches!(
            envelope.request,
            Request::FreeMemory { .. }
                | Request::FreeGpuMemory { .. }
                | Request::DestroyStream { .. }
                | Request::DestroyComm { .. }
        );
        if !ends_something {
            return self.serve(envelope, fds);
        }
        // The tenant wrote the commands before it sent the request. A ring that lies is fenced by the next pop.
        let after = self.popped + self.commands.waiting().unwrap_or(0);
        self.parked.push_back((after, envelope));
        self.serve_parked();
    }

    /// Serves requests whose turn has come. Returns whether there was one.
    pub(super) fn serve_parked(&mut self) -> bool {
        let mut any = false;
        while matches!(self.state, State::Serving | State::Finishing { .. })
            && self.outbox.is_empty()
            && let Some((after, envelope)) = self.parked.pop_front_if(|(after, _)| *after <= self.popped)
        {
            if let Request::DestroyStream { stream } = envelope.request
                && self.session.is_telling(stream.index)
            {
                // In a moment.
                self.parked.push_front((after, envelope));
                return true;
            }
            self.serve(envelope, &mut Vec::new());
            any = true;
        }
        any
    }

    fn serve(&mut self, envelope: RequestEnvelope, fds: &mut Vec<OwnedFd>) {
        let id = envelope.id;
        match envelope.request {
            Request::AllocMemory { bytes } => self.add_region(id, bytes, None),
            Request::RegisterMemory { bytes } => match fds.last() {
                Some(fd) => self.add_region(id, bytes, Some(fd.as_fd())),
                None => self.refuse(id, ErrorClass::InvalidArgument, "RegisterMemory comes with a memfd"),
            },
            Request::FreeMemory { region } => match self.tables.regions.remove(region) {
                Some(_) => self.answer(id, Response::Done, &[]),
                None => self.refuse(id, ErrorClass::InvalidArgument, format!("there is no region {region:?}")),
            },
            Request::RegisterGpuMemory { gpu, ipc_handle, bytes } => {
                let (tenant, pid) = (Arc::clone(&self.session.tenant), self.session.peer.pid);
                self.add_gpu_region(id, &gpu, |importer| importer.by_handle(&tenant, pid, &ipc_handle, bytes));
            }
            Request::NameGpuSegments { begins, bytes } => {
                if begins {
                    self.tables.gpu_segments.clear();
                }
                self.name_gpu_segments(id, &bytes, fds);
            }
            Request::RegisterGpuSegments { gpu } => {
                let (tenant, segments) =
                    (Arc::clone(&self.session.tenant), std::mem::take(&mut self.tables.gpu_segments));
                self.add_gpu_region(id, &gpu, |importer| importer.by_segments(&tenant, segments));
            }
            Request::FreeGpuMemory { region } => match self.tables.gpu_regions.remove(region) {
                Some(_) => self.answer(id, Response::Done, &[]),
                None => self.refuse(id, ErrorClass::InvalidArgument, format!("there is no region {region:?}")),
            },
            Request::CreateStream => {
                if let Some(stream) = self.add_stream(id, false) {
                    self.answer(id, Response::Stream { stream, word: stream.index }, &[]);
                }
            }
            Request::CreateOrderedStream { region, offset_bytes, overlaps } => {
                self.create_ordered_stream(id, region, offset_bytes, overlaps)
            }
            Request::DestroyStream { stream } => self.destroy_stream(id, stream),
            Request::CommMemory { comm } => match self.tables.comms.get(comm) {
                Some(CommSlot::Ready { info, rank, .. }) => {
                    let held = info.device_initiated.as_ref().map(|group| group.held_bytes(*rank)).unwrap_or_default();
                    let own_bytes = held.buffers + held.own_slots;
                    let shared_bytes = held.shared_slots / u64::from(held.sharing.max(1));
                    self.answer(id, Response::CommMemory { own_bytes, shared_bytes }, &[]);
                }
                _ => self.refuse(id, ErrorClass::InvalidArgument, format!("there is no communicator {comm:?}")),
            },
            Request::InitRank { id: unique_id, rank, nranks, gpu, root_address, role, options } => {
                if !options.has_valid_names() {
                    let message = format!(
                        "a communicator's name has at most {COMM_NAME_BYTES_MAX} bytes, and no control characters"
                    );
                    return self.refuse(id, ErrorClass::InvalidArgument, message);
                }
                let gpu = match gpu.map(|gpu| self.find_gpu(&gpu)).transpose() {
                    Ok(gpu) => gpu,
                    Err(message) => return self.refuse(id, ErrorClass::InvalidArgument, message),
                };
                let root = match root_address.as_str() {
                    "" => None,
                    address => match Name::new(address) {
                        Some(root) => Some(root),
                        None => {
                            let message = format!("root address {address:?}: it is the name of the host of rank 0");
                            return self.refuse(id, ErrorClass::InvalidArgument, message);
                        }
                    },
                };
                let joining = Joining { role, has_same_id: true, rank, nranks };
                self.join(id, unique_id, root, joining, gpu, options);
            }
            Request::DestroyComm { comm } => self.destroy_comm(id, comm),
            Request::AbortComm { comm, cuda_error } => match self.tables.comms.get(comm) {
                Some(
                    CommSlot::Ready { comm: proxy_comm, place, rank, .. }
                    | CommSlot::Leaving { comm: proxy_comm, place, rank, .. },
                ) => {
                    let (place, rank, reply) = (*place, *rank, Some((comm, self.replies.sender())));
                    let message = SessionMessage::Abort { comm: *proxy_comm, rank, cuda_error, reply };
                    let waiting = self.aborting.entry(comm).or_default();
                    if waiting.len() >= ABORTS_WAITING_MAX {
                        return self.refuse(id, ErrorClass::InvalidUsage, "the communicator is being aborted");
                    }
                    waiting.push(id);
                    // One at a time, so that answers have their room.
                    if waiting.len() == 1 {
                        self.send(place, message);
                    }
                }
                _ => self.refuse(id, ErrorClass::InvalidArgument, format!("there is no communicator {comm:?}")),
            },
            Request::OpenPart { comm, part } => self.open_part(id, comm, part),
            Request::MakeTwin { comm, region, offset_bytes, bytes, peer } => {
                self.make_twin(id, TwinPart { comm, peer, region, offset_bytes }, bytes);
            }
        }
    }

    /// Has memory of a communicator made that a rank uses first.
    fn open_part(&mut self, id: u64, comm: Handle, part: CommPart) {
        let Some(CommSlot::Ready { comm, rank, info, .. }) = self.tables.comms.get(comm) else {
            return self.refuse(id, ErrorClass::InvalidArgument, format!("there is no communicator {comm:?}"));
        };
        let Some(group) = &info.device_initiated else {
            return self.refuse(id, ErrorClass::InvalidArgument, "the communicator is none of GPUs");
        };
        let (comm, rank, group, replies) = (*comm, *rank as usize, Arc::clone(group), self.replies.sender());
        if self.opening >= OPENING_MAX {
            return self.refuse(id, ErrorClass::InvalidUsage, "the session opens too much memory at a time");
        }
        self.opening += 1;
        // The mailbox has room for so many.
        let reply = Box::new(move |opened| drop(replies.send(ProxyReply::Opened { request: id, opened })));
        group.open(OpenPart { comm, rank, part, reply });
    }

    /// A new stream, unless there are too many, which is answered.
    fn add_stream(&mut self, id: u64, overlaps: bool) -> Option<Handle> {
        let stream = self.tables.streams.insert(StreamSlot { next_ticket: 1, group_length: 0, overlaps });
        if stream.is_err() {
            let message = self.session.tenant.session_is_full(SessionResource::Streams);
            self.refuse(id, ErrorClass::InvalidUsage, message);
        }
        stream.ok()
    }

    fn create_ordered_stream(&mut self, id: u64, region: Handle, offset_bytes: u64, overlaps: bool) {
        let known = self.tables.regions.get(region).map(Arc::clone);
        let Some(semaphore) = known.and_then(|region| StreamSemaphore::new(region, offset_bytes)) else {
            let message = format!("there is no place for a semaphore at {offset_bytes} bytes of region {region:?}");
            return self.refuse(id, ErrorClass::InvalidArgument, message);
        };
        let Some(stream) = self.add_stream(id, overlaps) else { return };
        let session = Arc::clone(&self.session);
        self.send(Place::Host, SessionMessage::StreamOrdered { session, stream, semaphore });
        self.answer(id, Response::Stream { stream, word: stream.index }, &[]);
    }

    fn destroy_stream(&mut self, id: u64, stream: Handle) {
        // Told, not only ended: between the two an engine still raises the word, which would be another stream's.
        let reset = |slot: &StreamSlot| self.session.reset_word(stream.index, slot.next_ticket - 1);
        match self.tables.streams.get(stream).map(reset) {
            None => self.refuse(id, ErrorClass::InvalidArgument, format!("there is no stream {stream:?}")),
            Some(false) => {
                let message = "the stream has work in flight: synchronize it before destroying it";
                self.refuse(id, ErrorClass::InvalidUsage, message);
            }
            Some(true) => {
                self.tables.streams.remove(stream);
                for place in [Place::Host, Place::Gpus] {
                    self.send(place, SessionMessage::StreamClosed { session: self.session.id, stream: stream.index });
                }
                self.answer(id, Response::Done, &[]);
            }
        }
    }

    fn add_region(&mut self, id: u64, bytes: u64, foreign: Option<BorrowedFd<'_>>) {
        // Before the charge: what leaves behind this look may come back behind the charge.
        let is_leaving = self.session.tenant.is_memory_leaving();
        let charge = |resource, amount| self.session.tenant.charge(resource, amount);
        let charges = charge(Resource::MemoryBytes, bytes)
            .and_then(|memory| Ok([memory, charge(Resource::Mappings, Mapping::count(bytes))?]));
        let charges = match charges {
            Ok(charges) => charges,
            Err(_) if is_leaving => return self.defer(id, bytes, foreign),
            Err(error) => return self.refuse(id, ErrorClass::InvalidUsage, error.to_string()),
        };
        let pages = if foreign.is_some() { Pages::Tenant } else { Pages::Service };
        let mapped = match foreign {
            Some(fd) => Mapping::map(fd, bytes).and_then(|mapping| match is_whole(fd, bytes)? {
                true => Ok((None, mapping)),
                false => Err(ShmError::Sparse),
            }),
            None => Mapping::create("mccs-region", bytes).map(|(fd, mapping)| (Some(fd), mapping)),
        };
        let (fd, mapping) = match mapped {
            Ok(mapped) => mapped,
            Err(error) => return self.refuse(id, ErrorClass::InvalidArgument, error.to_string()),
        };
        let region = Arc::new(Region::new(mapping, pages, bytes, charges, self.unmap_worker.clone()));
        match self.tables.regions.insert(region) {
            Ok(region) => {
                let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
                self.answer(id, Response::Region { region, bytes }, &fds);
            }
            Err(_) => {
                let message = self.session.tenant.session_is_full(SessionResource::Regions);
                self.refuse(id, ErrorClass::InvalidUsage, message);
            }
        }
    }

    /// Asks again in a moment: memory that the tenant has freed is still counted.
    fn defer(&mut self, id: u64, bytes: u64, foreign: Option<BorrowedFd<'_>>) {
        let request = match foreign {
            Some(_) => Request::RegisterMemory { bytes },
            None => Request::AllocMemory { bytes },
        };
        match foreign.map(|fd| fd.try_clone_to_owned()).transpose() {
            Ok(fd) => self.deferred = Some((RequestEnvelope { id, request }, fd.into_iter().collect())),
            Err(error) => self.refuse(id, ErrorClass::System, format!("the service cannot keep a descriptor: {error}")),
        }
    }

    /// Asks again what was deferred. Returns whether it was answered.
    pub(super) fn serve_deferred(&mut self) -> bool {
        let Some((envelope, mut fds)) = self.deferred.take() else { return false };
        self.serve(envelope, &mut fds);
        fds.into_iter().for_each(|fd| self.session.tenant.closer.close_later(fd));
        self.deferred.is_none()
    }

    /// Keeps segments for the region that they are going to be, or drops all there are.
    fn name_gpu_segments(&mut self, id: u64, bytes: &[u64], fds: &mut Vec<OwnedFd>) {
        let named = self.tables.gpu_segments.len() + bytes.len();
        let mut refused = None;
        if bytes.is_empty() || bytes.len() != fds.len() {
            refused = Some((ErrorClass::InvalidArgument, "segments come with a descriptor each".to_owned()));
        } else if named > GPU_SEGMENTS_MAX {
            refused = Some((ErrorClass::InvalidUsage, format!("a region has at most {GPU_SEGMENTS_MAX} segments")));
        }
        // Descriptors behind one that is refused are left to the caller, which does not close them here.
        for bytes in bytes {
            if refused.is_some() {
                break;
            }
            match Segment::new(&self.session.tenant, fds.remove(0), *bytes) {
                Ok(segment) => self.tables.gpu_segments.push(segment),
                Err(error @ SegmentRefused::OverQuota(_)) => {
                    refused = Some((ErrorClass::InvalidUsage, error.to_string()))
                }
                Err(error) => refused = Some((ErrorClass::InvalidArgument, error.to_string())),
            }
        }
        match refused {
            None => self.answer(id, Response::Done, &[]),
            Some((class, message)) => {
                self.tables.gpu_segments.clear();
                self.refuse(id, class, message);
            }
        }
    }

    /// Registers memory of a GPU's, as a region that `make` makes.
    fn add_gpu_region(
        &mut self,
        id: u64,
        gpu: &GpuUuid,
        make: impl FnOnce(&Importer) -> Result<GpuRegion, RegionRefused>,
    ) {
        let found = self.find_gpu(gpu).and_then(|_| match &self.proxies.gpus {
            Ok(gpus) => Ok(&gpus.importer),
            Err(reason) => Err(reason.to_string()),
        });
        // The memory is the tenant's own: what it costs the service is limited by the number of regions.
        let region = match found.and_then(|importer| make(importer).map_err(|refused| refused.to_string())) {
            Ok(region) => region,
            Err(message) => return self.refuse(id, ErrorClass::InvalidArgument, message),
        };
        let bytes = region.len_bytes();
        match self.tables.gpu_regions.insert(Arc::new(region)) {
            Ok(region) => self.answer(id, Response::Region { region, bytes }, &[]),
            Err(_) => {
                let message = self.session.tenant.session_is_full(SessionResource::GpuRegions);
                self.refuse(id, ErrorClass::InvalidUsage, message);
            }
        }
    }

    /// The place of a GPU among those of the service.
    fn find_gpu(&self, uuid: &GpuUuid) -> Result<usize, String> {
        match &self.proxies.gpus {
            Err(reason) => Err(format!("this service has no GPUs: {reason}")),
            Ok(GpuProxy { ids: known, .. }) => known.iter().position(|gpu| gpu == uuid).ok_or_else(|| {
                let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
                format!("the service does not have the GPU with UUID {hex}; it has {} others", known.len())
            }),
        }
    }

    fn join(
        &mut self,
        request: u64,
        id: UniqueId,
        root: Option<Name>,
        joining: Joining,
        gpu: Option<usize>,
        options: JoinOptions,
    ) {
        let Joining { role, rank, nranks, .. } = joining;
        let part = match self.part_of(id, joining, gpu) {
            Ok(part) => part,
            Err(message) => return self.refuse(request, ErrorClass::InvalidArgument, message),
        };
        let (part, charge) = match part {
            Some((part, charge)) => (Some(part), Arc::new(charge)),
            None => match self.session.tenant.charge_rank(id) {
                Ok(charge) => (None, Arc::new(charge)),
                Err(error) => return self.refuse(request, ErrorClass::InvalidUsage, error.to_string()),
            },
        };
        // Ranks that name a root may be on several hosts, and GPUs of one host may not reach each other. Then their data go through memory of the host,
        // whose proxy engine hands on those that turn out to reach each other.
        let is_alone =
            root.is_none() && self.proxies.execution == Execution::Ranks && self.proxies.all_reach_each_other(nranks);
        let is_on_gpus = gpu.is_some() && (is_alone && !role.is_in_host_memory() || role.is_on_gpus());
        let place = if is_on_gpus { Place::Gpus } else { Place::Host };
        let whole = part.as_ref().and_then(|_| role.whole());
        let seat = Seat { role, whole, id, gpu, charge: Arc::clone(&charge), twins: Vec::new() };
        let Ok(tenant_comm) = self.tables.comms.insert(CommSlot::Joining(seat)) else {
            let message = self.session.tenant.session_is_full(SessionResource::Ranks);
            return self.refuse(request, ErrorClass::InvalidUsage, message);
        };
        let (session, reply) = (Arc::clone(&self.session), self.replies.sender());
        let options = self.allowed(options);
        session.is_of_job(&options.job);
        part.iter().for_each(|part| part.family.joins());
        let gpu_group = gpu.and_then(|gpu| self.proxies.gpu_group(gpu));
        let join = JoinRequest {
            session,
            request,
            tenant_comm,
            id,
            rank,
            nranks,
            gpu,
            gpu_group,
            role,
            root,
            options,
            charge,
            part,
            reply,
        };
        self.send(place, SessionMessage::Join(Box::new(join)));
    }

    /// What a rank joins as a part, with its share of the whole's quota; none where it joins a whole.
    fn part_of(&self, id: UniqueId, joining: Joining, gpu: Option<usize>) -> Result<Option<(PartOf, Charge)>, String> {
        if let Role::GraphsOfRail { whole, .. } = joining.role {
            let charge = self.session.tenant.charge_rank(id).map_err(|error| error.to_string())?;
            return Ok(Some((self.part_of_process(whole, joining)?, charge)));
        }
        let Some(whole) = joining.role.whole() else { return Ok(None) };
        let refused = |why: String| Err(format!("a rank cannot join a part of communicator {whole:?}: {why}"));
        let Some(CommSlot::Ready { rank, info, seat, .. }) = self.tables.comms.get(whole) else {
            // What graphs replay may be of a session of its own, which ends it.
            let is_apart = matches!(joining.role, Role::Graphs { .. });
            return if is_apart { Ok(None) } else { refused("the session has no such rank".into()) };
        };
        if let Some((_, message)) = info.family.failure() {
            return refused(format!("it has failed: {message}"));
        }
        if seat.gpu != gpu {
            return refused("its rank is on another GPU".into());
        }
        if self.tables.comms.iter().any(|(_, slot)| slot.seat().whole.is_some() && slot.seat().role == joining.role) {
            return refused("the rank has joined such a part before".into());
        }
        let joining = Joining { has_same_id: seat.id == id, ..joining };
        match info.part_for(*rank, joining) {
            Ok(part) => Ok(Some((part, seat.charge.part()))),
            Err(why) => refused(why),
        }
    }

    /// What a rank joins as a part of a whole that another session of its process has.
    fn part_of_process(&self, whole: UniqueId, joining: Joining) -> Result<PartOf, String> {
        let (tenant, pid) = (&self.session.tenant.name, self.session.peer.pid);
        let is_whole = |comm: &Arc<CommInfo>| comm.id == whole && comm.part.is_none() && comm.tenant == *tenant;
        let comms = self.registry.comms();
        let comm = comms.iter().find(|comm| is_whole(comm) && comm.ranks.iter().any(|rank| rank.pid == pid));
        let comm = comm.ok_or("the process has no rank of such a communicator")?;
        if let Some((_, message)) = comm.family.failure() {
            return Err(format!("its communicator has failed: {message}"));
        }
        let own = comm.ranks.iter().filter(|rank| rank.pid == pid);
        let joined = own.map(|rank| comm.part_for(rank.rank, joining));
        joined.reduce(|one, other| one.or(other)).unwrap_or_else(|| Err("the process has no rank of it".into()))
    }

    /// Whether a communicator is a whole, or a part of one that the session has.
    fn has_its_whole(&self, comm: Handle) -> bool {
        let whole = self.tables.comms.get(comm).and_then(|slot| slot.seat().whole);
        whole.is_none_or(|whole| matches!(self.tables.comms.get(whole), Some(CommSlot::Ready { .. })))
    }

    /// A tenant leaves a communicator, and with a whole its parts.
    fn destroy_comm(&mut self, request: u64, comm: Handle) {
        match self.tables.comms.get(comm) {
            Some(CommSlot::Ready { .. }) => {}
            Some(CommSlot::Leaving { is_asked: false, .. }) => return self.answer(request, Response::Done, &[]),
            _ => {
                return self.refuse(request, ErrorClass::InvalidArgument, format!("there is no communicator {comm:?}"));
            }
        }
        let is_part = |slot: &CommSlot| slot.seat().whole == Some(comm) && matches!(slot, CommSlot::Ready { .. });
        let parts: Vec<Handle> =
            self.tables.comms.iter().filter(|(_, slot)| is_part(slot)).map(|(part, _)| part).collect();
        parts.into_iter().for_each(|part| self.leave(None, part));
        self.leave(Some(request), comm);
    }

    /// A rank leaves when its operations have ended, because a request asks for it or its whole is left.
    fn leave(&mut self, request: Option<u64>, tenant_comm: Handle) {
        let Some(slot) = self.tables.comms.get_mut(tenant_comm) else { return };
        let CommSlot::Ready { comm, place, rank, seat, .. } = slot else { return };
        let (comm, place, rank, seat) = (*comm, *place, *rank, seat.clone());
        *slot = CommSlot::Leaving { comm, place, rank, seat, is_asked: request.is_some() };
        let reply = self.replies.sender();
        self.send(place, SessionMessage::Leave { comm, rank, request, tenant_comm, reply });
    }

    /// What a tenant asks of a communicator, without a traffic class that the operator does not allow.
    fn allowed(&self, options: JoinOptions) -> JoinOptions {
        let tenant = &self.session.tenant;
        let traffic_class = options.traffic_class.filter(|class| tenant.allows_class(*class));
        if let Some(class) = options.traffic_class.filter(|_| traffic_class.is_none()) {
            tracing::debug!(
                tenant = %tenant.name,
                class,
                "a communicator runs without the traffic class that it asks for: [[tenant]] traffic_classes lacks it"
            );
        }
        JoinOptions { traffic_class, ..options }
    }

    pub(super) fn take_reply(&mut self, reply: ProxyReply) {
        match reply {
            ProxyReply::Joined { request, tenant_comm, comm, rank, info, memory, share } => {
                let shm_exchange = info.shm_exchange.as_ref().map(|shm_exchange| shm_exchange.layout());
                let reduction_ring = info.reduction_ring.clone();
                let (hosts_told, pinned_to) = (info.host_runs.clone(), self.proxies.pinned_to(&info));
                let may_have_engines = info.is_staged() && info.hosts.len() <= 1 && info.nranks > 1;
                // Who was to be staged may have been found to have all peers on this host.
                let place = if info.device_initiated.is_some() { Place::Gpus } else { Place::Host };
                if let Some(slot) = self.tables.comms.get_mut(tenant_comm)
                    && let CommSlot::Joining(seat) = slot
                {
                    *slot = CommSlot::Ready { comm, place, rank, info, rounds: 0, seat: seat.clone() };
                }
                if !self.has_its_whole(tenant_comm) {
                    self.leave(None, tenant_comm);
                    return self.refuse(
                        request,
                        ErrorClass::InvalidUsage,
                        "its whole has been left while it was joined",
                    );
                }
                let device_initiated = share.map(|share| share.of_rank(rank));
                let access = self.proxies.access;
                let engines_from = self.proxies.engines_from.filter(|_| may_have_engines);
                let (comm, hosts, rails_from) = (tenant_comm, hosts_told, self.proxies.rails_from);
                let answer = Response::Comm {
                    comm,
                    shm_exchange,
                    device_initiated,
                    access,
                    engines_from,
                    hosts,
                    rails_from,
                    pinned_to,
                    reduction_ring,
                };
                self.answer_with_shared(request, answer, &memory);
            }
            ProxyReply::JoinFailed { request, tenant_comm, class, message } => {
                self.tables.comms.remove(tenant_comm);
                self.refuse(request, class, message);
            }
            ProxyReply::Left { request, tenant_comm } => {
                self.tables.comms.remove(tenant_comm);
                if let Some(request) = request {
                    self.answer(request, Response::Done, &[]);
                }
            }
            ProxyReply::Opened { request, opened } => {
                self.opening -= 1;
                match opened {
                    Ok(OpenedPart { handles, fds }) => {
                        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                        self.answer(request, Response::Part { handles }, &fds);
                    }
                    Err(refusal) => self.refuse(request, refusal.class, refusal.message),
                }
            }
            ProxyReply::TwinMade { request, part, made } => {
                self.opening -= 1;
                self.add_twin(request, part, made);
            }
            ProxyReply::Aborted { tenant_comm } => {
                for request in self.aborting.remove(&tenant_comm).unwrap_or_default() {
                    self.answer(request, Response::Done, &[]);
                }
            }
        }
    }
}
