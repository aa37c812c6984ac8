//! Ranks of different hosts that contradict each other, or do not come: an error on every rank that says who, and no hang.

use mccs::{DataType, Error, ErrorClass, RedOp};
use mccs_tests::hosts::{TestHosts, in_threads};
use mccs_tests::{Rank, TestService};

/// Each rank makes its own call, ranks 0 and 1 on one host and 2 on another; returns the ranks' messages.
///
/// Small and large: schedules differ with the size.
fn errors(call: impl Fn(&Rank, &mccs::Region, u64) -> Result<(), Error> + Sync) -> Vec<String> {
    let hosts = TestHosts::start(2, "");
    let run = |count: u64| {
        hosts.ranks(&[0, 0, 1], |rank| {
            let memory = rank.client.allocate(1 << 20).expect("memory");
            call(&rank, &memory, count).expect("enqueued");
            let error = rank.stream.synchronize().expect_err("ranks disagree");
            assert_eq!(error.class(), ErrorClass::InvalidUsage, "{error}");
            assert_eq!(rank.comm.async_error().expect("the communicator is dead").to_string(), error.to_string());
            // Later calls fail too, at once.
            rank.comm.barrier(&rank.stream).expect("enqueued");
            rank.stream.synchronize().expect_err("the communicator is dead");
            error.to_string()
        })
    };
    [run(10), run(100_000)].concat()
}

#[test]
fn different_counts() {
    let errors = errors(|rank, memory, count| {
        let count = if rank.comm.rank() == 2 { count + 1 } else { count };
        rank.comm.all_reduce(memory.at(0), memory.at(0), count, DataType::F32, RedOp::Sum, &rank.stream)
    });
    for error in errors {
        assert!(error.contains("ranks disagree on operation 0") && error.contains("called all_reduce(1"), "{error}");
        assert!(error.contains("h0") || error.contains("h1"), "{error}");
    }
}

#[test]
fn different_types_of_one_length() {
    let errors = errors(|rank, memory, count| {
        let dtype = if rank.comm.rank() == 2 { DataType::I32 } else { DataType::F32 };
        rank.comm.all_gather(memory.at(0), memory.at(1 << 19), count.min(1000), dtype, &rank.stream)
    });
    for error in errors {
        assert!(error.contains("ranks disagree on operation 0") && error.contains("called all_gather(10"), "{error}");
    }
}

#[test]
fn different_reductions() {
    let errors = errors(|rank, memory, count| {
        let op = if rank.comm.rank() == 2 { RedOp::Max } else { RedOp::Sum };
        rank.comm.reduce_scatter(memory.at(0), memory.at(1 << 19), count.min(40_000), DataType::F32, op, &rank.stream)
    });
    for error in errors {
        assert!(error.contains("ranks disagree on operation 0") && error.contains("called reduce_scatter("), "{error}");
    }
}

#[test]
fn different_collectives() {
    let errors = errors(|rank, memory, count| {
        let (place, comm) = (memory.at(0), &rank.comm);
        if comm.rank() == 2 {
            comm.broadcast(place, place, count, DataType::F32, 2, &rank.stream)?;
        } else {
            comm.all_reduce(place, place, count, DataType::F32, RedOp::Sum, &rank.stream)?;
        }
        // A broadcast's root may have sent all its data, and so have ended, before another host looks at it.
        comm.barrier(&rank.stream)
    });
    for error in errors {
        let names =
            ["all_reduce(1", "broadcast(1", "barrier("].iter().any(|call| error.contains(&format!("called {call}")));
        assert!(error.contains("ranks disagree on operation ") && names, "{error}");
    }
}

#[test]
fn different_order_of_calls() {
    let errors = errors(|rank, memory, count| {
        let (comm, stream, place) = (&rank.comm, &rank.stream, memory.at(0));
        if comm.rank() == 2 {
            comm.barrier(stream)?;
            comm.all_reduce(place, place, count, DataType::F32, RedOp::Sum, stream)
        } else {
            comm.all_reduce(place, place, count, DataType::F32, RedOp::Sum, stream)?;
            comm.barrier(stream)
        }
    });
    for error in errors {
        assert!(error.contains("ranks disagree on operation 0"), "{error}");
    }
}

