//! Ranks on GPUs of several hosts that combine among themselves what the services move.

use std::path::PathBuf;
use std::sync::OnceLock;

use anyhow::ensure;
use mccs::{CollectiveKind, DataType, RedOp, ReduceOperator, Scalar};
use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_cuda::{DeviceMemory, Event, OwnedStream, RawStream, copy_from_host, copy_to_host};
use mccs_device::cuda::QUEUES_VARIABLE;
use mccs_eval::workload::{Call, POISON};
use mccs_tests::TestService;
use mccs_tests::hosts::TestHosts;

use super::TENANTS;
use super::ranks::{
    Buffers, FORKS, Place, Player, Rank, Role, call, capture, enqueue, enqueue_at, enqueue_with, everybody,
};
use super::until_it_fails::{ABORTS, all_are_told, calls_until_it_fails, others_hear_of_a_kill};

/// What processes of these tests do, besides what those of others do.
pub const ROLES: &[(&str, Role)] = &[
    ("combines", combines),
    ("combines_all_types", combines_all_types),
    ("combines_in_place", combines_in_place),
    ("combines_in_turns", combines_in_turns),
    ("combines_late", combines_late),
    ("combines_long", combines_long),
    ("combines_until_it_fails", combines_until_it_fails),
    ("combines_in_graphs", combines_in_graphs),
    ("counts_what_rails_move", counts_what_rails_move),
    ("waits_for_the_last", waits_for_the_last),
];

const KINDS: [CollectiveKind; 8] = [
    CollectiveKind::AllReduce,
    CollectiveKind::AllGather,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllToAll,
    CollectiveKind::Broadcast,
    CollectiveKind::Reduce,
    CollectiveKind::Gather,
    CollectiveKind::Scatter,
];

/// With a block for each rank, none of which is combined.
const MOVING: [CollectiveKind; 2] = [CollectiveKind::AllGather, CollectiveKind::AllToAll];

/// Services where GPUs combine payloads of all sizes.
pub fn everything() -> String {
    TENANTS.replacen("[cuda]\n", "[cuda]\nrails_from = \"1B\"\n", 1)
}

/// The same, where what GPUs reduce goes round a ring of hosts.
fn round_a_ring() -> String {
    everything().replacen("[cuda]\n", "[strategy]\nreductions = \"ring\"\n[cuda]\n", 1)
}

/// Has teams of so many ranks, with a service each, play a role.
pub fn play_in_teams(role: &str, hosts: &TestHosts, teams: &[u32]) -> Vec<String> {
    play_as(0, role, hosts, teams)
}

/// The same, as a tenant.
pub fn play_as(tenant: usize, role: &str, hosts: &TestHosts, teams: &[u32]) -> Vec<String> {
    play_with(tenant, role, hosts, teams, &[])
}

/// The same, with more in the environment.
fn play_with(
    tenant: usize,
    role: &str,
    hosts: &TestHosts,
    teams: &[u32],
    environment: &[(&str, PathBuf)],
) -> Vec<String> {
    let nranks = teams.iter().sum();
    let whole = Place { nranks, root: "h0".into(), ..everybody(hosts.service(0), tenant) };
    let mut first = 0;
    let players: Vec<_> = teams
        .iter()
        .enumerate()
        .map(|(host, team)| {
            let ranks = first..first + team;
            first = ranks.end;
            let place = Place { ranks, socket: hosts.service(host).socket(tenant), ..whole.clone() };
            Player::start_with(role, &place, environment)
        })
        .collect();
    players.into_iter().map(Player::ends_well).collect()
}

/// Both tenants' ranks play a role at once, in teams of so many.
pub fn both_play(role: &str, hosts: &TestHosts, teams: &[u32]) {
    std::thread::scope(|scope| {
        let play = |tenant| scope.spawn(move || play_as(tenant, role, hosts, teams));
        let players = [0, 1].map(play);
        players.into_iter().for_each(|player| drop(player.join().expect("a tenant's ranks")));
    });
}

