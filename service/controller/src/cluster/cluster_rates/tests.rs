use mccs_config::TopologyFile;
use mccs_telemetry::flows::path_called;

use super::*;

const GBPS: u64 = 1_000_000_000;

fn rate(to: &str, path: &str, bps: u64) -> PathRate {
    PathRate { to: to.into(), path: (&path_called(path).expect("a path")).into(), bps }
}

/// Rates of a network when hosts have told this.
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
    let text = include_str!("../../../../../config/examples/topology.toml");
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
    let rails = include_str!("../../../../../config/examples/topology-rails.toml");
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
    let text = include_str!("../../../../../config/examples/topology.toml");
    let told: Vec<_> = (0..SHOWN_MAX as u64 + 5).map(|bps| ("host-a", rate("host-c", "-", bps))).collect();
    let view = seen(text, &told);
    assert_eq!((view.paths.len(), view.more_paths, view.paths[0].bps), (SHOWN_MAX, 5, SHOWN_MAX as u64 + 4));
}
