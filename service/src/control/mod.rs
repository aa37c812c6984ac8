//! The operator's protocol: what `mccsctl` asks, and what the service answers.
//!
//! JSON in postcard-framed chunks over the control socket, which only root and the service's own user may use. One
//! request a connection. What engines record does not go that way: the answer brings the memory that it lies in.

mod caller;
mod client;
pub mod overview;
pub mod window;

pub use caller::Caller;
pub use client::{ControlError, call, call_for_memory, call_within};

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mccs_config::change::StrategyChange;
use overview::Overview;
use serde::{Deserialize, Serialize};

use crate::controller::answer::{ControllerAnswer, ControllerRequest};
use crate::devices::cuda::GpuStrategy;
use crate::engines::controller::cluster::ClusterView;
use crate::registry::{CommInfo, RankInfo, RankProgress};
use crate::runtime::{EngineId, EngineInfo, RuntimeInfo};
use crate::session::Session;
use crate::telemetry::failed::FailedView;
use crate::telemetry::late::LateView;
use crate::telemetry::recorder::RingView;
use crate::telemetry::stuck::StuckReport;
use crate::telemetry::traffic::{KindView, PairView};
use crate::telemetry::{GpuInfo, HostInfo};
use crate::tenants::Resource;

/// Bytes of JSON in one chunk: a chunk and its framing fit a message.
pub const CHUNK_BYTES: usize = 3500;
/// Longest request that the service takes: a change of a communicator of thousands of ranks.
pub const REQUEST_BYTES_MAX: usize = 256 << 10;
/// Longest answer that a client takes.
pub const ANSWER_BYTES_MAX: usize = 64 << 20;

/// One part of a request or an answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunk {
    /// Whether another follows.
    pub more: bool,
    /// Part of the JSON text.
    pub bytes: Vec<u8>,
}

/// Cuts a text into chunks.
#[must_use]
pub fn chunks(text: &[u8]) -> Vec<Chunk> {
    let count = text.len().div_ceil(CHUNK_BYTES).max(1);
    let chunk = |i: usize| Chunk {
        more: i + 1 < count,
        bytes: text[i * CHUNK_BYTES..((i + 1) * CHUNK_BYTES).min(text.len())].to_vec(),
    };
    (0..count).map(chunk).collect()
}

/// A request, and who makes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Call {
    /// What is asked.
    pub request: ControlRequest,
    /// Who asks.
    #[serde(default)]
    pub by: Caller,
}

/// What the operator asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlRequest {
    /// All sessions.
    Sessions,
    /// All communicators with their counters.
    Communicators,
    /// Communicators that have waited for ranks, or hosts, for ten seconds, or a tenth of the time that they may; where rank 0 is, if that is on another host.
    Joining,
    /// Communicators that failed within the last hour.
    Failed,
    /// Engines and runtimes.
    Engines,
    /// Hosts of the cluster.
    Hosts,
    /// GPUs of this host.
    Gpus,
    /// All of it, at one moment.
    Overview,
    /// Refuse sessions of processes that have none, or let them in again; those that there are go on either way.
    Drain {
        /// Which; `None` only asks.
        drains: Option<bool>,
        /// Why: told to processes that are refused, and shown.
        #[serde(default)]
        reason: Option<String>,
    },
    /// Have engines record what they do. Ends by itself.
    Trace {
        /// For how long.
        duration_ms: u64,
    },
    /// Which engines record, after [`ControlRequest::Trace`]: some may have begun since.
    TraceRings,
    /// Where an engine records: the answer comes with the memory of its ring.
    TraceRing {
        /// Its number.
        ring: u64,
    },
    /// Have so many transport engines.
    ScaleTransports {
        /// How many.
        count: usize,
    },
    /// Move an engine to another runtime.
    MoveEngine {
        /// Which.
        engine: EngineId,
        /// Where to.
        runtime: u32,
    },
    /// Change a communicator's strategy while its job runs; no controller changes it then until [`ControlRequest::Unpin`]. Asked
    /// on any of its hosts.
    Reconfigure {
        /// Its number.
        communicator: u64,
        /// What to change.
        change: StrategyChange,
        /// Collectives that may start while hosts agree; the service chooses, if `None`.
        window: Option<u32>,
    },
    /// Let the controller decide again for a communicator whose strategy was changed by hand. On any of its hosts.
    Unpin {
        /// Its number.
        communicator: u64,
    },
    /// Say why a communicator is stuck, or that it runs.
    WhyStuck {
        /// Its number.
        communicator: u64,
    },
    /// What all hosts of a communicator know of it now. Who waits at one moment may wait for nobody at the next.
    Accounts {
        /// Its number.
        communicator: u64,
    },
    /// What all hosts of the cluster have, on any of them.
    Cluster {
        /// Whether what is stuck is to be found out.
        stuck: bool,
    },
    /// Ask the controller, on its host.
    Controller {
        /// What.
        request: ControllerRequest,
    },
}

