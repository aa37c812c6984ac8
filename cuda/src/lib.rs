//! The CUDA driver API, opened at run time: as much of it as the service and the library use.
//!
//! One binary runs with and without a GPU: [`driver`] says in one line what is missing. Types and constants are cudarc's;
//! entry points are looked up once, into a table, since cudarc's own look a symbol up at every call and panic where an
//! older driver lacks it. Nothing here panics, and every error names the call and the driver's own word for it.
//!
//! Addresses in a GPU's memory are plain [`DeviceAddress`]es: they are never dereferenced on the processor.
//! Preconditions that the driver cannot check (a stream of another context, memory that was freed) are the caller's
//! contract, so those calls are unsafe.
//!
//! Absent on purpose: managed memory, textures, multicast, and everything of the runtime API.

mod allocation;
mod api;
mod context;
mod error;
mod gpu;
mod graph;
mod memory;
mod module;
mod stream;

pub use allocation::{Allocation, MappedMemory, PooledMemory, Shared};
pub use context::{Context, Entered};
pub use error::{DriverError, Unavailable, is_sticky, name_of};
pub use gpu::{
    Capability, CudaVersion, Gpu, GpuId, UnresponsiveGpu, cuda_version, current_ordinal, gpus, gpus_or_unresponsive,
};
pub use graph::{Capture, CaptureMode, CapturedGraph, Graph, GraphNode, KernelGraph, while_capturing};
pub use memory::{
    DeviceAddress, DeviceMemory, HostRegistration, ImportedMemory, IpcHandle, LARGE_PAGE_BYTES, PinnedMemory,
    PointerKind, allocation_of, buffer_id, copy_from_host, copy_to_host, dma_buffer, export, ordinal_of, pointer_kind,
};
pub use module::{Function, Kernels, Module};
pub use stream::{Event, OwnedStream, RawStream, WordOperation};

/// Looks for the driver, and initialises it. Costs nothing after the first call.
///
/// # Errors
/// [`Unavailable`], with what to install or mend.
pub fn driver() -> Result<(), Unavailable> {
    api::table().map(drop).map_err(Clone::clone)
}
