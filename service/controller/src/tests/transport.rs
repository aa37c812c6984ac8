//! The policy's transport of flows is rolled out and taken back like all else.

use mccs_config::service::TransportKind;

use super::fixture::{Fixture, name};
use crate::messages::answer::{ControllerAnswer, ControllerRequest};
use mccs_model::CommId;

fn over(fixture: &Fixture, comms: &[CommId]) -> Vec<Option<TransportKind>> {
    comms.iter().map(|comm| fixture.chosen(comm).transport).collect()
}

fn apply(transport: &str) -> ControllerRequest {
    ControllerRequest::Apply { name: "new.toml".into(), text: format!("[policy]\nname = \"ffa\"\n{transport}\n") }
}

#[test]
fn a_transport_of_a_policy_ends_with_it() {
    let mut fixture = Fixture::new("ffa");
    let comms = [fixture.begin_wide("t"), fixture.begin("u", &[("host-c", &[0]), ("host-b", &[1])])];
    fixture.run();
    assert_eq!(over(&fixture, &comms), [Some(TransportKind::Tcp); 2]);
    // A host that cannot: those that could are changed back.
    fixture.host(&name("host-c")).refuses = Some("this host has no flows over rdma".into());
    let Ok(ControllerAnswer::Applied(applied)) = fixture.answer(apply("transport = \"rdma\"")) else {
        panic!("no answer")
    };
    assert!(applied.rolled_back && applied.failed[0].1.contains("rdma"), "{applied:?}");
    assert_eq!(over(&fixture, &comms), [Some(TransportKind::Tcp); 2]);
    fixture.host(&name("host-c")).refuses = None;
    let Ok(ControllerAnswer::Applied(applied)) = fixture.answer(apply("transport = \"rdma\"")) else {
        panic!("no answer")
    };
    assert!(!applied.rolled_back && applied.changed.len() == 2, "{applied:?}");
    assert_eq!(over(&fixture, &comms), [Some(TransportKind::Rdma); 2]);
    assert_eq!(fixture.show().communicators[0].strategy.transport, Some(TransportKind::Rdma));
    let Ok(ControllerAnswer::Applied(_)) = fixture.answer(apply("")) else { panic!("no answer") };
    assert_eq!(over(&fixture, &comms), [Some(TransportKind::Tcp); 2]);
}
