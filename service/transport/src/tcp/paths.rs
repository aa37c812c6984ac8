//! Failover of TCP flows: a dead path is found, and the connection goes on over another one.
//!
//! A sender finds out, since only a sender misses something: bytes that the peer's kernel neither acknowledges nor refuses, for
//! `path_timeout`, though they were sent a second time. A peer whose service is late, or has no room, answers through its kernel;
//! a congested path brings some packets. Then the connection that misses them goes on over another socket: of the same path where that
//! has answered something meanwhile, else of its flow's next one; and says which bytes it goes on with (`flow/connection.rs`). Nothing of
//! this needs the flow's user, or anybody's decision.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use mccs_ipc::types::Handle;

use crate::tcp::flow::flows::Flows;
use crate::tcp::flow::{Flow, Half};
use crate::tcp::keepalive::{Keepalive, LOOK_EVERY};
use crate::tcp::watches::{Watched, Watches};
use crate::{Fault, FlowId, FlowPath, PathEvent, SendFlow};

/// News of paths that are kept until they are asked for: more say no more.
const EVENTS_MAX: usize = 4096;
/// Flows that dial anew in one look, and that ask whether their paths live: others have their turn in the next ones, so that a dead link does not stop everything else.
const DIALS_MAX: usize = 256;

/// Flows that a look has found to be over.
#[derive(Debug, Default)]
pub(super) struct Over {
    /// Nobody answers them.
    pub(super) failed: Vec<(Handle, Fault)>,
    /// All that they lingered for is acknowledged.
    pub(super) acknowledged: Vec<Handle>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Paths {
    keepalive: Keepalive,
    /// News of flows.
    events: VecDeque<PathEvent>,
}

impl Paths {
    /// When peers are looked at.
    pub(super) fn keepalive(&mut self) -> &mut Keepalive {
        &mut self.keepalive
    }

    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.keepalive.wake_at()
    }

    pub(super) fn take_event(&mut self) -> Option<PathEvent> {
        self.events.pop_front()
    }

    /// Forgets sockets that a flow has closed, and notes what a sender has found out.
    pub(super) fn forget_closed(&mut self, handle: Handle, flows: &mut Flows, watches: &mut Watches) {
        let sender = match flows.get_mut(handle).map(|flow| &mut flow.half) {
            Some(Half::Send(sender)) => sender,
            Some(Half::Recv(receiver)) => return watches.forget(receiver.take_closed()),
            None => return,
        };
        watches.forget(sender.take_closed());
        for (path, answers) in sender.take_path_events() {
            if self.events.len() < EVENTS_MAX {
                self.events.push_back(PathEvent { flow: SendFlow(FlowId(handle)), path, answers });
            }
        }
    }

    /// Begins to connect a connection's next socket.
    pub(super) fn dial(
        &mut self,
        handle: Handle,
        connection: u16,
        flows: &mut Flows,
        watches: &mut Watches,
    ) -> Result<(), Fault> {
        let Some(Flow { half: Half::Send(sender), .. }) = flows.get_mut(handle) else { return Ok(()) };
        if let Some(every) = sender.looked_at_every() {
            self.keepalive.at_least_every(every);
        }
        let (socket, path) = sender.dial(connection)?;
        let watched = Watched::Connection { flow: handle, connection };
        let os = |reason| Fault::Os { call: "epoll_ctl", reason };
        let watch = watches.add(watched, &socket).map_err(os)?;
        sender.dialled(connection, socket, watch, path);
        self.forget_closed(handle, flows, watches);
        Ok(())
    }

    /// Has a connection go over to what is dialled for it as soon as that is open, whatever its own socket brings.
    pub(super) fn leave(&mut self, handle: Handle, connection: u16, flows: &mut Flows, watches: &mut Watches) {
        // A path that cannot be had now leaves it where it is.
        if self.dial(handle, connection, flows, watches).is_ok()
            && let Some(Flow { half: Half::Send(sender), .. }) = flows.get_mut(handle)
        {
            sender.force(connection);
        }
    }

    /// A flow's user wants it to go over another path. It does when its peer has answered there.
    pub(super) fn go_over(
        &mut self,
        handle: Handle,
        path: &FlowPath,
        detours: &Arc<[FlowPath]>,
        flows: &mut Flows,
        watches: &mut Watches,
    ) {
        let Some(sender) = flows.sender_mut(handle) else { return };
        for connection in sender.set_path(path, detours) {
            self.leave(handle, connection, flows, watches);
        }
        flows.enqueue(handle);
    }

    /// Looks whether peers answer: dials anew for those that do not on one path. Returns the flows that are over.
    pub(super) fn look(&mut self, now: Instant, flows: &mut Flows, watches: &mut Watches) -> Over {
        let mut over = Over::default();
        if !self.keepalive.take_due(now) {
            return over;
        }
        let (mut to_dial, mut moved) = (Vec::new(), Vec::new());
        let (mut connections, mut questions_left) = (Vec::new(), DIALS_MAX);
        let keepalive = &mut self.keepalive;
        flows.each_sender(|handle, silence_timeout, sender, regions| {
            if !sender.can_resume() {
                let Some(silence) = sender.silence() else { return };
                keepalive.want();
                if silence >= silence_timeout {
                    over.failed.push((handle, Fault::Lost(nix::errno::Errno::ETIMEDOUT)));
                }
                return;
            }
            keepalive.at_least_every(sender.looked_at_every().unwrap_or(LOOK_EVERY));
            match sender.look(now, regions, &mut connections, &mut questions_left) {
                Ok(looked) => {
                    keepalive.want_if(looked.is_owed);
                    keepalive.no_later_than(looked.look_at);
                    moved.extend(looked.moved.then_some(handle));
                    over.acknowledged.extend(looked.is_over.then_some(handle));
                }
                Err(fault) => over.failed.push((handle, fault)),
            }
            to_dial.extend(connections.drain(..).map(|connection| (handle, connection)));
        });
        moved.into_iter().for_each(|handle| flows.tell(handle));
        for (handle, connection) in to_dial.into_iter().take(DIALS_MAX) {
            // A path that is not to be had now may be at the next look.
            let _ = self.dial(handle, connection, flows, watches);
            self.forget_closed(handle, flows, watches);
            flows.enqueue(handle);
        }
        self.keepalive.plan(now);
        over
    }
}
