//! `ncclGroupStart`, `ncclGroupEnd`, `ncclCommInitAll`: communicators that are made together, and
//! operations that are enqueued together.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;

use mccs::bindings::JoinOptions;
use mccs::{Error, ErrorClass};
use mccs_cuda::{Context, gpus};

use super::communicators::{
    Comm, CommUse, Made, Member, Name, caller_context, cuda_error, handle_of, label_of, locked, settings_of,
};
use super::lifecycle;
use super::profiler;
use super::{IN_PROGRESS, SUCCESS, Status, guard, guard_status};

/// A communicator to be made at the end of a group.
struct Pending {
    task: Task,
    parent: Option<Made>,
    /// Whether the group's end waits for it.
    is_awaited: bool,
}

/// Communicators that one thread makes, and their parts.
struct Lane {
    parent: Option<Made>,
    tasks: Vec<Task>,
    awaited: Vec<bool>,
}

/// How it is made, by a thread.
struct Task {
    context: Context,
    make: Make,
    /// Handle that its owner has already; nothing for a rank that is in none.
    begun: Option<CommUse>,
}

/// Waits for the other ranks, and joins a communicator in a context, or else in the caller's; none for a rank that is in none.
pub(crate) type Make = Box<dyn FnOnce(Option<Context>) -> Result<Option<Member>, Error> + Send>;

/// Joins one that is new.
pub(crate) fn joining(begun: &CommUse, name: Name, rank: c_int, nranks: c_int) -> Make {
    let settings = settings_of(begun);
    Box::new(move |context| Member::join(settings, name, rank, nranks, context).map(Some))
}

/// A one-sided operation, to be enqueued.
pub(crate) enum OneSidedCall {
    /// Waits for no other rank.
    Send(Box<dyn FnOnce() -> Result<(), Error>>),
    /// Has its stream wait for others.
    Wait(Box<dyn FnOnce() -> Result<(), Error>>),
}

impl OneSidedCall {
    fn waits(&self) -> bool {
        matches!(self, OneSidedCall::Wait(_))
    }

    fn enqueue(self) -> Result<(), Error> {
        let (OneSidedCall::Send(call) | OneSidedCall::Wait(call)) = self;
        call()
    }
}

/// Enqueues a one-sided operation, or keeps it for the end of the calling thread's group.
pub(crate) fn one_sided(call: OneSidedCall) -> Result<(), Error> {
    if depth() == 0 {
        return call.enqueue();
    }
    with_group(|group| group.one_sided.push(call))
}

#[derive(Default)]
struct Group {
    depth: u32,
    pending: Vec<Pending>,
    one_sided: Vec<OneSidedCall>,
    /// The first error of a call in it.
    error: Option<Error>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// How many groups of the calling thread's are open.
pub(crate) fn depth() -> u32 {
    // A thread that ends has none.
    with_group(|group| group.depth).unwrap_or(0)
}

/// The calling thread's group. A thread that ends has none any more.
fn with_group<R>(act: impl FnOnce(&mut Group) -> R) -> Result<R, Error> {
    let ended = |_| Error::system("the calling thread ends");
    GROUP.try_with(|group| act(&mut group.borrow_mut())).map_err(ended)
}

/// Opens a group: collectives, sends and receives are enqueued at its end, and communicators made.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> Status {
    guard(|| {
        with_group(|group| group.depth += 1)?;
        mccs::bindings::group_start();
        Ok(())
    })
}

/// Closes a group; communicators begun in it are there when the outermost one's end returns, but for those that are not waited for, and its
/// operations are enqueued. If a call in it has failed it does nothing, but for returning that call's error.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> Status {
    guard_status(|| {
        let Group { depth, pending, one_sided, error } = close()?;
        if let Some(error) = error {
            mccs::bindings::group_drop()?;
            profiler::drop_group();
            give_up(pending, &error);
            return Err(error);
        }
        let made = make(pending);
        let (waits, sends): (Vec<_>, Vec<_>) = one_sided.into_iter().partition(OneSidedCall::waits);
        let sent = if made.is_ok() { sends.into_iter().try_for_each(OneSidedCall::enqueue) } else { Ok(()) };
        let ended =
            if depth > 0 { mccs::bindings::group_end() } else { profiler::end_group(mccs::bindings::group_end) };
        let made = sent.and(ended).and(made)?;
        waits.into_iter().try_for_each(OneSidedCall::enqueue).map(|()| made)
    })
}

/// See `nccl.h`: closes a group, of which nothing is done. Tells how long it would take, in microseconds, or -1 where the service would carry it out.
///
/// # Safety
/// The pointer must be null, or lead to as many bytes as its first word says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupSimulateEnd(info: *mut c_void) -> Status {
    guard(|| {
        let Group { depth, pending, error, .. } = close()?;
        let estimate = mccs::bindings::group_estimate_us();
        mccs::bindings::group_drop()?;
        if depth > 0 {
            return Ok(());
        }
        profiler::drop_group();
        give_up(pending, &Error::InvalidArgument("the group was only simulated".into()));
        // SAFETY: the caller's contract.
        error.map_or_else(|| unsafe { tell_time(info, estimate) }, Err)
    })
}

