//! Ranks on GPUs whose collectives the service carries out: two services joined by TCP, each with half of the ranks, and one
//! service whose operator wants it so.

pub mod graphs;

use std::time::Duration;

use anyhow::ensure;
use mccs::{CollectiveKind, RedOp, ReduceOperator};
use mccs_cuda::{DeviceMemory, OwnedStream, RawStream, copy_from_host};
use mccs_eval::workload::Call;
use mccs_tests::TestService;
use mccs_tests::hosts::TestHosts;

use super::TENANTS;
use super::ranks::{Buffers, Place, Player, Rank, Role, Together, call, capture, enqueue, enqueue_with, everybody};

/// Roles of processes of these tests, besides those of others.
pub const ROLES: &[(&str, Role)] = &[
    ("stages", stages),
    ("scales", scales),
    ("scales_in_graphs", scales_in_graphs),
    ("is_told", is_told),
    ("leaves_at_once", leaves_at_once),
    ("runs_ahead", runs_ahead),
];

const ORDERINGS: [&str; 4] = ["auto", "words", "kernels", "events"];

/// A service that carries everything out, whose callers' streams wait in this way.
pub fn strict(ordering: &str) -> String {
    format!(
        "[cuda]\nuse = \"required\"\nexecution = \"service\"\nordering = {ordering:?}\n\
         [[tenant]]\nname = \"a\"\nsocket = \"a\"\n[[tenant]]\nname = \"b\"\nsocket = \"b\"\n"
    )
}

/// The same, with nearly everything by its engines.
pub fn by_engines(ordering: &str) -> String {
    strict(ordering).replacen("[cuda]\n", "[cuda]\nlarge_from = \"1KiB\"\n", 1)
}

/// The halves of a communicator, with a service for each.
fn halves(hosts: &TestHosts, tenant: usize) -> [Place; 2] {
    let whole = everybody(hosts.service(0), tenant);
    let half = whole.nranks / 2;
    let second = Place {
        socket: hosts.service(1).socket(tenant),
        ranks: half..whole.nranks,
        root: "h0".into(),
        ..whole.clone()
    };
    [Place { ranks: 0..half, root: "h0".into(), ..whole }, second]
}

pub fn play_halves(role: &str, hosts: &TestHosts) -> Vec<String> {
    let players = halves(hosts, 0).map(|place| Player::start(role, &place));
    players.into_iter().map(Player::ends_well).collect()
}

/// Calls of all kinds, short and of several pieces, on two streams in turn, without waiting; then all are checked.
fn stages(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        ensure!(comm.is_service_executed());
        let other = OwnedStream::new(&context)?;
        // A slot has 8 MiB: the longer ones take several, and the last of them is odd; the longest takes more than there are.
        let counts = [1, 77, 5000, 262_144, 1_000_003, 2_500_001];
        let calls = (0..36).map(|n| call(n, place.nranks, counts[(n + n / 6) as usize % counts.len()]));
        let calls: Vec<_> = calls.chain([call(36, place.nranks, 8_500_001)]).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()))?;
        together.wait();
        for (index, (call, at)) in calls.iter().zip(&at).enumerate() {
            enqueue(&comm, call, at, if index % 3 == 0 { other.raw() } else { stream.raw() })?;
        }
        // SAFETY: both live.
        unsafe {
            stream.raw().synchronize()?;
            other.raw().synchronize()?;
        }
        if let Some(error) = comm.async_error() {
            return Err(error.into());
        }
        calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, comm.rank()))
    })
}

/// Pre-multiplied sums whose factors are right in the GPUs' memory only when the stream comes to the call.
fn scales(place: &Place) -> anyhow::Result<()> {
    scales_by(place, |stream, _, enqueue| enqueue(stream.raw()))
}

