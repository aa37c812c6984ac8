//! Several transports of a host as one: each flow goes over the one that its options name (TCP,
//! RDMA). So the flows of one strategy can go over TCP, and those of the next over RDMA.
//!
//! - A listener is one of each; its handle has those of all, by kind (`handle.rs`).
//! - A flow, or a request, is called as its own transport calls it, with the transport's place in the upper bits of its index.
//! - Host memory is made known to the first transport at once, and to another when that begins a flow: what it costs to pin memory
//!   is not spent for nothing, and what a device refuses is refused before the flow is there. It stays known until it is given back.
//! - A GPU's memory is made known at once to all transports that can reach it.
//! - A transport without flows is polled now and then, when it asked for it, and after a sleep.
//!
//! Deliberately absent: what flows over each of them begin with (whoever makes flows knows).

mod abilities;
mod handle;
mod memory;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use mccs_config::service::TransportKind;
use mccs_ipc::types::Handle;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use self::abilities::Can;
use self::memory::Memory;
use super::{
    DataPath, FLOWS_MAX, FlowId, FlowOptions, FlowSpec, FlowState, LISTENERS_MAX, ListenOptions, Listener,
    ListenerHandle, MemoryKey, MemoryKind, MemorySpan, REGIONS_MAX, RecvFlow, Request, SendFlow, Status, Transport,
    TransportError, Usage,
};
use mccs_model::handles::HandleTable;
use mccs_runtime::{Context, Progress};

/// How often a transport without flows is polled while the engine does not sleep: it has strangers to turn away.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Bits of a flow's index; above is the place of its transport.
const FLOW_BITS: u32 = 24;

const _: () = assert!(FLOWS_MAX <= 1 << FLOW_BITS);

const NO_MEMORY: TransportError = TransportError::NoSuch("registered memory");

struct Member {
    kind: TransportKind,
    transport: Box<dyn Transport>,
    /// When it was polled last, or since then something was asked of it.
    said: Progress,
}

impl Member {
    /// Whether it has flows, or carries what closed ones have left.
    fn is_in_use(&self) -> bool {
        let Usage { flows, lingering, .. } = self.transport.usage();
        flows + lingering > 0
    }

    fn is_due(&self, now: Instant) -> bool {
        match self.said {
            Progress::Idle { wake_at } => wake_at.is_some_and(|at| at <= now),
            Progress::Busy | Progress::Done => true,
        }
    }
}

/// See the module's documentation.
pub struct MultiTransport {
    members: Vec<Member>,
    /// Abilities of one or another of them.
    can: Can,
    /// By place.
    listeners: HandleTable<Vec<Listener>>,
    memory: HandleTable<Memory>,
    /// Watches the descriptors of all, where there are several.
    epoll: Option<Epoll>,
    /// When those without flows are polled next.
    look_at: Option<Instant>,
    is_armed: bool,
}

impl MultiTransport {
    /// All transports of a host, each of another kind; the first one carries flows that name none.
    ///
    /// # Errors
    /// The kernel has no descriptor to watch them by.
    pub fn new(transports: Vec<(TransportKind, Box<dyn Transport>)>) -> Result<Self, TransportError> {
        let member = |(kind, transport)| Member { kind, transport, said: Progress::Busy };
        let mut members: Vec<Member> = transports.into_iter().map(member).collect();
        let epoll = if members.len() > 1 { watch(&members)? } else { None };
        Ok(MultiTransport {
            can: Can::of(&mut members),
            members,
            listeners: HandleTable::new(LISTENERS_MAX),
            memory: HandleTable::new(REGIONS_MAX),
            epoll,
            look_at: None,
            is_armed: false,
        })
    }

    /// The member that a flow belongs to, and what that calls it.
    fn of_flow(&self, flow: FlowId) -> Result<(&Member, FlowId), TransportError> {
        let (place, flow) = inside(flow);
        self.members.get(place).map(|member| (member, flow)).ok_or(TransportError::NO_FLOW)
    }

    fn of_flow_mut(&mut self, flow: FlowId) -> Result<(&mut Member, FlowId), TransportError> {
        let (place, flow) = inside(flow);
        self.members.get_mut(place).map(|member| (member, flow)).ok_or(TransportError::NO_FLOW)
    }

    /// The span for the member of a flow.
    fn span(&self, flow: FlowId, span: MemorySpan) -> Result<MemorySpan, TransportError> {
        let memory = self.memory.get(span.key.0).ok_or(NO_MEMORY)?;
        let key = memory.key(inside(flow).0).ok_or(NO_MEMORY)?;
        Ok(MemorySpan { key, ..span })
    }

