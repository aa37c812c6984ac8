//! Fault injection for tests: wraps another transport and lets it fail as a seed says.
//!
//! Completions come late, progress is reported in small steps, connects are refused, accepts are late, and flows die at a
//! random byte, as the wrapped transport's flow is closed, which the peer sees for real. A flow's words before it dies
//! are the truth: nothing is invented, lost or reordered.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use nix::errno::Errno;

use super::{
    Abilities, DataPath, FLOWS_MAX, Fault, FlowId, FlowPath, FlowSpec, FlowState, GpuMemory, ListenOptions, Listener,
    ListenerHandle, LocalDevices, MemoryKey, MemoryKind, MemorySpan, PathControl, PathEvent, PathEvents, PortEvent,
    PortEvents, RecvFlow, Request, RequestKind, SendFlow, Status, Transport, TransportError, Usage, WireStatistics,
    WireStats,
};
use mccs_model::handles::HandleTable;
use mccs_runtime::{Context, Progress};

/// How much bad luck there is. The default is none.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Faults {
    /// Decides everything.
    pub seed: u64,
    /// Posted requests in 100 that stall their flow's completions.
    pub stalls_percent: u64,
    /// Longest stall.
    pub stall: Duration,
    /// Connects in 100 that are refused.
    pub refusals_percent: u64,
    /// Longest time by which an accept is late.
    pub accept_delay: Duration,
    /// Flows die after so many bytes on average, if they die.
    pub death_bytes: Option<u64>,
}

/// A generator of numbers that look random (SplitMix64).
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below or equal to `most`.
    fn up_to(&mut self, most: u64) -> u64 {
        let number = self.next();
        most.checked_add(1).map_or(number, |bound| number % bound)
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.next() % 100 < chance
    }

    fn duration(&mut self, most: Duration) -> Duration {
        Duration::from_nanos(self.up_to(most.as_nanos() as u64))
    }
}

/// The wrapped transport's flow.
#[derive(Debug)]
enum Inner {
    Send(SendFlow),
    Recv(RecvFlow),
    /// To be accepted later.
    Late {
        listener: Listener,
        at: Instant,
    },
    Dead(TransportError),
}

#[derive(Debug)]
struct Flow {
    inner: Inner,
    spec: FlowSpec,
    direction: &'static str,
    /// Completions are not told before.
    stalled_until: Option<Instant>,
    /// By request number, modulo its length: progress that was told.
    told: Box<[u64]>,
    /// Bytes until it dies.
    bytes_left: Option<u64>,
}

impl Flow {
    fn inner_id(&self) -> Option<FlowId> {
        match self.inner {
            Inner::Send(flow) => Some(flow.into()),
            Inner::Recv(flow) => Some(flow.into()),
            Inner::Late { .. } | Inner::Dead(_) => None,
        }
    }

    fn check(&self) -> Result<(), TransportError> {
        if let Inner::Dead(error) = &self.inner { Err(error.clone()) } else { Ok(()) }
    }

    fn told(&mut self, number: u64) -> &mut u64 {
        let index = (number % self.told.len() as u64) as usize;
        &mut self.told[index]
    }
}

/// See the module's documentation.
pub struct Faulty {
    inner: Box<dyn Transport>,
    faults: Faults,
    random: Random,
    flows: HandleTable<Flow>,
    /// Time of the last call that brought it.
    now: Option<Instant>,
}

impl Faulty {
    /// Wraps a transport.
    #[must_use]
    pub fn new(inner: Box<dyn Transport>, faults: Faults) -> Self {
        Faulty { inner, faults, random: Random(faults.seed), flows: HandleTable::new(FLOWS_MAX), now: None }
    }

    fn add(&mut self, inner: Inner, spec: &FlowSpec, direction: &'static str) -> Result<FlowId, TransportError> {
        let bytes_left = self.faults.death_bytes.map(|mean| self.random.up_to(mean.saturating_mul(2)));
        let flow = Flow {
            inner,
            spec: spec.clone(),
            direction,
            stalled_until: None,
            told: vec![0; usize::from(spec.options.requests.max(1))].into(),
            bytes_left,
        };
        self.flows.insert(flow).map(FlowId).map_err(|_| TransportError::TOO_MANY_FLOWS)
    }

    /// Users' name for a flow of the wrapped transport.
    fn outer_of(&self, inner: FlowId) -> Option<FlowId> {
        self.flows.iter().find(|(_, flow)| flow.inner_id() == Some(inner)).map(|(handle, _)| FlowId(handle))
    }

    /// Ends a flow as if its connection had broken.
    fn kill(&mut self, handle: Handle, fault: Fault) {
        let Some(flow) = self.flows.get_mut(handle) else { return };
        if let Some(id) = flow.inner_id() {
            self.inner.close(id);
        }
        let (peer, number) = (flow.spec.peer.clone(), flow.spec.number);
        flow.inner = Inner::Dead(TransportError::Flow { peer, direction: flow.direction, number, fault });
    }

