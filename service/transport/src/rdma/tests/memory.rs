//! Registered memory, on the fake driver: what is pinned, by whom, for how long, and what is said where it cannot be.

use std::os::fd::AsFd as _;
use std::time::Duration;

use mccs_runtime::Share;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::DataPath as _;
use crate::host_regions;
use crate::rdma::tests::bench::{Bench, Traffic, flow_options};
use crate::rdma::verbs::fake::FabricOptions;
use crate::rdma::*;
use crate::{Fault, FlowOptions, MemorySpan, Status};

/// A test that has not got further for so long hangs.
const PATIENCE: Duration = Duration::from_secs(120);
/// Pinned aside.
const LONG: usize = 2 << 20;

/// Memory that its owner says is a region, for as long as it lives.
struct Region(mccs_ipc::shm::Mapping, u64);

fn region(bytes: u64) -> Region {
    let (_, mapping) = mccs_ipc::shm::Mapping::create("region", bytes).expect("memory");
    host_regions::note_mapped(mapping.as_ptr() as usize, bytes, Share { tenant: 1, weight: 1 });
    Region(mapping, bytes)
}

impl Region {
    fn range(&self, offset: u64, bytes: u64) -> Option<*mut u8> {
        (offset + bytes <= self.1).then(|| self.0.as_ptr().wrapping_add(offset as usize))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        host_regions::note_going(self.0.as_ptr() as usize);
    }
}

/// Polls until something holds that depends on a thread, for which no round counts.
fn until(bench: &mut Bench, mut holds: impl FnMut(&mut Bench) -> bool) {
    let since = Instant::now();
    while !holds(bench) {
        assert!(since.elapsed() < PATIENCE, "hangs");
        bench.rounds(1, &[0, 1]);
        std::thread::yield_now();
    }
}

/// A long message has been posted at both sides, and one side's memory for it is being pinned until the fabric lets it.
fn held(side: usize) -> (Bench, Traffic) {
    // The test's time goes faster than the threads'.
    let forever = Duration::from_secs(80_000);
    let flow = FlowOptions { connect_timeout: forever, silence_timeout: forever, peer_timeout: None, ..flow_options() };
    let fabric = FabricOptions { step_bytes: 100_000, ..Default::default() };
    let mut bench = Bench::with(2, RdmaOptions::default(), flow, fabric);
    bench.sides.iter_mut().for_each(|side| side.carrier.memory.pinner.do_in_place(false));
    bench.fabric.keep_pinning(&bench.hosts[side].clone(), true);
    let mut traffic = bench.traffic(LONG, 1);
    assert_eq!(bench.turn(&mut traffic, LONG, 1), Ok([0, 0]));
    until(&mut bench, |bench| bench.fabric.pinning() == 1 && bench.sides[1 - side].carrier.memory.pinner.is_idle());
    bench.rounds(100, &[0, 1]);
    (bench, traffic)
}

fn let_pin(bench: &Bench, side: usize) {
    bench.fabric.keep_pinning(&bench.hosts[side], false);
}

fn finish(bench: &mut Bench, mut traffic: Traffic) {
    until(bench, |bench| bench.turn(&mut traffic, LONG, 1) == Ok([1, 1]));
    assert!(traffic.memory[0] == traffic.memory[1], "other bytes came than went");
}

#[test]
fn flows_go_on_while_memory_is_pinned() {
    for side in [0, 1] {
        let (mut bench, mut long) = held(side);
        let (send, recv) = (bench.send, bench.recv);
        let (listener, handle) = bench.sides[1].listen(&ListenOptions::default()).expect("listens");
        let spec = FlowSpec { number: 1, peer: "rank 6".into(), options: flow_options() };
        bench.send = bench.sides[0].connect(&handle, &spec, bench.now).expect("connects");
        bench.recv = bench.sides[1].accept(listener, &spec, bench.now).expect("accepts");
        let mut traffic = bench.traffic(10_000, 40);
        bench.until("all messages moved", |bench| bench.turn(&mut traffic, 10_000, 40) == Ok([40, 40]));
        assert!(traffic.memory[0] == traffic.memory[1], "other bytes came than went");
        (bench.send, bench.recv) = (send, recv);
        assert_eq!((bench.turn(&mut long, LONG, 1), bench.fabric.pinning()), (Ok([0, 0]), 1));
        // A sleeper is woken.
        let_pin(&bench, side);
        let mut woken = [PollFd::new(bench.sides[side].descriptor().expect("one"), PollFlags::POLLIN)];
        assert_eq!(poll(&mut woken, PollTimeout::NONE), Ok(1));
        finish(&mut bench, long);
    }
}

