//! Groups: communicators that are made together, and sends and receives that go together.

use std::cell::RefCell;
use std::ffi::c_int;

use mccs::{Error, ErrorClass};
use mccs_cuda::{Context, gpus};

use super::communicators::{Comm, Name, caller_context, cuda_error};
use super::{Status, guard, put};

/// A communicator to be made at the end of a group.
struct Pending {
    context: Context,
    make: Make,
    target: *mut *mut Comm,
}

/// Waits for the other ranks, and makes a communicator in a context, or else in the caller's; none for a rank that is in none.
pub(crate) type Make = Box<dyn FnOnce(Option<Context>) -> Result<Option<Comm>, Error> + Send>;

/// Joins one that is new.
pub(crate) fn joining(name: Name, rank: c_int, nranks: c_int) -> Make {
    Box::new(move |context| Comm::join(name, rank, nranks, context).map(Some))
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

/// Closes a group; communicators begun in it are there when it returns, and its sends and receives are enqueued.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> Status {
    guard(|| {
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

/// Makes communicators, each on a thread, since ranks of one process wait for each other.
fn make(pending: Vec<Pending>) -> Result<(), Error> {
    let start = |Pending { context, make, target }| (std::thread::spawn(move || make(Some(context))), target);
    let threads: Vec<_> = pending.into_iter().map(start).collect();
    let mut result = Ok(());
    for (thread, target) in threads {
        let made = thread.join().unwrap_or_else(|_| Err(Error::System("a thread of this library panicked".into())));
        // SAFETY: who begins a communicator in a group keeps its place to the group's end.
        let placed = made.and_then(|comm| unsafe { place(target, comm) });
        result = result.and(placed);
    }
    result
}

/// # Safety
/// The pointer must be null or valid for a write.
unsafe fn place(target: *mut *mut Comm, comm: Option<Comm>) -> Result<(), Error> {
    let comm = comm.map_or(std::ptr::null_mut(), Comm::into_handle);
    // SAFETY: the caller's contract.
    unsafe { put(target, comm, "comm") }
}

/// Makes a communicator, or begins to where there is a group; in `context`, or else in the caller's.
///
/// # Safety
/// The pointer must be null or valid for a write, to the end of a group if there is one.
pub(crate) unsafe fn begin(target: *mut *mut Comm, context: Option<Context>, make: Make) -> Result<(), Error> {
    if target.is_null() {
        return Err(Error::InvalidArgument("comm is null".into()));
    }
    if with_group(|group| group.depth > 0)? {
        let context = context.map_or_else(caller_context, Ok)?;
        return with_group(|group| group.pending.push(Pending { context, make, target }));
    }
    let comm = make(context)?;
    // SAFETY: the caller's contract.
    unsafe { place(target, comm) }
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
        let (all, name) = (gpus().map_err(cuda_error)?, Name::new()?);
        let begin = |rank: usize| {
            // SAFETY: the caller's contract: a list that is there has as many numbers, and `comms` as many places.
            let (device, target) =
                unsafe { (if list.is_null() { rank as c_int } else { list.add(rank).read() }, comms.add(rank)) };
            let gpu = usize::try_from(device).ok().and_then(|device| all.get(device));
            let gpu = gpu.ok_or_else(|| wrong(format!("device {device} of {}", all.len())))?;
            let context = Context::primary(gpu).map_err(cuda_error)?;
            Ok(Pending { context, make: joining(name, rank as c_int, devices), target })
        };
        make((0..count).map(begin).collect::<Result<_, Error>>()?)
    })
}
