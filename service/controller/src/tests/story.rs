//! What becomes of communicators, hosts, files and controllers, one story each.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_config::change::StrategyChange;

use super::fixture::{Fixture, Host, TOPOLOGY, change_by, name, policy, text};
use crate::agent::{Agent, AgentOutput, PACE_KEPT_FOR, PACES_MAX};
use crate::answer::{
    Applied, ControllerAnswer, ControllerRequest, DiffView, FileStanding, HistoryView, LinkRateView, PolicyDiff,
    RatesView, Standing, StrategyView,
};
use crate::communicator::{ORDER_TIME, PAUSE, PAUSE_MAX};
use crate::history::{EntryKind, HISTORY_MAX, Went};
use crate::hosts::{GRACE, SYNC_TIME};
use crate::inventory::Inventory;
use crate::links::LinkState;
use crate::message::{Act, AgentMessage, ControllerMessage, Order};
use crate::orders::ORDERS_MAX;
use crate::pace::HostPace;
use mccs_model::limits::NRANKS_MAX;
use mccs_model::rate_limit::Pace;
use mccs_model::{CommId, Refused};
use mccs_telemetry::flows::{PathView, WireView};
use mccs_telemetry::placed::PaceUse;
use mccs_telemetry::profile::{Burst, Measured};

fn apply(policy: &str) -> ControllerRequest {
    ControllerRequest::Apply { name: "new.toml".into(), text: format!("[policy]\nname = {policy:?}\n") }
}

fn refuse(fixture: &mut Fixture, reason: Option<&str>) {
    fixture.hosts.values_mut().for_each(|host| host.refuses = reason.map(Refused::from));
}

#[test]
fn who_arrives_gets_what_the_policy_says_and_who_is_as_decided_is_left_alone() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let chosen = fixture.chosen(&comm);
    assert_eq!(chosen.epoch, 1);
    // Hosts of a rack one after the other, channels beginning with different devices.
    assert_eq!(chosen.rings, [[0, 4, 2, 6, 1, 5, 3, 7], [4, 0, 6, 2, 5, 1, 7, 3]]);
    let ports: Vec<String> =
        chosen.paths.iter().filter_map(|path| path.source_ports.map(|ports| ports.to_string())).collect();
    assert_eq!(ports, ["20000-20099", "20100-20199"]);
    let crossing = |channel: u32| {
        let flows = chosen.flows.iter().filter(|flow| flow.channel == channel);
        let between = flows.filter(|flow| (&*flow.from, &*flow.to) == ("host-b", "host-c"));
        between.map(|flow| flow.path).next().unwrap()
    };
    assert_ne!(crossing(0), crossing(1), "both channels on one spine: {:?}", chosen.flows);
    // What stays below its leaf goes no spine's way.
    let within = chosen.flows.iter().find(|flow| (&*flow.from, &*flow.to) == ("host-a", "host-b")).unwrap();
    assert_eq!(chosen.paths[within.path as usize].source_ports, None);
    assert_eq!(fixture.show().communicators[0].state, Standing::AsDecided);
    fixture.pass(Duration::from_secs(300));
    fixture.controller.files(None, Some(policy("ffa")), fixture.now);
    fixture.run();
    assert_eq!(fixture.changes_made(), 1, "{:?}", fixture.history());
}

#[test]
fn tenants_that_a_policy_names_and_nobody_is_are_shown() {
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
fn who_comes_later_and_goes_does_not_move_who_is_there() {
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
fn a_controller_that_starts_waits_for_reports_and_changes_nothing_that_is_as_decided() {
    let mut fixture = Fixture::new("ffa");
    let comms =
        [fixture.begin_wide("t"), fixture.begin("u", &[("host-c", &[0]), ("host-a", &[1])]), fixture.begin_wide("v")];
    fixture.run();
    let before: Vec<_> = comms.iter().map(|comm| fixture.chosen(comm).clone()).collect();
    let made = fixture.changes_made();
    fixture.restart_controller(2, policy("ffa"));
    fixture.pass(Duration::from_secs(60));
    assert_eq!(comms.iter().map(|comm| fixture.chosen(comm).clone()).collect::<Vec<_>>(), before);
    assert_eq!((fixture.changes_made(), fixture.show().communicators.len()), (made, 3));
}

#[test]
fn a_controller_that_dies_while_a_change_is_agreed_on_learns_how_it_went() {
    for goes_through in [true, false] {
        let mut fixture = Fixture::new("ffa");
        let comm = fixture.begin_wide("t");
        while fixture.hosts[&comm.root].asked.is_empty() {
            assert!(fixture.step());
        }
        fixture.restart_controller(2, policy("ffa"));
        if !goes_through {
            refuse(&mut fixture, Some("a host is away"));
        }
        // The hosts end it by themselves: while the controller is away, or after it has asked for reports.
        if goes_through {
            fixture.make_change(&comm.root);
        }
        fixture.run();
        refuse(&mut fixture, None);
        fixture.look(&comm.root);
        fixture.end(&comm);
        let again = fixture.begin_wide("t");
        fixture.pass(Duration::from_secs(60));
        assert_eq!(fixture.chosen(&again).epoch, 1);
        assert_eq!(fixture.changes_made(), if goes_through { 2 } else { 1 });
    }
}

#[test]
fn a_stale_order_harms_nothing_and_is_given_anew_for_what_is_in_force() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    while fixture.hosts[&comm.root].asked.is_empty() {
        assert!(fixture.step());
    }
    // An operator is faster.
    let by_hand = StrategyChange::parse("channels = 2", "change").unwrap();
    let live = fixture.host(&comm.root).comms.get_mut(&comm).unwrap();
    change_by(live, StrategyChange { rings: Some(vec![vec![7, 6, 5, 4, 3, 2, 1, 0]; 2]), ..by_hand }, 5);
    fixture.pass(Duration::from_secs(5));
    assert_eq!(fixture.chosen(&comm).epoch, 6);
    let history = fixture.history();
    assert!(history.iter().any(|entry| matches!(&entry.went, Went::Failed(why) if why.contains("number 5"))));
    assert!(fixture.show().communicators[0].state == Standing::AsDecided);
}

#[test]
fn an_order_of_another_host_or_another_life_is_not_obeyed() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let order = |life: u64| {
        let change = StrategyChange { channels: Some(1), ..StrategyChange::default() };
        ControllerMessage::Order(Box::new(Order { life, order: 1, comm: comm.clone(), expected_epoch: 1, change }))
    };
    let agent = &mut fixture.host(&comm.root).agent;
    assert!(agent.hear(&name("host-b"), order(1), Instant::now()).is_err());
    assert!(
        agent.hear(&name("host-b"), ControllerMessage::Sync { life: 9, with_profiles: false }, Instant::now()).is_err()
    );
    let told = agent.hear(&name("host-a"), order(7), Instant::now()).unwrap();
    assert!(format!("{told:?}").contains("Superseded"), "{told:?}");
    assert!(fixture.hosts[&comm.root].asked.is_empty());
}

