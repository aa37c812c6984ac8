//! Fair turns between tenants at a proxy engine: each waits for its own backlog, not for another's.

use std::collections::VecDeque;
use std::sync::Arc;

use mccs_ipc::types::Handle;
use mccs_model::SessionId;
use mccs_runtime::{Account, Share, TenantQueueReceiver, TenantQueues, Turns};

use crate::proxy::PROXY_QUEUE_MAX;
use crate::proxy::calls::lane_job::LaneJob;
use crate::proxy::mail::message::SessionMessage;

/// Cost of a message or an event, besides the work that it runs at once.
pub(crate) const ITEM_NS: u64 = 300;
/// Work of one item, about: what it leads to is an item of its own from then on.
const MUCH_NS: u64 = 2_000;
/// Work of one poll, about: the engines that share the thread wait so long.
pub(crate) const POLL_NS: u64 = 50_000;

/// Things to do that other things led to: a queue of each tenant, so that a chain of completions is not a chain of calls, and the
/// others of its tenant alone wait for it.
pub(crate) enum Event {
    /// A stream may start its next operations.
    Advance { session: SessionId, stream: u32 },
    /// A communicator may have a collective to start.
    Ready { comm: Handle },
    /// Port channels of a rank may go on.
    PortChannels { comm: Handle, rank: u32 },
    /// A message of port channels has come from another host, or has gone there.
    Lane(LaneJob),
    /// A session has ended.
    Close { session: SessionId },
}

/// A tenant's work at the engine.
#[derive(Default)]
struct TenantWork {
    /// First: they are what earlier messages led to.
    events: VecDeque<Event>,
    queue: Option<TenantQueueReceiver<SessionMessage>>,
    /// Events behind so many of the queue's messages, or behind its last one.
    behind: VecDeque<(usize, Event)>,
}

impl TenantWork {
    fn push(&mut self, event: Event) {
        self.events.push_back(event);
    }

    /// Behind all messages that are in the queue now.
    fn push_behind(&mut self, event: Event) {
        self.behind.push_back((PROXY_QUEUE_MAX, event));
    }

    /// Messages and events that wait for the tenant's turn.
    fn waiting(&self) -> usize {
        self.events.len() + self.behind.len() + self.queue.as_ref().map_or(0, TenantQueueReceiver::waiting)
    }

    fn pop(&mut self) -> Option<Item> {
        if let Some(event) = self.events.pop_front() {
            return Some(Item::Event(event));
        }
        let is_due = self.behind.front().is_some_and(|(left, _)| *left == 0);
        if let Some(message) = self.queue.as_ref().filter(|_| !is_due).and_then(TenantQueueReceiver::pop) {
            self.behind.iter_mut().for_each(|(left, _)| *left = left.saturating_sub(1));
            return Some(Item::Message(message));
        }
        self.behind.pop_front().map(|(_, event)| Item::Event(event))
    }
}

/// The next item.
pub(crate) enum Item {
    Event(Event),
    Message(SessionMessage),
}

/// All tenants' work at the engine, their turns, and its costs.
pub(crate) struct WorkQueues {
    /// From tenants.
    queues: TenantQueues<SessionMessage>,
    turns: Turns<TenantWork>,
    /// Work done at once, on the engine's thread, that its tenant has not paid for yet.
    unpaid_ns: u64,
}

impl WorkQueues {
    pub(crate) fn new(queues: TenantQueues<SessionMessage>) -> Self {
        WorkQueues { queues, turns: Turns::default(), unpaid_ns: 0 }
    }

    /// Leaves an event for its tenant's next turn.
    pub(crate) fn push(&mut self, share: Share, event: Event) {
        self.turns.enter(share).push(event);
    }

    /// A stream may start its next operations.
    pub(crate) fn advance(&mut self, share: Share, session: SessionId, stream: u32) {
        self.push(share, Event::Advance { session, stream });
    }

    /// The same, behind all that the tenant has sent before.
    pub(crate) fn push_behind(&mut self, share: Share, event: Event) {
        self.turns.enter(share).push_behind(event);
    }

    /// Work was done at once for whoever has the turn.
    pub(crate) fn charge(&mut self, ns: u64) {
        self.unpaid_ns += ns;
    }

    /// Whether whoever has the turn has done so much at once that more is to be an item of its own.
    pub(crate) fn has_done_much(&self) -> bool {
        self.unpaid_ns >= MUCH_NS
    }

    /// Charged work is nobody's.
    pub(crate) fn forgive(&mut self) {
        self.unpaid_ns = 0;
    }

    /// Has whoever has the turn pay for an item and what was charged. Returns what that comes to.
    pub(crate) fn pay(&mut self) -> u64 {
        let ns = ITEM_NS + std::mem::take(&mut self.unpaid_ns);
        self.turns.spend(ns);
        ns
    }

    /// The next thing to do, of the tenant whose turn it is.
    pub(crate) fn next(&mut self) -> Option<Item> {
        while let Some((share, queue)) = self.queues.pop_listed() {
            // The one of a tenant that has gone, and had this number, is empty: it was waited for.
            self.turns.enter(share).queue = Some(queue);
        }
        loop {
            let (_, work) = self.turns.turn()?;
            if let Some(item) = work.pop() {
                return Some(item);
            }
            self.turns.leave();
        }
    }

