//! Streams of host-memory operations: order, synchronise, query, destroy.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use mccs_ipc::contention;
use mccs_ipc::protocol::Request;
use mccs_ipc::sync::StreamWord;
use mccs_ipc::types::Handle;

use crate::client::{Inner, locked};
use crate::requests::LIVENESS_EVERY;
use crate::shm_exchange::{Attempt, Round};
use crate::{Client, Error};

/// A stream. Cheap to clone. When the last clone is dropped its work goes on. The stream is given back to the service if that has ended, or else
/// when another one is made or dropped after its end.
#[derive(Clone)]
pub struct Stream {
    pub(crate) client: Client,
    pub(crate) shared: Arc<StreamShared>,
    owner: Arc<StreamOwner>,
}

/// State that ends with the last clone of a stream. Apart from [`StreamShared`], which others hold for a moment under the submission's
/// lock: what happens here takes that lock.
struct StreamOwner(Arc<StreamShared>);

impl Drop for StreamOwner {
    fn drop(&mut self) {
        let stream = &self.0;
        // The memory of a pending round may outlive the stream, and somebody read it.
        let settled = stream.client.0.settle_stream(stream);
        if settled.is_ok() && !stream.destroyed.load(Ordering::Acquire) {
            let left = Left { stream: stream.handle, word: stream.word, ticket: stream.last_ticket() };
            locked(&stream.client.0.left_streams).push(left);
            stream.client.0.destroy_left_streams();
        }
    }
}

/// A stream that nobody has any more, while the last of its work may run.
pub(crate) struct Left {
    stream: Handle,
    word: u32,
    ticket: u64,
}

impl Inner {
    /// Gives streams back that nobody has any more, and whose work has ended.
    pub(crate) fn destroy_left_streams(&self) {
        let has_ended = |left: &mut Left| self.word(left.word).is_ok_and(|word| word.load() >= left.ticket);
        // Asked for without the lock.
        let ended: Vec<_> = locked(&self.left_streams).extract_if(.., has_ended).collect();
        for left in ended {
            self.requests.send_and_forget(Request::DestroyStream { stream: left.stream });
        }
    }

    fn word(&self, word: u32) -> Result<&StreamWord, Error> {
        StreamWord::at(&self.segment, self.layout.words_offset, word)
            .ok_or_else(|| Error::ServiceGone("a stream's word is outside the segment".into()))
    }
}

pub(crate) struct StreamShared {
    client: Client,
    pub(crate) handle: Handle,
    word: u32,
    /// Whether another device says when operations may begin.
    pub(crate) is_ordered: bool,
    own: Weak<StreamShared>,
    /// Ticket of the last operation put into the ring. Raised under the submission's lock.
    last_ticket: AtomicU64,
    /// The round that came last, if it has not ended and the service does not know of it.
    pub(crate) pending: Mutex<Option<Round>>,
    crowding: Crowding,
    used: Mutex<Used>,
    destroyed: AtomicBool,
}

/// Communicators of a stream whose failures are still to be told, and how many callers wait to be told.
#[derive(Default)]
struct Used {
    comms: Vec<Handle>,
    waiting: u32,
}

impl Used {
    fn add(&mut self, comm: Handle) {
        if !self.comms.contains(&comm) {
            self.comms.push(comm);
        }
    }

    /// A caller has been told. Others that began to wait before are told the same, and whoever enqueued meanwhile is told of that.
    fn told(&mut self, is_last: bool) {
        if self.waiting == 1 && is_last {
            self.comms.clear();
        }
    }
}

/// A caller that waits for what a stream has been given so far.
struct Waiting<'a> {
    stream: &'a StreamShared,
    /// Ticket of the last operation.
    target: u64,
}

impl<'a> Waiting<'a> {
    fn begin(stream: &'a StreamShared) -> Self {
        locked(&stream.used).waiting += 1;
        Waiting { stream, target: stream.last_ticket() }
    }

    /// All has ended. Failure since the last call.
    fn failure(&self) -> Result<(), Error> {
        let mut used = locked(&self.stream.used);
        if used.comms.is_empty() {
            return Ok(());
        }
        let failure = self.stream.client.0.take_stream_failure(self.stream.handle, &used.comms);
        // A ticket rises before its communicator is added, which waits for the lock.
        used.told(self.stream.last_ticket() == self.target);
        failure.map_or(Ok(()), Err)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        locked(&self.stream.used).waiting -= 1;
    }
}

impl StreamShared {
    pub(crate) fn weak(&self) -> Weak<StreamShared> {
        self.own.clone()
    }

