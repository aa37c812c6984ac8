//! In-process transport, for simulation and as the reference of what a transport does.
//!
//! All transports of a [`MemoryNetwork`] share its state. A message moves from the sender's memory into the receiver's
//! posted buffer when either side is polled: nothing is buffered, as between queue pairs, so a send is not done before its
//! receive is. Time is what polls say it is, and there are no threads and no descriptors: the same calls give the same
//! results, so a seed decides a whole simulation. Hosts can be killed and pairs of hosts cut off.

mod network;
#[cfg(test)]
mod tests;

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;

pub use self::network::{HostId, MemoryNetwork, MemoryNetworkOptions};
use self::network::{Link, Side, World};
use super::region::Regions;
use super::request::RequestRing;
use super::{
    Abilities, DataPath, FLOWS_MAX, Fault, FlowId, FlowSpec, FlowState, LISTENERS_MAX, ListenOptions, Listener,
    ListenerHandle, MemoryKey, MemoryKind, MemorySpan, RecvFlow, Request, RequestKind, SendFlow, Status, Transport,
    TransportError, Usage,
};
use mccs_model::handles::HandleTable;
use mccs_runtime::{Context, Progress};

#[derive(Debug)]
struct Flow {
    peer: String,
    number: u64,
    side: Side,
    link: Handle,
    ring: RequestRing<()>,
    connected: bool,
    /// Bytes of the oldest unfinished message that have moved.
    moved: u64,
    fault: Option<Fault>,
    since: Instant,
    connect_timeout: Duration,
    peer_timeout: Option<Duration>,
    /// Whether the peer's host can be, or could be reached.
    reached: bool,
}

impl Flow {
    fn error(&self, fault: Fault) -> TransportError {
        let direction = if self.side == Side::Sender { "to" } else { "from" };
        TransportError::of_flow(&self.peer, direction, self.number, fault)
    }

    fn check(&self) -> Result<(), TransportError> {
        self.fault.map_or(Ok(()), |fault| Err(self.error(fault)))
    }

    /// Lets the link move bytes and takes what it has done. Returns whether it did anything.
    fn pump(&mut self, world: &mut World, regions: &mut Regions, now: Instant) -> bool {
        let mut busy = world.step(self.link, now);
        self.reached = self.reached || world.reaches_listener(self.link);
        let Some(link) = world.link(self.link) else { return busy };
        self.connected |= link.is_connected();
        while let Some(moved) = link.take_finished(self.side) {
            self.ring.finish(self.ring.running(), moved, regions);
            busy = true;
        }
        self.moved = link.moved();
        let late = self.patience().filter(|(deadline, _)| *deadline <= now);
        if let Some(fault) = link.fault(self.side) {
            self.fail(fault, world, regions);
            busy = true;
        } else if let Some((_, timeout)) = late {
            self.fail(Fault::ConnectTimeout { after_ms: timeout.as_millis() as u64 }, world, regions);
            busy = true;
        }
        busy
    }

    /// Until when it may stay unconnected, and how long that is.
    fn patience(&self) -> Option<(Instant, Duration)> {
        if self.connected || self.fault.is_some() {
            return None;
        }
        let timeout = if self.reached { self.peer_timeout? } else { self.connect_timeout };
        Some((self.since + timeout, timeout))
    }

    fn fail(&mut self, fault: Fault, world: &mut World, regions: &mut Regions) {
        self.fault.get_or_insert(fault);
        world.end(self.link, self.side);
        self.ring.abandon(regions);
    }
}

/// One host's transport. See the module's documentation.
#[derive(Debug)]
pub struct MemoryTransport {
    network: MemoryNetwork,
    host: HostId,
    regions: Regions,
    listeners: HandleTable<u64>,
    flows: HandleTable<Flow>,
    /// Flow whose turn is first in the next poll.
    turn: usize,
}

impl MemoryTransport {
    fn new(network: MemoryNetwork, host: HostId) -> Self {
        MemoryTransport {
            network,
            host,
            regions: Regions::new(),
            listeners: HandleTable::new(LISTENERS_MAX),
            flows: HandleTable::new(FLOWS_MAX),
            turn: 0,
        }
    }

    /// The host that this transport belongs to.
    #[must_use]
    pub fn host(&self) -> HostId {
        self.host
    }

    fn add_flow(
        &mut self,
        spec: &FlowSpec,
        side: Side,
        now: Instant,
        link: impl FnOnce(&mut World) -> Result<Handle, TransportError>,
    ) -> Result<FlowId, TransportError> {
        if self.flows.len() >= FLOWS_MAX as usize {
            return Err(TransportError::TOO_MANY_FLOWS);
        }
        let link = link(&mut self.network.lock())?;
        let flow = Flow {
            peer: spec.peer.clone(),
            number: spec.number,
            side,
            link,
            ring: RequestRing::new(spec.options.requests),
            connected: false,
            moved: 0,
            fault: None,
            since: now,
            connect_timeout: spec.options.connect_timeout,
            peer_timeout: spec.options.peer_timeout,
            reached: side == Side::Receiver,
        };
        self.flows.insert(flow).map(FlowId).map_err(|_| TransportError::TOO_MANY_FLOWS)
    }

