//! Port channels between ranks of a host: puts come where and as they were put, signals behind
//! them, and mistakes end one communicator with a reason.

use std::sync::Barrier;
use std::time::Duration;

use mccs::{Bootstrap, Error, ErrorClass, PortChannel, PortChannels, Region, RegisteredMemory, RemoteMemory};
use mccs_tests::{Rank, TestService, watchdog};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// A rank's port channels, with a memory that all ranks know.
struct Opened {
    channels: PortChannels,
    region: Region,
    memory: RegisteredMemory,
    remote: Vec<RemoteMemory>,
    bootstrap: Bootstrap,
}

fn open(rank: &Rank, bytes: u64) -> Opened {
    open_with(rank, bytes, 512)
}

fn open_with(rank: &Rank, bytes: u64, fifo_slots: u32) -> Opened {
    let channels = rank.comm.port_channels_with(fifo_slots).expect("opened");
    let region = rank.client.allocate(bytes).expect("memory");
    let memory = channels.register(region.at(0), bytes).expect("registered");
    let (me, nranks) = (rank.comm.rank(), rank.comm.nranks());
    let id = rank_id(rank);
    let mut bootstrap = rank.client.communicator(id, me, nranks).join_bootstrap().expect("joined");
    let remote = bootstrap.all_gather(&memory.remote().to_bytes()).expect("told");
    let remote = remote.iter().map(|bytes| RemoteMemory::from_bytes(bytes).expect("a memory")).collect();
    Opened { channels, region, memory, remote, bootstrap }
}

/// An id that all ranks of a communicator find: rank 0 tells it.
fn rank_id(rank: &Rank) -> mccs::UniqueId {
    let memory = rank.client.allocate(16).expect("memory");
    // SAFETY: nothing is in flight.
    let bytes = unsafe { memory.as_mut_slice() };
    if rank.comm.rank() == 0 {
        bytes.copy_from_slice(&mccs::unique_id().expect("an id").0);
    }
    let place = memory.at(0);
    rank.comm.broadcast(place, place, 16, mccs::DataType::U8, 0, &rank.stream).expect("enqueued");
    rank.stream.synchronize().expect("completed");
    mccs::UniqueId(bytes[..16].try_into().expect("16 bytes"))
}

impl Opened {
    fn channel(&self, peer: u32, tag: u32) -> PortChannel {
        self.channels.channel(peer, tag, &self.memory, &self.remote[peer as usize]).expect("a channel")
    }

    /// # Safety
    /// Of what is read nothing is written meanwhile.
    unsafe fn read(&self, offset: u64, bytes: u64) -> Vec<u8> {
        // SAFETY: inside the region; the rest is the caller's contract. Peers write elsewhere.
        unsafe { std::slice::from_raw_parts(self.region.as_ptr().add(offset as usize), bytes as usize).to_vec() }
    }

    /// # Safety
    /// Nobody reads or writes there meanwhile.
    unsafe fn write(&self, offset: u64, bytes: &[u8]) {
        // SAFETY: inside the region; the rest is the caller's contract.
        unsafe { self.region.as_ptr().add(offset as usize).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }
}

fn seed_of(test: &str) -> u64 {
    let random = std::env::var("MCCS_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed =
        random.unwrap_or_else(|| u64::from_le_bytes(mccs::unique_id().expect("an id").0[..8].try_into().expect("8")));
    println!("{test}: MCCS_SEED={seed}");
    seed
}

fn bytes_of(seed: u64, count: u64) -> Vec<u8> {
    let mut bytes = vec![0; count as usize];
    StdRng::seed_from_u64(seed).fill(&mut bytes[..]);
    bytes
}

#[test]
fn puts_of_many_threads_come_where_they_belong_before_their_signals() {
    watchdog();
    const NRANKS: u32 = 4;
    const THREADS: u32 = 2;
    const ROUNDS: u64 = 24;
    // Of each rank: what it puts from, and what each thread of each rank puts into.
    const PART: u64 = 600 << 10;
    let seed = seed_of("puts");
    let service = TestService::start("");
    service.ranks(0, NRANKS, |rank| {
        let me = rank.comm.rank();
        let parts = u64::from(1 + NRANKS * THREADS);
        let opened = open_with(&rank, PART * parts * u64::from(THREADS), 8);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (opened, lane) = (&opened, PART * parts * u64::from(thread));
                scope.spawn(move || {
                    let channels: Vec<_> = (0..NRANKS).map(|peer| opened.channel(peer, 100 + thread)).collect();
                    let of = |from: u32, to: u32, round: u64| {
                        let key = (u64::from(from) << 40) ^ (u64::from(to) << 32) ^ (u64::from(thread) << 24) ^ round;
                        let mut rng = StdRng::seed_from_u64(seed ^ key.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                        // Short ones are put at once, long ones in pieces.
                        let length = if rng.random_range(0..3) == 0 { PART / 2 } else { 5000 };
                        let (length, at) = (rng.random_range(0..=length), rng.random_range(0..PART / 2));
                        (at, bytes_of(rng.random(), length))
                    };
                    for round in 0..ROUNDS {
                        for (peer, channel) in (0..NRANKS).zip(&channels) {
                            let (at, bytes) = of(me, peer, round);
                            // SAFETY: nothing is put from here: the last put was flushed.
                            unsafe { opened.write(lane, &bytes) };
                            let into = lane + PART * u64::from(1 + me * THREADS + thread) + at;
                            if round % 2 == 0 {
                                channel.put_with_signal_and_flush(into, lane, bytes.len() as u64).expect("put");
                            } else {
                                channel.put(into, lane, bytes.len() as u64).expect("put");
                                channel.signal().expect("signalled");
                                channel.flush().expect("flushed");
                            }
                        }
                        for (peer, channel) in (0..NRANKS).zip(&channels) {
                            channel.wait().expect("signalled");
                            let (at, bytes) = of(peer, me, round);
                            let from = lane + PART * u64::from(1 + peer * THREADS + thread) + at;
                            // SAFETY: the peer puts there again behind this rank's signal alone.
                            let found = unsafe { opened.read(from, bytes.len() as u64) };
                            assert!(found == bytes, "seed {seed}, rank {me}, round {round}, from {peer}");
                        }
                        // All have looked.
                        channels.iter().for_each(|channel| channel.signal().expect("signalled"));
                        channels.iter().for_each(|channel| channel.wait().expect("signalled"));
                    }
                });
            }
        });
    });
}

