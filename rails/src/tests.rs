//! Plans carried out for all ranks, and compared with what the collective is.

use std::collections::{HashMap, VecDeque};

use mccs_ipc::layout::{Layout, Seat};
use mccs_ipc::protocol::HostRun;
use mccs_ipc::types::CollectiveKind;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};

use super::{
    Behind, Exchange, Forks, Move, Part, Place, Plan, Ring, SLOTS_BYTES, SLOTS_MAX, Sizes, Stage, Step, slot_bytes,
};

const KINDS: [CollectiveKind; 8] = [
    CollectiveKind::AllReduce,
    CollectiveKind::Reduce,
    CollectiveKind::Broadcast,
    CollectiveKind::AllGather,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllToAll,
    CollectiveKind::Gather,
    CollectiveKind::Scatter,
];
/// Stands for the division of an average: doing it twice, or not at all, shows.
const FINISHED: u64 = 3;
/// Where nothing belongs.
const POISON: u64 = 0xdead_dead;

/// What a collective makes of the ranks' buffers, whose blocks lie so far apart: block by block, where the rank receives any.
fn results(kind: CollectiveKind, count: usize, root: usize, send: &[Vec<Vec<u64>>]) -> Vec<Vec<Vec<u64>>> {
    use CollectiveKind as K;
    let sum = |block: usize| -> Vec<u64> {
        (0..count).map(|at| send.iter().fold(0, |sum: u64, of| sum.wrapping_add(of[block][at]))).collect()
    };
    let all = |block: usize| send.iter().map(|of| of[block].clone()).collect();
    let result = |rank: usize| match kind {
        K::AllReduce => vec![sum(0)],
        K::ReduceScatter => vec![sum(rank)],
        K::Broadcast => vec![send[root][0].clone()],
        K::Scatter => vec![send[root][rank].clone()],
        K::AllGather => all(0),
        K::AllToAll => all(rank),
        K::Reduce if rank == root => vec![sum(0)],
        K::Gather if rank == root => all(0),
        K::Reduce | K::Gather | K::Barrier => Vec::new(),
    };
    (0..send.len()).map(result).collect()
}

/// Blocks of a send buffer.
fn send_blocks(kind: CollectiveKind, nranks: u32, rank: u32, root: u32) -> usize {
    kind.send_count(1, nranks, rank, root).expect("fits") as usize
}

/// One rank's memory.
struct Memory {
    send: Vec<u64>,
    recv: Vec<u64>,
    /// In place: where the receive buffer begins in the send buffer, or the other way round.
    place: InPlace,
    /// Twins of slots, by rail and number: what stages see.
    slots: HashMap<(u32, usize), Vec<u64>>,
    /// What rails see.
    wire: HashMap<(u32, usize), Vec<u64>>,
    slot_count: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum InPlace {
    No,
    RecvInSend(usize),
    SendInRecv(usize),
}

impl Memory {
    fn at(&mut self, place: Place, slot: usize) -> (&mut Vec<u64>, usize) {
        match (place, self.place) {
            (Place::Recv(at), InPlace::RecvInSend(first)) => (&mut self.send, first + at as usize),
            (Place::Send(at), InPlace::SendInRecv(first)) => (&mut self.recv, first + at as usize),
            (Place::Send(at), _) => (&mut self.send, at as usize),
            (Place::Recv(at), _) => (&mut self.recv, at as usize),
            (Place::Slot { rail, at }, _) => {
                let empty = vec![POISON; self.slot_count as usize];
                (self.slots.entry((rail, slot)).or_insert(empty), at as usize)
            }
        }
    }

    /// Brings parts of a slot to its twin, or the other way round: whatever rails see is what stages see afterwards.
    fn bring(&mut self, moved: Move, slot: usize, parts: impl Iterator<Item = Part>) {
        for Part { at, count } in parts {
            let place = Place::Slot { rail: moved.rail, at };
            let values = self.read(place, slot, count);
            std::mem::swap(&mut self.slots, &mut self.wire);
            self.write(place, slot, &values);
            std::mem::swap(&mut self.slots, &mut self.wire);
        }
    }

    fn read(&mut self, place: Place, slot: usize, count: u64) -> Vec<u64> {
        let (memory, at) = self.at(place, slot);
        memory[at..at + count as usize].to_vec()
    }

