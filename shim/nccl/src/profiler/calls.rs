//! Profiler events of a program's calls, and of the groups that they are in. A group belongs to the
//! thread that opens it.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;

use mccs::cuda::{Carrier, CudaCommunicator};
use mccs::{CollectiveKind, DataType, Error};
use mccs_cuda::RawStream;

use super::Profile;
use super::events::{Coll, Event, Function, P2pCall, Tuning, kind, state};
use super::plugin::{Handle, Plugin};
use crate::communicators::Made;

/// A collective, as a program calls it.
pub(crate) struct Collective {
    pub(crate) function: &'static Function,
    pub(crate) kind: CollectiveKind,
    pub(crate) send: *const c_void,
    pub(crate) recv: *mut c_void,
    pub(crate) count: usize,
    pub(crate) root: c_int,
    pub(crate) dtype: DataType,
    pub(crate) stream: *mut c_void,
}

/// A send or receive, as a program calls it.
pub(crate) struct PointToPoint {
    pub(crate) function: &'static Function,
    pub(crate) buffer: *mut c_void,
    pub(crate) count: usize,
    pub(crate) peer: c_int,
    pub(crate) dtype: DataType,
    pub(crate) stream: *mut c_void,
}

/// A call until its group ends.
struct Call {
    comm: Made,
    /// Its event as a call.
    api: Handle,
    what: What,
}

enum What {
    Collective { coll: Coll, kind: CollectiveKind, dtype: DataType },
    P2pCall(P2pCall),
}

