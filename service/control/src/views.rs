//! Views on the wire: hosts, GPUs, sessions, ranks and communicators, as `mccsctl` shows them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Instant;

use mccs_config::service::TransportKind;
use mccs_model::GpuStrategy;
use mccs_telemetry::bandwidth::{KindView, PairView};
use mccs_telemetry::{GpuInfo, HostInfo};
use serde::{Deserialize, Serialize};

/// A host of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostView {
    /// Its name.
    pub host: String,
    /// Address for other services.
    pub address: SocketAddr,
    /// Whether it is the one that answers.
    pub own: bool,
    /// Whether its service can be reached.
    pub up: bool,
    /// Since how long.
    pub since_seconds: u64,
    /// Its last trouble.
    pub last_error: Option<String>,
    /// RDMA ports that its flows may leave by, if it is the one that answers and has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma: Option<String>,
    /// Why it has none, if it is the one that answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_rdma: Option<String>,
}

impl HostView {
    /// A host now; `rdma` says it of the one that answers.
    #[must_use]
    pub fn of(host: &HostInfo, rdma: Option<&Result<String, String>>, now: Instant) -> Self {
        let rdma = rdma.filter(|_| host.is_own);
        HostView {
            host: host.name.clone(),
            address: host.address,
            own: host.is_own,
            up: host.is_up,
            since_seconds: now.saturating_duration_since(host.since).as_secs(),
            last_error: host.last_error.clone(),
            rdma: rdma.and_then(|rdma| rdma.as_ref().ok()).cloned(),
            no_rdma: rdma.and_then(|rdma| rdma.as_ref().err()).cloned(),
        }
    }
}

/// Whether a host is being emptied, and how far that is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainView {
    /// Whether processes that have no session are refused.
    pub draining: bool,
    /// Why, where the operator has said.
    #[serde(default)]
    pub reason: Option<String>,
    /// Those that there are.
    pub sessions: usize,
    /// Their communicators.
    pub communicators: usize,
}

/// A tenant, and what it holds now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantRow {
    /// Its name.
    pub tenant: String,
    /// The tenant of `policy.toml` whose rules hold for it.
    pub rules: String,
    /// Labels for operators beside its name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Its part of the service's threads.
    pub weight: u32,
    /// Connected processes.
    pub sessions: u64,
    /// Communicators.
    pub communicators: u64,
    /// Bytes of host memory.
    pub memory_bytes: u64,
    /// Socket of its processes, if it was added while the service ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub added: Option<PathBuf>,
    /// Whether it is being taken away.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
}

/// A GPU of the service's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuView {
    /// Its UUID.
    pub gpu: String,
    /// Product.
    pub name: String,
    /// PCI address.
    pub pci_bus_id: String,
    /// In words, whose memory it does not reach, as was tried at start: data to those go through memory of the host.
    pub unreached: Vec<String>,
    /// The error after which the service cannot use it any more, if there was one.
    pub lost: Option<String>,
    /// RDMA NICs that its flows to other hosts leave by, nearest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<String>,
    /// How these reach its memory; absent where there are no other hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic_access: Option<String>,
    /// Why they do not reach it in a better way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nic_access_reason: Option<String>,
}

impl GpuView {
    /// A GPU now.
    #[must_use]
    pub fn of(gpu: &GpuInfo) -> Self {
        let GpuInfo { id, name, pci_bus_id, unreached, lost, nics, nic_path } = gpu;
        GpuView {
            gpu: id.clone(),
            name: name.clone(),
            pci_bus_id: pci_bus_id.clone(),
            unreached: unreached.clone(),
            lost: lost.get().cloned(),
            nics: nics.get().cloned().unwrap_or_default(),
            nic_access: nic_path.get().map(|path| path.access.name().to_owned()),
            nic_access_reason: nic_path.get().and_then(|path| path.reason.clone()),
        }
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// A session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionView {
    /// Its number.
    pub session: u64,
    /// Its owner.
    pub tenant: String,
    /// The job of its communicators, as its launcher calls it; empty before there are any.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub job: String,
    /// The process.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
    /// Operations taken in.
    pub operations: u64,
    /// Operations not ended.
    pub in_flight: u64,
    /// Operations that failed.
    pub failed: u64,
    /// Operations on GPUs of which buffers had to be copied first, since the service cannot open them.
    pub copied: u64,
    /// Memory of all the tenant's sessions.
    pub tenant_memory_bytes: u64,
}

/// A rank of a communicator. The numbers count collectives: the last sequence number plus one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankView {
    /// The rank.
    pub rank: u32,
    /// Its session.
    pub session: u64,
    /// Its process.
    pub pid: i32,
    /// Enqueued by the tenant.
    pub enqueued: u64,
    /// Started.
    pub started: u64,
    /// Completed.
    pub completed: u64,
    /// Time by which it has come later to started collectives than the first rank of this host.
    pub late_ns: u64,
    /// The last tag that it has given an operation; absent where it has given none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_tag: Option<u64>,
}

