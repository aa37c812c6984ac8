//! TCP transport: several sockets a flow, from source ports of the operator's choice.
//!
//! One epoll descriptor watches all sockets of a transport, edge-triggered: a poll takes its events, marks sockets as
//! readable or writable, and works on the flows that have something to do, each a bounded amount a turn. Sockets that
//! nobody can use now (no buffer posted, nothing to send) stay marked and cost nothing.
//!
//! [`TcpTransport`] owns these, and routes what happens from one to another (`events.rs`):
//!
//! | component | file | owns |
//! | --- | --- | --- |
//! | `Watches` | `watches.rs` | the epoll descriptor, and what each watched socket is |
//! | `Acceptor` | `accept/acceptor.rs` | listening sockets, listeners, connections that are no flow's yet |
//! | `Flows` | `flow/flows.rs` | flows, whose turn it is, and registered memory |
//! | `Opening` | `flow/opening.rs` | which flows wait to be connected, and how long |
//! | `Reading` | `flow/busy_polling.rs` | which receivers are read without asking epoll |
//! | `Paths` | `paths.rs` | when peers are looked at, and what flows find out about paths |
//!
//! A flow's two halves are `flow/sender.rs` and `flow/receiver.rs`; `flow/connection.rs` and `flow/retransmission.rs` say how it goes on over another
//! path when its own is dead. `wire.rs` has what travels.
//!
//! The receiver's posted buffers do not travel as credits: the kernel's receive window holds a sender back that is ahead,
//! so the first bytes of a message may leave before its buffer is posted, which saves a packet a message.
//!
//! Deliberately absent: `MSG_ZEROCOPY`. The kernel would read a buffer after its flow is closed.

mod abilities;
mod accept;
mod device;
mod events;
mod flow;
mod keepalive;
mod paths;
mod probe;
mod socket;
#[cfg(test)]
mod tests;
mod watches;
mod wire;

use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;

use self::accept::acceptor::Acceptor;
use self::accept::listener::Placed;
pub use self::device::interfaces;
use self::flow::Half;
use self::flow::busy_polling::Reading;
use self::flow::flows::Flows;
use self::flow::opening::Opening;
use self::flow::receiver::Receiver;
use self::paths::Paths;
pub use self::probe::Probe;
use self::watches::Watches;
use super::{
    DataPath, Fault, FlowId, FlowOptions, FlowSpec, FlowState, ListenOptions, Listener, ListenerHandle, MemoryKey,
    MemoryKind, MemorySpan, RecvFlow, Request, SendFlow, Status, Transport, TransportError, Usage,
};
use mccs_runtime::{Context, Progress};

/// How often acknowledgements are asked for while nothing else is to do, and more is missing than is copied.
const SETTLED_EVERY: Duration = Duration::from_millis(1);

/// Whether the kernel takes what `options` say of packets of flows from `address`: the name of a congestion control, for one.
///
/// # Errors
/// Names the socket option that it refuses, and why.
pub fn try_out(address: IpAddr, options: &FlowOptions) -> Result<(), Fault> {
    socket::try_out(&address, options)
}

/// See the module's documentation.
#[derive(Debug)]
pub struct TcpTransport {
    watches: Watches,
    acceptor: Acceptor,
    flows: Flows,
    opening: Opening,
    reading: Reading,
    paths: Paths,
    #[cfg(test)]
    restless: Option<super::conformance::Random>,
}

impl TcpTransport {
    /// A transport without listeners and flows.
    ///
    /// # Errors
    /// The kernel refuses a descriptor.
    pub fn new() -> Result<Self, TransportError> {
        let watches = Watches::new().map_err(|reason| TransportError::Os { call: "epoll_create1", reason })?;
        Ok(TcpTransport {
            watches,
            acceptor: Acceptor::new(),
            flows: Flows::new(),
            opening: Opening::new()?,
            reading: Reading::default(),
            paths: Paths::default(),
            #[cfg(test)]
            restless: None,
        })
    }

