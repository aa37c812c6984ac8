//! Hosts that are lost, slow, or of another mind, and what becomes of what was to be put in force meanwhile.

use std::time::Duration;

use super::bed::{Bed, name, policy, text};
use crate::answer::{Applied, ControllerAnswer, ControllerRequest};
use crate::history::Went;
use crate::message::{AgentMessage, ControllerMessage};
use crate::orders::{ORDER_TIME, PAUSE};
use crate::state::{SYNC_TIME, Ticket};
use mccs_model::{CommId, Refused};

fn ask_for_ecmp(bed: &mut Bed) -> Ticket {
    let text = "[policy]\nname = \"ecmp\"\n".to_owned();
    let ticket = bed.ask(ControllerRequest::Apply { name: "new.toml".into(), text });
    bed.run();
    ticket
}

/// What came of it, if it has ended.
fn applied(bed: &mut Bed, ticket: Ticket) -> Option<Applied> {
    match bed.answers.remove(&ticket)? {
        Ok(ControllerAnswer::Applied(applied)) => Some(applied),
        other => panic!("not applied: {other:?}"),
    }
}

fn refuse(bed: &mut Bed, comm: &CommId, refusal: Option<Refused>) {
    bed.host(&comm.root).refuses = refusal;
}

fn begin_two(bed: &mut Bed) -> [CommId; 2] {
    let comms =
        [("host-a", "host-c"), ("host-d", "host-b")].map(|(from, to)| bed.begin("t", &[(from, &[0]), (to, &[1])]));
    bed.run();
    comms
}

/// Two hosts whose clocks differ: whoever comes later comes later, for this controller and the next.
#[test]
fn who_came_first_is_known_whatever_hosts_clocks_show() {
    let mut bed = Bed::new("ffa");
    bed.unix_ms = 1_000_000;
    let first = bed.begin_wide("t");
    bed.run();
    bed.unix_ms = 1;
    let second = bed.begin("u", &[("host-b", &[0]), ("host-d", &[1])]);
    bed.run();
    let order = |bed: &Bed| bed.controller.reports().into_iter().map(|report| report.comm.clone()).collect::<Vec<_>>();
    assert_eq!(order(&bed), [first.clone(), second.clone()]);
    let made = bed.changes_made();
    bed.restart_controller(2, policy("ffa"));
    bed.run();
    assert_eq!((order(&bed), bed.changes_made()), (vec![first.clone(), second], made));
    // Neither does who has ended leave its place to another.
    bed.end(&first);
    bed.unix_ms = 1;
    let third = bed.begin("v", &[("host-a", &[0]), ("host-c", &[1])]);
    bed.run();
    bed.restart_controller(3, policy("ffa"));
    bed.run();
    assert_eq!(order(&bed).last(), Some(&third));
}

#[test]
fn what_has_ended_and_was_not_told_yet_is_told_when_all_is_reported_anew() {
    let mut bed = Bed::new("ffa");
    let [_, gone] = begin_two(&mut bed);
    let host = bed.host(&gone.root);
    host.comms.remove(&gone);
    host.agent.look([], 7);
    // The same life of the controller, which has forgotten nothing.
    let sync = ControllerMessage::Sync { life: 1, with_profiles: true };
    let now = bed.now;
    let outputs = bed.host(&gone.root).agent.hear(&name("host-a"), sync, now).unwrap();
    bed.carry_out(&gone.root, outputs);
    bed.run();
    assert_eq!(bed.show().communicators.len(), 1);
}

#[test]
fn a_communicator_of_which_no_more_is_reported_keeps_no_policy_from_the_others() {
    let mut bed = Bed::new("ffa");
    let [there, gone] = begin_two(&mut bed);
    bed.end(&gone);
    bed.to_controller.clear();
    let ticket = ask_for_ecmp(&mut bed);
    assert!(!bed.answers.contains_key(&ticket), "its host may have another strategy to report");
    bed.pass(ORDER_TIME);
    let what = applied(&mut bed, ticket).expect("nobody is waited for any longer");
    assert_eq!((what.rolled_back, what.changed), (false, vec![there.to_string()]));
    assert!(matches!(&what.kept[..], [(comm, _)] if *comm == gone.to_string()), "{:?}", what.kept);
}

