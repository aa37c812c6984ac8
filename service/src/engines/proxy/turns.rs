//! Whose work is done next: tenants take turns, so that each waits for its own backlog and not for another's.

use std::collections::VecDeque;
use std::time::Instant;

use mccs_ipc::types::Handle;

use super::operation::ProxyMessage;
use super::{Event, ProxyEngine};
use crate::runtime::{Context, LaneReceiver};

/// What a message or an event takes, besides what it runs at once.
pub(super) const ITEM_NS: u64 = 300;
/// Work of one poll, about: the engines that share the thread wait so long.
const POLL_NS: u64 = 50_000;

/// What a tenant has left at the engine.
#[derive(Default)]
pub(super) struct TenantWork {
    /// First: they are what earlier messages led to.
    events: VecDeque<Event>,
    lane: Option<LaneReceiver<ProxyMessage>>,
}

impl TenantWork {
    pub(super) fn push(&mut self, event: Event) {
        self.events.push_back(event);
    }

    fn pop(&mut self) -> Option<Item> {
        let message = || self.lane.as_ref().and_then(LaneReceiver::pop).map(Item::Message);
        self.events.pop_front().map(Item::Event).or_else(message)
    }
}

#[expect(clippy::large_enum_variant, reason = "it lives from one queue to its handler")]
enum Item {
    Event(Event),
    Message(ProxyMessage),
}

impl ProxyEngine {
    /// Does a bounded amount of work: first what devices, transports and other hosts tell, which is as much as runs; then tenants
    /// in turns. Returns how many things were done.
    pub(super) fn take_turns(&mut self, cx: &Context) -> usize {
        let (mut handled, mut spent_ns) = (0, 0);
        while handled < cx.budget && spent_ns < POLL_NS {
            if let Some(message) = self.mailbox.pop() {
                self.handle(message, cx.now);
                // Not the next tenant's.
                self.unpaid_ns = 0;
            } else if let Some(item) = self.next_item() {
                self.do_item(item, cx.now);
                let ns = ITEM_NS + std::mem::take(&mut self.unpaid_ns);
                self.turns.spend(ns);
                spent_ns += ns;
            } else {
                break;
            }
            handled += 1;
        }
        handled
    }

    fn next_item(&mut self) -> Option<Item> {
        while let Some((share, lane)) = self.lanes.pop_listed() {
            self.turns.enter(share).lane.get_or_insert(lane);
        }
        loop {
            let (_, work) = self.turns.turn()?;
            if let Some(item) = work.pop() {
                return Some(item);
            }
            self.turns.leave();
        }
    }

    fn do_item(&mut self, item: Item, now: Instant) {
        match item {
            Item::Event(Event::Advance { session, stream }) => self.advance(session, stream, now),
            Item::Event(Event::Ready { comm }) => self.start_collective(comm, now),
            Item::Message(message) => self.handle(message, now),
        }
    }

    /// A communicator may have a collective to start.
    pub(super) fn look_again(&mut self, comm: Handle) {
        if let Some(live) = self.comms.get(comm) {
            self.turns.enter(live.share()).push(Event::Ready { comm });
        }
    }
}
