//! One-sided operations between GPUs that reach each other: copies and signals in the caller's
//! stream.
//!
//! A put is a copy by the caller's own GPU into memory that the peer has named ([`Window`](crate::cuda::Window)); a signal is a count on the
//! control page. Both are entries of the stream: no kernel, no process hop. A wait is one for that count, without a
//! multiprocessor. Operations are in no order with the communicator's collectives but that of streams.
//!
//! Counts are written and not added, so signals of one kind to one peer are sent in the order of the calls: who comes from another stream waits
//! for the count of the call before.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use mccs_cuda::{DeviceAddress, Event, RawStream, WordOperation};
use mccs_ipc::device_initiated::{ControlPage, Signal};

use super::member::Member;
use crate::Error;
use crate::client::locked;
use crate::cuda::cuda_error;

/// Bytes that a stream copies: of memory that its GPU reaches.
#[derive(Debug, Clone, Copy)]
pub(in crate::cuda) struct Put {
    pub(in crate::cuda) source: DeviceAddress,
    pub(in crate::cuda) target: DeviceAddress,
    pub(in crate::cuda) bytes: u64,
}

/// Signals of one kind that a stream waits for, beyond those of waits before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignalWait {
    /// Sender of the signals.
    pub from: u32,
    /// Which one.
    pub signal: Signal,
    /// How many.
    pub times: u64,
}

/// Streams whose waits are kept in mind, before those that are past theirs are forgotten.
const STREAMS: usize = 16;
/// How long a rank that leaves a communicator that has failed lets its streams go again and again.
const LETS_GO_FOR: Duration = Duration::from_secs(2);
const LETS_GO_EVERY: Duration = Duration::from_millis(1);

/// Signals that a rank has sent and waited for.
pub(super) struct OneSided {
    member: Arc<Member>,
    counts: Mutex<Counts>,
}

/// By the other rank and the signal.
#[derive(Default)]
struct Counts {
    sent: BTreeMap<(u32, Signal), Sent>,
    awaited: BTreeMap<(u32, Signal), u64>,
    /// By the driver's number of a stream: it is past its last wait.
    past: BTreeMap<u64, Event>,
    /// The rank leaves: nothing is enqueued any more.
    has_left: bool,
}

impl Counts {
    /// # Errors
    /// The rank has left.
    fn check_not_left(&self) -> Result<(), Error> {
        if self.has_left { Err(Error::argument("the communicator has been finalized")) } else { Ok(()) }
    }

    /// Marks where a stream is past its waits.
    ///
    /// # Safety
    /// The stream must live.
    unsafe fn note_wait(&mut self, member: &Member, stream: RawStream) -> Result<(), Error> {
        use std::collections::btree_map::Entry;
        if self.past.len() >= STREAMS {
            self.past.retain(|_, past| !past.has_happened().unwrap_or(true));
        }
        // SAFETY: the caller's contract.
        unsafe {
            let past = match self.past.entry(stream.id().map_err(cuda_error)?) {
                Entry::Occupied(entry) => entry.into_mut(),
                Entry::Vacant(entry) => entry.insert(Event::new(&member.context, false).map_err(cuda_error)?),
            };
            past.record(stream).map_err(cuda_error)
        }
    }
}

/// How many signals were sent, and the driver's number of the stream that has the last one: addresses come again.
#[derive(Default)]
struct Sent {
    times: u64,
    stream: Option<u64>,
}

impl Sent {
    /// Wait of the next one's stream, for the word that counts them.
    fn before(&self, word: DeviceAddress, stream: u64) -> Option<WordOperation> {
        let is_elsewhere = self.stream.is_some_and(|last| last != stream);
        is_elsewhere.then_some(WordOperation::Wait(word, self.times))
    }
}

impl OneSided {
    pub(super) fn new(member: Arc<Member>) -> Self {
        OneSided { member, counts: Mutex::default() }
    }

