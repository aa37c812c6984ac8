//! Kernels that reduce what is in one GPU's memory: `mccs_reduce_*`, piece by piece as sources arrive, and `mccs_combine_*`, of hosts' parts.

use mccs_eval::workload::POISON;
use mccs_ipc::types::{DataType, RedOp};
use mccs_kernels::cuda::{CombineArgs, Launch, ReduceArgs};
use mccs_kernels::reference::{self, Value};
use mccs_tests::seeds;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::{Begun, Buffer, Deed, MACHINE, draw};

/// Value of a word before anybody is told.
const BEFORE: u64 = 7;

/// Operands of a reduction, and its operator.
#[derive(Debug)]
struct Reduced {
    dtype: DataType,
    op: RedOp,
    divisor: Option<u32>,
    scalars: Vec<u64>,
    inputs: Vec<Vec<u8>>,
}

impl Reduced {
    /// Values that are rounded, so that the order shows. Integers wrap.
    fn drawn(random: &mut StdRng, of: u32, bytes_max: u64, is_scaled: bool) -> Self {
        let dtype = draw(random, DataType::ALL);
        let op = if is_scaled { RedOp::PreMulSum } else { draw(random, RedOp::ALL) };
        let op = if op == RedOp::PreMulSum && !is_scaled { RedOp::Sum } else { op };
        let divisor = (op == RedOp::Avg).then(|| random.random_range(1..=24));
        let count = random.random_range(0..=bytes_max / dtype.size_bytes() as u64) as usize;
        let inputs = (0..of).map(|_| {
            let mut input: Vec<u8> = (0..count * dtype.size_bytes()).map(|_| random.random()).collect();
            for index in 0..count {
                let number = random.random_range(0.25..1.0) * draw(random, &[-1.0, 1.0]);
                match reference::from_integer(dtype, 0) {
                    Value::Single(_) => reference::write(dtype, &mut input, index, Value::Single(number as f32)),
                    Value::Double(_) => reference::write(dtype, &mut input, index, Value::Double(number)),
                    Value::Signed(_) | Value::Unsigned(_) => {}
                }
            }
            input
        });
        let inputs = inputs.collect();
        let factors = if is_scaled { of } else { 0 };
        let scalars = (0..factors).map(|_| reference::scalar_bits(dtype, random.random_range(1..=5))).collect();
        Reduced { dtype, op, divisor, scalars, inputs }
    }

    fn size(&self) -> usize {
        self.dtype.size_bytes()
    }

    fn bytes(&self) -> usize {
        self.inputs[0].len()
    }

    /// All elements, one by one.
    fn result(&self) -> Vec<u8> {
        let inputs: Vec<_> = self.inputs.iter().map(Vec::as_slice).collect();
        let Reduced { dtype, scalars, .. } = self;
        let op = if self.op == RedOp::Avg { RedOp::Sum } else { self.op };
        let mut result = vec![0; self.bytes()];
        for index in 0..self.bytes() / self.size() {
            let sum = reference::reduce_element(*dtype, op, &inputs, scalars, index);
            let by = self.divisor.unwrap_or(1);
            let value = match sum {
                Value::Single(sum) => Value::Single(sum / by as f32),
                Value::Double(sum) => Value::Double(sum / f64::from(by)),
                Value::Signed(sum) => Value::Signed(sum / i64::from(by)),
                Value::Unsigned(sum) => Value::Unsigned(sum / u64::from(by)),
            };
            reference::write(*dtype, &mut result, index, value);
        }
        result
    }

    fn what(&self) -> String {
        let Reduced { dtype, op, divisor, scalars, inputs } = self;
        let (of, bytes) = (inputs.len(), self.bytes());
        format!("{op:?} of {of} times {bytes} bytes of {dtype:?}, divided by {divisor:?}, scaled by {scalars:?}")
    }
}

/// A buffer whose data begin at a multiple of 16 bytes, or at any element.
fn some_buffer(random: &mut StdRng, bytes: usize, size: usize, is_aligned: bool) -> Buffer {
    let elements = if is_aligned { 0 } else { random.random_range(0..=16 / size) };
    Buffer::new(bytes, elements * size)
}

/// A reduction piece by piece, those who bring sources, and those who look at each piece as soon as they are told.
struct Pieces {
    seed: u64,
    reduced: Reduced,
    launch: Launch<ReduceArgs>,
    /// By source.
    sources: Vec<Buffer>,
    /// Which of them the first destination is, if it is one.
    in_place: Option<usize>,
    destinations: Vec<Buffer>,
    /// Words by source and piece.
    flags: Vec<Vec<u64>>,
    done: Vec<u64>,
    counters: Vec<u32>,
    scalar: Box<u64>,
    /// Bytes that were seen when words told of pieces.
    seen: Vec<u8>,
    /// Deeds that bring a piece of a source; by source.
    brings: Vec<Vec<Deed>>,
    looks: Vec<(u64, u64, Deed)>,
}

