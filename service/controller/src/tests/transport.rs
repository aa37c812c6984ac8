//! What carries flows, as the policy says: it is rolled out and taken back like all else.

use mccs_config::service::TransportKind;

use super::bed::{Bed, name};
use crate::answer::{ControllerAnswer, ControllerRequest};
use mccs_model::CommId;

fn over(bed: &Bed, comms: &[CommId]) -> Vec<Option<TransportKind>> {
    comms.iter().map(|comm| bed.chosen(comm).transport).collect()
}

fn apply(transport: &str) -> ControllerRequest {
    ControllerRequest::Apply { name: "new.toml".into(), text: format!("[policy]\nname = \"ffa\"\n{transport}\n") }
}

#[test]
fn a_policy_says_what_carries_flows_and_one_that_does_not_lets_them_go_back() {
    let mut bed = Bed::new("ffa");
    let comms = [bed.begin_wide("t"), bed.begin("u", &[("host-c", &[0]), ("host-b", &[1])])];
    bed.run();
    assert_eq!(over(&bed, &comms), [Some(TransportKind::Tcp); 2]);
    // A host that cannot: those that could are changed back.
    bed.host(&name("host-c")).refuses = Some("this host has no flows over rdma".into());
    let Ok(ControllerAnswer::Applied(applied)) = bed.answer(apply("transport = \"rdma\"")) else { panic!("no answer") };
    assert!(applied.rolled_back && applied.failed[0].1.contains("rdma"), "{applied:?}");
    assert_eq!(over(&bed, &comms), [Some(TransportKind::Tcp); 2]);
    bed.host(&name("host-c")).refuses = None;
    let Ok(ControllerAnswer::Applied(applied)) = bed.answer(apply("transport = \"rdma\"")) else { panic!("no answer") };
    assert!(!applied.rolled_back && applied.changed.len() == 2, "{applied:?}");
    assert_eq!(over(&bed, &comms), [Some(TransportKind::Rdma); 2]);
    assert_eq!(bed.show().communicators[0].strategy.transport, Some(TransportKind::Rdma));
    let Ok(ControllerAnswer::Applied(_)) = bed.answer(apply("")) else { panic!("no answer") };
    assert_eq!(over(&bed, &comms), [Some(TransportKind::Tcp); 2]);
}
