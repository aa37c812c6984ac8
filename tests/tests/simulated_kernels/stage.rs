//! The host-staging kernel (`kernels/cuda/stage.cu`), and a service that takes what it brings and gives the result.

use mccs_eval::workload::POISON;
use mccs_kernels::cuda::{Launch, STAGE_FUNCTION, StageArgs};
use mccs_tests::seeds;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::{Begun, Buffer, Deed, MACHINE, draw};

/// Value by which the service lets every wait go on.
const RELEASED: u64 = i64::MAX as u64;

/// Meaning of the values in arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Values {
    /// The values themselves, with no word.
    Themselves,
    /// They count from the number that is in a word.
    Ticket,
    /// The word has 0: they stand for nothing.
    NoTicket,
    /// They are 0: nothing is told, nothing waited for, whatever the word has.
    Zero,
}

/// An operation on a stream: one kernel, or one that brings and one that fetches.
struct Staged {
    send: Buffer,
    slot_in: Buffer,
    slot_out: Buffer,
    recv: Buffer,
    input: Vec<u8>,
    output: Vec<u8>,
    /// Bytes in the slot when the service was told.
    seen: Vec<u8>,
    launches: Vec<Launch<StageArgs>>,
    takes: Deed,
    gives: Deed,
}

struct Scene {
    seed: u64,
    values: Values,
    /// Nobody gives results; after some turns all waits are let go on.
    released: Option<Deed>,
    /// Ready, done, ticket.
    words: Box<[u64; 3]>,
    first: u64,
    staged: Vec<Staged>,
}

