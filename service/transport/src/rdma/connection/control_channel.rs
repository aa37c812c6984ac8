//! Control channel of an RDMA flow: records over two TCP flows, one each way.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Instant;

use crate::rdma::connection::wire::{RECORD_BYTES_MAX, Record};
use crate::tcp::TcpTransport;
use crate::{
    DataPath, Fault, FlowId, FlowOptions, FlowSpec, Listener, ListenerHandle, MemoryKey, MemoryKind, MemorySpan,
    RecvFlow, Request, SendFlow, Status, Transport, TransportError,
};

/// Requests of the TCP flows.
const REQUESTS: u16 = 2;

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct ControlChannel {
    /// Owned; a pointer, since the TCP transport reads and writes through a copy of it. The first half goes out, the second
    /// one comes in.
    memory: *mut [u8; 2 * RECORD_BYTES_MAX],
    key: MemoryKey,
    out: Option<SendFlow>,
    back: Option<RecvFlow>,
    sending: Option<Request>,
    receiving: Option<Request>,
    queue: VecDeque<Record>,
}

// SAFETY: the memory is this value's own; the TCP transport that also knows it is moved with it, in one engine.
unsafe impl Send for ControlChannel {}

/// Options of the TCP flows: those of the flow, as far as they concern reaching its peer.
fn options(options: &FlowOptions) -> FlowOptions {
    FlowOptions {
        share: options.share,
        source_address: options.source_address,
        requests: REQUESTS,
        connect_timeout: options.connect_timeout,
        peer_timeout: options.peer_timeout,
        silence_timeout: options.silence_timeout,
        ..FlowOptions::default()
    }
}

fn spec(of: &FlowSpec) -> FlowSpec {
    FlowSpec { number: of.number, peer: of.peer.clone(), options: options(&of.options) }
}

impl ControlChannel {
    fn new(tcp: &mut TcpTransport) -> Result<Self, TransportError> {
        let memory = Box::into_raw(Box::new([0; 2 * RECORD_BYTES_MAX]));
        // SAFETY: freed when this value is dropped: after `end`, or with the transport, when nothing polls any more.
        let key = unsafe { tcp.register(memory.cast(), 2 * RECORD_BYTES_MAX as u64, MemoryKind::Host) };
        let key = key.inspect_err(|_| {
            // SAFETY: made above, and not registered.
            drop(unsafe { Box::from_raw(memory) });
        })?;
        let queue = VecDeque::new();
        Ok(ControlChannel { memory, key, out: None, back: None, sending: None, receiving: None, queue })
    }

    /// The control channel of a flow's sender, one half of it.
    pub(in crate::rdma) fn call(
        tcp: &mut TcpTransport,
        listener: &ListenerHandle,
        of: &FlowSpec,
        now: Instant,
    ) -> Result<Self, TransportError> {
        let mut control = ControlChannel::new(tcp)?;
        match tcp.connect(listener, &spec(of), now) {
            Ok(flow) => control.out = Some(flow),
            Err(error) => {
                control.end(tcp);
                return Err(error);
            }
        }
        Ok(control)
    }

    /// The control channel of a flow's receiver, one half of it.
    pub(in crate::rdma) fn answer(
        tcp: &mut TcpTransport,
        listener: Listener,
        of: &FlowSpec,
        now: Instant,
    ) -> Result<Self, TransportError> {
        let mut control = ControlChannel::new(tcp)?;
        match tcp.accept(listener, &spec(of), now) {
            Ok(flow) => control.back = Some(flow),
            Err(error) => {
                control.end(tcp);
                return Err(error);
            }
        }
        if let Err(error) = control.listen(tcp) {
            control.end(tcp);
            return Err(error);
        }
        Ok(control)
    }

    /// The sender's other half: the receiver comes to this listener.
    pub(in crate::rdma) fn await_back(
        &mut self,
        tcp: &mut TcpTransport,
        listener: Listener,
        of: &FlowSpec,
        now: Instant,
    ) -> Result<(), TransportError> {
        if self.back.is_none() {
            let peer_timeout = Some(of.options.connect_timeout);
            let spec = FlowSpec { options: FlowOptions { peer_timeout, ..options(&of.options) }, ..of.clone() };
            self.back = Some(tcp.accept(listener, &spec, now)?);
            self.listen(tcp)?;
        }
        Ok(())
    }

