use mccs_ipc::types::CollectiveKind;
use proptest::prelude::*;
use proptest::strategy::Strategy as Generator;

use super::{Strategy, *};

fn problems() -> impl Generator<Value = (Problem, Vec<Vec<u32>>, u32)> {
    (1u32..=9, prop::sample::select(CollectiveKind::ALL), 0u64..3000, 1usize..4, 1u32..6, any::<u32>()).prop_flat_map(
        |(nranks, kind, count, channels, chunks, root)| {
            let order = Just((0..nranks).collect::<Vec<_>>()).prop_shuffle();
            let problem = Problem { kind, nranks, root: root % nranks, count };
            (Just(problem), prop::collection::vec(order, channels), Just(chunks))
        },
    )
}

fn strategy(ring_orders: Vec<Vec<u32>>, pipeline_chunks: u32) -> Strategy {
    Strategy { epoch: 0, choice: Choice::Auto, ring_orders, pipeline_chunks }
}

/// All-to-all has no in-place form.
fn can_be_in_place(kind: CollectiveKind) -> bool {
    kind != CollectiveKind::AllToAll
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_schedule_is_proven((problem, orders, chunks) in problems()) {
        let strategy = strategy(orders, chunks);
        prop_assert_eq!(strategy.validate(problem.nranks), Ok(()));
        for algorithm in Algorithm::ALL {
            let schedule = build(&problem, algorithm, &strategy);
            prop_assert_eq!(verify(&schedule, false), Ok(()), "{:?} {:?}", algorithm, problem);
            if can_be_in_place(problem.kind) {
                prop_assert_eq!(verify(&schedule, true), Ok(()), "in place: {:?} {:?}", algorithm, problem);
            }
        }
    }

    /// A verifier that accepts broken schedules proves nothing: every mutation must be refused, unless it left the
    /// schedule as it was or only removed work on nothing.
    #[test]
    fn broken_schedules_are_refused(
        (problem, orders, chunks) in problems(), at in any::<prop::sample::Index>(), mutation in 0usize..4,
        algorithm in prop::sample::select(&Algorithm::ALL[..]),
    ) {
        let original = build(&problem, algorithm, &strategy(orders, chunks));
        if let Some(broken) = mutate(&original, at, mutation) {
            prop_assert!(verify(&broken, false).is_err(), "{:?}", broken);
        }
    }
}

/// Breaks one step that moves data; `None` where the schedule has none.
fn mutate(schedule: &Schedule, at: prop::sample::Index, mutation: usize) -> Option<Schedule> {
    let mut broken = schedule.clone();
    match &mut broken.shape {
        Shape::Direct(moves) => {
            if moves.is_empty() {
                return None;
            }
            let index = at.index(moves.len());
            match mutation {
                0 => drop(moves.remove(index)),
                1 => moves[index].dsts[0].span.offset += 1,
                2 => {
                    let twice = moves[index].srcs[0];
                    moves[index].srcs.push(twice);
                }
                _ => drop(moves[index].dsts.pop()),
            }
        }
        Shape::Message(channels) => {
            let moves_data = |step: &Step| match step {
                Step::Send { src: span, .. } | Step::Recv { dst: span, .. } => span.count > 0,
                Step::RecvReduce { dst, .. } | Step::Copy { dst, .. } => dst.count > 0,
            };
            let mut steps: Vec<(usize, usize, usize)> = Vec::new();
            for (c, channel) in channels.iter().enumerate() {
                for (r, program) in channel.programs.iter().enumerate() {
                    steps.extend(program.iter().enumerate().filter(|(_, s)| moves_data(s)).map(|(s, _)| (c, r, s)));
                }
            }
            if steps.is_empty() {
                return None;
            }
            let (c, r, s) = steps[at.index(steps.len())];
            let program = &mut channels[c].programs[r];
            match (mutation, &mut program[s]) {
                (0, _) => drop(program.remove(s)),
                (1, Step::RecvReduce { finish, .. }) => *finish = !*finish,
                (2, Step::RecvReduce { incoming_raw, .. }) => *incoming_raw = !*incoming_raw,
                (3, Step::RecvReduce { local_raw, .. }) => *local_raw = !*local_raw,
                (1, Step::Send { src, .. }) => src.count -= 1,
                (_, Step::Send { peer, .. }) => *peer = (*peer + 1) % schedule.problem.nranks,
                (_, Step::Recv { dst, .. } | Step::Copy { dst, .. }) => dst.offset += 1,
                _ => return None,
            }
        }
    }
    Some(broken)
}

