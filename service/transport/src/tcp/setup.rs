//! Opening flows, until they are connected.

use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use mccs_model::handles::HandleTable;
use nix::errno::Errno;

use super::listener::{Arrivals, Placed};
use super::receiver::Receiver;
use super::sender::{Route, Sender};
use super::socket::{self, Moved, Socket};
use super::watches::Watched;
use super::wire::{Address, Hello, Verdict, encode_resumed};
use super::{Flow, Half, TcpTransport, device};
use crate::{Fault, FlowId, FlowOptions, FlowSpec, ListenerHandle, TransportError};

/// Flows that wait to be connected, and when the first of them has waited for too long.
#[derive(Debug, Default)]
pub(super) struct Connecting {
    flows: Vec<Handle>,
    /// None is late before.
    earliest: Option<Instant>,
}

impl Connecting {
    fn add(&mut self, handle: Handle, deadline: Instant, flows: &HandleTable<Flow>) {
        // Those that were connected or closed since are dropped before they are many.
        if self.flows.len() > 2 * flows.len() + 64 {
            self.flows.retain(|handle| flows.get(*handle).is_some_and(|flow| !flow.is_connected()));
        }
        self.flows.push(handle);
        self.earliest = Some(self.earliest.map_or(deadline, |earliest| earliest.min(deadline)));
    }

    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.earliest
    }

    /// Takes the flows out that are late, with how long they had.
    pub(super) fn take_late(&mut self, flows: &HandleTable<Flow>, now: Instant) -> Vec<(Handle, Duration)> {
        if self.earliest.is_none_or(|at| at > now) {
            return Vec::new();
        }
        let (mut late, mut earliest) = (Vec::new(), None::<Instant>);
        self.flows.retain(|handle| {
            let flow = flows.get(*handle).filter(|flow| flow.fault.is_none() && !flow.is_connected());
            // One without a limit has none from now on either.
            let Some((deadline, timeout)) = flow.and_then(Flow::patience) else { return false };
            if deadline <= now {
                late.push((*handle, timeout));
                return false;
            }
            earliest = earliest.into_iter().chain([deadline]).min();
            true
        });
        self.earliest = earliest;
        late
    }
}

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
        if let Some((deadline, _)) = patience {
            self.connecting.add(handle, deadline, &self.flows);
        }
        // A flow is in the queue at most once (and closed ones until their turn), so that the data path does not allocate.
        self.queues.reserve(self.flows.len());
        self.reading.reserve(self.flows.len());
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
        let handle = self.add_flow(spec, half, None, now).ok_or(TransportError::TOO_MANY_FLOWS)?;
        for connection in 0..options.connections {
            if let Err(fault) = self.dial(handle, connection) {
                let error = self.flows.get(handle).map(|flow| flow.error(fault));
                self.end(handle);
                self.flows.remove(handle);
                return Err(error.unwrap_or(TransportError::NoSuch("flow")));
            }
        }
        self.enqueue(handle);
        self.keepalive.want();
        Ok(handle)
    }

    pub(super) fn open_receiver(
        &mut self,
        listener: Handle,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<Handle, TransportError> {
        spec.options.validate()?;
        if !self.acceptor.has(listener) {
            return Err(TransportError::NoSuch("listener"));
        }
        let half = Half::Recv(Receiver::new(spec.options.requests));
        let handle = self.add_flow(spec, half, Some(listener), now).ok_or(TransportError::TOO_MANY_FLOWS)?;
        match self.acceptor.expect(listener, spec.number, FlowId(handle)) {
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
    pub(super) fn complete(&mut self, id: FlowId, arrivals: Arrivals) {
        let Some(flow) = self.flows.get_mut(id.0) else { return };
        let Some(waiting) = flow.waiting.take() else { return };
        let Half::Recv(receiver) = &mut flow.half else { return };
        receiver.start(arrivals.hello(), arrivals.into_sockets());
        self.acceptor.handed_over(receiver.sockets().count());
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