    /// The place of the member that is to carry a flow.
    fn place_of(&self, options: &FlowOptions) -> Result<usize, TransportError> {
        let Some(kind) = options.transport else { return Ok(0) };
        let place = self.members.iter().position(|member| member.kind == kind);
        place.ok_or_else(|| TransportError::NoTransport { host: "this host".into(), kind })
    }

    /// The member that is to carry a flow, which knows all memory from here on.
    fn begin(&mut self, spec: &FlowSpec) -> Result<usize, TransportError> {
        let place = self.place_of(&spec.options)?;
        let member = self.members.get_mut(place).ok_or(TransportError::NO_FLOW)?;
        if !member.is_in_use() {
            for (_, memory) in self.memory.iter_mut() {
                // SAFETY: promised for as long as it is registered, which it is until `deregister` has had it forgotten.
                unsafe { memory.make_known(place, member) }?;
            }
        }
        Ok(place)
    }
}

/// A descriptor that watches those of all members; none where one has none, and polls are all there is.
fn watch(members: &[Member]) -> Result<Option<Epoll>, TransportError> {
    let refused = |call| move |reason| TransportError::Os { call, reason };
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(refused("epoll_create1"))?;
    for member in members {
        let Some(descriptor) = member.transport.descriptor() else { return Ok(None) };
        epoll.add(descriptor, EpollEvent::new(EpollFlags::EPOLLIN, 0)).map_err(refused("epoll_ctl"))?;
    }
    Ok(Some(epoll))
}

/// A member's flow, as it is called outside.
fn outside(place: usize, flow: FlowId) -> FlowId {
    FlowId(Handle { index: flow.0.index | (place as u32) << FLOW_BITS, generation: flow.0.generation })
}

/// The place of a flow's member, and what that calls it.
fn inside(flow: FlowId) -> (usize, FlowId) {
    let Handle { index, generation } = flow.0;
    ((index >> FLOW_BITS) as usize, FlowId(Handle { index: index & ((1 << FLOW_BITS) - 1), generation }))
}

impl DataPath for MultiTransport {
    fn isend(&mut self, flow: SendFlow, message: MemorySpan, tag: u32) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let message = self.span(id, message)?;
        let (member, inner) = self.of_flow_mut(id)?;
        let request = member.transport.isend(SendFlow(inner), message, tag)?;
        Ok(request.map(|request| Request { flow: id, ..request }))
    }

    fn irecv(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let buffer = self.span(id, buffer)?;
        let (member, inner) = self.of_flow_mut(id)?;
        let request = member.transport.irecv(RecvFlow(inner), buffer)?;
        Ok(request.map(|request| Request { flow: id, ..request }))
    }

    fn flush(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        let buffer = self.span(id, buffer)?;
        let (member, inner) = self.of_flow_mut(id)?;
        let request = member.transport.flush(RecvFlow(inner), buffer)?;
        Ok(request.map(|request| Request { flow: id, ..request }))
    }

    fn test(&mut self, request: Request) -> Result<Status, TransportError> {
        let (member, flow) = self.of_flow_mut(request.flow)?;
        member.transport.test(Request { flow, ..request })
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        let slept = std::mem::take(&mut self.is_armed);
        let looks = slept || self.look_at.is_none_or(|at| at <= cx.now);
        if looks {
            self.look_at = Some(cx.now + LOOK_EVERY);
        }
        let (mut is_busy, mut wakes) = (false, None::<Instant>);
        for member in &mut self.members {
            if looks || member.is_due(cx.now) || member.is_in_use() {
                member.said = member.transport.poll(cx);
            }
            match member.said {
                Progress::Idle { wake_at } => wakes = wakes.into_iter().chain(wake_at).min(),
                Progress::Busy | Progress::Done => is_busy = true,
            }
        }
        if is_busy { Progress::Busy } else { Progress::Idle { wake_at: wakes } }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        self.is_armed = self.members.iter_mut().all(|member| member.transport.prepare_to_sleep());
        if !self.is_armed {
            // Whoever has something to do may have no flows.
            self.look_at = None;
        }
        self.is_armed
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match (&self.epoll, &self.members[..]) {
            (Some(epoll), _) => Some(epoll.0.as_fd()),
            (None, [only]) => only.transport.descriptor(),
            (None, _) => None,
        }
    }
}

