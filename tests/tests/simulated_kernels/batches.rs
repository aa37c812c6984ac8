//! Batches: one kernel carries out a collective several times at once, on blocks that lie apart in any way.

use mccs_eval::workload::{Call, POISON};
use mccs_ipc::strides::{Batch, Strides};
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};
use mccs_kernels::cuda::{Algorithm, CollectiveCall, DirectArgs, Launch, SymmetricBufferLayout};
use mccs_kernels::reference;
use mccs_tests::seeds;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::{Buffer, MACHINE, Memory, draw, name_symmetric_buffers, small_layout};

const KINDS: [CollectiveKind; 5] = [
    CollectiveKind::AllGather,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllToAll,
    CollectiveKind::Gather,
    CollectiveKind::Scatter,
];
const ALGORITHMS: [Algorithm; 2] = [Algorithm::Ll128OneShot, Algorithm::SimpleOneShot];

/// How blocks lie in a buffer: elements from one to the next, and from one collective's first to the next one's.
#[derive(Debug, Clone, Copy)]
struct Spread {
    stride: u64,
    apart: u64,
}

impl Spread {
    /// Each collective's blocks together, as in callers' buffers, or all first blocks, as in slots.
    fn drawn(random: &mut StdRng, count: u64, blocks: u64, places: u64) -> Self {
        let mut gap = || draw(random, &[0, 0, 1, 5]);
        let (one, other) = (count + gap(), gap());
        match random.random() {
            true => Spread { stride: one, apart: blocks * one + other },
            false => Spread { stride: places * one + other, apart: one },
        }
    }

    fn elements(&self, blocks: u64, places: u64) -> u64 {
        if blocks == 0 { 0 } else { blocks * self.stride + places * self.apart }
    }
}

/// A batch as all ranks launch it.
struct Batched {
    /// The first of the batch's; each other one has another seed.
    call: Call,
    algorithm: Algorithm,
    strides: Strides,
    launches: Vec<Launch<DirectArgs>>,
    /// By rank: what is sent, and what is received.
    buffers: Vec<[Buffer; 2]>,
    /// By rank: all of the receive buffer.
    wanted: Vec<Vec<u8>>,
}

impl Batched {
    /// `None` where symmetric buffers have no room for it.
    fn drawn(random: &mut StdRng, layout: &SymmetricBufferLayout, seed: u64, algorithm: Algorithm) -> Option<Self> {
        let nranks = layout.nranks;
        let kind = draw(random, &KINDS);
        let redop = if kind.reduces() { draw(random, RedOp::ALL) } else { RedOp::Sum };
        let root = if kind.has_root() { random.random_range(0..nranks) } else { 0 };
        let most = draw(random, &[3, 60, 400]);
        let (count, dtype) = (random.random_range(1..=most), draw(random, DataType::ALL));
        let call = Call { kind, dtype, redop, root, count, nranks, seed };
        let (times, skip) = (random.random_range(2..=9), random.random_range(0..=9));
        let places = Batch { times, skip, send: 0, recv: 0 }.places();
        let (send_blocks, recv_blocks) = (
            if matches!(kind, CollectiveKind::AllGather | CollectiveKind::Gather) { 1 } else { nranks.into() },
            if matches!(kind, CollectiveKind::ReduceScatter | CollectiveKind::Scatter) { 1 } else { nranks.into() },
        );
        let send = Spread::drawn(random, count, send_blocks, places);
        let recv = Spread::drawn(random, count, recv_blocks, places);
        let batch = Batch { times, skip, send: send.apart, recv: recv.apart };
        let strides = Strides { send: send.stride, recv: recv.stride, batch };
        let launch = |rank| {
            let (scalar_bits, op) = (reference::scalar_bits(dtype, call.scalar(rank)), redop);
            let of =
                CollectiveCall { kind, dtype, op, count, root, scalar_bits, is_scalar_address: false, rank, nranks };
            Launch::collective_apart(&of, strides, layout, algorithm, layout.blocks)
        };
        let launches = (0..nranks).map(launch).collect::<Option<Vec<_>>>()?;
        let size = dtype.size_bytes();
        // All ranks' results of each, block by block, and what lies between.
        let lay = |buffer: &mut dyn FnMut(usize, &[u8]), spread: Spread, data: &dyn Fn(&Call) -> Vec<u8>| {
            for time in 0..times {
                let data = data(&Call { seed: seed + u64::from(time) * 1000, ..call });
                let place = u64::from(time + u32::from(time >= skip));
                for (block, bytes) in (0..).zip(data.chunks(count as usize * size)) {
                    buffer((place * spread.apart + block * spread.stride) as usize * size, bytes);
                }
            }
        };
        let shifts = [0; 2].map(|_| draw(random, &[0, 0, 1, 3]) * size);
        let (mut buffers, mut wanted) = (Vec::new(), Vec::new());
        for rank in 0..nranks {
            let elements = |spread: Spread, has_any: bool, blocks| {
                if has_any { spread.elements(blocks, places) as usize * size } else { 0 }
            };
            let sent = elements(send, call.send_count(rank) > 0, send_blocks);
            let received = elements(recv, call.recv_count(rank) > 0, recv_blocks);
            let [mut from, to] = [Buffer::new(sent, shifts[0]), Buffer::new(received, shifts[1])];
            lay(&mut |at, bytes| from.write(at, bytes), send, &|call| call.input(rank));
            let mut right = vec![POISON; received];
            let mut write = |at: usize, bytes: &[u8]| right[at..at + bytes.len()].copy_from_slice(bytes);
            lay(&mut write, recv, &|call| call.expected(rank));
            buffers.push([from, to]);
            wanted.push(right);
        }
        Some(Batched { call, algorithm, strides, launches, buffers, wanted })
    }

