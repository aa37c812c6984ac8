//! Ranks on GPUs, from the outside: graphs, streams, tenants, and what happens when something goes wrong. Run by
//! `tests/gpu.sh` where there are GPUs; the service is in this process, and ranks are in others.

mod changes;
mod deaths;
mod divided;
mod losses;
mod memory;
mod mps;
mod points;
mod ranks;
mod room;
mod staged;
mod times;
mod values;

use std::collections::HashSet;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use anyhow::ensure;
use mccs::Error;
use mccs_cuda::{Context, DeviceMemory, OwnedStream, RawStream, gpus};
use mccs_eval::workload::Call;
use mccs_ipc::handshake::{Socket, connect};
use mccs_ipc::protocol::{Request, RequestEnvelope, ResponseEnvelope};
use mccs_tests::{TestService, watchdog};

use self::ranks::{Buffers, Place, Player, Rank, Role, call, capture, enqueue, everybody};

const TENANTS: &str = "[cuda]\nuse = \"required\"\n[[tenant]]\nname = \"a\"\nsocket = \"a\"\n\
                       [[tenant]]\nname = \"b\"\nsocket = \"b\"\n";

/// The same, with nearly everything by copy engines.
const LARGE: &str = "[cuda]\nuse = \"required\"\nlarge_from = \"1KiB\"\nslot = \"256KiB\"\n[[tenant]]\nname = \"a\"\n\
                     socket = \"a\"\n[[tenant]]\nname = \"b\"\nsocket = \"b\"\n";

const ROLES: &[(&str, Role)] = &[
    ("checks", checks),
    ("replays", replays),
    ("mixes_streams", mixes_streams),
    ("names_streams_alike", names_streams_alike),
    ("stays", stays),
    ("mixes_communicators", mixes_communicators),
    ("stalls", stalls),
    ("comes_and_goes", comes_and_goes),
    ("aborts_late", aborts_late),
    ("aborts", aborts),
    ("aborts_across_streams", aborts_across_streams),
    ("aborts_one_of_two", aborts_one_of_two),
    ("waits_alone", waits_alone),
    ("runs", runs),
];

/// Not a test: what this binary does when a test has started it as a process of ranks.
#[test]
#[ignore = "needs a GPU"]
fn plays_its_role() {
    watchdog();
    let more = [deaths::ROLES, losses::ROLES, memory::ROLES, mps::ROLES, points::ROLES, room::ROLES, staged::ROLES];
    ranks::play(&[&[ROLES, changes::ROLES, times::ROLES, values::ROLES], &more[..]].concat().concat());
}

