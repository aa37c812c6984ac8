//! Flows until they are connected, and what their lines say. From way to way: `failover.rs`; their end: `ending.rs`.
//!
//! ```text
//! sender    Calling --reached--> Offered --Answer--> Connecting --> Open --broken--> Broken --a pause--> Offered ...
//! receiver  Waiting --Offer----> Connecting --> Answered --Ready--> Open --broken, tells--> Waiting ...
//! ```

use std::time::Instant;

use mccs_ipc::types::Handle;

use super::super::{
    CONNECTIONS_MAX, FLOWS_MAX, FLOWS_PER_LISTENER_MAX, Fault, FlowSpec, ListenOptions, Listener, ListenerHandle,
    Transport, TransportError,
};
use super::flow::{Flow, Half, Stage};
use super::line::Line;
use super::options::SOURCE_PORT_MIN;
use super::ports;
use super::receiver::Receiver;
use super::sender::Sender;
use super::wire::{self, Record};
use super::{NO_FLOW, RdmaTransport};

/// A listener to which receivers come back.
#[derive(Debug)]
pub(super) struct Back {
    listener: Listener,
    handle: ListenerHandle,
    next_number: u64,
}

/// What an error of a flow's line means for the flow.
pub(super) fn fault_of(error: &TransportError) -> Fault {
    match error {
        TransportError::Flow { fault, .. } => *fault,
        TransportError::Os { call, reason } => Fault::Os { call, reason: *reason },
        _ => Fault::Protocol("its side of the line cannot be made"),
    }
}

impl RdmaTransport {
    pub(super) fn open_sender(
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
        let home = match &options.device {
            Some(device) => ports::named(&self.ports, device)?,
            None => self.options.turn % self.ports.len().max(1),
        };
        let tcp = wire::from_handle(listener)?;
        let message_bytes = self.ports.iter().map(|port| port.attributes.message_bytes).min().unwrap_or(u32::MAX);
        let part_bytes = options.chunk_bytes.min(message_bytes.max(super::super::options::CHUNK_BYTES_MIN));
        let half = Half::Send(Sender::new(options.requests, part_bytes, options.connections.min(CONNECTIONS_MAX)));
        let line = Line::call(&mut self.tcp, &tcp, spec, now)?;
        self.add(Flow { home, ..Flow::new(spec, half, line, Stage::Calling) })
    }

