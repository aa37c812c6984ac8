//! Schedules of [`build`] are proven; those that it cannot make, and those that are broken in known ways, are refused.

use mccs_config::service::AlgorithmChoice;
use mccs_ipc::types::CollectiveKind;
use proptest::prelude::*;

use super::{algorithms, cases, fine_strategy, hosts};
use crate::{Strategy, *};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_schedule_is_proven((problem, strategy) in cases()) {
        for algorithm in algorithms(&strategy) {
            let schedule = build(&problem, algorithm, &strategy).expect("problem and strategy are valid");
            for in_place in [false, true] {
                let proven = verify(&schedule, in_place);
                prop_assert_eq!(proven, Ok(()), "{:?} in place {}", algorithm, in_place);
            }
            if let (Shape::Message(channels), true) = (&schedule.shape, problem.kind != CollectiveKind::Barrier) {
                let mut steps = channels.iter().flat_map(|channel| &channel.programs).flat_map(|program| &program.steps);
                prop_assert!(steps.all(|step| step.count() > 0), "steps that move nothing cost time");
            }
        }
    }
}

fn whole(buffer: Buffer) -> Span {
    Span::new(buffer, 0, 8)
}

fn message(kind: CollectiveKind, programs: Vec<Vec<Step>>) -> Schedule {
    let problem = Problem {
        kind,
        nranks: programs.len() as u32,
        root: 0,
        count: 8,
        premultiply: false,
        leaves_own: false,
        one_hop: false,
    };
    let program = |(rank, steps)| Program { ranks: vec![rank], steps };
    let programs = (0..).zip(programs).map(program).collect();
    Schedule { problem, scratch_count: 8, shape: Shape::Message(vec![Channel { programs }]) }
}

fn at(rank: u32, buffer: Buffer) -> RankSpan {
    RankSpan { rank, span: whole(buffer) }
}

/// The only fault of a schedule, out of place.
fn fault(schedule: &Schedule) -> Fault {
    verify(schedule, false).expect_err("the schedule is broken").fault
}

/// Two ranks that exchange their inputs.
fn exchange() -> Schedule {
    let program = |rank, peer| {
        let reduce = Step::RecvReduce {
            peer,
            srcs: vec![at(rank, Buffer::Send)],
            dsts: vec![at(rank, Buffer::Recv)],
            incoming_raw: true,
            srcs_raw: true,
            finish: true,
        };
        vec![Step::Send { peer, src: at(rank, Buffer::Send) }, reduce]
    };
    message(CollectiveKind::AllReduce, vec![program(0, 1), program(1, 0)])
}

/// The purpose of the vector clocks: in place, this program is right in some interleavings, and wrong in others.
#[test]
fn overwriting_what_a_peer_may_still_read_is_refused() {
    assert_eq!(verify(&exchange(), false), Ok(()));
    let refused = verify(&exchange(), true).expect_err("a race");
    assert!(matches!(refused.fault, Fault::OverwritesOffer { peer: 0, .. }), "{refused}");
    let text = refused.to_string();
    assert_eq!(text, "channel 0, rank 1, step 1: overwrites Recv[0..8] of rank 1, which program 0 may still read");
}

#[test]
fn programs_that_wait_for_each_other_are_refused() {
    let program = |rank, peer| {
        let recv = Step::Recv { peer, dsts: vec![at(rank, Buffer::Recv)] };
        vec![recv, Step::Send { peer, src: at(rank, Buffer::Send) }]
    };
    let schedule = message(CollectiveKind::AllReduce, vec![program(0, 1), program(1, 0)]);
    assert_eq!(fault(&schedule), Fault::WaitsForEver(1));
}

#[test]
fn offers_that_nobody_takes_are_refused() {
    let send = Step::Send { peer: 0, src: at(1, Buffer::Send) };
    let schedule = message(CollectiveKind::Reduce, vec![vec![], vec![send]]);
    assert_eq!(fault(&schedule), Fault::NeverReceived(0));
}

