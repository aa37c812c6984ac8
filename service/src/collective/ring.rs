//! Ring algorithms, with any order of ranks and several channels, each with an order of its own.
//!
//! Position p of a ring receives from p - 1 and sends to p + 1. Reductions go round once; all-reduce then sends the
//! results round once more. Broadcast and reduce are chains from and to the root, cut into chunks that follow each other.

use mccs_ipc::types::CollectiveKind;

use super::Strategy;
use super::schedule::{Buffer, Channel, Problem, Schedule, Shape, Span, Step, part};

/// One rank's view of one channel.
struct View<'a> {
    problem: &'a Problem,
    order: &'a [u32],
    position: u64,
    /// The channel's part of `count` elements.
    offset: u64,
    count: u64,
    /// Where the channel's scratch begins.
    scratch_offset: u64,
    chunks: u64,
    align_count: u64,
}

/// The schedule, or `None` for a collective that has no ring form. `orders` are permutations of all ranks.
pub(super) fn build(problem: &Problem, orders: &[Vec<u32>], strategy: &Strategy) -> Option<Schedule> {
    let program: fn(&View<'_>) -> Vec<Step> = match problem.kind {
        CollectiveKind::AllReduce => all_reduce,
        CollectiveKind::AllGather => all_gather,
        CollectiveKind::ReduceScatter => reduce_scatter,
        CollectiveKind::Broadcast => broadcast,
        CollectiveKind::Reduce => reduce,
        _ => return None,
    };
    let align_count = strategy.align_count.max(1);
    let mut scratch_count = 0;
    let mut channels = Vec::with_capacity(orders.len());
    for (index, order) in orders.iter().enumerate() {
        let (offset, count) = part(problem.count, orders.len() as u64, index as u64, align_count);
        let chunks = strategy.chunks(count);
        let mut programs = vec![Vec::new(); order.len()];
        for (position, rank) in (0..).zip(order) {
            let scratch_offset = scratch_count;
            let view = View { problem, order, position, offset, count, scratch_offset, chunks, align_count };
            if let Some(slot) = programs.get_mut(*rank as usize) {
                *slot = program(&view);
            }
        }
        scratch_count += match problem.kind {
            CollectiveKind::ReduceScatter => {
                partial_slots(order.len() as u64, chunks) * part(count, chunks, 0, align_count).1
            }
            CollectiveKind::Reduce => count,
            _ => 0,
        };
        channels.push(Channel { programs });
    }
    Some(Schedule { problem: *problem, scratch_count, shape: Shape::Message(channels) })
}

/// Slots for partial results of a reduce-scatter.
///
/// A rank learns that its successor has read a partial result when word of it has come round the ring, n iterations
/// later. Each chunk takes n - 1 iterations and leaves n - 2 partial results, so n - 1 slots in rotation are never
/// overwritten too early.
fn partial_slots(nranks: u64, chunks: u64) -> u64 {
    let partials_per_chunk = nranks.saturating_sub(2);
    (chunks * partials_per_chunk).min(nranks - 1)
}

impl View<'_> {
    fn nranks(&self) -> u64 {
        self.order.len() as u64
    }

    /// Rank at a distance round the ring.
    fn at(&self, distance: u64) -> u32 {
        self.order[((self.position + distance) % self.nranks()) as usize]
    }

    fn next(&self) -> u32 {
        self.at(1)
    }

    fn previous(&self) -> u32 {
        self.at(self.nranks() - 1)
    }

    /// Position `back` places behind this one.
    fn behind(&self, back: u64) -> u64 {
        (self.position + 2 * self.nranks() - back) % self.nranks()
    }

    /// The channel's part of the block that belongs to the rank at `position`.
    fn block(&self, buffer: Buffer, position: u64) -> Span {
        let rank = u64::from(self.order[position as usize]);
        Span::new(buffer, rank * self.problem.count + self.offset, self.count)
    }

    /// Part `index` of the channel's part, of `parts`.
    fn part(&self, buffer: Buffer, parts: u64, index: u64) -> Span {
        let (offset, count) = part(self.count, parts, index, self.align_count);
        Span::new(buffer, self.offset + offset, count)
    }
}

