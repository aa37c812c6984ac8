//! Bridge between CUDA events of ranks' streams ([`mccs_ipc::large::RankEvents`]) and the words
//! that the service's streams know.
//!
//! When an operation has been issued, a stream of the service waits, by words, for all that ends it, and records the rank's event
//! behind that: the call is *promised*. Not before: streams share queues (`hw_queue_admission.rs`), and what a promise waits for must not come behind it.
//! Whether the rank's stream has come to a call, the GPU's thread asks its event again and again; no stream of
//! the service waits for an event, since nothing could release it when the tenant has died.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use mccs_cuda::{Context, DriverError, Event, OwnedStream, WordOperation};
use mccs_ipc::large::{CALLED_EVENTS, LargeWord, RankEvents, called_event};
use mccs_ipc::types::Handle;

use crate::DeviceEvent;
use crate::cuda::copy_engine::CopyEngines;

/// How long an event is looked at without pause. After that the pauses are an eighth of how long it has been waited for.
const SPIN_FOR: Duration = Duration::from_micros(300);
/// Longest pause.
const LOOK_AFTER_MAX: Duration = Duration::from_millis(1);
/// Events of a rank that are asked for in a look: each is a call of the driver.
const EVENTS_AT_A_TIME: usize = 16;

/// Means of making promises to a rank.
pub(crate) struct EventBridge {
    stream: OwnedStream,
    called: Vec<Event>,
    done: Event,
}

impl EventBridge {
    pub(crate) fn new(context: &Context) -> Result<Self, DriverError> {
        let called = (0..CALLED_EVENTS).map(|_| Event::shared(context)).collect::<Result<_, _>>()?;
        Ok(EventBridge { stream: OwnedStream::new(context)?, called, done: Event::shared(context)? })
    }

    /// Stream on which they are made.
    pub(crate) fn stream(&self) -> &OwnedStream {
        &self.stream
    }

    /// An operation is issued: behind its end comes the rank's event.
    pub(crate) fn promise(&self, engines: &CopyEngines, rank: u32, number: u64) -> Result<(), DriverError> {
        let wait = |rank, word| WordOperation::Wait(engines.word(rank, word), number);
        let arrived = (0..engines.nranks()).map(|peer| wait(peer, LargeWord::Arrived));
        let words: Vec<_> = arrived.chain([wait(rank, LargeWord::Kept)]).collect();
        // SAFETY: stream and event live with the engines, are of one context, and that is the calling thread's.
        unsafe {
            self.stream.raw().words(&words)?;
            self.done.record(self.stream.raw())?;
        }
        engines.page().tell_large(rank, LargeWord::Promised, number);
        Ok(())
    }

    /// For the rank.
    pub(crate) fn export(&self) -> Result<RankEvents, DriverError> {
        let handle = |event: &Event| event.export().map(|handle| handle.0.to_vec());
        let called = self.called.iter().map(handle).collect::<Result<_, _>>()?;
        Ok(RankEvents { called, done: handle(&self.done)? })
    }
}

/// The calls of a rank, on the thread of its GPU.
pub(crate) struct Caller {
    /// Whoever has work keeps them.
    engines: Weak<CopyEngines>,
    rank: u32,
    comm: Handle,
    /// Operations that the rank has called, and that its stream has come to.
    called: u64,
    come: u64,
    waits_since: Option<Instant>,
}

impl Caller {
    pub(crate) fn new(engines: &Arc<CopyEngines>, rank: u32, comm: Handle) -> Self {
        Caller { engines: Arc::downgrade(engines), rank, comm, called: 0, come: 0, waits_since: None }
    }

    pub(crate) fn is_of(&self, engines: &Arc<CopyEngines>, rank: u32) -> bool {
        self.rank == rank && std::ptr::eq(self.engines.as_ptr(), Arc::as_ptr(engines))
    }

    /// The rank has called once more.
    pub(crate) fn call(&mut self) {
        self.called += 1;
        // Others may be looked at first.
        self.waits_since.get_or_insert_with(Instant::now);
    }

    /// After what time to look again; none if nothing is waited for.
    pub(crate) fn look_after(&self) -> Option<Duration> {
        let waited = self.waits_since?.elapsed();
        Some(if waited < SPIN_FOR { Duration::ZERO } else { (waited / 8).min(LOOK_AFTER_MAX) })
    }

    /// Tells the words of events that have happened. Returns whether there were any; none when there is nothing to look at any more.
    pub(crate) fn look(&mut self) -> Option<bool> {
        let engines = self.engines.upgrade().filter(|engines| !engines.is_released())?;
        let before = self.come;
        if let Err(error) = self.advance(&engines) {
            let message = format!("events of rank {}, operation {}: {error}", self.rank, self.come + 1);
            engines.device_events().tell(DeviceEvent::CommFailed { comm: self.comm, message });
            return None;
        }
        let has_moved = before != self.come;
        if self.come == self.called {
            self.waits_since = None;
        } else if has_moved || self.waits_since.is_none() {
            self.waits_since = Some(Instant::now());
        }
        Some(has_moved)
    }

    fn advance(&mut self, engines: &CopyEngines) -> Result<(), DriverError> {
        let Some(bridge) = engines.event_bridge(self.rank) else { return Ok(()) };
        for _ in 0..EVENTS_AT_A_TIME {
            if self.come == self.called || !bridge.called[called_event(self.come + 1)].has_happened()? {
                break;
            }
            self.come += 1;
            engines.page().tell_large(self.rank, LargeWord::Ready, self.come);
        }
        Ok(())
    }
}
