//! Runs schedules on numbers, in random interleavings, and compares with a plain reference. Shares nothing with the
//! verifier but the schedule: where the two disagree, one of them is wrong.

use std::collections::{HashMap, VecDeque};

use mccs_ipc::types::CollectiveKind as Kind;
use proptest::prelude::*;

use super::{algorithms, cases};
use crate::*;

/// A small generator of interleavings (splitmix64).
pub(super) struct Choices(pub(super) u64);

impl Choices {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % limit as u64) as usize
    }
}

fn input(rank: u32, element: u64) -> i64 {
    i64::from(rank) * 1_000_003 + element as i64 * 17 + 5
}

/// Pre-multiplies. Each rank has a scalar of its own, so that a wrong or repeated one shows.
fn scaled(rank: u32, value: i64) -> i64 {
    value.wrapping_mul(i64::from(rank) + 2)
}

/// Stands for the division of an average: doing it twice, or not at all, shows.
fn finished(value: i64) -> i64 {
    value.wrapping_mul(3).wrapping_add(1)
}

/// Expected output of a rank.
fn reference(problem: &Problem, rank: u32) -> Vec<i64> {
    let &Problem { kind, nranks, root, count, .. } = problem;
    let sum = |element| finished((0..nranks).fold(0i64, |sum, src| sum.wrapping_add(scaled(src, input(src, element)))));
    let block = u64::from(rank) * count;
    let gathered = |start: u64| (0..nranks).flat_map(move |src| (start..start + count).map(move |at| input(src, at)));
    match kind {
        Kind::AllReduce => (0..count).map(sum).collect(),
        Kind::Reduce if rank == root => (0..count).map(sum).collect(),
        Kind::ReduceScatter => (block..block + count).map(sum).collect(),
        Kind::Broadcast => (0..count).map(|at| input(root, at)).collect(),
        Kind::Scatter => (block..block + count).map(|at| input(root, at)).collect(),
        Kind::AllGather => gathered(0).collect(),
        Kind::Gather if rank == root => gathered(0).collect(),
        Kind::AllToAll => gathered(block).collect(),
        Kind::Reduce | Kind::Gather | Kind::Barrier => Vec::new(),
    }
}

/// One rank's buffers; those that alias have the same home.
struct Rank {
    rank: u32,
    send: (usize, usize),
    recv: (usize, usize),
    homes: [Vec<i64>; 3],
}

impl Rank {
    fn new(schedule: &Schedule, rank: u32, in_place: bool) -> Self {
        let Problem { kind, nranks, root, count, .. } = schedule.problem;
        let send_count = kind.send_count(count, nranks, rank, root).expect("short") as usize;
        let recv_count = kind.recv_count(count, nranks, rank, root).expect("short") as usize;
        let block = rank as usize * count as usize;
        let (mut send, mut recv) = ((0, 0), (1, 0));
        if in_place && send_count > 0 && recv_count > 0 {
            match kind {
                Kind::AllReduce | Kind::Broadcast | Kind::Reduce => send = (1, 0),
                Kind::AllGather | Kind::Gather => send = (1, block),
                Kind::ReduceScatter | Kind::Scatter => recv = (0, block),
                Kind::AllToAll | Kind::Barrier => {}
            }
        }
        // Memory that nobody wrote is not zero: adding it must show.
        let stale = |length| vec![-7_777_777; length];
        let homes = [stale(send_count), stale(recv_count), stale(schedule.scratch_count as usize)];
        let mut this = Rank { rank, send, recv, homes };
        for element in 0..send_count as u64 {
            *this.at(Buffer::Send, element) = input(rank, element);
        }
        this
    }

    fn at(&mut self, buffer: Buffer, element: u64) -> &mut i64 {
        let (home, base) = match buffer {
            Buffer::Send => self.send,
            Buffer::Recv => self.recv,
            Buffer::Scratch => (2, 0),
        };
        &mut self.homes[home][base + element as usize]
    }

    fn read(&mut self, span: &Span, raw: bool) -> Vec<i64> {
        let rank = self.rank;
        let elements = span.offset..span.offset + span.count;
        let value = |value| if raw { scaled(rank, value) } else { value };
        elements.map(|element| value(*self.at(span.buffer, element))).collect()
    }

    fn write(&mut self, span: &Span, values: &[i64]) {
        assert_eq!(span.count, values.len() as u64);
        (span.offset..).zip(values).for_each(|(element, value)| *self.at(span.buffer, element) = *value);
    }
}

/// Runs a schedule in one interleaving. Returns the first rank whose output is wrong.
pub(super) fn wrong_rank(schedule: &Schedule, in_place: bool, choices: &mut Choices) -> Option<u32> {
    let ranks = 0..schedule.problem.nranks;
    let mut memory: Vec<_> = ranks.clone().map(|rank| Rank::new(schedule, rank, in_place)).collect();
    match &schedule.shape {
        Shape::SinglePass(moves) => run_moves(schedule.problem.kind.reduces(), moves, &mut memory, choices),
        Shape::Message(channels) => run_programs(channels, &mut memory, choices),
    }
    ranks.into_iter().find(|rank| {
        let right = reference(&schedule.problem, *rank);
        let held = memory[*rank as usize].read(&Span::new(Buffer::Recv, 0, right.len() as u64), false);
        held != right
    })
}

