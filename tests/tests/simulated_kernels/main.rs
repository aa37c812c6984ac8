//! The kernels of `kernels/cuda` on a processor: their sources, compiled for it, with every thread a fiber and a seed that decides which one runs
//! (`machine.h`). Random collectives, one behind the other on each rank, in small symmetric buffers, of which slots are used again soon.
//!
//! Shown are indices, lengths, alignment, what waits for what, and missing fences and releases behind stores: these come to other GPUs late and in any order. Loads
//! that a GPU makes too early are not (decision 040).

mod batches;
mod memory_channels;
mod p2p;
mod puts;
mod reductions;
mod stage;

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use libloading::Library;
use mccs_eval::workload::{Call, POISON, Place};
use mccs_ipc::types::{CollectiveKind, DataType, RedOp};
use mccs_kernels::cuda::{Algorithm, CollectiveCall, DirectArgs, Launch, SymmetricBufferLayout};
use mccs_kernels::reference;
use mccs_tests::seeds;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};

/// Turns that no collective of this size takes: it stands still.
const TURNS_MAX: u64 = 30_000_000;
/// Bytes of a buffer before and behind it, which nobody may write.
const MARGIN_BYTES: usize = 64;

/// The mirror of `simulated::Launch`.
#[repr(C)]
struct Begun {
    function: *const c_void,
    args: *const c_void,
    args_bytes: u32,
    grid: u32,
    threads: u32,
    stream: u32,
    word: *const u64,
    value: u64,
}

/// The mirror of `simulated::Deed`: after some turns, copies and then writes a word, all at once.
#[repr(C)]
struct Deed {
    turns: u64,
    from: u64,
    to: u64,
    bytes: u64,
    word: u64,
    value: u64,
}

impl Begun {
    /// As a launch of one thread.
    fn deed(deed: &Deed, stream: u32) -> Self {
        let (function, args, args_bytes) = (std::ptr::null(), (&raw const *deed).cast(), size_of::<Deed>() as u32);
        Begun { function, args, args_bytes, grid: 1, threads: 1, stream, word: std::ptr::null(), value: 0 }
    }

    /// Not before the symmetric buffer of its rank has counted so many operations.
    fn after(self, operations: u64, buffer: &Memory) -> Self {
        let word = (buffer.address() + SymmetricBufferLayout::COUNTER_OFFSET) as *const u64;
        Begun { word, value: operations << 32, ..self }
    }
}

type Simulate = unsafe extern "C" fn(*const Begun, u32, u64, u64, *mut u64, u64) -> u64;

struct Machine(Library);

/// Compiled once.
static MACHINE: LazyLock<Machine> = LazyLock::new(Machine::new);

impl Machine {
    /// Compiles it, against the headers that come with the CUDA compiler of `MCCS_NVCC`.
    fn new() -> Self {
        let compiler =
            std::env::var("MCCS_NVCC").expect("MCCS_NVCC names the CUDA compiler, beside which are its headers");
        let headers = Path::new(&compiler).ancestors().nth(2).expect("it is in bin").join("include");
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/simulated_kernels");
        let library = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels-{}.so", std::process::id()));
        let compiled = Command::new("g++")
            // No contraction of multiply and add, as for GPUs.
            .args(["-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC"])
            // Loads of several sources are used there alone.
            .args(["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-maybe-uninitialized", "-isystem"])
            .arg(headers)
            .arg("-I")
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../shim/include"))
            .arg("-I")
            .arg(&sources)
            .arg(format!("-DMCCS_SIMULATED=\"{}\"", sources.join("machine.h").display()))
            .arg(sources.join("machine.cpp"))
            .arg("-o")
            .arg(&library)
            .status();
        assert!(compiled.expect("g++").success(), "the kernels do not compile for a processor");
        // SAFETY: it has no constructors that do anything.
        let machine = Machine(unsafe { Library::new(&library) }.expect("a library"));
        std::fs::remove_file(&library).expect("removed");
        machine
    }

    fn begun<A>(&self, launch: &Launch<A>, stream: u32) -> Begun {
        Begun { stream, ..self.begun_as(launch.function, &launch.args, launch.grid, launch.block) }
    }

    /// A function by name, on the first stream.
    fn begun_as<A>(&self, name: &str, args: &A, grid: u32, threads: u32) -> Begun {
        // SAFETY: only its address is taken.
        let function = unsafe { self.0.get::<*const c_void>(name) };
        Begun {
            function: *function.unwrap_or_else(|error| panic!("{name}: {error}")),
            args: (&raw const *args).cast(),
            args_bytes: size_of::<A>() as u32,
            grid,
            threads,
            stream: 0,
            word: std::ptr::null(),
            value: 0,
        }
    }

