//! Mistakes and haste of a well-meaning program: they cost at most the call, never the session, and never go unsaid.

use mccs::{Client, Communicator, CommunicatorBuilder, DataType, Error, RedOp};
use mccs_tests::{Rank, TestService};

/// More than a poll of the service takes from the ring.
const MANY_CALLS: usize = 700;
const COUNT: u64 = 1 << 18;

fn alone(client: &Client) -> Communicator {
    let id = mccs::unique_id().expect("an id");
    client.communicator(id, 0, 1).join().expect("a communicator")
}

fn enqueue_many(rank: &Rank, memory: &mccs::Region) {
    for _ in 0..MANY_CALLS {
        let (place, stream) = (memory.at(0), &rank.stream);
        rank.comm.all_reduce(place, place, COUNT, DataType::F32, RedOp::Sum, stream).expect("enqueued");
    }
}

#[test]
fn memory_is_kept_for_calls_made_before_it_was_dropped() {
    let service = TestService::start("");
    let results = service.ranks(0, 2, |rank| {
        let memory = rank.client.allocate(COUNT * 4).expect("memory");
        enqueue_many(&rank, &memory);
        drop(memory);
        rank.stream.synchronize()
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

#[test]
fn a_communicator_is_kept_for_calls_made_before_it_was_destroyed() {
    let service = TestService::start("");
    let results = service.ranks(0, 2, |rank| {
        let memory = rank.client.allocate(COUNT * 4).expect("memory");
        enqueue_many(&rank, &memory);
        rank.comm.destroy()?;
        rank.stream.synchronize()?;
        // The session lives.
        rank.client.create_stream().map(drop)
    });
    assert!(results.iter().all(Result::is_ok), "{results:?}");
}

/// A tenant that closes its session without reading the answers to what it asked for last: that counts all the same.
#[test]
fn a_rank_that_lets_go_of_everything_at_once_has_left() {
    // Often enough that the session is closed before the service has answered.
    for _ in 0..60 {
        let service = TestService::start("[[tenant]]\nname = \"t\"\nmax_sessions = 3\n");
        let gone = std::sync::Barrier::new(3);
        service.ranks(0, 3, |rank| {
            let Rank { client, comm, stream } = rank;
            let memory = [(); 4].map(|()| client.allocate(64).expect("memory"));
            comm.barrier(&stream).expect("enqueued");
            stream.synchronize().expect("completed");
            if comm.rank() == 0 {
                drop((memory, comm, stream, client));
                // There is room for another session only when the service has seen the end of this one.
                while mccs::Client::connect(service.socket(0)).is_err() {
                    std::thread::yield_now();
                }
                gone.wait();
                return;
            }
            gone.wait();
            if comm.rank() == 1 {
                comm.send(memory[0].at(0), 8, DataType::U64, 2, &stream).expect("enqueued");
            } else {
                comm.recv(memory[0].at(0), 8, DataType::U64, 1, &stream).expect("enqueued");
            }
            stream.synchronize().expect("completed without rank 0");
        });
    }
}

#[test]
fn a_stream_with_work_in_flight_is_not_destroyed() {
    let service = TestService::start("");
    let refused = std::sync::Barrier::new(2);
    service.ranks(0, 2, |rank| {
        let memory = rank.client.allocate(COUNT * 4).expect("memory");
        if rank.comm.rank() == 1 {
            refused.wait();
            enqueue_many(&rank, &memory);
            rank.comm.barrier(&rank.stream).expect("enqueued");
            rank.stream.synchronize().expect("completed");
        } else {
            enqueue_many(&rank, &memory);
            let error = rank.stream.destroy().expect_err("rank 1 has not called yet");
            assert!(error.to_string().contains("synchronize"), "{error}");
            refused.wait();
            let stream = rank.client.create_stream().expect("a stream");
            rank.comm.barrier(&stream).expect("enqueued");
            stream.synchronize().expect("what was in flight has ended, too");
        }
    });
}

/// The service ends a session that uses a stream which is gone.
#[test]
fn a_stream_with_clones_or_in_a_group_is_not_destroyed() {
    let service = TestService::start("");
    let client = service.connect(0);
    let (comm, stream) = (alone(&client), client.create_stream().expect("a stream"));
    let clone = stream.clone();
    let refused = stream.destroy();
    assert!(matches!(&refused, Err(Error::InvalidArgument(why)) if why.contains("clones")), "{refused:?}");
    let group = mccs::Group::begin();
    comm.barrier(&clone).expect("collected");
    let refused = clone.destroy();
    assert!(matches!(&refused, Err(Error::InvalidArgument(why)) if why.contains("group")), "{refused:?}");
    group.end().expect("the group's own clone is good");
    let stream = client.create_stream().expect("the session lives");
    comm.barrier(&stream).expect("enqueued");
    stream.synchronize().expect("completed");
    stream.destroy().expect("the last clone, and idle");
}

#[test]
fn streams_that_are_dropped_are_given_back() {
    let service = TestService::start("[[tenant]]\nname = \"t\"\nmax_streams = 2\n");
    let client = service.connect(0);
    let comm = alone(&client);
    for _ in 0..20 {
        let stream = client.create_stream().expect("a stream");
        comm.barrier(&stream).expect("enqueued");
        stream.synchronize().expect("completed");
    }
}

#[test]
fn a_request_that_cannot_be_sent_is_refused() {
    let service = TestService::start("");
    let client = service.connect(0);
    let id = mccs::unique_id().expect("an id");
    let refused = client.communicator(id, 0, 1).root_address(&*"x".repeat(5000)).join().map(drop);
    assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
    client.create_stream().expect("the session lives");
}

#[test]
fn memory_of_another_session_is_refused() {
    let service = TestService::start("");
    let (client, other) = (service.connect(0), service.connect(0));
    let (comm, stream) = (alone(&client), client.create_stream().expect("a stream"));
    // Both sessions' first region has the same handle.
    let _ours = client.allocate(4096).expect("memory");
    let theirs = other.allocate(4096).expect("memory");
    let refused = comm.all_reduce(theirs.at(0), theirs.at(0), 4, DataType::F32, RedOp::Sum, &stream);
    assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
}

#[test]
fn a_communicator_destroyed_inside_a_group_costs_the_group() {
    let service = TestService::start("");
    let client = service.connect(0);
    let (comm, stream) = (alone(&client), client.create_stream().expect("a stream"));
    let group = mccs::Group::begin();
    comm.barrier(&stream).expect("collected");
    drop(comm);
    assert!(matches!(group.end(), Err(Error::InvalidArgument(_))));
    stream.synchronize().expect("nothing was enqueued");
    client.create_stream().expect("the session lives");
}

/// However many operations fail with one communicator, the failure of the next is told too.
#[test]
fn no_failure_hides_another() {
    let service = TestService::start("");
    let client = service.connect(0);
    let memory = client.allocate(64).expect("memory");
    let [first, second] = [0, 1].map(|_| (alone(&client), client.create_stream().expect("a stream")));
    let fail = |(comm, stream): &(Communicator, mccs::Stream)| {
        comm.all_reduce(memory.at(0), memory.at(0), 4, DataType::F32, RedOp::Sum, stream).expect("enqueued");
    };
    for (comm, _) in [&first, &second] {
        comm.abort().expect("aborted");
    }
    for _ in 0..5000 {
        fail(&first);
    }
    fail(&second);
    first.1.synchronize().expect_err("failed");
    second.1.synchronize().expect_err("failed too");
    assert!(first.0.async_error().is_some() && second.0.async_error().is_some());
}

/// More failures than the completion ring holds, of a tenant that does not look: it is told at least that.
#[test]
fn failures_that_find_no_room_are_not_taken_for_success() {
    let service = TestService::start("[limits]\ncompletion_ring = 16\n");
    let client = service.connect(0);
    let memory = client.allocate(64).expect("memory");
    let comms: Vec<_> = (0..20).map(|_| (alone(&client), client.create_stream().expect("a stream"))).collect();
    for (comm, stream) in &comms {
        comm.abort().expect("aborted");
        comm.all_reduce(memory.at(0), memory.at(0), 4, DataType::F32, RedOp::Sum, stream).expect("enqueued");
    }
    for (_, stream) in &comms {
        stream.synchronize().expect_err("failed");
    }
}

/// More answers than the socket holds: joins are all asked for before the first answer is read.
#[test]
fn answers_wait_for_a_tenant_that_asks_faster_than_it_reads() {
    let service = TestService::start("[[tenant]]\nname = \"t\"\nmax_communicators = 4000\n");
    let client = service.connect(0);
    for _ in 0..2 {
        let ids: Vec<_> = (0..1000).map(|_| mccs::unique_id().expect("an id")).collect();
        let spec = |id, rank| client.communicator(id, rank, 2);
        let specs: Vec<_> = ids.iter().flat_map(|id| [spec(*id, 0), spec(*id, 1)]).collect();
        let comms = CommunicatorBuilder::join_all(&specs).expect("all of them");
        assert_eq!(comms.len(), 2000);
        // And all leave without waiting for answers.
        drop(comms);
    }
    client.create_stream().expect("the session lives");
}
