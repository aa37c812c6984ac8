//! Pairwise algorithms: all-to-all, gather, scatter and barrier, pair by pair of ranks. Each rank
//! starts with another peer, so that no rank is everybody's target at once. A barrier is a
//! dissemination of empty messages, between ranks or hosts: after round k a group has heard of 2^k
//! others.

use mccs_ipc::types::CollectiveKind;

use super::layout::Layout;
use super::schedule::{Buffer, Channel, Part, Problem, Program, RankSpan, Schedule, Shape, Span, Step};

/// One channel for the kinds that neither ring nor tree has a form for; empty for others. An all-to-all of a rail has them all.
pub(super) fn build(layout: &Layout<'_>) -> Schedule {
    let problem = layout.problem;
    if problem.kind == CollectiveKind::AllToAll && problem.leaves_own {
        return of_rail(layout);
    }
    let of_rank: fn(&Problem, u32) -> Vec<Step> = match problem.kind {
        CollectiveKind::AllToAll => all_to_all,
        CollectiveKind::Gather => gather,
        CollectiveKind::Scatter => scatter,
        _ => |_, _| Vec::new(),
    };
    let programs = if problem.kind == CollectiveKind::Barrier {
        let program = |(own, ranks): (u32, &Vec<u32>)| Program { ranks: ranks.clone(), steps: barrier(layout, own) };
        (0..).zip(&layout.groups).map(program).collect()
    } else {
        (0..problem.nranks).map(|rank| Program { ranks: vec![rank], steps: of_rank(problem, rank) }).collect()
    };
    Schedule { problem: *problem, scratch_count: 0, shape: Shape::Message(vec![Channel { programs }]) }
}

/// Each channel, which is a NIC, has a part of every block.
fn of_rail(layout: &Layout<'_>) -> Schedule {
    let (problem, strategy) = (layout.problem, layout.strategy);
    let channels = strategy.channels_of(problem.count, layout.orders.len() as u64);
    let channel = |index| {
        let part = strategy.channel_part(problem.count, channels, index);
        let program = |rank| Program { ranks: vec![rank], steps: exchange(problem, rank, part) };
        Channel { programs: (0..problem.nranks).map(program).collect() }
    };
    let shape = Shape::Message((0..channels).map(channel).collect());
    Schedule { problem: *problem, scratch_count: 0, shape }
}

fn block(problem: &Problem, buffer: Buffer, rank: u32) -> Span {
    Span::new(buffer, u64::from(rank) * problem.count, problem.count)
}

fn whole(problem: &Problem, buffer: Buffer) -> Span {
    Span::new(buffer, 0, problem.count)
}

fn copy(rank: u32, src: Span, dst: Span) -> Step {
    Step::Copy { src: RankSpan { rank, span: src }, dsts: vec![RankSpan { rank, span: dst }] }
}

fn send(rank: u32, peer: u32, span: Span) -> Step {
    Step::Send { peer, src: RankSpan { rank, span } }
}

fn recv(rank: u32, peer: u32, span: Span) -> Step {
    Step::Recv { peer, dsts: vec![RankSpan { rank, span }] }
}

/// The rank `distance` places after another; both below `nranks`.
fn after(rank: u32, distance: u32, nranks: u32) -> u32 {
    let places_to_wrap = nranks - distance;
    if rank >= places_to_wrap { rank - places_to_wrap } else { rank + distance }
}

fn all_to_all(problem: &Problem, rank: u32) -> Vec<Step> {
    let mut steps = vec![copy(rank, block(problem, Buffer::Send, rank), block(problem, Buffer::Recv, rank))];
    steps.extend(exchange(problem, rank, Part { offset: 0, count: problem.count }));
    steps
}

/// A part of each block, for and from each other rank.
fn exchange(problem: &Problem, rank: u32, Part { offset, count }: Part) -> Vec<Step> {
    let nranks = problem.nranks;
    let part = |buffer, of: u32| Span::new(buffer, u64::from(of) * problem.count + offset, count);
    // Sends come first. Behind receives of other distances each would wait for a message: a latency for each rank.
    let sends = (1..nranks).map(|distance| {
        let to = after(rank, distance, nranks);
        send(rank, to, part(Buffer::Send, to))
    });
    let recvs = (1..nranks).map(|distance| {
        let from = after(rank, nranks - distance, nranks);
        recv(rank, from, part(Buffer::Recv, from))
    });
    sends.chain(recvs).collect()
}

fn gather(problem: &Problem, rank: u32) -> Vec<Step> {
    let own = whole(problem, Buffer::Send);
    if rank != problem.root {
        return vec![send(rank, problem.root, own)];
    }
    let mut steps = vec![copy(rank, own, block(problem, Buffer::Recv, rank))];
    steps.extend((1..problem.nranks).map(|distance| {
        let peer = after(rank, distance, problem.nranks);
        recv(rank, peer, block(problem, Buffer::Recv, peer))
    }));
    steps
}

fn scatter(problem: &Problem, rank: u32) -> Vec<Step> {
    let own = whole(problem, Buffer::Recv);
    if rank != problem.root {
        return vec![recv(rank, problem.root, own)];
    }
    let mut steps: Vec<_> = (1..problem.nranks)
        .map(|distance| {
            let peer = after(rank, distance, problem.nranks);
            send(rank, peer, block(problem, Buffer::Send, peer))
        })
        .collect();
    steps.push(copy(rank, block(problem, Buffer::Send, rank), own));
    steps
}

fn barrier(layout: &Layout<'_>, own: u32) -> Vec<Step> {
    let (groups, rank) = (layout.groups.len() as u32, layout.first(own));
    let nothing = |buffer| Span::new(buffer, 0, 0);
    let distances = (0..u32::BITS).map(|round| 1u32 << round).take_while(|distance| *distance < groups);
    distances
        .flat_map(|distance| {
            let (to, from) = (after(own, distance, groups), after(own, groups - distance, groups));
            [send(rank, to, nothing(Buffer::Send)), recv(rank, from, nothing(Buffer::Recv))]
        })
        .collect()
}
