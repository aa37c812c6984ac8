//! What devices say: completions of flows' work requests, and events.

use mccs_ipc::types::Handle;

use crate::Fault;
use crate::rdma::RdmaTransport;
use crate::rdma::connection::of_wr_id;
use crate::rdma::data_path::flusher::FLUSHER;
use crate::rdma::flow::{Flow, Half, Stage};
use crate::rdma::verbs::{AsyncEvent, Completion, WcStatus, is_of_connection};

/// Code of a work request that was not done because its queue pair had failed.
const FLUSHED: u32 = 5;

impl RdmaTransport {
    /// A work request has ended.
    pub(in crate::rdma) fn completed(&mut self, completion: &Completion) {
        let (name, is_receive) = of_wr_id(completion.wr_id);
        // Of a connection that is no more, perhaps.
        let Some(owner) = self.devices.owner(name) else { return };
        let status = match completion.status {
            WcStatus::Success => None,
            WcStatus::Flushed => Some(FLUSHED),
            WcStatus::Failed(code) => Some(code),
        };
        if owner.qp == FLUSHER {
            return self.devices.flushed(owner.flow.index as usize, status.is_none());
        }
        let Some(flow) = self.flows.get_mut(owner.flow) else { return };
        let Some(qp) = flow.connection.as_mut().and_then(|connection| connection.qps.get_mut(usize::from(owner.qp)))
        else {
            return;
        };
        if let Some(status) = status {
            let fault = Fault::QueuePair { qp: qp.pair().number, status };
            return if is_of_connection(status) {
                self.break_connection(owner.flow, fault)
            } else {
                self.fail(owner.flow, fault)
            };
        }
        let regions = &mut self.memory.regions;
        let done = match (&mut flow.half, is_receive) {
            (Half::Send(sender), true) => qp.received().and_then(|()| sender.credit(completion.imm)),
            (Half::Send(sender), false) => {
                sender.arrived(owner.qp, qp.sent(), regions);
                Ok(())
            }
            (Half::Recv(receiver), true) => {
                qp.received().and_then(|()| receiver.part(owner.qp, completion.bytes, completion.imm, regions))
            }
            (Half::Recv(_), false) => {
                qp.sent();
                Ok(())
            }
        };
        flow.note_progress();
        match done {
            Ok(()) => self.enqueue(owner.flow),
            Err(fault) => self.stumble(owner.flow, fault),
        }
    }

    /// Takes the devices' events. Returns whether there were any.
    pub(in crate::rdma) fn take_events(&mut self) -> bool {
        let mut any = false;
        for port in 0..self.devices.len() {
            while let Some(event) = self.devices.next_event(port) {
                any = true;
                self.happened(port, event);
            }
        }
        any
    }

    fn happened(&mut self, index: usize, event: AsyncEvent) {
        let Some(port) = self.devices.port_mut(index) else { return };
        let (device, number) = (port.device.clone(), port.number);
        match event {
            AsyncEvent::PortUp(up) if up == number => {
                // What cannot be asked is as it was.
                if self.devices.refresh(index).is_err()
                    && let Some(port) = self.devices.port_mut(index)
                {
                    port.is_up = true;
                }
                tracing::info!(device, port = number, "an RDMA port is up");
                self.come_home(index);
            }
            AsyncEvent::PortDown(down) if down == number => {
                port.is_up = false;
                tracing::warn!(device, port = number, "an RDMA port is down");
                // Where no other port is up, its queue pairs go on if it comes back in time.
                if self.devices.ports().iter().any(|port| port.is_up) {
                    self.leave_port(index, Fault::NoPort);
                }
            }
            AsyncEvent::AddressChange(changed) if changed == number => {
                if self.devices.refresh(index).unwrap_or(true) {
                    let gid = self.devices.port(index).map(|port| port.gid).unwrap_or_default();
                    tracing::warn!(device, port = number, %gid, "an RDMA port has another address");
                    self.leave_port(index, Fault::NoPort);
                    self.come_home(index);
                }
            }
            AsyncEvent::QpFatal { qp: broken } => {
                let is_broken = |qp: &crate::rdma::connection::Qp| qp.pair().is(broken);
                let found = self.flows.iter().find_map(|(handle, flow)| {
                    let qp = flow
                        .connection
                        .as_ref()
                        .filter(|connection| connection.port == index)?
                        .qps
                        .iter()
                        .find(|qp| is_broken(qp))?;
                    Some((handle, qp.pair().number))
                });
                // Its completions say more, where there are any: why it failed.
                while self.take_completions(usize::MAX) {}
                if let Some((handle, number)) = found
                    && self.flows.get(handle).is_some_and(|flow| {
                        flow.connection
                            .as_ref()
                            .is_some_and(|connection| connection.qps.iter().any(|qp| qp.pair().number == number))
                    })
                {
                    self.break_connection(handle, Fault::QueuePair { qp: number, status: FLUSHED });
                }
            }
            AsyncEvent::CqFailed | AsyncEvent::DeviceFatal => {
                tracing::error!(device, ?event, "an RDMA device has failed");
                self.lose_port(index);
            }
            AsyncEvent::PortUp(_) | AsyncEvent::PortDown(_) | AsyncEvent::AddressChange(_) | AsyncEvent::Other(_) => {}
        }
    }

    /// Flows on a port need other connections.
    pub(in crate::rdma) fn leave_port(&mut self, index: usize, fault: Fault) {
        self.on_ports(|port| port == index).into_iter().for_each(|handle| self.break_connection(handle, fault));
    }

    /// A port is back: flows on ports that they like less return.
    pub(in crate::rdma) fn come_home(&mut self, index: usize) {
        if !self.devices.port(index).is_some_and(|port| port.is_up) {
            return;
        }
        self.connector.forget_unreachable(index);
        let count = self.devices.len();
        let is_worse = |flow: &Flow, port| flow.rank_of(port, count) > flow.rank_of(index, count);
        self.on_connections(is_worse).into_iter().for_each(|handle| self.break_connection(handle, Fault::NoPort));
        // Those that wait for a port need not wait on.
        let now = self.now;
        for handle in self.timers.unsettled() {
            if let Some(flow) = self.flows.get_mut(handle).filter(|flow| flow.stage == Stage::Broken) {
                (flow.due, flow.turn) = (now, 0);
            }
        }
    }

    pub(in crate::rdma) fn on_ports(&self, matches: impl Fn(usize) -> bool) -> Vec<Handle> {
        self.on_connections(|_, port| matches(port))
    }

    /// Flows that have a connection, by its port.
    fn on_connections(&self, matches: impl Fn(&Flow, usize) -> bool) -> Vec<Handle> {
        let is_on = |(handle, flow): (Handle, &Flow)| {
            flow.connection.as_ref().is_some_and(|connection| matches(flow, connection.port)).then_some(handle)
        };
        self.flows.iter().filter_map(is_on).collect()
    }
}
