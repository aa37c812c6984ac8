//! Network of in-process transports: listeners, links, and which hosts reach each other.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use nix::errno::Errno;

use super::super::region::Buffer;
use super::super::request::Moved;
use super::super::{FLOWS_MAX, FLOWS_PER_LISTENER_MAX, Fault, FlowSpec, ListenerHandle, TransportError};
use super::MemoryTransport;
use mccs_model::handles::HandleTable;

/// A host of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(u32);

/// How a network behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryNetworkOptions {
    /// From a send to the first byte's arrival, and from connect to connected.
    pub latency: Duration,
    /// Bytes that a flow moves a poll, at least 1: what makes messages arrive in parts.
    pub step_bytes: u64,
    /// Decides listeners' cookies.
    pub seed: u64,
}

impl Default for MemoryNetworkOptions {
    fn default() -> Self {
        MemoryNetworkOptions { latency: Duration::ZERO, step_bytes: 256 << 10, seed: 0 }
    }
}

/// Hosts in one process. Cheap to clone; clones are the same network.
#[derive(Debug, Clone)]
pub struct MemoryNetwork(Arc<Mutex<World>>);

impl MemoryNetwork {
    /// A network without hosts.
    #[must_use]
    pub fn new(options: MemoryNetworkOptions) -> Self {
        MemoryNetwork(Arc::new(Mutex::new(World {
            options,
            hosts: 0,
            next_listener: 0,
            listeners: BTreeMap::new(),
            links: HandleTable::new(FLOWS_MAX.saturating_mul(16)),
            cuts: BTreeSet::new(),
        })))
    }

    /// Adds a host.
    #[must_use]
    pub fn add_host(&self) -> MemoryTransport {
        let mut world = self.lock();
        let host = HostId(world.hosts);
        world.hosts += 1;
        drop(world);
        MemoryTransport::new(self.clone(), host)
    }

    /// Between two hosts nothing moves any more, until [`MemoryNetwork::heal`].
    pub fn cut(&self, a: HostId, b: HostId) {
        self.lock().cuts.insert((a.min(b), a.max(b)));
    }

    /// Two hosts reach each other again.
    pub fn heal(&self, a: HostId, b: HostId) {
        self.lock().cuts.remove(&(a.min(b), a.max(b)));
    }

    /// The host loses power: its peers find their flows lost, and so does what is left of the host itself.
    pub fn kill(&self, host: HostId) {
        let mut world = self.lock();
        let links: Vec<Handle> =
            world.links.iter().filter(|(_, link)| link.hosts.contains(&Some(host))).map(|(link, _)| link).collect();
        for link in links {
            if let Some(link) = world.link(link) {
                link.break_off(Fault::Lost(Errno::EHOSTDOWN));
            }
        }
        world.listeners.retain(|_, listener| listener.host != host);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Sender,
    Receiver,
}

impl Side {
    fn other(self) -> Self {
        match self {
            Side::Sender => Side::Receiver,
            Side::Receiver => Side::Sender,
        }
    }
}

/// A message on its way.
#[derive(Debug, Clone, Copy)]
struct Outgoing {
    source: Buffer,
    tag: u32,
    /// When the first byte arrives, once somebody has been polled.
    due: Option<Instant>,
}

/// Both halves of a flow.
#[derive(Debug)]
pub(super) struct Link {
    /// Its listener and number there; none if it was refused.
    place: Option<(u64, u64)>,
    /// Hosts of the sender and the receiver, as they have come.
    hosts: [Option<HostId>; 2],
    /// When both had come and reached each other.
    met_at: Option<Instant>,
    connected: bool,
    sends: VecDeque<Outgoing>,
    recvs: VecDeque<Buffer>,
    moved: u64,
    /// Messages that have moved, until each side takes them.
    finished: [VecDeque<Moved>; 2],
    faults: [Option<Fault>; 2],
    due: Option<Instant>,
}

impl Link {
    fn new(requests: u16, place: Option<(u64, u64)>) -> Self {
        let room = usize::from(requests);
        Link {
            place,
            hosts: [None, None],
            met_at: None,
            connected: false,
            sends: VecDeque::with_capacity(room),
            recvs: VecDeque::with_capacity(room),
            moved: 0,
            finished: [VecDeque::with_capacity(room), VecDeque::with_capacity(room)],
            faults: [None, None],
            due: None,
        }
    }

    pub(super) fn is_connected(&self) -> bool {
        self.connected
    }

    /// Bytes of the current message that have moved.
    pub(super) fn moved(&self) -> u64 {
        self.moved
    }

