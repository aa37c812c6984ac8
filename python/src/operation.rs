//! Operations: what a call asks for, on which memory of the caller's, and what has become of it.

use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use mccs::{CollectiveKind, DataType, Error, ReduceOperator};
use mccs_cuda::Event;
use pyo3::prelude::*;

use crate::errors::Caller;

/// Kinds of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// All ranks make the call.
    Collective(CollectiveKind),
    /// To the peer.
    Send,
    /// From the peer.
    Recv,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Collective(kind) => kind.name(),
            Kind::Send => "send",
            Kind::Recv => "recv",
        }
    }

    /// Parts of a slot that a piece's send and receive buffers take, on every rank alike. Zero sent: in place.
    pub(crate) fn staged_parts(self, nranks: u64) -> (u64, u64) {
        match self {
            Kind::Collective(CollectiveKind::AllGather | CollectiveKind::Gather) => (1, nranks),
            Kind::Collective(CollectiveKind::ReduceScatter | CollectiveKind::Scatter) => (nranks, 1),
            Kind::Collective(CollectiveKind::AllToAll) => (nranks, nranks),
            _ => (0, 1),
        }
    }
}

/// A call with the caller's memory. Parts have `count` elements each: none where the rank has no such buffer, one, or one for each rank.
pub(crate) struct Call {
    pub(crate) kind: Kind,
    pub(crate) data_type: DataType,
    pub(crate) op: ReduceOperator,
    /// Or the peer.
    pub(crate) root: u32,
    pub(crate) count: u64,
    /// Addresses.
    pub(crate) send: Vec<usize>,
    pub(crate) recv: Vec<usize>,
}

impl Call {
    pub(crate) fn part_bytes(&self) -> usize {
        self.count as usize * self.data_type.size_bytes()
    }

    /// Whether the caller can make it.
    ///
    /// # Errors
    /// The fault.
    pub(crate) fn check(&self, caller: Caller) -> Result<(), String> {
        if self.root >= caller.nranks {
            return Err(format!("there is no rank {} among {}", self.root, caller.nranks));
        }
        if self.overlaps_itself(caller.rank) {
            return Err("what is received overlaps what is sent; they must be apart, or exactly in place".into());
        }
        Ok(())
    }

    /// Whether what is received would be written over what is still to be sent: where both overlap, and not as a collective in place has it.
    fn overlaps_itself(&self, rank: u32) -> bool {
        use CollectiveKind as K;
        let (bytes, rank) = (self.part_bytes(), rank as usize);
        let has_place = |sent: usize, received: usize| match self.kind {
            Kind::Collective(K::AllGather | K::Gather) => received == rank,
            Kind::Collective(K::ReduceScatter | K::Scatter) => sent == rank,
            _ => sent == received,
        };
        let mut sent: Vec<_> = self.send.iter().copied().enumerate().collect();
        sent.sort_unstable_by_key(|(_, address)| *address);
        let touches = |received: usize, to: usize| {
            let first = sent.partition_point(|(_, from)| from.saturating_add(bytes) <= to);
            let near = sent[first..].iter().take_while(|(_, from)| *from < to.saturating_add(bytes));
            near.filter(|_| bytes > 0).any(|(part, from)| *from != to || !has_place(*part, received))
        };
        self.recv.iter().enumerate().any(|(part, to)| touches(part, *to))
    }

    /// First address of parts that lie one behind the other.
    pub(crate) fn contiguous(&self, parts: &[usize]) -> Option<usize> {
        let bytes = self.part_bytes();
        let is_next = |pair: &[usize]| pair[0].checked_add(bytes) == Some(pair[1]);
        parts.windows(2).all(is_next).then(|| parts.first().copied())?
    }
}

/// How far an operation has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// A group keeps it.
    Kept,
    UnderWay,
    Ended,
}

/// A stream of a GPU's, as an address: `CUstream`, or `cudaStream_t`.
pub(crate) type StreamAddress = usize;

