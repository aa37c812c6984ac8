//! Hosts say that paths are dead: which links that makes of it, and what becomes of communicators.

use std::collections::BTreeMap;

use crate::links::LinkName;
use mccs_config::service::FlowPath;
use mccs_config::topology::ActualHost;

use super::fixture::{Fixture, TOPOLOGY, name, policy, text};
use crate::cluster::dead_paths::DeadPaths;
use crate::config::cluster_config::ClusterConfig;
use crate::messages::message::AgentMessage;

fn path(ports: &str) -> FlowPath {
    FlowPath { source_ports: Some(ports.parse().unwrap()), ..FlowPath::default() }
}

const SPINE0: &str = "50000-50499";
const SPINE1: &str = "50500-50999";

fn say(fixture: &mut Fixture, from: &str, to: &str, answers: bool) {
    let output = fixture.host(&name(from)).agent.path(&name(to), path(SPINE0), answers);
    fixture.execute(&name(from), output);
    fixture.run();
}

#[test]
fn flows_leave_a_link_that_hosts_find_dead_and_come_back() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let before = fixture.chosen(&comm).clone();
    say(&mut fixture, "host-a", "host-c", false);
    let on =
        |fixture: &Fixture| fixture.chosen(&comm).paths.iter().filter_map(|path| path.source_ports).collect::<Vec<_>>();
    assert_eq!(on(&fixture), ["50500-50999".parse().unwrap()]);
    let view = fixture.show();
    let dead: Vec<_> = view.dead_links.iter().map(|[lower, upper, _]| (&**lower, &**upper)).collect();
    // With two racks nobody can say which of the two it is.
    assert_eq!(dead, [("leaf0", "spine0"), ("leaf1", "spine0")]);
    assert!(view.dead_links[0][2].contains("host-a gets no answer from host-c"), "{:?}", view.dead_links);
    assert!(view.links.is_empty(), "nobody has said so");
    assert!(fixture.history().iter().any(|entry| entry.what == "link leaf0 spine0 found dead"));
    // A host that says it again, or for another host, changes nothing; nor does a controller that has to be told again.
    let epoch = fixture.chosen(&comm).epoch;
    say(&mut fixture, "host-a", "host-c", false);
    say(&mut fixture, "host-c", "host-b", false);
    fixture.restart_controller(2, policy("ffa"));
    fixture.run();
    assert_eq!((fixture.chosen(&comm).epoch, fixture.show().dead_links.len()), (epoch, 2));
    say(&mut fixture, "host-a", "host-c", true);
    assert_eq!(
        (fixture.chosen(&comm).epoch, fixture.show().dead_links.len()),
        (epoch, 2),
        "another host still says it"
    );
    say(&mut fixture, "host-c", "host-b", true);
    assert_eq!((&fixture.chosen(&comm).paths, &fixture.chosen(&comm).flows), (&before.paths, &before.flows));
    assert!(fixture.show().dead_links.is_empty());
}

/// A path is that of its device: where it leaves its host is where the device hangs, and another device's answer says nothing of it.
#[test]
fn paths_by_devices_are_apart() {
    let rails = include_str!("../../../../config/examples/topology-rails.toml");
    let third = "[[leaf]]\nname = \"leaf9\"\n[[host]]\nname = \"host-z\"\nleaf = \"leaf9\"\n";
    let hosts = ["host-a", "host-b", "host-z"].map(ActualHost::named);
    let config =
        ClusterConfig::new(text("topology.toml", &format!("{rails}\n{third}")), policy("ffa"), &hosts, None).unwrap();
    let by = |device: &str| FlowPath { device: Some(device.parse().unwrap()), dscp: Some(8), ..FlowPath::default() };
    let mut dead = DeadPaths::default();
    let links = |dead: &DeadPaths| dead.links(&config).into_keys().collect::<Vec<_>>();
    let link = |leaf: &str| LinkName { lower: leaf.to_owned(), upper: "spine0".to_owned() };
    assert!(dead.hear(&name("host-a"), "host-z", &by("eth1"), false));
    assert_eq!(links(&dead), [link("leaf9"), link("rail1")]);
    assert!(!dead.hear(&name("host-a"), "host-z", &by("eth0"), true), "another path");
    assert!(dead.hear(&name("host-a"), "host-z", &by("eth0"), false));
    assert_eq!(links(&dead), [link("leaf9")], "on both");
    assert!(dead.hear(&name("host-a"), "host-z", &by("eth0"), true));
    assert!(dead.hear(&name("host-a"), "host-z", &by("eth1"), true));
    assert_eq!(links(&dead), []);
    // Over RDMA the same NIC has another name.
    assert!(dead.hear(&name("host-a"), "host-z", &by("mlx5_1"), false));
    assert_eq!(links(&dead), [link("leaf9"), link("rail1")]);
}

