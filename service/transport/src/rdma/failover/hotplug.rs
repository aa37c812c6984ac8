//! Devices that go and come back.
//!
//! A device goes when it fails, when it is pulled out, or when the operator removes it; the first two are told by an event, the last is
//! not by every driver: soft-RoCE's waits, and the device works on, until nobody has it open. Everything that the service has of it is
//! given back then. So the transport looks, seldom, for what is there, and while a port is down more often; it also takes a device
//! in use again that has come back under its old name.

use std::time::Instant;

use crate::Fault;
use crate::rdma::RdmaTransport;

impl RdmaTransport {
    /// A device cannot be used any more: flows leave it, and nothing of it is kept.
    pub(in crate::rdma) fn lose_port(&mut self, place: usize) {
        let Some(port) = self.devices.port_mut(place).filter(|port| port.opened.is_some()) else { return };
        port.is_up = false;
        self.leave_port(place, Fault::NoPort);
        // Those of receivers, too, which wait for offers.
        self.on_ports(|port| port == place).into_iter().for_each(|handle| self.end_connection(handle));
        self.memory.forget_port(place);
        if let Some(opened) = self.devices.close(place) {
            self.wakeup.forget_port(&opened);
        }
    }

    /// Lets go of devices that are no more, and takes those in use again that have come back. Returns whether there were any.
    pub(in crate::rdma) fn look_for_devices(&mut self, now: Instant) -> bool {
        let Some(there) = self.devices.look(now) else { return false };
        let mut any = false;
        for place in 0..self.devices.len() {
            let Some(port) = self.devices.port(place) else { continue };
            any |= match (port.opened.is_some(), there.contains(&port.device)) {
                (true, false) => {
                    tracing::error!(device = port.device, "an RDMA device has been removed");
                    self.lose_port(place);
                    true
                }
                (false, true) => self.reopen(place),
                (true, true) | (false, false) => false,
            };
        }
        any
    }

    fn reopen(&mut self, place: usize) -> bool {
        let Some(made) = self.devices.open_again(place) else { return false };
        if self.wakeup.watch_port(place, &made).is_err() {
            return false;
        }
        tracing::info!(port = made.describe(), is_up = made.is_up, "an RDMA device is back");
        self.devices.replace(place, made);
        self.come_home(place);
        true
    }
}
