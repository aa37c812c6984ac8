//! Features of programs besides collectives: time-outs of their own, a log handler, bytes that ranks tell each other, and errors that say
//! where.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use mccs::{
    Collective, Collectives, DataType, Error, ErrorClass, Group, LogLevel, RedOp, Slice, clear_log_handler,
    set_log_handler,
};
use mccs_tests::{TestService, watchdog};
use rand::{Rng, SeedableRng};

#[path = "../../shim/examples/all_reduce.rs"]
#[allow(dead_code, reason = "its main is for whoever runs it as a program")]
mod example;

/// The handler is the process'.
static ONE_HANDLER: Mutex<()> = Mutex::new(());

#[test]
fn a_rank_gives_up_after_its_own_time_and_does_not_haunt_the_others() {
    watchdog();
    let service = TestService::start("");
    let (client, id) = (service.connect(0), mccs::unique_id().expect("an id"));
    let (begin, timeout) = (Instant::now(), Duration::from_millis(50));
    let error = client.communicator(id, 0, 2).timeout(timeout).join().expect_err("rank 1 is late");
    assert!(begin.elapsed() >= timeout);
    assert_eq!(error.class(), ErrorClass::Timeout, "{error}");
    let origin = error.origin().expect("of a join");
    assert_eq!((origin.communicator, origin.rank, origin.operation), (id, 0, None), "{error}");
    assert!(error.to_string().contains("rank 0") && error.to_string().contains(&id.to_string()), "{error}");
    // The other rank comes after all: it joins, and hears that nobody is there.
    let comm =
        service.connect(0).communicator(id, 1, 2).join().expect("rank 0 has not told the service that it gave up");
    while comm.async_error().is_none() {
        std::thread::yield_now();
    }
    // The session is as good as before.
    client.communicator(mccs::unique_id().expect("an id"), 0, 1).timeout(Duration::MAX).join().expect("joined");
}

#[test]
fn ranks_that_were_announced_are_given_up_when_another_one_cannot_be() {
    watchdog();
    let service = TestService::start("");
    let (client, id) = (service.connect(0), mccs::unique_id().expect("an id"));
    let no_message_has_room = "h".repeat(1 << 20);
    let first = client.communicator(id, 0, 3);
    let second = client.communicator(id, 1, 3).root_address(&*no_message_has_room);
    let error = mccs::CommunicatorBuilder::join_all(&[first, second]).expect_err("it cannot be sent");
    assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
    // The other ranks come all the same: they hear that rank 0 has given up.
    let others = [1, 2].map(|rank| client.communicator(id, rank, 3));
    let comms = mccs::CommunicatorBuilder::join_all(&others).expect("rank 0 was announced");
    while comms.iter().any(|comm| comm.async_error().is_none()) {
        std::thread::yield_now();
    }
}

#[test]
fn texts_that_name_nothing_are_refused_with_what_would() {
    let error: Error = "0011".parse::<mccs::UniqueId>().expect_err("too short").into();
    assert!(matches!(&error, Error::InvalidArgument(why) if why.contains("32 hexadecimal digits")), "{error}");
    let error: Error = "float128".parse::<mccs::DataType>().expect_err("no such type").into();
    assert!(matches!(&error, Error::InvalidArgument(why) if why.contains("bfloat16")), "{error}");
    let id = mccs::unique_id().expect("an id");
    assert_eq!(id.to_string().parse::<mccs::UniqueId>(), Ok(id));
}

#[test]
fn who_finds_no_service_learns_what_the_kernel_has_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let error = mccs::Client::connect(folder.path().join("nobody.sock")).expect_err("nobody listens");
    assert!(matches!(&error, Error::Connect { .. }), "{error}");
    for error in [error.clone(), error] {
        let source = std::error::Error::source(&error).and_then(|source| source.downcast_ref::<std::io::Error>());
        assert_eq!(source.map(std::io::Error::kind), Some(std::io::ErrorKind::NotFound), "{error}");
    }
}

#[test]
fn the_examples_ranks_find_every_element_right() {
    watchdog();
    let service = TestService::start("");
    let wrong = service.ranks(0, 3, |rank| example::wrong_elements(&rank.client, &rank.comm).expect("carried out"));
    assert_eq!(wrong, [0, 0, 0]);
}

