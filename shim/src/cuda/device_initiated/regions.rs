//! Registration cache of the caller's GPU memory: registered when a large operation first uses it,
//! forgotten when it is freed.
//!
//! Memory with a handle (`cudaMalloc`) is registered as whole allocations, so that buffers an allocator cuts out of one share it. Memory
//! that was made to be given away by descriptors (`cuMemCreate`) is registered as the segments that a buffer lies in. An address may be
//! freed and come again as something else, which is looked for before it is used.
//!
//! Memory that its owner frees stays where it is until the service has closed it. Nobody tells, so regions are looked at in turn: some
//! after each large call, and whenever the program asks for errors. Memory that a communicator was the last to use is given back when it
//! leaves.
//!
//! If there is room for no more of them, here or at the service, the one that was not used for longest goes. One that a call has found and
//! not told the service of yet ([`Found`]) stays.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Included};
use std::ops::{Range, RangeInclusive};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use mccs_cuda::{
    Allocation, Context, DeviceAddress, PointerKind, allocation_of, buffer_id, export, pointer_kind, while_capturing,
};
use mccs_ipc::command::BufferRef;
use mccs_ipc::protocol::{GPU_SEGMENTS_MAX, MESSAGE_FDS_MAX, Request, Response};
use mccs_ipc::types::{ErrorClass, Handle};

use super::member::Member;
use crate::Error;
use crate::client::unexpected;
use crate::cuda::cuda_error;
use crate::requests::Requests;

/// Buffers of GPUs that a session has registered at a time, at most: the one that was not used for longest goes.
pub const REGISTERED_MAX: usize = 128;
/// Regions that are looked at at a time, which takes the driver less than a microsecond each: of the caller's time, which bounds many a training step.
const LOOK_AT: usize = 2;

/// Names a region: its context, and its first address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    context: usize,
    base: DeviceAddress,
}

impl Key {
    /// Keys of a context.
    fn all_of(context: &Context) -> RangeInclusive<Key> {
        let context = context.key();
        Key { context, base: DeviceAddress::MIN }..=Key { context, base: DeviceAddress::MAX }
    }
}

/// Registrations of a session.
#[derive(Default)]
pub(crate) struct GpuRegions {
    known: BTreeMap<Key, Known>,
    /// End of the last look.
    looked_at: DeviceAddress,
    uses: u64,
    /// Have given way to longer ones while calls had found them.
    outgrown: Vec<Known>,
}

/// A buffer as the service knows it, which it does as long as this is held.
pub(super) struct Found {
    pub(super) buffer: BufferRef,
    _in_use: Option<Arc<()>>,
}

impl Found {
    /// No buffer.
    pub(super) const NONE: Found = Found { buffer: BufferRef::NONE, _in_use: None };
}

struct Known {
    source: Source,
    bytes: u64,
    handle: Handle,
    used: u64,
    /// The communicator that used it last.
    comm: Handle,
    /// How often it was looked at.
    looks: usize,
    /// Held by calls that have found it.
    in_use: Arc<()>,
}

/// Source of a region, so that it can be told from what comes to lie there later.
enum Source {
    /// One allocation, by its buffer id, which no other has or had.
    Whole(u64),
    /// As long as these are held, no others are equal to them.
    Segments(Vec<Segment>),
}

struct Segment {
    base: DeviceAddress,
    bytes: u64,
    allocation: Allocation,
}

impl Segment {
    fn at(address: DeviceAddress) -> Result<Self, Error> {
        let (base, bytes) = allocation_of(address).map_err(cuda_error)?;
        Ok(Segment { base, bytes, allocation: Allocation::at(base).map_err(cuda_error)? })
    }

    fn lives(&self) -> bool {
        Segment::at(self.base)
            .is_ok_and(|now| (now.base, now.bytes) == (self.base, self.bytes) && now.allocation == self.allocation)
    }
}

impl Known {
    fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.in_use) > 1
    }

    fn found(&self, offset_bytes: u64) -> Found {
        let buffer = BufferRef { region: self.handle, offset_bytes };
        Found { buffer, _in_use: Some(Arc::clone(&self.in_use)) }
    }

    /// Whether all of `range` that lies in it is what it was. The context must be current.
    fn holds(&self, base: DeviceAddress, range: &Range<DeviceAddress>) -> bool {
        let touches = |segment: &&Segment| segment.base < range.end && range.start < segment.base + segment.bytes;
        base <= range.start
            && range.end - base <= self.bytes
            && match &self.source {
                Source::Whole(id) => is_still(base, *id),
                Source::Segments(segments) => segments.iter().filter(touches).all(Segment::lives),
            }
    }

    /// Whether it is there; of segments, one after the other is looked at.
    fn lives(&mut self, base: DeviceAddress) -> bool {
        self.looks = self.looks.wrapping_add(1);
        match &self.source {
            Source::Whole(id) => is_still(base, *id),
            Source::Segments(segments) => segments.get(self.looks % segments.len().max(1)).is_some_and(Segment::lives),
        }
    }
}

