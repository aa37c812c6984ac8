//! The daemon engine of a session: the boundary between a tenant's process and the service.
//!
//! ```text
//!           hello, version agrees                  socket closed, or fenced
//! Greeting -----------------------> Serving ------------------------------------> Closing --told--> (done)
//!     |        no hello in time        | requests (socket) and commands (ring)        ^
//!     +--------------------------------+----------------------------------------------+
//! ```
//!
//! Everything that crosses here is copied once and checked (`validate.rs`) before anything else sees it.

mod acceptor;
mod on_gpus;
mod tables;
mod validate;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use mccs_ipc::command::{Command, Opcode};
use mccs_ipc::direct::GpuUuid;
use mccs_ipc::gate::GateAccess;
use mccs_ipc::handshake::{Socket, SocketError};
use mccs_ipc::protocol::{MAGIC, Request, RequestEnvelope, Response, ResponseEnvelope, SegmentLayout, VERSION};
use mccs_ipc::queue::Consumer;
use mccs_ipc::shm::Mapping;
use mccs_ipc::sync::Doorbell;
use mccs_ipc::types::{ErrorClass, Handle, UniqueId};

pub use self::acceptor::{Acceptor, Admission, SessionFactory, SessionLimits};
use self::tables::{CommSlot, StreamSlot, Tables};
use self::validate::{Fence, posted, validate};
use crate::devices::cuda::Importer;
use crate::engines::proxy::{JoinRequest, ProxyMessage, ProxyReply, RoundState, StreamGate};
use crate::exchange::protocol::Name;
use crate::memory::{Reaper, Region};
use crate::runtime::{Context, Engine, Mailbox, Progress, Sender};
use crate::session::Session;
use crate::telemetry::Registry;
use crate::tenants::{Charge, Resource};

/// How long a new connection has to say hello.
const HELLO_WITHIN: Duration = Duration::from_secs(5);
/// How often the socket is looked at while the ring keeps the engine awake. A sleeping engine is woken by it at once.
const SOCKET_EVERY: Duration = Duration::from_micros(200);

/// How long a tenant may leave a full socket unread.
const ANSWERED_WITHIN: Duration = Duration::from_secs(10);
/// How often a full socket is tried again.
const ANSWER_AGAIN_AFTER: Duration = Duration::from_millis(1);

/// Most requests that wait for commands before them; the rest waits in the socket. Covers a tenant that lets go of all it
/// has at once.
const PARKED_MAX: usize = 4096;

/// The proxy engines of a service.
#[derive(Clone)]
pub struct Proxies {
    /// Of the host device.
    pub host: Sender<ProxyMessage>,
    /// Of the GPUs; or why there are none.
    pub gpus: Result<GpuProxy, Arc<str>>,
    /// Whether ranks on GPUs of this host alone are staged, too.
    pub stages_all: bool,
    /// How streams of GPUs tell the service, and wait for it.
    pub access: GateAccess,
    /// This host, as ranks of others name it when rank 0 is here; empty where there are no others.
    pub root_address: Arc<str>,
}

/// The proxy engine of the GPUs.
#[derive(Clone)]
pub struct GpuProxy {
    /// Where to send to.
    pub sender: Sender<ProxyMessage>,
    /// UUIDs of the GPUs, as the device counts them.
    pub ids: Arc<[GpuUuid]>,
    /// Makes regions of tenants' memory there.
    pub importer: Importer,
}

/// Which proxy engine something is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Host,
    Gpus,
}

impl Proxies {
    #[expect(clippy::result_large_err, reason = "a message that finds no room is given back as it is")]
    fn send(&self, place: Place, message: ProxyMessage) -> Result<(), ProxyMessage> {
        match (place, &self.gpus) {
            (Place::Host, _) => self.host.send(message),
            (Place::Gpus, Ok(gpus)) => gpus.sender.send(message),
            (Place::Gpus, Err(_)) => Ok(()),
        }
    }
}

