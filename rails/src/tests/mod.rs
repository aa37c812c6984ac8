//! Plans carried out for all ranks, and compared with what the collective is.

mod memory;
mod rank;
mod run;

use std::collections::HashMap;

use mccs_ipc::layout::Layout;
use mccs_ipc::protocol::HostRun;
use mccs_ipc::types::CollectiveKind;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{Rng as _, SeedableRng as _};

use self::memory::{InPlace, Memory, POISON, results, send_blocks};
use self::rank::{FINISHED, Rank};
use self::run::run;
use super::{Forks, Place, Plan, Ring, SLOTS_BYTES, SLOTS_MAX, Sizes, Stage, slot_bytes};

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

/// A call of all ranks.
#[derive(Debug, Clone, Copy)]
struct Call<'a> {
    layout: &'a Layout,
    ring: Option<&'a Ring>,
    kind: CollectiveKind,
    count: u64,
    root: u32,
    sizes: Sizes,
    in_place: bool,
    /// Seed of data and of the order of events.
    seed: u64,
}

/// Carries a call out and compares all that ranks receive.
fn check(call: Call<'_>) {
    let Call { layout, ring, kind, count, root, sizes, in_place, seed } = call;
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
    for (rank, (of, wanted)) in ranks.iter_mut().zip(results(kind, count as usize, root as usize, &inputs)).enumerate()
    {
        let finish = |sum: u64| if kind.reduces() { sum.wrapping_mul(FINISHED) } else { sum };
        let wanted: Vec<u64> = wanted.concat().into_iter().map(finish).collect();
        assert!(of.memory.read(Place::Recv(0), 0, wanted.len() as u64) == wanted, "{call:?}: rank {rank}");
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
                    is_bounced: false,
                };
                // Few slices if there are many ranks.
                let most = if sizes.slot < 100 || layout.hosts() > 4 { 5 } else { 6 };
                let count = [1, 2, 7, 64, 500, 1999][rng.random_range(0..most)];
                let root = rng.random_range(0..layout.nranks());
                let (in_place, seed) = (round % 2 == 1, rng.random());
                check(Call { layout: &layout, ring: None, kind, count, root, sizes, in_place, seed });
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
                    is_bounced: false,
                };
                let count = [1, 7, 64, 500, 1999][rng.random_range(0..5)];
                let root = rng.random_range(0..layout.nranks());
                let (in_place, seed) = (round % 2 == 1, rng.random());
                check(Call { layout: &layout, ring: Some(&ring), kind, count, root, sizes, in_place, seed });
            }
        }
    }
}

/// With a rail's part P of a call, n hosts send each other 2 (n - 1) / n P, and along the ring alone.
#[test]
fn a_ring_carries_as_little_as_it_can_and_nothing_beside() {
    let (layout, order) = (layout(&[2; 4]), [2, 0, 3, 1]);
    let ring = Ring::new(&order, 4).expect("an order");
    let sizes = Sizes {
        slots: 3,
        slot: 1 << 20,
        undivided: 0,
        slice: 1 << 14,
        exchange_from: 1,
        is_forked: false,
        is_bounced: false,
    };
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
    let sizes = Sizes {
        slots: 3,
        slot: 2 << 20,
        undivided: 2048,
        slice: 32 << 10,
        exchange_from: 0,
        is_forked: false,
        is_bounced: false,
    };
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
    // Calls of the tests on four GPUs.
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
        // The host that does most counts.
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