    /// Whether the service has ended an operation.
    pub(crate) fn has_ended(&self, ticket: u64) -> bool {
        self.word().is_ok_and(|word| word.load() >= ticket)
    }

    /// Whether the service has ended all it was given.
    pub(crate) fn is_idle(&self) -> bool {
        self.has_ended(self.last_ticket())
    }

    /// The last that the service was given.
    fn last_ticket(&self) -> u64 {
        self.last_ticket.load(Ordering::Acquire)
    }

    /// The ticket after the last. Called under the submission's lock.
    pub(crate) fn next_ticket(&self) -> u64 {
        self.last_ticket.load(Ordering::Relaxed) + 1
    }

    /// An operation is in the ring.
    pub(crate) fn enqueued(&self, ticket: u64, comm: Handle) {
        self.last_ticket.store(ticket, Ordering::Release);
        locked(&self.used).add(comm);
    }

    fn word(&self) -> Result<&StreamWord, Error> {
        self.client.0.word(self.word)
    }

    /// Whether the service has ended all, and has nothing to tell of: as where ranks exchange all by themselves.
    fn is_settled(&self) -> bool {
        self.is_idle() && locked(&self.used).comms.is_empty()
    }
}

/// Looks at a pending round before each further one gives the core away.
const LOOKS_BEFORE_YIELD: u32 = 16;

/// Notices that rounds end only when this process gives its core away. Then the one waited for is on the same core, and the scheduler, to which
/// both look busy, may leave them there. A process that sleeps is given a free core when it wakes. That costs as much as many rounds, so it is
/// tried less and less often where there is no free core.
struct Crowding {
    /// Rounds in a row that ended after giving the core away.
    crowded: AtomicU32,
    /// Rounds in a row that did not.
    free: AtomicU32,
    /// How many crowded ones there have to be.
    patience: AtomicU32,
}

/// Least and most rounds before a process tries to get another core.
const PATIENCE: (u32, u32) = (32, 1 << 14);

impl Default for Crowding {
    fn default() -> Self {
        Crowding { crowded: AtomicU32::new(0), free: AtomicU32::new(0), patience: AtomicU32::new(PATIENCE.0) }
    }
}

impl Crowding {
    /// A round has ended. Several threads may wait for one stream: a count that is lost does no harm.
    fn note(&self, gave_core_away: bool) {
        let (count, other) = if gave_core_away { (&self.crowded, &self.free) } else { (&self.free, &self.crowded) };
        other.store(0, Ordering::Relaxed);
        let in_a_row = count.load(Ordering::Relaxed).saturating_add(1);
        count.store(in_a_row, Ordering::Relaxed);
        if !gave_core_away && in_a_row >= PATIENCE.0 {
            self.patience.store(PATIENCE.0, Ordering::Relaxed);
        }
    }

    /// Whether it is time to try for another core.
    fn wants_to_move(&self) -> bool {
        let patience = self.patience.load(Ordering::Relaxed);
        if self.crowded.load(Ordering::Relaxed) < patience {
            return false;
        }
        self.crowded.store(0, Ordering::Relaxed);
        self.patience.store((patience * 2).min(PATIENCE.1), Ordering::Relaxed);
        true
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream").field("handle", &self.shared.handle).finish_non_exhaustive()
    }
}

impl Stream {
    pub(crate) fn new(client: Client, handle: Handle, word: u32, is_ordered: bool) -> Self {
        let (last_ticket, destroyed) = (AtomicU64::new(0), AtomicBool::new(false));
        let shared = Arc::new_cyclic(|own| StreamShared {
            client: client.clone(),
            handle,
            word,
            is_ordered,
            own: own.clone(),
            last_ticket,
            pending: Mutex::default(),
            crowding: Crowding::default(),
            used: Mutex::default(),
            destroyed,
        });
        Stream { client, owner: Arc::new(StreamOwner(Arc::clone(&shared))), shared }
    }

    /// Waits until everything enqueued so far has ended. Threads that wait at the same time are all told of a failure.
    ///
    /// # Errors
    /// The first operation's failure since the last call; [`Error::ServiceGone`] within a second of the service's death.
    pub fn synchronize(&self) -> Result<(), Error> {
        self.finish_round()?;
        if self.shared.is_settled() {
            return Ok(());
        }
        let waiting = Waiting::begin(&self.shared);
        let word = self.shared.word()?;
        let mut spin = self.client.0.word_spin;
        while !word.wait(waiting.target, spin, LIVENESS_EVERY) {
            self.client.0.requests.check_alive()?;
            spin = Duration::ZERO;
        }
        waiting.failure()
    }

