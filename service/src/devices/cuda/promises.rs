//! Ranks whose streams tell and wait by events ([`mccs_ipc::large::RankEvents`]): from those to the words that the service's streams know, and back.
//!
//! For each call a stream of the service waits, by words, for all that ends the operation, and records the rank's event behind it:
//! the call is *promised*. Whether the rank's stream has come to a call, the GPU's thread asks its event again and again; no stream of
//! the service waits for an event, since nothing could release it when the tenant has died. A promise waits too, and in a queue of the GPU's: before
//! all ranks have called there is one only for the first few communicators of a GPU (`queues.rs`).

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use mccs_cuda::{Context, DriverError, Event, OwnedStream, WordOperation};
use mccs_ipc::large::{CALLED_EVENTS, LargeWord, RankEvents, called_event};
use mccs_ipc::types::Handle;

use super::engines::{CopyEngines, tell};
use crate::engines::proxy::ProxyMessage;

/// Promises to a rank that are not kept: with one entry for every word they fit into a stream beside which nothing blocks.
const PROMISES_MAX: u64 = 32;
/// How long an event is looked at without pause. After that the pauses are an eighth of how long it has been waited for.
const SPIN_FOR: Duration = Duration::from_micros(300);
/// Longest pause.
const LOOK_AFTER_MAX: Duration = Duration::from_millis(1);

/// What promises to a rank are made with.
pub(super) struct Promises {
    stream: OwnedStream,
    called: Vec<Event>,
    done: Event,
}

impl Promises {
    pub(super) fn new(context: &Context) -> Result<Self, DriverError> {
        let called = (0..CALLED_EVENTS).map(|_| Event::shared(context)).collect::<Result<_, _>>()?;
        Ok(Promises { stream: OwnedStream::new(context)?, called, done: Event::shared(context)? })
    }

    /// For the rank.
    pub(super) fn export(&self) -> Result<RankEvents, DriverError> {
        let handle = |event: &Event| event.export().map(|handle| handle.0.to_vec());
        let called = self.called.iter().map(handle).collect::<Result<_, _>>()?;
        Ok(RankEvents { called, done: handle(&self.done)? })
    }
}

/// The calls of a rank, on the thread of its GPU.
pub(super) struct Caller {
    /// Whoever has work keeps them.
    engines: Weak<CopyEngines>,
    rank: u32,
    comm: Handle,
    /// Operations that the rank has called, that were promised, and that its stream has come to.
    called: u64,
    promised: u64,
    come: u64,
    waits_since: Option<Instant>,
}

impl Caller {
    pub(super) fn new(engines: &Arc<CopyEngines>, rank: u32, comm: Handle) -> Self {
        Caller { engines: Arc::downgrade(engines), rank, comm, called: 0, promised: 0, come: 0, waits_since: None }
    }

    pub(super) fn is_of(&self, engines: &Arc<CopyEngines>, rank: u32) -> bool {
        self.rank == rank && std::ptr::eq(self.engines.as_ptr(), Arc::as_ptr(engines))
    }

    /// The rank has called once more.
    pub(super) fn call(&mut self) {
        self.called += 1;
    }

    /// After what time to look again; none if nothing is waited for.
    pub(super) fn look_after(&self) -> Option<Duration> {
        let waited = self.waits_since?.elapsed();
        Some(if waited < SPIN_FOR { Duration::ZERO } else { (waited / 8).min(LOOK_AFTER_MAX) })
    }

    /// Whether there is a promise though not all ranks have called.
    pub(super) fn is_ahead(&self) -> bool {
        let engines = self.engines.upgrade();
        engines.is_some_and(|engines| self.promised > engines.begun_and_ended().1 && !engines.is_active())
    }

    /// Promises what there is room for, and tells the words of events that have happened. Returns whether anything moved; none when
    /// there is nothing to look at any more.
    pub(super) fn look(&mut self, may_be_ahead: bool) -> Option<bool> {
        let engines = self.engines.upgrade().filter(|engines| !engines.is_released())?;
        let before = (self.promised, self.come);
        let may_promise = may_be_ahead || engines.is_active();
        if let Err(error) = self.advance(&engines, may_promise) {
            let message = format!("events of rank {}, operation {}: {error}", self.rank, self.come + 1);
            tell(engines.done(), ProxyMessage::DeviceFailed { comm: self.comm, message });
            return None;
        }
        let has_moved = before != (self.promised, self.come);
        if self.come == self.called && self.promised == self.called {
            self.waits_since = None;
        } else if has_moved || self.waits_since.is_none() {
            self.waits_since = Some(Instant::now());
        }
        Some(has_moved)
    }

    fn advance(&mut self, engines: &CopyEngines, may_promise: bool) -> Result<(), DriverError> {
        let (_, ended) = engines.begun_and_ended();
        let promises = engines.promises(self.rank);
        // What has ended holds nobody up.
        while (may_promise || self.promised < ended) && self.promised < self.called.min(ended + PROMISES_MAX) {
            self.promise(engines, promises, self.promised + 1)?;
            self.promised += 1;
            engines.page().tell_large(self.rank, LargeWord::Promised, self.promised);
        }
        while self.come < self.called && promises.called[called_event(self.come + 1)].has_happened()? {
            self.come += 1;
            engines.page().tell_large(self.rank, LargeWord::Ready, self.come);
        }
        Ok(())
    }

    fn promise(&self, engines: &CopyEngines, promises: &Promises, number: u64) -> Result<(), DriverError> {
        let wait = |rank, word| WordOperation::Wait(engines.word(rank, word), number);
        let arrived = (0..engines.nranks()).map(|peer| wait(peer, LargeWord::Arrived));
        let words: Vec<_> = arrived.chain([wait(self.rank, LargeWord::Kept)]).collect();
        let stream = promises.stream.raw();
        // SAFETY: stream and event live with the engines, are of one context, and that is this thread's.
        unsafe {
            stream.words(&words)?;
            promises.done.record(stream)
        }
    }
}