/// Calls of a group so far.
#[derive(Default)]
struct Group {
    /// The event of the group, and whose context it is in.
    api: Option<(Handle, Arc<Profile>)>,
    calls: Vec<Call>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

thread_local! {
    /// The program's tag of its call.
    static USER_TAG: Cell<u64> = const { Cell::new(0) };
}

/// Makes a call that its program has tagged.
pub(crate) fn with_user_tag<R>(tag: u64, call: impl FnOnce() -> R) -> R {
    // A thread that ends has no calls to tag.
    let set = |tag| USER_TAG.try_with(|user| user.set(tag)).unwrap_or(());
    set(tag);
    let result = call();
    set(0);
    result
}

/// The tag of the call that the thread is in; 0 is none.
pub(crate) fn user_tag() -> u64 {
    USER_TAG.try_with(Cell::get).unwrap_or(0)
}

/// Whether a stream is captured.
///
/// # Safety
/// The stream must live.
unsafe fn is_captured(stream: *mut c_void) -> bool {
    // SAFETY: the caller's contract.
    unsafe { RawStream::from_ptr(stream).is_capturing() }.unwrap_or(false)
}

/// Makes a collective's call, and tells the plugin of it.
///
/// # Safety
/// The stream must live.
pub(crate) unsafe fn collective(
    comm: &Made,
    call: &Collective,
    enqueue: impl FnOnce() -> Result<(), Error>,
) -> Result<(), Error> {
    let Some(profile) = comm.profile().filter(|_| Plugin::wants(kind::OF_CALLS)) else { return enqueue() };
    let &Collective { function, kind, send, recv, count, root, dtype, stream } = call;
    let sequence = profile.next_sequence(function);
    // SAFETY: the caller's contract.
    let is_captured = unsafe { is_captured(stream) };
    let datatype = dtype as c_int;
    let user_tag = user_tag();
    let coll = Coll { function, sequence, send, recv, count, root, datatype, stream, is_captured, user_tag };
    call_in_group(comm, profile, What::Collective { coll, kind, dtype }, enqueue)
}

/// Makes a send's or receive's call, and tells the plugin of it.
///
/// # Safety
/// The stream must live.
pub(crate) unsafe fn p2p(
    comm: &Made,
    call: &PointToPoint,
    enqueue: impl FnOnce() -> Result<(), Error>,
) -> Result<(), Error> {
    let Some(profile) = comm.profile().filter(|_| Plugin::wants(kind::OF_CALLS)) else { return enqueue() };
    let &PointToPoint { function, buffer, count, peer, dtype, stream } = call;
    // SAFETY: the caller's contract.
    let is_captured = unsafe { is_captured(stream) };
    let p2p = P2pCall { function, buffer, count, peer, datatype: dtype as c_int, stream, is_captured };
    call_in_group(comm, profile, What::P2pCall(p2p), enqueue)
}

/// A call that is a group of its own, or one of a program's group.
fn call_in_group(
    comm: &Made,
    profile: &Arc<Profile>,
    what: What,
    enqueue: impl FnOnce() -> Result<(), Error>,
) -> Result<(), Error> {
    let depth = crate::group::depth();
    if depth == 0 {
        return call_alone(comm, profile, &what, enqueue);
    }
    let event = what.event();
    let api = profile.start(&event, begin_group(profile, depth, what.is_captured()));
    let result = enqueue();
    profile.plugin.stop(api);
    if result.is_ok() {
        let call = Call { comm: comm.clone(), api, what };
        // A thread that ends has no group.
        let _ = GROUP.try_with(|group| group.borrow_mut().calls.push(call));
    }
    result
}

/// A call that is a group of its own, which counts as one. Programs make most calls so: nothing is allocated.
fn call_alone(
    comm: &Made,
    profile: &Arc<Profile>,
    what: &What,
    enqueue: impl FnOnce() -> Result<(), Error>,
) -> Result<(), Error> {
    let group = profile.start(&Event::GroupApi { is_captured: what.is_captured(), depth: 1 }, Handle::NONE);
    let api = profile.start(&what.event(), group);
    profile.plugin.stop(api);
    let mut launched = Launched::begin(comm, profile, what, group);
    let operation = launched.start(what, api);
    let result = enqueue();
    launched.end(&[operation]);
    profile.plugin.stop(group);
    result
}

/// The event of the group that a program's call is in, which its first call begins.
fn begin_group(profile: &Arc<Profile>, depth: u32, is_captured: bool) -> Handle {
    let begun = GROUP.try_with(|group| {
        let mut group = group.borrow_mut();
        let (handle, _) = group.api.get_or_insert_with(|| {
            let handle = profile.start(&Event::GroupApi { is_captured, depth: depth as c_int + 1 }, Handle::NONE);
            profile.plugin.record(handle, state::GROUP_START_API_STOP, None);
            (handle, Arc::clone(profile))
        });
        *handle
    });
    begun.unwrap_or(Handle::NONE)
}

/// Ends the group's event.
fn end_api() {
    let api = GROUP.try_with(|group| group.borrow_mut().api.take()).ok().flatten();
    if let Some((handle, profile)) = api {
        profile.plugin.stop(handle);
    }
}

/// Ends a program's outermost group, of which nothing is done.
pub(crate) fn drop_group() {
    let _ = GROUP.try_with(|group| group.borrow_mut().calls.clear());
    end_api();
}

/// Ends a program's outermost group: `launch_all` enqueues what it has collected.
pub(crate) fn end_group<R>(launch_all: impl FnOnce() -> Result<R, Error>) -> Result<R, Error> {
    if !Plugin::wants(kind::OF_CALLS) {
        return launch_all();
    }
    let taken = GROUP.try_with(|group| std::mem::take(&mut group.borrow_mut().calls)).unwrap_or_default();
    let api = GROUP.try_with(|group| {
        let group = group.borrow();
        let (handle, profile) = group.api.as_ref()?;
        profile.plugin.record(*handle, state::GROUP_END_API_START, None);
        Some(*handle)
    });
    let api = api.ok().flatten().unwrap_or(Handle::NONE);
    let result = if taken.is_empty() { launch_all() } else { launch(&taken, api, launch_all) };
    end_api();
    result
}

/// Enqueues calls, within events of their operations.
fn launch<R>(calls: &[Call], api: Handle, enqueue: impl FnOnce() -> Result<R, Error>) -> Result<R, Error> {
    let mut all: Vec<(Launched<'_>, Vec<Operation>)> = Vec::new();
    for call in calls {
        let Some(profile) = call.comm.profile() else { continue };
        let at = all.iter().position(|(launched, _)| launched.comm.is(&call.comm)).unwrap_or_else(|| {
            all.push((Launched::begin(&call.comm, profile, &call.what, api), Vec::new()));
            all.len() - 1
        });
        let (launched, operations) = &mut all[at];
        operations.push(launched.start(&call.what, call.api));
    }
    let result = enqueue();
    all.into_iter().for_each(|(launched, operations)| launched.end(&operations));
    result
}

impl What {
    /// Its event as a call.
    fn event(&self) -> Event<'_> {
        match self {
            What::Collective { coll, .. } => Event::CollApi(coll),
            What::P2pCall(p2p) => Event::P2pApi(p2p),
        }
    }

    fn is_captured(&self) -> bool {
        match self {
            What::Collective { coll, .. } => coll.is_captured,
            What::P2pCall(p2p) => p2p.is_captured,
        }
    }

    fn stream(&self) -> *mut c_void {
        match self {
            What::Collective { coll, .. } => coll.stream,
            What::P2pCall(p2p) => p2p.stream,
        }
    }
}

/// Events of one communicator's operations in a group.
struct Launched<'a> {
    comm: &'a Made,
    /// None while it is suspended.
    communicator: Option<Arc<CudaCommunicator>>,
    profile: &'a Arc<Profile>,
    group: Handle,
    launch: Handle,
    /// Operations so far whose kernels leave stamps.
    stamped: u64,
}

