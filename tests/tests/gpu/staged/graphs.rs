//! Graphs whose collectives the service carries out.

use std::time::Duration;

use anyhow::ensure;
use mccs::{CollectiveKind, DataType, Group, RedOp};
use mccs_cuda::{DeviceMemory, Event, Graph, OwnedStream, RawStream, copy_from_host, copy_to_host};
use mccs_eval::workload::Call;
use mccs_tests::TestService;
use mccs_tests::hosts::TestHosts;

use super::{halves, play_halves, strict};
use crate::ranks::{Buffers, Place, Player, Rank, Role, call, capture, enqueue, everybody};
use crate::{TENANTS, told};

/// Roles of processes of these tests, besides those of others.
pub const ROLES: &[(&str, Role)] = &[
    ("refuses_graphs", refuses_graphs),
    ("refuses_large_groups", refuses_large_groups),
    ("replays_alone", replays_alone),
    ("replays_many", replays_many),
    ("leaves_while_a_graph_waits", leaves_while_a_graph_waits),
];

/// If streams wait by words alone, graphs are refused.
fn refuses_graphs(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        together.wait();
        // Counts of host memory, and of the engines.
        for count in [1000, 1 << 20] {
            let call: Call = call(0, place.nranks, count);
            let at = Buffers::of(&context, &call)?;
            let captured = Graph::capture(&stream, |stream| enqueue(&comm, &call, &at, stream));
            let error = captured.err().map(|error| error.to_string()).unwrap_or_default();
            ensure!(error.contains("can be captured into graphs only where kernels"), "{error}");
            // The communicator is as good as before.
            at.fill(&call, comm.rank())?;
            enqueue(&comm, &call, &at, stream.raw())?;
            // SAFETY: the stream lives.
            unsafe { stream.raw().synchronize()? };
            at.check(&call, comm.rank())?;
        }
        let (call, next) = (call(0, place.nranks, 1000), (comm.rank() + 1) % place.nranks);
        let at = Buffers::of(&context, &call)?;
        // SAFETY: the buffer has so many elements, and lives to the end.
        let send =
            |stream: RawStream| unsafe { comm.send(at.send.address(), 1000, DataType::U8, next, stream.as_ptr()) };
        let error = Graph::capture(&stream, |stream| anyhow::Ok(send(stream)?))
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default();
        ensure!(error.contains("can be captured into graphs only where kernels"), "{error}");
        Ok(())
    })
}

