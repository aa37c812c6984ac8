//! Roles of ranks whose GPUs, of several hosts, combine among themselves: calls of all kinds and lengths.

use std::sync::OnceLock;

use anyhow::ensure;
use mccs::{CollectiveKind, DataType, RedOp, ReduceOperator, Scalar};
use mccs_cuda::{DeviceMemory, Event, OwnedStream, RawStream, copy_from_host, copy_to_host};
use mccs_eval::workload::{Call, POISON};

use super::{KINDS, MOVING, every_kind, synchronize};
use crate::ranks::{Buffers, Place, Rank, call, capture, enqueue, enqueue_at, enqueue_with};
use crate::until_it_fails::calls_until_it_fails;

/// Calls of all kinds, from one element on, on two streams in turn, without waiting; then all are checked.
pub(super) fn combines(place: &Place) -> anyhow::Result<()> {
    combines_and(place, None)
}

/// The same, and a call of more slices than there are slots where slices are longest.
pub(super) fn combines_long(place: &Place) -> anyhow::Result<()> {
    combines_and(place, Some(every_kind(96, place.nranks, 14_000_005)))
}

fn combines_and(place: &Place, long: Option<Call>) -> anyhow::Result<()> {
    // The same for all ranks of an all-reduce: it takes longer to make than to carry out.
    let expected = OnceLock::new();
    place.each_rank(|Rank { context, comm, stream, together }| {
        ensure!(comm.is_service_executed() && comm.rails_from() == Some(1), "{:?}", comm.rails_from());
        let other = OwnedStream::new(&context)?;
        // Undivided, of one slice, of four slices, and of more slices than there are slots.
        let counts = [1, 77, 4100, 50_001, 300_003];
        let calls = counts.into_iter().enumerate().flat_map(|(turn, count)| {
            (0..KINDS.len() as u64).map(move |n| every_kind(n + 8 * turn as u64, place.nranks, count))
        });
        let calls: Vec<_> = calls.chain(long).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()))?;
        together.wait();
        for (index, (call, at)) in calls.iter().zip(&at).enumerate() {
            enqueue(&comm, call, at, if index % 3 == 0 { other.raw() } else { stream.raw() })?;
        }
        synchronize(&stream)?;
        synchronize(&other)?;
        ensure!(comm.async_error().is_none(), "{:?}", comm.async_error());
        for (call, at) in calls.iter().zip(&at) {
            if long.as_ref() == Some(call) {
                let expected = expected.get_or_init(|| call.expected(comm.rank()));
                ensure!(at.output(call, comm.rank())? == *expected, "wrong elements of {call:?}");
            } else {
                at.check(call, comm.rank())?;
            }
        }
        Ok(())
    })
}

pub(super) fn combines_all_types(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (mut calls, mut number) = (Vec::new(), 0);
        for dtype in DataType::ALL {
            for (kind, count) in MOVING.into_iter().flat_map(|kind| [37, 20_001].map(|count| (kind, count))) {
                number += 1;
                calls.push(Call { kind, dtype: *dtype, root: 0, ..call(number, place.nranks, count) });
            }
            for redop in RedOp::ALL {
                for kind in [CollectiveKind::AllReduce, CollectiveKind::ReduceScatter, CollectiveKind::Reduce] {
                    number += 1;
                    let count = [37, 20_001][(number % 7 == 0) as usize];
                    let root = if kind.has_root() { number as u32 % place.nranks } else { 0 };
                    let shape = call(number, place.nranks, count);
                    calls.push(Call { kind, dtype: *dtype, redop: *redop, root, ..shape });
                }
            }
        }
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()))?;
        together.wait();
        for (call, at) in calls.iter().zip(&at) {
            let op = match call.redop {
                RedOp::PreMulSum => ReduceOperator::PreMulSum(Scalar::Integer(call.scalar(comm.rank()))),
                op => op.into(),
            };
            enqueue_with(&comm, call, op, at, stream.raw())?;
        }
        synchronize(&stream)?;
        ensure!(comm.async_error().is_none(), "{:?}", comm.async_error());
        calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, comm.rank()))
    })
}

