//! `ncclGetUniqueId`, `ncclCommInitRank` and kin, finalize, destroy, abort: a communicator's life.

use std::collections::HashSet;
use std::ffi::{c_int, c_void};
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;

use mccs::bindings::{Held, JoinOptions, ProcessClient, Table};
use mccs::cuda::CudaCommunicator;
use mccs::{Client, Error, ReduceOperator, UniqueId};
use mccs_cuda::{Context, gpus};

use super::config::CommConfig;
use super::group::{begin, joining};
use super::grow::Growth;
use super::lifecycle::{self, Label};
use super::profiler::Profile;
use super::queries::Expected;
use super::seat::Seat;
use super::split::{Exchange, Share, derived_id};
use super::windows::take_windows;
use super::{Status, debug, guard, guard_in_group, put};

/// `ncclUniqueId`: the communicator's name and its root's address, behind a mark.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct NcclUniqueId([u8; 128]);

/// Marks ids that are this library's: another library's name no communicator of ours.
const MARK: [u8; 8] = *b"mccs-id\0";

impl NcclUniqueId {
    pub(crate) fn of(name: &Name) -> Self {
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&MARK);
        bytes[8..24].copy_from_slice(&name.id.0);
        bytes[ROOT_AT..].copy_from_slice(&name.root);
        NcclUniqueId(bytes)
    }

    pub(crate) fn name(&self) -> Result<Name, Error> {
        if self.0[..8] != MARK {
            return Err(Error::InvalidArgument(
                "the unique id was not made by this library: does every rank use it?".into(),
            ));
        }
        let mut name = Name { id: UniqueId([0; 16]), root: [0; ROOT_BYTES] };
        name.id.0.copy_from_slice(&self.0[8..24]);
        name.root.copy_from_slice(&self.0[ROOT_AT..]);
        Ok(name)
    }
}

/// Offset of the root's address in an id.
const ROOT_AT: usize = 24;
/// Room for a root's address: the name of a host, filled up with zeros.
pub(crate) const ROOT_BYTES: usize = 128 - ROOT_AT;

/// Name that all ranks of a communicator must know.
#[derive(Clone, Copy)]
pub(crate) struct Name {
    pub(crate) id: UniqueId,
    pub(crate) root: Root,
}

/// The address of a service, filled up with zeros.
pub(crate) type Root = [u8; ROOT_BYTES];
/// Root address of a service that knows no others.
const NO_ROOT: Root = [0; ROOT_BYTES];

impl Name {
    /// Name of a new communicator, with rank 0 in this process.
    pub(crate) fn new() -> Result<Self, Error> {
        Ok(Name { id: mccs::unique_id()?, root: own_root()? })
    }

    /// The address as the service wants it.
    fn root_address(&self) -> Result<Option<&str>, Error> {
        let end = self.root.iter().position(|byte| *byte == 0).unwrap_or(ROOT_BYTES);
        let address = std::str::from_utf8(&self.root[..end]);
        address
            .map(|address| Some(address).filter(|address| !address.is_empty()))
            .map_err(|_| Error::InvalidArgument("the unique id has no root address that is text".into()))
    }
}

/// The address of this process' service, for communicators whose rank 0 is here.
pub(crate) fn own_root() -> Result<Root, Error> {
    let (client, mut root) = (client()?, [0; ROOT_BYTES]);
    let address = client.root_address().unwrap_or_default().as_bytes();
    let too_long = || Error::InvalidArgument("the service's name is too long for a unique id".into());
    root.get_mut(..address.len()).ok_or_else(too_long)?.copy_from_slice(address);
    Ok(root)
}

/// All communicators of the process. An `ncclComm_t` is a handle of this table, never an address; calls under way hold uses, so a
/// thread may abort a communicator in which others wait.
static COMMUNICATORS: Table<Comm> = Table::new();

/// A communicator, for the time of a call or until it is made.
pub(crate) type CommUse = Held<Comm>;

