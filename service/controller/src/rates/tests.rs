use mccs_config::TopologyFile;

use super::*;

const GBPS: u64 = 1_000_000_000;

fn sent(peer: &str, path: &str, bytes: u64) -> PathView {
    let (peer, path) = (peer.to_owned(), path.to_owned());
    PathView {
        peer,
        path,
        sends: true,
        flows: 1,
        bytes,
        messages: 1,
        paths_left: 0,
        wire: mccs_telemetry::flows::WireView::default(),
    }
}

/// Paths of what was told, by their steering's name.
fn named(rates: &HostRates) -> Vec<(String, String, u64)> {
    let name = |path: &FlowPath| path_name(Some(&path.into()));
    rates.paths.iter().map(|path| (path.to.clone(), name(&path.path), path.bps)).collect()
}

#[test]
fn rates_are_told_when_they_are_otherwise_and_not_before() {
    let mut watch = RateWatch::default();
    let mut now = Instant::now();
    assert_eq!((watch.next_look(false, now), watch.next_look(true, now)), (None, Some(now)));
    let path = "ports 50000-50499 priority 2";
    // What was sent before it looked counts for nothing.
    assert_eq!(watch.look(&[sent("b", path, 1 << 40)], true, now), None);
    let mut bytes = 1 << 40;
    let mut second = |bps: u64, has_comms: bool| {
        now += LOOK_EVERY;
        assert_eq!(watch.next_look(has_comms, now), Some(now));
        bytes += bps / 8;
        let received = PathView { sends: false, ..sent("b", path, 3 * bytes) };
        let told = watch.look(&[sent("b", path, bytes), received], has_comms, now).map(|rates| named(&rates));
        (told, watch.next_look(false, now).is_some())
    };
    let told = |bps: u64| (Some(vec![("b".to_owned(), "ports 50000-50499".to_owned(), bps)]), true);
    assert_eq!(second(8 * GBPS, true), told(8 * GBPS));
    // Neither a little more nor a little less, and that nothing has changed is no news.
    assert_eq!([9, 7, 8].map(|rate| second(rate * GBPS, true)), [(None, true), (None, true), (None, true)]);
    assert_eq!(second(9 * GBPS + 80, true), told(9 * GBPS + 80));
    // It looks until it has told that nothing goes there, and then no more.
    assert_eq!(second(0, false), (Some(Vec::new()), false));
}

#[test]
fn paths_that_carry_most_are_told_apart_and_messages_are_bounded() {
    let now = Instant::now();
    let paths = PATHS_MAX as u64 + 10;
    let views = |seconds: u64| {
        let path = |path: u64| sent("b", &format!("dscp 1 ports {path}-{path}"), seconds * (path + 1) * GBPS / 8);
        let all = (0..paths).rev().map(path);
        // Two of one path but for the priority; one whose name is that of many; and one that sends next to nothing.
        let mixed = [sent("c", "priority 1", seconds * GBPS), sent("c", "-", seconds * GBPS)];
        all.chain(mixed).chain([sent("c", "other", seconds * GBPS), sent("d", "-", seconds)]).collect::<Vec<_>>()
    };
    let mut watch = RateWatch::default();
    assert_eq!(watch.look(&views(1), true, now), None);
    let rates = watch.look(&views(2), true, now + LOOK_EVERY).expect("news");
    assert_eq!(rates.check(), Ok(()));
    let mixed = rates.paths.iter().find(|path| path.to == "c").map(|path| path.bps);
    assert_eq!(mixed, Some(16 * GBPS));
    assert_eq!((rates.paths.len(), rates.paths[0].bps), (PATHS_MAX, paths * GBPS));
    // The eleven that carry least, what has no name of its own, and eight bits.
    assert_eq!(rates.others_bps, (1..=11).sum::<u64>() * GBPS + 8 * GBPS + 8);
    let name = "n".repeat(mccs_model::limits::NAME_BYTES_MAX);
    let device = Some("interface-name0:255".parse().expect("a device"));
    let ports = Some("60000-65535".parse().expect("ports"));
    let path = FlowPath { device, source_ports: ports, dscp: Some(63), priority: Some(u32::MAX) };
    let longest = PathRate { to: name, path, bps: u64::MAX };
    let paths = vec![longest.clone(); PATHS_MAX];
    let message = super::super::message::AgentMessage::Rates { rates: HostRates { paths, others_bps: u64::MAX } };
    assert!(message.encode().is_ok());
    assert!(HostRates { paths: vec![longest.clone(); PATHS_MAX + 1], others_bps: 0 }.check().is_err());
    assert!(HostRates { paths: vec![PathRate { to: String::new(), ..longest }], others_bps: 0 }.check().is_err());
}

