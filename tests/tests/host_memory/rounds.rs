//! Small collectives that ranks do among themselves, mixed with all that the service does: same order, same results.

use mccs::{DataType, RedOp};
use mccs_eval::workload::{Call, POISON};
use mccs_ipc::types::CollectiveKind;
use mccs_tests::{Rank, TestService};

/// Rounds up to 256 bytes, so that short calls go both ways.
const SETTINGS: &str = "[host_device]\nshm_exchange_limit = \"256B\"\ninline_bytes = \"4KiB\"\n";

/// SplitMix64: decisions from a seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }
}

/// A call that all ranks make, its stream, and whether each rank sends a message to the next one behind it.
type Step = (Call, usize, bool);

/// The calls that all ranks make, in order.
fn program(seed: u64, nranks: u32, length: usize) -> Vec<Step> {
    let mut dice = Dice(seed);
    let mut pick = |sides: usize| dice.roll(sides as u64) as usize;
    let call = |_| {
        let (kind, dtype) = (CollectiveKind::ALL[pick(9)], DataType::ALL[pick(12)]);
        let redop = RedOp::ALL[pick(6)];
        let count = [0, 1, 5, 60, 70, 900][pick(6)];
        let call =
            Call { kind, dtype, redop, root: pick(nranks as usize) as u32, count, nranks, seed: pick(1 << 30) as u64 };
        (call, pick(2), pick(3) == 0)
    };
    (0..length).map(call).collect()
}

/// A word for each step that a rank sends to the next one, and one that it gets from the one before, on a stream of their own.
struct Messages {
    stream: mccs::Stream,
    memory: mccs::Region,
    steps: usize,
}

impl Messages {
    fn new(rank: &Rank, steps: usize) -> Self {
        let memory = rank.client.allocate(16 * steps as u64).expect("memory");
        // SAFETY: nothing is in flight on new memory.
        let words = unsafe { memory.slice_mut::<u64>(0..steps) }.expect("a word for each step");
        (0u64..).zip(words).for_each(|(at, word)| *word = Self::word(rank.comm.rank(), at));
        Messages { stream: rank.client.create_stream().expect("a stream"), memory, steps }
    }

    fn word(rank: u32, step: u64) -> u64 {
        Dice(step << 8 | u64::from(rank)).roll(u64::MAX)
    }

    fn pass_on(&self, rank: &Rank, step: usize) {
        let (me, nranks) = (rank.comm.rank(), rank.comm.nranks());
        let (from, to) = (self.memory.at(8 * step as u64), self.memory.at(8 * (self.steps + step) as u64));
        let group = mccs::Group::begin();
        rank.comm.send(from, 1, DataType::U64, (me + 1) % nranks, &self.stream).expect("collected");
        rank.comm.recv(to, 1, DataType::U64, (me + nranks - 1) % nranks, &self.stream).expect("collected");
        group.end().expect("enqueued");
    }

    fn check(&self, rank: &Rank, program: &[Step]) {
        self.stream.synchronize().expect("completed");
        // SAFETY: all has ended.
        let got = unsafe { self.memory.slice::<u64>(self.steps..2 * self.steps) }.expect("a word for each step");
        let before = (rank.comm.rank() + rank.comm.nranks() - 1) % rank.comm.nranks();
        for ((step, word), (.., has_message)) in (0u64..).zip(got).zip(program) {
            assert!(!has_message || *word == Self::word(before, step), "message {step} is another");
        }
    }
}

