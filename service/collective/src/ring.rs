//! Ring algorithms: all-reduce, all-gather, reduce-scatter, broadcast and reduce, over ranks or
//! hosts, by channels. Each channel has an order of its own.
//!
//! Position p of a ring receives from p - 1 and sends to p + 1: first what is its own, then whatever it has received, at once, so that as
//! much is on its way as was sent first. Reductions go round once; all-reduce then sends the results round once more. Broadcast and reduce
//! are chains from and to the root, cut into chunks that follow each other. If GPUs reduce between hosts, they go round by themselves, and
//! ask for one place at a time ([`hop`]). Between hosts, what is passed on together is cut into slices: one is sent on while the next
//! arrives.

use mccs_ipc::types::CollectiveKind;

use super::Strategy;
use super::layout::Layout;
use super::schedule::{Buffer, Channel, Part, Problem, Program, RankSpan, Schedule, Shape, Span, Step, part};

/// One group's view of one channel.
struct View<'a> {
    layout: &'a Layout<'a>,
    order: &'a [u32],
    position: u64,
    /// The channel's part of `count` elements.
    offset: u64,
    count: u64,
    /// Begin of the channel's scratch.
    scratch_offset: u64,
    chunks: u64,
    align_count: u64,
}

/// The schedule, or `None` for a collective that has no ring form.
pub(super) fn build(layout: &Layout<'_>) -> Option<Schedule> {
    let (problem, strategy) = (layout.problem, layout.strategy);
    let steps: fn(&View<'_>) -> Vec<Step> = match problem.kind {
        CollectiveKind::AllReduce => all_reduce,
        CollectiveKind::AllGather => all_gather,
        CollectiveKind::ReduceScatter => reduce_scatter,
        CollectiveKind::Broadcast => broadcast,
        CollectiveKind::Reduce => reduce,
        _ => return None,
    };
    let align_count = strategy.align_count.max(1);
    let mut scratch_count = 0;
    let mut channels = Vec::with_capacity(layout.orders.len());
    for (index, order) in layout.orders.iter().enumerate() {
        let Part { offset, count } = strategy.channel_part(problem.count, layout.orders.len() as u64, index as u64);
        let chunks = strategy.chunks(count, layout.passes_on());
        let mut programs: Vec<_> =
            layout.groups.iter().map(|ranks| Program { ranks: ranks.clone(), steps: Vec::new() }).collect();
        let mut channel_scratch_count = 0;
        for (position, group) in (0..).zip(order) {
            let scratch_offset = scratch_count;
            let view = View { layout, order, position, offset, count, scratch_offset, chunks, align_count };
            channel_scratch_count = view.scratch_count();
            programs[*group as usize].steps = steps(&view);
        }
        scratch_count += channel_scratch_count;
        channels.push(Channel { programs });
    }
    Some(Schedule { problem: *problem, scratch_count, shape: Shape::Message(channels) })
}

/// One place along the ring of reductions, which is the same on all channels.
pub(super) fn hop(problem: &Problem, strategy: &Strategy) -> Schedule {
    let order = strategy.reduction_order(problem.nranks);
    let channels = strategy.ring_orders.len().max(1) as u64;
    let channel = |index: u64| {
        let Part { offset, count } = strategy.channel_part(problem.count, channels, index);
        let mut programs: Vec<_> =
            (0..problem.nranks).map(|rank| Program { ranks: vec![rank], steps: Vec::new() }).collect();
        for (place, &rank) in order.iter().enumerate() {
            let (next, previous) = (order[(place + 1) % order.len()], order[(place + order.len() - 1) % order.len()]);
            let src = RankSpan { rank, span: Span::new(Buffer::Send, offset, count) };
            let dst = Span::new(Buffer::Recv, u64::from(previous) * problem.count + offset, count);
            let dsts = vec![RankSpan { rank, span: dst }];
            programs[rank as usize].steps = vec![Step::Send { peer: next, src }, Step::Recv { peer: previous, dsts }];
        }
        Channel { programs }
    };
    let shape = Shape::Message((0..channels).map(channel).collect());
    Schedule { problem: *problem, scratch_count: 0, shape }
}