/// What the service answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlAnswer {
    /// To [`ControlRequest::Sessions`].
    Sessions(Vec<SessionView>),
    /// To [`ControlRequest::Communicators`].
    Communicators(Vec<CommView>),
    /// To [`ControlRequest::Joining`].
    Joining(Vec<LateView>),
    /// To [`ControlRequest::Failed`], the last first.
    Failed(Vec<FailedView>),
    /// To [`ControlRequest::Engines`].
    Engines {
        /// The threads.
        runtimes: Vec<RuntimeInfo>,
        /// What runs on them.
        engines: Vec<EngineInfo>,
    },
    /// To [`ControlRequest::Hosts`]; empty where there is a single host.
    Hosts(Vec<HostView>),
    /// To [`ControlRequest::Gpus`]; empty where there are none, for the reason in the service's log.
    Gpus(Vec<GpuView>),
    /// To [`ControlRequest::Overview`].
    Overview(Box<Overview>),
    /// To [`ControlRequest::Drain`].
    Drain(DrainView),
    /// To [`ControlRequest::Trace`] and [`ControlRequest::TraceRings`].
    Tracing(TraceBegun),
    /// To [`ControlRequest::TraceRing`], with a descriptor for [`mccs_ipc::records::RecordReader::map`]; without one, if the engine has
    /// ended.
    TraceRing,
    /// To [`ControlRequest::WhyStuck`], when something has moved or a second was quiet, within three seconds; and to
    /// [`ControlRequest::Accounts`], when all its hosts have answered, or a second is over.
    Stuck(Box<StuckReport>),
    /// To [`ControlRequest::Reconfigure`], when all hosts have agreed.
    Reconfigured {
        /// Number of the new strategy.
        epoch: u64,
        /// Number of the first collective under it, from 0.
        cut: u64,
    },
    /// To [`ControlRequest::Cluster`], when all hosts have answered, or some seconds are over.
    Cluster(Box<ClusterView>),
    /// To [`ControlRequest::Controller`].
    Controller(Box<ControllerAnswer>),
    /// Done.
    Done,
    /// Not done, and why.
    Refused(String),
}

/// Longest window of a trace: whoever asked may be gone.
pub const TRACE_MAX: Duration = Duration::from_secs(600);

/// Engines record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceBegun {
    /// Since when, as records have time.
    pub from_ns: u64,
    /// The same in wall-clock time, since 1970.
    pub wall_ns: u64,
    /// Where.
    pub rings: Vec<RingView>,
}

/// A host of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostView {
    /// Its name.
    pub host: String,
    /// Where other services reach it.
    pub address: SocketAddr,
    /// Whether it is the one that answers.
    pub own: bool,
    /// Whether its service can be reached.
    pub up: bool,
    /// Since how long.
    pub since_seconds: u64,
    /// What last went wrong with it.
    pub last_error: Option<String>,
}