/// Teams of as many ranks as there are GPUs, and fewer, on several hosts.
pub fn teams() -> Vec<Vec<u32>> {
    match mccs_cuda::gpus().expect("GPUs").len() {
        0 => panic!("needs a GPU"),
        1 => vec![vec![1, 1], vec![1, 1, 1]],
        2 => vec![vec![2, 2], vec![2, 1], vec![2, 2, 2], vec![1, 1, 1]],
        3 => vec![vec![3, 3], vec![3, 1], vec![2, 3]],
        _ => vec![vec![4, 4], vec![4, 2], vec![3, 1], vec![2, 4, 1]],
    }
}

pub fn every_kind(number: u64, nranks: u32, count: u64) -> Call {
    let kind = KINDS[number as usize % KINDS.len()];
    let root = if kind.has_root() { (number / 3) as u32 % nranks } else { 0 };
    Call { kind, root, ..call(number, nranks, count) }
}

pub fn synchronize(stream: &OwnedStream) -> anyhow::Result<()> {
    // SAFETY: the stream lives.
    unsafe { stream.raw().synchronize()? };
    Ok(())
}

/// Calls of all kinds, from one element on, on two streams in turn, without waiting; then all are checked.
fn combines(place: &Place) -> anyhow::Result<()> {
    combines_and(place, None)
}

/// The same, and a call of more slices than there are slots where slices are longest.
fn combines_long(place: &Place) -> anyhow::Result<()> {
    combines_and(place, Some(every_kind(96, place.nranks, 14_000_005)))
}

fn combines_and(place: &Place, long: Option<Call>) -> anyhow::Result<()> {
    // The same for all ranks of an all-reduce: it takes longer to make than to carry out.
    let expected = OnceLock::new();
    place.each_rank(|Rank { context, comm, stream, together }| {
        ensure!(comm.is_service_executed() && comm.rails_from() == Some(1), "{:?}", comm.rails_from());
        let other = OwnedStream::new(&context)?;
        // Undivided, of one slice, of four slices, and of more slices than there are slots.
        let counts = [1, 77, 4100, 50_001, 300_003];
        let calls = counts.into_iter().enumerate().flat_map(|(turn, count)| {
            (0..KINDS.len() as u64).map(move |n| every_kind(n + 8 * turn as u64, place.nranks, count))
        });
        let calls: Vec<_> = calls.chain(long).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()))?;
        together.wait();
        for (index, (call, at)) in calls.iter().zip(&at).enumerate() {
            enqueue(&comm, call, at, if index % 3 == 0 { other.raw() } else { stream.raw() })?;
        }
        synchronize(&stream)?;
        synchronize(&other)?;
        ensure!(comm.async_error().is_none(), "{:?}", comm.async_error());
        for (call, at) in calls.iter().zip(&at) {
            if long.as_ref() == Some(call) {
                let expected = expected.get_or_init(|| call.expected(comm.rank()));
                ensure!(at.output(call, comm.rank())? == *expected, "wrong elements of {call:?}");
            } else {
                at.check(call, comm.rank())?;
            }
        }
        Ok(())
    })
}

fn combines_all_types(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (mut calls, mut number) = (Vec::new(), 0);
        for dtype in DataType::ALL {
            for (kind, count) in MOVING.into_iter().flat_map(|kind| [37, 20_001].map(|count| (kind, count))) {
                number += 1;
                calls.push(Call { kind, dtype: *dtype, root: 0, ..call(number, place.nranks, count) });
            }
            for redop in RedOp::ALL {
                for kind in [CollectiveKind::AllReduce, CollectiveKind::ReduceScatter, CollectiveKind::Reduce] {
                    number += 1;
                    let count = [37, 20_001][(number % 7 == 0) as usize];
                    let root = if kind.has_root() { number as u32 % place.nranks } else { 0 };
                    let shape = call(number, place.nranks, count);
                    calls.push(Call { kind, dtype: *dtype, redop: *redop, root, ..shape });
                }
            }
        }
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()))?;
        together.wait();
        for (call, at) in calls.iter().zip(&at) {
            let op = match call.redop {
                RedOp::PreMulSum => ReduceOperator::PreMulSum(Scalar::Integer(call.scalar(comm.rank()))),
                op => op.into(),
            };
            enqueue_with(&comm, call, op, at, stream.raw())?;
        }
        synchronize(&stream)?;
        ensure!(comm.async_error().is_none(), "{:?}", comm.async_error());
        calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, comm.rank()))
    })
}

