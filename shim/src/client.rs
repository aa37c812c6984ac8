//! A client's session with the service: connects to `MCCS_SOCKET`, allocates, registers, makes
//! streams and communicators.

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::{Duration, Instant};

use mccs_ipc::command::Completion;
use mccs_ipc::handshake::{HandshakeError, SocketError, connect};
use mccs_ipc::protocol::{Request, Response, ResponseEnvelope, SegmentLayout};
use mccs_ipc::queue::{Consumer, Producer, QueueError};
use mccs_ipc::shm::{Mapping, ShmError};
use mccs_ipc::shm_exchange::ShmExchange;
use mccs_ipc::sync::{Doorbell, StreamWord};
use mccs_ipc::types::{ErrorClass, Handle, UniqueId};
use std::os::fd::AsFd;

use crate::builder::{CommunicatorBuilder, Joining};
use crate::cuda::{GpuRegions, Watch};
use crate::error::Origin;
use crate::log::{LogLevel, log};
use crate::memory::Regions;
use crate::requests::{Answer, LIVENESS_EVERY, Requests};
use crate::stream::Left;
use crate::submission::Submission;
use crate::{Communicator, Error, Region, Span, Stream};

/// How long the service has to welcome a connection.
const WELCOME_WITHIN: Duration = Duration::from_secs(10);

static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// A connected session. Cheap to clone; the session ends when the last clone, and everything made from it, is gone.
#[derive(Clone)]
pub struct Client(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    /// Number among this process' sessions, from 1: sessions of two services may have the same number there.
    pub(crate) number: u64,
    pub(crate) requests: Requests,
    pub(crate) doorbell: Doorbell,
    pub(crate) segment: Arc<Mapping>,
    pub(crate) layout: SegmentLayout,
    pub(crate) submission: Mutex<Submission>,
    /// Streams to be given back when their work has ended.
    pub(crate) left_streams: Mutex<Vec<Left>>,
    failures: Mutex<Failures>,
    /// As whom this session has joined communicators, until it leaves them.
    members: Mutex<HashMap<Handle, (UniqueId, u32)>>,
    pub(crate) regions: RwLock<Regions>,
    pub(crate) gpu_regions: Mutex<GpuRegions>,
    pub(crate) watch: Watch,
    /// How long a wait polls, giving its core away to whoever wants it, before it sleeps.
    pub(crate) spin: Duration,
    /// The same where only the service can end the wait: on the only CPU it would wait for this process.
    pub(crate) word_spin: Duration,
    pub(crate) operations_in_flight_max: u64,
    socket: PathBuf,
    tenant: String,
    session: u64,
    root_address: String,
}

/// Failures that the service has told of.
struct Failures {
    completions: Consumer<Completion>,
    comms: HashMap<Handle, Error>,
    streams: HashMap<Handle, Error>,
    /// Set for good once there was no room for a failure: its operation ended as if it had succeeded.
    lost: Option<Error>,
}

/// A random id for a new communicator: one rank makes it and tells the others.
///
/// # Errors
/// If the system has no randomness to give.
pub fn unique_id() -> Result<UniqueId, Error> {
    let mut bytes = [0; 16];
    let read = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| Error::refused_by_system("/dev/urandom", error))?;
    Ok(UniqueId(bytes))
}