fn is_still(base: DeviceAddress, id: u64) -> bool {
    buffer_id(base).is_ok_and(|now| now == id)
}

impl GpuRegions {
    /// Names a buffer to the service. Its context must be current, and nothing that the driver is called for be captured. Memory that other
    /// processes cannot open, or the service does not take, is an error; only if the service has gone nothing else will do.
    pub(super) fn place(&mut self, member: &Member, address: DeviceAddress, bytes: u64) -> Result<Found, Error> {
        self.find_or_register(member, address..address.saturating_add(bytes))
    }

    /// Gives back some of what was freed meanwhile.
    pub(super) fn look(&mut self, member: &Member) {
        let context = &member.context;
        if self.known.range(Key::all_of(context)).next().is_some()
            && let Ok(_entered) = context.enter()
        {
            // There is nobody to tell.
            let _ = while_capturing(|| self.look_at(context, &member.client.0.requests, LOOK_AT));
        }
    }

    /// Gives back what a communicator that leaves was the last to use.
    pub(super) fn forget_of(&mut self, comm: Handle, requests: &Requests) {
        let of_it = self.known.iter().filter(|(_, known)| known.comm == comm).map(|(key, _)| *key);
        of_it.collect::<Vec<_>>().into_iter().for_each(|key| self.forget(key, requests));
    }

    fn find_or_register(&mut self, member: &Member, range: Range<DeviceAddress>) -> Result<Found, Error> {
        self.uses += 1;
        let (context, requests) = (&member.context, &member.client.0.requests);
        let mut of_context = self.known.range_mut(Key::all_of(context));
        if let Some((key, known)) = of_context.find(|(key, known)| known.holds(key.base, &range)) {
            (known.used, known.comm) = (self.uses, member.handle);
            return Ok(known.found(range.start - key.base));
        }
        let kind = pointer_kind(range.start).map_err(cuda_error)?;
        if kind == PointerKind::Private || (kind == PointerKind::Ipc && !member.shares_handles) {
            return Err(Error::no_cuda("memory of this kind cannot be opened by the service"));
        }
        self.look_at(context, requests, usize::MAX);
        if self.known.len() >= REGISTERED_MAX
            && let Some(oldest) = self.oldest()
        {
            self.forget(oldest, requests);
        }
        let Registered { base, bytes, source, handle } = loop {
            let registered = match kind {
                PointerKind::Descriptors => register_segments(member, &range),
                PointerKind::Ipc | PointerKind::Private => register_whole(member, range.start),
            };
            match (registered, self.oldest()) {
                (Ok(registered), _) => break registered,
                (Err(NotRegistered::NoRoom(_)), Some(oldest)) => self.give_back(oldest, requests)?,
                (Err(NotRegistered::NoRoom(error) | NotRegistered::Otherwise(error)), _) => return Err(error),
            }
        };
        let key = Key { context: context.key(), base };
        // One that begins there and is shorter.
        self.forget(key, requests);
        let (used, comm) = (self.uses, member.handle);
        let known = Known { source, bytes, handle, used, comm, looks: 0, in_use: Arc::default() };
        let found = known.found(range.start - base);
        self.known.insert(key, known);
        Ok(found)
    }

    /// The one that was not used for longest.
    fn oldest(&self) -> Option<Key> {
        let others = self.known.iter().filter(|(_, known)| !known.is_in_use());
        others.min_by_key(|(_, known)| known.used).map(|(key, _)| *key)
    }

    /// Gives back what its owner has freed, of the next `count` regions of a context, which is current.
    fn look_at(&mut self, context: &Context, requests: &Requests, count: usize) {
        for known in self.outgrown.extract_if(.., |known| !known.is_in_use()) {
            free(&known, requests);
        }
        let (first, last) = Key::all_of(context).into_inner();
        let here = Key { base: self.looked_at, ..first };
        let behind = self.known.range((Excluded(here), Included(last)));
        let others = self.known.range((Included(first), Included(here)));
        let next: Vec<_> = behind.chain(others).take(count).map(|(key, _)| *key).collect();
        self.looked_at = next.last().map_or(self.looked_at, |key| key.base);
        for key in next {
            if self.known.get_mut(&key).is_some_and(|known| !known.lives(key.base)) {
                self.forget(key, requests);
            }
        }
    }

