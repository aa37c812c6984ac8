//! Accepts TCP connections: listening sockets, connections that have not said what they are for,
//! and listeners.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use mccs_model::handles::HandleTable;
use mccs_telemetry::LogBudget;
use nix::errno::Errno;

use crate::tcp::accept::listener::{Arrivals, Listener, Placed, Waiting};
use crate::tcp::accept::port::{HalfOpen, Heard, PORTS_MAX, Port, Room};
use crate::tcp::socket::random;
use crate::tcp::socket::{self, Socket};
use crate::tcp::watches::{Watched, Watches};
use crate::tcp::wire::{Address, Cookie, Hello, same_cookie};
use crate::{FlowId, LISTENERS_MAX, ListenOptions, Listener as ListenerId, ListenerHandle, TransportError};

/// How long a port waits for descriptors when the process has none left.
const DESCRIPTORS_RETRY: Duration = Duration::from_millis(100);
/// Sockets of one transport that wait for their sisters or to be accepted. A peer that knows a listener's secret could
/// otherwise use up the process's descriptors.
const ARRIVED_MAX: usize = 65_536;

/// Counts and logs refused connections. Strangers decide how many there are.
#[derive(Debug, Default)]
pub(in crate::tcp) struct Refusals {
    pub(in crate::tcp) count: u64,
    log: LogBudget,
}

impl Refusals {
    pub(in crate::tcp) fn add(&mut self, reason: &'static str, now: Instant) {
        self.count += 1;
        if let Some(suppressed) = self.log.take(now) {
            tracing::warn!(
                reason,
                refused_so_far = self.count,
                suppressed,
                "a connection to a flow's listener is refused"
            );
        }
    }
}

/// A connection that has come, once it is known what it is.
#[derive(Debug)]
pub(in crate::tcp) enum Incoming {
    /// The last one of a flow that was accepted.
    Complete(FlowId, Arrivals),
    /// A connected flow goes on over it.
    Resume { flow: FlowId, hello: Hello, socket: Socket, watch: Handle },
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::tcp) struct Acceptor {
    ports: HandleTable<Port>,
    half_open: HandleTable<HalfOpen>,
    listeners: HandleTable<Listener>,
    /// Flows that are connected, by listener and number: further sockets of them may come, also when the listener has closed.
    connected: HashMap<(Handle, u64), (Cookie, FlowId)>,
    /// Sockets that wait for their sisters, or for their flow to be accepted.
    arrived: usize,
    /// Ports with connections in the kernel.
    queue: VecDeque<Handle>,
    /// Nothing is due before.
    earliest: Option<Instant>,
    refusals: Refusals,
}

impl Acceptor {
    pub(in crate::tcp) fn new() -> Self {
        Acceptor {
            ports: HandleTable::new(PORTS_MAX),
            half_open: HandleTable::new(u32::MAX),
            listeners: HandleTable::new(LISTENERS_MAX),
            connected: HashMap::new(),
            arrived: 0,
            queue: VecDeque::new(),
            earliest: None,
            refusals: Refusals::default(),
        }
    }

    /// The listening sockets.
    #[cfg(test)]
    pub(in crate::tcp) fn sockets(&self) -> impl Iterator<Item = &std::os::fd::OwnedFd> {
        self.ports.iter().map(|(_, port)| &port.socket)
    }

    /// Number of connections that have not said what they are for.
    #[cfg(test)]
    pub(in crate::tcp) fn half_open(&self) -> usize {
        self.half_open.len()
    }

    /// Number of connected flows that may go on over another socket.
    #[cfg(test)]
    pub(in crate::tcp) fn connected(&self) -> usize {
        self.connected.len()
    }

    /// Number of listeners.
    pub(in crate::tcp) fn len(&self) -> usize {
        self.listeners.len()
    }

    /// Connections that were refused so far.
    pub(in crate::tcp) fn refused(&self) -> u64 {
        self.refusals.count
    }

    /// Counts a connection that is of no use.
    pub(in crate::tcp) fn refuse(&mut self, reason: &'static str, now: Instant) {
        self.refusals.add(reason, now);
    }

