//! Steps of a rank's copy engine in a large operation: copies, meetings, reductions, by collective.
//! Pure, and the same on every rank.
//!
//! A rank's steps run in order, on a stream of the rank's GPU; streams of different ranks meet in words only. The rank's own stream does
//! the rest (`shim/src/cuda/device_initiated/large.rs`): it writes *ready*, moves what stays with the rank, combines, and waits. If the
//! service carries everything out, a second stream of its own moves the part that stays, and combines ([`keep_steps_of`]).
//!
//! Each GPU begins with the rank after its own, so that at any time no two push to the same one: those that do are less than
//! half as fast. A root's data for all goes from rank to rank.

use mccs_collective::{Buffer, Problem, Schedule, Shape};
use mccs_ipc::large::{LargeLayout, LargeWord, OwnPart, ShardPiece, Shards, SlotKind, own_part, stage};
use mccs_ipc::types::CollectiveKind;

/// Pieces in which a broadcast is passed on.
const RELAY_PIECES: u64 = 16;
/// Below this, telling of a piece costs more than it gains.
const RELAY_PIECE_BYTES_MIN: u64 = 4 << 20;
const RELAY_ALIGN: u64 = 4096;

/// A place in a rank's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Offset in what it sends.
    Send(u64),
    /// Offset in what it receives.
    Recv(u64),
    /// Offset in its block of slots.
    Slots(SlotKind, u64),
}

/// The next step of a rank's copy engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Waits until a rank's word is at least so much.
    Wait { word: LargeWord, rank: u32, value: u64 },
    /// Copies from the own memory to another rank's, or within the own.
    Push { from: Place, to: u32, at: Place, bytes: u64 },
    /// Combines a piece of the own shard, and tells that it is [`LargeWord::Reduced`].
    Combine { piece: u64 },
    /// Writes the own word when all before has arrived.
    Tell { word: LargeWord, value: u64 },
}

/// One of a rank's streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// A part that goes to other ranks.
    Push,
    /// The remains.
    Keep,
}

/// An operation that all ranks have called.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LargeCall {
    /// Number among the communicator's large operations, from 1.
    pub(crate) number: u64,
    pub(crate) element_bytes: u64,
    pub(crate) layout: LargeLayout,
}

/// A rank's steps.
pub(crate) fn steps_of(call: &LargeCall, schedule: &Schedule, rank: u32) -> Vec<Step> {
    let Problem { kind, nranks, .. } = schedule.problem;
    let ready = |peer| Step::Wait { word: LargeWord::Ready, rank: peer, value: call.number };
    let mut steps: Vec<_> = (0..nranks).map(ready).collect();
    match kind {
        CollectiveKind::AllReduce | CollectiveKind::ReduceScatter => combine(call, &schedule.problem, rank, &mut steps),
        CollectiveKind::Broadcast if nranks > 2 => relay(call, &schedule.problem, rank, &mut steps),
        _ => copy(call, schedule, rank, &mut steps),
    }
    steps.push(Step::Tell { word: LargeWord::Arrived, value: call.number });
    // Another communicator's operation comes into the slots next: not before the rank has read them.
    if let Some(shards) = shards_of(call, &schedule.problem).filter(|shards| shards.slots() == SlotKind::Shared) {
        steps.push(Step::Wait { word: LargeWord::Reduced, rank, value: stage(call.number, shards.pieces() - 1) });
    }
    steps
}

/// How an operation that combines is cut.
pub(crate) fn shards_of(call: &LargeCall, problem: &Problem) -> Option<Shards> {
    let &Problem { kind, nranks, count, .. } = problem;
    kind.reduces().then(|| Shards::new(call.layout, kind, nranks, count * call.element_bytes))
}

/// Steps for the part that stays with a rank, if the service does that, too.
pub(crate) fn keep_steps_of(call: &LargeCall, problem: &Problem, rank: u32) -> Vec<Step> {
    let &Problem { kind, nranks, root, count, .. } = problem;
    let mut steps = vec![Step::Wait { word: LargeWord::Ready, rank, value: call.number }];
    if kind.reduces() {
        let shards = Shards::new(call.layout, kind, nranks, count * call.element_bytes);
        for piece in 0..shards.pieces() {
            let value = stage(call.number, piece);
            steps.extend(shards.awaited(rank).map(|rank| Step::Wait { word: LargeWord::Pushed, rank, value }));
            steps.push(Step::Combine { piece });
        }
    } else if let Some(OwnPart { send_offset, recv_offset, count }) = own_part(kind, rank, root, count) {
        let bytes = |elements| elements * call.element_bytes;
        let (from, at) = (Place::Send(bytes(send_offset)), Place::Recv(bytes(recv_offset)));
        steps.push(Step::Push { from, to: rank, at, bytes: bytes(count) });
    }
    steps.push(Step::Tell { word: LargeWord::Kept, value: call.number });
    steps
}

/// The other ranks, from the next one on.
fn peers(rank: u32, nranks: u32) -> impl Iterator<Item = u32> {
    (1..nranks).map(move |distance| (rank + distance) % nranks)
}

