//! Requests of tenants to one exchange engine: each tenant's first one has its turn, whatever others have asked before.

use mccs_exchange::limits::SETUPS_PER_TENANT_MAX;
use mccs_exchange::protocol::{CommKey, Event, Join, Request};
use mccs_ipc::types::UniqueId;
use mccs_runtime::Share;

use crate::fixture::{Fixture, name, payload};

/// A rank that waits for one that never comes; or where `is_wrong` is refused at once.
fn join(tenant: u32, number: u64, is_wrong: bool) -> Request {
    let id = UniqueId([number.to_le_bytes(), [tenant as u8; 8]].concat().try_into().expect("16 bytes"));
    let key = CommKey { tenant: name(&format!("t{tenant}")), id };
    let share = Share { tenant, weight: 1 };
    let rank = if is_wrong { 2 } else { 0 };
    Request::Join(Box::new(Join { share, key, root: name("a"), rank, nranks: 2, payload: payload(0, 10) }))
}

#[test]
fn a_flood_of_joins_keeps_another_tenants_request_waiting_for_a_turn() {
    const FLOOD: u64 = 3000;
    let mut fixture = Fixture::running(2);
    fixture.until_all_meet();
    let host = &fixture.hosts[0];
    (0..FLOOD).for_each(|number| host.ask(join(1, number, false)));
    host.ask(join(2, 0, true));
    let refused = |host: &crate::fixture::Host| {
        let events = host.events.lock().expect("no panic");
        let of = |event: &Event| match event {
            Event::JoinRefused { key, .. } => Some(key.tenant.to_string()),
            _ => None,
        };
        events.iter().filter_map(of).collect::<Vec<_>>()
    };
    let beyond = FLOOD as usize - SETUPS_PER_TENANT_MAX;
    fixture.until(|fixture| refused(&fixture.hosts[0]).len() == beyond + 1);
    let order = refused(&fixture.hosts[0]);
    assert_eq!(order[0], "t2", "it comes before the first that the flood is refused");
    assert!(order[1..].iter().all(|tenant| tenant == "t1"));
}
