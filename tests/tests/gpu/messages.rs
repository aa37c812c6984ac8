//! Sends and receives between GPUs of several hosts: in memory of the GPUs where NICs reach it, in memory of the host elsewhere.

use anyhow::ensure;
use mccs_cuda::OwnedStream;
use mccs_tests::hosts::TestHosts;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::gpudirect::{Fixture, NICS, NOTHING, refuse};
use super::p2p::{Exchange, Message};
use super::rails::{everything, four_play, play_in_teams, synchronize, teams};
use super::ranks::{Place, Rank, Role, capture};
use super::until_it_fails::{ABORTS, all_are_told, calls_until_it_fails, others_hear_of_a_kill};

pub const ROLES: &[(&str, Role)] = &[
    ("swaps", swaps),
    ("swaps_in_graphs", swaps_in_graphs),
    ("swaps_beside_one_that_waits", swaps_beside_one_that_waits),
    ("swaps_until_it_fails", swaps_until_it_fails),
];

/// From here on messages are in memory of GPUs.
const LONG_BYTES: u64 = 256 << 10;
/// On both sides of every limit, and longer than all slots of a lane.
const LENGTHS: [u64; 10] = [0, 1, 4099, 65_537, LONG_BYTES - 1, LONG_BYTES, 700_001, 1 << 20, (1 << 20) + 1, 4_500_003];
/// Groups.
const TURNS: u64 = 8;

/// Messages of a turn, between every pair of ranks and in both directions: up to two for each, of lengths that chance decides.
fn messages(turn: u64, nranks: u32) -> Vec<Message> {
    let mut chance = StdRng::seed_from_u64(turn);
    let pairs = (0..nranks).flat_map(|from| (0..nranks).map(move |to| (from, to))).filter(|(from, to)| from != to);
    let of_pair = |(from, to)| {
        let count = chance.random_range(0..=2);
        let bytes: Vec<u64> = (0..count).map(|_| LENGTHS[chance.random_range(0..LENGTHS.len())]).collect();
        bytes.into_iter().map(move |bytes| Message { from, to, bytes })
    };
    pairs.flat_map(of_pair).collect()
}

/// Groups one behind the other, without waiting, each called in an order of the rank's own.
fn swaps(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (rank, nranks, other) = (comm.rank(), place.nranks, OwnedStream::new(&context)?);
        let all = (0..TURNS).map(|turn| Exchange::new(&context, rank, messages(turn, nranks)));
        let all = all.collect::<Result<Vec<_>, _>>()?;
        all.iter().zip(0..).try_for_each(|(exchange, turn)| exchange.fill(turn))?;
        together.wait();
        let mut chance = StdRng::from_os_rng();
        for (exchange, turn) in all.iter().zip(0..TURNS) {
            let stream = if turn % 3 == 1 { other.raw() } else { stream.raw() };
            exchange.enqueue_in_any_order(&comm, stream, &mut chance)?;
        }
        synchronize(&stream)?;
        synchronize(&other)?;
        ensure!(comm.async_error().is_none(), "{:?}", comm.async_error());
        all.iter().zip(0..).try_for_each(|(exchange, turn)| exchange.check(turn))
    })
}

/// Graphs of groups, replayed on other data, with calls between.
fn swaps_in_graphs(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let exchange = |turn| Exchange::new(&context, comm.rank(), messages(turn, place.nranks));
        let (captured, called) = ([exchange(1)?, exchange(2)?], exchange(3)?);
        let mut chance = StdRng::from_os_rng();
        together.wait();
        let mut graph = capture(&stream, &together, |stream| {
            captured.iter().try_for_each(|one| one.enqueue_in_any_order(&comm, stream, &mut chance))
        })?;
        for seed in 0..6 {
            captured.iter().chain([&called]).try_for_each(|one| one.fill(seed))?;
            // SAFETY: communicator, buffers and stream live.
            unsafe { graph.launch(stream.raw())? };
            called.enqueue_in_any_order(&comm, stream.raw(), &mut StdRng::from_os_rng())?;
            synchronize(&stream)?;
            captured.iter().chain([&called]).try_for_each(|one| one.check(seed))?;
        }
        ensure!(comm.async_error().is_none(), "{:?}", comm.async_error());
        Ok(())
    })
}

