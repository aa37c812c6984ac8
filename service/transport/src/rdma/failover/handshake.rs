//! Handshake of an RDMA connection: both sides of a flow agree on ports and queue pairs.
//!
//! ```text
//! sender    Calling --reached--> Offered --Answer--> Connecting --> Open --broken--> Broken --a pause--> Offered ...
//! receiver  Waiting --Offer----> Connecting --> Answered --Ready--> Open --broken, tells--> Waiting ...
//! ```
//!
//! [`Handshakes`] owns the worker that connects queue pairs. A failed agreement is returned: whether the flow goes on elsewhere is for
//! `failover/mod.rs` to say.

use std::sync::Arc;
use std::time::Instant;

use mccs_ipc::types::Handle;

use crate::rdma::connection::connector::{Connected, Connector, Job};
use crate::rdma::connection::wire::{Record, RingAddress, SideAddress};
use crate::rdma::data_path::carrier::Carrier;
use crate::rdma::flow::{Answering, Flow, Half, Stage};
use crate::rdma::flows::Flows;
use crate::rdma::verbs::VerbsError;
use crate::{Fault, ListenerHandle, TransportError};

/// Fault of a flow after an error of its control channel.
pub(in crate::rdma) fn fault_of(error: &TransportError) -> Fault {
    match error {
        TransportError::Flow { fault, .. } => *fault,
        TransportError::Os { call, reason } => Fault::Os { call, reason: *reason },
        _ => Fault::Protocol("its side of the control channel cannot be made"),
    }
}

/// A connection that a sender offers.
#[derive(Debug)]
pub(in crate::rdma) struct Offer {
    pub(in crate::rdma) side: SideAddress,
    pub(in crate::rdma) ring: RingAddress,
    pub(in crate::rdma) part_bytes: u32,
    /// Address to which the receiver comes back, and the number there; empty after the first time.
    pub(in crate::rdma) back: (Vec<u8>, u64),
}

/// A receiver's answer.
#[derive(Debug)]
pub(in crate::rdma) struct Answer {
    pub(in crate::rdma) side: SideAddress,
    /// It is on the port that it prefers.
    pub(in crate::rdma) is_home: bool,
    /// Messages that it has received, and taken.
    pub(in crate::rdma) counts: (u64, u64),
    pub(in crate::rdma) inbox: Option<RingAddress>,
}

/// The result of a flow whose queue pairs were being connected.
#[derive(Debug)]
pub(in crate::rdma) enum Outcome {
    /// Nothing that others need to know.
    Noted,
    /// The sender's connection is open; whether both sides are at home.
    Opened { is_home: bool },
    /// The sender's connection cannot be had.
    Broken(Fault),
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct Handshakes {
    connector: Connector,
}

impl Handshakes {
    /// Nothing is agreed on yet.
    ///
    /// # Errors
    /// The kernel refuses a descriptor.
    pub(in crate::rdma) fn new() -> Result<Self, VerbsError> {
        Ok(Handshakes { connector: Connector::new()? })
    }

    /// The worker that connects queue pairs.
    pub(in crate::rdma) fn connector(&self) -> &Connector {
        &self.connector
    }

    #[cfg(test)]
    pub(in crate::rdma) fn connector_mut(&mut self) -> &mut Connector {
        &mut self.connector
    }

    /// The sender offers a connection.
    pub(in crate::rdma) fn offer(
        &mut self,
        handle: Handle,
        now: Instant,
        flows: &mut Flows,
        carrier: &mut Carrier,
    ) -> Result<(), Fault> {
        let flow = flows.get_mut(handle).ok_or(Fault::Closed)?;
        let connection = carrier.make_connection(handle, flow, flow.spec.options.connections)?;
        let side = connection.address(carrier.devices.ports(), carrier.devices.options());
        let (rkey, port) = (connection.ring.rkey, connection.port);
        flow.connection = Some(connection);
        flow.connection_number += 1;
        flow.stage = Stage::Offered;
        let (number, connect_timeout) = (flow.connection_number, flow.spec.options.connect_timeout);
        let (home, (_, turn)) = (port as u32, carrier.devices.port_of_turn(flow.home, flow.turn));
        let Half::Send(sender) = &mut flow.half else { return Err(Fault::Protocol("bug: a receiver offers")) };
        let ring = RingAddress { address: sender.shared().0, rkey, slots: sender.slots() };
        let part_bytes = sender.part_bytes();
        let back = flows.await_return(handle, now).map_err(|error| fault_of(&error))?;
        flows.settle_by(handle, Some(now + connect_timeout));
        flows.say(handle, Record::Offer { connection: number, home, turn, side, ring, part_bytes, back });
        Ok(())
    }

    /// The receiver takes an offer: makes queue pairs, and begins to connect them. Messages on the connection before were taken.
    pub(in crate::rdma) fn answer(
        &mut self,
        handle: Handle,
        offer: Offer,
        now: Instant,
        flows: &mut Flows,
        carrier: &mut Carrier,
    ) -> Result<(), Fault> {
        let Offer { side, ring, part_bytes, back: (back, number) } = offer;
        let flow = flows.get_mut(handle).ok_or(Fault::Closed)?;
        // Nothing may come on it any more.
        carrier.end_connection(flow);
        if flow.fault.is_some() {
            return Err(Fault::Closed);
        }
        // First of all, so that the sender can be told that its connection is no good.
        if !back.is_empty() {
            let listener = ListenerHandle::from_bytes(&back).map_err(|error| fault_of(&error))?;
            flows.call_back(handle, &listener, number, now).map_err(|error| fault_of(&error))?;
        }
        let flow = flows.get_mut(handle).ok_or(Fault::Closed)?;
        let connection = carrier.make_connection(handle, flow, side.qps.len() as u16)?;
        let ours = connection.address(carrier.devices.ports(), carrier.devices.options());
        flow.came_by = connection.port;
        flow.connection = Some(connection);
        let before = flow.answering.take().map_or(flow.stage, |answering| answering.before);
        flow.answering = Some(Answering { side: ours, ring, part_bytes, before });
        self.connect(handle, &side, now, flows, carrier)
    }

