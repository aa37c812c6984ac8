//! Hosts that are lost, slow, or of another mind, and what becomes of what was to be put in force meanwhile.

use super::bed::{Bed, name, policy, text};
use crate::controller::answer::{Applied, ControllerAnswer, ControllerRequest};
use crate::controller::message::ControllerMessage;
use crate::controller::orders::ORDER_TIME;
use crate::controller::state::Ticket;
use crate::engines::proxy::Refused;
use crate::exchange::protocol::CommId;

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
