//! What operators have chosen and said stays, until they say otherwise.

use mccs_config::Rate;
use mccs_config::change::StrategyChange;
use mccs_config::service::FlowPath;

use super::bed::{Bed, name, policy, text};
use crate::answer::{ControllerAnswer, ControllerRequest, Standing};
use crate::links::LinkState;
use crate::state::GRACE;
use mccs_model::CommId;

const SPINES: [&str; 2] = ["20000-20099", "20100-20199"];

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
fn ports(bed: &Bed, comm: &CommId) -> Vec<u16> {
    bed.chosen(comm).paths.iter().filter_map(|path| path.source_ports.map(|ports| ports.first)).collect()
}

#[test]
fn what_was_chosen_by_hand_stays_and_others_make_room_for_it() {
    let mut bed = Bed::new("ffa");
    let comms = [bed.begin_wide("t"), bed.begin("u", &[("host-b", &[0]), ("host-d", &[1])])];
    bed.run();
    bed.change_by_hand(&comms[0], over(0));
    bed.run();
    assert_eq!(bed.chosen(&comms[0]).epoch, 2);
    let view = bed.show();
    assert_eq!(view.communicators[0].state, Standing::Pinned);
    assert!(view.communicators[0].strategy.flows.iter().all(|flow| flow.way == "spine0"), "{view:?}");
    // All that the other has between racks goes over the spine that is left.
    assert_eq!(ports(&bed, &comms[1]), [20_100]);
    let request = ControllerRequest::Diff { name: "e.toml".into(), text: "[policy]\nname = \"ecmp\"\n".into() };
    let Ok(ControllerAnswer::Diff(diff)) = bed.answer(request) else { panic!("no diff") };
    assert_eq!(
        (diff.communicators[0].changes, diff.communicators[0].is_pinned, diff.communicators[1].changes),
        (false, true, true)
    );
    assert_eq!(diff.communicators[0].after.as_ref(), Ok(&diff.communicators[0].before));
    // Neither another policy, nor who comes, nor another controller moves it.
    bed.controller.files(None, Some(policy("ecmp")), bed.now);
    bed.begin_wide("v");
    bed.run();
    bed.restart_controller(2, policy("pfa"));
    bed.run();
    assert_eq!((bed.chosen(&comms[0]).epoch, ports(&bed, &comms[0])), (2, vec![20_000]));
    bed.unpin(&comms[0]);
    bed.run();
    assert_eq!((bed.chosen(&comms[0]).epoch, &bed.show().communicators[0].state), (3, &Standing::AsDecided));
    assert!(bed.history().iter().any(|entry| entry.why.contains("was unpinned")), "{:?}", bed.history());
}

#[test]
fn what_is_pinned_to_a_link_that_is_down_stays_there_and_is_shown() {
    let mut bed = Bed::new("ffa");
    let comms = [bed.begin_wide("t"), bed.begin_wide("u")];
    bed.run();
    bed.change_by_hand(&comms[0], over(1));
    bed.run();
    assert!(bed.show().communicators[0].not_enforced.is_empty());
    let more = bed.answer(link(LinkState::Rate(Rate::mbit(10_000_000)))).unwrap_err();
    assert!(more.contains("says the topology, not 10"), "{more}");
    bed.answer(link(LinkState::Down)).unwrap();
    let view = bed.show();
    assert_eq!((bed.chosen(&comms[0]).epoch, ports(&bed, &comms[1])), (2, vec![20_000]));
    let told = &view.communicators[0].not_enforced;
    assert!(told.iter().any(|what| what.contains("spine1") && what.contains("pinned")), "{told:?}");
    assert!(view.communicators[1].not_enforced.is_empty());
}

/// Caps and shares of its tenant hold for a pinned strategy too, on the ways that it has.
#[test]
fn shares_are_of_the_ways_that_a_pinned_strategy_has() {
    let mut bed = Bed::new("ffa");
    let comms = [bed.begin_wide("t"), bed.begin_wide("u")];
    bed.run();
    comms.iter().for_each(|comm| bed.change_by_hand(comm, over(0)));
    let rules =
        "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"t\"\nweight = 3\n[[tenant]]\nname = \"u\"\nweight = 1\n";
    bed.controller.files(None, Some(text("policy.toml", rules)), bed.now);
    bed.run();
    // In rank order every host sends to another rack; both tenants' flows meet on the links to one spine.
    let view = bed.show();
    let allotted =
        |comm: usize| view.communicators[comm].paces.iter().map(|(_, pace)| pace.allotted_bps()).sum::<u64>();
    let ratio = allotted(0) as f64 / allotted(1) as f64;
    assert!((ratio - 3.0).abs() < 0.01, "{ratio}: {:?}", view.communicators);
}

#[test]
fn what_was_said_of_links_outlives_controllers() {
    let mut bed = Bed::new("ffa");
    let comm = bed.begin("t", &[("host-b", &[0, 1]), ("host-c", &[2, 3])]);
    bed.run();
    bed.answer(link(LinkState::Down)).unwrap();
    let epoch = bed.chosen(&comm).epoch;
    let expected = vec![("leaf0".to_owned(), "spine1".to_owned(), LinkState::Down)];
    for life in 2..4 {
        bed.restart_controller(life, policy("ffa"));
        bed.run();
        assert_eq!((bed.show().links, bed.chosen(&comm).epoch), (expected.clone(), epoch), "life {life}");
    }
    // A host is away while the link is mended: what it has kept is old, and it learns so.
    let away = name("host-d");
    bed.controller.lost(&away, bed.now);
    bed.host(&away).agent.lost(&name("host-a"));
    bed.pass(GRACE);
    bed.answer(link(LinkState::Up)).unwrap();
    bed.controller.met(&away, bed.now);
    bed.run();
    assert!(bed.show().links.is_empty());
    let others = ["host-b", "host-c"].map(name);
    bed.restart_controller(4, policy("ffa"));
    for host in &others {
        bed.controller.lost(host, bed.now);
        bed.to_agents.retain(|(to, _)| to != host);
    }
    bed.pass(GRACE);
    assert!(bed.show().links.is_empty(), "the host that was away has learnt it");
}
