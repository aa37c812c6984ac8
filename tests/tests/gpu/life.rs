//! The end of a part of a communicator of several services ends all of it, on every rank, with the first reason.

use mccs::{CollectiveKind, DataType, RedOp};
use mccs_eval::workload::Call;
use mccs_tests::hosts::TestHosts;

use super::ranks::{Buffers, Place, Player, Rank, Role, enqueue, everybody};
use super::{TENANTS, told, wait_until};

pub const ROLES: &[(&str, Role)] = &[
    ("combines_until_a_part_fails", combines_until_it_fails),
    ("aborts_in_the_middle", aborts_in_the_middle),
    ("stays_away", stays_away),
];

/// Elements: some stages of team and rail each.
const COUNT: u64 = 50_001;
/// Calls of a rank before it is under way.
const CALLS: u64 = 5;

fn sum(place: &Place, seed: u64) -> Call {
    let (kind, dtype, redop) = (CollectiveKind::AllReduce, DataType::F32, RedOp::Sum);
    Call { kind, dtype, redop, root: 0, count: COUNT, nranks: place.nranks, seed }
}

/// Calls until the communicator fails or `is_over` says so; says when it is under way.
fn combine(rank: &Rank, place: &Place, mut is_over: impl FnMut(u64) -> bool) -> anyhow::Result<()> {
    let call = sum(place, 7);
    let at = Buffers::of(&rank.context, &call)?;
    at.fill(&call, rank.comm.rank())?;
    rank.together.wait();
    let mut number = 0;
    while rank.comm.async_error().is_none() && !is_over(number) {
        if enqueue(&rank.comm, &call, &at, rank.stream.raw()).is_err() {
            break;
        }
        // SAFETY: the stream lives. Awaited words are let go when the communicator fails.
        unsafe { rank.stream.raw().synchronize()? };
        if rank.comm.async_error().is_none() {
            at.check(&call, rank.comm.rank())?;
        }
        number += 1;
        if number == CALLS {
            println!("is under way");
        }
    }
    // Nothing of it is in use when the process ends.
    std::mem::forget(at);
    Ok(())
}

/// Says why it has failed, and waits until all ranks of the process know.
fn say_why(rank: &Rank) -> ! {
    println!("rank {} failed: {}", rank.comm.rank(), told(rank));
    rank.together.wait();
    std::process::exit(0)
}

fn combines_until_it_fails(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        combine(&rank, place, |_| false)?;
        say_why(&rank)
    })
}

/// Rank 0 ends the communicator after some calls.
fn aborts_in_the_middle(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let is_first = rank.comm.rank() == 0;
        combine(&rank, place, |number| is_first && number == 2 * CALLS)?;
        if is_first {
            rank.comm.abort()?;
            rank.together.wait();
            std::process::exit(0)
        }
        say_why(&rank)
    })
}

/// The last rank never calls.
fn stays_away(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        if rank.comm.rank() + 1 == place.nranks {
            rank.together.wait();
        } else {
            combine(&rank, place, |_| false)?;
        }
        say_why(&rank)
    })
}

/// Two services, with a team each that plays a role: of two ranks where there are as many GPUs.
fn start(role: &str, hosts: &TestHosts) -> [Player; 2] {
    let team = mccs_cuda::gpus().expect("GPUs").len().clamp(1, 2) as u32;
    let whole = Place { nranks: 2 * team, root: "h0".into(), ..everybody(hosts.service(0), 0) };
    [0, 1].map(|host| {
        let ranks = host * team..(host + 1) * team;
        let socket = hosts.service(host as usize).socket(0);
        Player::start(role, &Place { ranks, socket, ..whole.clone() })
    })
}

/// Services where GPUs combine payloads of all sizes.
fn settings(more: &str) -> String {
    TENANTS.replacen("[cuda]\n", &format!("{more}[cuda]\nrails_from = \"1B\"\n"), 1)
}

/// Messages of failures have these words on every rank of those that said them, and the service has nothing left.
fn all_say(said: &str, words: &str) {
    let failures: Vec<_> = said.lines().filter(|line| line.contains(" failed: ")).collect();
    assert!(!failures.is_empty() && failures.iter().all(|line| line.contains(words)), "{words}: {said}");
}

fn nothing_is_left(hosts: &TestHosts, host: usize) {
    let registry = &hosts.service(host).service().registry;
    wait_until(|| registry.comms().is_empty() && registry.sessions().is_empty());
}

#[test]
#[ignore = "needs a GPU"]
fn ranks_of_every_service_hear_of_one_that_was_killed_between_stages() {
    let hosts = TestHosts::start(2, &settings(""));
    let [mut here, mut there] = start("combines_until_a_part_fails", &hosts);
    here.hears("is under way");
    there.kill();
    all_say(&here.ends_well(), "has gone");
    for host in [0, 1] {
        nothing_is_left(&hosts, host);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn ranks_of_every_service_hear_of_an_abort_between_stages() {
    let hosts = TestHosts::start(2, &settings(""));
    let [here, there] = start("aborts_in_the_middle", &hosts);
    all_say(&there.ends_well(), "rank 0 aborted");
    here.ends_well();
    for host in [0, 1] {
        nothing_is_left(&hosts, host);
    }
}

#[test]
#[ignore = "needs a GPU"]
fn ranks_hear_of_a_service_that_ends_between_stages() {
    let mut hosts = TestHosts::start(2, &settings(""));
    let [mut here, there] = start("combines_until_a_part_fails", &hosts);
    here.hears("is under way");
    hosts.stop(1);
    all_say(&here.ends_well(), "h1");
    there.ends_well();
    nothing_is_left(&hosts, 0);
}

#[test]
#[ignore = "needs a GPU"]
fn a_rank_that_never_calls_ends_in_a_time_out_on_all() {
    let hosts = TestHosts::start(2, &settings("[limits]\noperation_timeout = \"3s\"\n"));
    let [here, there] = start("stays_away", &hosts);
    for player in [here, there] {
        let said = player.ends_well();
        all_say(&said, "rank ");
        all_say(&said, "wait");
    }
    for host in [0, 1] {
        nothing_is_left(&hosts, host);
    }
}
