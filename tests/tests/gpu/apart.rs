//! Ranks whose GPUs do not reach each other's memory, and more ranks than do: they work together through memory of the host. The first needs GPUs
//! without peer access, which `tests/gpu-emulated.sh` emulates.

use anyhow::ensure;
use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_cuda::OwnedStream;
use mccs_eval::workload::Call;
use mccs_tests::TestService;

use super::rails::{every_kind, synchronize};
use super::ranks::{Buffers, Place, Player, Rank, Role, call, capture, enqueue, everybody};
use super::until_it_fails::{calls_until_it_fails, others_hear_of_a_kill};
use super::{TENANTS, checks};

/// As many ranks as a service takes at least.
const RANKS: u32 = 16;
/// Payload up to which kernels meet in pinned memory, by default.
const PINNED_TO: u64 = 16 << 10;
/// Calls of each rank, and launches of a graph with one.
const SHORT_CALLS: u64 = 48;
const REPLAYS: u64 = 3;

pub const ROLES: &[(&str, Role)] = &[
    ("checks_through_the_host", checks_through_the_host),
    ("meets_in_pinned_memory", meets_in_pinned_memory),
    ("meets_until_it_fails", meets_until_it_fails),
];

/// As `checks`, where kernels cannot meet.
fn checks_through_the_host(place: &Place) -> anyhow::Result<()> {
    let id = mccs::UniqueId(place.id.0.map(|byte| !byte));
    Place { id, ..place.clone() }.each_rank(|Rank { comm, .. }| {
        ensure!(comm.is_service_executed(), "kernels meet, and would wait for ever");
        let is_pinned = (place.nranks < RANKS && place.gpus > 1).then_some(PINNED_TO);
        ensure!(comm.pinned_to() == is_pinned, "{:?}", comm.pinned_to());
        Ok(())
    })?;
    checks(place)
}

/// Short calls of all kinds on two streams in turn, without waiting, and a graph with one; then all are checked. Stays.
fn meets_in_pinned_memory(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let other = OwnedStream::new(&context)?;
        // The payload of the longest is just what goes there.
        let longest = Call { kind: mccs::CollectiveKind::AllReduce, ..call(0, place.nranks, PINNED_TO / 4) };
        let calls = (1..SHORT_CALLS).map(|n| every_kind(n, place.nranks, 1 + n * 5));
        let calls: Vec<_> = std::iter::once(longest).chain(calls).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()))?;
        together.wait();
        for (index, (call, at)) in calls.iter().zip(&at).enumerate() {
            enqueue(&comm, call, at, if index % 3 == 0 { other.raw() } else { stream.raw() })?;
        }
        [&stream, &other].into_iter().try_for_each(synchronize)?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, comm.rank()))?;
        let (call, at) = (&calls[1], &at[1]);
        let mut graph = capture(&stream, &together, |stream| enqueue(&comm, call, at, stream))?;
        for _ in 0..REPLAYS {
            at.fill(call, comm.rank())?;
            // SAFETY: communicator, buffers and stream live.
            unsafe { graph.launch(stream.raw())? };
            synchronize(&stream)?;
            at.check(call, comm.rank())?;
        }
        ensure!(comm.async_error().is_none(), "{:?}", comm.async_error());
        together.wait();
        if comm.rank() == place.ranks.start {
            println!("is done");
        }
        loop {
            std::thread::park();
        }
    })
}

/// Short calls.
fn meets_until_it_fails(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let Rank { context, comm, stream, .. } = &rank;
        let call = every_kind(0, place.nranks, 1000);
        let at = Buffers::of(context, &call)?;
        calls_until_it_fails(&rank, |_| enqueue(comm, &call, &at, stream.raw()))
    })
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

/// Kernels carry short calls out, and the operator sees that.
#[test]
#[ignore = "needs two GPUs without peer access"]
fn gpus_that_do_not_reach_each_other_meet_in_pinned_memory() {
    let service = TestService::start(TENANTS);
    let mut player = Player::start("meets_in_pinned_memory", &everybody(&service, 0));
    player.hears("is done");
    let comms = service.service().registry.comms();
    let done = |is_wanted: &dyn Fn(&str) -> bool| {
        let of = |comm: &&std::sync::Arc<mccs_registry::CommInfo>| {
            is_wanted(comm.part.as_ref().map_or("the whole", |part| part.name.as_str()))
        };
        comms.iter().filter(of).map(|comm| comm.totals().operations).collect::<Vec<_>>()
    };
    super::wait_until(|| {
        // Counts of kernels are read when somebody asks.
        comms.iter().for_each(|comm| comm.ask());
        done(&|name| name == "pinned memory") == [SHORT_CALLS + REPLAYS]
    });
    // Ranks have agreed on what goes by rails, and on whether its data are copied to memory of the host.
    assert_eq!(done(&|name| name == "the whole"), [2]);
    player.kill();
}

#[test]
#[ignore = "needs two GPUs without peer access"]
fn all_hear_of_a_rank_that_is_killed_where_gpus_that_do_not_reach_each_other_meet() {
    let service = TestService::start(TENANTS);
    let whole = everybody(&service, 0);
    let nranks = whole.gpus as u32;
    let place = |rank: u32| Place { nranks, ranks: rank..rank + 1, ..whole.clone() };
    others_hear_of_a_kill((0..nranks).map(|rank| Player::start("meets_until_it_fails", &place(rank))).collect());
    super::wait_until(|| service.service().registry.comms().is_empty());
}

/// An operator may have the service carry out all that is short.
#[test]
#[ignore = "needs two GPUs without peer access"]
fn gpus_that_do_not_reach_each_other_need_no_pinned_memory() {
    let service = TestService::start(&TENANTS.replacen("[cuda]\n", "[cuda]\npinned_to = \"0\"\n", 1));
    Player::start("checks", &everybody(&service, 0)).ends_well();
}

/// The operator may say so, whatever the driver says.
#[test]
#[ignore = "needs two GPUs"]
fn gpus_need_not_reach_each_other() {
    let service = TestService::start(&TENANTS.replacen("[cuda]\n", "[cuda]\npeer_access = \"off\"\n", 1));
    let place = everybody(&service, 0);
    assert!(place.gpus > 1, "needs two GPUs");
    Player::start("checks_through_the_host", &place).ends_well();
}

#[test]
#[ignore = "needs a GPU"]
fn more_ranks_than_reach_each_other_work_together() {
    let service = TestService::start(TENANTS);
    let place = Place { nranks: RANKS, ranks: 0..RANKS, gpus: 1, ..everybody(&service, 0) };
    Player::start("checks_through_the_host", &place).ends_well();
}
