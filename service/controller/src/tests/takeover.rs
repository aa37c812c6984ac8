//! Controllers start, die and replace each other; hosts are lost, come back, or obey another one.

use std::time::{Duration, Instant};

use mccs_config::change::StrategyChange;

use super::fixture::{Fixture, apply, name, policy, refuse};
use crate::agent::{Agent, AgentOutput, Live, Obedience};
use crate::cluster::hosts::{DOUBT, GRACE, SYNC_TIME};
use crate::election::voter::{Vote, Voter};
use crate::links::LinkState;
use crate::messages::answer::{ControllerRequest, Standing};
use crate::messages::message::{AgentMessage, ControllerMessage, Order};
use crate::state::{Controller, Term};

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
    // A communicator with its root here is looked after at once.
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
    // Two of the hosts that were met do not report.
    fixture.to_agents.retain(|(to, _)| *to == name("host-a"));
    fixture.pass(GRACE);
    assert_eq!(fixture.chosen(&comm).epoch, 0);
    fixture.pass(SYNC_TIME);
    assert_eq!(fixture.chosen(&comm).epoch, 1);
}

/// An agent that obeys whichever of these is elected, and has a communicator of its own.
fn elected(fixture: &Fixture, voter: Option<Voter>) -> (Agent, Live) {
    let live = fixture.hosts.values().find_map(|host| host.comms.values().next()).expect("a communicator").clone();
    let candidates = vec![name("host-a"), name("host-b")];
    let mut agent = Agent::obeying(Obedience::Elected { candidates, voter });
    agent.look([live.clone()], 1);
    (agent, live)
}

fn sync(life: u64) -> ControllerMessage {
    ControllerMessage::Sync { life, with_profiles: false }
}

fn order(life: u64, live: &Live) -> ControllerMessage {
    let change = StrategyChange { channels: Some(1), ..StrategyChange::default() };
    let (comm, expected_epoch) = (live.comm.clone(), live.chosen.epoch);
    ControllerMessage::Order(Box::new(Order { life, order: 1, comm, expected_epoch, change }))
}

fn is_carried_out(outputs: &[AgentOutput]) -> bool {
    outputs.iter().any(|output| matches!(output, AgentOutput::Change { .. }))
}

#[test]
fn of_two_elected_controllers_the_greater_term_is_obeyed_and_the_other_told() {
    let mut fixture = Fixture::new("ffa");
    fixture.begin_wide("t");
    let (a, b, now) = (name("host-a"), name("host-b"), Instant::now());
    let (mut agent, live) = elected(&fixture, None);
    agent.hear(&a, sync(5), now).unwrap();
    assert_eq!(agent.controller(), Some(&a));
    agent.hear(&b, sync(7), now).unwrap();
    assert_eq!((agent.controller(), agent.newest_life()), (Some(&b), 7));
    let superseded = |to| vec![AgentOutput::Reply { to, message: AgentMessage::Superseded { by: 7 } }];
    assert_eq!(agent.hear(&a, sync(6), now).unwrap(), superseded(a.clone()));
    assert_eq!(agent.hear(&a, sync(7), now).unwrap(), superseded(a.clone()), "a term has one holder");
    // Orders that it has sent before it knew are late, and change nothing.
    assert!(agent.hear(&a, order(5, &live), now).is_err());
    assert_eq!(agent.hear(&b, order(5, &live), now).unwrap(), superseded(b.clone()));
    assert!(is_carried_out(&agent.hear(&b, order(7, &live), now).unwrap()));
    // A host that cannot be elected is not heard at all.
    assert!(agent.hear(&name("host-c"), sync(99), now).is_err());
}

#[test]
fn a_host_that_votes_or_hears_of_a_term_obeys_no_lesser_one_from_then_on() {
    let mut fixture = Fixture::new("ffa");
    fixture.begin_wide("t");
    let (a, b, start) = (name("host-a"), name("host-b"), Instant::now());
    let lease = Duration::from_secs(5);
    let (mut agent, live) = elected(&fixture, Some(Voter::new(lease)));
    agent.start_voting(start);
    let votes = |agent: &mut Agent, from, term, now| {
        let outputs = agent.hear(from, ControllerMessage::Claim { question: 3, term }, now).unwrap();
        match &outputs[..] {
            [AgentOutput::Reply { to, message: AgentMessage::Vote { question: 3, term: told, vote } }] => {
                assert_eq!((to, *told), (from, term));
                vote.clone()
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(votes(&mut agent, &a, 10, start), Vote::Started);
    let now = start + lease;
    assert_eq!(votes(&mut agent, &a, 10, now), Vote::Granted);
    agent.hear(&a, sync(10), now).unwrap();
    assert!(is_carried_out(&agent.hear(&a, order(10, &live), now).unwrap()));
    assert_eq!(votes(&mut agent, &b, 11, now), Vote::Held { by: "host-a".into() });
    assert!(is_carried_out(&agent.hear(&a, order(10, &live), now).unwrap()), "nothing has changed");
    let later = now + lease;
    assert_eq!(votes(&mut agent, &b, 11, later), Vote::Granted);
    assert_eq!(agent.hear(&a, order(10, &live), later).unwrap(), [], "it may not have been elected: nobody is obeyed");
    assert_eq!(votes(&mut agent, &a, 10, later + lease), Vote::Later { term: 11 });
    // With a store, it hears the term itself.
    let (mut agent, live) = elected(&fixture, None);
    agent.hear(&a, sync(5), now).unwrap();
    agent.heard_of(6, &b);
    assert_eq!(agent.hear(&a, order(5, &live), now).unwrap(), []);
    agent.hear(&b, sync(6), now).unwrap();
    agent.heard_of(6, &b);
    assert!(is_carried_out(&agent.hear(&b, order(6, &live), now).unwrap()), "it goes on with the term that it knows");
}

#[test]
fn an_elected_controller_takes_no_term_by_itself_and_waits_little_for_a_host_that_was_lost() {
    let names = ["host-a", "host-b", "host-c"].map(name);
    let now = Instant::now();
    let since = now.checked_sub(GRACE).expect("a machine that runs for seconds");
    let term = Term { number: 4, common_ns: 1_000_000, since, lost: Some(names[1].clone()) };
    let mut controller = Controller::elected(term, &names[0], &names, now);
    controller.met(&names[1], now);
    let mut told = Vec::new();
    controller.hear(&names[0], AgentMessage::Synced { life: 4, is_paced: false }, now);
    controller.hear(&names[0], AgentMessage::AskTime { question: 1 }, now + Duration::from_nanos(7));
    controller.settle(now);
    assert_eq!(controller.next_deadline(now), Some(now + DOUBT), "host-c was waited for since the service started");
    controller.hear(&names[0], AgentMessage::Superseded { by: 9 }, now);
    while let Some(output) = controller.poll_output() {
        told.push(format!("{output:?}"));
    }
    assert!(told.iter().any(|output| output.contains("common_ns: 1000007")), "{told:?}");
    assert_eq!(told.last().map(String::as_str), Some("Superseded { by: 9 }"));
    assert!(told.iter().all(|output| !output.contains("life: 10")), "{told:?}");
}
