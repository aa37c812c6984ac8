//! Decisions of a policy reach communicators, and move no others than they must.

use std::time::Duration;

use mccs_config::change::StrategyChange;

use super::fixture::{Fixture, TOPOLOGY, TWO_TENANTS, apply, change_by, policy, text};
use crate::links::LinkState;
use crate::messages::answer::{ControllerAnswer, ControllerRequest, Standing};
use mccs_model::CommId;

#[test]
fn communicators_get_what_the_policy_decides_and_are_then_left_alone() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let chosen = fixture.chosen(&comm);
    assert_eq!(chosen.epoch, 1);
    // Hosts of a rack one after the other, channels beginning with different devices.
    assert_eq!(chosen.rings, [[0, 4, 2, 6, 1, 5, 3, 7], [4, 0, 6, 2, 5, 1, 7, 3]]);
    let ports: Vec<String> =
        chosen.paths.iter().filter_map(|path| path.source_ports.map(|ports| ports.to_string())).collect();
    assert_eq!(ports, ["50000-50499", "50500-50999"]);
    let crossing = |channel: u32| {
        let flows = chosen.flows.iter().filter(|flow| flow.channel == channel);
        let between = flows.filter(|flow| (&*flow.from, &*flow.to) == ("host-b", "host-c"));
        between.map(|flow| flow.path).next().unwrap()
    };
    assert_ne!(crossing(0), crossing(1), "both channels on one spine: {:?}", chosen.flows);
    // A flow that stays below its leaf goes no spine's way.
    let within = chosen.flows.iter().find(|flow| (&*flow.from, &*flow.to) == ("host-a", "host-b")).unwrap();
    assert_eq!(chosen.paths[within.path as usize].source_ports, None);
    assert_eq!(fixture.show().communicators[0].state, Standing::AsDecided);
    fixture.pass(Duration::from_secs(300));
    fixture.controller.files(None, Some(policy("ffa")), fixture.now);
    fixture.run();
    assert_eq!(fixture.changes_made(), 1, "{:?}", fixture.history());
}

#[test]
fn communicators_that_come_and_go_move_no_other() {
    let mut fixture = Fixture::new("ffa");
    let first = fixture.begin_wide("t");
    fixture.run();
    let before = fixture.chosen(&first).clone();
    let second = fixture.begin("u", &[("host-b", &[0]), ("host-d", &[1])]);
    fixture.run();
    assert_eq!((fixture.chosen(&first), fixture.chosen(&second).epoch), (&before, 1));
    fixture.end(&second);
    fixture.run();
    assert_eq!(fixture.show().communicators.len(), 1);
    assert_eq!(fixture.chosen(&first), &before);
}

#[test]
fn flows_leave_a_link_that_is_down_and_come_back() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let before = fixture.chosen(&comm).clone();
    let link = |state| ControllerRequest::Link { lower: "leaf0".into(), upper: "spine1".into(), state };
    let answer = fixture.answer(link(LinkState::Down));
    assert!(matches!(&answer, Ok(ControllerAnswer::Applied(applied)) if applied.changed.len() == 1), "{answer:?}");
    let ports: Vec<_> = fixture.chosen(&comm).paths.iter().filter_map(|path| path.source_ports).collect();
    assert_eq!(ports.iter().map(|ports| ports.first).collect::<Vec<_>>(), [50_000]);
    assert_eq!(fixture.show().links, [("leaf0".into(), "spine1".into(), LinkState::Down)]);
    fixture.answer(link(LinkState::Up)).unwrap();
    assert_eq!((&fixture.chosen(&comm).paths, &fixture.chosen(&comm).flows), (&before.paths, &before.flows));
    let wrong = ControllerRequest::Link { lower: "leaf0".into(), upper: "spine9".into(), state: LinkState::Down };
    assert!(fixture.answer(wrong).unwrap_err().contains("spine9"));
    // While something else is being put in force it counts as well, and goes with that.
    fixture.ask(apply("ecmp"));
    let answer = fixture.answer(link(LinkState::Down));
    assert!(matches!(answer, Ok(ControllerAnswer::Noted)), "{answer:?}");
    assert_eq!(fixture.show().links, [("leaf0".into(), "spine1".into(), LinkState::Down)]);
}

