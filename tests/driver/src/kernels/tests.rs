//! Collectives between ranks that are threads, by every algorithm, against the reference.

use bytemuck::Zeroable;
use mccs_ipc::shm_exchange::CollectiveSignature;
use mccs_ipc::types::{CollectiveKind, RedOp};
use mccs_kernels::cuda::{Algorithm, CollectiveCall, Launch, SymmetricBufferLayout};
use mccs_kernels::finish_round;

use super::*;
use crate::device;
use crate::memory::{Kind, allocate};

const COUNTS: [u64; 5] = [0, 1, 77, 5000, 300_001];

/// Memory of a GPU's, as bytes.
fn bytes(address: u64, count: usize) -> &'static mut [u8] {
    // SAFETY: tests name what they have allocated, and never free; each thread has its own.
    unsafe { std::slice::from_raw_parts_mut(address as *mut u8, count) }
}

/// A small integer, another for each rank and place.
fn input(rank: u32, count: usize) -> Vec<u8> {
    (0..count).flat_map(|at| ((at as i32 * 7 + rank as i32 * 13) % 100 - 50).to_le_bytes()).collect()
}

struct Fixture {
    device: &'static Device,
    layout: SymmetricBufferLayout,
    symmetric: Vec<u64>,
    /// By rank, what is sent and what is received.
    buffers: Vec<[u64; 2]>,
    number: u32,
}

impl Fixture {
    fn new(nranks: u32) -> Fixture {
        let (device, layout) = (&device::all()[0], SymmetricBufferLayout::initial(nranks));
        let memory = |bytes: u64| allocate(device, bytes, Kind::Allocated).expect("memory");
        let room = 4 * u64::from(nranks) * COUNTS[4];
        let symmetric = (0..nranks).map(|_| memory(layout.bytes())).collect();
        let buffers = (0..nranks).map(|_| [memory(room), memory(room)]).collect();
        Fixture { device, layout, symmetric, buffers, number: 0 }
    }

    /// Runs a call on all ranks. Returns whether there is such a way.
    fn run(&mut self, call: CollectiveCall, algorithm: Algorithm) -> bool {
        const BLOCKS: u32 = 20;
        let CollectiveCall { kind, count, root, nranks, dtype, op, .. } = call;
        let send_count = |rank| kind.send_count(count, nranks, rank, root).expect("fits") as usize;
        let recv_count = |rank| kind.recv_count(count, nranks, rank, root).expect("fits") as usize;
        let launch = |rank| Launch::collective(&CollectiveCall { rank, ..call }, &self.layout, algorithm, BLOCKS);
        let Some(launches) = (0..nranks).map(launch).collect::<Option<Vec<_>>>() else { return false };
        self.number += 1;
        let inputs: Vec<_> = (0..nranks).map(|rank| input(rank, send_count(rank))).collect();
        for (rank, [send, recv]) in (0..nranks).zip(&self.buffers) {
            bytes(*send, inputs[rank as usize].len()).copy_from_slice(&inputs[rank as usize]);
            bytes(*recv, recv_count(rank) * 4).fill(0xee);
        }
        let device = self.device;
        std::thread::scope(|scope| {
            for (rank, launch) in launches.iter().enumerate() {
                let mut args = launch.args;
                [args.send, args.recv] = self.buffers[rank];
                args.symmetric[..self.symmetric.len()].copy_from_slice(&self.symmetric);
                // Every third as one that is captured.
                args.sequence = if self.number.is_multiple_of(3) { 0 } else { self.number };
                let kernel = Kernel::find(launch.function, false).expect("known");
                // SAFETY: it is the kernel's argument.
                let work = unsafe { work(kernel, launch.grid, (&raw const args).cast()) };
                scope.spawn(move || assert_eq!(work(device), Ok(())));
            }
        });
        let sources: Vec<_> =
            inputs.iter().map(|input| mccs_kernels::Source { ptr: input.as_ptr(), scalar_bits: None }).collect();
        let shm_exchange = CollectiveSignature { kind, dtype, redop: op, root, count };
        for (rank, [_, recv]) in (0..nranks).zip(&self.buffers) {
            let mut wanted = vec![0; recv_count(rank) * 4];
            // SAFETY: contributions and results have the lengths that the kind says.
            unsafe { finish_round(&shm_exchange, rank, &sources, wanted.as_mut_ptr()) };
            assert!(bytes(*recv, wanted.len()) == wanted, "{call:?} by {algorithm:?}, rank {rank}");
            let ended = wait_word(self.symmetric[rank as usize]);
            assert_eq!(SymmetricBufferLayout::ended(ended), u64::from(self.number), "{call:?}");
        }
        true
    }
}

