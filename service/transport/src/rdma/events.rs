//! Events of an RDMA transport from devices, peers and the clock, each handed to the component that
//! it is for.

use std::time::Instant;

use mccs_ipc::types::Handle;
use mccs_runtime::Context;
use nix::errno::Errno;

use super::RdmaTransport;
use super::connection::of_wr_id;
use super::data_path::flusher::FLUSHER;
use super::failover::handshake::Outcome;
use super::failover::{blamed, keepalive, plan_return};
use super::flow::{Half, Stage};
use super::verbs::{AsyncEvent, Completion, FLUSHED, WcStatus, event_text};
use super::wakeup::{Watched, Woken};
use crate::Fault;

impl RdmaTransport {
    /// Takes completions of all ports, some or, to drain them, all. Returns whether there were any.
    pub(super) fn take_completions(&mut self, takes_max: usize) -> bool {
        let (mut taken, mut any) = (std::mem::take(&mut self.taken), false);
        for port in 0..self.carrier.devices.len() {
            for _ in 0..takes_max {
                let Some(queues) = self.carrier.devices.queues(port) else { break };
                if queues.take(&mut taken).is_err() {
                    self.lose_port(port);
                    break;
                }
                if taken.get().is_empty() {
                    break;
                }
                any = true;
                taken.get().iter().for_each(|completion| self.completed(completion));
            }
        }
        self.taken = taken;
        any
    }

    /// A work request has ended.
    fn completed(&mut self, completion: &Completion) {
        let (name, is_receive) = of_wr_id(completion.wr_id);
        // Perhaps the queue pair of a connection that is no more.
        let Some(owner) = self.carrier.devices.owner(name) else { return };
        if owner.qp == FLUSHER {
            let is_good = completion.status == WcStatus::Success;
            return self.carrier.devices.flushed(owner.flow.index as usize, is_good);
        }
        let Some(flow) = self.flows.get_mut(owner.flow) else { return };
        match self.carrier.completed(flow, owner, completion, is_receive) {
            Ok(false) => {}
            Ok(true) => self.flows.enqueue(owner.flow),
            Err(fault) => self.stumble(owner.flow, fault),
        }
    }

    /// Lets a flow post what it can. Returns whether something moved.
    pub(super) fn pump(&mut self, handle: Handle) -> bool {
        let Some(flow) = self.flows.get_mut(handle).filter(|flow| flow.fault.is_none()) else { return false };
        match self.carrier.pump(flow) {
            Ok(pumped) => {
                self.flows.pumped(handle, &pumped);
                self.flows.check_end(handle, &mut self.carrier);
                pumped.moved
            }
            Err(fault) => {
                self.stumble(handle, fault);
                true
            }
        }
    }

    /// Something of a flow has gone wrong.
    fn stumble(&mut self, handle: Handle, fault: Fault) {
        self.failover.stumble(handle, fault, &mut self.flows, &mut self.carrier);
    }

    /// A flow's connection carries nothing any more.
    pub(super) fn break_connection(&mut self, handle: Handle, fault: Fault) {
        self.failover.break_connection(handle, fault, &mut self.flows, &mut self.carrier);
    }

    /// A device cannot be used any more.
    pub(super) fn lose_port(&mut self, place: usize) {
        self.failover.lose_port(place, &mut self.flows, &mut self.carrier, &self.wakeup);
    }

    /// A port is back: who could not be reached from there may be, and flows return.
    fn come_home(&mut self, place: usize) {
        if self.carrier.devices.port(place).is_some_and(|port| port.is_up) {
            self.handshakes.connector().forget_unreachable(place);
            self.failover.come_home(place, &mut self.flows, &mut self.carrier);
        }
    }

    /// Takes the devices' events. Returns whether there were any.
    pub(super) fn take_events(&mut self) -> bool {
        let mut any = false;
        for port in 0..self.carrier.devices.len() {
            while let Some(event) = self.carrier.devices.next_event(port) {
                any = true;
                self.happened(port, event);
            }
        }
        any
    }

