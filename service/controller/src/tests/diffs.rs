//! A diff says what an apply then does.

use std::collections::BTreeSet;

use mccs_config::change::StrategyChange;

use super::fixture::{Fixture, TOPOLOGY, TWO_TENANTS, applied, apply, text};
use crate::messages::answer::{ControllerAnswer, ControllerRequest, DiffView, PolicyDiff, StrategyView};

fn apply_text(text: &str) -> ControllerRequest {
    ControllerRequest::Apply { name: "new.toml".into(), text: text.into() }
}

/// Changes that a policy would make to every communicator.
fn diff(fixture: &mut Fixture, text: &str) -> Vec<DiffView> {
    match fixture.answer(ControllerRequest::Diff { name: "new.toml".into(), text: text.into() }) {
        Ok(ControllerAnswer::Diff(diff)) => diff.communicators,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_diff_says_what_an_apply_then_does() {
    let mut fixture = Fixture::new("ffa");
    fixture.begin_wide("t");
    fixture.run();
    let made = fixture.changes_made();
    let request = ControllerRequest::Diff { name: "e.toml".into(), text: "[policy]\nname = \"ecmp\"\n".into() };
    let Ok(ControllerAnswer::Diff(PolicyDiff { communicators: diff, .. })) = fixture.answer(request) else { panic!() };
    assert_eq!((diff.len(), diff[0].changes, fixture.changes_made()), (1, true, made));
    let way = |flows: &[crate::messages::answer::FlowView]| {
        flows.iter().find(|flow| (&*flow.from, &*flow.to) == ("host-b", "host-c")).unwrap().path.clone()
    };
    assert!(way(&diff[0].before.flows).starts_with("spine"), "{:?}", diff[0].before);
    assert_eq!(way(&diff[0].after.as_ref().unwrap().flows), "hash");
    fixture.answer(apply("ecmp")).unwrap();
    assert_eq!(fixture.show().communicators[0].strategy, *diff[0].after.as_ref().unwrap());
}

/// Each of them changes nothing but how flows leave hosts.
#[test]
fn a_diff_shows_caps_weights_shares_and_windows_that_an_apply_then_tells() {
    let mut fixture = Fixture::new("ffa");
    let comms = TWO_TENANTS.map(|tenant| fixture.begin_wide(tenant));
    fixture.run();
    let mut before = Vec::new();
    let ffa = "[policy]\nname = \"ffa\"\n[[tenant]]\nname = \"t\"\n";
    let window = "[[window]]\ntenant = \"t\"\nperiod = \"10ms\"\noffset = \"1ms\"\nlength = \"5ms\"\n";
    for (rules, words, paced) in [
        ("cap = \"30Gbit/s\"\n", "30000.0 Mbit/s a flow", &comms[..1]),
        ("cap = \"20Gbit/s\"\n", "20000.0 Mbit/s a flow", &comms[..1]),
        ("weight = 3\n", "weight 3", &comms[..]),
        ("share_percent = 60\n", "weight 60", &comms[..]),
        (window, "5.00 ms of each 10.00, from 1.00 on", &comms[..]),
        ("", "", &comms[..1]),
    ] {
        let policy = format!("{ffa}{rules}");
        let told = diff(&mut fixture, &policy);
        let of_t = &told[0];
        assert_eq!((of_t.changes, of_t.changes_strategy), (true, false), "{rules}: {of_t:?}");
        assert_eq!(of_t.after.as_ref(), Ok(&of_t.before));
        assert_eq!(of_t.paces_before, before, "{rules}");
        assert!(of_t.paces_after.iter().all(|(_, pace)| pace.to_string().contains(words)), "{rules}: {of_t:?}");
        assert_eq!(of_t.paces_after.len(), if words.is_empty() { 0 } else { 4 });
        // It is done as it was said, without a change that hosts agree on; the history tells of it, and it is no change the next time.
        let entries = fixture.history().len();
        let what = applied(fixture.answer(apply_text(&policy)));
        assert_eq!((what.changed.len(), what.failed.len()), (0, 0), "{rules}: {what:?}");
        assert_eq!(what.paced, paced.iter().map(ToString::to_string).collect::<Vec<_>>(), "{rules}");
        let view = fixture.show();
        let communicators = view.communicators.iter().zip(&told);
        communicators.for_each(|(comm, told)| assert_eq!(comm.paces, told.paces_after, "{rules}"));
        let history = fixture.history();
        let [applying, telling] = &history[entries..] else { panic!("{history:?}") };
        assert!(applying.what.contains("new.toml") && telling.what.contains(&what.paced[0]), "{history:?}");
        assert!(diff(&mut fixture, &policy).iter().all(|told| !told.changes), "{rules}");
        before = of_t.paces_after.clone();
    }
    assert_eq!(fixture.changes_made(), 2, "those of the first policy");
}

#[test]
fn a_diff_shows_priorities_and_the_switches_classes() {
    let mut fixture = Fixture::new("ffa");
    let topology = format!("{TOPOLOGY}[[class]]\npriority = 2\ndscp = 16\n");
    fixture.controller.files(Some(text("topology.toml", &topology)), None, fixture.now);
    let [first, _] = TWO_TENANTS.map(|tenant| fixture.begin_wide(tenant));
    fixture.run();
    let of =
        |priority: u32| format!("[policy]\nname = \"priority\"\n[[tenant]]\nname = \"t\"\npriority = {priority}\n");
    let marks = |strategy: &StrategyView| {
        let marks = strategy.flows.iter().map(|flow| (flow.priority, flow.class_dscp));
        marks.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>()
    };
    let told = diff(&mut fixture, &of(2));
    assert_eq!([told[0].changes_strategy, told[1].changes], [true, false], "{told:?}");
    let (now, then) = (&told[0].before, told[0].after.as_ref().unwrap());
    assert_eq!((marks(now), marks(then)), (vec![(None, None)], vec![(Some(2), Some(16))]));
    let ways = |strategy: &StrategyView| strategy.flows.iter().map(|flow| flow.path.clone()).collect::<Vec<_>>();
    assert_eq!(ways(now), ways(then), "they go the same ways");
    fixture.answer(apply_text(&of(2))).unwrap();
    assert_eq!(marks(&fixture.show().communicators[0].strategy), [(Some(2), Some(16))]);
    // One that switches have no class for.
    let told = diff(&mut fixture, &of(3));
    assert_eq!(marks(told[0].after.as_ref().unwrap()), [(Some(3), None)]);
    assert!(told[0].changes_strategy && told[0].not_enforced[0].contains("priority 3"), "{told:?}");
    assert_eq!(fixture.chosen(&first).epoch, 2);
}

#[test]
fn a_pinned_communicator_keeps_its_strategy_in_a_diff_and_not_its_pace() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    fixture.change_by_hand(
        &comm,
        StrategyChange { rings: Some(vec![vec![7, 6, 5, 4, 3, 2, 1, 0]; 2]), ..Default::default() },
    );
    fixture.run();
    let told = diff(&mut fixture, "[policy]\nname = \"ecmp\"\n[[tenant]]\nname = \"t\"\ncap = \"30Gbit/s\"\n");
    assert_eq!((told[0].is_pinned, told[0].changes, told[0].changes_strategy), (true, true, false));
    assert_eq!((told[0].after.as_ref(), told[0].paces_after.len()), (Ok(&told[0].before), 4));
}