/// A round of pushes begins on all ranks at once. A rank that is late would push to whom another pushes, which makes that one late, and so on.
fn meet(call: &LargeCall, rank: u32, nranks: u32, round: u64, steps: &mut Vec<Step>) {
    if nranks > 2 {
        let (word, value) = (LargeWord::Round, stage(call.number, round));
        steps.push(Step::Tell { word, value });
        steps.extend(peers(rank, nranks).map(|rank| Step::Wait { word, rank, value }));
    }
}

/// Every part goes from where it is to where it belongs.
fn copy(call: &LargeCall, schedule: &Schedule, rank: u32, steps: &mut Vec<Step>) {
    let Shape::SinglePass(moves) = &schedule.shape else { return };
    let Problem { kind, nranks, root, .. } = schedule.problem;
    let next = (rank + 1) % nranks;
    if kind == CollectiveKind::Gather && rank != root && next != root {
        // One after the other.
        steps.push(Step::Wait { word: LargeWord::Arrived, rank: next, value: call.number });
    }
    let from = steps.len();
    for (source, destinations) in moves.iter().filter_map(|of| Some((of.srcs.first()?, &of.dsts))) {
        for destination in destinations.iter().filter(|dst| source.rank == rank && dst.rank != rank) {
            let place = |buffer, elements: u64| match buffer {
                Buffer::Send => Place::Send(elements * call.element_bytes),
                Buffer::Recv | Buffer::Scratch => Place::Recv(elements * call.element_bytes),
            };
            steps.push(Step::Push {
                from: place(source.span.buffer, source.span.offset),
                to: destination.rank,
                at: place(destination.span.buffer, destination.span.offset),
                bytes: source.span.count * call.element_bytes,
            });
        }
    }
    let distance = |step: &Step| match step {
        Step::Push { to, .. } => (*to + nranks - rank) % nranks,
        _ => 0,
    };
    steps[from..].sort_by_key(distance);
}

/// A broadcast: pieces go from rank to rank, from the root on. Parts that all pass on to all would put less on each link, if only
/// one came to a rank at a time.
fn relay(call: &LargeCall, problem: &Problem, rank: u32, steps: &mut Vec<Step>) {
    let &Problem { nranks, root, count, .. } = problem;
    let to = (rank + 1) % nranks;
    if to == root {
        return;
    }
    let bytes = count * call.element_bytes;
    let pieces = (bytes / RELAY_PIECE_BYTES_MIN).clamp(1, RELAY_PIECES);
    let piece_bytes = bytes.div_ceil(pieces).next_multiple_of(RELAY_ALIGN);
    for piece in 0..pieces {
        let value = stage(call.number, piece);
        let offset = (piece * piece_bytes).min(bytes);
        let from = if rank == root {
            Place::Send(offset)
        } else {
            let before = (rank + nranks - 1) % nranks;
            steps.push(Step::Wait { word: LargeWord::Relayed, rank: before, value });
            Place::Recv(offset)
        };
        steps.push(Step::Push { from, to, at: Place::Recv(offset), bytes: piece_bytes.min(bytes - offset) });
        steps.push(Step::Tell { word: LargeWord::Relayed, value });
    }
}

/// Parts go to the owners of their shards, and what those have made of them to all who want it.
fn combine(call: &LargeCall, problem: &Problem, rank: u32, steps: &mut Vec<Step>) {
    let &Problem { kind, nranks, count, .. } = problem;
    let shards = Shards::new(call.layout, kind, nranks, count * call.element_bytes);
    let reduced = |rank, piece| Step::Wait { word: LargeWord::Reduced, rank, value: stage(call.number, piece) };
    let has_results = kind == CollectiveKind::AllReduce && !shards.is_whole();
    let pieces = shards.pieces();
    for piece in 0..=pieces {
        if piece < pieces {
            let before = shards.before(piece);
            steps.extend(before.into_iter().flat_map(|before| peers(rank, nranks).map(move |to| reduced(to, before))));
            meet(call, rank, nranks, piece, steps);
            steps.extend(peers(rank, nranks).map(|to| {
                let ShardPiece { offset, bytes } = shards.piece(to, piece);
                let at = Place::Slots(shards.slots(), shards.slot_offset(to, rank, piece));
                Step::Push { from: Place::Send(offset), to, at, bytes }
            }));
            steps.push(Step::Tell { word: LargeWord::Pushed, value: stage(call.number, piece) });
        }
        // While the kernel works on this piece, what it has made of the one before goes out.
        if let Some(before) = piece.checked_sub(1).filter(|_| has_results) {
            steps.push(reduced(rank, before));
            let ShardPiece { offset, bytes } = shards.piece(rank, before);
            let place = Place::Recv(offset);
            steps.extend(peers(rank, nranks).map(|to| Step::Push { from: place, to, at: place, bytes }));
        }
    }
}

#[cfg(test)]
#[path = "steps_tests.rs"]
mod tests;