#[test]
fn elements_of_memory_are_read_and_written_where_they_are_inside() {
    let service = TestService::start("");
    let memory = service.connect(0).allocate(4096).expect("memory");
    // SAFETY: no operation is in flight.
    let (all, pairs) = unsafe {
        memory.slice_mut::<u32>(4..8).expect("inside").copy_from_slice(&[1, 2, 3, 4]);
        (memory.slice::<u32>(0..1024).expect("all of it"), memory.slice::<u64>(1..4).expect("inside"))
    };
    assert_eq!(all[3..9], [0, 1, 2, 3, 4, 0]);
    assert_eq!(pairs, [0, 1 | 2 << 32, 3 | 4 << 32]);
    for (start, end) in [(1023, 1025), (5000, 5000), (7, 6)] {
        // SAFETY: as above.
        let refused = unsafe { memory.slice::<u32>(start..end) };
        assert!(matches!(&refused, Err(Error::InvalidArgument(why)) if why.contains("region of 1024")), "{refused:?}");
    }
}

#[test]
fn an_empty_root_address_is_refused_and_none_is_not() {
    let service = TestService::start("");
    let (client, id) = (service.connect(0), mccs::unique_id().expect("an id"));
    let error = client.communicator(id, 0, 1).root_address("").join().expect_err("no address");
    assert!(matches!(&error, Error::InvalidArgument(why) if why.contains("give none")), "{error}");
    client.communicator(id, 0, 1).root_address(None).join().expect("ranks of one service need none");
    assert_eq!(client.root_address(), None, "the service knows no other hosts");
}

#[test]
fn ranks_tell_each_other_bytes_of_any_length_before_they_have_a_communicator() {
    watchdog();
    const NRANKS: u32 = 3;
    let (service, id) = (TestService::start(""), mccs::unique_id().expect("an id"));
    let seed = u64::from_le_bytes(id.0[..8].try_into().expect("eight bytes"));
    let told = |rank: u32, round: u64| {
        let mut rng = rand::rngs::StdRng::seed_from_u64(seed ^ round << 8 ^ u64::from(rank));
        let mut bytes = vec![0; if round == 0 { 0 } else { rng.random_range(0..10_000) }];
        rng.fill(&mut bytes[..]);
        bytes
    };
    std::thread::scope(|scope| {
        for rank in 0..NRANKS {
            let (client, told) = (service.connect(0), &told);
            scope.spawn(move || {
                let mut bootstrap = client.communicator(id, rank, NRANKS).join_bootstrap().expect("joined");
                for round in 0..8 {
                    let all = bootstrap.all_gather(&told(rank, round)).expect("told");
                    let expected: Vec<_> = (0..NRANKS).map(|rank| told(rank, round)).collect();
                    assert!(all == expected, "seed {seed}, rank {rank}, round {round}");
                    bootstrap.barrier().expect("met");
                }
                // A communicator of the same name.
                let comm = client.communicator(id, rank, NRANKS).join().expect("joined");
                assert_eq!((comm.rank(), bootstrap.rank(), bootstrap.nranks()), (rank, rank, NRANKS));
            });
        }
    });
}

/// Written once for the host's memory and GPUs: the sum of all ranks' elements, and then everybody's sums.
fn sum_and_gather<C: Collectives>(
    comm: &C,
    own: Slice<C::Place>,
    all: Slice<C::Place>,
    stream: &C::Stream,
) -> Result<(), Error> {
    let (rank, count) = (u64::from(comm.rank()), own.count());
    let group = Group::begin();
    comm.enqueue(&Collective::AllReduce { send: own, recv: own, op: RedOp::Sum.into() }, stream)?;
    let place = all.range(rank * count..(rank + 1) * count)?;
    comm.enqueue(&Collective::Gather { send: own, recv: (rank == 0).then_some(all), root: 0 }, stream)?;
    comm.enqueue(&Collective::Broadcast { send: (rank == 0).then_some(all), recv: all, root: 0 }, stream)?;
    comm.enqueue(&Collective::AllGather { send: place, recv: all }, stream)?;
    group.end()
}

