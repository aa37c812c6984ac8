//! Kernels that put by `mccs/device.cuh`, of two ranks, and a service that carries it (`puts.cpp`), in any order of threads.

use bytemuck::{Pod, Zeroable};
use mccs_kernels::cuda::{PUTS_BY_ALL, PUTS_EXCHANGE, PutsArgs};
use mccs_tests::seeds;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::{Begun, MACHINE, Memory, draw};

/// The mirror of `simulated::PutRank`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct PutRank {
    slots: u64,
    slots_log2: u64,
    tail: u64,
    arrived: u64,
    flushed: u64,
    source: u64,
    destination: u64,
    triggers: u64,
}

/// The mirror of `simulated::PutService`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
struct PutService {
    ranks: [PutRank; 2],
}

/// Offset of a rank's words in its memory, and what it puts from.
const SEEN_TAIL: u64 = 64;
const TAKEN: u64 = 128;
const TAIL: u64 = 192;
const ARRIVED: u64 = 256;
const FLUSHED: u64 = 320;
const AWAITED: u64 = 384;
const RESULT: u64 = 448;
const SLOTS: u64 = 512;
const SOURCE: u64 = 1024;

/// Two ranks that run a kernel, and how.
struct Scene {
    seed: u64,
    kernel: &'static str,
    threads: u32,
    memory: [Memory; 2],
    args: [PutsArgs; 2],
    service: PutService,
}

impl Scene {
    fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let random = &mut random;
        let kernel = draw(random, &[PUTS_EXCHANGE, PUTS_BY_ALL]);
        // More threads than slots, and a block of more than a warp.
        let (slots_log2, threads) = (random.random_range(0..4_u32), draw(random, &[1, 2, 7, 33]));
        let (bytes, rounds) = (8 * random.random_range(1..9_u64), random.random_range(1..6_u64));
        let (half, triggers) = match kernel {
            // A put with all in every other round, and three triggers in the others.
            PUTS_EXCHANGE => (2 * bytes, rounds.div_ceil(2) * 3 + rounds / 2),
            _ => (bytes * u64::from(threads), 2 * u64::from(threads)),
        };
        let memory = [(); 2].map(|()| Memory::new(SOURCE + 2 * half));
        let seeds: [u64; 2] = random.random();
        let args = [0, 1].map(|rank: usize| {
            let at = |offset| memory[rank].address() + offset;
            let number = u64::from(random.random_range(0..1_u32 << 14));
            let channel = [
                at(0),
                at(SEEN_TAIL),
                at(TAKEN),
                at(SLOTS),
                at(TAIL),
                at(ARRIVED),
                at(FLUSHED),
                at(AWAITED),
                number | u64::from(slots_log2) << 32,
            ];
            PutsArgs {
                out: [channel; 2],
                receive: [channel; 2],
                source: at(SOURCE),
                destination: at(SOURCE + half),
                bytes,
                rounds,
                own_seed: seeds[rank],
                peer_seed: seeds[1 - rank],
                result: at(RESULT),
                begins: 0,
            }
        });
        let ranks = [0, 1].map(|rank: usize| {
            let at = |offset| memory[rank].address() + offset;
            PutRank {
                slots: at(SLOTS),
                slots_log2: slots_log2.into(),
                tail: at(TAIL),
                arrived: at(ARRIVED),
                flushed: at(FLUSHED),
                source: at(SOURCE),
                destination: at(SOURCE + half),
                triggers,
            }
        });
        Scene { seed, kernel, threads, memory, args, service: PutService { ranks } }
    }

    fn is_right(&self) {
        let begun = |rank: u32| {
            let args = &self.args[rank as usize];
            Begun { stream: rank, ..MACHINE.begun_as(self.kernel, args, 1, self.threads) }
        };
        let service = MACHINE.begun_as("mccs_puts_service", &self.service, 1, 1);
        let launches = [begun(0), begun(1), Begun { stream: 2, ..service }];
        let shows = || format!("seed {}, {} of {} threads: {:?}", self.seed, self.kernel, self.threads, self.args[0]);
        assert!(MACHINE.run(&launches, self.seed, None).is_some(), "nobody goes on: {}", shows());
        for memory in &self.memory {
            assert_eq!(memory.word(RESULT), 0, "wrong: {}", shows());
            let (head, tail) = (memory.word(0), memory.word(TAIL));
            assert_eq!((head, tail), (self.service.ranks[0].triggers, head), "triggers: {}", shows());
            assert_eq!(memory.word(ARRIVED), memory.word(TAKEN), "signals: {}", shows());
        }
    }
}

#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn puts_of_kernels_in_any_order_of_threads() {
    let (mut scenes, mut by_all) = (0, 0);
    for seed in seeds(400) {
        let scene = Scene::new(seed);
        (scenes, by_all) = (scenes + 1, by_all + u32::from(scene.kernel == PUTS_BY_ALL));
        scene.is_right();
    }
    assert!(scenes < 100 || (scenes / 4..scenes).contains(&by_all), "{by_all} of {scenes}");
}
