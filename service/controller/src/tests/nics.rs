//! NICs that policies choose: flows are told to leave by them, where hosts have names for them.

use mccs_config::TopologyFile;
use mccs_config::service::TransportKind;
use mccs_config::topology::ActualHost;

use super::fixture::{name, policy, text};
use crate::communicators::plan::{Plan, Wants, plan, plan_all};
use crate::config::cluster_config::ClusterConfig;
use crate::links::Links;
use crate::messages::message::Report;
use mccs_model::CommId;
use mccs_policy::topology::{HostId, Port, Topology};
use mccs_policy::{Decision, Flow, PathSelection};
use mccs_telemetry::placed::{Began, Chosen, HostRanks};

/// Two hosts of two NICs, a rail each.
const RAILS: &str = include_str!("../../../../config/examples/topology-rails.toml");

/// The example, with names for the NICs of its second host, too.
fn named_text(second: [&str; 2]) -> String {
    let nics = "nic = [{ leaf = \"rail0\", devices = [0, 1] }, { leaf = \"rail1\", devices = [2, 3] }]";
    assert!(RAILS.contains(nics));
    let nic = |rail: usize| {
        let devices = [2 * rail, 2 * rail + 1];
        let interface = second[rail];
        format!(
            "{{ leaf = \"rail{rail}\", devices = {devices:?}, interface = \"{interface}\", rdma = \"mlx5_{rail}\" }}"
        )
    };
    RAILS.replace(nics, &format!("nic = [{}, {}]", nic(0), nic(1)))
}

fn named(second: [&str; 2]) -> Topology {
    topology(&named_text(second))
}

fn topology(text: &str) -> Topology {
    Topology::from_file(&TopologyFile::parse(text, "topology.toml").unwrap()).unwrap()
}

/// The plan of a channel on each rail, the second one also crosswise over a spine.
fn planned(topology: &Topology, transport: TransportKind) -> Plan {
    let port = |host: u32, nic: u16| Port { host: HostId(host), nic };
    let flow = |channel, from, to, path| Flow { channel, from, to, path };
    let decision = Decision {
        comm: 1,
        ring_orders: vec![vec![0, 1]; 2],
        flows: vec![
            flow(0, port(0, 0), port(1, 0), PathSelection::Path(0)),
            flow(0, port(1, 0), port(0, 0), PathSelection::Hash),
            flow(1, port(0, 1), port(1, 0), PathSelection::Path(1)),
            flow(1, port(1, 1), port(0, 1), PathSelection::Path(0)),
        ],
        weight: 1.0,
        cap_bps: None,
        host_cap_bps: None,
        priority: 0,
        window: None,
        yields: Vec::new(),
    };
    let comm = CommId { root: name("host-a"), incarnation: 1, number: 1 };
    plan(topology, &decision, Some(transport), None, |_| Some(comm.clone()))
}

/// The device and code point of each flow: 0 from host-a, 0 from host-b, 1 from host-a, 1 from host-b.
fn ways(plan: &Plan) -> Vec<(Option<String>, Option<u32>)> {
    let path = |flow: &mccs_config::change::FlowChoice| &plan.paths[flow.path as usize];
    plan.flows.iter().map(path).map(|path| (path.device.as_ref().map(ToString::to_string), path.dscp)).collect()
}

#[test]
fn flows_leave_by_the_nic_that_was_chosen() {
    let topology = named(["eth0", "eth1"]);
    for (transport, first, second) in [(TransportKind::Tcp, "eth0", "eth1"), (TransportKind::Rdma, "mlx5_0", "mlx5_1")]
    {
        let plan = planned(&topology, transport);
        let by = |device: &str, dscp| (Some(device.to_owned()), dscp);
        // Only from rail to rail there is a spine.
        assert_eq!(ways(&plan), [by(first, None), by(first, None), by(second, Some(16)), by(second, None)]);
        assert_eq!((plan.transport, plan.paths.len()), (Some(transport), 3));
        assert!(plan.not_enforced.is_empty(), "{:?}", plan.not_enforced);
        assert_eq!(plan.change().paths.as_ref(), Some(&plan.paths));
    }
}

#[test]
fn a_nic_without_a_name_on_all_hosts_is_named_and_not_steered_to() {
    let second_has_none = topology(RAILS);
    let other_names = named(["eth0", "ens7"]);
    for (topology, transport, words) in [
        (&second_has_none, TransportKind::Tcp, ["host-b", "number 0", "no name for tcp"]),
        (&second_has_none, TransportKind::Rdma, ["host-b", "number 0", "no name for rdma"]),
        (&other_names, TransportKind::Tcp, ["host-b", "ens7", "host-a"]),
    ] {
        let plan = planned(topology, transport);
        let said = &plan.not_enforced;
        assert!(said.len() == 1 && words.iter().all(|word| said[0].contains(word)), "{said:?}");
        assert_eq!(ways(&plan), [(None, None), (None, None), (None, Some(16)), (None, None)], "spines are kept to");
    }
    let plan = planned(&other_names, TransportKind::Rdma);
    assert!(plan.not_enforced.is_empty(), "as RDMA devices they have the same names");
}

