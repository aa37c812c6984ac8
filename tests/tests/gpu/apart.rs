//! Ranks whose GPUs do not reach each other's memory, and more ranks than do: they work together through memory of the host. The first needs GPUs
//! without peer access, which `tests/gpu-emulated.sh` emulates.

use anyhow::ensure;
use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_tests::TestService;

use super::ranks::{Place, Player, Rank, Role, everybody};
use super::{TENANTS, checks};

/// As many ranks as a service takes at least.
const RANKS: u32 = 16;

pub const ROLES: &[(&str, Role)] = &[("checks_through_the_host", checks_through_the_host)];

/// As `checks`, where kernels cannot meet.
fn checks_through_the_host(place: &Place) -> anyhow::Result<()> {
    let id = mccs::UniqueId(place.id.0.map(|byte| !byte));
    Place { id, ..place.clone() }.each_rank(|Rank { comm, .. }| {
        ensure!(comm.is_service_executed(), "kernels meet, and would wait for ever");
        Ok(())
    })?;
    checks(place)
}

#[test]
#[ignore = "needs two GPUs without peer access"]
fn gpus_that_do_not_reach_each_other_work_together() {
    let service = TestService::start(TENANTS);
    let place = everybody(&service, 0);
    assert!(place.gpus > 1, "needs two GPUs");
    let answer = ask(&service.control_socket(), &ControlRequest::Gpus).expect("an answer");
    let ControlAnswer::Gpus(gpus) = answer else { panic!("{answer:?}") };
    let reasons: Vec<_> = gpus.iter().flat_map(|gpu| &gpu.unreached).collect();
    assert!(reasons.iter().any(|reason| reason.contains("peer access")), "the operator hears why: {reasons:?}");
    Player::start("checks_through_the_host", &place).ends_well();
}

#[test]
#[ignore = "needs a GPU"]
fn more_ranks_than_reach_each_other_work_together() {
    let service = TestService::start(TENANTS);
    let place = Place { nranks: RANKS, ranks: 0..RANKS, gpus: 1, ..everybody(&service, 0) };
    Player::start("checks_through_the_host", &place).ends_well();
}