#[test]
fn collectives_take_slices_that_carry_count_and_type() {
    watchdog();
    const NRANKS: u32 = 3;
    let service = TestService::start("");
    let seed = u64::from(std::process::id());
    let own = |rank: u32| {
        let mut rng = rand::rngs::StdRng::seed_from_u64(seed ^ u64::from(rank) << 40);
        (0..50).map(|_| rng.random_range(0..1 << 20)).collect::<Vec<u32>>()
    };
    let sums: Vec<u32> = (0..50).map(|at| (0..NRANKS).map(|rank| own(rank)[at]).sum()).collect();
    service.ranks(0, NRANKS, |rank| {
        let elements = own(rank.comm.rank());
        let (count, nranks) = (elements.len() as u64, u64::from(NRANKS));
        let memory = rank.client.allocate(4 * count * (nranks + 1)).expect("memory");
        // SAFETY: nothing is in flight.
        unsafe { memory.slice_mut::<u32>(0..elements.len()) }.expect("inside").copy_from_slice(&elements);
        let (own, all) = (memory.at(0).elements::<u32>(count), memory.at(4 * count).elements::<u32>(count * nranks));
        sum_and_gather(&rank.comm, own, all, &rank.stream).expect("enqueued");
        rank.stream.synchronize().expect("completed");
        // SAFETY: all has ended.
        let found = unsafe { memory.slice::<u32>(0..sums.len() * 4) }.expect("inside");
        assert_eq!(found, [&sums[..]; 4].concat(), "seed {seed}");
        let wrong = Collective::AllGather { send: own, recv: own };
        let refused = rank.comm.enqueue(&wrong, &rank.stream).expect_err("too short").to_string();
        assert!(refused.contains("receive slice has 50 elements, expected 150"), "{refused}");
        let nobody = Collective::Send { send: own, peer: NRANKS };
        let refused = rank.comm.enqueue(&nobody, &rank.stream).expect_err("no such rank").to_string();
        assert!(refused.contains("rank 3 of a communicator of 3"), "{refused}");
    });
}

#[test]
fn a_failed_operation_says_which_communicator_rank_and_operation() {
    watchdog();
    let (service, id) =
        (TestService::start("[host_device]\nshm_exchange_limit = \"0\"\n"), mccs::unique_id().expect("an id"));
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let client = service.connect(0);
            scope.spawn(move || {
                let comm = client.communicator(id, rank, 2).join().expect("joined");
                let (stream, memory) =
                    (client.create_stream().expect("a stream"), client.allocate(4096).expect("memory"));
                let place = memory.at(0);
                // The second operation's types differ. The first has ended: else it could fail with the communicator.
                comm.all_reduce(place, place, 16, DataType::F32, RedOp::Sum, &stream).expect("enqueued");
                stream.synchronize().expect("the first one is right");
                let dtype = if rank == 0 { DataType::F32 } else { DataType::I32 };
                comm.all_reduce(place, place, 16, dtype, RedOp::Sum, &stream).expect("enqueued");
                let error = stream.synchronize().expect_err("a contradiction");
                let origin = error.origin().expect("of a communicator");
                assert_eq!((origin.communicator, origin.rank), (id, rank), "{error}");
                assert_eq!(origin.operation, Some(2), "{error}");
                assert_eq!(comm.async_error().and_then(|error| error.origin()).map(|origin| origin.rank), Some(rank));
            });
        }
    });
}

#[test]
fn a_refused_join_says_which_communicator_and_rank_and_other_refusals_do_not() {
    watchdog();
    let (service, id) = (TestService::start(""), mccs::unique_id().expect("an id"));
    let client = service.connect(0);
    let ranks = [client.communicator(id, 0, 2), client.communicator(id, 1, 3)];
    let error = mccs::CommunicatorBuilder::join_all(&ranks).expect_err("they contradict each other");
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    let origin = error.origin().expect("of a join");
    assert_eq!((origin.communicator, origin.operation), (id, None), "{error}");
    assert!(origin.rank < 2, "{origin:?}");
    let error = client.allocate(1 << 60).expect_err("over the quota");
    assert!(matches!(error, Error::Refused { .. }) && error.origin().is_none(), "{error:?}");
}

#[test]
fn the_log_handler_hears_what_happens_until_it_is_cleared() {
    watchdog();
    let _one = ONE_HANDLER.lock();
    let (service, id) = (TestService::start(""), mccs::unique_id().expect("an id"));
    let heard: &'static Mutex<Vec<(LogLevel, String)>> = Box::leak(Box::default());
    set_log_handler(move |level, message| heard.lock().expect("whole").push((level, message.to_owned())));
    let client = service.connect(0);
    client.communicator(id, 0, 1).join().expect("joined").destroy().expect("left");
    clear_log_handler();
    client.communicator(mccs::unique_id().expect("an id"), 0, 1).join().expect("joined");
    let name = id.to_string();
    let of_it: Vec<_> = heard.lock().expect("whole").iter().filter(|(_, line)| line.contains(&name)).cloned().collect();
    let lines = ["rank 0 of 1 has joined communicator ", "rank 0 has left communicator "];
    assert_eq!(of_it, lines.map(|line| (LogLevel::Info, format!("{line}{name}"))));
}
