//! Opening listeners and flows, and what comes in until it is part of a flow.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use nix::errno::Errno;

use super::super::{FLOWS_MAX, Fault, FlowId, FlowOptions, FlowSpec, LISTENERS_MAX, ListenOptions, TransportError};
use super::super::{Listener as ListenerId, ListenerHandle};
use super::listener::{Arrivals, Listener, Placed};
use super::port::{HalfOpen, Heard, PORTS_MAX, Port, Room};
use super::receiver::Receiver;
use super::sender::{Route, Sender};
use super::socket::{self, Moved, Socket};
use super::watches::Watched;
use super::wire::{Address, Hello, Verdict, encode_resumed};
use super::{Flow, Half, TcpTransport, device};
use mccs_telemetry::LogBudget;

/// How long a port waits for descriptors when the process has none left.
const DESCRIPTORS_RETRY: Duration = Duration::from_millis(100);
/// Sockets of one transport that wait for their sisters or to be accepted. Who knows a listener's secret could otherwise
/// use up the process's descriptors.
const ARRIVED_MAX: usize = 65_536;

/// A flow that waits to be connected.
#[derive(Debug)]
pub(super) struct Waiting {
    options: FlowOptions,
    since: Instant,
    /// Of an accepted flow.
    pub(super) listener: Option<Handle>,
}

impl Flow {
    /// Until when it may stay unconnected, and how long that is.
    fn patience(&self) -> Option<(Instant, Duration)> {
        let waiting = self.waiting.as_ref()?;
        let has_reached = match &self.half {
            Half::Send(sender) => sender.has_reached_peer(),
            Half::Recv(_) => true,
        };
        let timeout = if has_reached { waiting.options.peer_timeout? } else { waiting.options.connect_timeout };
        Some((waiting.since + timeout, timeout))
    }
}

/// Counts and logs refused connections. Strangers decide how many there are.
#[derive(Debug, Default)]
pub(super) struct Refusals {
    pub(super) count: u64,
    log: LogBudget,
}

