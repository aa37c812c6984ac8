//! Groups: communicators that are made together, and sends and receives that go together.

use std::cell::RefCell;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use mccs::{Error, ErrorClass};
use mccs_cuda::{Context, gpus};

use super::communicators::{Comm, Made, Member, Name, caller_context, cuda_error, locked};
use super::{IN_PROGRESS, SUCCESS, Status, guard, guard_status, put};

/// A communicator to be made at the end of a group.
struct Pending {
    task: Task,
    parent: Option<Made>,
    /// Where it goes; nowhere, if its owner has it already.
    target: Option<*mut *mut Comm>,
}

/// What is made by one thread, where it goes, and what it is made of.
type Lane = (Option<Made>, Vec<Task>, Vec<Option<*mut *mut Comm>>);

/// How it is made, by a thread.
struct Task {
    context: Context,
    make: Make,
    /// What its owner has already, where nobody waits for it.
    begun: Option<Arc<Comm>>,
}

/// Waits for the other ranks, and joins a communicator in a context, or else in the caller's; none for a rank that is in none.
pub(crate) type Make = Box<dyn FnOnce(Option<Context>) -> Result<Option<Member>, Error> + Send>;

/// Joins one that is new.
pub(crate) fn joining(name: Name, rank: c_int, nranks: c_int) -> Make {
    Box::new(move |context| Member::join(name, rank, nranks, context).map(Some))
}

#[derive(Default)]
struct Group {
    depth: u32,
    pending: Vec<Pending>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// The calling thread's group. A thread that ends has none any more.
fn with_group<R>(act: impl FnOnce(&mut Group) -> R) -> Result<R, Error> {
    let ended = |_| Error::System("the calling thread ends".into());
    GROUP.try_with(|group| act(&mut group.borrow_mut())).map_err(ended)
}

/// Opens a group: sends and receives go together at its end. Collectives wait for no other rank, so they are launched as
/// they come.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> Status {
    guard(|| {
        with_group(|group| group.depth += 1)?;
        mccs::group_start();
        Ok(())
    })
}

/// Closes a group; communicators begun in it are there when it returns, but for those that are not waited for, and its sends and
/// receives are enqueued.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> Status {
    guard_status(|| {
        let outside = || Error::Refused {
            class: ErrorClass::InvalidUsage,
            message: "ncclGroupEnd without ncclGroupStart".into(),
        };
        let pending = with_group(|group| {
            group.depth = group.depth.checked_sub(1)?;
            Some(if group.depth == 0 { std::mem::take(&mut group.pending) } else { Vec::new() })
        })?;
        let made = make(pending.ok_or_else(outside)?);
        mccs::group_end().and(made)
    })
}

