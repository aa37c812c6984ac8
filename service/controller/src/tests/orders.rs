//! Orders that are stale, refused or too long, and how many are under way.

use std::time::Duration;

use mccs_config::change::StrategyChange;

use super::fixture::{Fixture, applied, apply, change_by, refuse};
use crate::communicators::communicator::PAUSE;
use crate::communicators::orders::ORDERS_MAX;
use crate::history::{HISTORY_MAX, Went};
use crate::messages::answer::{ControllerAnswer, ControllerRequest, Standing};
use mccs_model::limits::NRANKS_MAX;

#[test]
fn a_stale_order_changes_nothing_and_is_given_anew() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    while fixture.hosts[&comm.root].asked.is_empty() {
        assert!(fixture.step());
    }
    // An operator is faster.
    let by_hand = StrategyChange::parse("channels = 2", "change").unwrap();
    let live = fixture.host(&comm.root).comms.get_mut(&comm).unwrap();
    change_by(live, StrategyChange { rings: Some(vec![vec![7, 6, 5, 4, 3, 2, 1, 0]; 2]), ..by_hand }, 5);
    fixture.pass(Duration::from_secs(5));
    assert_eq!(fixture.chosen(&comm).epoch, 6);
    let history = fixture.history();
    assert!(history.iter().any(|entry| matches!(&entry.went, Went::Failed(why) if why.contains("number 5"))));
    assert!(fixture.show().communicators[0].state == Standing::AsDecided);
}

#[test]
fn a_refused_order_is_given_again_after_a_change_and_a_pause() {
    let mut fixture = Fixture::new("ffa");
    refuse(&mut fixture, Some("a port is taken"));
    let comm = fixture.begin_wide("t");
    fixture.run();
    assert!(matches!(&fixture.show().communicators[0].state, Standing::Refused(why) if why.contains("port")));
    refuse(&mut fixture, None);
    fixture.pass(100 * PAUSE);
    assert_eq!(fixture.chosen(&comm).epoch, 0, "nothing has changed");
    let other = fixture.begin("u", &[("host-b", &[0]), ("host-d", &[1])]);
    fixture.run();
    assert_eq!((fixture.chosen(&comm).epoch, fixture.chosen(&other).epoch), (1, 1));
    // Within the pause nothing is asked again, and after it once.
    refuse(&mut fixture, Some("a port is taken"));
    let third = fixture.begin_wide("v");
    fixture.run();
    refuse(&mut fixture, None);
    let fourth = fixture.begin("u", &[("host-b", &[0]), ("host-d", &[1])]);
    fixture.run();
    assert_eq!((fixture.chosen(&third).epoch, fixture.chosen(&fourth).epoch), (0, 1));
    fixture.pass(PAUSE);
    assert_eq!(fixture.chosen(&third).epoch, 1);
}

#[test]
fn an_order_too_long_for_a_message_is_refused_at_once_and_others_are_given() {
    let mut fixture = Fixture::new("ffa");
    let comm = fixture.begin_wide("t");
    fixture.run();
    let ranks: Vec<u32> = (0..NRANKS_MAX).collect();
    let large = fixture.begin("u", &[("host-a", &ranks[..2000]), ("host-c", &ranks[2000..])]);
    fixture.run();
    let four =
        ControllerRequest::Apply { name: "new.toml".into(), text: "[policy]\nname = \"ffa\"\nchannels = 4\n".into() };
    let what = applied(fixture.answer(four));
    assert_eq!((what.changed, what.rolled_back), (vec![comm.to_string()], false));
    let [(kept, why)] = &what.kept[..] else { panic!("{:?}", what.kept) };
    assert!(*kept == large.to_string() && why.contains("bytes"), "{why}");
    assert_eq!(fixture.chosen(&large).epoch, 1);
}

#[test]
fn many_communicators_are_changed_a_few_at_a_time_and_the_history_is_bounded() {
    let mut fixture = Fixture::new("ffa");
    let comms: Vec<_> = (0..3 * ORDERS_MAX).map(|_| fixture.begin_wide("t")).collect();
    while fixture.step() {
        let under_way: usize = fixture.hosts.values().map(|host| host.asked.len()).sum();
        assert!(under_way <= ORDERS_MAX);
    }
    // Those past some are decided for a little later.
    fixture.pass(Duration::from_secs(1));
    for policy in ["ecmp", "ffa", "ecmp"] {
        let Ok(ControllerAnswer::Applied(applied)) = fixture.answer(apply(policy)) else { panic!("not applied") };
        assert_eq!(applied.changed.len(), comms.len());
    }
    let (orders, others): (Vec<_>, Vec<_>) =
        fixture.history().into_iter().partition(|entry| entry.what.starts_with("order "));
    assert_eq!(orders.len(), HISTORY_MAX);
    assert_eq!(others.iter().filter(|entry| entry.why == "an operator asked").count(), 3, "{others:?}");
    assert!(comms.iter().all(|comm| fixture.chosen(comm).paths.is_empty()));
}