    pub(in crate::tcp) fn wake_at(&self) -> Option<Instant> {
        self.earliest
    }

    /// Number of ports with connections in the kernel.
    pub(in crate::tcp) fn queued(&self) -> usize {
        self.queue.len()
    }

    /// A port with connections in the kernel.
    pub(in crate::tcp) fn next_port(&mut self) -> Option<Handle> {
        self.queue.pop_front()
    }

    /// Whether there is such a listener.
    pub(in crate::tcp) fn has(&self, listener: Handle) -> bool {
        self.listeners.get(listener).is_some()
    }

    /// A listener's flow of this number is accepted. `None`: there is no such listener.
    pub(in crate::tcp) fn expect(
        &mut self,
        listener: Handle,
        number: u64,
        flow: FlowId,
    ) -> Option<Result<Placed, &'static str>> {
        let placed = self.listeners.get_mut(listener)?.expect(number, flow);
        if let Ok(placed) = &placed {
            self.note_connected(placed);
        }
        Some(placed)
    }

    fn note_connected(&mut self, placed: &Placed) {
        if let Placed::Complete(flow, arrivals) = placed {
            let Hello { listener, flow: number, cookie, .. } = arrivals.hello();
            self.connected.insert((listener, number), (cookie, *flow));
        }
    }

    /// The connected flow that a connection wants to go on with.
    fn flow_to_resume(&self, hello: &Hello) -> Option<FlowId> {
        let (cookie, flow) = self.connected.get(&(hello.listener, hello.flow)).filter(|_| hello.resumption > 0)?;
        same_cookie(&hello.cookie, cookie).then_some(*flow)
    }

    /// An accepted flow has ended, connected or not.
    pub(in crate::tcp) fn give_up(&mut self, listener: Handle, number: u64, watches: &mut Watches) {
        if self.connected.remove(&(listener, number)).is_some() {
            return;
        }
        let Some(listener) = self.listeners.get_mut(listener) else { return };
        let unwanted = listener.give_up(number);
        self.forget_arrivals(unwanted, watches);
    }

    /// A socket that had come for a flow has ended.
    pub(in crate::tcp) fn lost_arrival(&mut self, listener: Handle, number: u64, watches: &mut Watches) {
        let Some(listener) = self.listeners.get_mut(listener) else { return };
        let lost = listener.lost_arrival(number);
        self.forget_arrivals(lost, watches);
    }

    /// Sockets that had arrived are a flow's.
    pub(in crate::tcp) fn handed_over(&mut self, sockets: usize) {
        self.arrived = self.arrived.saturating_sub(sockets);
    }

    /// Something is due at `at`.
    fn due(&mut self, at: Instant) {
        self.earliest = Some(self.earliest.map_or(at, |earliest| earliest.min(at)));
    }

    /// The port that listens on an address, opened if there is none.
    fn port(&mut self, asked: SocketAddr, watches: &mut Watches) -> Result<SocketAddr, TransportError> {
        if let Some((_, port)) = self.ports.iter().find(|(_, port)| port.asked == asked || port.address == asked) {
            return Ok(port.address);
        }
        let (socket, address) = socket::open_listener(asked)?;
        let full = TransportError::TooMany { what: "addresses to listen on", limit: PORTS_MAX };
        let handle = self.ports.insert(Port::new(socket, asked, address)).map_err(|_| full)?;
        if let Some(port) = self.ports.get(handle)
            && let Err(reason) = watches.add(Watched::Port(handle), &port.socket)
        {
            self.ports.remove(handle);
            return Err(TransportError::Listen { address: address.to_string(), reason });
        }
        self.queue_port(handle);
        Ok(address)
    }

    /// Connections may wait at a port.
    pub(in crate::tcp) fn queue_port(&mut self, handle: Handle) {
        if let Some(port) = self.ports.get_mut(handle)
            && !std::mem::replace(&mut port.queued, true)
        {
            self.queue.push_back(handle);
        }
    }

    pub(in crate::tcp) fn open_listener(
        &mut self,
        options: &ListenOptions,
        watches: &mut Watches,
    ) -> Result<(ListenerId, ListenerHandle), TransportError> {
        options.validate()?;
        let cookie = random()?;
        let listener = self.listeners.insert(Listener::new(cookie)).map_err(|_| TransportError::TOO_MANY_LISTENERS)?;
        match self.port(options.address, watches) {
            Ok(address) => Ok((ListenerId(listener), Address { address, listener, cookie }.to_handle())),
            Err(error) => {
                self.listeners.remove(listener);
                Err(error)
            }
        }
    }

    /// Closes a listener. Returns the flows that wait in vain. Its port stays: the next listener finds it where the operator's firewall
    /// knows it.
    pub(in crate::tcp) fn close_listener(&mut self, handle: Handle, watches: &mut Watches) -> Vec<FlowId> {
        let Some(listener) = self.listeners.remove(handle) else { return Vec::new() };
        let Waiting { watches: arrived, flows } = listener.into_waiting();
        self.forget_arrivals(arrived, watches);
        flows
    }

    /// A listener's numbers below are over. Returns the flows that wait in vain.
    pub(in crate::tcp) fn end_numbers(&mut self, handle: Handle, below: u64, watches: &mut Watches) -> Vec<FlowId> {
        let Some(listener) = self.listeners.get_mut(handle) else { return Vec::new() };
        let Waiting { watches: arrived, flows } = listener.end_numbers(below);
        self.forget_arrivals(arrived, watches);
        flows
    }

    /// Sockets that had arrived were closed.
    fn forget_arrivals(&mut self, arrived: Vec<Handle>, watches: &mut Watches) {
        self.arrived = self.arrived.saturating_sub(arrived.len());
        watches.forget(arrived);
    }

    /// Takes connections from the kernel, at most `budget`; `incoming` gets those that are for a flow. Returns whether there were any.
    pub(in crate::tcp) fn take_connections(
        &mut self,
        handle: Handle,
        budget: usize,
        now: Instant,
        watches: &mut Watches,
        incoming: &mut Vec<Incoming>,
    ) -> bool {
        for taken in 0..budget {
            let Some(port) = self.ports.get_mut(handle) else { return taken > 0 };
            port.queued = false;
            let half_open = &self.half_open;
            let oldest = match port.room(now, |connection| half_open.get(connection).is_some()) {
                Room::Yes => None,
                Room::InsteadOf(oldest) => Some(oldest),
                Room::At(at) => {
                    self.retry_port(handle, at);
                    return taken > 0;
                }
            };
            match socket::accept(&port.socket) {
                Ok(Some(socket)) => {
                    if let Some(oldest) = oldest {
                        self.drop_half_open(oldest, "it says nothing, and newer ones need its place", now, watches);
                    }
                    incoming.extend(self.add_half_open(handle, socket, now, watches));
                }
                Ok(None) => return taken > 0,
                // The connection ended while it waited, or its network did.
                Err(
                    Errno::ECONNABORTED
                    | Errno::EPROTO
                    | Errno::EPERM
                    | Errno::ENETDOWN
                    | Errno::ENETUNREACH
                    | Errno::EHOSTDOWN
                    | Errno::EHOSTUNREACH
                    | Errno::EINTR,
                ) => {}
                // Out of descriptors or memory: what waits, waits on.
                Err(_) => {
                    self.retry_port(handle, now + DESCRIPTORS_RETRY);
                    return taken > 0;
                }
            }
        }
        self.queue_port(handle);
        true
    }

    fn retry_port(&mut self, handle: Handle, at: Instant) {
        if let Some(port) = self.ports.get_mut(handle) {
            port.retry_at = Some(at);
        }
        self.due(at);
    }

    fn add_half_open(&mut self, port: Handle, socket: Socket, now: Instant, watches: &mut Watches) -> Option<Incoming> {
        let half_open = HalfOpen::new(socket, now);
        let deadline = half_open.deadline;
        let connection = self.half_open.insert(half_open).ok()?;
        if let Some(port) = self.ports.get_mut(port) {
            port.add_half_open(connection, now);
        }
        let half_open = self.half_open.get_mut(connection)?;
        half_open.watch = watches.add(Watched::HalfOpen(connection), &half_open.socket).ok();
        if half_open.watch.is_none() {
            self.drop_half_open(connection, "the kernel does not watch it", now, watches);
            return None;
        }
        self.due(deadline);
        self.hear(connection, now, watches)
    }

    fn drop_half_open(&mut self, handle: Handle, reason: &'static str, now: Instant, watches: &mut Watches) {
        if self.forget_half_open(handle, watches) {
            self.refusals.add(reason, now);
        }
    }

    fn forget_half_open(&mut self, handle: Handle, watches: &mut Watches) -> bool {
        let connection = self.half_open.remove(handle);
        connection.map(|connection| watches.forget(connection.watch)).is_some()
    }

    /// A half-open connection may have said what it is for.
    pub(in crate::tcp) fn hear(&mut self, handle: Handle, now: Instant, watches: &mut Watches) -> Option<Incoming> {
        let hello = match self.half_open.get_mut(handle)?.hear() {
            Heard::Waiting => return None,
            Heard::Nothing => {
                self.forget_half_open(handle, watches);
                return None;
            }
            Heard::Bad(reason) => {
                self.drop_half_open(handle, reason, now, watches);
                return None;
            }
            Heard::Hello(hello) => hello,
        };
        if self.arrived >= ARRIVED_MAX {
            self.drop_half_open(handle, "too many wait to be accepted", now, watches);
            return None;
        }
        if let Some(flow) = self.flow_to_resume(&hello) {
            let HalfOpen { socket, watch, .. } = self.half_open.remove(handle)?;
            return Some(Incoming::Resume { flow, hello, socket, watch: watch? });
        }
        let Some(listener) = self.listeners.get_mut(hello.listener) else {
            // Like a wrong secret: strangers learn nothing of which listeners there are.
            self.drop_half_open(handle, "it does not know the listener's secret", now, watches);
            return None;
        };
        let Some(HalfOpen { socket, watch: Some(watch), .. }) = self.half_open.remove(handle) else { return None };
        let mut given_up = Vec::new();
        let placed = listener.place(&hello, socket, watch, &mut given_up);
        self.forget_arrivals(given_up, watches);
        match placed {
            Ok(placed) => {
                self.note_connected(&placed);
                self.arrived += 1;
                watches.change(watch, Watched::Arrived { listener: hello.listener, number: hello.flow });
                let Placed::Complete(flow, arrivals) = placed else { return None };
                Some(Incoming::Complete(flow, arrivals))
            }
            Err(reason) => {
                watches.forget([watch]);
                self.refusals.add(reason, now);
                None
            }
        }
    }

    /// Ends what has waited too long, and finds out when to look again.
    pub(in crate::tcp) fn expire(&mut self, now: Instant, watches: &mut Watches) {
        if self.earliest.is_none_or(|at| at > now) {
            return;
        }
        let is_late = |(_, half_open): &(Handle, &HalfOpen)| half_open.deadline <= now;
        let late: Vec<Handle> = self.half_open.iter().filter(is_late).map(|(handle, _)| handle).collect();
        for handle in late {
            self.drop_half_open(handle, "it has not said in time what it is for", now, watches);
        }
        let is_due = |port: &Port| port.retry_at.is_some_and(|at| at <= now);
        let retry: Vec<Handle> = self.ports.iter().filter(|(_, port)| is_due(port)).map(|(handle, _)| handle).collect();
        for handle in retry {
            if let Some(port) = self.ports.get_mut(handle) {
                port.retry_at = None;
            }
            self.queue_port(handle);
        }
        let half_open = self.half_open.iter().map(|(_, half_open)| half_open.deadline);
        self.earliest = half_open.chain(self.ports.iter().filter_map(|(_, port)| port.retry_at)).min();
    }
}
