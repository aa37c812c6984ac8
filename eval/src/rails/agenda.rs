//! Event queue of the rails simulator.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// An event at a time.
#[derive(Debug, Clone, Copy)]
pub(super) enum Event {
    /// The task at the head of a lane has ended.
    TaskEnds {
        host: usize,
        lane: usize,
    },
    /// The stream goes on that waits for a move.
    MoveTold {
        host: usize,
        number: usize,
    },
    Network(NetworkEvent),
}

/// Events to come, in order of time and then of their making.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    now_ns: f64,
    made: u64,
    events: BinaryHeap<Reverse<Due>>,
}

#[derive(Debug, Clone, Copy)]
struct Due {
    at_ns: f64,
    number: u64,
    event: Event,
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at_ns.total_cmp(&other.at_ns).then(self.number.cmp(&other.number))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Due {}

impl Agenda {
    pub(super) fn now_ns(&self) -> f64 {
        self.now_ns
    }

    pub(super) fn at(&mut self, at_ns: f64, event: Event) {
        self.made += 1;
        self.events.push(Reverse(Due { at_ns: at_ns.max(self.now_ns), number: self.made, event }));
    }

    pub(super) fn next(&mut self) -> Option<Event> {
        let Reverse(due) = self.events.pop()?;
        self.now_ns = due.at_ns;
        Some(due.event)
    }
}

/// A queue in which messages of a move follow each other: on a channel, from a host to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Link {
    pub(super) number: usize,
    pub(super) channel: usize,
    pub(super) src: usize,
    pub(super) dst: usize,
}

/// An event of moves and their messages, of which `at` counts those of a link.
#[derive(Debug, Clone, Copy)]
pub(super) enum NetworkEvent {
    /// A host's service has heard of a move.
    Begins { host: usize, number: usize },
    /// The sender's thread has posted a message.
    Posted { link: Link, at: usize },
    /// The sender has heard where a message goes.
    Credited { link: Link, at: usize },
    /// A message's first byte is at the receiver.
    Head { link: Link, at: usize },
    /// Its last one.
    Arrived { link: Link, at: usize },
    /// The sender knows that.
    Acknowledged { host: usize, number: usize },
}
