//! The order of a rank's kernels in the caller's streams.
//!
//! Kernels of a communicator use the same areas, so one that is launched into another stream than the one before has to wait for
//! it: for its count in GPU memory, or, once launches went into graphs and only the GPU knows how many have run, for an event.

use mccs_cuda::{Context, DeviceAddress, Event, RawStream};
use mccs_kernels::cuda::AreaLayout;

use crate::Error;
use crate::cuda::cuda_error;

/// Collectives have one, and sends and receives another: between the two there is no order.
pub(super) struct LaunchOrder {
    /// The stream of the last launch that did not go into a graph.
    last_stream: Option<RawStream>,
    /// Whether launches went into graphs.
    has_captured: bool,
    /// Recorded behind every launch from then on.
    last_launch: Event,
    is_recorded: bool,
    has_left: bool,
}

impl LaunchOrder {
    pub(super) fn new(context: &Context) -> Result<Self, Error> {
        let last_launch = Event::new(context, false).map_err(cuda_error)?;
        Ok(LaunchOrder { last_stream: None, has_captured: false, last_launch, is_recorded: false, has_left: false })
    }

    /// Whether launches went into graphs.
    pub(super) fn has_captured(&self) -> bool {
        self.has_captured
    }

    /// The next launch goes into a graph.
    pub(super) fn capture(&mut self) {
        self.has_captured = true;
    }

    /// Has a stream wait for the launches before, of which the area counts `launched` at `counter`, if they are in another one.
    /// Returns whether they are.
    ///
    /// # Safety
    /// The stream must live, and `counter` be mapped until it has come to this.
    pub(super) unsafe fn follow(
        &self,
        stream: RawStream,
        counter: DeviceAddress,
        launched: u64,
    ) -> Result<bool, Error> {
        if self.last_stream.is_none_or(|last| last == stream) {
            return Ok(false);
        }
        // SAFETY: the caller's contract; the event lives as long as `self`, and the driver keeps what streams wait for.
        let waits = unsafe {
            if self.is_recorded {
                stream.wait(&self.last_launch)
            } else {
                stream.wait_word(counter, AreaLayout::word_of(launched))
            }
        };
        waits.map(|()| true).map_err(cuda_error)
    }

    /// What comes next comes behind what is in `stream`.
    pub(super) fn goes_on_in(&mut self, stream: RawStream) {
        self.last_stream = Some(stream);
    }

    /// A kernel was launched into `stream`, not into a graph.
    ///
    /// # Safety
    /// The stream must live.
    pub(super) unsafe fn launched(&mut self, stream: RawStream) -> Result<(), Error> {
        self.goes_on_in(stream);
        if self.has_captured {
            // SAFETY: the caller's contract.
            unsafe { self.last_launch.record(stream) }.map_err(cuda_error)?;
            self.is_recorded = true;
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