/// If only a few operations may be in flight, large groups are refused.
fn refuses_large_groups(place: &Place) -> anyhow::Result<()> {
    const BYTES: u64 = 6 << 20;
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (next, last) = ((comm.rank() + 1) % place.nranks, (comm.rank() + place.nranks - 1) % place.nranks);
        let (from, to) =
            (DeviceMemory::zeroed(&context, BYTES as usize)?, DeviceMemory::zeroed(&context, BYTES as usize)?);
        let exchange = |stream: RawStream, bytes: u64| {
            let group = Group::begin();
            // SAFETY: buffers have so many bytes, and live to the end.
            unsafe {
                comm.send(from.address(), bytes, DataType::U8, next, stream.as_ptr())?;
                comm.recv(to.address(), bytes, DataType::U8, last, stream.as_ptr())?;
            }
            anyhow::Ok(group.end()?)
        };
        together.wait();
        let captured = Graph::capture(&stream, |stream| exchange(stream, BYTES));
        let error = captured.err().map(|error| error.to_string()).unwrap_or_default();
        ensure!(error.contains("a group of 12 pieces of 1 MiB cannot be captured"), "{error}");
        // The communicator is as good as before, and takes what there is room for.
        let value = comm.rank() as u8 + 1;
        let mut graph = capture(&stream, &together, |stream| exchange(stream, BYTES / 3))?;
        // SAFETY: buffers have so many bytes; all live.
        unsafe {
            copy_from_host(from.address(), &vec![value; BYTES as usize])?;
            graph.launch(stream.raw())?;
            stream.raw().synchronize()?;
            let mut got = vec![0; BYTES as usize];
            copy_to_host(&mut got, to.address())?;
            let (there, rest) = got.split_at(BYTES as usize / 3);
            ensure!(there.iter().all(|byte| *byte == last as u8 + 1) && rest.iter().all(|byte| *byte == 0));
            exchange(stream.raw(), BYTES)?;
            stream.raw().synchronize()?;
            copy_to_host(&mut got, to.address())?;
            ensure!(got.iter().all(|byte| *byte == last as u8 + 1));
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn captured_groups_are_as_large_as_may_be_in_flight() {
    let service = TestService::start(&format!("{}max_operations_in_flight = 5\n", strict("auto")));
    Player::start("refuses_large_groups", &everybody(&service, 1)).ends_well();
}

#[test]
#[ignore = "needs a GPU"]
fn sends_and_receives_are_replayed_through_services() {
    let hosts = TestHosts::start(2, TENANTS);
    play_halves("exchanges_in_graphs", &hosts);
    for ordering in ["auto", "kernels"] {
        let service = TestService::start(&strict(ordering));
        Player::start("exchanges_in_graphs", &everybody(&service, 0)).ends_well();
    }
}

#[test]
#[ignore = "needs a GPU"]
fn graphs_are_refused_and_nothing_is_lost() {
    let service = TestService::start(&strict("words"));
    Player::start("refuses_graphs", &everybody(&service, 0)).ends_well();
}

#[test]
#[ignore = "needs a GPU"]
fn graphs_are_replayed_through_services() {
    let hosts = TestHosts::start(2, TENANTS);
    ["replays", "replays_many"].into_iter().for_each(|role| drop(play_halves(role, &hosts)));
    for ordering in ["auto", "kernels"] {
        let service = TestService::start(&strict(ordering));
        Player::start("replays", &everybody(&service, 0)).ends_well();
    }
    // No replay may need more than so few operations at a time.
    let few = format!("{}max_operations_in_flight = 5\n", strict("auto"));
    let service = TestService::start(&few);
    Player::start("replays_many", &everybody(&service, 1)).ends_well();
}

/// A graph of many calls, on two streams in turn, each of which adds up what the last has left.
fn replays_many(place: &Place) -> anyhow::Result<()> {
    const CALLS: u32 = 150;
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (other, fork, join) =
            (OwnedStream::new(&context)?, Event::new(&context, false)?, Event::new(&context, false)?);
        let (kind, dtype, redop) = (CollectiveKind::AllReduce, DataType::F64, RedOp::Sum);
        let call = Call { kind, dtype, redop, root: 0, count: 100, nranks: place.nranks, seed: 0 };
        let at = Buffers::of(&context, &call)?;
        together.wait();
        let mut graph = capture(&stream, &together, |main| {
            // SAFETY: streams, events and buffers live; buffers have so many elements.
            unsafe {
                fork.record(main)?;
                other.raw().wait(&fork)?;
                for number in 0..CALLS {
                    let on = if number % 3 == 1 { other.raw() } else { main };
                    let (recv, sum) = (at.recv.address(), RedOp::Sum);
                    comm.all_reduce(recv, recv, call.count, call.dtype, sum, on.as_ptr())?;
                }
                join.record(other.raw())?;
                main.wait(&join)?;
            }
            Ok(())
        })?;
        // The first call adds ranks' numbers, every other one makes them as many times as large as there are ranks.
        let factor = f64::from(place.nranks).powi(CALLS as i32 - 1);
        for replay in 0..5 {
            let begin = |rank: u32| (0..100).map(move |n| f64::from(n * 7 + replay + 1000 * (rank + 1)));
            let bytes: Vec<u8> = begin(comm.rank()).flat_map(f64::to_ne_bytes).collect();
            let mut end = vec![0; bytes.len()];
            // SAFETY: the buffer has so many bytes; all live.
            unsafe {
                copy_from_host(at.recv.address(), &bytes)?;
                graph.launch(stream.raw())?;
                stream.raw().synchronize()?;
                copy_to_host(&mut end, at.recv.address())?;
            }
            for (n, number) in end.chunks_exact(8).enumerate() {
                let sum: f64 = (0..place.nranks).filter_map(|rank| begin(rank).nth(n)).sum();
                let (number, expected) = (f64::from_ne_bytes(number.try_into()?), sum * factor);
                ensure!((number / expected - 1.0).abs() < 1e-9, "replay {replay}: {number} and not {expected}");
            }
        }
        ensure!(comm.async_error().is_none());
        Ok(())
    })
}

