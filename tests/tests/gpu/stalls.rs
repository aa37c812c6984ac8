//! A tenant whose streams never come to what it called: nobody else waits for it, although nothing can be freed while it stays.

use std::sync::Arc;

use anyhow::ensure;
use mccs_cuda::{DeviceMemory, gpus};
use mccs_tests::TestService;

use super::ranks::{Buffers, Place, Player, Rank, Role, call, enqueue, everybody};
use super::{LARGE, staged, wait_until};

pub const ROLES: &[(&str, Role)] =
    &[("stalls", stalls), ("comes_and_goes", comes_and_goes), ("aborts_late", aborts_late)];

/// More communicators than a GPU has hardware queues, whose ranks call and whose streams never come to it.
fn stalls(place: &Place) -> anyhow::Result<()> {
    let ids = [0, 1, 2, 3, 4, 5, 6, 7, 8].map(|number| place.another_id(number));
    place.each_rank(|first| {
        let rank = first.comm.rank();
        let more =
            ids.iter().map(|id| place.join(rank, *id, Arc::clone(&first.together))).collect::<Result<Vec<_>, _>>()?;
        let call = call(0, place.nranks, 100_000);
        let at = more.iter().map(|_| Buffers::of(&first.context, &call)).collect::<Result<Vec<_>, _>>()?;
        let word = DeviceMemory::zeroed(&first.context, 8)?;
        first.together.wait();
        // SAFETY: word and stream live as long as the process.
        unsafe { first.stream.raw().wait_word(word.address(), 1)? };
        more.iter().zip(&at).try_for_each(|(rank, at)| enqueue(&rank.comm, &call, at, first.stream.raw()))?;
        first.together.wait();
        println!("is there");
        loop {
            std::thread::park();
        }
    })
}

/// Makes communicators and ends them, one after the other, and checks what each does.
fn comes_and_goes(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|first| {
        let call = call(0, place.nranks, 100_000);
        let at = Buffers::of(&first.context, &call)?;
        for number in 0..30 {
            let rank = place.join(first.comm.rank(), place.another_id(number), Arc::clone(&first.together))?;
            at.fill(&call, rank.comm.rank())?;
            rank.together.wait();
            enqueue(&rank.comm, &call, &at, rank.stream.raw())?;
            // SAFETY: the stream lives.
            unsafe { rank.stream.raw().synchronize()? };
            at.check(&call, rank.comm.rank())?;
            rank.together.wait();
        }
        Ok(())
    })
}

/// Memory that it had before it has again: it needs no more of its quota, although nothing can be freed.
#[test]
#[ignore = "needs a GPU"]
fn who_does_not_come_lets_others_come_and_go() {
    let nranks = gpus().expect("GPUs").len().clamp(2, 8);
    let service = TestService::start(&format!("{LARGE}max_communicators = {}\n", 4 * nranks));
    while_nothing_is_freed(&service, || drop(Player::start("comes_and_goes", &everybody(&service, 1)).ends_well()));
}

/// Does something while the first tenant's streams do not come to what it called, so that what others end is kept for their next.
pub fn while_nothing_is_freed(service: &TestService, then: impl FnOnce()) {
    let mut stalled = Player::start("stalls", &everybody(service, 0));
    stalled.hears("is there");
    then();
    stalled.kill();
    wait_until(|| service.service().registry.comms().is_empty());
}

/// Aborts a communicator, and calls on it, that it has left, when another one has come.
fn aborts_late(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|first| {
        let call = call(0, place.nranks, 1000);
        let at = Buffers::of(&first.context, &call)?;
        let run = |rank: &Rank| {
            at.fill(&call, rank.comm.rank())?;
            rank.together.wait();
            enqueue(&rank.comm, &call, &at, rank.stream.raw())?;
            // SAFETY: the stream lives.
            unsafe { rank.stream.raw().synchronize()? };
            at.check(&call, rank.comm.rank())
        };
        run(&first)?;
        first.comm.finalize()?;
        let second = place.join(first.comm.rank(), place.another_id(0), Arc::clone(&first.together))?;
        run(&second)?;
        second.together.wait();
        first.comm.abort()?;
        ensure!(enqueue(&first.comm, &call, &at, first.stream.raw()).is_err());
        run(&second)?;
        ensure!(first.comm.async_error().is_none() && second.comm.async_error().is_none());
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn an_abort_of_what_a_rank_has_left_ends_nothing_else() {
    let service = TestService::start(LARGE);
    while_nothing_is_freed(&service, || drop(Player::start("aborts_late", &everybody(&service, 1)).ends_well()));
    for config in [staged::strict("auto"), staged::by_engines("auto")] {
        let service = TestService::start(&config);
        Player::start("aborts_late", &everybody(&service, 1)).ends_well();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn who_does_not_come_holds_up_nobody_else() {
    let service = TestService::start(LARGE);
    let mut stalled = Player::start("stalls", &everybody(&service, 0));
    stalled.hears("is there");
    // The second finds what the first has left to be freed, which has to wait.
    for _ in 0..2 {
        Player::start("checks", &everybody(&service, 1)).ends_well();
    }
    stalled.kill();
    wait_until(|| service.service().registry.comms().is_empty());
}
