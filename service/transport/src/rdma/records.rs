//! Handles the peer's records on the control channel: offers, answers, ends.

use std::time::Instant;

use mccs_ipc::types::Handle;

use super::RdmaTransport;
use super::connection::wire::Record;
use super::failover::handshake::{Answer, Offer, fault_of, ready};
use super::flow::{Half, Stage};
use crate::Fault;

impl RdmaTransport {
    /// Something has happened on a flow's control channel.
    pub(super) fn heard(&mut self, handle: Handle, now: Instant) {
        let Some(flow) = self.flows.get(handle).filter(|flow| flow.fault.is_none() && !flow.is_hung_up) else { return };
        if flow.stage == Stage::Calling && self.flows.channels().has_reached(&flow.control) {
            self.offer_connection(handle, now);
        }
        loop {
            match self.flows.hear(handle) {
                Ok(None) => return,
                Ok(Some(record)) => {
                    if let Err(fault) = self.told(handle, record, now) {
                        self.flows.fail(handle, fault, &mut self.carrier);
                    }
                }
                Err(error) => {
                    // Writes of the peer's device count.
                    while self.take_completions(usize::MAX) {}
                    self.flows.hung_up(handle, fault_of(&error), now, &mut self.carrier);
                }
            }
        }
    }

    fn told(&mut self, handle: Handle, record: Record, now: Instant) -> Result<(), Fault> {
        let ports = self.carrier.devices.len().max(1);
        let flow = self.flows.get_mut(handle).ok_or(Fault::Closed)?;
        let is_sender = matches!(flow.half, Half::Send(_));
        match record {
            Record::Offer { connection, home, turn, side, ring, part_bytes, back }
                if !is_sender && connection > flow.connection_number =>
            {
                let own = flow.spec.options.home.as_ref().and_then(|own| self.carrier.devices.named(own).ok());
                (flow.connection_number, flow.home, flow.turn) =
                    (connection, own.unwrap_or(home as usize % ports), turn);
                self.answer(handle, Offer { side, ring, part_bytes, back }, now);
            }
            Record::Answer { connection, is_home, side, received, taken, inbox }
                if is_sender && connection == flow.connection_number =>
            {
                if flow.stage == Stage::Offered {
                    let answer = Answer { side, is_home, counts: (received, taken), inbox };
                    let broken = self.handshakes.answered(handle, &answer, now, &mut self.flows, &mut self.carrier)?;
                    broken.into_iter().for_each(|fault| self.break_connection(handle, fault));
                }
            }
            Record::Ready { connection }
                if !is_sender && connection == flow.connection_number && flow.stage == Stage::Answered =>
            {
                ready(handle, &mut self.flows);
                self.failover.opened(handle, &mut self.flows, &self.carrier);
            }
            Record::Again { connection, status } if is_sender => {
                // The device's word on the connection says more, if there is one: why it failed.
                while self.take_completions(usize::MAX) {}
                let broken =
                    self.flows.get(handle).filter(|flow| connection == flow.connection_number && flow.fault.is_none());
                if broken.is_some_and(|flow| matches!(flow.stage, Stage::Open | Stage::Offered | Stage::Connecting)) {
                    let fault = if status == 0 { Fault::NoPeerPort } else { Fault::PeerQueuePair { status } };
                    self.break_connection(handle, fault);
                }
            }
            Record::TooLong { message, bytes } => {
                let Half::Recv(receiver) = &mut flow.half else { return Err(Fault::Protocol("a receiver sends")) };
                receiver.refuse(message, bytes);
                self.flows.enqueue(handle);
            }
            Record::Bye { messages } => flow.bye = Some(messages),
            // A record of a connection that is no more.
            Record::Offer { .. } | Record::Answer { .. } | Record::Ready { .. } => {}
            Record::Again { .. } => return Err(Fault::Protocol("a record is the other side's")),
        }
        Ok(())
    }

    /// The sender offers a connection, or has another one broken for it.
    pub(super) fn offer_connection(&mut self, handle: Handle, now: Instant) {
        let Some(flow) = self.flows.get(handle) else { return };
        let is_connected = flow.is_connected;
        if let Err(fault) = self.handshakes.offer(handle, now, &mut self.flows, &mut self.carrier) {
            // A flow does not begin before there is a port.
            if is_connected || fault != Fault::NoPort {
                self.break_connection(handle, fault);
            } else {
                self.flows.fail(handle, fault, &mut self.carrier);
            }
        }
    }

    /// The receiver takes an offer, or refuses it.
    fn answer(&mut self, handle: Handle, offer: Offer, now: Instant) {
        // Messages on the connection before count.
        while self.take_completions(usize::MAX) {}
        if let Err(fault) = self.handshakes.answer(handle, offer, now, &mut self.flows, &mut self.carrier) {
            self.handshakes.refuse(handle, fault, &mut self.flows, &mut self.carrier);
        }
    }
}