/// Where the input lies in the output, or the other way round.
fn combines_in_place(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (size, rank) = (size_of::<f32>() as u64, comm.rank());
        let calls = [3, 5000, 400_001].into_iter().enumerate().flat_map(|(turn, count)| {
            (0..KINDS.len() as u64).map(move |n| every_kind(n + 8 * turn as u64, place.nranks, count))
        });
        let calls: Vec<_> = calls.collect();
        let room = |call: &Call| (0..place.nranks).map(|rank| call.send_count(rank).max(call.recv_count(rank))).max();
        let memory = calls.iter().map(|call| DeviceMemory::zeroed(&context, room(call).unwrap_or(1).max(1) * 4));
        let memory = memory.collect::<Result<Vec<_>, _>>()?;
        let others = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        let mut places = Vec::new();
        for ((call, memory), others) in calls.iter().zip(&memory).zip(&others) {
            places.push(match call.in_place_elements(rank) {
                // SAFETY: the memory has room for the longer of both, and nothing is in flight.
                Some((send, recv)) => unsafe {
                    copy_from_host(memory.address(), &vec![POISON; memory.len_bytes()])?;
                    copy_from_host(memory.address() + send * size, &call.input(rank))?;
                    (memory.address() + send * size, memory.address() + recv * size)
                },
                None => {
                    others.fill(call, rank)?;
                    (others.send.address(), others.recv.address())
                }
            });
        }
        together.wait();
        for (call, &(send, recv)) in calls.iter().zip(&places) {
            enqueue_at(&comm, call, call.redop.into(), send, recv, stream.raw())?;
        }
        synchronize(&stream)?;
        for (call, (_, recv)) in calls.iter().zip(&places) {
            let mut output = vec![0; call.recv_count(rank) * size as usize];
            // SAFETY: it has that many bytes.
            unsafe { copy_to_host(&mut output, *recv)? };
            let wrong = call.wrong_elements(rank, &output);
            ensure!(wrong == 0, "{wrong} wrong elements of {call:?} in place on rank {rank}");
        }
        Ok(())
    })
}

/// Calls that go by rails and such that the whole carries out, in turns, each checked.
fn combines_in_turns(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let from = comm.rails_from().expect("rails");
        ensure!(from == 64 << 10, "{from}");
        let calls: Vec<_> = (0..48).map(|n| every_kind(n, place.nranks, [1000, 40_000, 5][n as usize % 3])).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        together.wait();
        for (call, at) in calls.iter().zip(&at) {
            at.fill(call, comm.rank())?;
            enqueue(&comm, call, at, stream.raw())?;
            synchronize(&stream)?;
            at.check(call, comm.rank())?;
        }
        Ok(())
    })
}

