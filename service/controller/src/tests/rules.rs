//! Channels and algorithm, as the policy says: those that arrive have them, and what communicators began with comes back. Rules without
//! effect are named.

use mccs_config::change::StrategyChange;
use mccs_config::service::Algorithm;

use super::bed::{Bed, name, policy, text};
use crate::answer::{ControllerAnswer, ControllerRequest, Standing};
use crate::basis::Text;
use crate::equipment::Equipment;
use mccs_model::CommId;

fn says(rest: &str) -> Text {
    text("policy.toml", &format!("[policy]\nname = \"ffa\"\n{rest}\n"))
}

fn has(bed: &Bed, comm: &CommId) -> (usize, Algorithm) {
    (bed.chosen(comm).rings.len(), bed.chosen(comm).algorithm)
}

#[test]
fn a_policy_says_how_many_and_how_and_one_that_does_not_gives_back_what_was() {
    let mut bed = Bed::new("ffa");
    let first = bed.begin_wide("t");
    bed.run();
    assert_eq!(has(&bed, &first), (2, Algorithm::Auto));
    bed.controller.files(None, Some(says("channels = 3\nalgorithm = \"host_ring\"")), bed.now);
    let second = bed.begin("u", &[("host-c", &[0]), ("host-b", &[1])]);
    bed.run();
    for comm in [&first, &second] {
        assert_eq!(has(&bed, comm), (3, Algorithm::HostRing));
        let channels = bed.chosen(comm).flows.iter().map(|flow| flow.channel);
        assert_eq!(channels.max(), Some(2), "each has its ways");
    }
    let view = bed.show();
    assert!(view.communicators.iter().all(|comm| comm.state == Standing::AsDecided));
    assert_eq!(view.communicators[0].strategy.algorithm, Algorithm::HostRing);
    // An algorithm that is changed alone is a change.
    bed.controller.files(None, Some(says("channels = 3\nalgorithm = \"tree\"")), bed.now);
    bed.run();
    assert_eq!(has(&bed, &first), (3, Algorithm::Tree));
    // The controller that reads the file without the keys has not seen how they began.
    bed.restart_controller(2, policy("ffa"));
    bed.run();
    assert_eq!([&first, &second].map(|comm| has(&bed, comm)), [(2, Algorithm::Auto); 2]);
    let made = bed.changes_made();
    bed.restart_controller(3, policy("ffa"));
    bed.run();
    assert_eq!(bed.changes_made(), made);
}

#[test]
fn what_was_changed_by_hand_is_not_what_comes_back() {
    let mut bed = Bed::new("ffa");
    let comm = bed.begin_wide("t");
    bed.run();
    let rings = Some(vec![bed.chosen(&comm).rings[0].clone(); 5]);
    let by_hand = StrategyChange { rings, algorithm: Some(Algorithm::Tree), ..StrategyChange::default() };
    bed.change_by_hand(&comm, by_hand);
    bed.controller.files(None, Some(says("channels = 1")), bed.now);
    bed.run();
    assert_eq!(has(&bed, &comm), (5, Algorithm::Tree), "pinned");
    bed.unpin(&comm);
    bed.run();
    assert_eq!(has(&bed, &comm), (1, Algorithm::Auto));
    bed.controller.files(None, Some(policy("ffa")), bed.now);
    bed.run();
    assert_eq!(has(&bed, &comm), (2, Algorithm::Auto));
}

#[test]
fn a_diff_shows_an_algorithm() {
    let mut bed = Bed::new("ffa");
    bed.begin_wide("t");
    bed.run();
    let Text { name, text } = says("algorithm = \"one_shot\"");
    let Ok(ControllerAnswer::Diff(diff)) = bed.answer(ControllerRequest::Diff { name, text }) else { panic!("none") };
    assert!(diff.communicators[0].changes_strategy);
    let after = diff.communicators[0].after.as_ref().unwrap();
    assert_eq!((diff.communicators[0].before.algorithm, after.algorithm), (Algorithm::Auto, Algorithm::OneShot));
    assert_eq!(diff.communicators[0].before.rings, after.rings);
}

#[test]
fn rules_without_effect_are_named_before_and_after() {
    let mut bed = Bed::new("pfa");
    bed.begin_wide("t");
    bed.run();
    assert_eq!(bed.show().not_enforced, [""; 0]);
    let Text { name, text } = says("[[tenant]]\nname = \"t\"\npriority = 1");
    let request = ControllerRequest::Diff { name: name.clone(), text: text.clone() };
    let Ok(ControllerAnswer::Diff(diff)) = bed.answer(request) else { panic!("none") };
    let Ok(ControllerAnswer::Applied(applied)) = bed.answer(ControllerRequest::Apply { name, text }) else { panic!() };
    assert!(diff.not_enforced[0].contains("policy ffa has none"), "{:?}", diff.not_enforced);
    assert_eq!((&applied.not_enforced, &bed.show().not_enforced), (&diff.not_enforced, &diff.not_enforced));
}

#[test]
fn rules_for_tenants_that_nobody_is_are_named() {
    const WINDOW: &str = "[[window]]\ntenant = \"serch\"\nperiod = \"10ms\"\nlength = \"5ms\"\n";
    const RULES: &str = "[[tenant]]\nname = \"reserch\"\ncap = \"1Gbit/s\"\n[[tenant]]\nname = \"search\"\n\
                         [[reserve]]\ntenant = \"reserch\"\npaths = [\"spine0\"]\n";
    let mut bed = Bed::new("ffa");
    let serves = |bed: &mut Bed, host: &str, tenants: Option<&[&str]>| {
        let tenants = tenants.map(|tenants| tenants.iter().map(ToString::to_string).collect());
        bed.equip(&name(host), Equipment { tenants, ..Equipment::default() });
    };
    for host in ["host-a", "host-b", "host-c"] {
        serves(&mut bed, host, Some(&["research", "search"]));
    }
    serves(&mut bed, "host-d", None);
    let file = format!("[policy]\nname = \"pfa\"\n{RULES}{WINDOW}");
    bed.controller.files(None, Some(text("policy.toml", &file)), bed.now);
    bed.run();
    // One has not said.
    let is_of_tenants = |what: &String| what.starts_with("rules for tenant");
    assert!(!bed.show().not_enforced.iter().any(is_of_tenants));
    serves(&mut bed, "host-d", Some(&["search"]));
    bed.restart_controller(2, text("policy.toml", &file));
    bed.run();
    let expected = [
        "rules for tenant \"reserch\": nobody is called so now; did you mean \"research\"?",
        "rules for tenant \"serch\": nobody is called so now; did you mean \"search\"?",
    ];
    let of_tenants = |all: Vec<String>| all.into_iter().filter(is_of_tenants).collect::<Vec<_>>();
    assert_eq!(of_tenants(bed.show().not_enforced), expected);
    let ask = |name: &str| ControllerRequest::Diff { name: name.into(), text: file.clone() };
    let Ok(ControllerAnswer::Diff(diff)) = bed.answer(ask("diff.toml")) else { panic!("no diff") };
    assert_eq!(of_tenants(diff.not_enforced), expected);
    let apply = |bed: &mut Bed| {
        let request = ControllerRequest::Apply { name: "apply.toml".into(), text: file.clone() };
        let Ok(ControllerAnswer::Applied(applied)) = bed.answer(request) else { panic!("not applied") };
        of_tenants(applied.not_enforced)
    };
    assert_eq!(apply(&mut bed), expected);
    // Who has a communicator is somebody, whoever was configured.
    bed.begin_wide("serch");
    bed.run();
    assert_eq!(apply(&mut bed), expected[..1]);
}