/// The same in graphs.
fn scales_in_graphs(place: &Place) -> anyhow::Result<()> {
    scales_by(place, |stream, together, enqueue| {
        let mut graph = capture(stream, together, enqueue)?;
        // SAFETY: the stream lives, and so does what the graph names until the stream was synchronized.
        unsafe {
            graph.launch(stream.raw())?;
            stream.raw().synchronize()?;
        }
        Ok(())
    })
}

type Enqueue<'a> = &'a dyn Fn(RawStream) -> anyhow::Result<()>;

fn scales_by(place: &Place, run: fn(&OwnedStream, &Together, Enqueue<'_>) -> anyhow::Result<()>) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        ensure!(comm.is_service_executed());
        let size = size_of::<f32>();
        let factors = DeviceMemory::zeroed(&context, 3 * size)?;
        let [factor, right, wrong] = [0, 1, 2].map(|place| factors.address() + place * size as u64);
        // One kernel, copy engines, and several pieces.
        for (number, count) in [1, 5000, 500_000, 2_500_001].into_iter().enumerate() {
            for kind in [CollectiveKind::AllReduce, CollectiveKind::ReduceScatter, CollectiveKind::Reduce] {
                let call = Call { kind, redop: RedOp::PreMulSum, ..call(number as u64, place.nranks, count) };
                let at = Buffers::of(&context, &call)?;
                at.fill(&call, comm.rank())?;
                let own = call.scalar(comm.rank()) as f32;
                let values: Vec<u8> = [f32::NAN, own, f32::NAN].into_iter().flat_map(f32::to_ne_bytes).collect();
                // SAFETY: it has that many bytes, and nothing is in flight.
                unsafe { copy_from_host(factors.address(), &values)? };
                together.wait();
                run(&stream, &together, &|on| {
                    // SAFETY: all live until the stream was synchronized.
                    unsafe { on.copy(factor, right, size)? };
                    enqueue_with(&comm, &call, ReduceOperator::PreMulSumAt(factor), &at, on)?;
                    // SAFETY: as above.
                    unsafe { on.copy(factor, wrong, size)? };
                    Ok(())
                })?;
                // SAFETY: as above.
                unsafe { stream.raw().synchronize()? };
                at.check(&call, comm.rank())?;
            }
        }
        ensure!(comm.async_error().is_none());
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn factors_are_taken_from_the_memory_of_gpus() {
    let hosts = TestHosts::start(2, TENANTS);
    ["scales", "scales_in_graphs"].into_iter().for_each(|role| drop(play_halves(role, &hosts)));
    for ordering in ORDERINGS {
        let service = TestService::start(&strict(ordering));
        Player::start("scales", &everybody(&service, 0)).ends_well();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn two_services_reduce_what_their_gpus_have() {
    let hosts = TestHosts::start(2, TENANTS);
    play_halves("stages", &hosts);
    play_halves("checks", &hosts);
}

#[test]
#[ignore = "needs a GPU"]
fn sends_and_receives_go_through_services() {
    let hosts = TestHosts::start(2, TENANTS);
    ["exchanges", "pipelines", "errs"].into_iter().for_each(|role| drop(play_halves(role, &hosts)));
    for ordering in ORDERINGS {
        let service = TestService::start(&strict(ordering));
        Player::start("exchanges", &everybody(&service, 0)).ends_well();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_receive_goes_on_when_its_sender_does_not_come() {
    let hosts = TestHosts::start(2, &format!("{TENANTS}[limits]\noperation_timeout = \"1s\"\n"));
    let said = play_halves("receives_nothing", &hosts).join("");
    assert!(said.contains("rank 0 was told") && said.contains("rank 1 was told"), "{said}");
}

fn does_everything(ordering: &str) {
    let service = TestService::start(&strict(ordering));
    Player::start("stages", &everybody(&service, 0)).ends_well();
    let players = [0, 1].map(|tenant| Player::start("checks", &everybody(&service, tenant)));
    players.into_iter().for_each(|player| drop(player.ends_well()));
}

#[test]
#[ignore = "needs a GPU"]
fn a_strict_service_does_everything_itself() {
    does_everything("auto");
}

#[test]
#[ignore = "needs a GPU"]
fn a_strict_service_does_everything_itself_by_words() {
    does_everything("words");
}

#[test]
#[ignore = "needs a GPU"]
fn a_strict_service_does_everything_itself_by_kernels() {
    does_everything("kernels");
}

#[test]
#[ignore = "needs a GPU"]
fn a_strict_service_does_everything_itself_by_events() {
    does_everything("events");
}

/// Long operations alone, and the communicator is destroyed before they have ended.
fn leaves_at_once(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (rank, calls) = (comm.rank(), (0..3).map(|n| call(6 * n, place.nranks, 3_000_001)).collect::<Vec<_>>());
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, rank))?;
        together.wait();
        calls.iter().zip(&at).try_for_each(|(call, at)| enqueue(&comm, call, at, stream.raw()))?;
        drop(comm);
        // SAFETY: the stream lives.
        unsafe { stream.raw().synchronize()? };
        calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, rank))
    })
}

