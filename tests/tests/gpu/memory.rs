//! Memory of tenants' own that the service opens: of every kind; given back when it is freed; and not of others. Needs two GPUs: with
//! one, copy engines have nothing to do.

mod raw_ranks;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use mccs_control::{ControlAnswer, ControlRequest, call as ask};
use mccs_cuda::{
    Allocation, DeviceAddress, DeviceMemory, IpcHandle, MappedMemory, OwnedStream, PooledMemory, Shared,
    copy_from_host, copy_to_host, gpus,
};
use mccs_eval::workload::{Call, POISON};
use mccs_ipc::types::CollectiveKind;
use mccs_tests::TestService;
use mccs_tests::hosts::TestHosts;
use mccs_tests::nics::NicKind;

use super::emulated_nics::EmulatedNics;
use super::mps::UNTIL;
use super::rails::{both_play, every_kind, everything};
use super::ranks::{Place, Player, Rank, Role, call, enqueue_at, everybody, everybody_plays};
use super::{LARGE, wait_until, without_handles};

pub const ROLES: &[(&str, Role)] = &[
    ("uses_every_kind", uses_every_kind),
    ("uses_every_kind_across_hosts", uses_every_kind_across_hosts),
    ("gathers_in_place", gathers_in_place),
    ("frees", frees),
    ("runs_out", runs_out),
    ("shows_handles", shows_handles),
];

/// Offset of a buffer in its memory: in the first of several segments, and not at its beginning.
const OFFSET: usize = (1 << 20) + 256;
/// Bytes of segments, which a buffer lies in all of.
const SEGMENTS: [usize; 3] = [2 << 20, 4 << 20, 2 << 20];
/// Elements of the longer buffer of a call.
const ELEMENTS: u64 = 1_600_000;

/// Kinds of memory.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Allocated,
    Segment,
    Segments,
    NotShared,
    OfHost,
    Pooled,
    Managed,
}

impl Kind {
    const ALL: [Kind; 7] =
        [Kind::Allocated, Kind::Segment, Kind::Segments, Kind::NotShared, Kind::OfHost, Kind::Pooled, Kind::Managed];

    /// Whether no other process can open it, or the service does not.
    fn is_copied(self, by_handles: bool) -> bool {
        match self {
            Kind::Allocated => !by_handles,
            Kind::Segment | Kind::Segments => false,
            Kind::NotShared | Kind::OfHost | Kind::Pooled | Kind::Managed => true,
        }
    }

    fn memory(self, stream: &OwnedStream, bytes: usize) -> anyhow::Result<Memory<'_>> {
        let context = stream.context();
        let mapped = |parts: &[usize], shared| MappedMemory::new(context, parts, shared).map(Memory::Mapped);
        Ok(match self {
            Kind::Allocated => Memory::Allocated(DeviceMemory::zeroed(context, bytes)?),
            Kind::Segment => mapped(&[bytes], Shared::ByDescriptor)?,
            Kind::Segments => {
                let unit = bytes / SEGMENTS.iter().sum::<usize>();
                mapped(&SEGMENTS.map(|bytes| bytes * unit), Shared::ByDescriptor)?
            }
            Kind::NotShared => mapped(&[bytes], Shared::No)?,
            Kind::OfHost => {
                let (allocation, bytes) = Allocation::of_host(context, bytes)?;
                let mut memory = MappedMemory::reserve(context, bytes)?;
                memory.map(&allocation, bytes)?;
                memory.open()?;
                Memory::Mapped(memory)
            }
            Kind::Pooled => Memory::Pooled(PooledMemory::new(stream, bytes)?),
            Kind::Managed => Memory::Managed(Managed::new(bytes)?),
        })
    }
}

enum Memory<'a> {
    Allocated(DeviceMemory),
    Mapped(MappedMemory),
    Pooled(PooledMemory<'a>),
    Managed(Managed),
}

/// Managed memory, of which `mccs-cuda` knows nothing.
struct Managed {
    driver: libloading::Library,
    address: DeviceAddress,
}