impl Pieces {
    fn new(seed: u64, abort_word: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let random = &mut random;
        let is_scaled = random.random_ratio(1, 4);
        let sources = random.random_range(1..=8);
        let most = draw(random, &[40, 700, 12_000]);
        let reduced = Reduced::drawn(random, sources, most, is_scaled);
        let (bytes, size) = (reduced.bytes() as u64, reduced.size());
        let blocks = random.random_range(1..=4);
        let mut launch = Launch::reduce(reduced.dtype, reduced.op, reduced.divisor, is_scaled, blocks);
        launch.block = draw(random, &[32, 96, launch.block]);
        let piece_bytes = 16 * random.random_range(1..=bytes.div_ceil(16).max(1));
        let pieces = bytes.div_ceil(piece_bytes).max(1);
        let is_aligned = random.random_ratio(1, 2);
        let buffers: Vec<_> = (0..sources).map(|_| some_buffer(random, bytes as usize, size, is_aligned)).collect();
        let in_place = random.random_ratio(1, 3).then(|| random.random_range(0..buffers.len()));
        let apart = random.random_range(u32::from(in_place.is_none())..=4);
        let destinations = (0..apart).map(|_| some_buffer(random, bytes as usize, size, is_aligned)).collect();
        // One word that grows, or one a piece.
        let words = |random: &mut StdRng| {
            let is_one = random.random_ratio(1, 2);
            let (stride, step, count) = if is_one { (0, 3, 1) } else { (16, draw(random, &[0, 1]), 2 * pieces) };
            (vec![BEFORE; count as usize], stride, step)
        };
        let (done, done_stride, done_step) = words(random);
        let (_, flag_stride, flag_step) = words(random);
        let count = if flag_stride == 0 { 1 } else { 2 * pieces };
        let mut made = Pieces {
            seed,
            sources: buffers,
            in_place,
            destinations,
            flags: vec![vec![BEFORE; count as usize]; sources as usize],
            done,
            counters: vec![0; pieces as usize],
            scalar: Box::new(0),
            seen: vec![POISON; bytes as usize],
            brings: Vec::new(),
            looks: Vec::new(),
            launch,
            reduced,
        };
        let args = &mut made.launch.args;
        (args.bytes, args.piece_bytes, args.pieces) = (bytes, piece_bytes, pieces as u32);
        (args.source_count, args.destination_count) = (sources, apart + u32::from(in_place.is_some()));
        (args.flag_value, args.flag_step, args.flag_stride) = (BEFORE + 5, flag_step, flag_stride);
        (args.done_value, args.done_step, args.done_stride) = (BEFORE + 9, done_step, done_stride);
        args.counters = made.counters.as_ptr().addr() as u64;
        args.abort_word = abort_word;
        if random.random_ratio(7, 8) {
            args.done_word = made.done.as_ptr().addr() as u64;
        }
        if is_scaled {
            args.scalars[..sources as usize].copy_from_slice(&made.reduced.scalars);
            if sources == 1 && random.random_ratio(1, 2) {
                made.lay_scalar();
            }
        }
        made.name_buffers();
        made.bring(random);
        made.look(random);
        made
    }

    /// The only source's factor, as an element in memory.
    fn lay_scalar(&mut self) {
        let (dtype, size, bits) = (self.reduced.dtype, self.reduced.size(), self.reduced.scalars[0]);
        let value = match reference::from_integer(dtype, 0) {
            Value::Single(_) => Value::Single(f64::from_bits(bits) as f32),
            Value::Double(_) => Value::Double(f64::from_bits(bits)),
            Value::Signed(_) => Value::Signed(bits as i64),
            Value::Unsigned(_) => Value::Unsigned(bits),
        };
        reference::write(dtype, &mut bytemuck::bytes_of_mut(&mut *self.scalar)[..size], 0, value);
        self.launch.args.scalars[0] = 0;
        self.launch.scaled_from((&raw const *self.scalar).addr() as u64);
    }

    fn name_buffers(&mut self) {
        let args = &mut self.launch.args;
        for (address, source) in args.sources.iter_mut().zip(&self.sources) {
            *address = source.begins_at();
        }
        let in_place = self.in_place.map(|source| &self.sources[source]);
        for (address, to) in args.destinations.iter_mut().zip(in_place.into_iter().chain(&self.destinations)) {
            *address = to.begins_at();
        }
    }