    fn write(&mut self, place: Place, slot: usize, values: &[u64]) {
        let (memory, at) = self.at(place, slot);
        memory[at..at + values.len()].copy_from_slice(values);
    }
}

/// A collective of some ranks, by their own buffers and strides.
fn exchange(kind: CollectiveKind, root: usize, count: u64, members: &mut [(&mut Memory, usize, Blocks)]) {
    let nranks = members.len() as u32;
    let mut send = Vec::new();
    for (rank, (memory, slot, blocks)) in members.iter_mut().enumerate() {
        let read = |block| memory.read(blocks.send.after(block as u64 * blocks.send_stride), *slot, count);
        send.push((0..send_blocks(kind, nranks, rank as u32, root as u32)).map(read).collect::<Vec<_>>());
    }
    let results = results(kind, count as usize, root, &send);
    for ((memory, slot, blocks), result) in members.iter_mut().zip(results) {
        for (block, values) in result.iter().enumerate() {
            memory.write(blocks.recv.after(block as u64 * blocks.recv_stride), *slot, values);
        }
    }
}

#[derive(Clone, Copy)]
struct Blocks {
    send: Place,
    send_stride: u64,
    recv: Place,
    recv_stride: u64,
}

impl Blocks {
    fn of(exchange: &Exchange) -> Self {
        let Exchange { send, send_stride, recv, recv_stride, .. } = *exchange;
        Blocks { send, send_stride, recv, recv_stride }
    }
}

/// A rank that carries a plan out.
struct Rank {
    steps: Vec<Step>,
    /// By step: stages that are left, the first one first.
    stages: Vec<VecDeque<Stage>>,
    /// By stream: steps that are left.
    streams: Vec<VecDeque<usize>>,
    /// By step.
    is_done: Vec<bool>,
    /// In the order of steps: moves, which rails begin in that order. As many as are told have all been come to.
    moves: Vec<Moving>,
    slots: usize,
    memory: Memory,
}

/// A move of a rank's.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Moving {
    step: usize,
    slot: usize,
    moved: Move,
    /// A stream has come to it.
    is_staged: bool,
    has_ended: bool,
}

impl Rank {
    fn new(plan: &Plan<'_>, memory: Memory) -> Self {
        let slices = plan.slices();
        let steps: Vec<_> = plan.steps(slices.len()).collect();
        let stages: Vec<VecDeque<_>> =
            steps.iter().map(|step| plan.stages(slices[step.slice], step.segment).into()).collect();
        let mut streams = vec![VecDeque::new(); plan.segments()];
        steps.iter().enumerate().for_each(|(number, step)| streams[step.stream].push_back(number));
        let moves = stages.iter().enumerate().flat_map(|(step, stages)| {
            let moves =
                stages.iter().filter_map(|stage| if let Stage::Rail(moved) = stage { Some(*moved) } else { None });
            let slot = steps[step].slice % plan.sizes.slots as usize;
            moves.map(move |moved| Moving { step, slot, moved, is_staged: false, has_ended: false })
        });
        let slots = plan.sizes.slots as usize;
        Rank { slots, moves: moves.collect(), is_done: vec![false; steps.len()], stages, streams, steps, memory }
    }

    fn has_ended(&self) -> bool {
        self.streams.iter().all(VecDeque::is_empty)
    }

    /// The step of a slice's segment.
    fn step_of(&self, slice: usize, segment: usize) -> usize {
        self.steps.iter().position(|step| (step.slice, step.segment) == (slice, segment)).expect("enqueued")
    }

    /// Moves of a step.
    fn moves_of(&self, step: usize) -> impl Iterator<Item = &Moving> {
        self.moves.iter().filter(move |moving| moving.step == step)
    }

    /// Whether what a step waits for has come.
    fn may_begin(&self, number: usize) -> bool {
        let step = self.steps[number];
        let last = self.steps.iter().map(|step| step.segment).max().unwrap_or(0);
        // Of its slice, whatever the streams.
        let before = step.segment.checked_sub(1).map(|segment| self.step_of(step.slice, segment));
        let have_moved = before.is_none_or(|before| self.moves_of(before).all(|moving| moving.has_ended));
        let is_behind = match step.behind {
            None => true,
            Some(Behind::Slot(slice)) => self.is_done[self.step_of(slice, last)],
            Some(Behind::Moves) => {
                let before = before.expect("not the first");
                self.moves_of(before).next().is_some() || self.is_done[before]
            }
        };
        have_moved && is_behind
    }

