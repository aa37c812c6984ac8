//! A policy is put in force for all communicators, or rolled back for all.

use super::fixture::{Fixture, TWO_TENANTS, applied, apply, name, refuse, text};
use crate::cluster::hosts::GRACE;
use crate::communicators::communicator::{ORDER_TIME, PAUSE, PAUSE_MAX};
use crate::history::Went;
use crate::messages::answer::{ControllerAnswer, ControllerRequest, HistoryView, Standing};
use mccs_model::{CommId, Refused};

fn apply_text(text: &str) -> ControllerRequest {
    ControllerRequest::Apply { name: "new.toml".into(), text: text.into() }
}

#[test]
fn hosts_that_are_away_are_named_when_a_policy_is_applied() {
    let mut fixture = Fixture::new("ffa");
    fixture.run();
    fixture.controller.lost(&name("host-d"), fixture.now);
    fixture.pass(GRACE);
    let Ok(ControllerAnswer::Applied(applied)) = fixture.answer(apply("ecmp")) else { panic!("not applied") };
    assert_eq!((applied.away, applied.failed), (vec!["host-d".to_owned()], vec![]));
}

#[test]
fn a_policy_that_a_host_refuses_is_rolled_back() {
    let mut fixture = Fixture::new("ffa");
    let comms = [fixture.begin_wide("t"), fixture.begin("u", &[("host-c", &[0]), ("host-b", &[1])])];
    fixture.run();
    let before: Vec<_> = comms.iter().map(|comm| fixture.chosen(comm).paths.clone()).collect();
    fixture.host(&name("host-c")).refuses = Some("no port is free".into());
    let answer = fixture.answer(apply("ecmp"));
    let Ok(ControllerAnswer::Applied(applied)) = answer else { panic!("{answer:?}") };
    assert!(applied.rolled_back && applied.failed[0].1.contains("no port"), "{applied:?}");
    assert_eq!(comms.iter().map(|comm| fixture.chosen(comm).paths.clone()).collect::<Vec<_>>(), before);
    let view = fixture.show();
    assert_eq!((view.policy.as_deref(), view.policy_file.as_deref()), (Some("ffa"), Some("policy.toml")));
    assert!(fixture.history().iter().any(|entry| entry.why.starts_with("rolled back")));
    // Once the host can, it is in force everywhere.
    refuse(&mut fixture, None);
    let answer = fixture.answer(apply("ecmp"));
    let Ok(ControllerAnswer::Applied(applied)) = answer else { panic!("{answer:?}") };
    assert!(!applied.rolled_back && applied.failed.is_empty() && applied.changed.len() == 2, "{applied:?}");
    assert!(comms.iter().all(|comm| fixture.chosen(comm).paths.is_empty()));
}

/// A tenant whose communicator cannot be changed, be it that it ends, or that it never calls what its last changes wait for.
#[test]
fn a_communicator_that_refuses_for_a_reason_of_its_own_keeps_its_strategy_and_others_change() {
    let mut fixture = Fixture::new("ffa");
    let [first, other, last] = [("host-a", "host-c"), ("host-b", "host-c"), ("host-d", "host-b")]
        .map(|(from, to)| fixture.begin("t", &[(from, &[0]), (to, &[1])]));
    fixture.run();
    fixture.host(&other.root).refuses = Some(Refused::own("8 changes wait for their first operation already"));
    let what = applied(fixture.answer(apply("ecmp")));
    let names = |comms: &[&CommId]| comms.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!((what.rolled_back, what.failed.len(), what.changed), (false, 0, names(&[&first, &last])));
    assert_eq!(what.kept.iter().map(|(comm, _)| comm.clone()).collect::<Vec<_>>(), names(&[&other]));
    assert_eq!([&first, &other, &last].map(|comm| fixture.chosen(comm).paths.is_empty()), [true, false, true]);
    let view = fixture.show();
    assert_eq!(view.policy.as_deref(), Some("ecmp"));
    let state = |name: &CommId| &view.communicators.iter().find(|comm| comm.name == name.to_string()).unwrap().state;
    assert!(matches!(state(&other), Standing::Refused(why) if why.contains("8 changes")), "{:?}", state(&other));
    assert_eq!([state(&first), state(&last)], [&Standing::AsDecided; 2]);
    let told = |entry: &HistoryView| matches!(&entry.went, Went::DoneBut(why) if why.contains(&other.to_string()) && why.contains("8 changes"));
    assert!(fixture.history().iter().any(told), "{:?}", fixture.history());
    // It is asked again and again, which does not fill the history; and once it can, it does as the others.
    let entries = fixture.history().len();
    fixture.pass(100 * PAUSE_MAX);
    assert_eq!((fixture.history().len(), fixture.chosen(&other).paths.is_empty()), (entries, false));
    refuse(&mut fixture, None);
    fixture.pass(PAUSE_MAX);
    assert!(fixture.chosen(&other).paths.is_empty());
    assert!(fixture.show().communicators.iter().all(|comm| comm.state == Standing::AsDecided));
}

