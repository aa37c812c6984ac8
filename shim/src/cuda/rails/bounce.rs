//! Copies between a GPU and the slots of its rails, by copy engines, on streams of their own.
//!
//! For rails whose memory on the GPU NICs do not reach (`twin.rs`). The caller's stream reads and writes the twins of slots. So copies of
//! one slice, the network of another and kernels of a third run at the same time.
//!
//! ```text
//! caller's stream:  combine -> twin | staged |          ...            | arrived | combine from twin
//! inward:                           | staged | twin -> slot, ready = n
//! outward:                          | staged | done >= n, slot -> twin | arrived
//! ```
//!
//! What a slice leaves in a slot or its twin is out of use when the caller's stream begins the next one there.

use std::time::Duration;

use mccs_cuda::{Context, DeviceAddress, Event, OwnedStream, RawStream};
use mccs_rails::{Move, Part, SLOTS};

use super::Rail;
use crate::Error;
use crate::cuda::cuda_error;
use crate::cuda::host_staged::ordered_stream::Ticket;

/// How long a wait for copies sleeps between looks.
const LOOK_AGAIN_AFTER: Duration = Duration::from_micros(50);

/// See the module's documentation. Its unsafe methods enqueue: the caller's stream must live, with this context current, and `self` until
/// that has come to what they enqueue.
pub(super) struct Bounce {
    inward: OwnedStream,
    outward: OwnedStream,
    /// By slot: the caller's stream has come to the move.
    staged: Vec<Event>,
    /// By slot: what has moved is in the twin.
    arrived: Vec<Event>,
    slot_bytes: u64,
}

/// A move, and where it takes place.
pub(super) struct Moving<'a> {
    pub(super) rail: &'a Rail,
    pub(super) moved: Move,
    /// Number of the slot.
    pub(super) slot: u64,
    pub(super) element_bytes: u64,
    /// Of the rail, and which of these the rank is.
    pub(super) hosts: u32,
    pub(super) host: u32,
}

impl Bounce {
    /// For slots of so many bytes each.
    pub(super) fn new(context: &Context, slot_bytes: u64) -> Result<Self, Error> {
        let events = || (0..SLOTS).map(|_| Event::new(context, false)).collect::<Result<Vec<_>, _>>();
        let make = || {
            Ok(Bounce {
                inward: OwnedStream::new(context)?,
                outward: OwnedStream::new(context)?,
                staged: events()?,
                arrived: events()?,
                slot_bytes,
            })
        };
        make().map_err(cuda_error)
    }

    /// Has a move begin when a stream has come here.
    ///
    /// # Safety
    /// As the type says.
    pub(super) unsafe fn begin(&self, stream: RawStream, moving: &Moving<'_>, ticket: Ticket) -> Result<(), Error> {
        let (inward, staged) = (self.inward.raw(), &self.staged[moving.slot as usize]);
        // SAFETY: the caller's contract is passed on.
        unsafe {
            staged.record(stream).map_err(cuda_error)?;
            inward.wait(staged).map_err(cuda_error)?;
            for part in moving.moved.goes_in(moving.hosts, moving.host) {
                let (slot, twin) = self.places(moving, part);
                inward.copy(slot, twin, (part.count * moving.element_bytes) as usize).map_err(cuda_error)?;
            }
            moving.rail.ordered.tell(inward, ticket)
        }
    }

    /// Has a stream wait until a move has ended.
    ///
    /// # Safety
    /// As the type says.
    pub(super) unsafe fn end(&self, stream: RawStream, moving: &Moving<'_>, ticket: Ticket) -> Result<(), Error> {
        let (outward, slot) = (self.outward.raw(), moving.slot as usize);
        // SAFETY: the caller's contract is passed on.
        unsafe {
            outward.wait(&self.staged[slot]).map_err(cuda_error)?;
            moving.rail.ordered.wait(outward, ticket)?;
            for part in moving.moved.comes_out(moving.hosts, moving.host) {
                let (slot, twin) = self.places(moving, part);
                outward.copy(twin, slot, (part.count * moving.element_bytes) as usize).map_err(cuda_error)?;
            }
            self.arrived[slot].record(outward).map_err(cuda_error)?;
            stream.wait(&self.arrived[slot]).map_err(cuda_error)
        }
    }

    /// A part of a slot, and of its twin.
    fn places(&self, moving: &Moving<'_>, part: Part) -> (DeviceAddress, DeviceAddress) {
        let offset = part.at * moving.element_bytes;
        let at = moving.slot * self.slot_bytes + offset;
        (moving.rail.ordered.address(at), moving.rail.twin.address() + at)
    }

    /// Waits until nothing is under way, also of calls that have failed.
    pub(super) fn wait(&self) -> Result<(), Error> {
        for stream in [&self.inward, &self.outward] {
            // SAFETY: the stream lives, and the caller has its context current.
            while !unsafe { stream.raw().is_idle() }.map_err(cuda_error)? {
                std::thread::sleep(LOOK_AGAIN_AFTER);
            }
        }
        Ok(())
    }
}