/// Hosts let a single service of a name in, so whoever is let in is the one that they obey.
#[test]
fn a_controller_whose_place_another_life_had_takes_over_again() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    // Another service of its name was let in for a while, by all hosts, and has gone.
    for host in fixture.hosts.values_mut() {
        let sync = ControllerMessage::Sync { life: 8, with_profiles: false };
        host.agent.hear(&name("host-a"), sync, Instant::now()).unwrap();
    }
    fixture.answer(apply("ecmp")).expect("it is obeyed");
    fixture.run();
    let view = fixture.show();
    assert_eq!((view.life, view.policy.as_deref()), (9, Some("ecmp")));
    assert_eq!((fixture.chosen(&comm).epoch, view.communicators[0].state.clone()), (2, Standing::AsDecided));
    assert!(fixture.history().iter().any(|entry| entry.what.contains("after life 8")));
}

#[test]
fn a_controller_that_is_turned_away_says_so_and_changes_nothing() {
    let mut fixture = Fixture::new("ffa");
    fixture.run();
    let reason = "another service called host-a is connected to host-b: stop one of the two";
    fixture.controller.turned_away(&name("host-b"), reason, fixture.now);
    fixture.controller.turned_away(&name("host-b"), reason, fixture.now);
    let refused = fixture.answer(apply("ecmp")).unwrap_err();
    assert!(refused.contains("host host-b turns this service away: another service called host-a"), "{refused}");
    assert_eq!(fixture.show().turned_away, [("host-b".to_owned(), reason.to_owned())]);
    let told = fixture.history().into_iter().filter(|entry| entry.what == "turned away by host host-b");
    assert_eq!(told.count(), 1, "however often it is tried");
    // The other one has gone.
    fixture.controller.met(&name("host-b"), fixture.now);
    fixture.run();
    assert!(fixture.show().turned_away.is_empty() && fixture.answer(apply("ecmp")).is_ok());
}

#[test]
fn hosts_that_are_not_there_are_named_when_a_policy_is_applied() {
    let mut fixture = Fixture::new("ffa");
    fixture.run();
    fixture.controller.lost(&name("host-d"), fixture.now);
    fixture.pass(GRACE);
    let Ok(ControllerAnswer::Applied(applied)) = fixture.answer(apply("ecmp")) else { panic!("not applied") };
    assert_eq!((applied.away, applied.failed), (vec!["host-d".to_owned()], vec![]));
}

#[test]
fn a_controller_that_starts_with_its_clock_set_back_comes_after_the_lives_that_hosts_remember() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    fixture.restart_controller(9, policy("ecmp"));
    fixture.run();
    assert_eq!(fixture.chosen(&comm).epoch, 2);
    fixture.restart_controller(3, policy("ffa"));
    fixture.run();
    let view = fixture.show();
    assert_eq!((view.life, view.communicators[0].state.clone()), (10, Standing::AsDecided));
    assert_eq!(fixture.chosen(&comm).epoch, 3);
    assert!(fixture.history().iter().any(|entry| entry.what.contains("after life 9")));
}

#[test]
fn a_controller_that_other_hosts_do_not_obey_waits_for_none_of_them_and_says_whom_they_obey() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    let obey = |fixture: &mut Fixture, host: &str| {
        let controller = "host-d".to_owned();
        fixture.controller.hear(&name(host), AgentMessage::Obeys { controller }, fixture.now);
        fixture.to_agents.retain(|(to, _)| *to != name(host));
    };
    fixture.controller.settle(fixture.now);
    fixture.outputs();
    ["host-b", "host-c", "host-d"].into_iter().for_each(|host| obey(&mut fixture, host));
    fixture.run();
    // What has its root here is looked after at once.
    assert_eq!(fixture.chosen(&comm).epoch, 1);
    let why = fixture.answer(apply("ecmp")).unwrap_err();
    assert!(why.contains("host-b obeys host-d"), "{why}");
    let down = ControllerRequest::Link { lower: "leaf1".into(), upper: "spine0".into(), state: LinkState::Down };
    assert!(fixture.answer(down).unwrap_err().contains("host-c obeys host-d"));
    assert_eq!(fixture.show().elsewhere.len(), 3);
    assert!(fixture.history().iter().any(|entry| entry.what.contains("not obeyed by host host-b")));
    // One of them is started anew, with the right configuration.
    fixture.controller.met(&name("host-b"), fixture.now);
    fixture.answer(apply("ecmp")).expect("applied");
    assert_eq!((fixture.chosen(&comm).epoch, fixture.show().elsewhere.len()), (2, 2));
}

#[test]
fn a_host_that_is_lost_takes_its_communicators_and_is_asked_anew_when_it_is_back() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin("t", &[("host-b", &[0, 1]), ("host-c", &[2, 3])]);
    fixture.run();
    fixture.pass(GRACE);
    let made = fixture.changes_made();
    let host = name("host-b");
    fixture.controller.lost(&host, fixture.now);
    fixture.host(&host).agent.lost(&name("host-a"));
    fixture.run();
    assert_eq!((fixture.show().communicators.len(), fixture.show().hosts[1].1), (0, false));
    // Nothing is said to it, whatever happens; the others go on.
    let other = fixture.begin("u", &[("host-a", &[0]), ("host-d", &[1])]);
    fixture.run();
    assert_eq!(fixture.chosen(&other).epoch, 1);
    fixture.controller.met(&host, fixture.now);
    fixture.run();
    assert_eq!((fixture.show().communicators.len(), fixture.chosen(&comm).epoch), (2, 1));
    assert_eq!(fixture.changes_made(), made + 1);
}

#[test]
fn hosts_that_are_not_there_or_do_not_report_are_waited_for_no_longer_than_is_due() {
    let mut fixture = Fixture::new("ffa");
    fixture.restart_controller(2, policy("ffa"));
    fixture.to_agents.retain(|(to, _)| *to == name("host-a"));
    fixture.controller.lost(&name("host-d"), fixture.now);
    let comm = fixture.begin_wide("t");
    fixture.outputs();
    // Of those that were met two do not report.
    fixture.to_agents.retain(|(to, _)| *to == name("host-a"));
    fixture.pass(GRACE);
    assert_eq!(fixture.chosen(&comm).epoch, 0);
    fixture.pass(SYNC_TIME);
    assert_eq!(fixture.chosen(&comm).epoch, 1);
}

#[test]
fn a_refused_order_is_given_again_only_after_something_has_changed_and_a_pause() {
    let mut fixture = Fixture::new("ffa");
    refuse(&mut fixture, Some("a port is taken"));
    let comm = fixture.begin_wide("t");
    fixture.run();
    assert!(matches!(&fixture.show().communicators[0].state, Standing::Refused(why) if why.contains("port")));
    refuse(&mut fixture, None);
    fixture.pass(100 * PAUSE);
    assert_eq!(fixture.chosen(&comm).epoch, 0, "nothing has changed");
    let other = fixture.begin("u", &[("host-b", &[0]), ("host-d", &[1])]);
    fixture.run();
    assert_eq!((fixture.chosen(&comm).epoch, fixture.chosen(&other).epoch), (1, 1));
    // Within the pause nothing is asked again, and after it once.
    refuse(&mut fixture, Some("a port is taken"));
    let third = fixture.begin_wide("v");
    fixture.run();
    refuse(&mut fixture, None);
    let fourth = fixture.begin("u", &[("host-b", &[0]), ("host-d", &[1])]);
    fixture.run();
    assert_eq!((fixture.chosen(&third).epoch, fixture.chosen(&fourth).epoch), (0, 1));
    fixture.pass(PAUSE);
    assert_eq!(fixture.chosen(&third).epoch, 1);
}

