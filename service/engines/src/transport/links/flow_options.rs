//! Flow options of links, by the transport and the path that their strategy names.

use std::collections::BTreeMap;
use std::sync::Arc;

use mccs_config::service::TransportKind;
use mccs_model::Name;
use mccs_model::link::{LinkKey, LinksId};
use mccs_telemetry::flows::{FlowName, path_name};
use mccs_transport::{FlowOptions, FlowPath, FlowSpec, TransportError};

use super::MESSAGE_BYTES;
use super::paths::{PathAssignment, Peers, detours};

/// Options with which flows begin, whatever their path.
pub(super) struct FlowDefaults {
    pub(super) any: FlowOptions,
    /// Over each transport, where strategies say over which.
    pub(super) by_transport: BTreeMap<TransportKind, FlowOptions>,
}

impl FlowDefaults {
    /// Those of a strategy.
    pub(super) fn of(&self, transport: Option<TransportKind>) -> Result<&FlowOptions, TransportError> {
        let Some(kind) = transport else { return Ok(&self.any) };
        let none = || TransportError::NoTransport { host: "this host".into(), kind };
        self.by_transport.get(&kind).ok_or_else(none)
    }
}

/// Options with which a link begins on the path of its strategy.
pub(super) fn with_path_of(
    begin: &FlowOptions,
    peers: &Peers,
    link: LinkKey,
    assignment: &Arc<PathAssignment>,
) -> FlowOptions {
    let path = peers.path(link, assignment);
    let mut options = path.map_or_else(|| begin.clone(), |path| begin.on(path));
    options.home = peers.home_of_sends(link, assignment).cloned();
    // A message that was to go whole still does, however long messages are here.
    if options.transport == Some(TransportKind::Rdma) && u64::from(options.chunk_bytes) >= MESSAGE_BYTES {
        options.chunk_bytes = options.chunk_bytes.max(peers.message_bytes_of(link) as u32);
    }
    FlowOptions { share: peers.share, detours: detours(begin, path, [assignment, &peers.assignment]), ..options }
}

pub(super) fn spec(link: LinkKey, peer: u32, host: &Name, options: &FlowOptions) -> FlowSpec {
    FlowSpec { number: link.flow_number(), peer: format!("rank {peer} on {host}"), options: options.clone() }
}

/// A flow's name for the operator.
pub(super) fn flow_name(
    id: LinksId,
    link: LinkKey,
    sends: bool,
    peer: &Name,
    transport: Option<TransportKind>,
    path: Option<&FlowPath>,
) -> FlowName {
    FlowName {
        links: id.0,
        epoch: link.track().is_none().then_some(link.epoch),
        channel: link.channel,
        from: link.src,
        to: link.dst,
        sends,
        peer: peer.to_string(),
        transport,
        path: path_name(path),
    }
}
