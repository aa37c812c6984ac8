//! Checks a fabric by real flows: reachability, rates, spines by path, ECMP.
//!
//! Does every address reach every other; does a chosen source port lead over its spine, both ways, and over no other; are
//! flows that choose nothing spread over all spines, and the same flow always the same way; and, where asked for, do links
//! carry their rates.
//! The fabric should be idle: what others send is counted too.

mod counters;
mod flow;
mod report;

use std::time::Duration;

use mccs_config::Rate;

use self::counters::Arrivals;
use self::flow::{Flow, Port};
pub use self::report::{Report, Row, Section};
use super::error::Result;
use super::netns;
use super::spec::FabricSpec;
use super::topology::{Host, Topology};

/// Payload of a flow whose way is looked at: its acknowledgements alone are more than [`NOISE_BYTES`].
const PROBE_BYTES: u64 = 4 << 20;
/// Packets that may pass a spine that a flow is not on: address resolution, and the end of the flow before.
const NOISE_BYTES: u64 = 1 << 10;
/// Flows a spine, and payload of each, to see how a leaf spreads.
const SPREAD_FLOWS: usize = 32;
const SPREAD_BYTES: u64 = 64 << 10;
/// Part of a fair share that every spine must get; of 32 flows a spine, fewer than 8 is beyond chance.
const SPREAD_LEAST: f64 = 0.25;
/// A port of no spine, and how often the same flow is made from it.
const REPEATED_PORT: u16 = 40_000;
const REPEATS: usize = 8;
/// Bounds of a measured rate, as parts of the configured one. Payload is some percent less than what links carry.
const RATE_LEAST: f64 = 0.9;
const RATE_MOST: f64 = 1.05;
/// How often a rate is measured until it is no less than it should be.
const RATE_TRIES: u32 = 3;
/// After so many pairs that do not reach each other the rest is not tried: each takes seconds.
const UNREACHED_MAX: usize = 10;

/// Asks everything; rates are measured for `rates` each, where given.
///
/// # Errors
/// Something cannot be asked, because the fabric is not there.
pub fn check(spec: &FabricSpec, rates: Option<Duration>) -> Result<Report> {
    let topology = Topology::new(spec);
    let ports = Port::listen(&topology.hosts)?;
    let probing = Probing { spec, topology: &topology, ports: &ports };
    let mut sections = vec![probing.reachability()];
    if probing.rack_pairs().next().is_some() {
        sections.extend([probing.paths()?, probing.spread()?, probing.repeated()?]);
    }
    sections.extend(rates.map(|time| probing.rates(time)));
    Ok(Report { sections })
}

/// Subject of the questions.
struct Probing<'a> {
    spec: &'a FabricSpec,
    topology: &'a Topology,
    ports: &'a [Port],
}

/// Two racks, and a host in each.
#[derive(Clone, Copy)]
struct RackPair<'a> {
    from: &'a Host,
    to: &'a Host,
    port: &'a Port,
}

impl RackPair<'_> {
    fn connect(&self, source_port: u16) -> Result<Flow> {
        let from = self.from.addresses[0];
        netns::within(&self.from.namespace, || Flow::connect(from, source_port, self.port))
    }
}

