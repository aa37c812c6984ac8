//! Failover of RDMA flows: port down, queue pair error, silent peer; next port, back-off, and
//! return home. It says which port a flow's next connection takes, how both sides make it, and what
//! follows when it breaks.
//!
//! ```text
//! a port is down, or its address or device gone   the next port that is up; home at once when it is back
//! a queue pair has failed by itself               the same port again
//! nobody answers, though all links are up         the next pair of ports, and so on round; home is tried again later
//! ```
//!
//! A flow's *turn* counts the pairs of ports that were tried in vain. The sender takes its ports in turn, from home on: the port of the device that its
//! path names, or else that of its engine's turn. It tells the receiver the place of its port, and how many rounds it has made: the receiver takes the port at
//! the same place, and one further for each round. So counterparts come first. A receiver whose flow has a home of its own begins there instead.
//!
//! [`Failover`] decides what a broken connection means. [`Handshakes`](handshake::Handshakes) makes the next one, `keepalive.rs` finds those
//! that say nothing, and `hotplug.rs` sees to devices that go and come back.

pub(in crate::rdma) mod handshake;
pub(in crate::rdma) mod hotplug;
pub(in crate::rdma) mod keepalive;

use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;
use nix::errno::Errno;

use crate::rdma::connection::wire::Record;
use crate::rdma::data_path::carrier::Carrier;
use crate::rdma::flow::{Flow, HOME_AFTER_MAX, Half, Stage, Trouble};
use crate::rdma::flow_events::FlowEvents;
use crate::rdma::flows::Flows;
use crate::rdma::verbs::{is_of_connection, is_silence};
use crate::{Fault, FlowId, SendFlow};

/// Pause before a broken connection is tried again; doubles with every attempt.
const PAUSE: Duration = Duration::from_millis(10);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Whether a device of either side has been answered by nobody.
fn nobody_answers(fault: Fault) -> bool {
    matches!(fault, Fault::QueuePair { status, .. } | Fault::PeerQueuePair { status } if is_silence(status))
}

