//! Inputs of the controller's engine: settings at its start, and messages while it runs.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use mccs_controller::inventory::Inventory;
use mccs_controller::messages::answer::ControllerRequest;
use mccs_controller::messages::message::Act;
use mccs_exchange::protocol::{Event, Name};

use crate::proxy::ReplyTo;

/// To the engine.
pub enum ControllerInput {
    /// A host was met or lost, or tells something.
    Exchange(Event),
    /// The operator asks.
    Request {
        /// What.
        request: ControllerRequest,
        /// User and command.
        by: String,
        /// To be answered.
        reply_to: ReplyTo,
    },
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

/// What the engine is told.
#[derive(Debug, Clone)]
pub struct ControllerSettings {
    /// This host.
    pub own: Name,
    /// The host that is obeyed.
    pub host: Name,
    /// All hosts.
    pub hosts: Vec<Name>,
    /// Where they are reached, and this host's address for flows, if it has one of its own: for probes of paths.
    pub addresses: (Vec<(Name, SocketAddr)>, Option<IpAddr>),
    /// What the service uses of its host's GPUs and RDMA devices; nothing as long as nobody has looked for them. The engine looks for interfaces.
    pub inventory: Inventory,
    /// `topology.toml` and `policy.toml`, where this is the controller.
    pub files: Option<(PathBuf, PathBuf)>,
    /// Where the controller keeps what operators have said of links.
    pub links: Option<PathBuf>,
    /// Where the controller keeps its history.
    pub history: Option<PathBuf>,
}

impl ControllerSettings {
    /// Of a checked configuration.
    #[must_use]
    pub fn new(config: &mccs_config::ServiceConfig, controller: &mccs_config::service::Controller) -> Self {
        let name = |name: &str| Name::new(name).expect("invariant: a checked host's name is a DNS name");
        let is_here = controller.host == config.name();
        let files = controller.topology.clone().zip(controller.policy.clone());
        ControllerSettings {
            own: name(&config.name()),
            host: name(&controller.host),
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
            files: files.filter(|_| is_here),
            links: controller.links.clone().filter(|_| is_here),
            history: controller.history.clone().filter(|_| is_here),
        }
    }

    /// Whether this host has the controller role.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.own == self.host
    }
}
