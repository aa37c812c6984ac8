//! A verifier that accepts broken schedules proves nothing: breaks every step of many schedules in every way below.
//!
//! A mutant that survives must be equivalent, which the interpreter decides. Two kinds of mutants have such
//! survivors: steps that may run in either order (sends to two peers; a send, and a later step that needs it no
//! sooner), and in place, steps of a copy onto itself.

use std::collections::BTreeMap;

use mccs_ipc::types::CollectiveKind;

use super::fine_strategy;
use super::interpret::{Choices, wrong_rank};
use crate::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Mutation {
    Drop,
    SwapWithNext,
    Repeat,
    ShiftSource,
    ShiftLocal,
    ShiftTarget,
    Shorten,
    OtherPeer,
    FlipIncomingRaw,
    FlipLocalRaw,
    FlipFinish,
    DropTarget,
    RepeatSource,
    DropSource,
}

impl Mutation {
    const OF_STEPS: [Mutation; 14] = [
        Mutation::Drop,
        Mutation::SwapWithNext,
        Mutation::Repeat,
        Mutation::ShiftSource,
        Mutation::ShiftLocal,
        Mutation::ShiftTarget,
        Mutation::Shorten,
        Mutation::OtherPeer,
        Mutation::FlipIncomingRaw,
        Mutation::FlipLocalRaw,
        Mutation::FlipFinish,
        Mutation::DropTarget,
        Mutation::RepeatSource,
        Mutation::DropSource,
    ];
    const OF_MOVES: [Mutation; 7] = [
        Mutation::Drop,
        Mutation::Repeat,
        Mutation::ShiftSource,
        Mutation::ShiftTarget,
        Mutation::Shorten,
        Mutation::DropTarget,
        Mutation::RepeatSource,
    ];
}

/// Breaks one step of a program; `false` where the mutation has no meaning for it.
fn break_step(program: &mut Vec<Step>, at: usize, mutation: Mutation, programs: u32) -> bool {
    use Step::{Copy, Recv, RecvReduce, Reduce, Send};
    let repeated = program[at].clone();
    let has_next = at + 1 < program.len();
    match (mutation, &mut program[at]) {
        (Mutation::Drop, _) => drop(program.remove(at)),
        (Mutation::Repeat, _) => program.insert(at, repeated),
        (Mutation::SwapWithNext, _) if has_next => program.swap(at, at + 1),
        (Mutation::ShiftSource, Send { src, .. } | Copy { src, .. }) => src.span.offset += 1,
        (Mutation::ShiftSource, Reduce { srcs, .. }) | (Mutation::ShiftLocal, RecvReduce { srcs, .. }) => {
            srcs[0].span.offset += 1;
        }
        (Mutation::ShiftTarget, Recv { dsts, .. } | RecvReduce { dsts, .. } | Reduce { dsts, .. })
        | (Mutation::ShiftTarget, Copy { dsts, .. }) => dsts[0].span.offset += 1,
        (Mutation::Shorten, Send { src, .. }) => src.span.count -= 1,
        (Mutation::Shorten, Recv { dsts, .. }) => shorten(dsts),
        (Mutation::Shorten, Copy { src, dsts }) => {
            src.span.count -= 1;
            shorten(dsts);
        }
        (Mutation::Shorten, RecvReduce { srcs, dsts, .. } | Reduce { srcs, dsts, .. }) => {
            shorten(srcs);
            shorten(dsts);
        }
        (Mutation::OtherPeer, Send { peer, .. } | Recv { peer, .. } | RecvReduce { peer, .. }) => {
            *peer = (*peer + 1) % programs;
        }
        (Mutation::FlipIncomingRaw, RecvReduce { incoming_raw: flag, .. })
        | (Mutation::FlipLocalRaw, RecvReduce { srcs_raw: flag, .. } | Reduce { srcs_raw: flag, .. })
        | (Mutation::FlipFinish, RecvReduce { finish: flag, .. } | Reduce { finish: flag, .. }) => *flag = !*flag,
        (Mutation::DropTarget, Recv { dsts, .. } | RecvReduce { dsts, .. } | Reduce { dsts, .. })
        | (Mutation::DropTarget, Copy { dsts, .. })
            if dsts.len() > 1 =>
        {
            dsts.pop();
        }
        (Mutation::RepeatSource, RecvReduce { srcs, .. } | Reduce { srcs, .. }) => srcs.push(srcs[0]),
        (Mutation::DropSource, RecvReduce { srcs, .. } | Reduce { srcs, .. }) if srcs.len() > 1 => {
            srcs.pop();
        }
        _ => return false,
    }
    true
}

