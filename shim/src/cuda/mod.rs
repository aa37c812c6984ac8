//! Collectives on GPUs, in the caller's own streams.
//!
//! A [`CudaCommunicator`] belongs to the CUDA context that was current when it was made. A call launches one kernel into
//! the stream that it is given, and returns: no round trip, no copy of the buffers' addresses to anybody. Kernels of all
//! ranks meet in symmetric buffers of GPU memory that the service has made and mapped for them, under the strategy that the service
//! publishes; see [`mccs_ipc::device_initiated`] and `device_initiated`.
//!
//! A collective that is too large for that is a command to the service, whose copy engines push between the ranks' own buffers
//! ([`mccs_ipc::large`]). Buffers that no other process can open have copies (`device_initiated/staging.rs`). Sends and receives (`p2p`)
//! are one kernel a group, beside collectives and in no order with them. The service carries everything out for ranks on several hosts,
//! *staged* in host memory (`host_staged`), and for those of an operator who wants it so (`service_executed`).
//!
//! Operations work in CUDA graphs (`graphs.rs`): a captured call's number is what the GPU counts when it runs. Graphs and calls of a communicator
//! may be launched into any streams; they run in the order of their launches.

mod alone;
mod call;
mod communicator;
mod device_initiated;
mod estimate;
mod graphs;
mod host_staged;
mod memory_channels;
pub(crate) mod p2p;
mod pinned;
mod profile;
mod rails;
mod resources;
mod service_executed;
mod surfacing;
mod watch;
mod window;

pub(crate) use call::Call as CudaCall;
pub(crate) use communicator::CollectedCall;
pub use communicator::{CudaCommunicator, CudaStream, GpuMemory, TaggedCommunicator};
pub(crate) use device_initiated::GpuRegions;
#[doc(hidden)]
pub use device_initiated::REGISTERED_MAX;
pub use device_initiated::SignalWait;
pub use mccs_ipc::device_initiated::{SIGNAL_CONTEXTS, SIGNALS_OF_A_CONTEXT, Signal};
pub use memory_channels::{
    DeviceMemoryChannel, MEMORY_CHANNEL_TAGS_MAX, MemoryChannels, MemoryChannelsPart, OwnMemoryChannels,
};
#[doc(hidden)]
pub use profile::{Carrier, RanAt, StampReader};
pub(crate) use watch::{Awaited, Gone, Watch};
pub use window::{Window, WindowPart};

use mccs_cuda::DriverError;

use crate::Error;

/// A call of the driver's on the caller's behalf has failed.
fn cuda_error(error: DriverError) -> Error {
    error.into()
}
