//! Tenants' requests over the socket: memory, streams, communicators; checked, answered or parked.
//!
//! A request that ends something waits for the commands that were in the ring before it. Joins and leaves are answered when
//! the proxy engine has.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_device::OpenPart;
use mccs_exchange::protocol::Name;
use mccs_ipc::device_initiated::CommPart;
use mccs_ipc::handshake::SocketError;
use mccs_ipc::port_channels::PortChannelRequest;
use mccs_ipc::protocol::{COMM_NAME_BYTES_MAX, Request, RequestEnvelope, Response};
use mccs_ipc::types::{ErrorClass, Handle};
use mccs_registry::Joining;
use mccs_tenants::{Resource, SessionResource};

use super::proxies::Place;
use super::tables::{CommSlot, StreamSlot};
use super::{Parked, SLOW_TO_CLOSE, SessionEngine, State};
use crate::proxy::{ProxyReply, SessionMessage, StreamSemaphore, TwinPart};

/// Most requests that wait for commands before them; the rest waits in the socket. Covers a tenant that lets go of all it
/// has at once.
const PARKED_MAX: usize = 4096;
/// Requests of a session for memory of communicators that wait for their answers: a process has no more threads that make first calls at a time.
pub(super) const OPENING_MAX: usize = 512;
/// A session whose tenant has made too many requests looks again after a pause, in proportion to the tenant's sessions: there are enough tokens for
/// all of them by then, and looks cost nobody much.
const PAUSE_OF_A_SESSION: Duration = Duration::from_millis(4);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// A request takes about as long as so many commands: it is received, answered, and often maps memory.
const REQUEST_ITEMS: usize = 16;

/// The host of rank 0; none where all ranks are at this service.
fn root_of(address: &str) -> Result<Option<Name>, String> {
    if address.is_empty() {
        return Ok(None);
    }
    Name::new(address)
        .map(Some)
        .ok_or_else(|| format!("root address {address:?}: it is the name of the host of rank 0"))
}

impl SessionEngine {
    /// Takes requests off the socket. Returns whether there was one.
    pub(super) fn serve_socket(&mut self, now: Instant, budget: usize) -> bool {
        for served in 0..(budget / REQUEST_ITEMS).max(1) {
            if !matches!(self.state, State::Serving) || !self.outbox.is_empty() {
                return true;
            }
            if self.is_crowded() || self.deferred.is_some() || self.pauses(now) {
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
                Ok(Some(envelope)) => {
                    self.session.tenant.note_request(now);
                    self.park_or_serve(envelope, &mut fds);
                }
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

    /// Whether requests wait for a while, because the tenant has made more than its rate, and others are here.
    fn pauses(&mut self, now: Instant) -> bool {
        let tenant = &self.session.tenant;
        if self.paused_until.is_none() && !tenant.may_request(now) && self.registry.has_others(tenant) {
            let sessions = tenant.used(Resource::Sessions).max(1) as u32;
            self.paused_until = Some(now + (PAUSE_OF_A_SESSION * sessions).min(PAUSE_MAX));
        }
        self.paused_until.is_some()
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
                | Request::PortChannel {
                    request: PortChannelRequest::Free { .. } | PortChannelRequest::CloseChannel { .. },
                    ..
                }
        );
        if !ends_something {
            return self.serve(envelope, fds);
        }
        // The tenant wrote the commands before it sent the request. A ring that lies is fenced by the next pop.
        let commands = self.popped + self.commands.waiting().unwrap_or(0);
        let triggers = self.triggers_before(&envelope.request);
        self.parked.push_back(Parked { commands, triggers, envelope });
        self.serve_parked();
    }

    /// Serves requests whose turn has come. Returns whether there was one.
    pub(super) fn serve_parked(&mut self) -> bool {
        let mut any = false;
        while matches!(self.state, State::Serving | State::Finishing { .. })
            && self.outbox.is_empty()
            && self.parked.front().is_some_and(|of| of.commands <= self.popped && self.are_taken(&of.triggers))
            && let Some(parked) = self.parked.pop_front()
        {
            if let Request::DestroyStream { stream } = parked.envelope.request
                && self.session.is_telling(stream.index)
            {
                // In a moment.
                self.parked.push_front(parked);
                return true;
            }
            self.serve(parked.envelope, &mut Vec::new());
            any = true;
        }
        any
    }

    pub(super) fn serve(&mut self, envelope: RequestEnvelope, fds: &mut Vec<OwnedFd>) {
        let id = envelope.id;
        match envelope.request {
            Request::AllocMemory { bytes } => self.add_region(id, bytes, None),
            Request::RegisterMemory { bytes } => match fds.last() {
                Some(fd) => self.add_region(id, bytes, Some(fd.as_fd())),
                None => self.refuse(id, ErrorClass::InvalidArgument, "RegisterMemory comes with a memfd"),
            },
            Request::FreeMemory { region } => match self.tables.regions.remove(region) {
                Some(_) => {
                    self.drop_twins_of(region);
                    self.drop_channel_memories_of(region);
                    self.answer(id, Response::Done, &[]);
                }
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
                let root = match root_of(&root_address) {
                    Ok(root) => root,
                    Err(message) => return self.refuse(id, ErrorClass::InvalidArgument, message),
                };
                let joining = Joining { role, has_same_id: true, rank, nranks };
                self.join(id, unique_id, root, joining, gpu, options);
            }
            Request::DestroyComm { comm } => self.destroy_comm(id, comm),
            Request::AbortComm { comm, cuda_error } => self.abort_comm(id, comm, cuda_error),
            Request::PortChannel { comm, request } => self.port_channel(id, comm, request),
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
        // From here on: they are made on another thread, and wait to be taken.
        let charge = match self.session.tenant.charge(Resource::Descriptors, group.descriptors_of(part)) {
            Ok(charge) => charge,
            Err(error) => return self.refuse(id, ErrorClass::InvalidUsage, error.to_string()),
        };
        self.opening += 1;
        // The mailbox has room for so many.
        let reply = Box::new(move |opened| drop(replies.send(ProxyReply::Opened { request: id, opened, charge })));
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
}
