//! All control channels of an RDMA transport, whose flow each is, and the listeners to which
//! receivers come back. A TCP transport carries them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::Instant;

use mccs_ipc::types::Handle;
use mccs_runtime::{Context, Progress};

use super::control_channel::ControlChannel;
use super::wire::{self, Record};
use crate::tcp::TcpTransport;
use crate::{
    DataPath, FLOWS_PER_LISTENER_MAX, FlowId, FlowSpec, ListenOptions, Listener, ListenerHandle, Transport,
    TransportError,
};

/// A listener to which receivers come back.
#[derive(Debug)]
struct ReturnListener {
    listener: Listener,
    handle: ListenerHandle,
    next_number: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(in crate::rdma) struct ControlChannels {
    tcp: TcpTransport,
    by_flow: HashMap<FlowId, Handle>,
    /// By this host's address.
    returns: HashMap<IpAddr, ReturnListener>,
    /// Progress of the last poll, or of later requests.
    said: Progress,
}

impl ControlChannels {
    /// No channels yet.
    ///
    /// # Errors
    /// The kernel refuses a descriptor.
    pub(in crate::rdma) fn new() -> Result<Self, TransportError> {
        let tcp = TcpTransport::new()?.with_news();
        Ok(ControlChannels { tcp, by_flow: HashMap::new(), returns: HashMap::new(), said: Progress::Busy })
    }

    pub(in crate::rdma) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.tcp.descriptor()
    }

    /// Listeners of the transport's users.
    pub(in crate::rdma) fn listeners(&self) -> usize {
        self.tcp.usage().listeners.saturating_sub(self.returns.len())
    }

    pub(in crate::rdma) fn listen(
        &mut self,
        options: &ListenOptions,
    ) -> Result<(Listener, ListenerHandle), TransportError> {
        // Its port may have been there before, with callers that nobody has asked for.
        self.said = Progress::Busy;
        self.tcp.listen(options).map(|(listener, handle)| (listener, wire::to_handle(&handle)))
    }

    pub(in crate::rdma) fn close_listener(&mut self, listener: Listener) {
        self.tcp.close_listener(listener);
        self.said = Progress::Busy;
    }

    pub(in crate::rdma) fn end_numbers(&mut self, listener: Listener, below: u64) {
        self.tcp.end_numbers(listener, below);
        self.said = Progress::Busy;
    }

    /// The channel of a flow's sender, one half of it.
    pub(in crate::rdma) fn call(
        &mut self,
        listener: &ListenerHandle,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<ControlChannel, TransportError> {
        ControlChannel::call(&mut self.tcp, &wire::from_handle(listener)?, spec, now)
    }

    /// The channel of a flow's receiver, one half of it.
    pub(in crate::rdma) fn answer(
        &mut self,
        listener: Listener,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<ControlChannel, TransportError> {
        ControlChannel::answer(&mut self.tcp, listener, spec, now)
    }

    /// A channel is a flow's.
    pub(in crate::rdma) fn own(&mut self, channel: &ControlChannel, flow: Handle) {
        self.by_flow.extend(channel.flows().map(|of| (of, flow)));
        self.said = Progress::Busy;
    }

    /// Has the receiver come back to a sender's channel. Returns where, and the number there.
    pub(in crate::rdma) fn await_return(
        &mut self,
        channel: &mut ControlChannel,
        flow: Handle,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<(Vec<u8>, u64), TransportError> {
        let source = channel.source_address(&self.tcp).ok_or(TransportError::NoSuch("address of this host"))?;
        if self.returns.get(&source).is_some_and(|back| back.next_number as usize >= FLOWS_PER_LISTENER_MAX / 2) {
            // Flows that are connected stay; a listener remembers the numbers of all that were.
            if let Some(back) = self.returns.remove(&source) {
                self.tcp.close_listener(back.listener);
            }
        }
        if !self.returns.contains_key(&source) {
            let (listener, handle) = self.tcp.listen(&ListenOptions::new(source))?;
            self.returns.insert(source, ReturnListener { listener, handle, next_number: 0 });
        }
        let back = self.returns.get_mut(&source).ok_or(TransportError::NoSuch("listener"))?;
        let number = back.next_number;
        back.next_number += 1;
        channel.await_back(&mut self.tcp, back.listener, &FlowSpec { number, ..spec.clone() }, now)?;
        let handle = back.handle.as_bytes().to_vec();
        self.own(channel, flow);
        Ok((handle, number))
    }

    /// A receiver's channel comes back to the sender's listener.
    pub(in crate::rdma) fn call_back(
        &mut self,
        channel: &mut ControlChannel,
        flow: Handle,
        listener: &ListenerHandle,
        spec: &FlowSpec,
        now: Instant,
    ) -> Result<(), TransportError> {
        channel.call_back(&mut self.tcp, listener, spec, now)?;
        self.own(channel, flow);
        Ok(())
    }

    /// Whether a sender's half has reached its flow's receiver.
    pub(in crate::rdma) fn has_reached(&self, channel: &ControlChannel) -> bool {
        channel.has_reached(&self.tcp)
    }

    /// Takes a record that has come.
    ///
    /// # Errors
    /// The channel has ended.
    pub(in crate::rdma) fn hear(&mut self, channel: &mut ControlChannel) -> Result<Option<Record>, TransportError> {
        channel.hear(&mut self.tcp)
    }

    /// Says something to the peer; a channel that has ended is heard of elsewhere.
    pub(in crate::rdma) fn say(&mut self, channel: &mut ControlChannel, record: Record) {
        let _ = channel.say(&mut self.tcp, record);
        self.said = Progress::Busy;
    }

    /// Hangs up.
    pub(in crate::rdma) fn end(&mut self, channel: &mut ControlChannel) {
        for of in channel.flows() {
            self.by_flow.remove(&of);
        }
        channel.end(&mut self.tcp);
        self.said = Progress::Busy;
    }

    /// Moves records. Returns whether there was anything.
    pub(in crate::rdma) fn poll(&mut self, cx: &Context) -> bool {
        // The runtime's news may have been seen in a poll that did not come here.
        self.said = self.tcp.poll(&Context { is_readable: true, ..*cx });
        self.is_busy()
    }

    /// A channel to which something has happened: of which flow, if that is there.
    pub(in crate::rdma) fn next_news(&mut self) -> Option<Option<Handle>> {
        let of = self.tcp.take_news()?;
        // Messages in answer are for the next poll: epoll need not tell of what has come already.
        self.said = Progress::Busy;
        Some(self.by_flow.get(&of).copied())
    }

    pub(in crate::rdma) fn is_busy(&self) -> bool {
        self.said == Progress::Busy
    }

    /// Whether there is something to poll for.
    pub(in crate::rdma) fn is_due(&self, now: Instant) -> bool {
        self.is_busy() || self.wake_at().is_some_and(|at| at <= now)
    }

    pub(in crate::rdma) fn wake_at(&self) -> Option<Instant> {
        if let Progress::Idle { wake_at } = self.said { wake_at } else { None }
    }

    pub(in crate::rdma) fn prepare_to_sleep(&mut self) -> bool {
        self.tcp.prepare_to_sleep()
    }
}
