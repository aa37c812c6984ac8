//! A port channel: put, signal, flush, wait and poll.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mccs_ipc::port_channels::{
    ConnectionWords, Kinds, PUT_BYTES_MAX, PortChannelRequest, Trigger, Waited, counted, has_ended, wait_for,
};
use mccs_ipc::types::ErrorClass;

use super::{Connection, DevicePortChannel, Shared};
use crate::Error;
use crate::requests::LIVENESS_EVERY;

/// Longest put of one trigger: whole pages.
const PUT_AT_ONCE: u64 = PUT_BYTES_MAX / 4096 * 4096;

/// For how long a wait that has ended waits for the reason, once.
const REASON_WITHIN: Duration = Duration::from_millis(500);
/// How often it looks.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(1);

/// A channel to a peer under a tag, with a memory to put from and one of the peer's to put into. See [`PortChannels`](super::PortChannels).
///
/// All calls may be made by any number of threads at once. Those that hand over (`put`, `signal`) return at once, unless the FIFO is full.
/// Requests to channels of one peer and tag are done in that order. A mistake that the service finds fails the communicator.
pub struct PortChannel {
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    number: u32,
    /// Lengths of its memories, if it has any.
    lengths: Option<Lengths>,
    /// Whether it has said so.
    awaits: AtomicBool,
}

impl std::fmt::Debug for PortChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Connection { peer, tag, .. } = &*self.connection;
        f.debug_struct("PortChannel").field("peer", peer).field("tag", tag).finish_non_exhaustive()
    }
}

/// Bytes of the memory to put from, and of the one to put into.
#[derive(Clone, Copy)]
pub(super) struct Lengths {
    pub(super) from: u64,
    pub(super) into: u64,
}

/// A put as it is called.
#[derive(Clone, Copy)]
struct Put {
    from_offset: u64,
    into_offset: u64,
    bytes: u64,
}

impl Put {
    const NOTHING: Put = Put { from_offset: 0, into_offset: 0, bytes: 0 };
}

impl PortChannel {
    pub(super) fn new(shared: Arc<Shared>, connection: Arc<Connection>, number: u32, lengths: Option<Lengths>) -> Self {
        PortChannel { shared, connection, number, lengths, awaits: AtomicBool::new(false) }
    }

    /// The rank that it leads to.
    #[must_use]
    pub fn peer(&self) -> u32 {
        self.connection.peer
    }

    /// Its tag.
    #[must_use]
    pub fn tag(&self) -> u32 {
        self.connection.tag
    }

    /// Means by which kernels of this rank use the channel (`mccs/device.cuh`); none for a rank whose memory is the host's. Kernels and
    /// threads each take signals by a count of their own: of one peer and tag let only the ones wait, or only the others.
    #[must_use]
    pub fn device(&self) -> Option<DevicePortChannel> {
        let (_, kernels) = self.shared.gpu.as_ref()?;
        kernels.channel(&self.shared.segment, self.connection.number, self.number)
    }

    /// Begins to copy `bytes` bytes from this rank's memory, at `from_offset`, into the peer's, at `into_offset`. The source stays as it is until a [flush](PortChannel::flush) has
    /// returned. The peer may look behind a later [signal](PortChannel::signal).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a range that leaves a memory, and nothing is put. [`Error::Failed`] where the communicator has failed.
    pub fn put(&self, from_offset: u64, into_offset: u64, bytes: u64) -> Result<(), Error> {
        self.put_and(Put { from_offset, into_offset, bytes }, Kinds::PUT).map(drop)
    }

    /// Tells the peer that all puts before are there: one of its [waits](PortChannel::wait) under this tag ends.
    ///
    /// # Errors
    /// [`Error::Failed`] where the communicator has failed.
    pub fn signal(&self) -> Result<(), Error> {
        self.push(Kinds::SIGNAL, Put::NOTHING).map(drop)
    }

    /// [Puts](PortChannel::put), then [signals](PortChannel::signal), in one call.
    ///
    /// # Errors
    /// As [`PortChannel::put`].
    pub fn put_with_signal(&self, from_offset: u64, into_offset: u64, bytes: u64) -> Result<(), Error> {
        self.put_and(Put { from_offset, into_offset, bytes }, Kinds::PUT.and(Kinds::SIGNAL)).map(drop)
    }