    fn happened(&mut self, place: usize, event: AsyncEvent) {
        let Some(port) = self.carrier.devices.port_mut(place) else { return };
        let (device, number) = (port.device.clone(), port.number);
        match event {
            AsyncEvent::PortUp(up) if up == number => {
                // A device that cannot be asked is as it was.
                if self.carrier.devices.refresh(place).is_err()
                    && let Some(port) = self.carrier.devices.port_mut(place)
                {
                    port.is_up = true;
                }
                tracing::info!(device, port = number, "an RDMA port is up");
                self.come_home(place);
            }
            AsyncEvent::PortDown(down) if down == number => {
                port.is_up = false;
                tracing::warn!(device, port = number, "an RDMA port is down");
                // If no other port is up, its queue pairs go on if it comes back in time.
                if self.carrier.devices.ports().iter().any(|port| port.is_up) {
                    self.failover.leave_port(place, Fault::NoPort, &mut self.flows, &mut self.carrier);
                }
            }
            AsyncEvent::AddressChange(changed) if changed == number => {
                if self.carrier.devices.refresh(place).unwrap_or(true) {
                    let gid = self.carrier.devices.port(place).map(|port| port.gid).unwrap_or_default();
                    tracing::warn!(device, port = number, %gid, "an RDMA port has another address");
                    self.failover.leave_port(place, Fault::NoPort, &mut self.flows, &mut self.carrier);
                    self.come_home(place);
                }
            }
            AsyncEvent::QpFatal { qp } => {
                let found = self.flows.iter().find_map(|(handle, flow)| {
                    let connection = flow.connection.as_ref().filter(|connection| connection.port == place)?;
                    Some((handle, connection.number_of(qp)?))
                });
                // Its completions say more, where there are any: why it failed.
                while self.take_completions(usize::MAX) {}
                if let Some((handle, qp)) = found
                    && let Some(connection) = self.flows.get(handle).and_then(|flow| flow.connection.as_ref())
                    && connection.has_number(qp)
                {
                    self.break_connection(handle, Fault::QueuePair { qp, status: FLUSHED });
                }
            }
            AsyncEvent::CqFailed | AsyncEvent::DeviceFatal => {
                tracing::error!(device, ?event, "an RDMA device has failed");
                self.lose_port(place);
            }
            AsyncEvent::Other(code) => {
                tracing::debug!(device, event = event_text(code), code, "an RDMA device tells of an event");
            }
            AsyncEvent::PortUp(_) | AsyncEvent::PortDown(_) | AsyncEvent::AddressChange(_) => {}
        }
    }

    /// Lets go of devices that are no more, and takes those in use again that have come back. Returns whether there were any.
    pub(super) fn look_for_devices(&mut self, now: Instant) -> bool {
        let found = self.failover.look_for_devices(now, &mut self.flows, &mut self.carrier, &self.wakeup);
        found.back.iter().for_each(|place| self.come_home(*place));
        found.lost > 0 || !found.back.is_empty()
    }

    /// Goes on where queue pairs have been connected, or could not be. Returns whether there were any.
    pub(super) fn take_connected(&mut self, now: Instant) -> bool {
        let mut any = false;
        while let Some((handle, outcome)) = self.handshakes.next_outcome(now, &mut self.flows, &mut self.carrier) {
            any = true;
            match outcome {
                Outcome::Noted => {}
                Outcome::Opened { is_home } => {
                    self.failover.opened(handle, &mut self.flows, &self.carrier);
                    plan_return(handle, is_home, &mut self.flows);
                }
                Outcome::Broken(fault) => self.break_connection(handle, fault),
            }
        }
        any
    }

    /// Breaks connections that say nothing. Returns whether there were any.
    pub(super) fn keep_alive(&mut self, now: Instant) -> bool {
        let silent = keepalive::silent(now, &mut self.flows);
        let any = !silent.is_empty();
        silent.into_iter().for_each(|(handle, fault)| self.stumble(handle, fault));
        any
    }

    /// Does what is due. Returns whether there was anything.
    pub(super) fn look_at_unsettled(&mut self, now: Instant) -> bool {
        let due = self.flows.take_due(now);
        for handle in due.iter().copied() {
            let Some(flow) = self.flows.get(handle) else { continue };
            let (timeout, is_sender) = (flow.spec.options.connect_timeout, matches!(flow.half, Half::Send(_)));
            let of_trouble = flow.trouble.map(|trouble| trouble.fault);
            let fault = match flow.stage {
                _ if flow.is_hung_up => Fault::Closed,
                Stage::Broken => {
                    self.offer_connection(handle, now);
                    continue;
                }
                Stage::Connecting if let (false, Some(fault)) = (is_sender, of_trouble) => fault,
                Stage::Offered | Stage::Connecting | Stage::Answered if !flow.is_connected => {
                    Fault::ConnectTimeout { after_ms: timeout.as_millis() as u64 }
                }
                Stage::Offered | Stage::Connecting | Stage::Answered => {
                    self.break_connection(handle, Fault::Lost(Errno::ETIMEDOUT));
                    continue;
                }
                Stage::Waiting => of_trouble.unwrap_or(Fault::Closed),
                Stage::Calling | Stage::Open => continue,
            };
            self.flows.fail(handle, blamed(fault, &self.carrier), &mut self.carrier);
        }
        !due.is_empty()
    }

    /// Asks what there is, once for all, so that nothing else is asked in vain.
    pub(super) fn look_at_descriptors(&mut self, now: Instant) -> Woken {
        let (mut woken, mut events) = (Woken::default(), super::wakeup::Wakeup::no_events());
        let count = self.wakeup.look(&mut events, now);
        for event in events.iter().take(count) {
            match Watched::of(event.data()) {
                Watched::Control => woken.by_control = true,
                Watched::Events(_) => woken.by_events = true,
                Watched::Workers => {
                    self.handshakes.connector().hear();
                    self.carrier.memory.pinner.hear();
                }
                Watched::Completions(place) => {
                    if let Some(queues) = self.carrier.devices.queues(place) {
                        queues.take_events();
                    }
                }
            }
        }
        woken
    }

    /// Takes what has come over control channels. Returns whether there was anything.
    pub(super) fn poll_control_channels(&mut self, cx: &Context) -> bool {
        let mut any = self.flows.channels_mut().poll(cx);
        while let Some(flow) = self.flows.channels_mut().next_news() {
            any = true;
            if let Some(handle) = flow {
                self.heard(handle, cx.now);
            }
        }
        any
    }
}
