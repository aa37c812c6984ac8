//! A controller's knowledge of a communicator over hosts: ranks' places, last strategy, use of its
//! rate. The proxy engine writes it when a communicator begins, changes or fails; the agent reads
//! it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use mccs_config::change::FlowChoice;
use mccs_config::service::{AlgorithmChoice, FlowPath, TransportKind};
use serde::{Deserialize, Serialize};

use super::profile::{Burst, Measured};
use mccs_model::CommId;

/// Ranks of one host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostRanks {
    /// The host.
    pub host: String,
    /// Its ranks, ascending.
    pub ranks: Vec<u32>,
    /// The GPU of each of them, as its service counts them; none where ranks are in host memory, which has no devices of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<u32>,
}

/// A strategy, in the words of a change.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chosen {
    /// Its number.
    pub epoch: u64,
    /// Order of ranks of each channel's ring.
    pub rings: Vec<Vec<u32>>,
    /// How its collectives are carried out.
    pub algorithm: AlgorithmChoice,
    /// Transport of its flows, if hosts have a choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<TransportKind>,
    /// Ways through the network.
    pub paths: Vec<FlowPath>,
    /// Flows that go another way than their channel, by channel and hosts.
    pub flows: Vec<FlowChoice>,
}

/// The part of a communicator's first strategy that comes back if a policy does not say otherwise, whatever was in force
/// meanwhile.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Began {
    /// Channels.
    pub channels: u32,
    /// How its collectives were carried out.
    pub algorithm: AlgorithmChoice,
    /// Transport of its flows, if hosts have a choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<TransportKind>,
}

impl From<&Chosen> for Began {
    fn from(first: &Chosen) -> Self {
        // Without rings there is one channel, in rank order.
        let channels = (first.rings.len() as u32).max(1);
        Began { channels, algorithm: first.algorithm, transport: first.transport }
    }
}

/// A controller's allotment to a communicator's flows on this host: for people, engines are told rates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allotment {
    /// The weight by which its tenant shares contended links with others, in thousandths; where tenants do.
    pub weight_milli: Option<u64>,
    /// Most bits of payload per second that each of its flows sends, if its tenant has a cap.
    pub flow_cap_bps: Option<u64>,
    /// Most bits of payload per second that all its tenant's flows together send out of this host, if there is such a cap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_cap_bps: Option<u64>,
    /// Bits of payload per second that its flows from this host are allotted together, where links are shared.
    pub allotted_bps: Option<u64>,
}

/// Use of their pace by a communicator's flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PaceTotals {
    /// Payload that has left.
    pub bits: u64,
    /// How often something had to wait.
    pub held: u64,
}

/// Use of their pace by a communicator's flows on this host, since they began, and what is foreseen of them. Engines add; who looks takes
/// differences.
#[derive(Debug, Default)]
pub struct PaceUse {
    bits: AtomicU64,
    held: AtomicU64,
    is_watched: AtomicBool,
    burst: Mutex<Option<Burst>>,
    allotment: Mutex<Option<Allotment>>,
}

impl PaceUse {
    /// A message has left.
    pub fn sent(&self, bytes: u64) {
        self.bits.fetch_add(bytes * 8, Ordering::Relaxed);
    }

    /// A message had to wait.
    pub fn held(&self) {
        self.held.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether others make room for its bursts.
    #[must_use]
    pub fn is_watched(&self) -> bool {
        self.is_watched.load(Ordering::Relaxed)
    }

    /// From now on others make room for its bursts, or no longer.
    pub fn watch(&self, is_watched: bool) {
        self.is_watched.store(is_watched, Ordering::Relaxed);
    }

    /// Sets their allotment from now on.
    pub fn allot(&self, allotment: Option<Allotment>) {
        *self.allotment.lock().unwrap_or_else(PoisonError::into_inner) = allotment;
    }

    /// Their allotment, if a controller has said anything of it.
    #[must_use]
    pub fn allotment(&self) -> Option<Allotment> {
        *self.allotment.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its next burst is foreseen.
    pub fn foresee(&self, burst: Burst) {
        *self.burst.lock().unwrap_or_else(PoisonError::into_inner) = Some(burst);
    }

    /// The last burst that was foreseen and not taken.
    #[must_use]
    pub fn take_burst(&self) -> Option<Burst> {
        self.burst.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Since the communicator began.
    #[must_use]
    pub fn totals(&self) -> PaceTotals {
        PaceTotals { bits: self.bits.load(Ordering::Relaxed), held: self.held.load(Ordering::Relaxed) }
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Placed {
    /// All hosts' name for it.
    pub comm: CommId,
    /// Places of ranks.
    pub hosts: Vec<HostRanks>,
    /// See there.
    pub pace_use: Arc<PaceUse>,
    chosen: Mutex<Option<Arc<Chosen>>>,
    profile: Mutex<Option<Measured>>,
    is_pinned: AtomicBool,
    began: OnceLock<Began>,
}

impl Placed {
    /// A communicator that is about to begin.
    #[must_use]
    pub fn new(comm: CommId, hosts: Vec<HostRanks>) -> Self {
        let (chosen, profile, is_pinned) = (Mutex::new(None), Mutex::new(None), AtomicBool::new(false));
        Placed { comm, hosts, pace_use: Arc::default(), chosen, profile, is_pinned, began: OnceLock::new() }
    }

    /// Whether the operator has chosen its strategy by hand, and means it to stay. Known where the root is.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.is_pinned.load(Ordering::Acquire)
    }

    /// Its strategy is to stay, or no longer. Returns whether that is news.
    pub fn pin(&self, is_pinned: bool) -> bool {
        self.is_pinned.swap(is_pinned, Ordering::AcqRel) != is_pinned
    }

    /// The strategy that was decided last, in force from its first collective on; `None` once the communicator has failed.
    #[must_use]
    pub fn chosen(&self) -> Option<Arc<Chosen>> {
        self.chosen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How it uses the network over time, if that is known.
    #[must_use]
    pub fn profile(&self) -> Option<Measured> {
        *self.profile.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It uses the network otherwise.
    pub fn set_profile(&self, profile: Option<Measured>) {
        *self.profile.lock().unwrap_or_else(PoisonError::into_inner) = profile;
    }

    /// The part of its first strategy that comes back; `None` before it has one.
    #[must_use]
    pub fn began(&self) -> Option<Began> {
        self.began.get().copied()
    }

    /// Another strategy was decided, or the communicator has failed.
    pub fn set_chosen(&self, chosen: Option<Chosen>) {
        if let Some(first) = &chosen {
            self.began.get_or_init(|| Began::from(first));
        }
        *self.chosen.lock().unwrap_or_else(PoisonError::into_inner) = chosen.map(Arc::new);
    }
}