/// Behind `ncclComm_t`.
pub struct Comm {
    /// The function that makes it.
    made_by: &'static str,
    /// Whether calls wait for what is made of it, unless their configuration says something else.
    pub(crate) is_blocking: bool,
    /// The request to the service.
    options: JoinOptions,
    /// Its properties before all ranks have joined.
    pub(crate) expected: Expected,
    /// The rank's place in it, or why there is none; nothing while ranks join that nobody waits for.
    made: OnceLock<Result<Member, Error>>,
    /// Whether its owner wants it no more: then it ends as soon as it is there.
    is_abandoned: Mutex<bool>,
}

/// A rank's place in a communicator that is there.
pub(crate) struct Member {
    /// Its place at the service.
    pub(crate) seat: Seat,
    /// How often it has taken that again.
    pub(crate) resumed: Mutex<u64>,
    /// Options that the service was asked for.
    pub(crate) options: JoinOptions,
    /// Profile that a profiler plugin is told by, if there is one.
    profile: Option<Arc<Profile>>,
    /// Whether it was finalized, or is being so.
    is_finalized: AtomicBool,
    pub(crate) name: Name,
    pub(crate) rank: u32,
    pub(crate) nranks: u32,
    /// Its GPU's: what is made of it is there too, whatever the caller's is.
    pub(crate) context: Context,
    /// Addresses of the ranks' services, where there are several.
    pub(crate) roots: Vec<Root>,
    /// Pre-multiplied sums, by number.
    operators: Mutex<Vec<Option<ReduceOperator>>>,
    /// Communicators made of it so far.
    pub(crate) derived: Mutex<u64>,
    /// How often it has grown.
    pub(crate) growth: Mutex<Growth>,
    /// Makes others of it while nobody waits. They are made one after the other, as all ranks call.
    pub(crate) making: Mutex<Option<JoinHandle<()>>>,
    /// How ranks tell each other what they make; from the first time on.
    pub(crate) exchange: Mutex<Option<Exchange>>,
}

/// A communicator that is there, for the time of a call.
#[derive(Clone)]
pub(crate) struct Made(CommUse);

impl Deref for Made {
    type Target = Member;

    fn deref(&self) -> &Member {
        let made = self.0.made.get().and_then(|made| made.as_ref().ok());
        made.expect("invariant: `Comm::of` has seen it, and it stays")
    }
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This process' session; see [`ProcessClient`].
fn client() -> Result<Client, Error> {
    static CLIENT: ProcessClient = ProcessClient::new();
    CLIENT.get(debug::hear_library)
}

/// The calling thread's context. Without any it is the first GPU's, as for a program that has asked CUDA for nothing yet.
pub(crate) fn caller_context() -> Result<Context, Error> {
    mccs_cuda::driver()?;
    Context::current().or_else(|none| Context::primary(gpus()?.first().ok_or(none)?)).map_err(cuda_error)
}

impl Member {
    /// Joins with buffers of `context`, or else of the caller's.
    pub(crate) fn join(
        settings: CommSettings,
        name: Name,
        rank: c_int,
        nranks: c_int,
        context: Option<Context>,
    ) -> Result<Self, Error> {
        let number = |value: c_int, what: &str| {
            u32::try_from(value).map_err(|_| Error::InvalidArgument(format!("{what} {value} is negative")))
        };
        let (rank, nranks, client) = (number(rank, "rank")?, number(nranks, "nranks")?, client()?);
        let context = context.map_or_else(caller_context, Ok)?;
        let CommSettings { label, options } = settings;
        lifecycle::begins(label, &name, rank, nranks, &context);
        let comm = {
            let _entered = context.enter().map_err(cuda_error)?;
            let builder = client.communicator(name.id, rank, nranks).root_address(name.root_address()?);
            builder.options(options.clone()).join_cuda()?
        };
        comm.surface_failures_by_async_error();
        let is_service_executed = comm.is_service_executed();
        let mut member = Member {
            seat: Seat::taken(comm),
            resumed: Mutex::default(),
            options,
            profile: None,
            is_finalized: AtomicBool::new(false),
            name,
            rank,
            nranks,
            context,
            roots: Vec::new(),
            operators: Mutex::default(),
            derived: Mutex::default(),
            growth: Mutex::default(),
            making: Mutex::default(),
            exchange: Mutex::default(),
        };
        // Asked now, as later rank 0 may have died.
        if is_service_executed && name.root != NO_ROOT {
            let all = member.gather(&Share::of_root(own_root()?))?;
            member.roots = all.into_iter().map(|share| share.root).collect();
        }
        let hosts = member.roots.iter().collect::<HashSet<_>>().len().max(1);
        let comm = member.seat.comm()?;
        member.profile = Profile::of(&comm, &member.options.name, lifecycle::id_number(&member.name), hosts);
        Ok(member)
    }

