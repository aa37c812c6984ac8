//! Port channels between ranks of several hosts: puts and signals by the hosts' flows, and mistakes
//! that the receiver's service finds.

use std::sync::Barrier;
use std::time::Duration;

use mccs::{ErrorClass, RemoteMemory};
use mccs_control::{ControlAnswer, ControlRequest, call};
use mccs_tests::hosts::{TestHosts, in_threads};
use mccs_tests::port_channels::{open, put_at_random, random_seed, tell};
use mccs_tests::{Rank, watchdog};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Returns when all ranks have come here.
fn meet(rank: &Rank) {
    rank.comm.barrier(&rank.stream).expect("enqueued");
    rank.stream.synchronize().expect("completed");
}

#[test]
fn puts_between_hosts_come_where_they_belong_before_their_signals() {
    watchdog();
    let (hosts, seed) = (TestHosts::start(2, ""), random_seed());
    hosts.ranks(&[0, 1, 1], |rank| put_at_random(&rank, 2, 16, seed));
}

/// Milliseconds of work for a tenant at all of a host's engines of a kind.
fn work_ms(hosts: &TestHosts, host: usize, engine: &str, tenant: &str) -> u64 {
    let answer = call(&hosts.service(host).control_socket(), &ControlRequest::Engines).expect("an answer");
    let ControlAnswer::Engines { engines, .. } = answer else { panic!("{answer:?}") };
    let of_kind = engines.iter().filter(|one| one.name.starts_with(engine));
    of_kind.filter_map(|one| one.tenants.get(tenant)).sum()
}

#[test]
fn puts_are_work_of_their_tenant_at_every_engine_that_carries_them_and_of_nobody_else() {
    const PUTS: u64 = 6000;
    const BYTES: u64 = 3000;
    watchdog();
    let tenants = "[[tenant]]\nname = \"works\"\nsocket = \"w\"\n[[tenant]]\nname = \"idle\"\nsocket = \"i\"\n";
    let hosts = TestHosts::start(2, tenants);
    let _idle = hosts.join_some(1, mccs::unique_id().expect("an id"), &[0, 1], &[0, 1]);
    hosts.ranks(&[0, 1], |rank| {
        let (me, opened) = (rank.comm.rank(), open(&rank, 2 * BYTES, 64));
        let channel = opened.channel(1 - me, 1);
        if me == 0 {
            (0..PUTS).for_each(|_| channel.put(0, BYTES, BYTES).expect("put"));
            channel.signal().expect("signalled");
        } else {
            channel.wait().expect("signalled");
        }
        meet(&rank);
    });
    // Each byte is read and written once, at 10 GB/s; a put costs no more than some microseconds besides.
    let (least, most) = (2 * PUTS * BYTES / 10 / 1_000_000, PUTS * 20 / 1000);
    for (host, engine) in [(0, "proxy"), (0, "transport"), (1, "proxy"), (1, "transport")] {
        let works = work_ms(&hosts, host, engine, "works");
        assert!((least..=most).contains(&works), "{engine} engine of host {host}: {works} ms, of {least} to {most}");
        assert_eq!(work_ms(&hosts, host, engine, "idle"), 0, "{engine} engine of host {host}");
    }
}

/// More long puts than a lane has under way, short ones and flushes between them.
#[test]
fn a_burst_of_puts_comes_in_order_and_its_flush_waits_for_all() {
    const PUTS: u64 = 48;
    const SLOT: u64 = 300_000;
    watchdog();
    let (hosts, seed) = (TestHosts::start(2, ""), random_seed());
    let bytes_of = |rank: u32, put: u64| {
        let mut random = StdRng::seed_from_u64(seed ^ u64::from(rank) << 32 ^ put);
        let longest = if put % 4 == 1 { 4_000 } else { SLOT };
        let mut bytes = vec![0; random.random_range(1..=longest) as usize];
        random.fill(&mut bytes[..]);
        bytes
    };
    hosts.ranks(&[0, 1], |rank| {
        let (me, peer) = (rank.comm.rank(), 1 - rank.comm.rank());
        let opened = open(&rank, 2 * PUTS * SLOT, 128);
        let channel = opened.channel(peer, 3);
        for put in 0..PUTS {
            let bytes = bytes_of(me, put);
            // SAFETY: nothing is put from here yet, and the peer puts into the other half.
            unsafe { opened.write(put * SLOT, &bytes) };
            channel.put_with_signal(put * SLOT, (PUTS + put) * SLOT, bytes.len() as u64).expect("put");
        }
        channel.flush().expect("flushed");
        // SAFETY: all that was put from here has been flushed.
        unsafe { opened.write(0, &vec![0xee; (PUTS * SLOT) as usize]) };
        for put in 0..PUTS {
            channel.wait().expect("signalled");
            let expected = bytes_of(peer, put);
            // SAFETY: the put before the signal is there, and none comes to this place again.
            let found = unsafe { opened.read((PUTS + put) * SLOT, expected.len() as u64) };
            assert!(found == expected, "seed {seed}, rank {me}, put {put}");
        }
        meet(&rank);
    });
}