/// Two hosts of the example, and a communicator with ranks on these GPUs of each.
fn report_on(devices: [&[u32]; 2], channels: u32) -> Report {
    let ranks = |first: usize, count: usize| (first as u32..).take(count).collect();
    let host = |host: &str, first: usize, devices: &[u32]| HostRanks {
        host: host.into(),
        ranks: ranks(first, devices.len()),
        devices: devices.to_vec(),
    };
    let rings = vec![(0..devices.concat().len() as u32).collect(); channels as usize];
    Report {
        comm: CommId { root: name("host-a"), incarnation: 1, number: 1 },
        number: 1,
        tenant: "t".into(),
        hosts: vec![host("host-a", 0, devices[0]), host("host-b", devices[0].len(), devices[1])],
        began_ms: 1,
        arrival: None,
        chosen: Chosen { rings, ..Chosen::default() },
        profile: None,
        is_pinned: false,
        began: Began { channels, transport: Some(TransportKind::Tcp), ..Began::default() },
    }
}

/// As many channels as there are NICs near its ranks, each by one of them.
#[test]
fn channels_of_nics_are_spread_over_them() {
    let hosts = ["host-a", "host-b"].map(|name| ActualHost { gpus: Some(4), ..ActualHost::named(name) });
    let topology_text = text("topology.toml", &named_text(["eth0", "eth1"]));
    let channels = text("policy.toml", "[policy]\nname = \"ffa\"\nchannels = \"nics\"\n");
    let config = ClusterConfig::new(topology_text, channels, &hosts, None).unwrap();
    let devices = |devices: [&[u32]; 2]| {
        let report = report_on(devices, 3);
        let plan = plan_all(&config, &Links::default(), &[&report], &Wants::new()).remove(0).1.unwrap();
        let by = ways(&plan).into_iter().map(|(device, _)| device.unwrap());
        (plan.rings.len(), by.collect::<Vec<_>>())
    };
    let of = |names: &[&str]| (names.len() / 2, names.iter().map(ToString::to_string).collect::<Vec<_>>());
    assert_eq!(devices([&[0, 1, 2, 3], &[0, 1, 2, 3]]), of(&["eth0", "eth0", "eth1", "eth1"]));
    assert_eq!(devices([&[0, 3], &[1, 2]]), of(&["eth0", "eth0", "eth1", "eth1"]));
    assert_eq!(devices([&[2, 3], &[3]]), of(&["eth1", "eth1"]), "of all that a host has those that ranks are near to");
    assert_eq!(
        devices([&[1, 2], &[3]]),
        of(&["eth0", "eth1", "eth1", "eth1"]),
        "where a host has fewer they share them"
    );
}

/// Ranks whose GPUs are the last two of each host use what is nearest to those, not to the first two.
#[test]
fn ranks_on_gpus_are_where_their_gpus_are() {
    let hosts = ["host-a", "host-b"].map(|name| ActualHost { gpus: Some(4), ..ActualHost::named(name) });
    let topology_text = text("topology.toml", &named_text(["eth0", "eth1"]));
    let config = ClusterConfig::new(topology_text, policy("ffa"), &hosts, None).unwrap();
    let devices = |devices: [&[u32]; 2]| {
        let host = |(host, ranks): (&str, [u32; 2]), devices: &[u32]| HostRanks {
            host: host.into(),
            ranks: ranks.to_vec(),
            devices: devices.to_vec(),
        };
        let report = Report {
            comm: CommId { root: name("host-a"), incarnation: 1, number: 1 },
            number: 1,
            tenant: "t".into(),
            hosts: vec![host(("host-a", [0, 1]), devices[0]), host(("host-b", [2, 3]), devices[1])],
            began_ms: 1,
            arrival: None,
            chosen: Chosen { rings: vec![(0..4).collect(); 2], ..Chosen::default() },
            profile: None,
            is_pinned: false,
            began: Began { channels: 2, transport: Some(TransportKind::Tcp), ..Began::default() },
        };
        let mut plans = plan_all(&config, &Links::default(), &[&report], &Wants::new());
        let by = ways(&plans.remove(0).1.unwrap()).into_iter().map(|(device, _)| device.unwrap());
        by.collect::<Vec<_>>()
    };
    // By channel, from either host.
    assert_eq!(devices([&[2, 3], &[2, 3]]), ["eth1"; 4]);
    assert_eq!(
        devices([&[3, 0], &[2, 1]]),
        ["eth0", "eth0", "eth1", "eth1"],
        "channels begin with the first in the order of GPUs"
    );
    // In host memory, where ranks have no devices, they are divided among those that there are.
    assert_eq!(devices([&[], &[]]), ["eth0"; 4]);
    assert_eq!(devices([&[2, 3], &[]])[0], "eth1");
}