#[test]
fn memory_that_is_let_go_while_it_is_pinned() {
    for (is_region, goes_before) in [(false, true), (true, true), (true, false)] {
        let mut bench = Bench::new(1);
        bench.sides[0].carrier.memory.pinner.do_in_place(false);
        let (_, before) = bench.fabric.held();
        bench.fabric.keep_pinning(&bench.hosts[0].clone(), true);
        let mut memory = vec![0u8; LONG];
        let mut region = is_region.then(|| region(LONG as u64));
        let ptr = region.as_ref().map_or(memory.as_mut_ptr(), |region| region.range(0, LONG as u64).expect("inside"));
        // SAFETY: the memory outlives the bench's use of it.
        let key = unsafe { bench.sides[0].register(ptr, LONG as u64, MemoryKind::Host) }.expect("registers");
        until(&mut bench, |bench| bench.fabric.pinning() == 1);
        bench.sides[0].deregister(key).expect("unused");
        if goes_before {
            region = None;
        }
        let_pin(&bench, 0);
        until(&mut bench, |bench| bench.sides[0].carrier.memory.pinner.is_idle());
        assert_eq!(bench.fabric.held().1 - before, usize::from(!goes_before), "it will be used again");
        drop(region);
        until(&mut bench, |bench| bench.fabric.held().1 == before);
    }
}

#[test]
fn a_device_goes_while_memory_is_pinned_there() {
    for side in [0, 1] {
        let (mut bench, traffic) = held(side);
        let host = bench.hosts[side].clone();
        bench.fabric.remove(&host, 0, true);
        bench.rounds(1000, &[0, 1]);
        assert_eq!(bench.fabric.opened(&host, 0), 1, "what is being pinned needs it");
        let_pin(&bench, side);
        until(&mut bench, |bench| bench.fabric.opened(&host, 0) == 0);
        finish(&mut bench, traffic);
    }
}

/// The message says which limit, and how to raise it: at once, or, where memory is pinned aside, when a flow is to use it.
#[test]
fn memory_that_cannot_be_locked() {
    let says_why = |refusal: &TransportError, bytes: usize| {
        let refusal = refusal.to_string();
        for word in [&*format!("{bytes} bytes"), "RLIMIT_MEMLOCK", "LimitMEMLOCK=infinity"] {
            assert!(refusal.contains(word), "{refusal}");
        }
    };
    let mut bench = Bench::new(1);
    bench.fabric.limit_locked(Some(LONG as u64 / 2));
    let mut memory = vec![0u8; LONG / 2];
    // SAFETY: the memory outlives the bench's use of it: it is refused.
    let refused = unsafe { bench.sides[0].register(memory.as_mut_ptr(), memory.len() as u64, MemoryKind::Host) };
    says_why(&refused.expect_err("refused"), LONG / 2);
    assert_eq!(bench.sides[0].usage().registrations, 0);
    bench.fabric.limit_locked(None);
    bench.stream(|_, _| {});

    for side in [0, 1] {
        let (mut bench, traffic) = held(side);
        bench.fabric.limit_locked(Some(LONG as u64));
        let_pin(&bench, side);
        until(&mut bench, |bench| bench.states().iter().all(Result::is_err));
        says_why(bench.states()[side].as_ref().expect_err("failed"), LONG);
        for side in [0, 1] {
            bench.sides[side].deregister(traffic.keys[side]).expect("a flow that has failed holds nothing");
        }
        assert_eq!(bench.fabric.held(), (0, 0));
    }
}

/// Known before the first job is: on the fabric's limit, whatever this process may lock.
#[test]
fn a_trial_finds_a_limit_on_locked_memory() {
    let bench = Bench::new(1);
    assert_eq!(bench.sides[0].try_memory(), Ok(()));
    let before = bench.fabric.held();
    bench.fabric.limit_locked(Some(4096));
    let refusal = bench.sides[0].try_memory().expect_err("more than that").to_string();
    assert!(refusal.contains("LimitMEMLOCK=infinity"), "{refusal}");
    assert_eq!(bench.fabric.held(), before, "it holds nothing");
}

