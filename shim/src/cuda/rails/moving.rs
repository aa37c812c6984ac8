//! Moves of rails beside the caller's stream: how they begin and end.
//!
//! *Copies.* For rails whose memory on the GPU NICs do not reach (`twin.rs`), copy engines bring data to slots and back. The caller's
//! stream reads and writes the twins of slots. So copies of one slice, the network of another and kernels of a third run at the same time.
//!
//! *Order.* A word tells of all moves up to its own. If segments have streams of their own one lane tells of all, in order.
//!
//! ```text
//! a segment's lane: combine -> twin | staged |          ...            | arrived | combine from twin
//! inward:                           | staged | twin -> slot, ready = n | told
//! outward:                          | told   | done >= n, slot -> twin | arrived
//! ```
//!
//! Remains of a slice in a slot or its twin are out of use when the next one begins there.

use mccs_cuda::{DeviceAddress, RawStream};
use mccs_rails::{Move, Part};

use super::lanes::{Lane, Lanes, Mark};
use crate::Error;
use crate::cuda::cuda_error;
use crate::cuda::host_staged::ordered_stream::{OrderedStream, Ticket};

/// A move, and where it takes place. Its unsafe methods enqueue, as those of [`Lanes`].
pub(super) struct Moving<'a> {
    pub(super) ordered: &'a OrderedStream,
    pub(super) moved: Move,
    /// Number of the slot.
    pub(super) slot: u64,
    /// Its offset in the slots, in bytes.
    pub(super) slot_offset: u64,
    /// Twins of slots, if copies bring data there.
    pub(super) twins: Option<DeviceAddress>,
    pub(super) element_bytes: u64,
    /// Hosts of the rail, and which of these the rank is.
    pub(super) hosts: u32,
    pub(super) host: u32,
}

impl Moving<'_> {
    /// Has it begin when a lane has come here: `submit` tells the service of it, before a word does.
    ///
    /// # Safety
    /// As the type says.
    pub(super) unsafe fn begin(
        &self,
        lanes: &Lanes<'_>,
        lane: Lane,
        submit: impl FnOnce(RawStream) -> Result<Ticket, Error>,
    ) -> Result<Ticket, Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            lanes.mark(lane, Mark::Staged(self.slot))?;
            lanes.wait(Lane::Inward, Mark::Staged(self.slot))?;
            let inward = lanes.stream(Lane::Inward)?;
            let ticket = submit(inward)?;
            for (slot, twin, bytes) in self.copies(self.moved.goes_in(self.hosts, self.host)) {
                inward.copy(slot, twin, bytes).map_err(cuda_error)?;
            }
            self.ordered.tell(inward, ticket)?;
            lanes.mark(Lane::Inward, Mark::Told(self.slot))?;
            Ok(ticket)
        }
    }

    /// Has a lane wait until it has ended, of one that comes behind what told of it where nothing is copied.
    ///
    /// # Safety
    /// As the type says.
    pub(super) unsafe fn end(&self, lanes: &Lanes<'_>, lane: Lane, ticket: Ticket) -> Result<(), Error> {
        // SAFETY: the caller's contract is passed on.
        unsafe {
            if self.twins.is_none() {
                return self.ordered.wait(lanes.stream(lane)?, ticket);
            }
            lanes.wait(Lane::Outward, Mark::Told(self.slot))?;
            let outward = lanes.stream(Lane::Outward)?;
            self.ordered.wait(outward, ticket)?;
            for (slot, twin, bytes) in self.copies(self.moved.comes_out(self.hosts, self.host)) {
                outward.copy(twin, slot, bytes).map_err(cuda_error)?;
            }
            lanes.mark(Lane::Outward, Mark::Arrived(self.slot))?;
            lanes.wait(lane, Mark::Arrived(self.slot))
        }
    }

    /// Parts of the slot, where they are in its twin, and how many bytes.
    fn copies(&self, parts: impl Iterator<Item = Part>) -> impl Iterator<Item = (DeviceAddress, DeviceAddress, usize)> {
        let place = move |twins: DeviceAddress, part: Part| {
            let at = self.slot_offset + part.at * self.element_bytes;
            (self.ordered.address(at), twins + at, (part.count * self.element_bytes) as usize)
        };
        parts.filter_map(move |part| self.twins.map(|twins| place(twins, part)))
    }
}