    /// What a stream comes to next that others take part in, when it has done what it does alone; also a move that it has come to.
    fn advance(&mut self, stream: usize) -> (bool, Option<(usize, Exchange)>) {
        let mut has_moved = false;
        while let Some(number) = self.streams[stream].front().copied() {
            if !self.may_begin(number) {
                break;
            }
            let slot = self.steps[number].slice % self.slots;
            match self.stages[number].front().copied() {
                None => {
                    self.is_done[number] = true;
                    self.streams[stream].pop_front();
                }
                Some(Stage::Team(exchange)) => return (has_moved, Some((slot, exchange))),
                Some(stage) => {
                    self.alone(number, stage);
                    self.stages[number].pop_front();
                }
            }
            has_moved = true;
        }
        (has_moved, None)
    }

    fn alone(&mut self, number: usize, stage: Stage) {
        let slot = self.steps[number].slice % self.slots;
        match stage {
            Stage::Team(_) => {}
            Stage::Rail(moved) => {
                let mut of_step = self.moves.iter_mut().filter(|moving| moving.step == number && moving.moved == moved);
                of_step.next().expect("known").is_staged = true;
            }
            Stage::Copy { from, to, count } => {
                let values = self.memory.read(from, slot, count);
                self.memory.write(to, slot, &values);
            }
            Stage::Combine { rail, parts, count, to, finishes } => {
                let parts: Vec<_> =
                    parts.all().map(|at| self.memory.read(Place::Slot { rail, at }, slot, count)).collect();
                let finish = |sum: u64| if finishes { sum.wrapping_mul(FINISHED) } else { sum };
                let sum = |at: usize| finish(parts.iter().fold(0, |sum: u64, part| sum.wrapping_add(part[at])));
                self.memory.write(to, slot, &(0..count as usize).map(sum).collect::<Vec<_>>());
            }
        }
    }

    /// The next move of a rail, if the service has been told of it: of all moves in order.
    fn next_move(&self, rail: u32) -> Option<usize> {
        let told = self.moves.iter().take_while(|moving| moving.is_staged).count();
        let next = self.moves.iter().position(|moving| moving.moved.rail == rail && !moving.has_ended)?;
        Some(next).filter(|next| *next < told)
    }
}

/// Carries everything out, in an order that nothing but what steps come behind decides: joint stages when all who are in them have come.
fn run(layout: &Layout, ranks: &mut [Rank], rng: &mut StdRng) {
    let seats: Vec<_> = (0..layout.nranks()).map(|rank| layout.seat(rank)).collect();
    let streams = ranks[0].streams.len();
    // Of the time; now and then everything is tried, to see whether something can go on at all.
    let mut patience = 0;
    while !ranks.iter().all(Rank::has_ended) {
        let tries = |rng: &mut StdRng| patience >= 20 || rng.random_range(0..3) > 0;
        let mut has_moved = false;
        for stream in (0..streams).rev() {
            let mut next = vec![None; ranks.len()];
            for (rank, next) in ranks.iter_mut().zip(&mut next).filter(|_| tries(rng)) {
                let (moved, joint) = rank.advance(stream);
                has_moved |= moved;
                *next = joint;
            }
            for host in 0..layout.hosts() {
                let team: Vec<_> = (0..ranks.len()).filter(|rank| seats[*rank].host == host).collect();
                let all = team.iter().map(|rank| next[*rank].map(|(slot, exchange)| (*rank, slot, exchange)));
                let Some(all) = all.collect::<Option<Vec<_>>>() else { continue };
                // A batch has no order.
                let mut times: Vec<_> = (0..all[0].2.each().len()).collect();
                assert!(all.iter().all(|(.., of)| of.each().len() == times.len()), "they differ");
                times.shuffle(rng);
                for time in times {
                    let part = all.iter().map(|(rank, slot, of)| {
                        let of = of.each().nth(time).expect("as many");
                        (*rank, *slot, (of.kind, of.root, of.count), Blocks::of(&of))
                    });
                    take_part(ranks, part);
                }
                for (rank, _, _) in all {
                    let number = ranks[rank].streams[stream][0];
                    ranks[rank].stages[number].pop_front();
                }
                has_moved = true;
            }
        }
        for rail in 0..layout.rails() {
            has_moved |= tries(rng) && move_by(layout, &seats, ranks, rail);
        }
        assert!(has_moved || patience < 20, "they wait for each other");
        patience = if has_moved { 0 } else { patience + 1 };
    }
}

