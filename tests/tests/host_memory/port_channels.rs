//! Port channels between ranks of a host: puts come where and as they were put, signals behind
//! them, and mistakes end one communicator with a reason.

use std::sync::Barrier;
use std::time::Duration;

use mccs::{Error, ErrorClass, PortChannel, UniqueId};
use mccs_control::{ControlAnswer, ControlRequest, call};
use mccs_tests::port_channels::{Opened, open, put_at_random, random_seed, tell};
use mccs_tests::{TestService, watchdog};

#[test]
fn puts_of_many_threads_come_where_they_belong_before_their_signals() {
    watchdog();
    let (service, seed) = (TestService::start(""), random_seed());
    service.ranks(0, 4, |rank| put_at_random(&rank, 2, 24, seed));
}

#[test]
fn operators_see_puts_and_their_bytes() {
    watchdog();
    let service = TestService::start("");
    service.ranks(0, 1, |rank| {
        let opened = open(&rank, 4096, 16);
        let channel = opened.channel(0, 1);
        (0..5).for_each(|at| channel.put(0, 2048 + at * 100, 100).expect("put"));
        channel.flush().expect("flushed");
        let seen = call(&service.control_socket(), &ControlRequest::Communicators).expect("an answer");
        let ControlAnswer::Communicators(seen) = seen else { panic!("{seen:?}") };
        assert_eq!(seen.iter().map(|comm| (comm.puts, comm.put_bytes)).collect::<Vec<_>>(), [(5, 500)]);
    });
}

#[test]
fn more_threads_than_slots_wait_for_room_and_each_signal_ends_one_wait() {
    watchdog();
    const THREADS: u32 = 16;
    const EACH: u32 = 200;
    let (service, looked) = (TestService::start(""), Barrier::new(2));
    service.ranks(0, 2, |rank| {
        let opened = open(&rank, 64, 2);
        let channel = opened.channels.signal_channel(1 - rank.comm.rank(), 3).expect("a channel");
        let refused = channel.put(0, 0, 1).expect_err("it has no memories").to_string();
        assert!(refused.contains("signals alone"), "{refused}");
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| (0..EACH).for_each(|_| channel.signal().expect("signalled")));
                scope.spawn(|| (0..EACH).for_each(|_| channel.wait().expect("signalled")));
            }
        });
        assert!(!channel.wait_for(Duration::from_millis(20)).expect("sound"), "all are taken");
        assert!(!channel.poll().expect("sound"));
        looked.wait();
        channel.signal().expect("signalled");
        while !channel.poll().expect("sound") {
            std::thread::yield_now();
        }
        looked.wait();
    });
}

#[test]
fn signals_that_come_before_the_connection_is_made_are_kept() {
    watchdog();
    let (service, signalled) = (TestService::start(""), Barrier::new(2));
    service.ranks(0, 2, |rank| {
        let channels = rank.comm.port_channels().expect("opened");
        if rank.comm.rank() == 0 {
            let channel = channels.signal_channel(1, 9).expect("a channel");
            (0..3).for_each(|_| channel.signal().expect("signalled"));
            channel.flush().expect("flushed");
            signalled.wait();
            channel.wait().expect("signalled");
        } else {
            signalled.wait();
            let channel = channels.signal_channel(0, 9).expect("a channel");
            (0..3).for_each(|_| channel.wait().expect("signalled"));
            assert!(!channel.poll().expect("sound"));
            channel.signal().expect("signalled");
            channel.flush().expect("flushed");
        }
    });
}

/// Two ranks, of which rank 0 makes a mistake that the library does not find, and both hear of it. Their other communicator goes on.
fn mistake(act: impl Fn(&Opened, &PortChannel) + Sync, says: &str) {
    watchdog();
    let (service, id) = (TestService::start(""), UniqueId([7; 16]));
    let failures = service.ranks(0, 2, |rank| {
        let (me, opened) = (rank.comm.rank(), open(&rank, 4096, 16));
        let mut bootstrap = rank.client.communicator(id, me, 2).join_bootstrap().expect("joined");
        let channel = opened.channel(1 - me, 1);
        bootstrap.barrier().expect("met");
        if me == 0 {
            act(&opened, &channel);
        }
        let failure = channel.wait().expect_err("no signal comes");
        assert!(channel.flush().is_err() && channel.signal().is_err());
        bootstrap.barrier().expect("met");
        failure
    });
    for (rank, failure) in failures.iter().enumerate() {
        assert_eq!(failure.class(), ErrorClass::InvalidArgument, "{failure}");
        let text = failure.to_string();
        assert!(text.contains(says) && text.contains(&format!("rank {rank} waits")), "{says}: {text}");
        assert!(text.contains("signal 1 of") && text.contains("rank 0 made an invalid call"), "{text}");
    }
}

#[test]
fn a_put_into_memory_that_was_freed_fails_its_communicator() {
    watchdog();
    let (service, ready, freed) = (TestService::start(""), Barrier::new(2), Barrier::new(2));
    let failures = service.ranks(0, 2, |rank| {
        let Opened { channels, region, memory, remote } = open(&rank, 4096, 16);
        let peer = 1 - rank.comm.rank();
        let channel = channels.channel(peer, 1, &memory, &remote[peer as usize]).expect("a channel");
        // Both have their channel before the memory goes.
        ready.wait();
        if rank.comm.rank() == 1 {
            // Registered still; the region is what goes.
            drop(region);
            // The session's requests are served in order.
            drop(rank.client.create_stream().expect("a stream"));
            freed.wait();
        } else {
            freed.wait();
            channel.put(0, 0, 4096).expect("handed over");
        }
        channel.wait().expect_err("no signal comes").to_string()
    });
    assert!(failures.iter().all(|text| text.contains("of rank 1, which was freed")), "{failures:?}");
}