    /// The receiver's other half: to the sender's listener.
    pub(in crate::rdma) fn call_back(
        &mut self,
        tcp: &mut TcpTransport,
        listener: &ListenerHandle,
        of: &FlowSpec,
        now: Instant,
    ) -> Result<(), TransportError> {
        if self.out.is_none() {
            self.out = Some(tcp.connect(listener, &spec(of), now)?);
        }
        Ok(())
    }

    /// Its flows.
    pub(in crate::rdma) fn flows(&self) -> impl Iterator<Item = FlowId> + use<> {
        self.out.map(FlowId::from).into_iter().chain(self.back.map(FlowId::from))
    }

    fn span(&self, offset: usize, bytes: usize) -> MemorySpan {
        MemorySpan { key: self.key, offset: offset as u64, bytes: bytes as u64 }
    }

    fn listen(&mut self, tcp: &mut TcpTransport) -> Result<(), TransportError> {
        if let (Some(back), None) = (self.back, self.receiving) {
            self.receiving = tcp.irecv(back, self.span(RECORD_BYTES_MAX, RECORD_BYTES_MAX))?;
        }
        Ok(())
    }

    /// Sends a record, behind those that have not gone yet.
    pub(in crate::rdma) fn say(&mut self, tcp: &mut TcpTransport, record: Record) -> Result<(), TransportError> {
        self.queue.push_back(record);
        self.send(tcp)
    }

    fn send(&mut self, tcp: &mut TcpTransport) -> Result<(), TransportError> {
        let Some(out) = self.out else { return Ok(()) };
        loop {
            if let Some(sending) = self.sending {
                match tcp.test(sending)? {
                    Status::Running { .. } => return Ok(()),
                    Status::Done { .. } => self.sending = None,
                }
            }
            let Some(record) = self.queue.pop_front() else { return Ok(()) };
            let bytes = record.encode();
            // SAFETY: ours, and nothing is being sent from it; the halves do not overlap.
            let room = unsafe { &mut (&mut *self.memory)[..RECORD_BYTES_MAX] };
            room[..bytes.len()].copy_from_slice(&bytes);
            self.sending = tcp.isend(out, self.span(0, bytes.len()), 0)?;
        }
    }

    /// Sends on, and takes a record that has come.
    pub(in crate::rdma) fn hear(&mut self, tcp: &mut TcpTransport) -> Result<Option<Record>, TransportError> {
        let sent = self.send(tcp);
        if let Some(receiving) = self.receiving
            && let Status::Done { bytes, .. } = tcp.test(receiving)?
        {
            self.receiving = None;
            let bytes = (bytes as usize).min(RECORD_BYTES_MAX);
            // SAFETY: ours, and nothing is being received into it.
            let record = Record::decode(unsafe { &(&(*self.memory))[RECORD_BYTES_MAX..RECORD_BYTES_MAX + bytes] });
            // The end may come behind it: that is for the next time.
            let _ = self.listen(tcp);
            return record.map(Some).map_err(bad_record);
        }
        // Said last: the peer may have told why it went.
        sent?;
        self.flows().try_for_each(|flow| tcp.state(flow).map(drop))?;
        self.listen(tcp)?;
        Ok(None)
    }

    /// Whether the sender's half has reached its flow's receiver.
    pub(in crate::rdma) fn has_reached(&self, tcp: &TcpTransport) -> bool {
        self.out.is_some_and(|out| tcp.state(out.into()) == Ok(crate::FlowState::Connected))
    }

    /// This host's address, as the sender's half knows it.
    pub(in crate::rdma) fn source_address(&self, tcp: &TcpTransport) -> Option<IpAddr> {
        tcp.source_address(self.out?)
    }

    /// Hangs up.
    pub(in crate::rdma) fn end(&mut self, tcp: &mut TcpTransport) {
        self.flows().for_each(|flow| tcp.close(flow));
        (self.out, self.back, self.sending, self.receiving) = (None, None, None, None);
        // Its requests are gone with its flows; a second time there is no such memory.
        let _ = tcp.deregister(self.key);
    }
}

impl Drop for ControlChannel {
    fn drop(&mut self) {
        // SAFETY: made in `new`; flows that knew it have ended, or their transport has.
        drop(unsafe { Box::from_raw(self.memory) });
    }
}

/// A record that is no good, in the flow's place.
fn bad_record(fault: Fault) -> TransportError {
    TransportError::Flow { peer: String::new(), direction: "from", number: 0, fault }
}
