//! Flows that go on over other paths: looking whether peers answer, dialling anew, and taking what comes over a new socket.
//!
//! A sender finds out, since only a sender misses something: bytes that the peer's kernel neither acknowledges nor refuses, for
//! `path_timeout`, though they were sent a second time. A peer whose service is late, or has no room, answers through its kernel;
//! a congested path brings some packets. Then the connection that misses them goes on over another socket: of the same path where that
//! has answered something meanwhile, else of its flow's next one; and says which bytes it goes on with (`connection.rs`). Nothing of
//! this needs the flow's user, or anybody's decision.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;

use super::super::{Fault, FlowId, FlowPath, PathEvent, SendFlow};
use super::keepalive::LOOK_EVERY;
use super::port::refuse;
use super::setup::welcome;
use super::socket::Socket;
use super::watches::Watched;
use super::wire::{Hello, Verdict};
use super::{Flow, Half, TcpTransport};

/// How often acknowledgements are asked for while nothing else is to do, and more is missing than is copied.
pub(super) const SETTLED_EVERY: Duration = Duration::from_millis(1);
/// Flows that are asked for their acknowledgements in a poll.
const SETTLED_MAX: usize = 32;
/// News of paths that are kept until they are asked for: more say no more.
const PATH_EVENTS_MAX: usize = 4096;
/// Flows that dial anew in one look, and that ask whether their paths live: others have their turn in the next ones, so that a dead link does not stop everything else.
const DIALS_MAX: usize = 256;

impl TcpTransport {
    /// A sender's messages wait for acknowledgements.
    pub(super) fn await_settling(&mut self, handle: Handle) {
        if let Some(flow) = self.flows.get_mut(handle) {
            self.queues.await_settling(handle, flow);
        }
    }

    /// Ends messages that were acknowledged, or need to wait no longer; without a time, all that can be ended. Returns whether it did.
    pub(super) fn settle(&mut self, now: Option<Instant>) -> bool {
        let mut any = false;
        for _ in 0..self.queues.unsettled().min(SETTLED_MAX) {
            let Some(handle) = self.queues.next_unsettled() else { break };
            let Some(flow) = self.flows.get_mut(handle) else { continue };
            let Half::Send(sender) = &mut flow.half else { continue };
            let (moved, is_left) = sender.settle(now, &mut self.regions);
            flow.is_unsettled = is_left;
            if is_left {
                self.queues.still_unsettled(handle);
            }
            if moved {
                any = true;
                self.tell(handle);
            }
        }
        any
    }

    /// Forgets sockets that a flow has closed, and notes what a sender has found out.
    pub(super) fn forget_closed(&mut self, handle: Handle) {
        let sender = match self.flows.get_mut(handle).map(|flow| &mut flow.half) {
            Some(Half::Send(sender)) => sender,
            Some(Half::Recv(receiver)) => return self.watches.forget(receiver.take_closed()),
            None => return,
        };
        self.watches.forget(sender.take_closed());
        for (path, answers) in sender.take_path_events() {
            if self.path_events.len() < PATH_EVENTS_MAX {
                self.path_events.push_back(PathEvent { flow: SendFlow(FlowId(handle)), path, answers });
            }
        }
    }

    /// Begins to connect a connection's next socket.
    pub(super) fn dial(&mut self, handle: Handle, connection: u16) -> Result<(), Fault> {
        let Some(Flow { half: Half::Send(sender), .. }) = self.flows.get_mut(handle) else { return Ok(()) };
        if let Some(every) = sender.looked_at_every() {
            self.keepalive.at_least_every(every);
        }
        let (socket, path) = sender.dial(connection)?;
        let watched = Watched::Connection { flow: handle, connection };
        let os = |reason| Fault::Os { call: "epoll_ctl", reason };
        let watch = self.watches.add(watched, &socket).map_err(os)?;
        sender.dialled(connection, socket, watch, path);
        self.forget_closed(handle);
        Ok(())
    }

    /// A flow's user wants it to go over another path. It does when its peer has answered there.
    pub(super) fn go_over(&mut self, handle: Handle, path: &FlowPath, detours: &Arc<[FlowPath]>) {
        let Some(Flow { half: Half::Send(sender), fault: None, .. }) = self.flows.get_mut(handle) else { return };
        for connection in sender.set_path(path, detours) {
            // What cannot be had now leaves it where it is.
            if self.dial(handle, connection).is_ok()
                && let Some(Flow { half: Half::Send(sender), .. }) = self.flows.get_mut(handle)
            {
                sender.force(connection);
            }
        }
        self.enqueue(handle);
    }

