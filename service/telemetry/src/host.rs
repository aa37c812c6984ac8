//! Hosts as operators see them: state, GPUs, clocks.

use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::Instant;

use mccs_model::NicPath;

/// A host of the cluster as the operator sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostInfo {
    /// Its name.
    pub name: String,
    /// Address for other services.
    pub address: SocketAddr,
    /// Whether it is this host.
    pub is_own: bool,
    /// Whether its service can be reached.
    pub is_up: bool,
    /// Since when.
    pub since: Instant,
    /// Its last trouble.
    pub last_error: Option<String>,
}

/// A GPU of the service's as the operator sees it.
#[derive(Debug)]
pub struct GpuInfo {
    /// Its UUID, as `nvidia-smi -L` prints it.
    pub id: String,
    /// Product.
    pub name: String,
    /// PCI address.
    pub pci_bus_id: String,
    /// In words, whose memory it does not reach, as was tried at start.
    pub unreached: Vec<String>,
    /// Why it is of no use to the service any more, if it is not.
    pub lost: OnceLock<String>,
    /// NICs that its flows to other hosts leave by, nearest first.
    pub nics: OnceLock<Vec<String>>,
    /// How NICs reach its memory, as was tried at start.
    pub nic_path: OnceLock<NicPath>,
}

impl GpuInfo {
    /// One that works.
    #[must_use]
    pub fn new(id: String, name: String, pci_bus_id: String) -> Self {
        let (lost, nics, nic_path) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        GpuInfo { id, name, pci_bus_id, unreached: Vec::new(), lost, nics, nic_path }
    }
}

/// The cluster's common clock, as a host knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommonTime {
    /// Its time.
    pub common_ns: u64,
    /// By how much that may be wrong.
    pub error_ns: u64,
}