/// The fault of a flow that has been in trouble for too long. A host without a port hears of nobody, and knows why.
pub(in crate::rdma) fn blamed(first: Fault, carrier: &Carrier) -> Fault {
    let is_cut_off = !carrier.devices.ports().iter().any(|port| port.is_up);
    if is_cut_off && first != Fault::Closed { Fault::NoPort } else { first }
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

/// See the module's documentation.
#[derive(Debug, Default)]
pub(in crate::rdma) struct Failover {
    events: FlowEvents,
}

impl Failover {
    /// News of flows, for the transport's user.
    pub(in crate::rdma) fn events(&mut self) -> &mut FlowEvents {
        &mut self.events
    }

    /// Something of a flow has gone wrong. A fault that another connection may not have only breaks this one: a device that is gone says so
    /// of every call, also before anybody has looked at its completions.
    pub(in crate::rdma) fn stumble(&mut self, handle: Handle, fault: Fault, flows: &mut Flows, carrier: &mut Carrier) {
        let may_do_better = match fault {
            Fault::QueuePair { status, .. } => is_of_connection(status),
            Fault::Os { reason, .. } => matches!(reason, Errno::EIO | Errno::ENODEV),
            _ => false,
        };
        if may_do_better {
            self.break_connection(handle, fault, flows, carrier);
        } else {
            flows.fail(handle, fault, carrier);
        }
    }

    /// A flow's connection carries nothing any more: another one, unless it has been so for too long.
    pub(in crate::rdma) fn break_connection(
        &mut self,
        handle: Handle,
        fault: Fault,
        flows: &mut Flows,
        carrier: &mut Carrier,
    ) {
        let Some(now) = flows.timers().now() else { return };
        // A flow that has been hung up on needs no connection: its messages are there.
        let lives = |flow: &&mut Flow| flow.fault.is_none() && !flow.is_hung_up;
        let Some(flow) = flows.get_mut(handle).filter(lives) else { return };
        let is_sender = matches!(flow.half, Half::Send(_));
        if is_sender {
            carrier.end_connection(flow);
        } else if flow.stage == Stage::Waiting {
            return;
        }
        // A receiver keeps its own: what its sender's device knows to have arrived counts, also if nobody has looked yet. The answer to the
        // next offer takes it, and ends the connection.
        let trouble = flow.trouble.get_or_insert(Trouble { since: now, attempts: 0, fault });
        trouble.attempts += 1;
        let options = &flow.spec.options;
        let patience = if flow.is_connected { options.silence_timeout } else { options.connect_timeout };
        let (give_up_at, attempts, first) = (trouble.since + patience, trouble.attempts, trouble.fault);
        if now >= give_up_at {
            return flows.fail(handle, blamed(first, carrier), carrier);
        }
        if nobody_answers(fault) && flow.turn == 0 && is_sender {
            self.events.dead_path(SendFlow(FlowId(handle)), flow.spec.options.path());
        }
        flow.turn = next_turn(flow.turn, fault, attempts > 1);
        (flow.home_at, flow.silent_since, flow.answering) = (None, None, None);
        self.log(flow, fault, now);
        self.events.port(FlowId(handle), None);
        if is_sender {
            flow.stage = Stage::Broken;
            let pause = PAUSE.saturating_mul(1 << (attempts - 1).min(10)).min(PAUSE_MAX);
            let due = if attempts == 1 { now } else { (now + pause).min(give_up_at) };
            flows.settle_by(handle, Some(due));
        } else {
            flow.stage = Stage::Waiting;
            let connection = flow.connection_number;
            flows.settle_by(handle, Some(give_up_at));
            let status = if let Fault::QueuePair { status, .. } = fault { status } else { 0 };
            flows.say(handle, Record::Again { connection, status });
        }
    }

    fn log(&mut self, flow: &Flow, fault: Fault, now: Instant) {
        let (peer, number, connection) = (&flow.spec.peer, flow.spec.number, flow.connection_number);
        // The log of a host's service tells what its own ports have said, or the peer's.
        let is_known = matches!(fault, Fault::NoPort | Fault::NoPeerPort);
        match if is_known { None } else { self.events.may_log(now) } {
            Some(more) => {
                tracing::warn!(peer, flow = number, connection, %fault, more, "a flow's connection has broken; it makes another")
            }
            None => tracing::debug!(peer, flow = number, connection, %fault, "a flow leaves its connection"),
        }
    }

    /// A flow's connection is open.
    pub(in crate::rdma) fn opened(&mut self, handle: Handle, flows: &mut Flows, carrier: &Carrier) {
        let port = flows.get(handle).and_then(|flow| carrier.devices.port(flow.connection.as_ref()?.port));
        if let Some(port) = port {
            self.events.port(FlowId(handle), Some(port.name()));
        }
        flows.enqueue(handle);
    }

    /// Has flows return home whose time has come. Returns whether there were any.
    pub(in crate::rdma) fn return_home(&mut self, now: Instant, flows: &mut Flows, carrier: &mut Carrier) -> bool {
        let due = flows.take_going_home(now);
        for handle in due.iter().copied() {
            if let Some(flow) = flows.get_mut(handle) {
                flow.home_after = (2 * flow.home_after).min(HOME_AFTER_MAX);
            }
            self.break_connection(handle, Fault::NoPort, flows, carrier);
        }
        !due.is_empty()
    }

    /// Flows on a port need other connections, and what was to be flushed by it is flushed by another.
    pub(in crate::rdma) fn leave_port(&mut self, place: usize, fault: Fault, flows: &mut Flows, carrier: &mut Carrier) {
        carrier.devices.end_flusher(place);
        on_connections(flows, |_, port| port == place)
            .into_iter()
            .for_each(|handle| self.break_connection(handle, fault, flows, carrier));
    }

    /// A port is back: flows on ports that they like less return.
    pub(in crate::rdma) fn come_home(&mut self, place: usize, flows: &mut Flows, carrier: &mut Carrier) {
        let count = carrier.devices.len();
        let is_worse = |flow: &Flow, port| flow.rank_of(port, count) > flow.rank_of(place, count);
        on_connections(flows, is_worse)
            .into_iter()
            .for_each(|handle| self.break_connection(handle, Fault::NoPort, flows, carrier));
        // Those that wait for a port need not wait on.
        let now = flows.timers().now();
        for handle in flows.timers().unsettled() {
            if let Some(flow) = flows.get_mut(handle).filter(|flow| flow.stage == Stage::Broken) {
                (flow.due, flow.turn) = (now, 0);
            }
        }
    }
}

/// A flow that is away from home since nobody answered there tries it again later: no event will tell.
pub(in crate::rdma) fn plan_return(handle: Handle, is_home: bool, flows: &mut Flows) {
    let now = flows.timers().now();
    let (Some(flow), Some(now)) = (flows.get_mut(handle), now) else { return };
    if is_home {
        flow.turn = 0;
    }
    if flow.turn > 0 {
        let at = now + flow.home_after;
        flows.go_home_at(handle, at);
    }
}

/// Flows that have a connection, by its port.
fn on_connections(flows: &Flows, matches: impl Fn(&Flow, usize) -> bool) -> Vec<Handle> {
    let is_on = |(handle, flow): (Handle, &Flow)| {
        flow.connection.as_ref().is_some_and(|connection| matches(flow, connection.port)).then_some(handle)
    };
    flows.iter().filter_map(is_on).collect()
}
