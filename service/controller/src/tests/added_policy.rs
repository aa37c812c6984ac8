//! A policy that was added as `docs/guides/policy.md` says decides, when `policy.toml` names it.

use super::fixture::Fixture;

#[test]
fn a_policy_of_ones_own_is_put_in_force_by_its_name() {
    let mut fixture = Fixture::new("in_turn");
    fixture.begin_wide("t");
    fixture.run();
    let view = fixture.show();
    assert_eq!(view.policy.as_deref(), Some("in_turn"));
    // Between the racks the channels take the spines in turn.
    let crossing = view.communicators[0].strategy.flows.iter().filter(|flow| flow.path != "hash");
    let mut ways: Vec<(u32, &str)> = crossing.map(|flow| (flow.channel, flow.path.as_str())).collect();
    ways.sort_unstable();
    ways.dedup();
    assert_eq!(ways, [(0, "spine0"), (1, "spine1")]);
}