/// A send and a receive of different lengths, and of different types.
#[test]
fn a_send_and_its_receive_that_disagree() {
    for (length, dtype) in [(9, DataType::F32), (11, DataType::F32), (100_000, DataType::F32), (10, DataType::I32)] {
        let hosts = TestHosts::start(2, "");
        let errors = hosts.ranks(&[0, 1], |rank| {
            let memory = rank.client.allocate(1 << 20).expect("memory");
            let place = memory.at(0);
            if rank.comm.rank() == 0 {
                rank.comm.send(place, 10, DataType::F32, 1, &rank.stream).expect("enqueued");
                // The send itself may have ended: its data has left the buffer.
                rank.comm.barrier(&rank.stream).expect("enqueued");
            } else {
                rank.comm.recv(place, length, dtype, 0, &rank.stream).expect("enqueued");
            }
            rank.stream.synchronize().expect_err("they disagree").to_string()
        });
        for error in errors {
            assert!(error.contains("send") && error.contains("disagree"), "{length} {dtype:?}: {error}");
        }
    }
}

/// A collective beside a send and its receive has nothing to do with them.
#[test]
fn a_send_and_its_receive_that_disagree_while_a_collective_runs() {
    let hosts = TestHosts::start(2, "");
    let errors = hosts.ranks(&[0, 1, 1], |rank| {
        let memory = rank.client.allocate(1 << 20).expect("memory");
        let (place, beside) = (memory.at(0), rank.client.create_stream().expect("a stream"));
        match rank.comm.rank() {
            0 => {
                // Rank 0 never takes part in the barrier that the others are in.
                std::thread::sleep(std::time::Duration::from_millis(50));
                rank.comm.send(place, 10, DataType::F32, 1, &rank.stream).expect("enqueued");
                rank.comm.recv(place, 1, DataType::F32, 1, &rank.stream).expect("enqueued");
            }
            number => {
                rank.comm.barrier(&beside).expect("enqueued");
                if number == 1 {
                    rank.comm.recv(place, 11, DataType::F32, 0, &rank.stream).expect("enqueued");
                } else {
                    return beside.synchronize().expect_err("they disagree").to_string();
                }
            }
        }
        rank.stream.synchronize().expect_err("they disagree").to_string()
    });
    for error in errors {
        assert!(error.contains("a send and its receive disagree: rank 1 called recv(11 x"), "{error}");
        assert!(!error.contains("barrier"), "{error}");
    }
}

/// Every host sends and none receives: found at the next call, if not at once.
#[test]
fn different_roots() {
    let hosts = TestHosts::start(2, "[limits]\noperation_timeout = \"4s\"\n");
    for count in [10, 4 << 20] {
        let errors = hosts.ranks(&[0, 1], |rank| {
            let memory = rank.client.allocate(4 * count).expect("memory");
            let (place, root) = (memory.at(0), rank.comm.rank());
            rank.comm.broadcast(place, place, count, DataType::F32, root, &rank.stream).expect("enqueued");
            rank.comm.barrier(&rank.stream).expect("enqueued");
            rank.stream.synchronize().expect_err("ranks disagree").to_string()
        });
        for error in errors {
            assert!(error.contains("disagree") || error.contains("broadcast"), "{error}");
        }
    }
}

#[test]
fn a_rank_of_another_host_that_never_calls_is_found_after_the_operators_time() {
    for count in [1u64, 1 << 18] {
        let hosts = TestHosts::start(2, "[limits]\noperation_timeout = \"4s\"\n");
        let told = std::sync::Barrier::new(3);
        let errors = hosts.ranks(&[0, 1, 1], |rank| {
            let memory = rank.client.allocate(4 * count).expect("memory");
            let place = memory.at(0);
            let mut error = None;
            // In time: nothing fails while ranks make progress.
            rank.comm.barrier(&rank.stream).expect("enqueued");
            rank.stream.synchronize().expect("completed");
            if rank.comm.rank() == 0 {
                rank.comm.all_reduce(place, place, count, DataType::F32, RedOp::Sum, &rank.stream).expect("enqueued");
                error = Some(rank.stream.synchronize().expect_err("ranks 1 and 2 never come"));
            }
            told.wait();
            (error, rank.comm.async_error())
        });
        let own = errors[0].0.as_ref().expect("an error");
        assert_eq!(own.class(), ErrorClass::Timeout);
        let text = format!("rank 0 waits in all_reduce({count} x float, sum) for ranks of other hosts");
        assert!(own.to_string().contains(&text) && own.to_string().contains("h1"), "{own}");
    }
}