impl Managed {
    /// In the current context.
    fn new(bytes: usize) -> anyhow::Result<Managed> {
        const ATTACH_GLOBAL: u32 = 1;
        type Allocate = unsafe extern "C" fn(*mut DeviceAddress, usize, u32) -> u32;
        let mut address = 0;
        // SAFETY: the driver is loaded already, and its function takes these.
        let (driver, code) = unsafe {
            let driver = libloading::Library::new("libcuda.so.1")?;
            let code = driver.get::<Allocate>(b"cuMemAllocManaged\0")?(&raw mut address, bytes, ATTACH_GLOBAL);
            (driver, code)
        };
        ensure!(code == 0, "cuMemAllocManaged: {code}");
        Ok(Managed { driver, address })
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        type Free = unsafe extern "C" fn(DeviceAddress) -> u32;
        // SAFETY: allocated above, and freed once.
        let code = unsafe { self.driver.get::<Free>(b"cuMemFree_v2\0").map(|free| free(self.address)) };
        assert_eq!(code.ok(), Some(0), "cuMemFree");
    }
}

impl Memory<'_> {
    fn buffer(&self) -> DeviceAddress {
        let base = match self {
            Memory::Allocated(memory) => memory.address(),
            Memory::Mapped(memory) => memory.address(),
            Memory::Pooled(memory) => memory.address(),
            Memory::Managed(memory) => memory.address,
        };
        base + OFFSET as u64
    }
}

/// Makes a call, and checks it.
fn run(rank: &Rank, call: &Call, (send, recv): (DeviceAddress, DeviceAddress)) -> anyhow::Result<()> {
    let own = rank.comm.rank();
    let mut output = vec![POISON; call.recv_count(own) * call.dtype.size_bytes()];
    // SAFETY: memory has room for calls of this file, and nothing is in flight before and after.
    unsafe {
        copy_from_host(recv, &output)?;
        copy_from_host(send, &call.input(own))?;
        enqueue_at(&rank.comm, call, call.redop.into(), send, recv, rank.stream.raw())?;
        rank.stream.raw().synchronize()?;
        copy_to_host(&mut output, recv)?;
    }
    let wrong = call.wrong_elements(own, &output);
    ensure!(wrong == 0, "{wrong} wrong elements of {call:?} on rank {own}");
    Ok(())
}

/// A large call whose longer buffer has [`ELEMENTS`].
fn large(number: u64, nranks: u32) -> Call {
    let whole = call(number, nranks, ELEMENTS);
    match whole.kind {
        CollectiveKind::AllReduce | CollectiveKind::Broadcast | CollectiveKind::Reduce => whole,
        _ => Call { count: ELEMENTS / u64::from(nranks), ..whole },
    }
}

/// Large operations of this process' of which buffers had to be copied.
fn copied(place: &Place) -> anyhow::Result<u64> {
    let answer = ask(&place.socket.with_file_name("mccs-control.sock"), &ControlRequest::Sessions)?;
    let ControlAnswer::Sessions(sessions) = answer else { bail!("another answer: {answer:?}") };
    let own = sessions.iter().filter(|session| session.pid.unsigned_abs() == std::process::id());
    Ok(own.map(|session| session.copied).sum())
}

/// Collectives that engines have a way for, among the six of [`call`].
const BY_ENGINES: u64 = 5;

/// Set where memory goes by descriptors alone.
const NO_HANDLES: &str = "MCCS_GPU_NO_HANDLES";

fn uses_every_kind(place: &Place) -> anyhow::Result<()> {
    let by_handles = std::env::var_os(NO_HANDLES).is_none();
    place.each_rank(|rank| {
        let bytes = SEGMENTS.iter().sum();
        for kind in Kind::ALL {
            let memory = [kind.memory(&rank.stream, bytes)?, kind.memory(&rank.stream, bytes)?];
            let at = (memory[0].buffer(), memory[1].buffer());
            rank.together.wait();
            let before = copied(place)?;
            rank.together.wait();
            for number in 0..6 {
                run(&rank, &large(number, place.nranks), at)?;
                // So short that ranks do it themselves.
                run(&rank, &call(number, place.nranks, 10), at)?;
            }
            rank.together.wait();
            let copied = copied(place)? - before;
            let expected = if kind.is_copied(by_handles) { BY_ENGINES * u64::from(place.nranks) } else { 0 };
            ensure!(copied == expected, "{kind:?}: {copied} operations were copied, not {expected}");
            // Nothing is freed while another rank is in a call.
            rank.together.wait();
        }
        if rank.comm.rank() == 0 {
            println!("is done");
        }
        loop {
            std::thread::park();
        }
    })
}