    /// [Puts](PortChannel::put), [signals](PortChannel::signal) and [flushes](PortChannel::flush), in one call.
    ///
    /// # Errors
    /// As [`PortChannel::put`].
    pub fn put_with_signal_and_flush(&self, from_offset: u64, into_offset: u64, bytes: u64) -> Result<(), Error> {
        let kinds = Kinds::PUT.and(Kinds::SIGNAL).and(Kinds::FLUSH);
        let position = self.put_and(Put { from_offset, into_offset, bytes }, kinds)?;
        self.wait_for_flush(position)
    }

    /// Returns when all that was called before on channels of this peer and tag has ended: memory that was put from may be written again.
    ///
    /// # Errors
    /// [`Error::Failed`] where the communicator has failed, [`Error::ServiceGone`].
    pub fn flush(&self) -> Result<(), Error> {
        let position = self.push(Kinds::FLUSH, Put::NOTHING)?;
        self.wait_for_flush(position)
    }

    /// Waits for a signal of the peer under this tag, and takes it: each ends one wait.
    ///
    /// # Errors
    /// [`Error::Failed`] where the communicator fails or the peer leaves before, also because nothing has come within the operator's
    /// `limits.operation_timeout`. It says for which signal of whom this rank has waited. [`Error::ServiceGone`].
    pub fn wait(&self) -> Result<(), Error> {
        self.wait_until(None).map(drop)
    }

    /// As [`PortChannel::wait`], for so long. Whether a signal has come; one that has not is left to a later wait.
    ///
    /// # Errors
    /// As [`PortChannel::wait`].
    pub fn wait_for(&self, timeout: Duration) -> Result<bool, Error> {
        self.wait_until(Instant::now().checked_add(timeout))
    }

    /// Takes a signal of the peer under this tag if one has come, and returns whether it has.
    ///
    /// # Errors
    /// As [`PortChannel::wait`]: none comes any more.
    pub fn poll(&self) -> Result<bool, Error> {
        self.take_signal()
    }

    /// Says whether this rank waits for a signal, for programs that [poll](PortChannel::poll). While it does, operators see it wait
    /// (`mccsctl why-stuck`), and the operator's `limits.operation_timeout` counts, as for [`PortChannel::wait`]. A wait that is short need not be
    /// told: a signal costs the service a system call meanwhile.
    ///
    /// # Errors
    /// [`Error::ServiceGone`].
    pub fn say_waiting(&self, waits: bool) -> Result<(), Error> {
        if self.awaits.swap(waits, Ordering::AcqRel) != waits {
            let word = self.words()?.arrived();
            if waits { word.begin_wait() } else { word.end_wait() }
        }
        Ok(())
    }

    /// Takes a signal, and returns whether one has come before the deadline.
    fn wait_until(&self, deadline: Option<Instant>) -> Result<bool, Error> {
        let mut spin = self.shared.client.0.word_spin;
        let words = self.words()?;
        while !self.take_signal()? {
            let left = deadline.map_or(LIVENESS_EVERY, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(false);
            }
            let next = self.connection.taken.load(Ordering::Acquire) + 1;
            if wait_for(words.arrived(), next, spin, left.min(LIVENESS_EVERY)) == Waited::TimedOut {
                self.shared.client.0.requests.check_alive()?;
                self.shared.check_member()?;
                spin = Duration::ZERO;
            }
        }
        Ok(true)
    }

    /// Takes a signal, if there is one. Several threads take one each.
    fn take_signal(&self) -> Result<bool, Error> {
        let word = self.words()?.arrived().load();
        let taken = &self.connection.taken;
        let take = |taken: u64| (taken < counted(word)).then_some(taken + 1);
        if taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok() {
            return Ok(true);
        }
        if has_ended(word) { Err(self.ended()) } else { Ok(false) }
    }

