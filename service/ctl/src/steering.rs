//! `mccsctl steering`: whether the network steers packets over spines as `topology.toml` says. It
//! asks no service.
//!
//! Packets as flows send them go to a host of each other rack, with source ports of each spine, and die on the way. The routers that
//! say so tell which way they went. Packets of one spine have to go one way, and those of two spines two.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use anyhow::{Context as _, ensure};
use clap::Args;
use mccs_config::service::{Ports, ServiceConfig};
use mccs_config::topology::{Host, Spine, TopologyFile};
use mccs_net::hops::{Hops, Steering, hops};
use serde::Serialize;

/// Ports of a range that are tried when one is in use.
const PORTS_TRIED: u16 = 8;

/// Check that the network steers packets over spines as topology.toml says. Asks no service; fails if
/// it does not.
#[derive(Args)]
pub struct SteeringCommand {
    /// This host's service.toml: its name, and the addresses of the others.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// The wanted network.
    #[arg(long, value_name = "FILE")]
    topology: PathBuf,
    /// Hosts to send to. Default: one of each other rack.
    #[arg(long, value_delimiter = ',', value_name = "HOST,...")]
    to: Vec<String>,
    /// Address to send from, on hosts with several NICs. Default: tcp.address or that of
    /// exchange.listen.
    #[arg(long, value_name = "ADDRESS")]
    from: Option<IpAddr>,
}

/// Ways of packets with a source port or code point of a spine.
#[derive(Debug, Clone, Serialize)]
struct Trace {
    spine: String,
    to: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dscp: Option<u8>,
    /// None where a router says nothing.
    routers: Vec<Option<IpAddr>>,
    is_reached: bool,
}