    /// As [`Stream::synchronize`], for about that long at most. Whether everything enqueued so far has ended.
    ///
    /// # Errors
    /// As [`Stream::synchronize`].
    pub fn synchronize_for(&self, timeout: Duration) -> Result<bool, Error> {
        let start = Instant::now();
        self.finish_round()?;
        let waiting = Waiting::begin(&self.shared);
        let word = self.shared.word()?;
        let mut spin = self.client.0.word_spin;
        while !word.wait(waiting.target, spin, LIVENESS_EVERY.min(timeout.saturating_sub(start.elapsed()))) {
            self.client.0.requests.check_alive()?;
            if start.elapsed() >= timeout {
                return Ok(false);
            }
            spin = Duration::ZERO;
        }
        waiting.failure().map(|()| true)
    }

    /// Whether everything enqueued so far has ended.
    ///
    /// # Errors
    /// As [`Stream::synchronize`], when it has.
    pub fn query(&self) -> Result<bool, Error> {
        match self.attempt_round() {
            Some((Attempt::Waiting, waited)) if waited < self.client.0.spin => return Ok(false),
            Some((Attempt::Waiting | Attempt::Contradiction, _)) => self.client.0.settle_stream(&self.shared)?,
            Some((Attempt::Ended, _)) | None => {}
        }
        let waiting = Waiting::begin(&self.shared);
        if self.shared.word()?.load() < waiting.target {
            self.client.0.requests.check_alive()?;
            return Ok(false);
        }
        waiting.failure().map(|()| true)
    }

    /// Tries to end the pending round, if there is one. Also returns how long it has been pending.
    fn attempt_round(&self) -> Option<(Attempt, Duration)> {
        let mut pending = locked(&self.shared.pending);
        let round = pending.as_ref()?;
        let attempt = round.attempt(&self.client.0.regions());
        if attempt == Attempt::Ended {
            *pending = None;
            return Some((attempt, Duration::ZERO));
        }
        Some((attempt, round.since.elapsed()))
    }

    /// Ends the pending round, if there is one and the others come soon; otherwise the service is to end it, and this thread may sleep.
    fn finish_round(&self) -> Result<(), Error> {
        let mut last_look = None;
        for look in 0u32.. {
            let waited = match self.attempt_round() {
                None => return Ok(()),
                Some((Attempt::Ended, _)) => {
                    self.shared.crowding.note(look > LOOKS_BEFORE_YIELD);
                    return Ok(());
                }
                Some((Attempt::Waiting, waited)) if waited < self.client.0.spin => waited,
                Some(_) => break,
            };
            let away = last_look.replace(waited).map_or(Duration::ZERO, |last| waited.saturating_sub(last));
            let is_first_yield = look == LOOKS_BEFORE_YIELD;
            if contention::has_lost_core(away) {
                break;
            }
            if is_first_yield {
                let now = Instant::now();
                contention::begin_wait(now);
                if contention::is_starved(now) {
                    break;
                }
            }
            if look < LOOKS_BEFORE_YIELD {
                std::hint::spin_loop();
            } else if is_first_yield && self.shared.crowding.wants_to_move() {
                std::thread::sleep(Duration::from_nanos(1));
            } else {
                // If there are fewer cores than busy processes, the one waited for may need this one.
                std::thread::yield_now();
            }
        }
        self.client.0.settle_stream(&self.shared)
    }

    /// Ends the stream, and tells whether that worked; dropping it does the same later. Its work must have ended, and it must be the last clone.
    ///
    /// # Errors
    /// [`Error::Refused`] while work is in flight; [`Error::InvalidArgument`] while there are clones, as an open group has of the streams of its
    /// operations. The stream is dropped then.
    pub fn destroy(self) -> Result<(), Error> {
        // The service ends a session that uses a stream which is gone.
        if Arc::strong_count(&self.owner) > 1 {
            return Err(Error::argument(
                "the stream has clones, or an open group has operations on it; end those first",
            ));
        }
        self.client.0.settle_stream(&self.shared)?;
        self.client.0.requests.call(Request::DestroyStream { stream: self.shared.handle }, &[])?;
        self.shared.destroyed.store(true, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_who_wait_together_are_told_and_what_comes_meanwhile_is_kept() {
        let comm = Handle { index: 1, generation: 1 };
        let mut used = Used { comms: vec![comm], waiting: 2 };
        used.told(true);
        assert_eq!(used.comms, [comm], "the other is told of it, too");
        used.waiting -= 1;
        used.told(false);
        assert_eq!(used.comms, [comm], "an operation came meanwhile");
        used.told(true);
        assert!(used.comms.is_empty());
    }
}
