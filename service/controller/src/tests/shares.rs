//! Caps and shares are told to hosts; what a tenant leaves of its share others get.

use std::time::Duration;

use super::fixture::{Fixture, TWO_TENANTS, name, policy, text};
use mccs_model::CommId;

/// Every tenant's flows over `spine` from rack to rack, as what its hosts were told.
fn allotted(fixture: &mut Fixture) -> [u64; 2] {
    let view = fixture.show();
    TWO_TENANTS.map(|tenant| {
        let of_tenant = view.communicators.iter().filter(|comm| comm.tenant == tenant);
        let across = |from: &str, to: &str| (from < "host-c") && (to >= "host-c");
        let flows = of_tenant.flat_map(|comm| comm.paces.iter());
        flows
            .flat_map(|(from, pace)| pace.flows.iter().map(move |flow| (from, flow)))
            .filter(|(from, flow)| across(from, &flow.to))
            .map(|(_, flow)| flow.cap_bps)
            .sum()
    })
}

/// On every host, a communicator's flows have sent so much in a second, and something had to wait, or not.
fn send(fixture: &mut Fixture, comm: &CommId, bytes: u64, is_held: bool) {
    for host in fixture.hosts.values_mut() {
        let pace_use = host.pace_uses.get(comm).expect("a paced communicator");
        pace_use.sent(bytes);
        if is_held {
            pace_use.held();
        }
    }
}

#[test]
fn caps_and_shares_are_told_to_hosts_and_taken_back() {
    let mut fixture = Fixture::new("ffa");
    let comms = TWO_TENANTS.map(|tenant| fixture.begin_wide(tenant));
    fixture.run();
    assert!(fixture.hosts.values().all(|host| host.paces.is_empty()));
    let rules = "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"t\"\nweight = 3\nhost_cap = \"90Gbit/s\"\n[[tenant]]\nname = \"u\"\ncap = \"30Gbit/s\"\n";
    fixture.controller.files(None, Some(text("policy.toml", rules)), fixture.now);
    fixture.run();
    let [t, u] = allotted(&mut fixture);
    assert!((t as f64 / u as f64 - 3.0).abs() < 0.01, "{t} and {u}");
    let of_u = &fixture.hosts[&name("host-b")].paces[&comms[1]];
    assert_eq!(of_u.cap_bps, Some(30_000_000_000));
    // The operator's view of it there.
    let told = |fixture: &Fixture, comm: &CommId| fixture.hosts[&name("host-b")].pace_uses[comm].allotment();
    let [of_t, of_u] = [0, 1].map(|comm| told(&fixture, &comms[comm]).expect("told"));
    assert_eq!([of_t.weight_milli, of_u.weight_milli], [Some(3000), Some(1000)]);
    assert_eq!([of_t.flow_cap_bps, of_u.flow_cap_bps], [None, Some(30_000_000_000)]);
    assert_eq!([of_t.host_cap_bps, of_u.host_cap_bps], [Some(90_000_000_000), None]);
    assert!(of_t.allotted_bps > of_u.allotted_bps && of_u.allotted_bps.is_some(), "{of_t:?} {of_u:?}");
    assert!(fixture.show().communicators.iter().all(|comm| comm.not_enforced.is_empty()));
    // A host that was away is told again; what is over is taken back everywhere.
    let host = name("host-b");
    fixture.controller.lost(&host, fixture.now);
    fixture.host(&host).agent.lost(&name("host-a"));
    fixture.host(&host).paces.clear();
    fixture.controller.met(&host, fixture.now);
    fixture.run();
    assert!(!fixture.hosts[&host].paces[&comms[0]].is_free());
    fixture.controller.files(None, Some(policy("ffa")), fixture.now);
    fixture.run();
    assert!(fixture.hosts.values().flat_map(|host| host.paces.values()).all(|pace| pace.is_free()));
    assert_eq!(comms.each_ref().map(|comm| told(&fixture, comm)), [None, None]);
}

#[test]
fn a_tenant_gets_what_another_leaves_of_its_share_until_that_one_wants_it() {
    let mut fixture = Fixture::new("ffa");
    let comms = TWO_TENANTS.map(|tenant| fixture.begin_wide(tenant));
    let rules =
        "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"t\"\nweight = 3\n[[tenant]]\nname = \"u\"\nweight = 1\n";
    fixture.controller.files(None, Some(text("policy.toml", rules)), fixture.now);
    fixture.run();
    let shares = allotted(&mut fixture);
    let mut second = |is_held: [bool; 2]| {
        comms.iter().zip(is_held).for_each(|(comm, is_held)| send(&mut fixture, comm, 1, is_held));
        fixture.pass(Duration::from_secs(1));
        allotted(&mut fixture)
    };
    // Both want all they can get: nothing changes.
    assert_eq!((0..3).map(|_| second([true, true])).last(), Some(shares));
    // The first stops. That is not believed at once, and then a part is kept for it; it may still have its share.
    assert_eq!(second([false, true]), shares);
    let [t, u] = (0..3).map(|_| second([false, true])).last().expect("some");
    assert_eq!(t, shares[0]);
    let expected = shares[1] as f64 + 0.75 * shares[0] as f64;
    assert!((u as f64 / expected - 1.0).abs() < 0.01, "{u} is not {expected}");
    // It begins again: within two seconds all is as it was.
    second([true, true]);
    assert_eq!(second([true, true]), shares);
}
