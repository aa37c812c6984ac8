//! Events of a TCP transport from sockets and peers, each handed to the component that it is for.

use std::time::Instant;

use mccs_ipc::types::Handle;

use super::TcpTransport;
use super::accept::acceptor::Incoming;
use super::accept::listener::Arrivals;
use super::flow::Half;
use super::watches::{Ready, Resolved, Watched, Watches};
use crate::{Fault, FlowId};

impl TcpTransport {
    /// Asks epoll, and notes what it says. Returns whether there is news but of connected flows, which their turns tell.
    pub(super) fn take_events(&mut self, now: Instant) -> bool {
        let mut told = false;
        let mut events = Watches::no_events();
        let count = self.watches.take(&mut events);
        for event in events.iter().take(count) {
            if let Some(Resolved { watched, watch, ready }) = self.watches.resolve(event) {
                told |= !matches!(watched, Watched::Connection { .. });
                self.dispatch(watched, watch, ready, now);
            }
        }
        told
    }

    fn dispatch(&mut self, watched: Watched, watch: Handle, ready: Ready, now: Instant) {
        match watched {
            Watched::Port(port) => self.acceptor.queue_port(port),
            Watched::HalfOpen(handle) => {
                if let Some(incoming) = self.acceptor.hear(handle, now, &mut self.watches) {
                    self.take_incoming(incoming, now);
                }
            }
            Watched::Arrived { listener, number } => {
                if ready.hung_up {
                    self.acceptor.lost_arrival(listener, number, &mut self.watches);
                }
            }
            Watched::Connection { flow: handle, connection } => {
                let Some(flow) = self.flows.get_mut(handle) else { return self.watches.forget([watch]) };
                match &mut flow.half {
                    Half::Send(sender) => sender.ready(connection, watch, ready),
                    Half::Recv(receiver) => receiver.ready(connection, watch, ready),
                }
                self.flows.enqueue(handle);
            }
        }
    }

    /// Takes connections that wait at ports. Returns whether there were any.
    pub(super) fn take_connections(&mut self, budget: usize, now: Instant) -> bool {
        let (mut any, mut incoming) = (false, Vec::new());
        for _ in 0..self.acceptor.queued() {
            let Some(port) = self.acceptor.next_port() else { break };
            any |= self.acceptor.take_connections(port, budget, now, &mut self.watches, &mut incoming);
            incoming.drain(..).for_each(|incoming| self.take_incoming(incoming, now));
        }
        any
    }

    /// Something has come for a flow.
    fn take_incoming(&mut self, incoming: Incoming, now: Instant) {
        match incoming {
            Incoming::Complete(flow, arrivals) => self.complete(flow, arrivals),
            Incoming::Resume { flow: FlowId(flow), hello, socket, watch } => {
                if self.flows.resume(flow, &hello, socket, watch) {
                    self.watches.change(watch, Watched::Connection { flow, connection: hello.connection });
                    self.paths.forget_closed(flow, &mut self.flows, &mut self.watches);
                    self.flows.enqueue(flow);
                } else {
                    self.watches.forget([watch]);
                    self.acceptor.refuse("its flow was closed, or has gone on otherwise", now);
                }
            }
        }
    }

    /// All sockets of an accepted flow are there.
    pub(super) fn complete(&mut self, FlowId(handle): FlowId, arrivals: Arrivals) {
        let Some(flow) = self.flows.get_mut(handle) else { return };
        let Some((sockets, welcomed)) = flow.complete(handle, arrivals, &mut self.watches) else { return };
        self.acceptor.handed_over(sockets);
        self.flows.tell(handle);
        match welcomed {
            Ok(()) => self.flows.enqueue(handle),
            Err(fault) => self.fail(handle, fault),
        }
    }

    /// Reads receivers that wait, if they are few. Returns whether something came; none where it did not.
    pub(super) fn read_directly(&mut self) -> Option<bool> {
        let receivers = self.reading.check(&mut self.flows);
        let mut came = false;
        for index in 0..receivers {
            let Some(handle) = self.reading.receiver(index) else { break };
            if let Some(Half::Recv(receiver)) = self.flows.get_mut(handle).map(|flow| &mut flow.half) {
                receiver.suppose_readable();
                came |= self.pump(handle);
            }
        }
        (receivers > 0).then_some(came)
    }

    /// Lets a flow work. Returns whether something moved.
    pub(super) fn pump(&mut self, handle: Handle) -> bool {
        match self.flows.pump(handle) {
            None => false,
            Some(Ok(pumped)) => {
                self.paths.forget_closed(handle, &mut self.flows, &mut self.watches);
                self.paths.keepalive().want_if(pumped.is_cut);
                pumped.moved
            }
            Some(Err(fault)) => {
                self.fail(handle, fault);
                true
            }
        }
    }

    /// Looks at flows that have waited for too long: for a connection, or for an answer.
    pub(super) fn look(&mut self, now: Instant) {
        for (handle, timeout) in self.opening.take_late(&self.flows, now) {
            self.fail(handle, Fault::ConnectTimeout { after_ms: timeout.as_millis() as u64 });
        }
        let over = self.paths.look(now, &mut self.flows, &mut self.watches);
        over.failed.into_iter().for_each(|(handle, fault)| self.fail(handle, fault));
        for handle in over.acknowledged {
            self.end(handle);
            self.flows.forget_lingering(handle);
        }
    }

    /// Ends a flow's sockets and lets its buffers go; it stays in the table and says why.
    pub(super) fn fail(&mut self, handle: Handle, fault: Fault) {
        self.flows.fail(handle, fault);
        self.end(handle);
        self.flows.forget_lingering(handle);
    }

    /// Ends a flow's sockets, and waits for no more of them.
    pub(super) fn end(&mut self, handle: Handle) {
        let left = self.flows.end(handle);
        self.watches.forget(left.watches);
        if let Some((listener, number)) = left.accepted {
            self.acceptor.give_up(listener, number, &mut self.watches);
        }
    }
}
