//! Kernel limits of the daemon's process (descriptors, mappings), and how much of them tenants may
//! have.

use std::sync::OnceLock;

use mccs_ipc::protocol::{GPU_SEGMENTS_MAX, MESSAGE_FDS_MAX};
use nix::sys::resource::{Resource, getrlimit};

/// The kernel's limit where it does not say.
const MAPPINGS_DEFAULT: u64 = 65_530;

/// Mappings of this process that tenants' regions may take, all together: seven eighths of what the kernel allows. Who has
/// none left can map neither sessions nor memory of its own, and ends.
#[must_use]
pub fn mappings_of_tenants() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
    let all: u64 = text.trim().parse().unwrap_or(MAPPINGS_DEFAULT);
    all - all / 8
}

/// Descriptors of this process that a tenant's GPU memory may take: segments until they are imported, parts of communicators until they are
/// sent, twins and symmetric buffers of the host's memory. A sixteenth of what the kernel allows, which is more than sessions need beside
/// them, and no more than a region has segments.
#[must_use]
pub fn descriptors_of_tenant() -> u64 {
    static LIMIT: OnceLock<u64> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        let all = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
        (all / 16).clamp(MESSAGE_FDS_MAX as u64, GPU_SEGMENTS_MAX as u64)
    })
}

/// Descriptors that may be on their way to a tenant's processes: a sixteenth of what the kernel allows those of a user, and no
/// fewer than some connections at once bring.
#[must_use]
pub fn sent_descriptors_of_tenant() -> u64 {
    static LIMIT: OnceLock<u64> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        let all = getrlimit(Resource::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
        (all / 16).clamp(32, 4096)
    })
}
