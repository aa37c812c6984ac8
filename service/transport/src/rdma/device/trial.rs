//! Trial at start whether RDMA devices can register memory: locked-memory limit (memlock), GPU
//! memory. Otherwise the first job would meet the limit, and so would GPUs whose memory devices do
//! not reach.

use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;

use nix::sys::resource::{Resource, getrlimit};

use super::ports::Port;
use crate::rdma::data_path::memory_registration::refusal;
use crate::rdma::verbs::{DmaBuffer, GpuRefusal, ProtectionDomain};
use crate::{GpuAccess, TransportError};

/// Registered at most: it takes some tens of milliseconds to pin.
const TRIAL_BYTES_MAX: u64 = 64 << 20;
const TRIAL_BYTES_MIN: u64 = 1 << 20;
const PAGE_BYTES: u64 = 4096;

/// Registers a little more memory than the limit on locked memory allows, where that holds for this process, and forgets it.
///
/// # Errors
/// Why the device refuses.
pub(in crate::rdma) fn try_memory(port: &Port) -> Result<(), TransportError> {
    let Some(opened) = &port.opened else { return Ok(()) };
    let (limit_bytes, _) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap_or((0, 0));
    let bytes = limit_bytes.saturating_add(PAGE_BYTES).clamp(TRIAL_BYTES_MIN, TRIAL_BYTES_MAX);
    let memory = vec![0_u64; (bytes / 8) as usize];
    // SAFETY: the memory outlives the registration, which ends before this returns; nobody is told its key.
    let registered = unsafe { opened.pd.register(memory.as_ptr() as u64, bytes) };
    registered.map(drop).map_err(|error| refusal(error, bytes))
}

/// Devices on which memory of GPUs is tried, before flows use it.
#[derive(Debug, Clone)]
pub struct GpuTrial {
    /// By the names of ports.
    devices: Vec<(String, Arc<ProtectionDomain>)>,
}

impl GpuTrial {
    pub(in crate::rdma) fn of(ports: &[Port]) -> Self {
        let opened = |port: &Port| {
            let name = format!("{}:{}", port.device, port.number);
            Some((name, Arc::clone(&port.opened.as_ref()?.pd)))
        };
        GpuTrial { devices: ports.iter().filter_map(opened).collect() }
    }

    /// Registers memory with every device, and forgets it. Returns the worst way; `None` where there is no device.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are a GPU's, and stay until this returns; the dma-buf is of the same bytes.
    ///
    /// # Errors
    /// The name of a port that does not take it, and why.
    pub unsafe fn try_memory(
        &self,
        address: u64,
        bytes: u64,
        dma_buffer: Option<BorrowedFd<'_>>,
    ) -> Result<Option<GpuAccess>, (String, TransportError)> {
        let mut worst: Option<GpuAccess> = None;
        for (name, pd) in &self.devices {
            let buffer = dma_buffer.map(|fd| DmaBuffer { fd: fd.as_raw_fd(), offset: 0 });
            // SAFETY: the caller's promise, passed on; nobody is told the key of the registration, which ends at once.
            let registered = unsafe { pd.register_gpu(address, bytes, buffer) };
            let (_region, way) = registered.map_err(|GpuRefusal { by_buffer, by_address }| {
                (name.clone(), TransportError::GpuMemory { bytes, by_buffer, by_address })
            })?;
            worst = Some(worst.map_or(way, |known| known.worse(way)));
        }
        Ok(worst)
    }
}