#[test]
fn a_wrong_policy_is_rolled_back_whoever_else_cannot_change() {
    let mut fixture = Fixture::new("ffa");
    let comms = [("host-a", "host-c"), ("host-b", "host-c"), ("host-d", "host-b")]
        .map(|(from, to)| fixture.begin("t", &[(from, &[0]), (to, &[1])]));
    fixture.run();
    let before = comms.each_ref().map(|comm| fixture.chosen(comm).paths.clone());
    fixture.host(&comms[0].root).refuses = Some(Refused::own("ranks have left"));
    fixture.host(&comms[2].root).refuses = Some("flows cannot leave this host by device eth9".into());
    let what = applied(fixture.answer(apply("ecmp")));
    assert!(what.rolled_back && what.failed.len() == 1 && what.failed[0].1.contains("eth9"), "{what:?}");
    assert_eq!(comms.each_ref().map(|comm| fixture.chosen(comm).paths.clone()), before);
    assert_eq!(fixture.show().policy.as_deref(), Some("ffa"));
}

#[test]
fn a_communicator_that_is_asked_again_during_a_rollout_is_heard() {
    for (later, is_wrong) in [(Some("flows cannot leave this host by device eth9"), true), (None, false)] {
        let mut fixture = Fixture::new("ffa");
        let comms = [("host-a", "host-c"), ("host-d", "host-b")]
            .map(|(from, to)| fixture.begin("t", &[(from, &[0]), (to, &[1])]));
        fixture.run();
        let before = comms.each_ref().map(|comm| fixture.chosen(comm).paths.clone());
        fixture.host(&comms[0].root).refuses = Some(Refused::own("another change is being decided"));
        fixture.host(&comms[1].root).is_slow = true;
        let ticket = fixture.ask(apply("ecmp"));
        fixture.run();
        refuse(&mut fixture, later);
        fixture.pass(PAUSE);
        assert!(!fixture.answers.contains_key(&ticket), "the slow one is waited for");
        refuse(&mut fixture, None);
        fixture.host(&comms[1].root).is_slow = false;
        fixture.run();
        let what = applied(fixture.answers.remove(&ticket).expect("answered"));
        assert_eq!(
            (what.rolled_back, what.failed.len(), what.kept.len()),
            (is_wrong, usize::from(is_wrong), 0),
            "{what:?}"
        );
        assert!(what.changed.contains(&comms[1].to_string()), "{what:?}");
        assert_eq!(comms.each_ref().map(|comm| fixture.chosen(comm).paths.clone()) == before, is_wrong);
    }
}

#[test]
fn a_rollout_waits_for_communicators_that_were_there_within_bounds() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin("t", &[("host-a", &[0]), ("host-c", &[1])]);
    fixture.run();
    fixture.host(&name("host-d")).is_slow = true;
    fixture.host(&comm.root).is_slow = true;
    let ticket = fixture.ask(apply("ecmp"));
    fixture.run();
    assert_eq!(fixture.hosts[&comm.root].asked.len(), 1, "it is ordered");
    // Somebody comes, and makes no change that is ordered; others come and go all the time.
    let late = fixture.begin("u", &[("host-d", &[0]), ("host-b", &[1])]);
    fixture.run();
    let policy = text("policy.toml", "[policy]\nname = \"ffa\"\nrings = \"kept\"\n");
    fixture.host(&comm.root).is_slow = false;
    fixture.run();
    assert_eq!(applied(fixture.answers.remove(&ticket).expect("answered")).changed, [comm.to_string()]);
    // A host that was there and does not answer is waited for, but not for ever.
    fixture.controller.files(None, Some(policy), fixture.now);
    fixture.run();
    assert_eq!((fixture.hosts[&late.root].asked.len(), fixture.show().policy.as_deref()), (1, Some("ffa")));
    let is_pending = |fixture: &mut Fixture| {
        fixture.history().iter().any(|entry| entry.what.starts_with("policy") && entry.went == Went::Pending)
    };
    assert!(is_pending(&mut fixture));
    fixture.pass(ORDER_TIME);
    assert!(!is_pending(&mut fixture));
    assert_eq!(fixture.show().policy.as_deref(), Some("ffa"));
    assert!(!fixture.history().iter().any(|entry| entry.why.starts_with("rolled back")), "{:?}", fixture.history());
}

#[test]
fn paces_of_a_policy_that_is_rolled_back_are_taken_back() {
    let mut fixture = Fixture::new("ffa");
    let comms = TWO_TENANTS.map(|tenant| fixture.begin_wide(tenant));
    let capped = |policy: &str, cap: &str| {
        format!("[policy]\nname = {policy:?}\n[[tenant]]\nname = \"t\"\ncap = \"{cap}Gbit/s\"\n")
    };
    fixture.controller.files(None, Some(text("policy.toml", &capped("ffa", "30"))), fixture.now);
    fixture.run();
    let caps = |fixture: &Fixture| {
        fixture.hosts.values().map(|host| host.paces.get(&comms[0]).and_then(|pace| pace.cap_bps)).collect::<Vec<_>>()
    };
    assert_eq!(caps(&fixture), [Some(30_000_000_000); 4]);
    refuse(&mut fixture, Some("no port is free"));
    let what = applied(fixture.answer(apply_text(&capped("ecmp", "20"))));
    assert!(what.rolled_back && what.paced.is_empty(), "{what:?}");
    assert_eq!(caps(&fixture), [Some(30_000_000_000); 4]);
}