/// Pre-multiplying takes the scalar of the rank whose memory it is: forwarded raw contributions would get another's.
#[test]
fn raw_contributions_of_other_ranks_are_refused() {
    let reduce = |peer, local, finish: bool| Step::RecvReduce {
        peer,
        srcs: vec![at(0, local)],
        dsts: vec![at(0, Buffer::Recv)],
        incoming_raw: true,
        srcs_raw: !finish,
        finish,
    };
    let schedule = message(
        CollectiveKind::Reduce,
        vec![
            vec![reduce(1, Buffer::Send, false), reduce(1, Buffer::Recv, true)],
            vec![
                Step::Send { peer: 0, src: at(1, Buffer::Send) },
                Step::Recv { peer: 2, dsts: vec![at(1, Buffer::Scratch)] },
                Step::Send { peer: 0, src: at(1, Buffer::Scratch) },
            ],
            vec![Step::Send { peer: 1, src: at(2, Buffer::Send) }],
        ],
    );
    let Fault::WrongFlag { operand: "the offer", held, .. } = fault(&schedule) else { panic!("{}", fault(&schedule)) };
    assert_eq!(held, "raw 2[0]");
}

fn broadcast() -> Problem {
    let (kind, leaves_own) = (CollectiveKind::Broadcast, false);
    Problem { kind, nranks: 2, root: 0, count: 8, premultiply: false, leaves_own, one_hop: false }
}

#[test]
fn channels_and_moves_that_meet_are_refused() {
    let mut twice = exchange();
    if let Shape::Message(channels) = &mut twice.shape {
        channels.push(channels[0].clone());
    }
    assert!(matches!(fault(&twice), Fault::Conflict { .. }));
    let problem = broadcast();
    let remote = |rank, buffer, offset, count| RankSpan { rank, span: Span::new(buffer, offset, count) };
    let part = |offset, count| Move {
        srcs: vec![remote(0, Buffer::Send, offset, count)],
        dsts: (0..2).map(|rank| remote(rank, Buffer::Recv, offset, count)).collect(),
    };
    let single_pass = |moves| Schedule { problem, scratch_count: 0, shape: Shape::SinglePass(moves) };
    assert_eq!(verify(&single_pass(vec![part(0, 5), part(5, 3)]), true), Ok(()));
    assert!(matches!(fault(&single_pass(vec![part(0, 5), part(4, 4)])), Fault::Conflict { .. }));
    assert!(matches!(fault(&single_pass(vec![part(0, 5)])), Fault::ReadsUnwritten(_)));
}

#[test]
fn a_barrier_that_lets_somebody_through_is_refused() {
    let strategy = fine_strategy(Vec::new());
    let problem = Problem {
        kind: CollectiveKind::Barrier,
        nranks: 9,
        root: 0,
        count: 0,
        premultiply: false,
        leaves_own: false,
        one_hop: false,
    };
    let mut schedule = build(&problem, Algorithm::Ring, &strategy).expect("valid");
    assert_eq!(verify(&schedule, false), Ok(()));
    if let Shape::Message(channels) = &mut schedule.shape {
        for program in &mut channels[0].programs {
            assert_eq!(program.steps.len(), 2 * 4, "four rounds reach nine ranks");
            program.steps.truncate(2 * 3);
        }
    }
    assert!(matches!(fault(&schedule), Fault::PassesBefore(_)));
}

