//! Operator's protocol (admin RPC) on the control socket: requests of `mccsctl`, and the service's
//! answers.
//!
//! Imports the controller's answers and telemetry's views, and nothing that runs: `mccsctl` links this crate, and no service.
//!
//! JSON in postcard-framed chunks over the control socket, which only root and the service's own user may use, or over the observers'
//! socket, whose users may only look. One request a connection. Records of engines do not go that way: the answer brings the memory that
//! they lie in.

pub mod acts;
mod caller;
mod client;
pub mod cluster;
pub mod documents;
pub mod overview;
pub mod tenants;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod trace_window;
mod views;

pub use caller::Caller;
pub use client::{ControlError, call, call_for_memory, call_for_text, call_within};
pub use views::{CommView, DrainView, GpuView, HostView, RankView, SessionView, TenantRow};

use std::path::PathBuf;
use std::time::Duration;

use mccs_config::change::StrategyChange;
use mccs_config::cpus::CpuChoice;
use mccs_config::service::TenantConfig;
use overview::Overview;
use serde::{Deserialize, Serialize};

pub use mccs_controller::messages::answer::OfficeView;
use mccs_controller::messages::answer::{ControllerAnswer, ControllerRequest};
use mccs_runtime::{EngineId, EngineInfo, RuntimeInfo};
use mccs_telemetry::failed::FailedView;
use mccs_telemetry::missing_ranks::LateView;
use mccs_telemetry::recorder::RingView;
use mccs_telemetry::stuck::StuckReport;

use crate::acts::{ActRefusal, SignedAct, TokenMade, TokenView, TokenWanted};
use crate::cluster::ClusterView;

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
    /// The request.
    pub request: ControlRequest,
    /// The caller.
    #[serde(default)]
    pub by: Caller,
}

/// Requests of operators.
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
    /// Ring of an engine: the answer comes with its memory.
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
        /// The other runtime.
        runtime: u32,
    },
    /// Have a runtime's thread run on these CPUs from now on.
    BindRuntime {
        /// Which.
        runtime: u32,
        /// The namespace.
        to: CpuChoice,
    },
    /// Change a communicator's strategy while its job runs; no controller changes it then until [`ControlRequest::Unpin`]. Asked
    /// on any of its hosts.
    Reconfigure {
        /// Its number.
        communicator: u64,
        /// The change.
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
    /// Accounts of a communicator on all its hosts, as of now. A rank that waits at one moment may wait for
    /// nobody at the next.
    Accounts {
        /// Its number.
        communicator: u64,
    },
    /// Summaries of all hosts of the cluster, on any of them.
    Cluster {
        /// Whether what is stuck is to be found out.
        stuck: bool,
    },
    /// All tenants.
    Tenants,
    /// Have a tenant until it is taken away, at a socket of its own. A second request for the same
    /// tenant finds it there.
    AddTenant {
        /// Its name, users, quotas and labels. Its socket is the service's choice.
        tenant: Box<TenantConfig>,
    },
    /// Take such a tenant away: its sessions end.
    RemoveTenant {
        /// Which.
        name: String,
    },
    /// Have another program of the service go on where this one stands, with all sessions.
    Upgrade {
        /// Which, where `service.binary` permits it to be named; as that says, if `None`. It reads the configuration anew.
        binary: Option<PathBuf>,
        /// Whether sessions end that cannot be handed over, or that the configuration has no room for.
        #[serde(default)]
        force: bool,
    },
    /// Ask the controller, on its host.
    Controller {
        /// The fault.
        request: ControllerRequest,
    },
    /// Do what the holder of a token has signed. Observers hand it on; the service judges.
    Act {
        /// The act.
        act: SignedAct,
    },
    /// Make a token, which ends with the service.
    AddToken {
        /// Which.
        token: TokenWanted,
    },
    /// All tokens, also of those that have ended the last ones.
    Tokens,
    /// Take a token back.
    RemoveToken {
        /// Its id.
        id: String,
    },
}

