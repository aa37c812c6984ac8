//! Channels and algorithm, as the policy says: those that arrive have them, and what communicators began with comes back. Rules without
//! effect are named.

use mccs_config::change::StrategyChange;
use mccs_config::service::AlgorithmChoice;

use super::fixture::{Fixture, name, policy, text};
use crate::config::cluster_config::Text;
use crate::inventory::Inventory;
use crate::messages::answer::{ControllerAnswer, ControllerRequest, Standing};
use mccs_model::CommId;

fn says(rest: &str) -> Text {
    text("policy.toml", &format!("[policy]\nname = \"ffa\"\n{rest}\n"))
}

fn has(fixture: &Fixture, comm: &CommId) -> (usize, AlgorithmChoice) {
    (fixture.chosen(comm).rings.len(), fixture.chosen(comm).algorithm)
}

#[test]
fn channels_and_algorithm_of_a_policy_end_with_it() {
    let mut fixture = Fixture::new("ffa");
    let first = fixture.begin_wide("t");
    fixture.run();
    assert_eq!(has(&fixture, &first), (2, AlgorithmChoice::Auto));
    fixture.controller.files(None, Some(says("channels = 3\nalgorithm = \"host_ring\"")), fixture.now);
    let second = fixture.begin("u", &[("host-c", &[0]), ("host-b", &[1])]);
    fixture.run();
    for comm in [&first, &second] {
        assert_eq!(has(&fixture, comm), (3, AlgorithmChoice::HostRing));
        let channels = fixture.chosen(comm).flows.iter().map(|flow| flow.channel);
        assert_eq!(channels.max(), Some(2), "each has its ways");
    }
    let view = fixture.show();
    assert!(view.communicators.iter().all(|comm| comm.state == Standing::AsDecided));
    assert_eq!(view.communicators[0].strategy.algorithm, AlgorithmChoice::HostRing);
    // An algorithm that is changed alone is a change.
    fixture.controller.files(None, Some(says("channels = 3\nalgorithm = \"tree\"")), fixture.now);
    fixture.run();
    assert_eq!(has(&fixture, &first), (3, AlgorithmChoice::Tree));
    // The controller that reads the file without the keys has not seen how they began.
    fixture.restart_controller(2, policy("ffa"));
    fixture.run();
    assert_eq!([&first, &second].map(|comm| has(&fixture, comm)), [(2, AlgorithmChoice::Auto); 2]);
    let made = fixture.changes_made();
    fixture.restart_controller(3, policy("ffa"));
    fixture.run();
    assert_eq!(fixture.changes_made(), made);
}

#[test]
fn a_strategy_by_hand_does_not_come_back_after_a_policy() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let rings = Some(vec![fixture.chosen(&comm).rings[0].clone(); 5]);
    let by_hand = StrategyChange { rings, algorithm: Some(AlgorithmChoice::Tree), ..StrategyChange::default() };
    fixture.change_by_hand(&comm, by_hand);
    fixture.controller.files(None, Some(says("channels = 1")), fixture.now);
    fixture.run();
    assert_eq!(has(&fixture, &comm), (5, AlgorithmChoice::Tree), "pinned");
    fixture.unpin(&comm);
    fixture.run();
    assert_eq!(has(&fixture, &comm), (1, AlgorithmChoice::Auto));
    fixture.controller.files(None, Some(policy("ffa")), fixture.now);
    fixture.run();
    assert_eq!(has(&fixture, &comm), (2, AlgorithmChoice::Auto));
}

#[test]
fn a_diff_shows_an_algorithm() {
    let mut fixture = Fixture::new("ffa");
    fixture.begin_wide("t");
    fixture.run();
    let Text { name, text } = says("algorithm = \"one_shot\"");
    let Ok(ControllerAnswer::Diff(diff)) = fixture.answer(ControllerRequest::Diff { name, text }) else {
        panic!("none")
    };
    assert!(diff.communicators[0].changes_strategy);
    let after = diff.communicators[0].after.as_ref().unwrap();
    assert_eq!(
        (diff.communicators[0].before.algorithm, after.algorithm),
        (AlgorithmChoice::Auto, AlgorithmChoice::OneShot)
    );
    assert_eq!(diff.communicators[0].before.rings, after.rings);
}

