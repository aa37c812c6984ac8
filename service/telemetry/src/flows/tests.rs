//! Counts of flows, and those that stay when they end.

use std::time::Duration;

use mccs_model::path::{FlowPath, PortRange};

use super::*;

fn name(peer: &str, path: &str, to: u32) -> FlowName {
    let (peer, path) = (peer.into(), path.into());
    FlowName { links: 1, epoch: Some(0), channel: 0, from: 0, to, sends: true, peer, transport: None, path }
}

#[test]
fn what_flows_have_carried_stays_when_they_end() {
    let table = Arc::new(FlowTable::default());
    let meters: Vec<_> = (0..4).map(|to| table.begin(name("b", if to < 2 { "x" } else { "y" }, to))).collect();
    for (bytes, meter) in (1..).zip(&meters) {
        (0..10).for_each(|_| meter.count(bytes));
    }
    let carried = || table.paths().iter().map(|path| (path.bytes, path.messages)).collect::<Vec<_>>();
    assert_eq!(carried(), [(30, 20), (70, 20)]);
    assert_eq!(table.paths().iter().map(|path| path.flows).collect::<Vec<_>>(), [2, 2]);
    let (flows, more) = table.flows(3);
    assert_eq!((flows.len(), more, flows[1].bytes, flows[1].name.to), (3, 1, 20, 1));
    drop(meters);
    assert_eq!(carried(), [(30, 20), (70, 20)]);
    assert!(table.paths().iter().all(|path| path.flows == 0));
    assert_eq!(table.flows(10), (Vec::new(), 0));
}

#[test]
fn a_flow_that_goes_elsewhere_leaves_what_it_has_carried() {
    let table = Arc::new(FlowTable::default());
    let meter = table.begin(name("b", "x", 1));
    meter.count(5);
    meter.moved("x");
    meter.count(2);
    meter.moved("y");
    meter.count(30);
    let carried = || {
        let paths = table.paths().into_iter();
        paths.map(|path| (path.path, path.flows, path.bytes, path.messages)).collect::<Vec<_>>()
    };
    assert_eq!(carried(), [("x".into(), 0, 7, 2), ("y".into(), 1, 30, 1)]);
    let (flows, _) = table.flows(1);
    assert_eq!((&*flows[0].name.path, flows[0].bytes, flows[0].messages), ("y", 30, 1));
    meter.moved("x");
    meter.count(1);
    drop(meter);
    assert_eq!(carried(), [("x".into(), 0, 8, 3), ("y".into(), 0, 30, 1)]);
}

#[test]
fn packets_are_counted_on_the_path_that_lost_them_also_when_connections_are_made_anew() {
    let table = Arc::new(FlowTable::default());
    let meter = table.begin(name("b", "x", 1));
    let stats = |segments, retransmits| WireStats { segments, retransmits, round_trip: Duration::from_micros(70) };
    meter.note_wire(stats(100, 5));
    meter.note_wire(stats(150, 5));
    let view = table.flows(1).0[0].wire;
    assert_eq!(view, WireView { segments: 150, retransmits: 5, round_trip_us: Some(70) });
    assert!(view.loss_percent().is_some_and(|percent| (percent - 10.0 / 3.0).abs() < 1e-9));
    meter.moved("y");
    // Another connection.
    meter.note_wire(stats(20, 1));
    let wires = || table.paths().into_iter().map(|path| (path.path, path.wire)).collect::<Vec<_>>();
    let wire = |segments, retransmits, round_trip_us| WireView { segments, retransmits, round_trip_us };
    assert_eq!(wires(), [("x".into(), wire(150, 5, None)), ("y".into(), wire(20, 1, Some(70)))]);
    drop(meter);
    assert_eq!(wires()[1].1, wire(20, 1, None));
    assert_eq!(wire(0, 0, None).loss_percent(), None);
}