/// A communicator.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CommView {
    /// Its number.
    pub communicator: u64,
    /// Its unique id.
    pub unique_id: String,
    /// Its tenant's name for it; empty if it has none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The job that it is part of, as its launcher calls it; empty where that is not known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub job: String,
    /// Traffic class of its packets to other hosts, where it has one of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic_class: Option<u8>,
    /// Its owner.
    pub tenant: String,
    /// Device.
    pub device: String,
    /// Operations completed.
    pub operations: u64,
    /// Point-to-point pairs among those.
    pub pairs: u64,
    /// Their payload.
    pub bytes: u64,
    /// Puts of port channels that have ended, which are no operations; between two hosts the sender's count.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub puts: u64,
    /// Their bytes.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub put_bytes: u64,
    /// Bytes over each link of an ideal ring, for collectives that the service has run.
    pub bus_bytes: u64,
    /// Time that these took.
    pub busy_ns: u64,
    /// Time that GPUs' kernels held multiprocessors for them, of all ranks and multiprocessors together.
    #[serde(default)]
    pub multiprocessor_ns: u64,
    /// GPU memory of a rank's part: its symmetric buffer, its own slots of copy engines, and its share of shared ones.
    #[serde(default)]
    pub gpu_memory_bytes: u64,
    /// The last of them, by kind.
    pub kinds: Vec<KindView>,
    /// Its last sends and receives.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pair_sides: Vec<PairView>,
    /// Average bus bandwidth while busy, GB/s.
    pub busbw_gbps: f64,
    /// Operations that failed.
    pub failed: u64,
    /// Number of the strategy in force.
    pub epoch: u64,
    /// Its strategy on GPUs, if these carry collectives out.
    pub on_gpus: Option<GpuStrategy>,
    /// Whether copy engines carry long collectives out, since these come with other work of the tenant's between them.
    #[serde(default)]
    pub is_for_training: bool,
    /// Number of the strategy that captured graphs keep, where it is another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub graphs_keep: Option<u64>,
    /// Ranks on all hosts.
    pub nranks: u32,
    /// Its hosts; none where all ranks are on this one.
    pub hosts: Vec<String>,
    /// Its number in flows' names, if there are other hosts.
    pub links: Option<u64>,
    /// Number of the caller's communicator that it is a part of, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part_of: Option<u64>,
    /// Which part: `team`, `rail 1 of 8`, `copy engines`, `graphs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<String>,
    /// Transport of its flows to other hosts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<TransportKind>,
    /// Why it began over TCP, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport_reason: Option<String>,
    /// The first ranks of hosts, or of their groups of GPUs, in the order in which these pass on what they reduce; absent where they do not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reduction_ring: Vec<u32>,
    /// Ranks of this host.
    pub ranks: Vec<RankView>,
}

impl CommView {
    /// Multiprocessors that its collectives hold on each GPU while one runs, on average. Kernels that wait for other ranks count.
    #[must_use]
    pub fn multiprocessors(&self) -> f64 {
        let rank_ns = self.busy_ns as f64 * f64::from(self.nranks);
        if rank_ns == 0.0 { 0.0 } else { self.multiprocessor_ns as f64 / rank_ns }
    }
}