/// What the vector clocks are for: this program is right in most interleavings, and wrong in some.
#[test]
fn overwriting_what_a_peer_may_still_read_is_refused() {
    let problem = Problem { kind: CollectiveKind::AllReduce, nranks: 2, root: 0, count: 8 };
    let all = |buffer| Span::new(buffer, 0, 8);
    let reduce = |peer, dst| Step::RecvReduce {
        peer,
        local: all(Buffer::Send),
        dst: all(dst),
        incoming_raw: true,
        local_raw: true,
        finish: true,
    };
    let program = |peer| vec![Step::Send { peer, src: all(Buffer::Send) }, reduce(peer, Buffer::Recv)];
    let channel = Channel { programs: vec![program(1), program(0)] };
    let schedule = Schedule { problem, scratch_count: 0, shape: Shape::Message(vec![channel]) };
    assert_eq!(verify(&schedule, false), Ok(()));
    // In place, rank 0 overwrites its input while rank 1 may not have read it yet.
    let refused = verify(&schedule, true).expect_err("a race");
    assert!(refused.to_string().contains("may still read"), "{refused}");
}

#[test]
fn strategies_that_do_not_fit_are_refused() {
    let check = |order: &[u32]| strategy(vec![vec![0, 1, 2], order.to_vec()], 1).validate(3);
    assert_eq!(check(&[2, 1, 0]), Ok(()));
    assert_eq!(check(&[0, 1]), Err(StrategyError::WrongLength { channel: 1, actual: 2, nranks: 3 }));
    assert_eq!(check(&[0, 1, 3]), Err(StrategyError::NoSuchRank { channel: 1, rank: 3, last: 2 }));
    assert_eq!(check(&[0, 1, 1]), Err(StrategyError::RankTwice { channel: 1, rank: 1 }));
    let many = strategy(vec![vec![0]; 65], 1);
    assert_eq!(many.validate(1), Err(StrategyError::TooManyChannels(65)));
}

#[test]
fn the_cost_model_prefers_what_is_known_to_be_better() {
    let problem = |count| Problem { kind: CollectiveKind::AllReduce, nranks: 16, root: 0, count };
    let strategy = Strategy::initial(Choice::Auto, 16, 1);
    let one_host = CostModel::one_host();
    for count in [1, 1 << 10, 1 << 24] {
        assert_eq!(one_host.choose(&problem(count), 4, &strategy), Algorithm::Direct);
    }
    let network = CostModel { hosts: (0..16).collect(), ..CostModel::one_host() };
    assert_eq!(network.choose(&problem(2), 4, &strategy), Algorithm::Tree);
    assert_eq!(network.choose(&problem(1 << 24), 4, &strategy), Algorithm::Ring);
    let pinned = Strategy { choice: Choice::Pinned(Algorithm::Tree), ..strategy.clone() };
    assert_eq!(network.choose(&problem(1 << 24), 4, &pinned), Algorithm::Tree);
    let direct = Strategy { choice: Choice::Pinned(Algorithm::Direct), ..strategy.clone() };
    assert_ne!(
        network.choose(&problem(1 << 24), 4, &direct),
        Algorithm::Direct,
        "buffers of other hosts are not mapped"
    );
    let times: Vec<_> =
        (0..24).map(|log2| network.estimate_ns(&build(&problem(1 << log2), Algorithm::Ring, &strategy), 4)).collect();
    assert!(times.is_sorted(), "more data never takes less time: {times:?}");
}