impl Trace {
    /// By what it was steered.
    fn by(&self) -> String {
        let port = self.port.map(|port| format!("port {port}"));
        let dscp = self.dscp.map(|dscp| format!("dscp {dscp}"));
        [port, dscp].into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    fn way(&self) -> String {
        let name = |router: &Option<IpAddr>| router.map_or_else(|| "?".to_owned(), |router| router.to_string());
        let routers: Vec<_> = self.routers.iter().map(name).collect();
        if routers.is_empty() { "no router".to_owned() } else { routers.join(" > ") }
    }

    /// The router half-way: a rack's packets go up as many hops as they go down. Others may answer with any address of theirs, as
    /// several ways lead back from them.
    fn middle(&self) -> Option<IpAddr> {
        self.routers.get(self.routers.len().checked_sub(1)? / 2).copied().flatten()
    }

    /// Whether the other one went another way; none if nobody can tell.
    fn differs(&self, other: &Trace) -> Option<bool> {
        if self.routers.len() != other.routers.len() {
            return Some(true);
        }
        Some(self.middle()? != other.middle()?)
    }
}

/// Deviations from the topology, and questions that stay open. Empty: all is well.
fn findings(traces: &[Trace]) -> Vec<String> {
    let mut found = Vec::new();
    for (at, one) in traces.iter().enumerate() {
        if !one.is_reached {
            found.push(format!("{} does not answer {} ({})", one.to, one.by(), one.spine));
            continue;
        }
        for other in traces[..at].iter().filter(|other| other.to == one.to && other.is_reached) {
            let both = || format!("{} ({}) and {} ({})", other.by(), other.spine, one.by(), one.spine);
            match (one.spine == other.spine, one.differs(other)) {
                (true, Some(true)) => found.push(format!(
                    "{} is spread: to {}, {} goes by {}, and {} by {}",
                    one.spine,
                    one.to,
                    other.by(),
                    other.way(),
                    one.by(),
                    one.way()
                )),
                (false, Some(false)) => {
                    found.push(format!("{} go the same way to {}: by {}", both(), one.to, one.way()));
                }
                (false, None) => found.push(format!(
                    "nobody can tell whether {} go two ways to {}: routers say nothing ({}; {})",
                    both(),
                    one.to,
                    other.way(),
                    one.way()
                )),
                _ => {}
            }
        }
    }
    found
}

fn leaves(host: &Host) -> BTreeSet<&str> {
    host.leaf.as_deref().into_iter().chain(host.nics.iter().map(|nic| nic.leaf.as_str())).collect()
}

/// The hosts that are named, or one of each rack that this host is not in.
fn receivers<'a>(topology: &'a TopologyFile, own: &str, named: &'a [String]) -> anyhow::Result<Vec<&'a str>> {
    if !named.is_empty() {
        return Ok(named.iter().map(String::as_str).collect());
    }
    let here = topology.hosts.iter().find(|host| host.name == own);
    let mut seen = leaves(here.with_context(|| format!("the topology has no host {own:?}, which is this one"))?);
    let mut to = Vec::new();
    for host in &topology.hosts {
        let of = leaves(host);
        if of.is_disjoint(&seen) {
            to.push(host.name.as_str());
            seen.extend(of);
        }
    }
    ensure!(!to.is_empty(), "all hosts are in the rack of {own}: no packet goes over a spine");
    Ok(to)
}

/// The first and the last port of a range, each with others beside it for where it is in use.
fn tried(ports: Option<Ports>) -> Vec<Vec<Option<u16>>> {
    let Some(Ports { first, last }) = ports else { return vec![vec![None]] };
    let some = |ports: &mut dyn Iterator<Item = u16>| ports.take(PORTS_TRIED.into()).map(Some).collect::<Vec<_>>();
    let upper = some(&mut (first..=last).rev());
    if first == last { vec![upper] } else { vec![some(&mut (first..=last)), upper] }
}

fn trace(spine: &Spine, host: &str, to: SocketAddr, from: IpAddr, ports: &[Option<u16>]) -> anyhow::Result<Trace> {
    let dscp = spine.dscp.and_then(|dscp| u8::try_from(dscp).ok());
    let mut refused = None;
    for port in ports {
        match hops(to, Steering { address: Some(from), port: *port, dscp }) {
            Ok(Hops { routers, is_reached }) => {
                let (spine, to) = (spine.name.clone(), host.to_owned());
                return Ok(Trace { spine, to, port: *port, dscp, routers, is_reached });
            }
            Err(errno) => refused = Some(errno),
        }
    }
    let reason = refused.map_or_else(|| "no port".to_owned(), |errno| errno.to_string());
    anyhow::bail!("nothing can be sent from {from} with ports of {}: {reason}", spine.name)
}

impl SteeringCommand {
    pub fn run(&self, json: bool) -> anyhow::Result<()> {
        let (config, topology) = (ServiceConfig::load(&self.config)?, TopologyFile::load(&self.topology)?);
        let steered: Vec<_> =
            topology.spines.iter().filter(|spine| spine.source_ports.is_some() || spine.dscp.is_some()).collect();
        ensure!(steered.len() > 1, "the topology steers to {} spines: there is nothing to tell apart", steered.len());
        let listens = config.exchange.as_ref().map(|exchange| exchange.listen.0.ip());
        let from = self.from.or(config.tcp.address).or(listens);
        let from = from.context("name the address to send from: --from, as service.toml has no [exchange]")?;
        let mut traces = Vec::new();
        for name in receivers(&topology, &config.name(), &self.to)? {
            let entry = config.hosts.iter().find(|host| host.name == name);
            let entry = entry.with_context(|| format!("{} has no host {name:?}", self.config.display()))?;
            for spine in &steered {
                for ports in tried(spine.source_ports) {
                    traces.push(trace(spine, name, entry.address.0, from, &ports)?);
                }
            }
        }
        let found = findings(&traces);
        if json {
            say!("{}", serde_json::to_string_pretty(&serde_json::json!({ "traces": traces, "findings": found }))?);
        } else {
            print(&traces, &found);
        }
        ensure!(found.is_empty(), "the network does not steer as {} says", self.topology.display());
        Ok(())
    }
}

fn print(traces: &[Trace], found: &[String]) {
    say!("{:<14} {:<14} {:<20} routers", "to", "spine", "by");
    for trace in traces {
        let end = if trace.is_reached { "" } else { " > no answer" };
        say!("{:<14} {:<14} {:<20} {}{end}", trace.to, trace.spine, trace.by(), trace.way());
    }
    found.iter().for_each(|finding| say!("! {finding}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(spine: &str, port: u16, routers: &[u8]) -> Trace {
        // Router 0 says nothing.
        let router = |last: &u8| (*last > 0).then(|| IpAddr::from([10, 0, 0, *last]));
        let routers = routers.iter().map(router).collect();
        Trace { spine: spine.into(), to: "host-c".into(), port: Some(port), dscp: None, routers, is_reached: true }
    }

    fn only(traces: &[Trace], words: &str) {
        let found = findings(traces);
        assert!(found.len() == 1 && found[0].contains(words), "{found:?}");
    }

    #[test]
    fn one_way_a_spine_and_two_ways_for_two_are_right_also_where_some_routers_say_nothing() {
        let right = [trace("a", 1, &[1, 2, 4]), trace("a", 9, &[1, 2, 4]), trace("b", 10, &[1, 3, 4])];
        assert_eq!(findings(&right), [""; 0]);
        let silent = [trace("a", 1, &[0, 2, 4]), trace("a", 9, &[1, 2, 0]), trace("b", 10, &[0, 3, 0])];
        assert_eq!(findings(&silent), [""; 0]);
        let named_otherwise = [trace("a", 1, &[1, 2, 4]), trace("a", 9, &[1, 2, 5]), trace("b", 10, &[1, 3, 5])];
        assert_eq!(findings(&named_otherwise), [""; 0]);
    }

    #[test]
    fn what_is_not_steered_is_told_and_so_is_what_nobody_knows() {
        only(
            &[trace("a", 1, &[1, 2, 4]), trace("b", 10, &[1, 2, 4])],
            "port 1 (a) and port 10 (b) go the same way to host-c",
        );
        only(
            &[trace("a", 1, &[1, 2, 4]), trace("a", 9, &[1, 3, 4])],
            "a is spread: to host-c, port 1 goes by 10.0.0.1 > 10.0.0.2",
        );
        only(&[trace("a", 1, &[1, 0, 4]), trace("b", 10, &[1, 3, 4])], "nobody can tell");
        only(&[trace("a", 1, &[]), trace("b", 10, &[])], "nobody can tell");
        let lost = Trace { is_reached: false, ..trace("a", 1, &[1]) };
        only(&[lost, trace("b", 10, &[1, 3])], "host-c does not answer port 1 (a)");
    }

    #[test]
    fn a_host_of_each_other_rack_is_sent_to() {
        let text = include_str!("../../../config/examples/topology.toml");
        let topology = TopologyFile::parse(text, "topology.toml").expect("the example");
        assert_eq!(receivers(&topology, "host-a", &[]).expect("hosts"), ["host-c"]);
        assert_eq!(receivers(&topology, "host-d", &[]).expect("hosts"), ["host-a"]);
        assert!(receivers(&topology, "host-x", &[]).is_err_and(|error| error.to_string().contains("host-x")));
        let ends: Vec<_> = tried(topology.spines[0].source_ports).iter().map(|ports| ports[0]).collect();
        assert_eq!(ends, [Some(50000), Some(50499)]);
    }
}