impl ControlRequest {
    /// Whether it changes nothing but what is recorded for whoever looks.
    #[must_use]
    pub fn only_looks(&self) -> bool {
        match self {
            ControlRequest::Sessions
            | ControlRequest::Communicators
            | ControlRequest::Joining
            | ControlRequest::Failed
            | ControlRequest::Engines
            | ControlRequest::Hosts
            | ControlRequest::Gpus
            | ControlRequest::Overview
            | ControlRequest::Tenants
            | ControlRequest::Trace { .. }
            | ControlRequest::TraceRings
            | ControlRequest::TraceRing { .. }
            | ControlRequest::WhyStuck { .. }
            | ControlRequest::Accounts { .. }
            | ControlRequest::Cluster { .. } => true,
            ControlRequest::Drain { drains, .. } => drains.is_none(),
            ControlRequest::Controller { request } => match request {
                ControllerRequest::Office
                | ControllerRequest::Show
                | ControllerRequest::History { .. }
                | ControllerRequest::Diff { .. } => true,
                ControllerRequest::Apply { .. } | ControllerRequest::Rollback | ControllerRequest::Link { .. } => false,
            },
            ControlRequest::AddTenant { .. }
            | ControlRequest::RemoveTenant { .. }
            | ControlRequest::ScaleTransports { .. }
            | ControlRequest::MoveEngine { .. }
            | ControlRequest::BindRuntime { .. }
            | ControlRequest::Reconfigure { .. }
            | ControlRequest::Unpin { .. }
            | ControlRequest::Upgrade { .. }
            | ControlRequest::Act { .. }
            | ControlRequest::AddToken { .. }
            | ControlRequest::RemoveToken { .. } => false,
            // Tokens' holders, and how often they have acted: nothing that observers need.
            ControlRequest::Tokens => false,
        }
    }
}

/// Answers of the service.
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
        /// Engines on them.
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
    /// To [`ControlRequest::Cluster`], where no controller is named, whose agents ask other hosts.
    NoController,
    /// To [`ControlRequest::Tenants`].
    Tenants(Vec<TenantRow>),
    /// To [`ControlRequest::AddTenant`].
    TenantAdded {
        /// Socket for its processes.
        socket: PathBuf,
    },
    /// To [`ControlRequest::RemoveTenant`] where there is none that was added.
    NoTenant,
    /// Not done, for a reason that is over in a moment.
    TryAgain(String),
    /// To [`ControlRequest::Upgrade`], when the other program is the service.
    Upgraded(UpgradeView),
    /// To [`ControlRequest::Controller`].
    Controller(Box<ControllerAnswer>),
    /// To [`ControlRequest::AddToken`].
    Token(TokenMade),
    /// To [`ControlRequest::Tokens`]; and to the act that asks for its own.
    Tokens(Vec<TokenView>),
    /// To [`ControlRequest::Act`] that is not begun.
    ActRefused(ActRefusal),
    /// Done.
    Done,
    /// Not done, and why.
    Refused(String),
}

/// The result of an upgrade.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UpgradeView {
    /// The process that is the service now.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// Sessions that go on.
    pub sessions: u64,
    /// Sessions that have ended: the log says why.
    pub ended: u64,
    /// Communicators that go on.
    pub communicators: u64,
    /// For how long neither program has served, in microseconds.
    pub gap_us: u64,
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
    /// The namespace.
    pub rings: Vec<RingView>,
}

#[cfg(test)]
mod tests {
    use mccs_config::limits::POLICY_BYTES_MAX;

    use super::*;

    #[test]
    fn a_request_has_room_for_the_longest_policy() {
        // Characters of a file take no more than these, and none of a file's name does.
        let (text, name) = ("\"\n".repeat(POLICY_BYTES_MAX.0 as usize / 2), "\\".repeat(4096));
        let request = ControlRequest::Controller { request: ControllerRequest::Apply { name, text } };
        assert!(serde_json::to_vec(&request).unwrap().len() <= REQUEST_BYTES_MAX);
    }
}