    /// How many turns it took until all came to an end; `None` if they did not. The word is set after so many turns.
    fn run(&self, launches: &[Begun], seed: u64, abort: Option<(&mut u64, u64)>) -> Option<u64> {
        let (abort_word, abort_after) =
            abort.map_or((std::ptr::null_mut(), u64::MAX), |(word, after)| (&raw mut *word, after));
        // SAFETY: the function is so declared.
        let simulate = unsafe { self.0.get::<Simulate>("mccs_simulate") }.expect("a function");
        // SAFETY: the caller's launches name functions of the library and their arguments, whose memory lives.
        let turns =
            unsafe { simulate(launches.as_ptr(), launches.len() as u32, seed, TURNS_MAX, abort_word, abort_after) };
        (turns > 0).then_some(turns)
    }
}

/// Memory of a GPU, from an address that is a multiple of 4096 on.
struct Memory {
    words: Vec<u128>,
    first: usize,
}

impl Memory {
    fn new(bytes: u64) -> Self {
        let words = vec![0_u128; bytes as usize / 16 + 257];
        let first = (words.as_ptr().addr().next_multiple_of(4096) - words.as_ptr().addr()) / 16;
        Memory { words, first }
    }

    fn address(&self) -> u64 {
        self.words[self.first..].as_ptr().addr() as u64
    }

    fn word(&self, offset: u64) -> u64 {
        (self.words[self.first + offset as usize / 16] >> (offset % 16 * 8)) as u64
    }

