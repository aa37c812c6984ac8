//! From connection to connection: which port a flow's next connection takes, how both sides make it, and what follows when it breaks.
//!
//! ```text
//! a port is down, or its address or device gone   the next port that is up; home at once when it is back
//! a queue pair has failed by itself               the same port again
//! nobody answers, though all links are up         the next pair of ports, and so on round; home is tried again later
//! ```
//!
//! A flow's *turn* counts the pairs of ports that were tried in vain. The sender takes its ports in turn, from home on: the port of the device that its
//! path names, or else that of its engine's turn. It tells the receiver the place of its port, and how many rounds it has made: the receiver takes the port at
//! the same place, and one further for each round. So counterparts come first.

pub(in crate::rdma) mod device_events;
pub(in crate::rdma) mod hotplug;
pub(in crate::rdma) mod keepalive;

use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use nix::errno::Errno;

use crate::rdma::RdmaTransport;
use crate::rdma::connection::connector::{Connected, Job};
use crate::rdma::connection::setup::fault_of;
use crate::rdma::connection::wire::{Record, RingAddress, SideAddress};
use crate::rdma::connection::{Connection, Shape};
use crate::rdma::device::ports::Port;
use crate::rdma::flow::{Answering, Flow, HOME_AFTER_MAX, Half, Stage, Trouble};
use crate::rdma::verbs::is_silence;
use crate::{Fault, FlowId, FlowSpec, ListenerHandle, SendFlow};

/// Pause before a broken connection is tried again; doubles with every attempt.
const PAUSE: Duration = Duration::from_millis(10);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Whether a device of either side has been answered by nobody.
fn nobody_answers(fault: Fault) -> bool {
    matches!(fault, Fault::QueuePair { status, .. } | Fault::PeerQueuePair { status } if is_silence(status))
}

/// The turn after a connection has broken.
fn next_turn(turn: u32, fault: Fault, is_in_trouble: bool) -> u32 {
    match fault {
        // Ports are others now, or the preferred one is worth a try.
        Fault::NoPort => 0,
        _ if nobody_answers(fault) => turn.wrapping_add(1),
        Fault::Os { .. } => turn.wrapping_add(1),
        _ => turn.wrapping_add(u32::from(is_in_trouble)),
    }
}

/// Of the ports that are up, from home on, the one for a turn, and how many rounds were made before: the receiver's turn.
fn port_of_turn(ports: &[Port], home: usize, turn: u32) -> (usize, u32) {
    let home = home % ports.len().max(1);
    let is_up = |index: &usize| ports.get(*index).is_some_and(|port| port.is_up);
    let up: Vec<usize> = (home..ports.len()).chain(0..home).filter(is_up).collect();
    let count = up.len().max(1) as u32;
    (up.get((turn % count) as usize).copied().unwrap_or(home), turn / count)
}

impl RdmaTransport {
    /// Whether a connection's port is the one to prefer now: from home on, the first that is up.
    fn is_home(&self, home: usize, port: usize) -> bool {
        port_of_turn(self.devices.ports(), home, 0).0 == port
    }

