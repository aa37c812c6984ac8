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
    // Bytes sent before its first look count for nothing.
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
    let message = crate::messages::message::AgentMessage::Rates { rates: HostRates { paths, others_bps: u64::MAX } };
    assert!(message.encode().is_ok());
    assert!(HostRates { paths: vec![longest.clone(); PATHS_MAX + 1], others_bps: 0 }.check().is_err());
    assert!(HostRates { paths: vec![PathRate { to: String::new(), ..longest }], others_bps: 0 }.check().is_err());
}