    fn forget(&mut self, key: Key, requests: &Requests) {
        match self.known.remove(&key) {
            Some(known) if known.is_in_use() => self.outgrown.push(known),
            Some(known) => free(&known, requests),
            None => {}
        }
    }

    /// Gives one back, and waits until the service has room for another: it takes what the ring has brought first.
    fn give_back(&mut self, key: Key, requests: &Requests) -> Result<(), Error> {
        let Some(known) = self.known.remove(&key) else { return Ok(()) };
        requests.call(Request::FreeGpuMemory { region: known.handle }, &[]).map(drop)
    }
}

fn free(known: &Known, requests: &Requests) {
    requests.send_and_forget(Request::FreeGpuMemory { region: known.handle });
}

/// The service's registration, by its handle.
struct Registered {
    base: DeviceAddress,
    bytes: u64,
    source: Source,
    handle: Handle,
}

/// Why the service has no region for a buffer.
enum NotRegistered {
    /// Its tenant may have no more at a time.
    NoRoom(Error),
    Otherwise(Error),
}

impl From<Error> for NotRegistered {
    fn from(error: Error) -> Self {
        NotRegistered::Otherwise(error)
    }
}

/// Registers the allocation that an address lies in.
fn register_whole(member: &Member, address: DeviceAddress) -> Result<Registered, NotRegistered> {
    let (base, bytes) = allocation_of(address).map_err(cuda_error)?;
    let id = buffer_id(base).map_err(cuda_error)?;
    let ipc_handle = export(base).map_err(cuda_error)?.0.to_vec();
    let request = Request::RegisterGpuMemory { gpu: member.context.gpu().id.0, ipc_handle, bytes };
    let handle = register(member, request)?;
    Ok(Registered { base, bytes, source: Source::Whole(id), handle })
}

/// Registers the segments that a buffer lies in.
fn register_segments(member: &Member, range: &Range<DeviceAddress>) -> Result<Registered, NotRegistered> {
    let mut segments = vec![Segment::at(range.start)?];
    let end = |segments: &[Segment]| segments.last().map_or(0, |last| last.base + last.bytes);
    while end(&segments) < range.end {
        if segments.len() == GPU_SEGMENTS_MAX {
            return Err(Error::argument(format!("a buffer lies in more than {GPU_SEGMENTS_MAX} segments")).into());
        }
        let next = Segment::at(end(&segments))?;
        if next.base != end(&segments) {
            return Err(Error::argument("the segments that a buffer lies in overlap").into());
        }
        segments.push(next);
    }
    let of_gpus = segments.iter().map(|segment| segment.allocation.gpu()).collect::<Result<Vec<_>, _>>();
    if of_gpus.map_err(cuda_error)?.contains(&None) {
        return Err(Error::no_cuda("memory that is no GPU's is not opened by the service").into());
    }
    let requests = &member.client.0.requests;
    for (number, some) in segments.chunks(MESSAGE_FDS_MAX).enumerate() {
        let fds: Vec<OwnedFd> =
            some.iter().map(|segment| segment.allocation.export()).collect::<Result<_, _>>().map_err(cuda_error)?;
        let bytes = some.iter().map(|segment| segment.bytes).collect();
        let name = Request::NameGpuSegments { begins: number == 0, bytes };
        requests.call(name, &fds.iter().map(AsFd::as_fd).collect::<Vec<_>>())?;
    }
    let handle = register(member, Request::RegisterGpuSegments { gpu: member.context.gpu().id.0 })?;
    let base = segments.first().map_or(range.start, |first| first.base);
    Ok(Registered { base, bytes: end(&segments) - base, source: Source::Segments(segments), handle })
}

fn register(member: &Member, request: Request) -> Result<Handle, NotRegistered> {
    match member.client.0.requests.call(request, &[]) {
        Ok((Response::Region { region, .. }, _)) => Ok(region),
        Ok((other, _)) => Err(unexpected(&other).into()),
        Err(error @ Error::Refused { class: ErrorClass::InvalidUsage, .. }) => Err(NotRegistered::NoRoom(error)),
        Err(error) => Err(error.into()),
    }
}
