//! Changes among this host's communicators, as the registry has them, for the host's agent.

use std::collections::BTreeMap;
use std::sync::Arc;

use mccs_controller::agent::Live;
use mccs_exchange::protocol::{CommId, Name};
use mccs_registry::{CommInfo, Registry};
use mccs_telemetry::placed::PaceUse;

/// See the module's documentation.
pub(super) struct CommWatch {
    own: Name,
    registry: Arc<Registry>,
    seen_changes: Option<u64>,
    seen_bursts: u64,
    /// Communicators with ranks here.
    here: BTreeMap<CommId, Arc<PaceUse>>,
}

impl CommWatch {
    pub(super) fn new(own: Name, registry: Arc<Registry>) -> Self {
        CommWatch { own, registry, seen_changes: None, seen_bursts: 0, here: BTreeMap::new() }
    }

    /// Communicators with ranks here, as of the last look.
    pub(super) fn here(&self) -> &BTreeMap<CommId, Arc<PaceUse>> {
        &self.here
    }

    /// Communicators whose root is this host, if any communicator has changed.
    pub(super) fn look(&mut self) -> Option<Vec<Live>> {
        let changes = self.registry.comm_changes();
        if self.seen_changes.replace(changes) == Some(changes) {
            return None;
        }
        let comms = self.registry.comms();
        let placed = comms.iter().filter_map(|info| info.placed.as_ref());
        self.here = placed.map(|placed| (placed.comm.clone(), Arc::clone(&placed.pace_use))).collect();
        let live = |info: Arc<CommInfo>| {
            let placed = info.placed.as_ref().filter(|placed| placed.comm.root == self.own)?;
            Some(Live {
                comm: placed.comm.clone(),
                number: info.number,
                tenant: info.rules.clone(),
                hosts: placed.hosts.clone(),
                chosen: placed.chosen()?,
                profile: placed.profile(),
                is_pinned: placed.is_pinned(),
                began: placed.began()?,
            })
        };
        Some(comms.into_iter().filter_map(live).collect())
    }

    /// Whether communicators have foreseen bursts after the last call.
    pub(super) fn take_bursts(&mut self) -> bool {
        let bursts = self.registry.bursts();
        std::mem::replace(&mut self.seen_bursts, bursts) != bursts
    }

    /// Whether nothing has changed after the last look.
    pub(super) fn is_up_to_date(&self) -> bool {
        self.seen_changes == Some(self.registry.comm_changes()) && self.seen_bursts == self.registry.bursts()
    }
}