/// An operation's event, and the number of the stamp that its kernel leaves, if it does.
struct Operation {
    event: Handle,
    stamp: Option<u64>,
}

impl<'a> Launched<'a> {
    /// With the first of its calls.
    fn begin(comm: &'a Made, profile: &'a Arc<Profile>, first: &What, api: Handle) -> Self {
        let group = profile.start(&Event::Group, Handle::NONE);
        let launch = profile.start(&Event::KernelLaunch { stream: first.stream() }, api);
        Launched { comm, communicator: comm.communicator(), profile, group, launch, stamped: 0 }
    }

    /// Begins the event of an operation, in that of its call.
    fn start(&mut self, what: &What, api: Handle) -> Operation {
        let (profile, group) = (self.profile, self.group.0);
        let (coll, kind, dtype) = match what {
            What::P2pCall(p2p) => {
                return Operation { event: profile.start(&Event::P2p { p2p, group }, api), stamp: None };
            }
            What::Collective { coll, kind, dtype } => (coll, *kind, *dtype),
        };
        let comm = self.communicator.as_ref();
        let carrier = comm.map_or(Carrier::Nobody, |comm| comm.carrier(kind, coll.count as u64, dtype));
        let by_engines = Event::CeColl { coll };
        if carrier == Carrier::CopyEngines && profile.plugin.hears_of(&by_engines) {
            return Operation { event: profile.start(&by_engines, api), stamp: None };
        }
        let (tuning, stamp) = tuning(carrier, coll.is_captured);
        // Nothing of the group was launched when the carrier was asked for.
        let stamp = stamp.map(|next| next + self.stamped);
        self.stamped += u64::from(stamp.is_some());
        Operation { event: profile.start(&Event::Coll { coll, tuning, group }, api), stamp }
    }

    fn end(self, operations: &[Operation]) {
        let Launched { profile, group, launch, .. } = self;
        profile.plugin.stop(launch);
        // Before the operations are stopped: a plugin may forget those that nothing belongs to.
        if self.stamped > 0 && Plugin::wants(kind::KERNEL_CH) {
            let last = self.communicator.as_ref().map_or(0, |comm| comm.kernels_launched());
            let stamped = operations.iter().filter_map(|&Operation { event, stamp }| Some((stamp?, event)));
            for (number, event) in stamped.filter(|(_, event)| *event != Handle::NONE) {
                // A call that was not launched leaves no stamp.
                if number <= last {
                    profile.expect_kernel(number, event);
                } else {
                    profile.tell_kernel(event, None);
                }
            }
        }
        operations.iter().for_each(|operation| profile.plugin.stop(operation.event));
        profile.plugin.stop(group);
    }
}

/// How a collective goes, in the words that plugins know, and the number of the stamp that its kernel leaves.
fn tuning(carrier: Carrier, is_captured: bool) -> (Tuning, Option<u64>) {
    const BULK: &CStr = c"SIMPLE";
    let of = |algorithm, protocol, channels| Tuning { algorithm, protocol, channels, warps: 0 };
    match carrier {
        Carrier::Kernel { is_two_shot, protocol, stamp } => {
            let protocol = [c"LL", c"LL128"].into_iter().find(|name| name.to_bytes() == protocol.as_bytes());
            let algorithm = if is_two_shot { c"TWO_SHOT" } else { c"ONE_SHOT" };
            let stamp = stamp.filter(|_| !is_captured);
            (of(algorithm, protocol.unwrap_or(BULK), u8::from(stamp.is_some())), stamp)
        }
        Carrier::CopyEngines => (of(c"CE", BULK, 0), None),
        Carrier::Service => (of(c"SERVICE", BULK, 0), None),
        Carrier::Nobody => (of(c"NONE", BULK, 0), None),
    }
}