    /// When something happens by itself.
    pub(super) fn due(&mut self) -> Option<Instant> {
        self.due
    }

    pub(super) fn fault(&self, side: Side) -> Option<Fault> {
        self.faults[side as usize]
    }

    pub(super) fn take_finished(&mut self, side: Side) -> Option<Moved> {
        self.finished[side as usize].pop_front()
    }

    pub(super) fn post(&mut self, side: Side, buffer: Buffer, tag: u32) {
        match side {
            Side::Sender => self.sends.push_back(Outgoing { source: buffer, tag, due: None }),
            Side::Receiver => self.recvs.push_back(buffer),
        }
    }

    /// Nothing moves any more, and no buffer is touched.
    fn break_off(&mut self, fault: Fault) {
        self.sends.clear();
        self.recvs.clear();
        self.moved = 0;
        self.due = None;
        for side in &mut self.faults {
            side.get_or_insert(fault);
        }
    }
}

#[derive(Debug)]
struct ListenerState {
    host: HostId,
    cookie: u64,
    /// By number: the link, and whether the sender and the receiver have come.
    places: BTreeMap<u64, (Handle, [bool; 2])>,
    /// Lower numbers are over.
    first: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct World {
    options: MemoryNetworkOptions,
    hosts: u32,
    next_listener: u64,
    listeners: BTreeMap<u64, ListenerState>,
    links: HandleTable<Link>,
    cuts: BTreeSet<(HostId, HostId)>,
}

impl World {
    pub(super) fn link(&mut self, link: Handle) -> Option<&mut Link> {
        self.links.get_mut(link)
    }

    pub(super) fn listen(&mut self, host: HostId) -> (u64, ListenerHandle) {
        let number = self.next_listener;
        self.next_listener += 1;
        // As hard to guess as the seed is, which is all that a simulation needs.
        let cookie = (self.options.seed ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        self.listeners.insert(number, ListenerState { host, cookie, places: BTreeMap::new(), first: 0 });
        let mut bytes = b"mem\0".to_vec();
        bytes.extend_from_slice(&number.to_le_bytes());
        bytes.extend_from_slice(&cookie.to_le_bytes());
        (number, ListenerHandle(bytes))
    }

    pub(super) fn close_listener(&mut self, number: u64) {
        if let Some(listener) = self.listeners.remove(&number) {
            self.end_places(listener.places);
        }
    }

    pub(super) fn end_numbers(&mut self, listener: u64, below: u64) {
        let Some(listener) = self.listeners.get_mut(&listener) else { return };
        listener.first = listener.first.max(below);
        let left = listener.places.split_off(&listener.first);
        let over = std::mem::replace(&mut listener.places, left);
        self.end_places(over);
    }

    fn end_places(&mut self, places: BTreeMap<u64, (Handle, [bool; 2])>) {
        for (handle, come) in places.into_values() {
            if come == [true, true] {
                continue;
            }
            match self.links.get_mut(handle) {
                Some(link) if link.hosts == [None, None] => drop(self.links.remove(handle)),
                Some(link) => {
                    link.faults[Side::Sender as usize].get_or_insert(Fault::Refused("its listener is closed"));
                    link.break_off(Fault::ListenerClosed);
                }
                None => {}
            }
        }
    }

    /// A side comes to a place, which the first of the two makes.
    fn come(&mut self, listener: u64, side: Side, host: HostId, spec: &FlowSpec) -> Result<Handle, &'static str> {
        let Some(state) = self.listeners.get_mut(&listener) else { return Err("nobody listens there") };
        if spec.number < state.first {
            return Err("was taken before; each is taken once");
        }
        if state.places.len() >= FLOWS_PER_LISTENER_MAX && !state.places.contains_key(&spec.number) {
            return Err("is one too many for its listener");
        }
        let links = &mut self.links;
        let handle = match state.places.get_mut(&spec.number) {
            Some((_, come)) if come[side as usize] => return Err("was taken before; each is taken once"),
            Some((link, come)) => {
                come[side as usize] = true;
                *link
            }
            None => {
                let link = links
                    .insert(Link::new(spec.options.requests, Some((listener, spec.number))))
                    .map_err(|_| "the network is full")?;
                let mut come = [false, false];
                come[side as usize] = true;
                state.places.insert(spec.number, (link, come));
                link
            }
        };
        if let Some(link) = links.get_mut(handle) {
            link.hosts[side as usize] = Some(host);
        }
        Ok(handle)
    }