    /// A flow has moved bytes; it may have been its last. Returns whether it lives.
    fn spend(&mut self, handle: Handle, bytes: u64) -> bool {
        let Some(left) = self.flows.get_mut(handle).and_then(|flow| flow.bytes_left.as_mut()) else { return true };
        if *left < bytes {
            self.kill(handle, Fault::Lost(Errno::ECONNRESET));
            return false;
        }
        *left -= bytes;
        true
    }

    /// A request was posted: it may stall its flow.
    fn posted(&mut self, handle: Handle, request: Option<Request>) -> Option<Request> {
        let request = request?;
        let stalls = self.random.percent(self.faults.stalls_percent);
        let stall = self.random.duration(self.faults.stall);
        let until = self.now.map(|now| now + stall).filter(|_| stalls);
        let flow = self.flows.get_mut(handle)?;
        flow.stalled_until = flow.stalled_until.max(until);
        if request.kind == RequestKind::Message {
            *flow.told(request.number) = 0;
        }
        Some(Request { flow: FlowId(handle), ..request })
    }

    /// Accepts what is late no longer. Returns whether there was something, and when the next one is due.
    fn accept_late(&mut self, now: Instant) -> (bool, Option<Instant>) {
        let is_late = |(handle, flow): (Handle, &Flow)| match flow.inner {
            Inner::Late { listener, at } => Some((handle, listener, at)),
            _ => None,
        };
        let late: Vec<_> = self.flows.iter().filter_map(is_late).collect();
        let (mut busy, mut next) = (false, None::<Instant>);
        for (handle, listener, at) in late {
            if at > now {
                next = next.into_iter().chain([at]).min();
                continue;
            }
            busy = true;
            if let Some(flow) = self.flows.get_mut(handle) {
                flow.inner = match self.inner.accept(listener, &flow.spec, now) {
                    Ok(inner) => Inner::Recv(inner),
                    Err(error) => Inner::Dead(error),
                };
            }
        }
        (busy, next)
    }

    /// Posts a request of a flow's receiving end, once that is accepted.
    fn post_at_receiver(
        &mut self,
        flow: RecvFlow,
        post: impl FnOnce(&mut dyn Transport, RecvFlow) -> Result<Option<Request>, TransportError>,
    ) -> Result<Option<Request>, TransportError> {
        let handle = FlowId::from(flow).0;
        let flow = self.flows.get(handle).ok_or(TransportError::NO_FLOW)?;
        flow.check()?;
        match flow.inner {
            Inner::Recv(inner) => {
                let request = post(&mut *self.inner, inner)?;
                Ok(self.posted(handle, request))
            }
            Inner::Late { .. } => Ok(None),
            _ => Err(TransportError::NO_FLOW),
        }
    }
}

impl DataPath for Faulty {
    fn isend(&mut self, flow: SendFlow, message: MemorySpan, tag: u32) -> Result<Option<Request>, TransportError> {
        let handle = FlowId::from(flow).0;
        let flow = self.flows.get(handle).ok_or(TransportError::NO_FLOW)?;
        flow.check()?;
        let Inner::Send(inner) = flow.inner else { return Err(TransportError::NO_FLOW) };
        let request = self.inner.isend(inner, message, tag)?;
        let posted = self.posted(handle, request);
        if posted.is_some() && !self.spend(handle, message.bytes) {
            self.flows.get(handle).map_or(Err(TransportError::NO_FLOW), Flow::check)?;
        }
        Ok(posted)
    }

    fn irecv(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        self.post_at_receiver(flow, |inner, flow| inner.irecv(flow, buffer))
    }

    fn flush(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        self.post_at_receiver(flow, |inner, flow| inner.flush(flow, buffer))
    }

    fn test(&mut self, request: Request) -> Result<Status, TransportError> {
        let handle = request.flow.0;
        let flow = self.flows.get_mut(handle).ok_or(TransportError::NO_FLOW)?;
        flow.check()?;
        let Some(inner) = flow.inner_id() else { return Err(TransportError::NO_FLOW) };
        if flow.stalled_until > self.now {
            let bytes = if request.kind == RequestKind::Message { *flow.told(request.number) } else { 0 };
            return Ok(Status::Running { bytes });
        }
        let status = self.inner.test(Request { flow: inner, ..request })?;
        if request.kind == RequestKind::Flush {
            return Ok(status);
        }
        let told = flow.told(request.number);
        let before = *told;
        let (status, now) = match status {
            Status::Done { bytes, .. } => (status, bytes),
            Status::Running { bytes } => {
                let now = before + self.random.up_to(bytes.saturating_sub(before));
                (Status::Running { bytes: now }, now)
            }
        };
        *told = now;
        // A send has spent its bytes when it was posted.
        if matches!(flow.inner, Inner::Recv(_)) && !self.spend(handle, now.saturating_sub(before)) {
            self.flows.get(handle).map_or(Err(TransportError::NO_FLOW), Flow::check)?;
        }
        Ok(status)
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        let before = self.now.replace(cx.now);
        let (accepted, late) = self.accept_late(cx.now);
        let progress = self.inner.poll(cx);
        let stalls = || self.flows.iter().filter_map(|(_, flow)| flow.stalled_until);
        // News that a stall has held back can be told now, like any other.
        let ended = stalls().any(|until| before.is_none_or(|before| before < until) && until <= cx.now);
        match progress {
            Progress::Idle { .. } if accepted || ended => Progress::Busy,
            Progress::Idle { wake_at } => {
                let stalled = stalls().filter(|until| *until > cx.now);
                Progress::Idle { wake_at: wake_at.into_iter().chain(late).chain(stalled).min() }
            }
            progress => progress,
        }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        self.inner.prepare_to_sleep()
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.inner.descriptor()
    }
}