/// Calls of many kinds and sizes, each checked.
fn checks(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let calls: Vec<_> = (0..40).map(|n| call(n, place.nranks, 1 + n * 531)).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        together.wait();
        for (call, at) in calls.iter().zip(&at) {
            at.fill(call, comm.rank())?;
            enqueue(&comm, call, at, stream.raw())?;
            // SAFETY: the stream lives.
            unsafe { stream.raw().synchronize()? };
            at.check(call, comm.rank())?;
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn two_tenants_at_once_get_their_own_results() {
    for config in [TENANTS, LARGE] {
        let service = TestService::start(config);
        let players = [0, 1].map(|tenant| Player::start("checks", &everybody(&service, tenant)));
        players.into_iter().for_each(|player| drop(player.ends_well()));
    }
}

#[test]
#[ignore = "needs a GPU"]
fn four_ranks_on_one_gpu_work_together() {
    let service = TestService::start(TENANTS);
    let place = Place { nranks: 4, ranks: 0..4, gpus: 1, ..everybody(&service, 0) };
    Player::start("checks", &place).ends_well();
}

/// Graphs of several calls, replayed with other data each time, between calls of their own.
fn replays(place: &Place) -> anyhow::Result<()> {
    const REPLAYS: u64 = 50;
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (rank, nranks, other) = (comm.rank(), place.nranks, OwnedStream::new(&context)?);
        let captured = [call(0, nranks, 1000), call(1, nranks, 300_000), call(2, nranks, 200_001), call(4, nranks, 77)];
        let single = call(3, nranks, 5000);
        let at = captured.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        let at_single = Buffers::of(&context, &single)?;
        let with = |call: &Call, seed: u64| Call { seed, ..*call };
        let run_single = |seed: u64, stream: RawStream| {
            at_single.fill(&with(&single, seed), rank)?;
            enqueue(&comm, &single, &at_single, stream)?;
            // SAFETY: the stream lives.
            unsafe { stream.synchronize()? };
            at_single.check(&with(&single, seed), rank)
        };
        together.wait();
        run_single(1000, stream.raw())?;
        let mut graph = capture(&stream, &together, |stream| {
            captured.iter().zip(&at).try_for_each(|(call, at)| enqueue(&comm, call, at, stream))
        })?;
        for replay in 0..REPLAYS {
            captured.iter().zip(&at).try_for_each(|(call, at)| at.fill(&with(call, replay), rank))?;
            // SAFETY: communicator, buffers and stream live.
            unsafe { graph.launch(stream.raw())? };
            if replay % 10 == 3 {
                run_single(replay, stream.raw())?;
            }
            // SAFETY: the stream lives.
            unsafe { stream.raw().synchronize()? };
            captured.iter().zip(&at).try_for_each(|(call, at)| at.check(&with(call, replay), rank))?;
            if replay % 10 == 7 {
                run_single(replay, other.raw())?;
                run_single(replay + 1, stream.raw())?;
            }
        }
        ensure!(comm.async_error().is_none());
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn captured_calls_are_replayed() {
    for config in [TENANTS, LARGE] {
        let service = TestService::start(config);
        Player::start("replays", &everybody(&service, 0)).ends_well();
    }
}

/// One call after the other, each on another stream than the one before, without waiting.
fn mixes_streams(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let more = [OwnedStream::new(&context)?, OwnedStream::new(&context)?];
        let mut streams = vec![stream.raw(), more[0].raw(), more[1].raw()];
        if place.gpus >= place.nranks as usize {
            // A context's ranks would share it, and wait behind each other.
            streams.push(RawStream::NULL);
        }
        let calls: Vec<_> = (0..60).map(|n| call(n, place.nranks, 1 + n * 777)).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()))?;
        together.wait();
        for (index, (call, at)) in calls.iter().zip(&at).enumerate() {
            enqueue(&comm, call, at, streams[index % streams.len()])?;
        }
        for stream in streams {
            // SAFETY: all streams live.
            unsafe { stream.synchronize()? };
        }
        calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, comm.rank()))
    })
}

#[test]
#[ignore = "needs a GPU"]
fn calls_keep_their_order_across_streams() {
    for config in [TENANTS, LARGE] {
        let service = TestService::start(config);
        Player::start("mixes_streams", &everybody(&service, 0)).ends_well();
    }
}

/// One call after the other, without waiting, on streams that differ and may have the same pointer: each is destroyed when the call is
/// made, and then those of two threads, which are all called the same.
fn names_streams_alike(place: &Place) -> anyhow::Result<()> {
    const PER_THREAD: usize = 2;
    place.each_rank(|Rank { context, comm, together, .. }| {
        let calls: Vec<_> = (0..60).map(|n| call(n, place.nranks, 1 + n * 777)).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()))?;
        together.wait();
        let mut pointers = HashSet::new();
        for (call, at) in calls[..30].iter().zip(&at) {
            let stream = OwnedStream::new(&context)?;
            pointers.insert(stream.raw().as_ptr() as usize);
            enqueue(&comm, call, at, stream.raw())?;
        }
        println!("rank {}: {} pointers of 30 streams", comm.rank(), pointers.len());
        let turns = [Barrier::new(2), Barrier::new(2)];
        let enqueue_in_turn = |thread: usize| -> anyhow::Result<()> {
            let _entered = context.enter()?;
            let stream = RawStream::from_ptr(std::ptr::without_provenance_mut(PER_THREAD));
            for (index, (call, at)) in calls.iter().zip(&at).enumerate().skip(30) {
                if index % 2 == thread {
                    enqueue(&comm, call, at, stream)?;
                }
                turns[index % 2].wait();
            }
            Ok(())
        };
        let enqueue_in_turn = &enqueue_in_turn;
        std::thread::scope(|scope| {
            let threads = [0, 1].map(|thread| scope.spawn(move || enqueue_in_turn(thread)));
            threads.into_iter().try_for_each(|thread| thread.join().expect("a thread that does not panic"))
        })?;
        context.synchronize()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, comm.rank()))
    })
}