    /// From here on it keeps what [`TcpTransport::take_news`] gives: for who has many flows and little to do on them.
    pub(super) fn with_news(mut self) -> Self {
        self.flows.keep_news();
        self
    }

    /// A flow that has connected, moved or failed since it was told last.
    pub(super) fn take_news(&mut self) -> Option<FlowId> {
        self.flows.take_news()
    }

    /// Address of this host that a flow is sent from.
    pub(super) fn source_address(&self, flow: SendFlow) -> Option<IpAddr> {
        match &self.flows.get(FlowId::from(flow).0)?.half {
            Half::Send(sender) => sender.sockets().next()?.source_address(),
            Half::Recv(_) => None,
        }
    }

    /// Connections that were refused so far: strangers, latecomers, other versions.
    #[must_use]
    pub fn refused_connections(&self) -> u64 {
        self.acceptor.refused()
    }

    /// Adds a flow that is to be connected; an accepted one at a listener.
    fn add(
        &mut self,
        spec: &FlowSpec,
        half: Half,
        listener: Option<Handle>,
        now: Instant,
    ) -> Result<Handle, TransportError> {
        let handle = self.opening.add(spec, half, listener, &mut self.flows, now)?;
        self.reading.reserve(self.flows.len());
        Ok(handle)
    }
}

impl DataPath for TcpTransport {
    fn isend(&mut self, flow: SendFlow, message: MemorySpan, tag: u32) -> Result<Option<Request>, TransportError> {
        let request = self.flows.post_send(flow, message, tag)?;
        self.paths.keepalive().want();
        // At once, not at the next poll: that is what a small message's latency consists of.
        self.pump(FlowId::from(flow).0);
        Ok(request)
    }

    fn irecv(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        let request = self.flows.post_receive(flow, buffer)?;
        self.reading.await_message(FlowId::from(flow).0, &mut self.flows);
        Ok(request)
    }

    /// Done at once: the processor wrote the bytes.
    fn flush(&mut self, flow: RecvFlow, buffer: MemorySpan) -> Result<Option<Request>, TransportError> {
        let id = FlowId::from(flow);
        self.flows.get(id.0).ok_or(TransportError::NO_FLOW)?.check()?;
        self.flows.regions().resolve(buffer)?;
        Ok(Some(Request::flushed(id)))
    }

    fn test(&mut self, request: Request) -> Result<Status, TransportError> {
        self.flows.test(request)
    }

    fn poll(&mut self, cx: &Context) -> Progress {
        #[cfg(test)]
        self.shake();
        self.paths.keepalive().plan(cx.now);
        // Somebody who has work has ended the sleep: sockets would have made epoll readable.
        let is_silent = self.reading.take_slept() && !cx.is_readable;
        let (mut busy, mut asks, mut told) = (false, false, false);
        if is_silent {
            self.reading.skip();
        } else {
            let came = self.read_directly();
            busy = came == Some(true);
            asks = self.reading.asks(came.is_some());
        }
        if asks {
            told = self.take_events(cx.now);
        }
        if self.acceptor.queued() > 0 {
            busy |= self.take_connections(cx.budget.max(1), cx.now);
        }
        // Those that come into the queue meanwhile have their turn in the next poll.
        for _ in 0..self.flows.queued().min(cx.budget.max(1)) {
            if let Some(handle) = self.flows.next() {
                told |= self.pump(handle);
            }
        }
        if asks {
            self.reading.asked(told);
        }
        busy |= told | self.flows.settle(Some(cx.now));
        self.acceptor.expire(cx.now, &mut self.watches);
        self.look(cx.now);
        if busy || self.flows.queued() > 0 || self.acceptor.queued() > 0 {
            return Progress::Busy;
        }
        let unsettled = (self.flows.unsettled() > 0).then(|| cx.now + SETTLED_EVERY);
        let due = [self.acceptor.wake_at(), self.opening.wake_at(), self.paths.wake_at(), unsettled];
        Progress::Idle { wake_at: due.into_iter().flatten().min() }
    }

