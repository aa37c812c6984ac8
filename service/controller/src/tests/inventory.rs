//! Topologies that name devices which hosts have not.

use std::collections::BTreeSet;

use mccs_config::change::StrategyChange;
use mccs_config::service::FlowPath;

use super::fixture::{Fixture, TOPOLOGY, name, policy, text, topology_with_nics};
use crate::config::cluster_config::Text;
use crate::history::Went;
use crate::inventory::{Interfaces, Inventory};
use crate::messages::answer::{HistoryView, Standing};

/// The example, where hosts call their only NIC something.
fn called(interface: &str, rdma: &str) -> Text {
    let nic = |leaf: &str| {
        format!("nic = [{{ leaf = \"{leaf}\", devices = [0, 1], interface = \"{interface}\", rdma = \"{rdma}\" }}]\n")
    };
    let topology = TOPOLOGY.lines().map(|line| match line.strip_prefix("leaf = ") {
        // The other lines that begin so are comments.
        Some(leaf) => nic(leaf.trim_matches('"')),
        None => format!("{line}\n"),
    });
    text("topology.toml", &topology.collect::<String>())
}

fn interfaces_that_are_up(names: &[&str]) -> Interfaces {
    Interfaces { all: names.iter().map(ToString::to_string).collect(), down: Vec::new() }
}

fn inventory(interfaces: &[&str], rdma_ports: &[&str]) -> Inventory {
    Inventory {
        gpus: 0,
        interfaces: Some(interfaces_that_are_up(interfaces)),
        rdma_ports: Some(rdma_ports.iter().map(|port| port.parse().unwrap()).collect()),
        tenants: None,
    }
}

/// Hosts that have said what they have; the last of them has not.
fn equipped() -> Fixture {
    let mut fixture = Fixture::new("ffa");
    for host in ["host-a", "host-b", "host-c"].map(name) {
        fixture.set_inventory(&host, inventory(&["eth0", "lo"], &["mlx5_0:1"]));
    }
    fixture.run();
    fixture
}

/// A file is read. Returns why it was refused, if it was.
fn read(fixture: &mut Fixture, topology: Text) -> Option<String> {
    fixture.controller.files(Some(topology), None, fixture.now);
    fixture.run();
    match &fixture.history().last().unwrap().went {
        Went::Failed(why) => Some(why.clone()),
        _ => None,
    }
}

#[test]
fn a_topology_that_names_missing_devices_is_refused_with_their_line() {
    let mut fixture = equipped();
    let line = |topology: &Text, host: &str| {
        let name = format!("name = {host:?}");
        topology.text.lines().position(|line| line.starts_with(&name)).unwrap() + 3
    };
    // Without a communicator and with one.
    for has_comm in [false, true] {
        if has_comm {
            fixture.begin_wide("t");
            fixture.run();
        }
        let nowhere = called("nosuch0", "mlx5_0");
        let why = read(&mut fixture, nowhere.clone()).expect("refused");
        let complaints: Vec<&str> = why.lines().filter(|line| line.contains("nosuch0")).collect();
        assert_eq!(complaints.len(), 3, "the last host has not said what it has: {why}");
        let at = format!("topology.toml:{}:", line(&nowhere, "host-b"));
        assert!(complaints[1].contains(&at) && complaints[1].contains("host[1].nic[0].interface"), "{why}");
        assert!(complaints[1].contains("it has eth0, lo"), "{why}");
        let why = read(&mut fixture, called("eth0", "mlx5_0:2")).expect("refused");
        assert!(why.contains("host[0].nic[0].rdma") && why.contains("it uses mlx5_0:1"), "{why}");
        assert_eq!((read(&mut fixture, called("eth0", "mlx5_0")), fixture.show().contradictions.len()), (None, 0));
        if has_comm {
            let ways = fixture.show().communicators.remove(0);
            assert_eq!(ways.state, Standing::AsDecided);
            let by: BTreeSet<bool> = ways.strategy.flows.iter().map(|flow| flow.path.ends_with(" by eth0")).collect();
            assert_eq!(by, BTreeSet::from([true]), "{:?}", ways.strategy.flows);
        }
        assert_eq!(read(&mut fixture, text("topology.toml", TOPOLOGY)), None);
    }
}