#[test]
#[ignore = "needs a GPU"]
fn who_leaves_has_what_was_called() {
    for settings in ORDERINGS.map(strict).iter().map(String::as_str).chain([super::LARGE]) {
        let service = TestService::start(settings);
        Player::start("leaves_at_once", &everybody(&service, 0)).ends_well();
    }
}

/// One rank calls as long as it may while the others have not called at all; then they come.
fn runs_ahead(place: &Place) -> anyhow::Result<()> {
    const CALLS: u64 = 14;
    place.each_rank(|Rank { context, comm, stream, together }| {
        let calls: Vec<_> = (0..CALLS).map(|n| call(6 * n, place.nranks, 300_001)).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()))?;
        let enqueue_all = || calls.iter().zip(&at).try_for_each(|(call, at)| enqueue(&comm, call, at, stream.raw()));
        if comm.rank() == 0 {
            enqueue_all()?;
        }
        together.wait();
        if comm.rank() != 0 {
            enqueue_all()?;
        }
        // SAFETY: the stream lives.
        unsafe { stream.raw().synchronize()? };
        calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, comm.rank()))
    })
}

#[test]
#[ignore = "needs a GPU"]
fn a_rank_may_call_before_the_others() {
    for ordering in ["auto", "words", "kernels"] {
        let service = TestService::start(&strict(ordering));
        Player::start("runs_ahead", &everybody(&service, 0)).ends_well();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn ranks_that_name_a_root_and_are_on_one_host_do_it_themselves() {
    let hosts = TestHosts::start(2, TENANTS);
    let place = Place { root: "h0".into(), ..everybody(hosts.service(0), 0) };
    Player::start("replays", &place).ends_well();
}

/// Rank 0 calls and waits for the others, who do not come; then everybody is told why.
fn is_told(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let several: Vec<_> = (0..3).map(|n| call(6 * n, place.nranks, 1 << 20)).collect();
        let at = several.iter().map(|call| Buffers::of(&rank.context, call)).collect::<Result<Vec<_>, _>>()?;
        rank.together.wait();
        println!("is there");
        if rank.comm.rank() == 0 {
            // The others may go before all is called.
            let calls = several.iter().zip(&at);
            let called = calls.map(|(call, at)| enqueue(&rank.comm, call, at, rank.stream.raw()));
            if let Some(error) = called.filter_map(Result::err).next() {
                println!("a call was refused: {error}");
            }
            // SAFETY: the stream lives.
            unsafe { rank.stream.raw().synchronize()? };
        }
        let error = super::told(&rank);
        println!("rank {} was told: {error}", rank.comm.rank());
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn streams_go_on_when_a_rank_does_not_come_and_it_is_named() {
    let hosts = TestHosts::start(2, &format!("{TENANTS}[limits]\noperation_timeout = \"1s\"\n"));
    let said = play_halves("is_told", &hosts).join("");
    assert!(said.contains("rank 0 was told") && said.contains("rank 1 was told"), "{said}");
    assert!(said.contains("has called nothing after operation 0"), "{said}");
}

#[test]
#[ignore = "needs a GPU"]
fn streams_go_on_when_a_rank_is_killed() {
    let hosts = TestHosts::start(2, TENANTS);
    let [mut first, mut second] = halves(&hosts, 0).map(|place| Player::start("is_told", &place));
    [&mut first, &mut second].iter_mut().for_each(|player| player.hears("is there"));
    let pid = second.process.id();
    second.kill();
    let said = first.ends_well();
    // A look may find the process while it ends, before its socket is closed.
    let reasons = [format!("(process {pid}) has gone"), format!("({pid}) is ending")];
    assert!(reasons.iter().any(|reason| said.contains(reason)), "{said}");
    for host in [0, 1] {
        super::wait_until(|| hosts.service(host).service().registry.comms().is_empty());
    }
}

#[test]
#[ignore = "needs a GPU"]
fn streams_go_on_when_a_service_ends() {
    let mut hosts = TestHosts::start(2, TENANTS);
    let [mut first, mut second] = halves(&hosts, 0).map(|place| Player::start("is_told", &place));
    [&mut first, &mut second].iter_mut().for_each(|player| player.hears("is there"));
    std::thread::sleep(Duration::from_millis(200));
    hosts.stop(1);
    let said = [first, second].map(Player::ends_well).join("");
    assert!(said.contains("rank 0 was told") && said.contains("rank 1 was told"), "{said}");
}

#[test]
#[ignore = "needs a GPU"]
fn streams_that_wait_for_a_strict_service_go_on_when_a_rank_does_not_come() {
    for ordering in ["auto", "events"] {
        let service = TestService::start(&format!("{}[limits]\noperation_timeout = \"1s\"\n", strict(ordering)));
        let said = Player::start("is_told", &everybody(&service, 0)).ends_well();
        assert!(said.contains("rank 0 was told") && said.contains("rank 1 was told"), "{said}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn streams_that_wait_for_a_strict_service_go_on_when_a_rank_is_killed() {
    ["auto", "events"].into_iter().for_each(kill_half);
}

fn kill_half(ordering: &str) {
    let service = TestService::start(&strict(ordering));
    let whole = everybody(&service, 0);
    let half = whole.nranks / 2;
    let mut first = Player::start("is_told", &Place { ranks: 0..half, ..whole.clone() });
    let mut second = Player::start("is_told", &Place { ranks: half..whole.nranks, ..whole });
    [&mut first, &mut second].iter_mut().for_each(|player| player.hears("is there"));
    second.kill();
    let said = first.ends_well();
    assert!(said.contains("rank 0 was told"), "{said}");
    super::wait_until(|| service.service().registry.comms().is_empty());
}

#[test]
#[ignore = "needs a GPU"]
fn a_service_has_the_gpus_that_its_operator_names() {
    let gpu = mccs_cuda::gpus().expect("GPUs")[0].clone();
    for name in [gpu.id.to_string(), gpu.pci_bus_id.clone()] {
        let settings = format!("[cuda]\nuse = \"required\"\ngpus = [{name:?}]\n");
        let service = TestService::start(&settings);
        let place = Place { nranks: 2, ranks: 0..2, gpus: 1, ..everybody(&service, 0) };
        Player::start("checks", &place).ends_well();
    }
    let missing = "[service]\nruntime_dir = \"/nonexistent\"\n[cuda]\ngpus = [\"0000:fe:00.0\"]\n";
    let config = mccs_config::ServiceConfig::parse(missing, "test").expect("well-formed");
    let settings = mccs_service::service::Settings::from_config(&config);
    let refused = mccs_service::service::Service::start(&settings).err().expect("no such GPU").to_string();
    assert!(refused.contains("0000:fe:00.0") && refused.contains(&gpu.id.to_string()), "{refused}");
}
