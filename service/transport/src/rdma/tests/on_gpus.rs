//! Memory of GPUs between emulated devices, whose copy engines are the emulated driver's: by `tests/nics/check`, the test binary with
//! `--ignored on_gpus --test-threads 1`. Devices are called nic0, of the host h0, and nic1, of h1; two GPUs belong to one each.

use std::os::fd::AsFd as _;
use std::process::Command;
use std::time::Duration;

use mccs_cuda::{Context as Gpu, DeviceMemory, copy_from_host, copy_to_host, dma_buffer, gpus};

use crate::conformance::Random;
use crate::rdma::*;
use crate::{DataPath as _, MemorySpan, Request, Status};
use mccs_runtime::Context;

/// A test that has not got further for so long hangs.
const PATIENCE: Duration = Duration::from_secs(120);
/// More than two slots of the devices' rings, and no multiple of anything.
const BYTES: usize = (3 << 20) + 12_345;
const SIZES: [usize; 6] = [1, 8, 4096, 65_536, 1_000_003, BYTES];

/// A command to a device: `mccs-nics FOLDER fault HOST DEVICE KIND VALUE`.
struct Told<'a>(usize, &'a str);

impl<'a> Told<'a> {
    /// Refuses memory of GPUs by a way, for as long as this lives.
    fn to_refuse(side: usize, way: &'a str) -> Self {
        let told = Told(side, way);
        told.tell("0");
        told
    }

    fn tell(&self, value: &str) {
        let [program, folder] = ["MCCS_TEST_NICS_PROGRAM", "MCCS_NICS"]
            .map(|name| std::env::var_os(name).expect("tests/nics/check says it"));
        let (host, device) = (format!("h{}", self.0), format!("nic{}", self.0));
        let mut command = Command::new(program);
        let status = command.arg(folder).args(["fault", &host, &device, self.1, value]).status();
        assert!(status.is_ok_and(|status| status.success()) || std::thread::panicking());
    }
}

impl Drop for Told<'_> {
    fn drop(&mut self) {
        self.tell("1");
    }
}

/// A host: a transport on one device, a GPU, and memory of it.
struct Side {
    transport: RdmaTransport,
    gpu: Gpu,
    memory: Option<DeviceMemory>,
}

impl Side {
    fn new(number: usize) -> Self {
        let driver: Arc<dyn Driver> = Arc::new(Verbs::open(LIBRARY).expect("libibverbs"));
        let devices = vec![DeviceChoice { name: format!("nic{number}"), port: None }];
        let options = RdmaOptions { devices, ..RdmaOptions::default() };
        let transport = RdmaTransport::new(&driver, options).expect("a device");
        let gpus = gpus().expect("the emulated driver");
        let gpu = Gpu::primary(&gpus[number % gpus.len()]).expect("a context");
        let memory = DeviceMemory::new(&gpu, BYTES).expect("memory");
        Side { transport, gpu, memory: Some(memory) }
    }

    fn address(&self) -> u64 {
        self.memory.as_ref().expect("it is there").address()
    }

    /// Registers the memory, with a dma-buf where one is wanted.
    fn register(&mut self, has_buffer: bool) -> Result<MemoryKey, TransportError> {
        let pages = BYTES.next_multiple_of(4096);
        let buffer = has_buffer.then(|| dma_buffer(&self.gpu, self.address(), pages).expect("the driver has dma-bufs"));
        let kind = MemoryKind::Gpu { dma_buffer: buffer.as_ref().map(|buffer| (buffer.as_fd(), 0)) };
        let (address, _entered) = (self.address(), self.gpu.enter().expect("a context"));
        // SAFETY: the memory lives longer than the registration, or the device finds it gone.
        unsafe { self.transport.register(address as *mut u8, BYTES as u64, kind) }
    }

    fn fill(&self, bytes: &[u8]) {
        let _entered = self.gpu.enter().expect("a context");
        // SAFETY: the memory has as many bytes, and nothing uses them now.
        unsafe { copy_from_host(self.address(), bytes).expect("copies") };
    }

    fn read(&self, count: usize) -> Vec<u8> {
        let (mut bytes, _entered) = (vec![0; count], self.gpu.enter().expect("a context"));
        // SAFETY: as above.
        unsafe { copy_to_host(&mut bytes, self.address()).expect("copies") };
        bytes
    }
}

/// A flow from one host to another, each of which has registered memory of its GPU.
struct Bench {
    sides: [Side; 2],
    keys: [MemoryKey; 2],
    send: SendFlow,
    recv: RecvFlow,
    random: Random,
}

impl Bench {
    fn new(has_buffer: bool) -> Self {
        let mut sides = [Side::new(0), Side::new(1)];
        let keys = sides.each_mut().map(|side| side.register(has_buffer).expect("registers"));
        let options =
            FlowOptions { connections: 2, chunk_bytes: 256 << 10, takes_short: false, ..FlowOptions::default() };
        let spec = FlowSpec { number: 0, peer: "rank 1 on h1".into(), options };
        let (listener, handle) = sides[1].transport.listen(&ListenOptions::default()).expect("listens");
        let send = sides[0].transport.connect(&handle, &spec, Instant::now()).expect("connects");
        let recv = sides[1].transport.accept(listener, &spec, Instant::now()).expect("accepts");
        let seed = std::time::UNIX_EPOCH.elapsed().expect("a clock").as_nanos() as u64;
        Bench { sides, keys, send, recv, random: Random(seed) }
    }

