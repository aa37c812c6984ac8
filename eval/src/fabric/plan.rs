//! Plan of a fabric: commands that build its links, routes, rules and rate limits (HTB), in order,
//! as data.
//!
//! Switches route; nothing bridges. A packet for another rack leaves its leaf by the first rule that fits:
//!
//! ```text
//! rule 100        to the leaf's own rack    -> main table: the host's link
//! rule 200 + s    source port of spine s    -> table 1000 + s: its link to spine s
//! rule 300 + s    destination port, same    -> table 1000 + s: acknowledgements return over the spine that data came by
//! otherwise                                 -> main table: a hash of addresses and ports chooses the spine
//! ```
//!
//! A shaped link is shaped at both ends where packets leave: HTB at the rate, before it a FIFO of limited bytes; or several, where
//! packets with some code points go first, or flows have queues of their own, which take turns.

use std::fmt;

use mccs_config::Rate;

use super::spec::{Buffer, FabricSpec};
use super::topology::{Link, Topology, rack_prefix, switch_link};

/// Order of a leaf's rules and numbers of its tables; `+ s` for spine `s`.
const RULE_OWN_RACK: usize = 100;
const RULE_SOURCE: usize = 200;
const RULE_DESTINATION: usize = 300;
const TABLE: usize = 1000;
/// Addresses (1, 2), protocol (4), and ports (16, 32).
const FIVE_TUPLE: &str = "55";
/// Largest packet that the kernel hands to an interface in one piece.
const LARGEST_PACKET_BYTES: u64 = 65_536;

/// Classes of the shaper: the link, below it that of packets without one of their own, and then one a code point.
const LINK_CLASS: usize = 1;
const OTHERS_CLASS: usize = 10;
/// Percent of the link's rate that a class has whatever others take: nobody starves for ever.
const OWN_PERCENT: u64 = 1;
/// The first table of filters in which flows are looked up.
const FLOWS_TABLE: usize = 2;

/// A part of the kernel that a command needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// Namespaces and the right to make them.
    Namespaces,
    /// Links between namespaces.
    Veth,
    /// Addresses and routes.
    Routing,
    /// Several next hops of a route, chosen by a hash of addresses and ports.
    Multipath,
    /// A seed for that hash.
    HashSeed,
    /// Rules by port.
    PortRules,
    /// The shaper.
    Htb,
    /// The queue before it.
    Fifo,
    /// Queues by code point or flow.
    Filters,
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Piece::Namespaces => "network namespaces (CONFIG_NET_NS) and CAP_SYS_ADMIN",
            Piece::Veth => "veth links (CONFIG_VETH)",
            Piece::Routing => "IPv4 routing (CONFIG_INET) and CAP_NET_ADMIN",
            Piece::Multipath => "multipath routes with a hash of chosen fields (CONFIG_IP_ROUTE_MULTIPATH, Linux 5.13)",
            Piece::HashSeed => "a seed for the multipath hash (Linux 6.11)",
            Piece::PortRules => "routing rules by port (CONFIG_IP_MULTIPLE_TABLES, Linux 4.17)",
            Piece::Htb => "the HTB shaper (CONFIG_NET_SCH_HTB)",
            Piece::Fifo => "byte-limited FIFO queues (CONFIG_NET_SCHED)",
            Piece::Filters => "filters by code point and port (CONFIG_NET_CLS_U32)",
        })
    }
}

/// A program of iproute2 that takes many commands at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tool {
    /// Namespaces, links, addresses, routes, rules.
    Ip,
    /// Shaping.
    Tc,
}

impl Tool {
    /// The executable.
    #[must_use]
    pub fn program(self) -> &'static str {
        match self {
            Tool::Ip => "ip",
            Tool::Tc => "tc",
        }
    }
}

/// One command, without the tool's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Command {
    /// Its words.
    pub text: String,
    /// The kernel's part that it needs.
    pub needs: Piece,
}

/// A sysctl of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// Below `/proc/sys`.
    pub key: &'static str,
    /// The value to write.
    pub value: String,
    /// The kernel's part that it needs; absent: a kernel without the key has nothing to be set.
    pub needs: Option<Piece>,
}

