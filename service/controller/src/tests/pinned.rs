//! Operators' choices and words stay, until they say otherwise.

use mccs_config::Rate;
use mccs_config::change::StrategyChange;
use mccs_config::service::FlowPath;

use super::fixture::{Fixture, name, policy, text};
use crate::cluster::hosts::GRACE;
use crate::links::LinkState;
use crate::messages::answer::{ControllerAnswer, ControllerRequest, Standing};
use mccs_model::CommId;

const SPINES: [&str; 2] = ["50000-50499", "50500-50999"];

/// Two channels in rank order, both over one spine.
fn over(spine: usize) -> StrategyChange {
    let path = FlowPath { source_ports: Some(SPINES[spine].parse().unwrap()), ..FlowPath::default() };
    let rings = vec![(0..8).collect(); 2];
    StrategyChange { rings: Some(rings), paths: Some(vec![path]), flows: Some(Vec::new()), ..StrategyChange::default() }
}

fn link(state: LinkState) -> ControllerRequest {
    ControllerRequest::Link { lower: "leaf0".into(), upper: "spine1".into(), state }
}

/// First ports of the ways that flows of a communicator have.
fn ports(fixture: &Fixture, comm: &CommId) -> Vec<u16> {
    fixture.chosen(comm).paths.iter().filter_map(|path| path.source_ports.map(|ports| ports.first)).collect()
}

#[test]
fn a_strategy_by_hand_stays_and_others_make_room_for_it() {
    let mut fixture = Fixture::new("ffa");
    let comms = [fixture.begin_wide("t"), fixture.begin("u", &[("host-b", &[0]), ("host-d", &[1])])];
    fixture.run();
    fixture.change_by_hand(&comms[0], over(0));
    fixture.run();
    assert_eq!(fixture.chosen(&comms[0]).epoch, 2);
    let view = fixture.show();
    assert_eq!(view.communicators[0].state, Standing::Pinned);
    assert!(view.communicators[0].strategy.flows.iter().all(|flow| flow.path == "spine0"), "{view:?}");
    // All that the other has between racks goes over the spine that is left.
    assert_eq!(ports(&fixture, &comms[1]), [50_500]);
    let request = ControllerRequest::Diff { name: "e.toml".into(), text: "[policy]\nname = \"ecmp\"\n".into() };
    let Ok(ControllerAnswer::Diff(diff)) = fixture.answer(request) else { panic!("no diff") };
    assert_eq!(
        (diff.communicators[0].changes, diff.communicators[0].is_pinned, diff.communicators[1].changes),
        (false, true, true)
    );
    assert_eq!(diff.communicators[0].after.as_ref(), Ok(&diff.communicators[0].before));
    // Neither another policy, nor who comes, nor another controller moves it.
    fixture.controller.files(None, Some(policy("ecmp")), fixture.now);
    fixture.begin_wide("v");
    fixture.run();
    fixture.restart_controller(2, policy("pfa"));
    fixture.run();
    assert_eq!((fixture.chosen(&comms[0]).epoch, ports(&fixture, &comms[0])), (2, vec![50_000]));
    fixture.unpin(&comms[0]);
    fixture.run();
    assert_eq!((fixture.chosen(&comms[0]).epoch, &fixture.show().communicators[0].state), (3, &Standing::AsDecided));
    assert!(fixture.history().iter().any(|entry| entry.why.contains("was unpinned")), "{:?}", fixture.history());
}

#[test]
fn a_strategy_pinned_to_a_link_that_is_down_stays_and_is_shown() {
    let mut fixture = Fixture::new("ffa");
    let comms = [fixture.begin_wide("t"), fixture.begin_wide("u")];
    fixture.run();
    fixture.change_by_hand(&comms[0], over(1));
    fixture.run();
    assert!(fixture.show().communicators[0].not_enforced.is_empty());
    let more = fixture.answer(link(LinkState::Rate(Rate::mbit(10_000_000)))).unwrap_err();
    assert!(more.contains("says the topology, not 10"), "{more}");
    fixture.answer(link(LinkState::Down)).unwrap();
    let view = fixture.show();
    assert_eq!((fixture.chosen(&comms[0]).epoch, ports(&fixture, &comms[1])), (2, vec![50_000]));
    let told = &view.communicators[0].not_enforced;
    assert!(told.iter().any(|what| what.contains("spine1") && what.contains("pinned")), "{told:?}");
    assert!(view.communicators[1].not_enforced.is_empty());
}

/// Caps and shares of its tenant hold for a pinned strategy too, on the ways that it has.
#[test]
fn shares_are_of_the_paths_that_a_pinned_strategy_has() {
    let mut fixture = Fixture::new("ffa");
    let comms = [fixture.begin_wide("t"), fixture.begin_wide("u")];
    fixture.run();
    comms.iter().for_each(|comm| fixture.change_by_hand(comm, over(0)));
    let rules =
        "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"t\"\nweight = 3\n[[tenant]]\nname = \"u\"\nweight = 1\n";
    fixture.controller.files(None, Some(text("policy.toml", rules)), fixture.now);
    fixture.run();
    // In rank order every host sends to another rack; both tenants' flows meet on the links to one spine.
    let view = fixture.show();
    let allotted =
        |comm: usize| view.communicators[comm].paces.iter().map(|(_, pace)| pace.allotted_bps()).sum::<u64>();
    let ratio = allotted(0) as f64 / allotted(1) as f64;
    assert!((ratio - 3.0).abs() < 0.01, "{ratio}: {:?}", view.communicators);
}

#[test]
fn link_overrides_outlive_controllers() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin("t", &[("host-b", &[0, 1]), ("host-c", &[2, 3])]);
    fixture.run();
    fixture.answer(link(LinkState::Down)).unwrap();
    let epoch = fixture.chosen(&comm).epoch;
    let expected = vec![("leaf0".to_owned(), "spine1".to_owned(), LinkState::Down)];
    for life in 2..4 {
        fixture.restart_controller(life, policy("ffa"));
        fixture.run();
        assert_eq!((fixture.show().links, fixture.chosen(&comm).epoch), (expected.clone(), epoch), "life {life}");
    }
    // A host is away while the link is mended: what it has kept is old, and it learns so.
    let away = name("host-d");
    fixture.controller.lost(&away, fixture.now);
    fixture.host(&away).agent.lost(&name("host-a"));
    fixture.pass(GRACE);
    fixture.answer(link(LinkState::Up)).unwrap();
    fixture.controller.met(&away, fixture.now);
    fixture.run();
    assert!(fixture.show().links.is_empty());
    let others = ["host-b", "host-c"].map(name);
    fixture.restart_controller(4, policy("ffa"));
    for host in &others {
        fixture.controller.lost(host, fixture.now);
        fixture.to_agents.retain(|(to, _)| to != host);
    }
    fixture.pass(GRACE);
    assert!(fixture.show().links.is_empty(), "the host that was away has learnt it");
}