impl Transport for MultiTransport {
    unsafe fn register(&mut self, ptr: *mut u8, bytes: u64, kind: MemoryKind<'_>) -> Result<MemoryKey, TransportError> {
        let mut memory = Memory::new(ptr, bytes, kind, self.members.len());
        // SAFETY: the caller's promise, passed on.
        let made = unsafe { memory.register(&mut self.members, kind) };
        let full = TransportError::TooMany { what: "memory registrations", limit: REGIONS_MAX };
        let inserted = match made {
            Ok(()) => self.memory.insert(memory).map_err(|memory| (memory, full)),
            Err(error) => Err((memory, error)),
        };
        inserted.map(MemoryKey).map_err(|(mut memory, error)| {
            let forgotten = memory.forget(&mut self.members);
            debug_assert!(forgotten.is_ok(), "bug: nobody has used it");
            error
        })
    }

    fn deregister(&mut self, key: MemoryKey) -> Result<(), TransportError> {
        self.memory.get_mut(key.0).ok_or(NO_MEMORY)?.forget(&mut self.members)?;
        self.memory.remove(key.0);
        Ok(())
    }

    fn listen(&mut self, options: &ListenOptions) -> Result<(Listener, ListenerHandle), TransportError> {
        let (mut listeners, mut handles) = (Vec::with_capacity(self.members.len()), Vec::new());
        let mut listened = Ok(());
        for member in &mut self.members {
            match member.transport.listen(options) {
                Ok((listener, handle)) => {
                    listeners.push(listener);
                    handles.push((member.kind, handle));
                }
                Err(error) => {
                    listened = Err(error);
                    break;
                }
            }
        }
        let made = match listened.and_then(|()| handle::of(&handles)) {
            Ok(handle) => match self.listeners.insert(listeners) {
                Ok(listener) => return Ok((Listener(listener), handle)),
                Err(listeners) => (listeners, TransportError::TOO_MANY_LISTENERS),
            },
            Err(error) => (listeners, error),
        };
        let (listeners, error) = made;
        for (member, listener) in self.members.iter_mut().zip(listeners) {
            member.transport.close_listener(listener);
        }
        Err(error)
    }

    fn close_listener(&mut self, listener: Listener) {
        for (member, listener) in self.members.iter_mut().zip(self.listeners.remove(listener.0).unwrap_or_default()) {
            member.transport.close_listener(listener);
            member.said = Progress::Busy;
        }
    }

    fn end_numbers(&mut self, listener: Listener, below: u64) {
        let Some(listeners) = self.listeners.get(listener.0) else { return };
        for (member, listener) in self.members.iter_mut().zip(listeners) {
            member.transport.end_numbers(*listener, below);
            member.said = Progress::Busy;
        }
    }

    fn connect(
        &mut self,
        listener: &ListenerHandle,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<SendFlow, TransportError> {
        let place = self.begin(spec)?;
        let member = self.members.get_mut(place).ok_or(TransportError::NO_FLOW)?;
        let part = handle::part(listener, member.kind)?;
        let part = part.ok_or_else(|| TransportError::NoTransport { host: spec.peer.clone(), kind: member.kind })?;
        let flow = member.transport.connect(&part, spec, now)?;
        Ok(SendFlow(outside(place, flow.into())))
    }

    fn accept(&mut self, listener: Listener, spec: &FlowSpec, now: Instant) -> Result<RecvFlow, TransportError> {
        let place = self.begin(spec)?;
        let listeners = self.listeners.get(listener.0);
        let listener =
            listeners.and_then(|listeners| listeners.get(place)).ok_or(TransportError::NoSuch("listener"))?;
        let member = self.members.get_mut(place).ok_or(TransportError::NO_FLOW)?;
        let flow = member.transport.accept(*listener, spec, now)?;
        Ok(RecvFlow(outside(place, flow.into())))
    }

    fn state(&self, flow: FlowId) -> Result<FlowState, TransportError> {
        let (member, flow) = self.of_flow(flow)?;
        member.transport.state(flow)
    }

    fn close(&mut self, flow: FlowId) {
        if let Ok((member, flow)) = self.of_flow_mut(flow) {
            member.transport.close(flow);
            member.said = Progress::Busy;
        }
    }

    fn usage(&self) -> Usage {
        let (listeners, registrations) = (self.listeners.len(), self.memory.len());
        let of_members = self.members.iter().map(|member| member.transport.usage());
        let start = Usage { listeners, registrations, ..Usage::default() };
        of_members.fold(start, |sum, member| Usage {
            flows: sum.flows + member.flows,
            lingering: sum.lingering + member.lingering,
            ..sum
        })
    }
}