#[test]
fn signals_between_hosts_come_in_order_and_each_ends_one_wait() {
    watchdog();
    let hosts = TestHosts::start(2, "");
    hosts.ranks(&[0, 1], |rank| {
        let peer = 1 - rank.comm.rank();
        let channels = rank.comm.port_channels().expect("opened");
        let tags = [1, 2].map(|tag| channels.signal_channel(peer, tag).expect("a channel"));
        for round in 1..=200 {
            let (first, second) = (&tags[round % 2], &tags[(round + 1) % 2]);
            (0..round % 5).for_each(|_| first.signal().expect("signalled"));
            second.signal().expect("signalled");
            (0..round % 5).for_each(|_| first.wait().expect("signalled"));
            second.wait().expect("signalled");
        }
        // All that were signalled before the peer came here have come: by the same flow as what is awaited.
        tags[0].signal().expect("signalled");
        tags[0].wait().expect("signalled");
        assert!(tags.iter().all(|channel| !channel.poll().expect("sound")));
        meet(&rank);
    });
}

#[test]
fn a_put_past_the_end_of_another_hosts_memory_fails_the_communicator_on_both() {
    watchdog();
    let (hosts, both) = (TestHosts::start(2, ""), Barrier::new(2));
    let failures = hosts.ranks(&[0, 1], |rank| {
        let (me, opened) = (rank.comm.rank(), open(&rank, 4096, 16));
        let peer = 1 - me;
        // A lie that the sender's service cannot know: the memory would be longer.
        let mut bytes = opened.remote[peer as usize].to_bytes();
        bytes[16..].copy_from_slice(&8192u64.to_le_bytes());
        let longer = RemoteMemory::from_bytes(&bytes).expect("a memory");
        let channel = opened.channels.channel(peer, 1, &opened.memory, &longer).expect("a channel");
        both.wait();
        if me == 0 {
            channel.put(0, 4000, 97).expect("handed over");
        }
        channel.wait().expect_err("no signal comes")
    });
    for failure in failures {
        let text = failure.to_string();
        assert_eq!(failure.class(), ErrorClass::InvalidArgument, "{text}");
        assert!(text.contains("rank 0 made an invalid call"), "{text}");
        assert!(text.contains("97 bytes at offset 4000") && text.contains("of rank 1, which has 4096"), "{text}");
    }
}

#[test]
fn a_put_into_memory_of_another_host_that_was_freed_fails_the_communicator() {
    watchdog();
    let (hosts, both) = (TestHosts::start(2, ""), Barrier::new(2));
    let failures = hosts.ranks(&[0, 1], |rank| {
        let (me, opened) = (rank.comm.rank(), open(&rank, 4096, 16));
        let gone = opened.channels.register(opened.region.at(0), 64).expect("registered");
        let told = tell(&rank, &gone.remote());
        drop(gone);
        // The session's requests are served in order.
        drop(rank.client.create_stream().expect("a stream"));
        meet(&rank);
        let peer = 1 - me;
        let channel = opened.channels.channel(peer, 1, &opened.memory, &told[peer as usize]).expect("a channel");
        both.wait();
        if me == 0 {
            channel.put_with_signal(0, 0, 64).expect("handed over");
        }
        channel.wait().expect_err("no signal comes").to_string()
    });
    assert!(failures.iter().all(|text| text.contains("of rank 1, which was freed")), "{failures:?}");
}

#[test]
fn a_host_whose_ranks_have_left_harms_nobody_who_waits_for_nothing_of_it() {
    watchdog();
    let (hosts, left) = (TestHosts::start(2, ""), Barrier::new(2));
    hosts.ranks(&[0, 1], |rank| {
        let (me, opened) = (rank.comm.rank(), open(&rank, 4096, 16));
        let channel = opened.channel(1 - me, 1);
        channel.put_with_signal_and_flush(0, 2048, 2048).expect("put");
        channel.wait().expect("signalled");
        meet(&rank);
        if me == 1 {
            rank.comm.destroy().expect("left");
            left.wait();
            return;
        }
        left.wait();
        while channel.poll().is_ok_and(|has_come| !has_come) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let text = channel.wait().expect_err("it has left").to_string();
        assert!(text.contains("signal 2 of (1, tag 1)") && text.contains("the peer has left"), "{text}");
        assert!(rank.comm.async_error().is_none());
    });
}

#[test]
fn a_service_that_goes_under_puts_releases_the_peer_on_another_host() {
    watchdog();
    const BYTES: u64 = 4 << 20;
    let quick = "[tcp]\nsilence_timeout = \"2s\"\n[exchange]\nkeep_alive = \"200ms\"\nlink_timeout = \"1s\"\nhost_timeout = \"4s\"\n";
    let mut hosts = TestHosts::start(2, quick);
    let (ranks, began) = (hosts.join(&[0, 1]), Barrier::new(3));
    let texts = std::thread::scope(|scope| {
        let puts = scope.spawn(|| {
            in_threads(ranks, |rank| {
                let opened = open(&rank, BYTES, 4);
                let channel = opened.channel(1 - rank.comm.rank(), 1);
                (0..8).for_each(|_| channel.put(0, 0, BYTES).expect("handed over"));
                began.wait();
                channel.wait().expect_err("the service on h1 has gone").to_string()
            })
        });
        began.wait();
        hosts.stop(1);
        puts.join().expect("ranks")
    });
    assert!(texts[0].contains("signal 1 of (1, tag 1)") && texts[0].contains("h1"), "{texts:?}");
    assert!(texts[1].contains("the mccs-service has gone"), "{texts:?}");
}