    fn prepare_to_sleep(&mut self) -> bool {
        let has_work = self.flows.settle(None) || self.flows.queued() > 0 || self.acceptor.queued() > 0;
        self.reading.sleep(has_work)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.watches.as_fd())
    }
}

impl Transport for TcpTransport {
    unsafe fn register(&mut self, ptr: *mut u8, bytes: u64, kind: MemoryKind<'_>) -> Result<MemoryKey, TransportError> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.flows.regions_mut().register_host(ptr, bytes, kind, "TCP") }
    }

    fn deregister(&mut self, key: MemoryKey) -> Result<(), TransportError> {
        self.flows.regions_mut().deregister(key)
    }

    fn listen(&mut self, options: &ListenOptions) -> Result<(Listener, ListenerHandle), TransportError> {
        self.acceptor.open_listener(options, &mut self.watches)
    }

    fn close_listener(&mut self, listener: Listener) {
        let flows = self.acceptor.close_listener(listener.0, &mut self.watches);
        flows.into_iter().for_each(|flow| self.fail(flow.0, Fault::ListenerClosed));
    }

    fn end_numbers(&mut self, listener: Listener, below: u64) {
        let flows = self.acceptor.end_numbers(listener.0, below, &mut self.watches);
        flows.into_iter().for_each(|flow| self.fail(flow.0, Fault::ListenerClosed));
    }

    fn connect(
        &mut self,
        listener: &ListenerHandle,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<SendFlow, TransportError> {
        let sender = self.opening.sender(listener, spec)?;
        let handle = self.add(spec, Half::Send(sender), None, now)?;
        for connection in 0..spec.options.connections {
            if let Err(fault) = self.paths.dial(handle, connection, &mut self.flows, &mut self.watches) {
                let error = self.flows.get(handle).map(|flow| flow.error(fault));
                self.end(handle);
                self.flows.remove(handle);
                return Err(error.unwrap_or(TransportError::NO_FLOW));
            }
        }
        self.flows.enqueue(handle);
        self.paths.keepalive().want();
        Ok(SendFlow(FlowId(handle)))
    }

    fn accept(&mut self, listener: Listener, spec: &FlowSpec, now: Instant) -> Result<RecvFlow, TransportError> {
        spec.options.validate()?;
        if !self.acceptor.has(listener.0) {
            return Err(TransportError::NoSuch("listener"));
        }
        let half = Half::Recv(Receiver::new(spec.options.requests));
        let handle = self.add(spec, half, Some(listener.0), now)?;
        match self.acceptor.expect(listener.0, spec.number, FlowId(handle)) {
            Some(Ok(Placed::Complete(flow, arrivals))) => self.complete(flow, arrivals),
            Some(Ok(Placed::Waiting)) => {}
            Some(Err(problem)) => {
                self.flows.remove(handle);
                return Err(TransportError::Option { option: "number", problem: problem.into() });
            }
            None => return Err(TransportError::NoSuch("listener")),
        }
        Ok(RecvFlow(FlowId(handle)))
    }

    fn state(&self, flow: FlowId) -> Result<FlowState, TransportError> {
        self.flows.get(flow.0).ok_or(TransportError::NO_FLOW)?.state()
    }

    fn close(&mut self, flow: FlowId) {
        if self.flows.linger(flow.0, &mut self.watches) {
            self.paths.keepalive().want();
        } else {
            self.end(flow.0);
            self.flows.remove(flow.0);
        }
    }

    fn usage(&self) -> Usage {
        let flows = self.flows.len().saturating_sub(self.flows.lingering());
        let registrations = self.flows.regions().len();
        Usage { listeners: self.acceptor.len(), flows, registrations, lingering: 0 }
    }
}