/// A step of one go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Commands of one tool.
    Batch {
        /// The tool.
        tool: Tool,
        /// The namespace; absent: the caller's.
        namespace: Option<String>,
        /// At least one.
        commands: Vec<Command>,
    },
    /// Settings of one namespace.
    Settings {
        /// The namespace.
        namespace: String,
        /// In order.
        settings: Vec<Setting>,
    },
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Batch { tool, namespace, commands } => commands.iter().try_for_each(|command| {
                let at = namespace.iter().map(|name| format!("-n {name} ")).collect::<String>();
                writeln!(f, "{} {at}{}", tool.program(), command.text)
            }),
            Step::Settings { namespace, settings } => settings.iter().try_for_each(|setting| {
                let key = setting.key.replace('/', ".");
                writeln!(f, "ip netns exec {namespace} sysctl -qw {key}={}", setting.value)
            }),
        }
    }
}

/// Everything that builds the fabric.
#[must_use]
pub fn build(spec: &FabricSpec, topology: &Topology) -> Vec<Step> {
    let namespaces = topology.nodes().map(|(_, namespace)| ip(Piece::Namespaces, format!("netns add {namespace}")));
    let links = topology.links.iter().map(|link| add_link(link, spec.mtu));
    let mut steps = vec![batch(Tool::Ip, None, namespaces.collect())];
    // Before links exist, because an interface takes its settings from the defaults that it finds.
    steps.extend(topology.nodes().map(|(_, namespace)| Step::Settings {
        namespace: namespace.to_owned(),
        settings: settings(spec, topology, namespace),
    }));
    steps.push(batch(Tool::Ip, None, links.collect()));
    for (_, namespace) in topology.nodes() {
        let mut commands = addresses(topology, namespace);
        commands.extend(routes(spec, topology, namespace));
        steps.push(batch(Tool::Ip, Some(namespace), commands));
        let shaping = shaping(spec, topology, namespace);
        if !shaping.is_empty() {
            steps.push(batch(Tool::Tc, Some(namespace), shaping));
        }
    }
    steps
}

fn ip(needs: Piece, text: String) -> Command {
    Command { text, needs }
}

fn batch(tool: Tool, namespace: Option<&str>, commands: Vec<Command>) -> Step {
    Step::Batch { tool, namespace: namespace.map(str::to_owned), commands }
}

fn settings(spec: &FabricSpec, topology: &Topology, namespace: &str) -> Vec<Setting> {
    let setting = |key, value: &str, needs| Setting { key, value: value.to_owned(), needs };
    // Only what was asked for is on the wire: no router solicitations, no multicast reports.
    let mut all = vec![setting("net/ipv6/conf/default/disable_ipv6", "1", None)];
    if !topology.switches().any(|switch| switch.namespace == namespace) {
        return all;
    }
    all.push(setting("net/ipv4/ip_forward", "1", Some(Piece::Routing)));
    // A flow may come by another spine than it would leave by.
    for key in ["net/ipv4/conf/all/rp_filter", "net/ipv4/conf/default/rp_filter"] {
        all.push(setting(key, "0", Some(Piece::Routing)));
    }
    if spec.spines > 0 {
        // Policy 1 would hash ports too, but takes the hash that the sender's socket left in the packet, which is random:
        // a flow repeated would go another way, and one that retransmits would change its way. Policy 3 reads the packet.
        all.push(setting("net/ipv4/fib_multipath_hash_policy", "3", Some(Piece::Multipath)));
        all.push(setting("net/ipv4/fib_multipath_hash_fields", FIVE_TUPLE, Some(Piece::Multipath)));
        if let Some(seed) = spec.paths.hash_seed {
            all.push(setting("net/ipv4/fib_multipath_hash_seed", &seed.to_string(), Some(Piece::HashSeed)));
        }
    }
    all
}

fn add_link(link: &Link, mtu: u32) -> Command {
    let [lower, upper] = &link.ends;
    ip(
        Piece::Veth,
        format!(
            "link add name {} netns {} mtu {mtu} type veth peer name {} netns {} mtu {mtu}",
            lower.interface, lower.namespace, upper.interface, upper.namespace
        ),
    )
}

/// The ends of links in `namespace`, with the link's rate.
fn ends<'a>(topology: &'a Topology, namespace: &str) -> impl Iterator<Item = (&'a super::topology::End, Option<Rate>)> {
    let ends = topology.links.iter().flat_map(|link| link.ends.iter().map(|end| (end, link.rate)));
    ends.filter(move |(end, _)| end.namespace == namespace)
}

fn addresses(topology: &Topology, namespace: &str) -> Vec<Command> {
    let mut commands = vec![ip(Piece::Routing, "link set lo up".to_owned())];
    for (end, _) in ends(topology, namespace) {
        let add = |address| format!("address add {address}/{} dev {}", end.prefix, end.interface);
        commands.extend(end.addresses.iter().map(|address| ip(Piece::Routing, add(address))));
        commands.push(ip(Piece::Routing, format!("link set {} up", end.interface)));
    }
    commands
}