    pub(super) fn connect(
        &mut self,
        host: HostId,
        handle: &ListenerHandle,
        spec: &FlowSpec,
    ) -> Result<Handle, TransportError> {
        let integer = |at: usize| {
            let bytes = handle.as_bytes().get(at..at + 8)?;
            bytes.try_into().ok().map(u64::from_le_bytes)
        };
        let (Some(number), Some(cookie)) = (integer(4), integer(12)) else {
            return Err(TransportError::BadHandle("it is none of a memory network's"));
        };
        if handle.as_bytes().len() != 20 || !handle.as_bytes().starts_with(b"mem\0") {
            return Err(TransportError::BadHandle("it is none of a memory network's"));
        }
        let known = self.listeners.get(&number).is_some_and(|listener| listener.cookie == cookie);
        let come = if known { self.come(number, Side::Sender, host, spec) } else { Err("nobody listens there") };
        // Also a refusal takes its time, and comes through the flow.
        come.or_else(|reason| {
            let mut link = Link::new(1, None);
            link.break_off(Fault::Refused(reason));
            let full = TransportError::TooMany { what: "flows of a memory network", limit: FLOWS_MAX };
            self.links.insert(link).map_err(|_| full)
        })
    }

    pub(super) fn accept(&mut self, listener: u64, spec: &FlowSpec) -> Result<Handle, TransportError> {
        let host = self.listeners.get(&listener).ok_or(TransportError::NoSuch("listener"))?.host;
        let refused = |problem: &str| TransportError::Option { option: "number", problem: problem.into() };
        self.come(listener, Side::Receiver, host, spec).map_err(refused)
    }

    /// One side is gone, with its buffers.
    pub(super) fn end(&mut self, handle: Handle, side: Side) {
        let Some(link) = self.links.get_mut(handle) else { return };
        // Gone already, or never there: nobody else will look at it.
        let other = side.other() as usize;
        let alone = link.hosts[other].is_none();
        link.hosts[side as usize] = None;
        link.faults[other].get_or_insert(Fault::Closed);
        link.break_off(Fault::Closed);
        let place = link.place.and_then(|(listener, number)| self.listeners.get(&listener)?.places.get(&number));
        let is_waited_for = place.is_some_and(|(_, come)| *come != [true, true]);
        if alone && !is_waited_for {
            self.links.remove(handle);
        }
    }

    /// Whether a link's sender reaches the host whose listener it goes to.
    pub(super) fn reaches_listener(&self, handle: Handle) -> bool {
        let Some(Link { place: Some((listener, _)), hosts: [Some(sender), _], .. }) = self.links.get(handle) else {
            return false;
        };
        let host = self.listeners.get(listener).map(|listener| listener.host);
        host.is_some_and(|host| !self.cuts.contains(&(host.min(*sender), host.max(*sender))))
    }

    /// Connects a link, or moves a step's bytes, if it is time. Returns whether anything happened.
    pub(super) fn step(&mut self, handle: Handle, now: Instant) -> bool {
        let Some(link) = self.links.get_mut(handle) else { return false };
        link.due = None;
        let [Some(a), Some(b)] = link.hosts else { return false };
        if self.cuts.contains(&(a.min(b), a.max(b))) || link.faults.iter().any(Option::is_some) {
            return false;
        }
        let latency = self.options.latency;
        if !link.connected {
            let due = *link.met_at.get_or_insert(now) + latency;
            link.connected = due <= now;
            link.due = (!link.connected).then_some(due);
            return link.connected;
        }
        // All that has been sent is under way, not the first message alone.
        let sent_now = link.sends.iter_mut().rev().take_while(|outgoing| outgoing.due.is_none());
        sent_now.for_each(|outgoing| outgoing.due = Some(now + latency));
        let Some(outgoing) = link.sends.front() else { return false };
        let due = outgoing.due.unwrap_or(now);
        if due > now {
            link.due = Some(due);
            return false;
        }
        let (Outgoing { source, tag, .. }, Some(target)) = (*outgoing, link.recvs.front().copied()) else {
            return false;
        };
        if source.bytes > target.bytes {
            let fault = Fault::TooLong { message_bytes: source.bytes, buffer_bytes: target.bytes };
            link.faults = [Some(Fault::Closed), Some(fault)];
            link.break_off(fault);
            return true;
        }
        let bytes = (source.bytes - link.moved).min(self.options.step_bytes.max(1));
        link.moved += target.copy_from(source, link.moved, bytes);
        if link.moved == source.bytes {
            link.moved = 0;
            link.sends.pop_front();
            link.recvs.pop_front();
            let bytes = source.bytes;
            let [sent, received] = &mut link.finished;
            sent.push_back(Moved { bytes, tag: 0 });
            received.push_back(Moved { bytes, tag });
        }
        true
    }
}
