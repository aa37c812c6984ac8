//! A rank's connection: the triggers that wait for it, in order, and the signals that have come.

use std::collections::VecDeque;
use std::time::Instant;

use mccs_ipc::port_channels::{ENDED, Kinds, PutMemories, Trigger};
use mccs_telemetry::stuck::SignalWait;

use crate::proxy::calls::channel_order::Writer;

/// A rank's connection, as both ends name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ConnectionName {
    pub(super) peer: u32,
    pub(super) tag: u32,
}

/// Place of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PeerPlace {
    Here,
    /// It was here.
    Left,
    Elsewhere,
}

/// A trigger that waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Queued {
    pub(super) trigger: Trigger,
    pub(super) memories: Option<PutMemories>,
    pub(super) position: FifoPosition,
}

/// Behind a trigger in the FIFO that it was in: to there its flush tells.
#[derive(Debug, Clone, Copy)]
pub(super) struct FifoPosition {
    pub(super) writer: Writer,
    pub(super) end: u64,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Connection {
    name: ConnectionName,
    /// Whether the peer is on another host.
    is_elsewhere: bool,
    queue: VecDeque<Queued>,
    /// Whether the first in the queue runs, or to another host: whether it waits for its turn in the lane.
    runs: bool,
    /// To another host: long puts whose bytes are under way, and flushes behind these.
    sending: VecDeque<Sending>,
    /// Long puts that have begun.
    long_puts: u64,
    /// Signals that have come.
    arrived: u64,
    /// Whether the peer has left.
    has_ended: bool,
    /// Since when threads wait for the next signal, as far as was looked.
    waits: Option<Wait>,
}

/// See [`Connection::sending`].
#[derive(Debug)]
struct Sending {
    /// The number of a long put that has not ended.
    put: Option<u64>,
    flushes: Option<FifoPosition>,
}

/// A wait for the signal behind so many others.
#[derive(Debug, Clone, Copy)]
struct Wait {
    arrived: u64,
    since: Instant,
}

impl Connection {
    /// A connection with so many signals that have come before it was named.
    pub(super) fn new(name: ConnectionName, place: PeerPlace, arrived: u64) -> Self {
        Connection {
            name,
            is_elsewhere: place == PeerPlace::Elsewhere,
            queue: VecDeque::new(),
            runs: false,
            sending: VecDeque::new(),
            long_puts: 0,
            arrived,
            has_ended: place == PeerPlace::Left,
            waits: None,
        }
    }

    pub(super) fn name(&self) -> ConnectionName {
        self.name
    }

    pub(super) fn is_elsewhere(&self) -> bool {
        self.is_elsewhere
    }

    pub(super) fn front(&self) -> Option<&Queued> {
        self.queue.front()
    }

    /// Takes a trigger in. Returns whether it is the first one.
    pub(super) fn push(&mut self, queued: Queued) -> bool {
        self.queue.push_back(queued);
        self.queue.len() == 1
    }

    /// The first trigger runs from now on. Returns false if one runs already.
    pub(super) fn begin_turn(&mut self) -> bool {
        !std::mem::replace(&mut self.runs, true)
    }

    /// Nothing of it runs any more. Returns whether something did.
    pub(super) fn end_turn(&mut self) -> bool {
        std::mem::take(&mut self.runs)
    }

    /// Takes the first trigger away.
    pub(super) fn pop(&mut self) -> Option<Queued> {
        self.queue.pop_front()
    }

    /// Whether triggers wait of which none runs.
    pub(super) fn is_ready(&self) -> bool {
        !self.queue.is_empty() && !self.runs
    }

    /// The first trigger is a long put, whose bytes are sent now. Returns its number.
    pub(super) fn begin_long_put(&mut self) -> u64 {
        self.long_puts += 1;
        if let Some(Queued { trigger, position, .. }) = self.queue.pop_front() {
            let flushes = trigger.kinds.has(Kinds::FLUSH).then_some(position);
            self.sending.push_back(Sending { put: Some(self.long_puts), flushes });
        }
        self.long_puts
    }

    /// The bytes of a long put have been sent. Returns whether they were under way.
    pub(super) fn end_long_put(&mut self, put: u64) -> bool {
        let sent = self.sending.iter_mut().find(|sending| sending.put == Some(put));
        sent.map(|sent| sent.put = None).is_some()
    }

    /// A flush has come to its turn: it waits for long puts under way.
    pub(super) fn flush(&mut self, position: FifoPosition) {
        self.sending.push_back(Sending { put: None, flushes: Some(position) });
    }

    /// Takes flushes with nothing under way before them.
    pub(super) fn pop_flushed(&mut self) -> impl Iterator<Item = FifoPosition> {
        let ended = || self.sending.pop_front_if(|sending| sending.put.is_none());
        std::iter::from_fn(ended).filter_map(|ended| ended.flushes)
    }

    pub(super) fn signal(&mut self) {
        self.arrived += 1;
    }

    pub(super) fn arrived(&self) -> u64 {
        self.arrived
    }

    /// Value of the word whose waiters wait for signals.
    pub(super) fn arrived_word(&self) -> u64 {
        self.arrived | if self.has_ended { ENDED } else { 0 }
    }

    /// Nothing comes any more.
    pub(super) fn end_signals(&mut self) {
        self.has_ended = true;
    }

    /// The same, and what waits is given up.
    pub(super) fn end(&mut self) {
        (self.has_ended, self.runs) = (true, false);
        self.queue.clear();
        self.sending.clear();
    }

    /// The signal that comes next, if any does.
    pub(super) fn next_signal(&self) -> Option<SignalWait> {
        let ConnectionName { peer, tag } = self.name;
        (!self.has_ended).then_some(SignalWait { peer, tag, number: self.arrived + 1 })
    }

    /// Somebody waits for the next signal, or nobody does. Returns since when, as far as was looked.
    pub(super) fn awaited_since(&mut self, is_awaited: bool, now: Instant) -> Option<Instant> {
        let arrived = self.arrived;
        let wait = || match self.waits {
            Some(wait) if wait.arrived == arrived => wait,
            _ => Wait { arrived, since: now },
        };
        self.waits = (is_awaited && !self.has_ended).then(wait);
        self.waits.map(|wait| wait.since)
    }
}
