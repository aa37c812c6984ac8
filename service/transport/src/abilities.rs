//! Optional abilities of transports: setting paths, path and port events, packet statistics, GPU
//! memory, named devices.
//!
//! Each is a small trait. [`Abilities`] says which of them a transport has, so that an engine knows instead of calling what does
//! nothing. None of them is called for each message.

use std::sync::Arc;

use nix::errno::Errno;

use super::{FlowId, FlowOptions, FlowPath, MemoryKey, SendFlow, TransportError, WireStats};

/// Which abilities a transport has; `None` where it lacks one. The answers stay the same for a transport's whole life.
pub trait Abilities {
    /// Leads flows over other paths while they run.
    fn path_control(&mut self) -> Option<&mut dyn PathControl> {
        None
    }

    /// Finds out which paths are dead.
    fn path_events(&mut self) -> Option<&mut dyn PathEvents> {
        None
    }

    /// Knows the ports by which flows go.
    fn port_events(&mut self) -> Option<&mut dyn PortEvents> {
        None
    }

    /// Counts packets.
    fn wire_statistics(&self) -> Option<&dyn WireStatistics> {
        None
    }

    /// Knows how devices reach memory of GPUs.
    fn gpu_memory(&self) -> Option<&dyn GpuMemory> {
        None
    }

    /// Sends by devices of this host that paths can name.
    fn local_devices(&self) -> Option<&dyn LocalDevices> {
        None
    }
}

/// Changes of path under load.
pub trait PathControl {
    /// From now on a flow goes over `path`, and over `detours` where that one dies. Messages that were sent and have not arrived are
    /// sent there again. A flow stays where it is if the path cannot be had.
    fn set_path(&mut self, flow: SendFlow, path: &FlowPath, detours: &Arc<[FlowPath]>);
}

/// News of flows about paths.
pub trait PathEvents {
    /// The next event, oldest first.
    fn take_path_event(&mut self) -> Option<PathEvent>;
}

/// Which ports flows take.
pub trait PortEvents {
    /// The next event, oldest first.
    fn take_port_event(&mut self) -> Option<PortEvent>;
}

/// Counts of packets.
pub trait WireStatistics {
    /// Counts of one flow; `None` if it is not there or the kernel does not say. Costs a system call for each connection.
    fn wire_stats(&self, flow: SendFlow) -> Option<WireStats>;
}

/// Memory of GPUs that is registered.
pub trait GpuMemory {
    /// How devices reach it: the worst way of those that know it. `None`: it is no GPU's, or no device knows it yet.
    fn gpu_access(&self, memory: MemoryKey) -> Option<GpuAccess>;

    /// Whether a flow's messages may lie in memory of GPUs.
    fn reaches_gpus(&self, flow: FlowId) -> bool;
}

/// How a device reaches a GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuAccess {
    /// By its dma-buf.
    DmaBuffer,
    /// By its address, for which the peer-memory module speaks.
    PeerMemory {
        /// Why not by its dma-buf; `None`: there is none.
        by_buffer: Option<Errno>,
    },
}

impl GpuAccess {
    /// The worse of two ways: that by address.
    #[must_use]
    pub fn worse(self, other: GpuAccess) -> GpuAccess {
        if self == GpuAccess::DmaBuffer { other } else { self }
    }
}

/// Devices of this host.
pub trait LocalDevices {
    /// Whether the device that `options` name carries packets, as far as this host knows; also where they name none.
    ///
    /// # Errors
    /// This host has no such device, or the device has no address that flows could have.
    fn is_device_up(&self, options: &FlowOptions) -> Result<bool, TransportError>;
}

/// Whether the device that `options` name carries packets, of a transport whose devices these are, if it has any.
///
/// # Errors
/// As of [`LocalDevices::is_device_up`].
pub fn is_device_up(devices: Option<&dyn LocalDevices>, options: &FlowOptions) -> Result<bool, TransportError> {
    match (devices, &options.device) {
        (Some(devices), _) => devices.is_device_up(options),
        (None, None) => Ok(true),
        (None, Some(device)) => Err(TransportError::Device {
            device: device.clone(),
            problem: "what carries its flows has no devices".into(),
        }),
    }
}

/// A flow's sender has found that a path is dead, or answers again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathEvent {
    /// The flow.
    pub flow: SendFlow,
    /// Steering of packets over the path.
    pub path: FlowPath,
    /// Whether the peer's host answers over it again, and the flow goes there now. Otherwise it has left packets unanswered there for
    /// [`FlowOptions::path_timeout`].
    pub answers: bool,
}

/// A flow has taken or left a port of its host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortEvent {
    /// The flow, either direction.
    pub flow: FlowId,
    /// Name of the device and number of its port, such as `mlx5_0:1`. `None`: the flow has left the one before, and looks for another.
    pub port: Option<String>,
}
