//! Files that a communicator has refused, and files that change afterwards.

use super::fixture::{Fixture, TOPOLOGY, apply, policy, refuse, text};
use crate::history::Went;

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
    let moved = TOPOLOGY.replace("50000-50499", "51000-51499");
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
    // An operator's later word counts.
    refuse(&mut fixture, None);
    fixture.answer(apply("ecmp")).unwrap();
    fixture.controller.files(Some(again("fifth")), None, fixture.now);
    fixture.run();
    stands(&mut fixture, "fifth", "ecmp");
    assert_eq!(fixture.history().pop().unwrap().went, Went::Done);
}

#[test]
fn a_mended_file_takes_the_other_one_that_was_rolled_back_with_it() {
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