#[test]
fn strategies_that_do_not_fit_are_refused() {
    let problem = Problem {
        kind: CollectiveKind::AllReduce,
        nranks: 3,
        root: 0,
        count: 8,
        premultiply: false,
        leaves_own: false,
        one_hop: false,
    };
    let check = |order: &[u32]| {
        let strategy = fine_strategy(vec![vec![0, 1, 2], order.to_vec()]);
        build(&problem, Algorithm::Ring, &strategy).map(|_| ())
    };
    let refused = |error: StrategyError| Err(ScheduleError::Strategy(error));
    assert_eq!(check(&[2, 1, 0]), Ok(()));
    assert_eq!(check(&[0, 1]), refused(StrategyError::WrongLength { channel: 1, actual: 2, nranks: 3 }));
    assert_eq!(check(&[0, 1, 3]), refused(StrategyError::NoSuchRank { channel: 1, rank: 3, last: 2 }));
    assert_eq!(check(&[0, 1, 1]), refused(StrategyError::RankTwice { channel: 1, rank: 1 }));
    let with_hosts = |hosts: &[&[u32]]| {
        let hosts = hosts.iter().map(|ranks| ranks.to_vec()).collect();
        Strategy { hosts, ..fine_strategy(Vec::new()) }.validate(3)
    };
    assert_eq!(with_hosts(&[&[0, 2], &[1]]), Ok(()));
    assert_eq!(with_hosts(&[&[0], &[1]]), Err(StrategyError::NotOnOneHost { rank: 2, actual: 0 }));
    assert_eq!(with_hosts(&[&[0, 1], &[1, 2]]), Err(StrategyError::NotOnOneHost { rank: 1, actual: 2 }));
    assert_eq!(with_hosts(&[&[0, 1, 2], &[]]), Err(StrategyError::BadHost(1)));
    assert_eq!(with_hosts(&[&[1, 0, 2]]), Err(StrategyError::BadHost(0)));
    assert_eq!(with_hosts(&[&[0, 1, 3]]), Err(StrategyError::BadHost(0)));
    let many = fine_strategy(vec![vec![0]; CHANNELS_MAX + 1]);
    assert_eq!(many.validate(1), Err(StrategyError::TooManyChannels(CHANNELS_MAX + 1)));
}

/// Rails move what is between hosts; the library takes the own part from where it is.
#[test]
fn an_all_to_all_may_leave_the_own_part() {
    for (nranks, is_mapped) in [(1, false), (2, false), (5, false), (5, true)] {
        let hosts = if is_mapped { Vec::new() } else { (0..nranks).map(|rank| vec![rank]).collect() };
        let strategy = Strategy { hosts, ..fine_strategy(Vec::new()) };
        let kind = CollectiveKind::AllToAll;
        let problem = Problem { kind, nranks, root: 0, count: 8, premultiply: false, leaves_own: true, one_hop: false };
        for algorithm in algorithms(&strategy) {
            let schedule = build(&problem, algorithm, &strategy).expect("valid");
            assert_eq!(verify(&schedule, false), Ok(()), "{algorithm:?}");
            match &schedule.shape {
                Shape::SinglePass(moves) => {
                    let stays = |one: &Move| one.srcs[0].rank == one.dsts[0].rank;
                    assert!(!moves.iter().any(stays), "{moves:?}");
                }
                Shape::Message(channels) => {
                    let mut steps = channels.iter().flat_map(|channel| &channel.programs).flat_map(|one| &one.steps);
                    assert!(steps.all(|step| !matches!(step, Step::Copy { .. })), "{algorithm:?}");
                }
            }
        }
    }
    // A channel is a NIC: long blocks go by all of them.
    let strategy = Strategy::initial(AlgorithmChoice::Auto, 5, 3, &(0..5).map(|rank| vec![rank]).collect::<Vec<_>>());
    let channels = |count| {
        let kind = CollectiveKind::AllToAll;
        let problem = Problem { kind, nranks: 5, root: 0, count, premultiply: false, leaves_own: true, one_hop: false };
        let schedule = build(&problem, Algorithm::Ring, &strategy).expect("valid");
        assert_eq!(verify(&schedule, false), Ok(()), "{count}");
        if let Shape::Message(channels) = schedule.shape { channels.len() } else { 0 }
    };
    assert_eq!([1, 4_095, 1 << 16].map(channels), [1, 1, 3]);
}