enum State {
    Greeting { deadline: Instant },
    Serving,
    Closing,
}

/// The engine of one session. See the module's documentation.
pub struct SessionEngine {
    state: State,
    session: Arc<Session>,
    socket: Socket,
    doorbell: Doorbell,
    /// Sent with the welcome, then dropped.
    segment_fd: Option<OwnedFd>,
    layout: SegmentLayout,
    /// How long the tenant is to poll.
    spin: Duration,
    commands: Consumer<Command>,
    tables: Tables,
    proxies: Proxies,
    replies: Mailbox<ProxyReply>,
    /// Messages that the proxy engine had no room for yet. While there are any, nothing new is taken in.
    outbox: VecDeque<(Place, ProxyMessage)>,
    registry: Arc<Registry>,
    reaper: Reaper,
    /// Answers for which the socket had no room. While there are any, no request is read: so they are no more than the
    /// tenant's joins in progress, and what was parked.
    unsent: VecDeque<(ResponseEnvelope, Vec<OwnedFd>)>,
    /// Since when the first of them waits.
    unsent_since: Option<Instant>,
    /// Commands taken from the ring.
    popped: u64,
    /// Requests that end something which commands still in the ring may name, in order, each with the number of commands
    /// to be taken first. The socket would overtake the ring otherwise.
    parked: VecDeque<(u64, RequestEnvelope)>,
    look_at_socket: Instant,
    slept: bool,
    _charge: Charge,
}

impl SessionEngine {
    fn send(&mut self, place: Place, message: ProxyMessage) {
        if self.outbox.is_empty() {
            if let Err(message) = self.proxies.send(place, message) {
                self.outbox.push_back((place, message));
            }
        } else {
            self.outbox.push_back((place, message));
        }
    }

    /// Returns whether the outbox is empty.
    fn flush(&mut self) -> bool {
        while let Some((place, message)) = self.outbox.pop_front() {
            if let Err(message) = self.proxies.send(place, message) {
                self.outbox.push_front((place, message));
                return false;
            }
        }
        true
    }

