//! Balanced binary trees, for latency: depth grows with the logarithm of the number of ranks. Each channel's tree is laid
//! over that channel's order of ranks, rotated so that the root rank is on top; chunks follow each other.

use mccs_ipc::types::CollectiveKind;

use super::Strategy;
use super::schedule::{Buffer, Channel, Problem, Schedule, Shape, Span, Step, part};

struct Node {
    parent: Option<u32>,
    /// With whether they are leaves.
    children: Vec<(u32, bool)>,
}

/// The schedule, or `None` for a collective that has no tree form. `orders` are permutations of all ranks.
pub(super) fn build(problem: &Problem, orders: &[Vec<u32>], strategy: &Strategy) -> Option<Schedule> {
    let root = match problem.kind {
        CollectiveKind::AllReduce => None,
        CollectiveKind::Broadcast | CollectiveKind::Reduce => Some(problem.root),
        _ => return None,
    };
    let align_count = strategy.align_count.max(1);
    let channel = |(index, order): (usize, &Vec<u32>)| {
        let (offset, count) = part(problem.count, orders.len() as u64, index as u64, align_count);
        let chunks = strategy.chunks(count);
        let top = order.iter().position(|rank| Some(*rank) == root).unwrap_or(0);
        let mut programs = vec![Vec::new(); order.len()];
        for place in 0..order.len() {
            let node = node(order, top, place);
            let rank = order[(top + place) % order.len()];
            let spans = |chunk| {
                let (chunk_offset, chunk_count) = part(count, chunks, chunk, align_count);
                move |buffer| Span::new(buffer, offset + chunk_offset, chunk_count)
            };
            let program = &mut programs[rank as usize];
            for chunk in 0..chunks {
                program.extend(up(problem.kind, &node, spans(chunk)));
                // The top sends each result down at once; others first pass on all they have, so that chunks overlap.
                if node.parent.is_none() {
                    program.extend(down(problem.kind, &node, spans(chunk)));
                }
            }
            if node.parent.is_some() {
                (0..chunks).for_each(|chunk| program.extend(down(problem.kind, &node, spans(chunk))));
            }
        }
        Channel { programs }
    };
    let channels = orders.iter().enumerate().map(channel).collect();
    let scratch_count = if problem.kind == CollectiveKind::Reduce { problem.count } else { 0 };
    Some(Schedule { problem: *problem, scratch_count, shape: Shape::Message(channels) })
}

/// Places are numbered as in a heap: the children of i are 2i + 1 and 2i + 2.
fn node(order: &[u32], top: usize, place: usize) -> Node {
    let nranks = order.len();
    let rank = |place: usize| order[(top + place) % nranks];
    let children = (2 * place + 1..=2 * place + 2).filter(|child| *child < nranks);
    Node {
        parent: (place > 0).then(|| rank((place - 1) / 2)),
        children: children.map(|child| (rank(child), 2 * child + 1 >= nranks)).collect(),
    }
}

/// Contributions, from the leaves to the top.
fn up(kind: CollectiveKind, node: &Node, span: impl Fn(Buffer) -> Span) -> Vec<Step> {
    let mut steps = Vec::new();
    if kind == CollectiveKind::Broadcast {
        return steps;
    }
    let sums = kind == CollectiveKind::AllReduce || node.parent.is_none();
    let partial = span(if sums { Buffer::Recv } else { Buffer::Scratch });
    for (index, (child, is_leaf)) in node.children.iter().enumerate() {
        let local_raw = index == 0;
        steps.push(Step::RecvReduce {
            peer: *child,
            local: if local_raw { span(Buffer::Send) } else { partial },
            dst: partial,
            incoming_raw: *is_leaf,
            local_raw,
            finish: node.parent.is_none() && index + 1 == node.children.len(),
        });
    }
    if let Some(parent) = node.parent {
        let src = if node.children.is_empty() { span(Buffer::Send) } else { partial };
        steps.push(Step::Send { peer: parent, src });
    }
    steps
}

/// Results, from the top to the leaves.
fn down(kind: CollectiveKind, node: &Node, span: impl Fn(Buffer) -> Span) -> Vec<Step> {
    let mut steps = Vec::new();
    if kind == CollectiveKind::Reduce {
        return steps;
    }
    let is_source = kind == CollectiveKind::Broadcast && node.parent.is_none();
    let result = span(if is_source { Buffer::Send } else { Buffer::Recv });
    if let Some(parent) = node.parent {
        steps.push(Step::Recv { peer: parent, dst: result });
    }
    steps.extend(node.children.iter().map(|(child, _)| Step::Send { peer: *child, src: result }));
    if is_source {
        steps.push(Step::Copy { src: result, dst: span(Buffer::Recv) });
    }
    steps
}
