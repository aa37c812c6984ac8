//! Every large collective on a model: streams of the service and of the ranks, which run in any order that words allow. Whoever carries
//! it out.

use std::collections::{HashMap, VecDeque};

use mccs_collective::{Algorithm, Strategy, build};
use mccs_config::service::AlgorithmChoice;
use mccs_ipc::device_initiated::Execution;
use mccs_ipc::large::ShardPiece;
use mccs_ipc::types::RedOp;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;

/// Steps of a rank's own stream: the model of `shim/src/cuda/device_initiated/large.rs`.
enum Own {
    Ready,
    /// From the send to the receive buffer.
    Copy {
        from: usize,
        to: usize,
        len: usize,
    },
    Combine {
        piece: u64,
    },
    Check,
}

/// The next step of a stream.
enum Entry {
    Service(Part, Step),
    Rank(Own),
}

#[derive(Clone, Default)]
struct Memory {
    send: Vec<u8>,
    recv: Vec<u8>,
    slots: Vec<u8>,
}

struct Call {
    kind: CollectiveKind,
    root: u32,
    count: usize,
    number: u64,
}

struct Model {
    nranks: u32,
    execution: Execution,
    /// Whether what a rank sends lies where it receives.
    is_in_place: bool,
    layout: LargeLayout,
    memory: Vec<Memory>,
    words: HashMap<(LargeWord, u32), u64>,
    rng: StdRng,
}

const POISON: u8 = 0xee;
const EXECUTIONS: [Execution; 2] = [Execution::Ranks, Execution::Service];

impl Model {
    fn new(nranks: u32, execution: Execution, seed: u64) -> Self {
        let layout =
            LargeLayout { slot_bytes: 2 * LargeLayout::SLOT_BYTES_MIN, own_slot_bytes: LargeLayout::SLOT_BYTES_MIN };
        let memory = vec![
            Memory { slots: vec![0; layout.block_bytes(SlotKind::Shared) as usize], ..Memory::default() };
            nranks as usize
        ];
        let rng = StdRng::seed_from_u64(seed);
        Model { nranks, execution, is_in_place: false, layout, memory, words: HashMap::new(), rng }
    }

    fn word(&self, word: LargeWord, rank: u32) -> u64 {
        self.words.get(&(word, rank)).copied().unwrap_or(0)
    }

    fn raise(&mut self, word: LargeWord, rank: u32, value: u64) {
        let before = self.words.insert((word, rank), value).unwrap_or(0);
        assert!(value > before, "{word:?} of rank {rank} falls from {before} to {value}");
    }

    fn bytes(&mut self, rank: u32, place: Place, len: usize) -> &mut [u8] {
        let memory = &mut self.memory[rank as usize];
        let (of, at) = match place {
            Place::Send(at) if self.is_in_place => (&mut memory.recv, at),
            Place::Send(at) => (&mut memory.send, at),
            Place::Recv(at) => (&mut memory.recv, at),
            Place::Slots(_, at) => (&mut memory.slots, at),
        };
        &mut of[at as usize..][..len]
    }

    /// Returns whether the step was possible.
    fn serve(&mut self, rank: u32, part: Part, call: &Call, step: Step) -> bool {
        match step {
            Step::Wait { word, rank, value } => return self.word(word, rank) >= value,
            Step::Tell { word, value } => self.raise(word, rank, value),
            Step::Combine { piece } => self.combine(rank, call, piece),
            Step::Push { from, to, at, bytes } => {
                assert_eq!(to == rank, part == Part::Keep, "a copy on one GPU is a kernel");
                let data = self.bytes(rank, from, bytes as usize).to_vec();
                self.bytes(to, at, bytes as usize).copy_from_slice(&data);
            }
        }
        true
    }

    fn own(&mut self, rank: u32, call: &Call, step: &Own, inputs: &[Vec<u8>]) -> bool {
        match *step {
            Own::Ready => self.raise(LargeWord::Ready, rank, call.number),
            Own::Copy { from, to, len } => {
                let data = self.bytes(rank, Place::Send(from as u64), len).to_vec();
                self.bytes(rank, Place::Recv(to as u64), len).copy_from_slice(&data);
            }
            Own::Combine { piece } => {
                let value = stage(call.number, piece);
                let shards = Shards::new(self.layout, call.kind, self.nranks, call.count as u64);
                if shards.awaited(rank).any(|rank| self.word(LargeWord::Pushed, rank) < value) {
                    return false;
                }
                self.combine(rank, call, piece);
            }
            Own::Check => {
                let is_kept = self.execution == Execution::Ranks || self.word(LargeWord::Kept, rank) >= call.number;
                if !is_kept || (0..self.nranks).any(|peer| self.word(LargeWord::Arrived, peer) < call.number) {
                    return false;
                }
                let expected = expected(call, self.nranks, rank, inputs);
                assert!(self.memory[rank as usize].recv == expected, "{:?} at rank {rank}", call.kind);
                let is_unchanged = self.is_in_place || self.memory[rank as usize].send == inputs[rank as usize];
                assert!(is_unchanged, "the input has changed");
                // The caller's next use of its buffers.
                self.memory[rank as usize].recv.fill(POISON);
            }
        }
        true
    }