#[test]
fn ports_of_flows_are_told_and_how_often_ways_were_left() {
    let table = Arc::new(FlowTable::default());
    let meter = table.begin(name("b", "x", 1));
    let told = || table.flows(1).0.pop().map(|flow| (flow.port, flow.paths_left));
    assert_eq!(told(), Some((None, 0)));
    for (port, paths_left) in [(Some("a:1"), 0), (None, 1), (None, 1), (Some("b:1"), 1), (Some("a:1"), 2)] {
        let port = port.map(str::to_owned);
        meter.goes_by(port.clone());
        assert_eq!(told(), Some((port, paths_left)));
    }
    let left = || table.paths().iter().map(|path| path.paths_left).collect::<Vec<_>>();
    assert_eq!(left(), [2]);
    drop(meter);
    assert_eq!((told(), left()), (None, vec![2]));
}

#[test]
fn what_a_flow_may_send_is_told_while_it_is_held_to_it() {
    let table = Arc::new(FlowTable::default());
    let meter = table.begin(name("b", "x", 1));
    let allotted = || table.flows(1).0[0].allotted_bps;
    assert_eq!(allotted(), None);
    meter.allot(Some(7));
    assert_eq!(allotted(), Some(7));
    meter.allot(Some(0));
    assert_eq!(allotted(), Some(1), "next to nothing is not what it likes");
    meter.allot(None);
    assert_eq!(allotted(), None);
}

#[test]
fn ever_new_paths_do_not_fill_the_table() {
    let table = Arc::new(FlowTable::default());
    for path in 0..PATHS_MAX + 10 {
        table.begin(name("b", &path.to_string(), 1)).count(1);
    }
    let paths = table.paths();
    assert_eq!(paths.len(), PATHS_MAX + 1);
    assert_eq!(paths.iter().map(|path| path.bytes).sum::<u64>(), PATHS_MAX as u64 + 10);
    assert!(paths.iter().any(|path| path.path == OTHER_PATHS && path.messages == 10));
}

#[test]
fn what_a_path_has_carried_never_grows_less() {
    let table = Arc::new(FlowTable::default());
    let meters = ["x", "y", "z"].map(|path| table.begin(name("b", path, 1)));
    meters[0].count(5);
    meters[1].count(3);
    for path in 0..PATHS_MAX {
        drop(table.begin(name("b", &path.to_string(), 1)));
    }
    let carried = |path: &str| table.paths().into_iter().find(|view| view.path == path).map(|view| view.bytes);
    // There is no room for more by the time that they end or move.
    meters[1].moved("late");
    meters[1].count(4);
    let [x, y, z] = meters;
    drop((x, z));
    assert_eq!([carried("x"), carried("y"), carried("z"), carried("late")], [Some(5), Some(3), Some(0), None]);
    let before = carried(OTHER_PATHS);
    assert_eq!(table.flows(1).0[0].name.path, "late");
    drop(y);
    assert_eq!((carried(OTHER_PATHS), before), (Some(4), Some(4)));
}

#[test]
fn paths_are_called_by_what_steers_to_them() {
    assert_eq!(path_name(None), "-");
    assert_eq!(path_name(Some(&FlowPath::default())), "-");
    let ports = Some(PortRange { first: 20, last: 30 });
    let path = FlowPath { source_ports: ports, dscp: Some(10), ..FlowPath::default() };
    assert_eq!(path_name(Some(&path)), "ports 20-30 dscp 10");
    let device = Some("mlx5_1:2".parse().expect("a device"));
    let by_device = FlowPath { device, ..path.clone() };
    assert_eq!(path_name(Some(&by_device)), "device mlx5_1:2 ports 20-30 dscp 10");
    // And by their names they are known.
    let preferred = FlowPath { priority: Some(2), ..FlowPath::default() };
    for path in [FlowPath::default(), path, by_device, preferred] {
        assert_eq!(path_called(&path_name(Some(&path))), Some(path));
    }
    for name in [OTHER_PATHS, "", "ports", "ports 1", "dscp x", "way 1"] {
        assert_eq!(path_called(name), None, "{name:?}");
    }
}