/// Makes communicators on threads, since ranks of one process wait for each other. Those that are made of one are made one after the other:
/// its ranks exchange what they say in the order of their calls.
fn make(pending: Vec<Pending>) -> Result<Status, Error> {
    let mut lanes: Vec<Lane> = Vec::new();
    for Pending { task, parent, target } in pending {
        let same = |known: &Option<Made>| known.as_ref().zip(parent.as_ref()).is_some_and(|(a, b)| a.is(b));
        match lanes.iter_mut().find(|(known, ..)| same(known)) {
            Some((_, tasks, targets)) => (tasks.push(task), targets.push(target)).1,
            None => lanes.push((parent, vec![task], vec![target])),
        }
    }
    let (mut threads, mut result) = (Vec::new(), Ok(SUCCESS));
    for (parent, tasks, targets) in lanes {
        if tasks.iter().all(|task| task.begun.is_some()) {
            start(parent.as_ref(), tasks);
            result = Ok(IN_PROGRESS);
            continue;
        }
        let run = move || {
            parent.iter().for_each(Made::wait_for_makers);
            tasks.into_iter().map(Task::run).collect::<Vec<_>>()
        };
        threads.push((std::thread::spawn(run), targets));
    }
    for (thread, targets) in threads {
        let all = thread.join().map_err(|_| Error::System("a thread of this library panicked".into()))?;
        let all = all.into_iter().zip(targets).filter_map(|(made, target)| Some((made, target?)));
        for (made, target) in all {
            // SAFETY: who begins a communicator in a group keeps its place to the group's end.
            let placed = made.and_then(|comm| unsafe { place(target, comm) });
            result = result.and_then(|status| placed.map(|()| status));
        }
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
    /// Makes it. Returns what its owner does not have yet.
    fn run(self) -> Result<Option<Arc<Comm>>, Error> {
        let Task { context, make, begun } = self;
        let made = catch_unwind(AssertUnwindSafe(|| make(Some(context))));
        let made = made.unwrap_or_else(|_| Err(Error::System("a bug in mccs: a thread panicked".into())));
        let Some(begun) = begun else {
            return made.map(|member| member.map(|member| Comm::made(member, true)));
        };
        // A rank that is in none is waited for.
        begun.fill(made.and_then(|member| member.ok_or_else(|| Error::System("a bug in mccs: no place".into()))));
        Ok(None)
    }
}

/// # Safety
/// The pointer must be null or valid for a write.
unsafe fn place(target: *mut *mut Comm, comm: Option<Arc<Comm>>) -> Result<(), Error> {
    let comm = comm.map_or(std::ptr::null_mut(), Comm::into_handle);
    // SAFETY: the caller's contract.
    unsafe { put(target, comm, "comm") }
}

/// Makes a communicator, of another or new, in its context or else the caller's. Begins to, where nobody waits or there is a group.
///
/// # Safety
/// The pointer must be null or valid for a write, to the end of a group if there is one.
pub(crate) unsafe fn begin(
    target: *mut *mut Comm,
    is_blocking: bool,
    parent: Option<Made>,
    make: Make,
) -> Result<Status, Error> {
    if target.is_null() {
        return Err(Error::InvalidArgument("comm is null".into()));
    }
    let (is_grouped, context) = (with_group(|group| group.depth > 0)?, parent.as_ref().map(|of| of.context.clone()));
    if is_blocking && !is_grouped {
        parent.iter().for_each(Made::wait_for_makers);
        let comm = make(context)?.map(|member| Comm::made(member, true));
        // SAFETY: the caller's contract.
        return unsafe { place(target, comm) }.map(|()| SUCCESS);
    }
    let context = context.map_or_else(caller_context, Ok)?;
    let begun = (!is_blocking).then(|| Comm::unmade(false));
    if begun.is_some() {
        // SAFETY: the caller's contract.
        unsafe { place(target, begun.clone())? };
    }
    let target = begun.is_none().then_some(target);
    let task = Task { context, make, begun };
    if is_grouped {
        return with_group(|group| group.pending.push(Pending { task, parent, target })).map(|()| SUCCESS);
    }
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
        let mut begin = |rank: usize| {
            // SAFETY: the caller's contract: a list that is there has as many numbers, and `comms` as many places.
            let (device, target) =
                unsafe { (if list.is_null() { rank as c_int } else { list.add(rank).read() }, comms.add(rank)) };
            let gpu = usize::try_from(device).ok().and_then(|device| all.get(device));
            let gpu = gpu.ok_or_else(|| wrong(format!("device {device} of {}", all.len())))?;
            if taken.contains(&device) {
                let message = format!("device {device} is in the list twice");
                return Err(Error::Refused { class: ErrorClass::InvalidUsage, message });
            }
            taken.push(device);
            let context = Context::primary(gpu).map_err(cuda_error)?;
            let task = Task { context, make: joining(name, rank as c_int, devices), begun: None };
            Ok(Pending { task, parent: None, target: Some(target) })
        };
        make((0..count).map(&mut begin).collect::<Result<_, Error>>()?).map(drop)
    })
}