/// Needs a GPU a rank: in one context streams are not made while another rank's kernels wait.
#[test]
#[ignore = "needs two GPUs"]
fn calls_keep_their_order_across_streams_of_one_name() {
    for config in [TENANTS, LARGE] {
        let service = TestService::start(config);
        Player::start("names_streams_alike", &everybody(&service, 0)).ends_well();
    }
}

/// Calls, each checked, and stays.
fn stays(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        for number in 0..ENGINES_CALLS {
            let call = call(number % 5, place.nranks, 20_000);
            let at = Buffers::of(&context, &call)?;
            at.fill(&call, comm.rank())?;
            together.wait();
            enqueue(&comm, &call, &at, stream.raw())?;
            // SAFETY: the stream lives.
            unsafe { stream.raw().synchronize()? };
            at.check(&call, comm.rank())?;
            together.wait();
        }
        if comm.rank() == 0 {
            println!("is done");
        }
        loop {
            std::thread::park();
        }
    })
}

/// Of the kinds that engines have a way for.
const ENGINES_CALLS: u64 = 10;

/// What is to go by engines does: that results are right does not tell.
#[test]
#[ignore = "needs two GPUs"]
fn large_calls_go_by_copy_engines() {
    for (config, calls) in [
        (TENANTS.into(), 0),
        (LARGE.into(), ENGINES_CALLS),
        (staged::by_engines("auto"), ENGINES_CALLS),
        (staged::by_engines("events"), ENGINES_CALLS),
    ] {
        let service = TestService::start(&config);
        let mut player = Player::start("stays", &everybody(&service, 0));
        player.hears("is done");
        let comms = service.service().registry.comms();
        let large = comms.iter().find_map(|comm| comm.direct.as_ref()?.large()).expect("engines");
        assert_eq!(large.begun_and_ended().0, calls, "{config}");
        wait_until(|| large.begun_and_ended().1 == calls);
        player.kill();
    }
}

/// Several communicators of the same ranks, each on a stream of its own, called in another order by each rank.
fn mixes_communicators(place: &Place) -> anyhow::Result<()> {
    let ids = [0, 1].map(|number| place.another_id(number));
    place.each_rank(|first| {
        let rank = first.comm.rank();
        let more =
            ids.iter().map(|id| place.join(rank, *id, Arc::clone(&first.together))).collect::<Result<Vec<_>, _>>()?;
        let all: Vec<_> = [first].into_iter().chain(more).collect();
        let calls: Vec<_> = (0..20).map(|n| call(n, place.nranks, 1 + n * 97)).collect();
        let mut at = Vec::new();
        for (index, call) in all.iter().flat_map(|_| &calls).enumerate() {
            let call = Call { seed: index as u64, ..*call };
            let buffers = Buffers::of(&all[0].context, &call)?;
            buffers.fill(&call, rank)?;
            at.push((call, buffers));
        }
        all[0].together.wait();
        for number in 0..calls.len() {
            for turn in 0..all.len() {
                let of = (turn + rank as usize) % all.len();
                let (call, buffers) = &at[of * calls.len() + number];
                enqueue(&all[of].comm, call, buffers, all[of].stream.raw())?;
            }
        }
        for Rank { stream, .. } in &all {
            // SAFETY: the stream lives.
            unsafe { stream.raw().synchronize()? };
        }
        at.iter().try_for_each(|(call, buffers)| buffers.check(call, rank))
    })
}

#[test]
#[ignore = "needs a GPU"]
fn communicators_do_not_wait_for_each_other() {
    for config in [TENANTS, LARGE] {
        let service = TestService::start(config);
        Player::start("mixes_communicators", &everybody(&service, 0)).ends_well();
    }
}

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

/// What it had before it has again: it needs no more of its quota, although nothing can be freed.
#[test]
#[ignore = "needs a GPU"]
fn who_does_not_come_lets_others_come_and_go() {
    let nranks = gpus().expect("GPUs").len().clamp(2, 8);
    let service = TestService::start(&format!("{LARGE}max_communicators = {}\n", 4 * nranks));
    while_nothing_is_freed(&service, || drop(Player::start("comes_and_goes", &everybody(&service, 1)).ends_well()));
}