fn all_reduce(view: &View<'_>) -> Vec<Step> {
    let nranks = view.nranks();
    let chunk = |buffer, position| view.part(buffer, nranks, position);
    let mut steps = Vec::with_capacity(4 * nranks as usize);
    for step in 0..nranks - 1 {
        let (sent, received) = (view.behind(step), view.behind(step + 1));
        let from = if step == 0 { Buffer::Send } else { Buffer::Recv };
        steps.push(Step::Send { peer: view.next(), src: chunk(from, sent) });
        steps.push(Step::RecvReduce {
            peer: view.previous(),
            local: chunk(Buffer::Send, received),
            dst: chunk(Buffer::Recv, received),
            incoming_raw: step == 0,
            local_raw: true,
            finish: step == nranks - 2,
        });
    }
    for step in 0..nranks - 1 {
        let (sent, received) = (view.behind(step + nranks - 1), view.behind(step));
        steps.push(Step::Send { peer: view.next(), src: chunk(Buffer::Recv, sent) });
        steps.push(Step::Recv { peer: view.previous(), dst: chunk(Buffer::Recv, received) });
    }
    steps
}

fn all_gather(view: &View<'_>) -> Vec<Step> {
    let own = Span::new(Buffer::Send, view.offset, view.count);
    let mut steps = vec![Step::Copy { src: own, dst: view.block(Buffer::Recv, view.position) }];
    for step in 0..view.nranks() - 1 {
        let src = if step == 0 { own } else { view.block(Buffer::Recv, view.behind(step)) };
        steps.push(Step::Send { peer: view.next(), src });
        steps.push(Step::Recv { peer: view.previous(), dst: view.block(Buffer::Recv, view.behind(step + 1)) });
    }
    steps
}

fn reduce_scatter(view: &View<'_>) -> Vec<Step> {
    let nranks = view.nranks();
    let slots = partial_slots(nranks, view.chunks);
    let slot_count = part(view.count, view.chunks, 0, view.align_count).1;
    let mut steps = Vec::new();
    for chunk in 0..view.chunks {
        let (chunk_offset, count) = part(view.count, view.chunks, chunk, view.align_count);
        let input = |position| {
            let block = view.block(Buffer::Send, position);
            Span::new(Buffer::Send, block.offset + chunk_offset, count)
        };
        let partial = |step: u64| {
            let slot = (chunk * (nranks - 2) + step) % slots;
            Span::new(Buffer::Scratch, view.scratch_offset + slot * slot_count, count)
        };
        for step in 0..nranks - 1 {
            let finish = step == nranks - 2;
            let output = || Span::new(Buffer::Recv, view.offset + chunk_offset, count);
            let src = if step == 0 { input(view.behind(1)) } else { partial(step - 1) };
            steps.push(Step::Send { peer: view.next(), src });
            steps.push(Step::RecvReduce {
                peer: view.previous(),
                local: input(view.behind(step + 2)),
                dst: if finish { output() } else { partial(step) },
                incoming_raw: step == 0,
                local_raw: true,
                finish,
            });
        }
    }
    steps
}

/// Places behind the root along the ring.
fn distance_from_root(view: &View<'_>) -> u64 {
    let root = view.order.iter().position(|rank| *rank == view.problem.root).unwrap_or(0) as u64;
    (view.position + view.nranks() - root) % view.nranks()
}

fn broadcast(view: &View<'_>) -> Vec<Step> {
    let distance = distance_from_root(view);
    let mut steps = Vec::new();
    for index in 0..view.chunks {
        let (send, recv) = (view.part(Buffer::Send, view.chunks, index), view.part(Buffer::Recv, view.chunks, index));
        if distance == 0 {
            steps.push(Step::Send { peer: view.next(), src: send });
            steps.push(Step::Copy { src: send, dst: recv });
        } else {
            steps.push(Step::Recv { peer: view.previous(), dst: recv });
            if distance < view.nranks() - 1 {
                steps.push(Step::Send { peer: view.next(), src: recv });
            }
        }
    }
    steps
}

fn reduce(view: &View<'_>) -> Vec<Step> {
    let distance = distance_from_root(view);
    let mut steps = Vec::new();
    for index in 0..view.chunks {
        let span = |buffer| view.part(buffer, view.chunks, index);
        if distance == 1 {
            steps.push(Step::Send { peer: view.next(), src: span(Buffer::Send) });
            continue;
        }
        let is_root = distance == 0;
        let dst = span(if is_root { Buffer::Recv } else { Buffer::Scratch });
        steps.push(Step::RecvReduce {
            peer: view.previous(),
            local: span(Buffer::Send),
            dst,
            // The first of the chain is the rank behind the root.
            incoming_raw: distance == 2 % view.nranks(),
            local_raw: true,
            finish: is_root,
        });
        if !is_root {
            steps.push(Step::Send { peer: view.next(), src: dst });
        }
    }
    steps
}
