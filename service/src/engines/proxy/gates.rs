//! Gated streams: their operations start when a GPU has come to them.
//!
//! A GPU cannot ring a doorbell, so somebody has to look at its words. The engine does while an operation is the head of a
//! gated stream and its word has not come: at every poll for as long as the runtime spins, and then with pauses that grow with the
//! wait, an eighth of it, up to [`PAUSE_MAX`]. So what waited long starts at most an eighth later, and what waits for ever costs
//! about a thousand looks a second, which by estimate is half a percent of a core. Without such operations nobody looks.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_ipc::gate::Gate;

use super::{Event, ProxyEngine};
use crate::memory::Region;
use crate::session::SessionId;

/// Shortest pause between two looks: about what a sleep takes.
const PAUSE_MIN: Duration = Duration::from_micros(50);
/// Longest pause between two looks.
const PAUSE_MAX: Duration = Duration::from_millis(1);
/// Share of the time waited that a pause takes.
const PAUSE_SHARE: u32 = 8;
/// Words looked at in a poll: others of the runtime wait that long.
const LOOKS_MAX: usize = 64;

/// A gate in a session's memory.
pub struct StreamGate {
    gate: NonNull<Gate>,
    /// Keeps it mapped.
    _region: Arc<Region>,
}

// SAFETY: a gate is made of atomics, and lies in the region that is kept mapped, on whichever thread it is used.
unsafe impl Send for StreamGate {}

impl StreamGate {
    /// The gate at an offset of a region; `None` where it would not lie in it, or not be aligned.
    #[must_use]
    pub fn new(region: Arc<Region>, offset_bytes: u64) -> Option<Self> {
        let ptr = region.range(offset_bytes, Gate::BYTES)?;
        // SAFETY: the range is in the region, which the new value keeps mapped.
        let gate = NonNull::from(unsafe { Gate::at(ptr) }?);
        Some(StreamGate { gate, _region: region })
    }

    fn gate(&self) -> &Gate {
        // SAFETY: mapped and aligned, as `new` has seen to.
        unsafe { self.gate.as_ref() }
    }

    /// Whether an operation may start.
    pub(super) fn is_open(&self, ticket: u64) -> bool {
        self.gate().ready() >= ticket
    }

    /// Operations up to this one have ended.
    pub(super) fn end(&self, ticket: u64) {
        self.gate().end(ticket);
    }
}

/// Streams whose next operation waits for its GPU.
#[derive(Default)]
pub(super) struct Gates {
    watched: Vec<(SessionId, u32)>,
    /// The next to look at.
    next: usize,
    /// Since when none of them has opened.
    since: Option<Instant>,
}

impl Gates {
    /// Whether no stream waits for its GPU.
    pub(super) fn is_empty(&self) -> bool {
        self.watched.is_empty()
    }

    /// When to look again, if at all.
    pub(super) fn look_at(&self, now: Instant) -> Option<Instant> {
        let waited = now.saturating_duration_since(self.since.filter(|_| !self.watched.is_empty())?);
        Some(now + (waited / PAUSE_SHARE).clamp(PAUSE_MIN, PAUSE_MAX))
    }
}

impl ProxyEngine {
    /// Watches a stream if its next operation has not started and waits for a GPU.
    pub(super) fn watch_gate(&mut self, session: SessionId, index: u32, now: Instant) {
        if self.stream(session, index).is_some_and(|stream| stream.may_be_held_back() && stream.note_watched(true)) {
            self.gates.watched.push((session, index));
            self.gates.since = Some(now);
        }
    }

    /// Looks at gates, and goes on with the streams of those that have opened.
    pub(super) fn look_at_gates(&mut self, now: Instant) {
        for _ in 0..self.gates.watched.len().min(LOOKS_MAX) {
            self.gates.next = if self.gates.next < self.gates.watched.len() { self.gates.next } else { 0 };
            let (session, index) = self.gates.watched[self.gates.next];
            match self.stream(session, index) {
                Some(stream) if stream.is_held_back() => {
                    self.gates.next += 1;
                    continue;
                }
                Some(stream) => {
                    stream.note_watched(false);
                    self.events.push_back(Event::Advance { session, stream: index });
                }
                // It has ended.
                None => {}
            }
            self.gates.watched.swap_remove(self.gates.next);
            self.gates.since = Some(now);
        }
    }
}