/// A call that was made.
pub(crate) struct Operation {
    pub(crate) call: Call,
    /// The stream of a call on a GPU's arrays.
    stream: Option<StreamAddress>,
    /// Lies behind it on the stream, once it is there.
    event: OnceLock<Event>,
    /// The error that it ends with in any case, when its stream has passed.
    failure: OnceLock<Error>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    outcome: Option<Result<(), Error>>,
    /// It is kept for the end of a group.
    is_kept: bool,
    /// Owners of the caller's memory.
    owners: Vec<Py<PyAny>>,
    callbacks: Vec<Py<PyAny>>,
}

impl Operation {
    /// A call on arrays that `owners` keep; those of a GPU are ready on the stream.
    pub(crate) fn new(call: Call, owners: Vec<Py<PyAny>>, stream: Option<StreamAddress>) -> Self {
        let state = State { outcome: None, is_kept: false, owners, callbacks: Vec::new() };
        let (event, failure) = (OnceLock::new(), OnceLock::new());
        Operation { call, stream, event, failure, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Whether its arrays are a GPU's.
    pub(crate) fn is_on_gpu(&self) -> bool {
        self.stream.is_some()
    }

    /// The stream that it is on, the default one where nothing else was said.
    pub(crate) fn stream(&self) -> StreamAddress {
        self.stream.unwrap_or_default()
    }

    /// It is on its stream, and the event behind it.
    pub(crate) fn is_behind(&self, event: Event) {
        self.event.get_or_init(|| event);
        drop(self.state());
        self.changed.notify_all();
    }

    /// The event that has happened when it has ended; none before it is on its stream.
    pub(crate) fn event(&self) -> Option<&Event> {
        self.event.get()
    }

    /// Has it end with an error when its stream has passed.
    pub(crate) fn fail_with(&self, error: Error) {
        self.failure.get_or_init(|| error);
    }

    pub(crate) fn failure(&self) -> Option<Error> {
        self.failure.get().cloned()
    }

    /// A group keeps it until the group's end.
    pub(crate) fn keep(&self) {
        self.state().is_kept = true;
    }

    /// Its group has issued it. Whether anybody wants to be told of its end.
    pub(crate) fn release(&self) -> bool {
        let mut state = self.state();
        state.is_kept = false;
        // Waits of other threads look where it is now.
        self.changed.notify_all();
        state.outcome.is_none() && !state.callbacks.is_empty()
    }

    /// Whether a group keeps it.
    pub(crate) fn is_kept(&self) -> bool {
        self.state().is_kept
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn outcome(&self) -> Option<Result<(), Error>> {
        self.state().outcome.clone()
    }

    pub(crate) fn is_done(&self) -> bool {
        self.state().outcome.is_some()
    }

    /// Waits for about that long until somebody else has ended it.
    pub(crate) fn wait_changed(&self, timeout: Duration) {
        let state = self.state();
        if state.outcome.is_none() {
            drop(self.changed.wait_timeout(state, timeout).unwrap_or_else(PoisonError::into_inner));
        }
    }

    /// Has a function called when the operation has ended; it gets no arguments. Not where it has ended before.
    pub(crate) fn call_when_done(&self, callback: Py<PyAny>) -> Phase {
        let mut state = self.state();
        if state.outcome.is_some() {
            return Phase::Ended;
        }
        state.callbacks.push(callback);
        if state.is_kept { Phase::Kept } else { Phase::UnderWay }
    }

    /// Ends it: the caller's memory is the caller's again. The first outcome stays.
    pub(crate) fn end(&self, outcome: Result<(), Error>) {
        let mut state = self.state();
        state.outcome.get_or_insert(outcome);
        state.is_kept = false;
        let (owners, callbacks) = (std::mem::take(&mut state.owners), std::mem::take(&mut state.callbacks));
        drop(state);
        self.changed.notify_all();
        if !callbacks.is_empty() {
            Python::attach(|py| {
                for callback in callbacks {
                    if let Err(error) = callback.call0(py) {
                        error.write_unraisable(py, Some(callback.bind(py)));
                    }
                }
            });
        }
        drop(owners);
    }
}
