//! `mccsctl reconfigure`.

use std::path::PathBuf;

use anyhow::Context as _;
use mccs_config::change::StrategyChange;
use mccs_config::service::{FlowPath, Ports, TransportKind};
use mccs_service::control::ControlRequest;

#[derive(clap::Args)]
pub struct Reconfigure {
    /// Number of the communicator, as `communicators` shows it on the host that is asked; any with its ranks.
    communicator: u64,
    /// File with the change; see config/examples/change.toml. Options below come on top.
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// How collectives are carried out: auto, ring, tree, host_ring, host_tree, one_shot or direct.
    #[arg(long)]
    algorithm: Option<String>,
    /// So many channels, with rings as a new communicator has them.
    #[arg(long, conflicts_with = "ring")]
    channels: Option<u32>,
    /// Order of ranks of a channel's ring, such as 0,2,1,3; once for each channel.
    #[arg(long, value_name = "RANK,...")]
    ring: Vec<String>,
    /// What carries flows to other hosts: tcp, or rdma where all of its hosts have it.
    #[arg(long)]
    transport: Option<TransportKind>,
    /// Source ports of a way through the network, such as 21000-21999; once for each.
    #[arg(long, value_name = "PORTS")]
    path: Vec<Ports>,
    /// Collectives that may start while hosts agree; chosen by their length, if not given.
    #[arg(long)]
    window: Option<u32>,
    /// Change nothing, but let the controller decide for it again.
    #[arg(long, conflicts_with_all = ["file", "algorithm", "channels", "ring", "transport", "path", "window"])]
    unpin: bool,
}

impl Reconfigure {
    /// What the service is asked for.
    pub fn request(&self) -> anyhow::Result<ControlRequest> {
        if self.unpin {
            return Ok(ControlRequest::Unpin { communicator: self.communicator });
        }
        let mut change = self.file.as_deref().map(StrategyChange::load).transpose()?.unwrap_or_default();
        if let Some(name) = &self.algorithm {
            let text = format!("algorithm = {name:?}");
            change.algorithm = StrategyChange::parse(&text, "--algorithm")?.algorithm;
        }
        if self.channels.is_some() {
            (change.channels, change.rings) = (self.channels, None);
        }
        if !self.ring.is_empty() {
            let ring = |text: &String| text.split(',').map(|rank| rank.trim().parse()).collect::<Result<Vec<u32>, _>>();
            let rings = self.ring.iter().map(|text| ring(text).with_context(|| format!("--ring {text}")));
            (change.rings, change.channels) = (Some(rings.collect::<anyhow::Result<_>>()?), None);
        }
        change.transport = self.transport.or(change.transport);
        if !self.path.is_empty() {
            let path = |ports: &Ports| FlowPath { source_ports: Some(*ports), ..FlowPath::default() };
            change.paths = Some(self.path.iter().map(path).collect());
        }
        anyhow::ensure!(!change.is_empty(), "nothing is to change: see --help");
        Ok(ControlRequest::Reconfigure { communicator: self.communicator, change, window: self.window })
    }
}