/// Carries a rail's next move out, if all its ranks have come to it.
fn move_by(layout: &Layout, seats: &[Seat], ranks: &mut [Rank], rail: u32) -> bool {
    let acts = |rank: usize| {
        let each = layout.rails_each(seats[rank].host);
        (seats[rank].local == rail / each).then_some(rail % each)
    };
    let members: Vec<_> = (0..ranks.len()).filter_map(|rank| Some((rank, acts(rank)?))).collect();
    assert_eq!(members.len(), layout.hosts() as usize);
    let all = members.iter().map(|(rank, own)| Some((*rank, ranks[*rank].next_move(*own)?)));
    let Some(all) = all.collect::<Option<Vec<_>>>() else { return false };
    let all: Vec<_> = all.into_iter().map(|(rank, number)| (rank, number, ranks[rank].moves[number])).collect();
    for (rank, _, Moving { slot, moved, .. }) in &all {
        let memory = &mut ranks[*rank].memory;
        memory.bring(*moved, *slot, moved.goes_in(layout.hosts(), seats[*rank].host));
        std::mem::swap(&mut memory.slots, &mut memory.wire);
    }
    let parts = all.iter().map(|(rank, _, Moving { slot, moved: of, .. })| {
        let host = seats[*rank].host;
        let bytes = |count: Option<u64>| count.expect("fits");
        let send = (of.send, bytes(of.kind.send_count(of.count, layout.hosts(), host, of.root)));
        let recv = (of.recv, bytes(of.kind.recv_count(of.count, layout.hosts(), host, of.root)));
        // As the service checks what a tenant names.
        assert!(of.kind.accepts_buffers(host, of.root, send, recv), "{of:?}");
        let place = |at| Place::Slot { rail: of.rail, at };
        let (send, recv) = (place(of.send), place(of.recv));
        let blocks = Blocks { send, send_stride: of.count, recv, recv_stride: of.count };
        (*rank, *slot, (of.kind, of.root, of.count), blocks)
    });
    let parts: Vec<_> = parts.collect();
    match all.iter().any(|(.., moving)| moving.moved.only_from.is_some()) {
        true => hop(ranks, &all),
        false => take_part(ranks, parts.into_iter()),
    }
    for (rank, number, Moving { slot, moved, .. }) in &all {
        let rank_of = &mut ranks[*rank];
        rank_of.memory.bring(*moved, *slot, moved.comes_out(layout.hosts(), seats[*rank].host));
        std::mem::swap(&mut rank_of.memory.slots, &mut rank_of.memory.wire);
        rank_of.moves[*number].has_ended = true;
    }
    true
}

/// A rail's ranks in the order of hosts: what each has goes to the next one of the ring.
fn hop(ranks: &mut [Rank], members: &[(usize, usize, Moving)]) {
    let count = members[0].2.moved.count;
    let sent = members.iter().map(|(rank, _, Moving { slot, moved: of, .. })| {
        assert_eq!((of.kind, of.count), (CollectiveKind::AllGather, count), "they differ");
        ranks[*rank].memory.read(Place::Slot { rail: of.rail, at: of.send }, *slot, count)
    });
    let sent: Vec<_> = sent.collect();
    for (rank, _, Moving { slot, moved: of, .. }) in members {
        let previous = of.only_from.expect("all go one place");
        let at = of.recv + u64::from(previous) * count;
        ranks[*rank].memory.write(Place::Slot { rail: of.rail, at }, *slot, &sent[previous as usize]);
    }
}

/// Ranks in order, with their slots: a collective, its root and count.
fn take_part(ranks: &mut [Rank], members: impl Iterator<Item = (usize, usize, (CollectiveKind, u32, u64), Blocks)>) {
    let members: Vec<_> = members.collect();
    let (kind, root, count) = members[0].2;
    assert!(members.iter().all(|member| member.2 == (kind, root, count)), "they differ");
    let mut each = ranks.iter_mut().enumerate();
    let mut memories: Vec<_> = members
        .iter()
        .map(|(rank, slot, _, blocks)| {
            let (_, found) = each.find(|(index, _)| index == rank).expect("ascending");
            (&mut found.memory, *slot, *blocks)
        })
        .collect();
    exchange(kind, root as usize, count, &mut memories);
}