#[test]
fn a_policy_that_a_host_refuses_is_taken_back() {
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

/// What came of an apply.
fn applied(answer: Result<ControllerAnswer, String>) -> Applied {
    let Ok(ControllerAnswer::Applied(applied)) = answer else { panic!("not applied: {answer:?}") };
    applied
}

/// A tenant whose communicator cannot be changed, be it that it ends, or that it never calls what its last changes wait for.
#[test]
fn a_communicator_that_cannot_change_for_a_reason_of_its_own_keeps_no_policy_from_the_others() {
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
fn a_policy_that_is_wrong_is_taken_back_whoever_else_cannot_change() {
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
fn who_is_asked_again_while_others_are_waited_for_is_heard() {
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
fn what_is_put_in_force_waits_for_those_who_were_there_and_for_nobody_longer_than_an_order_may_take() {
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
    // Who was there and does not answer is waited for, but not for ever.
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
fn a_change_that_is_too_long_for_a_message_is_refused_at_once_and_harms_no_other() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let ranks: Vec<u32> = (0..NRANKS_MAX).collect();
    let large = fixture.begin("u", &[("host-a", &ranks[..2000]), ("host-c", &ranks[2000..])]);
    fixture.run();
    let four =
        ControllerRequest::Apply { name: "new.toml".into(), text: "[policy]\nname = \"ffa\"\nchannels = 4\n".into() };
    let what = applied(fixture.answer(four));
    assert_eq!((what.changed, what.rolled_back), (vec![comm.to_string()], false));
    let [(kept, why)] = &what.kept[..] else { panic!("{:?}", what.kept) };
    assert!(*kept == large.to_string() && why.contains("bytes"), "{why}");
    assert_eq!(fixture.chosen(&large).epoch, 1);
}

const FFA: &str = "[policy]\nname = \"ffa\"\n";

#[test]
fn what_is_wrong_with_a_file_is_said_and_changes_nothing() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let with_another = format!("{TOPOLOGY}[[host]]\nname = \"host-e\"\nleaf = \"leaf0\"\n");
    let line = TOPOLOGY.lines().count() + 2;
    let at_line =
        format!("topology.toml:{line}:1: host[4].name: the cluster, which service.toml lists, has no host \"host-e\"");
    let wrong = [
        (None, Some(text("policy.toml", "[policy]\nname = \"fa\"\n")), "policy.toml:2:1: policy.name"),
        (
            None,
            Some(text("policy.toml", &format!("{FFA}[[reserve]]\ntenant = \"t\"\npaths = [\"spine7\"]\n"))),
            "policy.toml:5",
        ),
        // What a full disk leaves of a file with caps.
        (None, Some(text("policy.toml", "")), "policy.toml:1:1: the file says nothing"),
        (Some(text("topology.toml", &TOPOLOGY.replace("host-d", "host-x"))), None, "host \"host-d\" is in the cluster"),
        (Some(text("topology.toml", "[rates]\nhost_leaf = 3\n")), None, "topology.toml:"),
        (Some(text("topology.toml", &with_another)), None, at_line.as_str()),
    ];
    for (topology, policy, reason) in wrong {
        fixture.controller.files(topology, policy, fixture.now);
        fixture.run();
        let last = fixture.history().pop().unwrap();
        assert!(matches!(&last.went, Went::Failed(why) if why.contains(reason)), "{reason}: {last:?}");
    }
    let refused = fixture.answer(ControllerRequest::Apply { name: "x.toml".into(), text: "[polcy]".into() });
    assert!(refused.unwrap_err().contains("did you mean `policy`"));
    let refused = fixture.answer(ControllerRequest::Diff { name: "x.toml".into(), text: "[policy]\nname = 1".into() });
    assert!(refused.unwrap_err().starts_with("x.toml:2"));
    assert_eq!((fixture.chosen(&comm).epoch, fixture.show().policy.as_deref()), (1, Some("ffa")));
    // Both at once, which would not do one after the other.
    let topology = TOPOLOGY.replace("spine1", "spine-east");
    let reserves = "[policy]\nname = \"pfa\"\n[[reserve]]\ntenant = \"u\"\npaths = [\"spine-east\"]\n";
    fixture.controller.files(Some(text("topology.toml", &topology)), Some(text("policy.toml", reserves)), fixture.now);
    fixture.run();
    assert_eq!(fixture.show().policy.as_deref(), Some("pfa"));
    assert!(fixture.chosen(&comm).paths.iter().all(|path| path.source_ports.is_none_or(|ports| ports.first == 20_000)));
}

#[test]
fn files_that_are_not_in_force_are_shown_with_the_reason() {
    use crate::disk::FileRole;
    let mut fixture = Fixture::new("ffa");
    let standing = |fixture: &mut Fixture, file: &str| {
        let files = fixture.show().files;
        files.into_iter().find(|view| view.file == file).expect("shown").standing
    };
    assert_eq!(fixture.show().files.len(), 2);
    assert!(fixture.show().files.iter().all(|file| file.standing == FileStanding::InForce));
    // Refused, and mended.
    fixture.controller.files(None, Some(text("policy.toml", "")), fixture.now);
    fixture.now += Duration::from_secs(3);
    let FileStanding::Refused { reason, age_ms } = standing(&mut fixture, "policy.toml") else {
        panic!("{:?}", fixture.show())
    };
    assert!(reason.contains("says nothing") && age_ms == 3000, "{reason} {age_ms}");
    assert_eq!(standing(&mut fixture, "topology.toml"), FileStanding::InForce);
    fixture.controller.files(None, Some(policy("ecmp")), fixture.now);
    fixture.run();
    assert_eq!(standing(&mut fixture, "policy.toml"), FileStanding::InForce);
    // An operator applies another one: the file stays behind, until it says the same.
    fixture.answer(apply("ffa")).expect("applied");
    let (on_disk, in_force) = (Some("name = \"ecmp\"".to_owned()), Some("name = \"ffa\"".to_owned()));
    assert_eq!(standing(&mut fixture, "policy.toml"), FileStanding::Differs { line: 2, on_disk, in_force });
    // Deleted, and back.
    fixture.controller.lost_file(FileRole::Policy, "policy.toml", "No such file".into(), fixture.now);
    let gone = standing(&mut fixture, "policy.toml");
    assert!(matches!(&gone, FileStanding::Unreadable { reason, .. } if reason == "No such file"), "{gone:?}");
    assert_eq!(fixture.show().policy.as_deref(), Some("ffa"), "what was in force stays");
    let last = fixture.history().pop().expect("noted");
    assert!(last.what == "policy.toml read" && matches!(last.went, Went::Failed(_)), "{last:?}");
    fixture.controller.files(None, Some(policy("ffa")), fixture.now);
    fixture.run();
    assert_eq!(standing(&mut fixture, "policy.toml"), FileStanding::InForce);
    // Refused by a communicator.
    fixture.begin_wide("t");
    fixture.run();
    let root = name("host-a");
    fixture.host(&root).refuses = Some("no such path".into());
    fixture.controller.files(None, Some(policy("ecmp")), fixture.now);
    fixture.run();
    assert_eq!(
        (standing(&mut fixture, "policy.toml"), fixture.show().policy.as_deref()),
        (FileStanding::RolledBack, Some("ffa"))
    );
}

#[test]
fn an_operator_takes_back_the_last_policy_and_history_names_who_did_what() {
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
    // What is refused is an act as well; what another host's operator did is told by that host.
    fixture.answer(ControllerRequest::Apply { name: "x.toml".into(), text: String::new() }).expect_err("it is empty");
    let act = Act { what: "drained".into(), by: "uid 0 (root): mccsctl drain".into(), went: Went::Done };
    let told = fixture.host(&name("host-c")).agent.acted(act);
    fixture.carry_out(&name("host-c"), told);
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

#[test]
fn a_first_policy_may_come_later_and_topology_and_policy_in_any_order() {
    let mut fixture = Fixture::new("nonsense");
    let comm = fixture.begin_wide("t");
    fixture.run();
    assert_eq!((fixture.chosen(&comm).epoch, fixture.show().policy), (0, None));
    fixture.controller.files(None, Some(policy("ffa")), fixture.now);
    fixture.run();
    assert_eq!((fixture.chosen(&comm).epoch, fixture.show().policy.as_deref()), (1, Some("ffa")));
}

#[test]
fn a_diff_says_what_an_apply_then_does() {
    let mut fixture = Fixture::new("ffa");
    fixture.begin_wide("t");
    fixture.run();
    let made = fixture.changes_made();
    let request = ControllerRequest::Diff { name: "e.toml".into(), text: "[policy]\nname = \"ecmp\"\n".into() };
    let Ok(ControllerAnswer::Diff(PolicyDiff { communicators: diff, .. })) = fixture.answer(request) else { panic!() };
    assert_eq!((diff.len(), diff[0].changes, fixture.changes_made()), (1, true, made));
    let way = |flows: &[crate::answer::FlowView]| {
        flows.iter().find(|flow| (&*flow.from, &*flow.to) == ("host-b", "host-c")).unwrap().way.clone()
    };
    assert!(way(&diff[0].before.flows).starts_with("spine"), "{:?}", diff[0].before);
    assert_eq!(way(&diff[0].after.as_ref().unwrap().flows), "hash");
    fixture.answer(apply("ecmp")).unwrap();
    assert_eq!(fixture.show().communicators[0].strategy, *diff[0].after.as_ref().unwrap());
}

fn apply_text(text: &str) -> ControllerRequest {
    ControllerRequest::Apply { name: "new.toml".into(), text: text.into() }
}

/// What a policy would change of every communicator.
fn diff(fixture: &mut Fixture, text: &str) -> Vec<DiffView> {
    match fixture.answer(ControllerRequest::Diff { name: "new.toml".into(), text: text.into() }) {
        Ok(ControllerAnswer::Diff(diff)) => diff.communicators,
        other => panic!("{other:?}"),
    }
}

/// Each of them changes nothing but how flows leave hosts.
#[test]
fn a_diff_shows_caps_weights_shares_and_windows_that_an_apply_then_tells() {
    let mut fixture = Fixture::new("ffa");
    let comms = T_AND_U.map(|tenant| fixture.begin_wide(tenant));
    fixture.run();
    let mut before = Vec::new();
    let ffa = "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"t\"\n";
    let window = "[[window]]\ntenant = \"t\"\nperiod = \"10ms\"\noffset = \"1ms\"\nlength = \"5ms\"\n";
    for (rules, words, paced) in [
        ("cap = \"30Gbit/s\"\n", "30000.0 Mbit/s a flow", &comms[..1]),
        ("cap = \"20Gbit/s\"\n", "20000.0 Mbit/s a flow", &comms[..1]),
        ("weight = 3\n", "weight 3", &comms[..]),
        ("share_percent = 60\n", "weight 60", &comms[..]),
        (window, "5.00 ms of each 10.00, from 1.00 on", &comms[..]),
        ("", "", &comms[..1]),
    ] {
        let policy = format!("{ffa}{rules}");
        let told = diff(&mut fixture, &policy);
        let of_t = &told[0];
        assert_eq!((of_t.changes, of_t.changes_strategy), (true, false), "{rules}: {of_t:?}");
        assert_eq!(of_t.after.as_ref(), Ok(&of_t.before));
        assert_eq!(of_t.paces_before, before, "{rules}");
        assert!(of_t.paces_after.iter().all(|(_, pace)| pace.to_string().contains(words)), "{rules}: {of_t:?}");
        assert_eq!(of_t.paces_after.len(), if words.is_empty() { 0 } else { 4 });
        // It is done as it was said, without a change that hosts agree on; the history tells of it, and it is no change the next time.
        let entries = fixture.history().len();
        let what = applied(fixture.answer(apply_text(&policy)));
        assert_eq!((what.changed.len(), what.failed.len()), (0, 0), "{rules}: {what:?}");
        assert_eq!(what.paced, paced.iter().map(ToString::to_string).collect::<Vec<_>>(), "{rules}");
        let view = fixture.show();
        let communicators = view.communicators.iter().zip(&told);
        communicators.for_each(|(comm, told)| assert_eq!(comm.paces, told.paces_after, "{rules}"));
        let history = fixture.history();
        let [applying, telling] = &history[entries..] else { panic!("{history:?}") };
        assert!(applying.what.contains("new.toml") && telling.what.contains(&what.paced[0]), "{history:?}");
        assert!(diff(&mut fixture, &policy).iter().all(|told| !told.changes), "{rules}");
        before = of_t.paces_after.clone();
    }
    assert_eq!(fixture.changes_made(), 2, "those of the first policy");
}

#[test]
fn a_diff_shows_priorities_and_the_switches_classes() {
    let mut fixture = Fixture::new("ffa");
    let topology = format!("{TOPOLOGY}[[class]]\npriority = 2\ndscp = 16\n");
    fixture.controller.files(Some(text("topology.toml", &topology)), None, fixture.now);
    let [first, _] = T_AND_U.map(|tenant| fixture.begin_wide(tenant));
    fixture.run();
    let of =
        |priority: u32| format!("[policy]\nname = \"priority\"\n[[tenant]]\nname = \"t\"\npriority = {priority}\n");
    let marks = |strategy: &StrategyView| {
        let marks = strategy.flows.iter().map(|flow| (flow.priority, flow.class_dscp));
        marks.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    let told = diff(&mut fixture, &of(2));
    assert_eq!([told[0].changes_strategy, told[1].changes], [true, false], "{told:?}");
    let (now, then) = (&told[0].before, told[0].after.as_ref().unwrap());
    assert_eq!((marks(now), marks(then)), (vec![(None, None)], vec![(Some(2), Some(16))]));
    let ways = |strategy: &StrategyView| strategy.flows.iter().map(|flow| flow.way.clone()).collect::<Vec<_>>();
    assert_eq!(ways(now), ways(then), "they go the same ways");
    fixture.answer(apply_text(&of(2))).unwrap();
    assert_eq!(marks(&fixture.show().communicators[0].strategy), [(Some(2), Some(16))]);
    // One that switches have no class for.
    let told = diff(&mut fixture, &of(3));
    assert_eq!(marks(told[0].after.as_ref().unwrap()), [(Some(3), None)]);
    assert!(told[0].changes_strategy && told[0].not_enforced[0].contains("priority 3"), "{told:?}");
    assert_eq!(fixture.chosen(&first).epoch, 2);
}

#[test]
fn paces_of_a_policy_that_is_taken_back_are_taken_back() {
    let mut fixture = Fixture::new("ffa");
    let comms = T_AND_U.map(|tenant| fixture.begin_wide(tenant));
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

#[test]
fn who_is_pinned_keeps_its_strategy_in_a_diff_and_not_its_pace() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    fixture.change_by_hand(
        &comm,
        StrategyChange { rings: Some(vec![vec![7, 6, 5, 4, 3, 2, 1, 0]; 2]), ..Default::default() },
    );
    fixture.run();
    let told = diff(&mut fixture, "[policy]\nname = \"ecmp\"\n[[tenant]]\nname = \"t\"\ncap = \"30Gbit/s\"\n");
    assert_eq!((told[0].is_pinned, told[0].changes, told[0].changes_strategy), (true, true, false));
    assert_eq!((told[0].after.as_ref(), told[0].paces_after.len()), (Ok(&told[0].before), 4));
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
    assert_eq!(ports.iter().map(|ports| ports.first).collect::<Vec<_>>(), [20_000]);
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
fn rings_that_are_kept_stay_as_they_are_in_force() {
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

const T_AND_U: [&str; 2] = ["t", "u"];

/// Every tenant's flows over `spine` from rack to rack, as what its hosts were told.
fn allotted(fixture: &mut Fixture) -> [u64; 2] {
    let view = fixture.show();
    T_AND_U.map(|tenant| {
        let of_tenant = view.communicators.iter().filter(|comm| comm.tenant == tenant);
        let across = |from: &str, to: &str| (from < "host-c") && (to >= "host-c");
        let flows = of_tenant.flat_map(|comm| comm.paces.iter());
        flows
            .flat_map(|(from, pace)| pace.flows.iter().map(move |flow| (from, flow)))
            .filter(|(from, flow)| across(from, &flow.to))
            .map(|(_, flow)| flow.cap_bps)
            .sum()
    })
}

#[test]
fn caps_and_shares_are_told_to_hosts_and_taken_back() {
    let mut fixture = Fixture::new("ffa");
    let comms = T_AND_U.map(|tenant| fixture.begin_wide(tenant));
    fixture.run();
    assert!(fixture.hosts.values().all(|host| host.paces.is_empty()));
    let rules = "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"t\"\nweight = 3\nhost_cap = \"90Gbit/s\"\n[[tenant]]\nname = \"u\"\ncap = \"30Gbit/s\"\n";
    fixture.controller.files(None, Some(text("policy.toml", rules)), fixture.now);
    fixture.run();
    let [t, u] = allotted(&mut fixture);
    assert!((t as f64 / u as f64 - 3.0).abs() < 0.01, "{t} and {u}");
    let of_u = &fixture.hosts[&name("host-b")].paces[&comms[1]];
    assert_eq!(of_u.cap_bps, Some(30_000_000_000));
    // What the operator sees of it there.
    let told = |fixture: &Fixture, comm: &CommId| fixture.hosts[&name("host-b")].pace_uses[comm].allotment();
    let [of_t, of_u] = [0, 1].map(|comm| told(&fixture, &comms[comm]).expect("told"));
    assert_eq!([of_t.weight_milli, of_u.weight_milli], [Some(3000), Some(1000)]);
    assert_eq!([of_t.flow_cap_bps, of_u.flow_cap_bps], [None, Some(30_000_000_000)]);
    assert_eq!([of_t.host_cap_bps, of_u.host_cap_bps], [Some(90_000_000_000), None]);
    assert!(of_t.allotted_bps > of_u.allotted_bps && of_u.allotted_bps.is_some(), "{of_t:?} {of_u:?}");
    assert!(fixture.show().communicators.iter().all(|comm| comm.not_enforced.is_empty()));
    // A host that was away is told again; what is over is taken back everywhere.
    let host = name("host-b");
    fixture.controller.lost(&host, fixture.now);
    fixture.host(&host).agent.lost(&name("host-a"));
    fixture.host(&host).paces.clear();
    fixture.controller.met(&host, fixture.now);
    fixture.run();
    assert!(!fixture.hosts[&host].paces[&comms[0]].is_free());
    fixture.controller.files(None, Some(policy("ffa")), fixture.now);
    fixture.run();
    assert!(fixture.hosts.values().flat_map(|host| host.paces.values()).all(|pace| pace.is_free()));
    assert_eq!(comms.each_ref().map(|comm| told(&fixture, comm)), [None, None]);
}

/// On every host, a communicator's flows have sent so much in a second, and something had to wait, or not.
fn send(fixture: &mut Fixture, comm: &CommId, bytes: u64, is_held: bool) {
    for host in fixture.hosts.values_mut() {
        let pace_use = host.pace_uses.get(comm).expect("a paced communicator");
        pace_use.sent(bytes);
        if is_held {
            pace_use.held();
        }
    }
}

#[test]
fn what_a_tenant_leaves_of_its_share_others_get_until_it_wants_it() {
    let mut fixture = Fixture::new("ffa");
    let comms = T_AND_U.map(|tenant| fixture.begin_wide(tenant));
    let rules =
        "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"t\"\nweight = 3\n[[tenant]]\nname = \"u\"\nweight = 1\n";
    fixture.controller.files(None, Some(text("policy.toml", rules)), fixture.now);
    fixture.run();
    let shares = allotted(&mut fixture);
    let mut second = |is_held: [bool; 2]| {
        comms.iter().zip(is_held).for_each(|(comm, is_held)| send(&mut fixture, comm, 1, is_held));
        fixture.pass(Duration::from_secs(1));
        allotted(&mut fixture)
    };
    // Both want all they can get: nothing changes.
    assert_eq!((0..3).map(|_| second([true, true])).last(), Some(shares));
    // The first stops. That is not believed at once, and then a part is kept for it; it may still have its share.
    assert_eq!(second([false, true]), shares);
    let [t, u] = (0..3).map(|_| second([false, true])).last().expect("some");
    assert_eq!(t, shares[0]);
    let expected = shares[1] as f64 + 0.75 * shares[0] as f64;
    assert!((u as f64 / expected - 1.0).abs() < 0.01, "{u} is not {expected}");
    // It begins again: within two seconds all is as it was.
    second([true, true]);
    assert_eq!(second([true, true]), shares);
}

#[test]
fn windows_are_on_the_controllers_clock_on_every_host() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    let window = "period = \"100ms\"\noffset = \"10ms\"\nlength = \"40ms\"\n";
    let rules = format!("[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"t\"\n[[window]]\ntenant = \"t\"\n{window}");
    fixture.controller.files(None, Some(text("policy.toml", &rules)), fixture.now);
    fixture.run();
    fixture.pass(Duration::from_secs(10));
    let looks = (0..10).map(|tenth| fixture.now + Duration::from_millis(tenth * 10));
    let open: Vec<Vec<bool>> = looks
        .map(|at| fixture.hosts.values().map(|host| host.paces[&comm].window.unwrap().at(at).0).collect())
        .collect();
    assert!(open.iter().all(|hosts| hosts.len() == 4 && hosts.iter().all(|is_open| *is_open == hosts[0])), "{open:?}");
    assert_eq!(open.iter().filter(|hosts| hosts[0]).count(), 4, "{open:?}");
}

#[test]
fn a_communicator_outside_the_topology_keeps_what_it_has() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin("t", &[("host-a", &[0]), ("host-z", &[1])]);
    fixture.run();
    assert_eq!(fixture.chosen(&comm).epoch, 0);
    let state = &fixture.show().communicators[0].state;
    assert!(matches!(state, Standing::Outside(why) if why.contains("host-z")), "{state:?}");
}

#[test]
fn many_communicators_are_changed_a_few_at_a_time_and_the_history_is_bounded() {
    let mut fixture = Fixture::new("ffa");
    let comms: Vec<_> = (0..3 * ORDERS_MAX).map(|_| fixture.begin_wide("t")).collect();
    while fixture.step() {
        let under_way: usize = fixture.hosts.values().map(|host| host.asked.len()).sum();
        assert!(under_way <= ORDERS_MAX);
    }
    // Those past some are decided for a little later.
    fixture.pass(Duration::from_secs(1));
    for policy in ["ecmp", "ffa", "ecmp"] {
        let Ok(ControllerAnswer::Applied(applied)) = fixture.answer(apply(policy)) else { panic!("not applied") };
        assert_eq!(applied.changed.len(), comms.len());
    }
    let (orders, others): (Vec<_>, Vec<_>) =
        fixture.history().into_iter().partition(|entry| entry.what.starts_with("order "));
    assert_eq!(orders.len(), HISTORY_MAX);
    assert_eq!(others.iter().filter(|entry| entry.why == "an operator asked").count(), 3, "{others:?}");
    assert!(comms.iter().all(|comm| fixture.chosen(comm).paths.is_empty()));
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
fn who_sends_at_certain_times_makes_others_yield_then_on_the_common_clock() {
    make_room_for_bursts("yield");
}

#[test]
fn who_sends_in_the_gaps_of_another_makes_room_for_each_of_its_bursts() {
    make_room_for_bursts("pfa_ts");
}

/// Under a policy: times to yield are where the profile says, and then where bursts are foreseen.
fn make_room_for_bursts(policy: &str) {
    let mut fixture = Fixture::new("ffa");
    let [high, low] = T_AND_U.map(|tenant| fixture.begin_wide(tenant));
    fixture.run();
    let rules = format!("[policy]\nname = {policy:?}\n[[tenant]]\nname = \"t\"\npriority = 3\n");
    fixture.controller.files(None, Some(text("policy.toml", &rules)), fixture.now);
    fixture.pass(Duration::from_secs(1));
    assert!(fixture.hosts.values().all(|host| host.paces.is_empty()));
    let (period, busy) = (Duration::from_millis(100), Duration::from_millis(30));
    let measured = Measured { period, busy, began: fixture.now - Duration::from_millis(250) };
    fixture.host(&high.root).comms.get_mut(&high).unwrap().profile = Some(measured);
    fixture.look(&high.root);
    fixture.pace(&high.root);
    fixture.pass(Duration::from_secs(1));
    for host in fixture.hosts.values() {
        let [(window, cap_bps)] = host.paces[&low].yields[..] else { panic!("{:?}", host.paces) };
        assert!(host.paces.get(&high).is_none_or(Pace::is_free) && cap_bps >= 1_000_000);
        // It sends from 50 ms of the second on, with a margin at both ends.
        let open_at = |ms: u64| window.at(fixture.now + Duration::from_millis(1_000 + ms)).0;
        assert_eq!([40, 51, 70, 79, 90, 120].map(open_at), [false, true, true, true, false, false]);
    }
    // From then on its bursts are told one by one, by the host of its root.
    let watches = |host: &Host| host.pace_uses[&high].is_watched();
    let watching = fixture.hosts.iter().filter(|(_, host)| watches(host));
    assert_eq!(watching.map(|(name, _)| name).collect::<Vec<_>>(), [&high.root]);
    let begins = fixture.now + Duration::from_millis(60);
    fixture.host(&high.root).pace_uses[&high].foresee(Burst { begins, lasts: Duration::from_millis(100) });
    fixture.pace(&high.root);
    fixture.run();
    for host in fixture.hosts.values() {
        let [(window, _)] = host.paces[&low].yields[..] else { panic!("{:?}", host.paces) };
        let open_at = |ms: u64| window.at(fixture.now + Duration::from_millis(ms)).0;
        assert_eq!([55, 59, 100, 161, 165, 360].map(open_at), [false, true, true, true, false, false]);
    }
    // Who foresees for whom nobody makes room tells nobody.
    fixture.host(&high.root).pace_uses[&low].foresee(Burst { begins, lasts: Duration::from_millis(1) });
    fixture.pace(&high.root);
    assert!(fixture.to_controller.is_empty(), "{:?}", fixture.to_controller);
    // It sends all the time: nobody knows when to yield.
    fixture.host(&high.root).comms.get_mut(&high).unwrap().profile = None;
    fixture.look(&high.root);
    fixture.pace(&high.root);
    fixture.pass(Duration::from_secs(1));
    assert!(fixture.hosts.values().flat_map(|host| host.paces.values()).all(|pace| pace.is_free()));
}

#[test]
fn a_host_that_had_no_room_for_what_it_was_to_tell_tells_it_anew() {
    let mut fixture = Fixture::new("ffa");
    let host = name("host-b");
    let begin = |fixture: &mut Fixture| fixture.begin("t", &[("host-b", &[0, 1]), ("host-c", &[2, 3])]);
    let gone = begin(&mut fixture);
    fixture.run();
    fixture.end(&gone);
    let there = begin(&mut fixture);
    // All of that was dropped.
    fixture.to_controller.clear();
    let message = fixture.host(&host).agent.fall_behind().expect("it is asked to tell");
    assert!(fixture.host(&host).agent.fall_behind().is_none() && !fixture.host(&host).agent.has_reports());
    fixture.carry_out(&host, [AgentOutput::Tell(message)]);
    fixture.run();
    let view = fixture.show();
    assert_eq!(view.communicators.iter().map(|comm| &comm.name).collect::<Vec<_>>(), [&there.to_string()]);
    assert_eq!(fixture.chosen(&there).epoch, 1);
}

#[test]
fn what_waits_to_be_reported_is_reported_once_and_as_it_is_then() {
    let mut fixture = Fixture::new("ffa");
    let host = name("host-a");
    let comms: Vec<_> = (0..3).map(|_| fixture.begin_wide("t")).collect();
    fixture.run();
    let host_of = fixture.host(&host);
    let change = |host: &mut Host, comm: &CommId, epoch| {
        change_by(host.comms.get_mut(comm).unwrap(), StrategyChange::default(), epoch);
        let live: Vec<_> = host.comms.values().cloned().collect();
        host.agent.look(live, 7);
    };
    // Nobody takes reports meanwhile.
    change(host_of, &comms[1], 5);
    change(host_of, &comms[1], 6);
    host_of.comms.remove(&comms[0]);
    change(host_of, &comms[2], 7);
    let told: Vec<_> = std::iter::from_fn(|| host_of.agent.next_report()).collect();
    let epoch = |message: &AgentMessage| match message {
        AgentMessage::Report(report) => Some((report.comm.clone(), report.chosen.epoch)),
        AgentMessage::Gone { comm } => Some((comm.clone(), 0)),
        _ => None,
    };
    let expected = [(comms[0].clone(), 0), (comms[1].clone(), 6), (comms[2].clone(), 7)];
    assert_eq!(told.iter().filter_map(epoch).collect::<Vec<_>>(), expected);
    assert_eq!(told.len(), 3);
}

#[test]
fn priorities_have_the_code_points_of_the_switches_classes() {
    let mut fixture = Fixture::new("priority");
    let [first, other] = T_AND_U.map(|tenant| fixture.begin_wide(tenant));
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
    let ways = |at: usize| view.communicators[at].strategy.flows.iter().map(|flow| &*flow.way).collect::<Vec<_>>();
    assert_eq!(ways(0), ways(1));
    assert!(ways(0).contains(&"spine0") && ways(0).contains(&"spine1"), "{view:?}");
}

#[test]
fn paces_of_communicators_that_never_come_here_are_forgotten_and_make_room() {
    let mut fixture = Fixture::new("ffa");
    fixture.run();
    let (own, now) = (fixture.own.clone(), fixture.now);
    let comm = |number: u64| CommId { root: name("host-b"), incarnation: 1, number };
    let pace = || HostPace { cap_bps: Some(1_000_000), ..HostPace::default() };
    let agent = &mut fixture.host(&own).agent;
    let mut tell = |number: u64, at: Instant| {
        let message = ControllerMessage::Pace { life: 1, comm: comm(number), pace: pace() };
        assert_eq!(agent.hear(&name("host-a"), message, at), Ok(Vec::new()));
    };
    (0..PACES_MAX as u64).for_each(|number| tell(number, now));
    // There is no room for one more, until the others have waited for long enough.
    let (late, last) = (PACES_MAX as u64, PACES_MAX as u64 + 1);
    tell(late, now);
    let told = |agent: &mut Agent, number: u64, at: Instant| {
        let here = BTreeMap::from([(comm(number), Arc::<PaceUse>::default())]);
        let outputs = agent.pace(&here, at);
        outputs.iter().any(|output| matches!(output, AgentOutput::Pace { comm: of, .. } if *of == comm(number)))
    };
    let agent = &mut fixture.host(&own).agent;
    assert!(!told(agent, late, now));
    // One that comes in time has its pace, also if others come later.
    let soon = now + PACE_KEPT_FOR - Duration::from_millis(1);
    assert!(told(agent, 7, soon));
    let after = now + PACE_KEPT_FOR;
    assert_eq!(agent.pace(&BTreeMap::new(), after), []);
    assert!(!told(agent, 8, after));
    let message = ControllerMessage::Pace { life: 1, comm: comm(last), pace: pace() };
    assert_eq!(agent.hear(&name("host-a"), message, after), Ok(Vec::new()));
    assert!(told(agent, last, after));
}

#[test]
fn files_that_only_fit_together_are_put_in_force_whichever_is_saved_first_and_however_long_before() {
    let renamed = TOPOLOGY.replace("spine1", "spine9");
    let reserve = |spine: &str| format!("[policy]\nname = \"pfa\"\n[[reserve]]\ntenant = \"t\"\npaths = [{spine:?}]\n");
    let spines = |fixture: &mut Fixture| {
        let flows = fixture.show().communicators.remove(0).strategy.flows;
        flows.into_iter().filter(|flow| flow.way.starts_with("spine")).map(|flow| flow.way).collect::<BTreeSet<_>>()
    };
    for policy_first in [true, false] {
        let mut fixture = Fixture::new("ffa");
        fixture.begin_wide("t");
        fixture.controller.files(None, Some(text("policy.toml", &reserve("spine1"))), fixture.now);
        fixture.run();
        assert_eq!(spines(&mut fixture), BTreeSet::from(["spine1".to_owned()]));
        let policy = (None, Some(text("policy.toml", &reserve("spine9"))));
        let topology = (Some(text("topology.toml", &renamed)), None);
        let in_turn = if policy_first { [policy, topology] } else { [topology, policy] };
        for (place, (topology, policy)) in in_turn.into_iter().enumerate() {
            fixture.controller.files(topology, policy, fixture.now);
            fixture.pass(Duration::from_secs(60));
            // The first alone does not fit what is in force.
            assert_eq!(
                matches!(fixture.history().last().unwrap().went, Went::Failed(_)),
                place == 0,
                "{:?}",
                fixture.history()
            );
        }
        assert_eq!(spines(&mut fixture), BTreeSet::from(["spine9".to_owned()]));
    }
}

#[test]
fn a_policy_that_an_operator_has_put_in_force_stays_when_another_file_changes() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    fixture.answer(apply("ecmp")).unwrap();
    fixture.controller.files(Some(text("topology.toml", &format!("{TOPOLOGY}\n# again"))), None, fixture.now);
    fixture.run();
    assert_eq!((fixture.show().policy.as_deref(), fixture.chosen(&comm).paths.len()), (Some("ecmp"), 0));
    // What was taken back is not what the operator has said.
    refuse(&mut fixture, Some("no port is free"));
    assert!(applied(fixture.answer(apply("ffa"))).rolled_back);
    refuse(&mut fixture, None);
    fixture.controller.files(Some(text("topology.toml", &format!("{TOPOLOGY}\n# anew"))), None, fixture.now);
    fixture.run();
    assert_eq!((fixture.show().policy.as_deref(), fixture.chosen(&comm).paths.len()), (Some("ecmp"), 0));
    fixture.controller.files(None, Some(text("policy.toml", "[policy]\nname = \"ffa\"\n# once more")), fixture.now);
    fixture.run();
    assert_eq!(fixture.show().policy.as_deref(), Some("ffa"));
}

#[test]
fn a_file_that_was_rolled_back_takes_no_later_one_with_it() {
    let again = |what: &str| text("topology.toml", &format!("{TOPOLOGY}\n# {what}"));
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let refused = |fixture: &mut Fixture, topology, policy| {
        refuse(fixture, Some("this host has no flows over rdma"));
        fixture.controller.files(topology, policy, fixture.now);
        fixture.run();
        assert!(fixture.history().iter().any(|entry| entry.why.starts_with("rolled back")), "{:?}", fixture.history());
        refuse(fixture, None);
    };
    let stands = |fixture: &mut Fixture, topology: &str, policy: &str| {
        let in_force = fixture.controller.topology_text().unwrap().to_owned();
        assert!(in_force.ends_with(topology), "{topology}: {:?}", fixture.controller.history().iter().last());
        assert_eq!(fixture.show().policy.as_deref(), Some(policy));
    };
    // A policy: topologies come and go, and it is not among what is put in force until it is another one.
    refused(&mut fixture, None, Some(policy("ecmp")));
    stands(&mut fixture, TOPOLOGY, "ffa");
    for what in ["second", "third"] {
        fixture.controller.files(Some(again(what)), None, fixture.now);
        fixture.run();
        stands(&mut fixture, what, "ffa");
        let went = fixture.history().pop().unwrap().went;
        assert!(matches!(&went, Went::DoneBut(why) if why.contains("policy.toml was rolled back")), "{went:?}");
    }
    fixture.controller.files(None, Some(text("policy.toml", "[policy]\nname = \"ecmp\"\n# mended")), fixture.now);
    fixture.run();
    stands(&mut fixture, "third", "ecmp");
    assert!(fixture.chosen(&comm).paths.is_empty());
    // A topology, which sends flows by other ports.
    fixture.controller.files(None, Some(policy("ffa")), fixture.now);
    fixture.run();
    let moved = TOPOLOGY.replace("20000-20099", "21000-21099");
    assert_ne!(moved, TOPOLOGY);
    refused(&mut fixture, Some(text("topology.toml", &moved)), None);
    fixture.controller.files(None, Some(policy("ecmp")), fixture.now);
    fixture.run();
    stands(&mut fixture, "third", "ecmp");
    // Also if it comes while the other is being put in force.
    fixture.controller.files(None, Some(policy("ffa")), fixture.now);
    fixture.run();
    refuse(&mut fixture, Some("no port is free"));
    fixture.controller.files(None, Some(policy("ecmp")), fixture.now);
    fixture.controller.files(Some(again("fourth")), None, fixture.now);
    fixture.run();
    stands(&mut fixture, "fourth", "ffa");
    // What an operator has said since counts.
    refuse(&mut fixture, None);
    fixture.answer(apply("ecmp")).unwrap();
    fixture.controller.files(Some(again("fifth")), None, fixture.now);
    fixture.run();
    stands(&mut fixture, "fifth", "ecmp");
    assert_eq!(fixture.history().pop().unwrap().went, Went::Done);
}

#[test]
fn of_two_files_that_were_rolled_back_together_the_one_that_is_mended_takes_the_other_where_it_fits_no_other() {
    let renamed = TOPOLOGY.replace("spine1", "spine9");
    let reserve = |spine: &str, more: &str| {
        let text_of = format!("[policy]\nname = \"pfa\"\n{more}\n[[reserve]]\ntenant = \"t\"\npaths = [{spine:?}]\n");
        text("policy.toml", &text_of)
    };
    let mut fixture = Fixture::new("ffa");
    fixture.begin_wide("t");
    fixture.run();
    refuse(&mut fixture, Some("this host has no flows over rdma"));
    let both = (Some(text("topology.toml", &renamed)), Some(reserve("spine9", "transport = \"rdma\"")));
    fixture.controller.files(both.0, both.1, fixture.now);
    fixture.run();
    refuse(&mut fixture, None);
    assert_eq!(fixture.show().policy.as_deref(), Some("ffa"));
    fixture.controller.files(None, Some(reserve("spine9", "")), fixture.now);
    fixture.run();
    assert_eq!(fixture.show().policy.as_deref(), Some("pfa"));
    assert_eq!(fixture.controller.topology_text(), Some(&*renamed));
    assert_eq!(fixture.history().pop().unwrap().went, Went::Done, "{:?}", fixture.history());
}

#[test]
fn hosts_that_contradict_the_topology_are_told_of_and_keep_another_from_being_put_in_force() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let before = fixture.chosen(&comm).clone();
    let with = |devices: u32| {
        let host = "name = \"host-b\"\ndevices = ";
        assert!(TOPOLOGY.contains(host));
        text("topology.toml", &TOPOLOGY.replace(&format!("{host}2"), &format!("{host}{devices}")))
    };
    let line = TOPOLOGY.lines().position(|line| line == "name = \"host-b\"").unwrap() + 2;
    let says = |gpus: u32| {
        format!("topology.toml:{line}:1: host[1].devices: must be {gpus}: the service of \"host-b\" uses so many GPUs")
    };
    // A host reports later, as one that was away: what is in force goes on, and who arrives is decided for.
    let host = name("host-b");
    fixture.controller.lost(&host, fixture.now);
    let with_gpus = |fixture: &mut Fixture, gpus: u32| {
        fixture.host(&host).agent =
            Agent::new(name("host-a")).with_inventory(Inventory { gpus, ..Inventory::default() });
        fixture.controller.met(&host, fixture.now);
        fixture.run();
    };
    with_gpus(&mut fixture, 4);
    let other = fixture.begin("u", &[("host-a", &[0]), ("host-c", &[1])]);
    fixture.run();
    assert_eq!((fixture.chosen(&comm), fixture.chosen(&other).epoch), (&before, 1));
    let view = fixture.show();
    let [contradiction] = &view.contradictions[..] else { panic!("{view:?}") };
    assert!(contradiction.starts_with(&says(4)) && contradiction.ends_with("not 2"), "{contradiction}");
    let told =
        |fixture: &mut Fixture| fixture.history().iter().filter(|entry| entry.what.contains("contradicted")).count();
    assert_eq!(told(&mut fixture), 1);
    // Nothing is put in force on it, until it says what there is.
    assert!(fixture.answer(apply("ecmp")).unwrap_err().contains(&says(4)));
    fixture.controller.files(Some(with(3)), None, fixture.now);
    fixture.run();
    assert!(matches!(&fixture.history().last().unwrap().went, Went::Failed(why) if why.contains(&says(4))));
    assert_eq!((fixture.show().policy.as_deref(), fixture.chosen(&comm)), (Some("ffa"), &before));
    fixture.controller.files(Some(with(4)), None, fixture.now);
    fixture.run();
    assert_eq!(fixture.show().contradictions, [""; 0]);
    assert!(matches!(fixture.answer(apply("ecmp")), Ok(ControllerAnswer::Applied(_))));
    // It has gone, and another is called so; and then one without GPUs, whose devices are as many as the topology says.
    fixture.controller.lost(&host, fixture.now);
    fixture.run();
    with_gpus(&mut fixture, 2);
    assert_eq!((fixture.show().contradictions.len(), told(&mut fixture)), (1, 2));
    fixture.controller.lost(&host, fixture.now);
    fixture.run();
    with_gpus(&mut fixture, 0);
    assert_eq!(fixture.show().contradictions, [""; 0]);
}

#[test]
fn what_goes_over_paths_and_links_is_shown_and_decides_nothing() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let before = fixture.chosen(&comm).clone();
    let host = name("host-b");
    let carry = |fixture: &mut Fixture, bytes: u64| {
        let (peer, path) = ("host-c".to_owned(), "ports 20000-20099".to_owned());
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
    assert_eq!((&*path.from, &*path.to, &*path.way, path.bps), ("host-b", "host-c", "spine0", 8_000_000_000));
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