    fn answer(&mut self, id: u64, response: Response, fds: &[BorrowedFd<'_>]) {
        let envelope = ResponseEnvelope { id, response };
        let sent = if self.unsent.is_empty() { self.socket.send(&envelope, fds) } else { Err(SocketError::WouldBlock) };
        match sent {
            Ok(()) => {}
            Err(SocketError::WouldBlock) => {
                let kept: std::io::Result<Vec<_>> = fds.iter().map(|fd| fd.try_clone_to_owned()).collect();
                match kept {
                    Ok(fds) => self.unsent.push_back((envelope, fds)),
                    Err(error) => self.hang_up(&error),
                }
            }
            Err(error) => self.hang_up(&error),
        }
    }

    /// The tenant has gone, or cannot be answered, which is as good as gone.
    fn hang_up(&mut self, error: &dyn std::fmt::Display) {
        tracing::debug!(session = self.session.id, %error, "cannot answer");
        self.close();
    }

    /// Sends answers that found no room before. Returns whether all are on their way.
    fn send_unsent(&mut self, now: Instant) -> bool {
        while let Some((envelope, fds)) = self.unsent.front() {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            match self.socket.send(envelope, &fds) {
                Ok(()) => {
                    self.unsent.pop_front();
                    self.unsent_since = None;
                }
                Err(SocketError::WouldBlock) if now < *self.unsent_since.get_or_insert(now) + ANSWERED_WITHIN => {
                    return false;
                }
                Err(error) => {
                    self.hang_up(&error);
                    return true;
                }
            }
        }
        true
    }

    fn refuse(&mut self, id: u64, class: ErrorClass, message: impl Into<String>) {
        self.answer(id, Response::Error { class, message: message.into() }, &[]);
    }

    /// Ends the session with a reason that the tenant is told.
    fn fence(&mut self, reason: &str) {
        tracing::debug!(session = self.session.id, tenant = %self.session.tenant.name, pid = self.session.peer.pid, reason, "session fenced");
        let message = format!("the service ended this session: {reason}");
        let response = Response::Error { class: ErrorClass::InvalidUsage, message };
        let _ = self.socket.send(&ResponseEnvelope { id: 0, response }, &[]);
        self.close();
    }

    fn close(&mut self) {
        if !matches!(self.state, State::Closing) {
            self.state = State::Closing;
            let session = self.session.id;
            let closed = [Place::Host, Place::Gpus].map(|place| (place, ProxyMessage::SessionClosed { session }));
            self.outbox.extend(closed);
        }
    }

    fn greet(&mut self) {
        match self.socket.recv_hello() {
            Ok(None) => {}
            Ok(Some(hello)) if hello.magic == MAGIC && hello.version == VERSION => self.welcome(),
            Ok(Some(hello)) => {
                // The other side compares versions itself, and says what to do.
                tracing::debug!(session = self.session.id, version = hello.version, "another version");
                let _ = self.socket.send_hello(ErrorClass::InvalidUsage.to_wire());
                self.close();
            }
            Err(_) => self.close(),
        }
    }

    fn welcome(&mut self) {
        let (session, tenant) = (self.session.id, self.session.tenant.name.clone());
        let operations_in_flight_max = self.session.tenant.quota.operations_in_flight;
        let (layout, spin, root_address) = (self.layout, self.spin, self.proxies.root_address.to_string());
        let welcome = Response::Welcome { session, tenant, layout, spin, operations_in_flight_max, root_address };
        let sent = self.socket.send_hello(0).and_then(|()| match &self.segment_fd {
            Some(segment) => {
                let fds = [segment.as_fd(), self.doorbell.as_fd()];
                self.socket.send(&ResponseEnvelope { id: 0, response: welcome }, &fds)
            }
            None => Ok(()),
        });
        self.segment_fd = None;
        match sent {
            Ok(()) => self.state = State::Serving,
            Err(_) => self.close(),
        }
    }

    /// Takes requests off the socket. Returns whether there was one.
    fn serve_socket(&mut self, budget: usize) -> bool {
        for served in 0..budget {
            if !matches!(self.state, State::Serving) || !self.outbox.is_empty() {
                return true;
            }
            if self.parked.len() >= PARKED_MAX {
                return served > 0;
            }
            match self.socket.recv::<RequestEnvelope>() {
                Ok(None) => return served > 0,
                Ok(Some((envelope, fds))) => self.park_or_serve(envelope, fds),
                Err(SocketError::Closed) => self.close(),
                Err(error) => self.fence(&error.to_string()),
            }
        }
        true
    }

    fn park_or_serve(&mut self, envelope: RequestEnvelope, fds: Vec<OwnedFd>) {
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
    fn serve_parked(&mut self) -> bool {
        let mut any = false;
        while matches!(self.state, State::Serving)
            && self.outbox.is_empty()
            && let Some((_, envelope)) = self.parked.pop_front_if(|(after, _)| *after <= self.popped)
        {
            self.serve(envelope, Vec::new());
            any = true;
        }
        any
    }

    fn serve(&mut self, envelope: RequestEnvelope, mut fds: Vec<OwnedFd>) {
        let id = envelope.id;
        match envelope.request {
            Request::AllocMemory { bytes } => self.add_region(id, bytes, None),
            Request::RegisterMemory { bytes } => match fds.pop() {
                Some(fd) => self.add_region(id, bytes, Some(fd)),
                None => self.refuse(id, ErrorClass::InvalidArgument, "RegisterMemory comes with a memfd"),
            },
            Request::FreeMemory { region } => match self.tables.regions.remove(region) {
                Some(_) => self.answer(id, Response::Done, &[]),
                None => self.refuse(id, ErrorClass::InvalidArgument, format!("there is no region {region:?}")),
            },
            Request::RegisterGpuMemory { gpu, ipc_handle, bytes } => {
                self.add_gpu_region(id, &gpu, &ipc_handle, bytes);
            }
            Request::FreeGpuMemory { region } => match self.tables.gpu_regions.remove(region) {
                Some(_) => self.answer(id, Response::Done, &[]),
                None => self.refuse(id, ErrorClass::InvalidArgument, format!("there is no region {region:?}")),
            },
            Request::CreateStream => {
                if let Some(stream) = self.add_stream(id) {
                    self.answer(id, Response::Stream { stream, word: stream.index }, &[]);
                }
            }
            Request::CreateGatedStream { region, offset_bytes } => self.create_gated_stream(id, region, offset_bytes),
            Request::DestroyStream { stream } => self.destroy_stream(id, stream),
            Request::InitRank { id: unique_id, rank, nranks, gpu, root_address } => {
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
                self.join(id, (unique_id, root), (rank, nranks), gpu);
            }
            Request::DestroyComm { comm } => match self.tables.comms.get(comm) {
                Some(CommSlot::Ready { comm: proxy_comm, place, rank, .. }) => {
                    let (comm_at_proxy, place, rank, reply) = (*proxy_comm, *place, *rank, self.replies.sender());
                    self.tables.comms.remove(comm);
                    self.send(place, ProxyMessage::Leave { comm: comm_at_proxy, rank, request: id, reply });
                }
                _ => self.refuse(id, ErrorClass::InvalidArgument, format!("there is no communicator {comm:?}")),
            },
            Request::AbortComm { comm } => match self.tables.comms.get(comm) {
                Some(CommSlot::Ready { comm: proxy_comm, place, rank, .. }) => {
                    let (place, message) = (*place, ProxyMessage::Abort { comm: *proxy_comm, rank: *rank });
                    self.send(place, message);
                    self.answer(id, Response::Done, &[]);
                }
                _ => self.refuse(id, ErrorClass::InvalidArgument, format!("there is no communicator {comm:?}")),
            },
        }
    }

    /// A new stream, unless there are too many, which is answered.
    fn add_stream(&mut self, id: u64) -> Option<Handle> {
        let stream = self.tables.streams.insert(StreamSlot { next_ticket: 1, group_length: 0 });
        if stream.is_err() {
            let message = format!("a session has at most {} streams", self.layout.words);
            self.refuse(id, ErrorClass::InvalidUsage, message);
        }
        stream.ok()
    }

    fn create_gated_stream(&mut self, id: u64, region: Handle, offset_bytes: u64) {
        let known = self.tables.regions.get(region).map(Arc::clone);
        let Some(gate) = known.and_then(|region| StreamGate::new(region, offset_bytes)) else {
            let message = format!("there is no place for a gate at {offset_bytes} bytes of region {region:?}");
            return self.refuse(id, ErrorClass::InvalidArgument, message);
        };
        let Some(stream) = self.add_stream(id) else { return };
        let session = Arc::clone(&self.session);
        self.send(Place::Host, ProxyMessage::StreamGated { session, stream, gate });
        self.answer(id, Response::Stream { stream, word: stream.index }, &[]);
    }

    fn destroy_stream(&mut self, id: u64, stream: Handle) {
        let idle = |slot: &StreamSlot| self.session.last_ended(stream.index) >= slot.next_ticket - 1;
        match self.tables.streams.get(stream).map(idle) {
            None => self.refuse(id, ErrorClass::InvalidArgument, format!("there is no stream {stream:?}")),
            Some(false) => {
                let message = "the stream has work in flight: synchronize it before destroying it";
                self.refuse(id, ErrorClass::InvalidUsage, message);
            }
            Some(true) => {
                self.tables.streams.remove(stream);
                self.session.reset_word(stream.index);
                for place in [Place::Host, Place::Gpus] {
                    self.send(place, ProxyMessage::StreamClosed { session: self.session.id, stream: stream.index });
                }
                self.answer(id, Response::Done, &[]);
            }
        }
    }

    fn add_region(&mut self, id: u64, bytes: u64, foreign: Option<OwnedFd>) {
        let charge = match self.session.tenant.charge(Resource::MemoryBytes, bytes) {
            Ok(charge) => charge,
            Err(error) => return self.refuse(id, ErrorClass::InvalidUsage, error.to_string()),
        };
        let mapped = match foreign {
            Some(fd) => Mapping::map(fd.as_fd(), bytes).map(|mapping| (None, mapping)),
            None => Mapping::create("mccs-region", bytes).map(|(fd, mapping)| (Some(fd), mapping)),
        };
        let (fd, mapping) = match mapped {
            Ok(mapped) => mapped,
            Err(error) => return self.refuse(id, ErrorClass::InvalidArgument, error.to_string()),
        };
        let region = Arc::new(Region::new(mapping, bytes, charge, self.reaper.clone()));
        match self.tables.regions.insert(region) {
            Ok(region) => {
                let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
                self.answer(id, Response::Region { region, bytes }, &fds);
            }
            Err(_) => {
                let message = format!("a session has at most {} regions", self.session.tenant.quota.regions);
                self.refuse(id, ErrorClass::InvalidUsage, message);
            }
        }
    }

    /// Registers an allocation of a GPU's.
    fn add_gpu_region(&mut self, id: u64, gpu: &GpuUuid, ipc_handle: &[u8], bytes: u64) {
        let found = self.find_gpu(gpu).and_then(|_| match &self.proxies.gpus {
            Ok(gpus) => Ok(gpus.importer.clone()),
            Err(reason) => Err(reason.to_string()),
        });
        let importer = match found {
            Ok(importer) => importer,
            Err(message) => return self.refuse(id, ErrorClass::InvalidArgument, message),
        };
        // The memory is the tenant's own: what it costs the service is limited by the number of regions.
        let Some(region) = importer.region(ipc_handle, bytes) else {
            let message = format!("a handle of {} bytes names no memory of a GPU", ipc_handle.len());
            return self.refuse(id, ErrorClass::InvalidArgument, message);
        };
        match self.tables.gpu_regions.insert(Arc::new(region)) {
            Ok(region) => self.answer(id, Response::Region { region, bytes }, &[]),
            Err(_) => {
                let message = format!("a session has at most {} regions of GPUs", self.session.tenant.quota.regions);
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
        (id, root): (UniqueId, Option<Name>),
        (rank, nranks): (u32, u32),
        gpu: Option<usize>,
    ) {
        let charge = match self.session.tenant.charge(Resource::Communicators, 1) {
            Ok(charge) => charge,
            Err(error) => return self.refuse(request, ErrorClass::InvalidUsage, error.to_string()),
        };
        // Ranks that name a root may be on several hosts: then their data goes through memory of the host.
        let is_direct = gpu.is_some() && root.is_none() && !self.proxies.stages_all;
        let place = if is_direct { Place::Gpus } else { Place::Host };
        let Ok(tenant_comm) = self.tables.comms.insert(CommSlot::Joining) else {
            let message = "the session has as many communicators as its tenant may have";
            return self.refuse(request, ErrorClass::InvalidUsage, message);
        };
        let (session, reply) = (Arc::clone(&self.session), self.replies.sender());
        let join = JoinRequest { session, request, tenant_comm, id, rank, nranks, gpu, root, charge, reply };
        self.send(place, ProxyMessage::Join(Box::new(join)));
    }

    fn take_reply(&mut self, reply: ProxyReply) {
        match reply {
            ProxyReply::Joined { request, tenant_comm, comm, rank, info, memory, share } => {
                let board = info.board.as_ref().map(|board| board.layout());
                if let Some(slot) = self.tables.comms.get_mut(tenant_comm)
                    && matches!(slot, CommSlot::Joining)
                {
                    // Who was to be staged may have been found to have all peers on this host.
                    let place = if info.direct.is_some() { Place::Gpus } else { Place::Host };
                    *slot = CommSlot::Ready { comm, place, rank, info, rounds: 0 };
                }
                let fds: Vec<_> = memory.iter().map(AsFd::as_fd).collect();
                let direct = share.as_deref().cloned();
                let access = self.proxies.access;
                self.answer(request, Response::Comm { comm: tenant_comm, board, direct, access }, &fds);
            }
            ProxyReply::JoinFailed { request, tenant_comm, class, message } => {
                self.tables.comms.remove(tenant_comm);
                self.refuse(request, class, message);
            }
            ProxyReply::Left { request } => self.answer(request, Response::Done, &[]),
        }
    }

    /// Takes commands off the ring. Returns whether there was one.
    fn take_commands(&mut self, budget: usize) -> Result<bool, Fence> {
        let limit = self.session.tenant.quota.operations_in_flight;
        let mut any = false;
        for _ in 0..budget {
            if !self.outbox.is_empty() || self.session.in_flight() >= limit {
                break;
            }
            let Some(command) = self.commands.try_pop().map_err(|error| Fence(error.to_string()))? else { break };
            any = true;
            self.popped += 1;
            if command.opcode == Opcode::Posted as u32 {
                let comm = posted(&self.tables, &command)?;
                self.send(Place::Host, ProxyMessage::Posted { comm });
                continue;
            }
            self.session.begin_operation();
            let (place, operation) = validate(&self.session, &mut self.tables, &command)?;
            if operation.round == RoundState::None {
                self.session.counters.commands.fetch_add(1, Ordering::Relaxed);
            }
            self.send(place, ProxyMessage::Operation(operation));
        }
        // Also where commands are left in the ring for now.
        self.commands.release();
        Ok(any)
    }

    fn serve_ring(&mut self, budget: usize) -> bool {
        match self.take_commands(budget) {
            Ok(any) => any,
            Err(Fence(reason)) => {
                self.fence(&reason);
                true
            }
        }
    }
}

impl Engine for SessionEngine {
    fn name(&self) -> String {
        format!("daemon session {}", self.session.id)
    }

    fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.socket.as_fd(), self.doorbell.as_fd()]
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        if std::mem::take(&mut self.slept) {
            self.doorbell.clear();
            self.look_at_socket = cx.now;
        }
        let flushed = self.flush();
        let mut busy = !flushed;
        match self.state {
            State::Closing => return if flushed { Progress::Done } else { Progress::Busy },
            State::Greeting { deadline } => {
                self.greet();
                if matches!(self.state, State::Greeting { .. }) {
                    if cx.now < deadline {
                        return Progress::Idle { wake_at: Some(deadline) };
                    }
                    self.close();
                }
                return Progress::Busy;
            }
            State::Serving => {}
        }
        while let Some(reply) = self.replies.pop() {
            self.take_reply(reply);
            busy = true;
        }
        let answered = self.send_unsent(cx.now);
        if flushed {
            busy |= self.serve_ring(cx.budget);
            busy |= answered && self.serve_parked();
            if answered && cx.now >= self.look_at_socket && matches!(self.state, State::Serving) {
                self.look_at_socket = cx.now + SOCKET_EVERY;
                busy |= self.serve_socket(cx.budget);
            }
        }
        if busy || matches!(self.state, State::Closing) {
            Progress::Busy
        } else if answered {
            Progress::IDLE
        } else {
            Progress::Idle { wake_at: Some(cx.now + ANSWER_AGAIN_AFTER) }
        }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        if !self.outbox.is_empty() || !self.replies.is_empty() || matches!(self.state, State::Closing) {
            return false;
        }
        let limit = self.session.tenant.quota.operations_in_flight;
        let may_sleep = if self.session.in_flight() >= limit {
            // Commands stay in the ring until an operation ends.
            self.session.throttle(limit)
        } else {
            // A corrupt ring is found again, and fenced, by the next poll.
            self.commands.arm().unwrap_or(false)
        };
        self.slept = may_sleep;
        may_sleep
    }
}

impl Drop for SessionEngine {
    fn drop(&mut self) {
        self.registry.remove_session(self.session.id);
    }
}