impl View<'_> {
    /// Length of the ring.
    fn groups(&self) -> u64 {
        self.order.len() as u64
    }

    fn own(&self) -> u32 {
        self.order[self.position as usize]
    }

    /// Group at a distance round the ring.
    fn at(&self, distance: u64) -> u32 {
        self.order[((self.position + distance) % self.groups()) as usize]
    }

    fn next(&self) -> u32 {
        self.at(1)
    }

    fn previous(&self) -> u32 {
        self.at(self.groups() - 1)
    }

    /// Position `back` places behind this one.
    fn behind(&self, back: u64) -> u64 {
        (self.position + 2 * self.groups() - back) % self.groups()
    }

    /// Part `index` of the channel's part, of `parts`.
    fn part(&self, buffer: Buffer, parts: u64, index: u64) -> Span {
        let Part { offset, count } = part(self.count, parts, index, self.align_count);
        Span::new(buffer, self.offset + offset, count)
    }

    /// Parts that are passed on together.
    fn slices(&self, span: Span) -> Vec<Span> {
        let slices = self.layout.strategy.slices(span.count);
        let slice = |index| {
            let Part { offset, count } = part(span.count, slices, index, self.align_count);
            Span::new(span.buffer, span.offset + offset, count)
        };
        (0..slices).map(slice).collect()
    }

    fn sends_raw(&self) -> bool {
        self.layout.sends_raw(self.own())
    }

    fn at_all(&self, span: Span) -> Vec<RankSpan> {
        self.layout.at_all(self.own(), span)
    }

    fn at_first(&self, span: Span) -> RankSpan {
        self.layout.at_first(self.own(), span)
    }

    fn send(&self, src: RankSpan) -> Step {
        Step::Send { peer: self.next(), src }
    }

    /// Combines this group's contributions into `partial`.
    fn combine(&self, contribution: Span, partial: Span) -> Step {
        let (srcs, dsts) = (self.at_all(contribution), vec![self.at_first(partial)]);
        Step::Reduce { srcs, dsts, srcs_raw: true, finish: false }
    }

    /// Slots for partial results of a reduce-scatter, each for a chunk of the blocks of a group.
    ///
    /// A group learns that its successor has read a partial result when word of it has come round the ring, n iterations
    /// later. Each chunk takes n - 1 iterations and leaves n - 2 partial results, and one more where a group has to combine
    /// its own contributions first; so as many slots and one more, in rotation, are never overwritten too early.
    fn partial_slots(&self) -> u64 {
        let partials_per_chunk = self.partials_per_chunk();
        (self.chunks * partials_per_chunk).min(partials_per_chunk + 1)
    }

    fn partials_per_chunk(&self) -> u64 {
        let combines = self.order.iter().any(|group| !self.layout.sends_raw(*group));
        self.groups().saturating_sub(2) + u64::from(combines)
    }

    /// Elements of a slot.
    fn slot_count(&self) -> u64 {
        let ranks = self.layout.groups.iter().map(Vec::len).max().unwrap_or(1);
        ranks as u64 * self.chunk_count()
    }

    fn chunk_count(&self) -> u64 {
        part(self.count, self.chunks, 0, self.align_count).count
    }

    fn scratch_count(&self) -> u64 {
        match self.layout.problem.kind {
            CollectiveKind::ReduceScatter => self.partial_slots() * self.slot_count(),
            CollectiveKind::Reduce => self.count,
            _ => 0,
        }
    }
}