    fn combine(&mut self, rank: u32, call: &Call, piece: u64) {
        let shards = Shards::new(self.layout, call.kind, self.nranks, call.count as u64);
        let ShardPiece { offset, bytes: len } = shards.piece(rank, piece);
        let mut sum = self.bytes(rank, Place::Send(offset), len as usize).to_vec();
        for peer in (0..self.nranks).filter(|peer| *peer != rank) {
            let part =
                self.bytes(rank, Place::Slots(shards.slots(), shards.slot_offset(rank, peer, piece)), len as usize);
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum = sum.wrapping_add(*part));
        }
        let base = if call.kind == CollectiveKind::ReduceScatter { shards.piece(rank, 0).offset } else { 0 };
        self.bytes(rank, Place::Recv(offset - base), len as usize).copy_from_slice(&sum);
        self.raise(LargeWord::Reduced, rank, stage(call.number, piece));
    }

    /// Runs calls one after the other on every rank, each as far ahead as words let it.
    fn run(&mut self, calls: &[Call]) {
        let strategy = Strategy::initial(AlgorithmChoice::SinglePass, self.nranks, 1, &[]);
        let mut streams: Vec<VecDeque<(usize, Entry)>> = (0..3 * self.nranks).map(|_| VecDeque::new()).collect();
        let mut inputs = Vec::new();
        for (at, call) in calls.iter().enumerate() {
            let &Call { kind, root, count, number } = call;
            let problem = Problem {
                kind,
                nranks: self.nranks,
                root,
                count: count as u64,
                premultiply: false,
                leaves_own: false,
                one_hop: false,
            };
            let schedule = build(&problem, Algorithm::SinglePass, &strategy).expect("a schedule");
            let large = LargeCall { number, element_bytes: 1, layout: self.layout };
            inputs.push((0..self.nranks).map(|rank| self.input(call, rank)).collect::<Vec<_>>());
            for rank in 0..self.nranks {
                let of = |steps: Vec<Step>, part| steps.into_iter().map(move |step| (at, Entry::Service(part, step)));
                let [pushed, kept, own] = &mut streams[3 * rank as usize..][..3] else { panic!("three streams") };
                pushed.extend(of(steps_of(&large, &schedule, rank), Part::Push));
                if self.execution == Execution::Service {
                    kept.extend(of(keep_steps_of(&large, &problem, rank), Part::Keep));
                    own.extend([Own::Ready, Own::Check].map(|step| (at, Entry::Rank(step))));
                } else {
                    own.extend(own_steps(call, self.nranks, rank, self.layout).map(|step| (at, Entry::Rank(step))));
                }
            }
        }
        while streams.iter().any(|stream| !stream.is_empty()) {
            let first = self.rng.random_range(0..streams.len());
            let turns = (first..streams.len()).chain(0..first);
            let moved = turns.into_iter().find(|turn| {
                let rank = *turn as u32 / 3;
                streams[*turn].front().is_some_and(|(at, entry)| match entry {
                    Entry::Service(part, step) => self.serve(rank, *part, &calls[*at], *step),
                    Entry::Rank(step) => {
                        if matches!(step, Own::Ready) {
                            let (call, inputs) = (&calls[*at], &inputs[*at]);
                            self.memory[rank as usize].send.clone_from(&inputs[rank as usize]);
                            let received = call.kind.recv_count(call.count as u64, self.nranks, rank, call.root);
                            self.memory[rank as usize].recv = vec![POISON; received.expect("small") as usize];
                            if self.is_in_place {
                                self.memory[rank as usize].recv.clone_from(&inputs[rank as usize]);
                            }
                        }
                        self.own(rank, &calls[*at], step, &inputs[*at])
                    }
                })
            });
            streams[moved.expect("somebody can go on")].pop_front();
        }
    }

    fn input(&mut self, call: &Call, rank: u32) -> Vec<u8> {
        let count = call.kind.send_count(call.count as u64, self.nranks, rank, call.root).expect("small");
        (0..count).map(|_| self.rng.random()).collect()
    }
}

fn own_steps(call: &Call, nranks: u32, rank: u32, layout: LargeLayout) -> impl Iterator<Item = Own> {
    let (len, own, is_root) = (call.count, rank as usize * call.count, rank == call.root);
    let copy = |from, to| vec![Own::Copy { from, to, len }];
    let middle = match call.kind {
        CollectiveKind::AllGather => copy(0, own),
        CollectiveKind::AllToAll => copy(own, own),
        CollectiveKind::Broadcast if is_root => copy(0, 0),
        CollectiveKind::Gather if is_root => copy(0, own),
        CollectiveKind::Scatter if is_root => copy(own, 0),
        CollectiveKind::AllReduce | CollectiveKind::ReduceScatter => {
            let shards = Shards::new(layout, call.kind, nranks, call.count as u64);
            (0..shards.pieces()).map(|piece| Own::Combine { piece }).collect()
        }
        _ => Vec::new(),
    };
    [Own::Ready].into_iter().chain(middle).chain([Own::Check])
}

