//! Ranks that contradict each other, are missing, or leave: an error on every rank that says who, and no hang.

use mccs::{Client, DataType, Error, ErrorClass, RedOp};
use mccs_tests::{Rank, TestService};

/// Each rank makes its own call; returns the ranks' messages.
///
/// Twice: the calls go through the service, and among the ranks.
fn errors(nranks: u32, call: impl Fn(&Rank, &mccs::Region) -> Result<(), Error> + Sync) -> Vec<(ErrorClass, String)> {
    let mut errors = errors_with("[host_device]\nshm_exchange_limit = \"0\"", nranks, &call);
    errors.extend(errors_with("", nranks, &call));
    errors
}

fn errors_with(
    settings: &str,
    nranks: u32,
    call: &(impl Fn(&Rank, &mccs::Region) -> Result<(), Error> + Sync),
) -> Vec<(ErrorClass, String)> {
    let service = TestService::start(settings);
    service.ranks(0, nranks, |rank| {
        let memory = rank.client.allocate(1 << 16).expect("memory");
        call(&rank, &memory).expect("enqueued");
        let error = rank.stream.synchronize().expect_err("ranks disagree");
        assert_eq!(rank.comm.async_error().expect("the communicator is dead").to_string(), error.to_string());
        // Later calls fail too, at once.
        rank.comm.barrier(&rank.stream).expect("enqueued");
        rank.stream.synchronize().expect_err("the communicator is dead");
        (error.class(), error.to_string())
    })
}

fn assert_names(errors: &[(ErrorClass, String)], words: &[&str]) {
    for (class, message) in errors {
        assert_eq!(*class, ErrorClass::InvalidUsage, "{message}");
        for word in words {
            assert!(message.contains(word), "{word:?} is missing in {message:?}");
        }
    }
}

#[test]
fn different_counts() {
    let errors = errors(3, |rank, memory| {
        let count = if rank.comm.rank() == 2 { 11 } else { 10 };
        rank.comm.all_reduce(memory.at(0), memory.at(0), count, DataType::F32, RedOp::Sum, &rank.stream)
    });
    assert_names(&errors, &["rank 0", "10 x float", "rank 2", "11 x float", "count"]);
}

#[test]
fn different_types() {
    let errors = errors(2, |rank, memory| {
        let dtype = [DataType::F32, DataType::I32][rank.comm.rank() as usize];
        rank.comm.all_reduce(memory.at(0), memory.at(0), 10, dtype, RedOp::Sum, &rank.stream)
    });
    assert_names(&errors, &["rank 0", "float", "rank 1", "int32", "data type"]);
}

#[test]
fn different_reductions() {
    let errors = errors(2, |rank, memory| {
        let op = [RedOp::Sum, RedOp::Max][rank.comm.rank() as usize];
        rank.comm.all_reduce(memory.at(0), memory.at(0), 10, DataType::F32, op, &rank.stream)
    });
    assert_names(&errors, &["sum", "max", "reduction"]);
}

#[test]
fn different_roots() {
    let errors = errors(2, |rank, memory| {
        let root = rank.comm.rank();
        rank.comm.broadcast(memory.at(0), memory.at(0), 10, DataType::F32, root, &rank.stream)
    });
    assert_names(&errors, &["root 0", "root 1"]);
}

#[test]
fn different_order_of_calls() {
    let errors = errors(2, |rank, memory| {
        let (comm, stream, place) = (&rank.comm, &rank.stream, memory.at(0));
        if comm.rank() == 0 {
            comm.all_reduce(place, place, 10, DataType::F32, RedOp::Sum, stream)?;
            comm.broadcast(place, place, 10, DataType::F32, 0, stream)
        } else {
            comm.broadcast(place, place, 10, DataType::F32, 0, stream)?;
            comm.all_reduce(place, place, 10, DataType::F32, RedOp::Sum, stream)
        }
    });
    assert_names(&errors, &["operation 0", "all_reduce", "broadcast"]);
}

#[test]
fn different_lengths_of_a_send_and_its_receive() {
    let errors = errors(2, |rank, memory| match rank.comm.rank() {
        0 => rank.comm.send(memory.at(0), 10, DataType::F32, 1, &rank.stream),
        _ => rank.comm.recv(memory.at(0), 9, DataType::F32, 0, &rank.stream),
    });
    assert_names(&errors, &["send(10 x float, to 1)", "recv(9 x float, from 0)"]);
}