#[test]
fn who_is_being_asked_again_is_waited_for_as_long_as_an_order_may_take() {
    for answers in [true, false] {
        let mut bed = Bed::new("ffa");
        let [again, slow] = begin_two(&mut bed);
        let before = [&again, &slow].map(|comm| bed.chosen(comm).paths.clone());
        refuse(&mut bed, &again, Some(Refused::own("another change is being decided")));
        bed.host(&slow.root).is_slow = true;
        let ticket = ask_for_ecmp(&mut bed);
        bed.host(&again.root).is_slow = true;
        bed.pass(PAUSE);
        assert_eq!(bed.hosts[&again.root].asked.len(), 1, "it is asked again");
        bed.host(&slow.root).is_slow = false;
        bed.run();
        assert!(!bed.answers.contains_key(&ticket), "what it says may be that the policy is wrong");
        if !answers {
            bed.pass(ORDER_TIME);
            let what = applied(&mut bed, ticket).expect("answered");
            assert!(matches!(&what.kept[..], [(comm, _)] if *comm == again.to_string()), "{what:?}");
            continue;
        }
        refuse(&mut bed, &again, Some("flows cannot leave this host by device eth9".into()));
        bed.host(&again.root).is_slow = false;
        bed.run();
        let what = applied(&mut bed, ticket).expect("answered");
        assert!(what.rolled_back && what.failed.len() == 1, "{what:?}");
        assert_eq!([&again, &slow].map(|comm| bed.chosen(comm).paths.clone()), before);
    }
}

#[test]
fn who_has_refused_a_policy_and_then_follows_it_does_not_take_it_back() {
    let mut bed = Bed::new("ffa");
    let [again, slow] = begin_two(&mut bed);
    refuse(&mut bed, &again, Some("no port is free".into()));
    bed.host(&slow.root).is_slow = true;
    let ticket = ask_for_ecmp(&mut bed);
    refuse(&mut bed, &again, None);
    // Something changes, upon which it is asked again.
    bed.begin("u", &[("host-b", &[0]), ("host-c", &[1])]);
    bed.pass(PAUSE);
    assert!(bed.chosen(&again).paths.is_empty() && !bed.answers.contains_key(&ticket));
    bed.host(&slow.root).is_slow = false;
    bed.run();
    let what = applied(&mut bed, ticket).expect("answered");
    assert_eq!((what.rolled_back, what.failed.len(), what.changed.len()), (false, 0, 2), "{what:?}");
}

#[test]
fn a_host_that_has_fallen_behind_again_and_again_does_not_keep_the_others_waiting() {
    let mut bed = Bed::new("ffa");
    bed.run();
    let behind = |bed: &mut Bed| {
        bed.controller.hear(&name("host-d"), AgentMessage::Behind, bed.now);
        bed.outputs();
        // It never reports.
        bed.to_agents.retain(|(to, _)| *to != name("host-d"));
    };
    behind(&mut bed);
    let comm = bed.begin_wide("t");
    for _ in 0..3 {
        assert_eq!(bed.chosen(&comm).epoch, 0, "it is waited for at first");
        bed.pass(SYNC_TIME - Duration::from_secs(7));
        behind(&mut bed);
    }
    bed.pass(Duration::from_secs(3));
    assert_eq!(bed.chosen(&comm).epoch, 1);
    // Who reports at once does so as often as it likes, and nothing is decided without it meanwhile.
    bed.begin("u", &[("host-b", &[0]), ("host-c", &[1])]);
    bed.run();
    let made = bed.changes_made();
    for _ in 0..50 {
        bed.controller.hear(&name("host-b"), AgentMessage::Behind, bed.now);
        bed.pass(Duration::from_secs(1));
    }
    assert_eq!(bed.changes_made(), made);
}

#[test]
fn orders_of_a_host_that_is_lost_are_under_way_no_more() {
    let mut bed = Bed::new("ffa");
    let [comm, _] = begin_two(&mut bed);
    let lost = bed.begin("t", &[("host-b", &[0]), ("host-c", &[1])]);
    bed.host(&lost.root).is_slow = true;
    bed.run();
    bed.controller.files(None, Some(policy("ecmp")), bed.now);
    bed.run();
    bed.controller.lost(&lost.root, bed.now);
    bed.run();
    let history = bed.history();
    let is_order = |what: &str| what.starts_with("order");
    assert!(!history.iter().any(|entry| is_order(&entry.what) && entry.went == Went::Pending), "{history:?}");
    let told = |went: &Went| matches!(went, Went::Failed(why) if why.contains("host host-b was lost"));
    assert!(history.iter().any(|entry| told(&entry.went)), "{history:?}");
    assert!(bed.chosen(&comm).paths.is_empty());
}