/// A graph of a call, launched once with the right result.
fn replayed_once(rank: &Rank, call: &Call, at: &Buffers) -> anyhow::Result<Graph> {
    let Rank { comm, stream, together, .. } = rank;
    at.fill(call, comm.rank())?;
    let mut graph = capture(stream, together, |stream| enqueue(comm, call, at, stream))?;
    // SAFETY: communicator, buffers and stream live.
    unsafe {
        graph.launch(stream.raw())?;
        stream.raw().synchronize()?;
    }
    at.check(call, comm.rank())?;
    Ok(graph)
}

/// Launches a graph whose collective rank 0 alone comes to.
fn replays_alone(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let Rank { comm, stream, together, .. } = &rank;
        let call = call(0, place.nranks, 1000);
        let at = Buffers::of(&rank.context, &call)?;
        let mut graph = replayed_once(&rank, &call, &at)?;
        together.wait();
        println!("has replayed");
        if comm.rank() == 0 {
            // SAFETY: communicator, buffers and stream live.
            unsafe {
                graph.launch(stream.raw())?;
                stream.raw().synchronize()?;
            }
        }
        println!("rank {} was told: {}", comm.rank(), told(&rank));
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn a_graph_goes_on_when_a_rank_does_not_come() {
    let hosts = TestHosts::start(2, &format!("{TENANTS}[limits]\noperation_timeout = \"1s\"\n"));
    let said = play_halves("replays_alone", &hosts).join("");
    assert!(said.contains("rank 0 was told") && said.contains("rank 1 was told"), "{said}");
}

/// Rank 0 leaves while its graph waits for the others, who do not come to it: another thread may ask meanwhile, and end the wait.
fn leaves_while_a_graph_waits(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let Rank { comm, stream, .. } = &rank;
        let call = call(0, place.nranks, 1000);
        let at = Buffers::of(&rank.context, &call)?;
        let mut graph = replayed_once(&rank, &call, &at)?;
        if comm.rank() == 0 {
            // SAFETY: communicator, buffers and stream live.
            unsafe { graph.launch(stream.raw())? };
            // The graph calls back for it.
            std::thread::sleep(Duration::from_millis(200));
            std::thread::scope(|scope| {
                let leaving = scope.spawn(|| comm.finalize());
                std::thread::sleep(Duration::from_millis(200));
                ensure!(!leaving.is_finished() && comm.async_error().is_none());
                println!("waits");
                comm.abort()?;
                anyhow::Ok(leaving.join().expect("a thread that does not panic")?)
            })?;
            // SAFETY: communicator, buffers and stream live.
            unsafe { stream.raw().synchronize()? };
        }
        println!("rank {} was told: {}", comm.rank(), told(&rank));
        Ok(())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn an_abort_ends_a_wait_for_graphs() {
    let hosts = TestHosts::start(2, TENANTS);
    let service = TestService::start(&strict("auto"));
    let strict = Player::start("leaves_while_a_graph_waits", &everybody(&service, 0)).ends_well();
    for said in [play_halves("leaves_while_a_graph_waits", &hosts).join(""), strict] {
        let told = |rank| {
            said.lines()
                .any(|line| line.starts_with(&format!("rank {rank} was told")) && line.contains("rank 0 aborted"))
        };
        assert!(told(0) && told(1), "{said}");
    }
}

#[test]
#[ignore = "needs a GPU"]
fn a_graph_goes_on_when_its_service_ends() {
    let mut hosts = TestHosts::start(2, TENANTS);
    let [mut first, mut second] = halves(&hosts, 0).map(|place| Player::start("replays_alone", &place));
    [&mut first, &mut second].iter_mut().for_each(|player| player.hears("has replayed"));
    hosts.stop(1);
    let said = [first, second].map(Player::ends_well).join("");
    assert!(said.contains("rank 0 was told") && said.contains("rank 1 was told"), "{said}");
}
