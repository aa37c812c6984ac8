//! Hosts that are lost, slow, or of another mind, and what becomes of what was to be put in force meanwhile.

use std::time::Duration;

use super::fixture::{Fixture, name, policy, text};
use crate::cluster::hosts::SYNC_TIME;
use crate::communicators::communicator::{ORDER_TIME, PAUSE};
use crate::history::Went;
use crate::messages::answer::{Applied, ControllerAnswer, ControllerRequest};
use crate::messages::message::{AgentMessage, ControllerMessage};
use crate::messages::outbox::Ticket;
use mccs_model::{CommId, Refused};

fn ask_for_ecmp(fixture: &mut Fixture) -> Ticket {
    let text = "[policy]\nname = \"ecmp\"\n".to_owned();
    let ticket = fixture.ask(ControllerRequest::Apply { name: "new.toml".into(), text });
    fixture.run();
    ticket
}

/// Its result, if it has ended.
fn applied(fixture: &mut Fixture, ticket: Ticket) -> Option<Applied> {
    match fixture.answers.remove(&ticket)? {
        Ok(ControllerAnswer::Applied(applied)) => Some(applied),
        other => panic!("not applied: {other:?}"),
    }
}

fn refuse(fixture: &mut Fixture, comm: &CommId, refusal: Option<Refused>) {
    fixture.host(&comm.root).refuses = refusal;
}

fn begin_two(fixture: &mut Fixture) -> [CommId; 2] {
    let comms =
        [("host-a", "host-c"), ("host-d", "host-b")].map(|(from, to)| fixture.begin("t", &[(from, &[0]), (to, &[1])]));
    fixture.run();
    comms
}

/// Two hosts whose clocks differ: whoever comes later comes later, for this controller and the next.
#[test]
fn the_order_of_arrival_is_kept_whatever_hosts_clocks_show() {
    let mut fixture = Fixture::new("ffa");
    fixture.unix_ms = 1_000_000;
    let first = fixture.begin_wide("t");
    fixture.run();
    fixture.unix_ms = 1;
    let second = fixture.begin("u", &[("host-b", &[0]), ("host-d", &[1])]);
    fixture.run();
    let order = |fixture: &Fixture| {
        fixture.controller.reports().into_iter().map(|report| report.comm.clone()).collect::<Vec<_>>()
    };
    assert_eq!(order(&fixture), [first.clone(), second.clone()]);
    let made = fixture.changes_made();
    fixture.restart_controller(2, policy("ffa"));
    fixture.run();
    assert_eq!((order(&fixture), fixture.changes_made()), (vec![first.clone(), second], made));
    // Neither does who has ended leave its place to another.
    fixture.end(&first);
    fixture.unix_ms = 1;
    let third = fixture.begin("v", &[("host-a", &[0]), ("host-c", &[1])]);
    fixture.run();
    fixture.restart_controller(3, policy("ffa"));
    fixture.run();
    assert_eq!(order(&fixture).last(), Some(&third));
}

#[test]
fn an_end_that_was_not_told_is_told_when_a_host_reports_anew() {
    let mut fixture = Fixture::new("ffa");
    let [_, gone] = begin_two(&mut fixture);
    let host = fixture.host(&gone.root);
    host.comms.remove(&gone);
    host.agent.look([], 7);
    // The same life of the controller, which has forgotten nothing.
    let sync = ControllerMessage::Sync { life: 1, with_profiles: true };
    let now = fixture.now;
    let outputs = fixture.host(&gone.root).agent.hear(&name("host-a"), sync, now).unwrap();
    fixture.execute(&gone.root, outputs);
    fixture.run();
    assert_eq!(fixture.show().communicators.len(), 1);
}

#[test]
fn a_communicator_that_is_reported_no_more_ends_no_rollout_of_the_others() {
    let mut fixture = Fixture::new("ffa");
    let [there, gone] = begin_two(&mut fixture);
    fixture.end(&gone);
    fixture.to_controller.clear();
    let ticket = ask_for_ecmp(&mut fixture);
    assert!(!fixture.answers.contains_key(&ticket), "its host may have another strategy to report");
    fixture.pass(ORDER_TIME);
    let what = applied(&mut fixture, ticket).expect("nobody is waited for any longer");
    assert_eq!((what.rolled_back, what.changed), (false, vec![there.to_string()]));
    assert!(matches!(&what.kept[..], [(comm, _)] if *comm == gone.to_string()), "{:?}", what.kept);
}

