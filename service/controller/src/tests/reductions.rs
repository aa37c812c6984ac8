//! How GPUs of several hosts reduce: hosts hear of it from a policy, and forget what another life has said.

use super::fixture::{Fixture, applied, policy, text};
use crate::messages::answer::ControllerRequest;
use mccs_model::Reductions;

const RING: &str = "[policy]\nname = \"ffa\"\nreductions = \"ring\"\n";

fn apply(fixture: &mut Fixture, policy: &str) {
    applied(fixture.answer(ControllerRequest::Apply { name: "new.toml".into(), text: policy.into() }));
    fixture.run();
}

fn told(fixture: &Fixture) -> Vec<Option<Reductions>> {
    fixture.hosts.values().map(|host| host.reductions).collect()
}

/// The hosts of the example, two by two below a leaf.
fn seats(places: [u32; 4]) -> Vec<Option<Reductions>> {
    let seat = |(leaf, place)| Some(Reductions::AcrossLeaves { leaf, place });
    [0, 0, 1, 1].into_iter().zip(places).map(seat).collect()
}

#[test]
fn hosts_hear_of_their_place_in_a_ring_of_reductions_and_forget_it() {
    let mut fixture = Fixture::new("ffa");
    fixture.run();
    assert_eq!(told(&fixture), [None; 4]);
    apply(&mut fixture, RING);
    assert_eq!(told(&fixture), seats([0, 1, 2, 3]), "leaf by leaf");
    let kept = format!("{RING}rings = \"kept\"\n");
    apply(&mut fixture, &kept);
    assert_eq!(told(&fixture), seats([0; 4]), "as ranks are");
    apply(&mut fixture, &RING.replace("\"ring\"", "\"all_to_all\""));
    assert_eq!(told(&fixture), [Some(Reductions::AllToAll); 4]);
    apply(&mut fixture, &RING.replace("reductions", "# reductions"));
    assert_eq!(told(&fixture), [None; 4], "as their own files say");
}

#[test]
fn another_life_says_anew_how_hosts_reduce() {
    let mut fixture = Fixture::new("ffa");
    fixture.run();
    apply(&mut fixture, RING);
    fixture.restart_controller(2, text("policy.toml", RING));
    fixture.run();
    assert_eq!(told(&fixture), seats([0, 1, 2, 3]));
    fixture.restart_controller(3, policy("ffa"));
    fixture.run();
    assert_eq!(told(&fixture), [None; 4]);
}