    /// Messages and events that wait for a tenant's turn.
    pub(crate) fn waiting(&self, share: Share) -> usize {
        self.turns.queue(share).map_or(0, TenantWork::waiting)
    }

    /// Whether nobody waits for a turn.
    pub(crate) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Whether nothing has come from tenants that was not looked at.
    pub(crate) fn has_no_mail(&self) -> bool {
        self.queues.is_empty()
    }

    pub(crate) fn account(&self) -> Arc<Account> {
        self.turns.account()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::proxy::operators::stuck_account::account_of;
    use crate::proxy::tests::at_once::Fixture;

    #[test]
    fn deadlines_count_from_the_call_and_not_from_its_turn() {
        let mut fixture = Fixture::with_timeout(Some(Duration::from_secs(60)));
        let (mut late, mut whole) = (fixture.join_all(1, 1, 2), fixture.join_all(2, 1, 2));
        let t = Instant::now();
        let after = |seconds| t + Duration::from_secs(seconds);
        assert!(late[0].call_at(8, t));
        assert!(whole.iter_mut().all(|rank| rank.call_at(8, t)));
        // The engine has had no turn for them before.
        fixture.poll_at(after(61));
        assert_eq!(late.iter().map(|rank| (rank.ended(), rank.failed())).collect::<Vec<_>>(), [(1, 1), (0, 0)]);
        assert!(whole.iter().all(|rank| (rank.ended(), rank.failed()) == (1, 0)), "nobody waits for it");
        // A call whose turn comes at once has the same time.
        assert!(whole[1].call_at(8, after(100)));
        fixture.poll_at(after(100));
        fixture.poll_at(after(159));
        assert_eq!(whole[1].failed(), 0);
        fixture.poll_at(after(160));
        assert_eq!(whole[1].failed(), 1);
    }

    #[test]
    fn who_asks_why_hears_since_when_a_rank_waits_and_what_waits_for_its_turn() {
        let mut fixture = Fixture::new();
        let mut ranks = fixture.join_all(1, 1, 2);
        let t = Instant::now();
        assert!(ranks[0].call_at(8, t));
        fixture.poll_at(t + Duration::from_secs(5));
        assert!(ranks[1].call_at(8, t));
        let at = t + Duration::from_secs(7);
        let account = account_of(&fixture.engine.state, ranks[0].comm, Vec::new(), None, at).expect("it lives");
        assert_eq!(account.ranks.iter().map(|rank| rank.waits_ms).collect::<Vec<_>>(), [None, Some(7000)]);
        assert_eq!(account.queued, 1, "the other's call");
    }

    #[test]
    fn one_call_waits_for_a_few_of_a_flood_and_not_for_all() {
        let mut fixture = Fixture::new();
        let (mut flood, mut victim) = (fixture.join(1, 1), fixture.join(2, 1));
        while flood.call(120_000) {}
        assert_eq!(flood.sent, PROXY_QUEUE_MAX as u64, "its queue is full");
        fixture.poll();
        for n in 1..=20 {
            while flood.call(120_000) {}
            assert!(victim.call(1024), "another's queue has room");
            let before = flood.ended();
            while victim.ended() < n {
                fixture.poll();
            }
            let others = flood.ended() - before;
            assert!(others <= 8, "call {n} waited for {others} of the flood");
        }
    }

    #[test]
    fn a_row_of_calls_behind_one_that_waited_lets_others_by() {
        let mut fixture = Fixture::new();
        let (mut flood, mut victim) = (fixture.join(1, 1), fixture.join(2, 1));
        while flood.call(120_000) {}
        // One poll does no more than its part of the row.
        fixture.poll();
        let first = flood.ended();
        assert!(first < flood.sent / 4, "{first} at once");
        assert!(victim.call(8));
        while victim.ended() < 1 {
            fixture.poll();
        }
        assert!(flood.ended() < first + 8);
    }

    #[test]
    fn the_end_of_a_session_that_another_engine_tells_of_comes_behind_what_the_session_has_sent() {
        let mut fixture = Fixture::new();
        let mut rank = fixture.join(1, 1);
        for _ in 0..10 {
            assert!(rank.call(8));
        }
        let session = rank.session.id;
        assert!(fixture.proxy.send(SessionMessage::Closed { session }.into()).is_ok());
        (0..10).for_each(|_| fixture.poll());
        assert_eq!((rank.ended(), fixture.engine.held()), (10, 0));
    }

    #[test]
    fn weights_divide_the_thread() {
        let mut fixture = Fixture::new();
        let (mut one, mut three) = (fixture.join(1, 1), fixture.join(2, 3));
        for _ in 0..400 {
            while one.call(20_000) {}
            while three.call(20_000) {}
            fixture.poll();
        }
        let ratio = three.ended() as f64 / one.ended() as f64;
        assert!((2.7..3.3).contains(&ratio), "{ratio}");
    }
}
