//! Operators' views of tenants, paths and links.

use std::time::Duration;

use super::fixture::{Fixture, name, text};
use crate::links::LinkState;
use crate::messages::answer::{ControllerRequest, LinkRateView, RatesView};
use mccs_telemetry::flows::{PathView, WireView};

#[test]
fn tenants_of_a_policy_that_have_no_communicator_are_shown() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    assert_eq!(fixture.show().idle_tenants, [""; 0]);
    let window = "[[window]]\ntenant = \"tt\"\nperiod = \"10ms\"\nlength = \"5ms\"\n";
    let file = format!("[policy]\nname = \"pfa\"\n[[tenant]]\nname = \"t\"\ncap = \"1Gbit/s\"\n{window}");
    fixture.controller.files(None, Some(text("policy.toml", &file)), fixture.now);
    fixture.run();
    assert_eq!(fixture.show().idle_tenants, ["tt"]);
    fixture.end(&comm);
    fixture.run();
    assert_eq!(fixture.show().idle_tenants, ["t", "tt"]);
}

#[test]
fn rates_of_paths_and_links_are_shown_and_decide_nothing() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let before = fixture.chosen(&comm).clone();
    let host = name("host-b");
    let carry = |fixture: &mut Fixture, bytes: u64| {
        let (peer, path) = ("host-c".to_owned(), "ports 50000-50499".to_owned());
        fixture.host(&host).carried = vec![PathView {
            peer,
            path,
            sends: true,
            flows: 1,
            bytes,
            messages: 1,
            paths_left: 0,
            wire: WireView::default(),
        }];
    };
    let gigabytes = 1_000_000_000;
    for bytes in 0..4 {
        carry(&mut fixture, bytes * gigabytes);
        fixture.pass(Duration::from_secs(1));
    }
    let rates = fixture.show().rates;
    let [path] = &rates.paths[..] else { panic!("{rates:?}") };
    assert_eq!((&*path.from, &*path.to, &*path.path, path.bps), ("host-b", "host-c", "spine0", 8_000_000_000));
    let link = |link: &LinkRateView| (link.from.clone(), link.to.clone(), link.capacity_bps / 1_000_000_000);
    let links: Vec<_> = rates.links.iter().map(link).collect();
    let of = |from: &str, to: &str, gbps: u64| (from.to_owned(), to.to_owned(), gbps);
    assert!(links.len() == 4 && links.contains(&of("leaf0", "spine0", 50)), "{links:?}");
    assert!(links.contains(&of("host-b", "leaf0", 100)), "{links:?}");
    // Beside what the link carries now; nothing was decided for it, and the host that says no more has gone.
    let slow = LinkState::Rate("20Gbit/s".parse().unwrap());
    fixture.answer(ControllerRequest::Link { lower: "leaf0".into(), upper: "spine0".into(), state: slow }).unwrap();
    assert_eq!(fixture.show().rates.paths[0].capacity_bps, Some(20_000_000_000));
    fixture
        .answer(ControllerRequest::Link { lower: "leaf0".into(), upper: "spine0".into(), state: LinkState::Up })
        .unwrap();
    assert_eq!((&fixture.chosen(&comm).paths, &fixture.chosen(&comm).flows), (&before.paths, &before.flows));
    // Its flows are still: that is told once.
    fixture.pass(Duration::from_secs(3));
    assert_eq!((fixture.show().rates.paths, fixture.to_controller.len()), (Vec::new(), 0));
    carry(&mut fixture, 9 * gigabytes);
    fixture.pass(Duration::from_secs(1));
    assert_eq!(fixture.show().rates.paths.len(), 1);
    fixture.controller.lost(&host, fixture.now);
    fixture.run();
    assert_eq!(*fixture.show().rates, RatesView::default());
}