/// Calls of many slices, before the first capture, in graphs and beside them; some in a stream that comes into the capture.
fn combines_in_graphs(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let other = OwnedStream::new(&context)?;
        let [forked, joined] = [Event::new(&context, false)?, Event::new(&context, false)?];
        let calls: Vec<_> = (0..8).map(|n| every_kind(n, place.nranks, 90_001 + 30_000 * (n % 3))).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        let fill = || calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()));
        let works = |range: std::ops::Range<usize>, stream| {
            calls[range.clone()].iter().zip(&at[range]).try_for_each(|(call, at)| enqueue(&comm, call, at, stream))
        };
        // Before the first capture, and on its way when that is.
        fill()?;
        together.wait();
        works(0..2, stream.raw())?;
        let two = |stream: RawStream| {
            works(2..3, stream)?;
            // SAFETY: events and streams live.
            unsafe {
                forked.record(stream)?;
                other.raw().wait(&forked)?;
                works(3..5, other.raw())?;
                joined.record(other.raw())?;
                stream.wait(&joined)?;
            }
            Ok(())
        };
        let mut graphs =
            [capture(&stream, &together, two)?, capture(&stream, &together, |stream| works(5..7, stream))?];
        for round in 0..3 {
            fill()?;
            together.wait();
            for turn in 0..2 {
                let (first, second) = if (round + turn) % 2 == 0 { (&stream, &other) } else { (&other, &stream) };
                // SAFETY: communicator, buffers and streams live.
                unsafe {
                    graphs[0].launch(first.raw())?;
                    graphs[1].launch(second.raw())?;
                }
                works(7..8, first.raw())?;
            }
            synchronize(&stream)?;
            synchronize(&other)?;
            ensure!(comm.async_error().is_none(), "{:?}", comm.async_error());
            calls[2..].iter().zip(&at[2..]).try_for_each(|(call, at)| at.check(call, comm.rank()))?;
        }
        Ok(())
    })
}

/// The last rank's stream comes to its calls when all others wait for it.
fn combines_late(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let calls: Vec<_> = (0..8).map(|n| every_kind(n, place.nranks, 70_001)).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()))?;
        together.wait();
        for (index, (call, at)) in calls.iter().zip(&at).enumerate() {
            if comm.rank() as usize == index % place.nranks as usize {
                std::thread::sleep(std::time::Duration::from_millis(30));
            }
            enqueue(&comm, call, at, stream.raw())?;
        }
        synchronize(&stream)?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, comm.rank()))
    })
}

/// Long calls, until everybody hears of the end.
fn combines_until_it_fails(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let Rank { context, comm, stream, .. } = &rank;
        let calls: Vec<_> = (0..4).map(|n| every_kind(n, place.nranks, 400_001)).collect();
        let at = calls.iter().map(|call| Buffers::of(context, call)).collect::<Result<Vec<_>, _>>()?;
        calls_until_it_fails(&rank, |turn| {
            let (call, at) = (&calls[turn % calls.len()], &at[turn % calls.len()]);
            enqueue(comm, call, at, stream.raw())
        })
    })
}

/// Launches of a graph with a collective.
const REPLAYS: u64 = 3;

/// A call of each kind and a graph's, long enough for all rails to have a part, and stays.
fn counts_what_rails_move(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        for kind in KINDS {
            let call = Call { kind, ..call(0, place.nranks, 20_000) };
            let at = Buffers::of(&context, &call)?;
            at.fill(&call, comm.rank())?;
            together.wait();
            enqueue(&comm, &call, &at, stream.raw())?;
            synchronize(&stream)?;
            at.check(&call, comm.rank())?;
        }
        let call = call(1, place.nranks, 20_000);
        let at = Buffers::of(&context, &call)?;
        let mut graph = capture(&stream, &together, |stream| enqueue(&comm, &call, &at, stream))?;
        for _ in 0..REPLAYS {
            at.fill(&call, comm.rank())?;
            // SAFETY: communicator, buffers and stream live.
            unsafe { graph.launch(stream.raw())? };
            synchronize(&stream)?;
            at.check(&call, comm.rank())?;
        }
        together.wait();
        if comm.rank() == place.ranks.start {
            println!("is done");
        }
        loop {
            std::thread::park();
        }
    })
}

/// All but the last rank call, and wait for it.
fn waits_for_the_last(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let call = call(0, place.nranks, 50_000);
        let at = Buffers::of(&context, &call)?;
        at.fill(&call, comm.rank())?;
        together.wait();
        if comm.rank() + 1 < place.nranks {
            enqueue(&comm, &call, &at, stream.raw())?;
        }
        println!("has called");
        loop {
            std::thread::park();
        }
    })
}