#[test]
fn a_communicator_that_is_asked_again_is_waited_for_as_long_as_an_order_may_take() {
    for answers in [true, false] {
        let mut fixture = Fixture::new("ffa");
        let [again, slow] = begin_two(&mut fixture);
        let before = [&again, &slow].map(|comm| fixture.chosen(comm).paths.clone());
        refuse(&mut fixture, &again, Some(Refused::own("another change is being decided")));
        fixture.host(&slow.root).is_slow = true;
        let ticket = ask_for_ecmp(&mut fixture);
        fixture.host(&again.root).is_slow = true;
        fixture.pass(PAUSE);
        assert_eq!(fixture.hosts[&again.root].asked.len(), 1, "it is asked again");
        fixture.host(&slow.root).is_slow = false;
        fixture.run();
        assert!(!fixture.answers.contains_key(&ticket), "what it says may be that the policy is wrong");
        if !answers {
            fixture.pass(ORDER_TIME);
            let what = applied(&mut fixture, ticket).expect("answered");
            assert!(matches!(&what.kept[..], [(comm, _)] if *comm == again.to_string()), "{what:?}");
            continue;
        }
        refuse(&mut fixture, &again, Some("flows cannot leave this host by device eth9".into()));
        fixture.host(&again.root).is_slow = false;
        fixture.run();
        let what = applied(&mut fixture, ticket).expect("answered");
        assert!(what.rolled_back && what.failed.len() == 1, "{what:?}");
        assert_eq!([&again, &slow].map(|comm| fixture.chosen(comm).paths.clone()), before);
    }
}

#[test]
fn a_communicator_that_follows_a_policy_after_a_refusal_rolls_nothing_back() {
    let mut fixture = Fixture::new("ffa");
    let [again, slow] = begin_two(&mut fixture);
    refuse(&mut fixture, &again, Some("no port is free".into()));
    fixture.host(&slow.root).is_slow = true;
    let ticket = ask_for_ecmp(&mut fixture);
    refuse(&mut fixture, &again, None);
    // Something changes, upon which it is asked again.
    fixture.begin("u", &[("host-b", &[0]), ("host-c", &[1])]);
    fixture.pass(PAUSE);
    assert!(fixture.chosen(&again).paths.is_empty() && !fixture.answers.contains_key(&ticket));
    fixture.host(&slow.root).is_slow = false;
    fixture.run();
    let what = applied(&mut fixture, ticket).expect("answered");
    assert_eq!((what.rolled_back, what.failed.len(), what.changed.len()), (false, 0, 2), "{what:?}");
}

#[test]
fn a_host_that_falls_behind_again_and_again_does_not_keep_others_waiting() {
    let mut fixture = Fixture::new("ffa");
    fixture.run();
    let behind = |fixture: &mut Fixture| {
        fixture.controller.hear(&name("host-d"), AgentMessage::Behind, fixture.now);
        fixture.outputs();
        // It never reports.
        fixture.to_agents.retain(|(to, _)| *to != name("host-d"));
    };
    behind(&mut fixture);
    let comm = fixture.begin_wide("t");
    for _ in 0..3 {
        assert_eq!(fixture.chosen(&comm).epoch, 0, "it is waited for at first");
        fixture.pass(SYNC_TIME - Duration::from_secs(7));
        behind(&mut fixture);
    }
    fixture.pass(Duration::from_secs(3));
    assert_eq!(fixture.chosen(&comm).epoch, 1);
    // A host that reports at once does so as often as it likes, and nothing is decided without it meanwhile.
    fixture.begin("u", &[("host-b", &[0]), ("host-c", &[1])]);
    fixture.run();
    let made = fixture.changes_made();
    for _ in 0..50 {
        fixture.controller.hear(&name("host-b"), AgentMessage::Behind, fixture.now);
        fixture.pass(Duration::from_secs(1));
    }
    assert_eq!(fixture.changes_made(), made);
}

#[test]
fn orders_of_a_lost_host_are_given_up() {
    let mut fixture = Fixture::new("ffa");
    let [comm, _] = begin_two(&mut fixture);
    let lost = fixture.begin("t", &[("host-b", &[0]), ("host-c", &[1])]);
    fixture.host(&lost.root).is_slow = true;
    fixture.run();
    fixture.controller.files(None, Some(policy("ecmp")), fixture.now);
    fixture.run();
    fixture.controller.lost(&lost.root, fixture.now);
    fixture.run();
    let history = fixture.history();
    let is_order = |what: &str| what.starts_with("order");
    assert!(!history.iter().any(|entry| is_order(&entry.what) && entry.went == Went::Pending), "{history:?}");
    let told = |went: &Went| matches!(went, Went::Failed(why) if why.contains("host host-b was lost"));
    assert!(history.iter().any(|entry| told(&entry.went)), "{history:?}");
    assert!(fixture.chosen(&comm).paths.is_empty());
}