impl Refusals {
    pub(super) fn add(&mut self, reason: &'static str, now: Instant) {
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

/// Bytes that nobody can guess.
pub(super) fn random<const N: usize>() -> Result<[u8; N], TransportError> {
    let mut bytes = [0; N];
    // SAFETY: the call writes at most `N` bytes into an array of as many.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), N, 0) };
    // Up to 256 bytes come whole.
    if usize::try_from(got) == Ok(N) {
        Ok(bytes)
    } else {
        Err(TransportError::Os { call: "getrandom", reason: Errno::last() })
    }
}

impl TcpTransport {
    /// Something is due at `at`.
    fn due(&mut self, at: Instant) {
        self.earliest = Some(self.earliest.map_or(at, |earliest| earliest.min(at)));
    }

    /// The port that listens on an address, opened if there is none.
    fn port(&mut self, asked: SocketAddr) -> Result<SocketAddr, TransportError> {
        if let Some((_, port)) = self.ports.iter().find(|(_, port)| port.asked == asked || port.address == asked) {
            return Ok(port.address);
        }
        let (socket, address) = socket::open_listener(asked)?;
        let full = TransportError::TooMany { what: "addresses to listen on", limit: PORTS_MAX };
        let handle = self.ports.insert(Port::new(socket, asked, address)).map_err(|_| full)?;
        if let Some(port) = self.ports.get(handle)
            && let Err(reason) = self.watches.add(Watched::Port(handle), &port.socket)
        {
            self.ports.remove(handle);
            return Err(TransportError::Listen { address: address.to_string(), reason });
        }
        self.queue_port(handle);
        Ok(address)
    }

    /// Connections may wait at a port.
    pub(super) fn queue_port(&mut self, handle: Handle) {
        if let Some(port) = self.ports.get_mut(handle)
            && !std::mem::replace(&mut port.queued, true)
        {
            self.port_queue.push_back(handle);
        }
    }

    pub(super) fn open_listener(
        &mut self,
        options: &ListenOptions,
    ) -> Result<(ListenerId, ListenerHandle), TransportError> {
        options.validate()?;
        let cookie = random()?;
        let full = TransportError::TooMany { what: "listeners", limit: LISTENERS_MAX };
        let listener = self.listeners.insert(Listener::new(cookie)).map_err(|_| full)?;
        match self.port(options.address) {
            Ok(address) => Ok((ListenerId(listener), Address { address, listener, cookie }.to_handle())),
            Err(error) => {
                self.listeners.remove(listener);
                Err(error)
            }
        }
    }

    /// Its port stays: the next listener finds it where the operator's firewall knows it.
    pub(super) fn drop_listener(&mut self, handle: Handle) {
        if let Some(listener) = self.listeners.remove(handle) {
            self.drop_waiting(listener.into_waiting());
        }
    }

    pub(super) fn drop_places(&mut self, handle: Handle, below: u64) {
        if let Some(waiting) = self.listeners.get_mut(handle).map(|listener| listener.end_numbers(below)) {
            self.drop_waiting(waiting);
        }
    }

    fn drop_waiting(&mut self, (watches, flows): (Vec<Handle>, Vec<FlowId>)) {
        self.forget_arrivals(watches);
        for flow in flows {
            self.fail(flow.0, Fault::ListenerClosed);
        }
    }

    /// Sockets that had arrived were closed.
    pub(super) fn forget_arrivals(&mut self, watches: Vec<Handle>) {
        self.arrived = self.arrived.saturating_sub(watches.len());
        self.watches.forget(watches);
    }

    fn add_flow(&mut self, spec: &FlowSpec, half: Half, listener: Option<Handle>, now: Instant) -> Option<Handle> {
        let waiting = Waiting { options: spec.options.clone(), since: now, listener };
        let flow = Flow {
            silence_timeout: spec.options.silence_timeout,
            peer: spec.peer.clone(),
            number: spec.number,
            half,
            fault: None,
            queued: false,
            waits: false,
            is_news: false,
            is_unsettled: false,
            lingers: false,
            waiting: Some(waiting),
            accepted_with: None,
        };
        let patience = flow.patience();
        let handle = self.flows.insert(flow).ok()?;
        // Those that were connected or closed since are dropped before they are many.
        if self.unconnected.len() > 2 * self.flows.len() + 64 {
            self.unconnected.retain(|handle| self.flows.get(*handle).is_some_and(|flow| !flow.is_connected()));
        }
        if let Some((deadline, _)) = patience {
            self.unconnected.push(handle);
            self.due(deadline);
        }
        // A flow is in the queue at most once (and closed ones until their turn), so that the data path does not allocate.
        self.queue.reserve(self.flows.len());
        self.receivers.reserve(self.flows.len());
        Some(handle)
    }

    pub(super) fn open_sender(
        &mut self,
        listener: &ListenerHandle,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<Handle, TransportError> {
        let options = &spec.options;
        options.validate()?;
        let to = Address::from_handle(listener)?;
        if let Some(device) = &options.device {
            // Said here by its name; later on it is a path like others that do not answer.
            device::source(device, to.address.is_ipv4(), options.source_address)?;
        }
        self.attempts = self.attempts.wrapping_add(1);
        let hello = Hello {
            listener: to.listener,
            cookie: to.cookie,
            flow: spec.number,
            connection: 0,
            connections: options.connections,
            chunk_bytes: options.chunk_bytes,
            attempt: self.attempts,
            resumption: 0,
        };
        let half = Half::Send(Sender::new(hello, Box::new(Route::new(to, options))));
        let full = TransportError::TooMany { what: "flows", limit: FLOWS_MAX };
        let handle = self.add_flow(spec, half, None, now).ok_or(full)?;
        for connection in 0..options.connections {
            if let Err(fault) = self.dial(handle, connection) {
                let error = self.flows.get(handle).map(|flow| flow.error(fault));
                self.end(handle);
                self.flows.remove(handle);
                return Err(error.unwrap_or(TransportError::NoSuch("flow")));
            }
        }
        self.enqueue(handle);
        self.is_to_look = true;
        Ok(handle)
    }

    pub(super) fn open_receiver(
        &mut self,
        listener: Handle,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<Handle, TransportError> {
        spec.options.validate()?;
        self.listeners.get(listener).ok_or(TransportError::NoSuch("listener"))?;
        let half = Half::Recv(Receiver::new(spec.options.requests));
        let full = TransportError::TooMany { what: "flows", limit: FLOWS_MAX };
        let handle = self.add_flow(spec, half, Some(listener), now).ok_or(full)?;
        let placed = self.listeners.get_mut(listener).map(|listener| listener.expect(spec.number, FlowId(handle)));
        match placed {
            Some(Ok(Placed::Complete(flow, arrivals))) => self.complete(flow, arrivals),
            Some(Ok(Placed::Waiting)) => {}
            Some(Err(problem)) => {
                self.flows.remove(handle);
                return Err(TransportError::Option { option: "number", problem: problem.into() });
            }
            None => return Err(TransportError::NoSuch("listener")),
        }
        Ok(handle)
    }

    /// All sockets of an accepted flow are there.
    fn complete(&mut self, id: FlowId, arrivals: Arrivals) {
        let Some(flow) = self.flows.get_mut(id.0) else { return };
        let Some(waiting) = flow.waiting.take() else { return };
        let Half::Recv(receiver) = &mut flow.half else { return };
        receiver.start(arrivals.hello(), arrivals.into_sockets());
        self.arrived = self.arrived.saturating_sub(receiver.sockets().count());
        let mut welcomed = Ok(());
        for (connection, (socket, watch, resumption)) in receiver.sockets().enumerate() {
            self.watches.change(watch, Watched::Connection { flow: id.0, connection: connection as u16 });
            let received = (resumption > 0).then_some(0);
            welcomed = welcomed.and_then(|()| welcome(socket, &waiting.options, received));
        }
        flow.accepted_with = Some(waiting.options);
        self.tell(id.0);
        match welcomed {
            Ok(()) => self.enqueue(id.0),
            Err(fault) => self.fail(id.0, fault),
        }
    }

    /// Takes connections from the kernel, at most `budget`. Returns whether there were any.
    pub(super) fn take_connections(&mut self, handle: Handle, budget: usize, now: Instant) -> bool {
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
                        self.drop_half_open(oldest, "it says nothing, and newer ones need its place", now);
                    }
                    self.add_half_open(handle, socket, now);
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

    fn add_half_open(&mut self, port: Handle, socket: Socket, now: Instant) {
        let half_open = HalfOpen::new(socket, now);
        let deadline = half_open.deadline;
        let Ok(connection) = self.half_open.insert(half_open) else { return };
        if let Some(port) = self.ports.get_mut(port) {
            port.add_half_open(connection, now);
        }
        let Some(half_open) = self.half_open.get_mut(connection) else { return };
        half_open.watch = self.watches.add(Watched::HalfOpen(connection), &half_open.socket).ok();
        if half_open.watch.is_none() {
            return self.drop_half_open(connection, "the kernel does not watch it", now);
        }
        self.due(deadline);
        self.hear(connection, now);
    }

    fn drop_half_open(&mut self, handle: Handle, reason: &'static str, now: Instant) {
        if self.forget_half_open(handle) {
            self.refusals.add(reason, now);
        }
    }

    fn forget_half_open(&mut self, handle: Handle) -> bool {
        let connection = self.half_open.remove(handle);
        connection.map(|connection| self.watches.forget(connection.watch)).is_some()
    }

    /// A half-open connection may have said what it is for.
    pub(super) fn hear(&mut self, handle: Handle, now: Instant) {
        let Some(connection) = self.half_open.get_mut(handle) else { return };
        let hello = match connection.hear() {
            Heard::Waiting => return,
            Heard::Nothing => {
                self.forget_half_open(handle);
                return;
            }
            Heard::Bad(reason) => return self.drop_half_open(handle, reason, now),
            Heard::Hello(hello) => hello,
        };
        if self.arrived >= ARRIVED_MAX {
            return self.drop_half_open(handle, "too many wait to be accepted", now);
        }
        let Some(listener) = self.listeners.get_mut(hello.listener) else {
            // Like a wrong secret: strangers learn nothing of which listeners there are.
            return self.drop_half_open(handle, "it does not know the listener's secret", now);
        };
        let Some(HalfOpen { socket, watch: Some(watch), .. }) = self.half_open.remove(handle) else { return };
        if let Some(flow) = listener.flow_to_resume(&hello) {
            return self.resume(flow, &hello, socket, watch, now);
        }
        let mut given_up = Vec::new();
        let placed = listener.place(&hello, socket, watch, &mut given_up);
        self.forget_arrivals(given_up);
        match placed {
            Ok(placed) => {
                self.arrived += 1;
                self.watches.change(watch, Watched::Arrived { listener: hello.listener, number: hello.flow });
                if let Placed::Complete(flow, arrivals) = placed {
                    self.complete(flow, arrivals);
                }
            }
            Err(reason) => {
                self.watches.forget([watch]);
                self.refusals.add(reason, now);
            }
        }
    }

    /// Ends what has waited too long, and finds out when to look again.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.earliest.is_none_or(|at| at > now) {
            return;
        }
        self.earliest = None;
        let late: Vec<Handle> = self
            .half_open
            .iter()
            .filter(|(_, half_open)| half_open.deadline <= now)
            .map(|(handle, _)| handle)
            .collect();
        for handle in late {
            self.drop_half_open(handle, "it has not said in time what it is for", now);
        }
        for handle in std::mem::take(&mut self.unconnected) {
            let flow = self.flows.get(handle).filter(|flow| flow.fault.is_none() && !flow.is_connected());
            // None has no limit from now on either.
            let Some((deadline, timeout)) = flow.and_then(Flow::patience) else { continue };
            if deadline <= now {
                let after_ms = timeout.as_millis() as u64;
                self.fail(handle, Fault::ConnectTimeout { after_ms });
            } else {
                self.unconnected.push(handle);
            }
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
        let flows = self.unconnected.iter().filter_map(|handle| self.flows.get(*handle)?.patience());
        let ports = self.ports.iter().filter_map(|(_, port)| port.retry_at);
        self.earliest = half_open.chain(flows.map(|(deadline, _)| deadline)).chain(ports).min();
    }
}

/// Tells a connection that it is part of a flow, and how much of it has come where it goes on.
pub(super) fn welcome(socket: &Socket, options: &FlowOptions, received: Option<u64>) -> Result<(), Fault> {
    socket::apply(socket, socket.is_ipv4(), options)?;
    if options.path_timeout.is_some() {
        socket.outlast()?;
    }
    let (resumed, welcome);
    let answer = match received {
        Some(received) => {
            resumed = encode_resumed(received);
            &resumed[..]
        }
        None => {
            welcome = Verdict::Welcome.encode();
            &welcome[..]
        }
    };
    match socket.write_slice(answer) {
        Ok(Moved::Bytes(bytes)) if bytes == answer.len() => Ok(()),
        // Nothing was written to this socket before: only one that has ended takes less.
        Ok(_) => Err(Fault::Closed),
        Err(errno) => Err(super::peer_gone(errno)),
    }
}