    /// The communicator.
    pub(crate) fn comm(&self) -> Result<Arc<CudaCommunicator>, Error> {
        self.check_not_finalized()?;
        self.seat.comm()
    }

    /// Whether ranks reach each other's windows.
    pub(crate) fn reaches_peers(&self) -> bool {
        self.seat.any().is_some_and(|comm| comm.has_windows())
    }

    pub(crate) fn check_not_finalized(&self) -> Result<(), Error> {
        let has_left = self.is_finalized.load(Ordering::Acquire);
        let finalized = || Error::InvalidArgument("the communicator has been finalized".into());
        (!has_left).then_some(()).ok_or_else(finalized)
    }

    /// Joins under another id, as the rank that it is.
    pub(crate) fn take_place(&self, id: UniqueId) -> Result<CudaCommunicator, Error> {
        let _entered = self.context.enter().map_err(cuda_error)?;
        let builder = client()?.communicator(id, self.rank, self.nranks).root_address(self.name.root_address()?);
        let comm = builder.options(self.options.clone()).join_cuda()?;
        comm.surface_failures_by_async_error();
        Ok(comm)
    }

    /// The communicator, also once it has been finalized; none while it is suspended.
    pub(crate) fn communicator(&self) -> Option<Arc<CudaCommunicator>> {
        self.seat.any()
    }

    /// Profile that a profiler plugin is told by, if there is one.
    pub(crate) fn profile(&self) -> Option<&Arc<Profile>> {
        self.profile.as_ref()
    }

    /// Pre-multiplied sums.
    pub(crate) fn operators(&self) -> MutexGuard<'_, Vec<Option<ReduceOperator>>> {
        locked(&self.operators)
    }

    /// Leaves, once.
    fn finalize(&self) -> Result<(), Error> {
        if self.is_finalized.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        self.profile.iter().for_each(|profile| profile.close());
        self.seat.any().map_or(Ok(()), |comm| comm.finalize())
    }

    /// Ends what is outstanding, and leaves.
    fn abort(&self) -> Result<(), Error> {
        let aborted = self.seat.any().map_or(Ok(()), |comm| comm.abort());
        if self.is_finalized.load(Ordering::Acquire) {
            // It has left already, or does so now that nothing is outstanding.
            return Ok(());
        }
        self.finalize().and(aborted)
    }
}

impl Comm {
    /// One that is being made: its handle is open, and nobody has it yet.
    pub(crate) fn unmade(made_by: &'static str, is_blocking: bool, options: JoinOptions) -> Result<CommUse, Error> {
        let (expected, made, is_abandoned) = (Expected::default(), OnceLock::new(), Mutex::default());
        let comm = Comm { made_by, is_blocking, options, expected, made, is_abandoned };
        let full = || Error::InvalidArgument("the process has 65536 communicators: destroy some".into());
        COMMUNICATORS.insert(comm).ok_or_else(full)
    }