#[test]
fn rings_that_a_policy_keeps_stay_as_they_are() {
    let mut fixture = Fixture::new("ffa");
    fixture.run();
    fixture.controller.files(
        None,
        Some(text("policy.toml", "[policy]\nname = \"ffa\"\nrings = \"kept\"\n")),
        fixture.now,
    );
    let comm = fixture.begin_wide("t");
    fixture.run();
    assert_eq!(fixture.chosen(&comm).rings, [[0, 1, 2, 3, 4, 5, 6, 7]; 2]);
    let by_hand = vec![vec![1, 0, 2, 3, 4, 5, 6, 7]];
    let live = fixture.host(&comm.root).comms.get_mut(&comm).unwrap();
    change_by(live, StrategyChange { rings: Some(by_hand.clone()), ..StrategyChange::default() }, 5);
    fixture.look(&comm.root);
    fixture.run();
    assert_eq!((&fixture.chosen(&comm).rings, fixture.chosen(&comm).epoch), (&by_hand, 6));
}

#[test]
fn a_communicator_outside_the_topology_keeps_its_strategy() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin("t", &[("host-a", &[0]), ("host-z", &[1])]);
    fixture.run();
    assert_eq!(fixture.chosen(&comm).epoch, 0);
    let state = &fixture.show().communicators[0].state;
    assert!(matches!(state, Standing::Outside(why) if why.contains("host-z")), "{state:?}");
}

/// Tenants who begin and end things all the time do not keep the controller from what others say.
#[test]
fn many_communicators_that_come_and_go_are_decided_for_together_and_operators_at_once() {
    let mut fixture = Fixture::new("ffa");
    let comms: Vec<_> = (0..164).map(|_| fixture.begin_wide("t")).collect();
    fixture.pass(Duration::from_secs(1));
    let is_decided = |fixture: &mut Fixture, comm: &CommId| fixture.chosen(comm).epoch > 0;
    assert!(comms.iter().all(|comm| is_decided(&mut fixture, comm)));
    // All was decided a while ago.
    fixture.end(&comms[0]);
    fixture.run();
    let first = fixture.begin_wide("t");
    fixture.run();
    assert!(!is_decided(&mut fixture, &first));
    fixture.pass(Duration::from_millis(50));
    let second = fixture.begin_wide("t");
    fixture.pass(Duration::from_millis(40));
    assert!(!is_decided(&mut fixture, &first) && !is_decided(&mut fixture, &second));
    fixture.pass(Duration::from_millis(20));
    assert!(is_decided(&mut fixture, &first) && is_decided(&mut fixture, &second));
    let third = fixture.begin_wide("t");
    fixture.run();
    assert!(!is_decided(&mut fixture, &third));
    let Ok(ControllerAnswer::Applied(applied)) = fixture.answer(apply("ecmp")) else { panic!("not applied") };
    assert_eq!((applied.changed.len(), is_decided(&mut fixture, &third)), (comms.len() + 2, true));
}

#[test]
fn priorities_have_the_code_points_of_the_switches_classes() {
    let mut fixture = Fixture::new("priority");
    let [first, other] = TWO_TENANTS.map(|tenant| fixture.begin_wide(tenant));
    fixture.run();
    let rules = "[policy]\nname = \"priority\"\n[[tenant]]\nname = \"t\"\npriority = 2\n";
    fixture.controller.files(None, Some(text("policy.toml", rules)), fixture.now);
    fixture.run();
    let dscps =
        |fixture: &Fixture, comm: &CommId| fixture.chosen(comm).paths.iter().map(|path| path.dscp).collect::<Vec<_>>();
    assert_eq!(dscps(&fixture, &first), [None; 3]);
    assert!(fixture.show().communicators[0].not_enforced[0].contains("priority 2"));
    let topology = format!("{TOPOLOGY}[[class]]\npriority = 2\ndscp = 16\n");
    fixture.controller.files(Some(text("topology.toml", &topology)), None, fixture.now);
    fixture.run();
    assert_eq!((dscps(&fixture, &first), dscps(&fixture, &other)), (vec![Some(16); 3], vec![None; 3]));
    let view = fixture.show();
    assert!(view.communicators.iter().all(|comm| comm.not_enforced.is_empty()), "{view:?}");
    // They go the same ways as those of the other, which has none.
    let ways = |at: usize| view.communicators[at].strategy.flows.iter().map(|flow| &*flow.path).collect::<Vec<_>>();
    assert_eq!(ways(0), ways(1));
    assert!(ways(0).contains(&"spine0") && ways(0).contains(&"spine1"), "{view:?}");
}
