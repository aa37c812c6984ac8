//! Inventory of a host, as its agent tells it: GPUs, network interfaces, ports of RDMA devices,
//! tenants.
//!
//! A controller compares topologies with it (`mccs_config::topology`), and refuses those that name what is not there. Tenants may come
//! later: policies that name others are put in force, and the operator is told.

use mccs_config::service::Device;
use mccs_config::topology::ActualHost;
use serde::{Deserialize, Serialize};

/// Interfaces that are told of. A host with more, such as one of many containers, has not said which it has.
pub const INTERFACES_MAX: usize = 1024;

/// Tenants that are told of. A host with more has not said which it has.
pub const TENANTS_MAX: usize = 256;

/// Network interfaces of a host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Interfaces {
    /// Names of all, as a topology may call them.
    pub all: Vec<String>,
    /// Places there of those that carry nothing: they are down, or lack a carrier.
    pub down: Vec<u16>,
}

impl Interfaces {
    /// Those that carry nothing.
    pub fn names_down(&self) -> impl Iterator<Item = &str> {
        self.down.iter().filter_map(|place| self.all.get(usize::from(*place)).map(String::as_str))
    }
}

/// See the module's documentation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inventory {
    /// GPUs that its service uses.
    pub gpus: u32,
    /// Its network interfaces. `None` where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interfaces: Option<Interfaces>,
    /// Ports of RDMA devices that its service uses. `None` where it uses none: what a topology calls them is then nobody's affair.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rdma_ports: Option<Vec<Device>>,
    /// Tenants of `policy.toml` whose rules hold for those that its service is configured with. `None` where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenants: Option<Vec<String>>,
}

impl Inventory {
    /// Beside the name of its host, as topologies are compared with it.
    #[must_use]
    pub fn of<'a>(&'a self, name: &'a str) -> ActualHost<'a> {
        ActualHost {
            name,
            // Host memory has as many devices as the topology says.
            gpus: Some(self.gpus).filter(|gpus| *gpus > 0),
            interfaces: self.interfaces.as_ref().map(|interfaces| &*interfaces.all),
            rdma_ports: self.rdma_ports.as_deref(),
        }
    }

    /// Whether it can be a host's.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        let can_be = |there: &Interfaces| {
            let most = there.all.len().max(there.down.len());
            most <= INTERFACES_MAX && there.all.iter().all(|name| is_name(name))
        };
        if !self.interfaces.iter().all(can_be) {
            return Err("it has interfaces that have no names, or too many");
        }
        if self.tenants.iter().any(|tenants| tenants.len() > TENANTS_MAX) {
            return Err("it has too many tenants to tell of");
        }
        Ok(())
    }
}

/// Whether a topology could call an interface so.
#[must_use]
pub fn is_name(interface: &str) -> bool {
    interface.parse::<Device>().is_ok()
}
