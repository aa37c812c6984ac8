//! Graphs and streams: calls that are captured and replayed, and calls on one stream after the other, which keep their order.

use std::collections::HashSet;
use std::sync::Barrier;

use anyhow::ensure;
use mccs_cuda::{CaptureMode, Graph, OwnedStream, RawStream};
use mccs_eval::workload::Call;

use super::ranks::{Buffers, Place, Rank, Role, call, capture, enqueue, everybody_plays};
use super::{LARGE, TENANTS};

pub const ROLES: &[(&str, Role)] = &[
    ("replays", replays),
    ("captures_beside", captures_beside),
    ("mixes_streams", mixes_streams),
    ("names_streams_alike", names_streams_alike),
];

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
            ensure!(comm.async_error().is_none(), "{:?}", comm.async_error());
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
    everybody_plays("replays", &[TENANTS, LARGE]);
}

/// Calls of many kinds while a stream without any is captured in the mode that forbids most to all threads: of the thread that captures, and of the
/// other ranks'.
fn captures_beside(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let calls: Vec<_> = (0..60).map(|n| call(n, place.nranks, 1 + n * 1777)).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()))?;
        let (other, copy) = (OwnedStream::new(&context)?, Buffers::of(&context, &calls[1])?);
        let call_everything = || {
            together.wait();
            calls.iter().zip(&at).try_for_each(|(call, at)| enqueue(&comm, call, at, stream.raw()))?;
            together.wait();
            anyhow::Ok(())
        };
        // Earlier and later calls are forbidden between.
        together.wait();
        let captured = if comm.rank() == 0 {
            Some(Graph::capture_in(CaptureMode::Global, &other, |other| {
                // SAFETY: both buffers live as long as the graph.
                unsafe { other.copy(copy.recv.address(), at[1].recv.address(), at[1].recv.len_bytes())? };
                call_everything()
            })?)
        } else {
            call_everything()?;
            None
        };
        together.wait();
        // SAFETY: the stream lives.
        unsafe { stream.raw().synchronize()? };
        calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, comm.rank()))?;
        let Some(mut graph) = captured else { return Ok(()) };
        // SAFETY: buffers and streams live.
        unsafe {
            graph.launch(other.raw())?;
            other.raw().synchronize()?;
        }
        copy.check(&calls[1], comm.rank())
    })
}

#[test]
#[ignore = "needs a GPU"]
fn calls_go_on_while_others_are_captured() {
    everybody_plays("captures_beside", &[TENANTS, LARGE]);
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
    everybody_plays("mixes_streams", &[TENANTS, LARGE]);
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
    everybody_plays("names_streams_alike", &[TENANTS, LARGE]);
}
