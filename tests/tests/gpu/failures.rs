//! Ranks that abort, do not come, or are killed: the others are told who it was, and GPUs' memory comes back.

use std::sync::Arc;
use std::time::Duration;

use anyhow::ensure;
use mccs_cuda::{Context, OwnedStream, gpus};
use mccs_tests::TestService;

use super::ranks::{Buffers, Place, Player, Rank, Role, call, enqueue, everybody, everybody_plays};
use super::{LARGE, TENANTS, aborts_later, hears_of_the_abort, told, wait_until};

pub const ROLES: &[(&str, Role)] = &[
    ("aborts", aborts),
    ("aborts_across_streams", aborts_across_streams),
    ("aborts_one_of_two", aborts_one_of_two),
    ("waits_alone", waits_alone),
    ("runs", runs),
];

/// Rank 0 calls, and waits for the others, who never come.
fn wait_for_others(rank: &Rank, nranks: u32) -> anyhow::Result<()> {
    let call = call(0, nranks, 1000);
    let at = Buffers::of(&rank.context, &call)?;
    enqueue(&rank.comm, &call, &at, rank.stream.raw())?;
    // SAFETY: the stream lives.
    unsafe { rank.stream.raw().synchronize()? };
    // At once: a caller would take what there is for the result.
    ensure!(rank.comm.async_error().is_some(), "a call that was aborted has ended without an error");
    Ok(())
}

fn aborts(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        rank.together.wait();
        match rank.comm.rank() {
            0 => wait_for_others(&rank, place.nranks)?,
            1 => aborts_later(&rank)?,
            _ => {}
        }
        hears_of_the_abort(&rank)
    })
}

#[test]
#[ignore = "needs a GPU"]
fn an_abort_ends_what_waits() {
    everybody_plays("aborts", &[TENANTS, LARGE]);
}

/// Rank 0 calls once on a stream, and once more on another one, which goes on behind it.
fn aborts_across_streams(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let other = OwnedStream::new(&rank.context)?;
        let call = call(0, place.nranks, 1000);
        let at = [Buffers::of(&rank.context, &call)?, Buffers::of(&rank.context, &call)?];
        rank.together.wait();
        if rank.comm.rank() == 0 {
            enqueue(&rank.comm, &call, &at[0], rank.stream.raw())?;
            enqueue(&rank.comm, &call, &at[1], other.raw())?;
        } else if rank.comm.rank() == 1 {
            aborts_later(&rank)?;
        }
        // SAFETY: the stream lives.
        unsafe { other.raw().synchronize()? };
        hears_of_the_abort(&rank)
    })
}

#[test]
#[ignore = "needs a GPU"]
fn an_abort_ends_what_waits_for_what_it_ends_on_another_stream() {
    everybody_plays("aborts_across_streams", &[TENANTS, LARGE]);
}

/// Rank 0 waits in two communicators for others, who do not come, and ends the one and then the other.
fn aborts_one_of_two(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|first| {
        let rank = first.comm.rank();
        let second = place.join(rank, place.another_id(0), Arc::clone(&first.together))?;
        let call = call(0, place.nranks, 1000);
        let at = [Buffers::of(&first.context, &call)?, Buffers::of(&first.context, &call)?];
        first.together.wait();
        if rank == 0 {
            enqueue(&first.comm, &call, &at[0], first.stream.raw())?;
            enqueue(&second.comm, &call, &at[1], second.stream.raw())?;
            for rank in [&first, &second] {
                rank.comm.abort()?;
                rank.comm.finalize()?;
            }
        }
        told(&second);
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn communicators_are_aborted_one_after_the_other() {
    everybody_plays("aborts_one_of_two", &[TENANTS]);
}

fn waits_alone(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        rank.together.wait();
        if rank.comm.rank() == 0 {
            wait_for_others(&rank, place.nranks)?;
        }
        let error = told(&rank);
        println!("rank {} was told: {error}", rank.comm.rank());
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn a_rank_that_does_not_come_is_named() {
    let service = TestService::start(&format!("{TENANTS}[limits]\noperation_timeout = \"1s\"\n"));
    let player = Player::start("waits_alone", &everybody(&service, 0));
    let [first, second] = player.processes();
    let said = player.ends_well();
    assert!(said.contains(&format!("rank 0 {first} called operation 1, rank 1 {second}")), "{said}");
    assert!(said.contains("did not"), "{said}");
}

/// Large calls until the communicator fails.
fn runs(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let call = call(0, place.nranks, 4 << 20);
        let at = Buffers::of(&rank.context, &call)?;
        for turn in 0.. {
            let called = enqueue(&rank.comm, &call, &at, rank.stream.raw());
            // SAFETY: the stream lives.
            unsafe { rank.stream.raw().synchronize()? };
            if called.is_err() || rank.comm.async_error().is_some() {
                break;
            }
            if turn == 3 {
                println!("runs");
            }
        }
        println!("was told: {}", told(&rank));
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn a_killed_rank_is_named_and_its_memory_comes_back() {
    [TENANTS, LARGE].iter().for_each(|config| kill_ranks(config));
}

fn kill_ranks(config: &str) {
    let service = TestService::start(config);
    // Checks that are only ever made once.
    Player::start("checks", &everybody(&service, 0)).ends_well();
    wait_until(|| service.service().registry.comms().is_empty());
    let before = free_bytes();
    for _ in 0..3 {
        let id = mccs::unique_id().expect("an id");
        let mut players: Vec<_> = (0..2)
            .map(|rank| {
                let place = Place { id, ranks: rank..rank + 1, nranks: 2, ..everybody(&service, 0) };
                Player::start("runs", &place)
            })
            .collect();
        players.iter_mut().for_each(|player| player.hears("runs"));
        let mut victim = players.pop().expect("two");
        let pid = victim.process.id();
        victim.kill();
        let said = players.pop().expect("the other").ends_well();
        // A look may find the process while it ends, before its socket is closed.
        let reasons = [format!("rank 1 (process {pid}) has gone"), format!("the process of rank 1 ({pid}) is ending")];
        assert!(reasons.iter().any(|reason| said.contains(reason)), "{said}");
        wait_until(|| service.service().registry.comms().is_empty());
        wait_until_as_free(&before);
    }
}

/// Bytes that are free, by GPU.
pub fn free_bytes() -> Vec<u64> {
    let free = |gpu| Context::primary(gpu).and_then(|context| context.free_bytes());
    gpus().expect("GPUs").iter().map(|gpu| free(gpu).expect("a number")).collect()
}

/// Waits until as much is free as was, by GPU; says now and then what is missing.
pub fn wait_until_as_free(before: &[u64]) {
    const SLACK: u64 = 1 << 20;
    for look in 1.. {
        let missing: Vec<_> =
            free_bytes().iter().zip(before).map(|(now, before)| before.saturating_sub(*now)).collect();
        if missing.iter().all(|bytes| *bytes <= SLACK) {
            return;
        }
        if look % 1000 == 0 {
            eprintln!("bytes that are missing, by GPU: {missing:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
