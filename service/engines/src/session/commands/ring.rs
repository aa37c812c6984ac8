//! The command ring of a session, with when its commands were called.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::Instant;

use mccs_ipc::command::{Command, FLAG_POSTED, FLAG_ROUND, Opcode};
use mccs_ipc::queue::Consumer;
use mccs_tenants::session::Session;

use super::Fence;
use super::validate::{posted, validate};
use crate::proxy::{RoundState, SessionMessage};
use crate::session::outlets::{Outlets, Place};
use crate::session::tables::{ReadyRank, Tables};

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
    /// Taken, and not ended as far as was looked, in order: the service's next program does them again.
    taken: VecDeque<Command>,
    /// When there are so many it is looked which have ended.
    look_at: usize,
    /// Commands that the service's program before has taken; they come before the ring's.
    again: VecDeque<Command>,
}

/// Commands from which on it is looked which have ended.
const LOOK_AT_LEAST: usize = 256;

impl CommandRing {
    pub(crate) fn new(commands: Consumer<Command>) -> Self {
        Self::resumed(commands, VecDeque::new())
    }

    /// One of which another program has taken these commands, that have not ended.
    pub(crate) fn resumed(commands: Consumer<Command>, again: VecDeque<Command>) -> Self {
        CommandRing { commands, popped: 0, held: None, taken: VecDeque::new(), look_at: LOOK_AT_LEAST, again }
    }

    /// Commands that have been taken and may not have ended, in order; and where the ring is to be read on.
    pub(crate) fn hand_over(&self) -> (Vec<Command>, u64) {
        (self.taken.iter().chain(&self.again).copied().collect(), self.commands.consumed())
    }

    /// Keeps a command until it has ended.
    fn keep(&mut self, command: Command, tables: &Tables, session: &Session) {
        if self.taken.len() >= self.look_at {
            self.taken.retain(|command| {
                tables.streams.has(command.stream) && command.ticket > session.last_ended(command.stream.index)
            });
            // Each is looked at as often as it doubles: once, on average.
            self.look_at = LOOK_AT_LEAST.max(2 * self.taken.len());
        }
        self.taken.push_back(command);
    }

    /// The next command, of the service's program before or of the ring.
    fn next(&mut self, tables: &mut Tables) -> Result<Option<Command>, Fence> {
        let Some(mut command) = self.again.pop_front() else {
            return self.commands.try_pop().map_err(|error| Fence(error.to_string()));
        };
        if command.flags & FLAG_ROUND != 0
            && let Ok(ReadyRank { rank, info, .. }) = tables.ranks.ready(command.comm)
            && info.shm_exchange.as_ref().is_some_and(|exchange| exchange.has_posted(*rank, command.rounds))
        {
            command.flags |= FLAG_POSTED;
        }
        Ok(Some(command))
    }

    /// Commands that have been taken, here or by another program.
    pub(crate) fn taken(&self) -> u64 {
        self.popped + self.again.len() as u64
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
        Ok(self.taken() + waiting)
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
            let Some(command) = self.next(tables)? else { break };
            any = true;
            self.popped += 1;
            if command.opcode == Opcode::Posted as u32 {
                let comm = posted(tables, &command)?;
                out.outbox.send(Place::Host, SessionMessage::Posted { comm });
                continue;
            }
            self.keep(command, tables, &out.session);
            out.session.begin_operation();
            let called_at = self.called_at(now);
            let (place, operation) = validate(&out.session, tables, &command, called_at)?;
            if self.again.is_empty() {
                tables.memory.forget_lent();
            }
            if operation.round == RoundState::None {
                out.session.counters.commands.fetch_add(1, Ordering::Relaxed);
            }
            out.outbox.send(place, SessionMessage::Operation(operation));
        }
        // Also where commands are left in the ring for now.
        self.commands.release();
        if !out.outbox.is_empty() && self.held.is_none() {
            // An index that lies has no consequence.
            let waiting = self.commands.waiting().unwrap_or(0) + self.again.len() as u64;
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
        self.again.is_empty() && self.commands.arm().unwrap_or(false)
    }
}