#[test]
fn links_that_were_found_dead_are_forgotten_with_who_said_so() {
    let mut bed = Bed::new("ffa");
    let path = mccs_config::service::FlowPath {
        source_ports: Some("20000-20099".parse().unwrap()),
        ..mccs_config::service::FlowPath::default()
    };
    let message = AgentMessage::Path { peer: "host-c".into(), path, answers: false };
    bed.run();
    bed.controller.hear(&name("host-b"), message, bed.now);
    bed.controller.lost(&name("host-b"), bed.now);
    bed.run();
    let history = bed.history();
    let of_link = history.iter().find(|entry| entry.what == "link leaf0 spine0 taken for dead no more");
    assert!(of_link.is_some_and(|entry| entry.why.contains("host-b")), "{history:?}");
}

/// A communicator of all hosts under a policy, just read, that caps it and gives it 40 of 100 ms.
fn capped_in_a_window() -> (Bed, CommId) {
    let mut bed = Bed::new("ffa");
    let comm = bed.begin_wide("t");
    bed.run();
    let file = "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"t\"\ncap = \"3Gbit/s\"\n[[window]]\ntenant = \"t\"\nperiod = \"100ms\"\nlength = \"40ms\"\n";
    bed.controller.files(None, Some(text("policy.toml", file)), bed.now);
    (bed, comm)
}

/// Who hears no more what the time is keeps to its times while its clock is good enough, and to its caps for ever.
#[test]
fn times_end_when_the_clock_is_not_good_enough_any_more() {
    let (mut bed, comm) = capped_in_a_window();
    bed.pass(Duration::from_secs(2));
    let name = bed.hosts.keys().find(|name| **name != bed.own).expect("another host").clone();
    let controller = bed.own.clone();
    bed.host(&name).agent.lost(&controller);
    let pace = |bed: &Bed| bed.hosts[&name].paces[&comm].clone();
    assert!(pace(&bed).window.is_some());
    // An eighth of 40 ms: clocks drift so far apart in 25 s.
    let error_max = Duration::from_millis(5);
    let mut waited = Duration::ZERO;
    while pace(&bed).window.is_some() {
        let agent = &bed.hosts[&name].agent;
        let wakes = agent.next_deadline().expect("wakes for it");
        assert!(agent.common_time(bed.now).expect("known").1 <= error_max && wakes > bed.now);
        waited += wakes - bed.now;
        bed.now = wakes;
        bed.pace(&name);
    }
    assert!(waited >= Duration::from_secs(20) && waited <= Duration::from_secs(26), "{waited:?}");
    assert_eq!((pace(&bed).cap_bps, bed.hosts[&name].agent.next_deadline()), (Some(3_000_000_000), None));
}

/// The controller starts anew and goes before it has said what the time is: times that rest on the clock of its life before end as well.
#[test]
fn times_of_a_clock_that_nobody_tells_end() {
    let (mut bed, comm) = capped_in_a_window();
    bed.pass(Duration::from_secs(2));
    let name = bed.hosts.keys().find(|name| **name != bed.own).expect("another host").clone();
    let (controller, now) = (bed.own.clone(), bed.now);
    let agent = &mut bed.host(&name).agent;
    let sync = ControllerMessage::Sync { life: u64::MAX, with_profiles: false };
    agent.hear(&controller, sync, now).expect("obeyed");
    agent.lost(&controller);
    bed.pace(&name);
    let has_times = |bed: &Bed| bed.hosts[&name].paces[&comm].window.is_some();
    assert!(has_times(&bed), "it may be back at once");
    bed.now = bed.hosts[&name].agent.next_deadline().expect("wakes for it");
    bed.pace(&name);
    assert!(!has_times(&bed));
    let agent = &bed.hosts[&name].agent;
    assert_eq!((bed.hosts[&name].paces[&comm].cap_bps, agent.next_deadline()), (Some(3_000_000_000), None));
}

/// What a host sends, with caps and with times, before it knows what the time is.
#[test]
fn caps_hold_before_the_common_clock_is_known() {
    let (mut bed, comm) = capped_in_a_window();
    let is_time = |(_, message): &(_, ControllerMessage)| matches!(message, ControllerMessage::Time { .. });
    // Nobody hears what the time is.
    while {
        bed.controller.settle(bed.now);
        bed.outputs();
        bed.to_agents.retain(|told| !is_time(told));
        bed.step()
    } {}
    let paces = |bed: &Bed| {
        bed.hosts.values().map(|host| host.paces.get(&comm).cloned().unwrap_or_default()).collect::<Vec<_>>()
    };
    assert!(paces(&bed).iter().all(|pace| pace.cap_bps == Some(3_000_000_000) && pace.window.is_none()));
    bed.pass(Duration::from_secs(2));
    assert!(paces(&bed).iter().all(|pace| pace.cap_bps == Some(3_000_000_000) && pace.window.is_some()));
}