    pub(super) fn open_receiver(
        &mut self,
        listener: Listener,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<Handle, TransportError> {
        self.now = Some(now);
        spec.options.validate()?;
        let half = Half::Recv(Receiver::new(spec.options.requests, spec.options.takes_short));
        let line = Line::answer(&mut self.tcp, listener, spec, now)?;
        self.add(Flow::new(spec, half, line, Stage::Waiting))
    }

    fn add(&mut self, flow: Flow) -> Result<Handle, TransportError> {
        let lines: Vec<_> = flow.line.flows().collect();
        match self.flows.insert(flow) {
            Ok(handle) => {
                self.by_line.extend(lines.into_iter().map(|line| (line, handle)));
                // A flow is in the queue at most once, so that the data path does not allocate.
                self.queue.reserve(self.flows.len());
                self.withheld.reserve(self.flows.len());
                self.lines_said = crate::runtime::Progress::Busy;
                Ok(handle)
            }
            Err(mut flow) => {
                flow.line.end(&mut self.tcp);
                Err(TransportError::TooMany { what: "flows", limit: FLOWS_MAX })
            }
        }
    }

    /// A flow has to be looked at when this has passed.
    pub(super) fn settle_by(&mut self, handle: Handle, due: Option<Instant>) {
        if let Some(flow) = self.flows.get_mut(handle) {
            flow.due = due;
            if due.is_some() && !self.unsettled.contains(&handle) {
                self.unsettled.push(handle);
            }
        }
    }

    /// Does what is due.
    pub(super) fn look_at_unsettled(&mut self, now: Instant) -> bool {
        if self.unsettled.is_empty() {
            return false;
        }
        let is_unsettled = |flow: &Flow| flow.fault.is_none() && flow.due.is_some();
        self.unsettled.retain(|handle| self.flows.get(*handle).is_some_and(is_unsettled));
        let is_due = |handle: &Handle| self.flows.get(*handle).and_then(|flow| flow.due).is_some_and(|due| due <= now);
        let due: Vec<Handle> = self.unsettled.iter().copied().filter(is_due).collect();
        for handle in &due {
            let Some(flow) = self.flows.get_mut(*handle) else { continue };
            flow.due = None;
            let (timeout, is_sender) = (flow.spec.options.connect_timeout, matches!(flow.half, Half::Send(_)));
            match flow.stage {
                _ if flow.is_hung_up => self.fail(*handle, Fault::Closed),
                Stage::Broken => self.begin_way(*handle, now),
                Stage::Connecting if let (false, Some(trouble)) = (is_sender, flow.trouble) => {
                    self.fail(*handle, trouble.fault);
                }
                Stage::Offered | Stage::Connecting | Stage::Answered if !flow.is_connected => {
                    self.fail(*handle, Fault::ConnectTimeout { after_ms: timeout.as_millis() as u64 });
                }
                Stage::Offered | Stage::Connecting | Stage::Answered => {
                    self.break_way(*handle, Fault::Lost(nix::errno::Errno::ETIMEDOUT));
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
    pub(super) fn await_back(&mut self, handle: Handle, now: Instant) -> Result<(Vec<u8>, u64), TransportError> {
        let flow = self.flows.get_mut(handle).ok_or(NO_FLOW)?;
        if flow.ways > 1 {
            return Ok((Vec::new(), 0));
        }
        let source = flow.line.source_address(&self.tcp).ok_or(TransportError::NoSuch("address of this host"))?;
        if self.backs.get(&source).is_some_and(|back| back.next_number as usize >= FLOWS_PER_LISTENER_MAX / 2) {
            // Flows that are connected stay; a listener remembers the numbers of all that were.
            if let Some(back) = self.backs.remove(&source) {
                self.tcp.close_listener(back.listener);
            }
        }
        if !self.backs.contains_key(&source) {
            let (listener, listener_handle) = self.tcp.listen(&ListenOptions::new(source))?;
            self.backs.insert(source, Back { listener, handle: listener_handle, next_number: 0 });
        }
        let back = self.backs.get_mut(&source).ok_or(NO_FLOW)?;
        let number = back.next_number;
        back.next_number += 1;
        let spec = FlowSpec { number, ..flow.spec.clone() };
        flow.line.await_back(&mut self.tcp, back.listener, &spec, now)?;
        self.by_line.extend(flow.line.flows().map(|line| (line, handle)));
        Ok((back.handle.as_bytes().to_vec(), number))
    }

    /// Something has happened on a flow's line.
    pub(super) fn heard(&mut self, handle: Handle, now: Instant) {
        let Some(flow) = self.flows.get(handle).filter(|flow| flow.fault.is_none() && !flow.is_hung_up) else { return };
        if flow.stage == Stage::Calling && flow.line.has_reached(&self.tcp) {
            self.begin_way(handle, now);
        }
        while let Some(flow) = self.flows.get_mut(handle).filter(|flow| flow.fault.is_none() && !flow.is_hung_up) {
            match flow.line.hear(&mut self.tcp) {
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
        let ports = self.ports.len().max(1);
        let flow = self.flows.get_mut(handle).ok_or(Fault::Closed)?;
        let is_sender = matches!(flow.half, Half::Send(_));
        match record {
            Record::Offer { way, home, turn, side, ring, part_bytes, back } if !is_sender && way > flow.ways => {
                (flow.ways, flow.home, flow.turn) = (way, home as usize % ports, turn);
                if let Err(fault) = self.answer(handle, &side, (ring, part_bytes), &back, now) {
                    self.refuse_offer(handle, fault);
                }
            }
            Record::Answer { way, is_home, side, received, taken, inbox } if is_sender && way == flow.ways => {
                if flow.stage == Stage::Offered {
                    self.answered(handle, &side, (received, taken), inbox, is_home)?;
                }
            }
            Record::Ready { way } if !is_sender && way == flow.ways && flow.stage == Stage::Answered => {
                (flow.stage, flow.is_connected, flow.trouble) = (Stage::Open, true, None);
                self.settle_by(handle, None);
                self.has_opened(handle);
            }
            Record::Again { way, status } if is_sender => {
                // What the device says of the way says more, where it has said it: why it failed.
                while self.take_completions(usize::MAX) {}
                let broken = self.flows.get(handle).filter(|flow| way == flow.ways && flow.fault.is_none());
                if broken.is_some_and(|flow| matches!(flow.stage, Stage::Open | Stage::Offered | Stage::Connecting)) {
                    let fault = if status == 0 { Fault::NoPeerPort } else { Fault::PeerQueuePair { status } };
                    self.break_way(handle, fault);
                }
            }
            Record::TooLong { message, bytes } => {
                let Half::Recv(receiver) = &mut flow.half else { return Err(Fault::Protocol("a receiver sends")) };
                receiver.refuse(message, bytes);
                self.enqueue(handle);
            }
            Record::Bye { messages } => flow.bye = Some(messages),
            // Of a way that is no more.
            Record::Offer { .. } | Record::Answer { .. } | Record::Ready { .. } => {}
            Record::Again { .. } => return Err(Fault::Protocol("a record is the other side's")),
        }
        Ok(())
    }

    /// Says something to the peer; a line that has ended is heard of elsewhere.
    pub(super) fn say(&mut self, handle: Handle, record: Record) {
        if let Some(flow) = self.flows.get_mut(handle) {
            let _ = flow.line.say(&mut self.tcp, record);
            self.lines_said = crate::runtime::Progress::Busy;
        }
    }
}