/// A reduction by GPUs round a ring of hosts goes on by one place at a time, on each channel.
#[test]
fn one_hop_takes_what_each_rank_has_to_the_next_one_of_the_ring() {
    for (ring, channels) in [(vec![], 1), (vec![2, 0, 3, 1], 1), (vec![3, 1, 0, 2], 3), (vec![0, 1, 2, 3], 5)] {
        let hosts: Vec<Vec<u32>> = (0..4).map(|rank| vec![rank]).collect();
        // The order of other collectives is another one.
        let ring_orders = vec![vec![3, 2, 1, 0]; channels];
        let strategy = Strategy { hosts, reduction_ring: ring.clone(), ..fine_strategy(ring_orders) };
        let (kind, count) = (CollectiveKind::AllGather, 10);
        let problem = Problem { kind, nranks: 4, root: 0, count, premultiply: false, leaves_own: false, one_hop: true };
        let ring = if ring.is_empty() { vec![0, 1, 2, 3] } else { ring };
        for algorithm in algorithms(&strategy) {
            let schedule = build(&problem, algorithm, &strategy).expect("valid");
            assert_eq!(verify(&schedule, false), Ok(()), "{algorithm:?}");
            let Shape::Message(all) = &schedule.shape else { panic!("hosts pass messages") };
            for (place, rank) in ring.iter().enumerate() {
                let (next, previous) = (ring[(place + 1) % 4], ring[(place + 3) % 4]);
                let mut whole = 0;
                for channel in all {
                    let [Step::Send { peer, src }, Step::Recv { peer: from, dsts }] =
                        &channel.programs[*rank as usize].steps[..]
                    else {
                        panic!("it sends and receives")
                    };
                    assert_eq!((*peer, *from, src.rank, src.span.offset), (next, previous, *rank, whole));
                    let to = Span::new(Buffer::Recv, u64::from(previous) * count + whole, src.span.count);
                    assert_eq!(dsts[..], [RankSpan { rank: *rank, span: to }]);
                    whole += src.span.count;
                }
                assert_eq!(whole, count);
            }
        }
    }
    let twice = Strategy { reduction_ring: vec![0, 0], ..fine_strategy(Vec::new()) };
    assert_eq!(twice.validate(2), Err(StrategyError::RankTwice { channel: 0, rank: 0 }));
}

#[test]
fn problems_that_contradict_themselves_are_refused() {
    let broadcast = |nranks, root, count| {
        let problem = Problem {
            kind: CollectiveKind::Broadcast,
            nranks,
            root,
            count,
            premultiply: false,
            leaves_own: false,
            one_hop: false,
        };
        build(&problem, Algorithm::Tree, &fine_strategy(Vec::new())).map(|_| ())
    };
    assert_eq!(broadcast(3, 2, 8), Ok(()));
    assert_eq!(broadcast(0, 0, 8), Err(ScheduleError::NoRanks));
    assert_eq!(broadcast(3, 3, 8), Err(ScheduleError::NoSuchRoot { root: 3, nranks: 3 }));
    let count = u64::MAX / 2;
    assert_eq!(broadcast(3, 0, count), Err(ScheduleError::TooLong { count, nranks: 3 }));
}

/// Scratch is memory that the service pays for: it must not grow with the number of ranks once data is cut into chunks.
#[test]
fn a_reduce_scatter_reuses_its_scratch() {
    let problem = Problem {
        kind: CollectiveKind::ReduceScatter,
        nranks: 12,
        root: 0,
        count: 1 << 20,
        premultiply: false,
        leaves_own: false,
        one_hop: false,
    };
    let strategy = Strategy { pipeline_chunks: 64, ..Strategy::initial(AlgorithmChoice::Auto, 12, 2, &[]) };
    let schedule = build(&problem, Algorithm::Ring, &strategy).expect("valid");
    assert_eq!(verify(&schedule, false), Ok(()));
    assert!(schedule.scratch_count <= problem.count / 5, "{} elements", schedule.scratch_count);
}