    /// Looks whether peers answer: dials anew for those that do not on one path, and fails those that do not on any.
    pub(super) fn look(&mut self, now: Instant) {
        if !self.keepalive.take_due(now) {
            return;
        }
        let (mut to_dial, mut failed, mut moved, mut over) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut connections, mut questions_left) = (Vec::new(), DIALS_MAX);
        for (handle, flow) in self.flows.iter_mut().filter(|(_, flow)| flow.fault.is_none()) {
            let Half::Send(sender) = &mut flow.half else { continue };
            if !sender.can_resume() {
                let Some(silence) = sender.silence() else { continue };
                self.keepalive.want();
                if silence >= flow.silence_timeout {
                    failed.push((handle, Fault::Lost(nix::errno::Errno::ETIMEDOUT)));
                }
                continue;
            }
            self.keepalive.at_least_every(sender.looked_at_every().unwrap_or(LOOK_EVERY));
            match sender.look(now, &mut self.regions, &mut connections, &mut questions_left) {
                Ok(looked) => {
                    self.keepalive.want_if(looked.is_owed);
                    self.keepalive.no_later_than(looked.look_at);
                    moved.extend(looked.moved.then_some(handle));
                    over.extend(looked.is_over.then_some(handle));
                }
                Err(fault) => failed.push((handle, fault)),
            }
            to_dial.extend(connections.drain(..).map(|connection| (handle, connection)));
        }
        moved.into_iter().for_each(|handle| self.tell(handle));
        for (handle, connection) in to_dial.into_iter().take(DIALS_MAX) {
            // What is not to be had now may be at the next look.
            let _ = self.dial(handle, connection);
            self.forget_closed(handle);
            self.enqueue(handle);
        }
        failed.into_iter().for_each(|(handle, fault)| self.fail(handle, fault));
        for handle in over {
            self.end(handle);
            self.forget_lingering(handle);
        }
        self.keepalive.plan(now);
    }

    /// A connection goes on with a flow that is connected, as soon as that has room for what its old one has brought.
    pub(super) fn resume(&mut self, id: FlowId, hello: &Hello, socket: Socket, watch: Handle, now: Instant) {
        let is_wanted = match self.flows.get_mut(id.0) {
            Some(Flow { half: Half::Recv(receiver), fault: None, accepted_with: Some(_), .. }) => {
                receiver.go_on_with(hello, (socket, watch))
            }
            _ => {
                refuse(&socket, Verdict::Taken);
                false
            }
        };
        if !is_wanted {
            self.watches.forget([watch]);
            self.acceptor.refuse("its flow was closed, or has gone on otherwise", now);
            return;
        }
        self.watches.change(watch, Watched::Connection { flow: id.0, connection: hello.connection });
        self.forget_closed(id.0);
        self.enqueue(id.0);
    }

    /// Takes the sockets that a receiver is to go on with, where it has room. Returns whether it did.
    pub(super) fn take_successors(&mut self, handle: Handle) -> bool {
        let Some(Flow { half: Half::Recv(receiver), accepted_with: Some(options), .. }) = self.flows.get_mut(handle)
        else {
            return false;
        };
        let took = receiver.take_successors(|socket, received| welcome(socket, options, Some(received)));
        if took {
            self.forget_closed(handle);
            // What is on the new ones may have come before anybody watched for it.
            self.enqueue(handle);
        }
        took
    }

    /// A flow's user closes it. Returns whether it lives on, under a name that nobody knows, until what its completed sends have handed
    /// over is acknowledged: it might have to be sent again.
    pub(super) fn linger(&mut self, handle: Handle) -> bool {
        let Some(flow) = self.flows.get_mut(handle).filter(|flow| flow.fault.is_none()) else { return false };
        let Half::Send(sender) = &mut flow.half else { return false };
        if !sender.begin_to_linger(&mut self.regions) {
            return false;
        }
        let Some(mut flow) = self.flows.remove(handle) else { return false };
        (flow.queued, flow.is_news, flow.is_unsettled, flow.lingers) = (false, false, false, true);
        let Ok(new) = self.flows.insert(flow) else { return true };
        self.lingering += 1;
        if let Some(Flow { half: Half::Send(sender), .. }) = self.flows.get(new) {
            for (connection, watch) in sender.watches() {
                self.watches.change(watch, Watched::Connection { flow: new, connection });
            }
        }
        self.keepalive.want();
        true
    }

    /// A flow that lingers has ended.
    pub(super) fn forget_lingering(&mut self, handle: Handle) {
        if self.flows.get(handle).is_some_and(|flow| flow.lingers) {
            self.flows.remove(handle);
            self.lingering = self.lingering.saturating_sub(1);
        }
    }
}
