//! The operator's files: refused, in force, changed one after the other.

use std::collections::BTreeSet;
use std::time::Duration;

use super::fixture::{Fixture, TOPOLOGY, applied, apply, name, policy, refuse, text};
use crate::agent::Agent;
use crate::history::Went;
use crate::inventory::Inventory;
use crate::messages::answer::{ControllerAnswer, ControllerRequest, FileStanding};

const FFA: &str = "[policy]\nname = \"ffa\"\n";

#[test]
fn a_wrong_file_is_refused_with_the_reason_and_changes_nothing() {
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
        // A full disk leaves this of a file with caps.
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
    assert!(fixture.chosen(&comm).paths.iter().all(|path| path.source_ports.is_none_or(|ports| ports.first == 50_000)));
}

#[test]
fn files_that_are_not_in_force_are_shown_with_the_reason() {
    use crate::config::files_on_disk::FileRole;
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
fn topology_and_policy_may_come_in_any_order() {
    let mut fixture = Fixture::new("nonsense");
    let comm = fixture.begin_wide("t");
    fixture.run();
    assert_eq!((fixture.chosen(&comm).epoch, fixture.show().policy), (0, None));
    fixture.controller.files(None, Some(policy("ffa")), fixture.now);
    fixture.run();
    assert_eq!((fixture.chosen(&comm).epoch, fixture.show().policy.as_deref()), (1, Some("ffa")));
}

#[test]
fn files_that_only_fit_together_are_put_in_force_in_either_order() {
    let renamed = TOPOLOGY.replace("spine1", "spine9");
    let reserve = |spine: &str| format!("[policy]\nname = \"pfa\"\n[[reserve]]\ntenant = \"t\"\npaths = [{spine:?}]\n");
    let spines = |fixture: &mut Fixture| {
        let flows = fixture.show().communicators.remove(0).strategy.flows;
        flows.into_iter().filter(|flow| flow.path.starts_with("spine")).map(|flow| flow.path).collect::<BTreeSet<_>>()
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
fn an_operators_policy_stays_when_the_topology_file_changes() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    fixture.answer(apply("ecmp")).unwrap();
    fixture.controller.files(Some(text("topology.toml", &format!("{TOPOLOGY}\n# again"))), None, fixture.now);
    fixture.run();
    assert_eq!((fixture.show().policy.as_deref(), fixture.chosen(&comm).paths.len()), (Some("ecmp"), 0));
    // The operator's last word is not what was taken back.
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
fn hosts_that_contradict_a_topology_are_named_and_keep_another_from_being_put_in_force() {
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