#[test]
fn dead_paths_of_a_lost_host_are_forgotten() {
    let mut fixture = Fixture::new("ffa");
    say(&mut fixture, "host-d", "host-a", false);
    assert_eq!(fixture.show().dead_links.len(), 2);
    fixture.controller.lost(&name("host-d"), fixture.now);
    fixture.run();
    assert!(fixture.show().dead_links.is_empty());
}

/// Three racks, where one dead link can be told from the others.
#[test]
fn the_link_that_all_dead_paths_share_is_the_dead_one() {
    let third = "[[leaf]]\nname = \"leaf2\"\n[[host]]\nname = \"host-e\"\nleaf = \"leaf2\"\n";
    let hosts = ["host-a", "host-b", "host-c", "host-d", "host-e"].map(ActualHost::named);
    let config =
        ClusterConfig::new(text("topology.toml", &format!("{TOPOLOGY}\n{third}")), policy("ffa"), &hosts, None)
            .unwrap();
    let found = |paths: &[(&str, &str, &str)]| {
        let mut dead = DeadPaths::default();
        for (from, to, ports) in paths {
            assert!(dead.hear(&name(from), to, &path(ports), false));
        }
        dead.links(&config).into_keys().collect::<Vec<_>>()
    };
    let link = |leaf: &str, spine: &str| LinkName { lower: leaf.to_owned(), upper: spine.to_owned() };
    let one = [("host-a", "host-c", SPINE0), ("host-e", "host-b", SPINE0), ("host-d", "host-a", SPINE0)];
    assert_eq!(found(&one), [link("leaf0", "spine0")]);
    let pair = [("host-a", "host-c", SPINE0)];
    assert_eq!(found(&pair), [link("leaf0", "spine0"), link("leaf1", "spine0")]);
    let all = [("host-a", "host-c", SPINE0), ("host-c", "host-e", SPINE0), ("host-e", "host-a", SPINE0)];
    assert_eq!(found(&all).len(), 3, "the spine");
    // A host that is not answered over any spine asks a host that is not there.
    let two = [("host-a", "host-c", SPINE0), ("host-a", "host-c", SPINE1)];
    assert_eq!(found(&two), []);
    let besides = [two[0], two[1], ("host-e", "host-b", SPINE1)];
    assert_eq!(found(&besides), [link("leaf0", "spine1"), link("leaf2", "spine1")]);
    // Below a leaf, of an unknown host, and where nothing steers to: nothing follows.
    assert_eq!(found(&[("host-a", "host-b", SPINE0), ("host-a", "host-x", SPINE0), ("host-a", "host-c", "1-2")]), []);
    let mut dead = DeadPaths::default();
    assert!(!dead.hear(&name("host-a"), "host-c", &path(SPINE0), true), "it was not dead");
    assert_eq!(dead.links(&config), BTreeMap::new());
}

/// A host loses its power: whoever sends to it is answered over no path.
#[test]
fn a_host_that_dies_is_not_taken_for_dead_links() {
    let mut fixture = Fixture::new("ffa");
    fixture.begin("t", &[("host-a", &[0, 1]), ("host-c", &[2, 3])]);
    let other = fixture.begin("u", &[("host-b", &[0, 1]), ("host-d", &[2, 3])]);
    fixture.run();
    let before = fixture.chosen(&other).clone();
    for ports in [SPINE0, SPINE1] {
        let message = AgentMessage::Path { peer: "host-c".into(), path: path(ports), answers: false };
        fixture.controller.hear(&name("host-a"), message, fixture.now);
    }
    fixture.run();
    assert!(fixture.show().dead_links.is_empty(), "{:?}", fixture.show().dead_links);
    assert_eq!(fixture.chosen(&other), &before);
    // A link that is dead besides is found.
    say(&mut fixture, "host-b", "host-d", false);
    assert_eq!(fixture.show().dead_links.len(), 2);
    assert_ne!(fixture.chosen(&other).paths, before.paths);
}
