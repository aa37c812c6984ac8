//! Operators' acts are in the history, with who did them.

use std::time::Instant;

use super::fixture::{Fixture, applied, apply, name};
use crate::agent::{Agent, AgentOutput};
use crate::history::{EntryKind, Went};
use crate::links::LinkState;
use crate::messages::answer::{ControllerAnswer, ControllerRequest};
use crate::messages::message::{Act, AgentMessage, ControllerMessage};

#[test]
fn an_operator_rolls_back_a_policy_and_the_history_names_who_did_what() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let nothing = fixture.answer(ControllerRequest::Rollback).expect_err("there was none before");
    assert!(nothing.contains("mccsctl policy apply"), "{nothing}");
    fixture.answer(apply("ecmp")).expect("applied");
    fixture.answer(apply("ecmp")).expect("applied again, which changes nothing");
    let rolled_back = applied(fixture.answer(ControllerRequest::Rollback));
    assert_eq!((rolled_back.changed, fixture.show().policy.as_deref()), (vec![comm.to_string()], Some("ffa")));
    // Again: the one that was taken back.
    fixture.answer(ControllerRequest::Rollback).expect("applied");
    assert_eq!(fixture.show().policy.as_deref(), Some("ecmp"));
    // A refused request is an act as well; an act of another host's operator is told by that host.
    fixture.answer(ControllerRequest::Apply { name: "x.toml".into(), text: String::new() }).expect_err("it is empty");
    let act = Act { what: "drained".into(), by: "uid 0 (root): mccsctl drain".into(), went: Went::Done };
    let told = fixture.host(&name("host-c")).agent.acted(act);
    fixture.execute(&name("host-c"), told);
    fixture.run();
    let acts = fixture.history().into_iter().filter(|entry| entry.kind == EntryKind::Act);
    let acts: Vec<_> = acts.map(|entry| (entry.what, entry.by.expect("somebody did it"), entry.went)).collect();
    let last = &acts[acts.len() - 2..];
    assert!(matches!(&last[0], (what, by, Went::Failed(_)) if what == "policy of x.toml" && by.starts_with("uid 0")));
    assert_eq!(last[1], ("drained".into(), "uid 0 (root): mccsctl drain".into(), Went::Done));
    let begun =
        acts.iter().filter(|(what, ..)| what.starts_with("policy ffa of") || what.starts_with("policy ecmp of"));
    assert_eq!(begun.count(), 5, "{acts:?}");
    let ControllerAnswer::History(only) = fixture.answer(ControllerRequest::History { acts: true }).expect("told")
    else {
        panic!("something else");
    };
    assert!(only.len() == acts.len() && only.iter().all(|entry| entry.kind == EntryKind::Act));
}

#[test]
fn a_link_is_named_from_either_end() {
    let mut fixture = Fixture::new("ffa");
    fixture.begin_wide("t");
    fixture.run();
    let mut say = |lower: &str, upper: &str, state| {
        let request = ControllerRequest::Link { lower: lower.into(), upper: upper.into(), state };
        fixture.answer(request).map(|_| fixture.show().links)
    };
    let down = [("leaf0".to_owned(), "spine1".to_owned(), LinkState::Down)];
    assert_eq!(say("spine1", "leaf0", LinkState::Down).expect("noted"), down);
    assert_eq!(say("leaf0", "spine1", LinkState::Up).expect("noted"), []);
    assert!(say("leaf0", "host-a", LinkState::Down).is_ok());
    assert!(say("spine0", "spine1", LinkState::Down).unwrap_err().contains("in either order"));
}

/// A host that no controller has met keeps what its operators did, and tells it then.
#[test]
fn acts_on_a_host_wait_for_a_controller() {
    let mut agent = Agent::new(name("host-a"));
    let act = |number: usize| Act { what: format!("act {number}"), by: "uid 0".into(), went: Went::Done };
    (0..100).for_each(|number| assert_eq!(agent.acted(act(number)), None));
    let sync = ControllerMessage::Sync { life: 1, with_profiles: false };
    let told = agent.hear(&name("host-a"), sync, Instant::now()).expect("obeyed");
    let told = told.into_iter().filter_map(|output| match output {
        AgentOutput::Tell(AgentMessage::Acted(act)) => Some(act.what),
        _ => None,
    });
    let last: Vec<String> = (36..100).map(|number| format!("act {number}")).collect();
    assert_eq!(told.collect::<Vec<_>>(), last);
}