/// Does something while the first tenant's streams do not come to what it called, so that what others end is kept for their next.
fn while_nothing_is_freed(service: &TestService, then: impl FnOnce()) {
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

/// Why a communicator has failed, once it has.
fn told(rank: &Rank) -> Error {
    loop {
        if let Some(error) = rank.comm.async_error() {
            return error;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Rank 0 calls, and waits for the others, who never come.
fn wait_for_others(rank: &Rank, nranks: u32) -> anyhow::Result<()> {
    let call = call(0, nranks, 1000);
    let at = Buffers::of(&rank.context, &call)?;
    enqueue(&rank.comm, &call, &at, rank.stream.raw())?;
    // SAFETY: the stream lives.
    unsafe { rank.stream.raw().synchronize()? };
    Ok(())
}

fn aborts(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        rank.together.wait();
        match rank.comm.rank() {
            0 => wait_for_others(&rank, place.nranks)?,
            1 => {
                std::thread::sleep(Duration::from_millis(100));
                rank.comm.abort()?;
            }
            _ => {}
        }
        let error = told(&rank).to_string();
        ensure!(error.contains("rank 1 aborted"), "{error}");
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn an_abort_ends_what_waits() {
    for config in [TENANTS, LARGE] {
        let service = TestService::start(config);
        Player::start("aborts", &everybody(&service, 0)).ends_well();
    }
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
            std::thread::sleep(Duration::from_millis(100));
            rank.comm.abort()?;
        }
        // SAFETY: the stream lives.
        unsafe { other.raw().synchronize()? };
        let error = told(&rank).to_string();
        ensure!(error.contains("rank 1 aborted"), "{error}");
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn an_abort_ends_what_waits_for_what_it_ends_on_another_stream() {
    for config in [TENANTS, LARGE] {
        let service = TestService::start(config);
        Player::start("aborts_across_streams", &everybody(&service, 0)).ends_well();
    }
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
    let service = TestService::start(TENANTS);
    Player::start("aborts_one_of_two", &everybody(&service, 0)).ends_well();
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
    // What is only ever made once.
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
        assert!(said.contains(&format!("rank 1 (process {pid}) has gone")), "{said}");
        wait_until(|| service.service().registry.comms().is_empty());
        wait_until_as_free(&before);
    }
}

/// Bytes that are free, by GPU.
fn free_bytes() -> Vec<u64> {
    let free = |gpu| Context::primary(gpu).and_then(|context| context.free_bytes());
    gpus().expect("GPUs").iter().map(|gpu| free(gpu).expect("a number")).collect()
}

/// Waits until as much is free as was, by GPU; says now and then what is missing.
fn wait_until_as_free(before: &[u64]) {
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

/// The watchdog decides when that is never.
fn wait_until(is_so: impl Fn() -> bool) {
    while !is_so() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Asks to join with a GPU, as a client that says whatever it likes.
fn join_with_gpu(service: &TestService, gpu: [u8; 16]) -> String {
    let receive = |socket: &Socket| -> ResponseEnvelope {
        assert!(socket.wait_readable(Duration::from_secs(300)));
        socket.recv().expect("an answer").expect("not the end").0
    };
    let socket = connect(&service.socket(0)).expect("connected");
    receive(&socket);
    let id = mccs::unique_id().expect("an id");
    let root_address = String::new();
    let request = Request::InitRank { id, rank: 0, nranks: 1, gpu: Some(gpu), root_address, by_engines: false };
    socket.send(&RequestEnvelope { id: 1, request }, &[]).expect("sent");
    format!("{:?}", receive(&socket).response)
}

#[test]
#[ignore = "needs a GPU"]
fn a_gpu_that_is_not_there_is_refused() {
    let service = TestService::start(TENANTS);
    let answer = join_with_gpu(&service, [7; 16]);
    assert!(answer.contains("does not have the GPU with UUID 0707"), "{answer}");
    let off = TestService::start("[cuda]\nuse = \"off\"\n[[tenant]]\nname = \"a\"\nsocket = \"a\"\n");
    let answer = join_with_gpu(&off, gpus().expect("GPUs")[0].id.0);
    assert!(answer.contains("no GPUs: the operator has switched them off"), "{answer}");
}
