//! Single-pass algorithm: every output is made in one pass from the inputs, in memory that all
//! reach. Optimal where all buffers are mapped: each input is read once and each output written
//! once.

use mccs_ipc::types::CollectiveKind;

use super::schedule::{Buffer, Move, Problem, RankSpan, Schedule, Shape, Span};

pub(super) fn build(problem: &Problem) -> Schedule {
    let &Problem { kind, nranks, root, count, .. } = problem;
    let all = || 0..nranks;
    let at = |rank, buffer, offset| RankSpan { rank, span: Span::new(buffer, offset, count) };
    let copy = |src, dst| Move { srcs: vec![src], dsts: vec![dst] };
    let block = |rank: u32| u64::from(rank) * count;
    let moves = match kind {
        _ if count == 0 => Vec::new(),
        CollectiveKind::AllReduce => vec![Move {
            srcs: all().map(|rank| at(rank, Buffer::Send, 0)).collect(),
            dsts: all().map(|rank| at(rank, Buffer::Recv, 0)).collect(),
        }],
        CollectiveKind::Reduce => vec![Move {
            srcs: all().map(|rank| at(rank, Buffer::Send, 0)).collect(),
            dsts: vec![at(root, Buffer::Recv, 0)],
        }],
        CollectiveKind::Broadcast => vec![Move {
            srcs: vec![at(root, Buffer::Send, 0)],
            dsts: all().map(|rank| at(rank, Buffer::Recv, 0)).collect(),
        }],
        CollectiveKind::AllGather => all()
            .map(|src| Move {
                srcs: vec![at(src, Buffer::Send, 0)],
                dsts: all().map(|dst| at(dst, Buffer::Recv, block(src))).collect(),
            })
            .collect(),
        CollectiveKind::ReduceScatter => all()
            .map(|dst| Move {
                srcs: all().map(|src| at(src, Buffer::Send, block(dst))).collect(),
                dsts: vec![at(dst, Buffer::Recv, 0)],
            })
            .collect(),
        CollectiveKind::AllToAll => all()
            .flat_map(|src| all().map(move |dst| (src, dst)))
            .filter(|(src, dst)| src != dst || !problem.leaves_own)
            .map(|(src, dst)| copy(at(src, Buffer::Send, block(dst)), at(dst, Buffer::Recv, block(src))))
            .collect(),
        CollectiveKind::Gather => {
            all().map(|src| copy(at(src, Buffer::Send, 0), at(root, Buffer::Recv, block(src)))).collect()
        }
        CollectiveKind::Scatter => {
            all().map(|dst| copy(at(root, Buffer::Send, block(dst)), at(dst, Buffer::Recv, 0))).collect()
        }
        CollectiveKind::Barrier => Vec::new(),
    };
    Schedule { problem: *problem, scratch_count: 0, shape: Shape::SinglePass(moves) }
}