#[test]
#[ignore = "needs two GPUs"]
fn buffers_of_every_kind_are_opened_or_copied() {
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    for (config, environment) in [(LARGE.into(), None), (without_handles(LARGE), Some((NO_HANDLES, PathBuf::new())))] {
        let service = TestService::start(&config);
        let mut player = Player::start_with("uses_every_kind", &everybody(&service, 0), environment.as_slice());
        player.hears("is done");
        let comms = service.service().registry.comms();
        let large = comms.iter().find_map(|comm| comm.device_initiated.as_ref()?.large()).expect("engines");
        assert_eq!(large.operations().begun, BY_ENGINES * Kind::ALL.len() as u64);
        player.kill();
    }
}

/// Calls that go by rails, on memory that no NIC and no other process could open as well, and on memory to which more is added.
fn uses_every_kind_across_hosts(place: &Place) -> anyhow::Result<()> {
    const PART: usize = 2 << 20;
    place.each_rank(|rank| {
        let calls = |at, counts: [u64; 2]| {
            for number in 0..8 {
                run(&rank, &every_kind(number, place.nranks, counts[number as usize % 2]), at)?;
            }
            anyhow::Ok(())
        };
        for kind in Kind::ALL {
            let memory = [kind.memory(&rank.stream, 8 << 20)?, kind.memory(&rank.stream, 8 << 20)?];
            rank.together.wait();
            calls((memory[0].buffer(), memory[1].buffer()), [10, 100_000])?;
            // Nothing is freed while another rank is in a call.
            rank.together.wait();
        }
        let mut grown = MappedMemory::reserve(&rank.context, 4 * PART)?;
        let recv = DeviceMemory::zeroed(&rank.context, 4 * PART)?;
        for parts in 1..=4 {
            let (allocation, bytes) = Allocation::new(&rank.context, PART, Shared::ByDescriptor)?;
            grown.map(&allocation, bytes)?;
            grown.open_at(0, parts * bytes, &[&rank.context])?;
            rank.together.wait();
            let whole = (parts * PART / size_of::<f32>()) as u64 / u64::from(place.nranks);
            calls((grown.address(), recv.address()), [whole, whole - 3])?;
            rank.together.wait();
        }
        ensure!(rank.comm.async_error().is_none());
        Ok(())
    })
}

#[test]
#[ignore = "needs two GPUs"]
fn memory_that_no_nic_takes_goes_by_rails_as_other_memory_does() {
    let kinds = [NicKind::ethernet(20_000); 2];
    let nics = EmulatedNics::new(&[&kinds, &kinds]);
    let hosts = TestHosts::start_each(2, |host| everything() + &nics.section(host, "use = \"required\"\n"));
    both_play("uses_every_kind_across_hosts", &hosts, &[2, 2]);
    assert!(nics.sent_bytes(0) > 0);
}

/// Gathers in place, where what rank 0 sends lies in fewer segments than what it receives, and begins there.
fn gathers_in_place(place: &Place) -> anyhow::Result<()> {
    place.each_rank(|rank| {
        let call = Call { count: 200_000, ..call(1, place.nranks, 0) };
        let memory = Kind::Segments.memory(&rank.stream, SEGMENTS.iter().sum())?;
        let own = u64::from(rank.comm.rank()) * call.count * call.dtype.size_bytes() as u64;
        rank.together.wait();
        run(&rank, &call, (memory.buffer() + own, memory.buffer()))?;
        rank.together.wait();
        ensure!(rank.comm.async_error().is_none());
        Ok(())
    })
}

#[test]
#[ignore = "needs two GPUs"]
fn buffers_that_begin_in_the_same_segment_are_both_known_to_the_service() {
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    everybody_plays("gathers_in_place", &[LARGE]);
}

/// Frees what large calls have used: it comes back while the communicator lives, and what that has made of its own when it leaves.
fn frees(place: &Place) -> anyhow::Result<()> {
    const BYTES: usize = 64 << 20;
    /// Memory that the driver keeps for itself.
    const SLACK: u64 = 16 << 20;
    place.each_rank(|rank| {
        let call = large(0, place.nranks);
        let use_and_free = |kind: Kind| {
            let memory = [kind.memory(&rank.stream, BYTES)?, kind.memory(&rank.stream, BYTES)?];
            rank.together.wait();
            let done = run(&rank, &call, (memory[0].buffer(), memory[1].buffer()));
            // To free waits for everything on this GPU, and perhaps on its peers.
            rank.together.wait();
            drop(memory);
            done
        };
        let comes_back = |before: u64, look: &dyn Fn() -> anyhow::Result<()>| {
            while rank.context.free_bytes()? + SLACK < before {
                look()?;
                std::thread::sleep(Duration::from_millis(1));
            }
            rank.together.wait();
            anyhow::Ok(())
        };
        // Checks that are only ever made once.
        let kept = [Kind::Allocated.memory(&rank.stream, 8 << 20)?, Kind::Allocated.memory(&rank.stream, 8 << 20)?];
        rank.together.wait();
        run(&rank, &call, (kept[0].buffer(), kept[1].buffer()))?;
        rank.together.wait();
        let before = rank.context.free_bytes()?;
        rank.together.wait();
        for kind in [Kind::Allocated, Kind::Segment, Kind::Segments] {
            use_and_free(kind)?;
            // As programs do all the time.
            comes_back(before, &|| {
                ensure!(rank.comm.async_error().is_none());
                Ok(())
            })?;
        }
        use_and_free(Kind::Pooled)?;
        rank.context.synchronize()?;
        rank.comm.destroy()?;
        comes_back(before, &|| Ok(()))
    })
}