impl Scene {
    fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let random = &mut random;
        let values = draw(random, &[Values::Themselves, Values::Ticket, Values::NoTicket, Values::Zero]);
        // Also so high that a value less has another sign in its lower half.
        let first = draw(random, &[1, 2, 1 << 31, (1 << 40) + 7]) + random.random_range(0..3);
        let ticket = if values == Values::NoTicket { 0 } else { first };
        let words = Box::new([first - 1, first - 1, ticket]);
        let [ready_word, done_word, ticket_word] = [0, 1, 2].map(|at| words[at..].as_ptr().addr() as u64);
        let does_wait = matches!(values, Values::Themselves | Values::Ticket);
        let is_released = does_wait && random.random_ratio(1, 4);
        let turns = random.random_range(0..2000);
        let release = Deed { turns, from: 0, to: 0, bytes: 0, word: done_word, value: RELEASED };
        let mut staged = Vec::new();
        for number in 0..random.random_range(1..=3) {
            let value = match values {
                Values::Themselves => first + number,
                Values::Ticket | Values::NoTicket => 1 + number,
                Values::Zero => 0,
            };
            let most = draw(random, &[0, 40, 3000, 20_000]);
            let [in_bytes, out_bytes] = [0; 2].map(|_| random.random_range(0..=most));
            // Units of 16, 4 and 1 bytes; each way has its own.
            let [send_shift, in_shift, out_shift, recv_shift] = [0; 4].map(|_| draw(random, &[0, 0, 0, 2, 4, 12, 13]));
            let [mut send, slot_in] = [Buffer::new(in_bytes, send_shift), Buffer::new(in_bytes, in_shift)];
            let [mut slot_out, recv] = [Buffer::new(out_bytes, out_shift), Buffer::new(out_bytes, recv_shift)];
            let [input, output] = [in_bytes, out_bytes].map(|bytes| (0..bytes).map(|_| random.random()).collect());
            let (input, output): (Vec<u8>, Vec<u8>) = (input, output);
            send.write(0, &input);
            // Whoever waits for nothing finds the result there.
            if is_released || !does_wait {
                slot_out.write(0, &output);
            }
            let seen = vec![POISON; in_bytes];
            let args = StageArgs {
                send: send.begins_at(),
                slot_in: slot_in.begins_at(),
                slot_out: slot_out.begins_at(),
                recv: recv.begins_at(),
                ready_word,
                ready_value: value,
                done_word,
                done_value: value,
                ticket_word: if values == Values::Themselves { 0 } else { ticket_word },
                in_bytes: in_bytes as u64,
                out_bytes: out_bytes as u64,
            };
            let all = if random.random_ratio(1, 2) {
                vec![args]
            } else {
                vec![
                    StageArgs { done_value: 0, out_bytes: 0, ..args },
                    StageArgs { ready_value: 0, in_bytes: 0, ..args },
                ]
            };
            let launch = |args: StageArgs| Launch { function: STAGE_FUNCTION, grid: 1, block: args.threads(), args };
            let takes = Deed {
                turns: 0,
                from: args.slot_in,
                to: seen.as_ptr().addr() as u64,
                bytes: in_bytes as u64,
                word: 0,
                value: 0,
            };
            let gives = Deed {
                turns: draw(random, &[2, 500]) * random.random_range(0..100) / 100,
                from: output.as_ptr().addr() as u64,
                to: args.slot_out,
                bytes: out_bytes as u64,
                word: done_word,
                value: first + number,
            };
            let launches = all.into_iter().map(launch).collect();
            staged.push(Staged { send, slot_in, slot_out, recv, input, output, seen, launches, takes, gives });
        }
        Scene { seed, values, released: is_released.then_some(release), words, first, staged }
    }

    fn begun(&self) -> Vec<Begun> {
        let launches = self.staged.iter().flat_map(|staged| &staged.launches);
        let mut begun: Vec<_> = launches.map(|launch| MACHINE.begun(launch, 0)).collect();
        if let Some(release) = &self.released {
            begun.push(Begun::deed(release, 1));
        }
        if matches!(self.values, Values::Themselves | Values::Ticket) {
            for (value, staged) in (self.first..).zip(&self.staged) {
                let takes = Begun::deed(&staged.takes, 2);
                begun.push(Begun { word: &raw const self.words[0], value, ..takes });
                if self.released.is_none() {
                    begun.push(Begun::deed(&staged.gives, 2));
                }
            }
        }
        begun
    }

    fn is_right(&self) {
        let (seed, values) = (self.seed, self.values);
        let args: Vec<_> = self.staged.iter().flat_map(|staged| &staged.launches).map(|launch| launch.args).collect();
        let shows = || format!("seed {seed}, {values:?}, released {}: {args:#?}", self.released.is_some());
        assert!(MACHINE.run(&self.begun(), seed, None).is_some(), "nobody goes on: {}", shows());
        let tells = matches!(values, Values::Themselves | Values::Ticket);
        for (number, staged) in self.staged.iter().enumerate() {
            let Staged { send, slot_in, slot_out, recv, input, output, seen, .. } = staged;
            assert!(slot_in.data() == input, "operation {number} brought something else: {}", shows());
            assert!(!tells || seen == input, "operation {number} told too early: {}", shows());
            assert!(recv.data() == output, "operation {number} fetched something else: {}", shows());
            assert!(send.data() == input && slot_out.data() == output, "{number} wrote to a source: {}", shows());
            let is_whole = [send, slot_in, slot_out, recv].into_iter().all(Buffer::is_whole);
            assert!(is_whole, "operation {number} wrote beside buffers: {}", shows());
        }
        let count = if tells { self.staged.len() as u64 } else { 0 };
        let last = self.first - 1 + count;
        let done = if self.released.is_some() { RELEASED } else { last };
        let ticket = if values == Values::NoTicket { 0 } else { self.first };
        assert_eq!(*self.words, [last, done, ticket], "words: {}", shows());
    }
}

#[test]
#[ignore = "needs the headers of a CUDA compiler"]
fn host_staging_in_any_order_of_threads() {
    let (mut scenes, mut by_values, mut released) = (0, [0; 4], 0);
    for seed in seeds(300) {
        let scene = Scene::new(seed);
        by_values[scene.values as usize] += 1;
        (scenes, released) = (scenes + 1, released + u32::from(scene.released.is_some()));
        scene.is_right();
    }
    let are_many = by_values.iter().all(|of| *of > scenes / 8) && released > scenes / 20;
    assert!(scenes < 100 || are_many, "{by_values:?}, {released} released, of {scenes}");
}
