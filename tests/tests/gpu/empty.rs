//! Collectives of no elements: the calling rank returns at once and its stream has nothing to wait for, whatever its peers do.

use anyhow::ensure;
use mccs::cuda::CudaCommunicator;
use mccs::{DataType, RedOp};
use mccs_cuda::{OwnedStream, RawStream};

use super::ranks::{Buffers, Place, Rank, Role, call, capture, enqueue, everybody_plays};
use super::{LARGE, TENANTS, staged};

pub const ROLES: &[(&str, Role)] = &[("calls_nothing", calls_nothing)];

/// Every collective of no elements, without buffers.
fn call_all(comm: &CudaCommunicator, stream: RawStream) -> anyhow::Result<()> {
    let (dtype, op, root, stream) = (DataType::F32, RedOp::Sum, comm.nranks() - 1, stream.as_ptr());
    // SAFETY: no buffer is touched; the stream lives.
    unsafe {
        comm.all_reduce(0, 0, 0, dtype, op, stream)?;
        comm.reduce_scatter(0, 0, 0, dtype, op, stream)?;
        comm.reduce(0, 0, 0, dtype, op, root, stream)?;
        comm.all_gather(0, 0, 0, dtype, stream)?;
        comm.broadcast(0, 0, 0, dtype, root, stream)?;
        comm.all_to_all(0, 0, 0, dtype, stream)?;
        comm.gather(0, 0, 0, dtype, root, stream)?;
        Ok(comm.scatter(0, 0, 0, dtype, root, stream)?)
    }
}

/// The same in a group, with a collective that has elements between them.
fn call_in_group(comm: &CudaCommunicator, place: &Place, stream: &OwnedStream) -> anyhow::Result<()> {
    let call = call(0, place.nranks, 1000);
    let at = Buffers::of(stream.context(), &call)?;
    at.fill(&call, comm.rank())?;
    let group = mccs::Group::begin();
    call_all(comm, stream.raw())?;
    enqueue(comm, &call, &at, stream.raw())?;
    call_all(comm, stream.raw())?;
    group.end()?;
    // SAFETY: the stream lives.
    unsafe { stream.raw().synchronize()? };
    at.check(&call, comm.rank())
}

/// One rank after the other calls what has no elements, alone; then all call together, with other calls before and behind.
fn calls_nothing(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|Rank { context, comm, stream, together }| {
        let other = OwnedStream::new(&context)?;
        let calls = [call(0, place.nranks, 1000), call(1, place.nranks, 300_000), call(2, place.nranks, 77)];
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        for turn in 0..place.nranks {
            together.wait();
            if turn == comm.rank() {
                for stream in [&stream, &other] {
                    call_all(&comm, stream.raw())?;
                    // SAFETY: the stream lives.
                    unsafe { stream.raw().synchronize()? };
                }
            }
        }
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, comm.rank()))?;
        together.wait();
        for (call, at) in calls.iter().zip(&at) {
            call_all(&comm, other.raw())?;
            enqueue(&comm, call, at, stream.raw())?;
        }
        // SAFETY: the streams live.
        unsafe { [&stream, &other].into_iter().try_for_each(|stream| stream.raw().synchronize())? };
        calls.iter().zip(&at).try_for_each(|(call, at)| at.check(call, comm.rank()))?;
        together.wait();
        call_in_group(&comm, place, &stream)?;
        together.wait();
        let mut graph = capture(&stream, &together, |stream| call_all(&comm, stream))?;
        // SAFETY: the communicator and the stream live.
        unsafe {
            graph.launch(stream.raw())?;
            stream.raw().synchronize()?;
        }
        refuses(&comm, stream.raw())
    })
}

/// A mistake stays one without elements.
fn refuses(comm: &CudaCommunicator, stream: RawStream) -> anyhow::Result<()> {
    let (dtype, root, stream) = (DataType::F32, comm.nranks(), stream.as_ptr());
    // SAFETY: no buffer is touched; the stream lives.
    let [no_root, gone] = unsafe {
        let no_root = comm.broadcast(0, 0, 0, dtype, root, stream);
        comm.finalize()?;
        [no_root, comm.all_gather(0, 0, 0, dtype, stream)]
    };
    ensure!(no_root.is_err(), "there is no such root");
    ensure!(gone.is_err(), "the communicator has been finalized");
    Ok(())
}

#[test]
#[ignore = "needs a GPU"]
fn a_collective_of_no_elements_waits_for_nobody() {
    everybody_plays("calls_nothing", &[TENANTS, LARGE, &staged::strict("auto"), &staged::by_engines("auto")]);
}
