//! Common ground of all parts of a service: settings, runtimes, the registry.

use std::sync::Arc;
use std::time::Instant;

use mccs_control::overview::MemoryView;
use mccs_engines::proxy::Timeouts;
use mccs_engines::transport::path_events::PathEventLog;
use mccs_handover::Handover;
use mccs_registry::{Overseer, Registry};
use mccs_runtime::{RuntimeOptions, Runtimes};
use mccs_tenants::AllSessions;

use super::sizes::Spin;
use crate::settings::{Placement, Settings};

/// Items an engine handles in one poll: bounds how long the others of its runtime wait.
const POLL_BUDGET: usize = 64;

/// See the module's documentation.
pub(super) struct Base<'a> {
    pub(super) settings: &'a Settings,
    pub(super) runtimes: Arc<Runtimes>,
    pub(super) registry: Arc<Registry>,
    /// How many sessions there may be of all tenants.
    pub(super) all_sessions: Arc<AllSessions>,
    pub(super) handover: Arc<Handover>,
    /// News of flows about their paths, for the controller.
    pub(super) path_events: Arc<PathEventLog>,
    /// Runtime of sessions; if all engines share one, of every engine that is not patient.
    pub(super) main: u32,
    /// Runtime of listening sockets, and of operators' requests.
    pub(super) control: u32,
    /// Runtime of proxy engines.
    pub(super) proxy: u32,
}

impl<'a> Base<'a> {
    pub(super) fn start(settings: &'a Settings, handover: Arc<Handover>) -> anyhow::Result<Self> {
        let Spin { idle: spin, while_waiting: spin_while_waiting } = Spin::of(settings);
        let runtimes = Runtimes::new(RuntimeOptions { spin, spin_while_waiting, budget: POLL_BUDGET });
        let main = runtimes.start_runtime("mccs-main")?;
        let control = runtimes.start_patient_runtime("mccs-control")?;
        let mut base = Base {
            settings,
            runtimes,
            registry: Arc::new(Registry::default()),
            all_sessions: AllSessions::of_process(settings.max_sessions)?,
            handover,
            path_events: Arc::default(),
            main,
            control,
            proxy: main,
        };
        base.proxy = base.runtime_of("mccs-proxy")?;
        Ok(base)
    }

    /// A runtime for an engine, of its own where the operator wants that.
    pub(super) fn runtime_of(&self, name: &str) -> anyhow::Result<u32> {
        Ok(match self.settings.placement {
            Placement::Shared => self.main,
            Placement::Dedicated => self.runtimes.start_runtime(name)?,
        })
    }

    pub(super) fn overseer(&self) -> Overseer {
        Overseer {
            host: self.settings.name.clone(),
            since: Instant::now(),
            registry: Arc::clone(&self.registry),
            runtimes: Arc::clone(&self.runtimes),
            all_sessions: Arc::clone(&self.all_sessions),
        }
    }

    /// Tells the most memory that the service can come to hold.
    pub(super) fn tell_memory(&self) {
        let memory = self.overseer().memory();
        if memory.is_too_much() {
            tracing::warn!("{memory}: {}", MemoryView::ADVICE);
        } else {
            tracing::info!("{memory}");
        }
    }

    pub(super) fn timeouts(&self) -> Timeouts {
        Timeouts { init: self.settings.init_timeout, operation: self.settings.operation_timeout }
    }

    /// PCI addresses of the service's GPUs.
    pub(super) fn bus_ids(&self) -> Vec<String> {
        self.registry.gpus().iter().map(|gpu| gpu.pci_bus_id.clone()).collect()
    }
}
