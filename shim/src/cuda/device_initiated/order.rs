//! Order of a rank's kernels over the caller's streams, by events.
//!
//! Kernels of a communicator use the same symmetric buffers. So one that is launched into another stream than the one before has to wait
//! for it: for its count in GPU memory. If streams cannot wait for words, and from the first capture on, it waits for an event. From then
//! on every launch waits for the event, and records it: graphs may have been launched anywhere since the one before (`graphs.rs`).

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use mccs_cuda::{Capture, Context, DeviceAddress, Event, OwnedStream, RawStream, WordOperation, while_capturing};
use mccs_kernels::cuda::SymmetricBufferLayout;

use crate::Error;
use crate::cuda::cuda_error;
use crate::cuda::graphs::{GraphOrder, LivingGraphs};

/// Collectives have one, and sends and receives another: between the two there is no order.
pub(super) struct LaunchOrder {
    so_far: SoFar,
    /// Told of every launch since the first capture, or from the first on where streams have no words.
    graphs: GraphOrder,
    context: Context,
    has_left: bool,
}

/// State that says how the next launch comes behind the others.
#[derive(Debug)]
struct SoFar {
    /// Whether the driver has streams wait for words.
    has_words: bool,
    /// The stream, by its id, that comes behind all of them.
    last_stream: Option<u64>,
    /// Whether there was another before.
    has_several_streams: bool,
    /// Whether launches went into graphs.
    has_captured: bool,
}

/// Condition of a launch.
#[derive(Debug, PartialEq, Eq)]
enum Before {
    /// Its stream comes behind the others as it is.
    Nothing,
    /// For the count of the launches so far.
    Count,
    /// For the last launch, of a call or a graph.
    Event,
}

impl SoFar {
    fn new(has_words: bool) -> Self {
        SoFar { has_words, last_stream: None, has_several_streams: false, has_captured: false }
    }

    /// Whether a launch is recorded, for those after it.
    fn records(&self) -> bool {
        self.has_captured || !self.has_words
    }

    fn comes_to(&mut self, stream: u64) {
        self.has_several_streams |= self.last_stream.replace(stream).is_some_and(|last| last != stream);
    }

    fn before(&self, stream: u64) -> Before {
        match self.last_stream {
            _ if self.has_captured => Before::Event,
            None => Before::Nothing,
            Some(last) if last == stream => Before::Nothing,
            Some(_) if self.has_words => Before::Count,
            Some(_) => Before::Event,
        }
    }
}

impl LaunchOrder {
    /// Before the first launch; `living` counts graphs.
    pub(super) fn new(context: &Context, living: Arc<LivingGraphs>) -> Result<Self, Error> {
        let (graphs, context) = (GraphOrder::new(context, living)?, context.clone());
        Ok(LaunchOrder { so_far: SoFar::new(context.gpu().has_stream_words), graphs, context, has_left: false })
    }

    /// Whether launches went to more than one stream so far.
    pub(super) fn has_several_streams(&self) -> bool {
        self.so_far.has_several_streams
    }

    /// Whether launches went into graphs.
    pub(super) fn has_captured(&self) -> bool {
        self.so_far.has_captured
    }

    /// Event that graphs refer to, and must not outlive.
    pub(super) fn event(&self) -> Arc<Event> {
        self.graphs.event()
    }