fn shorten(spans: &mut [RankSpan]) {
    spans.iter_mut().for_each(|at| at.span.count -= 1);
}

/// Breaks one move.
fn break_move(moves: &mut Vec<Move>, at: usize, mutation: Mutation) -> bool {
    let repeated = moves[at].clone();
    let step = &mut moves[at];
    match mutation {
        Mutation::Drop => drop(moves.remove(at)),
        Mutation::Repeat => moves.push(repeated),
        Mutation::ShiftSource => step.srcs[0].span.offset += 1,
        Mutation::ShiftTarget => step.dsts[0].span.offset += 1,
        Mutation::Shorten => step.srcs.iter_mut().chain(&mut step.dsts).for_each(|at| at.span.count -= 1),
        Mutation::DropTarget => drop(step.dsts.pop()),
        Mutation::RepeatSource => step.srcs.push(repeated.srcs[0]),
        _ => return false,
    }
    true
}

/// All mutants of a schedule, of its first channel.
fn mutants(schedule: &Schedule) -> Vec<(Mutation, Schedule)> {
    let mut all = Vec::new();
    match &schedule.shape {
        Shape::SinglePass(moves) => {
            for (at, mutation) in (0..moves.len()).flat_map(|at| Mutation::OF_MOVES.map(|mutation| (at, mutation))) {
                let mut broken = moves.clone();
                if break_move(&mut broken, at, mutation) {
                    all.push((mutation, Schedule { shape: Shape::SinglePass(broken), ..schedule.clone() }));
                }
            }
        }
        Shape::Message(channels) => {
            // Channels are made alike: of the first.
            let programs = &channels[0].programs;
            let count = programs.len() as u32;
            for (number, program) in programs.iter().enumerate() {
                for at in 0..program.steps.len() {
                    for mutation in Mutation::OF_STEPS {
                        let mut broken = channels.clone();
                        if break_step(&mut broken[0].programs[number].steps, at, mutation, count) {
                            all.push((mutation, Schedule { shape: Shape::Message(broken), ..schedule.clone() }));
                        }
                    }
                }
            }
        }
    }
    all
}

/// Whether some interleaving of many gives a wrong result.
fn is_ever_wrong(schedule: &Schedule, in_place: bool) -> bool {
    (0..8).any(|seed| wrong_rank(schedule, in_place, &mut Choices(seed)).is_some())
}

#[test]
fn mutants_are_refused_or_equivalent() {
    // By mutation and in-place: how many were refused, and how many survived.
    let mut tally = BTreeMap::<(Mutation, bool), (usize, usize)>::new();
    let cases = CollectiveKind::ALL.iter().flat_map(|kind| Algorithm::ALL.map(|algorithm| (*kind, algorithm)));
    let cases = cases.flat_map(|case| [(case, false), (case, true)]);
    for ((kind, algorithm), premultiply) in cases {
        let problem = Problem { kind, nranks: 4, root: 2, count: 13, premultiply, leaves_own: false, one_hop: false };
        let one_host = fine_strategy(vec![vec![0, 1, 2, 3], vec![2, 0, 3, 1]]);
        let strategy = match algorithm {
            Algorithm::HostRing | Algorithm::HostTree | Algorithm::OneShot => {
                Strategy { hosts: vec![vec![0], vec![1, 3], vec![2]], ..one_host }
            }
            _ if premultiply => continue,
            _ => one_host,
        };
        let original = build(&problem, algorithm, &strategy).expect("valid");
        if kind == CollectiveKind::Barrier {
            continue; // Its messages hold nothing: it has a test of its own.
        }
        for in_place in [false, true] {
            assert_eq!(verify(&original, in_place), Ok(()));
            for (mutation, mutant) in mutants(&original) {
                let (refused, survived) = tally.entry((mutation, in_place)).or_default();
                if verify(&mutant, in_place).is_err() {
                    *refused += 1;
                    continue;
                }
                *survived += 1;
                assert!(
                    !is_ever_wrong(&mutant, in_place),
                    "{kind} {algorithm:?} in place {in_place}: {mutation:?} is not noticed: {mutant:?}"
                );
            }
        }
    }
    for ((mutation, in_place), (refused, survived)) in &tally {
        assert!(*refused > 0, "{mutation:?} in place {in_place} is never noticed");
        let may_survive = match mutation {
            Mutation::SwapWithNext => true,
            // A copy, twice, gives the same; onto itself it gives nothing.
            Mutation::Repeat => true,
            Mutation::Drop | Mutation::Shorten | Mutation::DropTarget => *in_place,
            _ => false,
        };
        assert!(may_survive || *survived == 0, "{mutation:?} in place {in_place}: {survived} survive");
    }
}