/// The purpose of hierarchy: a host's link carries what its ranks have in common once.
#[test]
fn hosts_send_as_few_bytes_as_their_algorithm_says() {
    let sent = |algorithm, kind, placement: &[usize], count| {
        let nranks = placement.len() as u32;
        let problem = Problem { kind, nranks, root: 0, count, premultiply: false, leaves_own: false, one_hop: false };
        let strategy = Strategy::initial(AlgorithmChoice::Auto, nranks, 1, &hosts(placement));
        let schedule = build(&problem, algorithm, &strategy).expect("valid");
        let between = schedule.counts_between(&strategy.hosts);
        between.iter().map(|to| to.iter().sum::<u64>()).collect::<Vec<_>>()
    };
    use CollectiveKind::{AllGather, AllReduce, Broadcast, ReduceScatter};
    let four_by_two = [0, 0, 1, 1, 2, 2, 3, 3];
    let count = 64 * 8 * 4 * 3;
    assert_eq!(sent(Algorithm::HostRing, AllReduce, &four_by_two, count), [2 * count * 3 / 4; 4]);
    assert_eq!(sent(Algorithm::Ring, AllReduce, &four_by_two, count), [2 * count * 7 / 8; 4]);
    assert_eq!(sent(Algorithm::HostRing, AllGather, &four_by_two, count), [6 * count; 4]);
    assert_eq!(sent(Algorithm::Ring, AllGather, &four_by_two, count), [7 * count; 4]);
    assert_eq!(sent(Algorithm::HostRing, ReduceScatter, &four_by_two, count), [6 * count; 4]);
    assert_eq!(sent(Algorithm::HostRing, Broadcast, &four_by_two, count), [count, count, count, 0]);
    assert_eq!(sent(Algorithm::OneShot, AllReduce, &[0, 1, 0, 1], count), [count, count]);
    // Ranks that are dealt out to hosts in turn: rings of hosts do not mind.
    let dealt_out = [0, 1, 2, 3, 0, 1, 2, 3];
    assert_eq!(sent(Algorithm::HostRing, AllReduce, &dealt_out, count), [2 * count * 3 / 4; 4]);
}

#[test]
fn programs_keep_to_their_own_ranks() {
    let program = |ranks: &[u32], steps| Program { ranks: ranks.to_vec(), steps };
    let problem = broadcast();
    let schedule = |programs| Schedule { problem, scratch_count: 0, shape: Shape::Message(vec![Channel { programs }]) };
    let both = Step::Copy { src: at(0, Buffer::Send), dsts: vec![at(0, Buffer::Recv), at(1, Buffer::Recv)] };
    assert_eq!(verify(&schedule(vec![program(&[0, 1], vec![both.clone()])]), true), Ok(()));
    let apart = vec![program(&[0], vec![both.clone()]), program(&[1], vec![])];
    assert_eq!(fault(&schedule(apart)), Fault::ForeignRank(1));
    let twice = vec![program(&[0, 1], vec![both.clone()]), program(&[1], vec![])];
    assert_eq!(fault(&schedule(twice)), Fault::NotInOneProgram { rank: 1, actual: 2 });
    assert_eq!(fault(&schedule(vec![program(&[0], vec![])])), Fault::NotInOneProgram { rank: 1, actual: 0 });
    assert_eq!(fault(&schedule(vec![program(&[0, 1, 2], vec![both])])), Fault::NoSuchRank(2));
}

#[test]
fn single_pass_moves_between_hosts_are_refused() {
    let problem = Problem {
        kind: CollectiveKind::AllReduce,
        nranks: 2,
        root: 0,
        count: 8,
        premultiply: false,
        leaves_own: false,
        one_hop: false,
    };
    let strategy = Strategy::initial(AlgorithmChoice::Auto, 2, 1, &[vec![0], vec![1]]);
    assert_eq!(build(&problem, Algorithm::SinglePass, &strategy), Err(ScheduleError::NotMapped));
}