/// A long message of rank 0's waits for the last rank, which does not come to it before all other messages have ended.
fn swaps_beside_one_that_waits(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (rank, last, beside) = (comm.rank(), place.nranks - 1, OwnedStream::new(&context)?);
        let exchange = |messages| Exchange::new(&context, rank, messages);
        let late = exchange(vec![Message { from: 0, to: last, bytes: 9_000_001 }])?;
        let others = exchange(messages(5, last))?;
        // The last rank hears that they have ended.
        let goes = exchange((1..last).map(|from| Message { from, to: last, bytes: 300_000 }).collect())?;
        [&late, &others, &goes].into_iter().try_for_each(|one| one.fill(7))?;
        let run = |one: &Exchange, on: &OwnedStream| {
            one.enqueue_in_any_order(&comm, on.raw(), &mut StdRng::from_os_rng())?;
            anyhow::Ok(())
        };
        if rank == 0 {
            run(&late, &beside)?;
        }
        run(&others, &stream)?;
        synchronize(&stream)?;
        run(&goes, &stream)?;
        synchronize(&stream)?;
        if rank == last {
            run(&late, &beside)?;
        }
        synchronize(&beside)?;
        [&late, &others, &goes].into_iter().try_for_each(|one| one.check(7))?;
        // A rank that leaves has the driver wait for the late message, and another rank that needs a lane before that wait for the
        // driver.
        together.wait();
        Ok(())
    })
}

/// Groups, until everybody hears of the end.
fn swaps_until_it_fails(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let Rank { context, comm, stream, .. } = &rank;
        let every = |from| (0..place.nranks).filter(move |to| *to != from).map(move |to| (from, to));
        let pairs = (0..place.nranks).flat_map(every);
        let exchange = Exchange::new(
            context,
            comm.rank(),
            pairs.map(|(from, to)| Message { from, to, bytes: 5 << 20 }).collect(),
        )?;
        calls_until_it_fails(&rank, |_| exchange.enqueue_in_any_order(comm, stream.raw(), &mut StdRng::from_os_rng()))
    })
}

/// The host of a rank.
fn host_of(rank: u32, teams: &[u32]) -> usize {
    let mut end = 0;
    let ends = teams.iter().map(|team| {
        end += team;
        end
    });
    ends.take_while(|end| *end <= rank).count()
}

/// Bytes of long messages that ranks of a host send to other hosts, and take from them, by the place of their GPU's NIC.
fn long_bytes(host: usize, teams: &[u32]) -> [(u64, u64); NICS] {
    let (mut bytes_of, gpus) = ([(0, 0); NICS], mccs_cuda::gpus().expect("GPUs").len());
    let all = (0..TURNS).flat_map(|turn| messages(turn, teams.iter().sum()));
    for Message { from, to, bytes } in all.filter(|message| message.bytes >= LONG_BYTES) {
        let ([from_host, to_host], nic) =
            ([from, to].map(|rank| host_of(rank, teams)), |rank: u32| rank as usize % gpus % NICS);
        if from_host != to_host {
            bytes_of[nic(from)].0 += if from_host == host { bytes } else { 0 };
            bytes_of[nic(to)].1 += if to_host == host { bytes } else { 0 };
        }
    }
    bytes_of
}

/// Bytes that each NIC of a host has read from memory of GPUs, and written there.
fn gpu_bytes(fixture: &Fixture, host: usize) -> [(u64, u64); NICS] {
    fixture.carried(host).map(|nic| (nic.out_gpu_bytes, nic.in_gpu_bytes))
}