/// `ncclSimInfo_t`.
#[repr(C)]
struct SimInfo {
    size: usize,
    magic: u32,
    version: u32,
    estimated_time: f32,
}

/// # Safety
/// As for [`ncclGroupSimulateEnd`].
unsafe fn tell_time(info: *mut c_void, estimate: Option<f64>) -> Result<(), Error> {
    /// `NCCL_UNDEF_FLOAT`.
    const UNKNOWN: f32 = -1.0;
    const MAGIC: u32 = 0x7468_5283;
    let info = info.cast::<SimInfo>();
    // SAFETY: the caller's contract.
    let is_initialized = unsafe {
        !info.is_null()
            && (&raw const (*info).size).read_unaligned() >= offset_of!(SimInfo, estimated_time) + size_of::<f32>()
            && (&raw const (*info).magic).read_unaligned() == MAGIC
    };
    if !is_initialized {
        return Err(Error::InvalidArgument("simInfo was not made by NCCL_SIM_INFO_INITIALIZER".into()));
    }
    // SAFETY: it is as long as that, says its first word.
    unsafe { (&raw mut (*info).estimated_time).write_unaligned(estimate.map_or(UNKNOWN, |us| us as f32)) };
    Ok(())
}

/// Closes a group. Returns what it has collected, if it is the outermost one; otherwise how many are still open.
fn close() -> Result<Group, Error> {
    let outside = || Error::refused(ErrorClass::InvalidUsage, "ncclGroupEnd without ncclGroupStart");
    let closed = with_group(|group| {
        group.depth = group.depth.checked_sub(1)?;
        Some(if group.depth == 0 { std::mem::take(group) } else { Group { depth: group.depth, ..Group::default() } })
    })?;
    closed.ok_or_else(outside)
}

/// Has the group's end fail, if there is a group, when a call in it does.
pub(crate) fn noted<R>(result: Result<R, Error>) -> Result<R, Error> {
    if let Err(error) = &result {
        // A thread that ends has no group.
        let _ = with_group(|group| {
            if group.depth > 0 && group.error.is_none() {
                group.error = Some(error.clone());
            }
        });
    }
    result
}

/// Owners of what is not made have it already, and learn why.
fn give_up(pending: Vec<Pending>, error: &Error) {
    let begun = pending.into_iter().filter_map(|pending| pending.task.begun);
    begun.for_each(|comm| comm.fill(Err(error.clone())));
}

/// Makes communicators on threads, since ranks of one process wait for each other. Those that are made of one are made one after the other:
/// its ranks exchange what they say in the order of their calls.
fn make(pending: Vec<Pending>) -> Result<Status, Error> {
    let mut lanes: Vec<Lane> = Vec::new();
    for Pending { task, parent, is_awaited } in pending {
        let same = |known: &Option<Made>| known.as_ref().zip(parent.as_ref()).is_some_and(|(a, b)| a.is(b));
        match lanes.iter_mut().find(|lane| same(&lane.parent)) {
            Some(lane) => (lane.tasks.push(task), lane.awaited.push(is_awaited)).1,
            None => lanes.push(Lane { parent, tasks: vec![task], awaited: vec![is_awaited] }),
        }
    }
    let (mut threads, mut result) = (Vec::new(), Ok(SUCCESS));
    lanes.iter().flat_map(|lane| &lane.tasks).for_each(Task::begins);
    for Lane { parent, tasks, awaited } in lanes {
        if !awaited.contains(&true) {
            start(parent.as_ref(), tasks);
            result = Ok(IN_PROGRESS);
            continue;
        }
        let run = move || {
            parent.iter().for_each(Made::wait_for_makers);
            tasks.into_iter().map(Task::run).collect::<Vec<_>>()
        };
        threads.push((std::thread::spawn(run), awaited));
    }
    for (thread, awaited) in threads {
        let all = thread.join().map_err(|_| Error::system("a thread of this library panicked"))?;
        let mut all = all.into_iter().zip(awaited).filter_map(|(made, is_awaited)| is_awaited.then_some(made));
        result = all.try_for_each(|made| made).and(result);
    }
    result
}

/// Makes communicators of one, or a new one, that nobody waits for.
fn start(parent: Option<&Made>, tasks: Vec<Task>) {
    let mut making = parent.map(|parent| locked(&parent.making));
    let before = making.as_mut().and_then(|making| making.take());
    let thread = std::thread::spawn(move || {
        before.map(JoinHandle::join);
        tasks.into_iter().for_each(|task| drop(task.run()));
    });
    if let Some(mut making) = making {
        *making = Some(thread);
    }
}

impl Task {
    /// A thread is about to make it.
    fn begins(&self) {
        self.begun.iter().for_each(|comm| comm.expected.begin());
    }

    /// Makes it.
    fn run(self) -> Result<(), Error> {
        let Task { context, make, begun } = self;
        let made = catch_unwind(AssertUnwindSafe(|| make(Some(context))));
        let made = made.unwrap_or_else(|_| Err(Error::system("a bug in mccs: a thread panicked")));
        finish(begun.as_ref(), made)
    }
}

