//! `mccsctl flows` and `mccsctl links`: what flows and paths between hosts carry, and what became of their packets.

use std::path::Path;

use mccs_control::documents::{Document, overview};
use mccs_telemetry::flows::{FlowView, PathView};

use crate::show::over;
use crate::view::{lost, round_trip};

/// Every flow of this host: whose it is, how it leaves, what it has carried, and what became of its packets.
pub fn flows(socket: &Path, json: bool) -> anyhow::Result<()> {
    if json {
        say!("{}", Document::Flows.pretty(socket)?);
        return Ok(());
    }
    let overview = overview(socket)?;
    if overview.flows.is_empty() {
        say!("no flows to or from other hosts");
        return Ok(());
    }
    say!(
        "{:>6} {:>9} {:<14} {:<24} {:<28} {:>14} {:>10} {:>10} {:>10}",
        "comm",
        "channel",
        "ranks",
        "flow",
        "over",
        "bytes",
        "round trip",
        "sent again",
        "loss"
    );
    for flow in &overview.flows {
        let FlowView { name, bytes, wire, .. } = flow;
        let comm = overview.communicators.iter().find(|comm| comm.links == Some(name.links));
        let direction = if name.sends { "to" } else { "from" };
        say!(
            "{:>6} {:>9} {:<14} {:<24} {:<28} {bytes:>14} {:>10} {:>10} {:>10}",
            comm.map_or_else(|| "-".to_owned(), |comm| comm.communicator.to_string()),
            name.epoch.map_or_else(|| "send/recv".to_owned(), |_| name.channel.to_string()),
            format!("{} -> {}", name.from, name.to),
            format!("{direction} {}", name.peer),
            flow.route(),
            round_trip(wire),
            wire.retransmits,
            lost(wire)
        );
    }
    if overview.omitted.flows > 0 {
        say!("{} flows more", overview.omitted.flows);
    }
    Ok(())
}

/// Every path between this host and others, with all flows that it has carried.
pub fn links(socket: &Path, json: bool) -> anyhow::Result<()> {
    if json {
        say!("{}", Document::Links.pretty(socket)?);
        return Ok(());
    }
    let overview = overview(socket)?;
    if overview.paths.is_empty() {
        say!("nothing has gone to or come from other hosts");
        return Ok(());
    }
    say!(
        "{:<24} {:<32} {:>6} {:>16} {:>12} {:>10} {:>12} {:>10}",
        "host",
        "path",
        "flows",
        "bytes",
        "messages",
        "round trip",
        "sent again",
        "loss"
    );
    for PathView { peer, path, sends, flows, bytes, messages, wire, .. } in &overview.paths {
        let direction = if *sends { "to" } else { "from" };
        say!(
            "{:<24} {path:<32} {flows:>6} {bytes:>16} {messages:>12} {:>10} {:>12} {:>10}",
            format!("{direction} {peer}"),
            round_trip(wire),
            wire.retransmits,
            lost(wire)
        );
    }
    for comm in &overview.communicators {
        if let (Some(transport), Some(_)) = (comm.transport, &comm.transport_reason) {
            say!("communicator {} goes over {}", comm.communicator, over(transport, comm));
        }
    }
    Ok(())
}