#[test]
fn a_message_that_nobody_sends_is_found_after_the_operators_time() {
    let hosts = TestHosts::start(2, "[limits]\noperation_timeout = \"200ms\"\n");
    let told = std::sync::Barrier::new(2);
    hosts.ranks(&[0, 1], |rank| {
        if rank.comm.rank() == 1 {
            let memory = rank.client.allocate(64).expect("memory");
            rank.comm.recv(memory.at(0), 4, DataType::F32, 0, &rank.stream).expect("enqueued");
            let error = rank.stream.synchronize().expect_err("nobody sends");
            assert!(error.to_string().contains("rank 1 waits in recv(4 x float, from 0)"), "{error}");
        }
        told.wait();
    });
}

/// How each of `joins` (host, rank, nranks, root) fails.
fn joins_fail(hosts: &TestHosts, joins: &[(usize, u32, u32, &str)]) -> Vec<Error> {
    let id = mccs::unique_id().expect("an id");
    in_threads(joins.to_vec(), |(host, rank, nranks, root)| {
        let client = hosts.service(host).connect(0);
        client.communicator(id, rank, nranks).root_address_or_empty(root).join().expect_err("refused")
    })
}

#[test]
fn a_missing_rank_is_named_on_every_host() {
    let hosts = TestHosts::start(3, "[limits]\ninit_timeout = \"4s\"\n");
    for error in joins_fail(&hosts, &[(0, 0, 4, "h0"), (1, 1, 4, "h0"), (2, 3, 4, "h0")]) {
        assert_eq!(error.class(), ErrorClass::Timeout);
        assert!(error.to_string().contains("missing rank 2 of 4"), "{error}");
    }
}

/// On the host of rank 0, though that has not come.
#[test]
fn the_operator_sees_which_ranks_of_other_hosts_are_missing() {
    let hosts = TestHosts::start(2, "[limits]\ninit_timeout = \"20s\"\n");
    let id = mccs::unique_id().expect("an id");
    let join = |rank: u32| {
        let client = hosts.service(rank as usize).connect(0);
        client.communicator(id, rank, 2).root_address("h0").join().expect("joined")
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| join(1));
        let late = hosts.service(0).waits_for_ranks();
        assert_eq!((late.unique_id, late.joined, late.nranks), (id.to_string(), 1, 2));
        assert_eq!(late.waits_for, "rank 0 of 2");
        let _both = (join(0), other.join().expect("a rank"));
        hosts.service(0).wait_until_ranks_are_there();
    });
}

#[test]
fn a_root_that_never_comes_is_named() {
    let hosts = TestHosts::start(2, "[limits]\ninit_timeout = \"4s\"\n");
    for error in joins_fail(&hosts, &[(1, 1, 2, "h0")]) {
        assert_eq!(error.class(), ErrorClass::Timeout);
        assert!(error.to_string().contains("missing rank 0 of 2"), "{error}");
    }
}

#[test]
fn a_root_that_is_no_host_is_refused() {
    let hosts = TestHosts::start(2, "");
    for error in joins_fail(&hosts, &[(0, 0, 2, "nowhere"), (1, 1, 2, "nowhere")]) {
        assert_eq!(error.class(), ErrorClass::InvalidArgument);
        assert!(error.to_string().contains("names host nowhere, which is not in this service's list"), "{error}");
    }
}

#[test]
fn a_root_that_is_not_the_host_of_rank_0_is_refused() {
    let hosts = TestHosts::start(2, "");
    for error in joins_fail(&hosts, &[(0, 0, 2, "h1"), (1, 1, 2, "h1")]) {
        assert_eq!(error.class(), ErrorClass::InvalidArgument);
        let text = error.to_string();
        assert!(text.contains("rank 0") && text.contains("on host h0") && text.contains("on host h1"), "{error}");
    }
}

#[test]
fn a_rank_that_two_hosts_have_is_named() {
    let hosts = TestHosts::start(2, "");
    for error in joins_fail(&hosts, &[(0, 0, 3, "h0"), (0, 1, 3, "h0"), (1, 1, 3, "h0")]) {
        assert!(error.to_string().contains("rank 1 joined communicator"), "{error}");
    }
}

#[test]
fn a_service_of_one_host_says_that_it_is() {
    let service = TestService::start("");
    let id = mccs::unique_id().expect("an id");
    let error = service.connect(0).communicator(id, 0, 2).root_address("h0").join().expect_err("refused");
    assert!(error.to_string().contains("joins ranks of its own host only"), "{error}");
}