/// NICs of a host have read all its long messages from memory of GPUs, and written those of others there, each for the ranks beside it.
fn assert_long_are_in_gpus(fixture: &Fixture, host: usize, teams: &[u32]) {
    let (long, carried) = (long_bytes(host, teams), gpu_bytes(fixture, host));
    assert!(long.iter().any(|(sent, _)| *sent > 0) && long.iter().any(|(_, taken)| *taken > 0), "{teams:?}");
    // A packet that nobody has acknowledged in time is sent again, and taken once.
    let is_so = |((sent, taken), carried): (&(u64, u64), &(u64, u64))| carried.0 >= *sent && carried.1 == *taken;
    assert!(long.iter().zip(&carried).all(is_so), "host {host} of {teams:?}: {carried:?} of {long:?}");
}

#[test]
#[ignore = "needs two GPUs"]
fn nics_read_and_write_long_messages_in_memory_of_gpus() {
    for teams in teams() {
        let fixture = Fixture::new(teams.len(), |_| String::new(), |_| ());
        play_in_teams("swaps", &fixture.hosts, &teams);
        for host in 0..teams.len() {
            assert_long_are_in_gpus(&fixture, host, &teams);
        }
        fixture.waits_for_memory(teams.len());
    }
}

/// Each host decides for itself.
#[test]
#[ignore = "needs two GPUs"]
fn messages_of_a_host_whose_nics_do_not_reach_gpus_go_through_its_memory() {
    let teams = &teams()[0];
    let fixture = Fixture::new(2, |_| String::new(), |folder| refuse(folder, &[1], &NOTHING));
    play_in_teams("swaps", &fixture.hosts, teams);
    assert_eq!(gpu_bytes(&fixture, 0), [(0, 0); NICS]);
    assert_long_are_in_gpus(&fixture, 1, teams);
    // The quota does for rails, and for no lane.
    let fixture = Fixture::with(2, |host, text| match host {
        0 => text.replacen("name = \"a\"\n", "name = \"a\"\nmax_gpu_memory = \"1MiB\"\n", 1),
        _ => text,
    });
    play_in_teams("swaps", &fixture.hosts, &[1, 1]);
    assert_eq!(gpu_bytes(&fixture, 0), [(0, 0); NICS]);
    assert_long_are_in_gpus(&fixture, 1, &[1, 1]);
    fixture.waits_for_memory(2);
}

#[test]
#[ignore = "needs two GPUs"]
fn messages_go_over_tcp() {
    let teams = &teams()[1];
    let hosts = TestHosts::start(teams.len(), &everything());
    ["swaps", "swaps_in_graphs"].into_iter().for_each(|role| drop(play_in_teams(role, &hosts, teams)));
}

#[test]
#[ignore = "needs two GPUs"]
fn graphs_of_messages_are_replayed_over_nics() {
    let teams = &teams()[0];
    let fixture = Fixture::new(teams.len(), |_| String::new(), |_| ());
    ["swaps_in_graphs", "exchanges_in_graphs"]
        .into_iter()
        .for_each(|role| drop(play_in_teams(role, &fixture.hosts, teams)));
    fixture.waits_for_memory(teams.len());
}

#[test]
#[ignore = "needs two GPUs"]
fn who_comes_late_holds_up_no_other_message() {
    let teams = [2, 2];
    let fixture = Fixture::new(teams.len(), |_| String::new(), |_| ());
    play_in_teams("swaps_beside_one_that_waits", &fixture.hosts, &teams);
}

#[test]
#[ignore = "needs two GPUs"]
fn all_hear_of_a_rank_that_is_killed_among_messages() {
    let fixture = Fixture::new(2, |_| String::new(), |_| ());
    others_hear_of_a_kill(four_play("swaps_until_it_fails", &fixture.hosts, &[]));
    fixture.waits_for_memory(2);
}

#[test]
#[ignore = "needs two GPUs"]
fn all_hear_of_an_abort_among_messages() {
    let fixture = Fixture::new(2, |_| String::new(), |_| ());
    all_are_told(four_play("swaps_until_it_fails", &fixture.hosts, &[(ABORTS, "1".into())]), "aborted");
    fixture.waits_for_memory(2);
}
