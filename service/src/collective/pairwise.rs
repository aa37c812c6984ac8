//! Collectives without reduction, pair by pair: each rank starts with another peer, so that no rank is everybody's target
//! at once. A barrier is a dissemination of empty messages: after round k a rank has heard of 2^k others.

use mccs_ipc::types::CollectiveKind;

use super::schedule::{Buffer, Channel, Problem, Schedule, Shape, Span, Step};

/// One channel for the kinds that neither ring nor tree has a form for; empty for others.
pub(super) fn build(problem: &Problem) -> Schedule {
    let program = |rank| match problem.kind {
        CollectiveKind::AllToAll => all_to_all(problem, rank),
        CollectiveKind::Gather => gather(problem, rank),
        CollectiveKind::Scatter => scatter(problem, rank),
        CollectiveKind::Barrier => barrier(problem.nranks, rank),
        _ => Vec::new(),
    };
    let channel = Channel { programs: (0..problem.nranks).map(program).collect() };
    Schedule { problem: *problem, scratch_count: 0, shape: Shape::Message(vec![channel]) }
}

fn block(problem: &Problem, buffer: Buffer, rank: u32) -> Span {
    Span::new(buffer, u64::from(rank) * problem.count, problem.count)
}

fn whole(problem: &Problem, buffer: Buffer) -> Span {
    Span::new(buffer, 0, problem.count)
}

/// The rank `distance` places after another; both below `nranks`.
fn after(rank: u32, distance: u32, nranks: u32) -> u32 {
    let places_to_wrap = nranks - distance;
    if rank >= places_to_wrap { rank - places_to_wrap } else { rank + distance }
}

fn all_to_all(problem: &Problem, rank: u32) -> Vec<Step> {
    let nranks = problem.nranks;
    let mut steps =
        vec![Step::Copy { src: block(problem, Buffer::Send, rank), dst: block(problem, Buffer::Recv, rank) }];
    for distance in 1..nranks {
        let (to, from) = (after(rank, distance, nranks), after(rank, nranks - distance, nranks));
        steps.push(Step::Send { peer: to, src: block(problem, Buffer::Send, to) });
        steps.push(Step::Recv { peer: from, dst: block(problem, Buffer::Recv, from) });
    }
    steps
}

fn gather(problem: &Problem, rank: u32) -> Vec<Step> {
    let own = whole(problem, Buffer::Send);
    if rank != problem.root {
        return vec![Step::Send { peer: problem.root, src: own }];
    }
    let mut steps = vec![Step::Copy { src: own, dst: block(problem, Buffer::Recv, rank) }];
    steps.extend((1..problem.nranks).map(|distance| {
        let peer = after(rank, distance, problem.nranks);
        Step::Recv { peer, dst: block(problem, Buffer::Recv, peer) }
    }));
    steps
}

fn scatter(problem: &Problem, rank: u32) -> Vec<Step> {
    let own = whole(problem, Buffer::Recv);
    if rank != problem.root {
        return vec![Step::Recv { peer: problem.root, dst: own }];
    }
    let mut steps: Vec<_> = (1..problem.nranks)
        .map(|distance| {
            let peer = after(rank, distance, problem.nranks);
            Step::Send { peer, src: block(problem, Buffer::Send, peer) }
        })
        .collect();
    steps.push(Step::Copy { src: block(problem, Buffer::Send, rank), dst: own });
    steps
}

fn barrier(nranks: u32, rank: u32) -> Vec<Step> {
    let nothing = |buffer| Span::new(buffer, 0, 0);
    let distances = (0..u32::BITS).map(|round| 1u32 << round).take_while(|distance| *distance < nranks);
    distances
        .flat_map(|distance| {
            let (to, from) = (after(rank, distance, nranks), after(rank, nranks - distance, nranks));
            [Step::Send { peer: to, src: nothing(Buffer::Send) }, Step::Recv { peer: from, dst: nothing(Buffer::Recv) }]
        })
        .collect()
}