#[test]
fn dead_links_are_forgotten_with_the_host_that_said_so() {
    let mut fixture = Fixture::new("ffa");
    let path = mccs_config::service::FlowPath {
        source_ports: Some("50000-50499".parse().unwrap()),
        ..mccs_config::service::FlowPath::default()
    };
    let message = AgentMessage::Path { peer: "host-c".into(), path, answers: false };
    fixture.run();
    fixture.controller.hear(&name("host-b"), message, fixture.now);
    fixture.controller.lost(&name("host-b"), fixture.now);
    fixture.run();
    let history = fixture.history();
    let of_link = history.iter().find(|entry| entry.what == "link leaf0 spine0 taken for dead no more");
    assert!(of_link.is_some_and(|entry| entry.why.contains("host-b")), "{history:?}");
}

/// A communicator of all hosts under a policy, just read, that caps it and gives it 40 of 100 ms.
fn capped_in_a_window() -> (Fixture, CommId) {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let file = "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"t\"\ncap = \"3Gbit/s\"\n[[window]]\ntenant = \"t\"\nperiod = \"100ms\"\nlength = \"40ms\"\n";
    fixture.controller.files(None, Some(text("policy.toml", file)), fixture.now);
    (fixture, comm)
}

/// A host that hears no more what the time is keeps to its times while its clock is good enough, and to its caps
/// for ever.
#[test]
fn windows_end_when_the_clock_is_too_inexact() {
    let (mut fixture, comm) = capped_in_a_window();
    fixture.pass(Duration::from_secs(2));
    let name = fixture.hosts.keys().find(|name| **name != fixture.own).expect("another host").clone();
    let controller = fixture.own.clone();
    fixture.host(&name).agent.lost(&controller);
    let pace = |fixture: &Fixture| fixture.hosts[&name].paces[&comm].clone();
    assert!(pace(&fixture).window.is_some());
    // An eighth of 40 ms: clocks drift so far apart in 25 s.
    let error_max = Duration::from_millis(5);
    let mut waited = Duration::ZERO;
    while pace(&fixture).window.is_some() {
        let agent = &fixture.hosts[&name].agent;
        let wakes = agent.next_deadline().expect("wakes for it");
        assert!(agent.common_time(fixture.now).expect("known").1 <= error_max && wakes > fixture.now);
        waited += wakes - fixture.now;
        fixture.now = wakes;
        fixture.pace(&name);
    }
    assert!(waited >= Duration::from_secs(20) && waited <= Duration::from_secs(26), "{waited:?}");
    assert_eq!((pace(&fixture).cap_bps, fixture.hosts[&name].agent.next_deadline()), (Some(3_000_000_000), None));
}

/// The controller starts anew and goes before it has said what the time is: times that rest on the clock of its life before end as well.
#[test]
fn windows_end_when_nobody_tells_the_time() {
    let (mut fixture, comm) = capped_in_a_window();
    fixture.pass(Duration::from_secs(2));
    let name = fixture.hosts.keys().find(|name| **name != fixture.own).expect("another host").clone();
    let (controller, now) = (fixture.own.clone(), fixture.now);
    let agent = &mut fixture.host(&name).agent;
    let sync = ControllerMessage::Sync { life: u64::MAX, with_profiles: false };
    agent.hear(&controller, sync, now).expect("obeyed");
    agent.lost(&controller);
    fixture.pace(&name);
    let has_times = |fixture: &Fixture| fixture.hosts[&name].paces[&comm].window.is_some();
    assert!(has_times(&fixture), "it may be back at once");
    fixture.now = fixture.hosts[&name].agent.next_deadline().expect("wakes for it");
    fixture.pace(&name);
    assert!(!has_times(&fixture));
    let agent = &fixture.hosts[&name].agent;
    assert_eq!((fixture.hosts[&name].paces[&comm].cap_bps, agent.next_deadline()), (Some(3_000_000_000), None));
}

/// A host's sending, with caps and with times, before it knows what the time is.
#[test]
fn caps_hold_before_the_common_clock_is_known() {
    let (mut fixture, comm) = capped_in_a_window();
    let is_time = |(_, message): &(_, ControllerMessage)| matches!(message, ControllerMessage::Time { .. });
    // Nobody hears what the time is.
    while {
        fixture.controller.settle(fixture.now);
        fixture.outputs();
        fixture.to_agents.retain(|told| !is_time(told));
        fixture.step()
    } {}
    let paces = |fixture: &Fixture| {
        fixture.hosts.values().map(|host| host.paces.get(&comm).cloned().unwrap_or_default()).collect::<Vec<_>>()
    };
    assert!(paces(&fixture).iter().all(|pace| pace.cap_bps == Some(3_000_000_000) && pace.window.is_none()));
    fixture.pass(Duration::from_secs(2));
    assert!(paces(&fixture).iter().all(|pace| pace.cap_bps == Some(3_000_000_000) && pace.window.is_some()));
}
