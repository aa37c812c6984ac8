//! Whether a device takes memory of this process: a limit on locked memory would otherwise be met by the first job.

use nix::sys::resource::{Resource, getrlimit};

use super::ports::Port;
use crate::TransportError;
use crate::rdma::data_path::memory::refusal;

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