/// Carries a call out and compares all that ranks receive.
fn check(
    (layout, ring): (&Layout, Option<&Ring>),
    kind: CollectiveKind,
    (count, root): (u64, u32),
    sizes: Sizes,
    (in_place, seed): (bool, u64),
) {
    let (nranks, mut rng) = (layout.nranks(), StdRng::seed_from_u64(seed));
    let mut ranks = Vec::new();
    let mut inputs = Vec::new();
    for rank in 0..nranks {
        let blocks = send_blocks(kind, nranks, rank, root);
        let recv_blocks = kind.recv_count(1, nranks, rank, root).expect("fits") as usize;
        let input: Vec<Vec<u64>> =
            (0..blocks).map(|_| (0..count).map(|_| rng.random_range(0..1 << 40)).collect()).collect();
        let (mut send, mut recv) = (input.concat(), vec![POISON; recv_blocks * count as usize]);
        let place = match (blocks, recv_blocks) {
            _ if !in_place || kind == CollectiveKind::AllToAll => InPlace::No,
            (0, _) | (_, 0) => InPlace::No,
            (1, 1) => InPlace::RecvInSend(0),
            (_, 1) => InPlace::RecvInSend(rank as usize * count as usize),
            _ => InPlace::SendInRecv(rank as usize * count as usize),
        };
        if let InPlace::SendInRecv(first) = place {
            recv[first..first + send.len()].copy_from_slice(&send);
            send.clear();
        }
        inputs.push(input);
        let plan = Plan { layout, seat: layout.seat(rank), kind, count, root, sizes, ring };
        let memory = Memory { send, recv, place, slots: HashMap::new(), wire: HashMap::new(), slot_count: sizes.slot };
        ranks.push(Rank::new(&plan, memory));
    }
    run(layout, &mut ranks, &mut rng);
    let what =
        format!("{kind} of {count} on {layout:?}, {ring:?}, root {root}, {sizes:?}, in place: {in_place}, seed {seed}");
    for (rank, (of, wanted)) in ranks.iter_mut().zip(results(kind, count as usize, root as usize, &inputs)).enumerate()
    {
        let finish = |sum: u64| if kind.reduces() { sum.wrapping_mul(FINISHED) } else { sum };
        let wanted: Vec<u64> = wanted.concat().into_iter().map(finish).collect();
        assert!(of.memory.read(Place::Recv(0), 0, wanted.len() as u64) == wanted, "{what}: rank {rank}");
    }
}

fn layout(teams: &[u32]) -> Layout {
    let runs: Vec<_> = (0..).zip(teams).map(|(host, &ranks)| HostRun { host, ranks }).collect();
    Layout::new(&runs).expect("a layout")
}

#[test]
fn plans_of_all_ranks_make_up_the_collective() {
    let layouts: [&[u32]; 13] = [
        &[2, 2],
        &[1, 1],
        &[2, 2, 2],
        &[4, 4],
        &[2, 1],
        &[4, 2],
        &[3, 1],
        &[1, 3],
        &[1, 1, 1],
        &[1, 2, 4],
        &[3, 2],
        &[2, 1, 2],
        &[1; 10],
    ];
    let mut rng = StdRng::seed_from_u64(7);
    for teams in layouts {
        let layout = layout(teams);
        for kind in KINDS.into_iter().filter(|kind| Plan::takes(*kind)) {
            for round in 0..12 {
                let sizes = Sizes {
                    slots: rng.random_range(3..=SLOTS_MAX),
                    slot: [64, 1000, 10_000][rng.random_range(0..3)],
                    undivided: [0, 10, 100, 5000][rng.random_range(0..4)],
                    slice: [1, 100, 1000][rng.random_range(0..3)],
                    exchange_from: [1, 50, u64::MAX][rng.random_range(0..3)],
                    is_forked: rng.random(),
                };
                // Of few slices where there are many ranks.
                let most = if sizes.slot < 100 || layout.hosts() > 4 { 5 } else { 6 };
                let count = [1, 2, 7, 64, 500, 1999][rng.random_range(0..most)];
                let root = rng.random_range(0..layout.nranks());
                check((&layout, None), kind, (count, root), sizes, (round % 2 == 1, rng.random()));
            }
        }
    }
}

