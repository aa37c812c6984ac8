//! Collectives without reduction, pair by pair: each rank starts with another peer, so that no rank is everybody's target
//! at once.

use mccs_ipc::types::CollectiveKind;

use super::schedule::{Buffer, Channel, Problem, Schedule, Shape, Span, Step};

pub(super) fn build(problem: &Problem) -> Schedule {
    let &Problem { kind, nranks, root, count } = problem;
    let block = |buffer, rank: u32| Span::new(buffer, u64::from(rank) * count, count);
    let whole = |buffer| Span::new(buffer, 0, count);
    let program = |rank: u32| -> Vec<Step> {
        let peers = (1..nranks).map(|distance| (rank + distance) % nranks);
        match kind {
            CollectiveKind::AllToAll => {
                let mut steps = vec![Step::Copy { src: block(Buffer::Send, rank), dst: block(Buffer::Recv, rank) }];
                for distance in 1..nranks {
                    let (to, from) = ((rank + distance) % nranks, (rank + nranks - distance) % nranks);
                    steps.push(Step::Send { peer: to, src: block(Buffer::Send, to) });
                    steps.push(Step::Recv { peer: from, dst: block(Buffer::Recv, from) });
                }
                steps
            }
            CollectiveKind::Gather if rank == root => {
                let own = Step::Copy { src: whole(Buffer::Send), dst: block(Buffer::Recv, rank) };
                std::iter::once(own)
                    .chain(peers.map(|peer| Step::Recv { peer, dst: block(Buffer::Recv, peer) }))
                    .collect()
            }
            CollectiveKind::Gather => vec![Step::Send { peer: root, src: whole(Buffer::Send) }],
            CollectiveKind::Scatter if rank == root => {
                let own = Step::Copy { src: block(Buffer::Send, rank), dst: whole(Buffer::Recv) };
                peers
                    .map(|peer| Step::Send { peer, src: block(Buffer::Send, peer) })
                    .chain(std::iter::once(own))
                    .collect()
            }
            CollectiveKind::Scatter => vec![Step::Recv { peer: root, dst: whole(Buffer::Recv) }],
            _ => Vec::new(),
        }
    };
    let channel = Channel { programs: (0..nranks).map(program).collect() };
    Schedule { problem: *problem, scratch_count: 0, shape: Shape::Message(vec![channel]) }
}