    /// The receiver cannot take an offer. Over other ports it may do better, also if it begins.
    pub(in crate::rdma) fn refuse(&self, handle: Handle, fault: Fault, flows: &mut Flows, carrier: &mut Carrier) {
        let Some(flow) = flows.get_mut(handle) else { return };
        if !flow.is_connected && !matches!(fault, Fault::Os { .. }) {
            return flows.fail(handle, fault, carrier);
        }
        if let Some(answering) = flow.answering.take() {
            flow.stage = answering.before;
        }
        let connection = flow.connection_number;
        carrier.end_connection(flow);
        flows.say(handle, Record::Again { connection, status: 0 });
    }

    /// The sender has its answer, and begins to connect its queue pairs.
    ///
    /// # Errors
    /// The answer says what it should not. `Ok(Some(_))`: the connection cannot be had.
    pub(in crate::rdma) fn answered(
        &mut self,
        handle: Handle,
        answer: &Answer,
        now: Instant,
        flows: &mut Flows,
        carrier: &mut Carrier,
    ) -> Result<Option<Fault>, Fault> {
        let flow = flows.get_mut(handle).ok_or(Fault::Closed)?;
        let (Half::Send(sender), Some(_)) = (&mut flow.half, &flow.connection) else { return Ok(None) };
        let (received, taken) = answer.counts;
        sender.restart(received, taken, answer.inbox, &mut carrier.memory.regions)?;
        flow.is_peer_home = answer.is_home;
        let is_connected = flow.is_connected;
        match self.connect(handle, &answer.side, now, flows, carrier) {
            Err(fault @ Fault::Protocol(_)) if !is_connected => Err(fault),
            result => Ok(result.err()),
        }
    }

    /// Begins to connect a flow's queue pairs to the peer's.
    fn connect(
        &mut self,
        handle: Handle,
        side: &SideAddress,
        now: Instant,
        flows: &mut Flows,
        carrier: &Carrier,
    ) -> Result<(), Fault> {
        let flow = flows.get_mut(handle).ok_or(Fault::Closed)?;
        let connection = flow.connection.as_ref().ok_or(Fault::NoPort)?;
        let (ports, options) = (carrier.devices.ports(), carrier.devices.options());
        let qp_connects = connection.qp_connects(side, ports, options, &flow.spec.options)?;
        flow.stage = Stage::Connecting;
        let (port, places, peer) = (connection.port, connection.places, side.gid());
        let (number, share) = (flow.connection_number, flow.spec.options.share);
        self.connector.begin(Job { flow: handle, share, connection: number, port, peer, places, qp_connects }, now);
        Ok(())
    }

    /// Goes on where queue pairs have been connected, or could not be. `None`: there are no more.
    pub(in crate::rdma) fn next_outcome(
        &mut self,
        now: Instant,
        flows: &mut Flows,
        carrier: &mut Carrier,
    ) -> Option<(Handle, Outcome)> {
        let Connected { job, result, untold } = self.connector.take()?;
        let Job { flow: handle, connection, port, places, qp_connects, .. } = job;
        if let Some(port) = carrier.devices.port_mut(port) {
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
        let Some(flow) = flows.get(handle).filter(waits) else { return Some((handle, Outcome::Noted)) };
        let is_sender = matches!(flow.half, Half::Send(_));
        let outcome = match (result, is_sender) {
            (Ok(()), true) => open(handle, flows, carrier),
            (Ok(()), false) => {
                say_answer(handle, now, flows, carrier);
                Outcome::Noted
            }
            (Err(fault), true) => Outcome::Broken(fault),
            (Err(fault), false) => {
                self.refuse(handle, fault, flows, carrier);
                Outcome::Noted
            }
        };
        Some((handle, outcome))
    }
}

/// The receiver's queue pairs are connected: the sender may connect its own.
fn say_answer(handle: Handle, now: Instant, flows: &mut Flows, carrier: &Carrier) {
    let Some(flow) = flows.get_mut(handle) else { return };
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
    flows.settle_by(handle, Some(now + timeout));
    let is_home = carrier.devices.is_home(home, port);
    flows.say(handle, Record::Answer { connection, is_home, side, received, taken, inbox });
}

/// The sender's queue pairs are connected, and the receiver's were before.
fn open(handle: Handle, flows: &mut Flows, carrier: &Carrier) -> Outcome {
    let Some(flow) = flows.get_mut(handle) else { return Outcome::Noted };
    let (Half::Send(sender), Some(connection)) = (&mut flow.half, &flow.connection) else { return Outcome::Noted };
    if !sender.has_unfinished() {
        flow.trouble = None;
    }
    (flow.stage, flow.is_connected) = (Stage::Open, true);
    let is_home = flow.is_peer_home && carrier.devices.is_home(flow.home, connection.port);
    let number = flow.connection_number;
    flows.settle_by(handle, None);
    flows.say(handle, Record::Ready { connection: number });
    Outcome::Opened { is_home }
}

/// The sender's queue pairs are connected, as it says: the receiver's connection is open, too.
pub(in crate::rdma) fn ready(handle: Handle, flows: &mut Flows) {
    if let Some(flow) = flows.get_mut(handle) {
        (flow.stage, flow.is_connected, flow.trouble) = (Stage::Open, true, None);
    }
    flows.settle_by(handle, None);
}