    fn put(&mut self, offset: u64, bytes: &[u8]) {
        let at = 16 * self.first + offset as usize;
        bytemuck::cast_slice_mut(&mut self.words)[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// A tenant's buffer: `shift` bytes behind an address that is aligned.
struct Buffer {
    memory: Vec<u128>,
    begin: usize,
    bytes: usize,
}

impl Buffer {
    fn new(bytes: usize, shift: usize) -> Self {
        let begin = MARGIN_BYTES + shift;
        let memory = vec![u128::from_ne_bytes([POISON; 16]); (begin + bytes + MARGIN_BYTES).div_ceil(16)];
        Buffer { memory, begin, bytes }
    }

    /// 0 where it has nothing.
    fn address(&self) -> u64 {
        if self.bytes == 0 { 0 } else { self.begins_at() }
    }

    fn begins_at(&self) -> u64 {
        (self.memory.as_ptr().addr() + self.begin) as u64
    }

    fn all(&self) -> &[u8] {
        bytemuck::cast_slice(&self.memory)
    }

    fn data(&self) -> &[u8] {
        &self.all()[self.begin..self.begin + self.bytes]
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        let begin = self.begin + at;
        bytemuck::cast_slice_mut(&mut self.memory)[begin..begin + bytes.len()].copy_from_slice(bytes);
    }

    fn is_whole(&self) -> bool {
        let (all, end) = (self.all(), self.begin + self.bytes);
        all[..self.begin].iter().chain(&all[end..]).all(|byte| *byte == POISON)
    }
}

/// Buffers of a rank for a call.
struct Buffers {
    send: Buffer,
    /// None where the result goes into what is sent, or the other way round.
    recv: Option<Buffer>,
    addresses: [u64; 2],
    result: (usize, usize),
}

impl Buffers {
    fn new(call: &Call, rank: u32, place: Place) -> Self {
        let size = call.dtype.size_bytes();
        let [sent, received] = [call.send_count(rank) * size, call.recv_count(rank) * size];
        let [send_shift, recv_shift] = [place.send_shift, place.recv_shift].map(|shift| shift as usize * size);
        if let Some((input, output)) = call.in_place_elements(rank).filter(|_| place.is_in_place) {
            let [input, output] = [input, output].map(|element| element as usize * size);
            let mut buffer = Buffer::new(sent.max(received), recv_shift);
            buffer.write(input, &call.input(rank));
            let addresses = [input, output].map(|at| buffer.address() + at as u64);
            return Buffers { send: buffer, recv: None, addresses, result: (output, received) };
        }
        let (mut send, recv) = (Buffer::new(sent, send_shift), Buffer::new(received, recv_shift));
        send.write(0, &call.input(rank));
        let addresses = [send.address(), recv.address()];
        Buffers { send, recv: Some(recv), addresses, result: (0, received) }
    }

    fn result(&self) -> &[u8] {
        let (begin, bytes) = self.result;
        &self.recv.as_ref().unwrap_or(&self.send).data()[begin..begin + bytes]
    }

    fn are_whole(&self) -> bool {
        self.send.is_whole() && self.recv.as_ref().is_none_or(Buffer::is_whole)
    }
}

fn draw<T: Copy>(random: &mut StdRng, of: &[T]) -> T {
    *of.choose(random).expect("one of some")
}

/// Small symmetric buffers, so that slots are used again.
fn small_layout(random: &mut StdRng, nranks: u32) -> SymmetricBufferLayout {
    let [slot_bytes, ll_bytes, ll128_bytes] = [128, 1024, 1920].map(|most| 128 * random.random_range(1..=most / 128));
    let layout = SymmetricBufferLayout {
        nranks,
        blocks: random.random_range(1..=3),
        slots: random.random_range(2..=4),
        slot_bytes: slot_bytes.max(draw(random, &[128, 256, 1024])),
        ll_bytes,
        ll128_bytes,
        lanes: 8,
    };
    assert!(layout.is_valid(), "{layout:?}");
    layout
}

fn some_call(random: &mut StdRng, nranks: u32, seed: u64) -> Call {
    let kind = draw(random, CollectiveKind::ALL);
    let redop = if kind.reduces() { draw(random, RedOp::ALL) } else { RedOp::Sum };
    let root = if kind.has_root() { random.random_range(0..nranks) } else { 0 };
    let most = draw(random, &[3_u64, 60, 700, 3000]);
    let count = if kind == CollectiveKind::Barrier { 0 } else { random.random_range(0..=most) };
    Call { kind, dtype: draw(random, DataType::ALL), redop, root, count, nranks, seed }
}

/// The launch of all ranks, if that algorithm can.
fn launched(call: &Call, layout: &SymmetricBufferLayout, algorithm: Algorithm) -> Option<Vec<Launch<DirectArgs>>> {
    let Call { kind, dtype, redop: op, root, count, nranks, .. } = *call;
    let by = |rank| {
        let scalar_bits = reference::scalar_bits(dtype, call.scalar(rank));
        let call = CollectiveCall { kind, dtype, op, count, root, scalar_bits, is_scalar_address: false, rank, nranks };
        Launch::collective(&call, layout, algorithm, layout.blocks)
    };
    (0..nranks).map(by).collect()
}

/// Tells a launch where the ranks' symmetric buffers are.
fn name_symmetric_buffers(addresses: &mut [u64], symmetric: &[Memory]) {
    addresses.iter_mut().zip(symmetric).for_each(|(address, buffer)| *address = buffer.address());
}

/// A call of all ranks.
struct Called {
    call: Call,
    algorithm: Algorithm,
    place: Place,
    launches: Vec<Launch<DirectArgs>>,
    buffers: Vec<Buffers>,
}

impl Called {
    /// Whether it is a pipeline whose warps have more units than places.
    fn uses_places_again(&self) -> bool {
        let Launch { function, grid, block, .. } = self.launches[0];
        let shard_bytes = self.call.count * self.call.dtype.size_bytes() as u64 / u64::from(self.call.nranks);
        function.starts_with("mccs_pipeline") && shard_bytes / 480 > u64::from(4 * grid * block / 32)
    }
}

/// Calls that ranks make one behind the other.
struct Scene {
    seed: u64,
    layout: SymmetricBufferLayout,
    symmetric: Vec<Memory>,
    calls: Vec<Called>,
}

impl Scene {
    const CALLS: usize = 3;

    fn new(seed: u64, abort_word: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        // Few ranks and many have code of their own.
        let nranks = if random.random_ratio(1, 8) { random.random_range(5..=8) } else { random.random_range(2..=4) };
        let layout = small_layout(&mut random, nranks);
        Scene::of(seed, abort_word, random, layout, |random, seed| {
            (some_call(random, nranks, seed), draw(random, &Algorithm::ALL))
        })
    }

    /// Reductions that most often are pipelines of lines, which have four places for each warp in half a slot.
    fn of_pipelines(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let nranks = random.random_range(3..=4);
        let layout = SymmetricBufferLayout {
            ll128_bytes: 128 * random.random_range(30..=90),
            ..small_layout(&mut random, nranks)
        };
        Scene::of(seed, 0, random, layout, |random, seed| {
            let kind = draw(random, &[CollectiveKind::AllReduce, CollectiveKind::Reduce]);
            let (dtype, redop) = (draw(random, DataType::ALL), draw(random, RedOp::ALL));
            let count = random.random_range(0..=40_000 / dtype.size_bytes() as u64);
            let root = if kind.has_root() { random.random_range(0..nranks) } else { 0 };
            (Call { kind, dtype, redop, root, count, nranks, seed }, Algorithm::Ll128TwoShot)
        })
    }

    /// Reduces along chains, of many times as many chunks as there are slots.
    fn of_chains(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let nranks = random.random_range(3..=4);
        let layout =
            SymmetricBufferLayout { slot_bytes: 128 * random.random_range(1..=3), ..small_layout(&mut random, nranks) };
        Scene::of(seed, 0, random, layout, |random, seed| {
            let (kind, dtype, redop) = (CollectiveKind::Reduce, draw(random, DataType::ALL), draw(random, RedOp::ALL));
            let most = draw(random, &[300, 20_000]) / dtype.size_bytes() as u64;
            let count = random.random_range(0..=most);
            let root = random.random_range(0..nranks);
            (Call { kind, dtype, redop, root, count, nranks, seed }, Algorithm::SimpleChain)
        })
    }

    fn of(
        seed: u64,
        abort_word: u64,
        mut random: StdRng,
        layout: SymmetricBufferLayout,
        mut some: impl FnMut(&mut StdRng, u64) -> (Call, Algorithm),
    ) -> Self {
        let nranks = layout.nranks;
        let symmetric: Vec<_> = (0..nranks).map(|_| Memory::new(layout.bytes())).collect();
        let mut calls = Vec::new();
        while calls.len() < Self::CALLS {
            let (call, algorithm) = some(&mut random, seed + calls.len() as u64);
            let Some(mut launches) = launched(&call, &layout, algorithm) else { continue };
            if random.random_ratio(1, 2) {
                launches.iter_mut().for_each(Launch::release);
            }
            let place = Place::drawn(seed, calls.len());
            let buffers: Vec<_> = (0..nranks).map(|rank| Buffers::new(&call, rank, place)).collect();
            for (Launch { args, .. }, buffers) in launches.iter_mut().zip(&buffers) {
                ([args.send, args.recv], args.abort_word) = (buffers.addresses, abort_word);
                name_symmetric_buffers(&mut args.symmetric, &symmetric);
            }
            calls.push(Called { call, algorithm, place, launches, buffers });
        }
        Scene { seed, layout, symmetric, calls }
    }

    fn begun(&self) -> Vec<Begun> {
        let launches = self.calls.iter().flat_map(|called| (0..).zip(&called.launches));
        launches.map(|(rank, launch)| MACHINE.begun(launch, rank)).collect()
    }

    fn check(&self, holds: bool, what: &str) {
        let Scene { seed, layout, calls, .. } = self;
        let called =
            calls.iter().map(|Called { call, algorithm, place, .. }| format!("{call:?} by {algorithm:?} {place:?}"));
        assert!(holds, "seed {seed}: {what}; {layout:?}: {:#?}", called.collect::<Vec<_>>());
    }

    /// Runs it, and checks every element.
    fn is_right(&self) {
        self.check(MACHINE.run(&self.begun(), self.seed, None).is_some(), "nobody goes on");
        for (number, Called { call, buffers, .. }) in self.calls.iter().enumerate() {
            for (rank, buffers) in (0..).zip(buffers) {
                let wrong = call.wrong_elements(rank, buffers.result());
                self.check(wrong == 0, &format!("{wrong} wrong elements in call {number}, rank {rank}"));
            }
        }
        self.check_ends(self.layout.nranks);
    }

    /// Checks that hold however kernels end: nobody wrote where nothing is to be written, and each was counted on the symmetric buffers of
    /// the ranks that called.
    fn check_ends(&self, ranks: u32) {
        for (number, called) in self.calls.iter().enumerate() {
            for (rank, buffers) in called.buffers.iter().enumerate() {
                self.check(buffers.are_whole(), &format!("written beside the buffers of call {number}, rank {rank}"));
            }
        }
        for buffer in &self.symmetric[..ranks as usize] {
            let ended = SymmetricBufferLayout::ended(buffer.word(SymmetricBufferLayout::COUNTER_OFFSET));
            self.check(ended == Self::CALLS as u64, &format!("{ended} operations were counted"));
        }
    }
}

#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn collectives_in_any_order_of_threads() {
    seeds(600).for_each(|seed| Scene::new(seed, 0).is_right());
}

#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn pipelines_in_any_order_of_threads() {
    let (mut scenes, mut again) = (0, 0);
    for seed in seeds(100) {
        let scene = Scene::of_pipelines(seed);
        (scenes, again) = (scenes + 1, again + scene.calls.iter().filter(|called| called.uses_places_again()).count());
        scene.is_right();
    }
    assert!(scenes < 100 || again > scenes / 2, "{again} pipelines that use places again in {scenes} scenes");
}

#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn chains_in_any_order_of_threads() {
    let (mut scenes, mut dealt) = (0, 0);
    for seed in seeds(100) {
        let scene = Scene::of_chains(seed);
        let chunks = |called: &Called| called.call.count * called.call.dtype.size_bytes() as u64 / 384;
        let is_long = |called: &&Called| chunks(called) > 2 * u64::from(scene.layout.blocks);
        (scenes, dealt) = (scenes + 1, dealt + scene.calls.iter().filter(is_long).count());
        scene.is_right();
    }
    assert!(scenes < 100 || dealt > scenes / 2, "{dealt} chains whose chunks are dealt out in {scenes} scenes");
}

