//! One-shot algorithm: everybody sends to everybody at once; for short data between few hosts. It
//! moves more bytes than any other form, and takes half a round trip. Contributions are combined in
//! the same order everywhere, so that all ranks get the same bits.

use mccs_ipc::types::CollectiveKind;

use super::layout::Layout;
use super::schedule::{Buffer, Channel, Part, Program, RankSpan, Schedule, Shape, Span, Step};

/// Elements of scratch that all contributions together may take: it grows with their number as well as with their length,
/// and so much data goes round a ring faster.
const SCRATCH_COUNT_MAX: u64 = 1 << 20;

/// The schedule, or `None` for a collective that has no such form, or data too long for it. Combined data goes by one channel.
pub(super) fn build(layout: &Layout<'_>) -> Option<Schedule> {
    let channels = layout.strategy.channels_of(layout.problem.count, layout.orders.len() as u64);
    let count = layout.problem.count;
    let (channels, slots) = match layout.problem.kind {
        CollectiveKind::AllReduce => (vec![channel(layout, |group| all_reduce(layout, group))], layout.groups.len()),
        // Between two a ring has the same messages.
        CollectiveKind::AllGather if layout.groups.len() > 2 || channels == 1 => {
            let part = |index| layout.strategy.channel_part(count, channels, index);
            ((0..channels).map(|index| channel(layout, |group| all_gather(layout, group, part(index)))).collect(), 0)
        }
        _ => return None,
    };
    let scratch_count = (slots as u64).checked_mul(count).filter(|count| *count <= SCRATCH_COUNT_MAX)?;
    Some(Schedule { problem: *layout.problem, scratch_count, shape: Shape::Message(channels) })
}

/// A channel with these steps of each group.
fn channel(layout: &Layout<'_>, steps: impl Fn(u32) -> Vec<Step>) -> Channel {
    let program = |(number, ranks): (u32, &Vec<u32>)| Program { ranks: ranks.clone(), steps: steps(number) };
    Channel { programs: (0..).zip(&layout.groups).map(program).collect() }
}

/// The other groups, each group beginning with another, so that none is everybody's target at once.
fn others(layout: &Layout<'_>, own: u32) -> impl Iterator<Item = u32> + use<> {
    let groups = layout.groups.len() as u32;
    (1..groups).map(move |distance| (own + distance) % groups)
}

fn all_reduce(layout: &Layout<'_>, own: u32) -> Vec<Step> {
    let count = layout.problem.count;
    let slot = |group: u32| layout.at_first(own, Span::new(Buffer::Scratch, u64::from(group) * count, count));
    let whole = |buffer| layout.at_all(own, Span::new(buffer, 0, count));
    let mut steps =
        vec![Step::Reduce { srcs: whole(Buffer::Send), dsts: vec![slot(own)], srcs_raw: true, finish: false }];
    steps.extend(others(layout, own).map(|peer| Step::Send { peer, src: slot(own) }));
    steps.extend(others(layout, own).map(|peer| Step::Recv { peer, dsts: vec![slot(peer)] }));
    let srcs = (0..layout.groups.len() as u32).map(slot).collect();
    steps.push(Step::Reduce { srcs, dsts: whole(Buffer::Recv), srcs_raw: false, finish: true });
    steps
}

/// The all-gather of a part of each block.
fn all_gather(layout: &Layout<'_>, own: u32, Part { offset, count }: Part) -> Vec<Step> {
    let block = |rank| layout.at_all(own, layout.block(Buffer::Recv, rank, offset, count));
    let contribution = |rank: &u32| RankSpan { rank: *rank, span: Span::new(Buffer::Send, offset, count) };
    let mut steps = Vec::new();
    for peer in others(layout, own) {
        steps.extend(layout.ranks(own).iter().map(|rank| Step::Send { peer, src: contribution(rank) }));
    }
    steps.extend(layout.ranks(own).iter().map(|rank| Step::Copy { src: contribution(rank), dsts: block(*rank) }));
    for peer in others(layout, own) {
        steps.extend(layout.ranks(peer).iter().map(|rank| Step::Recv { peer, dsts: block(*rank) }));
    }
    steps
}