fn rate(to: &str, path: &str, bps: u64) -> PathRate {
    PathRate { to: to.into(), path: (&path_called(path).expect("a path")).into(), bps }
}

/// What is seen of a network when hosts have told this.
fn seen(text: &str, told: &[(&str, PathRate)]) -> RatesView {
    let topology = Topology::from_file(&TopologyFile::parse(text, "t").expect("right")).expect("a network");
    let hosts = (0..topology.host_count() as u32).map(HostId);
    let hosts = hosts.map(|host| (topology.host_name(host).to_owned(), host)).collect();
    let mut rates = ClusterRates::default();
    for (from, rate) in told {
        rates.0.entry(Name::new(from).expect("a name")).or_default().paths.push(rate.clone());
    }
    rates.view(&topology, &hosts, topology.rates())
}

fn links(view: &RatesView) -> Vec<(&str, &str, u64, u64)> {
    view.links.iter().map(|link| (&*link.from, &*link.to, link.bps / GBPS, link.capacity_bps / GBPS)).collect()
}

#[test]
fn links_carry_what_is_known_to_cross_them() {
    let text = include_str!("../../../../config/examples/topology.toml");
    let steered = "ports 50500-50999";
    let view = seen(
        text,
        &[
            ("host-a", rate("host-c", steered, 30 * GBPS)),
            ("host-b", rate("host-d", steered, 8 * GBPS)),
            // Over which spine nobody knows; and what stays below its leaf.
            ("host-b", rate("host-c", "-", 4 * GBPS)),
            ("host-a", rate("host-b", "-", 2 * GBPS)),
            ("host-a", rate("host-x", steered, GBPS)),
        ],
    );
    let expected = [
        ("leaf0", "spine1", 38, 50),
        ("spine1", "leaf1", 38, 50),
        ("leaf1", "host-c", 34, 100),
        ("host-a", "leaf0", 32, 100),
        ("host-b", "leaf0", 12, 100),
        ("leaf1", "host-d", 8, 100),
        ("leaf0", "host-b", 2, 100),
    ];
    assert_eq!(links(&view), expected);
    let path = |rate: &PathRateView| (rate.from.clone(), rate.path.clone(), rate.capacity_bps.map(|bps| bps / GBPS));
    let found: Vec<_> = view.paths.iter().map(path).collect();
    let expected = [
        ("host-a", "spine1", Some(50)),
        ("host-b", "spine1", Some(50)),
        ("host-b", "hash", Some(100)),
        ("host-a", "hash", Some(100)),
        ("host-a", "spine1", None),
    ];
    assert_eq!(found, expected.map(|(from, way, capacity)| (from.to_owned(), way.to_owned(), capacity)));
}

#[test]
fn hosts_of_several_nics_are_known_by_what_flows_leave_by() {
    let nic = |rail: u32| {
        let devices = [2 * rail, 2 * rail + 1];
        format!("{{ leaf = \"rail{rail}\", devices = {devices:?}, interface = \"eth{rail}\", rdma = \"mlx5_{rail}\" }}")
    };
    let rails = include_str!("../../../../config/examples/topology-rails.toml");
    let (head, _) = rails.rsplit_once("nic = ").expect("the second host's");
    let text = format!("{head}nic = [{}, {}]\n", nic(0), nic(1));
    // Over RDMA the counterpart takes it in; over TCP nobody knows by which NIC it comes.
    let view = seen(&text, &[("host-a", rate("host-b", "device mlx5_1", 9 * GBPS))]);
    assert_eq!(links(&view), [("host-a NIC 1", "rail1", 9, 100), ("rail1", "host-b NIC 1", 9, 200)]);
    let view = seen(&text, &[("host-a", rate("host-b", "device eth1 dscp 8", 9 * GBPS))]);
    assert_eq!(links(&view), [("host-a NIC 1", "rail1", 9, 100)]);
    let view = seen(&text, &[("host-a", rate("host-b", "dscp 8", 9 * GBPS))]);
    assert_eq!((links(&view).len(), view.paths[0].capacity_bps), (0, None));
}

#[test]
fn what_the_operator_is_shown_is_bounded() {
    let text = include_str!("../../../../config/examples/topology.toml");
    let told: Vec<_> = (0..SHOWN_MAX as u64 + 5).map(|bps| ("host-a", rate("host-c", "-", bps))).collect();
    let view = seen(text, &told);
    assert_eq!((view.paths.len(), view.more_paths, view.paths[0].bps), (SHOWN_MAX, 5, SHOWN_MAX as u64 + 4));
}
