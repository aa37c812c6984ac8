//! Streams: ordered queues of operations.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mccs_ipc::protocol::Request;
use mccs_ipc::sync::StreamWord;
use mccs_ipc::types::Handle;

use crate::requests::LIVENESS_EVERY;
use crate::{Client, Error};

/// A stream. Cheap to clone. When the last clone is dropped its work goes on, and the stream is given back to the service
/// if it has ended; [`Stream::synchronize`] first, in a program that makes many.
#[derive(Clone)]
pub struct Stream {
    pub(crate) client: Client,
    pub(crate) shared: Arc<StreamShared>,
}

pub(crate) struct StreamShared {
    client: Client,
    pub(crate) handle: Handle,
    word: u32,
    /// Ticket of the last operation put into the ring. Raised under the ring's lock.
    last_ticket: AtomicU64,
    /// Communicators used since the last synchronize.
    comms: Mutex<Vec<Handle>>,
    destroyed: AtomicBool,
}

impl Drop for StreamShared {
    fn drop(&mut self) {
        let ended = |word: &StreamWord| word.load() >= self.last_ticket.load(Ordering::Acquire);
        if !*self.destroyed.get_mut() && self.word().is_ok_and(ended) {
            self.client.0.requests.send_and_forget(Request::DestroyStream { stream: self.handle });
        }
    }
}

impl StreamShared {
    /// The ticket after the last. Called under the ring's lock.
    pub(crate) fn next_ticket(&self) -> u64 {
        self.last_ticket.load(Ordering::Relaxed) + 1
    }

    /// An operation is in the ring.
    pub(crate) fn enqueued(&self, ticket: u64, comm: Handle) {
        self.last_ticket.store(ticket, Ordering::Release);
        let mut comms = self.comms.lock().unwrap_or_else(PoisonError::into_inner);
        if !comms.contains(&comm) {
            comms.push(comm);
        }
    }

    fn word(&self) -> Result<&StreamWord, Error> {
        let inner = &self.client.0;
        StreamWord::at(&inner.segment, inner.layout.words_offset, self.word)
            .ok_or_else(|| Error::ServiceGone("a stream's word is outside the segment".into()))
    }
}

impl Stream {
    pub(crate) fn new(client: Client, handle: Handle, word: u32) -> Self {
        let comms = Mutex::default();
        let (last_ticket, destroyed) = (AtomicU64::new(0), AtomicBool::new(false));
        let shared = StreamShared { client: client.clone(), handle, word, last_ticket, comms, destroyed };
        Stream { client, shared: Arc::new(shared) }
    }

    /// Waits until everything enqueued so far has ended.
    ///
    /// # Errors
    /// The first operation's failure since the last call; [`Error::ServiceGone`] within a second of the service's death.
    pub fn synchronize(&self) -> Result<(), Error> {
        let target = self.shared.last_ticket.load(Ordering::Acquire);
        let word = self.shared.word()?;
        let mut spin = self.client.0.spin;
        while !word.wait(target, spin, LIVENESS_EVERY) {
            self.client.0.requests.check_alive()?;
            spin = Duration::ZERO;
        }
        self.failure()
    }

    /// Whether everything enqueued so far has ended.
    ///
    /// # Errors
    /// As [`Stream::synchronize`], when it has.
    pub fn query(&self) -> Result<bool, Error> {
        let target = self.shared.last_ticket.load(Ordering::Acquire);
        if self.shared.word()?.load() < target {
            self.client.0.requests.check_alive()?;
            return Ok(false);
        }
        self.failure().map(|()| true)
    }

    fn failure(&self) -> Result<(), Error> {
        let mut comms = self.shared.comms.lock().unwrap_or_else(PoisonError::into_inner);
        let failure = self.client.0.take_stream_failure(self.shared.handle, &comms);
        comms.clear();
        failure.map_or(Ok(()), Err)
    }

    /// Ends the stream. Its work must have ended.
    ///
    /// # Errors
    /// [`Error::Refused`] while work is in flight.
    pub fn destroy(self) -> Result<(), Error> {
        self.client.0.requests.call(Request::DestroyStream { stream: self.shared.handle }, &[])?;
        self.shared.destroyed.store(true, Ordering::Release);
        Ok(())
    }
}