/// The input lies in the output, or the other way round.
pub(super) fn combines_in_place(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let (size, rank) = (size_of::<f32>() as u64, comm.rank());
        let calls = [3, 5000, 400_001].into_iter().enumerate().flat_map(|(turn, count)| {
            (0..KINDS.len() as u64).map(move |n| every_kind(n + 8 * turn as u64, place.nranks, count))
        });
        let calls: Vec<_> = calls.collect();
        let room = |call: &Call| (0..place.nranks).map(|rank| call.send_count(rank).max(call.recv_count(rank))).max();
        let memory = calls.iter().map(|call| DeviceMemory::zeroed(&context, room(call).unwrap_or(1).max(1) * 4));
        let memory = memory.collect::<Result<Vec<_>, _>>()?;
        let others = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        let mut places = Vec::new();
        for ((call, memory), others) in calls.iter().zip(&memory).zip(&others) {
            places.push(match call.in_place_elements(rank) {
                // SAFETY: the memory has room for the longer of both, and nothing is in flight.
                Some((send, recv)) => unsafe {
                    copy_from_host(memory.address(), &vec![POISON; memory.len_bytes()])?;
                    copy_from_host(memory.address() + send * size, &call.input(rank))?;
                    (memory.address() + send * size, memory.address() + recv * size)
                },
                None => {
                    others.fill(call, rank)?;
                    (others.send.address(), others.recv.address())
                }
            });
        }
        together.wait();
        for (call, &(send, recv)) in calls.iter().zip(&places) {
            enqueue_at(&comm, call, call.redop.into(), send, recv, stream.raw())?;
        }
        synchronize(&stream)?;
        for (call, (_, recv)) in calls.iter().zip(&places) {
            let mut output = vec![0; call.recv_count(rank) * size as usize];
            // SAFETY: it has that many bytes.
            unsafe { copy_to_host(&mut output, *recv)? };
            let wrong = call.wrong_elements(rank, &output);
            ensure!(wrong == 0, "{wrong} wrong elements of {call:?} in place on rank {rank}");
        }
        Ok(())
    })
}

/// Calls that go by rails and such that the whole carries out, in turns, each checked.
pub(super) fn combines_in_turns(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let from = comm.rails_from().expect("rails");
        ensure!(from == 64 << 10, "{from}");
        let calls: Vec<_> = (0..48).map(|n| every_kind(n, place.nranks, [1000, 40_000, 5][n as usize % 3])).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        together.wait();
        for (call, at) in calls.iter().zip(&at) {
            at.fill(call, comm.rank())?;
            enqueue(&comm, call, at, stream.raw())?;
            synchronize(&stream)?;
            at.check(call, comm.rank())?;
        }
        Ok(())
    })
}

/// Calls of many slices, before the first capture, in graphs and beside them; some in a stream that comes into the capture.
pub(super) fn combines_in_graphs(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let other = OwnedStream::new(&context)?;
        let [forked, joined] = [Event::new(&context, false)?, Event::new(&context, false)?];
        let calls: Vec<_> = (0..8).map(|n| every_kind(n, place.nranks, 90_001 + 30_000 * (n % 3))).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        let fill = || calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()));
        let works = |range: std::ops::Range<usize>, stream| {
            calls[range.clone()].iter().zip(&at[range]).try_for_each(|(call, at)| enqueue(&comm, call, at, stream))
        };
        // Before the first capture, and on its way when that is.
        fill()?;
        together.wait();
        works(0..2, stream.raw())?;
        let two = |stream: RawStream| {
            works(2..3, stream)?;
            // SAFETY: events and streams live.
            unsafe {
                forked.record(stream)?;
                other.raw().wait(&forked)?;
                works(3..5, other.raw())?;
                joined.record(other.raw())?;
                stream.wait(&joined)?;
            }
            Ok(())
        };
        let mut graphs =
            [capture(&stream, &together, two)?, capture(&stream, &together, |stream| works(5..7, stream))?];
        for round in 0..3 {
            fill()?;
            together.wait();
            for turn in 0..2 {
                let (first, second) = if (round + turn) % 2 == 0 { (&stream, &other) } else { (&other, &stream) };
                // SAFETY: communicator, buffers and streams live.
                unsafe {
                    graphs[0].launch(first.raw())?;
                    graphs[1].launch(second.raw())?;
                }
                works(7..8, first.raw())?;
            }
            synchronize(&stream)?;
            synchronize(&other)?;
            ensure!(comm.async_error().is_none(), "{:?}", comm.async_error());
            calls[2..].iter().zip(&at[2..]).try_for_each(|(call, at)| at.check(call, comm.rank()))?;
        }
        Ok(())
    })
}

/// The last rank's stream comes to its calls when all others wait for it.
pub(super) fn combines_late(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let calls: Vec<_> = (0..8).map(|n| every_kind(n, place.nranks, 70_001)).collect();
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()))?;
        together.wait();
        for (index, (call, at)) in calls.iter().zip(&at).enumerate() {
            if comm.rank() as usize == index % place.nranks as usize {
                std::thread::sleep(std::time::Duration::from_millis(30));
            }
            enqueue(&comm, call, at, stream.raw())?;
        }
        synchronize(&stream)?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, comm.rank()))
    })
}

/// Long calls, until everybody hears of the end.
pub(super) fn combines_until_it_fails(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let Rank { context, comm, stream, .. } = &rank;
        let calls: Vec<_> = (0..4).map(|n| every_kind(n, place.nranks, 400_001)).collect();
        let at = calls.iter().map(|call| Buffers::of(context, call)).collect::<Result<Vec<_>, _>>()?;
        calls_until_it_fails(&rank, |turn| {
            let (call, at) = (&calls[turn % calls.len()], &at[turn % calls.len()]);
            enqueue(comm, call, at, stream.raw())
        })
    })
}
