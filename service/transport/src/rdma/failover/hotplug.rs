//! Hotplug: RDMA devices that go and come back.
//!
//! A device goes when it fails, when it is pulled out, or when the operator removes it; the first two are told by an event, the last is
//! not by every driver: soft-RoCE's waits, and the device works on, until nobody has it open. Everything that the service has of it is
//! given back then. So the transport looks, seldom, for what is there, and while a port is down more often; it also takes a device
//! in use again that has come back under its old name.

use std::time::Instant;

use super::{Failover, on_connections};
use crate::Fault;
use crate::rdma::data_path::carrier::Carrier;
use crate::rdma::flows::Flows;
use crate::rdma::wakeup::Wakeup;

/// Results of a look for devices.
#[derive(Debug, Default)]
pub(in crate::rdma) struct Found {
    /// Ports whose devices have gone.
    pub(in crate::rdma) lost: usize,
    /// Ports that are in use again.
    pub(in crate::rdma) back: Vec<usize>,
}

impl Failover {
    /// A device cannot be used any more: flows leave it, and nothing of it is kept.
    pub(in crate::rdma) fn lose_port(
        &mut self,
        place: usize,
        flows: &mut Flows,
        carrier: &mut Carrier,
        wakeup: &Wakeup,
    ) {
        let Some(port) = carrier.devices.port_mut(place).filter(|port| port.opened.is_some()) else { return };
        port.is_up = false;
        self.leave_port(place, Fault::NoPort, flows, carrier);
        // Those of receivers, too, which wait for offers.
        for handle in on_connections(flows, |_, port| port == place) {
            if let Some(flow) = flows.get_mut(handle) {
                carrier.end_connection(flow);
            }
        }
        carrier.memory.forget_port(place);
        if let Some(opened) = carrier.devices.close(place) {
            wakeup.forget_port(&opened);
        }
    }

    /// Lets go of devices that are no more, and takes those in use again that have come back, to which flows are to return.
    pub(in crate::rdma) fn look_for_devices(
        &mut self,
        now: Instant,
        flows: &mut Flows,
        carrier: &mut Carrier,
        wakeup: &Wakeup,
    ) -> Found {
        let mut found = Found::default();
        let Some(there) = carrier.devices.look(now) else { return found };
        for place in 0..carrier.devices.len() {
            let Some(port) = carrier.devices.port(place) else { continue };
            match (port.opened.is_some(), there.contains(&port.device)) {
                (true, false) => {
                    tracing::error!(device = port.device, "an RDMA device has been removed");
                    self.lose_port(place, flows, carrier, wakeup);
                    found.lost += 1;
                }
                (false, true) => found.back.extend(reopen(place, carrier, wakeup).then_some(place)),
                (true, true) | (false, false) => {}
            }
        }
        found
    }
}

/// Takes a port in use again whose device has come back. Returns whether it can be.
fn reopen(place: usize, carrier: &mut Carrier, wakeup: &Wakeup) -> bool {
    let Some(made) = carrier.devices.open_again(place) else { return false };
    if wakeup.watch_port(place, &made).is_err() {
        return false;
    }
    tracing::info!(port = made.describe(), is_up = made.is_up, "an RDMA device is back");
    carrier.devices.replace(place, made);
    true
}