    /// Some sources are there, all others come piece by piece.
    fn bring(&mut self, random: &mut StdRng) {
        let args = &mut self.launch.args;
        for (number, input) in self.reduced.inputs.iter().enumerate() {
            let mut brings = Vec::new();
            if random.random_ratio(1, 3) {
                self.sources[number].write(0, input);
            } else {
                let flags = self.flags[number].as_ptr().addr() as u64;
                args.flags[number] = flags;
                for piece in 0..u64::from(args.pieces) {
                    let at = piece * args.piece_bytes;
                    brings.push(Deed {
                        turns: draw(random, &[2, 60, 400]) * random.random_range(0..100) / 100,
                        from: input.as_ptr().addr() as u64 + at,
                        to: args.sources[number] + at,
                        bytes: args.piece_bytes.min(args.bytes - at),
                        word: flags + piece * args.flag_stride,
                        value: args.flag_value + piece * args.flag_step,
                    });
                }
            }
            self.brings.push(brings);
        }
    }

    fn look(&mut self, random: &mut StdRng) {
        let args = &self.launch.args;
        for piece in (0..u64::from(args.pieces)).filter(|_| args.done_word != 0) {
            let at = piece * args.piece_bytes;
            let deed = Deed {
                turns: 0,
                from: draw(random, &args.destinations[..args.destination_count as usize]) + at,
                to: self.seen.as_ptr().addr() as u64 + at,
                bytes: args.piece_bytes.min(args.bytes - at),
                word: 0,
                value: 0,
            };
            let value = args.done_value + piece * args.done_step;
            self.looks.push((args.done_word + piece * args.done_stride, value, deed));
        }
    }

    /// All that come to an end if every source comes.
    fn begun(&self) -> Vec<Begun> {
        let mut begun = vec![MACHINE.begun(&self.launch, 0)];
        for (stream, brings) in (1..).zip(&self.brings) {
            begun.extend(brings.iter().map(|deed| Begun::deed(deed, stream)));
        }
        for (stream, (word, value, deed)) in (100..).zip(&self.looks) {
            begun.push(Begun { word: *word as *const u64, value: *value, ..Begun::deed(deed, stream) });
        }
        begun
    }

    fn check(&self, holds: bool, what: &str) {
        let Pieces { seed, launch, in_place, .. } = self;
        assert!(holds, "seed {seed}: {what}; {}, in place {in_place:?}, {:?}", self.reduced.what(), launch.args);
    }

    fn is_right(&self) {
        self.check(MACHINE.run(&self.begun(), self.seed, None).is_some(), "nobody goes on");
        let (result, args) = (self.reduced.result(), &self.launch.args);
        for (number, (source, input)) in self.sources.iter().zip(&self.reduced.inputs).enumerate() {
            let wanted = if self.in_place == Some(number) { &result } else { input };
            self.check(source.data() == wanted, &format!("wrong data at source {number}"));
        }
        for (number, destination) in self.destinations.iter().enumerate() {
            self.check(destination.data() == result, &format!("a wrong result at destination {number}"));
        }
        if args.done_word != 0 {
            self.check(self.seen == result, "a piece was not there when it was told of");
        }
        let last = u64::from(args.pieces) - 1;
        for piece in (0..=last).filter(|piece| args.done_stride > 0 || *piece == last) {
            let told = self.done[(piece * args.done_stride / 8) as usize];
            let value = if args.done_word == 0 { BEFORE } else { args.done_value + piece * args.done_step };
            self.check(told == value, &format!("{told} was told of piece {piece}"));
        }
        self.check_ends();
        self.check(self.counters.iter().all(|counter| *counter == 0), "counters are not zero again");
    }

    /// Checks that hold however it ends.
    fn check_ends(&self) {
        let mut buffers = self.sources.iter().chain(&self.destinations);
        self.check(buffers.all(Buffer::is_whole), "written beside a buffer");
        // Words lie 16 bytes apart; between them nobody writes.
        let words = self.flags.iter().chain([&self.done]);
        let mut between = words.flat_map(|words| words.iter().skip(1).step_by(2));
        self.check(between.all(|word| *word == BEFORE), "written between words");
    }
}

#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn reductions_of_pieces_in_any_order_of_threads() {
    let (mut scenes, mut several) = (0, 0);
    for seed in seeds(300) {
        let scene = Pieces::new(seed, 0);
        let waits = scene.brings.iter().any(|brings| !brings.is_empty());
        (scenes, several) = (scenes + 1, several + u32::from(scene.launch.args.pieces > 2 && waits));
        scene.is_right();
    }
    assert!(scenes < 100 || several > scenes / 5, "{several} of {scenes} wait for several pieces");
}