#[test]
#[ignore = "needs a GPU"]
fn gpus_of_several_hosts_combine_what_the_services_move() {
    for teams in teams() {
        let hosts = TestHosts::start(teams.len(), &everything());
        play_in_teams("combines_long", &hosts, &teams);
    }
}

/// Segments of all calls of several slices have streams of their own: calls of all kinds in streams that change, in place, late, and in graphs.
#[test]
#[ignore = "needs a GPU"]
fn segments_of_long_calls_have_streams_of_their_own() {
    let forked = [(FORKS, "1".into())];
    for teams in teams() {
        let roles = ["combines_in_place", "combines_late", "combines_in_graphs"];
        for role in roles {
            let hosts = TestHosts::start(teams.len(), &everything());
            play_with(0, role, &hosts, &teams, &forked);
        }
    }
    let teams = &teams()[0];
    play_with(0, "combines_long", &TestHosts::start(teams.len(), &everything()), teams, &forked);
}

/// All streams of a GPU share one queue, which takes their work in the order of the calls.
#[test]
#[ignore = "needs a GPU"]
fn segments_go_on_in_one_queue() {
    let environment = [(FORKS, "1".into()), (QUEUES_VARIABLE, "1".into())];
    let teams = &teams()[0];
    for role in ["combines_in_place", "combines_in_graphs"] {
        play_with(0, role, &TestHosts::start(teams.len(), &everything()), teams, &environment);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn every_type_and_operator_goes_by_rails() {
    let teams = teams();
    for teams in [&teams[0], &teams[1]] {
        let hosts = TestHosts::start(teams.len(), &everything());
        play_in_teams("combines_all_types", &hosts, teams);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn calls_in_place_go_by_rails() {
    for teams in teams() {
        let hosts = TestHosts::start(teams.len(), &everything());
        play_in_teams("combines_in_place", &hosts, &teams);
    }
}

/// Memory goes from process to process by descriptors alone.
#[test]
#[ignore = "needs a GPU"]
fn rails_need_no_handles() {
    let teams = &teams()[1];
    let hosts = TestHosts::start(teams.len(), &super::without_handles(&everything()));
    ["combines_late", "exchanges"].into_iter().for_each(|role| drop(play_in_teams(role, &hosts, teams)));
}

/// Two tenants' communicators use the same GPUs and hosts at once.
#[test]
#[ignore = "needs a GPU"]
fn two_tenants_go_by_rails_at_once() {
    let teams = &teams()[1];
    both_play("combines_late", &TestHosts::start(teams.len(), &everything()), teams);
}

#[test]
#[ignore = "needs a GPU"]
fn short_and_long_calls_take_turns() {
    let teams = &teams()[0];
    let hosts = TestHosts::start(teams.len(), TENANTS);
    play_in_teams("combines_in_turns", &hosts, teams);
}

#[test]
#[ignore = "needs a GPU"]
fn a_rank_may_come_late_to_what_rails_move() {
    let teams = &teams()[0];
    let hosts = TestHosts::start(teams.len(), &everything());
    play_in_teams("combines_late", &hosts, teams);
}

#[test]
#[ignore = "needs a GPU"]
fn communicators_with_rails_do_not_wait_for_each_other() {
    let teams = &teams()[0];
    let hosts = TestHosts::start(teams.len(), &everything());
    play_in_teams("mixes_communicators", &hosts, teams);
}

#[test]
#[ignore = "needs a GPU"]
fn factors_in_memory_of_gpus_go_by_rails() {
    let teams = &teams()[0];
    let hosts = TestHosts::start(teams.len(), &everything());
    play_in_teams("scales", &hosts, teams);
}

/// What hosts combine goes on from one to the next: of every length, type and operator, out of and in place, and in graphs.
#[test]
#[ignore = "needs a GPU"]
fn reductions_go_round_a_ring_of_hosts() {
    let most = mccs_cuda::gpus().expect("GPUs").len().min(2) as u32;
    for teams in [vec![most; 3], vec![most, 1, most], vec![1; 4]] {
        let hosts = TestHosts::start(teams.len(), &round_a_ring());
        ["combines_long", "combines_in_place"].into_iter().for_each(|role| drop(play_in_teams(role, &hosts, &teams)));
    }
    let hosts = TestHosts::start(3, &round_a_ring());
    let roles = ["combines_all_types", "combines_late", "replays_beside_calls"];
    roles.into_iter().for_each(|role| drop(play_in_teams(role, &hosts, &[1; 3])));
}

/// Sends and receives: inside hosts by kernels, between them by the services, in one group.
#[test]
#[ignore = "needs a GPU"]
fn messages_inside_hosts_and_between_them_go_in_one_group() {
    for teams in &teams()[..2] {
        let hosts = TestHosts::start(teams.len(), &everything());
        play_in_teams("exchanges", &hosts, teams);
    }
    let teams = &teams()[0];
    let hosts = TestHosts::start(teams.len(), &everything());
    ["exchanges_in_graphs", "pipelines", "errs"].into_iter().for_each(|role| drop(play_in_teams(role, &hosts, teams)));
}

/// Graphs replay what goes by rails, in any order with calls, by sums whose factors change.
#[test]
#[ignore = "needs a GPU"]
fn graphs_go_by_rails() {
    let teams = &teams()[1];
    for role in ["replays", "replays_beside_calls", "scales_in_graphs", "leaves_while_a_graph_waits"] {
        let hosts = TestHosts::start(teams.len(), &everything());
        play_in_teams(role, &hosts, teams);
    }
}

/// Processes of all ranks of two hosts with two each.
pub fn four_processes(hosts: &TestHosts, environment: &[(&str, PathBuf)]) -> Vec<Player> {
    four_play("combines_until_it_fails", hosts, environment)
}

/// The same, in another role.
pub fn four_play(role: &str, hosts: &TestHosts, environment: &[(&str, PathBuf)]) -> Vec<Player> {
    let whole = Place { nranks: 4, root: "h0".into(), ..everybody(hosts.service(0), 0) };
    let place = |rank: u32| Place {
        ranks: rank..rank + 1,
        socket: hosts.service(rank as usize / 2).socket(0),
        ..whole.clone()
    };
    (0..4).map(|rank| Player::start_with(role, &place(rank), environment)).collect()
}

#[test]
#[ignore = "needs two GPUs"]
fn all_hear_of_a_rank_that_is_killed_among_rails() {
    hear_of_a_killed_rank(&[]);
    hear_of_a_killed_rank(&[(FORKS, "1".into())]);
}

fn hear_of_a_killed_rank(environment: &[(&str, PathBuf)]) {
    let hosts = TestHosts::start(2, &everything());
    others_hear_of_a_kill(four_processes(&hosts, environment));
    for host in [0, 1] {
        super::wait_until(|| hosts.service(host).service().registry.comms().is_empty());
    }
}

#[test]
#[ignore = "needs two GPUs"]
fn all_hear_of_an_abort_among_rails() {
    hear_of_an_abort(&[(ABORTS, "1".into())]);
}

#[test]
#[ignore = "needs two GPUs"]
fn all_hear_of_an_abort_among_segments_in_streams_of_their_own() {
    hear_of_an_abort(&[(ABORTS, "1".into()), (FORKS, "1".into())]);
}

fn hear_of_an_abort(environment: &[(&str, PathBuf)]) {
    let hosts = TestHosts::start(2, &everything());
    all_are_told(four_processes(&hosts, environment), "aborted");
    for host in [0, 1] {
        super::wait_until(|| hosts.service(host).service().registry.comms().is_empty());
    }
}

/// Of one service: `tests/gpu-emulated.sh` emulates them.
#[test]
#[ignore = "needs two GPUs without peer access"]
fn gpus_that_do_not_reach_each_other_go_by_rails() {
    let service = TestService::start(&everything());
    let place = everybody(&service, 0);
    assert!(place.gpus > 1, "needs two GPUs");
    Player::start("combines_long", &place).ends_well();
}

/// One operator who wants no rails decides for all.
#[test]
#[ignore = "needs a GPU"]
fn one_host_without_rails_is_one_for_all() {
    let settings = |host: usize| match host {
        0 => everything(),
        _ => TENANTS.replacen("[cuda]\n", "[cuda]\nrails_from = \"0\"\n", 1),
    };
    let hosts = TestHosts::start_each(2, settings);
    play_in_teams("stages", &hosts, &[1, 1]);
    for host in [0, 1] {
        super::wait_until(|| hosts.service(host).service().registry.comms().is_empty());
    }
}

/// The operator hears of the job's ranks and their GPUs, not of a rail's.
#[test]
#[ignore = "needs two GPUs"]
fn a_rank_for_which_rails_wait_is_named_as_the_caller_knows_it() {
    let hosts = TestHosts::start(2, &everything());
    let whole = Place { nranks: 4, root: "h0".into(), ..everybody(hosts.service(0), 0) };
    let place = |host: u32| Place {
        ranks: host * 2..host * 2 + 2,
        socket: hosts.service(host as usize).socket(0),
        ..whole.clone()
    };
    let mut players = [0, 1].map(|host| Player::start("waits_for_the_last", &place(host)));
    players.iter_mut().for_each(|player| player.hears("has called"));
    let comms = hosts.service(0).service().registry.comms();
    let found =
        comms.iter().find_map(|comm| comm.part.as_ref().filter(|part| part.name == "rail 2 of 2").zip(Some(comm)));
    let (part_of, rail) = found.expect("the last rank's rail");
    let (request, gpu) = (ControlRequest::WhyStuck { communicator: rail.number }, Some(3 % whole.gpus as u32));
    super::wait_until(|| {
        let Ok(ControlAnswer::Stuck(report)) = ask(&hosts.service(0).control_socket(), &request) else {
            panic!("no report")
        };
        let part = report.part.as_ref().expect("a part");
        assert_eq!((part.whole, part.name.as_str()), (part_of.whole, "rail 2 of 2"));
        let ranks: Vec<_> = report.hosts.iter().flat_map(|(_, told)| told).flat_map(|told| &told.ranks).collect();
        assert!(ranks.iter().all(|rank| [1, 3].contains(&rank.rank)), "{ranks:?}");
        report.culprits.iter().any(|one| (one.host.as_str(), one.rank, one.gpu) == ("h1", Some(3), gpu))
    });
    players.iter_mut().for_each(Player::kill);
}

/// What is to go by rails does: that results are right does not tell.
#[test]
#[ignore = "needs a GPU"]
fn the_whole_moves_nothing_that_rails_do() {
    let teams = &teams()[0];
    let hosts = TestHosts::start(teams.len(), &everything());
    let whole = Place { nranks: teams.iter().sum(), root: "h0".into(), ..everybody(hosts.service(0), 0) };
    let place = |host: u32| Place {
        ranks: host * teams[0]..(host + 1) * teams[0],
        socket: hosts.service(host as usize).socket(0),
        ..whole.clone()
    };
    let mut players = [0, 1].map(|host| Player::start("counts_what_rails_move", &place(host)));
    players.iter_mut().for_each(|player| player.hears("is done"));
    let comms = hosts.service(0).service().registry.comms();
    let of_whole: Vec<_> = comms.iter().filter(|comm| comm.id == whole.id && comm.is_staged()).collect();
    // Ranks have agreed on what goes by rails.
    assert_eq!(of_whole.iter().map(|comm| comm.totals().0).collect::<Vec<_>>(), [1]);
    let named = |words: &str| {
        let is_named = |comm: &&std::sync::Arc<mccs_registry::CommInfo>| {
            comm.part.as_ref().is_some_and(|part| part.name.starts_with(words))
        };
        comms.iter().filter(is_named).collect::<Vec<_>>()
    };
    let graphs = named("graphs on rail");
    assert_eq!(graphs.iter().map(|comm| comm.totals().0).collect::<Vec<_>>(), vec![REPLAYS; teams[0] as usize]);
    let rails = named("rail");
    assert_eq!(rails.len(), teams[0] as usize);
    assert!(rails.iter().all(|rail| rail.totals().0 >= KINDS.len() as u64 && rail.nranks == 2));
    players.iter_mut().for_each(Player::kill);
}

/// A team has one kernel for all other hosts, however many there are.
#[test]
#[ignore = "needs two GPUs"]
fn a_team_has_one_kernel_for_all_hosts() {
    const TEAM: u32 = 2;
    // Two of each call but a reduce-scatter, which has one, and of each replay of an all-gather.
    const KERNELS: u64 = 2 * (KINDS.len() as u64 + REPLAYS) - 1;
    for count in [2, 3] {
        let hosts = TestHosts::start(count as usize, &everything());
        let whole = Place { nranks: count * TEAM, root: "h0".into(), ..everybody(hosts.service(0), 0) };
        let place = |host: u32| Place {
            ranks: host * TEAM..(host + 1) * TEAM,
            socket: hosts.service(host as usize).socket(0),
            ..whole.clone()
        };
        let mut players: Vec<_> =
            (0..count).map(|host| Player::start("counts_what_rails_move", &place(host))).collect();
        players.iter_mut().for_each(|player| player.hears("is done"));
        let comms = hosts.service(0).service().registry.comms();
        let is_team = |comm: &&std::sync::Arc<mccs_registry::CommInfo>| {
            comm.part.as_ref().is_some_and(|part| part.name.starts_with("team"))
        };
        let team = comms.iter().find(is_team).expect("a team");
        super::wait_until(|| {
            // What kernels count is read when somebody asks.
            team.ask();
            team.totals().0 >= KERNELS
        });
        assert_eq!(team.totals().0, KERNELS, "{count} hosts");
        players.iter_mut().for_each(Player::kill);
    }
}

/// That results are right does not tell that they went round a ring: of three hosts an all-reduce and a reduce-scatter take a move more, and a
/// reduce two.
#[test]
#[ignore = "needs a GPU"]
fn a_ring_takes_a_move_for_each_hop() {
    let moves = |settings: &str| {
        let hosts = TestHosts::start(3, settings);
        let whole = Place { nranks: 3, root: "h0".into(), ..everybody(hosts.service(0), 0) };
        let place = |host: u32| Place {
            ranks: host..host + 1,
            socket: hosts.service(host as usize).socket(0),
            ..whole.clone()
        };
        let mut players = [0, 1, 2].map(|host| Player::start("counts_what_rails_move", &place(host)));
        players.iter_mut().for_each(|player| player.hears("is done"));
        let comms = hosts.service(0).service().registry.comms();
        let is_rail = |part: &mccs_registry::PartOf| part.name.starts_with("rail");
        let rails = comms.iter().filter(|comm| comm.part.as_ref().is_some_and(is_rail));
        let count: u64 = rails.map(|comm| comm.totals().0).sum();
        let rings: Vec<_> = comms.iter().map(|comm| comm.reduction_ring_of_ranks()).collect();
        players.iter_mut().for_each(Player::kill);
        (count, rings.into_iter().filter(|ring| !ring.is_empty()).collect::<Vec<_>>())
    };
    let (exchanged, gone_round) = (moves(&everything()), moves(&round_a_ring()));
    assert!(gone_round.0 >= exchanged.0 + 4, "{exchanged:?}, {gone_round:?}");
    assert_eq!((exchanged.1, gone_round.1), (Vec::new(), vec![vec![0, 1, 2]]), "of the whole alone");
}