    /// New queue pairs for a flow.
    fn make_connection(&mut self, handle: Handle, qps: u16) -> Result<Connection, Fault> {
        let flow = self.flows.get_mut(handle).ok_or(Fault::Closed)?;
        let (port, _) = port_of_turn(self.devices.ports(), flow.home, flow.turn);
        let limits = self.devices.port(port).ok_or(Fault::NoPort)?.limits;
        let limit = limits.queue_wrs.max(1);
        let slots = match &flow.half {
            Half::Send(sender) => sender.slots().into(),
            Half::Recv(receiver) => receiver.slots(),
        };
        // All of a flow's completions lie in one queue: twice as many as writes under way, and those of its credits.
        let of_qp = limits.cq_entries.saturating_sub(2 * slots) / u32::from(qps.max(1));
        let outstanding = self.devices.options().outstanding.min(of_qp.saturating_sub(1) / 2).clamp(1, limit);
        let (sends, receives, unmarked, ring) = match &mut flow.half {
            Half::Send(sender) => {
                // Each message needs a credit; as many may lie in the ring as are taken from it.
                let receives = [(2 * slots).min(limit), 1];
                // Of as many copies as there is room for, the first half is always known to arrive, or not to.
                ([outstanding; 2], receives, slots / (2 * u32::from(qps.max(1))), sender.shared())
            }
            // Twice what a sender has under way: half of them are posted anew when the other half is used up.
            Half::Recv(receiver) => {
                ([slots.min(limit), 1], [(2 * outstanding).min(limit); 2], u32::MAX, receiver.shared())
            }
        };
        let shape = Shape { qps, sends, receives, unmarked };
        // SAFETY: the ring belongs to the flow's half, which lives longer than its connection.
        unsafe { self.devices.make_connection(handle, port, shape, ring) }
    }

    pub(in crate::rdma) fn end_connection(&mut self, handle: Handle) {
        if let Some(connection) = self.flows.get_mut(handle).and_then(|flow| flow.connection.take()) {
            self.devices.end_connection(connection);
        }
    }

    /// The sender offers a connection.
    pub(in crate::rdma) fn offer_connection(&mut self, handle: Handle, now: Instant) {
        let Some(flow) = self.flows.get(handle) else { return };
        let (is_connected, qps) = (flow.is_connected, flow.spec.options.connections);
        if let Err(fault) = self.offer(handle, qps, now) {
            // A flow does not begin before there is a port.
            let waits = is_connected || fault != Fault::NoPort;
            if waits { self.break_connection(handle, fault) } else { self.fail(handle, fault) }
        }
    }

    fn offer(&mut self, handle: Handle, qps: u16, now: Instant) -> Result<(), Fault> {
        let connection = self.make_connection(handle, qps)?;
        let side = connection.address(self.devices.ports(), self.devices.options());
        let (rkey, port) = (connection.ring.rkey, connection.port);
        let flow = self.flows.get_mut(handle).ok_or(Fault::Closed)?;
        flow.connection = Some(connection);
        flow.connection_number += 1;
        flow.stage = Stage::Offered;
        let (number, connect_timeout) = (flow.connection_number, flow.spec.options.connect_timeout);
        let (home, (_, turn)) = (port as u32, port_of_turn(self.devices.ports(), flow.home, flow.turn));
        let Half::Send(sender) = &mut flow.half else { return Err(Fault::Protocol("bug: a receiver offers")) };
        let ring = RingAddress { address: sender.shared().0, rkey, slots: sender.slots() };
        let part_bytes = sender.part_bytes();
        let back = self.await_back(handle, now).map_err(|error| fault_of(&error))?;
        self.settle_by(handle, Some(now + connect_timeout));
        self.say(handle, Record::Offer { connection: number, home, turn, side, ring, part_bytes, back });
        Ok(())
    }

    /// The receiver takes an offer: makes queue pairs, and begins to connect them.
    pub(in crate::rdma) fn answer(
        &mut self,
        handle: Handle,
        side: &SideAddress,
        (ring, part_bytes): (RingAddress, u32),
        (back, number): &(Vec<u8>, u64),
        now: Instant,
    ) -> Result<(), Fault> {
        // What has come on the connection before counts; nothing may come on it any more.
        while self.take_completions(usize::MAX) {}
        self.end_connection(handle);
        let flow = self.flows.get_mut(handle).filter(|flow| flow.fault.is_none()).ok_or(Fault::Closed)?;
        // First of all, so that the sender can be told that its connection is no good.
        if !back.is_empty() {
            let listener = ListenerHandle::from_bytes(back).map_err(|error| fault_of(&error))?;
            let spec = FlowSpec { number: *number, ..flow.spec.clone() };
            let called = self.channels.call_back(&mut flow.control, handle, &listener, &spec, now);
            called.map_err(|error| fault_of(&error))?;
        }
        let connection = self.make_connection(handle, side.qps.len() as u16)?;
        let ours = connection.address(self.devices.ports(), self.devices.options());
        let flow = self.flows.get_mut(handle).ok_or(Fault::Closed)?;
        flow.connection = Some(connection);
        let before = flow.answering.take().map_or(flow.stage, |answering| answering.before);
        flow.answering = Some(Answering { side: ours, ring, part_bytes, before });
        self.connect_qps(handle, side, now)
    }

