//! Flows until they are connected, and what their control channels say. From connection to connection: `failover/`; their end: `close.rs`.
//!
//! ```text
//! sender    Calling --reached--> Offered --Answer--> Connecting --> Open --broken--> Broken --a pause--> Offered ...
//! receiver  Waiting --Offer----> Connecting --> Answered --Ready--> Open --broken, tells--> Waiting ...
//! ```

use std::time::Instant;

use mccs_ipc::types::Handle;

use crate::rdma::RdmaTransport;
use crate::rdma::connection::wire::Record;
use crate::rdma::data_path::receiver::Receiver;
use crate::rdma::data_path::sender::Sender;
use crate::rdma::flow::{Flow, Half, Stage};
use crate::rdma::options::SOURCE_PORT_MIN;
use crate::{CONNECTIONS_MAX, Fault, FlowSpec, Listener, ListenerHandle, TransportError};

/// What an error of a flow's control channel means for the flow.
pub(in crate::rdma) fn fault_of(error: &TransportError) -> Fault {
    match error {
        TransportError::Flow { fault, .. } => *fault,
        TransportError::Os { call, reason } => Fault::Os { call, reason: *reason },
        _ => Fault::Protocol("its side of the control channel cannot be made"),
    }
}

impl RdmaTransport {
    pub(in crate::rdma) fn open_sender(
        &mut self,
        listener: &ListenerHandle,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<Handle, TransportError> {
        self.now = Some(now);
        let options = &spec.options;
        options.validate()?;
        if let Some(range) = options.source_ports.filter(|range| range.first < SOURCE_PORT_MIN) {
            let problem = format!("must be within {SOURCE_PORT_MIN}-65535, where RoCE v2 sends from, not {range}");
            return Err(TransportError::Option { option: "source_ports", problem });
        }
        let home = match (&options.device, &options.home) {
            (Some(device), _) | (None, Some(device)) => self.devices.named(device)?,
            (None, None) => self.devices.options().turn % self.devices.len().max(1),
        };
        let message_bytes =
            self.devices.ports().iter().map(|port| port.attributes.message_bytes).min().unwrap_or(u32::MAX);
        let part_bytes = options.chunk_bytes.min(message_bytes.max(crate::options::CHUNK_BYTES_MIN));
        let half = Half::Send(Sender::new(options.requests, part_bytes, options.connections.min(CONNECTIONS_MAX)));
        let control = self.channels.call(listener, spec, now)?;
        self.add(Flow { home, ..Flow::new(spec, half, control, Stage::Calling) })
    }

    pub(in crate::rdma) fn open_receiver(
        &mut self,
        listener: Listener,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<Handle, TransportError> {
        self.now = Some(now);
        spec.options.validate()?;
        let half = Half::Recv(Receiver::new(spec.options.requests, spec.options.takes_short));
        let control = self.channels.answer(listener, spec, now)?;
        self.add(Flow::new(spec, half, control, Stage::Waiting))
    }

    fn add(&mut self, flow: Flow) -> Result<Handle, TransportError> {
        match self.flows.insert(flow) {
            Ok(handle) => {
                if let Some(flow) = self.flows.get(handle) {
                    self.channels.own(&flow.control, handle);
                }
                self.scheduler.reserve(self.flows.len());
                Ok(handle)
            }
            Err(mut flow) => {
                self.channels.end(&mut flow.control);
                Err(TransportError::TOO_MANY_FLOWS)
            }
        }
    }

    /// A flow has to be looked at when this has passed.
    pub(in crate::rdma) fn settle_by(&mut self, handle: Handle, due: Option<Instant>) {
        if let Some(flow) = self.flows.get_mut(handle) {
            self.timers.settle_by(handle, flow, due);
        }
    }

    /// Does what is due.
    pub(in crate::rdma) fn look_at_unsettled(&mut self, now: Instant) -> bool {
        let due = self.timers.take_due(&mut self.flows, now);
        for handle in &due {
            let Some(flow) = self.flows.get_mut(*handle) else { continue };
            let (timeout, is_sender) = (flow.spec.options.connect_timeout, matches!(flow.half, Half::Send(_)));
            match flow.stage {
                _ if flow.is_hung_up => self.fail(*handle, Fault::Closed),
                Stage::Broken => self.offer_connection(*handle, now),
                Stage::Connecting if let (false, Some(trouble)) = (is_sender, flow.trouble) => {
                    self.fail(*handle, trouble.fault);
                }
                Stage::Offered | Stage::Connecting | Stage::Answered if !flow.is_connected => {
                    self.fail(*handle, Fault::ConnectTimeout { after_ms: timeout.as_millis() as u64 });
                }
                Stage::Offered | Stage::Connecting | Stage::Answered => {
                    self.break_connection(*handle, Fault::Lost(nix::errno::Errno::ETIMEDOUT));
                }
                Stage::Waiting => {
                    let fault = flow.trouble.map_or(Fault::Closed, |trouble| trouble.fault);
                    self.fail(*handle, fault);
                }
                Stage::Calling | Stage::Open => {}
            }
        }
        !due.is_empty()
    }

    /// Where the receiver comes back to; after the first time that means nothing.
    pub(in crate::rdma) fn await_back(
        &mut self,
        handle: Handle,
        now: Instant,
    ) -> Result<(Vec<u8>, u64), TransportError> {
        let flow = self.flows.get_mut(handle).ok_or(TransportError::NO_FLOW)?;
        if flow.connection_number > 1 {
            return Ok((Vec::new(), 0));
        }
        self.channels.await_return(&mut flow.control, handle, &flow.spec, now)
    }

    /// Something has happened on a flow's control channel.
    pub(in crate::rdma) fn heard(&mut self, handle: Handle, now: Instant) {
        let Some(flow) = self.flows.get(handle).filter(|flow| flow.fault.is_none() && !flow.is_hung_up) else { return };
        if flow.stage == Stage::Calling && self.channels.has_reached(&flow.control) {
            self.offer_connection(handle, now);
        }
        while let Some(flow) = self.flows.get_mut(handle).filter(|flow| flow.fault.is_none() && !flow.is_hung_up) {
            match self.channels.hear(&mut flow.control) {
                Ok(None) => return,
                Ok(Some(record)) => {
                    if let Err(fault) = self.told(handle, record, now) {
                        self.fail(handle, fault);
                    }
                }
                Err(error) => self.hung_up(handle, fault_of(&error), now),
            }
        }
    }

    fn told(&mut self, handle: Handle, record: Record, now: Instant) -> Result<(), Fault> {
        let ports = self.devices.len().max(1);
        let flow = self.flows.get_mut(handle).ok_or(Fault::Closed)?;
        let is_sender = matches!(flow.half, Half::Send(_));
        match record {
            Record::Offer { connection, home, turn, side, ring, part_bytes, back }
                if !is_sender && connection > flow.connection_number =>
            {
                (flow.connection_number, flow.home, flow.turn) = (connection, home as usize % ports, turn);
                if let Err(fault) = self.answer(handle, &side, (ring, part_bytes), &back, now) {
                    self.refuse_offer(handle, fault);
                }
            }
            Record::Answer { connection, is_home, side, received, taken, inbox }
                if is_sender && connection == flow.connection_number =>
            {
                if flow.stage == Stage::Offered {
                    self.answered(handle, &side, (received, taken), inbox, is_home)?;
                }
            }
            Record::Ready { connection }
                if !is_sender && connection == flow.connection_number && flow.stage == Stage::Answered =>
            {
                (flow.stage, flow.is_connected, flow.trouble) = (Stage::Open, true, None);
                self.settle_by(handle, None);
                self.has_opened(handle);
            }
            Record::Again { connection, status } if is_sender => {
                // What the device says of the connection says more, where it has said it: why it failed.
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
                self.enqueue(handle);
            }
            Record::Bye { messages } => flow.bye = Some(messages),
            // Of a connection that is no more.
            Record::Offer { .. } | Record::Answer { .. } | Record::Ready { .. } => {}
            Record::Again { .. } => return Err(Fault::Protocol("a record is the other side's")),
        }
        Ok(())
    }

    /// Says something to the peer; a control channel that has ended is heard of elsewhere.
    pub(in crate::rdma) fn say(&mut self, handle: Handle, record: Record) {
        if let Some(flow) = self.flows.get_mut(handle) {
            self.channels.say(&mut flow.control, record);
        }
    }
}
