//! The order of a rank's kernels in the caller's streams.
//!
//! Kernels of a communicator use the same areas, so one that is launched into another stream than the one before has to wait for
//! it: for its count in GPU memory, or for an event, once launches went into graphs and only the GPU knows how many have run, and
//! where streams cannot wait for words.

use mccs_cuda::{Context, DeviceAddress, Event, RawStream};
use mccs_kernels::cuda::AreaLayout;

use crate::Error;
use crate::cuda::cuda_error;

/// Collectives have one, and sends and receives another: between the two there is no order.
pub(super) struct LaunchOrder {
    so_far: SoFar,
    /// Recorded behind every launch since the first that went into a graph, or from the first on where streams have no words.
    last_launch: Event,
    has_left: bool,
}

/// What says how the next launch comes behind the others.
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
    /// Whether the last launch was recorded.
    is_recorded: bool,
}

/// What a launch has to wait for.
#[derive(Debug, PartialEq, Eq)]
enum Before {
    /// Its stream comes behind the others as it is.
    Nothing,
    /// For the count of the launches so far.
    Count,
    /// For the last launch.
    Event,
}

impl SoFar {
    fn new(has_words: bool) -> Self {
        SoFar { has_words, last_stream: None, has_several_streams: false, has_captured: false, is_recorded: false }
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
            None => Before::Nothing,
            Some(last) if last == stream => Before::Nothing,
            Some(_) if self.is_recorded => Before::Event,
            Some(_) if self.has_words => Before::Count,
            // All are recorded: so none was launched.
            Some(_) => Before::Nothing,
        }
    }
}

impl LaunchOrder {
    pub(super) fn new(context: &Context) -> Result<Self, Error> {
        let last_launch = Event::new(context, false).map_err(cuda_error)?;
        Ok(LaunchOrder { so_far: SoFar::new(context.gpu().has_stream_words), last_launch, has_left: false })
    }

    /// Whether launches went to more than one stream.
    pub(super) fn has_several_streams(&self) -> bool {
        self.so_far.has_several_streams
    }

    /// Whether launches went into graphs.
    pub(super) fn has_captured(&self) -> bool {
        self.so_far.has_captured
    }

    /// The next launch goes into a graph.
    pub(super) fn capture(&mut self) {
        self.so_far.has_captured = true;
    }

    /// Has a stream come behind the launches before, of which the area counts `launched` at `counter`, and behind what `wait_for_rest`
    /// waits for, if it does not as it is.
    ///
    /// # Safety
    /// The stream must live, its context be current, and `counter` be mapped until it has come to this.
    pub(super) unsafe fn follow(
        &mut self,
        stream: RawStream,
        (counter, launched): (DeviceAddress, u64),
        wait_for_rest: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        // SAFETY: the caller's contract; the event lives as long as `self`, and the driver keeps what streams wait for.
        unsafe {
            let id = stream.id().map_err(cuda_error)?;
            let waits = match self.so_far.before(id) {
                Before::Nothing => None,
                Before::Count => Some(stream.wait_word(counter, AreaLayout::word_of(launched))),
                Before::Event => Some(stream.wait(&self.last_launch)),
            };
            if let Some(waits) = waits {
                waits.map_err(cuda_error)?;
                wait_for_rest()?;
            }
            self.so_far.comes_to(id);
        }
        Ok(())
    }

    /// A kernel was launched into `stream`, which had come behind those before; not into a graph.
    ///
    /// # Safety
    /// The stream must live.
    pub(super) unsafe fn launched(&mut self, stream: RawStream) -> Result<(), Error> {
        if self.so_far.records() {
            // SAFETY: the caller's contract.
            unsafe { self.last_launch.record(stream) }.map_err(cuda_error)?;
            self.so_far.is_recorded = true;
        }
        Ok(())
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
        // A count does not tell any more, but nothing else was recorded yet.
        so_far.has_captured = true;
        assert!(so_far.records());
        assert_eq!(so_far.before(2), Before::Count);
        so_far.is_recorded = true;
        assert_eq!([1, 2].map(|stream| so_far.before(stream)), [Before::Nothing, Before::Event]);
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
        assert_eq!(so_far.before(2), Before::Nothing, "its launch was refused");
        so_far.is_recorded = true;
        assert_eq!([1, 2].map(|stream| so_far.before(stream)), [Before::Nothing, Before::Event]);
    }
}
