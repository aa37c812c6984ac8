//! Reports and paces that wait on a host are bounded, and none is lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs_config::change::StrategyChange;

use super::fixture::{Fixture, Host, change_by, name};
use crate::agent::{Agent, AgentOutput, PACE_KEPT_FOR, PACES_MAX};
use crate::messages::message::{AgentMessage, ControllerMessage};
use crate::pace::HostPace;
use mccs_model::CommId;
use mccs_telemetry::placed::PaceUse;

#[test]
fn a_host_that_fell_behind_reports_anew() {
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
    fixture.execute(&host, [AgentOutput::Tell(message)]);
    fixture.run();
    let view = fixture.show();
    assert_eq!(view.communicators.iter().map(|comm| &comm.name).collect::<Vec<_>>(), [&there.to_string()]);
    assert_eq!(fixture.chosen(&there).epoch, 1);
}

#[test]
fn a_report_that_waits_is_made_once_with_the_latest_state() {
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
fn paces_of_communicators_that_never_come_are_forgotten_and_make_room() {
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