#[test]
fn more_threads_than_slots_wait_for_room_and_each_signal_ends_one_wait() {
    watchdog();
    const THREADS: u32 = 16;
    const EACH: u32 = 200;
    let (service, looked) = (TestService::start(""), Barrier::new(2));
    service.ranks(0, 2, |rank| {
        let opened = open_with(&rank, 64, 2);
        let channel = opened.channels.signal_channel(1 - rank.comm.rank(), 3).expect("a channel");
        let refused = channel.put(0, 0, 1).expect_err("it has no memories").to_string();
        assert!(refused.contains("signals alone"), "{refused}");
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| (0..EACH).for_each(|_| channel.signal().expect("signalled")));
                scope.spawn(|| (0..EACH).for_each(|_| channel.wait().expect("signalled")));
            }
        });
        let timed_out = channel.wait_for(Duration::from_millis(20)).expect_err("all are taken");
        assert_eq!(timed_out.class(), ErrorClass::Timeout);
        let (me, next) = (rank.comm.rank(), THREADS * EACH + 1);
        let named = format!("signal {next} of ({}, tag 3), for which rank {me} waits", 1 - me);
        assert!(timed_out.to_string().contains(&named), "{timed_out}");
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

/// Two ranks, of which rank 0 makes a mistake that the library does not find, and both hear of it. Another communicator goes on.
fn mistake(act: impl Fn(&Opened, &PortChannel) + Sync, says: &str) {
    watchdog();
    let service = TestService::start("");
    let failures = service.ranks(0, 2, |rank| {
        let mut opened = open(&rank, 4096);
        let peer = 1 - rank.comm.rank();
        let channel = opened.channel(peer, 1);
        opened.bootstrap.barrier().expect("met");
        if rank.comm.rank() == 0 {
            act(&opened, &channel);
        }
        let failure = channel.wait().expect_err("no signal comes");
        assert!(channel.flush().is_err() && channel.signal().is_err());
        // The session and others of its communicators are as good as before.
        opened.bootstrap.barrier().expect("met");
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
    let (service, freed) = (TestService::start(""), Barrier::new(2));
    let failures = service.ranks(0, 2, |rank| {
        let Opened { channels, region, memory, remote, mut bootstrap } = open(&rank, 4096);
        let peer = 1 - rank.comm.rank();
        let channel = channels.channel(peer, 1, &memory, &remote[peer as usize]).expect("a channel");
        bootstrap.barrier().expect("met");
        if rank.comm.rank() == 1 {
            // Registered still; the region is what goes.
            drop(region);
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
        own.put(1, 0, 100).expect("handed over");
        drop(own);
    };
    mistake(overlaps, "overlap");
}

#[test]
fn what_the_library_finds_wrong_costs_the_call_alone() {
    watchdog();
    let service = TestService::start("");
    service.ranks(0, 2, |rank| {
        let mut opened = open(&rank, 4096);
        let (me, peer) = (rank.comm.rank(), 1 - rank.comm.rank());
        let channel = opened.channel(peer, 1);
        for (into, from, bytes) in [(4096, 0, 1), (0, 1, 4096), (u64::MAX, 0, 2), (0, u64::MAX, u64::MAX)] {
            let refused = channel.put(into, from, bytes).expect_err("it leaves the memory");
            assert!(matches!(refused, Error::InvalidArgument(_)), "{refused}");
        }
        channel.put_with_signal_and_flush(4096, 4096, 0).expect("nothing at the end");
        channel.wait().expect("signalled");
        let Opened { channels, region, memory, remote, bootstrap } = &mut opened;
        let wrong_peer = channels.channel(me, 1, memory, &remote[peer as usize]).expect_err("not its memory");
        assert!(wrong_peer.to_string().contains("of rank"), "{wrong_peer}");
        let nobody = channels.signal_channel(2, 1).expect_err("there are two").to_string();
        assert!(nobody.contains("rank 2 of a communicator of 2"), "{nobody}");
        for (at, bytes) in [(0, 4097), (0, 0), (4096, 1)] {
            let refused = channels.register(region.at(at), bytes).expect_err("no part of the region");
            assert!(matches!(refused, Error::InvalidArgument(_)), "{refused}");
        }
        // A stale handle: the memory was taken back before.
        let gone = channels.register(region.at(0), 64).expect("registered").remote();
        let gone = bootstrap.all_gather(&gone.to_bytes()).expect("told")[peer as usize].clone();
        let gone = RemoteMemory::from_bytes(&gone).expect("a memory");
        bootstrap.barrier().expect("met");
        let refused = channels.channel(peer, 5, memory, &gone).expect_err("it was freed").to_string();
        assert!(refused.contains(&format!("rank {peer} has no memory")), "{refused}");
        bootstrap.barrier().expect("met");
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
        let opened = open(&rank, BYTES);
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