impl<'a> Probing<'a> {
    /// The first hosts of racks, for every ordered pair of racks that have any.
    fn rack_pairs(&self) -> impl Iterator<Item = RackPair<'a>> {
        let first = |leaf: usize| self.topology.hosts.iter().position(|host| host.leaf == leaf);
        let firsts: Vec<usize> = (0..self.topology.leaves.len()).filter_map(first).collect();
        let pairs: Vec<_> = firsts.iter().flat_map(|from| firsts.iter().map(|to| (*from, *to))).collect();
        pairs.into_iter().filter(|(from, to)| from != to).filter_map(|(from, to)| self.pair(from, to))
    }

    fn pair(&self, from: usize, to: usize) -> Option<RackPair<'a>> {
        let port = self.ports.iter().find(|port| port.host == to)?;
        Some(RackPair { from: &self.topology.hosts[from], to: &self.topology.hosts[to], port })
    }

    /// Cells that name a pair of racks.
    fn racks(&self, pair: RackPair<'_>) -> Vec<String> {
        [pair.from, pair.to].map(|host| self.topology.leaves[host.leaf].name.clone()).to_vec()
    }

    fn reachability(&self) -> Section {
        let (mut pairs, mut rows) = (0, Vec::new());
        'all: for host in &self.topology.hosts {
            for from in &host.addresses {
                for to in self.ports.iter().filter(|port| port.address() != *from) {
                    pairs += 1;
                    let reached = netns::within(&host.namespace, || Flow::connect(*from, 0, to)?.transfer(1));
                    rows.extend(
                        reached.err().map(|error| fault(vec![from.to_string(), to.address().to_string()], &error)),
                    );
                    if rows.len() == UNREACHED_MAX {
                        break 'all;
                    }
                }
            }
        }
        let reached = format!("{} of {pairs}", pairs - rows.len());
        rows.insert(0, Row { cells: vec!["pairs".to_owned(), reached], fault: None });
        Section { title: "Does every address reach every other?", columns: &["from", "to"], rows }
    }

    fn paths(&self) -> Result<Section> {
        let mut rows = Vec::new();
        for pair in self.rack_pairs() {
            for (spine, path) in self.topology.paths.iter().enumerate() {
                let mut ports = vec![path.first_port, path.last_port];
                ports.dedup();
                for port in ports {
                    let mut cells = self.racks(pair);
                    cells.extend([path.spine.clone(), port.to_string()]);
                    rows.push(match self.probe(pair, spine, port)? {
                        Ok(bytes) => {
                            cells.extend([bytes.forward, bytes.back, bytes.elsewhere].map(|bytes| bytes.to_string()));
                            Row { cells, fault: bytes.fault(PROBE_BYTES) }
                        }
                        Err(error) => fault(cells, &error),
                    });
                }
            }
        }
        Ok(Section {
            title: "Does a source port lead over its spine, both ways, and over no other? (bytes)",
            columns: &["from", "to", "spine", "source port", "there", "back", "elsewhere"],
            rows,
        })
    }

    /// Sends a flow from `port`, and looks at where it went; the inner error is the flow's.
    fn probe(&self, pair: RackPair<'_>, spine: usize, port: u16) -> Result<Result<SpineBytes>> {
        let before = Arrivals::read(self.topology)?;
        let flow = pair.connect(port).and_then(|mut flow| flow.transfer(PROBE_BYTES).map(|()| flow));
        // Still connected while the counters are read: its end is not in what the next one finds.
        let seen = Arrivals::read(self.topology)?.since(&before);
        Ok(flow.map(|_| SpineBytes {
            forward: seen.at(spine, pair.from.leaf),
            back: seen.at(spine, pair.to.leaf),
            elsewhere: seen.elsewhere(spine),
        }))
    }

    fn spread(&self) -> Result<Section> {
        let flows = SPREAD_FLOWS * self.topology.spines.len();
        let row = |pair| self.hashed(pair, flows, 0, unfair);
        Ok(Section {
            title: "Are flows that choose no port spread over all spines?",
            columns: &["from", "to", "flows", "shares of bytes"],
            rows: self.rack_pairs().map(row).collect::<Result<_>>()?,
        })
    }

    fn repeated(&self) -> Result<Section> {
        let row = |pair| self.hashed(pair, REPEATS, REPEATED_PORT, divided);
        Ok(Section {
            title: "Does the same flow go the same way each time?",
            columns: &["from", "to", "flows", "shares of bytes"],
            rows: self.rack_pairs().map(row).collect::<Result<_>>()?,
        })
    }

    /// Sends flows that the leaf spreads by its hash, and looks at which spines they came into.
    fn hashed(
        &self,
        pair: RackPair<'_>,
        flows: usize,
        source_port: u16,
        judge: fn(&[u64]) -> Option<String>,
    ) -> Result<Row> {
        let before = Arrivals::read(self.topology)?;
        let sent = (0..flows).try_for_each(|_| pair.connect(source_port)?.transfer(SPREAD_BYTES));
        let seen = Arrivals::read(self.topology)?.since(&before);
        let spines = self.topology.spines.iter().enumerate();
        let bytes: Vec<u64> = spines.clone().map(|(spine, _)| seen.at(spine, pair.from.leaf)).collect();
        let shares: Vec<String> = spines
            .zip(shares(&bytes))
            .map(|((_, spine), share)| format!("{} {:.0}%", spine.name, 100.0 * share))
            .collect();
        let mut cells = self.racks(pair);
        cells.extend([flows.to_string(), shares.join(", ")]);
        Ok(match sent {
            Ok(()) => Row { cells, fault: judge(&bytes) },
            Err(error) => fault(cells, &error),
        })
    }

    fn rates(&self, time: Duration) -> Section {
        let within_racks = (0..self.topology.leaves.len()).filter_map(|leaf| {
            let mut hosts = (0..self.topology.hosts.len()).filter(|host| self.topology.hosts[*host].leaf == leaf);
            self.pair(hosts.next()?, hosts.next()?)
        });
        let rates = &self.spec.rates;
        let mut rows: Vec<Row> = within_racks
            .map(|pair| {
                let leaf = self.topology.leaves[pair.from.leaf].name.clone();
                rate_row(pair, leaf, 0, rates.host_leaf, time)
            })
            .collect();
        let across = [rates.host_leaf, rates.leaf_spine].into_iter().flatten().min();
        for pair in self.rack_pairs() {
            let paths = self.topology.paths.iter();
            rows.extend(paths.map(|path| rate_row(pair, path.spine.clone(), path.first_port, across, time)));
        }
        Section {
            title: "Do links carry their rates? (Mbit/s of payload, one TCP flow)",
            columns: &["from", "to", "over", "source port", "configured", "measured", "ratio", "tries"],
            rows,
        }
    }
}

