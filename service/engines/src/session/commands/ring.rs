//! The command ring of a session, with when its commands were called.

use std::sync::atomic::Ordering;
use std::time::Instant;

use mccs_ipc::command::{Command, Opcode};
use mccs_ipc::queue::Consumer;

use super::Fence;
use super::validate::{posted, validate};
use crate::proxy::{RoundState, SessionMessage};
use crate::session::outlets::{Outlets, Place};
use crate::session::tables::Tables;

/// Commands that wait in the ring because the queue is full.
struct Held {
    since: Instant,
    /// The number of the last of them.
    until: u64,
}

/// See the module's documentation.
pub(crate) struct CommandRing {
    commands: Consumer<Command>,
    /// Commands taken.
    popped: u64,
    held: Option<Held>,
}

impl CommandRing {
    pub(crate) fn new(commands: Consumer<Command>) -> Self {
        CommandRing { commands, popped: 0, held: None }
    }

    /// Commands that have been taken.
    pub(crate) fn popped(&self) -> u64 {
        self.popped
    }

    /// The same, once all have been taken that the tenant has written.
    ///
    /// # Errors
    ///
    /// The ring lies.
    pub(crate) fn popped_of_all(&self) -> Result<u64, Fence> {
        let waiting = self.commands.waiting().map_err(|error| Fence(error.to_string()))?;
        Ok(self.popped + waiting)
    }

    /// Takes commands off the ring: as far as the quota of operations in flight goes, or where `until` is given, whatever that is, so many of all. Returns whether there
    /// was one.
    pub(crate) fn take(
        &mut self,
        tables: &mut Tables,
        out: &mut Outlets,
        until: Option<u64>,
        now: Instant,
        budget: usize,
    ) -> Result<bool, Fence> {
        let mut any = false;
        for _ in 0..budget {
            if !self.takes_next(out, until) {
                break;
            }
            let Some(command) = self.commands.try_pop().map_err(|error| Fence(error.to_string()))? else { break };
            any = true;
            self.popped += 1;
            if command.opcode == Opcode::Posted as u32 {
                let comm = posted(tables, &command)?;
                out.outbox.send(Place::Host, SessionMessage::Posted { comm });
                continue;
            }
            out.session.begin_operation();
            let called_at = self.called_at(now);
            let (place, operation) = validate(&out.session, tables, &command, called_at)?;
            if operation.round == RoundState::None {
                out.session.counters.commands.fetch_add(1, Ordering::Relaxed);
            }
            out.outbox.send(place, SessionMessage::Operation(operation));
        }
        // Also where commands are left in the ring for now.
        self.commands.release();
        if !out.outbox.is_empty() && self.held.is_none() {
            // Of an index that lies nothing follows.
            let waiting = self.commands.waiting().unwrap_or(0);
            self.held = (waiting > 0).then_some(Held { since: now, until: self.popped + waiting });
        }
        Ok(any)
    }

    /// Whether the next command may be taken off the ring.
    fn takes_next(&self, out: &Outlets, until: Option<u64>) -> bool {
        let is_due = match until {
            Some(until) => self.popped < until,
            None => out.session.in_flight() < out.session.tenant.quota.operations_in_flight,
        };
        is_due && out.outbox.is_empty()
    }

    /// When the command that was taken off the ring just now was called, as far as the service has seen.
    fn called_at(&mut self, now: Instant) -> Instant {
        match &self.held {
            Some(held) if self.popped <= held.until => held.since,
            _ => {
                self.held = None;
                now
            }
        }
    }

    /// Announces that the engine is about to sleep. Returns false if a command is there. A corrupt ring is found again, and fenced, by the next take.
    pub(crate) fn arm(&mut self) -> bool {
        self.commands.arm().unwrap_or(false)
    }
}
