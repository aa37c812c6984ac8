//! Quotas of a tenant, and the text of a refusal when one is used up.

use crate::default_quotas::QuotaOrigins;

/// A tenant's quota, on this host, over all its sessions unless said otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// Bytes of memory allocated from or registered with the service.
    pub memory_bytes: u64,
    /// Bytes of GPUs' memory in its communicators' symmetric buffers, of all GPUs together.
    pub gpu_memory_bytes: u64,
    /// Connected processes.
    pub sessions: u64,
    /// Communicators, those still being set up included: all ranks of one count once.
    pub communicators: u64,
    /// Operations a session may have in flight.
    pub operations_in_flight: u64,
    /// Streams of a session.
    pub streams: u32,
    /// Regions of a session.
    pub regions: u32,
    /// Mappings that all its regions take of this process, which has a limited number.
    pub mappings: u64,
    /// Origins of quotas that the operator has not said.
    pub origins: QuotaOrigins,
}

/// Ranks of this host that a communicator may have by the quota, on average: as many as hosts have cores. Each holds a slot of some hundred bytes.
const RANKS_OF_A_COMMUNICATOR: u64 = 256;
/// Ranks of a process, where it may have fewer communicators: a rank for each of 8 GPUs in 256.
const RANKS_OF_A_SESSION: u64 = 2048;

impl Quota {
    /// Ranks in communicators that a tenant may have, over all sessions.
    #[must_use]
    pub fn ranks(&self) -> u64 {
        self.communicators.saturating_mul(RANKS_OF_A_COMMUNICATOR).min(u64::from(u32::MAX))
    }

    /// Ranks in communicators that one session may have: it has room for a reply to each.
    #[must_use]
    pub fn ranks_of_session(&self) -> u64 {
        self.communicators.max(self.communicators.saturating_mul(8).min(RANKS_OF_A_SESSION))
    }
}

/// Resources that a `Charge` counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// Bytes of memory.
    MemoryBytes,
    /// Bytes of GPUs' memory in symmetric buffers.
    GpuMemoryBytes,
    /// Mappings of this process.
    Mappings,
    /// Sessions.
    Sessions,
    /// Communicators.
    Communicators,
    /// Ranks in communicators.
    Ranks,
    /// Registered memory that the driver has open: by handle, as often as GPUs have it open; by segment, once.
    Imports,
    /// Bytes of segments of GPU memory, as often as they are mapped: one segment may be named many times. The GPUs say how many there may be.
    MappedBytes,
    /// Descriptors of GPU memory: of segments that are not imported yet, of parts of communicators that are not sent yet, of twins,
    /// of symmetric buffers in the host's memory.
    Descriptors,
    /// Descriptors that its processes have been sent and have not taken.
    SentDescriptors,
    /// Descriptors of its memory that are kept for the service's next program.
    KeptDescriptors,
}

/// Most [`Resource::Imports`] of a tenant: more than programs have, and few enough for the driver.
pub(crate) const IMPORTS_MAX: u64 = 1 << 16;

impl Resource {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Resource::MemoryBytes => "bytes of memory",
            Resource::GpuMemoryBytes => "bytes of GPU memory for communicators",
            Resource::Mappings => "mappings (one for each region, three for a large one)",
            Resource::Sessions => "sessions",
            Resource::Communicators => "communicators",
            Resource::Ranks => "ranks in communicators",
            Resource::Imports => "open registrations of GPU memory",
            Resource::MappedBytes => "mapped bytes of GPU memory",
            Resource::Descriptors => "descriptors of GPU memory",
            Resource::KeptDescriptors => "descriptors of its memory that are kept",
            Resource::SentDescriptors => "descriptors sent to its processes, which have not taken them,",
        }
    }

    /// Remedy that makes room for more of it.
    pub(crate) fn remedy(self) -> String {
        match self {
            Resource::MemoryBytes => raise("max_memory"),
            Resource::GpuMemoryBytes => raise("max_gpu_memory"),
            Resource::Sessions => raise("max_sessions"),
            Resource::Communicators | Resource::Ranks => raise("max_communicators"),
            Resource::Mappings => "raise vm.max_map_count, which tenants share".into(),
            Resource::Descriptors | Resource::KeptDescriptors => {
                "raise the service's limit of open files (LimitNOFILE)".into()
            }
            Resource::SentDescriptors => "its processes read their answers late".into(),
            Resource::Imports => "free some of the registered memory".into(),
            Resource::MappedBytes => "it is what the GPUs have: free some of the registered memory".into(),
        }
    }
}

impl SessionResource {
    pub(crate) fn name(self) -> &'static str {
        match self {
            SessionResource::Streams => "streams",
            SessionResource::Regions => "regions",
            SessionResource::GpuRegions => "regions of GPUs",
            SessionResource::Ranks => "ranks in communicators",
            SessionResource::GroupLength => "operations in a group",
        }
    }

    pub(crate) fn remedy(self) -> String {
        raise(match self {
            SessionResource::Streams => "max_streams",
            SessionResource::Regions | SessionResource::GpuRegions => "max_regions",
            SessionResource::Ranks => "max_communicators",
            SessionResource::GroupLength => "max_operations_in_flight",
        })
    }
}

/// A refusal: the quota is used up. Says what the operator can change.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("tenant {tenant} is over its quota: {asked} more {what} asked for, {used} of {limit} in use; {remedy}")]
pub struct OverQuota {
    pub(crate) tenant: String,
    pub(crate) what: &'static str,
    pub(crate) asked: u64,
    pub(crate) used: u64,
    pub(crate) limit: u64,
    pub(crate) remedy: String,
}

/// Resources of which a session may have so many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionResource {
    /// Streams.
    Streams,
    /// Regions of the host's memory.
    Regions,
    /// Regions of GPUs' memory.
    GpuRegions,
    /// Ranks in communicators.
    Ranks,
    /// Sends and receives of one group.
    GroupLength,
}

/// How an operator raises a tenant's quota.
fn raise(key: &str) -> String {
    format!("raise [[tenant]] {key} in service.toml")
}

impl Quota {
    /// Next to nothing of everything, for tests.
    #[must_use]
    pub fn least() -> Self {
        Quota {
            memory_bytes: 100,
            gpu_memory_bytes: 0,
            sessions: 1,
            communicators: 1,
            operations_in_flight: 1,
            streams: 1,
            regions: 1,
            mappings: 1,
            origins: QuotaOrigins::default(),
        }
    }
}
