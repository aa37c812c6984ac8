//! The most host memory that the service can come to hold: its tenants' quotas, and a stated part of its own.

use std::path::PathBuf;
use std::sync::Arc;

use crate::host_memory::least_limit;
use crate::tenant::Tenant;

/// Memory of the service itself, without sessions: its program, tables, staging memory, traces and logs.
pub const OF_SERVICE_BYTES: u64 = 256 << 20;
/// Memory of a session: its segment with rings and words, its tables, answers that wait.
pub const OF_SESSION_BYTES: u64 = 1 << 20;

/// See the module's documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBound {
    /// Sum of all tenants' quotas.
    pub quotas_bytes: u64,
    /// The service's own part: [`OF_SERVICE_BYTES`], and [`OF_SESSION_BYTES`] for each session that there may be.
    pub own_bytes: u64,
}

/// The limit of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryAllowed {
    /// Bytes.
    pub bytes: u64,
    /// The folder of the cgroup whose `memory.max` it is; the host's memory, if `None`.
    pub cgroup: Option<PathBuf>,
}

impl MemoryBound {
    /// With these tenants, which have so many sessions together at most.
    #[must_use]
    pub fn of(tenants: &[Arc<Tenant>], sessions_max: u64) -> Self {
        let quotas = tenants.iter().map(|tenant| tenant.quota);
        let (memory, sessions) = quotas.fold((0u64, 0u64), |(memory, sessions), quota| {
            (memory.saturating_add(quota.memory_bytes), sessions.saturating_add(quota.sessions))
        });
        let of_sessions = sessions.min(sessions_max).saturating_mul(OF_SESSION_BYTES);
        MemoryBound { quotas_bytes: memory, own_bytes: OF_SERVICE_BYTES.saturating_add(of_sessions) }
    }

    /// All of it.
    #[must_use]
    pub fn most_bytes(&self) -> u64 {
        self.quotas_bytes.saturating_add(self.own_bytes)
    }
}

impl MemoryAllowed {
    /// The limit of this process; `None` where the kernel does not say.
    #[must_use]
    pub fn here() -> Option<Self> {
        least_limit().map(|(bytes, cgroup)| MemoryAllowed { bytes, cgroup })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Quota;

    #[test]
    fn the_bound_is_the_sum_of_quotas_and_of_what_the_service_takes_itself() {
        let tenant =
            |memory_bytes, sessions| Tenant::new("a".into(), Quota { memory_bytes, sessions, ..Quota::least() });
        let tenants = [tenant(3 << 30, 10), tenant(1 << 30, 20)];
        let bound = MemoryBound::of(&tenants, 1000);
        assert_eq!(bound, MemoryBound { quotas_bytes: 4 << 30, own_bytes: (256 + 30) << 20 });
        assert_eq!(bound.most_bytes(), (4096 + 286) << 20);
        assert_eq!(
            MemoryBound::of(&tenants, 7).own_bytes,
            (256 + 7) << 20,
            "all tenants together have no more sessions"
        );
        assert_eq!(MemoryBound::of(&[tenant(u64::MAX, 1), tenant(1, 1)], 9).most_bytes(), u64::MAX);
    }

    #[test]
    fn the_kernel_says_what_this_process_may_take() {
        assert!(MemoryAllowed::here().is_some_and(|allowed| allowed.bytes > 1 << 20));
    }
}