fn all_reduce(view: &View<'_>) -> Vec<Step> {
    let groups = view.groups();
    let slices = |buffer, position| view.slices(view.part(buffer, groups, position));
    if groups == 1 {
        let (srcs, dsts) = (view.part(Buffer::Send, 1, 0), view.part(Buffer::Recv, 1, 0));
        let (srcs, dsts) = (view.at_all(srcs), view.at_all(dsts));
        return vec![Step::Reduce { srcs, dsts, srcs_raw: true, finish: true }];
    }
    let mut steps = Vec::with_capacity(4 * groups as usize);
    for (contribution, partial) in
        slices(Buffer::Send, view.position).into_iter().zip(slices(Buffer::Recv, view.position))
    {
        let combines = !view.sends_raw();
        if combines {
            steps.push(view.combine(contribution, partial));
        }
        steps.push(view.send(view.at_first(if combines { partial } else { contribution })));
    }
    for step in 0..groups - 1 {
        let received = view.behind(step + 1);
        for (contribution, result) in slices(Buffer::Send, received).into_iter().zip(slices(Buffer::Recv, received)) {
            let finish = step == groups - 2;
            steps.push(Step::RecvReduce {
                peer: view.previous(),
                srcs: view.at_all(contribution),
                dsts: if finish { view.at_all(result) } else { vec![view.at_first(result)] },
                incoming_raw: step == 0 && view.layout.sends_raw(view.previous()),
                srcs_raw: true,
                finish,
            });
            steps.push(view.send(view.at_first(result)));
        }
    }
    for step in 0..groups - 1 {
        for result in slices(Buffer::Recv, view.behind(step)) {
            steps.push(Step::Recv { peer: view.previous(), dsts: view.at_all(result) });
            if step < groups - 2 {
                steps.push(view.send(view.at_first(result)));
            }
        }
    }
    steps
}

fn all_gather(view: &View<'_>) -> Vec<Step> {
    let own = Span::new(Buffer::Send, view.offset, view.count);
    let block = |rank| view.layout.block(Buffer::Recv, rank, view.offset, view.count);
    // Between two nothing is passed on: messages are as long as links have them.
    let slices = |span| if view.groups() > 2 { view.slices(span) } else { vec![span] };
    let mut steps = Vec::new();
    for rank in view.layout.ranks(view.own()).iter().filter(|_| view.groups() > 1) {
        steps.extend(slices(own).into_iter().map(|span| view.send(RankSpan { rank: *rank, span })));
    }
    for rank in view.layout.ranks(view.own()) {
        steps.push(Step::Copy { src: RankSpan { rank: *rank, span: own }, dsts: view.at_all(block(*rank)) });
    }
    for step in 1..view.groups() {
        let received = view.layout.ranks(view.order[view.behind(step) as usize]);
        for slice in received.iter().flat_map(|rank| slices(block(*rank))) {
            steps.push(Step::Recv { peer: view.previous(), dsts: view.at_all(slice) });
            if step < view.groups() - 1 {
                steps.push(view.send(view.at_first(slice)));
            }
        }
    }
    steps
}

fn reduce_scatter(view: &View<'_>) -> Vec<Step> {
    let (groups, slots, layout) = (view.groups(), view.partial_slots(), view.layout);
    let mut steps = Vec::new();
    if groups == 1 {
        for rank in layout.ranks(view.own()) {
            let srcs = view.at_all(layout.block(Buffer::Send, *rank, view.offset, view.count));
            let dst = RankSpan { rank: *rank, span: Span::new(Buffer::Recv, view.offset, view.count) };
            steps.push(Step::Reduce { srcs, dsts: vec![dst], srcs_raw: true, finish: true });
        }
        return steps;
    }
    // If no group combines first, the first partial result is that of the first step.
    let combined_first = view.partials_per_chunk() + 1 - (groups - 1);
    for chunk in 0..view.chunks {
        let Part { offset: chunk_offset, count } = part(view.count, view.chunks, chunk, view.align_count);
        let input = |rank| layout.block(Buffer::Send, rank, view.offset + chunk_offset, count);
        // Partial results of a step, one for each rank of the group whose blocks they are.
        let partial = |number: u64, index: usize| {
            let slot = (chunk * view.partials_per_chunk() + number) % slots.max(1);
            let offset = slot * view.slot_count() + index as u64 * view.chunk_count();
            Span::new(Buffer::Scratch, view.scratch_offset + offset, count)
        };
        let sent = layout.ranks(view.order[view.behind(1) as usize]);
        for (index, rank) in sent.iter().enumerate() {
            let combines = !view.sends_raw();
            let held = if combines { partial(0, index) } else { input(*rank) };
            for (contribution, held) in view.slices(input(*rank)).into_iter().zip(view.slices(held)) {
                if combines {
                    steps.push(view.combine(contribution, held));
                }
                steps.push(view.send(view.at_first(held)));
            }
        }
        for step in 0..groups - 1 {
            let finish = step == groups - 2;
            let received = layout.ranks(view.order[view.behind(step + 2) as usize]);
            for (index, rank) in received.iter().enumerate() {
                let result = if finish {
                    RankSpan { rank: *rank, span: Span::new(Buffer::Recv, view.offset + chunk_offset, count) }
                } else {
                    view.at_first(partial(step + combined_first, index))
                };
                for (contribution, span) in view.slices(input(*rank)).into_iter().zip(view.slices(result.span)) {
                    steps.push(Step::RecvReduce {
                        peer: view.previous(),
                        srcs: view.at_all(contribution),
                        dsts: vec![RankSpan { span, ..result }],
                        incoming_raw: step == 0 && layout.sends_raw(view.previous()),
                        srcs_raw: true,
                        finish,
                    });
                    if !finish {
                        steps.push(view.send(RankSpan { span, ..result }));
                    }
                }
            }
        }
    }
    steps
}