    fn what(&self) -> String {
        let Batched { call, algorithm, strides, .. } = self;
        format!("{call:?} by {algorithm:?}, {strides:?}")
    }
}

#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn batches_in_any_order_of_threads() {
    let mut ran = [0; ALGORITHMS.len()];
    let (mut scenes, mut longer) = (0, 0);
    for seed in seeds(200) {
        let mut random = StdRng::seed_from_u64(seed);
        let nranks = if random.random_ratio(1, 8) { random.random_range(5..=8) } else { random.random_range(2..=4) };
        let layout = SymmetricBufferLayout {
            ll128_bytes: draw(&mut random, &[1920, 4096, 16384]),
            ..small_layout(&mut random, nranks)
        };
        let mut batches = Vec::new();
        while batches.len() < 3 {
            let way = random.random_range(0..ALGORITHMS.len());
            let some = Batched::drawn(&mut random, &layout, seed + batches.len() as u64, ALGORITHMS[way]);
            ran[way] += usize::from(some.is_some());
            batches.extend(some);
        }
        let symmetric: Vec<_> = (0..nranks).map(|_| Memory::new(layout.bytes())).collect();
        for Batched { launches, buffers, .. } in &mut batches {
            for (Launch { args, .. }, buffers) in launches.iter_mut().zip(buffers) {
                [args.send, args.recv] = [buffers[0].address(), buffers[1].address()];
                name_symmetric_buffers(&mut args.symmetric, &symmetric);
            }
        }
        let launches = batches.iter().flat_map(|batched| (0..).zip(&batched.launches));
        let begun: Vec<_> = launches.map(|(rank, launch)| MACHINE.begun(launch, rank)).collect();
        let shows = || format!("seed {seed}, {layout:?}: {:#?}", batches.iter().map(Batched::what).collect::<Vec<_>>());
        assert!(MACHINE.run(&begun, seed, None).is_some(), "nobody goes on: {}", shows());
        for (number, Batched { buffers, wanted, .. }) in batches.iter().enumerate() {
            for (rank, ([send, recv], wanted)) in buffers.iter().zip(wanted).enumerate() {
                assert!(recv.data() == wanted, "batch {number}, rank {rank}: {}", shows());
                assert!(send.is_whole() && recv.is_whole(), "written beside {number}, {rank}: {}", shows());
            }
        }
        (scenes, longer) = (scenes + 1, longer + usize::from(batches.iter().any(|one| one.call.count > 100)));
    }
    assert!(scenes < 100 || ran.iter().all(|ran| *ran > scenes / 5) && longer > scenes / 5, "{ran:?}, {longer}");
}