    /// Sets its result.
    pub(crate) fn fill(&self, made: Result<Member, Error>) {
        let is_abandoned = locked(&self.is_abandoned);
        let made = self.made.get_or_init(|| made);
        self.expected.end();
        if let (true, Ok(member)) = (*is_abandoned, made) {
            drop(is_abandoned);
            // Nobody is left to be told.
            let _ = member.abort();
        }
    }

    /// Its result, once there is one.
    pub(crate) fn made(&self) -> Option<&Result<Member, Error>> {
        self.made.get()
    }

    /// The object behind a handle, for the time of a call.
    pub(crate) fn behind(handle: *const Comm) -> Result<CommUse, Error> {
        COMMUNICATORS.find(handle as u64).ok_or_else(|| no_communicator(handle))
    }

    /// The object behind a handle, which is closed: it finds nothing any more.
    pub(crate) fn close(handle: *const Comm) -> Result<CommUse, Error> {
        COMMUNICATORS.close(handle as u64).ok_or_else(|| no_communicator(handle))
    }

    /// The communicator behind a handle, which has to be there, for the time of a call.
    pub(crate) fn of(handle: *const Comm) -> Result<Made, Error> {
        let comm = Self::behind(handle)?;
        match comm.made.get() {
            Some(Ok(_)) => Ok(Made(comm)),
            Some(Err(error)) => Err(error.clone()),
            None => Err(Error::InvalidArgument("not all ranks have joined the communicator yet".into())),
        }
    }

    /// Ends what is outstanding, and leaves; at once, also if ranks still join.
    fn abandon(&self) -> Result<(), Error> {
        *locked(&self.is_abandoned) = true;
        self.made.get().and_then(|made| made.as_ref().ok()).map_or(Ok(()), Member::abort)
    }
}

/// Programs' handle of a communicator.
pub(crate) fn handle_of(comm: &CommUse) -> *mut Comm {
    comm.handle() as *mut Comm
}

/// As what a communicator is made.
pub(crate) struct CommSettings {
    label: Label,
    options: JoinOptions,
}

pub(crate) fn settings_of(comm: &CommUse) -> CommSettings {
    CommSettings { label: label_of(comm), options: comm.options.clone() }
}

/// Its name in lines of `NCCL_DEBUG`.
pub(crate) fn label_of(comm: &CommUse) -> Label {
    Label { handle: comm.handle(), made_by: comm.made_by }
}

fn no_communicator(handle: *const Comm) -> Error {
    Error::InvalidArgument(if handle.is_null() {
        "comm is null".into()
    } else {
        format!("comm {handle:p} is no communicator of this process, or was destroyed")
    })
}

impl Made {
    /// Whether calls wait for what is made of it.
    pub(crate) fn is_blocking(&self) -> bool {
        self.0.is_blocking
    }

    /// Whether both are of one handle.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.0.is(&other.0)
    }

    /// Waits until all is made of it that was begun.
    pub(crate) fn wait_for_makers(&self) {
        let making = locked(&self.making).take();
        making.map(JoinHandle::join);
    }
}

pub(crate) fn cuda_error(error: mccs_cuda::DriverError) -> Error {
    error.into()
}

/// See `nccl.h`.
///
/// # Safety
/// The pointer must be null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut NcclUniqueId) -> Status {
    guard(|| {
        if id.is_null() {
            return Err(Error::InvalidArgument("id is null".into()));
        }
        // SAFETY: the caller's contract.
        unsafe { put(id, NcclUniqueId::of(&Name::new()?), "id") }
    })
}

/// See `nccl.h`.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(
    comm: *mut *mut Comm,
    nranks: c_int,
    id: NcclUniqueId,
    rank: c_int,
) -> Status {
    // SAFETY: the caller's contract.
    unsafe { ncclCommInitRankConfig(comm, nranks, id, rank, std::ptr::null_mut()) }
}

/// See `nccl.h`; of the configuration `blocking`, `commName` and `trafficClass` have an effect.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut *mut Comm,
    nranks: c_int,
    id: NcclUniqueId,
    rank: c_int,
    config: *mut c_void,
) -> Status {
    // SAFETY: the caller's contract.
    guard_in_group(|| unsafe { begin_rank(comm, nranks, id.name()?, rank, config) })
}

