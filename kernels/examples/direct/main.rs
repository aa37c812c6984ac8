//! Checks and measures the GPU kernels: one process, a thread and a stream a GPU, peer access. `direct check`, or
//! `direct measure PATH-OF-LIBNCCL [quick]`; fails where there are fewer than two GPUs.

mod check;
mod cuda;
mod local;
mod measure;
mod nccl;

use std::collections::HashMap;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use mccs_ipc::types::DataType;
use mccs_kernels::cuda::{AreaLayout, DirectArgs, DirectCall, IMAGE, Launch};

use cuda::{Driver, Gpu};

/// Room in each rank's send and receive buffer.
pub const BUFFER_BYTES: usize = 520 << 20;

/// All GPUs, with the areas of one communicator.
pub struct Bench<'a> {
    pub gpus: Vec<Gpu<'a>>,
    functions: Vec<HashMap<&'static str, usize>>,
    pub layout: AreaLayout,
    pub areas: [u64; 8],
    pub send: Vec<u64>,
    pub recv: Vec<u64>,
    pub words: usize,
    pub barrier: Barrier,
    pub failures: Mutex<Vec<String>>,
}

impl Bench<'_> {
    pub fn nranks(&self) -> u32 {
        self.gpus.len() as u32
    }

    pub fn abort_word(&self) -> *mut u64 {
        self.words as *mut u64
    }

    pub fn done_word(&self, rank: usize) -> *mut u64 {
        (self.words + 64 * (rank + 1)) as *mut u64
    }

    /// Launches a direct operation.
    pub fn launch(&self, rank: usize, launch: &mut Launch<DirectArgs>, sequence: u32, send: u64, recv: u64) {
        launch.args.areas = self.areas;
        launch.args.send = send;
        launch.args.recv = recv;
        launch.args.sequence = sequence;
        launch.args.abort_word = self.words as u64;
        self.gpus[rank].launch(self.functions[rank][launch.function], launch);
    }

    pub fn launch_local<A>(&self, rank: usize, launch: &Launch<A>) {
        self.gpus[rank].launch(self.functions[rank][launch.function], launch);
    }

    /// Waits for a rank's stream; gives up after ten seconds by the abort word.
    pub fn wait(&self, rank: usize, what: &dyn Fn() -> String) {
        let start = Instant::now();
        while !self.gpus[rank].is_idle() {
            if start.elapsed() > Duration::from_secs(10) {
                self.fail(format!("{} on rank {rank}: no end", what()));
                // SAFETY: a live word that kernels only read.
                unsafe { self.abort_word().write_volatile(1) };
                self.gpus[rank].synchronize();
                eprintln!("{:?}", self.failures.lock());
                std::process::exit(1);
            }
        }
    }

    pub fn fail(&self, text: String) {
        if let Ok(mut failures) = self.failures.lock() {
            failures.push(text);
        }
    }
}

/// A call with nothing special.
pub fn call(kind: mccs_ipc::types::CollectiveKind, count: u64, rank: usize, nranks: u32) -> DirectCall {
    let op = mccs_ipc::types::RedOp::Sum;
    DirectCall { kind, dtype: DataType::F32, op, count, root: 0, scalar_bits: 0, rank: rank as u32, nranks }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let driver = Driver::open().expect("a CUDA driver");
    let devices = driver.devices().min(std::env::var("GPUS").ok().and_then(|n| n.parse().ok()).unwrap_or(8));
    assert!(devices >= 2, "needs two GPUs, has {devices}");
    let other = std::env::var("IMAGE").ok().map(|path| std::fs::read(path).expect("readable"));
    let image = other.as_deref().or(IMAGE).expect("kernels were compiled");
    let started = Instant::now();
    let gpus: Vec<Gpu> = (0..devices).map(|device| Gpu::open(&driver, device, image)).collect();
    for (a, gpu) in gpus.iter().enumerate() {
        gpus.iter().enumerate().filter(|(b, _)| *b != a).for_each(|(_, other)| gpu.enable_peer(other));
    }
    let mut layout = AreaLayout::initial(devices as u32);
    let setting = |name: &str| std::env::var(name).ok().and_then(|n| n.parse::<u32>().ok());
    layout.slots = setting("SLOTS").unwrap_or(layout.slots);
    layout.slot_bytes = setting("SLOT_BYTES").unwrap_or(layout.slot_bytes);
    layout.packet_bytes = setting("PACKET_BYTES").unwrap_or(layout.packet_bytes);
    layout.blocks = setting("BLOCKS").unwrap_or(layout.blocks);
    let (mut areas, mut send, mut recv, mut functions) = ([0; 8], Vec::new(), Vec::new(), Vec::new());
    for (rank, gpu) in gpus.iter().enumerate() {
        gpu.make_current();
        areas[rank] = gpu.alloc(layout.bytes() as usize);
        send.push(gpu.alloc(BUFFER_BYTES));
        recv.push(gpu.alloc(BUFFER_BYTES));
        let names = DataType::ALL.iter().flat_map(|dtype| {
            ["packets", "bulk", "reduce"].map(|family| &*format!("mccs_{family}_{}", dtype.name()).leak())
        });
        let names = names.chain(["mccs_packets_copy", "mccs_bulk_copy"]);
        functions.push(names.map(|name| (name, gpu.function(name))).collect());
    }
    let words = gpus[0].alloc_words(1024) as usize;
    eprintln!("{devices} GPUs, area {} KiB, loaded in {:?}", layout.bytes() >> 10, started.elapsed());
    let barrier = Barrier::new(devices as usize);
    let failures = Mutex::default();
    let bench = Bench { gpus, functions, layout, areas, send, recv, words, barrier, failures };
    match arguments.get(1).map(String::as_str) {
        Some("check") => {
            local::check(&bench);
            check::all(&bench);
            check::abort(&bench);
        }
        Some("measure") => measure::all(&bench, &arguments[2], arguments.get(3).map(String::as_str)),
        _ => panic!("check | measure PATH-OF-LIBNCCL"),
    }
    let failures = bench.failures.lock().expect("no thread panicked");
    failures.iter().take(20).for_each(|failure| println!("FAILED {failure}"));
    println!("{} failures", failures.len());
    std::process::exit(i32::from(!failures.is_empty()));
}