    /// Has a captured stream come behind the launches before, and behind what `wait_for_rest` has a stream wait for, at once or by words.
    /// The symmetric buffer counts `launched` at `counter` for launches outside of graphs. The context must be current. Returns what says
    /// whether the graph has gone.
    ///
    /// # Safety
    /// The stream must live, and be of this capture, which goes on; `counter` must be mapped until all streams have come to this.
    pub(super) unsafe fn capture(
        &mut self,
        stream: RawStream,
        capture: Capture,
        counter: DeviceAddress,
        launched: u64,
        wait_for_rest: impl FnOnce(RawStream, &mut Vec<WordOperation>) -> Result<(), Error>,
    ) -> Result<Arc<AtomicBool>, Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            if !self.so_far.has_captured && !self.so_far.records() && self.so_far.last_stream.is_some() {
                // Nothing of what was launched so far is recorded. The stream that it went to may have gone, or be this one.
                let helper = while_capturing(|| OwnedStream::new(&self.context)).and_then(|made| made);
                let helper = helper.map_err(cuda_error)?;
                let mut words = vec![WordOperation::Wait(counter, SymmetricBufferLayout::word_of(launched))];
                wait_for_rest(helper.raw(), &mut words)?;
                helper.raw().words(&words).map_err(cuda_error)?;
                self.graphs.record(helper.raw())?;
            }
            self.so_far.has_captured = true;
            self.graphs.begin(stream, capture)
        }
    }

    /// A kernel went into a graph, behind what [`LaunchOrder::capture`] had its stream come behind.
    ///
    /// # Safety
    /// As [`LaunchOrder::capture`].
    pub(super) unsafe fn captured(&mut self, stream: RawStream, capture: Capture) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe { self.graphs.end(stream, capture) }
    }

    /// Has a stream come behind the launches before, of which the symmetric buffer counts `launched` at `counter`, and behind what `wait_for_rest`
    /// has it wait for, if it does not as it is. The caller has the stream wait for what is put to `words`, and says so by
    /// [`LaunchOrder::comes_to`] with the stream's number, which this returns.
    ///
    /// # Safety
    /// The stream must live, its context be current, and `counter` be mapped until it has come to this.
    pub(super) unsafe fn follow(
        &self,
        stream: RawStream,
        counter: DeviceAddress,
        launched: u64,
        words: &mut Vec<WordOperation>,
        wait_for_rest: impl FnOnce(RawStream, &mut Vec<WordOperation>) -> Result<(), Error>,
    ) -> Result<u64, Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let number = stream.id().map_err(cuda_error)?;
            match self.so_far.before(number) {
                Before::Nothing => {}
                Before::Count => {
                    words.push(WordOperation::Wait(counter, SymmetricBufferLayout::word_of(launched)));
                    wait_for_rest(stream, words)?;
                }
                Before::Event => self.graphs.wait(stream)?,
            }
            Ok(number)
        }
    }

    /// The stream with this number comes behind all launches before, and is the one that the next goes to.
    pub(super) fn comes_to(&mut self, stream: u64) {
        self.so_far.comes_to(stream);
    }

    /// An operation was launched into `stream`, which had come behind those before; not into a graph.
    ///
    /// # Safety
    /// The stream must live.
    pub(super) unsafe fn launched(&mut self, stream: RawStream) -> Result<(), Error> {
        if self.so_far.records() {
            // SAFETY: the caller's contract.
            unsafe { self.graphs.record(stream)? };
        }
        Ok(())
    }

    /// Whether launches of graphs have ended, and those outside that were recorded. Returns the driver's error if some of them have failed.
    pub(super) fn have_graphs_ended(&self) -> Result<bool, Error> {
        if self.so_far.has_captured { self.graphs.have_ended() } else { Ok(true) }
    }

    /// Whether the rank has left.
    pub(super) fn has_left(&self) -> bool {
        self.has_left
    }

    /// The rank leaves. Returns whether it had before.
    pub(super) fn leave(&mut self) -> bool {
        std::mem::replace(&mut self.has_left, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_waits_for_those_in_another_stream_only() {
        let mut so_far = SoFar::new(true);
        assert!(!so_far.records());
        assert_eq!(so_far.before(1), Before::Nothing);
        so_far.last_stream = Some(1);
        assert_eq!([1, 2].map(|stream| so_far.before(stream)), [Before::Nothing, Before::Count]);
    }

    #[test]
    fn from_the_first_capture_on_a_launch_waits_whatever_its_stream() {
        let mut so_far = SoFar::new(true);
        so_far.has_captured = true;
        assert!(so_far.records());
        assert_eq!(so_far.before(1), Before::Event, "a graph may have been launched");
        so_far.last_stream = Some(1);
        assert_eq!([1, 2].map(|stream| so_far.before(stream)), [Before::Event, Before::Event]);
    }

    #[test]
    fn a_second_stream_is_remembered() {
        let mut so_far = SoFar::new(true);
        let seen = [1, 1, 2, 2, 1].map(|stream| {
            so_far.comes_to(stream);
            so_far.has_several_streams
        });
        assert_eq!(seen, [false, false, true, true, true]);
    }

    #[test]
    fn without_words_every_launch_is_recorded_and_waited_for() {
        let mut so_far = SoFar::new(false);
        assert!(so_far.records());
        so_far.last_stream = Some(1);
        assert_eq!([1, 2].map(|stream| so_far.before(stream)), [Before::Nothing, Before::Event]);
    }
}