    fn post(&mut self, id: FlowId, side: Side, span: MemorySpan, tag: u32) -> Result<Option<Request>, TransportError> {
        let flow = self.flows.get_mut(id.0).ok_or(TransportError::NO_FLOW)?;
        flow.check()?;
        let buffer = self.regions.resolve(span)?;
        let number = flow.ring.push(span.key, buffer, (), &mut self.regions);
        if number.is_some()
            && let Some(link) = self.network.lock().link(flow.link)
        {
            link.post(side, buffer, tag);
        }
        Ok(number.map(|number| Request::message(id, number)))
    }
}

impl DataPath for MemoryTransport {
    fn isend(&mut self, flow: SendFlow, message: MemorySpan, tag: u32) -> Result<Option<Request>, TransportError> {
        self.post(flow.into(), Side::Sender, message, tag)
    }

    fn irecv(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        self.post(flow.into(), Side::Receiver, buffer, 0)
    }

    /// Done at once: the processor wrote the bytes.
    fn flush(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        self.flows.get(id.0).ok_or(TransportError::NO_FLOW)?.check()?;
        self.regions.resolve(buffer)?;
        Ok(Some(Request::flushed(id)))
    }

    fn test(&mut self, request: Request) -> Result<Status, TransportError> {
        let flow = self.flows.get_mut(request.flow.0).ok_or(TransportError::NO_FLOW)?;
        if request.kind == RequestKind::Flush {
            return Ok(Status::FLUSHED);
        }
        match (flow.ring.test(request.number)?, flow.fault) {
            (Some(done), _) => Ok(done),
            (None, Some(fault)) => Err(flow.error(fault)),
            (None, None) if request.number == flow.ring.running() => Ok(Status::Running { bytes: flow.moved }),
            (None, None) => Ok(Status::Running { bytes: 0 }),
        }
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        let handles: Vec<Handle> = self.flows.iter().map(|(handle, _)| handle).collect();
        let mut world = self.network.lock();
        let (mut busy, mut wake_at) = (false, None::<Instant>);
        let start = if self.turn < handles.len() { self.turn } else { 0 };
        for handle in handles.iter().cycle().skip(start).take(handles.len()) {
            let Some(flow) = self.flows.get_mut(*handle).filter(|flow| flow.fault.is_none()) else { continue };
            busy |= flow.pump(&mut world, &mut self.regions, cx.now);
            let due = world.link(flow.link).and_then(Link::due);
            let deadline = flow.patience().map(|(deadline, _)| deadline);
            wake_at = wake_at.into_iter().chain(due).chain(deadline).min();
        }
        self.turn = start + 1;
        if busy { Progress::Busy } else { Progress::Idle { wake_at } }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        true
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// It has none.
impl Abilities for MemoryTransport {}

impl Transport for MemoryTransport {
    unsafe fn register(&mut self, ptr: *mut u8, bytes: u64, kind: MemoryKind<'_>) -> Result<MemoryKey, TransportError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.regions.register_host(ptr, bytes, kind, "memory") }
    }

    fn deregister(&mut self, key: MemoryKey) -> Result<(), TransportError> {
        self.regions.deregister(key)
    }

    fn listen(&mut self, options: &ListenOptions) -> Result<(Listener, ListenerHandle), TransportError> {
        options.validate()?;
        let (number, handle) = self.network.lock().listen(self.host);
        match self.listeners.insert(number) {
            Ok(listener) => Ok((Listener(listener), handle)),
            Err(number) => {
                self.network.lock().close_listener(number);
                Err(TransportError::TOO_MANY_LISTENERS)
            }
        }
    }

    fn close_listener(&mut self, listener: Listener) {
        if let Some(number) = self.listeners.remove(listener.0) {
            self.network.lock().close_listener(number);
        }
    }

    fn end_numbers(&mut self, listener: Listener, below: u64) {
        if let Some(number) = self.listeners.get(listener.0) {
            self.network.lock().end_numbers(*number, below);
        }
    }

    fn connect(
        &mut self,
        listener: &ListenerHandle,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<SendFlow, TransportError> {
        spec.options.validate()?;
        let host = self.host;
        let connect = |world: &mut World| world.connect(host, listener, spec);
        self.add_flow(spec, Side::Sender, now, connect).map(SendFlow)
    }

    fn accept(&mut self, listener: Listener, spec: &FlowSpec, now: Instant) -> Result<RecvFlow, TransportError> {
        spec.options.validate()?;
        let number = *self.listeners.get(listener.0).ok_or(TransportError::NoSuch("listener"))?;
        self.add_flow(spec, Side::Receiver, now, |world| world.accept(number, spec)).map(RecvFlow)
    }

    fn state(&self, flow: FlowId) -> Result<FlowState, TransportError> {
        let flow = self.flows.get(flow.0).ok_or(TransportError::NO_FLOW)?;
        flow.check()?;
        Ok(if flow.connected { FlowState::Connected } else { FlowState::Connecting })
    }

    fn close(&mut self, flow: FlowId) {
        if let Some(mut flow) = self.flows.remove(flow.0) {
            self.network.lock().end(flow.link, flow.side);
            flow.ring.abandon(&mut self.regions);
        }
    }

    fn usage(&self) -> Usage {
        let (listeners, flows) = (self.listeners.len(), self.flows.len());
        Usage { listeners, flows, registrations: self.regions.len(), lingering: 0 }
    }
}

impl Drop for MemoryTransport {
    /// Nobody touches this side's buffers after.
    fn drop(&mut self) {
        let mut world = self.network.lock();
        self.flows.iter().for_each(|(_, flow)| world.end(flow.link, flow.side));
        self.listeners.iter().for_each(|(_, number)| world.close_listener(*number));
    }
}
