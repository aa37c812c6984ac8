//! Kernels' means of port channels: the rank's segment as its GPU sees it, and counts in memory of
//! the GPU. `mccs/device.cuh` is the kernels' side.

use std::any::Any;

use bytemuck::{Pod, Zeroable};
use mccs_cuda::{Context, DeviceAddress, DeviceMemory, HostRegistration};
use mccs_ipc::command::BufferRef;
use mccs_ipc::port_channels::{CONNECTIONS_MAX, PortChannelSegment, TriggerProducer};

use super::Membership;
use crate::Error;

/// A rank on a GPU, as far as port channels go.
pub(crate) trait GpuMembership: Membership {
    /// The communicator's context.
    fn context(&self) -> &Context;

    /// The service's name of a buffer in memory of the GPU, which it knows as long as the other value is held.
    ///
    /// # Errors
    /// Memory that other processes cannot open; the service's refusal.
    fn place(&self, address: DeviceAddress, bytes: u64) -> Result<(BufferRef, Box<dyn Any + Send + Sync>), Error>;
}

/// A port channel as kernels use it: `mccs::PortChannel` of `mccs/device.cuh`, to be passed to a kernel by value. It is of use while the
/// [`PortChannel`](super::PortChannel) lives that it was asked of; kernels that use it end before.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct DevicePortChannel {
    /// Positions of the FIFO that kernels have claimed, and how many had been read when that was last looked at: in memory of the GPU.
    head: DeviceAddress,
    seen_tail: DeviceAddress,
    /// Signals of the connection that kernels have taken: in memory of the GPU.
    taken: DeviceAddress,
    /// In memory of the host, from here on: see [`mccs_ipc::port_channels::KernelPlaces`].
    slots: DeviceAddress,
    tail: DeviceAddress,
    arrived: DeviceAddress,
    flushed: DeviceAddress,
    awaited: DeviceAddress,
    /// The channel's, as triggers name it.
    number: u32,
    /// Number of the FIFO's slots.
    slots_log2: u32,
}

/// Bytes between counts that are used together: a line each.
const LINE_BYTES: u64 = 128;

/// A rank's segment in its GPU's context. Dropped before the segment, and when kernels have ended.
pub(super) struct KernelSide {
    /// Wakes the service.
    pub(super) triggers: TriggerProducer,
    registration: HostRegistration,
    /// `head`, `seen_tail` in a line each, then `taken` of each connection.
    counts: DeviceMemory,
}

impl KernelSide {
    /// Registers a segment with a FIFO for kernels.
    pub(super) fn new(context: &Context, segment: &PortChannelSegment) -> Result<Self, Error> {
        let no_fifo = || Error::ServiceGone("port channels of a GPU came without a FIFO for kernels".into());
        let triggers = segment.kernel_producer().ok_or_else(no_fifo)?;
        let bytes = segment.layout().bytes().next_multiple_of(PAGE_BYTES) as usize;
        // SAFETY: whole pages of the segment's mapping, which the owner drops after this.
        let registration = unsafe { HostRegistration::register(context, segment.as_ptr(), bytes) }?;
        let counts = 2 * LINE_BYTES + u64::from(CONNECTIONS_MAX) * size_of::<u64>() as u64;
        let counts = DeviceMemory::zeroed(context, counts as usize)?;
        Ok(KernelSide { triggers, registration, counts })
    }

    /// A channel of a connection, as kernels see it.
    pub(super) fn channel(
        &self,
        segment: &PortChannelSegment,
        connection: u32,
        number: u32,
    ) -> Option<DevicePortChannel> {
        let (layout, base, counts) = (segment.layout(), self.registration.address(), self.counts.address());
        let places = layout.kernel_places(connection)?;
        Some(DevicePortChannel {
            head: counts,
            seen_tail: counts + LINE_BYTES,
            taken: counts + 2 * LINE_BYTES + u64::from(connection) * size_of::<u64>() as u64,
            slots: base + places.slots,
            tail: base + places.tail,
            arrived: base + places.arrived,
            flushed: base + places.flushed,
            awaited: base + places.awaited,
            number,
            slots_log2: layout.kernel_slots.trailing_zeros(),
        })
    }
}

/// Pages that drivers register.
const PAGE_BYTES: u64 = 4096;