impl HostView {
    /// A host now.
    #[must_use]
    pub fn of(host: &HostInfo, now: Instant) -> Self {
        HostView {
            host: host.name.clone(),
            address: host.address,
            own: host.is_own,
            up: host.is_up,
            since_seconds: now.saturating_duration_since(host.since).as_secs(),
            last_error: host.last_error.clone(),
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

/// A GPU of the service's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuView {
    /// Its UUID.
    pub gpu: String,
    /// Product.
    pub name: String,
    /// Where it sits.
    pub pci_bus_id: String,
    /// The error after which the service cannot use it any more, if there was one.
    pub lost: Option<String>,
}

impl GpuView {
    /// A GPU now.
    #[must_use]
    pub fn of(gpu: &GpuInfo) -> Self {
        let GpuInfo { id, name, pci_bus_id, lost } = gpu;
        GpuView { gpu: id.clone(), name: name.clone(), pci_bus_id: pci_bus_id.clone(), lost: lost.get().cloned() }
    }
}

/// A session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionView {
    /// Its number.
    pub session: u64,
    /// Whose it is.
    pub tenant: String,
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

impl SessionView {
    /// A session now, which may be in any of `comms`.
    #[must_use]
    pub fn of(session: &Session, comms: &[Arc<CommInfo>]) -> Self {
        let ranks = comms.iter().flat_map(|comm| comm.ranks.iter().map(move |info| (comm, info)));
        let own = ranks.filter(|(_, info)| info.session == session.id);
        let rounds = own.fold(0, |sum: u64, (comm, info)| sum.saturating_add(comm.rounds(info)));
        let counted = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        SessionView {
            session: session.id,
            tenant: session.tenant.name.clone(),
            pid: session.peer.pid,
            uid: session.peer.uid,
            operations: (counted(&session.counters.commands).saturating_add(counted(&session.counters.rounds)))
                .saturating_add(rounds),
            in_flight: session.in_flight(),
            failed: counted(&session.counters.failed),
            copied: counted(&session.counters.copied),
            tenant_memory_bytes: session.tenant.used(Resource::MemoryBytes),
        }
    }
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
    /// What its tenant calls it; empty where it has no name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Traffic class of its packets to other hosts, where it has one of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traffic_class: Option<u8>,
    /// Whose it is.
    pub tenant: String,
    /// Device.
    pub device: String,
    /// Operations completed.
    pub operations: u64,
    /// Of those, the point-to-point pairs.
    pub pairs: u64,
    /// Their payload.
    pub bytes: u64,
    /// What collectives that the service has run have moved over each link of an ideal ring.
    pub bus_bytes: u64,
    /// Time that these took.
    pub busy_ns: u64,
    /// Time that GPUs' kernels held multiprocessors for them, of all ranks and multiprocessors together.
    #[serde(default)]
    pub multiprocessor_ns: u64,
    /// GPU memory of a rank's part: its area, its own slots of copy engines, and its share of shared ones.
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
    /// What it says, where GPUs carry collectives out.
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
    /// What flows' names say of it, where there are other hosts.
    pub links: Option<u64>,
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

    /// A communicator now; how far its GPUs are, when they were last asked, as they are here.
    #[must_use]
    pub fn of(comm: &CommInfo) -> Self {
        comm.ask();
        let rank = |info: &RankInfo| {
            let RankProgress { enqueued, started, completed } = comm.progress(info);
            let late_ns = info.late_ns.load(Ordering::Relaxed);
            let user_tag = Some(comm.user_tag(info)).filter(|tag| *tag != 0);
            let (rank, session, pid) = (info.rank, info.session, info.pid);
            RankView { rank, session, pid, enqueued, started, completed, late_ns, user_tag }
        };
        // First, since there may be more of them meanwhile, but not more than of all.
        let pairs = comm.pairs();
        let (operations, bytes) = comm.totals();
        let epoch = comm.epoch.load(Ordering::Relaxed);
        let captured = comm.direct.as_ref().and_then(|direct| direct.page().captured_terms());
        CommView {
            communicator: comm.number,
            unique_id: comm.id.to_string(),
            name: comm.name.clone(),
            traffic_class: comm.traffic_class,
            tenant: comm.tenant.clone(),
            device: comm.device.clone(),
            operations,
            pairs,
            bytes,
            bus_bytes: comm.bus_bytes.load(Ordering::Relaxed),
            busy_ns: comm.busy_ns.load(Ordering::Relaxed),
            multiprocessor_ns: comm.multiprocessor_ns.load(Ordering::Relaxed),
            gpu_memory_bytes: comm.direct.as_ref().map_or(0, |direct| direct.held_bytes(0).total()),
            kinds: comm.recent.view(),
            pair_sides: comm.recent.pair_view(),
            busbw_gbps: comm.busbw_gbps(),
            failed: comm.failed.load(Ordering::Relaxed),
            epoch,
            on_gpus: comm.direct.as_ref().and_then(|direct| direct.strategies().last()),
            is_for_training: comm.direct.as_ref().is_some_and(|direct| direct.strategies().is_for_training()),
            graphs_keep: captured.map(|terms| terms.epoch).filter(|captured| *captured != epoch),
            nranks: comm.nranks,
            hosts: comm.hosts.clone(),
            links: comm.links,
            ranks: comm.ranks.iter().map(rank).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use mccs_config::limits::POLICY_BYTES_MAX;

    use super::*;

    #[test]
    fn a_request_has_room_for_the_longest_policy() {
        // Of what may be in a file none takes more than these, and of a file's name none does.
        let (text, name) = ("\"\n".repeat(POLICY_BYTES_MAX.0 as usize / 2), "\\".repeat(4096));
        let request = ControlRequest::Controller { request: ControllerRequest::Apply { name, text } };
        assert!(serde_json::to_vec(&request).unwrap().len() <= REQUEST_BYTES_MAX);
    }
}