fn has_one_cpu() -> bool {
    std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() == 1)
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("session", &self.0.session)
            .field("tenant", &self.0.tenant)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// Whether the service still answers this session: it has not ended it, and is still there.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.0.requests.check_alive().is_ok()
    }

    /// Connects to the service that listens on `socket`. The session is this process': it ends with it, even where a child that was forked
    /// later lives on.
    ///
    /// # Errors
    /// [`Error::Connect`] where nobody listens or versions differ, [`Error::Refused`] where the operator does not admit
    /// this user or the tenant has too many sessions.
    pub fn connect(socket: impl AsRef<Path>) -> Result<Self, Error> {
        // The linker keeps what is looked at: `mccsctl doctor` finds it in files.
        std::hint::black_box(mccs_ipc::library_mark::MARK);
        // Absolute, so that it leads there also from another folder.
        let path = std::path::absolute(socket.as_ref()).unwrap_or_else(|_| socket.as_ref().to_owned());
        let socket = connect(socket.as_ref())?;
        let lost = |error: SocketError| match error {
            SocketError::Closed => HandshakeError::HungUp(path.clone()).into(),
            error => Error::connect(format!("the service's welcome cannot be received: {error}"), error.errno()),
        };
        if !socket.wait_readable(WELCOME_WITHIN) {
            return Err(Error::connect("the service did not welcome this process in time", None));
        }
        let (envelope, fds) =
            socket.recv::<ResponseEnvelope>().map_err(lost)?.ok_or_else(|| lost(SocketError::WouldBlock))?;
        let (session, tenant, layout, spin, operations_in_flight_max, root_address) = match envelope.response {
            Response::Welcome { session, tenant, layout, spin, operations_in_flight_max, root_address } => {
                (session, tenant, layout, spin, operations_in_flight_max, root_address)
            }
            Response::Error { class, message } => return Err(Error::refused(class, message)),
            other => return Err(Error::connect(format!("the service answered {other:?} instead of a welcome"), None)),
        };
        let mut fds = fds.into_iter();
        let (Some(segment), Some(doorbell), process) = (fds.next(), fds.next(), fds.next()) else {
            return Err(Error::connect("the service's welcome came without its descriptors", None));
        };
        let what = "cannot map the session's segment";
        let unmapped = |error: ShmError| Error::below(what, &error, error.errno());
        let malformed = |error: QueueError| Error::below(what, error, None);
        let segment = Arc::new(Mapping::map(segment.as_fd(), layout.segment_bytes).map_err(unmapped)?);
        let commands = Producer::new(Arc::clone(&segment), layout.commands_offset, layout.commands_capacity);
        let completions = Consumer::new(Arc::clone(&segment), layout.completions_offset, layout.completions_capacity);
        let failures = Failures {
            completions: completions.map_err(malformed)?,
            comms: HashMap::new(),
            streams: HashMap::new(),
            lost: None,
        };
        Ok(Client(Arc::new(Inner {
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
            requests: Requests::new(socket),
            doorbell: Doorbell::from_fd(doorbell),
            segment,
            layout,
            submission: Mutex::new(Submission::new(commands.map_err(malformed)?)),
            left_streams: Mutex::default(),
            failures: Mutex::new(failures),
            members: Mutex::default(),
            regions: RwLock::default(),
            gpu_regions: Mutex::default(),
            watch: Watch::new(process),
            spin,
            word_spin: if has_one_cpu() { Duration::ZERO } else { spin },
            operations_in_flight_max,
            socket: path,
            tenant,
            session,
            root_address,
        })))
    }

    /// Another session at the same service.
    pub(crate) fn connect_again(&self) -> Result<Self, Error> {
        Self::connect(&self.0.socket)
    }

    /// Connects to the service that the environment variable `MCCS_SOCKET` names. Without it, to the one that listens where services do by
    /// default: the user's own in `$XDG_RUNTIME_DIR/mccs`, or else the host's at `/run/mccs/mccs.sock`.
    ///
    /// # Errors
    /// As [`Client::connect`].
    pub fn from_env() -> Result<Self, Error> {
        if let Some(socket) = std::env::var_os("MCCS_SOCKET") {
            return Self::connect(socket);
        }
        // SAFETY: getuid has no preconditions.
        let user = || std::env::temp_dir().join(format!("mccs-{}", unsafe { libc::getuid() }));
        let own = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(user, |folder| Path::new(&folder).join("mccs"));
        let sockets = [own, Path::new("/run/mccs").to_owned()].map(|folder| folder.join("mccs.sock"));
        let found = sockets.iter().find(|socket| socket.exists());
        let none = || {
            let [host, own] = sockets.each_ref().map(|socket| socket.display());
            let message =
                format!("no mccs-service listens at {host} or {own}; if it is elsewhere, MCCS_SOCKET names its socket");
            Error::connect(message, None)
        };
        Self::connect(found.ok_or_else(none)?)
    }

    /// Name of the tenant that the operator takes this process for.
    #[must_use]
    pub fn tenant(&self) -> &str {
        &self.0.tenant
    }

    /// Number of the session, as `mccsctl` shows it.
    #[must_use]
    pub fn session(&self) -> u64 {
        self.0.session
    }

    /// Address that ranks at other services name as [root address](CommunicatorBuilder::root_address) of a communicator whose rank
    /// 0 is in this process. Nothing where the service knows no others.
    #[must_use]
    pub fn root_address(&self) -> Option<&str> {
        Some(&*self.0.root_address).filter(|address| !address.is_empty())
    }

    /// A rank of communicator `id`, which is about to join; see [`CommunicatorBuilder`].
    pub fn communicator(&self, id: UniqueId, rank: u32, nranks: u32) -> CommunicatorBuilder {
        CommunicatorBuilder::new(self, id, rank, nranks)
    }

    /// Waits until all ranks of a communicator have joined, or `go_on`, asked every now and then, says no.
    pub(crate) fn wait_for_join(
        &self,
        joining: &Joining,
        rank: &CommunicatorBuilder,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Answer, Error> {
        self.wait_for_all(joining, rank, go_on).map_err(|error| error.of_join(rank.id, rank.rank))
    }

    fn wait_for_all(
        &self,
        joining: &Joining,
        rank: &CommunicatorBuilder,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Answer, Error> {
        let has_passed = |deadline: Instant| deadline <= Instant::now();
        loop {
            let next_look = Instant::now() + LIVENESS_EVERY;
            let until = joining.deadline.map_or(next_look, |deadline| deadline.min(next_look));
            if let Some(answer) = self.0.requests.wait_until(joining.request, Some(until))? {
                if let (Response::Comm { comm, .. }, _) = &answer {
                    locked(&self.0.members).insert(*comm, (rank.id, rank.rank));
                    log(LogLevel::Info, || {
                        format!("rank {} of {} has joined communicator {}", rank.rank, rank.nranks, rank.id)
                    });
                }
                return Ok(answer);
            }
            if joining.deadline.is_some_and(has_passed) {
                break;
            }
            if !go_on() {
                self.give_up_join(joining);
                let message = format!("rank {} no longer wants to join communicator {}", rank.rank, rank.id);
                return Err(Error::refused(ErrorClass::Timeout, message));
            }
        }
        self.give_up_join(joining);
        let message = format!(
            "the {} ranks of communicator {} have not all joined within the time that rank {} gave them; mccsctl joining, on the host \
             of rank 0, names those that are missing",
            rank.nranks, rank.id, rank.rank
        );
        log(LogLevel::Warning, || message.clone());
        Err(Error::refused(ErrorClass::Timeout, message))
    }

    /// Leaves a communicator as soon as it exists: the others may come after all, and would wait for this rank.
    pub(crate) fn give_up_join(&self, joining: &Joining) {
        let (client, request) = (self.clone(), joining.request);
        let end = move || {
            if let Ok((Response::Comm { comm, .. }, _)) = client.0.requests.wait(request) {
                client.0.requests.send_and_forget(Request::AbortComm { comm, cuda_error: None });
                let _ = client.0.requests.call(Request::DestroyComm { comm }, &[]);
            }
        };
        // Without a thread the rank stays until the session ends.
        let _ = std::thread::Builder::new().name("mccs-gives-up".into()).spawn(end);
    }

    /// Makes a communicator of what the service has answered to a rank.
    pub(crate) fn joined(&self, answer: Answer, rank: &CommunicatorBuilder) -> Result<Communicator, Error> {
        match answer {
            (Response::Comm { comm, shm_exchange, .. }, fds) => {
                let map = |(layout, fd): (_, &std::os::fd::OwnedFd)| ShmExchange::map(fd.as_fd(), layout);
                let shm_exchange = shm_exchange.zip(fds.first()).map(map).transpose();
                let shm_exchange = shm_exchange
                    .map_err(|error| Error::below("cannot map a shared-memory exchange", &error, error.errno()))?;
                self.0.begin_comm(comm);
                // Keeps the completion ring from filling up in a session that only joins communicators that fail.
                // Failures that it may hold of this one already stay: a handle never names two communicators.
                drop(self.0.failures());
                Ok(Communicator::new(self.clone(), comm, rank.rank, rank.nranks, shm_exchange))
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Makes a stream: operations on it complete in order.
    ///
    /// # Errors
    /// [`Error::Refused`] where the session has as many as it may.
    pub fn create_stream(&self) -> Result<Stream, Error> {
        self.0.destroy_left_streams();
        match self.0.requests.call(Request::CreateStream, &[])? {
            (Response::Stream { stream, word }, _) => Ok(Stream::new(self.clone(), stream, word, false)),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Makes a stream whose operations wait for a device that orders them by words. Its
    /// [`TimelineSemaphore`](mccs_ipc::timeline_semaphore::TimelineSemaphore) lies `offset_bytes` into `region`. Operation n, from 1, starts when
    /// the device has raised the semaphore to n, which also says when it has ended. Nothing on such a stream is done by the caller's thread.
    ///
    /// # Errors
    /// As [`Client::create_stream`], and for a place that is not aligned as semaphores are, or not all in the region.
    #[doc(hidden)]
    pub fn create_ordered_stream(&self, region: &Region, offset_bytes: u64) -> Result<Stream, Error> {
        self.ordered_stream(region, offset_bytes, false)
    }

    /// Creates a stream as [`Client::create_ordered_stream`] does, whose collectives *overlap*: of one communicator of several hosts they
    /// begin as the semaphore is raised, though those before them have not ended. Their ends are told in order. None may read or write what
    /// another writes that has not ended when the semaphore is raised for it.
    ///
    /// # Errors
    /// As [`Client::create_ordered_stream`].
    #[doc(hidden)]
    pub fn create_overlapping_stream(&self, region: &Region, offset_bytes: u64) -> Result<Stream, Error> {
        self.ordered_stream(region, offset_bytes, true)
    }

    fn ordered_stream(&self, region: &Region, offset_bytes: u64, overlaps: bool) -> Result<Stream, Error> {
        let region = region.handle_in(self)?;
        self.0.destroy_left_streams();
        match self.0.requests.call(Request::CreateOrderedStream { region, offset_bytes, overlaps }, &[])? {
            (Response::Stream { stream, word }, _) => Ok(Stream::new(self.clone(), stream, word, true)),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Allocates memory that the service maps too.
    ///
    /// # Errors
    /// [`Error::Refused`] over the tenant's quota.
    pub fn allocate(&self, bytes: u64) -> Result<Region, Error> {
        crate::memory::allocate(self, bytes)
    }

    /// Registers the caller's own memory: a page-aligned range of whole, private, anonymous pages, as from `mmap`. The pages are moved into a
    /// shared file that is mapped in their place, contents included. Addresses stay valid, also after the region is dropped, and the same range
    /// can be registered again. Memory of an allocator's is better allocated from the service: it may lie beside, or in, what the allocator keeps
    /// its books in.
    ///
    /// # Safety
    /// Nobody may access the range during the call. From then on it is accessed only as [`Region::as_slice`] and
    /// [`Region::as_mut_slice`] allow: not while an operation on it is in flight. That holds after the region is dropped, too, until those
    /// operations have ended. The range stays mapped, and nothing else is mapped there, until the region is dropped. A child process
    /// forked later shares the range instead of copying it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a range that is not as above, [`Error::Refused`] over the tenant's quota.
    pub unsafe fn register(&self, ptr: *mut u8, bytes: usize) -> Result<Region, Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe { crate::memory::register(self, ptr, bytes) }
    }

    /// Place of `bytes` from an address on in this session's memory, allocated or registered. `None` where they are not all in one region.
    /// The place is of use for as long as the region is there.
    #[must_use]
    pub fn span_at(&self, address: *const u8, bytes: usize) -> Option<Span> {
        let (buffer, available_bytes) = self.0.regions().place(address.addr())?;
        let span = Span { buffer, client_number: self.0.number, available_bytes };
        (bytes as u64 <= available_bytes).then_some(span)
    }

    /// Registers a memfd of the caller's and maps it here. It must be sealed against shrinking and not against writing, and all its pages
    /// must be there, as after `fallocate`. It takes no further seals from then on.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] or [`Error::Refused`] for a descriptor that is not as above, [`Error::Refused`] over the tenant's quota.
    pub fn register_fd(&self, fd: std::os::fd::BorrowedFd<'_>, bytes: u64) -> Result<Region, Error> {
        crate::memory::register_fd(self, fd, bytes)
    }
}

pub(crate) fn unexpected(response: &Response) -> Error {
    Error::ServiceGone(format!("it gave an answer to something else: {response:?}"))
}

impl Inner {
    /// Memory that the session knows. Nothing in it is unmapped while the guard lives.
    pub(crate) fn regions(&self) -> RwLockReadGuard<'_, Regions> {
        self.regions.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what the service has told of failures.
    fn failures(&self) -> MutexGuard<'_, Failures> {
        let mut failures = locked(&self.failures);
        while let Ok(Some(completion)) = failures.completions.try_pop() {
            let class = ErrorClass::from_wire(completion.class).unwrap_or(ErrorClass::Internal);
            let origin = self.origin(completion.comm, completion.ticket);
            let error = Error::Failed { class, message: completion.message(), origin };
            log(LogLevel::Error, || error.to_string());
            if completion.comm != Handle::NONE {
                failures.comms.entry(completion.comm).or_insert_with(|| error.clone());
            }
            if completion.stream != Handle::NONE {
                failures.streams.entry(completion.stream).or_insert(error);
            }
        }
        let lost =
            StreamWord::at(&self.segment, self.layout.words_offset, self.layout.words).map_or(0, StreamWord::load);
        if lost > 0 && failures.lost.is_none() {
            let message = format!("{lost} failures came that nobody fetched in time: any operation may have failed");
            failures.lost = Some(Error::Failed { class: ErrorClass::System, message, origin: None });
        }
        failures
    }

    /// Which communicator a handle stands for, and which operation on its stream; 0 is none.
    pub(crate) fn origin(&self, comm: Handle, ticket: u64) -> Option<Origin> {
        let (communicator, rank) = *locked(&self.members).get(&comm)?;
        Some(Origin { communicator, rank, operation: Some(ticket).filter(|ticket| *ticket > 0) })
    }

    /// A rank has left.
    pub(crate) fn has_left(&self, comm: Handle) {
        if let Some((id, rank)) = locked(&self.members).remove(&comm) {
            log(LogLevel::Info, || format!("rank {rank} has left communicator {id}"));
        }
    }

    /// The error that ended a communicator, if one did.
    pub(crate) fn comm_failure(&self, comm: Handle) -> Option<Error> {
        let failures = self.failures();
        failures.comms.get(&comm).or(failures.lost.as_ref()).cloned()
    }

    /// The first error of a stream since the last call, its own or that of a communicator used on it.
    pub(crate) fn take_stream_failure(&self, stream: Handle, comms: &[Handle]) -> Option<Error> {
        let mut failures = self.failures();
        let own = failures.streams.remove(&stream);
        let of_comms = || comms.iter().find_map(|comm| failures.comms.get(comm).cloned());
        own.or_else(of_comms).or_else(|| failures.lost.clone())
    }
}
