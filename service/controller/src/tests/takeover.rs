//! Controllers start, die and replace each other; hosts are lost, come back, or obey another one.

use std::time::{Duration, Instant};

use mccs_config::change::StrategyChange;

use super::fixture::{Fixture, apply, name, policy, refuse};
use crate::cluster::hosts::{GRACE, SYNC_TIME};
use crate::links::LinkState;
use crate::messages::answer::{ControllerRequest, Standing};
use crate::messages::message::{AgentMessage, ControllerMessage, Order};

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
fn a_controller_that_dies_during_a_change_learns_how_it_went() {
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
fn orders_of_another_host_or_an_earlier_life_are_not_obeyed() {
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
fn a_controller_whose_role_another_life_had_takes_over_again() {
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
fn a_controller_whose_clock_was_set_back_takes_a_life_after_those_that_hosts_remember() {
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
fn a_controller_that_no_other_host_obeys_says_whom_they_obey() {
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
fn a_lost_host_takes_its_communicators_with_it_and_reports_anew_when_it_is_back() {
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
fn hosts_that_are_away_or_silent_are_waited_for_within_bounds() {
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