fn routes(spec: &FabricSpec, topology: &Topology, namespace: &str) -> Vec<Command> {
    if let Some(host) = topology.hosts.iter().find(|host| host.namespace == namespace) {
        return vec![ip(Piece::Routing, format!("route add default via {}", host.gateway))];
    }
    if let Some(spine) = topology.spines.iter().position(|spine| spine.namespace == namespace) {
        let route = |leaf| format!("route add {} via {}", rack_prefix(leaf), switch_link(spec, leaf, spine)[0]);
        return (0..topology.leaves.len()).map(|leaf| ip(Piece::Routing, route(leaf))).collect();
    }
    let leaf = topology.leaves.iter().position(|leaf| leaf.namespace == namespace);
    leaf.map(|leaf| leaf_routes(spec, topology, leaf)).unwrap_or_default()
}

fn leaf_routes(spec: &FabricSpec, topology: &Topology, leaf: usize) -> Vec<Command> {
    if topology.spines.is_empty() {
        return Vec::new();
    }
    let hop = |spine| switch_link(spec, leaf, spine)[1];
    let hops: String = (0..topology.spines.len()).map(|spine| format!(" nexthop via {}", hop(spine))).collect();
    let own = rack_prefix(leaf);
    let mut commands = vec![
        ip(Piece::Multipath, format!("route add default{hops}")),
        // Else a packet for nobody would go up and come down until its hops are used up.
        ip(Piece::Routing, format!("route add unreachable {own}")),
        ip(Piece::PortRules, format!("rule add pref {RULE_OWN_RACK} to {own} lookup main")),
    ];
    for (spine, path) in topology.paths.iter().enumerate() {
        let (table, ports) = (TABLE + spine, format!("{}-{}", path.first_port, path.last_port));
        commands.push(ip(Piece::PortRules, format!("route add default via {} table {table}", hop(spine))));
        for (pref, which) in [(RULE_SOURCE, "sport"), (RULE_DESTINATION, "dport")] {
            let rule = format!("rule add pref {} {which} {ports} lookup {table}", pref + spine);
            commands.push(ip(Piece::PortRules, rule));
        }
    }
    commands
}

fn shaping(spec: &FabricSpec, topology: &Topology, namespace: &str) -> Vec<Command> {
    let shaped = ends(topology, namespace).filter_map(|(end, rate)| Some((&end.interface, rate?)));
    shaped.flat_map(|(interface, rate)| shaping_of(&spec.buffer, topology, interface, rate)).collect()
}

