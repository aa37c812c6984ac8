//! Opens TCP flows, until they are connected.

use std::time::{Duration, Instant};

use mccs_ipc::types::Handle;

use super::flows::Flows;
use super::sender::{Route, Sender};
use super::{Flow, Half};
use crate::tcp::device;
use crate::tcp::socket;
use crate::tcp::wire::{Address, Hello};
use crate::{FlowSpec, ListenerHandle, TransportError};

/// Flows that wait to be connected, and when the first of them has waited for too long.
#[derive(Debug)]
pub(in crate::tcp) struct Opening {
    waiting: Vec<Handle>,
    /// None is late before.
    earliest: Option<Instant>,
    /// Makes attempts to connect differ.
    attempts: u64,
}

impl Opening {
    /// No flow waits yet.
    ///
    /// # Errors
    /// The kernel has no random number.
    pub(in crate::tcp) fn new() -> Result<Self, TransportError> {
        Ok(Opening { waiting: Vec::new(), earliest: None, attempts: u64::from_le_bytes(socket::random()?) })
    }

    /// A sender to a listener, whose connections are to be dialled.
    ///
    /// # Errors
    /// The handle, the device or the options are refused.
    pub(in crate::tcp) fn sender(
        &mut self,
        listener: &ListenerHandle,
        spec: &FlowSpec,
    ) -> Result<Sender, TransportError> {
        let options = &spec.options;
        options.validate()?;
        let to = Address::from_handle(listener)?;
        if let Some(device) = &options.device {
            // Said here by its name; later on it is a path like others that do not answer.
            device::source(device, to.address.is_ipv4(), options.source_address)?;
        }
        self.attempts = self.attempts.wrapping_add(1);
        let hello = Hello {
            listener: to.listener,
            cookie: to.cookie,
            flow: spec.number,
            connection: 0,
            connections: options.connections,
            chunk_bytes: options.chunk_bytes,
            attempt: self.attempts,
            resumption: 0,
        };
        Ok(Sender::new(hello, Box::new(Route::new(to, options))))
    }

    /// Adds a flow that waits; an accepted one at a listener.
    ///
    /// # Errors
    /// There are too many.
    pub(in crate::tcp) fn add(
        &mut self,
        spec: &FlowSpec,
        half: Half,
        listener: Option<Handle>,
        flows: &mut Flows,
        now: Instant,
    ) -> Result<Handle, TransportError> {
        let flow = Flow::new(spec, half, listener, now);
        let patience = flow.patience();
        let handle = flows.add(flow).ok_or(TransportError::TOO_MANY_FLOWS)?;
        if let Some((deadline, _)) = patience {
            // Those that were connected or closed since are dropped before they are many.
            if self.waiting.len() > 2 * flows.len() + 64 {
                self.waiting.retain(|handle| flows.get(*handle).is_some_and(|flow| !flow.is_connected()));
            }
            self.waiting.push(handle);
            self.earliest = Some(self.earliest.map_or(deadline, |earliest| earliest.min(deadline)));
        }
        Ok(handle)
    }

    pub(in crate::tcp) fn wake_at(&self) -> Option<Instant> {
        self.earliest
    }

    /// Takes the flows out that are late, with how long they had.
    pub(in crate::tcp) fn take_late(&mut self, flows: &Flows, now: Instant) -> Vec<(Handle, Duration)> {
        if self.earliest.is_none_or(|at| at > now) {
            return Vec::new();
        }
        let (mut late, mut earliest) = (Vec::new(), None::<Instant>);
        self.waiting.retain(|handle| {
            let flow = flows.get(*handle).filter(|flow| flow.fault.is_none() && !flow.is_connected());
            // One without a limit has none from now on either.
            let Some((deadline, timeout)) = flow.and_then(Flow::patience) else { return false };
            if deadline <= now {
                late.push((*handle, timeout));
                return false;
            }
            earliest = earliest.into_iter().chain([deadline]).min();
            true
        });
        self.earliest = earliest;
        late
    }
}