/// Runs a program, each rank at its own pace; returns the calls that came out wrong.
fn run(rank: &Rank, program: &[Step], pace: u64) -> Vec<Call> {
    let me = rank.comm.rank();
    let streams = [rank.stream.clone(), rank.client.create_stream().expect("a stream")];
    let mut dice = Dice(pace);
    let mut pick = |sides: u64| dice.roll(sides);
    let regions: Vec<_> = program
        .iter()
        .map(|(call, ..)| {
            let (input, size) = (call.input(me), call.dtype.size_bytes());
            let recv_at = input.len().next_multiple_of(64);
            let memory = rank.client.allocate((recv_at + call.recv_count(me) * size).max(1) as u64).expect("memory");
            // SAFETY: nothing is in flight on new memory.
            let bytes = unsafe { memory.as_mut_slice() };
            bytes.fill(POISON);
            bytes[..input.len()].copy_from_slice(&input);
            (memory, recv_at)
        })
        .collect();
    // A sum that goes round and round in one place: it tells whether any operation overtook another.
    let chain = rank.client.allocate(8 * 1000).expect("memory");
    // SAFETY: as above.
    let start = unsafe { &mut chain.as_mut_slice()[..8] };
    start.copy_from_slice(&u64::from(me + 1).to_le_bytes());
    let mut expected = u64::from(me + 1);
    let messages = Messages::new(rank, program.len());
    for (at, ((call, stream, has_message), (memory, recv_at))) in program.iter().zip(&regions).enumerate() {
        let stream = &streams[*stream];
        let group = (pick(8) == 0).then(mccs::Group::begin);
        call.enqueue(&rank.comm, memory.at(0), memory.at(*recv_at as u64), stream).expect("enqueued");
        if let Some(group) = group {
            group.end().expect("enqueued");
        }
        let length = if call.count == 60 { 1000 } else { 1 };
        rank.comm
            .all_reduce(chain.at(0), chain.at(0), length, DataType::U64, RedOp::Sum, &streams[0])
            .expect("enqueued");
        let nranks = u64::from(call.nranks);
        let is_first = expected == u64::from(me + 1) && std::ptr::eq(call, &raw const program[0].0);
        expected = if is_first { nranks * (nranks + 1) / 2 } else { expected.wrapping_mul(nranks) };
        if *has_message {
            messages.pass_on(rank, at);
        }
        match pick(6) {
            0 => stream.synchronize().expect("completed"),
            1 => while !stream.query().expect("no failure") {},
            2 => std::thread::yield_now(),
            3 => {
                // Dropped with work outstanding, which still ends.
                drop(rank.client.allocate(64).expect("memory"));
            }
            _ => {}
        }
    }
    streams.iter().for_each(|stream| stream.synchronize().expect("completed"));
    messages.check(rank, program);
    // SAFETY: all work has ended.
    assert_eq!(unsafe { chain.as_slice() }[..8], expected.to_le_bytes(), "operations overtook each other");
    let is_wrong = |((call, ..), (memory, recv_at)): &(&Step, &(mccs::Region, usize))| {
        // SAFETY: all work has ended.
        let bytes = unsafe { memory.as_slice() };
        let recv_bytes = call.recv_count(me) * call.dtype.size_bytes();
        call.wrong_elements(me, &bytes[*recv_at..*recv_at + recv_bytes]) > 0
    };
    program.iter().zip(&regions).filter(is_wrong).map(|((call, ..), _)| *call).collect()
}

#[test]
fn any_mixture_gives_the_same_results() {
    let seed = std::env::var("MCCS_SEED").ok().and_then(|seed| seed.parse().ok());
    let seeds = seed.map_or(0..12, |seed: u64| seed..seed + 1);
    for seed in seeds {
        let nranks = 2 + (seed % 3) as u32;
        let program = program(seed, nranks, 120);
        let service = TestService::start(SETTINGS);
        let wrong = service.ranks(0, nranks, |rank| run(&rank, &program, seed * 100 + u64::from(rank.comm.rank())));
        assert!(wrong.iter().all(Vec::is_empty), "MCCS_SEED={seed} repeats this; wrong by rank: {wrong:?}");
    }
}

/// Messages that end between rounds do not hide that a round has not: rank 1's third waits for its first, which rank 0 has not called.
#[test]
fn rounds_wait_for_rounds_whatever_messages_end_between() {
    let service = TestService::start(SETTINGS);
    service.ranks(0, 2, |rank| {
        let me = rank.comm.rank();
        let memory = rank.client.allocate(4 * 64).expect("memory");
        // SAFETY: nothing is in flight on new memory.
        let words = unsafe { memory.slice_mut::<u64>(0..4) }.expect("four words");
        words.copy_from_slice(&[1, 10, 100, 0].map(|word| word << (8 * me)));
        let streams: Vec<_> = (0..3).map(|_| rank.client.create_stream().expect("a stream")).collect();
        let round = |at: usize| {
            let place = memory.at(8 * at as u64);
            rank.comm.all_reduce(place, place, 1, DataType::U64, RedOp::Sum, &streams[at]).expect("enqueued");
        };
        for at in 0..3 {
            if me == 1 {
                round(at);
                rank.comm.send(memory.at(24), 1, DataType::U64, 0, &rank.stream).expect("enqueued");
            } else {
                rank.comm.recv(memory.at(24), 1, DataType::U64, 1, &rank.stream).expect("enqueued");
            }
            rank.stream.synchronize().expect("completed");
        }
        if me == 0 {
            (0..3).for_each(round);
        }
        streams.iter().for_each(|stream| stream.synchronize().expect("completed"));
        // SAFETY: all has ended.
        let words = unsafe { memory.slice::<u64>(0..3) }.expect("three words");
        assert_eq!(words, [1, 10, 100].map(|word| word + (word << 8)));
    });
}