/// Fills what was begun with what has become of it.
fn finish(begun: Option<&CommUse>, made: Result<Option<Member>, Error>) -> Result<(), Error> {
    let result = made.as_ref().map(|_| ()).map_err(Error::clone);
    if let Some(begun) = begun {
        let made = made.and_then(|member| member.ok_or_else(|| Error::system("a bug in mccs: no place")));
        lifecycle::is_made(label_of(begun), &made);
        begun.fill(made);
    }
    result
}

/// Makes a communicator, of another or new, in its context or else the caller's. Begins to, where nobody waits or there is a group: its owner
/// has the handle then, since programs keep it elsewhere before the group ends. Nothing was begun for a rank that is in none.
///
/// # Safety
/// The pointer must be null or valid for a write.
pub(crate) unsafe fn begin(
    target: *mut *mut Comm,
    is_blocking: bool,
    begun: Option<CommUse>,
    parent: Option<Made>,
    make: Make,
) -> Result<Status, Error> {
    let handle = begun.as_ref().map_or(std::ptr::null_mut(), handle_of);
    if target.is_null() {
        drop(Comm::close(handle));
        return Err(Error::InvalidArgument("comm is null".into()));
    }
    let begun = begin_made(is_blocking, begun, parent, make).inspect_err(|_| drop(Comm::close(handle)));
    // SAFETY: the caller's contract.
    begun.inspect(|_| unsafe { target.write(handle) })
}

/// As [`begin`], before its owner has the handle; or does something else that waits for all ranks of `parent`, where nothing was begun.
pub(crate) fn begin_made(
    is_blocking: bool,
    begun: Option<CommUse>,
    parent: Option<Made>,
    make: Make,
) -> Result<Status, Error> {
    let (is_grouped, context) = (with_group(|group| group.depth > 0)?, parent.as_ref().map(|of| of.context.clone()));
    if is_blocking && !is_grouped {
        parent.iter().for_each(Made::wait_for_makers);
        return finish(begun.as_ref(), make(context)).map(|()| SUCCESS);
    }
    let context = context.map_or_else(caller_context, Ok)?;
    begun.iter().for_each(|comm| comm.expected.know_device(context.gpu().ordinal()));
    let task = Task { context, make, begun };
    if is_grouped {
        let pending = Pending { task, parent, is_awaited: is_blocking };
        return with_group(|group| group.pending.push(pending)).map(|()| SUCCESS);
    }
    task.begins();
    start(parent.as_ref(), vec![task]);
    Ok(IN_PROGRESS)
}

/// See `nccl.h`: a rank for each GPU of the list, or for each of the first ones, all in this process.
///
/// # Safety
/// Pointers as `nccl.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitAll(comms: *mut *mut Comm, devices: c_int, list: *const c_int) -> Status {
    guard(|| {
        let wrong = |what: String| Error::InvalidArgument(what);
        let count = usize::try_from(devices).ok().filter(|count| *count > 0);
        let count = count.ok_or_else(|| wrong(format!("{devices} devices")))?;
        if comms.is_null() {
            return Err(wrong("comms is null".into()));
        }
        mccs_cuda::driver()?;
        let (all, name, mut taken) = (gpus().map_err(cuda_error)?, Name::new()?, Vec::new());
        let begun = Unclaimed(
            (0..count)
                .map(|_| Comm::unmade("ncclCommInitAll", true, JoinOptions::default()))
                .collect::<Result<_, _>>()?,
        );
        let mut begin = |rank: usize| {
            // SAFETY: the caller's contract: a list that is there has as many numbers.
            let device = if list.is_null() { rank as c_int } else { unsafe { list.add(rank).read() } };
            let gpu = usize::try_from(device).ok().and_then(|device| all.get(device));
            let gpu = gpu.ok_or_else(|| wrong(format!("device {device} of {}", all.len())))?;
            if taken.contains(&device) {
                let message = format!("device {device} is in the list twice");
                return Err(Error::refused(ErrorClass::InvalidUsage, message));
            }
            taken.push(device);
            let context = Context::primary(gpu).map_err(cuda_error)?;
            let make = joining(&begun.0[rank], name, rank as c_int, devices);
            let task = Task { context, make, begun: Some(begun.0[rank].clone()) };
            Ok(Pending { task, parent: None, is_awaited: true })
        };
        make((0..count).map(&mut begin).collect::<Result<_, Error>>()?)?;
        for (rank, comm) in begun.claimed().iter().enumerate() {
            // SAFETY: the caller's contract: `comms` has as many places.
            unsafe { comms.add(rank).write(handle_of(comm)) };
        }
        Ok(())
    })
}

/// Communicators whose handles nobody has yet: they are closed unless somebody claims them.
struct Unclaimed(Vec<CommUse>);

impl Unclaimed {
    fn claimed(mut self) -> Vec<CommUse> {
        std::mem::take(&mut self.0)
    }
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        self.0.iter().for_each(|comm| drop(Comm::close(handle_of(comm))));
    }
}