/// Places behind the root's group along the ring.
fn distance_from_root(view: &View<'_>) -> u64 {
    let root = view.layout.group_of(view.layout.problem.root);
    let root = view.order.iter().position(|group| *group == root).unwrap_or(0) as u64;
    (view.position + view.groups() - root) % view.groups()
}

fn broadcast(view: &View<'_>) -> Vec<Step> {
    let (distance, root) = (distance_from_root(view), view.layout.problem.root);
    let mut steps = Vec::new();
    for index in 0..view.chunks {
        let (send, recv) = (view.part(Buffer::Send, view.chunks, index), view.part(Buffer::Recv, view.chunks, index));
        if distance == 0 {
            let src = RankSpan { rank: root, span: send };
            if view.groups() > 1 {
                steps.push(Step::Send { peer: view.next(), src });
            }
            steps.push(Step::Copy { src, dsts: view.at_all(recv) });
        } else {
            steps.push(Step::Recv { peer: view.previous(), dsts: view.at_all(recv) });
            if distance < view.groups() - 1 {
                steps.push(Step::Send { peer: view.next(), src: view.at_first(recv) });
            }
        }
    }
    steps
}

fn reduce(view: &View<'_>) -> Vec<Step> {
    let (distance, layout) = (distance_from_root(view), view.layout);
    let root = layout.problem.root;
    let mut steps = Vec::new();
    for index in 0..view.chunks {
        let span = |buffer| view.part(buffer, view.chunks, index);
        let output = RankSpan { rank: root, span: span(Buffer::Recv) };
        if view.groups() == 1 {
            let srcs = view.at_all(span(Buffer::Send));
            steps.push(Step::Reduce { srcs, dsts: vec![output], srcs_raw: true, finish: true });
            continue;
        }
        // The first of the chain is the group behind the root's.
        if distance == 1 {
            let combines = !view.sends_raw();
            if combines {
                steps.push(view.combine(span(Buffer::Send), span(Buffer::Scratch)));
            }
            let src = view.at_first(span(if combines { Buffer::Scratch } else { Buffer::Send }));
            steps.push(Step::Send { peer: view.next(), src });
            continue;
        }
        let is_root = distance == 0;
        let partial = view.at_first(span(Buffer::Scratch));
        steps.push(Step::RecvReduce {
            peer: view.previous(),
            srcs: view.at_all(span(Buffer::Send)),
            dsts: vec![if is_root { output } else { partial }],
            incoming_raw: distance == 2 % view.groups() && layout.sends_raw(view.previous()),
            srcs_raw: true,
            finish: is_root,
        });
        if !is_root {
            steps.push(Step::Send { peer: view.next(), src: partial });
        }
    }
    steps
}