/// At any moment, where a source does not come.
#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn aborted_reductions_end() {
    let (mut scenes, mut untold) = (0, 0);
    for seed in seeds(60) {
        let mut abort_word = Box::new(0);
        let scene = Pieces::new(seed, (&raw const *abort_word).addr() as u64);
        let Some(missing) = scene.brings.iter().position(|brings| !brings.is_empty()) else { continue };
        let mut begun = scene.begun();
        let last = u64::from(scene.launch.args.pieces) - 1;
        begun.retain(|begun| begun.word.is_null());
        let of_missing = begun.iter().rposition(|begun| begun.stream as usize == missing + 1).expect("it has some");
        begun.remove(of_missing);
        let after = StdRng::seed_from_u64(!seed).random_range(0..20_000);
        let turns = MACHINE.run(&begun, seed, Some((&mut *abort_word, after)));
        scene.check(turns.is_some(), "nobody goes on, though it was aborted");
        scene.check_ends();
        let args = &scene.launch.args;
        let told = scene.done[(last * args.done_stride / 8) as usize];
        let value = args.done_value + last * args.done_step;
        scene.check(told < value, "it told of a piece of which a source is missing");
        (scenes, untold) = (scenes + 1, untold + u32::from(args.done_word != 0));
    }
    assert!(scenes < 20 || untold > scenes / 2, "{untold} of {scenes} would tell");
}

#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn combinations_of_parts_in_any_order_of_threads() {
    let mut in_place = 0;
    let mut scenes = 0;
    for seed in seeds(300) {
        let mut random = StdRng::seed_from_u64(seed);
        let random = &mut random;
        let parts = random.random_range(1..=12);
        let most = draw(random, &[40, 700, 9000]);
        let reduced = Reduced::drawn(random, parts, most, false);
        let (bytes, size) = (reduced.bytes(), reduced.size());
        let blocks = random.random_range(1..=4);
        let mut launch = Launch::combine_parts(reduced.dtype, reduced.op, reduced.divisor, blocks);
        launch.block = draw(random, &[32, 96, launch.block]);
        let is_aligned = random.random_ratio(1, 2);
        let gap = if is_aligned { draw(random, &[0, 16, 128]) } else { size * random.random_range(0..=20) };
        let stride = if is_aligned { bytes.next_multiple_of(16) } else { bytes } + gap;
        let mut slots = some_buffer(random, parts as usize * stride, size, is_aligned);
        let mut own = some_buffer(random, bytes, size, is_aligned);
        let apart = some_buffer(random, bytes, size, is_aligned);
        let own_place = random.random_range(0..=parts);
        for (place, input) in (0..).zip(&reduced.inputs) {
            if place == own_place { own.write(0, input) } else { slots.write(place as usize * stride, input) }
        }
        let part_at = |place: u32| {
            if place == own_place { own.begins_at() } else { slots.begins_at() + u64::from(place) * stride as u64 }
        };
        // Elsewhere, or where a part lies, which may be the own one.
        let target = random.random_ratio(1, 2).then(|| random.random_range(0..parts));
        let to = target.map_or(apart.begins_at(), part_at);
        let CombineArgs { first, own: own_at, .. } = &mut launch.args;
        (*first, *own_at) = (slots.begins_at(), own.begins_at());
        (launch.args.stride, launch.args.bytes, launch.args.to) = (stride as u64, bytes as u64, to);
        (launch.args.parts, launch.args.own_place) = (parts, own_place);
        let shows = || format!("seed {seed}, {}, into {target:?}: {:?}", reduced.what(), launch.args);
        assert!(MACHINE.run(&[MACHINE.begun(&launch, 0)], seed, None).is_some(), "nobody goes on: {}", shows());
        let result = reduced.result();
        let mut wanted = [vec![POISON; slots.bytes], vec![POISON; bytes], vec![POISON; bytes]];
        for (place, input) in (0..parts).zip(&reduced.inputs) {
            let data = if target == Some(place) { &result } else { input };
            let (buffer, at) = if place == own_place { (1, 0) } else { (0, place as usize * stride) };
            wanted[buffer][at..at + bytes].copy_from_slice(data);
        }
        if target.is_none() {
            wanted[2].copy_from_slice(&result);
        }
        for (name, buffer, wanted) in
            [("slots", &slots, &wanted[0]), ("own", &own, &wanted[1]), ("apart", &apart, &wanted[2])]
        {
            assert!(buffer.data() == wanted, "wrong data in {name}: {}", shows());
            assert!(buffer.is_whole(), "written beside {name}: {}", shows());
        }
        (scenes, in_place) = (scenes + 1, in_place + u32::from(target.is_some()));
    }
    assert!(scenes < 100 || in_place > scenes / 4, "{in_place} of {scenes} in place");
}