/// Memory that is kept in case it is used again does not keep others from locking memory.
#[test]
fn kept_memory_makes_room() {
    for (kept, bytes) in [(LONG, LONG), (LONG, LONG / 2), (LONG / 2, LONG / 2), (LONG / 2, LONG)] {
        for is_in_place in [true, false] {
            let mut bench = Bench::new(1);
            bench.sides[0].carrier.memory.pinner.do_in_place(is_in_place);
            let region = region(kept as u64);
            let ptr = region.range(0, kept as u64).expect("inside");
            // SAFETY: the memory outlives the bench's use of it.
            let key = unsafe { bench.sides[0].register(ptr, kept as u64, MemoryKind::Host) }.expect("registers");
            until(&mut bench, |bench| bench.sides[0].carrier.memory.pinner.is_idle());
            bench.sides[0].deregister(key).expect("unused");
            assert!(bench.sides[0].carrier.memory.keeps());
            // The flow has some pinned itself.
            bench.fabric.limit_locked(Some((kept.max(bytes) + (LONG / 4)) as u64));
            let mut traffic = bench.traffic(bytes, 1);
            until(&mut bench, |bench| bench.turn(&mut traffic, bytes, 1).expect("lives") == [1, 1]);
            assert!(traffic.memory[0] == traffic.memory[1], "other bytes came than went");
            assert!(!bench.sides[0].carrier.memory.keeps());
        }
    }
}

/// The same memory is registered once, and not kept when nobody vouches for it; a tenant's is kept while its region lives.
#[test]
fn registrations_are_shared_and_kept_as_long_as_regions_live() {
    const BYTES: u64 = 64 << 10;
    let mut bench = Bench::new(1);
    let (_, before) = bench.fabric.held();
    let registrations = |bench: &Bench| bench.fabric.held().1 - before;
    let mut memory = vec![0u8; BYTES as usize];
    // SAFETY: the memory outlives the bench's use of it.
    let register =
        |bench: &mut Bench, ptr| unsafe { bench.sides[0].register(ptr, BYTES, MemoryKind::Host) }.expect("registers");
    let [first, second] = [0, 1].map(|_| register(&mut bench, memory.as_mut_ptr()));
    assert_eq!(registrations(&bench), 1);
    bench.sides[0].deregister(first).expect("unused");
    assert_eq!(registrations(&bench), 1);
    bench.sides[0].deregister(second).expect("unused");
    assert_eq!(registrations(&bench), 0);

    let region = region(BYTES);
    let ptr = region.range(0, BYTES).expect("inside");
    let key = register(&mut bench, ptr);
    bench.sides[0].deregister(key).expect("unused");
    assert_eq!(registrations(&bench), 1, "it will be used again");
    let key = register(&mut bench, ptr);
    bench.sides[0].deregister(key).expect("unused");
    drop(region);
    bench.rounds(100, &[0]);
    assert_eq!(registrations(&bench), 0, "its pages are free");
}

/// Devices may write host memory in any order where they offer to. A GPU's they may not: a flush relies on what was written before
/// its read.
#[test]
fn ordering_is_relaxed_for_host_memory_alone() {
    for takes_relaxed_ordering in [true, false] {
        let fabric = FabricOptions { takes_relaxed_ordering, ..Default::default() };
        let mut bench = Bench::with(1, RdmaOptions::default(), flow_options(), fabric);
        bench.stream(|_, _| {});
        let relaxed = bench.fabric.relaxed();
        assert_eq!(relaxed > 0, takes_relaxed_ordering);
        let memory = vec![0u8; 1000];
        bench.fabric.be_gpu(&memory, true);
        // SAFETY: the memory outlives the bench's use of it.
        let key =
            unsafe { bench.sides[1].register(memory.as_ptr().cast_mut(), 1000, MemoryKind::Gpu { dma_buffer: None }) }
                .expect("by address");
        assert_eq!(bench.fabric.relaxed(), relaxed);
        bench.sides[1].deregister(key).expect("unused");
    }
}