fn rate_row(pair: RackPair<'_>, over: String, port: u16, configured: Option<Rate>, time: Duration) -> Row {
    let port_text = if port == 0 { "any".to_owned() } else { port.to_string() };
    let mut cells = vec![pair.from.name.clone(), pair.to.name.clone(), over, port_text];
    let ratio_of = |measured: Rate| configured.map(|configured| measured.0 as f64 / configured.0 as f64);
    let mut tries = 1;
    let measured = loop {
        let measured = pair.connect(port).and_then(|flow| flow.rate(time / 4, time));
        // A link's rate once it can carry; a flow may fall short because the machine had other work.
        let is_short = measured.as_ref().is_ok_and(|rate| ratio_of(*rate).is_some_and(|ratio| ratio < RATE_LEAST));
        if !is_short || tries == RATE_TRIES {
            break measured;
        }
        tries += 1;
    };
    match measured {
        Err(error) => fault(cells, &error),
        Ok(measured) => {
            let mbit = |rate: Rate| format!("{:.0}", rate.0 as f64 / 1e6);
            let ratio = ratio_of(measured);
            cells.push(configured.map_or_else(|| "unshaped".to_owned(), mbit));
            cells.extend([mbit(measured), ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.3}"))]);
            cells.push(tries.to_string());
            Row { cells, fault: ratio.and_then(rate_fault) }
        }
    }
}

fn fault(cells: Vec<String>, error: &super::error::FabricError) -> Row {
    Row { cells, fault: Some(error.to_string()) }
}

fn rate_fault(ratio: f64) -> Option<String> {
    match ratio {
        ratio if ratio < RATE_LEAST => Some(format!("below {RATE_LEAST} of the rate")),
        ratio if ratio > RATE_MOST => Some(format!("above {RATE_MOST} of the rate")),
        _ => None,
    }
}

/// Bytes of a flow that came into spines.
struct SpineBytes {
    /// Into its spine from the sender's leaf.
    forward: u64,
    /// Into its spine from the receiver's leaf.
    back: u64,
    /// Into other spines.
    elsewhere: u64,
}

impl SpineBytes {
    fn fault(&self, payload: u64) -> Option<String> {
        match self {
            SpineBytes { forward, .. } if *forward < payload => Some("it did not take its spine".to_owned()),
            SpineBytes { back, .. } if *back < NOISE_BYTES => {
                Some("acknowledgements did not return over it".to_owned())
            }
            SpineBytes { elsewhere, .. } if *elsewhere > NOISE_BYTES => Some("other spines were used too".to_owned()),
            _ => None,
        }
    }
}

/// Parts of the whole.
fn shares(bytes: &[u64]) -> impl Iterator<Item = f64> {
    let all = bytes.iter().sum::<u64>().max(1) as f64;
    bytes.iter().map(move |part| *part as f64 / all)
}

fn unfair(bytes: &[u64]) -> Option<String> {
    let least = SPREAD_LEAST / bytes.len() as f64;
    shares(bytes).position(|share| share < least).map(|spine| format!("spine{spine} is left out"))
}

fn divided(bytes: &[u64]) -> Option<String> {
    let used = bytes.iter().filter(|bytes| **bytes > NOISE_BYTES).count();
    (used != 1).then(|| format!("it took {used} ways"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flow_repeated_has_one_way() {
        assert_eq!(divided(&[5000, 300]), None);
        assert_eq!(divided(&[5000, 3000]), Some("it took 2 ways".to_owned()));
    }

    #[test]
    fn a_flow_belongs_on_its_spine_alone() {
        let fault = |forward, back, elsewhere| SpineBytes { forward, back, elsewhere }.fault(1000).unwrap_or_default();
        assert_eq!(fault(1100, 5000, 200), "");
        assert_eq!(fault(0, 5000, 1100), "it did not take its spine");
        assert_eq!(fault(1100, 0, 5000), "acknowledgements did not return over it");
        assert_eq!(fault(1100, 5000, 5000), "other spines were used too");
    }

    #[test]
    fn a_spine_without_its_share_is_left_out() {
        assert_eq!(unfair(&[60, 40]), None);
        assert_eq!(unfair(&[95, 5]), Some("spine1 is left out".to_owned()));
        assert_eq!(unfair(&[0, 0]), Some("spine0 is left out".to_owned()));
    }

    #[test]
    fn a_rate_is_neither_missed_nor_exceeded() {
        assert_eq!(rate_fault(0.99), None);
        assert!(rate_fault(0.89).unwrap().contains("below"));
        assert!(rate_fault(1.2).unwrap().contains("above"));
    }
}