#[test]
fn raw_contributions_stay_where_their_scalar_is() {
    let mut schedule = exchange();
    assert_eq!(verify(&schedule, false), Ok(()));
    schedule.problem.premultiply = true;
    assert_eq!(fault(&schedule), Fault::LeavesRaw);
}

#[test]
fn scratch_is_of_first_ranks() {
    let problem = Problem {
        kind: CollectiveKind::AllReduce,
        nranks: 4,
        root: 0,
        count: 100,
        premultiply: false,
        leaves_own: false,
        one_hop: false,
    };
    let strategy = Strategy::initial(AlgorithmChoice::Auto, 4, 2, &hosts(&[0, 0, 1, 1]));
    let mut schedule = build(&problem, Algorithm::OneShot, &strategy).expect("valid");
    let counts: Vec<_> = (0..4).map(|rank| schedule.scratch_count_of(rank)).collect();
    assert_eq!(counts, [200, 0, 200, 0]);
    let Shape::Message(channels) = &mut schedule.shape else { panic!("one shot passes messages") };
    channels[0].programs[0].ranks.reverse();
    assert!(matches!(fault(&schedule), Fault::OutsideBuffer { buffer_count: 0, .. }), "{}", fault(&schedule));
}

#[test]
fn long_data_goes_round_the_ring_instead_of_into_scratch() {
    let strategy = Strategy::initial(AlgorithmChoice::Auto, 4, 2, &hosts(&[0, 1, 2, 3]));
    let built = |algorithm, count| {
        let problem = Problem {
            kind: CollectiveKind::AllReduce,
            nranks: 4,
            root: 0,
            count,
            premultiply: false,
            leaves_own: false,
            one_hop: false,
        };
        build(&problem, algorithm, &strategy).expect("valid")
    };
    let long = 1 << 24;
    assert_ne!(built(Algorithm::OneShot, 1 << 18), built(Algorithm::HostRing, 1 << 18));
    assert_eq!(built(Algorithm::OneShot, long), built(Algorithm::HostRing, long));
    assert_eq!(built(Algorithm::OneShot, u64::MAX / 64), built(Algorithm::HostRing, u64::MAX / 64));
}

/// Between hosts each chunk is a message: short ones are for who passes them on.
#[test]
fn chunks_are_short_where_they_are_passed_on() {
    let sends = |placement: &[usize], kind, algorithm| {
        let nranks = placement.len() as u32;
        let strategy = Strategy::initial(AlgorithmChoice::Auto, nranks, 1, &hosts(placement));
        let problem =
            Problem { kind, nranks, root: 0, count: 1 << 18, premultiply: false, leaves_own: false, one_hop: false };
        let schedule = build(&problem, algorithm, &strategy).expect("valid");
        let Shape::Message(channels) = &schedule.shape else { panic!("it passes messages") };
        let most = channels[0]
            .programs
            .iter()
            .map(|program| program.steps.iter().filter(|step| matches!(step, Step::Send { .. })).count());
        most.max().expect("programs")
    };
    for algorithm in [Algorithm::HostRing, Algorithm::HostTree] {
        for kind in [CollectiveKind::Broadcast, CollectiveKind::Reduce] {
            assert_eq!(sends(&[0, 1], kind, algorithm), 4, "{kind:?} {algorithm:?}");
            assert_eq!(sends(&[0, 0, 1], kind, algorithm), 4, "{kind:?} {algorithm:?}");
        }
        assert_eq!(sends(&[0, 1, 2], CollectiveKind::Reduce, algorithm), 8, "{algorithm:?}");
    }
    assert_eq!(sends(&[0, 1], CollectiveKind::AllReduce, Algorithm::HostTree), 8, "up while others go down");
}