/// A GPU's memory: by dma-buf, else by its address, else not at all; and what is written there is visible after a flush.
#[test]
fn memory_of_a_gpu_is_flushed_by_a_read() {
    let flow = FlowOptions { takes_short: false, ..flow_options() };
    let mut bench = Bench::with(2, RdmaOptions::default(), flow, FabricOptions::default());
    let (source, memory) = (vec![7u8; 1000], vec![0u8; 1000]);
    let file = std::fs::File::open("/dev/null").expect("a file");
    let register = |bench: &mut Bench, buffer: Option<u64>| {
        let kind = MemoryKind::Gpu { dma_buffer: buffer.map(|offset| (file.as_fd(), offset)) };
        // SAFETY: the memory outlives the bench's use of it.
        unsafe { bench.sides[1].register(memory.as_ptr().cast_mut(), 1000, kind) }
    };
    bench.fabric.be_gpu(&memory, false);
    for (buffer, why) in [(None, "dma-buf (there is none)"), (Some(4096), "dma-buf (Operation not supported")] {
        let refusal = register(&mut bench, buffer).expect_err("nobody speaks for it").to_string();
        for word in [why, "its address (Bad address)", "nvidia_peermem", "stage through host memory"] {
            assert!(refusal.contains(word), "{refusal}");
        }
    }
    let by_buffer = register(&mut bench, Some(0)).expect("by dma-buf");
    assert_eq!(bench.sides[1].gpu_access(by_buffer), Some(GpuAccess::DmaBuffer));
    bench.sides[1].deregister(by_buffer).expect("unused");
    bench.fabric.be_gpu(&memory, true);
    let target = register(&mut bench, Some(4096)).expect("by address");
    let why = GpuAccess::PeerMemory { by_buffer: Some(Errno::EOPNOTSUPP) };
    assert_eq!(bench.sides[1].gpu_access(target), Some(why));
    // SAFETY: as above; the peer only reads it.
    let from =
        unsafe { bench.sides[0].register(source.as_ptr().cast_mut(), 1000, MemoryKind::Host) }.expect("registers");
    for bytes in [1, 100, 1000] {
        let span = |key| MemorySpan { key, offset: 0, bytes };
        let recv = bench.sides[1].irecv(bench.recv, span(target)).expect("lives").expect("room");
        bench.sides[0].isend(bench.send, span(from), 0).expect("lives").expect("room");
        bench.until("received", |bench| matches!(bench.sides[1].test(recv), Ok(Status::Done { .. })));
        // SAFETY: a byte of the vector, which others write by its address.
        let last = || unsafe { std::ptr::read_volatile(&raw const memory[bytes as usize - 1]) };
        assert_eq!(last(), 0, "it is on the bus");
        let flush = bench.sides[1].flush(bench.recv, span(target)).expect("lives").expect("room");
        bench.until("flushed", |bench| matches!(bench.sides[1].test(flush), Ok(Status::Done { .. })));
        assert_eq!(last(), 7);
    }
}

/// Two hosts, of which the second has registered memory of a GPU. The memory outlives the bench.
fn with_gpu_memory(memory: &[u8]) -> (Bench, MemorySpan) {
    let flow = FlowOptions { takes_short: false, ..flow_options() };
    let mut bench = Bench::with(2, RdmaOptions::default(), flow, FabricOptions::default());
    bench.fabric.be_gpu(memory, true);
    let (kind, bytes) = (MemoryKind::Gpu { dma_buffer: None }, memory.len() as u64);
    // SAFETY: as above; nothing is received into it.
    let key = unsafe { bench.sides[1].register(memory.as_ptr().cast_mut(), bytes, kind) }.expect("by address");
    (bench, MemorySpan { key, offset: 0, bytes })
}

fn set_link(bench: &mut Bench, device: u8, is_up: bool) {
    let host = bench.hosts[1].clone();
    bench.fabric.set_link(&host, device, is_up);
    bench.rounds(20, &[0, 1]);
}

#[test]
fn a_flush_by_a_port_that_goes_down_ends_at_once_and_is_made_by_another() {
    let memory = vec![0u8; 1000];
    let (mut bench, buffer) = with_gpu_memory(&memory);
    let host = bench.hosts[1].clone();
    bench.fabric.set_link(&host, 0, false);
    // Nobody has heard of it yet.
    let flush = bench.sides[1].flush(bench.recv, buffer).expect("a port is up").expect("room");
    bench.rounds(20, &[0, 1]);
    let refusal = bench.sides[1].test(flush).expect_err("its port is down");
    assert_eq!(refusal.fault(), Some(Fault::NoPort), "{refusal}");
    let flush = bench.sides[1].flush(bench.recv, buffer).expect("a port is up").expect("room");
    bench.until("flushed", |bench| matches!(bench.sides[1].test(flush), Ok(Status::Done { .. })));
}

/// No port reads back what a GPU is to see, and it is said: the data may be anywhere. Once a port is back, it does.
#[test]
fn memory_of_a_gpu_stays_unflushed_where_every_port_is_down() {
    let memory = vec![0u8; 1000];
    let (mut bench, buffer) = with_gpu_memory(&memory);
    (0..2).for_each(|device| set_link(&mut bench, device, false));
    let refusal = bench.sides[1].flush(bench.recv, buffer).expect_err("no port is up");
    assert_eq!(refusal.fault(), Some(Fault::NoPort), "{refusal}");
    assert!(refusal.to_string().contains("rank 5 on host-b"), "{refusal}");
    set_link(&mut bench, 1, true);
    let flush = bench.sides[1].flush(bench.recv, buffer).expect("a port is up").expect("room");
    bench.until("flushed", |bench| matches!(bench.sides[1].test(flush), Ok(Status::Done { .. })));
}