#[test]
fn reductions_go_round_rings_of_hosts() {
    let layouts: [&[u32]; 7] = [&[1, 1, 1], &[2, 2, 2], &[2, 1, 2], &[1, 2, 4], &[1; 4], &[2; 5], &[1; 9]];
    let mut rng = StdRng::seed_from_u64(8);
    for teams in layouts {
        let layout = layout(teams);
        let mut order: Vec<u32> = (0..layout.hosts()).collect();
        for kind in KINDS.into_iter().filter(|kind| kind.reduces()) {
            for round in 0..16 {
                order.shuffle(&mut rng);
                let ring = Ring::new(&order, layout.hosts()).expect("an order");
                let sizes = Sizes {
                    slots: rng.random_range(3..=SLOTS_MAX),
                    slot: [128, 1000, 10_000][rng.random_range(0..3)],
                    undivided: [0, 10, 100][rng.random_range(0..3)],
                    slice: [1, 100, 1000][rng.random_range(0..3)],
                    exchange_from: [1, 50][rng.random_range(0..2)],
                    is_forked: false,
                };
                let count = [1, 7, 64, 500, 1999][rng.random_range(0..5)];
                let root = rng.random_range(0..layout.nranks());
                let (in_place, seed) = (round % 2 == 1, rng.random());
                check((&layout, Some(&ring)), kind, (count, root), sizes, (in_place, seed));
            }
        }
    }
}

/// Of a rail's part P of a call, n hosts send each other 2 (n - 1) / n P, and along the ring alone.
#[test]
fn a_ring_carries_as_little_as_it_can_and_nothing_beside() {
    let (layout, order) = (layout(&[2; 4]), [2, 0, 3, 1]);
    let ring = Ring::new(&order, 4).expect("an order");
    let sizes = Sizes { slots: 3, slot: 1 << 20, undivided: 0, slice: 1 << 14, exchange_from: 1, is_forked: false };
    for (kind, times) in [(CollectiveKind::AllReduce, 2), (CollectiveKind::ReduceScatter, 1)] {
        let (count, ring) = (1 << 16, Some(&ring));
        let payload = kind.payload_count(count, layout.nranks());
        for rank in 0..layout.nranks() {
            let plan = Plan { layout: &layout, seat: layout.seat(rank), kind, count, root: 0, sizes, ring };
            let of_slice = |slice| (0..plan.segments()).flat_map(move |segment| plan.stages(slice, segment));
            let moves = plan.slices().into_iter().flat_map(of_slice).filter_map(|stage| match stage {
                Stage::Rail(moved) => Some(moved),
                _ => None,
            });
            let mut sent = 0;
            for moved in moves {
                assert_eq!(moved.kind, CollectiveKind::AllGather);
                let place = order.iter().position(|host| *host == plan.seat.host).expect("there");
                let is_of_ring = moved.only_from.is_none_or(|previous| previous == order[(place + 3) % 4]);
                assert!(is_of_ring, "{moved:?}");
                // Round a ring of its own an all-gather sends three times what a hop does.
                sent += if moved.only_from.is_some() { moved.count } else { 3 * moved.count };
            }
            assert_eq!(sent, times * payload / u64::from(layout.rails()) * 3 / 4, "{kind}");
        }
    }
}

#[test]
fn slices_are_those_that_overlap() {
    let sizes = Sizes { slots: 3, slot: 2 << 20, undivided: 2048, slice: 32 << 10, exchange_from: 0, is_forked: false };
    let slices = |teams: &[u32], count| {
        let layout = layout(teams);
        let plan = Plan {
            layout: &layout,
            seat: layout.seat(0),
            kind: CollectiveKind::AllReduce,
            count,
            root: 0,
            sizes,
            ring: None,
        };
        plan.slices().len()
    };
    assert_eq!([0, 1, 2048, 2049, 2050, 64 << 10].map(|count| slices(&[2, 2], count)), [0, 1, 1, 2, 1, 1]);
    for teams in [&[2, 2][..], &[2; 4], &[2; 8]] {
        let of_teams = [256 << 10, 1 << 20, 16 << 20].map(|count| slices(teams, count));
        assert_eq!(of_teams, [4, 16, 256], "however many hosts exchange: {teams:?}");
    }
}