#[test]
#[ignore = "needs two GPUs"]
fn memory_that_a_tenant_frees_comes_back() {
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    let service = TestService::start(LARGE);
    Player::start("frees", &everybody(&service, 0)).ends_well();
    wait_until(|| service.service().registry.comms().is_empty());
}

/// Calls with memory that has to be copied while there is none for the copy, and again when there is.
fn runs_out(place: &Place) -> anyhow::Result<()> {
    const BYTES: usize = 64 << 20;
    /// For a short call's copies and what the driver needs beside, not for a whole call's.
    const LEFT: u64 = 24 << 20;
    place.each_rank(|rank| {
        let (short, whole) = (call(0, place.nranks, 1000), call(0, place.nranks, (BYTES - OFFSET) as u64 / 4));
        let memory = [Kind::Pooled.memory(&rank.stream, BYTES)?, Kind::Pooled.memory(&rank.stream, BYTES)?];
        let at = (memory[0].buffer(), memory[1].buffer());
        rank.together.wait();
        let rest = rank.context.free_bytes()? - LEFT;
        let taken = DeviceMemory::new(&rank.context, rest as usize).context("all but a little")?;
        rank.together.wait();
        let refused = run(&rank, &whole, at).err().context("it has room")?.to_string();
        ensure!(refused.contains("CUDA_ERROR_OUT_OF_MEMORY (2)"), "{refused}");
        run(&rank, &short, at).context("a short call")?;
        rank.together.wait();
        drop(taken);
        rank.together.wait();
        run(&rank, &whole, at)?;
        ensure!(rank.comm.async_error().is_none());
        Ok(())
    })
}

#[test]
#[ignore = "needs two GPUs"]
fn a_call_that_finds_no_memory_can_be_made_again() {
    assert!(gpus().expect("GPUs").len() > 1, "needs two GPUs");
    let service = TestService::start(LARGE);
    let directory = tempfile::tempdir().expect("a directory");
    let enough = directory.path().join("enough");
    let mut others = Player::start_with("keeps_calling", &everybody(&service, 1), &[(UNTIL, enough.clone())]);
    others.hears("keeps calling");
    Player::start("runs_out", &everybody(&service, 0)).ends_well();
    std::fs::write(&enough, "").expect("written");
    others.ends_well();
}

/// Makes large calls, and tells whoever listens the handle of memory that they use, and that of memory that is freed.
fn shows_handles(place: &Place) -> anyhow::Result<()> {
    let until = std::env::var_os(UNTIL).map(PathBuf::from);
    place.each_rank(|rank| {
        let memory = [(); 2].map(|()| DeviceMemory::zeroed(&rank.context, 8 << 20));
        let [send, recv] = memory.map(|memory| memory.map(Arc::new));
        let (send, recv) = (send?, recv?);
        let freed = DeviceMemory::zeroed(&rank.context, 4 << 20)?;
        let stale = freed.export()?;
        rank.together.wait();
        drop(freed);
        rank.together.wait();
        let at = (send.address(), recv.address());
        run(&rank, &large(0, place.nranks), at)?;
        if rank.comm.rank() == 0 {
            let hex = |handle: IpcHandle| handle.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
            println!("handles {} {}", hex(send.export()?), hex(stale));
            while until.as_ref().is_some_and(|path| !path.exists()) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        rank.together.wait();
        (0..5).try_for_each(|number| run(&rank, &large(number, place.nranks), at))?;
        ensure!(rank.comm.async_error().is_none());
        Ok(())
    })
}
