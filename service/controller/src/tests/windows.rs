//! Windows and bursts are on the common clock.

use std::time::Duration;

use super::fixture::{Fixture, Host, TWO_TENANTS, text};
use mccs_model::rate_limit::Pace;
use mccs_telemetry::profile::{Burst, Measured};

/// Under a policy: times to yield are where the profile says, and then where bursts are foreseen.
fn make_room_for_bursts(policy: &str) {
    let mut fixture = Fixture::new("ffa");
    let [high, low] = TWO_TENANTS.map(|tenant| fixture.begin_wide(tenant));
    fixture.run();
    let rules = format!("[policy]\nname = {policy:?}\n[[tenant]]\nname = \"t\"\npriority = 3\n");
    fixture.controller.files(None, Some(text("policy.toml", &rules)), fixture.now);
    fixture.pass(Duration::from_secs(1));
    assert!(fixture.hosts.values().all(|host| host.paces.is_empty()));
    let (period, busy) = (Duration::from_millis(100), Duration::from_millis(30));
    let measured = Measured { period, busy, began: fixture.now - Duration::from_millis(250) };
    fixture.host(&high.root).comms.get_mut(&high).unwrap().profile = Some(measured);
    fixture.look(&high.root);
    fixture.pace(&high.root);
    fixture.pass(Duration::from_secs(1));
    for host in fixture.hosts.values() {
        let [(window, cap_bps)] = host.paces[&low].yields[..] else { panic!("{:?}", host.paces) };
        assert!(host.paces.get(&high).is_none_or(Pace::is_free) && cap_bps >= 1_000_000);
        // It sends from 50 ms of the second on, with a margin at both ends.
        let open_at = |ms: u64| window.at(fixture.now + Duration::from_millis(1_000 + ms)).is_open;
        assert_eq!([40, 51, 70, 79, 90, 120].map(open_at), [false, true, true, true, false, false]);
    }
    // From then on its bursts are told one by one, by the host of its root.
    let watches = |host: &Host| host.pace_uses[&high].is_watched();
    let watching = fixture.hosts.iter().filter(|(_, host)| watches(host));
    assert_eq!(watching.map(|(name, _)| name).collect::<Vec<_>>(), [&high.root]);
    let begins = fixture.now + Duration::from_millis(60);
    fixture.host(&high.root).pace_uses[&high].foresee(Burst { begins, lasts: Duration::from_millis(100) });
    fixture.pace(&high.root);
    fixture.run();
    for host in fixture.hosts.values() {
        let [(window, _)] = host.paces[&low].yields[..] else { panic!("{:?}", host.paces) };
        let open_at = |ms: u64| window.at(fixture.now + Duration::from_millis(ms)).is_open;
        assert_eq!([55, 59, 100, 161, 165, 360].map(open_at), [false, true, true, true, false, false]);
    }
    // A communicator that foresees bursts, for which nobody makes room, tells nobody.
    fixture.host(&high.root).pace_uses[&low].foresee(Burst { begins, lasts: Duration::from_millis(1) });
    fixture.pace(&high.root);
    assert!(fixture.to_controller.is_empty(), "{:?}", fixture.to_controller);
    // It sends all the time: nobody knows when to yield.
    fixture.host(&high.root).comms.get_mut(&high).unwrap().profile = None;
    fixture.look(&high.root);
    fixture.pace(&high.root);
    fixture.pass(Duration::from_secs(1));
    assert!(fixture.hosts.values().flat_map(|host| host.paces.values()).all(|pace| pace.is_free()));
}

#[test]
fn windows_are_on_the_controllers_clock_on_every_host() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    let window = "period = \"100ms\"\noffset = \"10ms\"\nlength = \"40ms\"\n";
    let rules = format!("[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"t\"\n[[window]]\ntenant = \"t\"\n{window}");
    fixture.controller.files(None, Some(text("policy.toml", &rules)), fixture.now);
    fixture.run();
    fixture.pass(Duration::from_secs(10));
    let looks = (0..10).map(|tenth| fixture.now + Duration::from_millis(tenth * 10));
    let open: Vec<Vec<bool>> = looks
        .map(|at| fixture.hosts.values().map(|host| host.paces[&comm].window.unwrap().at(at).is_open).collect())
        .collect();
    assert!(open.iter().all(|hosts| hosts.len() == 4 && hosts.iter().all(|is_open| *is_open == hosts[0])), "{open:?}");
    assert_eq!(open.iter().filter(|hosts| hosts[0]).count(), 4, "{open:?}");
}

#[test]
fn communicators_yield_on_the_common_clock_while_one_sends() {
    make_room_for_bursts("yield");
}

#[test]
fn communicators_that_send_in_gaps_make_room_for_each_burst() {
    make_room_for_bursts("pfa_ts");
}