/// All elements of all moves, in any order.
fn run_moves(reduces: bool, moves: &[Move], memory: &mut [Rank], choices: &mut Choices) {
    let mut elements: Vec<_> =
        moves.iter().flat_map(|step| (0..step.dsts[0].span.count).map(move |element| (step, element))).collect();
    while !elements.is_empty() {
        let (step, element) = elements.swap_remove(choices.below(elements.len()));
        let one = |span: &Span| Span::new(span.buffer, span.offset + element, 1);
        let read = |src: &RankSpan| memory[src.rank as usize].read(&one(&src.span), reduces)[0];
        let sum = step.srcs.iter().map(read).fold(0i64, i64::wrapping_add);
        let result = if reduces { finished(sum) } else { sum };
        step.dsts.iter().for_each(|dst| memory[dst.rank as usize].write(&one(&dst.span), &[result]));
    }
}

/// By channel, sender and receiver.
type Links = HashMap<(usize, u32, u32), VecDeque<RankSpan>>;

/// One step of any program that need not wait, until all have ended.
fn run_programs(channels: &[Channel], memory: &mut [Rank], choices: &mut Choices) {
    let mut links = Links::new();
    let mut running: Vec<(usize, u32, VecDeque<Step>)> = Vec::new();
    for (index, channel) in channels.iter().enumerate() {
        let programs = (0..).zip(&channel.programs);
        running.extend(programs.map(|(number, program)| (index, number, program.steps.iter().cloned().collect())));
    }
    running.retain(|(.., program)| !program.is_empty());
    while !running.is_empty() {
        let is_ready = |(channel, number, program): &(usize, u32, VecDeque<Step>)| match &program[0] {
            Step::Send { .. } | Step::Copy { .. } | Step::Reduce { .. } => true,
            Step::Recv { peer, .. } | Step::RecvReduce { peer, .. } => {
                links.get(&(*channel, *peer, *number)).is_some_and(|link| !link.is_empty())
            }
        };
        let ready: Vec<_> = (0..running.len()).filter(|at| is_ready(&running[*at])).collect();
        assert!(!ready.is_empty(), "all wait");
        let at = ready[choices.below(ready.len())];
        let (channel, number, program) = &mut running[at];
        let step = program.pop_front().expect("ended programs are removed");
        run_step(*channel, *number, &step, memory, &mut links);
        running.retain(|(.., program)| !program.is_empty());
    }
}

fn read(memory: &mut [Rank], at: &RankSpan, raw: bool) -> Vec<i64> {
    memory[at.rank as usize].read(&at.span, raw)
}

fn write(memory: &mut [Rank], dsts: &[RankSpan], values: &[i64]) {
    dsts.iter().for_each(|dst| memory[dst.rank as usize].write(&dst.span, values));
}

/// Adds spans to what came, if anything did.
fn sum(memory: &mut [Rank], first: Option<Vec<i64>>, srcs: &[RankSpan], raw: bool, finish: bool) -> Vec<i64> {
    let mut sums = first;
    for src in srcs {
        let values = read(memory, src, raw);
        sums = Some(match sums {
            Some(sums) => sums.iter().zip(&values).map(|(a, b)| a.wrapping_add(*b)).collect(),
            None => values,
        });
    }
    let sums = sums.expect("something to add");
    sums.into_iter().map(|sum| if finish { finished(sum) } else { sum }).collect()
}

fn run_step(channel: usize, own: u32, step: &Step, memory: &mut [Rank], links: &mut Links) {
    let mut offer = |peer| links.entry((channel, peer, own)).or_default().pop_front().expect("it was ready");
    match step {
        Step::Send { peer, src } => links.entry((channel, own, *peer)).or_default().push_back(*src),
        Step::Copy { src, dsts } => {
            let values = read(memory, src, false);
            write(memory, dsts, &values);
        }
        Step::Recv { peer, dsts } => {
            let values = read(memory, &offer(*peer), false);
            write(memory, dsts, &values);
        }
        Step::RecvReduce { peer, srcs, dsts, incoming_raw, srcs_raw, finish } => {
            let incoming = read(memory, &offer(*peer), *incoming_raw);
            let results = sum(memory, Some(incoming), srcs, *srcs_raw, *finish);
            write(memory, dsts, &results);
        }
        Step::Reduce { srcs, dsts, srcs_raw, finish } => {
            let results = sum(memory, None, srcs, *srcs_raw, *finish);
            write(memory, dsts, &results);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn every_interleaving_gives_the_reference((mut problem, strategy) in cases(), seed in any::<u64>(), in_place in any::<bool>()) {
        problem.count %= 300;
        for algorithm in algorithms(&strategy) {
            let schedule = build(&problem, algorithm, &strategy).expect("problem and strategy are valid");
            prop_assert_eq!(wrong_rank(&schedule, in_place, &mut Choices(seed)), None, "{:?}", algorithm);
        }
    }
}
