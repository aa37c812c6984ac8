//! Semaphore-ordered streams: polls GPUs' words, and starts operations when a GPU has come to them.
//!
//! A GPU cannot ring a doorbell, so somebody has to look at its words. The engine does while an operation is the head of such
//! a stream and its word has not come: at every poll for as long as the runtime spins, and then with pauses that grow with the
//! wait, an eighth of it, up to [`PAUSE_MAX`]. So what waited long starts at most an eighth later, and what waits for ever costs
//! about a thousand looks a second, which by estimate is half a percent of a core. Without such operations nobody looks.
//!
//! A look takes in a bounded number of semaphores, and tenants take turns in it: however many one of them never raises, those of
//! the others are looked at as often.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_ipc::timeline_semaphore::TimelineSemaphore;
use mccs_model::SessionId;
use mccs_tenants::Tenant;
use mccs_tenants::regions::Region;

/// Shortest pause between two looks: about what a sleep takes.
const PAUSE_MIN: Duration = Duration::from_micros(50);
/// Longest pause between two looks.
const PAUSE_MAX: Duration = Duration::from_millis(1);
/// Share of the time waited that a pause takes.
const PAUSE_SHARE: u32 = 8;
/// Words looked at in a poll: others of the runtime wait that long.
const LOOKS_MAX: usize = 64;

/// A timeline semaphore in a session's memory: a GPU raises it, and the service raises its other word.
pub struct StreamSemaphore {
    semaphore: NonNull<TimelineSemaphore>,
    /// Keeps it mapped.
    _region: Arc<Region>,
}

// SAFETY: a semaphore is made of atomics, and lies in the region that is kept mapped, on whichever thread it is used.
unsafe impl Send for StreamSemaphore {}

impl StreamSemaphore {
    /// The semaphore at an offset of a region; `None` where it would not lie in it, or not be aligned.
    #[must_use]
    pub fn new(region: Arc<Region>, offset_bytes: u64) -> Option<Self> {
        let ptr = region.range(offset_bytes, TimelineSemaphore::BYTES)?;
        // SAFETY: the range is in the region, which the new value keeps mapped.
        let semaphore = NonNull::from(unsafe { TimelineSemaphore::at(ptr) }?);
        Some(StreamSemaphore { semaphore, _region: region })
    }

    fn words(&self) -> &TimelineSemaphore {
        // SAFETY: mapped and aligned, as `new` has seen to.
        unsafe { self.semaphore.as_ref() }
    }

    /// Whether an operation may start.
    pub(crate) fn is_raised(&self, ticket: u64) -> bool {
        self.words().ready() >= ticket
    }

    /// Operations up to this one have ended.
    pub(crate) fn end(&self, ticket: u64) {
        self.words().end(ticket);
    }

    /// Lets through whoever waits, when the session has ended. It must come before its memory goes: a GPU that has the pages pinned sees nothing of
    /// what anybody writes there later.
    pub(crate) fn release(&self) {
        self.words().release();
    }
}

/// Streams of a tenant whose next operation waits for its GPU.
struct Watched {
    tenant: Arc<Tenant>,
    /// The next to look at first.
    streams: VecDeque<(SessionId, u32)>,
}

/// Streams whose next operation waits for its GPU.
#[derive(Default)]
pub(crate) struct SemaphoreWatch {
    /// By tenant, of whom the first has the next look. Past entries stay, for the memory: they are those of the configuration.
    watched: VecDeque<Watched>,
    /// Streams of all of them.
    count: usize,
    /// Since when none of them has been raised.
    since: Option<Instant>,
}

impl SemaphoreWatch {
    /// Whether no stream waits for its GPU.
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Streams that a look takes in.
    pub(crate) fn next_look(&self) -> usize {
        self.count.min(LOOKS_MAX)
    }

    /// Something has happened then.
    pub(crate) fn touch(&mut self, now: Instant) {
        self.since = Some(now);
    }

    /// Watches a stream; last of its tenant's.
    pub(crate) fn push(&mut self, tenant: &Arc<Tenant>, session: SessionId, index: u32) {
        let stream = (session, index);
        match self.watched.iter_mut().find(|watched| Arc::ptr_eq(&watched.tenant, tenant)) {
            Some(watched) => watched.streams.push_back(stream),
            None => {
                self.watched.push_back(Watched { tenant: Arc::clone(tenant), streams: VecDeque::from([stream]) });
            }
        }
        self.count += 1;
    }

    /// Takes the stream out that is to be looked at next. It is the next tenant's turn then.
    pub(crate) fn pop(&mut self) -> Option<(SessionId, u32)> {
        for _ in 0..self.watched.len() {
            self.watched.rotate_left(1);
            if let Some(stream) = self.watched.back_mut()?.streams.pop_front() {
                self.count -= 1;
                return Some(stream);
            }
        }
        None
    }

    /// Watches the stream again that was taken out last.
    pub(crate) fn put_back(&mut self, session: SessionId, index: u32) {
        if let Some(watched) = self.watched.back_mut() {
            watched.streams.push_back((session, index));
            self.count += 1;
        }
    }

    /// When to look again, if at all.
    pub(crate) fn look_at(&self, now: Instant) -> Option<Instant> {
        let waited = now.saturating_duration_since(self.since.filter(|_| !self.is_empty())?);
        Some(now + (waited / PAUSE_SHARE).clamp(PAUSE_MIN, PAUSE_MAX))
    }
}

#[cfg(test)]
mod tests {
    use mccs_tenants::Quota;

    use super::*;

    #[test]
    fn semaphores_that_a_tenant_never_raises_keep_nobody_elses_waiting() {
        let [many, few] = ["many", "few"].map(|name| Tenant::new(name.into(), Quota::least()));
        let mut watch = SemaphoreWatch::default();
        (0..10 * LOOKS_MAX as u32).for_each(|index| watch.push(&many, 1, index));
        (0..2).for_each(|index| watch.push(&few, 2, index));
        let mut seen = Vec::new();
        // As `Streams::look` does where none of them is raised.
        for _ in 0..10 {
            let mut of_few = 0;
            for _ in 0..LOOKS_MAX {
                let (session, index) = watch.pop().expect("one is left");
                of_few += u32::from(session == 2);
                seen.push((session, index));
                watch.put_back(session, index);
            }
            assert!(of_few >= 2, "each look takes in all of them");
        }
        // Nobody is left out: of the many, half of the looks are enough for so many.
        let of_many: std::collections::BTreeSet<_> = seen.iter().filter(|(session, _)| *session == 1).collect();
        assert_eq!(of_many.len(), 5 * LOOKS_MAX);
        assert!(!watch.is_empty());
        while watch.pop().is_some() {}
        assert!(watch.is_empty());
    }
}