    /// The receiver's queue pairs are connected: the sender may connect its own.
    fn say_answer(&mut self, handle: Handle, now: Instant) {
        let Some(flow) = self.flows.get_mut(handle) else { return };
        let (Half::Recv(receiver), Some(connection), Some(Answering { side, ring, part_bytes, .. })) =
            (&mut flow.half, &flow.connection, flow.answering.take())
        else {
            return;
        };
        receiver.restart(side.qps.len(), part_bytes, ring);
        let (received, taken) = (receiver.received(), receiver.taken());
        let (inbox, port) = (receiver.inbox(connection.ring.rkey), connection.port);
        flow.stage = Stage::Answered;
        let (connection, home, timeout) = (flow.connection_number, flow.home, flow.spec.options.connect_timeout);
        self.settle_by(handle, Some(now + timeout));
        let is_home = self.is_home(home, port);
        self.say(handle, Record::Answer { connection, is_home, side, received, taken, inbox });
    }

    /// The receiver cannot take an offer. Over other ports it may do better, also if it begins.
    pub(in crate::rdma) fn refuse_offer(&mut self, handle: Handle, fault: Fault) {
        let Some(flow) = self.flows.get_mut(handle) else { return };
        if !flow.is_connected && !matches!(fault, Fault::Os { .. }) {
            return self.fail(handle, fault);
        }
        if let Some(answering) = flow.answering.take() {
            flow.stage = answering.before;
        }
        let connection = flow.connection_number;
        self.end_connection(handle);
        self.say(handle, Record::Again { connection, status: 0 });
    }

    /// Begins to connect a flow's queue pairs to the peer's.
    fn connect_qps(&mut self, handle: Handle, side: &SideAddress, now: Instant) -> Result<(), Fault> {
        let flow = self.flows.get_mut(handle).ok_or(Fault::Closed)?;
        let connection = flow.connection.as_ref().ok_or(Fault::NoPort)?;
        let qp_connects =
            connection.qp_connects(side, self.devices.ports(), self.devices.options(), &flow.spec.options)?;
        flow.stage = Stage::Connecting;
        let (port, places, peer) = (connection.port, connection.places, side.gid());
        self.connector
            .begin(Job { flow: handle, connection: flow.connection_number, port, peer, places, qp_connects }, now);
        Ok(())
    }

    /// Goes on where queue pairs have been connected, or could not be. Returns whether there were any.
    pub(in crate::rdma) fn take_connected(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some(Connected { job, result, untold }) = self.connector.take() {
            any = true;
            let Job { flow: handle, connection, port, places, qp_connects, .. } = job;
            if let Some(port) = self.devices.port_mut(port) {
                if let Some(told) = untold {
                    port.cannot_be_told(told);
                }
                // The connection has ended meanwhile.
                if let Some(opened) = &mut port.opened
                    && qp_connects.iter().all(|it| Arc::strong_count(&it.qp) == 1 && it.qp.is_of(&opened.pd))
                {
                    drop(qp_connects);
                    opened.queues.release(places);
                }
            }
            let waits = |flow: &&Flow| {
                flow.stage == Stage::Connecting
                    && flow.connection_number == connection
                    && flow.fault.is_none()
                    && !flow.is_hung_up
            };
            if let Some(flow) = self.flows.get(handle).filter(waits) {
                let is_sender = matches!(flow.half, Half::Send(_));
                match (result, is_sender) {
                    (Ok(()), true) => self.open_connection(handle),
                    (Ok(()), false) => self.say_answer(handle, now),
                    (Err(fault), true) => self.break_connection(handle, fault),
                    (Err(fault), false) => self.refuse_offer(handle, fault),
                }
            }
        }
        any
    }

