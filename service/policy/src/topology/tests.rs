use super::*;
use mccs_config::TopologyFile;

fn three_tiers() -> Clos {
    Clos {
        pods: 3,
        racks_per_pod: 2,
        hosts_per_rack: 2,
        devices_per_host: 4,
        nics_per_host: 2,
        rails: false,
        spines_per_pod: 2,
        cores_per_spine: 3,
        nic_bps: 1.0,
        leaf_spine_bps: 2.0,
        spine_core_bps: 3.0,
    }
}

fn port(host: u32, nic: u16) -> Port {
    Port { host: HostId(host), nic }
}

#[test]
fn a_file_and_its_numbers_give_the_same_routes() {
    let text = include_str!("../../../../config/examples/topology.toml");
    let file = TopologyFile::parse(text, "topology.toml").expect("the example is right");
    let topology = Topology::from_file(&file).expect("checked");
    assert_eq!(topology.host_count(), 4);
    let racks: Vec<u32> = (0..4).map(|host| topology.rack(HostId(host))).collect();
    assert_eq!(racks, [0, 0, 1, 1]);
    assert_eq!(topology.path_count(port(0, 0), port(1, 0)), 1);
    assert_eq!(topology.path_count(port(0, 0), port(2, 0)), 2);
    let rates = |path| {
        let route = topology.route(port(0, 0), port(2, 0), path);
        route.links().iter().map(|link| topology.rates()[link.index()] / 1e9).collect::<Vec<_>>()
    };
    assert_eq!(rates(0), [100.0, 50.0, 50.0, 100.0]);
    assert_eq!(topology.steering(1).source_ports.map(|ports| ports.first), Some(50_500));
    assert_eq!(topology.links_between("leaf0", "spine1"), [topology.route(port(0, 0), port(2, 0), 1).links()[1]]);
    assert_eq!(topology.links_between("host-a", "leaf0"), [topology.up_link(port(0, 0))]);
    assert!(topology.links_between("host-a", "leaf1").is_empty());
}

#[test]
fn rails_are_leaves_and_a_rack_is_a_set_of_them() {
    let text = include_str!("../../../../config/examples/topology-rails.toml");
    let file = TopologyFile::parse(text, "topology.toml").expect("the example is right");
    let topology = Topology::from_file(&file).expect("checked");
    assert_eq!(topology.rack(HostId(0)), topology.rack(HostId(1)));
    assert_eq!(topology.port_of(HostId(0), 2), port(0, 1));
    assert_eq!(topology.route(port(0, 1), port(1, 1), 0).links().len(), 2);
    // From one rail to the other over the slower of the two links.
    let route = topology.route(port(0, 0), port(1, 1), 1);
    assert_eq!(route.links().iter().map(|link| topology.rates()[link.index()] / 1e9).fold(1e9, f64::min), 200.0);
}

#[test]
fn every_path_is_a_chain_and_no_two_are_the_same() {
    let topology = Topology::clos(&three_tiers()).expect("makes sense");
    let hosts = topology.host_count() as u32;
    for (a, b) in (0..hosts).flat_map(|a| (0..hosts).map(move |b| (a, b))).filter(|(a, b)| a != b) {
        let (from, to) = (port(a, 0), port(b, 1));
        let count = topology.path_count(from, to);
        let expected = match (
            topology.rack(from.host) == topology.rack(to.host),
            topology.pod(from.host) == topology.pod(to.host),
        ) {
            (true, _) => 1,
            (false, true) => 2,
            (false, false) => 6,
        };
        assert_eq!(count, expected, "{a} {b}");
        let routes: Vec<_> = (0..count).map(|path| topology.route(from, to, path).links().to_vec()).collect();
        for (i, route) in routes.iter().enumerate() {
            assert!(routes[..i].iter().all(|other| other != route), "{a} {b}: path {i} twice");
            let (up, down) = route.split_at(route.len() / 2);
            assert!(up.iter().all(|link| link.0 % 2 == 0) && down.iter().all(|link| link.0 % 2 == 1), "{route:?}");
            // The way back is the same links in the other direction.
            let back: Vec<_> =
                topology.route(to, from, i as u32).links().iter().rev().map(|link| link.reverse()).collect();
            assert_eq!(&back, route);
        }
    }
}

#[test]
fn every_link_is_used_and_counted_once() {
    let topology = Topology::clos(&three_tiers()).expect("makes sense");
    let mut used = vec![false; topology.link_count()];
    let hosts = topology.host_count() as u32;
    for (a, b) in (0..hosts).flat_map(|a| (0..hosts).map(move |b| (a, b))).filter(|(a, b)| a != b) {
        for (nic, path) in (0..2).flat_map(|nic| (0..6).map(move |path| (nic, path))) {
            topology.route(port(a, nic), port(b, nic), path).links().iter().for_each(|link| used[link.index()] = true);
        }
    }
    assert!(used.iter().all(|used| *used));
    assert_eq!(used.len(), 2 * (12 * 2 + 6 * 2 + 3 * 2 * 3));
}

#[test]
fn numbers_that_make_no_network_are_refused() {
    for wrong in [
        Clos { spines_per_pod: 0, ..three_tiers() },
        Clos { cores_per_spine: 0, ..three_tiers() },
        Clos { nics_per_host: 0, ..three_tiers() },
        Clos { hosts_per_rack: u32::MAX, ..three_tiers() },
    ] {
        assert!(matches!(Topology::clos(&wrong), Err(TopologyError::Contradiction(_))), "{wrong:?}");
    }
}