/// How many elements are wrong of what ranks gather of each other's results, where the gather is on another stream, which goes on by the count of the
/// operation before.
fn wrong_on_a_second_stream(seed: u64, released: bool) -> usize {
    let mut random = StdRng::seed_from_u64(seed);
    let nranks = random.random_range(2..=4);
    let layout = small_layout(&mut random, nranks);
    let mut launches = |call: &Call| loop {
        let algorithm = draw(&mut random, &Algorithm::ALL);
        if let Some(mut all) = launched(call, &layout, algorithm) {
            if released {
                all.iter_mut().for_each(Launch::release);
            }
            break all;
        }
    };
    let count = 1 + seed % 60;
    let kind = [CollectiveKind::AllReduce, CollectiveKind::AllGather, CollectiveKind::AllToAll][seed as usize % 3];
    let first = Call { kind, dtype: DataType::U32, redop: RedOp::Sum, root: 0, count, nranks, seed };
    let bytes = first.recv_count(0) * first.dtype.size_bytes();
    let gather = Call { kind: CollectiveKind::AllGather, dtype: DataType::U8, count: bytes as u64, ..first };
    let (mut first_launches, mut gather_launches) = (launches(&first), launches(&gather));
    let symmetric: Vec<_> = (0..nranks).map(|_| Memory::new(layout.bytes())).collect();
    let buffers: Vec<_> = (0..nranks).map(|rank| Buffers::new(&first, rank, Place::drawn(seed, 0))).collect();
    let gathered: Vec<_> = (0..nranks).map(|_| Buffer::new(bytes * nranks as usize, 0)).collect();
    for (rank, buffers) in buffers.iter().enumerate() {
        let (first, gather) = (&mut first_launches[rank].args, &mut gather_launches[rank].args);
        [first.send, first.recv] = buffers.addresses;
        [gather.send, gather.recv] = [buffers.addresses[1], gathered[rank].address()];
        for args in [first, gather] {
            name_symmetric_buffers(&mut args.symmetric, &symmetric);
        }
    }
    let begun: Vec<_> = (0..)
        .zip(first_launches.iter().zip(&gather_launches).zip(&symmetric))
        .flat_map(|(rank, ((first, gather), buffer))| {
            [MACHINE.begun(first, 2 * rank), MACHINE.begun(gather, 2 * rank + 1).after(1, buffer)]
        })
        .collect();
    assert!(MACHINE.run(&begun, seed, None).is_some(), "seed {seed}: nobody goes on");
    let right: Vec<u8> = (0..nranks).flat_map(|rank| first.expected(rank)).collect();
    gathered.iter().map(|gathered| gathered.data().iter().zip(&right).filter(|(is, right)| is != right).count()).sum()
}

#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn a_second_stream_sees_what_the_first_has_received_if_operations_count_with_a_release() {
    let (mut scenes, mut too_early) = (0, 0);
    for seed in seeds(200) {
        assert_eq!(wrong_on_a_second_stream(seed, true), 0, "seed {seed}");
        scenes += 1;
        too_early += u32::from(wrong_on_a_second_stream(seed, false) > 0);
    }
    assert!(scenes < 100 || too_early > 0, "nobody is too early without a release either: this shows nothing");
}

/// At any moment, and where the last rank never calls.
#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn aborted_collectives_end() {
    for seed in seeds(40) {
        let mut abort_word = Box::new(0);
        let scene = Scene::new(seed, (&raw const *abort_word).addr() as u64);
        let last = scene.layout.nranks - 1;
        let mut begun = scene.begun();
        begun.retain(|begun| seed % 2 == 0 || begun.stream != last);
        let after = StdRng::seed_from_u64(!seed).random_range(0..30_000);
        let turns = MACHINE.run(&begun, seed, Some((&mut *abort_word, after)));
        scene.check(turns.is_some(), "nobody goes on, though it was aborted");
        scene.check_ends(if seed % 2 == 0 { last + 1 } else { last });
    }
}
