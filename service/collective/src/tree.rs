//! Tree algorithm: balanced binary trees, over ranks or hosts, for latency. Depth grows with the
//! logarithm of the number of groups. Each channel's tree is laid over that channel's order,
//! rotated so that the root's group is on top; chunks follow each other.

use mccs_ipc::types::CollectiveKind;

use super::layout::Layout;
use super::schedule::{Buffer, Channel, Part, Program, RankSpan, Schedule, Shape, Span, Step, part};

struct Node<'a> {
    layout: &'a Layout<'a>,
    own: u32,
    parent: Option<u32>,
    /// With whether they are leaves.
    children: Vec<(u32, bool)>,
}

/// The schedule, or `None` for a collective that has no tree form.
pub(super) fn build(layout: &Layout<'_>) -> Option<Schedule> {
    let (problem, strategy) = (layout.problem, layout.strategy);
    let root = match problem.kind {
        CollectiveKind::AllReduce => None,
        CollectiveKind::Broadcast | CollectiveKind::Reduce => Some(layout.group_of(problem.root)),
        _ => return None,
    };
    let align_count = strategy.align_count.max(1);
    let channel = |(index, order): (usize, &Vec<u32>)| {
        let Part { offset, count } = strategy.channel_part(problem.count, layout.orders.len() as u64, index as u64);
        let chunks = strategy.chunks(count, layout.passes_on());
        let top = order.iter().position(|group| Some(*group) == root).unwrap_or(0);
        let mut programs: Vec<_> =
            layout.groups.iter().map(|ranks| Program { ranks: ranks.clone(), steps: Vec::new() }).collect();
        for place in 0..order.len() {
            let node = Node::at(layout, order, top, place);
            let spans = |chunk| {
                let part = part(count, chunks, chunk, align_count);
                move |buffer| Span::new(buffer, offset + part.offset, part.count)
            };
            let steps = &mut programs[node.own as usize].steps;
            for chunk in 0..chunks {
                steps.extend(node.up(spans(chunk)));
                // The top sends each result down at once; others first pass on all they have, so that chunks overlap.
                if node.parent.is_none() {
                    steps.extend(node.down(spans(chunk)));
                }
            }
            if node.parent.is_some() {
                (0..chunks).for_each(|chunk| steps.extend(node.down(spans(chunk))));
            }
        }
        Channel { programs }
    };
    let channels = layout.orders.iter().enumerate().map(channel).collect();
    let scratch_count = if problem.kind == CollectiveKind::Reduce { problem.count } else { 0 };
    Some(Schedule { problem: *problem, scratch_count, shape: Shape::Message(channels) })
}

impl<'a> Node<'a> {
    /// Places are numbered as in a heap: the children of i are 2i + 1 and 2i + 2.
    fn at(layout: &'a Layout<'a>, order: &[u32], top: usize, place: usize) -> Self {
        let groups = order.len();
        let group = |place: usize| order[(top + place) % groups];
        let children = (2 * place + 1..=2 * place + 2).filter(|child| *child < groups);
        Node {
            layout,
            own: group(place),
            parent: (place > 0).then(|| group((place - 1) / 2)),
            children: children.map(|child| (group(child), 2 * child + 1 >= groups)).collect(),
        }
    }

    /// Contributions, from the leaves to the top.
    fn up(&self, span: impl Fn(Buffer) -> Span) -> Vec<Step> {
        let (kind, layout) = (self.layout.problem.kind, self.layout);
        let mut steps = Vec::new();
        if kind == CollectiveKind::Broadcast {
            return steps;
        }
        let sums = kind == CollectiveKind::AllReduce;
        let partial = match self.parent {
            None if !sums => RankSpan { rank: layout.problem.root, span: span(Buffer::Recv) },
            _ => layout.at_first(self.own, span(if sums { Buffer::Recv } else { Buffer::Scratch })),
        };
        let contributions = || layout.at_all(self.own, span(Buffer::Send));
        for (index, (child, is_leaf)) in self.children.iter().enumerate() {
            let srcs_raw = index == 0;
            let finish = self.parent.is_none() && index + 1 == self.children.len();
            steps.push(Step::RecvReduce {
                peer: *child,
                srcs: if srcs_raw { contributions() } else { vec![partial] },
                dsts: if finish && sums { layout.at_all(self.own, span(Buffer::Recv)) } else { vec![partial] },
                incoming_raw: *is_leaf && layout.sends_raw(*child),
                srcs_raw,
                finish,
            });
        }
        match self.parent {
            Some(parent) if self.children.is_empty() && layout.sends_raw(self.own) => {
                steps.push(Step::Send { peer: parent, src: layout.at_first(self.own, span(Buffer::Send)) });
            }
            Some(parent) => {
                if self.children.is_empty() {
                    let (srcs, dsts) = (contributions(), vec![partial]);
                    steps.push(Step::Reduce { srcs, dsts, srcs_raw: true, finish: false });
                }
                steps.push(Step::Send { peer: parent, src: partial });
            }
            None if self.children.is_empty() => {
                let dsts = if sums { layout.at_all(self.own, span(Buffer::Recv)) } else { vec![partial] };
                steps.push(Step::Reduce { srcs: contributions(), dsts, srcs_raw: true, finish: true });
            }
            None => {}
        }
        steps
    }

    /// Results, from the top to the leaves.
    fn down(&self, span: impl Fn(Buffer) -> Span) -> Vec<Step> {
        let (kind, layout) = (self.layout.problem.kind, self.layout);
        let mut steps = Vec::new();
        if kind == CollectiveKind::Reduce {
            return steps;
        }
        let is_source = kind == CollectiveKind::Broadcast && self.parent.is_none();
        let result = if is_source {
            RankSpan { rank: layout.problem.root, span: span(Buffer::Send) }
        } else {
            layout.at_first(self.own, span(Buffer::Recv))
        };
        let all = || layout.at_all(self.own, span(Buffer::Recv));
        if let Some(parent) = self.parent {
            steps.push(Step::Recv { peer: parent, dsts: all() });
        }
        steps.extend(self.children.iter().map(|(child, _)| Step::Send { peer: *child, src: result }));
        if is_source {
            steps.push(Step::Copy { src: result, dsts: all() });
        }
        steps
    }
}
