//! Kernels that copy, signal and pass packets by memory channels of `mccs/device.cuh`, of two ranks, in any order of threads.

use bytemuck::{Pod, Zeroable};
use mccs_kernels::cuda::{MEMORY_BY_ALL, MEMORY_EXCHANGE, MEMORY_PARTS, MEMORY_WAITS, MemoryChannelsArgs};
use mccs_tests::seeds;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::{Begun, MACHINE, Memory, draw};

/// The mirror of `mccs::MemoryChannel`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct Channel {
    own: u64,
    peer: u64,
    own_bytes: u64,
    peer_bytes: u64,
    arrived: u64,
    arrived_at_peer: u64,
    counts: u64,
    abort: u64,
}

/// Offsets of a rank's words in its memory, and its copies.
const COUNTS: u64 = 64;
const ABORT: u64 = 128;
const RESULT: u64 = 192;
const CHANNELS: u64 = 256;
const DATA: u64 = 512;

/// Two ranks that run a kernel, and how.
struct Scene {
    seed: u64,
    kernel: &'static str,
    blocks: u32,
    threads: u32,
    memory: [Memory; 2],
    args: [MemoryChannelsArgs; 2],
}

impl Scene {
    fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let random = &mut random;
        let kernel = draw(random, &[MEMORY_EXCHANGE, MEMORY_EXCHANGE, MEMORY_BY_ALL]);
        let blocks = if kernel == MEMORY_BY_ALL { draw(random, &[1, 2, 3]) } else { 1 };
        // Blocks of more than a warp, and copies of more pairs than threads take at once.
        let threads = draw(random, &[1, 2, 7, 33]);
        let (bytes, rounds) = (8 * random.random_range(1..40_u64), random.random_range(1..8_u64));
        let part_bytes = bytes.next_multiple_of(16);
        let data = MEMORY_PARTS * part_bytes;
        let mut memory = [(); 2].map(|()| Memory::new(DATA + data));
        let addresses = [memory[0].address(), memory[1].address()];
        let seeds: [u64; 2] = random.random();
        let args = [0, 1].map(|rank: usize| {
            let at = |offset| addresses[rank] + offset;
            let peer = |offset| addresses[1 - rank] + offset;
            let channel = Channel {
                own: at(DATA),
                peer: peer(DATA),
                own_bytes: data,
                peer_bytes: data,
                arrived: at(0),
                arrived_at_peer: peer(0),
                counts: at(COUNTS),
                abort: at(ABORT),
            };
            memory[rank].put(CHANNELS, bytemuck::bytes_of(&[channel; 2]));
            MemoryChannelsArgs {
                channels: at(CHANNELS),
                memory: at(DATA),
                bytes,
                part_bytes,
                rounds,
                own_seed: seeds[rank],
                peer_seed: seeds[1 - rank],
                result: at(RESULT),
                packets: 0,
                begins: 0,
            }
        });
        Scene { seed, kernel, blocks, threads, memory, args }
    }

    fn begun(&self, rank: u32) -> Begun {
        let args = &self.args[rank as usize];
        Begun { stream: rank, ..MACHINE.begun_as(self.kernel, args, self.blocks, self.threads) }
    }

    fn is_right(&self) {
        let Scene { seed, kernel, blocks, threads, args, .. } = self;
        let shows = || format!("seed {seed}, {kernel} of {blocks} blocks of {threads} threads: {:?}", args[0]);
        let launches = [self.begun(0), self.begun(1)];
        assert!(MACHINE.run(&launches, self.seed, None).is_some(), "nobody goes on: {}", shows());
        for memory in &self.memory {
            assert_eq!(memory.word(RESULT), 0, "wrong: {}", shows());
            let [sent, told, taken] = [0, 8, 16].map(|at| memory.word(COUNTS + at));
            assert_eq!([sent, told, taken], [memory.word(0); 3], "signals: {}", shows());
        }
    }
}

#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn memory_channels_of_kernels_in_any_order_of_threads() {
    let (mut scenes, mut by_all) = (0, 0);
    for seed in seeds(400) {
        let scene = Scene::new(seed);
        (scenes, by_all) = (scenes + 1, by_all + u32::from(scene.kernel == MEMORY_BY_ALL));
        scene.is_right();
    }
    assert!(scenes < 100 || (scenes / 5..scenes / 2).contains(&by_all), "{by_all} of {scenes}");
}

#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn a_wait_ends_when_the_communicator_is_aborted() {
    for seed in seeds(20) {
        let mut scene = Scene { kernel: MEMORY_WAITS, blocks: 1, ..Scene::new(seed) };
        scene.memory[0].put(ABORT, &1_u64.to_ne_bytes());
        assert!(MACHINE.run(&[scene.begun(0)], seed, None).is_some(), "seed {seed}: it waits for ever");
        assert_eq!(scene.memory[0].word(RESULT), 1, "seed {seed}: a signal that nobody sent");
    }
}
