//! Kernel limits of the daemon's process (descriptors, mappings), and how much of them tenants may
//! have.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use mccs_ipc::protocol::{GPU_SEGMENTS_MAX, MESSAGE_FDS_MAX};
use nix::sys::resource::{Resource as KernelLimit, getrlimit};

use crate::quota::Resource;

/// The kernel's limit where it does not say.
const MAPPINGS_DEFAULT: u64 = 65_530;

/// Mappings of this process that tenants' regions may take, all together: seven eighths of what the kernel allows. A process that has
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
        let all = getrlimit(KernelLimit::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
        (all / 16).clamp(MESSAGE_FDS_MAX as u64, GPU_SEGMENTS_MAX as u64)
    })
}

/// Descriptors that may be on their way to a tenant's processes: a sixteenth of what the kernel allows those of a user, and no
/// fewer than some connections at once bring.
#[must_use]
pub fn sent_descriptors_of_tenant() -> u64 {
    static LIMIT: OnceLock<u64> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        let all = getrlimit(KernelLimit::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft);
        (all / 16).clamp(32, 4096)
    })
}

/// Descriptors of a tenant's memory that are kept for the service's next program: a sixteenth of what the kernel allows.
#[must_use]
pub fn kept_descriptors_of_tenant() -> u64 {
    static LIMIT: OnceLock<u64> = OnceLock::new();
    *LIMIT.get_or_init(|| getrlimit(KernelLimit::RLIMIT_NOFILE).map_or(0, |(soft, _)| soft) / 16)
}

/// Holdings of all tenants together of something that the process has so much of. Each has a quota besides; but tenants come while the
/// service runs, and the sum of quotas has no bound.
#[derive(Debug)]
pub(crate) struct HeldByAll {
    held: AtomicU64,
    most: fn() -> u64,
    known: OnceLock<u64>,
}

impl HeldByAll {
    const fn new(most: fn() -> u64) -> Self {
        HeldByAll { held: AtomicU64::new(0), most, known: OnceLock::new() }
    }

    pub(crate) fn most(&self) -> u64 {
        *self.known.get_or_init(self.most)
    }

    /// # Errors
    /// So much is held that this would be too much, and nothing is taken.
    pub(crate) fn take(&self, amount: u64) -> Result<(), u64> {
        let add = |held: u64| held.checked_add(amount).filter(|sum| *sum <= self.most());
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).map(drop)
    }

    pub(crate) fn give_back(&self, amount: u64) {
        self.held.fetch_sub(amount, Ordering::Relaxed);
    }
}

/// Holdings of all tenants together of a process.
#[derive(Debug)]
pub(crate) struct ProcessHoldings {
    mappings: HeldByAll,
    descriptors: HeldByAll,
    sent_descriptors: HeldByAll,
    kept_descriptors: HeldByAll,
}

/// Holdings of this process. A quarter of its descriptors may be of tenants' GPU memory, and as many each sent and kept; one
/// tenant has a sixteenth.
pub(crate) static HELD: ProcessHoldings = ProcessHoldings::new(
    mappings_of_tenants,
    || 4 * descriptors_of_tenant(),
    || 4 * sent_descriptors_of_tenant(),
    || 4 * kept_descriptors_of_tenant(),
);

impl ProcessHoldings {
    pub(crate) const fn new(
        mappings: fn() -> u64,
        descriptors: fn() -> u64,
        sent_descriptors: fn() -> u64,
        kept_descriptors: fn() -> u64,
    ) -> Self {
        ProcessHoldings {
            mappings: HeldByAll::new(mappings),
            descriptors: HeldByAll::new(descriptors),
            sent_descriptors: HeldByAll::new(sent_descriptors),
            kept_descriptors: HeldByAll::new(kept_descriptors),
        }
    }

    /// Holdings of a resource of which the process has so much.
    pub(crate) fn of(&self, resource: Resource) -> Option<&HeldByAll> {
        match resource {
            Resource::Mappings => Some(&self.mappings),
            Resource::Descriptors => Some(&self.descriptors),
            Resource::SentDescriptors => Some(&self.sent_descriptors),
            Resource::KeptDescriptors => Some(&self.kept_descriptors),
            Resource::MemoryBytes
            | Resource::GpuMemoryBytes
            | Resource::Sessions
            | Resource::Communicators
            | Resource::Ranks
            | Resource::Imports
            | Resource::MappedBytes => None,
        }
    }
}