/// Begins a rank of a communicator that is new.
///
/// # Safety
/// Pointers as `nccl.h` says of [`ncclCommInitRankConfig`].
unsafe fn begin_rank(
    comm: *mut *mut Comm,
    nranks: c_int,
    name: Name,
    rank: c_int,
    config: *mut c_void,
) -> Result<Status, Error> {
    // SAFETY: the caller's contract.
    let config = unsafe { CommConfig::read(config)? };
    let is_blocking = config.is_blocking.unwrap_or(true);
    let begun = Comm::unmade("ncclCommInitRank", is_blocking, config.options.unwrap_or_default())?;
    begun.expected.know(rank, nranks);
    let join = joining(&begun, name, rank, nranks);
    // SAFETY: the caller's contract.
    unsafe { begin(comm, is_blocking, Some(begun), None, join) }
}

/// See `nccl.h`: all ids together name the communicator, and the first says where rank 0 is.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankScalable(
    comm: *mut *mut Comm,
    nranks: c_int,
    rank: c_int,
    count: c_int,
    ids: *mut NcclUniqueId,
    config: *mut c_void,
) -> Status {
    guard_in_group(|| {
        let known = usize::try_from(count).ok().filter(|known| *known > 0 && count <= nranks && !ids.is_null());
        let known = known.ok_or_else(|| Error::InvalidArgument(format!("{count} unique ids for {nranks} ranks")))?;
        // SAFETY: the caller's contract: there are as many.
        let ids = unsafe { std::slice::from_raw_parts(ids, known) };
        let names = ids.iter().map(NcclUniqueId::name).collect::<Result<Vec<_>, _>>()?;
        let (first, others) = names.split_first().ok_or_else(|| Error::InvalidArgument("no unique id".into()))?;
        let mut name = *first;
        if !others.is_empty() {
            name.id = derived_id(first.id, known as u64, others.iter().flat_map(|other| other.id.0));
        }
        // SAFETY: the caller's contract.
        unsafe { begin_rank(comm, nranks, name, rank, config) }
    })
}

/// See `nccl.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(comm: *mut Comm) -> Status {
    guard(|| {
        if comm.is_null() {
            return Ok(());
        }
        let member = Comm::of(comm)?;
        member.finalize().inspect(|()| lifecycle::has_ended(comm as u64, &member, "Finalize"))
    })
}

/// See `nccl.h`. The handle is an invalid argument from now on.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(comm: *mut Comm) -> Status {
    guard(|| {
        if comm.is_null() {
            return Ok(());
        }
        let known = Comm::close(comm)?;
        let _windows = take_windows(comm);
        match known.made.get() {
            Some(Ok(member)) => member.finalize().inspect(|()| lifecycle::has_ended(comm as u64, member, "Destroy")),
            _ => known.abandon(),
        }
    })
}

/// See `nccl.h`. Threads that wait in a call on the communicator return from it. The handle is an invalid argument from now on.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(comm: *mut Comm) -> Status {
    guard(|| {
        if comm.is_null() {
            return Ok(());
        }
        let known = Comm::close(comm)?;
        let _windows = take_windows(comm);
        let abandoned = known.abandon();
        if let Some(Ok(member)) = known.made.get() {
            lifecycle::has_ended(comm as u64, member, "Abort");
        }
        abandoned
    })
}

/// See `nccl.h`: ends what is outstanding, on all ranks. The communicator is to be destroyed, or shrunk.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommRevoke(comm: *mut Comm, flags: c_int) -> Status {
    guard(|| {
        let member = Comm::of(comm)?;
        if flags != 0 {
            return Err(Error::InvalidArgument(format!("ncclCommRevoke with flags {flags}")));
        }
        member.comm()?.abort().inspect(|()| lifecycle::has_ended(comm as u64, &member, "Revoke"))
    })
}
