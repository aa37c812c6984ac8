//! Plans carried out for all ranks, and compared with what the collective is.

use std::collections::HashMap;

use mccs_ipc::layout::Layout;
use mccs_ipc::protocol::HostRun;
use mccs_ipc::types::CollectiveKind;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::{Exchange, Move, Part, Place, Plan, Sizes, Stage, order};

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
const SLOTS: usize = 3;
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

fn after(place: Place, by: u64) -> Place {
    match place {
        Place::Send(at) => Place::Send(at + by),
        Place::Recv(at) => Place::Recv(at + by),
        Place::Slot { rail, at } => Place::Slot { rail, at: at + by },
    }
}

/// A collective of some ranks, by their own buffers and strides.
fn exchange(kind: CollectiveKind, root: usize, count: u64, members: &mut [(&mut Memory, usize, Blocks)]) {
    let nranks = members.len() as u32;
    let mut send = Vec::new();
    for (rank, (memory, slot, blocks)) in members.iter_mut().enumerate() {
        let read = |block| memory.read(after(blocks.send, block as u64 * blocks.send_stride), *slot, count);
        send.push((0..send_blocks(kind, nranks, rank as u32, root as u32)).map(read).collect::<Vec<_>>());
    }
    let results = results(kind, count as usize, root, &send);
    for ((memory, slot, blocks), result) in members.iter_mut().zip(results) {
        for (block, values) in result.iter().enumerate() {
            memory.write(after(blocks.recv, block as u64 * blocks.recv_stride), *slot, values);
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

/// A stage that others take part in.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Joint {
    Team(Exchange),
    Rail(Move),
}

/// A rank that carries a plan out.
struct Rank {
    /// What is left of its stages, the first one last.
    stages: Vec<(usize, Stage)>,
    memory: Memory,
}

impl Rank {
    /// Does what it does alone. Returns what comes next, with its slot.
    fn advance(&mut self, hosts: u32) -> Option<(usize, Joint)> {
        while let Some((slot, stage)) = self.stages.last().copied() {
            match stage {
                Stage::Team(exchange) => return Some((slot, Joint::Team(exchange))),
                Stage::Rail(moved) => return Some((slot, Joint::Rail(moved))),
                Stage::Copy { from, to, count } => {
                    let values = self.memory.read(from, slot, count);
                    self.memory.write(to, slot, &values);
                }
                Stage::Combine { rail, parts, count, to } => {
                    let part = |host| Place::Slot { rail, at: parts.of(host) };
                    let parts: Vec<_> = (0..hosts).map(|host| self.memory.read(part(host), slot, count)).collect();
                    let sum = |at: usize| parts.iter().fold(0, |sum: u64, part| sum.wrapping_add(part[at]));
                    self.memory.write(to, slot, &(0..count as usize).map(sum).collect::<Vec<_>>());
                }
            }
            self.stages.pop();
        }
        None
    }
}

/// Carries everything out, joint stages when all who are in them have come.
fn run(layout: &Layout, ranks: &mut [Rank]) {
    loop {
        let hosts = layout.hosts();
        let next: Vec<_> = ranks.iter_mut().map(|rank| rank.advance(hosts)).collect();
        if next.iter().all(Option::is_none) {
            return;
        }
        let seats: Vec<_> = (0..layout.nranks()).map(|rank| layout.seat(rank)).collect();
        let mut has_moved = false;
        for host in 0..layout.hosts() {
            let team: Vec<_> = (0..ranks.len()).filter(|rank| seats[*rank].host == host).collect();
            let all = team.iter().map(|rank| match next[*rank] {
                Some((slot, Joint::Team(exchange))) => Some((*rank, slot, exchange)),
                _ => None,
            });
            if let Some(all) = all.collect::<Option<Vec<_>>>() {
                take_part(
                    ranks,
                    all.iter().map(|(rank, slot, of)| {
                        (
                            *rank,
                            *slot,
                            of.kind,
                            of.root,
                            of.count,
                            Blocks {
                                send: of.send,
                                send_stride: of.send_stride,
                                recv: of.recv,
                                recv_stride: of.recv_stride,
                            },
                        )
                    }),
                );
                has_moved = true;
            }
        }
        for rail in 0..layout.rails() {
            let acts = |rank: usize| {
                let each = layout.rails_each(seats[rank].host);
                (seats[rank].local == rail / each).then_some(rail % each)
            };
            let members: Vec<_> = (0..ranks.len()).filter_map(|rank| Some((rank, acts(rank)?))).collect();
            assert_eq!(members.len(), layout.hosts() as usize);
            let all = members.iter().map(|(rank, own)| match next[*rank] {
                Some((slot, Joint::Rail(moved))) if moved.rail == *own => Some((*rank, slot, moved)),
                _ => None,
            });
            if let Some(all) = all.collect::<Option<Vec<_>>>() {
                for (rank, slot, moved) in &all {
                    let memory = &mut ranks[*rank].memory;
                    memory.bring(*moved, *slot, moved.goes_in(layout.hosts(), seats[*rank].host));
                    std::mem::swap(&mut memory.slots, &mut memory.wire);
                }
                take_part(
                    ranks,
                    all.iter().map(|(rank, slot, of)| {
                        let place = |at| Place::Slot { rail: of.rail, at };
                        let host = seats[*rank].host;
                        let bytes = |count: Option<u64>| count.expect("fits");
                        let send = (of.send, bytes(of.kind.send_count(of.count, layout.hosts(), host, of.root)));
                        let recv = (of.recv, bytes(of.kind.recv_count(of.count, layout.hosts(), host, of.root)));
                        // As the service checks what a tenant names.
                        assert!(of.kind.accepts_buffers(host, of.root, send, recv), "{of:?}");
                        (
                            *rank,
                            *slot,
                            of.kind,
                            of.root,
                            of.count,
                            Blocks {
                                send: place(of.send),
                                send_stride: of.count,
                                recv: place(of.recv),
                                recv_stride: of.count,
                            },
                        )
                    }),
                );
                for (rank, slot, moved) in &all {
                    let memory = &mut ranks[*rank].memory;
                    memory.bring(*moved, *slot, moved.comes_out(layout.hosts(), seats[*rank].host));
                    std::mem::swap(&mut memory.slots, &mut memory.wire);
                }
                has_moved = true;
            }
        }
        assert!(has_moved, "they wait for each other: {next:?}");
    }
}

/// Ranks in order, with their slots.
fn take_part(ranks: &mut [Rank], members: impl Iterator<Item = (usize, usize, CollectiveKind, u32, u64, Blocks)>) {
    let members: Vec<_> = members.collect();
    let (_, _, kind, root, count, _) = members[0];
    assert!(members.iter().all(|member| (member.2, member.3, member.4) == (kind, root, count)), "they differ");
    let mut each = ranks.iter_mut().enumerate();
    let mut memories: Vec<_> = members
        .iter()
        .map(|(rank, slot, _, _, _, blocks)| {
            let (_, found) = each.find(|(index, _)| index == rank).expect("ascending");
            found.stages.pop();
            (&mut found.memory, *slot, *blocks)
        })
        .collect();
    exchange(kind, root as usize, count, &mut memories);
}

/// Carries a call out and compares all that ranks receive.
fn check(layout: &Layout, kind: CollectiveKind, count: u64, root: u32, sizes: Sizes, (in_place, seed): (bool, u64)) {
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
        let plan = Plan { layout, seat: layout.seat(rank), kind, count, root, sizes };
        let slices = plan.slices();
        let staged = order(slices.len(), plan.segments(), SLOTS).flat_map(|(slice, segment)| {
            plan.stages(slices[slice], segment).into_iter().map(move |stage| (slice % SLOTS, stage))
        });
        let mut stages: Vec<_> = staged.collect();
        stages.reverse();
        let memory = Memory { send, recv, place, slots: HashMap::new(), wire: HashMap::new(), slot_count: sizes.slot };
        ranks.push(Rank { stages, memory });
    }
    run(layout, &mut ranks);
    let what = format!("{kind} of {count} on {layout:?}, root {root}, {sizes:?}, in place: {in_place}, seed {seed}");
    for (rank, (of, wanted)) in ranks.iter_mut().zip(results(kind, count as usize, root as usize, &inputs)).enumerate()
    {
        let wanted = wanted.concat();
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
                    slot: [64, 1000, 10_000][rng.random_range(0..3)],
                    undivided: [0, 10, 100, 5000][rng.random_range(0..4)],
                    slice: [1, 100, 1000][rng.random_range(0..3)],
                    exchange_from: [1, 50, u64::MAX][rng.random_range(0..3)],
                };
                // Of few slices where there are many ranks.
                let most = if sizes.slot < 100 || layout.hosts() > 4 { 5 } else { 6 };
                let count = [1, 2, 7, 64, 500, 1999][rng.random_range(0..most)];
                let root = rng.random_range(0..layout.nranks());
                check(&layout, kind, count, root, sizes, (round % 2 == 1, rng.random()));
            }
        }
    }
}

#[test]
fn slices_are_those_that_overlap() {
    let layout = layout(&[2, 2]);
    let sizes = Sizes { slot: 2 << 20, undivided: 2048, slice: 32 << 10, exchange_from: 0 };
    let slices = |count| {
        let plan =
            Plan { layout: &layout, seat: layout.seat(0), kind: CollectiveKind::AllReduce, count, root: 0, sizes };
        plan.slices().len()
    };
    assert_eq!([0, 1, 2048, 2049, 2050, 64 << 10].map(slices), [0, 1, 1, 2, 1, 1]);
    assert_eq!([256 << 10, 1 << 20, 16 << 20].map(slices), [4, 16, 256]);
}