/// A rank that has called, and does nothing else, keeps nobody waiting.
#[test]
fn a_rank_that_looks_away_keeps_nobody_waiting() {
    let service = TestService::start(SETTINGS);
    let all_have_ended = std::sync::Barrier::new(2);
    service.ranks(0, 2, |rank| {
        let memory = rank.client.allocate(4096).expect("memory");
        for count in [8, 500] {
            let place = memory.at(0);
            rank.comm.all_reduce(place, place, count, DataType::U32, RedOp::Sum, &rank.stream).expect("enqueued");
            if rank.comm.rank() == 1 {
                rank.stream.synchronize().expect("completed");
            }
            // Rank 0 does not look before rank 1 has its result.
            all_have_ended.wait();
            rank.stream.synchronize().expect("completed");
        }
    });
}

/// A round that a rank has begun with memory that it then gives back still ends, on the peer's side too.
#[test]
fn memory_that_is_dropped_during_a_round_is_kept_for_it() {
    let service = TestService::start(SETTINGS);
    let first_has_called = std::sync::Barrier::new(2);
    let sums = service.ranks(0, 2, |rank| {
        let memory = rank.client.allocate(64).expect("memory");
        // SAFETY: nothing is in flight.
        unsafe { memory.as_mut_slice() }.fill(rank.comm.rank() as u8 + 1);
        if rank.comm.rank() == 1 {
            first_has_called.wait();
        }
        let place = memory.at(0);
        rank.comm.all_reduce(place, place, 64, DataType::U8, RedOp::Sum, &rank.stream).expect("enqueued");
        if rank.comm.rank() == 0 {
            drop(memory);
            first_has_called.wait();
            rank.stream.synchronize().expect("completed");
            return 3;
        }
        rank.stream.synchronize().expect("completed");
        // SAFETY: all work has ended.
        unsafe { memory.as_slice()[63] }
    });
    assert_eq!(sums, [3, 3]);
}

/// A rank leaves right after a round, whose result another has not fetched yet.
#[test]
fn a_rank_may_leave_after_its_last_round() {
    let service = TestService::start(SETTINGS);
    let gone = std::sync::Barrier::new(2);
    service.ranks(0, 2, |rank| {
        let memory = rank.client.allocate(64).expect("memory");
        let place = memory.at(0);
        rank.comm.all_reduce(place, place, 8, DataType::U8, RedOp::Sum, &rank.stream).expect("enqueued");
        if rank.comm.rank() == 0 {
            let Rank { comm, .. } = rank;
            comm.destroy().expect("left");
            gone.wait();
        } else {
            // Without a look in between, the round is still this rank's to end.
            gone.wait();
            rank.stream.synchronize().expect("completed");
        }
    });
}

/// One of two ranks that leave has posted to the round that the third waits for, and the other has not.
#[test]
fn a_round_that_a_leaver_has_not_posted_to_fails() {
    let service = TestService::start(SETTINGS);
    let steps = [(); 2].map(|()| std::sync::Barrier::new(3));
    let errors = service.ranks(0, 3, |rank| {
        let memory = rank.client.allocate(64).expect("memory");
        let Rank { comm, stream, client: _client } = rank;
        let me = comm.rank();
        if me != 1 {
            comm.all_reduce(memory.at(0), memory.at(0), 8, DataType::U8, RedOp::Sum, &stream).expect("enqueued");
        }
        // Rank 1 leaves without a call, then rank 2 without its result; rank 0 waits.
        let mut comm = Some(comm);
        if me == 1 {
            drop(comm.take());
        }
        steps[0].wait();
        if me == 2 {
            drop(comm.take());
        }
        steps[1].wait();
        (me == 0).then(|| stream.synchronize().expect_err("rank 1 never called").to_string())
    });
    let error = errors[0].as_ref().expect("of rank 0");
    assert!(error.contains("rank 1 has left"), "{error}");
}

/// Whoever settles a round may be the last to hold its stream, which the program drops at the same moment.
#[test]
fn streams_are_dropped_while_another_thread_settles_their_rounds() {
    let service = TestService::start(SETTINGS);
    let stop = std::sync::atomic::AtomicBool::new(false);
    service.ranks(0, 2, |rank| {
        let memory = rank.client.allocate(64).expect("memory");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // Memory that goes settles all rounds.
                while rank.comm.rank() == 0 && !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    drop(rank.client.allocate(64).expect("memory"));
                }
            });
            let add = |stream: &mccs::Stream| {
                let place = memory.at(0);
                rank.comm.all_reduce(place, place, 1, DataType::U32, RedOp::Sum, stream).expect("enqueued");
            };
            for _ in 0..4000 {
                if rank.comm.rank() == 0 {
                    add(&rank.client.create_stream().expect("those before have been given back"));
                } else {
                    add(&rank.stream);
                }
                // With all that came before ended the next call is a round again.
                add(&rank.stream);
                rank.stream.synchronize().expect("completed");
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        rank.comm.barrier(&rank.stream).expect("enqueued");
        rank.stream.synchronize().expect("completed");
    });
}