#[test]
fn rules_without_effect_are_named_before_and_after() {
    let mut fixture = Fixture::new("pfa");
    fixture.begin_wide("t");
    fixture.run();
    assert_eq!(fixture.show().not_enforced, [""; 0]);
    let Text { name, text } = says("[[tenant]]\nname = \"t\"\npriority = 1");
    let request = ControllerRequest::Diff { name: name.clone(), text: text.clone() };
    let Ok(ControllerAnswer::Diff(diff)) = fixture.answer(request) else { panic!("none") };
    let Ok(ControllerAnswer::Applied(applied)) = fixture.answer(ControllerRequest::Apply { name, text }) else {
        panic!()
    };
    assert!(diff.not_enforced[0].contains("policy ffa has none"), "{:?}", diff.not_enforced);
    assert_eq!((&applied.not_enforced, &fixture.show().not_enforced), (&diff.not_enforced, &diff.not_enforced));
}

#[test]
fn rules_for_unknown_tenants_are_named() {
    const WINDOW: &str = "[[window]]\ntenant = \"serch\"\nperiod = \"10ms\"\nlength = \"5ms\"\n";
    const RULES: &str = "[[tenant]]\nname = \"reserch\"\ncap = \"1Gbit/s\"\n[[tenant]]\nname = \"search\"\n\
                         [[reserve]]\ntenant = \"reserch\"\npaths = [\"spine0\"]\n";
    let mut fixture = Fixture::new("ffa");
    let serves = |fixture: &mut Fixture, host: &str, tenants: Option<&[&str]>| {
        let tenants = tenants.map(|tenants| tenants.iter().map(ToString::to_string).collect());
        fixture.set_inventory(&name(host), Inventory { tenants, ..Inventory::default() });
    };
    for host in ["host-a", "host-b", "host-c"] {
        serves(&mut fixture, host, Some(&["research", "search"]));
    }
    serves(&mut fixture, "host-d", None);
    let file = format!("[policy]\nname = \"pfa\"\n{RULES}{WINDOW}");
    fixture.controller.files(None, Some(text("policy.toml", &file)), fixture.now);
    fixture.run();
    // One has not said.
    let is_of_tenants = |what: &String| what.starts_with("rules for tenant");
    assert!(!fixture.show().not_enforced.iter().any(is_of_tenants));
    serves(&mut fixture, "host-d", Some(&["search"]));
    fixture.restart_controller(2, text("policy.toml", &file));
    fixture.run();
    let expected = [
        "rules for tenant \"reserch\": nobody is called so now; did you mean \"research\"?",
        "rules for tenant \"serch\": nobody is called so now; did you mean \"search\"?",
    ];
    let of_tenants = |all: Vec<String>| all.into_iter().filter(is_of_tenants).collect::<Vec<_>>();
    assert_eq!(of_tenants(fixture.show().not_enforced), expected);
    let ask = |name: &str| ControllerRequest::Diff { name: name.into(), text: file.clone() };
    let Ok(ControllerAnswer::Diff(diff)) = fixture.answer(ask("diff.toml")) else { panic!("no diff") };
    assert_eq!(of_tenants(diff.not_enforced), expected);
    let apply = |fixture: &mut Fixture| {
        let request = ControllerRequest::Apply { name: "apply.toml".into(), text: file.clone() };
        let Ok(ControllerAnswer::Applied(applied)) = fixture.answer(request) else { panic!("not applied") };
        of_tenants(applied.not_enforced)
    };
    assert_eq!(apply(&mut fixture), expected);
    // A tenant with a communicator is somebody, whoever was configured.
    fixture.begin_wide("serch");
    fixture.run();
    assert_eq!(apply(&mut fixture), expected[..1]);
}
