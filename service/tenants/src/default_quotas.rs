//! Default quotas, from the host's resources (memory, cgroup, GPUs), so that no default ends an
//! ordinary job.
//!
//! | key | default |
//! | --- | --- |
//! | `max_memory` | half of the host's memory, or of what the service's cgroup allows |
//! | `max_gpu_memory` | half of the memory of the service's GPUs |
//! | `max_sessions` | a sixteenth of the tenant's share of descriptors, 64 to 1,024 |
//! | `max_communicators` | an eighth of the tenant's share of descriptors, 128 to 1,024 |

use mccs_config::service::{Cuda, CudaUse, TenantConfig};
use nix::sys::resource::{Resource, getrlimit};

use crate::host_memory::total_bytes;

/// Sessions that a tenant may have by default: a job of 64 processes, and no more than a poll of their engines takes a millisecond for.
const SESSIONS: (u64, u64) = (64, 1024);
/// Communicators: 32 process groups and 64 split communicators beside the first, and no more than tables of some MiB.
const COMMUNICATORS: (u64, u64) = (128, 1024);
/// Memory where the kernel does not say how much there is.
const MEMORY_UNKNOWN_BYTES: u64 = 8 << 30;

/// Resources from which quotas follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostResources {
    /// Memory that the service may use: the host's, or its cgroup's limit.
    pub memory_bytes: u64,
    /// GPUs of the service.
    pub gpus: u32,
    /// Their memory, all together.
    pub gpu_memory_bytes: u64,
    /// Descriptors that the service may have, by tenant.
    pub descriptors: u64,
}

/// Origins of defaults; `None` if the operator has said the quota.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QuotaOrigins {
    /// Origin of the memory quota.
    pub memory: Option<Origin>,
    /// Origin of the quota of GPU memory.
    pub gpu_memory: Option<Origin>,
    /// Origin of the number of sessions.
    pub sessions: Option<Origin>,
    /// Origin of the number of communicators.
    pub communicators: Option<Origin>,
}

/// Origin of a default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Bytes of host memory.
    HostMemory(u64),
    /// Number of GPUs, and bytes of all.
    GpuMemory(u32, u64),
    /// Descriptors of the service, by tenant.
    Descriptors(u64),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::HostMemory(bytes) => write!(f, "half of {} MiB of host memory", bytes >> 20),
            Origin::GpuMemory(gpus, bytes) => write!(f, "half of the {} MiB of {gpus} GPUs", bytes >> 20),
            Origin::Descriptors(count) => write!(f, "{count} descriptors (ulimit -n) for each tenant"),
        }
    }
}

/// The four quotas that have derived defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DerivedQuotas {
    /// Bytes of host memory.
    pub memory_bytes: u64,
    /// Bytes of GPU memory.
    pub gpu_memory_bytes: u64,
    /// Sessions.
    pub sessions: u64,
    /// Communicators.
    pub communicators: u64,
    /// Origins of defaults.
    pub origins: QuotaOrigins,
}