fn expected(call: &Call, nranks: u32, rank: u32, inputs: &[Vec<u8>]) -> Vec<u8> {
    let (count, root) = (call.count, call.root as usize);
    let block = |of: usize, which: usize| &inputs[of][which * count..][..count];
    let all = 0..nranks as usize;
    let sum = |which: usize| -> Vec<u8> {
        let column = |at: usize| all.clone().fold(0_u8, |sum, of| sum.wrapping_add(block(of, which)[at]));
        (0..count).map(column).collect()
    };
    let own = rank as usize;
    match call.kind {
        CollectiveKind::AllReduce => sum(0),
        CollectiveKind::ReduceScatter => sum(own),
        CollectiveKind::AllGather => all.flat_map(|of| block(of, 0).to_vec()).collect(),
        CollectiveKind::AllToAll => all.flat_map(|of| block(of, own).to_vec()).collect(),
        CollectiveKind::Broadcast => block(root, 0).to_vec(),
        CollectiveKind::Gather if own == root => all.flat_map(|of| block(of, 0).to_vec()).collect(),
        CollectiveKind::Scatter => block(root, own).to_vec(),
        _ => Vec::new(),
    }
}

fn kinds() -> Vec<CollectiveKind> {
    let large = |kind: &CollectiveKind| mccs_ipc::large::has_large(*kind, RedOp::Sum);
    CollectiveKind::ALL.iter().copied().filter(large).collect()
}

#[test]
fn every_collective_is_right_in_whatever_order_streams_run() {
    for (nranks, execution) in (2..=5).flat_map(|nranks| EXECUTIONS.map(|execution| (nranks, execution))) {
        for (seed, kind) in (0..).zip(kinds()) {
            for count in [1, 130, 4096, 50_001] {
                let call = Call { kind, root: seed as u32 % nranks, count, number: 1 };
                Model::new(nranks, execution, seed).run(&[call]);
            }
        }
    }
}

#[test]
fn nobody_writes_over_what_is_still_sent() {
    for (nranks, execution) in (2..=5).flat_map(|nranks| EXECUTIONS.map(|execution| (nranks, execution))) {
        for (seed, count) in (0..16).zip([1, 5000, 50_001, 300_000].into_iter().cycle()) {
            let mut model = Model::new(nranks, execution, seed);
            model.is_in_place = true;
            let call = |number| Call { kind: CollectiveKind::AllReduce, root: 0, count, number };
            model.run(&[call(1), call(2)]);
        }
    }
}

#[test]
fn operations_follow_each_other_without_getting_mixed_up() {
    for seed in 0..40 {
        let mut model = Model::new(2 + seed as u32 % 3, EXECUTIONS[seed as usize % 2], seed);
        let kinds = kinds();
        let call = |number: u64, model: &mut Model| Call {
            kind: kinds[model.rng.random_range(0..kinds.len())],
            root: model.rng.random_range(0..model.nranks),
            count: model.rng.random_range(1..60_000),
            number,
        };
        let calls: Vec<_> = (1..=6).map(|number| call(number, &mut model)).collect();
        model.run(&calls);
    }
}

/// Bytes into and out of the busiest rank.
fn traffic(kind: CollectiveKind, nranks: u32, count: u64) -> (u64, u64) {
    let strategy = Strategy::initial(AlgorithmChoice::SinglePass, nranks, 1, &[]);
    let problem = Problem { kind, nranks, root: 0, count, premultiply: false, leaves_own: false, one_hop: false };
    let schedule = build(&problem, Algorithm::SinglePass, &strategy).expect("a schedule");
    let call = LargeCall { number: 1, element_bytes: 1, layout: LargeLayout::new(64 << 20) };
    let (mut into, mut out) = (vec![0; nranks as usize], vec![0; nranks as usize]);
    for rank in 0..nranks {
        for step in steps_of(&call, &schedule, rank) {
            if let Step::Push { to, bytes, .. } = step {
                out[rank as usize] += bytes;
                into[to as usize] += bytes;
            }
        }
    }
    (into.into_iter().max().unwrap_or(0), out.into_iter().max().unwrap_or(0))
}

#[test]
fn no_link_carries_more_than_it_must() {
    let mib = 1 << 20;
    for nranks in [2, 4, 8] {
        let n = u64::from(nranks);
        // The whole, but for what is there already.
        assert_eq!(traffic(CollectiveKind::AllGather, nranks, 8 * mib), ((n - 1) * 8 * mib, (n - 1) * 8 * mib));
        let shards = 2 * (n - 1) * 64 * mib / n;
        assert_eq!(traffic(CollectiveKind::AllReduce, nranks, 64 * mib), (shards, shards));
        assert_eq!(traffic(CollectiveKind::Broadcast, nranks, 64 * mib), (64 * mib, 64 * mib));
    }
}