    fn wait_for_flush(&self, position: u64) -> Result<(), Error> {
        let mut spin = self.shared.client.0.word_spin;
        let words = self.words()?;
        loop {
            match wait_for(words.flushed(), position + 1, spin, LIVENESS_EVERY) {
                Waited::Reached => return Ok(()),
                Waited::Ended => return Err(self.failed("flush")),
                Waited::TimedOut => {
                    self.shared.client.0.requests.check_alive()?;
                    self.shared.check_member()?;
                    spin = Duration::ZERO;
                }
            }
        }
    }

    /// Hands over a put, in as many triggers as it takes; `kinds` is for the last.
    fn put_and(&self, put: Put, kinds: Kinds) -> Result<u64, Error> {
        self.check(&put)?;
        let Put { mut from_offset, mut into_offset, bytes: mut left } = put;
        while left > PUT_AT_ONCE {
            self.push(Kinds::PUT, Put { from_offset, into_offset, bytes: PUT_AT_ONCE })?;
            left -= PUT_AT_ONCE;
            from_offset += PUT_AT_ONCE;
            into_offset += PUT_AT_ONCE;
        }
        self.push(kinds, Put { from_offset, into_offset, bytes: left })
    }

    fn check(&self, put: &Put) -> Result<(), Error> {
        let Some(Lengths { from, into }) = self.lengths else {
            return Err(Error::argument("the channel has no memories to put: it is for signals alone"));
        };
        let Put { from_offset, into_offset, bytes } = *put;
        for (what, offset, has) in [("put from", from_offset, from), ("put into", into_offset, into)] {
            if offset.checked_add(bytes).is_none_or(|end| end > has) {
                let message = format!("{bytes} bytes at offset {offset} leave the memory to {what}, which has {has}");
                return Err(Error::argument(message));
            }
        }
        Ok(())
    }

    fn push(&self, kinds: Kinds, put: Put) -> Result<u64, Error> {
        if has_ended(self.words()?.flushed().load()) {
            return Err(self.failed("a call"));
        }
        let Put { from_offset: source_offset, into_offset: destination_offset, bytes } = put;
        self.shared.push(&Trigger { kinds, channel: self.number, bytes, source_offset, destination_offset })
    }

    fn words(&self) -> Result<&ConnectionWords, Error> {
        let words = self.shared.segment.words(self.connection.number);
        words.ok_or_else(|| Error::ServiceGone("a connection has no words".into()))
    }

    /// The signal that comes next, in words.
    fn awaited(&self) -> String {
        let Connection { peer, tag, taken, .. } = &*self.connection;
        let (rank, next) = (self.shared.comm.rank(), taken.load(Ordering::Acquire) + 1);
        format!("signal {next} of ({peer}, tag {tag}), for which rank {rank} waits,")
    }

    /// Why no signal comes any more. That a peer on another host sends none is known before it is known whether it has left or died.
    fn ended(&self) -> Error {
        let Shared { client, comm, .. } = &*self.shared;
        let awaited = self.awaited();
        let ended_since = self.connection.ended_since.get_or_init(Instant::now);
        let reason = loop {
            let reason = client.0.comm_failure(comm.handle());
            if reason.is_some() || ended_since.elapsed() >= REASON_WITHIN {
                break reason;
            }
            std::thread::sleep(LOOK_AGAIN_AFTER);
        };
        match reason {
            Some(Error::Failed { class, message, origin }) => {
                Error::Failed { class, message: format!("{awaited} does not come: {message}"), origin }
            }
            Some(other) => other,
            None => {
                let (message, origin) = (format!("{awaited} does not come: the peer has left"), None);
                Error::Failed { class: ErrorClass::Remote, message, origin }
            }
        }
    }

    /// Why what was called does not end as it should.
    fn failed(&self, what: &str) -> Error {
        let failure = self.shared.client.0.comm_failure(self.shared.comm.handle());
        failure.unwrap_or_else(|| Error::argument(format!("{what} of a port channel whose rank has left")))
    }
}

impl Drop for PortChannel {
    fn drop(&mut self) {
        let _ = self.say_waiting(false);
        self.shared.tell(PortChannelRequest::CloseChannel { channel: self.number });
    }
}
