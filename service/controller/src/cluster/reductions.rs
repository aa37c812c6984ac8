//! How GPUs of several hosts reduce (with every host, or round a ring), as hosts were told.
//!
//! It is of communicators that begin from then on: what their ranks enqueue goes by it. Hosts that were told nothing go by their own
//! configuration, and a host that obeys a new life has forgotten what an earlier one said.

use std::collections::BTreeMap;

use mccs_model::{Name, Reductions};

use crate::cluster::hosts::Hosts;
use crate::config::cluster_config::ClusterConfig;
use crate::messages::message::ControllerMessage;
use crate::messages::outbox::Outbox;

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct ToldReductions(BTreeMap<Name, Reductions>);

impl ToldReductions {
    /// A host reports anew, and has been told nothing.
    pub(crate) fn forget(&mut self, host: &Name) {
        self.0.remove(host);
    }

    /// Tells hosts that report what is news to them.
    pub(crate) fn tell(&mut self, config: Option<&ClusterConfig>, hosts: &Hosts, outbox: &mut Outbox) {
        for host in hosts.synced() {
            let wanted = config.and_then(|config| config.reductions(host.as_str()));
            if self.0.get(host).copied() == wanted {
                continue;
            }
            match wanted {
                Some(wanted) => _ = self.0.insert(host.clone(), wanted),
                None => _ = self.0.remove(host),
            }
            let life = outbox.life();
            outbox.tell(host.clone(), ControllerMessage::Reductions { life, reductions: wanted });
        }
    }
}