    /// The sender has its answer.
    pub(in crate::rdma) fn answered(
        &mut self,
        handle: Handle,
        side: &SideAddress,
        counts: (u64, u64),
        inbox: Option<RingAddress>,
        is_home: bool,
    ) -> Result<(), Fault> {
        let (flow, now) = (self.flows.get_mut(handle).ok_or(Fault::Closed)?, self.now.ok_or(Fault::Closed)?);
        let (Half::Send(sender), Some(_)) = (&mut flow.half, &flow.connection) else { return Ok(()) };
        sender.restart(counts, inbox, &mut self.memory.regions)?;
        flow.is_peer_home = is_home;
        let is_connected = flow.is_connected;
        match self.connect_qps(handle, side, now) {
            Err(fault @ Fault::Protocol(_)) if !is_connected => return Err(fault),
            Err(fault) => self.break_connection(handle, fault),
            Ok(()) => {}
        }
        Ok(())
    }

    /// The sender's queue pairs are connected, and the receiver's were before.
    fn open_connection(&mut self, handle: Handle) {
        let Some(flow) = self.flows.get_mut(handle) else { return };
        let (Half::Send(sender), Some(connection)) = (&mut flow.half, &flow.connection) else { return };
        if !sender.has_unfinished() {
            flow.trouble = None;
        }
        (flow.stage, flow.is_connected) = (Stage::Open, true);
        let (number, home, port, is_peer_home) =
            (flow.connection_number, flow.home, connection.port, flow.is_peer_home);
        self.settle_by(handle, None);
        self.say(handle, Record::Ready { connection: number });
        self.has_opened(handle);
        self.plan_return(handle, is_peer_home && self.is_home(home, port));
    }

    /// Something that was to be posted was not. A device that is gone says so of every call, also before anybody has looked at its
    /// completions: another one may do better.
    pub(in crate::rdma) fn stumble(&mut self, handle: Handle, fault: Fault) {
        match fault {
            Fault::Os { reason: Errno::EIO | Errno::ENODEV, .. } => self.break_connection(handle, fault),
            _ => self.fail(handle, fault),
        }
    }

    /// A flow's connection carries nothing any more: another one, unless it has been so for too long.
    pub(in crate::rdma) fn break_connection(&mut self, handle: Handle, fault: Fault) {
        let Some(now) = self.now else { return };
        // Who has been hung up on needs no connection: what has come is there.
        let lives = |flow: &&mut Flow| flow.fault.is_none() && !flow.is_hung_up;
        let Some(flow) = self.flows.get_mut(handle).filter(lives) else { return };
        match &flow.half {
            Half::Send(_) => {
                if let Some(connection) = flow.connection.take() {
                    self.devices.end_connection(connection);
                }
            }
            Half::Recv(_) if flow.stage == Stage::Waiting => return,
            // What its sender's device knows to have arrived counts, also if nobody has looked yet: the answer to the next offer takes it,
            // and ends the connection.
            Half::Recv(_) => {}
        }
        let trouble = flow.trouble.get_or_insert(Trouble { since: now, attempts: 0, fault });
        trouble.attempts += 1;
        let options = &flow.spec.options;
        let patience = if flow.is_connected { options.silence_timeout } else { options.connect_timeout };
        let (give_up_at, attempts, first) = (trouble.since + patience, trouble.attempts, trouble.fault);
        if now >= give_up_at {
            return self.fail(handle, first);
        }
        if nobody_answers(fault) && flow.turn == 0 && matches!(flow.half, Half::Send(_)) {
            let (flow, path) = (SendFlow(FlowId(handle)), flow.spec.options.path());
            self.events.dead_path(flow, path);
        }
        flow.turn = next_turn(flow.turn, fault, attempts > 1);
        (flow.home_at, flow.silent_since, flow.answering) = (None, None, None);
        let (peer, number, connection) = (&flow.spec.peer, flow.spec.number, flow.connection_number);
        // Of what a host's own ports have said, or the peer's, its service's log tells.
        let is_known = matches!(fault, Fault::NoPort | Fault::NoPeerPort);
        match if is_known { None } else { self.events.may_log(now) } {
            Some(more) => {
                tracing::warn!(peer, flow = number, connection, %fault, more, "a flow's connection has broken; it makes another")
            }
            None => tracing::debug!(peer, flow = number, connection, %fault, "a flow leaves its connection"),
        }
        self.events.port(FlowId(handle), None);
        if matches!(flow.half, Half::Send(_)) {
            flow.stage = Stage::Broken;
            let pause = PAUSE.saturating_mul(1 << (attempts - 1).min(10)).min(PAUSE_MAX);
            let due = if attempts == 1 { now } else { (now + pause).min(give_up_at) };
            self.settle_by(handle, Some(due));
        } else {
            flow.stage = Stage::Waiting;
            self.settle_by(handle, Some(give_up_at));
            let status = if let Fault::QueuePair { status, .. } = fault { status } else { 0 };
            self.say(handle, Record::Again { connection, status });
        }
    }