#[test]
fn a_put_of_overlapping_ranges_fails_its_communicator() {
    let overlaps = |opened: &Opened, _: &PortChannel| {
        let own = opened.channels.channel(0, 2, &opened.memory, &opened.remote[0]).expect("a channel");
        own.put(0, 1, 100).expect("handed over");
        drop(own);
    };
    mistake(overlaps, "overlap");
}

#[test]
fn what_the_library_finds_wrong_costs_the_call_alone() {
    watchdog();
    let service = TestService::start("");
    service.ranks(0, 2, |rank| {
        let opened = open(&rank, 4096, 16);
        let (me, peer) = (rank.comm.rank(), 1 - rank.comm.rank());
        let channel = opened.channel(peer, 1);
        for (into, from, bytes) in [(4096, 0, 1), (0, 1, 4096), (u64::MAX, 0, 2), (0, u64::MAX, u64::MAX)] {
            let refused = channel.put(from, into, bytes).expect_err("it leaves the memory");
            assert!(matches!(refused, Error::InvalidArgument(_)), "{refused}");
        }
        channel.put_with_signal_and_flush(4096, 4096, 0).expect("nothing at the end");
        channel.wait().expect("signalled");
        let Opened { channels, region, memory, remote } = &opened;
        let wrong_peer = channels.channel(me, 1, memory, &remote[peer as usize]).expect_err("not its memory");
        assert!(wrong_peer.to_string().contains("of rank"), "{wrong_peer}");
        let nobody = channels.signal_channel(2, 1).expect_err("there are two").to_string();
        assert!(nobody.contains("rank 2 of a communicator of 2"), "{nobody}");
        for (at, bytes) in [(0, 4097), (0, 0), (4096, 1)] {
            let refused = channels.register(region.at(at), bytes).expect_err("no part of the region");
            assert!(matches!(refused, Error::InvalidArgument(_)), "{refused}");
        }
        // A stale handle: the memory is taken back as soon as it has been told.
        let taken_back = channels.register(region.at(0), 64).expect("registered");
        let gone = tell(&rank, &taken_back.remote())[peer as usize];
        drop(taken_back);
        // The session's requests are served in order.
        drop(rank.client.create_stream().expect("a stream"));
        rank.comm.barrier(&rank.stream).expect("enqueued");
        rank.stream.synchronize().expect("completed");
        let refused = channels.channel(peer, 5, memory, &gone).expect_err("it was freed").to_string();
        assert!(refused.contains(&format!("rank {peer} has no memory")), "{refused}");
    });
}

#[test]
fn who_waits_for_a_rank_that_has_left_hears_it_and_what_had_come_counts() {
    watchdog();
    let service = TestService::start("");
    service.ranks(0, 2, |rank| {
        let channel =
            rank.comm.port_channels().expect("opened").signal_channel(1 - rank.comm.rank(), 4).expect("a channel");
        if rank.comm.rank() == 0 {
            channel.signal().expect("signalled");
            rank.comm.destroy().expect("left");
            let refused = channel.signal().expect_err("it has left").to_string();
            assert!(refused.contains("has left"), "{refused}");
            return;
        }
        channel.wait().expect("it had signalled");
        let error = channel.wait().expect_err("it has left");
        assert_eq!(error.class(), ErrorClass::Remote);
        let text = error.to_string();
        assert!(text.contains("signal 2 of (0, tag 4)") && text.contains("the peer has left"), "{text}");
        assert_eq!(rank.comm.async_error().map(|error| error.to_string()), None, "who left harms nobody");
    });
}

#[test]
fn a_signal_that_never_comes_ends_the_communicator_after_the_operators_time() {
    watchdog();
    let service = TestService::start("[limits]\noperation_timeout = \"1s\"\n");
    let errors = service.ranks(0, 2, |rank| {
        let channel = rank.comm.port_channels().expect("opened").signal_channel(0, 7).expect("a channel");
        channel.wait().expect_err("nobody signals")
    });
    for error in errors {
        assert_eq!(error.class(), ErrorClass::Timeout, "{error}");
        let text = error.to_string();
        assert!(text.contains("waits for signal 1 of (0, tag 7)") && text.contains("1s"), "{text}");
    }
}

#[test]
fn an_abort_under_puts_releases_both_ranks_with_the_reason() {
    watchdog();
    let (service, began) = (TestService::start(""), Barrier::new(2));
    service.ranks(0, 2, |rank| {
        const BYTES: u64 = 8 << 20;
        let opened = open(&rank, BYTES, 16);
        let channel = opened.channel(1 - rank.comm.rank(), 1);
        if rank.comm.rank() == 0 {
            (0..20).for_each(|_| channel.put(0, 0, BYTES).expect("handed over"));
            began.wait();
            rank.comm.abort().expect("aborted");
            assert!(channel.flush().is_err());
        } else {
            began.wait();
        }
        let text = channel.wait().expect_err("rank 0 has aborted").to_string();
        assert!(text.contains("rank 0 aborted the communicator"), "{text}");
    });
}
