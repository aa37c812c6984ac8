//! Statistics of the wire: what became of the packets of flows, read from the kernel now and then.

use std::time::{Duration, Instant};

use mccs_transport::Transport;

use super::Sending;

/// How often it is read what became of flows' packets, while the engine is awake, and of how many flows: a call of the kernel each.
const WIRE_LOOK_EVERY: Duration = Duration::from_millis(250);
const WIRE_LOOKS_MAX: usize = 64;

/// When it is next looked, and of which flow first.
#[derive(Default)]
pub(super) struct WireLooks {
    at: Option<Instant>,
    next: usize,
}

impl WireLooks {
    /// Whether it is time to look.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.at.is_none_or(|at| at <= now)
    }

    /// Reads what became of packets, of some flows at a time.
    pub(super) fn look<'a>(
        &mut self,
        transport: &mut dyn Transport,
        sends: impl Iterator<Item = &'a Sending>,
        now: Instant,
    ) {
        self.at = Some(now + WIRE_LOOK_EVERY);
        let Some(wire) = transport.wire_statistics() else { return };
        let mut looked = 0;
        for sending in sends.skip(self.next).take(WIRE_LOOKS_MAX) {
            looked += 1;
            if let Some(stats) = wire.wire_stats(sending.flow) {
                sending.meter.note_wire(stats);
            }
        }
        self.next = if looked < WIRE_LOOKS_MAX { 0 } else { self.next + looked };
    }
}