    /// A flow's connection is open.
    pub(in crate::rdma) fn has_opened(&mut self, handle: Handle) {
        let port = self.flows.get(handle).and_then(|flow| self.devices.port(flow.connection.as_ref()?.port));
        if let Some(port) = port {
            self.events.port(FlowId(handle), Some(port.name()));
        }
        self.enqueue(handle);
    }

    /// A flow that is away from home since nobody answered there tries it again later: no event will tell.
    fn plan_return(&mut self, handle: Handle, is_home: bool) {
        let (Some(flow), Some(now)) = (self.flows.get_mut(handle), self.now) else { return };
        if is_home {
            flow.turn = 0;
        }
        if flow.turn > 0 {
            let at = now + flow.home_after;
            self.timers.go_home_at(flow, at);
        }
    }

    /// Has flows return whose time has come. Returns whether there were any.
    pub(in crate::rdma) fn return_home(&mut self, now: Instant) -> bool {
        let due = self.timers.take_going_home(&self.flows, now);
        for handle in due.iter().copied() {
            if let Some(flow) = self.flows.get_mut(handle) {
                flow.home_after = (2 * flow.home_after).min(HOME_AFTER_MAX);
            }
            self.break_connection(handle, Fault::NoPort);
        }
        !due.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::rdma::device::ports;
    use crate::rdma::options::RdmaOptions;
    use crate::rdma::verbs::Driver;
    use crate::rdma::verbs::fake::{Fabric, FabricOptions};

    #[test]
    fn all_pairs_of_ports_have_their_turn_and_counterparts_the_first() {
        for count in 1..5usize {
            let driver: Arc<dyn Driver> = Fabric::new(FabricOptions::default()).add_host(count as u8);
            let ports = ports::find(&driver, &RdmaOptions::default()).expect("ports").ports;
            for home in 0..count {
                let pair = |turn| {
                    let (here, round) = port_of_turn(&ports, home, turn);
                    [here, port_of_turn(&ports, here, round).0]
                };
                let mut pairs: Vec<_> = (0..(count * count) as u32).map(pair).collect();
                assert_eq!(pairs[0], [home, home]);
                assert!(pairs.iter().take(count).all(|[here, there]| here == there), "{pairs:?}");
                pairs.sort_unstable();
                pairs.dedup();
                assert_eq!(pairs.len(), count * count);
            }
            // A peer with more ports may be at home where this host has none.
            assert_eq!(port_of_turn(&ports, count + 1, 0), ((count + 1) % count, 0));
        }
    }
}