#[test]
fn a_host_reports_its_interfaces_when_they_change() {
    let mut fixture = equipped();
    let (host, nowhere) = (name("host-b"), called("eth1", "mlx5_0"));
    for other in ["host-a", "host-c"].map(name) {
        fixture.has_interfaces(&other, Some(interfaces_that_are_up(&["eth1"])));
    }
    fixture.run();
    assert!(read(&mut fixture, nowhere.clone()).is_some_and(|why| why.lines().count() == 1 && why.contains("host[1]")));
    // Another policy makes nobody forget it.
    fixture.controller.files(None, Some(policy("ecmp")), fixture.now);
    fixture.run();
    let still_refused = |entry: &HistoryView| matches!(&entry.went, Went::DoneBut(why) if why.contains("host[1]"));
    assert!(fixture.history().iter().any(still_refused), "{:?}", fixture.history());
    assert_eq!(fixture.show().policy.as_deref(), Some("ecmp"));
    let tell = |fixture: &mut Fixture, interfaces: Option<&[&str]>| {
        let interfaces = interfaces.map(interfaces_that_are_up);
        let told = fixture.host(&host).agent.has_interfaces(interfaces.clone());
        assert!(told.is_some());
        assert!(fixture.host(&host).agent.has_interfaces(interfaces).is_none(), "the same is no news");
        fixture.execute(&host, told);
        fixture.run();
    };
    tell(&mut fixture, Some(&["eth0", "eth1"]));
    // Nobody has to save it again.
    let history = fixture.history();
    let last = history.last().expect("an entry");
    assert!(last.why.contains("hosts have what its topology names") && last.went == Went::Done, "{last:?}");
    assert_eq!(fixture.show().contradictions.len(), 0);
    // It goes: what is in force stays, and it is said.
    tell(&mut fixture, Some(&["eth0"]));
    let view = fixture.show();
    assert_eq!(view.contradictions.len(), 1, "{view:?}");
    assert!(view.contradictions[0].contains("host[1].nic[0].interface") && view.policy.is_some(), "{view:?}");
    assert!(fixture.history().iter().any(|entry| entry.what.contains("contradicted")));
    // It is there again; and then nobody knows.
    for interfaces in [Some(&["eth1"][..]), Some(&[]), None] {
        let is_contradicted = interfaces.is_some_and(<[_]>::is_empty);
        tell(&mut fixture, interfaces);
        assert_eq!(fixture.show().contradictions.len(), usize::from(is_contradicted));
    }
}

/// A host of two NICs loses one: flows leave it by the other, until it is there again.
#[test]
fn flows_leave_by_other_nics_while_one_is_down() {
    let mut fixture = equipped();
    assert_eq!(read(&mut fixture, topology_with_nics(["eth0", "lo"])), None);
    let comm = fixture.begin("t", &[("host-a", &[0, 1]), ("host-b", &[2, 3])]);
    fixture.run();
    let leaves_by = |fixture: &mut Fixture| {
        let chosen = fixture.chosen(&comm);
        let by = |from: &str| {
            let flows = chosen.flows.iter().filter(|flow| flow.from == from);
            let device = |path: u32| chosen.paths[path as usize].device.as_ref().map(ToString::to_string);
            flows.filter_map(|flow| device(flow.path)).collect::<BTreeSet<_>>()
        };
        ["host-a", "host-b"].map(by)
    };
    let all = leaves_by(&mut fixture);
    assert!(all.iter().all(|by| by.contains("eth0")), "{all:?}");
    let host = name("host-b");
    let tell = |fixture: &mut Fixture, down: &[u16]| {
        fixture
            .has_interfaces(&host, Some(Interfaces { down: down.to_vec(), ..interfaces_that_are_up(&["eth0", "lo"]) }));
        fixture.run();
    };
    tell(&mut fixture, &[0]);
    assert_eq!(leaves_by(&mut fixture)[1], BTreeSet::from(["lo".to_owned()]));
    let dead = fixture.show().dead_links;
    assert!(dead.len() == 1 && dead[0][0] == "host-b eth0" && dead[0][2].contains("its NIC is down"), "{dead:?}");
    assert!(fixture.history().iter().any(|entry| entry.what == "NIC eth0 of host host-b is down"));
    // Nobody says that it is up while its host says nothing.
    fixture.controller.lost(&host, fixture.now);
    fixture.run();
    assert!(!fixture.history().iter().any(|entry| entry.what.contains("up again")));
    fixture.controller.met(&host, fixture.now);
    fixture.run();
    assert_eq!(fixture.show().dead_links, dead);
    tell(&mut fixture, &[]);
    assert_eq!(leaves_by(&mut fixture), all);
    assert!(fixture.show().dead_links.is_empty());
    // A pinned ring stays by the NIC that is down, and is shown.
    let by_hand = StrategyChange {
        paths: Some(vec![FlowPath { device: "eth0".parse().ok(), ..FlowPath::default() }]),
        flows: Some(Vec::new()),
        ..StrategyChange::default()
    };
    fixture.change_by_hand(&comm, by_hand);
    fixture.run();
    tell(&mut fixture, &[0]);
    let told = fixture.show().communicators.remove(0).not_enforced;
    assert!(
        told.iter().any(|what| what.starts_with("another NIC than eth0") && what.contains("from host-b")),
        "{told:?}"
    );
    assert_eq!(fixture.chosen(&comm).paths.len(), 1);
    fixture.unpin(&comm);
    fixture.run();
    assert_eq!(leaves_by(&mut fixture)[1], BTreeSet::from(["lo".to_owned()]));
    tell(&mut fixture, &[]);
    // With both down there is nothing better.
    tell(&mut fixture, &[0, 1]);
    assert_eq!(leaves_by(&mut fixture), all);
}