impl HostResources {
    /// Asks the kernel, and the CUDA driver where the service uses GPUs.
    #[must_use]
    pub fn find(cuda: &Cuda, tenants: usize) -> Self {
        let (gpus, gpu_memory_bytes) = gpu_memory(cuda);
        let (descriptors, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((0, 0));
        HostResources {
            memory_bytes: total_bytes().unwrap_or(MEMORY_UNKNOWN_BYTES),
            gpus,
            gpu_memory_bytes,
            descriptors: descriptors / tenants.max(1) as u64,
        }
    }

    /// A tenant's quotas: what the operator says, and defaults for the rest.
    #[must_use]
    pub fn quotas(&self, tenant: &TenantConfig) -> DerivedQuotas {
        let clamped = |value: u64, (least, most): (u64, u64)| value.clamp(least, most);
        let memory = (self.memory_bytes / 2, Origin::HostMemory(self.memory_bytes));
        let gpu_memory = (self.gpu_memory_bytes / 2, Origin::GpuMemory(self.gpus, self.gpu_memory_bytes));
        let from = Origin::Descriptors(self.descriptors);
        let sessions = (clamped(self.descriptors / 16, SESSIONS), from);
        let communicators = (clamped(self.descriptors / 8, COMMUNICATORS), from);
        let or = |said: Option<u64>, (value, origin): (u64, Origin)| match said {
            Some(said) => (said, None),
            None => (value, Some(origin)),
        };
        let (memory_bytes, memory) = or(tenant.max_memory.map(|bytes| bytes.0), memory);
        let (gpu_memory_bytes, gpu_memory) = or(tenant.max_gpu_memory.map(|bytes| bytes.0), gpu_memory);
        let (sessions, of_sessions) = or(tenant.max_sessions.map(u64::from), sessions);
        let (communicators, of_communicators) = or(tenant.max_communicators.map(u64::from), communicators);
        let origins = QuotaOrigins { memory, gpu_memory, sessions: of_sessions, communicators: of_communicators };
        DerivedQuotas { memory_bytes, gpu_memory_bytes, sessions, communicators, origins }
    }
}

impl DerivedQuotas {
    /// The defaults as comments of a configuration file, a line each: they are in force, and are not pinned by reading the text back.
    #[must_use]
    pub fn as_comments(&self, tenant: &str) -> String {
        let QuotaOrigins { memory, gpu_memory, sessions, communicators } = self.origins;
        let mib = |bytes: u64| format!("\"{}MiB\"", bytes >> 20);
        let lines = [
            ("max_memory", mib(self.memory_bytes), memory),
            ("max_gpu_memory", mib(self.gpu_memory_bytes), gpu_memory),
            ("max_sessions", self.sessions.to_string(), sessions),
            ("max_communicators", self.communicators.to_string(), communicators),
        ];
        let line = |(key, value, origin): (&str, String, Option<Origin>)| {
            origin.map(|origin| format!("# tenant {tenant:?}: {key} = {value} by default, from {origin}\n"))
        };
        lines.into_iter().filter_map(line).collect()
    }
}

/// How many GPUs the service may use, and the memory of all.
fn gpu_memory(cuda: &Cuda) -> (u32, u64) {
    if cuda.usage == CudaUse::Off {
        return (0, 0);
    }
    let found = mccs_cuda::driver().ok().and_then(|()| mccs_cuda::gpus_or_unresponsive().ok()).unwrap_or_default();
    let is_ours = |gpu: &mccs_cuda::Gpu| cuda.gpus.is_empty() || cuda.gpus.iter().any(|name| gpu.is_called(name));
    let ours = found.into_iter().flatten().filter(is_ours);
    ours.fold((0, 0), |(gpus, bytes), gpu| (gpus + 1, bytes + gpu.memory_bytes))
}

#[cfg(test)]
mod tests {
    use mccs_config::units::Bytes;

    use super::*;

    const HOST: HostResources =
        HostResources { memory_bytes: 64 << 30, gpus: 8, gpu_memory_bytes: 640 << 30, descriptors: 1 << 14 };

    #[test]
    fn what_is_not_said_follows_from_the_host_and_what_is_said_is_kept() {
        let tenant = TenantConfig::new("a", "a.sock");
        let quotas = HOST.quotas(&tenant);
        assert_eq!((quotas.memory_bytes, quotas.gpu_memory_bytes), (32 << 30, 320 << 30));
        assert_eq!((quotas.sessions, quotas.communicators), (1024, 1024));
        let comments = quotas.as_comments("a");
        assert!(comments.contains("max_gpu_memory = \"327680MiB\" by default, from half of the 655360 MiB of 8 GPUs"));
        assert_eq!(comments.lines().count(), 4);
        let few = HostResources { descriptors: 1024, ..HOST }.quotas(&tenant);
        assert_eq!((few.sessions, few.communicators), (64, 128), "enough for 97 communicators");
        let said = TenantConfig { max_memory: Some(Bytes::gib(1)), max_communicators: Some(3), ..tenant };
        let quotas = HOST.quotas(&said);
        assert_eq!((quotas.memory_bytes, quotas.communicators), (1 << 30, 3));
        assert_eq!((quotas.origins.memory, quotas.origins.communicators), (None, None));
        assert_eq!(quotas.as_comments("a").lines().count(), 2);
    }

    #[test]
    fn the_kernel_tells_of_memory() {
        let host = HostResources::find(&Cuda { usage: CudaUse::Off, ..Cuda::default() }, 2);
        assert!(host.memory_bytes > 1 << 20 && host.descriptors > 0 && host.gpu_memory_bytes == 0, "{host:?}");
    }
}
