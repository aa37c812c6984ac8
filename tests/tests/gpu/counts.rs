//! How often a collective calls the driver, on its caller's thread: the host bounds many a training step, and each call takes a part of a
//! microsecond, or three. Needs the emulated driver, which counts.

use anyhow::{Context as _, ensure};
use libloading::os::unix::{Library, RTLD_NOW, Symbol};
use mccs::CollectiveKind;
use mccs_cuda::{OwnedStream, RawStream, gpus};
use mccs_eval::workload::Call;

use super::TENANTS;
use super::ranks::{Buffers, Place, Rank, Role, call, enqueue, everybody_plays};

pub const ROLES: &[(&str, Role)] = &[("counts_kernels", counts_kernels), ("counts_copy_engines", counts_copy_engines)];

type Calls = unsafe extern "C" fn(*mut u8, usize) -> usize;

/// Calls of the thread since it asked last, by the emulated driver.
fn calls_of_the_driver() -> anyhow::Result<String> {
    let mut text = vec![0; 1 << 14];
    // SAFETY: the driver is loaded already, and the function has this type; there is as much room.
    let bytes = unsafe {
        let driver = Library::open(Some("libcuda.so.1"), RTLD_NOW)?;
        let calls: Symbol<Calls> = driver.get(b"mccs_emulated_calls").context("this takes the emulated driver")?;
        calls(text.as_mut_ptr(), text.len())
    };
    ensure!(bytes <= text.len(), "{bytes} bytes of calls");
    Ok(String::from_utf8_lossy(&text[..bytes]).into_owned())
}

/// Enqueues a call on a stream, twice: what it calls the second time is what counts. The call of another stream may come between.
fn count(rank: &Rank, call: &Call, at: &Buffers, streams: [RawStream; 2]) -> anyhow::Result<String> {
    for stream in streams {
        enqueue(&rank.comm, call, at, stream)?;
    }
    calls_of_the_driver()?;
    enqueue(&rank.comm, call, at, streams[0])?;
    let called = calls_of_the_driver();
    for stream in streams {
        // SAFETY: the streams live.
        unsafe { stream.synchronize()? };
    }
    at.check(call, rank.comm.rank())?;
    called
}

/// Fails unless a call has called the driver as often as it says.
fn ensure_calls(what: &str, called: &str, expected: u64) -> anyhow::Result<()> {
    let numbers = called.lines().filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
    let calls: u64 = numbers.sum();
    println!("{what}: {calls} calls of the driver\n{called}");
    ensure!(calls == expected, "{what}: {calls} calls of the driver, not {expected}:\n{called}");
    Ok(())
}

fn counts_kernels(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let (context, nranks) = (rank.context.clone(), place.nranks);
        let (plain, other, urgent) =
            (OwnedStream::new(&context)?, OwnedStream::new(&context)?, OwnedStream::with_priority(&context, -1)?);
        let call = Call { kind: CollectiveKind::AllGather, ..call(1, nranks, 5000) };
        let at = Buffers::of(&context, &call)?;
        at.fill(&call, rank.comm.rank())?;
        rank.together.wait();
        let one = |stream: &OwnedStream| [stream.raw(); 2];
        ensure_calls("in one stream", &count(&rank, &call, &at, one(&plain))?, 5)?;
        ensure_calls("in a stream of high priority", &count(&rank, &call, &at, one(&urgent))?, 4)?;
        ensure_calls("behind another stream", &count(&rank, &call, &at, [plain.raw(), other.raw()])?, 6)
    })
}

fn counts_copy_engines(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let (context, nranks) = (rank.context.clone(), place.nranks);
        let (plain, other) = (OwnedStream::new(&context)?, OwnedStream::new(&context)?);
        let kinds = [CollectiveKind::AllGather, CollectiveKind::AllReduce, CollectiveKind::ReduceScatter];
        let calls = kinds.map(|kind| Call { kind, ..call(1, nranks, 100_000) });
        let at = calls.iter().map(|call| Buffers::of(&context, call)).collect::<Result<Vec<_>, _>>()?;
        calls.iter().zip(&at).try_for_each(|(call, at)| at.fill(call, rank.comm.rank()))?;
        rank.together.wait();
        // Cost of a copy, or of a launch of a kernel that combines.
        for ((call, at), expected) in calls.iter().zip(&at).zip([15, 16, 16]) {
            for (where_from, second) in [("in one stream", &plain), ("behind another stream", &other)] {
                let what = format!("{} by copy engines, {where_from}", call.kind);
                ensure_calls(&what, &count(&rank, call, at, [plain.raw(), second.raw()])?, expected)?;
            }
        }
        Ok(())
    })
}

#[test]
#[ignore = "needs two GPUs of the emulated driver"]
fn calls_of_the_driver_are_counted() {
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    let by_engines = TENANTS.replace("[cuda]\n", "[cuda]\nlarge_from = \"16KiB\"\nslot = \"4MiB\"\n");
    everybody_plays("counts_kernels", &[TENANTS]);
    everybody_plays("counts_copy_engines", &[&by_engines]);
}