    /// Enqueues a copy, and a signal behind it.
    ///
    /// # Safety
    /// The stream must live and be of the communicator's context, and the ranges be there, and nobody else's, until the copy has ended.
    pub(super) unsafe fn send(
        &self,
        to: u32,
        put: Option<Put>,
        signal: Signal,
        stream: RawStream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe { self.check([to], stream)? };
        let member = &*self.member;
        let _entered = member.context.enter().map_err(cuda_error)?;
        let mut counts = locked(&self.counts);
        counts.check_not_left()?;
        let sent = counts.sent.entry((to, signal)).or_default();
        let word = member.on_page(ControlPage::signal_offset(member.rank, to, signal));
        // SAFETY: the page is registered as long as the member lives; the rest is the caller's contract.
        unsafe {
            let number = stream.id().map_err(cuda_error)?;
            if let Some(wait) = sent.before(word, number) {
                stream.words(&[wait]).map_err(cuda_error)?;
            }
            if let Some(Put { source, target, bytes }) = put {
                stream.copy(target, source, bytes as usize).map_err(cuda_error)?;
            }
            stream.write_word(word, sent.times + 1).map_err(cuda_error)?;
            *sent = Sent { times: sent.times + 1, stream: Some(number) };
        }
        Ok(())
    }

    /// Has a stream wait for signals.
    ///
    /// # Safety
    /// The stream must live and be of the communicator's context.
    pub(super) unsafe fn wait(&self, waits: &[SignalWait], stream: RawStream) -> Result<(), Error> {
        // SAFETY: the caller's contract.
        unsafe { self.check(waits.iter().map(|wait| wait.from), stream)? };
        let member = &*self.member;
        let _entered = member.context.enter().map_err(cuda_error)?;
        let mut counts = locked(&self.counts);
        counts.check_not_left()?;
        let (mut words, mut awaited) = (Vec::new(), BTreeMap::new());
        for SignalWait { from, signal, times } in waits {
            let key = (*from, *signal);
            let count = awaited.entry(key).or_insert_with(|| counts.awaited.get(&key).copied().unwrap_or(0));
            *count += times;
            let word = member.on_page(ControlPage::signal_offset(*from, member.rank, *signal));
            words.push(WordOperation::Wait(word, *count));
        }
        // SAFETY: as for `send`.
        unsafe { stream.words(&words) }.map_err(cuda_error)?;
        // A call that failed was not made.
        counts.awaited.append(&mut awaited);
        // SAFETY: the caller's contract.
        unsafe { counts.note_wait(member, stream) }
    }

    /// Checks what both have in common.
    ///
    /// # Safety
    /// The stream must live.
    unsafe fn check(&self, peers: impl IntoIterator<Item = u32>, stream: RawStream) -> Result<(), Error> {
        let member = &*self.member;
        member.check_whole()?;
        if let Some(peer) = peers.into_iter().find(|peer| *peer >= member.nranks) {
            return Err(Error::argument(format!("rank {peer} of {}", member.nranks)));
        }
        if !member.context.gpu().has_stream_words {
            return Err(Error::no_cuda("one-sided operations take a driver whose streams write and wait for words"));
        }
        // SAFETY: the caller's contract.
        if unsafe { stream.is_capturing() }.map_err(cuda_error)? {
            return Err(Error::argument("one-sided operations are counted as they are called: no graph can have them"));
        }
        Ok(())
    }

    /// Lets streams go on that wait for ranks of a communicator that has failed. Once more: streams of ranks that still run may have counted
    /// meanwhile.
    pub(super) fn let_go_again(&self) {
        if self.member.page.is_aborted() && !locked(&self.counts).awaited.is_empty() {
            self.member.page.release_signals();
        }
    }

    /// Whether streams are past all that was enqueued. One that has failed is.
    pub(super) fn have_ended(&self) -> bool {
        let Member { page, rank, .. } = &*self.member;
        let counts = locked(&self.counts);
        let mut sent = counts.sent.iter();
        sent.all(|((to, signal), sent)| page.has_counted(*rank, *to, *signal, sent.times))
            && counts.past.values().all(|past| past.has_happened().unwrap_or(true))
    }

    /// Nothing is enqueued from here on. In a communicator that has failed, streams are let go until they are past their waits, if nothing else
    /// holds them up.
    pub(super) fn leave(&self) {
        locked(&self.counts).has_left = true;
        let until = Instant::now() + LETS_GO_FOR;
        while self.member.page.is_aborted() && !self.have_ended() && Instant::now() < until {
            self.let_go_again();
            std::thread::sleep(LETS_GO_EVERY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_stream_waits_for_the_call_before() {
        let mut sent = Sent::default();
        assert_eq!(sent.before(64, 7), None);
        sent = Sent { times: 3, stream: Some(7) };
        assert_eq!(sent.before(64, 7), None);
        assert_eq!(sent.before(64, 8), Some(WordOperation::Wait(64, 3)));
    }
}