#[test]
fn calls_with_two_moves_have_a_slot_more_of_the_same_memory() {
    let slots = |teams: &[u32], kind, ring: Option<&Ring>| {
        let layout = layout(teams);
        let (seat, sizes) = (layout.seat(0), Sizes::new(SLOTS_BYTES, 4));
        let plan = Plan { layout: &layout, seat, kind, count: 1 << 28, root: 0, sizes, ring };
        let Sizes { slots, slot, .. } = plan.in_best_slots(SLOTS_BYTES, 4).sizes;
        let bytes = slot_bytes(SLOTS_BYTES, slots);
        assert!(slots <= SLOTS_MAX && slots * bytes <= SLOTS_BYTES && slot * 4 <= bytes && bytes.is_multiple_of(4096));
        slots
    };
    let (all_reduce, reduce_scatter) = (CollectiveKind::AllReduce, CollectiveKind::ReduceScatter);
    assert_eq!([&[8, 8][..], &[8; 3], &[8; 64]].map(|teams| slots(teams, all_reduce, None)), [4, 5, 5]);
    assert_eq!([&[8, 8][..], &[8; 3]].map(|teams| slots(teams, reduce_scatter, None)), [4, 4]);
    let ring = Ring::new(&[0, 1, 2], 3).expect("an order");
    assert_eq!([all_reduce, reduce_scatter].map(|kind| slots(&[8; 3], kind, Some(&ring))), [4, 4]);
}

#[test]
fn long_calls_are_forked_where_teams_are_large() {
    let is_forked = |teams: &[u32], kind, count| {
        let layout = layout(teams);
        let plan = Plan {
            layout: &layout,
            seat: layout.seat(0),
            kind,
            count,
            root: 0,
            sizes: Sizes::new(SLOTS_BYTES, 4),
            ring: None,
        };
        plan.in_best_slots(SLOTS_BYTES, 4).in_best_cut(4, Forks::WhereItPays).sizes.is_forked
    };
    let all_reduce = CollectiveKind::AllReduce;
    assert_eq!([1 << 10, 1 << 18, 1 << 28].map(|count| is_forked(&[8, 8], all_reduce, count)), [false, false, true]);
    assert!(is_forked(&[8; 8], all_reduce, 1 << 28) && is_forked(&[4, 4], CollectiveKind::AllGather, 1 << 24));
    // What tests on four GPUs call.
    assert!(is_forked(&[4, 4], all_reduce, 14_000_005));
    assert!(!is_forked(&[2, 2], all_reduce, 1 << 30), "the wire is busier than kernels");
    assert_eq!(
        [&[8, 8][..], &[4, 2], &[2, 2], &[1, 1, 1]].map(|teams| Plan::may_fork(&layout(teams), SLOTS_BYTES)),
        [true, true, false, false]
    );
}

#[test]
fn the_model_knows_how_often_teams_act() {
    for (teams, kind) in [&[2, 2][..], &[4, 4, 4]].into_iter().flat_map(|teams| KINDS.map(|kind| (teams, kind))) {
        let layout = layout(teams);
        let plan = |host| {
            let (seat, sizes) =
                (layout.seat(layout.first_rank(host)), Sizes { exchange_from: 1, ..Sizes::new(SLOTS_BYTES, 4) });
            Plan { layout: &layout, seat, kind, count: 1 << 28, root: 0, sizes, ring: None }
        };
        let calls = |plan: &Plan<'_>, segment| {
            let stages = plan.stages(plan.slices()[0], segment).into_iter();
            let team =
                stages.filter_map(|stage| if let Stage::Team(of) = stage { Some(of.each().len()) } else { None });
            team.fold((0, 0), |(calls, parts), each| (calls + 1, parts + each as u64))
        };
        // Of the host that does most.
        let most = |segment| (0..layout.hosts()).map(|host| calls(&plan(host), segment)).max();
        for segment in 0..plan(0).segments() {
            let told = (plan(0).team_calls()[segment], plan(0).team_parts()[segment]);
            assert_eq!(Some(told), most(segment), "{kind}, {teams:?}, segment {segment}");
        }
    }
}

#[test]
fn calls_of_several_slices_can_all_be_forked() {
    let layout = layout(&[2, 2]);
    let plan = |count| {
        let (seat, sizes) = (layout.seat(0), Sizes::new(SLOTS_BYTES, 4));
        let plan = Plan { layout: &layout, seat, kind: CollectiveKind::AllToAll, count, root: 0, sizes, ring: None };
        plan.in_best_slots(SLOTS_BYTES, 4).in_best_cut(4, Forks::Always)
    };
    for count in [1, 1 << 10, 1 << 16, 1 << 20, 1 << 24] {
        assert_eq!(plan(count).sizes.is_forked, plan(count).slices().len() > 1, "{count}");
    }
    assert!(plan(1 << 24).sizes.is_forked);
}