impl Abilities for Faulty {
    fn path_control(&mut self) -> Option<&mut dyn PathControl> {
        self.inner.path_control().is_some().then_some(self as &mut dyn PathControl)
    }

    fn path_events(&mut self) -> Option<&mut dyn PathEvents> {
        self.inner.path_events().is_some().then_some(self as &mut dyn PathEvents)
    }

    fn port_events(&mut self) -> Option<&mut dyn PortEvents> {
        self.inner.port_events().is_some().then_some(self as &mut dyn PortEvents)
    }

    fn wire_statistics(&self) -> Option<&dyn WireStatistics> {
        self.inner.wire_statistics().is_some().then_some(self as &dyn WireStatistics)
    }

    fn gpu_memory(&self) -> Option<&dyn GpuMemory> {
        self.inner.gpu_memory()
    }

    fn local_devices(&self) -> Option<&dyn LocalDevices> {
        self.inner.local_devices()
    }
}

impl PathControl for Faulty {
    fn set_path(&mut self, flow: SendFlow, path: &FlowPath, detours: &Arc<[FlowPath]>) {
        let Some(Flow { inner: Inner::Send(flow), .. }) = self.flows.get(FlowId::from(flow).0) else { return };
        if let Some(paths) = self.inner.path_control() {
            paths.set_path(*flow, path, detours);
        }
    }
}

impl PathEvents for Faulty {
    /// News of flows that have died is left out.
    fn take_path_event(&mut self) -> Option<PathEvent> {
        loop {
            let event = self.inner.path_events()?.take_path_event()?;
            if let Some(flow) = self.outer_of(event.flow.into()) {
                return Some(PathEvent { flow: SendFlow(flow), ..event });
            }
        }
    }
}

impl PortEvents for Faulty {
    /// As of paths.
    fn take_port_event(&mut self) -> Option<PortEvent> {
        loop {
            let event = self.inner.port_events()?.take_port_event()?;
            if let Some(flow) = self.outer_of(event.flow) {
                return Some(PortEvent { flow, ..event });
            }
        }
    }
}

impl WireStatistics for Faulty {
    fn wire_stats(&self, flow: SendFlow) -> Option<WireStats> {
        let Inner::Send(flow) = self.flows.get(FlowId::from(flow).0)?.inner else { return None };
        self.inner.wire_statistics()?.wire_stats(flow)
    }
}

impl Transport for Faulty {
    unsafe fn register(&mut self, ptr: *mut u8, bytes: u64, kind: MemoryKind<'_>) -> Result<MemoryKey, TransportError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.register(ptr, bytes, kind) }
    }

    fn deregister(&mut self, key: MemoryKey) -> Result<(), TransportError> {
        self.inner.deregister(key)
    }

    fn listen(&mut self, options: &ListenOptions) -> Result<(Listener, ListenerHandle), TransportError> {
        self.inner.listen(options)
    }

    fn close_listener(&mut self, listener: Listener) {
        self.inner.close_listener(listener);
    }

    fn end_numbers(&mut self, listener: Listener, below: u64) {
        self.inner.end_numbers(listener, below);
    }

    fn connect(
        &mut self,
        listener: &ListenerHandle,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<SendFlow, TransportError> {
        self.now = Some(now);
        let inner = self.inner.connect(listener, spec, now)?;
        let id = self.add(Inner::Send(inner), spec, "to")?;
        if self.random.percent(self.faults.refusals_percent) {
            self.kill(id.0, Fault::Refused("bad luck"));
        }
        Ok(SendFlow(id))
    }

    fn accept(&mut self, listener: Listener, spec: &FlowSpec, now: Instant) -> Result<RecvFlow, TransportError> {
        self.now = Some(now);
        let delay = self.random.duration(self.faults.accept_delay);
        let inner = if delay.is_zero() {
            Inner::Recv(self.inner.accept(listener, spec, now)?)
        } else {
            Inner::Late { listener, at: now + delay }
        };
        self.add(inner, spec, "from").map(RecvFlow)
    }

    fn state(&self, flow: FlowId) -> Result<FlowState, TransportError> {
        let flow = self.flows.get(flow.0).ok_or(TransportError::NO_FLOW)?;
        flow.check()?;
        flow.inner_id().map_or(Ok(FlowState::Connecting), |inner| self.inner.state(inner))
    }

    fn close(&mut self, flow: FlowId) {
        if let Some(inner) = self.flows.remove(flow.0).and_then(|flow| flow.inner_id()) {
            self.inner.close(inner);
        }
    }

    fn usage(&self) -> Usage {
        Usage { flows: self.flows.len(), ..self.inner.usage() }
    }
}