    fn poll(&mut self) {
        let now = Instant::now();
        for side in &mut self.sides {
            side.transport.poll(&Context::new(now, 64));
        }
    }

    /// Polls until something is there.
    fn until<T>(&mut self, what: &str, mut found: impl FnMut(&mut Self) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = found(self) {
                return found;
            }
            self.poll();
            assert!(start.elapsed() < PATIENCE, "not {what}");
        }
    }

    fn await_done(&mut self, what: &str, side: usize, request: Request) {
        self.until(what, |bench| {
            let status = bench.sides[side].transport.test(request).expect("it lives");
            matches!(status, Status::Done { .. }).then_some(())
        });
    }

    /// Sends a random message from GPU to GPU, and checks it and what is behind it.
    fn message(&mut self, bytes: usize) {
        let data: Vec<u8> = (0..bytes).map(|_| self.random.next() as u8).collect();
        self.sides[0].fill(&data);
        self.sides[1].fill(&vec![0xee; BYTES]);
        let span = |key| MemorySpan { key, offset: 0, bytes: bytes as u64 };
        let [from, to] = self.keys.map(span);
        let received = self.until("room", |bench| bench.sides[1].transport.irecv(bench.recv, to).expect("lives"));
        let sent = self.until("room", |bench| bench.sides[0].transport.isend(bench.send, from, 0).expect("lives"));
        self.await_done("received", 1, received);
        self.await_done("sent", 0, sent);
        let flushed = self.until("room", |bench| bench.sides[1].transport.flush(bench.recv, to).expect("lives"));
        self.await_done("flushed", 1, flushed);
        let found = self.sides[1].read(BYTES);
        assert!(found[..bytes] == data, "{bytes} bytes are others");
        assert!(found[bytes..].iter().all(|byte| *byte == 0xee), "more than {bytes} bytes have come");
    }

    fn access(&self) -> [Option<GpuAccess>; 2] {
        [0, 1].map(|side| self.sides[side].transport.gpu_access(self.keys[side]))
    }
}

#[test]
#[ignore = "needs emulated devices and GPUs: tests/nics/check"]
fn messages_go_from_gpu_to_gpu_by_dma_buffer() {
    let mut bench = Bench::new(true);
    assert_eq!(bench.access(), [Some(GpuAccess::DmaBuffer); 2]);
    SIZES.iter().chain(&SIZES).for_each(|bytes| bench.message(*bytes));
    assert_eq!(bench.access(), [Some(GpuAccess::DmaBuffer); 2]);
}

#[test]
#[ignore = "needs emulated devices and GPUs: tests/nics/check"]
fn memory_is_registered_by_address_where_its_dma_buffer_is_refused_or_missing() {
    let mut bench = Bench::new(false);
    assert_eq!(bench.access(), [Some(GpuAccess::PeerMemory { by_buffer: None }); 2]);
    SIZES.iter().for_each(|bytes| bench.message(*bytes));
    let _refuses = [0, 1].map(|side| Told::to_refuse(side, "dma-buf"));
    let mut bench = Bench::new(true);
    assert_eq!(bench.access(), [Some(GpuAccess::PeerMemory { by_buffer: Some(Errno::EOPNOTSUPP) }); 2]);
    SIZES.iter().for_each(|bytes| bench.message(*bytes));
}

#[test]
#[ignore = "needs emulated devices and GPUs: tests/nics/check"]
fn without_both_ways_the_refusal_names_them_and_the_flows_go_on() {
    let mut bench = Bench::new(true);
    let _refuses = ["dma-buf", "peer-memory"].map(|way| Told::to_refuse(1, way));
    for has_buffer in [true, false] {
        let refusal = bench.sides[1].register(has_buffer).expect_err("neither way is there").to_string();
        let by_buffer = if has_buffer { "dma-buf (Operation not supported" } else { "dma-buf (there is none)" };
        for words in [by_buffer, "its address (Bad address)", "nvidia_peermem", "stage through host memory"] {
            assert!(refusal.contains(words), "{refusal}");
        }
    }
    SIZES.iter().for_each(|bytes| bench.message(*bytes));
}

#[test]
#[ignore = "needs emulated devices and GPUs: tests/nics/check"]
fn memory_that_is_freed_while_registered_fails_its_flow_alone() {
    for side in [0, 1] {
        let (mut bench, mut other) = (Bench::new(true), Bench::new(true));
        bench.message(BYTES);
        bench.sides[side].memory = None;
        let span = |key| MemorySpan { key, offset: 0, bytes: BYTES as u64 };
        let [from, to] = bench.keys.map(span);
        let _ = bench.sides[1].transport.irecv(bench.recv, to).expect("it lives");
        bench.until("posted", |bench| bench.sides[0].transport.isend(bench.send, from, 0).expect("it lives"));
        let ends = [bench.send.into(), bench.recv.into()];
        let failed = |bench: &mut Bench| {
            (0..2).find_map(|side| bench.sides[side].transport.state(ends[side]).err()).map(|error| error.to_string())
        };
        let error = bench.until("failed", failed);
        assert!(!error.is_empty());
        other.message(BYTES);
    }
}
