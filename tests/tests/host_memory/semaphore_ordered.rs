//! OrderedStream streams, with a thread in the place of the GPU: what waits for a word, what is released, and what it costs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use mccs::{Client, Communicator, DataType, RedOp, Region, Stream, UniqueId};
use mccs_control::{ControlAnswer, ControlRequest, call};
use mccs_eval::workload::{Call, POISON};
use mccs_ipc::timeline_semaphore::TimelineSemaphore;
use mccs_ipc::types::CollectiveKind;
use mccs_tests::TestService;
use mccs_tests::hosts::TestHosts;

/// Offset of a rank's buffers: the semaphore comes before.
const HEAD_BYTES: u64 = 4096;

/// How a stream is made.
type Create = fn(&Client, &Region, u64) -> Result<Stream, mccs::Error>;

/// A rank on a ordered stream.
struct Rank {
    comm: Communicator,
    stream: Stream,
    region: Arc<Region>,
    /// The session ends with the last of these.
    _client: Client,
}

impl Rank {
    fn join(client: Client, id: UniqueId, rank: u32, nranks: u32, root: &str) -> Rank {
        Self::join_on(Client::create_ordered_stream, client, id, rank, nranks, root)
    }

    fn join_on(create: Create, client: Client, id: UniqueId, rank: u32, nranks: u32, root: &str) -> Rank {
        let comm = client.communicator(id, rank, nranks).root_address_or_empty(root).join().expect("a communicator");
        let region = Arc::new(client.allocate(HEAD_BYTES + (4 << 20)).expect("memory"));
        let stream = create(&client, &region, 0).expect("a ordered stream");
        Rank { comm, stream, region, _client: client }
    }

    fn semaphore(&self) -> &TimelineSemaphore {
        // SAFETY: the region begins with room for a semaphore, and lives as long as `self`.
        unsafe { TimelineSemaphore::at(self.region.as_ptr()) }.expect("aligned")
    }

    /// An all-reduce of one number, in its own place.
    fn add(&self, number: u32, place: u64) {
        let at = HEAD_BYTES + 64 * place;
        // SAFETY: nobody else uses these bytes before the operation.
        unsafe { self.region.as_ptr().add(at as usize).cast::<u32>().write(number) };
        let span = self.region.at(at);
        self.comm.all_reduce(span, span, 1, DataType::U32, RedOp::Sum, &self.stream).expect("enqueued");
    }

    fn number(&self, place: u64) -> u32 {
        // SAFETY: whoever asks knows that nothing runs there.
        unsafe { self.region.as_ptr().add((HEAD_BYTES + 64 * place) as usize).cast::<u32>().read() }
    }
}

