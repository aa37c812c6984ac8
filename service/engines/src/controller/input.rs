//! Inputs of the controller's engine: settings at its start, and messages while it runs.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use mccs_controller::inventory::Inventory;
use mccs_controller::messages::answer::ControllerRequest;
use mccs_controller::messages::message::Act;
use mccs_exchange::protocol::{Event, Name};

use super::store::StoreNews;
use crate::proxy::ReplyTo;

/// To the engine.
pub enum ControllerInput {
    /// A host was met or lost, or tells something.
    Exchange(Event),
    /// The operator asks.
    Request {
        /// The fault.
        request: ControllerRequest,
        /// User and command.
        by: String,
        /// To be answered.
        reply_to: ReplyTo,
    },
    /// The host with the office, as the store says.
    Store(StoreNews),
    /// An operator did something on this host.
    Acted(Act),
    /// An operator wants to know of all hosts.
    Cluster {
        /// Whether what is stuck is to be found out.
        stuck: bool,
        /// To be answered.
        reply_to: ReplyTo,
    },
}

/// The choice of the controller.
#[derive(Debug, Clone)]
pub enum ControllerChoice {
    /// This host.
    Host(Name),
    /// Whoever of these is elected.
    Elected {
        /// In order.
        candidates: Vec<Name>,
        /// The store; absent: by the votes of hosts.
        store: Option<Box<StoreSettings>>,
        /// How long a host's vote holds: as long as a link may be silent.
        vote_lease: Duration,
        /// When hosts that were not met are lost.
        host_timeout: Duration,
    },
}

/// A store, and which cluster's it is.
#[derive(Debug, Clone)]
pub struct StoreSettings {
    /// Its place.
    pub store: mccs_config::service::Store,
    /// Certificates of who signs hosts' certificates.
    pub authority: PathBuf,
}

/// Settings of the engine.
#[derive(Debug, Clone)]
pub struct ControllerSettings {
    /// This host.
    pub own: Name,
    /// The host that is obeyed.
    pub choice: ControllerChoice,
    /// All hosts.
    pub hosts: Vec<Name>,
    /// Addresses of hosts, and this host's address for flows, if it has one of its own: for probes of paths.
    pub addresses: (Vec<(Name, SocketAddr)>, Option<IpAddr>),
    /// The service's use of its host's GPUs and RDMA devices; nothing as long as nobody has looked for them. The engine looks for
    /// interfaces.
    pub inventory: Inventory,
    /// The operator's files, if this is the controller.
    pub files: Option<ControllerFiles>,
    /// File in which the controller keeps operators' overrides of links.
    pub links: Option<PathBuf>,
    /// File in which the controller keeps its history.
    pub history: Option<PathBuf>,
}

/// The operator's files.
#[derive(Debug, Clone)]
pub struct ControllerFiles {
    /// `topology.toml`.
    pub topology: PathBuf,
    /// `policy.toml`.
    pub policy: PathBuf,
}

impl ControllerSettings {
    /// Settings of a checked configuration.
    #[must_use]
    pub fn new(config: &mccs_config::ServiceConfig, controller: &mccs_config::service::Controller) -> Self {
        let name = |name: &str| Name::new(name).expect("invariant: a checked host's name is a DNS name");
        let may_be_here = controller.may_be(&config.name());
        let files = controller.topology.clone().zip(controller.policy.clone());
        ControllerSettings {
            own: name(&config.name()),
            choice: choice(config, controller, &name),
            hosts: config.hosts.iter().map(|host| name(&host.name)).collect(),
            addresses: (
                config.hosts.iter().map(|host| (name(&host.name), host.address.0)).collect(),
                config
                    .tcp
                    .address
                    .or(config.exchange.as_ref().map(|exchange| exchange.listen.0.ip()))
                    .filter(|address| !address.is_unspecified()),
            ),
            inventory: Inventory::default(),
            files: files.filter(|_| may_be_here).map(|(topology, policy)| ControllerFiles { topology, policy }),
            links: controller.links.clone().filter(|_| may_be_here),
            history: controller.history.clone().filter(|_| may_be_here),
        }
    }

    /// Whether this host has the controller role, or may be elected to.
    #[must_use]
    pub fn may_be_here(&self) -> bool {
        match &self.choice {
            ControllerChoice::Host(host) => self.own == *host,
            ControllerChoice::Elected { candidates, .. } => candidates.contains(&self.own),
        }
    }
}

/// Settings of a checked configuration.
fn choice(
    config: &mccs_config::ServiceConfig,
    controller: &mccs_config::service::Controller,
    name: &dyn Fn(&str) -> Name,
) -> ControllerChoice {
    let exchange = config.exchange.as_ref().expect("invariant: a checked controller has an exchange");
    match &controller.host {
        Some(host) => ControllerChoice::Host(name(host)),
        None => ControllerChoice::Elected {
            candidates: controller.hosts.iter().map(|host| name(host)).collect(),
            store: config
                .store
                .clone()
                .map(|store| Box::new(StoreSettings { store, authority: exchange.authority.clone() })),
            vote_lease: exchange.link_timeout.0,
            host_timeout: exchange.host_timeout.0,
        },
    }
}