#[test]
fn buffers_that_overlap_cost_the_call() {
    let service = TestService::start("");
    service.ranks(0, 2, |rank| {
        let memory = rank.client.allocate(1 << 12).expect("memory");
        let all_reduce =
            |recv| rank.comm.all_reduce(memory.at(0), memory.at(recv), 10, DataType::F32, RedOp::Sum, &rank.stream);
        let refused = all_reduce(36);
        assert!(matches!(&refused, Err(Error::InvalidArgument(why)) if why.contains("overlap")), "{refused:?}");
        all_reduce(0).and_then(|()| all_reduce(40)).expect("in place, and apart");
        rank.stream.synchronize().expect("nothing else was enqueued");
    });
}

#[test]
fn a_missing_rank_is_named() {
    let service = TestService::start("[limits]\ninit_timeout = \"4s\"\n");
    let id = mccs::unique_id().expect("an id");
    let join = |rank| {
        let client = service.connect(0);
        move || client.communicator(id, rank, 4).join().expect_err("rank 2 is missing")
    };
    let errors = std::thread::scope(|scope| {
        let threads: Vec<_> = [0, 1, 3].map(|rank| scope.spawn(join(rank))).into_iter().collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank")).collect::<Vec<_>>()
    });
    for error in errors {
        assert_eq!(error.class(), ErrorClass::Timeout);
        assert!(error.to_string().contains("missing rank 2 of 4"), "{error}");
    }
}

/// Joins as two ranks that contradict each other.
fn contradict(client: &Client, ranks: [(u32, u32); 2]) -> String {
    let id = mccs::unique_id().expect("an id");
    let specs = ranks.map(|(rank, nranks)| client.communicator(id, rank, nranks));
    mccs::CommunicatorBuilder::join_all(&specs).expect_err("a contradiction").to_string()
}

#[test]
fn contradictions_when_joining_are_named() {
    let service = TestService::start("");
    let client = service.connect(0);
    assert!(contradict(&client, [(0, 3), (0, 3)]).contains("rank 0 joined"));
    assert!(contradict(&client, [(0, 3), (1, 2)]).contains("nranks 2"));
    assert!(contradict(&client, [(3, 3), (0, 0)]).contains("rank 3 of 3"));
}

#[test]
fn a_rank_that_leaves_or_aborts_releases_the_others() {
    for abort in [false, true] {
        let service = TestService::start("");
        let messages = service.ranks(0, 3, |rank| {
            if rank.comm.rank() == 1 {
                if abort { rank.comm.abort() } else { rank.comm.destroy() }.expect("left");
                return None;
            }
            rank.comm.barrier(&rank.stream).expect("enqueued");
            Some(rank.stream.synchronize().expect_err("rank 1 never comes").to_string())
        });
        for message in messages.into_iter().flatten() {
            assert!(message.contains("rank 1"), "{message}");
        }
    }
}

/// Calls that can never meet, on streams that wait for them: found by time.
#[test]
fn ranks_that_wait_for_each_other_are_told_after_the_operators_time() {
    for shm_exchange_limit in ["0", "16KiB"] {
        let settings = format!(
            "[limits]\noperation_timeout = \"4s\"\n[host_device]\nshm_exchange_limit = {shm_exchange_limit:?}\n"
        );
        let service = TestService::start(&settings);
        let errors = service.ranks(0, 2, |rank| {
            let memory = rank.client.allocate(64).expect("memory");
            let place = memory.at(0);
            // In time: nothing fails while ranks make progress.
            rank.comm.all_reduce(place, place, 4, DataType::F32, RedOp::Sum, &rank.stream).expect("enqueued");
            rank.stream.synchronize().expect("completed");
            if rank.comm.rank() == 0 {
                rank.comm.all_reduce(place, place, 4, DataType::F32, RedOp::Sum, &rank.stream).expect("enqueued");
            } else {
                rank.comm.recv(place, 4, DataType::F32, 0, &rank.stream).expect("enqueued");
            }
            let error = rank.stream.synchronize().expect_err("they wait for ever");
            assert_eq!(error.class(), ErrorClass::Timeout);
            error.to_string()
        });
        for error in errors {
            assert!(error.contains("rank 0 waits in all_reduce(4 x float, sum)"), "{error}");
            assert!(error.contains("rank 1 waits in recv(4 x float, from 0)"), "{error}");
        }
    }
}

#[test]
fn a_rank_that_never_calls_is_named_after_the_operators_time() {
    let service = TestService::start("[limits]\noperation_timeout = \"100ms\"\n");
    let told = std::sync::Barrier::new(3);
    let errors = service.ranks(0, 3, |rank| {
        let mut error = None;
        if rank.comm.rank() != 2 {
            rank.comm.barrier(&rank.stream).expect("enqueued");
            error = Some(rank.stream.synchronize().expect_err("rank 2 never comes").to_string());
        }
        told.wait();
        error
    });
    for error in errors.iter().flatten() {
        assert!(error.contains("rank 2") && error.contains("has called nothing after operation 0"), "{error}");
    }
}