/// The watchdog decides when that is never.
fn wait_until(is_so: impl Fn() -> bool) {
    while !is_so() {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Ranks of one service, two of them.
fn pair(service: &TestService) -> [Rank; 2] {
    let id = mccs::unique_id().expect("an id");
    std::thread::scope(|scope| {
        let join = |rank| scope.spawn(move || Rank::join(service.connect(0), id, rank, 2, ""));
        [0, 1].map(join).map(|thread| thread.join().expect("a rank"))
    })
}

/// With rounds and without: a ordered stream's rounds are played by the service.
const SHM_EXCHANGES: [&str; 2] = ["", "[host_device]\nshm_exchange_limit = \"0\"\n"];

#[test]
fn an_operation_waits_until_its_word_has_come() {
    for settings in SHM_EXCHANGES {
        let service = TestService::start(settings);
        let [a, b] = pair(&service);
        (0..10).for_each(|place| [&a, &b].iter().for_each(|rank| rank.add(place as u32 + 1, place)));
        // Rank 1 is there; nothing of rank 0 may have been looked at.
        b.semaphore().open(10);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!((a.semaphore().done(), b.semaphore().done()), (0, 0));
        for ticket in 1..=10 {
            // Late enough that the service has begun to make pauses, now and then.
            if ticket % 4 == 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(a.semaphore().done(), ticket - 1);
            a.semaphore().open(ticket);
            wait_until(|| a.semaphore().done() >= ticket && b.semaphore().done() >= ticket);
            assert_eq!([&a, &b].map(|rank| rank.number(ticket - 1)), [2 * ticket as u32; 2]);
        }
        [&a, &b].iter().for_each(|rank| rank.stream.synchronize().expect("ended"));
    }
}

#[test]
fn gates_may_be_opened_for_many_operations_at_once_and_before_they_are_called() {
    let service = TestService::start("");
    let [a, b] = pair(&service);
    a.semaphore().open(1000);
    b.semaphore().open(500);
    for turn in 0..1000 {
        [&a, &b].iter().for_each(|rank| rank.add(turn, u64::from(turn)));
    }
    wait_until(|| a.semaphore().done() == 500 && b.semaphore().done() == 500);
    b.semaphore().open(1000);
    wait_until(|| a.semaphore().done() == 1000 && b.semaphore().done() == 1000);
    assert!((0..1000).all(|turn| a.number(turn) == 2 * turn as u32));
}

/// A semaphore may open in any moment between two looks at it.
#[test]
fn no_opening_is_missed() {
    const TURNS: u64 = 20_000;
    let service = TestService::start("[limits]\noperation_timeout = \"20s\"\n");
    let ranks = pair(&service);
    std::thread::scope(|scope| {
        for rank in &ranks {
            scope.spawn(move || {
                for turn in 0..TURNS {
                    // Far enough ahead that the service often finds the next operation there and its semaphore closed.
                    wait_until_done(rank.semaphore(), turn.saturating_sub(8));
                    rank.add(1, turn % 16);
                }
            });
            scope.spawn(move || {
                for ticket in 1..=TURNS {
                    wait_until_done(rank.semaphore(), ticket - 1);
                    (0..ticket % 64).for_each(|_| std::hint::spin_loop());
                    rank.semaphore().open(ticket);
                }
                wait_until_done(rank.semaphore(), TURNS);
            });
        }
    });
    ranks.iter().for_each(|rank| rank.stream.synchronize().expect("none failed"));
}

fn wait_until_done(semaphore: &TimelineSemaphore, ticket: u64) {
    while semaphore.done() < ticket {
        std::thread::yield_now();
    }
}

#[test]
fn hosts_meet_although_words_come_at_different_times() {
    let hosts = TestHosts::start(2, "[[tenant]]\nname = \"a\"\nsocket = \"a\"\n");
    let (id, placement) = (mccs::unique_id().expect("an id"), [0, 1, 1]);
    std::thread::scope(|scope| {
        for (rank, host) in (0..).zip(placement) {
            let client = hosts.service(host).connect(0);
            assert_eq!(client.root_address(), Some(&*format!("h{host}")));
            scope.spawn(move || {
                let own = Rank::join(client, id, rank, 3, "h0");
                for (turn, count) in [1_u64, 1000, 40_000, 100_000].into_iter().cycle().take(24).enumerate() {
                    let (kind, dtype, redop) = (CollectiveKind::AllReduce, DataType::F32, RedOp::Sum);
                    let call = Call { kind, dtype, redop, root: 0, count, nranks: 3, seed: turn as u64 };
                    let (send, recv) = (HEAD_BYTES, HEAD_BYTES + (1 << 20));
                    let span = |at| own.region.at(at);
                    call.enqueue(&own.comm, span(send), span(recv), &own.stream).expect("enqueued");
                    // The data come after the call, as they do from a GPU.
                    std::thread::sleep(Duration::from_micros(300 * u64::from(rank)));
                    let input = call.input(rank);
                    // SAFETY: both lie in the region; the operation does not touch them before the semaphore opens.
                    let output = unsafe {
                        let base = own.region.as_ptr();
                        base.add(send as usize).copy_from_nonoverlapping(input.as_ptr(), input.len());
                        base.add(recv as usize).write_bytes(POISON, input.len());
                        own.semaphore().open(turn as u64 + 1);
                        wait_until(|| own.semaphore().done() > turn as u64);
                        std::slice::from_raw_parts(base.add(recv as usize), input.len())
                    };
                    assert_eq!(call.wrong_elements(rank, output), 0, "{call:?}");
                }
            });
        }
    });
}

/// Ranks on two hosts, whose streams' collectives overlap.
fn overlapping(hosts: &TestHosts, placement: &[usize]) -> Vec<Rank> {
    let (id, nranks) = (mccs::unique_id().expect("an id"), placement.len() as u32);
    std::thread::scope(|scope| {
        let join = |(rank, host): (u32, &usize)| {
            let client = hosts.service(*host).connect(0);
            let create = Client::create_overlapping_stream;
            scope.spawn(move || Rank::join_on(create, client, id, rank, nranks, "h0"))
        };
        let ranks: Vec<_> = (0..).zip(placement).map(join).collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank")).collect()
    })
}

/// The default, and channels of which each has several engines' turn.
const CHANNELS: &str = "[strategy]\nchannels = 3\n[[tenant]]\nname = \"a\"\nsocket = \"a\"\n";

#[test]
fn collectives_of_an_overlapping_stream_start_before_others_have_ended() {
    let hosts = TestHosts::start(2, CHANNELS);
    let ranks = overlapping(&hosts, &[0, 1]);
    let (a, b) = (&ranks[0], &ranks[1]);
    (0..20).for_each(|place| [a, b].iter().for_each(|rank| rank.add(place as u32 + 1, place)));
    let comm = hosts.service(0).service().registry.comms().remove(0);
    let started = || comm.ranks[0].started.load(std::sync::atomic::Ordering::Relaxed);
    a.semaphore().open(3);
    wait_until(|| started() == 3);
    // As many as may run at a time, and no more.
    a.semaphore().open(20);
    wait_until(|| started() == 8);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((started(), a.semaphore().done(), b.semaphore().done()), (8, 0, 0));
    for ticket in 1..=20 {
        b.semaphore().open(ticket);
        wait_until(|| a.semaphore().done() == ticket && b.semaphore().done() == ticket);
        assert_eq!([a, b].map(|rank| rank.number(ticket - 1)), [2 * ticket as u32; 2]);
    }
    ranks.iter().for_each(|rank| rank.stream.synchronize().expect("ended"));
}

#[test]
fn what_overlaps_is_right_on_all_ranks_and_ends_in_order() {
    const PLACES: u64 = 4;
    const PLACE_BYTES: u64 = 1 << 20;
    const TURNS: u64 = 96;
    let hosts = TestHosts::start(2, CHANNELS);
    let ranks = overlapping(&hosts, &[0, 1, 1]);
    std::thread::scope(|scope| {
        for (rank, own) in (0..).zip(&ranks) {
            scope.spawn(move || {
                let kinds = [CollectiveKind::AllGather, CollectiveKind::AllReduce, CollectiveKind::Broadcast];
                let call = |turn: u64| {
                    // Long ones in many messages, short ones in some of the channels.
                    let count = [40_000, 1, 25_000, 300, 7][(turn % 5) as usize];
                    let (kind, dtype, redop) = (kinds[(turn % 3) as usize], DataType::F32, RedOp::Sum);
                    Call { kind, dtype, redop, root: (turn % 2) as u32, count, nranks: 3, seed: turn }
                };
                let at = |turn: u64| HEAD_BYTES + turn % PLACES * PLACE_BYTES;
                let check = |turn: u64| {
                    wait_until(|| own.semaphore().done() > turn);
                    let (call, at) = (call(turn), (at(turn) + PLACE_BYTES / 2) as usize);
                    let bytes = call.expected(rank).len();
                    // SAFETY: the operation has ended, and the next one there has not been let through.
                    let output = unsafe { std::slice::from_raw_parts(own.region.as_ptr().add(at), bytes) };
                    assert_eq!(call.wrong_elements(rank, output), 0, "{call:?}");
                };
                for turn in 0..TURNS {
                    if turn >= PLACES {
                        check(turn - PLACES);
                    }
                    let (call, at) = (call(turn), at(turn));
                    let span = |at| own.region.at(at);
                    call.enqueue(&own.comm, span(at), span(at + PLACE_BYTES / 2), &own.stream).expect("enqueued");
                    std::thread::sleep(Duration::from_micros(100 * u64::from(rank) * (turn % 3)));
                    let input = call.input(rank);
                    // SAFETY: what was there has ended; the operation does not touch it before the semaphore opens.
                    unsafe {
                        let base = own.region.as_ptr().add(at as usize);
                        base.copy_from_nonoverlapping(input.as_ptr(), input.len());
                        base.add(PLACE_BYTES as usize / 2).write_bytes(POISON, PLACE_BYTES as usize / 2);
                    }
                    own.semaphore().open(turn + 1);
                }
                (TURNS - PLACES..TURNS).for_each(check);
            });
        }
    });
    ranks.iter().for_each(|rank| rank.stream.synchronize().expect("ended"));
}

#[test]
fn what_overlaps_fails_together_and_no_word_rises_before_what_it_stands_for_has_ended() {
    let hosts = TestHosts::start(2, CHANNELS);
    let ranks = overlapping(&hosts, &[0, 1]);
    let (a, b) = (&ranks[0], &ranks[1]);
    (0..12).for_each(|place| [a, b].iter().for_each(|rank| rank.add(1, place)));
    a.semaphore().open(6);
    b.semaphore().open(2);
    wait_until(|| a.semaphore().done() == 2);
    b.comm.abort().expect("aborted");
    // Those that run and those that have come fail; the others as their stream comes to them.
    wait_until(|| a.semaphore().done() == 6);
    a.semaphore().open(12);
    wait_until(|| a.semaphore().done() == 12);
    assert!(a.stream.synchronize().is_err());
    assert!(a.comm.async_error().expect("a reason").to_string().contains("rank 1 aborted"));
    assert_eq!([a, b].map(|rank| (rank.number(0), rank.number(1))), [(2, 2); 2]);
    b.semaphore().release();
}

#[test]
fn a_rank_whose_gpu_does_not_come_is_named_and_its_stream_goes_on_when_it_does() {
    let service = TestService::start("[limits]\noperation_timeout = \"4s\"\n");
    let [a, b] = pair(&service);
    [&a, &b].iter().for_each(|rank| (0..3).for_each(|place| rank.add(1, place)));
    a.semaphore().open(3);
    let error = a.stream.synchronize().expect_err("rank 1 does not come").to_string();
    let expected =
        format!("rank 1 (process {}) has called all_reduce(1 x uint32, sum), and its stream", std::process::id());
    assert!(error.contains(&expected), "{error}");
    wait_until(|| a.semaphore().done() == 3);
    assert_eq!(b.semaphore().done(), 0);
    // Called operations fail as it comes to them: its stream is never left waiting.
    b.semaphore().open(2);
    wait_until(|| b.semaphore().done() == 2);
    b.semaphore().open(3);
    // A failure is told at once, before all that it ends has ended.
    assert!(b.stream.synchronize().is_err());
    wait_until(|| b.semaphore().done() == 3);
}

#[test]
fn an_abort_ends_what_waits() {
    let service = TestService::start("");
    let [a, b] = pair(&service);
    [&a, &b].iter().for_each(|rank| rank.add(1, 0));
    a.semaphore().open(1);
    b.comm.abort().expect("aborted");
    wait_until(|| a.semaphore().done() == 1);
    assert!(a.comm.async_error().expect("a reason").to_string().contains("rank 1 aborted"));
    // As the shim does when it gives a communicator up.
    b.semaphore().release();
    assert!(b.stream.synchronize().is_err());
}

#[test]
fn a_session_that_ends_at_a_closed_gate_leaves_nothing_behind() {
    let service = TestService::start("");
    let registry = &service.service().registry;
    for _ in 0..10 {
        let [a, b] = pair(&service);
        (0..5).for_each(|place| [&a, &b].iter().for_each(|rank| rank.add(1, place)));
        a.semaphore().open(2);
        // Its stream is not idle, and ends with the session.
        drop(b);
        wait_until(|| a.semaphore().done() == 2);
        assert!(a.comm.async_error().is_some());
        drop(a);
        wait_until(|| registry.comms().is_empty() && registry.sessions().is_empty());
    }
}

#[test]
fn places_that_are_no_gates_are_refused() {
    let service = TestService::start("");
    let client = service.connect(0);
    let region = client.allocate(4096).expect("memory");
    for offset in [1, 64, 4096 - 64, 4096, u64::MAX - 127] {
        let refused = client.create_ordered_stream(&region, offset).expect_err("refused").to_string();
        assert!(refused.contains("no place for a semaphore"), "{offset}: {refused}");
    }
    let stream = client.create_ordered_stream(&region, 4096 - TimelineSemaphore::BYTES).expect("the last place");
    stream.destroy().expect("destroyed");
    let other = service.connect(0);
    let own = other.allocate(4096).expect("memory of the same handle");
    let refused = other.create_ordered_stream(&region, 0).expect_err("another session's").to_string();
    assert!(refused.contains("another session"), "{refused}");
    other.create_ordered_stream(&own, 0).expect("its own").destroy().expect("destroyed");
}

#[test]
fn nobody_looks_at_gates_that_nothing_waits_at_and_seldom_at_one_that_stays_closed() {
    let service = TestService::start("[runtime]\ntransport_engines = 1\n");
    let [a, _b] = pair(&service);
    let parks = || match call(&service.control_socket(), &ControlRequest::Engines).expect("an answer") {
        ControlAnswer::Engines { runtimes, .. } => runtimes.iter().map(|runtime| runtime.parks).sum::<u64>(),
        other => panic!("{other:?}"),
    };
    let in_half_a_second = || {
        let (begin, before) = (Instant::now(), parks());
        std::thread::sleep(Duration::from_millis(500));
        let parked = parks() - before;
        // It may have been longer.
        parked * 500 / begin.elapsed().as_millis() as u64
    };
    std::thread::sleep(Duration::from_millis(50));
    assert!(in_half_a_second() < 50, "an idle service sleeps");
    a.add(1, 0);
    let waiting = in_half_a_second();
    assert!((1..2000).contains(&waiting), "{waiting} sleeps beside a closed semaphore");
    a.semaphore().open(1);
}