fn shaping_of(buffer: &Buffer, topology: &Topology, interface: &str, rate: Rate) -> Vec<Command> {
    let tc = |needs, text| Command { text, needs };
    let bytes_per_s = rate.0 / 8;
    let burst = (bytes_per_s / 1000).max(LARGEST_PACKET_BYTES);
    let depth_us = u64::try_from(buffer.depth.0.as_micros()).unwrap_or(u64::MAX);
    let limit = (bytes_per_s.saturating_mul(depth_us) / 1_000_000).max(buffer.least.0);
    // The quantum shares a link between classes of one priority; the kernel's guess would fill its log.
    let class = |parent: &str, id: usize, rates: String| {
        let burst = format!("burst {burst} cburst {burst} quantum {LARGEST_PACKET_BYTES}");
        tc(Piece::Htb, format!("class add dev {interface} parent {parent} classid 1:{id} htb {rates} {burst}"))
    };
    let fifo = |id: usize| tc(Piece::Fifo, format!("qdisc add dev {interface} parent 1:{id} bfifo limit {limit}"));
    let has_one = buffer.first.is_empty() && buffer.flows.is_none();
    let others = if has_one { LINK_CLASS } else { OTHERS_CLASS };
    let mut commands = vec![
        tc(Piece::Htb, format!("qdisc add dev {interface} root handle 1: htb default {others}")),
        class("1:", LINK_CLASS, format!("rate {}bit", rate.0)),
    ];
    if has_one {
        commands.push(fifo(LINK_CLASS));
        return commands;
    }
    let filter =
        |text: String| tc(Piece::Filters, format!("filter add dev {interface} parent 1: protocol ip prio 1 {text}"));
    if let Some(flows) = buffer.flows {
        let senders = topology.hosts.iter().flat_map(|host| &host.addresses);
        let pairs: Vec<_> = senders.flat_map(|from| topology.hosts.iter().map(move |to| (from, to.gateway))).collect();
        let own = rate.0 / (pairs.len() as u64 * u64::from(flows) + 1);
        let part = |id: usize| [class("1:1", id, format!("rate {own}bit ceil {}bit", rate.0)), fifo(id)];
        commands.extend(part(OTHERS_CLASS));
        // A table for each pair, in which the lowest bits of the first two bytes behind the IP header, the source port, are looked up.
        let mask = (flows - 1) << 16;
        for (number, (from, to)) in pairs.into_iter().enumerate() {
            let table = FLOWS_TABLE + number;
            commands.push(filter(format!("handle {table:x}: u32 divisor {flows}")));
            let looked_up = format!("hashkey mask {mask:#010x} at 20 link {table:x}:");
            commands.push(filter(format!("u32 match ip src {from}/32 match ip dst {to}/24 {looked_up}")));
            for flow in 0..flows as usize {
                let id = OTHERS_CLASS + 1 + number * flows as usize + flow;
                commands.extend(part(id));
                commands.push(filter(format!("u32 ht {table:x}:{flow:x}: match u32 0 0 flowid 1:{id}")));
            }
        }
        return commands;
    }
    // A class borrows the link's unused rate, up to all of it.
    let own = rate.0 * OWN_PERCENT / 100;
    let part = |id: usize, prio: usize| class("1:1", id, format!("rate {own}bit ceil {}bit prio {prio}", rate.0));
    for (place, dscp) in buffer.first.iter().rev().enumerate() {
        let id = OTHERS_CLASS + 1 + place;
        let tos = dscp << 2;
        commands.extend([part(id, place), fifo(id)]);
        commands.push(filter(format!("u32 match ip dsfield {tos:#04x} 0xfc flowid 1:{id}")));
    }
    commands.extend([part(OTHERS_CLASS, buffer.first.len()), fifo(OTHERS_CLASS)]);
    commands
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        let spec = FabricSpec::parse(text, "fabric.toml").unwrap();
        let steps = build(&spec, &Topology::new(&spec));
        steps.iter().flat_map(|step| step.to_string().lines().map(str::to_owned).collect::<Vec<_>>()).collect()
    }

    fn testbed() -> Vec<String> {
        lines(include_str!("../../fabric/testbed.toml"))
    }

    fn has(lines: &[String], line: &str) {
        assert!(lines.iter().any(|l| l == line), "no {line:?} in\n{}", lines.join("\n"));
    }

    #[test]
    fn a_leaf_spreads_by_hash_and_obeys_ports() {
        let lines = testbed();
        let leaf = |text: &str| has(&lines, &format!("ip -n mccs-testbed-leaf1 {text}"));
        leaf("route add default nexthop via 172.16.0.5 nexthop via 172.16.0.7");
        leaf("rule add pref 100 to 10.1.0.0/16 lookup main");
        leaf("route add default via 172.16.0.7 table 1001");
        leaf("rule add pref 201 sport 20100-20199 lookup 1001");
        leaf("rule add pref 301 dport 20100-20199 lookup 1001");
        has(&lines, "ip netns exec mccs-testbed-leaf1 sysctl -qw net.ipv4.fib_multipath_hash_policy=3");
        has(&lines, "ip -n mccs-testbed-spine1 route add 10.1.0.0/16 via 172.16.0.6");
    }

    #[test]
    fn hosts_have_an_address_a_device_and_do_not_forward() {
        let lines = testbed();
        has(&lines, "ip -n mccs-testbed-h3 address add 10.1.1.2/24 dev eth0");
        has(&lines, "ip -n mccs-testbed-h3 route add default via 10.1.1.254");
        assert!(!lines.iter().any(|line| line.contains("-h3") && line.contains("ip_forward")));
    }

    #[test]
    fn both_ends_of_a_shaped_link_are_shaped() {
        let lines = testbed();
        let class = |at: &str, dev: &str, rate: u64, burst: u64, limit: u64| {
            let at = format!("tc -n mccs-testbed-{at}");
            has(
                &lines,
                &format!(
                    "{at} class add dev {dev} parent 1: classid 1:1 htb rate {rate}bit burst {burst} cburst {burst} quantum 65536"
                ),
            );
            has(&lines, &format!("{at} qdisc add dev {dev} parent 1:1 bfifo limit {limit}"));
        };
        class("h0", "eth0", 1_000_000_000, 125_000, 625_000);
        class("leaf0", "h0", 1_000_000_000, 125_000, 625_000);
        class("leaf0", "spine1", 500_000_000, 65_536, 312_500);
        class("spine1", "leaf0", 500_000_000, 65_536, 312_500);
    }

    #[test]
    fn packets_with_a_code_point_go_first_where_asked_for() {
        let lines = lines(&include_str!("../../fabric/testbed.toml").replace("# first = [8] ", "first = [8, 16] "));
        let leaf = |text: &str| has(&lines, &format!("tc -n mccs-testbed-leaf0 {text}"));
        leaf("qdisc add dev spine1 root handle 1: htb default 10");
        let part = "rate 5000000bit ceil 500000000bit";
        let burst = "burst 65536 cburst 65536 quantum 65536";
        for (id, prio) in [(11, 0), (12, 1), (10, 2)] {
            leaf(&format!("class add dev spine1 parent 1:1 classid 1:{id} htb {part} prio {prio} {burst}"));
            leaf(&format!("qdisc add dev spine1 parent 1:{id} bfifo limit 312500"));
        }
        for (dsfield, id) in [("0x40", 11), ("0x20", 12)] {
            leaf(&format!(
                "filter add dev spine1 parent 1: protocol ip prio 1 u32 match ip dsfield {dsfield} 0xfc flowid 1:{id}"
            ));
        }
    }

    #[test]
    fn flows_have_queues_of_their_own_where_asked_for() {
        let text = include_str!("../../fabric/testbed.toml").replace("# flows = 16 ", "flows = 4 ");
        let lines = lines(&text);
        let leaf = |text: &str| has(&lines, &format!("tc -n mccs-testbed-leaf0 {text}"));
        leaf("qdisc add dev spine1 root handle 1: htb default 10");
        let filter = "filter add dev spine1 parent 1: protocol ip prio 1";
        // Eight senders to four hosts, and a queue for whatever has no table.
        for id in 10..=138 {
            leaf(&format!(
                "class add dev spine1 parent 1:1 classid 1:{id} htb rate 3875968bit ceil 500000000bit burst 65536 cburst 65536 quantum 65536"
            ));
            leaf(&format!("qdisc add dev spine1 parent 1:{id} bfifo limit 312500"));
        }
        for (table, sender, to, first) in [
            ("2", "10.0.0.1", "10.0.0.254", 11),
            ("3", "10.0.0.1", "10.0.1.254", 15),
            ("21", "10.1.1.2", "10.1.1.254", 135),
        ] {
            leaf(&format!("{filter} handle {table}: u32 divisor 4"));
            leaf(&format!(
                "{filter} u32 match ip src {sender}/32 match ip dst {to}/24 hashkey mask 0x00030000 at 20 link {table}:"
            ));
            for flow in 0..4 {
                leaf(&format!("{filter} u32 ht {table}:{flow}: match u32 0 0 flowid 1:{}", first + flow));
            }
        }
    }

    #[test]
    fn an_unshaped_rack_needs_neither_shaping_nor_rules() {
        let lines = lines(include_str!("../../fabric/rack.toml"));
        assert!(lines.iter().all(|line| !line.starts_with("tc ") && !line.contains("rule")), "{lines:?}");
        assert!(lines.iter().all(|line| !line.contains("multipath")));
    }

    #[test]
    fn namespaces_come_first_and_then_what_interfaces_inherit() {
        let lines = testbed();
        let last = |part: &str| lines.iter().rposition(|line| line.contains(part)).unwrap();
        let first = |part: &str| lines.iter().position(|line| line.contains(part)).unwrap();
        assert!(last("netns add") < first("sysctl"));
        assert!(last("sysctl") < first("link add"));
        assert!(last("link add") < first("address add"));
    }

    #[test]
    fn the_number_of_processes_is_two_a_node_and_two() {
        let spec = FabricSpec::parse(include_str!("../../fabric/testbed.toml"), "testbed.toml").unwrap();
        let steps = build(&spec, &Topology::new(&spec));
        let batches = steps.iter().filter(|step| matches!(step, Step::Batch { .. })).count();
        assert_eq!(batches, 2 + 2 * 8);
    }

    #[test]
    fn a_seed_of_the_hash_is_set_where_asked_for() {
        let text = include_str!("../../fabric/testbed.toml").replace("# hash_seed = 1 ", "hash_seed = 7 ");
        has(&lines(&text), "ip netns exec mccs-testbed-leaf0 sysctl -qw net.ipv4.fib_multipath_hash_seed=7");
    }
}
