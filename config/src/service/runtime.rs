//! `[runtime]` of `service.toml`: transport engines, spinning, placement of engines on threads, CPU affinity.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::cpus::CpuChoice;
use crate::limits;
use crate::units::DurationText;
use crate::validate::Problems;

/// How the names of transport engines' threads begin; their number follows.
pub const MOVER_THREAD: &str = "mccs-move-";

/// `[runtime]`: threads and engines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Runtime {
    /// Transport engines at the start. Absent: one for each core of the host that the service runs on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transport_engines: Option<u32>,
    /// How long a runtime with nothing to do spins before it parks.
    pub spin: DurationText,
    /// The same for what has flows to other hosts, or work that a GPU is to come to. Absent: a millisecond on a host of eight
    /// cores or more, else as `spin`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spin_while_waiting: Option<DurationText>,
    /// How long a tenant's process that waits for an operation spins before it sleeps.
    pub tenant_spin: DurationText,
    /// Which engines share a thread.
    pub placement: Placement,
    /// CPUs of threads that `cpus` does not name.
    pub affinity: Affinity,
    /// CPUs of threads, by name as `mccsctl engines` shows it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub cpus: BTreeMap<String, CpuChoice>,
}

impl Default for Runtime {
    fn default() -> Self {
        Runtime {
            transport_engines: None,
            spin: DurationText::micros(100),
            spin_while_waiting: None,
            tenant_spin: DurationText::micros(100),
            placement: Placement::Shared,
            affinity: Affinity::Numa,
            cpus: BTreeMap::new(),
        }
    }
}

/// How CPUs are chosen for threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Affinity {
    /// On a host of several NUMA nodes: on that of the NICs, or GPUs, that they work for. Elsewhere anywhere.
    Numa,
    /// Anywhere.
    None,
}

impl Runtime {
    /// Names of threads without a number. Those of transport engines are [`MOVER_THREAD`] and the engine's number.
    const THREADS: [&'static str; 5] = ["mccs-main", "mccs-control", "mccs-proxy", "mccs-exchange", "mccs-controller"];

    pub(super) fn validate(&self, problems: &mut Problems) {
        if let Some(engines) = self.transport_engines {
            problems.within("runtime.transport_engines", &engines, &limits::TRANSPORT_ENGINES);
        }
        problems.within("runtime.spin", &self.spin, &limits::SPIN);
        if let Some(spin) = &self.spin_while_waiting {
            problems.within("runtime.spin_while_waiting", spin, &limits::SPIN);
        }
        problems.within("runtime.tenant_spin", &self.tenant_spin, &limits::SPIN);
        for name in self.cpus.keys() {
            let mover = name.strip_prefix(MOVER_THREAD).and_then(|number| number.parse::<u32>().ok());
            let is_mover = mover.is_some_and(|number| number < limits::TRANSPORT_ENGINES.max);
            if !is_mover && !Self::THREADS.contains(&name.as_str()) {
                let known = Self::THREADS.join(", ");
                problems.add(
                    format!("runtime.cpus.{name}"),
                    format!(
                        "is no thread of the service; there are {known}, and {MOVER_THREAD}N for transport engine N"
                    ),
                );
            }
            let is_on_main = mover == Some(0) || ["mccs-proxy", "mccs-exchange"].contains(&name.as_str());
            if is_on_main && self.placement == Placement::Shared {
                let problem = "its engine is on mccs-main; name that, or set runtime.placement = \"dedicated\"";
                problems.add(format!("runtime.cpus.{name}"), problem);
            }
        }
    }
}

/// Which engines share a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// The daemon engines and the proxy share runtimes with transport engines; few threads.
    Shared,
    /// A runtime for the daemon engines, one for the proxy, one for each transport engine.
    Dedicated,
}