fn wait_word(address: u64) -> u64 {
    word(address).load(std::sync::atomic::Ordering::Acquire)
}

#[test]
fn collectives_of_every_kind_and_algorithm_are_right() {
    let mut ran = 0;
    for nranks in [2, 3] {
        let mut fixture = Fixture::new(nranks);
        for (index, count) in COUNTS.into_iter().enumerate() {
            for &kind in CollectiveKind::ALL {
                for algorithm in Algorithm::ALL {
                    let root = if kind.has_root() { index as u32 % nranks } else { 0 };
                    let (dtype, op) = (DataType::I32, if kind.reduces() { RedOp::ALL[index % 3] } else { RedOp::Sum });
                    let op = if op == RedOp::PreMulSum { RedOp::Max } else { op };
                    let call = CollectiveCall {
                        kind,
                        dtype,
                        op,
                        count,
                        root,
                        scalar_bits: 0,
                        is_scalar_address: false,
                        rank: 0,
                        nranks,
                    };
                    ran += u32::from(fixture.run(call, algorithm));
                }
            }
        }
    }
    assert!(ran > 200, "{ran} collectives");
}

#[test]
fn a_kernel_that_waits_ends_when_it_is_aborted_and_counts() {
    let fixture = Fixture::new(2);
    let call = CollectiveCall {
        kind: CollectiveKind::AllReduce,
        dtype: DataType::I32,
        op: RedOp::Sum,
        count: 1000,
        root: 0,
        scalar_bits: 0,
        is_scalar_address: false,
        rank: 0,
        nranks: 2,
    };
    let launch = Launch::collective(&call, &fixture.layout, Algorithm::SimpleTwoShot, 8).expect("a way");
    let mut args = launch.args;
    [args.send, args.recv] = fixture.buffers[0];
    args.symmetric[..2].copy_from_slice(&fixture.symmetric);
    let abort_word = allocate(fixture.device, 8, Kind::Allocated).expect("memory");
    (args.sequence, args.abort_word) = (1, abort_word);
    let kernel = Kernel::find(launch.function, false).expect("known");
    // SAFETY: it is the kernel's argument.
    let work = unsafe { work(kernel, launch.grid, (&raw const args).cast()) };
    let device = fixture.device;
    std::thread::scope(|scope| {
        let running = scope.spawn(move || work(device));
        word(abort_word).store(1, std::sync::atomic::Ordering::Release);
        assert_eq!(running.join().expect("it ends"), Ok(()));
    });
    assert_eq!(wait_word(fixture.symmetric[0]), 1 << 32);
}

#[test]
fn a_kernel_that_touches_what_is_not_there_fails() {
    let at = 8_u64;
    // SAFETY: it is the kernel's argument.
    let work = unsafe { work(Kernel::Stray, 1, (&raw const at).cast()) };
    assert_eq!(work(&device::all()[0]), Err(ILLEGAL_ADDRESS));
}

#[test]
fn a_kernel_of_batches_takes_batches_alone_and_others_take_none() {
    for (name, batch) in [("mccs_ll128_float", 2), ("mccs_simple_batch_copy", 1)] {
        let mut args = DirectArgs::zeroed();
        args.batch = batch;
        let kernel = Kernel::find(name, false).expect("of the image");
        // SAFETY: it is the kernel's argument.
        let work = unsafe { work(kernel, 1, (&raw const args).cast()) };
        assert_eq!(work(&device::all()[0]), Err(ILLEGAL_ADDRESS), "{name}");
    }
}

#[test]
fn every_function_of_the_images_is_known() {
    let direct = |form, dtype| Kernel::Direct { form, dtype, is_of_batches: false };
    for name in mccs_kernels::cuda::functions().chain([STAGE_FUNCTION]) {
        assert!(Kernel::find(name, false).is_some(), "{name}");
    }
    assert_eq!(Kernel::find("mccs_ll128_half", false), Some(direct(Form::Ll128, Some(DataType::F16))));
    assert_eq!(Kernel::find("mccs_simple_copy", false), Some(direct(Form::Simple, None)));
    for unknown in ["mccs_reduce_copy", "mccs_ll_float32", "stray", "mccs_", ""] {
        assert_eq!(Kernel::find(unknown, false), None, "{unknown}");
    }
}
