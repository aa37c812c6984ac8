//! Devices that go and come back.
//!
//! A device goes when it fails, when it is pulled out, or when the operator removes it; the first two are told by an event, the last is
//! not by every driver: soft-RoCE's waits, and the device works on, until nobody has it open. Everything that the service has of it is
//! given back then. So the transport looks, seldom, for what is there, and while a port is down more often; it also takes a device
//! in use again that has come back under its old name.

use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};

use crate::Fault;
use crate::rdma::RdmaTransport;
use crate::rdma::device::ports::{self, Port};
use crate::rdma::verbs::VerbsError;
use crate::rdma::wakeup::Watched;

/// How often devices are looked for: it costs tens of system calls, and is done by every engine.
const DEVICES_EVERY: Duration = Duration::from_secs(30);
/// How often while a port is down.
const DEVICES_EVERY_WHILE_DOWN: Duration = Duration::from_secs(5);

impl RdmaTransport {
    /// A device cannot be used any more: flows leave it, and nothing of it is kept.
    pub(in crate::rdma) fn lose_port(&mut self, index: usize) {
        let Some(port) = self.ports.get_mut(index).filter(|port| port.opened.is_some()) else { return };
        port.is_up = false;
        self.leave_port(index, Fault::NoPort);
        // Those of receivers, too, which wait for offers.
        self.on_ports(|port| port == index).into_iter().for_each(|handle| self.end_connection(handle));
        self.memory.forget_port(index);
        let Some(mut opened) = self.ports.get_mut(index).and_then(|port| port.opened.take()) else { return };
        for fd in opened.descriptors() {
            let _ = self.epoll.delete(fd);
        }
        if let Some(flusher) = opened.flusher.take() {
            flusher.end(&mut opened.queues, &mut self.owners);
        }
    }

    /// When devices are to be looked for.
    pub(in crate::rdma) fn plan_look_for_devices(&mut self, now: Instant) {
        let are_up = self.ports.iter().all(|port| port.is_up);
        let latest = now + if are_up { DEVICES_EVERY } else { DEVICES_EVERY_WHILE_DOWN };
        self.look_for_devices_at = Some(self.look_for_devices_at.map_or(latest, |at| at.min(latest)));
    }

    /// Lets go of devices that are no more, and takes those in use again that have come back. Returns whether there were any.
    pub(in crate::rdma) fn look_for_devices(&mut self, now: Instant) -> bool {
        if self.look_for_devices_at.is_none_or(|at| at > now) {
            return false;
        }
        self.look_for_devices_at = None;
        // Asked again later.
        let Ok(there) = self.driver.devices() else { return false };
        let mut any = false;
        for index in 0..self.ports.len() {
            let Some(port) = self.ports.get(index) else { continue };
            let (device, number) = (port.device.clone(), port.number);
            any |= match (port.opened.is_some(), there.contains(&device)) {
                (true, false) => {
                    tracing::error!(device, "an RDMA device has been removed");
                    self.lose_port(index);
                    true
                }
                (false, true) => self.reopen(index, &device, number),
                (true, true) | (false, false) => false,
            };
        }
        any
    }

    fn reopen(&mut self, index: usize, device: &str, number: u8) -> bool {
        // One that does not work yet, or has no address yet, is tried again.
        let Ok(Ok(made)) = ports::open_port(&self.driver, device, number, &self.options) else { return false };
        let Some(port) = self.ports.get_mut(index) else { return false };
        if watch(&self.epoll, index, &made).is_err() {
            return false;
        }
        let flushes = port.flushes;
        *port = made;
        port.flushes = flushes;
        tracing::info!(port = port.describe(), is_up = port.is_up, "an RDMA device is back");
        self.come_home(index);
        true
    }
}

/// Has the transport's sleep end when a port's device has something to say.
pub(in crate::rdma) fn watch(epoll: &Epoll, index: usize, port: &Port) -> Result<(), VerbsError> {
    let Some(opened) = &port.opened else { return Ok(()) };
    for (fd, of) in opened.descriptors().into_iter().zip([Watched::Completions(index), Watched::Events(index)]) {
        let added = epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, of.token()));
        added.map_err(|errno| VerbsError { call: "epoll_ctl", errno })?;
    }
    Ok(())
}
